// stmatrix: one warp writes four 8 x 8 matrices of 16-bit values to shared memory; the mirror image
// of ldmatrix.  PTX ISA 9.7.14.5.16 "Warp-level matrix store instruction: stmatrix".
//
// Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, 16-byte aligned).  Register i of
// lane l holds row l / 4, columns 2 * (l % 4) and + 1 of matrix i; with .trans, of the transposed
// matrix.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void stmatrix_x4(uint32 shared_address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(shared_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

FA_DEVICE void stmatrix_x4_trans(uint32 shared_address, uint32 r0, uint32 r1, uint32 r2,
                                 uint32 r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(shared_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}
