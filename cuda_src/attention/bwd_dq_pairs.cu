// dQ over the visible pairs of a mask, and the gradient of a number for each pair.
//
//   dQ_i = scale * sum over j of dS_ij K_j,   dS_ij = P_ij (dO_i . V_j - delta_i) slope_ij
//
// A warp takes the pairs of a query (common/pairs.cuh).  It computes delta first, and writes what
// bwd_dkdv_pairs knows of the query.  Long rows are cut into pieces, which a second launch adds.
#include "cuda_src/common/pairs_backward.cuh"

struct Query {
  BatchOffsets at;
  const float* pair_bias;
  float* pair_ds;
  int64 k, v;             // where keys and values of the entry begin
  int number, low, high;  // the band of keys that it may see
  Vector q, dout;
  float offset, factor, delta;
  bool sees;  // any key
};

FA_DEVICE Query load_query(const BwdPairsParams& params, const PairWork& work) {
  const AttentionParams& p = params.common;
  Query query;
  query.at = batch_offsets(p, work.entry);
  query.number = work.row;
  query.low = first_key(p, work.row);
  query.high = last_key(p, work.row);
  query.pair_bias = params.pair_bias;
  if (query.pair_bias != nullptr) query.pair_bias += params.bias_axes.offset(work.entry);
  query.pair_ds = params.pair_ds;
  if (query.pair_ds != nullptr) query.pair_ds += work.entry * params.pairs;
  query.k = row_offset(params, params.k, work.entry, 0);
  query.v = row_offset(params, params.v, work.entry, 0);
  const int64 q = row_offset(params, params.q, work.entry, work.row);
  const int64 dout = row_offset(params, params.dout, work.entry, work.row);
  const int64 out = row_offset(params, params.out, work.entry, work.row);
  query.q = numbers_of(load_row(params, params.q, q, p.head_dim));
  query.dout = numbers_of(load_row(params, params.dout, dout, p.v_dim));
  const int64 index = work.entry * p.q_len + work.row;
  const float lse = params.lse[index];
  query.sees = lse != -FA_INFINITY;
  query.delta = dot<float>(query.dout, load_row(params, params.out, out, p.v_dim));
  if (params.dlse != nullptr) query.delta -= params.dlse[index];
  query.offset = lse_or_marker(lse);
  query.factor = 1.0f;
  return query;
}

// Calls visit(u, key's vector, score and slope, place, whether there is a pair) for the pairs from
// begin to end, kUnroll in each slot at a time, after load(u, key) for all of these; the key is -1
// if the query may not see it.
template <typename Load, typename Visit>
FA_DEVICE void for_each_pair(const BwdPairsParams& params, const Query& query, int64 begin,
                             int64 end, const Load& load, const Visit& visit) {
  const AttentionParams& p = params.common;
  const int slot = static_cast<int>(threadIdx.x) % 32 / kLanes;
  int key[kUnroll];  // the next ones; -1 stands for none
  auto load_keys = [&](int64 first) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64 place = first + u * kSlots + slot;
      key[u] = place < end ? params.list.columns[place] : -1;
    }
  };
  load_keys(begin);
#pragma unroll 1
  for (int64 first = begin; first < end; first += kUnroll * kSlots) {
    VectorBits k[kUnroll];
    int own[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      own[u] = key[u] >= query.low && key[u] <= query.high ? key[u] : -1;
      k[u] = own[u] < 0 ? no_vector()
                        : load_row(params, params.k, query.k + own[u] * params.k.row, p.head_dim);
      load(u, own[u]);
    }
    load_keys(first + kUnroll * kSlots);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64 place = first + u * kSlots + slot;
      const float product = dot<float>(query.q, k[u]);
      ScoreAndSlope<float> found = {-FA_INFINITY, 0.0f};
      if (own[u] >= 0 && query.sees) {
        found = pair_score(params, query.at, query.pair_bias, product, query.number, own[u], place);
      }
      visit(u, k[u], found, place, place < end);
    }
  }
}

// The largest score of a row and the sum of exponentials relative to it, as they are rounded here.
FA_DEVICE RowStatistics statistics_of(const BwdPairsParams& params, const Query& query,
                                      const PairWork& work) {
  RowStatistics sums;
  for_each_pair(
      params, query, work.row_begin, work.row_end, [](int, int) {},
      [&](int, const VectorBits&, const ScoreAndSlope<float>& found, int64, bool) {
        if (found.score != -FA_INFINITY) sums.merge(found.score, 1.0f);
      });
  float most = sums.row_max;
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, step));
  }
  const bool has_some = sums.row_max != -FA_INFINITY;
  const float sum = has_some ? sums.row_sum * ex2_approx_ftz(sums.row_max - most) : 0.0f;
  sums.row_max = most;
  sums.row_sum = sum_over_slots(sum);
  return sums;
}

