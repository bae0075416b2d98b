// Attention backward for SM90, bias of queries and keys: TMA, wgmma, warp specialisation.
//
// One block owns a tile of kTileM queries and kTileN keys of the gradient of the bias, and walks
// over the batch entries that share its elements.  Of each it computes
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dbias += P (dP - delta)
// pair by pair in registers, 64 queries for each computing warpgroup.
//
// Q and K of an entry come into one stage of shared memory, dO and V into the next one; where rows
// are too long for that, kStageDim columns of them come into each of several stages.  All entries
// have the same bias: each thread keeps what it needs of it in shared memory.
//
// A pair is a number of its own here: what a hidden one holds reaches no other, and nothing has to
// be computed again.  It is launched after bwd_nonfinite, which leaves what is known of rows whose
// LSE is too large for weights (common/large_lse.cuh).
#include "cuda_src/common/backward_sm90.cuh"
#include "cuda_src/common/dbias.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/wgmma.cuh"

constexpr bool kBf16 = FA_BF16;          // bfloat16, else float16
constexpr int kDim = FA_DIM;             // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;        // queries of a tile
constexpr int kTileN = FA_TILE_N;        // keys of a tile
constexpr int kStages = FA_STAGES;       // for columns of Q and K, or of dO and V, of an entry
constexpr int kStageDim = FA_STAGE_DIM;  // these columns
constexpr int kColumnParts = kDim / kStageDim;  // stages that Q and K take
constexpr int kGroups = 2;                      // warpgroups that compute
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kComputing = 128 * kGroups;  // threads
constexpr int kBlocks = kStageDim / 64;    // a tile in shared memory has blocks of 64 columns
constexpr int kTileBytes = kTileM * 128 * kBlocks;
// Steps whose LSE and delta are in use at a time: they come with the first columns of Q and K.
constexpr int kRowStages = (kStages + 2 * kColumnParts - 1) / (2 * kColumnParts);
// Stages of dO and V whose product is started while those of Q and K are still in use.
constexpr int kEarlyParts =
    kStages - kColumnParts < kColumnParts ? kStages - kColumnParts : kColumnParts;
constexpr int kMmaN = kTileN / 8;
// Groups of 8 keys whose bias is in registers at a time.
constexpr int kPart = kBiasIs16Bit ? 4 : 2;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kBiasAxes == kBiasOfPair, "the gradient is that of a bias of queries and keys");
static_assert(!kSparse, "a mask wants bwd_dbias_sm80");
static_assert(kTileM == 64 * kGroups && kTileN == 128, "a warpgroup has 64 queries, 128 keys");
static_assert(kDim % 64 == 0 && kDim <= 256, "dims are padded to whole blocks of columns");
static_assert(kDim % kStageDim == 0 && kStageDim % 64 == 0, "stages hold whole blocks of columns");
static_assert(kStages > kColumnParts, "Q and K are in shared memory, and some of dO and V");

using Tile = SharedTile<kTileM, kStageDim>;  // of queries or keys
using BiasPart = BiasTile<false, kPart>;
constexpr int kPartVectors = sizeof(BiasPart) / sizeof(uint4);

