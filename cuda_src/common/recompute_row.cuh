// The slow path: one row of attention by itself, key by key.
//
// Two kinds of rows take it once the fast path has finished.  A row whose output is not all finite:
// a hidden key has weight 0, but 0 * NaN and 0 * inf are NaN inside a matrix product, so NaN or inf
// in the value row of a hidden key would reach the output.  And a row whose scores are so large
// that float32 does not carry the fast path's arithmetic (`exceeds_float32_scores`).
#pragma once
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/sinks.cuh"
#include "cuda_src/common/softmax.cuh"

// Whether a finished row has to be computed again, whatever its output looks like.
//
// With exact products (softmax.cuh) the weights of a row share a factor, 2 to the power of up to
// half a unit of its row_max.  From kCoarseScore on it may be more than 2, and a few powers of
// two further no 16-bit type holds the weights.  Scores that went through score_from_product are
// on the scale of row_max; to these only the ends of float32 matter.  There a row may also look as
// if it had seen no key: all its scores were too low.  Without mask and bias its band tells whether
// it has seen one; with either it counts as having seen none.
template <bool kExactProducts, bool kMasked, typename Band>
FA_DEVICE bool exceeds_float32_scores(const AttentionParams& p, const Band& band, int row,
                                      float row_max, float row_sum) {
  if (fabsf(row_max) < kCoarseScore) return false;
  if (row_max == kNoMax && !(row_sum > 0.0f)) {
    return !kMasked && row_sum == 0.0f && !kExpression && p.bias == nullptr &&
           first_key(band, row) <= last_key(band, row);
  }
  return kExactProducts || fabsf(row_max) >= -kNoMax;
}
template <bool kExactProducts, bool kMasked>
FA_DEVICE bool exceeds_float32_scores(const AttentionParams& p, int row, float row_max,
                                      float row_sum) {
  return exceeds_float32_scores<kExactProducts, kMasked>(p, p, row, row_max, row_sum);
}

// Where the keys and values of a batch entry are, and its band: here rows at equal distances.
template <typename T, typename Band = AttentionParams>
struct DenseKeysOf {
  using Element = T;
  const AttentionParams& p;
  const BatchOffsets& offsets;
  const Band& own_band;

  __device__ __forceinline__ const Band& band() const { return own_band; }
  __device__ __forceinline__ const T* k(int key) const {
    return static_cast<const T*>(p.k) + offsets.k + static_cast<int64>(key) * p.k_row;
  }
  __device__ __forceinline__ const T* v(int key) const {
    return static_cast<const T*>(p.v) + offsets.v + static_cast<int64>(key) * p.v_row;
  }
};
using DenseKeys = DenseKeysOf<uint16>;
template <typename T, typename Band>
FA_DEVICE DenseKeysOf<T, Band> dense_keys(const AttentionParams& p, const BatchOffsets& offsets,
                                          const Band& band) {
  return {p, offsets, band};
}

// Calls attend(key) for each key that a row may see by its band and by the mask's lists, as a whole
// warp, until it says false.
template <typename VisitKey>
FA_DEVICE void for_each_listed_key(const AttentionParams& p, int64 batch, int row,
                                   const VisitKey& visit_key) {
  const int64 t = row_of_blocks(p.mask, batch, row, p.q_len);
  const ListedBlocks listed = listed_blocks(p.mask, t);
  const int low = first_key(p, row), high = last_key(p, row);
#pragma unroll 1
  for (int partial = 0; partial < 2; ++partial) {
    const int* blocks = partial ? p.mask.partial : p.mask.full;
    const int64 end = partial ? listed.partial_end : listed.full_end;
#pragma unroll 1
    for (int64 position = partial ? listed.partial_begin : listed.full_begin; position < end;
         ++position) {
      const int block = blocks[position], first = block * kMaskBlock;
      const uint32* words = partial ? block_words(p.mask, t, position, block) : nullptr;
#pragma unroll 1
      for (int key = max(low, first); key <= min(high, first + kMaskBlock - 1); ++key) {
        const bool is_visible = !partial || block_bit(words, row % kMaskBlock, key - first);
        if (is_visible && !visit_key(key)) return;
      }
    }
  }
}

