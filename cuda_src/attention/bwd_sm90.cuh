// What the parts of bwd_sm90 share: constants of a variant, a block's shared memory; and the
// threads that load and store for it.
#pragma once
#include "cuda_src/common/backward_sm90.cuh"
#include "cuda_src/common/dq_accum.cuh"
#include "cuda_src/common/dropout_words.cuh"
#include "cuda_src/common/shared_tile.cuh"

constexpr bool kBf16 = FA_BF16;              // bfloat16, else float16
constexpr int kDim = FA_DIM;                 // head_dim and v_dim, padded with zeros
constexpr int kGroups = 2;                   // warpgroups that compute, each on 64 keys
constexpr int kTileM = FA_TILE_M;            // queries of a tile
constexpr int kTileN = FA_TILE_N;            // keys of a block
constexpr int kQStages = FA_STAGES;          // tiles of Q in flight
constexpr int kDoutStages = FA_DOUT_STAGES;  // tiles of dO in flight
// Buffers for a warpgroup's results on their way out.
constexpr int kStagingStages = FA_STAGING_STAGES;
// Threads that store results, each waiting for its turns.
constexpr int kStoreThreads = FA_STORE_THREADS;
constexpr int kLoadThreads = kStoreThreads > 2 ? 1 : 2;  // threads that load, of the other warps
// Barriers that say of a result that it is there.  A thread that saw only some phases of one could
// not tell them apart by parity, so that each has its own.
constexpr int kStagingBarriers =
    kStoreThreads == kStagingStages ? kStagingStages : kStoreThreads * kStagingStages;
constexpr int kWorkStages = 2;  // stages for announced work tiles
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kBlocks = (kDim + 63) / 64;  // a tile in shared memory has blocks of 64 columns
constexpr int kMmaD = kDim / 8;
constexpr int kMmaM = kTileM / 8;
// There are two schedules of a tile's products.  dQ of a tile takes dS of both warpgroups.  Where
// shared memory has room for another dS, dQ is that of the tile before: then neither waits for the
// other, and one's exponentials run beside the other's products.  Elsewhere dK += dS^T Q of the
// tile before runs beside the exponentials, and S of the next tile starts while dV of this one
// still has its weights in registers.
constexpr bool kDeferDq = FA_DEFER_DQ;
constexpr bool kDeferDk = !kDeferDq;
// The order of the blocks of keys.  From the first one on, each works on the tiles of queries from
// the last one on, one tile or more behind the block before.  From the last one on, each works on
// the tiles from the first one on: under a causal mask blocks of keys that begin together, each at
// its own diagonal, then come to a tile one after the other.  The former ends with the short work,
// the latter waits less, which counts where dQ is that of the tile before.
constexpr bool kReverseKvOrder = kDeferDq;
constexpr int kDsStages = kDeferDq ? 2 : 1;  // stages for dS
// dQ of a tile is added up in two tiles, one for each warpgroup: 64 columns of all queries, or
// half of the queries.
constexpr int kDqTileM = kBlocks > 1 ? kTileM : kTileM / 2;  // queries of a tile of dQ
// Rows of LSE and delta, of kMmaM, that are asked for before the scores that they go with are
// there: then the first of them need not be waited for (they took 9% of the time).  Larger tiles
// leave no registers for them.
constexpr int kPrefetchedLse = kTileM <= 64 ? 4 : 0;
// A bias of pairs comes by way of shared memory (staged_bias.cuh) where its rows can be copied.  As
// it lies in global memory, a thread's keys and queries are rows and columns the wrong way round,
// and it would load each element by itself.
#ifndef FA_STAGE_BIAS
#define FA_STAGE_BIAS 0
#endif
constexpr bool kStageBias = FA_STAGE_BIAS;
constexpr int kBiasStageBytes = kTileM * 16 * (kBiasIs16Bit ? 2 : 4);  // of a warp: its 16 keys
static_assert(!kStageBias || (kBiasAxes == kBiasOfPair && kBiasKind != kFloat64 && !kSparse),
              "there is a tile of a bias to be staged");
