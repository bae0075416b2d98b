// Rows of float32 in shared memory, as TMA brings them, turned into pairs of float16 there.
//
//   x = 2^-s (high + low),  high = x 2^s rounded,  low = x 2^s - high rounded,
//
// with one s for each row, as in split_float.cuh, but without a factor for low parts, so that one
// accumulator takes all three products of two pairs.  Numbers down to 2^-17 of the largest of their
// row keep both parts whole (below, low parts are subnormal); what is 2^-39 of it or less becomes
// zero.
#pragma once
#include "cuda_src/common/split_float.cuh"

// x and y as pairs: their rounded values, and the rounded remainders, which may have a factor.
FA_DEVICE SplitPair split_near(float x, float y, float low_scale = 1.0f) {
  const uint32 high = cvt_rn_f16x2_f32(x, y);
  const float x_low = x - cvt_f32_f16(static_cast<uint16>(high));
  const float y_low = y - cvt_f32_f16(static_cast<uint16>(high >> 16));
  return {high, cvt_rn_f16x2_f32(x_low * low_scale, y_low * low_scale)};
}

// Writes a part of a row, eight neighbouring columns of every 64 (FloatChunk), to a tile of
// high parts, and to one of low parts behind it if kParts is 2.
template <typename Tile, int kParts, int kFours>
FA_DEVICE void store_near(uint8* tile, const float (&x)[kFours][4], int row, float scale,
                          float low_scale = 1.0f) {
#pragma unroll
  for (int i = 0; i < kFours / 2; ++i) {
    SplitPair pair[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* two = &x[2 * i + e / 2][e % 2 * 2];
      pair[e] = split_near(two[0] * scale, two[1] * scale, low_scale);
    }
    uint8* to = tile + Tile::offset(row, 8 * i + threadIdx.x % 8);
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pair[0].high, pair[1].high, pair[2].high, pair[3].high);
    if constexpr (kParts == 2) {
      *reinterpret_cast<uint4*>(to + Tile::kBytes) =
          make_uint4(pair[0].low, pair[1].low, pair[2].low, pair[3].low);
    }
  }
}

// The largest number of a row, which eight neighbouring lanes share.
FA_DEVICE float max_over_row(float most) {
  most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
  most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
  return fmaxf(most, __shfl_xor_sync(kFullWarp, most, 4));
}

// A warpgroup turns kRows rows into pairs.  It reads boxes of 32 columns and writes a tile of high
// parts, followed by a tile of low parts; a thread holds kInFlight rows in registers at once.
// `own`:  the exponents s of this thread's rows, every 16th row.  Returns whether all numbers of
// the thread are finite.
//
// With kInPlace the tiles overwrite the boxes.  A row of pairs then takes the bytes of the same
// row, which the eight lanes that share it hold in registers.
template <int kRows, int kBoxes, int kInFlight, bool kInPlace = false>
FA_DEVICE bool split_rows(int (&own)[kRows / 16], const uint8* boxes, const uint8* tile) {
  using Tile = SharedTile<kRows, 32 * kBoxes>;
  const int lane = threadIdx.x % 8, row = split_row<Tile>(threadIdx.x % 128);
  // Boxes have rows of 128 bytes, swizzled (PTX ISA 5.5.7 "Swizzling Modes").
  const uint32 from = cvta_to_shared(boxes) + row * 128 + ((lane ^ (row & 7)) << 4);
  const uint32 to = cvta_to_shared(tile) + Tile::lane_offset(row, lane / 2) + lane % 2 * 8;
  float sum = 0.0f;
#pragma unroll
  for (int first = 0; first < kRows / 16; first += kInFlight) {
    float x[kInFlight][4 * kBoxes], most[kInFlight];
    bool hidden = false;
#pragma unroll
    for (int i = 0; i < kInFlight * kBoxes; ++i) {
      uint32 words[4];
      ld_shared_v4_b32(words, from + (first + i / kBoxes) * (16 * 128) + i % kBoxes * kRows * 128);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[i / kBoxes][i % kBoxes * 4 + e] = __int_as_float(static_cast<int>(words[e]));
      }
    }
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      most[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < 4 * kBoxes; ++i) {
        most[r] = fmaxf(most[r], fabsf(x[r][i]));
        sum = fmaf(x[r][i], 0.0f, sum);
      }
    }
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      most[r] = max_over_row(most[r]);
      hidden = hidden || most[r] > kLargest;
    }
    if (__any_sync(kFullWarp, hidden)) {  // infinity: find the largest finite number
#pragma unroll
      for (int r = 0; r < kInFlight; ++r) {
        most[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * kBoxes; ++i) {
          if (fabsf(x[r][i]) <= kLargest) most[r] = fmaxf(most[r], fabsf(x[r][i]));
        }
        most[r] = max_over_row(most[r]);
      }
    }
    if (kInPlace) __syncwarp();
#pragma unroll
    for (int r = 0; r < kInFlight; ++r) {
      own[first + r] = split_exponent(most[r]);
      const float scale = power_of_two(own[first + r]);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const float* four = &x[r][4 * box];
        const SplitPair one = split_near(four[0] * scale, four[1] * scale);
        const SplitPair two = split_near(four[2] * scale, four[3] * scale);
        const uint32 at = Tile::at(to, 16 * (first + r), 2 * box);
        st_shared_v2_b32(at, one.high, two.high);
        st_shared_v2_b32(at + kRows * kBoxes * 64, one.low, two.low);
      }
    }
  }
  return sum == 0.0f;
}
