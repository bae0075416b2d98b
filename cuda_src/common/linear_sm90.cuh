// Parts of the SM90 kernels of causal products: constants of a variant, parameters, the work of a
// block, the state in registers and its updates.
//
// A state warpgroup owns 64 value columns and holds S^T (64 x E) of them as accumulators of wgmma:
// element [v][2 * i + j] of lane 4 g + t of warp w is that of value column 16 w + g + 8 i and key
// column 8 v + 2 t + j (ptx/wgmma.cuh).  A operands have the same layout, so the state never leaves
// the registers.
#pragma once
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/packed.cuh"
#include "cuda_src/common/pipeline.cuh"
#include "cuda_src/common/row_span.cuh"
#include "cuda_src/common/shared_tile.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

constexpr bool kBf16 = FA_BF16;        // bfloat16, else float16
constexpr int kDim = FA_DIM;           // qk_dim, padded with zeros
constexpr int kCols = FA_TILE_N;       // value columns of a block
constexpr int kGroups = kCols / 64;    // warpgroups that hold the state
constexpr int kChunk = FA_TILE_M;      // rows of a chunk
constexpr int kStages = FA_STAGES;     // chunks in shared memory
constexpr int kMinBlocks = FA_BLOCKS;  // blocks that should fit on a multiprocessor
constexpr int kDimBlocks = kDim / 64;  // a tile in shared memory has blocks of 64 columns
constexpr int kBlockBytes = 64 * 128;  // of a block: 64 rows of 128 bytes
constexpr int kMmaE = kDim / 8;
constexpr int kJobs = 3;     // independent products of a launch, at most
constexpr int kMapAxes = 3;  // batch axes of a tensor map
static_assert(kDim % 64 == 0 && kCols % 64 == 0 && kChunk == 64, "tiles are made of such blocks");

// One product.  fa_cupy/gpu/kernels/linear/sm90_params.py holds the same fields in the same order.
struct ProductJob {
  TensorMap q_map, k_map, v_map, out_map;
  const float* initial;  // (*batch, qk_dim, v_dim), null for zeros
  float* state;          // (*batch, qk_dim, v_dim), null if not wanted
  float* workspace;      // (batch entries, segments, qk_dim, v_dim) dense; null if none is read
  float* out;            // (*batch, length, v_dim) of float32, written without out_map
  int64 initial_batch[kMapAxes], state_batch[kMapAxes];  // strides count elements
  int64 out_batch[kMapAxes];
  int64 initial_row, initial_col, state_row, state_col, out_row;
  int size[kMapAxes];                                        // batch axes of the maps
  int q_step[kMapAxes], k_step[kMapAxes], v_step[kMapAxes];  // 0 along an axis of one entry, else 1
  int qk_dim, v_dim;
  int tiles;    // of value columns
  int reverse;  // 1: from the last row to the first
#if FA_PACKED
  int64 initial_sequence, state_sequence;  // strides of the axis of sequences, which has no map
#endif
};

struct ProductSm90Params {
  ProductJob job[kJobs];
  int jobs;            // in use; block 0 works on the first one, block 1 on the second, ...
  int tiles;           // of value columns, the largest number of any job
  int chunks;          // of a sequence
  int segments;        // of a sequence, one for each block
  int segment_chunks;  // of all segments but the last
  int keep;            // 1: other blocks load the same data, so it should stay in the L2 cache
  int length;
#if FA_PACKED
  const RowSpan* spans;  // of each sequence
  int sequences;         // the last of the batch axes, behind those of the maps
#endif
};
static_assert(sizeof(ProductSm90Params) == FA_SM90_PARAMS_BYTES,
              "fa_cupy/gpu/kernels/linear/sm90_params.py holds the same struct");

// The work of one block: some value columns of one segment of one batch entry of a job.
struct WorkTile {
  int64 initial, state;  // element offsets of the entry's states
  int64 entry;           // index over all batch axes, C order
  int job;
  int coordinate[kMapAxes];  // of the entry along the maps' batch axes
  int segment;
  int column;         // the first one
  int chunk, step;    // the first chunk, and the distance to the next one: 1 or -1
  int chunks;         // number of chunks; 0: the block has no work
  bool writes_state;  // true for one of the entries that share a state
#if FA_PACKED
  bool is_last;        // whether the sequence ends with this segment
  int begin, rows;     // of the sequence
  int segment_chunks;  // of its segments but the last one that has rows
#endif
};

