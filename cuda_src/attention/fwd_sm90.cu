// Attention forward for SM90: TMA, wgmma, warp specialisation, a persistent grid.
//
// A block works on kTileM query rows of one batch entry at a time.  Three threads of its first
// warpgroup feed it (one draws up the order of work and loads keys and values, one loads queries,
// one stores outputs), the other kGroups warpgroups compute, each on 64 rows of its own.  For each
// tile of kTileN keys a warpgroup starts S = Q K^T of that tile and O += P V of the tile before,
// and turns S into the next P while the tensor cores are busy with what it or its neighbours have
// started (docs: "Reading fwd_sm90").
#include "cuda_src/attention/fwd_sm90.cuh"
#include "cuda_src/common/attend_row.cuh"
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/barriers.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/rescore.cuh"
#include "cuda_src/common/schedule.cuh"
#include "cuda_src/common/scores.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

// ----------------------------------------------------------------------------------------- feeding
// Writes down the work that an index of the schedule stands for, by a warp; false when there is
// none.
FA_DEVICE bool announce(const FwdSm90Params& params, Work& work, uint32 index) {
  const int lane = threadIdx.x % 32;
  if (index >= params.schedule.tiles) {
    if (lane == kGroups) work.q_begin = -1;
    return false;
  }
  const AttentionParams& p = params.common;
  const Tile tile = kSparse ? tile_in_order(params.schedule, p.mask.order, p.q_tiles, index)
                            : tile_of(params.schedule, p.q_tiles, index);
  const int q_begin = tile.row_tile * kTileM;
  // One lane for each warpgroup looks for its key tiles, and one more for all of the block's.
  const bool all = lane >= kGroups;
  const int first_row = q_begin + (all ? 0 : 64 * lane);
  const int last_row = min(first_row + (all ? kTileM : 64), tile_rows(params)) - 1;
  KeyTiles keys = {0, 0, 0, 0};
  if (first_row <= last_row) {
    keys = key_tiles(p, first_row >> params.row_shift, last_row >> params.row_shift, kTileN);
  }
  // Rows that see no key go through one tile like all others, which hides all of it from them.
  const int begin = __shfl_sync(kFullWarp, keys.begin, kGroups);
  if (keys.begin == keys.end) keys = {begin, begin + 1, 0, 0};
  if constexpr (kSparse) {
    keys.begin = 0;
    keys.end = find_blocks(p, work, p.first_batch + tile.entry, q_begin);
  }
  if (lane < kGroups) {
    const int seen = last_key(p, last_row >> params.row_shift) - (keys.end - 1) * kTileN;
    work.group[lane] = {keys, kHalves && seen < kTileN / 2};
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

// Draws up the order of this block's work.
FA_DEVICE void schedule_work(const FwdSm90Params& params, SharedStorage& shared) {
  const int lane = threadIdx.x % 32;
  WorkPlace place;
  uint32 index = blockIdx.x;
  bool first = true;
#pragma unroll 1
  while (true) {
    wait(shared.work_empty[place.index()], place.parity() ^ 1);
    const bool more = announce(params, shared.work[place.index()], index);
    if (lane <= kGroups || (kSparse && lane == kPartialLane)) {  // all that write
      arrive(shared.work_full[place.index()]);
    }
    if (!more) break;
    // The ticket of the next tile is taken when the loads of this one begin: later, its own loads
    // would be late; earlier, a block that is behind would keep tiles from others.
    wait(shared.work_begun[place.index()], place.parity());
    place.advance();
    if (params.schedule.counter == nullptr) {
      index = params.schedule.tiles;
    } else {
      if (lane == 0) {
        index = tile_for(params.schedule,
                         first ? take_first_ticket(params.schedule) : take_ticket(params.schedule));
      }
      index = __shfl_sync(kFullWarp, index, 0);
      first = false;
    }
  }
}

// The next announced work; the announcement may be overwritten afterwards.
FA_DEVICE Announced next_work(SharedStorage& shared, WorkPlace& place) {
  wait(shared.work_full[place.index()], place.parity());
  const Announced work = shared.work[place.index()];
  arrive(shared.work_empty[place.index()]);
  place.advance();
  return work;
}

// Tiles of K and V.
FA_DEVICE void feed_keys(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPlace place;
  RingPlace<kStages> k_place, v_place;
#pragma unroll 1
  while (true) {
    const uint64& begun = shared.work_begun[place.index()];
    const Announced work = next_work(shared, place);
    if (work.q_begin < 0) break;
    arrive(begun);
    auto load = [&](uint8(&tiles)[kStages][kKTileBytes], uint64(&full)[kStages],
                    uint64(&empty)[kStages], RingPlace<kStages>& at, const TensorMap& map,
                    const int (&step)[3], int tile, uint32 beside) {
      wait(empty[at.index()], at.parity() ^ 1);
      const uint32 barrier = cvta_to_shared(&full[at.index()]);
      mbarrier_arrive_expect_tx(barrier, kKTileBytes + beside);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_load(cvta_to_shared(&tiles[at.index()][block * kTileN * 128]), &map,
                                     barrier, kEvictLast, 64 * block, tile * kTileN,
                                     work.coordinate[2] * step[2], work.coordinate[1] * step[1],
                                     work.coordinate[0] * step[0]);
      }
      at.advance();
    };
    auto load_keys = [&](int tile, uint32 beside) {
      load(shared.k, shared.k_full, shared.k_empty, k_place, params.k_map, params.k_step, tile,
           beside);
    };
    auto load_values = [&](int tile) {
      load(shared.v, shared.v_full, shared.v_empty, v_place, params.v_map, params.v_step, tile, 0);
    };
    if constexpr (kSparse) {
      feed_listed(params.common, work, shared, k_place, load_keys, load_values);
    } else {
      // In the order in which they are waited for: K of a tile before V of the one before it.
#pragma unroll 1
      for (int tile = work.begin; tile <= work.end; ++tile) {
        if (tile < work.end) load_keys(tile, 0);
        if (tile > work.begin) load_values(tile - 1);
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

FA_DEVICE void feed_queries(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPlace place;
  QPlace q_place;
#pragma unroll 1
  while (true) {
    const Announced work = next_work(shared, place);
    if (work.q_begin < 0) break;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.q_empty[q_place.index()], q_place.parity() ^ 1);
      const uint32 barrier = cvta_to_shared(&shared.q_full[q_place.index()]);
      mbarrier_arrive_expect_tx(barrier, kQTileBytes);
      int c[2];
      row_coordinates(params, work.q_begin + 64 * group, work.coordinate[2] * params.q_step[2], c);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_load(cvta_to_shared(&shared.q[q_place.index()][block * 64 * 128]),
                                     &params.q_map, barrier, kEvictFirst, 64 * block, c[0], c[1],
                                     work.coordinate[1] * params.q_step[1],
                                     work.coordinate[0] * params.q_step[0]);
      }
      q_place.advance();
    }
  }
}

FA_DEVICE void store_outputs(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPlace place;
  QPlace q_place;
#pragma unroll 1
  while (true) {
    const Announced work = next_work(shared, place);
    if (work.q_begin < 0) break;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.out_full[q_place.index()], q_place.parity());
      int c[2];
      row_coordinates(params, work.q_begin + 64 * group, work.coordinate[2], c);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_store(
            &params.out_map, cvta_to_shared(&shared.q[q_place.index()][block * 64 * 128]),
            kEvictFirst, 64 * block, c[0], c[1], work.coordinate[1], work.coordinate[0]);
      }
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<0>();
      arrive(shared.q_empty[q_place.index()]);
      q_place.advance();
    }
  }
  cp_async_bulk_wait_group<0>();
}

