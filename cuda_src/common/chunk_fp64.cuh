// Chunks of float64 and the state of a causal product in registers, for the kernels of float64.
//
// A warp owns 16 * kMmaM value columns and kWarpDim key columns of S (E, M) and holds S^T = V^T K
// of them as accumulators (mma_fp64.cuh): element [m][2 p + h][e] is that of value column
// 16 m + 2 g + e / 2 and key column 16 p + 4 t + e % 2 * 2 + h, with g = lane / 4 and t = lane % 4.
// B operands of Q S are these numbers, where a row of Q gives columns 4t to 4t + 3 of every 16.  So
// the state never leaves the registers.  What a thread reads of V is its part of the A operand of
// V^T K and of the B operand of P V.
#pragma once
#include "cuda_src/common/linear_params.cuh"
#include "cuda_src/common/mma_fp64.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kDim = FA_DIM;             // qk_dim, padded with zeros
constexpr int kCols = FA_TILE_N;         // value columns of a block
constexpr int kChunk = FA_TILE_M;        // rows of a chunk
constexpr int kStages = FA_STAGES;       // chunks in shared memory
constexpr int kWarps = FA_WARPS;         // of a block
constexpr int kKeyParts = FA_KEY_PARTS;  // of the key columns, each with its warps
constexpr bool kWideMma = FA_WIDE_MMA;   // m16n8k16, which SM90 has
constexpr int kMinBlocks = FA_BLOCKS;    // blocks that should fit on a multiprocessor
constexpr int kThreads = 32 * kWarps;
constexpr int kColWarps = kWarps / kKeyParts, kWarpDim = kDim / kKeyParts;
constexpr int kMmaR = kChunk / 16;               // products down a chunk's rows
constexpr int kMmaM = kCols / (16 * kColWarps);  // products across a warp's value columns
static_assert(kCols == 16 * kMmaM * kColWarps && kWarpDim % 16 == 0, "a warp owns whole products");

using KTile = Fp64Tile<kChunk, kDim, kExchangeOfBoth>;
using VTile = Fp64Tile<kChunk, kCols, kExchangeOfColumns>;

// Of the key columns, the first one of this warp; of the value columns of the block.
FA_DEVICE int warp_key() { return tid_x_again() / 32 / kColWarps * kWarpDim; }
FA_DEVICE int warp_col() { return tid_x_again() / 32 % kColWarps * kMmaM * 16; }

// ----------------------------------------------------------------------------------------- values
// Rows 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16, of columns 2g and 2g + 1 of every 16.
using Values = double[kMmaR][kMmaM][2][4];

FA_DEVICE void load_values(Values& v, uint32 v_tile) {
  const uint32 address = v_tile + VTile::lane_of_columns(warp_col());
#pragma unroll
  for (int c = 0; c < kMmaR; ++c) {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) load_column_pairs<VTile>(v[c][m], address, c, m);
  }
}

// ------------------------------------------------------------------------------------------ state
struct Fp64State {
  double s[kMmaM][kWarpDim / 8][4];

  // Load the state from an array in memory (null: zeros) or store it.  `row` and `col` are the
  // strides of key and value columns; `rows` and `cols` are those that the array has, of which the
  // block owns value columns from `first_col` on.
  __device__ __forceinline__ void load(const double* from, int64 row, int64 col, int rows, int cols,
                                       int first_col) {
    for_each(from, row, col, from == nullptr ? 0 : rows, cols, first_col,
             [](double& x, const double* address, bool valid) { x = valid ? *address : 0.0; });
  }
  __device__ __forceinline__ void store(double* to, int64 row, int64 col, int rows, int cols,
                                        int first_col) {
    for_each(to, row, col, rows, cols, first_col, [](double& x, double* address, bool valid) {
      if (valid) *address = x;
    });
  }

  // S = S + K^T V of a chunk.
  __device__ __forceinline__ void add(const Values& v, uint32 k_tile) {
    const uint32 address = k_tile + KTile::lane_of_columns(warp_key());
#pragma unroll
    for (int p = 0; p < kWarpDim / 16; ++p) {
#pragma unroll
      for (int c = 0; c < kMmaR; ++c) {
        double keys[2][4];
        load_column_pairs<KTile>(keys, address, c, p);
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          double a[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) a[e] = v[c][m][e % 2][e / 2];
          mma_fp64<kWideMma>(s[m][2 * p], a, keys[0]);
          mma_fp64<kWideMma>(s[m][2 * p + 1], a, keys[1]);
        }
      }
    }
  }

  // The B operand of key columns 16 p to 16 p + 15 and of value columns 2 n + h, 16 m <= 2 n < 16 m
  // + 16.
  __device__ __forceinline__ void operand(double (&b)[4], int p, int m, int h) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) b[k] = s[m][2 * p + k % 2][2 * h + k / 2];
  }

 private:
  template <typename Pointer, typename Visit>
  __device__ __forceinline__ void for_each(Pointer base, int64 row, int64 col, int rows, int cols,
                                           int first_col, Visit visit) {
    const int lane = tid_x_again() % 32;
    const int own_row = warp_key() + lane % 4 * 4, own_col = first_col + warp_col() + lane / 4 * 2;
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int value_col = own_col + 16 * m + i;
        const int valid_rows = value_col < cols ? rows - own_row : 0;
        Pointer address = base + value_col * col + own_row * row;
#pragma unroll
        for (int p = 0; p < kWarpDim / 16; ++p) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            visit(s[m][2 * p + e % 2][2 * i + e / 2], address + e * row, 16 * p + e < valid_rows);
          }
          address += 16 * row;
        }
      }
    }
  }
};
