// Attention forward of float32 for SM90, on float16 tensor cores: bulk copies, wgmma, warp
// specialisation.
//
// split_kv.cu has turned K and V into pairs of float16, tile by tile.  A block takes kTileM query
// rows of one batch entry.  Its first warpgroup is the producer, one thread of which copies tiles.
// The others are consumers with 64 rows each, which they split themselves.  A product is three:
// low * high, high * low, high * high, in one accumulator.  Builds for TF32 have the last one only:
// float16 has as many digits as TF32, and exponents of rows and tiles make up for its range.
//
// Rows and tiles have exponents, as in fwd_fp32.cu, whose softmax this is (forward_fp32.cuh).
// Tensor cores cut what they add towards zero: the products of a tile with V are sums of their own,
// which are added to the output in float32.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/forward_fp32.cuh"
#include "cuda_src/common/forward_sm80.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/split_kv.cuh"
#include "cuda_src/common/split_rows.cuh"
#include "ptx/bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kDim = FA_DIM;          // head_dim and v_dim, padded with zeros
constexpr int kGroups = 2;            // warpgroups that compute
constexpr int kTileM = 64 * kGroups;  // query rows of a block
constexpr int kTileN = FA_TILE_N;     // keys of a tile
constexpr int kKStages = FA_STAGES;   // K tiles in flight
constexpr int kVStages = FA_V_STAGES;
constexpr bool kSparse = FA_SPARSE;  // with a mask
constexpr int kParts = FA_PARTS;     // 2: numbers are pairs; 1: they are rounded to float16
constexpr int kFirstProduct = kParts == 2 ? 0 : 2;  // of low * high, high * low, high * high
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kMmaN = kTileN / 8;  // accumulators of 8 columns across a tile's keys
constexpr int kMmaV = kDim / 8;    // and across the output's columns
constexpr int kTilesPerBlock = kMaskBlock / kTileN;
// The high parts of Q are read from registers by two of three products: from shared memory they
// would be read anew for each, and it is as busy as the tensor cores.
constexpr bool kQInRegisters = kParts == 2 && kDim <= 128;
// High parts of Q meet both parts of K as one operand: with 32 keys each, reading Q takes as long
// as reading both of these.  So high parts of 64 columns of K lie before the low parts of these.
constexpr bool kStacked = kParts == 2 && kTileN == 32;
// The output's columns that a product of weights and values computes at once: with 128, there are
// no registers for that.
constexpr int kPvCols = 64;
// With a stacked operand tensor cores add up so many steps of 16 columns; these sums are added in
// float32.
constexpr int kSumSteps = 8;
// Of split_near(): see check_range.  Rounded numbers may be off by 2^15 times as much as pairs.
constexpr int kExactBits = kParts == 2 ? 40 : 55;
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(kDim % 64 == 0 && kTileN % 32 == 0, "tiles are whole blocks of 64 columns");

using QTile = SharedTile<64, kDim>;
using KVTile = SplitTile<kTileN, kDim, kParts>;
using Scale = SplitScale<kTileN>;
using KPipeline = PipelineState<kKStages>;
using VPipeline = PipelineState<kVStages>;
static_assert(sizeof(KVTile) == FA_SPLIT_TILE_BYTES, "the host gives memory for this size");
constexpr int kQLow = QTile::kBytes;  // from high parts to low ones
constexpr int kKLow = KVTile::Tile::kBytes;
constexpr int kCopiedBytes = kParts * kKLow + sizeof(Scale);
constexpr int kColumnsBytes = KVTile::Tile::kBlockBytes;               // of 64 columns of a part
constexpr int kNextColumns = (kStacked ? kParts : 1) * kColumnsBytes;  // of K, from 64 columns on

