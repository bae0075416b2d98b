// Attention backward in float32 for SM80 and later, bias, on float16 tensor cores: mma.sync,
// ldmatrix, cp.async.
//
// One block owns kTileM queries and kTileN keys of the gradient (dbias_rows.cuh).  Of each step it
// computes
//   S = Q K^T,  P = exp(S - LSE),  dP = dO V^T,  dbias += P (dP - delta)
// as bwd_dq_fp32 does, each warp for queries of its own (backward_fp32_sm80.cuh).
//
// A term that is not finite, because an input is not, because the pair is hidden and holds anything
// or because check_range() wants it, is computed again in float64.
#include "cuda_src/common/backward_fp32_sm80.cuh"
#include "cuda_src/common/dbias_rows.cuh"

using DbiasParams = DbiasRowsParams<BwdFp32Params, float>;
static_assert(sizeof(DbiasParams) == FA_DBIAS_PARAMS_BYTES, "dbias_rows.py holds the same struct");
static_assert(kStages == 1, "blocks on the same multiprocessor load while others multiply");

struct DbiasStorage {
  SharedStorage tiles;
  DbiasWork work;
};
static_assert(sizeof(DbiasStorage) == FA_DBIAS_SHARED_BYTES, "dbias_rows.py asks for as much");
static_assert(kWarps * kTileN <= 2 * kTileM * kDim, "sums of a tile fit where its queries were");

struct TileWarps {
  static constexpr int kRows = kTileM, kCols = kTileN, kDown = kWarps, kAcross = 1;
  static __device__ __forceinline__ bool have_sums() { return true; }
  static __device__ __forceinline__ int row() { return warp_row(); }
  static __device__ __forceinline__ int col() { return 0; }
  static __device__ __forceinline__ int down(int warp) { return warp; }
  static __device__ __forceinline__ int across(int) { return 0; }
};

// What a pair adds to the gradient, by a warp; 0 of one that does not count.
FA_DEVICE float pair_term(const DbiasParams& params, const WorkTile& work, int query, int key) {
  const AttentionParams& p = params.common;
  if (query >= p.q_len || key < first_key(p, query) || key > last_key(p, query)) return 0.0f;
  const RowByHand row = row_by_hand(params, work, work.entry, query);
  if (row.shift == FA_INFINITY) return 0.0f;
  const PairTerms terms = pair_terms(params, work.entry, row, query, key);
  return terms.counts ? terms.weight * terms.dp : 0.0f;
}

// Puts other terms in the place of those that are not finite, one after the other.  Rolled up,
// because it is rarely run; registers have no index, so each term is offered to all of them.
FA_DEVICE void replace_terms(const DbiasParams& params, const WorkTile& work, int query, int key,
                             Scores& terms) {
  constexpr int kTerms = kMmaM * kMmaN * 4;
  const int lane = tid_x_again() % 32;
#pragma unroll 1
  for (int n = 0; n < kTerms; ++n) {
    float term = 0.0f;
#pragma unroll
    for (int m = 0; m < kTerms; ++m) {
      term = m == n ? terms[m / (4 * kMmaN)][m / 4 % kMmaN][m % 4] : term;
    }
    const int own = query + n / (4 * kMmaN) * 16 + n % 4 / 2 * 8;
    const int other = key + n / 4 % kMmaN * 8 + n % 2;
    uint32 left = __ballot_sync(kFullWarp, !(fabsf(term) < FA_INFINITY));
    if (left == 0) continue;
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const float found = pair_term(params, work, __shfl_sync(kFullWarp, own, from),
                                    __shfl_sync(kFullWarp, other, from));
      term = lane == from ? found : term;
    }
#pragma unroll
    for (int m = 0; m < kTerms; ++m) {
      float& to = terms[m / (4 * kMmaN)][m / 4 % kMmaN][m % 4];
      to = m == n ? term : to;
    }
  }
}

FA_DEVICE bool all_finite(const Scores& terms) {
  float probe = 0.0f;  // NaN as soon as a number is NaN or infinite
#pragma unroll
  for (int i = 0; i < kMmaM * kMmaN * 4; ++i) {
    probe = fmaf(terms[i / (4 * kMmaN)][i / 4 % kMmaN][i % 4], 0.0f, probe);
  }
  return probe == probe;
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_bwd_dbias_fp32(const __grid_constant__ DbiasParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  DbiasStorage& shared = *reinterpret_cast<DbiasStorage*>(shared_bytes);
  SharedStorage& tiles = shared.tiles;
  if (threadIdx.x == 0) begin_steps(params, shared.work);
  float sums[kMmaM][kTileN / 8][4] = {};
#pragma unroll 1
  while (params.joined == 0 && next_step(params, shared.work, tiles.work)) {
    const OtherTile at = {0, shared.work.step.key_tile};
    if (!queries_are_there(shared.work)) load_own(params, tiles);
    load_other(params, tiles, at, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();  // the tiles are there
    find_own_limits(tiles);
#pragma unroll
    for (int row = 0; row < kTileN; row += kPart) {
      Scores weights, terms;
      multiply_and_weigh<false>(params, tiles, at, 0, row, weights, terms);
      if (__any_sync(kFullWarp, !all_finite(terms))) {
        const Part part = part_of(params, tiles.work, at, row);
        replace_terms(params, tiles.work, part.own, part.other, terms);
      }
#pragma unroll
      for (int i = 0; i < kMmaM * kMmaN * 4; ++i) {
        const int m = i / (4 * kMmaN), j = i / 4 % kMmaN;
        sums[m][row / 8 + j][i % 4] += terms[m][j][i % 4];
      }
    }
  }
  __syncthreads();  // the block's tile is known, also where it has no step
  write_tile<TileWarps>(params, shared.work.own, reinterpret_cast<float*>(tiles.own), sums);
}
