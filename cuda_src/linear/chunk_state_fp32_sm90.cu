// The sum of K^T V of each segment of a sequence, for causal products of float32 on SM90.
//
// As chunk_state_sm90.cu, with operands as in chunk_fp32_sm90.cu.  kSplitWarpgroups warpgroups turn
// the rows of a chunk, chunk by chunk in alternation, into pairs of float16 in place; kGroups
// warpgroups sum U = V^T K of all chunks: S^T = S^T + U.
#include "cuda_src/common/fp32_sm90.cuh"

// Warpgroups that split chunks in alternation.
constexpr int kSplitWarpgroups = FA_SPLIT_WARPGROUPS;
constexpr int kThreads = 128 * (kSplitWarpgroups + kGroups);
constexpr int kInFlight = kDim > 64 || kCols > 64 ? 2 : 4;  // rows a split thread holds at once
constexpr int kRefillLag = 2;  // chunks between the split of a stage and its next load
static_assert(kStages > kRefillLag && kRefillLag >= kSplitWarpgroups,
              "the next chunks are loaded while one is split");

struct SharedStorage {
  uint8 k[kStages][2 * kLowQK];  // float32 as loaded, then pairs: high parts, low parts
  uint8 v[kStages][2 * kLowV];
  int kv_exponent[kStages][kChunk];  // row j of K times row j of V is 2^e times their tiles'
  uint64 raw_full[kStages], full[kStages], empty[kStages];
  WorkTile work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

using ChunkPipeline = PipelineState<kStages>;

FA_DEVICE void load(const ProductSm90Params& params, SharedStorage& shared, int chunk) {
  const WorkTile& work = shared.work;
  const ProductJob& job = params.job[work.job];
  const int row = first_row(params, work, chunk), at = chunk % kStages;
  uint64& full = shared.raw_full[at];
  // Arrivals: one for each array.
  load_boxes<kDimBoxes>(shared.k[at], job.k_map, job.k_step, work, full, kEvictLast, 0, row);
  load_boxes<kColBoxes>(shared.v[at], job.v_map, job.v_step, work, full, kEvictLast, work.column,
                        row);
}

FA_DEVICE void split_chunks(const ProductSm90Params& params, SharedStorage& shared, int splitter) {
  const int chunks = shared.work.chunks;
  const int thread = threadIdx.x % 128, row = split_row<QKTile>(thread);
  constexpr int kPrefetchChunks = kStages - kRefillLag;
  if (thread == 0) {
#pragma unroll 1
    for (int i = splitter; i < min(kPrefetchChunks, chunks); i += kSplitWarpgroups)
      load(params, shared, i);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = splitter; i < chunks; i += kSplitWarpgroups) {
    const ChunkPipeline pipe{static_cast<uint32>(i)};
    const int at = pipe.index(), next = i + kPrefetchChunks;
    if (thread == 0 && next < chunks) {
      const ChunkPipeline later_pipe{static_cast<uint32>(next)};
      wait(shared.empty[later_pipe.index()], later_pipe.parity() ^ 1);
      load(params, shared, next);
    }
    __syncwarp();
    int k_row_exponents[kSteps], v_row_exponents[kSteps];
    wait(shared.raw_full[at], pipe.parity());
    split_rows<kChunk, kDimBoxes, kInFlight, true>(k_row_exponents, shared.k[at], shared.k[at]);
    split_rows<kChunk, kColBoxes, kInFlight, true>(v_row_exponents, shared.v[at], shared.v[at]);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (thread % 8 == 0)
        shared.kv_exponent[at][row + 16 * g] = -k_row_exponents[g] - v_row_exponents[g];
    }
    fence_proxy_async_shared();
    release_per_lane(shared.full[at]);
  }
}

FA_DEVICE void sum_chunks(const ProductSm90Params& params, SharedStorage& shared, int group) {
  const int warp = threadIdx.x / 32 % 4, chunks = shared.work.chunks;
  State s;
  load_state(s, nullptr, 0, 0, 0, 0);
  ChunkPipeline pipe;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = pipe.index();
    Operand<kSteps> values, values_low;
    Outputs u;
    wait(shared.full[at], pipe.parity());
    load_values(values, values_low, shared.v[at], 4 * group + warp);
    const int exponent = scale_to_common_exponent(values, values_low, shared.kv_exponent[at]);
    const float factor = power_of_two(exponent / 2), rest = power_of_two(exponent - exponent / 2);
#pragma unroll
    for (int block = 0; block < kDimBlocks; ++block) {
      gemm_split<kMnMajor, kSteps>(u, values, values_low, shared.k[at] + block * kBlockBytes,
                                   kLowQK, [](int step) { return step * 16 * 128; });
      wgmma_wait_group<0>();
      if (block == kDimBlocks - 1) release_per_lane(shared.empty[at]);
      add_outer_products(s, u, block, factor, rest);
    }
    pipe.advance();
  }
  store_segment_state(s, params, shared.work, group);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_state_fp32_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init(shared.raw_full[i], 2);
      init(shared.full[i], kArrivalsPerWarp * 4);
      init(shared.empty[i], kArrivalsPerWarp * 4 * kGroups);
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 32) {
    shared.work = work_tile_of_block(params, params.segments - 1);
  }
  __syncthreads();
  if (shared.work.chunks == 0) return;

  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup < kSplitWarpgroups) {
    split_chunks(params, shared, warpgroup);
  } else {
    sum_chunks(params, shared, warpgroup - kSplitWarpgroups);
  }
}
