// Causal product of float32 by chunks for SM90: TMA, wgmma of pairs of float16, warp
// specialisation, the state in registers.
//
// As in chunk_sm90.cu one block walks the chunks of one segment of one batch entry, for kCols
// value columns:
//   O = Q S + (Q K^T, lower triangle) V    and then    S = S + K^T V,
// but every operand is a pair of float16, x 2^s = high + low, and every product three.  The split
// warpgroup, one thread of which loads chunks, turns their rows into pairs in shared memory.  The
// score warpgroup turns Q K^T into pairs of weights P there.  Each state warpgroup owns 64 value
// columns and computes transposed: O^T = S^T Q^T + V^T P^T with S^T from its registers, and
// U = V^T K, which S^T grows by, with V^T from its registers, where all rows get one exponent.
//
// All exponents are those of rows (of value columns in S), which bring the largest of a row near
// 2^14 (cuda_src/common/split_rows.cuh).  So scores next to larger ones keep their own accuracy;
// rows of a chunk share what their outer products are added up with.  The three products of a sum
// share an accumulator: first the small ones, because tensor cores truncate what they add to.
//
// Of 64 key and 64 value columns chunk_fp32_pingpong_sm90.cu does it in less time.
#include "cuda_src/common/fp32_sm90.cuh"
#include "ptx/stmatrix.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kThreads = 128 * (kGroups + 2);
constexpr int kLowP = kBlockBytes;  // from high parts to low ones
constexpr int kInFlight = 2;        // rows of a split thread in registers
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kSplitRegisters = kGroups == 2 ? 72 : 96;
constexpr int kScoreRegisters = kGroups == 2 ? 72 : 120;
constexpr int kStateRegisters = kGroups == 2 ? 184 : 240;
static_assert(kGroups <= 2 && kMinBlocks == 1, "registers, as above");

using PTile = SharedTile<kChunk, kChunk>;
enum Array { kQ = 0, kV = 1, kK = 2 };  // in the order in which their tiles come free

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint8 raw_q[kStages][kDimBoxes * kBlockBytes];  // as they come
  uint8 raw_v[kStages][kColBoxes * kBlockBytes];
  uint8 raw_k[kStages][kDimBoxes * kBlockBytes];
  uint8 q[2 * kLowQK];  // a chunk as pairs: high parts, low parts
  uint8 v[2 * kLowV];
  uint8 k[2 * kLowQK];
  uint8 p[2 * kLowP];         // weights are done with before the keys that they are made of
  int q_exponent[kChunk];     // row i of Q is 2^-e of what its tile says
  int kv_exponent[kChunk];    // row j of K times row j of V is 2^e of what theirs say
  float p_factor[kChunk][2];  // row i of P V is so many times, twice, what the tiles say
  int nonfinite_found[4];     // whether a split warp found values that are not finite
  int nonfinite_row[kCols];   // then: the first (in reverse, last) row of each column with one
  uint64 raw_full[kStages][3], full[3], empty[3];
  uint64 p_full;
  WorkTile work;
  int64 out;  // element offset of the entry's outputs
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

using RawPipeline = PipelineState<kStages>;

// ------------------------------------------------------------------------------------ split warps
FA_DEVICE void load_array(const ProductSm90Params& params, SharedStorage& shared, int chunk,
                          int array) {
  const WorkTile& work = shared.work;
  const ProductJob& job = params.job[work.job];
  const uint64 policy = params.keep ? kEvictLast : kEvictNormal;
  const int row = first_row(params, work, chunk), at = chunk % kStages;
  uint64& full = shared.raw_full[at][array];
  if (array == kQ) {
    load_boxes<kDimBoxes>(shared.raw_q[at], job.q_map, job.q_step, work, full, policy, 0, row);
  } else if (array == kV) {
    load_boxes<kColBoxes>(shared.raw_v[at], job.v_map, job.v_step, work, full, policy, work.column,
                          row);
  } else {
    load_boxes<kDimBoxes>(shared.raw_k[at], job.k_map, job.k_step, work, full, policy, 0, row);
  }
}

