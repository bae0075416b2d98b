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
    int exponent[kRows];  // of V: -s, or kZeroExponent or kNoExponent
  };
  // Whether rows have exponents of their own: else all of them have that of the largest one.  If
  // there are two parts, columns of V then have exponents, too, and low parts have the factor of
  // split_float.cuh: such numbers, and weights times exponents of rows, are of all sizes.
  int is_mixed;
  int unused[3];  // bulk copies take 16 bytes
};

// A tile of rows: high parts, low parts if there are two (split_rows.cuh), exponents of rows.
template <int kRows, int kCols, int kParts>
struct SplitTile {
  using Tile = SharedTile<kRows, kCols>;

  uint8 part[kParts][Tile::kBytes];
  SplitScale<kRows> scale;
  // Of a mixed tile of V with two parts: 2^-t of each column, which was multiplied by 2^t.  It is
  // read where it lies, as such tiles are rare.
  float column_factor[kParts == 2 ? kCols : 4];
};

// Rows have one exponent where the largest numbers of all but rows of zeros are within this many
// powers of two.  A row then keeps what the largest one keeps, to this many places less: numbers
// down to 2^-9 of a row's largest keep both parts whole.
constexpr int kMostUniform = 8;
// Rows of V have no such exponent where many numbers are small beside it, those of a column, say:
// without a factor, their low parts would have lost two digits or more.  Of random numbers none or
// one of a tile is that small.
constexpr float kSmall = 1.0f / 16.0f;
constexpr int kManySmall = 8;  // threads that have one, or as many as there are rows
