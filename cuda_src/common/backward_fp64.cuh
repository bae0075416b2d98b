// What the two kernels of attention backward in float64 share.
//
// A block owns rows of one side of the pairs, queries or keys, and walks over tiles of the other
// side.  Of each side there are two arrays: 0 is Q or K, 1 is dO or V.  So S, or its transpose, is
// the product of the arrays 0, and dP is that of the arrays 1.  Two warps share 16 rows: the one of
// role 0 computes S and weights P = factor * exp(S - shift), the one of role 1 dP - delta.  They
// exchange these through shared memory, where each lane has places of its own, for both hold the
// same pairs in the same registers.  Sums of 16 rows of two gradients with 128 columns would not
// fit into the registers of one warp.
//
// bwd_dq_fp64 finds what is known of each query, and writes it for bwd_dkdv_fp64.
#pragma once
#include "cuda_src/common/backward_rows.cuh"
#include "cuda_src/common/mma_fp64.cuh"
#include "ptx/warpgroup.cuh"

// --------------------------------------------------------------------------------------- constants
constexpr int kColumnWarps = FA_COLUMN_WARPS;  // pairs of warps that share rows
constexpr bool kWideMma = FA_WIDE_MMA;         // m16n8k16, which SM90 has
constexpr int kHandOver = FA_HAND_OVER;        // how many warps of a pair hand over what they have
constexpr int kPairs = kWarps / 2;             // of warps
constexpr int kMmaN = kOtherRows / 8;
// Columns of the sums of a warp: of dK or dV, one of a pair's warps has all; of dQ each has half.
constexpr int kSumCols = kDim / (kOwnKeys ? kColumnWarps : 2 * kColumnWarps), kMmaV = kSumCols / 8;
static_assert(kOwnRows * kColumnWarps == 16 * kPairs, "a pair of warps has 16 rows");
static_assert(kSumCols % 16 == 0 && kOtherRows % 16 == 0, "products take 16 of each");
static_assert(2 * kTileM <= kThreads || !kOwnKeys, "a thread loads half of a QueryRow");
static_assert(kPairs <= 15, "each pair has a barrier; 0 is that of __syncthreads");

using Tile = Fp64Tile<kOwnRows, kDim, kExchangeOfBoth>;  // and of kOtherRows
using Products = double[1][kMmaN][4];
using Sums = double[1][kMmaV][4];

// -------------------------------------------------------------------------------------- parameters
using Fp64Array = StridedArray<double>;

// What is known of a query: a weight is factor * exp(score - shift).
struct alignas(16) QueryRow {
  double shift, factor, delta, unused;
};

// backward_fp64.py holds the same fields in the same order.  Rows are (*batch, entry_rows).
using BwdFp64Params = BwdRowsParams<double, QueryRow>;
static_assert(sizeof(BwdFp64Params) == FA_BWD_FP64_BYTES, "backward_fp64.py holds the same struct");

FA_DEVICE const Fp64Array& own_array(const BwdFp64Params& params, int i) {
  if constexpr (kOwnKeys) return i == 0 ? params.k : params.v;
  return i == 0 ? params.q : params.dout;
}
FA_DEVICE const Fp64Array& other_array(const BwdFp64Params& params, int i) {
  if constexpr (kOwnKeys) return i == 0 ? params.q : params.dout;
  return i == 0 ? params.k : params.v;
}

// -------------------------------------------------------------------------------------------- work
struct SharedStorage {
  double own[2][kOwnRows * kDim];
  double other[kStages][2][kOtherRows * kDim];
  // What the warps of a pair hand to each other: of dQ both of them have to.
  double2 exchanged[kHandOver][kPairs][2 * kMmaN][32];
  QueryRow rows[kOwnKeys ? kStages : 1][kTileM];
  WorkTile work;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "backward_fp64.py asks for as much");

// The warps of a pair are kPairs apart, so that they share one of the four tensor cores where there
// are eight warps: one computes exponentials while the other one multiplies.
FA_DEVICE int warp_role() { return tid_x_again() / 32 / kPairs; }
FA_DEVICE int warp_pair() { return tid_x_again() / 32 % kPairs; }
// Where this warp's rows begin in the block, and its columns of the sums.
FA_DEVICE int warp_row() { return warp_pair() / kColumnWarps * 16; }
FA_DEVICE int warp_col() {
  const int part = warp_pair() % kColumnWarps;
  return (kOwnKeys ? part : 2 * part + warp_role()) * kSumCols;
}

