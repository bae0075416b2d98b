// As ptx/mbarrier.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void mbarrier_init(uint32 barrier, uint32 count) {
  machine::shared_at(barrier, 8, 8);
  machine::block->barriers[barrier] = {int(count), int(count), 0, 0};
}
FA_DEVICE void fence_mbarrier_init() {}
FA_DEVICE void mbarrier_arrive(uint32 barrier) { machine::progress(barrier, 1, 0); }
FA_DEVICE void mbarrier_arrive_expect_tx(uint32 barrier, uint32 bytes) {
  machine::progress(barrier, 0, -long(bytes));
  machine::progress(barrier, 1, 0);
}
FA_DEVICE bool mbarrier_try_wait_parity(uint32 barrier, uint32 parity) {
  auto& found = machine::block->barriers.at(barrier);
  machine::wait_until("mbarrier", [&found, parity] { return (found.phase & 1) != parity; });
  return true;
}
