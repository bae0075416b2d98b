// Attention backward for SM80 and later, bias: mma.sync, ldmatrix, cp.async.
//
// One block owns a tile of kTileM queries and kTileN keys of the gradient of the bias, and walks
// over all that shares its elements: batch entries that the bias broadcasts over, and tiles along
// an axis of pairs that it broadcasts over.  Of each it computes
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dbias += P (dP - delta)
// pair by pair in registers.  Sums over rows or columns of the tile come once, at the end.
//
// Q and K have one buffer, dO and V another: while the product of one is computed, the other one
// is filled.  A tile that is that of the step before is not loaded again.
//
// Where there are fewer tiles than multiprocessors, blocks split what shares a tile.  Each puts its
// sums into the workspace, and the last one to finish adds them up in the order of the splits.  So
// all sums have one order, and results are the same bits every time.
//
// A pair is a number of its own here: what a hidden one holds reaches no other, and nothing has to
// be computed again.  It is launched after bwd_nonfinite, which leaves what is known of rows whose
// LSE is too large for weights (common/large_lse.cuh).
#include "cuda_src/common/backward_sm80.cuh"
#include "cuda_src/common/dbias.cuh"
#include "cuda_src/common/dbias_tiles.cuh"
#include "cuda_src/common/large_lse.cuh"
#include "ptx/atomic.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr bool kBf16 = FA_BF16;        // bfloat16, else float16
constexpr int kDim = FA_DIM;           // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;      // queries of a tile
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kWarps = FA_WARPS;       // of a block
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr bool kSparse = FA_SPARSE;    // with a mask
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpCols = 2, kWarpRows = kWarps / kWarpCols;  // warps that share rows, or columns
constexpr int kOwnRows = kTileM / kWarpRows, kOwnCols = kTileN / kWarpCols;  // of a warp
constexpr int kMmaM = kOwnRows / 16, kMmaN = kOwnCols / 8;
constexpr int kOwnPairs = kMmaM * kMmaN * 4;  // of a thread
static_assert(kDbiasAxes == kAxes, "both are axes of the batch");
static_assert(kHasBias, "the gradient is that of a bias");
static_assert(kDim % 32 == 0 && kDim <= 256, "dims are padded to a multiple of 32, at most 256");
static_assert(kMmaM * 16 == kOwnRows && kMmaN % 2 == 0 && kMmaN * 8 == kOwnCols,
              "a warp owns whole products");
static_assert(2 * kMmaM <= 32, "a bit for each row of a thread");
static_assert(kTileM <= kThreads && kTileN <= kThreads, "a thread has a row or a column of sums");
static_assert(kMaskBlock % kTileM == 0 && kMaskBlock % kTileN == 0, "tiles divide a mask's blocks");

using QueryTile = SharedTile<kTileM, kDim>;
using KeyTile = SharedTile<kTileN, kDim>;