struct FwdFp32Sm90Params {
  AttentionParams common;
  const KVTile* k;  // of each entry, its tiles one after the other
  const KVTile* v;
  int64 k_batch[kMaxBatchAxes], v_batch[kMaxBatchAxes];  // tiles along the axes of batch entries
};
static_assert(sizeof(FwdFp32Sm90Params) == FA_FWD_FP32_SM90_BYTES,
              "the host module of this name holds the same struct");

// ---------------------------------------------------------------------------------------- storage
struct __align__(1024) SharedStorage {  // an atom of the swizzle is 1,024 bytes
  uint8 q[kGroups][kParts * kQLow];
  uint8 k[kKStages][kParts * kKLow], v[kVStages][kParts * kKLow];
  Scale k_scale[kKStages], v_scale[kVStages];
  float q_factor[kTileM];
  int key_tile[kKStages];  // the number of each tile of K among all of the entry
  uint64 k_full[kKStages], k_empty[kKStages], v_full[kVStages], v_empty[kVStages];
  TileWork work;
  KeyTiles band;
  TileRange tiles;
  ListedRange listed;  // with a mask
#if FA_DROPOUT
  DropoutEntry dropout;
#endif
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// --------------------------------------------------------------------------------------- producer
// Finds the queries of the block and its tiles of keys: those of its band, or how many of them
// a mask lists.
FA_DEVICE void find_work(const AttentionParams& params, SharedStorage& shared) {
  if (threadIdx.x == 0) {
    shared.work = kSparse ? masked_tile_work(params, kTileM) : tile_work(params, kTileM);
#if FA_DROPOUT
    shared.dropout = dropout_entry(params.dropout, shared.work.batch);
#endif
    shared.band = key_tiles(params, shared.work.q_begin,
                            shared.work.q_begin + shared.work.q_rows - 1, kTileN);
    restrict_to_length(params, shared.work, shared.band, kTileN);
    shared.tiles = {shared.band.begin, shared.band.end};
    if constexpr (kSparse) {
      shared.listed.row =
          row_of_blocks(params.mask, shared.work.batch, shared.work.q_begin, params.q_len);
    }
    for (int i = 0; i < kKStages; ++i) {
      init(shared.k_full[i], 1);
      init(shared.k_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kVStages; ++i) {
      init(shared.v_full[i], 1);
      init(shared.v_empty[i], 4 * kGroups);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kSparse) {
    if (shared.work.q_rows <= 0) return;
    if (threadIdx.x < 128) {
      find_listed_range<kTilesPerBlock>(params.mask, shared.listed, shared.band);
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.tiles = {0, shared.listed.count()};
    __syncthreads();
  }
}

// Copies a tile and what its exponents are.
FA_DEVICE void load_tile(uint8* to, Scale& scale, const KVTile& from, uint64& full) {
  const uint32 barrier = cvta_to_shared(&full);
  mbarrier_arrive_expect_tx(barrier, kCopiedBytes);
  cp_async_bulk_load(cvta_to_shared(to), from.part, kParts * kKLow, barrier);
  cp_async_bulk_load(cvta_to_shared(&scale), &from.scale, sizeof(Scale), barrier);
}

// As load_tile, with both parts of 64 columns next to each other.
FA_DEVICE void load_stacked(uint8* to, Scale& scale, const KVTile& from, uint64& full) {
  const uint32 barrier = cvta_to_shared(&full), tile = cvta_to_shared(to);
  mbarrier_arrive_expect_tx(barrier, kCopiedBytes);
#pragma unroll 1
  for (int i = 0; i < kParts * kDim / 64; ++i) {
    cp_async_bulk_load(tile + i * kColumnsBytes, from.part[i % kParts] + i / kParts * kColumnsBytes,
                       kColumnsBytes, barrier);
  }
  cp_async_bulk_load(cvta_to_shared(&scale), &from.scale, sizeof(Scale), barrier);
}

// Copies the tiles of K and V, in the order in which they are waited for.
FA_DEVICE void load_tiles(const FwdFp32Sm90Params& params, SharedStorage& shared) {
  const AttentionParams& p = params.common;
  const KVTile* k = params.k + element_of_entry(p, shared.work.batch, params.k_batch);
  const KVTile* v = params.v + element_of_entry(p, shared.work.batch, params.v_batch);
  KPipeline k_at;
  VPipeline v_at;
#pragma unroll 1
  for (int tile = shared.tiles.begin; tile < shared.tiles.end; ++tile) {
    int key_tile = tile;
    if constexpr (kSparse) {
      const ListedTile listed = listed_tile<kTilesPerBlock>(shared.listed, tile);
      key_tile = (listed.partial ? p.mask.partial : p.mask.full)[listed.position] * kTilesPerBlock +
                 listed.in_block;
    }
    int stage = k_at.index();
    wait(shared.k_empty[stage], k_at.parity() ^ 1);
    shared.key_tile[stage] = key_tile;
    if constexpr (kStacked) {
      load_stacked(shared.k[stage], shared.k_scale[stage], k[key_tile], shared.k_full[stage]);
    } else {
      load_tile(shared.k[stage], shared.k_scale[stage], k[key_tile], shared.k_full[stage]);
    }
    k_at.advance();
    stage = v_at.index();
    wait(shared.v_empty[stage], v_at.parity() ^ 1);
    load_tile(shared.v[stage], shared.v_scale[stage], v[key_tile], shared.v_full[stage]);
    v_at.advance();
  }
}

// --------------------------------------------------------------------------------------- consumers
using Scores = float[1][kMmaN][4];         // S, then P in float32: 64 rows x kTileN keys
using Weights = uint32[kMmaN][2][kParts];  // P: of 8 columns, of rows 0-7 and 8-15
using Output = float[1][kMmaV][4];
using Product = float[kPvCols / 8][4];
using QFragments = uint32[kQInRegisters ? kDim / 16 : 1][4];  // high parts of Q, as A operands

// One lane of a warp arrives at the barrier.
FA_DEVICE void release(const uint64& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

// Splits the 64 rows of a warpgroup and writes them to shared memory, for its products to read.
FA_DEVICE void load_q(const AttentionParams& params, SharedStorage& shared, int group) {
  constexpr int kAtOnce = kDim <= 128 ? 64 : 16;  // rows in registers
  using Rows = FloatChunk<kAtOnce, kDim, 4, true>;
  const int tid = threadIdx.x % 128, own_row = split_row<QTile>(tid), col = 8 * (tid % 8);
  const bool whole = params.aligned && params.head_dim % 4 == 0;
#pragma unroll 1
  for (int first = own_row; first < 64; first += kAtOnce) {
    const int from = shared.work.q_begin + 64 * group + first;
    Rows rows;
    rows.load(static_cast<const float*>(params.q) + shared.work.at.q +
                  static_cast<int64>(from) * params.q_row + col,
              params.q_row, params.q_len - from, params.head_dim - col, whole);
#pragma unroll
    for (int g = 0; g < Rows::kGroups; ++g) {
      const int row = first + g * Rows::kStep, exponent = rows.exponent(g);
      store_near<QTile, kParts>(shared.q[group], rows.x[g], row, power_of_two(exponent));
      if (tid % 8 == 0) shared.q_factor[64 * group + row] = power_of_two(-exponent / 2);
    }
  }
  fence_proxy_async_shared();
  bar_sync(1 + group, 128);
}

// Loads the high parts of a warp's rows of Q.
FA_DEVICE void load_q_fragments(QFragments& q, const uint8* q_tile) {
  if constexpr (kQInRegisters) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    // Rows 0-7, 8-15, then the same of the next 8 columns (PTX ISA 9.7.14.5.15).
    const uint32 from = cvta_to_shared(q_tile) + QTile::lane_offset(row, lane / 16);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) ldmatrix_x4(q[step], QTile::at(from, 0, step));
  }
}

// Where 16 columns lie in a tile: they are 32 bytes of a block's rows, and descriptors count in 16
// bytes.
FA_DEVICE constexpr int q_place(int step) {
  return (step / 4 * QTile::kBlockBytes + step % 4 * 32) / 16;
}
FA_DEVICE constexpr int k_place(int step) { return (step / 4 * kNextColumns + step % 4 * 32) / 16; }

// S = Q K^T.  Starts the product; s and q are not to be touched before a wgmma_wait_group.
FA_DEVICE void gemm_qk(Scores& s, const QFragments& q, uint32 q_tile, uint32 k_tile) {
  const uint64 a = wgmma_descriptor(q_tile, 0), b = wgmma_descriptor(k_tile, 0);
  wgmma_fence();
#pragma unroll
  for (int part = kFirstProduct; part < 3; ++part) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint64 own_b = b + k_place(step) + (part == 1 ? kKLow / 16 : 0);
      if (part == 0 || !kQInRegisters) {
        wgmma_m64k16_ss<false, kTileN>(s[0], a + q_place(step) + (part == 0 ? kQLow / 16 : 0),
                                       own_b, part > kFirstProduct || step > 0);
      } else {
        wgmma_m64k16_rs<false, kTileN, kKMajor>(s[0], q[kQInRegisters ? step : 0], own_b, 1);
      }
    }
  }
  wgmma_commit_group();
}

// Products of high parts of Q, over some of the columns: with high parts of K, and behind these
// with low parts.
using Stacked = float[2 * kMmaN][4];

// Starts them.
FA_DEVICE void gemm_stacked(Stacked& s, uint32 q_tile, uint32 k_tile, int part_of_dim) {
  const uint64 a = wgmma_descriptor(q_tile, 0), b = wgmma_descriptor(k_tile, 0);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSumSteps; ++i) {
    const int step = part_of_dim * kSumSteps + i;
    wgmma_m64k16_ss<false, kParts * kTileN>(s, a + q_place(step), b + k_place(step), i > 0);
  }
  wgmma_commit_group();
}

