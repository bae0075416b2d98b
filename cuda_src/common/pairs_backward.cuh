// What the kernels of gradients over single pairs share: parameters, and the scores of pairs.
//
// bwd_dq_pairs goes over the pairs of each query, and bwd_dkdv_pairs over those of each key in the
// transposed list.  A weight is exp2(score - offset) * factor.  The first kernel writes both
// numbers of each query for the second one, with delta = dout . out - dlse: the offset is the LSE
// and the factor 1, unless the LSE is too large to compute weights from (large_lse.cuh).  Then the
// offset is the largest score and the factor 1 / (the sum of exponentials).
#pragma once
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/large_lse.cuh"
#include "cuda_src/common/pairs.cuh"
#include "cuda_src/common/score.cuh"

constexpr int kAxes = 3;  // of the batch

struct PairArray {
  void* start;
  int64 row, batch[kAxes];  // strides, in elements; 0 along an axis that broadcasts
};

// Which batch entries are added up to which gradients of numbers of pairs: axes of the batch that
// are kept, by what is written and by entries, and axes that are summed over.
struct PairSums {
  PairAxes kept, kept_entries, summed_entries;
  int64 kept_count, summed_count;
};

// ``pair_gradients.py`` holds the same fields in the same order.
struct BwdPairsParams {
  AttentionParams common;  // without arrays but the bias
  PairArray q, k, v, out, dout, dq, dk, dv;
  PairRows list;            // by queries or by keys
  const float *lse, *dlse;  // (*batch, q_len) dense; dlse is null for zeros
  float4* row_statistics;   // (*batch, q_len): offset, factor, delta
  float* partials;          // (pieces of all entries, 1 or 2, kDim)
  const float* pair_bias;   // as of fwd_pairs
  PairAxes bias_axes;
  float* pair_ds;        // (*batch, pairs): gradients of the scores of pairs; null if unwanted
  float* pair_dbias;     // what they are added up to
  PairSums dbias;        // and how
  int64 entries, pairs;  // of the batch; of the list
  int size[kAxes];       // of the batch
  int group;             // how many entries, along the last axis, share keys and values
  int phase;             // a Phase
  int aligned;           // every row of the arrays starts at a multiple of 16 bytes
};
static_assert(sizeof(BwdPairsParams) == FA_BWD_PAIRS_BYTES, "fa_cupy/gpu holds the same struct");

enum Phase : int { kRows = 0, kMerge = 1, kSumBias = 2 };

constexpr int kMinBlocks = 4;  // on a multiprocessor: up to 128 registers a thread

// Where a row of a batch entry begins, in elements.
FA_DEVICE int64 row_offset(const BwdPairsParams& params, const PairArray& array, int64 entry,
                           int row) {
  int64 found = row * array.row;
#pragma unroll
  for (int axis = kAxes - 1; axis > 0; --axis) {
    const int64 next = divide(entry, static_cast<int64>(params.size[axis]));
    found += (entry - next * params.size[axis]) * array.batch[axis];
    entry = next;
  }
  return found + entry * array.batch[0];
}

FA_DEVICE VectorBits load_row(const BwdPairsParams& params, const PairArray& array, int64 offset,
                              int cols) {
  return load_vector(array.start, offset, cols, params.aligned);
}

// What is known of a pair's score before its weight: in units of log2, -inf if it is hidden.
FA_DEVICE ScoreAndSlope<float> pair_score(const BwdPairsParams& params, const BatchOffsets& at,
                                          const float* pair_bias, float product, int query, int key,
                                          int64 place) {
  const AttentionParams& p = params.common;
  const ScoreAndSlope<float> found = score_and_slope_from_product(p, at, product, query, key);
  if (pair_bias == nullptr) return {scale_score(found.score, p.exp2_scale), found.slope};
  const float natural = kScoreMod ? found.score : p.scale * found.score;
  return {__fmul_rz(natural + pair_bias[place], kLog2e), found.slope};
}

// Adds up the slots of a warp, lane by lane.
FA_DEVICE void add_slots(float (&x)[kParts][kVector]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[part][i] = sum_over_slots(x[part][i]);
  }
}

FA_DEVICE void scale_vector(float (&x)[kParts][kVector], float factor) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[part][i] *= factor;
  }
}

// x += the sums of a piece.
FA_DEVICE void add_piece(float (&x)[kParts][kVector], const float* from) {
  const Vector other = load_sums(from);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[part][i] += other.x[part][i];
  }
}
