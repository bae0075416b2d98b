// Causal product by chunks for SM80 and later: mma.sync, ldmatrix, cp.async.
//
// A block walks over the chunks of one segment of one batch entry, for kCols value columns:
//   O = Q S + tril(Q K^T) V    and then    S = S + K^T V.
// Its warps are two teams that work on neighbouring chunks between two barriers.  Score warps load
// chunks by cp.async, turn Q K^T of a chunk into weights P in shared memory and store finished
// outputs to global memory.  State warps, each the owner of some value columns, hold those of S in
// registers and compute their columns of O = Q S + P V and of the next S, for the chunk before.
#include "cuda_src/common/chunk_state.cuh"
#include "cuda_src/common/linear_params.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "ptx/math.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr bool kBf16 = FA_BF16;     // bfloat16, else float16
constexpr int kDim = FA_DIM;        // qk_dim, padded with zeros
constexpr int kCols = FA_TILE_N;    // value columns of a block
constexpr int kChunk = FA_TILE_M;   // rows of a chunk
constexpr int kStages = FA_STAGES;  // chunks of Q and K in shared memory, two of them in use
constexpr int kStateWarps = FA_STATE_WARPS;
constexpr int kScoreWarps = FA_SCORE_WARPS;
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
// The state is rounded to 16 bits for its product with Q.  bfloat16 has too few bits for that, so
// there the remainder of the rounding is multiplied too.  float16 has enough bits but too small a
// range, so there the state and the scores are scaled.
constexpr bool kLowPart = kBf16;
constexpr bool kScaled = !kBf16;
constexpr int kScoreThreads = 32 * kScoreWarps;
constexpr int kThreads = kScoreThreads + 32 * kStateWarps;
constexpr int kMmaR = kChunk / 16;                 // products down a chunk's rows
constexpr int kMmaM = kCols / (16 * kStateWarps);  // products down a warp's rows of S^T
static_assert(kCols == 16 * kMmaM * kStateWarps && kMmaM <= 2, "a warp owns 16 or 32 columns");
static_assert(kMmaR <= kScoreWarps && kMmaR % 2 == 0, "16 rows of scores a warp, by pairs of keys");
static_assert(kStages >= 3, "two chunks are in use while a third one is loaded");

using QKTile = SharedTile<kChunk, kDim>;
using VTile = SharedTile<kChunk, kCols>;
using PTile = SharedTile<kChunk, kChunk>;
using State = ChunkState<kBf16, QKTile, kDim, kChunk, kMmaM>;
using TeamSync = TeamBarriers<kScoreThreads, kThreads - kScoreThreads>;

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint16 q[kStages][kChunk * kDim];
  uint16 k[kStages][kChunk * kDim];
  uint16 v[kStages + 1][kChunk * kCols];  // outputs replace the values
  uint16 p[2][kChunk * kChunk];
  float p_scale[2][kMmaR];              // with kScaled, the scale of 16 rows of P
  int nonfinite_found[2][kScoreWarps];  // whether each warp found values that are not finite
  ProductWork work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// ------------------------------------------------------------------------------------ score warps
// The 16 rows of P of a warp: Q K^T up to the diagonal, rounded.
FA_DEVICE void multiply_scores(uint32 q_tile, uint32 k_tile, uint32 p_tile, float* p_scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= kMmaR) return;
  const uint32 q_address = q_tile + QKTile::at(rows_first<QKTile>(lane), 0, 0) +
                           static_cast<uint32>(warp * 16 * QKTile::kRowBytes);
  const uint32 k_address = k_tile + columns_first<QKTile>(lane);
  uint32 a[kDim / 16][4];
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) ldmatrix_x4(a[step], QKTile::at(q_address, 0, step));

  float s[2 * kMmaR][4];
#pragma unroll
  for (int j = 0; j < 2 * kMmaR; j += 4) {  // 32 keys: four sums at once hide latency
#pragma unroll
    for (int e = 0; e < 16; ++e) s[j + e / 4][e % 4] = 0.0f;
    if (8 * j > 16 * warp + 15) continue;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32 b[2][4];
      ldmatrix_x4(b[0], QKTile::at(k_address, 8 * j, step));
      ldmatrix_x4(b[1], QKTile::at(k_address, 8 * j + 16, step));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        mma_m16n8k16<kBf16>(s[j + n], a[step], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
  const int row = 16 * warp + lane / 4;
#pragma unroll
  for (int j = 0; j < 2 * kMmaR; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * j + lane % 4 * 2 + e % 2 > row + e / 2 * 8) s[j][e] = 0.0f;
    }
  }
  float scale = 1.0f;
  if constexpr (kScaled) {
    scale = range_scale(s);
    if (lane == 0) p_scale[warp] = scale;
  }
