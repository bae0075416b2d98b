// As ptx/cp_async.cuh: a copy happens at some moment before the wait that promises it.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void cp_async_cg_16(uint32 address, const void* global, uint32 bytes) {
  machine::copy(address, global, 16, bytes);
}
template <int kBytes>
FA_DEVICE void cp_async_ca(uint32 address, const void* global) {
  machine::copy(address, global, kBytes, kBytes);
}
FA_DEVICE void cp_async_commit_group() { machine::commit_copies(); }
template <int kPending>
FA_DEVICE void cp_async_wait_group() {
  machine::wait_copies(kPending);
}
