// What the kernels of attention backward for SM90 share: their parameters, how work on keys is
// shared out and fed, and what a mask leaves of a tile.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/block_table.cuh"
#include "cuda_src/common/nonfinite_flags.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/score.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/special.cuh"
#include "ptx/tma.cuh"

constexpr bool kSparse = FA_SPARSE;  // a mask says which blocks are hidden, and has bits of others

struct BwdSm90Params {
  TensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map, dq_map;
  AttentionParams common;
  const float4* lse_delta;  // two queries each: LSE * log2(e), then delta
  float* dq_accum;          // dQ / scale, by tiles (common/dq_accum.cuh)
  uint32* dq_semaphore;     // of each tile of queries, how often dQ was added to; 0 at first
  uint32* tile_counters;    // of work that is given out, one for each kernel; 0 at first
  uint32* nonfinite_flags;  // rows to compute again (common/nonfinite_flags.cuh); 0 at first
  MaskTable mask;           // by blocks of what the kernel owns, keys or queries
  int size[3];              // batch axes of the maps
  int q_step[3], k_step[3], v_step[3], dout_step[3];  // 0 along an axis that broadcasts, else 1
  int group;                 // how many entries, along the last axis, share keys and values
  int entries;               // of keys and values
  int k_tiles;               // blocks of keys in one of them
  int entries_per_l2_group;  // entries that take turns at giving the next block of keys
  int row_pairs;             // of `lse_delta` in one entry, whole tiles
};
static_assert(sizeof(BwdSm90Params) == FA_SM90_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

// Coordinates of a batch entry along the axes of the maps.
FA_DEVICE void entry_coordinates(const BwdSm90Params& params, uint32 entry, int (&coordinate)[3]) {
#pragma unroll
  for (int axis = 2; axis > 0; --axis) {
    const uint32 size = params.size[axis];
    coordinate[axis] = entry % size;
    entry /= size;
  }
  coordinate[0] = entry;
}

// Where the bias of an entry begins, in elements: `head` entries along the last axis after the one
// at these coordinates.  The bias has no map, but its first axes are those of the maps.
FA_DEVICE int64 operands_offset(const AttentionParams& p, const int (&coordinate)[3], int head) {
  return coordinate[0] * p.bias_batch[0] + coordinate[1] * p.bias_batch[1] +
         (coordinate[2] + head) * p.bias_batch[2];
}

// Entry and tile of a number: group by group of entries that share the L2 cache, in each the tiles
// of one number of all its entries, then those of the next number.
struct WorkIndex {
  uint32 entry;
  int tile;
};

FA_DEVICE WorkIndex work_index_at(uint32 index, uint32 entries, int tiles,
                                  int entries_per_l2_group) {
  const uint32 tiles_per_l2_group = static_cast<uint32>(entries_per_l2_group) * tiles;
  const uint32 l2_group = index / tiles_per_l2_group,
               tile_in_l2_group = index - l2_group * tiles_per_l2_group;
  const uint32 first = l2_group * entries_per_l2_group;
  const uint32 group_entries = min(static_cast<uint32>(entries_per_l2_group), entries - first);
  const uint32 tile = tile_in_l2_group / group_entries;
  return {first + (tile_in_l2_group - tile * group_entries), static_cast<int>(tile)};
}

// Whether a tile after the first one is the first of its entry among those that begin together: as
// many numbers as there are blocks in the grid.
FA_DEVICE bool begins_wave(const BwdSm90Params& params, uint32 entry, uint32 tile) {
  const uint32 per_l2_group = params.entries_per_l2_group;
  const uint32 first = entry - entry % per_l2_group;
  const uint32 group_entries = min(per_l2_group, params.entries - first);
  const uint32 index = first * params.k_tiles + tile * group_entries + (entry - first);
  return index / gridDim.x != (index - group_entries) / gridDim.x;
}

// ------------------------------------------------------------------------------------------- masks
// Tiles along a row of blocks are numbered as without a mask: kTile columns each, a whole block or
// a part of one.

// How many of the tiles [begin, end) are in blocks that are not hidden.
template <int kTile>
FA_DEVICE int count_visible_tiles(const MaskTable& mask, int row, int begin, int end) {
  constexpr int kTilesPerBlock = kMaskBlock / kTile;
  int tiles = 0;
#pragma unroll 1
  for (int part = 0; part < kTilesPerBlock;
       ++part) {  // the first tiles of blocks, then the next ones
    const int tiles_after = kTilesPerBlock - 1 - part;
    tiles += count_visible_blocks(mask, row, (begin + tiles_after) / kTilesPerBlock,
                                  (end + tiles_after) / kTilesPerBlock);
  }
  return tiles;
}

// Where one thread is that walks along a row of blocks, and what it has read of the table last: a
// load takes as long as a third of a tile where others wait for turns, who empty the cache with
// every look.  It lies in shared memory, as registers are short.
struct MaskCursor {
  int row;         // of blocks
  int word_index;  // of `word`, of the row's `visible_bits`; -1: there is none yet
  uint32 word;
  int block;  // that `words_index` is of; -1: of none
  int words_index;
};
constexpr int kCursors = kSparse ? 4 : 1;  // four producer warps at most

// That of a warp, or what stands for it where there is no mask.
template <typename Shared>
FA_DEVICE MaskCursor& cursor_of(Shared& shared, uint32 warp) {
  return shared.cursors[kSparse ? warp : 0];
}

FA_DEVICE void begin_block_row(MaskCursor& cursor, int row) {
  cursor.row = row;
  cursor.word_index = cursor.block = -1;
}

FA_DEVICE uint32 visible_word(const MaskTable& mask, MaskCursor& cursor, int index) {
  if (cursor.word_index != index) {
    cursor.word_index = index;
    cursor.word = visible_row(mask, cursor.row)[index];
  }
  return cursor.word;
}

// What lookup() finds for a block; a row's block is looked up once.
template <typename Lookup>
FA_DEVICE int cached_index(MaskCursor& cursor, int block, Lookup lookup) {
  if (cursor.block != block) {
    cursor.block = block;
    cursor.words_index = lookup();
  }
  return cursor.words_index;
}

// The first of these tiles from `tile` on, upwards or downwards, whose block is not hidden; one
// outside of them if there is none.
template <bool kForward, int kTile>
FA_DEVICE int visible_tile(const MaskTable& mask, MaskCursor& cursor, int tile, int begin,
                           int end) {
  constexpr int kTilesPerBlock = kMaskBlock / kTile;
  auto word = [&](int index) { return visible_word(mask, cursor, index); };
  if constexpr (kForward) {
    return max(tile, kTilesPerBlock * next_visible_block(word, tile / kTilesPerBlock,
                                                         (end - 1) / kTilesPerBlock + 1));
  } else {
    const int block = previous_visible_block(word, tile / kTilesPerBlock, begin / kTilesPerBlock);
    return min(tile, kTilesPerBlock * block + kTilesPerBlock - 1);
  }
}

// Calls f for each of the tiles of some work that are in blocks of the cursor's row that are not
// hidden, from the first one on or from the last one on; or for `one` of them, whatever the mask
// says.
template <bool kForward, int kTile, typename WorkTile, typename F>
FA_DEVICE void for_each_visible_tile(const MaskTable& mask, MaskCursor& cursor,
                                     const WorkTile& work, bool one, F f) {
  int tile = kForward ? work.begin : work.end - 1;
#pragma unroll 1
  while (true) {
    if (!one) tile = visible_tile<kForward, kTile>(mask, cursor, tile, work.begin, work.end);
    if (tile < work.begin || tile >= work.end) return;
    f(tile);
    if (one) return;
    tile += kForward ? 1 : -1;
  }
}

// What is passed along with a tile: its number, and what its block is in the table.
struct MaskTileInfo {
  int tile, words_index;
};

// Of a tile of kTile columns in the cursor's row.
template <int kTile>
FA_DEVICE MaskTileInfo mask_tile_info(const MaskTable& mask, MaskCursor& cursor, int tile,
                                      bool has_no_query) {
  if (!kSparse || has_no_query) return {tile, kFullBlock};
  const int block = tile * kTile / kMaskBlock;
  return {tile, cached_index(cursor, block,
                             [&]() { return block_words_index(mask, cursor.row, block); })};
}

// The words of this thread's two rows of a block, of which `rows` are the first ones of its
// warpgroup; all bits are set where it is seen whole.  Nothing here waits for them.
FA_DEVICE void load_mask_words(uint32 (&visible_bits)[2], const MaskTable& mask, int words_index,
                               int rows, int thread) {
  visible_bits[0] = visible_bits[1] = ~0u;
  if (words_index < 0) return;
  const uint64 two =
      reinterpret_cast<const uint64*>(partial_block_words(mask, words_index))[2 * rows + thread];
  visible_bits[0] = static_cast<uint32>(two);
  visible_bits[1] = static_cast<uint32>(two >> 32);
}

// Of these words the bits of a tile of kTile columns, from bit 0 on; where it is `needs_mask` by
// the band, without those that in_band(h) lacks of row h.
template <int kTile, typename InBand>
FA_DEVICE void restrict_words(uint32 (&visible_bits)[2], int tile, bool needs_mask,
                              InBand in_band) {
  static_assert(!kSparse || kTile == kMaskBlock || kTile == kMaskBlock / 2,
                "16 bits of a word, or all");
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (kTile < kMaskBlock) visible_bits[h] = visible_bits[h] >> tile % 2 * 16 | 0xffff0000u;
    if (needs_mask) visible_bits[h] &= in_band(h);
  }
}

