// dQ of attention backward from what bwd_sm90 has added up: scaled, rounded, in rows.
//
// A block writes one tile of dQ.  Where no block of keys added to a tile, no query of it sees a
// key, and dQ is 0: nothing was ever written to the sums.
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/block_table.cuh"
#include "cuda_src/common/dq_accum.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/nonfinite_flags.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/stmatrix.cuh"

constexpr bool kBf16 = FA_BF16;  // bfloat16, else float16
constexpr int kThreads = FA_THREADS;
constexpr int kRows = FA_TILE_M;  // queries of a tile of dQ
static_assert(kThreads == 128, "a piece is of a warpgroup's accumulators");
static_assert(kRows % 16 == 0, "two matrices of 8 queries are stored at once");

struct BwdConvertDqParams {
  AttentionParams common;  // out is dq
  const float* dq_accum;
  uint32* nonfinite_flags;  // rows to compute again
  MaskTable mask;           // by blocks of keys
  int tile_m, tile_n;       // queries of a tile, keys of a block
  int blocks;               // of 64 columns
};
static_assert(sizeof(BwdConvertDqParams) == FA_CONVERT_DQ_PARAMS_BYTES,
              "fa_cupy/gpu holds the same struct");

using DqTile = SharedTile<kRows, 64>;
static_assert(DqTile::kBlockBytes == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_bwd_convert_dq(const __grid_constant__ BwdConvertDqParams params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const AttentionParams& p = params.common;
  const uint32 dq_tiles = params.tile_m / kRows * params.blocks;
  const uint32 query_tile = blockIdx.x / dq_tiles, dq_tile = blockIdx.x - query_tile * dq_tiles;
  const uint32 entry = query_tile / p.q_tiles, tile = query_tile - entry * p.q_tiles;
  const int first_row = tile * params.tile_m;
  bool was_written = true;  // of packed sequences each tile has a block of keys (row_intervals.cu)
  if constexpr (!kPacked) {
    const KeyTiles keys =
        key_tiles(p, first_row, min(first_row + params.tile_m, p.q_len) - 1, params.tile_n);
    was_written = keys.begin < keys.end;
    if (is_masked(params.mask)) {
      const int block = first_row / kMaskBlock;
      was_written = visible_blocks_between(params.mask, table_row(params.mask, entry, 0),
                                           keys.begin, keys.end - 1, block) > 0;
    }
  }
  const int row = first_row + kRows * (dq_tile / params.blocks),
            col = 64 * (dq_tile % params.blocks);
  if (row >= p.q_len || col >= p.v_dim) return;

  // A warp has 16 columns; its matrices of 8 columns are written as rows of queries.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* dq_accum = params.dq_accum + static_cast<int64>(blockIdx.x) * dq_tile_floats(kRows);
  const uint32 tile_address = cvta_to_shared(shared_bytes);
  const uint32 to =
      tile_address + DqTile::lane_offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  uint32 pairs[kRows / 8][2];
  NonfiniteProbe nonfinite_probe;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
    if (was_written) {
      x = *reinterpret_cast<const float4*>(dq_accum + dq_tile_offset(j, threadIdx.x));
    }
    nonfinite_probe.add(x.x);
    nonfinite_probe.add(x.y);
    nonfinite_probe.add(x.z);
    nonfinite_probe.add(x.w);
    pairs[j][0] = pack2<kBf16>(x.x * p.scale, x.y * p.scale);
    pairs[j][1] = pack2<kBf16>(x.z * p.scale, x.w * p.scale);
  }
  if (nonfinite_probe.found()) {
    flag_nonfinite_queries(params.nonfinite_flags, p, entry, row);
    flag_nonfinite_queries(params.nonfinite_flags, p, entry, min(row + kRows, p.q_len) - 1);
  }
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {
    stmatrix_x4_trans(to + j * 8 * 128, pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]);
  }
  __syncthreads();
  uint16* dq = static_cast<uint16*>(p.out) + batch_offsets(p, entry).out +
               static_cast<int64>(row) * p.out_row + col;
  store_rows<kRows, 64, kRows / 4>(tile_address, dq, p.out_row, warp * (kRows / 4), p.q_len - row,
                                   p.v_dim - col, p.aligned != 0);
}
