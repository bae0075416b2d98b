// As ptx/bulk.cuh.
#pragma once
#include "ptx/types.cuh"

FA_DEVICE void cp_async_bulk_load(uint32 shared, const void* global, uint32 bytes, uint32 barrier) {
  machine::load_bytes(shared, global, bytes, barrier);
}
FA_DEVICE void cp_async_bulk_store(void* global, uint32 shared, uint32 bytes, uint64) {
  machine::store_bytes(global, shared, bytes, false);
}
FA_DEVICE void cp_reduce_async_bulk_add_f32(float* global, uint32 shared, uint32 bytes, uint64) {
  machine::store_bytes(global, shared, bytes, true);
}
FA_DEVICE void fence_proxy_async_global() {}
