// What the kernels of attention backward in float32 and float64 share.
//
// A block owns rows of one side of the pairs, queries or keys, and walks over tiles of the other
// side.  Of each side there are two arrays: 0 is Q or K, 1 is dO or V.  So S, or its transpose, is
// the product of the arrays 0, and dP is that of the arrays 1.  A weight is factor * exp(score -
// shift): shift is the LSE and factor 1, unless the LSE is so large that its rounding would show in
// the weights.  Then shift is the row's largest score and factor 1 / (the sum of exponentials).
//
// Rows of gradients that come out not finite are computed again in float64, pair by pair.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/block_table.cuh"
#include "cuda_src/common/math_fp64.cuh"
#include "cuda_src/common/rows_fp64.cuh"
#include "cuda_src/common/score.cuh"

// --------------------------------------------------------------------------------------- constants
constexpr bool kOwnKeys = FA_OWN_KEYS;  // whether a block owns keys, else queries
constexpr int kDim = FA_DIM;            // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;       // queries of a tile
constexpr int kTileN = FA_TILE_N;       // keys of a tile
constexpr int kWarps = FA_WARPS;        // of a block
constexpr int kStages = FA_STAGES;      // tiles of the other side in shared memory
constexpr bool kSparse = FA_SPARSE;     // with a mask
constexpr int kThreads = 32 * kWarps;
constexpr int kOwnRows = kOwnKeys ? kTileN : kTileM, kOtherRows = kOwnKeys ? kTileM : kTileN;
constexpr int kAxes = 3;  // of the batch
static_assert(kMaskBlock % kTileM == 0 && kMaskBlock % kTileN == 0, "tiles divide a mask's blocks");

// -------------------------------------------------------------------------------------- parameters
template <typename Real>
struct StridedArray {
  Real* start;
  int64 row, batch[kAxes];  // strides, in elements; 0 along an axis that broadcasts
};

// Passed by value.  gradients/backward_rows.py holds the same fields in the same order.  A Row is
// what is known of a query.
template <typename Real, typename Row>
struct BwdRowsParams {
  AttentionParams common;  // without arrays but the bias and the sinks
  StridedArray<Real> q, k, v, out, dout, dq, dk, dv;
  MaskTable mask;          // by rows of blocks of the side that a kernel owns
  const Real *lse, *dlse;  // (*batch, q_len) dense; dlse is null for zeros
  Row* rows;               // of queries
  double scale;            // of a product
  double softcap, factor;  // softcap * tanh(factor * product), in builds with a softcap
  int size[kAxes];         // of the batch
  int group;               // how many entries, along the last axis, share keys and values
  int entry_rows;          // q_len, padded to whole tiles
  int aligned;             // 1: every row of the arrays starts at a multiple of 16 bytes
};

// Where a row of a batch entry begins.
template <typename Params, typename Real>
FA_DEVICE Real* row_start(const Params& params, const StridedArray<Real>& array, uint32 entry,
                          int row) {
  Real* start = array.start + row * array.row;
#pragma unroll
  for (int axis = kAxes - 1; axis > 0; --axis) {
    const uint32 size = params.size[axis];
    start += entry % size * array.batch[axis];
    entry /= size;
  }
  return start + entry * array.batch[0];
}

// -------------------------------------------------------------------------------------------- work
// A KeyBand, and the queries that first_query() and last_query() count.
struct EntryBand : KeyBand {
  int q_len;
};

// What the block has to do.
struct WorkTile {
#if FA_LENGTHS
  EntryBand band;  // of the entry
#endif
  uint32 entry;              // of the block's rows; of keys, the first of those that share them
  int first_own;             // the block's first row
  int begin, end;            // tiles of the other side
  int full_begin, full_end;  // those of them all of whose pairs count
  int any_far;               // whether a row has an LSE that is far
};

// A tile of the other side; of one of the heads that share keys.
struct OtherTile {
  int head, tile;
};

template <typename Params>
FA_DEVICE void find_entry_band(const Params& params, WorkTile& work) {
  find_band(params.common, work, work.entry);
#if FA_LENGTHS
  work.band.q_len = params.common.q_len;
#endif
}

// The tiles of queries that see some of the block's keys.
template <typename Band>
FA_DEVICE QueryTiles tiles_of_keys(const Band& band, int first_own) {
  QueryTiles tiles =
      query_tiles(band, first_own, min(first_own + kOwnRows, band.k_len) - 1, kOtherRows);
  if constexpr (kLengths) {  // keys behind the last one are rows of gradients, too
    if (first_own >= band.k_len) return {0, 0, 0, 0};
    if (first_own + kOwnRows > band.k_len) tiles.full_end = tiles.full_begin;
  }
  return tiles;
}

