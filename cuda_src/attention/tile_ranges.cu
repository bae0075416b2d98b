// What packed sequences mean for tiles: which tiles of keys a tile of query rows works on, which
// tiles of rows work on a tile of keys, and the tiles of rows in the order of their work
// (common/row_intervals.cuh).
//
// A thread has a tile.  Both ends of what a tile of rows works on ascend from tile to tile, so that
// what works on a tile of keys is found by bisection.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"

constexpr int kThreads = FA_THREADS;

struct TileRangesParams {
  const Interval* keys_of_row;
  Interval* key_tiles;    // of each tile of rows, or null
  Interval* query_tiles;  // of each tile of keys, or null
  int* order;             // of tiles of rows, or null
  int q_len, k_len;
  int tile_m, tile_n;
  int q_tiles, k_tiles;
};
static_assert(sizeof(TileRangesParams) == FA_TILE_RANGES_PARAMS_BYTES,
              "fa_cupy/gpu holds the same");

struct SharedStorage {
  int work[kThreads];  // of some tiles of rows
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// The keys that the rows of a tile see: from the first one's to the last one's.
FA_DEVICE Interval keys_of_tile(const TileRangesParams& params, int tile) {
  const int first_row = tile * params.tile_m;
  const int last_row = min(first_row + params.tile_m, params.q_len) - 1;
  return {params.keys_of_row[first_row].first & ~kInvalidRow, params.keys_of_row[last_row].last};
}

// The tiles of keys that a tile of rows works on; one where it sees nothing.
FA_DEVICE Interval key_tiles_of(const TileRangesParams& params, int tile) {
  const Interval keys = keys_of_tile(params, tile);
  const int first = min(keys.first / params.tile_n, params.k_tiles - 1);
  return {first, max(first, keys.last < 0 ? 0 : keys.last / params.tile_n)};
}

// How many tiles of keys a tile of rows has.
FA_DEVICE int work_of(const TileRangesParams& params, int tile) {
  const Interval keys = keys_of_tile(params, tile);
  return keys.last < keys.first ? 0 : keys.last / params.tile_n - keys.first / params.tile_n + 1;
}

// The first tile of rows for which `is_past` holds, which then holds for all later ones.
template <typename IsPast>
FA_DEVICE int first_tile(const TileRangesParams& params, const IsPast& is_past) {
  int begin = 0, end = params.q_tiles;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (is_past(key_tiles_of(params, middle))) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// Where a tile comes in the order: behind all that have more work, and as much but come before it.
// Called by all threads of a block, also those without a tile.
FA_DEVICE int rank_of(const TileRangesParams& params, SharedStorage& shared, int tile) {
  const int own_work = tile < params.q_tiles ? work_of(params, tile) : 0;
  int rank = 0;
#pragma unroll 1
  for (int first = 0; first < params.q_tiles; first += kThreads) {
    const int count = min(kThreads, params.q_tiles - first), own = threadIdx.x;
    __syncthreads();
    if (own < count) shared.work[own] = work_of(params, first + own);
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const int work = shared.work[i];
      rank += work > own_work || (work == own_work && first + i < tile);
    }
  }
  return rank;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_tile_ranges(const __grid_constant__ TileRangesParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int blocks_of_rows = (params.q_tiles + kThreads - 1) / kThreads;
  const int block = static_cast<int>(blockIdx.x);
  if (block < blocks_of_rows) {
    const int tile = block * kThreads + threadIdx.x;
    const int rank = params.order != nullptr ? rank_of(params, shared, tile) : 0;
    if (tile >= params.q_tiles) return;
    if (params.order != nullptr) params.order[rank] = tile;
    if (params.key_tiles != nullptr) params.key_tiles[tile] = key_tiles_of(params, tile);
  } else {
    const int tile = (block - blocks_of_rows) * kThreads + threadIdx.x;
    if (tile >= params.k_tiles || params.query_tiles == nullptr) return;
    const int begin = first_tile(params, [&](const Interval& keys) { return keys.last >= tile; });
    const int end = first_tile(params, [&](const Interval& keys) { return keys.first > tile; });
    params.query_tiles[tile] = {begin, end - 1};
  }
}
