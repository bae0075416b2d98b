// Parts of the SM90 kernels that compute causal products of float32 with pairs of float16: tiles,
// loads of rows, values that are not finite, scores and values as operands.
#pragma once
#include "cuda_src/common/linear_sm90.cuh"
#include "cuda_src/common/split_rows.cuh"
#include "cuda_src/common/split_state.cuh"
#include "cuda_src/common/split_state_sm90.cuh"

constexpr int kDimBoxes = kDim / 32, kColBoxes = kCols / 32;  // boxes of float32 have 32 columns
constexpr int kLowQK = kDimBlocks * kBlockBytes;              // bytes from high parts to low ones
constexpr int kLowV = kGroups * kBlockBytes;
constexpr int kSteps = kChunk / 16;  // wgmmas of a product that sums over a chunk's rows

using QKTile = SharedTile<kChunk, kDim>;
using VTile = SharedTile<kChunk, kCols>;

// The first row of a chunk of this block's segment.  In reverse, chunks are counted from the end of
// the sequence; the last of them may begin before row 0, and those rows are zeros.
FA_DEVICE int first_row(const ProductSm90Params& params, const WorkTile& work, int chunk) {
  const int begin = kChunk * (work.segment * params.segment_chunks + chunk);
  return params.job[work.job].reverse ? params.length - begin - kChunk : begin;
}

// Starts the load of a chunk of an array, box by box.
template <int kBoxes>
FA_DEVICE void load_boxes(uint8* to, const TensorMap& map, const int (&step)[kMapAxes],
                          const WorkTile& work, uint64& full, uint64 policy, int column, int row) {
  const uint32 barrier = cvta_to_shared(&full);
  mbarrier_arrive_expect_tx(barrier, kBoxes * kBlockBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    cp_async_bulk_tensor_5d_load(cvta_to_shared(to + box * kBlockBytes), &map, barrier, policy,
                                 column + 32 * box, row, work.coordinate[2] * step[2],
                                 work.coordinate[1] * step[1], work.coordinate[0] * step[0]);
  }
}

// Replaces values that are not finite by 0 in a thread's column: P is 0 where a row does not read a
// value, but 0 * NaN is NaN.  `nonfinite_row` gets the first row with such a value, in reverse the
// last one.
template <typename Row>
FA_DEVICE void zero_nonfinite(uint8* v_tile, Row (&nonfinite_row)[kCols], int column,
                              bool reverse) {
  if (column < kCols) {
    int first_found = reverse ? -1 : kChunk;
#pragma unroll 1
    for (int row = 0; row < kChunk; ++row) {
      uint8* at = v_tile + VTile::offset(row, column / 8) + column % 8 * 2;
      uint16 &high = *reinterpret_cast<uint16*>(at), &low = *reinterpret_cast<uint16*>(at + kLowV);
      if ((high & 0x7c00) != 0x7c00) continue;  // IEEE 754 exponent of float16
      high = low = 0;
      first_found = reverse ? row : min(first_found, row);
    }
    nonfinite_row[column] = static_cast<Row>(first_found);
  }
}

FA_DEVICE bool any_nonfinite(const int (&nonfinite_found)[4]) {
  return (nonfinite_found[0] | nonfinite_found[1] | nonfinite_found[2] | nonfinite_found[3]) != 0;
}

// The state of a thread's two value columns becomes NaN where values were left out that are not
// finite.
FA_DEVICE void poison_sums(State& s, const int (&nonfinite_row)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (nonfinite_row[h] < 0 || nonfinite_row[h] >= kChunk) continue;
#pragma unroll
    for (int v = 0; v < kMmaE; ++v) s[v][2 * h] = s[v][2 * h + 1] = __int_as_float(0x7fc00000);
  }
}

// Starts D = A B^T of two tiles of pairs with kDim columns: Q K^T, or Q S.
FA_DEVICE void gemm_split_abt(Outputs& d, const uint8* a_tile, const uint8* b_tile) {
  const uint64 a = wgmma_descriptor(cvta_to_shared(a_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(b_tile), 0);
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < 3; ++part) {  // low * high, high * low, high * high
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      // 16 columns are 32 bytes of a block's rows; descriptors count in 16 bytes.
      const int offset = (step / 4 * kBlockBytes + step % 4 * 32) / 16;
      wgmma_m64k16_ss<false, 64>(d, a + offset + (part == 0 ? kLowQK / 16 : 0),
                                 b + offset + (part == 1 ? kLowQK / 16 : 0), part + step > 0);
    }
  }
  wgmma_commit_group();
}

// V^T of a warp's 16 value columns, as A operands.
FA_DEVICE void load_values(Operand<kSteps>& high, Operand<kSteps>& low, const uint8* v_tile,
                           int pair) {
  const uint32 from =
      VTile::at(cvta_to_shared(v_tile) + columns_first<VTile>(threadIdx.x % 32), 0, pair);
#pragma unroll
  for (int c = 0; c < kSteps; ++c) {
    ldmatrix_x4_trans(high[c], VTile::at(from, 16 * c, 0));
    ldmatrix_x4_trans(low[c], VTile::at(from + kLowV, 16 * c, 0));
  }
}

// Multiplies rows of V by powers of two so that the outer products of all rows of the chunk have
// one exponent, which is returned.
FA_DEVICE int scale_to_common_exponent(Operand<kSteps>& high, Operand<kSteps>& low,
                                       const int* kv_exponent) {
  const int most = largest_exponent<kChunk>(kv_exponent);
#pragma unroll
  for (int c = 0; c < kSteps; ++c) {
    const RowFactors factors(kv_exponent + 16 * c, most);
    factors.multiply(high[c]);
    factors.multiply(low[c]);
  }
  return most;
}

// S^T = S^T + 2^exponent U for a block of 64 key columns.  The power of two is applied as two
// factors, because float32 may not hold it.
FA_DEVICE void add_outer_products(State& s, const Outputs& u, int block, float factor, float rest) {
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    float& x = s[8 * block + e / 4][e % 4];
    x = fmaf(u[e / 4][e % 4] * factor, rest, x);
  }
}

// The largest number of a row of scores, which four neighbouring lanes share.
template <typename Number>
FA_DEVICE Number max_over_lanes(Number most) {
  most = max(most, __shfl_xor_sync(kFullWarp, most, 1));
  return max(most, __shfl_xor_sync(kFullWarp, most, 2));
}
