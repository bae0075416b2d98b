// What the two kernels of attention backward for SM80 share: where weights and sums go.
//
// A block owns rows of one side of the pairs, keys or queries, and walks over tiles of the other
// side.  Its warps hold scores as accumulators of m16n8 whose rows are the block's own.
#pragma once
#include "cuda_src/common/backward_params.cuh"
#include "cuda_src/common/backward_scores.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/constant.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/nonfinite_flags.cuh"
#include "cuda_src/common/score.cuh"

// Puts pairs of weights into a tile in shared memory, from a row and a column of it on.
template <typename Tile, int kMmaM, int kMmaN>
FA_DEVICE void write_p(uint32 tile, const uint32 (&pairs)[kMmaM][kMmaN][2], int row, int col) {
  const int lane = tid_x_again() % 32;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        const uint32 at = Tile::offset(row + 16 * i + 8 * h + lane / 4, col / 8 + j);
        st_shared_b32(tile + at + lane % 4 * 4, pairs[i][j][h]);
      }
    }
  }
}

// Rounds sums into a tile in shared memory, from a row of it on; of its columns, 16 at a time, this
// warp has every kGroups-th from the `pair`-th on.  Looks at those of rows before `rows`.
template <bool kBf16, typename Tile, int kGroups, int kMmaM, int kMmaN>
FA_DEVICE void write_gradient(uint32 tile, const float (&sums)[kMmaM][kMmaN][4], int row, int pair,
                              int rows, float scale, NonfiniteProbe& nonfinite_probe) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = row + 16 * i + 8 * h + lane / 4;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        const float low = sums[i][j][2 * h], high = sums[i][j][2 * h + 1];
        if (at < rows) {
          nonfinite_probe.add(low);
          nonfinite_probe.add(high);
        }
        const int chunk = 2 * (pair + kGroups * (j / 2)) + j % 2;
        st_shared_b32(tile + Tile::offset(at, chunk) + lane % 4 * 4,
                      pack2<kBf16>(low * scale, high * scale));
      }
    }
  }
}
