// Parameters of fwd_splitkv, and where the keys of a batch entry are.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/entry_keys.cuh"
#include "cuda_src/common/load_index.cuh"
#include "cuda_src/common/score.cuh"

constexpr bool kBf16 = FA_BF16;  // bfloat16, else float16
constexpr int kDim = FA_DIM;     // head_dim and v_dim, padded with zeros

struct FwdSplitkvParams {
  AttentionParams common;
  const void* k_lengths;   // (*batch): keys of each entry; null: all have k_len
  const void* page_table;  // (*batch, pages of an entry); null: rows of keys at equal distances
  float* partial_out;      // (splits, rows, kDim): not divided by row_sum yet
  uint64* arrivals;        // of each tile of queries, how many splits are done (splitkv_rows.cuh)
  uint64 mark;             // of this launch, not 0
  float* partial_stats;    // (splits, rows, 2): row_max in units of log2, row_sum
  int64 k_lengths_batch[kMaxBatchAxes], page_table_batch[kMaxBatchAxes];
  int64 page_table_col;
  int64 k_page, v_page;  // from a page to the next
  int64 rows;            // q_len of each of all batch entries
  int page_size;         // keys of a page
  int page_shift;        // page_size is 2**page_shift, or this is -1
  int pages;             // of k and v
  int heads;             // entries of the last batch axis that share keys: rows of one tile
  int splits;            // of the keys
  int band_from_end;     // 1: lower and upper are for k_len keys, and move with the last key
  int k_lengths_bytes, page_table_bytes;  // of an element: 4 or 8
  int aligned;  // 1: every row of q, k and v starts at a multiple of 16 bytes
};
static_assert(sizeof(FwdSplitkvParams) == FA_SPLITKV_PARAMS_BYTES, "fa_cupy/gpu holds the same");

// The row_max of all rows of an entry whose length or page numbers are out of range; no row_max
// that is computed is NaN, for fmaxf leaves NaN out.
FA_DEVICE float invalid_row_max() { return __uint_as_float(0x7fffffffu); }

using EntryKeys = EntryKeysOf<FwdSplitkvParams>;

FA_DEVICE EntryKeys entry_keys(const FwdSplitkvParams& params, const BatchOffsets& offsets,
                               int64 batch) {
  const AttentionParams& p = params.common;
  int length = p.k_len;
  if (params.k_lengths != nullptr) {
    length = load_index(params.k_lengths, element_of_entry(p, batch, params.k_lengths_batch),
                        params.k_lengths_bytes);
  }
  bool is_valid;
  const KeyBand band = band_of_length(p, length, params.band_from_end, is_valid);
  const int64 table_begin =
      params.page_table == nullptr ? 0 : element_of_entry(p, batch, params.page_table_batch);
  return {params, offsets, band, table_begin, is_valid};
}
