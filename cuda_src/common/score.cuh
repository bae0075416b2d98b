// From a product q . k to the score of a query and a key:
//   score = scale * product + bias,  or  softcap * tanh(scale * product / softcap) + bias.
// or what an expression of the caller's makes of scale * product (score_expression.cuh).
//
// A build with FA_SCORE_MOD computes scores in natural units, in the registers of the accumulators,
// and the softmax multiplies them by log2(e) inside its exponent (p.exp2_scale).  A build without
// it is for scores that are products times a positive scale: the softmax multiplies by that, too,
// and nothing is done here.
//
// A bias is not multiplied by log2(e) on its own: two scores that are equal beside a large one
// would come out on either side of a rounding, far apart.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/score_and_slope.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

#ifndef FA_SCORE_MOD
#define FA_SCORE_MOD 0
#endif
#if !FA_SCORE_MOD
#define FA_SOFTCAP 0
#define FA_BIAS_AXES 0
#define FA_BIAS_KIND 0
#endif

enum BiasAxes : int { kNoBias = 0, kBiasOfQuery = 1, kBiasOfKey = 2, kBiasOfPair = 3 };

constexpr bool kScoreMod = FA_SCORE_MOD;  // scores are more than products times a positive scale
constexpr bool kSoftcap = FA_SOFTCAP;     // tanh bounds them
constexpr int kBiasAxes = FA_BIAS_AXES;   // what the bias depends on, besides the batch entry
constexpr int kBiasKind = FA_BIAS_KIND;   // a FloatKind: the type of its elements
constexpr bool kExpression = FA_EXPRESSION;
constexpr bool kBiasIs16Bit = kBiasKind == kFloat16 || kBiasKind == kBfloat16;

constexpr bool kHasBias = kBiasAxes != kNoBias;
constexpr bool kHasOperands = kHasBias || kExpression;  // what scores are made of besides products

constexpr float kLog2e = 1.4426950408889634f;
constexpr double kLog2eDouble = 1.4426950408889634;
constexpr float kLn2 = 0.6931471805599453f;

// A score in units of log2.  Rounding towards zero leaves the product finite where the score is: a
// bias of the lowest float32 hides no key from a row that has no other.
FA_DEVICE float scale_score(float score, float exp2_scale) {
  return kScoreMod ? __fmul_rz(score, exp2_scale) : __fmul_rn(score, exp2_scale);
}

// ----------------------------------------------------------------------------------------- softcap
// A score before its softcap is held as t = 4 * scale * product / softcap, so that bit 30 of t, the
// highest bit of its exponent, says whether tanh(t / 4) is out of reach of the series: |t| >= 2, a
// score of half the softcap.

// softcap * tanh(t / 4) for |t| < 2, by a polynomial without a special function: the coefficients
// of tanh(x) / x in powers of x^2, for t in place of x and times the softcap.  Its largest relative
// error is 2e-7, most of it from rounding.
FA_DEVICE float series_of_softcap(const float (&coefficients)[5], float t) {
  const float y = t * t;
  float sum = coefficients[4];
#pragma unroll
  for (int i = 3; i >= 0; --i) sum = fmaf(sum, y, coefficients[i]);
  return t * sum;
}
FA_DEVICE float softcap_by_series(const AttentionParams& p, float t) {
  return series_of_softcap(p.softcap_series, t);
}

// The same for any t.  Where t is small, the quotient would lose what the softcap multiplies back
// in.  (tanh.approx has 11 bits, too few beside 16-bit inputs.)
FA_DEVICE float softcap_by_exp2(const AttentionParams& p, float t) {
  const float quotient = rcp_approx_ftz(1.0f + ex2_approx_ftz(0.5f * kLog2e * t));
  return select_le(fabsf(t), 2.0f, softcap_by_series(p, t),
                   fmaf(-2.0f * p.softcap, quotient, p.softcap));
}

// The factor by which softcap * tanh(x) grows more slowly than softcap * x, given its value; 0 of a
// value of -inf, which hides a pair.
FA_DEVICE float softcap_slope(const AttentionParams& p, float capped) {
  const float y = capped * p.inverse_softcap;
  return __saturatef(fmaf(-y, y, 1.0f));
}

