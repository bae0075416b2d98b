// mma.sync: one warp multiplies a 16 x 16 tile A by a 16 x 8 tile B and adds the 16 x 8 tile D, of
// float32 where A and B have 16-bit types.
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

// float64.  PTX ISA 9.7.14.5.8 "Matrix Fragments for mma.m16n8k16 with floating point type".
//
//   A  a[2 i] (g, t + 4 i)   a[2 i + 1] (g+8, t + 4 i)   for i < 4
//   B  b[i] (k = t + 4 i, n = g)
//   D  as above
//
// From SM90 on one instruction does it; before, eight of m8n8k4, whose fragments are parts of these
// (PTX ISA 9.7.14.5.2 "Matrix Fragments for mma.m8n8k4 with .f64 floating point type").
FA_DEVICE void mma_m16n8k16_f64(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,"
      "%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3};\n"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// An 8 x 8 tile D, of which a thread holds (g, 2t) and (g, 2t+1), A (g, t) and B (k = t, n = g).
FA_DEVICE void mma_m8n8k4_f64(double& d0, double& d1, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};\n"
               : "+d"(d0), "+d"(d1)
               : "d"(a), "d"(b));
}
