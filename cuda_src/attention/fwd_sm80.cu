// Attention forward for SM80 and later: mma.sync, ldmatrix, cp.async.
//
// One block takes kTileM query rows of one batch entry; each warp takes kTileM / kWarps of them
// and, tile by tile of kTileN keys, computes S = Q K^T, turns S into weights P by the online
// softmax and adds P V.  S, P and O stay in the registers of the warp that owns the rows: an
// accumulator of m16n8k16 has the layout of an A operand, so P needs no shuffle (docs: "Reading
// fwd_sm80").  K and V come through kStages buffers filled by cp.async.
//
// With a mask the tiles of keys are those that its lists name for the block's rows, full ones
// first.  What is needed of the lists comes by cp.async too: the number of each key block two tiles
// ahead, and each thread's own words of a partial block one tile ahead.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/recompute_row.cuh"
#include "cuda_src/common/score_mod.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/softmax.cuh"

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
constexpr int kMmaM = kWarpRows / 16;  // products down a warp's rows
constexpr int kMmaN = kTileN / 8;      // products across a tile's keys
constexpr int kMmaV = kDim / 8;        // products across the output's columns
// Tiles of keys in a block of a mask; stages for numbers of key blocks: this tile's, the next two.
constexpr int kTilesPerBlock = kSparse ? kMaskBlock / kTileN : 1, kBlockIndexStages = 4;
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kTileM == kWarps * kMmaM * 16, "a warp owns whole 16-row products");
static_assert(kTileN * kDim * 2 >= kWarps * kScoreModFloats * 4,
              "a K tile holds every warp's scratch");
static_assert(kTileN % 32 == 0, "apply_score_mod takes 32 columns at a time");
static_assert(kStages >= 1 && kStages <= 4, "one buffer each of K and V at least");
static_assert(!kSparse || (kTilesPerBlock * kTileN == kMaskBlock && kMaskBlock % kTileM == 0),
              "tiles divide the blocks of a mask");
static_assert(!kSparse || (kStages <= 2 && kWarps == 4),
              "a tile is loaded one tile ahead; each warp looks for one end of a list");

using QTile = SharedTile<kTileM, kDim>;
using KVTile = SharedTile<kTileN, kDim>;

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint16 q[kTileM * kDim];  // later the output tile
  uint16 k[kStages][kTileN * kDim];
  uint16 v[kStages][kTileN * kDim];
  TileWork work;
  KeyTiles tiles;
};
// What a mask lists for the block's rows, in tiles of keys: kTilesPerBlock for each entry of a
// list.
struct ListedRange {
  int64 row;       // of blocks
  uint64 full[2];  // first and last + 1
  uint64 partial[2];

  __device__ __forceinline__ int full_count() const { return static_cast<int>(full[1] - full[0]); }
  __device__ __forceinline__ int count() const {
    return full_count() + static_cast<int>(partial[1] - partial[0]);
  }
};
struct SparseStorage : SharedStorage {  // only with a mask
  ListedRange listed;
  int keys[kBlockIndexStages];  // key blocks of the coming tiles
  uint32 words[kMmaM][kThreads][2];
};
static_assert((kSparse ? sizeof(SparseStorage) : sizeof(SharedStorage)) == FA_SHARED_BYTES,
              "its variant asks for as much");

// The i-th tile of keys that a mask lists, full blocks first.
struct ListedTile {
  bool partial;
  bool first_listed;  // of the partial block's tiles that are listed
  int64 position;     // of its block in the list
  int in_block;       // which of the block's tiles
};

FA_DEVICE ListedTile listed_tile(const ListedRange& listed, int i) {
  const int after_full = i - listed.full_count();
  const bool partial = after_full >= 0;
  const uint64 tile = partial ? listed.partial[0] + after_full : listed.full[0] + i;
  const int in_block = static_cast<int>(tile % kTilesPerBlock);
  return {partial, in_block == 0 || after_full == 0, static_cast<int64>(tile / kTilesPerBlock),
          in_block};
}

