// The products of attention backward in float32 by wgmma, for SM90: tiles of pairs that one bulk
// copy brings.
//
// The first warpgroups are consumers, each of which computes all products of 64 of the block's rows
// with a tile of the other side, or half of them (backward_fp32_shared_rows.cuh).  One thread of
// the last warpgroup copies tiles.
//
// A score is a sum of products with a low part, which is 2^11 times too large, and then of those of
// high parts: one accumulator, which is multiplied by 2^-11 in between.  P and dS are split without
// that factor (split_rows.cuh), so that one accumulator takes all of their products with the rows
// of the other side: where these are low parts, high parts of P and dS are 2^-11 times as large.
// Where these rows differ much in size, products of P and dS are as those of scores are.
#pragma once
#include "cuda_src/common/backward_fp32.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/split_rows.cuh"
#include "ptx/bulk.cuh"
#include "ptx/wgmma.cuh"

// --------------------------------------------------------------------------------------- constants
constexpr int kConsumers = kWarps - 4;  // warps
// The columns of the sums that a product computes at once: for more there are no registers.
constexpr int kSumCols = kRowGroups > 1 ? 128 : 64;
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kMmaM == 1 && kOwnRows * kRowGroups == 16 * kConsumers, "a warpgroup has 64 rows");
static_assert(kPart == kOtherRows, "a tile is multiplied as a whole");
static_assert(8 * kMmaV % kSumCols == 0 && kSumCols % 64 == 0, "atoms of the swizzle are whole");

// ---------------------------------------------------------------------------------------- storage
// Of eight rows both parts lie together (kEightRowsBytes).  An atom of the swizzle is 1,024 bytes.
struct __align__(1024) TileStorage : SharedStorage {
  uint64 own_full, full[kStages][2], empty[kStages][2];  // stage, array
};
// Behind it lies what warpgroups that share rows hand to each other: of dQ both do.  Each lane has
// places of its own, for warps of the same rows hold the same pairs in the same registers.
using Exchanged = float4[4][kMmaN][32];                            // warp of a warpgroup
constexpr int kHandOver = kRowGroups == 1 ? 0 : kOwnKeys ? 1 : 2;  // warpgroups
static_assert(sizeof(TileStorage) + kStages * kHandOver * sizeof(Exchanged) == FA_SHARED_BYTES,
              "the host launches with this size");

FA_DEVICE void init_barriers(TileStorage& shared) {
  init(shared.own_full, 1);
#pragma unroll
  for (int i = 0; i < 2 * kStages; ++i) {
    init(shared.full[i / 2][i % 2], 1);
    // With their rows' high parts in registers, one of two warpgroups reads V.
    const int readers = kHighInRegisters && i % 2 == 1 ? kConsumers / 2 : kConsumers;
    init(shared.empty[i / 2][i % 2], kArrivalsPerWarp * readers);
  }
  fence_mbarrier_init();
}

// Where warpgroups share keys, high parts of all rows of a tile lie before low parts, so that both
// are one operand.
constexpr bool kStacked = kRowGroups > 1 && kOwnKeys;
// From eight rows of a tile to the next, and from high parts to low ones.
constexpr uint32 kNextEight = kStacked ? kPartBytes : kEightRowsBytes;
constexpr uint32 kToLow = kStacked ? kOtherRows / 8 * kPartBytes : kPartBytes;

// Copies rows of array 0 or 1, from `row` on of all that there are.
template <bool kKeys, int kRows, int kArray>
FA_DEVICE void load_pairs(const BwdFp32Params& params, const void* tile, int64 row,
                          uint32 barrier) {
  const uint16* pairs = kArray == 0 ? (kKeys ? params.k_pairs : params.q_pairs)
                                    : (kKeys ? params.v_pairs : params.dout_pairs);
  cp_async_bulk_load(cvta_to_shared(tile), pairs + row * (2 * kDim), kRows / 8 * kEightRowsBytes,
                     barrier);
}

// Copies a tile of the other side.
template <int kArray>
FA_DEVICE void load_tile(const BwdFp32Params& params, const void* tile, int64 row, uint32 barrier) {
  if constexpr (!kStacked) {
    load_pairs<!kOwnKeys, kOtherRows, kArray>(params, tile, row, barrier);
  } else {
    const uint16* pairs = kArray == 0 ? params.q_pairs : params.dout_pairs;
    const uint8* from = reinterpret_cast<const uint8*>(pairs + row * (2 * kDim));
    const uint32 to = cvta_to_shared(tile);
#pragma unroll 1
    for (int eight = 0; eight < kOtherRows / 8; ++eight) {
      const uint8* high = from + eight * kEightRowsBytes;
      cp_async_bulk_load(to + eight * kNextEight, high, kPartBytes, barrier);
      cp_async_bulk_load(to + eight * kNextEight + kToLow, high + kPartBytes, kPartBytes, barrier);
    }
  }
}

