// Attention backward in float32 for SM80 and later, queries, on float16 tensor cores: mma.sync,
// ldmatrix, cp.async.
//
// One block owns kTileM query rows of one batch entry and walks over the tiles of keys that some of
// them see:
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dS = P (dP - delta),  dQ += dS K
// Each warp has all of this for its own queries (backward_fp32.cuh).  It finds what replaces an LSE
// that is far, and writes it for bwd_dkdv_fp32.
#include "cuda_src/common/backward_fp32_sm80.cuh"
#include "cuda_src/common/far_rows_fp32.cuh"

// ---------------------------------------------------------------------------------------- far rows
// Goes over all tiles for the scores alone, which are rounded as those of the weights will be.
FA_DEVICE void find_statistics(const BwdFp32Params& params, SharedStorage& shared) {
  const WorkTile& work = shared.work;
  Statistics statistics;
#pragma unroll 1
  for (OtherTile at = next_visible(params, work, {0, work.begin}); at.head == 0;
       at = next_visible(params, work, {0, at.tile + 1})) {
    load_other(params, shared, at, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < kOtherRows; row += kPart) {
      Scores s, unused;
      clear(unused);
      multiply_arrays(shared, 0, 0, row, s);
      make_scores(params, work, part_of(params, work, at, row), s, [](int, int, int, float) {});
      check_range(shared, 0, row, s, unused);
      add_scores(params, shared, 0, row, statistics, s);
    }
    __syncthreads();  // all have read the tile
  }
  replace_far(params, shared, statistics);
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dq_fp32(const __grid_constant__ BwdFp32Params params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  if (threadIdx.x == 0) find_work(params, shared.work);
  __syncthreads();
  OtherTile at = next_visible(params, work, {0, work.begin});
  load_own(params, shared);
  if (at.head == 0) load_other(params, shared, at, 0);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  find_own_limits(shared);
  look_for_far_rows(shared);
  __syncthreads();
  if (work.any_far != 0) {
    find_statistics(params, shared);
    __syncthreads();
    if (at.head == 0) load_other(params, shared, at, 0);
    cp_async_commit_group();
  }
  Sums dq;
  clear(dq);
#pragma unroll 1
  for (int stage = 0; at.head == 0; stage = kStages - 1 - stage) {
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and all warps have read the one before it
    if constexpr (kStages > 1) {
      const OtherTile next = next_visible(params, work, {0, at.tile + 1});
      if (next.head == 0) load_other(params, shared, next, 1 - stage);
      cp_async_commit_group();
    }
#pragma unroll 1
    for (int row = 0; row < kOtherRows; row += kPart) {
      Scores weights, ds;
      multiply_and_weigh(params, shared, at, stage, row, weights, ds);
      add_product(shared, stage, 0, row, ds, dq);  // dQ += dS K
    }
    at = next_visible(params, work, {0, at.tile + 1});  // again: it would take registers above
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps have read this tile
      if (at.head == 0) load_other(params, shared, at, 0);
      cp_async_commit_group();
    }
  }
  cp_async_wait_group<0>();
  const uint32 again = write_sums(params, work, params.dq, p.q_len, p.head_dim, dq, p.scale);
  for_each_row(work, again, [&](int query) {
    recompute_dq<kDim>(params, work, row_by_hand(params, work, work.entry, query), query);
  });
}
