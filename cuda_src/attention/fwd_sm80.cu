// Attention forward for SM80 and later: mma.sync, ldmatrix, cp.async.
//
// One block takes kTileM query rows of one batch entry; each warp takes kTileM / kWarps of them
// and, tile by tile of kTileN keys, computes S = Q K^T, turns S into weights P by the online
// softmax and adds P V.  S, P and O stay in the registers of the warp that owns the rows: an
// accumulator of m16n8k16 has the layout of an A operand, so P needs no shuffle
// (docs/kernels/forward.rst).  K and V come through kStages buffers filled by cp.async.
//
// With a mask the tiles of keys are those that its lists name for the block's rows, full ones
// first.  What is needed of the lists comes by cp.async too: the number of each key block two tiles
// ahead, and each thread's own words of a partial block one tile ahead.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/forward_sm80.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/sinks.cuh"
#include "cuda_src/common/softmax.cuh"
#include "cuda_src/common/staged_bias.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr bool kBf16 = FA_BF16;        // bfloat16, else float16
constexpr int kDim = FA_DIM;           // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;      // query rows of a block
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kWarps = FA_WARPS;       // of a block
constexpr int kStages = FA_STAGES;     // K/V tiles in flight
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr bool kSparse = FA_SPARSE;    // with a mask
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = kTileM / kWarps;
constexpr int kMmaM = kWarpRows / 16;                        // products down a warp's rows
constexpr int kMmaN = kTileN / 8;                            // products across a tile's keys
constexpr int kMmaV = kDim / 8;                              // products across the output's columns
constexpr int kLaterGroups = kStages > 1 ? kStages - 2 : 0;  // after that of a tile
// Tiles of keys in a block of a mask; stages for numbers of key blocks: this tile's, the next two.
constexpr int kTilesPerBlock = kSparse ? kMaskBlock / kTileN : 1, kBlockIndexStages = 4;
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kTileM == kWarps * kMmaM * 16, "a warp owns whole 16-row products");
static_assert(kStages >= 1 && kStages <= 4, "one buffer each of K and V at least");
static_assert(!kSparse || (kTilesPerBlock * kTileN == kMaskBlock && kMaskBlock % kTileM == 0),
              "tiles divide the blocks of a mask");
static_assert(!kSparse || (kStages <= 2 && kWarps == 4),
              "a tile is loaded one tile ahead; each warp looks for one end of a list");

// A bias of pairs in 16 bits comes by way of shared memory where two blocks still fit.
constexpr bool kStageBias =
    kHasBias && kBiasIs16Bit && kBiasAxes == kBiasOfPair && !kSparse && kDim <= 64;
using QTile = SharedTile<kTileM, kDim>;
using KVTile = SharedTile<kTileN, kDim>;

// ---------------------------------------------------------------------------------------- storage
template <bool kStaged>
struct BiasStorage {};
template <>
struct BiasStorage<true> {
  uint16 bias[kWarps][kWarpRows * kTileN];  // of each warp
};
struct SharedStorage : BiasStorage<kStageBias> {
  uint16 q[kTileM * kDim];  // later the output tile
  uint16 k[kStages][kTileN * kDim];
  uint16 v[kStages][kTileN * kDim];
  TileWork work;
  KeyTiles tiles;
#if FA_DROPOUT
  DropoutEntry dropout;
#endif
};
struct SparseStorage : SharedStorage {  // only with a mask
  ListedRange listed;
  int keys[kBlockIndexStages];  // key blocks of the coming tiles
  uint32 words[kMmaM][kThreads][2];
};
static_assert((kSparse ? sizeof(SparseStorage) : sizeof(SharedStorage)) == FA_SHARED_BYTES,
              "its variant asks for as much");

