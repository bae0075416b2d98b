// What the kernels of attention backward in float32 share that compute dQ, or dK and dV.
//
// As in float64 (backward_rows.cuh), a block owns rows of one side and walks over tiles of the
// other.  Here all numbers are pairs of float16 (split_float.cuh), with an exponent for each row,
// and every product is three.  bwd_preprocess_fp32 has written them.  A warp has 16 or 32 of the
// block's rows, and computes, of kPart rows of the other side at a time,
//   S, or its transpose, and dP,   P = exp(S - LSE),   dS = P (dP - delta),
// in registers, which are an operand of the products that follow.
//
// P and dS are split too.  Exponents of the rows that they are multiplied by belong to them, and
// then each row has its largest number brought near 2^14.
//
// The products are those of mma.sync (backward_fp32_sm80.cuh) or wgmma (backward_fp32_sm90.cuh),
// whose accumulators lie alike.
#pragma once
#include "cuda_src/common/backward_rows_fp32.cuh"
#include "cuda_src/common/backward_scores.cuh"
#include "cuda_src/common/split_float.cuh"
#include "ptx/math.cuh"

// --------------------------------------------------------------------------------------- constants
constexpr int kMinBlocks = FA_BLOCKS;     // blocks that should fit on a multiprocessor
constexpr int kMmaM = FA_WARP_ROWS / 16;  // products across a warp's own rows
constexpr int kPart = FA_PART;            // rows of the other side that are multiplied at a time
// Warpgroups that share rows (backward_fp32_shared_rows.cuh).  Of dQ each of them has some columns,
// and the high parts of the block's rows are in registers only.
constexpr int kRowGroups = FA_ROW_GROUPS;
constexpr bool kHighInRegisters = kRowGroups > 1 && !kOwnKeys;
constexpr int kMmaN = kPart / 8, kMmaV = kDim / 8 / (kOwnKeys ? 1 : kRowGroups);
static_assert(kMmaM == 1 || kMmaM == 2, "a warp owns 16 or 32 rows");
static_assert(kOtherRows % kPart == 0 && kPart % 16 == 0, "parts divide a tile");
using Scores = float[kMmaM][kMmaN][4];
using Sums = float[kMmaM][kMmaV][4];

// ----------------------------------------------------------------------------------- what is known
constexpr int kOwnFields = kOwnKeys ? kKeyFields : kQueryFields;
constexpr int kOtherFields = kOwnKeys ? kQueryFields : kKeyFields;
// Those of array 0; of array 1 it is the next one.
constexpr int kOwnFactor = kOwnKeys ? kKFactor : kQFactor;
constexpr int kOtherFactor = kOwnKeys ? kQFactor : kKFactor;
constexpr int kOwnLimit = kOwnKeys ? kKLimit : kQLimit;
constexpr int kOtherLimit = kOwnKeys ? kQLimit : kKLimit;

// The block's rows and tiles of the other side, in pairs, and what is known of them.
struct SharedStorage {
  uint16 own[2][kHighInRegisters ? 1 : 2][kOwnRows * kDim];  // array, part
  uint16 other[kStages][2][2][kOtherRows * kDim];
  float own_rows[kOwnFields][kOwnRows];
  float other_rows[kStages][kOtherFields][kOtherRows];
  float own_limit[2][kWarps];  // the largest one of each warp's rows
  WorkTile work;
};

// Where this warp's rows begin in the block, and its columns of the sums.
FA_DEVICE int warp_row() {
  if constexpr (kRowGroups > 1) return tid_x_again() % 128 / 32 * 16;
  return tid_x_again() / 32 * (16 * kMmaM);
}
FA_DEVICE int warp_col() {
  if constexpr (kRowGroups > 1 && !kOwnKeys) return tid_x_again() / 128 * (8 * kMmaV);
  return 0;
}

// Finds the largest limits of each warp's own rows, which have landed for it.
FA_DEVICE void find_own_limits(SharedStorage& shared) {
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float limit = shared.own_rows[kOwnLimit + i][warp_row() + lane % (16 * kMmaM)];
    const uint32 most = __reduce_max_sync(kFullWarp, __float_as_uint(limit));  // they are positive
    if (lane == 0) shared.own_limit[i][tid_x_again() / 32] = __uint_as_float(most);
  }
  __syncwarp();
}

// A number of each own row of a thread: of 16 * i + 8 * h + lane / 4 from the warp's first one on.
FA_DEVICE void read_own(const SharedStorage& shared, int field, float (&x)[kMmaM][2]) {
  const float* from = shared.own_rows[field] + warp_row() + tid_x_again() % 32 / 4;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    x[i][0] = from[16 * i];
    x[i][1] = from[16 * i + 8];
  }
}

