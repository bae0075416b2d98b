// Attention backward in float64 for SM80 and later, bias: mma.sync, cp.async.
//
// One block owns kTileM queries and kTileN keys of the gradient (dbias_rows.cuh).  Of each step it
// computes
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dbias += P (dP - delta)
// Of the two warps that share 16 queries one computes P, the other one dP - delta and the sums
// (backward_fp64.cuh).
//
// A pair is a number of its own here: what a hidden one holds reaches no other, and nothing has to
// be computed again.
#include "cuda_src/common/backward_fp64.cuh"
#include "cuda_src/common/dbias_rows.cuh"

using DbiasParams = DbiasRowsParams<BwdFp64Params, double>;
static_assert(sizeof(DbiasParams) == FA_DBIAS_PARAMS_BYTES, "dbias_rows.py holds the same struct");
static_assert(kColumnWarps == 1 && kHandOver == 1 && kStages == 1, "one warp of a pair has sums");

struct DbiasStorage {
  SharedStorage tiles;
  DbiasWork work;
};
static_assert(sizeof(DbiasStorage) == FA_DBIAS_SHARED_BYTES, "dbias_rows.py asks for as much");
static_assert(kPairs * kTileN <= 2 * kTileM * kDim, "sums of a tile fit where its queries were");

struct TileWarps {
  static constexpr int kRows = kTileM, kCols = kTileN, kDown = kPairs, kAcross = 1;
  static __device__ __forceinline__ bool have_sums() { return warp_role() == 1; }
  static __device__ __forceinline__ int row() { return warp_row(); }
  static __device__ __forceinline__ int col() { return 0; }
  static __device__ __forceinline__ int down(int warp) { return warp % kPairs; }
  static __device__ __forceinline__ int across(int) { return 0; }
};

// What is known of the queries of a tile, by cp.async.
FA_DEVICE void load_rows(const DbiasParams& params, SharedStorage& shared) {
  const int64 first = static_cast<int64>(shared.work.entry) * params.entry_rows;
  const double* from = reinterpret_cast<const double*>(params.rows + first + shared.work.first_own);
#pragma unroll 1
  for (int half = tid_x_again(); half < 2 * kTileM; half += kThreads) {
    cp_async_cg_16(cvta_to_shared(shared.rows[0]) + 16 * half, from + 2 * half, 16);
  }
}

// S becomes P, or kHiddenWeight of pairs that do not count.
FA_DEVICE void products_to_weights(const DbiasParams& params, const SharedStorage& shared,
                                   const OtherTile& at, Products& x) {
  const QueryRow* rows = shared.rows[0] + warp_row();
  const int first = shared.work.first_own + warp_row() + tid_x_again() % 32 / 4;
  for_each_product(params, shared.work, x, at, [&](int j, int e, const auto& found) {
    const QueryRow& row = query_row(rows, j, e);
    const bool is_hidden = found.score == -FA_INFINITY || row.shift == FA_INFINITY ||
                           first + e / 2 * 8 >= params.common.q_len;
    x[0][j][e] = is_hidden ? kHiddenWeight : weight_fp64(row, found.score);
  });
}

// sums += P (dP - delta).
FA_DEVICE void add_terms(Products& sums, const Exchanged& weights, const Products& x) {
#pragma unroll
  for (int i = 0; i < 2 * kMmaN; ++i) {
    const double2 two = weights[i][tid_x_again() % 32];
    double &low = sums[0][i / 2][i % 2 * 2], &high = sums[0][i / 2][i % 2 * 2 + 1];
    low = two.x == kHiddenWeight ? low : fma(two.x, x[0][i / 2][i % 2 * 2], low);
    high = two.y == kHiddenWeight ? high : fma(two.y, x[0][i / 2][i % 2 * 2 + 1], high);
  }
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_bwd_dbias_fp64(const __grid_constant__ DbiasParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  DbiasStorage& shared = *reinterpret_cast<DbiasStorage*>(shared_bytes);
  SharedStorage& tiles = shared.tiles;
  if (threadIdx.x == 0) begin_steps(params, shared.work);
  Products sums = {};
#pragma unroll 1
  while (params.joined == 0 && next_step(params, shared.work, tiles.work)) {
    const OtherTile at = {0, shared.work.step.key_tile};
    if (!queries_are_there(shared.work)) {
      load_own(params, tiles);
      load_rows(params, tiles);
    }
    load_other(params, tiles, at, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();  // the tiles are there
    Products x;
    multiply_arrays(tiles, 0, x);  // S = Q K^T or dP = dO V^T
    const int pair = warp_pair();
    if (warp_role() == 0) {
      products_to_weights(params, tiles, at, x);
      hand_over(tiles.exchanged[0][pair], x);
      bar_arrive(1 + pair, 64);
    } else {
      subtract_delta(tiles.rows[0] + warp_row(), x);
      bar_sync(1 + pair, 64);
      add_terms(sums, tiles.exchanged[0][pair], x);
    }
  }
  __syncthreads();  // the block's tile is known, also where it has no step
  write_tile<TileWarps>(params, shared.work.own, tiles.own[0], sums);
}
