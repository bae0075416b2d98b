// What a kernel finds without including anything: CUDA's keywords and built-ins.
#pragma once
#include <algorithm>

#include "machine.hpp"

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

#define threadIdx (machine::block->current->tid)
#define blockIdx (machine::block->block_index)
#define gridDim (machine::block->grid)
#define blockDim (machine::block->block_size)

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __int_as_float(int bits) { return machine::from_bits(static_cast<uint32_t>(bits)); }
inline unsigned __float_as_uint(float x) { return machine::to_bits(x); }

struct Exchange {
  int lane;
  uint32_t mine, got;
};

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  static_assert(sizeof(T) == 4);
  Exchange e{lane, 0, 0};
  std::memcpy(&e.mine, &x, 4);
  machine::meet(32, "shfl", e, [](Exchange** all) {
    for (int i = 0; i < 32; ++i) all[i]->got = all[all[i]->lane % 32]->mine;
  });
  std::memcpy(&x, &e.got, 4);
  return x;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int step) {
  return __shfl_sync(mask, x, static_cast<int>(threadIdx.x % 32) ^ step);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  Exchange e{0, x, 0};
  machine::meet(32, "vote", e, [](Exchange** all) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= all[i]->mine << i;
    for (int i = 0; i < 32; ++i) all[i]->got = votes;
  });
  return e.got;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  Exchange e{0, x, 0};
  machine::meet(32, "redux", e, [](Exchange** all) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; ++i) largest = std::max(largest, all[i]->mine);
    for (int i = 0; i < 32; ++i) all[i]->got = largest;
  });
  return e.got;
}
inline void __syncwarp() {
  Exchange e{};
  machine::meet(32, "syncwarp", e, [](Exchange**) {});
}

void bar_sync(int id, int threads);
inline void __syncthreads() { bar_sync(0, static_cast<int>(blockDim.x)); }
