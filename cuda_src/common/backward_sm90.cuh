// What the kernels of attention backward for SM90 share: their parameters, how work on keys is
// shared out and fed, and what a mask leaves of a tile.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/barriers.cuh"
#include "cuda_src/common/mask_table.cuh"
#include "cuda_src/common/spoiled.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/special.cuh"
#include "ptx/tma.cuh"

constexpr bool kSparse = FA_SPARSE;  // a mask says which blocks are hidden, and has bits of others
static_assert(!kSparse || kRowMajor == 0, "words are in fragment order");

struct BwdSm90Params {
  TensorMap q_map, k_map, v_map, dout_map, dk_map, dv_map, dq_map;
  AttentionParams common;
  const float4* rows;  // two queries each: LSE * log2(e), then delta
  float* sums;         // dQ / scale, by pieces (common/gradient_sums.cuh)
  uint32* turns;       // of each tile of queries, how often dQ was added to; 0 at first
  uint32* counters;    // of work that is given out, one for each kernel; 0 at first
  uint32* spoiled;     // rows to compute again (common/spoiled.cuh); 0 at first
  MaskTable mask;      // by blocks of what the kernel owns, keys or queries
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

// ------------------------------------------------------------------------------------------- masks
// Tiles along a row of blocks are numbered as without a mask: kTile columns each, a whole block or
// a part of one.

// How many of the tiles [begin, end) are in blocks that are not hidden.
template <int kTile>
FA_DEVICE int count_tiles(const MaskTable& mask, int row, int begin, int end) {
  constexpr int kInBlock = kMaskBlock / kTile;
  int tiles = 0;
#pragma unroll 1
  for (int part = 0; part < kInBlock; ++part) {  // the first tiles of blocks, then the next ones
    const int less = kInBlock - 1 - part;
    tiles += count_blocks(mask, row, (begin + less) / kInBlock, (end + less) / kInBlock);
  }
  return tiles;
}

// Where one thread is that walks along a row of blocks, and what it has read of the table last: a
// load takes as long as a third of a tile where others wait for turns, who empty the cache with
// every look.  It lies in shared memory, as registers are short.
struct MaskCursor {
  int row;         // of blocks
  int word_index;  // of `word`, of the row's `seen`; -1: there is none yet
  uint32 word;
  int block;  // that `number` is of; -1: of none
  int number;
};
constexpr int kCursors = kSparse ? 4 : 1;  // four warps feed at most

// That of a warp, or what stands for it where there is no mask.
template <typename Shared>
FA_DEVICE MaskCursor& cursor_of(Shared& shared, uint32 warp) {
  return shared.cursors[kSparse ? warp : 0];
}

FA_DEVICE void begin_row(MaskCursor& cursor, int row) {
  cursor.row = row;
  cursor.word_index = cursor.block = -1;
}

FA_DEVICE uint32 word_of(const MaskTable& mask, MaskCursor& cursor, int index) {
  if (cursor.word_index != index) {
    cursor.word_index = index;
    cursor.word = seen_row(mask, cursor.row)[index];
  }
  return cursor.word;
}

// What look_up() finds for a block; a row's block is looked up once.
template <typename LookUp>
FA_DEVICE int number_of(MaskCursor& cursor, int block, LookUp look_up) {
  if (cursor.block != block) {
    cursor.block = block;
    cursor.number = look_up();
  }
  return cursor.number;
}

// The first of these tiles from `tile` on, upwards or downwards, whose block is not hidden; one
// outside of them if there is none.
template <bool kUp, int kTile>
FA_DEVICE int seen_tile(const MaskTable& mask, MaskCursor& cursor, int tile, int begin, int end) {
  constexpr int kInBlock = kMaskBlock / kTile;
  auto word = [&](int index) { return word_of(mask, cursor, index); };
  if constexpr (kUp) {
    return max(tile, kInBlock * next_block(word, tile / kInBlock, (end - 1) / kInBlock + 1));
  } else {
    const int block = block_before(word, tile / kInBlock, begin / kInBlock);
    return min(tile, kInBlock * block + kInBlock - 1);
  }
}

// Calls f for each of the tiles of some work that are in blocks of the cursor's row that are not
// hidden, from the first one on or from the last one on; or for `one` of them, whatever the mask
// says.
template <bool kUp, int kTile, typename Work, typename F>
FA_DEVICE void each_seen_tile(const MaskTable& mask, MaskCursor& cursor, const Work& work, bool one,
                              F f) {
  int tile = kUp ? work.begin : work.end - 1;
#pragma unroll 1
  while (true) {
    if (!one) tile = seen_tile<kUp, kTile>(mask, cursor, tile, work.begin, work.end);
    if (tile < work.begin || tile >= work.end) return;
    f(tile);
    if (one) return;
    tile += kUp ? 1 : -1;
  }
}

// What is told of a tile beside it: its number, and what its block is in the table.
struct TileNote {
  int tile, place;
};

// Of a tile of kTile columns in the cursor's row.
template <int kTile>
FA_DEVICE TileNote note_of(const MaskTable& mask, MaskCursor& cursor, int tile, bool unseen) {
  if (!kSparse || unseen) return {tile, kWholeBlock};
  const int block = tile * kTile / kMaskBlock;
  return {tile, number_of(cursor, block, [&]() { return block_place(mask, cursor.row, block); })};
}

// The words of this thread's two rows of a block, of which `rows` are the first ones of its
// warpgroup; all bits are set where it is seen whole.  Nothing here waits for them.
FA_DEVICE void read_words(uint32 (&seen)[2], const MaskTable& mask, int place, int rows,
                          int thread) {
  seen[0] = seen[1] = ~0u;
  if (place < 0) return;
  const uint64 two = reinterpret_cast<const uint64*>(place_words(mask, place))[2 * rows + thread];
  seen[0] = static_cast<uint32>(two);
  seen[1] = static_cast<uint32>(two >> 32);
}

// Of these words the bits of a tile of kTile columns, from bit 0 on; where it is `cut` by the band,
// without those that in_band(h) lacks of row h.
template <int kTile, typename InBand>
FA_DEVICE void cut_words(uint32 (&seen)[2], int tile, bool cut, InBand in_band) {
  static_assert(!kSparse || kTile == kMaskBlock || kTile == kMaskBlock / 2,
                "16 bits of a word, or all");
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (kTile < kMaskBlock) seen[h] = seen[h] >> tile % 2 * 16 | 0xffff0000u;
    if (cut) seen[h] &= in_band(h);
  }
}

