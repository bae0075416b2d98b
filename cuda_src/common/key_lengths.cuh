// Whether batch entries have numbers of keys of their own, and where these numbers are.
#pragma once
#include "cuda_src/common/batch_axes.cuh"

#ifndef FA_LENGTHS
#define FA_LENGTHS 0
#endif
constexpr bool kLengths = FA_LENGTHS;

// full_precision/key_lengths.py holds the same fields in the same order; they take the place of the
// first ones of MaskLists.
struct KeyLengths {
  const void* start;           // of an array (*batch)
  int64 batch[kMaxBatchAxes];  // its strides, in elements
  int bytes;                   // of an element: 4 or 8
  int band_from_end;           // 1: lower and upper are for k_len keys, and move with the last key
};

// The band of one batch entry, where entries differ in how many keys they have.
struct KeyBand {
  int k_len, lower, upper;
};
// The upper bound of the band of an entry whose length is out of range: no row sees a key.
constexpr int kInvalidBound = static_cast<int>(0x80000000u);
