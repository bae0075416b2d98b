"""How a causal product is computed on a GPU: which kernels, and how the sequence is split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.linear.sm80_variants import (
    PRODUCTS,
    SCAN,
    ChunkedSingleVariant,
    ChunkedVariant,
    LowOccupancyVariant,
    ProductVariant,
    RecurrentVariant,
    StatesVariant,
)
from fa_cupy.gpu.kernels.linear.sm90_heuristics import SCAN_SEGMENT_US, SCAN_US
from fa_cupy.gpu.kernels.linear.sm90_heuristics import ways as ways_sm90

#: Rows of a sequence that one block can count.
_MAX_ROWS = 2**31 - 2**16
_ALGORITHMS = {
    ChunkedVariant: "chunked",
    ChunkedSingleVariant: "chunked",
    RecurrentVariant: "recurrent",
    LowOccupancyVariant: "low_occupancy",
}


class Choice(NamedTuple):
    """How a causal product is computed.

    Attributes
    ----------
    row : ProductVariant
    states : ProductVariant or None
        What sums the states of segments; None for one segment, and where each block sums what lies
        before its segment itself.
    segments, segment_rows : int
        The parts of a sequence, and the rows of each but the last.
    microseconds : float
        What the cost model expects.
    """

    row: ProductVariant
    states: ProductVariant | None
    segments: int
    segment_rows: int
    microseconds: float

    def launches(self, qk_dim: int, v_dim: int) -> list[tuple[ProductVariant, int, int]]:
        """Return rows in the order of their launches, with blocks a segment, and segments."""
        launches: list[tuple[ProductVariant, int, int]] = []
        if self.states is not None:
            tiles = -(-v_dim // self.states.tile_n)
            launches.append((self.states, tiles, self.segments - 1))
            launches.append((SCAN, -(-qk_dim * v_dim // SCAN.threads), 1))
        return [*launches, (self.row, -(-v_dim // self.row.tile_n), self.segments)]

    @property
    def split(self) -> tuple[int, int]:
        """The segments of a sequence, and the rows of each but the last."""
        return self.segments, self.segment_rows

    @property
    def text(self) -> str:
        """For people."""
        parts = f"{self.segments} segments" if self.segments > 1 else "one pass"
        return f"{self.row.name}, {parts}, about {self.microseconds:.0f} us"


# The cost model, in microseconds and bytes. An H200's memory gives each of its 132 multiprocessors
# 32 KB a microsecond; other devices differ in both alike. What a chunk takes at least: barriers and
# latency, and m16n8k16 products, of which a quarter of a multiprocessor makes one in 6.1 clocks.
# Where outputs wait for scores and states for outputs, a block alone was measured at twice of both
# (H200: 1.65 us a chunk at dims of 64, 3.8 us at dims of 128); several fill a part of these waits.
_BYTES_PER_US = 32e3
_LAUNCH_US = 3.0
_START_US = 2.0
_STEP_US = 0.35
_CLOCKS_PER_US = 1755
_MMA_US = 6.1 / _CLOCKS_PER_US
_WAITING, _WAITING_TOGETHER = 2.1, 1.6
# The same of float32 by chunks, whose steps have one barrier and whose warps wait for themselves
# more than for tensor cores (H200: 5.8 us for 64 rows at dims of 64, 5.5 us for 32 at dims of 128).
_SINGLE_STEP_US = 0.5
_SINGLE_MMA_US = 1.3 * _MMA_US
_SINGLE_WAITING = 2.4
# Clocks of the plain kernels: a row of `recurrent`, and of each warp of a multiprocessor where it
# has many; a tile of `low_occupancy`, what 32 key columns add, and an instruction.
_RECURRENT_CLOCKS, _RECURRENT_WARP_CLOCKS = 200, 30
_LOW_OCCUPANCY_CLOCKS, _LOW_OCCUPANCY_DIM_CLOCKS, _LOW_OCCUPANCY_ISSUE_CLOCKS = 600, 700, 2.8


def choose(
    dtype: str, entries: int, length: int, qk_dim: int, v_dim: int, target: str, sms: int,
    algorithm: str = "auto", mapped: bool = True, jobs: int = 1,
) -> Choice | None:  # fmt: skip
    """Pick the kernels and the split of a product: the only place where that is decided.

    Parameters
    ----------
    dtype : str
    entries : int
        Batch entries.
    length, qk_dim, v_dim : int
    target : str
        That of the device, as `fa_cupy.gpu.driver.targets.target_of` chooses it.
    sms : int
        Multiprocessors of the device.
    algorithm : str, optional
        Of `fa_cupy.core.linear_problem.ALGORITHMS`.
    mapped : bool, optional
        Whether tensor maps can walk the arrays (`fa_cupy.gpu.kernels.linear.sm90_params.takes`).
    jobs : int, optional
        Such products in one launch, which kernels for SM90 alone can do.

    Returns
    -------
    Choice or None
        None where no kernel serves the call.
    """
    call = entries, length, qk_dim, v_dim, target, sms
    choices: list[Choice] = []
    if max(qk_dim, v_dim) > _MAX_ROWS:  # kernels count columns in 32 bits
        return None
    for kind, name in _ALGORITHMS.items():
        if algorithm in ("auto", name):
            row_type = (row for row in PRODUCTS if type(row) is kind and row.dtype == dtype)
            choices += _ways([row for row in row_type if target in row.targets], *call)
    if jobs > 1:
        choices = []
    if mapped and algorithm in ("auto", "chunked"):  # first: where both wait for memory
        choices = [Choice(*way) for way in ways_sm90(dtype, *call, jobs)] + choices
    return min(choices, key=lambda choice: (choice.microseconds, choice.segments), default=None)


def _ways(
    rows: list[ProductVariant], entries: int, length: int, qk_dim: int, v_dim: int, target: str,
    sms: int,
) -> Iterator[Choice]:  # fmt: skip
    """Yield the ways to compute a product by some rows of one algorithm."""
    wide: list[ProductVariant] = sorted((row for row in rows if row.dim >= qk_dim), key=_rank)
    if not wide:  # plain kernels take wider keys in turns
        wide += [row for row in rows[-1:] if isinstance(row, RecurrentVariant)]
    for row in wide:
        if row.dim != wide[0].dim:
            return
        if isinstance(row, (ChunkedVariant, ChunkedSingleVariant)):
            yield from _splits(row, entries, length, qk_dim, v_dim, target, sms)
        elif length <= _MAX_ROWS:
            blocks = entries * -(-v_dim // row.tile_n)
            us = _plain_us(row, blocks, length, qk_dim, target, sms)
            yield Choice(row, None, 1, max(1, length), us)


def _splits(
    row: ProductVariant, entries: int, length: int, qk_dim: int, v_dim: int, target: str, sms: int
) -> Iterator[Choice]:
    """Yield the ways to split a product into segments that come into question."""
    states = next(
        (
            other
            for other in PRODUCTS
            if isinstance(other, StatesVariant)
            and (other.dtype, other.dim) == (row.dtype, row.dim)
            and target in other.targets
        ),
        None,
    )
    chunks = -(-length // row.tile_m)
    blocks = entries * -(-v_dim // row.tile_n)
    resident = sms * _resident(row, target)
    # Splits that fill the device so many times, as far as each segment has a few chunks.
    wanted = {1} | {times * resident // max(1, blocks) for times in (1, 2, 3)}
    least = -(-length // _MAX_ROWS)
    for split in wanted:
        split = max(least, min(split, chunks // 2), 1)
        segment_chunks = max(1, -(-chunks // split))
        segments = max(1, -(-chunks // segment_chunks))
        if segments > 1 and states is None:
            continue
        us = _pass_us(row, blocks * segments, segment_chunks, qk_dim, v_dim, target, sms)
        if segments > 1 and states is not None:
            tiles = entries * -(-v_dim // states.tile_n)
            work = tiles * (segments - 1), segment_chunks * row.tile_m / states.tile_m
            us += _pass_us(states, *work, qk_dim, v_dim, target, sms)
            scanned = 8 * entries * segments * qk_dim * v_dim
            us += SCAN_US + SCAN_SEGMENT_US * segments + scanned / (_BYTES_PER_US * sms)
        segment_rows = segment_chunks * row.tile_m
        used = states if segments > 1 else None
        yield Choice(row, used, segments, segment_rows, us)


def _rank(row: ProductVariant) -> tuple[int, ...]:
    return row.rank


def _resident(row: ProductVariant, target: str) -> int:
    """Blocks that fit on a multiprocessor, by its shared memory and 64 K registers."""
    by_memory = (SHARED_LIMIT[target] + 1024) // (row.shared_bytes + 1024)
    return max(1, min(by_memory, max(row.blocks, 1)))


def _pass_us(
    row: ProductVariant, blocks: int, chunks: float, qk_dim: int, v_dim: int, target: str, sms: int
) -> float:
    """Time of a launch whose blocks walk so many chunks."""
    together = max(1, min(_resident(row, target), -(-blocks // sms)))
    own_columns = min(v_dim, row.tile_n)
    outputs = isinstance(row, (ChunkedVariant, ChunkedSingleVariant))
    single = row.dtype == "float32"
    traffic = (4 if single else 2) * row.tile_m * (2 if outputs else 1) * (qk_dim + own_columns)
    mma = row.tile_m * row.dim * row.tile_n / (16 * 8 * 16) / 4  # of the state, a quarter of an SM
    if outputs:
        scores = row.tile_m**2 * (row.dim + row.tile_n) / 2 / (16 * 8 * 16) / 4
        mma = mma * (3 if row.dtype == "bfloat16" else 2) + scores
    least, mma_us = (_SINGLE_STEP_US, 3 * _SINGLE_MMA_US) if single else (_STEP_US, _MMA_US)
    waiting, waiting_together = (_WAITING, _WAITING_TOGETHER) if outputs else (1, 1)
    if single:
        waiting, waiting_together = _SINGLE_WAITING, 1
    alone = waiting * (least + mma * mma_us)
    busy = max(traffic / _BYTES_PER_US, waiting_together * mma * mma_us)
    step = max(alone, together * busy)
    waves = -(-blocks // (sms * together))
    return _LAUNCH_US + waves * (_START_US + chunks * step)


def _plain_us(
    row: ProductVariant, blocks: int, length: int, qk_dim: int, target: str, sms: int
) -> float:
    """Time of a launch of ``recurrent`` or ``low_occupancy``.

    The first takes five 16-byte reads of shared memory a row and warp, four clocks each, and waits
    for sums over lanes; the second waits for three barriers a tile, and adds up every warp's sums.
    """
    together = max(1, min(_resident(row, target), -(-blocks // sms)))
    if isinstance(row, LowOccupancyVariant):
        instructions = 160 + row.dim / 32 * (130 + 8 * row.warps)
        issued = together * row.warps * instructions / 4 * _LOW_OCCUPANCY_ISSUE_CLOCKS
        waited = _LOW_OCCUPANCY_CLOCKS + _LOW_OCCUPANCY_DIM_CLOCKS * row.dim / 32
        clocks = max(waited, issued) / row.tile_m
    else:
        clocks = max(_RECURRENT_CLOCKS, together * row.warps * _RECURRENT_WARP_CLOCKS)
    waves, turns = -(-blocks // (sms * together)), -(-qk_dim // row.dim)
    return _LAUNCH_US + waves * turns * (_START_US + length * clocks / _CLOCKS_PER_US)
