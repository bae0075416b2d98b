// What kernels of attention forward in float32 share that multiply pairs of float16: the softmax
// of tiles whose rows have exponents, and what follows the last tile.
//
// A warp has 16 rows of scores and of the output.  Tiles have statistics of their own, and so do
// the rows of V: what a tile adds to the output is brought to the output's units by a factor.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/forward_sm80.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/split_float.cuh"

// ---------------------------------------------------------------------------------------- softmax
// What a tile of weights is worth beside those before it.  The weights of a tile are relative to
// its own largest score.
//
// Only differences of scores are multiplied by p.exp2_scale, which brings them to units of log2:
// the products of scores of 1e5 would be rounded by up to 0.008, and weights be off by as much.
struct TileSums {
  float max[2], sum[2];  // of this thread's weights
};

// Finds the largest score of each row in a tile.
template <int kMmaN>
FA_DEVICE void find_max(const float (&s)[1][kMmaN][4], TileSums& tile) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = -FA_INFINITY;
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) most = fmaxf(most, fmaxf(s[0][j][2 * h], s[0][j][2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
    tile.max[h] = fmaxf(most, kNoMax);
    tile.sum[h] = 0.0f;
  }
}

// Turns scores into weights: P = exp2((S - max) * exp2_scale), where `max` is in the units of S.
template <int kMmaN>
FA_DEVICE void exponentiate(float (&s)[1][kMmaN][4], TileSums& tile, const float (&max)[2],
                            const float (&exp2_scale)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) {
        s[0][j][e] = ex2_approx_ftz((s[0][j][e] - max[h]) * exp2_scale[h]);
        tile.sum[h] += s[0][j][e];
      }
    }
  }
}

// The statistics of a thread's two rows, and the units of their outputs: O is 2^unit times what
// the registers hold.  Until finish_rows() a row_max is in units of products, or in natural ones of
// scores that are more than that.
struct Rows {
  OnlineSoftmax<1> softmax;
  int unit[2];
};

// Has a row computed again, by making its sum NaN, where pairs may have lost what counts.
//
// A number of less than 2^-25 of the largest of its row keeps fewer than 24 bits, and a product of
// it is off by up to 2^-kExactBits of the largest product that there might be.  These numbers are
// for low parts with a factor (split_float.cuh), and kExactBits = 50.  That counts only where all
// products are far smaller than that one: where large numbers meet zeros, or cancel.  An error of
// one term of up to 2^-26 of the largest score so far, or of 1, does not count.  `q_factor` is that
// of the warp's first row, `k_factor` those of the tile's keys.
template <int kExactBits, int kMmaN>
FA_DEVICE void check_range(const AttentionParams& params, const float* q_factor,
                           const float* k_factor, const float (&s)[1][kMmaN][4],
                           const float (&most)[2], const Rows& rows, TileSums& tile) {
  static_assert(kExactBits <= 56, "the limit is a shift");
  // Products are at most 2^30 times the square of `most`.
  const float scale = fabsf(kScoreMod ? params.scale : params.exp2_scale) *
                      static_cast<float>(1 << (30 - kExactBits + 26));
  float counts[2];
  bool is_suspect = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float largest = fmaxf(fabsf(tile.max[h]), rows.softmax.row_max[0][h]);
    counts[h] = fmaxf(1.0f, largest * params.exp2_scale);
    is_suspect = is_suspect || most[h] * most[h] * scale > counts[h];
  }
  if (!__any_sync(kFullWarp, is_suspect)) return;
  // Hidden keys may hold anything: only those that are seen count.
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float seen = 0.0f;
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool is_hidden = s[0][j][2 * h + e] == -FA_INFINITY;
        if (!is_hidden) seen = fmaxf(seen, k_factor[8 * j + 2 * (lane % 4) + e]);
      }
    }
    seen *= q_factor[lane / 4 + 8 * h];
    if (seen * seen * scale > counts[h]) tile.sum[h] = FA_NAN;
  }
}

// Makes 0 of the weights that are dropped, after they were added up.  first_row is the first of the
// warp's rows, first_key that of the tile's keys.
template <typename Shared, int kMmaN>
FA_DEVICE void drop_weights(const AttentionParams& params, const Shared& shared,
                            float (&s)[1][kMmaN][4], int first_row, int first_key) {
#if FA_DROPOUT
  uint32 kept[1][2];
  make_kept_bits<8 * kMmaN>(params.dropout, shared.dropout, first_row + tid_x_again() % 32 / 4,
                            first_key, kept);
  drop_by_bits(s, kept);
#endif
}

