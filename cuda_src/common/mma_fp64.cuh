// Products of one warp in float64 by mma.sync, of tiles that lie in shared memory.
//
// A thread reads 16 bytes at a time, two neighbouring numbers.  Which numbers of its operands those
// are is free, as long as A and B agree on it: so where both are rows, a thread t of the four that
// share one takes columns 4t to 4t + 3 of every 16; where A is an accumulator, whose thread holds
// columns 2t and 2t + 1 of every 8, it takes those rows of B; and two products that lie side by
// side take the even and the odd ones of 16 columns of B, so that a thread's part of the result is
// columns 4t to 4t + 3.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"

// With kWide one instruction of SM90, else eight of SM80.
template <bool kWide>
FA_DEVICE void mma_fp64(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
  if constexpr (kWide) {
    mma_m16n8k16_f64(d, a, b);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mma_m8n8k4_f64(d[0], d[1], a[2 * i], b[i]);
      mma_m8n8k4_f64(d[2], d[3], a[2 * i + 1], b[i]);
    }
  }
}

// A tile of rows of float64.  Its 16-byte chunks are exchanged within 128 bytes so that the eight
// lanes that one access serves meet no bank conflict: they read two chunks (of operands that are
// rows) or four (of a tile whose columns are those of the product) in each of the rows they need.
// A tile that is read in both ways (kExchange) has the one exchange beside the other.
enum Fp64Exchange : int { kExchangeOfRows = 0, kExchangeOfColumns = 1, kExchangeOfBoth = 2 };

template <int kRows, int kCols, int kExchange>
struct Fp64Tile {
  static constexpr int kRowBytes = kCols * 8, kRowChunks = kCols / 2;
  // Between the chunks of an even row and those of the odd row behind it, where columns are read.
  static constexpr uint32 kOddRow = kExchange == kExchangeOfBoth ? 16 : 0;
  static_assert(kCols % 16 == 0 && kRows % 8 == 0, "chunks are exchanged within 16 columns");

  static __device__ __forceinline__ uint32 offset(int row, int chunk) {
    const int exchange = (kExchange == kExchangeOfRows ? 0 : (row >> 1 & 3) << 1) |
                         (kExchange == kExchangeOfColumns ? 0 : row & 1);
    return static_cast<uint32>(row * kRowBytes + ((chunk ^ exchange) << 4));
  }
  // Where a thread's part of an operand begins, from `row` on: rows are lanes / 4 and 8 more.
  static __device__ __forceinline__ uint32 lane_of_rows(int row) {
    const int lane = tid_x_again() % 32;
    return offset(row + lane / 4, 2 * (lane % 4));
  }
  // The same of a tile whose rows are summed over, from a column on.
  static __device__ __forceinline__ uint32 lane_of_columns(int col) {
    const int lane = tid_x_again() % 32;
    return offset(2 * (lane % 4), col / 2 + lane / 4);
  }
};

// A thread's four numbers of a row of an operand, 16 columns of it.
FA_DEVICE void load_row_part(double (&x)[4], uint32 address) {
  double pair[2];
  ld_shared_v2_f64(pair, address);
  x[0] = pair[0], x[1] = pair[1];
  ld_shared_v2_f64(pair, address ^ 16);
  x[2] = pair[0], x[3] = pair[1];
}

// A thread's part of an A operand that is rows of a tile, 16 columns of it.  The address is that of
// lane_of_rows.
template <typename Tile, int kMmaM>
FA_DEVICE void load_rows_part(double (&a)[kMmaM][8], uint32 address, int col_step) {
#pragma unroll
  for (int i = 0; i < 2 * kMmaM; ++i) {
    double four[4];
    load_row_part(four, address + 8 * i * Tile::kRowBytes + 128 * col_step);
#pragma unroll
    for (int e = 0; e < 4; ++e) a[i / 2][2 * e + i % 2] = four[e];
  }
}

// x = A B^T.  Addresses are those of lane_of_rows.
template <bool kWide, typename ATile, typename BTile, int kCols, int kMmaM, int kMmaN>
FA_DEVICE void multiply_rows_fp64(double (&x)[kMmaM][kMmaN][4], uint32 a_address,
                                  uint32 b_address) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (double& sum : x[i][j]) sum = 0.0;
    }
  }
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
    double a[kMmaM][8];
    load_rows_part<ATile>(a, a_address, step);
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      double b[4];
      load_row_part(b, b_address + 8 * j * BTile::kRowBytes + 128 * step);
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) mma_fp64<kWide>(x[i][j], a[i], b);
    }
  }
}

