// The rows of each packed sequence, from offsets in device memory.
//
// Offsets that do not ascend or are out of range count as the largest one before them inside of the
// range, or as the end of the range.  So sequences lie end to end, as always, and those that this
// has changed are marked.  One block does it: each thread has some offsets that follow each other.
#include "cuda_src/common/linear_params.cuh"

constexpr int kThreads = FA_THREADS;

// fa_cupy/gpu/kernels/linear/packed/sequence_spans.py holds the same fields in the same order.
struct SequenceSpansParams {
  const void* q_offsets;  // sequences + 1 of them
  const void* k_offsets;  // of as many
  RowSpan* q_spans;       // of each sequence
  RowSpan* k_spans;
  int64 q_len, k_len;  // of all sequences
  int sequences;
  int q_bytes, k_bytes;  // of an offset: 4 or 8
};
static_assert(sizeof(SequenceSpansParams) == FA_SPANS_PARAMS_BYTES, "fa_cupy/gpu holds the same");

struct SharedStorage {
  int q_most[kThreads], k_most[kThreads];  // the largest offset of each thread
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// One of the two arrays of offsets.
struct OffsetArray {
  const void* base;
  int64 length;
  int bytes;

  __device__ __forceinline__ int64 at(int i) const {
    return bytes == 4 ? static_cast<const int*>(base)[i] : static_cast<const int64*>(base)[i];
  }
  __device__ __forceinline__ int inside(int i) const {
    return static_cast<int>(min(max(at(i), static_cast<int64>(0)), length));
  }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    linear_sequence_spans(const __grid_constant__ SequenceSpansParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const OffsetArray q = {params.q_offsets, params.q_len, params.q_bytes};
  const OffsetArray k = {params.k_offsets, params.k_len, params.k_bytes};
  const int own = (params.sequences + kThreads) / kThreads;  // of sequences + 1
  const int begin = static_cast<int>(threadIdx.x) * own;
  const int end = min(begin + own, params.sequences + 1);
  int q_most = 0, k_most = 0;
  for (int i = begin; i < end; ++i) {
    q_most = max(q_most, q.inside(i));
    k_most = max(k_most, k.inside(i));
  }
  shared.q_most[threadIdx.x] = q_most;
  shared.k_most[threadIdx.x] = k_most;
  __syncthreads();
  q_most = k_most = 0;
  for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) {
    q_most = max(q_most, shared.q_most[i]);
    k_most = max(k_most, shared.k_most[i]);
  }
  for (int i = begin; i < min(end, params.sequences); ++i) {
    q_most = max(q_most, q.inside(i));
    k_most = max(k_most, k.inside(i));
    const int q_end = max(q_most, q.inside(i + 1)), k_end = max(k_most, k.inside(i + 1));
    const bool valid =
        q.at(i) == q_most && k.at(i) == k_most && q.at(i + 1) == q_end && k.at(i + 1) == k_end;
    const int q_rows = q_end - q_most, k_rows = k_end - k_most;
    params.q_spans[i] = {q_most, valid ? q_rows : -1 - q_rows};
    params.k_spans[i] = {k_most, valid ? k_rows : -1 - k_rows};
  }
}
