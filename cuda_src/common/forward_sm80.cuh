// What kernels of attention forward by mma.sync share: the tiles that a mask lists, and what
// follows the last tile.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/recompute_row.cuh"
#include "cuda_src/common/sinks.cuh"
#include "cuda_src/common/softmax.cuh"

// --------------------------------------------------------------------------- tiles that are listed
// What a mask lists for the block's rows, in tiles of keys: kTilesPerBlock for each entry of
// a list.
struct ListedRange {
  int64 row;       // of blocks
  uint64 full[2];  // first and last + 1
  uint64 partial[2];

  __device__ __forceinline__ int full_count() const { return static_cast<int>(full[1] - full[0]); }
  __device__ __forceinline__ int count() const {
    return full_count() + static_cast<int>(partial[1] - partial[0]);
  }
};

// The i-th tile of keys that a mask lists, full blocks first.
struct ListedTile {
  bool partial;
  bool first_listed;  // of the partial block's tiles that are listed
  int64 position;     // of its block in the list
  int in_block;       // which of the block's tiles
};

template <int kTilesPerBlock>
FA_DEVICE ListedTile listed_tile(const ListedRange& listed, int i) {
  const int after_full = i - listed.full_count();
  const bool partial = after_full >= 0;
  const uint64 tile = partial ? listed.partial[0] + after_full : listed.full[0] + i;
  const int in_block = static_cast<int>(tile % kTilesPerBlock);
  return {partial, in_block == 0 || after_full == 0, static_cast<int64>(tile / kTilesPerBlock),
          in_block};
}

// Finds what a mask lists for a row of blocks of the tiles that a band leaves.  Each warp finds one
// end of one list.
template <int kTilesPerBlock>
FA_DEVICE void find_listed_range(const MaskLists& mask, ListedRange& listed,
                                 const KeyTiles& tiles) {
  const int warp = threadIdx.x / 32, last = warp % 2;
  const bool partial = warp >= 2;
  const int64 begin = (partial ? mask.partial_begin : mask.full_begin)[listed.row];
  const int64 end = (partial ? mask.partial_end : mask.full_end)[listed.row];
  const int64 end_position = lower_bound_tile<kTilesPerBlock>(
      partial ? mask.partial : mask.full, begin, end, last ? tiles.end : tiles.begin);
  if (threadIdx.x % 32 == 0) (partial ? listed.partial : listed.full)[last] = end_position;
}

// ---------------------------------------------------------------------------------------- epilogue
// first_row is the first row that a thread holds; the others are first_row + 16 i + 8 h.

// Adds the sink of each row to its statistics, and says what its output is to be multiplied by.
template <int kMmaM>
FA_DEVICE void add_sinks(const AttentionParams& params, const TileWork& work,
                         OnlineSoftmax<kMmaM>& softmax, float (&correction)[kMmaM][2],
                         int first_row) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + 16 * i + 8 * h, params.q_len - 1);
      const float sink = sink_in_log2(load_sink(params, work.batch, row));
      correction[i][h] = add_sink(sink, softmax.row_max[i][h], softmax.row_sum[i][h]);
    }
  }
}

// Makes NaN of the sums of rows whose sequence is invalid, and so of their results.
template <int kMmaM>
FA_DEVICE void mark_invalid_rows(const AttentionParams& params, OnlineSoftmax<kMmaM>& softmax,
                                 int first_row) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (is_invalid_row(params, first_row + 16 * i + 8 * h)) softmax.row_sum[i][h] = FA_NAN;
    }
  }
}

// Writes the log-sum-exp of each row.  Called by one of the four threads that share the rows.
template <int kMmaM>
FA_DEVICE void write_lse(const AttentionParams& params, const TileWork& work,
                         const OnlineSoftmax<kMmaM>& softmax, int first_row) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 16 * i + 8 * h;
      if (row < params.q_len) {
        params.lse[work.batch * params.q_len + row] =
            log_sum_exp(softmax.row_max[i][h], softmax.row_sum[i][h]);
      }
    }
  }
}

// Finds the rows that are to be computed again, as bits of the lanes that hold them.  Returns
// whether the warp has any.
template <bool kMasked, int kMmaM, int kMmaV>
FA_DEVICE bool find_rows_to_recompute(const AttentionParams& params, const TileWork& work,
                                      const OnlineSoftmax<kMmaM>& softmax,
                                      const float (&o)[kMmaM][kMmaV][4], int first_row,
                                      uint32 (&recompute_lanes)[kMmaM][2]) {
  uint32 any_recompute = 0;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_sum = softmax.row_sum[i][h];
      float probe = 0.0f * row_sum;  // NaN as soon as one accumulator, or this, is NaN or infinite
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        probe = fmaf(o[i][j][2 * h + 1], 0.0f, fmaf(o[i][j][2 * h], 0.0f, probe));
      }
      const bool exceeds_float32 = exceeds_float32_scores<!kScoreMod, kMasked>(
          params, band_of(params, work), first_row + 16 * i + 8 * h, softmax.row_max[i][h],
          row_sum);
      recompute_lanes[i][h] = __ballot_sync(kFullWarp, exceeds_float32 || probe != probe);
      any_recompute |= recompute_lanes[i][h];
    }
  }
  return any_recompute != 0;
}

// Computes rows of a warp again, key by key, and writes them.
template <bool kBf16, int kDim, bool kMasked, typename Element, int kMmaM>
FA_DEVICE void recompute_rows(const AttentionParams& params, const TileWork& work, Element* out,
                              OnlineSoftmax<kMmaM>& softmax, uint32 (&recompute_lanes)[kMmaM][2],
                              int warp) {
  constexpr int kWarpRows = 16 * kMmaM;
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < kWarpRows; ++r) {
    const int row = work.q_begin + warp * kWarpRows + r;
    const int row_lane = r % 8 * 4;  // the row's first lane
    bool recompute = (recompute_lanes[0][0] >> row_lane & 15) != 0 && row < params.q_len;
    if constexpr (kPacked || kLengths) {
      recompute = recompute && !is_invalid_row(params, work, row);
    }
    if (recompute) {
      Element* to = out + static_cast<int64>(row - work.q_begin) * params.out_row;
      recompute_row<kBf16, kDim, kMasked>(
          params, work.at, dense_keys<Element>(params, work.at, band_of(params, work)), work.batch,
          row, __shfl_sync(kFullWarp, softmax.row_max[0][0], row_lane),
          __shfl_sync(kFullWarp, softmax.row_sum[0][0], row_lane),
          [&](int col, Element x) { to[col] = x; });
    }
    if (r % 8 < 7) continue;
    // Registers have no index: what belongs to the next eight rows moves to the first place.
#pragma unroll
    for (int part = 1; part < 2 * kMmaM; ++part) {
      recompute_lanes[(part - 1) / 2][(part - 1) % 2] = recompute_lanes[part / 2][part % 2];
      softmax.row_max[(part - 1) / 2][(part - 1) % 2] = softmax.row_max[part / 2][part % 2];
      softmax.row_sum[(part - 1) / 2][(part - 1) % 2] = softmax.row_sum[part / 2][part % 2];
    }
  }
}
