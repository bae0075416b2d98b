"""What the kernels of attention backward in float32 share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_rows import (
    BWD_ROWS_FIELDS,
    BackwardRows,
)
from fa_cupy.gpu.kernels.backward import BackwardVariant, Launches, Traits, padded_rows
from fa_cupy.gpu.plan import Step

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPE = "float32"
_PAIRS = ("q_pairs", "dout_pairs", "k_pairs", "v_pairs")
#: The fields of ``struct BwdFp32Params`` of ``cuda_src/common/backward_rows_fp32.cuh``.
BWD_FP32_FIELDS: list[Any] = (
    BWD_ROWS_FIELDS
    + [(name, np.uint64) for name in (*_PAIRS, "key_rows")]
    + [(name, np.int32) for name in ("entries", "key_entry_rows")]
)
BWD_FP32_PARAMS = np.dtype(BWD_FP32_FIELDS, align=True)
#: kQueryFields and kKeyFields of it.
QUERY_FIELDS, KEY_FIELDS = 7, 4
_PAIR_BYTES = 4  # of a number
_ATOM_BYTES = 1024  # of a swizzle: tiles for wgmma begin at its multiples


@dataclass(frozen=True, kw_only=True)
class BackwardFp32(BackwardRows):
    """A row of a kernel of gradients in float32.

    Attributes
    ----------
    warp_rows : int
        Rows of the block that a warp owns.
    part : int
        Rows of the other side that it multiplies at a time.
    at_once : int
        Products of eight of them that are under way together.
    blocks_at_once : int
        Blocks that should fit on a multiprocessor.
    row_groups : int
        Warpgroups that share rows, each of which has some of the products and sums.
    """

    warp_rows: int = 16
    part: int = 32
    at_once: int = 4
    blocks_at_once: int = 1
    row_groups: int = 1

    @property
    def struct(self) -> np.dtype[Any]:
        """What the kernel is passed: a struct that begins as `BWD_FP32_PARAMS`."""
        return BWD_FP32_PARAMS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        own, other = QUERY_FIELDS, KEY_FIELDS
        if self.own_keys:
            own, other = other, own
        tiles = _PAIR_BYTES * self.dim * 2 * (self.own_rows + self.stages * self.other_rows)
        rows = 4 * (own * self.own_rows + other * self.stages * self.other_rows)
        return tiles + rows + 8 * self.warps + self.work_bytes

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_WARP_ROWS", self.warp_rows),
            ("FA_PART", self.part),
            ("FA_AT_ONCE", self.at_once),
            ("FA_BLOCKS", self.blocks_at_once),
            ("FA_ROW_GROUPS", self.row_groups),
            ("FA_BWD_FP32_BYTES", BWD_FP32_PARAMS.itemsize),
        )

    def for_lengths(self, lengths: bool) -> Self:
        """Return the build of this row for lengths, or for none.

        It may spill some registers. On Hopper only dims up to 32 get it.
        """
        build = super().for_lengths(lengths)
        return dataclasses.replace(build, hot_targets=()) if lengths else build

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch, which reads or writes rows in pairs and what is known of them."""
        keys = padded_rows(traits.problem.k_len)
        queries, of_keys = traits.entries * launches.rows, traits.entries // traits.group * keys
        launches.scratch["query_rows"] = 4 * (QUERY_FIELDS + 2) * queries  # the exact difference
        launches.scratch["key_rows"] = 4 * KEY_FIELDS * of_keys
        for name in _PAIRS:
            rows = of_keys if name in ("k_pairs", "v_pairs") else queries
            launches.scratch[name] = _PAIR_BYTES * self.dim * rows
        filled = np.zeros(1, self.struct)
        filled["entries"], filled["key_entry_rows"] = traits.entries, keys
        addresses = {name: name for name in (*_PAIRS, "key_rows")}
        return self.launch(traits, launches, filled, addresses, self.blocks(traits))


@dataclass(frozen=True, kw_only=True)
class BackwardFp32Sm90(BackwardFp32):
    """A row of a kernel of wgmma: a part is a tile, and the last four warps copy tiles."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    def for_lengths(self, lengths: bool) -> Self:
        """Return the build of this row for lengths, or for none: it spills no more than others."""
        return BackwardVariant.for_lengths(self, lengths)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: as for `BackwardFp32`, barriers, and what warpgroups exchange."""
        rest = -(-super().shared_bytes // 8) * 8 + 8 * (1 + 4 * self.stages)
        handed = 0
        if self.row_groups > 1:
            handed = 4 * self.own_rows * self.other_rows * self.stages * (1 if self.own_keys else 2)
            if not self.own_keys:  # high parts of its rows are in registers
                rest -= _PAIR_BYTES * self.dim * self.own_rows
        return -(-rest // _ATOM_BYTES) * _ATOM_BYTES + handed
