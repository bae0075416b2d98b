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
FA_DEVICE void bar_sync(int id, int threads) { machine::sync_named(id, threads); }
FA_DEVICE void bar_arrive(int id, int threads) { machine::arrive_named(id, threads); }
FA_DEVICE bool elect_sync() { return machine::elect(); }
