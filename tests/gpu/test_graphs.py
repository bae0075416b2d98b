"""Graphs of CUDA: what a captured call leaves behind is its own, however often it is launched.

Each call is captured after one call to warm up. Then all that it gave back to the pool is taken by
arrays of a pattern, the inputs change in place, and the graph runs three times: no byte of the
pattern may change, and results are those of a call on the same inputs, bit for bit.
"""

import contextlib

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask
from tests.support.strategies import BFLOAT16

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver import interop
from fa_cupy.gpu.driver.devices import current_target
from tests.support.device_arrays import uniform

HALF, SINGLE, DOUBLE = map(np.dtype, (np.float16, np.float32, np.float64))
PATTERN = 0x5A
ROUNDS = 3
MODES = {
    "global": cp.cuda.runtime.streamCaptureModeGlobal,
    "thread_local": cp.cuda.runtime.streamCaptureModeThreadLocal,
    "relaxed": cp.cuda.runtime.streamCaptureModeRelaxed,
}
by_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def pool(cupy):
    """CuPy's pool while a test runs: a new one, in all threads."""
    if current_target() is None:
        pytest.skip("the kernels do not run on this device")
    found = cp.cuda.MemoryPool()
    cp.cuda.set_allocator(found.malloc)
    yield found
    cp.cuda.Device().synchronize()
    cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)


class Strangers:
    """Arrays of a pattern in all memory that the pool has to give on the current stream."""

    def __init__(self, pool):
        self.arrays, size = [], 1 << 22
        while pool.free_bytes():
            held = pool.total_bytes()
            self.arrays.append(cp.full(size, PATTERN, np.uint8))
            # No free block was as large as that if the pool had to grow.
            if pool.total_bytes() != held:
                assert size > 512
                size //= 2

    def changed(self):
        """How many of them hold something else now."""
        with cp.cuda.using_allocator(cp.get_default_memory_pool().malloc):
            return sum(not bool((x == PATTERN).all()) for x in self.arrays)


def bits(x):
    return x.view(f"u{x.dtype.itemsize}")


def contents(results):
    return [bits(x).get().tobytes() for x in results]


class Inputs:
    """Arrays of a call, which have other numbers in every round; calling this makes one."""

    def __init__(self):
        self.bases, self.values = [], [[] for _ in range(ROUNDS)]

    def __call__(self, *shape, dtype=HALF, layout="dense"):
        base, view = laid_out(shape, np.dtype(dtype), layout)
        for i, values in enumerate(self.values):
            seed = 100 * i + len(self.bases)
            if base.dtype == np.bool_:
                values.append(uniform(base.shape, seed, SINGLE) < 0.5)
            else:
                values.append(uniform(base.shape, seed, base.dtype))
        self.bases.append(base)
        self.set(0)
        return view

    def integers(self, shape, low, high, dtype=np.int32):
        """Make an array of integers from `low` to `high`."""
        base = cp.empty(shape, dtype)
        for i, values in enumerate(self.values):
            rng = np.random.default_rng(100 * i + len(self.bases))
            values.append(cp.asarray(rng.integers(low, high + 1, shape).astype(dtype)))
        self.bases.append(base)
        self.set(0)
        return base

    def set(self, index):
        for base, value in zip(self.bases, self.values[index], strict=True):
            bits(base)[...] = bits(value)


def laid_out(shape, dtype, layout):
    """Return all elements of an array, dense, and the array, which lies among them."""
    rows = tuple(shape)
    if layout == "strided":
        base = cp.empty((*rows[:-1], 2 * rows[-1]), dtype)
        return base, base[..., ::2]
    if layout == "reversed":
        base = cp.empty(rows, dtype)
        return base, base[..., ::-1]
    if layout == "rows reversed":
        base = cp.empty(rows, dtype)
        return base, base[..., ::-1, :]
    if layout == "misaligned":
        base = cp.empty(int(np.prod(rows)) + 1, dtype)
        return base, base[1:].reshape(rows)
    if layout == "heads inside":
        base = cp.empty((*rows[:-3], rows[-2], rows[-3], rows[-1]), dtype)
        return base, base.swapaxes(-3, -2)
    if layout == "broadcast":
        base = cp.empty((1, *rows[1:]), dtype)
        return base, cp.broadcast_to(base, rows)
    base = cp.empty(rows, dtype)
    return base, base


# Calls, by name. Each gets its inputs and returns a function of no arguments.

SMALL, LARGE = (2, 4, 200, 64), (4, 10, 600, 64)  # the latter with more tiles than blocks
STRANGE = ("strided", "reversed", "rows reversed", "misaligned", "heads inside", "broadcast")
CASES = {}


