// Attention forward for SM90: TMA, wgmma, warp specialisation, a persistent grid.
//
// A block works on kTileM query rows of one batch entry at a time.  The first
// warpgroup is the producer: a warp schedules work tiles, one thread loads keys and values, one
// loads queries, and one stores outputs.  The other kGroups warpgroups are consumers, each with 64
// rows of its own.
// For each tile of kTileN keys a consumer starts S = Q K^T of that tile and O += P V of the tile
// before, and turns S into the next P while the tensor cores compute products that it or
// another consumer has started (docs: "Reading fwd_sm90").
#include "cuda_src/attention/fwd_sm90.cuh"
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/recompute_row.cuh"
#include "cuda_src/common/recompute_scores.cuh"
#include "cuda_src/common/score_mod.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/softmax.cuh"
#include "cuda_src/common/tile_scheduler.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

// --------------------------------------------------------------------------------------- producers
// Writes the work tile with an index of the schedule, by a warp; returns false past the last one.
FA_DEVICE bool write_work_tile(const FwdSm90Params& params, WorkTile& work, uint32 index) {
  const int lane = threadIdx.x % 32;
  if (index >= params.scheduler.tiles) {
    if (lane == kGroups) work.q_begin = -1;
    return false;
  }
  const AttentionParams& p = params.common;
  const ScheduledTile tile =
      kSparse ? work_tile_in_order(params.scheduler, p.mask.order, p.q_tiles, index)
              : work_tile_at(params.scheduler, p.q_tiles, index);
  const int q_begin = tile.query_tile * kTileM;
  // One lane for each consumer finds the key tiles of its rows, and one more those of all rows.
  const bool whole_block = lane >= kGroups;
  const int first_row = q_begin + (whole_block ? 0 : 64 * lane);
  const int last_row = min(first_row + (whole_block ? kTileM : 64), tile_rows(params)) - 1;
  KeyTiles keys = {0, 0, 0, 0};
  if (first_row <= last_row) {
    keys = key_tiles(p, first_row >> params.row_shift, last_row >> params.row_shift, kTileN);
  }
  // Rows without visible keys process one key tile that is hidden from them, so that no later code
  // needs a case for them.
  const int begin = __shfl_sync(kFullWarp, keys.begin, kGroups);
  if (keys.begin == keys.end) keys = {begin, begin + 1, 0, 0};
  if constexpr (kSparse) {
    keys.begin = 0;
    keys.end = find_blocks(p, work, p.first_batch + tile.entry, q_begin);
  }
  if (lane < kGroups) {
    const int visible_keys = last_key(p, last_row >> params.row_shift) - (keys.end - 1) * kTileN;
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
    const bool has_work = write_work_tile(params, shared.work[work_pipe.index()], index);
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
                                     barrier, kEvictLast, 64 * block, tile * kTileN,
                                     work.coordinate[2] * step[2], work.coordinate[1] * step[1],
                                     work.coordinate[0] * step[0]);
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
        if (tile < work.end) load_k(tile, 0);
        if (tile > work.begin) load_v(tile - 1);
      }
    }
  }
}

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
      arrive(shared.q_empty[q_pipe.index()]);
      q_pipe.advance();
    }
  }
  cp_async_bulk_wait_group<0>();
}

// --------------------------------------------------------------------------------------- consumers
// The phases of a consumer are free functions; the frame of `consume` owns all their state.

// S = Q K^T with the first kCols keys of a tile.  Starts the product; s is not to be touched before
// a wgmma_wait_group.
template <int kCols>
FA_DEVICE void gemm_qk(float (&s)[1][kMmaN][4], const uint32 (&q)[kQFragments][4], uint32 q_tile,
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

// Multiplies O by the factors of rows whose row_max has moved.
FA_DEVICE void rescale_o(float (&o)[1][kMmaV][4], const float (&correction)[1][2]) {
#pragma unroll
  for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[0][j][e] *= correction[0][e / 2];
  }
}

