// The state of a causal product in registers: S (E, M), the sum of the outer products of rows of K
// and V.
//
// A warp owns 16 * kMmaM value columns and holds S^T = V^T K of them as accumulators of m16n8k16
// (ptx/mma_sync.cuh): element [i][j][e] is that of value column 16 i + g + e / 2 * 8 and key column
// 8 j + 2 t + e % 2, with g = lane / 4 and t = lane % 4.  B operands of Q S have the same layout,
// so the state never leaves the registers, and no warp waits for the state of another one.
#pragma once
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/ldmatrix.cuh"

// Where this lane's row of the four matrices of an ldmatrix.x4 lies (PTX ISA 9.7.14.5.15).
// Two blocks of 8 rows first, then the same of the next 8 columns: A operands, and B operands from
// rows of k by .trans.
template <typename Tile>
FA_DEVICE uint32 rows_first(int lane) {
  return Tile::lane_offset(lane % 16, lane / 16);
}
// Two blocks of 8 columns first: B operands from rows of n, and A operands from rows of k by
// .trans.
template <typename Tile>
FA_DEVICE uint32 columns_first(int lane) {
  return Tile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Values of a chunk as A operands of V^T, 16 rows each.  As B operands of P V, v[0] and v[2] belong
// to the first 8 columns, v[1] and v[3] to the next 8.
template <int kChunk, int kMmaM>
using Values = uint32[kChunk / 16][kMmaM][4];

template <typename Tile, int kChunk, int kMmaM>
FA_DEVICE void load_values(Values<kChunk, kMmaM>& v, uint32 v_address) {
#pragma unroll
  for (int c = 0; c < kChunk / 16; ++c) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) ldmatrix_x4_trans(v[c][i], Tile::at(v_address, 16 * c, i));
  }
}

// The state of kDim key columns of a KTile, beginning with one of its blocks.
template <bool kBf16, typename KTile, int kDim, int kChunk, int kMmaM>
struct ChunkState {
  float s[kMmaM * (kDim / 8)][4];  // [i][j][e] at [i * kDim / 8 + j][e]

  // Load the state from an array in memory (null: zeros) or store it; `row` and `col` are the
  // strides of key and value columns.
  __device__ __forceinline__ void load(const float* from, int64 row, int64 col, int rows,
                                       int cols) {
    for_each(from, row, col, rows, cols,
             [](float& x, const float* address, bool valid) { x = valid ? *address : 0.0f; });
  }
  __device__ __forceinline__ void store(float* to, int64 row, int64 col, int rows, int cols) {
    for_each(to, row, col, rows, cols, [](float& x, float* address, bool valid) {
      if (valid) *address = x;
    });
  }

  // S = S + U with U = K^T V of a chunk.  U is summed apart and added by FADD, because tensor cores
  // truncate, so a long sum in their accumulators drifts.
  __device__ __forceinline__ void add(const Values<kChunk, kMmaM>& v, uint32 k_address) {
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
      float u[kMmaM][2][4];
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) u[i][e / 4][e % 4] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < kChunk / 16; ++c) {
        uint32 b[4];
        ldmatrix_x4_trans(b, KTile::at(k_address, 16 * c, j));
#pragma unroll
        for (int i = 0; i < kMmaM; ++i) {
          mma_m16n8k16<kBf16>(u[i][0], v[c][i], b[0], b[1]);
          mma_m16n8k16<kBf16>(u[i][1], v[c][i], b[2], b[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) s[i * (kDim / 8) + 2 * j + e / 4][e % 4] += u[i][e / 4][e % 4];
      }
    }
  }

  // The B operand of key columns 16 j to 16 j + 15 and value columns 8 n to 8 n + 7: S times
  // `scale`, rounded, and the remainder of the rounding.
  __device__ __forceinline__ void operand(uint32 (&high)[2], uint32 (&low)[2], int j, int n,
                                          float scale) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* pair = &s[n / 2 * (kDim / 8) + 2 * j + r][n % 2 * 2];
      const float x = pair[0] * scale, y = pair[1] * scale;
      high[r] = pack2<kBf16>(x, y);
      low[r] = pack2<kBf16>(x - to_float<kBf16>(static_cast<uint16>(high[r])),
                            y - to_float<kBf16>(static_cast<uint16>(high[r] >> 16)));
    }
  }

 private:
  template <typename Pointer, typename Visit>
  __device__ __forceinline__ void for_each(Pointer base, int64 row, int64 col, int rows, int cols,
                                           Visit visit) {
    // Read again (ptx/special.cuh), so that no register holds it from one use of the state to the
    // next.
    const int lane = tid_x_again() & 31, first_row = lane % 4 * 2, first_col = lane / 4;
    if (base == nullptr) cols = 0;
#pragma unroll
    for (int h = 0; h < 2 * kMmaM; ++h) {
      const int valid_rows = first_col + 8 * h < cols ? rows - first_row : 0;
      Pointer address = base + (first_col + 8 * h) * col + first_row * row;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[h / 2 * (kDim / 8) + j][h % 2 * 2 + e];
          visit(x, address + e * row, 8 * j + e < valid_rows);
        }
        address += 8 * row;
      }
    }
  }
};

// A power of two that brings a warp's largest finite number near 2**14, so that float16 can hold
// it; numbers below 2**-24 are small enough to stay so.
template <int kN>
FA_DEVICE float range_scale(const float (&x)[kN][4]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * kN; ++i) most = fmaxf(most, fabsf(x[i / 4][i % 4]));
  // IEEE 754: floats that are not negative are in the order of their bits.
  uint32 bits = __reduce_max_sync(kFullWarp, __float_as_uint(most));
  if (bits == 0x7f800000) {  // infinity: find the largest finite number
    most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kN; ++i) {
      const float one = fabsf(x[i / 4][i % 4]);
      if (one < __int_as_float(0x7f800000)) most = fmaxf(most, one);
    }
    bits = __reduce_max_sync(kFullWarp, __float_as_uint(most));
  }
  const int exponent = max(-24, min(100, static_cast<int>(bits >> 23) - 127));
  return __int_as_float((127 + 14 - exponent) << 23);
}
