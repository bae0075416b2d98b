"""`chunk_state_sm80` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.kernel_products import split
from tests.support.product_rows import SMALL_SM80, show

pytestmark = pytest.mark.emulator

BUGS = {
    "a chunk is read before it has landed": (
        "cp_async_wait_group<kStages - 2>();",
        "cp_async_wait_group<kStages - 1>();",
    ),
    "a chunk is loaded over one in use": (
        "cp_async_wait_group<kStages - 2>();\n    __syncthreads();",
        "cp_async_wait_group<kStages - 2>();\n    __syncwarp();",
    ),
    "sums of another segment": ("work.segment + 1);", "work.segment);"),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    choice = split(SMALL_SM80[1], 500, 2)
    show(choice.states, BUGS[bug], tmp_path, choice)
