// dK and dV of attention backward for SM90 where head_dim is too wide for bwd_sm90.
//
// A block works on 64 keys at a time and walks over all tiles of 64 queries that see some of them.
// A warpgroup has all of dV in its registers, another one all of dK:
//   weights:    S^T = K Q^T,    P^T = exp(S^T - LSE),           dV += P^T dO
//   gradients:  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),      dK += dS^T Q
// P^T goes from the first to the second through shared memory, in float32, times the slopes of the
// scores where a softcap makes some.  A tile's second product
// runs beside the exponentials of the next one, or before its first product, where the tile should
// be given back soon.  dQ has a kernel of its own, bwd_dq_sm90.cu.
#include "cuda_src/common/backward_sm90.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/dq_accum.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

constexpr bool kBf16 = FA_BF16;     // bfloat16, else float16
constexpr int kDim = FA_DIM;        // head_dim and v_dim, padded with zeros
constexpr int kTile = 64;           // keys of a block, queries of a tile
constexpr int kStages = FA_STAGES;  // tiles of Q, and of dO, in flight
constexpr int kWorkStages = 2;
constexpr int kThreads = 128 * 3;
constexpr int kBlocks = (kDim + 63) / 64;  // a tile in shared memory has blocks of 64 columns
constexpr int kBytes = kTile * 128 * kBlocks;
constexpr int kMmaD = kDim / 8;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(FA_TILE_M == kTile && FA_TILE_N == kTile, "tiles are of 64");
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kStages > 1, "a tile is held while the next one is waited for");

using KeyTile = SharedTile<kTile, 64 * kBlocks>;

struct WorkTile : KvWorkTile {
  int full_begin, full_end;  // query tiles that see all keys
};

