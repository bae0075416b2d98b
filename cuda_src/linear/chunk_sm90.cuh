// What the parts of chunk_sm90 share: constants of a variant, a block's shared memory and
// barriers.
#pragma once
#include "cuda_src/common/linear_sm90.cuh"

constexpr int kOutStages = FA_OUT_STAGES;  // stages for finished outputs
constexpr int kPStages = FA_P_STAGES;      // stages for weights
// bfloat16 rounds the state as coarsely as the output: there what rounding leaves is multiplied
// too.  float16 has the bits but not the range, so there state and scores are scaled.
constexpr bool kLowPart = kBf16;
constexpr bool kScaled = !kBf16;
// With registers for it, the sums of the next chunk start before the outputs of this one are done,
// so that the tensor cores have work while the state grows and is rounded; else they take the
// registers of the state's rounded parts, later.
constexpr bool kPrefetchNextKv = kMinBlocks == 1 && (kDim == 64 || kGroups == 1);
static_assert(!kPrefetchNextKv || kPStages >= 3,
              "weights of two chunks are in use, others are written");
constexpr int kThreads = 128 * (kGroups + 2);
// Of the producer warpgroup, that look for values that are not finite.
constexpr int kProbeWarps = 2;
constexpr int kProbeCols = kCols / kProbeWarps;
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kProducerRegisters = 32;
constexpr int kScoreRegisters = kMinBlocks == 2 ? 64 : 96;
constexpr int kStateRegisters = kMinBlocks == 2 ? 144 : kGroups == 2 ? 192 : 240;
static_assert(kGroups <= 2 && kMinBlocks <= 2 && kGroups * kMinBlocks <= 2, "registers, as above");

using PTile = SharedTile<kChunk, 64>;
using OutTile = SharedTile<kChunk, 64>;

struct SharedStorage {
  uint8 q[kStages][kDimBlocks * kBlockBytes];
  uint8 k[kStages][kDimBlocks * kBlockBytes];
  uint8 v[kStages][kGroups * kBlockBytes];
  uint8 p[kPStages][kBlockBytes];
  uint8 out[kOutStages][kGroups * kBlockBytes];
  float p_inverse[kPStages][4];  // what 16 rows of P V are multiplied by, where kScaled
  int nonfinite_found[kPStages][kProbeWarps];  // whether values of a probe's columns are not finite
  // Then: the first (in reverse, last) row of each column with one.
  int nonfinite_row[kPStages][kCols];
  uint64 full[kStages], empty[kStages];
  uint64 p_full[kPStages], p_empty[kPStages];
  uint64 out_full[kOutStages][kGroups], out_empty[kOutStages][kGroups];
  WorkTile work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

FA_DEVICE void init_barriers(SharedStorage& shared, int lane) {
  if (lane < kStages) {
    init(shared.full[lane], 1);
    init(shared.empty[lane], 4 + 4 * kGroups);
  }
  if (lane < kPStages) {
    init(shared.p_full[lane], kArrivalsPerWarp * (4 + kProbeWarps));
    init(shared.p_empty[lane], kArrivalsPerWarp * 4 * kGroups);
  }
  if (lane < kOutStages * kGroups) {
    init(shared.out_full[lane / kGroups][lane % kGroups], 4);
    init(shared.out_empty[lane / kGroups][lane % kGroups], 1);
  }
  fence_mbarrier_init();
}

using ChunkPipeline = PipelineState<kStages>;
using PPipeline = PipelineState<kPStages>;
using OutPipeline = PipelineState<kOutStages>;

// Chunks before a segment, which its block sums itself where nobody else does.
FA_DEVICE int chunks_before(const ProductSm90Params& params, const WorkTile& work) {
  return params.job[work.job].workspace == nullptr ? work.segment * params.segment_chunks : 0;
}

// Where the score warps, and those that probe, wait until the state warpgroups have summed
// the chunks before the segment: until then they cannot tell the phases of a stage apart.
enum NamedBarrier : int { kScoreBarrier = 1, kProbeBarrier = 2 };
constexpr int kScoreBarrierThreads = 128 + 128 * kGroups,
              kProbeBarrierThreads = 32 * kProbeWarps + 128 * kGroups;

FA_DEVICE void release_waiting_warps() {
  bar_arrive(kScoreBarrier, kScoreBarrierThreads);
  bar_arrive(kProbeBarrier, kProbeBarrierThreads);
}

// The pipeline state of the segment's first chunk, once it is the next one.
FA_DEVICE ChunkPipeline first_chunk_pipe(const ProductSm90Params& params,
                                         const SharedStorage& shared, NamedBarrier barrier) {
  ChunkPipeline pipe;
  pipe.advance(chunks_before(params, shared.work));
  if (pipe.count > 0)
    bar_sync(barrier, barrier == kScoreBarrier ? kScoreBarrierThreads : kProbeBarrierThreads);
  return pipe;
}
