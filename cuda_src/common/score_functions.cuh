// The functions of score expressions (fa_cupy/score/cuda.py), in float and in double.
//
// NaN goes through min and max, as in NumPy.  Integers of 64 bits come from the caller's arrays:
// their arithmetic wraps around, in unsigned integers, for which that is defined.  What is of 32
// bits was checked to fit (fa_cupy/score/ranges.py), and divisors are positive.
#pragma once
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// These, and division, have no branch: a warp that takes one waits for its matrix products.
// The polynomial has the least relative error for |x| <= 1, 5e-8.
FA_DEVICE float tanh_of(float x) {
  const float y = x * x;
  float sum = 0.0010410185f;
  sum = fmaf(sum, y, -0.0062033665f);
  sum = fmaf(sum, y, 0.020289966f);
  sum = fmaf(sum, y, -0.053457021f);
  sum = fmaf(sum, y, 0.13325204f);
  sum = fmaf(sum, y, -0.33332839f);
  sum = fmaf(sum, y, 0.99999995f);
  const float exp_of_2x = ex2_approx_ftz(2.8853900817779268f * x);
  const float far = fmaf(-2.0f, rcp_approx_ftz(1.0f + exp_of_2x), 1.0f);
  return select_le(fabsf(x), 1.0f, x * sum, far);
}

FA_DEVICE float sigmoid_of(float x) {
  return rcp_approx_ftz(1.0f + ex2_approx_ftz(-1.4426950408889634f * x));
}

// The sine, or with quarter = 1 the cosine, which is a quarter of a turn ahead.  The multiple of
// pi / 2 is taken away in three parts of 24 bits: to 2e-7 for |x| below 2**24, where a float32 can
// tell one turn from the next.  Taylor's series does on what is left, |r| <= pi / 4.
FA_DEVICE float sine_of(float x, int quarter) {
  const float turns = rintf(x * 0.63661977f);
  float r = fmaf(turns, -1.57079637f, x);
  r = fmaf(turns, 4.3711388e-8f, r);
  r = fmaf(turns, 1.7151245e-15f, r);
  // Where the first factor was rounded to the next turn.
  const float missed = rintf(r * 0.63661977f);
  r = fmaf(missed, 4.3711388e-8f, fmaf(missed, -1.57079637f, r));
  const float y = r * r;
  const float sine = fmaf(
      r * y, fmaf(y, fmaf(y, fmaf(y, 2.7557319e-6f, -1.9841270e-4f), 8.3333333e-3f), -0.16666667f),
      r);
  const float cosine =
      fmaf(y, fmaf(y, fmaf(y, fmaf(y, 2.4801587e-5f, -1.3888889e-3f), 0.041666667f), -0.5f), 1.0f);
  const int quadrant = static_cast<int>(turns) + static_cast<int>(missed) + quarter;
  const float value = quadrant & 1 ? cosine : sine;
  return quadrant & 2 ? -value : value;
}
FA_DEVICE float sin_of(float x) { return sine_of(x, 0); }
FA_DEVICE float cos_of(float x) { return sine_of(x, 1); }

// x / y with an error of the last place.  The step that corrects the approximate quotient has no
// number where one of the three is infinite.
FA_DEVICE float divide_of(float x, float y) {
  const float inverse = rcp_approx(y), quotient = x * inverse;
  const float rest = fmaf(-quotient, y, x), corrected = fmaf(rest, inverse, quotient);
  return rest * 0.0f == 0.0f && corrected * 0.0f == 0.0f ? corrected : quotient;
}
FA_DEVICE double divide_of(double x, double y) { return x / y; }

FA_DEVICE float exp_of(float x) { return expf(x); }
FA_DEVICE double exp_of(double x) { return exp(x); }
FA_DEVICE float log_of(float x) { return logf(x); }
FA_DEVICE double log_of(double x) { return log(x); }
FA_DEVICE float sqrt_of(float x) { return sqrtf(x); }
FA_DEVICE double sqrt_of(double x) { return sqrt(x); }
FA_DEVICE double tanh_of(double x) { return tanh(x); }
FA_DEVICE double sin_of(double x) { return sin(x); }
FA_DEVICE double cos_of(double x) { return cos(x); }
FA_DEVICE float floor_of(float x) { return floorf(x); }
FA_DEVICE double floor_of(double x) { return floor(x); }
FA_DEVICE double sigmoid_of(double x) { return 1.0 / (1.0 + exp(-x)); }
FA_DEVICE float power_of(float x, float y) { return powf(x, y); }
FA_DEVICE double power_of(double x, double y) { return pow(x, y); }
FA_DEVICE int abs_of(int x) { return x < 0 ? -x : x; }
FA_DEVICE float abs_of(float x) { return fabsf(x); }
FA_DEVICE double abs_of(double x) { return fabs(x); }

template <typename T>
FA_DEVICE T sign_of(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : x;  // 0 and NaN are their own
}

template <typename T>
FA_DEVICE T min_of(T x, T y) {
  return x < y || x != x ? x : y;
}

template <typename T>
FA_DEVICE T max_of(T x, T y) {
  return x > y || x != x ? x : y;
}

// By squares, the same products as in NumPy.
template <int exponent, typename T>
FA_DEVICE T int_power(T x) {
  if constexpr (exponent < 0) {
    return T(1) / int_power<-exponent>(x);
  } else if constexpr (exponent == 0) {
    return T(1);
  } else if constexpr (exponent == 1) {
    return x;
  } else if constexpr (exponent % 2 == 0) {
    return int_power<exponent / 2>(x * x);
  } else {
    return x * int_power<exponent / 2>(x * x);
  }
}

FA_DEVICE int64 wrapping_add(int64 x, int64 y) {
  return static_cast<int64>(static_cast<uint64>(x) + static_cast<uint64>(y));
}

FA_DEVICE int64 wrapping_subtract(int64 x, int64 y) {
  return static_cast<int64>(static_cast<uint64>(x) - static_cast<uint64>(y));
}

FA_DEVICE int64 wrapping_multiply(int64 x, int64 y) {
  return static_cast<int64>(static_cast<uint64>(x) * static_cast<uint64>(y));
}

FA_DEVICE int64 wrapping_negative(int64 x) { return wrapping_subtract(0, x); }

FA_DEVICE int64 wrapping_abs(int64 x) { return x < 0 ? wrapping_negative(x) : x; }

template <int exponent>
FA_DEVICE int64 wrapping_power(int64 x) {
  return static_cast<int64>(int_power<exponent>(static_cast<uint64>(x)));
}

// Rounded down, as in Python; y is positive.
template <typename T>
FA_DEVICE T floor_divide(T x, T y) {
  return x / y - (x % y < 0 ? 1 : 0);
}

template <typename T>
FA_DEVICE T floor_mod(T x, T y) {
  const T rest = x % y;
  return rest < 0 ? rest + y : rest;
}
