// Attention backward for SM90: TMA, wgmma, warp specialisation, a persistent grid.
//
// A block works on kTileN keys at a time and walks over all tiles of queries that see some of them,
// for each query head that shares the keys.  Scores are transposed,
//   S^T = K Q^T,   P^T = exp(S^T - LSE),   dP^T = V dO^T,   dS^T = P^T (dP^T - delta),
// so that a warpgroup has P^T and dS^T of its 64 keys in registers, as operands of
//   dV += P^T dO   and   dK += dS^T Q.
// dS goes through shared memory for dQ^T = K^T dS^T, of which each warpgroup computes one part.
//
// dQ is summed in global memory in the order of the blocks of keys: a semaphore for each query tile
// says which block may add next.  Blocks of threads take their work in that order too, so a block
// that another one waits for is always running.  bwd_preprocess.cu runs before this kernel,
// bwd_convert_dq.cu after it.
#include "cuda_src/attention/bwd_sm90.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/staged_bias.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

// --------------------------------------------------------------------------------------- consumers
// Registers of a thread, as accumulators of m64nN hold them (ptx/wgmma.cuh).
using Scores = float[kMmaM][4];    // S^T, P^T, dP^T or dS^T: 64 keys x kTileM queries
using Rounded = uint32[kMmaM][2];  // P^T or dS^T in 16 bits, an A operand from registers
using KvSums = float[kMmaD][4];    // dV or dK: 64 keys x kDim columns

// What stays the same while a consumer warpgroup computes a work tile.  Register arrays are passed
// as references next to it: ptxas serialised products whose accumulators were members of a struct.
// It is passed by value, because references to it change the code of some variants.
struct Consumer {
  const BwdSm90Params& params;
  SharedStorage& shared;
  const WorkTile& work;
  int group;          // of the block's two consumer warpgroups
  uint32 work_count;  // work tiles before this one
};

// The thread's number in its warpgroup.  opaque() hides threadIdx.x from the compiler, so that
// lanes, rows and addresses are computed again at each use: kept in between, they would take
// registers from the accumulators.
FA_DEVICE int thread_in_group() { return static_cast<int>(opaque(threadIdx.x) % 128); }
FA_DEVICE int lane_in_warp() { return thread_in_group() % 32; }
FA_DEVICE int warp_row() { return thread_in_group() / 32 * 16; }  // of the warpgroup's 64 keys

FA_DEVICE void release(const uint64& barrier) {
  if (lane_in_warp() == 0) arrive(barrier);
}

// The stage into which a step writes dS, and the stage from which it computes dQ.  The number of
// tiles is passed by reference, so that stages and addresses are computed again at each use, as
// with thread_in_group().
FA_DEVICE DsPipeline ds_pipe_of_tile(const uint32& tiles) { return {tiles + kDeferDq}; }
FA_DEVICE DsPipeline ds_pipe_of_dq(const uint32& tiles) { return {tiles}; }

// ---------------------------------------------------------------------------------------- products
// Each function starts a product.  The caller commits it and waits for it.

// D = A B^T with A of this warpgroup's 64 keys and B of a query tile, both kDim columns wide.
FA_DEVICE void gemm_scores(Scores& d, const uint8* keys, const uint8* queries, int group) {
  wgmma_fence();
  const uint64 a = wgmma_descriptor(cvta_to_shared(keys) + group * 64 * 128, 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(queries), 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of a block's rows.
    wgmma_m64k16_ss<kBf16, kTileM>(d, wgmma_at(a, step / 4 * kTileN * 128 + step % 4 * 32),
                                   wgmma_at(b, step / 4 * kTileM * 128 + step % 4 * 32), step > 0);
  }
}

// D += A B with A in registers, of 64 keys and a tile's queries, and B with a row for each query.
FA_DEVICE void gemm_sums(KvSums& d, const Rounded& pairs, const uint8* queries) {
  wgmma_fence();
  const uint64 b = wgmma_descriptor(cvta_to_shared(queries), kTileM * 128);
#pragma unroll
  for (int step = 0; step < kTileM / 16; ++step) {
    const uint32 a[4] = {pairs[2 * step][0], pairs[2 * step][1], pairs[2 * step + 1][0],
                         pairs[2 * step + 1][1]};
    wgmma_m64k16_rs<kBf16, kDim>(d, a, wgmma_at(b, step * 16 * 128), 1);
  }
}

// S^T = K Q^T
FA_DEVICE void gemm_s(Scores& s, Consumer c, const uint8* q_tile) {
  gemm_scores(s, c.shared.k, q_tile, c.group);
}

// dP^T = V dO^T
FA_DEVICE void gemm_dp(Scores& dp, Consumer c, const uint8* dout_tile) {
  gemm_scores(dp, c.shared.v, dout_tile, c.group);
}

// dV += P^T dO
FA_DEVICE void gemm_dv(KvSums& dv, const Rounded& p, const uint8* dout_tile) {
  gemm_sums(dv, p, dout_tile);
}

