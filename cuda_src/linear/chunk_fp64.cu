// Causal product in float64 by chunks for SM80 and later: mma.sync, cp.async.
//
// A block walks over the chunks of one segment of one batch entry, for kCols value columns:
//   O = Q S + tril(Q K^T) V    and then    S = S + K^T V.
// Every warp owns some value columns, and with kKeyParts > 1 a part of the key columns, and holds
// its elements of S in registers (chunk_fp64.cuh).  Weights tril(Q K^T) are what all warps need:
// each computes some products of them and hands them to the others through shared memory.  With
// three stages these are the weights of the next chunk, so that one barrier a chunk will do; with
// two stages they are those of this chunk, and a second barrier stands between them and P V.
#include "cuda_src/common/chunk_fp64.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr bool kAhead = kStages == 3;            // whether weights are those of the next chunk
constexpr int kTiles = kMmaR * (kMmaR + 1) / 2;  // of 16 x 16 weights, up to the diagonal
static_assert(kStages == 2 || kStages == 3, "a chunk is loaded while one or two are in use");
static_assert(kMmaR == 1 || kMmaR == 2, "the place of a tile of weights follows from its number");
// Whether outputs wait for the next chunk's barrier, behind which all parts of them are there.
constexpr bool kLate = kAhead && kKeyParts > 1;
constexpr int kBuffers = kAhead ? 2 : 1;  // of weights, and of parts of outputs
// Places of what a warp with another than the first part of the key columns adds to outputs.
constexpr int kWarpParts = kMmaR * kMmaM, kPartials = (kKeyParts - 1) * kColWarps * kWarpParts;
// Warps that compute weights: where there are several parts, those that do not write outputs.
constexpr int kFirstScoreWarp = kKeyParts > 1 ? kColWarps : 0;
constexpr int kScoreWarps = kWarps - kFirstScoreWarp;

using QTile = Fp64Tile<kChunk, kDim, kExchangeOfRows>;
// A thread's part of an operand of 16 rows and columns: it has places of its own.
using LaneParts = double2[4][32];
using Outputs = double[kMmaR][2 * kMmaM][4];

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  double q[kStages][kChunk * kDim];
  double k[kStages][kChunk * kDim];
  double v[kStages][kChunk * kCols];
  LaneParts parts[kBuffers * (kTiles + kPartials)];
  ProductWork work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

FA_DEVICE LaneParts* weights_of(SharedStorage& shared, int chunk) {
  return shared.parts + chunk % kBuffers * kTiles;
}
// Of a part of the key columns, the first one excepted.
FA_DEVICE LaneParts* partial_outputs(SharedStorage& shared, int chunk, int part) {
  const int place = (part - 1) * kColWarps + tid_x_again() / 32 % kColWarps;
  return shared.parts + kBuffers * kTiles + chunk % kBuffers * kPartials + place * kWarpParts;
}

// ---------------------------------------------------------------------------------------- weights
// Some 16 x 8 products of Q K^T up to the diagonal.  `turn` says which warps compute them, so that
// each gets its turn.
FA_DEVICE void multiply_scores(const SharedStorage& shared, LaneParts* p, int stage, int turn) {
  const int lane = tid_x_again() % 32;
  const int warp = tid_x_again() / 32 - kFirstScoreWarp;
  if (warp < 0) return;
#pragma unroll 1
  for (int i = (warp + 2 * turn) % kScoreWarps; i < 2 * kTiles; i += kScoreWarps) {
    const int tile = i / 2, half = i % 2, r = tile > 0, c = tile > 1;
    double x[1][1][4];
    multiply_rows_fp64<kWideMma, QTile, KTile, kDim>(
        x, cvta_to_shared(shared.q[stage]) + QTile::lane_of_rows(16 * r),
        cvta_to_shared(shared.k[stage]) + KTile::lane_of_rows(16 * c + 8 * half));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + e / 2 * 8, key = 8 * half + lane % 4 * 2 + e % 2;
      if (r == c && key > row) x[0][0][e] = 0.0;
    }
    p[tile][2 * half][lane] = make_double2(x[0][0][0], x[0][0][1]);
    p[tile][2 * half + 1][lane] = make_double2(x[0][0][2], x[0][0][3]);
  }
}

// ---------------------------------------------------------------------------------------- outputs
// O = Q S.
FA_DEVICE void multiply_state(Outputs& o, const Fp64State& state, uint32 q_tile) {
#pragma unroll
  for (int i = 0; i < kMmaR * 2 * kMmaM; ++i) {
#pragma unroll
    for (double& sum : o[i / (2 * kMmaM)][i % (2 * kMmaM)]) sum = 0.0;
  }
  const uint32 address =
      q_tile + QTile::lane_of_rows(0) + static_cast<uint32>(warp_key() * sizeof(double));
#pragma unroll
  for (int step = 0; step < kWarpDim / 16; ++step) {
    double a[kMmaR][8];
    load_rows_part<QTile>(a, address, step);
#pragma unroll
    for (int n = 0; n < 2 * kMmaM; ++n) {
      double b[4];
      state.operand(b, step, n / 2, n % 2);
#pragma unroll
      for (int r = 0; r < kMmaR; ++r) mma_fp64<kWideMma>(o[r][n], a[r], b);
    }
  }
}

