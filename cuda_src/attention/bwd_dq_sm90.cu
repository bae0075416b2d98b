// dQ of attention backward for SM90 where head_dim is too wide for bwd_sm90.
//
// A block works on kTileM queries at a time, 64 for each computing warpgroup, and walks over all
// tiles of kTileN keys that they see:
//   S = Q K^T,   P = exp(S - LSE),   dP = dO V^T,   dS = P (dP - delta),   dQ += dS K
// with Q and dO in shared memory and dQ in registers.  A tile's dQ += dS K runs beside the
// exponentials of the next one, or before its scores.
#include "cuda_src/common/backward_sm90.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

constexpr bool kBf16 = FA_BF16;        // bfloat16, else float16
constexpr int kDim = FA_DIM;           // head_dim and v_dim, padded with zeros
constexpr int kGroups = 2;             // warpgroups that compute
constexpr int kTileM = FA_TILE_M;      // queries of a block
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kKStages = FA_STAGES;    // tiles of K in flight
constexpr int kVStages = FA_V_STAGES;  // tiles of V in flight
// Whether dQ of a tile comes before the scores of the next one, so that its K is given back soon,
// rather than beside the exponentials.
constexpr bool kAccumulateFirst = FA_ACCUMULATE_FIRST;
constexpr int kWorkStages = 2;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kBlocks = (kDim + 63) / 64;  // a tile in shared memory has blocks of 64 columns
constexpr int kQBytes = 64 * 128 * kBlocks, kKBytes = kTileN * 128 * kBlocks;
constexpr int kMmaN = kTileN / 8;
constexpr int kMmaD = kDim / 8;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kTileM == 64 * kGroups, "a warpgroup has 64 queries");
static_assert(!kSparse || (kTileM == kMaskBlock && kTileN == 64),
              "a row of blocks is a tile of queries, a block is two tiles of keys");
static_assert(kTileN % 16 == 0 && kTileN <= 128, "16 keys are one step of a product");
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kKStages > 1, "a tile is held while the next one is waited for");

using QTile = SharedTile<64, 64 * kBlocks>;

// A block's next part of the work: a tile of queries.
struct WorkTile {
  uint32 entry;
  int coordinate[3];  // of it along the maps' batch axes
  int tile;           // which tile of queries; -1: there is no more work
  int begin, end;     // key tiles that its rows see
  int steps;          // of them: under a mask, those whose blocks are not hidden
  struct {
    int full_begin, full_end;  // of them those that all rows of a warpgroup see whole
  } group[kGroups];
};

struct SharedStorage {
  uint8 q[kGroups][kQBytes];  // later dQ
  uint8 dout[kGroups][kQBytes];
  uint8 k[kKStages][kKBytes];
  uint8 v[kVStages][kKBytes];
  float4 lse_delta[kGroups][32];
  uint64 q_full[kGroups], q_empty[kGroups];  // of dO and rows too
  uint64 k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages];
  WorkTile work[kWorkStages];
  MaskTileInfo tile_info[kSparse ? kKStages : 1];  // of the tile in each stage of K
  MaskCursor cursors[kCursors];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

enum NamedBarrier : int { kResultWritten = 1 };  // dQ of a warpgroup

using WorkPipeline = PipelineState<kWorkStages>;
using QPipeline = PipelineState<1>;
using KPipeline = PipelineState<kKStages>;
using VPipeline = PipelineState<kVStages>;

