// Attention over single pairs of a query and a key, which a mask lists row by row.
//
// A warp takes a row of the list for one batch entry.  kLanes lanes share a vector of kDim numbers,
// 16 bytes of each load, so that a warp reads kSlots vectors at once; slot s takes every kSlots'th
// pair of the row and keeps sums of its own, which are added up when the row ends.  Rows with many
// pairs are cut into pieces, a warp each, whose sums a second launch adds in their order.  All
// orders follow from the list alone: results are the same, bit by bit, whatever runs first.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/element.cuh"

constexpr int kKind = FA_KIND;  // a FloatKind: the type of q, k, v and out
constexpr int kDim = FA_DIM;    // head_dim and v_dim, padded
constexpr int kWarps = FA_WARPS;
constexpr int kUnroll = FA_UNROLL;                  // pairs of a slot that are loaded together
constexpr int kVector = kKind == kFloat32 ? 4 : 8;  // numbers in 16 bytes
constexpr int kLanes = kDim / kVector < 32 ? kDim / kVector : 32;
constexpr int kParts = kDim / (kLanes * kVector);  // loads of a lane for each vector
constexpr int kSlots = 32 / kLanes;
static_assert(kKind != kFloat64, "sums are of float32");
static_assert(kParts * kLanes * kVector == kDim, "lanes have whole loads");

// The pairs of all matrices of a mask by rows: queries, or keys in the transposed form.
struct PairRows {
  const int64* begin;   // (matrices * rows + 1): where the pairs of each row begin
  const int* columns;   // (pairs) ascending in each row
  const int* places;    // (pairs) of the transposed form: the place of each by queries; else null
  const uint2* pieces;  // (matrices, most_pieces) of long rows: row, number of the piece
  const int* matrix_of_entry;  // of the batch entries of the call
  int rows;                    // of a matrix
  int most_pieces;             // of a matrix; rows of 2**32 - 1 stand for none
  int piece_pairs;             // of a piece, but for the last one of a row
};

// Axes of the batch by which something is found that has a value for each pair: entries in C order.
struct PairAxes {
  int64 size[kMaxBatchAxes], stride[kMaxBatchAxes];

  __device__ __forceinline__ int64 offset(int64 entry) const {
    int64 found = 0;
#pragma unroll 1
    for (int axis = kMaxBatchAxes - 1; axis >= 0; --axis) {
      const int64 next = divide(entry, size[axis]);
      found += (entry - next * size[axis]) * stride[axis];
      entry = next;
    }
    return found;
  }
};

// What a warp is to do.
struct PairWork {
  int64 entry;       // of the batch
  int64 begin, end;  // pairs of the row, or of the piece
  int64 piece;       // over all entries; -1 if the row is whole
  int64 row_begin, row_end;
  int row;
};

// Finds the part of a warp: pieces come first, for they take longest.  False if no work is left for
// it.  Entry i of the work has the mask of batch entry i * group.
FA_DEVICE bool pair_work(const PairRows& list, int64 entries, PairWork& work, int group = 1) {
  const int64 warp = static_cast<int64>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64 pieces = entries * list.most_pieces, padded = (pieces + kWarps - 1) / kWarps * kWarps;
  uint32 number = 0;
  if (warp < padded) {
    if (warp >= pieces) return false;
    work.entry = divide(warp, static_cast<int64>(list.most_pieces));
    work.piece = warp;
  } else {
    work.entry = divide(warp - padded, static_cast<int64>(list.rows));
    if (work.entry >= entries) return false;
    work.piece = -1;
    work.row = static_cast<int>(warp - padded - work.entry * list.rows);
  }
  const int64 matrix = list.matrix_of_entry[work.entry * group];
  if (work.piece >= 0) {
    const int64 at = matrix * list.most_pieces + (work.piece - work.entry * list.most_pieces);
    const uint2 piece = list.pieces[at];
    if (piece.x == 0xffffffffu) return false;
    work.row = static_cast<int>(piece.x);
    number = piece.y;
  }
  const int64* ends = list.begin + matrix * list.rows + work.row;
  work.row_begin = work.begin = ends[0];
  work.row_end = work.end = ends[1];
  if (work.piece < 0) return list.most_pieces == 0 || work.end - work.begin <= list.piece_pairs;
  work.begin += static_cast<int64>(number) * list.piece_pairs;
  const int64 last = work.begin + list.piece_pairs;
  work.end = last < work.row_end ? last : work.row_end;
  return true;
}

// Whether a work is the first piece of its row, and how many there are.
FA_DEVICE bool is_first_piece(const PairWork& work) { return work.begin == work.row_begin; }
FA_DEVICE int pieces_of_row(const PairRows& list, const PairWork& work) {
  return static_cast<int>((work.row_end - work.row_begin + list.piece_pairs - 1) /
                          list.piece_pairs);
}

