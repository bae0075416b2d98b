"""What chooses between the kernels of packed products, and the plans that follow."""

import numpy as np
import pytest

from fa_cupy.core import linear_problem
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear.cost_model import choose
from fa_cupy.gpu.kernels.linear.params import packed_job, traits_of
from fa_cupy.gpu.kernels.linear.sm80.chunk_fp32_sm80 import ChunkFp32Sm80
from fa_cupy.gpu.kernels.linear.sm80.chunk_sm80 import ChunkSm80
from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.sm90_params import (
    PACKED_PRODUCT_JOB,
    PRODUCT_JOB,
    takes,
    without_sequences,
)
from fa_cupy.keys.offsets import Offsets
from tests.support.noting_launcher import WORKSPACE, NotingLauncher
from tests.support.products import draw
from tests.support.strategies import DTYPES, lay

SEQUENCES = 5


def packed(q, k, v, states=None, reverse=False):
    """A product of packed sequences, with its last states, and its job."""
    where = Offsets(SEQUENCES, np.dtype(np.int32), np.dtype(np.int32))
    problem = linear_problem.product_problem("test", q, k, v, states, offsets=where)
    out = np.empty(problem.out_shape, problem.dtype)
    last = np.empty(problem.state_shape, problem.state_dtype)
    views = problem.view(out.shape, out.strides), problem.state_view(last)
    return problem, packed_job(problem, *views, reverse, "q_spans", False)


def arrays(*dims, length=9000, heads=3, dtype=DTYPES[1]):
    return draw(*((heads, length, dim) for dim in (dims[0], *dims)), dtype=dtype)


def sources(plan):
    return [step.variant.source.removeprefix("linear/") for step in plan.steps]


@pytest.mark.parametrize(("dim", "entries"), [(64, 128), (128, 128), (64, 3)])
def test_hopper_computes_what_tensor_maps_can_walk(dim, entries):
    call = entries, 4096, dim, dim, "sm_90a", 132
    for dtype in ("float16", "bfloat16"):
        found = choose(dtype, *call, packed=True)
        assert isinstance(found.row, ChunkSm90)
        assert found._replace(row=None, states=None, microseconds=0) == choose(
            dtype, *call
        )._replace(row=None, states=None, microseconds=0)
        assert {row.packed for row, _, _ in found.launches(dim, dim)} == {True}
        assert isinstance(choose(dtype, *call, mapped=False, packed=True).row, ChunkSm80)
        assert isinstance(choose(dtype, *call[:4], "sm_80", 108, packed=True).row, ChunkSm80)
        assert isinstance(choose(dtype, *call, jobs=3, packed=True).row, ChunkSm90)
    assert isinstance(choose("float32", *call, packed=True).row, ChunkFp32Sm80)
    assert choose("float32", *call, jobs=3, packed=True) is None


@pytest.mark.parametrize(
    ("shape", "layout", "taken"),
    [
        ((70, 64), "dense", True),
        ((2, 3, 70, 64), "blhd", True),
        ((2, 3, 2, 3, 70, 8), "dense", True),
        ((70, 60), "dense", False),
        ((70, 64), "upward", False),
        ((70, 64), "steps", False),
        ((0, 64), "dense", False),
    ],
)
def test_what_tensor_maps_can_walk(shape, layout, taken):
    (x,) = draw(shape, dtype=DTYPES[0])
    x = lay(np, x, layout)
    assert takes(without_sequences(traits_of(packed(x, x, x)[1]))) == taken


def test_axes_that_no_tensor_map_has():
    """The sequences are none of the three."""
    for batch, taken in (((2, 1, 2), True), ((2, 1, 2, 1), False)):
        q, k = (
            np.zeros((*(2 if n == of else 1 for n in batch), 9, 8), np.float16) for of in (1, 2)
        )
        assert takes(without_sequences(traits_of(packed(q, k, k)[1]))) == taken


def test_the_struct_has_the_sequences_beside_the_axes_of_its_maps():
    q, k, v = arrays(64, 32, length=100)
    (states,) = draw((3, SEQUENCES, 64, 32))
    launcher = NotingLauncher()
    plan = products.packed_plan([packed(q, k, v, states)[1]], packed(q, k, v)[0], launcher)
    plan.run(tuple(16 * (1 + i) for i in range(8)))
    (filled,) = (x for step, x in launcher.launched if isinstance(step.variant, ChunkSm90))
    assert filled["sequences"] == SEQUENCES
    assert filled["spans"] == WORKSPACE
    own = filled["job"][0, 0]
    assert own["size"].tolist() == [1, 1, 3]
    assert own["initial_sequence"] == own["state_sequence"] == 64 * 32
    assert own["initial_batch"].tolist() == own["state_batch"].tolist()
    assert own["state_batch"][-1] == SEQUENCES * 64 * 32
    assert PACKED_PRODUCT_JOB.names[: len(PRODUCT_JOB.names)] == PRODUCT_JOB.names


@pytest.mark.parametrize("count", [1, 3])
def test_addresses_without_tensor_maps_go_to_kernels_that_need_none(count):
    launcher = NotingLauncher(132)
    problem, job = packed(*arrays(64, 64))
    plan = products.packed_plan([job] * count, problem, launcher)
    assert sources(plan)[0] == "sequence_spans"
    assert sources(plan)[-count:] == ["other_rows"] * count
    assert sources(plan).count("chunk_sm90") == 1
    pointers = [16 * (1 + i) for i in range(6 * count + 2)]
    plan.run(tuple(pointers))
    assert plan.other is None
    pointers[1] += 2
    plan.run(tuple(pointers))
    assert sources(plan.other).count("chunk_sm80") == count
    assert not any(source.endswith("sm90") for source in sources(plan.other))


def test_products_that_no_launch_computes_together():
    """Keys of 200 columns are too wide for tensor maps' kernels."""
    problem, wide = packed(*arrays(200, 64))
    _, narrow = packed(*arrays(64, 200))
    launcher = NotingLauncher(132)
    plan = products.packed_plan([wide, narrow, narrow], problem, launcher)
    plan.run(tuple(16 * (1 + i) for i in range(20)))
    assert sources(plan).count("chunk_sm80") == 1
    assert sources(plan).count("chunk_sm90") == 2
    first, second = (
        filled["job"][0, 0] for step, filled in launcher.launched
        if isinstance(step.variant, ChunkSm90)
    )  # fmt: skip
    for own, at in ((first, 6), (second, 12)):
        assert own["k_map"][0] == 16 * (2 + at)
        assert own["out"] == 16 * (4 + at)
    if first["workspace"]:
        assert first["workspace"] != second["workspace"]


def test_what_has_no_kernel_has_no_plan():
    problem, job = packed(*arrays(264, 64, length=50))
    assert products.packed_plan([job], problem, NotingLauncher()) is None
    assert products.packed_plan([job] * 2, problem, NotingLauncher()) is None