// The result of a block whose rows see no key at all: that of the sinks.
FA_DEVICE void write_empty_rows(const AttentionParams& params, const TileWork& work) {
  uint16* out = static_cast<uint16*>(params.out) + work.at.out;
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < work.q_rows; r += kWarps) {
    const int64 row = work.q_begin + r;
    const float sink = load_sink(params, work.batch, work.q_begin + r);
    // NaN of a sink that is NaN or +inf.
    float value = sink == -FA_INFINITY ? 0.0f : sink - sink;
    if constexpr (kPacked) {
      if (is_invalid_row(params, work.q_begin + r)) value = FA_NAN;
    }
    for (int col = threadIdx.x % 32; col < params.v_dim; col += 32) {
      out[row * params.out_row + col] = static_cast<uint16>(pack2<kBf16>(value, 0.0f));
    }
    if (params.lse != nullptr && threadIdx.x % 32 == 0) {
      params.lse[work.batch * params.q_len + row] = sink + value;
    }
  }
}

// -------------------------------------------------------------------------------------------- work
// Finds the queries of the block and the tiles of keys that their band leaves.  They stay in shared
// memory and are read there at each use: registers are short in the loop.
FA_DEVICE void find_work(const AttentionParams& params, SparseStorage& shared) {
  shared.work = kSparse ? masked_tile_work(params, kTileM) : tile_work(params, kTileM);
#if FA_DROPOUT
  shared.dropout = dropout_entry(params.dropout, shared.work.batch);
#endif
  shared.tiles =
      key_tiles(params, shared.work.q_begin, shared.work.q_begin + shared.work.q_rows - 1, kTileN);
  if constexpr (kSparse) {
    shared.listed.row =
        row_of_blocks(params.mask, shared.work.batch, shared.work.q_begin, params.q_len);
  }
}

// The number of a tile of the loop among all key tiles.
FA_DEVICE int key_tile(const SparseStorage& shared, int tile) {
  if constexpr (!kSparse) {
    return tile;
  } else {
    return shared.keys[tile % kBlockIndexStages] * kTilesPerBlock +
           listed_tile<kTilesPerBlock>(shared.listed, tile).in_block;
  }
}

// ------------------------------------------------------------------------------------------- loads
// Copies are started by cp.async; the caller commits their group where nothing else is said.

// The address of a tile's stage.
FA_DEVICE uint32 stage_of(uint32 stages, int tile) {
  return stages + tile % kStages * static_cast<uint32>(kTileN * kDim * 2);
}

FA_DEVICE void load_k(const AttentionParams& params, SparseStorage& shared, int tile) {
  const uint16* k = static_cast<const uint16*>(params.k) + shared.work.at.k;
  load_tile<kTileN, kDim, kThreads>(stage_of(cvta_to_shared(shared.k), tile), k, params.k_row,
                                    key_tile(shared, tile) * kTileN, params.k_len, params.head_dim,
                                    params.aligned);
}

FA_DEVICE void load_v(const AttentionParams& params, SparseStorage& shared, int tile) {
  const uint16* v = static_cast<const uint16*>(params.v) + shared.work.at.v;
  load_tile<kTileN, kDim, kThreads>(stage_of(cvta_to_shared(shared.v), tile), v, params.v_row,
                                    key_tile(shared, tile) * kTileN, params.k_len, params.v_dim,
                                    params.aligned);
}

// Copies the number of a tile's key block, for all threads.
FA_DEVICE void load_block_index(const AttentionParams& params, SparseStorage& shared,
                                const TileRange& tiles, int tile) {
  if (tid_x_again() != 0 || tile >= tiles.end) return;
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  cp_async_ca<4>(cvta_to_shared(&shared.keys[tile % kBlockIndexStages]),
                 (at.partial ? params.mask.partial : params.mask.full) + at.position);
}

// Copies this thread's own words of a partial block, at the first of its listed tiles.
FA_DEVICE void load_words(const AttentionParams& params, SparseStorage& shared,
                          const TileRange& tiles, int tile) {
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  if (tile >= tiles.end || !at.partial || !at.first_listed) return;
  const int tid = tid_x_again(), lane = tid % 32, warp = tid / 32;
  const TileWork& work = shared.work;
  const uint32* words = block_words(params.mask, shared.listed.row, at.position,
                                    shared.keys[tile % kBlockIndexStages]) +
                        (work.q_begin % kMaskBlock + warp * kWarpRows) / 16 * kSlabWords + 2 * lane;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    cp_async_ca<8>(cvta_to_shared(shared.words[i][tid]), words + i * kSlabWords);
  }
}

