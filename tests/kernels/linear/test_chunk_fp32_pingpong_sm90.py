"""`chunk_fp32_pingpong_sm90` with errors planted in it, in the emulator."""

import dataclasses

import pytest

from tests.support.every_run import only
from tests.support.product_rows import PINGPONG, show

pytestmark = pytest.mark.emulator

BUGS = {
    "values split that have not landed": (
        "wait(shared.raw_full[stage][kV], pipe.parity());",
        "",
    ),
    "rows loaded over those in use": (
        "(i + kPrefetchChunks)};\n      wait(shared.empty[later_pipe.index()], "
        "later_pipe.parity() ^ 1);",
        "(i + kPrefetchChunks)};",
    ),
    "a state over one in use": ("wait(shared.s_empty[state_stage], state.parity() ^ 1);", ""),
    "a state that is not there yet": ("wait(shared.s_full[state_stage], state.parity());", ""),
    "weights of two of a row's four lanes alone": (
        "max_over_lanes(largest[h])",
        "max(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 1))",
    ),
    "outputs that are not there yet": (
        "release_per_lane(shared.s_empty[state_stage]);\n    wgmma_wait_group<0>();",
        "release_per_lane(shared.s_empty[state_stage]);",
    ),
    "a state let go while it is multiplied": ("wgmma_wait_group<1>();", ""),
    "a place that the outputs are not done with": ("kArrivalsPerWarp * 8", "kArrivalsPerWarp * 4"),
    "values that are not finite looked at too late": (
        "    bar_sync(1, 128);\n",
        "",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    # With more places the state's warpgroup gets further ahead of the outputs.
    stages = 4 if bug == "a state over one in use" else PINGPONG.stages
    show(dataclasses.replace(PINGPONG, stages=stages), BUGS[bug], tmp_path)
