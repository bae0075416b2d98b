// Attention backward in float32 for SM90, keys and values, on float16 tensor cores: bulk copies,
// wgmma, warp specialisation.
//
// As bwd_dkdv_fp32.cu: one block owns kTileN keys of one entry of keys and values and walks over
// the tiles of kTileM queries that see some of them, head by head of those that share the keys.
//   S^T = K Q^T,  P^T = exp(S^T - LSE),          dV += P^T dO
//   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),   dK += dS^T Q
// Each warpgroup has all of this for its own 64 keys (backward_fp32_sm90.cuh), or one of these
// lines where two share keys (backward_fp32_shared_rows.cuh).
#include "cuda_src/common/backward_fp32_shared_rows.cuh"

FA_DEVICE void consume(const BwdFp32Params& params, TileStorage& shared) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  Sums dk, dv;
  clear(dk);
  clear(dv);
  PipelineState<kStages> pipeline;
  OtherTile at = next_visible(params, work, {0, work.begin});
  if (at.head < params.group) {
    wait(shared.own_full, 0);
    find_own_limits(shared);
  }
#pragma unroll 1
  while (at.head < params.group) {
    const int stage = pipeline.index();
    Scores weights, ds;
    multiply_and_weigh(params, shared, pipeline, at, weights, ds, [] {});
    add_product(shared, stage, 1, weights, dv);  // dV += P^T dO
    release_per_lane(shared.empty[stage][1]);
    add_product(shared, stage, 0, ds, dk);  // dK += dS^T Q
    release_per_lane(shared.empty[stage][0]);
    pipeline.advance();
    at = next_visible(params, work, {at.head, at.tile + 1});
  }
  const uint32 dk_again = write_sums(params, work, params.dk, p.k_len, p.head_dim, dk, p.scale);
  const uint32 dv_again = write_sums(params, work, params.dv, p.k_len, p.v_dim, dv, 1.0f);
  const auto row_of = [&](uint32 entry, int query) {
    return row_by_hand(params, work, entry, query);
  };
#pragma unroll 1
  for (int of_values = 0; of_values < 2; ++of_values) {
    for_each_row(work, of_values ? dv_again : dk_again,
                 [&](int key) { recompute_key<kDim>(params, work, row_of, key, of_values != 0); });
  }
}

// As `consume` where two warpgroups share keys: one has the sums of dV, the other one those of dK.
FA_DEVICE void consume_shared(const BwdFp32Params& params, TileStorage& shared) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  const int role = warp_role();
  Sums sums;
  clear(sums);
  PipelineState<kStages> pipeline;
  OtherTile at = next_visible(params, work, {0, work.begin});
  if (at.head < params.group) {
    wait(shared.own_full, 0);
    find_own_limits(shared);
  }
#pragma unroll 1
  while (at.head < params.group) {
    const int stage = pipeline.index();
    Scores x;
    multiply_and_exchange(params, shared, pipeline, at, {}, x);
    // dV += P^T dO or dK += dS^T Q
    add_product(shared, stage, 1 - role, x, sums, [&] {
      if (role == 0) release_per_lane(shared.empty[stage][0]);
    });
    release_per_lane(shared.empty[stage][1 - role]);
    pipeline.advance();
    at = next_visible(params, work, {at.head, at.tile + 1});
  }
  const bool of_values = role == 0;
  const uint32 again =
      write_sums(params, work, of_values ? params.dv : params.dk, p.k_len,
                 of_values ? p.v_dim : p.head_dim, sums, of_values ? 1.0f : p.scale);
  const auto row_of = [&](uint32 entry, int query) {
    return row_by_hand(params, work, entry, query);
  };
  for_each_row(work, again,
               [&](int key) { recompute_key<kDim>(params, work, row_of, key, of_values); });
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dkdv_fp32_sm90(const __grid_constant__ BwdFp32Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  TileStorage& shared = *reinterpret_cast<TileStorage*>(shared_bytes);
  const WorkTile& work = shared.work;
  if (threadIdx.x == 0) {
    find_work(params, shared.work);
    init_barriers(shared);
  }
  __syncthreads();
  if (threadIdx.x < 32 * kConsumers) {
    setmaxnreg_inc<kConsumerRegisters>();
    if constexpr (kRowGroups > 1) {
      consume_shared(params, shared);
    } else {
      consume(params, shared);
    }
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x / 32 == kConsumers && elect_sync()) {
      if (next_visible(params, work, {0, work.begin}).head < heads_of(params)) {
        load_own(params, shared);
      }
      load_tiles(params, shared, 1);
    }
  }
}
