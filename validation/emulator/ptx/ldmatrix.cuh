// As ptx/ldmatrix.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void ldmatrix_x4(uint32 (&r)[4], uint32 address) {
  uint32 loaded[4];
  machine::load_matrices(loaded, address, false);
  for (int i = 0; i < 4; ++i) r[i] = loaded[i];  // by the kernel's own stores, which are watched
}
FA_DEVICE void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address) {
  uint32 loaded[4];
  machine::load_matrices(loaded, address, true);
  for (int i = 0; i < 4; ++i) r[i] = loaded[i];
}