constexpr Constant<kTileN> kWholeTile;
constexpr Constant<kHalfLastTile ? kTileN / 2 : kTileN> kHalfTile;

// References to the variables of `consume`, which are what its phases work on.
//
// The variables live in the frame of `consume`, one by one: ptxas serialises the wgmma of a struct
// that holds them, and allots registers differently for another order of these members.
struct Consumer {
  const FwdSm90Params& params;
  SharedStorage& shared;
  const int& group;      // this warpgroup, counted from the first consumer
  const int& warp;       // this warp of the block
  const int& lane;       // this lane of the warp
  const int& warp_row;   // first of the warp's 16 rows among the warpgroup's 64
  const uint32& q_lane;  // offset of the row that this lane addresses in an ldmatrix.x4 of Q
  WorkPipeline& work_pipe;
  QPipeline& q_pipe;
  KVPipeline& v_pipe;
  KVPipeline& k_pipe;
  int& first_row;                  // of the warpgroup's 64 rows of the work tile
  int& tile;                       // the next key tile; with a mask, its position in the lists
  KeyTiles& keys;                  // key tiles that the 64 rows see, of those that are loaded
  bool& half_last_tile;            // only the first half of the last key tile is seen
  uint32& q_tile;                  // shared memory address of the rows of Q
  uint32 (&q)[kQFragments][4];     // Q, if it is kept in registers
  float (&s)[1][kMmaN][4];         // S, then P in float32
  uint32 (&weights)[1][kMmaN][2];  // P, rounded
  float (&o)[1][kMmaV][4];
};

// One lane of a warp arrives at the barrier.
FA_DEVICE void release(const uint64& barrier, const Consumer& c) {
  if (c.lane == 0) arrive(barrier);
}

// Waits for this warpgroup's turn to start products.
FA_DEVICE void warp_scheduler_sync(const Consumer& c) { bar_sync(kWarpScheduler + c.group, 256); }

// Passes the turn to the next warpgroup.
FA_DEVICE void warp_scheduler_arrive(const Consumer& c) {
  bar_arrive(kWarpScheduler + (c.group + 1) % kGroups, 256);
}

// Takes part in the barriers of a key tile that no row of this warpgroup sees.
FA_DEVICE void skip_key_tile(const Consumer& c) {
  warp_scheduler_sync(c);
  warp_scheduler_arrive(c);
  wait(c.shared.k_full[c.k_pipe.index()], c.k_pipe.parity());
  __syncwarp();  // or a lane that comes late would find the phase after the next
  release(c.shared.k_empty[c.k_pipe.index()], c);
  c.k_pipe.advance();
  wait(c.shared.v_full[c.v_pipe.index()], c.v_pipe.parity());
  __syncwarp();
  release(c.shared.v_empty[c.v_pipe.index()], c);
  c.v_pipe.advance();
}

// Reads the work tile in a stage; returns false when there is no more work.  The stage is given
// back by the epilogue.
FA_DEVICE bool peek_work_tile(const Consumer& c, const WorkPipeline& work_pipe) {
  wait(c.shared.work_full[work_pipe.index()], work_pipe.parity());
  const WorkTile& work = c.shared.work[work_pipe.index()];
  if (work.q_begin < 0) return false;
  c.first_row = work.q_begin + 64 * c.group;
  c.tile = work.begin;
  c.keys = work.group[c.group].keys;
  c.half_last_tile = kHalfLastTile && work.group[c.group].half_last_tile;
  return true;
}

