// What a mask says of each block of 128 queries x 128 keys, found by its index: for kernels of
// gradients, some of which own queries and walk over keys, and some the other way round.
//
// A kernel owns rows of blocks and walks along them.  One that owns queries reads the
// table by queries: rows of blocks are queries, and words are as common/block_lists.cuh has them.
// One that owns keys reads the table by keys: rows of blocks are keys, and words are those of the
// transposed block, so that accumulators of S^T, whose rows are keys, find their bits as those of S
// do.
//
// One bit a block says whether it is hidden, so that one thread steps over 32 hidden blocks with
// one load: whoever draws up work, loads tiles or stores results finds its way alone.
#pragma once
#include "cuda_src/common/block_lists.cuh"
#include "ptx/special.cuh"

// fa_cupy/gpu/kernels/mask/mask_table.py holds the same fields in the same order.
struct MaskTable {
  const int* block_index;  // (matrices, rows, cols): kEmptyBlock, kFullBlock, or whose words
  const uint32* words;     // kBlockWords of them for each index
  // (matrices, rows, visible_words(cols)): bit c % 32 of word c / 32 is 0 where block c is hidden.
  const uint32* visible_bits;
  // (matrices, rows, cols), of a table by keys: how many blocks of keys, up to and with that of the
  // row, the queries of the column do not have hidden.
  const int* prefix_counts;
  const int* matrix_of_entry;  // of each batch entry: the mask's matrix; null: there is no mask
  int rows, cols;              // of blocks
};
static_assert(sizeof(MaskTable) == 48,
              "fa_cupy/gpu/kernels/mask/mask_table.py holds the same struct");

constexpr int kEmptyBlock = -1, kFullBlock = -2;

FA_DEVICE bool is_masked(const MaskTable& mask) { return mask.matrix_of_entry != nullptr; }

FA_DEVICE int visible_words(int cols) { return (cols + 31) / 32; }

// The row of blocks, over all matrices, of a batch entry (over all batch axes).  There are fewer
// than 2**31, or their places would not fit any memory.
FA_DEVICE int table_row(const MaskTable& mask, int64 batch, int block_row) {
  return mask.matrix_of_entry[batch] * mask.rows + block_row;
}

FA_DEVICE int block_words_index(const MaskTable& mask, int row, int col) {
  return mask.block_index[static_cast<int64>(row) * mask.cols + col];
}

// The words of a block in part; `words_index` is not one of the constants above.
FA_DEVICE const uint32* partial_block_words(const MaskTable& mask, int words_index) {
  return mask.words + static_cast<int64>(kBlockWords) * words_index;
}

FA_DEVICE const uint32* visible_row(const MaskTable& mask, int row) {
  return mask.visible_bits + static_cast<int64>(row) * visible_words(mask.cols);
}

// The first block of a row in [from, end) that is not hidden, by the row's words of `visible_bits`;
// `end` if there is none.
template <typename Word>
FA_DEVICE int next_visible_block(Word word, int from, int end) {
  while (from < end) {
    const uint32 remaining_bits = word(from / 32) >> from % 32;
    if (remaining_bits != 0) return min(from + __ffs(remaining_bits) - 1, end);
    from = (from / 32 + 1) * 32;
  }
  return end;
}

FA_DEVICE int next_visible_block(const MaskTable& mask, int row, int from, int end) {
  const uint32* visible_bits = visible_row(mask, row);
  return next_visible_block([&](int i) { return visible_bits[i]; }, from, end);
}

// The first tile of kTile rows in [tile, end) whose block a mask does not hide; `end` if there is
// none.
template <int kTile>
FA_DEVICE int next_tile(const MaskTable& mask, int64 row, int tile, int end) {
  constexpr int kTilesPerBlock = kMaskBlock / kTile;
  const int block = next_visible_block(mask, row, tile / kTilesPerBlock,
                                       (end + kTilesPerBlock - 1) / kTilesPerBlock);
  return min(max(tile, block * kTilesPerBlock), end);
}

// What a mask's words leave of the pairs of a block in part, in place of those in `visible_bits`.
template <int kMmaM>
FA_DEVICE void visible_bits_of_words(const uint32* words, uint32 (&visible_bits)[kMmaM][2], int own,
                                     int other) {
  words += own % kMaskBlock / 16 * kSlabWords + tid_x_again() % 32 * 2;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    const uint2 row_words = *reinterpret_cast<const uint2*>(words + i * kSlabWords);
    visible_bits[i][0] = row_words.x >> other % kMaskBlock / 8 * 2;
    visible_bits[i][1] = row_words.y >> other % kMaskBlock / 8 * 2;
  }
}

// The last block of a row in [begin, from] that is not hidden; begin - 1 if there is none.
template <typename Word>
FA_DEVICE int previous_visible_block(Word word, int from, int begin) {
  while (from >= begin) {
    const uint32 remaining_bits = word(from / 32) << (31 - from % 32);
    if (remaining_bits != 0) return max(from - __clz(remaining_bits), begin - 1);
    from = from / 32 * 32 - 1;
  }
  return begin - 1;
}

// How many blocks of a row in [begin, end) are not hidden.
FA_DEVICE int count_visible_blocks(const MaskTable& mask, int row, int begin, int end) {
  const uint32* visible_bits = visible_row(mask, row);
  int count = 0;
  while (begin < end) {
    const int next = min((begin / 32 + 1) * 32, end);
    // The bits from `begin` on, then those before `next`: 1 to 32 of them.
    count += __popc(visible_bits[begin / 32] >> begin % 32 << (32 - (next - begin)));
    begin = next;
  }
  return count;
}

// Of a table by keys, of a matrix whose rows of blocks begin at `row`: how many blocks of keys in
// [first, last] the queries of a column do not have hidden.
FA_DEVICE int visible_blocks_between(const MaskTable& mask, int row, int first, int last, int col) {
  if (last < first) return 0;
  auto prefix_count = [&](int block_row) {
    return mask.prefix_counts[static_cast<int64>(row + block_row) * mask.cols + col];
  };
  const int count = prefix_count(last);
  return first > 0 ? count - prefix_count(first - 1) : count;
}