FA_DEVICE void split_chunks(const ProductSm90Params& params, SharedStorage& shared) {
  const int chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  const int row = split_row<QKTile>(threadIdx.x);
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < 3 * min(kStages, chunks); ++i) load_array(params, shared, i / 3, i % 3);
  }
  __syncwarp();
  RawPipeline raw_pipe;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int from = raw_pipe.index();
    int own[kSteps], v_row_exponent[kSteps];
    auto begin = [&](int array) {
      wait(shared.raw_full[from][array], raw_pipe.parity());
      wait(shared.empty[array], ~i & 1);
    };
    // Tiles are for the tensor cores to read, and the rows' stage for the next ones.
    auto end = [&](int array) {
      fence_proxy_async_shared();
      bar_sync(1, 128);
      release_per_lane(shared.full[array]);
      if (threadIdx.x == 0 && i + kStages < chunks) load_array(params, shared, i + kStages, array);
      __syncwarp();
    };
    begin(kQ);
    split_rows<kChunk, kDimBoxes, kInFlight>(own, shared.raw_q[from], shared.q);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (threadIdx.x % 8 == 0) shared.q_exponent[row + 16 * g] = own[g];
    }
    end(kQ);
    begin(kV);
    const bool finite =
        split_rows<kChunk, kColBoxes, kInFlight>(v_row_exponent, shared.raw_v[from], shared.v);
    const bool nonfinite_found = __any_sync(kFullWarp, !finite);
    if (threadIdx.x % 32 == 0) shared.nonfinite_found[threadIdx.x / 32] = nonfinite_found;
    bar_sync(1, 128);
    if (any_nonfinite(shared.nonfinite_found))
      zero_nonfinite(shared.v, shared.nonfinite_row, threadIdx.x, reverse);
    end(kV);
    begin(kK);
    split_rows<kChunk, kDimBoxes, kInFlight>(own, shared.raw_k[from], shared.k);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (threadIdx.x % 8 == 0) shared.kv_exponent[row + 16 * g] = -own[g] - v_row_exponent[g];
    }
    end(kK);
    raw_pipe.advance();
  }
}

// ------------------------------------------------------------------------------------ score warps
FA_DEVICE void compute_scores(const ProductSm90Params& params, SharedStorage& shared, int warp) {
  const int lane = threadIdx.x % 32, chunks = shared.work.chunks, row = 16 * warp + lane / 4;
  // How far beyond the diagonal this lane's first element lies.
  const int sign = params.job[shared.work.job].reverse ? -1 : 1;
  const int diagonal_distance = sign * (lane % 4 * 2 - row);
  // Where this lane's row of the four matrices of an stmatrix.x4 lies: rows 0-7, 8-15, then the
  // same of the next 8 columns (PTX ISA 9.7.14.5.16).
  const uint32 p_lane = PTile::lane_offset(16 * warp + lane % 16, lane / 16);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    Outputs s;
    wait(shared.full[kQ], i & 1);
    wait(shared.full[kK], i & 1);
    gemm_split_abt(s, shared.q, shared.k);
    const int* kv_exponent = shared.kv_exponent + lane % 4 * 2;
    wgmma_wait_group<0>();

    // The exponent of a row is that of its largest weight.
    int row_exponent[2] = {-1000, -1000};
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (diagonal_distance + sign * (8 * v + e % 2 - e / 2 * 8) > 0) s[v][e] = 0.0f;
        const int exponent = static_cast<int>(__float_as_uint(s[v][e]) >> 23 & 255) - 127;
        if (s[v][e] != 0.0f)
          row_exponent[e / 2] = max(row_exponent[e / 2], exponent + kv_exponent[8 * v + e % 2]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_exponent[h] = max(row_exponent[h], __shfl_xor_sync(kFullWarp, row_exponent[h], 1));
      row_exponent[h] = max(row_exponent[h], __shfl_xor_sync(kFullWarp, row_exponent[h], 2));
      if (lane % 4 == 0) {
        // All of it at once may be more than a float32 holds.
        const int exponent = row_exponent[h] - 14 - shared.q_exponent[row + 8 * h];
        const int bounded = max(-252, min(252, exponent));
        shared.p_factor[row + 8 * h][0] = power_of_two(bounded / 2);
        shared.p_factor[row + 8 * h][1] = power_of_two(bounded - bounded / 2);
      }
    }
    const uint32 p_tile = cvta_to_shared(shared.p) + p_lane;
#pragma unroll
    for (int v = 0; v < 8; v += 2) {
      SplitPair pairs[4];  // [2 * (v % 2) + h]
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int shift = kv_exponent[8 * (v + n / 2) + e] + 14 - row_exponent[n % 2];
          x[e] = s[v + n / 2][n % 2 * 2 + e] * power_of_two(max(-127, min(127, shift)));
        }
        pairs[n] = split_near(x[0], x[1]);
      }
      const uint32 to = PTile::at(p_tile, 0, v / 2);
      stmatrix_x4(to, pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high);
      stmatrix_x4(to + kLowP, pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low);
    }
    fence_proxy_async_shared();
    release_per_lane(shared.p_full);
    release_per_lane(shared.empty[kQ]);
    release_per_lane(shared.empty[kK]);
  }
}

