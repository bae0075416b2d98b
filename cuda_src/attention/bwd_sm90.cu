// Attention backward for SM90: TMA, wgmma, warp specialisation, a persistent grid.
//
// A block works on kTileN keys at a time and walks over all tiles of queries that see some of them,
// for each query head that shares the keys.  Scores are transposed,
//   S^T = K Q^T,   P^T = exp(S^T - LSE),   dP^T = V dO^T,   dS^T = P^T (dP^T - delta),
// so that a warpgroup has P^T and dS^T of its 64 keys in registers, as operands of
//   dV += P^T dO   and   dK += dS^T Q;
// dS goes through shared memory for dQ^T = K^T dS^T, of which each warpgroup computes a piece.
//
// Pieces of dQ are added up in global memory in the order of the blocks of keys: each waits for its
// turn.  Blocks draw their work in that order too, so whom a block waits for is always at work.
// bwd_rows.cu comes before this kernel, bwd_round.cu after it.
#include "cuda_src/attention/bwd_sm90.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/element.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

// -------------------------------------------------------------------------------------- computing
FA_DEVICE void compute(const BwdSm90Params& params, SharedStorage& shared, int warp) {
  const AttentionParams& p = params.common;
  // The same in all lanes, as a vote's result is to the compiler: what follows from it is computed
  // once for a warp.
  const int group = __any_sync(kFullWarp, warp >= 8);
  // Registers are short: what follows from the thread's number is computed where it is needed.
  const uint32 thread = threadIdx.x;
  auto my_thread = [&]() { return static_cast<int>(opaque(thread) % 128); };
  auto lane = [&]() { return my_thread() % 32; };
  auto release = [&](const uint64& barrier) {
    if (lane() == 0) arrive(barrier);
  };
  // Where this lane's row of the four matrices of an stmatrix.x4 lies: rows 0-7, 8-15, then the
  // same of the next 8 columns (PTX ISA 9.7.14.5.16).
  auto matrix_row = [&](int first) { return first + my_thread() % 16; };
  auto matrix_half = [&]() { return my_thread() / 16 % 2; };
  auto warp_row = [&]() { return my_thread() / 32 * 16; };  // of the warpgroup's 64

  uint32 works = 0, tiles = 0;  // done so far; all places in rings follow from them
  auto result = [&](int more) { return tiles + 2 * works + more; };  // its number
  auto slot_place = [&](int more) {
    SlotPlace slot;
    slot.advance(result(more));
    return slot;
  };
  auto hand_on = [&](int more) { release_own(shared.out_full[group][result(more) % kTickets]); };
  auto ds_place = [&](uint32 number) {
    DsPlace place;
    place.advance(number);
    return place;
  };
  auto own_ds = [&]() { return ds_place(tiles + kDelayed); };  // of the tile at hand
  auto ds_of_piece = [&]() { return ds_place(tiles); };        // what dQ is computed from now
  float s[kMmaM][4], dp[kMmaM][4], dk[kMmaD][4], dv[kMmaD][4];

  // D = A B^T of 64 keys and a tile's queries, over the columns of both, started.
  auto start_scores = [&](float (&d)[kMmaM][4], const uint8* keys, const uint8* queries) {
    const uint64 a = wgmma_descriptor(cvta_to_shared(keys) + group * 64 * 128, 0);
    const uint64 b = wgmma_descriptor(cvta_to_shared(queries), 0);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      // 16 columns are 32 bytes of a block's rows.
      wgmma_m64k16_ss<kBf16, kTileM>(d, wgmma_at(a, step / 4 * kTileN * 128 + step % 4 * 32),
                                     wgmma_at(b, step / 4 * kTileM * 128 + step % 4 * 32),
                                     step > 0);
    }
  };
  // D += A B of 64 keys and all columns, over a tile's queries, started; A is in registers.
  auto start_keys = [&](float (&d)[kMmaD][4], const uint32(&pairs)[kMmaM][2],
                        const uint8* queries) {
    const uint64 b = wgmma_descriptor(cvta_to_shared(queries), kTileM * 128);
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
      const uint32 a[4] = {pairs[2 * step][0], pairs[2 * step][1], pairs[2 * step + 1][0],
                           pairs[2 * step + 1][1]};
      wgmma_m64k16_rs<kBf16, kDim>(d, a, wgmma_at(b, step * 16 * 128), 1);
    }
  };
  // dK += dS^T Q with dS from shared memory, where it stays when its registers are used again.
  auto start_late = [&](const uint8* queries) {
    const uint64 a = wgmma_descriptor(
        cvta_to_shared(shared.ds[own_ds().index()]) + group * ScoreTile::kBlockBytes, 0);
    const uint64 b = wgmma_descriptor(cvta_to_shared(queries), kTileM * 128);
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
      wgmma_m64k16_ss<kBf16, kDim, kMnMajor, kMnMajor>(dk, wgmma_at(a, step * 16 * 128),
                                                       wgmma_at(b, step * 16 * 128), 1);
    }
    wgmma_commit_group();
  };
  // A piece of dQ^T = K^T dS^T, started.
  auto start_piece = [&](float (*d)[4]) {
    const DsPlace place = ds_of_piece();
    wait(shared.ds_full[place.index()], place.parity());
    wgmma_fence();
    const int mine = group, part = kBlocks > 1 ? 0 : mine, block = kBlocks > 1 ? mine : 0;
    const uint64 a = wgmma_descriptor(cvta_to_shared(shared.k) + block * kTileN * 128, 0);
    const uint64 b =
        wgmma_descriptor(cvta_to_shared(shared.ds[place.index()]) + part * kPieceM * 128, 0);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      wgmma_m64k16_ss<kBf16, kPieceM, kMnMajor>(
          d, wgmma_at(a, step * 16 * 128),
          wgmma_at(b, step / 4 * ScoreTile::kBlockBytes + step % 4 * 32), step > 0);
    }
    wgmma_commit_group();
  };
  // Writes a piece of dQ to the next slot.
  auto put_piece = [&](const float (*d)[4]) {
    const SlotPlace slot = slot_place(-kDelayed);
    wait(shared.out_empty[group][slot.index()], slot.parity() ^ 1);
    const uint32 to =
        cvta_to_shared(shared.out[group][slot.index()]) + 4 * piece_offset(0, my_thread());
#pragma unroll
    for (int j = 0; j < kPieceM / 8; ++j) {
      const uint32 four[4] = {__float_as_uint(d[j][0]), __float_as_uint(d[j][1]),
                              __float_as_uint(d[j][2]), __float_as_uint(d[j][3])};
      st_shared_v4_b32(to + 4 * piece_offset(j, 0), four);
    }
  };
  auto send_piece = [&]() { hand_on(-kDelayed); };
  // Writes 16-bit rows of 64 keys to the slot after so many.
  auto put_keys = [&](const float (&d)[kMmaD][4], int more, float scale, bool zero, Look& look) {
    const SlotPlace slot = slot_place(more);
    wait(shared.out_empty[group][slot.index()], slot.parity() ^ 1);
    const uint32 to = cvta_to_shared(shared.out[group][slot.index()]) +
                      KeyTile::lane_offset(matrix_row(warp_row()), matrix_half());
#pragma unroll
    for (int j = 0; j < kMmaD; j += 2) {
      uint32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &d[j + i / 2][i % 2 * 2];
        look.at(two[0]);
        look.at(two[1]);
        pairs[i] = zero ? 0 : pack2<kBf16>(two[0] * scale, two[1] * scale);
      }
      stmatrix_x4(KeyTile::at(to, 0, j / 2), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    hand_on(more);
  };

  if constexpr (kDelayed) {  // what dQ is computed from at the first tile
    const uint32 nothing[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = my_thread(); i < ScoreTile::kBlockBytes / 16; i += 128) {
      st_shared_v4_b32(cvta_to_shared(shared.ds[0]) + group * ScoreTile::kBlockBytes + 16 * i,
                       nothing);
    }
    fence_proxy_async_shared();
    release_own(shared.ds_full[0]);
  }
#pragma unroll 1
  while (true) {
    WorkPlace place;
    place.advance(works);
    wait(shared.work_full[place.index()], place.parity());
    const Work& work = shared.work[place.index()];
    if (work.tile < 0) break;
    const int steps = work.steps;
    int left = work.end - 1;  // without a mask: the tile at hand, counted from the other end if
                              // kLastFirst, which takes fewer registers
    auto tile = [&]() { return kLastFirst ? work.begin + work.end - 1 - left : left; };
    int step = 0;
    uint32 seen[2] = {~0u, ~0u};  // under a mask: by which queries of the tile, of a thread's keys
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[j][e] = dv[j][e] = 0.0f;
    }

    auto next_step = [&]() {
      if constexpr (kSparse) {
        ++step;
        return;
      }
      left = left == work.begin ? work.end - 1 : left - 1;
      ++step;
    };
    auto outside = [&](int tile) {
      return tile < work.group[group].full_begin || tile >= work.group[group].full_end;
    };
    // Whether some of a warpgroup's keys, under a mask of a thread's, are hidden from queries of
    // the tile.
    auto is_cut = [&]() { return kSparse ? (seen[0] & seen[1]) != ~0u : outside(tile()); };
    auto own_key = [&]() { return work.tile * kTileN + 64 * group + warp_row() + lane() / 4; };
    // Under a mask, asks for what it says of the tile in a place of Q; then takes away what is
    // outside of the band.
    auto ask_mask = [&](int at) {
      if constexpr (kSparse) {
        read_words(seen, params.mask, shared.note[at].place, 64 * group, my_thread());
      }
    };
    auto add_band = [&](int at) {
      if constexpr (kSparse) {
        const int here = shared.note[at].tile, query = here * kTileM + lane() % 4 * 2;
        cut_words<kTileM>(seen, here, outside(here), [&](int h) {
          return queries_seeing(p, own_key() + 8 * h, query, kTileM / 4);
        });
      }
    };
    // Puts a number where a key is hidden.
    auto hide = [&](float (&x)[kMmaM][4], float hidden) {
      const int query = tile() * kTileM + lane() % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        hide_row(x, h, kSparse ? seen[h] : queries_seeing(p, own_key() + 8 * h, query, 2 * kMmaM),
                 hidden);
      }
    };
    // Numbers of two queries for each j, of a thread's rows of LSE and delta: the first of them
    // asked for ahead.
    float2 ahead[kAhead + 1];
    auto ask_rows = [&](const float* rows) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) ahead[j] = *reinterpret_cast<const float2*>(rows + 16 * j);
    };
    auto row_pair = [&](const float* rows, int j) {
      return j < kAhead ? ahead[j] : *reinterpret_cast<const float2*>(rows + 16 * j);
    };
    // S^T becomes P^T.
    auto weigh = [&](const float* rows, bool cut) {
      if (cut) hide(s, -FA_INFINITY);
#pragma unroll
      for (int j = 0; j < kMmaM; ++j) {
        const float2 lse = row_pair(rows, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[j][e] = ex2_approx_ftz(fmaf(s[j][e], p.exp2_scale, e % 2 ? -lse.y : -lse.x));
        }
      }
    };
    // dP^T becomes dS^T.
    auto differentiate = [&](const float* rows, bool cut) {
      if (cut) hide(dp, 0.0f);
#pragma unroll
      for (int j = 0; j < kMmaM; ++j) {
        const float2 delta = row_pair(rows, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
        }
      }
    };
    auto round_to = [&](uint32(&pairs)[kMmaM][2], const float (&x)[kMmaM][4]) {
#pragma unroll
      for (int j = 0; j < kMmaM; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) pairs[j][h] = pack2<kBf16>(x[j][2 * h], x[j][2 * h + 1]);
      }
    };
    // dS to shared memory: matrices of 8 keys are written as rows of queries.
    auto put_scores = [&](const uint32(&pairs)[kMmaM][2]) {
      const int row = lane() / 16 * 8 + lane() % 8, chunk = warp_row() / 8 + lane() / 8 % 2;
      const uint32 to = cvta_to_shared(shared.ds[own_ds().index()]) +
                        group * ScoreTile::kBlockBytes + ScoreTile::lane_offset(row, chunk);
#pragma unroll
      for (int j = 0; j < kMmaM; j += 2) {
        stmatrix_x4_trans(to + j * 8 * 128, pairs[j][0], pairs[j][1], pairs[j + 1][0],
                          pairs[j + 1][1]);
      }
    };

    // Finishes a tile whose dS^T is in registers, and begins the next one.  Nothing is in flight
    // from one turn to the next: ptxas serialises products that are.
    //
    // Where dQ is that of the tile before, the first tile of some work comes after the last one of
    // the work before, whose dQ is computed once more and dropped.
    auto turn = [&](auto finishing, auto beginning) {
      constexpr bool kFinish = decltype(finishing)::value, kBegin = decltype(beginning)::value;
      constexpr bool kDkLate = kLate && kFinish;
      QPlace q_place, q_next;
      OPlace o_place, o_next;
      q_place.advance(tiles);
      o_place.advance(tiles);
      q_next.advance(tiles + kFinish);
      o_next.advance(tiles + kFinish);
      const int q_at = q_place.index(), o_at = o_place.index();
      const uint8 *q_tile = shared.q[q_at], *o_tile = shared.dout[o_at];
      const uint8 *next_q = shared.q[q_next.index()], *next_o = shared.dout[o_next.index()];
      // Of this lane's queries: two of LSE, then two of delta.
      const float4* rows = shared.rows[q_next.index()] + lane() % 4;
      const bool dropped = kDelayed && step == 0;  // dQ
      bool cut = false;                            // the next tile
      uint32 weights[kMmaM][2], ds[kMmaM][2];
      auto go_on = [&]() {
        next_step();
        cut = !kSparse && kBegin && is_cut();
      };
      auto free_operands = [&]() {
        release(shared.dout_empty[o_at]);
        if constexpr (!kLate) release_own(shared.q_empty[q_at]);  // of rows, too
      };
      if constexpr (kFinish) {
        round_to(weights, s);
        round_to(ds, dp);
        const DsPlace own = own_ds();
        wait(shared.ds_empty[own.index()], own.parity() ^ 1);
        put_scores(ds);
        wgmma_fence();
        start_keys(dv, weights, o_tile);
        if constexpr (!kLate) {
          wgmma_fence();
          start_keys(dk, ds, q_tile);
        }
        wgmma_commit_group();
        fence_proxy_async_shared();
        release_own(shared.ds_full[own.index()]);
        start_piece(dp);
        if constexpr (kAhead) go_on();  // beside products
        if constexpr (!kSoon) {
          wgmma_wait_group<1>();
          free_operands();
        }
      }
      if constexpr (kBegin) {
        wait(shared.q_full[q_next.index()], q_next.parity());
        wgmma_fence();
        start_scores(s, shared.k, next_q);
        wgmma_commit_group();
        ask_mask(q_next.index());
      }
      if constexpr (kFinish) {
        if constexpr (kSoon) {
          wgmma_wait_group<1 + kBegin>();
          free_operands();
        }
        wgmma_wait_group<kBegin>();
        release(shared.ds_empty[ds_of_piece().index()]);
        if constexpr (!kAhead) go_on();
        if (!dropped) put_piece(dp);
      }
      if constexpr (kBegin) {
        if constexpr (!kSparse && !kFinish) cut = is_cut();
        wait(shared.dout_full[o_next.index()], o_next.parity());
        wgmma_fence();
        start_scores(dp, shared.v, next_o);
        wgmma_commit_group();
      }
      if constexpr (kFinish) {
        if (!dropped) send_piece();
      }
      if constexpr (kDkLate) {
        wgmma_fence();
        start_late(q_tile);
      }
      if constexpr (kBegin) {
        ask_rows(&rows->x);
        wgmma_wait_group<1 + kDkLate>();
        if constexpr (kSparse) {
          add_band(q_next.index());
          cut = is_cut();
        }
        weigh(&rows->x, cut);
        ask_rows(&rows->z);
        wgmma_wait_group<kDkLate>();
        differentiate(&rows->z, cut);
      }
      if constexpr (kFinish) {
        if constexpr (kLate) {
          wgmma_wait_group<0>();
          release_own(shared.q_empty[q_at]);  // of rows, too
        }
        ++tiles;
      }
      wgmma_wait_group<0>();
    };
    constexpr Constant<0> no;
    constexpr Constant<1> yes;
    wait(shared.k_full, works & 1);
    wait(shared.v_full, works & 1);
    turn(no, yes);
