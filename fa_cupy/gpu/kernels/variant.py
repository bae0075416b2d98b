"""What a row of the variant table says: one compiled variant of one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa_cupy.gpu.kernels.attention.fwd_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.attention.fwd_sm90_params import FWD_SM90_PARAMS

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
    # PTX, for devices of which NVRTC knows no target. The driver compiles it; what follows "+" is
    # for rows alone, and NVRTC does not see it.
    "compute_80": 99 * 1024,
    "compute_80+163K": 163 * 1024,
    "compute_80+227K": 227 * 1024,
}
_WORK_BYTES = 72  # TileWork and KeyTiles in cuda_src/common
_LISTED_BYTES = 56  # ListedRange and keys in fwd_sm80.cu
_WORK_STAGES = 4  # kWorkStages in fwd_sm90.cuh
_WORDS_BYTES = 2048  # of a partial block of a mask


class Call(NamedTuple):
    """What of a call decides between rows that serve its dtype and dims.

    Attributes
    ----------
    transform : bool
        Whether scale, softcap or bias change the scores before the softmax.
    mapped : bool
        Whether tensor maps can walk the arrays (`fwd_sm90_params.takes`).
    masked : bool
        Whether there is a mask.
    """

    transform: bool = False
    mapped: bool = True
    masked: bool = False


@dataclass(frozen=True, kw_only=True)
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
    warps, stages : int
        Warps of a block; K/V tiles in flight.
    why : str
        The reason for this tile.
    sparse : bool
        Whether the row is for calls with a mask.
    hot_targets : tuple of str
        Targets whose speed was measured: a row does not spill there.
    """

    source: str
    dtype: str
    dim: int
    tile_m: int
    tile_n: int
    warps: int
    stages: int
    why: str
    sparse: bool = False
    hot_targets: tuple[str, ...] = ("sm_90a",)

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        tile = f"{self.tile_m}x{self.tile_n}"
        plain = f"{self.entry}-{self.dtype}-d{self.dim}-{tile}-w{self.warps}-s{self.stages}"
        return plain + ("-sparse" if self.sparse else "")

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
        """Dynamic shared memory of a block."""
        raise NotImplementedError

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_BF16", int(self.dtype == "bfloat16")),
            ("FA_DIM", self.dim),
            ("FA_TILE_N", self.tile_n),
            ("FA_STAGES", self.stages),
            ("FA_SPARSE", int(self.sparse)),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", ATTENTION_PARAMS.itemsize),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Of the rows that serve a call, the one of the lowest rank gets it."""
        raise NotImplementedError

    def serves(self, call: Call) -> bool:
        """Whether the row can take a call of its dtype and dims."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class VariantSm80(Variant):
    """A row of ``fwd_sm80``, which takes any call with a mask, or any without.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    """

    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a Q tile and a ring of K and V tiles, and the block's work."""
        listed = _LISTED_BYTES + 16 * self.tile_m if self.sparse else 0  # with words of a block
        tiles = 2 * self.dim * (self.tile_m + 2 * self.stages * self.tile_n)
        return tiles + _WORK_BYTES + listed

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_TILE_M", self.tile_m),
            ("FA_WARPS", self.warps),
            ("FA_BLOCKS", self.blocks),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """After all rows of ``fwd_sm90``: smaller dims, then larger tiles first."""
        return (1, self.dim, -self.tile_m * self.tile_n)

    def serves(self, call: Call) -> bool:
        """Whatever the call is, but for its mask."""
        return call.masked == self.sparse


@dataclass(frozen=True, kw_only=True)
class VariantSm90(Variant):
    """A row of ``fwd_sm90``: one warpgroup feeds the others, each of 64 query rows.

    Attributes
    ----------
    q_stages : int
        Stages of 64 rows of Q each, which are those of one warpgroup.
    exclusive, q_registers, transform : bool
        Whether a warpgroup has the tensor cores to itself until its products are done; whether Q is
        read from registers; whether scale, softcap and bias come before the softmax.
    """

    q_stages: int
    exclusive: bool
    q_registers: bool
    transform: bool

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        return super().name + ("-transform" if self.transform else "")

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
        scratch = 4 * self.groups * 2048 if self.transform else 8
        barriers = 3 * self.q_stages + 4 * self.stages + 3 * _WORK_STAGES
        work = 32 * (self.groups + (2 if self.sparse else 1))  # Work in fwd_sm90.cuh
        listed = self.stages * (_WORDS_BYTES + 4) if self.sparse else 0  # Storage<true> there
        parts = scratch + 8 * barriers, _WORK_STAGES * work, listed
        return tiles + sum(-(-part // 16) * 16 for part in parts)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_GROUPS", self.groups),
            ("FA_Q_STAGES", self.q_stages),
            ("FA_EXCLUSIVE_MMA", int(self.exclusive)),
            ("FA_Q_IN_REGISTERS", int(self.q_registers)),
            ("FA_SCORE_MOD", int(self.transform)),
            ("FA_SM90_PARAMS_BYTES", FWD_SM90_PARAMS.itemsize),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Before all rows of ``fwd_sm80``: smaller dims first."""
        return (0, self.dim)

    def serves(self, call: Call) -> bool:
        """Whether tensor maps can walk the arrays and the row has what the call asks for."""
        alike = call.transform == self.transform and call.masked == self.sparse
        return call.mapped and alike
