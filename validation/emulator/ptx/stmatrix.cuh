// As ptx/stmatrix.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void stmatrix_x4(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
  machine::store_matrices(address, {r0, r1, r2, r3}, false);
}
FA_DEVICE void stmatrix_x4_trans(uint32 address, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
  machine::store_matrices(address, {r0, r1, r2, r3}, true);
}
