// Words of a mask's blocks, each block transposed: for kernels that own keys.
//
// A warp transposes a block.  A word has 32 elements of a row, those of 16 pairs of columns (c, c +
// 1) with c = 2 w modulo 8 (common/block_lists.cuh), so 32 lanes that each have such a word of
// their own of 32 rows, whose numbers are as far apart, make 32 words of columns by 32 votes.
#include "cuda_src/common/block_table.cuh"

constexpr int kThreads = FA_THREADS;

struct TransposeWordsParams {
  const uint32* words;  // kBlockWords a block
  uint32* transposed;
  const int* block_index;  // null, or of each block whether it has words: not negative
  int64 blocks;
};
static_assert(sizeof(TransposeWordsParams) == FA_TRANSPOSE_WORDS_PARAMS_BYTES,
              "fa_cupy/gpu holds the same");

// Which word of a block has the elements of a row whose columns are 2 w and 2 w + 1 modulo 8.
FA_DEVICE int word_position(int row, int w) {
  return row / 16 * kSlabWords + (row % 8 * 4 + w) * 2 + row % 16 / 8;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mask_transpose_words(const __grid_constant__ TransposeWordsParams params) {
  const int64 block = static_cast<int64>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (block >= params.blocks) return;
  if (params.block_index != nullptr && params.block_index[block] < 0) return;
  const int lane = threadIdx.x % 32;
  const uint32* words = params.words + block * kBlockWords;
  uint32* transposed = params.transposed + block * kBlockWords;
  // As a row and as a column: the number that bit `lane` stands for is this one, and 2 w more.
  const int own = lane / 2 * 8 + lane % 2;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const int row_pair = i / 4, col_pair = i % 4;  // w of both
    const uint32 word = words[word_position(own + 2 * row_pair, col_pair)];
    uint32 own_word = 0;
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      const uint32 column = __ballot_sync(kFullWarp, (word >> bit & 1) != 0);
      if (bit == lane) own_word = column;
    }
    transposed[word_position(own + 2 * col_pair, row_pair)] = own_word;
  }
}
