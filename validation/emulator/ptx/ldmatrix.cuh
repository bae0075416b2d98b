// As ptx/ldmatrix.cuh.
#pragma once
#include "ptx/types.cuh"

struct MatrixAccess {
  uint32 address;
  uint32 r[4];
};

FA_DEVICE void load_matrices(uint32 (&r)[4], uint32 address, bool transposed) {
  MatrixAccess access{address, {}};
  machine::meet(32, "ldmatrix", access, [transposed](MatrixAccess** lanes) {
    for (int m = 0; m < 4; ++m) {
      uint16 matrix[8][8];
      for (int row = 0; row < 8; ++row) {
        std::memcpy(matrix[row], machine::shared_at(lanes[8 * m + row]->address, 16, 16), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        const uint16 low = transposed ? matrix[j][i] : matrix[i][j];
        const uint16 high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
        lanes[lane]->r[m] = low | uint32(high) << 16;
      }
    }
  });
  std::memcpy(r, access.r, 16);
}
FA_DEVICE void ldmatrix_x4(uint32 (&r)[4], uint32 address) { load_matrices(r, address, false); }
FA_DEVICE void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address) {
  load_matrices(r, address, true);
}
