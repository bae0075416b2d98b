// Attention forward for SM90: TMA, wgmma, warp specialisation, a persistent grid.
//
// A block works on kTileM query rows of one batch entry at a time.  Three threads of its first
// warpgroup feed it (one draws up the order of work and loads keys and values, one loads queries,
// one stores outputs), the other kGroups warpgroups compute, each on 64 rows of its own.  For each
// tile of kTileN keys a warpgroup starts S = Q K^T of that tile and O += P V of the tile before,
// and turns S into the next P while the tensor cores are busy with what it or its neighbours have
// started (docs: "Reading fwd_sm90").
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/barriers.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/hidden_keys.cuh"
#include "cuda_src/common/rescore.cuh"
#include "cuda_src/common/schedule.cuh"
#include "cuda_src/common/scores.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "cuda_src/common/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

// -------------------------------------------------------------------------------------- constants
constexpr bool kBf16 = FA_BF16;        // bfloat16, else float16
constexpr int kDim = FA_DIM;           // head_dim and v_dim, padded with zeros
constexpr int kGroups = FA_GROUPS;     // warpgroups that compute
constexpr int kTileM = 64 * kGroups;   // query rows of a block
constexpr int kTileN = FA_TILE_N;      // keys of a tile
constexpr int kStages = FA_STAGES;     // K tiles, and V tiles, in flight
constexpr int kQStages = FA_Q_STAGES;  // Q tiles in flight
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
constexpr int kWorkStages = 4;  // tiles of work announced ahead
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

// ---------------------------------------------------------------------------------------- storage
using QTile = SharedTile<64, 64 * kBlocks>;
constexpr int kQTileBytes = 64 * 128 * kBlocks, kKTileBytes = kTileN * 128 * kBlocks;

// One block's next part of the work.
struct Work {
  int64 entry;        // batch entry, over all launches
  int coordinate[3];  // of the entry along the maps' batch axes
  int q_begin;        // first row of the query tile; -1: there is no more work
  int begin, end;     // key tiles that its rows see
};

struct SharedStorage {
  uint8 q[kQStages][kGroups][kQTileBytes];  // later the output tile
  uint8 k[kStages][kKTileBytes];
  uint8 v[kStages][kKTileBytes];
  float scratch[kTransform ? 4 * kGroups : 1][kTransform ? kReworkFloats : 2];
  uint64 q_full[kQStages][kGroups], q_empty[kQStages][kGroups], out_full[kQStages][kGroups];
  uint64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64 work_full[kWorkStages], work_empty[kWorkStages];
  Work work[kWorkStages];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu/variants.py asks for as much");

enum NamedBarrier : int { kTurn = 1, kEpilogue = kTurn + kGroups };  // one each for a warpgroup

using WorkPlace = RingPlace<kWorkStages>;
using QPlace = RingPlace<kQStages>;

// Rows of a query tile, of all heads that share it.
FA_DEVICE int tile_rows(const FwdSm90Params& params) {
  return params.common.q_len << params.row_shift;
}

// ----------------------------------------------------------------------------------------- feeding
FA_DEVICE Work work_of(const FwdSm90Params& params, uint32 index) {
  Work work = {0, {0, 0, 0}, -1, 0, 0};
  if (index >= params.schedule.tiles) return work;
  const AttentionParams& p = params.common;
  const Tile tile = tile_of(params.schedule, p.q_tiles, index);
  work.entry = p.first_batch + tile.entry;
  int64 rest = work.entry;
#pragma unroll
  for (int axis = 2; axis > 0; --axis) {
    const int64 next = divide(rest, params.size[axis]);
    work.coordinate[axis] = static_cast<int>(rest - next * params.size[axis]);
    rest = next;
  }
  work.coordinate[0] = static_cast<int>(rest);
  work.q_begin = tile.row_tile * kTileM;
  const int last = min(work.q_begin + kTileM, tile_rows(params)) - 1;
  const KeyTiles keys =
      key_tiles(p, work.q_begin >> params.row_shift, last >> params.row_shift, kTileN);
  work.begin = keys.begin;
  work.end = keys.end;
  return work;
}

// The schedule, and tiles of K and V.
FA_DEVICE void feed_keys(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPlace place;
  RingPlace<kStages> k_place, v_place;
  uint32 index = blockIdx.x;
  bool first = true;
#pragma unroll 1
  while (true) {
    const Work work = work_of(params, index);
    wait(shared.work_empty[place.index()], place.parity() ^ 1);
    shared.work[place.index()] = work;
    arrive(shared.work_full[place.index()]);
    place.advance();
    if (work.q_begin < 0) break;
    // A ticket takes a microsecond: it comes while tiles are loaded.
    uint32 ticket = 0;
    if (!first) ticket = take_ticket(params.schedule);
    auto load = [&](uint8(&tiles)[kStages][kKTileBytes], uint64(&full)[kStages],
                    uint64(&empty)[kStages], RingPlace<kStages>& at, const TensorMap& map,
                    const int (&step)[3], int tile) {
      wait(empty[at.index()], at.parity() ^ 1);
      const uint32 barrier = cvta_to_shared(&full[at.index()]);
      mbarrier_arrive_expect_tx(barrier, kKTileBytes);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_load(cvta_to_shared(&tiles[at.index()][block * kTileN * 128]), &map,
                                     barrier, kEvictLast, 64 * block, tile * kTileN,
                                     work.coordinate[2] * step[2], work.coordinate[1] * step[1],
                                     work.coordinate[0] * step[0]);
      }
      at.advance();
    };
    // In the order in which they are waited for: K of a tile before V of the one before it.
#pragma unroll 1
    for (int tile = work.begin; tile <= work.end; ++tile) {
      if (tile < work.end) {
        load(shared.k, shared.k_full, shared.k_empty, k_place, params.k_map, params.k_step, tile);
      }
      if (tile > work.begin) {
        load(shared.v, shared.v_full, shared.v_empty, v_place, params.v_map, params.v_step,
             tile - 1);
      }
    }
    if (params.schedule.counter == nullptr) {
      index = params.schedule.tiles;
    } else {
      if (first) ticket = take_first_ticket(params.schedule);
      index = tile_for(params.schedule, ticket);
    }
    first = false;
  }
}