// Copies Q and the first tiles of K and V, and commits their groups.  With one stage, K and V of
// the first tile are a group each; with more, a group is a tile.
FA_DEVICE void load_first_tiles(const AttentionParams& params, SparseStorage& shared,
                                const TileRange& tiles) {
  const uint16* q = static_cast<const uint16*>(params.q) + shared.work.at.q;
  if constexpr (kSparse) {
    load_block_index(params, shared, tiles, 0);
    cp_async_commit_group();
  }
  load_tile<kTileM, kDim, kThreads>(cvta_to_shared(shared.q), q, params.q_row, shared.work.q_begin,
                                    params.q_len, params.head_dim, params.aligned);
  if constexpr (kSparse) {
    cp_async_wait_group<0>();
    __syncthreads();
    load_block_index(params, shared, tiles, 1);
    load_words(params, shared, tiles, 0);
  }
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.begin + max(1, kStages - 1); ++tile) {
    if (tile < tiles.end) load_k(params, shared, tile);
    if constexpr (kStages == 1) cp_async_commit_group();
    if (tile < tiles.end) load_v(params, shared, tile);
    cp_async_commit_group();
  }
}

// ----------------------------------------------------------------------------------- tiles of keys
// All arrays of registers belong to the kernel's frame, and phases take them by reference.
// threadIdx.x is read again at each use (tid_x_again): kept over the loop, lane and warp would take
// registers that the products need.

// Waits until a tile has landed: at most kLaterGroups groups are then under way.  The barrier also
// says that every warp has left the buffers that are filled next: with one stage V's, which lands
// during the product with K; with more stages those of an earlier tile.
FA_DEVICE void wait_for_tile(bool is_first) {
  if (kStages == 1 && is_first) {
    cp_async_wait_group<1>();  // V may still be under way
  } else {
    cp_async_wait_group<kLaterGroups>();
  }
  __syncthreads();
}

// S = Q K^T of a warp's rows.
FA_DEVICE void gemm_qk(const SparseStorage& shared, float (&s)[kMmaM][kMmaN][4], int tile) {
  multiply_rows<kBf16, QTile, KVTile, kDim / 16>(
      s, cvta_to_shared(shared.q) + a_lane<QTile>(tid_x_again() / 32 * kWarpRows),
      stage_of(cvta_to_shared(shared.k), tile) + b_lane<KVTile>(0));
}

// O += P V.
FA_DEVICE void gemm_pv(const SparseStorage& shared, float (&o)[kMmaM][kMmaV][4],
                       const uint32 (&p)[kMmaM][kMmaN][2], int tile) {
  add_product<kBf16, KVTile>(o, p,
                             stage_of(cvta_to_shared(shared.v), tile) + b_trans_lane<KVTile>());
}

// Templates, for other builds have no stage.
template <typename Shared>
FA_DEVICE uint32 bias_stage(const Shared& shared) {
  return cvta_to_shared(shared.bias[tid_x_again() / 32]);
}

// Starts to copy the bias of a tile, as a group of its own.
template <typename Shared>
FA_DEVICE void load_bias_tile(const AttentionParams& params, const Shared& shared, int key) {
  if constexpr (kStageBias) {
    stage_bias<kWarpRows, kTileN>(params, shared.work.at.bias, bias_stage(shared),
                                  shared.work.q_begin + tid_x_again() / 32 * kWarpRows,
                                  key * kTileN);
  }
}

// Makes scores of products with the bias that a stage holds.
template <typename Shared>
FA_DEVICE void add_staged_bias(const AttentionParams& params, const Shared& shared,
                               float (&s)[kMmaM][kMmaN][4]) {
  wait_for_staged_bias<1>();  // what was asked for after it may be under way
  const uint32 stage = bias_stage(shared);
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    in_loaded_parts<false>(
        s[i],
        [&](auto& operands, int j) {
          read_staged_bias<kWarpRows, kTileN>(operands, stage, 16 * i, j);
        },
        [&](auto& part, auto& operands, int) { return apply_score_mod(params, part, operands); });
  }
  __syncwarp();  // the stage may be written again
}

