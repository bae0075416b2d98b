// Causal product by chunks for SM90: TMA, wgmma, warp specialisation, the state in registers.
//
// One block walks the chunks of one segment of one batch entry, for kCols value columns:
//   O = Q S + (Q K^T, lower triangle) V    and then    S = S + K^T V.
// A thread loads chunks, another one stores outputs, two warps look at the values.  A score
// warpgroup turns Q K^T of a chunk into weights P in shared memory, ahead of the state warpgroups.
// Each of these owns 64 value columns and computes transposed: O^T = S^T Q^T + V^T P^T with S^T in
// its registers, and U = V^T K, which S^T grows by.  In reverse, chunks come from the last to the
// first, and P is the upper triangle.
//
// Without a workspace for the states before segments, the state warpgroups first sum all chunks
// before theirs, and the others wait: for few short sequences, where other launches take longer.
#include "cuda_src/common/chunk_state.cuh"
#include "cuda_src/linear/chunk_sm90.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"

// -------------------------------------------------------------------------------------- producers
FA_DEVICE void prefetch_maps(const ProductJob& job) {
  prefetch_tensormap(&job.q_map);
  prefetch_tensormap(&job.k_map);
  prefetch_tensormap(&job.v_map);
  prefetch_tensormap(&job.out_map);
}

// Loads some of the block's chunks, those that are only summed first.
FA_DEVICE void load_chunks(const ProductSm90Params& params, SharedStorage& shared,
                           const WorkTile& work, int begin, int end) {
  const ProductJob& job = params.job[work.job];
  const uint64 policy = params.keep ? kEvictLast : kEvictNormal;
  const int chunks_before_segment = chunks_before(params, work);
  ChunkPipeline pipe;
  pipe.advance(begin);
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int row = (work.chunk + (i - chunks_before_segment) * work.step) * kChunk;
    const int at = pipe.index();
    const bool outputs = i >= chunks_before_segment;
    wait(shared.empty[at], pipe.parity() ^ 1);
    const uint32 barrier = cvta_to_shared(&shared.full[at]);
    mbarrier_arrive_expect_tx(barrier, ((outputs ? 2 : 1) * kDimBlocks + kGroups) * kBlockBytes);
    if (outputs) {
      load_chunk<kDimBlocks>(shared.q[at], job.q_map, job.q_step, work, barrier, policy, 0, row);
    }
    load_chunk<kDimBlocks>(shared.k[at], job.k_map, job.k_step, work, barrier, policy, 0, row);
    load_chunk<kGroups>(shared.v[at], job.v_map, job.v_step, work, barrier, policy, work.column,
                        row);
    pipe.advance();
  }
}

FA_DEVICE void store_outputs(const ProductSm90Params& params, SharedStorage& shared) {
  const WorkTile work = shared.work;
  const ProductJob& job = params.job[work.job];
  OutPipeline pipe;
#pragma unroll 1
  for (int i = 0; i < work.chunks; ++i) {
    const int row = (work.chunk + i * work.step) * kChunk, at = pipe.index();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.out_full[at][group], pipe.parity());
      cp_async_bulk_tensor_5d_store(&job.out_map,
                                    cvta_to_shared(&shared.out[at][group * kBlockBytes]),
                                    kEvictNormal, work.column + 64 * group, row, work.coordinate[2],
                                    work.coordinate[1], work.coordinate[0]);
    }
    cp_async_bulk_commit_group();
    // A store takes most of a microsecond to read what it stores: others go on meanwhile.
    cp_async_bulk_wait_group_read<kOutStages - 1>();
    pipe.advance();
    if (i + 1 < kOutStages) continue;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) arrive(shared.out_empty[pipe.index()][group]);
  }
  cp_async_bulk_wait_group<0>();
}

