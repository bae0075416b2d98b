// Causal product of float32 by chunks for SM90, of 64 key and 64 value columns: two warpgroups take
// turns at scores and outputs, and the state is handed to them.
//
// As chunk_fp32_sm90.cu, with the same pairs of float16 and the same exponents:
//   O = Q S + (Q K^T, lower triangle) V    and then    S = S + K^T V.
// There the state's warpgroup computes the outputs too, one step behind the other.  Here it only
// sums U = V^T K, adds that to S^T in its registers, and puts S as pairs into shared memory, where
// it runs ahead.  Chunk i is warpgroup i % 2's: its scores stay in registers, where they become
// weights and the A operand of P V, while Q S is under way.  A thread's outputs are those of two
// rows, so what rows of weights are multiplied by stays in registers as well.
//
// Pairs take the place of the rows that they are made of, so kStages chunks are loaded, split or
// multiplied.  The state's warpgroup loads: it is the last to be done with its chunk, but for the
// outputs, and those that a stage waits for are of the chunk before.
#include "cuda_src/common/fp32_sm90.cuh"
#include "ptx/stmatrix.cuh"

// -------------------------------------------------------------------------------------- constants
// Warpgroups that make scores and outputs, and stages for their states.
constexpr int kPingPong = 2;
constexpr int kThreads = 128 * (kPingPong + 2);
// Chunks that are loaded before the first one is summed.
constexpr int kPrefetchChunks = kStages - 1;
constexpr int kInFlight = 4;  // rows of a split thread in registers
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kSplitRegisters = 72, kOutputRegisters = 144, kStateRegisters = 152;
static_assert(kDim == 64 && kCols == 64 && kMinBlocks == 1, "registers, as above");
static_assert(kPrefetchChunks >= 2, "a chunk is on the way while another one is split");

using STile = SharedTile<kCols, kDim>;
enum Array { kQ = 0, kK = 1, kV = 2 };  // in the order in which they are wanted

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint8 q[kStages][2 * kLowQK];  // as they come, then high parts, low parts
  uint8 k[kStages][2 * kLowQK];
  uint8 v[kStages][2 * kLowV];
  uint8 s[kPingPong][2 * kBlockBytes];  // S^T before a chunk
  float s_factor[kPingPong][kCols];     // a column of S is so many times, twice, what it says
  int kv_exponent[kStages][kChunk];     // row j of K times row j of V is 2^e of what theirs say
  short q_exponent[kStages][kChunk];    // row i of Q is 2^-e of what its tile says
  signed char nonfinite_row[kStages][kCols];  // see zero_nonfinite, where a split warp found such
  int nonfinite_found[kStages][4];            // whether one did
  uint64 raw_full[kStages][3], full[kStages][3], empty[kStages];
  uint64 s_full[kPingPong], s_empty[kPingPong];
  WorkTile work;
  int64 out;  // element offset of the entry's outputs
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

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
    const int at = pipe.index();
    int row_exponents[kSteps], v_row_exponent[kSteps];
    auto end = [&](int array) {  // tiles are for the tensor cores to read
      fence_proxy_async_shared();
      release_per_lane(shared.full[at][array]);
    };
    wait(shared.raw_full[at][kQ], pipe.parity());
    split_rows<kChunk, kDimBoxes, kInFlight, true>(row_exponents, shared.q[at], shared.q[at]);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (thread % 8 == 0)
        shared.q_exponent[at][row + 16 * g] = static_cast<short>(row_exponents[g]);
    }
    end(kQ);
    wait(shared.raw_full[at][kK], pipe.parity());
    split_rows<kChunk, kDimBoxes, kInFlight, true>(row_exponents, shared.k[at], shared.k[at]);
    end(kK);
    wait(shared.raw_full[at][kV], pipe.parity());
    const bool finite =
        split_rows<kChunk, kColBoxes, kInFlight, true>(v_row_exponent, shared.v[at], shared.v[at]);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (thread % 8 == 0)
        shared.kv_exponent[at][row + 16 * g] = -row_exponents[g] - v_row_exponent[g];
    }
    const bool nonfinite_found = __any_sync(kFullWarp, !finite);
    if (thread % 32 == 0) shared.nonfinite_found[at][thread / 32] = nonfinite_found;
    bar_sync(1, 128);
    if (any_nonfinite(shared.nonfinite_found[at])) {
      zero_nonfinite(shared.v[at], shared.nonfinite_row[at], thread, reverse);
    }
    end(kV);
    pipe.advance();
  }
}

