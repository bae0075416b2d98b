// Parameters of a launch of a causal product, and the work of each of its blocks.
#pragma once
#include "cuda_src/common/batch_axes.cuh"
#include "cuda_src/common/packed.cuh"
#include "cuda_src/common/row_span.cuh"

#ifndef FA_FP64
#define FA_FP64 0
#endif
#if FA_FP64  // rows are float64, and so are states
using StateNumber = double;
#else
using StateNumber = float;
#endif

// Passed by value.  fa_cupy/gpu/kernels/linear/params.py holds the same fields in the same order.
// Strides count elements.  Axes that broadcast have stride 0; rows in reverse order have a negative
// stride, and the pointers are those of the last row.
struct ProductParams {
  const void* q;               // (*batch, length, qk_dim)
  const void* k;               // (*batch, length, qk_dim)
  const void* v;               // (*batch, length, v_dim)
  void* out;                   // (*batch, length, v_dim)
  const StateNumber* initial;  // (*batch, qk_dim, v_dim), null for zeros
  StateNumber* state;          // (*batch, qk_dim, v_dim), null if not wanted
  StateNumber* workspace;  // (batch entries, segments, qk_dim, v_dim) dense; null for one segment
  int64 first_batch;       // entry of the first block: a grid has at most 2**31 - 1 blocks
  int aligned;             // 1: every row of q, k, v and out starts at a multiple of 16 bytes
  int batch_axes;          // how many of the axes below are in use
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
#if FA_PACKED
  const RowSpan* spans;  // of each sequence
  int sequences;         // the last of the batch axes
  int reverse;           // 1: rows are in reverse order
  int zero_invalid;      // 1: rows of sequences that are out of range become 0, else NaN
#endif
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

#if FA_PACKED
// The first row of a sequence, in the order of the product.
FA_DEVICE int64 first_row(const ProductParams& p, const RowSpan& span) {
  return p.reverse ? p.length - span.begin - rows_of(span) : span.begin;
}
FA_DEVICE RowSpan span_of_entry(const ProductParams& p, int64 entry) {
  return p.spans[entry - divide(entry, p.sequences) * p.sequences];
}
// Segments of a sequence are as long as its own length wants it: a kernel that sums states and the
// one that reads them may have chunks of any two of 16, 32 and 64 rows.
FA_DEVICE int segment_rows_of(const ProductParams& p, int rows) {
  constexpr int kMultiple = 64;
  const int equal = (rows + p.segments - 1) / p.segments;
  return p.segments == 1 ? rows : (equal + kMultiple - 1) / kMultiple * kMultiple;
}
#endif

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
#if FA_PACKED
  const RowSpan span = span_of_entry(p, w.entry);
  const int rows = rows_of(span), segment_rows = segment_rows_of(p, rows);
  const int64 within = static_cast<int64>(segment) * segment_rows;
  const int64 begin = first_row(p, span) + within;
  w.rows = within < rows ? min(segment_rows, rows - static_cast<int>(within)) : 0;
#else
  const int64 begin = static_cast<int64>(segment) * p.segment_rows;
  w.rows = static_cast<int>(min(static_cast<int64>(p.segment_rows), p.length - begin));
#endif
  w.q += begin * p.q_row;
  w.k += begin * p.k_row;
  w.v += begin * p.v_row;
  w.out += begin * p.out_row;
  return w;
}

// The state before a segment, of qk_dim x v_dim elements in the workspace.
FA_DEVICE StateNumber* segment_state(const ProductParams& p, int64 entry, int segment) {
  return p.workspace + (entry * p.segments + segment) * p.qk_dim * p.v_dim;
}