// Numbers of the rows of the other side of a part: the n-th pair is that of columns 8 n + 2 * (lane
// % 4) and the next one.
FA_DEVICE const float2* other_pairs(const SharedStorage& shared, int stage, int field, int row) {
  return reinterpret_cast<const float2*>(shared.other_rows[stage][field] + row +
                                         tid_x_again() % 4 * 2);
}
FA_DEVICE float of_pair(const float2& two, int e) { return e % 2 ? two.y : two.x; }

// ---------------------------------------------------------------------------------------- products
// Multiplies products of the arrays i by what the exponents of their rows are.  Half of these is
// applied twice, because float32 may not hold all of it.
FA_DEVICE void apply_exponents(const SharedStorage& shared, int stage, int i, int row, Scores& x) {
  float own_factor[kMmaM][2];
  read_own(shared, kOwnFactor + i, own_factor);
  const float2* other_factor = other_pairs(shared, stage, kOtherFactor + i, row);
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    const float2 two = other_factor[4 * j];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float factor = own_factor[m][e / 2] * of_pair(two, e);
        x[m][j][e] = x[m][j][e] * factor * factor;
      }
    }
  }
}
// Multiplies each row of X by the exponents of the rows that it meets, from `factors` on.  They are
// relative to their largest, which is `unit`, unless they differ so much that float32 would not
// hold all of it.  Then `unit` is that of the row's own largest product.  Returns how far half of
// the exponents are apart.
FA_DEVICE int weigh_by_exponents(const float* factors, Scores& x, int (&unit)[kMmaM][2]) {
  // Of half of the exponents.  What is 2^-46 of a row's largest number still counts.
  constexpr int kMostSpread = 40;
  uint32 most_bits = 0, least_bits = 0;  // of factors, which are 0 or powers of two; below 0
#pragma unroll
  for (int r = 0; r < kPart; r += 32) {
    const uint32 bits = __float_as_uint(factors[r + tid_x_again() % 32 % kPart]);
    most_bits = max(most_bits, bits);
    least_bits = max(least_bits, 0u - bits);
  }
  const int top = static_cast<int>(max(1u, __reduce_max_sync(kFullWarp, most_bits) >> 23)) - 127;
  const uint32 lowest = 0u - __reduce_max_sync(kFullWarp, least_bits);
  const float2* own = reinterpret_cast<const float2*>(factors) + tid_x_again() % 4;
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) unit[m][0] = unit[m][1] = 2 * top;
  const int spread = lowest == 0 ? 0 : top + 127 - static_cast<int>(lowest >> 23);
  if (spread <= kMostSpread) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      const float2 two = own[4 * j];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float ratio = of_pair(two, e) * power_of_two(-top);
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          x[m][j][e] *= ratio * ratio;
          x[m][j][e + 2] *= ratio * ratio;
        }
      }
    }
    return spread;
  }
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int most = -380;
      const auto exponent_of = [&](int j, int e) {  // twice 63 below 0, of a row of zeros
        return 2 * (static_cast<int>(__float_as_uint(of_pair(own[4 * j], e)) >> 23) - 127);
      };
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int exponent = static_cast<int>(__float_as_uint(x[m][j][2 * h + e]) >> 23 & 255);
          if (exponent > 0) most = max(most, exponent - 127 + exponent_of(j, e));
        }
      }
      most = max(most, __shfl_xor_sync(kFullWarp, most, 1));
      most = max(most, __shfl_xor_sync(kFullWarp, most, 2));
      unit[m][h] = max(most, -126);
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int exponent = max(-252, min(252, exponent_of(j, e) - unit[m][h]));
          x[m][j][2 * h + e] *= power_of_two(exponent / 2);
          x[m][j][2 * h + e] *= power_of_two(exponent - exponent / 2);
        }
      }
    }
  }
  return spread;
}

// A row's exponent, as two powers of two.
struct ProductFactors {
  float half[kMmaM][2], rest[kMmaM][2];
};

// Splits X, whose rows are 2^unit times what is here (weigh_by_exponents), for a product with rows
// of the other side.
//
// Each row is multiplied by the power of two that brings its largest number near 2^14.  `factors`
// is what the product is to be multiplied by.
template <typename Split>
FA_DEVICE void split_operand(const Scores& x, const int (&unit)[kMmaM][2],
                             SplitPair (&p)[kMmaM][kMmaN][2], ProductFactors& factors,
                             const Split& split_two) {
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = 0.0f;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        most = fmaxf(most, fmaxf(fabsf(x[m][j][2 * h]), fabsf(x[m][j][2 * h + 1])));
      }
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
      // At most 126, at least -114.
      const int exponent = min(126, 14 + 127 - static_cast<int>(__float_as_uint(most) >> 23));
      const float scale = power_of_two(exponent);
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        p[m][j][h] = split_two(x[m][j][2 * h] * scale, x[m][j][2 * h + 1] * scale);
      }
      const int power = max(-252, min(254, unit[m][h] - exponent)), half = power >> 1;
      factors.half[m][h] = power_of_two(half);
      factors.rest[m][h] = power_of_two(power - half);
    }
  }
  __syncwarp();
}

