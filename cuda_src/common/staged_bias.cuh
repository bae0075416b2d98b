// A bias of pairs on its way through shared memory.  Loaded to registers, an instruction would
// touch eight rows for 16 or 32 bytes of each.  Each warp copies what its own threads read, so that
// no barrier is needed but the warp's.
#pragma once
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

// Where 8 keys of a row lie in a stage of kRows queries and kCols keys of 16 bits.
template <int kRows, int kCols, int kBytes>
struct BiasStage : SharedTile<kRows, kCols> {
  using Element = uint16;
};
// Where 4 keys of 32 bits lie.  A half of a warp reads 8 bytes of each of two chunks and four rows
// at a time, which then cover all banks.
template <int kRows, int kCols>
struct BiasStage<kRows, kCols, 4> {
  using Element = uint32;
  static_assert(kCols % 32 == 0, "chunks trade places within 128 bytes");
  static __device__ __forceinline__ uint32 offset(int row, int chunk) {
    return static_cast<uint32>(row * (4 * kCols) + ((chunk ^ (row & 3) << 1) << 4));
  }
};

// The same with 16 keys of a row, for threads that have keys as rows and queries as columns.  Two
// rows are in 128 bytes, whose pairs of chunks change places with each pair of rows: of a warp that
// reads 8 keys of every second row, each four rows lie in different banks.
template <int kRows>
struct BiasStage<kRows, 16, 4> {
  using Element = uint32;
  static __device__ __forceinline__ uint32 offset(int row, int chunk) {
    const int pair = row / 2, place = (row % 2 * 4 + chunk) ^ (pair % 4 * 2);
    return static_cast<uint32>(pair * 128 + (place << 4));
  }
};

// Whether rows of the bias that begins at `offset` are aligned to 16 bytes.
FA_DEVICE bool has_aligned_rows(const AttentionParams& p, int64 offset) {
  const uint64 first = reinterpret_cast<uint64>(p.bias) + offset * (kBiasIs16Bit ? 2 : 4);
  return (p.bias_pairs >> 2 & 1) && first % 16 == 0;
}

// Starts to copy the bias of kRows queries and kCols keys to a warp's stage, as a group of
// cp.async.  Of rows past the last one the last one is copied, of keys zeros.  Where rows are not
// aligned nothing is copied.  Builds that are for aligned rows have this branch, too: without it
// the copies are scheduled among products, and fwd_sm90 spills 20 bytes more at head_dim 128.
template <int kRows, int kCols>
FA_DEVICE void stage_bias(const AttentionParams& p, int64 offset, uint32 stage, int row,
                          int first_col) {
  constexpr int kBytes = kBiasIs16Bit ? 2 : 4;
  constexpr int kChunkCols = 16 / kBytes, kChunks = kCols / kChunkCols;
  using Stage = BiasStage<kRows, kCols, kBytes>;
  using Element = typename Stage::Element;
  const Element* first = static_cast<const Element*>(p.bias) + offset;
  const int lane = threadIdx.x % 32;
  if (has_aligned_rows(p, offset)) {
#pragma unroll
    for (int i = 0; i < kRows * kChunks / 32; ++i) {
      const int own = (32 * i + lane) / kChunks, chunk = (32 * i + lane) % kChunks;
      const int col = first_col + kChunkCols * chunk;
      const uint32 bytes = max(0, min(16, kBytes * (p.k_len - col)));
      const Element* from =
          first + min(row + own, p.q_len - 1) * p.bias_row + (bytes > 0 ? col : 0);
      cp_async_cg_16(stage + Stage::offset(own, chunk), from, bytes);
    }
  }
  cp_async_commit_group();
}

// Waits until this warp's copies have landed, but for the kLater latest groups.
template <int kLater>
FA_DEVICE void wait_for_staged_bias() {
  cp_async_wait_group<kLater>();
  __syncwarp();
}

// Reads the bias of 16 queries from `row` on and of some keys, from 8 * j on, from a stage that has
// been copied.
template <int kRows, int kCols, typename Bias>
FA_DEVICE void read_staged_bias(Bias& bias, uint32 stage, int row = 0, int j = 0) {
  using Stage = SharedTile<kRows, kCols>;
  const int lane = threadIdx.x % 32;
  const uint32 address = stage + Stage::lane_offset(lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < static_cast<int>(sizeof(bias.bits) / sizeof(bias.bits[0])) / 2;
       ++step) {
    uint32 found[4];
    ldmatrix_x4(found, Stage::at(address, row, j / 2 + step));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bias.bits[2 * step][h][0] = found[h];
      bias.bits[2 * step + 1][h][0] = found[2 + h];
    }
  }
}

// The same of 32 bits, of a stage of 16 queries.
template <int kCols, typename Bias>
FA_DEVICE void read_staged_bias_fp32(Bias& bias, const uint8* stage, int j) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(bias.bits) / sizeof(bias.bits[0])); ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32 chunk =
          BiasStage<16, kCols, 4>::offset(lane / 4 + 8 * h, 2 * (j + i) + lane / 2 % 2);
      const uint2 two = *reinterpret_cast<const uint2*>(stage + chunk + lane % 2 * 8);
      bias.bits[i][h][0] = two.x;
      bias.bits[i][h][1] = two.y;
    }
  }
}

// The same of 16 bits, of a tile whose rows are 16 keys, from `key` on, and of all queries of the
// stage.
template <int kRows, int kCols, typename Bias>
FA_DEVICE void read_staged_bias_of_keys(Bias& bias, uint32 stage, int key = 0) {
  using Stage = SharedTile<kRows, kCols>;
  const int lane = static_cast<int>(opaque(threadIdx.x) % 32);
  const uint32 address = stage + Stage::offset(lane / 16 * 8 + lane % 8, key / 8 + lane / 8 % 2);
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {
    uint32 found[4];
    ldmatrix_x4_trans(found, address + j * 8 * Stage::kRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) bias.bits[j + i / 2][i % 2][0] = found[i];
  }
}

// The same of 32 bits, of a tile whose rows are 16 keys, and of queries from 8 * j on.
template <typename Bias>
FA_DEVICE void read_staged_bias_of_keys_fp32(Bias& bias, const uint8* stage, int j) {
  using Stage = BiasStage<8, 16, 4>;
  const int lane = static_cast<int>(opaque(threadIdx.x) % 32);
  const uint32 first = Stage::offset(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(bias.bits) / sizeof(bias.bits[0])); ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // The other query is four chunks further, the other 8 keys two: bits that are 0 before
        // chunks change places, which is a XOR as well.
        const uint32 own = (first ^ (4 * e + 2 * h) << 4) + (j + i) * 8 * 64;
        bias.bits[i][h][e] = *reinterpret_cast<const uint32*>(stage + own);
      }
    }
  }
}
