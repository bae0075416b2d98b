"""The kernels of ptx/mask_pack.ptx, run lane by lane by the interpreter of the tests."""

import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import BitMask, layouts
from fa_cupy.core.attention_problem import View
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.masks import packing as params
from tests.support.every_run import examples
from tests.support.ptx_interpreter import Memory, Module

B = layouts.BLOCK
MODULE = Module((compile.ROOT / "ptx/mask_pack.ptx").read_text())
GARBAGE = 0xAB


def garbage(shape, dtype):
    return np.frombuffer(
        bytearray([GARBAGE]) * int(np.prod(shape, initial=np.dtype(dtype).itemsize)), dtype
    ).reshape(shape)


def pack(memory_of_mask, first, view, share=False, wide=None):
    """Run both kernels as gpu.masks.device_mask does; `first` is the place of element (0, 0)."""
    plan = params.packing(view, share)
    memory = Memory()
    states = garbage((plan.matrices * plan.q_tiles, plan.k_tiles), np.uint8)
    words = garbage((*states.shape, 8, 32, 2), np.uint32)
    rows = len(states)
    lists = {
        name: garbage(rows, np.int64) if "_" in name else garbage(states.shape, np.int32)
        for name in ("partial_begin", "partial_end", "partial", "full_begin", "full_end", "full")
    }
    lists["entries"] = garbage(plan.entries, np.int32)
    struct = plan.pack.copy()
    struct["mask"] = memory.add(memory_of_mask) + first
    aligned = plan.aligned and int(struct["mask"][0]) % 16 == 0
    struct["wide"] = aligned if wide is None else wide
    struct["states"], struct["words"] = memory.add(states), memory.add(words)
    MODULE.launch("mask_pack", plan.blocks, params.PACK_THREADS, struct, memory)
    struct = plan.lists.copy()
    struct["states"] = memory.add(states)
    for name, array in lists.items():
        struct[name] = memory.add(array)
    grid = -(-plan.threads // params.LISTS_THREADS)
    MODULE.launch("mask_lists", grid, params.LISTS_THREADS, struct, memory)
    return plan, states, words, lists


def check(plan, states, words, lists, dense):
    """Compare with the mask that the CPU packs."""
    mask = BitMask.from_dense(dense)
    wanted_lists, tiles = mask._store.with_words(), plan.k_tiles
    for index, entry in zip(np.ndindex(dense.shape[:-2]), lists["entries"], strict=True):
        wanted = mask[index].block_states()
        for q_tile in range(len(wanted)):
            t = entry * plan.q_tiles + (0 if plan.shared else q_tile)
            np.testing.assert_array_equal(states[t], wanted[q_tile])
            row = wanted_lists.row(mask.entries[index] * len(wanted) + q_tile, 0, tiles)
            for name, found in (("partial", row[0]), ("full", row[2])):
                begin, end = lists[f"{name}_begin"][t], lists[f"{name}_end"][t]
                assert begin == t * tiles
                np.testing.assert_array_equal(lists[name].reshape(-1)[begin:end], found)
            if not plan.shared or q_tile == 0:
                np.testing.assert_array_equal(words[t, row[0]], row[1])
            rest = np.delete(words[t], row[0], axis=0)
            assert (rest.view(np.uint8) == GARBAGE).all()  # neither empty nor full: not written


@pytest.mark.skipif(not shutil.which("ptxas"), reason="needs ptxas")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_every_target_takes_the_file(target, tmp_path):
    file = compile.ROOT / "ptx/mask_pack.ptx"
    command = ["ptxas", "-v", f"-arch={target}", "-o", str(tmp_path / "out"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = compile.resource_report(done.stderr)
    assert found.registers <= 40
    assert (found.stack, found.spill_stores, found.spill_loads) == (0, 0, 0)


def test_the_structs_are_as_the_kernels_say():
    """Offsets in the comments of the PTX, against the dtypes."""
    source = (compile.ROOT / "ptx/mask_pack.ptx").read_text()
    for name, dtype in (("Pack", "PACK"), ("Lists", "LISTS"), ("Bits", "BITS")):
        fields = getattr(params, f"MASK_{dtype}").fields
        struct = source.partition(f"struct Mask{name} {{")[2].partition("// };")[0]
        offsets = {}
        for line in struct.strip().splitlines():
            at, text = line.strip("/ ").split(None, 1)
            declared = text.partition(";")[0]
            kind, names = declared.replace("const ", "").split(None, 1)
            size = 8 if kind.endswith(("*", "64")) else 4
            for i, field in enumerate(names.split(", ")):
                offsets[field.partition("[")[0]] = int(at) + i * size
        assert offsets == {field: offset for field, (_, offset) in
                           ((k, v[:2]) for k, v in fields.items())}  # fmt: skip


VALUES = st.sampled_from([(0, 1), (0, 255), (0, 128), (0, 1, 2, 127, 128, 254, 255), (0,), (1, 7)])


@given(st.data())
@examples(16, fewer=4)
def test_any_mask_is_packed_as_on_the_cpu(data):
    lengths = [data.draw(st.sampled_from([1, 5, 16, 100, 127, 128, 129, 144, 200, 256, 272])) for
               _ in range(2)]  # fmt: skip
    batch = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    values = data.draw(VALUES)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shape = [*batch, *lengths]
    layout = data.draw(st.sampled_from(["dense", "aligned", "turned", "reversed", "spaced"]))
    if layout == "aligned":
        base = np.zeros((*shape[:-1], -(-shape[-1] // 16) * 16 + 16), np.uint8)
        mask = base[..., : shape[-1]]
    elif layout == "turned":
        base = np.zeros((*shape[:-2], shape[-1], shape[-2]), np.uint8)
        mask = base.swapaxes(-1, -2)
    elif layout == "spaced":
        base = np.zeros((*shape[:-1], 3 * shape[-1] + 2), np.uint8)
        mask = base[..., 2 : 2 + 3 * shape[-1] : 3]
    else:
        base = np.zeros(shape, np.uint8)
        mask = base[..., ::-1, ::-1] if layout == "reversed" else base
    share = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)))
    tiles = [-(-n // B) for n in lengths]
    chance = rng.choice(share, (*batch, *tiles)).repeat(B, -2).repeat(B, -1)
    chosen = rng.random(shape) < chance[..., : shape[-2], : shape[-1]]
    base[...] = rng.integers(0, 256, base.shape)  # what lies between must not be seen
    mask[...] = np.where(chosen, rng.choice([v for v in values if v] or [1], shape), 0)
    if 0 not in values:
        mask[...] = rng.choice(values, shape)
    first = mask.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    view = View(mask.shape, mask.strides)
    check(*pack(base, first, view), mask != 0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("chance", [0.01, 0.5, 0.99])
def test_every_byte_goes_to_its_bit(chance, wide):
    """Bytes of any value, on either path."""
    rng = np.random.default_rng(0)
    base = rng.integers(1, 256, (B, B), np.uint8) * (rng.random((B, B)) < chance)
    check(*pack(base, 0, View((B, B), (B, 1)), wide=wide), base != 0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("at", [(0, 0), (127, 127), (127, 0), (64, 63), (15, 16)])
def test_one_byte_makes_a_block_partial(at, wide):
    base = np.zeros((B, B), np.uint8)
    base[at] = 1
    check(*pack(base, 0, View((B, B), (B, 1)), wide=wide), base != 0)
    base = np.full((B, B), 255, np.uint8)
    base[at] = 0
    check(*pack(base, 0, View((B, B), (B, 1)), wide=wide), base != 0)


@pytest.mark.long
def test_broadcast_axes_are_packed_once():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 2, (3, 2, 40, 150), np.uint8)
    view = View((4, 3, 5, 2, 40, 150), (0, base.strides[0], 0, *base.strides[1:]))
    plan, *found = pack(base, 0, view)
    assert plan.matrices == 6
    dense = np.lib.stride_tricks.as_strided(base, *view) != 0
    check(plan, *found, dense)
    wanted = np.broadcast_to(np.arange(6).reshape(1, 3, 1, 2), (4, 3, 5, 2))
    np.testing.assert_array_equal(found[2]["entries"], wanted.reshape(-1))


def test_a_mask_of_keys_is_packed_for_one_row_of_blocks():
    base = np.random.default_rng(0).integers(0, 2, (2, 384), np.uint8)
    base[1, 128:256] = 1
    view = View((2, 3, 300, 384), (384, 0, 0, 1))
    plan, *found = pack(base, 0, view, share=True)
    assert plan.shared
    assert plan.blocks == 2 * 3
    dense = np.lib.stride_tricks.as_strided(base, *view) != 0
    check(plan, *found, np.ascontiguousarray(dense[..., :256, :]))


def test_long_rows_of_blocks_are_listed_in_order():
    rng = np.random.default_rng(0)
    for k_tiles in (0, 1, 31, 32, 33, 100):
        states = rng.integers(0, 3, (5, k_tiles), np.uint8)
        memory, struct = Memory(), np.zeros(1, params.MASK_LISTS)
        struct["states"] = memory.add(states)
        lists = {name: np.full(5, -1) for name in
                 ("partial_begin", "partial_end", "full_begin", "full_end")}  # fmt: skip
        lists |= {name: np.full((5, k_tiles), -1, np.int32) for name in ("partial", "full")}
        for name, array in lists.items():
            struct[name] = memory.add(array)
        struct["rows"], struct["k_tiles"] = 5, k_tiles
        MODULE.launch("mask_lists", 2, params.LISTS_THREADS, struct, memory)
        for t in range(5):
            for name, state in (("partial", 1), ("full", 2)):
                wanted = np.flatnonzero(states[t] == state)
                row = lists[name][t]
                assert lists[f"{name}_begin"][t] == t * k_tiles
                assert lists[f"{name}_end"][t] == t * k_tiles + len(wanted)
                np.testing.assert_array_equal(row[: len(wanted)], wanted)
                assert (row[len(wanted) :] == -1).all()


@given(st.integers(0, 2**32 - 1), st.integers(0, 700))
@settings(max_examples=20)
def test_single_bits(seed, count):
    rng = np.random.default_rng(seed)
    places = rng.integers(0, 3, count)
    inside = rng.integers(0, B * B, count)
    bits = np.zeros((3, B * B), bool)
    bits[places, inside] = True
    words = np.zeros((3, 8, 32, 2), np.uint32)
    memory, struct = Memory(), np.zeros(1, params.MASK_BITS)
    struct["codes"] = memory.add((rng.integers(0, 2**40, count) << 14) + inside)
    struct["places"], struct["words"] = memory.add(places), memory.add(words)
    struct["count"] = count
    grid = -(-count // params.BITS_THREADS)
    MODULE.launch("mask_bits", grid, params.BITS_THREADS, struct, memory)
    np.testing.assert_array_equal(words, layouts.pack(bits.reshape(3, B, B)))