#pragma unroll
  for (int j = 0; j < 2 * kMmaR; ++j) {
    if (8 * j > 16 * warp + 15) continue;  // not read: beyond the diagonal
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32 pair = pack2<kBf16>(s[j][2 * h] * scale, s[j][2 * h + 1] * scale);
      st_shared_b32(p_tile + PTile::offset(row + 8 * h, j) + lane % 4 * 4, pair);
    }
  }
}

// Whether any of this warp's part of the values is not finite.  Then all bits of its exponent are
// set, and adding 1 to the exponent carries into the sign bit.
FA_DEVICE int has_nonfinite(uint32 v_tile) {
  constexpr uint32 kExponents = kBf16 ? 0x7f807f80 : 0x7c007c00;  // IEEE 754, two values
  constexpr uint32 kOne = kBf16 ? 0x00800080 : 0x04000400;        // the lowest bits of both
  uint32 exponent_carries = 0;
#pragma unroll
  for (int i = 0; i < kChunk * kCols / 8; i += kScoreThreads) {
    uint32 words[4];
    ld_shared_v4_b32(words, v_tile + (i + threadIdx.x) * 16);
#pragma unroll
    for (int w = 0; w < 4; ++w) exponent_carries |= (words[w] & kExponents) + kOne;
  }
  return __any_sync(kFullWarp, (exponent_carries & 0x80008000) != 0);
}

// ------------------------------------------------------------------------------------ state warps
// Replaces values that are not finite by 0 in 16 rows of V.  `first` becomes the first row with
// such a value, for columns g and g + 8.
FA_DEVICE void zero_nonfinite(uint32 (&v)[4], int first_row, int (&first)[2]) {
  constexpr uint32 kExponent = kBf16 ? 0x7f80 : 0x7c00;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32 exponent = kExponent << 16 * h;
      if ((v[r] & exponent) != exponent) continue;
      v[r] &= ~(0xffffu << 16 * h);
      first[r % 2] = min(first[r % 2], first_row + lane % 4 * 2 + r / 2 * 8 + h);
    }
  }
}

using Outputs = float[kMmaR][2 * kMmaM][4];

FA_DEVICE void multiply(Outputs& o, int r, float factor) {
#pragma unroll
  for (int e = 0; e < 8 * kMmaM; ++e) o[r][e / 4][e % 4] *= factor;
}

// O = Q S.
FA_DEVICE void gemm_qs(Outputs& o, const State& state, float scale, uint32 q_address) {
#pragma unroll
  for (int r = 0; r < kMmaR; ++r) {
#pragma unroll
    for (int e = 0; e < 8 * kMmaM; ++e) o[r][e / 4][e % 4] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32 high[2 * kMmaM][2], low[2 * kMmaM][2];
#pragma unroll
    for (int n = 0; n < 2 * kMmaM; ++n) state.operand(high[n], low[n], step, n, scale);
#pragma unroll
    for (int r = 0; r < kMmaR; ++r) {
      uint32 a[4];
      ldmatrix_x4(a, QKTile::at(q_address, 16 * r, step));
#pragma unroll
      for (int n = 0; n < 2 * kMmaM; ++n) mma_m16n8k16<kBf16>(o[r][n], a, high[n][0], high[n][1]);
      if constexpr (kLowPart) {
#pragma unroll
        for (int n = 0; n < 2 * kMmaM; ++n) mma_m16n8k16<kBf16>(o[r][n], a, low[n][0], low[n][1]);
      }
    }
  }
}

// O = O + P V.  With `skip_nonfinite`, values that are not finite are left out, and `first` becomes
// the first row of each column with such a value.
FA_DEVICE void gemm_pv(Outputs& o, int (&first)[kMmaM][2], uint32 p_address, uint32 v_address,
                       bool skip_nonfinite) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) first[i][0] = first[i][1] = kChunk;
#pragma unroll
  for (int c = 0; c < kMmaR; ++c) {
    uint32 v[kMmaM][4];
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
      ldmatrix_x4_trans(v[i], VTile::at(v_address, 16 * c, i));
      if (skip_nonfinite) zero_nonfinite(v[i], 16 * c, first[i]);
    }
