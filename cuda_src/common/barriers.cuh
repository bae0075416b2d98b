// Barriers of a producer and consumer pipeline, and places in its rings of buffers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

// A place in a ring of kCount buffers, and the parity of the phase that its barriers are in.  A
// consumer waits for the `full` barrier with this parity, a producer for the `empty` barrier with
// the other one, which lets it pass the first time round.
template <int kCount>
struct RingPlace {
  uint32 count = 0;  // 2**32 tiles in one block would take more than an hour

  __device__ __forceinline__ int index() const { return static_cast<int>(count % kCount); }
  __device__ __forceinline__ uint32 parity() const { return count / kCount & 1; }
  __device__ __forceinline__ void advance(uint32 by = 1) { count += by; }
};

FA_DEVICE void init(uint64& barrier, int arrivals) {
  mbarrier_init(cvta_to_shared(&barrier), arrivals);
}

FA_DEVICE void wait(const uint64& barrier, uint32 parity) {
  const uint32 address = cvta_to_shared(&barrier);
  while (!mbarrier_try_wait_parity(address, parity)) {
  }
}

FA_DEVICE void arrive(const uint64& barrier) { mbarrier_arrive(cvta_to_shared(&barrier)); }
