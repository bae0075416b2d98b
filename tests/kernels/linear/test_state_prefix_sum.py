"""`state_prefix_sum` with errors planted in it, in the emulator."""

import pytest

from fa_cupy.gpu.kernels.linear.state_prefix_sum import STATE_PREFIX_SUM
from tests.support.every_run import only
from tests.support.kernel_products import split
from tests.support.product_rows import CHUNK_FP32_SM80, show

pytestmark = pytest.mark.emulator

BUGS = {
    "the sum before a segment without its last one": (
        "sum += segment_sums[i];\n      if (s + i < params.segments) "
        "address[(s + i) * elements] = sum;",
        "if (s + i < params.segments) address[(s + i) * elements] = sum;\n      "
        "sum += segment_sums[i];",
    ),
    "nine segments at a time, where eight are loaded": ("s += kInFlight", "s += kInFlight + 1"),
    "no state before the first segment": ("*address = sum;\n  for", "for"),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    show(STATE_PREFIX_SUM, BUGS[bug], tmp_path, split(CHUNK_FP32_SM80[0], 500, 1))
