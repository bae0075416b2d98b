// What the parts of fwd_sm90 share: constants of a variant, parameters, a block's shared memory.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/block_lists.cuh"
#include "cuda_src/common/entry_keys.cuh"
#include "cuda_src/common/load_index.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/tile_scheduler.cuh"
#include "ptx/bulk.cuh"
#include "ptx/special.cuh"
#include "ptx/tma.cuh"

constexpr bool kBf16 = FA_BF16;        // bfloat16, else float16
constexpr int kDim = FA_DIM;           // head_dim and v_dim, padded with zeros
constexpr int kGroups = FA_GROUPS;     // warpgroups that compute
constexpr int kTileM = 64 * kGroups;   // query rows of a block
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kStages = FA_STAGES;     // K tiles, and V tiles, in flight
constexpr int kQStages = FA_Q_STAGES;  // stages for a warpgroup's rows of Q, and of its output
// Warpgroups take turns at the tensor cores: one passes its turn on when its products are done
// (exclusive), or when they are asked for.
constexpr bool kExclusiveMma = FA_EXCLUSIVE_MMA;
// Q is read from registers, not from shared memory.
constexpr bool kQInRegisters = FA_Q_IN_REGISTERS;
constexpr bool kSparse = FA_SPARSE;  // a mask lists blocks of keys and has bits of them
// The keys of a tile of queries are split over several work tiles, whose outputs another kernel
// joins (fwd_join_splits).
#ifndef FA_SPLIT
#define FA_SPLIT 0
#endif
constexpr bool kSplit = FA_SPLIT;
// Keys and values are in pages, whose numbers a table has; such builds have kLengths, too.
#ifndef FA_PAGES
#define FA_PAGES 0
#endif
constexpr bool kPages = FA_PAGES;
static_assert(kLengths || !kPages, "the band of an entry is in its work tiles");
// A warpgroup's softmax starts before its O += P V is done.
constexpr bool kOverlapSoftmaxPv = !kExclusiveMma;
// Where it does not, its time shows: there tiles of several sequences are worth a look at which
// rows have a row_max already.
constexpr bool kAsksForMax = kPacked && kExclusiveMma && !kScoreMod;
// The last keys come first: a bias such as ALiBi's is largest at the latest key that a query sees,
// and a row_max that is there from the start moves no more.  Tiles count in the order of the work.
constexpr bool kLastTileFirst = kScoreMod && !kSparse;
// The last tile may be cut to half its keys; ptxas serialises the products of other builds for it.
constexpr bool kHalfLastTile =
    kTileN == 128 && kDim == 128 && !kScoreMod && !kSparse && !kSplit && !kLengths;
constexpr int kHalfTile = kHalfLastTile ? kTileN / 2 : kTileN;
constexpr bool kPrefetchNextQ = kQStages >= 2 * kGroups;  // all rows of the next Q are there early
constexpr int kWorkStages = 4;                            // stages for announced work tiles
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kBlocks = (kDim + 63) / 64;  // a tile in shared memory has blocks of 64 columns
constexpr int kMmaN = kTileN / 8;
constexpr int kMmaV = kDim / 8;
// What scores of a tile are made of is asked for before its products are there; a bias of pairs in
// float32, and what an expression has for each column, take too many registers.
constexpr bool kPrefetchOperands =
    kHasOperands &&
    (kExpression ? !OperandTile<false, kMmaN>::kByCol : kBiasIs16Bit || kBiasAxes != kBiasOfPair);
// A bias of pairs comes by way of shared memory (staged_bias.cuh).  Of 16 bits a tile is read to
// registers before its products are there; of 32 bits it is read beside them, and its stage is free
// only then.
#ifndef FA_STAGE_BIAS
#define FA_STAGE_BIAS 0
#endif
constexpr bool kStageBias = FA_STAGE_BIAS;
constexpr bool kReadBiasLate = kStageBias && !kBiasIs16Bit;
constexpr int kBiasStageBytes = 16 * kTileN * (kBiasIs16Bit ? 2 : 4);  // of a warp
static_assert(!kStageBias || (kBiasAxes == kBiasOfPair && kBiasKind != kFloat64 && !kSparse),
              "there is a tile of a bias to be staged");