struct SharedStorage {
  uint8 k[kBytes];  // later dV
  uint8 v[kBytes];  // later dK
  uint8 q[kStages][kBytes];
  uint8 dout[kStages][kBytes];
  float p[kStages][dq_tile_floats(kTile)];  // P^T, times slopes
  float4 lse_delta[kStages][kTile / 2];
  uint64 k_full, k_empty, v_full, v_empty;
  uint64 q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  // P^T needs no empty barrier: it is written after Q of the stage's last tile was released
  uint64 p_full[kStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages];
  WorkTile work[kWorkStages];
  MaskTileInfo tile_info[kSparse ? kStages : 1];  // of the tile in each stage of Q
  MaskCursor cursors[kCursors];
  int64 operands_offset[kHasOperands ? kStages : 1];  // of the entry of the tile in each stage of Q
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

enum NamedBarrier : int { kResultWritten = 1 };  // a warpgroup's rows of dV, or of dK

using WorkPipeline = PipelineState<kWorkStages>;
using TilePipeline = PipelineState<kStages>;

// --------------------------------------------------------------------------------------- producers
using LoadPolicy = KvLoadPolicy<false, true, false, kEvictNormal, kTile, kTile, kBlocks>;

// Adds to a work tile, for each warpgroup, the query tiles that see all of its keys.
FA_DEVICE void add_warpgroup_ranges(const AttentionParams& p, WorkTile& work) {
  const int key = work.tile * kTile;
  const QueryTiles own = query_tiles(p, key, key + kTile - 1, kTile);
  const bool whole = key + kTile <= p.k_len;  // keys that do not exist have to be hidden
  work.full_begin = whole ? own.full_begin : 0;
  work.full_end = whole ? own.full_end : 0;
}

// -------------------------------------------------------------------------------------- computing
// What both computing warpgroups do: the product of their keys with each tile near them, of which
// they make P^T or dS^T, and the product of that with each tile that is near to the other one.
// kComputesDv: the warpgroup of P^T and dV, else that of dS^T and dK.
template <bool kComputesDv>
FA_DEVICE void consume(const BwdSm90Params& params, SharedStorage& shared) {
  const AttentionParams& p = params.common;
  const uint32 thread = threadIdx.x;
  auto thread_in_group = [&]() { return static_cast<int>(opaque(thread) % 128); };
  auto lane = [&]() { return thread_in_group() % 32; };
  auto release = [&](const uint64& barrier) {
    if (lane() == 0) arrive(barrier);
  };
  // Beside Q lies what is known of its rows, which lanes read themselves.
  auto release_q = [&](int at) { release_per_lane(shared.q_empty[at]); };
  auto release_dout = [&](int at) { release(shared.dout_empty[at]); };
  auto release_score_operand = [&](int at) { kComputesDv ? release_q(at) : release_dout(at); };
  auto release_sum_operand = [&](int at) { kComputesDv ? release_dout(at) : release_q(at); };
  constexpr bool kAccumulateFirst = (FA_ACCUMULATE_FIRST >> (kComputesDv ? 0 : 1)) & 1;
  auto& keys = kComputesDv ? shared.k : shared.v;
  auto& keys_full = kComputesDv ? shared.k_full : shared.v_full;
  auto& keys_empty = kComputesDv ? shared.k_empty : shared.v_empty;
  auto& score_operand = kComputesDv ? shared.q : shared.dout;
  auto& score_full = kComputesDv ? shared.q_full : shared.dout_full;
  auto& sum_operand = kComputesDv ? shared.dout : shared.q;
  auto& sum_full = kComputesDv ? shared.dout_full : shared.q_full;

  uint32 work_count = 0, tiles = 0;  // done so far; pipeline states follow from them
  float s[8][4], gradient[kMmaD][4];
  uint32 pairs[8][2];  // P^T or dS^T of the tile before, rounded

  auto gemm_scores = [&](const uint8* tile) {
    const uint64 a = wgmma_descriptor(cvta_to_shared(keys), 0);
    const uint64 b = wgmma_descriptor(cvta_to_shared(tile), 0);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      // 16 columns are 32 bytes of a block's rows.
      const int more = step / 4 * kTile * 128 + step % 4 * 32;
      wgmma_m64k16_ss<kBf16, 64>(s, wgmma_at(a, more), wgmma_at(b, more), step > 0);
    }
    wgmma_commit_group();
  };
  auto gemm_accumulate = [&](const uint8* tile) {
    const uint64 b = wgmma_descriptor(cvta_to_shared(tile), kTile * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32 a[4] = {pairs[2 * step][0], pairs[2 * step][1], pairs[2 * step + 1][0],
                           pairs[2 * step + 1][1]};
      wgmma_m64k16_rs<kBf16, kDim>(gradient, a, wgmma_at(b, step * 16 * 128), 1);
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
    uint32 visible_bits[2] = {
        ~0u, ~0u};  // under a mask: by which queries of the tile, of a thread's keys
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) gradient[j][e] = 0.0f;
    }
    auto crosses_band = [&](int tile) { return tile < work.full_begin || tile >= work.full_end; };
    // The first of this thread's keys, and of its queries of a tile.
    auto own_key = [&]() { return work.tile * kTile + thread_in_group() / 32 * 16 + lane() / 4; };
    auto first_query = [&](int tile) { return tile * kTile + lane() % 4 * 2; };
    auto in_band = [&](int tile, int h) {
      return visible_queries(p, own_key() + 8 * h, first_query(tile), 16);
    };
    // Under a mask, asks for what it says of the tile in a stage of Q; then takes away what is
    // outside of the band.
    auto prefetch_mask_words = [&](int at) {
      if constexpr (kSparse) {
        load_mask_words(visible_bits, params.mask, shared.tile_info[at].words_index,
                        work.tile % 2 * 64, thread_in_group());
      }
    };
    auto apply_band = [&](int at) {
      if constexpr (kSparse) {
        const int tile_number = shared.tile_info[at].tile;
        restrict_words<kTile>(visible_bits, tile_number, crosses_band(tile_number),
                              [&](int h) { return in_band(tile_number, h); });
      }
    };
    // Puts a number where a key is hidden.
    auto mask_values = [&](float masked_value) {
      if (kSparse ? (visible_bits[0] & visible_bits[1]) == ~0u : !crosses_band(tile)) return;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        mask_scores_of_row(s, h, kSparse ? visible_bits[h] : in_band(tile, h), masked_value);
    };
    // Loads the operands of a tile's scores while their product is in flight.
    auto prefetch_operands = [&](OperandTile<true, 8>& operands, int at) {
      if constexpr (kComputesDv && kHasOperands) {
        operands.load(p, shared.operands_offset[at], own_key(),
                      first_query(kSparse ? shared.tile_info[at].tile : tile));
      }
    };
    // S^T becomes P^T, given the products with kScoreMod.
    auto compute_p = [&](const TilePipeline& pipe, const OperandTile<true, 8>& operands) {
      const float4* rows = shared.lse_delta[pipe.index()] + lane() % 4;
      float4* to = reinterpret_cast<float4*>(shared.p[pipe.index()]) + thread_in_group();
      if constexpr (kHasSlope) {
        prepare_slopes(p, s);
      } else if constexpr (kScoreMod) {
        apply_score_mod(p, s, operands);
      }
      mask_values(hidden_score());
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 row = rows[4 * j];
        float slope[4] = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kHasSlope) {
            const auto found = score_and_slope<true, 8>(p, s[j][e], operands, j, e);
            s[j][e] = found.score, slope[e] = found.slope;
          }
          s[j][e] = ex2_approx_ftz(fmaf(s[j][e], p.exp2_scale, e % 2 ? -row.y : -row.x));
        }
        if constexpr (kHasSlope) {
          to[j * (kDqTileStep / 4)] =
              make_float4(slope_times(slope[0], s[j][0]), slope_times(slope[1], s[j][1]),
                          slope_times(slope[2], s[j][2]), slope_times(slope[3], s[j][3]));
        }
      }
      if constexpr (!kHasSlope) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          to[j * (kDqTileStep / 4)] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
        }
      }
      release_per_lane(shared.p_full[pipe.index()]);
    };
    // dP^T becomes dS^T.
    auto compute_ds = [&](const TilePipeline& pipe) {
      const float4* rows = shared.lse_delta[pipe.index()] + lane() % 4;
      mask_values(0.0f);
      wait(shared.p_full[pipe.index()], pipe.parity());
      const float4* from =
          reinterpret_cast<const float4*>(shared.p[pipe.index()]) + thread_in_group();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 row = rows[4 * j], x = from[j * (kDqTileStep / 4)];
        s[j][0] = x.x * (s[j][0] - row.z);
        s[j][1] = x.y * (s[j][1] - row.w);
        s[j][2] = x.z * (s[j][2] - row.z);
        s[j][3] = x.w * (s[j][3] - row.w);
      }
    };

    // The stage of the tile before, whose second product is next.
    auto previous_pipe = [&]() {
      TilePipeline pipe;
      pipe.advance(tiles - 1);
      return pipe;
    };
    auto gemm_previous = [&](const TilePipeline& previous) {
      wait(sum_full[previous.index()], previous.parity());
      wgmma_fence();
      gemm_accumulate(sum_operand[previous.index()]);
    };
    auto step = [&](auto first) {
      constexpr bool kFirst = decltype(first)::value;
      TilePipeline pipe;
      pipe.advance(tiles);
      const int at = pipe.index();
      auto release_previous = [&]() { release_sum_operand(previous_pipe().index()); };
      if constexpr (!kFirst && kAccumulateFirst) gemm_previous(previous_pipe());
      wait(score_full[at], pipe.parity());
      wgmma_fence();
      gemm_scores(score_operand[at]);
      if constexpr (!kFirst && kAccumulateFirst) {
        wgmma_wait_group<1>();
        release_previous();
      }
      if constexpr (!kFirst && !kAccumulateFirst) gemm_previous(previous_pipe());
      if constexpr (kSparse) {
        if constexpr (!kComputesDv) wait(sum_full[at], pipe.parity());
        prefetch_mask_words(at);
      }
      OperandTile<true, 8> operands;
      prefetch_operands(operands, at);
      wgmma_wait_group<kFirst || kAccumulateFirst ? 0 : 1>();
      apply_band(at);
      if constexpr (kComputesDv) {
        compute_p(pipe, operands);  // what is known of the rows lies beside Q
      } else {
        if constexpr (!kSparse) wait(sum_full[at], pipe.parity());
        compute_ds(pipe);
      }
      release_score_operand(at);
      if constexpr (!kFirst && !kAccumulateFirst) {
        wgmma_wait_group<0>();
        release_previous();
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) pairs[j][h] = pack2<kBf16>(s[j][2 * h], s[j][2 * h + 1]);
      }
      ++tiles;
      tile = tile == work.end - 1 ? work.begin : tile + 1;
    };

    wait(keys_full, work_count & 1);
    step(Constant<1>());
    int remaining = work.steps;