// `segments`: the number of segments that have a block.  In reverse, chunks come from the last to
// the first.  A chunk that the sequence does not fill is then the first one, and the rows that it
// lacks are zeros.  The chunks of a packed sequence begin with its first row, and its last segments
// may have none.
FA_DEVICE WorkTile work_tile_of_block(const ProductSm90Params& params, int segments) {
  auto split = [](uint32& index, uint32 size) {
    if (size == 1) return 0;  // the usual case; a division takes 100 clocks
    const uint32 rest = index / size, i = index - rest * size;
    index = rest;
    return static_cast<int>(i);
  };
  uint32 index = blockIdx.x;
  WorkTile w;
  w.job = split(index, params.jobs);
  w.segment = split(index, segments);
  const int tile = split(index, params.tiles);
  const ProductJob& job = params.job[w.job];
  w.entry = index;
  w.column = tile * kCols;
  w.initial = w.state = 0;
  w.writes_state = true;
#if FA_PACKED
  const int sequence = split(index, params.sequences);
  w.initial = sequence * job.initial_sequence;
  w.state = sequence * job.state_sequence;
#endif
#pragma unroll
  for (int axis = kMapAxes - 1; axis >= 0; --axis) {
    const int i = axis > 0 ? split(index, job.size[axis]) : static_cast<int>(index);
    w.coordinate[axis] = i;
    w.initial += i * job.initial_batch[axis];
    w.state += i * job.state_batch[axis];
    w.writes_state = w.writes_state && (i == 0 || job.state_batch[axis] != 0);
  }
#if FA_PACKED
  const RowSpan span = params.spans[sequence];
  w.begin = span.begin;
  w.rows = rows_of(span);
  const int chunks = (w.rows + kChunk - 1) / kChunk;
  w.segment_chunks = max(1, (chunks + params.segments - 1) / params.segments);
  const int first = w.segment * w.segment_chunks;
  w.chunks = tile < job.tiles ? max(0, min(w.segment_chunks, chunks - first)) : 0;
  w.is_last = first < max(chunks, 1) && chunks <= first + w.segment_chunks;
  w.chunk = job.reverse ? chunks - 1 - first : first;
#else
  const int first = w.segment * params.segment_chunks;
  w.chunks = tile < job.tiles ? min(params.segment_chunks, params.chunks - first) : 0;
  w.chunk = job.reverse ? params.chunks - 1 - first : first;
#endif
  w.step = job.reverse ? -1 : 1;
  return w;
}

// The place along the rows of an array where chunk `i` of a block begins; chunks before its segment
// have negative numbers.
FA_DEVICE int row_of_chunk(const WorkTile& work, int i) {
  const int row = (work.chunk + i * work.step) * kChunk;
#if FA_PACKED
  return work.begin + row;
#else
  return row;
#endif
}

// How many rows of this chunk count, at most kChunk.  Those behind the end of a packed sequence are
// the next one's; those behind the end of an array are zeros.
FA_DEVICE int rows_of_chunk(const WorkTile& work, int i) {
#if FA_PACKED
  return min(kChunk, work.rows - (work.chunk + i * work.step) * kChunk);
#else
  return kChunk;
#endif
}

FA_DEVICE bool is_last_segment(const ProductSm90Params& params, const WorkTile& work) {
#if FA_PACKED
  return work.is_last;
#else
  return work.segment == params.segments - 1;
#endif
}

// Puts zeros in place of the rows of a tile from `rows` on, which may hold NaN: 0 * NaN is NaN.  So
// many threads do it, each with a number of its own.  They and what reads the tile are to meet
// behind a fence of the async proxy.
template <int kThreads, int kBlocks>
FA_DEVICE void clear_later_rows(uint8* tile, int rows, int thread) {
  const uint32 zeros[4] = {0, 0, 0, 0};
  const uint32 first = cvta_to_shared(tile) + rows * 128;
#pragma unroll 1
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll 1
    for (int i = thread; i < (kChunk - rows) * 8; i += kThreads) {
      st_shared_v4_b32(first + block * kBlockBytes + 16 * i, zeros);
    }
  }
}

// The same for the keys and values of a chunk that is only summed: the state warpgroups do it, and
// meet at a named barrier of their own.
FA_DEVICE void clear_later_rows(uint8* k_tile, uint8* v_tile, int rows, int thread, int barrier) {
  if (rows >= kChunk) return;
  clear_later_rows<128 * kGroups, kDimBlocks>(k_tile, rows, thread);
  clear_later_rows<128 * kGroups, kGroups>(v_tile, rows, thread);
  fence_proxy_async_shared();
  bar_sync(barrier, 128 * kGroups);
}

// Where the outputs of a block's batch entry begin, in elements.
FA_DEVICE int64 out_offset(const ProductSm90Params& params, const WorkTile& work) {
  int64 offset = 0;
#pragma unroll
  for (int axis = 0; axis < kMapAxes; ++axis) {
    offset += work.coordinate[axis] * params.job[work.job].out_batch[axis];
  }
  return offset;
}

// The state before a segment, of qk_dim x v_dim elements in the workspace.
FA_DEVICE float* segment_state(const ProductSm90Params& params, const WorkTile& work, int segment) {
  const ProductJob& job = params.job[work.job];
  return job.workspace +
         (work.entry * params.segments + segment) * (static_cast<int64>(job.qk_dim) * job.v_dim);
}

