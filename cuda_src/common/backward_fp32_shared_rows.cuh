// Attention backward in float32 by wgmma in dims above 128, where 64 rows' sums of dK and of dV do
// not fit into the registers of one warpgroup: two share rows.
//
// Warpgroup 0 multiplies arrays 0, which makes S and weights P = exp(S - LSE) of it; warpgroup 1
// multiplies arrays 1, which makes dP - delta.  Of dK and dV, warpgroup 0 adds up dV, and hands P
// to warpgroup 1, which makes dS of it and adds up dK.  Of dQ each has half of the columns: both
// hand over what they have, and make the same dS.  A warp and the one four further on have the same
// 16 rows, and a barrier.
#pragma once
#include "cuda_src/common/backward_fp32_sm90.cuh"
#include "ptx/ldmatrix.cuh"

static_assert(kRowGroups == 1 || kConsumers == 8, "two warpgroups share 64 rows");

// Which arrays a warpgroup multiplies.
FA_DEVICE int warp_role() { return tid_x_again() / 128; }

// ---------------------------------------------------------------------------------------- products
// High parts of a warp's rows, as A operands: two of three products read them.
using HighParts = uint32[kHighInRegisters ? kDim / 16 : 1][4];

// Reads them from where the first tile will be, and gives that back.
FA_DEVICE void load_high_parts(const TileStorage& shared, HighParts& high) {
  if constexpr (!kHighInRegisters) return;
  const int role = warp_role(), lane = tid_x_again() % 32, row = warp_row() + lane % 16;
  wait(shared.full[0][0], 0);  // by all who will wait for its next phase
  if (role == 1) wait(shared.full[0][1], 0);
  const uint32 from = cvta_to_shared(shared.other[0][role]) + row / 8 * kPartBytes + row % 8 * 128;
#pragma unroll
  for (int step = 0; step < kDim / 16 && kHighInRegisters; ++step) {
    const int chunk = (step % 4 * 2 + lane / 16) ^ row % 8;  // as in shared_tile.cuh
    ldmatrix_x4(high[step], from + step / 4 * kSwizzleBytes + (chunk << 4));
  }
  release_per_lane(shared.empty[0][0]);
  if (role == 1) release_per_lane(shared.empty[0][1]);
}

// Tensor cores cut sums, most of all those of high parts: none of these has more steps.
constexpr int kLongestSum = 8, kSumCount = (kDim / 16 + kLongestSum - 1) / kLongestSum;
// S or dP, or its transpose, in sums of so many steps: of products of high parts, and behind these
// of low parts of queries, or of dO, with high ones; and one sum of those with low parts of keys or
// values.  What has a low part is 2^11 times too large.
//
// Both kernels are to find the same bits of a score.  So both have these sums, although only that
// of dK and dV gains by them: high parts of keys, read from shared memory, meet both parts of
// queries.
struct Products {
  float sums[kSumCount][2 * kMmaN][4];
  Scores low;
};

// Starts the products of a part of A and one of B, or both, in the columns of some steps.
template <int kPartOfA, int kPartOfB, int kCols>
FA_DEVICE void multiply_steps(float (*x)[4], const HighParts& high, uint64 a, uint64 b, int begin,
                              int end) {
#pragma unroll
  for (int step = begin; step < end && step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of an atom's rows.
    const int column = step / 4 * kSwizzleBytes + step % 4 * 32;
    const uint64 other = wgmma_at(b, column + kPartOfB * kToLow);
    if constexpr (kHighInRegisters && kPartOfA == 0) {
      wgmma_m64k16_rs<false, kCols, kKMajor>(x, high[step], other, step > begin);
    } else {
      const uint64 own = wgmma_at(a, column + (kHighInRegisters ? 0 : kPartOfA * kPartBytes));
      wgmma_m64k16_ss<false, kCols>(x, own, other, step > begin);
    }
  }
}

// Starts the product of the arrays i.
FA_DEVICE void start_products(const TileStorage& shared, int stage, int i, const HighParts& high,
                              Products& products) {
  constexpr uint32 kStride = kHighInRegisters ? kPartBytes : kEightRowsBytes;
  const uint64 a = wgmma_descriptor(cvta_to_shared(shared.own[i]), kSwizzleBytes, kStride);
  const uint64 b = describe_other(shared, stage, i);
  wgmma_fence();
#pragma unroll
  for (int sum = 0; sum < kSumCount; ++sum) {
    const int begin = sum * kLongestSum, end = begin + kLongestSum;
    float (*const x)[4] = products.sums[sum];
    if constexpr (kStacked) {
      multiply_steps<0, 0, 2 * kPart>(x, high, a, b, begin, end);
    } else {
      multiply_steps<0, 0, kPart>(x, high, a, b, begin, end);
      multiply_steps<1, 0, kPart>(x + kMmaN, high, a, b, begin, end);
    }
  }
  constexpr int kLow = kOwnKeys ? 1 : 0;  // the part of A where that of keys is low
  multiply_steps<kLow, 1 - kLow, kPart>(products.low[0], high, a, b, 0, kDim / 16);
  wgmma_commit_group();
}

