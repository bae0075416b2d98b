"""`chunk_fp64` with errors planted in it, in the emulator."""

import numpy as np
import pytest

from tests.support.every_run import only
from tests.support.kernel_products import solve
from tests.support.planted import plant
from tests.support.product_rows import CHUNK_FP64, show
from tests.support.products import DOUBLE, Case, draw

pytestmark = pytest.mark.emulator

LANDED = "cp_async_wait_group<0>();\n    __syncthreads();  // the chunk"
BUGS = {
    "a chunk is read before it has landed": (LANDED, LANDED.replace("<0>", "<1>")),
    "a chunk is loaded over one in use": (LANDED, LANDED.replace("__syncthreads();", "")),
    "weights of the wrong chunk": (
        "add_values(o, weights_of(shared, chunk),",
        "add_values(o, weights_of(shared, 0),",
    ),
    "a row that sees the next one": ("key > row)", "key > row + 1)"),
    "columns of the state change places": (
        "s[m][2 * p + k % 2][2 * h + k / 2]",
        "s[m][2 * p + k / 2][2 * h + k % 2]",
    ),
    "a state that the chunk belongs to": (
        "if (cols > 0) multiply_state(o, state, cvta_to_shared(shared.q[stage]));",
        "{ Values now; load_values(now, cvta_to_shared(shared.v[stage])); "
        "Fp64State later = state; later.add(now, cvta_to_shared(shared.k[stage])); "
        "if (cols > 0) multiply_state(o, later, cvta_to_shared(shared.q[stage])); }",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS, "weights of the wrong chunk"))
def test_a_planted_bug_is_found(bug, tmp_path):
    show(CHUNK_FP64[0], BUGS[bug], tmp_path)


# Of parts of the keys, by the stages of the row.
BUGS_OF_PARTS = {
    "outputs of one part of the keys": (
        3,
        "take_over(o, partial_outputs(shared, chunk, other));",
        ";",
    ),
    "parts of another chunk": (3, "shared, chunk, other)", "shared, chunk + 1, other)"),
    "a part is read before it is there": (2, "if constexpr (!kAhead) __syncthreads();", ""),
    "the same keys in both parts": (
        2,
        "tid_x_again() / 32 / kColWarps * kWarpDim;",
        "tid_x_again() / 32 / kColWarps * 0;",
    ),
}


@pytest.mark.parametrize("bug", only(BUGS_OF_PARTS))
def test_a_bug_in_parts_of_the_keys_is_found(bug, tmp_path):
    stages, *change = BUGS_OF_PARTS[bug]
    row = next(row for row in CHUNK_FP64 if row.key_parts > 1 and row.stages == stages)
    case = Case(*draw(*[(100, row.dim)] * 2, (100, 40), dtype=DOUBLE))
    show(row, change, tmp_path, case=case)


NONFINITE = {
    "values that are not finite are multiplied": ("if (!has_nonfinite(v)) {", "if (true) {"),
    "rows before such a value become NaN": (">= nonfinite_from", ">= nonfinite_from - 1"),
    "the state does not see such a value": ("load_values(v, v_tile);\n}", "}"),
}


@pytest.mark.parametrize("bug", [None, *only(NONFINITE)])
def test_what_is_not_finite_shows_where_it_is_read_only(bug, tmp_path):
    row, (q, k, v) = CHUNK_FP64[0], draw(*[(40, 20)] * 3, dtype=DOUBLE)
    v[5, 3], v[21, 4], v[31, 19] = np.nan, np.inf, -np.inf
    sources = {row.entry: plant(tmp_path, row.source, NONFINITE[bug])} if bug else {}
    out, state = solve(row, Case(q, k, v), sources=sources)
    spoiled = np.zeros(v.shape, bool)
    for line, col in ((5, 3), (21, 4), (31, 19)):
        spoiled[line:, col] = True
    in_state = np.broadcast_to(spoiled[-1], state.shape)
    right = (~np.isfinite(out) == spoiled).all() and (~np.isfinite(state) == in_state).all()
    assert right == (bug is None)