// ----------------------------------------------------------------------------------------- vectors
// A lane's part of a vector, as it lies in memory.
struct VectorBits {
  uint4 part[kParts];
};

FA_DEVICE int lane_column(int part) {
  return (part * kLanes + static_cast<int>(threadIdx.x) % kLanes) * kVector;
}

// Loads a vector of `cols` numbers; what is behind them is 0.  If `aligned`, it begins at a
// multiple of 16 bytes.
FA_DEVICE VectorBits load_vector(const void* base, int64 offset, int cols, bool aligned) {
  VectorBits found;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int col = lane_column(part), count = cols - col;
    uint32 words[4] = {0, 0, 0, 0};
    if constexpr (kKind == kFloat32) {
      const float* from = static_cast<const float*>(base) + offset + col;
      if (aligned && count >= kVector) {
        found.part[part] = *reinterpret_cast<const uint4*>(from);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) words[i] = __float_as_uint(from[i]);
      }
    } else {
      const uint16* from = static_cast<const uint16*>(base) + offset + col;
      if (aligned && count >= kVector) {
        found.part[part] = *reinterpret_cast<const uint4*>(from);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) words[i / 2] |= static_cast<uint32>(from[i]) << 16 * (i % 2);
      }
    }
    found.part[part] = uint4{words[0], words[1], words[2], words[3]};
  }
  return found;
}

FA_DEVICE VectorBits no_vector() {
  VectorBits found;
#pragma unroll
  for (int part = 0; part < kParts; ++part) found.part[part] = uint4{0, 0, 0, 0};
  return found;
}

// Number i of a part.
FA_DEVICE float number_of(const uint4& bits, int i) {
  const uint32 words[4] = {bits.x, bits.y, bits.z, bits.w};
  if constexpr (kKind == kFloat32) return __uint_as_float(words[i]);
  const uint32 word = words[i / 2];
  return to_float<kKind == kBfloat16>(static_cast<uint16>(i % 2 ? word >> 16 : word));
}

// A lane's part of a vector, as numbers.
struct Vector {
  float x[kParts][kVector];
};

FA_DEVICE Vector numbers_of(const VectorBits& bits) {
  Vector found;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) found.x[part][i] = number_of(bits.part[part], i);
  }
  return found;
}

// Sums a number over the lanes of a slot; all of them get it.
template <typename Real>
FA_DEVICE Real sum_over_slot(Real x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// The same over the slots of a warp, lane by lane.
template <typename Real>
FA_DEVICE Real sum_over_slots(Real x) {
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}

// The product of two vectors, in each lane of a slot.
template <typename Real>
FA_DEVICE Real dot(const Vector& a, const VectorBits& b) {
  Real sum = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sum += static_cast<Real>(a.x[part][i]) * static_cast<Real>(number_of(b.part[part], i));
    }
  }
  return sum_over_slot(sum);
}

// acc += weight * vector.
template <typename Real>
FA_DEVICE void add_vector(Real (&acc)[kParts][kVector], Real weight, const VectorBits& bits) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      acc[part][i] += weight * static_cast<Real>(number_of(bits.part[part], i));
    }
  }
}

// Writes a vector of `cols` numbers, rounded, by the lanes of slot 0.
FA_DEVICE void store_vector(void* base, int64 offset, int cols, bool aligned,
                            const float (&x)[kParts][kVector]) {
  if (static_cast<int>(threadIdx.x) % 32 >= kLanes) return;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int col = lane_column(part), count = cols - col;
    uint32 words[4];
    if constexpr (kKind == kFloat32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(x[part][i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack2<kKind == kBfloat16>(x[part][2 * i], x[part][2 * i + 1]);
      }
    }
    if (aligned && count >= kVector) {
      uint8* to = static_cast<uint8*>(base) + (offset + col) * (16 / kVector);
      *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
      continue;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i >= count) continue;
      if constexpr (kKind == kFloat32) {
        static_cast<float*>(base)[offset + col + i] = x[part][i];
      } else {
        static_cast<uint16*>(base)[offset + col + i] =
            static_cast<uint16>(words[i / 2] >> 16 * (i % 2));
      }
    }
  }
}

// Sums of pieces: kDim numbers, lane by lane.
FA_DEVICE void store_sums(float* to, const float (&x)[kParts][kVector]) {
  if (static_cast<int>(threadIdx.x) % 32 >= kLanes) return;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      *reinterpret_cast<float4*>(to + lane_column(part) + i) =
          float4{x[part][i], x[part][i + 1], x[part][i + 2], x[part][i + 3]};
    }
  }
}
FA_DEVICE Vector load_sums(const float* from) {
  Vector found;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + lane_column(part) + i);
      found.x[part][i] = four.x;
      found.x[part][i + 1] = four.y;
      found.x[part][i + 2] = four.z;
      found.x[part][i + 3] = four.w;
    }
  }
  return found;
}
