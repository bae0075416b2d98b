"""The step of an online softmax on a tile of scores, in one pass over memory.

Compiled by CuPy on first use, as the steps in `fa_cupy.gpu.cublas.elementwise` are. Each of those
reads and writes the whole tile; here a block of threads takes a row, which stays in its L1 cache
between the maximum and the weights.
"""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

# Threads of a block: a row of 4096 scores is 16 for each.
_MOST_THREADS, _WARP = 256, 32

# `T` is the type of scores. Row r of the grid is row r % m of stacked entry r / m.
_SOURCE = r"""
#define FA_INFINITY __longlong_as_double(0x7ff0000000000000LL)

// The larger one, and NaN if one of them is.
__device__ T larger(T a, T b) { return b > a || b != b ? b : a; }

// Both return the same to all threads of a block: warps first, then what the warps found. The order
// is fixed, so that results are bitwise repeatable.
template <class Join>
__device__ T of_block(T mine, T start, Join join)
{
    __shared__ T of_warp[32];
    for (int lane = 16; lane; lane /= 2)
        mine = join(mine, __shfl_xor_sync(0xffffffffu, mine, lane));
    __syncthreads();  // results of the call before have been read
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    T all = start;
    for (int warp = 0; warp < blockDim.x / 32; ++warp)
        all = join(all, of_warp[warp]);
    return all;
}

struct Larger { __device__ T operator()(T a, T b) const { return larger(a, b); } };
struct Sum { __device__ T operator()(T a, T b) const { return a + b; } };

extern "C" __global__ void fa_cupy_row_softmax(
    T* scores, long long entry_stride, long long row_stride, int n, int m,
    T* top, long long top_stride, T* total, long long total_stride, T* decay, bool started)
{
    const long long entry = blockIdx.x / m, i = blockIdx.x % m;
    T* row = scores + entry * entry_stride + i * row_stride;
    T* its_top = top + entry * top_stride + i;
    T* its_total = total + entry * total_stride + i;
    const T before = started ? *its_top : -T(FA_INFINITY);
    const T summed = started ? *its_total : T(0);

    T most = -T(FA_INFINITY);
    for (int j = threadIdx.x; j < n; j += blockDim.x)
        most = larger(most, row[j]);
    const T next = larger(before, of_block(most, -T(FA_INFINITY), Larger()));
    const T shift = next == -T(FA_INFINITY) ? T(0) : next;  // -inf - -inf would be NaN

    T sum = 0;
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        const T weight = exp(row[j] - shift);
        row[j] = weight;
        sum += weight;
    }
    sum = of_block(sum, T(0), Sum());
    if (threadIdx.x == 0) {
        const T keep = exp(before - shift);
        *its_top = next;
        *its_total = summed * keep + sum;
        decay[blockIdx.x] = keep;
    }
}
"""


@functools.cache
def _kernel(dtype: np.dtype[Any]) -> Any:
    type_name = {4: "float", 8: "double"}[dtype.itemsize]
    return cupy.RawKernel(f"typedef {type_name} T;\n{_SOURCE}", "fa_cupy_row_softmax")


def row_softmax(scores: Any, top: Any, total: Any, decay: Any, started: bool) -> None:
    """Turn scores into weights in place, and bring the state of their rows up to date.

    Parameters
    ----------
    scores : cupy.ndarray
        (n, m, keys), float32 or float64, the rows dense.
    top, total : cupy.ndarray
        (n, m, 1), dense but for the stack: running maximum and sum. Not read unless `started`.
    decay : cupy.ndarray
        (n, m, 1), dense: set to what the accumulator of each row is to be multiplied by.
    started : bool
        Whether there were keys before.
    """
    entries, rows, keys = scores.shape
    if entries * rows == 0:
        return
    size = scores.itemsize
    threads = min(_MOST_THREADS, -(-max(keys, 1) // _WARP) * _WARP)
    strides = [np.int64(x.strides[0] // size) for x in (scores, top, total)]
    _kernel(scores.dtype)(
        (entries * rows,),
        (threads,),
        (
            scores, strides[0], np.int64(scores.strides[1] // size), np.int32(keys),
            np.int32(rows), top, strides[1], total, strides[2], decay, np.bool_(started),
        ),
    )  # fmt: skip
