"""The host side of ``fwd_splitkv``: attention of few queries, each block to a part of the keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.splitkv.params import (
    FWD_SPLITKV_PARAMS,
    heads_of_tile,
    make_splitkv_params,
    partial_sizes,
)
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES, Variant
from fa_cupy.gpu.plan import MARK, Launcher, Plan, Step, Workspace, workspace_of


@dataclass(frozen=True, kw_only=True)
class FwdSplitkv(Variant):
    """A row of ``fwd_splitkv``.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    """

    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        key_warps = 16 * self.warps // self.tile_m
        tiles = 4 * self.dim * self.stages * self.tile_n
        outputs, stats = 4 * self.dim * self.tile_m * key_warps, 8 * self.tile_m * key_warps
        return max(tiles, outputs) + 2 * self.dim * self.tile_m + stats + 8

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_TILE_M", self.tile_m),
            ("FA_WARPS", self.warps),
            ("FA_BLOCKS", self.blocks),
            ("FA_SPLITKV_PARAMS_BYTES", FWD_SPLITKV_PARAMS.itemsize),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller dims first, then smaller tiles of queries, then more stages."""
        return (self.dim, self.tile_m, -self.stages)


def _rows() -> Iterator[FwdSplitkv]:
    # dim, tile_m, tile_n, warps, stages, blocks, why. Speeds are those of an H200, 32 query heads,
    # 8 of keys, bfloat16; validation/NOTES.md has those of other tiles.
    rows = (
        (64, 16, 128, 4, 3, 2, "5% faster than two stages, three blocks (1 x 32,768 keys)"),
        (64, 64, 64, 4, 3, 3, "as for 128"),
        (128, 16, 64, 4, 3, 2, "2% faster than two stages, three blocks (1 x 8,192 keys)"),
        (128, 16, 64, 4, 2, 3, "the same for targets with less shared memory"),
        (128, 64, 32, 4, 3, 3, "7% faster than 64 keys, two stages, two blocks (16 queries)"),
        (256, 16, 32, 2, 2, 3, "17% faster than 64 keys and four warps (16 x 8,192 keys)"),
        (256, 64, 32, 4, 2, 2, "as for 128"),
    )
    for (dim, tile_m, tile_n, warps, stages, blocks, why), dtype in product(rows, DTYPE_NAMES):
        yield FwdSplitkv(
            source="attention/fwd_splitkv", dtype=dtype, dim=dim, tile_m=tile_m, tile_n=tile_n,
            warps=warps, stages=stages, blocks=blocks, why=why,
        )  # fmt: skip


VARIANTS: tuple[FwdSplitkv, ...] = tuple(_rows())


def select(traits: Traits, target: str | None) -> FwdSplitkv:
    """Pick the row for a problem: the smallest tile of queries that holds all rows of an entry."""
    problem = traits.problem
    dim, rows = max(problem.head_dim, problem.v_dim), problem.q_len * heads_of_tile(traits)
    fits = [
        row
        for row in VARIANTS
        if row.dtype == problem.dtype.name and row.dim >= dim and target in row.targets
    ]
    least = min(rows, max(row.tile_m for row in fits))
    return min((row for row in fits if row.tile_m >= least), key=lambda row: row.rank)


def step(
    traits: Traits, variant: FwdSplitkv, multiprocessors: int
) -> tuple[Step, Workspace | None]:
    """Return the launch of a problem, and the memory in which blocks leave what others join.

    Parameters
    ----------
    traits : Traits
        Of a problem that the kernel supports (`splitkv.params.supports`).
    variant : FwdSplitkv
    multiprocessors : int
        Of the device.
    """
    slots = variant.blocks * multiprocessors
    params = make_splitkv_params(traits, variant.tile_m, variant.tile_n, slots)
    p = params[0]
    rows, splits = int(p["rows"]), int(p["splits"])
    entries = rows // (traits.problem.q_len * int(p["heads"]))
    tiles = entries * int(p["common"]["q_tiles"])
    addresses = {f"common.{field}": name for field, name in traits.fields.items()}
    addresses |= {name: name for name in traits.key_views}
    space = None
    if splits > 1:
        sizes = partial_sizes(variant.dim, rows * splits) | {"arrivals": 8 * tiles}
        space = workspace_of(sizes)
        addresses |= {**dict(zip(sizes, sizes, strict=True)), "mark": MARK}
    kept = ("q", "k", "v") if p["aligned"] else ()
    return Step(variant, tiles * splits, params, addresses, aligned=kept), space


def make_plan(traits: Traits, launcher: Launcher, variant: FwdSplitkv | None = None) -> Plan:
    """Return the launch of a problem that the kernel supports.

    Calls give the addresses of `Traits.pointers`, then those of `Traits.key_views`.

    Parameters
    ----------
    traits : Traits
    launcher : Launcher
    variant : FwdSplitkv, optional
        A row whose build for the scores of the problem runs; by default what `select` picks.
    """
    row = variant or select(traits, launcher.target)
    if traits.score is not None:
        row = row.for_score(traits.score)
    found, space = step(traits, row, launcher.multiprocessors)
    return Plan([found], (*traits.pointers, *traits.key_views), launcher, space)
