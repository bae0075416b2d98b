"""What chooses between the kernels of causal products, and the plans that follow."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy.core import linear_problem
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear.cost_model import choose
from fa_cupy.gpu.kernels.linear.params import POINTERS, PRODUCT_PARAMS, Job, traits_of
from fa_cupy.gpu.kernels.linear.sm80.chunk_fp32_sm80 import ChunkFp32Sm80
from fa_cupy.gpu.kernels.linear.sm80.chunk_sm80 import ChunkSm80
from fa_cupy.gpu.kernels.linear.sm90.chunk_fp32_pingpong_sm90 import ChunkFp32PingpongSm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_fp32_sm90 import ChunkFp32Sm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.sm90_params import ADDRESSES, MAPPED, PRODUCT_JOB, takes
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from tests.support.kernel_products import split
from tests.support.noting_launcher import WORKSPACE, NotingLauncher
from tests.support.product_rows import (
    CHUNK_FP32_SM90,
    job,
)
from tests.support.products import draw
from tests.support.strategies import DTYPES, lay


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    entries=st.integers(1, 300) | st.sampled_from([65536, 10**6]),
    length=st.integers(0, 10**6) | st.sampled_from([2**31, 2**33]),
    qk_dim=st.integers(1, 256),
    v_dim=st.integers(1, 600),
    target=st.sampled_from([*SHARED_LIMIT]),
    sms=st.integers(1, 200),
)
def test_a_choice_covers_its_call(dtype, entries, length, qk_dim, v_dim, target, sms):
    found = choose(dtype, entries, length, qk_dim, v_dim, target, sms, "chunked")
    if found is None and dtype == "float32":
        assert qk_dim > (128 if SHARED_LIMIT[target] > 160 * 1024 else 64)
        return
    if found is None:
        assert qk_dim > 128
        assert SHARED_LIMIT[target] < 160 * 1024
        return
    assert found.row.dtype == dtype
    assert found.row.dim >= qk_dim
    assert target in found.row.targets
    # Else a block sums what lies before its segment itself, where there are few of them.
    own = isinstance(found.row, ChunkSm90) and entries * found.segments <= sms
    assert (found.states is None) == (found.segments == 1) or (found.states is None and own)
    assert found.segment_rows % found.row.tile_m == 0
    assert found.segment_rows < 2**31
    assert (found.segments - 1) * found.segment_rows < max(1, length)
    assert found.segments * found.segment_rows >= length
    # The workspace is no larger than the arrays.
    if found.segments > 1 and length < 2**31 - 2**16:
        assert found.segments <= length // found.row.tile_m


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("qk_dim", [1, 33, 64, 65, 128, 129, 192, 256])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120", "compute_80+163K"])
def test_float64_has_the_instruction_of_its_target(qk_dim, target, packed):
    found = choose("float64", 8, 5000, qk_dim, 64, target, 132, packed=packed)
    if qk_dim > 128 and target == "sm_120":
        assert found is None or found.row.source == "linear/recurrent_fp64"
        return
    launches = [row for row, _, _ in found.launches(qk_dim, 64)]
    assert [row.source for row in launches] == [
        "linear/chunk_state_fp64", "linear/state_prefix_sum", "linear/chunk_fp64",
    ]  # fmt: skip
    assert {row.dtype for row in launches} == {"float64"}
    assert {row.packed for row in launches} == {packed}
    assert launches[0].wide == launches[-1].wide == (target in ("sm_90a", "sm_120"))


def test_keys_of_float64_that_are_too_wide_run_row_by_row_where_sequences_are_packed():
    found = choose("float64", 8, 100, 257, 64, "sm_90a", 132, packed=True)
    assert found.row.source == "linear/recurrent_fp64"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_full_device_takes_one_pass_and_an_empty_one_is_filled(dtype):
    full = choose(dtype, 128, 4096, 64, 64, "sm_90a", 132)
    assert (full.segments, full.row.tile_n) == (1, 64)
    for entries, sms in itertools.product((1, 8, 16), (84, 108, 132)):
        found = choose(dtype, entries, 65536, 64, 64, "sm_90a", sms)
        assert 0.8 * sms <= entries * found.segments <= 3 * sms


@pytest.mark.parametrize(
    ("call", "source", "states", "segments"),
    [
        (("float32", 128, 4096, 64), "chunk_fp32_pingpong_sm90", None, 1),
        (("float32", 8, 65536, 64), "chunk_fp32_pingpong_sm90", "chunk_state_fp32_sm90", 16),
        (("float32", 16, 32768, 128), "chunk_fp32_sm90", "chunk_state_fp32_sm90", 8),
        (("bfloat16", 8, 1024, 64), "chunk_sm90", None, 16),
        (("bfloat16", 8, 65536, 64), "chunk_sm90", "chunk_state_sm90", 16),
    ],
)
def test_what_was_fastest_is_chosen(call, source, states, segments):
    """On an H200 (validation/NOTES.md)."""
    found = choose(*call, call[-1], "sm_90a", 132)
    assert found.row.source == f"linear/{source}"
    assert found.states is None if states is None else found.states.source == f"linear/{states}"
    assert found.segments == segments


def test_few_short_sequences_take_one_launch():
    """With all multiprocessors; long ones take three, and no row twice."""
    for entries, length in itertools.product((1, 3, 8, 30), (128, 300, 1024, 2048)):
        found = choose("float16", entries, length, 64, 64, "sm_90a", 132)
        assert found.states is None
        segments = min(-(-length // 64), 132 // entries)
        assert 0.5 * segments < found.segments <= segments
        assert choose("float16", entries, 65536, 64, 64, "sm_90a", 132).states is not None


@pytest.mark.parametrize("qk_dim", [1, 64, 200, 1000])
def test_plain_kernels_take_any_dim(qk_dim):
    calls = [("float32", n, 5000, qk_dim, 64, "sm_90a", 132) for n in (1, 1000)]
    few, many = (choose(*call) for call in calls)
    if qk_dim == 64:
        assert many.row.source == "linear/chunk_fp32_pingpong_sm90"
        assert few.row.source.startswith("linear/chunk_fp32_sm")
        assert choose(*calls[0], mapped=False).row.source == "linear/chunk_fp32_sm80"
    elif qk_dim <= 128:
        assert few.row.source == "linear/chunk_fp32_sm80"
    else:
        assert (few.row.source, many.row.source) == ("linear/low_occupancy", "linear/recurrent")
    for name in ("recurrent", "low_occupancy"):
        found = choose("float32", 8, 100, qk_dim, 64, "sm_80", 108, name)
        assert found.row.source == f"linear/{name}"
        assert found.row.dim >= min(256, qk_dim)


def test_what_no_kernel_computes():
    assert choose("float64", 8, 100, 257, 64, "sm_90a", 132) is None
    assert choose("float64", 8, 100, 129, 64, "sm_86", 82) is None
    assert choose("float64", 8, 100, 64, 64, "sm_90a", 132, "recurrent") is None
    assert choose("float32", 8, 100, 129, 64, "sm_90a", 132, "chunked") is None
    assert choose("float16", 8, 100, 64, 64, "sm_90a", 132, "recurrent") is None
    assert choose("float16", 8, 100, 257, 64, "sm_90a", 132) is None
    assert choose("float32", 8, 2**31, 200, 64, "sm_90a", 132) is None


@pytest.mark.parametrize("algorithm", ["chunked", "recurrent", "low_occupancy"])
def test_a_plan_follows_the_algorithm_that_was_asked_for(algorithm):
    launcher = NotingLauncher(132)
    jobs = [job(*draw(*[(8, 1000, 64)] * 3))]
    plan = products.make_plan(jobs, launcher, algorithm)
    plan.run((16, 32, 48, 64, 0, 0))
    sources = [step.variant.source for step, _ in launcher.launched]
    assert {"chunked": "chunk"}.get(algorithm, algorithm) in sources[-1]
    assert len(sources) == (3 if algorithm == "chunked" else 1)


def test_what_has_no_kernel_has_no_plan():
    launcher = NotingLauncher(132)
    double = [job(*draw(*[(8, 100, 260)] * 3, dtype=np.float64))]
    assert products.make_plan(double, launcher) is None
    jobs = [job(*draw(*[(8, 100, 64)] * 3))]
    assert products.make_plan(jobs, launcher) is not None
    for missing, algorithm in ((None, "auto"), (None, "recurrent")):
        launcher.target = missing
        assert products.make_plan(jobs, launcher, algorithm) is None


@pytest.mark.parametrize("dtype", [DTYPES[1], DTYPES[2]])
@pytest.mark.parametrize("count", [1, 3])
def test_addresses_without_tensor_maps_go_to_kernels_that_need_none(dtype, count):
    """To one for each product; with dims that no tensor map walks to them from the start."""
    launcher = NotingLauncher(132)
    plan = products.make_plan([job(*draw(*[(3, 9000, 64)] * 3, dtype=dtype))] * count, launcher)
    pointers = [16 * (1 + i) for i in range(6 * count)]
    plan.run(tuple(pointers))
    mapped = {step.variant.source.removeprefix("linear/") for step, _ in launcher.launched}
    assert all(source.endswith("sm90") for source in mapped - {"state_prefix_sum"})
    assert plan.other is None
    launcher.launched.clear()
    pointers[1] += 4
    plan.run(tuple(pointers))
    single = "_fp32" if dtype == np.float32 else ""
    chain = [f"linear/chunk_state{single}_sm80", "linear/state_prefix_sum"]
    chain.append(f"linear/chunk{single}_sm80")
    assert [step.variant.source for step, _ in launcher.launched] == chain * count
    assert launcher.taken[-1] == plan.other.workspace_bytes
    for i, (_, filled) in enumerate(launcher.launched):
        first = 6 * (i // 3)
        assert filled[list(products.ARRAYS)][0].tolist() == tuple(pointers[first : first + 6])
        assert filled["workspace"] == WORKSPACE
        assert filled["aligned"] == (first > 0)
    odd = [job(*draw(*[(3, 9000, 63)] * 3, dtype=dtype))]
    plan = products.make_plan(odd, launcher)
    assert [step.variant.source for step in plan.steps] == chain
    both = products.make_plan(odd * 2, launcher)
    assert [step.variant.source for step in both.steps] == chain * 2
    assert both.workspace_bytes == plan.workspace_bytes
    mixed = [*odd, job(*draw(*[(3, 9000, 64)] * 3, dtype=dtype))]  # one is for SM90
    assert products.make_plan(mixed, launcher) is None


@pytest.mark.parametrize("reverse", [False, True])
def test_states_of_segments_of_float32_are_summed_for_each_job(reverse):
    q, k, v = draw(*[(2, 1000, 64)] * 3)
    jobs = [traits_of(job(q, k, v, reverse))] * 2
    launcher = NotingLauncher()
    plan = products.plan_by(split(CHUNK_FP32_SM90[0], 1000, 4), jobs, launcher)
    pointers = (16, 32, 48, 64, 80, 0, 96, 112, 128, 144, 0, 0)
    plan.run(pointers)
    assert plan.other is None
    assert [(step.variant.source, step.grid) for step, _ in launcher.launched] == [
        ("linear/chunk_state_fp32_sm90", 12),
        ("linear/state_prefix_sum", 32),
        ("linear/state_prefix_sum", 32),
        ("linear/chunk_fp32_sm90", 16),
    ]
    last = q.strides[-2] * 999 if reverse else 0
    second = WORKSPACE + 4 * 2 * 4 * 64 * 64  # workspace of the second job
    filled = launcher.launched[2][1]
    found = [int(filled[name][0]) for name in POINTERS]
    assert found == [*(x + last for x in pointers[6:10]), 0, 0, second]
    assert (filled["first_batch"], filled["aligned"]) == (0, 1)
    for _, filled in (launcher.launched[0], launcher.launched[-1]):
        for i, want in enumerate(((80, 0, WORKSPACE, 64), (0, 0, second, 144))):
            own = filled["job"][0, i]
            assert tuple(int(own[name]) for name in ADDRESSES) == want
            assert [own[f"{name}_map"][0] for name in MAPPED] == [*pointers[6 * i : 6 * i + 4]]


@pytest.mark.parametrize(
    ("dtype", "kind", "other"),
    [("bfloat16", ChunkSm90, ChunkSm80),
     ("float32", (ChunkFp32Sm90, ChunkFp32PingpongSm90), ChunkFp32Sm80)],
)  # fmt: skip
@pytest.mark.parametrize(("entries", "dim", "tile_n"), [(128, 64, 64), (128, 128, 128)])
def test_hopper_computes_what_tensor_maps_can_walk(dtype, kind, other, entries, dim, tile_n):
    call = dtype, entries, 4096, dim, dim, "sm_90a", 132
    for algorithm in ("auto", "chunked"):
        found = choose(*call, algorithm)
        assert isinstance(found.row, kind)
        assert (found.row.tile_n, found.segments) == (tile_n, 1)
        assert isinstance(choose(*call, algorithm, mapped=False).row, other)
        assert isinstance(choose(*call[:5], "sm_100", 132, algorithm).row, other)
    assert isinstance(choose(*call, jobs=3).row, kind)
    assert choose(dtype, 8, 4096, 64, 64, "sm_80", 108, jobs=3) is None


@pytest.mark.parametrize("algorithm", ["recurrent", "low_occupancy"])
def test_hopper_does_not_take_what_another_algorithm_was_asked_for(algorithm):
    found = choose("float32", 128, 4096, 64, 64, "sm_90a", 132, algorithm)
    assert not isinstance(found.row, ProductSm90Variant)


@pytest.mark.parametrize(
    ("shape", "layout", "taken"),
    [
        ((2, 3, 70, 64), "dense", True),
        ((2, 3, 70, 64), "blhd", True),
        ((2, 3, 70, 64), "rows", True),
        ((70, 64), "dense", True),
        ((1, 64), "dense", True),
        ((70, 60), "dense", False),  # no multiple of 16 bytes
        ((70, 64), "upward", False),
        ((70, 64), "steps", False),
        ((2, 3, 2, 3, 70, 8), "dense", True),  # one axis to the kernel
    ],
)
def test_what_tensor_maps_can_walk(shape, layout, taken):
    (x,) = draw(shape, dtype=DTYPES[0])
    x = lay(np, x, layout)
    initial = lay(np, np.zeros((shape[-1],) * 2, np.float32), "transposed")
    for first in (None, initial):
        problem = linear_problem.product_problem("causal_product", x, x, x, first)
        out, state = np.empty(problem.out_shape, x.dtype), np.empty(problem.state_shape, np.float32)
        views = [problem.view(array.shape, array.strides) for array in (out, state)]
        assert takes(traits_of(Job(problem, *views, False))) == taken
        assert takes(traits_of(Job(problem, views[0], None, False))) == taken


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_states_are_of_any_layout(dtype):
    """Threads read and write them: no tensor map walks them, whatever the dtype of the rows."""
    q, k, v = draw(*[(2, 70, 16)] * 3, dtype=dtype)
    (initial,) = draw((2, 16, 16))
    for state in (initial, initial.swapaxes(-1, -2), np.zeros((2, 16, 33), np.float32)[..., 1::2]):
        problem = linear_problem.product_problem("causal_product", q, k, v, state)
        view = problem.view(v.shape, v.strides)
        for last in (None, problem.view(state.shape, state.strides)):
            assert takes(traits_of(Job(problem, view, last, False)))


@pytest.mark.parametrize(("dim", "taken"), [(64, True), (60, True), (62, False)])
def test_what_tensor_maps_of_float32_can_walk(dim, taken):
    (x,) = draw((70, dim))
    problem = linear_problem.product_problem("causal_product", x, x, x)
    assert takes(traits_of(Job(problem, problem.view(x.shape, x.strides), None, False))) == taken


def test_axes_that_no_tensor_map_has():
    q, k = (np.zeros(shape, np.float16) for shape in ((2, 1, 2, 1, 9, 8), (1, 2, 1, 2, 9, 8)))
    problem = linear_problem.product_problem("causal_product", q, k, k)
    out = np.empty(problem.out_shape, problem.dtype)
    assert not takes(traits_of(Job(problem, problem.view(out.shape, out.strides), None, False)))


def test_the_heads_of_the_structs():
    assert PRODUCT_JOB.names[:4] == tuple(f"{name}_map" for name in MAPPED)
    assert PRODUCT_JOB.names[4:8] == ADDRESSES
    assert PRODUCT_PARAMS.names[: len(POINTERS)] == POINTERS
