// Rows of queries whose log-sum-exp is too large for weights to be computed from it.
//
// Kernels of gradients compute P = exp2(S - LSE).  The rounding of the LSE, a float32, is then a
// factor to all weights of its row.  Below kFar it is off from 1 by 2**-10.9 at most, 2**-12.5 on
// average: no more than one rounding of a float16.  Beyond, it grows with the LSE.  Two equal
// scores of 1e7 get weights of 0.36 each, and where all keys have a bias of -1e9 all weights are
// about 1, however many keys there are.
//
// So bwd_rows puts a NaN in the place of such an LSE.  All sums that this row is a part of become
// NaN, as where an input is not finite, and are marked to be computed once more (spoiled.cuh).
// bwd_redo, which does that, knows the NaN, and computes the weights of the row from its largest
// score and the sum of exponentials relative to it.
#pragma once
#include "cuda_src/common/softmax.cuh"

// In place of an LSE in units of log2.  If it came as an LSE, its row would be computed anew.
constexpr uint32 kFarRow = 0x7fc0fa40u;

FA_DEVICE bool is_far_row(float known) { return __float_as_uint(known) == kFarRow; }

// A natural LSE in units of log2, or what stands for it.
FA_DEVICE float known_lse(float lse) {
  const bool far = fabsf(lse) >= kFar * kLn2 && fabsf(lse) < FA_INFINITY;
  return far ? __int_as_float(static_cast<int>(kFarRow)) : lse * kLog2e;
}

// What weights of a far row are computed from: the largest of its scores, as the products with
// exp2_scale are rounded, and the sum of exponentials relative to it.
struct RowSums {
  float top = -FA_INFINITY, sum = 0.0f;

  // Adds scores of which these are the largest one and the sum.
  __device__ __forceinline__ void add(float other_top, float other_sum) {
    if (other_top == -FA_INFINITY && other_sum == other_sum) return;  // none, or none that counts
    const float now = fmaxf(top, other_top);
    sum = sum * ex2_approx_ftz(top - now) + other_sum * ex2_approx_ftz(other_top - now);
    top = now;
  }
};

// An LSE that differs from that of these scores by more than this part of itself is one of more
// keys than these: results over parts of the keys were merged.  Tensor cores truncate where they
// add up, which makes a smaller difference: 2**-19.7 of a score of 256 equal terms (measured).
constexpr float kSameLse = 1.0f / (1 << 18);

// What exponentials relative to the largest score are multiplied by; `lse` is in units of log2.
FA_DEVICE float inverse_of(const RowSums& sums, float lse) {
  const float own = sums.top + lg2_approx_ftz(sums.sum);
  const bool of_more = fabsf(lse - own) > kSameLse * fabsf(lse);
  return of_more ? ex2_approx_ftz(sums.top - lse) : inverse_sum(sums.sum);
}
