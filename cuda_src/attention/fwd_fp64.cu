// Attention forward in float64 for SM80 and later: mma.sync, cp.async.
//
// One block takes kTileM query rows of one batch entry; a warp takes 16 of them and, tile by
// tile of kTileN keys, computes S = Q K^T, turns S into weights P by the online softmax and adds
// P V.  S, P and O stay in registers as accumulators, and P is the next A operand without a shuffle
// (mma_fp64.cuh).  Where O is too wide for the registers, kColumnWarps warps share rows: each
// computes all of P and a part of O's columns.
//
// K and V have one buffer each.  V of a tile lands during the product with its K, and the next K
// during the softmax and the product with V: both products take far longer than their loads.
//
// With a mask the tiles of keys are those that its lists name for the block's rows, full ones
// first.  A thread reads the number of the next tile, and its own words of a partial block, from
// global memory while a product runs.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/forward_sm80.cuh"
#include "cuda_src/common/math_fp64.cuh"
#include "cuda_src/common/mma_fp64.cuh"
#include "cuda_src/common/rows_fp64.cuh"
#include "cuda_src/common/score.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kDim = FA_DIM;                   // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;              // query rows of a block
constexpr int kTileN = FA_TILE_N;              // keys of a tile
constexpr int kWarps = FA_WARPS;               // of a block
constexpr int kMinBlocks = FA_BLOCKS;          // blocks that should fit on a multiprocessor
constexpr int kColumnWarps = FA_COLUMN_WARPS;  // warps that share rows
constexpr bool kWideMma = FA_WIDE_MMA;         // m16n8k16, which SM90 has
constexpr bool kSparse = FA_SPARSE;            // with a mask
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kTileM / (kWarps / kColumnWarps), kWarpCols = kDim / kColumnWarps;
constexpr int kMmaM = kWarpRows / 16, kMmaN = kTileN / 8, kMmaV = kWarpCols / 8;
static_assert(kTileM == kWarps / kColumnWarps * kMmaM * 16 && kMmaM >= 1 && kMmaM <= 2,
              "a warp owns whole 16-row products, and a bit of a word for each row");
// Tiles of keys in a block of a mask.
constexpr int kTilesPerBlock = kSparse ? kMaskBlock / kTileN : 1;
static_assert(!kSparse || (kTilesPerBlock * kTileN == kMaskBlock && kMaskBlock % kTileM == 0 &&
                           kWarps >= 4),
              "tiles divide the blocks of a mask; each of four warps finds one end of a list");
static_assert(kWarpCols % 16 == 0 && kTileN % 16 == 0, "products take 16 of each");

using QTile = Fp64Tile<kTileM, kDim, kExchangeOfRows>;
using KTile = Fp64Tile<kTileN, kDim, kExchangeOfRows>;
using VTile = Fp64Tile<kTileN, kDim, kExchangeOfColumns>;

// Passed by value.  The host module of this name holds the same fields in the same order.
struct FwdFp64Params {
  AttentionParams common;
  double* lse;             // in place of common.lse
  double scale;            // of a product
  double softcap, factor;  // softcap * tanh(factor * product), in builds with a softcap
  int aligned;             // 1: every row of q, k, v and out starts at a multiple of 16 bytes
};
static_assert(sizeof(FwdFp64Params) == FA_FWD_FP64_BYTES, "fwd_fp64.py holds the same struct");

struct SharedStorage {
  double q[kTileM * kDim];
  double k[kTileN * kDim];
  double v[kTileN * kDim];
  TileWork work;
  KeyTiles band;
  ListedRange listed;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

// ---------------------------------------------------------------------------------------- softmax
// row_max moves only when a score passes it by more: nearly no tile then rescales the output.
// Weights of up to e**8 lose nothing.
constexpr double kMaxSlack = 8.0;

struct RowStatistics {
  double row_max[kMmaM][2], row_sum[kMmaM][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
      row_max[i][0] = row_max[i][1] = kNoMaxFp64;
      row_sum[i][0] = row_sum[i][1] = 0.0;
    }
  }