def case(name):
    def register(function):
        assert name not in CASES
        CASES[name] = function
        return function

    return register


def attention_of(
    shape=SMALL, k_shape=None, dtype=HALF, layouts=None, out=None, mask=None, **options
):
    """A case of attention; `mask` makes one of the inputs."""

    def build(new):
        lay = layouts or {}
        arrays = [
            new(*sizes, dtype=dtype, layout=lay.get(arg, "dense"))
            for arg, sizes in zip("qkv", (shape, k_shape or shape, k_shape or shape), strict=True)
        ]
        where = None
        if out is not None:
            _, where = laid_out(shape, np.dtype(dtype), out)
        more = {} if mask is None else {"mask": mask(new)}
        return lambda: fa_cupy.attention(*arrays, out=where, **more, **options)

    return build


def mask_of_bools(*shape):
    return lambda new: new(*shape, dtype=np.bool_)


def rows_shared(new):
    return cp.broadcast_to(new(1, 200, dtype=np.bool_), (200, 200))


def bit_mask(there):
    def make(new):
        dense = np.random.default_rng(5).random((4, 200, 200)) < 0.3
        return BitMask.from_dense(cp.asarray(dense) if there else dense)

    return make


ATTENTION = {
    "float16": {"shape": LARGE},
    "float16, with LSE": {"shape": LARGE, "return_lse": True},
    "bfloat16, causal, with LSE": {
        "shape": LARGE, "dtype": BFLOAT16, "is_causal": True, "return_lse": True,
    },
    **{
        f"{arg} {layout}": {"layouts": {arg: layout}, "return_lse": True}
        for layout in STRANGE
        for arg in ("qkv" if layout in ("strided", "misaligned") else "k")
    },
    "bfloat16, k strided": {"dtype": BFLOAT16, "layouts": {"k": "strided"}, "return_lse": True},
    "all strided, many tiles": {
        "shape": LARGE, "layouts": dict.fromkeys("qkv", "strided"), "return_lse": True,
    },
    **{f"out {layout}": {"out": layout, "return_lse": True}
       for layout in ("dense", "strided", "reversed", "misaligned", "heads inside")},
    "out strided, many tiles": {"shape": LARGE, "out": "strided", "is_causal": True},
    "bfloat16, out strided": {"dtype": BFLOAT16, "out": "strided"},
    "grouped heads": {"k_shape": (2, 2, 200, 64), "return_lse": True},
    "grouped heads, k strided": {"k_shape": (2, 2, 200, 64), "layouts": {"k": "strided"}},
    "one k for all": {"k_shape": (1, 1, 150, 64)},
    "window": {"window": (50, 20)},
    "softcap": {"softcap": 5.0, "return_lse": True},
    "head_dim 33": {"shape": (2, 3, 200, 33), "return_lse": True},
    "head_dim 256": {"shape": (2, 2, 200, 256), "is_causal": True},
    "mask of bools": {"mask": mask_of_bools(2, 1, 200, 200), "return_lse": True},
    "mask of bools, many tiles": {"shape": LARGE, "mask": mask_of_bools(600, 600)},
    "mask of bools, k strided": {"mask": mask_of_bools(200, 200), "layouts": {"k": "strided"}},
    "mask of bools, rows shared": {"mask": rows_shared, "return_lse": True},
    "BitMask of the host": {"mask": bit_mask(False), "return_lse": True},
    "BitMask of the device": {"mask": bit_mask(True), "return_lse": True},
    "BitMask, v strided": {"mask": bit_mask(False), "layouts": {"v": "strided"}},
}  # fmt: skip
for _name, _options in ATTENTION.items():
    CASES[f"attention: {_name}"] = attention_of(**_options)


@case("attention: bias")
def _(new):
    q, k, v = (new(*SMALL) for _ in range(3))
    bias = new(1, 4, 200, 200)
    return lambda: fa_cupy.attention(q, k, v, bias, return_lse=True)


@case("attention: bias, k strided, bfloat16")
def _(new):
    layouts = ("dense", "strided", "dense")
    q, k, v = (new(*SMALL, dtype=BFLOAT16, layout=layout) for layout in layouts)
    bias = new(200, 200, dtype=BFLOAT16)
    return lambda: fa_cupy.attention(q, k, v, bias)


@case("attention: sinks")
def _(new):
    q, k, v = (new(*SMALL) for _ in range(3))
    sinks = new(4, 1)
    return lambda: fa_cupy.attention(q, k, v, sinks=sinks, is_causal=True, return_lse=True)


@case("attention: sinks, k strided, bfloat16")
def _(new):
    layouts = ("dense", "strided", "dense")
    q, k, v = (new(*SMALL, dtype=BFLOAT16, layout=layout) for layout in layouts)
    sinks = new(200, dtype=BFLOAT16)
    return lambda: fa_cupy.attention(q, k, v, sinks=sinks)


