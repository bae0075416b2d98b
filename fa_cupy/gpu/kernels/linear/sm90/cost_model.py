"""What causal products cost on the kernels for SM90, and the ways there are to compute one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import MAX_LENGTH
from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.gpu.kernels.linear.sm90.chunk_fp32_pingpong_sm90 import ChunkFp32PingpongSm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.sm90_params import CHUNK, DIM_STEPS
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant, ProductVariant

# The model. What memory gives each of an H200's 132 multiprocessors when all ask for it, a launch,
# what a block does before its first chunk and after its last, and a launch of `state_prefix_sum`,
# as in `fa_cupy.gpu.kernels.linear.cost_model`; what one multiprocessor gets alone.
CLOCKS_PER_US = 1755
BYTES_PER_US = 30e3
ALONE_BYTES_PER_US = 64e3
LAUNCH_US = 3.0
START_US = 2.0
SCAN_US = 8.0
SCAN_SEGMENT_US = 0.1
# Clocks that a chunk takes in waits and for its output, whatever the dims; to round a key column of
# the state, once or twice; around the sums where they are not early. Measured on an H200, one block
# alone: 0.81 us a chunk for 64 columns at dim 64, 1.23 for 64 and 1.58 for 128 columns at dim 128.
CHAIN_CLOCKS = 900
ROUND_CLOCKS = 2.0
LATE_CLOCKS = 150
STATES_CHAIN_CLOCKS = 250
# Of the tensor cores, for each clock and multiprocessor.
FLOPS_PER_CLOCK = 3600
# float32: microseconds of a chunk of 64 rows, by dim and value columns of a block, measured with
# 128 blocks on an H200. Where warpgroups take turns 3.3 (one block alone takes 3.0), else 7.5 for
# 128 columns at dim 128 (alone 8.0); half as many there, and 128 columns at dim 64, are expected
# and not measured. And of sums alone, by dim.
TURNS_US = 3.3
SINGLE_US = {(64, 128): 5.5, (128, 64): 7.5, (128, 128): 7.5}
SINGLE_STATES_US = {64: 1.1, 128: 2.8}


def ways(
    rows: Sequence[tuple[ProductSm90Variant, ProductVariant | None]], entries: int, length: int,
    qk_dim: int, v_dim: int, sms: int, jobs: int = 1, segments: int = 1,
) -> Iterator[Choice]:  # fmt: skip
    """Yield the ways that come into question.

    Parameters
    ----------
    rows : sequence of tuple
        Those for the dtype, as from `fa_cupy.gpu.kernels.linear.table.serving`.
    entries, length, qk_dim, v_dim, sms
        As for `fa_cupy.gpu.kernels.linear.cost_model.choose`.
    jobs : int, optional
        Such products in one launch.
    segments : int, optional
        Splits into so many come into question too.
    """
    if not 1 <= length <= MAX_LENGTH or min(qk_dim, v_dim) < 1:
        return
    dim = min((row.dim for row, _ in rows if row.dim >= qk_dim), default=0)
    for row, states in rows:
        step = DIM_STEPS[row.dtype]
        if row.dim == dim and not qk_dim % step and not v_dim % step:
            yield from _splits(row, states, entries * jobs, length, qk_dim, v_dim, sms, segments)


def _splits(
    row: ProductSm90Variant, states: ProductVariant | None, entries: int, length: int, qk_dim: int,
    v_dim: int, sms: int, also: int,
) -> Iterator[Choice]:  # fmt: skip
    chunks = -(-length // row.tile_m)
    blocks = entries * -(-v_dim // row.tile_n)
    # Splits that fill the device so many times, as far as each segment has a few chunks.
    wanted = {also, *(times * sms * resident(row) // max(1, blocks) for times in (1, 2, 3))}
    for split in {1} | {max(1, min(split, chunks // 4)) for split in wanted}:
        segment_chunks = -(-chunks // split)
        segments = -(-chunks // segment_chunks)
        us = _us(row, blocks * segments, segment_chunks, qk_dim, v_dim, sms)
        if segments > 1:
            if states is None:
                continue
            parts = entries * -(-v_dim // states.tile_n) * (segments - 1)
            us += _us(states, parts, segment_chunks, qk_dim, v_dim, sms)
            scanned = 8 * entries * segments * qk_dim * v_dim
            us += SCAN_US + SCAN_SEGMENT_US * segments + scanned / (BYTES_PER_US * sms)
        yield Choice(
            row, states if segments > 1 else None, segments, segment_chunks * row.tile_m, us
        )
    if isinstance(row, ChunkSm90):
        yield from _own_prefix(row, entries, length, qk_dim, v_dim, sms)


def _own_prefix(
    row: ChunkSm90, entries: int, length: int, qk_dim: int, v_dim: int, sms: int
) -> Iterator[Choice]:
    """Yield the way in one launch, whose blocks sum what lies before their segments themselves.

    Of n chunks in s segments, the last block sums n (s - 1) / s and makes outputs of n / s. A chunk
    takes less to sum than to make outputs of, so there are as many segments as multiprocessors.
    Blocks sum half of that on the average: twice of what memory gives, but not of what L2 does.
    """
    chunks = -(-length // row.tile_m)
    blocks = entries * -(-v_dim // row.tile_n)
    segment_chunks = -(-chunks // max(1, sms // max(1, blocks)))
    segments = -(-chunks // segment_chunks)
    if segments == 1:
        return
    loaded = 2 * row.tile_m * (qk_dim + min(v_dim, row.tile_n)) / ALONE_BYTES_PER_US
    us = pass_us(row, blocks * segments, segment_chunks, qk_dim, v_dim, sms)
    us += (segments - 1) * segment_chunks * max(_sums_clocks(row) / CLOCKS_PER_US, loaded)
    yield Choice(row, None, segments, segment_chunks * row.tile_m, us)


def _us(row: ProductVariant, blocks: int, chunks: int, qk_dim: int, v_dim: int, sms: int) -> float:
    """Time of a launch whose blocks walk so many chunks."""
    if isinstance(row, ProductSm90Variant) and row.dtype != "float32":
        return pass_us(row, blocks, chunks, qk_dim, v_dim, sms)
    outputs, columns = not row.sums_states, min(v_dim, row.tile_n)
    traffic = 4 * CHUNK * (2 if outputs else 1) * (qk_dim + columns)
    share = max(1 / ALONE_BYTES_PER_US, min(1.0, blocks / sms) / BYTES_PER_US)
    if isinstance(row, ChunkFp32PingpongSm90):
        own = TURNS_US
    else:
        own = SINGLE_US[row.dim, row.tile_n] if outputs else SINGLE_STATES_US[row.dim]
    step = max(own, traffic * share)
    return LAUNCH_US + -(-blocks // sms) * (START_US + chunks * step)


def resident(row: ProductSm90Variant) -> int:
    """Blocks that fit on a multiprocessor."""
    return min(row.blocks, (SHARED_LIMIT["sm_90a"] + 1024) // (row.shared_bytes + 1024))


def _sums_clocks(row: ProductSm90Variant) -> float:
    """Clocks that a chunk's sums of 16-bit numbers take, of 64 value columns and whatever else."""
    return STATES_CHAIN_CLOCKS + 2 * row.tile_m * 64 * row.dim / FLOPS_PER_CLOCK