// --------------------------------------------------------------------------------------- producers
// Writes down the work of a number; false when there is none.  The last queries come first, because
// under a causal mask they see the most keys.
FA_DEVICE bool write_work_tile(const BwdSm90Params& params, WorkTile& work, uint32 index) {
  const AttentionParams& p = params.common;
  const uint32 entries = static_cast<uint32>(params.entries) * params.group;
  if (index >= entries * p.q_tiles) {
    work.tile = -1;
    return false;
  }
  const WorkIndex work_index =
      work_index_at(index, entries, p.q_tiles, params.entries_per_l2_group * params.group);
  work.entry = work_index.entry;
  entry_coordinates(params, work_index.entry, work.coordinate);
  work.tile = p.q_tiles - 1 - work_index.tile;
  const int first_row = work.tile * kTileM, last_row = min(first_row + kTileM, p.q_len) - 1;
  const KeyTiles all = key_tiles(p, first_row, last_row, kTileN);
  work.begin = all.begin;
  work.end = max(all.end, all.begin + 1);  // rows that see no key go through a tile that is hidden
  work.steps = work.end - work.begin;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int row = first_row + 64 * group;
    const KeyTiles own = key_tiles(p, row, min(row + 64, p.q_len) - 1, kTileN);
    work.group[group] = {own.full_begin, own.full_end};
  }
  if constexpr (kSparse) {
    const int row = table_row(params.mask, work.entry, work.tile);
    work.steps = count_visible_tiles<kTileN>(params.mask, row, work.begin, work.end);
    if (work.steps == 0) {  // past the last key
      work.begin = mask_blocks(p.k_len) * kMaskBlock / kTileN;
      work.end = work.begin + 1;
    }
  }
  return true;
}

// Calls f for each tile of keys of some work, in order.
template <typename F>
FA_DEVICE void for_each_key_tile(const BwdSm90Params& params, const WorkTile& work,
                                 MaskCursor& cursor, F f) {
  if constexpr (kSparse) {
    begin_block_row(cursor, table_row(params.mask, work.entry, work.tile));
    for_each_visible_tile<true, kTileN>(params.mask, cursor, work, work.steps == 0, f);
  } else {
#pragma unroll 1
    for (int tile = work.begin; tile < work.end; ++tile) f(tile);
  }
}

// Draws up the order of this block's work; loads K.
FA_DEVICE void produce_k(const BwdSm90Params& params, SharedStorage& shared) {
  WorkPipeline work_pipe;
  KPipeline pipe;
  uint32 index = atom_add_u32(params.tile_counters + 1, 1);
#pragma unroll 1
  while (true) {
    wait(shared.work_empty[work_pipe.index()], work_pipe.parity() ^ 1);
    WorkTile& work = shared.work[work_pipe.index()];
    const bool more = write_work_tile(params, work, index);
    arrive(shared.work_full[work_pipe.index()]);
    if (!more) break;
    index = atom_add_u32(params.tile_counters + 1, 1);  // the answer is not needed for long
    MaskCursor& cursor = cursor_of(shared, 0);
    for_each_key_tile(params, work, cursor, [&](int tile) {
      const int at = pipe.index();
      const MaskTileInfo tile_info =
          mask_tile_info<kTileN>(params.mask, cursor, tile, work.steps == 0);
      wait(shared.k_empty[at], pipe.parity() ^ 1);
      if constexpr (kSparse) shared.tile_info[at] = tile_info;
      const uint32 full = cvta_to_shared(&shared.k_full[at]);
      mbarrier_arrive_expect_tx(full, kKBytes);
      load_rows<kTileN, kBlocks>(shared.k[at], params.k_map, full, kEvictNormal, tile * kTileN,
                                 params.k_step, work.coordinate, 0);
      pipe.advance();
    });
    work_pipe.advance();
  }
}

// Q, dO and what is known of their rows; V.
FA_DEVICE void produce_q_dout_v(const BwdSm90Params& params, SharedStorage& shared) {
  QPipeline q_pipe;
  VPipeline pipe;
  for_each_work_tile(shared.work, shared.work_full, shared.work_empty, [&](const WorkTile& work) {
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      const int row = work.tile * kTileM + 64 * group;
      wait(shared.q_empty[group], q_pipe.parity() ^ 1);
      const uint32 full = cvta_to_shared(&shared.q_full[group]);
      mbarrier_arrive_expect_tx(full, 2 * kQBytes + sizeof(shared.lse_delta[0]));
      load_rows<64, kBlocks>(shared.q[group], params.q_map, full, kEvictFirst, row, params.q_step,
                             work.coordinate, 0);
      load_rows<64, kBlocks>(shared.dout[group], params.dout_map, full, kEvictFirst, row,
                             params.dout_step, work.coordinate, 0);
      load_lse_delta<64>(shared.lse_delta[group], params, full, work.entry, row);
    }
    q_pipe.advance();
    for_each_key_tile(params, work, cursor_of(shared, 1), [&](int tile) {
      const int at = pipe.index();
      wait(shared.v_empty[at], pipe.parity() ^ 1);
      const uint32 full = cvta_to_shared(&shared.v_full[at]);
      mbarrier_arrive_expect_tx(full, kKBytes);
      load_rows<kTileN, kBlocks>(shared.v[at], params.v_map, full, kEvictNormal, tile * kTileN,
                                 params.v_step, work.coordinate, 0);
      pipe.advance();
    });
  });
}

