// The products of attention backward in float32 by mma.sync, for SM80 and later: tiles that
// cp.async brings, and ldmatrix reads.
#pragma once
#include "cuda_src/common/backward_fp32.cuh"
#include "cuda_src/common/split_products.cuh"

// --------------------------------------------------------------------------------------- constants
constexpr int kScoresAtOnce = FA_AT_ONCE;  // products of a warp under way, across kPart
constexpr int kSumsAtOnce = 2;             // the same across columns of the sums
constexpr int kScoreSteps = kDim / 16 % kLongestSum == 0 ? kLongestSum
                            : kDim / 16 % 3 == 0         ? 3
                                                         : 2;  // of one sum
static_assert(kDim % 32 == 0 && kDim <= 128, "head_dim is padded to a multiple of 32, at most 128");
static_assert(kStages == 1 || kStages == 2, "the next tile comes during this one or after it");
static_assert(kOwnRows == 16 * kMmaM * kWarps, "warps divide the rows of the block");
static_assert(kPart <= 32 && kPart / 16 <= kLongestSum, "the product with a part is one sum");
static_assert(kMmaN % kScoresAtOnce == 0 && kScoresAtOnce % 2 == 0 && kMmaV % kSumsAtOnce == 0,
              "sums are in groups, of which ldmatrix reads two at a time");

using OwnTile = SharedTile<kOwnRows, kDim>;
using OtherSide = SharedTile<kOtherRows, kDim>;
constexpr uint32 kOwnLow = kOwnRows * kDim * 2;  // bytes from high parts to low ones
constexpr uint32 kOtherLow = kOtherRows * kDim * 2;

// ---------------------------------------------------------------------------------------- storage
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "backward_fp32.py asks for as much");

// Copies are started by cp.async; the caller commits their group.
template <int kRows>
FA_DEVICE void load_pairs(uint32 tile, const uint16* pairs, int64 first_row, int row, int rows) {
  pairs += first_row * (2 * kDim);
  load_tile<kRows, kDim, kThreads>(tile, pairs, 2 * kDim, row, rows, kDim, true);
  load_tile<kRows, kDim, kThreads>(tile + kRows * kDim * 2, pairs + kDim, 2 * kDim, row, rows, kDim,
                                   true);
}

template <int kFields, int kRows>
FA_DEVICE void load_fields(uint32 to, const float* from, int64 step) {
  constexpr int kChunks = kRows / 4;
#pragma unroll 1
  for (int chunk = tid_x_again(); chunk < kFields * kChunks; chunk += kThreads) {
    cp_async_cg_16(to + 16 * chunk, from + chunk / kChunks * step + chunk % kChunks * 4, 16);
  }
}

template <bool kKeys, int kRows>
FA_DEVICE void load_side(const BwdFp32Params& params, const uint16* tiles, const float* rows,
                         uint32 entry, int first) {
  const int64 first_row = first_row_of<kKeys>(params, entry);
  const int count = kKeys ? params.key_entry_rows : params.entry_rows;
  const uint32 tile = cvta_to_shared(tiles);
  load_pairs<kRows>(tile, kKeys ? params.k_pairs : params.q_pairs, first_row, first, count);
  load_pairs<kRows>(tile + 4 * kRows * kDim, kKeys ? params.v_pairs : params.dout_pairs, first_row,
                    first, count);
  load_fields<kKeys ? kKeyFields : kQueryFields, kRows>(
      cvta_to_shared(rows), (kKeys ? params.key_rows : params.rows) + first_row + first,
      kKeys ? key_fields_step(params) : query_fields_step(params));
}

FA_DEVICE void load_own(const BwdFp32Params& params, SharedStorage& shared) {
  load_side<kOwnKeys, kOwnRows>(params, shared.own[0][0], shared.own_rows[0], shared.work.entry,
                                shared.work.first_own);
}

FA_DEVICE void load_other(const BwdFp32Params& params, SharedStorage& shared, const OtherTile& at,
                          int stage) {
  load_side<!kOwnKeys, kOtherRows>(params, shared.other[stage][0][0], shared.other_rows[stage][0],
                                   shared.work.entry + at.head, at.tile * kOtherRows);
}