// Adds dS times keys over the pairs from begin to end, in each slot.
FA_DEVICE void add_dq(const BwdPairsParams& params, const Query& query, int64 begin, int64 end,
                      float (&dq)[kParts][kVector]) {
  VectorBits v[kUnroll];
  for_each_pair(
      params, query, begin, end,
      [&](int u, int key) {
        v[u] = key < 0
                   ? no_vector()
                   : load_row(params, params.v, query.v + key * params.v.row, params.common.v_dim);
      },
      [&](int u, const VectorBits& k, const ScoreAndSlope<float>& found, int64 place, bool exists) {
        const float dp = dot<float>(query.dout, v[u]);
        const bool counts = found.score != -FA_INFINITY;
        float ds = 0.0f;
        if (counts) {
          const float weight = query.factor * ex2_approx_ftz(found.score - query.offset);
          ds = weight * (dp - query.delta);
          add_vector(dq, slope_times(found.slope, ds), k);
        }
        if (query.pair_ds != nullptr && exists && threadIdx.x % kLanes == 0) {
          query.pair_ds[place] = ds;
        }
      });
}

// Adds up the gradients of the numbers of pairs over the entries that share them, in their order.
FA_DEVICE void sum_pair_dbias(const BwdPairsParams& params) {
  const int64 blocks = (params.pairs + 32 * kWarps - 1) / (32 * kWarps);
  const int64 target = divide(static_cast<int64>(blockIdx.x), blocks);
  const int64 place = (blockIdx.x - target * blocks) * (32 * kWarps) + threadIdx.x;
  if (place >= params.pairs) return;
  const int64 first = params.dbias.kept_entries.offset(target);
  float sum = 0.0f;
#pragma unroll 1
  for (int64 i = 0; i < params.dbias.summed_count; ++i) {
    const int64 entry = first + params.dbias.summed_entries.offset(i);
    const int64 matrix = params.list.matrix_of_entry[entry];
    const int64* ends = params.list.begin + matrix * params.list.rows;
    if (place >= ends[0] && place < ends[params.list.rows]) {
      sum += params.pair_ds[entry * params.pairs + place];
    }
  }
  params.pair_dbias[params.dbias.kept.offset(target) + place] = sum;
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    attention_bwd_dq_pairs(const __grid_constant__ BwdPairsParams params) {
  const AttentionParams& p = params.common;
  if (params.phase == kSumBias) return sum_pair_dbias(params);
  PairWork work;
  if (!pair_work(params.list, params.entries, work)) return;
  const bool merging = params.phase == kMerge;
  if (merging && !is_first_piece(work)) return;
  Query query = load_query(params, work);
  const bool is_large = is_large_lse(query.offset);
  float dq[kParts][kVector] = {};
  float* piece = params.partials + work.piece * kDim;
  if (is_large) {
    // Its statistics are of the whole row, so that the warp that adds pieces computes all of it.
    if (work.piece >= 0 && !merging) return;
    const RowStatistics sums = statistics_of(params, query, work);
    query.offset = sums.row_max;
    query.factor = inverse_row_sum(sums, params.lse[work.entry * p.q_len + work.row] * kLog2e);
  }
  if (merging && !is_large) {
    const int count = pieces_of_row(params.list, work);
#pragma unroll 1
    for (int i = 0; i < count; ++i) add_piece(dq, piece + i * kDim);
  } else {
    add_dq(params, query, is_large ? work.row_begin : work.begin,
           is_large ? work.row_end : work.end, dq);
    add_slots(dq);
    if (work.piece >= 0 && !merging) return store_sums(piece, dq);
  }
  scale_vector(dq, p.scale);
  store_vector(params.dq.start, row_offset(params, params.dq, work.entry, work.row), p.head_dim,
               params.aligned, dq);
  if (threadIdx.x % 32 == 0) {
    params.row_statistics[work.entry * p.q_len + work.row] =
        float4{query.sees ? query.offset : FA_INFINITY, query.factor, query.delta, 0.0f};
  }
}
