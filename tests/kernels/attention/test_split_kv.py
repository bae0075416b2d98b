"""`split_kv`, which turns K and V of float32 into pairs of float16: its own source on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention.attention_params import POINTERS, Traits
from fa_cupy.gpu.kernels.attention.full_precision import split_kv
from fa_cupy.gpu.plan import Plan
from tests.support.attention_fp32 import SINGLE, powers
from tests.support.every_run import drawn, examples, only
from tests.support.kernel_attention import draw
from tests.support.planted import plant
from validation import emulator
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator

ROWS = {(row.dim, row.parts): row for row in split_kv.VARIANTS}
D64, D256, ROUNDED = ROWS[64, 2], ROWS[256, 2], ROWS[128, 1]
OF_ZEROS, OF_NONE = -900, -1000  # kZeroExponent, kNoExponent
GUARD = 64  # bytes behind the tiles of an array, which stay as they are


class Tiles:
    """The tiles of K or of V.

    Attributes
    ----------
    parts : numpy.ndarray of float64, shape (parts, entries, tiles, tile_n, dim)
        Low ones without their factor, where they have one.
    scale : numpy.ndarray of float64, shape (entries, tiles, tile_n)
        What the parts of a row are to be multiplied by; 0 of rows that have no exponent.
    is_mixed : numpy.ndarray of bool, shape (entries, tiles)
    column : numpy.ndarray of float64, shape (entries, tiles, dim)
        The factors of columns.
    has_columns : numpy.ndarray of bool, shape (entries, tiles)
        Whether columns have exponents, and low parts their factor.
    """

    def __init__(self, row, raw, tiles, is_v):
        kind = np.dtype(
            [
                ("part", np.float16, (row.parts, row.tile_n * row.dim)),
                ("scale", np.int32 if is_v else np.float32, (row.tile_n,)),
                ("is_mixed", np.int32),
                ("unused", np.int32, (3,)),
                ("column", np.float32, (row.dim if row.parts == 2 else 4,)),
            ]
        )
        found = raw.view(kind).reshape(-1, tiles)
        # Blocks of 64 columns, in whose rows 16-byte chunks are exchanged (PTX ISA 5.5.7).
        rows, cols = np.arange(row.tile_n)[:, None], np.arange(row.dim)
        chunk = cols % 64 // 8 ^ rows % 8
        at = cols // 64 * row.tile_n * 64 + rows * 64 + chunk * 8 + cols % 8
        self.parts = np.moveaxis(found["part"], 2, 0)[..., at].astype(np.float64)
        self.is_mixed = found["is_mixed"].astype(bool)
        assert set(found["is_mixed"].flat) <= {0, 1}
        scale = found["scale"].astype(np.float64)
        self.exponent = scale if is_v else 2 * np.log2(scale)
        self.scale = np.exp2(self.exponent)
        self.scale[self.exponent <= OF_ZEROS] = 0
        self.has_columns = self.is_mixed & bool(is_v) & (row.parts == 2)
        self.column = np.ones((*self.is_mixed.shape, row.dim))
        if self.has_columns.any():
            self.column[self.has_columns] = found["column"][self.has_columns]
        self.parts[1:, self.has_columns] /= 2.0**11


def split(row, k, v, batch=(), source=None, seed=0):
    """Split arrays of a problem whose queries have these batch axes; return the tiles of each."""
    q = np.ones((*batch, 1, k.shape[-1]), SINGLE)
    problem = attention_problem.attention_problem(q, k, v, None, None)
    out = np.zeros(problem.out_shape, SINGLE)
    view = attention_problem.out_view(problem, out.shape, out.strides)
    step, sizes = split_kv.step(Traits(problem, view), row)
    assert step.variant == row
    assert step.aligned in ((), ("k", "v"))
    space = [np.full(sizes[name] + GUARD, 0xA5, np.uint8) for name in split_kv.OUTPUTS]
    sources = {} if source is None else {row.entry: source}
    launcher = EmulatorLauncher(seed, sources=sources)
    plan = Plan([step], (*POINTERS, *split_kv.OUTPUTS), launcher, None)
    given = dict(zip(("k", "v", *split_kv.OUTPUTS), (k, v, *space), strict=True))
    names = (*POINTERS, *split_kv.OUTPUTS)
    plan.run(tuple(given[name].ctypes.data if name in given else 0 for name in names))
    assert all((x[-GUARD:] == 0xA5).all() for x in space)
    tiles = -(-problem.k_len // row.tile_n)
    return [Tiles(row, x[:-GUARD], tiles, i) for i, x in enumerate(space)]


def exponents(x):
    """The exponents s of rows: even, so that the largest finite number is near 2^14."""
    most = np.where(np.isfinite(x), np.abs(x), 0).max(-1).astype(np.float64)
    field = np.where(most < 2.0**-126, -127, np.frexp(most)[1] - 1)
    return np.minimum(126, 14 - field) // 2 * 2


def in_tiles(row, x):
    """All entries of an array, in tiles, with zeros behind the end."""
    entries = x.reshape(-1, *x.shape[-2:])
    _, rows, cols = entries.shape
    padded = np.pad(entries, ((0, 0), (0, -rows % row.tile_n), (0, row.dim - cols)))
    return padded.reshape(len(entries), -1, row.tile_n, row.dim)


def has_many_small(row, x, exponent, exists):
    """Whether so many threads have a number that is small beside the largest of a tile."""
    scaled = np.abs(x) * np.exp2(exponent.astype(np.float64))[..., None]
    small = (scaled > 0) & (scaled < 2.0**-4)
    entries, tiles = x.shape[:2]
    # A thread has every 32nd row, and eight columns of every 64.
    of_threads = small.reshape(entries, tiles, -1, 32, row.dim // 64, 8, 8).any((2, 4, 6))
    return of_threads.sum((2, 3)) >= np.minimum(8, exists.sum(-1))


def hold(row, x, tiles, is_v):
    """Hold tiles against the rows: numbers, exponents, whether they are mixed."""
    want = in_tiles(row, x)
    own = exponents(want)
    has_numbers = (want != 0).any(-1)
    least = np.where(has_numbers, own, 1000).min(-1)  # of the largest row
    most = np.where(has_numbers, own, -1000).max(-1)
    exists = np.arange(want.shape[1] * row.tile_n).reshape(want.shape[1:3]) < x.shape[-2]
    counts = is_v & exists & ~has_numbers  # rows of zeros, whose weights are no measure for others
    common = np.where(least == 1000, 126, least)[..., None]
    is_mixed = (most - least > 8) | counts.any(-1)
    if is_v and row.parts == 2:
        is_mixed |= has_many_small(row, want, common, exists)
    np.testing.assert_array_equal(tiles.is_mixed, is_mixed)
    exponent = np.where(tiles.is_mixed[..., None], own, common)
    unit = np.exp2(-exponent.astype(np.float64))
    has_none = is_v & ~has_numbers & tiles.is_mixed[..., None]
    np.testing.assert_array_equal(tiles.scale, np.where(has_none, 0, unit))
    of_none = np.where(exists, OF_ZEROS, OF_NONE)
    np.testing.assert_array_equal(tiles.exponent[has_none], (of_none + 0 * own)[has_none])
    finite = np.isfinite(want)
    by_row = np.where(finite, want, 0) / unit[..., None]
    columns = np.exp2(-exponents(by_row.swapaxes(-1, -2).astype(SINGLE)).astype(np.float64))
    columns[~tiles.has_columns] = 1
    np.testing.assert_array_equal(tiles.column, columns)
    unit = unit[..., None] * columns[..., None, :]
    found = tiles.parts.sum(0) * unit
    exact = np.where(finite, want, 0).astype(np.float64)
    error = np.abs(np.where(finite, found - exact, 0))
    # The spacing of subnormal numbers of float16 is 2^-24, and of others 2^-10; that of float32,
    # in which numbers are multiplied by the exponents of rows, 2^-149.
    relative = 2.0 ** (-11 * row.parts) * np.abs(exact)
    spacing = np.where(tiles.has_columns, 2.0**-36, 2.0**-25)[..., None, None]
    lost = 2.0**-149 / columns[..., None, :] * tiles.has_columns[..., None, None]
    assert (error <= np.maximum(relative, (spacing + lost) * unit)).all()
    assert not np.isfinite(found[~finite]).any()
    assert np.isnan(found[np.isnan(want)]).all()


def check(row, k, v, batch=(), source=None, seed=0):
    """Hold both arrays; entries along axes on which an array is broadcast are split once."""
    found = split(row, k, v, batch, source, seed)
    for x, tiles, is_v in zip((k, v), found, (False, True), strict=True):
        hold(row, x, tiles, is_v)


def arrays_of(row, k_len, batches=((), ()), narrow=(0, 0), seed=0):
    return [
        draw(*batch, k_len, row.dim - less, dtype=SINGLE, seed=2 * seed + i)
        for i, (batch, less) in enumerate(zip(batches, narrow, strict=True))
    ]


def with_gap(x):
    """The same rows further apart, which need not be a multiple of 16 bytes."""
    room = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, SINGLE)
    room[..., 2:-1] = x
    return room[..., 2:-1]


BATCHES = [  # of queries, keys and values
    ((), (), ()),
    ((2, 3), (2, 3), (2, 3)),
    ((2, 4), (2, 2), (2, 2)),
    ((3, 2), (3, 1), (1, 2)),
    ((2, 2, 2), (1, 2, 2), (2, 2, 1)),
]


@examples(40)
@given(
    row=drawn(ROWS.values(), D64),
    k_len=st.integers(1, 300),
    batches=st.sampled_from(BATCHES),
    narrow=st.tuples(*[st.integers(0, 9)] * 2),
    most=st.sampled_from([0, 1, 3, 30]),
    zeros=st.booleans(),
    layout=st.sampled_from(["contiguous", "gaps", "heads inside"]),
    seed=st.integers(0, 2**32),
)
def test_any_arrays(row, k_len, batches, narrow, most, zeros, layout, seed):
    rng = np.random.default_rng(seed)
    found = []
    for x in arrays_of(row, k_len, batches[1:], narrow, seed):
        x *= powers(k_len, -most, most, seed)
        x *= rng.random((k_len, 1)) < (0.5 if zeros else 1)
        if layout == "gaps":
            x = with_gap(x)
        elif layout == "heads inside" and x.ndim > 2:
            x = np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
        found.append(x)
    check(row, *found, batches[0], seed=seed % 1000)


@pytest.mark.parametrize("row", only(ROWS.values(), D64), ids=lambda row: row.name)
def test_every_build(row):
    k, v = arrays_of(row, 2 * row.tile_n + 7)
    k[: row.tile_n] *= powers(row.tile_n, -20, 20)
    check(row, k, v)
    check(row, k[:, 1:], v[:, :-1])


def check_limit(power, is_mixed, source=None):
    """Rows of ones and of a power of 2, then twice as large numbers but for a bit."""
    rows = np.ones((100, 64), SINGLE)
    rows[50] = np.exp2(power)
    for number in (1.0, 1.99):  # exponents of both are even
        k, v = (rows * SINGLE.type(number) for _ in range(2))
        k[3] = 0
        for tiles in split(D64, k, v, source=source):
            assert tiles.is_mixed.item() == is_mixed
        check(D64, k, v, source=source)
        v[99] = 0
        assert split(D64, k, v, source=source)[1].is_mixed.item()
        check(D64, k, v, source=source)


@pytest.mark.parametrize(("power", "is_mixed"), [(-9, False), (-10, True), (8, False), (9, True)])
def test_rows_have_one_exponent_where_they_are_close(power, is_mixed):
    """A row counts with its largest number, rows of zeros in V alone, and none behind the end."""
    check_limit(power, is_mixed)


def check_small_numbers(count, source=None):
    """Rows of one size that have so many small numbers, all in one column, and fewer rows."""
    k, v = arrays_of(D64, 300)
    v[:count, 7] *= SINGLE.type(1e-9)
    for rows in (300, 130, 100, 5):
        check(D64, k[:rows], v[:rows], source=source)
    found = split(D64, k[:100], v[:100], source=source)[1]
    assert found.is_mixed.item() == (count >= 8)


@pytest.mark.parametrize("count", [0, 7, 8, 300])
def test_columns_have_exponents_where_many_numbers_are_small(count):
    check_small_numbers(count)


def test_tiles_of_zeros():
    k, v = arrays_of(D64, 384)
    k[:128] = v[128:256] = 0
    check(D64, k, v)
    check(D64, 0 * k, 0 * v)
    for tiles, is_v in zip(split(D64, 0 * k, 0 * v), (False, True), strict=True):
        assert not tiles.parts.any()
        assert (tiles.scale == (0 if is_v else 2.0**-126)).all()


def test_numbers_of_all_sizes():
    """The largest, and subnormal ones, also where a tile has nothing else."""
    for sizes in ([3.4e38, 1e-38, 1e-45], [1e-40, 1e-45], [3.4e38, 3e37]):
        rows = np.resize(np.array(sizes, SINGLE), (130, 1)) * np.ones(64, SINGLE)
        check(D64, rows, rows[:, ::-1].copy())


def test_numbers_that_are_not_finite():
    """They have no part in exponents, and no other number changes."""
    k, v = arrays_of(D64, 256)
    want = split(D64, k, v)
    k[5, 3], k[5, 60], v[200, 0] = np.inf, np.nan, -np.inf
    check(D64, k, v)
    for x, clean, tiles in zip((k, v), want, split(D64, k, v), strict=True):
        finite = np.isfinite(in_tiles(D64, x))
        np.testing.assert_array_equal(tiles.parts[:, finite], clean.parts[:, finite])
        np.testing.assert_array_equal(tiles.scale, clean.scale)
    k[5], v[200] = np.inf, np.nan  # rows without a finite number
    for x, tiles in zip((k, v), split(D64, k, v), strict=True):
        found = np.isfinite(tiles.parts).all((0, 4)).ravel()
        np.testing.assert_array_equal(found, np.isfinite(x).all(-1))


# What stands in the kernel or its headers, what is put there instead.
BUGS = {
    "rows behind the end are read": ("array.row, rows_left,", "array.row, 1 << 20,"),
    "chunks are not exchanged": (
        "Tile::offset(row, 8 * i + threadIdx.x % 8)",
        "Tile::offset(row & ~7, 8 * i + threadIdx.x % 8) + row % 8 * 128",
    ),
    "the limit of mixed tiles": ("kMostUniform = 8;", "kMostUniform = 7;"),
    "exponents of one warp": ("int w = 1; w < kWarps; ++w)", "int w = 1; w < 1; ++w)"),
    "exponents are read before they are written": (
        "__syncthreads(); Exponents found", "Exponents found",
    ),
    "counts are read before they are written": (
        "__syncthreads(); int threads", "int threads",
    ),
    "columns are read before they are written": (
        "__syncthreads(); if (threadIdx.x < kDim)", "if (threadIdx.x < kDim)",
    ),
    "exponents of columns are read before they are written": (
        "power_of_two(-exponent);\n  }\n  __syncthreads();", "power_of_two(-exponent);\n  }",
    ),
    "zeros have an exponent": ("is_mixed && most[g] == 0.0f ?", "false ?"),
    "zeros count": ("if (most[g] == 0.0f) {", "if (false) {"),
    "zeros of V do not count": ("is_v ? rows_left : 0", "0"),
    "zeros behind the end count": ("g * Rows::kStep < counting", "counting != 0"),
    "axes of other sizes": ("entry /= size;", "entry /= 2;"),
    "small numbers are not looked for": (
        "return threads >= min(kManySmall, count);", "return false;",
    ),
    "few small numbers count": ("kManySmall = 8;", "kManySmall = 4;"),
    "rows behind the end have small numbers": ("min(kManySmall, count);", "kManySmall;"),
    "low parts have no factor": ("has_columns ? kLowScale : 1.0f", "1.0f"),
    "columns of other rows count": ("fmaxf(most, x * power_of_two(own[g]))", "fmaxf(most, x)"),
    "columns of one warp": (
        "for (int w = 0; w < kWarps; ++w) most", "for (int w = 0; w < 1; ++w) most",
    ),
    "low parts of other numbers": ("pair[2].low, pair[3].low", "pair[3].low, pair[2].low"),
}  # fmt: skip


def find(source):
    """Make some calls by a kernel in place of the row's."""
    for seed in range(3):
        k, v = arrays_of(D64, 300, ((3, 1), (1, 2)), seed=seed)
        k *= np.exp2(np.arange(300) // 40).astype(SINGLE)[:, None]
        v *= powers(300, 0, 3 * seed)
        v[..., 100:, :] *= np.random.default_rng(seed).random((200, 1)) < 0.5
        check(D64, k, v, (3, 2), source, seed)
    for power, is_mixed in ((8, False), (10, True)):
        check_limit(power, is_mixed, source)
    for count in (1, 4, 6, 8, 300):
        check_small_numbers(count, source)


@pytest.mark.parametrize("bug", only(BUGS, "chunks are not exchanged", "exponents of one warp"))
def test_a_planted_bug_is_found(bug, tmp_path):
    find(None)
    source = plant(tmp_path, D64.source, BUGS[bug])
    with pytest.raises((emulator.EmulationError, AssertionError)):
        find(source)
