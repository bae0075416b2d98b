// Attention forward of few queries and many keys, for SM80 and later: mma.sync, cp.async.
//
// Reading the keys takes the time, so they are shared out over the whole device: a block takes a
// part of the keys (a split) for a tile of query rows, and the last block of a tile to be done
// joins its splits.  Heads that share keys are rows of one tile.  The number of keys of each batch
// entry and the pages that they are in lie in device memory, so that a plan and a captured graph
// serve any of them.
//
// kRowWarps warps have 16 rows each, and kKeyWarps warps share the keys of each tile of kTileN.
#include "cuda_src/common/mma_sm80.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/splitkv_rows.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr int kTileM = FA_TILE_M;      // query rows of a block
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kWarps = FA_WARPS;       // of a block
constexpr int kStages = FA_STAGES;     // K/V tiles in flight
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr int kThreads = 32 * kWarps;
constexpr int kRowWarps = kTileM / 16, kKeyWarps = kWarps / kRowWarps;
constexpr int kWarpKeys = kTileN / kKeyWarps;
constexpr int kMmaN = kWarpKeys / 8;  // products across a warp's keys
constexpr int kMmaV = kDim / 8;       // products across the output's columns
constexpr int kQkParts = kMmaN <= 4 ? kDim / 64 : 1;
static_assert(kDim % 64 == 0 && kDim <= 256, "head_dim is padded to a multiple of 64, at most 256");
static_assert(kRowWarps * kKeyWarps == kWarps && kWarpKeys % 16 == 0, "warps have whole products");
static_assert(kStages >= 2, "a tile is loaded while another one is computed");

using QTile = SharedTile<kTileM, kDim>;
using KVTile = SharedTile<kTileN, kDim>;
constexpr int kChunks = kDim / 8;        // of 16 bytes in a row
constexpr int kLoadRows = kThreads / 8;  // rows that all threads load at once, of 64 columns
constexpr int kPasses = kTileN / kLoadRows;
static_assert(16 % kLoadRows == 0 && kTileN % kLoadRows == 0, "rows of a pass are in one page");

// ---------------------------------------------------------------------------------------- storage
struct KVStages {
  uint16 k[kStages][kTileN * kDim];
  uint16 v[kStages][kTileN * kDim];
};
struct SharedStorage {
  union {
    KVStages tiles;
    float o[kKeyWarps][kTileM * kDim];  // when all tiles are done: of the warps that share rows
  };
  uint16 q[kTileM * kDim];
  float stats[kKeyWarps][kTileM][2];  // row_max and row_sum of each warp
  int is_invalid;                     // whether a length, or the number of a page, is none
  int is_last;                        // whether this block is to join the splits
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

// -------------------------------------------------------------------------------------------- work
struct SplitWork {
  uint32 tile;          // of queries, over all entries
  int64 batch;          // the first head's entry, over all batch axes
  int row_begin, rows;  // of the tile, counted by query and then by head
  int split;
};

FA_DEVICE SplitWork split_work(const FwdSplitkvParams& params) {
  const AttentionParams& p = params.common;
  const uint32 tile = blockIdx.x / static_cast<uint32>(params.splits);
  const int split = static_cast<int>(blockIdx.x - tile * params.splits);
  const uint32 entry = tile / static_cast<uint32>(p.q_tiles);
  const int row_begin = static_cast<int>(tile - entry * p.q_tiles) * kTileM;
  return {tile, (p.first_batch + entry) * params.heads, row_begin,
          min(kTileM, p.q_len * params.heads - row_begin), split};
}

// The tiles of keys of a split: as many as the others have, or one more.
FA_DEVICE TileRange tiles_of_split(const FwdSplitkvParams& params, const SplitWork& work,
                                   const KeyTiles& seen) {
  const int64 count = seen.end - seen.begin;
  return {seen.begin + static_cast<int>(count * work.split / params.splits),
          seen.begin + static_cast<int>(count * (work.split + 1) / params.splits)};
}

// The query and the batch entry of a row of the tile.
struct RowPlace {
  int query;
  int64 batch;
};

FA_DEVICE RowPlace row_place(const FwdSplitkvParams& params, const SplitWork& work, int r) {
  const int row = work.row_begin + r, query = row / params.heads;
  return {query, work.batch + (row - query * params.heads)};
}

// ------------------------------------------------------------------------------------------- loads
// Copies a chunk of eight elements, `count` of them and then zeros, to shared memory at once: for
// rows that are not aligned.
FA_DEVICE void copy_chunk(uint32 to, const uint16* from, int count) {
  uint32 words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32 low = 2 * w < count ? from[2 * w] : 0;
    const uint32 high = 2 * w + 1 < count ? from[2 * w + 1] : 0;
    words[w] = low | high << 16;
  }
  st_shared_v4_b32(to, words);
}

