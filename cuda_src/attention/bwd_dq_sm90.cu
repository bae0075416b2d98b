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
#if FA_DROPOUT
  DropoutEntry dropout;
#endif
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
#if FA_DROPOUT
  work.dropout = dropout_entry(p.dropout, work.entry);
#endif
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

// --------------------------------------------------------------------------------------- consumers
// Registers of a thread, as accumulators of m64nN hold them (ptx/wgmma.cuh).
using Scores = float[1][kMmaN][4];  // S, P, dP or dS: 64 queries x kTileN keys
using Rounded = uint32[kMmaN][2];   // dS in 16 bits, an A operand from registers
using QuerySums = float[kMmaD][4];  // dQ: 64 queries x kDim columns

// What stays the same while a consumer warpgroup computes a work tile.  Register arrays are passed
// as references next to it: ptxas serialised products whose accumulators were members of a struct.
struct Consumer {
  const BwdSm90Params& params;
  SharedStorage& shared;
  const WorkTile& work;
  int group;  // of the block's consumer warpgroups
};

// The thread's number in its warpgroup.  opaque() hides threadIdx.x from the compiler, so that what
// follows from it is computed again at each use: kept in between, it would take registers from the
// accumulators.
FA_DEVICE int thread_in_group() { return static_cast<int>(opaque(threadIdx.x) % 128); }
FA_DEVICE int lane_in_warp() { return thread_in_group() % 32; }
FA_DEVICE int warp_row() { return thread_in_group() / 32 * 16; }  // of the warpgroup's 64 queries

FA_DEVICE void release(const uint64& barrier) {
  if (lane_in_warp() == 0) arrive(barrier);
}
// Under a mask lanes read the words that came with K themselves.
FA_DEVICE void release_k(const Consumer& c, int k_stage) {
  kSparse ? release_per_lane(c.shared.k_empty[k_stage]) : release(c.shared.k_empty[k_stage]);
}

// The stage of the tile of K before this one, whose dQ is next.  The number of tiles is passed by
// reference, so that it is computed again at each use, as with thread_in_group().
FA_DEVICE int previous_k_stage(const uint32& tiles) {
  KPipeline pipe;
  pipe.advance(tiles - 1);
  return pipe.index();
}

// ---------------------------------------------------------------------------------------- products
// Each function starts a product.  The caller waits for it.

// D = A B^T with A of this warpgroup's 64 queries and B of a tile of keys, both kDim columns wide.
FA_DEVICE void gemm_scores(Scores& d, const Consumer& c, const uint8 (&rows)[kGroups][kQBytes],
                           const uint8* tile) {
  wgmma_fence();
  const uint64 a = wgmma_descriptor(cvta_to_shared(rows) + c.group * kQBytes, 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(tile), 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of a block's rows.
    wgmma_m64k16_ss<kBf16, kTileN>(d[0], wgmma_at(a, step / 4 * 64 * 128 + step % 4 * 32),
                                   wgmma_at(b, step / 4 * kTileN * 128 + step % 4 * 32), step > 0);
  }
  wgmma_commit_group();
}

// dQ += dS K
FA_DEVICE void gemm_dq(QuerySums& dq, const Rounded& ds, const uint8* k_tile) {
  const uint64 b = wgmma_descriptor(cvta_to_shared(k_tile), kTileN * 128);
#pragma unroll
  for (int step = 0; step < kTileN / 16; ++step) {
    const uint32 a[4] = {ds[2 * step][0], ds[2 * step][1], ds[2 * step + 1][0],
                         ds[2 * step + 1][1]};
    wgmma_m64k16_rs<kBf16, kDim>(dq, a, wgmma_at(b, step * 16 * 128), 1);
  }
  wgmma_commit_group();
}

// ------------------------------------------------------------------------------------------- masks
// Whether the band hides some keys of a tile from queries of the warpgroup.
FA_DEVICE bool crosses_band(const Consumer& c, int tile) {
  return tile < c.work.group[c.group].full_begin || tile >= c.work.group[c.group].full_end;
}

// The first of this thread's queries, and of its keys of a tile; the others are 8 after it, and 1,
// 8, 9, 16, ... after it.
FA_DEVICE int first_row(const Consumer& c) {
  return c.work.tile * kTileM + 64 * c.group + warp_row() + lane_in_warp() / 4;
}
FA_DEVICE int first_key_of(int tile) { return tile * kTileN + lane_in_warp() % 4 * 2; }

// Starts to load the mask's words of the tile in a stage of K.
FA_DEVICE void prefetch_mask_words(uint32 (&visible_bits)[2], const Consumer& c, int k_stage) {
  if constexpr (kSparse) {
    load_mask_words(visible_bits, c.params.mask, c.shared.tile_info[k_stage].words_index,
                    64 * c.group, thread_in_group());
  }
}

// Clears the bits of keys that the band hides.
FA_DEVICE void apply_band(uint32 (&visible_bits)[2], const Consumer& c, int k_stage) {
  if constexpr (kSparse) {
    const int tile = c.shared.tile_info[k_stage].tile, key = first_key_of(tile);
    // A lambda: most tiles lie inside the band and need no bits of it.
    restrict_words<kTileN>(visible_bits, tile, crosses_band(c, tile), [&](int h) {
      return visible_columns(c.params.common, first_row(c) + 8 * h, key, 16);
    });
  }
}

