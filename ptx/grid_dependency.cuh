// What a launch that overlaps with the one before it waits for, and what lets it begin.
// PTX ISA 9.7.13.13 "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once
#include "ptx/types.cuh"

// Lets the next launch begin once every block has said so or has ended, if it is one that may
// overlap.  Targets before SM90 have none.
FA_DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Waits until the launch before has ended, with all that it wrote visible.
FA_DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