def pass_us(
    row: ProductSm90Variant, blocks: int, chunks: int, qk_dim: int, v_dim: int, sms: int
) -> float:
    """Time of a launch whose blocks walk so many chunks.

    A chunk takes what it waits for, what all blocks of a multiprocessor multiply, or what they
    load and store, whichever is most.
    """
    together = max(1, min(resident(row), -(-blocks // sms)))
    columns = min(v_dim, row.tile_n)
    outputs = isinstance(row, ChunkSm90)
    traffic = 2 * row.tile_m * (2 if outputs else 1) * (qk_dim + columns)
    parts = 2 if row.dtype == "bfloat16" else 1
    product = 2 * row.tile_m * 64 / FLOPS_PER_CLOCK  # of 64 columns, for each one summed over
    tensor, chain = row.groups * row.dim * product, _sums_clocks(row)
    if outputs:
        tensor += row.dim * product + row.groups * product * (row.tile_m + parts * row.dim)
        chain = CHAIN_CLOCKS + parts * row.dim * (product + ROUND_CLOCKS)
        if row.dim > 64 and row.groups > 1:
            chain += LATE_CLOCKS + row.dim * product
    clocks = max(chain, together * tensor)
    share = max(1 / ALONE_BYTES_PER_US, min(1.0, blocks / (sms * together)) / BYTES_PER_US)
    step = max(clocks / CLOCKS_PER_US, together * traffic * share)
    waves = -(-blocks // (sms * together))
    return LAUNCH_US + waves * (START_US + chunks * step)
