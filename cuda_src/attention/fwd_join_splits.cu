// Joins the outputs of key splits that builds of fwd_sm90 with kSplit have left: a warp has a row.
//
// Splits are added up in their order, as those of fwd_splitkv are, by the same functions.
#include "cuda_src/common/splitkv_rows.cuh"

constexpr int kWarps = FA_WARPS;

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    attention_fwd_join_splits(const __grid_constant__ FwdSplitkvParams params) {
  const int64 row = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= params.rows) return;
  const int64 batch = row / params.common.q_len;
  RowSums sums;
  read_splits(params, row, sums);
  finish_row(params, batch, static_cast<int>(row - batch * params.common.q_len), sums);
}