// -------------------------------------------------------------------------------------- computing
FA_DEVICE void consume(const BwdSm90Params& params, SharedStorage& shared, int warp) {
  const AttentionParams& p = params.common;
  // The same in all lanes, as a vote's result is to the compiler: what follows from it is computed
  // once for a warp.
  const int group = __any_sync(kFullWarp, warp >= 8);
  const uint32 thread = threadIdx.x;
  // Registers are short: what follows from the thread's number is computed where it is needed.
  auto thread_in_group = [&]() { return static_cast<int>(opaque(thread) % 128); };
  auto lane = [&]() { return thread_in_group() % 32; };
  auto warp_row = [&]() { return thread_in_group() / 32 * 16; };  // of the warpgroup's 64
  auto release = [&](const uint64& barrier) {
    if (lane() == 0) arrive(barrier);
  };

  uint32 work_count = 0, tiles = 0;  // done so far; pipeline states follow from them
  float s[1][kMmaN][4], dp[1][kMmaN][4], dq[kMmaD][4];
  uint32 ds[kMmaN][2];  // of the tile before, rounded

  // D = A B^T of 64 queries and a tile of keys, over the columns of both, started.
  auto gemm_scores = [&](float (&d)[kMmaN][4], const uint8(&rows)[kGroups][kQBytes],
                         const uint8* tile) {
    const uint64 a = wgmma_descriptor(cvta_to_shared(rows) + group * kQBytes, 0);
    const uint64 b = wgmma_descriptor(cvta_to_shared(tile), 0);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      // 16 columns are 32 bytes of a block's rows.
      wgmma_m64k16_ss<kBf16, kTileN>(d, wgmma_at(a, step / 4 * 64 * 128 + step % 4 * 32),
                                     wgmma_at(b, step / 4 * kTileN * 128 + step % 4 * 32),
                                     step > 0);
    }
    wgmma_commit_group();
  };
  // dQ += dS K, started.
  auto gemm_accumulate = [&](const uint8* tile) {
    const uint64 b = wgmma_descriptor(cvta_to_shared(tile), kTileN * 128);
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      const uint32 a[4] = {ds[2 * step][0], ds[2 * step][1], ds[2 * step + 1][0],
                           ds[2 * step + 1][1]};
      wgmma_m64k16_rs<kBf16, kDim>(dq, a, wgmma_at(b, step * 16 * 128), 1);
    }
    wgmma_commit_group();
  };

