// The sum of K^T V of each segment of a sequence, for causal products of float32.
//
// As chunk_state_sm80.cu, with operands as in chunk_fp32_sm80.cu: split warps turn the rows of a
// chunk into pairs of float16 in shared memory while state warps, each the owner of 16 value
// columns, add the outer products of the chunk before.
#include "cuda_src/common/linear_params.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/split_state.cuh"

constexpr int kDim = FA_DIM;      // qk_dim, padded with zeros
constexpr int kCols = FA_TILE_N;  // value columns of a block
constexpr int kChunk = FA_TILE_M;
constexpr int kBuffers = FA_STAGES;    // chunks in shared memory, one for each team
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr int kSplitWarps = FA_SPLIT_WARPS;
constexpr int kSplitThreads = 32 * kSplitWarps;
constexpr int kThreads = kSplitThreads + 2 * kCols;
static_assert(kThreads == FA_THREADS, "its variant launches as many");
static_assert(kBuffers == 2, "a buffer for each team");

using KTile = SharedTile<kChunk, kDim>;
using VTile = SharedTile<kChunk, kCols>;
using TeamSync = TeamBarriers<kSplitThreads, kThreads - kSplitThreads>;

struct SharedStorage {
  uint16 k[kBuffers][2][kChunk * kDim];  // high parts, low parts
  uint16 v[kBuffers][2][kChunk * kCols];
  int exponent[kBuffers][kChunk];  // row j of K times row j of V is 2^e times the tiles'
  ProductWork work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_state_fp32_sm80(const __grid_constant__ ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) shared.work = product_work(params, params.segments - 1);
  __syncthreads();
  const ProductWork& work = shared.work;  // not copied, for want of registers in the loop
  const int chunks = (work.rows + kChunk - 1) / kChunk;

  if (threadIdx.x < kSplitThreads) {
    const bool whole = params.aligned && params.qk_dim % 4 == 0 && params.v_dim % 4 == 0;
    FloatChunk<kChunk, kDim, kSplitWarps> k;
    FloatChunk<kChunk, kCols, kSplitWarps> v;
    // The thread index is read again wherever it is used (ptx/special.cuh), so that no register
    // holds it and what is computed from it from one chunk to the next.
    auto load = [&](int chunk) {
      const uint32 tid = tid_x_again();
      const int first_col = tid % 8 * 4, v_col = work.tile * kCols + first_col;
      const int64 first_row = chunk * kChunk + split_row<KTile>(tid);
      const int rows = work.rows - static_cast<int>(first_row);
      k.load(static_cast<const float*>(params.k) + work.k + first_row * params.k_row + first_col,
             params.k_row, rows, params.qk_dim - first_col, whole);
      v.load(static_cast<const float*>(params.v) + work.v + first_row * params.v_row + v_col,
             params.v_row, rows, params.v_dim - v_col, whole);
    };
    load(0);
#pragma unroll 1
    for (int i = 0; i <= chunks; ++i) {
      if (i < chunks) {
        const int buffer = i % kBuffers;
        const uint32 tid = tid_x_again();
#pragma unroll
        for (int g = 0; g < k.kGroups; ++g) {
          const int k_row_exponent = k.exponent(g), v_row_exponent = v.exponent(g);
          k.store(cvta_to_shared(shared.k[buffer][0]), g, k_row_exponent);
          v.store(cvta_to_shared(shared.v[buffer][0]), g, v_row_exponent);
          if (tid % 8 == 0) {
            shared.exponent[buffer][split_row<KTile>(tid) + g * k.kStep] =
                -k_row_exponent - v_row_exponent;
          }
        }
        load(i + 1);
      }
      TeamSync::lead();
    }
    return;
  }

  SplitState<kDim, kChunk, kCols> state;
  state.load(nullptr, 0, 0, 0, 0);
#pragma unroll 1
  for (int i = 0; i <= chunks; ++i) {
    if (i >= 1) {
      const int buffer = (i - 1) % kBuffers;
      const int lane = tid_x_again() & 31, warp = (tid_x_again() >> 5) - kSplitWarps;
      state.add(
          shared.exponent[buffer], cvta_to_shared(shared.k[buffer][0]) + rows_first<KTile>(lane),
          cvta_to_shared(shared.v[buffer][0]) + VTile::at(columns_first<VTile>(lane), 0, warp));
    }
    TeamSync::follow<1>();
  }

  const int first_col = work.tile * kCols + ((tid_x_again() >> 5) - kSplitWarps) * 16;
  float* to = segment_state(params, work.entry, work.segment + 1) + first_col;
  state.store(to, params.v_dim, 1, params.qk_dim, params.v_dim - first_col);
}