def score_of(new):
    """A score with arrays that change in place."""
    table, slopes = new(4, 400, dtype=SINGLE), new(4, dtype=SINGLE)
    text = "2 * tanh(s) - slopes[h] * abs(i - j) / 50 + table[h, i - j + n]"
    return fa_cupy.Score(text, slopes=slopes, table=table, n=200)


@case("attention: score")
def _(new):
    q, k, v = (new(*SMALL) for _ in range(3))
    score = score_of(new)
    return lambda: fa_cupy.attention(q, k, v, score=score, is_causal=True, return_lse=True)


@case("attention: score, k strided, bfloat16")
def _(new):
    layouts = ("dense", "strided", "dense")
    q, k, v = (new(*SMALL, dtype=BFLOAT16, layout=layout) for layout in layouts)
    score = score_of(new)
    return lambda: fa_cupy.attention(q, k, v, score=score)


def scaled_of(mask=None, **options):
    def build(new):
        q, k, v = (new(*SMALL, layout=layout) for layout in ("dense", "strided", "dense"))
        given = None if mask is None else mask(new)
        return lambda: fa_cupy.scaled_dot_product_attention(q, k, v, given, **options)

    return build


CASES["scaled_dot_product_attention: causal"] = scaled_of(is_causal=True)
CASES["scaled_dot_product_attention: mask"] = scaled_of(mask_of_bools(200, 200))
CASES["scaled_dot_product_attention: bias"] = scaled_of(lambda new: new(200, 200))


def gradients_of(
    shape=SMALL, k_shape=None, dtype=HALF, layouts=None, mask=None, need=None, dlse=False,
    bias=False, sinks=None, score=False, lengths=False, **options,
):  # fmt: skip
    def build(new):
        lay, k_shape_ = layouts or {}, k_shape or shape
        q, k, v, dout = (
            new(*sizes, dtype=dtype, layout=lay.get(arg, "dense"))
            for arg, sizes in (("q", shape), ("k", k_shape_), ("v", k_shape_), ("dout", shape))
        )
        more = {} if mask is None else {"mask": mask(new)}
        if bias:
            more["bias"] = new(shape[-2], k_shape_[-2], dtype=dtype)
        if sinks is not None:
            more["sinks"] = new(*sinks[0], dtype=sinks[1])
        if score:
            more["score"] = score_of(new)
        if lengths:
            more["k_lengths"] = new.integers((shape[0],), 0, k_shape_[-2])
        rows = new(*shape[:-1], dtype=SINGLE) if dlse else None
        # Those of the first round, in all of them.
        out, lse = fa_cupy.attention(q, k, v, **more, **options, return_lse=True)
        return lambda: fa_cupy.attention_backward(
            dout, q, k, v, out, lse, dlse=rows, need=need, **more, **options
        )

    return build


GRADIENTS = {
    "float16": {"shape": (2, 4, 600, 64)},
    "bfloat16, causal, dlse": {"dtype": BFLOAT16, "is_causal": True, "dlse": True},
    "float32, causal, dlse": {"dtype": SINGLE, "is_causal": True, "dlse": True},
    "float32, sinks": {"dtype": SINGLE, "sinks": ((4, 1), SINGLE), "layouts": {"k": "strided"}},
    "float32, lengths": {"dtype": SINGLE, "lengths": True, "dlse": True},
    "float64, lengths, causal": {
        "dtype": DOUBLE, "lengths": True, "is_causal": True, "causal_align": "bottom_right",
    },
    "head_dim 128": {"shape": (2, 2, 200, 128)},
    "head_dim 256": {"shape": (2, 2, 200, 256)},
    **{f"k {layout}": {"layouts": {"k": layout}} for layout in STRANGE},
    "dout strided": {"layouts": {"dout": "strided"}, "dlse": True},
    "q misaligned": {"layouts": {"q": "misaligned"}},
    "v of grouped heads strided": {"k_shape": (2, 2, 200, 64), "layouts": {"v": "strided"}},
    "one k for all": {"k_shape": (1, 1, 150, 64)},
    "v only": {"need": ["v"], "layouts": {"q": "strided"}},
    "window": {"window": (50, 20), "causal_align": "top_left"},
    "softcap": {"softcap": 5.0},
    "bias": {"bias": True, "need": ["q", "k", "v"]},
    "score": {"score": True, "dlse": True},
    "score, k strided": {"score": True, "layouts": {"k": "strided"}, "is_causal": True},
    "bias and its gradient": {"bias": True, "dlse": True},
    "float32, bias and its gradient": {"bias": True, "dtype": SINGLE, "is_causal": True},
    "float64, bias and its gradient": {"bias": True, "dtype": np.dtype(np.float64)},
    "sinks": {"sinks": ((4, 1), SINGLE), "dlse": True},
    "sinks of bfloat16, k strided": {
        "sinks": ((200,), BFLOAT16), "dtype": BFLOAT16, "layouts": {"k": "strided"},
    },
    "mask of bools": {"mask": mask_of_bools(200, 200)},
    "mask of bools, rows shared": {"mask": rows_shared},
    "BitMask of the host": {"mask": bit_mask(False), "dlse": True},
    "BitMask of the device": {"mask": bit_mask(True)},
}  # fmt: skip
for _name, _options in GRADIENTS.items():
    CASES[f"attention_backward: {_name}"] = gradients_of(**_options)


