"""`chunk_fp32_sm80` with errors planted in it, in the emulator."""

import pytest

from tests.support.every_run import only
from tests.support.product_rows import CHUNK_FP32_SM80, show

pytestmark = pytest.mark.emulator

BUGS = {
    "a buffer is filled while it is in use": (
        "rows.store(shared, i % kBuffers);",
        "rows.store(shared, i % 2);",
    ),
    "scores while the chunk is split": (
        "if (i >= 1 && i <= chunks()) multiply_scores(shared, i - 1);\n      TeamSync::follow",
        "if (i < chunks()) multiply_scores(shared, i);\n      TeamSync::follow",
    ),
    "weights of the wrong chunk": (
        "cvta_to_shared(shared.p[chunk % 2][0]) + rows_first",
        "cvta_to_shared(shared.p[0][0]) + rows_first",
    ),
    "a low part is left out": (
        "mma_f16(sums[n].cross, a_low,",
        "mma_f16(sums[n].cross, a,",
    ),
    "exponents of the wrong chunk": (
        "shared.q_exponent[buffer][row + 8 * h];",
        "shared.q_exponent[0][row + 8 * h];",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    show(CHUNK_FP32_SM80[0], BUGS[bug], tmp_path)
