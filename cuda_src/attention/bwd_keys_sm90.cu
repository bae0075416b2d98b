// dK and dV of attention backward for SM90 where head_dim is too wide for bwd_sm90.
//
// A block works on 64 keys at a time and walks over all tiles of 64 queries that see some of them.
// A warpgroup has all of dV in its registers, another one all of dK:
//   weights:    S^T = K Q^T,    P^T = exp(S^T - LSE),           dV += P^T dO
//   gradients:  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),      dK += dS^T Q
// P^T goes from the first to the second through shared memory, in float32.  A tile's second product
// runs beside the exponentials of the next one, or before its first product, where the tile should
// be given back soon.  dQ has a kernel of its own, bwd_queries_sm90.cu.
#include "cuda_src/common/backward_sm90.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/gradient_sums.cuh"
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
constexpr int kFeedingRegisters = 24, kComputingRegisters = 240;
static_assert(FA_TILE_M == kTile && FA_TILE_N == kTile, "tiles are of 64");
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kStages > 1, "a tile is held while the next one is waited for");

using KeyTile = SharedTile<kTile, 64 * kBlocks>;

struct Work : KeyWork {
  int full_begin, full_end;  // query tiles that see all keys
};

struct SharedStorage {
  uint8 k[kBytes];  // later dV
  uint8 v[kBytes];  // later dK
  uint8 q[kStages][kBytes];
  uint8 dout[kStages][kBytes];
  float p[kStages][piece_floats(kTile)];  // P^T
  float4 rows[kStages][kTile / 2];
  uint64 k_full, k_empty, v_full, v_empty;
  uint64 q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  uint64
      p_full[kStages];  // nobody writes P^T of a tile before Q of the one it was of is given back
  uint64 work_full[kWorkStages], work_empty[kWorkStages];
  Work work[kWorkStages];
  TileNote note[kSparse ? kStages : 1];  // of the tile in each place of Q
  MaskCursor cursors[kCursors];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

enum NamedBarrier : int { kWritten = 1 };  // a warpgroup's rows of dV, or of dK

using WorkPlace = RingPlace<kWorkStages>;
using Place = RingPlace<kStages>;

// ----------------------------------------------------------------------------------------- feeding
using Walk = KeyWalk<false, true, false, kEvictNormal, kTile, kTile, kBlocks>;

// What the warpgroups are told of some work.
FA_DEVICE void draw_up(const AttentionParams& p, Work& work) {
  const int key = work.tile * kTile;
  const QueryTiles own = query_tiles(p, key, key + kTile - 1, kTile);
  const bool whole = key + kTile <= p.k_len;  // keys that do not exist have to be hidden
  work.full_begin = whole ? own.full_begin : 0;
  work.full_end = whole ? own.full_end : 0;
}

// -------------------------------------------------------------------------------------- computing
// What both computing warpgroups do: the product of their keys with each tile near them, of which
// they make P^T or dS^T, and the product of that with each tile that is near to the other one.
// kWeights: the warpgroup of P^T and dV, else that of dS^T and dK.
template <bool kWeights>
FA_DEVICE void compute(const BwdSm90Params& params, SharedStorage& shared) {
  const AttentionParams& p = params.common;
  const uint32 thread = threadIdx.x;
  auto my_thread = [&]() { return static_cast<int>(opaque(thread) % 128); };
  auto lane = [&]() { return my_thread() % 32; };
  auto release = [&](const uint64& barrier) {
    if (lane() == 0) arrive(barrier);
  };
  // Beside Q lies what is known of its rows, which lanes read themselves.
  auto release_q = [&](int at) { release_own(shared.q_empty[at]); };
  auto release_dout = [&](int at) { release(shared.dout_empty[at]); };
  auto release_near = [&](int at) { kWeights ? release_q(at) : release_dout(at); };
  auto release_far = [&](int at) { kWeights ? release_dout(at) : release_q(at); };
  constexpr bool kSumFirst = (FA_SUM_FIRST >> (kWeights ? 0 : 1)) & 1;
  auto& keys = kWeights ? shared.k : shared.v;
  auto& keys_full = kWeights ? shared.k_full : shared.v_full;
  auto& keys_empty = kWeights ? shared.k_empty : shared.v_empty;
  auto& near_tile = kWeights ? shared.q : shared.dout;
  auto& near_full = kWeights ? shared.q_full : shared.dout_full;
  auto& far_tile = kWeights ? shared.dout : shared.q;
  auto& far_full = kWeights ? shared.dout_full : shared.q_full;

  uint32 works = 0, tiles = 0;  // done so far; all places in rings follow from them
  float s[8][4], sum[kMmaD][4];
  uint32 pairs[8][2];  // P^T or dS^T of the tile before, rounded

  auto start_scores = [&](const uint8* tile) {
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
  auto start_sum = [&](const uint8* tile) {
    const uint64 b = wgmma_descriptor(cvta_to_shared(tile), kTile * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32 a[4] = {pairs[2 * step][0], pairs[2 * step][1], pairs[2 * step + 1][0],
                           pairs[2 * step + 1][1]};
      wgmma_m64k16_rs<kBf16, kDim>(sum, a, wgmma_at(b, step * 16 * 128), 1);
    }
    wgmma_commit_group();
  };

#pragma unroll 1
  while (true) {
    WorkPlace work_place;
    work_place.advance(works);
    wait(shared.work_full[work_place.index()], work_place.parity());
    const Work& work = shared.work[work_place.index()];
    if (work.tile < 0) break;
    int tile = work.begin;        // without a mask
    uint32 seen[2] = {~0u, ~0u};  // under a mask: by which queries of the tile, of a thread's keys
#pragma unroll
    for (int j = 0; j < kMmaD; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] = 0.0f;
    }
    auto outside = [&](int tile) { return tile < work.full_begin || tile >= work.full_end; };
    auto in_band = [&](int tile, int h) {
      const int key = work.tile * kTile + my_thread() / 32 * 16 + lane() / 4 + 8 * h;
      return queries_seeing(p, key, tile * kTile + lane() % 4 * 2, 16);
    };
    // Under a mask, asks for what it says of the tile in a place of Q; then takes away what is
    // outside of the band.
    auto ask_mask = [&](int at) {
      if constexpr (kSparse) {
        read_words(seen, params.mask, shared.note[at].place, work.tile % 2 * 64, my_thread());
      }
    };
    auto add_band = [&](int at) {
      if constexpr (kSparse) {
        const int here = shared.note[at].tile;
        cut_words<kTile>(seen, here, outside(here), [&](int h) { return in_band(here, h); });
      }
    };
    // Puts a number where a key is hidden.
    auto hide = [&](float hidden) {
      if (kSparse ? (seen[0] & seen[1]) == ~0u : !outside(tile)) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) hide_row(s, h, kSparse ? seen[h] : in_band(tile, h), hidden);
    };
    // S^T becomes P^T.
    auto weigh = [&](const Place& place) {
      const float4* rows = shared.rows[place.index()] + lane() % 4;
      hide(-FA_INFINITY);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 row = rows[4 * j];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[j][e] = ex2_approx_ftz(fmaf(s[j][e], p.exp2_scale, e % 2 ? -row.y : -row.x));
        }
      }
      float4* to = reinterpret_cast<float4*>(shared.p[place.index()]) + my_thread();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        to[j * (kPieceStep / 4)] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
      }
      release_own(shared.p_full[place.index()]);
    };
    // dP^T becomes dS^T.
    auto differentiate = [&](const Place& place) {
      const float4* rows = shared.rows[place.index()] + lane() % 4;
      hide(0.0f);
      wait(shared.p_full[place.index()], place.parity());
      const float4* from = reinterpret_cast<const float4*>(shared.p[place.index()]) + my_thread();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 row = rows[4 * j], x = from[j * (kPieceStep / 4)];
        s[j][0] = x.x * (s[j][0] - row.z);
        s[j][1] = x.y * (s[j][1] - row.w);
        s[j][2] = x.z * (s[j][2] - row.z);
        s[j][3] = x.w * (s[j][3] - row.w);
      }
    };

    // The place of the tile before, whose second product is next.
    auto last_place = [&]() {
      Place place;
      place.advance(tiles - 1);
      return place;
    };
    auto start_last = [&](const Place& last) {
      wait(far_full[last.index()], last.parity());
      wgmma_fence();
      start_sum(far_tile[last.index()]);
    };
    auto step = [&](auto first) {
      constexpr bool kFirst = decltype(first)::value;
      Place place;
      place.advance(tiles);
      const int at = place.index();
      auto finish_last = [&]() { release_far(last_place().index()); };
      if constexpr (!kFirst && kSumFirst) start_last(last_place());
      wait(near_full[at], place.parity());
      wgmma_fence();
      start_scores(near_tile[at]);
      if constexpr (!kFirst && kSumFirst) {
        wgmma_wait_group<1>();
        finish_last();
      }
      if constexpr (!kFirst && !kSumFirst) start_last(last_place());
      if constexpr (kSparse) {
        if constexpr (!kWeights) wait(far_full[at], place.parity());
        ask_mask(at);
      }
      wgmma_wait_group<kFirst || kSumFirst ? 0 : 1>();
      add_band(at);
      if constexpr (kWeights) {
        weigh(place);  // what is known of the rows lies beside Q
      } else {
        if constexpr (!kSparse) wait(far_full[at], place.parity());
        differentiate(place);
      }
      release_near(at);
      if constexpr (!kFirst && !kSumFirst) {
        wgmma_wait_group<0>();
        finish_last();
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) pairs[j][h] = pack2<kBf16>(s[j][2 * h], s[j][2 * h + 1]);
      }
      ++tiles;
      tile = tile == work.end - 1 ? work.begin : tile + 1;
    };

    wait(keys_full, works & 1);
    step(Constant<1>());
    int left = work.steps;
