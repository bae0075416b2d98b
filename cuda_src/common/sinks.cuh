// Sinks: for each row of scores one more, in natural units, whose value is 0.
//
// It takes its part of the softmax like any other score: epilogues add it to what the tiles of keys
// have left, and main loops know nothing of it.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/softmax.cuh"

// The sink of a row of a batch entry, counted over all batch axes; -inf without sinks.
FA_DEVICE float load_sink(const AttentionParams& p, int64 batch, int row) {
  if (p.sinks == nullptr) return -FA_INFINITY;
  int64 index = row * p.sinks_row, rest = batch;
#pragma unroll 1
  for (int axis = p.batch_axes - 1; axis >= 0; --axis) {
    const int64 next = divide(rest, p.batch_size[axis]);
    index += (rest - next * p.batch_size[axis]) * p.sinks_batch[axis];
    rest = next;
  }
  return load_as_float(p.sinks, index, p.sinks_kind);
}

// The same in units of log2.  What is finite stays so: an infinite sink is none, or NaN.
FA_DEVICE float sink_in_log2(float sink) {
  if (!(fabsf(sink) < FA_INFINITY)) return sink;
  return fmaxf(kNoMax, fminf(__fmul_rn(sink, kLog2e), -kNoMax));
}

// Adds a sink to the statistics of a row.  Both are in units of log2, or in those that to_log2
// makes log2 of.  Returns what the row's output is to be multiplied by.  A sink that is NaN or +inf
// makes the sum NaN.
FA_DEVICE float add_sink(float sink, float& row_max, float& row_sum, float to_log2 = 1.0f) {
  const float new_max = fmaxf(row_max, sink);
  const float correction = ex2_approx_ftz((row_max - new_max) * to_log2);
  row_sum = row_sum * correction + ex2_approx_ftz((sink - new_max) * to_log2);
  row_max = new_max;
  return correction;
}