constexpr int kQFragments = kQInRegisters ? kDim / 16 : 1;  // A operands of Q that a thread holds
constexpr int kTilesPerBlock = kMaskBlock / kTileN;         // key tiles in a block of a mask
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160;
static_assert(kGroups == 2 || kGroups == 3, "registers are shared out for these");
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kTileN % 16 == 0, "16 keys are one step of a product");
static_assert(!kSparse || (kTileM == kMaskBlock && (kTilesPerBlock == 1 || kTilesPerBlock == 2)),
              "a row of blocks is a tile of queries, a block is one tile of keys or two");

struct FwdSm90Params {
  TensorMap q_map, k_map, v_map, out_map;
  AttentionParams common;
  TileScheduler scheduler;
  int size[3];                          // batch axes of the maps
  int q_step[3], k_step[3], v_step[3];  // 0 along an axis that the array broadcasts, else 1
  int row_shift;                        // 2**row_shift heads share a tile of queries, row by row
  // Of builds with kSplit: as in FwdSplitkvParams.
  int splits;
  int64 rows;
  float* partial_out;
  float* partial_stats;
  // Of builds with kLengths: likewise.
  const void* k_lengths;
  int64 k_lengths_batch[kMaxBatchAxes];
  int k_lengths_bytes;
  int band_from_end;
  // Of builds with kPages: likewise.
  int page_size, page_shift, pages, page_table_bytes;
  const void* page_table;
  int64 page_table_batch[kMaxBatchAxes];
  int64 page_table_col, k_page, v_page;
  int page_axis;  // batch axis of the maps of K and V along which pages lie, not entries
  int page_box;   // keys of a box of these maps, all in one page
};
static_assert(sizeof(FwdSm90Params) == FA_SM90_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

using QTile = SharedTile<64, 64 * kBlocks>;
constexpr int kQTileBytes = 64 * 128 * kBlocks, kKTileBytes = kTileN * 128 * kBlocks;

// One block's next part of the work.
template <bool kListed>
struct WorkTileFields {
  uint32 entry;       // batch entry, over all launches
  int coordinate[3];  // of the entry along the maps' batch axes
  int q_begin;        // first row of the query tile; -1: there is no more work
  int begin, end;     // key tiles that its rows see; with a mask, how many: from 0 on
#if FA_PACKED
  int key_origin;  // the first key of tile 0
#endif
#if FA_SPLIT
  int split;  // which part of the keys
#endif
#if FA_LENGTHS
  KeyBand band;  // of the entry
#endif
#if FA_DROPOUT
  DropoutEntry dropout;  // of the entry
#endif
#if FA_PAGES
  int has_invalid_page;  // written by who loads keys, before the first ones are there
#endif
};
// What is loaded of a mask's row of blocks, and where the first of both kinds stands in its list.
template <>
struct WorkTileFields<true> : WorkTileFields<false> {
  int full_count, partial_count;  // of blocks
  int64 row, full, partial;
};
using WorkTileInfo = WorkTileFields<kSparse>;
struct alignas(16) WorkTile : WorkTileInfo {
  struct alignas(16) Group {
    KeyTiles keys;       // of them a warpgroup's rows may see fewer,
    int half_last_tile;  // 1 for only half of the last one
  } group[kGroups];
};

// A block's shared memory.
struct TileStorage {
  uint8 q[kQStages][kQTileBytes];  // later a tile of the output
  uint8 k[kStages][kKTileBytes];
  uint8 v[kStages][kKTileBytes];
};
template <bool kStaged>
struct BiasStorage : TileStorage {};
template <>
struct BiasStorage<true> : TileStorage {
  uint8 bias[4 * kGroups][kBiasStageBytes];  // of each warp that computes, of its next tile
};
template <bool kListed>
struct Storage : BiasStorage<kStageBias> {
  int64 operands_offset[kHasOperands ? kWorkStages
                                     : 1];  // of the work tiles' batch entries, in elements
  uint64 q_full[kQStages], q_empty[kQStages], out_full[kQStages];
  uint64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages], work_started[kWorkStages];
  WorkTile work[kWorkStages];
};
template <>
struct Storage<true> : Storage<false> {
  // Of the tile that is in each stage of K: the words of its block, two to a lane of each slab of
  // 16 rows, and twice its number, plus 1 if it has words.
  alignas(16) uint64 words[kStages][kBlockWords / 2];
  int tile[kStages];
};
using SharedStorage = Storage<kSparse>;
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