// Finds what a mask lists for a row of blocks of the tiles that a band leaves.  Each warp finds one
// end of one list.
FA_DEVICE void find_listed_range(const MaskLists& mask, ListedRange& listed,
                                 const KeyTiles& tiles) {
  const int warp = threadIdx.x / 32, last = warp % 2;
  const bool partial = warp >= 2;
  const int64 begin = (partial ? mask.partial_begin : mask.full_begin)[listed.row];
  const int64 end = (partial ? mask.partial_end : mask.full_end)[listed.row];
  const int64 end_position = lower_bound_tile<kTilesPerBlock>(
      partial ? mask.partial : mask.full, begin, end, last ? tiles.end : tiles.begin);
  if (threadIdx.x % 32 == 0) (partial ? listed.partial : listed.full)[last] = end_position;
}

// The result of a block whose rows see no key at all.
FA_DEVICE void write_empty_rows(const AttentionParams& params, const TileWork& work) {
  uint16* out = static_cast<uint16*>(params.out) + work.at.out;
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < work.q_rows; r += kWarps) {
    const int64 row = work.q_begin + r;
    for (int col = threadIdx.x % 32; col < params.v_dim; col += 32) {
      out[row * params.out_row + col] = 0;
    }
    if (params.lse != nullptr && threadIdx.x % 32 == 0) {
      params.lse[work.batch * params.q_len + row] = -FA_INFINITY;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_fwd_sm80(const __grid_constant__ AttentionParams params) {
  // ---------------------------------------------------------------------------------------- setup
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SparseStorage& shared = *reinterpret_cast<SparseStorage*>(shared_bytes);
  const uint32 q_tile = cvta_to_shared(shared.q);
  const uint32 k_stages = cvta_to_shared(shared.k), v_stages = cvta_to_shared(shared.v);
  constexpr uint32 kTileBytes = kTileN * kDim * 2;

  if (threadIdx.x == 0) {
    shared.work = kSparse ? masked_tile_work(params, kTileM) : tile_work(params, kTileM);
    shared.tiles = key_tiles(params, shared.work.q_begin,
                             shared.work.q_begin + shared.work.q_rows - 1, kTileN);
    if constexpr (kSparse) {
      shared.listed.row =
          row_of_blocks(params.mask, shared.work.batch, shared.work.q_begin, params.q_len);
    }
  }
  __syncthreads();
  const TileWork& work = shared.work;  // left there: registers are short in the loop
  const KeyTiles& tiles = shared.tiles;
  int tiles_begin = tiles.begin, tiles_end = tiles.end;
  if constexpr (kSparse) {  // the tiles that are listed and in the band
    if (work.q_rows <= 0) return;
    find_listed_range(params.mask, shared.listed, tiles);
    __syncthreads();
    tiles_begin = 0;
    tiles_end = shared.listed.count();
  }
  if (tiles_begin >= tiles_end) return write_empty_rows(params, work);
  const uint16* q = static_cast<const uint16*>(params.q) + work.at.q;

  // Which of all tiles of keys a tile is.
  auto key_tile = [&](int tile) {
    if constexpr (!kSparse) {
      return tile;
    } else {
      return shared.keys[tile % kBlockIndexStages] * kTilesPerBlock +
             listed_tile(shared.listed, tile).in_block;
    }
  };
  // Tile `tile` into its stage: rows of K, or of V.
  auto load_k = [&](int tile) {
    const uint16* k = static_cast<const uint16*>(params.k) + work.at.k;
    load_tile<kTileN, kDim, kThreads>(k_stages + tile % kStages * kTileBytes, k, params.k_row,
                                      key_tile(tile) * kTileN, params.k_len, params.head_dim,
                                      params.aligned);
  };
  auto load_v = [&](int tile) {
    const uint16* v = static_cast<const uint16*>(params.v) + work.at.v;
    load_tile<kTileN, kDim, kThreads>(v_stages + tile % kStages * kTileBytes, v, params.v_row,
                                      key_tile(tile) * kTileN, params.k_len, params.v_dim,
                                      params.aligned);
  };
  // The number of a tile's key block, for all threads; and this thread's own words of the block.
  auto load_block_index = [&](int tile) {
    if (tid_x_again() != 0 || tile >= tiles_end) return;
    const ListedTile at = listed_tile(shared.listed, tile);
    cp_async_ca<4>(cvta_to_shared(&shared.keys[tile % kBlockIndexStages]),
                   (at.partial ? params.mask.partial : params.mask.full) + at.position);
  };
  auto load_words = [&](int tile) {
    const ListedTile at = listed_tile(shared.listed, tile);
    if (tile >= tiles_end || !at.partial || !at.first_listed) return;
    const int tid = tid_x_again(), lane = tid % 32, warp = tid / 32;
    const uint32* words = block_words(params.mask, shared.listed.row, at.position,
                                      shared.keys[tile % kBlockIndexStages]) +
                          (work.q_begin % kMaskBlock + warp * kWarpRows) / 16 * kSlabWords +
                          2 * lane;
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
      cp_async_ca<8>(cvta_to_shared(shared.words[i][tid]), words + i * kSlabWords);
    }
  };

  if constexpr (kSparse) {
    load_block_index(0);
    cp_async_commit_group();
  }
  load_tile<kTileM, kDim, kThreads>(q_tile, q, params.q_row, work.q_begin, params.q_len,
                                    params.head_dim, params.aligned);
  if constexpr (kSparse) {
    cp_async_wait_group<0>();
    __syncthreads();
    load_block_index(1);
    load_words(0);
  }
  // With one stage K and V of the first tile are groups of their own; with more a group is a tile.
#pragma unroll 1
  for (int tile = tiles_begin; tile < tiles_begin + max(1, kStages - 1); ++tile) {
    if (tile < tiles_end) load_k(tile);
    if constexpr (kStages == 1) cp_async_commit_group();
    if (tile < tiles_end) load_v(tile);
    cp_async_commit_group();
  }

  OnlineSoftmax<kMmaM> softmax;
  softmax.reset();
  float o[kMmaM][kMmaV][4];
  clear(o);

  // -------------------------------------------------------------------------------- tiles of keys
#pragma unroll 1
  for (int tile = tiles_begin; tile < tiles_end; ++tile) {
    // This tile has landed once at most kStages - 2 later groups are under way.  The barrier also
    // says that every warp has left the buffers that are filled next: with one stage V's, which
    // lands during the product with K, and after that product K's; with more the pair of an earlier
    // tile.
    if (kStages == 1 && tile == tiles_begin) {
      cp_async_wait_group<1>();
    } else {
      cp_async_wait_group < kStages<2 ? 0 : kStages - 2>();
    }
    __syncthreads();
    if constexpr (kSparse) load_block_index(tile + 2);
    if constexpr (kStages == 1) {
      if (tile > tiles_begin) load_v(tile);
    } else if (tile + kStages - 1 < tiles_end) {
      load_k(tile + kStages - 1);
      load_v(tile + kStages - 1);
    }
    cp_async_commit_group();

    float s[kMmaM][kMmaN][4];
    multiply_rows<kBf16, QTile, KVTile, kDim / 16>(
        s, q_tile + a_lane<QTile>(tid_x_again() / 32 * kWarpRows),
        k_stages + tile % kStages * kTileBytes + b_lane<KVTile>(0));

    const int key = key_tile(tile);
    if (params.has_score_mod) {
      __syncthreads();  // K's buffer has been read by all; each warp takes a part of it
      const int warp = tid_x_again() / 32;
      float* scratch = reinterpret_cast<float*>(shared.k[tile % kStages]) + warp * kScoreModFloats;
      apply_score_mod(params, work.at, s, scratch, work.q_begin + warp * kWarpRows, key * kTileN);
    }
    if constexpr (kStages == 1) {
      cp_async_wait_group<0>();
      __syncthreads();
      if (tile + 1 < tiles_end) load_k(tile + 1);
      cp_async_commit_group();
    }
    if constexpr (kSparse) {
      const ListedTile at = listed_tile(shared.listed, tile);
      if (at.partial) {
        uint32 words[kMmaM][2];
#pragma unroll
        for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            words[i][h] = shared.words[i][tid_x_again()][h] >> at.in_block * (kTileN / 4);
          }
        }
        mask_by_bits(s, words);
      }
    }
    if (key < tiles.full_begin || key >= tiles.full_end) {
      const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
      mask_outside_band(params, s, work.q_begin + warp * kWarpRows + lane / 4,
                        key * kTileN + 2 * (lane % 4));
    }

    float correction[kMmaM][2];
    if (softmax.update_max(s, correction, params.exp2_scale)) {
#pragma unroll
      for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
        for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][j][e] *= correction[i][e / 2];
        }
      }
    }
    uint32 p[kMmaM][kMmaN][2];
    softmax.exponentiate<false>(s, params.exp2_scale);
    round_weights<kBf16>(s, p);

    if constexpr (kSparse) {  // here and not before, or sm_80 runs out of registers
      load_words(tile + 1);
      cp_async_commit_group();
    }
    add_product<kBf16, KVTile>(o, p,
                               v_stages + tile % kStages * kTileBytes + b_trans_lane<KVTile>());
  }

  // ------------------------------------------------------------------------------------- epilogue
  softmax.reduce_row_sum();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Of the rows that this thread holds.
  const int first_row = work.q_begin + warp * kWarpRows + lane / 4;
  if (params.lse != nullptr && lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + 16 * i + 8 * h;
        if (row < params.q_len) {
          params.lse[work.batch * params.q_len + row] =
              log_sum_exp(softmax.row_max[i][h], softmax.row_sum[i][h]);
        }
      }
    }
  }

  uint32 recompute_lanes[kMmaM][2], any_recompute = 0;  // lanes whose row is to be computed again
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_sum = softmax.row_sum[i][h];
      float probe = 0.0f * row_sum;  // NaN as soon as one accumulator, or this, is NaN or infinite
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        probe = fmaf(o[i][j][2 * h + 1], 0.0f, fmaf(o[i][j][2 * h], 0.0f, probe));
      }
      const bool exceeds_float32 = exceeds_float32_scores<true, kSparse>(
          params, first_row + 16 * i + 8 * h, softmax.row_max[i][h], row_sum);
      recompute_lanes[i][h] = __ballot_sync(kFullWarp, exceeds_float32 || probe != probe);
      any_recompute |= recompute_lanes[i][h];
    }
  }
  cp_async_wait_group<0>();

  // Each warp turns its own rows of the Q tile, which no other warp reads, into output rows.
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = inverse_sum(softmax.row_sum[i][h]);
      const int row = warp * kWarpRows + 16 * i + 8 * h + lane / 4;
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        const uint32 pair = pack2<kBf16>(o[i][j][2 * h] * inverse, o[i][j][2 * h + 1] * inverse);
        st_shared_b32(q_tile + QTile::offset(row, j) + lane % 4 * 4, pair);
      }
    }
  }
  __syncwarp();
  uint16* out = static_cast<uint16*>(params.out) + work.at.out +
                static_cast<int64>(work.q_begin) * params.out_row;
  store_rows<kTileM, kDim, kWarpRows>(q_tile, out, params.out_row, warp * kWarpRows, work.q_rows,
                                      params.v_dim, params.aligned);

  if (any_recompute == 0) return;
  __syncwarp();
