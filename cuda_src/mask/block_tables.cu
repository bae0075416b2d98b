// Tables of a mask's blocks (common/block_table.cuh) from its lists (common/block_lists.cuh).
//
// A block of threads has 32 x 32 blocks of a matrix: a warp looks for 32 blocks of keys in the
// lists of one row, then writes the table by keys, of 32 blocks of queries for one of keys.  What
// lists say of a block, and how many are before it, are places in them, found by bisection.
#include "cuda_src/common/block_table.cuh"
#include "ptx/shared.cuh"

constexpr int kGroupBlocks = 32;  // blocks that a block of threads looks at, along each axis
constexpr int kThreads = FA_THREADS;
static_assert(kThreads == kGroupBlocks * 32, "a warp for each row");

struct BlockTablesParams {
  MaskLists lists;
  int* by_query;          // `block_index` of the table of queries
  int* by_key;            // and of that of keys
  int* prefix_counts;     // of the latter
  uint32* by_query_bits;  // `visible_bits` of both
  uint32* by_key_bits;
  int q_blocks, k_blocks;  // of one matrix
};
static_assert(sizeof(BlockTablesParams) == FA_BLOCK_TABLES_PARAMS_BYTES,
              "fa_cupy/gpu holds the same");

struct SharedStorage {
  int block_index[kGroupBlocks][kGroupBlocks + 1], prefix_counts[kGroupBlocks][kGroupBlocks + 1];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// The first place in list[begin] to list[end - 1], which ascends, whose block is at least `block`.
FA_DEVICE int64 binary_search(const int* list, int64 begin, int64 end, int block) {
  while (begin < end) {
    const int64 middle = (begin + end) / 2;
    if (list[middle] < block) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    mask_block_tables(const __grid_constant__ BlockTablesParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int q_groups = visible_words(params.q_blocks), k_groups = visible_words(params.k_blocks);
  const uint32 k_group = blockIdx.x % k_groups, rest = blockIdx.x / k_groups;
  const uint32 q_group = rest % q_groups;
  const int64 matrix = rest / q_groups;
  {
    const int q = q_group * kGroupBlocks + warp, k = k_group * kGroupBlocks + lane;
    const int64 t = matrix * params.q_blocks + q;
    int words_index = kEmptyBlock, prefix_count = 0;
    if (q < params.q_blocks && k < params.k_blocks) {
      const ListedBlocks row = listed_blocks(params.lists, t);
      const int64 partial =
          binary_search(params.lists.partial, row.partial_begin, row.partial_end, k);
      const int64 full = binary_search(params.lists.full, row.full_begin, row.full_end, k);
      prefix_count = static_cast<int>(partial - row.partial_begin + (full - row.full_begin));
      if (partial < row.partial_end && params.lists.partial[partial] == k) {
        const int64 block_stride = params.lists.words_by_block;
        words_index = static_cast<int>(block_stride == 0 ? partial : t * block_stride + k);
      } else if (full < row.full_end && params.lists.full[full] == k) {
        words_index = kFullBlock;
      }
      prefix_count += words_index != kEmptyBlock;
      params.by_query[t * params.k_blocks + k] = words_index;
    }
    const uint32 visible_bits = __ballot_sync(kFullWarp, words_index != kEmptyBlock);
    if (lane == 0 && q < params.q_blocks)
      params.by_query_bits[t * k_groups + k_group] = visible_bits;
    shared.block_index[warp][lane] = words_index;
    shared.prefix_counts[warp][lane] = prefix_count;
  }
  __syncthreads();
  const int q = q_group * kGroupBlocks + lane, k = k_group * kGroupBlocks + warp;
  const int64 t = matrix * params.k_blocks + k;
  const int words_index = shared.block_index[lane][warp];
  const uint32 visible_bits = __ballot_sync(kFullWarp, words_index != kEmptyBlock);
  if (k >= params.k_blocks) return;
  if (lane == 0) params.by_key_bits[t * q_groups + q_group] = visible_bits;
  if (q < params.q_blocks) {
    params.by_key[t * params.q_blocks + q] = words_index;
    params.prefix_counts[t * params.q_blocks + q] = shared.prefix_counts[lane][warp];
  }
}