// ---------------------------------------------------------------------------------- state, outputs
// O^T = V^T P^T, started.
FA_DEVICE void gemm_pv(Outputs& o, const uint8* v_tile, const uint8* p_tile) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(v_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(p_tile), 0);
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < 3; ++part) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      wgmma_m64k16_ss<false, 64, kMnMajor, kKMajor>(
          o, a + (step * 16 * 128 + (part == 0 ? kLowV : 0)) / 16,
          b + (step * 32 + (part == 1 ? kLowP : 0)) / 16, part + step > 0);
    }
  }
  wgmma_commit_group();
}

FA_DEVICE void store_outputs(const ProductSm90Params& params, const SharedStorage& shared,
                             const Outputs& o, int chunk, int column) {
  const ProductJob& job = params.job[shared.work.job];
  const int row = first_row(params, shared.work, chunk) + threadIdx.x % 4 * 2;
  float* to = job.out + shared.out + static_cast<int64>(row) * job.out_row + column;
  // Eight lanes write 32 bytes of a row: all of what memory moves at once.
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool valid = static_cast<uint32>(row + 8 * v + j) < static_cast<uint32>(params.length);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (valid && column + 8 * h < job.v_dim) to[j * job.out_row + 8 * h] = o[v][2 * h + j];
      }
    }
    to += 8 * job.out_row;
  }
}

