// Attention backward in float64 for SM80 and later, keys and values: mma.sync, cp.async.
//
// One block owns kTileN keys of one entry of keys and values and walks over the tiles of kTileM
// queries that see some of them, head by head of those that share the keys:
//   S^T = K Q^T,  P^T = exp(S^T - LSE),          dV += P^T dO
//   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),   dK += dS^T Q
// Of the two warps that share 16 keys one does the first line, the other one the second, with the
// weights of the first (backward_fp64.cuh).  All sums are added up by one block in one order, so
// results are the same bits every time.
#include "cuda_src/common/backward_fp64.cuh"

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_dkdv_fp64(const __grid_constant__ BwdFp64Params params) {
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
  }
  Sums sums;  // dV in warps of role 0, dK in those of role 1
  clear(sums);
#pragma unroll 1
  for (int stage = 0; at.head < params.group; stage = kStages - 1 - stage) {
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and all warps have read the one before it
    const OtherTile next = next_visible(params, work, {at.head, at.tile + 1});
    if constexpr (kStages > 1) {
      if (next.head < params.group) load_other(params, shared, next, 1 - stage);
      cp_async_commit_group();
    }
    Products x;
    multiply_arrays(shared, stage, x);  // S^T = K Q^T or dP^T = V dO^T
    const int role = warp_role(), pair = warp_pair();
    Exchanged& exchanged = shared.exchanged[0][pair];
    if (role == 0) {
      Products weights;
      compute_weights(params, work, shared.rows[stage], at, x, weights);
      hand_over(exchanged, weights);
      bar_arrive(1 + pair, 64);
    } else {
      subtract_delta(shared.rows[stage], x);
      bar_sync(1 + pair, 64);
      multiply_by(x, exchanged);  // dS^T = P^T (dP^T - delta)
    }
    add_to_sums(shared, stage, 1 - role, x, sums);  // dV += P^T dO or dK += dS^T Q
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps have read this tile
      if (next.head < params.group) load_other(params, shared, next, 0);
      cp_async_commit_group();
    }
    at = next;
  }
  const bool of_values = warp_role() == 0;
  write_sums(params, work, of_values ? params.dv : params.dk, p.k_len,
             of_values ? p.v_dim : p.head_dim, sums, of_values ? 1.0 : params.scale, [&](int key) {
               const auto row_of = [&](uint32 entry, int query) -> const QueryRow& {
                 return params.rows[static_cast<int64>(entry) * params.entry_rows + query];
               };
               recompute_key<kSumCols>(params, work, row_of, key, warp_role() == 0);
             });
}
