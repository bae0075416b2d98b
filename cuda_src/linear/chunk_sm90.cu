// Causal product by chunks for SM90: TMA, wgmma, warp specialisation, the state in registers.
//
// A block walks over the chunks of one segment of one batch entry, for kCols value columns:
//   O = Q S + tril(Q K^T) V    and then    S = S + K^T V.
// One thread loads chunks, another one stores outputs, and two warps look for values that are not
// finite.  The score warpgroup turns Q K^T of a chunk into weights P in shared memory, ahead of the
// state warpgroups.  Each state warpgroup owns 64 value columns and computes transposed products:
//   O^T = S^T Q^T + V^T P^T, with S^T from its registers, and
//   U = V^T K, which is then added: S^T = S^T + U.
// In reverse, chunks come from the last to the first, and P is the upper triangle.
//
// A packed sequence has chunks of its own, which begin with its first row.  Its last one may have
// rows of the next sequence behind its own: those of Q, K and V count for nothing, and the rest of
// the outputs is written row by row.
//
// Without a workspace for the states before segments, the state warpgroups first sum all chunks
// before their segment, while the other warps wait.  That takes less time than further launches if
// there are few and short sequences.
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

// Loads chunks `begin` to `end` of those that the block reads.  Of the first ones, which lie before
// its segment and are only summed, it needs no queries.
FA_DEVICE void load_chunks(const ProductSm90Params& params, SharedStorage& shared,
                           const WorkTile& work, int begin, int end) {
  const ProductJob& job = params.job[work.job];
  const uint64 policy = params.keep ? kEvictLast : kEvictNormal;
  const int chunks_before_segment = chunks_before(params, work);
  ChunkPipeline pipe;
  pipe.advance(begin);
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int row = row_of_chunk(work, i - chunks_before_segment);
    const int stage = pipe.index();
    const bool outputs = i >= chunks_before_segment;
    wait(shared.empty[stage], pipe.parity() ^ 1);
    const uint32 barrier = cvta_to_shared(&shared.full[stage]);
    mbarrier_arrive_expect_tx(barrier, ((outputs ? 2 : 1) * kDimBlocks + kGroups) * kBlockBytes);
    if (outputs) {
      load_chunk<kDimBlocks>(shared.q[stage], job.q_map, job.q_step, work, barrier, policy, 0, row);
    }
    load_chunk<kDimBlocks>(shared.k[stage], job.k_map, job.k_step, work, barrier, policy, 0, row);
    load_chunk<kGroups>(shared.v[stage], job.v_map, job.v_step, work, barrier, policy, work.column,
                        row);
    pipe.advance();
  }
}

// A warp writes the first rows of a chunk's outputs, and leaves those behind them alone.
FA_DEVICE void store_first_rows(const ProductSm90Params& params, const SharedStorage& shared,
                                const uint8* out_tile, int row, int rows) {
  constexpr int kRowChunks = kCols / 8;
  const ProductJob& job = params.job[shared.work.job];
  const int column = shared.work.column;
  uint16* to = reinterpret_cast<uint16*>(job.out) + out_offset(params, shared.work) + column;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < rows * kRowChunks; i += 32) {
    const int at = i / kRowChunks, chunk = i % kRowChunks;
    if (column + 8 * chunk >= job.v_dim) continue;
    uint32 words[4];
    ld_shared_v4_b32(words,
                     cvta_to_shared(out_tile) + SharedTile<kChunk, kCols>::offset(at, chunk));
    *reinterpret_cast<uint4*>(to + (row + at) * job.out_row + 8 * chunk) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Stores the outputs of a chunk once all state warpgroups have written theirs.  One thread does it,
// in packed builds a warp.
FA_DEVICE void store_outputs(const ProductSm90Params& params, SharedStorage& shared) {
#if FA_PACKED
  const WorkTile& work = shared.work;  // not copied, for want of registers
#else
  const WorkTile work = shared.work;
#endif
  const ProductJob& job = params.job[work.job];
  const bool elected = !kPacked || elect_sync();
  OutPipeline out_pipe;
#pragma unroll 1
  for (int i = 0; i < work.chunks; ++i) {
    const int row = row_of_chunk(work, i), rows = rows_of_chunk(work, i);
    const int out_stage = out_pipe.index();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.out_full[out_stage][group], out_pipe.parity());
      if (kPacked && (!elected || rows < kChunk)) continue;
      cp_async_bulk_tensor_5d_store(&job.out_map,
                                    cvta_to_shared(&shared.out[out_stage][group * kBlockBytes]),
                                    kEvictNormal, work.column + 64 * group, row, work.coordinate[2],
                                    work.coordinate[1], work.coordinate[0]);
    }
    if (kPacked && rows < kChunk) {
      store_first_rows(params, shared, shared.out[out_stage], row, rows);
    }
    cp_async_bulk_commit_group();
    // A store takes most of a microsecond to read its stage, so kOutStages - 1 of them may be under
    // way.  The oldest stage is free after this wait.
    cp_async_bulk_wait_group_read<kOutStages - 1>();
    out_pipe.advance();
    if (i + 1 < kOutStages) continue;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) arrive(shared.out_empty[out_pipe.index()][group]);
  }
  cp_async_bulk_wait_group<0>();
}