// Puts a number where a bit is 0, in row h of the two that a thread has.
template <int kMmaN>
FA_DEVICE void hide_row(float (&x)[kMmaN][4], int h, uint32 seen, float hidden) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if ((seen >> (2 * j + e) & 1) == 0) x[j][2 * h + e] = hidden;
    }
  }
}

// ------------------------------------------------------------------------------------ work on keys
// A block of keys, for all queries that see it.
struct KeyWork {
  uint32 entry;       // the first one of those that share the keys
  int coordinate[3];  // of it along the maps' batch axes
  int tile;           // which block of keys; -1: there is no more work
  int begin, end;     // query tiles
  int steps;          // of all entries: under a mask, tiles whose blocks are not hidden
  int unseen;         // 1: no query sees a key, and the one tile is there for form's sake
};

// Of a mask, the row of blocks that the keys of some work are in.
template <int kTileN>
FA_DEVICE int row_of_keys(const BwdSm90Params& params, const KeyWork& work, int head) {
  return table_row(params.mask, work.entry + head, work.tile * kTileN / kMaskBlock);
}

// Writes down the work of a number; false when there is none.  Blocks of keys come from the first
// one on, which under a causal mask are seen by the most queries, or from the last one on.
template <bool kLastFirst, int kTileM, int kTileN>
FA_DEVICE bool announce_keys(const BwdSm90Params& params, KeyWork& work, uint32 index) {
  const AttentionParams& p = params.common;
  if (index >= static_cast<uint32>(params.entries) * params.k_tiles) {
    work.tile = -1;
    return false;
  }
  const Turn turn = turn_of(index, params.entries, params.k_tiles, params.section);
  work.entry = turn.entry * params.group;
  locate(params, work.entry, work.coordinate);
  work.tile = kLastFirst ? params.k_tiles - 1 - turn.tile : turn.tile;
  const int first_key = work.tile * kTileN, end_key = min(first_key + kTileN, p.k_len);
  const QueryTiles all = query_tiles(p, first_key, end_key - 1, kTileM);
  work.unseen = all.begin == all.end;
  work.begin = all.begin;
  work.end = work.unseen ? all.begin + 1 : all.end;
  work.steps = (work.end - work.begin) * params.group;
  if constexpr (kSparse) {
    if (!work.unseen) {
      work.steps = 0;
#pragma unroll 1
      for (int head = 0; head < params.group; ++head) {
        const int row = row_of_keys<kTileN>(params, work, head);
        work.steps += count_tiles<kTileM>(params.mask, row, work.begin, work.end);
      }
      work.unseen = work.steps == 0;
    }
    if (work.unseen) work.steps = 1;
  }
  return true;
}