// ----------------------------------------------------------------------------------------- weights
// Where rows of a part are, and what a mask says of them.
struct Part {
  uint32 entry;     // of the queries
  int own, other;   // this thread's first rows
  bool in_band;     // all pairs of the tile
  int words_index;  // of the mask's block
};

FA_DEVICE Part part_of(const BwdFp32Params& params, const WorkTile& work, const OtherTile& at,
                       int row) {
  const int lane = tid_x_again() % 32, first = at.tile * kOtherRows;
  const uint32 entry = work.entry + at.head;
  int words_index = kFullBlock;
  if constexpr (kSparse) {
    words_index =
        block_words_index(params.mask, mask_row(params, entry, work.first_own), first / kMaskBlock);
  }
  return {entry, work.first_own + warp_row() + lane / 4, first + row + lane % 4 * 2,
          at.tile >= work.full_begin && at.tile < work.full_end, words_index};
}

// Makes scores of products, in natural units; -inf where a pair is hidden.  Hands slopes other than
// 1 to use_slope(m, j, e, slope).
template <typename UseSlope>
FA_DEVICE void make_scores(const BwdFp32Params& params, const WorkTile& work, const Part& part,
                           Scores& s, const UseSlope& use_slope) {
  const AttentionParams& p = params.common;
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
    if constexpr (kScoreMod) {
      load_and_apply_score_mod<kOwnKeys>(
          p, operand_offsets(params, part.entry).bias, s[m], part.own + 16 * m, part.other,
          [&](int j, int e, float slope) { use_slope(m, j, e, slope); });
    } else {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][j][e] *= p.scale;
      }
    }
  }
  mask_scores<kOwnKeys, kSparse>(params, band_of(p, work), s, part.in_band, part.words_index,
                                 part.own, part.other);
}

// Makes NaN of what pairs of float16 may have lost digits of that count, so that its rows are
// computed again.
//
// A number of less than 2^-25 of the largest of its row keeps fewer than 24 bits, and a product of
// it is off by up to 2^-50 of the largest product that there might be.  A score may be off by 2^-26
// of the LSE, or of 1; dP by as much of delta, or of dP - delta.  A score so far below the LSE that
// its weight is 0 may be off by more, and so may dP of such a pair.
FA_DEVICE void check_range(const SharedStorage& shared, int stage, int row, Scores& s, Scores& dp) {
  const int lane = tid_x_again() % 32;
  bool is_suspect = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int r = 0; r < kPart; r += 32) {
      const float limit = shared.other_rows[stage][kOtherLimit + i][row + r + lane % kPart];
      is_suspect = is_suspect || shared.own_limit[i][tid_x_again() / 32] * limit > 1.0f;
    }
  }
  if (!__any_sync(kFullWarp, is_suspect)) return;
  const int first_own = warp_row() + lane / 4, first_other = row + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (s[m][j][e] == -FA_INFINITY) continue;  // hidden pairs may hold anything
        const int own = first_own + 16 * m + 8 * (e / 2), other = first_other + 8 * j + e % 2;
        const auto product = [&](int of_own, int of_other) {
          return shared.own_rows[of_own][own] * shared.other_rows[stage][of_other][other];
        };
        const float lost = product(kOwnLimit, kOtherLimit);
        if (lost > 1.0f) {
          const float shift =
              kOwnKeys ? shared.other_rows[stage][kShift][other] : shared.own_rows[kShift][own];
          if (s[m][j][e] + kNoWeight + lost * lost * fmaxf(1.0f, fabsf(shift)) / (1 << 25) <
              shift) {
            continue;
          }
          s[m][j][e] = FA_NAN;
        }
        if (product(kOwnLimit + 1, kOtherLimit + 1) > 1.0f) {
          const float factor =
              product(kOwnFactor + 1, kOtherFactor + 1) * 8.0f;  // 2^((30-50+26)/2)
          if (factor * factor > fabsf(dp[m][j][e])) dp[m][j][e] = FA_NAN;
        }
      }
    }
  }
}

