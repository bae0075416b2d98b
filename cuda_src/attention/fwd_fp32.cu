// Attention forward of float32 for SM80 and later, on float16 tensor cores: mma.sync, ldmatrix,
// cp.async.
//
// As in fwd_sm80.cu, a block takes kTileM query rows of one batch entry, and each warp keeps 16 of
// them, with their scores, weights and outputs, in its registers.  Here every operand is a pair of
// float16 (cuda_src/common/split_float.cuh) and every product is three.  Rows of Q, K and V are
// copied to where their pairs are going to be and split there (split_in_place.cuh).  Weights are
// split in registers.
//
// Each row of Q, K and V has an exponent of its own, and so has each row of the output, so that a
// row of small numbers is as accurate as one of large numbers.  A row of scores in which small
// numbers beside large ones would count is computed again, key by key.  Tensor cores cut what they
// add towards zero: no sum of theirs is longer than kLongestSum steps, and all others are float32.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/forward_fp32.cuh"
#include "cuda_src/common/forward_sm80.cuh"
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/split_in_place.cuh"
#include "cuda_src/common/split_products.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kDim = FA_DIM;           // head_dim and v_dim, padded with zeros
constexpr int kTileM = FA_TILE_M;      // query rows of a block
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kWarps = FA_WARPS;       // of a block
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr bool kSparse = FA_SPARSE;    // with a mask
constexpr int kThreads = 32 * kWarps;
constexpr int kMmaN = kTileN / 8;  // products across a tile's keys
constexpr int kMmaV = kDim / 8;    // products across the output's columns
constexpr int kTilesPerBlock = kMaskBlock / kTileN;
constexpr int kAtOnce = 4;  // sums that a warp has under way, so that they do not wait
// Steps of one sum of scores.
constexpr int kScoreSteps = kDim / 16 % kLongestSum == 0 ? kLongestSum : kDim / 16 % 3 == 0 ? 3 : 2;
// Where registers are short, a barrier keeps the compiler from moving the loads of later sums up.
constexpr bool kWaitsForSums = kDim > 64 && kTileN > 32;
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kTileM == 16 * kWarps && kWarps >= 4,
              "a warp owns 16 rows; each of four warps finds one end of a list");
static_assert(kTileN % 16 == 0 && kTileN / 16 <= kLongestSum && kMaskBlock % kTileN == 0 &&
                  kMaskBlock % kTileM == 0,
              "the keys of a tile are one sum, and tiles divide the blocks of a mask");

using QTile = PairTile<kTileM, kDim, kWarps>;
using KVTile = PairTile<kTileN, kDim, kWarps>;

// ---------------------------------------------------------------------------------------- storage
struct SharedStorage {
  uint16 q[2][kTileM * kDim];  // high parts, low parts
  uint16 k[2][kTileN * kDim];
  uint16 v[2][kTileN * kDim];
  // A row of Q, or of K, is the square of this times that of its tile.
  float q_factor[kTileM], k_factor[kTileN];
  int v_exponent[kTileN];  // a row of V is 2^e times that of its tile; or one without a number
  TileWork work;
  KeyTiles band;
  TileRange tiles;
#if FA_DROPOUT
  DropoutEntry dropout;
#endif
};
struct SparseStorage : SharedStorage {  // only with a mask
  ListedRange listed;
  int keys[2];  // key blocks of this tile and the next one
  uint32 words[kThreads][2];
};
static_assert((kSparse ? sizeof(SparseStorage) : sizeof(SharedStorage)) == FA_SHARED_BYTES,
              "the host launches with this size");

// ------------------------------------------------------------------------------------------ tiles
// Numbers of tiles of keys: those of the block's band, or places among those that a mask lists.

// The number of a tile of the loop among all key tiles.
FA_DEVICE int key_tile(const SparseStorage& shared, int tile) {
  if constexpr (!kSparse) {
    return tile;
  } else {
    return shared.keys[tile % 2] * kTilesPerBlock +
           listed_tile<kTilesPerBlock>(shared.listed, tile).in_block;
  }
}

