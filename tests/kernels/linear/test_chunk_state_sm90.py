"""`chunk_state_sm90` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.kernel_products import split
from tests.support.product_rows import SMALL_SM90, show

pytestmark = pytest.mark.emulator

BUGS = {
    "a chunk that has not landed": ("wait(shared.full[at], pipe.parity());", ""),
    "a chunk over one in use": ("wait(shared.empty[at], pipe.parity() ^ 1);", ""),
    "sums that are not there yet": ("wgmma_wait_group<0>();\n    release", "release"),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    choice = split(SMALL_SM90[2], 500, 7)
    show(choice.states, BUGS[bug], tmp_path, choice)
