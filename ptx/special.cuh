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
