// The state before each segment of a sequence, from the sums of the segments: running sums in the
// order of the segments.
//
// A thread computes one element of the state.  In the workspace, entry s > 0 of a sequence holds
// the sum of segment s - 1 and becomes the state before segment s.  Entry 0 becomes the initial
// state.
#include "cuda_src/common/linear_params.cuh"

constexpr int kThreads = 256;
constexpr int kInFlight = 8;  // loads at once
static_assert(FA_TILE_N == kThreads && FA_SHARED_BYTES == 0, "the host launches with these");

extern "C" __global__ void __launch_bounds__(kThreads, FA_BLOCKS)
    linear_state_prefix_sum(const __grid_constant__ ProductParams params) {
  const ProductWork work = product_work(params, 1);
  const int64 elements = static_cast<int64>(params.qk_dim) * params.v_dim;
  const int64 element = static_cast<int64>(work.tile) * kThreads + threadIdx.x;
  if (element >= elements) return;
  const int64 row = divide(element, params.v_dim), col = element - row * params.v_dim;
  StateNumber sum = 0;
  if (params.initial != nullptr) {
    sum = params.initial[work.initial + row * params.initial_row + col * params.initial_col];
  }
  StateNumber* address = segment_state(params, work.entry, 0) + element;
  *address = sum;
  for (int s = 1; s < params.segments; s += kInFlight) {
    StateNumber segment_sums[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      segment_sums[i] = s + i < params.segments ? address[(s + i) * elements] : StateNumber(0);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      sum += segment_sums[i];
      if (s + i < params.segments) address[(s + i) * elements] = sum;
    }
  }
}
