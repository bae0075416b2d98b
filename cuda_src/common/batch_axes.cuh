// Batch axes, which a kernel walks by strides: at most kMaxBatchAxes, the host merges what it can.
#pragma once
#include "ptx/types.cuh"

constexpr int kMaxBatchAxes = 6;

// a / b of numbers that are not negative; a 64-bit division takes hundreds of instructions.
FA_DEVICE int64 divide(int64 a, int64 b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32>(a) / static_cast<uint32>(b);
  return a / b;
}
FA_DEVICE uint32 divide(uint32 a, int64 b) { return a / static_cast<uint32>(b); }