// Copies what is known of rows.
template <bool kKeys, int kRows>
FA_DEVICE void load_fields(const BwdFp32Params& params, const float* rows, int64 row,
                           uint32 barrier) {
  constexpr int kFields = kKeys ? kKeyFields : kQueryFields;
  const float* from = (kKeys ? params.key_rows : params.rows) + row;
  const int64 step = kKeys ? key_fields_step(params) : query_fields_step(params);
#pragma unroll
  for (int field = 0; field < kFields; ++field) {
    cp_async_bulk_load(cvta_to_shared(rows + field * kRows), from + field * step, kRows * 4,
                       barrier);
  }
}

// Copies low parts of the block's rows of array i, and high parts to where tiles will be.
template <int i>
FA_DEVICE void load_parts(const BwdFp32Params& params, TileStorage& shared, int64 row,
                          uint32 barrier) {
  const uint32 of_high = cvta_to_shared(&shared.full[0][i]);
  const uint32 low = cvta_to_shared(shared.own[i]), high = cvta_to_shared(shared.other[0][i]);
  const uint8* from = reinterpret_cast<const uint8*>(i == 0 ? params.q_pairs : params.dout_pairs) +
                      row / 8 * kEightRowsBytes;
  mbarrier_arrive_expect_tx(of_high, kOwnRows / 8 * kPartBytes);
#pragma unroll 1
  for (int eight = 0; eight < kOwnRows / 8; ++eight) {
    const uint32 to = eight * kPartBytes;
    cp_async_bulk_load(high + to, from + eight * kEightRowsBytes, kPartBytes, of_high);
    cp_async_bulk_load(low + to, from + eight * kEightRowsBytes + kPartBytes, kPartBytes, barrier);
  }
}

FA_DEVICE void load_own(const BwdFp32Params& params, TileStorage& shared) {
  const WorkTile& work = shared.work;
  const int64 row = first_row_of<kOwnKeys>(params, work.entry) + work.first_own;
  const uint32 barrier = cvta_to_shared(&shared.own_full);
  mbarrier_arrive_expect_tx(barrier, sizeof(shared.own) + sizeof(shared.own_rows));
  if constexpr (kHighInRegisters) {
    load_parts<0>(params, shared, row, barrier);
    load_parts<1>(params, shared, row, barrier);
  } else {
    load_pairs<kOwnKeys, kOwnRows, 0>(params, shared.own[0], row, barrier);
    load_pairs<kOwnKeys, kOwnRows, 1>(params, shared.own[1], row, barrier);
  }
  load_fields<kOwnKeys, kOwnRows>(params, shared.own_rows[0], row, barrier);
}

// Tiles in the order in which they are copied; high parts that go to registers were the first one.
FA_DEVICE PipelineState<kStages> first_tile() {
  PipelineState<kStages> pipeline;
  if constexpr (kHighInRegisters) pipeline.advance();
  return pipeline;
}

// Copies all tiles that the block walks over, so many times, by one thread.  Array 1 is waited for
// first; what is known of the rows comes with array 0, which is needed to the end.
FA_DEVICE void load_tiles(const BwdFp32Params& params, TileStorage& shared, int times) {
  const WorkTile& work = shared.work;
  PipelineState<kStages> pipeline = first_tile();
#pragma unroll 1
  for (int i = 0; i < times; ++i) {
#pragma unroll 1
    for (OtherTile at = next_visible(params, work, {0, work.begin}); at.head < heads_of(params);
         at = next_visible(params, work, {at.head, at.tile + 1})) {
      const int stage = pipeline.index();
      const int64 row =
          first_row_of<!kOwnKeys>(params, work.entry + at.head) + at.tile * kOtherRows;
      wait(shared.empty[stage][1], pipeline.parity() ^ 1);
      uint32 barrier = cvta_to_shared(&shared.full[stage][1]);
      mbarrier_arrive_expect_tx(barrier, sizeof(shared.other[0][1]));
      load_tile<1>(params, shared.other[stage][1], row, barrier);
      wait(shared.empty[stage][0], pipeline.parity() ^ 1);
      barrier = cvta_to_shared(&shared.full[stage][0]);
      mbarrier_arrive_expect_tx(barrier, sizeof(shared.other[0][0]) + sizeof(shared.other_rows[0]));
      load_fields<!kOwnKeys, kOtherRows>(params, shared.other_rows[stage][0], row, barrier);
      load_tile<0>(params, shared.other[stage][0], row, barrier);
      pipeline.advance();
    }
  }
}