struct DbiasParams : BackwardParams {
  void* dbias;                                     // of the type of the bias
  const float2* row_statistics;                    // as bwd_nonfinite leaves them
  float* partial_sums;                             // (tiles, splits, numbers of a thread, kThreads)
  uint32* split_counters;                          // (tiles), 0 at first
  int64 dbias_row, dbias_col, dbias_batch[kAxes];  // strides; 0 along an axis that is summed over
  int sums_queries, sums_keys;                     // whether one element is of all of them
  int splits;                                      // blocks that share a tile
};
static_assert(sizeof(DbiasParams) == FA_DBIAS_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

// ---------------------------------------------------------------------------------------- storage
// This step, the next one, and the one before, which some may still read.
constexpr int kSteps = 3;

struct SharedStorage {
  union {
    struct {
      uint16 q[kTileM * kDim], k[kTileN * kDim];
    };
    float sums[kWarpRows * kTileN > kWarpCols* kTileM ? kWarpRows * kTileN : kWarpCols * kTileM];
  };
  uint16 dout[kTileM * kDim], v[kTileN * kDim];
  float4 lse_delta[kTileM / 2];  // LSE of two queries, delta of them
  DbiasTile own;                 // which is left here, as are steps: registers are short
  PairStep steps[kSteps];
  uint32 arrived;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// ------------------------------------------------------------------------------------------- work
// Where this warp's pairs begin in the tile.
FA_DEVICE int warp_row() { return tid_x_again() / 32 / kWarpCols * kOwnRows; }
FA_DEVICE int warp_col() { return tid_x_again() / 32 % kWarpCols * kOwnCols; }

// The warps that share a tile, for sums over its rows and columns.
struct TileWarps {
  static constexpr int kRows = kTileM, kCols = kTileN, kDown = kWarpRows, kAcross = kWarpCols;
  static __device__ __forceinline__ bool have_sums() { return true; }
  static __device__ __forceinline__ int row() { return warp_row(); }
  static __device__ __forceinline__ int col() { return warp_col(); }
  static __device__ __forceinline__ int down(int warp) { return warp / kWarpCols; }
  static __device__ __forceinline__ int across(int warp) { return warp % kWarpCols; }
};

// Asks for a tile of an array, unless the step before had the same.
template <int kRows>
FA_DEVICE void load_rows(const DbiasParams& params, const uint16* to, const Array& array,
                         uint32 entry, uint32 entry_before, int tile, int tile_before, int rows,
                         int cols) {
  const uint16* from = entry_start(params, array, entry);
  if (tile == tile_before && from == entry_start(params, array, entry_before)) return;
  load_tile<kRows, kDim, kThreads>(cvta_to_shared(to), from, static_cast<int>(array.row),
                                   tile * kRows, rows, cols, true);
}

FA_DEVICE void load_qk(const DbiasParams& params, SharedStorage& shared, const PairStep& step,
                       const PairStep& before) {
  const AttentionParams& p = params.common;
  load_rows<kTileM>(params, shared.q, params.q, step.entry, before.entry, step.query_tile,
                    before.query_tile, p.q_len, p.head_dim);
  load_rows<kTileN>(params, shared.k, params.k, step.entry, before.entry, step.key_tile,
                    before.key_tile, p.k_len, p.head_dim);
  const int tid = tid_x_again();
  if (tid < kTileM / 2) {
    const int64 at = static_cast<int64>(step.entry) * params.row_pairs +
                     static_cast<int64>(step.query_tile) * (kTileM / 2) + tid;
    cp_async_cg_16(cvta_to_shared(&shared.lse_delta[tid]), params.lse_delta + at, 16);
  }
}

FA_DEVICE void load_dout_v(const DbiasParams& params, SharedStorage& shared, const PairStep& step,
                           const PairStep& before) {
  const AttentionParams& p = params.common;
  load_rows<kTileM>(params, shared.dout, params.dout, step.entry, before.entry, step.query_tile,
                    before.query_tile, p.q_len, p.v_dim);
  load_rows<kTileN>(params, shared.v, params.v, step.entry, before.entry, step.key_tile,
                    before.key_tile, p.k_len, p.v_dim);
}

// ---------------------------------------------------------------------------------------- weights
// What is known of the rows of this thread.
struct OwnRows {
  float lse[kMmaM][2], delta[kMmaM][2];
  uint32 is_large;  // bit 2 i + h: the LSE of row [i][h] is too large; it stands as 0
};

FA_DEVICE void load_own_rows(OwnRows& rows, const SharedStorage& shared) {
  const float* lse_delta = &shared.lse_delta[0].x;
  rows.is_large = 0;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row() + 16 * i + 8 * h + tid_x_again() % 32 / 4;
      const float lse = lse_delta[row / 2 * 4 + row % 2];
      rows.delta[i][h] = lse_delta[row / 2 * 4 + row % 2 + 2];
      rows.is_large |= static_cast<uint32>(is_large_lse(lse)) << (2 * i + h);
      rows.lse[i][h] = is_large_lse(lse) ? 0.0f : lse;
    }
  }
}

