// Attention backward for SM80 and later, queries: mma.sync, ldmatrix, cp.async.
//
// One block owns kTileM queries of one batch entry and walks over the tiles of kTileN keys that
// they see:
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dS = P (dP - delta),  dQ += dS K
// Each warp owns kTileM / kWarps queries: dS, as accumulators of m16n8k16, is an A operand as it
// stands, and nothing is exchanged.  Tiles of K, which the first product and the last one read,
// come through two stages by cp.async, those of V through kStages.
#include "cuda_src/common/backward_sm80.cuh"
#include "cuda_src/common/softmax.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr bool kBf16 = FA_BF16;        // bfloat16, else float16
constexpr int kDim = FA_DIM;           // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;      // queries of a block
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kWarps = FA_WARPS;       // of a block
constexpr int kStages = FA_STAGES;     // tiles of V in flight
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr bool kSparse = FA_SPARSE;    // with a mask
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kTileM / kWarps;
constexpr int kMmaM = kWarpRows / 16, kMmaN = kTileN / 8, kMmaD = kDim / 8;
constexpr int kKStages = 2;
static_assert(kDim % 32 == 0 && kDim <= 256, "dims are padded to a multiple of 32, at most 256");
static_assert(kTileM == kWarps * kMmaM * 16, "a warp owns whole 16-row products");
static_assert(kStages == 1 || kStages == kKStages, "V comes with K or in the middle of a tile");

static_assert(kMaskBlock % kTileM == 0 && kMaskBlock % kTileN == 0, "tiles divide a mask's blocks");

using QueryTile = SharedTile<kTileM, kDim>;
using KeyTile = SharedTile<kTileN, kDim>;

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint16 q[kTileM * kDim];  // later dQ
  uint16 dout[kTileM * kDim];
  uint16 k[kKStages][kTileN * kDim];
  uint16 v[kStages][kTileN * kDim];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// ------------------------------------------------------------------------------------------- work
// What the block has to do; the same in all of its threads.
struct WorkTile {
  uint32 entry;  // of the batch
  int first_query;
  KeyTiles tiles;  // that a query sees
  const uint16 *k, *v;
  int64 mask_row;
#if FA_DROPOUT
  DropoutEntry dropout;
#endif
};

FA_DEVICE WorkTile find_work(const BackwardParams& params) {
  const AttentionParams& p = params.common;
  WorkTile work;
  // Under a causal mask the last queries see the most keys: they go first.
  const uint32 q_tiles = (p.q_len + kTileM - 1) / kTileM;
  work.entry = blockIdx.x / q_tiles;
  work.first_query = static_cast<int>(q_tiles - 1 - (blockIdx.x - work.entry * q_tiles)) * kTileM;
  work.tiles = key_tiles(p, work.first_query, min(work.first_query + kTileM, p.q_len) - 1, kTileN);
  work.k = entry_start(params, params.k, work.entry);
  work.v = entry_start(params, params.v, work.entry);
  work.mask_row = 0;
#if FA_DROPOUT
  work.dropout = dropout_entry(p.dropout, work.entry);
#endif
  if constexpr (kSparse) {
    work.mask_row = table_row(params.mask, work.entry, work.first_query / kMaskBlock);
  }
  return work;
}

// The tile, or the first one behind it, that a mask does not hide.
FA_DEVICE int next_visible(const BackwardParams& params, const WorkTile& work, int tile) {
  return kSparse ? next_tile<kTileN>(params.mask, work.mask_row, tile, work.tiles.end) : tile;
}

// Where this warp's rows begin.
FA_DEVICE int warp_row() { return tid_x_again() / 32 * kWarpRows; }

// ------------------------------------------------------------------------------------------- loads
// Copies are started by cp.async; the caller commits their group.

// The address of a stage of K or of V.
FA_DEVICE uint32 stage_of(const uint16* stages, int stage) {
  return cvta_to_shared(stages) + stage * static_cast<uint32>(kTileN * kDim * 2);
}

