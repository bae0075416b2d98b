// As ptx/mma_sync.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void mma_m16n8k16_f32_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  machine::multiply(d, a, b0, b1, false);
}
FA_DEVICE void mma_m16n8k16_f32_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  machine::multiply(d, a, b0, b1, true);
}
FA_DEVICE void mma_m16n8k16_f64(double (&d)[4], const double (&a)[8], const double (&b)[4]) {
  machine::multiply_float64(d, a, b, 16, 16);
}
FA_DEVICE void mma_m8n8k4_f64(double& d0, double& d1, double a, double b) {
  double d[2] = {d0, d1};
  machine::multiply_float64(d, &a, &b, 8, 4);
  d0 = d[0], d1 = d[1];
}
