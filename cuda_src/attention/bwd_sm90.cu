// Attention backward for SM90: TMA, wgmma, warp specialisation, a persistent grid.
//
// A block works on kTileN keys at a time and walks over all tiles of queries that see some of them,
// for each query head that shares the keys.  Scores are transposed,
//   S^T = K Q^T,   P^T = exp(S^T - LSE),   dP^T = V dO^T,   dS^T = P^T (dP^T - delta),
// so that a warpgroup has P^T and dS^T of its 64 keys in registers, as operands of
//   dV += P^T dO   and   dK += dS^T Q;
// dS goes through shared memory for dQ^T = K^T dS^T, of which each warpgroup computes a tile.
//
// Pieces of dQ are added up in global memory in the order of the blocks of keys: each waits for its
// turn.  Blocks draw their work in that order too, so whom a block waits for is always at work.
// bwd_preprocess.cu comes before this kernel, bwd_convert_dq.cu after it.
#include "cuda_src/attention/bwd_sm90.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/element.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

// -------------------------------------------------------------------------------------- computing
FA_DEVICE void consume(const BwdSm90Params& params, SharedStorage& shared, int warp) {
  const AttentionParams& p = params.common;
  // The same in all lanes, as a vote's result is to the compiler: what follows from it is computed
  // once for a warp.
  const int group = __any_sync(kFullWarp, warp >= 8);
  // Registers are short: what follows from the thread's number is computed where it is needed.
  const uint32 thread = threadIdx.x;
  auto thread_in_group = [&]() { return static_cast<int>(opaque(thread) % 128); };
  auto lane = [&]() { return thread_in_group() % 32; };
  auto release = [&](const uint64& barrier) {
    if (lane() == 0) arrive(barrier);
  };
  // Where this lane's row of the four matrices of an stmatrix.x4 lies: rows 0-7, 8-15, then the
  // same of the next 8 columns (PTX ISA 9.7.14.5.16).
  auto matrix_row = [&](int first) { return first + thread_in_group() % 16; };
  auto matrix_half = [&]() { return thread_in_group() / 16 % 2; };
  auto warp_row = [&]() { return thread_in_group() / 32 * 16; };  // of the warpgroup's 64

  uint32 work_count = 0, tiles = 0;  // done so far; pipeline states follow from them
  auto result_index = [&](int more) { return tiles + 2 * work_count + more; };  // its number
  auto staging_pipe = [&](int more) {
    StagingPipeline staging;
    staging.advance(result_index(more));
    return staging;
  };
  auto publish_staging = [&](int more) {
    release_per_lane(shared.staging_full[group][result_index(more) % kStagingBarriers]);
  };
  auto ds_pipe = [&](uint32 number) {
    DsPipeline pipe;
    pipe.advance(number);
    return pipe;
  };
  auto ds_pipe_of_tile = [&]() { return ds_pipe(tiles + kDeferDq); };  // of the tile at hand
  auto ds_pipe_of_dq = [&]() { return ds_pipe(tiles); };  // what dQ is computed from now
  float s[kMmaM][4], dp[kMmaM][4], dk[kMmaD][4], dv[kMmaD][4];

  // D = A B^T of 64 keys and a tile's queries, over the columns of both, started.
  auto gemm_scores = [&](float (&d)[kMmaM][4], const uint8* keys, const uint8* queries) {
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
  auto gemm_dkdv = [&](float (&d)[kMmaD][4], const uint32(&pairs)[kMmaM][2], const uint8* queries) {
    const uint64 b = wgmma_descriptor(cvta_to_shared(queries), kTileM * 128);
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
      const uint32 a[4] = {pairs[2 * step][0], pairs[2 * step][1], pairs[2 * step + 1][0],
                           pairs[2 * step + 1][1]};
      wgmma_m64k16_rs<kBf16, kDim>(d, a, wgmma_at(b, step * 16 * 128), 1);
    }
  };
  // dK += dS^T Q with dS from shared memory, where it stays when its registers are used again.
  auto gemm_dk_deferred = [&](const uint8* queries) {
    const uint64 a = wgmma_descriptor(
        cvta_to_shared(shared.ds[ds_pipe_of_tile().index()]) + group * DsTile::kBlockBytes, 0);
    const uint64 b = wgmma_descriptor(cvta_to_shared(queries), kTileM * 128);
#pragma unroll
    for (int step = 0; step < kTileM / 16; ++step) {
      wgmma_m64k16_ss<kBf16, kDim, kMnMajor, kMnMajor>(dk, wgmma_at(a, step * 16 * 128),
                                                       wgmma_at(b, step * 16 * 128), 1);
    }
    wgmma_commit_group();
  };
  // A tile of dQ^T = K^T dS^T, started.
  auto gemm_dq = [&](float (*d)[4]) {
    const DsPipeline pipe = ds_pipe_of_dq();
    wait(shared.ds_full[pipe.index()], pipe.parity());
    wgmma_fence();
    const int dq_tile = group, part = kBlocks > 1 ? 0 : dq_tile, block = kBlocks > 1 ? dq_tile : 0;
    const uint64 a = wgmma_descriptor(cvta_to_shared(shared.k) + block * kTileN * 128, 0);
    const uint64 b =
        wgmma_descriptor(cvta_to_shared(shared.ds[pipe.index()]) + part * kDqTileM * 128, 0);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      wgmma_m64k16_ss<kBf16, kDqTileM, kMnMajor>(
          d, wgmma_at(a, step * 16 * 128),
          wgmma_at(b, step / 4 * DsTile::kBlockBytes + step % 4 * 32), step > 0);
    }
    wgmma_commit_group();
  };
  // Writes a tile of dQ to the next staging buffer.
  auto write_dq_tile = [&](const float (*d)[4]) {
    const StagingPipeline staging = staging_pipe(-kDeferDq);
    wait(shared.staging_empty[group][staging.index()], staging.parity() ^ 1);
    const uint32 to = cvta_to_shared(shared.staging[group][staging.index()]) +
                      4 * dq_tile_offset(0, thread_in_group());
#pragma unroll
    for (int j = 0; j < kDqTileM / 8; ++j) {
      const uint32 four[4] = {__float_as_uint(d[j][0]), __float_as_uint(d[j][1]),
                              __float_as_uint(d[j][2]), __float_as_uint(d[j][3])};
      st_shared_v4_b32(to + 4 * dq_tile_offset(j, 0), four);
    }
  };
  auto publish_dq_tile = [&]() { publish_staging(-kDeferDq); };
  // Writes 16-bit rows of 64 keys to the staging buffer after so many.
  auto write_dkdv = [&](const float (&d)[kMmaD][4], int more, float scale, bool zero,
                        NonfiniteProbe& nonfinite_probe) {
    const StagingPipeline staging = staging_pipe(more);
    wait(shared.staging_empty[group][staging.index()], staging.parity() ^ 1);
    const uint32 to = cvta_to_shared(shared.staging[group][staging.index()]) +
                      KeyTile::lane_offset(matrix_row(warp_row()), matrix_half());
#pragma unroll
    for (int j = 0; j < kMmaD; j += 2) {
      uint32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &d[j + i / 2][i % 2 * 2];
        nonfinite_probe.add(two[0]);
        nonfinite_probe.add(two[1]);
        pairs[i] = zero ? 0 : pack2<kBf16>(two[0] * scale, two[1] * scale);
      }
      stmatrix_x4(KeyTile::at(to, 0, j / 2), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    publish_staging(more);
  };

  if constexpr (kDeferDq) {  // what dQ is computed from at the first tile
    const uint32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = thread_in_group(); i < DsTile::kBlockBytes / 16; i += 128) {
      st_shared_v4_b32(cvta_to_shared(shared.ds[0]) + group * DsTile::kBlockBytes + 16 * i, zeros);
    }
    fence_proxy_async_shared();
    release_per_lane(shared.ds_full[0]);
  }
