"""A bias of pairs that comes by way of shared memory: the kernels' own source on the CPU."""

import numpy as np
import pytest

from fa_cupy.core import attention_problem
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.score import ScoreMod, bias_at, score_mod_of
from tests.support import kernel_gradients
from tests.support.every_run import only, some
from tests.support.kernel_attention import FORWARD_DTYPES, check, draw
from tests.support.kernel_gradients import case, rows_sm80, rows_sm90
from tests.support.planted import plant
from validation import emulator
from validation.emulator.calls import attention_backward

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


def gradients_of(how, dtype=HALF, dim=64, **options):
    """A call whose heads share keys, each with a bias of its own."""
    bias = bias_of(dtype, how)
    lengths = bias.shape[1:]
    options = {"bias": bias[None], **BOTTOM, **options}
    return case("float16", (2, 1), lengths, (dim, dim), batch=1, **options)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows_of", [rows_sm80, rows_sm90])
def test_gradients_with_rows_that_begin_anywhere(rows_of, how):
    kernel_gradients.check(gradients_of(how), rows=rows_of("float16", 64, 64), seed=1)


# Padded dims and types that bwd_sm90 stages.
DIMS = [(dim, dtype) for dim in (64, 96, 128) for dtype in (HALF, SINGLE)]
STAGED_GRADIENTS = only(DIMS, (64, SINGLE), (128, HALF), (128, SINGLE))


@pytest.mark.parametrize(("dim", "dtype"), STAGED_GRADIENTS)
@pytest.mark.parametrize("how", only(HOW, HOW[0]))
def test_gradients_of_each_build(dim, dtype, how):
    call = gradients_of(how, dtype, dim)
    main = kernel_gradients.rows_of(call)[1]
    assert (main.kernel, main.bias_bytes) == ("bwd_sm90", 0 if how != HOW[0] else dtype.itemsize)
    kernel_gradients.check(call, seed=1, blocks=3, together=3)


@pytest.mark.parametrize(("dim", "dtype"), only(DIMS, (128, SINGLE)))
@pytest.mark.parametrize("batch", [(1, 1), (2, 1), (1, 2)])
def test_gradients_with_a_bias_that_broadcasts(dim, dtype, batch):
    bias = draw(*batch, 100, 136, dtype=dtype)
    call = case("bfloat16", (2, 2), (100, 136), (dim, dim - 8), dlse=True, bias=bias)
    assert kernel_gradients.rows_of(call)[1].bias_bytes == dtype.itemsize
    kernel_gradients.check(call, seed=2)


@pytest.mark.parametrize(("dim", "dtype"), only(DIMS, (64, SINGLE), (128, HALF)))
def test_the_bias_of_hidden_pairs_may_be_anything(dim, dtype):
    call = gradients_of(HOW[0], dtype, dim)
    want = kernel_gradients.solve(call)
    spoiled = bias_of(dtype, HOW[0])[None]
    queries, keys = LENGTHS
    spoiled[..., ~np.tri(queries, keys, keys - queries, dtype=bool)] = np.nan
    *arrays, options = call
    rows = kernel_gradients.rows_of(call)
    q, k, v, dout, dlse = arrays
    out, lse = kernel_gradients.reference.attention(q, k, v, **options)
    given = {**options, "bias": spoiled}
    got = attention_backward(rows, dout, q, k, v, out.astype(HALF), lse, dlse, **given)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@pytest.mark.long
@pytest.mark.parametrize(("dim", "dtype"), DIMS)
def test_gradients_with_a_softcap(dim, dtype):
    kernel_gradients.check(gradients_of(HOW[0], dtype, dim, softcap=2.0), seed=1)


def build_of(dim, dtype, **options):
    """The build of bwd_sm90 for a bias of pairs of this type."""
    given = {"bias_axes": "pair", "bias_dtype": dtype.name, **options}
    return rows_sm90("bfloat16", dim, dim, score=ScoreMod(**given))[1]


@pytest.mark.parametrize(("dim", "dtype"), DIMS)
def test_every_build_of_gradients_has_the_shared_memory_that_it_asks_for(dim, dtype):
    row = build_of(dim, dtype)
    builds = row, row.for_sequences(True), row.for_dropout(True), build_of(dim, dtype, softcap=True)
    assert all(build.targets == ("sm_90a",) for build in builds)
    assert all(build.shared_bytes <= SHARED_LIMIT["sm_90a"] for build in builds)
    assert {build.bias_bytes for build in builds} == {dtype.itemsize}
    loaded = build_of(dim, dtype, by_registers=True)
    assert loaded.bias_bytes == 0
    # Above dim 64 a tile of the bias has the place of a buffer for results.
    assert (row.staging_stages, loaded.staging_stages) == (2 if dim == 64 else 1, 2)
    assert loaded.name.endswith("by_registers")


