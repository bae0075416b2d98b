// dK and dV over the visible pairs of a mask, by the transposed list.
//
//   dV_j = sum over i of P_ij dO_i,   dK_j = scale * sum over i of dS_ij Q_i
//
// A warp takes the pairs of a key, and the queries of all heads that share it (common/pairs.cuh).
// Long columns are cut into pieces, which a second launch adds.
#include "cuda_src/common/pairs_backward.cuh"

struct Key {
  int number, low, high;  // the band of queries that may see it
  Vector k, v;
};

// Adds the pairs from begin to end, for one batch entry of queries, in each slot.
FA_DEVICE void add_dkdv(const BwdPairsParams& params, const Key& key, int64 entry, int64 begin,
                        int64 end, float (&dk)[kParts][kVector], float (&dv)[kParts][kVector]) {
  const AttentionParams& p = params.common;
  const int slot = static_cast<int>(threadIdx.x) % 32 / kLanes;
  const BatchOffsets at = batch_offsets(p, entry);
  const float* pair_bias = params.pair_bias;
  if (pair_bias != nullptr) pair_bias += params.bias_axes.offset(entry);
  const int64 q_begin = row_offset(params, params.q, entry, 0);
  const int64 dout_begin = row_offset(params, params.dout, entry, 0);
  const float4* statistics = params.row_statistics + entry * p.q_len;
  int query[kUnroll];  // the next ones; -1 stands for none
  auto load_queries = [&](int64 first) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64 place = first + u * kSlots + slot;
      query[u] = place < end ? params.list.columns[place] : -1;
    }
  };
  load_queries(begin);
#pragma unroll 1
  for (int64 first = begin; first < end; first += kUnroll * kSlots) {
    VectorBits q[kUnroll], dout[kUnroll];
    float4 row[kUnroll];
    int own[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      own[u] = query[u] >= key.low && query[u] <= key.high ? query[u] : -1;
      q[u] = dout[u] = no_vector();
      row[u] = float4{FA_INFINITY, 0.0f, 0.0f, 0.0f};
      if (own[u] < 0) continue;
      q[u] = load_row(params, params.q, q_begin + own[u] * params.q.row, p.head_dim);
      dout[u] = load_row(params, params.dout, dout_begin + own[u] * params.dout.row, p.v_dim);
      row[u] = statistics[own[u]];
    }
    load_queries(first + kUnroll * kSlots);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const float product = dot<float>(key.k, q[u]), dp = dot<float>(key.v, dout[u]);
      if (own[u] < 0 || row[u].x == FA_INFINITY) continue;  // a query that sees nothing
      const int64 place = first + u * kSlots + slot;
      const ScoreAndSlope<float> found =
          pair_score(params, at, pair_bias, product, own[u], key.number,
                     pair_bias == nullptr ? 0 : params.list.places[place]);
      if (found.score == -FA_INFINITY) continue;
      const float weight = row[u].y * ex2_approx_ftz(found.score - row[u].x);
      add_vector(dv, weight, dout[u]);
      add_vector(dk, slope_times(found.slope, weight * (dp - row[u].z)), q[u]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    attention_bwd_dkdv_pairs(const __grid_constant__ BwdPairsParams params) {
  const AttentionParams& p = params.common;
  PairWork work;
  // Entries are those of keys; heads of a group have the mask of the first one.
  if (!pair_work(params.list, params.entries / params.group, work, params.group)) return;
  const bool merging = params.phase == kMerge;
  if (merging && !is_first_piece(work)) return;
  const int64 first_entry = work.entry * params.group;
  float dk[kParts][kVector] = {}, dv[kParts][kVector] = {};
  float* piece = params.partials + work.piece * (2 * kDim);
  if (merging) {
    const int count = pieces_of_row(params.list, work);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      add_piece(dk, piece + i * (2 * kDim));
      add_piece(dv, piece + i * (2 * kDim) + kDim);
    }
  } else {
    Key key;
    key.number = work.row;
    key.low = first_query(p, work.row);
    key.high = last_query(p, work.row);
    const int64 k = row_offset(params, params.k, first_entry, work.row);
    const int64 v = row_offset(params, params.v, first_entry, work.row);
    key.k = numbers_of(load_row(params, params.k, k, p.head_dim));
    key.v = numbers_of(load_row(params, params.v, v, p.v_dim));
#pragma unroll 1
    for (int i = 0; i < params.group; ++i) {
      add_dkdv(params, key, first_entry + i, work.begin, work.end, dk, dv);
    }
    add_slots(dk);
    add_slots(dv);
    if (work.piece >= 0) {
      store_sums(piece, dk);
      return store_sums(piece + kDim, dv);
    }
  }
  scale_vector(dk, p.scale);
  store_vector(params.dk.start, row_offset(params, params.dk, first_entry, work.row), p.head_dim,
               params.aligned, dk);
  store_vector(params.dv.start, row_offset(params, params.dv, first_entry, work.row), p.v_dim,
               params.aligned, dv);
}
