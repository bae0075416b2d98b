"""Gradients by the kernels for Hopper: which calls they get, and what is their own in them."""

import math
import threading

import numpy as np
import pytest

from fa_cupy import BitMask, attention, attention_backward, reference
from tests.support.gradients import check, hold, solve
from tests.support.kernel_attention import blocks_of
from tests.support.strategies import BFLOAT16, UNIT, Case, by_dtype, normal

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target
from tests.support import plans
from tests.support.device_arrays import Differing, bits, check_replays

HALF, SINGLE, DOUBLE = map(np.dtype, (np.float16, np.float32, np.float64))
DIMS = (64, 96, 128, 192, 256)  # of the rows of the table
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 193, 300)
TOP, BOTTOM = "top_left", "bottom_right"


@pytest.fixture(autouse=True)
def hopper(cupy):
    """Only where the kernels run; every test starts without plans."""
    if current_target() != "sm_90a":
        pytest.skip("the kernels run on sm_90a")
    plans.forget()
    yield
    plans.forget()


def kernels():
    """Sources of the kernels of all plans, None for a call that they did not take."""
    return [
        plan and [step.variant.kernel for step in plan.steps]
        for plan in plans.of("attention_backward")
    ]


def draw(*shape, dtype=HALF, seed=0):
    return normal(np.random.default_rng(seed + sum(shape)), shape, dtype)


def poison(nbytes):
    """Fill the memory that the next allocations get with NaN."""
    cp.cuda.Device().synchronize()
    blocks = [cp.full(nbytes, 0xFF, np.uint8) for _ in range(3)]
    cp.cuda.Device().synchronize()
    del blocks


def run_and_check(arrays, layouts=("dense",) * 5, dlse=False, **options):
    """Call on poisoned memory, compare with float64, and see that kernels did it."""
    case = Case(*arrays, *[None] * (5 - len(arrays)), options=options, layouts=layouts)
    plans.forget()
    poison(sum(4 * x.nbytes for x in arrays) + 2**20)
    found = check(cp, case, dlse)
    check_kernels(case)
    return found


def check_kernels(case, dbias=False):
    """All plans are those of one call, which these kernels took."""
    (names,) = kernels()
    wide = max(case.q.shape[-1], case.v.shape[-1]) > 128
    narrow = ["bwd_sm90", "bwd_convert_dq"]
    main = ["bwd_dkdv_sm90", "bwd_dq_sm90"] if wide else narrow
    of_bias = "bwd_dbias_sm90" if dbias and has_many_tiles(case) else "bwd_dbias_sm80"
    last = ["bwd_nonfinite", *[of_bias] * dbias]
    assert names == ["bwd_preprocess", *main, *last]


def has_many_tiles(case):
    """Whether the gradient of the bias is of pairs, with a tile for each multiprocessor."""
    lengths = case.q.shape[-2], case.k.shape[-2]
    tiles = math.prod(case.bias.shape[:-2]) * math.prod(-(-n // 128) for n in lengths)
    return case.bias.shape[-2:] == lengths and case.mask is None and tiles >= 132


class Call:
    """Arrays on the device and the gradients of them, made as often as one likes."""

    def __init__(self, q, k, v, dlse=False, **options):
        self.q, self.k, self.v = (cp.asarray(x) for x in (q, k, v))
        self.out, self.lse = attention(self.q, self.k, self.v, return_lse=True, **options)
        self.dout = cp.asarray(draw(*self.out.shape, dtype=q.dtype, seed=5))
        rows = draw(*self.lse.shape, dtype=np.dtype(np.float32), seed=6)
        self.dlse = cp.asarray(rows) if dlse else None
        self.options = options

    def __call__(self, **more):
        return attention_backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, dlse=self.dlse,
            **self.options, **more,
        )  # fmt: skip


def random_call(*shape, heads=None, dtype=BFLOAT16, seed=0, **how):
    kv = shape if heads is None else (*shape[:-3], heads, *shape[-2:])
    arrays = (draw(*s, dtype=dtype, seed=seed + i) for i, s in enumerate((shape, kv, kv)))
    return Call(*arrays, **how)


# Dims, lengths and bands


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 72, 96, 104, 128, 136, 192, 200, 256])
def test_dims(dim, dtype):
    q, k = draw(2, 3, 150, dim, dtype=dtype), draw(2, 3, 270, dim, dtype=dtype, seed=1)
    for v_dim in {dim, 8, 64, 136}:
        v = draw(2, 3, 270, v_dim, dtype=dtype, seed=2)
        run_and_check((q, k, v))
        run_and_check((q, k, v), dlse=True, is_causal=True, causal_align=BOTTOM)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("q_len", LENGTHS)
