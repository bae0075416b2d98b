// What warpgroups (four warps that start at a multiple of four) and parts of a block agree on.
#pragma once
#include "ptx/types.cuh"

// Hands registers of this warpgroup's threads back to the block, or takes them from it (waiting
// until it has them); kRegisters is 24 to 256, a multiple of 8.  PTX ISA 9.7.19.5 "setmaxnreg".
template <int kRegisters>
FA_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
FA_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Named barrier `id` (0 is __syncthreads') of `threads` threads: arrive and wait, or only arrive.
// PTX ISA 9.7.13.1 "bar / barrier".
FA_DEVICE void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
FA_DEVICE void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// True in exactly one lane of a converged warp.  PTX ISA 9.7.13.14 "elect.sync".
FA_DEVICE bool elect_sync() {
  uint32 chosen;
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n}\n"
      : "=r"(chosen));
  return chosen != 0;
}
