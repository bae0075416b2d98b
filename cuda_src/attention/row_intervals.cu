// What packed sequences mean for each query row, each key, and each tile of them
// (common/row_intervals.cuh), from their offsets, which lie in device memory.
//
// A thread has a row, a key or a tile.  It finds the sequence of a row by bisection of the offsets.
// Offsets that do not ascend, or are out of range, count as the largest one before them inside of
// the range: then sequences lie end to end as always.  A sequence that this has changed is invalid:
// its rows see nothing, and are marked.
//
// Nothing is read that the launch writes, so one launch does it all: what a tile works on follows
// from the intervals of its first and its last row, which its thread finds itself.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"

constexpr int kThreads = FA_THREADS;
constexpr int kCachedTiles = FA_CACHED_TILES;

struct RowIntervalsParams {
  const void* q_offsets;  // sequences + 1 of them
  const void* k_offsets;  // of as many
  Interval* keys_of_row;  // q_len and kIntervalPadding more
  Interval* rows_of_key;  // k_len and as many more, or null
  Interval* key_tiles;    // of each tile of rows, or null
  Interval* query_tiles;  // of each tile of keys, or null
  int* order;             // of tiles of rows, or null
  int sequences;
  int q_len, k_len;      // of all sequences
  int lower, upper;      // the band; counted from the beginning of a sequence,
  int band_from_end;     // or, if 1, as for one sequence of q_len queries and k_len keys
  int q_bytes, k_bytes;  // of an offset: 4 or 8
  int tile_m, tile_n;
  int q_tiles, k_tiles;
  int blocks[4];  // for tiles of rows, tiles of keys, rows, keys: in this order
#if FA_DROPOUT
  PlaceInSequence* places;  // of each row, as many as intervals
#endif
};
static_assert(sizeof(RowIntervalsParams) == FA_ROW_INTERVALS_PARAMS_BYTES,
              "fa_cupy/gpu holds the same");

struct SharedStorage {
  int disorder[kThreads / 32];       // whether a warp has found offsets that do not ascend
  int work[kThreads];                // of some tiles of rows
  Interval key_tiles[kCachedTiles];  // what tiles of rows work on, where they are not more
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// One of the two arrays of offsets.
struct OffsetArray {
  const void* base;
  int bytes, len;
  // Beyond 32 bits it is as far out of range at the same end: what comes behind depends on that.
  __device__ __forceinline__ int at(int i) const {
    if (bytes == 4) return static_cast<const int*>(base)[i];
    constexpr int64 kMost = 0x7fffffff;
    return static_cast<int>(min(max(static_cast<const int64*>(base)[i], -kMost), kMost));
  }
};

// Rows [begin, end) of one of the axes.
struct RowRange {
  int begin, end;
};

// The sequence of a row or of a key.
struct Sequence {
  RowRange q, k;
  bool is_valid;
};

// Whether an offset is smaller than the one before it or out of range.
FA_DEVICE bool is_out_of_order(const OffsetArray& offsets, int i) {
  const int offset = offsets.at(i);
  return offset < (i > 0 ? offsets.at(i - 1) : 0) || offset > offsets.len;
}

// The same answer in all threads of a block.
FA_DEVICE bool all_in_order(const OffsetArray& q, const OffsetArray& k, int sequences,
                            SharedStorage& shared) {
  bool disorder = false;
  for (int i = threadIdx.x; i <= sequences; i += kThreads) {
    disorder = disorder || is_out_of_order(q, i) || is_out_of_order(k, i);
  }
  const bool any = __any_sync(kFullWarp, disorder);
  if (threadIdx.x % 32 == 0) shared.disorder[threadIdx.x / 32] = any;
  __syncthreads();
  bool found = false;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) found = found || shared.disorder[warp];
  return !found;
}

