// Numbers of arrays of int32 or int64 that callers give.
#pragma once
#include "ptx/types.cuh"

// An integer of 4 or 8 bytes; -1 for one that 32 bits do not hold.
FA_DEVICE int load_index(const void* base, int64 index, int bytes) {
  if (bytes == 4) return static_cast<const int*>(base)[index];
  const int64 value = static_cast<const int64*>(base)[index];
  return value == static_cast<int>(value) ? static_cast<int>(value) : -1;
}
