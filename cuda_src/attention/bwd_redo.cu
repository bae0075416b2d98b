// Rows of gradients whose sums came out not finite, computed once more in float32, pair by pair.
//
// It is launched behind the kernels that write gradients, and leaves at once where they have
// spoiled nothing.  64 queries or keys are one task, dK and dV of the same keys two.  A block goes
// through the tiles of 64 rows on the other side of the pairs, as the other kernels do:
//   weights:  P = exp(S - LSE) for dV,   dS = P (dO V^T - delta) for dK and dQ
//   sums:     dV = P^T dO,   dK = dS^T Q,   dQ = dS K
// dS times what a softcap makes of it.  But a hidden pair has no part in a sum, whatever its rows
// hold, whether a band, a mask or a bias of -inf hides it.  So a gradient is not finite where
// something that belongs to its sum is not.
//
// Sums are also spoiled by rows whose LSE is too large (common/far_rows.cuh).  Their largest scores
// and sums of exponentials come first, again 64 queries a task, for all that follows needs them.
//
// All kinds of tasks go through the same loops, which are rolled up, and scores become weights in
// shared memory, so that there is no second copy of anything: this kernel was most of the time that
// a first call took to compile.
#include "cuda_src/common/backward_params.cuh"
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/element.cuh"
#include "cuda_src/common/far_rows.cuh"
#include "cuda_src/common/scores.cuh"
#include "cuda_src/common/spoiled.cuh"
#include "ptx/atomic.cuh"

constexpr bool kBf16 = FA_BF16;  // bfloat16, else float16
constexpr int kThreads = FA_THREADS;
constexpr int kTile = kSpoiledRows;
constexpr int kColumns = 32;         // of the factors of a score, at a time
constexpr int kParts = FA_DIM / 64;  // of the sums, of 64 columns each
constexpr int kPitch = kTile + 4;    // floats of a row in shared memory
static_assert(kThreads == 256, "a thread has 4 x 4 pairs");
static_assert(FA_DIM % 64 == 0, "sums are in parts of 64 columns");

struct RedoParams : BackwardParams {
  float2* far;     // of each query, as in `rows`: its largest score, 1 / its sum of exponentials
  uint32* shares;  // how many of the tasks on queries were drawn, and how many are done; 0 at first
};
static_assert(sizeof(RedoParams) == FA_REDO_PARAMS_BYTES, "fa_cupy/gpu holds the same struct");

struct SharedStorage {
  union {
    float factors[2][kColumns][kPitch];  // of the scores: by column, then row
    float rows[kTile][kPitch];           // of what is summed; before, dP by row of the other side
    RowSums sums[kThreads];
  };
  float weights[kTile][kPitch];  // by row of the other side, then own row; before, products
  uint32 found[kThreads / 32];
  uint32 share;
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "fa_cupy/gpu asks for as much");

enum Kind : int { kRowSums, kOfQueries, kOfKeys, kOfValues };

// The weight of a hidden pair.  Others are never -0: they have had 0 added.
constexpr uint32 kHidden = 0x80000000u;

// Rows of one entry, from one of them on.
struct Rows {
  uint16* start;
  int64 step;
  int count;  // how many there are

  __device__ __forceinline__ uint16* at(int row, int col) const { return start + row * step + col; }
  __device__ __forceinline__ Rows from(int row) const {
    return {start + row * step, step, count - row};
  }
};

// One or the other, by their members: a choice between structs would put them on a stack.
FA_DEVICE Rows either(bool first, const Rows& a, const Rows& b) {
  return {first ? a.start : b.start, first ? a.step : b.step, first ? a.count : b.count};
}

FA_DEVICE Rows rows_of(const BackwardParams& params, const Array& array, uint32 entry, int count) {
  return {entry_of(params, array, entry), array.row, count};
}

