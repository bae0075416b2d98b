// As ptx/math.cuh: correctly rounded where the GPU approximates.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
FA_DEVICE float ex2_approx_ftz(float x) { return flushed(exp2f(flushed(x))); }
FA_DEVICE float lg2_approx_ftz(float x) { return log2f(flushed(x)); }
FA_DEVICE float rcp_rn(float x) { return 1.0f / x; }
FA_DEVICE float rcp_approx(float x) { return 1.0f / x; }
FA_DEVICE float select_le(float x, float limit, float a, float b) { return x <= limit ? a : b; }
FA_DEVICE float rcp_approx_ftz(float x) { return flushed(1.0f / flushed(x)); }

FA_DEVICE uint32 fma_x2(uint32 a, uint32 b, uint32 c, bool bf16) {
  uint32 d = 0;
  for (int half = 0; half < 32; half += 16) {
    auto at = [&](uint32 x) { return machine::widen(uint16(x >> half), bf16); };
    // Exact in double but for a last bit that only a tie in float could show.
    d |= uint32(machine::narrow(float(double(at(a)) * at(b) + at(c)), bf16)) << half;
  }
  return d;
}
FA_DEVICE uint32 fma_rn_f16x2(uint32 a, uint32 b, uint32 c) { return fma_x2(a, b, c, false); }
FA_DEVICE uint32 fma_rn_bf16x2(uint32 a, uint32 b, uint32 c) { return fma_x2(a, b, c, true); }
