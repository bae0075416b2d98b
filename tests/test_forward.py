"""What a plan hands to a launch of `fwd_sm90`, without a GPU: nothing is launched here."""

import types
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
import pytest

from fa_cupy.core import attention_problem
from fa_cupy.gpu.driver.tensor_map import LayoutError
from fa_cupy.gpu.kernels.attention.fwd_params import MaskPointers
from fa_cupy.gpu.kernels.attention.fwd_sm90_params import FWD_SM90_PARAMS
from fa_cupy.gpu.kernels.attention.fwd_variants import VARIANTS, Call, reachable, select
from tests.cupy_stand_in import in_place_of_cupy
from tests.test_check import NO_OPTIONS

HALF = np.dtype(np.float16)
MULTIPROCESSORS = 10
PLACES = (0x10000, 0x20000, 0x30000, 0, 0x40000, 0x50000)
MASK = MaskPointers(*range(0x1000, 0xA000, 0x1000), words_by_block=3)


class Device:
    """Stands in for CuPy and the driver, and notes what reaches them."""

    def __init__(self):
        self.launched, self.encoded, self.counters, self.nodes = [], [], [], []
        self.capturing, self.refused = False, set()

    def launch(self, kernel, grid, block, shared_bytes):
        def launch(arguments, stream=None):
            self.launched.append((kernel, grid, arguments.values.copy()))

        return launch

    def encode(self, pointer, dtype, shape, strides, box):
        if pointer in self.refused:
            raise LayoutError("tensor map: the driver refuses it")
        self.encoded.append(pointer)
        return np.void(np.full(16, pointer, np.uint64).tobytes())

    def of_graph(self, size):
        node = self.alloc(size)
        self.nodes.append(self.counters.pop())
        return node

    def alloc(self, size):
        counter = types.SimpleNamespace(ptr=0x7000 + 16 * len(self.counters), mem=None)
        counter.ptr += 0x1000 * len(self.nodes)
        assert size == 16
        self.counters.append(counter)
        return counter


@pytest.fixture
def device(monkeypatch):
    device = Device()
    with in_place_of_cupy():
        maps, fwd_sm80, fwd_sm90 = (
            import_module(f"fa_cupy.gpu.{name}")
            for name in (
                "driver.tensor_map_cache",
                "kernels.attention.fwd_sm80",
                "kernels.attention.fwd_sm90",
            )
        )
        for module in (fwd_sm80, fwd_sm90):
            monkeypatch.setattr(module, "Launch", device.launch)
            monkeypatch.setattr(module, "target_of_device", lambda number: "sm_90a")
        monkeypatch.setattr(fwd_sm90.compile, "load", lambda row, target, number: row)
        monkeypatch.setattr(fwd_sm90, "multiprocessors", lambda number: MULTIPROCESSORS)
        monkeypatch.setattr(maps, "encode_tiled", device.encode)
        monkeypatch.setattr(maps, "LayoutError", LayoutError)
        monkeypatch.setattr(fwd_sm90, "alloc", device.alloc)
        monkeypatch.setattr(fwd_sm90.workspace, "of_graph", device.of_graph)
        monkeypatch.setattr(maps, "bind_context", lambda: None)
        stream = types.SimpleNamespace(ptr=device)
        monkeypatch.setattr(fwd_sm90, "get_current_stream", lambda: stream)
        runtime = types.SimpleNamespace(streamIsCapturing=lambda it: it.capturing)
        monkeypatch.setattr(fwd_sm90, "runtime", runtime)
        device.maps, device.fwd_sm90 = maps, fwd_sm90
        device.params = import_module("fa_cupy.gpu.kernels.attention.fwd_params")
        yield device


def forward(device, q_len=300, heads=2, k_len=300, masked=False, **options):
    q, k = np.zeros((heads, q_len, 64), HALF), np.zeros((heads, k_len, 64), HALF)
    mask = np.ones((q_len, k_len), bool) if masked else None
    problem = attention_problem.attention_problem(q, k, k, None, mask, **NO_OPTIONS | options)
    out = attention_problem.out_view(problem, q.shape, q.strides)
    call = Call(masked=masked)
    rows = [select("float16", 64, 64, "sm_90a", call._replace(mapped=mapped)) for mapped in (1, 0)]
    return device.fwd_sm90.FwdSm90(problem, out, *rows, 0)


def test_maps_pointers_and_schedule_reach_the_launch(device):
    run = forward(device)
    run(PLACES)
    ((kernel, grid, values),) = device.launched
    assert values.dtype == FWD_SM90_PARAMS
    assert (kernel, grid) == (run.row, 4)
    p = values[0]
    for name, place in zip("qkv", PLACES, strict=False):
        assert (p[f"{name}_map"] == place).all()
        assert p["common"][name] == place
    assert (p["out_map"] == p["common"]["out"]).all()
    assert p["common"]["lse"] == PLACES[5]
    assert p["scheduler"].item() == (0, 0, 4, 2, 1)  # a block for each tile: no counter
    assert p["size"].tolist() == [1, 1, 2]
    assert device.counters == []