// Adds up their parts, in float32, and multiplies them by the exponents of their rows.
FA_DEVICE void add_up(const TileStorage& shared, int stage, int i, const Products& products,
                      Scores& x) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = products.sums[0][j][e], of_low = products.sums[0][kMmaN + j][e];
#pragma unroll
      for (int k = 1; k < kSumCount; ++k) {
        sum += products.sums[k][j][e];
        of_low += products.sums[k][kMmaN + j][e];
      }
      x[0][j][e] = fmaf(of_low + products.low[0][j][e], kLowInverse, sum);
    }
  }
  apply_exponents(shared, stage, i, 0, x);
}

// ---------------------------------------------------------------------------------------- exchange
// What a warpgroup hands over.
FA_DEVICE Exchanged& handed_by(TileStorage& shared, int stage, int role) {
  return reinterpret_cast<Exchanged*>(&shared + 1)[stage * kHandOver + role];
}
FA_DEVICE void hand_over(Exchanged& to, const Scores& x) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    const float (&four)[4] = x[0][j];
    to[tid_x_again() % 128 / 32][j][tid_x_again() % 32] =
        make_float4(four[0], four[1], four[2], four[3]);
  }
}
FA_DEVICE void receive(const Exchanged& from, Scores& x) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    const float4 four = from[tid_x_again() % 128 / 32][j][tid_x_again() % 32];
    x[0][j][0] = four.x, x[0][j][1] = four.y, x[0][j][2] = four.z, x[0][j][3] = four.w;
  }
}
// That of the two warps that share rows; 0 is the barrier of __syncthreads.
FA_DEVICE int barrier_of_rows() { return 1 + tid_x_again() % 128 / 32; }

// ----------------------------------------------------------------------------------------- weights
// Makes P of products of Q and K, and what it is times the slope of its score.
FA_DEVICE void make_weights(const BwdFp32Params& params, const TileStorage& shared,
                            const OtherTile& at, int stage, Scores& weights, Scores& sloped) {
  Scores unused;
  clear(unused);
#pragma unroll
  for (int e = 0; e < 4 * kMmaN; ++e) sloped[0][e / 4][e % 4] = 1.0f;
  make_scores(params, shared.work, part_of(params, shared.work, at, 0), weights,
              [&](int m, int j, int e, float slope) { sloped[m][j][e] = slope; });
  check_range(shared, stage, 0, weights, unused);
  weigh(shared, stage, 0, weights, sloped);
}

// Makes dS of P, times slopes, and dP - delta.
FA_DEVICE void make_ds(const TileStorage& shared, int stage, const Scores& weights, Scores& ds) {
  Scores seen;  // what check_range asks of scores: whether they are those of hidden pairs
#pragma unroll
  for (int e = 0; e < 4 * kMmaN; ++e) {
    const float weight = weights[0][e / 4][e % 4];
    seen[0][e / 4][e % 4] = weight == 0.0f ? -FA_INFINITY : weight;
  }
  check_range(shared, stage, 0, seen, ds);
#pragma unroll
  for (int e = 0; e < 4 * kMmaN; ++e) {
    float& x = ds[0][e / 4][e % 4];
    x = slope_times(x, weights[0][e / 4][e % 4]);
  }
}

// Makes what this warpgroup multiplies by a tile of the other side, for which it waits: P if it
// adds up dV, else dS.
FA_DEVICE void multiply_and_exchange(const BwdFp32Params& params, TileStorage& shared,
                                     const PipelineState<kStages>& pipeline, const OtherTile& at,
                                     const HighParts& high, Scores& x) {
  const int stage = pipeline.index(), role = warp_role();
  Products products;
  wait_for_array(shared, pipeline, role);
  start_products(shared, stage, role, high, products);
  // What is known of rows comes with array 0.  V is not waited for by those that do not give it
  // back, and would miss phases of its barrier.
  if (kOwnKeys || role == 1) wait_for_array(shared, pipeline, 1 - role);
  wgmma_wait_group<0>();
  if (role == 1) release_per_lane(shared.empty[stage][1]);
  add_up(shared, stage, role, products, x);
  if (role == 0) {
    Scores sloped;
    make_weights(params, shared, at, stage, x, sloped);
    hand_over(handed_by(shared, stage, 0), sloped);
    if constexpr (kOwnKeys) {
      bar_arrive(barrier_of_rows(), 64);
    } else {
      bar_sync(barrier_of_rows(), 64);
      receive(handed_by(shared, stage, 1), x);
      make_ds(shared, stage, sloped, x);
    }
  } else {
    subtract_delta(shared, stage, 0, x);
    if constexpr (!kOwnKeys) hand_over(handed_by(shared, stage, 1), x);
    bar_sync(barrier_of_rows(), 64);
    Scores weights;
    receive(handed_by(shared, stage, 0), weights);
    make_ds(shared, stage, weights, x);
  }
}