def product_of(
    shape=(2, 3, 300, 64), heads=None, dtype=HALF, layouts=None, out=None, states=False, **options
):
    def build(new):
        lay = layouts or {}
        k_shape = (*shape[:-3], heads or shape[-3], *shape[-2:]) if len(shape) > 3 else shape
        q, k, v = (
            new(*sizes, dtype=dtype, layout=lay.get(arg, "dense"))
            for arg, sizes in (("q", shape), ("k", k_shape), ("v", k_shape))
        )
        more = {}
        if states:
            more["return_state"] = True
            more["initial_state"] = new(
                *k_shape[:-2], shape[-1], shape[-1],
                dtype=DOUBLE if dtype == DOUBLE else SINGLE, layout=lay.get("state", "dense"),
            )  # fmt: skip
        if out is not None:
            _, more["out"] = laid_out(shape, np.dtype(dtype), out)
        return lambda: fa_cupy.causal_product(q, k, v, **more, **options)

    return build


PRODUCTS = {
    "float16": {},
    "float16, in segments": {"shape": (2, 3000, 64)},
    "bfloat16, in segments, states": {"shape": (2, 3000, 64), "dtype": BFLOAT16, "states": True},
    "float32": {"dtype": SINGLE, "states": True},
    "float32, in segments": {"shape": (2, 3000, 64), "dtype": SINGLE},
    "float32, recurrent": {"dtype": SINGLE, "algorithm": "recurrent"},
    "float32, low_occupancy": {"dtype": SINGLE, "algorithm": "low_occupancy"},
    "float64, states": {"dtype": DOUBLE, "states": True},
    "float64, in segments": {"shape": (2, 3000, 64), "dtype": DOUBLE},
    "reverse, states": {"reverse": True, "states": True},
    **{f"k {layout}": {"layouts": {"k": layout}} for layout in STRANGE},
    "all strided, in segments": {
        "shape": (2, 3000, 64), "layouts": dict.fromkeys("qkv", "strided"), "states": True,
    },
    "float32, v strided": {"dtype": SINGLE, "layouts": {"v": "strided"}, "states": True},
    "state rows reversed": {"states": True, "layouts": {"state": "rows reversed"}},
    **{f"out {layout}": {"out": layout} for layout in ("dense", "strided", "misaligned")},
    "grouped heads, states": {"shape": (2, 4, 300, 64), "heads": 2, "states": True},
    "dims 40": {"shape": (2, 3, 300, 40)},
}  # fmt: skip
for _name, _options in PRODUCTS.items():
    CASES[f"causal_product: {_name}"] = product_of(**_options)


def product_gradients_of(
    shape=(2, 4, 300, 64), heads=4, dtype=HALF, layouts=None, states=False, batch=2, **options
):
    def build(new):
        lay = layouts or {}
        k_shape = (batch, heads, *shape[-2:])
        dout, q, k, v = (
            new(*sizes, dtype=dtype, layout=lay.get(arg, "dense"))
            for arg, sizes in (("dout", shape), ("q", shape), ("k", k_shape), ("v", k_shape))
        )
        more = {}
        if states:
            sizes = (*k_shape[:-2], shape[-1], shape[-1])
            kind = DOUBLE if dtype == DOUBLE else SINGLE
            more = {arg: new(*sizes, dtype=kind) for arg in ("initial_state", "dstate")}
        return lambda: fa_cupy.causal_product_backward(dout, q, k, v, **more, **options)

    return build


