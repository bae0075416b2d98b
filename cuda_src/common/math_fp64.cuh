// float64 arithmetic of the softmax.
#pragma once
#include "ptx/types.cuh"

// e**x to 1 unit in the last place, for x up to 700.  What is below 2**-1021 becomes 0; NaN stays.
//
// x = n ln 2 + r with |r| <= ln(2) / 2 (Cody and Waite 1980, "Software Manual for the Elementary
// Functions", chapter 6): the upper part of ln 2 has 32 bits, so that n times it is exact.  e**r is
// a polynomial of degree 11 with the first two coefficients of Taylor's series; the others
// interpolate at Chebyshev's points, with a relative error of 1.6e-17.
FA_DEVICE double exp_fp64(double x) {
  constexpr double kLog2e = 1.4426950408889634;
  constexpr double kLn2High = 0.69314718036912382, kLn2Low = 1.9082149292705877e-10;
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2**52: a sum has n in its lowest bits
  const double sum = fma(x, kLog2e, kRound);
  const double n = sum - kRound;
  const double r = fma(n, -kLn2Low, fma(n, -kLn2High, x));
  double y = 2.510038549551032e-08;
  y = fma(y, r, 2.7620088445409746e-07);
  y = fma(y, r, 2.7557268459997064e-06);
  y = fma(y, r, 2.4801521295954376e-05);
  y = fma(y, r, 1.9841269863053618e-04);
  y = fma(y, r, 1.3888888917213717e-03);
  y = fma(y, r, 8.3333333333300615e-03);
  y = fma(y, r, 4.1666666666624129e-02);
  y = fma(y, r, 1.6666666666666669e-01);
  y = fma(y, r, 5.0000000000000011e-01);
  y = fma(fma(y, r, 1.0), r, 1.0);
  const int exponent = static_cast<int>(__double_as_longlong(sum));
  y *= __longlong_as_double(static_cast<int64>(exponent + 1023) << 52);  // 2**n (IEEE 754)
  return x < -707.0 ? 0.0 : y;
}

// A double that another lane of the warp holds.
FA_DEVICE double shfl_xor_fp64(double x, int step) { return __shfl_xor_sync(kFullWarp, x, step); }