// Starts the load of a chunk of an array, in blocks of 64 columns.
template <int kBlocks>
FA_DEVICE void load_chunk(uint8* to, const TensorMap& map, const int (&step)[kMapAxes],
                          const WorkTile& work, uint32 barrier, uint64 policy, int column,
                          int row) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    cp_async_bulk_tensor_5d_load(cvta_to_shared(to + block * kBlockBytes), &map, barrier, policy,
                                 column + 64 * block, row, work.coordinate[2] * step[2],
                                 work.coordinate[1] * step[1], work.coordinate[0] * step[0]);
  }
}

// One arrival for a warp, for tiles that are read and written by tensor cores and bulk copies
// instead of its lanes.
FA_DEVICE void release(const uint64& barrier) {
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

// S^T of a warpgroup.
using State = float[kMmaE][4];

// Calls visit(x, address, valid) for each element of the state and its address in an array whose
// rows are key columns, from value column `col_begin` on.
template <typename Pointer, typename Visit>
FA_DEVICE void for_each_element(State& s, Pointer base, int64 row, int64 col, int rows, int cols,
                                Visit visit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_row = lane % 4 * 2, first_col = 16 * warp + lane / 4;
  if (base == nullptr) cols = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int valid_rows = first_col + 8 * i < cols ? rows - first_row : 0;
    Pointer address = base + (first_col + 8 * i) * col + first_row * row;
#pragma unroll
    for (int v = 0; v < kMmaE; ++v) {
#pragma unroll
      for (int j = 0; j < 2; ++j) visit(s[v][2 * i + j], address + j * row, 8 * v + j < valid_rows);
      address += 8 * row;
    }
  }
}
FA_DEVICE void load_state(State& s, const float* from, int64 row, int64 col, int rows, int cols) {
  for_each_element(s, from, row, col, rows, cols,
                   [](float& x, const float* address, bool valid) { x = valid ? *address : 0.0f; });
}
FA_DEVICE void store_state(State& s, float* to, int64 row, int64 col, int rows, int cols) {
  for_each_element(s, to, row, col, rows, cols, [](float& x, float* address, bool valid) {
    if (valid) *address = x;
  });
}

// The state before the first chunk of a block, from value column `column` on: the state before its
// segment where sequences are split, else the initial state.  A column in shared memory is passed
// by reference, so that it takes no register from one use to the next.
FA_DEVICE void load_first_state(State& s, const ProductJob& job, const ProductSm90Params& params,
                                const WorkTile& work, const int& column) {
  const bool split = job.workspace != nullptr;
  const int64 row = split ? job.v_dim : job.initial_row, col = split ? 1 : job.initial_col;
  const float* from = split ? segment_state(params, work, work.segment) : job.initial;
  if (from != nullptr) from += (split ? 0 : work.initial) + column * col;
  load_state(s, from, row, col, job.qk_dim, job.v_dim - column);
}

// Stores the state after the last chunk of a sequence, if the caller asked for it.
FA_DEVICE void store_final_state(State& s, const ProductJob& job, const ProductSm90Params& params,
                                 const WorkTile& work, const int& column) {
  if (job.state != nullptr && work.writes_state && is_last_segment(params, work)) {
    store_state(s, job.state + work.state + column * job.state_col, job.state_row, job.state_col,
                job.qk_dim, job.v_dim - column);
  }
}

// Starts U = V^T K, the outer products of a chunk's rows.  They are summed apart from the state,
// because tensor cores truncate, so a long sum in their accumulators drifts.
FA_DEVICE void gemm_kv(State& u, const uint8* k_tile, const uint8* v_tile) {
  wgmma_fence();  // with the fence after the descriptors, chunk_sm90 takes more instructions
  const uint64 a = wgmma_descriptor(cvta_to_shared(v_tile), 0);
  const uint64 b = wgmma_descriptor(cvta_to_shared(k_tile), kBlockBytes);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    // 16 rows are 2,048 bytes; descriptors count in 16 bytes.
    wgmma_m64k16_ss<kBf16, kDim, kMnMajor, kMnMajor>(u, a + step * (16 * 128 / 16),
                                                     b + step * (16 * 128 / 16), step > 0);
  }
  wgmma_commit_group();
}
FA_DEVICE void add_outer_products(State& s, const State& u) {
#pragma unroll
  for (int v = 0; v < kMmaE; ++v) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[v][e] += u[v][e];
  }
}
// Writes a warpgroup's sum of a segment to the workspace, in place of the state before the next
// segment.
FA_DEVICE void store_segment_state(State& s, const ProductSm90Params& params, const WorkTile& work,
                                   int group) {
  const ProductJob& job = params.job[work.job];
  const int column = work.column + 64 * group;
  store_state(s, segment_state(params, work, work.segment + 1) + column, job.v_dim, 1, job.qk_dim,
              job.v_dim - column);
}