// Puts a number where a bit is 0, in row h of the two that a thread has.
template <int kMmaN>
FA_DEVICE void mask_scores_of_row(float (&x)[kMmaN][4], int h, uint32 visible_bits,
                                  float masked_value) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if ((visible_bits >> (2 * j + e) & 1) == 0) x[j][2 * h + e] = masked_value;
    }
  }
}

// ------------------------------------------------------------------------------------ work on keys
// A block of keys, for all queries that see it.
struct KvWorkTile {
  uint32 entry;       // the first one of those that share the keys
  int coordinate[3];  // of it along the maps' batch axes
  int tile;           // which block of keys; -1: there is no more work
  int begin, end;     // query tiles
  int steps;          // of all entries: under a mask, tiles whose blocks are not hidden
  int has_no_query;   // 1: no query sees a key, and the one tile is there for form's sake
};

// Of a mask, the row of blocks that the keys of some work are in.
template <int kTileN>
FA_DEVICE int block_row_of_keys(const BwdSm90Params& params, const KvWorkTile& work, int head) {
  return table_row(params.mask, work.entry + head, work.tile * kTileN / kMaskBlock);
}

// The tiles of queries that work on a block of keys.  `kInTurns`: dQ is added up in the order of
// blocks of keys.
template <bool kInTurns, int kTileM, int kTileN>
FA_DEVICE TileRange query_tiles_of_block(const AttentionParams& p, int tile) {
#if FA_PACKED
  if constexpr (kInTurns) return recorded_query_tiles(p, tile);
#endif
  const int first_key = tile * kTileN, end_key = min(first_key + kTileN, p.k_len);
  const QueryTiles all = query_tiles(p, first_key, end_key - 1, kTileM);
  return {all.begin, all.end};
}

