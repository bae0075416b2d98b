// What attention backward knows of each query before it begins: its LSE in units of log2 and
// delta = dout . out - dlse, for bwd_sm90.
//
// 2**lane_shift threads read a row.  Queries that do not exist, or that see no key, get an LSE of
// +infinity: all their weights are 0.  The words that blocks of bwd_sm90 wait for each other with
// are set to 0 here.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/scores.cuh"

constexpr bool kBf16 = FA_BF16;  // bfloat16, else float16
constexpr int kThreads = FA_THREADS;

struct BwdRowsParams {
  AttentionParams common;  // q is dout
  const float* dlse;       // (*batch, q_len) dense, null for zeros
  float4* rows;            // (*batch, entry_rows / 2): LSE of two rows, delta of them
  uint32* turns;
  int64 words;     // how many of them
  int entry_rows;  // q_len, padded to whole tiles
  int lane_shift;
};
static_assert(sizeof(BwdRowsParams) == FA_ROWS_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_bwd_rows(const __grid_constant__ BwdRowsParams params) {
  const AttentionParams& p = params.common;
  const int64 index = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64 i = index; i < params.words; i += static_cast<int64>(gridDim.x) * kThreads) {
    params.turns[i] = 0;
  }
  const int64 row_of_all = index >> params.lane_shift;
  const int64 entry = divide(row_of_all, static_cast<int64>(params.entry_rows));
  const int row = static_cast<int>(row_of_all - entry * params.entry_rows);
  const int lane = threadIdx.x & ((1 << params.lane_shift) - 1);
  int64 entries = 1;
  for (int axis = 0; axis < p.batch_axes; ++axis) entries *= p.batch_size[axis];
  const bool there = entry < entries && row < p.q_len;
  float sum = 0.0f;
  if (there && 8 * lane < p.v_dim) {
    const BatchOffsets at = batch_offsets(p, entry);
    auto load = [&](const void* base, int64 offset) {
      const uint16* from = static_cast<const uint16*>(base) + offset + 8 * lane;
      return *reinterpret_cast<const uint4*>(from);
    };
    const uint4 x = load(p.q, at.q + static_cast<int64>(row) * p.q_row);
    const uint4 y = load(p.out, at.out + static_cast<int64>(row) * p.out_row);
    auto add = [&](uint32 a, uint32 b) {
      sum = fmaf(to_float<kBf16>(static_cast<uint16>(a)), to_float<kBf16>(static_cast<uint16>(b)),
                 sum);
      sum = fmaf(to_float<kBf16>(static_cast<uint16>(a >> 16)),
                 to_float<kBf16>(static_cast<uint16>(b >> 16)), sum);
    };
    add(x.x, y.x);
    add(x.y, y.y);
    add(x.z, y.z);
    add(x.w, y.w);
  }
  for (int step = 1 << params.lane_shift >> 1; step > 0; step /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, step);
  }
  if (lane != 0 || entry >= entries) return;
  float lse = FA_INFINITY, delta = 0.0f;
  if (there) {
    const int64 dense = entry * p.q_len + row;
    const float given = p.lse[dense];
    if (given != -FA_INFINITY) {
      lse = given * kLog2e;
      delta = params.dlse == nullptr ? sum : sum - params.dlse[dense];
    }
  }
  float* pair = reinterpret_cast<float*>(params.rows + (row_of_all >> 1)) + (row & 1);
  pair[0] = lse;
  pair[2] = delta;
}