// Turns products into t; returns their bits, of which bit 30 counts.
template <int kMmaN>
FA_DEVICE uint32 scale_for_softcap(const AttentionParams& p, float (&s)[kMmaN][4]) {
  uint32 bits = 0;
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[j][e] *= p.softcap_scale;
      bits |= __float_as_uint(s[j][e]);
    }
  }
  return bits;
}

FA_DEVICE bool series_reaches(uint32 bits) { return (bits >> 30 & 1) == 0; }

// Of all products of a warp's tile.  Most tiles have no large score: returns whether this one has
// none.
template <int kMmaN>
FA_DEVICE bool apply_softcap(const AttentionParams& p, float (&s)[kMmaN][4]) {
  const bool near = __all_sync(kFullWarp, series_reaches(scale_for_softcap(p, s)));
  if (near) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = softcap_by_series(p, s[j][e]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = softcap_by_exp2(p, s[j][e]);
    }
  }
  return near;
}

// -------------------------------------------------------------------------------------------- bias
// An element of any float type, as float or double.
template <typename To = float>
FA_DEVICE To load_as_float(const void* base, int64 index, int kind) {
  switch (kind) {
    case kFloat16:
      return cvt_f32_f16(static_cast<const uint16*>(base)[index]);
    case kBfloat16:
      return cvt_f32_bf16(static_cast<const uint16*>(base)[index]);
    case kFloat32:
      return static_cast<const float*>(base)[index];
    default:
      return static_cast<To>(static_cast<const double*>(base)[index]);
  }
}

template <typename To = float>
FA_DEVICE To load_bias(const AttentionParams& p, int64 bias_offset, int query, int key) {
  return load_as_float<To>(p.bias, bias_offset + query * p.bias_row + key * p.bias_col, kBiasKind);
}

// The bias of the scores that a thread holds of an accumulator of m64nN or m16n8: of rows row and
// row + 8, and of columns col, col + 1, col + 8, col + 9, ...  Rows are queries, or keys with
// kOwnKeys.  Nothing here waits for what is loaded.
template <bool kOwnKeys, int kMmaN>
struct BiasTile {
  // What of it differs from row to row, and from column to column.
  static constexpr bool kByRow = kBiasAxes & (kOwnKeys ? kBiasOfKey : kBiasOfQuery);
  static constexpr bool kByCol = kBiasAxes & (kOwnKeys ? kBiasOfQuery : kBiasOfKey);
  static constexpr bool kPacked = kByCol && kBiasIs16Bit;  // two columns to a register
  uint32 bits[kByCol ? kMmaN : 1][kByRow ? 2 : 1][kByCol && !kPacked ? 2 : 1];

  __device__ __forceinline__ float at(int j, int e) const {
    const uint32(&own)[sizeof(bits[0][0]) / 4] = bits[kByCol ? j : 0][kByRow ? e / 2 : 0];
    if constexpr (!kPacked) return __uint_as_float(own[kByCol ? e % 2 : 0]);
    if constexpr (kBiasKind == kBfloat16) {
      return __uint_as_float(e % 2 ? own[0] & 0xffff0000u : own[0] << 16);
    }
    return cvt_f32_f16(static_cast<uint16>(e % 2 ? own[0] >> 16 : own[0]));
  }

