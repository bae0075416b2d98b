// What the parts of fwd_sm90 share: constants of a variant, parameters, a block's shared memory.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/barriers.cuh"
#include "cuda_src/common/mask_lists.cuh"
#include "cuda_src/common/schedule.cuh"
#include "cuda_src/common/scores.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/bulk.cuh"
#include "ptx/special.cuh"
#include "ptx/tma.cuh"

constexpr bool kBf16 = FA_BF16;       // bfloat16, else float16
constexpr int kDim = FA_DIM;          // head_dim and v_dim, padded with zeros
constexpr int kGroups = FA_GROUPS;    // warpgroups that compute
constexpr int kTileM = 64 * kGroups;  // query rows of a block
constexpr int kTileN = FA_TILE_N;     // keys of a tile
constexpr int kStages = FA_STAGES;    // K tiles, and V tiles, in flight
constexpr int kQSlots = FA_Q_SLOTS;   // places for a warpgroup's rows of Q, and of its output
// Warpgroups take turns at the tensor cores: one passes its turn on when its products are done
// (exclusive), or when they are asked for.
constexpr bool kExclusive = FA_EXCLUSIVE;
constexpr bool kQRegisters = FA_Q_REGISTERS;  // Q is read from registers, not from shared memory
constexpr bool kTransform = FA_TRANSFORM;     // scale, softcap and bias come before the softmax
constexpr bool kSparse = FA_SPARSE;           // a mask lists blocks of keys and has bits of them
// A warpgroup's softmax starts before its O += P V is done; needs registers that scratch work
// takes.
constexpr bool kOverlap = !kExclusive && !kTransform;
// The last tile may be cut to half its keys; ptxas serialises the products of other builds for it.
constexpr bool kHalves = kTileN == 128 && kDim == 128 && !kTransform && !kSparse;
constexpr bool kEarly = kQSlots >= 2 * kGroups;  // all rows of the next Q are there early
constexpr int kWorkStages = 4;                   // places for announced work
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kBlocks = (kDim + 63) / 64;  // a tile in shared memory has blocks of 64 columns
constexpr int kMmaN = kTileN / 8;
constexpr int kMmaV = kDim / 8;
constexpr int kInBlock = kMaskBlock / kTileN;  // key tiles in a block of a mask
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kFeedingRegisters = kGroups == 2 ? 40 : 32;
constexpr int kComputingRegisters = kGroups == 2 ? 232 : 160;
static_assert(kGroups == 2 || kGroups == 3, "registers are shared out for these");
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kTileN % 16 == 0, "16 keys are one step of a product");
static_assert(!kTransform || kTileN % 32 == 0, "rework_scores takes 32 columns at a time");
static_assert(!kSparse || (kTileM == kMaskBlock && (kInBlock == 1 || kInBlock == 2)),
              "a row of blocks is a tile of queries, a block is one tile of keys or two");
static_assert(kRowMajor == 0 || (kSparse && kInBlock == 1), "a lane takes whole rows of a block");

struct FwdSm90Params {
  TensorMap q_map, k_map, v_map, out_map;
  AttentionParams common;
  Schedule schedule;
  int size[3];                          // batch axes of the maps
  int q_step[3], k_step[3], v_step[3];  // 0 along an axis that the array broadcasts, else 1
  int row_shift;                        // 2**row_shift heads share a tile of queries, row by row
};
static_assert(sizeof(FwdSm90Params) == FA_SM90_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

using QTile = SharedTile<64, 64 * kBlocks>;
constexpr int kQTileBytes = 64 * 128 * kBlocks, kKTileBytes = kTileN * 128 * kBlocks;

// One block's next part of the work.
template <bool kListed>
struct Announcement {
  uint32 entry;       // batch entry, over all launches
  int coordinate[3];  // of the entry along the maps' batch axes
  int q_begin;        // first row of the query tile; -1: there is no more work
  int begin, end;     // key tiles that its rows see; with a mask, how many: from 0 on
};
// What is loaded of a mask's row of blocks, and where the first of both kinds stands in its list.
template <>
struct Announcement<true> : Announcement<false> {
  int full_count, partial_count;  // of blocks
  int64 row, full, partial;
};
using Announced = Announcement<kSparse>;
struct alignas(16) Work : Announced {
  struct alignas(16) Group {
    KeyTiles keys;  // of them a warpgroup's rows may see fewer,
    int half;       // 1 for only half of the last one
  } group[kGroups];
};

// A block's shared memory.
template <bool kListed>
struct Storage {
  uint8 q[kQSlots][kQTileBytes];  // later a tile of the output
  uint8 k[kStages][kKTileBytes];
  uint8 v[kStages][kKTileBytes];
  float scratch[kTransform ? 4 * kGroups : 1][kTransform ? kReworkFloats : 2];
  uint64 q_full[kQSlots], q_empty[kQSlots], out_full[kQSlots];
  uint64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages], work_begun[kWorkStages];
  Work work[kWorkStages];
};
template <>
struct Storage<true> : Storage<false> {
  // Of the tile that is in each place of K: the words of its block, two to a lane of each slab of
  // 16 rows, and twice its number, plus 1 if it has words.
  alignas(16) uint64 words[kStages][kBlockWords / 2];
  int tile[kStages];
};
using SharedStorage = Storage<kSparse>;
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "its variant asks for as much");

enum NamedBarrier : int { kTurn = 1, kEpilogue = kTurn + kGroups };  // one each for a warpgroup

using WorkPlace = RingPlace<kWorkStages>;
using QPlace = RingPlace<kQSlots>;  // all warpgroups' rows of a tile, one after the other

