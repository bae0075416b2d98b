// Causal product of float32 by chunks for SM90, for 64 key and 64 value columns: two warpgroups
// alternate at scores and outputs, and a third one computes the state.
//
// As chunk_fp32_sm90.cu, with the same pairs of float16 and the same exponents:
//   O = Q S + tril(Q K^T) V    and then    S = S + K^T V.
// There the state warpgroup also computes the outputs, after the score warpgroup.  Here it only
// computes U = V^T K, adds it to S^T in its registers, S^T = S^T + U, and writes S as pairs to
// shared memory, ahead of the outputs.  Chunk i belongs to output warpgroup i % 2.  Its scores stay
// in registers, where they become the weights P and the A operand of P V, while Q S is computed.  A
// thread holds outputs of two rows, so the factors of rows of P stay in registers too.
//
// Pairs take the place of the rows that they are made from, so at any time kStages chunks are
// loaded, split or multiplied.  The state warpgroup also loads: it is the last one to finish a
// chunk, but for the outputs, and the outputs that a stage waits for are those of the chunk before.
#include "cuda_src/common/fp32_sm90.cuh"
#include "ptx/stmatrix.cuh"

// -------------------------------------------------------------------------------------- constants
// Warpgroups that compute scores and outputs, and stages for the states that they read.
constexpr int kPingPong = 2;
constexpr int kThreads = 128 * (kPingPong + 2);
// Chunks whose loads start before the first one is added to the state.
constexpr int kPrefetchChunks = kStages - 1;
constexpr int kInFlight = 4;  // rows that a split thread holds in registers at once
// Registers of a thread: a multiple of 8 (PTX ISA 9.7.19.5 "setmaxnreg"), at most 65,536 for all
// threads of a block.
constexpr int kSplitRegisters = 72, kOutputRegisters = 144, kStateRegisters = 152;
static_assert(kDim == 64 && kCols == 64 && kMinBlocks == 1, "the registers above are for these");
static_assert(kPrefetchChunks >= 2, "one chunk is loaded while another one is split");

using STile = SharedTile<kCols, kDim>;
enum Array { kQ = 0, kK = 1, kV = 2 };  // in the order in which they are needed

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint8 q[kStages][2 * kLowQK];  // float32 as loaded, then pairs: high parts, low parts
  uint8 k[kStages][2 * kLowQK];
  uint8 v[kStages][2 * kLowV];
  uint8 s[kPingPong][2 * kBlockBytes];  // S^T before a chunk
  float s_factor[kPingPong][kCols];     // column of S: its tile's times this factor, twice
  int kv_exponent[kStages][kChunk];     // row j of K times row j of V is 2^e times their tiles'
  short q_exponent[kStages][kChunk];    // row i of Q is 2^-e times its tile's
  // Whether each split warp found values that are not finite, and for each column the first such
  // row if one of them did (see zero_nonfinite).
  signed char nonfinite_row[kStages][kCols];
  int nonfinite_found[kStages][4];
  uint64 raw_full[kStages][3], full[kStages][3], empty[kStages];
  uint64 s_full[kPingPong], s_empty[kPingPong];
  WorkTile work;
  int64 out;  // element offset of the entry's outputs
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

using ChunkPipeline = PipelineState<kStages>;
using StatePipeline = PipelineState<kPingPong>;

// ------------------------------------------------------------------------------------------ loads
FA_DEVICE void load(const ProductSm90Params& params, SharedStorage& shared, int chunk) {
  const WorkTile& work = shared.work;
  const ProductJob& job = params.job[work.job];
  const uint64 policy = params.keep ? kEvictLast : kEvictNormal;
  const int row = first_row(params, work, chunk), at = chunk % kStages;
  load_boxes<kDimBoxes>(shared.q[at], job.q_map, job.q_step, work, shared.raw_full[at][kQ], policy,
                        0, row);
  load_boxes<kDimBoxes>(shared.k[at], job.k_map, job.k_step, work, shared.raw_full[at][kK], policy,
                        0, row);
  load_boxes<kColBoxes>(shared.v[at], job.v_map, job.v_step, work, shared.raw_full[at][kV], policy,
                        work.column, row);
}

