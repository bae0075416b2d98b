"""`chunk_state_fp32_sm90` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.kernel_products import split
from tests.support.product_rows import PINGPONG, show

pytestmark = pytest.mark.emulator

# What is taken out of the kernel, and what stands there instead.
BUGS = {
    "rows split that have not landed": ("wait(shared.raw_full[at], pipe.parity());", ""),
    "rows loaded over those in use": (
        "wait(shared.empty[later_pipe.index()], later_pipe.parity() ^ 1);",
        "",
    ),
    "pairs that are not there yet": ("wait(shared.full[at], pipe.parity());", ""),
    "pairs without a proxy fence": ("fence_proxy_async_shared();", ""),
    "a place let go while it is multiplied": (
        "wgmma_wait_group<0>();\n      if (block == kDimBlocks - 1) "
        "release_per_lane(shared.empty[at]);",
        "if (block == kDimBlocks - 1) release_per_lane(shared.empty[at]);\n      "
        "wgmma_wait_group<0>();",
    ),
    "sums that are not there yet": ("wgmma_wait_group<0>();\n      if (block", "if (block"),
    "exponents of another chunk": (
        "scale_to_common_exponent(values, values_low, shared.kv_exponent[at])",
        "scale_to_common_exponent(values, values_low, shared.kv_exponent[0])",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    choice = split(PINGPONG, 500, 7)
    show(choice.states, BUGS[bug], tmp_path, choice)
