// Rows of gradients whose sums came out not finite, computed once more in float32, pair by pair.
//
// It is launched behind the kernels that write gradients, and leaves at once where they have
// flagged nothing.  64 queries or keys are one task, dK and dV of the same keys two.  A block goes
// through the tiles of 64 rows on the other side of the pairs, as the other kernels do:
//   weights:  P = exp(S - LSE) for dV,   dS = P (dO V^T - delta) for dK and dQ
//   sums:     dV = P^T dO,   dK = dS^T Q,   dQ = dS K
// dS times what a softcap makes of it.  But a hidden pair has no part in a sum, whatever its rows
// hold, whether a band, a mask or a bias of -inf hides it.  So a gradient is not finite where
// something that belongs to its sum is not.
//
// Sums are also NaN of rows whose LSE is too large (common/large_lse.cuh).  Their largest scores
// and sums of exponentials come first, again 64 queries a task, for all that follows needs them.
//
// All kinds of tasks go through the same loops, which are rolled up, and scores become weights in
// shared memory, so that there is no second copy of anything: this kernel was most of the time that
// a first call took to compile.
#include "cuda_src/common/backward_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/large_lse.cuh"
#include "cuda_src/common/nonfinite_flags.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/sinks.cuh"
#include "ptx/atomic.cuh"

constexpr bool kBf16 = FA_BF16;  // bfloat16, else float16
constexpr int kThreads = FA_THREADS;
constexpr int kTile = kRowsPerFlag;
constexpr int kFactorColumns = 32;         // of the factors of a score, at a time
constexpr int kColumnParts = FA_DIM / 64;  // of the sums, of 64 columns each
constexpr int kPitch = kTile + 4;          // floats of a row in shared memory
static_assert(kThreads == 256, "a thread has 4 x 4 pairs");
static_assert(FA_DIM % 64 == 0, "sums are in parts of 64 columns");

struct NonfiniteParams : BackwardParams {
  // Of each query, as in `lse_delta`: its largest score, 1 / its sum of exponentials.
  float2* row_statistics;
  // How many of the tasks on queries were drawn, and how many are done; 0 at first.
  uint32* task_counters;
};
static_assert(sizeof(NonfiniteParams) == FA_NONFINITE_PARAMS_BYTES,
              "fa_cupy/gpu holds the same struct");

struct SharedStorage {
  union {
    float factors[2][kFactorColumns][kPitch];  // of the scores: by column, then row
    float rows[kTile][kPitch];  // of what is summed; before, dP by row of the other side
    RowStatistics sums[kThreads];
  };
  float weights[kTile][kPitch];  // by row of the other side, then own row; before, products
  uint32 flagged[kThreads / 32];
  uint32 task_share;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

enum TaskKind : int { kTaskRowStatistics, kTaskDq, kTaskDk, kTaskDv };

// The weight of a hidden pair.  Others are never -0: they have had 0 added.
constexpr uint32 kMaskedWeight = 0x80000000u;

// Rows of one entry, from one of them on.
struct RowsView {
  uint16* start;
  int64 step;
  int count;  // how many there are

  __device__ __forceinline__ uint16* at(int row, int col) const { return start + row * step + col; }
  __device__ __forceinline__ RowsView from(int row) const {
    return {start + row * step, step, count - row};
  }
};

// One or the other, by their members: a choice between structs would put them on a stack.
FA_DEVICE RowsView select_view(bool first, const RowsView& a, const RowsView& b) {
  return {first ? a.start : b.start, first ? a.step : b.step, first ? a.count : b.count};
}

FA_DEVICE RowsView rows_view(const BackwardParams& params, const Array& array, uint32 entry,
                             int count) {
  return {entry_start(params, array, entry), array.row, count};
}

// Loads eight elements as floats, zeros beyond the end of the array.
FA_DEVICE void load_8(float (&x)[8], const RowsView& rows, int row, int col, int cols) {
  uint4 words = {0, 0, 0, 0};
  if (row < rows.count && col < cols) {
    words = *reinterpret_cast<const uint4*>(rows.at(row, col));
  }
  const uint32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = to_float<kBf16>(static_cast<uint16>(pairs[i]));
    x[2 * i + 1] = to_float<kBf16>(static_cast<uint16>(pairs[i] >> 16));
  }
}