// ---------------------------------------------------------------------------------------- products
// Rows of pairs, as both kinds of operands (see kEightRowsBytes).
FA_DEVICE uint64 describe(const void* tile, uint32 bytes) {
  return wgmma_descriptor(cvta_to_shared(tile) + bytes, kSwizzleBytes, kEightRowsBytes);
}
// The arrays i of this warpgroup's rows, and of a tile.
FA_DEVICE uint64 describe_own(const TileStorage& shared, int i) {
  return describe(shared.own[i], tid_x_again() / 128 * (8 * kEightRowsBytes));
}
FA_DEVICE uint64 describe_other(const TileStorage& shared, int stage, int i, uint32 bytes = 0) {
  return wgmma_descriptor(cvta_to_shared(shared.other[stage][i]) + bytes, kSwizzleBytes,
                          kNextEight);
}

// A part of S or dP, or of its transpose: the products of a's and b's parts, high or low ones, over
// all columns.  Starts it.
template <int kPartOfA, int kPartOfB>
FA_DEVICE void multiply_parts(Scores& x, uint64 a, uint64 b, bool adds) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    // 16 columns are 32 bytes of an atom's rows.
    const int column = step / 4 * kSwizzleBytes + step % 4 * 32;
    wgmma_m64k16_ss<false, kPart>(x[0], wgmma_at(a, column + kPartOfA * kPartBytes),
                                  wgmma_at(b, column + kPartOfB * kPartBytes), adds || step > 0);
  }
}

// Of the products with a low part, that of queries comes first: this is the part of A.  Both
// kernels are to find the same bits: a unit in the last place of a large score would make weights
// of 1 any others.
constexpr int kFirst = kOwnKeys ? 0 : 1;

// Starts the products with a low part.
FA_DEVICE void start_low(Scores& x, uint64 a, uint64 b) {
  wgmma_fence();
  multiply_parts<kFirst, 1 - kFirst>(x, a, b, false);
  multiply_parts<1 - kFirst, kFirst>(x, a, b, true);
  wgmma_commit_group();
}

// When these are there, starts those of high parts.
FA_DEVICE void start_high(Scores& x, uint64 a, uint64 b) {
#pragma unroll
  for (int e = 0; e < 4 * kMmaN; ++e) x[0][e / 4][e % 4] *= kLowInverse;
  wgmma_fence();
  multiply_parts<0, 0>(x, a, b, true);
  wgmma_commit_group();
}

// Waits for array i of a tile.
FA_DEVICE void wait_for_array(const TileStorage& shared, const PipelineState<kStages>& pipeline,
                              int i) {
  wait(shared.full[pipeline.index()][i], pipeline.parity());
}

// S = Q K^T or its transpose.
FA_DEVICE void multiply_scores(const TileStorage& shared, int stage, Scores& s) {
  const uint64 own = describe_own(shared, 0), other = describe_other(shared, stage, 0);
  start_low(s, own, other);
  wgmma_wait_group<0>();
  start_high(s, own, other);
  wgmma_wait_group<0>();
  apply_exponents(shared, stage, 0, 0, s);
}

// P and dS of a warpgroup's rows and a tile of the other side, for which it waits.  Array 1 is not
// read any more after `on_dp`.
template <typename OnDp>
FA_DEVICE void multiply_and_weigh(const BwdFp32Params& params, const TileStorage& shared,
                                  const PipelineState<kStages>& pipeline, const OtherTile& at,
                                  Scores& weights, Scores& ds, const OnDp& on_dp) {
  const int stage = pipeline.index();
  const uint64 own = describe_own(shared, 0), other = describe_other(shared, stage, 0);
  const uint64 own_of_dp = describe_own(shared, 1), other_of_dp = describe_other(shared, stage, 1);
  wait_for_array(shared, pipeline, 1);
  start_low(ds, own_of_dp, other_of_dp);
  wait_for_array(shared, pipeline, 0);
  start_low(weights, own, other);
  wgmma_wait_group<1>();
  start_high(ds, own_of_dp, other_of_dp);
  wgmma_wait_group<1>();
  start_high(weights, own, other);
  wgmma_wait_group<1>();
  on_dp();
  apply_exponents(shared, stage, 1, 0, ds);
  subtract_delta(shared, stage, 0, ds);
  wgmma_wait_group<0>();
  apply_exponents(shared, stage, 0, 0, weights);
  compute_weights(params, shared, at, stage, 0, weights, ds);
}

// X as an A operand: high and low parts, and high parts times 2^-11.
struct Operand {
  SplitPair pairs[kMmaM][kMmaN][2];
  uint32 smaller[kMmaN][2];
  ProductFactors factors;
};