// ------------------------------------------------------------------------------------ split warps
FA_DEVICE void split_chunks(const ProductSm90Params& params, SharedStorage& shared) {
  const int chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  const int thread = threadIdx.x, row = split_row<QKTile>(thread);
  ChunkPipeline pipe;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int stage = pipe.index();
    int row_exponents[kSteps], v_row_exponents[kSteps];
    auto end = [&](int array) {  // hands the tile to the tensor cores
      fence_proxy_async_shared();
      release_per_lane(shared.full[stage][array]);
    };
    wait(shared.raw_full[stage][kQ], pipe.parity());
    split_rows<kChunk, kDimBoxes, kInFlight, true>(row_exponents, shared.q[stage], shared.q[stage]);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (thread % 8 == 0)
        shared.q_exponent[stage][row + 16 * g] = static_cast<short>(row_exponents[g]);
    }
    end(kQ);
    wait(shared.raw_full[stage][kK], pipe.parity());
    split_rows<kChunk, kDimBoxes, kInFlight, true>(row_exponents, shared.k[stage], shared.k[stage]);
    end(kK);
    wait(shared.raw_full[stage][kV], pipe.parity());
    const bool finite = split_rows<kChunk, kColBoxes, kInFlight, true>(
        v_row_exponents, shared.v[stage], shared.v[stage]);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (thread % 8 == 0)
        shared.kv_exponent[stage][row + 16 * g] = -row_exponents[g] - v_row_exponents[g];
    }
    const bool nonfinite_found = __any_sync(kFullWarp, !finite);
    if (thread % 32 == 0) shared.nonfinite_found[stage][thread / 32] = nonfinite_found;
    bar_sync(1, 128);
    if (any_nonfinite(shared.nonfinite_found[stage])) {
      zero_nonfinite(shared.v[stage], shared.nonfinite_row[stage], thread, reverse);
    }
    end(kV);
    pipe.advance();
  }
}

// -------------------------------------------------------------------------------- scores, outputs
// Zeroes scores on the far side of the diagonal.
FA_DEVICE void mask_noncausal(Outputs& s, int diagonal_distance, int sign) {
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (diagonal_distance + sign * (8 * v + e % 2 - e / 2 * 8) > 0) s[v][e] = 0.0f;
    }
  }
}

FA_DEVICE void split_weights(Operand<kSteps>& high, Operand<kSteps>& low, int v, int h, float x,
                             float y) {
  const SplitPair pair = split_near(x, y);
  high[v / 2][v % 2 * 2 + h] = pair.high;
  low[v / 2][v % 2 * 2 + h] = pair.low;
}

// split_scores for exponents kv_exponent in any range.
FA_DEVICE void split_scores_of_far_exponents(Operand<kSteps>& high, Operand<kSteps>& low,
                                             int (&row_exponent)[2], const Outputs& s,
                                             const int* kv_exponent) {
  row_exponent[0] = row_exponent[1] = -1000;
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int exponent = static_cast<int>(__float_as_uint(s[v][e]) >> 23 & 255) - 127;
      if (s[v][e] != 0.0f)
        row_exponent[e / 2] = max(row_exponent[e / 2], exponent + kv_exponent[8 * v + e % 2]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) row_exponent[h] = max_over_lanes(row_exponent[h]);
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int shift = kv_exponent[8 * v + e] + 14 - row_exponent[h];
        x[e] = s[v][2 * h + e] * power_of_two(max(-127, min(127, shift)));
      }
      split_weights(high, low, v, h, x[0], x[1]);
    }
  }
}

// Weights P, scores times 2^kv_exponent, as pairs.  `row_exponent` becomes the exponent of the
// largest weight of each row.  `most`, `least`: the largest and smallest kv_exponent of the chunk.
FA_DEVICE void split_scores(Operand<kSteps>& high, Operand<kSteps>& low, int (&row_exponent)[2],
                            Outputs& s, const int* kv_exponent, int most, int least) {
  // Scores are 0 or 2^-48 to 2^34, so in this range of exponents a float32 holds them times
  // 2^(kv_exponent - most).
  if (most - least <= 64) {
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[v][e] *= power_of_two(kv_exponent[8 * v + e % 2] - most);
        largest[e / 2] = fmaxf(largest[e / 2], fabsf(s[v][e]));
      }
    }
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // IEEE 754: the exponent of a float32.
      const int exponent =
          static_cast<int>(__float_as_uint(max_over_lanes(largest[h])) >> 23) - 127;
      scale[h] = power_of_two(min(127, 14 - exponent));
      row_exponent[h] = exponent + most;
    }
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        split_weights(high, low, v, h, s[v][2 * h] * scale[h], s[v][2 * h + 1] * scale[h]);
      }
    }
    return;
  }
  split_scores_of_far_exponents(high, low, row_exponent, s, kv_exponent);
}

// The smallest exponent of a chunk.
FA_DEVICE int least_exponent(const int* exponents) {
  int least = 512;
#pragma unroll
  for (int i = 0; i < kChunk; i += 32) least = min(least, exponents[i + threadIdx.x % 32]);
  return static_cast<int>(512 - __reduce_max_sync(kFullWarp, static_cast<uint32>(512 - least)));
}