// Replaces the scores of hidden pairs, or their gradients.
FA_DEVICE void mask_scores(Scores& x, const Consumer& c, const int& tile,
                           const uint32 (&visible_bits)[2], float masked_value) {
  if constexpr (kSparse) {
    if ((visible_bits[0] & visible_bits[1]) == ~0u) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) mask_scores_of_row(x[0], h, visible_bits[h], masked_value);
  } else if (crosses_band(c, tile)) {
    mask_outside_band(c.params.common, x, first_row(c), first_key_of(tile), 0, masked_value);
  }
}

// ----------------------------------------------------------------------------------------- dropout
// The decisions on a tile of keys and this thread's two rows.
using Kept = uint32[1][2];

FA_DEVICE void make_kept(Kept& kept, const Consumer& c, int k_stage, const int& tile) {
#if FA_DROPOUT
  const int number = kSparse ? c.shared.tile_info[k_stage].tile : tile;
  make_kept_bits<kTileN>(c.params.common.dropout, c.work.dropout, first_row(c), number * kTileN,
                         kept);
#endif
}

// ----------------------------------------------------------------------------------------- softmax
// LSE (component 0) or delta (2) of this thread's row g, or of g + 8.
FA_DEVICE float lse_delta(const Consumer& c, int h, int component) {
  const int row = warp_row() + lane_in_warp() / 4 + 8 * h;
  const float4& pair = c.shared.lse_delta[c.group][row / 2];
  return reinterpret_cast<const float*>(&pair)[row % 2 + component];
}

// The operands of a tile's scores, where there are registers to load them beside products.
using Operands = OperandTile<false, kMmaN>;
constexpr bool kPrefetchOperands = kHasOperands && sizeof(Operands) <= 16 * sizeof(uint32);

FA_DEVICE int first_key_in_stage(const Consumer& c, int k_stage, const int& tile) {
  return first_key_of(kSparse ? c.shared.tile_info[k_stage].tile : tile);
}

FA_DEVICE void prefetch_operands(Operands& operands, const Consumer& c, int k_stage,
                                 const int& tile) {
  if constexpr (kPrefetchOperands) {
    operands.load(c.params.common, operands_offset(c.params.common, c.work.coordinate, 0),
                  first_row(c), first_key_in_stage(c, k_stage, tile));
  }
}

// Calls f with the operands of all scores, or of a few at a time.
template <typename F>
FA_DEVICE void for_each_operands_part(const Operands& operands, const Consumer& c, int k_stage,
                                      const int& tile, F f) {
  if constexpr (kPrefetchOperands || !kHasOperands) {
    f(0, Constant<kMmaN>(), operands);
  } else {
    for_each_operands_part<false, kMmaN>(c.params.common,
                                         operands_offset(c.params.common, c.work.coordinate, 0),
                                         first_row(c), first_key_in_stage(c, k_stage, tile), f);
  }
}

// S becomes P = exp(S - LSE), times the slopes of the scores with kHasSlope.
FA_DEVICE void compute_p(Scores& s, const Consumer& c, const Operands& operands, int k_stage,
                         const int& tile, const uint32 (&visible_bits)[2]) {
  const AttentionParams& p = c.params.common;
  if constexpr (kHasSlope) {
    prepare_slopes(p, s[0]);
  } else if constexpr (kScoreMod) {
    for_each_operands_part(operands, c, k_stage, tile, [&](int first, auto count, auto& part) {
      apply_score_mod(p, reinterpret_cast<float (&)[decltype(count)::value][4]>(s[0][first]), part);
    });
  }
  mask_scores(s, c, tile, visible_bits, hidden_score());
  const float lse[2] = {lse_delta(c, 0, 0), lse_delta(c, 1, 0)};
  if constexpr (kHasSlope) {
    for_each_operands_part(operands, c, k_stage, tile, [&](int first, auto count, auto& part) {
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
}

// dP becomes dS = P (dP - delta).  With dropout, dP of pairs that are kept is multiplied by the
// factor, and that of others is 0.
FA_DEVICE void compute_ds(Scores& dp, const Scores& p, const Consumer& c, const Kept& kept) {
  const float delta[2] = {lse_delta(c, 0, 2), lse_delta(c, 1, 2)};
  if constexpr (kDropout) scale_kept(dp, kept, kept_factor(c.params.common));
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[0][j][e] = p[0][j][e] * (dp[0][j][e] - delta[e / 2]);
  }
}

FA_DEVICE void round_ds(Rounded& ds, const Scores& x) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) ds[j][h] = pack2<kBf16>(x[0][j][2 * h], x[0][j][2 * h + 1]);
  }
}

