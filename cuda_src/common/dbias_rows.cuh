// The gradient of a bias in float32 and float64: what its two kernels share.
//
// One block owns a tile of kTileM queries and kTileN keys of the gradient, and walks over all that
// shares its elements, as bwd_dbias_sm80 does.  The gradients of queries come first, whose kernel
// leaves what is known of each query.
//
// Where there are fewer tiles than multiprocessors, blocks split what shares a tile, and put their
// sums into the workspace.  The kernel is then launched once more, with a block for each tile, to
// add them up in their order.  So all sums have one order, and results are the same bits each time.
#pragma once
#include "cuda_src/common/dbias_tiles.cuh"

static_assert(kDbiasAxes == kAxes, "both are axes of the batch");
static_assert(kHasBias && !kOwnKeys, "the gradient is that of a bias; blocks own queries, too");

// `Base` is that of the other gradients.  dbias/dbias_rows.py holds the same fields in the same
// order.
template <typename Base, typename Real>
struct DbiasRowsParams : Base {
  void* dbias;                                     // of the type of the bias
  Real* partial_sums;                              // (tiles, splits, numbers of a thread, threads)
  int64 dbias_row, dbias_col, dbias_batch[kAxes];  // strides; 0 along an axis that is summed over
  int sums_queries, sums_keys;                     // whether one element is of all of them
  int splits;                                      // blocks of this launch that share a tile
  int joined;  // splits whose sums are added up here, 0 where sums are to be made
};

// What a block knows of its work besides what the other gradients do.
struct alignas(16) DbiasWork {
  DbiasTile own;
  PairStep step;
  uint32 loaded_entry;  // of the queries in shared memory
  int loaded_tile;
};

// Finds the next step by one thread, and tells all what it is; false at the end.  Nobody reads the
// tiles any more then.
template <typename Params>
FA_DEVICE bool next_step(const Params& params, DbiasWork& shared, WorkTile& work) {
  __syncthreads();
  PairStep& step = shared.step;
  if (threadIdx.x == 0) {
    shared.loaded_entry = step.entry;
    shared.loaded_tile = step.query_tile;
    find_step<kTileM, kTileN, kSparse>(params, shared.own, step.index + 1, step);
    work.entry = step.entry;
    work.first_own = step.query_tile * kTileM;
    work.full_begin = step.key_tile;
    work.full_end = step.in_band ? step.key_tile + 1 : step.key_tile;
  }
  __syncthreads();
  return step.index < shared.own.end;
}

// Finds the block's tile, by one thread; next_step() finds its first step.
template <typename Params>
FA_DEVICE void begin_steps(const Params& params, DbiasWork& shared) {
  find_own_tile<kTileM, kTileN>(params, shared.own);
  shared.step = {shared.own.begin - 1, 0, -1, -1, false, kFullBlock};
}

// Whether the queries of a step lie in shared memory already.
FA_DEVICE bool queries_are_there(const DbiasWork& shared) {
  return shared.step.entry == shared.loaded_entry && shared.step.query_tile == shared.loaded_tile;
}

// Where the sums of a split of the block's tile are, for this thread of kTeam.
template <int kTeam, int kCount, typename Params>
FA_DEVICE auto partial_sums(const Params& params, const DbiasTile& own, int splits, int split) {
  const int64 block = static_cast<int64>(own.output) * splits + split;
  return params.partial_sums + block * (kCount * kTeam) + tid_x_again() % kTeam;
}

// Writes what a thread has found: for others that share the tile, or else as write(x) does.  In the
// launch that joins them, it reads what they have written.
template <int kTeam, typename Params, typename Real, int kCount, typename Write>
FA_DEVICE void join_and_write(const Params& params, const DbiasTile& own, Real (&x)[kCount],
                              const Write& write) {
  if (params.splits > 1) {
    Real* to = partial_sums<kTeam, kCount>(params, own, params.splits, own.split);
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i * kTeam] = x[i];
    return;
  }
#pragma unroll 1
  for (int split = 0; split < params.joined; ++split) {
    const Real* from = partial_sums<kTeam, kCount>(params, own, params.joined, split);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += from[i * kTeam];
  }
  write(x);
}

// Writes the tile, from the sums that warps hold.  `sums` is free shared memory.
template <typename Warps, typename Params, typename Real, int kMmaM, int kMmaN>
FA_DEVICE void write_tile(const Params& params, const DbiasTile& own, Real* sums,
                          Real (&x)[kMmaM][kMmaN][4]) {
  if (params.sums_queries || params.sums_keys) {
    Real sum[1] = {0};
    if (params.joined == 0) sum[0] = sum_of_tile<Warps>(params, sums, x);
    join_and_write<kThreads>(params, own, sum, [&](const Real(&found)[1]) {
      store_sum<kTileM, kTileN>(params, own, found[0]);
    });
    return;
  }
  if (!Warps::have_sums()) return;
  auto& all = reinterpret_cast<Real(&)[kMmaM * kMmaN * 4]>(x);
  static_assert(Warps::kRows * Warps::kCols % (kMmaM * kMmaN * 4) == 0, "threads have as much");
  constexpr int kTeam = Warps::kRows * Warps::kCols / (kMmaM * kMmaN * 4);  // that have sums
  join_and_write<kTeam>(params, own, all, [&](const Real(&)[kMmaM* kMmaN* 4]) {
    const int lane = tid_x_again() % 32;
    store_pairs(params, dbias_offset(params, entry_of(params, own.entry, 0)),
                own.query_tile * kTileM + Warps::row() + lane / 4,
                own.key_tile * kTileN + Warps::col() + lane % 4 * 2, x);
  });
}
