"""The plans of attention: what they hand to a launch, without a GPU."""

import numpy as np
import pytest

from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import POINTERS, MaskPointers, Traits
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FWD_SM90_PARAMS
from fa_cupy.gpu.kernels.forward import VARIANTS, for_any_layout, make_plan, reachable
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
    [{"k_lengths": np.array(7)}, {"dim": 264}, {"target": "sm_75"}],
    ids=str,
)
def test_what_the_kernel_of_float32_does_not_take(options):
    target = options.pop("target", "sm_90a")
    assert for_any_layout(single(**options).problem, target) is None
