"""The parameter struct: its layout, and that what it holds leads a kernel to every element."""

import re
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import layouts
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import (
    ATTENTION_PARAMS,
    DROPOUT_PARAMS,
    MASK_LISTS,
    PARAMS_WITH_DROPOUT,
    POINTERS,
    Traits,
    make_params,
)
from fa_cupy.gpu.kernels.linear.params import PACKED_PRODUCT_PARAMS, PRODUCT_PARAMS
from fa_cupy.gpu.kernels.score import (
    MAX_SCORE_ARRAYS,
    MAX_SCORE_AXES,
    SCORE_ARRAY,
    ScoreMod,
    takes_bias,
    with_float32_bias,
)
from tests.core.test_checks import NO_OPTIONS
from tests.support.every_run import examples
from validation.digest import ROOT

COMMON = ROOT / "cuda_src/common"
STRUCTS = {
    "AttentionParams": ("attention_params.cuh", ATTENTION_PARAMS),
    "dropout AttentionParams": ("attention_params.cuh", PARAMS_WITH_DROPOUT),
    "DropoutParams": ("dropout.cuh", DROPOUT_PARAMS),
    "MaskLists": ("block_lists.cuh", MASK_LISTS),
    "ScoreArray": ("attention_params.cuh", SCORE_ARRAY),
    "ProductParams": ("linear_params.cuh", PRODUCT_PARAMS),
    "packed ProductParams": ("linear_params.cuh", PACKED_PRODUCT_PARAMS),
}
ROWS = ("q", "k", "v", "out")


# Layout


def header(name="attention_params.cuh"):
    """The text of a header without its comments."""
    return re.sub(r"//.*", "", (COMMON / name).read_text())


def constant(name):
    if name.isdigit():
        return int(name)
    text = header("batch_axes.cuh") + header("attention_params.cuh") + header("dropout.cuh")
    return int(re.search(rf"\b{name} = (\d+)[;,]", text).group(1))


def members(struct):
    """(name, type, array length or None) of each member of a struct, in order."""
    build, _, struct_name = struct.rpartition(" ")
    text = header(STRUCTS[struct][0])
    body = re.search(rf"struct {struct_name} \{{(.*?)\n\}};", text, re.DOTALL).group(1)
    # A union of builds for packed sequences begins as what is there in the others.
    either = r"#if FA_PACKED(?:(?!#endif).)*?#else(.*?)#endif"
    body = re.sub(either, r"\1", body, flags=re.DOTALL)
    for name in ("PACKED", "DROPOUT"):
        kept = r"\1" if build == name.lower() else ""
        body = re.sub(rf"#if FA_{name}(.*?)#endif", kept, body, flags=re.DOTALL)
    types = {"int64": np.int64, "int": np.int32, "float": np.float32, "MaskLists": MASK_LISTS}
    types |= {"double": np.float64, "ScoreArray": SCORE_ARRAY, "DropoutParams": DROPOUT_PARAMS}
    types |= {"uint64": np.uint64, "uint32": np.uint32}
    for kind, pointer, names in re.findall(r"(?:const\s+)?(\w+)(\*?)\s+([^;]+);", body):
        for name, length in re.findall(r"(\w+)(?:\[(\w+)\])?\s*(?:,|$)", names.strip()):
            yield (
                name,
                np.dtype(np.uint64 if pointer else types[kind]),
                constant(length) if length else None,
            )


