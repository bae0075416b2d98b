// The parameters of the kernels of attention backward in float32, and what bwd_preprocess_fp32
// writes for the others: rows in pairs of float16, and what is known of each row.
#pragma once
#include "cuda_src/common/backward_rows.cuh"

// -------------------------------------------------------------------------------------- parameters
// What is known of rows, an array of each: (*batch, padded rows).
//
// Rows of an array are products of pairs with the square of their factor.  Where the product of two
// limits is above 1, pairs may have lost what counts (check_range).
enum QueryField : int {
  kShift,  // of scores: a weight is factor * exp(score - shift)
  kFactor,
  kDelta,  // dout . out - dlse
  kQFactor,
  kDoutFactor,
  kQLimit,
  kDoutLimit,
  kQueryFields
};
enum KeyField : int { kKFactor, kVFactor, kKLimit, kVLimit, kKeyFields };
// backward_fp32.py holds the same fields in the same order.  `rows` are those of QueryField.
struct BwdFp32Params : BwdRowsParams<float, float> {
  // (entries, padded rows, 2, kDim) of Q, dO, K and V: high parts of a row, then low parts; or as
  // kEightRowsBytes says.
  uint16 *q_pairs, *dout_pairs, *k_pairs, *v_pairs;
  float* key_rows;  // those of KeyField
  int entries;      // of the batch
  int key_entry_rows;
};
static_assert(sizeof(BwdFp32Params) == FA_BWD_FP32_BYTES, "backward_fp32.py holds the same struct");

// Pairs for wgmma: of eight rows, high parts and then low parts, each a swizzled atom for every 64
// columns (ptx/wgmma.cuh).  Any number of such rows are a tile in shared memory, and one bulk copy.
constexpr uint32 kSwizzleBytes = 1024;  // of an atom
constexpr uint32 kPartBytes = (kDim + 63) / 64 * kSwizzleBytes, kEightRowsBytes = 2 * kPartBytes;

// From one field to the next.
FA_DEVICE int64 query_fields_step(const BwdFp32Params& params) {
  return static_cast<int64>(params.entries) * params.entry_rows;
}
FA_DEVICE int64 key_fields_step(const BwdFp32Params& params) {
  return static_cast<int64>(params.entries / params.group) * params.key_entry_rows;
}

// Among all queries, or all keys, those of an entry begin here; entries of keys are shared.
template <bool kKeys>
FA_DEVICE int64 first_row_of(const BwdFp32Params& params, uint32 entry) {
  if constexpr (kKeys) return static_cast<int64>(entry / params.group) * params.key_entry_rows;
  return static_cast<int64>(entry) * params.entry_rows;
}

// What is known of a query, for rows by hand.
struct KnownRow {
  float shift, factor, delta;
};
FA_DEVICE KnownRow known_row(const BwdFp32Params& params, uint32 entry, int query) {
  const float* from = params.rows + first_row_of<false>(params, entry) + query;
  const int64 step = query_fields_step(params);
  return {from[kShift * step], from[kFactor * step], from[kDelta * step]};
}