// The factor of a weight, of at most 1, before it is split: so that low parts of small weights are
// normal numbers.
constexpr int kWeightExponent = 14;

FA_DEVICE float clamped_power_of_two(int exponent) {
  return power_of_two(max(-127, min(127, exponent)));
}

// Multiplies weights by the factors of their rows of V, 2^e, relative to the largest that counts:
// that is 2^top for each row.  Rows of V are nearly always of about one size, and top is their
// largest exponent.  Where they are not, or one is of zeros, beside whose weight all others may be
// small, it is that of the row's largest weight times 2^e.
template <int kMmaN>
FA_DEVICE void weigh_by_exponents(const int* v_exponent, float (&s)[1][kMmaN][4], int (&top)[2]) {
  constexpr int kTileN = 8 * kMmaN;
  // Exponents are between -126 and 114; what is more than 2^-24 of the largest keeps 24 bits.
  constexpr int kOffset = 2000, kMostSpread = 20;
  const int lane = tid_x_again() % 32;
  uint32 highest = 0, lowest = 0;  // with an offset, for a reduction of unsigned integers
#pragma unroll
  for (int i = 0; i < (kTileN + 31) / 32; ++i) {
    const int exponent = v_exponent[(lane + 32 * i) % kTileN];
    highest = max(highest, static_cast<uint32>(exponent + kOffset));
    if (exponent != kNoExponent) lowest = max(lowest, static_cast<uint32>(kOffset - exponent));
  }
  highest = __reduce_max_sync(kFullWarp, highest);
  lowest = __reduce_max_sync(kFullWarp, lowest);
  const int* own = v_exponent + 2 * (lane % 4);
  top[0] = top[1] = static_cast<int>(highest) - kOffset;
  if (top[0] + static_cast<int>(lowest) - kOffset <= kMostSpread) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      const int2 exponents = *reinterpret_cast<const int2*>(own + 8 * j);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int exponent = e ? exponents.y : exponents.x;
        const float factor = power_of_two(max(-127, exponent - top[0] + kWeightExponent));
        s[0][j][e] *= factor;
        s[0][j][e + 2] *= factor;
      }
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int most = 2 * kNoExponent;
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float weight = s[0][j][2 * h + e];
        const int exponent = static_cast<int>(__float_as_uint(weight) >> 23) - 127;
        if (weight > 0.0f) most = max(most, exponent + own[8 * j + e]);
      }
    }
    most = max(most, __shfl_xor_sync(kFullWarp, most, 1));
    top[h] = max(most, __shfl_xor_sync(kFullWarp, most, 2));
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int exponent = own[8 * j + e] - top[h] + kWeightExponent;  // at most 140
        s[0][j][2 * h + e] *= clamped_power_of_two(exponent / 2);
        s[0][j][2 * h + e] *= clamped_power_of_two(exponent - exponent / 2);
      }
    }
  }
}

// Takes a tile of weights into the statistics.  Says what O is to be multiplied by, and what the
// tile's product with V.  Returns whether the former is other than 1 for some row of the warp.
//
// Both are powers of 2 times differences of maxima.  What is below 2^-126 of the row's largest
// weight is 0, as it would be in plain float32.
FA_DEVICE bool join_tile(Rows& rows, const TileSums& tile, const int (&top)[2], float exp2_scale,
                         float (&correction)[1][2], float (&factor)[2]) {
  constexpr float kLeast = -300.0f;
  bool changed = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float &row_max = rows.softmax.row_max[0][h], &row_sum = rows.softmax.row_sum[0][h];
    const float new_max = fmaxf(row_max, tile.max[h]);
    const float old_part = (row_max - new_max) * exp2_scale;
    const float new_part = (tile.max[h] - new_max) * exp2_scale;
    const int old_unit = rows.unit[h] + static_cast<int>(floorf(fmaxf(old_part, kLeast)));
    const int new_unit = top[h] + static_cast<int>(floorf(fmaxf(new_part, kLeast)));
    const int unit = max(old_unit, new_unit);
    const float old_weight = ex2_approx_ftz(old_part), new_weight = ex2_approx_ftz(new_part);
    correction[0][h] = old_weight * clamped_power_of_two(rows.unit[h] - unit);
    factor[h] = new_weight * clamped_power_of_two(top[h] - unit) * power_of_two(-kWeightExponent);
    row_sum = fmaf(row_sum, old_weight, tile.sum[h] * new_weight);
    row_max = new_max;
    rows.unit[h] = unit;
    changed = changed || correction[0][h] != 1.0f;
  }
  return __any_sync(kFullWarp, changed);
}

