// As ptx/stmatrix.cuh.
#pragma once
#include "ptx/ldmatrix.cuh"

FA_DEVICE void stmatrix_x4(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
  MatrixAccess access{address, {r0, r1, r2, r3}};
  machine::meet(32, "stmatrix", access, [](MatrixAccess** lanes) {
    for (int m = 0; m < 4; ++m) {
      for (int lane = 0; lane < 32; ++lane) {
        unsigned char* row = machine::shared_at(lanes[8 * m + lane / 4]->address, 16, 16);
        std::memcpy(row + lane % 4 * 4, &lanes[lane]->r[m], 4);
      }
    }
  });
}