// Whether a query of the tile has a large LSE, which is the same for all threads.
FA_DEVICE bool any_large_lse(const SharedStorage& shared) {
  bool any = false;
#pragma unroll
  for (int row = 0; row < kTileM; row += 32) {
    const int own = row + tid_x_again() % 32;
    any |= is_large_lse((&shared.lse_delta[0].x)[own / 2 * 4 + own % 2]);
  }
  return __any_sync(kFullWarp, any);
}

// Turns products into weights.  A query that does not exist, or that attends to nothing, has an
// infinite LSE: its pairs are hidden, whatever they hold.
FA_DEVICE void products_to_weights(const DbiasParams& params, const PairStep& step,
                                   const OwnRows& rows, float (&s)[kMmaM][kMmaN][4]) {
  const AttentionParams& p = params.common;
  const int lane = tid_x_again() % 32;
  const int query = step.query_tile * kTileM + warp_row() + lane / 4;
  const int key = step.key_tile * kTileN + warp_col() + lane % 4 * 2;
  const int64 bias_offset = batch_offsets(p, step.entry).bias;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    load_and_apply_score_mod<false>(p, bias_offset, s[i], query + 16 * i, key);
  }
  mask_scores<false, kSparse>(params, params.common, s, step.in_band, step.words_index, query, key);
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float lse = rows.lse[i][e / 2];
        const bool is_hidden = s[i][j][e] == -FA_INFINITY || lse == FA_INFINITY;
        const float weight = ex2_approx_ftz(fmaf(s[i][j][e], p.exp2_scale, -lse));
        s[i][j][e] = is_hidden ? kHiddenWeight : weight;
      }
    }
  }
}

// dP of weights that dropout keeps, scaled as these are, and 0 of others.
FA_DEVICE void drop_gradients(const DbiasParams& params, const PairStep& step,
                              float (&dp)[kMmaM][kMmaN][4]) {
#if FA_DROPOUT
  const DropoutParams& p = params.common.dropout;
  uint32 kept[kMmaM][2];
  make_kept_bits<kOwnCols>(p, dropout_entry(p, step.entry),
                           step.query_tile * kTileM + warp_row() + tid_x_again() % 32 / 4,
                           step.key_tile * kTileN + warp_col(), kept);
  scale_kept(dp, kept, p.factor);
#endif
}

// Adds P (dP - delta) of the pairs that are not hidden.
FA_DEVICE void add_step(float (&sums)[kMmaM][kMmaN][4], const float (&weights)[kMmaM][kMmaN][4],
                        const float (&dp)[kMmaM][kMmaN][4], const OwnRows& rows) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = weights[i][j][e];
        const float sum = fmaf(weight, dp[i][j][e] - rows.delta[i][e / 2], sums[i][j][e]);
        sums[i][j][e] = weight == kHiddenWeight ? sums[i][j][e] : sum;
      }
    }
  }
}

// --------------------------------------------------------------------------------------- epilogue
// Adds up what the splits of a tile have found, in their order, if this is the last one to finish;
// returns whether it is.
template <int kCount>
FA_DEVICE bool add_splits(const DbiasParams& params, SharedStorage& shared, const DbiasTile& own,
                          float (&x)[kCount]) {
  if (params.splits == 1) return true;
  const int tid = tid_x_again();
  constexpr int kBlockSums = kCount * kThreads;
  float* first =
      params.partial_sums + static_cast<int64>(own.output) * params.splits * kBlockSums + tid;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    first[static_cast<int64>(own.split) * kBlockSums + i * kThreads] = x[i];
  }
  __syncthreads();  // all threads have written theirs, which the next line releases
  if (tid == 0) shared.arrived = atom_add_acq_rel_gpu_u32(&params.split_counters[own.output], 1);
  __syncthreads();
  if (shared.arrived != params.splits - 1) return false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = 0.0f;
#pragma unroll 1
  for (int split = 0; split < params.splits; ++split) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += first[i * kThreads];
    first += kBlockSums;
  }
  return true;
}