// --------------------------------------------------------------------------------------- epilogue
// Divides O by the sums of its rows and writes it.  first_row is the first of a thread's two rows.
template <int kMmaV>
FA_DEVICE void write_out(const AttentionParams& params, const Rows& rows,
                         const float (&o)[1][kMmaV][4], float* out, int first_row) {
  const int col = 2 * (threadIdx.x % 4);
  const bool pairs = params.aligned && params.v_dim % 2 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (first_row + 8 * h >= params.q_len) continue;
    float inverse = inverse_sum(rows.softmax.row_sum[0][h]);
    if constexpr (kDropout) inverse *= kept_factor(params);
    const int unit = rows.unit[h];
    const float half = clamped_power_of_two(unit / 2), rest = clamped_power_of_two(unit - unit / 2);
    float* to = out + static_cast<int64>(8 * h) * params.out_row + col;
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      const float x = o[0][j][2 * h] * inverse * half * rest;
      const float y = o[0][j][2 * h + 1] * inverse * half * rest;
      if (pairs) {
        if (8 * j + col < params.v_dim) {
          *reinterpret_cast<float2*>(to + 8 * j) = make_float2(x, y);
        }
      } else {
        if (8 * j + col < params.v_dim) to[8 * j] = x;
        if (8 * j + col + 1 < params.v_dim) to[8 * j + 1] = y;
      }
    }
  }
}

// Adds a row's sink and writes its log-sum-exp.  Both are sums in natural units, which lose nothing
// beside a large maximum.  Then row_max is in units of log2, as in softmax.cuh.
FA_DEVICE void finish_row(const AttentionParams& params, const TileWork& work, int row,
                          float& row_max, float& row_sum, float& correction) {
  if (!kScoreMod && row_max != kNoMax) row_max *= params.scale;
  correction = 1.0f;
  if (row >= params.q_len) return;
  if (params.sinks != nullptr) {
    correction = add_sink(load_sink(params, work.batch, row), row_max, row_sum, kLog2e);
  }
  if constexpr (kPacked || kLengths) {
    if (is_invalid_row(params, work, row)) row_sum = FA_NAN;
  }
  if (params.lse != nullptr && threadIdx.x % 4 == 0) {
    const float lse = row_max + kLn2 * lg2_approx_ftz(row_sum);
    params.lse[work.batch * params.q_len + row] = row_sum == 0.0f ? -FA_INFINITY : lse;
  }
  if (row_max != kNoMax) row_max = __fmul_rz(row_max, kLog2e);
}

// What follows the last tile.  `warp` counts those of the block that have rows.
template <bool kMasked, int kMmaV>
FA_DEVICE void finish_rows(const AttentionParams& params, const TileWork& work, Rows& rows,
                           float (&o)[1][kMmaV][4], int warp) {
  rows.softmax.reduce_row_sum();
  const int lane = threadIdx.x % 32;
  const int first_row = work.q_begin + 16 * warp + lane / 4;
  float correction[1][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + 8 * h;
    finish_row(params, work, row, rows.softmax.row_max[0][h], rows.softmax.row_sum[0][h],
               correction[0][h]);
  }
  if (params.sinks != nullptr) rescale_o(o, correction);
  uint32 recompute_lanes[1][2];
  const bool any_recompute =
      find_rows_to_recompute<kMasked>(params, work, rows.softmax, o, first_row, recompute_lanes);
  float* out = static_cast<float*>(params.out) + work.at.out;
  write_out(params, rows, o, out + static_cast<int64>(first_row) * params.out_row, first_row);
  if (any_recompute) {
    // All of such a row in float64: its sum belongs to a maximum that was not in units of log2.
    rows.softmax.row_sum[0][0] = rows.softmax.row_sum[0][1] = FA_NAN;
    recompute_rows<false, 8 * kMmaV, kMasked>(
        params, work, out + static_cast<int64>(work.q_begin) * params.out_row, rows.softmax,
        recompute_lanes, warp);
  }
}
