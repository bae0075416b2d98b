// Attention forward for SM90: TMA, wgmma, warp specialisation, a persistent grid.
//
// A block works on kTileM query rows of one batch entry at a time.  The first
// warpgroup is the producer: a warp schedules work tiles, one thread loads keys and values, one
// loads queries, and one stores outputs.  The other kGroups warpgroups are consumers, each with 64
// rows of its own.
// For each tile of kTileN keys a consumer starts S = Q K^T of that tile and O += P V of the tile
// before, and turns S into the next P while the tensor cores compute products that it or
// another consumer has started (docs/kernels/forward.rst).
#include "cuda_src/attention/fwd_sm90.cuh"
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/recompute_row.cuh"
#include "cuda_src/common/recompute_scores.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/sinks.cuh"
#include "cuda_src/common/softmax.cuh"
#include "cuda_src/common/staged_bias.cuh"
#include "cuda_src/common/tile_scheduler.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

// --------------------------------------------------------------------------------------- producers
#if FA_SPLIT
// Returns which of the key tiles that a lane has found are in a split of those that lane kGroups
// has; for that lane never none, which others process as hidden: the tile past the last key is.
FA_DEVICE KeyTiles split_tiles(const FwdSm90Params& params, const KeyTiles& keys, int split) {
  const int begin = __shfl_sync(kFullWarp, keys.begin, kGroups);
  const int64 tiles = __shfl_sync(kFullWarp, keys.end, kGroups) - begin;
  const int from = begin + static_cast<int>(tiles * split / params.splits);
  const int to = begin + static_cast<int>(tiles * (split + 1) / params.splits);
  if (from == to) {
    const int past_end = (params.common.k_len + kTileN - 1) / kTileN;
    return {past_end, past_end + (threadIdx.x % 32 == kGroups), 0, 0};
  }
  return {max(keys.begin, from), max(max(keys.begin, from), min(keys.end, to)), keys.full_begin,
          keys.full_end};
}
#endif

// Writes the work tile with an index of the schedule, by a warp; returns false past the last one.
FA_DEVICE bool write_work_tile(const FwdSm90Params& params, SharedStorage& shared, int stage,
                               uint32 index) {
  WorkTile& work = shared.work[stage];
  const int lane = threadIdx.x % 32;
  if (index >= params.scheduler.tiles) {
    if (lane == kGroups) work.q_begin = -1;
    return false;
  }
  const AttentionParams& p = params.common;
#if FA_SPLIT
  // Neighbours work on the same keys: first all tiles of the first split.
  const uint32 tiles_of_split = params.scheduler.tiles / params.splits;
  const int split = index / tiles_of_split;
  index -= split * tiles_of_split;
#endif
  const ScheduledTile tile =
      kSparse ? work_tile_in_order(params.scheduler, p.mask.order, p.q_tiles, index)
              : work_tile_at(params.scheduler, p.q_tiles, index);
  const int q_begin =
      (kPacked ? query_tile_in_order(p, p.q_tiles - 1 - tile.query_tile) : tile.query_tile) *
      kTileM;
#if FA_PACKED
  // Consumers ask for the intervals of their rows at tiles that these cut, and would wait.
  const Interval* intervals = p.intervals.keys_of_row + q_begin;
  if (lane < kTileM / 16) prefetch_l1(intervals + 16 * lane);
#endif
  // One lane for each consumer finds the key tiles of its rows, and one more those of all rows.
  const bool whole_block = lane >= kGroups;
  const int first_row = q_begin + (whole_block ? 0 : 64 * lane);
  const int last_row = min(first_row + (whole_block ? kTileM : 64), tile_rows(params)) - 1;
  const auto& band = band_of_entry(params, p.first_batch + tile.entry);
  KeyTiles keys = {0, 0, 0, 0};
  // A multiple of 8, as the bias is read by 16 bytes.
  const int origin = kPacked ? first_key(p, q_begin) / 8 * 8 : 0;
  if (first_row <= last_row) {
    keys = key_tiles(band, first_row >> params.row_shift, last_row >> params.row_shift, kTileN,
                     origin);
  }
#if FA_SPLIT
  keys = split_tiles(params, keys, split);
#endif
  // Rows without visible keys process one key tile that is hidden from them, so that no later code
  // needs a case for them.
  const int begin = __shfl_sync(kFullWarp, keys.begin, kGroups);
  if (keys.begin == keys.end) keys = {begin, begin + 1, 0, 0};
  if constexpr (kSparse) {
    keys.begin = 0;
    keys.end = find_blocks(p, work, p.first_batch + tile.entry, q_begin);
  }
  if constexpr (kLastTileFirst) {
    const int ends = begin + __shfl_sync(kFullWarp, keys.end, kGroups);
    if (lane < kGroups) {
      keys = {ends - keys.end, ends - keys.begin, ends - keys.full_end, ends - keys.full_begin};
    }
  }
  if (lane < kGroups) {
    const int visible_keys =
        last_key(band, last_row >> params.row_shift) - origin - (keys.end - 1) * kTileN;
    work.group[lane] = {keys, kHalfLastTile && visible_keys < kTileN / 2};
  } else if (lane == kGroups) {
    uint32 rest = static_cast<uint32>(p.first_batch + tile.entry);
    work.entry = rest;
#pragma unroll
    for (int axis = 2; axis > 0; --axis) {
      const uint32 size = params.size[axis];
      work.coordinate[axis] = rest % size;
      rest /= size;
    }
    work.coordinate[0] = rest;
    work.q_begin = q_begin;
    work.begin = keys.begin;
    work.end = keys.end;
#if FA_PACKED
    work.key_origin = origin;
#endif
#if FA_SPLIT
    work.split = split;
#endif
#if FA_LENGTHS
    work.band = band;
#endif
#if FA_DROPOUT
    work.dropout = dropout_entry(p.dropout, work.entry);
#endif
#if FA_PAGES
    work.has_invalid_page = 0;
#endif
    if constexpr (kHasOperands) shared.operands_offset[stage] = batch_offsets(p, work.entry).bias;
  }
  return true;
}

// Writes the work tiles of this block one after the other.
FA_DEVICE void run_tile_scheduler(const FwdSm90Params& params, SharedStorage& shared) {
  const int lane = threadIdx.x % 32;
  WorkPipeline work_pipe;
  uint32 index = blockIdx.x;
  bool first = true;
#pragma unroll 1
  while (true) {
    wait(shared.work_empty[work_pipe.index()], work_pipe.parity() ^ 1);
    const bool has_work = write_work_tile(params, shared, work_pipe.index(), index);
    if (lane <= kGroups || (kSparse && lane == kPartialLane)) {  // all that write
      arrive(shared.work_full[work_pipe.index()]);
    }
    if (!has_work) break;
    // The ticket of the next tile is taken when the loads of this one begin: later, its own loads
    // would be late; earlier, a block that is behind would keep tiles from others.
    wait(shared.work_started[work_pipe.index()], work_pipe.parity());
    work_pipe.advance();
    if (params.scheduler.counter == nullptr) {
      index = params.scheduler.tiles;
    } else {
      if (lane == 0) {
        index = tile_index_of(params.scheduler, first ? fetch_first_ticket(params.scheduler)
                                                      : fetch_ticket(params.scheduler));
      }
      index = __shfl_sync(kFullWarp, index, 0);
      first = false;
    }
  }
}