// dK += dS^T Q
FA_DEVICE void gemm_dk(KvSums& dk, const Rounded& ds, const uint8* q_tile) {
  gemm_sums(dk, ds, q_tile);
}

// dK += dS^T Q with this warpgroup's dS from shared memory, whose registers may be used again.
FA_DEVICE void gemm_dk_from_shared(KvSums& dk, Consumer c, const uint32& tiles,
                                   const uint8* q_tile) {
  wgmma_fence();
  const uint64 a = wgmma_descriptor(
      cvta_to_shared(c.shared.ds[ds_pipe_of_tile(tiles).index()]) + c.group * DsTile::kBlockBytes,
      0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(q_tile), kTileM * 128);
#pragma unroll
  for (int step = 0; step < kTileM / 16; ++step) {
    wgmma_m64k16_ss<kBf16, kDim, kMnMajor, kMnMajor>(dk, wgmma_at(a, step * 16 * 128),
                                                     wgmma_at(b, step * 16 * 128), 1);
  }
}

// dQ^T = K^T dS^T, this warpgroup's part of it, once both warpgroups have published their dS.
FA_DEVICE void gemm_dq(Scores& dq, Consumer c, const uint32& tiles) {
  const DsPipeline pipe = ds_pipe_of_dq(tiles);
  wait(c.shared.ds_full[pipe.index()], pipe.parity());
  wgmma_fence();
  // A warpgroup has 64 of the columns, or half of the queries.
  const int part = kBlocks > 1 ? 0 : c.group, block = kBlocks > 1 ? c.group : 0;
  const uint64 a = wgmma_descriptor(cvta_to_shared(c.shared.k) + block * kTileN * 128, 0);
  const uint64 b =
      wgmma_descriptor(cvta_to_shared(c.shared.ds[pipe.index()]) + part * kDqTileM * 128, 0);
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
    wgmma_m64k16_ss<kBf16, kDqTileM, kMnMajor>(
        dq, wgmma_at(a, step * 16 * 128),
        wgmma_at(b, step / 4 * DsTile::kBlockBytes + step % 4 * 32), step > 0);
  }
}

// ------------------------------------------------------------------------------------- query tiles
// A query tile in shared memory.
struct QueryTile {
  QPipeline q_pipe;
  DoutPipeline dout_pipe;
  int q_stage, dout_stage;
  const uint8 *q, *dout;
};

FA_DEVICE QueryTile query_tile_at(Consumer c, uint32 number) {
  const QPipeline q_pipe{number};
  const DoutPipeline dout_pipe{number};
  const int q_stage = q_pipe.index(), dout_stage = dout_pipe.index();
  return {q_pipe, dout_pipe, q_stage, dout_stage, c.shared.q[q_stage], c.shared.dout[dout_stage]};
}

FA_DEVICE void wait_for_q(Consumer c, const QueryTile& tile) {
  wait(c.shared.q_full[tile.q_pipe.index()], tile.q_pipe.parity());
}
FA_DEVICE void wait_for_dout(Consumer c, const QueryTile& tile) {
  wait(c.shared.dout_full[tile.dout_pipe.index()], tile.dout_pipe.parity());
}
FA_DEVICE void release_q(Consumer c, const QueryTile& tile) {
  release_per_lane(c.shared.q_empty[tile.q_stage]);  // each lane has read LSE and delta itself
}
FA_DEVICE void release_dout(Consumer c, const QueryTile& tile) {
  release(c.shared.dout_empty[tile.dout_stage]);
}

// LSE and delta of this lane's queries: in each float4 two of LSE, then two of delta.
FA_DEVICE const float4* lane_rows(Consumer c, const QueryTile& tile) {
  return c.shared.lse_delta[tile.q_pipe.index()] + lane_in_warp() % 4;
}

// ------------------------------------------------------------------------------------------- masks
// The query tile of a step where only the band hides pairs.  The counter always goes down, also if
// tiles go up (kReverseKvOrder), because that takes fewer registers.
FA_DEVICE int band_tile(Consumer c, int countdown) {
  return kReverseKvOrder ? c.work.begin + c.work.end - 1 - countdown : countdown;
}
FA_DEVICE void advance(int& countdown, Consumer c) {
  countdown = countdown == c.work.begin ? c.work.end - 1 : countdown - 1;
}

// Whether the band hides some of the warpgroup's keys from queries of a tile.
FA_DEVICE bool crosses_band(Consumer c, int tile) {
  return tile < c.work.group[c.group].full_begin || tile >= c.work.group[c.group].full_end;
}

// The first of the two keys whose scores this thread holds; the other one is 8 keys after it.
FA_DEVICE int own_key(Consumer c) {
  return c.work.tile * kTileN + 64 * c.group + warp_row() + lane_in_warp() / 4;
}

// Starts to load the mask's words of the tile in a stage of Q.
FA_DEVICE void prefetch_mask_words(uint32 (&visible_bits)[2], Consumer c, int q_stage) {
  if constexpr (kSparse) {
    load_mask_words(visible_bits, c.params.mask, c.shared.tile_info[q_stage].words_index,
                    64 * c.group, thread_in_group());
  }
}

