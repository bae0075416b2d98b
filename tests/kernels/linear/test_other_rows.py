"""`other_rows` with errors planted in it, in the emulator."""

import numpy as np
import pytest

from tests.support.every_run import only
from tests.support.planted_packed import show

pytestmark = pytest.mark.emulator

BUGS = {
    "rows before the first sequence are left": (
        "if (params.reverse ? is_last : is_first)",
        "if (false)",
    ),
    "rows in the order of memory": ("params.reverse ? is_first : is_last", "is_last"),
    "a state that is left": (
        "state[row * params.state_row",
        "if (false) state[row * params.state_row",
    ),
    "gradients that are NaN": (
        "params.zero_invalid ? 0 : Bits<kBytes>::kNan",
        "Bits<kBytes>::kNan",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    show("linear/other_rows", np.dtype("float32"), BUGS[bug], tmp_path)