// This thread's own rows of 64, and its rows, or columns, of the other side: four from here on.
FA_DEVICE int own_rows() { return threadIdx.x / 16 * 4; }
FA_DEVICE int other_rows() { return threadIdx.x % 16 * 4; }

FA_DEVICE void load_four(float (&x)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  x[0] = four.x;
  x[1] = four.y;
  x[2] = four.z;
  x[3] = four.w;
}

// A B^T of 64 rows each, by row of B, then row of A.
FA_DEVICE void gemm_rows(SharedStorage& shared, float (*to)[kPitch], const RowsView& a,
                         const RowsView& b, int cols) {
  float x[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i / 4][i % 4] = 0.0f;
  const int row = threadIdx.x % kTile, chunk = threadIdx.x / kTile * 8;
#pragma unroll 1
  for (int first = 0; first < cols; first += kFactorColumns) {
    float own[8], other[8];
    load_8(own, a, row, first + chunk, cols);
    load_8(other, b, row, first + chunk, cols);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      shared.factors[0][chunk + i][row] = own[i];
      shared.factors[1][chunk + i][row] = other[i];
    }
    __syncthreads();
#pragma unroll 8
    for (int col = 0; col < kFactorColumns; ++col) {
      float left[4], right[4];
      load_four(left, &shared.factors[0][col][own_rows()]);
      load_four(right, &shared.factors[1][col][other_rows()]);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        x[i / 4][i % 4] = fmaf(left[i / 4], right[i % 4], x[i / 4][i % 4]);
    }
  }
  __syncthreads();  // all threads have read the factors
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<float4*>(&to[other_rows() + j][own_rows()]) =
        make_float4(x[0][j], x[1][j], x[2][j], x[3][j]);
  }
}

