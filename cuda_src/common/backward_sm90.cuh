// What the kernels of attention backward for SM90 share: their parameters, and how work on keys is
// shared out and fed.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/barriers.cuh"
#include "cuda_src/common/spoiled.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"

struct BwdSm90Params {
  TensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map, dq_map;
  AttentionParams common;
  const float4* rows;  // two queries each: LSE * log2(e), then delta
  float* sums;         // dQ / scale, by pieces (common/gradient_sums.cuh)
  uint32* turns;       // of each tile of queries, how often dQ was added to; 0 at first
  uint32* counters;    // of work that is given out, one for each kernel; 0 at first
  uint32* spoiled;     // rows to compute again (common/spoiled.cuh); 0 at first
  int size[3];         // batch axes of the maps
  int q_step[3], k_step[3], v_step[3], dout_step[3];  // 0 along an axis that broadcasts, else 1
  int group;      // how many entries, along the last axis, share keys and values
  int entries;    // of keys and values
  int k_tiles;    // blocks of keys in one of them
  int section;    // entries that take turns at giving the next block of keys
  int row_pairs;  // of `rows` in one entry, whole tiles
};
static_assert(sizeof(BwdSm90Params) == FA_SM90_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

// Coordinates of a batch entry along the axes of the maps.
FA_DEVICE void locate(const BwdSm90Params& params, uint32 entry, int (&coordinate)[3]) {
#pragma unroll
  for (int axis = 2; axis > 0; --axis) {
    const uint32 size = params.size[axis];
    coordinate[axis] = entry % size;
    entry /= size;
  }
  coordinate[0] = entry;
}

// Entry and tile of a number: section by section, in each the tiles of one number of all its
// entries, then those of the next number.
struct Turn {
  uint32 entry;
  int tile;
};

FA_DEVICE Turn turn_of(uint32 index, uint32 entries, int tiles, int section) {
  const uint32 section_tiles = static_cast<uint32>(section) * tiles;
  const uint32 number = index / section_tiles, in_section = index - number * section_tiles;
  const uint32 first = number * section;
  const uint32 here = min(static_cast<uint32>(section), entries - first);
  const uint32 tile = in_section / here;
  return {first + (in_section - tile * here), static_cast<int>(tile)};
}

// A block of keys, for all queries that see it.
struct KeyWork {
  uint32 entry;       // the first one of those that share the keys
  int coordinate[3];  // of it along the maps' batch axes
  int tile;           // which block of keys; -1: there is no more work
  int begin, end;     // query tiles
  int unseen;         // 1: no query sees a key, and the one tile is there for form's sake
};

// Writes down the work of a number; false when there is none.  Blocks of keys come from the first
// one on, which under a causal mask are seen by the most queries, or from the last one on.
template <bool kLastFirst>
FA_DEVICE bool announce_keys(const BwdSm90Params& params, KeyWork& work, uint32 index, int tile_m,
                             int tile_n) {
  const AttentionParams& p = params.common;
  if (index >= static_cast<uint32>(params.entries) * params.k_tiles) {
    work.tile = -1;
    return false;
  }
  const Turn turn = turn_of(index, params.entries, params.k_tiles, params.section);
  work.entry = turn.entry * params.group;
  locate(params, work.entry, work.coordinate);
  work.tile = kLastFirst ? params.k_tiles - 1 - turn.tile : turn.tile;
  const int first_key = work.tile * tile_n, end_key = min(first_key + tile_n, p.k_len);
  const QueryTiles all = query_tiles(p, first_key, end_key - 1, tile_m);
  work.unseen = all.begin == all.end;
  work.begin = all.begin;
  work.end = work.unseen ? all.begin + 1 : all.end;
  return true;
}

// One of the entries that share keys, and a tile of its queries.
struct Step {
  int head, tile;
};

// Calls f for each step of some work, in order: tiles from the first one on, or from the last one.
template <bool kUp, typename F>
FA_DEVICE void each_step(const BwdSm90Params& params, const KeyWork& work, F f) {
#pragma unroll 1
  for (int head = 0; head < params.group; ++head) {
#pragma unroll 1
    for (int i = 0; i < work.end - work.begin; ++i) {
      f(Step{head, kUp ? work.begin + i : work.end - 1 - i});
    }
  }
}

// Calls f for each work that is announced, until one has no tile; the announcement stands until f
// returns.
template <int kStages, typename Work, typename F>
FA_DEVICE void each_work(const Work (&works)[kStages], const uint64 (&full)[kStages],
                         const uint64 (&empty)[kStages], F f) {
  RingPlace<kStages> place;
#pragma unroll 1
  while (true) {
    wait(full[place.index()], place.parity());
    const Work& work = works[place.index()];
    if (work.tile < 0) break;
    f(work);
    arrive(empty[place.index()]);
    place.advance();
  }
}

// Asks for kRows rows of an array from `row` on, column block by column block.
template <int kRows, int kBlocks>
FA_DEVICE void load_rows(uint8* tile, const TensorMap& map, uint32 barrier, uint64 policy, int row,
                         const int (&step)[3], const int (&coordinate)[3], int head) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    cp_async_bulk_tensor_5d_load(cvta_to_shared(tile + block * kRows * 128), &map, barrier, policy,
                                 64 * block, row, (coordinate[2] + head) * step[2],
                                 coordinate[1] * step[1], coordinate[0] * step[0]);
  }
}

// Asks for what is known of kRows queries.
template <int kRows>
FA_DEVICE void load_known(float4* to, const BwdSm90Params& params, uint32 barrier, uint32 entry,
                          int row) {
  const float4* from = params.rows + static_cast<int64>(entry) * params.row_pairs + row / 2;
  cp_async_bulk_load(cvta_to_shared(to), from, kRows / 2 * sizeof(float4), barrier);
}

// Leaves 64 rows of the gradients of queries, or of the keys of some work, to bwd_redo.cu.
FA_DEVICE void spoil_queries_64(const BwdSm90Params& params, uint32 entry, int row) {
  if (row < params.common.q_len) spoil_queries(params.spoiled, params.common, entry, row);
}
FA_DEVICE void spoil_keys_64(const BwdSm90Params& params, const KeyWork& work, int key) {
  if (work.unseen || key >= params.common.k_len) return;
  spoil_keys(params.spoiled, params.common, params.entries * params.group,
             work.entry / params.group, key);
}

// Stores 64 rows, as a group of this thread's.
template <int kBlocks>
FA_DEVICE void store_rows_64(const TensorMap& map, const uint8* tile, int row,
                             const int (&coordinate)[3]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    cp_async_bulk_tensor_5d_store(&map, cvta_to_shared(tile + block * 64 * 128), kEvictFirst,
                                  64 * block, row, coordinate[2], coordinate[1], coordinate[0]);
  }
  cp_async_bulk_commit_group();
}
