// Scores by an expression of the caller's, tile by tile.  The header with the functions of the
// expression is made for each (fa_cupy/score/header.py) and included here.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "score_program.cuh"

// The batch entry that an offset of the operands stands for: its b and its h.
struct ScoreEntry {
  int b, h;
};
FA_DEVICE ScoreEntry score_entry(const AttentionParams& p, int64 entry) {
  const uint32 heads = p.score_heads, flat = static_cast<uint32>(entry);
  const uint32 b = flat / heads;
  return {static_cast<int>(b), static_cast<int>(flat - b * heads)};
}

template <typename Real>
FA_DEVICE ScoreAndSlope<Real> score_by_expression(const AttentionParams& p, int64 entry, Real s,
                                                  int query, int key) {
  const ScoreEntry at = score_entry(p, entry);
  return score_of_one(ScoreArguments<Real>{p}, s, at.b, at.h, query, key);
}

template <bool kKeys>
struct ScoreSide {
  using Values = ScoreOfQuery;
};
template <>
struct ScoreSide<true> {
  using Values = ScoreOfKey;
};

// What the scores that a thread holds of an accumulator of m64nN or m16n8 are computed from besides
// products: of rows row and row + 8, and of columns col, col + 1, col + 8, col + 9, ...  Rows are
// queries, or keys with kOwnKeys.
template <bool kOwnKeys, int kMmaN>
struct ExpressionTile {
  using OfRow = typename ScoreSide<kOwnKeys>::Values;
  using OfCol = typename ScoreSide<!kOwnKeys>::Values;
  static constexpr bool kPairs = ScoreOfPair::kFields > 0;
  static constexpr bool kCols = OfCol::kFields > 0;
  static constexpr bool kByCol = kPairs || kCols;  // it takes registers for each column
  ScoreOfEntry entry;
  OfRow rows[2];
  OfCol cols[kCols ? kMmaN : 1][2];
  ScoreOfPair pairs[kPairs ? kMmaN : 1][4];
  ScoreOfPositions positions[2];
  int row, col;

  // Nothing here waits for what is loaded.  Of a pair that does not exist, that of another one.
  __device__ __forceinline__ void load(const AttentionParams& p, int64 offset, int first_row,
                                       int first_col) {
    const ScoreArguments<float> arguments = {p};
    const ScoreEntry at = score_entry(p, offset);
    const int last_row = (kOwnKeys ? p.k_len : p.q_len) - 1;
    const int last_col = (kOwnKeys ? p.q_len : p.k_len) - 1;
    row = first_row, col = first_col;
    entry = score_of_entry(arguments, at.b, at.h);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = min(row + 8 * h, last_row);
      if constexpr (kOwnKeys) {
        rows[h] = score_of_key(arguments, entry, own);
      } else {
        rows[h] = score_of_query(arguments, entry, own);
      }
      positions[h] =
          kOwnKeys ? score_of_positions(col, row + 8 * h) : score_of_positions(row + 8 * h, col);
    }
    if constexpr (kByCol) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) load_column(arguments, j, e, last_row, last_col);
      }
    }
  }

  __device__ __forceinline__ void load_column(const ScoreArguments<float>& arguments, int j, int e,
                                              int last_row, int last_col) {
    const int other = min(col + 8 * j + e, last_col);
    OfCol& values = cols[kCols ? j : 0][e];
    if constexpr (kOwnKeys) {
      values = score_of_query(arguments, entry, other);
    } else {
      values = score_of_key(arguments, entry, other);
    }
    if constexpr (kPairs) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int own = min(row + 8 * h, last_row);
        ScoreOfPair& pair = pairs[j][2 * h + e];
        if constexpr (kOwnKeys) {
          pair = score_of_pair(arguments, entry, values, rows[h], other, own);
        } else {
          pair = score_of_pair(arguments, entry, rows[h], values, own, other);
        }
      }
    }
  }

  // The score of register e of s[j], given the scaled product.
  __device__ __forceinline__ ScoreAndSlope<float> score(float s, int j, int e) const {
    const int own = row + e / 2 * 8, step = 8 * j + e % 2;
    const OfRow& of_row = rows[e / 2];
    const OfCol& of_col = cols[kCols ? j : 0][e % 2];
    const ScoreOfPair& pair = pairs[kPairs ? j : 0][e];
    const ScoreOfPositions& first = positions[e / 2];
    if constexpr (kOwnKeys) {
      return score_in_tile(entry, of_col, of_row, pair, first, step, 0, s, col + step, own);
    } else {
      return score_in_tile(entry, of_row, of_col, pair, first, 0, step, s, own, col + step);
    }
  }
};
