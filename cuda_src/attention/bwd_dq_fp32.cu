// Attention backward in float32 for SM80 and later, queries, on float16 tensor cores: mma.sync,
// ldmatrix, cp.async.
//
// One block owns kTileM query rows of one batch entry and walks over the tiles of keys that some of
// them see:
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dS = P (dP - delta),  dQ += dS K
// Each warp has all of this for its own queries (backward_fp32.cuh).  It finds what replaces an LSE
// that is far, and writes it for bwd_dkdv_fp32.
#include "cuda_src/common/backward_fp32.cuh"

// ---------------------------------------------------------------------------------------- far rows
// From this log-sum-exp on, rows are far.  Below, its rounding changes weights by 2^-20 at most.
constexpr float kFarFp32 = 32.0f;
// An LSE that differs by more than this part of itself from that of a row's own scores is one of
// more keys: results over parts of the keys were merged.
constexpr float kLseToleranceFp32 = 1.0f / (1 << 19);
// The largest score of a row that has seen no key: finite, so that no difference of two is NaN.
constexpr float kNoMaxFp32 = -3.40282347e38f;

FA_DEVICE bool is_far(float lse) { return fabsf(lse) >= kFarFp32 && fabsf(lse) < FA_INFINITY; }

// Looks for far rows among those of the block; all threads take part.
FA_DEVICE void look_for_far_rows(SharedStorage& shared) {
#pragma unroll 1
  for (int r = threadIdx.x; r < kTileM; r += kThreads) {
    if (is_far(shared.own_rows[kShift][r])) shared.work.any_far = 1;
  }
}

FA_DEVICE float exp_of_difference(float x, float y) { return ex2_approx_ftz((x - y) * kLog2e); }

// The largest score of a row, and the sum of exponentials relative to it, NaN where scores may have
// lost digits that count.
struct RowStatistics {
  float row_max = kNoMaxFp32, row_sum = 0.0f;

  __device__ __forceinline__ void merge(float other_max, float other_sum) {
    const float most = fmaxf(row_max, other_max);
    row_sum =
        row_sum * exp_of_difference(row_max, most) + other_sum * exp_of_difference(other_max, most);
    row_max = most;
  }
  __device__ __forceinline__ void add(float score) {
    if (score == -FA_INFINITY) return;
    if (score == score) {
      merge(score, 1.0f);
    } else {
      row_sum = score;
    }
  }
};

// Puts what replaces a far LSE into a row, here and in memory.
FA_DEVICE void replace_lse(const BwdFp32Params& params, SharedStorage& shared, int r,
                           RowStatistics statistics) {
  const uint32 entry = shared.work.entry;
  const int query = shared.work.first_own + r;
  statistics.add(static_cast<float>(load_sink_fp64(params.common, entry, query)));
  if (!(statistics.row_sum > 0.0f)) return;
  const float lse = shared.own_rows[kShift][r];
  const float own_lse = statistics.row_max + logf(statistics.row_sum);
  const bool covers_more_keys = !(fabsf(lse - own_lse) <= kLseToleranceFp32 * fabsf(lse));
  const float factor =
      covers_more_keys ? exp_of_difference(statistics.row_max, lse) : 1.0f / statistics.row_sum;
  shared.own_rows[kShift][r] = statistics.row_max;
  shared.own_rows[kFactor][r] = factor;
  float* to = params.rows + first_row_of<false>(params, entry) + query;
  to[kShift * query_fields_step(params)] = statistics.row_max;
  to[kFactor * query_fields_step(params)] = factor;
}

// Goes over all tiles for the scores alone, which are rounded as those of the weights will be.
FA_DEVICE void find_statistics(const BwdFp32Params& params, SharedStorage& shared) {
  const WorkTile& work = shared.work;
  RowStatistics statistics[kMmaM][2];
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
      make_scores(params, part_of(params, work, at, row), s, [](int, int, int, float) {});
      check_range(shared, 0, row, s, unused);
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
        for (int e = 0; e < 4 * kMmaN; ++e) statistics[m][e % 4 / 2].add(s[m][e / 4][e % 4]);
      }
    }
    __syncthreads();  // all have read the tile
  }
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int i = 0; i < 2 * kMmaM; ++i) {
    RowStatistics& own = statistics[i / 2][i % 2];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other_max = __shfl_xor_sync(kFullWarp, own.row_max, step);
      own.merge(other_max, __shfl_xor_sync(kFullWarp, own.row_sum, step));
    }
    const int r = warp_row() + 8 * i + lane / 4;
    if (lane % 4 == 0 && is_far(shared.own_rows[kShift][r])) replace_lse(params, shared, r, own);
  }
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
      compute_weights(params, shared, at, stage, row, weights, ds);
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
    recompute_dq<kDim>(params, work.entry, known_row(params, work.entry, query), query);
  });
}
