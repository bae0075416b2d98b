// Rows of float32 in shared memory and sums over the lanes of a warp, for the plain float32 kernels
// of causal products.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

// Loads kRows rows of kCols floats, of which `rows` and `cols` exist; the others become zero.  If
// rows are aligned to 16 bytes, the copies join the thread's current cp.async group; otherwise they
// are done on return.
template <int kRows, int kCols, int kThreads>
FA_DEVICE void load_float_rows(float* tile, const float* source, int row_stride, int rows, int cols,
                               bool aligned) {
  constexpr int kChunks = kCols / 4;
#pragma unroll 1
  for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
    const int row = index / kChunks, col = index % kChunks * 4;
    const int count = row < rows ? max(0, min(4, cols - col)) : 0;
    float* to = tile + row * kCols + col;
    const float* from = source + static_cast<int64>(row) * row_stride + col;
    if (aligned) {
      cp_async_cg_16(cvta_to_shared(to), from, 4 * count);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = i < count ? from[i] : 0.0f;
    }
  }
}

// Sums each of 32 numbers over kLanes neighbouring lanes.  Lane l gets 32 / kLanes of the sums,
// those of numbers 32 / kLanes * l and following, in x[0] and following.  In each step a lane sends
// the half of its sums that it does not keep, which takes 32 - 32 / kLanes shuffles in all.
template <int kLanes, int kStep = kLanes / 2>
FA_DEVICE void sum_over_lanes(float (&x)[32]) {
  constexpr int kHalf = 32 / kLanes * kStep;
  const bool upper = (threadIdx.x & kStep) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? x[i] : x[i + kHalf], retained = upper ? x[i + kHalf] : x[i];
    x[i] = retained + __shfl_xor_sync(kFullWarp, sent, kStep);
  }
  if constexpr (kStep > 1) sum_over_lanes<kLanes, kStep / 2>(x);
}
