"""What all kernels for float64 share: which devices have their products, which calls are faster."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.driver.targets import number_of
from fa_cupy.gpu.kernels.variant import Variant

DTYPE = "float64"

# Gradients: above these dims tiles by cuBLAS are faster than kernels, whose warps share rows there
# and compute their scores more than once. TFLOP/s on an H200, 4 sequences of 4,096 tokens, kernels
# and cuBLAS (those of 256 dims are older than the way in which kernels load tiles today, which made
# those of 64 and 128 faster by a fifth):
#
#   head_dim         64         128        256
#   full             24 and 13  26 and 22  12 and 29
#   causal           24 and 10  25 and 16  12 and 21
#
# With the gradient of a bias, 2 sequences of 4,096 tokens (as old as those of 256 dims):
#
#   a bias of pairs  9.5 and 10.7   10.3 and 17.9
#   causal           9.2 and 8.4    9.8 and 13.5
#   a bias of keys   9.6 and 8.6    10.8 and 14.2
#   causal           9.7 and 6.6    10.2 and 11.1
_KERNEL_DIM, _KERNEL_DIM_OF_BIAS = 128, 64
_MEASURED_TARGET = "sm_90a"
# The rest is reckoned from these numbers, not measured. Tiles cost some tenths of a millisecond of
# launches, whatever their size, which so many operations gain.
_LEAST_FLOP = 2**35
# Under a window cuBLAS computes 2,048 queries with 3,072 keys more than each of them sees. It takes
# 12/29 of the kernels' time for a pair, so that it needs windows of 2,200 keys to gain anything.
_LEAST_WINDOW = 4096


def prefers_cublas(
    target: str | None, pairs: int, head_dim: int, v_dim: int, of_bias: bool = False
) -> bool:
    """Whether gradients are faster on tiles by cuBLAS, for a call of float64 without options.

    Parameters
    ----------
    target : str or None
    pairs : int
        Of a query and a key, in all batch entries.
    head_dim, v_dim : int
    of_bias : bool, optional
        Whether that of a bias is computed.
    """
    wide = max(head_dim, v_dim) > (_KERNEL_DIM_OF_BIAS if of_bias else _KERNEL_DIM)
    flop = pairs * (6 * head_dim + 4 * v_dim)
    return target == _MEASURED_TARGET and wide and flop >= _LEAST_FLOP


def leaves_to_cublas(problem: Problem, target: str | None, of_bias: bool = False) -> bool:
    """Whether gradients that kernels compute are left to tiles by cuBLAS, which are faster.

    Kernels keep what tiles compute in vain, or not at all: what masks hide, narrow windows, packed
    sequences, keys behind lengths, and scores by an expression, each step of which takes a pass
    over all scores. They also keep what is captured into a graph, which the caller looks at.
    """
    lower, upper = problem.lower, problem.upper
    narrow = lower is not None and upper is not None and upper - lower < _LEAST_WINDOW
    of_kernels = problem.mask, problem.offsets, problem.score, problem.k_lengths
    if narrow or any(x is not None for x in of_kernels):
        return False
    pairs = math.prod(problem.batch) * problem.q_len * problem.k_len
    return prefers_cublas(target, pairs, problem.head_dim, problem.v_dim, of_bias)


@dataclass(frozen=True, kw_only=True)
class ProductsFp64(Variant):
    """A row of a kernel that multiplies by ``cuda_src/common/mma_fp64.cuh``.

    Attributes
    ----------
    wide : bool
        Whether one instruction of SM90 makes a product, for which eight do before.
    """

    wide: bool

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets the row may serve: those that have its instructions and its shared memory."""
        return tuple(t for t in super().targets if number_of(t) >= 90 or not self.wide)
