// Approximate special functions, one instruction each, on the multi-function unit (16 results a
// clock and SM). PTX ISA 9.7.3 "Floating Point Instructions".
#pragma once
#include "ptx/types.cuh"

// 2**x, relative error at most 2**-22; -inf gives +0, NaN gives NaN; subnormal inputs and results
// are flushed to zero.
FA_DEVICE float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error at most 2**-22 near 1; 0 gives -inf.
FA_DEVICE float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 unit in the last place; inf gives 0; subnormal inputs and results are flushed to zero.
FA_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The same of numbers of any size: subnormal ones count.
FA_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// a where x <= limit, else b, without a branch.
FA_DEVICE float select_le(float x, float limit, float a, float b) {
  float y;
  asm("{\n.reg .pred p;\nsetp.le.f32 p, %1, %2;\nselp.f32 %0, %3, %4, p;\n}\n"
      : "=f"(y)
      : "f"(x), "f"(limit), "f"(a), "f"(b));
  return y;
}

// 1 / x, correctly rounded.
FA_DEVICE float rcp_rn(float x) {
  float y;
  asm("rcp.rn.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// a * b + c for each of two packed numbers, rounded to nearest even; subnormals count.
FA_DEVICE uint32 fma_rn_f16x2(uint32 a, uint32 b, uint32 c) {
  uint32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

FA_DEVICE uint32 fma_rn_bf16x2(uint32 a, uint32 b, uint32 c) {
  uint32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