@pytest.mark.parametrize("struct", STRUCTS)
def test_the_struct_is_that_of_the_header(struct):
    found, fields = [], STRUCTS[struct][1]
    for name in fields.names:
        dtype = fields[name]
        found.append((name, dtype.base, dtype.shape[0] if dtype.shape else None))
    assert found == list(members(struct))


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_member_lies_where_a_c_compiler_puts_it(struct):
    at, fields = 0, STRUCTS[struct][1]
    for name, dtype, length in members(struct):
        at = -(-at // dtype.alignment) * dtype.alignment
        assert fields.fields[name][1] == at, name
        at += dtype.itemsize * (length or 1)
    assert fields.itemsize == -(-at // 8) * 8


def test_the_number_of_axes_is_that_of_the_header():
    assert constant("kMaxBatchAxes") == attention_params.MAX_BATCH_AXES


def test_kinds_of_bias_are_those_of_the_header():
    body = re.search(r"enum FloatKind : int \{(.*?)\}", header(), re.DOTALL).group(1)
    kinds = {name.lower(): int(value) for name, value in re.findall(r"k(\w+) = (\d+)", body)}
    assert kinds == {dtype.name: i for i, dtype in enumerate(attention_problem.FLOAT_DTYPES)}


def test_a_call_gives_the_addresses_of_arrays_and_of_the_parts_of_a_mask():
    assert attention_params.MaskPointers._fields == MASK_LISTS.names
    assert (*attention_params.mask_addresses(),) == attention_params.MASK_PARTS
    part = attention_params.mask_addresses("common.", whole=False)
    assert part.keys() == {f"common.mask.{name}" for name in MASK_LISTS.names if name != "order"}
    assert all(field == f"common.{name}" for field, name in part.items())


def test_the_size_of_a_block_is_that_of_the_header():
    found = dict(re.findall(r"constexpr int (kMaskBlock|kBlockWords) = (\d+);",
                            header("block_lists.cuh")))  # fmt: skip
    assert int(found["kMaskBlock"]) == attention_params.MASK_BLOCK == layouts.BLOCK
    assert int(found["kBlockWords"]) == np.prod(layouts.ORDERS["fragment"])


# Offsets


class Array:
    """An array in some layout, and beside it the place in memory of each of its elements."""

    def __init__(self, shape, dtype, order=None, flips=(), gap=0):
        order = range(len(shape)) if order is None else order
        self._lie = [shape[axis] for axis in order]
        self._back = np.argsort(order) if len(shape) else ()
        self._flips, self._gap = flips, gap
        self.array = self._lay(np.zeros, dtype)
        self.places = self._lay(lambda n, dtype: np.arange(n, dtype=dtype), np.int64)
        if self.places.size:  # counted from the first element, which is what a pointer points to
            self.places = self.places - self.places[(0,) * self.places.ndim]

    def _lay(self, make, dtype):
        """A dense array, cut and turned; `places` goes the same way with numbers in it."""
        shape = list(self._lie)
        if shape:
            shape[-1] += self._gap  # so that rows are further apart than they are long
        whole = make(int(np.prod(shape)), dtype).reshape(shape)
        cut = whole[..., : self._lie[-1]] if shape else whole
        turned = cut.transpose(self._back)
        return turned[tuple(slice(None, None, -1 if flip else 1) for flip in self._flips)]


@st.composite
def laid(draw, shape, dtype, free=False):
    """An `Array` with any order of axes and any directions; the last axis is dense unless free."""
    turned = len(shape) if free else len(shape) - 1
    order = draw(st.permutations(range(turned))) + list(range(turned, len(shape)))
    flips = draw(st.lists(st.booleans(), min_size=turned, max_size=turned))
    return Array(shape, dtype, order, flips, draw(st.sampled_from([0, 0, 1, 8])))


@st.composite
def calls(draw):
    """Arrays by name, for up to 9 batch axes of which each array repeats some."""
    batch = draw(st.lists(st.sampled_from([1, 2, 2, 3]), max_size=9))
    while np.prod(batch, dtype=int) > 600:
        batch[draw(st.integers(0, len(batch) - 1))] = 1
    q_len, k_len = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    head_dim, v_dim = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 5, 8, 16]))
    group = draw(st.sampled_from([1, 1, 2, 3])) if len(batch) >= 2 else 1
    dtype = draw(st.sampled_from(attention_problem.FLOAT_DTYPES[:3]))

    def some(fewer=batch):
        """A batch shape that broadcasts to the whole one."""
        kept = [n if draw(st.booleans()) or draw(st.booleans()) else 1 for n in fewer]
        return tuple(kept[draw(st.sampled_from([0, 0, 0, *range(len(kept) + 1)])) :])

    if group > 1:  # the last batch axis is that of heads; k and v have fewer
        batch[-1] = max(2, batch[-1])
        heads = (*batch[:-1], batch[-1] * group)
        shapes = [heads, tuple(batch), tuple(batch)]
        batch = list(heads)
    else:
        shapes = [tuple(batch), some(), some()]
    tails = (q_len, head_dim), (k_len, head_dim), (k_len, v_dim)
    arrays = {
        name: draw(laid((*shape, *tail), dtype))
        for name, shape, tail in zip("qkv", shapes, tails, strict=True)
    }
    scores = (*batch, q_len, k_len)
    for name, kind in (
        ("bias", draw(st.sampled_from(attention_problem.FLOAT_DTYPES))),
        ("mask", np.bool_),
    ):
        if draw(st.booleans()):
            arrays[name] = draw(laid(some(scores), kind, free=True))
    arrays["out"] = draw(laid((*batch, q_len, v_dim), dtype))
    return arrays