def bias_view(strides, dtype, aligned=True, mask=None):
    """The score of a call whose bias has these strides, in elements."""
    q = np.zeros((2, 3, 40, 64), np.float16)
    memory = np.zeros(1 << 18, dtype)
    steps = [step * memory.itemsize for step in strides]
    bias = np.lib.stride_tricks.as_strided(memory, (2, 3, 40, 40), steps)
    problem = attention_problem.attention_problem(q, q, q, bias, mask)
    return score_mod_of(bias_at(problem, 32 if aligned else 40))


@pytest.mark.parametrize(
    ("strides", "of_half", "of_single"),
    [
        ((4800, 1600, 40, 1), True, True),
        ((0, 0, 40, 1), True, True),
        ((4800, 1600, 44, 1), False, True),  # rows of 88 and 176 bytes
        ((4800, 1600, 42, 1), False, False),
        ((4800, 1604, 40, 1), False, True),
        ((4801, 1600, 40, 1), False, False),
        ((4800, 1600, 1, 40), False, False),
        ((9600, 3200, 80, 2), False, False),
    ],
)
def test_the_alignment_of_rows_decides_on_the_build(strides, of_half, of_single):
    for dtype, staged in ((HALF, of_half), (SINGLE, of_single)):
        assert bias_view(strides, dtype).by_registers == (not staged)
        assert bias_view(strides, dtype, aligned=False).by_registers
        mask = np.ones((40, 40), bool)  # whose kernels have no stage
        assert not bias_view(strides, dtype, aligned=False, mask=mask).by_registers


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


OTHER_QUERIES = (
    "band_tile(c, countdown) * kTileM, c.work.tile", "band_tile(c, countdown) * 16, c.work.tile"
)  # fmt: skip
NOT_WAITED = "wait_for_staged_bias<0>();", "wait_for_staged_bias<1>();"
BY_MMA_SYNC = 80  # in place of a dim
# A padded dim of bwd_sm90, or the kernels of mma.sync, and the type of the bias.
GRADIENT_BUGS = {
    "keys of the other warpgroup": (64, HALF, (
        "(operands, cvta_to_shared(bias_stage(c.shared, c.group)));",
        "(operands, cvta_to_shared(bias_stage(c.shared, 1 - c.group)));")),
    "other queries": (128, HALF, OTHER_QUERIES),
    "other queries of float32": (64, SINGLE, OTHER_QUERIES),
    "the tile is not waited for": (128, HALF, NOT_WAITED),
    "the tile of float32 is not waited for": (128, SINGLE, NOT_WAITED),
    "float32 of the other warpgroup": (128, SINGLE, ("bias_stage(c.shared, c.group), j);",
                                                     "bias_stage(c.shared, 1 - c.group), j);")),
    "the first queries of float32": (64, SINGLE, ("bias_stage(c.shared, c.group), j);",
                                                  "bias_stage(c.shared, c.group), 0);")),
    "the other 8 keys of float32": (128, SINGLE, ("(4 * e + 2 * h) << 4",
                                                  "(4 * e + 2 * (1 - h)) << 4")),
    "chunks of float32 stay in place": (128, SINGLE, ("^ (pair % 4 * 2)", "^ (row % 4 * 2)")),
    "keys of other rows": (BY_MMA_SYNC, HALF, ("bias_stage(shared), 16 * i);",
                                               "bias_stage(shared), 0);")),
    "the bias of another head": (BY_MMA_SYNC, HALF, (
        "work.entry * params.group + step.head).bias, bias_stage",
        "work.entry * params.group).bias, bias_stage")),
}  # fmt: skip


@pytest.mark.parametrize("bug", GRADIENT_BUGS)
def test_a_planted_bug_of_gradients_is_found(bug, tmp_path):
    dim, dtype, change = GRADIENT_BUGS[bug]
    call = gradients_of(HOW[0], dtype, 64 if dim == BY_MMA_SYNC else dim)
    rows = rows_sm80("float16", 64, 64) if dim == BY_MMA_SYNC else kernel_gradients.rows_of(call)
    row = next(row for row in rows if row.kernel in ("bwd_sm90", "bwd_dkdv_sm80"))
    given = {"rows": rows, "sources": {row.entry: plant(tmp_path, row.source, change)}}
    with pytest.raises((AssertionError, emulator.EmulationError)):
        with_seeds(lambda seed: kernel_gradients.check(call, seed=seed, **given))
