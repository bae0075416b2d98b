// As ptx/warpgroup.cuh.
#pragma once
#include "ptx/types.cuh"

template <int kRegisters>
FA_DEVICE void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}
template <int kRegisters>
FA_DEVICE void setmaxnreg_inc() {
  setmaxnreg_dec<kRegisters>();
}
void bar_arrive(int id, int threads);

// Any lane may be chosen; always the same one of a warp.
FA_DEVICE bool elect_sync() {
  return __shfl_sync(kFullWarp, static_cast<int>(machine::block->random(32)), 0) ==
         static_cast<int>(threadIdx.x % 32);
}
