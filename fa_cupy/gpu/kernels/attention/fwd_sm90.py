"""The host side of ``fwd_sm90``: attention by wgmma, with tensor maps.

A tensor map walks an array without the help of the kernel, so that it takes fewer layouts than
``fwd_sm80``; `supports` says which.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import (
    MAX_BATCH_AXES,
    MAX_LENGTH,
    Traits,
    cached_entries,
    make_params,
    mask_addresses,
)
from fa_cupy.gpu.kernels.attention.splitkv.params import PARTIAL
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.tensor_maps import (
    DIM_STEP,
    MAP_AXES,
    MAP_BYTES,
    MAX_STEP,
    Geometry,
    maps_walk,
    padded,
)
from fa_cupy.gpu.kernels.variant import DROPOUT_ENTRY_BYTES, DTYPE_NAMES, PARAMS, Variant
from fa_cupy.gpu.plan import MARK, Step
from fa_cupy.keys.layout import Pages

#: The arrays that have a tensor map, in the order of the struct.
MAPPED = ("q", "k", "v", "out")
#: Bytes of the counter that blocks take tiles from, and of the mark that it was set for.
COUNTER_BYTES = 16
# To begin and to end a split takes about as long as so many tiles of keys. Fewer tiles than the
# second number are not worth a second launch.
_SPLIT_TILES, _LEAST_SPLIT_TILES = 4, 16
_MOST_SPLITS = 128
_MAX_PACKED = 64  # heads in a box of 64 rows
_ANY_STEP = 16  # bytes along an axis of one entry
_BOX = 64  # rows and columns of a box of Q or of the output: 128 bytes are a swizzled row
# Batch entries of an L2 group, least and most. Causal, 512 to 4,096 tokens, head_dim 64 to 256:
# fewer than 16 have too few tiles of each length (hd256 at 2,048 tokens: 629 TFLOP/s with 8, 662
# with 16), more than 32 first load much and then compute much (hd128 at 512: 388 with 32, 376 with
# 64).
_L2_GROUP_ENTRIES = (16, 32)
# Queries of an L2 group at most. Causal, 16 heads of 128 dims, TFLOP/s by entries of a group (16,
# 8, 4, 2, 1): 16,384 tokens 772, 786, 790, 758, 735; 65,536 688, 693, 705, 720, 724; 262,144 531,
# 648, 694, 695, 697. Blocks at work on a long entry spread over its keys in time; the fewer entries
# share the blocks, the sooner the next one reads what one has read, while it is in the cache.
_L2_GROUP_QUERIES = 1 << 20
# Of packed sequences an entry has all of them. Causal, 16 sequences of 1,024 tokens, 16 heads of
# head_dim 128, us on an H100: 143 with 1 or 2, 160 with 4, 229 with 8; eight of 512 to 8,192 tokens
# at head_dim 64 810 with 1, 753 with 3.
_LEAST_PACKED = 2

#: ``struct TileScheduler`` of ``cuda_src/common/tile_scheduler.cuh``.
TILE_SCHEDULER = np.dtype(
    [("counter", np.uint64), ("mark", np.uint64)]
    + [(name, np.int32) for name in ("tiles", "entries", "entries_per_l2_group")],
    align=True,
)
#: The same fields in the same order as ``struct FwdSm90Params`` in
#: ``cuda_src/attention/fwd_sm90.cuh``, which checks the size when it is compiled.
FWD_SM90_PARAMS, _ = SM90_PARAMS = tuple(
    padded(
        [(f"{name}_map", np.uint64, (MAP_BYTES // 8,)) for name in MAPPED]
        + [("common", common), ("scheduler", TILE_SCHEDULER), ("size", np.int32, (MAP_AXES,))]
        + [(f"{name}_step", np.int32, (MAP_AXES,)) for name in ("q", "k", "v")]
        + [("row_shift", np.int32), ("splits", np.int32), ("rows", np.int64)]
        + [(name, np.uint64) for name in (*PARTIAL, "k_lengths")]
        + [("k_lengths_batch", np.int64, (MAX_BATCH_AXES,))]
        + [(name, np.int32) for name in ("k_lengths_bytes", "band_from_end")]
        + [(name, np.int32) for name in ("page_size", "page_shift", "pages", "page_table_bytes")]
        + [("page_table", np.uint64), ("page_table_batch", np.int64, (MAX_BATCH_AXES,))]
        + [(name, np.int64) for name in ("page_table_col", "k_page", "v_page")]
        + [(name, np.int32) for name in ("page_axis", "page_box")],
        alignment=64,
    )
    for common in PARAMS
)


_WORK_STAGES = 4  # kWorkStages in fwd_sm90.cuh
_WORDS_BYTES = 2048  # of a partial block of a mask


@dataclass(frozen=True, kw_only=True)
class FwdSm90(Variant):
    """A row of ``fwd_sm90``: one warpgroup feeds the others, each of 64 query rows.

    Attributes
    ----------
    q_stages : int
        Stages of 64 rows of Q each, which are those of one warpgroup.
    exclusive, q_registers : bool
        Whether a warpgroup has the tensor cores to itself until its products are done; whether Q is
        read from registers.
    split : bool
        Whether this build is for a part of the keys each (`splits_of_keys`).
    pages : bool
        Whether this build is for keys in pages; then `lengths` holds, too.
    """

    q_stages: int
    exclusive: bool
    q_registers: bool
    split: bool = False
    pages: bool = False

    def for_keys(self, lengths: bool, split: bool, pages: bool = False) -> FwdSm90:
        """Return the build of this row for lengths of entries, pages, or parts of the keys each."""
        # Up to 40 bytes are spilled: 512 queries to 131,072 keys still have 0.86 of the speed of as
        # many queries as keys at dim 64, and 0.93 at 128.
        spills = self.dim in (64, 128)
        hot = () if spills else self.hot_targets
        return dataclasses.replace(
            self, lengths=lengths or pages, split=split, pages=pages, hot_targets=hot
        )

    @property
    def of_keys(self) -> str:
        """What the name says of where keys are, and of their parts."""
        return ("-pages" if self.pages else super().of_keys) + "-split" * self.split

    @property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    @property
    def groups(self) -> int:
        """Warpgroups that compute."""
        return self.tile_m // 64

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        row = 128 * -(-self.dim // 64)  # bytes, in blocks of 64 columns
        tiles = row * (self.q_stages * 64 + 2 * self.stages * self.tile_n)
        tiles += self.bias_bytes * self.tile_m * self.tile_n
        has_operands = self.score is not None and self.score.has_operands
        offsets = 8 * (_WORK_STAGES if has_operands else 1)
        barriers = 3 * self.q_stages + 4 * self.stages + 3 * _WORK_STAGES
        work = 32 * (self.groups + (2 if self.sparse else 1))  # sizeof(WorkTile) in fwd_sm90.cuh
        work += (16 if self.lengths else 0) + DROPOUT_ENTRY_BYTES * self.dropout
        listed = self.stages * (_WORDS_BYTES + 4) if self.sparse else 0  # Storage<true> there
        parts = offsets + 8 * barriers, _WORK_STAGES * work, listed
        return tiles + sum(-(-part // 16) * 16 for part in parts)

    @property
    def bias_bytes(self) -> int:
        """Bytes of an element of a bias that comes by way of shared memory; 0 of any other."""
        if self.sparse or self.score is None:
            return 0
        staged_bytes = self.score.staged_bytes
        # At dim 192 there is no room for a tile of float32.
        return 0 if staged_bytes == 4 and self.dim == 192 else staged_bytes

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            *((("FA_STAGE_BIAS", 1),) if self.bias_bytes else ()),
            ("FA_GROUPS", self.groups),
            ("FA_Q_STAGES", self.q_stages),
            ("FA_EXCLUSIVE_MMA", int(self.exclusive)),
            ("FA_Q_IN_REGISTERS", int(self.q_registers)),
            ("FA_SM90_PARAMS_BYTES", SM90_PARAMS[self.dropout].itemsize),
            *((("FA_SPLIT", 1),) if self.split else ()),
            *((("FA_PAGES", 1),) if self.pages else ()),
        )

    def for_score(self, score: ScoreMod | None) -> FwdSm90:
        """Return the build of this row for calls with such scores."""
        if score is None:
            return self
        # Scores take the registers of Q.
        change: dict[str, Any] = {"q_registers": False}
        of_keys = score.bias_axes == "key" and score.program is None
        # What scores have for each column takes more than the 160 registers that a thread of three
        # groups has: they have fewer keys, or there are two groups. TFLOP/s of ALiBi in float32 at
        # dim 64: 410 with three groups of 96 keys, 337 with two of 128; of a full bias 300, 327.
        if self.groups == 3 and of_keys and not score.softcap:
            change |= {"tile_n": 96}
        elif self.groups == 3 and score.differs_by_key:
            change |= {"tile_m": 128, "warps": 12, "q_stages": 4}
        # 624 TFLOP/s at dim 128, 582 without; of a softcap 521 and 522, of a full bias 422 and 470.
        if self.q_registers and of_keys and not score.softcap and not self.sparse:
            change["exclusive"] = True
        row = dataclasses.replace(self, score=score, **change)
        if row.bias_bytes and (self.dim > 128 or (row.bias_bytes == 4 and self.dim > 64)):
            row = dataclasses.replace(row, q_stages=2)  # a tile of the bias has the place of others
        return row

    @property
    def rank(self) -> tuple[int, ...]:
        """Before all rows of ``fwd_sm80``: smaller dims first."""
        return (0, self.dim)


def _rows() -> Iterator[FwdSm90]:
    # dim, groups, tile_n, stages, q_stages, exclusive, q_registers, why. Speeds are those of an
    # H200, bf16, 4096 tokens without a mask; validation/NOTES.md has those of other tiles.
    rows = (
        (64, 3, 128, 4, 6, 1, 0, "three groups, one at the tensor cores: 19% faster than two"),
        (96, 2, 128, 2, 4, 0, 1, "as for 128"),
        (128, 2, 128, 2, 4, 0, 1, "Q in registers is 1% faster, 128 keys are 3% faster than 112"),
        (192, 2, 96, 2, 3, 0, 0, "96 keys: scores, weights and output fill the registers"),
        (256, 2, 64, 2, 3, 0, 0, "64 keys a tile are 3% faster than 80"),
    )
    # With a mask: a row of its blocks is a tile of queries, a block one tile of keys or two.
    masked = (
        (64, 2, 128, 4, 4, 0, 1, "as for 128"),
        (96, 2, 128, 2, 4, 0, 1, "as for 128"),
        (128, 2, 128, 2, 4, 0, 1, "as without a mask"),
        (192, 2, 64, 2, 4, 0, 0, "half a block of the mask; the next rows of Q come early"),
        (256, 2, 64, 2, 2, 0, 0, "half a block of the mask; its words leave no room for more Q"),
    )
    both = [(False, row) for row in rows] + [(True, row) for row in masked]
    for sparse, (dim, groups, tile_n, stages, q_stages, exclusive, q_registers, why) in both:
        for dtype in DTYPE_NAMES:
            yield FwdSm90(
                source="attention/fwd_sm90", dtype=dtype, dim=dim, tile_m=64 * groups,
                tile_n=tile_n, warps=4 * (groups + 1), stages=stages,
                q_stages=q_stages,
                exclusive=bool(exclusive), q_registers=bool(q_registers),
                sparse=sparse, why=why,
            )  # fmt: skip


VARIANTS: tuple[FwdSm90, ...] = tuple(_rows())


def supports(traits: Traits) -> bool:
    """Whether the kernel can solve a problem, if all addresses are multiples of 16."""
    problem = traits.problem
    sizes = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
    if min(sizes) < 1 or any(dim % DIM_STEP for dim in sizes[2:]):
        return False
    axes = traits.mapped_sizes
    if len(axes) > MAP_AXES or math.prod(axes) > MAX_LENGTH:
        return False
    # A bias has no tensor map: it is read along the batch axes of AttentionParams.
    if len(traits.sizes) > MAX_BATCH_AXES:
        return False
    return maps_walk(
        {name: traits.views[name] for name in MAPPED}, traits.mapped_strides,
        problem.dtype.itemsize,
    )  # fmt: skip


def packed_heads(traits: Traits, tile_m: int) -> int:
    """Return how many heads share tiles of queries, row by row; 1 where none do.

    Heads that read the same keys and values are rows of one matrix to them. They are packed where
    that makes fewer tiles of `tile_m` rows: when each head alone would leave tiles unfilled. Under
    a mask they are not, for its rows of blocks are tiles, and neither in packed sequences.
    """
    problem, strides = traits.problem, traits.mapped_strides
    if problem.mask is not None or problem.offsets is not None:
        return 1
    axes = traits.mapped_sizes
    shared = ("k", "v", *traits.key_views)
    if not axes or any(strides[name][-1] for name in shared) or not strides["q"][-1]:
        return 1
    heads, rows = axes[-1], problem.q_len * axes[-1]
    numbered = traits.score or problem.dropout is not None  # heads have different numbers
    if numbered or heads > _MAX_PACKED or heads & (heads - 1):
        return 1
    fewer = -(-rows // tile_m) < heads * -(-problem.q_len // tile_m)
    return heads if fewer and rows <= MAX_LENGTH else 1


def splits_of_keys(traits: Traits, variant: FwdSm90, multiprocessors: int) -> int:
    """Return into how many parts the keys of each tile of queries are split; 1 is not at all.

    They are where the tiles leave multiprocessors idle, by a build for products times a positive
    scale without a mask. Then `fwd_join_splits` follows.
    """
    problem, tile_m = traits.problem, variant.tile_m
    if variant.sparse or variant.score is not None or variant.packed or variant.dropout:
        return 1
    key_tiles, most_tiles = -(-problem.k_len // variant.tile_n), multiprocessors // 2
    entries = math.prod(problem.batch)
    if key_tiles < _LEAST_SPLIT_TILES or entries * problem.q_len > most_tiles * tile_m:
        return 1
    heads = packed_heads(traits, tile_m)
    tiles = entries // heads * -(-problem.q_len * heads // tile_m)
    if tiles > most_tiles:
        return 1

    def cost(splits: int) -> int:
        rounds = -(-tiles * splits // multiprocessors)
        return rounds * (-(-key_tiles // splits) + (_SPLIT_TILES if splits > 1 else 0))

    most = min(_MOST_SPLITS, key_tiles // _SPLIT_TILES)
    return min(range(1, most + 1), key=cost)


def boxes_of_pages(traits: Traits, variant: FwdSm90) -> tuple[int, int] | None:
    """Return how tensor maps walk keys and values in pages, None where they do not.

    Returns
    -------
    axis : int
        The batch axis of the maps along which pages lie: one that keys and values broadcast along.
    keys : int
        Of a box, all in one page. A lane of a warp asks for each box of a tile.
    """
    pages = traits.problem.pages
    if pages is None or not pages.count:
        return None
    keys = math.gcd(pages.size, variant.tile_n)  # 16 or more, as pages are multiples of that
    between = pages.k_stride, pages.v_stride
    walked = pages.count == 1 or all(0 < n < MAX_STEP and not n % 16 for n in between)
    strides = traits.mapped_strides
    missing = MAP_AXES - len(strides["k"])  # these come first, and nothing walks along them
    axes = [i for i, n in enumerate(zip(strides["k"], strides["v"], strict=True)) if not any(n)]
    if missing:
        axes = [0]
    return (axes[0], keys) if walked and axes else None


def steps(traits: Traits, variant: FwdSm90, multiprocessors: int, splits: int = 1) -> list[Step]:
    """Return the launches of a problem: one, unless it has more tiles than one can count.

    Parameters
    ----------
    traits : Traits
        Of a problem that the kernel `supports`.
    variant : FwdSm90
    multiprocessors : int
        Of the device. Blocks that are fewer than the tiles share them out, and need a counter: the
        part ``counter`` of the workspace.
    splits : int, optional
        From `splits_of_keys`. If there are several, the launch writes ``partial_out`` and
        ``partial_stats`` of the workspace in place of the output.
    """
    problem, heads = traits.problem, packed_heads(traits, variant.tile_m)
    size, strides = list(traits.mapped_sizes), dict(traits.mapped_strides)
    head_strides = {name: strides[name][-1] if heads > 1 else 0 for name in MAPPED}
    if heads > 1:  # their axis is none of the batch any more
        size[-1] = 1
        strides = {name: [*strides[name][:-1], 0] for name in MAPPED}
    missing = MAP_AXES - len(size)
    size = [1] * missing + size
    strides = {name: [0] * missing + strides[name] for name in MAPPED}
    tiles = splits * -(-problem.q_len * heads // variant.tile_m)

    params = np.zeros(1, SM90_PARAMS[variant.dropout])
    p = params[0]
    p["common"] = make_params(traits, variant.tile_m)[0][0]
    p["common"]["q_tiles"], p["common"]["aligned"] = tiles // splits, 1
    p["size"] = size
    for name in ("q", "k", "v"):
        p[f"{name}_step"] = [step != 0 for step in strides[name]]
    p["row_shift"] = heads.bit_length() - 1
    for field, value in traits.key_fields.items():
        p[field] = value
    p["band_from_end"] = problem.band_from_end
    p["splits"], p["rows"] = splits, math.prod(problem.batch) * problem.q_len
    maps = {
        f"{name}_map": (name, _geometry(traits, variant, name, heads, size, strides, head_strides))
        for name in MAPPED
    }
    boxes = None if problem.pages is None else boxes_of_pages(traits, variant)
    if problem.pages is not None and boxes is not None:
        p["page_axis"], p["page_box"] = boxes
        between = problem.pages.k_stride, problem.pages.v_stride
        for name, step in zip("kv", between, strict=True):
            geometry = _of_pages(maps[f"{name}_map"][1], *boxes, problem.pages, step)
            maps[f"{name}_map"] = name, geometry
    entries = math.prod(size)
    most = max(1, attention_params.MAX_GRID // tiles)
    group = _entries_per_l2_group(problem, size, strides)
    return [
        _step(traits, variant, params, maps, first, min(most, entries - first), tiles,
              min(multiprocessors, min(most, entries - first) * tiles), group, entries <= most)
        for first in range(0, entries, most)
    ]  # fmt: skip


def _step(
    traits: Traits, variant: FwdSm90, params: np.ndarray[Any, Any], maps: dict[str, Any],
    first: int, entries: int, tiles: int, grid: int, group: int, whole: bool,
) -> Step:  # fmt: skip
    """Return the launch of some batch entries."""
    own = params.copy()
    own["common"]["first_batch"] = first
    scheduler = own["scheduler"]
    scheduler["tiles"], scheduler["entries"] = entries * tiles, entries
    scheduler["entries_per_l2_group"] = min(group, entries)
    addresses = {f"common.{field}": name for field, name in traits.fields.items()}
    if traits.problem.mask is not None:
        addresses |= mask_addresses("common.", whole)
    addresses |= {name: name for name in traits.key_views}
    if variant.split:
        addresses |= {name: name for name in PARTIAL}
    if grid < entries * tiles:
        addresses |= {"scheduler.counter": "counter", "scheduler.mark": MARK}
    return Step(variant, grid, own, addresses, maps, persistent=True)


def _geometry(
    traits: Traits, variant: FwdSm90, name: str, heads: int, size: list[int],
    strides: dict[str, list[int]], head_strides: dict[str, int],
) -> Geometry:  # fmt: skip
    """Return the shape, strides and box of an array's tensor map."""
    view, own = traits.views[name], strides[name]
    rows, cols = view.shape[-2:]
    shape = [n if step else 1 for n, step in zip(size, own, strict=True)]
    walked = [*own, view.strides[-2]]
    box = [1, 1, 1, variant.tile_n if name in "kv" else _BOX]
    if heads > 1 and name not in "kv":
        shape = [*shape[:-1], rows, heads]
        walked = [*own[:2], view.strides[-2], head_strides[name]]
        box = [1, 1, _BOX // heads, heads]
    else:
        shape.append(rows)
    # Along an axis of one entry the stride is any number; the driver wants one that it knows.
    walked = [step if n > 1 else _ANY_STEP for n, step in zip(shape, walked, strict=True)]
    item = traits.problem.dtype.itemsize
    return Geometry((*shape, cols), (*walked, item), (*box, _BOX))


def _of_pages(geometry: Geometry, axis: int, keys: int, pages: Pages, step: int) -> Geometry:
    """Return a map's geometry with pages along a batch axis and boxes of so many keys."""
    shape, strides, box = map(list, geometry)
    shape[axis], shape[-2] = pages.count, pages.size
    strides[axis] = step if pages.count > 1 else _ANY_STEP
    box[-2] = keys
    return Geometry(tuple(shape), tuple(strides), tuple(box))


def _entries_per_l2_group(problem: Problem, size: list[int], steps: dict[str, list[int]]) -> int:
    """Return how many batch entries form an L2 group, whose tiles of queries are interleaved.

    Without a band all tiles take as long: entry by entry, so that one entry's keys and values are
    in the L2 cache when its tiles read them. Under a band the last tiles may take longest and
    should not start last: those of some entries come first together, about as many as have their
    keys and values in the cache at once. Long entries form smaller groups. Groups are of about
    equal size: a small one at the end would start long tiles late.

    Parameters
    ----------
    problem : Problem
    size : list of int
        Batch axes, in the order in which entries are numbered.
    steps : dict of list of int
        Bytes along each of them, for k and v at least; 0 where an array broadcasts.
    """
    least, most = _L2_GROUP_ENTRIES
    fit = cached_entries(problem, size, steps)
    if problem.offsets is not None:
        least, fit = _LEAST_PACKED, fit // 2
    elif problem.lower is None and problem.upper is None:
        return 1
    else:
        most = min(most, max(1, _L2_GROUP_QUERIES // max(1, problem.q_len)))
    wanted = min(most, max(least, fit))
    entries = math.prod(size)
    return -(-entries // max(1, round(entries / wanted)))