// ---------------------------------------------------------------------------------------- products
// S = Q K^T or dP = dO V^T, or its transpose: the product of the arrays i, with rows of the other
// side from `row` of its tile on.
FA_DEVICE void multiply_arrays(const SharedStorage& shared, int stage, int i, int row, Scores& x) {
  const uint32 own_address = cvta_to_shared(shared.own[i][0]) + a_lane<OwnTile>(warp_row());
  const uint32 other_address = cvta_to_shared(shared.other[stage][i][0]) + b_lane<OtherSide>(row);
#pragma unroll
  for (int j = 0; j < kMmaN; j += kScoresAtOnce) {
#pragma unroll
    for (int first = 0; first < kDim / 16; first += kScoreSteps) {
      SplitSum sums[kMmaM][kScoresAtOnce];
#pragma unroll
      for (int n = 0; n < kMmaM * kScoresAtOnce; ++n) {
        sums[n / kScoresAtOnce][n % kScoresAtOnce].clear();
      }
#pragma unroll
      for (int step = first; step < first + kScoreSteps; ++step) {
        uint32 b[kScoresAtOnce][2], b_low[kScoresAtOnce][2];
#pragma unroll
        for (int n = 0; n < kScoresAtOnce; n += 2) {
          read_pairs<false, kOtherLow>(b, b_low, n,
                                       OtherSide::at(other_address, 8 * (j + n), step));
        }
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          uint32 a[4], a_low[4];
          ldmatrix_x4(a, OwnTile::at(own_address, 16 * m, step));
          ldmatrix_x4(a_low, OwnTile::at(own_address, 16 * m, step) + kOwnLow);
          // Low parts of keys come first in both kernels, which are to find the same bits: a unit
          // in the last place of a large score would make weights of 1 any others.
          multiply_pairs<kOwnKeys>(sums[m], a, a_low, b, b_low, kScoresAtOnce);
        }
      }
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
        for (int e = 0; e < 4 * kScoresAtOnce; ++e) {
          const float part = sums[m][e / 4].value(e % 4);
          float& sum = x[m][j + e / 4][e % 4];
          sum = first == 0 ? part : sum + part;
        }
      }
    }
  }
  apply_exponents(shared, stage, i, row, x);
}

// P and dS of a warp's rows and a part of the other side (compute_weights).
template <bool kSloped = true>
FA_DEVICE void multiply_and_weigh(const BwdFp32Params& params, const SharedStorage& shared,
                                  const OtherTile& at, int stage, int row, Scores& weights,
                                  Scores& ds) {
  multiply_arrays(shared, stage, 1, row, ds);
  subtract_delta(shared, stage, row, ds);
  multiply_arrays(shared, stage, 0, row, weights);
  compute_weights<kSloped>(params, shared, at, stage, row, weights, ds);
}

// sums += X B, where B are the rows of the other side's array i from `row` of its tile on.
FA_DEVICE void add_product(const SharedStorage& shared, int stage, int i, int row, Scores& x,
                           Sums& sums) {
  __syncwarp();  // registers are short: nothing of this is to begin earlier
  SplitPair p[kMmaM][kMmaN][2];
  ProductFactors factors;
  int unit[kMmaM][2];
  weigh_by_exponents(shared.other_rows[stage][kOtherFactor + i] + row, x, unit);
  split_operand(x, unit, p, factors, [](float one, float two) { return split(one, two); });
  const uint32 address =
      OtherSide::at(cvta_to_shared(shared.other[stage][i][0]) + b_trans_lane<OtherSide>(), row, 0);
#pragma unroll
  for (int first = 0; first < kMmaV; first += kSumsAtOnce) {
    SplitSum part[kMmaM][kSumsAtOnce];
#pragma unroll
    for (int n = 0; n < kMmaM * kSumsAtOnce; ++n) part[n / kSumsAtOnce][n % kSumsAtOnce].clear();
#pragma unroll
    for (int step = 0; step < kPart / 16; ++step) {
      uint32 b[kSumsAtOnce][2], b_low[kSumsAtOnce][2];
#pragma unroll
      for (int n = 0; n < kSumsAtOnce; n += 2) {
        read_pairs<true, kOtherLow>(b, b_low, n,
                                    OtherSide::at(address, 16 * step, (first + n) / 2));
      }
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        uint32 a[4], a_low[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[r] = p[m][2 * step + r / 2][r % 2].high;
          a_low[r] = p[m][2 * step + r / 2][r % 2].low;
        }
        multiply_pairs(part[m], a, a_low, b, b_low, kSumsAtOnce);
      }
    }
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int e = 0; e < 4 * kSumsAtOnce; ++e) {
        float& sum = sums[m][first + e / 4][e % 4];
        const int h = e % 4 / 2;
        sum = fmaf(part[m][e / 4].value(e % 4) * factors.half[m][h], factors.rest[m][h], sum);
      }
    }
    __syncwarp();  // keeps the loads of later sums from being moved up: registers are short
  }
}
