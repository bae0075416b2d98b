"""The kernels there are: one row a compiled variant, with the reason for its tile beside it.

Pure data. Tests, validation and docs walk over `VARIANTS`; a new tile is a new row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product
from typing import NamedTuple

from fa_cupy.gpu.kernels.variant import SHARED_LIMIT as SHARED_LIMIT  # for those who read the table
from fa_cupy.gpu.kernels.variant import Call as Call
from fa_cupy.gpu.kernels.variant import Variant as Variant
from fa_cupy.gpu.kernels.variant import VariantSm80 as VariantSm80
from fa_cupy.gpu.kernels.variant import VariantSm90 as VariantSm90

DTYPE_NAMES = ("float16", "bfloat16")


def _fwd_sm80() -> Iterator[VariantSm80]:
    # dim, tile_m, tile_n, warps, stages, why. Speeds: H200, 4096 tokens, beside the other tiles
    # of validation/NOTES.md. Every row fits the 99 KB of the smallest targets. With a mask tiles of
    # keys divide its blocks of 128.
    rows = (
        (32, 128, 128, 4, 2, "32 rows a warp: every K and V fragment serves two products"),
        (64, 128, 128, 4, 1, "as for 32; 2% faster with one stage than with two"),
        (96, 128, 64, 4, 2, "as for 32; 96 keys a tile spill"),
        (128, 128, 64, 4, 2, "as for 32; 5% faster with two stages than with one"),
        (192, 64, 96, 4, 1, "16 rows a warp, or the output would not fit in registers"),
        (256, 64, 64, 4, 1, "as for 192; two blocks an SM beat one of 8 warps by 15%"),
    )
    for dim, tile_m, tile_n, warps, stages, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield VariantSm80(
                source="attention/fwd_sm80", dtype=dtype, dim=dim, tile_m=tile_m,
                tile_n=64 if sparse and 128 % tile_n else tile_n, warps=warps, stages=stages,
                blocks=2, why=why, sparse=sparse,
            )  # fmt: skip


def _fwd_sm90() -> Iterator[VariantSm90]:
    # dim, groups, tile_n, stages, q_stages, exclusive, q_registers, why. TFLOP/s: H200, bf16,
    # 4096 tokens without a mask, beside the other tiles of validation/NOTES.md.
    rows = (
        (64, 3, 128, 4, 6, 1, 0, "three groups, one at the tensor cores: 617 TFLOP/s; two 519"),
        (96, 2, 128, 2, 4, 0, 1, "as for 128"),
        (128, 2, 128, 2, 4, 0, 1, "788 TFLOP/s, with Q in shared memory 781, with 112 keys 768"),
        (192, 2, 96, 2, 3, 0, 0, "96 keys: scores, weights and output fill the registers"),
        (256, 2, 64, 2, 3, 0, 0, "64 keys a tile 824 TFLOP/s, 80 keys 801"),
    )
    # With a mask: a row of its blocks is a tile of queries, a block one tile of keys or two.
    masked = (
        (64, 2, 128, 4, 4, 0, 1, "as for 128"),
        (96, 2, 128, 2, 4, 0, 1, "as for 128"),
        (128, 2, 128, 2, 4, 0, 1, "as without a mask"),
        (192, 2, 64, 2, 4, 0, 0, "half a block of the mask; the next rows of Q come early"),
        (256, 2, 64, 2, 2, 0, 0, "half a block of the mask; its words take the place of a slot"),
    )
    both = [(False, row) for row in rows] + [(True, row) for row in masked]
    for sparse, (dim, groups, tile_n, stages, q_stages, exclusive, q_registers, why) in both:
        for dtype, transform in product(DTYPE_NAMES, (False, True)):
            yield VariantSm90(
                source="attention/fwd_sm90", dtype=dtype, dim=dim, tile_m=64 * groups,
                tile_n=tile_n, warps=4 * (groups + 1), stages=stages,
                q_stages=2 if transform and dim > 128 and not sparse else q_stages,
                exclusive=bool(exclusive), q_registers=bool(q_registers), transform=transform,
                sparse=sparse, why=why, hot_targets=() if transform else ("sm_90a",),
            )  # fmt: skip


VARIANTS: tuple[Variant, ...] = (*_fwd_sm80(), *_fwd_sm90())


class Chosen(NamedTuple):
    """The target of a device, None where no kernel runs, and why it is that one."""

    target: str | None
    why: str


def target_of(
    major: int, minor: int, known: Collection[int] | None = None, shared: int | None = None
) -> Chosen:
    """Choose what kernels are compiled for on a device.

    A cubin runs on later devices of its own major too, so that the newest target counts that is
    not above the device. Where there is none, PTX runs on all later devices.

    Parameters
    ----------
    major, minor : int
        The compute capability.
    known : collection of int, optional
        What NVRTC can compile for, as 103 for sm_103; by default all targets.
    shared : int, optional
        Dynamic shared memory in bytes that a block can have; by default enough for any target.
    """
    if major < 8:
        return Chosen(None, "too old for the kernels: products of cuBLAS serve it")
    own = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    fits = [t for t, limit in SHARED_LIMIT.items() if shared is None or limit <= shared]
    cubins = {t: number_of(t) for t in fits if t.startswith("sm_")}
    # What ends in "a" runs on the very capability that it names.
    runs = [
        t
        for t, number in cubins.items()
        if t == own or (number // 10 == major and number % 10 < minor and t[-1] != "a")
    ]
    runs = [t for t in runs if known is None or cubins[t] in known]
    if own in runs:
        return Chosen(own, "its own")
    if own not in SHARED_LIMIT:
        why = f"fa_cupy has no target {own}"
    elif own not in fits:
        why = f"{shared} bytes of shared memory are less than {own} has"
    else:
        why = f"NVRTC does not know {own}"
    if runs:
        return Chosen(max(runs, key=cubins.__getitem__), f"the newest that runs on it: {why}")
    virtual = [t for t in fits if t not in cubins]
    if not virtual:
        return Chosen(None, f"{shared} bytes of shared memory are less than kernels need")
    chosen = virtual[0] if shared is None else max(virtual, key=SHARED_LIMIT.__getitem__)
    return Chosen(chosen, f"PTX, which the driver compiles: {why}")


def number_of(target: str) -> int:
    """Return the compute capability that a target names, as 90 for ``"sm_90a"``."""
    return int(target.partition("+")[0].partition("_")[2].rstrip("af"))


def select(
    dtype: str, head_dim: int, v_dim: int, target: str | None, call: Call | None = None
) -> Variant | None:
    """Pick the row that serves a forward call: the only place where that is decided.

    Parameters
    ----------
    dtype : str
        Name of the dtype of q, k and v.
    head_dim, v_dim : int
    target : str or None
        That of the device, as `target_of` chooses it.
    call : Call, optional
        The rest that counts; by default a plain call.

    Returns
    -------
    Variant or None
        None where no kernel serves the call: float32 and float64, dims above 256, old devices.
        `fa_cupy.gpu.cublas.attention` does then.
    """
    call = Call() if call is None else call
    fits = [
        row
        for row in VARIANTS
        if row.dtype == dtype
        and row.dim >= max(head_dim, v_dim)
        and target in row.targets
        and row.serves(call)
    ]
    return min(fits, key=lambda row: row.rank, default=None)


def reachable(dtype: str, head_dim: int, v_dim: int, target: str | None) -> list[Variant]:
    """Return all rows that calls of this type and these dims can get, first choices first."""
    found = {
        select(dtype, head_dim, v_dim, target, Call(*call))
        for call in product((False, True), repeat=3)
    }
    return sorted((row for row in found if row), key=lambda row: row.rank)
