// cp.async: copies from global to shared memory that run beside the thread that asked for them.
// PTX ISA 9.7.9.25.3 "Data Movement and Conversion Instructions: Non-bulk copy".
#pragma once
#include "ptx/types.cuh"

// Sixteen bytes, past L1 (.cg).  Only `src_bytes` (0 to 16) of them are read, the rest is filled
// with zeros; both addresses are multiples of 16.
FA_DEVICE void cp_async_cg_16(uint32 shared_address, const void* global, uint32 src_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address),
               "l"(global), "r"(src_bytes)
               : "memory");
}

// 4, 8 or 16 bytes, through L1 (.ca); both addresses are multiples of as many.
template <int kBytes>
FA_DEVICE void cp_async_ca(uint32 shared_address, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(shared_address), "l"(global),
               "n"(kBytes)
               : "memory");
}

// All copies that this thread asked for since the last commit become one group.
FA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are still under way.
template <int kPending>
FA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}
