"""What the kernels share that read pairs: lists of the pairs of a mask, and rows of variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fa_cupy.core.attention_problem import FLOAT_DTYPES, Problem, View
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import (
    ATTENTION_PARAMS,
    MASK_BLOCK,
    MAX_BATCH_AXES,
    MAX_GRID,
    MAX_LENGTH,
    merge_axes,
)
from fa_cupy.gpu.kernels.score import takes_scale, takes_score
from fa_cupy.gpu.kernels.variant import Variant

DTYPES = ("float16", "bfloat16", "float32")
#: Pairs of a piece of a long row. A warp takes 16 microseconds for it at most if it waits 1
#: microsecond for each 16 pairs, and writes 1 byte of sums for each 240 bytes that it reads.
PIECE_PAIRS = 256
_WARPS = 4  # of a block
_MOST_DIM = 256

#: ``struct PairRows`` of ``cuda_src/common/pairs.cuh``.
PAIR_ROWS = np.dtype(
    [(name, np.uint64) for name in ("begin", "columns", "places", "pieces", "matrix_of_entry")]
    + [(name, np.int32) for name in ("rows", "most_pieces", "piece_pairs")],
    align=True,
)
#: ``struct PairAxes`` of the same file.
PAIR_AXES = np.dtype([(name, np.int64, (MAX_BATCH_AXES,)) for name in ("size", "stride")])

_FORM = ("begin", "columns", "pieces")
#: The arrays of the list of a mask's pairs by queries, in the order in which plans are given their
#: addresses, and those of the list by keys.
BY_QUERY_ARRAYS = (*(f"pairs_by_query_{name}" for name in _FORM), "pairs_matrix_of_entry")
BY_KEY_ARRAYS = (*(f"pairs_by_key_{name}" for name in _FORM), "pairs_by_key_places")


class PairCounts(NamedTuple):
    """What plans depend on in the list of a mask's pairs.

    Attributes
    ----------
    pairs : int
        Of all matrices.
    query_pieces, key_pieces : int
        The most pieces of long rows that a matrix has, by queries and by keys.
    piece_pairs : int
        Pairs of a piece; rows with more are long.
    """

    pairs: int
    query_pieces: int
    key_pieces: int
    piece_pairs: int = PIECE_PAIRS


class PairBias(NamedTuple):
    """A number for each pair, which is added to its score.

    Numbers are float32, in the order of the list by queries.

    Attributes
    ----------
    strides : tuple of int
        Numbers from one entry to the next along each axis of ``problem.batch``.
    wants_gradient : bool
        Whether gradients are computed for it, summed over the axes of stride 0.
    """

    strides: tuple[int, ...]
    wants_gradient: bool = False


@dataclass(frozen=True, kw_only=True)
class PairVariant(Variant):
    """A row of a kernel that reads pairs.

    A block has a row for each of its warps, `tile_m` of them. `tile_n` pairs are on their way at a
    time, `stages` for each slot of lanes.
    """

    hot_targets: tuple[str, ...] = ("sm_80", "sm_90a")

    @property
    def kernel(self) -> str:
        """The stem of the source, as ``fwd_pairs``."""
        return self.source.rpartition("/")[2]

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_KIND", [x.name for x in FLOAT_DTYPES].index(self.dtype)),
            ("FA_DIM", self.dim),
            ("FA_WARPS", self.warps),
            ("FA_UNROLL", self.stages),
            ("FA_PARAMS_BYTES", ATTENTION_PARAMS.itemsize),
            *self.score_defines,
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller dims first."""
        return (self.dim,)


_Row = TypeVar("_Row", bound=PairVariant)


def rows_of(make: Callable[..., _Row], stem: str, most: int, why: str) -> Iterator[_Row]:
    """Yield the rows of a kernel, whose slots have `most` pairs on their way at most."""
    for dim, dtype in product((32, 64, 128, 256), DTYPES):
        item = 4 if dtype == "float32" else 2
        slots = max(1, 512 // (dim * item))  # a warp's loads have 512 bytes
        loads = max(1, dim * item // 512)  # of a lane, for each vector
        unroll = max(1, min(most // loads, 16 // slots))
        yield make(
            source=f"attention/{stem}", dtype=dtype, dim=dim, tile_m=_WARPS,
            tile_n=slots * unroll, warps=_WARPS, stages=unroll, why=why, sparse=True,
        )  # fmt: skip


def row_serving(rows: Sequence[_Row], dtype: str, dim: int) -> _Row | None:
    """Return the row for a dtype and the larger one of head_dim and v_dim, in its plain build."""
    return next((row for row in rows if row.dtype == dtype and row.dim >= dim), None)


def serves(problem: Problem, target: str | None) -> bool:
    """Whether there are kernels that read pairs for a problem with a mask, in any layout.

    There are none for float64, dims above 256, dims of 0, more batch axes or rows than a launch
    takes, and softcaps that float32 does not hold.
    """
    longest = max(problem.q_len, problem.k_len)
    entries = math.prod(problem.batch)
    return (
        target is not None
        and problem.mask is not None
        and problem.dtype.name in DTYPES
        and 0 < max(problem.head_dim, problem.v_dim) <= _MOST_DIM
        and 0 < longest <= MAX_LENGTH
        and len(problem.batch) <= MAX_BATCH_AXES
        and entries * (longest + MASK_BLOCK) <= MAX_GRID
        and (problem.score is None or takes_score(problem))
        and takes_scale(problem)
    )


def fill_rows(list_: Any, rows: int, pieces: int, counts: PairCounts) -> None:
    """Fill in a `PAIR_ROWS`, all but addresses."""
    list_["rows"], list_["most_pieces"] = rows, pieces
    list_["piece_pairs"] = counts.piece_pairs


def axes_of(batch: Sequence[int], strides: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return a `PAIR_AXES`, of shape (1,), of steps along the axes of a batch."""
    view = View((*batch, 1, 1), (*strides, 0, 0))
    sizes, steps = merge_axes(tuple(batch), {"bias": view})
    filled = np.zeros(1, PAIR_AXES)
    missing = MAX_BATCH_AXES - len(sizes)
    filled["size"] = [1] * missing + sizes
    filled["stride"] = [0] * missing + steps["bias"]
    return filled


def grid_of(entries: int, rows: int, pieces: int) -> int:
    """Return the blocks of a launch: those of pieces, then those of rows."""
    return -(-entries * pieces // _WARPS) + -(-entries * rows // _WARPS)


def list_addresses(by_key: bool, field: str = "list") -> dict[str, str]:
    """Return the arrays that the fields of a `PAIR_ROWS` point to."""
    kind = "by_key" if by_key else "by_query"
    found = {f"{field}.{name}": f"pairs_{kind}_{name}" for name in _FORM}
    if by_key:
        found[f"{field}.places"] = "pairs_by_key_places"
    return found | {f"{field}.matrix_of_entry": "pairs_matrix_of_entry"}
