// Dropout: which weights of attention are kept.
//
// A counter of Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
// decides on the 16 pairs of a row that a lane has among a group of 64 keys, in the order of a
// mask's words (block_lists.cuh): two counters make a word.  fa_cupy/dropout/decisions.py has the
// same layout, and says why.
#pragma once
#include "cuda_src/common/packed.cuh"
#include "ptx/special.cuh"
#include "ptx/types.cuh"

#ifndef FA_DROPOUT
#define FA_DROPOUT 0
#endif
constexpr bool kDropout = FA_DROPOUT;
constexpr int kDropoutGroup = 64;  // keys
constexpr int kDropoutPlanes = 8;  // bits of a pair's own number

// Where a query row of packed sequences is: rows and keys count from the beginning of its sequence.
struct alignas(16) PlaceInSequence {
  int sequence, first_row, first_key, unused;
};

// fa_cupy/gpu/kernels/attention/attention_params.py holds the same fields in the same order.
struct DropoutParams {
  const uint64* seed_data;  // where the seed is, or null
  uint64 seed;
  int64 first_entry;                 // of the launch, over all batch entries
  uint32 threshold[kDropoutPlanes];  // its upper 8 bits, from the lowest on: all ones, or 0
  uint32 lower_threshold;            // its lower 32 bits
  float factor;                      // of what is kept
  float inverse_factor;
  int heads;  // entry = b * heads + h
  // Sequence s of batch entry b counts as batch entry b * sequences + s; that of a launch, or 0
  // where each row has its own.
  int sequences, sequence;
  const PlaceInSequence* places;  // of each row, in builds for packed sequences
};

// What all counters of a batch entry have in common.
struct alignas(8) DropoutEntry {
  uint32 key[2];
  uint32 h, b;
};

FA_DEVICE DropoutEntry dropout_entry(const DropoutParams& p, int64 batch) {
  const uint64 seed = p.seed_data != nullptr ? *p.seed_data : p.seed;
  const uint64 entry = p.first_entry + batch, b = entry / static_cast<uint32>(p.heads);
  return {{static_cast<uint32>(seed), static_cast<uint32>(seed >> 32)},
          static_cast<uint32>(entry - b * p.heads),
          static_cast<uint32>(b) * p.sequences + p.sequence};
}

