// Atomic operations on global memory.  PTX ISA 9.7.13.6 "atom".
#pragma once
#include "ptx/types.cuh"

FA_DEVICE uint32 atom_add_u32(uint32* address, uint32 x) {
  uint32 old;
  asm volatile("atom.global.add.u32 %0, [%1], %2;\n" : "=r"(old) : "l"(address), "r"(x) : "memory");
  return old;
}

// The same behind all that this thread did or saw done before, and before all that follows: what
// others released with their additions can be read afterwards.
FA_DEVICE uint32 atom_add_acq_rel_gpu_u32(uint32* address, uint32 x) {
  uint32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n"
               : "=r"(old)
               : "l"(address), "r"(x)
               : "memory");
  return old;
}

FA_DEVICE uint64 atom_add_acq_rel_gpu_u64(uint64* address, uint64 x) {
  uint64 old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;\n"
               : "=l"(old)
               : "l"(address), "l"(x)
               : "memory");
  return old;
}

// Replaces eight bytes by `replacement` if they are `expected`, and returns them as they were; with
// the order of atom_add_acq_rel_gpu_u32.
FA_DEVICE uint64 atom_cas_acq_rel_gpu_b64(uint64* address, uint64 expected, uint64 replacement) {
  uint64 old;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;\n"
               : "=l"(old)
               : "l"(address), "l"(expected), "l"(replacement)
               : "memory");
  return old;
}

// Sixteen aligned bytes at once: replaces them by `replacement` if they are `expected`; they are
// returned in `expected` as they were.  From SM90 on.
FA_DEVICE void atom_cas_b128(uint64* address, uint64 (&expected)[2],
                             const uint64 (&replacement)[2]) {
  asm volatile(
      "{\n.reg .b128 old, want, put;\n"
      "mov.b128 want, {%0, %1};\n"
      "mov.b128 put, {%3, %4};\n"
      "atom.global.cas.b128 old, [%2], want, put;\n"
      "mov.b128 {%0, %1}, old;\n}\n"
      : "+l"(expected[0]), "+l"(expected[1])
      : "l"(address), "l"(replacement[0]), "l"(replacement[1])
      : "memory");
}

// Reads a word; what its writer released with it can be read afterwards.  PTX ISA 9.7.9.8 "ld".
FA_DEVICE uint32 ld_acquire_gpu_u32(const uint32* address) {
  uint32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(x) : "l"(address) : "memory");
  return x;
}

// Adds to a word, behind all that this thread did or saw done before.  PTX ISA 9.7.13.7 "red".
FA_DEVICE void red_release_gpu_add_u32(uint32* address, uint32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(address), "r"(x) : "memory");
}
