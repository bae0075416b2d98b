"""Each wrapper of ptx/ that only SM90 has, alone, in a kernel of a few lines, against NumPy."""

import functools
import re

import ml_dtypes
import numpy as np
import pytest

from fa_cupy.gpu.driver import compile, devices
from tests.support.every_run import some
from tests.support.ptx_kernels import AT, HEADERS, INCLUDES, mma_of_float64

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

TARGET = "sm_90a"
SLOW_NOTES = ("C7508", "C7510", "C7511", "C7514")
# The map comes first, so it is aligned as the struct is; the size is a multiple of 64, as in C++.
PARAMS = np.dtype(
    [
        ("map", "V128"),
        *((name, np.uint64) for name in ("x", "y", "z", "out", "failed")),
        *((name, np.int32) for name in ("count", "bytes", "first")),
        ("unused", "V12"),
    ]
)
PREAMBLE = """
struct Params {
  TensorMap map;
  uint64 x, y, z, out, failed;
  int count, bytes, first;
};
static_assert(alignof(Params) == 64 && sizeof(Params) == SIZE);

// For whole warps.  Bounded, so that a phase that never ends is a failure and no hang.
[[maybe_unused]] FA_DEVICE void wait(const Params& p, uint32 barrier, uint32 parity) {
  const int64 start = clock64();
  while (!mbarrier_try_wait_parity(barrier, parity)) {
    if (clock64() - start > 1 << 30) {
      *at<uint32>(p.failed) = 1;
      break;
    }
  }
  __syncwarp();
}

// Comes late.
[[maybe_unused]] FA_DEVICE void pause_one(int clocks) {
  const int64 start = clock64();
  while (clock64() - start < clocks) {
  }
}

// For whole warps: comes late, so that those who do not wait are found out.
[[maybe_unused]] FA_DEVICE void pause(int clocks) {
  const int64 start = clock64();
  while (clock64() - start < clocks) {
  }
  __syncwarp();
}
""".replace("SIZE", str(PARAMS.itemsize))


def kernel(body, attributes=""):
    head = f'extern "C" __global__ void {attributes} test(const __grid_constant__ Params p) {{'
    lane = "  [[maybe_unused]] const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;"
    return f"{head}\n{lane}\n{body}\n}}\n"


# Forms: A and B in shared memory, both as rows of K, A as columns of it or both; A in registers and
# B either way. Where they are strided, all blocks of eight rows lie together.
WGMMA = """
enum Form { kSs, kSsColumns, kSsBothColumns, kSsStrided, kRs, kRsTransposed, kRsStrided };
constexpr int kK = 128;

// y is the image of shared memory: A (64, K) or A^T, then B.  x and z hold the registers of A and
// D, out those of D, thread by thread.
template <bool kBf16, int kN, Form kForm>
static __device__ __forceinline__ void product(const Params& p) {
  extern __shared__ __align__(1024) uint32 image[];
  for (int i = threadIdx.x; i < p.bytes / 4; i += 128) image[i] = at<uint32>(p.y)[i];
  fence_proxy_async_shared();
  __syncthreads();

  [[maybe_unused]] uint32 a[kK / 16][4];
  float d[kN / 8][4];
#pragma unroll
  for (int s = 0; s < kK / 16; ++s) {
#pragma unroll
    for (int r = 0; r < 4; ++r) a[s][r] = at<uint32>(p.x)[(threadIdx.x * kK / 16 + s) * 4 + r];
  }
#pragma unroll
  for (int v = 0; v < kN / 8; ++v) {
#pragma unroll
    for (int r = 0; r < 4; ++r) d[v][r] = at<float>(p.z)[(threadIdx.x * kN / 8 + v) * 4 + r];
  }

  const uint32 a_tile = cvta_to_shared(image), b_tile = a_tile + 64 * kK * 2;
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kK / 16; ++s) {
    const int add = s > 0 || p.first;
    const uint64 b = wgmma_descriptor(b_tile + s / 4 * kN * 128 + s % 4 * 32, 0);
    if constexpr (kForm == kSs) {
      wgmma_m64k16_ss<kBf16, kN>(d, wgmma_descriptor(a_tile + s / 4 * 64 * 128 + s % 4 * 32, 0), b,
                                 add);
    } else if constexpr (kForm == kSsStrided) {
      constexpr int kStride = kK / 64 * 1024;
      const int place = s / 4 * 1024 + s % 4 * 32;
      wgmma_m64k16_ss<kBf16, kN>(d, wgmma_descriptor(a_tile + place, 0, kStride),
                                 wgmma_descriptor(b_tile + place, 0, kStride), add);
    } else if constexpr (kForm == kRsStrided) {
      constexpr int kStride = (kN + 63) / 64 * 1024;
      const uint64 rows = wgmma_at(wgmma_descriptor(b_tile, 1024, kStride), s * 2 * kStride);
      wgmma_m64k16_rs<kBf16, kN>(d, a[s], rows, add);
    } else if constexpr (kForm == kSsColumns || kForm == kSsBothColumns) {
      constexpr Major kMajorB = kForm == kSsColumns ? kKMajor : kMnMajor;
      const uint64 columns = wgmma_at(wgmma_descriptor(a_tile, 0), s * 16 * 128);
      const uint64 rows = wgmma_at(wgmma_descriptor(b_tile, kK * 128), s * 16 * 128);
      wgmma_m64k16_ss<kBf16, kN, kMnMajor, kMajorB>(d, columns, kMajorB == kKMajor ? b : rows, add);
    } else if constexpr (kForm == kRsTransposed) {
      wgmma_m64k16_rs<kBf16, kN, kKMajor>(d, a[s], b, add);
    } else {
      const uint64 rows = wgmma_at(wgmma_descriptor(b_tile, kK * 128), s * 16 * 128);
      wgmma_m64k16_rs<kBf16, kN>(d, a[s], rows, add);
    }
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
#pragma unroll
  for (int v = 0; v < kN / 8; ++v) {
#pragma unroll
    for (int r = 0; r < 4; ++r) at<float>(p.out)[(threadIdx.x * kN / 8 + v) * 4 + r] = d[v][r];
  }
}
#define ENTRY(form, name, type, bf16)                                   \\
  extern "C" __global__ void __launch_bounds__(128)                     \\
      name##_##type(const __grid_constant__ Params p) {                 \\
    product<bf16, N, form>(p);                                          \\
  }
ENTRY(kSs, ss, bfloat16, true)
ENTRY(kSs, ss, float16, false)
ENTRY(kSsColumns, ss_columns, bfloat16, true)
ENTRY(kSsColumns, ss_columns, float16, false)
ENTRY(kSsBothColumns, ss_both_columns, bfloat16, true)
ENTRY(kSsBothColumns, ss_both_columns, float16, false)
ENTRY(kSsStrided, ss_strided, bfloat16, true)
ENTRY(kSsStrided, ss_strided, float16, false)
ENTRY(kRsStrided, rs_strided, bfloat16, true)
ENTRY(kRsStrided, rs_strided, float16, false)
ENTRY(kRs, rs, bfloat16, true)
ENTRY(kRs, rs, float16, false)
ENTRY(kRsTransposed, rs_transposed, bfloat16, true)
ENTRY(kRsTransposed, rs_transposed, float16, false)
"""
WGMMA_N = sorted(
    {int(n) for n in re.findall(r"^  FA_WGMMA\(SS, (\d+),", HEADERS["wgmma.cuh"], re.MULTILINE)}
)

