// As ptx/mma_sync.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void mma_m16n8k16_f32_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  machine::multiply(d, a, b0, b1, false);
}
FA_DEVICE void mma_m16n8k16_f32_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  machine::multiply(d, a, b0, b1, true);
}