// O = O + P V.
FA_DEVICE void add_weighted(Outputs& o, const LaneParts* p, const Values& v) {
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int r = tile > 0, c = tile > 1;
    double a[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // keys 2t and 2t + 1 of half i / 2, of row g or g + 8
      const double2 two = p[tile][i][lane];
      a[i / 2 * 4 + i % 2] = two.x;
      a[i / 2 * 4 + 2 + i % 2] = two.y;
    }
#pragma unroll
    for (int n = 0; n < 2 * kMmaM; ++n) mma_fp64<kWideMma>(o[r][n], a, v[c][n / 2][n % 2]);
  }
}

// What another part of the key columns adds to the outputs.
FA_DEVICE void hand_over(LaneParts* to, const Outputs& o) {
#pragma unroll
  for (int i = 0; i < kMmaR * kMmaM * 4; ++i) {
    const double (&four)[4] = o[i / (4 * kMmaM)][i / 2 % (2 * kMmaM)];
    to[i / 4][i % 4][tid_x_again() % 32] = make_double2(four[i % 2 * 2], four[i % 2 * 2 + 1]);
  }
}
FA_DEVICE void take_over(Outputs& o, const LaneParts* from) {
#pragma unroll
  for (int i = 0; i < kMmaR * kMmaM * 4; ++i) {
    const double2 two = from[i / 4][i % 4][tid_x_again() % 32];
    double (&four)[4] = o[i / (4 * kMmaM)][i / 2 % (2 * kMmaM)];
    four[i % 2 * 2] += two.x;
    four[i % 2 * 2 + 1] += two.y;
  }
}

// Writes rows of the output; `rows` and `cols` of the chunk's and the warp's exist.
FA_DEVICE void store_outputs(const Outputs& o, double* out, int64 row_stride, int rows, int cols,
                             bool aligned) {
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int i = 0; i < 2 * kMmaR; ++i) {
    const int row = lane / 4 + 8 * i;
    if (row >= rows) continue;
    double* to = out + row * row_stride + lane % 4 * 4;
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      const double (&even)[4] = o[i / 2][2 * m], (&odd)[4] = o[i / 2][2 * m + 1];
      const double four[4] = {even[i % 2 * 2], odd[i % 2 * 2], even[i % 2 * 2 + 1],
                              odd[i % 2 * 2 + 1]};
      const int col = 16 * m + lane % 4 * 4;
      if (aligned && col + 4 <= cols) {
        *reinterpret_cast<double2*>(to + 16 * m) = make_double2(four[0], four[1]);
        *reinterpret_cast<double2*>(to + 16 * m + 2) = make_double2(four[2], four[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (col + e < cols) to[16 * m + e] = four[e];
        }
      }
    }
  }
}

// --------------------------------------------------------------------- values that are not finite
// All bits of the exponent of such a value are set (IEEE 754).
FA_DEVICE uint32 exponent_bits(double x) {
  return static_cast<uint32>(__double_as_longlong(x) >> 32) & 0x7ff00000;
}

// Whether a warp has such a value: then adding 1 to the exponent carries into the sign bit.
FA_DEVICE bool has_nonfinite(const Values& v) {
  uint32 carries = 0;
#pragma unroll
  for (int i = 0; i < kMmaR * kMmaM * 8; ++i) {
    carries |= exponent_bits(v[i / (8 * kMmaM)][i / 8 % kMmaM][i / 4 % 2][i % 4]) + 0x00100000;
  }
  return __any_sync(kFullWarp, (carries & 0x80000000) != 0);
}

// Replaces such values by 0.  `first` becomes the first row of the chunk with one, for columns 2g
// and 2g + 1.
FA_DEVICE void zero_nonfinite(Values& v, int (&first)[kMmaM][2]) {
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      first[m][h] = kChunk;
#pragma unroll
      for (int i = 0; i < 4 * kMmaR; ++i) {
        double& x = v[i / 4][m][h][i % 4];
        if (exponent_bits(x) != 0x7ff00000) continue;
        x = 0.0;
        first[m][h] = min(first[m][h], i / 4 * 16 + lane % 4 * 2 + i % 4 / 2 * 8 + i % 2);
      }
    }
  }
}

// Rows that read values which are not finite become NaN.
FA_DEVICE void poison_outputs(Outputs& o, const int (&first)[kMmaM][2]) {
  const int lane = tid_x_again() % 32;
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
        if (16 * r + lane / 4 + e / 2 * 8 >= nonfinite_from) {
          o[r][n][e] = __longlong_as_double(0x7ff8000000000000);
        }
      }
    }
  }
}