// -------------------------------------------------------------------------------------- computing
constexpr Constant<kTileN> kAll;
constexpr Constant<kHalves ? kTileN / 2 : kTileN> kHalf;

FA_DEVICE void compute(const FwdSm90Params& params, SharedStorage& shared, int warp) {
  const AttentionParams& p = params.common;
  const int group = warp / 4 - 1, lane = threadIdx.x % 32;
  const int warp_row = warp % 4 * 16;  // of this warp in its warpgroup's 64
  // Where this lane's row of the four matrices of an ldmatrix.x4 or stmatrix.x4 lies: rows 0-7,
  // 8-15, then the same of the next 8 columns (PTX ISA 9.7.14.5.15).
  const uint32 q_lane = QTile::lane_offset(warp_row + lane % 16, lane / 16);
  WorkPlace place;
  QPlace q_place;
  q_place.advance(group);
  RingPlace<kStages> k_place, v_place;
  auto release = [&](const uint64& barrier) {
    if (lane == 0) arrive(barrier);
  };
  auto take_turn = [&]() { bar_sync(kTurn + group, 256); };
  auto pass_turn = [&]() { bar_arrive(kTurn + (group + 1) % kGroups, 256); };
  if (group == kGroups - 1) pass_turn();  // the first one's

  int first_row;  // of this warpgroup, of the query tile at hand
  KeyTiles keys;  // of the block's key tiles this warpgroup's rows may see fewer
  bool half;      // and only half of the last one
  int tile;       // the key tile at hand
  uint32 q_tile;
  uint32 q[kQRegisters ? kDim / 16 : 1][4];
  float s[1][kMmaN][4];
  uint32 weights[1][kMmaN][2];
  float o[1][kMmaV][4];

  // S = Q K^T of the first kCols keys of a tile, started.
  auto start_scores = [&](auto cols, uint32 k_tile) {
    constexpr int kCols = decltype(cols)::value;
    const uint64 b = wgmma_descriptor(k_tile, 0);
    const uint64 a = wgmma_descriptor(q_tile, 0);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      // 16 columns are 32 bytes of a block's rows; descriptors count in 16 bytes.
      const uint64 b_step = b + (step / 4 * kTileN * 128 + step % 4 * 32) / 16;
      if constexpr (kQRegisters) {
        wgmma_m64k16_rs<kBf16, kCols, kKMajor>(s[0], q[step], b_step, step > 0);
      } else {
        const uint64 a_step = a + (step / 4 * 64 * 128 + step % 4 * 32) / 16;
        wgmma_m64k16_ss<kBf16, kCols>(s[0], a_step, b_step, step > 0);
      }
    }
    wgmma_commit_group();
  };
  // O += P V over the first kCols keys of a tile, started.
  auto start_outputs = [&](auto cols) {
    const uint64 b = wgmma_descriptor(cvta_to_shared(shared.v[v_place.index()]), kTileN * 128);
#pragma unroll
    for (int step = 0; step < decltype(cols)::value / 16; ++step) {
      const uint32 a[4] = {weights[0][2 * step][0], weights[0][2 * step][1],
                           weights[0][2 * step + 1][0], weights[0][2 * step + 1][1]};
      wgmma_m64k16_rs<kBf16, kDim>(o[0], a, b + step * (16 * 128 / 16), 1);
    }
    wgmma_commit_group();
  };
  auto skip_tile = [&]() {
    take_turn();
    pass_turn();
    wait(shared.k_full[k_place.index()], k_place.parity());
    __syncwarp();  // or a lane that comes late would find the phase after the next
    release(shared.k_empty[k_place.index()]);
    k_place.advance();
    wait(shared.v_full[v_place.index()], v_place.parity());
    __syncwarp();
    release(shared.v_empty[v_place.index()]);
    v_place.advance();
  };

  // Goes to the query tile announced at a place; false when there is no more work.
  auto look_at = [&](const WorkPlace& at) {
    wait(shared.work_full[at.index()], at.parity());
    const Work& work = shared.work[at.index()];
    if (work.q_begin < 0) return false;
    first_row = work.q_begin + 64 * group;
    tile = work.begin;
    keys = work.group[group].keys;
    half = kHalves && work.group[group].half;
    return true;
  };
  // Starts the first products of the query tile whose Q is at a place.  After the last tile there
  // is none: products of what is there start then, for nobody, because ptxas serialises all
  // products where some start behind a branch.
  auto open = [&](const QPlace& at, bool real) {
    uint32 k_tile = cvta_to_shared(shared.k[0]);
    q_tile = k_tile;
    if (real) {
      wait(shared.q_full[at.index()], at.parity());
      q_tile = cvta_to_shared(shared.q[at.index()]);
      if constexpr (kQRegisters) {
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
          ldmatrix_x4(q[step], QTile::at(q_tile + q_lane, 0, step));
        }
      }
      if constexpr (!kSparse) {
#pragma unroll 1
        for (; tile < keys.begin; ++tile) skip_tile();
      }
      wait(shared.k_full[k_place.index()], k_place.parity());
      k_tile = cvta_to_shared(shared.k[k_place.index()]);
    }
    take_turn();
    wgmma_fence();
    start_scores(kAll, k_tile);
    pass_turn();
  };

  bool more = look_at(place);
  if (!more) return;
  open(q_place, true);