#pragma unroll 1
    while (--remaining > 0) step(Constant<0>());
    gemm_previous(previous_pipe());
    wgmma_wait_group<0>();
    release_sum_operand(previous_pipe().index());

    // All warps have left the keys, which become the result.
    bar_sync(kResultWritten + kComputesDv, 128);
    const float scale = kComputesDv ? 1.0f : p.scale;
    const bool zero = work.has_no_query;
    NonfiniteProbe nonfinite_probe;
    const uint32 to = cvta_to_shared(keys) +
                      KeyTile::lane_offset(thread_in_group() / 32 * 16 + thread_in_group() % 16,
                                           thread_in_group() / 16 % 2);
#pragma unroll
    for (int j = 0; j < kMmaD; j += 2) {
      uint32 four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &gradient[j + i / 2][i % 2 * 2];
        nonfinite_probe.add(two[0]);
        nonfinite_probe.add(two[1]);
        four[i] = zero ? 0 : pack2<kBf16>(two[0] * scale, two[1] * scale);
      }
      stmatrix_x4(KeyTile::at(to, 0, j / 2), four[0], four[1], four[2], four[3]);
    }
    if (nonfinite_probe.found()) flag_nonfinite_keys_64(params, work, work.tile * kTile);
    fence_proxy_async_shared();
    bar_sync(kResultWritten + kComputesDv, 128);
    if (thread_in_group() == 0) {
      store_rows_64<kBlocks>(kComputesDv ? params.dv_map : params.dk_map, keys, work.tile * kTile,
                             work.coordinate);
      cp_async_bulk_wait_group_read<0>();
    }
    release_per_lane(keys_empty);  // of results, too
    release_per_lane(shared.work_empty[work_pipe.index()]);
    ++work_count;
  }
  if (thread % 128 == 0) cp_async_bulk_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_dkdv_sm90(const __grid_constant__ BwdSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    init(shared.k_full, 1);
    init(shared.k_empty, kArrivalsPerWarp * 4);
    init(shared.v_full, 1);
    init(shared.v_empty, kArrivalsPerWarp * 4);
    for (int i = 0; i < kStages; ++i) {
      init(shared.q_full[i], 1);
      init(shared.q_empty[i], kArrivalsPerWarp * 8);
      init(shared.dout_full[i], 1);
      init(shared.dout_empty[i], 8);
      init(shared.p_full[i], kArrivalsPerWarp * 4);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      init(shared.work_full[i], 1);
      init(shared.work_empty[i], kArrivalsPerWarp * 8 + 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp >= 8) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume<false>(params, shared);
  } else if (warp >= 4) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume<true>(params, shared);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    if (!elect_sync()) return;
    if (warp == 0) {
      prefetch_tensormap(&params.q_map);
      prefetch_tensormap(&params.k_map);
      produce_k_q<LoadPolicy, false>(
          params, shared, [&](WorkTile& work) { add_warpgroup_ranges(params.common, work); });
    } else if (warp == 1) {
      prefetch_tensormap(&params.dout_map);
      prefetch_tensormap(&params.v_map);
      produce_v_dout<LoadPolicy>(params, shared);
    }
  }
}
