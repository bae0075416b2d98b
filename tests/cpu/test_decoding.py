"""Few queries to many keys: keys that are split over tasks, heads that share them."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_cupy import attention
from fa_cupy.cpu import decoding
from fa_cupy.tiled import attention as tiled_attention
from tests.support import blas
from tests.support.split_keys import split_few_keys
from tests.support.strategies import (
    DTYPES,
    EXTREMES,
    Case,
    by_dtype,
    cases,
    check_against_reference,
    normal,
)

SINGLE = DTYPES[2]
# A fixture that stays the same for all examples is what these tests mean.
with_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
with_threads = pytest.fixture(autouse=True, scope="module")(blas.two_threads)


@pytest.fixture
def few_keys(monkeypatch):
    """Keys are split although they are few, for any number of queries; counts the parts."""
    return split_few_keys(monkeypatch)


@given(case=cases())
@with_fixture
def test_parts_of_the_keys_agree_with_the_reference(few_keys, case):
    out, lse = attention(*case.native(np), return_lse=True, **case.options)
    check_against_reference(case, out, lse)


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("options", EXTREMES, ids=str)
def test_options_at_the_ends_of_the_arithmetic(few_keys, dtype, options):
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, shape, dtype) for shape in ((2, 3, 8), (2, 40, 8), (2, 40, 8)))
    out, lse = attention(q, k, v, return_lse=True, **options)
    check_against_reference(Case(q, k, v, options=options), out, lse)
    assert few_keys


@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0, 1e9, -1e9])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_parts_of_very_different_scores(few_keys, offset, bad):
    """Shares of parts come from maxima and sums: the log-sum-exp of 1e9 has no digits for them."""
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, shape, SINGLE) for shape in ((5, 8), (60, 8), (60, 4)))
    bias = (rng.normal(0, 40, 60) + offset).astype(SINGLE)
    mask = rng.random((5, 60)) < 0.5
    mask[1], mask[2, 20:], mask[3, :30] = False, False, False
    if bad is not None:
        v[45, 2] = bad
        k[50] = bad
        mask[:4, 45] = mask[:4, 50] = False
    for sinks in (None, np.array([offset], SINGLE)):
        options = {"sinks": sinks}
        out, lse = attention(q, k, v, bias, mask, return_lse=True, **options)
        check_against_reference(Case(q, k, v, bias, mask, options), out, lse)
    assert few_keys == [3, 3]


def test_finite_data_are_computed_once(few_keys, monkeypatch):
    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(tiled_attention, "attend_exactly", never)
    rng = np.random.default_rng(1)
    q, k = normal(rng, (5, 8), SINGLE), normal(rng, (60, 8), SINGLE)
    mask = rng.random((5, 60)) < 0.5
    mask[1] = False
    assert (attention(q, k, k, mask=mask)[1] == 0).all()


@pytest.mark.parametrize("count", [1, 2])
def test_long_keys_are_split(monkeypatch, count):
    """As many parts as tasks are wanted, each with enough keys, and the same bits in any thread."""
    found, parts = [], []
    attend = decoding.Part.attend

    def counted(part, steps, tile_n):
        parts.append(part)
        attend(part, steps, tile_n)

    monkeypatch.setattr(decoding.Part, "attend", counted)
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, (count, n, 64), SINGLE) for n in (1, 40_000, 40_000))
    for threads in (1, 2, 3, 8):
        with blas.threads(threads):
            found.append(b"".join(x.tobytes() for x in attention(q, k, v, return_lse=True)))
    assert len(set(found)) == 1
    assert len(parts) >= 8
    check_against_reference(Case(q, k, v), *attention(q, k, v, return_lse=True))
    parts.clear()
    attention(q, k[:, :500], v[:, :500])
    assert not parts


HEADS = [((2, 6, 1, 8), (2, 2, 30, 8)), ((2, 6, 1, 8), (2, 1, 30, 8)), ((6, 1, 8), (30, 8)),
         ((2, 1, 1, 8), (1, 1, 30, 8)), ((2, 6, 1, 8), (1, 6, 30, 8))]  # fmt: skip


@given(
    shapes=st.sampled_from(HEADS),
    of_bias=st.sampled_from([None, (), (6, 1), (2, 1, 1), (2, 6, 1)]),
    of_mask=st.sampled_from([None, (1,), (6, 1), (2, 1, 1), (2, 6, 1)]),
    of_sinks=st.sampled_from([None, (), (6,), (2, 1)]),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([None, "one head", "all heads"]),
    spoiled=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_heads_that_share_keys(shapes, of_bias, of_mask, of_sinks, dtype, values, spoiled, seed):
    rng = np.random.default_rng(seed)
    q, k = (normal(rng, shape, dtype) for shape in shapes)
    of_v = (*shapes[1][:-1], 5)
    if values is not None and len(of_v) == 4:
        of_v = (*of_v[:-3], 1 if values == "one head" else q.shape[-3], *of_v[-2:])
    v = normal(rng, of_v, dtype)
    heads = q.shape[:-2]

    def fits(shape):
        """The shape with as many heads as there are here."""
        return tuple(n if n == 1 else m for n, m in zip(shape, heads[-len(shape) :], strict=False))

    bias = None if of_bias is None else normal(rng, (*fits(of_bias[:-1]), 1, 30), np.float32)
    mask = None if of_mask is None else rng.random((*fits(of_mask[:-1]), 1, 30)) < 0.6
    sinks = None if of_sinks is None else normal(rng, (*fits(of_sinks), 1), dtype)
    if spoiled:
        k[..., 4, 3], v[..., 7, 1] = np.nan, np.inf
    options = {} if sinks is None else {"sinks": sinks}
    out, lse = attention(q, k, v, bias, mask, return_lse=True, **options)
    check_against_reference(Case(q, k, v, bias, mask, options), out, lse)


def test_keys_are_read_once_for_the_heads_that_share_them(monkeypatch):
    rows, scores_of = [], tiled_attention.scores_of

    def counted(steps, problem, x, queries, which, *more):
        rows.append((len(x.q), which))
        return scores_of(steps, problem, x, queries, which, *more)

    monkeypatch.setattr(tiled_attention, "scores_of", counted)
    rng = np.random.default_rng(3)
    q, k = normal(rng, (32, 1, 64), SINGLE)[None], normal(rng, (1, 8, 100, 64), SINGLE)
    attention(q, k, k)
    assert sum(n for n, _ in rows) == 8
    assert {which for _, which in rows} == {(0, 4)}
    rows.clear()
    attention(q, k, k, window=(50, 0), causal_align="bottom_right")  # the band is that of one query
    assert {which for _, which in rows} == {(0, 1)}