// ----------------------------------------------------------------------------------------- values
// Whether any of the values in a warp's columns is not finite.  Then all bits of its exponent are
// set, and adding 1 to the exponent carries into the sign bit.
FA_DEVICE bool has_nonfinite(uint32 v_tile, int warp) {
  constexpr uint32 kExponents = kBf16 ? 0x7f807f80 : 0x7c007c00;  // IEEE 754, two values
  constexpr uint32 kOne = kBf16 ? 0x00800080 : 0x04000400;        // the lowest bits of both
  const int lane = threadIdx.x % 32;
  uint32 exponent_carries = 0;
  // Rows whose distance is a multiple of 8 have the same swizzle (PTX ISA 5.5.7 "Swizzling
  // Modes").
  const uint32 v_lane = v_tile + lane * 128, first = warp * (kProbeCols / 8);
#pragma unroll 1
  for (int chunk = 0; chunk < kProbeCols / 8; ++chunk) {  // not unrolled, for want of registers
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

// Replaces values that are not finite by 0 in a warp's columns: P is 0 where a row does not read a
// value, but 0 * NaN is NaN.  `nonfinite_row` gets the first row of each column with such a value,
// in reverse the last one; outputs are NaN from there on.
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

// Puts zeros in place of the rows of the next packed sequence in a warp's columns.
FA_DEVICE void clear_later_values(uint8* v_tile, int rows, int warp) {
  constexpr int kProbeChunks = kProbeCols / 8;
  const uint32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = rows * kProbeChunks + threadIdx.x % 32; i < kChunk * kProbeChunks; i += 32) {
    const int row = i / kProbeChunks, chunk = warp * kProbeChunks + i % kProbeChunks;
    st_shared_v4_b32(cvta_to_shared(v_tile) + SharedTile<kChunk, kCols>::offset(row, chunk), zeros);
  }
  __syncwarp();
  fence_proxy_async_shared();
}

// Looks for values that are not finite in a warp's columns, chunk by chunk, before the state
// warpgroups multiply them.
FA_DEVICE void probe_nonfinite(const ProductSm90Params& params, SharedStorage& shared, int warp) {
  const int lane = threadIdx.x % 32, chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  ChunkPipeline pipe = first_chunk_pipe(params, shared, kProbeBarrier);
  PPipeline p_pipe;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int stage = pipe.index(), p_stage = p_pipe.index();
    wait(shared.full[stage], pipe.parity());
    if constexpr (kPacked) {
      const int rows = rows_of_chunk(shared.work, i);
      if (rows < kChunk) clear_later_values(shared.v[stage], rows, warp);
    }
    const bool nonfinite_found = has_nonfinite(cvta_to_shared(shared.v[stage]), warp);
    wait(shared.p_empty[p_stage], p_pipe.parity() ^ 1);
    if (lane == 0) shared.nonfinite_found[p_stage][warp] = nonfinite_found;
    if (nonfinite_found) {
      zero_nonfinite(shared.v[stage], shared.nonfinite_row[p_stage], warp, reverse);
      fence_proxy_async_shared();
    }
    release_per_lane(shared.p_full[p_stage]);
    pipe.advance();
    p_pipe.advance();
  }
}

