"""What a row of the variant table says: one compiled variant of one kernel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS, PARAMS_WITH_DROPOUT
from fa_cupy.gpu.kernels.score import ScoreMod

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPE_NAMES = ("float16", "bfloat16")

# Of builds without dropout and with it: tuples, for a first call takes a step for each function.
#: What all kernels of attention are given.
PARAMS = ATTENTION_PARAMS, PARAMS_WITH_DROPOUT
#: The constant of ``cuda_src/common/dropout.cuh``.
DROPOUT_DEFINES: tuple[tuple[tuple[str, int], ...], ...] = (), (("FA_DROPOUT", 1),)
#: Bytes of ``DropoutEntry`` there.
DROPOUT_ENTRY_BYTES = 16


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
    score : ScoreMod or None
        What a score is in this build; None for products times a positive scale.
    packed : bool
        Whether this build is for packed sequences.
    dropout : bool
        Whether this build drops weights.
    lengths : bool
        Whether this build is for batch entries with numbers of keys of their own.
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
    score: ScoreMod | None = None
    packed: bool = False
    dropout: bool = False
    lengths: bool = False

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        tile = f"{self.tile_m}x{self.tile_n}"
        plain = f"{self.entry}-{self.dtype}-d{self.dim}-{tile}-w{self.warps}-s{self.stages}"
        return (
            plain
            + ("-sparse" if self.sparse else "")
            + (f"-{self.score.name}" if self.score else "")
            + ("-packed" if self.packed else "")
            + self.of_keys
            + ("-dropout" if self.dropout else "")
        )

    @property
    def of_keys(self) -> str:
        """What the name says of where keys are."""
        return "-lengths" if self.lengths else ""

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
            ("FA_PARAMS_BYTES", PARAMS[self.dropout].itemsize),
            *self.key_defines,
            *DROPOUT_DEFINES[self.dropout],
            *self.score_defines,
        )

    @property
    def key_defines(self) -> tuple[tuple[str, int], ...]:
        """Those of ``cuda_src/common/packed.cuh`` and ``cuda_src/common/key_lengths.cuh``."""
        given = ("FA_PACKED", self.packed), ("FA_LENGTHS", self.lengths)
        return tuple([(name, 1) for name, value in given if value])

    @property
    def score_defines(self) -> tuple[tuple[str, int], ...]:
        """The constants of ``cuda_src/common/score.cuh``."""
        return self.score.defines if self.score else ()

    @property
    def headers(self) -> dict[str, bytes]:
        """The headers that are made for it, by the name in the include."""
        return self.score.headers if self.score else {}

    def for_score(self, score: ScoreMod | None) -> Self:
        """Return the build of this row for calls with such scores."""
        return dataclasses.replace(self, score=score)

    def for_sequences(self, packed: bool) -> Self:
        """Return the build of this row for packed sequences, or for none."""
        return dataclasses.replace(self, packed=packed) if packed else self

    def for_dropout(self, dropout: bool) -> Self:
        """Return the build of this row that drops weights, or the one that does not."""
        # Words of decisions take registers: up to 100 bytes are spilled.
        return dataclasses.replace(self, dropout=True, hot_targets=()) if dropout else self

    def for_lengths(self, lengths: bool) -> Self:
        """Return the build of this row for lengths of entries, or for none."""
        return dataclasses.replace(self, lengths=lengths) if lengths else self

    @property
    def rank(self) -> tuple[int, ...]:
        """Of the rows that serve a call, the one of the lowest rank gets it."""
        raise NotImplementedError