FA_DEVICE void store_rows(const ProductSm90Params& params, const SharedStorage& shared,
                          const Outputs& o, int first, int thread) {
  const ProductJob& job = params.job[shared.work.job];
  const int row = first + thread / 32 * 16 + thread % 32 / 4;
  const int column = shared.work.column + thread % 4 * 2, columns = job.v_dim - column;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Four lanes write 32 bytes of a row, the unit of memory transfers.
    if (static_cast<uint32>(row + 8 * h) >= static_cast<uint32>(params.length)) continue;
    float* to = job.out + shared.out + static_cast<int64>(row + 8 * h) * job.out_row + column;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      if (8 * v < columns) {
        *reinterpret_cast<float2*>(to + 8 * v) = make_float2(o[v][2 * h], o[v][2 * h + 1]);
      }
    }
  }
}

FA_DEVICE void compute_outputs(const ProductSm90Params& params, SharedStorage& shared,
                               int pingpong_index) {
  const int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  const int chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  // How far beyond the diagonal this lane's first element lies.
  const int sign = reverse ? -1 : 1, diagonal_distance = sign * (lane % 4 * 2 - row);
#pragma unroll 1
  for (int i = pingpong_index; i < chunks; i += kPingPong) {
    const ChunkPipeline pipe{static_cast<uint32>(i)};
    const StatePipeline state{static_cast<uint32>(i)};
    const int at = pipe.index(), state_stage = state.index();
    Outputs s, o, o_intra;
    Operand<kSteps> high, low;
    float factor[2][2], row_factor[2];
    int q_exponent[2];
    wait(shared.full[at][kQ], pipe.parity());
    wait(shared.full[at][kK], pipe.parity());
    gemm_split_abt(s, shared.q[at], shared.k[at]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      q_exponent[h] = shared.q_exponent[at][row + 8 * h];
      row_factor[h] = power_of_two(-q_exponent[h] / 2);
    }
    wait(shared.full[at][kV], pipe.parity());
    wait(shared.s_full[state_stage], state.parity());
    wgmma_wait_group<0>();
    gemm_split_abt(o, shared.q[at], shared.s[state_stage]);
    mask_noncausal(s, diagonal_distance, sign);
    int row_exponent[2];
    split_scores(high, low, row_exponent, s, shared.kv_exponent[at] + lane % 4 * 2,
                 largest_exponent<kChunk>(shared.kv_exponent[at]),
                 least_exponent(shared.kv_exponent[at]));
    gemm_split<kMnMajor, kSteps>(o_intra, high, low, shared.v[at], kLowV,
                                 [](int step) { return step * 16 * 128; });
    // What sums of weights are multiplied by: all of it at once may be more than a float32 holds.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int exponent = max(-252, min(252, row_exponent[h] - 14 - q_exponent[h]));
      factor[h][0] = power_of_two(exponent / 2);
      factor[h][1] = power_of_two(exponent - exponent / 2);
    }
    wgmma_wait_group<1>();
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float column_factor = shared.s_factor[state_stage][8 * v + lane % 4 * 2 + j];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float own_factor = row_factor[h] * column_factor;
          o[v][2 * h + j] = o[v][2 * h + j] * own_factor * own_factor;
        }
      }
    }
    release_per_lane(shared.s_empty[state_stage]);
    wgmma_wait_group<0>();
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[v][e] = fmaf(o_intra[v][e] * factor[e / 2][0], factor[e / 2][1], o[v][e]);
      }
    }
    if (any_nonfinite(shared.nonfinite_found[at])) {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int nonfinite_row = shared.nonfinite_row[at][8 * v + lane % 4 * 2 + e % 2];
          const int own_factor = row + e / 2 * 8;
          // It reads what is not finite.
          if (reverse ? own_factor <= nonfinite_row : own_factor >= nonfinite_row)
            o[v][e] = __int_as_float(0x7fc00000);
        }
      }
    }
    const int first = first_row(params, shared.work, i);
    release_per_lane(shared.empty[at]);
    store_rows(params, shared, o, first, thread);
  }
}