#pragma unroll 1
    while (--left > 0) step(Constant<0>());
    start_last(last_place());
    wgmma_wait_group<0>();
    release_far(last_place().index());

    // All warps have left the keys, which become the result.
    bar_sync(kWritten + kWeights, 128);
    const float scale = kWeights ? 1.0f : p.scale;
    const bool zero = work.unseen;
    Look look;
    const uint32 to =
        cvta_to_shared(keys) +
        KeyTile::lane_offset(my_thread() / 32 * 16 + my_thread() % 16, my_thread() / 16 % 2);
#pragma unroll
    for (int j = 0; j < kMmaD; j += 2) {
      uint32 four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = &sum[j + i / 2][i % 2 * 2];
        look.at(two[0]);
        look.at(two[1]);
        four[i] = zero ? 0 : pack2<kBf16>(two[0] * scale, two[1] * scale);
      }
      stmatrix_x4(KeyTile::at(to, 0, j / 2), four[0], four[1], four[2], four[3]);
    }
    if (look.spoiled()) spoil_keys_64(params, work, work.tile * kTile);
    fence_proxy_async_shared();
    bar_sync(kWritten + kWeights, 128);
    if (my_thread() == 0) {
      store_rows_64<kBlocks>(kWeights ? params.dv_map : params.dk_map, keys, work.tile * kTile,
                             work.coordinate);
      cp_async_bulk_wait_group_read<0>();
    }
    release_own(keys_empty);  // of results, too
    release_own(shared.work_empty[work_place.index()]);
    ++works;
  }
  if (thread % 128 == 0) cp_async_bulk_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_keys_sm90(const __grid_constant__ BwdSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    init(shared.k_full, 1);
    init(shared.k_empty, kWarpArrivals * 4);
    init(shared.v_full, 1);
    init(shared.v_empty, kWarpArrivals * 4);
    for (int i = 0; i < kStages; ++i) {
      init(shared.q_full[i], 1);
      init(shared.q_empty[i], kWarpArrivals * 8);
      init(shared.dout_full[i], 1);
      init(shared.dout_empty[i], 8);
      init(shared.p_full[i], kWarpArrivals * 4);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      init(shared.work_full[i], 1);
      init(shared.work_empty[i], kWarpArrivals * 8 + 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp >= 8) {
    setmaxnreg_inc<kComputingRegisters>();
    compute<false>(params, shared);
  } else if (warp >= 4) {
    setmaxnreg_inc<kComputingRegisters>();
    compute<true>(params, shared);
  } else {
    setmaxnreg_dec<kFeedingRegisters>();
    if (!elect_sync()) return;
    if (warp == 0) {
      prefetch_tensormap(&params.q_map);
      prefetch_tensormap(&params.k_map);
      feed_queries<Walk, false>(params, shared, [&](Work& work) { draw_up(params.common, work); });
    } else if (warp == 1) {
      prefetch_tensormap(&params.dout_map);
      prefetch_tensormap(&params.v_map);
      feed_gradients<Walk>(params, shared);
    }
  }
}
