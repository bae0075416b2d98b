// Causal product of float32 by chunks for SM80 and later, on float16 tensor cores: mma.sync,
// ldmatrix.
//
// As in chunk_sm80.cu, a block walks over the chunks of one segment of one batch entry, for kCols
// value columns:
//   O = Q S + tril(Q K^T) V    and then    S = S + K^T V.
// Here every operand is a pair of float16 (cuda_src/common/split_float.cuh) and every product is
// three.  The warps are three teams that work on neighbouring chunks, with one barrier a chunk.
// Split warps load the rows of the next chunk into registers, and turn those of chunk i into pairs
// in shared memory.  Score warps turn Q K^T of chunk i - 1 into weights P there.  State warps, each
// the owner of 16 value columns, hold those of S in registers and compute their columns of
// O = Q S + P V and of the next S, for chunk i - 2.
//
// Every row of Q, K, V and P has an exponent, and so has every value column of S, so a row of small
// numbers is as accurate as one of large numbers.  Only in K^T V do all rows of a chunk share one.
#include "cuda_src/common/linear_params.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/split_state.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kDim = FA_DIM;      // qk_dim, padded with zeros
constexpr int kCols = FA_TILE_N;  // value columns of a block
constexpr int kChunk = FA_TILE_M;
constexpr int kBuffers = FA_STAGES;    // chunks in shared memory, one for each team
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr int kSplitWarps = FA_SPLIT_WARPS;
constexpr int kScoreWarps = FA_SCORE_WARPS;  // 0: split warps compute the scores too
constexpr int kStateWarps = kCols / 16;
constexpr int kTeamThreads = 32 * (kSplitWarps + kScoreWarps);  // threads before the state warps
constexpr int kThreads = kTeamThreads + 32 * kStateWarps;
constexpr int kMmaR = kChunk / 16;  // products down a chunk's rows
static_assert(kThreads == FA_THREADS, "its variant launches as many");
// Blocks of 16 keys whose scores a warp sums at once.
constexpr int kInFlight = kScoreWarps > 0 ? 2 : 1;
static_assert(kScoreWarps == kMmaR || (kScoreWarps == 0 && kSplitWarps >= kMmaR),
              "16 rows of scores a warp");
static_assert((kMmaR == 2 || kMmaR == 4) && kBuffers == 3,
              "row blocks by pairs, a buffer for each team");

using QKTile = SharedTile<kChunk, kDim>;
using VTile = SharedTile<kChunk, kCols>;
using PTile = SharedTile<kChunk, kChunk>;
using State = SplitState<kDim, kChunk, kCols>;
using TeamSync = TeamBarriers<32 * kSplitWarps, 32 * kStateWarps, 32 * kScoreWarps>;

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint16 q[kBuffers][2][kChunk * kDim];  // high parts, low parts
  uint16 k[kBuffers][2][kChunk * kDim];
  uint16 v[kBuffers][2][kChunk * kCols];
  uint16 p[2][2][kChunk * kChunk];
  int q_exponent[kBuffers][kChunk];   // row i of Q is 2^-e times its tile's
  int kv_exponent[kBuffers][kChunk];  // row j of K times row j of V is 2^e times their tiles'
  int p_exponent[2][kChunk];          // row i of P V is 2^e times that of the tiles
  int nonfinite_found[kBuffers][kSplitWarps];  // whether each warp found values that are not finite
  int first_nonfinite_row[kCols];              // then: the first such row of each column
  ProductWork work;
  bool whole;  // whether any four columns are 16 aligned bytes of which all or none exist
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// ------------------------------------------------------------------------------------ split warps
// The rows of a chunk that a thread of the split warps holds in registers.  Methods read the thread
// index again (ptx/special.cuh), so that only the rows take registers from one call to the next.
struct Rows {
  FloatChunk<kChunk, kDim, kSplitWarps> q, k;
  FloatChunk<kChunk, kCols, kSplitWarps> v;

