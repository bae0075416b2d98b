"""What the tests of the wrappers share: the headers, and the beginning of each kernel."""

import re

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