def rows_and_columns(problem):
    """The last two axes of each array."""
    q_len, k_len, head_dim, v_dim = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
    scores = (q_len, k_len)
    tails = {"q": (q_len, head_dim), "k": (k_len, head_dim), "v": (k_len, v_dim)}
    return {**tails, "out": (q_len, v_dim), "bias": scores}


def wanted(problem, name, array):
    """Places of all elements, (entries, rows, columns), by NumPy's broadcasting and repeating."""
    places, tail = array.places, rows_and_columns(problem)[name]
    batch = problem.out_shape[:-2]
    heads = places.shape[-3] if places.ndim >= 3 else 1
    if name in "kv" and 1 < heads < batch[-1]:
        places = np.repeat(places, batch[-1] // heads, axis=-3)
    return np.broadcast_to(places, (*batch, *tail)).reshape(-1, *tail)


def by_kernel(p, part, name, item, tail):
    """Entries of a launch, and places of their elements, by the kernel's arithmetic."""
    first = np.int64(part.first_batch)
    batch = first + np.arange(part.blocks // p["q_tiles"])
    rest, offset = batch, np.zeros_like(batch)
    for axis in reversed(range(p["batch_axes"])):
        rest, index = np.divmod(rest, p["batch_size"][axis])
        offset += index * p[f"{name}_batch"][axis]
    moved, odd = divmod(part.offsets[POINTERS.index(name)], item)
    assert odd == 0
    row, col = np.ogrid[: tail[0], : tail[1]]
    step = p["bias_col"] if name == "bias" else 1
    inner = row * np.int64(p[f"{name}_row"]) + col * step
    # LSE has no strides, it is dense.
    assert part.offsets[POINTERS.index("lse")] == 4 * int(p["q_len"]) * part.entry
    return part.entry + batch, (moved + offset)[:, None, None] + inner


@examples(100)
@given(
    arrays=calls(),
    tile_m=st.sampled_from([1, 2, 4]),
    max_grid=st.sampled_from([1, 2, 5, 30, 2**31 - 1]),
)
def test_a_kernel_finds_every_element(arrays, tile_m, max_grid):
    given = [arrays[name].array if name in arrays else None for name in attention_problem.ARGS]
    problem = attention_problem.attention_problem(*given, **NO_OPTIONS)
    out = arrays["out"].array
    with mock.patch.object(attention_params, "MAX_GRID", max_grid):
        view = attention_problem.out_view(problem, out.shape, out.strides)
        traits = Traits(problem, view)
        (filled, parts), aligned = make_params(traits, tile_m), traits.aligned()
    p = filled[0]
    tiles = -(-problem.q_len // tile_m)
    if "mask" in arrays:  # whole blocks of rows
        tiles = 128 // tile_m
    assert p["q_tiles"] == tiles
    assert all(0 < part.blocks <= max(max_grid, tiles) for part in parts)
    assert all(part.blocks % tiles == 0 for part in parts)
    assert sum(part.blocks for part in parts) == np.prod(problem.batch, dtype=int) * tiles
    for name, array in arrays.items():
        if name == "mask":
            continue
        item, tail = array.array.itemsize, rows_and_columns(problem)[name]
        want = wanted(problem, name, array)
        seen = np.zeros(len(want), int)
        for part in parts:
            entries, places = by_kernel(p, part, name, item, tail)
            seen[entries] += 1
            np.testing.assert_array_equal(places, want[entries], err_msg=name)
        assert (seen == 1).all()
        if aligned and name in ROWS:
            assert not (want[..., 0] * item % 16).any()


def views_of(batch, **strides):
    return {name: attention_problem.View((*batch, 1, 1), (*s, 0, 0)) for name, s in strides.items()}


def test_axes_merge_only_where_every_array_allows():
    batch = (2, 3, 1, 4)
    dense, repeated = (96, 32, 7, 8), (0, 0, 5, 0)
    assert attention_params.merge_axes(batch, views_of(batch, q=dense, k=repeated)) == (
        [24],
        {"q": [8], "k": [0]},
    )
    turned = (8, 64, 0, 16)
    assert attention_params.merge_axes(batch, views_of(batch, q=dense, k=turned)) == (
        [2, 12],
        {"q": [96, 8], "k": [8, 16]},
    )


@pytest.mark.parametrize(
    ("dim", "gap", "out_gap", "want"),
    [
        (8, 0, 0, True),
        (8, 8, 16, True),
        (5, 3, 3, True),
        (8, 1, 0, False),
        (8, 0, 1, False),
        (12, 0, 4, False),
    ],
)
def test_rows_of_whole_16_bytes_are_aligned(dim, gap, out_gap, want):
    q, out = (Array((3, 6, dim), np.float16, gap=n).array for n in (gap, out_gap))
    problem = attention_problem.attention_problem(q, q, q, None, None, **NO_OPTIONS)
    view = attention_problem.out_view(problem, out.shape, out.strides)
    assert bool(Traits(problem, view).aligned()) is want


@pytest.mark.parametrize("batch", [(2**16, 2**16), (2**32 + 5,)])
def test_batch_entries_past_2_to_the_31(batch):
    def repeated(*tail):
        strides = (0,) * len(batch) + tuple(np.zeros(tail, np.float16).strides)
        return np.lib.stride_tricks.as_strided(np.zeros(tail, np.float16), (*batch, *tail), strides)

    q, k, v = repeated(1, 8), repeated(3, 8), repeated(3, 1)
    problem = attention_problem.attention_problem(q, k, v, None, None, **NO_OPTIONS)
    steps = (2 * 2**16, 2, 2, 2) if len(batch) == 2 else (2, 2, 2)
    view = attention_problem.out_view(problem, (*batch, 1, 1), steps)
    filled, parts = make_params(Traits(problem, view), 64)
    p, count = filled[0], 0
    assert all(0 < part.blocks < 2**31 for part in parts)
    for part in parts:
        for batch_entry in (part.first_batch, part.first_batch + part.blocks - 1):
            one = attention_params.Part(part.offsets, batch_entry, 1, part.entry)
            entries, places = by_kernel(p, one, "out", 2, (1, 1))
            np.testing.assert_array_equal(places[:, 0, 0], entries)
        count += part.blocks
    assert count == np.prod(batch, dtype=np.int64)


# Options


def filled_with(q_len=5, k_len=5, bias=None, **options):
    q, k = np.zeros((q_len, 8), np.float16), np.zeros((k_len, 8), np.float16)
    problem = attention_problem.attention_problem(q, k, k, bias, None, **NO_OPTIONS | options)
    out = attention_problem.View(q.shape, q.strides)
    return make_params(Traits(problem, out), 64)[0][0]


def test_open_bounds_hide_nothing_at_any_length():
    p = filled_with()
    assert attention_params.MAX_LENGTH - 1 + int(p["lower"]) <= 0
    assert int(p["upper"]) >= attention_params.MAX_LENGTH - 1


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_bounds_are_those_of_the_band(align):
    p = filled_with(20, 30, is_causal=True, window=(3, 7), causal_align=align)
    offset = 10 if align == "bottom_right" else 0
    assert (p["lower"], p["upper"]) == (offset - 3, offset)


@pytest.mark.parametrize("scale", [None, 0.5, 3.0, 1e-3])
def test_the_softmax_folds_a_plain_scale_in(scale):
    p = filled_with(scale=scale)
    np.testing.assert_allclose(p["exp2_scale"], np.log2(np.e) * (scale or 8**-0.5), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": 1e-35},
        {"scale": 1e300},
        {"softcap": 3.0},
        {"bias": np.zeros(5, np.float32)},
    ],
    ids=str,
)
def test_all_else_is_done_to_scores_first(options):
    p = filled_with(**options)
    np.testing.assert_allclose(p["exp2_scale"], np.log2(np.e), rtol=1e-7)
    assert np.isfinite(p["scale"])
    assert p["softcap"] == options.get("softcap", 0)
    scale = options.get("scale", 8**-0.5)
    if scale <= 1:
        np.testing.assert_allclose(p["scale"], scale, rtol=1e-6)
    if "softcap" in options:
        np.testing.assert_allclose(p["softcap_scale"], 4 * scale / options["softcap"], rtol=1e-6)


def traits_with(bias):
    q = np.zeros((6, 8), np.float16)
    problem = attention_problem.attention_problem(q, q, q, bias, None, **NO_OPTIONS)
    return Traits(problem, attention_problem.View(q.shape, q.strides))


@pytest.mark.parametrize("dtype", attention_problem.FLOAT_DTYPES[:3], ids=str)
@pytest.mark.parametrize(
    ("shape", "axes", "strides", "pairs"),
    [
        ((6, 6), "pair", (6, 1), 1),
        ((1, 6), "key", (0, 1), 1),
        ((6, 1), "query", (1, 0), 2),
        ((1, 1), "query", (0, 0), 0),
    ],
    ids=str,
)
def test_a_build_for_a_bias_knows_its_dtype_and_axes(dtype, shape, axes, strides, pairs):
    traits = traits_with(np.zeros(shape, dtype))
    by_registers = axes == "pair"  # rows of 12 bytes, or of 24
    want = ScoreMod(bias_axes=axes, bias_dtype=np.dtype(dtype).name, by_registers=by_registers)
    assert traits.score == want
    p = make_params(traits, 64)[0][0]
    assert (p["bias_row"], p["bias_col"], p["bias_pairs"] & 3) == (*strides, pairs)


@pytest.mark.parametrize(("shape", "aligned"), [((6, 8), True), ((6, 12), False), ((1, 6), True)])
def test_a_bias_whose_rows_are_aligned_is_read_by_16_bytes(shape, aligned):
    p = make_params(traits_with(np.zeros(shape, np.float16)[:, :6]), 64)[0][0]
    assert p["bias_pairs"] >> 2 == aligned


def test_the_number_of_arrays_of_an_expression_is_that_of_the_header():
    assert constant("kMaxScoreArrays") == MAX_SCORE_ARRAYS
    assert constant("kMaxScoreAxes") == MAX_SCORE_AXES


def test_a_bias_whose_rows_begin_at_odd_elements_is_not_read_in_pairs():
    bias = np.zeros((6, 7), np.float16)
    assert make_params(traits_with(bias[:, :6]), 64)[0][0]["bias_pairs"] == 0
    assert make_params(traits_with(bias.T[:6].T), 64)[0][0]["bias_pairs"] == 0


def test_a_bias_of_float64_stays_finite_in_float32():
    bias = np.array([[1e300, -1e300, np.inf, -np.inf, np.nan, 0.5]])
    problem = traits_with(bias).problem
    assert not takes_bias(problem)
    problem, converted = with_float32_bias(np, problem, bias)
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(converted, [[largest, -largest, np.inf, -np.inf, np.nan, 0.5]])
    assert problem.bias_dtype == converted.dtype == np.float32
    assert problem.bias.strides == (0, 4)


@pytest.mark.parametrize("softcap", [5e-324, 1e-300, 1e-38, 3e38, 1e300])
def test_a_softcap_at_the_ends_of_float32_warns_of_nothing(softcap):
    q = np.zeros((1, 8), np.float16)
    problem = attention_problem.attention_problem(q, q, q, None, None, softcap=softcap)
    p = make_params(Traits(problem, attention_problem.out_view(problem, (1, 8), (16, 2))), 64)[0][0]
    with np.errstate(over="ignore"):
        assert p["softcap"] * p["inverse_softcap"] >= 1
