// Attention backward in float32 for SM80 and later, keys and values, on float16 tensor cores:
// mma.sync, ldmatrix, cp.async.
//
// One block owns kTileN keys of one entry of keys and values and walks over the tiles of kTileM
// queries that see some of them, head by head of those that share the keys:
//   S^T = K Q^T,  P^T = exp(S^T - LSE),          dV += P^T dO
//   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),   dK += dS^T Q
// Each warp has all of this for its own keys (backward_fp32.cuh).  All sums are added up in one
// order, so results are the same bits every time.
#include "cuda_src/common/backward_fp32_sm80.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dkdv_fp32(const __grid_constant__ BwdFp32Params params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  if (threadIdx.x == 0) find_work(params, shared.work);
  __syncthreads();
  OtherTile at = next_visible(params, work, {0, work.begin});
  if (at.head < params.group) {
    load_own(params, shared);
    load_other(params, shared, at, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    find_own_limits(shared);
  }
  Sums dk, dv;
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int stage = 0; at.head < params.group; stage = kStages - 1 - stage) {
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and all warps have read the one before it
    if constexpr (kStages > 1) {
      const OtherTile next = next_visible(params, work, {at.head, at.tile + 1});
      if (next.head < params.group) load_other(params, shared, next, 1 - stage);
      cp_async_commit_group();
    }
#pragma unroll 1
    for (int row = 0; row < kOtherRows; row += kPart) {
      Scores weights, ds;
      multiply_and_weigh(params, shared, at, stage, row, weights, ds);
      add_product(shared, stage, 1, row, weights, dv);  // dV += P^T dO
      add_product(shared, stage, 0, row, ds, dk);       // dK += dS^T Q
    }
    at =
        next_visible(params, work, {at.head, at.tile + 1});  // again: it would take registers above
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps have read this tile
      if (at.head < params.group) load_other(params, shared, at, 0);
      cp_async_commit_group();
    }
  }
  cp_async_wait_group<0>();
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
