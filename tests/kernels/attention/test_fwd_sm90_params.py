"""The parameters of `fwd_sm90`: layout, and that its tensor maps lead it to every element."""

import itertools
import re
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.core import attention_problem
from fa_cupy.gpu.driver import tensor_map
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention import attention_params, fwd_sm90
from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS, MAX_BATCH_AXES, Traits
from fa_cupy.gpu.kernels.attention.fwd_sm80 import FwdSm80
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FWD_SM90_PARAMS, TILE_SCHEDULER, FwdSm90
from fa_cupy.gpu.kernels.forward import Call, select
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.core.test_checks import NO_OPTIONS
from validation.digest import ROOT

SOURCES = ROOT / "cuda_src"
HALF = np.dtype(np.float16)


# Layout


CONSTANTS = {"kMaxBatchAxes": MAX_BATCH_AXES}


def members(file, name):
    """(type, name, array length or None) of each member of a struct, in order."""
    text = re.sub(r"//.*", "", (SOURCES / file).read_text())
    body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL).group(1)
    for kind, names in re.findall(r"(\w+\*?)\s+([^;]+);", body.replace("const ", "")):
        for member, length in re.findall(r"(\w+)(?:\[(\w+)\])?\s*(?:,|$)", names.strip()):
            yield kind, member, int(CONSTANTS.get(length, length)) if length else None


def test_the_schedule_is_that_of_the_header():
    kinds = {"uint64*": np.uint64, "uint64": np.uint64, "int": np.int32}
    found = [
        (kinds[kind], name)
        for kind, name, _ in members("common/tile_scheduler.cuh", "TileScheduler")
    ]
    assert found == [(TILE_SCHEDULER[name].type, name) for name in TILE_SCHEDULER.names]
    assert TILE_SCHEDULER.itemsize == 32


