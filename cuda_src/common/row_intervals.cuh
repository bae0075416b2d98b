// Packed sequences: which keys each query row sees, and which rows see each key.
//
// Sequences lie end to end along the rows of q and along those of k.  A row sees a range of the
// keys of its own sequence, and both ends of the ranges ascend from row to row: so a tile of rows,
// which may belong to several sequences, sees keys from the first one of its first row to the last
// one of its last row, and the kernels need no more of sequences than these ranges.
// row_intervals.cu writes them; band.cuh reads them in place of a band.
#pragma once
#include "cuda_src/common/packed.cuh"
#include "ptx/types.cuh"

// [first, last]; last is first - 1 where there is nothing.
struct alignas(8) Interval {
  int first, last;
};

// In `first` of a row whose sequence has offsets out of range: its output is NaN.
constexpr int kInvalidRow = static_cast<int>(0x80000000u);

// fa_cupy/gpu/kernels/attention/row_intervals.py has the same fields in the same order; they take
// the place of the first ones of MaskLists.
struct RowIntervals {
  // Of each query row, and of kIntervalPadding rows behind the last one, which see no key.
  const Interval* keys_of_row;
  const Interval* rows_of_key;  // the same of each key
  const Interval* key_tiles;    // of each tile of query rows: the tiles of keys it works on, some
  const Interval* query_tiles;  // of each tile of keys: the tiles of query rows that work on it
  const int* order;             // tiles of query rows, most keys first
};
constexpr int kIntervalPadding = 256;
