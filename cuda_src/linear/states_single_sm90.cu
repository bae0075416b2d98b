// What each segment of a sequence adds to the state of a causal product of float32, for SM90: K^T V
// of its rows.
//
// As states_sm90.cu, with operands as in chunked_single_sm90.cu: kSplitters warpgroups take turns
// at turning the rows of a chunk into pairs of float16, where TMA has put them; kGroups warpgroups
// sum.
#include "cuda_src/common/single_sm90.cuh"

constexpr int kSplitters = FA_SPLITTERS;  // warpgroups that take turns at splitting chunks
constexpr int kThreads = 128 * (kSplitters + kGroups);
constexpr int kAtOnce = kDim > 64 || kCols > 64 ? 2 : 4;  // rows of a split thread in registers
constexpr int kLag = 2;  // a place is filled again so many chunks after it was split
static_assert(kStages > kLag && kLag >= kSplitters, "chunks to split are on the way");

struct SharedStorage {
  uint8 k[kStages][2 * kLowQK];  // as they come, then high parts, low parts
  uint8 v[kStages][2 * kLowV];
  int kv_exponent[kStages][kChunk];  // row j of K times row j of V is 2^e of what their tiles say
  uint64 raw_full[kStages], full[kStages], empty[kStages];
  Work work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

using Place = RingPlace<kStages>;

FA_DEVICE void load(const ProductSm90Params& params, SharedStorage& shared, int chunk) {
  const Work& work = shared.work;
  const ProductJob& job = params.job[work.job];
  const int row = first_row(params, work, chunk), at = chunk % kStages;
  uint64& full = shared.raw_full[at];
  // Arrivals: one for each array.
  load_boxes<kDimBoxes>(shared.k[at], job.k_map, job.k_step, work, full, kEvictLast, 0, row);
  load_boxes<kColBoxes>(shared.v[at], job.v_map, job.v_step, work, full, kEvictLast, work.column,
                        row);
}

FA_DEVICE void split_chunks(const ProductSm90Params& params, SharedStorage& shared, int splitter) {
  const int chunks = shared.work.chunks;
  const int thread = threadIdx.x % 128, row = split_row<QKTile>(thread);
  constexpr int kAhead = kStages - kLag;
  if (thread == 0) {
#pragma unroll 1
    for (int i = splitter; i < min(kAhead, chunks); i += kSplitters) load(params, shared, i);
  }
  __syncwarp();
#pragma unroll 1
  for (int i = splitter; i < chunks; i += kSplitters) {
    const Place place{static_cast<uint32>(i)};
    const int at = place.index(), next = i + kAhead;
    if (thread == 0 && next < chunks) {
      const Place later{static_cast<uint32>(next)};
      wait(shared.empty[later.index()], later.parity() ^ 1);
      load(params, shared, next);
    }
    __syncwarp();
    int of_k[kSteps], of_v[kSteps];
    wait(shared.raw_full[at], place.parity());
    split_rows<kChunk, kDimBoxes, kAtOnce, true>(of_k, shared.k[at], shared.k[at]);
    split_rows<kChunk, kColBoxes, kAtOnce, true>(of_v, shared.v[at], shared.v[at]);
#pragma unroll
    for (int g = 0; g < kSteps; ++g) {
      if (thread % 8 == 0) shared.kv_exponent[at][row + 16 * g] = -of_k[g] - of_v[g];
    }
    fence_proxy_async_shared();
    release_own(shared.full[at]);
  }
}

FA_DEVICE void sum(const ProductSm90Params& params, SharedStorage& shared, int group) {
  const int warp = threadIdx.x / 32 % 4, chunks = shared.work.chunks;
  State s;
  load_state(s, nullptr, 0, 0, 0, 0);
  Place place;
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    const int at = place.index();
    Operand<kSteps> values, values_low;
    Outputs u;
    wait(shared.full[at], place.parity());
    load_values(values, values_low, shared.v[at], 4 * group + warp);
    const int most = to_one_exponent(values, values_low, shared.kv_exponent[at]);
    const float factor = power_of_two(most / 2), rest = power_of_two(most - most / 2);
#pragma unroll
    for (int block = 0; block < kDimBlocks; ++block) {
      start_product<kMnMajor, kSteps>(u, values, values_low, shared.k[at] + block * kBlockBytes,
                                      kLowQK, [](int step) { return step * 16 * 128; });
      wgmma_wait_group<0>();
      if (block == kDimBlocks - 1) release_own(shared.empty[at]);
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        float& x = s[8 * block + e / 4][e % 4];
        x = fmaf(u[e / 4][e % 4] * factor, rest, x);
      }
    }
    place.advance();
  }
  store_sum(s, params, shared.work, group);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    linear_states_single_sm90(const __grid_constant__ ProductSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init(shared.raw_full[i], 2);
      init(shared.full[i], kWarpArrivals * 4);
      init(shared.empty[i], kWarpArrivals * 4 * kGroups);
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 32) {
    shared.work = find_work(params, params.segments - 1);
  }
  __syncthreads();
  if (shared.work.chunks == 0) return;

  const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
  if (warpgroup < kSplitters) {
    split_chunks(params, shared, warpgroup);
  } else {
    sum(params, shared, warpgroup - kSplitters);
  }
}
