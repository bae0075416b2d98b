// As ptx/prefetch.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void prefetch_l1(const void*) {}