PRODUCT_GRADIENTS = {
    "float16": {},
    "bfloat16, states": {"dtype": BFLOAT16, "states": True},
    "float32, states": {"dtype": SINGLE, "states": True},
    "float64, states": {"dtype": DOUBLE, "states": True},
    "float16, in segments": {"shape": (2, 1, 3000, 64), "heads": 1},
    "shared heads": {"heads": 2},
    "shared heads, bfloat16": {"heads": 2, "dtype": BFLOAT16, "reverse": True},
    "shared heads, float32, states": {"heads": 2, "dtype": SINGLE, "states": True},
    "one k for the batch": {"heads": 1, "batch": 1, "states": True},
    "k strided": {"layouts": {"k": "strided"}},
    "dout strided, states": {"layouts": {"dout": "strided"}, "states": True},
    "v misaligned": {"layouts": {"v": "misaligned"}},
}  # fmt: skip
for _name, _options in PRODUCT_GRADIENTS.items():
    CASES[f"causal_product_backward: {_name}"] = product_gradients_of(**_options)


@case("causal_product_backward: no queries")
def _(new):
    q, k, v = new(0, 300, 64), new(1, 300, 64), new(1, 300, 64)
    states = {arg: new(1, 64, 64, dtype=SINGLE) for arg in ("initial_state", "dstate")}
    return lambda: fa_cupy.causal_product_backward(q, q, k, v, **states)


def pairs(x):
    """A feature map that makes arrays of its own."""
    return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)


def linear_of(feature, dtype=HALF, heads=4, out=None, layouts=None, dim=64):
    def build(new):
        lay = layouts or {}
        q, k, v = (
            new(2, n, 300, dim, dtype=dtype, layout=lay.get(arg, "dense"))
            for arg, n in (("q", 4), ("k", heads), ("v", heads))
        )
        where = None if out is None else laid_out((2, 4, 300, dim), np.dtype(dtype), out)[1]
        return lambda: fa_cupy.linear_attention(q, k, v, feature_map=feature, out=where)

    return build


for _feature in ("elu1", "relu", "exp", "identity"):
    for _dtype in (HALF, BFLOAT16, SINGLE, DOUBLE):
        CASES[f"linear_attention: {_feature}, {_dtype.name}"] = linear_of(_feature, _dtype)
CASES["linear_attention: a function"] = linear_of(pairs, dim=8)
CASES["linear_attention: grouped heads"] = linear_of("elu1", heads=2)
CASES["linear_attention: k strided"] = linear_of("elu1", layouts={"k": "strided"})
CASES["linear_attention: v misaligned"] = linear_of("elu1", layouts={"v": "misaligned"})
CASES["linear_attention: out strided"] = linear_of("relu", out="strided")
CASES["linear_attention: out dense"] = linear_of("relu", SINGLE, out="dense")