#pragma unroll
    for (int r = c; r < kMmaR; ++r) {
      uint32 a[4];
      ldmatrix_x4(a, PTile::at(p_address, 16 * r, c));
#pragma unroll
      for (int n = 0; n < 2 * kMmaM; ++n) {
        mma_m16n8k16<kBf16>(o[r][n], a, v[n / 2][n % 2], v[n / 2][n % 2 + 2]);
      }
    }
  }
}

// Rows that read values which are not finite become NaN.
FA_DEVICE void poison_outputs(Outputs& o, const int (&first)[kMmaM][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 2 * kMmaM; ++n) {
    int from = first[n / 2][n % 2];
    from = min(from, __shfl_xor_sync(kFullWarp, from, 1));
    from = min(from, __shfl_xor_sync(kFullWarp, from, 2));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int nonfinite_from = __shfl_sync(kFullWarp, from, 4 * (lane % 4 * 2 + e % 2));
#pragma unroll
      for (int r = 0; r < kMmaR; ++r) {
        if (16 * r + lane / 4 + e / 2 * 8 >= nonfinite_from)
          o[r][n][e] = __int_as_float(0x7fc00000);
      }
    }
  }
}

// O = Q S + P V of a chunk.  P is 0 where a row does not read a value, but 0 * NaN is NaN: with
// `skip_nonfinite`, values that are not finite are left out, and the rows that read them become
// NaN.
FA_DEVICE void multiply_outputs(Outputs& o, const State& state, float scale, uint32 q_address,
                                uint32 p_address, uint32 v_address, const float* p_scale,
                                bool skip_nonfinite) {
  gemm_qs(o, state, scale, q_address);
  if constexpr (kScaled) {  // from the scale of S to that of P
    const float inverse = rcp_rn(scale);
#pragma unroll
    for (int r = 0; r < kMmaR; ++r) multiply(o, r, inverse * p_scale[r]);
  }
  int first[kMmaM][2];
  gemm_pv(o, first, p_address, v_address, skip_nonfinite);
  if constexpr (kScaled) {
#pragma unroll
    for (int r = 0; r < kMmaR; ++r) multiply(o, r, rcp_rn(p_scale[r]));
  }
  if (skip_nonfinite) poison_outputs(o, first);
}

using RoundedOutputs = uint32[kMmaR][2 * kMmaM][2];

FA_DEVICE void round_outputs(RoundedOutputs& pairs, const Outputs& o) {
#pragma unroll
  for (int r = 0; r < kMmaR; ++r) {
#pragma unroll
    for (int n = 0; n < 2 * kMmaM; ++n) {
      pairs[r][n][0] = pack2<kBf16>(o[r][n][0], o[r][n][1]);
      pairs[r][n][1] = pack2<kBf16>(o[r][n][2], o[r][n][3]);
    }
  }
}