// ----------------------------------------------------------------------------------------- scores
// Starts S = Q K^T of a chunk.
FA_DEVICE void gemm_qk(Scores& s, const uint8* q_tile, const uint8* k_tile) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(q_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(k_tile), 0);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of a block's rows; descriptors count in 16 bytes.
    const int offset = (step / 4 * kBlockBytes + step % 4 * 32) / 16;
    wgmma_m64k16_ss<kBf16, 64>(s, a + offset, b + offset, step > 0);
  }
  wgmma_commit_group();
}

// A bit for each of this lane's scores: 1 on the diagonal and on its causal side.
FA_DEVICE uint32 causal_mask(int lane, int warp, bool reverse) {
  uint32 bits = 0;
#pragma unroll
  for (int n = 0; n < 32; ++n) {
    const int row = 16 * warp + lane / 4 + n / 2 % 2 * 8, col = n / 4 * 8 + lane % 4 * 2 + n % 2;
    if (reverse ? col >= row : col <= row) bits |= 1u << n;
  }
  return bits;
}

// The same bits without those of queries of the next packed sequence.
FA_DEVICE uint32 without_later_rows(uint32 bits, int lane, int warp, int rows) {
  const int row = 16 * warp + lane / 4;
  // Pairs of scores are of this row and of row + 8 in turns.
  return bits & ((row < rows ? 0x33333333u : 0u) | (row + 8 < rows ? 0xccccccccu : 0u));
}

FA_DEVICE void mask_scores(Scores& s, uint32 causal_bits) {
#pragma unroll
  for (int n = 0; n < 32; ++n) {
    if ((causal_bits >> n & 1) == 0) s[n / 4][n % 4] = 0.0f;
  }
}

// The weights P of a chunk: scores times `scale` in 16 bits.
FA_DEVICE void round_scores(Packed& weights, const Scores& s, float scale) {
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weights[v][h] = pack2<kBf16>(s[v][2 * h] * scale, s[v][2 * h + 1] * scale);
    }
  }
}

// Writes a warp's 16 rows of weights; `p_lane` is the address of this lane's row for stmatrix.
FA_DEVICE void write_weights(uint32 p_lane, const Packed& weights) {
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    stmatrix_x4(PTile::at(p_lane, 0, v / 2), weights[v][0], weights[v][1], weights[v + 1][0],
                weights[v + 1][1]);
  }
}

// Puts zeros in place of keys of the next packed sequence, before the score warps and the state
// warpgroups multiply them.
FA_DEVICE void clear_later_keys(uint8* k_tile, int rows) {
  if (rows >= kChunk) return;
  clear_later_rows<128, kDimBlocks>(k_tile, rows, static_cast<int>(threadIdx.x) % 128);
  fence_proxy_async_shared();
  bar_sync(kClearKeysBarrier, 128);
}

