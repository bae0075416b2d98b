// Names that every kernel uses.  NVRTC is given no header search path, so nothing here may include
// a system header.
#pragma once

#define FA_DEVICE static __device__ __forceinline__

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// A warp's lanes, all taking part.
constexpr uint32 kFullWarp = 0xffffffffu;

// IEEE 754 bits of +infinity: NVRTC has no header that names it, and the intrinsic is no constant
// expression.
#define FA_INFINITY (__int_as_float(0x7f800000))
#define FA_NAN (__int_as_float(0x7fffffff))