  // Looks at the next scores, and has the sums and the outputs of earlier ones follow.
  __device__ __forceinline__ void update_max(const double (&s)[kMmaM][kMmaN][4],
                                             double (&o)[kMmaM][kMmaV][4]) {
    double tile_max[kMmaM][2];
    bool max_moved = false;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        double& most = tile_max[i][h];
        most = kNoMaxFp64;
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
          most = s[i][j][2 * h] > most ? s[i][j][2 * h] : most;
          most = s[i][j][2 * h + 1] > most ? s[i][j][2 * h + 1] : most;
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const double other = shfl_xor_fp64(most, step);
          most = other > most ? other : most;
        }
        max_moved |= most > row_max[i][h] + kMaxSlack;
      }
    }
    if (!__any_sync(kFullWarp, max_moved)) return;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const double most = tile_max[i][h] > row_max[i][h] ? tile_max[i][h] : row_max[i][h];
        rescale(i, h, exp_fp64(row_max[i][h] - most), o);
        row_max[i][h] = most;
      }
    }
  }

  __device__ __forceinline__ void rescale(int i, int h, double factor,
                                          double (&o)[kMmaM][kMmaV][4]) {
    row_sum[i][h] *= factor;
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      o[i][j][2 * h] *= factor;
      o[i][j][2 * h + 1] *= factor;
    }
  }

  // Turns scores into weights and adds them up.
  __device__ __forceinline__ void exponentiate(double (&s)[kMmaM][kMmaN][4]) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[i][j][e] = exp_fp64(s[i][j][e] - row_max[i][e / 2]);
          row_sum[i][e / 2] += s[i][j][e];
        }
      }
    }
  }

  // Adds up the four threads of each row.
  __device__ __forceinline__ void reduce_row_sum() {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_sum[i][h] += shfl_xor_fp64(row_sum[i][h], 1);
        row_sum[i][h] += shfl_xor_fp64(row_sum[i][h], 2);
      }
    }
  }
};

// ----------------------------------------------------------------------------------------- scores
// The score of a product.
FA_DEVICE double score_fp64(const FwdFp64Params& p, const BatchOffsets& at, double product, int row,
                            int key) {
  const AttentionParams& common = p.common;
  double x = kSoftcap ? p.softcap * tanh(p.factor * product) : p.scale * product;
  if constexpr (kExpression) x = expression_of<double>(common, at, x, row, key).score;
  if constexpr (kHasBias) x += load_bias<double>(common, at.bias, row, key);
  return x;
}

// Makes scores of a tile's products.  A pair that does not exist gets that of another one.
FA_DEVICE void make_scores(const FwdFp64Params& p, const TileWork& work,
                           double (&s)[kMmaM][kMmaN][4], int first_row, int first_col) {
  const int last_row = p.common.q_len - 1, last_col = p.common.k_len - 1;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = min(first_row + 16 * i + e / 2 * 8, last_row);
        const int col = min(first_col + 8 * j + e % 2, last_col);
        s[i][j][e] = score_fp64(p, work.at, s[i][j][e], row, col);
      }
    }
  }
}

// ------------------------------------------------------------------------------------ rows by hand
// The log-sum-exp of a row; -inf where it has seen no key.
FA_DEVICE double log_sum_exp_fp64(double row_max, double row_sum) {
  return row_sum == 0.0 ? -FA_INFINITY : row_max + log(row_sum);
}

FA_DEVICE double* output_row(const AttentionParams& p, const TileWork& work, int row) {
  return static_cast<double*>(p.out) + work.at.out + static_cast<int64>(row) * p.out_row;
}

// Calls visit(key, score) for each key that a row sees and whose score is not -inf, as a whole
// warp, until it says false.
template <typename Visit>
FA_DEVICE void for_each_score(const FwdFp64Params& params, const TileWork& work, int row,
                              const Visit& visit) {
  const AttentionParams& p = params.common;
  const double* q = static_cast<const double*>(p.q) + work.at.q + static_cast<int64>(row) * p.q_row;
  for_each_key<kSparse>(
      p, dense_keys<double>(p, work.at, band_of(p, work)), work.batch, row, [&](int key) {
        const double* k =
            static_cast<const double*>(p.k) + work.at.k + static_cast<int64>(key) * p.k_row;
        const double product = dot_of_warp(q, k, p.head_dim);
        const double score = score_fp64(params, work.at, product, row, key);
        return score == -FA_INFINITY || visit(key, score);
      });
}