// How many bytes of a chunk there are, of a row of `cols` elements.
FA_DEVICE int chunk_bytes(int cols, int chunk) { return 2 * max(0, min(8, cols - 8 * chunk)); }

FA_DEVICE void load_q(const FwdSplitkvParams& params, const SplitWork& work,
                      const BatchOffsets& offsets, uint32 q_tile) {
  const AttentionParams& p = params.common;
  const int64 head_step = params.heads > 1 ? p.q_batch[p.batch_axes - 1] : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileM * kChunks; i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks;
    const int row = work.row_begin + r, query = row / params.heads;
    const uint16* from = static_cast<const uint16*>(p.q) + offsets.q +
                         (row - query * params.heads) * head_step +
                         static_cast<int64>(query) * p.q_row + 8 * chunk;
    const int bytes = r < work.rows ? chunk_bytes(p.head_dim, chunk) : 0;
    if (params.aligned) {
      cp_async_cg_16(q_tile + QTile::offset(r, chunk), from, bytes);
    } else {
      copy_chunk(q_tile + QTile::offset(r, chunk), from, bytes / 2);
    }
  }
}

// Copies a tile of rows that are not aligned; row_of(key) is where one begins.
template <typename RowOf>
FA_DEVICE void copy_rows(const EntryKeys& keys, int cols, int tile, uint32 to, RowOf row_of) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileN * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, key = tile * kTileN + row;
    const bool exists = key < keys.own_band.k_len;
    copy_chunk(to + KVTile::offset(row, chunk), exists ? row_of(key) + 8 * chunk : nullptr,
               exists ? cols - 8 * chunk : 0);
  }
}

// Where the rows of a tile lie: all threads together load kLoadRows of them in each pass, which are
// in one page.
struct TileRows {
  int page[kPasses];  // its number, 0 without pages
  int row[kPasses];   // of the page, the pass's first one
};

// Sets is_valid to false where the table has no page.
FA_DEVICE TileRows find_rows(const EntryKeys& keys, int tile, bool& is_valid) {
  TileRows found;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    found.page[pass] = 0;
    found.row[pass] = tile * kTileN + pass * kLoadRows;
  }
  if (keys.has_pages()) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int key = found.row[pass], page = keys.page_of(key);
      if (key < keys.own_band.k_len) found.page[pass] = keys.listed_page(page);
      found.row[pass] -= page * keys.params.page_size;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool is_page = keys.is_page(found.page[pass]);
      is_valid = is_valid && is_page;
      if (!is_page) found.page[pass] = 0;
    }
  }
  return found;
}

// Starts to copy the rows of a tile, which are aligned.  A row that does not exist becomes zeros.
FA_DEVICE void load_rows(const TileRows& rows, const uint16* base, int64 page_step, int row_step,
                         int cols, int valid_rows, uint32 to) {
  const int first_row = threadIdx.x / 8, first_chunk = threadIdx.x % 8;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kLoadRows + first_row;
    const uint16* from = base + rows.page[pass] * page_step +
                         static_cast<int64>(rows.row[pass] + first_row) * row_step;
#pragma unroll
    for (int block = 0; block < kChunks / 8; ++block) {
      const int chunk = first_chunk + 8 * block;
      cp_async_cg_16(to + KVTile::offset(row, chunk), from + 8 * chunk,
                     row < valid_rows ? chunk_bytes(cols, chunk) : 0);
    }
  }
}

// Starts to load a tile of keys and values.  Sets is_valid to false where the table has no page.
FA_DEVICE void load_kv(const EntryKeys& keys, SharedStorage& shared, int tile, bool& is_valid) {
  const FwdSplitkvParams& params = keys.params;
  const AttentionParams& p = params.common;
  const uint32 k_tile = cvta_to_shared(shared.tiles.k[tile % kStages]);
  const uint32 v_tile = cvta_to_shared(shared.tiles.v[tile % kStages]);
  const TileRows rows = find_rows(keys, tile, is_valid);
  if (params.aligned) {
    const int valid_rows = keys.own_band.k_len - tile * kTileN;
    load_rows(rows, static_cast<const uint16*>(p.k) + keys.offsets.k, params.k_page, p.k_row,
              p.head_dim, valid_rows, k_tile);
    load_rows(rows, static_cast<const uint16*>(p.v) + keys.offsets.v, params.v_page, p.v_row,
              p.v_dim, valid_rows, v_tile);
  } else {
    copy_rows(keys, p.head_dim, tile, k_tile, [&](int key) { return keys.k(key); });
    copy_rows(keys, p.v_dim, tile, v_tile, [&](int key) { return keys.v(key); });
  }
}