FA_DEVICE void store_tile(const DbiasParams& params, const DbiasTile& own,
                          const float (&x)[kMmaM][kMmaN][4]) {
  const int lane = tid_x_again() % 32;
  store_pairs(params, dbias_offset(params, entry_of(params, own.entry, 0)),
              own.query_tile * kTileM + warp_row() + lane / 4,
              own.key_tile * kTileN + warp_col() + lane % 4 * 2, x);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dbias_sm80(const __grid_constant__ DbiasParams params) {
  // ---------------------------------------------------------------------------------------- setup
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const DbiasTile& own = shared.own;
  if (threadIdx.x == 0) {
    find_own_tile<kTileM, kTileN>(params, shared.own);
    find_step<kTileM, kTileN, kSparse>(params, own, own.begin, shared.steps[0]);
  }
  __syncthreads();
  if (shared.steps[0].index < own.end) {
    const PairStep none = {own.end, 0, -1, -1, false, kFullBlock};
    load_qk(params, shared, shared.steps[0], none);
    cp_async_commit_group();
    load_dout_v(params, shared, shared.steps[0], none);
    cp_async_commit_group();
  }
  float sums[kMmaM][kMmaN][4];
  clear(sums);

  // -------------------------------------------------------------------------------- tiles of pairs
#pragma unroll 1
  for (int i = 0; shared.steps[i].index < own.end; i = (i + 1) % kSteps) {
    const PairStep &step = shared.steps[i], &next = shared.steps[(i + 1) % kSteps];
    if (threadIdx.x == 0) {
      find_step<kTileM, kTileN, kSparse>(params, own, step.index + 1,
                                         shared.steps[(i + 1) % kSteps]);
    }
    auto load_next_qk = [&] {
      __syncthreads();  // nobody reads Q and K any more
      if (next.index < own.end) load_qk(params, shared, next, step);
      cp_async_commit_group();
    };
    float weights[kMmaM][kMmaN][4], dp[kMmaM][kMmaN][4];
    cp_async_wait_group<1>();
    __syncthreads();  // Q, K and what is known of the queries are there
    OwnRows rows;
    load_own_rows(rows, shared);
    const bool any_large = any_large_lse(shared);
    multiply_rows<kBf16, QueryTile, KeyTile, kDim / 16>(
        weights, cvta_to_shared(shared.q) + a_lane<QueryTile>(warp_row()),
        cvta_to_shared(shared.k) + b_lane<KeyTile>(warp_col()));
    if (!any_large) load_next_qk();
    products_to_weights(params, step, rows, weights);
    if (any_large) {
      replace_large_weights<kBf16, kDim>(params, TileChunks<QueryTile>{cvta_to_shared(shared.q)},
                                         TileChunks<KeyTile>{cvta_to_shared(shared.k)}, step.entry,
                                         step.query_tile * kTileM, step.key_tile * kTileN,
                                         warp_row(), warp_col(), rows.is_large, weights);
      load_next_qk();
    }

    cp_async_wait_group<1>();
    __syncthreads();  // dO and V are there
    multiply_rows<kBf16, QueryTile, KeyTile, kDim / 16>(
        dp, cvta_to_shared(shared.dout) + a_lane<QueryTile>(warp_row()),
        cvta_to_shared(shared.v) + b_lane<KeyTile>(warp_col()));
    __syncthreads();  // nobody reads dO and V any more
    if (next.index < own.end) load_dout_v(params, shared, next, step);
    cp_async_commit_group();
    if constexpr (kDropout) drop_gradients(params, step, dp);
    add_step(sums, weights, dp, rows);
  }

  // ------------------------------------------------------------------------------------- epilogue
  cp_async_wait_group<0>();
  __syncthreads();  // what was asked for has been read by all
  if (params.sums_queries || params.sums_keys) {
    float sum[1] = {sum_of_tile<TileWarps>(params, shared.sums, sums)};
    if (add_splits(params, shared, own, sum)) store_sum<kTileM, kTileN>(params, own, sum[0]);
  } else if (add_splits(params, shared, own, reinterpret_cast<float (&)[kOwnPairs]>(sums))) {
    store_tile(params, own, sums);
  }
}
