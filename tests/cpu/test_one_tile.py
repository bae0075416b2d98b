"""Small problems, which are computed by the formula: when, what they give, and what they leave."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import attention
from fa_cupy.core import plan_cache
from fa_cupy.cpu.one_tile import OneTile
from tests.support import blas
from tests.support.blas import two_threads
from tests.support.strategies import DTYPES, Case, check_against_reference, normal

SINGLE, DOUBLE = DTYPES[2:]
with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)


@pytest.fixture
def answers(monkeypatch):
    """What `OneTile` said of each call: whether its results are right."""
    found, attend = [], OneTile.attend

    def noted(self, q, k, v, out, lse):
        found.append(attend(self, q, k, v, out, lse))
        return found[-1]

    monkeypatch.setattr(OneTile, "attend", noted)
    plan_cache.plans.clear()
    return found


def arrays(shape=(2, 3, 20, 8), keys=30, v_dim=5, dtype=SINGLE, seed=0):
    rng = np.random.default_rng(seed)
    *batch, _, dim = shape
    shapes = shape, (*batch, keys, dim), (*batch, keys, v_dim)
    return [normal(rng, shape, dtype) for shape in shapes]


@given(
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    batch=st.sampled_from([(), (1,), (3,), (2, 1, 3)]),
    dtype=st.sampled_from([SINGLE, DOUBLE]),
    options=st.sampled_from(
        [
            {},
            {"scale": -0.3},
            {"is_causal": True, "causal_align": "top_left"},
            {"window": (9, 4), "causal_align": "top_left"},
        ]
    ),
)
@settings(max_examples=60)
def test_it_agrees_with_the_reference(lengths, dims, batch, dtype, options):
    q, k, v = arrays((*batch, lengths[0], dims[0]), lengths[1], dims[1], dtype)
    out, lse = attention(q, k, v, return_lse=True, **options)
    check_against_reference(Case(q, k, v, options=options), out, lse)


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 64, 64), (1, 8, 256, 64), (300, 2, 1, 16)])
def test_small_problems_are_solved_by_it(answers, shape):
    q, k, v = arrays(shape, shape[-2], 16)
    out, lse = attention(q, k, v, return_lse=True)
    assert answers == [True]
    check_against_reference(Case(q, k, v), out, lse)


LEFT = {
    "many keys": ({"keys": 600}, {}),
    "no keys": ({"keys": 0}, {}),
    "no columns": ({"v_dim": 0}, {}),
    "softcap": ({}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": np.zeros(20, SINGLE)}),
    "mask": ({}, {"mask": np.ones((20, 30), bool)}),
    "bias": ({}, {"bias": np.zeros((20, 30), SINGLE)}),
    "a factor of 0": ({}, {"scale": 0.0}),
    "a large factor": ({}, {"scale": 1e9}),
    "a small factor": ({}, {"scale": 1e-9}),
    "half": ({"dtype": np.float16}, {}),
}


@pytest.mark.parametrize(("sizes", "options"), LEFT.values(), ids=LEFT)
def test_others_are_left_to_the_tiled_algorithm(answers, sizes, options):
    attention(*arrays(**sizes), **options)
    assert answers == []


def test_heads_that_share_keys_are_left_to_the_tiled_algorithm(answers):
    q, k, v = arrays((2, 4, 20, 8))
    attention(q, k[:, :2], v[:, :2])
    assert answers == []


WRONG = {
    "NaN of a query": ("q", np.nan),
    "infinite key": ("k", np.inf),
    "NaN of a value": ("v", np.nan),
    "products that overflow": ("q", 1e37),
}


@pytest.mark.parametrize(("name", "number"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_align": "top_left"}])
def test_what_is_not_finite_is_computed_again(answers, name, number, options):
    given = dict(zip("qkv", arrays(), strict=True))
    given[name][1, 2, 7] = number
    given["k"][1, 2] *= 10
    out, lse = attention(*given.values(), return_lse=True, **options)
    assert answers == [False]
    check_against_reference(Case(*given.values(), options=options), out, lse)


def test_rows_without_visible_keys_are_computed_again(answers):
    q, k, v = arrays()
    out, lse = attention(q, k, v, window=(2, 2), causal_align="top_left", return_lse=True)
    assert answers == [True]
    out, lse = attention(
        k, q, q, window=(2, 2), causal_align="top_left", return_lse=True
    )  # the last rows see no key
    assert answers == [True, False]
    assert not out[..., 25:, :].any()
    assert (lse[..., 25:] == -np.inf).all()


def test_products_far_below_all_others_have_no_weight(answers):
    """They overflow to -inf, and no other product that overflows would be less by some units."""
    q, k, v = arrays((20, 8))
    q[:, 0], k[:, 0], k[5, 0] = 1e19, 0, -1e20
    out, lse = attention(q, k, v, return_lse=True)
    assert answers == [True]
    check_against_reference(Case(q, k, v), out, lse)


def test_results_are_the_same_for_any_number_of_threads(answers):
    q, k, v = arrays((16, 256, 64), 256, 64)
    found = set()
    for threads in (1, 2, 3):
        with blas.threads(threads):
            found.add(b"".join(x.tobytes() for x in attention(q, k, v, return_lse=True)))
    assert len(found) == 1
    assert answers == [True] * 3


@pytest.mark.parametrize("turn", [lambda x: x[..., ::2], lambda x: x.swapaxes(0, 1)])
def test_the_output_may_have_any_strides(answers, turn):
    q, k, v = arrays((3, 3, 20, 8), v_dim=4)
    want = attention(q, k, v)
    out = turn(np.full((3, 3, 20, 8), np.nan, SINGLE))[..., :4]
    assert attention(q, k, v, out=out) is out
    assert out.tobytes() == want.tobytes()
    assert answers == [True] * 3  # one of them in between, for the output


def test_queries_in_another_order_of_memory(answers):
    q, k, v = arrays((2, 3, 20, 8))
    turned = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    out = attention(turned, k, v)
    assert out.strides[1] < out.strides[2]
    np.testing.assert_allclose(out, attention(q, k, v), rtol=1e-5, atol=1e-6)
    assert answers == [True]  # those in order
