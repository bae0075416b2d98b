// dK and dV of attention backward for SM90 where head_dim is too wide for bwd_sm90.
//
// A block works on 64 keys at a time and walks over all tiles of 64 queries that see some of them.
// A warpgroup has all of dV in its registers, another one all of dK:
//   weights:    S^T = K Q^T,    P^T = exp(S^T - LSE),           dV += P^T dO
//   gradients:  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),      dK += dS^T Q
// P^T goes from the first to the second through shared memory, in float32, times the slopes of the
// scores where a softcap makes some; with dropout so do the decisions that the first one has made.
// A tile's second product runs beside the exponentials of the next one, or before its first
// product, where the tile should be given back soon.  dQ has a kernel of its own, bwd_dq_sm90.cu.
#include "cuda_src/common/backward_sm90.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/dq_accum.cuh"
#include "cuda_src/common/dropout_words.cuh"
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
  // P^T and decisions need no empty barrier: they are written after Q of the stage's last tile was
  // released
  uint64 p_full[kStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages];
  WorkTile work[kWorkStages];
  MaskTileInfo tile_info[kSparse ? kStages : 1];  // of the tile in each stage of Q
  MaskCursor cursors[kCursors];
  int64 operands_offset[kHasOperands ? kStages : 1];  // of the entry of the tile in each stage of Q
#if FA_DROPOUT
  alignas(16) uint32 kept[kStages][kKeptWords];  // decisions, which come and go as P^T does
  DropoutEntry dropout_entry[kStages];           // of the tile in each stage of Q
#endif
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

enum NamedBarrier : int {
  kResultWritten = 1,  // a warpgroup's rows of dV, or of dK
  kKeptWritten = 3     // words of decisions
};

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

// --------------------------------------------------------------------------------------- consumers
// Both consumer warpgroups multiply their keys with one array of queries, which makes P^T or dS^T,
// and that with the other array, which adds to their gradient.  kDv: the warpgroup of P^T and dV,
// else that of dS^T and dK.

// Registers of a thread, as accumulators of m64nN hold them (ptx/wgmma.cuh).
using Scores = float[8][4];      // S^T and P^T, or dP^T and dS^T: 64 keys x 64 queries
using Rounded = uint32[8][2];    // P^T or dS^T in 16 bits, an A operand from registers
using KvSums = float[kMmaD][4];  // dV or dK: 64 keys x kDim columns

// What stays the same while a consumer warpgroup computes a work tile.  Register arrays are passed
// as references next to it: ptxas serialised products whose accumulators were members of a struct.
template <bool kDv>
struct Consumer {
  const BwdSm90Params& params;
  SharedStorage& shared;
  const WorkTile& work;
};

// Whether the product with the gradient's operand comes before that of the next scores, so that its
// tile is given back soon, rather than beside the exponentials.
template <bool kDv>
constexpr bool kAccumulateFirst = (FA_ACCUMULATE_FIRST >> (kDv ? 0 : 1)) & 1;

// The keys: K, or their values V.
template <bool kDv>
FA_DEVICE auto& keys_of(const Consumer<kDv>& c) {
  return kDv ? c.shared.k : c.shared.v;
}
// Operands of the scores: Q for S^T = K Q^T, dO for dP^T = V dO^T.
template <bool kDv>
FA_DEVICE auto& score_operand(const Consumer<kDv>& c) {
  return kDv ? c.shared.q : c.shared.dout;
}
template <bool kDv>
FA_DEVICE auto& score_full(const Consumer<kDv>& c) {
  return kDv ? c.shared.q_full : c.shared.dout_full;
}
// Operands of the sums: dO for dV += P^T dO, Q for dK += dS^T Q.
template <bool kDv>
FA_DEVICE auto& sum_operand(const Consumer<kDv>& c) {
  return kDv ? c.shared.dout : c.shared.q;
}
template <bool kDv>
FA_DEVICE auto& sum_full(const Consumer<kDv>& c) {
  return kDv ? c.shared.dout_full : c.shared.q_full;
}

// The thread's number in its warpgroup.  opaque() hides threadIdx.x from the compiler, so that what
// follows from it is computed again at each use: kept in between, it would take registers from the
// accumulators.
FA_DEVICE int thread_in_group() { return static_cast<int>(opaque(threadIdx.x) % 128); }
FA_DEVICE int lane_in_warp() { return thread_in_group() % 32; }

// Beside Q lie LSE and delta of its rows, which each lane has read itself.
FA_DEVICE void release_q(SharedStorage& shared, int stage) {
  release_per_lane(shared.q_empty[stage]);
}
FA_DEVICE void release_dout(SharedStorage& shared, int stage) {
  if (lane_in_warp() == 0) arrive(shared.dout_empty[stage]);
}
template <bool kDv>
FA_DEVICE void release_score_operand(const Consumer<kDv>& c, int stage) {
  kDv ? release_q(c.shared, stage) : release_dout(c.shared, stage);
}
template <bool kDv>
FA_DEVICE void release_sum_operand(const Consumer<kDv>& c, int stage) {
  kDv ? release_dout(c.shared, stage) : release_q(c.shared, stage);
}