// Blocks of keys that are at work together without a mask come to a tile of queries one after the
// other, so that one of them brings it into the L2 cache for all.  Under a mask each goes its own
// way, and what they read and add to is too much for the cache: then the sums of dQ should stay,
// which whoever waits for its turn waits for.
constexpr uint64 kDqAccumPolicy = kSparse ? kEvictLast : kEvictNormal;
constexpr uint64 kTilePolicy = kSparse ? kEvictFirst : kEvictNormal;
// Query tiles of a long entry, on which blocks would spread over more than the cache holds, and how
// many a block has left when it is nearly done (wait_for_wave_before).
constexpr bool kSpreadIsLimited = !kSparse && !FA_PACKED;
constexpr int kLongQueryTiles = FA_LONG_ROWS / kTileM, kNearlyDoneTiles = kLongQueryTiles / 32;
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(kTileN == 64 * kGroups, "a warpgroup has 64 keys");
static_assert(kGroups == 2 && kBlocks <= 2, "a warpgroup has a piece of dQ");
static_assert(kDim % 32 == 0, "head_dim is padded to a multiple of 32");
static_assert(kTileM % 16 == 0, "queries are summed over by m64nNk16");
static_assert(kTileM <= 128, "a bit for each query of a thread is in a word");
static_assert(kLoadThreads + kStoreThreads <= 4, "a warpgroup feeds");
static_assert(kStagingStages >= 1 && kStoreThreads >= 1, "results go out");
static_assert(kQStages > 1 || !kDeferDk, "the next tile is waited for early");
static_assert(kTileN == kMaskBlock, "dQ is added up by blocks of a mask");
static_assert(!kSparse || kMaskBlock % kTileM == 0, "a tile is in one block of a mask");

static_assert(!kDropout || kTileM == 64, "each thread of a warpgroup makes a word of decisions");
static_assert(!kDropout || kDeferDk, "words are made in one of the schedules");

constexpr int kKTileBytes = kTileN * 128 * kBlocks, kQTileBytes = kTileM * 128 * kBlocks;
constexpr int kDqTileFloats = dq_tile_floats(kDqTileM);
constexpr int kStagingBytes = kDqTileFloats * 4;
using DsTile = SharedTile<kTileM, kTileN>;     // dS; a warpgroup's keys are a block of columns
using KeyTile = SharedTile<64, 64 * kBlocks>;  // a warpgroup's rows of dK or dV
static_assert(64 * 128 * kBlocks <= kStagingBytes, "rows of dK fit where a piece of dQ does");

// A block's next part of the work.
struct WorkTile : KvWorkTile {
  struct {
    int full_begin, full_end;  // query tiles that see all keys of a warpgroup
  } group[kGroups];
};

