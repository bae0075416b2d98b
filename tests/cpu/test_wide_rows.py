"""Attention whose tasks have a part of the dims each."""

import numpy as np
import pytest

from fa_cupy import BitMask, Score, attention
from fa_cupy.core import plan_cache
from fa_cupy.cpu import wide_rows
from tests.support import blas
from tests.support.blas import two_threads
from tests.support.strategies import Case, by_dtype, check_against_reference, normal

with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "causal_align": "bottom_right"},
    "first keys": {"is_causal": True, "causal_align": "top_left"},
    "window": {"window": (30, 2), "causal_align": "top_left"},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 40.0},
    "no scale": {"scale": 0.0},
}


@pytest.fixture(autouse=True)
def answers(monkeypatch):
    """What dims that are shared out, few of them, were answered with."""
    found, attend = [], wide_rows.attend

    def noted(*given, **options):
        found.append(attend(*given, **options))
        return found[-1]

    monkeypatch.setattr(wide_rows, "attend", noted)
    sizes = {"_LEAST_DIM": 40, "_LEAST_QUERIES": 3, "_LEAST_DIMS": 16, "_MOST_DIMS": 32}
    for name, value in sizes.items():
        monkeypatch.setattr(wide_rows, name, value)
    plan_cache.plans.clear()
    yield found
    plan_cache.plans.clear()


def arrays(dtype=np.float32, batch=(2, 3), lengths=(140, 150), dims=(70, 90)):
    rng = np.random.default_rng(0)
    shapes = (lengths[0], dims[0]), (lengths[1], dims[0]), (lengths[1], dims[1])
    return [normal(rng, (*batch, *shape), dtype) for shape in shapes]


def results(*given, **options):
    """Output and LSE, the same bits on any number of threads."""
    found = []
    for threads in (1, 2, 5):
        with blas.threads(threads):
            found.append(attention(*given, return_lse=True, **options))
    assert len({b"".join(x.tobytes() for x in pair) for pair in found}) == 1
    return found[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(**by_dtype())
def test_options(answers, dtype, options):
    q, k, v = arrays(dtype)
    out, lse = results(q, k, v, **options)
    check_against_reference(Case(q, k, v, options=options), out, lse)

    assert {*answers} == {True}


@pytest.mark.parametrize("lengths", [(3, 1), (3, 500), (200, 7)])
@pytest.mark.parametrize("dims", [(40, 1), (1, 40), (129, 17), (300, 300)])
def test_sizes(answers, lengths, dims):
    q, k, v = arrays(lengths=lengths, dims=dims, batch=())
    out, lse = results(q, k, v)
    check_against_reference(Case(q, k, v), out, lse)
    assert answers == [True] * 3


def test_bias_mask_and_sinks(answers):
    rng = np.random.default_rng(1)
    q, k, v = arrays(lengths=(60, 70))
    bias, sinks = normal(rng, (3, 1, 70), np.float32), normal(rng, (3, 1), np.float32)
    mask = rng.random((60, 70)) < 0.4
    mask[7] = False
    case = Case(q, k, v, bias, mask, {"sinks": sinks})
    for seen in (mask, BitMask(mask)):
        check_against_reference(case, *results(q, k, v, bias, seen, sinks=sinks))
    assert {*answers} == {True}
    answers.clear()
    check_against_reference(Case(q, k, v), *results(q, k, v, score=Score("s + 0 * i")))
    assert {*answers} == {True}


def test_arrays_that_are_not_dense(answers):
    q, k, v = (x.swapaxes(0, 1)[:, :, ::2] for x in arrays())
    out, lse = results(q, k, v)
    check_against_reference(Case(q, k, v), out, lse)
    out = np.full((3, 2, 90, 70), np.nan, np.float32).swapaxes(2, 3)
    attention(q, k, v, out=out)
    check_against_reference(Case(q, k, v), out, lse)
    assert {*answers} == {True}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_and_hidden(answers, bad):
    q, k, v = arrays(lengths=(60, 70), batch=())
    mask = np.ones((60, 70), bool)
    mask[:, 5] = False
    v[5, 80] = bad
    check_against_reference(Case(q, k, v, None, mask), *results(q, k, v, mask=mask))
    assert answers == [False] * 3  # of values
    k[5, 60] = bad
    check_against_reference(Case(q, k, v, None, mask), *results(q, k, v, mask=mask))
    assert answers == [False] * 6


def test_products_that_overflow(answers):
    """Queries are scaled first then, in tiles."""
    q, k, v = arrays(lengths=(60, 70), batch=())
    q, k = np.abs(q) * np.float32(1e37), -3 * np.abs(k)  # all of them to -inf
    options = {"scale": 1e-37}
    check_against_reference(Case(q, k, v, options=options), *results(q, k, v, **options))
    assert answers == [False] * 3


def test_problems_that_are_not_wide(answers):
    q, k, v = arrays(lengths=(600, 700), batch=())
    attention(q, k, v)  # too many scores
    attention(q[:2], k, v)
    attention(q[:60, :30], k[:70, :30], v[:70, :30])
    mask = BitMask(np.random.default_rng(0).random((140, 150)) < 0.5)
    attention(q[:140], k[:150], v[:150], mask=mask)  # in blocks
    assert answers == []