// Ten rounds on a counter, in place.
FA_DEVICE void philox(uint32 (&c)[4], const uint32 (&key)[2]) {
  uint32 k0 = key[0], k1 = key[1];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64 first = static_cast<uint64>(c[0]) * 0xD2511F53u;
    const uint64 second = static_cast<uint64>(c[2]) * 0xCD9E8D57u;
    c[0] = static_cast<uint32>(second >> 32) ^ c[1] ^ k0;
    c[2] = static_cast<uint32>(first >> 32) ^ c[3] ^ k1;
    c[1] = static_cast<uint32>(second);
    c[3] = static_cast<uint32>(first);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

FA_DEVICE uint32 rotated_left(uint32 x, int bits) { return x << bits | x >> (32 - bits); }

// Decisions on the keys of one group that lane t of a quad has, in bits 0 to 15: 1 where a pair is
// kept.  In bits 16 to 31 those of the group after it, as in a mask's word, or of another row.
template <int kGroups, int kRowStep = 0>
FA_DEVICE uint32 kept_bits(const DropoutParams& p, const DropoutEntry& entry, int row, int group,
                           int t) {
  constexpr int kHalves = kRowStep > 0 ? 2 * kGroups : kGroups;
  static_assert(kHalves == 1 || kHalves == 2, "half of a word, or all of it");
  uint32 x[kHalves][4], kept = 0;
#pragma unroll
  for (int i = 0; i < kHalves; ++i) {
    x[i][0] = 4 * (kGroups > 1 ? group + i : group) + t;
    x[i][1] = row + i * kRowStep;
    x[i][2] = entry.h;
    x[i][3] = entry.b;
    philox(x[i], entry.key);
    // Where a pair's own number is equal to its part of the threshold, one for all decides.
    const uint32 for_all = x[i][0] ^ rotated_left(x[i][1], 4) ^ rotated_left(x[i][2], 8);
    if (for_all < p.lower_threshold) kept |= 0xFFFFu << 16 * i;
  }
#pragma unroll
  for (int plane = 0; plane < kDropoutPlanes; ++plane) {
    const uint32 first = x[0][plane / 2], second = kHalves > 1 ? x[kHalves - 1][plane / 2] : 0;
    const uint32 bits =
        plane % 2 ? first >> 16 | (second & 0xFFFF0000u) : (first & 0xFFFFu) | second << 16;
    // Below the threshold by this bit, or equal in it and below by the lower ones: a majority.
    const uint32 ones = p.threshold[plane];
    kept = (~bits & kept) | (~bits & ones) | (kept & ones);
  }
  return kept;
}

#if FA_PACKED
// Decisions on key and the keys 8, 16, ... after it of a row, in every second bit; if key is even,
// the others are those on the key after each.  Key and row count in their sequence.
template <int kOctets>
FA_DEVICE uint32 kept_octets(const DropoutParams& p, const DropoutEntry& entry, int row, int key) {
  static_assert(kOctets <= 16, "two bits for each");
  const int group = key >> 6, t = (key & 7) / 2;
  uint64 bits = kept_bits<kOctets == 1 ? 1 : 2>(p, entry, row, group, t);
  if constexpr (kOctets > 8) {
    bits |= static_cast<uint64>(kept_bits<1>(p, entry, row, group + 2, t) & 0xFFFFu) << 32;
  }
  return static_cast<uint32>(bits >> ((key & 63) / 8 * 2 + (key & 1)));
}

// The same of rows and keys that count over all sequences.
template <int kOctets>
FA_DEVICE uint32 kept_octets_of(const DropoutParams& p, DropoutEntry entry, int row, int key) {
  const PlaceInSequence place = p.places[row];
  entry.b += place.sequence;
  return kept_octets<kOctets>(p, entry, row - place.first_row, key - place.first_key);
}

// Decisions on the kKeys keys of a tile that begins anywhere, as bits of a mask; `key` is the
// thread's first one.  Of one that is odd in its sequence, the next one has another counter.
template <int kKeys>
FA_DEVICE uint32 kept_bits_from(const DropoutParams& p, DropoutEntry entry, int row, int key) {
  const PlaceInSequence place = p.places[row];
  entry.b += place.sequence;
  row -= place.first_row;
  key -= place.first_key;
  const int odd = key & 1;
  uint32 kept = 0;
#pragma unroll 1  // or there would be twice the code, for half of the rows
  for (int i = odd; i >= 0; --i) {
    const uint32 found = kept_octets<kKeys / 8>(p, entry, row, key + i);
    kept = odd ? kept << 1 | (found & 0x55555555u) : found;
  }
  return kept;
}
#endif

// Whether one pair is kept.  Rows that are computed again ask this of each pair.
FA_DEVICE bool is_kept(const DropoutParams& p, const DropoutEntry& entry, int row, int key) {
#if FA_PACKED
  return (kept_octets_of<1>(p, entry, row, key) & 1) != 0;
#else
  const uint32 bits = kept_bits<1>(p, entry, row, key / kDropoutGroup, key % 8 / 2);
  return (bits >> (key % kDropoutGroup / 8 * 2 + key % 2) & 1) != 0;
#endif
}

// The decisions on a tile of keys, the first of which is a multiple of 16, for the rows first_row +
// 16 i + 8 h of this thread: bits as those of a mask, from the tile's first columns on.
template <int kKeys, int kMmaM>
FA_DEVICE void make_kept_bits(const DropoutParams& p, const DropoutEntry& entry, int first_row,
                              int first_key, uint32 (&kept)[kMmaM][2]) {
  static_assert(kKeys <= 96 || kKeys == 2 * kDropoutGroup, "two groups have the keys of a tile");
#if FA_PACKED
#pragma unroll 1
  for (int row = 0; row < 2 * kMmaM; ++row) {
    const uint32 word =
        kept_bits_from<kKeys>(p, entry, first_row + 8 * row, first_key + tid_x_again() % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2 * kMmaM; ++i) {  // a number that is not known would be an address
      if (i == row) kept[i / 2][i % 2] = word;
    }
  }
#else
  constexpr int kGroups = kDropoutGroup % kKeys == 0 ? 1 : 2;
  const int skipped = first_key % kDropoutGroup / 4;
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      kept[i][h] = kept_bits<kGroups>(p, entry, first_row + 16 * i + 8 * h,
                                      first_key / kDropoutGroup, tid_x_again() % 4) >>
                   skipped;
    }
  }
