"""Argument checks: every error with its text, and the canonical problem."""

import itertools
from decimal import Decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import attention, reference
from fa_cupy.core import attention_problem, checks
from tests.support.strategies import BFLOAT16, by_dtype, cases

SINGLE = np.dtype(np.float32)
DAY, TODAY = np.timedelta64(1, "D"), np.datetime64("2024-02-29")
NO_OPTIONS = {
    "scale": None,
    "is_causal": False,
    "causal_align": None,
    "window": None,
    "softcap": 0.0,
    "precision": None,
}


def make(q=(5, 8), k=(7, 8), v=(7, 4), bias=None, mask=None, out=None, **options):
    """Arguments of a call: zeros of these shapes, and options."""
    named = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "out": out}
    for arg, shape in named.items():
        if isinstance(shape, tuple):
            named[arg] = np.zeros(shape, np.bool_ if arg == "mask" else np.float32)
    return named | options


def problem(**arguments):
    arguments = NO_OPTIONS | make(**arguments)
    return attention_problem.attention_problem(
        *[arguments.pop(a) for a in attention_problem.ARGS], **arguments
    )


def call(xp, arguments):
    """Call `attention` on `xp`; arrays that were given as NumPy's go there."""
    arguments = {
        arg: xp.asarray(x) if isinstance(x, np.ndarray) and xp is not np else x
        for arg, x in arguments.items()
    }
    return attention(*[arguments.pop(a) for a in ("q", "k", "v")], **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (make(k=(7, 9), v=(7, 4)), "attention: k has head_dim 9, q has 8"),
        (make(v=(6, 4)), "attention: v has length 6, k has 7"),
        (make(q=(8,)), r"attention: q has shape (8,), want at least 2 axes (..., length, dim)"),
        (make(v=()), r"attention: v has shape (), want at least 2 axes (..., length, dim)"),
        (
            make(q=(2, 5, 8), k=(3, 7, 8)),
            "attention: k has batch shape (3,), which does not broadcast with (2,) of q",
        ),
        (
            make(q=(2, 5, 8), k=(1, 7, 8), v=(3, 7, 4)),
            "attention: v has batch shape (3,), which does not broadcast with (2,) of q, k",
        ),
        (
            make(q=(8, 5, 8), k=(2, 7, 8), v=(2, 7, 4)),  # never grouped
            "attention: k has batch shape (2,), which does not broadcast with (8,) of q",
        ),
        (
            make(q=(1, 8, 5, 8), k=(1, 3, 7, 8), v=(1, 3, 7, 4)),
            "attention: k has 3 heads, q has 8, want a divisor of it",
        ),
        (
            make(q=(1, 8, 5, 8), k=(1, 8, 7, 8), v=(1, 5, 7, 4)),
            "attention: v has 5 heads, q has 8, want a divisor of it",
        ),
        (
            make(q=(1, 6, 5, 8), k=(1, 2, 7, 8), v=(1, 3, 7, 4)),
            "attention: v has 3 heads, k has 2, want one to divide the other",
        ),
        (
            make(q=(1, 2, 5, 8), k=(1, 8, 7, 8), v=(1, 8, 7, 4)),
            "attention: k has batch shape (1, 8), which does not broadcast with (1, 2) of q",
        ),
        (
            make(q=(1, 8, 5, 8), k=(1, 16, 7, 8), v=(1, 2, 7, 4)),  # not every second head of k
            "attention: k has batch shape (1, 16), which does not broadcast with (1, 8) of q",
        ),
        (
            make(bias=(5, 6)),
            "attention: bias has shape (5, 6), want one that broadcasts to (5, 7)",
        ),
        (make(mask=(4, 1)), "attention: mask has shape (4, 1), want one that broadcasts to (5, 7)"),
        (make(mask=(2,)), "attention: mask has shape (2,), want one that broadcasts to (5, 7)"),
        (
            make(q=(1, 4, 5, 8), k=(1, 2, 7, 8), v=(1, 2, 7, 4), bias=(2, 5, 7)),
            "attention: bias has batch shape (2,), which does not broadcast with (1, 4) of q, k, v",
        ),
        (make(out=(5, 5)), "attention: out has shape (5, 5), want (5, 4)"),
        (make(scale=np.nan), "attention: scale is nan (float), want a finite number"),
        (make(scale=-np.inf), "attention: scale is -inf (float), want a finite number"),
        (
            make(scale=10**5000),
            "attention: scale is something that cannot be printed (int), want a",
        ),
        (make(scale=Decimal("sNaN")), "attention: scale is Decimal('sNaN') (Decimal), want a"),
        (
            make(window=(-(10**5000), 1)),
            "attention: window[0] is something that cannot be printed (int), want None or an int",
        ),
        (make(scale=10**400), "attention: scale is 1000"),
        (make(softcap=-1), "attention: softcap is -1 (int), want a finite number >= 0"),
        (make(softcap=np.inf), "attention: softcap is inf (float), want a finite number >= 0"),
        (
            make(causal_align="left"),
            "attention: causal_align is 'left' (str), want 'top_left' or 'bottom_right'",
        ),
        (
            make(is_causal=True),
            "attention: is_causal with 5 queries and 7 keys needs causal_align=",
        ),
        (make(is_causal=True), "'top_left'"),
        (make(is_causal=True), "'bottom_right'"),
        (make(window=(1, None)), "attention: window with 5 queries and 7 keys needs causal_align="),
        (
            make(window=(-1, 2)),
            "attention: window[0] is -1 (int), want None or an int >= 0",
        ),
        (make(precision="tf16"), "attention: precision is 'tf16' (str), want None or 'tf32'"),
        (make(precision=32), "attention: precision is 32 (int), want None or 'tf32'"),
    ],
    ids=lambda x: x.split(":")[-1][:40] if isinstance(x, str) else "",
)
def test_value_errors(xp, arguments, text):
    with pytest.raises(ValueError, match=r"^attention: ") as caught:
        call(xp, arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (make(q=None), "attention: q is None, want an array"),
        (make(v=None), "attention: v is None, want an array"),
        (make(q=[[1.0]]), "attention: q is a list, want an array"),
        (make(k=2.0), "attention: k is a float, want an array"),
        (make(bias=np.float32(2)), "attention: bias is a numpy.float32, want an array"),
        (make(mask=True), "attention: mask is a bool, want an array"),
        (make(out=[0]), "attention: out is a list, want an array"),
        (make(k=np.zeros((7, 8))), "attention: k has dtype float64, q has float32"),
        (make(v=np.zeros((7, 4), np.float16)), "attention: v has dtype float16, q has float32"),
        (
            make(q=np.zeros((5, 8), int)),
            "attention: q has dtype int64, want float16, bfloat16, float32 or float64",
        ),
        (make(k=np.zeros((7, 8), np.complex64)), "attention: k has dtype complex64, want float16"),
        (make(bias=np.zeros((5, 7), bool)), "attention: bias has dtype bool, want float16"),
        (
            make(mask=np.zeros((5, 7), int)),
            "attention: mask has dtype int64, want bool (cast it: mask != 0)",
        ),
        (make(mask=np.zeros((5, 7), np.float32)), "attention: mask has dtype float32, want bool"),
        (make(out=np.zeros((5, 4))), "attention: out has dtype float64, want float32"),
        (make(scale="1"), "attention: scale is '1' (str), want a finite number"),
        (make(scale=1j), "attention: scale is 1j (complex), want a finite number"),
        (make(scale=np.complex64(1)), "(complex64), want a finite number"),
        (make(scale=True), "attention: scale is True (bool), want a finite number"),
        (make(scale=[1.0]), "attention: scale is [1.0] (list), want a finite number"),
        (make(scale=np.eye(2)), "attention: scale is array([[1., 0.], [0., 1.]]) (ndarray), want"),
        (make(window=(True, 3)), "attention: window[0] is True (bool), want None or an int >= 0"),
        (make(scale=np.array(True)), "attention: scale is array(True) (ndarray), want a finite"),
        (make(scale=np.array(1j)), "attention: scale is array(0.+1.j) (ndarray), want a finite"),
        (
            make(is_causal=10**5000),
            "attention: is_causal is something that cannot be printed (int)",
        ),
        (make(softcap=None), "attention: softcap is None (NoneType), want a finite number >= 0"),
        (make(is_causal="no"), "attention: is_causal is 'no' (str), want a bool"),
        (make(is_causal=2), "attention: is_causal is 2 (int), want a bool"),
        (make(is_causal=None), "attention: is_causal is None (NoneType), want a bool"),
        (make(return_lse=1.0), "attention: return_lse is 1.0 (float), want a bool"),
        (make(is_causal=DAY), f"attention: is_causal is {DAY!r} (timedelta64), want a bool"),
        (make(is_causal=TODAY), f"attention: is_causal is {TODAY!r} (datetime64), want a bool"),
        (make(return_lse=np.timedelta64(0, "s")), "(timedelta64), want a bool"),
        (make(scale=DAY), f"attention: scale is {DAY!r} (timedelta64), want a finite number"),
        (make(softcap=TODAY), "(datetime64), want a finite number >= 0"),
        (make(window=(DAY, 0)), f"attention: window[0] is {DAY!r} (timedelta64), want None or"),
        (make(window=(0, np.array(1, "m8[s]"))), "(ndarray), want None or an int >= 0"),
        (make(window=3), "attention: window is 3 (int), want a pair (left, right)"),
        (make(window=(3,)), "attention: window is (3,) (tuple), want a pair (left, right)"),
        (
            make(window=(3, 1.5)),
            "attention: window[1] is 1.5 (float), want None or an int >= 0",
        ),
    ],
    ids=lambda x: x.split(":")[-1][:40] if isinstance(x, str) else "",
)
def test_type_errors(xp, arguments, text):
    with pytest.raises(TypeError, match=r"^attention: ") as caught:
        call(xp, arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (object, "dtype object"),
        (">f4", "dtype >f4, want native byte order (float32)"),
        (">f8", "dtype >f8, want native byte order (float64)"),
        (np.longdouble, f"dtype {np.dtype(np.longdouble)}"),
        (ml_dtypes.float8_e4m3fn, "dtype float8_e4m3fn"),
        ("S4", "dtype |S4"),
        ("M8[s]", "dtype datetime64[s]"),
        ([("a", "f4")], "dtype [('a', '<f4')]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("arg", ["q", "k", "v", "bias"])
def test_dtypes_that_only_numpy_has(arg, dtype, text):
    shape = {"q": (5, 8), "k": (7, 8), "v": (7, 4), "bias": (5, 7)}[arg]
    with pytest.raises(TypeError, match=f"^attention: {arg} has dtype") as caught:
        call(np, make(**{arg: np.zeros(shape, dtype)}))
    assert text in str(caught.value)


def test_masked_arrays():
    with pytest.raises(TypeError, match="attention: k is a masked array"):
        call(np, make(k=np.ma.zeros((7, 8), np.float32)))


def test_read_only_out():
    out = np.zeros((5, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="attention: out is read-only, want a writeable array"):
        call(np, make(out=out))


@pytest.mark.parametrize("arg", ["q", "k", "v", "bias"])
def test_out_must_not_overlap_an_input(xp, arg):
    memory = xp.zeros((2, 6, 6), np.float32)
    arguments = {a: xp.zeros((6, 6), np.float32) for a in ("q", "k", "v", "bias")}
    arguments[arg] = memory[0]
    with pytest.raises(ValueError, match=f"attention: out overlaps {arg} in memory"):
        attention(**arguments, out=memory[0])
    with pytest.raises(ValueError, match=f"attention: out overlaps {arg} in memory"):
        attention(**arguments, out=memory.reshape(-1)[35:71].reshape(6, 6))
    attention(**arguments, out=memory[1])


def test_out_may_lie_between_the_elements_of_an_input(xp):
    memory = xp.ones((6, 12), np.float32)
    q, out = memory[:, ::2], memory[:, 1::2]
    attention(q, q, q, out=out)
    assert bool((memory == 1).all())


def test_out_must_not_overlap_itself(xp):
    q = xp.zeros((6, 6), np.float32)
    out = xp.broadcast_to(xp.zeros(6, np.float32), (6, 6))
    if xp is np:
        out = np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (6, 6), (0, 4))
    with pytest.raises(ValueError, match="want every element at an address of its own"):
        attention(q, q, q, out=out)


def test_nothing_is_allocated_before_the_checks(monkeypatch):
    arguments = make(k=(7, 9))
    for name in ("empty", "zeros", "empty_like", "full"):
        monkeypatch.setattr(np, name, None)
    with pytest.raises(ValueError, match="attention: k has head_dim 9, q has 8"):
        call(np, arguments)


@pytest.mark.parametrize("value", [True, False, 0, 1, np.True_, np.False_, np.int8(1)])
def test_what_counts_as_a_bool(value):
    assert checks.flag("f", "x", value) is bool(value)


@pytest.mark.parametrize(
    "value",
    [2, 0.5, np.float16(0.5), np.int64(2), ml_dtypes.bfloat16(0.5), Fraction(1, 2), np.array(0.5)],
    ids=repr,
)
def test_what_counts_as_a_number(value):
    got = checks.finite("f", "x", value)
    assert type(got) is float
    assert got == float(value)


# The canonical problem


def test_defaults():
    p = problem(q=(2, 5, 16), k=(7, 16), v=(7, 4))
    assert (p.batch, p.q_len, p.k_len, p.head_dim, p.v_dim) == ((2,), 5, 7, 16, 4)
    assert p.out_shape == (2, 5, 4)
    assert (p.scale, p.softcap, p.precision, p.lower, p.upper) == (0.25, 0.0, None, None, None)
    assert p.q == ((2, 5, 16), (320, 64, 4))
    assert p.k == ((2, 7, 16), (0, 64, 4))
    assert p.v == ((2, 7, 4), (0, 16, 4))
    assert p.bias is p.mask is p.bias_dtype is None
    assert p.dtype == SINGLE
    assert hash(p) == hash(problem(q=(2, 5, 16), k=(7, 16), v=(7, 4)))


def test_grouped_heads_split_the_head_axis():
    p = problem(q=(3, 8, 5, 16), k=(3, 2, 7, 16), v=(1, 2, 7, 4), mask=(8, 1, 7), bias=(5, 1))
    assert p.batch == (3, 2, 4)
    assert p.q.strides == (8 * 320, 4 * 320, 320, 64, 4)
    assert p.k.strides == (2 * 448, 448, 0, 64, 4)
    assert p.v.strides == (0, 112, 0, 16, 4)
    assert p.mask.strides == (0, 28, 7, 0, 1)
    assert p.bias.strides == (0, 0, 0, 4, 0)
    assert p.out_shape == (3, 8, 5, 4)


def test_precision_counts_for_float32_only():
    assert problem(precision="tf32").precision == "tf32"
    arrays = [np.zeros((5, 8), BFLOAT16)] * 3
    options = NO_OPTIONS | {"precision": "tf32"}
    assert attention_problem.attention_problem(*arrays, None, None, **options).precision is None


def expanded(array, p):
    """`array` over the axes of `p.batch`, by copying: what a view of it must show."""
    heads = p.out_shape[-3] if len(p.out_shape) > 2 else 1
    if array.ndim > 2 and 1 < array.shape[-3] < heads:
        array = np.repeat(array, heads // array.shape[-3], axis=-3)
    rows, cols = np.broadcast_shapes(array.shape, (1, 1))[-2:]
    full = np.broadcast_to(array, (*p.out_shape[:-2], rows, cols))
    return full.reshape(*p.batch, rows, cols)


@given(case=cases())
def test_views_show_what_broadcasting_gives(case):
    arrays = case.native(np)
    p = attention_problem.attention_problem(*arrays, **(NO_OPTIONS | case.options))
    views = (p.q, p.k, p.v, p.bias, p.mask)
    for array, v in zip(arrays, views, strict=True):
        if array is None or (array is arrays[4] and not p.k_len):  # a mask of no keys hides none
            assert v is None
            continue
        seen = attention_problem.view(np, array, v)
        want = np.broadcast_to(expanded(array, p), v.shape)
        assert seen.shape == v.shape
        assert seen.tobytes() == want.tobytes()


@given(case=cases(dtypes=[SINGLE]))
def test_out_view_splits_heads_as_the_problem_does(case):
    p = attention_problem.attention_problem(*case.arrays, **(NO_OPTIONS | case.options))
    for shape in (p.out_shape, p.out_shape[:-1]):
        out = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        v = attention_problem.out_view(p, out.shape, out.strides)
        seen = attention_problem.view(np, out, v)
        assert seen.tobytes() == out.tobytes()
        assert seen.shape[: len(p.batch)] == p.batch


@given(
    lengths=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    is_causal=st.booleans(),
    align=st.sampled_from(["top_left", "bottom_right"]),
    window=st.none() | st.tuples(*[st.none() | st.integers(0, 12)] * 2),
)
def test_band_is_what_causality_and_window_leave(lengths, is_causal, align, window):
    q_len, k_len = lengths
    lower, upper = checks.band("f", is_causal, align, window, q_len, k_len)
    want = reference.visible(q_len, k_len, is_causal=is_causal, causal_align=align, window=window)
    for i, j in itertools.product(range(q_len), range(k_len)):
        seen = (lower is None or i + lower <= j) and (upper is None or j <= i + upper)
        assert seen == want[i, j]
    if want.size and want.all():
        assert lower is upper is None


@pytest.mark.parametrize(**by_dtype())
def test_a_column_of_length_one_is_contiguous(dtype):
    x = np.zeros((5, 9), dtype)[:, ::9]
    p = attention_problem.attention_problem(x, x, x, None, None, **NO_OPTIONS)
    assert p.q.strides == (9 * dtype.itemsize, dtype.itemsize)