// Numbers of X keep both parts whole down to 2^-17 of the largest of their row: enough for rows of
// the other side of about one size, half of whose exponents are at most this far apart.
constexpr int kMostNear = 4;

FA_DEVICE void make_operand(const Scores& x, const int (&unit)[kMmaM][2], Operand& p) {
  constexpr uint32 kSmaller = 0x10001000, kMinusZeros = 0x80008000;  // 2^-11 twice, IEEE 754
  split_operand(x, unit, p.pairs, p.factors,
                [](float one, float two) { return split_near(one, two); });
#pragma unroll
  for (int e = 0; e < 2 * kMmaN; ++e) {
    p.smaller[e / 2][e % 2] = fma_rn_f16x2(p.pairs[0][e / 2][e % 2].high, kSmaller, kMinusZeros);
  }
}

using Product = float[kSumCols / 8][4];

// Starts the product of X with the rows of a tile, in kSumCols columns, or of its three products
// (low * high, high * low, high * high) those from kBegin to kEnd.  The sums are not to be touched
// before a wgmma_wait_group.
template <bool kMixed = false, int kBegin = 0, int kEnd = 3>
FA_DEVICE void start_product(Product& sums, const Operand& x, uint64 tile, int part_of_cols) {
  wgmma_fence();
#pragma unroll
  for (int part = kBegin; part < kEnd; ++part) {
#pragma unroll
    for (int step = 0; step < kPart / 16; ++step) {
      uint32 own[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int j = 2 * step + r / 2;
        const SplitPair& two = x.pairs[0][j][r % 2];
        own[r] = part == 0 ? two.low : part == 1 && !kMixed ? x.smaller[j][r % 2] : two.high;
      }
      const uint32 a[4] = {own[0], own[1], own[2], own[3]};
      const int place = part_of_cols * (kSumCols / 64 * kSwizzleBytes) + step * (2 * kNextEight) +
                        (part == 1 ? kToLow : 0);
      wgmma_m64k16_rs<false, kSumCols>(sums, a, wgmma_at(tile, place), part + step > 0);
    }
  }
  wgmma_commit_group();
}

FA_DEVICE void add_columns(const Product& product, const ProductFactors& factors, Sums& sums,
                           int part_of_cols) {
#pragma unroll
  for (int e = 0; e < kSumCols / 2; ++e) {
    float& sum = sums[0][part_of_cols * (kSumCols / 8) + e / 4][e % 4];
    const int h = e % 4 / 2;
    sum = fmaf(product[e / 4][e % 4] * factors.half[0][h], factors.rest[0][h], sum);
  }
}

// sums += X B where rows of B are of all sizes: low parts of X have a factor, as those of B have,
// and their products are added up first.
template <typename OnOperand>
FA_DEVICE void add_mixed_product(const Scores& x, const int (&unit)[kMmaM][2], uint64 tile,
                                 Sums& sums, const OnOperand& on_operand) {
  Operand p;
  split_operand(x, unit, p.pairs, p.factors, [](float one, float two) { return split(one, two); });
  on_operand();
#pragma unroll
  for (int part = 0; part < 8 * kMmaV / kSumCols; ++part) {
    Product product;
    start_product<true, 0, 2>(product, p, tile, part);
    wgmma_wait_group<0>();
#pragma unroll
    for (int e = 0; e < kSumCols / 2; ++e) product[e / 4][e % 4] *= kLowInverse;
    start_product<true, 2, 3>(product, p, tile, part);
    wgmma_wait_group<0>();
    add_columns(product, p.factors, sums, part);
  }
}

// sums += X B, where B are the rows of a tile of the other side's array i.  What is known of these
// is not read any more after `on_operand`.
template <typename OnOperand>
FA_DEVICE void add_product(const TileStorage& shared, int stage, int i, Scores& x, Sums& sums,
                           const OnOperand& on_operand) {
  int unit[kMmaM][2];
  const int spread = weigh_by_exponents(shared.other_rows[stage][kOtherFactor + i], x, unit);
  const uint64 tile = describe_other(shared, stage, i, warp_col() / 64 * kSwizzleBytes);
  if (spread > kMostNear) return add_mixed_product(x, unit, tile, sums, on_operand);
  Operand p;
  make_operand(x, unit, p);
  on_operand();
#pragma unroll
  for (int part = 0; part < 8 * kMmaV / kSumCols; ++part) {
    Product product;
    start_product(product, p, tile, part);
    wgmma_wait_group<0>();
    add_columns(product, p.factors, sums, part);
  }
}
FA_DEVICE void add_product(const TileStorage& shared, int stage, int i, Scores& x, Sums& sums) {
  add_product(shared, stage, i, x, sums, [] {});
}