// The next announced work; the announcement may be overwritten afterwards.
FA_DEVICE Work next_work(SharedStorage& shared, WorkPlace& place) {
  wait(shared.work_full[place.index()], place.parity());
  const Work work = shared.work[place.index()];
  arrive(shared.work_empty[place.index()]);
  place.advance();
  return work;
}

// The second and third coordinate of a box of 64 rows of Q or of the output: row and last batch
// axis, or, with several heads in a tile, head and row.
FA_DEVICE void row_coordinates(const FwdSm90Params& params, int row, int batch, int (&c)[2]) {
  c[0] = params.row_shift ? 0 : row;
  c[1] = params.row_shift ? row >> params.row_shift : batch;
}

FA_DEVICE void feed_queries(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPlace place;
  QPlace q_place;
#pragma unroll 1
  while (true) {
    const Work work = next_work(shared, place);
    if (work.q_begin < 0) break;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.q_empty[q_place.index()][group], q_place.parity() ^ 1);
      const uint32 barrier = cvta_to_shared(&shared.q_full[q_place.index()][group]);
      mbarrier_arrive_expect_tx(barrier, kQTileBytes);
      int c[2];
      row_coordinates(params, work.q_begin + 64 * group, work.coordinate[2] * params.q_step[2], c);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_load(
            cvta_to_shared(&shared.q[q_place.index()][group][block * 64 * 128]), &params.q_map,
            barrier, kEvictFirst, 64 * block, c[0], c[1], work.coordinate[1] * params.q_step[1],
            work.coordinate[0] * params.q_step[0]);
      }
    }
    q_place.advance();
  }
}

FA_DEVICE void store_outputs(const FwdSm90Params& params, SharedStorage& shared) {
  WorkPlace place;
  QPlace q_place;
#pragma unroll 1
  while (true) {
    const Work work = next_work(shared, place);
    if (work.q_begin < 0) break;
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      wait(shared.out_full[q_place.index()][group], q_place.parity());
      int c[2];
      row_coordinates(params, work.q_begin + 64 * group, work.coordinate[2], c);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        cp_async_bulk_tensor_5d_store(
            &params.out_map, cvta_to_shared(&shared.q[q_place.index()][group][block * 64 * 128]),
            kEvictFirst, 64 * block, c[0], c[1], work.coordinate[1], work.coordinate[0]);
      }
      cp_async_bulk_commit_group();
      cp_async_bulk_wait_group_read<0>();
      arrive(shared.q_empty[q_place.index()][group]);
    }
    q_place.advance();
  }
  cp_async_bulk_wait_group<0>();
}

