// Addresses, and accesses of 4 to 16 bytes, in shared memory.  PTX ISA 9.7.9.8 "ld", 9.7.9.11 "st",
// 9.7.9.20 "cvta".
#pragma once
#include "ptx/types.cuh"

// The address of a shared variable inside the shared window, as ld.shared, ldmatrix and cp.async
// take it.  The intrinsic is cvta.to.shared, which the compiler folds away for a variable it knows;
// inline asm would keep the generic address.
FA_DEVICE uint32 cvta_to_shared(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

FA_DEVICE void st_shared_b32(uint32 shared_address, uint32 x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared_address), "r"(x) : "memory");
}

FA_DEVICE void st_shared_v2_b32(uint32 shared_address, uint32 x, uint32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};\n" ::"r"(shared_address), "r"(x), "r"(y)
               : "memory");
}

FA_DEVICE void st_shared_v4_b32(uint32 shared_address, const uint32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(shared_address), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

FA_DEVICE void ld_shared_v4_b32(uint32 (&x)[4], uint32 shared_address) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address)
               : "memory");
}

FA_DEVICE void ld_shared_v2_f64(double (&x)[2], uint32 shared_address) {
  asm volatile("ld.shared.v2.f64 {%0,%1}, [%2];\n"
               : "=d"(x[0]), "=d"(x[1])
               : "r"(shared_address)
               : "memory");
}
