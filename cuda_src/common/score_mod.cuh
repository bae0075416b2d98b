// From a product q . k to a score: scale, softcap and bias.
//
// Without softcap and bias and with a positive scale nothing is done here: the softmax multiplies
// by the scale inside its exponent (exp2_scale = scale * log2(e)).  Otherwise (params.transform)
// scores leave here in units of log2, (softcap * tanh(scale * x) + bias) * log2(e) where the scale
// is divided by the softcap already, and exp2_scale is 1.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr double kLog2eDouble = 1.4426950408889634;
constexpr float kLn2 = 0.6931471805599453f;

// tanh to a relative error of 4e-7 (tanh.approx has 11 bits, too few beside 16-bit inputs).  Below
// 1/4 the quotient would lose what the softcap multiplies back in; there it is the Taylor series.
FA_DEVICE float tanh_by_exp2(float x) {
  if (fabsf(x) < 0.25f) {
    const float y = x * x;
    const float series =
        fmaf(fmaf(fmaf(62.0f / 2835.0f, y, -17.0f / 315.0f), y, 2.0f / 15.0f), y, -1.0f / 3.0f);
    return fmaf(x * y, series, x);
  }
  return 1.0f - 2.0f * rcp_rn(1.0f + ex2_approx_ftz(2.0f * kLog2e * x));
}

FA_DEVICE float apply_softcap(const AttentionParams& p, float product) {
  const float x = p.scale * product;
  return p.softcap > 0.0f ? p.softcap * tanh_by_exp2(x) : x;
}

// The same, and what it grows by for a step of scale * product.
struct CappedScore {
  float score, slope;
};

FA_DEVICE CappedScore apply_softcap_with_slope(const AttentionParams& p, float product) {
  const float x = p.scale * product;
  if (p.softcap <= 0.0f) return {x, 1.0f};
  const float y = tanh_by_exp2(x);
  return {p.softcap * y, fmaf(-y, y, 1.0f)};
}

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

// One score by itself, in the same units.
//
// A large bias is not multiplied by log2(e) on its own: two scores that are equal beside it would
// come out on either side of a rounding, far apart.  Rounding the product towards zero leaves it
// finite where the sum is: a bias of the lowest float32 hides no key from a row that has no other.
FA_DEVICE float score_from_product(const AttentionParams& p, const BatchOffsets& offsets,
                                   float product, int row, int col) {
  if (!p.has_score_mod) return product;
  float x = apply_softcap(p, product);
  if (p.bias != nullptr) {
    x += load_as_float(p.bias, offsets.bias + row * p.bias_row + col * p.bias_col, p.bias_kind);
  }
  return __fmul_rz(kLog2e, x);
}

// The same in float64 and without log2(e).
FA_DEVICE double score_from_product_f64(const AttentionParams& p, const BatchOffsets& offsets,
                                        double product, int row, int col) {
  double x = p.scale * product;
  if (p.softcap > 0.0f) x = p.softcap * tanh(x);
  if (p.bias != nullptr) {
    const int64 index = offsets.bias + row * p.bias_row + col * p.bias_col;
    x += load_as_float<double>(p.bias, index, p.bias_kind);
  }
  return x;
}

// Floats of shared memory that a warp needs for apply_score_mod: 16 rows of 32 columns.
constexpr int kScoreModFloats = 16 * 32;

// Applies score_from_product to the scores that a warp holds as accumulators of m16n8k16
// (ptx/mma_sync.cuh).  They go through shared memory, 16 x 32 at a time, so that a lane has a
// column of its own: a bias is then read in whole lines, and the loop need not be unrolled to keep
// the accumulators in registers.  Columns are stored at col ^ 8 * (row % 4), which keeps both the
// accumulators' pairs and the lanes' rows free of bank conflicts.
template <int kMmaM, int kMmaN>
FA_DEVICE void apply_score_mod(const AttentionParams& p, const BatchOffsets& offsets,
                               float (&s)[kMmaM][kMmaN][4], float* scratch, int warp_row,
                               int tile_col) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int first_fragment = 0; first_fragment < kMmaN; first_fragment += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = lane / 4 + 8 * h, col = (8 * j + lane % 4 * 2) ^ (row % 4 * 8);
          *reinterpret_cast<float2*>(&scratch[32 * row + col]) =
              make_float2(s[i][first_fragment + j][2 * h], s[i][first_fragment + j][2 * h + 1]);
        }
      }
      __syncwarp();
      const int col = tile_col + 8 * first_fragment + lane;
      const int rows = col < p.k_len ? min(16, p.q_len - warp_row - 16 * i) : 0;
#pragma unroll 1
      for (int row = 0; row < rows; ++row) {
        float& x = scratch[32 * row + (lane ^ (row % 4 * 8))];
        x = score_from_product(p, offsets, x, warp_row + 16 * i + row, col);
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = lane / 4 + 8 * h, col = (8 * j + lane % 4 * 2) ^ (row % 4 * 8);
          const float2 pair = *reinterpret_cast<const float2*>(&scratch[32 * row + col]);
          s[i][first_fragment + j][2 * h] = pair.x;
          s[i][first_fragment + j][2 * h + 1] = pair.y;
        }
      }
      __syncwarp();
    }
  }
}