// -------------------------------------------------------------------------------------- computing
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

FA_DEVICE void compute(const FwdSm90Params& params, SharedStorage& shared, int warp) {
  const AttentionParams& p = params.common;
  const int group = warp / 4 - 1, lane = threadIdx.x % 32;
  const int warp_row = warp % 4 * 16;  // of this warp in its warpgroup's 64
  // Where this lane's row of the four matrices of an ldmatrix.x4 or stmatrix.x4 lies: rows 0-7,
  // 8-15, then the same of the next 8 columns (PTX ISA 9.7.14.5.15).
  const uint32 q_lane = QTile::lane_offset(warp_row + lane % 16, lane / 16);
  WorkPlace place;
  QPlace q_place;
  RingPlace<kStages> k_place, v_place;
  auto release = [&](const uint64& barrier) {
    if (lane == 0) arrive(barrier);
  };
  auto take_turn = [&]() { bar_sync(kTurn + group, 256); };
  auto pass_turn = [&]() { bar_arrive(kTurn + (group + 1) % kGroups, 256); };
  if (group == kGroups - 1) pass_turn();  // the first one's

#pragma unroll 1
  while (true) {
    wait(shared.work_full[place.index()], place.parity());
    const Work& work = shared.work[place.index()];  // left there: registers are short in the loop
    const int q_begin = work.q_begin, tiles_begin = work.begin, tiles_end = work.end;
    if (q_begin < 0) break;

    // Of the block's key tiles this warpgroup's rows may see fewer, and only half of the last one.
    const int first_row = q_begin + 64 * group;
    const int rows = min(64, tile_rows(params) - first_row);
    KeyTiles keys = {0, 0, 0, 0};
    if (rows > 0) {
      keys = key_tiles(p, first_row >> params.row_shift, (first_row + rows - 1) >> params.row_shift,
                       kTileN);
    }
    const bool half = kHalves && keys.begin < keys.end &&
                      last_key(p, (first_row + rows - 1) >> params.row_shift) <
                          (keys.end - 1) * kTileN + kTileN / 2;

    OnlineSoftmax<1> softmax;
    softmax.reset();
    float o[1][kMmaV][4];
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[0][j][e] = 0.0f;
    }
    float s[1][kMmaN][4];
    uint32 weights[1][kMmaN][2];
    uint32 q[kQRegisters ? kDim / 16 : 1][4];

    wait(shared.q_full[q_place.index()][group], q_place.parity());
    const uint32 q_tile = cvta_to_shared(shared.q[q_place.index()][group]);
    if constexpr (kQRegisters) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        ldmatrix_x4(q[step], QTile::at(q_tile + q_lane, 0, step));
      }
    }

    // S = Q K^T of the first kCols keys of a tile, started.
    auto start_scores = [&](auto cols) {
      constexpr int kCols = decltype(cols)::value;
      const uint64 b = wgmma_descriptor(cvta_to_shared(shared.k[k_place.index()]), 0);
      const uint64 a = wgmma_descriptor(q_tile, 0);
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        // 16 columns are 32 bytes of a block's rows; descriptors count in 16 bytes.
        const uint64 b_step = b + (step / 4 * kTileN * 128 + step % 4 * 32) / 16;
        if constexpr (kQRegisters) {
          wgmma_m64k16_rs<kBf16, kCols, kKMajor>(s[0], q[step], b_step, step > 0);
        } else {
          const uint64 a_step = a + (step / 4 * 64 * 128 + step % 4 * 32) / 16;
          wgmma_m64k16_ss<kBf16, kCols>(s[0], a_step, b_step, step > 0);
        }
      }
      wgmma_commit_group();
    };
    // O += P V over the first kCols keys of a tile, started.
    auto start_outputs = [&](auto cols) {
      const uint64 b = wgmma_descriptor(cvta_to_shared(shared.v[v_place.index()]), kTileN * 128);
#pragma unroll
      for (int step = 0; step < decltype(cols)::value / 16; ++step) {
        const uint32 a[4] = {weights[0][2 * step][0], weights[0][2 * step][1],
                             weights[0][2 * step + 1][0], weights[0][2 * step + 1][1]};
        wgmma_m64k16_rs<kBf16, kDim>(o[0], a, b + step * (16 * 128 / 16), 1);
      }
      wgmma_commit_group();
    };
    auto skip_tile = [&]() {
      take_turn();
      pass_turn();
      wait(shared.k_full[k_place.index()], k_place.parity());
      __syncwarp();  // or a lane that comes late would find the phase after the next
      release(shared.k_empty[k_place.index()]);
      k_place.advance();
      wait(shared.v_full[v_place.index()], v_place.parity());
      __syncwarp();
      release(shared.v_empty[v_place.index()]);
      v_place.advance();
    };
    // The products of a tile with Q and of the tile before it with its weights, then its own
    // weights.
    auto step = [&](auto first, auto cols, int tile) {
      constexpr bool kFirst = decltype(first)::value;
      constexpr int kCols = decltype(cols)::value;
      auto& s_used = reinterpret_cast<float (&)[1][kCols / 8][4]>(s);
      auto& weights_used = reinterpret_cast<uint32(&)[1][kCols / 8][2]>(weights);
      wait(shared.k_full[k_place.index()], k_place.parity());
      take_turn();
      wgmma_fence();
      start_scores(cols);
      if constexpr (!kFirst) {
        wait(shared.v_full[v_place.index()], v_place.parity());
        wgmma_fence();
        start_outputs(Constant<kTileN>());
      }
      if constexpr (!kExclusive) pass_turn();
      if constexpr (kOverlap && !kFirst) {
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      if constexpr (kExclusive) pass_turn();
      release(shared.k_empty[k_place.index()]);
      k_place.advance();
      auto release_values = [&]() {
        if constexpr (!kFirst) {
          release(shared.v_empty[v_place.index()]);
          v_place.advance();
        }
      };
      if constexpr (!kOverlap) release_values();
      auto finish_scores = [&]() {
        if constexpr (kTransform) {
          rework_scores(p, batch_offsets(p, work.entry), s_used, shared.scratch[warp - 4],
                        first_row + warp_row, tile * kTileN);
        }
        if (tile < keys.full_begin || tile >= keys.full_end) {
          hide_outside(p, s_used, first_row + warp_row + lane / 4, tile * kTileN + 2 * (lane % 4),
                       params.row_shift);
        }
      };
      finish_scores();
      // Rows have a reference once they have seen a key.
      const bool trusting = !kFirst && !kTransform && tile > keys.full_begin;
      if (trusting && softmax.trust(s_used, p.exp2_scale)) {
        if constexpr (kOverlap) wgmma_wait_group<0>();
      } else {
        if (trusting) {  // the scores are gone
          rescore<kBf16, QTile, kDim / 16>(p, work.entry << params.row_shift, s_used,
                                           q_tile + q_lane, tile * kTileN);
          finish_scores();
        }
        float correction[1][2];
        const bool moved = softmax.raise(s_used, correction, p.exp2_scale);
        softmax.exponentials<true>(s_used, p.exp2_scale);
        if constexpr (kOverlap) wgmma_wait_group<0>();
        if (!kFirst && moved) {
#pragma unroll
          for (int j = 0; j < kMmaV; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) o[0][j][e] *= correction[0][e / 2];
          }
        }
      }
      round_weights<kBf16>(s_used, weights_used);
      if constexpr (kOverlap) release_values();
    };

    int tile = tiles_begin;