def keyed_of(dtype=HALF, q_len=1, layout="dense", size=None, keys=640, **options):
    """With lengths, and pages if they have a size: other ones in every round."""

    def build(new):
        q = new(3, 8, q_len, 64, dtype=dtype)
        shape = (3, 2, keys, 64) if size is None else (17, 2, size, 64)
        k, v = new(*shape, dtype=dtype, layout=layout), new(*shape, dtype=dtype)
        places = {"k_lengths": new.integers((3,), 0, keys)}
        if size is not None:
            places["page_table"] = new.integers((3, keys // size), 0, 16, np.int64)
        return lambda: fa_cupy.attention(q, k, v, return_lse=True, **places, **options)

    return build


CASES["attention with lengths"] = keyed_of()
CASES["attention with lengths, causal"] = keyed_of(
    BFLOAT16, 5, is_causal=True, causal_align="bottom_right"
)
CASES["attention with lengths, k strided"] = keyed_of(layout="strided")
CASES["attention with lengths, float32"] = keyed_of(SINGLE, 600)
CASES["attention with lengths, one query of float64"] = keyed_of(DOUBLE)
CASES["attention with pages, float32"] = keyed_of(SINGLE, 70, size=16)
CASES["attention with pages"] = keyed_of(size=64)
CASES["attention with pages, many queries"] = keyed_of(q_len=70, size=16)
for _keys, _size in ((8192, None), (8192, 64), (65536, None)):  # by fwd_sm90, fwd_splitkv and it
    for _q_len in (1, 4):
        _name = f"attention of {_q_len} queries with lengths to {_keys} keys, pages of {_size}"
        CASES[_name] = keyed_of(BFLOAT16, _q_len, size=_size, keys=_keys)


@case("KVCache")
def _(new):
    """Its lengths and pages lie at the same addresses whatever is appended."""
    cache = fa_cupy.KVCache(
        2, 64, sequences=3, max_length=256, page_size=64, dtype=np.float16, xp=cp
    )
    tokens = cp.asarray(np.random.default_rng(0).standard_normal((3, 2, 100, 64)).astype(HALF))
    cache.append(tokens, tokens)
    q = new(3, 4, 1, 64)
    return lambda: cache.attention(q)


@case("attention of one query")
def _(new):
    q, k, v = new(2, 8, 1, 64), new(2, 2, 900, 64), new(2, 2, 900, 64)
    return lambda: fa_cupy.attention(q, k, v)


def linear_state_of(dtype):
    def build(new):
        q, k, v = (new(2, 4, 300, 64, dtype=dtype) for _ in range(3))
        state = new(2, 4, 64, 65, dtype=SINGLE)
        return lambda: fa_cupy.linear_attention(q, k, v, initial_state=state, return_state=True)

    return build


def linear_backward_of(feature, dtype=HALF, heads=4, state=False):
    def build(new):
        q, dout = (new(2, 4, 300, 64, dtype=dtype) for _ in range(2))
        k, v = (new(2, heads, 300, 64, dtype=dtype) for _ in range(2))
        states = {}
        if state:
            states = {x: new(2, heads, 64, 65, dtype=SINGLE) for x in ("initial_state", "dstate")}
        return lambda: fa_cupy.linear_attention_backward(
            dout, q, k, v, feature_map=feature, **states
        )

    return build


CASES["linear_attention with a state"] = linear_state_of(HALF)
CASES["linear_attention with a state, float32"] = linear_state_of(SINGLE)
for _feature in ("elu1", "relu", "exp", "identity"):
    for _dtype in (HALF, BFLOAT16, SINGLE, DOUBLE):
        _name = f"linear_attention_backward: {_feature}, {_dtype.name}"
        CASES[_name] = linear_backward_of(_feature, _dtype)
CASES["linear_attention_backward: grouped heads"] = linear_backward_of("elu1", heads=2)
CASES["linear_attention_backward: states"] = linear_backward_of("elu1", SINGLE, 2, state=True)


def merge_of(dtype, layout="dense", stacked=False):
    def build(new):
        real = DOUBLE if dtype == DOUBLE else SINGLE
        if stacked:
            outs = new(3, *SMALL, dtype=dtype, layout=layout)
            lses = new(3, *SMALL[:-1], dtype=real)
        else:
            outs = [new(*SMALL, dtype=dtype, layout=layout) for _ in range(3)]
            lses = [new(*SMALL[:-1], dtype=real) for _ in range(3)]
        return lambda: fa_cupy.merge_attention(outs, lses)

    return build


for _dtype in (HALF, SINGLE, DOUBLE):
    CASES[f"merge_attention: {_dtype.name}"] = merge_of(_dtype)
CASES["merge_attention: stacked"] = merge_of(HALF, stacked=True)
CASES["merge_attention: strided"] = merge_of(HALF, "strided")
CASES["merge_attention: heads inside"] = merge_of(SINGLE, "heads inside")


# With CuPy


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


# In every mode: repeated calls, copies, masks, sums over heads, what is handed over at the end.
IN_ALL_MODES = (
    "attention: float16, with LSE", "attention: all strided, many tiles", "attention: out strided",
    "attention: mask of bools", "attention_backward: float16", "attention_backward: k strided",
    "causal_product: all strided, in segments", "causal_product_backward: shared heads",
    "linear_attention: elu1, float16", "merge_attention: float16",
)  # fmt: skip
MODES_OF_CASES = [(name, "global") for name in CASES] + [
    (name, mode) for name in IN_ALL_MODES for mode in ("thread_local", "relaxed")
]


def test_every_public_function_is_captured():
    named = {name.partition(":")[0].partition(",")[0].partition(" ")[0]
             for name in (*CASES, *REFUSED)}  # fmt: skip
    assert named == set(fa_cupy.__all__) - {"Score", "__version__", "dropout_mask"}


@pytest.mark.parametrize(("name", "mode"), MODES_OF_CASES)
def test_a_graph_keeps_to_its_own_memory(name, mode, pool):
    stream, inputs = cp.cuda.Stream(non_blocking=True), Inputs()
    with stream:
        call = CASES[name](inputs)
        call()
        stream.synchronize()
        stream.begin_capture(MODES[mode])
        try:
            results = as_tuple(call())
        finally:
            graph = stream.end_capture()
        strangers = Strangers(pool)
        found = []
        for i in (1, 2, 0):
            inputs.set(i)
            for x in results:
                bits(x).fill(0x55)
            graph.launch(stream)
            stream.synchronize()
            found.append(contents(results))
        assert strangers.changed() == 0
        for i, got in zip((1, 2, 0), found, strict=True):
            inputs.set(i)
            assert contents(as_tuple(call())) == got


@pytest.mark.parametrize("name", ["attention: float16, with LSE", "attention: out strided"])
def test_two_graphs_of_a_call_run_side_by_side(name, pool):
    """Each has a counter of its own, and what is more."""
    streams, graphs, results, wants = (
        [cp.cuda.Stream(non_blocking=True) for _ in range(2)],
        [],
        [],
        [],
    )
    for stream in streams:
        with stream:
            call = CASES[name](Inputs())
            wants.append(contents(as_tuple(call())))
            stream.begin_capture()
            results.append(as_tuple(call()))
            graphs.append(stream.end_capture())
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
    cp.cuda.Device().synchronize()
    assert [contents(x) for x in results] == wants


def refused_calls():
    x, rows = uniform((2, 40, 64), 0, SINGLE), cp.zeros((2, 40), SINGLE)
    seen, wide = cp.ones((40, 40), np.bool_), cp.zeros((9, 320), HALF)
    half = x.astype(HALF)
    many = uniform((2, 40, 264), 1, DOUBLE)
    points = [uniform((40, 2), seed, SINGLE) for seed in range(3)]
    score = fa_cupy.Score("s * x[h]", x=cp.ones(2, SINGLE))
    return {
        "attention, wide float64": lambda: fa_cupy.attention(many, many, many),
        "attention, head_dim 320": lambda: fa_cupy.attention(wide, wide, wide),
        "attention, wide float64 and a score": lambda: fa_cupy.attention(
            many, many, many, score=score
        ),
        "attention_backward of a score's array": lambda: fa_cupy.attention_backward(
            half, half, half, half, half, rows, score=score, need=["score.x"]
        ),
        "attention_backward, a bias of float32 of head_dim 160": lambda: fa_cupy.attention_backward(
            *[uniform((2, 40, 160), 0, SINGLE)] * 5,
            rows,
            uniform((40, 40), 1, SINGLE),
            need=["bias"],
        ),
        "causal_product, wide float64": lambda: fa_cupy.causal_product(many, many, many),
        "causal_product_backward, wide float64": lambda: fa_cupy.causal_product_backward(
            *[many] * 4
        ),
        "linear_attention, wide float64": lambda: fa_cupy.linear_attention(many, many, many),
        "linear_attention, all keys": lambda: fa_cupy.linear_attention(
            half, half, half, is_causal=False
        ),
        "linear_attention_backward, wide float64": lambda: fa_cupy.linear_attention_backward(
            *[many] * 4
        ),
        "kernel_regression": lambda: fa_cupy.kernel_regression(*points, 1.0),
        "kernel_regression_backward": lambda: fa_cupy.kernel_regression_backward(
            points[0], *points, 1.0
        ),
        "non_local_means": lambda: fa_cupy.non_local_means(x[0], 1.0),
        "prefix_state": lambda: fa_cupy.prefix_state(half, half),
        "prefix_state, q": lambda: fa_cupy.prefix_state(half, half, range(40), q=half),
        "BitMask": lambda: BitMask.from_dense(seen),
    }


REFUSED = (
    "attention, wide float64", "attention, head_dim 320",
    "attention_backward, a bias of float32 of head_dim 160", "causal_product, wide float64",
    "causal_product_backward, wide float64",
    "linear_attention, wide float64", "linear_attention, all keys",
    "linear_attention_backward, wide float64", "kernel_regression", "kernel_regression_backward",
    "non_local_means", "prefix_state", "prefix_state, q", "BitMask",
    "attention, wide float64 and a score", "attention_backward of a score's array",
)  # fmt: skip


@by_mode
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_says_so_and_leaves_the_capture_as_it_was(name, mode, pool):
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call, x = refused_calls()[name], cp.zeros(1000, SINGLE)
        call()
        x += 1
        stream.synchronize()
        stream.begin_capture(MODES[mode])
        try:
            function = name.partition(",")[0].partition(" ")[0]
            with pytest.raises(NotImplementedError, match=rf"^{function}: cannot be captured"):
                call()
            x += 1
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
        assert (x.get() == 3).all()


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_first_call_with_a_mask_wants_a_mode_that_lets_it(mode, pool):
    x, stream = uniform((2, 200, 64), 0), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        fa_cupy.attention(x, x, x, mask=BitMask.from_dense(np.tri(200, dtype=bool)))
        mask = BitMask.from_dense(np.tri(200, k=3, dtype=bool))
        stream.begin_capture(MODES[mode])
        with pytest.raises(NotImplementedError, match=r"BitMask: .* want a call before the"):
            fa_cupy.attention(x, x, x, mask=mask)
        with contextlib.suppress(cp.cuda.runtime.CUDARuntimeError):  # the capture is over
            stream.end_capture()
        want = fa_cupy.attention(x, x, x, mask=cp.asarray(np.tri(200, k=3, dtype=bool)))
        assert contents([fa_cupy.attention(x, x, x, mask=mask)]) == contents([want])


# With PyTorch


@pytest.fixture
def torch(pool):
    """PyTorch with a device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch


def torch_calls(torch):
    """Calls by name: shapes of tensors, and what is made of them."""
    import fa_cupy.torch as differentiable

    def gradients(function, *tensors, count=3, **options):
        inputs = [x.detach().requires_grad_() for x in tensors[:count]]
        results = as_tuple(function(*inputs, **options))
        outs = [x for x in results if x.requires_grad]
        return *results, *torch.autograd.grad(outs, inputs, tensors[count : count + len(outs)])

    def masked(q, k, v):
        mask = (q[0, 0, :, :1] + k[0, 0, :, 0]) > 0
        return fa_cupy.attention(q, k, v, mask=mask, return_lse=True)

    qkv, shared = [SMALL] * 3, [SMALL, (2, 2, 200, 64), (2, 2, 200, 64)]
    rows, states = SMALL[:-1], (2, 4, 64, 64)
    return {
        "attention": (qkv, lambda *x: differentiable.attention(*x)),
        "attention with its LSE": (
            [LARGE] * 3, lambda *x: differentiable.attention(*x, return_lse=True, is_causal=True)
        ),
        "attention, k strided": (
            qkv, lambda q, k, v: fa_cupy.attention(q[..., :32], k[..., ::2], v, return_lse=True)
        ),
        "attention, mask of bools": (qkv, masked),
        "scaled_dot_product_attention": (
            qkv, lambda *x: fa_cupy.scaled_dot_product_attention(*x, is_causal=True)
        ),
        "attention and gradients": (
            [*qkv, SMALL], lambda *x: gradients(differentiable.attention, *x)
        ),
        "attention and gradients, grouped heads": (
            [*shared, SMALL], lambda *x: gradients(differentiable.attention, *x, is_causal=True)
        ),
        "attention and gradients through its LSE": (
            [*qkv, SMALL, rows],
            lambda *x: gradients(differentiable.attention, *x, return_lse=True),
        ),
        "attention and gradients, many tiles": (
            [LARGE] * 4, lambda *x: gradients(differentiable.attention, *x)
        ),
        "causal_product and gradients": (
            [*qkv, SMALL], lambda *x: gradients(differentiable.causal_product, *x)
        ),
        "causal_product and gradients, shared heads": (
            [*shared, SMALL], lambda *x: gradients(differentiable.causal_product, *x)
        ),
        "causal_product with a state": (
            [*qkv, states],
            lambda q, k, v, s: fa_cupy.causal_product(
                q, k, v[..., ::2], initial_state=s[..., ::2].float(), return_state=True
            ),
        ),
        "linear_attention": (qkv, lambda *x: fa_cupy.linear_attention(*x)),
        "merge_attention": (
            [SMALL, SMALL, rows, rows],
            lambda a, b, s, t: fa_cupy.merge_attention([a, b], [s.float(), t.float()]),
        ),
    }  # fmt: skip


TORCH = (
    "attention", "attention with its LSE", "attention, k strided", "attention, mask of bools",
    "scaled_dot_product_attention", "attention and gradients",
    "attention and gradients, grouped heads", "attention and gradients through its LSE",
    "attention and gradients, many tiles", "causal_product and gradients",
    "causal_product and gradients, shared heads", "causal_product with a state",
    "linear_attention", "merge_attention",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [(name, dtype, "global") for name in TORCH for dtype in ("float16", "bfloat16")]
    + [(name, "float16", mode) for name in TORCH for mode in ("thread_local", "relaxed")],
)
def test_a_graph_of_torch_keeps_to_its_own_memory(name, dtype, mode, torch, pool):
    shapes, function = torch_calls(torch)[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(shape):
        kind = torch.float32 if len(shape) == 3 else getattr(torch, dtype)
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    rounds = [[draw(shape) for shape in shapes] for _ in range(ROUNDS)]
    tensors = [x.clone() for x in rounds[0]]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        function(*tensors)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        results = as_tuple(function(*tensors))
    with interop.on_device(0, stream.cuda_stream):
        strangers = Strangers(pool)
    torch.cuda.synchronize()
    found = []
    for i in (1, 2, 0):
        for x, y in zip(tensors, rounds[i], strict=True):
            x.copy_(y)
        with torch.no_grad():
            for x in results:
                x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        found.append([x.detach().clone() for x in results])
    with interop.on_device(0, stream.cuda_stream):
        assert strangers.changed() == 0
    for i, got in zip((1, 2, 0), found, strict=True):
        want = as_tuple(function(*rounds[i]))
        assert all(same(torch, x, y) for x, y in zip(got, want, strict=True))


def same(torch, x, y):
    kind = {2: torch.int16, 4: torch.int32}[x.element_size()]
    x, y = (z.detach().contiguous().view(kind) for z in (x, y))
    return x.shape == y.shape and bool((x == y).all())