  __device__ __forceinline__ void load(const ProductParams& params, const ProductWork& work,
                                       int begin, bool whole) {
    const uint32 tid = tid_x_again();
    const int first_row = begin + split_row<QKTile>(tid), first_col = tid % 8 * 4;
    const int rows = work.rows - first_row, dims = params.qk_dim - first_col;
    const int v_col = work.tile * kCols + first_col;
    auto pipe = [&](const void* base, int64 start, int stride, int col) {
      return static_cast<const float*>(base) + start + static_cast<int64>(first_row) * stride + col;
    };
    q.load(pipe(params.q, work.q, params.q_row, first_col), params.q_row, rows, dims, whole);
    k.load(pipe(params.k, work.k, params.k_row, first_col), params.k_row, rows, dims, whole);
    v.load(pipe(params.v, work.v, params.v_row, v_col), params.v_row, rows, params.v_dim - v_col,
           whole);
  }

  __device__ __forceinline__ void store(SharedStorage& shared, int buffer) const {
    const uint32 tid = tid_x_again();
    const bool nonfinite_found = __any_sync(kFullWarp, !v.finite());
    if (tid % 32 == 0) shared.nonfinite_found[buffer][tid / 32] = nonfinite_found;
#pragma unroll
    for (int g = 0; g < q.kGroups; ++g) {
      const int q_row_exponent = q.exponent(g), k_row_exponent = k.exponent(g),
                v_row_exponent = v.exponent(g);
      q.store(cvta_to_shared(shared.q[buffer][0]), g, q_row_exponent);
      k.store(cvta_to_shared(shared.k[buffer][0]), g, k_row_exponent);
      v.store(cvta_to_shared(shared.v[buffer][0]), g, v_row_exponent);
      if (tid % 8 == 0) {
        const int row = split_row<QKTile>(tid) + g * q.kStep;
        shared.q_exponent[buffer][row] = q_row_exponent;
        shared.kv_exponent[buffer][row] = -k_row_exponent - v_row_exponent;
      }
    }
  }
};

// ------------------------------------------------------------------------------------ score warps
using Scores = float[2 * kMmaR][4];

// Zeroes scores beyond the diagonal, and finds for both rows of a lane the exponent of the largest
// weight, score times 2^kv_exponent, among the lane's own.
FA_DEVICE void mask_scores(Scores& s, int (&row_exponent)[2], const int* kv_exponent, int row,
                           int lane, int warp) {
  row_exponent[0] = row_exponent[1] = -1000;
#pragma unroll
  for (int j = 0; j < 2 * kMmaR; ++j) {
    if (8 * j > 16 * warp + 15) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * j + lane % 4 * 2 + e % 2 > row + e / 2 * 8) s[j][e] = 0.0f;
      if (s[j][e] == 0.0f) continue;
      const int exponent = static_cast<int>(__float_as_uint(s[j][e]) >> 23 & 255) - 127;
      row_exponent[e / 2] = max(row_exponent[e / 2], exponent + kv_exponent[8 * j + e % 2]);
    }
  }
}

