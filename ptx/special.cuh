// Special registers.  PTX ISA 10 "Special Registers".
#pragma once
#include "ptx/types.cuh"

// threadIdx.x, read anew at every call: what is computed from it is not kept in registers from one
// call to the next, which is worth a few instructions where registers are short.
FA_DEVICE int tid_x_again() {
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(tid));
  return tid;
}

// x, as something that the compiler knows nothing of: what is computed from it is computed where it
// stands, neither kept in registers nor moved out of a loop.  PTX ISA 9.7.9.2 "mov".
FA_DEVICE uint32 opaque(uint32 x) {
  uint32 y;
  asm volatile("mov.b32 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}