def test_lengths_and_bands(q_len, dim):
    windows = (64, 0), (0, 63), (130, 70), (None, 5)
    for i, k_len in enumerate(dict.fromkeys((q_len, 1, 64, 129, 300))):
        arrays = [draw(n, dim, seed=i) for n in (q_len, k_len, k_len)]
        run_and_check(arrays)
        for align in (TOP, BOTTOM):
            run_and_check(arrays, is_causal=True, causal_align=align)
            window = windows[(LENGTHS.index(q_len) + i) % 4]
            run_and_check(arrays, dlse=True, window=window, causal_align=align)


@pytest.mark.parametrize("dim", DIMS)
def test_long_calls(dim):
    arrays = [draw(1, 2, 2100, dim, seed=i) for i in range(3)]
    run_and_check(arrays)
    run_and_check(arrays, is_causal=True)
    run_and_check(arrays, window=(700, 300))


@pytest.mark.parametrize("dim", DIMS)
def test_queries_and_keys_that_see_nothing(dim):
    for lengths, align in (((300, 100), BOTTOM), ((100, 300), TOP)):
        arrays = [draw(2, n, dim, seed=i) for i, n in enumerate((*lengths, lengths[1]))]
        found = run_and_check(arrays, is_causal=True, causal_align=align)
        if align == BOTTOM:
            assert not found["q"][:, :200].any()
        else:
            assert not found["k"][:, 100:].any()
            assert not found["v"][:, 100:].any()


