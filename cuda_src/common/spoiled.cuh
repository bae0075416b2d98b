// Which rows of gradients are to be computed once more, because a number among them is not finite.
//
// A hidden pair of a query and a key has weight 0, but 0 * NaN and 0 * inf are NaN inside a matrix
// product.  So whoever writes a gradient looks at its sums before they are rounded, and bwd_redo.cu
// computes the rows again where one of them is not finite.  Queries with a large log-sum-exp spoil
// their sums on purpose (far_rows.cuh).
#pragma once
#include "cuda_src/common/attention_params.cuh"

constexpr int kSpoiledRows = 64;  // of a word

FA_DEVICE uint32 spoiled_tiles(int rows) { return (rows + kSpoiledRows - 1) / kSpoiledRows; }

// Word 0 is set with any other one.  Those of queries follow, entry by entry, then those of keys.
FA_DEVICE void spoil(uint32* spoiled, int64 tile) {
  spoiled[0] = 1;
  spoiled[1 + tile] = 1;
}
FA_DEVICE void spoil_queries(uint32* spoiled, const AttentionParams& p, uint32 entry, int row) {
  spoil(spoiled, static_cast<int64>(entry) * spoiled_tiles(p.q_len) + row / kSpoiledRows);
}
FA_DEVICE void spoil_keys(uint32* spoiled, const AttentionParams& p, uint32 query_entries,
                          uint32 entry, int key) {
  spoil(spoiled, static_cast<int64>(query_entries) * spoiled_tiles(p.q_len) +
                     static_cast<int64>(entry) * spoiled_tiles(p.k_len) + key / kSpoiledRows);
}

// Whether all numbers that were shown are finite, in one register: 0 * x is NaN where x is not.
struct Look {
  float zero = 0.0f;

  __device__ __forceinline__ void at(float x) { zero = fmaf(x, 0.0f, zero); }
  __device__ __forceinline__ bool spoiled() const { return zero != 0.0f; }
};
