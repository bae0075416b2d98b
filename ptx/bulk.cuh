// Bulk copies: contiguous bytes between global and shared memory, copied by one thread's
// instruction.  PTX ISA 9.7.9.25.4 "Data Movement and Conversion Instructions: Bulk copy".
//
// Addresses and sizes are multiples of 16.  What is written to global memory is a part of this
// thread's next bulk group (ptx/tma.cuh, which has the L2 cache policies, too).
#pragma once
#include "ptx/types.cuh"

// Global to shared memory; the bytes arrive at `barrier`.  PTX ISA 9.7.9.25.4.1 "cp.async.bulk".
FA_DEVICE void cp_async_bulk_load(uint32 shared_address, const void* global, uint32 bytes,
                                  uint32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n" ::"r"(shared_address),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Shared to global memory.
FA_DEVICE void cp_async_bulk_store(void* global, uint32 shared_address, uint32 bytes,
                                   uint64 policy) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n" ::"l"(
          global),
      "r"(shared_address), "r"(bytes), "l"(policy)
      : "memory");
}

// Adds floats of shared memory to those in global memory, each sum rounded to nearest.  PTX ISA
// 9.7.9.25.4.2 "cp.reduce.async.bulk".
FA_DEVICE void cp_reduce_async_bulk_add_f32(float* global, uint32 shared_address, uint32 bytes,
                                            uint64 policy) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, "
      "%3;\n" ::"l"(global),
      "r"(shared_address), "r"(bytes), "l"(policy)
      : "memory");
}

// Orders what this thread did or saw done to global memory before what the copy engine does there
// for it next, and the other way round (PTX ISA 9.7.13.4 "membar / fence").
FA_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}