def test_the_struct_is_that_of_the_kernel():
    sizes = {"TensorMap": (128, 64), "AttentionParams": (ATTENTION_PARAMS.itemsize, 8)}
    sizes |= {"TileScheduler": (TILE_SCHEDULER.itemsize, 8), "int": (4, 4)}
    sizes |= {"int64": (8, 8), "float*": (8, 8), "void*": (8, 8)}
    at, names = 0, []
    for kind, name, length in members("attention/fwd_sm90.cuh", "FwdSm90Params"):
        size, alignment = sizes[kind]
        at = -(-at // alignment) * alignment
        assert FWD_SM90_PARAMS.fields[name][1] == at, name
        assert FWD_SM90_PARAMS[name].itemsize == size * (length or 1), name
        at += size * (length or 1)
        names.append(name)
    assert names == list(FWD_SM90_PARAMS.names)
    assert FWD_SM90_PARAMS.itemsize == -(-at // 64) * 64


# Elements


def problem_of(q, k, v, bias=None, mask=None, **options):
    return attention_problem.attention_problem(q, k, v, bias, mask, **NO_OPTIONS | options)


def view_of(problem, out):
    return attention_problem.out_view(problem, out.shape, out.strides)


@st.composite
def layouts(draw, shape, turned):
    """An array whose batch axes lie in memory in any order, of rows of whole 16 bytes."""
    order = [*draw(st.permutations(range(turned))), *range(turned, len(shape))]
    rows = [shape[axis] for axis in order]
    rows[-1] = -(-rows[-1] // 8) * 8 + draw(st.sampled_from([0, 8]))
    whole = np.zeros(rows, HALF)[..., : shape[-1]]
    return whole.transpose(np.argsort(order))


@st.composite
def calls(draw):
    """q, k, v and out with any batch axes, of which k and v repeat some; heads may be grouped."""
    batch = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=3))
    q_len, k_len = draw(st.sampled_from([1, 3, 17, 64, 70])), draw(st.integers(1, 9))
    head_dim, v_dim = draw(st.sampled_from([8, 40, 72])), draw(st.sampled_from([8, 16, 64]))
    fewer = [n if draw(st.booleans()) else 1 for n in batch]
    if len(batch) >= 2 and draw(st.booleans()):
        fewer = list(batch)
        batch[-1] *= draw(st.sampled_from([2, 3, 4, 8]))
    shapes = (*batch, q_len, head_dim), (*fewer, k_len, head_dim), (*fewer, k_len, v_dim)
    arrays = [draw(layouts(shape, len(shape) - 2)) for shape in shapes]
    arrays.append(draw(layouts((*batch, q_len, v_dim), draw(st.sampled_from([0, len(batch)])))))
    return arrays


def addresses(array, batch, kv_heads=False):
    """Byte offset of each row of an array from its first element, (entries, rows)."""
    shape, strides = array.shape[:-1], array.strides[:-1]
    places = np.zeros(shape, np.int64)
    for axis, (n, step) in enumerate(zip(shape, strides, strict=True)):
        places += (np.arange(n) * step).reshape(-1, *[1] * (len(shape) - axis - 1))
    if kv_heads and places.ndim >= 2 and 1 < places.shape[-2] < batch[-1]:
        places = np.repeat(places, batch[-1] // places.shape[-2], axis=-2)
    return np.broadcast_to(places, (*batch, shape[-1])).reshape(-1, shape[-1])


def coordinates(p, entry):
    """Where the kernel finds a batch entry along the maps' batch axes."""
    found = []
    for n in reversed(p["size"].tolist()):
        entry, index = divmod(entry, n)
        found.insert(0, index)
    assert entry == 0
    return found


def variant(tile_m):
    """One of so many queries a tile, and of 128 keys."""
    return next(row for row in fwd_sm90.VARIANTS if (row.tile_m, row.tile_n) == (tile_m, 128))


def geometry_of(step):
    return dict(step.maps.values())


class Part:
    """What a step's schedule says."""

    def __init__(self, step):
        self.first_batch = int(step.params["common"]["first_batch"][0])
        scheduler = step.params["scheduler"][0].item()
        self.tiles, self.entries, self.entries_per_l2_group = scheduler[2:]


@given(call=calls(), tile_m=st.sampled_from([128, 192]), most=st.sampled_from([1, 3, 2**31 - 1]))
def test_tensor_maps_lead_to_every_row(call, tile_m, most):
    q, k, v, out = call
    problem = problem_of(q, k, v)
    view = view_of(problem, out)
    traits = Traits(problem, view)
    if not fwd_sm90.supports(traits):  # more axes than maps have
        sizes = traits.mapped_sizes
        walkable = [
            step % 16 == 0
            for x in call
            for n, step in zip(x.shape[:-1], x.strides[:-1], strict=True)
            if n > 1
        ]
        dense = [x.strides[-1] == 2 for x in call if x.shape[-1] > 1]
        assert len(sizes) > 3 or not all(walkable + dense)
        return
    with mock.patch.object(attention_params, "MAX_GRID", most):
        steps = fwd_sm90.steps(traits, variant(tile_m), 10)
    p, maps, parts = steps[0].params[0], geometry_of(steps[0]), [Part(step) for step in steps]
    batch, heads = out.shape[:-2], 1 << int(p["row_shift"])
    q_tiles = -(-problem.q_len * heads // tile_m)
    assert p["common"]["q_tiles"] == q_tiles
    assert heads == 1 or q_tiles < heads * -(-problem.q_len // tile_m)
    for name, geometry in maps.items():
        pointer = 1024
        assert tensor_map._refusal(pointer, 2, *geometry, 128) is None, name

    entries = int(np.prod(p["size"], dtype=np.int64))
    assert entries * heads == np.prod(batch, dtype=np.int64)
    covered = [range(x.first_batch, x.first_batch + x.entries) for x in parts]
    assert list(itertools.chain(*covered)) == list(range(entries))
    assert all(
        x.tiles == x.entries * q_tiles and 0 < x.entries_per_l2_group <= x.entries for x in parts
    )
    assert all(x.tiles <= max(most, q_tiles) for x in parts)

    want = {
        "q": addresses(q, batch),
        "out": addresses(out, batch),
        "k": addresses(k, batch, True),
        "v": addresses(v, batch, True),
    }
    walked = {name: p[f"{name}_step"] for name in "qkv"} | {"out": np.ones(3, int)}
    for entry in range(entries):
        at = coordinates(p, entry)
        for name, (shape, strides, box) in maps.items():
            here = [i * int(s) for i, s in zip(at, walked[name], strict=True)]
            packed = heads > 1 and name in ("q", "out")
            axes = len(here) - packed
            assert all(i < n for i, n in zip(here[:axes], shape, strict=False))
            base = sum(i * s for i, s in zip(here[:axes], strides, strict=False))
            rows = want[name].shape[1]
            row = np.arange(rows) * (strides[3 - packed] if rows > 1 else 0)
            if packed:
                assert (shape[2:4], box[2:4]) == ((rows, heads), (64 // heads, heads))
                for head in range(heads):
                    moved = base + head * strides[3] + row
                    np.testing.assert_array_equal(moved, want[name][entry * heads + head])
            else:
                assert shape[3] == rows
                for head in range(heads):
                    np.testing.assert_array_equal(base + row, want[name][entry * heads + head])


def half(*shape):
    return np.zeros(shape, HALF)


def supported(problem, out):
    return fwd_sm90.supports(Traits(problem, view_of(problem, out)))


def step_for(q, k, v=None, tile_m=128, **options):
    """The one launch of a call."""
    v = k if v is None else v
    problem = problem_of(q, k, v, **options)
    out = np.zeros(problem.out_shape, HALF)
    assert supported(problem, out)
    (step,) = fwd_sm90.steps(Traits(problem, view_of(problem, out)), variant(tile_m), 10)
    return step


@pytest.mark.parametrize(
    ("q", "k", "shift", "size"),
    [
        ((2, 8, 1, 64), (2, 2, 70, 64), 2, [1, 4, 1]),
        ((2, 8, 17, 64), (2, 4, 70, 64), 1, [1, 8, 1]),
        ((64, 17, 64), (70, 64), 6, [1, 1, 1]),
        ((2, 8, 128, 64), (2, 2, 70, 64), 0, [1, 4, 4]),  # full tiles
        ((2, 8, 129, 64), (2, 2, 70, 64), 2, [1, 4, 1]),
        ((2, 6, 1, 64), (2, 2, 70, 64), 0, [1, 4, 3]),  # no power of two
        ((128, 1, 64), (70, 64), 0, [1, 1, 128]),  # more heads than a box has rows
        ((2, 8, 1, 64), (2, 8, 70, 64), 0, [1, 1, 16]),
    ],
)
def test_heads_are_packed_where_that_makes_fewer_tiles(q, k, shift, size):
    p = step_for(half(*q), half(*k)).params[0]
    assert (p["row_shift"], p["size"].tolist()) == (shift, size)
    sizes = p["common"]["batch_size"][: p["common"]["batch_axes"]].tolist()
    assert not shift or sizes[-1] == 2**shift  # the slow path's axes have the heads last


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"scale": -1.0}], ids=str)
def test_heads_are_not_packed_where_scores_are_transformed(options):
    assert step_for(half(2, 8, 1, 64), half(2, 2, 70, 64), **options).params["row_shift"] == 0


def test_heads_are_not_packed_under_a_mask():
    q, k = half(2, 8, 1, 64), half(2, 2, 70, 64)
    p = step_for(q, k, mask=np.ones((1, 70), bool)).params[0]
    assert (p["row_shift"], p["common"]["q_tiles"], p["size"].prod()) == (0, 1, 16)


def test_an_array_that_broadcasts_has_no_axis():
    q, k, v = half(2, 3, 5, 64), half(3, 9, 64), half(2, 1, 9, 64)
    step = step_for(q, k, v)
    p, maps = step.params[0], geometry_of(step)
    assert p["size"].tolist() == [1, 2, 3]
    assert [p[f"{name}_step"].tolist() for name in "qkv"] == [[0, 1, 1], [0, 0, 1], [0, 1, 0]]
    assert maps["k"].shape == (1, 1, 3, 9, 64)
    assert maps["v"].shape == (1, 2, 1, 9, 64)


# What goes to which kernel


def strided(shape, strides):
    return np.lib.stride_tricks.as_strided(np.zeros(2**16, HALF), shape, strides)


DENSE = half(2, 3, 20, 64)
CHANGES = {
    "dense": ({}, True),
    "(batch, length, heads, dim)": ({"q": half(2, 20, 3, 64).swapaxes(1, 2)}, True),
    "dims that are no multiples of 8, in rows that are": (
        {"v": half(2, 3, 20, 40)[..., :37]},
        False,
    ),
    "odd rows": ({"v": half(2, 3, 20, 37)}, False),
    "rows of 8 more bytes": ({"q": half(2, 3, 20, 68)[..., :64]}, False),
    "reversed rows": ({"k": DENSE[:, :, ::-1]}, False),
    "reversed heads": ({"q": DENSE[:, ::-1]}, False),
    "one row for all": ({"k": strided((2, 3, 20, 64), (384, 128, 0, 2))}, False),
    "one query for all": ({"q": strided((2, 3, 20, 64), (384, 128, 0, 2))}, False),
    "broadcast heads": ({"k": half(20, 64), "v": half(2, 1, 20, 64)}, True),
    "no keys": ({"k": half(2, 3, 0, 64), "v": half(2, 3, 0, 64)}, False),
    "a mask": ({"mask": np.ones((20, 20), bool)}, True),
    "a bias": ({"bias": np.zeros((3, 20, 20))}, True),
    "no columns": ({"v": half(2, 3, 20, 0)}, False),
    "one column in odd rows": ({"v": half(2, 3, 20, 1)}, False),
    "one key in an odd row": ({"k": half(2, 3, 1, 64), "v": half(2, 3, 1, 64)}, True),
    "rows that overlap": ({"k": strided((2, 3, 20, 64), (7680, 2560, 16, 2))}, True),
    "rows 2**40 bytes apart": ({"k": strided((2, 3, 2, 64), (384, 128, 2**40, 2))}, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_tensor_maps_can_walk(change):
    changed, want = CHANGES[change]
    arrays = {"q": DENSE, "k": DENSE, "v": DENSE} | changed
    if arrays["k"].shape[-2] != arrays["v"].shape[-2]:
        arrays["v"] = arrays["v"][..., : arrays["k"].shape[-2], :]
    problem = problem_of(**arrays)
    out = np.zeros(problem.out_shape, HALF)
    assert supported(problem, out) is want


def test_an_output_must_be_walkable_too():
    problem = problem_of(DENSE, DENSE, DENSE)
    for out, want in (
        (half(2, 3, 20, 64), True),
        (half(2, 3, 20, 72)[..., :64], True),
        (half(2, 3, 20, 68)[..., :64], False),
        (half(2, 3, 20, 64)[:, ::-1], False),
    ):
        assert supported(problem, out) is want


def test_four_axes_that_do_not_merge_are_too_many():
    q = half(2, 2, 2, 2, 20, 64)
    turned = q.transpose(3, 2, 1, 0, 4, 5)
    problem = problem_of(q, turned, turned)
    assert not supported(problem, q)
    problem = problem_of(q, q, q)
    assert supported(problem, q)
    problem = problem_of(q[0], turned[0], turned[0])
    assert supported(problem, q[0])


@pytest.mark.parametrize("target", SHARED_LIMIT)
@pytest.mark.parametrize("dim", [1, 32, 33, 64, 96, 100, 192, 200, 256])
def test_sm90_comes_first_where_it_can(target, dim):
    for score, masked in itertools.product((None, ScoreMod(softcap=True)), (False, True)):
        call = Call(score, masked=masked)
        row = select("bfloat16", dim, 1, target, call)
        other = select("bfloat16", dim, 1, target, call._replace(mapped=False))
        assert isinstance(other, FwdSm80)
        assert other.sparse == masked
        if target == "sm_90a":
            assert isinstance(row, FwdSm90)
            assert row.score == score
            assert row.sparse == masked
            assert row.dim >= dim
        else:
            assert row == other
    assert select("bfloat16", dim, 257, target) is None


def test_every_row_can_be_reached():
    found = set()
    for row in forward.VARIANTS:
        for target in row.targets:
            rows = forward.reachable(row.dtype, row.dim, row.dim, target)
            assert rows[0] == min(rows, key=lambda row: row.rank)
            found.update(rows)
    assert found == set(forward.VARIANTS)


# Sections


def sections(q, k, **options):
    return [Part(step_for(half(*q), half(*k), **options)).entries_per_l2_group]


def test_without_a_band_entries_come_one_after_another():
    assert sections((4, 8, 300, 64), (4, 8, 300, 64)) == [1]


@pytest.mark.parametrize(
    ("q", "k", "want"),
    [
        ((4, 8, 300, 64), (4, 8, 300, 64), 32),  # all there are
        ((4, 8, 65536, 128), (4, 8, 65536, 128), 16),  # one fits
        ((4, 8, 131072, 128), (4, 8, 131072, 128), 8),  # long ones: fewer together
        ((4, 8, 524288, 128), (4, 8, 524288, 128), 2),
        ((4, 32, 524288, 128), (4, 4, 524288, 128), 2),  # even if eight read the same
        ((4, 8, 2**21, 128), (4, 8, 2**21, 128), 1),
        ((4, 32, 1024, 128), (4, 32, 1024, 128), 32),  # 64 fit
        ((4, 32, 4096, 128), (4, 32, 4096, 128), 16),
        ((4, 32, 4096, 128), (4, 8, 4096, 128), 32),  # four read the same
        ((2, 1, 300, 64), (2, 1, 300, 64), 2),
        ((1, 50, 300, 64), (1, 50, 300, 64), 25),  # two equal ones
        ((1, 40, 300, 64), (1, 40, 300, 64), 40),  # not 32 and 8
    ],
)
def test_under_a_band_entries_that_fit_the_cache_take_turns(q, k, want):
    def virtual(shape):
        strides = np.cumprod([2, *shape[:0:-1]])[::-1]
        return np.lib.stride_tricks.as_strided(np.zeros(1, HALF), shape, strides)

    q, k = virtual(q), virtual(k)
    problem = problem_of(q, k, k, is_causal=True)
    view = attention_problem.out_view(problem, q.shape, q.strides)
    (step,) = fwd_sm90.steps(Traits(problem, view), variant(128), 10)
    found = Part(step).entries_per_l2_group
    del q, k, problem, view  # nobody may look at their entries, pytest's report included
    assert found == want