// Other dims have no registers for it.
constexpr bool kSoftcapInLog2 = kNearIsLog2 && kDim == 64;

// Makes scores of products where there is a softcap and nothing else: the coefficients of its
// series are in units of log2 already, which saves a multiplication.
FA_DEVICE void softcap_in_log2(const AttentionParams& params, float (&s)[kMmaM][kMmaN][4]) {
  uint32 bits = 0;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) bits |= scale_for_softcap(params, s[i]);
  const bool near = __all_sync(kFullWarp, series_reaches(bits));
  auto each = [&](auto of) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = of(s[i][j][e]);
      }
    }
  };
  if (near) {
    each([&](float t) { return series_of_softcap(params.softcap_series_log2, t); });
  } else {
    each([&](float t) { return scale_score(softcap_by_exp2(params, t), params.exp2_scale); });
  }
}

// Makes scores of products, in units of log2: then what the softmax computes of them is exact, and
// a large bias is no reason to compute a row again.
FA_DEVICE void modify_scores(const AttentionParams& params, const SparseStorage& shared,
                             float (&s)[kMmaM][kMmaN][4], int key) {
  if constexpr (kSoftcapInLog2) return softcap_in_log2(params, s);
  const TileWork& work = shared.work;
  const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
  const int row = work.q_begin + warp * kWarpRows + lane / 4, col = key * kTileN + 2 * (lane % 4);
  const bool is_staged = kStageBias && has_aligned_rows(params, work.at.bias);
  if (is_staged) {
    if constexpr (kStageBias) add_staged_bias(params, shared, s);
  }
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
    if (!is_staged) load_and_apply_score_mod<false>(params, work.at.bias, s[i], row + 16 * i, col);
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = scale_score(s[i][j][e], params.exp2_scale);
    }
  }
}

// Reads which scores of a tile a mask leaves: this thread's words, with the tile's first columns in
// bit 0.  Returns false if the tile is in a full block, which has no words.
FA_DEVICE bool read_visible_bits(const SparseStorage& shared, uint32 (&visible_bits)[kMmaM][2],
                                 int tile) {
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  if (!at.partial) return false;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      visible_bits[i][h] = shared.words[i][tid_x_again()][h] >> at.in_block * (kTileN / 4);
    }
  }
  return true;
}

// Puts -inf where the band hides a key.
FA_DEVICE void mask_by_band(const AttentionParams& params, const TileWork& work,
                            float (&s)[kMmaM][kMmaN][4], int key) {
  const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
  mask_outside_band(params, s, work.q_begin + warp * kWarpRows + lane / 4,
                    key * kTileN + 2 * (lane % 4));
}

// Makes 0 of the weights that are dropped; `key` is the tile's number among all key tiles.
FA_DEVICE void drop_weights(const AttentionParams& params, const SparseStorage& shared,
                            float (&s)[kMmaM][kMmaN][4], int key) {
#if FA_DROPOUT
  const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
  uint32 kept[kMmaM][2];
  make_kept_bits<kTileN>(params.dropout, shared.dropout,
                         shared.work.q_begin + warp * kWarpRows + lane / 4, key * kTileN, kept);
  drop_by_bits(s, kept);
#endif
}

// ---------------------------------------------------------------------------------------- epilogue
// Divides O by the sums of its rows and rounds it.  Each warp turns its own rows of the Q tile,
// which no other warp reads, into output rows.
FA_DEVICE void normalize_o(const AttentionParams& params, uint32 q_tile,
                           const OnlineSoftmax<kMmaM>& softmax, const float (&o)[kMmaM][kMmaV][4],
                           int warp, int lane) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float inverse = inverse_sum(softmax.row_sum[i][h]);
#if FA_DROPOUT
      inverse *= params.dropout.factor;