// ----------------------------------------------------------------------------------------- values
// Whether some of the values in a warp's columns are not finite.
FA_DEVICE bool has_nonfinite(uint32 v_tile, int warp) {
  constexpr uint32 kExponents = kBf16 ? 0x7f807f80 : 0x7c007c00;  // of two values
  constexpr uint32 kOne = kBf16 ? 0x00800080 : 0x04000400;  // carries over if all bits are set
  const int lane = threadIdx.x % 32;
  uint32 exponent_carries = 0;
  // Rows that are a multiple of 8 apart have the same swizzle.
  const uint32 v_lane = v_tile + lane * 128, first = warp * (kProbeCols / 8);
#pragma unroll 1
  for (int chunk = 0; chunk < kProbeCols / 8; ++chunk) {  // registers are short
#pragma unroll
    for (int row = 0; row < kChunk; row += 32) {
      uint32 words[4];
      const uint32 column = first + chunk;
      ld_shared_v4_b32(
          words, v_lane + row * 128 + column / 8 * kBlockBytes + (((column ^ lane) & 7) << 4));
#pragma unroll
      for (int w = 0; w < 4; ++w) exponent_carries |= (words[w] & kExponents) + kOne;
    }
  }
  return __any_sync(kFullWarp, (exponent_carries & 0x80008000) != 0);
}

// Zeroes what is not finite among the values of a warp's columns, and keeps where that was.
FA_DEVICE void zero_nonfinite(uint8* v_tile, int (&nonfinite_row)[kCols], int warp, bool reverse) {
  constexpr uint16 kExponent = kBf16 ? 0x7f80 : 0x7c00;
#pragma unroll 1
  for (int n = threadIdx.x % 32; n < kProbeCols; n += 32) {
    const int column = warp * kProbeCols + n;
    int first_found = reverse ? -1 : kChunk;
#pragma unroll 1
    for (int row = 0; row < kChunk; ++row) {
      uint16& x = *reinterpret_cast<uint16*>(
          v_tile + SharedTile<kChunk, kCols>::offset(row, column / 8) + column % 8 * 2);
      if ((x & kExponent) != kExponent) continue;
      x = 0;
      first_found = reverse ? row : min(first_found, row);
    }
    nonfinite_row[column] = first_found;
  }
}

// Looks at a warp's columns of all values, before they are multiplied.
FA_DEVICE void probe_nonfinite(const ProductSm90Params& params, SharedStorage& shared, int warp) {
  const int lane = threadIdx.x % 32, chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  ChunkPipeline pipe = first_chunk_pipe(params, shared, kProbeBarrier);
  PPipeline p_pipe;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = pipe.index(), p_stage = p_pipe.index();
    wait(shared.full[at], pipe.parity());
    const bool nonfinite_found = has_nonfinite(cvta_to_shared(shared.v[at]), warp);
    wait(shared.p_empty[p_stage], p_pipe.parity() ^ 1);
    if (lane == 0) shared.nonfinite_found[p_stage][warp] = nonfinite_found;
    if (nonfinite_found) {
      zero_nonfinite(shared.v[at], shared.nonfinite_row[p_stage], warp, reverse);
      fence_proxy_async_shared();
    }
    release_per_lane(shared.p_full[p_stage]);
    pipe.advance();
    p_pipe.advance();
  }
}

// ----------------------------------------------------------------------------------------- scores
// S = Q K^T, started.
FA_DEVICE void gemm_qk(float (&s)[8][4], const uint8* q_tile, const uint8* k_tile) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(q_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(k_tile), 0);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of a block's rows; descriptors count in 16 bytes.
    const int more = (step / 4 * kBlockBytes + step % 4 * 32) / 16;
    wgmma_m64k16_ss<kBf16, 64>(s, a + more, b + more, step > 0);
  }
  wgmma_commit_group();
}

