// Which keys a query row may see: causal masks and windows are one band of keys, [row + lower, row
// + upper].
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/load_index.cuh"
#include "cuda_src/common/score.cuh"

// A bound of the band of an entry with fewer keys; the ends of the range are no bound.
FA_DEVICE int shifted(int bound, int shift) {
  constexpr int kNoBound = 0x7fffffff;
  if (bound == kNoBound || bound == -kNoBound) return bound;
  return static_cast<int>(max(static_cast<int64>(bound) + shift, static_cast<int64>(-kNoBound)));
}

// The band of an entry of `length` keys; of none, if it is not one of 0 to k_len.  With
// band_from_end the bounds are for k_len keys, and move with the last key.
FA_DEVICE KeyBand band_of_length(const AttentionParams& p, int length, int band_from_end,
                                 bool& is_valid) {
  is_valid = length >= 0 && length <= p.k_len;
  if (!is_valid) length = 0;
  const int shift = band_from_end ? length - p.k_len : 0;
  return {length, shifted(p.lower, shift), shifted(p.upper, shift)};
}

// The same, with an upper bound that says so where the length is out of range.
FA_DEVICE KeyBand band_or_invalid(const AttentionParams& p, int length, int band_from_end) {
  bool is_valid;
  KeyBand band = band_of_length(p, length, band_from_end, is_valid);
  if (!is_valid) band.upper = kInvalidBound;
  return band;
}

// Which keys the rows of a block see, whose Work says where they are: those of its entry's band, if
// entries have lengths.
#if FA_LENGTHS
FA_DEVICE KeyBand band_of_entry(const AttentionParams& p, int64 batch) {
  const KeyLengths& lengths = p.k_lengths;
  const int64 place = element_of_entry(p, batch, lengths.batch);
  return band_or_invalid(p, load_index(lengths.start, place, lengths.bytes), lengths.band_from_end);
}
template <typename Work>
FA_DEVICE void find_band(const AttentionParams& p, Work& work, int64 batch) {
  static_cast<KeyBand&>(work.band) = band_of_entry(p, batch);
}
template <typename Work>
FA_DEVICE const auto& band_of(const AttentionParams&, const Work& work) {
  return work.band;
}
#else
template <typename Work>
FA_DEVICE void find_band(const AttentionParams&, Work&, int64) {}
template <typename Work>
FA_DEVICE const AttentionParams& band_of(const AttentionParams& p, const Work&) {
  return p;
}
#endif

// In what follows a Band is AttentionParams or a KeyBand.
template <typename Band>
FA_DEVICE int first_key(const Band& p, int row) {
  const int64 key = static_cast<int64>(row) + p.lower;
  return key < 0 ? 0 : key > p.k_len ? p.k_len : static_cast<int>(key);
}

// Inclusive; -1 when there is none.
template <typename Band>
FA_DEVICE int last_key(const Band& p, int row) {
  const int64 key = static_cast<int64>(row) + p.upper;
  return key < -1 ? -1 : key > p.k_len - 1 ? p.k_len - 1 : static_cast<int>(key);
}

#if FA_PACKED
FA_DEVICE Interval keys_of_row(const AttentionParams& p, int row) {
  const Interval keys = p.intervals.keys_of_row[row];
  return {keys.first & ~kInvalidRow, keys.last};
}
FA_DEVICE int first_key(const AttentionParams& p, int row) { return keys_of_row(p, row).first; }
FA_DEVICE int last_key(const AttentionParams& p, int row) { return keys_of_row(p, row).last; }
#endif

// Whether the sequence of a row has offsets out of range; without packed sequences none has.
FA_DEVICE bool is_invalid_row(const AttentionParams& p, int row) {
#if FA_PACKED
  return p.intervals.keys_of_row[row].first < 0;
#else
  return false;
#endif
}
// The same of a row of a block, whose entry may have a length out of range.
template <typename Work>
FA_DEVICE bool is_invalid_row(const AttentionParams& p, const Work& work, int row) {
#if FA_LENGTHS
  return work.band.upper == kInvalidBound;
#else
  return is_invalid_row(p, row);
#endif
}

// Tiles of keys or of queries, [begin, end).
struct TileRange {
  int begin, end;
};

// Key tiles that rows [first_row, last_row] touch, and those of them that every row sees whole.
struct KeyTiles {
  int begin, end;            // [begin, end) is touched
  int full_begin, full_end;  // [full_begin, full_end) is inside the band for every row
};

// Tiles count from the key `origin`, before which the rows see none.
template <typename Band>
FA_DEVICE KeyTiles key_tiles(const Band& p, int first_row, int last_row, int tile_n,
                             int origin = 0) {
  const int low = first_key(p, first_row) - origin, high = last_key(p, last_row) - origin;
  if (high < low) return {0, 0, 0, 0};
  const int full_low = first_key(p, last_row) - origin;
  const int full_high = last_key(p, first_row) - origin;
  return {low / tile_n, high / tile_n + 1, (full_low + tile_n - 1) / tile_n,
          (full_high + 1) / tile_n};
}