  // Loads it by pairs of columns that are next to each other in memory; false where they are not,
  // or where some columns do not exist.
  __device__ __forceinline__ bool load_pairs(const AttentionParams& p, int64 bias_offset, int row,
                                             int col) {
    constexpr int kBytes = kBiasIs16Bit ? 2 : 4;
    const int64 row_step = kOwnKeys ? p.bias_col : p.bias_row;
    const int rows = kOwnKeys ? p.k_len : p.q_len, cols = kOwnKeys ? p.q_len : p.k_len;
    const uint8* from = static_cast<const uint8*>(p.bias) + bias_offset * kBytes;
    const bool pairs = p.bias_pairs >> kOwnKeys & 1 & (reinterpret_cast<uint64>(from) % 8 == 0);
    if (!pairs || (col & ~7) + 8 * kMmaN > cols) return false;
#pragma unroll
    for (int h = 0; h < (kByRow ? 2 : 1); ++h) {
      const uint8* own = from + (min(row + 8 * h, rows - 1) * row_step + col) * kBytes;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        if constexpr (kPacked) {
          bits[j][h][0] = *reinterpret_cast<const uint32*>(own + 16 * j);
        } else {
          const uint2 two = *reinterpret_cast<const uint2*>(own + 32 * j);
          bits[j][h][0] = two.x;
          bits[j][h][1] = two.y;
        }
      }
    }
    return true;
  }

  __device__ __forceinline__ void load(const AttentionParams& p, int64 bias_offset, int row,
                                       int col) {
    if constexpr (kByCol && kBiasKind != kFloat64) {
      if (load_pairs(p, bias_offset, row, col)) return;
    }
    const int64 row_step = kOwnKeys ? p.bias_col : p.bias_row;
    const int64 col_step = kOwnKeys ? p.bias_row : p.bias_col;
    const int rows = kOwnKeys ? p.k_len : p.q_len, cols = kOwnKeys ? p.q_len : p.k_len;
    if (row + 8 * kByRow < rows && (!kByCol || (col & ~7) + 8 * kMmaN <= cols)) {
      const int64 first = bias_offset + row * row_step + col * col_step;
      load_singly(p, [&](int h, int c) { return first + h * (8 * row_step) + c * col_step; });
    } else {  // of a pair that does not exist, that of another one
      load_singly(p, [&](int h, int c) {
        return bias_offset + min(row + 8 * h, rows - 1) * row_step +
               min(col + c, cols - 1) * col_step;
      });
    }
  }

  // Loads it element by element, given the index of the one of row 8 h and column c from here on.
  template <typename IndexOf>
  __device__ __forceinline__ void load_singly(const AttentionParams& p, IndexOf index_of) {
#pragma unroll
    for (int j = 0; j < (kByCol ? kMmaN : 1); ++j) {
#pragma unroll
      for (int h = 0; h < (kByRow ? 2 : 1); ++h) {
        uint32 two[2];
#pragma unroll
        for (int e = 0; e < (kByCol ? 2 : 1); ++e) {
          const int64 index = index_of(h, 8 * j + e);
          two[e] = kPacked ? static_cast<const uint16*>(p.bias)[index]
                           : __float_as_uint(load_as_float(p.bias, index, kBiasKind));
        }
        if constexpr (kPacked) {
          bits[j][h][0] = two[0] | two[1] << 16;
        } else {
          bits[j][h][0] = two[0];
          if constexpr (kByCol) bits[j][h][1] = two[1];
        }
      }
    }
  }
};

// ---------------------------------------------------------------------------------------- operands
#if FA_EXPRESSION
#include "cuda_src/common/score_expression.cuh"
template <bool kOwnKeys, int kMmaN>
using OperandTile = ExpressionTile<kOwnKeys, kMmaN>;
#else
constexpr bool kExpressionHasSlope = false;
template <bool kOwnKeys, int kMmaN>
using OperandTile = BiasTile<kOwnKeys, kMmaN>;
#endif

// How many columns of operands are loaded at a time, of kMmaN, where there are registers for `few`.
template <bool kOwnKeys, int kMmaN>
constexpr int columns_at_a_time(int few) {
  return kHasOperands && OperandTile<kOwnKeys, kMmaN>::kByCol && kMmaN % few == 0 ? few : kMmaN;
}

// ------------------------------------------------------------------------------------------ scores
// The score of a capped product, or of a product where there is no softcap.
template <bool kOwnKeys, int kMmaN>
FA_DEVICE float score_of(const AttentionParams& p, float x,
                         const OperandTile<kOwnKeys, kMmaN>& operands, int j, int e) {
  if constexpr (kExpression) {
    return operands.score(p.scale * x, j, e).score;
  } else if constexpr (kHasBias) {
    return kSoftcap ? x + operands.at(j, e) : fmaf(p.scale, x, operands.at(j, e));
  } else {
    return kSoftcap ? x : p.scale * x;
  }
}

constexpr uint32 kHiddenProduct = 0xffc5a5a5u;  // see hidden_score()

// Whether the derivative of a score by scale * product is other than 1.
constexpr bool kHasSlope = kSoftcap || kExpressionHasSlope;

