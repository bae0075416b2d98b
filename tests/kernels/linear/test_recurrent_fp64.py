"""`recurrent_fp64` with errors planted in it, in the emulator."""

import numpy as np
import pytest

from tests.support.every_run import only
from tests.support.planted_packed import show

pytestmark = pytest.mark.emulator

BUGS = {
    "rows are loaded over those in use": (
        "__syncthreads();\n      load_rows(shared.q",
        "load_rows(shared.q",
    ),
    "rows are read before all are there": (
        "__syncthreads();\n#pragma unroll 1\n      for (int row",
        "#pragma unroll 1\n      for (int row",
    ),
    "outputs of the first key columns alone": ("first == 0 ? sum : *address + sum", "sum"),
    "a row that does not see itself": (
        "s[e] = fma(shared.k[row][e], value, s[e]);\n          "
        "sum = fma(shared.q[row][e], s[e], sum);",
        "sum = fma(shared.q[row][e], s[e], sum);\n          "
        "s[e] = fma(shared.k[row][e], value, s[e]);",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS))
def test_a_planted_bug_is_found(bug, tmp_path):
    show("linear/recurrent_fp64", np.dtype("float64"), BUGS[bug], tmp_path, dim=260)
