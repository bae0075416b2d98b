// Causal product row after row, in plain float32: S = S + k v^T, out = q S.
//
// One block computes kCols value columns of one batch entry.  A thread holds 8 key columns by 4
// value columns of S in registers.  kLanes neighbouring threads share the value columns; after
// every 8 rows they add up their parts of the outputs.  Rows are loaded into kStages tiles of
// kTileRows rows.  If there are more than kDim key columns, the kernel goes over all rows once for
// every kDim of them, and adds to the outputs of the passes before.
#include "cuda_src/common/float_rows.cuh"
#include "cuda_src/common/linear_params.cuh"

constexpr int kDim = FA_DIM;      // key columns at a time
constexpr int kCols = FA_TILE_N;  // value columns of a block
constexpr int kTileRows = FA_TILE_M;
constexpr int kStages = FA_STAGES;
constexpr int kLanes = kDim / 8;
constexpr int kThreads = kLanes * kCols / 4;
constexpr int kLaneSums =
    32 / kLanes;  // of the sums of 8 rows and 4 columns, those that a thread stores
static_assert(kLanes >= 4 && kLanes <= 32 && kTileRows % 8 == 0 && kStages >= 2, "sizes of a tile");

struct SharedStorage {
  float q[kStages][kTileRows][kDim];
  float k[kStages][kTileRows][kDim];
  float v[kStages][kTileRows][kCols];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// Key column i of the 8 of a thread: two runs of 4, so that neighbouring threads read neighbouring
// banks.
FA_DEVICE int key_column(int lane, int i) { return i / 4 * (kDim / 2) + 4 * lane + i % 4; }

FA_DEVICE void read4(float (&x)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

extern "C" __global__ void __launch_bounds__(kThreads, FA_BLOCKS)
    linear_recurrent(const __grid_constant__ ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const ProductWork work = product_work(params, params.segments);
  const int lane = threadIdx.x % kLanes, col = work.tile * kCols + threadIdx.x / kLanes * 4;
  const int own_col = threadIdx.x / kLanes * 4;  // in the tile
  const int tiles = (work.rows + kTileRows - 1) / kTileRows;
  const float* q = static_cast<const float*>(params.q) + work.q;
  const float* k = static_cast<const float*>(params.k) + work.k;
  const float* v = static_cast<const float*>(params.v) + work.v + work.tile * kCols;
  float* out = static_cast<float*>(params.out) + work.out;

#pragma unroll 1
  for (int first = 0; first < params.qk_dim; first += kDim) {
    const int dims = min(kDim, params.qk_dim - first);
    auto load = [&](int tile) {
      if (tile < tiles) {
        const int stage = tile % kStages, row = tile * kTileRows, rows = work.rows - row;
        const bool aligned = params.aligned;
        load_float_rows<kTileRows, kDim, kThreads>(
            shared.q[stage][0], q + static_cast<int64>(row) * params.q_row + first, params.q_row,
            rows, dims, aligned);
        load_float_rows<kTileRows, kDim, kThreads>(
            shared.k[stage][0], k + static_cast<int64>(row) * params.k_row + first, params.k_row,
            rows, dims, aligned);
        load_float_rows<kTileRows, kCols, kThreads>(
            shared.v[stage][0], v + static_cast<int64>(row) * params.v_row, params.v_row, rows,
            params.v_dim - work.tile * kCols, aligned);
      }
      cp_async_commit_group();
    };
    float s[8][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int e = key_column(lane, i);
        const bool valid = params.initial != nullptr && e < dims && col + c < params.v_dim;
        s[i][c] = valid ? params.initial[work.initial + (first + e) * params.initial_row +
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
#pragma unroll 1
      for (int begin = 0; begin < kTileRows; begin += 8) {
        float sums[32];
#pragma unroll
        for (int t = 0; t < 8; ++t) {
          float values[4];
          read4(values, &shared.v[stage][begin + t][own_col]);
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[4 * t + c] = 0.0f;
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            float keys[4], queries[4];
            read4(keys, &shared.k[stage][begin + t][key_column(lane, i)]);
            read4(queries, &shared.q[stage][begin + t][key_column(lane, i)]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
              for (int c = 0; c < 4; ++c) {
                s[i + e][c] = fmaf(keys[e], values[c], s[i + e][c]);
                sums[4 * t + c] = fmaf(queries[e], s[i + e][c], sums[4 * t + c]);
              }
            }
          }
        }
        sum_over_lanes<kLanes>(sums);
#pragma unroll
        for (int i = 0; i < kLaneSums; ++i) {
          const int index = kLaneSums * lane + i;
          const int row = tile * kTileRows + begin + index / 4, to = col + index % 4;
          if (row < work.rows && to < params.v_dim) {
            float* address = out + static_cast<int64>(row) * params.out_row + to;
            *address = first == 0 ? sums[i] : *address + sums[i];
          }
        }
      }
    }
    cp_async_wait_group<0>();
    __syncthreads();

    if (params.state == nullptr || !work.writes_state) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int e = key_column(lane, i);
        if (e < dims && col + c < params.v_dim) {
          params.state[work.state + (first + e) * params.state_row + (col + c) * params.state_col] =
              s[i][c];
        }
      }
    }
  }
}