// A warp computes its columns of one row again, leaving out every key whose score is -inf, for a
// hidden key has weight 0, but 0 * NaN and 0 * inf are NaN inside a matrix product.  Weights are
// normalised before they meet the values, so that only a sum that is infinite itself becomes so.
FA_DEVICE void recompute_row_fp64(const FwdFp64Params& params, const TileWork& work, int row,
                                  int first_col) {
  const AttentionParams& p = params.common;
  const int col = first_col + threadIdx.x % 32, cols = min(first_col + kWarpCols, p.v_dim);
  const double sink = load_sink_fp64(p, work.batch, row);
  double row_max = sink == -FA_INFINITY ? kNoMaxFp64 : sink;
  double row_sum = sink == -FA_INFINITY ? 0.0 : sink - sink + 1.0;  // NaN if it is NaN or +inf
  for_each_score(params, work, row, [&](int, double score) {
    if (!(score < FA_INFINITY)) {  // all of the row is NaN
      row_sum = FA_NAN;
      return false;
    }
    const double most = score > row_max ? score : row_max;
    row_sum = row_sum * exp_fp64(row_max - most) + exp_fp64(score - most);
    row_max = most;
    return true;
  });
  double sums[(kWarpCols + 31) / 32];
#pragma unroll
  for (double& sum : sums) sum = 0.0 * row_sum;
  if (row_sum > 0.0) {
    for_each_score(params, work, row, [&](int key, double score) {
      const double weight = exp_fp64(score - row_max) / row_sum;
      const double* v =
          static_cast<const double*>(p.v) + work.at.v + static_cast<int64>(key) * p.v_row;
#pragma unroll
      for (int i = 0; i < (kWarpCols + 31) / 32; ++i) {
        if (col + 32 * i < cols) sums[i] = fma(weight, v[col + 32 * i], sums[i]);
      }
      return true;
    });
  }
#pragma unroll
  for (int i = 0; i < (kWarpCols + 31) / 32; ++i) {
    if (col + 32 * i < cols) output_row(p, work, row)[col + 32 * i] = sums[i];
  }
}

// The result of a block whose rows see no key at all: that of the sinks.
FA_DEVICE void write_empty_rows(const FwdFp64Params& params, const TileWork& work) {
  const AttentionParams& p = params.common;
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < work.q_rows; r += kWarps) {
    const int row = work.q_begin + r;
    const double sink = load_sink_fp64(p, work.batch, row);
    // NaN of a sink that is NaN or +inf.
    double value = sink == -FA_INFINITY ? 0.0 : sink - sink;
    if (is_invalid_row(p, work, row)) value = FA_NAN;
    for (int col = threadIdx.x % 32; col < p.v_dim; col += 32)
      output_row(p, work, row)[col] = value;
    if (params.lse != nullptr && threadIdx.x % 32 == 0) {
      params.lse[work.batch * p.q_len + row] = sink + value;
    }
  }
}

// --------------------------------------------------------------------------------------- epilogue
// first_row is the first row that a thread holds; the others are first_row + 16 i + 8 h.

// Adds the sink of each row to its statistics, and has its output follow.
FA_DEVICE void add_sinks(const AttentionParams& p, const TileWork& work, RowStatistics& rows,
                         double (&o)[kMmaM][kMmaV][4], int first_row) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + 16 * i + 8 * h, p.q_len - 1);
      const double sink = load_sink_fp64(p, work.batch, row);
      const double most = sink > rows.row_max[i][h] ? sink : rows.row_max[i][h];
      rows.rescale(i, h, exp_fp64(rows.row_max[i][h] - most), o);
      rows.row_max[i][h] = most;
      rows.row_sum[i][h] += exp_fp64(sink - most);  // NaN of a sink that is NaN or +inf
    }
  }
}

