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
#include "cuda_src/common/staged_bias.cuh"

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

// A bias of pairs in 16 bits comes by way of shared memory where two blocks still fit.  As it lies
// in global memory a thread would load each element by itself, keys being its rows.
constexpr bool kStageBias =
    kHasBias && kBiasIs16Bit && kBiasAxes == kBiasOfPair && !kSparse && kDim <= 64;

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
template <bool kStaged>
struct BiasStorage {};
template <>
struct BiasStorage<true> {
  uint16 bias[kWarps][kScoreQueries * kScoreRows];  // of each warp's scores
};
struct SharedStorage : BiasStorage<kStageBias> {
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

// -------------------------------------------------------------------------------------------- work
// Finds the keys of the block and the tiles of queries that see some of them, by one thread.
FA_DEVICE void find_work(const BackwardParams& params, WorkTile& work) {
  const AttentionParams& p = params.common;
  // Under a causal mask the first keys are seen by the most queries: they go first.
  const uint32 k_tiles = (p.k_len + kTileN - 1) / kTileN;
  work.entry = blockIdx.x / k_tiles;
  work.first_key = static_cast<int>(blockIdx.x - work.entry * k_tiles) * kTileN;
  work.tiles = query_tiles(p, work.first_key, min(work.first_key + kTileN, p.k_len) - 1, kTileM);
  work.heads = work.tiles.begin < work.tiles.end ? params.group : 0;
  const uint32 first = work.entry * params.group;
  work.q = entry_start(params, params.q, first);
  work.dout = entry_start(params, params.dout, first);
  work.lse_delta = params.lse_delta + static_cast<int64>(first) * params.row_pairs;
}

FA_DEVICE int64 mask_row(const BackwardParams& params, const WorkTile& work,
                         const QueryTileStep& step) {
  return table_row(params.mask, work.entry * params.group + step.head, work.first_key / kMaskBlock);
}

// ------------------------------------------------------------------------------------------- loads
// Copies are started by cp.async; the caller commits their group.

// The address of a stage of Q or of dO.
FA_DEVICE uint32 stage_of(const uint16* stages, int stage) {
  return cvta_to_shared(stages) + stage * static_cast<uint32>(kTileM * kDim * 2);
}

// Q of a step, with LSE and delta of its rows.  Heads that share keys are neighbours along the last
// axis.
FA_DEVICE void load_q(const BackwardParams& params, SharedStorage& shared,
                      const QueryTileStep& step, int stage) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  load_tile<kTileM, kDim, kThreads>(
      stage_of(shared.q[0], stage), work.q + step.head * params.q.batch[kAxes - 1],
      static_cast<int>(params.q.row), step.tile * kTileM, p.q_len, p.head_dim, true);
  const int tid = tid_x_again();
  if (tid < kTileM / 2) {
    const int64 at = static_cast<int64>(step.head) * params.row_pairs + step.tile * (kTileM / 2);
    cp_async_cg_16(cvta_to_shared(&shared.lse_delta[stage][tid]), work.lse_delta + at + tid, 16);
  }
}

FA_DEVICE void load_dout(const BackwardParams& params, SharedStorage& shared,
                         const QueryTileStep& step, int stage) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  load_tile<kTileM, kDim, kThreads>(
      stage_of(shared.dout[0], stage), work.dout + step.head * params.dout.batch[kAxes - 1],
      static_cast<int>(params.dout.row), step.tile * kTileM, p.q_len, p.v_dim, true);
}

// K and V of the block's keys.
FA_DEVICE void load_k_v(const BackwardParams& params, SharedStorage& shared) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  const uint32 first = work.entry * params.group;
  load_tile<kTileN, kDim, kThreads>(cvta_to_shared(shared.k), entry_start(params, params.k, first),
                                    static_cast<int>(params.k.row), work.first_key, p.k_len,
                                    p.head_dim, true);
  load_tile<kTileN, kDim, kThreads>(cvta_to_shared(shared.v), entry_start(params, params.v, first),
                                    static_cast<int>(params.v.row), work.first_key, p.k_len,
                                    p.v_dim, true);
}

// -------------------------------------------------------------------------------- tiles of queries
// All arrays of registers belong to the kernel's frame, and phases take them by reference.
// threadIdx.x is read again at each use (tid_x_again): kept over the loop, lane and warp would take
// registers that the products need.
using Scores = float[kMmaM][kMmaN][4];

// S^T = K Q^T or dP^T = V dO^T, of this warp's scores.
FA_DEVICE void gemm_scores(Scores& d, const uint16* keys, uint32 tile) {
  multiply_rows<kBf16, KeyTile, QueryTile, kDim / 16>(
      d, cvta_to_shared(keys) + a_lane<KeyTile>(score_row()),
      tile + b_lane<QueryTile>(score_col()));
}