// Returns a copy of the next work tile and gives its stage back.
FA_DEVICE WorkTileInfo get_next_work(SharedStorage& shared, WorkPipeline& work_pipe) {
  wait(shared.work_full[work_pipe.index()], work_pipe.parity());
  const WorkTileInfo work = shared.work[work_pipe.index()];
  arrive(shared.work_empty[work_pipe.index()]);
  work_pipe.advance();
  return work;
}

// The key tile that comes at a place in the order of the work.
FA_DEVICE int key_tile_at(const WorkTileInfo& work, int tile) {
  return kLastTileFirst ? work.begin + work.end - 1 - tile : tile;
}

// Loads the tiles of K and V.
FA_DEVICE void load_kv(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPipeline work_pipe;
  KVPipeline k_pipe, v_pipe;
#pragma unroll 1
  while (true) {
    const uint64& started = shared.work_started[work_pipe.index()];
    const WorkTileInfo work = get_next_work(shared, work_pipe);
    if (work.q_begin < 0) break;
    arrive(started);
    auto load = [&](uint8(&tiles)[kStages][kKTileBytes], uint64(&full)[kStages],
                    uint64(&empty)[kStages], KVPipeline& at, const TensorMap& map,
                    const int (&step)[3], int tile, uint32 extra_bytes) {
      wait(empty[at.index()], at.parity() ^ 1);
      const uint32 barrier = cvta_to_shared(&full[at.index()]);
      mbarrier_arrive_expect_tx(barrier, kKTileBytes + extra_bytes);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_load(cvta_to_shared(&tiles[at.index()][block * kTileN * 128]), &map,
                                     barrier, kEvictLast, 64 * block,
                                     key_origin(work) + tile * kTileN, work.coordinate[2] * step[2],
                                     work.coordinate[1] * step[1], work.coordinate[0] * step[0]);
      }
      at.advance();
    };
    auto load_k = [&](int tile, uint32 extra_bytes) {
      load(shared.k, shared.k_full, shared.k_empty, k_pipe, params.k_map, params.k_step, tile,
           extra_bytes);
    };
    auto load_v = [&](int tile) {
      load(shared.v, shared.v_full, shared.v_empty, v_pipe, params.v_map, params.v_step, tile, 0);
    };
    if constexpr (kSparse) {
      load_listed_kv(params.common, work, shared, k_pipe, load_k, load_v);
    } else {
      // In the order in which they are waited for: K of a tile before V of the one before it.
#pragma unroll 1
      for (int tile = work.begin; tile <= work.end; ++tile) {
        if (tile < work.end) load_k(key_tile_at(work, tile), 0);
        if (tile > work.begin) load_v(key_tile_at(work, tile - 1));
      }
    }
  }
}

#if FA_PAGES
using PagedKeys = EntryKeysOf<FwdSm90Params>;
FA_DEVICE PagedKeys paged_keys(const FwdSm90Params& params, const BatchOffsets& offsets,
                               const WorkTileInfo& work) {
  const int64 entry = static_cast<int64>(work.entry) << params.row_shift;
  return {params, offsets, work.band,
          element_of_entry(params.common, entry, params.page_table_batch), true};
}

// Loads the tiles of K and V of pages, by a warp: a lane for each box, of 16 keys at least.
static_assert(kTileN / 16 * kBlocks <= 32, "there are lanes for them");
FA_DEVICE void load_paged_kv(const FwdSm90Params& params, SharedStorage& shared) {
  const int lane = threadIdx.x % 32, boxes = kTileN / params.page_box;
  const int box = lane / kBlocks, block = lane % kBlocks;
  const uint32 place = block * kTileN * 128 + box * params.page_box * 128;
  const BatchOffsets no_offsets = {};
  WorkPipeline work_pipe;
  KVPipeline k_pipe, v_pipe;
#pragma unroll 1
  while (true) {
    const int work_stage = work_pipe.index();
    wait(shared.work_full[work_stage], work_pipe.parity());
    const WorkTileInfo work = shared.work[work_stage];
    __syncwarp();
    if (lane == 0) arrive(shared.work_empty[work_stage]);
    work_pipe.advance();
    if (work.q_begin < 0) break;
    if (lane == 0) arrive(shared.work_started[work_stage]);
    const PagedKeys keys = paged_keys(params, no_offsets, work);
    auto load = [&](uint8(&tiles)[kStages][kKTileBytes], uint64(&full)[kStages],
                    uint64(&empty)[kStages], KVPipeline& at, const TensorMap& map,
                    const int (&step)[3], int tile) {
      // The table is read before there is room.  Behind the last key it may hold anything.
      const int key = tile * kTileN + box * params.page_box, page = keys.page_of(key);
      int number = 0;
      if (box < boxes && key < work.band.k_len) number = keys.listed_page(page);
      const bool is_page = keys.is_page(number);
      const bool any_invalid = !__all_sync(kFullWarp, is_page);
      wait(empty[at.index()], at.parity() ^ 1);
      const uint32 barrier = cvta_to_shared(&full[at.index()]);
      if (lane == 0) {
        // The stage of the work is not given back before these keys have been seen.
        if (any_invalid) shared.work[work_stage].has_invalid_page = 1;
        mbarrier_arrive_expect_tx(barrier, kKTileBytes);
      }
      __syncwarp();
      if (box < boxes) {
        int c[3];
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
          c[axis] = axis == params.page_axis ? (is_page ? number : 0)
                                             : work.coordinate[axis] * step[axis];
        }
        cp_async_bulk_tensor_5d_load(cvta_to_shared(&tiles[at.index()][place]), &map, barrier,
                                     kEvictLast, 64 * block, key - page * params.page_size, c[2],
                                     c[1], c[0]);
      }
      at.advance();
    };
#pragma unroll 1
    for (int tile = work.begin; tile <= work.end; ++tile) {
      if (tile < work.end) {
        load(shared.k, shared.k_full, shared.k_empty, k_pipe, params.k_map, params.k_step, tile);
      }
      if (tile > work.begin) {
        load(shared.v, shared.v_full, shared.v_empty, v_pipe, params.v_map, params.v_step,
             tile - 1);
      }
    }
  }
}
#endif

// The second and third coordinate of a box of 64 rows of Q or of the output: row and last batch
// axis, or, with several heads in a tile, head and row.
FA_DEVICE void row_coordinates(const FwdSm90Params& params, int row, int batch, int (&c)[2]) {
  c[0] = params.row_shift ? 0 : row;
  c[1] = params.row_shift ? row >> params.row_shift : batch;
}

