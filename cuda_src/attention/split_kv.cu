// Turns K and V of float32 into pairs of float16 before fwd_fp32_sm90 reads them, once for all
// tiles of queries.  Rows may lie anywhere; behind the last one come zeros.
//
// A block takes one tile of kTileN rows.  Eight neighbouring lanes share a row.
#include "cuda_src/common/key_lengths.cuh"
#include "cuda_src/common/load_index.cuh"
#include "cuda_src/common/split_kv.cuh"
#include "cuda_src/common/split_rows.cuh"

constexpr int kDim = FA_DIM;  // padded with zeros
constexpr int kTileN = FA_TILE_N;
constexpr int kParts = FA_PARTS;  // 2: high and low parts; 1: high parts alone
constexpr int kWarps = FA_WARPS;
constexpr int kThreads = 32 * kWarps;
static_assert(kDim <= kThreads, "a thread takes a column");
// Blocks that should fit on a multiprocessor; 0 leaves that open.
constexpr int kMinBlocks = kParts == 2 ? 4 : 0;
using Rows = FloatChunk<kTileN, kDim, kWarps, true>;
using Pairs = SplitTile<kTileN, kDim, kParts>;
static_assert(sizeof(Pairs) == FA_SPLIT_TILE_BYTES, "the host gives memory for this size");

// One array.
struct SplitArray {
  const float* from;
  Pairs* to;                   // of each entry, its tiles one after the other
  int64 batch[kMaxBatchAxes];  // elements along the axes of batch entries
  int64 size[kMaxBatchAxes];   // of them; 1 where the array broadcasts
  uint32 blocks;               // tiles of all entries
  int row, cols;               // elements from row to row; columns
};
struct SplitKvParams {
  SplitArray array[2];
  int rows, tiles;  // of an entry
  int aligned;      // 1: every row of both arrays starts at a multiple of 16 bytes
  // Of builds for lengths: those of the entries, if these share no rows; else null.
  KeyLengths k_lengths;
};
static_assert(sizeof(SplitKvParams) == FA_SPLIT_KV_PARAMS_BYTES,
              "the host module of this name holds the same struct");

// From a pointer or a number, as many elements on as strides along the axes of an array lead to one
// of its entries.
template <typename From>
FA_DEVICE From at_entry(From from, const SplitArray& array, const int64 (&strides)[kMaxBatchAxes],
                        uint32 entry) {
#pragma unroll
  for (int axis = kMaxBatchAxes - 1; axis >= 0; --axis) {
    const uint32 size = static_cast<uint32>(array.size[axis]);
    from += strides[axis] * (entry % size);
    entry /= size;
  }
  return from;
}

// How many rows an entry has; none, if its length is out of range.
FA_DEVICE int rows_of_entry(const SplitKvParams& params, const SplitArray& array, uint32 entry) {
  const KeyLengths& lengths = params.k_lengths;
  if (lengths.start == nullptr) return params.rows;
  const int64 place = at_entry(int64(0), array, lengths.batch, entry);
  const int length = load_index(lengths.start, place, lengths.bytes);
  return length >= 0 && length <= params.rows ? length : 0;
}

// The exponents s of the largest row and of the smallest one, which has the largest exponent: one
// above all others if that is a row of zeros that counts.
struct Exponents {
  int of_largest, of_smallest;
};

struct SharedStorage {
  Exponents of_warp[kWarps];
  int small_of_warp[kWarps];
  float column_of_warp[kWarps][kDim];  // the largest numbers of columns
  float column_scale[kDim];
};
static_assert(sizeof(SharedStorage) == FA_SHARED_BYTES, "the host launches with this size");

// Over all rows of a block but those of zeros; without one, of_largest is the larger of the two.
// Of V, rows of zeros count: their weights are no measure for those of other rows.  `counting` are
// the rows that may, from this thread's first one on.
FA_DEVICE Exponents exponents_of_block(const int (&own)[Rows::kGroups],
                                       const float (&most)[Rows::kGroups], int counting,
                                       SharedStorage& shared) {
  constexpr int kOffset = 200;  // of exponents, for a reduction of unsigned integers
  uint32 below = 0, above = 0;
#pragma unroll
  for (int g = 0; g < Rows::kGroups; ++g) {
    if (most[g] == 0.0f) {
      if (g * Rows::kStep < counting) above = kOffset - kZeroExponent;
      continue;
    }
    below = max(below, static_cast<uint32>(kOffset - own[g]));
    above = max(above, static_cast<uint32>(kOffset + own[g]));
  }
  below = __reduce_max_sync(kFullWarp, below);
  above = __reduce_max_sync(kFullWarp, above);
  if (threadIdx.x % 32 == 0) {
    shared.of_warp[threadIdx.x / 32] = {kOffset - static_cast<int>(below),
                                        static_cast<int>(above) - kOffset};
  }
  __syncthreads();
  Exponents found = shared.of_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    found = {min(found.of_largest, shared.of_warp[w].of_largest),
             max(found.of_smallest, shared.of_warp[w].of_smallest)};
  }
  return found;
}

