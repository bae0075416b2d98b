"""`chunk_state_fp32_sm80` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.kernel_products import split
from tests.support.product_rows import CHUNK_FP32_SM80, show

pytestmark = pytest.mark.emulator

BUGS = {
    "pairs that are not there yet": (
        "if (i >= 1) {\n      const int buffer = (i - 1) % kBuffers;",
        "if (i < chunks) {\n      const int buffer = i % kBuffers;",
    ),
    "exponents of another chunk": (
        "shared.exponent[buffer], cvta_to_shared",
        "shared.exponent[0], cvta_to_shared",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    choice = split(CHUNK_FP32_SM80[0], 500, 3)
    show(choice.states, BUGS[bug], tmp_path, choice)