// Eight elements as floats; zeros where there are none.
FA_DEVICE void load_8(float (&x)[8], const Rows& rows, int row, int col, int cols) {
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
FA_DEVICE void multiply(SharedStorage& shared, float (*to)[kPitch], const Rows& a, const Rows& b,
                        int cols) {
  float x[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i / 4][i % 4] = 0.0f;
  const int row = threadIdx.x % kTile, chunk = threadIdx.x / kTile * 8;
#pragma unroll 1
  for (int first = 0; first < cols; first += kColumns) {
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
    for (int col = 0; col < kColumns; ++col) {
      float left[4], right[4];
      load_four(left, &shared.factors[0][col][own_rows()]);
      load_four(right, &shared.factors[1][col][other_rows()]);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        x[i / 4][i % 4] = fmaf(left[i / 4], right[i % 4], x[i / 4][i % 4]);
    }
  }
  __syncthreads();  // nobody reads the factors any more
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<float4*>(&to[other_rows() + j][own_rows()]) =
        make_float4(x[0][j], x[1][j], x[2][j], x[3][j]);
  }
}

// Adds, to 64 columns of the sums of own rows, weights times rows of the other side.
FA_DEVICE void add(SharedStorage& shared, float (&sums)[4][4], const Rows& rows, int first,
                   int cols) {
  __syncthreads();  // the weights are there, and nobody reads what lies where the rows go
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
      if (__float_as_uint(weights[i]) == kHidden) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(weights[i], x[j], sums[i][j]);
    }
  }
}

// What a mask says of 64 queries and 64 keys, which are of one of its blocks.
struct MaskTile {
  bool hidden;
  const uint32* words;  // of the block; null where all of it is seen

  __device__ __forceinline__ bool sees(int query, int key) const {
    return words == nullptr || block_bit(words, query % kMaskBlock, key % kMaskBlock);
  }
};

FA_DEVICE MaskTile mask_tile(const MaskTable& mask, uint32 entry, int query, int key) {
  if (!is_masked(mask)) return {false, nullptr};
  const int place = block_place(mask, table_row(mask, entry, query / kMaskBlock), key / kMaskBlock);
  return {place == kHiddenBlock, place < 0 ? nullptr : place_words(mask, place)};
}

// A score in units that p.exp2_scale makes those of log2, and what a softcap makes of a step of the
// product.
FA_DEVICE Capped score_of(const AttentionParams& p, const BatchOffsets& at, float product,
                          int query, int key) {
  if (!p.transform) return {product, 1.0f};
  return {one_score(p, at, product, query, key), capped_with_slope(p, product).slope};
}

// What is known of the queries of an entry.
struct Known {
  const float* pairs;  // LSE of two of them, delta of them
  const float2* far;

  __device__ __forceinline__ float lse(int query) const { return pairs[query / 2 * 4 + query % 2]; }
  __device__ __forceinline__ float delta(int query) const {
    return pairs[query / 2 * 4 + query % 2 + 2];
  }
  // The weight of a score of a query of this LSE.
  __device__ __forceinline__ float weight(float lse, int query, float score, float scale) const {
    if (!is_far_row(lse)) return ex2_approx_ftz(fmaf(score, scale, -lse));
    const float2 of = far[query];
    return ex2_approx_ftz(__fmul_rn(score, scale) - of.x) * of.y;
  }
};

FA_DEVICE Known known_of(const RedoParams& params, uint32 entry) {
  const int64 first = static_cast<int64>(entry) * params.row_pairs;
  return {reinterpret_cast<const float*>(params.rows + first), params.far + 2 * first};
}

// Of 64 queries and 64 keys of an entry: their first ones, and what there is to know of them.
struct Pairs {
  Kind kind;
  int own, other;
  BatchOffsets at;  // of the bias
  Known known;
  MaskTile mask;
};

