"""Which kernels compute gradients in float32 and float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa_cupy.gpu.kernels.attention.dbias import bwd_dbias_fp32, bwd_dbias_fp64
from fa_cupy.gpu.kernels.attention.full_precision.gradients import (
    backward_fp32,
    bwd_dkdv_fp32,
    bwd_dkdv_fp32_sm90,
    bwd_dkdv_fp64,
    bwd_dq_fp32,
    bwd_dq_fp32_sm90,
    bwd_dq_fp64,
    bwd_preprocess_fp32,
)
from fa_cupy.gpu.kernels.backward import BackwardVariant, Wanted

Rows = Sequence[BackwardVariant]

#: All of them.
VARIANTS: tuple[BackwardVariant, ...] = (
    *bwd_dq_fp64.VARIANTS,
    *bwd_dkdv_fp64.VARIANTS,
    *bwd_preprocess_fp32.VARIANTS,
    *bwd_dq_fp32.VARIANTS,
    *bwd_dkdv_fp32.VARIANTS,
    *bwd_dbias_fp64.VARIANTS,
    *bwd_dbias_fp32.VARIANTS,
    *bwd_dq_fp32_sm90.VARIANTS,
    *bwd_dkdv_fp32_sm90.VARIANTS,
)
# Those that run everywhere, in the order of their launches.
_MAIN: Mapping[str, tuple[Rows, ...]] = {
    "float64": (bwd_dq_fp64.VARIANTS, bwd_dkdv_fp64.VARIANTS),
    "float32": (bwd_dq_fp32.VARIANTS, bwd_dkdv_fp32.VARIANTS),
}
# What follows them where the gradient of a bias is wanted.
_DBIAS: Mapping[str, Rows] = {
    "float64": bwd_dbias_fp64.VARIANTS,
    "float32": bwd_dbias_fp32.VARIANTS,
}
# Those of float32 on Hopper, for calls that `_is_for_wgmma`.
_FP32_SM90: tuple[Rows, ...] = (bwd_dq_fp32_sm90.VARIANTS, bwd_dkdv_fp32_sm90.VARIANTS)
#: Up to this dim gradients of float32 come from kernels of mma.sync everywhere: those of wgmma
#: would have twice as many columns.
MMA_DIM = 32


def kernels_of(wanted: Wanted, target: str | None) -> tuple[Rows, tuple[Rows, ...]]:
    """Return what may compute the gradients of a call in float32 or float64.

    Parameters
    ----------
    wanted : Wanted
    target : str or None
        That of the device.

    Returns
    -------
    first : sequence of BackwardVariant
        Rows of the kernel that is launched first, in float32 alone: one serves the call.
    kernels : tuple of sequence of BackwardVariant
        Rows of each further kernel, in the order of launches; empty where no kernel serves it.
    """
    first = bwd_preprocess_fp32.DENSE  # whose dtype is none that a call in float64 wants
    if wanted.lengths and (wanted.masked or wanted.dbias):
        return first, ((),)
    if wanted.dbias:
        return first, (*_MAIN[wanted.dtype], _DBIAS[wanted.dtype])
    if target == "sm_90a" and _is_for_wgmma(wanted):
        return bwd_preprocess_fp32.SWIZZLED, _FP32_SM90
    return first, _MAIN[wanted.dtype]


def _is_for_wgmma(wanted: Wanted) -> bool:
    """Whether kernels of ``wgmma`` compute gradients of float32 where they can."""
    return wanted.dtype == backward_fp32.DTYPE and wanted.dim > MMA_DIM
