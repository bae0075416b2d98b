// Which rows of gradients are to be computed once more, because a number among them is not finite.
//
// A hidden pair of a query and a key has weight 0, but 0 * NaN and 0 * inf are NaN inside a matrix
// product.  So whoever writes a gradient looks at its sums before they are rounded, and
// bwd_nonfinite.cu computes the rows again where one of them is not finite.  Queries with a large
// log-sum-exp make their sums NaN on purpose (large_lse.cuh).
#pragma once
#include "cuda_src/common/attention_params.cuh"

constexpr int kRowsPerFlag = 64;  // of a word

FA_DEVICE uint32 flags_per_entry(int rows) { return (rows + kRowsPerFlag - 1) / kRowsPerFlag; }

// Word 0 is set with any other one.  Those of queries follow, entry by entry, then those of keys.
FA_DEVICE void set_nonfinite_flag(uint32* nonfinite_flags, int64 tile) {
  nonfinite_flags[0] = 1;
  nonfinite_flags[1 + tile] = 1;
}
FA_DEVICE void flag_nonfinite_queries(uint32* nonfinite_flags, const AttentionParams& p,
                                      uint32 entry, int row) {
  set_nonfinite_flag(nonfinite_flags,
                     static_cast<int64>(entry) * flags_per_entry(p.q_len) + row / kRowsPerFlag);
}
FA_DEVICE void flag_nonfinite_keys(uint32* nonfinite_flags, const AttentionParams& p,
                                   uint32 query_entries, uint32 entry, int key) {
  set_nonfinite_flag(nonfinite_flags, static_cast<int64>(query_entries) * flags_per_entry(p.q_len) +
                                          static_cast<int64>(entry) * flags_per_entry(p.k_len) +
                                          key / kRowsPerFlag);
}

// Whether all numbers that were shown are finite, in one register: 0 * x is NaN where x is not.
struct NonfiniteProbe {
  float zero = 0.0f;

  __device__ __forceinline__ void add(float x) { zero = fmaf(x, 0.0f, zero); }
  __device__ __forceinline__ bool found() const { return zero != 0.0f; }
};