// A number of the query of a thread's score: `own` are those of the block's rows, `other` those of
// a pair of columns.
FA_DEVICE float of_query(const float (&own)[kMmaM][2], const float2& other, int m, int e) {
  return kOwnKeys ? of_pair(other, e) : own[m][e / 2];
}

// Makes dP - delta of dP.
FA_DEVICE void subtract_delta(const SharedStorage& shared, int stage, int row, Scores& ds) {
  float own[kMmaM][2];
  if constexpr (!kOwnKeys) read_own(shared, kDelta, own);
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    float2 two = {0.0f, 0.0f};
    if constexpr (kOwnKeys) two = other_pairs(shared, stage, kDelta, row)[4 * j];
#pragma unroll
    for (int e = 0; e < 4 * kMmaM; ++e) ds[e / 4][j][e % 4] -= of_query(own, two, e / 4, e % 4);
  }
}

// Makes P of scores, and multiplies by it what is there of dS.
FA_DEVICE void weigh(const SharedStorage& shared, int stage, int row, Scores& weights, Scores& ds) {
  float own[kMmaM][2], own_factor[kMmaM][2];
  if constexpr (!kOwnKeys) {
    read_own(shared, kShift, own);
    read_own(shared, kFactor, own_factor);
  }
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    float2 shift = {0.0f, 0.0f}, factor = {0.0f, 0.0f};
    if constexpr (kOwnKeys) {
      shift = other_pairs(shared, stage, kShift, row)[4 * j];
      factor = other_pairs(shared, stage, kFactor, row)[4 * j];
    }
#pragma unroll
    for (int e = 0; e < 4 * kMmaM; ++e) {
      const int m = e / 4;
      float& x = weights[m][j][e % 4];
      x = ex2_approx_ftz((x - of_query(own, shift, m, e % 4)) * kLog2e) *
          of_query(own_factor, factor, m, e % 4);
      ds[m][j][e % 4] = slope_times(ds[m][j][e % 4], x);
    }
  }
}

// Makes P of products of Q and K, and dS = P (dP - delta) of dP - delta, for a warp's rows and a
// part of the other side.  Without kSloped, dS is the gradient of a score, not that of what a
// softcap was applied to.
template <bool kSloped = true>
FA_DEVICE void compute_weights(const BwdFp32Params& params, const SharedStorage& shared,
                               const OtherTile& at, int stage, int row, Scores& weights,
                               Scores& ds) {
  const Part part = part_of(params, shared.work, at, row);
  make_scores(params, shared.work, part, weights,
              [&](int m, int j, int e, float slope) { ds[m][j][e] *= kSloped ? slope : 1.0f; });
  check_range(shared, stage, row, weights, ds);
  weigh(shared, stage, row, weights, ds);
}

// ---------------------------------------------------------------------------------------- epilogue
// Writes a warp's rows of a gradient.  Returns which of them are not finite, a bit for each: a
// hidden pair has weight 0, but 0 * NaN is NaN inside a product.
FA_DEVICE uint32 write_sums(const BwdFp32Params& params, const WorkTile& work,
                            const StridedArray<float>& array, int rows, int cols, const Sums& sums,
                            float scale) {
  const int lane = tid_x_again() % 32;
  uint32 nonfinite = 0;
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_warp = 16 * m + 8 * h + lane / 4, row = work.first_own + warp_row() + in_warp;
      float* to = row_start(params, array, work.entry, row);
      float probe = 0.0f;  // NaN as soon as a number is NaN or infinite
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        const int col = warp_col() + 8 * j + lane % 4 * 2;
        const float x = sums[m][j][2 * h] * scale, y = sums[m][j][2 * h + 1] * scale;
        probe = fmaf(x, 0.0f, fmaf(y, 0.0f, probe));
        if (row >= rows) continue;
        if (params.aligned && col + 2 <= cols) {
          *reinterpret_cast<float2*>(to + col) = make_float2(x, y);
        } else {
          if (col < cols) to[col] = x;
          if (col + 1 < cols) to[col + 1] = y;
        }
      }
      if (probe != probe && row < rows) nonfinite |= 1u << in_warp;
    }
  }
  return __reduce_or_sync(kFullWarp, nonfinite);
}

// Calls recompute(row) as a whole warp for each of its rows that has a bit.
template <typename Recompute>
FA_DEVICE void for_each_row(const WorkTile& work, uint32 rows, const Recompute& recompute) {
  if (rows == 0) return;
  __syncwarp();  // what has been written before is overwritten
#pragma unroll 1
  for (int r = 0; r < 16 * kMmaM; ++r) {
    if (rows >> r & 1) recompute(work.first_own + warp_row() + r);
  }
}