# Batch axes, heads and layouts


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("layout", ["dense", "blhd", "rows", "transposed", "reversed", "offset"])
@pytest.mark.parametrize("heads", [8, 2, 1])
def test_groups_and_layouts(heads, layout, dtype):
    shapes = (2, 8, 130, 64), (2, heads, 200, 64), (2, heads, 200, 40)
    arrays = [draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    run_and_check(arrays, (layout,) * 5)
    causal = {"is_causal": True, "causal_align": BOTTOM}
    run_and_check(arrays, (layout,) * 5, dlse=True, **causal)


@pytest.mark.parametrize("layout", ["dense", "blhd"])
def test_gradients_lie_as_their_arguments_do(layout):
    call = random_call(2, 8, 130, 64, heads=2)
    if layout == "blhd":
        for name in ("q", "k", "v"):
            x = cp.ascontiguousarray(getattr(call, name).view(np.int16).swapaxes(1, 2))
            setattr(call, name, x.view(BFLOAT16).swapaxes(1, 2))
    for x, like in zip(call(), (call.q, call.k, call.v), strict=True):
        assert (x.strides, x.dtype, x.shape) == (like.strides, like.dtype, like.shape)


def test_keys_of_all_entries():
    arrays = draw(3, 4, 130, 64), draw(200, 64, seed=1), draw(1, 200, 64, seed=2)
    run_and_check(arrays)
    run_and_check(arrays, dlse=True, is_causal=True, causal_align=TOP)


def test_the_gradient_of_a_sum():
    """It repeats one number along strides of 0."""
    call = random_call(2, 3, 130, 64, dtype=HALF)
    call.dout = cp.ones(call.out.shape, HALF)
    want = bits(call())
    call.dout = cp.broadcast_to(cp.ones((), HALF), call.out.shape)
    assert bits(call()) == want
    assert kernels()
    assert None not in kernels()


@pytest.mark.parametrize("need", [("q",), ("k",), ("v",), ("v", "q"), ("k", "v")])
@pytest.mark.parametrize("dim", [64, 256])
def test_what_is_asked_for(dim, need):
    call = random_call(2, 4, 200, dim, heads=2, is_causal=True)
    every = dict(zip("qkv", bits(call()), strict=True))
    assert bits(call(need=need)) == [every[name] for name in need]
    assert kernels()
    assert None not in kernels()


ELSEWHERE = {
    "wide dims of float32": (SINGLE, 264),
    "rows of odd bytes": (HALF, 65),
    "rows of 8 bytes more": (HALF, 68),
    "wide dims": (HALF, 264),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_the_kernels_do_not_take(what):
    """The products do."""
    dtype, dim = ELSEWHERE[what]
    arrays = [draw(2, 130, dim, dtype=dtype, seed=i) for i in range(3)]
    check(cp, Case(*arrays))
    assert not any(kernels())


def test_calls_of_nothing():
    for q_shape, k_shape in (
        ((0, 5, 64), (0, 7, 64)),
        ((2, 0, 64), (2, 7, 64)),
        ((2, 5, 64), (2, 0, 64)),
    ):
        call = Call(draw(*q_shape), draw(*k_shape), draw(*k_shape, seed=1))
        dq, dk, dv = call()
        assert (dq.shape, dk.shape, dv.shape) == (q_shape, k_shape, k_shape)
        assert not any(x.get().any() for x in (dq, dk, dv))
    assert not any(kernels())


# Scores that are more than products times a positive scale

OF_ALL = ("q", "k", "v")  # without the bias, whose gradient has a build of its own
# Options; axes of a bias, and its dtype.  Few, because each has builds of its own.
SCORES = {
    "a softcap": ({"softcap": 3.0}, None, None),
    "a negative scale": ({"scale": -0.1}, None, None),
    "a bias of keys": ({}, "key", SINGLE),
    "a bias of keys in 16 bits": ({}, "key", BFLOAT16),
    "a bias of queries": ({}, "query", HALF),
    "a bias of pairs": ({}, "pair", BFLOAT16),
    "a bias of pairs in 64 bits": ({"scale": 0.2}, "pair", DOUBLE),
    "a softcap and a bias of pairs": ({"softcap": 3.0}, "pair", SINGLE),
}
SCORES_OF_DIMS = [
    (40, "a softcap"),
    (64, "a softcap"),
    (64, "a bias of keys"),
    (64, "a bias of keys in 16 bits"),
    (64, "a bias of pairs"),
    (96, "a negative scale"),
    (96, "a bias of pairs in 64 bits"),
    (128, "a softcap"),
    (128, "a bias of queries"),
    (128, "a bias of pairs"),
    (128, "a softcap and a bias of pairs"),
    (192, "a bias of keys in 16 bits"),
    (256, "a softcap"),
    (256, "a bias of pairs"),
]


def bias_of(axes, dtype, batch, q_len, k_len, seed=0):
    """A bias with -inf in it, but no row of it."""
    lengths = {"key": (1, k_len), "query": (q_len, 1), "pair": (q_len, k_len)}[axes]
    bias = draw(*batch, *lengths, dtype=SINGLE, seed=seed)
    if axes != "query":
        bias[..., 1::7] = -np.inf
    return bias.astype(dtype)


def run_scored(arrays, bias=None, mask=None, dlse=False, dbias=False, **options):
    """As `run_and_check`; builds for the scores did it. `dbias` wants the gradient of the bias."""
    case = Case(*arrays, bias, mask, options=options)
    plans.forget()
    poison(sum(4 * x.nbytes for x in (*arrays, *([bias] if dbias else []))) + 2**20)
    (dout, dstat), found = solve(cp, case, dlse, need=None if dbias else OF_ALL)
    hold(case, found, dout, dstat if dlse else None, UNIT[case.q.dtype])
    check_kernels(case, dbias)
    (plan,) = plans.of("attention_backward")
    assert plan.steps[1].variant.score is not None
    assert plan.steps[1].variant.sparse == (mask is not None)
    return found


# Each has a build of its own for the gradient of the bias; those of the others are of `SCORES`.
GRADIENTS_OF_BIASES = [
    (64, "a bias of keys in 16 bits"),
    (64, "a bias of pairs"),
    (96, "a bias of pairs in 64 bits"),
    (128, "a bias of queries"),
    (128, "a bias of pairs"),
    (128, "a softcap and a bias of pairs"),
    (192, "a bias of keys in 16 bits"),
    (256, "a bias of pairs"),
]


@pytest.mark.parametrize(("dim", "what"), GRADIENTS_OF_BIASES)
def test_gradients_of_biases(dim, what):
    options, axes, dtype = SCORES[what]

    def run(batch, heads, q_len, k_len, bias_batch, **more):
        shapes = (*batch, q_len, dim), (*batch[:-1], heads, k_len, dim)
        arrays = [draw(*shapes[i > 0], dtype=BFLOAT16, seed=i) for i in range(3)]
        bias = bias_of(axes, dtype, bias_batch, q_len, k_len)
        return run_scored(arrays, bias, dbias=True, **options, **more)

    causal = {"is_causal": True, "causal_align": BOTTOM}
    run((2, 4), 4, 150, 270, ())
    run((2, 4), 2, 193, 301, (4,), dlse=True, **causal)
    run((2, 4), 1, 64, 129, (2, 1))
    run((1, 2), 2, 300, 128, (1, 2), dlse=True, window=(70, 20), causal_align=TOP)
    if (dim, what) == (128, "a bias of pairs"):  # all of these have builds of their own
        for q_len, k_len in ((1, 1), (1, 300), (65, 1)):
            run((2,), 2, q_len, k_len, (2,))
        run((2, 4), 2, 300, 400, (4,), mask=blocks_of(np.random.default_rng(1), 4, 300, 400))
    # More tiles than blocks at once, and fewer, which share them.
    run((2, 8), 4, 1000, 900, (), **causal)
    # As many as the kernel for SM90 wants, if they are of pairs.
    run((2, 2), 1, 1450, 1490, (), dlse=True)
    run((2, 4), 4, 700, 750, (4,), **causal)


@pytest.mark.parametrize("shape", [(700, 700), (4, 1, 700), (4, 700, 1), (4, 1, 1)], ids=str)
def test_gradients_of_a_bias_are_the_same_bits_every_time(shape):
    arrays = [cp.asarray(draw(2, 4, 700, 128, dtype=BFLOAT16, seed=i)) for i in range(4)]
    bias = cp.asarray(draw(*shape, dtype=SINGLE))
    out, lse = attention(*arrays[:3], bias, return_lse=True)
    rows = cp.asarray(draw(2, 4, 700, dtype=SINGLE))

    def call():
        return attention_backward(arrays[3], *arrays[:3], out, lse, bias, dlse=rows)

    want = call()
    differing = Differing(want)
    for i in range(100):
        if i % 20 == 0:
            poison(2**24)
        differing.look(call())
    cp.cuda.Device().synchronize()
    assert differing.count == 0
    check_replays(call, bits(want))


@pytest.mark.parametrize(("dim", "what"), SCORES_OF_DIMS)
def test_scores(dim, what):
    options, axes, dtype = SCORES[what]

    def run(batch, heads, q_len, k_len, bias_batch, **more):
        shapes = (*batch, q_len, dim), (*batch[:-1], heads, k_len, dim)
        arrays = [draw(*shapes[i > 0], dtype=BFLOAT16, seed=i) for i in range(3)]
        bias = axes and bias_of(axes, dtype, bias_batch, q_len, k_len)
        run_scored(arrays, bias, **options, **more)

    causal = {"is_causal": True, "causal_align": BOTTOM}
    run((2, 4), 4, 150, 270, ())
    run((2, 4), 2, 193, 301, (4,), dlse=True, **causal)
    run((2, 4), 1, 64, 129, (2, 1))
    run((1, 2), 2, 300, 128, (1, 2), dlse=True, window=(70, 20), causal_align=TOP)
    if axes is None or dim == 128:  # else these have builds of their own
        for q_len, k_len in ((1, 1), (1, 300), (65, 1)):
            run((2,), 2, q_len, k_len, (2,))
    run((1, 2), 2, 1000, 900, (2,), **causal)


@pytest.mark.parametrize(
    ("dim", "what"),
    [(64, "a bias of keys"), (64, "a softcap"), (128, "a bias of pairs"), (256, "a softcap")],
)
def test_scores_under_masks(dim, what):
    options, axes, dtype = SCORES[what]
    for heads, shape, bias_batch, more in (
        (2, (2, 4), (4,), {"is_causal": True, "causal_align": BOTTOM}),
        (4, (), (2, 1), {"dlse": True}),
    ):
        arrays = [
            draw(2, 4 if i == 0 else heads, 300 if i == 0 else 420, dim, dtype=BFLOAT16, seed=i)
            for i in range(3)
        ]
        bias = axes and bias_of(axes, dtype, bias_batch, 300, 420)
        run_scored(arrays, bias, mask_of(*shape, 300, 420, seed=dim), **options, **more)


@pytest.mark.parametrize("layout", ["transposed", "odd", "backwards"])
def test_a_bias_lies_anywhere(layout):
    arrays = [draw(2, 4, n, 128, dtype=BFLOAT16, seed=i) for i, n in enumerate((200, 330, 330))]
    bias = bias_of("pair", BFLOAT16, (4,), 200, 330)
    call = Call(*arrays, bias=cp.asarray(bias))
    want = bits(call(need=OF_ALL))
    x = np.full((4, 331, 201), 7, BFLOAT16).view(np.int16)
    if layout == "transposed":
        x[:, :330, :200] = bias.view(np.int16).swapaxes(1, 2)
        x = cp.asarray(x)[:, :330, :200].swapaxes(1, 2)
    else:
        x = x.swapaxes(1, 2).copy()
        x[:, 1:, 1:] = bias.view(np.int16)[:, :: -1 if layout == "backwards" else 1]
        x = cp.asarray(x)[:, 1:, 1:]
        x = x[:, ::-1] if layout == "backwards" else x
    call.options["bias"] = x.view(BFLOAT16)
    assert bits(call(need=OF_ALL)) == want
    assert None not in kernels()


@pytest.mark.parametrize("what", ["a softcap", "a bias of pairs"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_calls_with_scores_are_those_of_the_products(dim, what, monkeypatch):
    options, axes, dtype = SCORES[what]
    given = {**options, "is_causal": dim == 128}
    if axes:
        given["bias"] = cp.asarray(bias_of(axes, dtype, (), 3000, 3000))
    call = random_call(2, 8, 3000, dim, heads=4, dlse=True, **given)
    differing = Differing(call(need=OF_ALL))
    for _ in range(20):
        differing.look(got := call(need=OF_ALL))
    assert differing.count == 0
    assert kernels()
    assert None not in kernels()
    plans.gradients_by_products(monkeypatch)
    for x, y in zip(got, call(need=OF_ALL), strict=True):
        x, y = (z.get().astype(np.float64) for z in (x, y))
        assert np.isfinite(x).all()
        assert reference.relative_error(x, y) < 8e-3


@pytest.mark.parametrize("dtype", [BFLOAT16, DOUBLE], ids=str)
def test_a_graph_repeats_gradients_with_a_bias(dtype):
    """That of float64 is converted inside of the graph."""
    bias = cp.asarray(bias_of("pair", dtype, (8,), 700, 700))
    call = random_call(2, 8, 700, 96 if dtype == DOUBLE else 128, heads=2, bias=bias)
    want = bits(call(need=OF_ALL))
    check_replays(lambda: call(need=OF_ALL), want)


def test_the_gradient_of_a_bias_leaves_the_others_alone():
    bias = cp.asarray(bias_of("key", SINGLE, (4,), 130, 130))
    call = random_call(2, 4, 130, 64, bias=bias)
    found = call()
    assert found[3].shape == bias.shape
    for x, y in zip(found, call(need=OF_ALL), strict=False):
        assert reference.relative_error(*(z.get().astype(np.float64) for z in (x, y))) < 8e-3


# Masks, as arrays of bool and as bit masks that were made on the CPU or on the device

HOWS = ("array", "host", "device")


def mask_of(*shape, seed=0):
    """Blocks that are empty, full and seen in part, and rows and columns that are hidden."""
    mask = blocks_of(np.random.default_rng(seed), *shape)
    mask[..., 5:7, :], mask[..., 3] = False, False
    mask[..., 128:256] &= shape[-1] <= 256
    return mask


def as_given(mask, how):
    if how == "array":
        return cp.asarray(mask)
    return BitMask.from_dense(mask if how == "host" else cp.asarray(mask))


def run_masked(arrays, mask, how="array", dlse=False, **options):
    """As `run_and_check`; the rows for masks must have done it."""
    case = Case(*arrays, None, mask, options=options)
    plans.forget()
    poison(sum(4 * x.nbytes for x in arrays) + 2**20)
    found = check(cp, case, dlse, mask=as_given(mask, how))
    (plan,) = plans.of("attention_backward")
    assert plan.steps[1].variant.sparse
    return found


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dim", [8, 64, 72, 96, 128, 136, 192, 256])
def test_masks(dim, how, dtype):
    q, k = draw(2, 3, 300, dim, dtype=dtype), draw(2, 3, 420, dim, dtype=dtype, seed=1)
    v = draw(2, 3, 420, dim, dtype=dtype, seed=2)
    mask = mask_of(2, 3, 300, 420, seed=dim)
    found = run_masked((q, k, v), mask, how)
    assert not found["q"][:, :, 5:7].any()
    assert not found["k"][:, :, 3].any()
    assert not found["v"][:, :, 128:256].any()
    run_masked((q, k, v), mask[0, 1], how, dlse=True, is_causal=True, causal_align=BOTTOM)
    run_masked((q, k, v), mask[:, :1], how, window=(130, 70), causal_align=TOP)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("q_len", LENGTHS)
def test_lengths_under_masks(q_len, dim):
    for i, k_len in enumerate(dict.fromkeys((q_len, 1, 64, 129, 300))):
        arrays = [draw(n, dim, seed=i) for n in (q_len, k_len, k_len)]
        mask = blocks_of(np.random.default_rng(i), q_len, k_len)
        run_masked(arrays, mask, HOWS[i % 3], dlse=bool(i % 2))
        run_masked(arrays, mask, HOWS[i % 3], is_causal=True, causal_align=BOTTOM)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", [(2, 8), (1, 8), (2, 1), (8,), ()], ids=str)
@pytest.mark.parametrize("heads", [8, 2, 1])
def test_masks_of_groups(heads, shape, how):
    shapes = (2, 8, 200, 64), (2, heads, 330, 64), (2, heads, 330, 40)
    arrays = [draw(*s, seed=i) for i, s in enumerate(shapes)]
    run_masked(arrays, mask_of(*shape, 200, 330, seed=heads), how)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_masks_that_hide_all_or_nothing(dim, how):
    arrays = [draw(2, 300, dim, seed=i) for i in range(3)]
    found = run_masked(arrays, np.zeros((300, 300), bool), how)
    assert not any(x.any() for x in found.values())
    call = Call(*arrays, is_causal=True)
    want = bits(call())
    assert bits(call(mask=as_given(np.ones((300, 300), bool), how))) == want


def test_a_mask_that_is_the_same_for_all_queries():
    arrays = [draw(2, 3, 500, 64, seed=i) for i in range(3)]
    run_masked(arrays, mask_of(2, 1, 1, 500))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_masks_hide_never_shows(dim, how):
    q, k, v = (draw(2, 4, 400, dim, seed=i) for i in range(3))
    mask = mask_of(400, 400)
    mask[:, 300:310], mask[40] = False, False
    k[..., 300:305, :], v[..., 305:310, 2], q[..., 40, 3] = np.nan, np.inf, np.nan
    found = run_masked((q, k, v), mask, how)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in found.values())


@pytest.mark.parametrize("density", [1.0, 0.3, 0.02])
@pytest.mark.parametrize("dim", DIMS)
def test_large_masked_calls_are_those_of_the_products(dim, density, monkeypatch):
    call = random_call(2, 8, 3000, dim, heads=4, dlse=True)
    rng = np.random.default_rng(int(100 * density))
    board = rng.random((8, 24, 24)) < density
    mask = board.repeat(128, 1).repeat(128, 2)[:, :3000, :3000] & (rng.random((3000, 3000)) < 0.9)
    call.options = {"mask": BitMask.from_dense(mask)}
    call.out, call.lse = attention(call.q, call.k, call.v, return_lse=True, **call.options)
    got = call()
    assert kernels()
    assert None not in kernels()
    plans.gradients_by_products(monkeypatch)
    for x, y in zip(got, call(), strict=True):
        x, y = (z.get().astype(np.float64) for z in (x, y))
        assert np.isfinite(x).all()
        assert reference.relative_error(x, y) < 8e-3


def masked_call(dim, how, heads=2, **options):
    """Long enough that blocks of keys wait for each other, some of them for long."""
    call = random_call(2, 8, 1500, dim, heads=heads, **options)
    call.options["mask"] = as_given(mask_of(2, 8, 1500, 1500, seed=dim), how)
    call.out, call.lse = attention(call.q, call.k, call.v, return_lse=True, **call.options)
    return call


def repeat_beside_a_busy_stream(call):
    """A thousand times each, and neither result changes."""
    beside = random_call(1, 8, 2000, 128, seed=9)
    differing, others = Differing(call()), Differing(beside())
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    cp.cuda.Device().synchronize()
    for _ in range(1000):
        with streams[1]:
            others.look(beside())
        with streams[0]:
            differing.look(call())
    cp.cuda.Device().synchronize()
    assert differing.count == others.count == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_thousand_masked_runs_give_the_same_bits(dim, causal):
    call = masked_call(dim, "device", is_causal=causal)
    differing = Differing(call())
    for i in range(1000):
        if i % 100 == 0:
            poison(2**24)
        differing.look(call())
    assert differing.count == 0


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_thousand_masked_runs_beside_a_busy_stream_give_the_same_bits(dim):
    repeat_beside_a_busy_stream(masked_call(dim, "device"))


@pytest.mark.parametrize("how", HOWS)
def test_masks_of_threads_on_streams_of_their_own(how):
    """Which all find that no tables have been made."""
    want = bits(masked_call(64, how)())
    call, found = masked_call(64, how), {}
    cp.cuda.Device().synchronize()

    def work(i):
        with cp.cuda.Stream(non_blocking=True) as stream:
            found[i] = [call() for _ in range(20)]
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(bits(x) == want for i in range(4) for x in found[i])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dim", [64, 256])
def test_a_graph_repeats_masked_calls(dim, how, known):
    call = masked_call(dim, how)
    want = bits(call())
    if not known:  # no tables have been made of the mask
        call.options["mask"] = as_given(mask_of(2, 8, 1500, 1500, seed=dim), how)
    check_replays(call, want, warm_up=False)


# Accuracy of calls with more work than there are blocks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_large_calls_are_those_of_the_products(dim, causal, monkeypatch):
    call = random_call(2, 8, 3000, dim, heads=4, is_causal=causal, dlse=True)
    got = call()
    assert kernels()
    assert None not in kernels()
    plans.gradients_by_products(monkeypatch)
    for x, y in zip(got, call(), strict=True):
        x, y = (z.get().astype(np.float64) for z in (x, y))
        assert np.isfinite(x).all()
        assert reference.relative_error(x, y) < 8e-3


# Repeatability, streams, threads, graphs, memory

REPEATED = [
    (64, {}),
    (64, {"softcap": 3.0}),
    (128, {"is_causal": True}),
    (128, {"window": (300, 200)}),
    (256, {}),
]
by_kind = pytest.mark.parametrize(("dim", "options"), REPEATED, ids=str)


@by_kind
def test_a_thousand_runs_give_the_same_bits(dim, options):
    call = random_call(2, 16, 1500, dim, heads=4, dlse=True, **options)
    differing = Differing(call())
    for i in range(1000):
        if i % 100 == 0:
            poison(2**24)
        differing.look(call())
    assert differing.count == 0


@by_kind
def test_a_thousand_runs_beside_a_busy_stream_give_the_same_bits(dim, options):
    repeat_beside_a_busy_stream(random_call(2, 16, 1500, dim, heads=4, **options))


def test_threads_on_streams_of_their_own():
    calls = [random_call(2, 4, 700, 64, seed=10 * i, is_causal=True) for i in range(4)]
    wants, found = [bits(call()) for call in calls], {}
    cp.cuda.Device().synchronize()

    def work(i):
        with cp.cuda.Stream(non_blocking=True) as stream:
            found[i] = [calls[i]() for _ in range(20)]
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(wants):
        assert all(bits(x) == want for x in found[i])
    assert len(plans.of("attention_backward")) == 1


@pytest.mark.parametrize("need", [("q", "k", "v"), ("v",)])
@pytest.mark.parametrize("dim", [64, 256])
def test_a_graph_repeats_the_same_bits(dim, need):
    call = random_call(2, 8, 700, dim, heads=2, dlse=True, is_causal=True)
    want = bits(call(need=need))
    check_replays(lambda: call(need=need), want)


def test_memory_that_is_not_there_leaves_all_as_it_was():
    call = random_call(2, 8, 1000, 64)
    want = bits(call())
    pool = cp.cuda.MemoryPool()
    pool.set_limit(4 * call.q.nbytes)  # there are three results and a workspace
    with cp.cuda.using_allocator(pool.malloc), pytest.raises(cp.cuda.memory.OutOfMemoryError):
        call()
    assert bits(call()) == want


def test_a_call_keeps_nothing():
    """Its workspace goes back to the pool: two arrays' worth of sums, and two numbers a row."""
    call = random_call(2, 8, 2000, 64)
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        found = call()
    cp.cuda.Device().synchronize()
    assert pool.used_bytes() <= sum(x.nbytes for x in found) + 4096
    assert pool.total_bytes() <= 6 * call.q.nbytes
    del found
