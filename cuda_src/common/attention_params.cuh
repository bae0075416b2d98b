// What one attention launch is told, and where its blocks find their part of it.
#pragma once
#include "cuda_src/common/batch_axes.cuh"
#include "cuda_src/common/block_lists.cuh"
#include "cuda_src/common/dropout.cuh"
#include "cuda_src/common/key_lengths.cuh"
#include "cuda_src/common/row_intervals.cuh"

// An expression that makes scores sees batch entries as pairs of b and h, and has arrays.
#ifndef FA_EXPRESSION
#define FA_EXPRESSION 0
#endif
constexpr int kMaxScoreArrays = 6, kMaxScoreAxes = 4;
struct ScoreArray {
  const void* data;
  double number;  // in place of an array
  int64 stride[kMaxScoreAxes];
};

// Passed by value.  The host module of this name holds the same fields in the same order.
// Strides count elements.  Axes that broadcast have stride 0, grouped heads are two axes.
struct AttentionParams {
  const void* q;      // (*batch, q_len, head_dim)
  const void* k;      // (*batch, k_len, head_dim)
  const void* v;      // (*batch, k_len, v_dim)
  const void* bias;   // (*batch, q_len, k_len), null without one
  void* out;          // (*batch, q_len, v_dim)
  float* lse;         // (*batch, q_len) dense, null when nobody asked
  int64 first_batch;  // entry of the first block: a grid has at most 2**31 - 1 blocks
  int aligned;        // 1: every row of q, k, v and out starts at a multiple of 16 bytes
  int batch_axes;     // how many of the axes below are in use
#if FA_PACKED
  // Of builds for packed sequences, which take no mask.  A union in all builds would have those for
  // masks spill.
  union {
    MaskLists mask;
    RowIntervals intervals;
  };
#elif FA_LENGTHS
  union {  // likewise
    MaskLists mask;
    KeyLengths k_lengths;
  };
#else
  MaskLists mask;  // of batch entries counted over all launches
#endif
  int64 bias_row, bias_col;
  int64 q_batch[kMaxBatchAxes], k_batch[kMaxBatchAxes], v_batch[kMaxBatchAxes],
      out_batch[kMaxBatchAxes];
  int64 bias_batch[kMaxBatchAxes];
  int64 batch_size[kMaxBatchAxes];
  int q_row, k_row, v_row, out_row;
  int q_len, k_len, head_dim, v_dim;
  int q_tiles;       // tiles of query rows in one batch entry
  int lower, upper;  // query i sees keys i + lower to i + upper
  // Whether a bias may be read in pairs, if its address is a multiple of 8: bit 0 for pairs of
  // keys, bit 1 for pairs of queries.  Bit 2: whether its rows may be read by 16 bytes, if the
  // address is a multiple of 16.
  int bias_pairs;
  float exp2_scale;  // what the softmax multiplies scores by inside exp2
  float scale;       // of a product
  // Of builds with a softcap: itself, 4 * scale / softcap, 1 / softcap, softcap times coefficients
  // of tanh (score.cuh), and those times log2(e).
  float softcap, softcap_scale, inverse_softcap, softcap_series[5], softcap_series_log2[5];
  const void* sinks;  // (*batch, q_len), null without them: scores without a key (sinks.cuh)
  int64 sinks_batch[kMaxBatchAxes];
  int64 sinks_row;
  int sinks_kind;   // a FloatKind
  int score_heads;  // how many values h has in an expression: entry = b * score_heads + h
  ScoreArray score_arrays[kMaxScoreArrays];
#if FA_DROPOUT
  DropoutParams dropout;
#endif
};

static_assert(sizeof(AttentionParams) == FA_PARAMS_BYTES,
              "fa_cupy/gpu/kernels/attention/attention_params.py holds the same struct");

// What dropout multiplies the weights by that it keeps.
FA_DEVICE float kept_factor(const AttentionParams& p) {
#if FA_DROPOUT
  return p.dropout.factor;
#else
  return 1.0f;
#endif
}
FA_DEVICE float inverse_kept_factor(const AttentionParams& p) {
#if FA_DROPOUT
  return p.dropout.inverse_factor;
#else
  return 1.0f;
#endif
}