// The 16 rows of P of a warp: Q K^T up to the diagonal, times 2^kv_exponent, as pairs.  The
// exponent of a row is that of its largest weight.
FA_DEVICE void multiply_scores(SharedStorage& shared, int chunk) {
  const int lane = tid_x_again() & 31;
  const int warp = (tid_x_again() >> 5) - (kScoreWarps > 0 ? kSplitWarps : 0);
  if (warp >= kMmaR) return;
  const int buffer = chunk % kBuffers;
  constexpr uint32 kLow = kChunk * kDim * 2;  // bytes from high parts to low ones
  const uint32 q_address = cvta_to_shared(shared.q[buffer][0]) + rows_first<QKTile>(lane) +
                           static_cast<uint32>(warp * 16 * QKTile::kRowBytes);
  const uint32 k_address = cvta_to_shared(shared.k[buffer][0]) + columns_first<QKTile>(lane);
  // S = Q K^T, up to the blocks of keys that the diagonal crosses
  Scores s;
#pragma unroll
  for (int j = 0; j < 2 * kMmaR; j += 2 * kInFlight) {
#pragma unroll
    for (int e = 0; e < 8 * kInFlight; ++e) s[j + e / 4][e % 4] = 0.0f;
    if (8 * j > 16 * warp + 15) continue;
    SplitSum sums[2 * kInFlight];
#pragma unroll
    for (int n = 0; n < 2 * kInFlight; ++n) sums[n].clear();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32 a[4], a_low[4], b[kInFlight][4], b_low[kInFlight][4];
      ldmatrix_x4(a, QKTile::at(q_address, 0, step));
      ldmatrix_x4(a_low, QKTile::at(q_address + kLow, 0, step));
#pragma unroll
      for (int h = 0; h < kInFlight; ++h) {
        ldmatrix_x4(b[h], QKTile::at(k_address, 8 * j + 16 * h, step));
        ldmatrix_x4(b_low[h], QKTile::at(k_address + kLow, 8 * j + 16 * h, step));
      }
#pragma unroll
      for (int n = 0; n < 2 * kInFlight; ++n) {
        mma_f16(sums[n].cross, a_low, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
#pragma unroll
      for (int n = 0; n < 2 * kInFlight; ++n) {
        mma_f16(sums[n].main, a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
#pragma unroll
      for (int n = 0; n < 2 * kInFlight; ++n) {
        mma_f16(sums[n].cross, a, b_low[n / 2][n % 2 * 2], b_low[n / 2][n % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 8 * kInFlight; ++e) s[j + e / 4][e % 4] = sums[e / 4].value(e % 4);
  }
  const int row = 16 * warp + lane / 4;
  const int* kv_exponent = shared.kv_exponent[buffer] + lane % 4 * 2;
  int row_exponent[2];
  mask_scores(s, row_exponent, kv_exponent, row, lane, warp);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row_exponent[h] = max(row_exponent[h], __shfl_xor_sync(kFullWarp, row_exponent[h], 1));
    row_exponent[h] = max(row_exponent[h], __shfl_xor_sync(kFullWarp, row_exponent[h], 2));
    if (lane % 4 == 0) {
      shared.p_exponent[chunk % 2][row + 8 * h] =
          row_exponent[h] - 14 - shared.q_exponent[buffer][row + 8 * h];
    }
  }
  // P, as pairs
  const uint32 p_tile = cvta_to_shared(shared.p[chunk % 2][0]);
#pragma unroll
  for (int j = 0; j < 2 * kMmaR; ++j) {
    if (8 * j > 16 * warp + 15) continue;  // not read: beyond the diagonal
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int shift = kv_exponent[8 * j + e] + 14 - row_exponent[h];
        x[e] = s[j][2 * h + e] * power_of_two(max(-127, min(127, shift)));
      }
      const SplitPair pair = split(x[0], x[1]);
      const uint32 to = p_tile + PTile::offset(row + 8 * h, j) + lane % 4 * 4;
      st_shared_b32(to, pair.high);
      st_shared_b32(to + kChunk * kChunk * 2, pair.low);
    }
  }
}

// ------------------------------------------------------------------------------------ state warps
// Read again (ptx/special.cuh), as the lane is in the functions below: the state and its operands
// leave no registers to hold these and what is computed from them.
FA_DEVICE int state_warp() { return (tid_x_again() >> 5) - kTeamThreads / 32; }

// Replaces values that are not finite by 0 in a warp's 16 columns: P is 0 where a row does not read
// a value, but 0 * NaN is NaN.  `first_nonfinite_row` gets the first row of each column with such a
// value.
FA_DEVICE void zero_nonfinite(uint32 v_tile, int warp, int* first_nonfinite_row) {
  constexpr uint32 kLow = kChunk * kCols * 2;
  const int lane = tid_x_again() & 31;
  int first_found[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) first_found[c] = kChunk;
#pragma unroll 1
  for (int row = lane / 2; row < kChunk; row += 16) {
    const uint32 at = v_tile + VTile::offset(row, 2 * warp + lane % 2);
    uint32 high[4], low[4];
    ld_shared_v4_b32(high, at);
    ld_shared_v4_b32(low, at + kLow);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32 exponent = 0x7c00u << c % 2 * 16, all = 0xffffu << c % 2 * 16;
      if ((high[c / 2] & exponent) != exponent) continue;
      high[c / 2] &= ~all;
      low[c / 2] &= ~all;
      first_found[c] = min(first_found[c], row);
    }
    st_shared_v4_b32(at, high);
    st_shared_v4_b32(at + kLow, low);
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
#pragma unroll
    for (int step = 2; step < 32; step *= 2) {
      first_found[c] = min(first_found[c], __shfl_xor_sync(kFullWarp, first_found[c], step));
    }
    if (lane < 2) first_nonfinite_row[8 * lane + c] = first_found[c];
  }
  __syncwarp();
}

template <int kConstant>
struct Constant {
  static constexpr int kValue = kConstant;
};

using Sums = SplitSum[2][2];  // two blocks of 16 rows by two blocks of 8 columns

FA_DEVICE void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i / 2][i % 2].clear();
}