// Copies are started by cp.async; the caller commits their group.
FA_DEVICE void load_own(const BwdFp64Params& params, SharedStorage& shared) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Fp64Array& array = own_array(params, i);
    load_tile_fp64<Tile, kOwnRows, kThreads>(
        cvta_to_shared(shared.own[i]), row_start(params, array, work.entry, 0), array.row,
        work.first_own, kOwnKeys ? band_of(p, work).k_len : p.q_len, i == 0 ? p.head_dim : p.v_dim,
        params.aligned);
  }
}

FA_DEVICE void load_other(const BwdFp64Params& params, SharedStorage& shared, const OtherTile& at,
                          int stage) {
  const AttentionParams& p = params.common;
  const WorkTile& work = shared.work;
  const uint32 entry = work.entry + at.head;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Fp64Array& array = other_array(params, i);
    load_tile_fp64<Tile, kOtherRows, kThreads>(
        cvta_to_shared(shared.other[stage][i]), row_start(params, array, entry, 0), array.row,
        at.tile * kOtherRows, kOwnKeys ? p.q_len : band_of(p, work).k_len,
        i == 0 ? p.head_dim : p.v_dim, params.aligned);
  }
  if constexpr (kOwnKeys) {
    const int tid = tid_x_again();
    if (tid < 2 * kTileM) {
      const QueryRow* from =
          params.rows + static_cast<int64>(entry) * params.entry_rows + at.tile * kTileM;
      cp_async_cg_16(cvta_to_shared(shared.rows[stage]) + 16 * tid,
                     reinterpret_cast<const double*>(from) + 2 * tid, 16);
    }
  }
}

// ----------------------------------------------------------------------------------------- weights
// Calls use(j, e, found) with the score and the slope of each product that a thread holds; the
// score is -inf where the band or a mask hides a pair.  Of a pair that does not exist, that of
// another one.
template <typename Use>
FA_DEVICE void for_each_product(const BwdFp64Params& params, const WorkTile& work,
                                const Products& x, const OtherTile& at, const Use& use) {
  const AttentionParams& p = params.common;
  const BatchOffsets offsets = operand_offsets(params, work.entry + at.head);
  const int lane = tid_x_again() % 32;
  const int own = work.first_own + warp_row() + lane / 4;
  const int other = at.tile * kOtherRows + lane % 4 * 2;
  uint32 visible_bits[1][2] = {{~0u, ~0u}};
  if constexpr (kSparse) {
    const int words_index = block_words_index(
        params.mask, mask_row(params, work.entry + at.head, work.first_own), other / kMaskBlock);
    if (words_index >= 0) {
      visible_bits_of_words(partial_block_words(params.mask, words_index), visible_bits, own,
                            other);
    }
  }
  if (at.tile < work.full_begin || at.tile >= work.full_end) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      visible_bits[0][h] &= kOwnKeys
                                ? visible_queries(band_of(p, work), own + 8 * h, other, 2 * kMmaN)
                                : visible_columns(band_of(p, work), own + 8 * h, other, 2 * kMmaN);
    }
  }
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int own_row = own + e / 2 * 8, other_row = other + 8 * j + e % 2;
      const int query = min(kOwnKeys ? other_row : own_row, p.q_len - 1);
      const int key = min(kOwnKeys ? own_row : other_row, p.k_len - 1);
      auto found = score_and_slope_fp64(params, offsets, x[0][j][e], query, key);
      if ((visible_bits[0][e / 2] >> (2 * j + e % 2) & 1) == 0) found.score = -FA_INFINITY;
      use(j, e, found);
    }
  }
}

// What is known of the query of register e of x[0][j], given that of the warp's first query.
FA_DEVICE const QueryRow& query_row(const QueryRow* rows, int j, int e) {
  const int lane = tid_x_again() % 32;
  return rows[kOwnKeys ? lane % 4 * 2 + 8 * j + e % 2 : lane / 4 + e / 2 * 8];
}

// S becomes P, and `weights` that times the slopes: what dP - delta is multiplied by.
FA_DEVICE void compute_weights(const BwdFp64Params& params, const WorkTile& work,
                               const QueryRow* rows, const OtherTile& at, Products& x,
                               Products& weights) {
  for_each_product(params, work, x, at, [&](int j, int e, const ScoreAndSlope<double>& found) {
    x[0][j][e] = weight_fp64(query_row(rows, j, e), found.score);
    weights[0][j][e] = times_slope(x[0][j][e], found.slope);
  });
}