// -------------------------------------------------------------------------------- scores, outputs
// Scores beyond the diagonal become 0.
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

// The largest of a row's four lanes.
template <typename Number>
FA_DEVICE Number max_over_lanes(Number most) {
  most = max(most, __shfl_xor_sync(kFullWarp, most, 1));
  return max(most, __shfl_xor_sync(kFullWarp, most, 2));
}

// Weights, scores times 2^kv_exponent, as pairs, with an exponent for each row, that of its largest
// weight, which `row_exponent` becomes.  `most`, `least`: of the chunk's kv_exponent.
FA_DEVICE void split_scores(Operand<kSteps>& high, Operand<kSteps>& low, int (&row_exponent)[2],
                            Outputs& s, const int* kv_exponent, int most, int least) {
  // Scores are 2^-48 to 2^34, or 0: float32 holds what so many less leave of them.
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

// The least of a chunk's exponents.
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
    // Four lanes write 32 bytes of a row: all of what memory moves at once.
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
  {
    const bool split = job.workspace != nullptr;
    const int64 row = split ? job.v_dim : job.initial_row, col = split ? 1 : job.initial_col;
    const float* from = split ? segment_state(params, work, work.segment) : job.initial;
    if (from != nullptr) from += (split ? 0 : work.initial) + work.column * col;
    load_state(s, from, row, col, job.qk_dim, job.v_dim - work.column);
  }
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const ChunkPipeline pipe{static_cast<uint32>(i)};
    const StatePipeline state{static_cast<uint32>(i)};
    const int at = pipe.index();
    Operand<kSteps> values, values_low;
    Outputs u;
    int exponents[2];
    wait(shared.full[at][kK], pipe.parity());
    wait(shared.full[at][kV], pipe.parity());
    const bool nonfinite_found = any_nonfinite(shared.nonfinite_found[at]);
    load_values(values, values_low, shared.v[at], warp);
    const int most = scale_to_common_exponent(values, values_low, shared.kv_exponent[at]);
    const float factor = power_of_two(most / 2), rest = power_of_two(most - most / 2);
    gemm_split<kMnMajor, kSteps>(u, values, values_low, shared.k[at], kLowQK,
                                 [](int step) { return step * 16 * 128; });
    state_exponents(exponents, s);
    write_state(shared, s, exponents, state);
    int nonfinite_row[2] = {0, 0};
    if (nonfinite_found) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        nonfinite_row[h] = shared.nonfinite_row[at][16 * warp + lane / 4 + 8 * h];
    }
    wgmma_wait_group<0>();
    release_per_lane(shared.empty[at]);
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      float& x = s[e / 4][e % 4];
      x = fmaf(u[e / 4][e % 4] * factor, rest, x);
    }
    if (nonfinite_found) poison_sums(s, nonfinite_row);
    // The outputs of the chunk before are those that the next state but one waits for anyway.
    if (is_loader && i + kPrefetchChunks < chunks) {
      const ChunkPipeline later_pipe{static_cast<uint32>(i + kPrefetchChunks)};
      wait(shared.empty[later_pipe.index()], later_pipe.parity() ^ 1);
      load(params, shared, i + kPrefetchChunks);
    }
    __syncwarp();
  }

  if (job.state != nullptr && work.writes_state && work.segment == params.segments - 1) {
    store_state(s, job.state + work.state + work.column * job.state_col, job.state_row,
                job.state_col, job.qk_dim, job.v_dim - work.column);
  }
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
