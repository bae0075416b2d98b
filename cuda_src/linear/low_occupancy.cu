// Causal product by prefix sums over a few rows at a time, in plain float32, for few batch entries.
//
// One block computes 4 value columns of one batch entry, in tiles of 8 * kWarps rows, of which each
// warp takes 8 consecutive ones.  The lanes of a warp share the key columns.  Each warp sums the
// outer products of its rows and writes the sum to shared memory.  Then it adds the sums of the
// warps before it to the state before the tile, and goes over its rows again, S = S + k v^T and
// out = q S.
#include "cuda_src/common/float_rows.cuh"
#include "cuda_src/common/linear_params.cuh"

constexpr int kDim = FA_DIM;       // key columns at a time
constexpr int kSteps = FA_TILE_M;  // rows of a tile
constexpr int kStages = FA_STAGES;
constexpr int kCols = 4;
constexpr int kWarps = kSteps / 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kLaneColumns = kDim / 32;  // key columns of a lane: lane, lane + 32, ...
static_assert(FA_TILE_N == kCols && kDim % 32 == 0 && kStages >= 2, "sizes of a tile");

struct SharedStorage {
  float q[kStages][kSteps][kDim];
  float k[kStages][kSteps][kDim];
  float v[kStages][kSteps][kCols];
  float4 sums[kWarps][kDim];  // of the outer products of a warp's rows
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// A row of the state, for the value columns of the block.
struct StateRow {
  float x[kCols];

  __device__ __forceinline__ void add(const float4& y) {
    x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
  }
  __device__ __forceinline__ void add(float key, const float4& values) {
    x[0] = fmaf(key, values.x, x[0]), x[1] = fmaf(key, values.y, x[1]);
    x[2] = fmaf(key, values.z, x[2]), x[3] = fmaf(key, values.w, x[3]);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, FA_BLOCKS)
    linear_low_occupancy(const __grid_constant__ ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const ProductWork work = product_work(params, params.segments);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int col = work.tile * kCols, cols = params.v_dim - col;
  const int tiles = (work.rows + kSteps - 1) / kSteps;
  const float* q = static_cast<const float*>(params.q) + work.q;
  const float* k = static_cast<const float*>(params.k) + work.k;
  const float* v = static_cast<const float*>(params.v) + work.v + col;
  float* out = static_cast<float*>(params.out) + work.out + col;

#pragma unroll 1
  for (int first = 0; first < params.qk_dim; first += kDim) {
    const int dims = min(kDim, params.qk_dim - first);
    auto load = [&](int tile) {
      if (tile < tiles) {
        const int stage = tile % kStages, row = tile * kSteps, rows = work.rows - row;
        const bool aligned = params.aligned;
        load_float_rows<kSteps, kDim, kThreads>(shared.q[stage][0],
                                                q + static_cast<int64>(row) * params.q_row + first,
                                                params.q_row, rows, dims, aligned);
        load_float_rows<kSteps, kDim, kThreads>(shared.k[stage][0],
                                                k + static_cast<int64>(row) * params.k_row + first,
                                                params.k_row, rows, dims, aligned);
        load_float_rows<kSteps, kCols, kThreads>(shared.v[stage][0],
                                                 v + static_cast<int64>(row) * params.v_row,
                                                 params.v_row, rows, cols, aligned);
      }
      cp_async_commit_group();
    };
    StateRow state_before_tile[kLaneColumns];
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const int e = lane + 32 * i;
        const bool valid = params.initial != nullptr && e < dims && c < cols;
        state_before_tile[i].x[c] =
            valid ? params.initial[work.initial + (first + e) * params.initial_row +
                                   (col + c) * params.initial_col]
                  : 0.0f;
      }
    }
#pragma unroll 1
    for (int tile = 0; tile < kStages - 1; ++tile) load(tile);

#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      cp_async_wait_group<kStages - 2>();
      __syncthreads();
      load(tile + kStages - 1);
      const int stage = tile % kStages;
      float4 values[8];
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        values[t] = *reinterpret_cast<const float4*>(shared.v[stage][8 * warp + t]);
      }
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        StateRow row_sum = {};
#pragma unroll
        for (int t = 0; t < 8; ++t) {
          row_sum.add(shared.k[stage][8 * warp + t][lane + 32 * i], values[t]);
        }
        shared.sums[warp][lane + 32 * i] =
            make_float4(row_sum.x[0], row_sum.x[1], row_sum.x[2], row_sum.x[3]);
      }
      __syncthreads();

      float outputs[32];  // 8 rows of 4 columns
#pragma unroll
      for (int i = 0; i < 32; ++i) outputs[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        const int e = lane + 32 * i;
        StateRow state = state_before_tile[i];
#pragma unroll 4
        for (int w = 0; w < kWarps; ++w) {  // not unrolled further, for want of registers
          const float4 sums = shared.sums[w][e];
          if (w < warp) state.add(sums);
          state_before_tile[i].add(sums);
        }
#pragma unroll
        for (int t = 0; t < 8; ++t) {
          state.add(shared.k[stage][8 * warp + t][e], values[t]);
          const float query = shared.q[stage][8 * warp + t][e];
#pragma unroll
          for (int c = 0; c < kCols; ++c) {
            outputs[kCols * t + c] = fmaf(query, state.x[c], outputs[kCols * t + c]);
          }
        }
      }
      sum_over_lanes<32>(outputs);
      const int row = tile * kSteps + 8 * warp + lane / kCols, c = lane % kCols;
      if (row < work.rows && c < cols) {
        float* address = out + static_cast<int64>(row) * params.out_row + c;
        *address = first == 0 ? outputs[0] : *address + outputs[0];
      }
    }
    cp_async_wait_group<0>();
    __syncthreads();

    if (params.state == nullptr || !work.writes_state || warp != 0) continue;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const int e = lane + 32 * i;
        if (e < dims && c < cols) {
          params.state[work.state + (first + e) * params.state_row + (col + c) * params.state_col] =
              state_before_tile[i].x[c];
        }
      }
    }
  }
}
