// Names that every kernel uses, as in ptx/types.cuh.
#pragma once

#define FA_DEVICE static __device__ __forceinline__

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// A warp's lanes, all taking part.
constexpr uint32 kFullWarp = 0xffffffffu;