SOURCES = {
    # Three arrivals a phase, one of them with a promise of no bytes.
    "mbarrier_phases": kernel("""
  __shared__ uint64 place;
  const uint32 barrier = cvta_to_shared(&place);
  uint32* out = at<uint32>(p.out);
  mbarrier_init(barrier, 3);
  fence_mbarrier_init();
  *out++ = mbarrier_try_wait_parity(barrier, 1);
  for (int phase = 0; phase < 4; ++phase) {
    for (int n = 0; n < 3; ++n) {
      *out++ = mbarrier_try_wait_parity(barrier, phase & 1);
      if (n == 1) {
        mbarrier_arrive_expect_tx(barrier, 0);
      } else {
        mbarrier_arrive(barrier);
      }
    }
    *out++ = mbarrier_try_wait_parity(barrier, phase & 1);
    *out++ = mbarrier_try_wait_parity(barrier, (phase & 1) ^ 1);
  }
"""),
    # One warp writes words that three others read, again and again.
    "mbarrier_threads": kernel("""
  __shared__ uint32 words[32];
  __shared__ uint64 places[2];
  const uint32 full = cvta_to_shared(places), empty = cvta_to_shared(places + 1);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 32);
    mbarrier_init(empty, 96);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int n = 0; n < 8; ++n) {
    if (warp == 0) {
      wait(p, empty, (n & 1) ^ 1);
      if (n % 2 == 0) pause(20000);
      words[lane] = at<uint32>(p.x)[n * 32 + lane];
      mbarrier_arrive(full);
    } else {
      wait(p, full, n & 1);
      if (n % 2) pause(20000);
      at<uint32>(p.out)[n * 96 + threadIdx.x - 32] = words[lane];
      mbarrier_arrive(empty);
    }
  }
"""),
    # Boxes at the coordinates y, one after the other, into a tile of 8 KB.
    "tma_load": kernel("""
  __shared__ __align__(1024) uint32 tile[2048];
  __shared__ uint64 place;
  const uint32 full = cvta_to_shared(&place);
  if (threadIdx.x == 0) {
    prefetch_tensormap(&p.map);
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  for (int n = 0; n < p.count; ++n) {
    for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0xeeeeeeee;
    fence_proxy_async_shared();
    __syncthreads();
    if (warp == 0 && elect_sync()) {
      const int* c = at<int>(p.y) + 5 * n;
      mbarrier_arrive_expect_tx(full, p.bytes);
      // The arrival has come, the bytes have not.
      if (mbarrier_try_wait_parity(full, n & 1)) *at<uint32>(p.failed) = 2;
      cp_async_bulk_tensor_5d_load(cvta_to_shared(tile), &p.map, full,
                                   n % 2 ? kEvictLast : kEvictFirst, c[0], c[1], c[2], c[3], c[4]);
    }
    __syncwarp();
    wait(p, full, n & 1);
    for (int i = threadIdx.x; i < 2048; i += 128) at<uint32>(p.out)[n * 2048 + i] = tile[i];
    __syncthreads();
  }
"""),
    # Pieces of x of p.bytes, from the places y on, one after the other into 8 KB.
    "bulk_load": kernel("""
  __shared__ __align__(128) uint32 piece[2048];
  __shared__ uint64 place;
  const uint32 full = cvta_to_shared(&place);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  for (int n = 0; n < p.count; ++n) {
    for (int i = threadIdx.x; i < 2048; i += 128) piece[i] = 0xeeeeeeee;
    fence_proxy_async_shared();
    __syncthreads();
    if (warp == 0 && elect_sync()) {
      mbarrier_arrive_expect_tx(full, p.bytes);
      if (mbarrier_try_wait_parity(full, n & 1)) *at<uint32>(p.failed) = 2;
      cp_async_bulk_load(cvta_to_shared(piece) + 16 * n, at<uint8>(p.x) + at<int>(p.y)[n], p.bytes,
                         full);
    }
    __syncwarp();
    wait(p, full, n & 1);
    for (int i = threadIdx.x; i < 2048; i += 128) at<uint32>(p.out)[n * 2048 + i] = piece[i];
    __syncthreads();
  }
"""),
    # The tiles x to the coordinates y.  A buffer is written again when the store before the last
    # has read it.
    "tma_store": kernel("""
  __shared__ __align__(1024) uint32 tiles[2][2048];
  for (int n = 0; n < p.count; ++n) {
    uint32* tile = tiles[n % 2];
    if (threadIdx.x == 0) cp_async_bulk_wait_group_read<1>();
    __syncthreads();
    for (int i = threadIdx.x; i < p.bytes / 4; i += 128) {
      tile[i] = at<uint32>(p.x)[n * (p.bytes / 4) + i];
    }
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int* c = at<int>(p.y) + 5 * n;
      cp_async_bulk_tensor_5d_store(&p.map, cvta_to_shared(tile), n % 2 ? kEvictLast : kEvictFirst,
                                    c[0], c[1], c[2], c[3], c[4]);
      cp_async_bulk_commit_group();
    }
  }
  if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();
"""),
    # Two stores into x, 2 KB each; each is read there as soon as the wait says that it is done.
    "tma_store_wait": kernel("""
  __shared__ __align__(1024) uint32 tile[1024];
  for (int i = threadIdx.x; i < 1024; i += 128) tile[i] = at<uint32>(p.y)[i];
  fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) {
      cp_async_bulk_tensor_5d_store(&p.map, cvta_to_shared(tile + 512 * n), kEvictLast, 0, 16 * n,
                                    0, 0, 0);
      cp_async_bulk_commit_group();
    }
    const volatile uint32* x = at<uint32>(p.x);
    cp_async_bulk_wait_group<1>();
    for (int i = 0; i < 512; ++i) at<uint32>(p.out)[i] = x[i];
    cp_async_bulk_wait_group<0>();
    for (int i = 512; i < 1024; ++i) at<uint32>(p.out)[i] = x[i];
  }
"""),
    # Block r sends box r to both; block 0 sends box 2 to block 1 alone.
    "tma_multicast": kernel(
        """
  __shared__ __align__(1024) uint32 tiles[3][512];
  __shared__ uint64 place;
  const uint32 full = cvta_to_shared(&place), rank = cluster_ctarank();
  for (int i = threadIdx.x; i < 3 * 512; i += 128) tiles[0][i] = 0xeeeeeeee;
  fence_proxy_async_shared();
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  __syncwarp();
  barrier_cluster_arrive();
  barrier_cluster_wait();
  if (warp == 0 && elect_sync()) {
    mbarrier_arrive_expect_tx(full, (rank == 0 ? 2 : 3) * 2048);
    cp_async_bulk_tensor_5d_multicast(cvta_to_shared(tiles[rank]), &p.map, full, 3, kEvictLast, 0,
                                      16 * rank, 0, 0, 0);
    if (rank == 0) {
      cp_async_bulk_tensor_5d_multicast(cvta_to_shared(tiles[2]), &p.map, full, 2, kEvictFirst, 0,
                                        32, 0, 0, 0);
    }
  }
  __syncwarp();
  wait(p, full, 0);
  for (int i = threadIdx.x; i < 3 * 512; i += 128) {
    at<uint32>(p.out)[blockIdx.x * 3 * 512 + i] = tiles[0][i];
  }
  __syncwarp();
  barrier_cluster_arrive();  // no block leaves before its neighbour has what it has sent
  barrier_cluster_wait();
""",
        "__cluster_dims__(2, 1, 1)",
    ),
    # Two clusters of two blocks.  They pass words through global memory with the cluster's barrier,
    # then take turns in arriving at each other's barrier.
    "cluster": kernel(
        """
  __shared__ uint64 place;
  const uint32 rank = cluster_ctarank(), barrier = cvta_to_shared(&place);
  uint32* out = at<uint32>(p.out) + (blockIdx.x * 32 + lane) * 4;
  volatile uint32* words = at<uint32>(p.z);
  if (lane == 0) {
    mbarrier_init(barrier, 32);
    fence_mbarrier_init();
  }
  __syncwarp();
  barrier_cluster_arrive();
  barrier_cluster_wait();
  out[0] = rank;
  out[1] = mbarrier_try_wait_parity(barrier, 0);
  __syncwarp();
  if (rank == 1) pause(100000);
  words[blockIdx.x * 32 + lane] = 1000 * blockIdx.x + lane;
  barrier_cluster_arrive();
  barrier_cluster_wait();
  out[2] = words[(blockIdx.x ^ 1) * 32 + lane];
  for (int n = 0; n < 4; ++n) {
    if (rank == n % 2) {
      mbarrier_arrive_cluster(mapa_shared_cluster(barrier, rank ^ 1));
    } else {
      wait(p, barrier, n / 2);
    }
  }
  out[3] = mbarrier_try_wait_parity(barrier, 1);
  __syncwarp();
  barrier_cluster_arrive();  // a block that has left has no barrier to arrive at
  barrier_cluster_wait();
""",
        "__cluster_dims__(2, 1, 1)",
    ),
    # 200 values and their sum at once, in threads that start with 168 registers.
    "setmaxnreg": kernel(
        """
  if (warp < 4) {
    setmaxnreg_dec<24>();
    at<uint32>(p.out)[threadIdx.x] = at<uint32>(p.x)[threadIdx.x] + 1;
  } else {
    setmaxnreg_inc<240>();
    const uint32* x = at<uint32>(p.x) + threadIdx.x;
    uint32* out = at<uint32>(p.out) + threadIdx.x;
    uint32 values[200], sum = 0;
#pragma unroll
    for (int n = 0; n < 200; ++n) {
      values[n] = x[384 * n];
      sum += values[n];
    }
#pragma unroll
    for (int n = 0; n < 200; ++n) out[384 * n] = values[n] ^ sum;
  }
""",
        "__launch_bounds__(384, 1)",
    ),
    # Warp 0 writes words that two others read, again and again.
    "named_barriers": kernel("""
  __shared__ uint32 words[32];
  __shared__ uint64 place;
  const uint32 passed = cvta_to_shared(&place);
  if (threadIdx.x == 0) {
    mbarrier_init(passed, 32);
    fence_mbarrier_init();
  }
  __syncthreads();
  // Warp 0 gets past its arrival before the others come.
  if (warp == 0) {
    bar_arrive(3, 96);
    mbarrier_arrive(passed);
  } else {
    wait(p, passed, 0);
    bar_sync(3, 96);
  }
  for (int n = 0; n < 8; ++n) {
    if (warp == 0) {
      if (n % 2) pause(20000);
      words[lane] = at<uint32>(p.x)[n * 32 + lane];
      bar_arrive(1, 96);
      bar_sync(2, 96);
    } else {
      bar_sync(1, 96);
      if (n % 2 == 0) pause(20000);
      at<uint32>(p.out)[n * 64 + threadIdx.x - 32] = words[lane];
      bar_arrive(2, 96);
    }
  }
"""),
    # A is x (16, 16), B is y (16, 8), the sum starts from z (16, 8).
    "mma_m16n8k16_f64": kernel("""
  const int g = lane / 4, t = lane % 4;
  const double *x = at<double>(p.x), *y = at<double>(p.y);
  double a[8], b[4], d[4];
  for (int i = 0; i < 8; ++i) a[i] = x[(g + i % 2 * 8) * 16 + t + i / 2 * 4];
  for (int i = 0; i < 4; ++i) b[i] = y[(t + 4 * i) * 8 + g];
  for (int i = 0; i < 4; ++i) d[i] = at<double>(p.z)[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  mma_m16n8k16_f64(d, a, b);
  for (int i = 0; i < 4; ++i) at<double>(p.out)[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
"""),
    "elect_sync": kernel("  at<uint32>(p.out)[threadIdx.x] = elect_sync();"),
    # Rows 48 bytes apart.
    "stmatrix": kernel("""
  __shared__ __align__(16) uint16 rows[32 * 24];
  for (int c = 0; c < 24; ++c) rows[lane * 24 + c] = 0xeeee;
  __syncwarp();
  const uint32* x = at<uint32>(p.x) + lane * 4;
  stmatrix_x4(cvta_to_shared(rows + lane * 24), x[0], x[1], x[2], x[3]);
  __syncwarp();
  for (int c = 0; c < 24; ++c) at<uint16>(p.out)[lane * 24 + c] = rows[lane * 24 + c];
"""),
    "stmatrix_trans": kernel("""
  __shared__ __align__(16) uint16 rows[32 * 24];
  for (int c = 0; c < 24; ++c) rows[lane * 24 + c] = 0xeeee;
  __syncwarp();
  const uint32* x = at<uint32>(p.x) + lane * 4;
  stmatrix_x4_trans(cvta_to_shared(rows + lane * 24), x[0], x[1], x[2], x[3]);
  __syncwarp();
  for (int c = 0; c < 24; ++c) at<uint16>(p.out)[lane * 24 + c] = rows[lane * 24 + c];
"""),
    # The halves of K as two groups with a sum each; the first is read while the second may run.
    "wgmma_groups": kernel("""
  extern __shared__ __align__(1024) uint32 image[];
  for (int i = threadIdx.x; i < p.bytes / 4; i += 128) image[i] = at<uint32>(p.y)[i];
  fence_proxy_async_shared();
  __syncthreads();
  const uint32 a_tile = cvta_to_shared(image), b_tile = a_tile + 64 * 128 * 2;
  float d0[8][4], d1[8][4];
  const uint64 a = wgmma_descriptor(a_tile, 0), b = wgmma_descriptor(b_tile, 0);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) wgmma_m64k16_ss<true, 64>(d0, a + 2 * s, b + 2 * s, s > 0);
  wgmma_commit_group();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    wgmma_m64k16_ss<true, 64>(d1, a + 512 + 2 * s, b + 512 + 2 * s, s > 0);
  }
  wgmma_commit_group();
  float* out = at<float>(p.out) + threadIdx.x * 32;
  wgmma_wait_group<1>();
#pragma unroll
  for (int i = 0; i < 32; ++i) out[i] = d0[i / 4][i % 4];
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < 32; ++i) out[128 * 32 + i] = d1[i / 4][i % 4];
""", "__launch_bounds__(128)"),
    # Every thread draws a ticket from x[0]; then all try to replace y by (thread + 1, ~thread), and
    # count themselves in y[2].
    "atomics": kernel("""
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  uint64* out = at<uint64>(p.out) + 4 * i;
  uint32* counter = at<uint32>(p.x);
  out[0] = i % 2 ? atom_add_u32(counter, 3) : atom_add_acq_rel_gpu_u32(counter, 3);
  uint64 seen[2] = {7, 9};
  const uint64 mine[2] = {uint64(i + 1), ~uint64(i)};
  atom_cas_b128(at<uint64>(p.y), seen, mine);
  out[1] = seen[0];
  out[2] = seen[1];
  uint64* count = at<uint64>(p.y) + 2;
  uint64 before = 3, old;
  while ((old = atom_cas_acq_rel_gpu_b64(count, before, before + 1)) != before) before = old;
  out[3] = i % 2 ? before : atom_add_acq_rel_gpu_u64(count, 1ull << 32);
"""),
    # 512 floats come, three times as many are written: as they are, added once, added twice.
    "bulk": kernel("""
  __shared__ __align__(128) float words[512];
  __shared__ uint64 place;
  const uint32 full = cvta_to_shared(&place);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < 512; i += 128) words[i] = -1.0f;
  fence_proxy_async_shared();
  __syncthreads();
  if (warp == 0 && elect_sync()) {
    mbarrier_arrive_expect_tx(full, 2048);
    cp_async_bulk_load(cvta_to_shared(words), at<float>(p.x), 2048, full);
  }
  __syncwarp();
  wait(p, full, 0);
  for (int i = threadIdx.x; i < 512; i += 128) words[i] *= 0.5f;
  fence_proxy_async_shared();
  __syncthreads();
  if (warp == 0 && elect_sync()) {
    float* out = at<float>(p.out);
    cp_async_bulk_store(out, cvta_to_shared(words), 2048, kEvictLast);
    for (int n = 1; n < 3; ++n) {
      cp_async_bulk_store(out + 512 * n, cvta_to_shared(words), 2048, kEvictNormal);
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group<0>();
      for (int i = 0; i < n; ++i) {
        cp_reduce_async_bulk_add_f32(out + 512 * n, cvta_to_shared(words), 1024, kEvictLast);
      }
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group<0>();
    }
  }
"""),
    # Each block adds to what the one before it has left, by the copy engine, when it is its turn.
    "turns": kernel("""
  __shared__ __align__(128) float words[32];
  words[lane] = at<float>(p.x)[blockIdx.x * 32 + lane];
  fence_proxy_async_shared();
  __syncwarp();
  uint32* turn = at<uint32>(p.y);
  if (elect_sync()) {
    if (blockIdx.x == 0) pause_one(100000);
    while (ld_acquire_gpu_u32(turn) != blockIdx.x) {
    }
    fence_proxy_async_global();
    if (blockIdx.x == 0) {
      cp_async_bulk_store(at<float>(p.out), cvta_to_shared(words), 128, kEvictNormal);
    } else {
      cp_reduce_async_bulk_add_f32(at<float>(p.out), cvta_to_shared(words), 128, kEvictFirst);
    }
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
    fence_proxy_async_global();
    red_release_gpu_add_u32(turn, 1);
  }
"""),
    "opaque": kernel("  at<uint32>(p.out)[threadIdx.x] = opaque(threadIdx.x * 3);"),
    **{f"wgmma_{n}": f"constexpr int N = {n};\n{WGMMA}" for n in WGMMA_N},
}  # fmt: skip


