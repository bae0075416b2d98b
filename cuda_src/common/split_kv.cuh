// K and V of float32 as pairs of float16, as split_kv.cu writes them to memory and the kernels of
// wgmma read them: tile by tile, each in the bytes that it has in shared memory.
#pragma once
#include "cuda_src/common/shared_tile.cuh"

// A tile of rows: high parts, low parts (split_rows.cuh), and what the rows' exponents are.  One
// bulk copy brings all of it.
template <int kRows, int kCols>
struct SplitTile {
  using Tile = SharedTile<kRows, kCols>;
  static constexpr int kPartBytes = 2 * kRows * kCols;

  uint8 high[kPartBytes];
  uint8 low[kPartBytes];
  // Of K: 2^(-s/2) of each row, where a row is 2^-s times its pair.  Of V: -s, or kNoExponent of
  // a row of zeros.
  union {
    float factor[kRows];
    int exponent[kRows];
  } scale;
  // Whether rows have exponents of their own: else all of them have that of the largest one.
  int is_mixed;
  int unused[3];
};

// Rows have one exponent where the largest numbers of all but rows of zeros are within this many
// powers of two.  A row then keeps what the largest one keeps, to this many places less: numbers
// down to 2^-9 of a row's largest keep both parts whole.
constexpr int kMostUniform = 8;
