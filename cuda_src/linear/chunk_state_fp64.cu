// The sum of K^T V of each segment of a sequence, for causal products of float64.
//
// The first of three launches for few batch entries: this one, `state_prefix_sum`, and `chunk_fp64`
// with a block for every segment.  A block walks over the chunks of one segment and writes its sum
// to the workspace, in place of the state before the next segment; the last segment has no block,
// because its sum is not needed.
#include "cuda_src/common/chunk_fp64.cuh"

struct SharedStorage {
  double k[kStages][kChunk * kDim];
  double v[kStages][kChunk * kCols];
  ProductWork work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_state_fp64(const __grid_constant__ ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) shared.work = product_work(params, params.segments - 1);
  __syncthreads();
  const ProductWork& work = shared.work;  // not copied, for want of registers in the loop
  const int col = work.tile * kCols;
  const int chunks = (work.rows + kChunk - 1) / kChunk;
  auto load = [&](int chunk) {
    if (chunk < chunks) {
      const int stage = chunk % kStages;
      load_tile_fp64<KTile, kChunk, kThreads>(
          cvta_to_shared(shared.k[stage]), static_cast<const double*>(params.k) + work.k,
          params.k_row, chunk * kChunk, work.rows, params.qk_dim, params.aligned);
      load_tile_fp64<VTile, kChunk, kThreads>(
          cvta_to_shared(shared.v[stage]), static_cast<const double*>(params.v) + work.v + col,
          params.v_row, chunk * kChunk, work.rows, params.v_dim - col, params.aligned);
    }
    cp_async_commit_group();
  };
#pragma unroll 1
  for (int chunk = 0; chunk < kStages - 1; ++chunk) load(chunk);

  Fp64State state;
  state.load(nullptr, 0, 0, 0, 0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();
    load(chunk + kStages - 1);
    Values v;
    load_values(v, cvta_to_shared(shared.v[chunk % kStages]));
    state.add(v, cvta_to_shared(shared.k[chunk % kStages]));
  }
  state.store(segment_state(params, work.entry, work.segment + 1), params.v_dim, 1, params.qk_dim,
              params.v_dim, col);
}