#pragma unroll 1
  while (true) {
    // Registers are short, most of all where there are the words of a mask.
    auto entry = [&]() { return shared.work[place.index()].entry; };
    auto first_row_again = [&]() {
      return kSparse ? shared.work[place.index()].q_begin + 64 * group : first_row;
    };
    OnlineSoftmax<1> softmax;
    softmax.reset();
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][j][e] = 0.0f;
    }
    // Waits for the scores of a tile and turns them into its weights.
    auto settle = [&](auto first, auto cols) {
      constexpr bool kFirst = decltype(first)::value;
      constexpr int kCols = decltype(cols)::value;
      auto& s_used = reinterpret_cast<float (&)[1][kCols / 8][4]>(s);
      auto& weights_used = reinterpret_cast<uint32(&)[1][kCols / 8][2]>(weights);
      int key_tile = tile;
      bool listed = false;             // whether the tile has words
      uint32 seen[1][2 * kLaneWords];  // which scores they leave
      bool referred = false;           // whether all rows that see some have a reference
      if constexpr (kSparse) {
        listed = read_tile(shared, k_place.index(), key_tile, seen);
        if constexpr (!kFirst && !kTransform) referred = softmax.refers(seen, kLaneBits);
      }
      if constexpr (kOverlap && !kFirst) {
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      if constexpr (kExclusive && !kFirst) pass_turn();
      if constexpr (kSparse) {
        arrive(shared.k_empty[k_place.index()]);  // each lane for what it read beside the keys
      } else {
        release(shared.k_empty[k_place.index()]);
      }
      k_place.advance();
      auto release_values = [&]() {
        if constexpr (!kFirst) {
          release(shared.v_empty[v_place.index()]);
          v_place.advance();
        }
      };
      if constexpr (!kOverlap) release_values();
      auto finish_scores = [&]() {
        if constexpr (kTransform) {
          rework_scores(p, batch_offsets(p, entry()), s_used, shared.scratch[warp - 4],
                        first_row_again() + warp_row, key_tile * kTileN);
        }
        if constexpr (kSparse) {
          const KeyTiles& inside = shared.work[place.index()].group[group].keys;
          const bool outside = (key_tile < inside.full_begin) | (key_tile >= inside.full_end);
          if (outside) {
            const int tid = tid_x_again();
            const int row = first_row_again() + tid / 32 % 4 * 16 + tid % 32 / 4;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int first_col = key_tile * kTileN + 2 * (tid % 4);
              keep_columns(seen[0], h, columns_inside(p, row + 8 * h, first_col, 2 * kMmaN));
            }
          }
          if (listed || outside) hide_by_words(s_used, seen);
        } else if (tile < keys.full_begin || tile >= keys.full_end) {
          hide_outside(p, s_used, first_row + warp_row + lane / 4, tile * kTileN + 2 * (lane % 4),
                       params.row_shift);
        }
      };
      finish_scores();
      // Without a mask rows have a reference once they have seen a key.
      const bool trusting = !kFirst && kCols == kTileN && !kTransform &&
                            (kSparse ? referred : tile > keys.full_begin) && !softmax.far;
      // What a warp decides is not what its neighbours do, and a warpgroup waits for its products
      // at one place (PTX ISA 9.7.15.7.3: all its threads execute the same wgmma.wait_group).
      float correction[1][2];
      bool moved = false;
      if (!trusting || !softmax.trust(s_used, p.exp2_scale)) {
        if (trusting) {  // the scores are gone, and what the mask says of them
          const auto& work = shared.work[place.index()];
          if constexpr (kSparse) key_tile = tile_again(p, work, tile);
          rescore<kBf16, QTile, kDim / 16>(p, entry() << params.row_shift, s_used, q_tile + q_lane,
                                           key_tile * kTileN);
          if constexpr (kSparse) listed = words_again(p, work, tile, seen);
          finish_scores();
        }
        moved = softmax.raise(s_used, correction, p.exp2_scale) && !kFirst;
        softmax.exponentials<true>(s_used, p.exp2_scale);
      }
      if constexpr (kOverlap) wgmma_wait_group<0>();
      if (moved) {
#pragma unroll
        for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[0][j][e] *= correction[0][e / 2];
        }
      }
      round_weights<kBf16>(s_used, weights_used);
      if constexpr (kOverlap) release_values();
      ++tile;
    };
    // The products of a tile with Q and of the tile before it with its weights, then its own
    // weights.
    auto step = [&](auto cols) {
      wait(shared.k_full[k_place.index()], k_place.parity());
      take_turn();
      wgmma_fence();
      start_scores(cols, cvta_to_shared(shared.k[k_place.index()]));
      wait(shared.v_full[v_place.index()], v_place.parity());
      wgmma_fence();
      start_outputs(kAll);
      if constexpr (!kExclusive) pass_turn();
      settle(Constant<0>(), cols);
    };

    settle(Constant<1>(), kAll);