enum FloatKind : int { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// Element offsets of one batch entry in each array.
struct BatchOffsets {
  int64 q, k, v, out, bias;  // of an expression's operands: the entry, for p.bias_batch counts them

  __device__ __forceinline__ void add(const AttentionParams& p, int axis, int64 i) {
    q += i * p.q_batch[axis];
    k += i * p.k_batch[axis];
    v += i * p.v_batch[axis];
    out += i * p.out_batch[axis];
    if (FA_EXPRESSION || p.bias != nullptr) bias += i * p.bias_batch[axis];
  }
};

// Of a batch entry, counted over all batch axes; an Index of 32 bits does where entries fit it.
template <typename Index>
FA_DEVICE BatchOffsets batch_offsets(const AttentionParams& p, Index batch) {
  BatchOffsets o = {0, 0, 0, 0, 0};
  Index rest = batch;
  for (int axis = p.batch_axes - 1; axis > 0; --axis) {
    const int64 size = p.batch_size[axis];
    const Index next = divide(rest, size);
    o.add(p, axis, rest - next * size);
    rest = next;
  }
  if (p.batch_axes > 0) o.add(p, 0, rest);
  return o;
}

// The tile of query rows that comes after so many others of its batch entry.  Under a causal mask
// the last query rows have the most keys; of packed sequences any may.
FA_DEVICE int query_tile_in_order(const AttentionParams& p, int place) {
#if FA_PACKED
  if (p.intervals.order != nullptr) return p.intervals.order[place];
#endif
  return p.q_tiles - 1 - place;
}

// Where an element of an array over the batch axes is.
FA_DEVICE int64 element_of_entry(const AttentionParams& p, int64 batch,
                                 const int64 (&strides)[kMaxBatchAxes]) {
  int64 index = 0, rest = batch;
#pragma unroll 1
  for (int axis = p.batch_axes - 1; axis >= 0; --axis) {
    const int64 next = divide(rest, p.batch_size[axis]);
    index += (rest - next * p.batch_size[axis]) * strides[axis];
    rest = next;
  }
  return index;
}

// One block's part: a tile of query rows of one batch entry.
struct TileWork {
  BatchOffsets at;
  int64 batch;  // index over all batch axes, C order
  int q_begin;  // first query row
  int q_rows;   // how many of the tile's rows exist
#if FA_LENGTHS
  KeyBand band;  // of the entry
#endif
};

// Blocks start in the order of their index, and under a causal mask the last query rows have the
// most keys: those go first, so that short tiles fill the end of the launch.
FA_DEVICE TileWork tile_work(const AttentionParams& p, int tile_m) {
  const uint32 entry = blockIdx.x / static_cast<uint32>(p.q_tiles);
  const int tile = query_tile_in_order(p, static_cast<int>(blockIdx.x - entry * p.q_tiles));
  const int64 batch = p.first_batch + entry;
  return {batch_offsets(p, batch), batch, tile * tile_m, min(tile_m, p.q_len - tile * tile_m)};
}

// The same under a mask, whose rows of blocks go in its own order: tiles of tile_m rows, the last
// ones of which may have no row that exists.
FA_DEVICE TileWork masked_tile_work(const AttentionParams& p, int tile_m) {
  const uint32 in_block = kMaskBlock / tile_m, blocks = mask_blocks(p.q_len);
  const uint32 order_index = blockIdx.x / in_block, tile_in_block = blockIdx.x % in_block;
  const uint32 row = p.mask.order != nullptr ? p.mask.order[order_index] : order_index;
  const uint32 entry = row / blocks;
  uint32 block = row - entry * blocks;
  if (p.mask.order == nullptr) block = blocks - 1 - block;
  const int64 batch = p.first_batch + entry;
  const int q_begin = block * kMaskBlock + tile_in_block * tile_m;
  return {batch_offsets(p, batch), batch, q_begin, min(tile_m, p.q_len - q_begin)};
}