// Adds row blocks kFirst to 1 of A times 16 columns of B, three products for each pair.
// `a_address` is this lane's row of the first block; the second one follows after kBlock bytes, and
// low parts lie kLow bytes after high ones.
template <int kFirst, uint32 kBlock, uint32 kLow>
FA_DEVICE void multiply(Sums& sums, uint32 a_address, const SplitPair (&b)[2][2]) {
  uint32 a[2][4], a_low[2][4];
#pragma unroll
  for (int r = kFirst; r < 2; ++r) {
    ldmatrix_x4(a[r], a_address + r * kBlock);
    ldmatrix_x4(a_low[r], a_address + r * kBlock + kLow);
  }
#pragma unroll
  for (int i = 2 * kFirst; i < 4; ++i) {
    mma_f16(sums[i / 2][i % 2].cross, a_low[i / 2], b[i % 2][0].high, b[i % 2][1].high);
  }
#pragma unroll
  for (int i = 2 * kFirst; i < 4; ++i) {
    mma_f16(sums[i / 2][i % 2].main, a[i / 2], b[i % 2][0].high, b[i % 2][1].high);
  }
#pragma unroll
  for (int i = 2 * kFirst; i < 4; ++i) {
    mma_f16(sums[i / 2][i % 2].cross, a[i / 2], b[i % 2][0].low, b[i % 2][1].low);
  }
}

using OutputPair = float[2][2][4];  // of two row blocks

// O = Q S, for row blocks 2 kPair and 2 kPair + 1.
template <int kPair>
FA_DEVICE void gemm_qs(OutputPair& o, State& state, const int (&exponents)[2],
                       const SharedStorage& shared, int buffer, int row, int lane) {
  const uint32 q_address = cvta_to_shared(shared.q[buffer][0]) + rows_first<QKTile>(lane);
  const float scale[2] = {power_of_two(exponents[0]), power_of_two(exponents[1])};
  Sums sums;
  clear(sums);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    SplitPair b[2][2];
    state.operand(b, step, scale);
    multiply<0, 16 * QKTile::kRowBytes, kChunk * kDim * 2>(
        sums, QKTile::at(q_address, 32 * kPair, step), b);
  }
  // Half of the exponents is applied twice, because float32 may not hold all of it.
  float col_factor[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float half = power_of_two(-exponents[i / 2] / 2);
    col_factor[i / 2][i % 2] = __shfl_sync(kFullWarp, half, 4 * (lane % 4 * 2 + i % 2));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_factor = power_of_two(-shared.q_exponent[buffer][row + 16 * r + 8 * h] / 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = row_factor * col_factor[i / 2][i % 2];
        const int e = 2 * h + i % 2;
        o[r][i / 2][e] = sums[r][i / 2].value(e) * factor * factor;
      }
    }
  }
}

