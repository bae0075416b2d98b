"""`chunk_fp32_sm90` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.product_rows import CHUNK_FP32_SM90, show

pytestmark = pytest.mark.emulator

# What is taken out of the kernel, and what stands there instead.
BUGS = {
    "rows are split before they have landed": (
        "wait(shared.raw_full[from][array], raw_pipe.parity());",
        "",
    ),
    "rows are loaded over those that are split": (
        "fence_proxy_async_shared();\n      bar_sync(1, 128);",
        "fence_proxy_async_shared();\n      __syncwarp();",
    ),
    "pairs over those in use": ("wait(shared.empty[array], ~i & 1);", ""),
    "pairs without a proxy fence": (
        "fence_proxy_async_shared();\n      bar_sync(1, 128);",
        "bar_sync(1, 128);",
    ),
    "scores of keys that are not there yet": (
        "wait(shared.full[kK], i & 1);\n    gemm_split_abt",
        "gemm_split_abt",
    ),
    "outputs without scores": ("wait(shared.p_full, i & 1);", ""),
    "keys given back before their sums": (
        "wgmma_wait_group<0>();\n      if (block == kDimBlocks - 1) release",
        "if (block == kDimBlocks - 1) release_per_lane(shared.empty[kK]);\n"
        "      wgmma_wait_group<0>();\n      if (false) release",
    ),
    "values without their low part": ("part == 0 ? kLowV : 0", "part == 9 ? kLowV : 0"),
    "weights without their low part": ("part == 1 ? kLowP : 0", "part == 9 ? kLowP : 0"),
    "exponents of other rows": (
        "scale_to_common_exponent(values, values_low, shared.kv_exponent)",
        "scale_to_common_exponent(values, values_low, shared.q_exponent)",
    ),
    "queries given back while they are multiplied": (
        "    wgmma_wait_group<0>();\n    wait(shared.full[kV], i & 1);",
        "    release_per_lane(shared.empty[kQ]);\n    wait(shared.full[kV], i & 1);",
    ),
    "scores on both sides of the diagonal": (" > 0) s[v][e] = 0.0f;", " > 99) s[v][e] = 0.0f;"),
}


@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    show(CHUNK_FP32_SM90[0], BUGS[bug], tmp_path)
