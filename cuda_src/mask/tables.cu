// Tables of a mask's blocks (common/mask_table.cuh) from its lists (common/mask_lists.cuh).
//
// A block of threads has 32 x 32 blocks of a matrix: a warp looks for 32 blocks of keys in the
// lists of one row, then writes the turned table, of 32 blocks of queries for one of keys.  What
// lists say of a block, and how many are before it, are places in them, found by bisection.
#include "cuda_src/common/mask_table.cuh"
#include "ptx/shared.cuh"

constexpr int kSide = 32;  // blocks that a block of threads looks at, along each axis
constexpr int kThreads = FA_THREADS;
static_assert(kThreads == kSide * 32, "a warp for each row");

struct MaskTablesParams {
  MaskLists lists;
  int* straight;          // `places` of the table of queries
  int* turned;            // and of that of keys
  int* counts;            // of the latter
  uint32* straight_seen;  // `seen` of both
  uint32* turned_seen;
  int q_blocks, k_blocks;  // of one matrix
};
static_assert(sizeof(MaskTablesParams) == FA_TABLES_PARAMS_BYTES, "fa_cupy/gpu holds the same");

struct SharedStorage {
  int places[kSide][kSide + 1], counts[kSide][kSide + 1];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// The first place in list[begin] to list[end - 1], which ascends, whose block is at least `block`.
FA_DEVICE int64 bisect(const int* list, int64 begin, int64 end, int block) {
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
    mask_tables(const __grid_constant__ MaskTablesParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int q_sides = seen_words(params.q_blocks), k_sides = seen_words(params.k_blocks);
  const uint32 k_side = blockIdx.x % k_sides, rest = blockIdx.x / k_sides;
  const uint32 q_side = rest % q_sides;
  const int64 matrix = rest / q_sides;
  {
    const int q = q_side * kSide + warp, k = k_side * kSide + lane;
    const int64 t = matrix * params.q_blocks + q;
    int place = kHiddenBlock, count = 0;
    if (q < params.q_blocks && k < params.k_blocks) {
      const ListedBlocks row = listed_blocks(params.lists, t);
      const int64 partial = bisect(params.lists.partial, row.partial_begin, row.partial_end, k);
      const int64 full = bisect(params.lists.full, row.full_begin, row.full_end, k);
      count = static_cast<int>(partial - row.partial_begin + (full - row.full_begin));
      if (partial < row.partial_end && params.lists.partial[partial] == k) {
        const int64 by_tile = params.lists.words_by_tile;
        place = static_cast<int>(by_tile == 0 ? partial : t * by_tile + k);
      } else if (full < row.full_end && params.lists.full[full] == k) {
        place = kWholeBlock;
      }
      count += place != kHiddenBlock;
      params.straight[t * params.k_blocks + k] = place;
    }
    const uint32 seen = __ballot_sync(kFullWarp, place != kHiddenBlock);
    if (lane == 0 && q < params.q_blocks) params.straight_seen[t * k_sides + k_side] = seen;
    shared.places[warp][lane] = place;
    shared.counts[warp][lane] = count;
  }
  __syncthreads();
  const int q = q_side * kSide + lane, k = k_side * kSide + warp;
  const int64 t = matrix * params.k_blocks + k;
  const int place = shared.places[lane][warp];
  const uint32 seen = __ballot_sync(kFullWarp, place != kHiddenBlock);
  if (k >= params.k_blocks) return;
  if (lane == 0) params.turned_seen[t * q_sides + q_side] = seen;
  if (q < params.q_blocks) {
    params.turned[t * params.q_blocks + q] = place;
    params.counts[t * params.q_blocks + q] = shared.counts[lane][warp];
  }
}
