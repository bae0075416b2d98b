"""`recurrent` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.product_rows import PLAIN, show

pytestmark = pytest.mark.emulator

BUGS = {
    "rows are read before they have landed": (
        "cp_async_wait_group<kStages - 2>();",
        "cp_async_wait_group<kStages - 1>();",
    ),
    "rows are loaded over those in use": (
        "cp_async_wait_group<kStages - 2>();\n      __syncthreads();",
        "cp_async_wait_group<kStages - 2>();\n      __syncwarp();",
    ),
    "a row that does not see itself": (
        "s[i + e][c] = fmaf(keys[e], values[c], s[i + e][c]);\n                "
        "sums[4 * t + c] = fmaf(queries[e], s[i + e][c], sums[4 * t + c]);",
        "sums[4 * t + c] = fmaf(queries[e], s[i + e][c], sums[4 * t + c]);\n                "
        "s[i + e][c] = fmaf(keys[e], values[c], s[i + e][c]);",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    row = next(row for row in PLAIN if row.algorithm == "recurrent")
    show(row, BUGS[bug], tmp_path)
