// Rows of queries whose log-sum-exp is too large for weights to be computed from it.
//
// Kernels of gradients compute P = exp2(S - LSE).  The rounding of the LSE, a float32, is then a
// factor to all weights of its row.  Below kLargeScore it is off from 1 by 2**-10.9 at most,
// 2**-12.5 on average: no more than one rounding of a float16.  Beyond, it grows with the LSE.  Two
// equal scores of 1e7 get weights of 0.36 each, and where all keys have a bias of -1e9 all weights
// are about 1, however many keys there are.
//
// So bwd_preprocess puts a NaN in the place of such an LSE.  All sums that this row is a part of
// become NaN, as where an input is not finite, and are marked to be computed once more
// (nonfinite_flags.cuh).  bwd_nonfinite, which does that, knows the NaN, and computes the weights
// of the row from its largest score and the sum of exponentials relative to it.
#pragma once
#include "cuda_src/common/softmax.cuh"

// In place of an LSE in units of log2.  If it came as an LSE, its row would be computed anew.
constexpr uint32 kLargeLseMarker = 0x7fc0fa40u;

FA_DEVICE bool is_large_lse(float stored_lse) {
  return __float_as_uint(stored_lse) == kLargeLseMarker;
}

// A natural LSE in units of log2, or what stands for it.
FA_DEVICE float lse_or_marker(float lse) {
  const bool is_large = fabsf(lse) >= kLargeScore * kLn2 && fabsf(lse) < FA_INFINITY;
  return is_large ? __int_as_float(static_cast<int>(kLargeLseMarker)) : lse * kLog2e;
}

// What weights of a row with a large LSE are computed from: the largest of its scores, as the
// products with exp2_scale are rounded, and the sum of exponentials relative to it.
struct RowStatistics {
  float row_max = -FA_INFINITY, row_sum = 0.0f;

  // Adds scores of which these are the largest one and the sum.
  __device__ __forceinline__ void merge(float other_max, float other_row_sum) {
    // None, or none that counts.
    if (other_max == -FA_INFINITY && other_row_sum == other_row_sum) return;
    const float new_max = fmaxf(row_max, other_max);
    row_sum = row_sum * ex2_approx_ftz(row_max - new_max) +
              other_row_sum * ex2_approx_ftz(other_max - new_max);
    row_max = new_max;
  }
};

// An LSE that differs from that of these scores by more than this part of itself is one of more
// keys than these: results over parts of the keys were merged.  Tensor cores truncate where they
// add up, which makes a smaller difference: 2**-19.7 of a score of 256 equal terms (measured).
constexpr float kLseTolerance = 1.0f / (1 << 18);

// What exponentials relative to the largest score are multiplied by; `lse` is in units of log2.
FA_DEVICE float inverse_row_sum(const RowStatistics& sums, float lse) {
  const float own_lse = sums.row_max + lg2_approx_ftz(sums.row_sum);
  const bool covers_more_keys = fabsf(lse - own_lse) > kLseTolerance * fabsf(lse);
  return covers_more_keys ? ex2_approx_ftz(sums.row_max - lse) : inverse_sum(sums.row_sum);
}
