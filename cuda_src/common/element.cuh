// The two 16-bit element types behind one spelling: kBf16 chooses between bfloat16 and float16.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"

template <bool kBf16>
FA_DEVICE uint32 pack2(float low, float high) {
  if constexpr (kBf16) {
    return cvt_rn_bf16x2_f32(low, high);
  } else {
    return cvt_rn_f16x2_f32(low, high);
  }
}

template <bool kBf16>
FA_DEVICE uint32 fma2(uint32 a, uint32 b, uint32 c) {
  if constexpr (kBf16) {
    return fma_rn_bf16x2(a, b, c);
  } else {
    return fma_rn_f16x2(a, b, c);
  }
}

template <bool kBf16>
FA_DEVICE float to_float(uint16 bits) {
  if constexpr (kBf16) {
    return cvt_f32_bf16(bits);
  } else {
    return cvt_f32_f16(bits);
  }
}

// Elements are uint16 or, in kernels of float32, float: there kBf16 says nothing.
template <bool kBf16>
FA_DEVICE float to_float(float x) {
  return x;
}

template <bool kBf16, typename Element>
FA_DEVICE Element to_element(float x) {
  if constexpr (sizeof(Element) == sizeof(float)) {
    return x;
  } else {
    return static_cast<Element>(pack2<kBf16>(x, 0.0f));
  }
}

// x rounded to the element type, as a float.
template <bool kBf16, typename Element = uint16>
FA_DEVICE float rounded(float x) {
  return to_float<kBf16>(to_element<kBf16, Element>(x));
}

template <bool kBf16>
FA_DEVICE void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  if constexpr (kBf16) {
    mma_m16n8k16_f32_bf16(d, a, b0, b1);
  } else {
    mma_m16n8k16_f32_f16(d, a, b0, b1);
  }
}
