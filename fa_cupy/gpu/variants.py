"""The kernels there are: one row a compiled variant, with the reason for its tile beside it.

Pure data. Tests, validation and docs walk over `VARIANTS`; a new tile is a new row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa_cupy.gpu.params import ATTENTION_PARAMS

#: Dynamic shared memory that one block can have, in bytes (CUDA C++ Programming Guide, table
#: "Technical Specifications per Compute Capability", less the 1 KB that the system keeps).
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_110": 227 * 1024,
    "sm_120": 99 * 1024,
    "sm_121": 99 * 1024,
}
_WORK_BYTES = 80  # TileWork and KeyTiles in cuda_src/common
DTYPE_NAMES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Variant:
    """One way to compile one kernel.

    Attributes
    ----------
    source : str
        Path below ``cuda_src`` without suffix; the entry is named after it.
    dtype : str
        Element type of q, k, v and out.
    dim : int
        The padded head_dim and v_dim.
    tile_m, tile_n : int
        Query rows of a block, keys of a tile.
    warps, stages, blocks : int
        Warps of a block; K/V tiles in flight; blocks that should fit on a multiprocessor.
    why : str
        The reason for this tile.
    hot_targets : tuple of str
        Targets whose speed was measured: a row does not spill there.
    debug_stage : int
        0 for the kernel, 1 to 4 for one that stops after a stage and dumps it.
    """

    source: str
    dtype: str
    dim: int
    tile_m: int
    tile_n: int
    warps: int
    stages: int
    blocks: int
    why: str
    debug_stage: int = 0
    hot_targets: tuple[str, ...] = ("sm_90a",)

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        tile = f"{self.tile_m}x{self.tile_n}"
        name = f"{self.entry}-{self.dtype}-d{self.dim}-{tile}-w{self.warps}-s{self.stages}"
        return name + (f"-debug{self.debug_stage}" if self.debug_stage else "")

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets the row may serve, all of whose shared memory it fits."""
        return tuple(t for t, limit in SHARED_LIMIT.items() if self.shared_bytes <= limit)

    @property
    def entry(self) -> str:
        """The kernel's symbol."""
        return self.source.replace("/", "_")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a Q tile and a ring of K and V tiles, and the block's work."""
        return 2 * self.dim * (self.tile_m + 2 * self.stages * self.tile_n) + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_BF16", int(self.dtype == "bfloat16")),
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_WARPS", self.warps),
            ("FA_STAGES", self.stages),
            ("FA_BLOCKS", self.blocks),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", ATTENTION_PARAMS.itemsize),
            ("FA_DEBUG_STAGE", self.debug_stage),
        )


def _fwd_sm80() -> Iterator[Variant]:
    # dim, tile_m, tile_n, warps, stages, why. Speeds: H200, 4096 tokens, beside the other tiles
    # of validation/NOTES.md. Every row fits the 99 KB of the smallest targets.
    rows = (
        (32, 128, 128, 4, 2, "32 rows a warp: every K and V fragment serves two products"),
        (64, 128, 128, 4, 1, "as for 32; 2% faster with one stage than with two"),
        (96, 128, 64, 4, 2, "as for 32; 96 keys a tile spill"),
        (128, 128, 64, 4, 2, "as for 32; 5% faster with two stages than with one"),
        (192, 64, 96, 4, 1, "16 rows a warp, or the output would not fit in registers"),
        (256, 64, 64, 4, 1, "as for 192; two blocks an SM beat one of 8 warps by 15%"),
    )
    for dim, tile_m, tile_n, warps, stages, why in rows:
        for dtype in DTYPE_NAMES:
            row = Variant("attention/fwd_sm80", dtype, dim, tile_m, tile_n, warps, stages, 2, why)
            yield row


VARIANTS: tuple[Variant, ...] = tuple(_fwd_sm80())


def target_of(major: int, minor: int) -> str | None:
    """Return the compile target for a compute capability, None where no kernel runs."""
    target = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    if target in SHARED_LIMIT:
        return target
    older = [t for t in SHARED_LIMIT if t.startswith(f"sm_{major}") and t[-1] != "a"]
    return older[0] if older else None


def select(dtype: str, head_dim: int, v_dim: int, target: str | None) -> Variant | None:
    """Pick the row that serves a forward call.

    Parameters
    ----------
    dtype : str
        Name of the dtype of q, k and v.
    head_dim, v_dim : int
    target : str or None
        What `target_of` says of the device.

    Returns
    -------
    Variant or None
        None where no kernel serves the call: float32 and float64, dims above 256, old devices.
        `fa_cupy.gpu.tiled` does then.
    """
    fits = [
        row
        for row in VARIANTS
        if row.dtype == dtype and row.dim >= max(head_dim, v_dim) and target in row.targets
    ]
    return min(fits, key=lambda row: (row.dim, -row.tile_m * row.tile_n), default=None)