struct DbiasParams : BwdSm90Params {
  void* dbias;                                          // of the type of the bias
  const float2* row_statistics;                         // as bwd_nonfinite leaves them
  int64 dbias_row, dbias_col, dbias_batch[kDbiasAxes];  // strides; 0 along an axis summed over
};
static_assert(sizeof(DbiasParams) == FA_DBIAS_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

struct SharedStorage {
  struct {
    uint8 queries[kTileBytes], keys[kTileBytes];  // columns of Q and K, or of dO and V
  } tiles[kStages];
  uint4 bias[kMmaN / kPart * kPartVectors][kComputing];  // of each thread
  float4 lse_delta[kRowStages][kTileM / 2];              // of two queries each
  uint64 full[kStages], empty[kStages];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

using Pipeline = PipelineState<kStages>;
using Scores = float[1][kMmaN][4];  // 64 queries x kTileN keys, as accumulators of m64nN hold them

// What a block owns.
struct OwnTile {
  uint32 entry;                // of the gradient, counted over the axes that it has
  int first_query, first_key;  // of the tile
  int steps;                   // entries that share it; 0 where the band hides all of it
  bool in_band;                // whether all of it is seen
};

FA_DEVICE OwnTile find_own_tile(const DbiasParams& params) {
  const AttentionParams& p = params.common;
  const uint32 row = blockIdx.x / params.k_tiles;
  const int key_tile = static_cast<int>(blockIdx.x - row * params.k_tiles);
  OwnTile own;
  own.entry = row / p.q_tiles;
  own.first_query = static_cast<int>(row - own.entry * p.q_tiles) * kTileM;
  own.first_key = key_tile * kTileN;
  const int last_query = min(own.first_query + kTileM, p.q_len) - 1;
  const KeyTiles seen = key_tiles(p, own.first_query, last_query, kTileN);
  own.in_band = key_tile >= seen.full_begin && key_tile < seen.full_end;
  own.steps = key_tile >= seen.begin && key_tile < seen.end;
#pragma unroll
  for (int axis = 0; axis < kDbiasAxes; ++axis) {
    if (params.dbias_batch[axis] == 0) own.steps *= params.size[axis];
  }
  return own;
}

// --------------------------------------------------------------------------------------- producer
FA_DEVICE void produce(const DbiasParams& params, SharedStorage& shared, const OwnTile& own) {
  prefetch_tensormap(&params.q_map);
  prefetch_tensormap(&params.k_map);
  prefetch_tensormap(&params.dout_map);
  prefetch_tensormap(&params.v_map);
  Pipeline pipe;
#pragma unroll 1
  for (int step = 0; step < own.steps; ++step) {
    const uint32 entry = entry_of(params, own.entry, step);
    int coordinate[3];
    entry_coordinates(params, entry, coordinate);
    auto load = [&](const TensorMap& queries, const int (&queries_step)[3], const TensorMap& keys,
                    const int (&keys_step)[3], int column, int more_bytes) {
      auto& to = shared.tiles[pipe.index()];
      wait(shared.empty[pipe.index()], pipe.parity() ^ 1);
      const uint32 full = cvta_to_shared(&shared.full[pipe.index()]);
      mbarrier_arrive_expect_tx(full, 2 * kTileBytes + more_bytes);
      load_rows<kTileM, kBlocks>(to.queries, queries, full, kEvictNormal, own.first_query,
                                 queries_step, coordinate, 0, column);
      load_rows<kTileN, kBlocks>(to.keys, keys, full, kEvictNormal, own.first_key, keys_step,
                                 coordinate, 0, column);
      pipe.advance();
      return full;
    };
    auto& rows = shared.lse_delta[step % kRowStages];
    const uint32 full =
        load(params.q_map, params.q_step, params.k_map, params.k_step, 0, sizeof(rows));
    load_lse_delta<kTileM>(rows, params, full, entry, own.first_query);
#pragma unroll
    for (int part = 1; part < kColumnParts; ++part)
      load(params.q_map, params.q_step, params.k_map, params.k_step, part * kStageDim, 0);
#pragma unroll
    for (int part = 0; part < kColumnParts; ++part)
      load(params.dout_map, params.dout_step, params.v_map, params.v_step, part * kStageDim, 0);
  }
}

// -------------------------------------------------------------------------------------- computing
FA_DEVICE int thread_in_group() { return static_cast<int>(opaque(threadIdx.x) % 128); }
FA_DEVICE int lane_in_warp() { return thread_in_group() % 32; }
// The first of a thread's two rows of the tile; the other one is 8 rows after it.
FA_DEVICE int warp_row(int group) { return 64 * group + thread_in_group() / 32 * 16; }
FA_DEVICE int own_row(int group) { return warp_row(group) + lane_in_warp() / 4; }
FA_DEVICE int own_col() { return lane_in_warp() % 4 * 2; }
FA_DEVICE int computing_thread(int group) { return 128 * group + thread_in_group(); }

// D += A B^T of this warpgroup's queries and the keys, over the columns of a stage, started once
// they have landed; D = A B^T where they are the first columns.
FA_DEVICE void gemm(Scores& d, const SharedStorage& shared, Pipeline pipe, bool is_first,
                    int group) {
  wait(shared.full[pipe.index()], pipe.parity());
  const auto& tiles = shared.tiles[pipe.index()];
  wgmma_fence();
  const uint64 a = wgmma_descriptor(cvta_to_shared(tiles.queries) + group * 64 * 128, 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(tiles.keys), 0);
#pragma unroll
  for (int step = 0; step < kStageDim / 16; ++step) {
    // 16 columns are 32 bytes of a block's rows.
    wgmma_m64k16_ss<kBf16, kTileN>(d[0], wgmma_at(a, step / 4 * kTileM * 128 + step % 4 * 32),
                                   wgmma_at(b, step / 4 * kTileN * 128 + step % 4 * 32),
                                   !is_first || step > 0);
  }
  wgmma_commit_group();
}

// The stage of a part of the columns, given the first one.
FA_DEVICE Pipeline of_part(Pipeline first, int part) {
  first.advance(part);
  return first;
}

FA_DEVICE void release_parts(SharedStorage& shared, Pipeline first) {
#pragma unroll
  for (int part = 0; part < kColumnParts; ++part)
    release_per_lane(shared.empty[of_part(first, part).index()]);
}

// Where 16 bytes of a row of Q or K are, whose tile begins kBegin bytes into its stages.
template <int kBegin>
struct StageChunks {
  const SharedStorage& shared;
  Pipeline first;

  __device__ __forceinline__ uint32 operator()(int row, int chunk) const {
    constexpr int kChunks = kStageDim / 8;
    const auto& stage = shared.tiles[of_part(first, chunk / kChunks).index()];
    return cvta_to_shared(&stage) + kBegin + Tile::offset(row, chunk % kChunks);
  }
};

FA_DEVICE void keep_bias(const DbiasParams& params, SharedStorage& shared, const OwnTile& own,
                         int group) {
  const AttentionParams& p = params.common;
  const int64 offset = batch_offsets(p, entry_of(params, own.entry, 0)).bias;
  const int query = own.first_query + own_row(group), key = own.first_key + own_col();
#pragma unroll
  for (int part = 0; part < kMmaN / kPart; ++part) {
    BiasPart bias;
    bias.load(p, offset, query, key + 8 * kPart * part);
    const auto& words = reinterpret_cast<const uint32(&)[4 * kPartVectors]>(bias.bits);
#pragma unroll
    for (int i = 0; i < kPartVectors; ++i) {
      shared.bias[part * kPartVectors + i][computing_thread(group)] =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
    }
  }
}

// Turns products into scores.
FA_DEVICE void products_to_scores(Scores& s, const DbiasParams& params, const SharedStorage& shared,
                                  int group) {
#pragma unroll
  for (int part = 0; part < kMmaN / kPart; ++part) {
    BiasPart bias;
    auto& words = reinterpret_cast<uint32(&)[4 * kPartVectors]>(bias.bits);
#pragma unroll
    for (int i = 0; i < kPartVectors; ++i) {
      const uint4 four = shared.bias[part * kPartVectors + i][computing_thread(group)];
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
    apply_score_mod(params.common, reinterpret_cast<float (&)[kPart][4]>(s[0][kPart * part]), bias);
  }
}

// Turns scores into weights.  A query that does not exist, or that attends to nothing, has an
// infinite LSE: its pairs are hidden, whatever they hold.
FA_DEVICE void scores_to_weights(Scores& s, float exp2_scale, const float (&lse)[2]) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool is_hidden = s[0][j][e] == -FA_INFINITY || lse[e / 2] == FA_INFINITY;
      const float weight = ex2_approx_ftz(fmaf(s[0][j][e], exp2_scale, -lse[e / 2]));
      s[0][j][e] = is_hidden ? kHiddenWeight : weight;
    }
  }
}

