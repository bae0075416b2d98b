// As ptx/math.cuh: correctly rounded where the GPU approximates.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
FA_DEVICE float ex2_approx_ftz(float x) { return flushed(exp2f(flushed(x))); }
FA_DEVICE float lg2_approx_ftz(float x) { return log2f(flushed(x)); }
FA_DEVICE float rcp_rn(float x) { return 1.0f / x; }
