// As ptx/special.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE int tid_x_again() { return static_cast<int>(threadIdx.x); }
