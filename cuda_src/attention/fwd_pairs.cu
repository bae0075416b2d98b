// Attention over the visible pairs of a mask, one by one: for masks whose blocks are nearly empty,
// such as graphs.
//
// It does without tensor cores and shared memory, for it waits for keys and values: a pair is 4
// operations for each number that it loads.  A slot of lanes has kUnroll keys and as many values on
// their way at a time (common/pairs.cuh), and follows their scores by an online softmax of its own
// (common/softmax.cuh).  Rows with large scores, or with sums that overflow, are computed once more
// in float64.
#include "cuda_src/common/band.cuh"
#include "cuda_src/common/pairs.cuh"
#include "cuda_src/common/score.cuh"
#include "cuda_src/common/sinks.cuh"
#include "cuda_src/common/softmax.cuh"

// The host module of this name holds the same fields in the same order.
struct FwdPairsParams {
  AttentionParams common;  // without mask
  PairRows list;           // by queries
  const float* pair_bias;  // added to the score of each pair; null without one
  PairAxes bias_axes;
  float* partials;  // (pieces of all entries, kDim + 4): row_max, row_sum, overflowed, then sums
  int64 entries;
  int merging;  // 1: add up pieces
  int aligned;  // every row of q, k, v and out starts at a multiple of 16 bytes
};
static_assert(sizeof(FwdPairsParams) == FA_FWD_PAIRS_BYTES, "fa_cupy/gpu holds the same struct");

constexpr int kMinBlocks = 4;       // on a multiprocessor: up to 128 registers a thread
constexpr int kPartial = kDim + 4;  // floats of a piece

struct Row {
  BatchOffsets at;
  const float* pair_bias;
  int number, low, high;  // the band of keys that it may see
  Vector q;
};

// ------------------------------------------------------------------------------------------ scores
// In units of log2 as float, in natural ones as double; -inf hides the pair.
FA_DEVICE float score_of_pair(const FwdPairsParams& params, const Row& row, float product, int key,
                              int64 place) {
  const AttentionParams& p = params.common;
  const float x = score_from_product(p, row.at, product, row.number, key);
  if (row.pair_bias == nullptr) return scale_score(x, p.exp2_scale);
  return __fmul_rz((kScoreMod ? x : p.scale * x) + row.pair_bias[place], kLog2e);
}
FA_DEVICE double score_of_pair(const FwdPairsParams& params, const Row& row, double product,
                               int key, int64 place) {
  const double x = score_from_product_f64(params.common, row.at, product, row.number, key);
  return row.pair_bias == nullptr ? x : x + row.pair_bias[place];
}

FA_DEVICE float weight_of(float difference) { return ex2_approx_ftz(difference); }
FA_DEVICE double weight_of(double difference) {
  return ex2_approx_ftz(static_cast<float>(difference * kLog2eDouble));
}
FA_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
FA_DEVICE double larger(double a, double b) { return b > a ? b : a; }

// ----------------------------------------------------------------------------------------- softmax
// The row_max of no pair: below all finite scores, of products of float32 in float64 too.
template <typename Real>
constexpr Real kLowest = kNoMax;
template <>
constexpr double kLowest<double> = -1.7976931348623157e308;

template <typename Real>
struct Sums {
  Real row_max = kLowest<Real>, row_sum = 0, acc[kParts][kVector] = {};
  bool overflowed = false;  // whether a score may be -inf where it hides no pair

  // Makes room for scores of up to new_max.
  __device__ __forceinline__ void raise(Real new_max) {
    if (new_max == row_max) return;
    const Real correction = weight_of(row_max - new_max);
    row_max = new_max;
    row_sum *= correction;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) acc[part][i] *= correction;
    }
  }

  __device__ __forceinline__ void add_slots() {
    Real most = row_max;
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      most = larger(most, __shfl_xor_sync(kFullWarp, most, step));
    }
    raise(most);
    overflowed = __any_sync(kFullWarp, overflowed);
    row_sum = sum_over_slots(row_sum);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) acc[part][i] = sum_over_slots(acc[part][i]);
    }
  }

  __device__ __forceinline__ bool is_finite() const {
    float zero = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) zero += static_cast<float>(acc[part][i]) * 0.0f;
    }
    return zero == 0.0f;
  }
};

// Sums over the pairs from begin to end; those of all slots are added up.
template <typename Real, int kCount>
FA_DEVICE Sums<Real> attend(const FwdPairsParams& params, const Row& row, int64 begin, int64 end) {
  const AttentionParams& p = params.common;
  const int slot = static_cast<int>(threadIdx.x) % 32 / kLanes;
  Sums<Real> sums;
  int key[kCount];  // the next ones; -1 stands for none
  auto load_keys = [&](int64 first) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int64 place = first + u * kSlots + slot;
      key[u] = place < end ? params.list.columns[place] : -1;
    }
  };
  load_keys(begin);
#pragma unroll 1
  for (int64 first = begin; first < end; first += kCount * kSlots) {
    VectorBits k[kCount], v[kCount];
    int own[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      own[u] = key[u] >= row.low && key[u] <= row.high ? key[u] : -1;
      k[u] = v[u] = no_vector();
      if (own[u] < 0) continue;
      k[u] = load_vector(p.k, row.at.k + static_cast<int64>(own[u]) * p.k_row, p.head_dim,
                         params.aligned);
      v[u] = load_vector(p.v, row.at.v + static_cast<int64>(own[u]) * p.v_row, p.v_dim,
                         params.aligned);
    }
    load_keys(first + kCount * kSlots);
    Real score[kCount], most = sums.row_max;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const Real product = dot<Real>(row.q, k[u]);
      score[u] = -FA_INFINITY;
      if (own[u] < 0) continue;
      score[u] = score_of_pair(params, row, product, own[u], first + u * kSlots + slot);
      most = larger(most, score[u]);
    }
    sums.raise(most);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      if (score[u] == -FA_INFINITY) {  // hidden, whatever its value is
        sums.overflowed |= own[u] >= 0 && !kScoreMod && row.pair_bias == nullptr;
        continue;
      }
      const Real weight = weight_of(score[u] - sums.row_max);
      sums.row_sum += weight;
      add_vector(sums.acc, weight, v[u]);
    }
  }
  sums.add_slots();
  return sums;
}