#pragma unroll 1
    while (step < steps - 1) turn(yes, yes);
    release(shared.v_empty);
    turn(yes, no);
    if constexpr (kDelayed) {
      start_piece(s);
      wgmma_wait_group<0>();
      put_piece(s);
      send_piece();
    }
    release(shared.k_empty);
    Look look;
    put_keys(dv, 0, 1.0f, work.unseen, look);
    put_keys(dk, 1, p.scale, work.unseen, look);
    if (look.spoiled()) spoil_keys_64(params, work, work.tile * kTileN + 64 * group);
    release_own(shared.work_empty[place.index()]);
    ++works;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_sm90(const __grid_constant__ BwdSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    init(shared.k_full, 1);
    init(shared.k_empty, 4 * kGroups);
    init(shared.v_full, 1);
    init(shared.v_empty, 4 * kGroups);
    for (int i = 0; i < kQStages; ++i) {
      init(shared.q_full[i], 1);
      init(shared.q_empty[i], kWarpArrivals * 4 * kGroups);
    }
    for (int i = 0; i < kOStages; ++i) {
      init(shared.dout_full[i], 1);
      init(shared.dout_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kDsStages; ++i) {
      init(shared.ds_full[i], kWarpArrivals * 4 * kGroups);
      init(shared.ds_empty[i], 4 * kGroups);
    }
    for (int group = 0; group < kGroups; ++group) {
      for (int i = 0; i < kSlots; ++i) {
        init(shared.out_empty[group][i], 1);
      }
      for (int i = 0; i < kTickets; ++i) init(shared.out_full[group][i], kWarpArrivals * 4);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      init(shared.work_full[i], 1);
      init(shared.work_empty[i], kWarpArrivals * 4 * kGroups + kFeeders - 1 + kStores);
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
    if (!elect_sync()) return;
    if (warp == 0) {
      prefetch_tensormap(&params.q_map);
      prefetch_tensormap(&params.k_map);
      if constexpr (kFeeders == 1) {
        prefetch_tensormap(&params.dout_map);
        prefetch_tensormap(&params.v_map);
      }
      feed_queries<Walk, kFeeders == 1>(params, shared,
                                        [&](Work& work) { draw_up(params.common, work); });
    } else if (warp < kFeeders) {
      prefetch_tensormap(&params.dout_map);
      prefetch_tensormap(&params.v_map);
      feed_gradients<Walk>(params, shared);
    } else if (warp < kFeeders + kStores) {
      prefetch_tensormap(&params.dk_map);
      prefetch_tensormap(&params.dv_map);
      store_results(params, shared, warp - kFeeders);
    }
  }
}