FA_DEVICE void compute_scores(const ProductSm90Params& params, SharedStorage& shared, int warp) {
  const int lane = threadIdx.x % 32, chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  // Which of this lane's elements are on this side of the diagonal: a bit each.
  uint32 causal_bits = 0;
#pragma unroll
  for (int n = 0; n < 32; ++n) {
    const int row = 16 * warp + lane / 4 + n / 2 % 2 * 8, col = n / 4 * 8 + lane % 4 * 2 + n % 2;
    if (reverse ? col >= row : col <= row) causal_bits |= 1u << n;
  }
  // Where this lane's row of the four matrices of an stmatrix.x4 lies: rows 0-7, 8-15, then the
  // same of the next 8 columns (PTX ISA 9.7.14.5.16).
  const uint32 p_lane = PTile::lane_offset(16 * warp + lane % 16, lane / 16);
  ChunkPipeline pipe = first_chunk_pipe(params, shared, kScoreBarrier);
  PPipeline p_pipe;
  float s[8][4];
  wait(shared.full[pipe.index()], pipe.parity());
  gemm_qk(s, shared.q[pipe.index()], shared.k[pipe.index()]);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = pipe.index(), p_stage = p_pipe.index();
    wgmma_wait_group<0>();
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      if ((causal_bits >> n & 1) == 0) s[n / 4][n % 4] = 0.0f;
    }
    const float scale = kScaled ? range_scale(s) : 1.0f;
    uint32 pairs[8][2];
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        pairs[v][h] = pack2<kBf16>(s[v][2 * h] * scale, s[v][2 * h + 1] * scale);
      }
    }
    auto publish_tile = [&]() {
      wait(shared.p_empty[p_stage], p_pipe.parity() ^ 1);
      const uint32 p_tile = cvta_to_shared(shared.p[p_stage]) + p_lane;
#pragma unroll
      for (int v = 0; v < 8; v += 2) {
        stmatrix_x4(PTile::at(p_tile, 0, v / 2), pairs[v][0], pairs[v][1], pairs[v + 1][0],
                    pairs[v + 1][1]);
      }
      if (kScaled && lane == 0) shared.p_inverse[p_stage][warp] = rcp_rn(scale);
      fence_proxy_async_shared();
      release_per_lane(shared.p_full[p_stage]);
      release(shared.empty[at]);
    };
    // The next scores are multiplied while these are stored, if their chunk is there: nobody has to
    // wait for it.  After the last chunk its own are multiplied again, for nobody, because ptxas
    // serialises products that start behind a branch.
    const bool more = i + 1 < chunks;
    ChunkPipeline next = pipe;
    next.advance();
    const uint32 full = cvta_to_shared(&shared.full[next.index()]);
    const bool next_loaded =
        more && __all_sync(kFullWarp, mbarrier_try_wait_parity(full, next.parity()));
    if (!next_loaded) {
      publish_tile();
      if (more) wait(shared.full[next.index()], next.parity());
    }
    const int from = more ? next.index() : at;
    gemm_qk(s, shared.q[from], shared.k[from]);
    if (next_loaded) publish_tile();
    pipe = next;
    p_pipe.advance();
  }
  wgmma_wait_group<0>();
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
        const uint32 bits = high[step][r];  // bfloat16: upper halves of floats
        low[step][r] = pack2<kBf16>(x - __int_as_float(static_cast<int>(bits << 16)),
                                    y - __int_as_float(static_cast<int>(bits & ~0xffffu)));
      }
    }
  }
}

// Of all registers of a warp.
FA_DEVICE uint32 xor_registers(const Rounded& x) {
  uint32 all = 0;
#pragma unroll
  for (int n = 0; n < kDim / 4; ++n) all ^= x[n / 4][n % 4];
  return all;
}

// O^T = S^T Q^T, started.
FA_DEVICE void gemm_qs(Outputs& o, Rounded& high, Rounded& low, const uint8* q_tile) {
  const uint64 b = wgmma_descriptor(cvta_to_shared(q_tile), 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint64 b_step = b + (step / 4 * kBlockBytes + step % 4 * 32) / 16;
    wgmma_m64k16_rs<kBf16, 64, kKMajor>(o, high[step], b_step, step > 0);
    if constexpr (kLowPart) wgmma_m64k16_rs<kBf16, 64, kKMajor>(o, low[step], b_step, 1);
  }
}

// O^T (+)= V^T P^T, started.
FA_DEVICE void gemm_pv(Outputs& o, const uint8* v_tile, const uint8* p_tile, int add) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(v_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(p_tile), 0);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    wgmma_m64k16_ss<kBf16, 64, kMnMajor, kKMajor>(o, a + step * (16 * 128 / 16),
                                                  b + step * (32 / 16), add || step > 0);
  }
}