FA_DEVICE void compute_outputs(const ProductSm90Params& params, SharedStorage& shared, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const WorkTile& work = shared.work;  // left there: registers are short in the loop
  const int chunks = work.chunks;
  const ProductJob& job = params.job[work.job];
  const bool reverse = job.reverse;
  State s;
  {
    const int column = work.column + 64 * group;
    const bool split = job.workspace != nullptr;
    const int64 row = split ? job.v_dim : job.initial_row, col = split ? 1 : job.initial_col;
    const float* from = split ? segment_state(params, work, work.segment) : job.initial;
    if (from != nullptr) from += (split ? 0 : work.initial) + column * col;
    load_state(s, from, row, col, job.qk_dim, job.v_dim - column);
  }
  int exponents[2];
  state_exponents(exponents, s);
  Operand<kDim / 16> high, low;
  Outputs o, o_intra, u;
  Operand<kSteps> values, values_low;

#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    split_state(s, exponents, high, low);
    wait(shared.full[kQ], i & 1);
    gemm_split<kKMajor, kDim / 16>(o, high, low, shared.q, kLowQK,
                                   [](int step) { return step / 4 * kBlockBytes + step % 4 * 32; });
    wgmma_wait_group<0>();
    wait(shared.full[kV], i & 1);
    wait(shared.p_full, i & 1);
    gemm_pv(o_intra, &shared.v[group * kBlockBytes], shared.p);
    const bool nonfinite_found = any_nonfinite(shared.nonfinite_found);
    int nonfinite_row[2] = {0, 0};
    if (nonfinite_found) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        nonfinite_row[h] = shared.nonfinite_row[64 * group + 16 * warp + lane / 4 + 8 * h];
      }
    }
    // Half of the exponents twice: all of them at once may be more than a float32 holds.
    const float column_factor[2] = {power_of_two(-exponents[0] / 2),
                                    power_of_two(-exponents[1] / 2)};
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 8 * v + lane % 4 * 2 + j;
        const float row_factor = power_of_two(-shared.q_exponent[row] / 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = row_factor * column_factor[h];
          o[v][2 * h + j] = o[v][2 * h + j] * factor * factor;
        }
      }
    }
    release_per_lane(shared.empty[kQ]);
    wgmma_wait_group<0>();
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = 8 * v + lane % 4 * 2 + j;
        const float factor = shared.p_factor[row][0], rest = shared.p_factor[row][1];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = o[v][2 * h + j];
          x = fmaf(o_intra[v][2 * h + j] * factor, rest, x);
          if (nonfinite_found && (reverse ? row <= nonfinite_row[h] : row >= nonfinite_row[h])) {
            x = __int_as_float(0x7fc00000);  // it reads what is not finite
          }
        }
      }
    }

    store_outputs(params, shared, o, i, work.column + 64 * group + 16 * warp + lane / 4);

    // The sums of a chunk, apart from the state: rows of V times what brings K's to one exponent.
    load_values(values, values_low, shared.v, 4 * group + warp);
    release_per_lane(shared.empty[kV]);
    wait(shared.full[kK], i & 1);
    const int most = scale_to_common_exponent(values, values_low, shared.kv_exponent);
    const float factor = power_of_two(most / 2), rest = power_of_two(most - most / 2);
#pragma unroll
    for (int block = 0; block < kDimBlocks; ++block) {
      // Of 64 key columns.
      gemm_split<kMnMajor, kSteps>(u, values, values_low, shared.k + block * kBlockBytes, kLowQK,
                                   [](int step) { return step * 16 * 128; });
      wgmma_wait_group<0>();
      if (block == kDimBlocks - 1) release_per_lane(shared.empty[kK]);
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        float& x = s[8 * block + e / 4][e % 4];
        x = fmaf(u[e / 4][e % 4] * factor, rest, x);
      }
    }
    if (nonfinite_found) poison_sums(s, nonfinite_row);
    state_exponents(exponents, s);
  }

  if (job.state != nullptr && work.writes_state && work.segment == params.segments - 1) {
    const int column = work.column + 64 * group;
    store_state(s, job.state + work.state + column * job.state_col, job.state_row, job.state_col,
                job.qk_dim, job.v_dim - column);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_fp32_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3 * kStages; ++i) init(shared.raw_full[i / 3][i % 3], 1);
    for (int i = 0; i < 3; ++i) {
      init(shared.full[i], kArrivalsPerWarp * 4);
      init(shared.empty[i], kArrivalsPerWarp * (4 * kGroups + (i == kV ? 0 : 4)));
    }
    init(shared.p_full, kArrivalsPerWarp * 4);
    fence_mbarrier_init();
  } else if (threadIdx.x == 32) {
    shared.work = work_tile_of_block(params, params.segments);
    shared.out = out_offset(params, shared.work);
  }
  __syncthreads();
  if (shared.work.chunks == 0) return;

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp < 4) {
    setmaxnreg_dec<kSplitRegisters>();
    split_chunks(params, shared);
  } else if (warp < 8) {
    setmaxnreg_dec<kScoreRegisters>();
    compute_scores(params, shared, warp - 4);
  } else {
    setmaxnreg_inc<kStateRegisters>();
    compute_outputs(params, shared, warp / 4 - 2);
  }
}
