// Conversions between float32 and packed 16-bit types.  PTX ISA 9.7.9.21 "cvt".
// In cvt.rn.{f16x2,bf16x2}.f32 d, a, b the *second* source goes to the low half of d.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE uint32 cvt_rn_f16x2_f32(float low, float high) {
  uint32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

FA_DEVICE uint32 cvt_rn_bf16x2_f32(float low, float high) {
  uint32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

FA_DEVICE float cvt_f32_f16(uint16 bits) {
  float d;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(d) : "h"(bits));
  return d;
}

// A bfloat16 is the upper half of a float32; moving the bits is the conversion.
FA_DEVICE float cvt_f32_bf16(uint16 bits) {
  float d;
  asm("mov.b32 %0, {%1, %2};\n" : "=f"(d) : "h"(static_cast<uint16>(0)), "h"(bits));
  return d;
}