// What hides a pair, in place of its score, or of its product where slopes follow from that: -inf,
// but to an expression, which may make anything of -inf, a NaN that no product is.
FA_DEVICE float hidden_score() {
  return __uint_as_float(kExpressionHasSlope ? kHiddenProduct : 0xff800000u);
}

// Makes of the products of a warp's tile what score_and_slope() takes.
template <int kMmaN>
FA_DEVICE void prepare_slopes(const AttentionParams& p, float (&s)[kMmaN][4]) {
  if constexpr (kSoftcap) apply_softcap(p, s);
}

// A weight times the slope of its score, which may be anything of a pair that does not count.
FA_DEVICE float slope_times(float slope, float weight) {
  return kExpressionHasSlope && weight == 0.0f ? 0.0f : slope * weight;
}

template <bool kOwnKeys, int kMmaN>
FA_DEVICE ScoreAndSlope<float> score_and_slope(const AttentionParams& p, float x,
                                               const OperandTile<kOwnKeys, kMmaN>& operands, int j,
                                               int e) {
  if constexpr (kExpression) {
    const ScoreAndSlope<float> found = operands.score(p.scale * x, j, e);
    const bool is_hidden = __float_as_uint(x) == kHiddenProduct;
    return {is_hidden ? -FA_INFINITY : found.score, is_hidden ? 0.0f : found.slope};
  } else {
    const float slope = kSoftcap ? softcap_slope(p, x) : 1.0f;
    return {score_of<kOwnKeys, kMmaN>(p, x, operands, j, e), slope};
  }
}

struct IgnoreSlope {
  __device__ __forceinline__ void operator()(int, int, float) const {}
};

// Makes scores of the products that a thread holds, given the operands of them.  Hands each slope,
// the derivative of a score by scale * product, to use_slope(j, e, slope) if it is not 1.  Returns
// whether a build without branches, apply_score_mod_of_near, would do for all of the warp.
template <bool kOwnKeys, int kMmaN, typename UseSlope = IgnoreSlope>
FA_DEVICE bool apply_score_mod(const AttentionParams& p, float (&s)[kMmaN][4],
                               const OperandTile<kOwnKeys, kMmaN>& operands,
                               const UseSlope& use_slope = UseSlope()) {
  bool near = true;
  if constexpr (kSoftcap) near = apply_softcap(p, s);
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const auto found = score_and_slope<kOwnKeys, kMmaN>(p, s[j][e], operands, j, e);
      if constexpr (kHasSlope) use_slope(j, e, found.slope);
      s[j][e] = found.score;
    }
  }
  return near;
}

// Whether apply_score_mod_of_near leaves scores in units of log2, which saves a multiplication.
constexpr bool kNearIsLog2 = kSoftcap && !kHasOperands;

// The same without a branch, so that what follows may be scheduled beside it.  Returns whether this
// thread's scores are right: products are not too large for the softcap's series.
template <bool kOwnKeys, int kMmaN>
FA_DEVICE bool apply_score_mod_of_near(const AttentionParams& p, float (&s)[kMmaN][4],
                                       const OperandTile<kOwnKeys, kMmaN>& operands) {
  bool near = true;
  if constexpr (kSoftcap) near = series_reaches(scale_for_softcap(p, s));
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kNearIsLog2) {
        s[j][e] = series_of_softcap(p.softcap_series_log2, s[j][e]);
      } else {
        if constexpr (kSoftcap) s[j][e] = softcap_by_series(p, s[j][e]);
        s[j][e] = score_of<kOwnKeys, kMmaN>(p, s[j][e], operands, j, e);
      }
    }
  }
  return near;
}

// The same two with operands that load(operands, j) finds a few columns at a time, from 8 * j on:
// for builds that have no registers for more.
template <bool kOwnKeys, int kMmaN, typename Load, typename Apply>
FA_DEVICE bool in_loaded_parts(float (&s)[kMmaN][4], const Load& load, const Apply& apply) {
  constexpr int kStep = columns_at_a_time<kOwnKeys, kMmaN>(4);
  bool near = true;
#pragma unroll
  for (int j = 0; j < kMmaN; j += kStep) {
    OperandTile<kOwnKeys, kStep> operands;
    if constexpr (kHasOperands) load(operands, j);
    near &= apply(reinterpret_cast<float (&)[kStep][4]>(s[j]), operands, j);
  }
  return near;
}
// The same of operands in global memory, whose rows start at `row`.
template <bool kOwnKeys, int kMmaN, typename Apply>
FA_DEVICE bool in_parts(const AttentionParams& p, int64 offset, float (&s)[kMmaN][4], int row,
                        int col, const Apply& apply) {
  return in_loaded_parts<kOwnKeys>(
      s, [&](auto& operands, int j) { operands.load(p, offset, row, col + 8 * j); }, apply);
}

