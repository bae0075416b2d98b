// As ptx/special.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE int tid_x_again() { return static_cast<int>(threadIdx.x); }
FA_DEVICE uint32 opaque(uint32 x) { return x; }