FA_DEVICE void load_k(const BackwardParams& params, SharedStorage& shared, const WorkTile& work,
                      int tile, int stage) {
  const AttentionParams& p = params.common;
  load_tile<kTileN, kDim, kThreads>(stage_of(shared.k[0], stage), work.k,
                                    static_cast<int>(params.k.row), tile * kTileN, p.k_len,
                                    p.head_dim, true);
}

FA_DEVICE void load_v(const BackwardParams& params, SharedStorage& shared, const WorkTile& work,
                      int tile, int stage) {
  const AttentionParams& p = params.common;
  load_tile<kTileN, kDim, kThreads>(stage_of(shared.v[0], stage), work.v,
                                    static_cast<int>(params.v.row), tile * kTileN, p.k_len, p.v_dim,
                                    true);
}

// Q and dO of the block's queries.
FA_DEVICE void load_q_dout(const BackwardParams& params, SharedStorage& shared,
                           const WorkTile& work) {
  const AttentionParams& p = params.common;
  load_tile<kTileM, kDim, kThreads>(
      cvta_to_shared(shared.q), entry_start(params, params.q, work.entry),
      static_cast<int>(params.q.row), work.first_query, p.q_len, p.head_dim, true);
  load_tile<kTileM, kDim, kThreads>(
      cvta_to_shared(shared.dout), entry_start(params, params.dout, work.entry),
      static_cast<int>(params.dout.row), work.first_query, p.q_len, p.v_dim, true);
}

// LSE and delta of this thread's row g of the i-th product, and of g + 8.
FA_DEVICE void read_lse_delta(const BackwardParams& params, const WorkTile& work,
                              float (&lse)[kMmaM][2], float (&delta)[kMmaM][2]) {
  const float* lse_delta = reinterpret_cast<const float*>(
      params.lse_delta + static_cast<int64>(work.entry) * params.row_pairs);
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = work.first_query + warp_row() + 16 * i + 8 * h + tid_x_again() % 32 / 4;
      lse[i][h] = lse_delta[row / 2 * 4 + row % 2];
      delta[i][h] = lse_delta[row / 2 * 4 + row % 2 + 2];
    }
  }
}

// ----------------------------------------------------------------------------------- tiles of keys
// All arrays of registers belong to the kernel's frame, and phases take them by reference.
// threadIdx.x is read again at each use (tid_x_again): kept over the loop, lane and warp would take
// registers that the products need.
using Scores = float[kMmaM][kMmaN][4];

// S = Q K^T or dP = dO V^T of a warp's rows, in the order of the accumulators of m16n8k16.
FA_DEVICE void gemm_scores(Scores& d, const uint16* rows, uint32 tile) {
  multiply_rows<kBf16, QueryTile, KeyTile, kDim / 16>(
      d, cvta_to_shared(rows) + a_lane<QueryTile>(warp_row()), tile + b_lane<KeyTile>(0));
}

// dP of weights that dropout keeps, scaled as these are, and 0 of others.
FA_DEVICE void drop_gradients(const BackwardParams& params, const WorkTile& work, Scores& dp,
                              int tile) {
#if FA_DROPOUT
  const DropoutParams& p = params.common.dropout;
  uint32 kept[kMmaM][2];
  make_kept_bits<kTileN>(p, work.dropout, work.first_query + warp_row() + tid_x_again() % 32 / 4,
                         tile * kTileN, kept);
  scale_kept(dp, kept, p.factor);
#endif
}

FA_DEVICE void subtract_delta(Scores& dp, const float (&delta)[kMmaM][2]) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[i][j][e] -= delta[i][e / 2];
    }
  }
}

// Makes scores of products, with what follows for dP - delta, and hides pairs that do not count.
FA_DEVICE void mod_and_mask_scores(const BackwardParams& params, const WorkTile& work, Scores& s,
                                   Scores& dp, int tile, bool in_band, int words_index) {
  const AttentionParams& p = params.common;
  const int lane = tid_x_again() % 32;
  const int own = work.first_query + warp_row() + lane / 4, other = tile * kTileN + lane % 4 * 2;
  if constexpr (kScoreMod) {
    apply_score_mod_backward<false>(p, batch_offsets(p, work.entry).bias, s, dp, own, other);
  }
  mask_scores<false, kSparse>(params, params.common, s, in_band, words_index, own, other);
}