// One of the entries that share keys, and a tile of its queries.
struct Step {
  int head, tile;
};

// Calls f for each step of some work, in order: tiles from the first one on, or from the last one.
// Under a mask tiles whose blocks are hidden are stepped over.
template <bool kUp, int kTileM, int kTileN, typename F>
FA_DEVICE void each_step(const BwdSm90Params& params, const KeyWork& work, MaskCursor& cursor,
                         F f) {
#pragma unroll 1
  for (int head = 0; head < params.group; ++head) {
    if constexpr (kSparse) {
      begin_row(cursor, row_of_keys<kTileN>(params, work, head));
      each_seen_tile<kUp, kTileM>(params.mask, cursor, work, work.unseen != 0,
                                  [&](int tile) { f(Step{head, tile}); });
      if (work.unseen) return;
    } else {
#pragma unroll 1
      for (int i = 0; i < work.end - work.begin; ++i) {
        f(Step{head, kUp ? work.begin + i : work.end - 1 - i});
      }
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
    place.count = opaque(place.count);  // where it is, is computed anew: registers are short
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

// How a kernel that owns keys walks: over blocks of keys from the last one on, or from the first
// one; over their tiles of queries upwards or downwards; whether it draws its next work only when
// all of this one is asked for; and how the L2 cache is to keep those tiles.
template <bool kFromLast, bool kUpwards, bool kDrawsLate, uint64 kOfTiles, int kQueries, int kKeys,
          int kColumnBlocks>
struct KeyWalk {
  static constexpr uint64 kPolicy = kOfTiles;
  static constexpr bool kLastFirst = kFromLast, kUp = kUpwards, kLate = kDrawsLate;
  static constexpr int kTileM = kQueries, kTileN = kKeys, kBlocks = kColumnBlocks;
  static constexpr int kQBytes = kTileM * 128 * kBlocks, kKBytes = kTileN * 128 * kBlocks;
};

// Asks for a block of keys, or of their values.
template <typename Walk>
FA_DEVICE void load_keys(uint8* tile, const TensorMap& map, const uint64& full_barrier,
                         const KeyWork& work, const int (&step)[3]) {
  const uint32 full = cvta_to_shared(&full_barrier);
  mbarrier_arrive_expect_tx(full, Walk::kKBytes);
  load_rows<Walk::kTileN, Walk::kBlocks>(tile, map, full, kEvictFirst, work.tile * Walk::kTileN,
                                         step, work.coordinate, 0);
}

// Asks for Q of a step, of which there were so many before, what is known of its rows and what a
// mask says of it, once there is room.
template <typename Walk, typename Shared>
FA_DEVICE void load_queries(const BwdSm90Params& params, Shared& shared, const KeyWork& work,
                            MaskCursor& cursor, Step step, uint32 before) {
  const RingPlace<sizeof(shared.q_full) / 8> place{before};
  const int at = place.index(), row = step.tile * Walk::kTileM;
  const TileNote note = note_of<Walk::kTileM>(params.mask, cursor, step.tile, work.unseen);
  wait(shared.q_empty[at], place.parity() ^ 1);
  if constexpr (kSparse) shared.note[at] = note;
  const uint32 full = cvta_to_shared(&shared.q_full[at]);
  mbarrier_arrive_expect_tx(full, Walk::kQBytes + sizeof(shared.rows[0]));
  load_rows<Walk::kTileM, Walk::kBlocks>(shared.q[at], params.q_map, full, Walk::kPolicy, row,
                                         params.q_step, work.coordinate, step.head);
  load_known<Walk::kTileM>(shared.rows[at], params, full, work.entry + step.head, row);
}

// The same for dO.
template <typename Walk, typename Shared>
FA_DEVICE void load_gradients(const BwdSm90Params& params, Shared& shared, const KeyWork& work,
                              Step step, uint32 before) {
  const RingPlace<sizeof(shared.dout_full) / 8> place{before};
  const int at = place.index();
  wait(shared.dout_empty[at], place.parity() ^ 1);
  const uint32 full = cvta_to_shared(&shared.dout_full[at]);
  mbarrier_arrive_expect_tx(full, Walk::kQBytes);
  load_rows<Walk::kTileM, Walk::kBlocks>(shared.dout[at], params.dout_map, full, Walk::kPolicy,
                                         step.tile * Walk::kTileM, params.dout_step,
                                         work.coordinate, step.head);
}

// Draws up the order of a block's work; loads K and Q, and what is known of Q's rows.  draw_up adds
// what the warpgroups of the kernel are told of some work.  `kAll`: loads V and dO, too, which
// leaves a thread for something else.
template <typename Walk, bool kAll, typename Shared, typename DrawUp>
FA_DEVICE void feed_queries(const BwdSm90Params& params, Shared& shared, DrawUp draw_up) {
  uint32 works = 0, steps = 0;  // done so far; all places in rings follow from them
  auto work_place = [&]() { return RingPlace<sizeof(shared.work_full) / 8>{works}; };
  uint32 index = atom_add_u32(params.counters, 1);
#pragma unroll 1
  while (true) {
    wait(shared.work_empty[work_place().index()], work_place().parity() ^ 1);
    auto& work = shared.work[work_place().index()];
    const bool more =
        announce_keys<Walk::kLastFirst, Walk::kTileM, Walk::kTileN>(params, work, index);
    if (more) draw_up(work);
    works = opaque(works);  // where it is, is computed anew: registers are short
    arrive(shared.work_full[work_place().index()]);
    if (!more) break;
    if constexpr (!Walk::kLate) index = atom_add_u32(params.counters, 1);  // needed much later
    const RingPlace<1> place{works};
    auto load_k = [&]() {
      wait(shared.k_empty, place.parity() ^ 1);
      load_keys<Walk>(shared.k, params.k_map, shared.k_full, work, params.k_step);
    };
    if constexpr (kAll) {
      wait(shared.v_empty, place.parity() ^ 1);
      load_keys<Walk>(shared.v, params.v_map, shared.v_full, work, params.v_step);
    } else {
      load_k();
    }
    MaskCursor& cursor = cursor_of(shared, 0);
    bool first = true;
    each_step<Walk::kUp, Walk::kTileM, Walk::kTileN>(params, work, cursor, [&](Step step) {
      load_queries<Walk>(params, shared, work, cursor, step, steps);
      if constexpr (kAll) {
        load_gradients<Walk>(params, shared, work, step, steps);
        // K of the work before is the last to be given back: all that one thread can ask for
        // without it comes first.
        if (first) load_k();
        first = false;
      }
      ++steps;
    });
    if constexpr (Walk::kLate) index = atom_add_u32(params.counters, 1);
    ++works;
  }
}

// V and dO.
template <typename Walk, typename Shared>
FA_DEVICE void feed_gradients(const BwdSm90Params& params, Shared& shared) {
  RingPlace<1> v_place;
  uint32 steps = 0;
  each_work(shared.work, shared.work_full, shared.work_empty, [&](const auto& work) {
    wait(shared.v_empty, v_place.parity() ^ 1);
    load_keys<Walk>(shared.v, params.v_map, shared.v_full, work, params.v_step);
    v_place.advance();
    MaskCursor& cursor = cursor_of(shared, 1);
    each_step<Walk::kUp, Walk::kTileM, Walk::kTileN>(params, work, cursor, [&](Step step) {
      load_gradients<Walk>(params, shared, work, step, steps++);
    });
  });
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
