// Causal product by chunks for SM90: TMA, wgmma, warp specialisation, the state in registers.
//
// One block walks the chunks of one segment of one batch entry, for kCols value columns:
//   O = Q S + (Q K^T, lower triangle) V    and then    S = S + K^T V.
// A thread loads chunks, another one stores outputs.  A score warpgroup turns Q K^T of a chunk into
// weights P in shared memory, ahead of the state warpgroups.  Each of these owns 64 value columns
// and computes transposed: O^T = S^T Q^T + V^T P^T with S^T from its registers, and U = V^T K,
// which S^T grows by.  In reverse, chunks come from the last to the first, and P is the upper
// triangle.
#include "cuda_src/common/chunk_state.cuh"
#include "cuda_src/common/product_sm90.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kOutSlots = FA_OUT_SLOTS;  // places for finished outputs
// bfloat16 rounds the state as coarsely as the output: there what rounding leaves is multiplied
// too.  float16 has the bits but not the range, so there state and scores are scaled.
constexpr bool kLowPart = kBf16;
constexpr bool kScaled = !kBf16;
// With registers for it, the sums of a chunk start before its outputs and are added to the state
// while those are multiplied; else they take the registers of the state's rounded parts, later.
constexpr bool kEarly = kMinBlocks == 1 && (kDim == 64 || (kGroups == 1 && kLowPart));
constexpr int kThreads = 128 * (kGroups + 2);
constexpr int kSumCols = kCols / 4;  // value columns of one of the score warps
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kFeedingRegisters = kMinBlocks == 2 ? 24 : 32;
constexpr int kScoreRegisters = kMinBlocks == 2 ? 72 : 96;
constexpr int kStateRegisters = kMinBlocks == 2 ? 144 : kGroups == 2 ? 192 : 240;
static_assert(kGroups <= 2 && kMinBlocks <= 2 && kGroups * kMinBlocks <= 2, "registers, as above");

using PTile = SharedTile<kChunk, 64>;
using OutTile = SharedTile<kChunk, 64>;

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint8 q[kStages][kDimBlocks * kBlockBytes];
  uint8 k[kStages][kDimBlocks * kBlockBytes];
  uint8 v[kStages][kGroups * kBlockBytes];
  uint8 p[2][kBlockBytes];
  uint8 out[kOutSlots][kGroups * kBlockBytes];
  float p_inverse[2][4];  // what 16 rows of P V are multiplied by, where kScaled
  int broken[2][4];       // whether values of a score warp's columns are not finite
  int bound[2][kCols];    // then: the first (in reverse, last) row of each column where that is so
  uint64 full[kStages], empty[kStages];
  uint64 p_full[2], p_empty[2];
  uint64 out_full[kOutSlots][kGroups], out_empty[kOutSlots][kGroups];
  Work work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu/products.py asks for as much");

using Place = RingPlace<kStages>;
using PPlace = RingPlace<2>;
using OutPlace = RingPlace<kOutSlots>;

// ---------------------------------------------------------------------------------------- feeding
FA_DEVICE void feed(const ProductSm90Params& params, SharedStorage& shared) {
  const Work work = shared.work;
  const ProductJob& job = params.job[work.job];
  const uint64 policy = params.keep ? kEvictLast : kEvictNormal;
  Place place;
#pragma unroll 1
  for (int i = 0; i < work.chunks; ++i) {
    const int row = (work.chunk + i * work.step) * kChunk, at = place.index();
    wait(shared.empty[at], place.parity() ^ 1);
    const uint32 barrier = cvta_to_shared(&shared.full[at]);
    mbarrier_arrive_expect_tx(barrier, (2 * kDimBlocks + kGroups) * kBlockBytes);
    load_chunk<kDimBlocks>(shared.q[at], job.q_map, job.q_step, work, barrier, policy, 0, row);
    load_chunk<kDimBlocks>(shared.k[at], job.k_map, job.k_step, work, barrier, policy, 0, row);
    load_chunk<kGroups>(shared.v[at], job.v_map, job.v_step, work, barrier, policy, work.column,
                        row);
    place.advance();
  }
}

