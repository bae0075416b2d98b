// Constants, shared memory, barriers and register arrays of chunk_sm90.
#pragma once
#include "cuda_src/common/linear_sm90.cuh"

constexpr int kOutStages = FA_OUT_STAGES;  // stages for finished outputs
constexpr int kPStages = FA_P_STAGES;      // stages for weights
// The state is rounded to 16 bits for its product with Q.  bfloat16 has too few bits for that, so
// there the remainder of the rounding is multiplied too.  float16 has enough bits but too small a
// range, so there the state and the scores are scaled.
constexpr bool kLowPart = kBf16;
constexpr bool kScaled = !kBf16;
// Whether U of the next chunk starts before the outputs of this one are done, so that the tensor
// cores have work while the state is updated and rounded.  Where registers do not suffice, U is
// started later and takes the registers of the rounded state.
constexpr bool kPrefetchNextKv = kMinBlocks == 1 && (kDim == 64 || kGroups == 1);
static_assert(!kPrefetchNextKv || kPStages >= 3,
              "weights of two chunks are read while those of a third one are written");
constexpr int kThreads = 128 * (kGroups + 2);
constexpr int kFirstStateThread = 256;  // behind the producers and the score warpgroup
// Warps of the producer warpgroup that look for values which are not finite.
constexpr int kProbeWarps = 2;
constexpr int kProbeCols = kCols / kProbeWarps;
// Arrivals of a warp for outputs in shared memory, which bulk copies read, and in packed builds the
// lanes of a warp, too.
constexpr int kOutArrivals = kPacked ? kArrivalsPerWarp : 1;
// Registers of a thread: a multiple of 8 (PTX ISA 9.7.19.5 "setmaxnreg"), at most 65,536 for all
// threads of a multiprocessor.
constexpr int kProducerRegisters = 32;
constexpr int kScoreRegisters = kMinBlocks == 2 ? 64 : 96;
constexpr int kStateRegisters = kMinBlocks == 2 ? 144 : kGroups == 2 ? 192 : 240;
static_assert(kGroups <= 2 && kMinBlocks <= 2 && kGroups * kMinBlocks <= 2,
              "the registers above are for these");

using PTile = SharedTile<kChunk, 64>;
using OutTile = SharedTile<kChunk, 64>;

using Scores = float[8][4];  // accumulators of wgmma (ptx/wgmma.cuh): 16 rows of a warp, 64 columns
using Outputs = float[8][4];           // O^T: [v][2 * i + j] of row 8 v + 2 t + j
using Packed = uint32[8][2];           // either of these in 16 bits
using Rounded = uint32[kDim / 16][4];  // A operands of S^T Q^T

struct SharedStorage {
  uint8 q[kStages][kDimBlocks * kBlockBytes];
  uint8 k[kStages][kDimBlocks * kBlockBytes];
  uint8 v[kStages][kGroups * kBlockBytes];
  uint8 p[kPStages][kBlockBytes];
  uint8 out[kOutStages][kGroups * kBlockBytes];
  float p_inverse[kPStages][4];  // with kScaled, the factor of 16 rows of P V
  // Whether there are values that are not finite, and then for each column the first row (in
  // reverse, the last one) with such a value.
  int nonfinite_found[kPStages][kProbeWarps];
  int nonfinite_row[kPStages][kCols];
  uint64 full[kStages], empty[kStages];
  uint64 p_full[kPStages], p_empty[kPStages];
  uint64 out_full[kOutStages][kGroups], out_empty[kOutStages][kGroups];
  WorkTile work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

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
    init(shared.out_full[lane / kGroups][lane % kGroups], 4 * kOutArrivals);
    init(shared.out_empty[lane / kGroups][lane % kGroups], kOutArrivals);
  }
  fence_mbarrier_init();
}

using ChunkPipeline = PipelineState<kStages>;
using PPipeline = PipelineState<kPStages>;
using OutPipeline = PipelineState<kOutStages>;

// Chunks before a segment that its block sums itself, because there is no workspace with the state.
FA_DEVICE int chunks_before(const ProductSm90Params& params, const WorkTile& work) {
#if FA_PACKED
  const int segment_chunks = work.segment_chunks;
#else
  const int segment_chunks = params.segment_chunks;
#endif
  return params.job[work.job].workspace == nullptr ? work.segment * segment_chunks : 0;
}

// At these barriers the score warps and the probe warps wait until the state warpgroups have summed
// the chunks before the segment.  Without them the phase of a stage, one bit, could be that of an
// earlier chunk.  At the last two the score warps, and the state warpgroups, wait for each other
// where they have overwritten rows of the next packed sequence.
enum NamedBarrier : int {
  kScoreBarrier = 1,
  kProbeBarrier = 2,
  kClearKeysBarrier = 3,
  kClearBarrier = 4
};
constexpr int kScoreBarrierThreads = 128 + 128 * kGroups,
              kProbeBarrierThreads = 32 * kProbeWarps + 128 * kGroups;

FA_DEVICE void release_waiting_warps() {
  bar_arrive(kScoreBarrier, kScoreBarrierThreads);
  bar_arrive(kProbeBarrier, kProbeBarrierThreads);
}

// Waits until the segment's first chunk is the next one, and returns its pipeline state.
FA_DEVICE ChunkPipeline first_chunk_pipe(const ProductSm90Params& params,
                                         const SharedStorage& shared, NamedBarrier barrier) {
  ChunkPipeline pipe;
  pipe.advance(chunks_before(params, shared.work));
  if (pipe.count > 0)
    bar_sync(barrier, barrier == kScoreBarrier ? kScoreBarrierThreads : kProbeBarrierThreads);
  return pipe;
}