// Makes products of both parts of Q and K, of which those of high parts of Q over the first half of
// the columns are there.
FA_DEVICE void complete_stacked(Scores& s, const Stacked& first, uint32 q_tile, uint32 k_tile) {
  static_assert(!kStacked || kDim / 16 == 2 * kSumSteps, "there are two halves");
  Stacked second;
  gemm_stacked(second, q_tile, k_tile, 1);
  const uint64 a = wgmma_descriptor(q_tile + kQLow, 0), b = wgmma_descriptor(k_tile, 0);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    wgmma_m64k16_ss<false, kTileN>(s[0], a + q_place(step), b + k_place(step), step > 0);
  }
  wgmma_commit_group();
  wgmma_wait_group<0>();
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[0][j][e] += first[kMmaN + j][e] + second[kMmaN + j][e];
      s[0][j][e] += first[j][e] + second[j][e];
    }
  }
}

// Starts S, or the first part of it.
FA_DEVICE void start_qk(Scores& s, Stacked& first, const QFragments& q, uint32 q_tile,
                        uint32 k_tile) {
  if constexpr (kStacked) {
    gemm_stacked(first, q_tile, k_tile, 0);
  } else {
    gemm_qk(s, q, q_tile, k_tile);
  }
}

// The product of a tile of weights with kPvCols columns of V, or those from `begin` to `end` of its
// three products.  Starts it; sums and weights are not to be touched before a wgmma_wait_group.
FA_DEVICE void gemm_pv(Product& sums, const Weights& p, uint32 v_tile, int part_of_cols,
                       int begin = kFirstProduct, int end = 3) {
  static_assert(kPvCols == 64, "a block of 64 columns");
  const uint64 b = wgmma_descriptor(v_tile + part_of_cols * kColumnsBytes, 0);
  wgmma_fence();
#pragma unroll
  for (int part = begin; part < end; ++part) {
    const int low = part == 0;
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      const uint32 a[4] = {p[2 * step][0][low], p[2 * step][1][low], p[2 * step + 1][0][low],
                           p[2 * step + 1][1][low]};
      wgmma_m64k16_rs<false, kPvCols>(sums, a,
                                      b + step * (16 * 128 / 16) + (part == 1 ? kKLow / 16 : 0),
                                      part > kFirstProduct || step > 0);
    }
  }
  wgmma_commit_group();
}