// Loads the rows of Q, 64 for each consumer.
FA_DEVICE void load_q(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPipeline work_pipe;
  QPipeline q_pipe;
#pragma unroll 1
  while (true) {
    const WorkTileInfo work = get_next_work(shared, work_pipe);
    if (work.q_begin < 0) break;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.q_empty[q_pipe.index()], q_pipe.parity() ^ 1);
      const uint32 barrier = cvta_to_shared(&shared.q_full[q_pipe.index()]);
      mbarrier_arrive_expect_tx(barrier, kQTileBytes);
      int c[2];
      row_coordinates(params, work.q_begin + 64 * group, work.coordinate[2] * params.q_step[2], c);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_load(cvta_to_shared(&shared.q[q_pipe.index()][block * 64 * 128]),
                                     &params.q_map, barrier, kEvictFirst, 64 * block, c[0], c[1],
                                     work.coordinate[1] * params.q_step[1],
                                     work.coordinate[0] * params.q_step[0]);
      }
      q_pipe.advance();
    }
  }
}

// Stores the outputs, which consumers have written over Q.
FA_DEVICE void store_out(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPipeline work_pipe;
  QPipeline q_pipe;
#pragma unroll 1
  while (true) {
    const WorkTileInfo work = get_next_work(shared, work_pipe);
    if (work.q_begin < 0) break;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.out_full[q_pipe.index()], q_pipe.parity());
      if constexpr (!kSplit) {
        int c[2];
        row_coordinates(params, work.q_begin + 64 * group, work.coordinate[2], c);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          cp_async_bulk_tensor_5d_store(
              &params.out_map, cvta_to_shared(&shared.q[q_pipe.index()][block * 64 * 128]),
              kEvictFirst, 64 * block, c[0], c[1], work.coordinate[1], work.coordinate[0]);
        }
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
      }
      arrive(shared.q_empty[q_pipe.index()]);
      q_pipe.advance();
    }
  }
  cp_async_bulk_wait_group<0>();
}

// --------------------------------------------------------------------------------------- consumers
// The phases of a consumer are free functions.  All state belongs to the frame of `consume`, and
// they take it by reference, register arrays one by one: ptxas serialises the wgmma of a struct
// that holds them (C7511).

// Registers of a thread, as accumulators and A operands of m64nNk16 hold them (ptx/wgmma.cuh).
using Scores = float[1][kMmaN][4];          // S, then P in float32: 64 rows x kTileN keys
using Weights = uint32[1][kMmaN][2];        // P in 16 bits
using Output = float[1][kMmaV][4];          // O before it is divided by row_sum
using QFragments = uint32[kQFragments][4];  // Q, with kQInRegisters

// What stays the same in a consumer warpgroup.
struct Consumer {
  const FwdSm90Params& params;
  SharedStorage& shared;
  int group, warp, lane;  // of the block's consumers; of the block; of the warp
  int warp_row;           // first of the warp's 16 rows among the warpgroup's 64
  uint32 q_lane;          // where this lane's row of an ldmatrix.x4 or stmatrix.x4 of Q lies
};

// The stages that come next.
struct Pipelines {
  WorkPipeline work;
  QPipeline q;
  KVPipeline v, k;
};

// What a warpgroup does of a work tile.
struct GroupWork {
  int tile;             // the key tile at hand, in the order of the work
  int first_row;        // of its 64 rows
  KeyTiles keys;        // of the block's key tiles its rows may see fewer,
  bool half_last_tile;  // and only half of the last one
};

// One lane of a warp arrives at the barrier.
FA_DEVICE void release(const Consumer& c, const uint64& barrier) {
  if (c.lane == 0) arrive(barrier);
}

// Waits until this warpgroup may start products, and lets the next one: so the softmax of one runs
// beside the products of another (warpgroup ping-pong).
FA_DEVICE void warp_scheduler_sync(const Consumer& c) { bar_sync(kWarpScheduler + c.group, 256); }
FA_DEVICE void warp_scheduler_arrive(const Consumer& c) {
  bar_arrive(kWarpScheduler + (c.group + 1) % kGroups, 256);
}

// ---------------------------------------------------------------------------------------- products
// S = Q K^T with the first kCols keys of a tile.  Starts the product; s and q are not to be touched
// before a wgmma_wait_group.
template <int kCols>
FA_DEVICE void gemm_qk(float (&s)[1][kMmaN][4], uint32 (&q)[kQFragments][4], uint32 q_tile,
                       uint32 k_tile) {
  const uint64 b = wgmma_descriptor(k_tile, 0);
  const uint64 a = wgmma_descriptor(q_tile, 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of a block's rows; descriptors count in 16 bytes.
    const uint64 b_step = b + (step / 4 * kTileN * 128 + step % 4 * 32) / 16;
    if constexpr (kQInRegisters) {
      wgmma_m64k16_rs<kBf16, kCols, kKMajor>(s[0], q[step], b_step, step > 0);
    } else {
      const uint64 a_step = a + (step / 4 * 64 * 128 + step % 4 * 32) / 16;
      wgmma_m64k16_ss<kBf16, kCols>(s[0], a_step, b_step, step > 0);
    }
  }
  wgmma_commit_group();
}

// O += P V with the first kCols keys of a tile.  Starts the product; o and weights are not to be
// touched before a wgmma_wait_group.
template <int kCols>
FA_DEVICE void gemm_pv(float (&o)[1][kMmaV][4], const uint32 (&weights)[1][kMmaN][2],
                       uint32 v_tile) {
  const uint64 b = wgmma_descriptor(v_tile, kTileN * 128);
#pragma unroll
  for (int step = 0; step < kCols / 16; ++step) {
    const uint32 a[4] = {weights[0][2 * step][0], weights[0][2 * step][1],
                         weights[0][2 * step + 1][0], weights[0][2 * step + 1][1]};
    wgmma_m64k16_rs<kBf16, kDim>(o[0], a, b + step * (16 * 128 / 16), 1);
  }
  wgmma_commit_group();
}

// Loads a warp's rows of Q as A operands; q_address is this lane's row of an ldmatrix.
FA_DEVICE void load_q_fragments(uint32 (&q)[kQFragments][4], uint32 q_address) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    ldmatrix_x4(q[step], QTile::at(q_address, 0, step));
  }
}

// ------------------------------------------------------------------------------------ staged bias
// A template, for other builds have no stage.
template <typename Shared>
FA_DEVICE uint32 bias_stage(const Shared& shared, int warp) {
  return cvta_to_shared(shared.bias[warp - 4]);
}