// The same of packed sequences, where a tile holds pairs that do not see each other.  Intervals of
// rows come from global memory: they are asked for while products are in flight.
FA_DEVICE void prefetch_intervals(uint32 (&visible_bits)[2], Consumer c, int countdown,
                                  bool needs_mask) {
  if constexpr (kPacked) {
    visible_bits[0] = visible_bits[1] = ~0u;
    if (!needs_mask) return;
    const int query = band_tile(c, countdown) * kTileM + lane_in_warp() % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      visible_bits[h] = visible_queries(c.params.common, own_key(c) + 8 * h, query, 2 * kMmaM);
  }
}

// Clears the bits of queries that the band hides.
FA_DEVICE void apply_band(uint32 (&visible_bits)[2], Consumer c, int q_stage) {
  const int tile = c.shared.tile_info[q_stage].tile, query = tile * kTileM + lane_in_warp() % 4 * 2;
  // A lambda: most tiles lie inside the band and need no bits of it.
  restrict_words<kTileM>(visible_bits, tile, crosses_band(c, tile), [&](int h) {
    return visible_queries(c.params.common, own_key(c) + 8 * h, query, kTileM / 4);
  });
}

// The first of this lane's queries of a tile; the others are 1, 8, 9, 16, ... after it.
FA_DEVICE int first_query(Consumer c, int q_stage, int countdown) {
  const int tile = kSparse ? c.shared.tile_info[q_stage].tile : band_tile(c, countdown);
  return tile * kTileM + lane_in_warp() % 4 * 2;
}

// Replaces the scores of hidden pairs, or their gradients.
FA_DEVICE void mask_scores(Scores& x, Consumer c, int countdown, const uint32 (&visible_bits)[2],
                           float masked_value) {
  const int query = band_tile(c, countdown) * kTileM + lane_in_warp() % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    mask_scores_of_row(x, h,
                       kSparse || kPacked
                           ? visible_bits[h]
                           : visible_queries(c.params.common, own_key(c) + 8 * h, query, 2 * kMmaM),
                       masked_value);
  }
}

// ----------------------------------------------------------------------------------------- dropout
// Makes the words of a tile's decisions, each thread one, which all threads of the warpgroup read.
FA_DEVICE void make_kept_words(Consumer c, const QueryTile& tile, int countdown) {
#if FA_DROPOUT
  const int place = thread_in_group(), q_stage = tile.q_pipe.index();
  const int query = (kSparse ? c.shared.tile_info[q_stage].tile : band_tile(c, countdown)) * kTileM;
  const uint32 word = make_kept_word(c.params.common.dropout, c.shared.dropout_entry[q_stage],
                                     c.work.tile * kTileN + 64 * c.group, query, place);
  bar_sync(1 + c.group, 128);  // all have read the words of the tile before
  c.shared.kept[c.group][place] = word;
#endif
}

// The decisions on this thread's pairs.
FA_DEVICE uint32 own_kept_words(Consumer c) {
#if FA_DROPOUT
  return read_kept_words(c.shared.kept[c.group], warp_row(), lane_in_warp());
#else
  return 0;
#endif
}

// ----------------------------------------------------------------------------------------- softmax
// LSE or delta of this lane's queries, a pair for each j; `from` points to the first pair.  The
// first kPrefetchedLse pairs are loaded before the scores have been computed.
using Prefetched = float2[kPrefetchedLse + 1];

FA_DEVICE float2 row_pair(const float* from, int j) {
  return *reinterpret_cast<const float2*>(from + 16 * j);
}
FA_DEVICE void prefetch_rows(Prefetched& prefetched, const float* from) {
#pragma unroll
  for (int j = 0; j < kPrefetchedLse; ++j) prefetched[j] = row_pair(from, j);
}
FA_DEVICE float2 row_pair(const Prefetched& prefetched, const float* from, int j) {
  return j < kPrefetchedLse ? prefetched[j] : row_pair(from, j);
}

// The operands of a tile's scores, where there are registers to load them beside products.
using Operands = OperandTile<true, kMmaM>;
constexpr bool kPrefetchOperands = kHasOperands && sizeof(Operands) <= 16 * sizeof(uint32);
// Others are read from the stage so many columns of the accumulators at a time.
constexpr int kStagedColumns = 4;

// A template, for other builds have no stage.
template <typename Shared>
FA_DEVICE const uint8* bias_stage(const Shared& shared, int group) {
  return shared.bias[4 * group + warp_row() / 16];
}

// Starts to copy the bias of a tile, whose rows of Q have landed, while its first product runs.
FA_DEVICE void stage_operands(Consumer c, const QueryTile& tile, int countdown) {
  if constexpr (kStageBias) {
    stage_bias<kTileM, 16>(c.params.common, c.shared.operands_offset[tile.q_pipe.index()],
                           cvta_to_shared(bias_stage(c.shared, c.group)),
                           band_tile(c, countdown) * kTileM,
                           c.work.tile * kTileN + 64 * c.group + warp_row());
  }
}