FA_DEVICE void compute_outputs(const ProductSm90Params& params, SharedStorage& shared, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunks = shared.work.chunks;
  const ProductJob& job = params.job[shared.work.job];
  const bool reverse = job.reverse;
  State s;
  {
    const WorkTile& work = shared.work;
    const int column = work.column + 64 * group;
    const bool split = job.workspace != nullptr;
    const int64 row = split ? job.v_dim : job.initial_row, col = split ? 1 : job.initial_col;
    const float* from = split ? segment_state(params, work, work.segment) : job.initial;
    if (from != nullptr) from += (split ? 0 : work.initial) + column * col;
    load_state(s, from, row, col, job.qk_dim, job.v_dim - column);
  }
  ChunkPipeline pipe;
  State u;
  for (int i = chunks_before(params, shared.work); i > 0; --i) {
    const int at = pipe.index();
    wait(shared.full[at], pipe.parity());
    wgmma_fence();
    gemm_kv(u, shared.k[at], &shared.v[at][group * kBlockBytes]);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    release(shared.empty[at]);
    if (group == 0) release(shared.empty[at]);  // for the score warps
    add_outer_products(s, u);
    pipe.advance();
  }
  if (pipe.count > 0) release_waiting_warps();
  float scale = kScaled ? range_scale(s) : 1.0f;
  // Where this lane's row of the four matrices of a transposing stmatrix.x4 lies: 8 rows of the
  // output, of two blocks of 8 columns, then the same of the next 8 rows.
  const uint32 out_lane =
      OutTile::at(OutTile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2), 0, warp);
  PPipeline p_pipe;
  OutPipeline out_pipe;
  Outputs o, o_intra;
  Rounded high, low;
  auto gemm_next_kv = [&](int at) {
    wgmma_fence();
    gemm_kv(u, shared.k[at], &shared.v[at][group * kBlockBytes]);
    wgmma_commit_group();
  };
  auto publish_tile = [&]() {
    fence_proxy_async_shared();
    __syncwarp();
    release(shared.out_full[out_pipe.index()][group]);
    out_pipe.advance();
  };

  round_state(s, scale, high, low);
  if constexpr (kPrefetchNextKv) {
    wait(shared.p_full[0], 0);
    gemm_next_kv(pipe.index());
    wgmma_wait_group<0>();
  }
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = pipe.index(), p_stage = p_pipe.index();
    if constexpr (!kPrefetchNextKv) wait(shared.full[at], pipe.parity());
    wgmma_fence();
    gemm_qs(o, high, low, shared.q[at]);
    wgmma_commit_group();
    if constexpr (!kPrefetchNextKv) wait(shared.p_full[p_stage], p_pipe.parity());
    wgmma_fence();
    gemm_pv(kScaled ? o_intra : o, &shared.v[at][group * kBlockBytes], shared.p[p_stage], !kScaled);
    wgmma_commit_group();

    // Meanwhile: the output of the chunk before, and the state after this one.
    if (kPrefetchNextKv && i > 0) publish_tile();
    const bool nonfinite_found =
        shared.nonfinite_found[p_stage][(64 * group + 16 * warp) / kProbeCols] != 0;
    auto nonfinite_row = [&](int h) {
      return shared.nonfinite_row[p_stage][64 * group + 16 * warp + lane / 4 + 8 * h];
    };
    const float state_inverse = kScaled ? rcp_rn(scale) : 1.0f;
    auto update_state = [&]() {
      add_outer_products(s, u);
      if (nonfinite_found) {  // values that are not finite were left out of the sums
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (nonfinite_row(h) < 0 || nonfinite_row(h) >= kChunk) continue;
#pragma unroll
          for (int v = 0; v < kMmaE; ++v) {
            s[v][2 * h] = s[v][2 * h + 1] = __int_as_float(0x7fc00000);
          }
        }
      }
    };
    auto round_next_state = [&]() {
      if constexpr (kScaled) scale = range_scale(s);
      round_state(s, scale, high, low);
    };
    if constexpr (kPrefetchNextKv) {
      update_state();
      // After the last chunk its own sums start again, for nobody, because ptxas serialises
      // products that start behind a branch.
      PPipeline next_p_pipe = p_pipe;
      ChunkPipeline next = pipe;
      next_p_pipe.advance();
      next.advance();
      if (i + 1 < chunks) wait(shared.p_full[next_p_pipe.index()], next_p_pipe.parity());
      gemm_next_kv(i + 1 < chunks ? next.index() : at);
      wgmma_wait_group<2>();  // for the products with the rounded state
      round_next_state();
      // ptxas moves arithmetic behind the next wait, unless it has to branch on it.
      const bool never_true = xor_registers(kLowPart ? low : high) == 0x7fc17fc3;
      if (__any_sync(kFullWarp, never_true)) wait(shared.full[at], pipe.parity());
    } else if constexpr (!kScaled) {
      wgmma_wait_group<1>();
      gemm_next_kv(at);
    }
    const int out_stage = out_pipe.index();
    wait(shared.out_empty[out_stage][group], out_pipe.parity() ^ 1);
    wgmma_wait_group<kPrefetchNextKv || !kScaled ? 1 : 0>();  // for the outputs
    if constexpr (kPrefetchNextKv) release(shared.empty[at]);
    if constexpr (kScaled) {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const float inverse = shared.p_inverse[p_stage][v / 2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          o[v][e] = fmaf(o_intra[v][e], inverse, o[v][e] * state_inverse);
        }
      }
    }
    Packed out;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int h = 0; h < 2; ++h) out[v][h] = pack2<kBf16>(o[v][2 * h], o[v][2 * h + 1]);
    }
    if (nonfinite_found) {  // rows that read them become NaN
#pragma unroll
      for (int v = 0; v < 8; ++v) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int row = 8 * v + lane % 4 * 2 + n % 2, from = nonfinite_row(n / 2);
          if (reverse ? row <= from : row >= from) out[v][n / 2] |= 0x7fffu << 16 * (n % 2);
        }
      }
    }
    if constexpr (!kPrefetchNextKv && kScaled) gemm_next_kv(at);
    if constexpr (kPrefetchNextKv) release_per_lane(shared.p_empty[p_stage]);
    const uint32 tile = cvta_to_shared(&shared.out[out_stage][group * kBlockBytes]) + out_lane;
