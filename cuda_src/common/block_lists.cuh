// Which blocks of 128 queries x 128 keys a mask leaves, and the bits of those that it leaves in
// part.
//
// A row of blocks is 128 queries of one of the mask's matrices; it lists key blocks that are seen
// whole (full) and key blocks of which bits say what is seen (partial), each list in ascending
// order.  What is in neither list is hidden.  A full block may stick out of the matrix, the bits of
// a partial one are 0 out there.
//
// A partial block is 512 words in fragment order (fa_cupy/layouts.py): slab s of 16 rows, lane l
// and half i have one word, of row 16 s + l / 4 + 8 i, whose bit b is column 8 (b >> 1) + 2 (l % 4)
// + (b & 1).  So register 2 h + e of the j-th accumulator of m16n8 (or of m64nN) of a lane finds
// its bit in bit 2 j + e of word [slab][lane][h].
#pragma once
#include "ptx/types.cuh"

// fa_cupy/gpu/kernels/attention/attention_params.py holds the same fields in the same order.
struct MaskLists {
  const int64* partial_begin;  // row t lists partial[partial_begin[t]] up to partial_end[t]
  const int64* partial_end;
  const int* partial;   // key blocks
  const uint32* words;  // kBlockWords of them a block
  const int64* full_begin;
  const int64* full_end;
  const int* full;             // key blocks
  const int* matrix_of_entry;  // of each batch entry: the mask's matrix; null: there is no mask
  const int* order;      // i-th work: row of blocks, batch entry * blocks of queries + block; null:
                         // as without a mask
  int64 words_by_block;  // 0: words lie as the partial list does; else key block c of row t has the
                         // words of place t * words_by_block + c
};

constexpr int kMaskBlock = 128;   // rows and columns of a block
constexpr int kBlockWords = 512;  // 32-bit words of a block
constexpr int kSlabWords = 64;    // of 16 rows

FA_DEVICE bool is_masked(const MaskLists& mask) { return mask.matrix_of_entry != nullptr; }

FA_DEVICE int mask_blocks(int len) { return (len + kMaskBlock - 1) / kMaskBlock; }

// The row of blocks that a query row of a batch entry (over all batch axes) is in.
FA_DEVICE int64 row_of_blocks(const MaskLists& mask, int64 batch, int row, int q_len) {
  return static_cast<int64>(mask.matrix_of_entry[batch]) * mask_blocks(q_len) + row / kMaskBlock;
}

// What one row of blocks lists: [begin, end) of each list.
struct ListedBlocks {
  int64 partial_begin, partial_end;
  int64 full_begin, full_end;
};

FA_DEVICE ListedBlocks listed_blocks(const MaskLists& mask, int64 t) {
  return {mask.partial_begin[t], mask.partial_end[t], mask.full_begin[t], mask.full_end[t]};
}

// The words of the block at a place of the partial list, in row t, which is key block `block`.
FA_DEVICE const uint32* block_words(const MaskLists& mask, int64 t, int64 position, int block) {
  return mask.words +
         kBlockWords * (mask.words_by_block == 0 ? position : t * mask.words_by_block + block);
}

// The first place in list[begin] to list[end - 1], which ascends, whose block is at least `block`;
// `end` if there is none.  All lanes of a warp look, kLanes of them together for the same, at so
// many places at a time.
template <int kLanes = 32>
FA_DEVICE int64 lower_bound(const int* list, int64 begin, int64 end, int block) {
  const int lane = threadIdx.x % kLanes, first_lane = threadIdx.x % 32 / kLanes * kLanes;
  constexpr uint32 kOwn = kFullWarp >> (32 - kLanes);
  while (__any_sync(kFullWarp, begin < end)) {
    const int64 step = max((end - begin + kLanes - 1) / kLanes, int64(1));
    const int64 position = begin + (lane + 1) * step - 1;
    const bool before = position < end && list[position] < block;
    const int64 skipped = __popc(__ballot_sync(kFullWarp, before) >> first_lane & kOwn) * step;
    begin += skipped;
    end = min(end, begin + step - 1);
  }
  return begin;
}

// The same in tiles of 128 / kTilesPerBlock keys: counted in tiles from the list's first place, the
// first tile that is tile `tile` of the keys or a later one.
template <int kTilesPerBlock>
FA_DEVICE int64 lower_bound_tile(const int* list, int64 begin, int64 end, int tile) {
  const int block = tile / kTilesPerBlock;
  const int64 position = lower_bound(list, begin, end, block);
  const bool band_bits = position < end && list[position] == block;
  return position * kTilesPerBlock + (band_bits ? tile % kTilesPerBlock : 0);
}

// Bit of one element of a block, for whoever looks at elements one by one.
FA_DEVICE bool block_bit(const uint32* words, int row, int col) {
  const int lane = row % 8 * 4 + col % 8 / 2;
  return words[row / 16 * kSlabWords + 2 * lane + row % 16 / 8] >> (col / 8 * 2 + col % 2) & 1;
}

FA_DEVICE void set_all_visible(uint32 (&words)[2]) {
#pragma unroll
  for (uint32& word : words) word = ~0u;
}

// Hides, among the scores that a thread holds as accumulators of m16n8, what its words say.  Bit 0
// of a word is the first column of the tile: who has only a part of a block shifts the words.
template <int kMmaM, int kMmaN, typename Real>
FA_DEVICE void mask_by_bits(Real (&s)[kMmaM][kMmaN][4], const uint32 (&words)[kMmaM][2]) {
  static_assert(2 * kMmaN <= 32, "a bit for each column");
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // word by word: R2P then makes predicates of seven bits at once
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((words[i][h] >> (2 * j + e) & 1) == 0) s[i][j][2 * h + e] = -FA_INFINITY;
        }
      }
    }
  }
}