// Writes the output of a row that a thread shares with three others; returns whether a number of
// its own is not finite.  A row that has seen no key gives 0.
FA_DEVICE bool write_row_part(const FwdFp64Params& params, const TileWork& work,
                              const double (&o)[kMmaV][4], int h, double row_sum, int row,
                              int first_col) {
  const AttentionParams& p = params.common;
  const double inverse = row_sum == 0.0 ? 0.0 : 1.0 / row_sum;
  double* out = output_row(p, work, row);
  double probe = 0.0 * row_sum;  // NaN as soon as a number is NaN or infinite
#pragma unroll
  for (int pair = 0; pair < kMmaV / 2; ++pair) {
    const int col = first_col + 16 * pair + threadIdx.x % 4 * 4;
    const double four[4] = {o[2 * pair][2 * h] * inverse, o[2 * pair + 1][2 * h] * inverse,
                            o[2 * pair][2 * h + 1] * inverse, o[2 * pair + 1][2 * h + 1] * inverse};
#pragma unroll
    for (int e = 0; e < 4; ++e) probe = fma(four[e], 0.0, probe);
    if (row >= p.q_len) continue;
    if (params.aligned && col + 4 <= p.v_dim) {
      *reinterpret_cast<double2*>(out + col) = make_double2(four[0], four[1]);
      *reinterpret_cast<double2*>(out + col + 2) = make_double2(four[2], four[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (col + e < p.v_dim) out[col + e] = four[e];
      }
    }
  }
  return probe != probe;
}

FA_DEVICE void epilogue(const FwdFp64Params& params, const TileWork& work, RowStatistics& rows,
                        double (&o)[kMmaM][kMmaV][4], int warp_row, int first_col) {
  const AttentionParams& p = params.common;
  const int lane = threadIdx.x % 32, first_row = warp_row + lane / 4;
  rows.reduce_row_sum();
  if (p.sinks != nullptr) add_sinks(p, work, rows, o, first_row);
  uint32 recompute_lanes[2 * kMmaM], any_recompute = 0;
#pragma unroll
  for (int part = 0; part < 2 * kMmaM; ++part) {
    const int i = part / 2, h = part % 2, row = first_row + 8 * part;
    double& row_sum = rows.row_sum[i][h];
    const bool invalid = is_invalid_row(p, work, row);
    if (invalid) row_sum = FA_NAN;
    if (params.lse != nullptr && first_col == 0 && lane % 4 == 0 && row < p.q_len) {
      params.lse[work.batch * p.q_len + row] = log_sum_exp_fp64(rows.row_max[i][h], row_sum);
    }
    const bool nonfinite = write_row_part(params, work, o[i], h, row_sum, row, first_col);
    recompute_lanes[part] = __ballot_sync(kFullWarp, nonfinite && !invalid && row < p.q_len);
    any_recompute |= recompute_lanes[part];
  }
  if (any_recompute == 0) return;
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < kWarpRows; ++r) {
    uint32 lanes = 0;
#pragma unroll
    for (int part = 0; part < 2 * kMmaM; ++part) {  // registers have no index
      if (part == r / 8) lanes = recompute_lanes[part];
    }
    if ((lanes >> r % 8 * 4 & 15) != 0) recompute_row_fp64(params, work, warp_row + r, first_col);
  }
}

// ------------------------------------------------------------------------------------------- tiles
// Finds the queries of the block and its tiles of keys: their numbers or, with a mask, their places
// in its lists.
FA_DEVICE TileRange find_work(const AttentionParams& p, SharedStorage& shared) {
  if (threadIdx.x == 0) {
    TileWork& work = shared.work;
    work = kSparse ? masked_tile_work(p, kTileM) : tile_work(p, kTileM);
    shared.band = key_tiles(p, work.q_begin, work.q_begin + work.q_rows - 1, kTileN);
    restrict_to_length(p, work, shared.band, kTileN);
    if constexpr (kSparse) {
      shared.listed.row = row_of_blocks(p.mask, work.batch, work.q_begin, p.q_len);
    }
  }
  __syncthreads();
  if constexpr (!kSparse) return {shared.band.begin, shared.band.end};
  if (shared.work.q_rows <= 0) return {0, 0};
  if (threadIdx.x < 128) find_listed_range<kTilesPerBlock>(p.mask, shared.listed, shared.band);
  __syncthreads();
  return {0, shared.listed.count()};
}

