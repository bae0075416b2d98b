// What the kernels of attention backward are told that read rows by plain addresses: bwd_dkdv_sm80,
// bwd_dq_sm80 and bwd_nonfinite.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/block_table.cuh"

constexpr int kAxes = 3;  // of the batch

struct Array {
  uint16* start;
  int64 row, batch[kAxes];  // strides, in elements; 0 along an axis that broadcasts
};

struct BackwardParams {
  AttentionParams common;  // without arrays but the bias
  Array q, k, v, dout, dq, dk, dv;
  MaskTable mask;  // by rows of blocks of the side that a kernel owns; by queries for bwd_nonfinite
  const float4* lse_delta;  // two queries each: LSE * log2(e), then delta
  uint32* nonfinite_flags;  // rows to compute again (common/nonfinite_flags.cuh)
  int size[kAxes];          // of the batch
  int group;                // how many entries, along the last axis, share keys and values
  int entries;              // of keys and values
  int row_pairs;            // of `lse_delta` in one entry, whole tiles
};
static_assert(sizeof(BackwardParams) == FA_BACKWARD_PARAMS_BYTES,
              "fa_cupy/gpu/kernels/backward.py holds the same struct");

// Where a batch entry begins.
FA_DEVICE uint16* entry_start(const BackwardParams& params, const Array& array, uint32 entry) {
  uint16* start = array.start;
#pragma unroll
  for (int axis = kAxes - 1; axis > 0; --axis) {
    const uint32 size = params.size[axis];
    start += entry % size * array.batch[axis];
    entry /= size;
  }
  return start + entry * array.batch[0];
}