FA_DEVICE void compute_scores(const ProductSm90Params& params, SharedStorage& shared, int warp) {
  const int lane = threadIdx.x % 32, chunks = shared.work.chunks;
  const bool reverse = params.job[shared.work.job].reverse;
  const uint32 causal_bits = causal_mask(lane, warp, reverse);
  // Where this lane's row of the four matrices of an stmatrix.x4 lies: rows 0-7, 8-15, then the
  // same of the next 8 columns (PTX ISA 9.7.14.5.16).
  const uint32 p_lane = PTile::lane_offset(16 * warp + lane % 16, lane / 16);
  ChunkPipeline pipe = first_chunk_pipe(params, shared, kScoreBarrier);
  PPipeline p_pipe;
  Scores s;
  wait(shared.full[pipe.index()], pipe.parity());
  if constexpr (kPacked) clear_later_keys(shared.k[pipe.index()], rows_of_chunk(shared.work, 0));
  gemm_qk(s, shared.q[pipe.index()], shared.k[pipe.index()]);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int stage = pipe.index(), p_stage = p_pipe.index();
    wgmma_wait_group<0>();
    uint32 visible_bits = causal_bits;
    if constexpr (kPacked) {
      visible_bits = without_later_rows(causal_bits, lane, warp, rows_of_chunk(shared.work, i));
    }
    mask_scores(s, visible_bits);
    const float scale = kScaled ? range_scale(s) : 1.0f;
    Packed weights;
    round_scores(weights, s, scale);
    auto publish = [&]() {
      wait(shared.p_empty[p_stage], p_pipe.parity() ^ 1);
      write_weights(cvta_to_shared(shared.p[p_stage]) + p_lane, weights);
      if (kScaled && lane == 0) shared.p_inverse[p_stage][warp] = rcp_rn(scale);
      fence_proxy_async_shared();
      release_per_lane(shared.p_full[p_stage]);
      release(shared.empty[stage]);
    };
    // If the next chunk has been loaded, its scores are started before these weights are written,
    // so that the tensor cores work meanwhile.  Else they are written first: the state warpgroups
    // wait for them.  After the last chunk its own scores are started again and left unused,
    // because ptxas serialises products that start behind a branch.
    const bool more = i + 1 < chunks;
    ChunkPipeline next = pipe;
    next.advance();
    const uint32 full = cvta_to_shared(&shared.full[next.index()]);
    const bool next_loaded =
        more && __all_sync(kFullWarp, mbarrier_try_wait_parity(full, next.parity()));
    if (!next_loaded) {
      publish();
      if (more) wait(shared.full[next.index()], next.parity());
    }
    const int from = more ? next.index() : stage;
    if constexpr (kPacked) {
      if (more) clear_later_keys(shared.k[from], rows_of_chunk(shared.work, i + 1));
    }
    gemm_qk(s, shared.q[from], shared.k[from]);
    if (next_loaded) publish();
    pipe = next;
    p_pipe.advance();
  }
  wgmma_wait_group<0>();
}

// ------------------------------------------------------------------------------------------ state
// Rounds S times `scale` to operands.  With kLowPart, `low` gets what rounding leaves.
FA_DEVICE void round_state(Rounded& high, Rounded& low, const State& s, float scale) {
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

// A number that depends on all registers of an operand.
FA_DEVICE uint32 xor_registers(const Rounded& x) {
  uint32 all = 0;
#pragma unroll
  for (int n = 0; n < kDim / 4; ++n) all ^= x[n / 4][n % 4];
  return all;
}

// Sums the chunks before the segment, if no other launch has done so.
FA_DEVICE void sum_chunks_before(State& s, State& u, ChunkPipeline& pipe, SharedStorage& shared,
                                 int chunks, int group) {
  for (int i = chunks; i > 0; --i) {
    const int stage = pipe.index();
    wait(shared.full[stage], pipe.parity());
    if constexpr (kPacked) {
      clear_later_rows(shared.k[stage], shared.v[stage], rows_of_chunk(shared.work, -i),
                       static_cast<int>(threadIdx.x) - kFirstStateThread, kClearBarrier);
    }
    gemm_kv(u, shared.k[stage], &shared.v[stage][group * kBlockBytes]);
    wgmma_wait_group<0>();
    release(shared.empty[stage]);
    if (group == 0) release(shared.empty[stage]);  // for the score warps
    add_outer_products(s, u);
    pipe.advance();
  }
  if (pipe.count > 0) release_waiting_warps();
}

// S^T = S^T + U.  A value column with values that are not finite, which U leaves out, becomes NaN.
// `nonfinite_row` is a lambda, by reference: it reads shared memory only where such values were
// found, and its result takes no register before.
template <typename NonfiniteRow>
FA_DEVICE void update_state(State& s, const State& u, bool nonfinite_found,
                            const NonfiniteRow& nonfinite_row) {
  add_outer_products(s, u);
  if (!nonfinite_found) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (nonfinite_row(h) < 0 || nonfinite_row(h) >= kChunk) continue;
#pragma unroll
    for (int v = 0; v < kMmaE; ++v) {
      s[v][2 * h] = s[v][2 * h + 1] = __int_as_float(0x7fc00000);
    }
  }
}