#pragma unroll
    for (int v = 0; v < 8; v += 2) {
      stmatrix_x4_trans(tile + 8 * v * OutTile::kRowBytes, out[v][0], out[v][1], out[v + 1][0],
                        out[v + 1][1]);
    }
    // For the sums: ptxas serialises products that one turn of the loop starts and the next reads.
    if constexpr (!kPrefetchNextKv) publish_tile();
    wgmma_wait_group<0>();
    if constexpr (!kPrefetchNextKv) {
      release(shared.empty[at]);
      update_state();
      release_per_lane(shared.p_empty[p_stage]);
      round_next_state();
    }
    pipe.advance();
    p_pipe.advance();
  }
  if constexpr (kPrefetchNextKv) publish_tile();

  const WorkTile& work = shared.work;
  if (job.state != nullptr && work.writes_state && work.segment == params.segments - 1) {
    const int column = work.column + 64 * group;
    store_state(s, job.state + work.state + column * job.state_col, job.state_row, job.state_col,
                job.qk_dim, job.v_dim - column);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  // The first chunk is asked for before anything else.
  if (warp == 0) {
    init_barriers(shared, threadIdx.x);
    __syncwarp();
    if (elect_sync()) {
      const WorkTile work = work_tile_of_block(params, params.segments);
      shared.work = work;
      // Of those before, if there are any.
      load_chunks(params, shared, work, 0, min(1, work.chunks));
    }
  } else if (warp == 1 && elect_sync()) {
    prefetch_maps(params.job[blockIdx.x % static_cast<uint32>(params.jobs)]);
  }
  __syncthreads();
  if (shared.work.chunks == 0) return;

  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0 && elect_sync()) {
      const WorkTile& work = shared.work;
      load_chunks(params, shared, work, 1, chunks_before(params, work) + work.chunks);
    }
    if (warp == 1 && elect_sync()) store_outputs(params, shared);
    if (warp >= 2) probe_nonfinite(params, shared, warp - 2);
  } else if (warp < 8) {
    setmaxnreg_dec<kScoreRegisters>();
    compute_scores(params, shared, warp - 4);
  } else {
    setmaxnreg_inc<kStateRegisters>();
    compute_outputs(params, shared, warp / 4 - 2);
  }
}
