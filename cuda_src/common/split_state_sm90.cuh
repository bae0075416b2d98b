// The state of a causal product in a warpgroup's registers (cuda_src/common/linear_sm90.cuh) as an
// operand of wgmma: pairs of float16, with an exponent for each value column.
#pragma once
#include "cuda_src/common/linear_sm90.cuh"
#include "cuda_src/common/split_rows.cuh"

using Outputs = float[8][4];  // O^T: [v][2 * h + j] of value column g + 8 h, row 8 v + 2 t + j
template <int kCount>
using Operand = uint32[kCount][4];  // A operands of 16 columns each

// The exponents of this lane's two value columns, g and g + 8 of its warp.
FA_DEVICE void state_exponents(int (&own)[2], const State& s) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kMmaE; ++i) most = fmaxf(most, fabsf(s[i / 2][2 * h + i % 2]));
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
    own[h] = split_exponent(fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2)));
  }
}

FA_DEVICE void split_state(const State& s, const int (&exponents)[2], Operand<kDim / 16>& high,
                           Operand<kDim / 16>& low) {
  const float scale[2] = {power_of_two(exponents[0]), power_of_two(exponents[1])};
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* pair = &s[2 * step + r / 2][r % 2 * 2];
      const SplitPair both = split_near(pair[0] * scale[r % 2], pair[1] * scale[r % 2]);
      high[step][r] = both.high;
      low[step][r] = both.low;
    }
  }
}

// Starts D = A B of pairs.  Step i sums over 16 columns of A; offset_of(i) is the offset in bytes
// of the rows of B in its tile, whose low parts lie `low_bytes` after the high ones.
template <Major kMajor, int kCount, typename OffsetOf>
FA_DEVICE void gemm_split(Outputs& d, Operand<kCount>& high, Operand<kCount>& low,
                          const uint8* b_tile, int low_bytes, OffsetOf offset_of) {
  const uint64 b = wgmma_descriptor(cvta_to_shared(b_tile), 0);
  const uint64 b_low = b + low_bytes / 16;
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    wgmma_m64k16_rs<false, 64, kMajor>(d, low[i], b + offset_of(i) / 16, i > 0);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    wgmma_m64k16_rs<false, 64, kMajor>(d, high[i], b_low + offset_of(i) / 16, 1);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    wgmma_m64k16_rs<false, 64, kMajor>(d, high[i], b + offset_of(i) / 16, 1);
  }
  wgmma_commit_group();
}