// Writes down the work of a number; false when there is none.  Blocks of keys come from the first
// one on, which under a causal mask are seen by the most queries, or from the last one on.
template <bool kReverseKvOrder, bool kInTurns, int kTileM, int kTileN>
FA_DEVICE bool write_kv_work_tile(const BwdSm90Params& params, KvWorkTile& work, uint32 index) {
  const AttentionParams& p = params.common;
  if (index >= static_cast<uint32>(params.entries) * params.k_tiles) {
    work.tile = -1;
    return false;
  }
  const WorkIndex work_index =
      work_index_at(index, params.entries, params.k_tiles, params.entries_per_l2_group);
  work.entry = work_index.entry * params.group;
  entry_coordinates(params, work.entry, work.coordinate);
  work.tile = kReverseKvOrder ? params.k_tiles - 1 - work_index.tile : work_index.tile;
  const TileRange all = query_tiles_of_block<kInTurns, kTileM, kTileN>(p, work.tile);
  work.has_no_query = all.begin == all.end;
  work.begin = all.begin;
  work.end = work.has_no_query ? all.begin + 1 : all.end;
  work.steps = (work.end - work.begin) * params.group;
  if constexpr (kSparse) {
    if (!work.has_no_query) {
      work.steps = 0;
#pragma unroll 1
      for (int head = 0; head < params.group; ++head) {
        const int row = block_row_of_keys<kTileN>(params, work, head);
        work.steps += count_visible_tiles<kTileM>(params.mask, row, work.begin, work.end);
      }
      work.has_no_query = work.steps == 0;
    }
    if (work.has_no_query) work.steps = 1;
  }
  return true;
}

