// As ptx/tma.cuh.  A tensor map holds pointer, shape, strides (the last is the item size) and box
// of five axes, the contiguous one last (validation/emulator/__init__.py); boxes have 128-byte rows
// and that swizzle.
#pragma once
#include "ptx/types.cuh"

struct alignas(64) TensorMap {
  uint64 words[16];
};

constexpr uint64 kEvictNormal = 0x1000000000000000;
constexpr uint64 kEvictFirst = 0x12F0000000000000;
constexpr uint64 kEvictLast = 0x14F0000000000000;

FA_DEVICE void prefetch_tensormap(const TensorMap*) {}

FA_DEVICE void cp_async_bulk_tensor_5d_load(uint32 shared, const TensorMap* map, uint32 barrier,
                                            uint64, int c0, int c1, int c2, int c3, int c4) {
  machine::load_box(shared, map->words, barrier, {c0, c1, c2, c3, c4});
}
FA_DEVICE void cp_async_bulk_tensor_5d_store(const TensorMap* map, uint32 shared, uint64, int c0,
                                             int c1, int c2, int c3, int c4) {
  machine::store_box(map->words, shared, {c0, c1, c2, c3, c4});
}
FA_DEVICE void cp_async_bulk_commit_group() { machine::commit_stores(); }
template <int kPending>
FA_DEVICE void cp_async_bulk_wait_group() {
  machine::wait_stores(kPending, true);
}
template <int kPending>
FA_DEVICE void cp_async_bulk_wait_group_read() {
  machine::wait_stores(kPending, false);
}
FA_DEVICE void fence_proxy_async_shared() { machine::fence_proxy(); }
