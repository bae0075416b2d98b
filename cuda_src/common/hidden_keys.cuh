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

// Calls attend(key) for each key that a row may see by its band and by the mask's lists, as a whole
// warp.
template <typename Attend>
FA_DEVICE void for_listed_keys(const AttentionParams& p, int64 batch, int row,
                               const Attend& attend) {
  const int64 t = row_of_blocks(p.mask, batch, row, p.q_len);
  const ListedBlocks listed = listed_blocks(p.mask, t);
  const int low = first_key(p, row), high = last_key(p, row);
#pragma unroll 1
  for (int partial = 0; partial < 2; ++partial) {
    const int* blocks = partial ? p.mask.partial : p.mask.full;
    const int64 end = partial ? listed.partial_end : listed.full_end;
#pragma unroll 1
    for (int64 place = partial ? listed.partial_begin : listed.full_begin; place < end; ++place) {
      const int block = blocks[place], first = block * kMaskBlock;
      const uint32* words = partial ? block_words(p.mask, t, place, block) : nullptr;
#pragma unroll 1
      for (int key = max(low, first); key <= min(high, first + kMaskBlock - 1); ++key) {
        if (!partial || block_bit(words, row % kMaskBlock, key - first)) attend(key);
      }
    }
  }
}

// One warp computes one row of a batch entry (counted over all batch axes, which only a mask asks
// for); reference and sum are the finished statistics of that row.  What comes out is handed to
// `write` column by column.
template <bool kBf16, int kDim, bool kMasked, typename Write>
FA_DEVICE void attend_row(const AttentionParams& p, const BatchOffsets& at, int64 batch, int row,
                          float reference, float sum, const Write& write) {
  const int lane = threadIdx.x % 32;
  const uint16* q = static_cast<const uint16*>(p.q) + at.q + static_cast<int64>(row) * p.q_row;
  float acc[kDim / 32];
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) acc[i] = 0.0f;
  // Weights are normalised before they meet the values: where values are near the end of the range
  // only their sum weighted by more than 1 in all was infinite.
  const float inverse = inverse_sum(sum);
  const auto attend = [&](int col) {
    const uint16* k = static_cast<const uint16*>(p.k) + at.k + static_cast<int64>(col) * p.k_row;
    float product = 0.0f;
#pragma unroll 1
    for (int d = lane; d < p.head_dim; d += 32)
      product = fmaf(to_float<kBf16>(q[d]), to_float<kBf16>(k[d]), product);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) product += __shfl_xor_sync(kFullWarp, product, step);
    const float score = one_score(p, at, product, row, col);
    if (score == -FA_INFINITY) return;
    const float weight =
        inverse * rounded<kBf16>(ex2_approx_ftz(exponent(score, p.exp2_scale, reference)));
    const uint16* v = static_cast<const uint16*>(p.v) + at.v + static_cast<int64>(col) * p.v_row;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      if (lane + 32 * i < p.v_dim) acc[i] = fmaf(weight, to_float<kBf16>(v[lane + 32 * i]), acc[i]);
    }
  };
  if constexpr (kMasked) {
    for_listed_keys(p, batch, row, attend);
  } else {
    const int high = last_key(p, row);
#pragma unroll 1
    for (int col = first_key(p, row); col <= high; ++col) attend(col);
  }
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    if (lane + 32 * i < p.v_dim)
      write(lane + 32 * i, static_cast<uint16>(pack2<kBf16>(acc[i], 0.0f)));
  }
}
