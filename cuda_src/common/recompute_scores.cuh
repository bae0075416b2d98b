// Scores once more, for the few tiles whose scores were given up too early.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/element.cuh"
#include "ptx/ldmatrix.cuh"

// Elements col and col + 1 of a row of `cols` elements, zeros past its end and where it is null;
// col is even.
FA_DEVICE uint32 load_pair(const uint16* row, int col, int cols) {
  if (row == nullptr || col >= cols) return 0;
  if (col + 1 < cols) return *reinterpret_cast<const uint32*>(row + col);
  return row[col];
}

// S = Q K^T of 16 rows of this warp with 8 * kMmaN keys, by mma.sync.  Q is read from a swizzled
// tile in shared memory (`q_address` is this lane's row of an ldmatrix), K from global memory,
// where row_of(key) is: rarely enough that its tile in shared memory need not be kept for this.
template <bool kBf16, typename QTile, int kSteps, int kMmaN, typename RowOf>
FA_DEVICE void recompute_scores(const AttentionParams& p, float (&s)[1][kMmaN][4], uint32 q_address,
                                int first_key, const RowOf& row_of) {
  const int lane = threadIdx.x % 32;
  // Rolled up, because this code is rarely run and would be a quarter of the kernel.
#pragma unroll 2
  for (int j = 0; j < kMmaN; ++j) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const int key = first_key + 8 * j + lane / 4;
    const uint16* row = key < p.k_len ? row_of(key) : nullptr;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      uint32 a[4];
      ldmatrix_x4(a, QTile::at(q_address, 0, step));
      const int col = 16 * step + lane % 4 * 2;
      mma_m16n8k16<kBf16>(sums, a, load_pair(row, col, p.head_dim),
                          load_pair(row, col + 8, p.head_dim));
    }
#pragma unroll
    for (int i = 0; i < kMmaN; ++i) {  // registers have no index
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][i][e] = i == j ? sums[e] : s[0][i][e];
    }
  }
}

// The same of an entry whose rows of keys are at equal distances.
template <bool kBf16, typename QTile, int kSteps, int kMmaN>
FA_DEVICE void recompute_scores(const AttentionParams& p, uint32 entry, float (&s)[1][kMmaN][4],
                                uint32 q_address, int first_key) {
  const uint16* k = static_cast<const uint16*>(p.k) + batch_offsets(p, entry).k;
  recompute_scores<kBf16, QTile, kSteps>(
      p, s, q_address, first_key, [&](int key) { return k + static_cast<int64>(key) * p.k_row; });
}
