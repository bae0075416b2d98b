// Rows of float32 that cp.async brings to where their pairs of float16 (split_float.cuh) are going
// to be.
//
// A tile of pairs is a tile of high parts, followed by one of low parts.  A row of it has as many
// bytes as the numbers that it is made of, in both tiles together.  So the 16-byte chunks of a row
// of numbers come in the order in which the chunks of its pairs lie: the first half of them where
// high parts will be.  The eight lanes that share a row (split_row) copy it, hold it in registers
// and put its pairs in its place, and need no barrier for that but their warp's.
#pragma once
#include "cuda_src/common/split_float.cuh"

template <int kRows, int kCols, int kWarps>
struct PairTile {
  using Tile = SharedTile<kRows, kCols>;
  using Rows = FloatChunk<kRows, kCols, kWarps>;
  static constexpr uint32 kLow = kRows * kCols * 2;  // bytes from high parts to low ones

  // Asks for rows [row_begin, rows) of a matrix, columns [0, cols); the rest becomes zero.  All
  // threads take part; what they ask for is a part of their cp.async group.
  static __device__ __forceinline__ void load(uint32 tile, const float* source, int row_stride,
                                              int row_begin, int rows, int cols, bool aligned) {
    const int tid = tid_x_again(), row = split_row<Tile>(tid), lane = tid % 8;
    const uint32 to = tile + Tile::offset(row, lane);
    source += static_cast<int64>(row_begin + row) * row_stride + 4 * lane;
    const int valid_rows = rows - row_begin - row, valid_cols = cols - 4 * lane;
    if (aligned) {
#pragma unroll
      for (int g = 0; g < Rows::kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < Rows::kFours; ++i) {
          const int count = g * Rows::kStep < valid_rows ? max(0, min(4, valid_cols - 32 * i)) : 0;
          cp_async_cg_16(to + chunk(g, i), source + 32 * i, 4 * count);
        }
        source += static_cast<int64>(Rows::kStep) * row_stride;
      }
    } else {
#pragma unroll 1
      for (int g = 0; g < Rows::kGroups; ++g) {
#pragma unroll 1
        for (int i = 0; i < Rows::kFours; ++i) {
          const int count = g * Rows::kStep < valid_rows ? valid_cols - 32 * i : 0;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const uint32 at = to + chunk(g, i) + 4 * e;
            if (e < count) {
              cp_async_ca<4>(at, source + 32 * i + e);
            } else {
              st_shared_b32(at, 0);
            }
          }
        }
        source += static_cast<int64>(Rows::kStep) * row_stride;
      }
    }
  }

  // Turns rows that have landed into pairs.  For each row, one lane calls
  // write_exponent(row, s, largest magnitude).
  template <typename WriteExponent>
  static __device__ __forceinline__ void split_rows(uint32 tile,
                                                    const WriteExponent& write_exponent) {
    __syncwarp();
    const int tid = tid_x_again(), first_row = split_row<Tile>(tid);
    const uint32 from = tile + Tile::offset(first_row, tid % 8);
#pragma unroll
    for (int g = 0; g < Rows::kGroups; ++g) {
      Rows rows;
#pragma unroll
      for (int i = 0; i < Rows::kFours; ++i) {
        uint32 words[4];
        ld_shared_v4_b32(words, from + chunk(g, i));
#pragma unroll
        for (int e = 0; e < 4; ++e) rows.x[g][i][e] = __uint_as_float(words[e]);
      }
      const float largest = rows.largest(g);
      const int exponent = split_exponent(largest);
      __syncwarp();
      rows.store(tile, g, exponent);
      if (tid % 8 == 0) write_exponent(first_row + g * Rows::kStep, exponent, largest);
    }
  }

 private:
  // From a lane's first chunk to another one of its own, in bytes.
  static constexpr __device__ __forceinline__ uint32 chunk(int group, int i) {
    return static_cast<uint32>(i * (8 / Tile::kBlockChunks) * Tile::kBlockBytes +
                               group * Rows::kStep * Tile::kRowBytes);
  }
};