def test_more_tiles_than_multiprocessors_get_a_counter_for_each_launch(device):
    run = forward(device, q_len=3000)
    for _ in range(3):
        run(PLACES)
    assert [grid for _, grid, _ in device.launched] == [MULTIPROCESSORS] * 3
    schedules = [values["scheduler"][0].item() for _, _, values in device.launched]
    assert [s[0] for s in schedules] == [counter.ptr for counter in device.counters]
    assert len({s[1] for s in schedules} - {0}) == 3
    assert {s[2:] for s in schedules} == {(2 * -(-3000 // run.row.tile_m), 2, 1)}


def test_a_counter_that_the_caller_has_is_taken(device):
    run = forward(device, q_len=3000)
    for _ in range(2):
        run(PLACES, 0x9000)
    assert [int(values["scheduler"]["counter"][0]) for _, _, values in device.launched] == [
        0x9000
    ] * 2
    assert device.counters == []


@pytest.mark.parametrize("counter", [0, 0x9000])
def test_a_graph_gets_the_same_grid_and_counters_of_its_own(device, counter):
    device.capturing = True
    run = forward(device, q_len=3000)
    for _ in range(3):
        run(PLACES, counter)
    assert [grid for _, grid, _ in device.launched] == [MULTIPROCESSORS] * 3
    schedules = [values["scheduler"][0].item() for _, _, values in device.launched]
    assert [s[0] for s in schedules] == [node.ptr for node in device.nodes]
    assert len({s[0] for s in schedules}) == len({s[1] for s in schedules} - {0}) == 3
    assert {s[2:] for s in schedules} == {(2 * -(-3000 // run.row.tile_m), 2, 1)}
    assert device.counters == []


def test_a_graph_with_a_block_for_each_tile_has_no_counter(device):
    device.capturing = True
    forward(device)(PLACES)
    ((_, grid, values),) = device.launched
    assert (grid, values["scheduler"][0].item()[:2]) == (4, (0, 0))
    assert device.nodes == []


def test_maps_are_made_once_for_a_pointer(device):
    run = forward(device)
    run(PLACES)
    assert device.encoded == [PLACES[0], PLACES[1], PLACES[2], PLACES[4]]
    other = (*PLACES[:4], 0x60000, *PLACES[5:])
    for places in (PLACES, other, PLACES, other):
        run(places)
    assert device.encoded[4:] == [0x60000]
    assert [int(v["out_map"][0, 0]) for _, _, v in device.launched[1:]] == [
        PLACES[4], 0x60000, PLACES[4], 0x60000
    ]  # fmt: skip


def test_few_maps_are_kept(device, monkeypatch):
    monkeypatch.setattr(device.maps, "_MOST_MAPS", 4)
    run = forward(device)
    for i in range(10):
        run((0x10000 + 16 * i, *PLACES[1:]))
    assert all(len(known) <= 4 for known in run._maps.known)
    assert [int(v["q_map"][0, 0]) for _, _, v in device.launched] == [
        0x10000 + 16 * i for i in range(10)
    ]


@pytest.mark.parametrize("which", [0, 1, 2, 4])
@pytest.mark.parametrize("refused", [False, True])
def test_a_pointer_without_a_map_goes_to_the_other_kernel(device, which, refused):
    run = forward(device)
    run(PLACES)
    wrong = list(PLACES)
    wrong[which] += 16 if refused else 2
    device.refused.add(wrong[which])
    for _ in range(2):
        run(tuple(wrong))
        kernel, _, values = device.launched[-1]
        assert kernel.source == "attention/fwd_sm80"
        assert values["aligned"][0] == refused
        assert values["q"][0] == wrong[0]
    assert run.for_any_pointers() is run.for_any_pointers()
    run(PLACES)
    kernel, _, values = device.launched[-1]
    assert kernel is run.row
    for name, place in zip(("q", "k", "v", "out"), (*PLACES[:3], PLACES[4]), strict=True):
        assert (values[f"{name}_map"] == place).all()


def test_parts_follow_each_other(device, monkeypatch):
    monkeypatch.setattr(device.params, "MAX_GRID", 7)
    run = forward(device, heads=5, is_causal=True)
    run(PLACES)
    found = [
        (int(v["common"]["first_batch"][0]), *v["scheduler"][0].item()[2:], grid)
        for _, grid, v in device.launched
    ]
    assert found == [(0, 6, 3, 3, 6), (3, 4, 2, 2, 4)]


def test_a_mask_reaches_every_launch_of_the_other_kernel(device, monkeypatch):
    run = forward(device, heads=5, masked=True).for_any_pointers()
    assert run.row.sparse
    run(PLACES, mask=MASK)
    run(PLACES, mask=MASK._replace(matrix_of_entry=0xC000))
    found = [(grid, values["mask"][0].item()) for _, grid, values in device.launched]
    assert found == [(15, MASK), (15, MASK._replace(matrix_of_entry=0xC000))]
    assert device.launched[0][2]["q_tiles"] == 3
    # Of several launches none has all rows of blocks: the order is not theirs.
    monkeypatch.setattr(device.params, "MAX_GRID", 7)
    run = forward(device, heads=5, masked=True).for_any_pointers()
    device.launched.clear()
    run(PLACES, mask=MASK)
    found = [(v["first_batch"][0], grid, v["mask"][0].item()) for _, grid, v in device.launched]
    told = MASK._replace(order=0)
    assert found == [(0, 6, told), (2, 6, told), (4, 3, told)]


def test_marks_are_unique_and_not_zero(device):
    with ThreadPoolExecutor(8) as pool:
        marks = list(pool.map(lambda _: next(device.fwd_sm90._marks), range(20000)))
    assert len(set(marks)) == len(marks)
    assert min(marks) > 0
    assert max(marks) < 2**64


def test_every_row_of_the_table_has_one_for_other_pointers():
    for row in VARIANTS:
        for target in row.targets:
            assert reachable(row.dtype, row.dim, row.dim, target)[-1].rank[0] == 1