// -------------------------------------------------------------------------------------- work tiles
// Passes the barriers of a key tile that no row of this warpgroup sees.
FA_DEVICE void skip_key_tile(const Consumer& c, Pipelines& at) {
  warp_scheduler_sync(c);
  warp_scheduler_arrive(c);
  wait(c.shared.k_full[at.k.index()], at.k.parity());
  __syncwarp();  // or a lane that comes late would find the phase after the next
  release(c, c.shared.k_empty[at.k.index()]);
  at.k.advance();
  wait(c.shared.v_full[at.v.index()], at.v.parity());
  __syncwarp();
  release(c, c.shared.v_empty[at.v.index()]);
  at.v.advance();
}

// Reads the work tile in a stage; returns false when there is no more work.  The epilogue gives the
// stage back.
FA_DEVICE bool peek_work_tile(const Consumer& c, GroupWork& own, const WorkPipeline& at) {
  wait(c.shared.work_full[at.index()], at.parity());
  const WorkTile& work = c.shared.work[at.index()];
  if (work.q_begin < 0) return false;
  own.first_row = work.q_begin + 64 * c.group;
  own.tile = work.begin;
  own.keys = work.group[c.group].keys;
  own.half_last_tile = kHalfLastTile && work.group[c.group].half_last_tile;
  return true;
}

// The batch entry and the first row of the work tile at hand.  They are read from shared memory
// again at each use, because there is no register to keep the entry in, and in builds for a mask
// none for the row.
FA_DEVICE uint32 reload_entry(const Consumer& c, const Pipelines& at) {
  return c.shared.work[at.work.index()].entry;
}
FA_DEVICE int reload_first_row(const Consumer& c, const Pipelines& at, const GroupWork& own) {
  return kSparse ? c.shared.work[at.work.index()].q_begin + 64 * c.group : own.first_row;
}

// The first key of a key tile.
FA_DEVICE int first_col(const Consumer& c, const Pipelines& at, int key_tile) {
  return key_origin(c.shared.work[at.work.index()]) + key_tile * kTileN;
}

// The first of this lane's rows of a query tile, and of its columns of a key tile; the others are 8
// after it, and 1, 8, 9, 16, ... after it.
FA_DEVICE int lane_row(const Consumer& c, const Pipelines& at, const GroupWork& own) {
  return reload_first_row(c, at, own) + c.warp_row + c.lane / 4;
}
FA_DEVICE int lane_col(const Consumer& c, const Pipelines& at, int key_tile) {
  return first_col(c, at, key_tile) + 2 * (c.lane % 4);
}

// Starts to copy the bias of the next tile to this warp's stage.  With the first tile it comes too
// late: nothing has asked for it yet.
FA_DEVICE void stage_next_bias(const Consumer& c, const Pipelines& at, const GroupWork& own) {
  if constexpr (kStageBias) {
    if (own.tile + 1 >= own.keys.end) return;
    const auto& work = c.shared.work[at.work.index()];
    const int col = first_col(c, at, key_tile_at(work, own.tile + 1));
    stage_bias<16, kTileN>(c.params.common, c.shared.operands_offset[at.work.index()],
                           bias_stage(c.shared, c.warp), own.first_row + c.warp_row, col);
  }
}

// Makes scores of products with the bias in this warp's stage, as apply_score_mod_of_near does.
template <typename Shared, int kMma>
FA_DEVICE bool apply_staged_bias(const AttentionParams& p, const Shared& shared, int warp,
                                 float (&s)[kMma][4]) {
  wait_for_staged_bias<0>();
  return in_loaded_parts<false>(
      s,
      [&](auto& operands, int j) {
        read_staged_bias_fp32<kTileN>(operands, shared.bias[warp - 4], j);
      },
      [&](auto& part, auto& operands, int) { return apply_score_mod_of_near(p, part, operands); });
}

// Starts S = Q K^T of the first key tile of a work tile, whose rows of Q are in a stage.  When
// there is no more work (valid is false) a product of old data is started and not read: ptxas
// serialises all wgmma of a kernel if some of them start behind a branch.
FA_DEVICE void first_gemm_qk(const Consumer& c, Pipelines& at, GroupWork& own, Scores& s,
                             QFragments& q, uint32& q_tile, const QPipeline& q_pipe, bool valid) {
  uint32 k_tile = cvta_to_shared(c.shared.k[0]);
  q_tile = k_tile;
  if (valid) {
    wait(c.shared.q_full[q_pipe.index()], q_pipe.parity());
    q_tile = cvta_to_shared(c.shared.q[q_pipe.index()]);
    if constexpr (kQInRegisters) {
      load_q_fragments(q, q_tile + c.q_lane);
    }
    if constexpr (!kSparse) {
#pragma unroll 1
      for (; own.tile < own.keys.begin; ++own.tile) skip_key_tile(c, at);
    }
    wait(c.shared.k_full[at.k.index()], at.k.parity());
    k_tile = cvta_to_shared(c.shared.k[at.k.index()]);
  }
  warp_scheduler_sync(c);
  wgmma_fence();
  gemm_qk<kTileN>(s, q, q_tile, k_tile);
  warp_scheduler_arrive(c);
}

// --------------------------------------------------------------------------------- scores, softmax
// What the mask says of a key tile.  Without a mask only the number is used.  These are references
// to single variables: in a struct of their own, builds for a mask and a bias spill more.
struct TileMask {
  int& key_tile;                 // its number among all key tiles
  bool& listed;                  // whether the tile has words
  uint32 (&visible_bits)[1][2];  // which scores they leave
};

// Whether the band hides some keys of the tile from rows of the warpgroup.
FA_DEVICE bool crosses_band(const Consumer& c, const Pipelines& at, const GroupWork& own,
                            const TileMask& mask) {
  if constexpr (!kSparse) return own.tile < own.keys.full_begin || own.tile >= own.keys.full_end;
  const KeyTiles& band_tiles = c.shared.work[at.work.index()].group[c.group].keys;
  return (mask.key_tile < band_tiles.full_begin) | (mask.key_tile >= band_tiles.full_end);
}

// Makes scores of products, where they are more than that, and puts -inf where the mask or the band
// hides a key.  Says of steady_scores whether scores are near 0.
template <int kCols>
FA_DEVICE void mod_and_mask_scores(const Consumer& c, const Pipelines& at, const GroupWork& own,
                                   const TileMask& mask, float (&s)[1][kCols / 8][4],
                                   bool& steady_scores) {
  const AttentionParams& p = c.params.common;
  if constexpr (kScoreMod) {
    steady_scores =
        load_and_apply_score_mod<false>(p, c.shared.operands_offset[at.work.index()], s[0],
                                        lane_row(c, at, own), lane_col(c, at, mask.key_tile));
  }
  if constexpr (kSparse) {
    const bool hides = crosses_band(c, at, own, mask);
    if (hides) {
      // Few tiles come here: kept over the loop, what follows from threadIdx.x would take
      // registers that the words need, so it is read again.
      const int tid = tid_x_again();
      const int row = reload_first_row(c, at, own) + tid / 32 % 4 * 16 + tid % 32 / 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int col = mask.key_tile * kTileN + 2 * (tid % 4);
        mask.visible_bits[0][h] &= visible_columns(p, row + 8 * h, col, 2 * kMmaN);
      }
    }
    if (mask.listed || hides) mask_by_bits(s, mask.visible_bits);
  } else if (crosses_band(c, at, own, mask)) {
    mask_outside_band(band_of(c.params, c.shared.work[at.work.index()]), s,
                      own.first_row + c.warp_row + c.lane / 4, lane_col(c, at, mask.key_tile),
                      c.params.row_shift);
  }
}

