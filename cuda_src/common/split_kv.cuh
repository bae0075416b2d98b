// K and V of float32 as pairs of float16, or rounded to float16, as split_kv.cu writes them to
// memory and the kernels of wgmma read them: tile by tile, each in the bytes that it has in shared
// memory.
#pragma once
#include "cuda_src/common/shared_tile.cuh"

// What the exponents of a tile's rows are.
template <int kRows>
struct SplitScale {
  union {
    float factor[kRows];  // of K: 2^(-s/2) of each row, which is 2^-s times its pair
    int exponent[kRows];  // of V: -s, or kNoExponent of a row of zeros
  };
  // Whether rows have exponents of their own: else all of them have that of the largest one.
  int is_mixed;
  int unused[3];  // bulk copies take 16 bytes
};

// A tile of rows: high parts, low parts if there are two (split_rows.cuh), exponents.
template <int kRows, int kCols, int kParts>
struct SplitTile {
  using Tile = SharedTile<kRows, kCols>;
  static constexpr int kPartBytes = 2 * kRows * kCols;

  uint8 part[kParts][kPartBytes];
  SplitScale<kRows> scale;
};

// Rows have one exponent where the largest numbers of all but rows of zeros are within this many
// powers of two.  A row then keeps what the largest one keeps, to this many places less: numbers
// down to 2^-9 of a row's largest keep both parts whole.
constexpr int kMostUniform = 8;