// dP becomes dP - delta.
FA_DEVICE void subtract_delta(const QueryRow* rows, Products& x) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[0][j][e] -= query_row(rows, j, e).delta;
  }
}

using Exchanged = double2[2 * kMmaN][32];

FA_DEVICE void hand_over(Exchanged& to, const Products& x) {
#pragma unroll
  for (int i = 0; i < 2 * kMmaN; ++i) {
    const double (&four)[4] = x[0][i / 2];
    to[i][tid_x_again() % 32] = make_double2(four[i % 2 * 2], four[i % 2 * 2 + 1]);
  }
}

FA_DEVICE void multiply_by(Products& x, const Exchanged& from) {
#pragma unroll
  for (int i = 0; i < 2 * kMmaN; ++i) {
    const double2 two = from[i][tid_x_again() % 32];
    x[0][i / 2][i % 2 * 2] *= two.x;
    x[0][i / 2][i % 2 * 2 + 1] *= two.y;
  }
}

// ---------------------------------------------------------------------------------------- products
FA_DEVICE void clear(Sums& sums) {
#pragma unroll
  for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
    for (double& sum : sums[0][j]) sum = 0.0;
  }
}

// S or dP, or its transpose: of arrays 0 in warps of role 0, of arrays 1 in those of role 1.
FA_DEVICE void multiply_arrays(const SharedStorage& shared, int stage, Products& x) {
  const int i = warp_role();
  multiply_rows_fp64<kWideMma, Tile, Tile, kDim>(
      x, cvta_to_shared(shared.own[i]) + Tile::lane_of_rows(warp_row()),
      cvta_to_shared(shared.other[stage][i]) + Tile::lane_of_rows(0));
}

// sums += x times a tile of the other side's array i.
FA_DEVICE void add_to_sums(const SharedStorage& shared, int stage, int i, const Products& x,
                           Sums& sums) {
  add_product_fp64<kWideMma, Tile>(
      sums, x, cvta_to_shared(shared.other[stage][i]) + Tile::lane_of_columns(warp_col()));
}

// ---------------------------------------------------------------------------------------- epilogue
// Writes this warp's columns of a row that a thread shares with three others; returns whether a
// number of its own is not finite.
FA_DEVICE bool write_row_part(double* to, int cols, bool aligned, const Sums& sums, int h,
                              double scale, bool exists) {
  double probe = 0.0;  // NaN as soon as a number is NaN or infinite
#pragma unroll
  for (int pair = 0; pair < kMmaV / 2; ++pair) {
    const int col = warp_col() + 16 * pair + tid_x_again() % 4 * 4;
    const double (&even)[4] = sums[0][2 * pair], (&odd)[4] = sums[0][2 * pair + 1];
    const double four[4] = {even[2 * h] * scale, odd[2 * h] * scale, even[2 * h + 1] * scale,
                            odd[2 * h + 1] * scale};
#pragma unroll
    for (int e = 0; e < 4; ++e) probe = fma(four[e], 0.0, probe);
    if (!exists) continue;
    if (aligned && col + 4 <= cols) {
      *reinterpret_cast<double2*>(to + col) = make_double2(four[0], four[1]);
      *reinterpret_cast<double2*>(to + col + 2) = make_double2(four[2], four[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (col + e < cols) to[col + e] = four[e];
      }
    }
  }
  return probe != probe;
}

// Writes this warp's part of a gradient, and calls recompute(row) as a whole warp for each row that
// is not finite: a hidden pair has weight 0, but 0 * NaN is NaN inside a product.
template <typename Recompute>
FA_DEVICE void write_sums(const BwdFp64Params& params, const WorkTile& work, const Fp64Array& array,
                          int rows, int cols, const Sums& sums, double scale,
                          const Recompute& recompute) {
  uint32 recompute_lanes[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = work.first_own + warp_row() + tid_x_again() % 32 / 4 + 8 * h;
    double* to = row_start(params, array, work.entry, row);
    const bool nonfinite = write_row_part(to, cols, params.aligned, sums, h, scale, row < rows);
    recompute_lanes[h] = __ballot_sync(kFullWarp, nonfinite && row < rows);
  }
  if ((recompute_lanes[0] | recompute_lanes[1]) == 0) return;
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const uint32 lanes = r < 8 ? recompute_lanes[0] : recompute_lanes[1];
    if ((lanes >> r % 8 * 4 & 15) != 0) recompute(work.first_own + warp_row() + r);
  }
}
