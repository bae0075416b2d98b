// From products to scores, in kernels of attention backward whose warps hold them as accumulators
// of m16n8.  Rows are those of the side that a block owns, keys or queries.
#pragma once
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/block_table.cuh"
#include "cuda_src/common/score.cuh"

// Takes the pairs outside the band from those that are seen of a thread's accumulators: bit 2 j + e
// of word [i][h] is that of register 2 h + e of x[i][j], as in the words of a mask.
template <bool kOwnKeys, int kMmaM, typename Band>
FA_DEVICE void restrict_to_band(const Band& p, uint32 (&visible_bits)[kMmaM][2], int first_own,
                                int first_other, int count) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = first_own + 16 * i + 8 * h;
      visible_bits[i][h] &= kOwnKeys ? visible_queries(p, own, first_other, count)
                                     : visible_columns(p, own, first_other, count);
    }
  }
}

// Hides scores outside the band, where a tile is not inside of it, and those that a mask hides of a
// block that has words.
template <bool kOwnKeys, bool kSparse, int kMmaM, int kMmaN, typename Params, typename Band>
FA_DEVICE void mask_scores(const Params& params, const Band& band, float (&s)[kMmaM][kMmaN][4],
                           bool in_band, int words_index, int own, int other) {
  const bool is_partial = kSparse && words_index >= 0;
  if (in_band && !is_partial) return;
  uint32 visible_bits[kMmaM][2];
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) visible_bits[i][0] = visible_bits[i][1] = ~0u;
  if (is_partial)
    visible_bits_of_words(partial_block_words(params.mask, words_index), visible_bits, own, other);
  if (!in_band) restrict_to_band<kOwnKeys>(band, visible_bits, own, other, 2 * kMmaN);
  mask_by_bits(s, visible_bits);
}

// Makes scores of products, and multiplies dP - delta by the slope of each.
template <bool kOwnKeys, int kMmaM, int kMmaN>
FA_DEVICE void apply_score_mod_backward(const AttentionParams& p, int64 operands_offset,
                                        float (&s)[kMmaM][kMmaN][4], float (&dp)[kMmaM][kMmaN][4],
                                        int first_own, int first_other) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    load_and_apply_score_mod<kOwnKeys>(p, operands_offset, s[i], first_own + 16 * i, first_other,
                                       [&](int j, int e, float slope) { dp[i][j][e] *= slope; });
  }
}