FA_DEVICE void store_outputs(const ProductSm90Params& params, SharedStorage& shared) {
  const Work work = shared.work;
  const ProductJob& job = params.job[work.job];
  OutPlace place;
#pragma unroll 1
  for (int i = 0; i < work.chunks; ++i) {
    const int row = (work.chunk + i * work.step) * kChunk, at = place.index();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.out_full[at][group], place.parity());
      cp_async_bulk_tensor_5d_store(&job.out_map,
                                    cvta_to_shared(&shared.out[at][group * kBlockBytes]),
                                    kEvictNormal, work.column + 64 * group, row, work.coordinate[2],
                                    work.coordinate[1], work.coordinate[0]);
      cp_async_bulk_commit_group();
    }
    cp_async_bulk_wait_group_read<0>();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) arrive(shared.out_empty[at][group]);
    place.advance();
  }
  cp_async_bulk_wait_group<0>();
}

// ----------------------------------------------------------------------------------------- scores
// Whether some of the values in a warp's columns are not finite.
FA_DEVICE bool not_finite(uint32 v_tile, int warp) {
  constexpr uint32 kExponents = kBf16 ? 0x7f807f80 : 0x7c007c00;  // of two values
  constexpr uint32 kOne = kBf16 ? 0x00800080 : 0x04000400;  // carries over if all bits are set
  const int lane = threadIdx.x % 32;
  uint32 found = 0;
  // Rows that are a multiple of 8 apart have the same swizzle.
  const uint32 v_lane = v_tile + lane * 128, first = warp * (kSumCols / 8);
#pragma unroll 1
  for (int chunk = 0; chunk < kSumCols / 8; ++chunk) {  // registers are short
#pragma unroll
    for (int row = 0; row < kChunk; row += 32) {
      uint32 words[4];
      const uint32 column = first + chunk;
      ld_shared_v4_b32(
          words, v_lane + row * 128 + column / 8 * kBlockBytes + (((column ^ lane) & 7) << 4));
#pragma unroll
      for (int w = 0; w < 4; ++w) found |= (words[w] & kExponents) + kOne;
    }
  }
  return __any_sync(kFullWarp, (found & 0x80008000) != 0);
}

// Zeroes what is not finite among the values of a warp's columns, and keeps where that was.
FA_DEVICE void forget_not_finite(uint8* v_tile, int (&bound)[kCols], int warp, bool reverse) {
  constexpr uint16 kExponent = kBf16 ? 0x7f80 : 0x7c00;
  const int lane = threadIdx.x % 32, column = warp * kSumCols + lane;
  if (lane < kSumCols) {
    int found = reverse ? -1 : kChunk;
#pragma unroll 1
    for (int row = 0; row < kChunk; ++row) {
      uint16& x = *reinterpret_cast<uint16*>(
          v_tile + SharedTile<kChunk, kCols>::offset(row, column / 8) + column % 8 * 2);
      if ((x & kExponent) != kExponent) continue;
      x = 0;
      found = reverse ? row : min(found, row);
    }
    bound[column] = found;
  }
}

FA_DEVICE void compute_scores(const ProductSm90Params& params, SharedStorage& shared, int warp) {
  const int lane = threadIdx.x % 32, chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  // How far beyond the diagonal this lane's first element lies.
  const int sign = reverse ? -1 : 1, beyond = sign * (lane % 4 * 2 - 16 * warp - lane / 4);
  // Where this lane's row of the four matrices of an stmatrix.x4 lies: rows 0-7, 8-15, then the
  // same of the next 8 columns (PTX ISA 9.7.14.5.16).
  const uint32 p_lane = PTile::lane_offset(16 * warp + lane % 16, lane / 16);
  Place place;
  PPlace p_place;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = place.index(), p_at = p_place.index();
    float s[8][4];
    wait(shared.full[at], place.parity());
    const uint64 a = wgmma_descriptor(cvta_to_shared(shared.q[at]), 0);
    const uint64 b = wgmma_descriptor(cvta_to_shared(shared.k[at]), 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      // 16 columns are 32 bytes of a block's rows; descriptors count in 16 bytes.
      const int more = (step / 4 * kBlockBytes + step % 4 * 32) / 16;
      wgmma_m64k16_ss<kBf16, 64>(s, a + more, b + more, step > 0);
    }
    wgmma_commit_group();
    const bool broken = not_finite(cvta_to_shared(shared.v[at]), warp);
    wait(shared.p_empty[p_at], p_place.parity() ^ 1);
    wgmma_wait_group<0>();
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (beyond + sign * (8 * v + e % 2 - e / 2 * 8) > 0) s[v][e] = 0.0f;
      }
    }
    float scale = 1.0f;
    if constexpr (kScaled) {
      scale = range_scale(s);
      if (lane == 0) shared.p_inverse[p_at][warp] = rcp_rn(scale);
    }
    const uint32 p_tile = cvta_to_shared(shared.p[p_at]) + p_lane;
