// mma.sync: one warp multiplies a 16 x 16 tile A by a 16 x 8 tile B and adds the 16 x 8 float32
// tile D.
// PTX ISA 9.7.14.5.8 "Matrix Fragments for mma.m16n8k16 with floating point type".
//
// With g = lane / 4 and t = lane % 4:
//   A  a[0] (g, 2t..2t+1)   a[1] (g+8, 2t..2t+1)   a[2] (g, 2t+8..2t+9)   a[3] (g+8, 2t+8..2t+9)
//   B  b0 (k = 2t..2t+1, n = g)   b1 (k = 2t+8..2t+9, n = g)
//   D  d[0], d[1] (g, 2t..2t+1)   d[2], d[3] (g+8, 2t..2t+1)
// Every 32-bit register of A and B holds two 16-bit values, the one of lower index in its low half.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void mma_m16n8k16_f32_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

FA_DEVICE void mma_m16n8k16_f32_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
