"""Causal products and linear attention of one row, as streams make them."""

import gc
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import fa_cupy
from fa_cupy import causal_product, linear_attention, linear_attention_backward, reference
from fa_cupy.core import linear_problem, plan_cache
from fa_cupy.cpu import blas as cpu_blas
from tests.support import blas
from tests.support.products import check_close, draw, expand_heads, state_dtype
from tests.support.strategies import DTYPES, LAYOUTS, UNIT, by_dtype, lay

PACKAGE = str(Path(fa_cupy.__file__).parent)
DOUBLE = DTYPES[3]
FUNCTIONS = {
    "causal_product": causal_product,
    "linear_attention": linear_attention,
}
SHAPES = [
    ((1, 5), (1, 5), (1, 3)),
    ((8, 1, 64), (8, 1, 64), (8, 1, 64)),
    ((2, 6, 1, 4), (2, 3, 1, 4), (2, 3, 1, 7)),
    ((4, 1, 4), (1, 1, 4), (1, 1, 7)),
    ((1, 150), (1, 150), (1, 160)),
    # These go the general way.
    ((4, 1, 4), (1, 4), (1, 7)),
    ((2, 8, 1, 4), (2, 4, 1, 4), (2, 2, 1, 7)),
    ((3, 1, 0), (3, 1, 0), (3, 1, 2)),
    ((0, 1, 2), (0, 1, 2), (0, 1, 2)),
]


@pytest.fixture(autouse=True)
def _no_plans():
    plan_cache.plans.clear()


def no_checks(monkeypatch):
    def fail(*args, **options):
        raise AssertionError("a call that was seen before is checked again")

    monkeypatch.setattr(linear_problem, "product_problem", fail)


def bits(found):
    return [(x.tobytes(), x.shape, x.strides, x.dtype) for x in found]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(**by_dtype())
def test_one_row_agrees_with_the_reference(dtype, with_state, shapes, layout):
    arrays = [lay(np, x, layout) for x in draw(*shapes, dtype=dtype)]
    _, state = reference.causal_product(*arrays)
    initial = None
    if with_state:
        batch = (
            np.broadcast_shapes(*(x.shape[:-2] for x in arrays[1:])) if shapes != SHAPES[6] else ()
        )
        initial = draw((*batch, *state.shape[-2:]), dtype=state_dtype(dtype), seed=1)[0]
    want, last = reference.causal_product(*arrays, initial)
    options = {"initial_state": initial, "return_state": True}
    first = causal_product(*arrays, **options)
    again = causal_product(*arrays, **options)
    assert bits(first) == bits(again)
    own = np.empty(want.shape, dtype)
    found, state = causal_product(*arrays, **options, out=own)
    assert found is own
    assert own.tobytes() == first[0].tobytes()
    slack = 1000 * UNIT[state_dtype(dtype)]
    check_close(first[0], want, 2 * UNIT[dtype] * np.abs(want) + slack + 0 * want)
    check_close(expand_heads(state, last.shape), last, slack + 0 * last)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shapes", SHAPES[:5])
