// Which weights dropout keeps, as bools: for attention that is computed by products of tiles, and
// for those who want to see.
//
// A thread has the keys of a group of 64, counted from a multiple of 64, that a lane of a quad has
// (common/dropout.cuh): 16 of one query.  A build for packed sequences gets the place of
// each query.
#include "cuda_src/common/dropout.cuh"

constexpr int kThreads = FA_THREADS;

struct DropoutMaskParams {
  bool* kept;      // (entries, rows, keys)
  const int64* b;  // the batch entry and the head of each of the entries
  const int64* h;
  int64 b_step, h_step;  // elements from one to the next
  int64 counters;        // of all threads
  int first_row, first_key, rows, keys;
  int groups;  // that have the keys
  int unused;
  DropoutParams dropout;
};
static_assert(sizeof(DropoutMaskParams) == FA_DROPOUT_MASK_PARAMS_BYTES,
              "fa_cupy/gpu holds the same");

extern "C" __global__ void __launch_bounds__(kThreads)
    mask_dropout_mask(const __grid_constant__ DropoutMaskParams params) {
  const int64 index = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= params.counters) return;
  const int t = static_cast<int>(index % 4);
  int64 rest = index / 4;
  const int group = params.first_key / kDropoutGroup + static_cast<int>(rest % params.groups);
  rest /= params.groups;
  const int row = static_cast<int>(rest % params.rows);
  const int64 entry = rest / params.rows;
  const DropoutParams& p = params.dropout;
  DropoutEntry of_entry = dropout_entry(p, 0);
  of_entry.h = static_cast<uint32>(params.h[entry * params.h_step]);
  of_entry.b = static_cast<uint32>(params.b[entry * params.b_step]) * p.sequences + p.sequence;
  const int query = params.first_row + row;
#if FA_PACKED
  const uint32 bits = kept_bits_from<kDropoutGroup>(p, of_entry, query, group * 64 + 2 * t);
#else
  const uint32 bits = kept_bits<1>(p, of_entry, query, group, t);
#endif
  bool* kept = params.kept + (entry * params.rows + row) * params.keys;
  const int key = group * kDropoutGroup + 2 * t - params.first_key;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int at = key + i / 2 * 8 + i % 2;
    if (at >= 0 && at < params.keys) kept[at] = (bits >> i & 1) != 0;
  }
}
