// mbarrier: barriers in shared memory that count arrivals of threads and bytes of bulk copies.
// PTX ISA 9.7.13.15 "Parallel Synchronization and Communication Instructions: mbarrier".
//
// A barrier completes a phase when all expected arrivals have come and all expected bytes have
// landed; phases alternate in parity, and the first one has parity 0.  A wait names the parity of
// the phase it waits for.
#pragma once
#include "ptx/types.cuh"

// Makes 8 aligned bytes a barrier that `count` arrivals complete.
FA_DEVICE void mbarrier_init(uint32 barrier, uint32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

// Lets the copy engine and other blocks of the cluster see barriers that this thread has made.
FA_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

FA_DEVICE void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and expects so many more bytes in this phase.
FA_DEVICE void mbarrier_arrive_expect_tx(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits a while for the end of the phase of this parity; whether it has ended.
FA_DEVICE bool mbarrier_try_wait_parity(uint32 barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