// The stage of the tile before, whose second product is next.  The number of tiles is passed by
// reference, so that it is computed again at each use, as with thread_in_group().
FA_DEVICE TilePipeline previous_pipe(const uint32& tiles) {
  TilePipeline pipe;
  pipe.advance(tiles - 1);
  return pipe;
}

// ---------------------------------------------------------------------------------------- products
// Each function starts a product.  The caller waits for it.

// S^T = K Q^T, or dP^T = V dO^T.
template <bool kDv>
FA_DEVICE void gemm_scores(Scores& s, const Consumer<kDv>& c, const uint8* tile) {
  wgmma_fence();
  const uint64 a = wgmma_descriptor(cvta_to_shared(keys_of(c)), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(tile), 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of a block's rows.
    const int more = step / 4 * kTile * 128 + step % 4 * 32;
    wgmma_m64k16_ss<kBf16, 64>(s, wgmma_at(a, more), wgmma_at(b, more), step > 0);
  }
  wgmma_commit_group();
}

// dV += P^T dO, or dK += dS^T Q, of the tile before.
template <bool kDv>
FA_DEVICE void gemm_sums(KvSums& sums, const Rounded& pairs, const Consumer<kDv>& c,
                         const TilePipeline& previous) {
  wait(sum_full(c)[previous.index()], previous.parity());
  wgmma_fence();
  const uint64 b = wgmma_descriptor(cvta_to_shared(sum_operand(c)[previous.index()]), kTile * 128);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint32 a[4] = {pairs[2 * step][0], pairs[2 * step][1], pairs[2 * step + 1][0],
                         pairs[2 * step + 1][1]};
    wgmma_m64k16_rs<kBf16, kDim>(sums, a, wgmma_at(b, step * 16 * 128), 1);
  }
  wgmma_commit_group();
}

// ------------------------------------------------------------------------------------------- masks
// Whether the band hides some keys from queries of a tile.
template <bool kDv>
FA_DEVICE bool crosses_band(const Consumer<kDv>& c, int tile) {
  return tile < c.work.full_begin || tile >= c.work.full_end;
}

// The first of this thread's keys, and of its queries of a tile; the others are 8 after it, and 1,
// 8, 9, 16, ... after it.
template <bool kDv>
FA_DEVICE int own_key(const Consumer<kDv>& c) {
  return c.work.tile * kTile + thread_in_group() / 32 * 16 + lane_in_warp() / 4;
}
FA_DEVICE int first_query(int tile) { return tile * kTile + lane_in_warp() % 4 * 2; }

// The queries of a tile that see this thread's key h by the band, as bits.
template <bool kDv>
FA_DEVICE uint32 in_band(const Consumer<kDv>& c, int tile, int h) {
  return visible_queries(c.params.common, own_key(c) + 8 * h, first_query(tile), 16);
}

// Starts to load the mask's words of the tile in a stage of Q.
template <bool kDv>
FA_DEVICE void prefetch_mask_words(uint32 (&visible_bits)[2], const Consumer<kDv>& c, int stage) {
  if constexpr (kSparse) {
    load_mask_words(visible_bits, c.params.mask, c.shared.tile_info[stage].words_index,
                    c.work.tile % 2 * 64, thread_in_group());
  }
}

// Clears the bits of queries that the band hides.
template <bool kDv>
FA_DEVICE void apply_band(uint32 (&visible_bits)[2], const Consumer<kDv>& c, int stage) {
  if constexpr (kSparse) {
    const int tile = c.shared.tile_info[stage].tile;
    // A lambda: most tiles lie inside the band and need no bits of it.
    restrict_words<kTile>(visible_bits, tile, crosses_band(c, tile),
                          [&](int h) { return in_band(c, tile, h); });
  }
}

// Replaces the scores of hidden pairs, or their gradients.
template <bool kDv>
FA_DEVICE void mask_scores(Scores& s, const Consumer<kDv>& c, const int& tile,
                           const uint32 (&visible_bits)[2], float masked_value) {
  if (kSparse ? (visible_bits[0] & visible_bits[1]) == ~0u : !crosses_band(c, tile)) return;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    mask_scores_of_row(s, h, kSparse ? visible_bits[h] : in_band(c, tile, h), masked_value);
}

