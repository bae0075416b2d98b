// ldmatrix: one warp reads four 8 x 8 matrices of 16-bit values from shared memory.
// PTX ISA 9.7.14.5.15 "Warp-level matrix load instruction: ldmatrix".
//
// Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, 16-byte aligned).  Register i of
// lane l then holds row l / 4, columns 2 * (l % 4) and + 1 of matrix i; with .trans, of the
// transposed matrix.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void ldmatrix_x4(uint32 (&r)[4], uint32 shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

FA_DEVICE void ldmatrix_x4_trans(uint32 (&r)[4], uint32 shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}