// What a consumer has of its rows while it walks over tiles.
struct Consumer {
  const AttentionParams& params;
  SharedStorage& shared;
  int warp;           // of the block's consumers
  float q_factor[2];  // of this thread's rows
};

// The units of a tile's scores: a row's are in natural units, or products, after they have been
// multiplied by the square of `root`.
struct Units {
  float root[2];
};

// Brings products to natural units where that has to be done key by key, or where scores are more
// than products.  Says how large their terms may be: see check_range.
FA_DEVICE Units scale_products(const Consumer& c, const Scale& k, Scores& s, float (&most)[2]) {
  const float* factors = k.factor + 2 * (threadIdx.x % 4);
  if (!k.is_mixed) {
    Units units;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = c.q_factor[h] * factors[0];
      most[h] = factor;
      units.root[h] = kScoreMod ? 1.0f : factor;
      if constexpr (kScoreMod) {
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) s[0][j][e] = s[0][j][e] * factor * factor;
        }
      }
    }
    return units;
  }
  float most_factor = 0.0f;
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    const float2 own = *reinterpret_cast<const float2*>(factors + 8 * j);
    most_factor = fmaxf(most_factor, fmaxf(own.x, own.y));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = c.q_factor[e / 2] * (e % 2 ? own.y : own.x);
      s[0][j][e] = s[0][j][e] * factor * factor;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) most[h] = c.q_factor[h] * most_factor;
  return {{1.0f, 1.0f}};
}