// Starts S = Q K^T of the first key tile of a work tile, whose rows of Q are in the stage of
// q_pipe.  When there is no more work (has_work is false) a product of old data is started and not
// read: ptxas serialises all wgmma of a kernel if some of them start behind a branch.
FA_DEVICE void first_gemm_qk(const Consumer& c, const QPipeline& q_pipe, bool has_work) {
  uint32 k_tile = cvta_to_shared(c.shared.k[0]);
  c.q_tile = k_tile;
  if (has_work) {
    wait(c.shared.q_full[q_pipe.index()], q_pipe.parity());
    c.q_tile = cvta_to_shared(c.shared.q[q_pipe.index()]);
    if constexpr (kQInRegisters) load_q_fragments(c.q, c.q_tile + c.q_lane);
    if constexpr (!kSparse) {
#pragma unroll 1
      for (; c.tile < c.keys.begin; ++c.tile) skip_key_tile(c);
    }
    wait(c.shared.k_full[c.k_pipe.index()], c.k_pipe.parity());
    k_tile = cvta_to_shared(c.shared.k[c.k_pipe.index()]);
  }
  warp_scheduler_sync(c);
  wgmma_fence();
  gemm_qk<kTileN>(c.s, c.q, c.q_tile, k_tile);
  warp_scheduler_arrive(c);
}

// The batch entry and the first row of the work tile at hand.  Both are read from shared memory
// again at each use, because there is no register to keep them in; without a mask there is one for
// the row.
FA_DEVICE uint32 reload_entry(const Consumer& c) {
  return c.shared.work[c.work_pipe.index()].entry;
}
FA_DEVICE int reload_first_row(const Consumer& c) {
  return kSparse ? c.shared.work[c.work_pipe.index()].q_begin + 64 * c.group : c.first_row;
}

// What the mask says of a key tile.  Without a mask only the number is used.
struct TileMask {
  int key_tile;               // its number among all key tiles
  bool has_words;             // whether the tile's block is partial
  uint32 visible_bits[1][2];  // the scores that its words leave, a number for each of two rows
};

// Applies scale, softcap and bias in the builds that have them, and hides keys by the mask and by
// the band.
template <int kCols>
FA_DEVICE void mod_and_mask_scores(const Consumer& c, TileMask& mask, float (&s)[1][kCols / 8][4]) {
  const AttentionParams& p = c.params.common;
  if constexpr (kScoreMod) {
    apply_score_mod(p, batch_offsets(p, reload_entry(c)), s, c.shared.scratch[c.warp - 4],
                    reload_first_row(c) + c.warp_row, mask.key_tile * kTileN);
  }
  if constexpr (kSparse) {
    const KeyTiles& band_tiles = c.shared.work[c.work_pipe.index()].group[c.group].keys;
    const bool crosses_band =
        (mask.key_tile < band_tiles.full_begin) | (mask.key_tile >= band_tiles.full_end);
    if (crosses_band) {
      // The row and column of this thread are computed here, from threadIdx.x read again: few tiles
      // come here, and kept over the loop they would take registers that the words need.
      const int tid = tid_x_again();
      const int row = reload_first_row(c) + tid / 32 % 4 * 16 + tid % 32 / 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first_col = mask.key_tile * kTileN + 2 * (tid % 4);
        mask.visible_bits[0][h] &= visible_columns(p, row + 8 * h, first_col, 2 * kMmaN);
      }
    }
    if (mask.has_words || crosses_band) mask_by_bits(s, mask.visible_bits);
  } else if (c.tile < c.keys.full_begin || c.tile >= c.keys.full_end) {
    mask_outside_band(p, s, c.first_row + c.warp_row + c.lane / 4,
                      c.tile * kTileN + 2 * (c.lane % 4), c.params.row_shift);
  }
}

