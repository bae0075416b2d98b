// The sum of K^T V of each segment of a sequence, for causal products.
//
// The first of three launches for few batch entries: this one, `state_prefix_sum`, and `chunk_sm80`
// with a block for every segment.  A block walks over the chunks of one segment and writes its sum
// to the workspace, in place of the state before the next segment; the last segment has no block,
// because its sum is not needed.
#include "cuda_src/common/chunk_state.cuh"
#include "cuda_src/common/linear_params.cuh"

constexpr bool kBf16 = FA_BF16;          // bfloat16, else float16
constexpr int kDim = FA_DIM;             // qk_dim, padded with zeros
constexpr int kCols = FA_TILE_N;         // value columns of a block
constexpr int kChunk = FA_TILE_M;        // rows of a chunk
constexpr int kStages = FA_STAGES;       // chunks in shared memory, one of them in use
constexpr int kMinBlocks = FA_BLOCKS;    // blocks that should fit on a multiprocessor
constexpr int kKeyParts = FA_KEY_PARTS;  // of the key columns, each with its warps
constexpr int kColWarps = 4;
constexpr int kThreads = 32 * kColWarps * kKeyParts;
constexpr int kWarpDim = kDim / kKeyParts;
constexpr int kMmaM = kCols / (16 * kColWarps);
static_assert(kCols == 16 * kMmaM * kColWarps && kMmaM <= 2, "a warp owns 16 or 32 columns");
static_assert(kKeyParts == 1 || kWarpDim % 64 == 0, "and whole column blocks of a tile");

using KTile = SharedTile<kChunk, kDim>;
using VTile = SharedTile<kChunk, kCols>;

struct SharedStorage {
  uint16 k[kStages][kChunk * kDim];
  uint16 v[kStages][kChunk * kCols];
  ProductWork work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_state_sm80(const __grid_constant__ ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) shared.work = product_work(params, params.segments - 1);
  __syncthreads();
  const ProductWork& work = shared.work;  // not copied, for want of registers in the loop
  const int col = work.tile * kCols;
  const int chunks = (work.rows + kChunk - 1) / kChunk;
  auto load = [&](int chunk) {
    if (chunk < chunks) {
      const uint16* k = static_cast<const uint16*>(params.k) + work.k;
      const uint16* v = static_cast<const uint16*>(params.v) + work.v + col;
      load_tile<kChunk, kDim, kThreads>(cvta_to_shared(shared.k[chunk % kStages]), k, params.k_row,
                                        chunk * kChunk, work.rows, params.qk_dim, params.aligned);
      load_tile<kChunk, kCols, kThreads>(cvta_to_shared(shared.v[chunk % kStages]), v, params.v_row,
                                         chunk * kChunk, work.rows, params.v_dim - col,
                                         params.aligned);
    }
    cp_async_commit_group();
  };
#pragma unroll 1
  for (int chunk = 0; chunk < kStages - 1; ++chunk) load(chunk);

  ChunkState<kBf16, KTile, kWarpDim, kChunk, kMmaM> state;
  state.load(nullptr, 0, 0, 0, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();
    load(chunk + kStages - 1);
    // Read again (ptx/special.cuh), so that no register holds them from one chunk to the next.
    const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
    const uint32 v_lane = VTile::at(columns_first<VTile>(lane), 0, warp % kColWarps * kMmaM);
    const uint32 k_lane = KTile::at(rows_first<KTile>(lane), 0, warp / kColWarps * kWarpDim / 16);
    Values<kChunk, kMmaM> values;
    load_values<VTile, kChunk, kMmaM>(values, cvta_to_shared(shared.v[chunk % kStages]) + v_lane);
    state.add(values, cvta_to_shared(shared.k[chunk % kStages]) + k_lane);
  }

  const int warp = threadIdx.x / 32;
  const int first_row = warp / kColWarps * kWarpDim;
  const int first_col = col + warp % kColWarps * kMmaM * 16;
  float* to = segment_state(params, work.entry, work.segment + 1);
  state.store(to + static_cast<int64>(first_row) * params.v_dim + first_col, params.v_dim, 1,
              params.qk_dim - first_row, params.v_dim - first_col);
}