// One of the entries that share keys, and a tile of its queries.
struct QueryTileStep {
  int head, tile;
};

// Calls f for each step of some work, in order: tiles from the first one on, or from the last one.
// Under a mask tiles whose blocks are hidden are stepped over.
template <bool kForward, int kTileM, int kTileN, typename F>
FA_DEVICE void for_each_query_tile(const BwdSm90Params& params, const KvWorkTile& work,
                                   MaskCursor& cursor, F f) {
#pragma unroll 1
  for (int head = 0; head < params.group; ++head) {
    if constexpr (kSparse) {
      begin_block_row(cursor, block_row_of_keys<kTileN>(params, work, head));
      for_each_visible_tile<kForward, kTileM>(params.mask, cursor, work, work.has_no_query != 0,
                                              [&](int tile) { f(QueryTileStep{head, tile}); });
      if (work.has_no_query) return;
    } else {
#pragma unroll 1
      for (int i = 0; i < work.end - work.begin; ++i) {
        f(QueryTileStep{head, kForward ? work.begin + i : work.end - 1 - i});
      }
    }
  }
}

// Calls f for each work that is announced, until one has no tile; the announcement stands until f
// returns.
template <int kStages, typename WorkTile, typename F>
FA_DEVICE void for_each_work_tile(const WorkTile (&work_count)[kStages],
                                  const uint64 (&full)[kStages], const uint64 (&empty)[kStages],
                                  F f) {
  PipelineState<kStages> work_pipe;
#pragma unroll 1
  while (true) {
    wait(full[work_pipe.index()], work_pipe.parity());
    const WorkTile& work = work_count[work_pipe.index()];
    if (work.tile < 0) break;
    f(work);
    // Where it is, is computed anew: registers are short.
    work_pipe.count = opaque(work_pipe.count);
    arrive(empty[work_pipe.index()]);
    work_pipe.advance();
  }
}

// Asks for kRows rows of an array from `row` on, column block by column block from `column` on.
template <int kRows, int kBlocks>
FA_DEVICE void load_rows(uint8* tile, const TensorMap& map, uint32 barrier, uint64 policy, int row,
                         const int (&step)[3], const int (&coordinate)[3], int head,
                         int column = 0) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    cp_async_bulk_tensor_5d_load(cvta_to_shared(tile + block * kRows * 128), &map, barrier, policy,
                                 column + 64 * block, row, (coordinate[2] + head) * step[2],
                                 coordinate[1] * step[1], coordinate[0] * step[0]);
  }
}

// Asks for what is known of kRows queries.
template <int kRows>
FA_DEVICE void load_lse_delta(float4* to, const BwdSm90Params& params, uint32 barrier, uint32 entry,
                              int row) {
  const float4* from = params.lse_delta + static_cast<int64>(entry) * params.row_pairs + row / 2;
  cp_async_bulk_load(cvta_to_shared(to), from, kRows / 2 * sizeof(float4), barrier);
}

