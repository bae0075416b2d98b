// Attention backward in float64 for SM80 and later, queries: mma.sync, cp.async.
//
// One block owns kTileM query rows of one batch entry and walks over the tiles of keys that some of
// them see:
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dS = P (dP - delta),  dQ += dS K
// Of the two warps that share 16 rows one computes P and the other one dP - delta.  Both then make
// dS of them, and each sums up half of the columns of dQ (backward_fp64.cuh).
//
// It finds delta = dout . out - dlse, and what replaces an LSE that is far, and writes both for
// bwd_dkdv_fp64.
#include "cuda_src/common/backward_fp64.cuh"

// -------------------------------------------------------------------------------------- known rows
// From this log-sum-exp on, rows are far.  Below, its rounding changes weights by 2**-43 at most,
// which is what the rounding of scores of that size does.
constexpr double kFarFp64 = 1024.0;
// An LSE that is larger than that of a row's own scores by more than this part of itself is one of
// more keys: results over parts of the keys were merged.
constexpr double kLseToleranceFp64 = 1.0 / (1ll << 48);

// What is known of a query by its LSE and its output, by a whole warp.  One that does not exist, or
// that sees no key, has weights of 0.
FA_DEVICE QueryRow known_row(const BwdFp64Params& params, const WorkTile& work, int query) {
  const AttentionParams& p = params.common;
  const uint32 entry = work.entry;
  const int64 index = static_cast<int64>(entry) * p.q_len + query;
  const double lse =
      query < p.q_len && !is_invalid_row(p, work, query) ? params.lse[index] : -FA_INFINITY;
  if (lse == -FA_INFINITY) return {FA_INFINITY, 1.0, 0.0, 0.0};
  const double product = dot_of_warp(row_start(params, params.dout, entry, query),
                                     row_start(params, params.out, entry, query), p.v_dim);
  const double dlse = params.dlse == nullptr ? 0.0 : params.dlse[index];
  return {lse, 1.0, product - dlse, 0.0};
}

FA_DEVICE bool is_far(double lse) { return fabs(lse) >= kFarFp64 && fabs(lse) < FA_INFINITY; }

FA_DEVICE void find_known_rows(const BwdFp64Params& params, SharedStorage& shared) {
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < kTileM; r += kWarps) {
    const QueryRow row = known_row(params, shared.work, shared.work.first_own + r);
    if (threadIdx.x % 32 != 0) continue;
    shared.rows[0][r] = row;
    if (is_far(row.shift)) shared.work.any_far = 1;
  }
}

// ---------------------------------------------------------------------------------------- far rows
// The largest score of a row, and the sum of exponentials relative to it.
struct RowStatistics {
  double row_max = kNoMaxFp64, row_sum = 0.0;

  __device__ __forceinline__ void merge(double other_max, double other_sum) {
    const double most = other_max > row_max ? other_max : row_max;
    row_sum = row_sum * exp_fp64(row_max - most) + other_sum * exp_fp64(other_max - most);
    row_max = most;
  }
  __device__ __forceinline__ void add(double score) {
    if (score != -FA_INFINITY) merge(score, 1.0);
  }
};

// Puts what replaces a far LSE into a row.
FA_DEVICE void replace_lse(const BwdFp64Params& params, uint32 entry, int query, QueryRow& row,
                           RowStatistics statistics) {
  const AttentionParams& p = params.common;
  statistics.add(load_sink_fp64(p, entry, query));
  if (!(statistics.row_sum > 0.0)) return;
  const double lse = row.shift, own_lse = statistics.row_max + log(statistics.row_sum);
  const bool covers_more_keys = lse - own_lse > kLseToleranceFp64 * fabs(lse);
  row.factor = covers_more_keys ? exp_fp64(statistics.row_max - lse) : 1.0 / statistics.row_sum;
  row.shift = statistics.row_max;
}

// Goes over all tiles for the scores alone, which are rounded as those of the weights will be.
FA_DEVICE void find_statistics(const BwdFp64Params& params, SharedStorage& shared) {
  const WorkTile& work = shared.work;
  RowStatistics statistics[2];
#pragma unroll 1
  for (OtherTile at = next_visible(params, work, {0, work.begin}); at.head == 0;
       at = next_visible(params, work, {0, at.tile + 1})) {
    load_other(params, shared, at, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
    if (warp_role() == 0) {
      Products x;
      multiply_arrays(shared, 0, x);
      for_each_product(params, work, x, at, [&](int, int e, const ScoreAndSlope<double>& found) {
        statistics[e / 2].add(found.score);
      });
    }
    __syncthreads();  // all have read the tile
  }
  if (warp_role() != 0) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const double other_max = shfl_xor_fp64(statistics[h].row_max, step);
      statistics[h].merge(other_max, shfl_xor_fp64(statistics[h].row_sum, step));
    }
    const int lane = tid_x_again() % 32, r = warp_row() + lane / 4 + 8 * h;
    QueryRow& row = shared.rows[0][r];
    if (lane % 4 == 0 && is_far(row.shift)) {
      replace_lse(params, work.entry, work.first_own + r, row, statistics[h]);
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_dq_fp64(const __grid_constant__ BwdFp64Params params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  if (threadIdx.x == 0) find_work(params, shared.work);
  __syncthreads();
  load_own(params, shared);
  cp_async_commit_group();
  find_known_rows(params, shared);
  __syncthreads();
  if (work.any_far != 0) {
    find_statistics(params, shared);
    __syncthreads();
  }
  if (threadIdx.x < kTileM) {
    const int64 first = static_cast<int64>(work.entry) * params.entry_rows + work.first_own;
    params.rows[first + threadIdx.x] = shared.rows[0][threadIdx.x];
  }

  OtherTile at = next_visible(params, work, {0, work.begin});
  if (at.head == 0) load_other(params, shared, at, 0);
  cp_async_commit_group();
  Sums dq;
  clear(dq);
#pragma unroll 1
  for (int stage = 0; at.head == 0; stage = kStages - 1 - stage) {
    const OtherTile next = next_visible(params, work, {0, at.tile + 1});
    cp_async_wait_group<0>();
    __syncthreads();  // this tile is there, and all warps have read the one before it
    if constexpr (kStages > 1) {
      if (next.head == 0) load_other(params, shared, next, 1 - stage);
      cp_async_commit_group();
    }
    Products x;
    multiply_arrays(shared, stage, x);  // S = Q K^T or dP = dO V^T
    const int role = warp_role(), pair = warp_pair();
    const QueryRow* rows = shared.rows[0] + warp_row();
    if (role == 0) {
      compute_weights(params, work, rows, at, x, x);
    } else {
      subtract_delta(rows, x);
    }
    hand_over(shared.exchanged[role][pair], x);
    bar_sync(1 + pair, 64);
    multiply_by(x, shared.exchanged[1 - role][pair]);  // dS = P (dP - delta)
    add_to_sums(shared, stage, 0, x, dq);              // dQ += dS K
    if constexpr (kStages == 1) {
      __syncthreads();  // all warps have read this tile
      if (next.head == 0) load_other(params, shared, next, 0);
      cp_async_commit_group();
    }
    at = next;
  }
  cp_async_wait_group<0>();
  write_sums(params, work, params.dq, p.q_len, p.head_dim, dq, params.scale, [&](int query) {
    recompute_dq<kSumCols>(params, work, shared.rows[0][query - work.first_own], query);
  });
}