// O = O + P V of a chunk.  P is 0 where a row does not read a value, but 0 * NaN is NaN: values
// that are not finite are left out, and the rows that read them become NaN.
FA_DEVICE void add_values(Outputs& o, const LaneParts* p, Values& v, uint32 v_tile) {
  if (!has_nonfinite(v)) {
    add_weighted(o, p, v);
    return;
  }
  int first[kMmaM][2];
  zero_nonfinite(v, first);
  add_weighted(o, p, v);
  poison_outputs(o, first);
  load_values(v, v_tile);
}

// ----------------------------------------------------------------------------------------- kernel
// Copies of a chunk are one cp.async group of every thread.
FA_DEVICE void load_chunk(const ProductParams& params, SharedStorage& shared, int chunk,
                          int chunks) {
  if (chunk < chunks) {
    const ProductWork& work = shared.work;
    const int stage = chunk % kStages, begin = chunk * kChunk, col = work.tile * kCols;
    load_tile_fp64<QTile, kChunk, kThreads>(
        cvta_to_shared(shared.q[stage]), static_cast<const double*>(params.q) + work.q,
        params.q_row, begin, work.rows, params.qk_dim, params.aligned);
    load_tile_fp64<KTile, kChunk, kThreads>(
        cvta_to_shared(shared.k[stage]), static_cast<const double*>(params.k) + work.k,
        params.k_row, begin, work.rows, params.qk_dim, params.aligned);
    load_tile_fp64<VTile, kChunk, kThreads>(
        cvta_to_shared(shared.v[stage]), static_cast<const double*>(params.v) + work.v + col,
        params.v_row, begin, work.rows, params.v_dim - col, params.aligned);
  }
  cp_async_commit_group();
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_fp64(const __grid_constant__ ProductParams params) {
  // ---------------------------------------------------------------------------------------- setup
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) shared.work = product_work(params, params.segments);
  __syncthreads();
  const ProductWork& work = shared.work;  // not copied, for want of registers in the loop
  const int chunks = (work.rows + kChunk - 1) / kChunk;
  const int col = work.tile * kCols;
  load_chunk(params, shared, 0, chunks);
  if constexpr (kAhead) load_chunk(params, shared, 1, chunks);

  const bool split = params.workspace != nullptr;
  const double* initial = split ? segment_state(params, work.entry, work.segment) : params.initial;
  if (!split && initial != nullptr) initial += work.initial;
  Fp64State state;
  state.load(initial, split ? params.v_dim : params.initial_row, split ? 1 : params.initial_col,
             params.qk_dim, params.v_dim, col);
  if constexpr (kAhead) {
    cp_async_wait_group<1>();
    __syncthreads();
    if (chunks > 0) multiply_scores(shared, weights_of(shared, 0), 0, 0);
  }

  const int part = threadIdx.x / 32 / kColWarps;
  Outputs o;
  // Stores outputs of a chunk, which become whole here.
  auto finish = [&](int chunk) {
    const int row = chunk * kChunk, cols = params.v_dim - col - warp_col();
    if (part > 0 || cols <= 0) return;
#pragma unroll
    for (int other = 1; other < kKeyParts; ++other) {
      take_over(o, partial_outputs(shared, chunk, other));
    }
    store_outputs(o,
                  static_cast<double*>(params.out) + work.out + col + warp_col() +
                      static_cast<int64>(row) * params.out_row,
                  params.out_row, work.rows - row, cols, params.aligned);
  };
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait_group<0>();
    __syncthreads();  // the chunk has landed for all, and all have read the one before
    constexpr int kNext = kAhead ? 1 : 0;
    load_chunk(params, shared, chunk + 1 + kNext, chunks);
    if (kLate && chunk > 0) finish(chunk - 1);
    const int scored = chunk + kNext;
    if (scored < chunks) {
      multiply_scores(shared, weights_of(shared, scored), scored % kStages, scored);
    }
    const int stage = chunk % kStages;
    const int cols = params.v_dim - col - warp_col();  // of this warp and of those behind it
    if (cols > 0) multiply_state(o, state, cvta_to_shared(shared.q[stage]));
    if constexpr (kKeyParts > 1) {
      if (part > 0 && cols > 0) hand_over(partial_outputs(shared, chunk, part), o);
    }
    if constexpr (!kAhead) __syncthreads();
    if (cols <= 0) continue;
    const uint32 v_tile = cvta_to_shared(shared.v[stage]);
    Values v;
    load_values(v, v_tile);
    if (part == 0) {
      add_values(o, weights_of(shared, chunk), v, v_tile);
      if (!kLate) finish(chunk);
    }
    state.add(v, cvta_to_shared(shared.k[stage]));
  }

  if constexpr (kLate) {
    __syncthreads();
    if (chunks > 0) finish(chunks - 1);
  }
  if (params.state != nullptr && work.writes_state && work.segment == params.segments - 1) {
    state.store(params.state + work.state, params.state_row, params.state_col, params.qk_dim,
                params.v_dim, col);
  }
}