// The largest score of each row of a tile, in the units of its scores, and in `sums` in natural
// ones.  What exp2 is given is `scale` times a difference of the former.
FA_DEVICE void find_max(const Scores& s, const Units& units, float exp2_scale, TileSums& sums,
                        float (&max)[2], float (&scale)[2]) {
  find_max(s, sums);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    max[h] = sums.max[h];
    scale[h] = exp2_scale * units.root[h] * units.root[h];
    if (max[h] != kNoMax) sums.max[h] = fmaxf(max[h] * units.root[h] * units.root[h], kNoMax);
  }
}

// This thread's bits of a partial block of a mask, for its two rows; else all ones.
FA_DEVICE void load_words(const Consumer& c, int tile, int key_tile, uint32 (&visible_bits)[1][2]) {
  visible_bits[0][0] = visible_bits[0][1] = 0xffffffffu;
  const ListedTile at = listed_tile<kTilesPerBlock>(c.shared.listed, tile);
  if (!at.partial) return;
  const int lane = threadIdx.x % 32;
  const uint32* words =
      block_words(c.params.mask, c.shared.listed.row, at.position, key_tile / kTilesPerBlock) +
      (c.shared.work.q_begin % kMaskBlock / 16 + c.warp) * kSlabWords + 2 * lane;
#pragma unroll
  for (int h = 0; h < 2; ++h) visible_bits[0][h] = words[h] >> at.in_block * (kTileN / 4);
}

// Turns products into scores, and puts -inf where a mask or the band hides a key.
FA_DEVICE void modify_scores(const Consumer& c, Scores& s, int tile, int key_tile) {
  const int lane = threadIdx.x % 32;
  const int first_row = c.shared.work.q_begin + 16 * c.warp + lane / 4;
  const int first_col = key_tile * kTileN + 2 * (lane % 4);
  if constexpr (kScoreMod) {
    load_and_apply_score_mod<false>(c.params, c.shared.work.at.bias, s[0], first_row, first_col);
  }
  if constexpr (kSparse) {
    uint32 visible_bits[1][2];
    load_words(c, tile, key_tile, visible_bits);
    mask_by_bits(s, visible_bits);
  }
  if (key_tile < c.shared.band.full_begin || key_tile >= c.shared.band.full_end) {
    mask_outside_band(band_of(c.params, c.shared.work), s, first_row, first_col);
  }
}