// Adds P (dP - delta) of the pairs that are not hidden.
FA_DEVICE void add_step(Scores& sums, const Scores& weights, const Scores& dp,
                        const float (&delta)[2]) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight = weights[0][j][e];
      const float sum = fmaf(weight, dp[0][j][e] - delta[e / 2], sums[0][j][e]);
      sums[0][j][e] = weight == kHiddenWeight ? sums[0][j][e] : sum;
    }
  }
}

FA_DEVICE void consume(const DbiasParams& params, SharedStorage& shared, const OwnTile& own,
                       int group) {
  const AttentionParams& p = params.common;
  Scores sums, s, dp;
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[0][j][e] = 0.0f;
  }
  if (own.steps > 0) keep_bias(params, shared, own, group);

#pragma unroll 1
  for (int step = 0; step < own.steps; ++step) {
    const Pipeline qk_pipe{2 * kColumnParts * static_cast<uint32>(step)};
    const Pipeline dout_v_pipe = of_part(qk_pipe, kColumnParts);
#pragma unroll
    for (int part = 0; part < kColumnParts; ++part)
      gemm(s, shared, of_part(qk_pipe, part), part == 0, group);
    float lse[2], delta[2];
    uint32 is_large = 0;  // bit h: the LSE of row 8 h is too large; it stands as 0
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = own_row(group) + 8 * h;
      const float* two = &shared.lse_delta[step % kRowStages][row / 2].x;
      const bool large = is_large_lse(two[row % 2]);
      lse[h] = large ? 0.0f : two[row % 2];
      delta[h] = two[row % 2 + 2];
      is_large |= static_cast<uint32>(large) << h;
    }
    const bool any_large = __any_sync(kFullWarp, is_large != 0);