// Copies the number of a tile's key block, for all threads.
FA_DEVICE void load_block_index(const AttentionParams& params, SparseStorage& shared,
                                const TileRange& tiles, int tile) {
  if (tid_x_again() != 0 || tile >= tiles.end) return;
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  cp_async_ca<4>(cvta_to_shared(&shared.keys[tile % 2]),
                 (at.partial ? params.mask.partial : params.mask.full) + at.position);
}

// Copies this thread's own words of a partial block.
FA_DEVICE void load_words(const AttentionParams& params, SparseStorage& shared, int tile) {
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  if (!at.partial) return;
  const int tid = tid_x_again();
  const uint32* words =
      block_words(params.mask, shared.listed.row, at.position, shared.keys[tile % 2]) +
      (shared.work.q_begin % kMaskBlock / 16 + tid / 32) * kSlabWords + 2 * (tid % 32);
  cp_async_ca<8>(cvta_to_shared(shared.words[tid]), words);
}

// Finds the queries of the block and its tiles of keys.
FA_DEVICE void find_work(const AttentionParams& params, SparseStorage& shared) {
  if (threadIdx.x == 0) {
    shared.work = kSparse ? masked_tile_work(params, kTileM) : tile_work(params, kTileM);
#if FA_DROPOUT
    shared.dropout = dropout_entry(params.dropout, shared.work.batch);
#endif
    shared.band = key_tiles(params, shared.work.q_begin,
                            shared.work.q_begin + shared.work.q_rows - 1, kTileN);
    restrict_to_length(params, shared.work, shared.band, kTileN);
    if constexpr (kSparse) {
      shared.listed.row =
          row_of_blocks(params.mask, shared.work.batch, shared.work.q_begin, params.q_len);
    }
    shared.tiles = {shared.band.begin, shared.band.end};
  }
  __syncthreads();
  if constexpr (kSparse) {
    if (shared.work.q_rows <= 0) return;
    find_listed_range<kTilesPerBlock>(params.mask, shared.listed, shared.band);
    __syncthreads();
    if (threadIdx.x == 0) shared.tiles = {0, shared.listed.count()};
    __syncthreads();
    load_block_index(params, shared, shared.tiles, 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    __syncthreads();
  }
}

FA_DEVICE void load_q(const AttentionParams& params, const SharedStorage& shared) {
  QTile::load(cvta_to_shared(shared.q), static_cast<const float*>(params.q) + shared.work.at.q,
              params.q_row, shared.work.q_begin, params.q_len, params.head_dim, params.aligned);
}

// With the words of a mask that this thread needs.
FA_DEVICE void load_k(const AttentionParams& params, SparseStorage& shared, int tile) {
  KVTile::load(cvta_to_shared(shared.k), static_cast<const float*>(params.k) + shared.work.at.k,
               params.k_row, key_tile(shared, tile) * kTileN, band_of(params, shared.work).k_len,
               params.head_dim, params.aligned);
  if constexpr (kSparse) load_words(params, shared, tile);
}

// With the number of the next tile's key block.
FA_DEVICE void load_v(const AttentionParams& params, SparseStorage& shared, const TileRange& tiles,
                      int tile) {
  KVTile::load(cvta_to_shared(shared.v), static_cast<const float*>(params.v) + shared.work.at.v,
               params.v_row, key_tile(shared, tile) * kTileN, band_of(params, shared.work).k_len,
               params.v_dim, params.aligned);
  if constexpr (kSparse) load_block_index(params, shared, tiles, tile + 1);
}

// ----------------------------------------------------------------------------------------- scores
// S = Q K^T of a warp's rows.  `most` is the product of the factors of each row and of the largest
// key of this thread's columns: no term of a product is larger than 2^30 times its square.
FA_DEVICE void gemm_qk(const SharedStorage& shared, float (&s)[1][kMmaN][4], float (&most)[2]) {
  constexpr int kCount = kMmaN < kAtOnce ? kMmaN : kAtOnce;
  const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
  const uint32 q_address = cvta_to_shared(shared.q) + a_lane<QTile::Tile>(16 * warp);
  const uint32 k_address = cvta_to_shared(shared.k) + b_lane<KVTile::Tile>(0);
  clear(s);
#pragma unroll
  for (int j = 0; j < kMmaN; j += kCount) {
#pragma unroll
    for (int first = 0; first < kDim / 16; first += kScoreSteps) {
      SplitSum sums[kAtOnce];
#pragma unroll
      for (int n = 0; n < kCount; ++n) sums[n].clear();
#pragma unroll
      for (int step = first; step < first + kScoreSteps; ++step) {
        uint32 a[4], a_low[4], b[kAtOnce][2], b_low[kAtOnce][2];
        ldmatrix_x4(a, QTile::Tile::at(q_address, 0, step));
        ldmatrix_x4(a_low, QTile::Tile::at(q_address, 0, step) + QTile::kLow);
#pragma unroll
        for (int n = 0; n < kCount; n += 2) {
          read_pairs<false, KVTile::kLow>(b, b_low, n,
                                          KVTile::Tile::at(k_address, 8 * (j + n), step));
        }
        multiply_pairs(sums, a, a_low, b, b_low, kCount);
      }
#pragma unroll
      for (int e = 0; e < 4 * kCount; ++e) s[0][j + e / 4][e % 4] += sums[e / 4].value(e % 4);
    }
  }
  // Half of the exponents is applied twice, because float32 may not hold all of it.
  const float* q_factor = shared.q_factor + 16 * warp + lane / 4;
  const float row_factor[2] = {q_factor[0], q_factor[8]};
  float most_factor = 0.0f;
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
    const float2 k_factor =
        *reinterpret_cast<const float2*>(shared.k_factor + 8 * j + 2 * (lane % 4));
    most_factor = fmaxf(most_factor, fmaxf(k_factor.x, k_factor.y));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float factor = row_factor[e / 2] * (e % 2 ? k_factor.y : k_factor.x);
      s[0][j][e] = s[0][j][e] * factor * factor;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) most[h] = row_factor[h] * most_factor;
}

