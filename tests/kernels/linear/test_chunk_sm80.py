"""`chunk_sm80` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.product_rows import SMALL_SM80, show

pytestmark = pytest.mark.emulator

# What is taken out of the kernel, and what stands there instead.
BUGS = {
    "a chunk is read before it has landed": (
        "cp_async_wait_group<kStages - 3>();",
        "cp_async_wait_group<kStages - 2>();",
    ),
    "a chunk is loaded over one in use": (
        "if (i + kStages - 2 < chunks) load(i + kStages - 2);",
        "if (i + kStages - 1 < chunks) load(i + kStages - 1);",
    ),
    "scores of the wrong chunk": (
        "cvta_to_shared(shared.p[chunk % 2])",
        "cvta_to_shared(shared.p[0])",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    show(SMALL_SM80[1], BUGS[bug], tmp_path)
