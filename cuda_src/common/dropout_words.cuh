// Decisions of dropout on 64 keys and 64 queries, as words in shared memory: for kernels of
// gradients whose scores are transposed.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "ptx/shared.cuh"

#if FA_DROPOUT
constexpr int kKeptWords = 64 * 64 / 32;  // one for each thread of a warpgroup

// One of the words, of the keys from first_key on and the queries from first_query on.  A counter
// decides on keys of all four warps: so none makes what another one has made.  Word (t, l, j), at
// this place, has the queries 8 j + 2 l and the next one in its halves, and in each the keys whose
// number modulo 8 is 2 t or 2 t + 1 (common/dropout.cuh).
FA_DEVICE uint32 make_kept_word(const DropoutParams& p, const DropoutEntry& entry, int first_key,
                                int first_query, int place) {
  const int pair = place % 8 * 4 + place / 8 % 4;
#if FA_PACKED
  const int key = first_key + place / 32 * 2;
  uint32 word = 0;
#pragma unroll 1
  for (int i = 1; i >= 0; --i) {
    const uint32 half = kept_bits_from<64>(p, entry, first_query + 2 * pair + i, key);
    word = word << 16 | (half & 0xFFFFu);
  }
  return word;
#else
  return kept_bits<1, 1>(p, entry, first_query + 2 * pair, first_key / kDropoutGroup, place / 32);
#endif
}

// The decisions on the pairs that a thread holds as accumulators of m64n64 (PTX ISA 9.7.15.5.1), of
// two keys and 16 queries: that on element e of score j is bit 4 j + e.  `warp_row` is the first of
// its warp's keys.
FA_DEVICE uint32 read_kept_words(const uint32 (&words)[kKeptWords], int warp_row, int lane) {
  const uint32 from = cvta_to_shared(&words[(lane / 8 * 4 + lane % 4) * 8]);
  // Of a word this thread's first key is bit first_bit of each half, and its other one two further.
  const int first_bit = warp_row / 4 + lane / 4 % 2;
  uint32 bits[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32 four[4];
    ld_shared_v4_b32(four, from + 16 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[j] |= (four[i] >> first_bit & 0x50005u) << 4 * i;
  }
  const uint32 even = (bits[0] & 0xFFFFu) | bits[1] << 16,
               odd = bits[0] >> 16 | (bits[1] & 0xFFFF0000u);
  return even | odd << 1;
}
#endif
