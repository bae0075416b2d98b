// The arrays of a score expression, as its header (fa_cupy/score/header.py) loads their elements.
#pragma once
#include "cuda_src/common/attention_params.cuh"
#include "cuda_src/common/score_and_slope.cuh"
#include "cuda_src/common/score_functions.cuh"
#include "ptx/convert.cuh"

// The dtypes of arrays, kScoreKinds[number]; the first four are those of FloatKind.
enum ScoreKind : int {
  kScoreInt8 = 4,
  kScoreUint8,
  kScoreInt16,
  kScoreUint16,
  kScoreInt32,
  kScoreUint32,
  kScoreInt64,
  kScoreNumber
};

// What an expression computes with: floats are of type Real.
template <typename Real>
struct ScoreArguments {
  const AttentionParams& p;
};

// An element, or a number of the caller's.  Integers of up to 16 bits are int, others long long.
template <int kNumber, typename Real, typename... Index>
FA_DEVICE auto load(const ScoreArguments<Real>& arguments, Index... index) {
  constexpr int kKind = kScoreKinds[kNumber];
  const ScoreArray& array = arguments.p.score_arrays[kNumber];
  int64 at = 0;
  int axis = 0;
  ((at += static_cast<int64>(index) * array.stride[axis++]), ...);
  if constexpr (kKind == kScoreNumber) return static_cast<Real>(array.number);
  if constexpr (kKind == kFloat16)
    return static_cast<Real>(cvt_f32_f16(static_cast<const uint16*>(array.data)[at]));
  if constexpr (kKind == kBfloat16)
    return static_cast<Real>(cvt_f32_bf16(static_cast<const uint16*>(array.data)[at]));
  if constexpr (kKind == kFloat32)
    return static_cast<Real>(static_cast<const float*>(array.data)[at]);
  if constexpr (kKind == kFloat64)
    return static_cast<Real>(static_cast<const double*>(array.data)[at]);
  if constexpr (kKind == kScoreInt8)
    return static_cast<int>(static_cast<const signed char*>(array.data)[at]);
  if constexpr (kKind == kScoreUint8)
    return static_cast<int>(static_cast<const uint8*>(array.data)[at]);
  if constexpr (kKind == kScoreInt16)
    return static_cast<int>(static_cast<const short*>(array.data)[at]);
  if constexpr (kKind == kScoreUint16)
    return static_cast<int>(static_cast<const uint16*>(array.data)[at]);
  if constexpr (kKind == kScoreInt32)
    return static_cast<long long>(static_cast<const int*>(array.data)[at]);
  if constexpr (kKind == kScoreUint32)
    return static_cast<long long>(static_cast<const uint32*>(array.data)[at]);
  if constexpr (kKind == kScoreInt64)
    return static_cast<long long>(static_cast<const int64*>(array.data)[at]);
}