#pragma unroll
    for (int part = 0; part < kEarlyParts; ++part)
      gemm(dp, shared, of_part(dout_v_pipe, part), part == 0, group);
    wgmma_wait_group<kEarlyParts>();
    if (!any_large) release_parts(shared, qk_pipe);
    products_to_scores(s, params, shared, group);
    if (!own.in_band)
      mask_outside_band(p, s, own.first_query + own_row(group), own.first_key + own_col());
    scores_to_weights(s, p.exp2_scale, lse);
    if (any_large) {
      wgmma_wait_group<0>();
      replace_large_weights<kBf16, kDim>(params, StageChunks<0>{shared, qk_pipe},
                                         StageChunks<kTileBytes>{shared, qk_pipe},
                                         entry_of(params, own.entry, step), own.first_query,
                                         own.first_key, warp_row(group), 0, is_large, s);
      release_parts(shared, qk_pipe);
    }
#pragma unroll
    for (int part = kEarlyParts; part < kColumnParts; ++part)
      gemm(dp, shared, of_part(dout_v_pipe, part), false, group);
    wgmma_wait_group<0>();
    release_parts(shared, dout_v_pipe);
    add_step(sums, s, dp, delta);
  }
  store_pairs(params, dbias_offset(params, entry_of(params, own.entry, 0)),
              own.first_query + own_row(group), own.first_key + own_col(), sums);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_dbias_sm90(const __grid_constant__ DbiasParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init(shared.full[i], 1);
      init(shared.empty[i], kArrivalsPerWarp * 4 * kGroups);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  const OwnTile own = find_own_tile(params);
  if (warp >= 4) {
    setmaxnreg_inc<kConsumerRegisters>();
    // The same in all lanes, as a vote's result is to the compiler.
    consume(params, shared, own, __any_sync(kFullWarp, warp >= 8));
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0 && elect_sync()) produce(params, shared, own);
  }
}