// ---------------------------------------------------------------------------------------- outputs
// Starts O^T = S^T Q^T.
FA_DEVICE void gemm_qs(Outputs& o, Rounded& high, Rounded& low, const uint8* q_tile) {
  const uint64 b = wgmma_descriptor(cvta_to_shared(q_tile), 0);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint64 b_step = b + (step / 4 * kBlockBytes + step % 4 * 32) / 16;
    wgmma_m64k16_rs<kBf16, 64, kKMajor>(o, high[step], b_step, step > 0);
    if constexpr (kLowPart) wgmma_m64k16_rs<kBf16, 64, kKMajor>(o, low[step], b_step, 1);
  }
  wgmma_commit_group();
}

// Starts O^T += V^T P^T, or without `add` O^T = V^T P^T.
FA_DEVICE void gemm_pv(Outputs& o, const uint8* v_tile, const uint8* p_tile, int add) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(v_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(p_tile), 0);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    wgmma_m64k16_ss<kBf16, 64, kMnMajor, kKMajor>(o, a + step * (16 * 128 / 16),
                                                  b + step * (32 / 16), add || step > 0);
  }
  wgmma_commit_group();
}

// Rounds the outputs of a chunk.  With kScaled, `o` holds Q S times the state's scale, and
// `o_intra` P V times the scale of each warp's rows of P; here they become one sum.  Rows that read
// values which are not finite become NaN (`nonfinite_row`: see update_state).
template <typename NonfiniteRow>
FA_DEVICE void round_outputs(Packed& out, Outputs& o, const Outputs& o_intra,
                             const float (&p_inverse)[4], float state_inverse, bool nonfinite_found,
                             const NonfiniteRow& nonfinite_row, bool reverse) {
  if constexpr (kScaled) {
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      const float inverse = p_inverse[v / 2];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        o[v][e] = fmaf(o_intra[v][e], inverse, o[v][e] * state_inverse);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int h = 0; h < 2; ++h) out[v][h] = pack2<kBf16>(o[v][2 * h], o[v][2 * h + 1]);
  }
  if (!nonfinite_found) return;
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int row = 8 * v + threadIdx.x % 4 * 2 + n % 2, from = nonfinite_row(n / 2);
      if (reverse ? row <= from : row >= from) out[v][n / 2] |= 0x7fffu << 16 * (n % 2);
    }
  }
}

// Waits until a stage for outputs has been stored, and returns its index.
FA_DEVICE int acquire_out_stage(SharedStorage& shared, const OutPipeline& out_pipe, int group) {
  const int out_stage = out_pipe.index();
  wait(shared.out_empty[out_stage][group], out_pipe.parity() ^ 1);
  return out_stage;
}

// Writes a warp's outputs, transposed, to its 16 columns of a tile.
FA_DEVICE void write_outputs(uint8* out_tile, uint32 out_lane, const Packed& out) {
  const uint32 tile = cvta_to_shared(out_tile) + out_lane;
#pragma unroll
  for (int v = 0; v < 8; v += 2) {
    stmatrix_x4_trans(tile + 8 * v * OutTile::kRowBytes, out[v][0], out[v][1], out[v + 1][0],
                      out[v + 1][1]);
  }
}

// Hands the outputs of a chunk to the thread that stores them.
FA_DEVICE void publish_outputs(SharedStorage& shared, OutPipeline& out_pipe, int group) {
  fence_proxy_async_shared();
  if constexpr (kPacked) {
    release_per_lane(shared.out_full[out_pipe.index()][group]);
  } else {
    __syncwarp();
    release(shared.out_full[out_pipe.index()][group]);
  }
  out_pipe.advance();
}

