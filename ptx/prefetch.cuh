// Loads of global memory into a cache ahead of time.  PTX ISA 9.7.9.15 "prefetch".
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void prefetch_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];\n" ::"l"(address));
}