// Asks for the operands of a tile's scores before its products are there.
template <bool kFirst, typename Operands>
FA_DEVICE void prefetch_operands(const Consumer& c, const Pipelines& at, const GroupWork& own,
                                 Operands& operands, int key_tile) {
  const AttentionParams& p = c.params.common;
  if constexpr (kStageBias && !kReadBiasLate) {
    if constexpr (!kFirst) {
      wait_for_staged_bias<0>();
      read_staged_bias<16, kTileN>(operands, bias_stage(c.shared, c.warp));
      __syncwarp();  // the stage may be written again
    }
    stage_next_bias(c, at, own);
  } else if constexpr (kPrefetchOperands && !kFirst) {
    operands.load(p, c.shared.operands_offset[at.work.index()], lane_row(c, at, own),
                  lane_col(c, at, key_tile));
  }
}

// Waits for S of a tile, and gives its K back.  P V of the tile before may run on, with
// kOverlapSoftmaxPv.
template <bool kFirst>
FA_DEVICE void finish_gemm_qk(const Consumer& c, Pipelines& at) {
  if constexpr (kOverlapSoftmaxPv && !kFirst) {
    wgmma_wait_group<1>();
  } else {
    wgmma_wait_group<0>();
  }
  if constexpr (kExclusiveMma && !kFirst) warp_scheduler_arrive(c);
  if constexpr (kSparse) {
    arrive(c.shared.k_empty[at.k.index()]);  // each lane for the words that it read beside K
  } else {
    release(c, c.shared.k_empty[at.k.index()]);
  }
  at.k.advance();
}

template <bool kFirst>
FA_DEVICE void release_v(const Consumer& c, Pipelines& at) {
  if constexpr (!kFirst) {
    release(c, c.shared.v_empty[at.v.index()]);
    at.v.advance();
  }
}

// Whether every row of this warp that sees a key of the tile has a row_max, in a tile that has
// keys of several sequences or is hidden from some rows.  Asked before the products are there.
FA_DEVICE bool rows_have_max(const Consumer& c, const Pipelines& at, const GroupWork& own,
                             const OnlineSoftmax<1>& softmax, int key_tile) {
#if FA_PACKED
  const int first = first_col(c, at, key_tile), row = lane_row(c, at, own);
  bool all_have_max = true;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (softmax.row_max[0][h] > kNoMax) continue;
    const Interval keys = keys_of_row(c.params.common, row + 8 * h);
    all_have_max = all_have_max && (keys.first >= first + kTileN || keys.last < first);
  }
  return __all_sync(kFullWarp, all_have_max);
#else
  return false;
#endif
}

// Turns scores into weights as if row_max stayed where it is; returns false, with the scores gone,
// if it may not.  near: whether the scores of this thread are right, in a build without branches.
template <int kCols>
FA_DEVICE bool try_stale_max(const Consumer& c, const Pipelines& at, const GroupWork& own,
                             OnlineSoftmax<1>& softmax, const TileMask& mask,
                             float (&s)[1][kCols / 8][4],
                             const OperandTile<false, kCols / 8>& operands, bool& near) {
  const AttentionParams& p = c.params.common;
  if constexpr (kScoreMod) {
    if constexpr (kReadBiasLate) {
      near = apply_staged_bias(p, c.shared, c.warp, s[0]);
    } else if constexpr (kHasOperands && !kPrefetchOperands) {
      near = load_and_apply_score_mod_of_near<false>(p, c.shared.operands_offset[at.work.index()],
                                                     s[0], lane_row(c, at, own),
                                                     lane_col(c, at, mask.key_tile));
    } else {
      near = apply_score_mod_of_near(p, s[0], operands);
    }
    if (mask.listed) mask_by_bits(s, mask.visible_bits);
  }
  return softmax.try_stale_max<kNearIsLog2>(s, p.exp2_scale, near);
}

// Computes the scores of a tile again, without tensor cores: weights were written over them, and K
// and the words of the mask have been given back.
template <int kCols>
FA_DEVICE void reload_scores(const Consumer& c, const Pipelines& at, const GroupWork& own,
                             const TileMask& mask, float (&s)[1][kCols / 8][4], uint32 q_tile) {
  const AttentionParams& p = c.params.common;
  const auto& work = c.shared.work[at.work.index()];
  if constexpr (kSparse) mask.key_tile = reload_tile_number(p, work, own.tile);
#if FA_PAGES
  const BatchOffsets offsets = batch_offsets(p, reload_entry(c, at) << c.params.row_shift);
  const PagedKeys keys = paged_keys(c.params, offsets, work);
  recompute_scores<kBf16, QTile, kDim / 16>(p, s, q_tile + c.q_lane,
                                            first_col(c, at, mask.key_tile),
                                            [&](int key) { return keys.k(key); });
#else
  recompute_scores<kBf16, QTile, kDim / 16>(p, reload_entry(c, at) << c.params.row_shift, s,
                                            q_tile + c.q_lane, first_col(c, at, mask.key_tile));
#endif
  if constexpr (kSparse) mask.listed = reload_mask_words(p, work, own.tile, mask.visible_bits);
}

// Which weights of a tile are kept, as words of a mask.  Made while products are computed, when all
// of them have been asked for and the next warpgroup has its turn: tensor cores would wait if it
// stood between them.
template <int kCols>
FA_DEVICE void make_kept_bits(const Consumer& c, const Pipelines& at, const GroupWork& own,
                              uint32 (&kept)[1][2]) {
#if FA_DROPOUT
  int key_tile = key_tile_at(c.shared.work[at.work.index()], own.tile);
#if FA_SPARSE
  key_tile = c.shared.tile[at.k.index()] / 2;
#endif
  make_kept_bits<kCols>(c.params.common.dropout, c.shared.work[at.work.index()].dropout,
                        lane_row(c, at, own), first_col(c, at, key_tile), kept);
  for (uint32& word : kept[0]) word = opaque(word);  // or ptxas serialises products (C7511)
#endif
}