FA_DEVICE void prefetch_operands(Operands& operands, Consumer c, const QueryTile& tile,
                                 int countdown) {
  if constexpr (kPrefetchOperands && !kStageBias) {
    const int q_stage = tile.q_pipe.index();
    operands.load(c.params.common, c.shared.operands_offset[q_stage], own_key(c),
                  first_query(c, q_stage, countdown));
  }
}

// Calls f with the operands of all scores, or of a few at a time.
template <typename F>
FA_DEVICE void for_each_operands_part(Consumer c, const QueryTile& tile, int countdown,
                                      const Operands& operands, F f) {
  if constexpr (kPrefetchOperands || !kHasOperands) {
    f(0, Constant<kMmaM>(), operands);
  } else if constexpr (kStageBias) {
#pragma unroll
    for (int j = 0; j < kMmaM; j += kStagedColumns) {
      OperandTile<true, kStagedColumns> part;
      read_staged_bias_of_keys_fp32(part, bias_stage(c.shared, c.group), j);
      f(j, Constant<kStagedColumns>(), part);
    }
  } else {
    const int q_stage = tile.q_pipe.index();
    for_each_operands_part<true, kMmaM>(c.params.common, c.shared.operands_offset[q_stage],
                                        own_key(c), first_query(c, q_stage, countdown), f);
  }
}

// P^T = exp(S^T - LSE), given the products with kHasSlope: P^T in 16 bits, and P^T times the slopes
// of the scores, from which dS^T is computed, in place of the products.  There are no registers for
// slopes beside them.
FA_DEVICE void compute_p_with_slopes(Scores& s, Rounded& pairs, Consumer c, const QueryTile& tile,
                                     const Operands& operands, const Prefetched& prefetched,
                                     const float* lse, int countdown,
                                     const uint32 (&visible_bits)[2], bool needs_mask) {
  const AttentionParams& p = c.params.common;
  prepare_slopes(p, s);
  if (needs_mask) mask_scores(s, c, countdown, visible_bits, hidden_score());
  for_each_operands_part(
      c, tile, countdown, operands, [&](int first, auto count, const auto& part) {
#pragma unroll
        for (int i = 0; i < decltype(count)::value; ++i) {
          const int j = first + i;
          const float2 row = row_pair(prefetched, lse, j);
          float weight[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const auto found =
                score_and_slope<true, decltype(count)::value>(p, s[j][e], part, i, e);
            weight[e] = ex2_approx_ftz(fmaf(found.score, p.exp2_scale, e % 2 ? -row.y : -row.x));
            s[j][e] = slope_times(found.slope, weight[e]);
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) pairs[j][h] = pack2<kBf16>(weight[2 * h], weight[2 * h + 1]);
        }
      });
}

// P^T = exp(S^T - LSE)
FA_DEVICE void compute_p(Scores& s, Consumer c, const Prefetched& prefetched, const float* lse,
                         int countdown, const uint32 (&visible_bits)[2], bool needs_mask) {
  if (needs_mask) mask_scores(s, c, countdown, visible_bits, -FA_INFINITY);
#pragma unroll
  for (int j = 0; j < kMmaM; ++j) {
    const float2 row = row_pair(prefetched, lse, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[j][e] = ex2_approx_ftz(fmaf(s[j][e], c.params.common.exp2_scale, e % 2 ? -row.y : -row.x));
    }
  }
}

// dS^T = P^T o (dP^T - delta), where P^T has been multiplied by slopes if there are any
FA_DEVICE void compute_ds(Scores& dp, const Scores& p, Consumer c, const Prefetched& prefetched,
                          const float* delta, int countdown, const uint32 (&visible_bits)[2],
                          bool needs_mask) {
  if (needs_mask) mask_scores(dp, c, countdown, visible_bits, 0.0f);
#pragma unroll
  for (int j = 0; j < kMmaM; ++j) {
    const float2 row = row_pair(prefetched, delta, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      dp[j][e] = p[j][e] * (dp[j][e] - (e % 2 ? row.y : row.x));
    }
  }
}

// dS^T of a tile with dropout, divided by the factor of what is kept.  Of weights that are kept it
// is P^T o (dP^T - delta / factor), of others -P^T o delta / factor.  P^T loses the latter, in its
// registers or in 16 bits.  What is not finite in dP^T of a dropped pair makes NaN, whose rows are
// computed again.
FA_DEVICE void compute_ds_with_dropout(Scores& dp, Scores& p, Rounded& pairs, Consumer c,
                                       const Prefetched& prefetched, const float* delta) {
  const float inverse = inverse_kept_factor(c.params.common);
  const uint32 kept = own_kept_words(c);
#pragma unroll
  for (int j = 0; j < kMmaM; ++j) {
    const float2 row = row_pair(prefetched, delta, j);
    const float negated[2] = {row.x * -inverse, row.y * -inverse};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float weight = p[j][e];
      const float of_kept = (kept >> (4 * j + e) & 1) != 0 ? weight : 0.0f;
      dp[j][e] = fmaf(of_kept, dp[j][e], weight * negated[e % 2]);
      if constexpr (!kHasSlope) p[j][e] = of_kept;
    }
    if constexpr (kHasSlope) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32 two = kept >> (4 * j + 2 * h) & 3;
        pairs[j][h] &= (two % 2 | two / 2 << 16) * 0xFFFFu;
      }
    }
  }
}