// Makes scores of products, in natural units.
FA_DEVICE void modify_scores(const AttentionParams& params, const TileWork& work,
                             float (&s)[1][kMmaN][4], int key_tile) {
  const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
  load_and_apply_score_mod<false>(params, work.at.bias, s[0], work.q_begin + 16 * warp + lane / 4,
                                  key_tile * kTileN + 2 * (lane % 4));
}

// Puts -inf where a mask hides a key: bit 0 of a word is the first column of the tile.
FA_DEVICE void mask_by_words(const SparseStorage& shared, float (&s)[1][kMmaN][4], int tile) {
  const ListedTile at = listed_tile<kTilesPerBlock>(shared.listed, tile);
  if (!at.partial) return;  // the tile is in a full block, which has no words
  uint32 visible_bits[1][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    visible_bits[0][h] = shared.words[tid_x_again()][h] >> at.in_block * (kTileN / 4);
  }
  mask_by_bits(s, visible_bits);
}

// Puts -inf where the band hides a key.
FA_DEVICE void mask_by_band(const AttentionParams& params, const TileWork& work,
                            float (&s)[1][kMmaN][4], int key_tile) {
  const int lane = tid_x_again() % 32, warp = tid_x_again() / 32;
  mask_outside_band(band_of(params, work), s, work.q_begin + 16 * warp + lane / 4,
                    key_tile * kTileN + 2 * (lane % 4));
}

// ---------------------------------------------------------------------------------------- values
// O += factor * (P V), 32 columns at a time.  The product of a tile begins with sums of zero, which
// are then added in float32.
FA_DEVICE void gemm_pv(const SharedStorage& shared, float (&o)[1][kMmaV][4],
                       const float (&weights)[1][kMmaN][4], const float (&factor)[2]) {
  SplitPair p[kMmaN][2];
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p[j][h] = split(weights[0][j][2 * h], weights[0][j][2 * h + 1]);
    }
  }
  const uint32 v_address = cvta_to_shared(shared.v) + b_trans_lane<KVTile::Tile>();
