"""A bias of pairs that comes by way of shared memory: the kernels' own source on the CPU."""

import numpy as np
import pytest

from fa_cupy.gpu.kernels.forward import VARIANTS
from tests.support import kernel_gradients
from tests.support.every_run import only, some
from tests.support.kernel_attention import FORWARD_DTYPES, check, draw
from tests.support.kernel_gradients import case, rows_sm80, rows_sm90
from tests.support.planted import plant
from validation import emulator

pytestmark = pytest.mark.emulator

PLAIN = {(row.entry, row.dim): row for row in VARIANTS if not row.sparse and row.dtype == "float16"}
SM80, SM90 = PLAIN["attention_fwd_sm80", 64], PLAIN["attention_fwd_sm90", 64]
D128, D256 = (PLAIN["attention_fwd_sm90", dim] for dim in (128, 256))
HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
# Each kernel with the types that it stages.
STAGED = [
    (PLAIN["attention_fwd_sm80", 32], HALF), (SM80, HALF), (SM90, HALF), (D128, HALF),
    (SM90, SINGLE), (D128, SINGLE), (D256, SINGLE),
]  # fmt: skip
LENGTHS = 150, 300
BOTTOM = {"is_causal": True, "causal_align": "bottom_right"}
HOW = "aligned rows", "from the second key on", "rows of an odd length", "turned"


def bias_of(dtype, how):
    """A bias of each head whose rows begin at multiples of 16 bytes, or do not."""
    queries, keys = LENGTHS
    bias = draw(2, queries, keys + 4, dtype=dtype)
    bias[..., ::7, ::5] = -np.inf
    if how == "from the second key on":
        return bias[..., 1 : keys + 1]
    if how == "rows of an odd length":
        return np.ascontiguousarray(bias[..., : keys - 1])
    if how == "turned":
        return np.ascontiguousarray(bias[..., :keys].swapaxes(1, 2)).swapaxes(1, 2)
    return bias[..., :keys]


def arrays_of(row, keys=LENGTHS[1]):
    dtype = FORWARD_DTYPES[row.dtype]
    lengths = LENGTHS[0], keys, keys
    return [draw(2, n, row.dim, dtype=dtype, seed=i) for i, n in enumerate(lengths)]


def named(value):
    return getattr(value, "name", None)


@pytest.mark.parametrize(("row", "dtype"), only(STAGED, (SM80, HALF), (D128, SINGLE)), ids=named)
@pytest.mark.parametrize("how", HOW)
def test_rows_that_begin_anywhere(row, dtype, how):
    bias = bias_of(dtype, how)
    for seed, options in enumerate(({}, BOTTOM)):
        check(row, *arrays_of(row, bias.shape[-1]), bias=bias, seed=seed, **options)


@pytest.mark.parametrize(("row", "dtype"), some(STAGED, lambda of: of[1]), ids=named)
def test_with_a_softcap(row, dtype):
    check(row, *arrays_of(row), bias=bias_of(dtype, HOW[0]), softcap=2.0)


def gradients_of(how):
    """A call whose heads share keys, each with a bias of its own."""
    bias = bias_of(HALF, how)
    lengths = bias.shape[1:]
    return case("float16", (2, 1), lengths, (64, 64), batch=1, bias=bias[None], **BOTTOM)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows_of", [rows_sm80, rows_sm90])
def test_gradients_with_rows_that_begin_anywhere(rows_of, how):
    kernel_gradients.check(gradients_of(how), rows=rows_of("float16", 64, 64), seed=1)


def with_seeds(run):
    """Let copies come early and late."""
    for seed in range(3):
        run(seed)


# The row and the type of the bias; then what stands there, and what is put in its place.
BUGS = {
    "other queries": (SM80, HALF, ("stage, 16 * i, j);", "stage, 16 * (kMmaM - 1 - i), j);")),
    "other keys": (SM80, HALF, ("stage, 16 * i, j);", "stage, 16 * i, j ^ 4);")),
    "the tile is not waited for": (SM80, HALF, ("wait_for_staged_bias<1>();",
                                                "wait_for_staged_bias<2>();")),
    "the next tile of keys": (SM80, HALF, ("load_bias_tile(params, shared, tile);",
                                           "load_bias_tile(params, shared, tile + 1);")),
    "the tile of float32 is not waited for": (SM90, SINGLE, (
        "wait_for_staged_bias<0>(); return", "wait_for_staged_bias<1>(); return")),
    "a tile is copied while the one before is": (SM90, SINGLE, (
        "wait_for_staged_bias<0>(); stage_next_bias", "__syncwarp(); stage_next_bias")),
    "the tile after the next one": (SM90, SINGLE, ("key_tile_at(work, own.tile + 1))",
                                                   "key_tile_at(work, own.tile))")),
    "the other 8 rows of float32": (SM90, SINGLE, ("lane / 4 + 8 * h, 2 * (j + i)",
                                                   "lane / 4 + 8 * (1 - h), 2 * (j + i)")),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    row, dtype, change = BUGS[bug]
    source = plant(tmp_path, row.source, change)
    given = {"bias": bias_of(dtype, HOW[0]), "source": source}
    with pytest.raises((AssertionError, emulator.EmulationError)):
        with_seeds(lambda seed: check(row, *arrays_of(row), seed=seed, **given))


GRADIENT_BUGS = {
    "keys of the other warpgroup": (rows_sm90, ("(operands, bias_stage(c.shared, c.group));",
                                                "(operands, bias_stage(c.shared, 1 - c.group));")),
    "other queries": (rows_sm90, ("bias_stage(c.shared, c.group), band_tile(c, countdown) * kTileM",
                                  "bias_stage(c.shared, c.group), band_tile(c, countdown) * 16")),
    "the tile is not waited for": (rows_sm90, ("wait_for_staged_bias<0>();",
                                               "wait_for_staged_bias<1>();")),
    "keys of other rows": (rows_sm80, ("bias_stage(shared), 16 * i);", "bias_stage(shared), 0);")),
    "the bias of another head": (rows_sm80, (
        "work.entry * params.group + step.head).bias, bias_stage",
        "work.entry * params.group).bias, bias_stage")),
}  # fmt: skip


@pytest.mark.parametrize("bug", GRADIENT_BUGS)
def test_a_planted_bug_of_gradients_is_found(bug, tmp_path):
    rows_of, change = GRADIENT_BUGS[bug]
    rows = rows_of("float16", 64, 64)
    row = next(row for row in rows if row.kernel in ("bwd_sm90", "bwd_dkdv_sm80"))
    given = {"rows": rows, "sources": {row.entry: plant(tmp_path, row.source, change)}}
    with pytest.raises((AssertionError, emulator.EmulationError)):
        with_seeds(lambda seed: kernel_gradients.check(gradients_of(HOW[0]), seed=seed, **given))