// The same without lists, if there is no mask.
template <bool kMasked, typename Keys, typename VisitKey>
FA_DEVICE void for_each_key(const AttentionParams& p, const Keys& keys, int64 batch, int row,
                            const VisitKey& visit_key) {
  if constexpr (kMasked) {
    for_each_listed_key(p, batch, row, visit_key);
  } else {
    const int high = last_key(keys.band(), row);
#pragma unroll 1
    for (int key = first_key(keys.band(), row); key <= high; ++key) {
      if (!visit_key(key)) return;
    }
  }
}

// q . k of a row and a key, all of it in every lane.
template <bool kBf16, typename Accumulator, typename Keys>
FA_DEVICE Accumulator dot_qk(const AttentionParams& p, const BatchOffsets& offsets,
                             const Keys& keys, int row, int key) {
  using Element = typename Keys::Element;
  const Element* q =
      static_cast<const Element*>(p.q) + offsets.q + static_cast<int64>(row) * p.q_row;
  const Element* k = keys.k(key);
  Accumulator product = 0;
#pragma unroll 1
  for (int d = threadIdx.x % 32; d < p.head_dim; d += 32) {
    product += static_cast<Accumulator>(to_float<kBf16>(q[d])) * to_float<kBf16>(k[d]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) product += __shfl_xor_sync(kFullWarp, product, step);
  return product;
}

// acc += weight * v: a lane has every 32nd column.
template <bool kBf16, int kCols, typename Accumulator, typename Keys>
FA_DEVICE void add_weighted_value(const AttentionParams& p, const Keys& keys, int key,
                                  Accumulator weight, Accumulator (&acc)[kCols]) {
  const int lane = threadIdx.x % 32;
  const typename Keys::Element* v = keys.v(key);
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    if (lane + 32 * i < p.v_dim) acc[i] += weight * to_float<kBf16>(v[lane + 32 * i]);
  }
}

// The output of a row whose row_max and row_sum are known.
template <bool kBf16, bool kMasked, int kCols, typename Keys>
FA_DEVICE void recompute_row_f32(const AttentionParams& p, const BatchOffsets& offsets,
                                 const Keys& keys, int64 batch, int row, float row_max,
                                 float row_sum, float (&acc)[kCols]) {
  // Weights are normalised before they meet the values: where values are near the end of the range
  // only their sum weighted by more than 1 in all was infinite.
  float inverse = inverse_sum(row_sum);
#if FA_DROPOUT
  inverse *= p.dropout.factor;
  const DropoutEntry entry = dropout_entry(p.dropout, batch);
#endif
  for_each_key<kMasked>(p, keys, batch, row, [&](int key) {
    const float score =
        score_from_product(p, offsets, dot_qk<kBf16, float>(p, offsets, keys, row, key), row, key);
    if (score == -FA_INFINITY) return true;
#if FA_DROPOUT
    if (!is_kept(p.dropout, entry, row, key)) return true;
#endif
    const float weight = ex2_approx_ftz(fmaf(score, p.exp2_scale, -row_max));
    add_weighted_value<kBf16>(p, keys, key,
                              inverse * rounded<kBf16, typename Keys::Element>(weight), acc);
    return true;
  });
}

// e to the power of a difference of scores.
FA_DEVICE float exp_of_difference(double difference) {
  return ex2_approx_ftz(static_cast<float>(difference * kLog2eDouble));
}

