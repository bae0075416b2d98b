// What attention backward knows of each query before it begins: its LSE in units of log2 and
// delta = dout . out - dlse.
//
// 2**lane_shift threads read a row, and each reads kUnroll rows at a time, so that enough bytes are
// on their way.  Queries that do not exist, or that see no key, get an LSE of +infinity: all their
// weights are 0.  So do those of packed sequences whose offsets are out of range.  An LSE that is
// too large to compute weights from becomes a NaN, which bwd_nonfinite knows
// (common/large_lse.cuh).  Words that later launches count and mark with are set to 0 here.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/large_lse.cuh"

constexpr bool kBf16 = FA_BF16;  // bfloat16, else float16
constexpr int kThreads = FA_THREADS;
constexpr int kUnroll = FA_UNROLL;

struct BwdPreprocessParams {
  AttentionParams common;  // q is dout
  const float* dlse;       // (*batch, q_len) dense, null for zeros
  float4* lse_delta;       // (*batch, entry_rows / 2): LSE of two rows, delta of them
  uint32* counters;
  int64 counter_words;  // how many of them
  int entry_rows;       // q_len, padded to whole tiles
  int lane_shift;
  int entry_blocks;  // blocks of threads for an entry
};
static_assert(sizeof(BwdPreprocessParams) == FA_PREPROCESS_PARAMS_BYTES,
              "fa_cupy/gpu holds the same struct");

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_bwd_preprocess(const __grid_constant__ BwdPreprocessParams params) {
  const AttentionParams& p = params.common;
  const int64 index = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64 i = index; i < params.counter_words; i += static_cast<int64>(gridDim.x) * kThreads) {
    params.counters[i] = 0;
  }
  const int64 entry =
      divide(static_cast<int64>(blockIdx.x), static_cast<int64>(params.entry_blocks));
  const int block = static_cast<int>(blockIdx.x - entry * params.entry_blocks);
  const int rows_per_pass = kThreads >> params.lane_shift;  // rows
  const int first = block * rows_per_pass * kUnroll + (threadIdx.x >> params.lane_shift);
  const int lane = threadIdx.x & ((1 << params.lane_shift) - 1);
  const BatchOffsets at = batch_offsets(p, entry);
  const bool has_columns = 8 * lane < p.v_dim;
  uint4 x[kUnroll], y[kUnroll];
  float lse_in[kUnroll], dlse_in[kUnroll];  // LSE and its gradient, for the thread that writes them
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int row = first + i * rows_per_pass;
    auto load = [&](const void* base, int64 offset) {
      const uint16* from = static_cast<const uint16*>(base) + offset + 8 * lane;
      return row < p.q_len && has_columns ? *reinterpret_cast<const uint4*>(from)
                                          : uint4{0, 0, 0, 0};
    };
    x[i] = load(p.q, at.q + static_cast<int64>(row) * p.q_row);
    y[i] = load(p.out, at.out + static_cast<int64>(row) * p.out_row);
    lse_in[i] = -FA_INFINITY;
    dlse_in[i] = 0.0f;
    if (lane == 0 && row < p.q_len) {
      const int64 lse_index = entry * p.q_len + row;
      lse_in[i] = p.lse[lse_index];
      if (params.dlse != nullptr) dlse_in[i] = params.dlse[lse_index];
    }
  }
  // Looked at between the loads above, marks of rows would be waited for before the next ones are
  // asked for.
  bool is_invalid[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int row = first + i * rows_per_pass;
    is_invalid[i] = kPacked && lane == 0 && row < p.q_len && is_invalid_row(p, row);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    float sum = 0.0f;
    auto add = [&](uint32 a, uint32 b) {
      sum = fmaf(to_float<kBf16>(static_cast<uint16>(a)), to_float<kBf16>(static_cast<uint16>(b)),
                 sum);
      sum = fmaf(to_float<kBf16>(static_cast<uint16>(a >> 16)),
                 to_float<kBf16>(static_cast<uint16>(b >> 16)), sum);
    };
    add(x[i].x, y[i].x);
    add(x[i].y, y[i].y);
    add(x[i].z, y[i].z);
    add(x[i].w, y[i].w);
#pragma unroll 1
    for (int step = 1 << params.lane_shift >> 1; step > 0; step /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, step);
    }
    const int row = first + i * rows_per_pass;
    if (lane != 0 || row >= params.entry_rows) continue;
    float lse = FA_INFINITY, delta = 0.0f;
    if (lse_in[i] != -FA_INFINITY && !is_invalid[i]) {  // it is a NaN then, as is the output
      lse = lse_or_marker(lse_in[i]);
      delta = sum - dlse_in[i];
    }
    float* pair =
        reinterpret_cast<float*>(params.lse_delta + ((entry * params.entry_rows + row) >> 1)) +
        (row & 1);
    pair[0] = lse;
    pair[2] = delta;
  }
}
