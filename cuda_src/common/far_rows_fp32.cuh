// Rows of queries of float32 whose log-sum-exp is so far from 0 that its rounding would show in
// their weights: what replaces it, for kernels that compute dQ.
#pragma once
#include "cuda_src/common/backward_fp32.cuh"

// An LSE that is larger than that of a row's own scores by more than a part of itself, and than
// that of the scores without rounding, is one of more keys: results over parts of the keys were
// merged.  Less is rounding: of an LSE by two units in the last place, of a score by a part of the
// largest product that there might be, which is larger where a score has more products.
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

// The largest score of a row, and the sum of exponentials relative to it, NaN where scores may have
// lost digits that count.  Also the largest score that there might be without rounding: of a key
// that is much longer than the one with the largest score, whose products cancel.
struct RowStatistics {
  float row_max = kNoMaxFp32, row_sum = 0.0f, row_bound = kNoMaxFp32;

  __device__ __forceinline__ void merge(const RowStatistics& other) {
    const float most = fmaxf(row_max, other.row_max);
    row_sum = row_sum * exp_of_difference(row_max, most) +
              other.row_sum * exp_of_difference(other.row_max, most);
    row_max = most;
    row_bound = fmaxf(row_bound, other.row_bound);
  }
  __device__ __forceinline__ void add(float score, float rounding) {
    if (score == -FA_INFINITY) return;
    if (score == score) {
      merge({score, 1.0f, score + rounding});
    } else {
      row_sum = score;
    }
  }
};

// Puts what replaces a far LSE into a row, here and in memory.
FA_DEVICE void replace_lse(const BwdFp32Params& params, SharedStorage& shared, int r,
                           RowStatistics statistics) {
  const uint32 entry = shared.work.entry;
  const int query = shared.work.first_own + r;
  statistics.add(static_cast<float>(load_sink_fp64(params.common, entry, query)), 0.0f);
  if (!(statistics.row_sum > 0.0f)) return;
  const float lse = shared.own_rows[kShift][r], log_sum = logf(statistics.row_sum);
  const float rounding = kLseToleranceFp32 * fabsf(lse);
  const bool covers_more_keys =
      lse - (statistics.row_max + log_sum) > rounding && lse - log_sum > statistics.row_bound;
  const float factor =
      covers_more_keys ? exp_of_difference(statistics.row_max, lse) : 1.0f / statistics.row_sum;
  shared.own_rows[kShift][r] = statistics.row_max;
  shared.own_rows[kFactor][r] = factor;
  float* to = params.rows + first_row_of<false>(params, entry) + query;
  to[kShift * query_fields_step(params)] = statistics.row_max;
  to[kFactor * query_fields_step(params)] = factor;
  to[kExactDifference * query_fields_step(params)] = FA_INFINITY;  // not known yet
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
      own.merge({__shfl_xor_sync(kFullWarp, own.row_max, step),
                 __shfl_xor_sync(kFullWarp, own.row_sum, step),
                 __shfl_xor_sync(kFullWarp, own.row_bound, step)});
    }
    const int r = warp_row() + 8 * i + lane / 4;
    if (lane % 4 == 0 && is_far(shared.own_rows[kShift][r])) replace_lse(params, shared, r, own);
  }
}
