// Clusters: blocks that run at the same time and see each other's shared memory.
#pragma once
#include "ptx/types.cuh"

// This block's number in its cluster.  PTX ISA 10.16 "%cluster_ctarank".
FA_DEVICE uint32 cluster_ctarank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// All threads of the cluster; arrive and wait come in pairs.  PTX ISA 9.7.13.3 "barrier.cluster".
FA_DEVICE void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
FA_DEVICE void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The same variable of another block of the cluster, as an address of the cluster's shared memory.
// PTX ISA 9.7.9.22 "mapa".
FA_DEVICE uint32 mapa_shared_cluster(uint32 shared_address, uint32 rank) {
  uint32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n"
               : "=r"(remote)
               : "r"(shared_address), "r"(rank));
  return remote;
}

// Arrives at a barrier of any block of the cluster.
FA_DEVICE void mbarrier_arrive_cluster(uint32 cluster_address) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(cluster_address)
      : "memory");
}