// Multiplies weights so that they and their low parts are normal numbers of float16, and by the
// factors of rows of V that have exponents of their own.  A tile's product is 2^top in units.
FA_DEVICE void scale_weights(const Scale& v, Scores& s, int (&top)[2]) {
  if (v.is_mixed) return weigh_by_exponents(v.exponent, s, top);
  top[0] = top[1] = v.exponent[0];
#pragma unroll
  for (int e = 0; e < 4 * kMmaN; ++e) s[0][e / 4][e % 4] *= power_of_two(kWeightExponent);
}

FA_DEVICE void split_weights(const Scores& s, Weights& p, float low_scale) {
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const SplitPair pair = split_near(s[0][j][2 * h], s[0][j][2 * h + 1], low_scale);
      p[j][h][0] = pair.high;
      if constexpr (kParts == 2) p[j][h][kParts - 1] = pair.low;
    }
  }
}

// O += factor * (product of a tile), in kPvCols columns.
FA_DEVICE void add_product(Output& o, const Product& sums, const float (&factor)[2],
                           int part_of_cols) {
#pragma unroll
  for (int j = 0; j < kPvCols / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = o[0][part_of_cols * (kPvCols / 8) + j][e];
      x = fmaf(sums[j][e], factor[e / 2], x);
    }
  }
}

// O += factor * (product of a mixed tile of V): low parts have a factor, so their products are
// added up first, and columns have one each.
FA_DEVICE void add_mixed_product(Output& o, const Weights& p, const float (&factor)[2],
                                 uint32 v_tile, const float* column_factor) {
  const int first_col = 2 * (tid_x_again() % 4);
#pragma unroll
  for (int part = 0; part < kDim / kPvCols; ++part) {
    Product sums;
    gemm_pv(sums, p, v_tile, part, 0, 2);
    wgmma_wait_group<0>();
#pragma unroll
    for (int e = 0; e < kPvCols / 2; ++e) sums[e / 4][e % 4] *= kLowInverse;
    gemm_pv(sums, p, v_tile, part, 2, 3);
    wgmma_wait_group<0>();
#pragma unroll
    for (int j = 0; j < kPvCols / 8; ++j) {
      const float* from = column_factor + part * kPvCols + 8 * j + first_col;
      const float2 of_columns = *reinterpret_cast<const float2*>(from);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] *= e % 2 ? of_columns.y : of_columns.x;
    }
    add_product(o, sums, factor, part);
  }
}

// Adds a mixed tile to the output and the statistics, and leaves weights of 0: with these, what
// follows for all tiles changes nothing more.  A second way through the rest of the loop, with the
// start of the next product in both, made other tiles at head_dim 256 a tenth slower.
FA_DEVICE void add_mixed_tile(Rows& rows, TileSums& sums, const int (&top)[2], float exp2_scale,
                              const Scores& s, Weights& weights, Output& o, uint32 v_tile,
                              const float* column_factor) {
  split_weights(s, weights, kLowScale);
  float correction[1][2], factor[2];
  if (join_tile(rows, sums, top, exp2_scale, correction, factor)) rescale_o(o, correction);
  add_mixed_product(o, weights, factor, v_tile, column_factor);
#pragma unroll
  for (int i = 0; i < 2 * kMmaN * kParts; ++i) {
    weights[i / (2 * kParts)][i / kParts % 2][i % kParts] = 0;
  }
  sums.sum[0] = sums.sum[1] = 0.0f;
}

