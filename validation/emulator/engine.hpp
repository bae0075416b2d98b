// What the headers in ptx/ and cuda.hpp ask of the machine that runs a block (machine.hpp).  A
// kernel is compiled with this and little else, so that it compiles fast.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct Dim3 {
  unsigned x = 0, y = 0, z = 0;
};

// The machine is a library of its own, which those of kernels are linked with.
#pragma GCC visibility push(default)

// Where dynamic shared memory lies; kernels declare it `extern`.
extern "C" unsigned char shared_bytes[];

namespace machine {

struct Thread {
  Dim3 tid;
};
extern Thread* current;  // whose code is running
extern Dim3 block_index, grid_size, block_size;

// Shared memory.  Addresses are offsets in it.
uint32_t shared_address(const void* pointer);
void load_shared(void* to, uint32_t address, int bytes);
void store_shared(uint32_t address, const void* from, int bytes);
void fence_proxy();  // what this thread has written may be read by the async proxy

// What a warp does together.
uint32_t shuffle(uint32_t x, int lane);
uint32_t vote(bool x);
bool elect();
void sync_warp();
void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed);
void store_matrices(uint32_t address, const uint32_t (&r)[4], bool transposed);
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16);
void multiply_float64(double* d, const double* a, const double* b, int m, int k);  // n is 8

// wgmma: D (64 x n) (+)= A B.  `a` is null where A is in shared memory.  `watched`: the registers
// of A are the kernel's own, which it could touch too early, and no copy made for the call.
struct Product {
  int n;
  bool bf16, add, a_k_major, k_major, watched;
  float (*d)[4];
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
};
void fence_registers();
void start_product(const Product& product);
void commit_products();
void wait_products(int pending);

// cp.async and TMA; a tensor map is described in ptx/tma.cuh.
void copy(uint32_t address, const void* global, uint32_t size, uint32_t bytes);
void commit_copies();
void wait_copies(int pending);
void load_box(uint32_t address, const unsigned long long* map, uint32_t barrier, const int (&c)[5]);
void store_box(const unsigned long long* map, uint32_t address, const int (&c)[5]);
void load_bytes(uint32_t address, const void* global, uint32_t bytes, uint32_t barrier);
void store_bytes(void* global, uint32_t address, uint32_t bytes, bool add);  // add: as floats
void commit_stores();
void wait_stores(int pending, bool written);

// Barriers.
void make_barrier(uint32_t address, int arrivals);
void arrive(uint32_t address, uint32_t bytes);
bool try_wait(uint32_t address, uint32_t parity);
void arrive_named(int id, int threads);
void sync_named(int id, int threads);
// Words of global memory that threads wait for.
uint32_t load_acquire(const uint32_t* address);
void add_release(uint32_t* address, uint32_t x);

long long clock();

}  // namespace machine
#pragma GCC visibility pop

namespace machine {

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float widen(uint16_t bits, bool bf16) {
  if (bf16) return from_bits(uint32_t(bits) << 16);
  const uint32_t rest = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  if (rest >= 0x0f800000) return from_bits(sign | 0x7f800000 | rest);  // infinite or NaN
  // The exponent counts from 127 instead of 15.
  return from_bits(to_bits(from_bits(rest) * 0x1p112f) | sign);
}

inline uint16_t narrow(float x, bool bf16) {
  if (std::isnan(x)) return 0x7fff;
  if (!bf16) {
    const _Float16 half = static_cast<_Float16>(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  const uint32_t bits = to_bits(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace machine