// One each for a warpgroup.
enum NamedBarrier : int { kWarpScheduler = 1, kEpilogue = kWarpScheduler + kGroups };

using WorkPipeline = PipelineState<kWorkStages>;
using KVPipeline = PipelineState<kStages>;  // one for K, one for V
using QPipeline = PipelineState<kQStages>;  // all warpgroups' rows of a tile, one after the other

// The first key of a work tile's key tiles.  Sequences begin anywhere, and so do tiles in builds
// for packed ones: on a grid of kTileN keys a sequence would touch half a tile more.
FA_DEVICE int key_origin(const WorkTileInfo& work) {
#if FA_PACKED
  return work.key_origin;
#else
  return 0;
#endif
}

// Which keys the rows of a batch entry see.
#if FA_LENGTHS
FA_DEVICE const KeyBand& band_of(const FwdSm90Params&, const WorkTileInfo& work) {
  return work.band;
}
FA_DEVICE KeyBand band_of_entry(const FwdSm90Params& params, int64 entry) {
  const AttentionParams& p = params.common;
  const int64 place = element_of_entry(p, entry << params.row_shift, params.k_lengths_batch);
#if FA_PAGES
  const bool has_length = params.k_lengths != nullptr;
#else
  constexpr bool has_length = true;
#endif
  const int length =
      has_length ? load_index(params.k_lengths, place, params.k_lengths_bytes) : p.k_len;
  return band_or_invalid(p, length, params.band_from_end);
}
#else
FA_DEVICE const AttentionParams& band_of(const FwdSm90Params& params, const WorkTileInfo&) {
  return params.common;
}
FA_DEVICE const AttentionParams& band_of_entry(const FwdSm90Params& params, int64) {
  return params.common;
}
#endif

// Rows of a query tile, of all heads that share it.
FA_DEVICE int tile_rows(const FwdSm90Params& params) {
  return params.common.q_len << params.row_shift;
}

// ------------------------------------------------------------------------------------------- masks
// These are templates because only builds for masks have what they name.

constexpr int kPartialLane = 16;  // which knows where the list of partial blocks begins

// Finds the blocks that a row of blocks lists inside the band of its query rows, by a warp; returns
// how many tiles of keys they are.
template <typename WorkTile>
FA_DEVICE int find_blocks(const AttentionParams& p, WorkTile& work, int64 entry, int q_begin) {
  const int lane = threadIdx.x % 32;
  const int64 t = row_of_blocks(p.mask, entry, q_begin, p.q_len);
  const KeyTiles band_blocks =
      key_tiles(p, q_begin, min(q_begin + kTileM, p.q_len) - 1, kMaskBlock);
  // A quarter of the warp for each end of each list.
  const bool partial = lane >= 16, is_end = lane / 8 % 2 == 1;
  const int64 begin = (partial ? p.mask.partial_begin : p.mask.full_begin)[t];
  const int64 end = (partial ? p.mask.partial_end : p.mask.full_end)[t];
  int64 position = is_end ? end : begin;
  if (band_blocks.begin > 0 || band_blocks.end < mask_blocks(p.k_len)) {
    position = lower_bound<8>(partial ? p.mask.partial : p.mask.full, begin, end,
                              is_end ? band_blocks.end : band_blocks.begin);
  }
  const int offset = static_cast<int>(position - begin);
  const int first = __shfl_sync(kFullWarp, offset, lane & 16);
  const int count = __shfl_sync(kFullWarp, offset, lane | 8) - first;
  const int full_count = __shfl_sync(kFullWarp, count, 0);
  const int partial_count = __shfl_sync(kFullWarp, count, 16);
  if (lane == 0) {
    work.row = t;
    work.full_count = full_count;
    work.partial_count = partial_count;
    work.full = begin + first;
  } else if (lane == kPartialLane) {
    work.partial = begin + first;
  }
  // A row that lists nothing goes through one tile past the last key, which is hidden as such.
  return max(1, kTilesPerBlock * (full_count + partial_count));
}

