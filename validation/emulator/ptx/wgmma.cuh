// As ptx/wgmma.cuh.  The products of a warpgroup are done in order, each at some moment between its
// start and the wait that promises it; operands in shared memory are read at that moment.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void wgmma_fence() {}

FA_DEVICE machine::Products& products() { return machine::block->products[threadIdx.x / 128]; }

FA_DEVICE void wgmma_commit_group() {
  int nothing = 0;
  auto& mine = products();
  machine::meet(128, "wgmma.commit_group", nothing, [&mine](int**) {
    if (mine.open > 0) mine.groups.push_back(mine.open);
    mine.open = 0;
  });
}
template <int kPending>
FA_DEVICE void wgmma_wait_group() {
  auto& mine = products();
  machine::wait_until("wgmma.wait_group", [&mine] { return mine.groups.size() <= kPending; });
}

FA_DEVICE uint64 wgmma_descriptor(uint32 address, uint32 leading_bytes) {
  return (uint64(1) << 62) | (uint64(1024 >> 4) << 32) | (uint64(leading_bytes >> 4) << 16) |
         uint64((address & 0x3ffff) >> 4);
}

enum Major : int { kKMajor = 0, kMnMajor = 1 };

// Element (row, col) of a matrix of blocks of 64 columns in the 128-byte swizzle, from byte
// `start`.
FA_DEVICE float swizzled_element(uint32 start, uint32 leading, int row, int col, bool bf16) {
  // The swizzle acts on addresses: bits 4 to 6 are exchanged with bits 7 to 9.
  const uint32 linear = start + uint32(col / 64) * leading + uint32(row) * 128 + col % 64 * 2;
  const uint32 address = linear ^ (linear >> 3 & 0x70);
  uint16 bits;
  std::memcpy(&bits, machine::shared_at(address, 2, 2), 2);
  return machine::widen(bits, bf16);
}

struct WgmmaArgument {
  float (*d)[4];
  uint32 a[4];
};

template <bool kBf16, int kN>
void start_product(float (*d)[4], const uint32* a, uint64 a_descriptor, uint64 b_descriptor,
                   Major major, bool add) {
  WgmmaArgument argument{d, {}};
  if (a != nullptr) std::memcpy(argument.a, a, 16);
  auto& mine = products();
  machine::meet(128, "wgmma", argument, [&, a](WgmmaArgument** all) {
    std::vector<WgmmaArgument> threads;
    for (int i = 0; i < 128; ++i) threads.push_back(*all[i]);
    const bool in_registers = a != nullptr;
    ++mine.open;
    mine.queue.push_back([=] {
      auto start = [](uint64 x) { return uint32(x & 0x3fff) << 4; };
      auto leading = [](uint64 x) { return uint32(x >> 16 & 0x3fff) << 4; };
      std::vector<float> x(64 * 16), y(16 * kN);
      for (int k = 0; k < 16; ++k) {
        for (int m = 0; m < 64; ++m) {
          if (in_registers) {
            const WgmmaArgument& of = threads[m / 16 * 32 + m % 8 * 4 + k % 8 / 2];
            const uint32 word = of.a[m % 16 / 8 + k / 8 * 2];
            x[m * 16 + k] = machine::widen(uint16(word >> 16 * (k % 2)), kBf16);
          } else {
            x[m * 16 + k] = swizzled_element(start(a_descriptor), 0, m, k, kBf16);
          }
        }
        for (int n = 0; n < kN; ++n) {
          y[k * kN + n] = major == kKMajor ? swizzled_element(start(b_descriptor), 0, n, k, kBf16)
                                           : swizzled_element(start(b_descriptor),
                                                              leading(b_descriptor), k, n, kBf16);
        }
      }
      for (int thread = 0; thread < 128; ++thread) {
        const int row0 = thread / 32 * 16 + thread % 32 / 4;
        for (int v = 0; v < kN / 8; ++v) {
          for (int e = 0; e < 4; ++e) {
            const int row = row0 + e / 2 * 8, col = 8 * v + thread % 4 * 2 + e % 2;
            float& out = threads[thread].d[v][e];
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k) sum += x[row * 16 + k] * y[k * kN + col];
            out = (add ? out : 0.0f) + sum;
          }
        }
      }
    });
  });
}

template <bool kBf16, int kN>
FA_DEVICE void wgmma_m64k16_ss(float (*d)[4], uint64 a, uint64 b, int add) {
  start_product<kBf16, kN>(d, nullptr, a, b, kKMajor, add != 0);
}
template <bool kBf16, int kN, Major kMajor = kMnMajor>
FA_DEVICE void wgmma_m64k16_rs(float (*d)[4], const uint32 (&a)[4], uint64 b, int add) {
  start_product<kBf16, kN>(d, a, 0, b, kMajor, add != 0);
}