// ----------------------------------------------------------------------------------------- dropout
// The warpgroup of dV makes the words of a tile's decisions, each thread one, for both.
template <bool kDv>
FA_DEVICE void make_kept_words(const Consumer<kDv>& c, int stage, const int& tile) {
#if FA_DROPOUT
  if constexpr (kDv) {
    const int query = kTile * (kSparse ? c.shared.tile_info[stage].tile : tile);
    c.shared.kept[stage][thread_in_group()] =
        make_kept_word(c.params.common.dropout, c.shared.dropout_entry[stage], c.work.tile * kTile,
                       query, thread_in_group());
    bar_sync(kKeptWritten, 128);
  }
#endif
}

// The decisions on this thread's pairs.
template <bool kDv>
FA_DEVICE uint32 own_kept_words(const Consumer<kDv>& c, int stage) {
#if FA_DROPOUT
  return read_kept_words(c.shared.kept[stage], thread_in_group() / 32 * 16, lane_in_warp());
#else
  return ~0u;
#endif
}

// ----------------------------------------------------------------------------------------- softmax
using Operands = OperandTile<true, 8>;

// Loads the operands of a tile's scores while their product is in flight.
template <bool kDv>
FA_DEVICE void prefetch_operands(Operands& operands, const Consumer<kDv>& c, int stage,
                                 const int& tile) {
  if constexpr (kDv && kHasOperands) {
    operands.load(c.params.common, c.shared.operands_offset[stage], own_key(c),
                  first_query(kSparse ? c.shared.tile_info[stage].tile : tile));
  }
}

// S^T becomes P^T = exp(S^T - LSE), of which the other warpgroup gets a copy in float32, times the
// slopes of the scores with kHasSlope.
FA_DEVICE void compute_p(Scores& s, const Consumer<true>& c, const TilePipeline& pipe,
                         const Operands& operands, const int& tile,
                         const uint32 (&visible_bits)[2]) {
  const AttentionParams& p = c.params.common;
  const float4* rows = c.shared.lse_delta[pipe.index()] + lane_in_warp() % 4;
  float4* to = reinterpret_cast<float4*>(c.shared.p[pipe.index()]) + thread_in_group();
  if constexpr (kHasSlope) {
    prepare_slopes(p, s);
  } else if constexpr (kScoreMod) {
    apply_score_mod(p, s, operands);
  }
  mask_scores(s, c, tile, visible_bits, hidden_score());
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
  release_per_lane(c.shared.p_full[pipe.index()]);
  if constexpr (kDropout) {
    const uint32 kept = own_kept_words(c, pipe.index());
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((kept >> (4 * j + e) & 1) == 0) s[j][e] = 0.0f;
      }
    }
  }
}

// dP^T becomes dS^T = P^T (dP^T - delta), with P^T from the other warpgroup.  With dropout, dP^T of
// pairs that are kept is multiplied by the factor, and that of others is 0.
FA_DEVICE void compute_ds(Scores& s, const Consumer<false>& c, const TilePipeline& pipe,
                          const int& tile, const uint32 (&visible_bits)[2]) {
  const float4* rows = c.shared.lse_delta[pipe.index()] + lane_in_warp() % 4;
  mask_scores(s, c, tile, visible_bits, 0.0f);
  wait(c.shared.p_full[pipe.index()], pipe.parity());
  const float4* from =
      reinterpret_cast<const float4*>(c.shared.p[pipe.index()]) + thread_in_group();
  if constexpr (kDropout) {
    const float factor = kept_factor(c.params.common);
    const uint32 kept = own_kept_words(c, pipe.index());
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[j][e] = (kept >> (4 * j + e) & 1) != 0 ? s[j][e] * factor : 0.0f;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 row = rows[4 * j], x = from[j * (kDqTileStep / 4)];
    s[j][0] = x.x * (s[j][0] - row.z);
    s[j][1] = x.y * (s[j][1] - row.w);
    s[j][2] = x.z * (s[j][2] - row.z);
    s[j][3] = x.w * (s[j][3] - row.w);
  }
}

FA_DEVICE void round_scores(Rounded& pairs, const Scores& x) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) pairs[j][h] = pack2<kBf16>(x[j][2 * h], x[j][2 * h + 1]);
  }
}

// ---------------------------------------------------------------------------------------- epilogue
// Puts the gradient over the keys, and stores it.
template <bool kDv>
FA_DEVICE void write_gradient(const KvSums& sums, const Consumer<kDv>& c) {
  bar_sync(kResultWritten + kDv, 128);  // all warps have left the keys
  const float scale = kDv ? kept_factor(c.params.common) : c.params.common.scale;
  const bool zero = c.work.has_no_query;
  NonfiniteProbe nonfinite_probe;
  const uint32 to = cvta_to_shared(keys_of(c)) +
                    KeyTile::lane_offset(thread_in_group() / 32 * 16 + thread_in_group() % 16,
                                         thread_in_group() / 16 % 2);
#pragma unroll
  for (int j = 0; j < kMmaD; j += 2) {
    uint32 four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* two = &sums[j + i / 2][i % 2 * 2];
      nonfinite_probe.add(two[0]);
      nonfinite_probe.add(two[1]);
      four[i] = zero ? 0 : pack2<kBf16>(two[0] * scale, two[1] * scale);
    }
    stmatrix_x4(KeyTile::at(to, 0, j / 2), four[0], four[1], four[2], four[3]);
  }
  if (nonfinite_probe.found()) flag_nonfinite_keys_64(c.params, c.work, c.work.tile * kTile);
  fence_proxy_async_shared();
  bar_sync(kResultWritten + kDv, 128);
  if (thread_in_group() == 0) {
    store_rows_64<kBlocks>(kDv ? c.params.dv_map : c.params.dk_map, keys_of(c), c.work.tile * kTile,
                           c.work.coordinate);
    cp_async_bulk_wait_group_read<0>();
  }
}

