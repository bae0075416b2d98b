// What a warp knows and computes of single rows in float64.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/math_fp64.cuh"
#include "cuda_src/common/score.cuh"

// The largest score of a row that has seen no key: finite, so that no difference of two is NaN.
constexpr double kNoMaxFp64 = -1.7976931348623157e308;

// The sink of a row of a batch entry; -inf without sinks.
FA_DEVICE double load_sink_fp64(const AttentionParams& p, int64 batch, int row) {
  if (p.sinks == nullptr) return -FA_INFINITY;
  const int64 index = element_of_entry(p, batch, p.sinks_batch) + row * p.sinks_row;
  return load_as_float<double>(p.sinks, index, p.sinks_kind);
}

// The product of two rows of so many columns, all of it in every lane.
template <typename Real>
FA_DEVICE double dot_of_warp(const Real* a, const Real* b, int cols) {
  double sum = 0.0;
#pragma unroll 1
  for (int d = threadIdx.x % 32; d < cols; d += 32)
    sum = fma(static_cast<double>(a[d]), static_cast<double>(b[d]), sum);
#pragma unroll 1
  for (int step = 16; step > 0; step /= 2) sum += shfl_xor_fp64(sum, step);
  return sum;
}
