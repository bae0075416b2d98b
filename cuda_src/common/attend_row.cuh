// The slow path: one row of attention by itself, in float64.
//
// Two kinds of rows take it once the fast path has finished.  A row whose output is not all finite:
// a hidden key has weight 0, but 0 * NaN and 0 * inf are NaN inside a matrix product, so NaN or inf
// in the value row of a hidden key would reach the output.  And a row whose scores are so large
// that float32 does not carry the fast path's arithmetic (`outgrown`).  Nothing that the fast path
// has found of the row is used: its products are sums in another order, and of scores of 1e8 they
// differ by whole powers of e.
#pragma once
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/scores.cuh"
#include "cuda_src/common/softmax.cuh"

// Whether a finished row has to be computed again, whatever its output looks like.
//
// With exact products (softmax.cuh) a row's weights share a factor of up to 2 to half a unit of its
// reference: from kCoarse on that may be more than 2, and no 16-bit type holds them for long.
// Scores that went through one_score are references themselves; only the ends of float32 matter to
// these.  There a row may also look as if it had seen no key: all its scores were too low.  Without
// mask and bias it is told apart by its band; with one of them it counts as having seen none.
template <bool kExactProducts, bool kMasked>
FA_DEVICE bool outgrown(const AttentionParams& p, int row, float reference, float sum) {
  if (fabsf(reference) < kCoarse) return false;
  if (reference == kNoReference && !(sum > 0.0f)) {
    return !kMasked && sum == 0.0f && p.bias == nullptr && first_key(p, row) <= last_key(p, row);
  }
  return (kExactProducts && !p.transform) || fabsf(reference) >= -kNoReference;
}

// Calls attend(key) for each key that a row may see by its band and by the mask's lists, as a whole
// warp.
template <typename Attend>
FA_DEVICE void for_listed_keys(const AttentionParams& p, int64 batch, int row,
                               const Attend& attend) {
  const int64 t = row_of_blocks(p.mask, batch, row, p.q_len);
  const ListedBlocks listed = listed_blocks(p.mask, t);
  const int low = first_key(p, row), high = last_key(p, row);
#pragma unroll 1
  for (int partial = 0; partial < 2; ++partial) {
    const int* blocks = partial ? p.mask.partial : p.mask.full;
    const int64 end = partial ? listed.partial_end : listed.full_end;
#pragma unroll 1
    for (int64 place = partial ? listed.partial_begin : listed.full_begin; place < end; ++place) {
      const int block = blocks[place], first = block * kMaskBlock;
      const uint32* words = partial ? block_words(p.mask, t, place, block) : nullptr;
#pragma unroll 1
      for (int key = max(low, first); key <= min(high, first + kMaskBlock - 1); ++key) {
        if (!partial || block_bit(words, row % kMaskBlock, key - first)) attend(key);
      }
    }
  }
}

// q . k, all of it in every lane.
template <bool kBf16>
FA_DEVICE double exact_product(const uint16* q, const uint16* k, int dim) {
  double product = 0.0;
#pragma unroll 1
  for (int d = threadIdx.x % 32; d < dim; d += 32) {
    product += static_cast<double>(to_float<kBf16>(q[d])) * to_float<kBf16>(k[d]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) product += __shfl_xor_sync(kFullWarp, product, step);
  return product;
}

// e to the power of a difference of scores.
FA_DEVICE float weight_of(double difference) {
  return ex2_approx_ftz(static_cast<float>(difference * kLog2eDouble));
}

// One warp computes one row of a batch entry (counted over all batch axes, which only a mask asks
// for), leaving out every key whose score is exactly -inf.  What comes out is handed to `write`
// column by column, and its log-sum-exp is returned.
template <bool kBf16, int kDim, bool kMasked, typename Write>
FA_DEVICE float attend_row(const AttentionParams& p, const BatchOffsets& at, int64 batch, int row,
                           const Write& write) {
  const int lane = threadIdx.x % 32;
  const uint16* q = static_cast<const uint16*>(p.q) + at.q + static_cast<int64>(row) * p.q_row;
  // In float64 no sum of weighted values overflows before it is divided by the sum of the weights.
  double acc[kDim / 32], sum = 0.0, top = -FA_INFINITY;
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) acc[i] = 0.0;
  const auto attend = [&](int col) {
    const uint16* k = static_cast<const uint16*>(p.k) + at.k + static_cast<int64>(col) * p.k_row;
    const double score = exact_score(p, at, exact_product<kBf16>(q, k, p.head_dim), row, col);
    if (score == -FA_INFINITY) return;
    if (score > top) {
      const double correction = weight_of(top - score);
      top = score;
      sum *= correction;
#pragma unroll
      for (int i = 0; i < kDim / 32; ++i) acc[i] *= correction;
    }
    const double weight = weight_of(score - top);
    sum += weight;
    const uint16* v = static_cast<const uint16*>(p.v) + at.v + static_cast<int64>(col) * p.v_row;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      if (lane + 32 * i < p.v_dim) acc[i] += weight * to_float<kBf16>(v[lane + 32 * i]);
    }
  };
  if constexpr (kMasked) {
    for_listed_keys(p, batch, row, attend);
  } else {
    const int high = last_key(p, row);
#pragma unroll 1
    for (int col = first_key(p, row); col <= high; ++col) attend(col);
  }
  const float total = static_cast<float>(sum);
  const double inverse = inverse_sum(total);
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    const uint32 x = pack2<kBf16>(static_cast<float>(acc[i] * inverse), 0.0f);
    if (lane + 32 * i < p.v_dim) write(lane + 32 * i, static_cast<uint16>(x));
  }
  if (total == 0.0f) return -FA_INFINITY;
  const double lse = top + kLn2 * lg2_approx_ftz(total);
  // An infinite one would say that the row has seen no key.
  if (fabs(lse) > -kNoReference) return lse < 0.0 ? kNoReference : -kNoReference;
  return static_cast<float>(lse);
}
