// Where the keys of a batch entry are: rows at equal distances, or pages.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/load_index.cuh"

// The keys and values of a batch entry, whose fields of the same names Params has.
template <typename Params>
struct EntryKeysOf {
  using Element = uint16;
  const Params& params;
  const BatchOffsets& offsets;
  KeyBand own_band;
  int64 table_begin;  // of its pages in the table, if there are pages
  bool is_valid;      // whether its length is one

  __device__ __forceinline__ const KeyBand& band() const { return own_band; }

  __device__ __forceinline__ bool has_pages() const { return params.page_table != nullptr; }
  // Which of the entry's pages a key is in.
  __device__ __forceinline__ int page_of(int key) const {
    return params.page_shift >= 0 ? key >> params.page_shift : key / params.page_size;
  }
  // The number that the table has for one of the entry's pages, which may be that of no page.
  __device__ __forceinline__ int listed_page(int page) const {
    return load_index(params.page_table, table_begin + page * params.page_table_col,
                      params.page_table_bytes);
  }
  __device__ __forceinline__ bool is_page(int number) const {
    return static_cast<uint32>(number) < static_cast<uint32>(params.pages);
  }
  // From the first element of the entry to that of a key.
  __device__ __forceinline__ int64 row_offset(int key, int64 page_step, int row_step) const {
    if (!has_pages()) return static_cast<int64>(key) * row_step;
    const int page = page_of(key), number = listed_page(page);
    return (is_page(number) ? number : 0) * page_step +
           static_cast<int64>(key - page * params.page_size) * row_step;
  }
  __device__ __forceinline__ const uint16* k(int key) const {
    return static_cast<const uint16*>(params.common.k) + offsets.k +
           row_offset(key, params.k_page, params.common.k_row);
  }
  __device__ __forceinline__ const uint16* v(int key) const {
    return static_cast<const uint16*>(params.common.v) + offsets.v +
           row_offset(key, params.v_page, params.common.v_row);
  }
};