#pragma unroll 1
  for (int r = 0; r < kWarpRows; ++r) {
    const int row = work.q_begin + warp * kWarpRows + r;
    const int row_lane = r % 8 * 4;  // the row's first lane
    if ((recompute_lanes[0][0] >> row_lane & 15) != 0 && row < params.q_len) {
      uint16* to = out + static_cast<int64>(row - work.q_begin) * params.out_row;
      recompute_row<kBf16, kDim, kSparse>(params, work.at, work.batch, row,
                                          __shfl_sync(kFullWarp, softmax.row_max[0][0], row_lane),
                                          __shfl_sync(kFullWarp, softmax.row_sum[0][0], row_lane),
                                          [&](int col, uint16 x) { to[col] = x; });
    }
    if (r % 8 < 7) continue;
    // Registers have no index: what belongs to the next eight rows moves to the first place.
#pragma unroll
    for (int part = 1; part < 2 * kMmaM; ++part) {
      recompute_lanes[(part - 1) / 2][(part - 1) % 2] = recompute_lanes[part / 2][part % 2];
      softmax.row_max[(part - 1) / 2][(part - 1) % 2] = softmax.row_max[part / 2][part % 2];
      softmax.row_sum[(part - 1) / 2][(part - 1) % 2] = softmax.row_sum[part / 2][part % 2];
    }
  }
}