// Whether many numbers of a block, which has `count` rows, are small beside one exponent.
FA_DEVICE bool has_many_small(const Rows& rows, float scale, int count, SharedStorage& shared) {
  bool is_small = false;
#pragma unroll
  for (int i = 0; i < 4 * Rows::kGroups * Rows::kFours; ++i) {
    const float x = fabsf(rows.x[i / (4 * Rows::kFours)][i / 4 % Rows::kFours][i % 4]) * scale;
    is_small = is_small || (x > 0.0f && x < kSmall);
  }
  const uint32 lanes = __ballot_sync(kFullWarp, is_small);
  if (threadIdx.x % 32 == 0) shared.small_of_warp[threadIdx.x / 32] = __popc(lanes);
  __syncthreads();
  int threads = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) threads += shared.small_of_warp[w];
  return threads >= min(kManySmall, count);
}

// Multiplies rows by the powers of two of their exponents, and then columns, whose largest numbers
// are near 2^14 after both.  Writes what makes up for the latter.
FA_DEVICE void scale_columns(Rows& rows, const int (&own)[Rows::kGroups], SharedStorage& shared,
                             float* column_factor) {
  const int lane = tid_x_again() % 32, first = 8 * (lane % 8);
#pragma unroll
  for (int i = 0; i < 4 * Rows::kFours; ++i) {
    float most = 0.0f;
#pragma unroll
    for (int g = 0; g < Rows::kGroups; ++g) {
      const float x = fabsf(rows.x[g][i / 4][i % 4]);
      if (x <= kLargest) most = fmaxf(most, x * power_of_two(own[g]));
    }
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 8));
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 16));
    const int column = first + Rows::column(i / 4) + i % 4;
    if (lane < 8) shared.column_of_warp[threadIdx.x / 32][column] = most;
  }
  __syncthreads();
  if (threadIdx.x < kDim) {
    float most = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, shared.column_of_warp[w][threadIdx.x]);
    const int exponent = split_exponent(most);
    shared.column_scale[threadIdx.x] = power_of_two(exponent);
    column_factor[threadIdx.x] = power_of_two(-exponent);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4 * Rows::kFours; ++i) {
    const float scale = shared.column_scale[8 * (tid_x_again() % 8) + Rows::column(i / 4) + i % 4];
#pragma unroll
    for (int g = 0; g < Rows::kGroups; ++g) {
      rows.x[g][i / 4][i % 4] = rows.x[g][i / 4][i % 4] * power_of_two(own[g]) * scale;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    attention_split_kv(const __grid_constant__ SplitKvParams params) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const bool is_v = blockIdx.x >= params.array[0].blocks;
  const SplitArray& array = params.array[is_v];
  const uint32 block = blockIdx.x - (is_v ? params.array[0].blocks : 0);
  const uint32 entry = block / params.tiles;
  const int first = static_cast<int>(block - entry * params.tiles) * kTileN;
  const int own_row = split_row<Rows::Tile>(threadIdx.x), col = 8 * (threadIdx.x % 8);
  const int entry_rows = kLengths ? rows_of_entry(params, array, entry) : params.rows;
  if (kLengths && first >= entry_rows) return;  // no kernel reads the tile
  const int rows_left = entry_rows - first - own_row;

  Rows rows;
  rows.load(at_entry(array.from, array, array.batch, entry) +
                static_cast<int64>(first + own_row) * array.row + col,
            array.row, rows_left, array.cols - col, params.aligned && array.cols % 4 == 0);
  int own[Rows::kGroups];
  float most[Rows::kGroups];
#pragma unroll
  for (int g = 0; g < Rows::kGroups; ++g) {
    most[g] = rows.largest(g);
    own[g] = split_exponent(most[g]);
  }
  const Exponents found = exponents_of_block(own, most, is_v ? rows_left : 0, shared);
  bool is_mixed = found.of_smallest - found.of_largest > kMostUniform;
  if (kParts == 2 && is_v && !is_mixed) {
    is_mixed = has_many_small(rows, power_of_two(found.of_largest), min(kTileN, entry_rows - first),
                              shared);
  }

  Pairs& to = array.to[block];
  if (threadIdx.x == 0) to.scale.is_mixed = is_mixed;
  const bool has_columns = kParts == 2 && is_v && is_mixed;
  if (has_columns) scale_columns(rows, own, shared, to.column_factor);
#pragma unroll
  for (int g = 0; g < Rows::kGroups; ++g) {
    const int row = split_row<Rows::Tile>(tid_x_again()) + g * Rows::kStep;
    // Rows of zeros take part, unless there is nothing else.
    const int exponent = is_mixed ? own[g] : min(found.of_largest, own[g]);
    const float scale = has_columns ? 1.0f : power_of_two(exponent);
    store_near<Pairs::Tile, kParts>(to.part[0], rows.x[g], row, scale,
                                    has_columns ? kLowScale : 1.0f);
    if (threadIdx.x % 8 == 0) {
      if (is_v) {
        const int of_zeros = first + row < entry_rows ? kZeroExponent : kNoExponent;
        to.scale.exponent[row] = is_mixed && most[g] == 0.0f ? of_zeros : -exponent;
      } else {
        to.scale.factor[row] = power_of_two(-exponent / 2);
      }
    }
  }
}
