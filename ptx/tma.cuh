// The tensor memory accelerator: boxes of an array in global memory, described by a tensor map
// (fa_cupy/gpu/driver/tensor_map.py), copied to and from shared memory by one thread's instruction;
// and bytes that lie together, without a map.  PTX ISA 9.7.9.27 "Tensor copy", 9.7.9.25.4 "Bulk
// copy".
//
// Coordinates count elements along each axis, the contiguous one first.  What lies outside the
// array is read as zero and is not written.  A box in shared memory starts at a multiple of 128
// bytes (1,024 where its swizzle is to look the same everywhere).
#pragma once
#include "ptx/types.cuh"

struct alignas(64) TensorMap {
  uint64 words[16];
};

// L2 cache policies as createpolicy makes them (PTX ISA 9.7.9.18), for whole accesses.
constexpr uint64 kEvictNormal = 0x1000000000000000;
constexpr uint64 kEvictFirst = 0x12F0000000000000;
constexpr uint64 kEvictLast = 0x14F0000000000000;

FA_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// Global to shared memory; the bytes arrive at `barrier`.
FA_DEVICE void cp_async_bulk_tensor_5d_load(uint32 shared_address, const TensorMap* map,
                                            uint32 barrier, uint64 policy, int c0, int c1, int c2,
                                            int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4,%5,%6,%7,%8}], [%2], %3;\n" ::"r"(shared_address),
      "l"(map), "r"(barrier), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same into every block of the cluster whose bit is set, at the same place of each; the bytes
// arrive at the barrier at the same place, too.
FA_DEVICE void cp_async_bulk_tensor_5d_multicast(uint32 shared_address, const TensorMap* map,
                                                 uint32 barrier, uint16 blocks, uint64 policy,
                                                 int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5,%6,%7,%8,%9}], [%2], %3, %4;\n" ::"r"(
          shared_address),
      "l"(map), "r"(barrier), "h"(blocks), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Shared to global memory, as a part of this thread's next bulk group.
FA_DEVICE void cp_async_bulk_tensor_5d_store(const TensorMap* map, uint32 shared_address,
                                             uint64 policy, int c0, int c1, int c2, int c3,
                                             int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group.L2::cache_hint "
      "[%0, {%3,%4,%5,%6,%7}], [%1], %2;\n" ::"l"(map),
      "r"(shared_address), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

FA_DEVICE void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups still have to be written.
template <int kPending>
FA_DEVICE void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// The same, until their sources have been read.
template <int kPending>
FA_DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

// Orders what this thread has written to shared memory before what the copy engine and the tensor
// cores do there next (PTX ISA 9.7.13.4 "membar / fence").
FA_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