// dS = P (dP - delta), P = exp(S - LSE), in place of dP - delta.
FA_DEVICE void compute_ds(Scores& dp, const Scores& s, const float (&lse)[kMmaM][2],
                          const AttentionParams& p) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = ex2_approx_ftz(fmaf(s[i][j][e], p.exp2_scale, -lse[i][e / 2]));
        dp[i][j][e] = slope_times(dp[i][j][e], weight);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------- epilogue
// Each warp turns its own rows of Q, which no other warp reads, into those of dQ.
FA_DEVICE void write_dq(const BackwardParams& params, SharedStorage& shared, const WorkTile& work,
                        const float (&dq)[kMmaM][kMmaD][4]) {
  const AttentionParams& p = params.common;
  const uint32 q_tile = cvta_to_shared(shared.q);
  cp_async_wait_group<0>();
  __syncwarp();
  NonfiniteProbe nonfinite_probe;
  const int rows = p.q_len - work.first_query;
  write_gradient<kBf16, QueryTile, 1>(q_tile, dq, warp_row(), 0, rows, p.scale, nonfinite_probe);
  if (nonfinite_probe.found())
    flag_nonfinite_queries(params.nonfinite_flags, p, work.entry, work.first_query + warp_row());
  __syncwarp();
  uint16* to = entry_start(params, params.dq, work.entry) + work.first_query * params.dq.row;
  store_rows<kTileM, kDim, kWarpRows>(q_tile, to, static_cast<int>(params.dq.row), warp_row(), rows,
                                      p.head_dim, true);
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dq_sm80(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const WorkTile work = find_work(params);
  int tile = next_visible(params, work, work.tiles.begin);
  if (tile < work.tiles.end) {
    load_q_dout(params, shared, work);
    load_k(params, shared, work, tile, 0);
    load_v(params, shared, work, tile, 0);
    cp_async_commit_group();
  }
  float lse[kMmaM][2], delta[kMmaM][2];
  read_lse_delta(params, work, lse, delta);
  float dq[kMmaM][kMmaD][4];
  clear(dq);

#pragma unroll 1
  for (int i = 0; tile < work.tiles.end; ++i) {
    const int k_stage = i % kKStages, v_stage = i % kStages;
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and all warps have read the one before it
    const int next = next_visible(params, work, tile + 1);
    if (next < work.tiles.end) {
      load_k(params, shared, work, next, (i + 1) % kKStages);
      if constexpr (kStages > 1) load_v(params, shared, work, next, (i + 1) % kStages);
    }
    cp_async_commit_group();
    int words_index = kFullBlock;
    if constexpr (kSparse) {
      words_index = block_words_index(params.mask, work.mask_row, tile * kTileN / kMaskBlock);
    }

    Scores s, dp;
    const uint32 k_tile = stage_of(shared.k[0], k_stage);
    gemm_scores(s, shared.q, k_tile);                              // S = Q K^T
    gemm_scores(dp, shared.dout, stage_of(shared.v[0], v_stage));  // dP = dO V^T
    if constexpr (kDropout) drop_gradients(params, work, dp, tile);
    subtract_delta(dp, delta);
    const bool in_band = tile >= work.tiles.full_begin && tile < work.tiles.full_end;
    mod_and_mask_scores(params, work, s, dp, tile, in_band, words_index);
    compute_ds(dp, s, lse, params.common);  // dS = exp(S - LSE) (dP - delta)
    uint32 ds[kMmaM][kMmaN][2];
    round_weights<kBf16>(dp, ds);
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps have read this tile of V
      if (next < work.tiles.end) load_v(params, shared, work, next, 0);
      cp_async_commit_group();
    }
    add_product<kBf16, KeyTile>(dq, ds, k_tile + b_trans_lane<KeyTile>());  // dQ += dS K
    tile = next;
  }

  write_dq(params, shared, work, dq);
}
