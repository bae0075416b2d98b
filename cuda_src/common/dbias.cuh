// What the kernels for the gradient of a bias share: which batch entries share an element, weights
// of rows with a large LSE, and how sums are rounded and stored.
//
// `Params` has the sizes of the batch axes and the strides of the gradient, in elements: 0 along an
// axis that is summed over.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/large_lse.cuh"
#include "cuda_src/common/score.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"

constexpr int kDbiasAxes = 3;  // of the batch

// In place of the weight of a hidden pair.
constexpr float kHiddenWeight = -1.0f;

// A batch entry, given its number along the axes that the gradient has and along the others.
template <typename Params>
FA_DEVICE uint32 entry_of(const Params& params, uint32 own, uint32 other) {
  uint32 entry = 0, step = 1;
#pragma unroll
  for (int axis = kDbiasAxes - 1; axis >= 0; --axis) {
    const bool is_summed = params.dbias_batch[axis] == 0;
    const uint32 size = params.size[axis], from = is_summed ? other : own, rest = from / size;
    entry += (from - rest * size) * step;
    step *= size;
    other = is_summed ? rest : other;
    own = is_summed ? own : rest;
  }
  return entry;
}

// Where the gradient of an entry begins, in elements.
template <typename Params>
FA_DEVICE int64 dbias_offset(const Params& params, uint32 entry) {
  int64 offset = 0;
#pragma unroll
  for (int axis = kDbiasAxes - 1; axis >= 0; --axis) {
    const uint32 size = params.size[axis];
    offset += entry % size * params.dbias_batch[axis];
    entry /= size;
  }
  return offset;
}

// Where 16 bytes of a row of a tile in shared memory are.
template <typename Tile>
struct TileChunks {
  uint32 tile;

  __device__ __forceinline__ uint32 operator()(int row, int chunk) const {
    return tile + Tile::offset(row, chunk);
  }
};

// A product of a query and a key, rows of tiles in shared memory, added up in the order of
// bwd_nonfinite: the largest of such products, which it leaves, is then the same bit for bit.
template <bool kBf16, int kDim, typename QueryChunks, typename KeyChunks>
FA_DEVICE float product_in_order(QueryChunks queries, KeyChunks keys, int row, int col) {
  float sum = 0.0f;
#pragma unroll 1
  for (int chunk = 0; chunk < kDim / 8; ++chunk) {
    uint32 q[4], k[4];
    ld_shared_v4_b32(q, queries(row, chunk));
    ld_shared_v4_b32(k, keys(col, chunk));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint16 x = static_cast<uint16>(q[i / 2] >> i % 2 * 16);
      const uint16 y = static_cast<uint16>(k[i / 2] >> i % 2 * 16);
      sum = fmaf(to_float<kBf16>(x), to_float<kBf16>(y), sum);
    }
  }
  return sum;
}

// Puts the weights of queries with a large LSE in their places, given the row and the column of the
// tiles where a warp's pairs begin, and bit 2 i + h of `is_large` for row 16 i + 8 h of a thread.
// Rolled up, because it is rarely run; registers have no index, so each weight is offered to all of
// them.
template <bool kBf16, int kDim, typename QueryChunks, typename KeyChunks, typename Params,
          int kMmaM, int kMmaN>
FA_DEVICE void replace_large_weights(const Params& params, QueryChunks queries, KeyChunks keys,
                                     uint32 entry, int first_query, int first_key, int warp_row,
                                     int warp_col, uint32 is_large,
                                     float (&weights)[kMmaM][kMmaN][4]) {
  const AttentionParams& p = params.common;
  const BatchOffsets at = batch_offsets(p, entry);
  const float2* statistics =
      params.row_statistics + 2 * static_cast<int64>(entry) * params.row_pairs;
  const int lane = tid_x_again() % 32;
  constexpr int kPairs = kMmaM * kMmaN * 4;
#pragma unroll 1
  for (int n = 0; n < kPairs; ++n) {
    const int i = n / (4 * kMmaN), j = n / 4 % kMmaN, e = n % 4;
    const int row = warp_row + 16 * i + 8 * (e / 2) + lane / 4;
    const int col = warp_col + 8 * j + lane % 4 * 2 + e % 2;
    const int query = first_query + row, key = first_key + col;
    const bool is_own = (is_large >> (2 * i + e / 2) & 1) != 0 && key < p.k_len;
    float weight = 0.0f;
    if (is_own) {
      const float2 of = statistics[query];
      const float product = product_in_order<kBf16, kDim>(queries, keys, row, col);
      const float score = score_from_product(p, at, product, query, key);
      weight = ex2_approx_ftz(scale_score(score, p.exp2_scale) - of.x) * of.y;
    }
#pragma unroll
    for (int m = 0; m < kPairs; ++m) {
      float& of_pair = weights[m / (4 * kMmaN)][m / 4 % kMmaN][m % 4];
      of_pair = m == n && is_own && of_pair != kHiddenWeight ? weight : of_pair;
    }
  }
}

// Rounds to the type of the bias.
template <typename Real>
FA_DEVICE void store_rounded(void* base, int64 index, Real x) {
  if constexpr (kBiasIs16Bit) {
    const float rounded = static_cast<float>(x);
    static_cast<uint16*>(base)[index] =
        static_cast<uint16>(pack2<kBiasKind == kBfloat16>(rounded, 0.0f));
  } else if constexpr (kBiasKind == kFloat64) {
    static_cast<double*>(base)[index] = x;
  } else {
    static_cast<float*>(base)[index] = static_cast<float>(x);
  }
}
// Of two elements next to each other, at a multiple of the bytes of both.
template <typename Real>
FA_DEVICE void store_rounded_pair(void* base, int64 index, Real low, Real high) {
  if constexpr (kBiasKind == kFloat64) {
    *reinterpret_cast<double2*>(static_cast<double*>(base) + index) = make_double2(low, high);
  } else {
    const float x = static_cast<float>(low), y = static_cast<float>(high);
    if constexpr (kBiasIs16Bit) {
      *reinterpret_cast<uint32*>(static_cast<uint16*>(base) + index) =
          pack2<kBiasKind == kBfloat16>(x, y);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(base) + index) = make_float2(x, y);
    }
  }
}

// Stores the pairs that a thread holds, from a query and a key on, of the gradient that begins at
// `start`.
template <typename Params, typename Real, int kMmaM, int kMmaN>
FA_DEVICE void store_pairs(const Params& params, int64 start, int first_query, int first_key,
                           const Real (&x)[kMmaM][kMmaN][4]) {
  const AttentionParams& p = params.common;
  constexpr int kBytes = kBiasIs16Bit ? 2 : kBiasKind == kFloat64 ? 8 : 4;
  const uint64 address = reinterpret_cast<uint64>(params.dbias) + start * kBytes;
  const bool pairs =
      params.dbias_col == 1 && params.dbias_row % 2 == 0 && address % (2 * kBytes) == 0;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = first_query + 16 * i + 8 * h;
      if (query >= p.q_len) continue;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        const int key = first_key + 8 * j;
        const int64 at = start + query * params.dbias_row + key * params.dbias_col;
        const Real low = x[i][j][2 * h], high = x[i][j][2 * h + 1];
        if (pairs && key + 1 < p.k_len) {
          store_rounded_pair(params.dbias, at, low, high);
        } else {
          if (key < p.k_len) store_rounded(params.dbias, at, low);
          if (key + 1 < p.k_len) store_rounded(params.dbias, at + params.dbias_col, high);
        }
      }
    }
  }
}
