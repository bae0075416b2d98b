// As ptx/convert.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE uint32 cvt_rn_f16x2_f32(float low, float high) {
  return machine::narrow(low, false) | uint32(machine::narrow(high, false)) << 16;
}
FA_DEVICE uint32 cvt_rn_bf16x2_f32(float low, float high) {
  return machine::narrow(low, true) | uint32(machine::narrow(high, true)) << 16;
}
FA_DEVICE float cvt_f32_f16(uint16 bits) { return machine::widen(bits, false); }
FA_DEVICE float cvt_f32_bf16(uint16 bits) { return machine::widen(bits, true); }
