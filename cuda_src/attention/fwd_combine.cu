// Joins the splits of fwd_splitkv: a warp for each row of the output, or more where a row has many.
//
// The splits' sums are brought to one row_max and added up in the order of the warps and, in a
// warp, of the splits, so that results do not depend on timing.  Rows that come out non-finite, and
// those whose scores float32 does not carry, are computed again here (recompute_row.cuh).
#include "cuda_src/common/recompute_row.cuh"
#include "cuda_src/common/sinks.cuh"
#include "cuda_src/common/softmax.cuh"
#include "cuda_src/common/splitkv.cuh"

constexpr int kWarps = FA_WARPS;
constexpr int kCols = kDim / 32;  // columns of a row that a lane has: every 32nd
constexpr int kSplits = 8;        // of a warp that are on their way at a time

// What some splits of a row add up to.
struct RowSums {
  float row_max, row_sum;  // row_max is NaN if the entry's length or page numbers are out of range
  float acc[kCols];
};
struct SharedStorage {
  float acc[kWarps][kDim];
  float row_max[kWarps], row_sum[kWarps];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

FA_DEVICE bool is_nan(float x) { return x != x; }

// Adds sums to others.  Without keys there is no output: what stands in its place is not read.
// Weights of large scores may all be 0, and then row_max says that the row is to be computed again.
FA_DEVICE void add_sums(RowSums& to, float row_max, float row_sum, const float (&acc)[kCols]) {
  if (is_nan(row_max)) to.row_max = row_max;
  if (is_nan(to.row_max) || (row_max == kNoMax && row_sum == 0.0f)) return;
  const float new_max = fmaxf(to.row_max, row_max);
  const float old_factor = ex2_approx_ftz(to.row_max - new_max);
  const float factor = ex2_approx_ftz(row_max - new_max);
  to.row_max = new_max;
  to.row_sum = to.row_sum * old_factor + row_sum * factor;
#pragma unroll
  for (int i = 0; i < kCols; ++i) to.acc[i] = to.acc[i] * old_factor + acc[i] * factor;
}

FA_DEVICE void clear(RowSums& sums) {
  sums.row_max = kNoMax;
  sums.row_sum = 0.0f;
#pragma unroll
  for (float& x : sums.acc) x = 0.0f;
}

// Adds up the splits of a row that fall to one of its warps: all that it loads at a time is asked
// for before it is used.
FA_DEVICE void add_splits(const FwdSplitkvParams& params, int64 row, int warp_of_row,
                          RowSums& sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = warp_of_row * kSplits; first < params.splits;
       first += params.row_warps * kSplits) {
    float2 stats[kSplits];
    float acc[kSplits][kCols];
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      // Of splits that there are not, the last one is loaded and not added.
      const int64 at = min(first + i, params.splits - 1) * params.rows + row;
      stats[i] = reinterpret_cast<const float2*>(params.partial_stats)[at];
#pragma unroll
      for (int j = 0; j < kCols; ++j) acc[i][j] = params.partial_out[at * kDim + lane + 32 * j];
    }
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      if (first + i < params.splits) add_sums(sums, stats[i].x, stats[i].y, acc[i]);
    }
  }
}

// Adds up what the warps of a row have; in the first of them the result is right.
FA_DEVICE void add_warps(const FwdSplitkvParams& params, SharedStorage& shared, int warp,
                         RowSums& sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCols; ++i) shared.acc[warp][lane + 32 * i] = sums.acc[i];
  if (lane == 0) {
    shared.row_max[warp] = sums.row_max;
    shared.row_sum[warp] = sums.row_sum;
  }
  __syncthreads();
  if (warp % params.row_warps > 0) return;
#pragma unroll 1
  for (int other = warp + 1; other < warp + params.row_warps; ++other) {
    float acc[kCols];
#pragma unroll
    for (int i = 0; i < kCols; ++i) acc[i] = shared.acc[other][lane + 32 * i];
    add_sums(sums, shared.row_max[other], shared.row_sum[other], acc);
  }
}

// Writes the row, by a warp.
FA_DEVICE void finish_row(const FwdSplitkvParams& params, int64 batch, int query, RowSums& sums) {
  const AttentionParams& p = params.common;
  const BatchOffsets offsets = batch_offsets(p, batch);
  uint16* out = static_cast<uint16*>(p.out) + offsets.out + static_cast<int64>(query) * p.out_row;
  const auto write = [&](int col, uint16 x) { out[col] = x; };
  const bool is_invalid = is_nan(sums.row_max);
  float correction = 1.0f;
  if (p.sinks != nullptr && !is_invalid) {
    const float sink = sink_in_log2(load_sink(p, batch, query));
    correction = add_sink(sink, sums.row_max, sums.row_sum);
  }
  if (is_invalid) sums.row_sum = sums.row_max;
  if (p.lse != nullptr && threadIdx.x % 32 == 0) {
    p.lse[batch * p.q_len + query] = log_sum_exp(sums.row_max, sums.row_sum);
  }
  const float factor = correction * inverse_sum(sums.row_sum);
  float probe = 0.0f * sums.row_sum;
#pragma unroll
  for (float& x : sums.acc) {
    x *= factor;
    probe = fmaf(x, 0.0f, probe);
  }
  // One question first: hardly any row is to be computed again, and what it needs is to be loaded.
  const bool is_extreme = fabsf(sums.row_max) >= kCoarseScore || is_nan(probe);
  if (__any_sync(kFullWarp, is_extreme) && !is_invalid) {
    const EntryKeys keys = entry_keys(params, offsets, batch);
    const bool exceeds_float32 = exceeds_float32_scores<!kScoreMod, false>(
        p, keys.own_band, query, sums.row_max, sums.row_sum);
    if (__any_sync(kFullWarp, exceeds_float32 || is_nan(probe))) {
      return recompute_row<kBf16, kDim, false>(p, offsets, keys, batch, query, write);
    }
  }
  write_row<kBf16>(p, sums.acc, write);
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2)
    attention_fwd_combine(const __grid_constant__ FwdSplitkvParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  const int warp = threadIdx.x / 32, warp_of_row = warp % params.row_warps;
  const int64 row =
      static_cast<int64>(blockIdx.x) * (kWarps / params.row_warps) + warp / params.row_warps;
  const bool exists = row < params.rows;
  RowSums sums;
  clear(sums);
  if (exists) add_splits(params, row, warp_of_row, sums);
  if (params.row_warps > 1) add_warps(params, shared, warp, sums);
  if (!exists || warp_of_row > 0) return;
  const int64 batch = divide(row, static_cast<int64>(p.q_len));
  finish_row(params, batch, static_cast<int>(row - batch * p.q_len), sums);
}