// Adds, to 64 columns of the sums of own rows, weights times rows of the other side.
FA_DEVICE void accumulate_rows(SharedStorage& shared, float (&sums)[4][4], const RowsView& rows,
                               int first, int cols) {
  __syncthreads();  // the weights are written, and the buffer of the rows has been read
#pragma unroll
  for (int half = 0; half < kTile; half += 32) {
    const int row = half + threadIdx.x / 8, col = threadIdx.x % 8 * 8;
    float x[8];
    load_8(x, rows, row, first + col, cols);
    float4* to = reinterpret_cast<float4*>(&shared.rows[row][col]);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
  __syncthreads();
#pragma unroll 4
  for (int row = 0; row < kTile; ++row) {
    float weights[4], x[4];
    load_four(weights, &shared.weights[row][own_rows()]);
    load_four(x, &shared.rows[row][other_rows()]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (__float_as_uint(weights[i]) == kMaskedWeight) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(weights[i], x[j], sums[i][j]);
    }
  }
}

// What a mask says of 64 queries and 64 keys, which are of one of its blocks.
struct MaskBlockView {
  bool is_empty;
  const uint32* words;  // of the block; null where all of it is seen

  __device__ __forceinline__ bool is_visible(int query, int key) const {
    return words == nullptr || block_bit(words, query % kMaskBlock, key % kMaskBlock);
  }
};

FA_DEVICE MaskBlockView mask_block_view(const MaskTable& mask, uint32 entry, int query, int key) {
  if (!is_masked(mask)) return {false, nullptr};
  const int words_index =
      block_words_index(mask, table_row(mask, entry, query / kMaskBlock), key / kMaskBlock);
  return {words_index == kEmptyBlock,
          words_index < 0 ? nullptr : partial_block_words(mask, words_index)};
}

// What is known of the queries of an entry.
struct LseDelta {
  const float* pairs;  // LSE of two of them, delta of them
  const float2* row_statistics;

  __device__ __forceinline__ float lse(int query) const { return pairs[query / 2 * 4 + query % 2]; }
  __device__ __forceinline__ float delta(int query) const {
    return pairs[query / 2 * 4 + query % 2 + 2];
  }
  // The weight of a score of a query of this LSE.
  __device__ __forceinline__ float weight(float lse, int query, float score, float scale) const {
    if (!is_large_lse(lse)) return ex2_approx_ftz(fmaf(score, scale, -lse));
    const float2 of = row_statistics[query];
    return ex2_approx_ftz(scale_score(score, scale) - of.x) * of.y;
  }
};

FA_DEVICE LseDelta lse_delta_of(const NonfiniteParams& params, uint32 entry) {
  const int64 first = static_cast<int64>(entry) * params.row_pairs;
  return {reinterpret_cast<const float*>(params.lse_delta + first),
          params.row_statistics + 2 * first};
}

// Of 64 queries and 64 keys of an entry: their first ones, and what there is to know of them.
struct PairTile {
  TaskKind kind;
  int own, other;
  BatchOffsets at;  // of the bias
  LseDelta lse_delta;
  MaskBlockView mask;
#if FA_DROPOUT
  DropoutEntry dropout;
#endif
};

// Makes weights of the products of 64 x 64 pairs, where they stand, or adds them to this thread's
// part of the sums of its row.
FA_DEVICE void compute_weights(const AttentionParams& p, SharedStorage& shared,
                               const PairTile& pairs, RowStatistics& sums) {
  const int col = threadIdx.x % kTile;  // the own row
#pragma unroll 1
  for (int row = threadIdx.x / kTile; row < kTile; row += kThreads / kTile) {
    float& weight_cell = shared.weights[row][col];
    const bool queries = pairs.kind <= kTaskDq;
    const int own_row = pairs.own + col, other_row = pairs.other + row;
    const int query = queries ? own_row : other_row, key = queries ? other_row : own_row;
    const float lse = pairs.lse_delta.lse(query);
    // Of a query that does not exist, or that attends to nothing, the LSE is infinite.
    bool is_visible = lse != FA_INFINITY && key >= first_key(p, query) &&
                      key <= last_key(p, query) && pairs.mask.is_visible(query, key);
    float x = 0.0f;
    if (is_visible) {
      const ScoreAndSlope<float> score =
          score_and_slope_from_product(p, pairs.at, weight_cell, query, key);
      is_visible = score.score != -FA_INFINITY;
      if (pairs.kind == kTaskRowStatistics) {
        sums.merge(scale_score(score.score, p.exp2_scale), 1.0f);
        continue;
      }
      x = pairs.lse_delta.weight(lse, query, score.score, p.exp2_scale);
#if FA_DROPOUT
      const bool kept = is_kept(p.dropout, pairs.dropout, query, key);
      if (pairs.kind == kTaskDv) {
        is_visible = is_visible && kept;
        x *= p.dropout.factor;
      } else {
        shared.rows[row][col] = kept ? shared.rows[row][col] * p.dropout.factor : 0.0f;
      }
#endif
      if (pairs.kind != kTaskDv) {
        x *= (shared.rows[row][col] - pairs.lse_delta.delta(query)) * score.slope;
      }
    }
    weight_cell = is_visible ? x + 0.0f : __int_as_float(static_cast<int>(kMaskedWeight));
  }
}

// Puts down the sums of 64 queries of an entry, from `first` on, of each of which four threads have
// a part.  A sink is one more score.
FA_DEVICE void write_row_statistics(const AttentionParams& p, SharedStorage& shared, float2* to,
                                    const RowStatistics& sums, int64 entry, int first) {
  shared.sums[threadIdx.x] = sums;
  __syncthreads();
  const int row = first + threadIdx.x;
  if (row >= min(p.q_len, first + kTile)) return;
  RowStatistics all;
#pragma unroll
  for (int i = 0; i < kThreads; i += kTile) {
    const RowStatistics& part = shared.sums[i + threadIdx.x];
    all.merge(part.row_max, part.row_sum);
  }
  all.merge(sink_in_log2(load_sink(p, entry, row)), 1.0f);
  to[row] = make_float2(all.row_max, inverse_row_sum(all, p.lse[entry * p.q_len + row] * kLog2e));
}

// Whether one of 64 queries has a large LSE; all threads of a warp ask.
FA_DEVICE bool any_large_lse(const LseDelta& lse_delta, int first) {
  const int lane = threadIdx.x % 32;
  return __any_sync(kFullWarp, is_large_lse(lse_delta.lse(first + lane)) ||
                                   is_large_lse(lse_delta.lse(first + 32 + lane)));
}

// The tiles of the other side that 64 rows see.
FA_DEVICE TileRange other_tile_range(const AttentionParams& p, bool queries, int own) {
  if (queries) {
    const KeyTiles all = key_tiles(p, own, min(own + kTile, p.q_len) - 1, kTile);
    return {all.begin, all.end};
  }
  const QueryTiles all = query_tiles(p, own, min(own + kTile, p.k_len) - 1, kTile);
  return {all.begin, all.end};
}

// The gradient, or the sums, of 64 rows: tile `index`, of all entries.
FA_DEVICE void recompute_rows(const NonfiniteParams& params, SharedStorage& shared, TaskKind kind,
                              int64 index) {
  const bool queries = kind <= kTaskDq;
  const AttentionParams& p = params.common;
  const uint32 tiles = flags_per_entry(queries ? p.q_len : p.k_len);
  const uint32 own_entry = static_cast<uint32>(divide(index, static_cast<int64>(tiles)));
  const int own = static_cast<int>(index - static_cast<int64>(own_entry) * tiles) * kTile;
  if (kind == kTaskRowStatistics && !any_large_lse(lse_delta_of(params, own_entry), own)) return;
  const TileRange other_range = other_tile_range(p, queries, own);
  const int cols = kind == kTaskDv ? p.v_dim : p.head_dim;
  RowStatistics statistics;
  float sums[kColumnParts][4][4];
#pragma unroll
  for (int i = 0; i < 16 * kColumnParts; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
  const uint32 first_entry = queries ? own_entry : own_entry * params.group;
  const int heads = queries ? 1 : params.group;
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    const uint32 entry = first_entry + head;
    const RowsView q = rows_view(params, params.q, entry, p.q_len);
    const RowsView k = rows_view(params, params.k, entry, p.k_len);
    const RowsView v = rows_view(params, params.v, entry, p.k_len);
    const RowsView dout = rows_view(params, params.dout, entry, p.q_len);
    PairTile pairs = {kind, own, 0, batch_offsets(p, entry), lse_delta_of(params, entry), {}};
#if FA_DROPOUT
    pairs.dropout = dropout_entry(p.dropout, entry);
#endif
#pragma unroll 1
    for (int tile = other_range.begin; tile < other_range.end; ++tile) {
      const int other = pairs.other = tile * kTile;
      pairs.mask =
          mask_block_view(params.mask, entry, queries ? own : other, queries ? other : own);
      if (pairs.mask.is_empty) continue;
      const bool needs_dp = kind == kTaskDq || kind == kTaskDk;
#pragma unroll 1
      for (int i = 0; i < (needs_dp ? 2 : 1); ++i) {
        const RowsView query_side = select_view(i == 0, q, dout),
                       key_side = select_view(i == 0, k, v);
        gemm_rows(shared, i == 0 ? shared.weights : shared.rows,
                  select_view(queries, query_side, key_side).from(own),
                  select_view(queries, key_side, query_side).from(other),
                  i == 0 ? p.head_dim : p.v_dim);
      }
      __syncthreads();  // the products are there
      compute_weights(p, shared, pairs, statistics);
      if (kind == kTaskRowStatistics) continue;
      const RowsView summand = select_view(kind == kTaskDv, dout, select_view(queries, k, q));
#pragma unroll
      for (int part = 0; part < kColumnParts; ++part) {
        if (64 * part < cols)
          accumulate_rows(shared, sums[part], summand.from(other), 64 * part, cols);
      }
    }
  }
  if (kind == kTaskRowStatistics) {
    __syncthreads();  // all threads have read the sums of the task before
    const int64 first = 2 * static_cast<int64>(own_entry) * params.row_pairs;
    return write_row_statistics(p, shared, params.row_statistics + first, statistics, own_entry,
                                own);
  }

  const Array& array = queries ? params.dq : kind == kTaskDk ? params.dk : params.dv;
  const RowsView to = rows_view(params, array, first_entry, queries ? p.q_len : p.k_len).from(own);
  const float scale = kind == kTaskDv ? 1.0f : p.scale;
#pragma unroll
  for (int part = 0; part < kColumnParts; ++part) {
    const int col = 64 * part + other_rows();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&x)[4] = sums[part][i];
      if (own_rows() + i >= to.count || col >= cols) continue;
      uint32* words = reinterpret_cast<uint32*>(to.at(own_rows() + i, col));
      words[0] = pack2<kBf16>(x[0] * scale, x[1] * scale);
      words[1] = pack2<kBf16>(x[2] * scale, x[3] * scale);
    }
  }
}