// Writes a warp's columns of the outputs in place of the values.
FA_DEVICE void write_outputs(uint32 v_tile, const RoundedOutputs& pairs, int lane, int warp) {
#pragma unroll
  for (int n = 0; n < 2 * kMmaM; ++n) {
    const uint32 to = VTile::at(VTile::lane_offset(lane / 4, n % 2), 0, warp * kMmaM);
#pragma unroll
    for (int r = 0; r < kMmaR; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32 at = VTile::at(v_tile + to, 16 * r + 8 * h, n / 2);
        st_shared_b32(at + lane % 4 * 4, pairs[r][n][h]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_sm80(const __grid_constant__ ProductParams params) {
  // ---------------------------------------------------------------------------------------- setup
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) shared.work = product_work(params, params.segments);
  __syncthreads();
  const ProductWork& work = shared.work;  // not copied, for want of registers in the loops
  const int col = work.tile * kCols;
  const int chunks = (work.rows + kChunk - 1) / kChunk;
  const int lane = threadIdx.x % 32;
  // The number of barriers, for both teams.  Step i computes scores of chunk i and outputs of chunk
  // i - 1, and stores those of chunk i - 2.
  const int steps = chunks == 0 ? 0 : chunks + 2;

  if (threadIdx.x < kScoreThreads) {
    const uint16* q = static_cast<const uint16*>(params.q) + work.q;
    const uint16* k = static_cast<const uint16*>(params.k) + work.k;
    const uint16* v = static_cast<const uint16*>(params.v) + work.v + col;
    uint16* out = static_cast<uint16*>(params.out) + work.out + col;
    auto load = [&](int chunk) {
      const int begin = chunk * kChunk;
      load_tile<kChunk, kDim, kScoreThreads>(cvta_to_shared(shared.q[chunk % kStages]), q,
                                             params.q_row, begin, work.rows, params.qk_dim,
                                             params.aligned);
      load_tile<kChunk, kDim, kScoreThreads>(cvta_to_shared(shared.k[chunk % kStages]), k,
                                             params.k_row, begin, work.rows, params.qk_dim,
                                             params.aligned);
      load_tile<kChunk, kCols, kScoreThreads>(cvta_to_shared(shared.v[chunk % (kStages + 1)]), v,
                                              params.v_row, begin, work.rows, params.v_dim - col,
                                              params.aligned);
    };
#pragma unroll 1
    for (int chunk = 0; chunk < kStages - 2; ++chunk) {
      if (chunk < chunks) load(chunk);
      cp_async_commit_group();
    }
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      cp_async_wait_group<kStages - 3>();
      TeamSync::lead();
      if (i + kStages - 2 < chunks) load(i + kStages - 2);
      cp_async_commit_group();
      if (i < chunks) {
        const int nonfinite_found = has_nonfinite(cvta_to_shared(shared.v[i % (kStages + 1)]));
        if (lane == 0) shared.nonfinite_found[i % 2][threadIdx.x / 32] = nonfinite_found;
        multiply_scores(cvta_to_shared(shared.q[i % kStages]),
                        cvta_to_shared(shared.k[i % kStages]), cvta_to_shared(shared.p[i % 2]),
                        shared.p_scale[i % 2]);
      }
      if (i >= 2) {
        const int begin = (i - 2) * kChunk;
        constexpr int kWarpRows = kChunk / kScoreWarps;
        store_rows<kChunk, kCols, kWarpRows>(cvta_to_shared(shared.v[(i - 2) % (kStages + 1)]),
                                             out + static_cast<int64>(begin) * params.out_row,
                                             params.out_row,
                                             static_cast<int>(threadIdx.x) / 32 * kWarpRows,
                                             work.rows - begin, params.v_dim - col, params.aligned);
      }
    }
    return;
  }

  // -------------------------------------------------------------------------------- state warps
  const int first_col = col + (static_cast<int>(threadIdx.x) / 32 - kScoreWarps) * kMmaM * 16;
  const bool split = params.workspace != nullptr;
  const int64 row_stride = split ? params.v_dim : params.initial_row;
  const int64 col_stride = split ? 1 : params.initial_col;
  const float* initial_state =
      split ? segment_state(params, work.entry, work.segment) : params.initial;
  if (initial_state != nullptr)
    initial_state += (split ? 0 : work.initial) + first_col * col_stride;
  State state;
  state.load(initial_state, row_stride, col_stride, params.qk_dim, params.v_dim - first_col);
  float scale = kScaled ? range_scale(state.s) : 1.0f;
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    TeamSync::follow<1>();
    const int chunk = i - 1;
    if (chunk < 0 || chunk >= chunks) continue;
    // Read again (ptx/special.cuh): the loop has no registers left to hold these and what is
    // computed from them.
    const int lane = tid_x_again() % 32, warp = tid_x_again() / 32 - kScoreWarps;
    const uint32 q_address = cvta_to_shared(shared.q[chunk % kStages]) + rows_first<QKTile>(lane);
    const uint32 p_address = cvta_to_shared(shared.p[chunk % 2]) + rows_first<PTile>(lane);
    const uint32 v_tile = cvta_to_shared(shared.v[chunk % (kStages + 1)]);
    const uint32 v_address = v_tile + VTile::at(columns_first<VTile>(lane), 0, warp * kMmaM);
    int nonfinite_found = 0;
#pragma unroll
    for (int w = 0; w < kScoreWarps; ++w) nonfinite_found |= shared.nonfinite_found[chunk % 2][w];

    Outputs o;
    multiply_outputs(o, state, scale, q_address, p_address, v_address, shared.p_scale[chunk % 2],
                     nonfinite_found != 0);
    RoundedOutputs pairs;
    round_outputs(pairs, o);
    Values<kChunk, kMmaM> v;
    load_values<VTile, kChunk, kMmaM>(v, v_address);
    __syncwarp();  // no other warp reads these columns
    write_outputs(v_tile, pairs, lane, warp);
    state.add(v, cvta_to_shared(shared.k[chunk % kStages]) + rows_first<QKTile>(lane));
    if constexpr (kScaled) scale = range_scale(state.s);
  }

  if (params.state != nullptr && work.writes_state && work.segment == params.segments - 1) {
    const int first_col = work.tile * kCols + (tid_x_again() / 32 - kScoreWarps) * kMmaM * 16;
    state.store(params.state + work.state + first_col * params.state_col, params.state_row,
                params.state_col, params.qk_dim, params.v_dim - first_col);
  }
}
