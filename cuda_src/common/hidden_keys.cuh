// The slow path for non-finite results.
//
// A hidden key has weight 0, but 0 * NaN and 0 * inf are NaN inside a matrix product, so NaN or inf
// in the value row of a hidden key would reach the output.  A row whose output is not all finite is
// computed once more, one key at a time, leaving out every key whose score is exactly -inf.  Finite
// data never come here.
#pragma once
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/scores.cuh"
#include "cuda_src/common/softmax.cuh"

// One warp computes one row; reference and sum are the finished statistics of that row.  What comes
// out is handed to `write` column by column.
template <bool kBf16, int kDim, typename Write>
FA_DEVICE void attend_row(const AttentionParams& p, const BatchOffsets& at, int row,
                          float reference, float sum, const Write& write) {
  const int lane = threadIdx.x % 32;
  const uint16* q = static_cast<const uint16*>(p.q) + at.q + static_cast<int64>(row) * p.q_row;
  float acc[kDim / 32];
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) acc[i] = 0.0f;
  // Weights are normalised before they meet the values: where values are near the end of the range
  // only their sum weighted by more than 1 in all was infinite.
  const float inverse = inverse_sum(sum);
  const int high = last_key(p, row);
#pragma unroll 1
  for (int col = first_key(p, row); col <= high; ++col) {
    const uint16* k = static_cast<const uint16*>(p.k) + at.k + static_cast<int64>(col) * p.k_row;
    float product = 0.0f;
#pragma unroll 1
    for (int d = lane; d < p.head_dim; d += 32)
      product = fmaf(to_float<kBf16>(q[d]), to_float<kBf16>(k[d]), product);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) product += __shfl_xor_sync(kFullWarp, product, step);
    const float score = one_score(p, at, product, row, col);
    if (score == -FA_INFINITY) continue;
    const float weight =
        inverse * rounded<kBf16>(ex2_approx_ftz(exponent(score, p.exp2_scale, reference)));
    const uint16* v = static_cast<const uint16*>(p.v) + at.v + static_cast<int64>(col) * p.v_row;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      if (lane + 32 * i < p.v_dim) acc[i] = fmaf(weight, to_float<kBf16>(v[lane + 32 * i]), acc[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    if (lane + 32 * i < p.v_dim)
      write(lane + 32 * i, static_cast<uint16>(pack2<kBf16>(acc[i], 0.0f)));
  }
}
