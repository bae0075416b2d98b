// What the parts of fwd_sm90 share: constants of a variant, parameters, a block's shared memory.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/barriers.cuh"
#include "cuda_src/common/schedule.cuh"
#include "cuda_src/common/scores.cuh"
#include "cuda_src/common/shared_tile.cuh"
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
// A warpgroup's softmax starts before its O += P V is done; needs registers that scratch work
// takes.
constexpr bool kOverlap = !kExclusive && !kTransform;
// The last tile may be cut to half its keys; ptxas serialises the products of other builds for it.
constexpr bool kHalves = kTileN == 128 && kDim == 128 && !kTransform;
constexpr bool kEarly = kQSlots >= 2 * kGroups;  // all rows of the next Q are there early
constexpr int kWorkStages = 4;                   // places for announced work
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kBlocks = (kDim + 63) / 64;  // a tile in shared memory has blocks of 64 columns
constexpr int kMmaN = kTileN / 8;
constexpr int kMmaV = kDim / 8;
// 65,536 registers are shared out in eights (PTX ISA 9.7.19.5 "setmaxnreg").
constexpr int kFeedingRegisters = kGroups == 2 ? 40 : 32;
constexpr int kComputingRegisters = kGroups == 2 ? 232 : 160;
static_assert(kGroups == 2 || kGroups == 3, "registers are shared out for these");
static_assert(kDim % 32 == 0 && kDim <= 256, "head_dim is padded to a multiple of 32, at most 256");
static_assert(kTileN % 16 == 0, "16 keys are one step of a product");
static_assert(!kTransform || kTileN % 32 == 0, "rework_scores takes 32 columns at a time");

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
struct Announced {
  uint32 entry;       // batch entry, over all launches
  int coordinate[3];  // of the entry along the maps' batch axes
  int q_begin;        // first row of the query tile; -1: there is no more work
  int begin, end;     // key tiles that its rows see
};
struct alignas(16) Work : Announced {
  struct alignas(16) Group {
    KeyTiles keys;  // of them a warpgroup's rows may see fewer,
    int half;       // 1 for only half of the last one
  } group[kGroups];
};

struct SharedStorage {
  uint8 q[kQSlots][kQTileBytes];  // later a tile of the output
  uint8 k[kStages][kKTileBytes];
  uint8 v[kStages][kKTileBytes];
  float scratch[kTransform ? 4 * kGroups : 1][kTransform ? kReworkFloats : 2];
  uint64 q_full[kQSlots], q_empty[kQSlots], out_full[kQSlots];
  uint64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages], work_begun[kWorkStages];
  Work work[kWorkStages];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu/variants.py asks for as much");

enum NamedBarrier : int { kTurn = 1, kEpilogue = kTurn + kGroups };  // one each for a warpgroup

using WorkPlace = RingPlace<kWorkStages>;
using QPlace = RingPlace<kQSlots>;  // all warpgroups' rows of a tile, one after the other

// Rows of a query tile, of all heads that share it.
FA_DEVICE int tile_rows(const FwdSm90Params& params) {
  return params.common.q_len << params.row_shift;
}
