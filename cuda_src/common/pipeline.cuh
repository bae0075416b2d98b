// Barriers of a producer and consumer pipeline, and pipeline states of its circular buffers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"

// The index of a stage of kCount buffers, and the parity of the phase that its barriers are in.  A
// consumer waits for the `full` barrier with this parity, a producer for the `empty` barrier with
// the other one, which lets it pass the first time round.
template <int kCount>
struct PipelineState {
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

// Each lane arrives for what it read or wrote itself: racecheck sees no order between a lane and
// the arrival of another one, whatever __syncwarp says.  Not measurably slower.
constexpr int kArrivalsPerWarp = 32;
FA_DEVICE void release_per_lane(const uint64& barrier) { arrive(barrier); }

// Steps that the teams of a block take together, each team at a place of its own in the code.  At
// named barrier 1 the leader waits until the other teams have come, and then lets each of them go
// at a barrier of its own.  One barrier for all would do for the hardware, but sanitizers take one
// of a whole block for __syncthreads, which wants one place.  Teams are given by their threads.
template <int kLeader, int kFirst, int kSecond = 0>
struct TeamBarriers {
  static constexpr int kAll = kLeader + kFirst + kSecond;

  __device__ __forceinline__ static void lead() {
    bar_sync(1, kAll);
    bar_arrive(2, kLeader + kFirst);
    if (kSecond > 0) bar_arrive(3, kLeader + kSecond);
  }
  template <int kTeam>
  __device__ __forceinline__ static void follow() {
    static_assert(kTeam == 1 || kTeam == 2, "there is no such team");
    bar_arrive(1, kAll);
    bar_sync(1 + kTeam, kLeader + (kTeam == 1 ? kFirst : kSecond));
  }
};