// Waits for the scores of a tile, turns them into its weights and, where a row_max has moved,
// rescales O.
template <bool kFirst, int kCols>
FA_DEVICE void softmax_step(const Consumer& c, Pipelines& at, GroupWork& own,
                            OnlineSoftmax<1>& softmax, bool& steady_scores, Scores& s,
                            Weights& weights, Output& o, const uint32& q_tile,
                            uint32 (&kept)[1][2]) {
  const AttentionParams& p = c.params.common;
  auto& s_tile = reinterpret_cast<float (&)[1][kCols / 8][4]>(s);
  auto& p_tile = reinterpret_cast<uint32(&)[1][kCols / 8][2]>(weights);
  int key_tile = key_tile_at(c.shared.work[at.work.index()], own.tile);
  bool listed = false;
  uint32 visible_bits[1][2];
  const TileMask mask = {key_tile, listed, visible_bits};
  bool has_max = false;  // whether all rows that see some key of the tile have a row_max
  if constexpr (kSparse) {
    listed = read_mask_tile(c.shared, at.k.index(), key_tile, visible_bits);
    if constexpr (!kFirst) has_max = softmax.has_max(visible_bits);
  } else if constexpr (!kFirst) {
    // Without a mask rows have a row_max once they have seen a key.
    has_max = own.tile > own.keys.full_begin;
    if constexpr (kAsksForMax) {
      if (!has_max) has_max = rows_have_max(c, at, own, softmax, key_tile);
    }
  }
  OperandTile<false, kCols / 8> operands;
  prefetch_operands<kFirst>(c, at, own, operands, key_tile);
  if constexpr (kDropout && kFirst) make_kept_bits<kCols>(c, at, own, kept);
  finish_gemm_qk<kFirst>(c, at);
  if constexpr (!kOverlapSoftmaxPv) release_v<kFirst>(c, at);
  if constexpr (!kScoreMod) mod_and_mask_scores<kCols>(c, at, own, mask, s_tile, steady_scores);
  bool use_stale_max = !kFirst && kCols == kTileN && has_max && !softmax.has_large_max;
  if constexpr (kScoreMod)
    use_stale_max = use_stale_max && steady_scores && !crosses_band(c, at, own, mask);
  // What a warp decides is not what its neighbours do, and a warpgroup waits for its products
  // at one place (PTX ISA 9.7.15.7.3: all its threads execute the same wgmma.wait_group).
  float correction[1][2];
  bool moved = false, near = true;
  bool has_weights =
      use_stale_max && try_stale_max<kCols>(c, at, own, softmax, mask, s_tile, operands, near);
  // Scores that grow from tile to tile, as ALiBi's do, pass row_max often, and seldom by much.
  if constexpr (kScoreMod) {
    if (use_stale_max && !has_weights && __all_sync(kFullWarp, near)) {
      has_weights = moved = softmax.move_stale_max(s_tile, correction);
    }
  }
  if (!has_weights) {
    if (use_stale_max) reload_scores<kCols>(c, at, own, mask, s_tile, q_tile);
    if (kScoreMod || use_stale_max) {
      mod_and_mask_scores<kCols>(c, at, own, mask, s_tile, steady_scores);
    }
    moved = softmax.update_max(s_tile, correction, p.exp2_scale) && !kFirst;
    // Scores that grow by more would be computed twice.
    if constexpr (kScoreMod) steady_scores = steady_scores && !moved;
    softmax.exponentiate<true>(s_tile, p.exp2_scale);
  }
  if constexpr (kOverlapSoftmaxPv) wgmma_wait_group<0>();
  if (moved) {
    rescale_o(o, correction);
  }
  if constexpr (kDropout) drop_by_bits(s_tile, kept);
  round_weights<kBf16>(s_tile, p_tile);
  if constexpr (kReadBiasLate) {
    // Either all lanes have read the stage, or none has: then copies to it may still be under way.
    wait_for_staged_bias<0>();
    stage_next_bias(c, at, own);
  }
  if constexpr (kOverlapSoftmaxPv) release_v<kFirst>(c, at);
  ++own.tile;
}

// ---------------------------------------------------------------------------------------- epilogue
// The batch entry of a row: the heads that share a tile are neighbouring entries.
FA_DEVICE uint32 entry_of_row(const Consumer& c, const Pipelines& at, int row) {
  return (reload_entry(c, at) << c.params.row_shift) + (row & ((1 << c.params.row_shift) - 1));
}

// Adds the sink of each row to its statistics, and rescales O.
FA_DEVICE void add_sinks(const Consumer& c, const Pipelines& at, OnlineSoftmax<1>& softmax,
                         Output& o, int my_row) {
  float correction[1][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(my_row + 8 * h, tile_rows(c.params) - 1);
    const float sink = sink_in_log2(
        load_sink(c.params.common, entry_of_row(c, at, row), row >> c.params.row_shift));
    correction[0][h] = add_sink(sink, softmax.row_max[0][h], softmax.row_sum[0][h]);
  }
  rescale_o(o, correction);
}

// Makes NaN of the statistics of rows of an invalid sequence or length, and so of their results.
FA_DEVICE void mark_invalid_rows(const Consumer& c, const Pipelines& at, OnlineSoftmax<1>& softmax,
                                 int my_row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    bool is_invalid = is_invalid_row(c.params.common, my_row + 8 * h);
#if FA_LENGTHS
    is_invalid = c.shared.work[at.work.index()].band.upper == kInvalidBound;
#endif
#if FA_PAGES
    is_invalid = is_invalid || c.shared.work[at.work.index()].has_invalid_page != 0;
#endif
    if (is_invalid) softmax.row_max[0][h] = softmax.row_sum[0][h] = FA_NAN;
  }
}

// Writes the log-sum-exp of each row.  Called by one of the four threads that share the rows.
FA_DEVICE void write_lse(const Consumer& c, const Pipelines& at, const OnlineSoftmax<1>& softmax,
                         int my_row) {
  const AttentionParams& p = c.params.common;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (my_row + 8 * h < tile_rows(c.params)) {
      const int row = my_row + 8 * h;
      p.lse[static_cast<int64>(entry_of_row(c, at, row)) * p.q_len + (row >> c.params.row_shift)] =
          log_sum_exp(softmax.row_max[0][h], softmax.row_sum[0][h]);
    }
  }
}

// Divides O by the sums of its rows and writes it over Q.  Makes NaN of nonfinite_probe[h] where an
// output of row h is not finite.
FA_DEVICE void write_output(const Consumer& c, const OnlineSoftmax<1>& softmax, const Output& o,
                            uint32 out_tile, uint32 (&nonfinite_probe)[2][2]) {
  float inverse[2] = {inverse_sum(softmax.row_sum[0][0]), inverse_sum(softmax.row_sum[0][1])};
#if FA_DROPOUT
  for (float& x : inverse) x *= c.params.common.dropout.factor;
#endif
  uint32 out[kMmaV][2];
#pragma unroll
  for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      out[j][h] = pack2<kBf16>(o[0][j][2 * h] * inverse[h], o[0][j][2 * h + 1] * inverse[h]);
      nonfinite_probe[h][j % 2] = fma2<kBf16>(out[j][h], 0, nonfinite_probe[h][j % 2]);
    }
  }
  // The output overwrites Q: of this warp's rows where they were in registers, else of them all.
  if constexpr (!kQInRegisters) bar_sync(kEpilogue + c.group, 128);