#pragma unroll 1
    for (; tile < min(keys.begin, tiles_end); ++tile) skip_tile();
    if (keys.begin < keys.end) {
      constexpr Constant<kTileN> kAll;
      constexpr Constant<kHalves ? kTileN / 2 : kTileN> kHalf;
      step(Constant<1>(), kAll, tile);
      ++tile;
#pragma unroll 1
      for (; tile < keys.end - half; ++tile) step(Constant<0>(), kAll, tile);
      if (half && tile < keys.end) step(Constant<0>(), kHalf, tile);
      wait(shared.v_full[v_place.index()], v_place.parity());
      if (half) {
        wgmma_fence();
        start_outputs(kHalf);
      } else {
        wgmma_fence();
        start_outputs(kAll);
      }
      wgmma_wait_group<0>();
      release(shared.v_empty[v_place.index()]);
      v_place.advance();
      tile = keys.end;
    }
#pragma unroll 1
    for (; tile < tiles_end; ++tile) skip_tile();

    // ----------------------------------------------------------------------------------- epilogue
    softmax.finish();
    const int my_row = first_row + warp_row + lane / 4;
    auto position = [&](int row) {  // of a row's entry in LSE
      const int64 head = (work.entry << params.row_shift) + (row & ((1 << params.row_shift) - 1));
      return head * p.q_len + (row >> params.row_shift);
    };
    if (p.lse != nullptr && lane % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (my_row + 8 * h < tile_rows(params)) {
          p.lse[position(my_row + 8 * h)] = log_sum_exp(softmax.reference[0][h], softmax.sum[0][h]);
        }
      }
    }
    uint32 broken[2];  // lanes whose part of a row is not finite
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float probe[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // NaN once an accumulator is NaN or infinite
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        probe[j % 2 * 2] = fmaf(o[0][j][2 * h], 0.0f, probe[j % 2 * 2]);
        probe[j % 2 * 2 + 1] = fmaf(o[0][j][2 * h + 1], 0.0f, probe[j % 2 * 2 + 1]);
      }
      const float all = (probe[0] + probe[1]) + (probe[2] + probe[3]);
      broken[h] = __ballot_sync(kFullWarp, all != all);
    }
    const float inverse[2] = {inverse_sum(softmax.sum[0][0]), inverse_sum(softmax.sum[0][1])};
    // The output overwrites Q: of this warp's rows where they were in registers, else of them all.
    if constexpr (!kQRegisters) bar_sync(kEpilogue + group, 128);
