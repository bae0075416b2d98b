"""The CUDA C++ of score expressions in a small kernel, and the same functions on the CPU by g++."""

import ctypes
import subprocess

import numpy as np

from fa_cupy.gpu.driver.compile import ROOT
from fa_cupy.score import cuda
from tests.support.expressions import ARGUMENTS, SIZES
from validation import emulator

TYPES = {"float64": "double", "float32": "float", "int64": "long long", "int8": "signed char"}
# What the header's device functions are on the CPU: those of the emulator.
HOST = """
#include <cmath>
#include "cuda.hpp"
"""
# Arrays are float64 here, or int64 or int8: half precision is the business of a kernel.
BEGIN = """
#include "cuda_src/common/score_functions.cuh"
using Real = {real};
struct ScoreArrays {{
  const void* data[{count}];
}};
template <int number> struct Of;
{loads}
template <int number, typename... Index>
FA_DEVICE typename Of<number>::Kind load(const ScoreArrays& arrays, Index... index) {{
  int64 place = 0;
  int axis = 0;
  ((place = place * Of<number>::kShape[axis++] + index), ...);
  using Stored = typename Of<number>::Stored;
  return static_cast<typename Of<number>::Kind>(
      static_cast<const Stored*>(arrays.data[number])[place]);
}}
template <typename T>
FA_DEVICE Real int_to_float(T x) {{ return static_cast<Real>(x); }}
struct ScoreOfPair {{ Real score, slope; }};
FA_DEVICE ScoreOfPair score_of(const ScoreArrays& arrays, Real s, int b, int h, int i, int j) {{
  ScoreOfPair found;
{body}  return found;
}}
"""
KERNEL = """
extern "C" __global__ void test(ScoreArrays arrays, const int* at, const Real* s, Real* out) {
  const int n = threadIdx.x;
  const ScoreOfPair found =
      score_of(arrays, s[n], at[4 * n], at[4 * n + 1], at[4 * n + 2], at[4 * n + 3]);
  out[2 * n] = found.score;
  out[2 * n + 1] = found.slope;
}
"""
FUNCTION = """
extern "C" void test{name}(const void* const* data, int count, const int* at, const Real* s,
                           Real* out) {{
  ScoreArrays arrays;
  for (int n = 0; n < {count}; ++n) arrays.data[n] = data[n];
  for (int n = 0; n < count; ++n) {{
    const ScoreOfPair found =
        score_of(arrays, s[n], at[4 * n], at[4 * n + 1], at[4 * n + 2], at[4 * n + 3]);
    out[2 * n] = found.score;
    out[2 * n + 1] = found.slope;
  }}
}}
"""


def stored(name):
    """An argument as the code reads it."""
    value = np.asarray(ARGUMENTS[name])
    return np.ascontiguousarray(value, np.float64 if value.dtype.kind == "f" else value.dtype)


def loads(numbered):
    """How each array of an expression is stored, and the kind of its elements."""
    found = []
    for number, name in enumerate(numbered):
        value = stored(name)
        kind = {"f": "Real", "i": "long long" if value.itemsize > 2 else "int"}[value.dtype.kind]
        shape = ", ".join(map(str, value.shape)) or "1"
        found.append(
            f"template <> struct Of<{number}> {{ using Stored = {TYPES[value.dtype.name]}; "
            f"using Kind = {kind}; static constexpr int kShape[] = {{{shape}}}; }};"
        )
    return "\n".join(found)


def source(root, slope, numbered, real):
    """The header's part of a kernel, with `score_of`."""
    body = cuda.body([root, slope], ["found.score", "found.slope"], real)
    return BEGIN.format(real=real, count=max(1, len(numbered)), loads=loads(numbered), body=body)


