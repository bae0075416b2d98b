// Online softmax over tiles of scores (Milakov and Gimelshein 2018, arXiv:1805.02867), in base 2.
//
// Each thread keeps, for each of its rows, the largest score so far and the sum of exp2(scale *
// (score - largest)) over its own columns; four threads share a row, and only the maximum is
// exchanged in every tile.
//
// `reference` trails the largest score: it moves only when a score passes it by more than
// 2**kSlack, so that after the first tiles nearly no tile rescales the output.  Weights then reach
// 2**kSlack, far inside every type's range, and are rounded with the same relative error.
#pragma once
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/scores.cuh"

constexpr float kSlack = 8.0f;
// What a thread's weights of one tile and row may add up to unseen: float16 ends at 65504.
constexpr float kMaxUnseen = 16384.0f;
// From here on products are rounded as references are, else the exact product inside fmaf would
// leave the largest score of a row far from its reference.  Two equal scores of a row, one on each
// side, get weights that differ by half a unit of it: 2**-11, less than a 16-bit type sees.
constexpr float kFar = 8192.0f;
// From here on a unit of a reference is 2 or more.  Scores of this size that differ by 1 are equal
// in float32.
constexpr float kCoarse = 16777216.0f;

// The reference of a row that has seen no key: finite, so that no difference of two is NaN, and as
// an exponent's offset it makes the first score that comes too large to be trusted.
constexpr float kNoReference = -3.402823466e+38f;

FA_DEVICE bool is_far(float reference) {
  return fabsf(reference) >= kFar && fabsf(reference) < -kNoReference;
}

template <int kMmaM>
struct OnlineSoftmax {
  float reference[kMmaM][2];  // in units of log2: exp2_scale * score
  float sum[kMmaM][2];
  bool far;  // whether a reference of this warp is; kept by exponentials<true>

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
      reference[i][0] = reference[i][1] = kNoReference;
      sum[i][0] = sum[i][1] = 0.0f;
    }
    far = false;
  }

  // Looks at the next scores.  Returns whether a row of this warp needs its earlier sums and
  // outputs multiplied by correction[i][h], which is done to the sums here.
  template <int kMmaN>
  __device__ __forceinline__ bool raise(const float (&s)[kMmaM][kMmaN][4],
                                        float (&correction)[kMmaM][2], float exp2_scale) {
    float top[kMmaM][2];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[i][h] = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
        for (int j = 1; j < kMmaN; ++j)
          top[i][h] = fmaxf(top[i][h], fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
        top[i][h] = fmaxf(top[i][h], __shfl_xor_sync(kFullWarp, top[i][h], 1));
        top[i][h] = exp2_scale * fmaxf(top[i][h], __shfl_xor_sync(kFullWarp, top[i][h], 2));
        moved |= top[i][h] > reference[i][h] + kSlack;
      }
    }
    if (!__any_sync(kFullWarp, moved)) return false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float now = fmaxf(reference[i][h], top[i][h]);
        correction[i][h] = ex2_approx_ftz(reference[i][h] - now);
        reference[i][h] = now;
        sum[i][h] *= correction[i][h];
      }
    }
    return true;
  }

  // Turns scores into weights and adds them up.  With kAnySize scores may be of any size.  Without,
  // the products are exact, so all weights of a row have the factor that lies between the largest
  // product and the reference, which is its rounded value: it cancels, but where references are
  // kCoarse or more it may be too large or too small for the weights' type, and such rows are to be
  // computed again (fwd_sm80 has no registers left to do better here).
  template <bool kAnySize, int kMmaN>
  __device__ __forceinline__ void exponentials(float (&s)[kMmaM][kMmaN][4], float exp2_scale) {
    if constexpr (kAnySize) {
      far = false;
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        far = far || is_far(reference[i][0]) || is_far(reference[i][1]);
      }
      far = __any_sync(kFullWarp, far);
    }
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Always the first of the two: it gets a register of its own, else fwd_sm80 spills.
        const float offset = fminf(-reference[i][h], -kNoReference);
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[i][j][2 * h + e];
            x = ex2_approx_ftz(kAnySize ? __fmul_rn(x, exp2_scale) + offset
                                        : fmaf(x, exp2_scale, offset));
            sum[i][h] += x;
          }
        }
      }
    }
  }

  // Whether every row of this warp that sees a key of the next tile has a reference, so that trust
  // may hold.  Half of seen[i] is for each row: `bits` of it are not 0 where this thread's part of
  // the row sees one.
  template <int kWords>
  __device__ __forceinline__ bool refers(const uint32 (&seen)[kMmaM][kWords], uint32 bits) const {
    bool known = true;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32 any = 0;
#pragma unroll
        for (int w = 0; w < kWords / 2; ++w) any |= seen[i][kWords / 2 * h + w] & bits;
        known = known && (any == 0 || reference[i][h] > kNoReference);
      }
    }
    return __all_sync(kFullWarp, known);
  }

  // Turns scores into weights without looking for the largest: in trust that none passes the
  // reference by much, which after a few tiles holds for nearly all data.  Returns false, with
  // nothing changed but s, if it does not hold for some row of the warp: where a weight is so large
  // that a float16 may not hold it, where a row has no reference yet.  A score that is NaN makes
  // its row NaN here as it would anywhere.  Not to be called when `far`.
  template <int kMmaN>
  __device__ __forceinline__ bool trust(float (&s)[kMmaM][kMmaN][4], float exp2_scale) {
    float added[kMmaM][2];
    bool fits = true;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) added[i][h] = 0.0f;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[i][j][e];
          x = ex2_approx_ftz(fmaf(x, exp2_scale, -reference[i][e / 2]));
          added[i][e / 2] += x;
        }
      }
      fits = fits && !(added[i][0] > kMaxUnseen) && !(added[i][1] > kMaxUnseen);
    }
    if (!__all_sync(kFullWarp, fits)) return false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[i][h] += added[i][h];
    }
    return true;
  }

  // Adds up the four threads of each row.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[i][h] += __shfl_xor_sync(kFullWarp, sum[i][h], 1);
        sum[i][h] += __shfl_xor_sync(kFullWarp, sum[i][h], 2);
      }
    }
  }
};

// Natural logarithm of the sum of exponentials; -inf for a row that saw no key.
FA_DEVICE float log_sum_exp(float reference, float sum) {
  return sum == 0.0f ? -FA_INFINITY : kLn2 * (reference + lg2_approx_ftz(sum));
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
FA_DEVICE float inverse_sum(float sum) { return sum == 0.0f ? 0.0f : rcp_rn(sum); }