// Rows of a query tile, of all heads that share it.
FA_DEVICE int tile_rows(const FwdSm90Params& params) {
  return params.common.q_len << params.row_shift;
}

// ------------------------------------------------------------------------------------------- masks
// These are templates because only builds for masks have what they name.

constexpr int kPartialLane = 16;  // which knows where the list of partial blocks begins

// Finds the blocks that a row of blocks lists inside the band of its query rows, by a warp; returns
// how many tiles of keys they are.
template <typename Work>
FA_DEVICE int find_blocks(const AttentionParams& p, Work& work, int64 entry, int q_begin) {
  const int lane = threadIdx.x % 32;
  const int64 t = row_of_blocks(p.mask, entry, q_begin, p.q_len);
  const KeyTiles seen = key_tiles(p, q_begin, min(q_begin + kTileM, p.q_len) - 1, kMaskBlock);
  // A quarter of the warp for each end of each list.
  const bool partial = lane >= 16, last = lane / 8 % 2 == 1;
  const int64 begin = (partial ? p.mask.partial_begin : p.mask.full_begin)[t];
  const int64 end = (partial ? p.mask.partial_end : p.mask.full_end)[t];
  int64 place = last ? end : begin;
  if (seen.begin > 0 || seen.end < mask_blocks(p.k_len)) {
    place = first_place<8>(partial ? p.mask.partial : p.mask.full, begin, end,
                           last ? seen.end : seen.begin);
  }
  const int offset = static_cast<int>(place - begin);
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
  return max(1, kInBlock * (full_count + partial_count));
}

// The block that the i-th key tile of a work is in: full blocks come first.
template <typename Work>
FA_DEVICE int listed_block(const AttentionParams& p, const Work& work, int i) {
  const int in_full = i / kInBlock, in_partial = in_full - work.full_count;
  if (in_partial < 0) return p.mask.full[work.full + in_full];
  if (in_partial < work.partial_count) return p.mask.partial[work.partial + in_partial];
  return mask_blocks(p.k_len);
}

// Its words; null for a full one.
template <typename Work>
FA_DEVICE const uint32* listed_words(const AttentionParams& p, const Work& work, int i, int block) {
  const int in_partial = i / kInBlock - work.full_count;
  if (in_partial < 0 || in_partial >= work.partial_count) return nullptr;
  return block_words(p.mask, work.row, work.partial + in_partial, block);
}

// Feeds the key tiles of a work in the order in which they are waited for, by load_keys(tile, bytes
// that come beside it) and load_values(tile).
template <typename Work, typename Shared, typename LoadKeys, typename LoadValues>
FA_DEVICE void feed_listed(const AttentionParams& p, const Work& work, Shared& shared,
                           const RingPlace<kStages>& place, const LoadKeys& load_keys,
                           const LoadValues& load_values) {
  int block = listed_block(p, work, 0), before = 0;
#pragma unroll 1
  for (int i = 0; i <= work.end; ++i) {
    // Asked for before the waits, so that nobody waits for it.
    const int next = i + 1 < work.end ? listed_block(p, work, i + 1) : 0;
    const int tile = block * kInBlock + i % kInBlock;
    if (i < work.end) {
      const uint32* words = listed_words(p, work, i, block);
      const int stage = place.index();
      wait(shared.k_empty[stage], place.parity() ^ 1);
      shared.tile[stage] = 2 * tile + (words != nullptr);
      load_keys(tile, words != nullptr ? 4 * kBlockWords : 0);
      if (words != nullptr) {
        cp_async_bulk_load(cvta_to_shared(shared.words[stage]), words, 4 * kBlockWords,
                           cvta_to_shared(&shared.k_full[stage]));
      }
    }
    if (i > 0) load_values(before);
    before = tile;
    block = next;
  }
}

// This thread's two words of a block, from the first bit of a tile on: a warp that computes has 16
// rows, as a slab of the block has, and the first four warps do not compute.
FA_DEVICE void take_words(const uint64* block, int tile, uint32 (&seen)[1][2 * kLaneWords]) {
  if constexpr (kRowMajor > 0) return take_rows(block, tid_x_again() - 128, seen[0]);
  const uint64 words = block[tid_x_again() - 128];
  const int first_bit = tile % kInBlock * (32 / kInBlock);
  seen[0][0] = static_cast<uint32>(words) >> first_bit;
  seen[0][1] = static_cast<uint32>(words >> 32) >> first_bit;
}

// Reads which tile is in a place of K, and what of it this thread's two rows see; returns whether
// words say so.
template <typename Shared>
FA_DEVICE bool read_tile(const Shared& shared, int stage, int& tile,
                         uint32 (&seen)[1][2 * kLaneWords]) {
  const int found = shared.tile[stage];
  tile = found / 2;
  see_all(seen[0]);
  if (found % 2 == 0) return false;
  take_words(shared.words[stage], tile, seen);
  return true;
}

// The same of the tile that is the i-th of a work, from global memory: when its place of K has been
// given back.
template <typename Work>
FA_DEVICE int tile_again(const AttentionParams& p, const Work& work, int i) {
  return listed_block(p, work, i) * kInBlock + i % kInBlock;
}
template <typename Work>
FA_DEVICE bool words_again(const AttentionParams& p, const Work& work, int i,
                           uint32 (&seen)[1][2 * kLaneWords]) {
  const uint32* words = listed_words(p, work, i, listed_block(p, work, i));
  see_all(seen[0]);
  if (words == nullptr) return false;
  take_words(reinterpret_cast<const uint64*>(words), i, seen);
  return true;
}