// ------------------------------------------------------------------------------------------ pieces
FA_DEVICE void store_piece(float* to, const Sums<float>& sums) {
  store_sums(to + 4, sums.acc);
  if (threadIdx.x % 32 == 0) {
    *reinterpret_cast<float4*>(to) =
        float4{sums.row_max, sums.row_sum, sums.overflowed ? 1.0f : 0.0f, 0.0f};
  }
}

FA_DEVICE Sums<float> merge_pieces(const float* from, int count) {
  Sums<float> sums;
#pragma unroll 1
  for (int piece = 0; piece < count; ++piece, from += kPartial) {
    const float4 head = *reinterpret_cast<const float4*>(from);
    const Vector other = load_sums(from + 4);
    sums.raise(fmaxf(sums.row_max, head.x));
    sums.overflowed |= head.z != 0.0f;
    const float correction = weight_of(head.x - sums.row_max);
    sums.row_sum = fmaf(correction, head.y, sums.row_sum);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sums.acc[part][i] = fmaf(correction, other.x[part][i], sums.acc[part][i]);
      }
    }
  }
  return sums;
}

// -------------------------------------------------------------------------------------------- rows
struct Finished {
  float out[kParts][kVector], lse;
};

// A row in float64, all of its pairs; as recompute_row_f64 (common/recompute_row.cuh).
FA_DEVICE Finished recompute(const FwdPairsParams& params, const Row& row, int64 begin, int64 end,
                             float sink) {
  Sums<double> sums = attend<double, 1>(params, row, begin, end);
  if (sink != -FA_INFINITY) {
    sums.raise(larger(sums.row_max, static_cast<double>(sink)));
    sums.row_sum += sink - sink == 0.0f ? weight_of(sink - sums.row_max) : sink - sink;
  }
  const float total = static_cast<float>(sums.row_sum), inverse = inverse_sum(total);
  Finished found;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      found.out[part][i] = static_cast<float>(sums.acc[part][i] * inverse);
    }
  }
  const double lse = sums.row_max + kLn2 * lg2_approx_ftz(total);
  // An infinite one would say that the row has seen no key.
  found.lse = fabs(lse) > -kNoMax ? (lse < 0.0 ? kNoMax : -kNoMax) : static_cast<float>(lse);
  if (total == 0.0f) found.lse = -FA_INFINITY;
  return found;
}

// Whether scores have left float32; a row that has seen no key has a row_max of kNoMax as well.
FA_DEVICE bool is_at_an_end(const Sums<float>& sums) {
  return fabsf(sums.row_max) >= -kNoMax && (sums.row_max > 0.0f || sums.row_sum > 0.0f);
}

FA_DEVICE Finished finish(const FwdPairsParams& params, const Row& row, const PairWork& work,
                          Sums<float> sums) {
  const float sink = load_sink(params.common, work.entry, row.number);
  const bool again = (is_large(sums.row_max) && sums.row_sum != 0.0f) || is_at_an_end(sums) ||
                     (sums.row_sum * 0.0f == 0.0f && !sums.is_finite()) || sums.overflowed ||
                     (sink != -FA_INFINITY && is_large(sink));
  if (__any_sync(kFullWarp, again)) {
    return recompute(params, row, work.row_begin, work.row_end, sink);
  }
  const float correction = add_sink(sink_in_log2(sink), sums.row_max, sums.row_sum);
  const float factor = correction * inverse_sum(sums.row_sum);
  Finished found;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) found.out[part][i] = factor * sums.acc[part][i];
  }
  found.lse = kLn2 * (sums.row_max + lg2_approx_ftz(sums.row_sum));
  if (sums.row_sum == 0.0f) found.lse = -FA_INFINITY;
  return found;
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    attention_fwd_pairs(const __grid_constant__ FwdPairsParams params) {
  const AttentionParams& p = params.common;
  PairWork work;
  if (!pair_work(params.list, params.entries, work)) return;
  if (params.merging && !is_first_piece(work)) return;
  Row row;
  row.at = batch_offsets(p, work.entry);
  row.number = work.row;
  row.low = first_key(p, work.row);
  row.high = last_key(p, work.row);
  row.pair_bias = params.pair_bias;
  if (row.pair_bias != nullptr) row.pair_bias += params.bias_axes.offset(work.entry);
  row.q = numbers_of(load_vector(p.q, row.at.q + static_cast<int64>(work.row) * p.q_row, p.head_dim,
                                 params.aligned));
  float* piece = params.partials + work.piece * kPartial;
  Sums<float> sums;
  if (params.merging) {
    sums = merge_pieces(piece, pieces_of_row(params.list, work));
  } else {
    sums = attend<float, kUnroll>(params, row, work.begin, work.end);
    if (work.piece >= 0) return store_piece(piece, sums);
  }
  const Finished found = finish(params, row, work, sums);
  store_vector(p.out, row.at.out + static_cast<int64>(work.row) * p.out_row, p.v_dim,
               params.aligned, found.out);
  if (p.lse != nullptr && threadIdx.x % 32 == 0) {
    p.lse[work.entry * p.q_len + work.row] = found.lse;
  }
}