FA_DEVICE void compute_outputs(const ProductSm90Params& params, SharedStorage& shared, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int chunks = shared.work.chunks;
  const ProductJob& job = params.job[shared.work.job];
  const bool reverse = job.reverse;
  ChunkPipeline pipe;
  PPipeline p_pipe;
  OutPipeline out_pipe;
  State s, u;          // S^T, and what a chunk adds to it
  Rounded high, low;   // S^T as operands
  Outputs o, o_intra;  // O^T; with kScaled, o_intra holds V^T P^T
  auto v_tile = [&](int stage) { return &shared.v[stage][group * kBlockBytes]; };
  // Values that are not finite, in the 16 columns of this warp, and the first row of them in the
  // two columns of this lane.
  auto has_nonfinite_found = [&](int p_stage) {
    return shared.nonfinite_found[p_stage][(64 * group + 16 * warp) / kProbeCols] != 0;
  };
  auto first_nonfinite_row = [&](int p_stage, int h) {
    return shared.nonfinite_row[p_stage][64 * group + 16 * warp + lane / 4 + 8 * h];
  };

  load_first_state(s, job, params, shared.work, shared.work.column + 64 * group);
  sum_chunks_before(s, u, pipe, shared, chunks_before(params, shared.work), group);
  float scale = kScaled ? range_scale(s) : 1.0f;
  // Where this lane's row of the four matrices of a transposing stmatrix.x4 lies: 8 rows of the
  // output, of two blocks of 8 columns, then the same of the next 8 rows (PTX ISA 9.7.14.5.16).
  const uint32 out_lane =
      OutTile::at(OutTile::lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2), 0, warp);
  round_state(high, low, s, scale);

  if constexpr (kPrefetchNextKv) {
    wait(shared.p_full[0], 0);
    gemm_kv(u, shared.k[pipe.index()], v_tile(pipe.index()));
    wgmma_wait_group<0>();
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      const int stage = pipe.index(), p_stage = p_pipe.index();
      gemm_qs(o, high, low, shared.q[stage]);                                      // O^T = S^T Q^T
      gemm_pv(kScaled ? o_intra : o, v_tile(stage), shared.p[p_stage], !kScaled);  //  + V^T P^T

      // Meanwhile, the outputs of the chunk before are handed on, and the state after this one is
      // computed.
      if (i > 0) publish_outputs(shared, out_pipe, group);
      const bool nonfinite_found = has_nonfinite_found(p_stage);
      auto nonfinite_row = [&](int h) { return first_nonfinite_row(p_stage, h); };
      const float state_inverse = kScaled ? rcp_rn(scale) : 1.0f;
      update_state(s, u, nonfinite_found, nonfinite_row);  // S^T = S^T + U

      // U = V^T K of the next chunk.  After the last chunk this computes its own U again, which is
      // not used, because ptxas serialises products that start behind a branch.
      PPipeline next_p_pipe = p_pipe;
      ChunkPipeline next = pipe;
      next_p_pipe.advance();
      next.advance();
      if (i + 1 < chunks) wait(shared.p_full[next_p_pipe.index()], next_p_pipe.parity());
      const int next_stage = i + 1 < chunks ? next.index() : stage;
      gemm_kv(u, shared.k[next_stage], v_tile(next_stage));
      wgmma_wait_group<2>();  // for S^T Q^T, whose operands are rounded anew
      if constexpr (kScaled) scale = range_scale(s);
      round_state(high, low, s, scale);
      // ptxas would move the rounding behind the next wait.  This branch depends on its results, so
      // they have to be there.  No phase is waited for in vain if it is taken: this one is over.
      const bool never_true = xor_registers(kLowPart ? low : high) == 0x7fc17fc3;
      if (__any_sync(kFullWarp, never_true)) wait(shared.full[stage], pipe.parity());

      const int out_stage = acquire_out_stage(shared, out_pipe, group);
      wgmma_wait_group<1>();  // for the outputs
      release(shared.empty[stage]);
      Packed out;
      round_outputs(out, o, o_intra, shared.p_inverse[p_stage], state_inverse, nonfinite_found,
                    nonfinite_row, reverse);
      release_per_lane(shared.p_empty[p_stage]);
      write_outputs(&shared.out[out_stage][group * kBlockBytes], out_lane, out);
      // For U, which is read in the next iteration: ptxas serialises products that it cannot see
      // waited for in the iteration that starts them.
      wgmma_wait_group<0>();
      pipe.advance();
      p_pipe.advance();
    }
    publish_outputs(shared, out_pipe, group);
  } else {
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      const int stage = pipe.index(), p_stage = p_pipe.index();
      wait(shared.full[stage], pipe.parity());
      gemm_qs(o, high, low, shared.q[stage]);  // O^T = S^T Q^T
      wait(shared.p_full[p_stage], p_pipe.parity());
      gemm_pv(kScaled ? o_intra : o, v_tile(stage), shared.p[p_stage], !kScaled);  //  + V^T P^T
      const bool nonfinite_found = has_nonfinite_found(p_stage);
      auto nonfinite_row = [&](int h) { return first_nonfinite_row(p_stage, h); };
      const float state_inverse = kScaled ? rcp_rn(scale) : 1.0f;
      // U = V^T K, as soon as there are registers for it: those of the operands, which S^T Q^T
      // has read, or those of o_intra.
      if constexpr (!kScaled) {
        wgmma_wait_group<1>();
        gemm_kv(u, shared.k[stage], v_tile(stage));
      }
      const int out_stage = acquire_out_stage(shared, out_pipe, group);
      wgmma_wait_group<kScaled ? 0 : 1>();  // for the outputs
      Packed out;
      round_outputs(out, o, o_intra, shared.p_inverse[p_stage], state_inverse, nonfinite_found,
                    nonfinite_row, reverse);
      if constexpr (kScaled) gemm_kv(u, shared.k[stage], v_tile(stage));
      write_outputs(&shared.out[out_stage][group * kBlockBytes], out_lane, out);
      publish_outputs(shared, out_pipe, group);
      wgmma_wait_group<0>();  // for U
      release(shared.empty[stage]);
      update_state(s, u, nonfinite_found, nonfinite_row);  // S^T = S^T + U
      release_per_lane(shared.p_empty[p_stage]);
      if constexpr (kScaled) scale = range_scale(s);
      round_state(high, low, s, scale);
      pipe.advance();
      p_pipe.advance();
    }
  }
  store_final_state(s, job, params, shared.work, shared.work.column + 64 * group);
}