// P^T and dS^T of a tile, in the registers of S^T and dP^T; with kHasSlope P^T in 16 bits instead.
// When it is called, the products S^T and dP^T are in flight, and kLater groups after them, which
// it leaves in flight.
template <int kLater>
FA_DEVICE void softmax_backward(Scores& s, Scores& dp, Rounded& pairs, Consumer c,
                                const QueryTile& tile, const float4* rows, int countdown,
                                Operands& operands, uint32 (&visible_bits)[2], bool& needs_mask) {
  Prefetched prefetched;
  prefetch_rows(prefetched, &rows->x);
  if constexpr (kStageBias) {
    wait_for_staged_bias<0>();
    if constexpr (kPrefetchOperands) {
      read_staged_bias_of_keys<kTileM, 16>(operands, cvta_to_shared(bias_stage(c.shared, c.group)));
      __syncwarp();  // the stage may be written again
    }
  }
  wgmma_wait_group<1 + kLater>();  // S^T
  if constexpr (kSparse) {
    apply_band(visible_bits, c, tile.q_pipe.index());
  }
  if constexpr (kSparse || kPacked) needs_mask = (visible_bits[0] & visible_bits[1]) != ~0u;
  if constexpr (kHasSlope) {
    compute_p_with_slopes(s, pairs, c, tile, operands, prefetched, &rows->x, countdown,
                          visible_bits, needs_mask);
  } else {
    if constexpr (kScoreMod) {
      for_each_operands_part(
          c, tile, countdown, operands, [&](int first, auto count, const auto& part) {
            apply_score_mod(c.params.common,
                            reinterpret_cast<float (&)[decltype(count)::value][4]>(s[first]), part);
          });
    }
    compute_p(s, c, prefetched, &rows->x, countdown, visible_bits, needs_mask);
  }
  if constexpr (kStageBias && !kPrefetchOperands) __syncwarp();  // likewise
  prefetch_rows(prefetched, &rows->z);
  if constexpr (kDropout) bar_sync(1 + c.group, 128);  // its words are there
  wgmma_wait_group<kLater>();                          // dP^T
  if constexpr (kDropout) {
    if (needs_mask) mask_scores(dp, c, countdown, visible_bits, 0.0f);
    compute_ds_with_dropout(dp, s, pairs, c, prefetched, &rows->z);
  } else {
    compute_ds(dp, s, c, prefetched, &rows->z, countdown, visible_bits, needs_mask);
  }
}

FA_DEVICE void round_scores(Rounded& pairs, const Scores& x) {
#pragma unroll
  for (int j = 0; j < kMmaM; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) pairs[j][h] = pack2<kBf16>(x[j][2 * h], x[j][2 * h + 1]);
  }
}

// P^T in 16 bits, where softmax_backward left it in the registers of S^T.
FA_DEVICE void round_p(Rounded& pairs, const Scores& s) {
  if constexpr (!kHasSlope) round_scores(pairs, s);
}

// ---------------------------------------------------------------------------------------------- dS
// Waits until both warpgroups have computed dQ from what a stage holds.
FA_DEVICE void acquire_ds(Consumer c, const DsPipeline& pipe) {
  wait(c.shared.ds_empty[pipe.index()], pipe.parity() ^ 1);
}

// Writes this warpgroup's dS^T to shared memory.  Matrices of 8 keys become rows of queries.
FA_DEVICE void write_ds(const Rounded& ds, Consumer c, const uint32& tiles) {
  const DsPipeline pipe = ds_pipe_of_tile(tiles);
  const int row = lane_in_warp() / 16 * 8 + lane_in_warp() % 8,
            chunk = warp_row() / 8 + lane_in_warp() / 8 % 2;
  const uint32 to = cvta_to_shared(c.shared.ds[pipe.index()]) + c.group * DsTile::kBlockBytes +
                    DsTile::lane_offset(row, chunk);
#pragma unroll
  for (int j = 0; j < kMmaM; j += 2) {
    stmatrix_x4_trans(to + j * 8 * 128, ds[j][0], ds[j][1], ds[j + 1][0], ds[j + 1][1]);
  }
}

FA_DEVICE void publish_ds(Consumer c, const DsPipeline& pipe) {
  fence_proxy_async_shared();
  release_per_lane(c.shared.ds_full[pipe.index()]);
}
FA_DEVICE void release_ds(Consumer c, const uint32& tiles) {
  release(c.shared.ds_empty[ds_pipe_of_dq(tiles).index()]);
}

// With kDeferDq: zeros from which the block's first step computes a dQ that is discarded.
FA_DEVICE void publish_zero_ds(SharedStorage& shared, int group) {
  const uint32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = thread_in_group(); i < DsTile::kBlockBytes / 16; i += 128) {
    st_shared_v4_b32(cvta_to_shared(shared.ds[0]) + group * DsTile::kBlockBytes + 16 * i, zeros);
  }
  fence_proxy_async_shared();
  release_per_lane(shared.ds_full[0]);
}