template <bool kStaged>
struct BiasStorage {};
template <>
struct BiasStorage<true> {
  uint8 bias[4 * kGroups][kBiasStageBytes];  // of each warp that computes, of its next tile
};
struct SharedStorage : BiasStorage<kStageBias> {
  uint8 k[kKTileBytes];
  uint8 v[kKTileBytes];
  uint8 q[kQStages][kQTileBytes];
  uint8 dout[kDoutStages][kQTileBytes];
  uint8 ds[kDsStages][kGroups * DsTile::kBlockBytes];
  uint8 staging[kGroups][kStagingStages][kStagingBytes];  // tiles of dQ, later rows of dV and dK
  float4 lse_delta[kQStages][kTileM / 2];
  uint64 k_full, k_empty, v_full, v_empty;
  uint64 q_full[kQStages], q_empty[kQStages], dout_full[kDoutStages], dout_empty[kDoutStages];
  uint64 ds_full[kDsStages], ds_empty[kDsStages];
  uint64 staging_full[kGroups][kStagingBarriers], staging_empty[kGroups][kStagingStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages];
  WorkTile work[kWorkStages];
  MaskTileInfo tile_info[kSparse ? kQStages : 1];  // of the tile in each stage of Q
  MaskCursor cursors[kCursors];
  int64
      operands_offset[kHasOperands ? kQStages : 1];  // of the entry of the tile in each stage of Q
#if FA_DROPOUT
  alignas(16) uint32 kept[kGroups][kKeptWords];  // decisions on the next tile (make_kept_words)
  DropoutEntry dropout_entry[kQStages];          // of the tile in each stage of Q
#endif
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

using WorkPipeline = PipelineState<kWorkStages>;
using QPipeline = PipelineState<kQStages>;
using DoutPipeline = PipelineState<kDoutStages>;
using DsPipeline = PipelineState<kDsStages>;
using StagingPipeline = PipelineState<kStagingStages>;

// --------------------------------------------------------------------------------------- producers
// The next work tile is fetched late, when this one is nearly done: from then on other blocks wait
// for its contribution to dQ.
using LoadPolicy =
    KvLoadPolicy<kReverseKvOrder, kReverseKvOrder, true, kTilePolicy, kTileM, kTileN, kBlocks>;

// Adds to a work tile, for each warpgroup, the query tiles that see all of its keys.
FA_DEVICE void add_warpgroup_ranges(const AttentionParams& p, WorkTile& work) {
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    const int key = work.tile * kTileN + 64 * group;
    const QueryTiles own = query_tiles(p, key, key + 63, kTileM);
    const bool whole = key + 64 <= p.k_len;  // keys that do not exist have to be hidden
    work.group[group] = {whole ? own.full_begin : 0, whole ? own.full_end : 0};
  }
}

// The block of keys that adds first to dQ of a tile of queries: the first or the last one that the
// tile sees.
FA_DEVICE int first_turn(const AttentionParams& p, int query_tile) {
#if FA_PACKED
  const Interval* of_tile = p.intervals.key_tiles + query_tile;
  return kReverseKvOrder ? of_tile->last : of_tile->first;
#else
  const int first_row = query_tile * kTileM, last_row = min(first_row + kTileM, p.q_len) - 1;
  return (kReverseKvOrder ? last_key(p, last_row) : first_key(p, first_row)) / kTileN;
#endif
}

// Without a band, the blocks of a launch begin together, as a wave, and a slow one stays behind for
// good.  On a long entry the next waves would spread over all of its queries, and what a block
// reads and adds to would have left the cache.  So the first block of an entry in a wave begins
// when those before it are nearly done; the others come after it anyway.  They have begun: none
// waits forever.
FA_DEVICE void wait_for_wave_before(const BwdSm90Params& params, const WorkTile& work) {
  const AttentionParams& p = params.common;
  const bool sees_all = !work.has_no_query && work.end - work.begin == p.q_tiles;
  if (!sees_all || p.q_tiles * params.group < kLongQueryTiles) return;
  const uint32 number = kReverseKvOrder ? params.k_tiles - 1 - work.tile : work.tile;
  if (number == 0 || !begins_wave(params, work.entry / params.group, number)) return;
  const int left = min(kNearlyDoneTiles, p.q_tiles - 1);
  const int tile = kReverseKvOrder ? work.end - 1 - left : work.begin + left;
  const uint32 query_tile = (work.entry + params.group - 1) * p.q_tiles + tile;
  const int first = first_turn(p, tile);
  const uint32 semaphore_value = kReverseKvOrder ? first - work.tile : work.tile - first;
  while (ld_acquire_gpu_u32(params.dq_semaphore + query_tile) != semaphore_value) {
  }
}