// dP^T of weights that dropout keeps, scaled as these are, and 0 of others.
FA_DEVICE void drop_gradients(const BackwardParams& params, const WorkTile& work,
                              const QueryTileStep& step, Scores& dp, uint32 (&kept)[kMmaM][2],
                              int own, int other) {
#if FA_DROPOUT
  const DropoutParams& p = params.common.dropout;
  const DropoutEntry entry = dropout_entry(p, work.entry * params.group + step.head);
  make_kept_bits_of_keys<kMmaN>(p, entry, own, other, kept);
  scale_kept(dp, kept, p.factor);
#endif
}

// rows[4 j] has LSE and delta of the two queries of this thread's scores s[i][j].
FA_DEVICE void subtract_delta(Scores& dp, const float4* rows) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    const float2 delta = *reinterpret_cast<const float2*>(&rows[4 * j].z);
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[i][j][e] -= e % 2 ? delta.y : delta.x;
    }
  }
}

// S becomes P = exp(S - LSE), and dP - delta becomes dS = P (dP - delta).
FA_DEVICE void compute_p_ds(Scores& s, Scores& dp, const float4* rows, const AttentionParams& p) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    const float2 lse = *reinterpret_cast<const float2*>(&rows[4 * j].x);
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[i][j][e] = ex2_approx_ftz(fmaf(s[i][j][e], p.exp2_scale, -(e % 2 ? lse.y : lse.x)));
        dp[i][j][e] = slope_times(dp[i][j][e], s[i][j][e]);
      }
    }
  }
}

// Templates, for other builds have no stage.
template <typename Shared>
FA_DEVICE uint32 bias_stage(const Shared& shared) {
  return cvta_to_shared(shared.bias[tid_x_again() / 32]);
}

// Starts to copy the bias of this warp's scores of a step, as a group of its own.
template <typename Shared>
FA_DEVICE void load_bias_tile(const BackwardParams& params, const Shared& shared,
                              const QueryTileStep& step) {
  if constexpr (kStageBias) {
    const AttentionParams& p = params.common;
    stage_bias<kScoreQueries, kScoreRows>(
        p, batch_offsets(p, shared.work.entry * params.group + step.head).bias, bias_stage(shared),
        step.tile * kTileM + score_col(), shared.work.first_key + score_row());
  }
}

// Makes scores of products with the bias that a stage holds, and multiplies dP - delta by the slope
// of each.
template <typename Shared>
FA_DEVICE void add_staged_bias(const AttentionParams& p, const Shared& shared, Scores& s,
                               Scores& dp) {
  wait_for_staged_bias<1>();  // the next tile of Q may be under way
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    OperandTile<true, kMmaN> bias;
    read_staged_bias_of_keys<kScoreQueries, kScoreRows>(bias, bias_stage(shared), 16 * i);
    apply_score_mod(p, s[i], bias, [&](int j, int e, float slope) { dp[i][j][e] *= slope; });
  }
  __syncwarp();  // the stage may be written again
}

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

// ---------------------------------------------------------------------------------------- epilogue
FA_DEVICE void store_gradient(const BackwardParams& params, const WorkTile& work, uint32 tile,
                              const Array& array, int rows, int cols) {
  constexpr int kOwnRows = kTileN / kWarps;
  uint16* to = entry_start(params, array, work.entry * params.group) + work.first_key * array.row;
  store_rows<kTileN, kDim, kOwnRows>(tile, to, static_cast<int>(array.row),
                                     threadIdx.x / 32 * kOwnRows, rows, cols, true);
}

