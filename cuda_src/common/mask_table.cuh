// What a mask says of each block of 128 queries x 128 keys, found by its place: for kernels of
// gradients, some of which own queries and walk over keys, and some the other way round.
//
// A kernel owns rows of blocks and walks along them.  One that owns queries reads the straight
// table: rows of blocks are queries, and words are as common/mask_lists.cuh has them.  One that
// owns keys reads the turned table: rows of blocks are keys, and words are those of the transposed
// block, so that accumulators of S^T, whose rows are keys, find their bits as those of S do.
//
// One bit a block says whether it is hidden, so that one thread steps over 32 hidden blocks with
// one load: whoever draws up work, loads tiles or stores results finds its way alone.
#pragma once
#include "cuda_src/common/mask_lists.cuh"

// fa_cupy/gpu/kernels/mask/structs.py holds the same fields in the same order.
struct MaskTable {
  const int* places;    // (matrices, rows, cols): kHiddenBlock, kWholeBlock, or whose words
  const uint32* words;  // kBlockWords of them a place
  const uint32* seen;   // (matrices, rows, seen_words(cols)): bit c % 32 of word c / 32 is 0 where
                        // block c is hidden
  const int* counts;    // (matrices, rows, cols), of a turned table: how many blocks of keys, up to
                        // and with that of the row, the queries of the column do not have hidden
  const int* entries;   // of each batch entry: the mask's matrix; null: there is no mask
  int rows, cols;       // of blocks
};
static_assert(sizeof(MaskTable) == 48, "fa_cupy/gpu/kernels/mask/structs.py holds the same struct");

constexpr int kHiddenBlock = -1, kWholeBlock = -2;

FA_DEVICE bool is_masked(const MaskTable& mask) { return mask.entries != nullptr; }

FA_DEVICE int seen_words(int cols) { return (cols + 31) / 32; }

// The row of blocks, over all matrices, of a batch entry (over all batch axes).  There are fewer
// than 2**31, or their places would not fit any memory.
FA_DEVICE int table_row(const MaskTable& mask, int64 batch, int own) {
  return mask.entries[batch] * mask.rows + own;
}

FA_DEVICE int block_place(const MaskTable& mask, int row, int col) {
  return mask.places[static_cast<int64>(row) * mask.cols + col];
}

// The words of a block in part; `place` is not one of the constants above.
FA_DEVICE const uint32* place_words(const MaskTable& mask, int place) {
  return mask.words + static_cast<int64>(kBlockWords) * place;
}

FA_DEVICE const uint32* seen_row(const MaskTable& mask, int row) {
  return mask.seen + static_cast<int64>(row) * seen_words(mask.cols);
}

// The first block of a row in [from, end) that is not hidden, by the row's words of `seen`; `end`
// if there is none.
template <typename Word>
FA_DEVICE int next_block(Word word, int from, int end) {
  while (from < end) {
    const uint32 left = word(from / 32) >> from % 32;
    if (left != 0) return min(from + __ffs(left) - 1, end);
    from = (from / 32 + 1) * 32;
  }
  return end;
}

FA_DEVICE int next_block(const MaskTable& mask, int row, int from, int end) {
  const uint32* seen = seen_row(mask, row);
  return next_block([&](int i) { return seen[i]; }, from, end);
}

// The last block of a row in [begin, from] that is not hidden; begin - 1 if there is none.
template <typename Word>
FA_DEVICE int block_before(Word word, int from, int begin) {
  while (from >= begin) {
    const uint32 left = word(from / 32) << (31 - from % 32);
    if (left != 0) return max(from - __clz(left), begin - 1);
    from = from / 32 * 32 - 1;
  }
  return begin - 1;
}

// How many blocks of a row in [begin, end) are not hidden.
FA_DEVICE int count_blocks(const MaskTable& mask, int row, int begin, int end) {
  const uint32* seen = seen_row(mask, row);
  int count = 0;
  while (begin < end) {
    const int next = min((begin / 32 + 1) * 32, end);
    // The bits from `begin` on, then those before `next`: 1 to 32 of them.
    count += __popc(seen[begin / 32] >> begin % 32 << (32 - (next - begin)));
    begin = next;
  }
  return count;
}

// Of a turned table, of a matrix whose rows of blocks begin at `row`: how many blocks of keys in
// [first, last] the queries of a column do not have hidden.
FA_DEVICE int counted_blocks(const MaskTable& mask, int row, int first, int last, int col) {
  if (last < first) return 0;
  auto up_to = [&](int own) {
    return mask.counts[static_cast<int64>(row + own) * mask.cols + col];
  };
  const int count = up_to(last);
  return first > 0 ? count - up_to(first - 1) : count;
}