// Draws the next share of the tasks on queries; it is the same for all threads of the block.
FA_DEVICE uint32 fetch_task_share(const NonfiniteParams& params, SharedStorage& shared) {
  if (threadIdx.x == 0) shared.task_share = atom_add_u32(&params.task_counters[0], 1);
  __syncthreads();
  const uint32 task_share = shared.task_share;
  __syncthreads();
  return task_share;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_bwd_nonfinite(const __grid_constant__ NonfiniteParams params) {
  if (params.nonfinite_flags[0] == 0) return;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  const int64 queries =
      static_cast<int64>(params.entries) * params.group * flags_per_entry(p.q_len);
  const int64 all = queries + 2 * static_cast<int64>(params.entries) * flags_per_entry(p.k_len);
  const int64 step = gridDim.x;
  // Shares of the statistics of rows are drawn, so that a block that waits for them waits only for
  // blocks that have begun and do not wait.
  bool summand = false;
#pragma unroll 1
  while (!summand) {
    const uint32 task_share = fetch_task_share(params, shared);
    summand = task_share >= gridDim.x;
    if (summand) {
      if (threadIdx.x == 0) {
        while (ld_acquire_gpu_u32(&params.task_counters[1]) != gridDim.x) {
        }
      }
      __syncthreads();
    }
    const int64 tasks = summand ? all : queries;
    // A thread looks at one task; then the block does those that were found, one by one.
#pragma unroll 1
    for (int64 first = summand ? blockIdx.x : task_share; first < tasks; first += step * kThreads) {
      const int64 own_row = first + step * threadIdx.x;
      const int64 word = own_row < queries ? own_row : queries + (own_row - queries) / 2;
      const uint32 flagged =
          __ballot_sync(kFullWarp, own_row < tasks && params.nonfinite_flags[1 + word] != 0);
      if (threadIdx.x % 32 == 0) shared.flagged[threadIdx.x / 32] = flagged;
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < kThreads; ++i) {
        if ((shared.flagged[i / 32] >> (i % 32) & 1) == 0) continue;
        const int64 task = first + step * i, key_side = task - queries;
        const TaskKind kind = !summand            ? kTaskRowStatistics
                              : key_side < 0      ? kTaskDq
                              : key_side % 2 == 0 ? kTaskDk
                                                  : kTaskDv;
        recompute_rows(params, shared, kind, key_side < 0 ? task : key_side / 2);
      }
      __syncthreads();
    }
    if (!summand && threadIdx.x == 0) red_release_gpu_add_u32(&params.task_counters[1], 1);
  }
}