def _compiled(text, path):
    """Compile C++ for the CPU, and load it."""
    path.write_text(text)
    library = path.with_suffix(".so")
    command = [str(emulator.compiler()), "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    command += ["-ffp-contract=off", f"-I{emulator.FOLDER}", f"-I{ROOT}"]
    command += [str(path), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


def on_the_cpu(cases, folder, real):
    """Compile all cases, (root, slope, numbered) each, and return a function that runs one.

    It takes the number of the case and the points, and returns scores and slopes.
    """
    text = HOST
    for number, (root, slope, numbered) in enumerate(cases):
        own = source(root, slope, numbered, real)
        include, rest = own.split("\n", 2)[1:]
        text += f"{include}\nnamespace case{number} {{\n{rest}\n"
        text += FUNCTION.format(name=number, count=len(numbered)) + "}\n"
    loaded = _compiled(text, folder / f"cases_{real}.cpp")
    dtype = np.float64 if real == "double" else np.float32

    def run(number, points):
        arrays = [stored(name) for name in cases[number][2]]
        data = (ctypes.c_void_p * max(1, len(arrays)))(*(x.ctypes.data for x in arrays))
        at = np.stack([points[name] for name in "bhij"], axis=1).astype(np.int32)
        s = points["s"].astype(dtype)
        out = np.empty((len(s), 2), dtype)
        pointers = (ctypes.c_void_p(x.ctypes.data) for x in (at, s, out))
        at_address, s_address, out_address = pointers
        function = getattr(loaded, f"test{number}")
        function(data, len(s), at_address, s_address, out_address)
        return out.T

    return run


# The functions of a header (fa_cupy/score/header.py), with loads in place of those of a kernel.
HEADER = """
#include "cuda_src/common/score_and_slope.cuh"
#include "cuda_src/common/score_functions.cuh"
using Real = float;
template <typename Real>
struct ScoreArguments { const void* const* data; };
"""
HEADER_LOADS = """
template <int number> struct Of;
{loads}
template <int number, typename... Index>
FA_DEVICE typename Of<number>::Kind load(const ScoreArguments<float>& arrays, Index... index) {{
  int64 place = 0;
  int axis = 0;
  ((place = place * Of<number>::kShape[axis++] + index), ...);
  using Stored = typename Of<number>::Stored;
  return static_cast<typename Of<number>::Kind>(
      static_cast<const Stored*>(arrays.data[number])[place]);
}}
"""
# Each pair in a tile of a few columns, and of a few rows.
ENTRY = """
extern "C" void test{name}(const void* const* data, int b, int h, const float* s, float* out) {{
  const ScoreArguments<float> arrays = {{data}};
  const ScoreOfEntry entry = score_of_entry(arrays, b, h);
  for (int place = 0; place < {q_len} * {k_len}; ++place, out += 6) {{
    const int i = place / {k_len}, j = place % {k_len}, di = i % 4, dj = j % 4;
    const ScoreOfQuery query = score_of_query(arrays, entry, i);
    const ScoreOfKey key = score_of_key(arrays, entry, j);
    const ScoreOfPair pair = score_of_pair(arrays, entry, query, key, i, j);
    const auto of_row = score_in_tile(entry, query, key, pair, score_of_positions(i, j - dj), 0, dj,
                                      s[place], i, j);
    const auto of_col = score_in_tile(entry, query, key, pair, score_of_positions(i - di, j), di, 0,
                                      s[place], i, j);
    const auto alone = score_of_one(arrays, s[place], b, h, i, j);
    out[0] = of_row.score, out[1] = of_col.score, out[2] = alone.score;
    out[3] = of_row.slope, out[4] = of_col.slope, out[5] = alone.slope;
  }}
}}
"""


def headers_on_the_cpu(cases, folder):
    """Compile headers, (text, numbered) each, and return a function that runs one.

    It takes the number of the case, b, h and s of all pairs, and returns scores and slopes, three
    times each: by rows, by columns, and of each pair alone.
    """
    q_len, k_len = SIZES["i"], SIZES["j"]
    text = HOST + HEADER
    for number, (header, numbered) in enumerate(cases):
        own = header.replace('#include "cuda_src/common/score_arrays.cuh"', "")
        found = HEADER_LOADS.format(loads=loads(numbered))
        entry = ENTRY.format(name=number, q_len=q_len, k_len=k_len)
        text += f"namespace case{number} {{\n{found}\n{own}\n{entry}\n}}\n"
    loaded = _compiled(text, folder / "headers.cpp")

    def run(number, b, h, s):
        arrays = [stored(name) for name in cases[number][1]]
        data = (ctypes.c_void_p * max(1, len(arrays)))(*(x.ctypes.data for x in arrays))
        out = np.empty((q_len * k_len, 2, 3), np.float32)
        s_address, out_address = (ctypes.c_void_p(x.ctypes.data) for x in (s, out))
        getattr(loaded, f"test{number}")(data, b, h, s_address, out_address)
        return out.transpose(1, 2, 0)

    return run