// How many of the offsets, which ascend, are at most `row`.
FA_DEVICE int count_up_to(const OffsetArray& offsets, int sequences, int row) {
  int begin = 0, end = sequences + 1;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (offsets.at(middle) <= row) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Which sequence a row of one of the axes is in; behind the last and before the first one an empty
// sequence at the end and at the beginning of them all.
FA_DEVICE Sequence sequence_in_order(const OffsetArray& q, const OffsetArray& k, int sequences,
                                     const OffsetArray& own, int row) {
  const int found = count_up_to(own, sequences, row);  // this one's end
  const int begin = max(found - 1, 0), end = min(found, sequences);
  return {{q.at(begin), q.at(end)}, {k.at(begin), k.at(end)}, true};
}

// The same of offsets in any order, one after the other.
FA_DEVICE Sequence sequence_in_disorder(const OffsetArray& q, const OffsetArray& k, int sequences,
                                        bool of_key, int row) {
  Sequence found = {{0, 0}, {0, 0}, true};
  bool is_valid = true;  // the offsets at which the sequence begins
#pragma unroll 1
  for (int i = 0; i <= sequences; ++i) {
    const int q_offset = q.at(i), k_offset = k.at(i);
    const int q_end = max(found.q.end, min(q_offset, q.len));
    const int k_end = max(found.k.end, min(k_offset, k.len));
    const bool is_valid_end = q_offset == q_end && k_offset == k_end;
    found = {{i > 0 ? found.q.end : q_end, q_end},
             {i > 0 ? found.k.end : k_end, k_end},
             i == 0 || (is_valid && is_valid_end)};
    is_valid = is_valid_end;
    if ((of_key ? k_end : q_end) > row) return found;
  }
  return {{found.q.end, found.q.end}, {found.k.end, found.k.end}, true};
}

// The numbers from first to last, counted from `begin`, that are in a range; of nothing, where its
// neighbours' are or end.
FA_DEVICE Interval clipped(const RowRange& range, int64 first, int64 last) {
  const int64 len = range.end - range.begin;
  return {range.begin + static_cast<int>(min(max(first, int64(0)), len)),
          range.begin + static_cast<int>(min(max(last, int64(-1)), len - 1))};
}

// The offsets of a launch.
struct PackedSequences {
  const RowIntervalsParams& params;
  OffsetArray q, k;
  bool in_order;
};

// The interval of a row, or of a key.
template <bool kOfKey>
FA_DEVICE Interval interval_of(const PackedSequences& x, int own) {
  const RowIntervalsParams& params = x.params;
  const Sequence sequence =
      x.in_order ? sequence_in_order(x.q, x.k, params.sequences, kOfKey ? x.k : x.q, own)
                 : sequence_in_disorder(x.q, x.k, params.sequences, kOfKey, own);
  const RowRange& own_range = kOfKey ? sequence.k : sequence.q;
  const RowRange& other_range = kOfKey ? sequence.q : sequence.k;
  // Empty: at the beginning of the sequence before it, at its end behind it.
  if (own < own_range.begin || !sequence.is_valid) {
    const int mark = kOfKey || sequence.is_valid ? 0 : kInvalidRow;
    return {other_range.begin | mark, other_range.begin - 1};
  }
  if (own >= own_range.end) return {other_range.end, other_range.end - 1};
  const int queries = sequence.q.end - sequence.q.begin;
  const int keys = sequence.k.end - sequence.k.begin;
  const int shift = params.band_from_end ? (keys - queries) - (params.k_len - params.q_len) : 0;
  const int64 lower = shifted(params.lower, shift), upper = shifted(params.upper, shift);
  const int64 place = own - own_range.begin;
  return kOfKey ? clipped(other_range, place - upper, place - lower)
                : clipped(other_range, place + lower, place + upper);
}

#if FA_DROPOUT
// Where a row is; of one that is in no sequence any place.
FA_DEVICE PlaceInSequence place_of(const PackedSequences& x, int row) {
  const int sequences = x.params.sequences;
  if (x.in_order) {
    const int number = max(count_up_to(x.q, sequences, row) - 1, 0);
    return {number, x.q.at(number), x.k.at(number), 0};
  }
  PlaceInSequence found = {-1, 0, 0, 0};
#pragma unroll 1
  for (int i = 0; i <= sequences; ++i) {
    const int q_end = max(found.first_row, min(x.q.at(i), x.q.len));
    if (q_end > row) break;
    found = {i, q_end, max(found.first_key, min(x.k.at(i), x.k.len)), 0};
  }
  return found;
}
#endif

// ------------------------------------------------------------------------------------------- tiles
// The keys that the rows of a tile see: from the first one's to the last one's.
FA_DEVICE Interval keys_of_tile(const PackedSequences& x, int tile) {
  const int first_row = tile * x.params.tile_m;
  const int last_row = min(first_row + x.params.tile_m, x.params.q_len) - 1;
  return {interval_of<false>(x, first_row).first & ~kInvalidRow,
          interval_of<false>(x, last_row).last};
}

// The tiles of keys that a tile of rows works on; one where it sees nothing.
FA_DEVICE Interval key_tiles_of(const PackedSequences& x, int tile) {
  const Interval keys = keys_of_tile(x, tile);
  const int first = min(keys.first / x.params.tile_n, x.params.k_tiles - 1);
  return {first, max(first, keys.last < 0 ? 0 : keys.last / x.params.tile_n)};
}

// How many tiles of keys a tile of rows has.
FA_DEVICE int work_of(const PackedSequences& x, int tile) {
  const Interval keys = keys_of_tile(x, tile);
  return keys.last < keys.first ? 0
                                : keys.last / x.params.tile_n - keys.first / x.params.tile_n + 1;
}

// The first tile of rows for which `is_past` holds, which then holds for all later ones.
template <typename IsPast>
FA_DEVICE int first_tile(int tiles, const IsPast& is_past) {
  int begin = 0, end = tiles;
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (is_past(middle)) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// Where a tile comes in the order: behind all that have more work, and as much but come before it.
// Called by all threads of a block, also those without a tile.
FA_DEVICE int rank_of(const PackedSequences& x, SharedStorage& shared, int tile) {
  const int own_work = tile < x.params.q_tiles ? work_of(x, tile) : 0;
  int rank = 0;
#pragma unroll 1
  for (int first = 0; first < x.params.q_tiles; first += kThreads) {
    const int count = min(kThreads, x.params.q_tiles - first), own = threadIdx.x;
    __syncthreads();
    if (own < count) shared.work[own] = work_of(x, first + own);
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const int work = shared.work[i];
      rank += work > own_work || (work == own_work && first + i < tile);
    }
  }
  return rank;
}

// Writes what a thread's tile of rows works on, and where it comes in the order.
FA_DEVICE void write_query_tile(const PackedSequences& x, SharedStorage& shared, int tile) {
  const RowIntervalsParams& params = x.params;
  const int rank = params.order != nullptr ? rank_of(x, shared, tile) : 0;
  if (tile >= params.q_tiles) return;
  if (params.order != nullptr) params.order[rank] = tile;
  if (params.key_tiles != nullptr) params.key_tiles[tile] = key_tiles_of(x, tile);
}

// Writes which tiles of rows work on a thread's tile of keys.  Both ends of what a tile of rows
// works on ascend from tile to tile.  A thread asks for those of 2 log2(tiles) tiles, each of which
// takes two bisections of the offsets: a block finds all of them first, if they are few.
FA_DEVICE void write_key_tile(const PackedSequences& x, SharedStorage& shared, int tile) {
  const int tiles = x.params.q_tiles;
  const bool is_cached = tiles <= kCachedTiles;
  if (is_cached) {
    for (int i = threadIdx.x; i < tiles; i += kThreads) shared.key_tiles[i] = key_tiles_of(x, i);
    __syncthreads();
  }
  if (tile >= x.params.k_tiles) return;
  const auto keys_of = [&](int i) { return is_cached ? shared.key_tiles[i] : key_tiles_of(x, i); };
  const int begin = first_tile(tiles, [&](int i) { return keys_of(i).last >= tile; });
  const int end = first_tile(tiles, [&](int i) { return keys_of(i).first > tile; });
  x.params.query_tiles[tile] = {begin, end - 1};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_row_intervals(const __grid_constant__ RowIntervalsParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const OffsetArray q = {params.q_offsets, params.q_bytes, params.q_len};
  const OffsetArray k = {params.k_offsets, params.k_bytes, params.k_len};
  const PackedSequences x = {params, q, k, all_in_order(q, k, params.sequences, shared)};
  int part = 0, block = static_cast<int>(blockIdx.x);
  while (block >= params.blocks[part]) block -= params.blocks[part++];
  const int own = block * kThreads + threadIdx.x;  // lengths are far enough below 2**31
  if (part == 0) return write_query_tile(x, shared, own);
  if (part == 1) return write_key_tile(x, shared, own);
  if (part == 2 && own < params.q_len + kIntervalPadding) {
    params.keys_of_row[own] = interval_of<false>(x, own);
#if FA_DROPOUT
    params.places[own] = place_of(x, own);
#endif
  }
  if (part == 3 && own < params.k_len + kIntervalPadding) {
    params.rows_of_key[own] = interval_of<true>(x, own);
  }
}