// ----------------------------------------------------------------------------------------- results
// Results go to global memory through staging buffers, in the order of their numbers: dQ of each
// tile, then dV and dK of the work tile.  store_gradients takes them from there.

// The number of this tile's dQ plus `more`, computed again at each use as ds_pipe_of_tile() is.
FA_DEVICE uint32 result_number(Consumer c, const uint32& tiles, int more) {
  return tiles + 2 * c.work_count + more;
}
FA_DEVICE uint32 acquire_staging(Consumer c, const uint32& tiles, int more) {
  const StagingPipeline pipe{result_number(c, tiles, more)};
  wait(c.shared.staging_empty[c.group][pipe.index()], pipe.parity() ^ 1);
  return cvta_to_shared(c.shared.staging[c.group][pipe.index()]);
}
FA_DEVICE void publish_staging(Consumer c, const uint32& tiles, int more) {
  release_per_lane(
      c.shared.staging_full[c.group][result_number(c, tiles, more) % kStagingBarriers]);
}

// Writes this warpgroup's part of dQ^T: of this tile, or with kDeferDq of the tile before.
FA_DEVICE void write_dq(const Scores& dq, Consumer c, const uint32& tiles) {
  const uint32 to = acquire_staging(c, tiles, -kDeferDq) + 4 * dq_tile_offset(0, thread_in_group());
#pragma unroll
  for (int j = 0; j < kDqTileM / 8; ++j) {
    const uint32 four[4] = {__float_as_uint(dq[j][0]), __float_as_uint(dq[j][1]),
                            __float_as_uint(dq[j][2]), __float_as_uint(dq[j][3])};
    st_shared_v4_b32(to + 4 * dq_tile_offset(j, 0), four);
  }
}
FA_DEVICE void publish_dq(Consumer c, const uint32& tiles) { publish_staging(c, tiles, -kDeferDq); }

// Rounds 64 rows of dV or dK, or zeros if no query sees the keys, and publishes them.
FA_DEVICE void write_dkdv(const KvSums& sums, Consumer c, const uint32& tiles, int more,
                          float scale, bool zero, NonfiniteProbe& nonfinite_probe) {
  // The lane's row of the four matrices of an stmatrix.x4: rows 0-7, 8-15, then the same of the
  // next 8 columns (PTX ISA 9.7.14.5.16).
  const uint32 to =
      acquire_staging(c, tiles, more) +
      KeyTile::lane_offset(warp_row() + thread_in_group() % 16, thread_in_group() / 16 % 2);
#pragma unroll
  for (int j = 0; j < kMmaD; j += 2) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* two = &sums[j + i / 2][i % 2 * 2];
      nonfinite_probe.add(two[0]);
      nonfinite_probe.add(two[1]);
      pairs[i] = zero ? 0 : pack2<kBf16>(two[0] * scale, two[1] * scale);
    }
    stmatrix_x4(KeyTile::at(to, 0, j / 2), pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  publish_staging(c, tiles, more);
}

// Stores dV and dK of a work tile.
FA_DEVICE void epilogue(const KvSums& dv, const KvSums& dk, Consumer c, const uint32& tiles) {
  NonfiniteProbe nonfinite_probe;
  write_dkdv(dv, c, tiles, 0, kept_factor(c.params.common), c.work.has_no_query, nonfinite_probe);
  // dS is divided by the factor with dropout.
  const float scale = c.params.common.scale * kept_factor(c.params.common);
  write_dkdv(dk, c, tiles, 1, scale, c.work.has_no_query, nonfinite_probe);
  if (nonfinite_probe.found())
    flag_nonfinite_keys_64(c.params, c.work, c.work.tile * kTileN + 64 * c.group);
}

// -------------------------------------------------------------------------------------- main loops
// P^T and dS^T of a work tile's first query tile, in `s` and `dp`.
FA_DEVICE void first_tile(Scores& s, Scores& dp, Rounded& p, Consumer c, uint32 tiles,
                          int countdown, uint32 (&visible_bits)[2], bool& needs_mask) {
  const QueryTile tile = query_tile_at(c, tiles);
  const float4* rows = lane_rows(c, tile);
  wait_for_q(c, tile);
  gemm_s(s, c, tile.q);
  wgmma_commit_group();
  stage_operands(c, tile, countdown);
  prefetch_mask_words(visible_bits, c, tile.q_pipe.index());
  Operands operands;
  prefetch_operands(operands, c, tile, countdown);
  if constexpr (!kSparse) needs_mask = crosses_band(c, band_tile(c, countdown));
  prefetch_intervals(visible_bits, c, countdown, needs_mask);
  if constexpr (kDropout) make_kept_words(c, tile, countdown);
  wait_for_dout(c, tile);
  gemm_dp(dp, c, tile.dout);
  wgmma_commit_group();
  softmax_backward<0>(s, dp, p, c, tile, rows, countdown, operands, visible_bits, needs_mask);
  wgmma_wait_group<0>();
}