// The state of a packed sequence without rows is the one it began with.
FA_DEVICE void keep_first_state(const ProductSm90Params& params, const WorkTile& work, int group) {
  const ProductJob& job = params.job[work.job];
  if (!is_last_segment(params, work)) return;
  State s;
  load_first_state(s, job, params, work, work.column + 64 * group);
  store_final_state(s, job, params, work, work.column + 64 * group);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_chunk_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  // The load of the first chunk starts before anything else.
  if (warp == 0) {
    init_barriers(shared, threadIdx.x);
    __syncwarp();
    if (elect_sync()) {
      const WorkTile work = work_tile_of_block(params, params.segments);
      shared.work = work;
      // A chunk before the segment, if the block sums such chunks.
      load_chunks(params, shared, work, 0, min(1, work.chunks));
    }
  } else if (warp == 1 && elect_sync()) {
    prefetch_maps(params.job[blockIdx.x % static_cast<uint32>(params.jobs)]);
  }
  __syncthreads();
  if (shared.work.chunks == 0) {
    if (kPacked && warp >= 8) keep_first_state(params, shared.work, warp / 4 - 2);
    return;
  }

  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0 && elect_sync()) {
      const WorkTile& work = shared.work;
      load_chunks(params, shared, work, 1, chunks_before(params, work) + work.chunks);
    }
    if (warp == 1 && (kPacked || elect_sync())) store_outputs(params, shared);
    if (warp >= 2) probe_nonfinite(params, shared, warp - 2);
  } else if (warp < 8) {
    setmaxnreg_dec<kScoreRegisters>();
    compute_scores(params, shared, warp - 4);
  } else {
    setmaxnreg_inc<kStateRegisters>();
    compute_outputs(params, shared, warp / 4 - 2);
  }
}
