// float32 as pairs of float16, and the team of warps that turns rows in memory into such pairs.
//
//   x = 2^-s (high + 2^-11 low),  high = x 2^s rounded,  low = (x 2^s - high) 2^11 rounded,
//
// with one s for each row, which brings its largest finite number near 2^14.  A product of two such
// numbers is 2^-(s + s') (high high' + 2^-11 (high low' + low high')), with a relative error of
// 2^-22: three products of tensor cores, of which the last two share a sum.  Numbers down to 2^-25
// of the largest of their row keep both parts whole; what is 2^-50 of it or less becomes zero.
#pragma once
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/shared_tile.cuh"

constexpr float kLowScale = 2048.0f;           // 2^11
constexpr float kLowInverse = 1.0f / 2048.0f;  // 2^-11
constexpr float kLargest = 3.40282347e38f;     // of float32 (IEEE 754)
// Exponents of rows of V without a number, below all others: of one of zeros, whose weight may be
// far above those of the others, and of one that does not exist, whose weight is 0.
constexpr int kZeroExponent = -900, kNoExponent = -1000;

// 2^exponent, for an exponent between -127 (which gives 0) and 127 (IEEE 754).
FA_DEVICE float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// The exponent s of numbers whose largest magnitude is `most`.  It is even, so that half of it is
// an integer.
FA_DEVICE int split_exponent(float most) {
  const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
  return min(126, 14 - exponent) & ~1;
}

struct SplitPair {
  uint32 high, low;  // of two numbers each
};

FA_DEVICE SplitPair split(float x, float y) {
  const uint32 high = cvt_rn_f16x2_f32(x, y);
  const float x_low = (x - cvt_f32_f16(static_cast<uint16>(high))) * kLowScale;
  const float y_low = (y - cvt_f32_f16(static_cast<uint16>(high >> 16))) * kLowScale;
  return {high, cvt_rn_f16x2_f32(x_low, y_low)};
}

// A sum of products of pairs, as two accumulators of tensor cores.
struct SplitSum {
  float main[4], cross[4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < 4; ++e) main[e] = cross[e] = 0.0f;
  }
  __device__ __forceinline__ float value(int e) const {
    return fmaf(cross[e], kLowInverse, main[e]);
  }
};

// Eight neighbouring lanes share a row, four columns of every 32 each.  The rows of a warp are such
// that its 8-byte stores meet no bank conflict.
template <typename Tile>
FA_DEVICE int split_row(uint32 tid) {
  const uint32 warp = tid / 32, quarter = tid % 32 / 8;
  if (Tile::kBlockChunks == 8) return warp / 2 * 8 + warp % 2 * 2 + quarter % 2 * 4 + quarter / 2;
  return warp * 4 + quarter;
}

// A thread's part of kRows rows, in registers from the start of its loads until the pairs have been
// written to shared memory.  With kEights it has eight neighbouring columns of every 64: a chunk of
// 16 bytes of high parts, and one of low ones.
template <int kRows, int kCols, int kWarps, bool kEights = false>
struct FloatChunk {
  using Tile = SharedTile<kRows, kCols>;
  static constexpr int kStep = 4 * kWarps;  // rows that the team covers at once
  static constexpr int kGroups = kRows / kStep;
  static constexpr int kFours = kCols / 32;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "every thread has as many rows");
  float x[kGroups][kFours][4];

  // Where four columns begin, counted from the thread's first one.
  static constexpr __device__ __forceinline__ int column(int four) {
    return kEights ? four / 2 * 64 + four % 2 * 4 : 32 * four;
  }

  // From this thread's first row and column on, of which `rows` and `cols` exist; the rest becomes
  // zero.  With `whole`, any four columns are 16 aligned bytes of which all or none exist.
  __device__ __forceinline__ void load(const float* from, int row_stride, int rows, int cols,
                                       bool whole) {
    if (whole) {
      for_each(from, row_stride, rows, cols, [](float (&to)[4], const float* address, int count) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (count > 0) four = *reinterpret_cast<const float4*>(address);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      });
    } else {
      for_each(from, row_stride, rows, cols, [](float (&to)[4], const float* address, int count) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = e < count ? address[e] : 0.0f;
      });
    }
  }

  // The exponent s of a row.
  __device__ __forceinline__ int exponent(int group) const {
    return split_exponent(largest(group));
  }

  // The largest magnitude among the finite numbers of a row.
  __device__ __forceinline__ float largest(int group) const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kFours; ++i) most = fmaxf(most, fabsf(x[group][i / 4][i % 4]));
    most = max_over_row(most);
    if (__any_sync(kFullWarp, most > kLargest)) {  // infinity: find the largest finite number
      most = 0.0f;
#pragma unroll
      for (int i = 0; i < 4 * kFours; ++i) {
        const float one = fabsf(x[group][i / 4][i % 4]);
        if (one <= kLargest) most = fmaxf(most, one);
      }
      most = max_over_row(most);
    }
    return most;
  }

  // Writes a row to a tile of high parts, which is followed by one of low parts.  The thread index
  // is read again, so that no register holds it meanwhile (ptx/special.cuh).
  __device__ __forceinline__ void store(uint32 tile, int group, int exponent) const {
    const uint32 tid = tid_x_again(), lane = tid % 8;
    const uint32 to = tile + Tile::lane_offset(split_row<Tile>(tid), lane / 2) + lane % 2 * 8;
    const float scale = power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float (&four)[4] = x[group][i];
      const SplitPair first = split(four[0] * scale, four[1] * scale);
      const SplitPair second = split(four[2] * scale, four[3] * scale);
      const uint32 at = Tile::at(to, group * kStep, 2 * i);
      st_shared_v2_b32(at, first.high, second.high);
      st_shared_v2_b32(at + kRows * kCols * 2, first.low, second.low);
    }
  }

  // Whether all numbers of this thread are finite.
  __device__ __forceinline__ bool finite() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kGroups * kFours; ++i) {
      sum = fmaf(x[i / (4 * kFours)][i / 4 % kFours][i % 4], 0.0f, sum);
    }
    return sum == 0.0f;
  }

 private:
  static __device__ __forceinline__ float max_over_row(float most) {
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
    return fmaxf(most, __shfl_xor_sync(kFullWarp, most, 4));
  }

  template <typename Visit>
  __device__ __forceinline__ void for_each(const float* from, int row_stride, int rows, int cols,
                                           Visit visit) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        visit(x[g][i], from + column(i), g * kStep < rows ? cols - column(i) : 0);
      }
      from += static_cast<int64>(kStep) * row_stride;
    }
  }
};
