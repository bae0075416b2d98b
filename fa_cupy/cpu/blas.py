"""Matrix products that stay on the thread that asks for them.

A BLAS library spreads a large product over threads of its own, and for most libraries how many
belongs to the whole process. Other code uses NumPy's library too, so its number stays as it is.
The wheel scipy-openblas32 holds a second copy of the library, which only this module calls and
which gets one thread. NumPy computes what is small: OpenBLAS keeps that on the calling thread.

Without the wheel NumPy computes everything, with as many threads as its library takes, and there
are no other threads: several that wait for those of the library take several times as long.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: What OpenBLAS computes on the calling thread anyway: products of so many multiplications, and
#: fewer with a vector (interface/gemm.c and gemv.c). These are left to NumPy, which asks for less.
SERIAL = 4 * 65536
SERIAL_SUMS = 8000
_MOST_INT = (1 << 31) - 1
_WHEEL, _MODULE = "scipy-openblas32", "scipy_openblas32"


class _Library:
    """Our copy of OpenBLAS, at one thread."""

    def __init__(self, path: Path) -> None:
        # Another OpenBLAS that everybody sees must not take the place of symbols inside of this.
        loaded = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_DEEPBIND", 0))
        self.path = path
        single, double = np.dtype(np.float32), np.dtype(np.float64)
        self.reals = {single: ctypes.c_float, double: ctypes.c_double}
        self.gemm = {single: loaded.scipy_sgemm_, double: loaded.scipy_dgemm_}
        self.gemv = {single: loaded.scipy_sgemv_, double: loaded.scipy_dgemv_}
        self.dot = {single: loaded.scipy_cblas_sdot, double: loaded.scipy_cblas_ddot}
        # A stack of products in one call, which older versions do not have.
        batched = "scipy_cblas_{}gemm_batch_strided"
        self.batched = {
            dtype: getattr(loaded, batched.format(kind), None)
            for dtype, kind in ((single, "s"), (double, "d"))
        }
        # Products of matrices anywhere in memory, likewise.
        anywhere = "scipy_cblas_{}gemm_batch"
        self.anywhere = {
            dtype: getattr(loaded, anywhere.format(kind), None)
            for dtype, kind in ((single, "s"), (double, "d"))
        }
        calls = self.gemm, self.gemv, self.batched, self.anywhere
        for function in (function for some in calls for function in some.values()):
            if function is not None:
                function.restype = None
        for dtype, function in self.dot.items():
            function.restype = self.reals[dtype]
        self.threads = loaded.scipy_openblas_get_num_threads
        self.set_threads = loaded.scipy_openblas_set_num_threads
        self.set_threads(1)


def _load() -> tuple[_Library | None, str]:
    """Return the library, and what to say of it or of why it is not there."""
    if _MODULE in sys.modules:  # a NumPy under development, which computes with it
        return None, f"{_WHEEL} is in use by others"
    if hasattr(ctypes.pythonapi, "__asan_init"):
        return None, "the address sanitizer takes no library with symbols of its own"
    found = importlib.util.find_spec(_MODULE)
    if found is None or found.origin is None:
        return None, f"{_WHEEL} is not installed"
    paths = [*Path(found.origin).parent.glob("lib/libscipy_openblas*")]
    try:
        version = metadata.version(_WHEEL)
        return _Library(paths[0]), f"{_WHEEL} {version}, one thread a product"
    # What is left of it after an update, or made for other systems.
    except (ImportError, OSError, AttributeError, IndexError) as error:
        return None, f"{_WHEEL} cannot be loaded: {error}"


#: Loaded with this module, not at the first call: no lock that a signal handler might wait for.
LIBRARY, _said = _load()


def described() -> str:
    """Return which library computes large products."""
    return _said if LIBRARY is not None else f"NumPy's own, on its threads alone: {_said}"


_HEAD, _from_address = object.__basicsize__, ctypes.c_void_p.from_address


def _pointer_of(array: Array) -> ctypes.c_void_p:
    """Return a pointer to the elements, in a tenth of the time that ``array.ctypes`` takes.

    It is the first thing in the struct PyArrayObject after what all objects begin with.
    """
    return _from_address(id(array) + _HEAD)


def _choose_pointer() -> Callable[[Array], ctypes.c_void_p]:
    probe = np.zeros((3, 2))[1:]
    if sys.implementation.name == "cpython" and _pointer_of(probe).value == probe.ctypes.data:
        return _pointer_of
    return lambda array: ctypes.c_void_p(array.ctypes.data)


_pointer = _choose_pointer()


def _library() -> _Library | None:
    """Return the library at one thread: threadpoolctl sets all libraries that it finds."""
    if LIBRARY is not None and LIBRARY.threads() != 1:
        LIBRARY.set_threads(1)
    return LIBRARY


def matmul(a: Array, b: Array, out: Array, add: bool) -> bool:
    """Set `out` to ``a @ b`` or add that to it; return False if that is left to NumPy.

    Operands are stacks (n, rows, cols) of one dtype, float32 or float64, and aligned.
    """
    if _library() is None:
        return False
    call = _gemm(a.dtype, a.shape, a.strides, b.shape, b.strides, out.strides, add)
    if call is None:
        return False
    call(a, b, out)
    return True


def sum_rows(a: Array, ones: Array, out: Array) -> bool:
    """Set `out` (n, rows) to ``a @ ones``; return False if that is left to NumPy."""
    if a.shape[1] * a.shape[2] <= SERIAL_SUMS or _library() is None:
        return False
    call = _gemv(a.dtype, a.shape, a.strides, out.strides)
    if call is None:
        return False
    call(a, ones, out)
    return True


def sum_of_squares(x: Array) -> float | None:
    """Return that of an array of float32 or float64, in its dtype; None if it is left to NumPy.

    It is the fastest look at all elements: where it is finite they are, and none exceeds its root.
    """
    flags = x.flags
    if LIBRARY is None or not (flags.c_contiguous and flags.aligned) or x.size > _MOST_INT:
        return None
    _library()
    pointer = _pointer(x)
    found: float = LIBRARY.dot[x.dtype](x.size, pointer, 1, pointer, 1)
    return found


def outer_products(a: Array, b: Array) -> Callable[[Array], None]:
    """Return a call that sets `out` (n, rows, cols) to the outer products of what two arrays hold.

    These are dense and aligned, (n, rows, 1) and (n, 1, cols). For short vectors, NumPy takes three
    times as long, as does a call of the library for each product; the numbers are the same.
    """
    function = None if LIBRARY is None else LIBRARY.batched[a.dtype]
    if LIBRARY is None or function is None:
        return functools.partial(np.multiply, a, b)
    real = LIBRARY.reals[a.dtype]
    n, m, _ = a.shape
    cols = b.shape[2]
    count, rows, width, step = (ctypes.c_int(x) for x in (n, m, cols, m * cols))
    inner, one, nothing = ctypes.c_int(1), real(1), real(0)
    row_major, plain = ctypes.c_int(101), ctypes.c_int(111)  # as cblas.h counts them
    before = (
        row_major, plain, plain, rows, width, inner, one, _pointer(a), inner, rows,
        _pointer(b), width, width, nothing,
    )  # fmt: skip

    def call(out: Array, kept: tuple[Array, Array] = (a, b)) -> None:
        _library()
        function(*before, _pointer(out), width, step, count)

    return call


class Groups(NamedTuple):
    """Products ``a @ b`` of matrices anywhere in memory, in groups of equal sizes.

    Attributes
    ----------
    counts : ndarray of int32, shape (groups,)
        Products of each group.
    sizes : ndarray of int32, shape (3, groups)
        Rows, columns and terms of the products of each group, all at least 1.
    addresses : ndarray of uint64, shape (3, products)
        Of `a`, `b` and what is set to the product, those of one group after those of another.
    steps : ndarray of int32, shape (3, groups)
        From a row of each of them to the next, in elements; elements of a row lie densely.
    """

    counts: Array
    sizes: Array
    addresses: Array
    steps: Array


def multiply_groups(dtype: np.dtype[Any], groups: Groups, transposed: bool) -> None:
    """Compute products in one call of the library, which `multiplies_groups`.

    With `transposed`, rows in memory are columns of the `b`.
    """
    library = _library()
    function = None if library is None else library.anywhere[dtype]
    assert function is not None
    count = len(groups.counts)
    kinds = np.full((2, count), 111, np.int32)  # as cblas.h counts them
    if transposed:
        kinds[1] = 112
    factors = np.ones((2, count), dtype)
    factors[1] = 0
    # Rows of these arrays live as long as the pointers, which are parts of them.
    rows = [*kinds, *groups.sizes, *factors, *groups.addresses, *groups.steps, groups.counts]
    kind_a, kind_b, m, n, k, one, zero, a, b, out, *steps, counts = map(_pointer, rows)
    step_a, step_b, step_out = steps
    function(
        101, kind_a, kind_b, m, n, k, one, a, step_a, b, step_b, zero, out, step_out, count, counts
    )


def multiplies_groups(dtype: np.dtype[Any]) -> bool:
    """Whether the library is there and computes products of matrices anywhere in one call."""
    return LIBRARY is not None and LIBRARY.anywhere[dtype] is not None


def reads_rows(strides: Sequence[int], dim: int, itemsize: int) -> bool:
    """Whether the library reads matrices of `dim` columns and these strides, row by row."""
    row, col = strides[-2:]
    fits = row >= dim * itemsize and row % itemsize == 0 and row // itemsize < 1 << 31
    return col == itemsize and fits


def multiplies_stacks(dtype: np.dtype[Any]) -> bool:
    """Whether the library is there and computes a stack of products of this dtype in one call."""
    return LIBRARY is not None and LIBRARY.batched[dtype] is not None


def scaled_products(a: Array, b: Array, out: Array, factor: float, add: bool) -> _Call | None:
    """Return a call that sets `out` to ``factor * a @ b``, or adds that, for arrays like these.

    These are stacks (n, rows, cols) of one dtype, shapes and strides; only their addresses are read
    then. `factor` is rounded to that dtype. A stack takes one call of the library. None where there
    is no such call, or it cannot read such arrays.
    """
    size = a.dtype.itemsize
    of_a, of_b, of_out = (_layout(x.shape, x.strides, size) for x in (a, b, out))
    if not (multiplies_stacks(a.dtype) and of_a and of_b and of_out):
        return None
    steps = tuple(x.strides[0] if len(x) > 1 else 0 for x in (a, b, out))
    if of_out.kind != b"N" or any(step % size or not 0 <= step < size << 31 for step in steps):
        return None
    (n, rows, inner), cols = a.shape, b.shape[2]
    product = _stack_call(a.dtype, (n, rows, cols, inner), (of_a, of_b, of_out), steps, factor, add)

    def call(a: Array, b: Array, out: Array) -> None:
        _library()
        product(a, b, out)

    return call


# A call of the library for three arrays. What else it takes is references, made once: converting
# numbers anew takes as long as a small product.
_Call = Callable[[Array, Array, Array], None]
_Sizes = tuple[int, ...]
_MOST_CALLS = 4096


@functools.lru_cache(maxsize=_MOST_CALLS)
def _gemm(
    dtype: np.dtype[Any],
    shape_a: _Sizes,
    strides_a: _Sizes,
    shape_b: _Sizes,
    strides_b: _Sizes,
    strides_out: _Sizes,
    add: bool,
) -> _Call | None:
    """Return the call for such operands; None where the library cannot read them."""
    count, rows, inner = shape_a
    cols, size = shape_b[2], dtype.itemsize
    of_a, of_b = _layout(shape_a, strides_a, size), _layout(shape_b, strides_b, size)
    of_out = _layout((count, rows, cols), strides_out, size)
    if LIBRARY is None or not (of_a and of_b and of_out) or of_out.kind != b"N":
        return None
    if count == 0:
        return lambda a, b, out: None
    # The library wants columns dense, and so takes these for their transposes: out.T = b.T @ a.T.
    real, multiply = LIBRARY.reals[dtype], LIBRARY.gemm[dtype]
    letters, numbers = [of_b.kind, of_a.kind], [cols, rows, inner]
    distances = [of_b.step, of_a.step, of_out.step]
    if rows == 1 and inner and cols:  # a vector times a matrix takes half the time that way
        multiply, letters = LIBRARY.gemv[dtype], [of_b.kind]
        numbers = [cols, inner] if of_b.kind == b"N" else [inner, cols]
        distances[1:] = [1 if of_a.kind == b"N" else of_a.step, 1]
    kinds = [_reference(ctypes.c_char, x) for x in letters]
    sizes = [_reference(ctypes.c_int, x) for x in numbers]
    before, beta = (*kinds, *sizes, _reference(real, 1)), _reference(real, 1 if add else 0)
    ld_b, ld_a, ld_out = (_reference(ctypes.c_int, x) for x in distances)
    step_a, step_b, step_out = steps = strides_a[0], strides_b[0], strides_out[0]

    def call(a: Array, b: Array, out: Array) -> None:
        to_a, to_b, to_out = _pointer(a), _pointer(b), _pointer(out)
        multiply(*before, to_b, ld_b, to_a, ld_a, beta, to_out, ld_out)
        if count > 1:
            # Pointers of its own from here on: those above are parts of the arrays.
            at_a, at_b, at_out = to_a.value or 0, to_b.value or 0, to_out.value or 0
            to_a, to_b, to_out = (ctypes.c_void_p() for _ in range(3))
        for _ in range(1, count):
            to_a.value = at_a = at_a + step_a
            to_b.value = at_b = at_b + step_b
            to_out.value = at_out = at_out + step_out
            multiply(*before, to_b, ld_b, to_a, ld_a, beta, to_out, ld_out)

    if not multiplies_stacks(dtype) or count == 1 or rows == 1:
        return call
    if any(step < 0 or step % size or step >= 1 << 31 for step in steps):
        return call
    return _stack_call(dtype, (count, rows, cols, inner), (of_a, of_b, of_out), steps, 1, add)


def _stack_call(
    dtype: np.dtype[Any],
    sizes: _Sizes,
    layouts: tuple[_Layout, ...],
    steps: _Sizes,
    factor: float,
    add: bool,
) -> _Call:
    """Return a single call for a stack of products, times a factor.

    The library can read such operands and has such a call. `sizes` are those of the stack, and
    rows, columns and terms of each product; `steps` are in bytes.
    """
    assert LIBRARY is not None
    function, real = LIBRARY.batched[dtype], LIBRARY.reals[dtype]
    assert function is not None
    # As cblas.h counts them: rows that lie densely, and operands as they are or transposed.
    kinds = [ctypes.c_int(112 if x.kind == b"T" else 111) for x in layouts[:2]]
    number, *dims = map(ctypes.c_int, sizes)
    before = ctypes.c_int(101), *kinds, *dims, real(factor)
    lds = [ctypes.c_int(x.step) for x in layouts]
    jumps = [ctypes.c_int(step // dtype.itemsize) for step in steps]
    beta = real(1 if add else 0)

    def call(a: Array, b: Array, out: Array) -> None:
        function(
            *before, _pointer(a), lds[0], jumps[0], _pointer(b), lds[1], jumps[1], beta,
            _pointer(out), lds[2], jumps[2], number,
        )  # fmt: skip

    return call


@functools.lru_cache(maxsize=_MOST_CALLS)
def _gemv(
    dtype: np.dtype[Any], shape: _Sizes, strides: _Sizes, strides_out: _Sizes
) -> _Call | None:
    """Return the call for sums of such rows; None where the library cannot read them."""
    count, rows, cols = shape
    layout = _layout(shape, strides, dtype.itemsize)
    if LIBRARY is None or not layout or layout.kind != b"N":
        return None
    if count == 0:
        return lambda a, ones, out: None
    real, gemv = LIBRARY.reals[dtype], LIBRARY.gemv[dtype]
    sizes = [_reference(ctypes.c_int, x) for x in (cols, rows)]
    before = (_reference(ctypes.c_char, b"T"), *sizes, _reference(real, 1))
    ld, beta, one = (
        _reference(kind, x)
        for kind, x in ((ctypes.c_int, layout.step), (real, 0), (ctypes.c_int, 1))
    )
    step = _reference(ctypes.c_int, strides_out[1] // dtype.itemsize)

    def call(a: Array, ones: Array, out: Array) -> None:
        to_a, to_ones, to_out = _pointer(a), _pointer(ones), _pointer(out)
        gemv(*before, to_a, ld, to_ones, one, beta, to_out, step)
        for i in range(1, count):
            next_a, next_out = _moved(to_a, i * strides[0]), _moved(to_out, i * strides_out[0])
            gemv(*before, next_a, ld, to_ones, one, beta, next_out, step)

    return call


def _reference(kind: Any, value: Any) -> Any:
    return ctypes.byref(kind(value))


def _moved(pointer: ctypes.c_void_p, distance: int) -> ctypes.c_void_p:
    # A new one: the old one is part of an array.
    return ctypes.c_void_p((pointer.value or 0) + distance)


class _Layout(NamedTuple):
    """How a matrix lies in memory."""

    kind: bytes  # "N" where rows lie densely, "T" where columns do
    step: int  # from one of them to the next, in elements


def _layout(shape: _Sizes, strides: _Sizes, itemsize: int) -> _Layout | None:
    """Return the layout of matrices (n, rows, cols); None where the library cannot read them."""
    for kind, dense, other in ((b"N", 2, 1), (b"T", 1, 2)):
        step, rest = divmod(strides[other], itemsize)
        if shape[other] == 1:  # no step is made
            step, rest = shape[dense], 0
        is_dense = strides[dense] == itemsize or shape[dense] == 1
        if is_dense and not rest and shape[dense] <= step < 1 << 31:
            return _Layout(kind, step)
    return None
