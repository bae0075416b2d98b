// Products of one warp by mma.sync, of tiles that lie in shared memory (shared_tile.cuh).
//
// The warp holds the result as accumulators of m16n8: x[i][j] is the 16 x 8 part that begins at row
// 16 i and column 8 j of the warp's own.  Addresses of tiles are a lane's: where its row of the
// four matrices of an ldmatrix.x4 lies (PTX ISA 9.7.14.5.15).
#pragma once
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/ldmatrix.cuh"

// A operand, from this row on: rows 0-7, rows 8-15, then the same of columns 8-15.
template <typename Tile>
FA_DEVICE uint32 a_lane(int row) {
  const int lane = tid_x_again() % 32;
  return Tile::lane_offset(row + lane % 16, lane / 16);
}
// B operand whose columns are rows of the tile: columns 0-7, 8-15 of rows 0-7, then of rows 8-15.
template <typename Tile>
FA_DEVICE uint32 b_lane(int row) {
  const int lane = tid_x_again() % 32;
  return Tile::lane_offset(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// B operand, transposed on its way, from the 16 columns `pair` on: rows 0-7, 8-15 of columns 0-7,
// then of columns 8-15.
template <typename Tile>
FA_DEVICE uint32 b_trans_lane(int pair = 0) {
  const int lane = tid_x_again() % 32;
  return Tile::lane_offset(lane % 16, 2 * pair + lane / 16);
}

template <int kMmaM, int kMmaN>
FA_DEVICE void clear(float (&x)[kMmaM][kMmaN][4]) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][j][e] = 0.0f;
    }
  }
}

// x = A B^T, 16 * kSteps columns of both.
template <bool kBf16, typename ATile, typename BTile, int kSteps, int kMmaM, int kMmaN>
FA_DEVICE void multiply_rows(float (&x)[kMmaM][kMmaN][4], uint32 a_address, uint32 b_address) {
  clear(x);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32 a[kMmaM][4];
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) ldmatrix_x4(a[i], ATile::at(a_address, 16 * i, step));
#pragma unroll
    for (int j = 0; j < kMmaN; j += 2) {
      uint32 b[4];
      ldmatrix_x4(b, BTile::at(b_address, 8 * j, step));
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        mma_m16n8k16<kBf16>(x[i][j], a[i], b[0], b[1]);
        mma_m16n8k16<kBf16>(x[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// sums += A B, of 8 * kMmaK columns of A, which a thread holds as pairs of an accumulator.  Of the
// 16 columns of B at a time, kGroups warps take every kGroups-th.
template <bool kBf16, typename BTile, int kGroups = 1, int kMmaM, int kMmaN, int kMmaK>
FA_DEVICE void add_product(float (&sums)[kMmaM][kMmaN][4], const uint32 (&a)[kMmaM][kMmaK][2],
                           uint32 b_address) {
#pragma unroll
  for (int step = 0; step < kMmaK / 2; ++step) {
#pragma unroll
    for (int j = 0; j < kMmaN; j += 2) {
      uint32 b[4];
      ldmatrix_x4_trans(b, BTile::at(b_address, 16 * step, kGroups * (j / 2)));
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        const uint32 four[4] = {a[i][2 * step][0], a[i][2 * step][1], a[i][2 * step + 1][0],
                                a[i][2 * step + 1][1]};
        mma_m16n8k16<kBf16>(sums[i][j], four, b[0], b[1]);
        mma_m16n8k16<kBf16>(sums[i][j + 1], four, b[2], b[3]);
      }
    }
  }
}

// The same with A in shared memory, 16 * kSteps columns of it.
template <bool kBf16, typename ATile, typename BTile, int kSteps, int kGroups, int kMmaM, int kMmaN>
FA_DEVICE void add_product(float (&sums)[kMmaM][kMmaN][4], uint32 a_address, uint32 b_address) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32 a[kMmaM][4];
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) ldmatrix_x4(a[i], ATile::at(a_address, 16 * i, step));
#pragma unroll
    for (int j = 0; j < kMmaN; j += 2) {
      uint32 b[4];
      ldmatrix_x4_trans(b, BTile::at(b_address, 16 * step, kGroups * (j / 2)));
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        mma_m16n8k16<kBf16>(sums[i][j], a[i], b[0], b[1]);
        mma_m16n8k16<kBf16>(sums[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}