// How a kernel that owns keys walks: over blocks of keys from the last one on, or from the first
// one; over their tiles of queries upwards or downwards; whether other blocks wait for what it adds
// to dQ, so that it draws its next work only when all of this one is asked for; and how the L2
// cache is to keep those tiles.
template <bool kFromLastKey, bool kAscending, bool kTakesTurns, uint64 kCachePolicy, int kQueries,
          int kKeys, int kColumnBlocks>
struct KvLoadPolicy {
  static constexpr uint64 kPolicy = kCachePolicy;
  static constexpr bool kReverseKvOrder = kFromLastKey, kForward = kAscending,
                        kInTurns = kTakesTurns;
  static constexpr int kTileM = kQueries, kTileN = kKeys, kBlocks = kColumnBlocks;
  static constexpr int kQBytes = kTileM * 128 * kBlocks, kKBytes = kTileN * 128 * kBlocks;
};

// Asks for a block of keys, or of their values.
template <typename LoadPolicy>
FA_DEVICE void load_kv_block(uint8* tile, const TensorMap& map, const uint64& full_barrier,
                             const KvWorkTile& work, const int (&step)[3]) {
  const uint32 full = cvta_to_shared(&full_barrier);
  mbarrier_arrive_expect_tx(full, LoadPolicy::kKBytes);
  load_rows<LoadPolicy::kTileN, LoadPolicy::kBlocks>(
      tile, map, full, kEvictFirst, work.tile * LoadPolicy::kTileN, step, work.coordinate, 0);
}

// Asks for Q of a step, of which there were so many before, what is known of its rows and what a
// mask says of it, once there is room.
template <typename LoadPolicy, typename Shared>
FA_DEVICE void load_q_tile(const BwdSm90Params& params, Shared& shared, const KvWorkTile& work,
                           MaskCursor& cursor, QueryTileStep step, uint32 before) {
  const PipelineState<sizeof(shared.q_full) / 8> pipe{before};
  const int at = pipe.index(), row = step.tile * LoadPolicy::kTileM;
  const MaskTileInfo tile_info =
      mask_tile_info<LoadPolicy::kTileM>(params.mask, cursor, step.tile, work.has_no_query);
  wait(shared.q_empty[at], pipe.parity() ^ 1);
  if constexpr (kSparse) shared.tile_info[at] = tile_info;
  if constexpr (kHasOperands)
    shared.operands_offset[at] = operands_offset(params.common, work.coordinate, step.head);
#if FA_DROPOUT
  shared.dropout_entry[at] = dropout_entry(params.common.dropout, work.entry + step.head);
#endif
  const uint32 full = cvta_to_shared(&shared.q_full[at]);
  mbarrier_arrive_expect_tx(full, LoadPolicy::kQBytes + sizeof(shared.lse_delta[0]));
  load_rows<LoadPolicy::kTileM, LoadPolicy::kBlocks>(shared.q[at], params.q_map, full,
                                                     LoadPolicy::kPolicy, row, params.q_step,
                                                     work.coordinate, step.head);
  load_lse_delta<LoadPolicy::kTileM>(shared.lse_delta[at], params, full, work.entry + step.head,
                                     row);
}

// The same for dO.
template <typename LoadPolicy, typename Shared>
FA_DEVICE void load_dout_tile(const BwdSm90Params& params, Shared& shared, const KvWorkTile& work,
                              QueryTileStep step, uint32 before) {
  const PipelineState<sizeof(shared.dout_full) / 8> pipe{before};
  const int at = pipe.index();
  wait(shared.dout_empty[at], pipe.parity() ^ 1);
  const uint32 full = cvta_to_shared(&shared.dout_full[at]);
  mbarrier_arrive_expect_tx(full, LoadPolicy::kQBytes);
  load_rows<LoadPolicy::kTileM, LoadPolicy::kBlocks>(
      shared.dout[at], params.dout_map, full, LoadPolicy::kPolicy, step.tile * LoadPolicy::kTileM,
      params.dout_step, work.coordinate, step.head);
}