// ---------------------------------------------------------------------------------------- mainloop
// One tile of queries.  Its own product with the gradient's operand comes with the next tile, or
// after the last one: then the tensor cores have work while this tile's exponentials are computed.
template <bool kFirst, bool kDv>
FA_DEVICE void bwd_step(Scores& s, KvSums& sums, Rounded& pairs, uint32 (&visible_bits)[2],
                        const Consumer<kDv>& c, uint32& tiles, int& tile) {
  constexpr bool kSumsFirst = !kFirst && kAccumulateFirst<kDv>;
  constexpr bool kSumsBeside = !kFirst && !kAccumulateFirst<kDv>;
  TilePipeline pipe;
  pipe.advance(tiles);
  const int stage = pipe.index();
  if constexpr (kSumsFirst) gemm_sums(sums, pairs, c, previous_pipe(tiles));
  wait(score_full(c)[stage], pipe.parity());
  gemm_scores(s, c, score_operand(c)[stage]);
  if constexpr (kSumsFirst) {
    wgmma_wait_group<1>();
    release_sum_operand(c, previous_pipe(tiles).index());
  }
  if constexpr (kSumsBeside) gemm_sums(sums, pairs, c, previous_pipe(tiles));
  if constexpr (kSparse) {
    if constexpr (!kDv) wait(sum_full(c)[stage], pipe.parity());  // the words lie beside Q
    prefetch_mask_words(visible_bits, c, stage);
  }
  Operands operands;
  prefetch_operands(operands, c, stage, tile);
  make_kept_words(c, stage, tile);
  wgmma_wait_group<kSumsBeside ? 1 : 0>();
  apply_band(visible_bits, c, stage);
  if constexpr (kDv) {
    compute_p(s, c, pipe, operands, tile, visible_bits);
  } else {
    if constexpr (!kSparse) wait(sum_full(c)[stage], pipe.parity());  // delta lies beside Q
    compute_ds(s, c, pipe, tile, visible_bits);
  }
  release_score_operand(c, stage);
  if constexpr (kSumsBeside) {
    wgmma_wait_group<0>();
    release_sum_operand(c, previous_pipe(tiles).index());
  }
  round_scores(pairs, s);  // only now: until here the product before this one has read them
  ++tiles;
  tile = tile == c.work.end - 1 ? c.work.begin : tile + 1;
}

template <bool kDv>
FA_DEVICE void consume(const BwdSm90Params& params, SharedStorage& shared) {
  uint32 work_count = 0, tiles = 0;  // done so far; pipeline states follow from them
  Scores s;
  KvSums sums;
  Rounded pairs;  // P^T or dS^T of the tile before

#pragma unroll 1
  while (true) {
    WorkPipeline work_pipe;
    work_pipe.advance(work_count);
    wait(shared.work_full[work_pipe.index()], work_pipe.parity());
    const WorkTile& work = shared.work[work_pipe.index()];
    if (work.tile < 0) break;
    const Consumer<kDv> c = {params, shared, work};
    int tile = work.begin;  // without a mask
    // Under a mask: by which queries of the tile a thread's keys are seen.
    uint32 visible_bits[2] = {~0u, ~0u};
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
    }
    wait(kDv ? shared.k_full : shared.v_full, work_count & 1);
    bwd_step<true>(s, sums, pairs, visible_bits, c, tiles, tile);
    int remaining = work.steps;
#pragma unroll 1
    while (--remaining > 0) bwd_step<false>(s, sums, pairs, visible_bits, c, tiles, tile);
    gemm_sums(sums, pairs, c, previous_pipe(tiles));
    wgmma_wait_group<0>();
    release_sum_operand(c, previous_pipe(tiles).index());

    write_gradient(sums, c);
    release_per_lane(kDv ? shared.k_empty : shared.v_empty);  // of results, too
    release_per_lane(shared.work_empty[work_pipe.index()]);
    ++work_count;
  }
  if (threadIdx.x % 128 == 0) cp_async_bulk_wait_group<0>();
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
