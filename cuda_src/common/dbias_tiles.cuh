// How kernels for the gradient of a bias divide it into tiles, whatever their arithmetic: which
// tile a block owns, which batch entries and tiles of pairs share its elements, and how sums over
// rows or columns of a tile are made and stored.
//
// `Params` has sums_queries and sums_keys, which say whether one element is of all queries or all
// keys, and splits, the blocks that share a tile, besides what dbias.cuh wants.
#pragma once
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/block_table.cuh"
#include "cuda_src/common/dbias.cuh"
#include "cuda_src/common/math_fp64.cuh"

// What a block owns, and which of the steps of it.
struct DbiasTile {
  uint32 output;             // index among all tiles of the gradient
  uint32 entry;              // of the gradient, counted over the axes that it has
  int query_tile, key_tile;  // 0 along an axis that is summed over
  int split;
  int64 begin, end;  // steps
};

// The tiles of one batch entry that a step computes.
struct PairStep {
  int64 index;
  uint32 entry;
  int query_tile, key_tile;
  bool in_band;
  int words_index;  // of its block of a mask
};

FA_DEVICE int tiles_of(int len, int tile) { return (len + tile - 1) / tile; }

// How many tiles of queries, or of keys, share an element.
template <int kTileM, typename Params>
FA_DEVICE int shared_query_tiles(const Params& params) {
  return params.sums_queries ? tiles_of(params.common.q_len, kTileM) : 1;
}
template <int kTileN, typename Params>
FA_DEVICE int shared_key_tiles(const Params& params) {
  return params.sums_keys ? tiles_of(params.common.k_len, kTileN) : 1;
}

template <int kTileM, int kTileN, typename Params>
FA_DEVICE void find_own_tile(const Params& params, DbiasTile& own) {
  const AttentionParams& p = params.common;
  const uint32 query_tiles = params.sums_queries ? 1 : tiles_of(p.q_len, kTileM);
  const uint32 key_tiles = params.sums_keys ? 1 : tiles_of(p.k_len, kTileN);
  own.output = blockIdx.x / params.splits;
  own.split = static_cast<int>(blockIdx.x - own.output * params.splits);
  const uint32 row = own.output / key_tiles;
  own.key_tile = static_cast<int>(own.output - row * key_tiles);
  own.entry = row / query_tiles;
  own.query_tile = static_cast<int>(row - own.entry * query_tiles);
  int64 steps =
      static_cast<int64>(shared_query_tiles<kTileM>(params)) * shared_key_tiles<kTileN>(params);
#pragma unroll
  for (int axis = 0; axis < kDbiasAxes; ++axis) {
    if (params.dbias_batch[axis] == 0) steps *= params.size[axis];
  }
  const int64 share = divide(steps + params.splits - 1, static_cast<int64>(params.splits));
  own.begin = min(steps, own.split * share);
  own.end = min(steps, own.begin + share);
}

// Finds the first step from this one on that neither the band nor a block of the mask hides whole.
// Without such a step, the one it returns is the end.
template <int kTileM, int kTileN, bool kSparse, typename Params>
FA_DEVICE void find_step(const Params& params, const DbiasTile& own, int64 index, PairStep& step) {
  const AttentionParams& p = params.common;
  const int64 shared_keys = shared_key_tiles<kTileN>(params),
              shared_queries = shared_query_tiles<kTileM>(params);
#pragma unroll 1
  for (; index < own.end; ++index) {
    const int64 row = divide(index, shared_keys), other = divide(row, shared_queries);
    const int query_tile = own.query_tile + static_cast<int>(row - other * shared_queries);
    const int key_tile = own.key_tile + static_cast<int>(index - row * shared_keys);
    const int first = query_tile * kTileM;
    const KeyTiles seen = key_tiles(p, first, min(first + kTileM, p.q_len) - 1, kTileN);
    if (key_tile < seen.begin || key_tile >= seen.end) continue;
    const uint32 entry = entry_of(params, own.entry, static_cast<uint32>(other));
    int words_index = kFullBlock;
    if constexpr (kSparse) {
      words_index =
          block_words_index(params.mask, table_row(params.mask, entry, first / kMaskBlock),
                            key_tile * kTileN / kMaskBlock);
    }
    if (words_index == kEmptyBlock) continue;
    step.entry = entry;
    step.query_tile = query_tile;
    step.key_tile = key_tile;
    step.in_band = key_tile >= seen.full_begin && key_tile < seen.full_end;
    step.words_index = words_index;
    break;
  }
  step.index = index;
}

// -------------------------------------------------------------------------------------------- sums
FA_DEVICE float shuffled(float x, int step) { return __shfl_xor_sync(kFullWarp, x, step); }
FA_DEVICE double shuffled(double x, int step) { return shfl_xor_fp64(x, step); }

// The sum of a row of the tile, or of a column, or of all of it, for the thread of this index.
// `sums` is shared memory, and `Warps` says which part of the tile a warp has, if any.
template <typename Warps, typename Params, typename Real, int kMmaM, int kMmaN>
FA_DEVICE Real sum_of_tile(const Params& params, Real* sums, const Real (&x)[kMmaM][kMmaN][4]) {
  const int tid = tid_x_again(), lane = tid % 32;
  if (params.sums_keys) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Real sum = 0;
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) sum += x[i][j][2 * h] + x[i][j][2 * h + 1];
        sum += shuffled(sum, 1);
        sum += shuffled(sum, 2);
        const int row = Warps::row() + 16 * i + 8 * h + lane / 4;
        if (Warps::have_sums() && lane % 4 == 0)
          sums[Warps::across(tid / 32) * Warps::kRows + row] = sum;
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Real sum = 0;
#pragma unroll
        for (int i = 0; i < kMmaM; ++i) sum += x[i][j][e] + x[i][j][e + 2];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += shuffled(sum, step);
        const int col = Warps::col() + 8 * j + lane * 2 + e;
        if (Warps::have_sums() && lane < 4) sums[Warps::down(tid / 32) * Warps::kCols + col] = sum;
      }
    }
  }
  __syncthreads();
  const int size = params.sums_keys ? Warps::kRows : Warps::kCols;
  const int parts = params.sums_keys ? Warps::kAcross : Warps::kDown;
  Real sum = 0;
  if (params.sums_keys && params.sums_queries) {
    for (int i = 0; tid == 0 && i < parts * size; ++i) sum += sums[i];
  } else if (tid < size) {
    for (int i = 0; i < parts; ++i) sum += sums[i * size + tid];
  }
  return sum;
}

// Stores the sum of a row of the tile, or of a column, or of all of it.
template <int kTileM, int kTileN, typename Params, typename Real>
FA_DEVICE void store_sum(const Params& params, const DbiasTile& own, Real x) {
  const AttentionParams& p = params.common;
  const int tid = tid_x_again();
  const int query = own.query_tile * kTileM + (params.sums_queries ? 0 : tid);
  const int key = own.key_tile * kTileN + (params.sums_keys ? 0 : tid);
  const int size = !params.sums_keys ? kTileN : params.sums_queries ? 1 : kTileM;
  if (tid >= size || query >= p.q_len || key >= p.k_len) return;
  const int64 start = dbias_offset(params, entry_of(params, own.entry, 0));
  store_rounded(params.dbias, start + query * params.dbias_row + key * params.dbias_col, x);
}