// Waits for the scores of a key tile, turns them into weights and, where a row_max has moved,
// rescales O.  Gives back K of this tile and, but for the first tile, V of the one before.
template <bool kFirst, int kCols>
FA_DEVICE void softmax_step(const Consumer& c, OnlineSoftmax<1>& softmax) {
  const AttentionParams& p = c.params.common;
  auto& s_tile = reinterpret_cast<float (&)[1][kCols / 8][4]>(c.s);
  auto& p_tile = reinterpret_cast<uint32(&)[1][kCols / 8][2]>(c.weights);
  TileMask mask;
  mask.key_tile = c.tile;
  mask.has_words = false;
  bool rows_have_max = false;  // whether every row that sees a key of the tile has a row_max
  if constexpr (kSparse) {
    mask.has_words = read_mask_tile(c.shared, c.k_pipe.index(), mask.key_tile, mask.visible_bits);
    if constexpr (!kFirst && !kScoreMod) rows_have_max = softmax.has_max(mask.visible_bits);
  }
  if constexpr (kOverlapSoftmaxPv && !kFirst) {
    wgmma_wait_group<1>();  // S is done, P V may be running
  } else {
    wgmma_wait_group<0>();
  }
  if constexpr (kExclusiveMma && !kFirst) warp_scheduler_arrive(c);
  if constexpr (kSparse) {
    arrive(
        c.shared.k_empty[c.k_pipe.index()]);  // every lane, because each has read words of its own
  } else {
    release(c.shared.k_empty[c.k_pipe.index()], c);
  }
  c.k_pipe.advance();
  auto release_v = [&]() {
    if constexpr (!kFirst) {
      release(c.shared.v_empty[c.v_pipe.index()], c);
      c.v_pipe.advance();
    }
  };
  if constexpr (!kOverlapSoftmaxPv) release_v();
  mod_and_mask_scores<kCols>(c, mask, s_tile);
  // Without a mask rows have a row_max once they have seen a key.
  const bool use_stale_max = !kFirst && kCols == kTileN && !kScoreMod &&
                             (kSparse ? rows_have_max : c.tile > c.keys.full_begin) &&
                             !softmax.has_large_max;
  // Each warp decides for itself, and O is rescaled after the branch: all threads of a warpgroup
  // have to wait for products at the same wgmma.wait_group (PTX ISA 9.7.15.7.3).
  float correction[1][2];
  bool moved = false;
  if (!use_stale_max || !softmax.try_stale_max(s_tile, p.exp2_scale)) {
    if (use_stale_max) {  // the weights were written over the scores, and K has been given back
      const auto& work = c.shared.work[c.work_pipe.index()];
      if constexpr (kSparse) mask.key_tile = reload_tile_number(p, work, c.tile);
      recompute_scores<kBf16, QTile, kDim / 16>(p, reload_entry(c) << c.params.row_shift, s_tile,
                                                c.q_tile + c.q_lane, mask.key_tile * kTileN);
      if constexpr (kSparse) {
        mask.has_words = reload_mask_words(p, work, c.tile, mask.visible_bits);
      }
      mod_and_mask_scores<kCols>(c, mask, s_tile);
    }
    moved = softmax.update_max(s_tile, correction, p.exp2_scale) && !kFirst;
    softmax.exponentiate<true>(s_tile, p.exp2_scale);
  }
  if constexpr (kOverlapSoftmaxPv) wgmma_wait_group<0>();
  if (moved) rescale_o(c.o, correction);
  round_weights<kBf16>(s_tile, p_tile);
  if constexpr (kOverlapSoftmaxPv) release_v();
  ++c.tile;
}

// The batch entry of a row: the heads that share a tile are neighbouring entries.
FA_DEVICE uint32 entry_of_row(const Consumer& c, int row) {
  return (reload_entry(c) << c.params.row_shift) + (row & ((1 << c.params.row_shift) - 1));
}

FA_DEVICE void write_lse(const Consumer& c, const OnlineSoftmax<1>& softmax, int my_row) {
  const AttentionParams& p = c.params.common;
  if (p.lse == nullptr || c.lane % 4 != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (my_row + 8 * h < tile_rows(c.params)) {
      const int row = my_row + 8 * h;
      p.lse[static_cast<int64>(entry_of_row(c, row)) * p.q_len + (row >> c.params.row_shift)] =
          log_sum_exp(softmax.row_max[0][h], softmax.row_sum[0][h]);
    }
  }
}

