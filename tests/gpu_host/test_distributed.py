"""Causal products of ranks in two halves: NumPy in place of CuPy, kernels in the emulator."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

import fa_cupy
from fa_cupy.core import linear_problem
from fa_cupy.gpu.kernels.linear import cost_model
from tests.support.distributed_cases import LIMITS
from tests.support.kernels_for_cupy import array, packed_products
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator


def sources(sums, rows, cols, segments, turned):
    """Sums of segments, (entries, places, rows, columns)."""
    parts = np.asarray(sums)
    if turned:
        return parts.reshape(-1, segments + 1, cols, rows).swapaxes(-1, -2)
    return parts.reshape(-1, segments + 1, rows, cols)


def total(sums, rows, cols, segments, turned, found):
    """What the kernel of that name computes."""
    found[...] = sources(sums, rows, cols, segments, turned)[:, 1:].sum(axis=1)


def prefixes(before, has_before, before_turned, sums, rows, cols, segments, turned, to, size):
    """What the kernel of that name computes."""
    parts = sources(sums, rows, cols, segments, turned).copy()
    if has_before:
        assert before.size == size
        first = np.asarray(before)
    else:
        first = np.zeros(size, parts.dtype)
    if before_turned:
        first = first.reshape(-1, cols, rows).swapaxes(-1, -2)
    parts[:, 0] = first.reshape(-1, rows, cols)
    to.reshape(-1, segments, rows, cols)[...] = parts.cumsum(axis=1)[:, :-1]


@pytest.fixture(scope="module")
def states():
    """The module of halves, whose products are those of kernels."""
    with packed_products(EmulatorLauncher(multiprocessors=132)):
        module = importlib.import_module("fa_cupy.gpu.distributed.states")
        module._total, module._prefixes = total, prefixes
        yield module


def inputs(dtype, heads, length, dims):
    """Arrays dout, q, k, v of a product, and a state."""
    rng = np.random.default_rng(length)
    q_heads, k_heads = heads
    shapes = [
        (1, n, length, dim)
        for n, dim in (
            (q_heads, dims[1]),
            (q_heads, dims[0]),
            (k_heads, dims[0]),
            (k_heads, dims[1]),
        )
    ]
    arrays = [array((0.25 * rng.standard_normal(shape)).astype(dtype)) for shape in shapes]
    real = np.float64 if dtype == "float64" else np.float32
    return arrays, array(rng.standard_normal((2, 1, k_heads, *dims)).astype(real))


def in_segments(states, monkeypatch):
    """Let products have a pass for states, as longer ones do, with three segments at most."""
    choose = states.products.choice_of

    def choice_of(problems, launcher, algorithm, mapped, halved):
        names = "dtype", "batch", "qk_dim", "v_dim"
        longer = [
            SimpleNamespace(k_len=2**16, **{name: getattr(x, name) for name in names})
            for x in problems
        ]
        found = choose(longer, launcher, algorithm, mapped, halved)
        if found is None:
            return None
        assert found.states is not None
        rows = -(-problems[0].k_len // 64 // 3) * 64
        return found._replace(segments=-(-problems[0].k_len // rows), segment_rows=rows)

    monkeypatch.setattr(states.products, "choice_of", choice_of)


# float64 has kernels for SM80, which take one product a launch; gradients of it have no halves.
CASES = [
    ("float16", (2, 2), 300, (64, 64), True),
    ("float32", (2, 1), 270, (32, 64), True),
    ("float64", (2, 1), 200, (16, 32), False),
]


@pytest.mark.parametrize(("dtype", "heads", "length", "dims", "with_gradients"), CASES)
@pytest.mark.parametrize("reverse", [False, True])
def test_two_halves_are_one_product(
    states, monkeypatch, dtype, heads, length, dims, with_gradients, reverse
):
    """Output, gradients and states, from a state before all rows and a gradient after them."""
    (dout, q, k, v), (before, after) = inputs(dtype, heads, length, dims)
    in_segments(states, monkeypatch)
    problem = linear_problem.product_problem("f", q, k, v)
    half = states.forward(problem, q, k, v, reverse, b"record")
    plain = [np.asarray(x) for x in (q, k, v)]
    _, state = fa_cupy.causal_product(*plain, return_state=True)
    limit = LIMITS[dtype]
    np.testing.assert_allclose(half.state(), state, atol=limit * abs(state).max())
    wanted = fa_cupy.causal_product(*plain, initial_state=np.asarray(before), reverse=reverse)
    scale = abs(wanted.astype(float)).max()
    np.testing.assert_allclose(half.finish(before), wanted, atol=limit * scale)

    given = problem, dout, q, k, v, reverse, b"record"
    halves = states.backward(*given)
    assert (halves is not None) == with_gradients
    if halves is None:
        return
    own, own_after = halves.states()
    np.testing.assert_allclose(own, state, atol=limit * abs(state).max())
    queries = fa_cupy.prefix_state(plain[0], np.asarray(dout))
    queries = queries.reshape(*state.shape[:2], -1, *dims).sum(axis=2)
    np.testing.assert_allclose(own_after, queries, atol=limit * abs(queries).max())
    found = halves.finish(before, after)
    alone = [np.array(x) for x in states.backward(*given).finish(None, None)]
    for x, y in zip(
        alone,
        fa_cupy.causal_product_backward(np.asarray(dout), *plain, reverse=reverse)[:3],
        strict=True,
    ):
        scale = abs(y.astype(float)).max()
        np.testing.assert_allclose(x, y, atol=limit * scale)
    grads = fa_cupy.causal_product_backward(
        np.asarray(dout), *plain, initial_state=np.asarray(before), reverse=reverse,
        dstate=np.asarray(after),
    )  # fmt: skip
    for x, y in zip(found, grads[:3], strict=True):
        scale = abs(y.astype(float)).max()
        np.testing.assert_allclose(np.asarray(x), y, atol=limit * scale)


def test_calls_that_look_the_same_begin_at_once(states, monkeypatch):
    """Their record is kept, and arrays at other addresses are taken."""
    in_segments(states, monkeypatch)
    (_, q, k, v), _ = inputs("float16", (2, 2), 200, (64, 64))
    problem = linear_problem.product_problem("f", q, k, v)
    assert states.repeated("causal_product", (q, k, v), False) is None
    assert states.forward(problem, q, k, v, False, b"record") is not None
    begin = states.repeated("causal_product", (q, k, v), False)
    assert begin is not None
    assert states.repeated("causal_product", (q, k, v), True) is None
    assert states.repeated("causal_product", (q, k, v[..., :32]), False) is None
    half, record = begin()
    assert record == b"record"
    assert half.state().shape == (1, 2, 64, 64)


@pytest.mark.parametrize("entries", [1, 16, 400])
@pytest.mark.parametrize("jobs", [1, 3])
def test_products_in_two_halves_have_a_pass_for_states(entries, jobs):
    """Also where one pass would be faster, and with few rows that only this pass sums."""
    found = cost_model.choose(
        "bfloat16", entries, 2**16, 128, 128, "sm_90a", 132, jobs=jobs, halved=True
    )
    assert found.states is not None
    assert found.segments >= 4
