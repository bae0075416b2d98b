"""`chunk_state_fp64` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.kernel_products import split, states_of
from tests.support.product_rows import CHUNK_FP64, show

pytestmark = pytest.mark.emulator

BUGS = {
    "a chunk is read before it has landed": (
        "cp_async_wait_group<kStages - 2>();",
        "cp_async_wait_group<kStages - 1>();",
    ),
    "a chunk is loaded over one in use": (
        "cp_async_wait_group<kStages - 2>();\n    __syncthreads();",
        "cp_async_wait_group<kStages - 2>();",
    ),
    "values of the first chunk": (
        "load_values(v, cvta_to_shared(shared.v[chunk % kStages]));",
        "load_values(v, cvta_to_shared(shared.v[0]));",
    ),
    "a sum is written one segment early": ("work.segment + 1)", "work.segment)"),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    row = CHUNK_FP64[0]
    show(states_of(row), BUGS[bug], tmp_path, split(row, 500, 8))