// Makes weights of the products of 64 x 64 pairs, where they stand, or adds them to this thread's
// part of the sums of its row.
FA_DEVICE void weigh(const AttentionParams& p, SharedStorage& shared, const Pairs& pairs,
                     RowSums& sums) {
  const int col = threadIdx.x % kTile;  // the own row
#pragma unroll 1
  for (int row = threadIdx.x / kTile; row < kTile; row += kThreads / kTile) {
    float& cell = shared.weights[row][col];
    const bool queries = pairs.kind <= kOfQueries;
    const int mine = pairs.own + col, its = pairs.other + row;
    const int query = queries ? mine : its, key = queries ? its : mine;
    const float lse = pairs.known.lse(query);
    // Of a query that does not exist, or that attends to nothing, the LSE is infinite.
    bool seen = lse != FA_INFINITY && key >= first_key(p, query) && key <= last_key(p, query) &&
                pairs.mask.sees(query, key);
    float x = 0.0f;
    if (seen) {
      const Capped score = score_of(p, pairs.at, cell, query, key);
      seen = score.score != -FA_INFINITY;
      if (pairs.kind == kRowSums) {
        sums.add(__fmul_rn(score.score, p.exp2_scale), 1.0f);
        continue;
      }
      x = pairs.known.weight(lse, query, score.score, p.exp2_scale);
      if (pairs.kind != kOfValues) {
        x *= (shared.rows[row][col] - pairs.known.delta(query)) * score.slope;
      }
    }
    cell = seen ? x + 0.0f : __int_as_float(static_cast<int>(kHidden));
  }
}

// Puts down the sums of 64 queries, of each of which four threads have a part, given the natural
// LSEs of `count` of them.
FA_DEVICE void put_sums(SharedStorage& shared, float2* to, const RowSums& sums, const float* lse,
                        int count) {
  shared.sums[threadIdx.x] = sums;
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= min(count, kTile)) return;
  RowSums all;
#pragma unroll
  for (int i = 0; i < kThreads; i += kTile) {
    const RowSums& part = shared.sums[i + threadIdx.x];
    all.add(part.top, part.sum);
  }
  to[threadIdx.x] = make_float2(all.top, inverse_of(all, lse[threadIdx.x] * kLog2e));
}

// Whether one of 64 queries is far; all threads of a warp ask.
FA_DEVICE bool any_far(const Known& known, int first) {
  const int lane = threadIdx.x % 32;
  return __any_sync(
      kFullWarp, is_far_row(known.lse(first + lane)) || is_far_row(known.lse(first + 32 + lane)));
}

// The tiles of the other side that 64 rows see.
struct Tiles {
  int begin, end;
};

FA_DEVICE Tiles tiles_of(const AttentionParams& p, bool queries, int own) {
  if (queries) {
    const KeyTiles all = key_tiles(p, own, min(own + kTile, p.q_len) - 1, kTile);
    return {all.begin, all.end};
  }
  const QueryTiles all = query_tiles(p, own, min(own + kTile, p.k_len) - 1, kTile);
  return {all.begin, all.end};
}

