"""What causal products cost on the kernels, and the choice of the cheapest way to compute one."""

from __future__ import annotations

from collections.abc import Iterator

from fa_cupy.core.linear_problem import ALGORITHMS
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.gpu.kernels.linear.low_occupancy import LowOccupancy
from fa_cupy.gpu.kernels.linear.sm90.cost_model import SCAN_SEGMENT_US, SCAN_US
from fa_cupy.gpu.kernels.linear.sm90.cost_model import ways as ways_sm90
from fa_cupy.gpu.kernels.linear.table import serving
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant, ProductVariant

_Row = tuple[ProductVariant, ProductVariant | None]  # and what sums states of its segments
#: Rows of a sequence that one block can count.
_MAX_ROWS = 2**31 - 2**16
_LEAST_HALVED = 4  # segments of products in two halves

# The cost model, in microseconds and bytes. An H200's memory gives each of its 132 multiprocessors
# 32 KB a microsecond; other devices differ in both alike. What a chunk takes at least: barriers and
# latency, and m16n8k16 products. A quarter of a multiprocessor makes one of them in 6.1 clocks.
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
# The same of float64. A product takes a quarter of a multiprocessor 64 clocks, and a chunk what its
# warps wait for besides (H200: 4.1 us for 32 rows at dims of 64, 5.1 for 16 at dims of 128, states
# alone 1.3 for 32 rows at dims of 64).
_DOUBLE_MMA_US = 64 / _CLOCKS_PER_US
_DOUBLE_STEP_US, _DOUBLE_STATES_STEP_US = 2.6, 0.7
_DOUBLE_WAITING_TOGETHER = 1.5
# Clocks of the plain kernels: a row of `recurrent`, and of each warp of a multiprocessor where it
# has many; a tile of `low_occupancy`, what 32 key columns add, and an instruction.
_RECURRENT_CLOCKS, _RECURRENT_WARP_CLOCKS = 200, 30
_DOUBLE_RECURRENT_CLOCKS = 600  # reckoned: a chain of 32 multiply-adds, and reads that it waits for
_LOW_OCCUPANCY_CLOCKS, _LOW_OCCUPANCY_DIM_CLOCKS, _LOW_OCCUPANCY_ISSUE_CLOCKS = 600, 700, 2.8


def choose(
    dtype: str, entries: int, length: int, qk_dim: int, v_dim: int, target: str, sms: int,
    algorithm: str = "auto", mapped: bool = True, jobs: int = 1, packed: bool = False,
    halved: bool = False,
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
    packed : bool, optional
        Whether entries are packed sequences, of `length` rows on average.
    halved : bool, optional
        Whether the states of all segments are wanted before outputs are computed: only splits with
        a pass for states, and few rows in the last segment, which has none otherwise.

    Returns
    -------
    Choice or None
        None where no kernel serves the call.
    """
    call = entries, length, qk_dim, v_dim
    choices: list[Choice] = []
    if max(qk_dim, v_dim) > _MAX_ROWS:  # kernels count columns in 32 bits
        return None
    rows = serving(dtype, target, packed)
    if mapped and algorithm in ("auto", "chunked"):  # first: where both wait for memory
        own = [(row, states) for row, states in rows if isinstance(row, ProductSm90Variant)]
        choices += ways_sm90(own, *call, sms, jobs, _LEAST_HALVED if halved else 1)
    rows = [pair for pair in rows if not isinstance(pair[0], ProductSm90Variant)]
    for name in ALGORITHMS[1:] if jobs == 1 else ():
        if algorithm in ("auto", name):
            choices += _ways(
                [pair for pair in rows if pair[0].algorithm == name], *call, target, sms
            )
    if halved:
        some = [choice for choice in choices if choice.states is not None]
        choices = [choice for choice in some if choice.segments >= _LEAST_HALVED] or some
    return min(choices, key=lambda choice: (choice.microseconds, choice.segments), default=None)


def _ways(
    rows: list[_Row], entries: int, length: int, qk_dim: int, v_dim: int, target: str, sms: int
) -> Iterator[Choice]:
    """Yield the ways to compute a product by some rows of one algorithm."""
    # Of rows for the same dim, those of longer chunks first, and of more stages.
    wide = sorted(
        (pair for pair in rows if pair[0].dim >= qk_dim),
        key=lambda pair: (pair[0].dim, -pair[0].tile_m, -pair[0].stages),
    )
    if not wide:  # plain kernels take wider keys in turns
        wide += [pair for pair in rows[-1:] if pair[0].algorithm != "chunked"]
    for row, states in wide:
        if row.dim != wide[0][0].dim:
            return
        if row.algorithm == "chunked":
            yield from _splits(row, states, entries, length, qk_dim, v_dim, target, sms)
        elif length <= _MAX_ROWS:
            blocks = entries * -(-v_dim // row.tile_n)
            us = _plain_us(row, blocks, length, qk_dim, target, sms)
            yield Choice(row, None, 1, max(1, length), us)


def _splits(
    row: ProductVariant, states: ProductVariant | None, entries: int, length: int, qk_dim: int,
    v_dim: int, target: str, sms: int,
) -> Iterator[Choice]:  # fmt: skip
    """Yield the ways to split a product into segments that come into question."""
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
    outputs = not row.sums_states
    single = row.dtype == "float32"
    item = {"float32": 4, "float64": 8}.get(row.dtype, 2)
    traffic = item * row.tile_m * (2 if outputs else 1) * (qk_dim + own_columns)
    mma = row.tile_m * row.dim * row.tile_n / (16 * 8 * 16) / 4  # of the state, a quarter of an SM
    if outputs:
        scores = row.tile_m**2 * (row.dim + row.tile_n) / 2 / (16 * 8 * 16) / 4
        mma = mma * (3 if row.dtype == "bfloat16" else 2) + scores
    least, mma_us = (_SINGLE_STEP_US, 3 * _SINGLE_MMA_US) if single else (_STEP_US, _MMA_US)
    waiting, waiting_together = (_WAITING, _WAITING_TOGETHER) if outputs else (1, 1)
    if single:
        waiting, waiting_together = _SINGLE_WAITING, 1
    if row.dtype == "float64":
        mma_us, waiting, waiting_together = _DOUBLE_MMA_US, 1, _DOUBLE_WAITING_TOGETHER
        least = _DOUBLE_STEP_US if outputs else _DOUBLE_STATES_STEP_US
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
    if isinstance(row, LowOccupancy):
        instructions = 160 + row.dim / 32 * (130 + 8 * row.warps)
        issued = together * row.warps * instructions / 4 * _LOW_OCCUPANCY_ISSUE_CLOCKS
        waited = _LOW_OCCUPANCY_CLOCKS + _LOW_OCCUPANCY_DIM_CLOCKS * row.dim / 32
        clocks = max(waited, issued) / row.tile_m
    else:
        double = row.dtype == "float64"
        least = _DOUBLE_RECURRENT_CLOCKS if double else _RECURRENT_CLOCKS
        clocks = max(least, together * row.warps * _RECURRENT_WARP_CLOCKS)
    waves, turns = -(-blocks // (sms * together)), -(-qk_dim // row.dim)
    return _LAUNCH_US + waves * turns * (_START_US + length * clocks / _CLOCKS_PER_US)