// The number of a tile of the loop among all tiles of keys.
FA_DEVICE int key_tile(const AttentionParams& p, const SharedStorage& shared, int tile) {
  if constexpr (!kSparse) return tile;
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  const int* blocks = at.partial ? p.mask.partial : p.mask.full;
  return blocks[at.position] * kTilesPerBlock + at.in_block;
}

// Which scores of a tile a mask leaves: this thread's words, with the tile's first columns in
// bit 0.
FA_DEVICE void read_words(const AttentionParams& p, const SharedStorage& shared, int tile, int key,
                          int warp_row, uint32 (&visible_bits)[kMmaM][2]) {
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  if (!at.partial) {
#pragma unroll
    for (auto& both : visible_bits) set_all_visible(both);
    return;
  }
  const uint32* words = block_words(p.mask, shared.listed.row, at.position, key / kTilesPerBlock) +
                        warp_row % kMaskBlock / 16 * kSlabWords + 2 * (tid_x_again() % 32);
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      visible_bits[i][h] = words[i * kSlabWords + h] >> at.in_block * (kTileN / 4);
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_fwd_fp64(const __grid_constant__ FwdFp64Params params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  const TileRange tiles = find_work(p, shared);
  const TileWork& work = shared.work;
  const KeyTiles& band = shared.band;
  if (tiles.begin >= tiles.end) return write_empty_rows(params, work);

  const uint32 q_tile = cvta_to_shared(shared.q), k_tile = cvta_to_shared(shared.k);
  const uint32 v_tile = cvta_to_shared(shared.v);
  const int warp = threadIdx.x / 32, first_col = warp % kColumnWarps * kWarpCols;
  const int warp_row = work.q_begin + warp / kColumnWarps * kWarpRows;
  const auto load_k = [&](int key) {
    load_tile_fp64<KTile, kTileN, kThreads>(k_tile, static_cast<const double*>(p.k) + work.at.k,
                                            p.k_row, key * kTileN, band_of(p, work).k_len,
                                            p.head_dim, params.aligned);
    cp_async_commit_group();
  };
  load_tile_fp64<QTile, kTileM, kThreads>(q_tile, static_cast<const double*>(p.q) + work.at.q,
                                          p.q_row, work.q_begin, p.q_len, p.head_dim,
                                          params.aligned);
  int next_key = key_tile(p, shared, tiles.begin);
  load_k(next_key);

  RowStatistics rows;
  rows.reset();
  double o[kMmaM][kMmaV][4];
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
      for (double& sum : o[i][j]) sum = 0.0;
    }
  }

#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    cp_async_wait_group<0>();
    __syncthreads();  // K has landed for all, and all have read V
    const int key = next_key;
    load_tile_fp64<VTile, kTileN, kThreads>(v_tile, static_cast<const double*>(p.v) + work.at.v,
                                            p.v_row, key * kTileN, band_of(p, work).k_len, p.v_dim,
                                            params.aligned);
    cp_async_commit_group();
    uint32 visible_bits[kMmaM][2];
    if constexpr (kSparse) read_words(p, shared, tile, key, warp_row, visible_bits);
    if (tile + 1 < tiles.end) next_key = key_tile(p, shared, tile + 1);
    double s[kMmaM][kMmaN][4];
    multiply_rows_fp64<kWideMma, QTile, KTile, kDim>(
        s, q_tile + QTile::lane_of_rows(warp_row - work.q_begin), k_tile + KTile::lane_of_rows(0));
    cp_async_wait_group<0>();
    __syncthreads();  // V has landed for all, and all have read K
    if (tile + 1 < tiles.end) load_k(next_key);

    const int row = warp_row + tid_x_again() % 32 / 4;
    const int col = key * kTileN + tid_x_again() % 4 * 2;
    make_scores(params, work, s, row, col);
    if constexpr (kSparse) mask_by_bits(s, visible_bits);
    if (key < band.full_begin || key >= band.full_end) {
      mask_outside_band(band_of(p, work), s, row, col);
    }
    rows.update_max(s, o);
    rows.exponentiate(s);
    add_product_fp64<kWideMma, VTile>(o, s, v_tile + VTile::lane_of_columns(first_col));
  }
  epilogue(params, work, rows, o, warp_row, first_col);
}