// ---------------------------------------------------------------------------------------- products
// S = Q K^T of a warp's rows and keys.  Each score is kQkParts sums, so that a product does not
// wait for the one before it: a warp has few of them at a time.
FA_DEVICE void gemm_qk(float (&s)[1][kMmaN][4], uint32 q_address, uint32 k_address) {
  float parts[kQkParts][kMmaN][4];
  clear(parts);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32 a[4];
    ldmatrix_x4(a, QTile::at(q_address, 0, step));
#pragma unroll
    for (int j = 0; j < kMmaN; j += 2) {
      uint32 b[4];
      ldmatrix_x4(b, KVTile::at(k_address, 8 * j, step));
      mma_m16n8k16<kBf16>(parts[step % kQkParts][j], a, b[0], b[1]);
      mma_m16n8k16<kBf16>(parts[step % kQkParts][j + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[0][j][e] = parts[0][j][e];
#pragma unroll
      for (int part = 1; part < kQkParts; ++part) s[0][j][e] += parts[part][j][e];
    }
  }
}

// ----------------------------------------------------------------------------------------- softmax
// Makes scores of products, in units of log2.  A row is a query where scores have operands.
FA_DEVICE void modify_scores(const AttentionParams& p, const BatchOffsets& offsets,
                             float (&s)[1][kMmaN][4], int row, int col) {
  load_and_apply_score_mod<false>(p, offsets.bias, s[0], row, col);
#pragma unroll
  for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][j][e] = scale_score(s[0][j][e], p.exp2_scale);
  }
}

// Puts -inf where the band hides a key of the queries of a thread's two rows.
FA_DEVICE void mask_by_band(const KeyBand& band, float (&s)[1][kMmaN][4], const int (&query)[2],
                            int col) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32 visible_bits = visible_columns(band, query[h], col, 2 * kMmaN);
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if ((visible_bits >> (2 * j + e) & 1) == 0) s[0][j][2 * h + e] = -FA_INFINITY;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------- epilogue
// Columns of a row are mixed so that the eight rows of a warp's store are in different banks.
FA_DEVICE int mixed_col(int row, int col) { return col ^ (row % 8 * 8); }

// Leaves a warp's output and the statistics of its rows in shared memory.
FA_DEVICE void share_o(SharedStorage& shared, const OnlineSoftmax<1>& softmax,
                       const float (&o)[1][kMmaV][4], int row_of_warp, int key_warp, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row_of_warp + lane / 4 + 8 * h;
    if (lane % 4 == 0) {
      shared.stats[key_warp][row][0] = softmax.row_max[0][h];
      shared.stats[key_warp][row][1] = softmax.row_sum[0][h];
    }
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      float* to = &shared.o[key_warp][row * kDim + mixed_col(row, 8 * j + 2 * (lane % 4))];
      *reinterpret_cast<float2*>(to) = make_float2(o[0][j][2 * h], o[0][j][2 * h + 1]);
    }
  }
}

// Adds up what the warps that share a row have, in their order.
FA_DEVICE void read_warps(const SharedStorage& shared, int r, RowSums& sums) {
  const int lane = threadIdx.x % 32;
  clear(sums);
#pragma unroll
  for (int w = 0; w < kKeyWarps; ++w) {
    const float row_max = shared.stats[w][r][0], row_sum = shared.stats[w][r][1];
    if (has_no_keys(row_max, row_sum)) continue;
    float acc[kCols];
#pragma unroll
    for (int i = 0; i < kCols; ++i) acc[i] = shared.o[w][r * kDim + mixed_col(r, lane + 32 * i)];
    add_sums(sums, row_max, row_sum, acc);
  }
  if (shared.is_invalid) sums.row_max = invalid_row_max();
}

// Without keys.
FA_DEVICE void share_nothing(SharedStorage& shared) {
  for (int i = threadIdx.x; i < kKeyWarps * kTileM; i += kThreads) {
    shared.stats[i / kTileM][i % kTileM][0] = kNoMax;
    shared.stats[i / kTileM][i % kTileM][1] = 0.0f;
  }
}

