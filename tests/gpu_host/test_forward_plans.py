"""The plans of attention: what they hand to a launch, without a GPU."""

import numpy as np
import pytest

from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import POINTERS, MaskPointers, Traits
from fa_cupy.gpu.kernels.attention.full_precision import fwd_fp32_sm90, split_kv
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FWD_SM90_PARAMS
from fa_cupy.gpu.kernels.forward import (
    VARIANTS,
    Call,
    for_any_layout,
    make_plan,
    reachable,
    select,
)
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.core.test_checks import NO_OPTIONS
from tests.support.noting_launcher import WORKSPACE, NotingLauncher

HALF = np.dtype(np.float16)
PLACES = (0x10000, 0x20000, 0x30000, 0, 0x40000, 0x50000)
MASK = MaskPointers(*range(0x1000, 0xA000, 0x1000), words_by_block=3)


@pytest.fixture
def launcher():
    return NotingLauncher()


def forward(launcher, q_len=300, heads=2, k_len=300, masked=False, **options):
    q, k = np.zeros((heads, q_len, 64), HALF), np.zeros((heads, k_len, 64), HALF)
    mask = np.ones((q_len, k_len), bool) if masked else None
    problem = attention_problem.attention_problem(q, k, k, None, mask, **NO_OPTIONS | options)
    out = attention_problem.out_view(problem, q.shape, q.strides)
    return make_plan(Traits(problem, out), launcher)


def test_maps_pointers_and_schedule_reach_the_launch(launcher):
    plan = forward(launcher)
    assert plan.names == POINTERS
    assert plan.run(PLACES)
    ((step, values),) = launcher.launched
    assert values.dtype == FWD_SM90_PARAMS
    assert (step.variant.source, step.grid) == ("attention/fwd_sm90", 4)
    p = values[0]
    for name, place in zip("qkv", PLACES, strict=False):
        assert (p[f"{name}_map"] == place).all()
        assert p["common"][name] == place
    assert (p["out_map"] == p["common"]["out"]).all()
    assert p["common"]["lse"] == PLACES[5]
    assert p["scheduler"].item() == (0, 0, 4, 2, 1)  # a block for each tile: no counter
    assert p["size"].tolist() == [1, 1, 2]
    assert launcher.taken == []