// Finds the band of a block's entry, if entries have lengths, and which of its tiles that leaves.
FA_DEVICE void restrict_to_length(const AttentionParams& p, TileWork& work, KeyTiles& tiles,
                                  int tile_n) {
#if FA_LENGTHS
  find_band(p, work, work.batch);
  tiles = key_tiles(work.band, work.q_begin, work.q_begin + work.q_rows - 1, tile_n);
#endif
}

// Of the columns 0, 1, 8, 9, 16, 17, ... that a thread holds of an accumulator, those before col.
FA_DEVICE int held_columns_before(int col, int count) {
  const int before = 2 * (col >> 3) + min(col & 7, 2);
  return max(0, min(before, count));
}

FA_DEVICE uint32 bits_below(int n) { return n < 32 ? (1u << n) - 1 : 0xffffffffu; }

// Of the columns that a thread holds from first_col on, those inside a row's band, as bits: one
// register holds the answer for all columns.
template <typename Band>
FA_DEVICE uint32 visible_columns(const Band& p, int row, int first_col, int count) {
  const int begin = held_columns_before(first_key(p, row) - first_col, count);
  const int end = held_columns_before(last_key(p, row) - first_col + 1, count);
  return bits_below(end) & ~bits_below(begin);
}

#if FA_PACKED
FA_DEVICE uint32 visible_columns(const AttentionParams& p, int row, int first_col, int count) {
  const Interval keys = keys_of_row(p, row);
  const int begin = held_columns_before(keys.first - first_col, count);
  const int end = held_columns_before(keys.last - first_col + 1, count);
  return bits_below(end) & ~bits_below(begin);
}
#endif

// Hides, among the scores that a thread holds as accumulators of m16n8k16, the keys outside each
// row's band, by putting `masked_value` there.  2**row_shift rows of the accumulators belong to one
// query row.
template <int kMmaM, int kMmaN, typename Band, typename Real>
FA_DEVICE void mask_outside_band(const Band& p, Real (&s)[kMmaM][kMmaN][4], int first_row,
                                 int first_col, int row_shift = 0,
                                 float masked_value = -FA_INFINITY) {
  static_assert(2 * kMmaN <= 32, "a bit for each column");
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (first_row + 16 * i + 8 * h) >> row_shift;
      const uint32 visible_bits = visible_columns(p, row, first_col, 2 * kMmaN);
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((visible_bits >> (2 * j + e) & 1) == 0) s[i][j][2 * h + e] = masked_value;
        }
      }
    }
  }
}

// The same band seen from a key: which queries see it.
#if FA_PACKED
FA_DEVICE int first_query(const AttentionParams& p, int key) {
  return p.intervals.rows_of_key[key].first;
}
FA_DEVICE int last_query(const AttentionParams& p, int key) {
  return p.intervals.rows_of_key[key].last;
}
#else
template <typename Band>
FA_DEVICE int first_query(const Band& p, int key) {
  const int64 row = static_cast<int64>(key) - p.upper;
  return row < 0 ? 0 : row > p.q_len ? p.q_len : static_cast<int>(row);
}

// Inclusive; -1 when there is none.
template <typename Band>
FA_DEVICE int last_query(const Band& p, int key) {
  const int64 row = static_cast<int64>(key) - p.lower;
  return row < -1 ? -1 : row > p.q_len - 1 ? p.q_len - 1 : static_cast<int>(row);
}
#endif

// Query tiles that see some of the keys [first_key, last_key], and those of them of which every row
// sees them all; rows behind the last query count as such.
struct QueryTiles {
  int begin, end;
  int full_begin, full_end;
};

template <typename Band>
FA_DEVICE QueryTiles query_tiles(const Band& p, int first_key, int last_key, int tile_m) {
  const int low = first_query(p, first_key), high = last_query(p, last_key);
  if (high < low) return {0, 0, 0, 0};
  const int full_low = first_query(p, last_key), full_high = last_query(p, first_key);
  const int past_end = full_high == p.q_len - 1 ? tile_m : 1;
  return {low / tile_m, high / tile_m + 1, (full_low + tile_m - 1) / tile_m,
          (full_high + past_end) / tile_m};
}

// Which of the queries from + {0, 1, 8, 9, 16, ...}, `count` of them, see a key: a bit each.
template <typename Band>
FA_DEVICE uint32 visible_queries(const Band& p, int key, int from, int count) {
  if (key >= p.k_len) return 0;
  const int begin = held_columns_before(first_query(p, key) - from, count);
  const int end = held_columns_before(last_query(p, key) - from + 1, count);
  return bits_below(end) & ~bits_below(begin);
}

#if FA_PACKED
// The tiles of query rows that work on a tile of keys, as row_intervals.cu has written them.
// Blocks of keys take turns by this relation, so both sides must read the same one; a band alone
// leaves it open for rows that see no key and keys that no row sees.
FA_DEVICE TileRange recorded_query_tiles(const AttentionParams& p, int key_tile) {
  const Interval tiles = p.intervals.query_tiles[key_tile];
  return tiles.last < tiles.first ? TileRange{0, 0} : TileRange{tiles.first, tiles.last + 1};
}
#endif