// ---------------------------------------------------------------------------------------- epilogue
// Puts dQ over the warpgroup's rows of Q, and stores it.
FA_DEVICE void write_dq(const QuerySums& dq, const Consumer& c) {
  const AttentionParams& p = c.params.common;
  bar_sync(kResultWritten + c.group, 128);  // all warps have left the rows of Q
  NonfiniteProbe nonfinite_probe;
  const uint32 to =
      cvta_to_shared(c.shared.q[0]) + c.group * kQBytes +
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
    flag_nonfinite_queries_64(c.params, c.work.entry, c.work.tile * kTileM + 64 * c.group);
  }
  fence_proxy_async_shared();
  bar_sync(kResultWritten + c.group, 128);
  if (thread_in_group() == 0) {
    const int row = c.work.tile * kTileM + 64 * c.group;
    if (row < p.q_len)
      store_rows_64<kBlocks>(c.params.dq_map, c.shared.q[c.group], row, c.work.coordinate);
    cp_async_bulk_wait_group_read<0>();
  }
}

// ---------------------------------------------------------------------------------------- mainloop
// One tile of keys.  Its own dQ += dS K comes with the next tile, or after the last one: then the
// tensor cores have work while the exponentials of this tile are computed.
template <bool kFirst>
FA_DEVICE void bwd_step(Scores& s, Scores& dp, QuerySums& dq, Rounded& ds,
                        uint32 (&visible_bits)[2], const Consumer& c, uint32& tiles, int& tile) {
  KPipeline k_pipe;
  VPipeline v_pipe;
  k_pipe.advance(tiles);
  v_pipe.advance(tiles);
  const int k_stage = k_pipe.index(), v_stage = v_pipe.index();
  if constexpr (!kFirst && kAccumulateFirst) {
    wgmma_fence();
    gemm_dq(dq, ds, c.shared.k[previous_k_stage(tiles)]);
  }
  wait(c.shared.k_full[k_stage], k_pipe.parity());
  gemm_scores(s, c, c.shared.q, c.shared.k[k_stage]);  // S = Q K^T
  wait(c.shared.v_full[v_stage], v_pipe.parity());
  gemm_scores(dp, c, c.shared.dout, c.shared.v[v_stage]);  // dP = dO V^T
  if constexpr (!kFirst && kAccumulateFirst) {
    wgmma_wait_group<2>();
    release_k(c, previous_k_stage(tiles));
  }
  if constexpr (!kFirst && !kAccumulateFirst) gemm_dq(dq, ds, c.shared.k[previous_k_stage(tiles)]);
  prefetch_mask_words(visible_bits, c, k_stage);
  Operands operands;
  prefetch_operands(operands, c, k_stage, tile);
  Kept kept;
  make_kept(kept, c, k_stage, tile);
  wgmma_wait_group<kFirst || kAccumulateFirst ? 1 : 2>();
  apply_band(visible_bits, c, k_stage);
  compute_p(s, c, operands, k_stage, tile, visible_bits);
  wgmma_wait_group<kFirst || kAccumulateFirst ? 0 : 1>();
  release(c.shared.v_empty[v_stage]);
  mask_scores(dp, c, tile, visible_bits, 0.0f);
  compute_ds(dp, s, c, kept);
  if constexpr (!kFirst && !kAccumulateFirst) {
    wgmma_wait_group<0>();
    release_k(c, previous_k_stage(tiles));
  }
  round_ds(ds, dp);  // only now: until here the product before this one has read it
  ++tiles;
  ++tile;
}

FA_DEVICE void consume(const BwdSm90Params& params, SharedStorage& shared, int warp) {
  // The same in all lanes, as a vote's result is to the compiler: what follows from it is computed
  // once for a warp.
  const int group = __any_sync(kFullWarp, warp >= 8);
  uint32 work_count = 0, tiles = 0;  // done so far; pipeline states follow from them
  Scores s, dp;
  QuerySums dq;
  Rounded ds;  // of the tile before

#pragma unroll 1
  while (true) {
    WorkPipeline work_pipe;
    work_pipe.advance(work_count);
    wait(shared.work_full[work_pipe.index()], work_pipe.parity());
    const WorkTile& work = shared.work[work_pipe.index()];
    if (work.tile < 0) break;
    const Consumer c = {params, shared, work, group};
    int tile = work.begin;  // without a mask
    int remaining = max(work.steps, 1);
    uint32 visible_bits[2] = {~0u, ~0u};  // under a mask: of the tile's keys, by a thread's queries
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[j][e] = 0.0f;
    }
    wait(shared.q_full[group], work_count & 1);
    bwd_step<true>(s, dp, dq, ds, visible_bits, c, tiles, tile);
#pragma unroll 1
    while (--remaining > 0) bwd_step<false>(s, dp, dq, ds, visible_bits, c, tiles, tile);
    wgmma_fence();
    gemm_dq(dq, ds, shared.k[previous_k_stage(tiles)]);
    wgmma_wait_group<0>();
    release_k(c, previous_k_stage(tiles));

    write_dq(dq, c);
    release_per_lane(shared.q_empty[group]);  // of rows and results, too
    release_per_lane(shared.work_empty[work_pipe.index()]);
    ++work_count;
  }
  if (threadIdx.x % 128 == 0) cp_async_bulk_wait_group<0>();
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
