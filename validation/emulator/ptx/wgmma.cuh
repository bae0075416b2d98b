// As ptx/wgmma.cuh.  The products of a warpgroup are done in order, each at some moment between its
// start and the wait that promises it; operands in shared memory are read at that moment.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void wgmma_fence() { machine::fence_registers(); }
FA_DEVICE void wgmma_commit_group() { machine::commit_products(); }
template <int kPending>
FA_DEVICE void wgmma_wait_group() {
  machine::wait_products(kPending);
}

FA_DEVICE uint64 wgmma_descriptor(uint32 address, uint32 leading_bytes,
                                  uint32 stride_bytes = 1024) {
  return (uint64(1) << 62) | (uint64(stride_bytes >> 4) << 32) |
         (uint64(leading_bytes >> 4) << 16) | uint64((address & 0x3ffff) >> 4);
}
FA_DEVICE uint64 wgmma_at(uint64 descriptor, uint32 bytes) {
  const uint32 low = static_cast<uint32>(descriptor) + bytes / 16;
  return (descriptor >> 32 << 32) | low;
}

enum Major : int { kKMajor = 0, kMnMajor = 1 };

template <bool kBf16, int kN, Major kMajorA = kKMajor, Major kMajorB = kKMajor>
FA_DEVICE void wgmma_m64k16_ss(float (*d)[4], uint64 a, uint64 b, int add) {
  machine::start_product(
      {kN, kBf16, add != 0, kMajorA == kKMajor, kMajorB == kKMajor, false, d, nullptr, a, b});
}
// Registers that are `const` were made for the call; others are the kernel's own.
template <bool kBf16, int kN, Major kMajor = kMnMajor>
FA_DEVICE void wgmma_m64k16_rs(float (*d)[4], const uint32 (&a)[4], uint64 b, int add) {
  machine::start_product({kN, kBf16, add != 0, true, kMajor == kKMajor, false, d, a, 0, b});
}
template <bool kBf16, int kN, Major kMajor = kMnMajor>
FA_DEVICE void wgmma_m64k16_rs(float (*d)[4], uint32 (&a)[4], uint64 b, int add) {
  machine::start_product({kN, kBf16, add != 0, true, kMajor == kKMajor, true, d, a, 0, b});
}
