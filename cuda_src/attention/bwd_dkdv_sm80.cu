// Attention backward for SM80 and later, keys and values: mma.sync, ldmatrix, cp.async.
//
// One block owns kTileN keys of one entry of keys and values and walks over the tiles of kTileM
// queries that see some of them, head by head of those that share the keys:
//   S^T = K Q^T,  P^T = exp(S^T - LSE),          dV += P^T dO
//   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),   dK += dS^T Q
// All sums are added up by one block in one order, so results are the same bits every time.
//
// Each warp has some keys, of which it may hold the scores of all queries of a tile and all columns
// of dK and dV: then P^T and dS^T, as accumulators of m16n8k16, are A operands as they stand.
// Where a row of the sums is too long for the registers of a warp, warps share keys.  Each of them
// computes the scores of some queries, puts weights into shared memory for the others, and sums up
// some columns (kExchangeWeights).  Tiles of Q, which the first product and the last one read, come
// through two stages by cp.async, those of dO through kStages.
#include "cuda_src/common/backward_sm80.cuh"
#include "cuda_src/common/softmax.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr bool kBf16 = FA_BF16;              // bfloat16, else float16
constexpr int kDim = FA_DIM;                 // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;            // queries of a tile
constexpr int kTileN = FA_TILE_N;            // keys of a block
constexpr int kWarps = FA_WARPS;             // of a block
constexpr int kStages = FA_STAGES;           // tiles of dO in flight
constexpr int kMinBlocks = FA_BLOCKS;        // blocks that should fit on a multiprocessor
constexpr int kScoreCols = FA_SCORE_GROUPS;  // warps that share the queries of a tile
constexpr int kSumCols = FA_SUM_GROUPS;      // warps that share the columns of the sums
constexpr bool kSparse = FA_SPARSE;          // with a mask
constexpr bool kExchangeWeights = kScoreCols > 1 || kSumCols > 1;
constexpr int kThreads = 32 * kWarps;
constexpr int kScoreRows = kTileN / (kWarps / kScoreCols);  // keys of a warp's scores
constexpr int kScoreQueries = kTileM / kScoreCols;          // queries of them
constexpr int kSumRows = kTileN / (kWarps / kSumCols);      // keys of a warp's sums
constexpr int kMmaM = kScoreRows / 16, kMmaN = kScoreQueries / 8;
constexpr int kSumM = kSumRows / 16, kSumN = kDim / kSumCols / 8;
constexpr int kQStages = 2;
static_assert(kDim % 32 == 0 && kDim <= 256, "dims are padded to a multiple of 32, at most 256");
static_assert(kMmaM * 16 == kScoreRows && kSumM * 16 == kSumRows && kMmaN % 2 == 0 &&
                  kSumN % 2 == 0,
              "warps own whole products");
static_assert(kExchangeWeights || kMmaM == kSumM, "weights stay where they are");
static_assert(kStages == 1 || kStages == kQStages, "dO comes with Q or in the middle of a tile");
static_assert(kMaskBlock % kTileM == 0 && kMaskBlock % kTileN == 0, "tiles divide a mask's blocks");
static_assert(kTileM / 2 <= kThreads, "a thread loads what is known of two queries");

using KeyTile = SharedTile<kTileN, kDim>;
using QueryTile = SharedTile<kTileM, kDim>;
using WeightTile = SharedTile<kTileN, kTileM>;

