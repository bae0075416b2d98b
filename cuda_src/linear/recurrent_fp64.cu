// Causal product of packed sequences row after row, in float64: S = S + k v^T, out = q S.
//
// A thread has one value column and kDim key columns of S in registers.  Rows of Q and K come
// through shared memory, some at a time.  If there are more than kDim key columns, the kernel goes
// over all rows once for every kDim of them, and adds to the outputs of the passes before.
#include "cuda_src/common/linear_params.cuh"

constexpr int kDim = FA_DIM;         // key columns at a time
constexpr int kThreads = FA_TILE_N;  // value columns of a block
constexpr int kTileRows = FA_TILE_M;

struct SharedStorage {
  double q[kTileRows][kDim], k[kTileRows][kDim];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// Rows of some key columns, zeros behind the last row and the last column.
FA_DEVICE void load_rows(double (&to)[kTileRows][kDim], const double* from, int64 stride, int rows,
                         int cols) {
  for (int i = threadIdx.x; i < kTileRows * kDim; i += kThreads) {
    const int row = i / kDim, col = i % kDim;
    to[row][col] = row < rows && col < cols ? from[row * stride + col] : 0.0;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, FA_BLOCKS)
    linear_recurrent_fp64(const __grid_constant__ ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const ProductWork work = product_work(params, params.segments);
  const int col = work.tile * kThreads + static_cast<int>(threadIdx.x);
  const bool has_col = col < params.v_dim;
  const double* q = static_cast<const double*>(params.q) + work.q;
  const double* k = static_cast<const double*>(params.k) + work.k;
  const double* v = static_cast<const double*>(params.v) + work.v + col;
  double* out = static_cast<double*>(params.out) + work.out + col;
  const double* initial = params.initial;
  double* state = params.state;

#pragma unroll 1
  for (int first = 0; first < params.qk_dim; first += kDim) {
    const int dims = min(kDim, params.qk_dim - first);
    double s[kDim];
#pragma unroll
    for (int e = 0; e < kDim; ++e) {
      const bool valid = initial != nullptr && has_col && e < dims;
      s[e] =
          valid
              ? initial[work.initial + (first + e) * params.initial_row + col * params.initial_col]
              : 0.0;
    }
#pragma unroll 1
    for (int begin = 0; begin < work.rows; begin += kTileRows) {
      const int rows = min(kTileRows, work.rows - begin);
      __syncthreads();
      load_rows(shared.q, q + static_cast<int64>(begin) * params.q_row + first, params.q_row, rows,
                dims);
      load_rows(shared.k, k + static_cast<int64>(begin) * params.k_row + first, params.k_row, rows,
                dims);
      __syncthreads();
#pragma unroll 1
      for (int row = 0; row < rows; ++row) {
        const int64 at = begin + row;
        const double value = has_col ? v[at * params.v_row] : 0.0;
        double sum = 0.0;
#pragma unroll
        for (int e = 0; e < kDim; ++e) {
          s[e] = fma(shared.k[row][e], value, s[e]);
          sum = fma(shared.q[row][e], s[e], sum);
        }
        if (!has_col) continue;
        double* address = out + at * params.out_row;
        *address = first == 0 ? sum : *address + sum;
      }
    }
    if (state == nullptr || !work.writes_state || !has_col) continue;
#pragma unroll
    for (int e = 0; e < kDim; ++e) {
      if (e < dims) {
        state[work.state + (first + e) * params.state_row + col * params.state_col] = s[e];
      }
    }
  }
}
