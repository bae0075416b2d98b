// Causal product of float32 by chunks for SM90: TMA, wgmma of pairs of float16, warp
// specialisation, the state in registers.
//
// As in chunk_sm90.cu, a block walks over the chunks of one segment of one batch entry, for kCols
// value columns:
//   O = Q S + tril(Q K^T) V    and then    S = S + K^T V.
// Here every operand is a pair of float16, x 2^s = high + low, and every product is three.  The
// split warpgroup, one thread of which loads chunks, turns their rows into pairs in shared memory.
// The score warpgroup turns Q K^T into weights P, pairs in shared memory too.  Each state warpgroup
// owns 64 value columns and computes transposed products:
//   O^T = S^T Q^T + V^T P^T, with S^T from its registers, and
//   U = V^T K, with V^T from its registers, which is then added: S^T = S^T + U.
//
// Every row of Q, K, V and P has an exponent, and so has every value column of S.  It brings the
// largest number of the row near 2^14 (cuda_src/common/split_rows.cuh), so a row of small numbers
// is as accurate as one of large numbers.  Only in U do all rows of a chunk share one exponent.
// The three products of a sum share an accumulator.  The small ones come first, because tensor
// cores truncate what they add.
//
// For 64 key and 64 value columns chunk_fp32_pingpong_sm90.cu takes less time.
#include "cuda_src/common/fp32_sm90.cuh"
#include "ptx/stmatrix.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kThreads = 128 * (kGroups + 2);
constexpr int kLowP = kBlockBytes;  // bytes from high parts to low ones
constexpr int kInFlight = 2;        // rows that a split thread holds in registers at once
// Registers of a thread: a multiple of 8 (PTX ISA 9.7.19.5 "setmaxnreg"), at most 65,536 for all
// threads of a block.
constexpr int kSplitRegisters = kGroups == 2 ? 72 : 96;
constexpr int kScoreRegisters = kGroups == 2 ? 72 : 120;
constexpr int kStateRegisters = kGroups == 2 ? 184 : 240;
static_assert(kGroups <= 2 && kMinBlocks == 1, "the registers above are for these");

using PTile = SharedTile<kChunk, kChunk>;
enum Array { kQ = 0, kV = 1, kK = 2 };  // in the order in which their tiles become free

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint8 raw_q[kStages][kDimBoxes * kBlockBytes];  // float32, as loaded
  uint8 raw_v[kStages][kColBoxes * kBlockBytes];
  uint8 raw_k[kStages][kDimBoxes * kBlockBytes];
  uint8 q[2 * kLowQK];  // a chunk as pairs: high parts, low parts
  uint8 v[2 * kLowV];
  uint8 k[2 * kLowQK];
  uint8 p[2 * kLowP];         // free again before the keys that it is made from
  int q_exponent[kChunk];     // row i of Q is 2^-e times its tile's
  int kv_exponent[kChunk];    // row j of K times row j of V is 2^e times that of the tiles
  float p_factor[kChunk][2];  // row i of P V is that of the tiles times both factors
  // Whether each split warp found values that are not finite, and then for each column the first
  // row (in reverse, the last one) with such a value.
  int nonfinite_found[4];
  int nonfinite_row[kCols];
  uint64 raw_full[kStages][3], full[3], empty[3];
  uint64 p_full;
  WorkTile work;
  int64 out;  // element offset of the entry's outputs
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

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
    int row_exponents[kSteps], v_row_exponents[kSteps];
    auto begin = [&](int array) {
      wait(shared.raw_full[from][array], raw_pipe.parity());
      wait(shared.empty[array], ~i & 1);
    };
    // The tile is handed to the tensor cores.  All threads have read the stage, so the rows of a
    // later chunk may be loaded into it.
    auto end = [&](int array) {
      fence_proxy_async_shared();
      bar_sync(1, 128);
      release_per_lane(shared.full[array]);
      if (threadIdx.x == 0 && i + kStages < chunks) load_array(params, shared, i + kStages, array);
      __syncwarp();
    };
    begin(kQ);
    split_rows<kChunk, kDimBoxes, kInFlight>(row_exponents, shared.raw_q[from], shared.q);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (threadIdx.x % 8 == 0) shared.q_exponent[row + 16 * g] = row_exponents[g];
    }
    end(kQ);
    begin(kV);
    const bool finite =
        split_rows<kChunk, kColBoxes, kInFlight>(v_row_exponents, shared.raw_v[from], shared.v);
    const bool nonfinite_found = __any_sync(kFullWarp, !finite);
    if (threadIdx.x % 32 == 0) shared.nonfinite_found[threadIdx.x / 32] = nonfinite_found;
    bar_sync(1, 128);
    if (any_nonfinite(shared.nonfinite_found))
      zero_nonfinite(shared.v, shared.nonfinite_row, threadIdx.x, reverse);
    end(kV);
    begin(kK);
    split_rows<kChunk, kDimBoxes, kInFlight>(row_exponents, shared.raw_k[from], shared.k);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (threadIdx.x % 8 == 0)
        shared.kv_exponent[row + 16 * g] = -row_exponents[g] - v_row_exponents[g];
    }
    end(kK);
    raw_pipe.advance();
  }
}