def build(name):
    source = INCLUDES + AT + PREAMBLE + SOURCES[name]
    return compile.compile_source(f"ptx-{name}", source.encode(), TARGET)


@pytest.mark.parametrize("name", some(SOURCES, lambda name: name.partition("_")[0]))
def test_compiles_without_a_gpu(name):
    log = build(name).log
    found = compile.resource_report(log)
    assert "warning" not in log
    assert (found.stack, found.spill_stores, found.spill_loads) == (0, 0, 0)
    assert not [note for note in found.notes if any(code in note for code in SLOW_NOTES)]
    if name == "setmaxnreg":
        assert found.registers * 384 <= 65536


def test_every_form_of_wgmma_has_the_same_widths():
    found = re.findall(r"^  FA_WGMMA\((\w+), (\d+),", HEADERS["wgmma.cuh"], re.MULTILINE)
    assert len(WGMMA_N) >= 8
    assert sorted(found) == sorted((form, str(n)) for form in ("SS", "RS") for n in WGMMA_N)


@pytest.fixture(scope="module")
def run(cupy):
    """Run a kernel on NumPy arrays x, y, z; the result has the shape and type of `out`.

    `tensor` is the parameter that the tensor map walks, and the other arguments of the map.
    """
    from fa_cupy.gpu.driver.launch import launch
    from fa_cupy.gpu.driver.tensor_map import encode_tiled

    def run(name, out, *inputs, entry="test", blocks=1, threads=128, shared=0, tensor=None, **more):
        if devices.current_target() != TARGET:
            pytest.skip("the device is none of SM90")
        function = compile.load_cubin(build(name).cubin, entry, cupy.cuda.Device().id)
        arrays = [cupy.asarray(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in inputs]
        result = cupy.full(np.prod(out[0], dtype=int) * np.dtype(out[1]).itemsize, 0xEE, np.uint8)
        failed = cupy.zeros(1, np.uint32)
        params = np.zeros(1, PARAMS)
        for field, array in zip(("x", "y", "z"), arrays, strict=False):
            params[field] = array.data.ptr
        params["out"] = result.data.ptr
        params["failed"] = failed.data.ptr
        for field, value in more.items():
            params[field] = value
        if tensor:
            params["map"] = encode_tiled(int(params[tensor[0]][0]), *tensor[1:])
        launch(function, blocks, threads, shared, params)
        assert int(failed[0]) == 0, "a barrier's phase ended too late or too early"
        return cupy.asnumpy(result).view(out[1]).reshape(out[0])

    return run


rng = np.random.default_rng(0)


def swizzled(matrix):
    """The bytes of a matrix in shared memory: (blocks of 128 bytes a row, rows, 128).

    The 16-byte chunk c of row r lies at c ^ (r % 8).
    """
    data = np.ascontiguousarray(matrix).view(np.uint8)
    rows = len(data)
    data = np.pad(data, ((0, 0), (0, -data.shape[1] % 128))).reshape(rows, -1, 8, 16)
    source = np.arange(8) ^ np.arange(rows)[:, None] % 8
    return (
        np.take_along_axis(data, source[:, None, :, None], 2).swapaxes(0, 1).reshape(-1, rows, 128)
    )


def overlap(shape, start, box):
    """What a box and an array have in common, as an index of the array and one of the box."""
    index = [], []
    for size, first, extent in zip(shape, start, box, strict=True):
        begin = max(first, 0)
        end = max(begin, min(first + extent, size))
        index[0].append(slice(begin, end))
        index[1].append(slice(begin - first, end - first))
    return tuple(index[0]), tuple(index[1])


def coordinates(starts):
    """As the instruction takes them: the contiguous axis first."""
    return np.ascontiguousarray(np.array(starts, np.int32)[:, ::-1])


@pytest.mark.gpu
def test_atomics(run):
    count = 4 * 128
    start, pair = np.array([5, 0], np.uint32), np.array([7, 9, 100], np.uint64)
    got = run("atomics", ((count, 4), np.uint64), start, pair, blocks=4)
    np.testing.assert_array_equal(np.sort(got[:, 0]), 5 + 3 * np.arange(count, dtype=np.uint64))
    # One saw what it expected and replaced it; the others saw what that one had put there.
    (winner,) = np.flatnonzero(got[:, 1] == 7)
    assert got[winner, 2] == 9
    others = np.delete(got[:, 1:3], winner, axis=0)
    wanted = np.array([winner + 1, ~np.uint64(winner)], np.uint64)
    np.testing.assert_array_equal(others, np.broadcast_to(wanted, others.shape))
    # By exchange all got a number of their own, and half of them another one by addition.
    assert len(set(got[1::2, 3] & 0xFFFFFFFF)) == count // 2
    added = np.arange(count // 2, dtype=np.uint64)
    np.testing.assert_array_equal(np.sort(got[::2, 3] >> 32), added)
    # A pair of which only half is as expected stays.
    pair[1] = 8
    got = run("atomics", ((count, 4), np.uint64), start, pair, blocks=4)
    np.testing.assert_array_equal(got[:, 1:3], np.broadcast_to(np.uint64([7, 8]), (count, 2)))


@pytest.mark.gpu
def test_mbarrier_phases(run):
    got = run("mbarrier_phases", ((21,), np.uint32), threads=1)
    # Before the first phase the one before it is over.
    np.testing.assert_array_equal(got, [1, *[0, 0, 0, 1, 0] * 4])


@pytest.mark.gpu
def test_mbarrier_between_warps(run):
    x = rng.integers(0, 2**32, (8, 1, 32), dtype=np.uint32)
    got = run("mbarrier_threads", ((8, 3, 32), np.uint32), x)
    np.testing.assert_array_equal(got, np.broadcast_to(x, got.shape))


# Stored as (batch, length, heads, dim), walked as (batch, heads, 1, length, dim).  Where to walk is
# up to the coordinates, so an axis of one may have any stride.
def heads_first(stored):
    x = stored.transpose(0, 2, 1, 3)
    return x[:, :, None], (*x.strides[:2], x.strides[1], *x.strides[2:])


@pytest.mark.gpu
@pytest.mark.parametrize("box", [(1, 1, 1, 16, 64), (1, 2, 1, 5, 64), (2, 1, 1, 24, 64)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tma_load(run, dtype, box):
    bits = np.uint32 if dtype == "float32" else np.uint16
    box = (*box[:-1], 128 // bits().itemsize)
    stored = rng.integers(1, np.iinfo(bits).max, (3, 21, 2, 72), dtype=bits)
    x, strides = heads_first(stored)
    starts = [
        (0, 0, 0, 0, 0),
        (2, 1, 0, 5, 8),
        (1, 0, 0, 13, 48),  # beyond the last row and the last column
        (2, 1, 0, -3, -16),  # before the first
        (0, 1, 0, 40, 0),  # nothing of it inside
        (0, 0, 1, 0, 0),  # beyond an axis of one
        (0, 0, -1, 0, 0),
        (-1, 1, 0, 20, 32),
    ]
    size = np.prod(box) * x.itemsize
    got = run(
        "tma_load",
        ((len(starts), 8192), np.uint8),
        stored,
        coordinates(starts),
        tensor=("x", dtype, x.shape, strides, box),
        count=len(starts),
        bytes=size,
    )
    for start, tile in zip(starts, got, strict=True):
        in_array, in_box = overlap(x.shape, start, box)
        wanted = np.zeros(box, bits)
        wanted[in_box] = x[in_array]
        wanted = swizzled(wanted.reshape(-1, box[-1])).reshape(-1)
        np.testing.assert_array_equal(tile[:size], wanted, err_msg=str(start))
    assert (got[:, size:] == 0xEE).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 2048, 8128])
def test_bulk_load(run, size):
    x = rng.integers(0, 256, 16384, dtype=np.uint8)
    starts = np.array([0, 16, 4096, 16384 - size], np.int32)
    got = run("bulk_load", ((4, 8192), np.uint8), x, starts, count=4, bytes=size)
    for n, (start, piece) in enumerate(zip(starts, got, strict=True)):
        wanted = np.full(8192, 0xEE, np.uint8)
        wanted[16 * n : 16 * n + size] = x[start : start + size]
        np.testing.assert_array_equal(piece, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("box", [(1, 1, 1, 16, 64), (1, 2, 1, 8, 64)])
def test_tma_store(run, box):
    # Apart from each other, so that their order does not matter.
    starts = [
        (0, 0, 0, 2, 0),
        (1, 0, 0, 16, 8),  # beyond the last row
        (1, 0, 0, 0, 40),  # beyond the last column
        (2, 0, 0, 3, 0),
        (2, 1, 0, 19, 0),  # the last head
        (2, 0, 0, 30, 0),  # nothing of it inside
        (3, 0, 0, 0, 0),
    ]
    tiles = rng.integers(0, 2**16, (len(starts), *box), dtype=np.uint16)
    images = np.stack([swizzled(tile.reshape(-1, 64)) for tile in tiles])
    # The array is a part of what is poisoned: there is one more row, and 8 more columns.
    wanted = np.full((3, 22, 2, 80), 0xEEEE, np.uint16)
    x, strides = heads_first(wanted)
    x = x[..., :21, :72]
    for start, tile in zip(starts, tiles, strict=True):
        in_array, in_box = overlap(x.shape, start, box)
        x[in_array] = tile[in_box]
    got = run(
        "tma_store",
        (wanted.shape, np.uint16),
        images,
        coordinates(starts),
        tensor=("out", "bfloat16", x.shape, strides, box),
        count=len(starts),
        bytes=tiles[0].nbytes,
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
def test_a_waited_for_store_can_be_read(run):
    x = np.full((32, 64), 0xEEEE, np.uint16)
    y = rng.integers(0, 2**16, x.shape, dtype=np.uint16)
    tensor = ("x", "float16", (1, 1, 1, *x.shape), (4096, 4096, 4096, 128, 2), (1, 1, 1, 16, 64))
    got = run("tma_store_wait", (x.shape, x.dtype), x, swizzled(y), tensor=tensor)
    np.testing.assert_array_equal(got, y)


@pytest.mark.gpu
def test_bulk_copies(run):
    x = rng.standard_normal(512).astype(np.float32)
    got = run("bulk", ((3, 512), np.float32), x)
    half = x / 2
    wanted = np.stack([half, half, half])
    for n in (1, 2):
        for _ in range(n):
            wanted[n, :256] += half[:256]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
def test_blocks_add_in_turn(run):
    blocks = 40
    x = np.ldexp(rng.standard_normal((blocks, 32)), rng.integers(-20, 20, (blocks, 1)))
    x = x.astype(np.float32)
    got = run("turns", ((32,), np.float32), x, np.zeros(1, np.uint32), threads=32, blocks=blocks)
    wanted = x[0]
    for more in x[1:]:
        wanted = wanted + more  # in this order: float32 sums of another one are others
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
def test_opaque(run):
    got = run("opaque", ((128,), np.uint32))
    np.testing.assert_array_equal(got, 3 * np.arange(128))


@pytest.mark.gpu
def test_tma_multicast(run):
    x = rng.integers(0, 2**16, (48, 64), dtype=np.uint16)
    tensor = ("x", "float16", (1, 1, 1, *x.shape), (6144, 6144, 6144, 128, 2), (1, 1, 1, 16, 64))
    got = run("tma_multicast", ((2, 3, 2048), np.uint8), x, blocks=2, tensor=tensor)
    wanted = np.broadcast_to(swizzled(x).reshape(3, 2048), got.shape).copy()
    wanted[0, 2] = 0xEE
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
def test_cluster(run):
    empty = np.full(128, 0xEEEEEEEE, np.uint32)
    got = run("cluster", ((4, 32, 4), np.uint32), empty, empty, empty, blocks=4, threads=32)
    block, lane = np.ogrid[:4, :32]
    np.testing.assert_array_equal(got[..., 0], np.broadcast_to(block % 2, (4, 32)))
    np.testing.assert_array_equal(got[..., 1], 0)
    np.testing.assert_array_equal(got[..., 2], 1000 * (block ^ 1) + lane)
    np.testing.assert_array_equal(got[..., 3], 1)


@pytest.mark.gpu
def test_setmaxnreg_gives_registers(run):
    x = rng.integers(0, 2**32, (200, 384), dtype=np.uint32)
    wanted = x ^ x.sum(0, dtype=np.uint32)
    wanted[:, :128] = 0xEEEEEEEE
    wanted[0, :128] = x[0, :128] + np.uint32(1)
    got = run("setmaxnreg", (x.shape, x.dtype), x, blocks=1, threads=384)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
def test_named_barriers(run):
    x = rng.integers(0, 2**32, (8, 1, 32), dtype=np.uint32)
    got = run("named_barriers", ((8, 2, 32), np.uint32), x, threads=96)
    np.testing.assert_array_equal(got, np.broadcast_to(x, got.shape))


@pytest.mark.gpu
def test_elect_sync_chooses_one_lane(run):
    got = run("elect_sync", ((4, 32), np.uint32))
    assert set(got.flat) == {0, 1}
    np.testing.assert_array_equal(got.sum(1), 1)


@pytest.mark.gpu
def test_mma_of_float64_by_one_instruction(run):
    mma_of_float64(functools.partial(run, threads=32), "mma_m16n8k16_f64", 16, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["stmatrix", "stmatrix_trans"])
def test_stmatrix(run, name):
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    # Lane l, register m: row l / 4, columns 2 * (l % 4) and + 1 of matrix m.
    x = matrices.reshape(4, 32, 2).swapaxes(0, 1)
    got = run(name, ((32, 24), np.uint16), x, threads=32)
    stored = matrices if name == "stmatrix" else matrices.swapaxes(1, 2)
    np.testing.assert_array_equal(got[:, :8], stored.reshape(32, 8))
    np.testing.assert_array_equal(got[:, 8:], 0xEEEE)


def accumulator(matrix):
    """Deal a matrix (64, N) to 128 threads: (thread, N / 8, 2 * i + j)."""
    thread, v, i, j = np.ogrid[:128, : matrix.shape[1] // 8, :2, :2]
    lane = thread % 32
    dealt = matrix[thread // 32 * 16 + lane // 4 + 8 * i, 8 * v + 2 * (lane % 4) + j]
    return dealt.reshape(128, -1, 4)


def fragments(matrix):
    """Deal A (64, K) to 128 threads: (thread, K / 16, register, low or high half)."""
    thread, step, column, row, half = np.ogrid[:128, : matrix.shape[1] // 16, :2, :2, :2]
    lane = thread % 32
    rows = thread // 32 * 16 + lane // 4 + 8 * row
    return matrix[rows, 16 * step + 8 * column + 2 * (lane % 4) + half].reshape(128, -1, 4, 2)


@pytest.fixture
def multiply(run):
    """A (64, 128) times B (128, N), plus D unless it is None; as the threads hold it."""

    def multiply(form, dtype, a, b, d):
        a, b = a.astype(dtype), b.astype(dtype)
        as_it_is = form in ("rs", "rs_strided", "ss_both_columns")
        tiles = [swizzled(x) for x in (a.T if "columns" in form else a, b if as_it_is else b.T)]
        if "strided" in form:
            tiles = [x.reshape(len(x), -1, 1024).swapaxes(0, 1) for x in tiles]
        image = np.concatenate([x.reshape(-1) for x in tiles])
        before = np.full((64, b.shape[1]), np.nan) if d is None else d
        return run(
            f"wgmma_{b.shape[1]}",
            ((128, b.shape[1] // 8, 4), np.float32),
            fragments(a),
            image,
            accumulator(before).astype(np.float32),
            entry=f"{form}_{np.dtype(dtype).name}",
            shared=image.size,
            bytes=image.size,
            first=d is not None,
        )

    return multiply


FORMS = [
    "ss", "ss_columns", "ss_both_columns", "ss_strided", "rs", "rs_transposed", "rs_strided",
]  # fmt: skip
BY_FORM = pytest.mark.parametrize("form", FORMS)
BY_TYPE = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])


@pytest.mark.gpu
@BY_FORM
@BY_TYPE
@pytest.mark.parametrize("n", WGMMA_N)
def test_wgmma(multiply, form, dtype, n):
    # Integers: every sum is exact, so a misplaced element cannot hide behind a tolerance.
    a, b = rng.integers(-8, 9, (64, 128)), rng.integers(-8, 9, (128, n))
    d = rng.integers(-1000, 1000, (64, n))
    got = multiply(form, dtype, a, b, d)
    np.testing.assert_array_equal(got, accumulator(a @ b + d))
    # Without `add` nothing of D is left, not even NaN.
    np.testing.assert_array_equal(multiply(form, dtype, a, b, None), accumulator(a @ b))


@pytest.mark.gpu
@BY_FORM
@BY_TYPE
@pytest.mark.parametrize("n", WGMMA_N)
def test_wgmma_accumulator_map(multiply, form, dtype, n):
    # The product tells where it is: 256 * row + column, in every step of K in turn.
    row, column = np.arange(64), np.arange(n)
    for step in range(0, 8, 3):
        a, b = np.zeros((64, 128), int), np.zeros((128, n), int)
        a[:, 16 * step + 1], a[:, 16 * step + 14] = row, 1
        b[16 * step + 1], b[16 * step + 14] = 256, column
        got = multiply(form, dtype, a, b, None).astype(int)
        thread, v, r = np.ogrid[:128, : n // 8, :4]
        warp, lane, i, j = thread // 32, thread % 32, r // 2, r % 2
        rows, columns = 16 * warp + lane // 4 + 8 * i + 0 * v, 8 * v + 2 * (lane % 4) + j
        np.testing.assert_array_equal(got // 256, np.broadcast_to(rows, got.shape))
        np.testing.assert_array_equal(got % 256, np.broadcast_to(columns, got.shape))


@pytest.mark.gpu
def test_wgmma_groups(run):
    a, b = rng.integers(-8, 9, (64, 128)), rng.integers(-8, 9, (128, 64))
    operands = [x.astype(ml_dtypes.bfloat16) for x in (a, b.T)]
    image = np.concatenate([swizzled(x).reshape(-1) for x in operands])
    more = {"shared": image.size, "bytes": image.size}
    got = run("wgmma_groups", ((2, 128, 8, 4), np.float32), image, image, **more)
    for half, columns in zip(got, (slice(64), slice(64, 128)), strict=True):
        np.testing.assert_array_equal(half, accumulator(a[:, columns] @ b[columns]))
