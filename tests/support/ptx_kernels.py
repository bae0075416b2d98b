"""What the tests of the wrappers share: the headers, and the beginning of each kernel."""

import re

import numpy as np

from fa_cupy.gpu.driver import compile

HEADERS = {path.name: path.read_text() for path in (compile.ROOT / "ptx").glob("*.cuh")}
INCLUDES = "".join(f'#include "ptx/{name}"\n' for name in sorted(HEADERS))
AT = """
template <typename T>
static __device__ T* at(uint64 pointer) {
  return reinterpret_cast<T*>(pointer);
}
"""
#: The names of all wrappers.
WRAPPERS = {
    name
    for text in HEADERS.values()
    for name in re.findall(r"^FA_DEVICE\b[^;{(]*?\b(\w+)\(", text, re.MULTILINE)
}


def mma_of_float64(run, name, m, k):
    """Hold a product against integers, and one of three numbers against their rounded sum."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-16, 17, (m, k)), rng.integers(-16, 17, (k, 8))
    c = rng.integers(-1000, 1000, (m, 8))
    got = run(name, ((m, 8), np.float64), *(x.astype(np.float64) for x in (a, b, c)))
    np.testing.assert_array_equal(got, a @ b + c)
    a, b = np.zeros((m, k)), np.ones((k, 8))
    a[:, k - 1] = 2.0**-52
    got = run(name, ((m, 8), np.float64), a, b, np.ones((m, 8)))
    np.testing.assert_array_equal(got, 1 + 2.0**-52)