// The output of a row of scores of any size; returns its log-sum-exp.  Products are exact in
// float64.  The row_max and the row_sum that the fast path has found are of no use: its products
// are sums in another order, and of scores of 1e8 two such sums differ by whole powers of e.
template <bool kBf16, bool kMasked, int kCols, typename Keys>
FA_DEVICE float recompute_row_f64(const AttentionParams& p, const BatchOffsets& offsets,
                                  const Keys& keys, int64 batch, int row, float (&out)[kCols]) {
  double acc[kCols], row_sum = 0.0, row_max = -FA_INFINITY;
#pragma unroll
  for (double& x : acc) x = 0.0;
  float factor = 1.0f;  // of what dropout keeps
#if FA_DROPOUT
  const DropoutEntry entry = dropout_entry(p.dropout, batch);
  factor = p.dropout.factor;
#endif
  const double sink = load_sink(p, batch, row);
  if (sink != -FA_INFINITY) {
    row_max = sink;
    row_sum = sink - sink + 1.0;  // NaN of a sink that is NaN or +inf
  }
  for_each_key<kMasked>(p, keys, batch, row, [&](int key) {
    const double score = score_from_product_f64(
        p, offsets, dot_qk<kBf16, double>(p, offsets, keys, row, key), row, key);
    if (score == -FA_INFINITY) return true;
    if (!(score < FA_INFINITY)) {  // all of the row is NaN
      row_sum = score - score;
      return false;
    }
    if (score > row_max) {
      const double correction = exp_of_difference(row_max - score);
      row_max = score;
      row_sum *= correction;
#pragma unroll
      for (double& x : acc) x *= correction;
    }
    const double weight = exp_of_difference(score - row_max);
    row_sum += weight;
#if FA_DROPOUT
    if (!is_kept(p.dropout, entry, row, key)) return true;
#endif
    add_weighted_value<kBf16>(p, keys, key, weight, acc);
    return true;
  });
  const float total_sum = static_cast<float>(row_sum);
#pragma unroll
  for (int i = 0; i < kCols; ++i)
    out[i] = static_cast<float>(acc[i] * (factor * inverse_sum(total_sum)));
  if (total_sum == 0.0f) return -FA_INFINITY;
  const double lse = row_max + kLn2 * lg2_approx_ftz(total_sum);
  // An infinite one would say that the row has seen no key.
  if (fabs(lse) > -kNoMax) return lse < 0.0 ? kNoMax : -kNoMax;
  return static_cast<float>(lse);
}

// Hands a lane's columns of an output to `write`.
template <bool kBf16, typename Element, int kCols, typename Write>
FA_DEVICE void write_row(const AttentionParams& p, const float (&out)[kCols], const Write& write) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    if (lane + 32 * i < p.v_dim) write(lane + 32 * i, to_element<kBf16, Element>(out[i]));
  }
}

// One warp computes one row of a batch entry (counted over all batch axes), leaving out every key
// whose score is exactly -inf.  What comes out is handed to `write` column by column; its
// log-sum-exp is stored.
template <bool kBf16, int kDim, bool kMasked, typename Keys, typename Write>
FA_DEVICE void recompute_row(const AttentionParams& p, const BatchOffsets& offsets,
                             const Keys& keys, int64 batch, int row, const Write& write) {
  float out[kDim / 32];
  const float lse = recompute_row_f64<kBf16, kMasked>(p, offsets, keys, batch, row, out);
  if (p.lse != nullptr && threadIdx.x % 32 == 0) p.lse[batch * p.q_len + row] = lse;
  write_row<kBf16, typename Keys::Element>(p, out, write);
}

// The same where float64 may be slow: a row whose row_max is not large is computed in float32, with
// the row_max and the row_sum that the fast path has found, and keeps its log-sum-exp.  A sum that
// is not finite is of no use: a row_max that was large at first may have made it so.
template <bool kBf16, int kDim, bool kMasked, typename Keys, typename Write>
FA_DEVICE void recompute_row(const AttentionParams& p, const BatchOffsets& offsets,
                             const Keys& keys, int64 batch, int row, float row_max, float row_sum,
                             const Write& write) {
  if (fabsf(row_max) >= kLargeScore || row_sum * 0.0f != 0.0f) {
    return recompute_row<kBf16, kDim, kMasked>(p, offsets, keys, batch, row, write);
  }
  float out[kDim / 32];
#pragma unroll
  for (float& x : out) x = 0.0f;
  recompute_row_f32<kBf16, kMasked>(p, offsets, keys, batch, row, row_max, row_sum, out);
  write_row<kBf16, typename Keys::Element>(p, out, write);
}
