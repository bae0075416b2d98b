// The sum of K^T V of each segment of a sequence, for causal products on SM90.
//
// The first of three launches for few batch entries: this one, `state_prefix_sum`, and `chunk_sm90`
// with a block for every segment.  A block walks over the chunks of one segment and writes its sum
// to the workspace, in place of the state before the next segment; the last segment has no block,
// because its sum is not needed.  One thread loads chunks; kGroups warpgroups compute U = V^T K of
// a chunk and add it, S^T = S^T + U, while the next chunks are loaded.
#include "cuda_src/common/linear_sm90.cuh"

constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kClearBarrier = 1;  // a named barrier of the warpgroups that sum

struct SharedStorage {
  uint8 k[kStages][kDimBlocks * kBlockBytes];
  uint8 v[kStages][kGroups * kBlockBytes];
  uint64 full[kStages], empty[kStages];
  WorkTile work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

using ChunkPipeline = PipelineState<kStages>;

FA_DEVICE void load_chunks(const ProductSm90Params& params, SharedStorage& shared) {
  const WorkTile work = shared.work;
  const ProductJob& job = params.job[work.job];
  ChunkPipeline pipe;
#pragma unroll 1
  for (int i = 0; i < work.chunks; ++i) {
    const int row = row_of_chunk(work, i), at = pipe.index();
    wait(shared.empty[at], pipe.parity() ^ 1);
    const uint32 barrier = cvta_to_shared(&shared.full[at]);
    mbarrier_arrive_expect_tx(barrier, (kDimBlocks + kGroups) * kBlockBytes);
    load_chunk<kDimBlocks>(shared.k[at], job.k_map, job.k_step, work, barrier, kEvictLast, 0, row);
    load_chunk<kGroups>(shared.v[at], job.v_map, job.v_step, work, barrier, kEvictLast, work.column,
                        row);
    pipe.advance();
  }
}

FA_DEVICE void sum_chunks(const ProductSm90Params& params, SharedStorage& shared, int group) {
  const int chunks = shared.work.chunks;
  State s;
  load_state(s, nullptr, 0, 0, 0, 0);
  ChunkPipeline pipe;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = pipe.index();
    State u;
    wait(shared.full[at], pipe.parity());
    if constexpr (kPacked) {
      clear_later_rows(shared.k[at], shared.v[at], rows_of_chunk(shared.work, i),
                       static_cast<int>(threadIdx.x) - 128, kClearBarrier);
    }
    gemm_kv(u, shared.k[at], &shared.v[at][group * kBlockBytes]);
    wgmma_wait_group<0>();
    release(shared.empty[at]);
    add_outer_products(s, u);
    pipe.advance();
  }
  store_segment_state(s, params, shared.work, group);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_state_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init(shared.full[i], 1);
      init(shared.empty[i], 4 * kGroups);
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 32) {
    shared.work = work_tile_of_block(params, params.segments - 1);
  }
  __syncthreads();
  if (!kPacked && shared.work.chunks == 0) return;  // the sum of no rows is read, too

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp < 4) {
    if (warp == 0 && elect_sync()) load_chunks(params, shared);
  } else {
    sum_chunks(params, shared, warp / 4 - 1);
  }
}
