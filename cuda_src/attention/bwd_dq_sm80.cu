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

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dq_sm80(const __grid_constant__ BackwardParams params) {
  // ---------------------------------------------------------------------------------------- setup
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  constexpr uint32 kTileBytes = kTileN * kDim * 2;
  const uint32 q_tile = cvta_to_shared(shared.q), dout_tile = cvta_to_shared(shared.dout);
  const uint32 k_stages = cvta_to_shared(shared.k), v_stages = cvta_to_shared(shared.v);

  // Under a causal mask the last queries see the most keys: they go first.
  const uint32 q_tiles = (p.q_len + kTileM - 1) / kTileM;
  const uint32 entry = blockIdx.x / q_tiles;
  const int first_query = static_cast<int>(q_tiles - 1 - (blockIdx.x - entry * q_tiles)) * kTileM;
  const KeyTiles tiles = key_tiles(p, first_query, min(first_query + kTileM, p.q_len) - 1, kTileN);

  const uint16* k = entry_start(params, params.k, entry);
  const uint16* v = entry_start(params, params.v, entry);
  auto load_k = [&](int tile, int stage) {
    load_tile<kTileN, kDim, kThreads>(k_stages + stage * kTileBytes, k,
                                      static_cast<int>(params.k.row), tile * kTileN, p.k_len,
                                      p.head_dim, true);
  };
  auto load_v = [&](int tile, int stage) {
    load_tile<kTileN, kDim, kThreads>(v_stages + stage * kTileBytes, v,
                                      static_cast<int>(params.v.row), tile * kTileN, p.k_len,
                                      p.v_dim, true);
  };

  int64 mask_row = 0;
  if constexpr (kSparse) mask_row = table_row(params.mask, entry, first_query / kMaskBlock);
  // The tile, or the first one behind it, that a mask does not hide.
  auto next_visible = [&](int tile) {
    return kSparse ? next_tile<kTileN>(params.mask, mask_row, tile, tiles.end) : tile;
  };

  int tile = next_visible(tiles.begin);
  if (tile < tiles.end) {
    load_tile<kTileM, kDim, kThreads>(q_tile, entry_start(params, params.q, entry),
                                      static_cast<int>(params.q.row), first_query, p.q_len,
                                      p.head_dim, true);
    load_tile<kTileM, kDim, kThreads>(dout_tile, entry_start(params, params.dout, entry),
                                      static_cast<int>(params.dout.row), first_query, p.q_len,
                                      p.v_dim, true);
    load_k(tile, 0);
    load_v(tile, 0);
    cp_async_commit_group();
  }
  auto warp_row = [] { return tid_x_again() / 32 * kWarpRows; };
  // LSE (0) or delta (2) of this thread's row g of the i-th product, or of g + 8.
  float lse[kMmaM][2], delta[kMmaM][2];
  const float* lse_delta = reinterpret_cast<const float*>(
      params.lse_delta + static_cast<int64>(entry) * params.row_pairs);
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_query + warp_row() + 16 * i + 8 * h + tid_x_again() % 32 / 4;
      lse[i][h] = lse_delta[row / 2 * 4 + row % 2];
      delta[i][h] = lse_delta[row / 2 * 4 + row % 2 + 2];
    }
  }
  float dq[kMmaM][kMmaD][4];
  clear(dq);

  // -------------------------------------------------------------------------------- tiles of keys
#pragma unroll 1
  for (int i = 0; tile < tiles.end; ++i) {
    const int k_stage = i % kKStages, v_stage = i % kStages;
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and nobody reads the one before it any more
    const int next = next_visible(tile + 1);
    if (next < tiles.end) {
      load_k(next, (i + 1) % kKStages);
      if constexpr (kStages > 1) load_v(next, (i + 1) % kStages);
    }
    cp_async_commit_group();
    int words_index = kFullBlock;
    if constexpr (kSparse) {
      words_index = block_words_index(params.mask, mask_row, tile * kTileN / kMaskBlock);
    }

    float s[kMmaM][kMmaN][4], dp[kMmaM][kMmaN][4];
    const uint32 k_tile = k_stages + k_stage * kTileBytes;
    multiply_rows<kBf16, QueryTile, KeyTile, kDim / 16>(s, q_tile + a_lane<QueryTile>(warp_row()),
                                                        k_tile + b_lane<KeyTile>(0));
    multiply_rows<kBf16, QueryTile, KeyTile, kDim / 16>(
        dp, dout_tile + a_lane<QueryTile>(warp_row()),
        v_stages + v_stage * kTileBytes + b_lane<KeyTile>(0));
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[i][j][e] -= delta[i][e / 2];
      }
    }
    const int lane = tid_x_again() % 32;
    const int own = first_query + warp_row() + lane / 4, other = tile * kTileN + lane % 4 * 2;
    if constexpr (kScoreMod) {
      apply_score_mod_backward<false>(p, batch_offsets(p, entry).bias, s, dp, own, other);
    }
    const bool in_band = tile >= tiles.full_begin && tile < tiles.full_end;
    mask_scores<false, kSparse>(params, s, in_band, words_index, own, other);
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
    uint32 ds[kMmaM][kMmaN][2];
    round_weights<kBf16>(dp, ds);
    if constexpr (kStages == 1) {
      __syncthreads();  // nobody reads this tile of V any more
      if (next < tiles.end) load_v(next, 0);
      cp_async_commit_group();
    }
    add_product<kBf16, KeyTile>(dq, ds, k_tile + b_trans_lane<KeyTile>());
    tile = next;
  }

  // ------------------------------------------------------------------------------------- epilogue
  // Each warp turns its own rows of Q, which no other warp reads, into those of dQ.
  cp_async_wait_group<0>();
  __syncwarp();
  NonfiniteProbe nonfinite_probe;
  const int rows = p.q_len - first_query;
  write_gradient<kBf16, QueryTile, 1>(q_tile, dq, warp_row(), 0, rows, p.scale, nonfinite_probe);
  if (nonfinite_probe.found())
    flag_nonfinite_queries(params.nonfinite_flags, p, entry, first_query + warp_row());
  __syncwarp();
  uint16* to = entry_start(params, params.dq, entry) + first_query * params.dq.row;
  store_rows<kTileM, kDim, kWarpRows>(q_tile, to, static_cast<int>(params.dq.row), warp_row(), rows,
                                      p.head_dim, true);
}