#pragma unroll
  for (int j = 0; j < kMmaV; j += 2) {
    stmatrix_x4(QTile::at(out_tile + c.q_lane, 0, j / 2), out[j][0], out[j][1], out[j + 1][0],
                out[j + 1][1]);
  }
}

#if FA_PAGES
FA_DEVICE PagedKeys keys_of_work(const Consumer& c, const Pipelines& at,
                                 const BatchOffsets& offsets) {
  return paged_keys(c.params, offsets, c.shared.work[at.work.index()]);
}
#elif FA_LENGTHS
FA_DEVICE DenseKeysOf<uint16, KeyBand> keys_of_work(const Consumer& c, const Pipelines& at,
                                                    const BatchOffsets& offsets) {
  return {c.params.common, offsets, c.shared.work[at.work.index()].band};
}
#else
FA_DEVICE DenseKeys keys_of_work(const Consumer& c, const Pipelines&, const BatchOffsets& offsets) {
  return {c.params.common, offsets, c.params.common};
}
#endif

// Computes rows of a warp again, key by key: those whose outputs are not finite, and those whose
// scores float32 cannot tell apart.
FA_DEVICE void recompute_rows(const Consumer& c, const Pipelines& at,
                              const OnlineSoftmax<1>& softmax, int row_of_group, int my_row,
                              const uint32 (&nonfinite_probe)[2][2]) {
  const AttentionParams& p = c.params.common;
  __syncwarp();
  uint32 recompute_lanes[2];  // lanes whose row it is
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float row_max = softmax.row_max[0][h], row_sum = softmax.row_sum[0][h];
    const int row = (my_row + 8 * h) >> c.params.row_shift;
    // A row whose sum is NaN saw a NaN and is to stay NaN.
    const bool nonfinite_output =
        (nonfinite_probe[h][0] | nonfinite_probe[h][1]) != 0 && row_sum == row_sum;
    recompute_lanes[h] = __ballot_sync(
        kFullWarp, nonfinite_output || exceeds_float32_scores<false, kSparse>(
                                           p, band_of(c.params, c.shared.work[at.work.index()]),
                                           row, row_max, row_sum));
  }
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const int row_in_group = c.warp_row + r, row = row_of_group + row_in_group;
    if (((r < 8 ? recompute_lanes[0] : recompute_lanes[1]) >> r % 8 * 4 & 15) == 0) continue;
    if (row >= tile_rows(c.params)) continue;
    const uint32 head = entry_of_row(c, at, row);
    const BatchOffsets offsets = batch_offsets(p, head);
    recompute_row<kBf16, (kDim + 31) / 32 * 32, kSparse>(
        p, offsets, keys_of_work(c, at, offsets), head, row >> c.params.row_shift,
        [&](int col, uint16 x) {
          const uint32 place = QTile::offset(row_in_group, col / 8) + col % 8 * 2;
          *reinterpret_cast<uint16*>(&c.shared.q[at.q.index()][place]) = x;
        });
  }
}

// Leaves O, not divided, and the statistics of its rows to the kernel that joins splits.
FA_DEVICE void write_partial(const Consumer& c, const Pipelines& at,
                             const OnlineSoftmax<1>& softmax, const Output& o, int my_row) {
#if FA_SPLIT
  const FwdSm90Params& params = c.params;
  const int lane = tid_x_again() % 32;  // three groups have no register for it in the loop
  const int64 first = c.shared.work[at.work.index()].split * params.rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = my_row + 8 * h;
    if (row >= tile_rows(params)) continue;
    const int64 place = first + static_cast<int64>(entry_of_row(c, at, row)) * params.common.q_len +
                        (row >> params.row_shift);
    if (lane % 4 == 0) {
      reinterpret_cast<float2*>(params.partial_stats)[place] =
          make_float2(softmax.row_max[0][h], softmax.row_sum[0][h]);
    }
    float2* out = reinterpret_cast<float2*>(params.partial_out + place * kDim) + lane % 4;
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      out[4 * j] = make_float2(o[0][j][2 * h], o[0][j][2 * h + 1]);
    }
  }
#endif
}

// From O and the statistics of its rows to the output and the log-sum-exp.
FA_DEVICE void epilogue(const Consumer& c, const Pipelines& at, OnlineSoftmax<1>& softmax,
                        Output& o, int row_of_group, uint32 out_tile) {
  const AttentionParams& p = c.params.common;
  softmax.reduce_row_sum();
  const int my_row = row_of_group + c.warp_row + c.lane / 4;
  if constexpr (kSplit) {
    if constexpr (kLengths) mark_invalid_rows(c, at, softmax, my_row);
    write_partial(c, at, softmax, o, my_row);
    __syncwarp();
    release(c, c.shared.out_full[at.q.index()]);
    return release(c, c.shared.work_empty[at.work.index()]);
  }
  if (p.sinks != nullptr) add_sinks(c, at, softmax, o, my_row);
  if constexpr (kPacked || kLengths) mark_invalid_rows(c, at, softmax, my_row);
  if (p.lse != nullptr && c.lane % 4 == 0) write_lse(c, at, softmax, my_row);
  uint32 nonfinite_probe[2][2] = {{0, 0}, {0, 0}};
  write_output(c, softmax, o, out_tile, nonfinite_probe);
  // One question of all rows first: hardly any warp has a row to be computed again.
  const float largest_max = fmaxf(fabsf(softmax.row_max[0][0]), fabsf(softmax.row_max[0][1]));
  const uint32 nonfinite_bits =
      nonfinite_probe[0][0] | nonfinite_probe[0][1] | nonfinite_probe[1][0] | nonfinite_probe[1][1];
  if (__any_sync(kFullWarp, largest_max >= kCoarseScore || nonfinite_bits != 0)) {
    recompute_rows(c, at, softmax, row_of_group, my_row, nonfinite_probe);
  }
  fence_proxy_async_shared();
  __syncwarp();
  release(c, c.shared.out_full[at.q.index()]);
  release(c, c.shared.work_empty[at.work.index()]);
}

// ---------------------------------------------------------------------------------------- mainloop
// One key tile but the first: starts S = Q K^T of the tile and O += P V of the one before, then
// turns S into the next P while P V runs.
template <int kCols>
FA_DEVICE void fwd_step(const Consumer& c, Pipelines& at, GroupWork& own, OnlineSoftmax<1>& softmax,
                        bool& steady_scores, Scores& s, Weights& weights, Output& o, QFragments& q,
                        const uint32& q_tile) {
  wait(c.shared.k_full[at.k.index()], at.k.parity());
  warp_scheduler_sync(c);
  wgmma_fence();
  gemm_qk<kCols>(s, q, q_tile, cvta_to_shared(c.shared.k[at.k.index()]));
  wait(c.shared.v_full[at.v.index()], at.v.parity());
  wgmma_fence();
  gemm_pv<kTileN>(o, weights, cvta_to_shared(c.shared.v[at.v.index()]));
  if constexpr (!kExclusiveMma) warp_scheduler_arrive(c);
  uint32 kept[1][2];
  if constexpr (kDropout) {
    // V is there: these loops keep ptxas from moving what is between them among the products, or
    // behind the wait for them.
    if constexpr (kExclusiveMma) wait(c.shared.v_full[at.v.index()], at.v.parity());
    make_kept_bits<kCols>(c, at, own, kept);
    wait(c.shared.v_full[at.v.index()], at.v.parity());
  }
  softmax_step<false, kCols>(c, at, own, softmax, steady_scores, s, weights, o, q_tile, kept);
}

