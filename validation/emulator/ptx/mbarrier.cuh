// As ptx/mbarrier.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void mbarrier_init(uint32 barrier, uint32 count) {
  machine::make_barrier(barrier, static_cast<int>(count));
}
FA_DEVICE void fence_mbarrier_init() {}
FA_DEVICE void mbarrier_arrive(uint32 barrier) { machine::arrive(barrier, 0); }
FA_DEVICE void mbarrier_arrive_expect_tx(uint32 barrier, uint32 bytes) {
  machine::arrive(barrier, bytes);
}
FA_DEVICE bool mbarrier_try_wait_parity(uint32 barrier, uint32 parity) {
  return machine::try_wait(barrier, parity);
}
