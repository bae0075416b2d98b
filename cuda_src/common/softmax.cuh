// Online softmax over tiles of scores (Milakov and Gimelshein 2018, arXiv:1805.02867), in base 2.
//
// Each thread keeps, for each of its rows, the largest score so far and the sum of exp2(scale *
// (score - largest)) over its own columns; four threads share a row, and only the maximum is
// exchanged in every tile.
//
// `row_max` trails the largest score: it moves only when a score passes it by more than
// 2**kStaleMaxSlack, so that after the first tiles nearly no tile rescales the output.  Weights
// then reach 2**kStaleMaxSlack, far inside every type's range, and are rounded with the same
// relative error.
#pragma once
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/score.cuh"

constexpr float kStaleMaxSlack = 8.0f;
// What a thread's weights of one tile and row may add up to with a stale row_max: float16 ends at
// 65504.
constexpr float kMaxPartialSum = 16384.0f;
// What a weight with a stale row_max may be if row_max is to move up by it: exponents of up to 30
// have an error of 2**-20.
constexpr float kMostStaleWeight = 1073741824.0f;
// From here on products are rounded as row_max is, else the exact product inside fmaf would
// leave the largest score of a row far from its row_max.  Two equal scores of a row, one on each
// side, get weights that differ by half a unit of it: 2**-11, less than a 16-bit type sees.
constexpr float kLargeScore = 8192.0f;
// From here on a unit of a row_max is 2 or more.  Scores of this size that differ by 1 are equal
// in float32.
constexpr float kCoarseScore = 16777216.0f;

// The row_max of a row that has seen no key: finite, so that no difference of two is NaN, and as
// an exponent's offset it makes the first score that comes too large for a stale row_max.
constexpr float kNoMax = -3.402823466e+38f;

// The factor that brings scores to units of log2: 1 where a kernel has made them in these units.
FA_DEVICE float softmax_scale(const AttentionParams& p) { return kScoreMod ? 1.0f : p.exp2_scale; }

// A row that has seen no key does not count, but one whose bias is the lowest float32 does.
FA_DEVICE bool is_large(float row_max) {
  return fabsf(row_max) >= kLargeScore && (kScoreMod || fabsf(row_max) < -kNoMax);
}