#pragma unroll
    for (int v = 0; v < 8; v += 2) {
      uint32 pairs[2][2];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* pair = &s[v + n / 2][n % 2 * 2];
        pairs[n / 2][n % 2] = pack2<kBf16>(pair[0] * scale, pair[1] * scale);
      }
      stmatrix_x4(PTile::at(p_tile, 0, v / 2), pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
    }
    if (lane == 0) shared.broken[p_at][warp] = broken;
    if (broken) forget_not_finite(shared.v[at], shared.bound[p_at], warp, reverse);
    fence_proxy_async_shared();
    __syncwarp();
    release(shared.p_full[p_at]);
    release(shared.empty[at]);
    place.advance();
    p_place.advance();
  }
}

// ---------------------------------------------------------------------------------- state, outputs
using Outputs = float[8][4];  // O^T: [v][2 * i + j] of row 8 v + 2 t + j
using Packed = uint32[8][2];
using Rounded = uint32[kDim / 16][4];  // A operands of S^T Q^T

// S times `scale`, rounded, and what that leaves.
FA_DEVICE void round_state(const State& s, float scale, Rounded& high, Rounded& low) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* pair = &s[2 * step + r / 2][r % 2 * 2];
      const float x = pair[0] * scale, y = pair[1] * scale;
      high[step][r] = pack2<kBf16>(x, y);
      if constexpr (kLowPart) {
        low[step][r] = pack2<kBf16>(x - to_float<kBf16>(static_cast<uint16>(high[step][r])),
                                    y - to_float<kBf16>(static_cast<uint16>(high[step][r] >> 16)));
      }
    }
  }
}

// O^T (+)= S^T Q^T, started.
FA_DEVICE void start_state_outputs(Outputs& o, Rounded& high, Rounded& low, const uint8* q_tile,
                                   int add) {
  const uint64 b = wgmma_descriptor(cvta_to_shared(q_tile), 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint64 b_step = b + (step / 4 * kBlockBytes + step % 4 * 32) / 16;
    wgmma_m64k16_rs<kBf16, 64, kKMajor>(o, high[step], b_step, add || step > 0);
    if constexpr (kLowPart) wgmma_m64k16_rs<kBf16, 64, kKMajor>(o, low[step], b_step, 1);
  }
}

// O^T = V^T P^T, started.
FA_DEVICE void start_score_outputs(Outputs& o, const uint8* v_tile, const uint8* p_tile) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(v_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(p_tile), 0);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    wgmma_m64k16_ss<kBf16, 64, kMnMajor, kKMajor>(o, a + step * (16 * 128 / 16),
                                                  b + step * (32 / 16), step > 0);
  }
}

FA_DEVICE void compute_outputs(const ProductSm90Params& params, SharedStorage& shared, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunks = shared.work.chunks;
  const ProductJob& job = params.job[shared.work.job];
  const bool reverse = job.reverse;
  State s;
  {
    const Work& work = shared.work;
    const int column = work.column + 64 * group;
    const bool split = job.workspace != nullptr;
    const int64 row = split ? job.v_dim : job.initial_row, col = split ? 1 : job.initial_col;
    const float* from = split ? segment_state(params, work, work.segment) : job.initial;
    if (from != nullptr) from += (split ? 0 : work.initial) + column * col;
    load_state(s, from, row, col, job.qk_dim, job.v_dim - column);
  }
  float scale = kScaled ? range_scale(s) : 1.0f;
  // Where this lane's row of the four matrices of a transposing stmatrix.x4 lies: 8 rows of the
  // output, of two blocks of 8 columns, then the same of the next 8 rows.
  const uint32 out_lane =
      OutTile::at(OutTile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2), 0, warp);
  Place place;
  PPlace p_place;
  OutPlace out_place;
  State u;
  Outputs o, o_scores;
  Rounded high, low;
  Packed out;
  auto store = [&]() {
    const int at = out_place.index();
    wait(shared.out_empty[at][group], out_place.parity() ^ 1);
    const uint32 tile = cvta_to_shared(&shared.out[at][group * kBlockBytes]) + out_lane;
#pragma unroll
    for (int v = 0; v < 8; v += 2) {
      stmatrix_x4_trans(tile + 8 * v * OutTile::kRowBytes, out[v][0], out[v][1], out[v + 1][0],
                        out[v + 1][1]);
    }
    fence_proxy_async_shared();
    __syncwarp();
    release(shared.out_full[at][group]);
    out_place.advance();
  };