// Adds tiles of dQ to dq_accum, and stores rows of dV and dK: those of both warpgroups that pass
// through staging buffers.  A tile takes a while from its turn to the next one's, longer than its
// bytes are in a buffer: a tile for each of these threads is on its way.
FA_DEVICE void store_gradients(const BwdSm90Params& params, SharedStorage& shared, uint32 thread) {
  const AttentionParams& p = params.common;
  uint32 results = 0;  // of each warpgroup, done so far
  // Whether this thread stores the next result; then its staging buffer, and what says that it is
  // there.
  uint32 staging_stage, barrier_index, parity;
  auto owns_result = [&]() {
    staging_stage = results % kStagingStages;
    barrier_index = results % kStagingBarriers;
    parity = results / kStagingBarriers & 1;
    return results++ % kStoreThreads == thread;
  };
  auto wait_for_staging = [&]() {
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.staging_full[group][barrier_index], parity);
    }
    // On behalf of those who wrote, whose arrivals have been seen: a fence between what they wrote
    // and the copy may stand anywhere on the way (PTX ISA 8.9.5 "Causality order").
    fence_proxy_async_shared();
  };
  auto release_staging = [&]() {
    cp_async_bulk_wait_group_read<0>();
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group)
      arrive(shared.staging_empty[group][staging_stage]);
  };
  for_each_work_tile(shared.work, shared.work_full, shared.work_empty, [&](const WorkTile& work) {
    MaskCursor& cursor = cursor_of(shared, kLoadThreads + thread);
    if constexpr (kSpreadIsLimited) wait_for_wave_before(params, work);
    for_each_query_tile<kReverseKvOrder, kTileM, kTileN>(
        params, work, cursor, [&](QueryTileStep step) {
          if (!owns_result()) return;
          const uint32 query_tile = (work.entry + step.head) * p.q_tiles + step.tile;
          const int end = first_turn(p, step.tile);
          uint32 semaphore_value = kReverseKvOrder ? end - work.tile : work.tile - end;
          if constexpr (kSparse) {
            // Hidden blocks add nothing to dQ and do not take part in its order.  How many visible
            // blocks come before this one is known beforehand, so the semaphore counts a number
            // here, too.  If hidden blocks passed it on, every block would look at all tiles.
            const int block = step.tile * kTileM / kMaskBlock;
            semaphore_value = visible_blocks_between(params.mask, cursor.row - work.tile,
                                                     kReverseKvOrder ? work.tile + 1 : end,
                                                     kReverseKvOrder ? end : work.tile - 1, block);
          }
          wait_for_staging();
          if (!work.has_no_query) {
            while (ld_acquire_gpu_u32(params.dq_semaphore + query_tile) != semaphore_value) {
            }
            fence_proxy_async_global();
#pragma unroll 1
            for (int group = 0; group < kGroups; ++group) {
              float* sums = params.dq_accum +
                            static_cast<int64>(query_tile * kGroups + group) * kDqTileFloats;
              const uint32 dq_tile = cvta_to_shared(shared.staging[group][staging_stage]);
              if (semaphore_value == 0) {  // what lies there comes as it is
                cp_async_bulk_store(sums, dq_tile, kStagingBytes, kDqAccumPolicy);
              } else {
                cp_reduce_async_bulk_add_f32(sums, dq_tile, kStagingBytes, kDqAccumPolicy);
              }
            }
            cp_async_bulk_commit_group();
          }
          release_staging();
          if (!work.has_no_query) {
            cp_async_bulk_wait_group<0>();
            fence_proxy_async_global();
            red_release_gpu_add_u32(params.dq_semaphore + query_tile, 1);
          }
        });
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (!owns_result()) continue;
      wait_for_staging();
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        const int row = work.tile * kTileN + 64 * group;
        if (row < p.k_len) {
          store_rows_64<kBlocks>(i == 0 ? params.dv_map : params.dk_map,
                                 shared.staging[group][staging_stage], row, work.coordinate);
        }
      }
      release_staging();
    }
  });
  cp_async_bulk_wait_group<0>();
}
