// As ptx/mma_sync.cuh; sums are rounded once, in float32.
#pragma once
#include "ptx/types.cuh"

struct MmaArgument {
  float* d;
  const uint32* a;
  uint32 b[2];
};

FA_DEVICE void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, bool bf16) {
  MmaArgument argument{d, a, {b0, b1}};
  machine::meet(32, "mma.sync", argument, [bf16](MmaArgument** lanes) {
    float x[16][16], y[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int e = 0; e < 2; ++e) {
          x[g + i % 2 * 8][2 * t + i / 2 * 8 + e] =
              machine::widen(uint16(lanes[lane]->a[i] >> 16 * e), bf16);
          if (i < 2) {
            y[2 * t + 8 * i + e][g] = machine::widen(uint16(lanes[lane]->b[i] >> 16 * e), bf16);
          }
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
        double sum = lanes[lane]->d[i];
        for (int k = 0; k < 16; ++k) sum += double(x[row][k]) * y[k][col];
        lanes[lane]->d[i] = static_cast<float>(sum);
      }
    }
  });
}
FA_DEVICE void mma_m16n8k16_f32_f16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  mma_m16n8k16(d, a, b0, b1, false);
}
FA_DEVICE void mma_m16n8k16_f32_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  mma_m16n8k16(d, a, b0, b1, true);
}
