// As ptx/shared.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE uint32 cvta_to_shared(const void* pointer) { return machine::shared_address(pointer); }
FA_DEVICE void st_shared_b32(uint32 address, uint32 x) { machine::store_shared(address, &x, 4); }
FA_DEVICE void st_shared_v2_b32(uint32 address, uint32 x, uint32 y) {
  const uint32 both[2] = {x, y};
  machine::store_shared(address, both, 8);
}
FA_DEVICE void st_shared_v4_b32(uint32 address, const uint32 (&x)[4]) {
  machine::store_shared(address, x, 16);
}
FA_DEVICE void ld_shared_v4_b32(uint32 (&x)[4], uint32 address) {
  machine::load_shared(x, address, 16);
}
FA_DEVICE void ld_shared_v2_f64(double (&x)[2], uint32 address) {
  machine::load_shared(x, address, 16);
}