// ------------------------------------------------------------------------------------------ state
// Writes S as pairs to a stage, where the output warpgroups read it.
FA_DEVICE void write_state(SharedStorage& shared, const State& s, const int (&exponents)[2],
                           const StatePipeline& state) {
  const int state_stage = state.index(), lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float scale[2] = {power_of_two(exponents[0]), power_of_two(exponents[1])};
  // Where this lane's row of the four matrices of an stmatrix.x4 lies: rows 0-7, 8-15, then the
  // same of the next 8 columns (PTX ISA 9.7.14.5.16).
  const uint32 tile =
      cvta_to_shared(shared.s[state_stage]) + STile::lane_offset(16 * warp + lane % 16, lane / 16);
  wait(shared.s_empty[state_stage], state.parity() ^ 1);
#pragma unroll
  for (int v = 0; v < kMmaE; v += 2) {
    SplitPair pairs[4];  // [2 * (v % 2) + h]
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* two = &s[v + n / 2][n % 2 * 2];
      pairs[n] = split_near(two[0] * scale[n % 2], two[1] * scale[n % 2]);
    }
    const uint32 to = STile::at(tile, 0, v / 2);
    stmatrix_x4(to, pairs[0].high, pairs[1].high, pairs[2].high, pairs[3].high);
    stmatrix_x4(to + kBlockBytes, pairs[0].low, pairs[1].low, pairs[2].low, pairs[3].low);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int column = 16 * warp + lane / 4 + 8 * h;
    if (lane % 4 == 0) shared.s_factor[state_stage][column] = power_of_two(-exponents[h] / 2);
  }
  fence_proxy_async_shared();
  release_per_lane(shared.s_full[state_stage]);
}

FA_DEVICE void compute_state(const ProductSm90Params& params, SharedStorage& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const WorkTile& work = shared.work;
  const int chunks = work.chunks;
  const ProductJob& job = params.job[work.job];
  const bool is_loader = lane == 0 && warp == 0;
  if (is_loader) {
#pragma unroll 1
    for (int i = 0; i < min(kPrefetchChunks, chunks); ++i) load(params, shared, i);
  }
  __syncwarp();
  State s;
  load_first_state(s, job, params, work, work.column);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const ChunkPipeline pipe{static_cast<uint32>(i)};
    const StatePipeline state{static_cast<uint32>(i)};
    const int stage = pipe.index();
    Operand<kSteps> values, values_low;  // V^T
    Outputs u;
    int exponents[2];
    wait(shared.full[stage][kK], pipe.parity());
    wait(shared.full[stage][kV], pipe.parity());
    const bool nonfinite_found = any_nonfinite(shared.nonfinite_found[stage]);
    load_values(values, values_low, shared.v[stage], warp);
    const int exponent = scale_to_common_exponent(values, values_low, shared.kv_exponent[stage]);
    const float factor = power_of_two(exponent / 2), rest = power_of_two(exponent - exponent / 2);
    gemm_split<kMnMajor, kSteps>(u, values, values_low, shared.k[stage], kLowQK,
                                 [](int step) { return step * 16 * 128; });  // U = V^T K
    state_exponents(exponents, s);
    write_state(shared, s, exponents, state);
    int nonfinite_row[2] = {0, 0};
    if (nonfinite_found) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        nonfinite_row[h] = shared.nonfinite_row[stage][16 * warp + lane / 4 + 8 * h];
    }
    wgmma_wait_group<0>();
    release_per_lane(shared.empty[stage]);
    add_outer_products(s, u, 0, factor, rest);  // S^T = S^T + U
    if (nonfinite_found) poison_sums(s, nonfinite_row);
    // This waits for the outputs of the chunk before, for which the state after the next one would
    // have to wait anyway.
    if (is_loader && i + kPrefetchChunks < chunks) {
      const ChunkPipeline later_pipe{static_cast<uint32>(i + kPrefetchChunks)};
      wait(shared.empty[later_pipe.index()], later_pipe.parity() ^ 1);
      load(params, shared, i + kPrefetchChunks);
    }
    __syncwarp();
  }
  store_final_state(s, job, params, work, work.column);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_fp32_pingpong_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3 * kStages; ++i) {
      init(shared.raw_full[i / 3][i % 3], 1);
      init(shared.full[i / 3][i % 3], kArrivalsPerWarp * 4);
    }
    for (int i = 0; i < kStages; ++i) init(shared.empty[i], kArrivalsPerWarp * 8);
    for (int i = 0; i < kPingPong; ++i) {
      init(shared.s_full[i], kArrivalsPerWarp * 4);
      init(shared.s_empty[i], kArrivalsPerWarp * 4);
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 32) {
    shared.work = work_tile_of_block(params, params.segments);
    shared.out = out_offset(params, shared.work);
  }
  __syncthreads();
  if (shared.work.chunks == 0) return;

  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    setmaxnreg_dec<kSplitRegisters>();
    split_chunks(params, shared);
  } else if (warpgroup <= kPingPong) {
    setmaxnreg_inc<kOutputRegisters>();
    compute_outputs(params, shared, warpgroup - 1);
  } else {
    setmaxnreg_inc<kStateRegisters>();
    compute_state(params, shared);
  }
}