// A thread's part of 16 rows and 16 columns of a tile whose rows are summed over: four numbers of
// an even column and of the odd one behind it.  The address is that of lane_of_columns.
template <typename Tile>
FA_DEVICE void load_column_pairs(double (&x)[2][4], uint32 address, int row_step, int col_step) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    double pair[2];
    const int row = 16 * row_step + k / 2 * 8 + k % 2;
    ld_shared_v2_f64(pair, (address ^ k % 2 * Tile::kOddRow) + row * Tile::kRowBytes +
                               static_cast<uint32>(128 * col_step));
    x[0][k] = pair[0], x[1][k] = pair[1];
  }
}

// sums += A B, where A is an accumulator with kMmaK parts of 8 columns.  The address is that of
// lane_of_columns.  sums[i][2 p] and sums[i][2 p + 1] are 16 columns, of which a thread holds
// columns 4t, 4t + 2 and 4t + 1, 4t + 3.
template <bool kWide, typename BTile, int kMmaM, int kMmaN, int kMmaK>
FA_DEVICE void add_product_fp64(double (&sums)[kMmaM][kMmaN][4], const double (&a)[kMmaM][kMmaK][4],
                                uint32 b_address) {
#pragma unroll
  for (int step = 0; step < kMmaK / 2; ++step) {
#pragma unroll
    for (int p = 0; p < kMmaN / 2; ++p) {
      double b[2][4];
      load_column_pairs<BTile>(b, b_address, step, p);
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
        double part[8];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          part[2 * k] = a[i][2 * step + k / 2][k % 2];
          part[2 * k + 1] = a[i][2 * step + k / 2][2 + k % 2];
        }
        mma_fp64<kWide>(sums[i][2 * p], part, b[0]);
        mma_fp64<kWide>(sums[i][2 * p + 1], part, b[1]);
      }
    }
  }
}

// Asks for rows [row_begin, rows) of a global matrix, columns [0, cols); the rest of the tile
// becomes zero.  All threads of the block take part, and what they ask for is of a cp.async group.
template <typename Tile, int kRows, int kThreads>
FA_DEVICE void load_tile_fp64(uint32 tile, const double* source, int64 row_stride, int row_begin,
                              int rows, int cols, bool aligned) {
  constexpr int kChunks = kRows * Tile::kRowChunks, kSteps = (kChunks + kThreads - 1) / kThreads;
  const int tid = tid_x_again();
  // Of a row that does not exist no address is made, not even to read nothing from.
  if (aligned && cols % 2 == 0) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int index = tid + step * kThreads;
      if (kChunks % kThreads != 0 && index >= kChunks) break;
      // Of the same chunk in each step, where threads divide into rows.
      const bool same = kThreads % Tile::kRowChunks == 0;
      const int chunk = (same ? tid : index) % Tile::kRowChunks;
      const int row = same ? tid / Tile::kRowChunks + step * (kThreads / Tile::kRowChunks)
                           : index / Tile::kRowChunks;
      const bool exists = row_begin + row < rows && 2 * chunk < cols;
      const double* from = exists ? source + (row_begin + row) * row_stride + 2 * chunk : source;
      cp_async_cg_16(tile + Tile::offset(row, chunk), from, exists ? 16 : 0);
    }
    return;
  }
#pragma unroll 1
  for (int index = tid; index < kChunks; index += kThreads) {
    const int row = index / Tile::kRowChunks, chunk = index % Tile::kRowChunks;
    const int count = row_begin + row < rows ? max(0, min(2, cols - 2 * chunk)) : 0;
    const double* from = count > 0 ? source + (row_begin + row) * row_stride + 2 * chunk : source;
    const uint32 to = tile + Tile::offset(row, chunk);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (e < count) {
        cp_async_ca<8>(to + 8 * e, from + e);
      } else {
        st_shared_v2_b32(to + 8 * e, 0, 0);
      }
    }
  }
}
