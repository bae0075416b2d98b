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
  kQueryFields,                     // of what kernels copy to shared memory
  kExactDifference = kQueryFields,  // see exact_difference: a number in two parts
  kExactRest
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

// What is known of a query.
struct KnownRow {
  float shift, factor, delta;
};
FA_DEVICE KnownRow known_row(const BwdFp32Params& params, uint32 entry, int query) {
  const float* from = params.rows + first_row_of<false>(params, entry) + query;
  const int64 step = query_fields_step(params);
  return {from[kShift * step], from[kFactor * step], from[kDelta * step]};
}

// From this log-sum-exp on, rows are far.  Below, its rounding changes weights by 2^-20 at most.
constexpr float kFarFp32 = 32.0f;
// A score that is this far below the LSE has a weight of 0 in float32.
constexpr float kNoWeight = 104.0f;

// What is known of a query, for rows by hand, and where it is.
struct RowByHand : KnownRow {
  const BwdFp32Params& params;
  const WorkTile& work;
  uint32 entry;
  int query;
};
FA_DEVICE RowByHand row_by_hand(const BwdFp32Params& params, const WorkTile& work, uint32 entry,
                                int query) {
  return {known_row(params, entry, query), params, work, entry, query};
}

// What is to be added to a row's shift, by a warp: for one that is a largest score the difference
// to the exact one, for a log-sum-exp likewise.  One that is far from it is that of more keys, and
// stays.
FA_DEVICE double find_exact_difference(const RowByHand& row, bool of_largest_score) {
  const BwdFp32Params& params = row.params;
  const auto& band = band_of(params.common, row.work);
  double most = load_sink_fp64(params.common, row.entry, row.query);
  double sum = most == -FA_INFINITY ? 0.0 : 1.0;
  const int end = last_key(band, row.query);
#pragma unroll 1
  for (int key = first_key(band, row.query); key <= end; ++key) {
    const double score = pair_score(params, row.entry, row.query, key).score;
    if (!(score > -FA_INFINITY)) continue;
    const double larger = fmax(most, score);
    sum = sum * exp_fp64(fmax(most - larger, -700.0)) + exp_fp64(fmax(score - larger, -700.0));
    most = larger;
  }
  if (of_largest_score) return most - row.shift;
  const double difference = most + log(sum) - row.shift;
  return fabs(difference) < 1.0 + fabs(row.shift) / 1024.0 ? difference : 0.0;
}

// What is to be added to a far row's shift, in two parts: one would be too coarse where products
// are large.  It is found when it is wanted first, and warps that want it at the same time find and
// write the same number.  Until then both parts are NaN, or infinite if the shift is a largest
// score.  A warp may read one part before it is written and the other one after.  The part that is
// not written yet then says what the shift is, and the warp finds the difference itself.  Lanes
// take what one of them reads: all of them look for the difference, or none does.
FA_DEVICE double exact_difference(const RowByHand& row) {
  const int64 step = query_fields_step(row.params);
  float* known = row.params.rows + first_row_of<false>(row.params, row.entry) + row.query +
                 kExactDifference * step;
  const float high = __shfl_sync(kFullWarp, known[0], 0);
  const float low = __shfl_sync(kFullWarp, known[step], 0);
  if (fabsf(high) < FA_INFINITY && fabsf(low) < FA_INFINITY) return static_cast<double>(high) + low;
  const bool of_largest_score = high == FA_INFINITY || low == FA_INFINITY;
  const double difference = find_exact_difference(row, of_largest_score);
  if (threadIdx.x % 32 == 0) {
    const float first = static_cast<float>(difference);
    known[0] = first;
    known[step] = static_cast<float>(difference - first);
  }
  return difference;
}

// The weight of an exact score.  What replaces a far LSE is too coarse for that: it is the largest
// of rounded scores, each of which may be off by 2^-22 of it and more.
FA_DEVICE double weight_fp64(const RowByHand& row, double score) {
  const float size = fabsf(row.shift);
  double shift = row.shift;
  const bool counts = score > shift - kNoWeight - size / 64.0f;
  if (counts && size >= kFarFp32 && size < FA_INFINITY) shift += exact_difference(row);
  return row.factor * exp_of_difference_fp64(score - shift);
}
