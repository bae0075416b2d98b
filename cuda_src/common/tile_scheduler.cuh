// The order in which a persistent grid works through tiles of query rows, and who takes which.
//
// Tiles are numbered group by group: a group is a few batch entries whose keys and values
// stay in the L2 cache together.  Inside it the last query rows of all entries come first, because
// under a causal mask they have the most keys, and long tiles should not start last.
//
// A block starts with the tile of its own number; after that tickets from a counter in global
// memory say what is next.  The counter's memory comes as it is, not zeroed: a launch marks it with
// a number of its own, the first block to come sets it up, and the last one to leave takes the mark
// away, so that a replayed launch finds none.
//
// The exchange of 128 bits and the addition of 32 bits overlap only in part, so they are not
// "morally strong" and the axioms of the memory model say nothing of them (PTX ISA 8.7).  They need
// no more than to be performed one after the other, which holds for any two atomic operations that
// overlap (8.7.2, "Atomicity of mixed-size RMW operations"): the L2 cache does both.  The store
// that takes the mark away is no atomic operation; it waits for the last ticket, and before that
// one is drawn every block has exchanged.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "ptx/atomic.cuh"

struct TileScheduler {
  uint64* counter;  // mark and tickets taken, aligned to 16 bytes; null: one tile for each block
  uint64 mark;      // of this launch, not 0
  int tiles;        // in all
  int entries;      // batch entries
  int entries_per_l2_group;  // batch entries of such a group
};

struct ScheduledTile {
  int64 entry;     // batch entry
  int query_tile;  // tile of query rows
};

FA_DEVICE ScheduledTile work_tile_at(const TileScheduler& scheduler, int q_tiles, uint32 index) {
  const uint32 tiles_per_l2_group = static_cast<uint32>(scheduler.entries_per_l2_group) * q_tiles;
  const uint32 l2_group = index / tiles_per_l2_group,
               tile_in_l2_group = index - l2_group * tiles_per_l2_group;
  const uint32 first_entry = l2_group * scheduler.entries_per_l2_group;
  const uint32 entries =
      min(static_cast<uint32>(scheduler.entries_per_l2_group), scheduler.entries - first_entry);
  const uint32 tiles_from_last = tile_in_l2_group / entries;
  return {static_cast<int64>(first_entry + (tile_in_l2_group - tiles_from_last * entries)),
          q_tiles - 1 - static_cast<int>(tiles_from_last)};
}

// The same where the rows of blocks of a mask come in an order of their own, longest first.
FA_DEVICE ScheduledTile work_tile_in_order(const TileScheduler& scheduler, const int* order,
                                           int q_tiles, uint32 index) {
  if (order == nullptr) return work_tile_at(scheduler, q_tiles, index);
  const int row = order[index], entry = row / q_tiles;
  return {entry, row - entry * q_tiles};
}

// The next ticket, in a counter that this block has found marked.  Nothing here waits for the
// answer.
FA_DEVICE uint32 fetch_ticket(const TileScheduler& scheduler) {
  return atom_add_u32(reinterpret_cast<uint32*>(scheduler.counter + 1), 1);
}

// A block's first ticket: marks the counter if no other block has yet.
FA_DEVICE uint32 fetch_first_ticket(const TileScheduler& scheduler) {
  const uint64 desired[2] = {scheduler.mark, 1};
  uint64 observed[2] = {0, 0};
  while (true) {
    const uint64 expected[2] = {observed[0], observed[1]};
    atom_cas_b128(scheduler.counter, observed, desired);
    if (observed[0] == scheduler.mark) return fetch_ticket(scheduler);
    if (observed[0] == expected[0] && observed[1] == expected[1]) return 0;
  }
}

// The number of the tile that a ticket stands for; at least schedule.tiles when none is left.
// Every block asks until it gets none, which makes `tiles` tickets: the last one takes the mark
// away.
FA_DEVICE uint32 tile_index_of(const TileScheduler& scheduler, uint32 ticket) {
  if (ticket == scheduler.tiles - 1) *scheduler.counter = 0;
  return gridDim.x + ticket;
}