#pragma unroll
  for (int first = 0; first < kMmaV; first += kAtOnce) {
    SplitSum sums[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) sums[n].clear();
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      uint32 a[4], a_low[4], b[kAtOnce][2], b_low[kAtOnce][2];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        a[r] = p[2 * step + r / 2][r % 2].high;
        a_low[r] = p[2 * step + r / 2][r % 2].low;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; n += 2) {
        read_pairs<true, KVTile::kLow>(b, b_low, n,
                                       KVTile::Tile::at(v_address, 16 * step, (first + n) / 2));
      }
      multiply_pairs(sums, a, a_low, b, b_low, kAtOnce);
    }
#pragma unroll
    for (int e = 0; e < 4 * kAtOnce; ++e) {
      float& x = o[0][first + e / 4][e % 4];
      x = fmaf(sums[e / 4].value(e % 4), factor[e % 4 / 2], x);
    }
    if (kWaitsForSums) __syncwarp();
  }
}

// ----------------------------------------------------------------------------------------- kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_fwd_fp32(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SparseStorage& shared = *reinterpret_cast<SparseStorage*>(shared_bytes);
  find_work(params, shared);
  // They stay in shared memory and are read there at each use: registers are short in the loop.
  const TileWork& work = shared.work;
  const KeyTiles& band = shared.band;
  const TileRange& tiles = shared.tiles;
  if (kSparse && work.q_rows <= 0) return;

  Rows rows;
  rows.softmax.reset();
  rows.unit[0] = rows.unit[1] = kNoExponent;
  float o[1][kMmaV][4];
  clear(o);
  if (tiles.begin < tiles.end) {
    load_q(params, shared);
    load_k(params, shared, tiles.begin);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    QTile::split_rows(cvta_to_shared(shared.q), [&](int row, int exponent, float) {
      shared.q_factor[row] = power_of_two(-exponent / 2);
    });
  }

#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    // K has landed: each warp splits what its own threads have copied.  The barrier also says that
    // every warp has left V.
    cp_async_wait_group<0>();
    KVTile::split_rows(cvta_to_shared(shared.k), [&](int row, int exponent, float) {
      shared.k_factor[row] = power_of_two(-exponent / 2);
    });
    __syncthreads();
    load_v(params, shared, tiles, tile);
    cp_async_commit_group();

    float s[1][kMmaN][4], most[2];
    gemm_qk(shared, s, most);
    const int key = key_tile(shared, tile);
    if constexpr (kScoreMod) modify_scores(params, work, s, key);
    if constexpr (kSparse) mask_by_words(shared, s, tile);
    if (key < band.full_begin || key >= band.full_end) mask_by_band(params, work, s, key);
    TileSums sums;
    find_max(s, sums);
    check_range<50>(params, shared.q_factor + 16 * (tid_x_again() / 32), shared.k_factor, s, most,
                    rows, sums);
    exponentiate(s, sums, sums.max, {params.exp2_scale, params.exp2_scale});
    if constexpr (kDropout) {
      drop_weights(params, shared, s, work.q_begin + tid_x_again() / 32 * 16, key * kTileN);
    }

    // The same for V, and every warp has left K.
    cp_async_wait_group<0>();
    KVTile::split_rows(cvta_to_shared(shared.v), [&](int row, int exponent, float largest) {
      const int k_len = band_of(params, work).k_len;
      const int of_zeros = key * kTileN + row < k_len ? kZeroExponent : kNoExponent;
      shared.v_exponent[row] = largest == 0.0f ? of_zeros : -exponent;
    });
    __syncthreads();
    if (tile + 1 < tiles.end) load_k(params, shared, tile + 1);
    cp_async_commit_group();

    int top[2];
    weigh_by_exponents(shared.v_exponent, s, top);
    float correction[1][2], factor[2];
    if (join_tile(rows, sums, top, params.exp2_scale, correction, factor)) {
      rescale_o(o, correction);
    }
    gemm_pv(shared, o, s, factor);
  }
  finish_rows<kSparse>(params, work, rows, o, threadIdx.x / 32);
}
