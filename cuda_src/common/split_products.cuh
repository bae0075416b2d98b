// Products of pairs of float16 (split_float.cuh) by mma.sync.
//
// Tensor cores cut what they add towards zero: no sum of theirs is longer than kLongestSum steps,
// and all others are float32.
#pragma once
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/split_float.cuh"

constexpr int kLongestSum = 4;  // steps of 16 that tensor cores add up

// Adds the three products of a step of 16 to sums of kAtOnce times 8 columns, or of `count`; a sum
// of cross products is 2^-11 times as large as it looks.  With kLowFirst the low part of A comes
// first, else that of B: a product is the same bits as that of B and A, in the other order.
template <bool kLowFirst = true, int kAtOnce>
FA_DEVICE void multiply_pairs(SplitSum (&sums)[kAtOnce], const uint32 (&a)[4],
                              const uint32 (&a_low)[4], const uint32 (&b)[kAtOnce][2],
                              const uint32 (&b_low)[kAtOnce][2], int count) {
#pragma unroll
  for (int n = 0; n < count; ++n) {
    if constexpr (kLowFirst) {
      mma_m16n8k16_f32_f16(sums[n].cross, a_low, b[n][0], b[n][1]);
    } else {
      mma_m16n8k16_f32_f16(sums[n].cross, a, b_low[n][0], b_low[n][1]);
    }
  }
#pragma unroll
  for (int n = 0; n < count; ++n) mma_m16n8k16_f32_f16(sums[n].main, a, b[n][0], b[n][1]);
#pragma unroll
  for (int n = 0; n < count; ++n) {
    if constexpr (kLowFirst) {
      mma_m16n8k16_f32_f16(sums[n].cross, a, b_low[n][0], b_low[n][1]);
    } else {
      mma_m16n8k16_f32_f16(sums[n].cross, a_low, b[n][0], b[n][1]);
    }
  }
}

// Reads the B operands of two neighbouring blocks of 8 columns, of high parts and, kLow bytes
// behind them, of low ones.
template <bool kTransposed, uint32 kLow, int kAtOnce>
FA_DEVICE void read_pairs(uint32 (&b)[kAtOnce][2], uint32 (&b_low)[kAtOnce][2], int n,
                          uint32 address) {
  uint32 high[4], low[4];
  if constexpr (kTransposed) {
    ldmatrix_x4_trans(high, address);
    ldmatrix_x4_trans(low, address + kLow);
  } else {
    ldmatrix_x4(high, address);
    ldmatrix_x4(low, address + kLow);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    b[n + e / 2][e % 2] = high[e];
    b_low[n + e / 2][e % 2] = low[e];
  }
}
