// What a kernel finds without including anything: CUDA's keywords and built-ins.
#pragma once
#include <algorithm>

#include "engine.hpp"

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

#define threadIdx (machine::current->tid)
#define blockIdx (machine::block_index)
#define gridDim (machine::grid_size)
#define blockDim (machine::block_size)

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return x > 0 ? std::fmin(x, 1.0f) : 0.0f; }  // NaN is 0
inline float __fmul_rz(float x, float y) {
  const double exact = double(x) * y;
  const float near = float(exact);
  return std::fabs(near) > std::fabs(exact) ? std::nextafter(near, 0.0f) : near;
}
inline float __uint_as_float(uint32_t bits) { return machine::from_bits(bits); }
inline float __int_as_float(int bits) { return machine::from_bits(static_cast<uint32_t>(bits)); }
inline unsigned __float_as_uint(float x) { return machine::to_bits(x); }
inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline long long clock64() { return machine::clock(); }

template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  static_assert(sizeof(T) % 4 == 0);
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &x, sizeof(T));
  for (uint32_t& word : words) word = machine::shuffle(word, lane);
  std::memcpy(&x, words, sizeof(T));
  return x;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int step) {
  return __shfl_sync(mask, x, static_cast<int>(threadIdx.x % 32) ^ step);
}
inline unsigned __ballot_sync(unsigned, bool x) { return machine::vote(x); }
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  for (int step = 16; step > 0; step /= 2) {
    const unsigned other = __shfl_xor_sync(mask, x, step);
    x = x < other ? other : x;
  }
  return x;
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
  for (int step = 16; step > 0; step /= 2) x |= __shfl_xor_sync(mask, x, step);
  return x;
}
inline void __syncwarp() { machine::sync_warp(); }
inline void __syncthreads() { machine::sync_named(0, static_cast<int>(blockDim.x)); }