#pragma unroll
    for (int j = 0; j < kMmaV; j += 2) {
      stmatrix_x4(QTile::at(q_tile + q_lane, 0, j / 2),
                  pack2<kBf16>(o[0][j][0] * inverse[0], o[0][j][1] * inverse[0]),
                  pack2<kBf16>(o[0][j][2] * inverse[1], o[0][j][3] * inverse[1]),
                  pack2<kBf16>(o[0][j + 1][0] * inverse[0], o[0][j + 1][1] * inverse[0]),
                  pack2<kBf16>(o[0][j + 1][2] * inverse[1], o[0][j + 1][3] * inverse[1]));
    }
    if ((broken[0] | broken[1]) != 0) {
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll 1
        for (int r = 0; r < 8; ++r) {
          if ((broken[h] >> 4 * r & 15) == 0) continue;
          const int row_in_group = warp_row + 8 * h + r, row = first_row + row_in_group;
          const float reference = __shfl_sync(kFullWarp, softmax.reference[0][h], 4 * r);
          const float sum = __shfl_sync(kFullWarp, softmax.sum[0][h], 4 * r);
          // A sum that is NaN makes the whole row NaN, which it is already.
          if (row >= tile_rows(params) || sum != sum) continue;
          const int64 head = position(row) / p.q_len;
          attend_row<kBf16, (kDim + 31) / 32 * 32>(
              p, batch_offsets(p, head), row >> params.row_shift, reference, sum,
              [&](int col, uint16 x) {
                const uint32 at = QTile::offset(row_in_group, col / 8) + col % 8 * 2;
                *reinterpret_cast<uint16*>(&shared.q[q_place.index()][group][at]) = x;
              });
        }
      }
    }
    fence_proxy_async_shared();
    __syncwarp();
    release(shared.out_full[q_place.index()][group]);
    release(shared.work_empty[place.index()]);
    q_place.advance();
    place.advance();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_fwd_sm90(const __grid_constant__ FwdSm90Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) {
      for (int group = 0; group < kGroups; ++group) {
        init(shared.q_full[i][group], 1);
        init(shared.q_empty[i][group], 1);
        init(shared.out_full[i][group], 4);
      }
    }
    for (int i = 0; i < kStages; ++i) {
      init(shared.k_full[i], 1);
      init(shared.k_empty[i], 4 * kGroups);
      init(shared.v_full[i], 1);
      init(shared.v_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      init(shared.work_full[i], 1);
      init(shared.work_empty[i], 4 * kGroups + 2);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (warp >= 4) {
    setmaxnreg_inc<kComputingRegisters>();
    compute(params, shared, warp);
  } else {
    setmaxnreg_dec<kFeedingRegisters>();
    if (warp == 0 && elect_sync()) {
      prefetch_tensormap(&params.k_map);
      prefetch_tensormap(&params.v_map);
      feed_keys(params, shared);
    } else if (warp == 1 && elect_sync()) {
      prefetch_tensormap(&params.q_map);
      feed_queries(params, shared);
    } else if (warp == 2 && elect_sync()) {
      prefetch_tensormap(&params.out_map);
      store_outputs(params, shared);
    }
  }
}