// ------------------------------------------------------------------------------------ score warps
// Zeroes scores on the far side of the diagonal, and finds for each of this lane's two rows the
// exponent of its largest weight, score times 2^kv_exponent.
FA_DEVICE void mask_scores(Outputs& s, int (&row_exponent)[2], const int* kv_exponent,
                           int diagonal_distance, int sign) {
  row_exponent[0] = row_exponent[1] = -1000;
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (diagonal_distance + sign * (8 * v + e % 2 - e / 2 * 8) > 0) s[v][e] = 0.0f;
      // IEEE 754: the exponent of a float32.
      const int exponent = static_cast<int>(__float_as_uint(s[v][e]) >> 23 & 255) - 127;
      if (s[v][e] != 0.0f)
        row_exponent[e / 2] = max(row_exponent[e / 2], exponent + kv_exponent[8 * v + e % 2]);
    }
  }
}

// The factor of a row of P V, as two: float32 may not hold all of it.
FA_DEVICE void write_factors(float (&p_factor)[2], int exponent) {
  const int bounded = max(-252, min(252, exponent));
  p_factor[0] = power_of_two(bounded / 2);
  p_factor[1] = power_of_two(bounded - bounded / 2);
}

// Writes a warp's 16 rows of weights as pairs; `p_lane` is this lane's address for stmatrix.
FA_DEVICE void write_weights(uint32 p_lane, const Outputs& s, const int (&row_exponent)[2],
                             const int* kv_exponent) {
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
    const uint32 to = PTile::at(p_lane, 0, v / 2);
    stmatrix_x4(to, pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high);
    stmatrix_x4(to + kLowP, pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low);
  }
}

FA_DEVICE void compute_scores(const ProductSm90Params& params, SharedStorage& shared, int warp) {
  const int lane = threadIdx.x % 32, chunks = shared.work.chunks, row = 16 * warp + lane / 4;
  // How far this lane's first score lies beyond the diagonal.
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
    gemm_split_abt(s, shared.q, shared.k);  // Q K^T
    const int* kv_exponent = shared.kv_exponent + lane % 4 * 2;
    wgmma_wait_group<0>();
    int row_exponent[2];
    mask_scores(s, row_exponent, kv_exponent, diagonal_distance, sign);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_exponent[h] = max_over_lanes(row_exponent[h]);
      if (lane % 4 == 0) {
        write_factors(shared.p_factor[row + 8 * h],
                      row_exponent[h] - 14 - shared.q_exponent[row + 8 * h]);
      }
    }
    write_weights(cvta_to_shared(shared.p) + p_lane, s, row_exponent, kv_exponent);
    fence_proxy_async_shared();
    release_per_lane(shared.p_full);
    release_per_lane(shared.empty[kQ]);
    release_per_lane(shared.empty[kK]);
  }
}

