// Rows of queries of float32 whose log-sum-exp is so far from 0 that its rounding would show in
// their weights: what replaces it, for kernels that compute dQ.
#pragma once
#include "cuda_src/common/backward_fp32.cuh"

// Where results over parts of the keys were merged, an LSE is one of more keys.  It is larger than
// the LSE of the row's own scores, after the most that rounding may have taken from each is added
// to it.  The difference must be more than a part of the LSE: four to eight units in its last
// place.  A score may be off by a part of the largest product that there might be; the part is
// larger where a score is a sum of more products.
constexpr float kLseToleranceFp32 = 1.0f / (1 << 21);
constexpr float kProductToleranceFp32 = 1.0f / (kDim > 128 ? 1 << 21 : 1 << 22);
// The largest score of a row that has seen no key: finite, so that no difference of two is NaN.
constexpr float kNoMaxFp32 = -kLargest;

FA_DEVICE bool is_far(float lse) { return fabsf(lse) >= kFarFp32 && fabsf(lse) < FA_INFINITY; }

// Looks for far rows among those of the block; all threads take part.
FA_DEVICE void look_for_far_rows(SharedStorage& shared) {
#pragma unroll 1
  for (int r = threadIdx.x; r < kTileM; r += kThreads) {
    if (is_far(shared.own_rows[kShift][r])) shared.work.any_far = 1;
  }
}

FA_DEVICE float exp_of_difference(float x, float y) { return ex2_approx_ftz((x - y) * kLog2e); }

// The largest of some scores, and the sum of exponentials relative to it.
struct SumOfExponentials {
  float most = kNoMaxFp32, sum = 0.0f;

  __device__ __forceinline__ void add(float other_most, float other_sum) {
    const float larger = fmaxf(most, other_most);
    sum = sum * exp_of_difference(most, larger) + other_sum * exp_of_difference(other_most, larger);
    most = larger;
  }
  __device__ __forceinline__ void add_of_lane(int other) {
    add(__shfl_xor_sync(kFullWarp, most, other), __shfl_xor_sync(kFullWarp, sum, other));
  }
};

// Of a row's scores, NaN where they may have lost digits that count, and of the largest ones that
// there might be without rounding.
struct RowStatistics {
  SumOfExponentials scores, bounds;

  __device__ __forceinline__ void add(float score, float rounding) {
    if (score == -FA_INFINITY) return;
    if (score == score) {
      scores.add(score, 1.0f);
      bounds.add(score + rounding, 1.0f);
    } else {
      scores.sum = score;
    }
  }
};

// Puts what replaces a far LSE into a row, here and in memory.
FA_DEVICE void replace_lse(const BwdFp32Params& params, SharedStorage& shared, int r,
                           RowStatistics statistics) {
  const uint32 entry = shared.work.entry;
  const int query = shared.work.first_own + r;
  statistics.add(static_cast<float>(load_sink_fp64(params.common, entry, query)), 0.0f);
  const SumOfExponentials &scores = statistics.scores, &bounds = statistics.bounds;
  if (!(scores.sum > 0.0f)) return;
  const float lse = shared.own_rows[kShift][r];
  const float difference = lse - (bounds.most + logf(bounds.sum));
  const bool covers_more_keys = difference > kLseToleranceFp32 * fabsf(lse);
  const float factor = covers_more_keys ? exp_of_difference(scores.most, lse) : 1.0f / scores.sum;
  shared.own_rows[kShift][r] = scores.most;
  shared.own_rows[kFactor][r] = factor;
  const int64 step = query_fields_step(params);
  float* to = params.rows + first_row_of<false>(params, entry) + query;
  to[kShift * step] = scores.most;
  to[kFactor * step] = factor;
  to[kExactDifference * step] = to[kExactRest * step] = FA_INFINITY;  // see exact_difference
}

// Of the rows of a thread.  In a struct: of a local array of arrays NVRTC 13.0 gives only the first
// array the values that members begin with, and zeros to the others.
struct Statistics {
  RowStatistics rows[kMmaM][2];
};

// Adds the scores of keys from `row` of a tile on.
FA_DEVICE void add_scores(const BwdFp32Params& params, const SharedStorage& shared, int stage,
                          int row, Statistics& statistics, const Scores& s) {
  // Scores that are products, whose terms may cancel, are rounded as the largest product that there
  // might be: numbers are below 2^15 times the square of the factor of their row.
  constexpr float kUnit = kSoftcap || kExpression ? 0.0f : kProductToleranceFp32 * 0x1p30f;
  const float unit = kUnit * fabsf(params.common.scale);
  float q_factor[kMmaM][2];
  read_own(shared, kQFactor, q_factor);
  const float2* k_factors = other_pairs(shared, stage, kKFactor, row);
#pragma unroll
  for (int n = 0; n < kMmaN; ++n) {
    const float2 two = k_factors[4 * n];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float factor = q_factor[m][e / 2] * of_pair(two, e);
        statistics.rows[m][e / 2].add(s[m][n][e], factor * factor * unit);
      }
    }
  }
}

// Replaces the LSE of the far rows of a warp, each of which four lanes share.
FA_DEVICE void replace_far(const BwdFp32Params& params, SharedStorage& shared,
                           Statistics& statistics) {
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int i = 0; i < 2 * kMmaM; ++i) {
    RowStatistics& own = statistics.rows[i / 2][i % 2];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      own.scores.add_of_lane(step);
      own.bounds.add_of_lane(step);
    }
    const int r = warp_row() + 8 * i + lane / 4;
    if (lane % 4 == 0 && is_far(shared.own_rows[kShift][r])) replace_lse(params, shared, r, own);
  }
}