// Puts zeros in place of values behind the last key of a batch entry, in the tile that has the end:
// memory that was never written may hold NaN, and 0 * NaN would have all rows computed again.  Each
// warpgroup does so before it reads them, for both write the same.
FA_DEVICE void clear_later_values(const Consumer& c, const Pipelines& at, const GroupWork& own) {
#if FA_LENGTHS
  const int len = c.shared.work[at.work.index()].band.k_len - (own.tile - 1) * kTileN;
  if (len >= kTileN) return;
  const uint32 rows = max(len, 0), chunks = (kTileN - rows) * 8;  // 16 bytes each
  const uint32 tile = cvta_to_shared(c.shared.v[at.v.index()]) + rows * 128;
  const uint32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll 1
    for (uint32 i = tid_x_again() % 128; i < chunks; i += 128) {
      st_shared_v4_b32(tile + block * kTileN * 128 + 16 * i, zeros);
    }
  }
  fence_proxy_async_shared();
  bar_sync(kEpilogue + c.group, 128);
#endif
}

// O += P V of the last key tile.
FA_DEVICE void last_gemm_pv(const Consumer& c, Pipelines& at, const GroupWork& own, Output& o,
                            const Weights& weights) {
  wait(c.shared.v_full[at.v.index()], at.v.parity());
  if constexpr (kLengths) clear_later_values(c, at, own);
  if (own.half_last_tile) {
    wgmma_fence();
    gemm_pv<kTileN / 2>(o, weights, cvta_to_shared(c.shared.v[at.v.index()]));
  } else {
    wgmma_fence();
    gemm_pv<kTileN>(o, weights, cvta_to_shared(c.shared.v[at.v.index()]));
  }
  wgmma_wait_group<0>();
  release(c, c.shared.v_empty[at.v.index()]);
  at.v.advance();
}

// The forward pass of a consumer warpgroup, work tile by work tile: Algorithm 2 of the
// FlashAttention-3 paper (arXiv:2407.08608), whose S_next is s and whose P_cur is weights.
FA_DEVICE void consume(const FwdSm90Params& params, SharedStorage& shared, int warp) {
  const int group = warp / 4 - 1, lane = threadIdx.x % 32, warp_row = warp % 4 * 16;
  // Rows 0-7, 8-15, then the same of the next 8 columns (PTX ISA 9.7.14.5.15).
  const uint32 q_lane = QTile::lane_offset(warp_row + lane % 16, lane / 16);
  const Consumer c = {params, shared, group, warp, lane, warp_row, q_lane};
  Pipelines at;
  at.q.advance(group);
  if (group == kGroups - 1) warp_scheduler_arrive(c);  // the first one's

  GroupWork own;
  uint32 q_tile;
  QFragments q;
  Scores s;
  Weights weights;
  Output o;
  bool has_work = peek_work_tile(c, own, at.work);
  if (!has_work) return;
  first_gemm_qk(c, at, own, s, q, q_tile, at.q, true);
#pragma unroll 1
  while (true) {
    OnlineSoftmax<1> softmax;
    softmax.reset();
    clear(o);
    // Whether the last tile whose largest scores were looked for left row_max where it was, and had
    // only scores near 0.
    bool steady_scores = true;
    uint32 kept[1][2];
    softmax_step<true, kTileN>(c, at, own, softmax, steady_scores, s, weights, o, q_tile, kept);
#pragma unroll 1
    while (own.tile < own.keys.end - (own.half_last_tile ? 1 : 0)) {
      fwd_step<kTileN>(c, at, own, softmax, steady_scores, s, weights, o, q, q_tile);
    }
    if (own.half_last_tile && own.tile < own.keys.end) {
      fwd_step<kHalfTile>(c, at, own, softmax, steady_scores, s, weights, o, q, q_tile);
    }
    last_gemm_pv(c, at, own, o, weights);
    if constexpr (!kSparse) {
#pragma unroll 1
      for (; own.tile < shared.work[at.work.index()].end; ++own.tile) skip_key_tile(c, at);
    }

    const int row_of_group = reload_first_row(c, at, own);
    const uint32 out_tile = q_tile;
    WorkPipeline next_work_pipe = at.work;
    next_work_pipe.advance();
    QPipeline next_q_pipe = at.q;
    next_q_pipe.advance(kGroups);
    has_work = peek_work_tile(c, own, next_work_pipe);
    // With room for the next rows of Q beside the output, their first products start here.
    if constexpr (kPrefetchNextQ) {
      first_gemm_qk(c, at, own, s, q, q_tile, next_q_pipe, has_work);
    }
    epilogue(c, at, softmax, o, row_of_group, out_tile);
    if (!has_work) break;
    if constexpr (!kPrefetchNextQ) first_gemm_qk(c, at, own, s, q, q_tile, next_q_pipe, true);
    at.work = next_work_pipe;
    at.q = next_q_pipe;
  }
  wgmma_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_fwd_sm90(const __grid_constant__ FwdSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) {
      init(shared.q_full[i], 1);
      init(shared.q_empty[i], 1);
      init(shared.out_full[i], 4);
    }
    for (int i = 0; i < kStages; ++i) {
      init(shared.k_full[i], 1);
      init(shared.k_empty[i], kSparse ? 128 * kGroups : 4 * kGroups);
      init(shared.v_full[i], 1);
      init(shared.v_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      init(shared.work_full[i], kGroups + 1 + kSparse);
      init(shared.work_empty[i], 4 * kGroups + 3);
      init(shared.work_started[i], 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp >= 4) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(params, shared, warp);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
#if FA_PAGES
    if (warp == 0) {
      load_paged_kv(params, shared);
    } else
#endif
        if (warp == 0 && elect_sync()) {
      prefetch_tensormap(&params.k_map);
      prefetch_tensormap(&params.v_map);
      load_kv(params, shared);
    } else if (warp == 1 && elect_sync()) {
      prefetch_tensormap(&params.q_map);
      load_q(params, shared);
    } else if (warp == 2 && elect_sync()) {
      prefetch_tensormap(&params.out_map);
      store_out(params, shared);
    } else if (warp == 3) {
      run_tile_scheduler(params, shared);
    }
  }
}
