// The rows of a packed sequence (linear/sequence_spans.cu).
#pragma once
#include "ptx/types.cuh"

struct alignas(8) RowSpan {
  int begin;
  int rows;  // -1 - rows of a sequence whose offsets are out of range
};
FA_DEVICE bool is_invalid(const RowSpan& span) { return span.rows < 0; }
FA_DEVICE int rows_of(const RowSpan& span) { return max(span.rows, -1 - span.rows); }
