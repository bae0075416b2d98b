// Parameters of a launch of a causal product, and the work of each of its blocks.
#pragma once
#include "cuda_src/common/batch_axes.cuh"

// Passed by value.  fa_cupy/gpu/kernels/linear/params.py holds the same fields in the same order.
// Strides count elements.  Axes that broadcast have stride 0; rows in reverse order have a negative
// stride, and the pointers are those of the last row.
struct ProductParams {
  const void* q;         // (*batch, length, qk_dim)
  const void* k;         // (*batch, length, qk_dim)
  const void* v;         // (*batch, length, v_dim)
  void* out;             // (*batch, length, v_dim)
  const float* initial;  // (*batch, qk_dim, v_dim), null for zeros
  float* state;          // (*batch, qk_dim, v_dim), null if not wanted
  float* workspace;      // (batch entries, segments, qk_dim, v_dim) dense; null for one segment
  int64 first_batch;     // entry of the first block: a grid has at most 2**31 - 1 blocks
  int aligned;           // 1: every row of q, k, v and out starts at a multiple of 16 bytes
  int batch_axes;        // how many of the axes below are in use
  int64 q_batch[kMaxBatchAxes], k_batch[kMaxBatchAxes], v_batch[kMaxBatchAxes],
      out_batch[kMaxBatchAxes], initial_batch[kMaxBatchAxes], state_batch[kMaxBatchAxes];
  int64 batch_size[kMaxBatchAxes];
  int64 initial_row, initial_col, state_row, state_col;
  int64 length;
  int q_row, k_row, v_row, out_row;
  int qk_dim, v_dim;
  int tiles;         // of value columns
  int segments;      // of a sequence, one for each block
  int segment_rows;  // of all segments but the last
};

static_assert(sizeof(ProductParams) == FA_PARAMS_BYTES,
              "fa_cupy/gpu/kernels/linear/params.py holds the same struct");

// The work of one block: some value columns of one segment of one batch entry.
struct ProductWork {
  int64 q, k, v, out, initial, state;  // element offsets of the segment's first row, or of a state
  int64 entry;                         // index over all batch axes, C order
  int segment;
  int rows;           // of the segment
  int tile;           // of value columns
  bool writes_state;  // true for one of the entries that share a state
};

// `segments`: the number of segments that have a block.
FA_DEVICE ProductWork product_work(const ProductParams& p, int segments) {
  const uint32 rest = blockIdx.x / static_cast<uint32>(segments);
  const int segment = static_cast<int>(blockIdx.x - rest * segments);
  const uint32 entry = rest / static_cast<uint32>(p.tiles);
  ProductWork w = {0, 0, 0, 0, 0, 0, p.first_batch + entry, segment, 0, 0, true};
  w.tile = static_cast<int>(rest - entry * p.tiles);

  int64 index = w.entry;
  for (int axis = p.batch_axes - 1; axis >= 0; --axis) {
    const int64 next = divide(index, p.batch_size[axis]);
    const int64 i = axis > 0 ? index - next * p.batch_size[axis] : index;
    w.q += i * p.q_batch[axis];
    w.k += i * p.k_batch[axis];
    w.v += i * p.v_batch[axis];
    w.out += i * p.out_batch[axis];
    w.initial += i * p.initial_batch[axis];
    w.state += i * p.state_batch[axis];
    w.writes_state = w.writes_state && (i == 0 || p.state_batch[axis] != 0);
    index = next;
  }
  const int64 begin = static_cast<int64>(segment) * p.segment_rows;
  w.rows = static_cast<int>(min(static_cast<int64>(p.segment_rows), p.length - begin));
  w.q += begin * p.q_row;
  w.k += begin * p.k_row;
  w.v += begin * p.v_row;
  w.out += begin * p.out_row;
  return w;
}

// The state before a segment, of qk_dim x v_dim elements in the workspace.
FA_DEVICE float* segment_state(const ProductParams& p, int64 entry, int segment) {
  return p.workspace + (entry * p.segments + segment) * p.qk_dim * p.v_dim;
}