// O = O + P V.
template <int kPair>
FA_DEVICE void gemm_pv(OutputPair& o, const SharedStorage& shared, int chunk, int buffer, int row,
                       int lane, int warp) {
  const uint32 p_address = cvta_to_shared(shared.p[chunk % 2][0]) + rows_first<PTile>(lane);
  const uint32 v_address =
      cvta_to_shared(shared.v[buffer][0]) + VTile::at(columns_first<VTile>(lane), 0, warp);
  Sums sums;
  clear(sums);
#pragma unroll
  for (int c = 0; c < 2 * kPair + 2; ++c) {
    uint32 v[4], v_low[4];
    ldmatrix_x4_trans(v, VTile::at(v_address, 16 * c, 0));
    ldmatrix_x4_trans(v_low, VTile::at(v_address + kChunk * kCols * 2, 16 * c, 0));
    const SplitPair b[2][2] = {{{v[0], v_low[0]}, {v[2], v_low[2]}},
                               {{v[1], v_low[1]}, {v[3], v_low[3]}}};
    // The first of the two row blocks does not read the last block of values.
    const uint32 from = PTile::at(p_address, 32 * kPair, c);
    constexpr uint32 kBlock = 16 * PTile::kRowBytes, kLow = kChunk * kChunk * 2;
    if (c <= 2 * kPair) {
      multiply<0, kBlock, kLow>(sums, from, b);
    } else {
      multiply<1, kBlock, kLow>(sums, from, b);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int exponent = shared.p_exponent[chunk % 2][row + 16 * r + 8 * h];
      const int bounded = max(-252, min(252, exponent));
      const float factor = power_of_two(bounded / 2), rest = power_of_two(bounded - bounded / 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = 2 * h + i % 2;
        o[r][i / 2][e] = fmaf(sums[r][i / 2].value(e) * factor, rest, o[r][i / 2][e]);
      }
    }
  }
}

// O = Q S + P V of a chunk, for row blocks 2 kPair and 2 kPair + 1.  With `nonfinite_found`, rows
// that read values which are not finite become NaN.
template <int kPair>
FA_DEVICE void multiply_outputs(OutputPair& o, State& state, const int (&exponents)[2],
                                const SharedStorage& shared, int chunk, bool nonfinite_found) {
  const int lane = tid_x_again() & 31, warp = state_warp();
  const int buffer = chunk % kBuffers, row = 32 * kPair + lane / 4;
  gemm_qs<kPair>(o, state, exponents, shared, buffer, row, lane);
  gemm_pv<kPair>(o, shared, chunk, buffer, row, lane, warp);
  if (!nonfinite_found) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int first = shared.first_nonfinite_row[16 * warp + 8 * (i / 2) + lane % 4 * 2 + i % 2];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (row + 8 * r >= first) o[r / 2][i / 2][r % 2 * 2 + i % 2] = __int_as_float(0x7fc00000);
    }
  }
}

