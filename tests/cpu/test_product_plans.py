"""Plans of causal products on the CPU: calls of a kind that was seen before."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import fa_cupy
from fa_cupy import causal_product, causal_product_backward, linear_attention, reference
from fa_cupy.core import linear_problem, plan_cache
from fa_cupy.cpu import blas as cpu_blas
from fa_cupy.cpu import tile_ops
from fa_cupy.cpu.products import feature_maps, plans
from fa_cupy.tiled import chunked_scan
from tests.support import blas
from tests.support.products import check_close, draw, state_dtype
from tests.support.strategies import DTYPES, LAYOUTS, UNIT, by_dtype, lay

PACKAGE = str(Path(fa_cupy.__file__).parent)
SHAPES = [
    ((5, 3), (5, 3), (5, 2)),
    ((8, 100, 16), (8, 100, 16), (8, 100, 17)),
    ((2, 6, 70, 4), (2, 3, 70, 4), (2, 3, 70, 7)),
    ((1, 4, 65, 100), (1, 1, 65, 100), (1, 1, 65, 90)),
    ((3, 2, 2, 33, 8), (3, 2, 2, 33, 8), (3, 2, 2, 33, 8)),
    # These go the general way.
    ((4, 9, 4), (9, 4), (9, 7)),
    ((2, 8, 9, 4), (2, 4, 9, 4), (2, 2, 9, 7)),
    ((2, 0, 4), (2, 0, 4), (2, 0, 4)),
    ((0, 9, 4), (0, 9, 4), (0, 9, 4)),
    ((2, 9, 0), (2, 9, 0), (2, 9, 3)),
    ((2, 9, 3), (2, 9, 3), (2, 9, 0)),
]
PLANNED = SHAPES[:5]


@pytest.fixture(autouse=True)
def _no_plans():
    plan_cache.plans.clear()


def states_of(q, k, v, cols=0):
    """An initial state, and the gradient of the last one."""
    batch = max(k.shape[:-2], v.shape[:-2], key=lambda x: (len(x), x))
    shape = (*batch, k.shape[-1], v.shape[-1] + cols)
    return draw(shape, shape, dtype=state_dtype(q.dtype), seed=1)


def calls(q, k, v):
    """Calls of every function, with and without a state, by name."""
    state, dstate = states_of(q, k, v)
    weighted, _ = states_of(q, k, v, 1)
    dout = draw((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, seed=2)[0]
    again, last = {"initial_state": state}, {"return_state": True}
    return {
        "product": lambda: [causal_product(q, k, v)],
        "its state": lambda: causal_product(q, k, v, **last),
        "from a state": lambda: causal_product(q, k, v, **again, **last),
        "reverse": lambda: causal_product(q, k, v, reverse=True, **again, **last),
        "attention": lambda: [linear_attention(q, k, v)],
        "all keys": lambda: [linear_attention(q, k, v, is_causal=False)],
        "weights": lambda: linear_attention(q, k, v, initial_state=weighted, **last),
        "gradients": lambda: causal_product_backward(dout, q, k, v),
        "of states": lambda: causal_product_backward(dout, q, k, v, **again, dstate=dstate),
        "of reverse": lambda: causal_product_backward(dout, q, k, v, **again, reverse=True),
    }


def bits(found):
    return [(x.tobytes(), x.shape, x.strides, x.dtype) for x in found]


@pytest.mark.parametrize("shapes", PLANNED)
def test_a_call_that_was_seen_before_is_not_checked_again(monkeypatch, shapes):
    known = calls(*draw(*shapes))
    want = {name: bits(call()) for name, call in known.items()}

    def fail(*args, **options):
        raise AssertionError("a call that was seen before is checked again")

    monkeypatch.setattr(linear_problem, "product_problem", fail)
    assert {name: bits(call()) for name, call in known.items()} == want
    assert len({repr(x) for x in want.values()}) == len(want)  # options are told apart


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype())
def test_a_plan_agrees_with_the_reference(dtype, layout, shapes):
    q, k, v = (lay(np, x, layout) for x in draw(*shapes, dtype=dtype))
    known = calls(q, k, v)
    slack = 2000 * UNIT[state_dtype(dtype)]
    for _ in range(2):
        want, last = reference.causal_product(q, k, v, reverse=True)
        out, state = causal_product(q, k, v, reverse=True, return_state=True)
        check_close(out, want, 2 * UNIT[dtype] * np.abs(want) + slack + 0 * want)
        if state.shape == last.shape:
            check_close(state, last, slack + 0 * last)
        assert bits(known["gradients"]()) == bits(known["gradients"]())


@pytest.mark.parametrize("name", ["product", "attention", "all keys", "gradients"])
def test_a_short_call_makes_few_calls(name):
    """Of functions of this package, that are written in Python."""
    call = calls(*draw(*[(8, 16, 64)] * 3))[name]
    call()
    seen = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(frame.f_code.co_name)

    for _ in range(2):
        seen.clear()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert len(seen) <= (160 if name == "gradients" else 90), seen


@pytest.mark.parametrize("options", [{"reverse": 1.0}, {"return_state": None}, {"algorithm": "x"}])
def test_wrong_options_are_errors_after_right_ones(options):
    q, k, v = draw(*[(3, 20, 4)] * 3)
    causal_product(q, k, v)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        causal_product(q, k, v, **options)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("dout", np.zeros((3, 20, 5), np.float32)), ("dout", np.zeros((3, 20, 4))),
     ("dstate", np.zeros((3, 4, 5), np.float32)), ("reverse", "no")],
)  # fmt: skip
def test_wrong_gradients_are_errors_after_right_ones(argument, value):
    q, k, v = draw(*[(3, 20, 4)] * 3)
    causal_product_backward(q, q, k, v)
    with pytest.raises((TypeError, ValueError), match=argument):
        causal_product_backward(**({"dout": q, "q": q, "k": k, "v": v} | {argument: value}))


def test_gradients_that_are_finite_are_computed_once(monkeypatch):
    modes = []
    scan = chunked_scan.scan

    def spy(*arguments):
        modes.append(arguments[-1])
        return scan(*arguments)

    monkeypatch.setattr(chunked_scan, "scan", spy)
    q, k, v = draw(*[(2, 100, 8)] * 3)
    for _ in range(2):
        causal_product_backward(q, q, k, v)
    assert modes == [False] * 4
    modes.clear()
    q[0, 50, 0] = np.nan  # dk depends on it, dq does not
    dq, dk, _ = causal_product_backward(v, q, k, v)
    assert modes == [False, False, True]
    assert np.isfinite(dq).all()
    np.testing.assert_array_equal(np.isnan(dk).any(-1), [np.arange(100) <= 50, [False] * 100])


@pytest.mark.parametrize("dtype", [DTYPES[2], DTYPES[3]])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (100, 130), (300, 20)])
def test_the_number_of_threads_does_not_show(dtype, dims):
    """Where tasks are few, and where blocks are."""
    qk, of_v = ((9, 300, dim) for dim in dims)
    known = calls(*draw(qk, qk, of_v, dtype=dtype))
    results = []
    for number in (1, 2, 8):
        with blas.threads(number):
            results.append({name: bits(call()) for name, call in known.items()})
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("products", [1, 3])
def test_tasks_grow_with_the_work(products):
    machine, seen = plans.Machine(DTYPES[2], products), []
    for length in range(1, 3000, 50):
        x = np.broadcast_to(np.float32(0), (8, length, 64))
        problem = linear_problem.product_problem("causal_product", x, x, x)
        seen.append(8 // machine.largest(problem, 8))
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 4, 8}


def test_the_length_of_blocks_does_not_show(monkeypatch):
    known = calls(*draw(*[(4, 333, 20)] * 3))
    want = {name: bits(call()) for name, call in known.items()}
    sizes = plans.Machine.sizes
    for size in (1, 50_000, 200_000, 1 << 30):
        blocks = sizes.blocks._replace(size=size)
        monkeypatch.setattr(plans.Machine, "sizes", sizes._replace(blocks=blocks))
        assert {name: bits(call()) for name, call in known.items()} == want


def test_threads_do_not_share_scratch_memory():
    known = [calls(*draw(*[(4, 50, 16)] * 3, seed=seed)) for seed in range(4)]
    want = [{name: bits(call()) for name, call in each.items()} for each in known]
    wrong = []

    def work(index):
        for _ in range(20):
            if {name: bits(call()) for name, call in known[index].items()} != want[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_little_memory_is_kept():
    for shape in ((8, 100, 64), (300, 1200), (8, 10_000, 64)):
        for call in calls(*draw(*[shape] * 3)).values():
            call()
    unused = tile_ops.Steps._kept[DTYPES[2]]
    kept = [sum(x.nbytes for x in steps._scratch.values()) for steps in unused]
    assert 1 <= len(kept) <= 4
    assert max(kept) <= 4 << 20


def test_an_output_that_is_no_stack_is_written_whole():
    """Small ones by a copy; large ones go the general way, without one."""
    for length in (30, 3000):
        q, k, v = draw(*[(3, 4, length, 40)] * 3)
        out = np.full((3, length, 4, 40), np.nan, np.float32).swapaxes(1, 2)
        assert plans.is_stack_or_small(out) == (length == 30)
        want = causal_product(q, k, v)
        for _ in range(2):
            assert causal_product(q, k, v, out=out) is out
            assert out.tobytes() == want.tobytes()
            out[...] = np.nan


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("add", [False, True])
def test_a_stack_in_one_call_has_the_bits_of_single_products(monkeypatch, dtype, add):
    rng = np.random.default_rng(0)
    for rows, inner, cols in ((65, 64, 66), (3, 2000, 50), (200, 1, 30)):
        shapes = [(3, rows, inner), (3, inner, cols), (3, rows, cols)]
        a, b, out = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        for x in (a, a.swapaxes(1, 2).copy().swapaxes(1, 2), np.broadcast_to(a[1], a.shape)):
            found = []
            for batched in (cpu_blas.LIBRARY.batched, {np.dtype(dtype): None}):
                with monkeypatch.context() as patch:
                    patch.setattr(cpu_blas.LIBRARY, "batched", batched)
                    cpu_blas._gemm.cache_clear()
                    result = out.copy()
                    assert cpu_blas.matmul(x, b, result, add)
                    found.append(result.tobytes())
            assert found[0] == found[1]
    cpu_blas._gemm.cache_clear()


@pytest.mark.parametrize("name", feature_maps.IN_PLACE)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features_of_many_numbers_are_those_of_few(name, dtype):
    x = np.linspace(-100, 80, 10_000).astype(dtype)
    x[:5] = np.nan, np.inf, -np.inf, -0.0, np.finfo(dtype).tiny
    with np.errstate(all="ignore"):
        few = x.copy()
        for part in np.split(few, 10):
            feature_maps.IN_PLACE[name](part)
        feature_maps.IN_PLACE[name](x)
    np.testing.assert_array_equal(x, few)