// ---------------------------------------------------------------------------------- state, outputs
// Starts O^T = V^T P^T.
FA_DEVICE void gemm_pv(Outputs& o, const uint8* v_tile, const uint8* p_tile) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(v_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(p_tile), 0);
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < 3; ++part) {  // low * high, high * low, high * high
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      wgmma_m64k16_ss<false, 64, kMnMajor, kKMajor>(
          o, a + (step * 16 * 128 + (part == 0 ? kLowV : 0)) / 16,
          b + (step * 32 + (part == 1 ? kLowP : 0)) / 16, part + step > 0);
    }
  }
  wgmma_commit_group();
}

// Multiplies S^T Q^T by the powers of two of rows of Q and columns of S.  Half of the exponents is
// applied twice, because float32 may not hold all of it.
FA_DEVICE void scale_outputs(Outputs& o, const int (&exponents)[2], const int* q_exponent,
                             int lane) {
  const float column_factor[2] = {power_of_two(-exponents[0] / 2), power_of_two(-exponents[1] / 2)};
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = 8 * v + lane % 4 * 2 + j;
      const float row_factor = power_of_two(-q_exponent[row] / 2);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = row_factor * column_factor[h];
        o[v][2 * h + j] = o[v][2 * h + j] * factor * factor;
      }
    }
  }
}

// O^T += V^T P^T times the factors of rows of P.  Rows that read values which are not finite become
// NaN.
FA_DEVICE void add_intra_outputs(Outputs& o, const Outputs& o_intra, const SharedStorage& shared,
                                 bool nonfinite_found, const int (&nonfinite_row)[2], bool reverse,
                                 int lane) {
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
          x = __int_as_float(0x7fc00000);
        }
      }
    }
  }
}

FA_DEVICE void store_outputs(const ProductSm90Params& params, const SharedStorage& shared,
                             const Outputs& o, int chunk, int column) {
  const ProductJob& job = params.job[shared.work.job];
  const int row = first_row(params, shared.work, chunk) + threadIdx.x % 4 * 2;
  float* to = job.out + shared.out + static_cast<int64>(row) * job.out_row + column;
  // Eight lanes write 32 bytes of a row, the unit of memory transfers.
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
  const WorkTile& work = shared.work;  // not copied, for want of registers in the loop
  const int chunks = work.chunks;
  const ProductJob& job = params.job[work.job];
  const bool reverse = job.reverse;
  State s;
  load_first_state(s, job, params, work, work.column + 64 * group);
  int exponents[2];
  state_exponents(exponents, s);
  Operand<kDim / 16> high, low;  // S^T
  Outputs o, o_intra, u;
  Operand<kSteps> values, values_low;  // V^T

#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    // O^T = S^T Q^T + V^T P^T
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
    scale_outputs(o, exponents, shared.q_exponent, lane);
    release_per_lane(shared.empty[kQ]);
    wgmma_wait_group<0>();
    add_intra_outputs(o, o_intra, shared, nonfinite_found, nonfinite_row, reverse, lane);
    store_outputs(params, shared, o, i, work.column + 64 * group + 16 * warp + lane / 4);

    // S^T = S^T + U with U = V^T K, 64 key columns at a time
    load_values(values, values_low, shared.v, 4 * group + warp);
    release_per_lane(shared.empty[kV]);
    wait(shared.full[kK], i & 1);
    const int exponent = scale_to_common_exponent(values, values_low, shared.kv_exponent);
    const float factor = power_of_two(exponent / 2), rest = power_of_two(exponent - exponent / 2);
#pragma unroll
    for (int block = 0; block < kDimBlocks; ++block) {
      gemm_split<kMnMajor, kSteps>(u, values, values_low, shared.k + block * kBlockBytes, kLowQK,
                                   [](int step) { return step * 16 * 128; });
      wgmma_wait_group<0>();
      if (block == kDimBlocks - 1) release_per_lane(shared.empty[kK]);
      add_outer_products(s, u, block, factor, rest);
    }
    if (nonfinite_found) poison_sums(s, nonfinite_row);
    state_exponents(exponents, s);
  }
  store_final_state(s, job, params, work, work.column + 64 * group);
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