// Stores two row blocks of outputs.  `to` is the address of this lane's first row and column, from
// which `rows` and `cols` count.
FA_DEVICE void store_outputs(float* to, int row_stride, int rows, int cols, bool whole,
                             const float (&o)[2][2][4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (8 * r < rows) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = o[r / 2][n][r % 2 * 2], y = o[r / 2][n][r % 2 * 2 + 1];
        if (whole) {
          if (8 * n < cols) *reinterpret_cast<float2*>(to + 8 * n) = make_float2(x, y);
        } else {
          if (8 * n < cols) to[8 * n] = x;
          if (8 * n + 1 < cols) to[8 * n + 1] = y;
        }
      }
    }
    to += static_cast<int64>(8) * row_stride;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_fp32_sm80(const __grid_constant__ ProductParams params) {
  // ---------------------------------------------------------------------------------------- setup
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.work = product_work(params, params.segments);
    shared.whole = params.aligned && params.qk_dim % 4 == 0 && params.v_dim % 4 == 0;
  }
  __syncthreads();
  const ProductWork& work = shared.work;  // not copied, for want of registers in the loops
  // The number of barriers, for all teams: step i splits chunk i and computes scores of chunk i - 1
  // and outputs of chunk i - 2.  Both are lambdas: they are computed from shared memory where they
  // are needed, and take no registers from one step to the next.
  auto chunks = [&] { return (work.rows + kChunk - 1) / kChunk; };
  auto steps = [&] { return work.rows <= 0 ? 0 : chunks() + 2; };

  if (threadIdx.x < 32 * kSplitWarps) {
    Rows rows;
    rows.load(params, work, 0, shared.whole);
#pragma unroll 1
    for (int i = 0; i < steps(); ++i) {
      if (i < chunks()) {
        rows.store(shared, i % kBuffers);
        rows.load(params, work, (i + 1) * kChunk, shared.whole);
      }
      if (kScoreWarps == 0 && i >= 1 && i <= chunks()) multiply_scores(shared, i - 1);
      TeamSync::lead();
    }
    return;
  }
  if (threadIdx.x < kTeamThreads) {
#pragma unroll 1
    for (int i = 0; i < steps(); ++i) {
      if (i >= 1 && i <= chunks()) multiply_scores(shared, i - 1);
      TeamSync::follow<2>();
    }
    return;
  }

  // ---------------------------------------------------------------------------------- state warps
  const int first_col = work.tile * kCols + state_warp() * 16;
  const bool split = params.workspace != nullptr;
  const int64 row_stride = split ? params.v_dim : params.initial_row;
  const int64 col_stride = split ? 1 : params.initial_col;
  const float* initial_state =
      split ? segment_state(params, work.entry, work.segment) : params.initial;
  if (initial_state != nullptr)
    initial_state += (split ? 0 : work.initial) + first_col * col_stride;
  State state;
  state.load(initial_state, row_stride, col_stride, params.qk_dim, params.v_dim - first_col);
  int exponents[2];
  state.exponents(exponents);
#pragma unroll 1
  for (int i = 0; i < steps(); ++i) {
    const int chunk = i - 2;
    if (chunk >= 0) {
      const int buffer = chunk % kBuffers;
      int nonfinite_found = 0;
#pragma unroll
      for (int w = 0; w < kSplitWarps; ++w) nonfinite_found |= shared.nonfinite_found[buffer][w];
      if (nonfinite_found != 0) {
        zero_nonfinite(cvta_to_shared(shared.v[buffer][0]), state_warp(),
                       shared.first_nonfinite_row + 16 * state_warp());
      }
      auto outputs = [&](auto pair) {
        constexpr int kPair = decltype(pair)::kValue;
        float o[2][2][4];
        multiply_outputs<kPair>(o, state, exponents, shared, chunk, nonfinite_found != 0);
        const int lane = tid_x_again() & 31;
        const int row = chunk * kChunk + 32 * kPair + lane / 4;
        const int col = work.tile * kCols + state_warp() * 16 + lane % 4 * 2;
        float* out = static_cast<float*>(params.out) + work.out;
        store_outputs(out + static_cast<int64>(row) * params.out_row + col, params.out_row,
                      work.rows - row, params.v_dim - col, shared.whole, o);
      };
      outputs(Constant<0>());
      if constexpr (kMmaR > 2) outputs(Constant<1>());
      const int lane = tid_x_again() & 31, warp = state_warp();
      state.add(
          shared.kv_exponent[buffer],
          cvta_to_shared(shared.k[buffer][0]) + rows_first<QKTile>(lane),
          cvta_to_shared(shared.v[buffer][0]) + VTile::at(columns_first<VTile>(lane), 0, warp));
      if (nonfinite_found != 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (shared.first_nonfinite_row[16 * warp + 8 * h + lane / 4] < kChunk)
            state.poison_column(h);
        }
      }
      state.exponents(exponents);
    }
    TeamSync::follow<1>();
  }

  if (params.state != nullptr && work.writes_state && work.segment == params.segments - 1) {
    const int first_col = work.tile * kCols + state_warp() * 16;
    state.store(params.state + work.state + first_col * params.state_col, params.state_row,
                params.state_col, params.qk_dim, params.v_dim - first_col);
  }
}
