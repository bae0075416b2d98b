// The state of a causal product in registers (cuda_src/common/chunk_state.cuh), with float32 rows
// that come as pairs of float16 (cuda_src/common/split_float.cuh).
//
// A warp owns 16 value columns.  As an operand, the state has an exponent for each of them.
#pragma once
#include "cuda_src/common/chunk_state.cuh"
#include "cuda_src/common/split_float.cuh"

FA_DEVICE void mma_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  mma_m16n8k16_f32_f16(d, a, b0, b1);
}

// Factors that give the outer products of all rows of a chunk one exponent, `most`: 2^(e - most)
// for rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16, each as two factors that float16 holds.
// Products of 2^-40 of the chunk's largest or less vanish.
struct RowFactors {
  uint32 first[2], second[2];

  __device__ __forceinline__ RowFactors(const int* exponents, int most) {
    const int t = tid_x_again() & 3;  // read again, so that no register holds it (ptx/special.cuh)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2], y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int shift = max(-48, exponents[8 * h + 2 * t + e] - most);
        x[e] = power_of_two(shift / 2);
        y[e] = power_of_two(shift - shift / 2);
      }
      first[h] = cvt_rn_f16x2_f32(x[0], x[1]);
      second[h] = cvt_rn_f16x2_f32(y[0], y[1]);
    }
  }

  // Multiplies the registers of an A operand with these rows along k.
  __device__ __forceinline__ void multiply(uint32 (&v)[4]) const {
    constexpr uint32 kMinusZeros = 0x80008000;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      v[r] = fma_rn_f16x2(v[r], first[r / 2], kMinusZeros);
      v[r] = fma_rn_f16x2(v[r], second[r / 2], kMinusZeros);
    }
  }
};

// The largest exponent of a chunk.  All are above -512, so the sum is not negative, as the
// reduction of unsigned integers needs it.
template <int kChunk>
FA_DEVICE int largest_exponent(const int* exponents) {
  uint32 most = 0;
#pragma unroll
  for (int i = 0; i < kChunk; i += 32) {
    most = max(most, static_cast<uint32>(exponents[i + (tid_x_again() & 31)] + 512));
  }
  return static_cast<int>(__reduce_max_sync(kFullWarp, most)) - 512;
}

template <int kDim, int kChunk, int kCols>
struct SplitState : ChunkState<false, SharedTile<kChunk, kDim>, kDim, kChunk, 1> {
  using KTile = SharedTile<kChunk, kDim>;
  using VTile = SharedTile<kChunk, kCols>;
  static constexpr int kMmaR = kChunk / 16;
  // Blocks of 16 key columns that are summed at once.  The products of one sum wait for each other.
  // Wider states have more warps to hide that, and no registers to spare.
  static constexpr int kInFlight = kDim > 64 ? 1 : 2;

  // S = S + U with U = K^T V of a chunk.  `exponents`: row j of K times row j of V is 2^e times the
  // product of their rows in the tiles.
  __device__ __forceinline__ void add(const int* exponents, uint32 k_address, uint32 v_address) {
    constexpr uint32 kLowK = kChunk * kDim * 2, kLowV = kChunk * kCols * 2;
    const int most = largest_exponent<kChunk>(exponents);
    uint32 high[kMmaR][4], low[kMmaR][4];
#pragma unroll
    for (int c = 0; c < kMmaR; ++c) {
      ldmatrix_x4_trans(high[c], VTile::at(v_address, 16 * c, 0));
      ldmatrix_x4_trans(low[c], VTile::at(v_address + kLowV, 16 * c, 0));
      const RowFactors factors(exponents + 16 * c, most);
      factors.multiply(high[c]);
      factors.multiply(low[c]);
    }
    const float factor = power_of_two(most / 2), rest = power_of_two(most - most / 2);
#pragma unroll
    for (int j = 0; j < kDim / 16; j += kInFlight) {
      SplitSum u[2 * kInFlight];
#pragma unroll
      for (int n = 0; n < 2 * kInFlight; ++n) u[n].clear();
#pragma unroll
      for (int c = 0; c < kMmaR; ++c) {
        uint32 b[kInFlight][4], b_low[kInFlight][4];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          ldmatrix_x4_trans(b[i], KTile::at(k_address, 16 * c, j + i));
          ldmatrix_x4_trans(b_low[i], KTile::at(k_address + kLowK, 16 * c, j + i));
        }
#pragma unroll
        for (int n = 0; n < 2 * kInFlight; ++n) {
          mma_f16(u[n].cross, low[c], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
#pragma unroll
        for (int n = 0; n < 2 * kInFlight; ++n) {
          mma_f16(u[n].main, high[c], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
#pragma unroll
        for (int n = 0; n < 2 * kInFlight; ++n) {
          mma_f16(u[n].cross, high[c], b_low[n / 2][n % 2 * 2], b_low[n / 2][n % 2 * 2 + 1]);
        }
      }
      // Without this barrier the compiler would move the loads of later steps up, which need
      // registers.
      if (kInFlight == 1) __syncwarp();
#pragma unroll
      for (int n = 0; n < 2 * kInFlight; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& s = this->s[2 * j + n][e];
          s = fmaf(u[n].value(e) * factor, rest, s);
        }
      }
    }
  }

  // Sets value column g + 8 h to NaN.
  __device__ __forceinline__ void poison_column(int h) {
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) this->s[i / 2][2 * h + i % 2] = __int_as_float(0x7fc00000);
  }

  // The exponents s of this lane's value columns, g and g + 8.
  __device__ __forceinline__ void exponents(int (&own)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = 0.0f;
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        most = fmaxf(most, fabsf(this->s[i / 2][2 * h + i % 2]));
      }
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
      own[h] = split_exponent(fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2)));
    }
  }

  // B operands of key columns 16 j to 16 j + 15: [n][r], of value columns 8 n to 8 n + 7.
  __device__ __forceinline__ void operand(SplitPair (&b)[2][2], int j, const float (&scale)[2]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* pair = &this->s[2 * j + r][2 * n];
        b[n][r] = split(pair[0] * scale[n], pair[1] * scale[n]);
      }
    }
  }
};