// Divides O by the sums of its rows and writes it over Q.  Sets nonfinite_probe[h] to a NaN where
// an output of row h is not finite, else to 0.
FA_DEVICE void write_output(const Consumer& c, const OnlineSoftmax<1>& softmax, uint32 out_tile,
                            uint32 (&nonfinite_probe)[2][2]) {
  const float inverse[2] = {inverse_sum(softmax.row_sum[0][0]), inverse_sum(softmax.row_sum[0][1])};
  uint32 out[kMmaV][2];
#pragma unroll
  for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      out[j][h] = pack2<kBf16>(c.o[0][j][2 * h] * inverse[h], c.o[0][j][2 * h + 1] * inverse[h]);
      nonfinite_probe[h][j % 2] = fma2<kBf16>(out[j][h], 0, nonfinite_probe[h][j % 2]);
    }
  }
  // With Q in registers a warp has read only its own rows of the tile, else it has read all.
  if constexpr (!kQInRegisters) bar_sync(kEpilogue + c.group, 128);
#pragma unroll
  for (int j = 0; j < kMmaV; j += 2) {
    stmatrix_x4(QTile::at(out_tile + c.q_lane, 0, j / 2), out[j][0], out[j][1], out[j + 1][0],
                out[j + 1][1]);
  }
}

// Computes again, one by one, the rows of a warp whose outputs are not finite or whose scores
// float32 cannot hold.
FA_DEVICE void recompute_rows(const Consumer& c, const OnlineSoftmax<1>& softmax, int row_of_group,
                              const uint32 (&nonfinite_probe)[2][2]) {
  const AttentionParams& p = c.params.common;
  const int my_row = row_of_group + c.warp_row + c.lane / 4;
  // One question of all rows first: hardly any warp has a row to be computed again.
  const float largest_max = fmaxf(fabsf(softmax.row_max[0][0]), fabsf(softmax.row_max[0][1]));
  const uint32 nonfinite_bits =
      nonfinite_probe[0][0] | nonfinite_probe[0][1] | nonfinite_probe[1][0] | nonfinite_probe[1][1];
  if (__any_sync(kFullWarp, largest_max >= kCoarseScore || nonfinite_bits != 0)) {
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
          kFullWarp,
          nonfinite_output || exceeds_float32_scores<false, kSparse>(p, row, row_max, row_sum));
    }
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const int row_in_group = c.warp_row + r, row = row_of_group + row_in_group;
      if (((r < 8 ? recompute_lanes[0] : recompute_lanes[1]) >> r % 8 * 4 & 15) == 0) continue;
      if (row >= tile_rows(c.params)) continue;
      const uint32 head = entry_of_row(c, row);
      recompute_row<kBf16, (kDim + 31) / 32 * 32, kSparse>(
          p, batch_offsets(p, head), head, row >> c.params.row_shift, [&](int col, uint16 x) {
            const uint32 at = QTile::offset(row_in_group, col / 8) + col % 8 * 2;
            *reinterpret_cast<uint16*>(&c.shared.q[c.q_pipe.index()][at]) = x;
          });
    }
  }
}

// Everything after the last product of a work tile: LSE, output, rows that have to be computed
// again.  Hands the output to store_out and the stage of the work tile back.
FA_DEVICE void epilogue(const Consumer& c, OnlineSoftmax<1>& softmax, int row_of_group,
                        uint32 out_tile) {
  softmax.reduce_row_sum();
  write_lse(c, softmax, row_of_group + c.warp_row + c.lane / 4);
  uint32 nonfinite_probe[2][2] = {{0, 0}, {0, 0}};
  write_output(c, softmax, out_tile, nonfinite_probe);
  recompute_rows(c, softmax, row_of_group, nonfinite_probe);
  fence_proxy_async_shared();
  __syncwarp();
  release(c.shared.out_full[c.q_pipe.index()], c);
  release(c.shared.work_empty[c.work_pipe.index()], c);
}