// All query tiles of a work tile with kDeferDq.  A step begins with P^T and dS^T of its tile in `s`
// and `dp`.  It computes dV and dK of this tile, dQ of the tile before, and P^T and dS^T of the
// next tile.  No product is in flight from one step to the next, else ptxas would serialise all
// products.
//
// The tile before the first one is the last tile of the previous work tile.  Its dQ was stored at
// the end of that work tile and is discarded here.
FA_DEVICE void mainloop_defer_dq(Scores& s, Scores& dp, KvSums& dv, KvSums& dk, Consumer c,
                                 uint32& tiles) {
  SharedStorage& shared = c.shared;
  const int steps = c.work.steps;
  int countdown = c.work.end - 1;
  uint32 visible_bits[2] = {~0u, ~0u};  // with a mask: a bit for each query, of two keys
  bool needs_mask = false;
  wait(shared.k_full, c.work_count & 1);
  wait(shared.v_full, c.work_count & 1);
  Rounded p;
  first_tile(s, dp, p, c, tiles, countdown, visible_bits, needs_mask);
  int step = 0;
#pragma unroll 1
  while (step < steps - 1) {
    const QueryTile tile = query_tile_at(c, tiles), next = query_tile_at(c, tiles + 1);
    const float4* next_rows = lane_rows(c, next);
    const bool discard_dq = step == 0;
    Rounded ds;
    round_p(p, s);
    round_scores(ds, dp);
    const DsPipeline ds_pipe = ds_pipe_of_tile(tiles);
    acquire_ds(c, ds_pipe);
    write_ds(ds, c, tiles);
    gemm_dv(dv, p, tile.dout);  // dV += P^T dO
    gemm_dk(dk, ds, tile.q);    // dK += dS^T Q
    wgmma_commit_group();
    publish_ds(c, ds_pipe);
    gemm_dq(dp, c, tiles);  // dQ^T = K^T dS^T of the tile before
    wgmma_commit_group();
    wgmma_wait_group<1>();  // dV, dK
    release_dout(c, tile);
    release_q(c, tile);
    wait_for_q(c, next);
    gemm_s(s, c, next.q);  // S^T = K Q^T of the next tile
    wgmma_commit_group();
    prefetch_mask_words(visible_bits, c, next.q_pipe.index());
    wgmma_wait_group<1>();  // dQ
    release_ds(c, tiles);
    advance(countdown, c);
    ++step;
    needs_mask = !kSparse && crosses_band(c, band_tile(c, countdown));
    prefetch_intervals(visible_bits, c, countdown, needs_mask);
    Operands operands;
    prefetch_operands(operands, c, next, countdown);
    if (!discard_dq) write_dq(dp, c, tiles);
    wait_for_dout(c, next);
    gemm_dp(dp, c, next.dout);  // dP^T = V dO^T of the next tile
    wgmma_commit_group();
    if (!discard_dq) publish_dq(c, tiles);
    softmax_backward<0>(s, dp, p, c, next, next_rows, countdown, operands, visible_bits,
                        needs_mask);
    ++tiles;
    wgmma_wait_group<0>();
  }
  release(shared.v_empty);
  const QueryTile tile = query_tile_at(c, tiles);
  // Not used, but without this read ptxas of CUDA 13.0 orders index arithmetic in another way, runs
  // out of registers and serialises all products (its remark C7511).
  lane_rows(c, tile);
  const bool discard_dq = step == 0;
  Rounded ds;
  round_p(p, s);
  round_scores(ds, dp);
  const DsPipeline ds_pipe = ds_pipe_of_tile(tiles);
  acquire_ds(c, ds_pipe);
  write_ds(ds, c, tiles);
  gemm_dv(dv, p, tile.dout);
  gemm_dk(dk, ds, tile.q);
  wgmma_commit_group();
  publish_ds(c, ds_pipe);
  gemm_dq(dp, c, tiles);
  wgmma_commit_group();
  wgmma_wait_group<1>();  // dV, dK
  release_dout(c, tile);
  release_q(c, tile);
  wgmma_wait_group<0>();  // dQ
  release_ds(c, tiles);
  if (!discard_dq) {
    write_dq(dp, c, tiles);
    publish_dq(c, tiles);
  }
  ++tiles;
  wgmma_wait_group<0>();
  gemm_dq(s, c, tiles);  // of the last tile
  wgmma_commit_group();
  wgmma_wait_group<0>();
  write_dq(s, c, tiles);
  publish_dq(c, tiles);
}