// The block that the i-th key tile of a work is in: full blocks come first.
template <typename WorkTile>
FA_DEVICE int listed_block(const AttentionParams& p, const WorkTile& work, int i) {
  const int in_full = i / kTilesPerBlock, in_partial = in_full - work.full_count;
  if (in_partial < 0) return p.mask.full[work.full + in_full];
  if (in_partial < work.partial_count) return p.mask.partial[work.partial + in_partial];
  return mask_blocks(p.k_len);
}

// Its words; null for a full one.
template <typename WorkTile>
FA_DEVICE const uint32* listed_words(const AttentionParams& p, const WorkTile& work, int i,
                                     int block) {
  const int in_partial = i / kTilesPerBlock - work.full_count;
  if (in_partial < 0 || in_partial >= work.partial_count) return nullptr;
  return block_words(p.mask, work.row, work.partial + in_partial, block);
}

// Feeds the key tiles of a work in the order in which they are waited for, by load_k(tile, bytes
// that come beside it) and load_v(tile).
template <typename WorkTile, typename Shared, typename LoadK, typename LoadV>
FA_DEVICE void load_listed_kv(const AttentionParams& p, const WorkTile& work, Shared& shared,
                              const KVPipeline& k_pipe, const LoadK& load_k, const LoadV& load_v) {
  int block = listed_block(p, work, 0), previous_tile = 0;
#pragma unroll 1
  for (int i = 0; i <= work.end; ++i) {
    // Asked for before the waits, so that nobody waits for it.
    const int next = i + 1 < work.end ? listed_block(p, work, i + 1) : 0;
    const int tile = block * kTilesPerBlock + i % kTilesPerBlock;
    if (i < work.end) {
      const uint32* words = listed_words(p, work, i, block);
      const int stage = k_pipe.index();
      wait(shared.k_empty[stage], k_pipe.parity() ^ 1);
      shared.tile[stage] = 2 * tile + (words != nullptr);
      load_k(tile, words != nullptr ? 4 * kBlockWords : 0);
      if (words != nullptr) {
        cp_async_bulk_load(cvta_to_shared(shared.words[stage]), words, 4 * kBlockWords,
                           cvta_to_shared(&shared.k_full[stage]));
      }
    }
    if (i > 0) load_v(previous_tile);
    previous_tile = tile;
    block = next;
  }
}

// This thread's two words of a block, from the first bit of a tile on: a warp that computes has 16
// rows, as a slab of the block has, and the first four warps do not compute.
FA_DEVICE void extract_words(const uint64* block, int tile, uint32 (&visible_bits)[1][2]) {
  const uint64 words = block[tid_x_again() - 128];
  const int first_bit = tile % kTilesPerBlock * (32 / kTilesPerBlock);
  visible_bits[0][0] = static_cast<uint32>(words) >> first_bit;
  visible_bits[0][1] = static_cast<uint32>(words >> 32) >> first_bit;
}

// Reads which tile is in a stage of K, and what of it this thread's two rows see; returns whether
// words say so.
template <typename Shared>
FA_DEVICE bool read_mask_tile(const Shared& shared, int stage, int& tile,
                              uint32 (&visible_bits)[1][2]) {
  const int packed_tile = shared.tile[stage];
  tile = packed_tile / 2;
  set_all_visible(visible_bits[0]);
  if (packed_tile % 2 == 0) return false;
  extract_words(shared.words[stage], tile, visible_bits);
  return true;
}

// The same of the tile that is the i-th of a work, from global memory: when its stage of K has been
// given back.
template <typename WorkTile>
FA_DEVICE int reload_tile_number(const AttentionParams& p, const WorkTile& work, int i) {
  return listed_block(p, work, i) * kTilesPerBlock + i % kTilesPerBlock;
}
template <typename WorkTile>
FA_DEVICE bool reload_mask_words(const AttentionParams& p, const WorkTile& work, int i,
                                 uint32 (&visible_bits)[1][2]) {
  const uint32* words = listed_words(p, work, i, listed_block(p, work, i));
  set_all_visible(visible_bits[0]);
  if (words == nullptr) return false;
  extract_words(reinterpret_cast<const uint64*>(words), i, visible_bits);
  return true;
}