#endif
      const int row = warp * kWarpRows + 16 * i + 8 * h + lane / 4;
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        const uint32 pair = pack2<kBf16>(o[i][j][2 * h] * inverse, o[i][j][2 * h + 1] * inverse);
        st_shared_b32(q_tile + QTile::offset(row, j) + lane % 4 * 4, pair);
      }
    }
  }
  __syncwarp();
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_fwd_sm80(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SparseStorage& shared = *reinterpret_cast<SparseStorage*>(shared_bytes);
  const uint32 q_tile = cvta_to_shared(shared.q);

  if (threadIdx.x == 0) find_work(params, shared);
  __syncthreads();
  const TileWork& work = shared.work;
  const KeyTiles& band = shared.tiles;
  // Numbers of key tiles; with a mask, tile i is the i-th one that its lists name.
  TileRange tiles = {band.begin, band.end};
  if constexpr (kSparse) {
    if (work.q_rows <= 0) return;
    find_listed_range<kTilesPerBlock>(params.mask, shared.listed, band);
    __syncthreads();
    tiles.begin = 0;
    tiles.end = shared.listed.count();
  }
  if (tiles.begin >= tiles.end) return write_empty_rows(params, work);

  load_first_tiles(params, shared, tiles);
  OnlineSoftmax<kMmaM> softmax;
  softmax.reset();
  float o[kMmaM][kMmaV][4];
  clear(o);

#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    wait_for_tile(tile == tiles.begin);
    if constexpr (kSparse) load_block_index(params, shared, tiles, tile + 2);
    load_bias_tile(params, shared, tile);
    if constexpr (kStages == 1) {
      if (tile > tiles.begin) load_v(params, shared, tile);
    } else if (tile + kStages - 1 < tiles.end) {
      load_k(params, shared, tile + kStages - 1);
      load_v(params, shared, tile + kStages - 1);
    }
    cp_async_commit_group();

    float s[kMmaM][kMmaN][4];
    gemm_qk(shared, s, tile);
    const int key = key_tile(shared, tile);
    if constexpr (kScoreMod) modify_scores(params, shared, s, key);
    if constexpr (kStages == 1) {  // V has landed and K has been read
      cp_async_wait_group<0>();
      __syncthreads();
      if (tile + 1 < tiles.end) load_k(params, shared, tile + 1);
      cp_async_commit_group();
    }
    if constexpr (kSparse) {
      uint32 visible_bits[kMmaM][2];
      if (read_visible_bits(shared, visible_bits, tile)) mask_by_bits(s, visible_bits);
    }
    if (key < band.full_begin || key >= band.full_end) mask_by_band(params, work, s, key);

    // The online softmax: P = exp2(S - row_max), and O follows row_max.
    float correction[kMmaM][2];
    if (softmax.update_max(s, correction, softmax_scale(params))) rescale_o(o, correction);
    softmax.exponentiate<false>(s, softmax_scale(params));
    if constexpr (kDropout) drop_weights(params, shared, s, key);
    uint32 p[kMmaM][kMmaN][2];
    round_weights<kBf16>(s, p);
    if constexpr (kSparse) {  // here and not before, or sm_80 runs out of registers
      load_words(params, shared, tiles, tile + 1);
      cp_async_commit_group();
    }
    gemm_pv(shared, o, p, tile);
  }

  softmax.reduce_row_sum();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = work.q_begin + warp * kWarpRows + lane / 4;
  if (params.sinks != nullptr) {
    float correction[kMmaM][2];
    add_sinks(params, work, softmax, correction, first_row);
    rescale_o(o, correction);
  }
  if constexpr (kPacked) mark_invalid_rows(params, softmax, first_row);
  if (params.lse != nullptr && lane % 4 == 0) write_lse(params, work, softmax, first_row);
  uint32 recompute_lanes[kMmaM][2];
  const bool any_recompute =
      find_rows_to_recompute<kSparse>(params, work, softmax, o, first_row, recompute_lanes);
  cp_async_wait_group<0>();
  normalize_o(params, q_tile, softmax, o, warp, lane);
  uint16* out = static_cast<uint16*>(params.out) + work.at.out +
                static_cast<int64>(work.q_begin) * params.out_row;
  store_rows<kTileM, kDim, kWarpRows>(q_tile, out, params.out_row, warp * kWarpRows, work.q_rows,
                                      params.v_dim, params.aligned);

  if (any_recompute)
    recompute_rows<kBf16, kDim, kSparse>(params, work, out, softmax, recompute_lanes, warp);
}