#pragma unroll 1
  while (true) {
    WorkPipeline pipe;
    pipe.advance(work_count);
    wait(shared.work_full[pipe.index()], pipe.parity());
    const WorkTile& work = shared.work[pipe.index()];
    if (work.tile < 0) break;
    const int steps = work.steps;
    // Without a mask: the tile at hand, counted from the other end if kReverseKvOrder, which takes
    // fewer registers.
    int remaining = work.end - 1;
    auto tile = [&]() {
      return kReverseKvOrder ? work.begin + work.end - 1 - remaining : remaining;
    };
    int step = 0;
    uint32 visible_bits[2] = {
        ~0u, ~0u};  // under a mask: by which queries of the tile, of a thread's keys
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[j][e] = dv[j][e] = 0.0f;
    }

    auto advance_tile = [&]() {
      if constexpr (kSparse) {
        ++step;
        return;
      }
      remaining = remaining == work.begin ? work.end - 1 : remaining - 1;
      ++step;
    };
    auto crosses_band = [&](int tile) {
      return tile < work.group[group].full_begin || tile >= work.group[group].full_end;
    };
    // Whether some of a warpgroup's keys, under a mask of a thread's, are hidden from queries of
    // the tile.
    auto tile_needs_mask = [&]() {
      return kSparse ? (visible_bits[0] & visible_bits[1]) != ~0u : crosses_band(tile());
    };
    auto own_key = [&]() { return work.tile * kTileN + 64 * group + warp_row() + lane() / 4; };
    // Under a mask, asks for what it says of the tile in a stage of Q; then takes away what is
    // outside of the band.
    auto prefetch_mask_words = [&](int at) {
      if constexpr (kSparse) {
        load_mask_words(visible_bits, params.mask, shared.tile_info[at].words_index, 64 * group,
                        thread_in_group());
      }
    };
    auto apply_band = [&](int at) {
      if constexpr (kSparse) {
        const int tile_number = shared.tile_info[at].tile,
                  query = tile_number * kTileM + lane() % 4 * 2;
        restrict_words<kTileM>(visible_bits, tile_number, crosses_band(tile_number), [&](int h) {
          return visible_queries(p, own_key() + 8 * h, query, kTileM / 4);
        });
      }
    };
    // Puts a number where a key is hidden.
    auto mask_values = [&](float (&x)[kMmaM][4], float masked_value) {
      const int query = tile() * kTileM + lane() % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mask_scores_of_row(
            x, h,
            kSparse ? visible_bits[h] : visible_queries(p, own_key() + 8 * h, query, 2 * kMmaM),
            masked_value);
      }
    };
    // Numbers of two queries for each j, of a thread's rows of LSE and delta: the first of them
    // asked for ahead.
    float2 prefetched[kPrefetchedLse + 1];
    auto prefetch_lse_delta = [&](const float* rows) {
#pragma unroll
      for (int j = 0; j < kPrefetchedLse; ++j)
        prefetched[j] = *reinterpret_cast<const float2*>(rows + 16 * j);
    };
    auto lse_delta_of = [&](const float* rows, int j) {
      return j < kPrefetchedLse ? prefetched[j] : *reinterpret_cast<const float2*>(rows + 16 * j);
    };
    // S^T becomes P^T.
    auto compute_p = [&](const float* rows, bool needs_mask) {
      if (needs_mask) mask_values(s, -FA_INFINITY);
#pragma unroll
      for (int j = 0; j < kMmaM; ++j) {
        const float2 lse = lse_delta_of(rows, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[j][e] = ex2_approx_ftz(fmaf(s[j][e], p.exp2_scale, e % 2 ? -lse.y : -lse.x));
        }
      }
    };
    // dP^T becomes dS^T.
    auto compute_ds = [&](const float* rows, bool needs_mask) {
      if (needs_mask) mask_values(dp, 0.0f);
#pragma unroll
      for (int j = 0; j < kMmaM; ++j) {
        const float2 delta = lse_delta_of(rows, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
        }
      }
    };
    auto round_pairs = [&](uint32(&pairs)[kMmaM][2], const float (&x)[kMmaM][4]) {
#pragma unroll
      for (int j = 0; j < kMmaM; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) pairs[j][h] = pack2<kBf16>(x[j][2 * h], x[j][2 * h + 1]);
      }
    };
    // dS to shared memory: matrices of 8 keys are written as rows of queries.
    auto write_ds = [&](const uint32(&pairs)[kMmaM][2]) {
      const int row = lane() / 16 * 8 + lane() % 8, chunk = warp_row() / 8 + lane() / 8 % 2;
      const uint32 to = cvta_to_shared(shared.ds[ds_pipe_of_tile().index()]) +
                        group * DsTile::kBlockBytes + DsTile::lane_offset(row, chunk);
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
    auto bwd_step = [&](auto finish_tile, auto begin_tile) {
      constexpr bool kFinishTile = decltype(finish_tile)::value,
                     kBeginTile = decltype(begin_tile)::value;
      constexpr bool kDeferThisDk = kDeferDk && kFinishTile;
      QPipeline q_pipe, next_q_pipe;
      DoutPipeline dout_pipe, next_dout_pipe;
      q_pipe.advance(tiles);
      dout_pipe.advance(tiles);
      next_q_pipe.advance(tiles + kFinishTile);
      next_dout_pipe.advance(tiles + kFinishTile);
      const int q_stage = q_pipe.index(), dout_stage = dout_pipe.index();
      const uint8 *q_tile = shared.q[q_stage], *dout_tile = shared.dout[dout_stage];
      const uint8 *next_q = shared.q[next_q_pipe.index()],
                  *next_o = shared.dout[next_dout_pipe.index()];
      // Of this lane's queries: two of LSE, then two of delta.
      const float4* rows = shared.lse_delta[next_q_pipe.index()] + lane() % 4;
      const bool discard_dq = kDeferDq && step == 0;  // dQ
      bool needs_mask = false;                        // the next tile
      uint32 weights[kMmaM][2], ds[kMmaM][2];
      auto begin_next_tile = [&]() {
        advance_tile();
        needs_mask = !kSparse && kBeginTile && tile_needs_mask();
      };
      auto release_operands = [&]() {
        release(shared.dout_empty[dout_stage]);
        if constexpr (!kDeferDk) release_per_lane(shared.q_empty[q_stage]);  // of rows, too
      };
      if constexpr (kFinishTile) {
        round_pairs(weights, s);
        round_pairs(ds, dp);
        const DsPipeline own = ds_pipe_of_tile();
        wait(shared.ds_empty[own.index()], own.parity() ^ 1);
        write_ds(ds);
        wgmma_fence();
        gemm_dkdv(dv, weights, dout_tile);
        if constexpr (!kDeferDk) {
          wgmma_fence();
          gemm_dkdv(dk, ds, q_tile);
        }
        wgmma_commit_group();
        fence_proxy_async_shared();
        release_per_lane(shared.ds_full[own.index()]);
        gemm_dq(dp);
        if constexpr (kPrefetchedLse) begin_next_tile();  // beside products
        if constexpr (kDeferDq) {
          wgmma_wait_group<1>();
          release_operands();
        }
      }
      if constexpr (kBeginTile) {
        wait(shared.q_full[next_q_pipe.index()], next_q_pipe.parity());
        wgmma_fence();
        gemm_scores(s, shared.k, next_q);
        wgmma_commit_group();
        prefetch_mask_words(next_q_pipe.index());
      }
      if constexpr (kFinishTile) {
        if constexpr (kDeferDk) {
          wgmma_wait_group<1 + kBeginTile>();
          release_operands();
        }
        wgmma_wait_group<kBeginTile>();
        release(shared.ds_empty[ds_pipe_of_dq().index()]);
        if constexpr (!kPrefetchedLse) begin_next_tile();
        if (!discard_dq) write_dq_tile(dp);
      }
      if constexpr (kBeginTile) {
        if constexpr (!kSparse && !kFinishTile) needs_mask = tile_needs_mask();
        wait(shared.dout_full[next_dout_pipe.index()], next_dout_pipe.parity());
        wgmma_fence();
        gemm_scores(dp, shared.v, next_o);
        wgmma_commit_group();
      }
      if constexpr (kFinishTile) {
        if (!discard_dq) publish_dq_tile();
      }
      if constexpr (kDeferThisDk) {
        wgmma_fence();
        gemm_dk_deferred(q_tile);
      }
      if constexpr (kBeginTile) {
        prefetch_lse_delta(&rows->x);
        wgmma_wait_group<1 + kDeferThisDk>();
        if constexpr (kSparse) {
          apply_band(next_q_pipe.index());
          needs_mask = tile_needs_mask();
        }
        compute_p(&rows->x, needs_mask);
        prefetch_lse_delta(&rows->z);
        wgmma_wait_group<kDeferThisDk>();
        compute_ds(&rows->z, needs_mask);
      }
      if constexpr (kFinishTile) {
        if constexpr (kDeferDk) {
          wgmma_wait_group<0>();
          release_per_lane(shared.q_empty[q_stage]);  // of rows, too
        }
        ++tiles;
      }
      wgmma_wait_group<0>();
    };
    constexpr Constant<0> kSkip;
    constexpr Constant<1> kRun;
    wait(shared.k_full, work_count & 1);
    wait(shared.v_full, work_count & 1);
    bwd_step(kSkip, kRun);
#pragma unroll 1
    while (step < steps - 1) bwd_step(kRun, kRun);
    release(shared.v_empty);
    bwd_step(kRun, kSkip);
    if constexpr (kDeferDq) {
      gemm_dq(s);
      wgmma_wait_group<0>();
      write_dq_tile(s);
      publish_dq_tile();
    }
    release(shared.k_empty);
    NonfiniteProbe nonfinite_probe;
    write_dkdv(dv, 0, 1.0f, work.has_no_query, nonfinite_probe);
    write_dkdv(dk, 1, p.scale, work.has_no_query, nonfinite_probe);
    if (nonfinite_probe.found())
      flag_nonfinite_keys_64(params, work, work.tile * kTileN + 64 * group);
    release_per_lane(shared.work_empty[pipe.index()]);
    ++work_count;
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
      init(shared.q_empty[i], kArrivalsPerWarp * 4 * kGroups);
    }
    for (int i = 0; i < kDoutStages; ++i) {
      init(shared.dout_full[i], 1);
      init(shared.dout_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kDsStages; ++i) {
      init(shared.ds_full[i], kArrivalsPerWarp * 4 * kGroups);
      init(shared.ds_empty[i], 4 * kGroups);
    }
    for (int group = 0; group < kGroups; ++group) {
      for (int i = 0; i < kStagingStages; ++i) {
        init(shared.staging_empty[group][i], 1);
      }
      for (int i = 0; i < kStagingBarriers; ++i)
        init(shared.staging_full[group][i], kArrivalsPerWarp * 4);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      init(shared.work_full[i], 1);
      init(shared.work_empty[i], kArrivalsPerWarp * 4 * kGroups + kLoadThreads - 1 + kStoreThreads);
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
    if (!elect_sync()) return;
    if (warp == 0) {
      prefetch_tensormap(&params.q_map);
      prefetch_tensormap(&params.k_map);
      if constexpr (kLoadThreads == 1) {
        prefetch_tensormap(&params.dout_map);
        prefetch_tensormap(&params.v_map);
      }
      produce_k_q<LoadPolicy, kLoadThreads == 1>(
          params, shared, [&](WorkTile& work) { add_warpgroup_ranges(params.common, work); });
    } else if (warp < kLoadThreads) {
      prefetch_tensormap(&params.dout_map);
      prefetch_tensormap(&params.v_map);
      produce_v_dout<LoadPolicy>(params, shared);
    } else if (warp < kLoadThreads + kStoreThreads) {
      prefetch_tensormap(&params.dk_map);
      prefetch_tensormap(&params.dv_map);
      store_gradients(params, shared, warp - kLoadThreads);
    }
  }
}