#pragma unroll 1
    while (tile < keys.end - (half ? 1 : 0)) step(kAll);
    if (half && tile < keys.end) step(kHalf);
    wait(shared.v_full[v_place.index()], v_place.parity());
    if (half) {
      wgmma_fence();
      start_outputs(kHalf);
    } else {
      wgmma_fence();
      start_outputs(kAll);
    }
    wgmma_wait_group<0>();
    release(shared.v_empty[v_place.index()]);
    v_place.advance();
    if constexpr (!kSparse) {
#pragma unroll 1
      for (; tile < shared.work[place.index()].end; ++tile) skip_tile();
    }
    const int row_of_group = first_row_again();
    const uint32 out_tile = q_tile;
    WorkPlace next = place;
    next.advance();
    QPlace q_next = q_place;
    q_next.advance(kGroups);
    more = look_at(next);
    // With room for the next rows of Q beside the output, their first products start here.
    if constexpr (kEarly) open(q_next, more);

    softmax.finish();
    const int my_row = row_of_group + warp_row + lane / 4;
    auto head_of = [&](int row) {  // batch entry, where heads share a tile too
      return (entry() << params.row_shift) + (row & ((1 << params.row_shift) - 1));
    };
    if (p.lse != nullptr && lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (my_row + 8 * h < tile_rows(params)) {
          const int row = my_row + 8 * h;
          p.lse[static_cast<int64>(head_of(row)) * p.q_len + (row >> params.row_shift)] =
              log_sum_exp(softmax.reference[0][h], softmax.sum[0][h]);
        }
      }
    }
    const float inverse[2] = {inverse_sum(softmax.sum[0][0]), inverse_sum(softmax.sum[0][1])};
    uint32 out[kMmaV][2], probe[2][2] = {{0, 0}, {0, 0}};  // NaN once an output is not finite
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        out[j][h] = pack2<kBf16>(o[0][j][2 * h] * inverse[h], o[0][j][2 * h + 1] * inverse[h]);
        probe[h][j % 2] = fma2<kBf16>(out[j][h], 0, probe[h][j % 2]);
      }
    }
    // The output overwrites Q: of this warp's rows where they were in registers, else of them all.
    if constexpr (!kQRegisters) bar_sync(kEpilogue + group, 128);