// A consumer warpgroup: 64 rows of each work tile.
FA_DEVICE void consume(const FwdSm90Params& params, SharedStorage& shared, int warp) {
  const int group = warp / 4 - 1, lane = threadIdx.x % 32;
  const int warp_row = warp % 4 * 16;
  // Rows 0-7, rows 8-15, then the same rows of the next 8 columns (PTX ISA 9.7.14.5.15).
  const uint32 q_lane = QTile::lane_offset(warp_row + lane % 16, lane / 16);
  WorkPipeline work_pipe;
  QPipeline q_pipe;
  q_pipe.advance(group);
  KVPipeline k_pipe, v_pipe;
  int first_row;
  KeyTiles keys;
  bool half_last_tile;
  int tile;
  uint32 q_tile;
  uint32 q[kQFragments][4];
  float s[1][kMmaN][4];
  uint32 weights[1][kMmaN][2];
  float o[1][kMmaV][4];
  const Consumer c = {params,         shared, group,  warp,   lane,      warp_row, q_lane,
                      work_pipe,      q_pipe, v_pipe, k_pipe, first_row, tile,     keys,
                      half_last_tile, q_tile, q,      s,      weights,   o};

  if (group == kGroups - 1) warp_scheduler_arrive(c);  // the first turn
  bool has_work = peek_work_tile(c, work_pipe);
  if (!has_work) return;
  first_gemm_qk(c, q_pipe, true);
#pragma unroll 1
  while (true) {
    OnlineSoftmax<1> softmax;
    softmax.reset();
    clear(o);
    auto fwd_step = [&](auto cols) {
      constexpr int kCols = decltype(cols)::value;
      wait(shared.k_full[k_pipe.index()], k_pipe.parity());
      warp_scheduler_sync(c);
      wgmma_fence();
      gemm_qk<kCols>(s, q, q_tile, cvta_to_shared(shared.k[k_pipe.index()]));
      wait(shared.v_full[v_pipe.index()], v_pipe.parity());
      wgmma_fence();
      gemm_pv<kTileN>(o, weights, cvta_to_shared(shared.v[v_pipe.index()]));
      if constexpr (!kExclusiveMma) warp_scheduler_arrive(c);
      softmax_step<false, kCols>(c, softmax);
    };

    softmax_step<true, kTileN>(c, softmax);
#pragma unroll 1
    while (tile < keys.end - (half_last_tile ? 1 : 0)) fwd_step(kWholeTile);
    if (half_last_tile && tile < keys.end) fwd_step(kHalfTile);
    wait(shared.v_full[v_pipe.index()], v_pipe.parity());
    if (half_last_tile) {
      wgmma_fence();
      gemm_pv<kTileN / 2>(o, weights, cvta_to_shared(shared.v[v_pipe.index()]));
    } else {
      wgmma_fence();
      gemm_pv<kTileN>(o, weights, cvta_to_shared(shared.v[v_pipe.index()]));
    }
    wgmma_wait_group<0>();
    release(shared.v_empty[v_pipe.index()], c);
    v_pipe.advance();
    if constexpr (!kSparse) {
#pragma unroll 1
      for (; tile < shared.work[work_pipe.index()].end; ++tile) skip_key_tile(c);
    }

    const int row_of_group = reload_first_row(c);
    const uint32 out_tile = q_tile;
    WorkPipeline next_work_pipe = work_pipe;
    next_work_pipe.advance();
    QPipeline next_q_pipe = q_pipe;
    next_q_pipe.advance(kGroups);
    has_work = peek_work_tile(c, next_work_pipe);
    // With room for the next rows of Q beside the output, their first products start here.
    if constexpr (kPrefetchNextQ) first_gemm_qk(c, next_q_pipe, has_work);
    epilogue(c, softmax, row_of_group, out_tile);
    if (!has_work) break;
    if constexpr (!kPrefetchNextQ) first_gemm_qk(c, next_q_pipe, true);
    work_pipe = next_work_pipe;
    q_pipe = next_q_pipe;
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