// Finds the rows of the block and the tiles of the other side, by one thread.
template <typename Params>
FA_DEVICE void find_work(const Params& params, WorkTile& work) {
  const AttentionParams& p = params.common;
  const int own_len = kOwnKeys ? p.k_len : p.q_len;
  const uint32 own_tiles = (own_len + kOwnRows - 1) / kOwnRows;
  const uint32 entry = blockIdx.x / own_tiles;
  const int place = static_cast<int>(blockIdx.x - entry * own_tiles);
  work.any_far = 0;
  // Under a causal mask the first keys are seen by the most queries, and the last queries see the
  // most keys: these go first.
  if constexpr (kOwnKeys) {
    work.entry = entry * params.group;
    work.first_own = place * kOwnRows;
    find_entry_band(params, work);
    const QueryTiles tiles = tiles_of_keys(band_of(p, work), work.first_own);
    work.begin = tiles.begin, work.end = tiles.end;
    // Not those that reach behind the last query.
    work.full_begin = tiles.full_begin, work.full_end = min(tiles.full_end, p.q_len / kOtherRows);
  } else {
    work.entry = entry;
    work.first_own = (static_cast<int>(own_tiles) - 1 - place) * kOwnRows;
    find_entry_band(params, work);
    const KeyTiles tiles = key_tiles(band_of(p, work), work.first_own,
                                     min(work.first_own + kOwnRows, own_len) - 1, kOtherRows);
    work.begin = tiles.begin, work.end = tiles.end;
    work.full_begin = tiles.full_begin, work.full_end = tiles.full_end;
  }
}

template <typename Params>
FA_DEVICE int mask_row(const Params& params, uint32 entry, int own_row) {
  return table_row(params.mask, entry, own_row / kMaskBlock);
}

// How many heads a block walks over.
template <typename Params>
FA_DEVICE int heads_of(const Params& params) {
  return kOwnKeys ? params.group : 1;
}

// The first tile from `at` on that a mask does not hide.  Where all are hidden, the head of the
// result is heads_of().
template <typename Params>
FA_DEVICE OtherTile next_visible(const Params& params, const WorkTile& work, OtherTile at) {
  if (work.begin >= work.end) return {heads_of(params), 0};
  while (at.head < heads_of(params)) {
    if constexpr (kSparse) {
      const int row = mask_row(params, work.entry + at.head, work.first_own);
      at.tile = next_tile<kOtherRows>(params.mask, row, at.tile, work.end);
    }
    if (at.tile < work.end) break;
    at = {at.head + 1, work.begin};
  }
  return at;
}

// ------------------------------------------------------------------------------ weights in float64
template <typename Params>
FA_DEVICE ScoreAndSlope<double> score_and_slope_fp64(const Params& params, const BatchOffsets& at,
                                                     double product, int query, int key) {
  const AttentionParams& p = params.common;
  if constexpr (kExpression)
    return expression_of<double>(p, at, params.scale * product, query, key);
  ScoreAndSlope<double> found = {params.scale * product, 1.0};
  if constexpr (kSoftcap) {
    const double part = tanh(params.factor * product);
    found = {params.softcap * part, 1.0 - part * part};
  }
  if constexpr (kHasBias) found.score += load_bias<double>(p, at.bias, query, key);
  return found;
}

// e**x of what an LSE that belongs to the scores leaves below 700, and not infinite of any other.
FA_DEVICE double exp_of_difference_fp64(double x) { return exp_fp64(x > 700.0 ? 700.0 : x); }

template <typename Row>
FA_DEVICE double weight_fp64(const Row& row, double score) {
  return row.factor * exp_of_difference_fp64(score - row.shift);
}

// A weight times the slope of its score, which may be anything of a pair that does not count.
FA_DEVICE double times_slope(double weight, double slope) {
  if constexpr (!kHasSlope) return weight;
  return kExpressionHasSlope && weight == 0.0 ? 0.0 : weight * slope;
}

template <typename Params>
FA_DEVICE BatchOffsets operand_offsets(const Params& params, uint32 entry) {
  if constexpr (kHasOperands) return batch_offsets(params.common, entry);
  return {0, 0, 0, 0, 0};
}

// ------------------------------------------------------------------------------------ rows by hand
// Whether a mask leaves a pair.
template <typename Params>
FA_DEVICE bool mask_leaves(const Params& params, uint32 entry, int query, int key) {
  const int own = kOwnKeys ? key : query, other = kOwnKeys ? query : key;
  const int words_index =
      block_words_index(params.mask, mask_row(params, entry, own), other / kMaskBlock);
  if (words_index < 0) return words_index == kFullBlock;
  return block_bit(partial_block_words(params.mask, words_index), own % kMaskBlock,
                   other % kMaskBlock);
}

// What a pair adds to gradients, and dout . v - delta; `counts` is false where the pair is hidden,
// or its score is -inf.
struct PairTerms {
  bool counts;
  double weight, ds, dp;
};

