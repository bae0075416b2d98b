"""`sequence_spans` with errors planted in it, in the emulator."""

import numpy as np
import pytest

from tests.support.every_run import only
from tests.support.planted_packed import show

pytestmark = pytest.mark.emulator

# None of them has kernels work outside of arrays.
BUGS = {
    "the largest offset of this thread alone": ("i < static_cast<int>(threadIdx.x)", "i < 0"),
    "an end that is smaller than the beginning": (
        "q_end = max(q_most, q.inside(i + 1))",
        "q_end = q.inside(i + 1)",
    ),
    "a sequence out of range that is not marked": ("valid ? q_rows : -1 - q_rows", "q_rows"),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    show("linear/sequence_spans", np.dtype("float32"), BUGS[bug], tmp_path)