// Hands the sums of the tile's rows to the block that joins the splits; returns whether it is this
// one.
FA_DEVICE bool hand_over(const FwdSplitkvParams& params, const SplitWork& work,
                         SharedStorage& shared) {
  for (int r = threadIdx.x / 32; r < work.rows; r += kWarps) {
    const RowPlace at = row_place(params, work, r);
    RowSums sums;
    read_warps(shared, r, sums);
    write_split(params, work.split, at.batch * params.common.q_len + at.query, sums);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.is_last = arrive(params, work.tile) == params.splits - 1;
    if (shared.is_last) params.arrivals[work.tile] = 0;  // a replayed launch begins anew
  }
  __syncthreads();
  return shared.is_last;
}

// ---------------------------------------------------------------------------------------- mainloop
// Computes the split, and leaves the sums of its rows in shared memory.
FA_DEVICE void compute_split(const FwdSplitkvParams& params, const SplitWork& work,
                             const EntryKeys& keys, const KeyTiles& seen, const TileRange& tiles,
                             SharedStorage& shared) {
  const AttentionParams& p = params.common;
  bool is_valid = true;
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.begin + kStages - 1; ++tile) {
    if (tile < tiles.end) load_kv(keys, shared, tile, is_valid);
    if (tile == tiles.begin) load_q(params, work, keys.offsets, cvta_to_shared(shared.q));
    cp_async_commit_group();
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_of_warp = warp % kRowWarps * 16, key_warp = warp / kRowWarps;
  const int first_row = work.row_begin + row_of_warp + lane / 4;
  const int query[2] = {first_row / params.heads, (first_row + 8) / params.heads};
  OnlineSoftmax<1> softmax;
  softmax.reset();
  float o[1][kMmaV][4];
  clear(o);
#pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();  // the tile has landed, and every warp has left the one before it
    if (tile + kStages - 1 < tiles.end) load_kv(keys, shared, tile + kStages - 1, is_valid);
    cp_async_commit_group();

    float s[1][kMmaN][4];
    gemm_qk(s, cvta_to_shared(shared.q) + a_lane<QTile>(row_of_warp),
            cvta_to_shared(shared.tiles.k[tile % kStages]) + b_lane<KVTile>(key_warp * kWarpKeys));
    const int col = tile * kTileN + key_warp * kWarpKeys + 2 * (lane % 4);
    if constexpr (kScoreMod) modify_scores(p, keys.offsets, s, first_row, col);
    if (tile < seen.full_begin || tile >= seen.full_end) mask_by_band(keys.own_band, s, query, col);
    float correction[1][2];
    if (softmax.update_max(s, correction, softmax_scale(p))) rescale_o(o, correction);
    softmax.exponentiate<false>(s, softmax_scale(p));
    uint32 weights[1][kMmaN][2];
    round_weights<kBf16>(s, weights);
    add_product<kBf16, KVTile>(o, weights,
                               cvta_to_shared(shared.tiles.v[tile % kStages]) +
                                   b_trans_lane<KVTile>() +
                                   key_warp * kWarpKeys * KVTile::kRowBytes);
  }
  softmax.reduce_row_sum();
  cp_async_wait_group<0>();
  if (!is_valid) shared.is_invalid = 1;
  __syncthreads();  // every warp has left the tiles
  share_o(shared, softmax, o, row_of_warp, key_warp, lane);
}

// ------------------------------------------------------------------------------------------ kernel
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_fwd_splitkv(const __grid_constant__ FwdSplitkvParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const SplitWork work = split_work(params);
  const BatchOffsets offsets = batch_offsets(params.common, work.batch);
  const EntryKeys keys = entry_keys(params, offsets, work.batch);
  const KeyTiles seen = key_tiles(keys.own_band, work.row_begin / params.heads,
                                  (work.row_begin + work.rows - 1) / params.heads, kTileN);
  const TileRange tiles = tiles_of_split(params, work, seen);
  if (threadIdx.x == 0) shared.is_invalid = !keys.is_valid;
  if (tiles.begin < tiles.end) {
    compute_split(params, work, keys, seen, tiles, shared);
  } else {
    share_nothing(shared);
  }
  __syncthreads();
  if (params.splits > 1 && !hand_over(params, work, shared)) return;
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < work.rows; r += kWarps) {
    const RowPlace at = row_place(params, work, r);
    RowSums sums;
    if (params.splits > 1) {
      read_splits(params, at.batch * params.common.q_len + at.query, sums);
    } else {
      read_warps(shared, r, sums);
    }
    finish_row(params, at.batch, at.query, sums);
  }
}