#pragma unroll 1
  while (true) {
    WorkPipeline work_pipe;
    work_pipe.advance(work_count);
    wait(shared.work_full[work_pipe.index()], work_pipe.parity());
    const WorkTile& work = shared.work[work_pipe.index()];
    if (work.tile < 0) break;
    int tile = work.begin;  // without a mask
    int remaining = max(work.steps, 1);
    uint32 visible_bits[2] = {~0u, ~0u};  // under a mask: of the tile's keys, by a thread's queries
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[j][e] = 0.0f;
    }
    wait(shared.q_full[group], work_count & 1);
    // LSE (0) or delta (2) of this thread's row g, or g + 8.
    auto lse_delta = [&](int h, int component) {
      const int row = warp_row() + lane() / 4 + 8 * h;
      return reinterpret_cast<const float*>(&shared.lse_delta[group][row / 2])[row % 2 + component];
    };
    auto crosses_band = [&](int tile) {
      return tile < work.group[group].full_begin || tile >= work.group[group].full_end;
    };
    auto first_key_of = [&](int tile) { return tile * kTileN + lane() % 4 * 2; };
    auto first_row = [&]() { return work.tile * kTileM + 64 * group + warp_row() + lane() / 4; };
    // Under a mask, asks for what it says of the tile in a stage of K; then takes away what is
    // outside of the band.
    auto prefetch_mask_words = [&](int at) {
      if constexpr (kSparse) {
        load_mask_words(visible_bits, params.mask, shared.tile_info[at].words_index, 64 * group,
                        thread_in_group());
      }
    };
    auto apply_band = [&](int at) {
      if constexpr (kSparse) {
        const int tile_number = shared.tile_info[at].tile, key = first_key_of(tile_number);
        restrict_words<kTileN>(visible_bits, tile_number, crosses_band(tile_number), [&](int h) {
          return visible_columns(p, first_row() + 8 * h, key, 16);
        });
      }
    };
    // Puts a number where a key is hidden.
    auto mask_values = [&](float (&x)[1][kMmaN][4], float masked_value) {
      if constexpr (kSparse) {
        if ((visible_bits[0] & visible_bits[1]) == ~0u) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) mask_scores_of_row(x[0], h, visible_bits[h], masked_value);
      } else if (crosses_band(tile)) {
        mask_outside_band(p, x, first_row(), first_key_of(tile), 0, masked_value);
      }
    };
    // The operands of a tile's scores, where there are registers to load it beside products.
    using Operands = OperandTile<false, kMmaN>;
    constexpr bool kPrefetchOperands = kHasOperands && sizeof(Operands) <= 16 * sizeof(uint32);
    auto first_key_in_stage = [&](int at) {
      return first_key_of(kSparse ? shared.tile_info[at].tile : tile);
    };
    auto prefetch_operands = [&](Operands& operands, int at) {
      if constexpr (kPrefetchOperands) {
        operands.load(p, operands_offset(p, work.coordinate, 0), first_row(),
                      first_key_in_stage(at));
      }
    };
    // Calls f with the operands of all scores, or of a few at a time.
    auto each_operands_part = [&](const Operands& operands, int at, auto f) {
      if constexpr (kPrefetchOperands || !kHasOperands) {
        f(0, Constant<kMmaN>(), operands);
      } else {
        for_each_operands_part<false, kMmaN>(p, operands_offset(p, work.coordinate, 0), first_row(),
                                             first_key_in_stage(at), f);
      }
    };
    // S becomes P, times the slopes of the scores with kHasSlope.
    auto compute_p = [&](const Operands& operands, int at) {
      if constexpr (kHasSlope) {
        prepare_slopes(p, s[0]);
      } else if constexpr (kScoreMod) {
        each_operands_part(operands, at, [&](int first, auto count, const auto& part) {
          apply_score_mod(p, reinterpret_cast<float (&)[decltype(count)::value][4]>(s[0][first]),
                          part);
        });
      }
      mask_values(s, hidden_score());
      const float lse[2] = {lse_delta(0, 0), lse_delta(1, 0)};
      if constexpr (kHasSlope) {
        each_operands_part(operands, at, [&](int first, auto count, const auto& part) {
#pragma unroll
          for (int i = 0; i < decltype(count)::value; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float& x = s[0][first + i][e];
              const auto found = score_and_slope<false, decltype(count)::value>(p, x, part, i, e);
              x = slope_times(found.slope,
                              ex2_approx_ftz(fmaf(found.score, p.exp2_scale, -lse[e / 2])));
            }
          }
        });
      } else {
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[0][j][e] = ex2_approx_ftz(fmaf(s[0][j][e], p.exp2_scale, -lse[e / 2]));
          }
        }
      }
    };
    // Under a mask lanes read what lies beside K.
    auto release_k = [&](int at) {
      kSparse ? release_per_lane(shared.k_empty[at]) : release(shared.k_empty[at]);
    };
    // The tile of K before this one, whose dQ is next.
    auto previous_k_stage = [&]() {
      KPipeline pipe;
      pipe.advance(tiles - 1);
      return pipe.index();
    };
    auto step = [&](auto first) {
      constexpr bool kFirst = decltype(first)::value;
      KPipeline k_pipe;
      VPipeline v_pipe;
      k_pipe.advance(tiles);
      v_pipe.advance(tiles);
      const int k_stage = k_pipe.index(), v_stage = v_pipe.index();
      if constexpr (!kFirst && kAccumulateFirst) {
        wgmma_fence();
        gemm_accumulate(shared.k[previous_k_stage()]);
      }
      wait(shared.k_full[k_stage], k_pipe.parity());
      wgmma_fence();
      gemm_scores(s[0], shared.q, shared.k[k_stage]);
      wait(shared.v_full[v_stage], v_pipe.parity());
      wgmma_fence();
      gemm_scores(dp[0], shared.dout, shared.v[v_stage]);
      if constexpr (!kFirst && kAccumulateFirst) {
        wgmma_wait_group<2>();
        release_k(previous_k_stage());
      }
      if constexpr (!kFirst && !kAccumulateFirst) gemm_accumulate(shared.k[previous_k_stage()]);
      prefetch_mask_words(k_stage);
      Operands operands;
      prefetch_operands(operands, k_stage);
      wgmma_wait_group<kFirst || kAccumulateFirst ? 1 : 2>();
      apply_band(k_stage);
      compute_p(operands, k_stage);
      wgmma_wait_group<kFirst || kAccumulateFirst ? 0 : 1>();
      release(shared.v_empty[v_stage]);
      mask_values(dp, 0.0f);
      const float delta[2] = {lse_delta(0, 2), lse_delta(1, 2)};
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[0][j][e] = s[0][j][e] * (dp[0][j][e] - delta[e / 2]);
      }
      if constexpr (!kFirst && !kAccumulateFirst) {
        wgmma_wait_group<0>();
        release_k(previous_k_stage());
      }
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          ds[j][h] = pack2<kBf16>(dp[0][j][2 * h], dp[0][j][2 * h + 1]);
        }
      }
      ++tiles;
      ++tile;
    };

    step(Constant<1>());