#pragma unroll
    for (int j = 0; j < kMmaV; j += 2) {
      stmatrix_x4(QTile::at(out_tile + q_lane, 0, j / 2), out[j][0], out[j][1], out[j + 1][0],
                  out[j + 1][1]);
    }
    // One question of all rows first: hardly any warp has a row to be computed again.
    const float farthest = fmaxf(fabsf(softmax.reference[0][0]), fabsf(softmax.reference[0][1]));
    const uint32 probes = probe[0][0] | probe[0][1] | probe[1][0] | probe[1][1];
    if (__any_sync(kFullWarp, farthest >= kCoarse || probes != 0)) {
      __syncwarp();
      uint32 again[2];  // lanes whose row it is
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float reference = softmax.reference[0][h], sum = softmax.sum[0][h];
        const int row = (my_row + 8 * h) >> params.row_shift;
        // A row whose sum is NaN saw a NaN and is to stay NaN.
        const bool broken = (probe[h][0] | probe[h][1]) != 0 && sum == sum;
        again[h] =
            __ballot_sync(kFullWarp, broken || outgrown<false, kSparse>(p, row, reference, sum));
      }
#pragma unroll 1
      for (int r = 0; r < 16; ++r) {
        const int row_in_group = warp_row + r, row = row_of_group + row_in_group;
        if (((r < 8 ? again[0] : again[1]) >> r % 8 * 4 & 15) == 0) continue;
        if (row >= tile_rows(params)) continue;
        const uint32 head = head_of(row);
        attend_row<kBf16, (kDim + 31) / 32 * 32, kSparse>(
            p, batch_offsets(p, head), head, row >> params.row_shift, [&](int col, uint16 x) {
              const uint32 at = QTile::offset(row_in_group, col / 8) + col % 8 * 2;
              *reinterpret_cast<uint16*>(&shared.q[q_place.index()][at]) = x;
            });
      }
    }
    fence_proxy_async_shared();
    __syncwarp();
    release(shared.out_full[q_place.index()]);
    release(shared.work_empty[place.index()]);
    if (!more) break;
    if constexpr (!kEarly) open(q_next, true);
    place = next;
    q_place = q_next;
  }
  wgmma_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_fwd_sm90(const __grid_constant__ FwdSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQSlots; ++i) {
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
      init(shared.work_begun[i], 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp >= 4) {
    setmaxnreg_inc<kComputingRegisters>();
    compute(params, shared, warp);
  } else {
    setmaxnreg_dec<kFeedingRegisters>();
    if (warp == 0 && elect_sync()) {
      prefetch_tensormap(&params.k_map);
      prefetch_tensormap(&params.v_map);
      feed_keys(params, shared);
    } else if (warp == 1 && elect_sync()) {
      prefetch_tensormap(&params.q_map);
      feed_queries(params, shared);
    } else if (warp == 2 && elect_sync()) {
      prefetch_tensormap(&params.out_map);
      store_outputs(params, shared);
    } else if (warp == 3) {
      schedule_work(params, shared);
    }
  }
}