// A product of a row of a query's array and one of a key's.
template <typename Params, typename OfQuery, typename OfKey>
FA_DEVICE double dot_of_pair(const Params& params, uint32 entry, const OfQuery& of_query, int query,
                             const OfKey& of_key, int key, int cols) {
  return dot_of_warp(row_start(params, of_query, entry, query),
                     row_start(params, of_key, entry, key), cols);
}

// The score of a pair: -inf where it is hidden.
template <typename Params>
FA_DEVICE ScoreAndSlope<double> pair_score(const Params& params, uint32 entry, int query, int key) {
  if constexpr (kSparse) {
    if (!mask_leaves(params, entry, query, key)) return {-FA_INFINITY, 0.0};
  }
  return score_and_slope_fp64(
      params, operand_offsets(params, entry),
      dot_of_pair(params, entry, params.q, query, params.k, key, params.common.head_dim), query,
      key);
}

template <typename Params, typename Row>
FA_DEVICE PairTerms pair_terms(const Params& params, uint32 entry, const Row& row, int query,
                               int key) {
  const auto found = pair_score(params, entry, query, key);
  if (found.score == -FA_INFINITY) return {false, 0.0, 0.0, 0.0};
  const double weight = weight_fp64(row, found.score);
  const int cols = params.common.v_dim;
  const double dp = dot_of_pair(params, entry, params.dout, query, params.v, key, cols) - row.delta;
  return {true, weight, times_slope(weight, found.slope) * dp, dp};
}

// Where this warp's columns of the sums begin, which kernels say.
FA_DEVICE int warp_col();

// The columns of a row that a warp computes again, kCols of them: a lane has every 32nd.
template <int kCols>
struct RowSums {
  double sums[(kCols + 31) / 32];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (double& sum : sums) sum = 0.0;
  }
  // Calls f(sum, column) for those of them that exist.
  template <typename F>
  __device__ __forceinline__ void for_each(int cols, const F& f) {
    const int first = warp_col(), end = min(first + kCols, cols);
#pragma unroll
    for (int i = 0; i < (kCols + 31) / 32; ++i) {
      const int col = first + threadIdx.x % 32 + 32 * i;
      if (col < end) f(sums[i], col);
    }
  }
  // Whether nothing that is added would change them.
  __device__ __forceinline__ bool are_nan(int cols) {
    bool found = true;
    for_each(cols, [&](double& sum, int) { found &= sum != sum; });
    return __all_sync(kFullWarp, found);
  }
};

// A warp computes its columns of a row of dQ again, without pairs that do not count.  Terms are
// scaled before they are added: what overflows is then the sum itself.
template <int kCols, typename Params, typename Row>
FA_DEVICE void recompute_dq(const Params& params, const WorkTile& work, const Row& row, int query) {
  const AttentionParams& p = params.common;
  const uint32 entry = work.entry;
  RowSums<kCols> again;
  again.clear();
  const int end = last_key(band_of(p, work), query);
#pragma unroll 1
  for (int key = first_key(band_of(p, work), query); key <= end; ++key) {
    const PairTerms terms = pair_terms(params, entry, row, query, key);
    if (!terms.counts) continue;
    const auto* k = row_start(params, params.k, entry, key);
    again.for_each(p.head_dim, [&](double& sum, int col) {
      sum = fma(params.scale * terms.ds, static_cast<double>(k[col]), sum);
    });
    if (again.are_nan(p.head_dim)) break;
  }
  auto* to = row_start(params, params.dq, entry, query);
  again.for_each(p.head_dim, [&](double& sum, int col) { to[col] = sum; });
}

// The same for dV, or dK, of one key; row_of(entry, query) is what is known of a query.
template <int kCols, typename Params, typename RowOf>
FA_DEVICE void recompute_key(const Params& params, const WorkTile& work, const RowOf& row_of,
                             int key, bool of_values) {
  const AttentionParams& p = params.common;
  const auto& array = of_values ? params.dout : params.q;
  const auto& band = band_of(p, work);
  const int cols = of_values ? p.v_dim : p.head_dim;
  const int end = kLengths && key >= band.k_len ? -1 : last_query(band, key);
  RowSums<kCols> again;
  again.clear();
#pragma unroll 1
  for (int head = 0; head < params.group; ++head) {
    const uint32 entry = work.entry + head;
#pragma unroll 1
    for (int query = first_query(band, key); query <= end; ++query) {
      const auto& row = row_of(entry, query);
      const PairTerms terms = pair_terms(params, entry, row, query, key);
      if (!terms.counts) continue;
      const double factor = of_values ? terms.weight : params.scale * terms.ds;
      const auto* from = row_start(params, array, entry, query);
      again.for_each(cols, [&](double& sum, int col) {
        sum = fma(factor, static_cast<double>(from[col]), sum);
      });
      if (again.are_nan(cols)) break;  // as they will be at once with the next head
    }
  }
  auto* to = row_start(params, of_values ? params.dv : params.dk, work.entry, key);
  again.for_each(cols, [&](double& sum, int col) { to[col] = sum; });
}