// Draws up the order of a block's work; loads K and Q, and what is known of Q's rows.
// add_warpgroup_ranges adds the ranges of some work for the warpgroups of the kernel.  `kAll`:
// loads V and dO, too, which leaves a thread for something else.
template <typename LoadPolicy, bool kAll, typename Shared, typename AddRanges>
FA_DEVICE void produce_k_q(const BwdSm90Params& params, Shared& shared,
                           AddRanges add_warpgroup_ranges) {
  uint32 work_count = 0, steps = 0;  // done so far; pipeline states follow from them
  auto work_pipe = [&]() { return PipelineState<sizeof(shared.work_full) / 8>{work_count}; };
  uint32 index = atom_add_u32(params.tile_counters, 1);
#pragma unroll 1
  while (true) {
    wait(shared.work_empty[work_pipe().index()], work_pipe().parity() ^ 1);
    auto& work = shared.work[work_pipe().index()];
    const bool more =
        write_kv_work_tile<LoadPolicy::kReverseKvOrder, LoadPolicy::kInTurns, LoadPolicy::kTileM,
                           LoadPolicy::kTileN>(params, work, index);
    if (more) add_warpgroup_ranges(work);
    work_count = opaque(work_count);  // where it is, is computed anew: registers are short
    arrive(shared.work_full[work_pipe().index()]);
    if (!more) break;
    if constexpr (!LoadPolicy::kInTurns) {  // needed much later
      index = atom_add_u32(params.tile_counters, 1);
    }
    const PipelineState<1> pipe{work_count};
    auto load_k = [&]() {
      wait(shared.k_empty, pipe.parity() ^ 1);
      load_kv_block<LoadPolicy>(shared.k, params.k_map, shared.k_full, work, params.k_step);
    };
    if constexpr (kAll) {
      wait(shared.v_empty, pipe.parity() ^ 1);
      load_kv_block<LoadPolicy>(shared.v, params.v_map, shared.v_full, work, params.v_step);
    } else {
      load_k();
    }
    MaskCursor& cursor = cursor_of(shared, 0);
    bool first = true;
    for_each_query_tile<LoadPolicy::kForward, LoadPolicy::kTileM, LoadPolicy::kTileN>(
        params, work, cursor, [&](QueryTileStep step) {
          load_q_tile<LoadPolicy>(params, shared, work, cursor, step, steps);
          if constexpr (kAll) {
            load_dout_tile<LoadPolicy>(params, shared, work, step, steps);
            // K of the work before is the last to be given back: all that one thread can ask for
            // without it comes first.
            if (first) load_k();
            first = false;
          }
          ++steps;
        });
    if constexpr (LoadPolicy::kInTurns) index = atom_add_u32(params.tile_counters, 1);
    ++work_count;
  }
}

// V and dO.
template <typename LoadPolicy, typename Shared>
FA_DEVICE void produce_v_dout(const BwdSm90Params& params, Shared& shared) {
  PipelineState<1> v_pipe;
  uint32 steps = 0;
  for_each_work_tile(shared.work, shared.work_full, shared.work_empty, [&](const auto& work) {
    wait(shared.v_empty, v_pipe.parity() ^ 1);
    load_kv_block<LoadPolicy>(shared.v, params.v_map, shared.v_full, work, params.v_step);
    v_pipe.advance();
    MaskCursor& cursor = cursor_of(shared, 1);
    for_each_query_tile<LoadPolicy::kForward, LoadPolicy::kTileM, LoadPolicy::kTileN>(
        params, work, cursor, [&](QueryTileStep step) {
          load_dout_tile<LoadPolicy>(params, shared, work, step, steps++);
        });
  });
}

// Leaves 64 rows of the gradients of queries, or of the keys of some work, to bwd_nonfinite.cu.
FA_DEVICE void flag_nonfinite_queries_64(const BwdSm90Params& params, uint32 entry, int row) {
  if (row < params.common.q_len)
    flag_nonfinite_queries(params.nonfinite_flags, params.common, entry, row);
}
FA_DEVICE void flag_nonfinite_keys_64(const BwdSm90Params& params, const KvWorkTile& work,
                                      int key) {
  if (work.has_no_query || key >= params.common.k_len) return;
  flag_nonfinite_keys(params.nonfinite_flags, params.common, params.entries * params.group,
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