// Puts dK over K and dV over V, and stores them.
FA_DEVICE void write_dk_dv(const BackwardParams& params, SharedStorage& shared,
                           const float (&dk)[kSumM][kSumN][4], const float (&dv)[kSumM][kSumN][4]) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  const uint32 k_tile = cvta_to_shared(shared.k), v_tile = cvta_to_shared(shared.v);
  cp_async_wait_group<0>();
  __syncthreads();  // K and V have been read by all
  NonfiniteProbe nonfinite_probe;
  const int rows = p.k_len - work.first_key;
  write_gradient<kBf16, KeyTile, kSumCols>(k_tile, dk, sum_row(), sum_pair(), rows, p.scale,
                                           nonfinite_probe);
  write_gradient<kBf16, KeyTile, kSumCols>(v_tile, dv, sum_row(), sum_pair(), rows, kept_factor(p),
                                           nonfinite_probe);
  if (nonfinite_probe.found()) {
    flag_nonfinite_keys(params.nonfinite_flags, p, params.entries * params.group, work.entry,
                        work.first_key + sum_row());
  }
  __syncthreads();
  store_gradient(params, work, k_tile, params.dk, rows, p.head_dim);
  store_gradient(params, work, v_tile, params.dv, rows, p.v_dim);
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dkdv_sm80(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const uint32 p_tile = cvta_to_shared(shared.p), ds_tile = cvta_to_shared(shared.ds);
  if (threadIdx.x == 0) find_work(params, shared.work);
  __syncthreads();
  const WorkTile& work = shared.work;

  // The step, or the first one behind it, whose tile there is and a mask does not hide.  A lambda:
  // as a function it changes which registers a build for a mask takes.
  auto next_visible = [&](QueryTileStep step) {
    while (step.head < work.heads) {
      if constexpr (kSparse) {
        step.tile =
            next_tile<kTileM>(params.mask, mask_row(params, work, step), step.tile, work.tiles.end);
      }
      if (step.tile < work.tiles.end) break;
      step = {step.head + 1, work.tiles.begin};
    }
    return step;
  };
  QueryTileStep step = next_visible({0, work.tiles.begin});
  if (step.head < work.heads) {
    load_k_v(params, shared);
    load_q(params, shared, step, 0);
    load_dout(params, shared, step, 0);
    cp_async_commit_group();
  }
  float dk[kSumM][kSumN][4], dv[kSumM][kSumN][4];
  clear(dk);
  clear(dv);

#pragma unroll 1
  for (int i = 0; step.head < work.heads; ++i) {
    const int q_stage = i % kQStages, dout_stage = i % kStages;
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and all warps have read the one before it
    load_bias_tile(params, shared, step);
    const QueryTileStep next = next_visible({step.head, step.tile + 1});
    if (next.head < work.heads) {
      load_q(params, shared, next, (i + 1) % kQStages);
      if constexpr (kStages > 1) load_dout(params, shared, next, (i + 1) % kStages);
    }
    cp_async_commit_group();
    int words_index = kFullBlock;
    if constexpr (kSparse) {
      words_index = block_words_index(params.mask, mask_row(params, work, step),
                                      step.tile * kTileM / kMaskBlock);
    }

    Scores s, dp;
    const uint32 q_tile = stage_of(shared.q[0], q_stage);
    const uint32 dout_tile = stage_of(shared.dout[0], dout_stage);
    gemm_scores(s, shared.k, q_tile);      // S^T = K Q^T
    gemm_scores(dp, shared.v, dout_tile);  // dP^T = V dO^T
    const int lane = tid_x_again() % 32;
    const float4* rows = &shared.lse_delta[q_stage][score_col() / 2 + lane % 4];
    if constexpr (!kDropout) subtract_delta(dp, rows);
    const int own = work.first_key + score_row() + lane / 4;
    const int other = step.tile * kTileM + score_col() + lane % 4 * 2;
    uint32 kept[kMmaM][2];
    if constexpr (kDropout) {
      drop_gradients(params, work, step, dp, kept, own, other);
      subtract_delta(dp, rows);
    }
    const int64 bias_offset =
        kScoreMod ? batch_offsets(params.common, work.entry * params.group + step.head).bias : 0;
    if (kStageBias && has_aligned_rows(params.common, bias_offset)) {
      if constexpr (kStageBias) add_staged_bias(params.common, shared, s, dp);
    } else if constexpr (kScoreMod) {
      apply_score_mod_backward<true>(params.common, bias_offset, s, dp, own, other);
    }
    const bool in_band = step.tile >= work.tiles.full_begin && step.tile < work.tiles.full_end;
    mask_scores<true, kSparse>(params, params.common, s, in_band, words_index, own, other);
    compute_p_ds(s, dp, rows, params.common);  // P^T = exp(S^T - LSE), dS^T = P^T (dP^T - delta)
    if constexpr (kDropout) drop_by_bits(s, kept);

    uint32 weights[kMmaM][kMmaN][2], ds[kMmaM][kMmaN][2];
    round_weights<kBf16>(s, weights);
    round_weights<kBf16>(dp, ds);
    if constexpr (kExchangeWeights) {
      write_p<WeightTile>(p_tile, weights, score_row(), score_col());
      write_p<WeightTile>(ds_tile, ds, score_row(), score_col());
      __syncthreads();
    }
    // dV += P^T dO, then dK += dS^T Q.
    const uint32 columns = b_trans_lane<QueryTile>(sum_pair());
    accumulate_gradient<kExchangeWeights>(dv, weights, p_tile, dout_tile + columns);
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps have read this tile of dO
      if (next.head < work.heads) load_dout(params, shared, next, 0);
      cp_async_commit_group();
    }
    accumulate_gradient<kExchangeWeights>(dk, ds, ds_tile, q_tile + columns);
    step = next;
  }

  write_dk_dv(params, shared, dk, dv);
}