#endif
}

// Makes 0 of the weights that are dropped, among those that a thread holds as accumulators of m16n8
// (PTX ISA 9.7.14.5.8).
template <int kMmaM, int kMmaN>
FA_DEVICE void drop_by_bits(float (&s)[kMmaM][kMmaN][4], const uint32 (&kept)[kMmaM][2]) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((kept[i][h] >> (2 * j + e) & 1) == 0) s[i][j][2 * h + e] = 0.0f;
        }
      }
    }
  }
}

// Decisions where rows are keys and columns are queries, as words of a mask that is transposed: on
// the keys first_key + 16 i + 8 h and the queries first_query + 8 j + e of this thread, none of
// which is in another group of keys.  Lanes l and l ^ 4 have the same queries, and keys whose
// decisions are in the same counters: each makes those of half the queries.
template <int kMmaN, int kMmaM>
FA_DEVICE void make_kept_bits_of_keys(const DropoutParams& p, const DropoutEntry& entry,
                                      int first_key, int first_query, uint32 (&kept)[kMmaM][2]) {
  static_assert(kDropoutGroup % (16 * kMmaM) == 0, "a warp's keys are of one group");
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) kept[i][0] = kept[i][1] = 0;
#if FA_PACKED  // where neighbouring queries may be of two sequences
#pragma unroll 1
  for (int j = 0; j < 2 * kMmaN; ++j) {
    const uint32 bits =
        kept_octets_of<2 * kMmaM>(p, entry, first_query + j / 2 * 8 + j % 2, first_key);
#pragma unroll
    for (int i = 0; i < 2 * kMmaM; ++i) kept[i / 2][i % 2] |= (bits >> 2 * i & 1) << j;
  }
#else
  const int own = tid_x_again() / 4 % 2;
#pragma unroll 1
  for (int j = 0; j < kMmaN; ++j) {
    const uint32 half = kept_bits<1>(p, entry, first_query + 8 * j + own, first_key / kDropoutGroup,
                                     first_key % 8 / 2);
    const uint32 other = __shfl_xor_sync(kFullWarp, half, 4);
    const uint32 bits[2] = {own == 0 ? half : other, own == 0 ? other : half};
#pragma unroll
    for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = first_key + 16 * i + 8 * h;
        const int place = key % kDropoutGroup / 8 * 2 + key % 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) kept[i][h] |= (bits[e] >> place & 1) << (2 * j + e);
      }
    }
  }
#endif
}

// Multiplies gradients of weights by what the weights are multiplied by.
template <int kMmaM, int kMmaN>
FA_DEVICE void scale_kept(float (&dp)[kMmaM][kMmaN][4], const uint32 (&kept)[kMmaM][2],
                          float factor) {
#pragma unroll
  for (int i = 0; i < kMmaM; ++i) {
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_kept = (kept[i][e / 2] >> (2 * j + e % 2) & 1) != 0;
        dp[i][j][e] = is_kept ? dp[i][j][e] * factor : 0.0f;
      }
    }
  }
}