template <int kMmaM>
struct OnlineSoftmax {
  float row_max[kMmaM][2];  // in units of log2: exp2_scale * score
  float row_sum[kMmaM][2];
  bool has_large_max;  // whether a row_max of this warp is large; set by exponentiate<true>

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
      row_max[i][0] = row_max[i][1] = kNoMax;
      row_sum[i][0] = row_sum[i][1] = 0.0f;
    }
    has_large_max = false;
  }

  // Looks at the next scores.  Returns whether a row of this warp needs its earlier sums and
  // outputs multiplied by correction[i][h], which is done to the sums here.
  template <int kMmaN>
  __device__ __forceinline__ bool update_max(const float (&s)[kMmaM][kMmaN][4],
                                             float (&correction)[kMmaM][2], float exp2_scale) {
    float tile_max[kMmaM][2];
    bool max_moved = false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        tile_max[i][h] = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
        for (int j = 1; j < kMmaN; ++j)
          tile_max[i][h] = fmaxf(tile_max[i][h], fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
        tile_max[i][h] = fmaxf(tile_max[i][h], __shfl_xor_sync(kFullWarp, tile_max[i][h], 1));
        tile_max[i][h] = scale_score(
            fmaxf(tile_max[i][h], __shfl_xor_sync(kFullWarp, tile_max[i][h], 2)), exp2_scale);
        max_moved |= tile_max[i][h] > row_max[i][h] + kStaleMaxSlack;
      }
    }
    if (!__any_sync(kFullWarp, max_moved)) return false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float new_max = fmaxf(row_max[i][h], tile_max[i][h]);
        correction[i][h] = ex2_approx_ftz(row_max[i][h] - new_max);
        row_max[i][h] = new_max;
        row_sum[i][h] *= correction[i][h];
      }
    }
    return true;
  }

  // Turns scores into weights and adds them up.  With kAnyMagnitude scores may be of any size.
  // Without, the products are exact, so all weights of a row have the factor that lies between the
  // largest product and row_max, which is its rounded value: it cancels, but where row_max
  // is kCoarseScore or more it may be too large or too small for the weights' type, and such rows
  // are to be computed again (fwd_sm80 has no registers left to do better here).
  template <bool kAnyMagnitude, int kMmaN>
  __device__ __forceinline__ void exponentiate(float (&s)[kMmaM][kMmaN][4], float exp2_scale) {
    if constexpr (kAnyMagnitude) {
      has_large_max = false;
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        has_large_max = has_large_max || is_large(row_max[i][0]) || is_large(row_max[i][1]);
      }
      has_large_max = __any_sync(kFullWarp, has_large_max);
      if constexpr (kScoreMod) {
        // Scores that are no products by themselves are nearly always small.
        if (!has_large_max) return exponentiate<false>(s, exp2_scale);
      }
    }
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Always the first of the two: it gets a register of its own, else fwd_sm80 spills.
        const float offset = fminf(-row_max[i][h], -kNoMax);
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[i][j][2 * h + e];
            x = ex2_approx_ftz(kAnyMagnitude ? scale_score(x, exp2_scale) + offset
                                             : fmaf(x, exp2_scale, offset));
            row_sum[i][h] += x;
          }
        }
      }
    }
  }

  // Whether every row of this warp that sees a key of the next tile has a row_max, so that a stale
  // one may do.  visible_bits[i][h] is not 0 where this thread's part of the row sees one.
  __device__ __forceinline__ bool has_max(const uint32 (&visible_bits)[kMmaM][2]) const {
    bool all_have_max = true;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        all_have_max = all_have_max && (visible_bits[i][h] == 0 || row_max[i][h] > kNoMax);
      }
    }
    return __all_sync(kFullWarp, all_have_max);
  }

  // Turns scores into weights without looking for the largest, as if none passed row_max by
  // much, which after a few tiles holds for nearly all data.  Returns false, with
  // nothing changed but s, if one does for some row of the warp: where a weight is so large
  // that a float16 may not hold it, where a row has no row_max yet.  A score that is NaN makes
  // its row NaN here as it would anywhere.  Not to be called when `has_large_max`.  With in_range
  // false for some thread, false is returned in any case.
  // With kLog2 scores are in units of log2 already.
  template <bool kLog2, int kMmaN>
  __device__ __forceinline__ bool try_stale_max(float (&s)[kMmaM][kMmaN][4], float exp2_scale,
                                                bool in_range = true) {
    float tile_sum[kMmaM][2];
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) tile_sum[i][h] = 0.0f;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[i][j][e];
          x = ex2_approx_ftz(kLog2 ? x - row_max[i][e / 2]
                                   : fmaf(x, exp2_scale, -row_max[i][e / 2]));
          tile_sum[i][e / 2] += x;
        }
      }
      in_range =
          in_range && !(tile_sum[i][0] > kMaxPartialSum) && !(tile_sum[i][1] > kMaxPartialSum);
    }
    if (!__all_sync(kFullWarp, in_range)) return false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[i][h] += tile_sum[i][h];
    }
    return true;
  }

  // After try_stale_max has found weights too large, and scores were right: lets row_max follow,
  // and O by `correction`.  Returns false, with nothing changed, if some weight is too large for
  // that, as where scores jump.
  template <int kMmaN>
  __device__ __forceinline__ bool move_stale_max(float (&weights)[kMmaM][kMmaN][4],
                                                 float (&correction)[kMmaM][2]) {
    float largest[kMmaM][2];
    bool in_range = true;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& own = largest[i][h];
        own = 1.0f;
#pragma unroll
        for (int j = 0; j < kMmaN; ++j)
          own = fmaxf(own, fmaxf(weights[i][j][2 * h], weights[i][j][2 * h + 1]));
        own = fmaxf(own, __shfl_xor_sync(kFullWarp, own, 1));
        own = fmaxf(own, __shfl_xor_sync(kFullWarp, own, 2));
        in_range = in_range && own < kMostStaleWeight;
      }
    }
    if (!__all_sync(kFullWarp, in_range)) return false;
    bool is_any_large = false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float new_max = row_max[i][h] + lg2_approx_ftz(largest[i][h]);
        correction[i][h] = ex2_approx_ftz(row_max[i][h] - new_max);
        row_max[i][h] = new_max;
        row_sum[i][h] *= correction[i][h];
        is_any_large = is_any_large || is_large(new_max);
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            weights[i][j][2 * h + e] *= correction[i][h];
            row_sum[i][h] += weights[i][j][2 * h + e];
          }
        }
      }
    }
    has_large_max = __any_sync(kFullWarp, is_any_large);
    return true;
  }

  // Adds up the four threads of each row.
  __device__ __forceinline__ void reduce_row_sum() {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sum[i][h] += __shfl_xor_sync(kFullWarp, row_sum[i][h], 1);
        row_sum[i][h] += __shfl_xor_sync(kFullWarp, row_sum[i][h], 2);
      }
    }
  }
};

// Natural logarithm of the sum of exponentials; -inf for a row that saw no key.
FA_DEVICE float log_sum_exp(float row_max, float row_sum) {
  return row_sum == 0.0f ? -FA_INFINITY : kLn2 * (row_max + lg2_approx_ftz(row_sum));
}

// Multiplies O by the factors of rows whose row_max has moved.
template <int kMmaM, int kMmaV>
FA_DEVICE void rescale_o(float (&o)[kMmaM][kMmaV][4], const float (&correction)[kMmaM][2]) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][j][e] *= correction[i][e / 2];
    }
  }
}

// Rounds weights in pairs: weights[i][j][h] is what an A operand of m16n8k16 holds.
template <bool kBf16, int kMmaM, int kMmaN>
FA_DEVICE void round_weights(const float (&s)[kMmaM][kMmaN][4],
                             uint32 (&weights)[kMmaM][kMmaN][2]) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        weights[i][j][h] = pack2<kBf16>(s[i][j][2 * h], s[i][j][2 * h + 1]);
      }
    }
  }
}

// What turns an accumulated output into the result; a row that saw no key gives 0.
FA_DEVICE float inverse_sum(float row_sum) { return row_sum == 0.0f ? 0.0f : rcp_rn(row_sum); }
