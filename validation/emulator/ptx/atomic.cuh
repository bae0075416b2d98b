// As ptx/atomic.cuh; one thread runs at a time.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE uint32 atom_add_u32(uint32* address, uint32 x) {
  const uint32 old = *address;
  *address += x;
  return old;
}
FA_DEVICE uint32 atom_add_acq_rel_gpu_u32(uint32* address, uint32 x) {
  return atom_add_u32(address, x);
}
FA_DEVICE uint64 atom_add_acq_rel_gpu_u64(uint64* address, uint64 x) {
  const uint64 old = *address;
  *address += x;
  return old;
}
FA_DEVICE uint64 atom_cas_acq_rel_gpu_b64(uint64* address, uint64 expected, uint64 replacement) {
  const uint64 old = *address;
  if (old == expected) *address = replacement;
  return old;
}
FA_DEVICE void atom_cas_b128(uint64* address, uint64 (&expected)[2],
                             const uint64 (&replacement)[2]) {
  const uint64 old[2] = {address[0], address[1]};
  if (old[0] == expected[0] && old[1] == expected[1]) {
    address[0] = replacement[0];
    address[1] = replacement[1];
  }
  expected[0] = old[0];
  expected[1] = old[1];
}
FA_DEVICE uint32 ld_acquire_gpu_u32(const uint32* address) {
  return machine::load_acquire(address);
}
FA_DEVICE void red_release_gpu_add_u32(uint32* address, uint32 x) {
  machine::add_release(address, x);
}
