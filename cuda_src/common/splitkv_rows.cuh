// Rows of fwd_splitkv: what the splits of a row add up to, and the output that is made of it.
//
// Splits are added up in their order, so that results do not depend on timing.  Rows that come out
// non-finite, and those whose scores float32 does not carry, are computed again
// (recompute_row.cuh).
#pragma once
#include "cuda_src/common/recompute_row.cuh"
#include "cuda_src/common/sinks.cuh"
#include "cuda_src/common/softmax.cuh"
#include "cuda_src/common/splitkv.cuh"
#include "ptx/atomic.cuh"

constexpr int kCols = kDim / 32;   // columns of a row that a lane has: every 32nd
constexpr int kSplitsAtATime = 8;  // splits of a row that a warp has on their way

// What some keys add to a row, spread over a warp.
struct RowSums {
  float row_max, row_sum;  // row_max is NaN if the entry's length or page numbers are out of range
  float acc[kCols];
};

FA_DEVICE bool is_nan(float x) { return x != x; }

FA_DEVICE void clear(RowSums& sums) {
  sums.row_max = kNoMax;
  sums.row_sum = 0.0f;
#pragma unroll
  for (float& x : sums.acc) x = 0.0f;
}

// Whether there are no keys, and no output either.  Weights of large scores may all be 0, and then
// row_max says that the row is to be computed again.
FA_DEVICE bool has_no_keys(float row_max, float row_sum) {
  return row_max == kNoMax && row_sum == 0.0f;
}

// Adds sums to others.  Without keys, what stands in place of the output is not read.
FA_DEVICE void add_sums(RowSums& to, float row_max, float row_sum, const float (&acc)[kCols]) {
  if (is_nan(row_max)) to.row_max = row_max;
  if (is_nan(to.row_max) || has_no_keys(row_max, row_sum)) return;
  const float new_max = fmaxf(to.row_max, row_max);
  const float old_factor = ex2_approx_ftz(to.row_max - new_max);
  const float factor = ex2_approx_ftz(row_max - new_max);
  to.row_max = new_max;
  to.row_sum = to.row_sum * old_factor + row_sum * factor;
#pragma unroll
  for (int i = 0; i < kCols; ++i) to.acc[i] = to.acc[i] * old_factor + acc[i] * factor;
}

// ------------------------------------------------------------------------------------ other blocks
// Leaves the sums of a split of a row, of those of all entries, in global memory.
FA_DEVICE void write_split(const FwdSplitkvParams& params, int split, int64 row,
                           const RowSums& sums) {
  const int lane = threadIdx.x % 32;
  const int64 at = split * params.rows + row;
  if (lane == 0) {
    reinterpret_cast<float2*>(params.partial_stats)[at] = make_float2(sums.row_max, sums.row_sum);
  }
  if (has_no_keys(sums.row_max, sums.row_sum)) return;
#pragma unroll
  for (int i = 0; i < kCols; ++i) params.partial_out[at * kDim + lane + 32 * i] = sums.acc[i];
}

// Adds up all splits of a row.  What is loaded at a time is asked for before it is used.
FA_DEVICE void read_splits(const FwdSplitkvParams& params, int64 row, RowSums& sums) {
  const int lane = threadIdx.x % 32;
  clear(sums);
#pragma unroll 1
  for (int first = 0; first < params.splits; first += kSplitsAtATime) {
    float2 stats[kSplitsAtATime];
    float acc[kSplitsAtATime][kCols];
#pragma unroll
    for (int i = 0; i < kSplitsAtATime; ++i) {
      // Past the last split it is loaded once more, and not added.
      const int64 at = min(first + i, params.splits - 1) * params.rows + row;
      stats[i] = reinterpret_cast<const float2*>(params.partial_stats)[at];
#pragma unroll
      for (int j = 0; j < kCols; ++j) acc[i][j] = params.partial_out[at * kDim + lane + 32 * j];
    }
#pragma unroll
    for (int i = 0; i < kSplitsAtATime; ++i) {
      if (first + i < params.splits) add_sums(sums, stats[i].x, stats[i].y, acc[i]);
    }
  }
}

// Counts a block's split as done, by one thread, and returns how many of its tile of queries were
// done before.  What a block has written before a barrier can then be read by the one that gets the
// last number.  The memory of the counter comes as it is: it has the low 56 bits of the launch's
// mark, above the count, or anything else if no block of the tile has come yet.  Only the first few
// to come exchange: that all did, one after the other, cost 20 us with 30 splits.
FA_DEVICE int arrive(const FwdSplitkvParams& params, uint32 tile) {
  uint64* word = params.arrivals + tile;
  const uint64 none = params.mark << 8;
  uint64 seen = *const_cast<volatile uint64*>(word);
  while (seen >> 8 != none >> 8) {
    const uint64 old = atom_cas_acq_rel_gpu_b64(word, seen, none + 1);
    if (old == seen) return 0;
    seen = old;
  }
  return static_cast<int>(atom_add_acq_rel_gpu_u64(word, 1) & 255);
}

// ------------------------------------------------------------------------------------------ output
// Writes a row of the output, by a warp.
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
  write_row<kBf16, uint16>(p, sums.acc, write);
}
