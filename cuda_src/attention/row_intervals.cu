// What packed sequences mean for each query row and for each key (common/row_intervals.cuh), from
// their offsets, which lie in device memory.
//
// A thread has a row or a key.  It finds the sequence by bisection of the offsets.  Offsets that do
// not ascend, or are out of range, count as the largest one before them inside of the range: then
// sequences lie end to end as always.  A sequence that this has changed is invalid: its rows see
// nothing, and are marked.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/load_index.cuh"

constexpr int kThreads = FA_THREADS;

struct RowIntervalsParams {
  const void* q_offsets;  // sequences + 1 of them
  const void* k_offsets;  // of as many
  Interval* keys_of_row;  // q_len and kIntervalPadding more
  Interval* rows_of_key;  // k_len and as many more
  int sequences;
  int q_len, k_len;      // of all sequences
  int lower, upper;      // the band; counted from the beginning of a sequence,
  int band_from_end;     // or, if 1, as for one sequence of q_len queries and k_len keys
  int q_bytes, k_bytes;  // of an offset: 4 or 8
};
static_assert(sizeof(RowIntervalsParams) == FA_ROW_INTERVALS_PARAMS_BYTES,
              "fa_cupy/gpu holds the same");

struct SharedStorage {
  int disorder[kThreads / 32];  // whether a warp has found offsets that do not ascend
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

// One of the two arrays of offsets.
struct OffsetArray {
  const void* base;
  int bytes, len;
  __device__ __forceinline__ int operator[](int i) const { return load_index(base, i, bytes); }
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
  const int offset = offsets[i];
  return offset < (i > 0 ? offsets[i - 1] : 0) || offset > offsets.len;
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
    if (offsets[middle] <= row) {
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
  return {{q[begin], q[end]}, {k[begin], k[end]}, true};
}

// The same of offsets in any order, one after the other.
FA_DEVICE Sequence sequence_in_disorder(const OffsetArray& q, const OffsetArray& k, int sequences,
                                        bool of_key, int row) {
  Sequence found = {{0, 0}, {0, 0}, true};
  bool is_valid = true;  // the offsets at which the sequence begins
#pragma unroll 1
  for (int i = 0; i <= sequences; ++i) {
    const int q_offset = q[i], k_offset = k[i];
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

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_row_intervals(const __grid_constant__ RowIntervalsParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const OffsetArray q = {params.q_offsets, params.q_bytes, params.q_len};
  const OffsetArray k = {params.k_offsets, params.k_bytes, params.k_len};
  const bool in_order = all_in_order(q, k, params.sequences, shared);
  const int64 rows = static_cast<int64>(params.q_len) + kIntervalPadding;
  const int64 keys = static_cast<int64>(params.k_len) + kIntervalPadding;
  int64 row = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  const bool of_key = row >= rows;
  if (of_key) row -= rows;
  if (row >= (of_key ? keys : rows)) return;
  const int own = static_cast<int>(row);
  const Sequence sequence = in_order
                                ? sequence_in_order(q, k, params.sequences, of_key ? k : q, own)
                                : sequence_in_disorder(q, k, params.sequences, of_key, own);
  const RowRange& own_range = of_key ? sequence.k : sequence.q;
  const RowRange& other_range = of_key ? sequence.q : sequence.k;
  Interval& to = of_key ? params.rows_of_key[own] : params.keys_of_row[own];
  // Empty: at the beginning of the sequence before it, at its end behind it.
  if (own < own_range.begin || !sequence.is_valid) {
    to = {other_range.begin, other_range.begin - 1};
    if (!sequence.is_valid && !of_key) to.first |= kInvalidRow;
    return;
  }
  if (own >= own_range.end) {
    to = {other_range.end, other_range.end - 1};
    return;
  }
  const int queries = sequence.q.end - sequence.q.begin,
            own_keys = sequence.k.end - sequence.k.begin;
  const int shift = params.band_from_end ? (own_keys - queries) - (params.k_len - params.q_len) : 0;
  const int64 lower = shifted(params.lower, shift), upper = shifted(params.upper, shift);
  const int64 place = own - own_range.begin;
  to = of_key ? clipped(other_range, place - upper, place - lower)
              : clipped(other_range, place + lower, place + upper);
}
