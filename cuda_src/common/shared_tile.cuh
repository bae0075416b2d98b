// A tile of 16-bit elements in shared memory, swizzled so that ldmatrix and 16-byte stores meet no
// bank conflict.
//
// The tile is cut into column blocks of 64 elements (128 bytes; 32 or 16 elements, 64 or 32 bytes,
// where 64 does not divide the width), each stored row after row.  The 16-byte chunk c of row r is
// at c ^ (r & 7): eight rows at one chunk then cover all 32 banks.  Blocks of 64 bytes put two rows
// into one 128-byte line: there it is c ^ ((r >> 1) & 3), and c ^ ((r >> 2) & 1) in blocks of 32.
// It is the layout that TMA's swizzle of as many bytes makes: PTX ISA 5.5.7 "Swizzling Modes".
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"

template <int kRows, int kCols>
struct SharedTile {
  static constexpr int kBlockCols = kCols % 64 == 0 ? 64 : kCols % 32 == 0 ? 32 : 16;
  static constexpr int kBlockChunks = kBlockCols / 8;
  static constexpr int kRowChunks = kCols / 8;
  static_assert(kCols % 16 == 0 && kRows % 8 == 0, "a swizzled tile is whole in both directions");

  static constexpr int kRowBytes = kBlockCols * 2;
  static constexpr int kBlockBytes = kRows * kRowBytes;
  static constexpr int kBytes = kRows * kCols * 2;

  static __device__ __forceinline__ int swizzle(int row) {
    return kBlockChunks == 8 ? row & 7 : kBlockChunks == 4 ? row >> 1 & 3 : row >> 2 & 1;
  }

  // Byte offset of a 16-byte chunk.
  static __device__ __forceinline__ uint32 offset(int row, int chunk) {
    const int block = chunk / kBlockChunks, in_block = chunk % kBlockChunks;
    return static_cast<uint32>(block * kBlockBytes + row * kRowBytes +
                               ((in_block ^ swizzle(row)) << 4));
  }

  // The same in two parts, for chunk 2 * pair + half: what depends on the lane, computed once, and
  // what the unrolled loops step through.  Since 2 * pair has no bit in common with half, its part
  // of the swizzle is one more XOR, and tiles that start at a multiple of 128 bytes let it act on
  // the whole address.  Rows may be added in multiples of 8.
  static __device__ __forceinline__ uint32 lane_offset(int row, int half) {
    return static_cast<uint32>(row * kRowBytes + ((half ^ swizzle(row)) << 4));
  }
  static __device__ __forceinline__ uint32 at(uint32 lane_address, int row, int pair) {
    const int block = 2 * pair / kBlockChunks, in_block = 2 * pair % kBlockChunks;
    return (lane_address ^ static_cast<uint32>(in_block << 4)) +
           static_cast<uint32>(block * kBlockBytes + row * kRowBytes);
  }
};

// Asks for rows [row_begin, rows) of a global matrix, columns [0, cols); the rest of the tile
// becomes zero.  All threads of the block take part: a thread keeps one chunk column of every
// column block and walks down the rows, so its addresses are one running pointer.  Where rows are
// not aligned to 16 bytes the copy is made of 2-byte loads and done on return; otherwise it is this
// thread's part of a cp.async group.
template <int kRows, int kCols, int kThreads>
FA_DEVICE void load_tile(uint32 tile, const uint16* source, int row_stride, int row_begin, int rows,
                         int cols, bool aligned) {
  using Tile = SharedTile<kRows, kCols>;
  constexpr int kStep =
      kThreads / Tile::kBlockChunks;  // rows that the block of threads covers at once
  static_assert(kRows % kStep == 0 && kStep % 8 == 0,
                "every thread copies as many chunks, at one swizzle");
  const int tid = tid_x_again();
  const int first_row = tid / Tile::kBlockChunks, first_chunk = tid % Tile::kBlockChunks;
  const uint32 to = tile + Tile::offset(first_row, first_chunk);
  source += static_cast<int64>(row_begin + first_row) * row_stride + first_chunk * 8;
  const int valid_rows = rows - row_begin - first_row, valid_cols = cols - first_chunk * 8;
  if (aligned) {
#pragma unroll
    for (int row = 0; row < kRows; row += kStep) {
#pragma unroll
      for (int block = 0; block < kCols / Tile::kBlockCols; ++block) {
        const int bytes =
            row < valid_rows ? max(0, min(16, 2 * (valid_cols - block * Tile::kBlockCols))) : 0;
        cp_async_cg_16(to + Tile::offset(row, block * Tile::kBlockChunks),
                       source + block * Tile::kBlockCols, bytes);
      }
      source += static_cast<int64>(kStep) * row_stride;
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < kRows; row += kStep) {
#pragma unroll 1
      for (int block = 0; block < kCols / Tile::kBlockCols; ++block) {
        const int count = row < valid_rows ? valid_cols - block * Tile::kBlockCols : 0;
        const uint16* from = source + block * Tile::kBlockCols;
        uint32 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32 low = 2 * w < count ? from[2 * w] : 0;
          const uint32 high = 2 * w + 1 < count ? from[2 * w + 1] : 0;
          words[w] = low | high << 16;
        }
        st_shared_v4_b32(to + Tile::offset(row, block * Tile::kBlockChunks), words);
      }
      source += static_cast<int64>(kStep) * row_stride;
    }
  }
}

// One warp writes rows [row_begin, row_begin + kCount) of a shared tile to a global matrix.
template <int kRows, int kCols, int kCount>
FA_DEVICE void store_rows(uint32 tile, uint16* target, int row_stride, int row_begin,
                          int valid_rows, int valid_cols, bool aligned) {
  using Tile = SharedTile<kRows, kCols>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int index = lane; index < kCount * Tile::kRowChunks; index += 32) {
    const int row = row_begin + index / Tile::kRowChunks, chunk = index % Tile::kRowChunks;
    const int cols = row < valid_rows ? valid_cols - chunk * 8 : 0;
    if (cols <= 0) continue;
    uint32 words[4];
    ld_shared_v4_b32(words, tile + Tile::offset(row, chunk));
    uint16* to = target + static_cast<int64>(row) * row_stride + chunk * 8;
    if (aligned && cols >= 8) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < cols) to[i] = static_cast<uint16>(words[i / 2] >> (i % 2 * 16));
      }
    }
  }
}