template <bool kOwnKeys, int kMmaN, typename UseSlope = IgnoreSlope>
FA_DEVICE bool load_and_apply_score_mod(const AttentionParams& p, int64 offset,
                                        float (&s)[kMmaN][4], int row, int col,
                                        const UseSlope& use_slope = UseSlope()) {
  return in_parts<kOwnKeys>(p, offset, s, row, col, [&](auto& part, auto& operands, int first) {
    return apply_score_mod(p, part, operands,
                           [&](int j, int e, float slope) { use_slope(first + j, e, slope); });
  });
}

template <bool kOwnKeys, int kMmaN>
FA_DEVICE bool load_and_apply_score_mod_of_near(const AttentionParams& p, int64 offset,
                                                float (&s)[kMmaN][4], int row, int col) {
  return in_parts<kOwnKeys>(p, offset, s, row, col, [&](auto& part, auto& operands, int) {
    return apply_score_mod_of_near(p, part, operands);
  });
}

// Calls f(j, Constant<n>, bias) with the operands of n columns at a time, from those of j on: for
// builds that have no registers for more.
template <bool kOwnKeys, int kMmaN, typename F>
FA_DEVICE void for_each_operands_part(const AttentionParams& p, int64 offset, int row, int col,
                                      F f) {
  // Pairs of keys and queries whose keys are rows are loaded one by one, which takes addresses.
  constexpr int kStep =
      columns_at_a_time<kOwnKeys, kMmaN>(kOwnKeys && kBiasAxes == kBiasOfPair ? 2 : 4);
#pragma unroll
  for (int j = 0; j < kMmaN; j += kStep) {
    OperandTile<kOwnKeys, kStep> operands;
    if constexpr (kHasOperands) operands.load(p, offset, row, col + 8 * j);
    f(j, Constant<kStep>(), operands);
  }
}

// What an expression makes of one scaled product; templates, for other builds have none.
template <typename Real, typename Params>
FA_DEVICE ScoreAndSlope<Real> expression_of(const Params& p, const BatchOffsets& offsets, Real s,
                                            int query, int key) {
  return score_by_expression(p, offsets.bias, s, query, key);
}

// One score by itself.
FA_DEVICE float score_from_product(const AttentionParams& p, const BatchOffsets& offsets,
                                   float product, int row, int col) {
  if constexpr (!kScoreMod) return product;
  if constexpr (kExpression) return expression_of(p, offsets, p.scale * product, row, col).score;
  float x = kSoftcap ? softcap_by_exp2(p, p.softcap_scale * product) : p.scale * product;
  if constexpr (kHasBias) x += load_bias(p, offsets.bias, row, col);
  return x;
}

// The same in float64; without FA_SCORE_MOD, times the scale.
FA_DEVICE double score_from_product_f64(const AttentionParams& p, const BatchOffsets& offsets,
                                        double product, int row, int col) {
  if constexpr (kExpression)
    return expression_of<double>(p, offsets, p.scale * product, row, col).score;
  double x = kSoftcap ? p.softcap * tanh(0.25 * p.softcap_scale * product) : p.scale * product;
  if constexpr (kHasBias) x += load_bias<double>(p, offsets.bias, row, col);
  return x;
}

// The same with its slope.
FA_DEVICE ScoreAndSlope<float> score_and_slope_from_product(const AttentionParams& p,
                                                            const BatchOffsets& offsets,
                                                            float product, int row, int col) {
  if constexpr (kExpression) return expression_of(p, offsets, p.scale * product, row, col);
  const float score = score_from_product(p, offsets, product, row, col);
  if constexpr (!kSoftcap) return {score, 1.0f};
  return {score, softcap_slope(p, softcap_by_exp2(p, p.softcap_scale * product))};
}
