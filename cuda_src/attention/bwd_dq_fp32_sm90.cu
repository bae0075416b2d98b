// Attention backward in float32 for SM90, queries, on float16 tensor cores: bulk copies, wgmma,
// warp specialisation.
//
// As bwd_dq_fp32.cu: one block owns kTileM query rows of one batch entry and walks over the tiles
// of keys that some of them see.
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dS = P (dP - delta),  dQ += dS K
// Each warpgroup has all of this for its own 64 queries (backward_fp32_sm90.cuh), or some of it
// where two share queries (backward_fp32_shared_rows.cuh).  It finds what replaces an LSE that is
// far, and writes it for bwd_dkdv_fp32_sm90.
#include "cuda_src/common/backward_fp32_shared_rows.cuh"
#include "cuda_src/common/far_rows_fp32.cuh"

// Goes over all tiles for the scores alone, which are rounded as those of the weights will be.
FA_DEVICE void find_statistics(const BwdFp32Params& params, TileStorage& shared,
                               PipelineState<kStages>& pipeline) {
  const WorkTile& work = shared.work;
  Statistics statistics;
#pragma unroll 1
  for (OtherTile at = next_visible(params, work, {0, work.begin}); at.head == 0;
       at = next_visible(params, work, {0, at.tile + 1})) {
    const int stage = pipeline.index();
    wait_for_array(shared, pipeline, 0);
    wait_for_array(shared, pipeline, 1);
    Scores s, unused;
    clear(unused);
    multiply_scores(shared, stage, s);
    make_scores(params, work, part_of(params, work, at, 0), s, [](int, int, int, float) {});
    check_range(shared, stage, 0, s, unused);
    add_scores(params, shared, stage, 0, statistics, s);
    release_per_lane(shared.empty[stage][0]);
    release_per_lane(shared.empty[stage][1]);
    pipeline.advance();
  }
  replace_far(params, shared, statistics);
  __syncwarp();
}

FA_DEVICE void consume(const BwdFp32Params& params, TileStorage& shared) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  find_own_limits(shared);
  PipelineState<kStages> pipeline;
  if (work.any_far != 0) find_statistics(params, shared, pipeline);
  Sums dq;
  clear(dq);
  OtherTile at = next_visible(params, work, {0, work.begin});
#pragma unroll 1
  while (at.head == 0) {
    const int stage = pipeline.index();
    Scores weights, ds;
    multiply_and_weigh(params, shared, pipeline, at, weights, ds,
                       [&] { release_per_lane(shared.empty[stage][1]); });
    add_product(shared, stage, 0, ds, dq);  // dQ += dS K
    release_per_lane(shared.empty[stage][0]);
    pipeline.advance();
    at = next_visible(params, work, {0, at.tile + 1});
  }
  const uint32 again = write_sums(params, work, params.dq, p.q_len, p.head_dim, dq, p.scale);
  for_each_row(work, again, [&](int query) {
    recompute_dq<kDim>(params, work, row_by_hand(params, work, work.entry, query), query);
  });
}

// As `find_statistics` where two warpgroups share queries: for the one that multiplies them by
// keys.
FA_DEVICE void find_shared_statistics(const BwdFp32Params& params, TileStorage& shared,
                                      PipelineState<kStages>& pipeline, const HighParts& high) {
  const WorkTile& work = shared.work;
  const int role = warp_role();
  Statistics statistics;
#pragma unroll 1
  for (OtherTile at = next_visible(params, work, {0, work.begin}); at.head == 0;
       at = next_visible(params, work, {0, at.tile + 1})) {
    const int stage = pipeline.index();
    wait_for_array(shared, pipeline, 0);
    if (role == 0) {
      Products products;
      Scores s, unused;
      clear(unused);
      start_products(shared, stage, 0, high, products);
      wgmma_wait_group<0>();
      add_up(shared, stage, 0, products, s);
      make_scores(params, work, part_of(params, work, at, 0), s, [](int, int, int, float) {});
      check_range(shared, stage, 0, s, unused);
      add_scores(params, shared, stage, 0, statistics, s);
    } else {
      wait_for_array(shared, pipeline, 1);
      release_per_lane(shared.empty[stage][1]);
    }
    release_per_lane(shared.empty[stage][0]);
    pipeline.advance();
  }
  if (role == 0) replace_far(params, shared, statistics);
  __syncwarp();
}

// As `consume` where two warpgroups share queries: each has half of the columns of dQ.
FA_DEVICE void consume_shared(const BwdFp32Params& params, TileStorage& shared) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  find_own_limits(shared);
  HighParts high;
  load_high_parts(shared, high);
  PipelineState<kStages> pipeline = first_tile();
  if (work.any_far != 0) find_shared_statistics(params, shared, pipeline, high);
  Sums dq;
  clear(dq);
  OtherTile at = next_visible(params, work, {0, work.begin});
#pragma unroll 1
  while (at.head == 0) {
    const int stage = pipeline.index();
    Scores ds;
    multiply_and_exchange(params, shared, pipeline, at, high, ds);
    add_product(shared, stage, 0, ds, dq);  // dQ += dS K
    release_per_lane(shared.empty[stage][0]);
    pipeline.advance();
    at = next_visible(params, work, {0, at.tile + 1});
  }
  const uint32 again = write_sums(params, work, params.dq, p.q_len, p.head_dim, dq, p.scale);
  for_each_row(work, again, [&](int query) {
    recompute_dq<8 * kMmaV>(params, work, row_by_hand(params, work, work.entry, query), query);
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dq_fp32_sm90(const __grid_constant__ BwdFp32Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  TileStorage& shared = *reinterpret_cast<TileStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    find_work(params, shared.work);
    init_barriers(shared);
    load_own(params, shared);
  }
  __syncthreads();
  wait(shared.own_full, 0);
  look_for_far_rows(shared);
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
      load_tiles(params, shared, shared.work.any_far != 0 ? 2 : 1);
    }
  }
}