@pytest.mark.parametrize("given", [0, 0x9000])
def test_more_tiles_than_multiprocessors_get_a_counter_for_each_launch(launcher, given):
    plan = forward(launcher, q_len=3000)
    assert plan.workspace_bytes == 16
    for _ in range(3):
        plan.run(PLACES, given)
    assert [step.grid for step, _ in launcher.launched] == [launcher.multiprocessors] * 3
    schedules = [values["scheduler"][0].item() for _, values in launcher.launched]
    assert {s[0] for s in schedules} == {given or WORKSPACE}
    assert len({s[1] for s in schedules} - {0}) == 3
    tile_m = plan.steps[0].variant.tile_m
    assert {s[2:] for s in schedules} == {(2 * -(-3000 // tile_m), 2, 1)}
    assert launcher.taken == ([] if given else [16] * 3)


@pytest.mark.parametrize("which", [0, 1, 2, 4])
@pytest.mark.parametrize("refused", [False, True])
def test_a_pointer_without_a_map_goes_to_the_other_kernel(launcher, which, refused):
    plan = forward(launcher)
    plan.run(PLACES)
    wrong = list(PLACES)
    wrong[which] += 16 if refused else 2
    launcher.refused.add(wrong[which])
    for _ in range(2):
        plan.run(tuple(wrong))
        step, values = launcher.launched[-1]
        assert step.variant.source == "attention/fwd_sm80"
        assert values["aligned"][0] == refused
        assert values["q"][0] == wrong[0]
    plan.run(PLACES)
    step, values = launcher.launched[-1]
    assert step is plan.steps[0]
    for name, place in zip(("q", "k", "v", "out"), (*PLACES[:3], PLACES[4]), strict=True):
        assert (values[f"{name}_map"] == place).all()


def test_parts_follow_each_other(launcher, monkeypatch):
    monkeypatch.setattr(attention_params, "MAX_GRID", 7)
    forward(launcher, heads=5, is_causal=True).run(PLACES)
    found = [
        (int(v["common"]["first_batch"][0]), *v["scheduler"][0].item()[2:], step.grid)
        for step, v in launcher.launched
    ]
    assert found == [(0, 6, 3, 3, 6), (3, 4, 2, 2, 4)]


@pytest.mark.parametrize("fallback", [False, True])
def test_a_mask_reaches_every_launch(launcher, monkeypatch, fallback):
    def masked():
        plan = forward(launcher, heads=5, masked=True)
        return plan.fallback() if fallback else plan

    def common(values):
        return values[0] if fallback else values["common"][0]

    plan = masked()
    assert plan.steps[0].variant.sparse
    moved = MASK._replace(matrix_of_entry=0xC000)
    plan.run((*PLACES, *MASK))
    plan.run((*PLACES, *moved))
    assert [common(values)["mask"].item() for _, values in launcher.launched] == [MASK, moved]
    assert common(launcher.launched[0][1])["q_tiles"] == 3
    # Of several launches none has all rows of blocks: the order is not theirs.
    monkeypatch.setattr(attention_params, "MAX_GRID", 7)
    launcher.launched.clear()
    masked().run((*PLACES, *MASK))
    found = [
        (int(common(v)["first_batch"]), common(v)["mask"].item()) for _, v in launcher.launched
    ]
    told = MASK._replace(order=0)
    assert found == [(0, told), (2, told), (4, told)]


@pytest.mark.parametrize(
    ("entries", "q_len", "k_len", "stem"),
    [
        (1, 1, 8192, "fwd_sm90"), (2, 1, 8192, "fwd_splitkv"), (16, 1, 8192, "fwd_splitkv"),
        (1, 1, 65535, "fwd_sm90"), (1, 1, 65536, "fwd_splitkv"), (16, 1, 4095, "fwd_sm90"),
        (1, 1, 4095, "fwd_splitkv"), (16, 2, 8192, "fwd_splitkv"), (16, 9, 8192, "fwd_sm90"),
        (16, 1, 511, "fwd_sm90"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shared", [4, 1])
def test_few_queries_to_many_keys(entries, q_len, k_len, stem, shared):
    """Of 8 heads of keys, each for four of queries; or of heads that have keys of their own."""
    q, k = (
        np.empty((entries, 8, shared, q_len, 64), HALF),
        np.empty((entries, 8, 1, k_len, 64), HALF),
    )
    problem = attention_problem.attention_problem(q, k, k, None, None, **NO_OPTIONS)
    traits = Traits(problem, attention_problem.out_view(problem, q.shape, q.strides))
    plan = make_plan(traits, NotingLauncher(132))
    assert plan.steps[0].variant.source == f"attention/{stem}"


def test_few_queries_that_a_window_hides_most_keys_from():
    q, k = np.empty((16, 8, 4, 1, 64), HALF), np.empty((16, 8, 1, 8192, 64), HALF)
    options = NO_OPTIONS | {"window": (127, 0), "causal_align": "bottom_right"}
    problem = attention_problem.attention_problem(q, k, k, None, None, **options)
    traits = Traits(problem, attention_problem.out_view(problem, q.shape, q.strides))
    assert make_plan(traits, NotingLauncher(132)).steps[0].variant.source == "attention/fwd_sm90"


def test_every_variant_has_one_for_other_pointers():
    for row in VARIANTS:
        for target in row.targets:
            assert reachable(row.dtype, row.dim, row.dim, target)[-1].rank[0] == 1


def single(q_len=300, dim=64, masked=False, **options):
    """A problem of float32 and its traits."""
    q, k = np.zeros((2, q_len, dim), np.float32), np.zeros((2, 5000, dim), np.float32)
    mask = np.ones((q_len, 5000), bool) if masked else None
    problem = attention_problem.attention_problem(q, k, k, None, mask, **NO_OPTIONS | options)
    return Traits(problem, attention_problem.out_view(problem, q.shape, q.strides))


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("q_len", [1, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_float32_has_a_kernel(launcher, target, q_len, masked):
    """Few queries too, which in 16 bits have another one."""
    launcher.target = target
    traits = single(q_len, 200, masked, softcap=3.0, sinks=np.zeros(2, np.float32)[:, None])
    assert for_any_layout(traits.problem, target).sparse == masked
    plan = make_plan(traits, launcher)
    plan.run((*PLACES, 0x60000, *MASK) if masked else (*PLACES, 0x60000))
    ((step, values),) = launcher.launched
    assert step.variant.source == "attention/fwd_fp32"
    assert (step.variant.dim, step.variant.sparse) == (256, masked)
    assert step.variant.score == ScoreMod(softcap=True)
    rows = step.variant.tile_m
    assert rows == (128 if target == "sm_90a" else 64)  # of which shared memory holds 128
    assert step.grid == 2 * (-(-q_len // 128) * (128 // rows) if masked else -(-q_len // rows))
    assert values["aligned"][0]
    assert values["k_row"][0] == 200


@pytest.mark.parametrize(
    ("dtype", "scale", "softcap", "taken"),
    [
        ("float32", 1.0, 50.0, True),
        ("float32", 0.0, 50.0, True),
        ("float32", 1.0, 3e36, False),
        ("float32", 1e-12, 1e31, False),
        ("float32", 1e-40, None, False),
        ("float32", 1.0, 5e-324, False),
        ("float32", 1.0, 1e-37, True),
        ("float16", 1.0, 3e36, True),
        ("float64", 1e-12, 1e31, True),
        ("float64", 5.7e-246, 2.7e175, False),
    ],
)
def test_scales_and_softcaps_that_kernels_cannot_hold(dtype, scale, softcap, taken):
    q = np.zeros((20, 64), dtype)
    given = {"softcap": softcap} if softcap else {}
    problem = attention_problem.attention_problem(q, q, q, None, None, scale=scale, **given)
    assert (for_any_layout(problem, "sm_90a") is not None) == taken


def test_packed_float32_has_a_kernel(launcher):
    offsets = np.array([0, 10, 300], np.int32)
    traits = single(q_offsets=offsets, k_offsets=np.array([0, 9, 5000]))
    plan = make_plan(traits, launcher)
    assert [step.variant.source for step in plan.steps] == [
        "attention/row_intervals", "attention/fwd_fp32",
    ]  # fmt: skip
    assert plan.steps[-1].variant.packed


@pytest.mark.parametrize(
    "options",
    [{"k_lengths": np.array(7), "masked": True}, {"dim": 264}, {"target": "sm_75"}],
    ids=str,
)
def test_what_the_kernel_of_float32_does_not_take(options):
    target = options.pop("target", "sm_90a")
    assert for_any_layout(single(**options).problem, target) is None


# --------------------------------------------------------------- keys of float32 that are split
def long_single(batches=((2,), (2,), (2,)), lengths=(600, 300), dims=(64, 64), **options):
    """The traits of a problem of float32 whose arrays have these batch axes."""
    (q_len, k_len), (dim, v_dim) = lengths, dims
    shapes = (q_len, dim), (k_len, dim), (k_len, v_dim)
    q, k, v = (
        np.zeros((*batch, *shape), np.float32) for batch, shape in zip(batches, shapes, strict=True)
    )
    mask = np.ones((q_len, k_len), bool) if options.pop("masked", False) else None
    problem = attention_problem.attention_problem(q, k, v, None, mask, **NO_OPTIONS | options)
    out = np.zeros(problem.out_shape, np.float32)
    return Traits(problem, attention_problem.out_view(problem, out.shape, out.strides))


@pytest.mark.parametrize(
    ("batches", "q_len", "splits"),
    [
        (((2,), (2,), (2,)), 511, False),
        (((2,), (2,), (2,)), 512, True),
        (((3, 4), (3, 1), (3, 1)), 128, True),  # heads share keys
        (((3, 4), (3, 1), (3, 1)), 127, False),
        (((3, 4), (3, 2), (3, 2)), 256, True),  # pairs of heads do
        (((3, 4), (3, 1), (3, 4)), 511, False),  # but not values
        (((4, 4), (4, 1), (1, 4)), 511, False),
        (((512,), (), ()), 1, True),
        (((2, 1, 2, 1, 2), (2, 1, 2, 1, 2), (2, 1, 2, 1, 2)), 512, True),
    ],
)
def test_keys_are_split_where_enough_queries_share_them(launcher, batches, q_len, splits):
    traits = long_single(batches, (q_len, 300))
    assert fwd_fp32_sm90.supports(traits) == splits
    sources = [step.variant.source for step in make_plan(traits, launcher).steps]
    one = ["attention/split_kv", "attention/fwd_fp32_sm90"]
    assert sources == (one if splits else ["attention/fwd_fp32"])


def test_keys_of_many_batch_axes_are_not_split():
    """The launches of such a problem would each need tiles of their own."""
    axes = attention_params.MAX_BATCH_AXES + 1
    batches = [[2 if i % 2 == of else 1 for i in range(axes)] for of in (0, 1, 1)]
    traits = long_single(((2,) * axes, *batches[1:]), (600, 10))
    assert len(traits.sizes) == axes
    assert not fwd_fp32_sm90.supports(traits)


def test_as_many_tiles_as_a_launch_takes(monkeypatch):
    traits = long_single(((5,), (5,), (5,)), (600, 700))
    monkeypatch.setattr(fwd_fp32_sm90, "MAX_GRID", 2 * 5 * 11)
    assert fwd_fp32_sm90.supports(traits)
    monkeypatch.setattr(fwd_fp32_sm90, "MAX_GRID", 2 * 5 * 11 - 1)
    assert not fwd_fp32_sm90.supports(traits)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize(("dims", "dim"), [((20, 64), 64), ((65, 1), 128), ((128, 129), 256)])
def test_the_row_that_splits_keys(launcher, dims, dim, precision, masked):
    traits = long_single(dims=dims, precision=precision, masked=masked, softcap=2.0)
    first, last = (step.variant for step in make_plan(traits, launcher).steps)
    assert (last.dim, last.sparse, last.parts) == (dim, masked, 2 if precision is None else 1)
    assert last.score == ScoreMod(softcap=True)
    assert (first.dim, first.tile_n, first.parts) == (dim, last.tile_n, last.parts)
    call = Call(None, True, masked, True, precision is not None)
    assert select("float32", *dims, "sm_90a", call) == last.for_score(None)
    for target in ("sm_80", "sm_120"):
        assert select("float32", *dims, target, call).source == "attention/fwd_fp32"


def test_tiles_of_keys_go_from_one_launch_to_the_next(launcher):
    """Entries along axes of which keys or values have one only are split once."""
    traits = long_single(((3, 2), (3, 1), (1, 2)), (600, 300), (64, 60))
    plan = make_plan(traits, launcher)
    bytes_of_tile = split_kv.VARIANTS[0].tile_bytes
    assert bytes_of_tile == 4 * 128 * 64 + 4 * 128 + 16 + 4 * 64
    k_bytes, v_bytes = 3 * 3 * bytes_of_tile, 2 * 3 * bytes_of_tile
    v_tiles = WORKSPACE + -(-k_bytes // 256) * 256
    plan.run(PLACES)
    assert launcher.taken == [plan.workspace_bytes]
    assert plan.workspace_bytes >= v_tiles - WORKSPACE + v_bytes
    (first, split), (last, values) = launcher.launched
    assert first.grid == 3 * 3 + 2 * 3
    assert last.grid == 6 * 5
    s, p = split[0], values[0]
    assert (s["rows"], s["tiles"], s["aligned"]) == (300, 3, 1)
    k, v = s["array"]
    assert (k["from"], k["to"], k["blocks"], k["row"], k["cols"]) == (
        PLACES[1], WORKSPACE, 9, 64, 64,
    )  # fmt: skip
    assert (v["from"], v["to"], v["blocks"], v["row"], v["cols"]) == (
        PLACES[2], v_tiles, 6, 60, 60,
    )  # fmt: skip
    assert k["size"][:2].tolist() == [3, 1]
    assert v["size"][:2].tolist() == [1, 2]
    assert k["batch"][:2].tolist() == [300 * 64, 0]
    assert v["batch"][:2].tolist() == [0, 300 * 60]
    assert (p["k"], p["v"]) == (WORKSPACE, v_tiles)
    assert p["k_batch"][:2].tolist() == [3, 0]
    assert p["v_batch"][:2].tolist() == [0, 3]
    assert (p["common"]["q"], p["common"]["out"]) == (PLACES[0], PLACES[4])
    assert p["common"]["lse"] == PLACES[5]


@pytest.mark.parametrize("which", [0, 1, 2, 4])
def test_each_launch_knows_whether_its_arrays_are_aligned(launcher, which):
    plan = make_plan(long_single(), launcher)
    places = list(PLACES)
    places[which] += 4
    plan.run(tuple(places))
    (_, split), (_, values) = launcher.launched
    assert split["aligned"][0] == (which not in (1, 2))
    assert values["common"]["aligned"][0] == (which in (1, 2))


def test_rows_that_are_never_aligned(launcher):
    plan = make_plan(long_single(dims=(64, 62)), launcher)
    plan.run(PLACES)
    (_, split), (_, values) = launcher.launched
    assert not split["aligned"][0]
    assert not values["common"]["aligned"][0]


def test_packed_sequences_whose_keys_are_split(launcher):
    offsets = np.array([0, 10, 600], np.int32)
    traits = long_single(q_offsets=offsets, k_offsets=np.array([0, 9, 300]))
    plan = make_plan(traits, launcher)
    assert [step.variant.source for step in plan.steps] == [
        "attention/split_kv", "attention/row_intervals", "attention/fwd_fp32_sm90",
    ]  # fmt: skip
    assert plan.steps[-1].variant.packed
    assert not plan.steps[0].variant.packed
    plan.run((*PLACES, 0x60000, 0x70000))
    (_, split), (_, intervals), (_, values) = launcher.launched
    assert values[0]["k"] == split[0]["array"][0]["to"]
    written = {int(intervals[0][name]) for name in ("keys_of_row", "order")}
    assert written <= {*values[0]["common"]["mask"].item()} - {0}


def test_a_mask_reaches_the_launch_that_reads_split_keys(launcher):
    make_plan(long_single(masked=True), launcher).run((*PLACES, *MASK))
    (step, values) = launcher.launched[-1]
    assert step.grid == 2 * 5
    assert values[0]["common"]["mask"].item() == MASK


def test_no_keys_at_all(launcher):
    """There is nothing to split, and a launch without a block would be an error."""
    plan = make_plan(long_single(lengths=(600, 0)), launcher)
    plan.run(PLACES)
    ((step, _),) = launcher.launched
    assert step.grid == 2 * 5
