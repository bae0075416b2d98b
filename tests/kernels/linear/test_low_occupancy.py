"""`low_occupancy` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.product_rows import PLAIN, show

pytestmark = pytest.mark.emulator

BUGS = {
    "rows are read before they have landed": (
        "cp_async_wait_group<kStages - 2>();",
        "cp_async_wait_group<kStages - 1>();",
    ),
    "sums of other warps that are not there yet": (
        "__syncthreads();\n\n      float outputs[32];",
        "float outputs[32];",
    ),
    "rows are loaded over those in use": (
        "cp_async_wait_group<kStages - 2>();\n      __syncthreads();",
        "cp_async_wait_group<kStages - 2>();\n      __syncwarp();",
    ),
    "sums of a warp's own rows twice": ("if (w < warp)", "if (w <= warp)"),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    row = next(row for row in PLAIN if row.algorithm == "low_occupancy")
    show(row, BUGS[bug], tmp_path)
