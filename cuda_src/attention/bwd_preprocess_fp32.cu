// What attention backward in float32 knows before it begins: rows of Q, dO, K and V as pairs of
// float16, dense and padded, and what is known of each query and each key.
//
// A warp takes one query or one key.  Those that do not exist are rows of zeros.  Queries that do
// not exist, or that see no key, have weights of 0.
#include "cuda_src/common/backward_rows_fp32.cuh"
#include "cuda_src/common/split_float.cuh"

constexpr bool kSwizzled = FA_SWIZZLED;  // pairs are for wgmma
static_assert(!kSwizzled || kDim % 64 == 0, "atoms are whole");

// Where a row begins among the pairs of an array; and of two of its columns the place behind that,
// of high parts, and how far behind these the low parts are.
FA_DEVICE uint16* pairs_of_row(uint16* pairs, int64 row) {
  if constexpr (!kSwizzled) return pairs + row * (2 * kDim);
  return pairs + (row / 8 * kEightRowsBytes + row % 8 * 128) / 2;
}
FA_DEVICE int place_in_row(int col, int64 row) {
  if constexpr (!kSwizzled) return col;
  const int chunk = col / 8 % 8 ^ static_cast<int>(row % 8);  // as in shared_tile.cuh
  return (col / 64 * kSwizzleBytes + (chunk << 4)) / 2 + col % 8;
}
constexpr int kToLow = kSwizzled ? kPartBytes / 2 : kDim;

// Splits `cols` columns of a row, the rest of which becomes zero, as does all of one that does not
// exist.  Returns what its pairs are to be multiplied by twice: 0 of a row of zeros.
FA_DEVICE float split_whole_row(const float* from, int cols, bool exists, uint16* pairs,
                                int64 row) {
  uint16* to = pairs_of_row(pairs, row);
  constexpr int kTurns = (kDim + 63) / 64;
  const int lane = threadIdx.x % 32;
  if (!exists) cols = 0;
  float x[kTurns][2], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int col = 64 * i + 2 * lane + e;
      x[i][e] = col < cols ? from[col] : 0.0f;
      if (fabsf(x[i][e]) <= kLargest) largest = fmaxf(largest, fabsf(x[i][e]));
    }
  }
  largest = __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(largest)));
  const int exponent = split_exponent(largest);
  const float scale = power_of_two(exponent);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int col = 64 * i + 2 * lane;
    if (col >= kDim) continue;
    const SplitPair pair = split(x[i][0] * scale, x[i][1] * scale);
    const int place = place_in_row(col, row);
    *reinterpret_cast<uint32*>(to + place) = pair.high;
    *reinterpret_cast<uint32*>(to + kToLow + place) = pair.low;
  }
  return largest == 0.0f ? 0.0f : power_of_two(-exponent / 2);
}

// What a warp knows of the entry of its row.
struct Entry {
#if FA_LENGTHS
  KeyBand band;
#endif
};
FA_DEVICE Entry entry_of(const AttentionParams& p, uint32 number) {
  Entry entry;
  find_band(p, entry, number);
  return entry;
}

FA_DEVICE void prepare_query(const BwdFp32Params& params, int64 index) {
  const AttentionParams& p = params.common;
  const uint32 entry = static_cast<uint32>(index / params.entry_rows);
  const int query = static_cast<int>(index - static_cast<int64>(entry) * params.entry_rows);
  const bool exists = query < p.q_len;
  const float* dout = row_start(params, params.dout, entry, query);
  const float q = split_whole_row(row_start(params, params.q, entry, query), p.head_dim, exists,
                                  params.q_pairs, index);
  const float of_dout = split_whole_row(dout, p.v_dim, exists, params.dout_pairs, index);
  const int64 in_batch = static_cast<int64>(entry) * p.q_len + query;
  float lse =
      exists && !is_invalid_row(p, entry_of(p, entry), query) ? params.lse[in_batch] : -FA_INFINITY;
  float delta = 0.0f;
  if (lse == -FA_INFINITY) {
    lse = FA_INFINITY;
  } else {
    const double product = dot_of_warp(dout, row_start(params, params.out, entry, query), p.v_dim);
    delta = product - (params.dlse == nullptr ? 0.0f : params.dlse[in_batch]);
  }
  if (threadIdx.x % 32 != 0) return;
  // A product is at most 2^30 times the square of two factors, and off by up to 2^-50 of that; it
  // may be by 2^-26 of what it is compared with.
  const bool counts = lse != FA_INFINITY;
  const float of_score = sqrtf(fabsf(p.scale) * 64.0f / fmaxf(1.0f, fabsf(lse)));
  const float of_dp = 8.0f / sqrtf(fabsf(delta));
  const int64 step = query_fields_step(params);
  float* to = params.rows + index;
  to[kShift * step] = lse;
  to[kFactor * step] = 1.0f;
  to[kDelta * step] = delta;
  to[kExactDifference * step] = to[kExactRest * step] = FA_NAN;
  to[kQFactor * step] = q;
  to[kDoutFactor * step] = of_dout;
  to[kQLimit * step] = counts && q > 0.0f ? q * of_score : 0.0f;
  to[kDoutLimit * step] = counts && of_dout > 0.0f && delta == delta ? of_dout * of_dp : 0.0f;
}

FA_DEVICE void prepare_key(const BwdFp32Params& params, int64 index) {
  const AttentionParams& p = params.common;
  const uint32 shared_entry = static_cast<uint32>(index / params.key_entry_rows);
  const uint32 entry = shared_entry * params.group;
  const int key =
      static_cast<int>(index - static_cast<int64>(shared_entry) * params.key_entry_rows);
  const bool exists = key < band_of(p, entry_of(p, entry)).k_len;
  const float k = split_whole_row(row_start(params, params.k, entry, key), p.head_dim, exists,
                                  params.k_pairs, index);
  const float v = split_whole_row(row_start(params, params.v, entry, key), p.v_dim, exists,
                                  params.v_pairs, index);
  if (threadIdx.x % 32 != 0) return;
  const int64 step = key_fields_step(params);
  float* to = params.key_rows + index;
  to[kKFactor * step] = k;
  to[kVFactor * step] = v;
  to[kKLimit * step] = k;
  to[kVLimit * step] = v;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_bwd_preprocess_fp32(const __grid_constant__ BwdFp32Params params) {
  const int64 index = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64 queries = query_fields_step(params);
  if (index < queries) {
    prepare_query(params, index);
  } else if (index - queries < key_fields_step(params)) {
    prepare_key(params, index - queries);
  }
}