// The forward pass of a consumer warpgroup.
FA_DEVICE void consume(const FwdFp32Sm90Params& params, SharedStorage& shared) {
  const AttentionParams& p = params.common;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  const TileRange tiles = shared.tiles;
  Rows rows;
  rows.softmax.reset();
  rows.unit[0] = rows.unit[1] = kNoExponent;
  Output o;
  if (tiles.begin < tiles.end) {
    load_q(p, shared, group);
    clear(o);
    const float* q_factor = shared.q_factor + 16 * warp;
    const Consumer c = {p, shared, warp, {q_factor[lane / 4], q_factor[lane / 4 + 8]}};
    const uint32 q_tile = cvta_to_shared(shared.q[group]);
    QFragments q;
    load_q_fragments(q, shared.q[group]);
    Scores s;
    Stacked first;
    KPipeline k_at;
    VPipeline v_at;
    wait(shared.k_full[0], 0);
    start_qk(s, first, q, q_tile, cvta_to_shared(shared.k[0]));
    wgmma_wait_group<0>();
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int k_stage = k_at.index(), v_stage = v_at.index();
      const int key_tile = shared.key_tile[k_stage];
      const Scale &k = shared.k_scale[k_stage], &v = shared.v_scale[v_stage];
      if constexpr (kStacked) {
        complete_stacked(s, first, q_tile, cvta_to_shared(shared.k[k_stage]));
      }
      float most[2], max[2], scale[2];
      const Units units = scale_products(c, k, s, most);
      modify_scores(c, s, tile, key_tile);
      TileSums sums;
      find_max(s, units, p.exp2_scale, sums, max, scale);
      check_range<kExactBits>(p, q_factor, k.factor, s, most, rows, sums);
      release(shared.k_empty[k_stage]);
      k_at.advance();
      exponentiate(s, sums, max, scale);
      if constexpr (kDropout) {
        drop_weights(p, shared, s, shared.work.q_begin + 16 * warp, key_tile * kTileN);
      }
      wait(shared.v_full[v_stage], v_at.parity());
      int top[2];
      scale_weights(v, s, top);
      const uint32 v_tile = cvta_to_shared(shared.v[v_stage]);
      Weights weights;
      if (kParts == 2 && v.is_mixed) {
        const KVTile* v_tiles = params.v + element_of_entry(p, shared.work.batch, params.v_batch);
        add_mixed_tile(rows, sums, top, p.exp2_scale, s, weights, o, v_tile,
                       v_tiles[key_tile].column_factor);
      } else {
        split_weights(s, weights, 1.0f);
      }
      Product product;
      gemm_pv(product, weights, v_tile, 0);
      float correction[1][2], factor[2];
      if (join_tile(rows, sums, top, p.exp2_scale, correction, factor)) rescale_o(o, correction);
      if (tile + 1 < tiles.end) {
        wait(shared.k_full[k_at.index()], k_at.parity());
        start_qk(s, first, q, q_tile, cvta_to_shared(shared.k[k_at.index()]));
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      add_product(o, product, factor, 0);
#pragma unroll
      for (int part = 1; part < kDim / kPvCols; ++part) {
        gemm_pv(product, weights, v_tile, part);
        wgmma_wait_group<0>();
        add_product(o, product, factor, part);
      }
      wgmma_wait_group<0>();
      release(shared.v_empty[v_stage]);
      v_at.advance();
    }
  } else {
    clear(o);
  }
  finish_rows<kSparse>(p, shared.work, rows, o, warp);
}

// ----------------------------------------------------------------------------------------- kernel
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_fwd_fp32_sm90(const __grid_constant__ FwdFp32Sm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  find_work(params.common, shared);
  if (kSparse && shared.work.q_rows <= 0) return;
  if (threadIdx.x >= 128) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(params, shared);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x / 32 == 0 && elect_sync()) load_tiles(params, shared);
  }
}