#pragma unroll 1
    while (--remaining > 0) step(Constant<0>());
    wgmma_fence();
    gemm_accumulate(shared.k[previous_k_stage()]);
    wgmma_wait_group<0>();
    release_k(previous_k_stage());

    // All warps have left the rows of Q, which become those of dQ.
    bar_sync(kResultWritten + group, 128);
    NonfiniteProbe nonfinite_probe;
    const uint32 to =
        cvta_to_shared(shared.q[0]) + group * kQBytes +
        QTile::lane_offset(warp_row() + thread_in_group() % 16, thread_in_group() / 16 % 2);
#pragma unroll
    for (int j = 0; j < kMmaD; j += 2) {
      uint32 four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &dq[j + i / 2][i % 2 * 2];
        nonfinite_probe.add(two[0]);
        nonfinite_probe.add(two[1]);
        four[i] = pack2<kBf16>(two[0] * p.scale, two[1] * p.scale);
      }
      stmatrix_x4(QTile::at(to, 0, j / 2), four[0], four[1], four[2], four[3]);
    }
    if (nonfinite_probe.found()) {
      flag_nonfinite_queries_64(params, work.entry, work.tile * kTileM + 64 * group);
    }
    fence_proxy_async_shared();
    bar_sync(kResultWritten + group, 128);
    if (thread_in_group() == 0) {
      const int row = work.tile * kTileM + 64 * group;
      if (row < p.q_len)
        store_rows_64<kBlocks>(params.dq_map, shared.q[group], row, work.coordinate);
      cp_async_bulk_wait_group_read<0>();
    }
    release_per_lane(shared.q_empty[group]);  // of rows and results, too
    release_per_lane(shared.work_empty[work_pipe.index()]);
    ++work_count;
  }
  if (thread % 128 == 0) cp_async_bulk_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_dq_sm90(const __grid_constant__ BwdSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kGroups; ++i) {
      init(shared.q_full[i], 1);
      init(shared.q_empty[i], kArrivalsPerWarp * 4);
    }
    for (int i = 0; i < kKStages; ++i) {
      init(shared.k_full[i], 1);
      init(shared.k_empty[i], (kSparse ? kArrivalsPerWarp : 1) * 4 * kGroups);
    }
    for (int i = 0; i < kVStages; ++i) {
      init(shared.v_full[i], 1);
      init(shared.v_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      init(shared.work_full[i], 1);
      init(shared.work_empty[i], kArrivalsPerWarp * 4 * kGroups + 1);
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
      prefetch_tensormap(&params.k_map);
      produce_k(params, shared);
    } else if (warp == 1) {
      prefetch_tensormap(&params.q_map);
      prefetch_tensormap(&params.dout_map);
      prefetch_tensormap(&params.v_map);
      prefetch_tensormap(&params.dq_map);
      produce_q_dout_v(params, shared);
    }
  }
}