// The gradient, or the sums, of 64 rows: tile `index`, of all entries.
FA_DEVICE void redo(const RedoParams& params, SharedStorage& shared, Kind kind, int64 index) {
  const bool queries = kind <= kOfQueries;
  const AttentionParams& p = params.common;
  const uint32 tiles = spoiled_tiles(queries ? p.q_len : p.k_len);
  const uint32 own_entry = static_cast<uint32>(divide(index, static_cast<int64>(tiles)));
  const int own = static_cast<int>(index - static_cast<int64>(own_entry) * tiles) * kTile;
  if (kind == kRowSums && !any_far(known_of(params, own_entry), own)) return;
  const Tiles others = tiles_of(p, queries, own);
  const int cols = kind == kOfValues ? p.v_dim : p.head_dim;
  RowSums row_sums;
  float sums[kParts][4][4];
#pragma unroll
  for (int i = 0; i < 16 * kParts; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
  const uint32 first_entry = queries ? own_entry : own_entry * params.group;
  const int heads = queries ? 1 : params.group;
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    const uint32 entry = first_entry + head;
    const Rows q = rows_of(params, params.q, entry, p.q_len);
    const Rows k = rows_of(params, params.k, entry, p.k_len);
    const Rows v = rows_of(params, params.v, entry, p.k_len);
    const Rows dout = rows_of(params, params.dout, entry, p.q_len);
    Pairs pairs = {kind, own, 0, batch_offsets(p, entry), known_of(params, entry), {}};
#pragma unroll 1
    for (int tile = others.begin; tile < others.end; ++tile) {
      const int other = pairs.other = tile * kTile;
      pairs.mask = mask_tile(params.mask, entry, queries ? own : other, queries ? other : own);
      if (pairs.mask.hidden) continue;
      const bool differentiates = kind == kOfQueries || kind == kOfKeys;
#pragma unroll 1
      for (int i = 0; i < (differentiates ? 2 : 1); ++i) {
        const Rows of_queries = either(i == 0, q, dout), of_keys = either(i == 0, k, v);
        multiply(shared, i == 0 ? shared.weights : shared.rows,
                 either(queries, of_queries, of_keys).from(own),
                 either(queries, of_keys, of_queries).from(other), i == 0 ? p.head_dim : p.v_dim);
      }
      __syncthreads();  // the products are there
      weigh(p, shared, pairs, row_sums);
      if (kind == kRowSums) continue;
      const Rows summed = either(kind == kOfValues, dout, either(queries, k, q));
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (64 * part < cols) add(shared, sums[part], summed.from(other), 64 * part, cols);
      }
    }
  }
  if (kind == kRowSums) {
    __syncthreads();  // all threads have read the sums of the task before
    const int64 first = 2 * static_cast<int64>(own_entry) * params.row_pairs;
    const float* lse = p.lse + static_cast<int64>(own_entry) * p.q_len + own;
    return put_sums(shared, params.far + first + own, row_sums, lse, p.q_len - own);
  }

  const Array& array = queries ? params.dq : kind == kOfKeys ? params.dk : params.dv;
  const Rows to = rows_of(params, array, first_entry, queries ? p.q_len : p.k_len).from(own);
  const float scale = kind == kOfValues ? 1.0f : params.scale;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
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
FA_DEVICE uint32 draw(const RedoParams& params, SharedStorage& shared) {
  if (threadIdx.x == 0) shared.share = atom_add_u32(&params.shares[0], 1);
  __syncthreads();
  const uint32 share = shared.share;
  __syncthreads();
  return share;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    attention_bwd_redo(const __grid_constant__ RedoParams params) {
  if (params.spoiled[0] == 0) return;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const AttentionParams& p = params.common;
  const int64 queries = static_cast<int64>(params.entries) * params.group * spoiled_tiles(p.q_len);
  const int64 all = queries + 2 * static_cast<int64>(params.entries) * spoiled_tiles(p.k_len);
  const int64 step = gridDim.x;
  // Shares of the sums of rows are drawn, so that a block that waits for them waits only for blocks
  // that have begun and do not wait.
  bool summed = false;
#pragma unroll 1
  while (!summed) {
    const uint32 share = draw(params, shared);
    summed = share >= gridDim.x;
    if (summed) {
      if (threadIdx.x == 0) {
        while (ld_acquire_gpu_u32(&params.shares[1]) != gridDim.x) {
        }
      }
      __syncthreads();
    }
    const int64 tasks = summed ? all : queries;
    // A thread looks at one task; then the block does those that were found, one by one.
#pragma unroll 1
    for (int64 first = summed ? blockIdx.x : share; first < tasks; first += step * kThreads) {
      const int64 mine = first + step * threadIdx.x;
      const int64 word = mine < queries ? mine : queries + (mine - queries) / 2;
      const uint32 found = __ballot_sync(kFullWarp, mine < tasks && params.spoiled[1 + word] != 0);
      if (threadIdx.x % 32 == 0) shared.found[threadIdx.x / 32] = found;
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < kThreads; ++i) {
        if ((shared.found[i / 32] >> (i % 32) & 1) == 0) continue;
        const int64 task = first + step * i, of_keys = task - queries;
        const Kind kind = !summed            ? kRowSums
                          : of_keys < 0      ? kOfQueries
                          : of_keys % 2 == 0 ? kOfKeys
                                             : kOfValues;
        redo(params, shared, kind, of_keys < 0 ? task : of_keys / 2);
      }
      __syncthreads();
    }
    if (!summed && threadIdx.x == 0) red_release_gpu_add_u32(&params.shares[1], 1);
  }
}