#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = place.index(), p_at = p_place.index();
    const uint8* v_tile = &shared.v[at][group * kBlockBytes];
    wait(shared.full[at], place.parity());
    wait(shared.p_full[p_at], p_place.parity());
    wgmma_fence();
    if constexpr (kEarly) {
      start_sums(u, shared.k[at], v_tile);
      wgmma_commit_group();
    }
    start_score_outputs(kScaled ? o_scores : o, v_tile, shared.p[p_at]);
    wgmma_commit_group();
    // Meanwhile: the output of the chunk before, and where this one's may not be read.
    if (kEarly && i > 0) store();
    const bool broken = shared.broken[p_at][(64 * group + 16 * warp) / kSumCols] != 0;
    int bound[2] = {0, 0};
    if (broken) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        bound[h] = shared.bound[p_at][64 * group + 16 * warp + lane / 4 + 8 * h];
      }
    }
    float inverse[4];
    if constexpr (kScaled) {
#pragma unroll
      for (int r = 0; r < 4; ++r) inverse[r] = shared.p_inverse[p_at][r];
    }
    round_state(s, scale, high, low);
    wgmma_fence();
    start_state_outputs(o, high, low, shared.q[at], !kScaled);
    wgmma_commit_group();

    const float state_inverse = kScaled ? rcp_rn(scale) : 1.0f;
    auto finish_state = [&]() {
      add_sums(s, u);
      if (broken) {  // values that are not finite were left out of the sums
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (bound[h] < 0 || bound[h] >= kChunk) continue;
#pragma unroll
          for (int v = 0; v < kMmaE; ++v) {
            s[v][2 * h] = s[v][2 * h + 1] = __int_as_float(0x7fc00000);
          }
        }
      }
      if constexpr (kScaled) scale = range_scale(s);
    };
    if constexpr (kEarly) {
      wgmma_wait_group<2>();
      finish_state();
    }
    wgmma_wait_group<0>();
    release(shared.p_empty[p_at]);
    if constexpr (kEarly) release(shared.empty[at]);
    if constexpr (kScaled) {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          o[v][e] = fmaf(o_scores[v][e], inverse[v / 2], o[v][e] * state_inverse);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int h = 0; h < 2; ++h) out[v][h] = pack2<kBf16>(o[v][2 * h], o[v][2 * h + 1]);
    }
    if (broken) {  // rows that read them become NaN
#pragma unroll
      for (int v = 0; v < 8; ++v) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int row = 8 * v + lane % 4 * 2 + n % 2, from = bound[n / 2];
          if (reverse ? row <= from : row >= from) out[v][n / 2] |= 0x7fffu << 16 * (n % 2);
        }
      }
    }
    if constexpr (!kEarly) {
      wgmma_fence();
      start_sums(u, shared.k[at], v_tile);
      wgmma_commit_group();
      store();
      wgmma_wait_group<0>();
      release(shared.empty[at]);
      finish_state();
    }
    place.advance();
    p_place.advance();
  }
  if constexpr (kEarly) store();

  const Work& work = shared.work;
  if (job.state != nullptr && work.owns && work.segment == params.segments - 1) {
    const int column = work.column + 64 * group;
    store_state(s, job.state + work.state + column * job.state_col, job.state_row, job.state_col,
                job.qk_dim, job.v_dim - column);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunked_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init(shared.full[i], 1);
      init(shared.empty[i], 4 + 4 * kGroups);
    }
    for (int i = 0; i < 2; ++i) {
      init(shared.p_full[i], 4);
      init(shared.p_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kOutSlots * kGroups; ++i) {
      init(shared.out_full[i / kGroups][i % kGroups], 4);
      init(shared.out_empty[i / kGroups][i % kGroups], 1);
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 32) {
    shared.work = find_work(params, params.segments);
  }
  __syncthreads();
  if (shared.work.chunks == 0) return;

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp < 4) {
    setmaxnreg_dec<kFeedingRegisters>();
    if (warp == 0 && elect_sync()) feed(params, shared);
    if (warp == 1 && elect_sync()) store_outputs(params, shared);
  } else if (warp < 8) {
    setmaxnreg_dec<kScoreRegisters>();
    compute_scores(params, shared, warp - 4);
  } else {
    setmaxnreg_inc<kStateRegisters>();
    compute_outputs(params, shared, warp / 4 - 2);
  }
}