def test_a_call_that_was_seen_before_is_not_checked_again(monkeypatch, name, shapes):
    q, k, v = draw(*shapes)
    calls = [lambda: FUNCTIONS[name](q, k, v, return_state=True)]
    state = calls[0]()[1]
    calls.append(lambda: FUNCTIONS[name](q, k, v, initial_state=state, return_state=True))
    want = [bits(call()) for call in calls]
    no_checks(monkeypatch)
    assert [bits(call()) for call in calls] == want
    assert bits([FUNCTIONS[name](q, k, v)]) == want[0][:1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_that_was_seen_before_makes_few_calls(name):
    """Of functions of this package, that are written in Python."""
    q, k, v = draw(*SHAPES[1])
    _, state = FUNCTIONS[name](q, k, v, return_state=True)
    seen = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append(frame.f_code.co_name)

    for _ in range(2):
        seen.clear()
        sys.setprofile(note)
        try:
            FUNCTIONS[name](q, k, v, initial_state=state, return_state=True)
        finally:
            sys.setprofile(None)
    assert len(seen) <= 11, seen


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"return_state": 1.0}, "return_state is 1.0 (float), want a bool"),
        ({"initial_state": np.zeros((3, 4, 6))}, "initial_state has dtype float64, want float32"),
        ({"initial_state": [1.0]}, "initial_state is a list, want an array"),
        ({"k": np.zeros((3, 2, 4), np.float32)}, "v has length 1, k has 2"),
        ({"v": np.zeros((3, 1, 5))}, "v has dtype float64, q has float32"),
        ({"out": np.zeros((3, 1, 5))}, "out has dtype float64, want float32"),
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_are_those_of_the_first_call(name, arguments, text):
    q, k, v = draw((3, 1, 4), (3, 1, 4), (3, 1, 5))
    FUNCTIONS[name](q, k, v)
    if isinstance(state := arguments.get("initial_state"), np.ndarray):
        arguments = {"initial_state": state[..., : 5 + (name == "linear_attention")]}
    with pytest.raises((TypeError, ValueError)) as caught:
        FUNCTIONS[name](**({"q": q, "k": k, "v": v} | arguments))
    assert str(caught.value).startswith(f"{name}: {text}")


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (causal_product, {"reverse": 0.0}),
        (causal_product, {"algorithm": "recurrent"}),
        (causal_product, {"algorithm": ["auto"]}),
        (linear_attention, {"eps": True}),
        (linear_attention, {"eps": float("nan")}),
        (linear_attention, {"is_causal": "yes"}),
        (linear_attention, {"feature_map": "none"}),
    ],
)
def test_wrong_options_are_errors_after_right_ones(function, arguments):
    q, k, v = draw((3, 1, 4), (3, 1, 4), (3, 1, 5))
    options = {"eps": 1.0} if "eps" in arguments else {}
    function(q, k, v, **options)
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        function(q, k, v, **arguments)


def test_options_are_told_apart():
    q, k, v = draw((3, 1, 4), (3, 1, 4), (3, 1, 4))
    found = [
        linear_attention(q, k, v, feature_map=feature, eps=eps, return_state=True)
        for _ in range(2)
        for feature in ("elu1", "relu", "exp", "identity")
        for eps in (0, 1, 2.5)
    ]
    found += [causal_product(q, k, v, return_state=True) for _ in range(2)]
    half = len(found) // 2 - 1
    for i in range(half):
        assert bits(found[i]) == bits(found[half + i])
    assert len({row.tobytes() for row, _ in found[:half]}) == half == 12


def test_threads_do_not_share_scratch_memory():
    arrays = [draw((8, 1, 64), (8, 1, 64), (8, 1, 64), seed=seed) for seed in range(4)]
    want = [bits(linear_attention(*x, return_state=True)) for x in arrays]
    wrong = []

    def work(index):
        for _ in range(300):
            if bits(linear_attention(*arrays[index], return_state=True)) != want[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_numpy_alone_gives_the_same_states(monkeypatch):
    arrays = draw(*SHAPES[1])
    want = causal_product(*arrays, return_state=True)[1].tobytes()
    plan_cache.plans.clear()
    monkeypatch.setattr(cpu_blas, "LIBRARY", None)
    assert causal_product(*arrays, return_state=True)[1].tobytes() == want


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_outer_products(dtype):
    a, b = draw((3, 7, 1), (3, 1, 5), dtype=np.dtype(dtype))
    a[1, 2] = np.nan
    out = np.full((3, 7, 5), np.inf, dtype)
    call = cpu_blas.outer_products(a, b)
    for _ in range(2):
        call(out)
        np.testing.assert_array_equal(out, a * b)
        a += 1


def test_the_number_of_threads_does_not_show():
    """Also over all keys, and in gradients."""
    q, k, v, dout = draw(*[(2, 1500, 40)] * 4)
    one = [x[:, :1] for x in draw(*[(2, 1, 150)] * 3)]
    results = []
    for number in (1, 2, 8):
        with blas.threads(number):
            found = [
                linear_attention(q, k, v, is_causal=False),
                *causal_product(*one, return_state=True),
            ]
            for is_causal in (False, True):
                found += linear_attention_backward(dout, q, k, v, is_causal=is_causal)
            results.append([x.tobytes() for x in found])
    assert results[0] == results[1] == results[2]


def test_many_kinds_of_calls_keep_little_memory():
    q, k, v = draw((16, 1, 64), (16, 1, 64), (16, 1, 64))
    linear_attention(q, k, v)
    tracemalloc.start()
    try:
        for i in range(1000):
            linear_attention(q, k, v, eps=1 + i / 7)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 10 << 20
    finally:
        tracemalloc.stop()