// ---------------------------------------------------------------------------------------- storage
// Elements of P^T and of dS^T, where warps put them down for each other; else for form's sake.
constexpr int kPElements = kExchangeWeights ? kTileN * kTileM : 8;
// What the block has to do; left in shared memory, since registers are short in the loop.
struct WorkTile {
  const uint16 *q, *dout;  // of the first one of the heads that share the keys
  const float4* lse_delta;
  QueryTiles tiles;  // of each head
  uint32 entry;      // of keys
  int heads;         // 0 where no query sees a key
  int first_key;
};
struct SharedStorage {
  uint16 k[kTileN * kDim];  // later dK
  uint16 v[kTileN * kDim];  // later dV
  uint16 q[kQStages][kTileM * kDim];
  uint16 dout[kStages][kTileM * kDim];
  uint16 p[kPElements], ds[kPElements];
  float4 lse_delta[kQStages][kTileM / 2];  // LSE of two queries, delta of them
  WorkTile work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// A tile of queries of one of the entries that share the keys.
struct QueryTileStep {
  int head, tile;
};

// Where this warp's scores begin, and its sums.
FA_DEVICE int score_row() { return tid_x_again() / 32 / kScoreCols * kScoreRows; }
FA_DEVICE int score_col() { return tid_x_again() / 32 % kScoreCols * kScoreQueries; }
FA_DEVICE int sum_row() { return tid_x_again() / 32 / kSumCols * kSumRows; }
FA_DEVICE int sum_pair() { return tid_x_again() / 32 % kSumCols; }

// sums += weights times rows of Q or dO, weights being this warp's own or, from all, in a tile.
template <bool kFromTile, typename Sums, typename Weights>
FA_DEVICE void accumulate_gradient(Sums& sums, const Weights& weights, uint32 weight_tile,
                                   uint32 rows) {
  if constexpr (kFromTile) {
    add_product<kBf16, WeightTile, QueryTile, kTileM / 16, kSumCols>(
        sums, weight_tile + a_lane<WeightTile>(sum_row()), rows);
  } else {
    add_product<kBf16, QueryTile>(sums, weights, rows);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dkdv_sm80(const __grid_constant__ BackwardParams params) {
  // ---------------------------------------------------------------------------------------- setup
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  constexpr uint32 kTileBytes = kTileM * kDim * 2;
  const uint32 k_tile = cvta_to_shared(shared.k), v_tile = cvta_to_shared(shared.v);
  const uint32 q_stages = cvta_to_shared(shared.q), dout_stages = cvta_to_shared(shared.dout);
  const uint32 p_tile = cvta_to_shared(shared.p);
  const uint32 ds_tile = cvta_to_shared(shared.ds);

  if (threadIdx.x == 0) {
    // Under a causal mask the first keys are seen by the most queries: they go first.
    const uint32 k_tiles = (p.k_len + kTileN - 1) / kTileN;
    WorkTile& work = shared.work;
    work.entry = blockIdx.x / k_tiles;
    work.first_key = static_cast<int>(blockIdx.x - work.entry * k_tiles) * kTileN;
    work.tiles = query_tiles(p, work.first_key, min(work.first_key + kTileN, p.k_len) - 1, kTileM);
    work.heads = work.tiles.begin < work.tiles.end ? params.group : 0;
    const uint32 first = work.entry * params.group;
    work.q = entry_start(params, params.q, first);
    work.dout = entry_start(params, params.dout, first);
    work.lse_delta = params.lse_delta + static_cast<int64>(first) * params.row_pairs;
  }
  __syncthreads();
  const WorkTile& work = shared.work;

  // Heads that share keys are neighbours along the last axis.
  auto load_q = [&](const QueryTileStep& step, int stage) {
    load_tile<kTileM, kDim, kThreads>(
        q_stages + stage * kTileBytes, work.q + step.head * params.q.batch[kAxes - 1],
        static_cast<int>(params.q.row), step.tile * kTileM, p.q_len, p.head_dim, true);
    const int tid = tid_x_again();
    if (tid < kTileM / 2) {
      const int64 at = static_cast<int64>(step.head) * params.row_pairs + step.tile * (kTileM / 2);
      cp_async_cg_16(cvta_to_shared(&shared.lse_delta[stage][tid]), work.lse_delta + at + tid, 16);
    }
  };
  auto load_dout = [&](const QueryTileStep& step, int stage) {
    load_tile<kTileM, kDim, kThreads>(
        dout_stages + stage * kTileBytes, work.dout + step.head * params.dout.batch[kAxes - 1],
        static_cast<int>(params.dout.row), step.tile * kTileM, p.q_len, p.v_dim, true);
  };
  auto mask_row = [&](const QueryTileStep& step) {
    return table_row(params.mask, work.entry * params.group + step.head,
                     work.first_key / kMaskBlock);
  };
  // The step, or the first one behind it, whose tile there is and a mask does not hide.
  auto next_visible = [&](QueryTileStep step) {
    while (step.head < work.heads) {
      if constexpr (kSparse) {
        step.tile = next_tile<kTileM>(params.mask, mask_row(step), step.tile, work.tiles.end);
      }
      if (step.tile < work.tiles.end) break;
      step = {step.head + 1, work.tiles.begin};
    }
    return step;
  };

  QueryTileStep step = next_visible({0, work.tiles.begin});
  if (step.head < work.heads) {
    const uint32 first = work.entry * params.group;
    load_tile<kTileN, kDim, kThreads>(k_tile, entry_start(params, params.k, first),
                                      static_cast<int>(params.k.row), work.first_key, p.k_len,
                                      p.head_dim, true);
    load_tile<kTileN, kDim, kThreads>(v_tile, entry_start(params, params.v, first),
                                      static_cast<int>(params.v.row), work.first_key, p.k_len,
                                      p.v_dim, true);
    load_q(step, 0);
    load_dout(step, 0);
    cp_async_commit_group();
  }
  float dk[kSumM][kSumN][4], dv[kSumM][kSumN][4];
  clear(dk);
  clear(dv);

  // ----------------------------------------------------------------------------- tiles of queries
#pragma unroll 1
  for (int i = 0; step.head < work.heads; ++i) {
    const int q_stage = i % kQStages, dout_stage = i % kStages;
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and nobody reads the one before it any more
    const QueryTileStep next = next_visible({step.head, step.tile + 1});
    if (next.head < work.heads) {
      load_q(next, (i + 1) % kQStages);
      if constexpr (kStages > 1) load_dout(next, (i + 1) % kStages);
    }
    cp_async_commit_group();
    int words_index = kFullBlock;
    if constexpr (kSparse) {
      words_index = block_words_index(params.mask, mask_row(step), step.tile * kTileM / kMaskBlock);
    }

    float s[kMmaM][kMmaN][4], dp[kMmaM][kMmaN][4];
    const uint32 q_tile = q_stages + q_stage * kTileBytes;
    const uint32 dout_tile = dout_stages + dout_stage * kTileBytes;
    multiply_rows<kBf16, KeyTile, QueryTile, kDim / 16>(s, k_tile + a_lane<KeyTile>(score_row()),
                                                        q_tile + b_lane<QueryTile>(score_col()));
    multiply_rows<kBf16, KeyTile, QueryTile, kDim / 16>(dp, v_tile + a_lane<KeyTile>(score_row()),
                                                        dout_tile + b_lane<QueryTile>(score_col()));

    const int lane = tid_x_again() % 32;
    const float4* lse_delta = &shared.lse_delta[q_stage][score_col() / 2 + lane % 4];
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(&lse_delta[4 * j].z);
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[i][j][e] -= e % 2 ? delta.y : delta.x;
      }
    }
    const int own = work.first_key + score_row() + lane / 4;
    const int other = step.tile * kTileM + score_col() + lane % 4 * 2;
    if constexpr (kScoreMod) {
      apply_score_mod_backward<true>(
          p, batch_offsets(p, work.entry * params.group + step.head).bias, s, dp, own, other);
    }
    const bool in_band = step.tile >= work.tiles.full_begin && step.tile < work.tiles.full_end;
    mask_scores<true, kSparse>(params, s, in_band, words_index, own, other);
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(&lse_delta[4 * j].x);
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[i][j][e] = ex2_approx_ftz(fmaf(s[i][j][e], p.exp2_scale, -(e % 2 ? lse.y : lse.x)));
          dp[i][j][e] = slope_times(dp[i][j][e], s[i][j][e]);
        }
      }
    }

    uint32 weights[kMmaM][kMmaN][2], ds[kMmaM][kMmaN][2];
    round_weights<kBf16>(s, weights);
    round_weights<kBf16>(dp, ds);
    if constexpr (kExchangeWeights) {
      write_p<WeightTile>(p_tile, weights, score_row(), score_col());
      write_p<WeightTile>(ds_tile, ds, score_row(), score_col());
      __syncthreads();
    }
    const uint32 columns = b_trans_lane<QueryTile>(sum_pair());
    accumulate_gradient<kExchangeWeights>(dv, weights, p_tile, dout_tile + columns);
    if constexpr (kStages == 1) {
      __syncthreads();  // nobody reads this tile of dO any more
      if (next.head < work.heads) load_dout(next, 0);
      cp_async_commit_group();
    }
    accumulate_gradient<kExchangeWeights>(dk, ds, ds_tile, q_tile + columns);
    step = next;
  }

  // ------------------------------------------------------------------------------------- epilogue
  cp_async_wait_group<0>();
  __syncthreads();  // K and V have been read by all
  NonfiniteProbe nonfinite_probe;
  const int rows = p.k_len - work.first_key;
  write_gradient<kBf16, KeyTile, kSumCols>(k_tile, dk, sum_row(), sum_pair(), rows, p.scale,
                                           nonfinite_probe);
  write_gradient<kBf16, KeyTile, kSumCols>(v_tile, dv, sum_row(), sum_pair(), rows, 1.0f,
                                           nonfinite_probe);
  if (nonfinite_probe.found()) {
    flag_nonfinite_keys(params.nonfinite_flags, p, params.entries * params.group, work.entry,
                        work.first_key + sum_row());
  }
  __syncthreads();
  auto store = [&](uint32 tile, const Array& array, int cols) {
    constexpr int kOwnRows = kTileN / kWarps;
    uint16* to = entry_start(params, array, work.entry * params.group) + work.first_key * array.row;
    store_rows<kTileN, kDim, kOwnRows>(tile, to, static_cast<int>(array.row),
                                       threadIdx.x / 32 * kOwnRows, rows, cols, true);
  };
  store(k_tile, params.dk, p.head_dim);
  store(v_tile, params.dv, p.v_dim);
}