// All query tiles of a work tile with kDeferDk.  A step computes dV, dQ and dK of its tile, and P^T
// and dS^T of the next tile while dK is in flight.  dK reads this warpgroup's own half of dS, which
// only this warpgroup writes, so the stage may be released before dK has read it.
FA_DEVICE void mainloop_defer_dk(Scores& s, Scores& dp, KvSums& dv, KvSums& dk, Consumer c,
                                 uint32& tiles) {
  SharedStorage& shared = c.shared;
  // Where registers are left: ptxas may not place two accumulators of different sizes in the same
  // ones, and serialises all products then.
  Scores own_dq;
  Scores& dq = kDim <= 64 ? own_dq : dp;
  const int steps = c.work.steps;
  int countdown = c.work.end - 1;
  uint32 visible_bits[2] = {~0u, ~0u};
  bool needs_mask = false;
  wait(shared.k_full, c.work_count & 1);
  wait(shared.v_full, c.work_count & 1);
  Rounded p;
  first_tile(s, dp, p, c, tiles, countdown, visible_bits, needs_mask);
  int step = 0;
#pragma unroll 1
  while (step < steps - 1) {
    const QueryTile tile = query_tile_at(c, tiles), next = query_tile_at(c, tiles + 1);
    const float4* next_rows = lane_rows(c, next);
    Rounded ds;
    round_p(p, s);
    round_scores(ds, dp);
    const DsPipeline ds_pipe = ds_pipe_of_tile(tiles);
    acquire_ds(c, ds_pipe);
    write_ds(ds, c, tiles);
    gemm_dv(dv, p, tile.dout);  // dV += P^T dO
    wgmma_commit_group();
    publish_ds(c, ds_pipe);
    gemm_dq(dq, c, tiles);  // dQ^T = K^T dS^T
    wgmma_commit_group();
    advance(countdown, c);
    ++step;
    needs_mask = !kSparse && crosses_band(c, band_tile(c, countdown));
    wait_for_q(c, next);
    gemm_s(s, c, next.q);  // S^T = K Q^T of the next tile
    wgmma_commit_group();
    stage_operands(c, next, countdown);
    prefetch_mask_words(visible_bits, c, next.q_pipe.index());
    prefetch_intervals(visible_bits, c, countdown, needs_mask);
    wgmma_wait_group<2>();  // dV
    release_dout(c, tile);
    if constexpr (kDropout) make_kept_words(c, next, countdown);
    wgmma_wait_group<1>();  // dQ
    release_ds(c, tiles);
    Operands operands;
    prefetch_operands(operands, c, next, countdown);
    write_dq(dq, c, tiles);
    wait_for_dout(c, next);
    gemm_dp(dp, c, next.dout);  // dP^T = V dO^T of the next tile
    wgmma_commit_group();
    publish_dq(c, tiles);
    gemm_dk_from_shared(dk, c, tiles, tile.q);  // dK += dS^T Q
    wgmma_commit_group();
    softmax_backward<1>(s, dp, p, c, next, next_rows, countdown, operands, visible_bits,
                        needs_mask);
    wgmma_wait_group<0>();  // dK
    release_q(c, tile);
    ++tiles;
    wgmma_wait_group<0>();
  }
  release(shared.v_empty);
  const QueryTile tile = query_tile_at(c, tiles);
  Rounded ds;
  round_p(p, s);
  round_scores(ds, dp);
  const DsPipeline ds_pipe = ds_pipe_of_tile(tiles);
  acquire_ds(c, ds_pipe);
  write_ds(ds, c, tiles);
  gemm_dv(dv, p, tile.dout);
  wgmma_commit_group();
  publish_ds(c, ds_pipe);
  gemm_dq(dq, c, tiles);
  wgmma_commit_group();
  wgmma_wait_group<1>();  // dV
  release_dout(c, tile);
  wgmma_wait_group<0>();  // dQ
  release_ds(c, tiles);
  write_dq(dq, c, tiles);
  publish_dq(c, tiles);
  gemm_dk_from_shared(dk, c, tiles, tile.q);
  wgmma_commit_group();
  wgmma_wait_group<0>();  // dK
  release_q(c, tile);
  ++tiles;
  wgmma_wait_group<0>();
}

FA_DEVICE void consume(const BwdSm90Params& params, SharedStorage& shared, int warp) {
  // A vote has the same result in all lanes, and the compiler knows it: what follows from `group`
  // is computed once for a warp, in uniform registers.
  const int group = __any_sync(kFullWarp, warp >= 8);
  uint32 work_count = 0, tiles = 0;  // done so far; pipeline states follow from them
  Scores s, dp;
  KvSums dk, dv;
  if constexpr (kDeferDq) publish_zero_ds(shared, group);
#pragma unroll 1
  while (true) {
    const WorkPipeline work_pipe{work_count};
    wait(shared.work_full[work_pipe.index()], work_pipe.parity());
    const WorkTile& work = shared.work[work_pipe.index()];
    if (work.tile < 0) break;
    const Consumer c = {params, shared, work, group, work_count};
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[j][e] = dv[j][e] = 0.0f;
    }
    if constexpr (kDeferDq) {
      mainloop_defer_dq(s, dp, dv, dk, c, tiles);
    } else {
      mainloop_defer_dk(s, dp, dv, dk, c, tiles);
    }
    release(shared.k_empty);
    epilogue(dv, dk, c, tiles);
    release_per_lane(shared.work_empty[work_pipe.index()]);
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
