"""Calls of `BitMask`, of the layouts of its words and of the accumulators of tensor cores."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fa_cupy import BitMask, layouts
from validation.outcomes.data import blocks, chance, draw, whole
from validation.outcomes.record import Call

Shape = tuple[int, ...]

_SHAPES: tuple[Shape, ...] = (
    *((128, 128), (300, 200), (1, 700), (2, 130, 257), (2, 2, 140, 1)),
    *((0, 5), (5, 0), (0, 3, 3), (512, 640)),
)


def _dense(xp: Any, shape: Shape, seed: str = "mask") -> Any:
    return xp.asarray(blocks(seed, shape))


def _mask(xp: Any, shape: Shape, seed: str = "mask") -> Any:
    return BitMask.from_dense(_dense(xp, shape, seed))


def _sparse(xp: Any, name: str, seed: str, dtype: Any = np.float32) -> Any:
    """Return a sparse matrix of a format in the namespace's library."""
    from scipy import sparse

    array = chance(seed, (200, 300), 0.05) * draw(seed, (200, 300), dtype)
    array[:128, 128:256] = 1
    if xp is not np:
        from cupyx.scipy import sparse

        return getattr(sparse, f"{name}_matrix")(xp.asarray(array))
    return getattr(sparse, f"{name}_array")(array)


def _duplicates(xp: Any) -> Any:
    """Return a sparse matrix with unsorted columns, stored zeros and elements that sum to 0."""
    from scipy import sparse

    data = np.array([1.0, 2.0, -2.0, 0.5, 0.5, 0.0])
    columns, begins = np.array([200, 3, 3, 7, 7, 1]), np.array([0, 3, 5, 6])
    return sparse.csr_array((data, columns, begins), shape=(3, 300))


def _from_function(xp: Any) -> Any:
    def causal(q: Any, k: Any) -> Any:
        return k <= q

    def states(q_begin: int, q_end: int, k_begin: Any, k_end: Any) -> Any:
        full = np.where(k_end - 1 <= q_begin, BitMask.FULL, BitMask.PARTIAL)
        return np.where(k_begin >= q_end, BitMask.EMPTY, full)

    yes = BitMask.from_function(causal, (300, 400))
    batch = BitMask.from_function(lambda b, h, q, k: (q + k + b) % (h + 2) == 0, (2, 3, 140, 150))
    return yes, BitMask.from_function(causal, (1000, 900), states), batch


def _from_blocks(xp: Any) -> Any:
    mask = BitMask.from_dense(blocks("mask", (2, 300, 400)))
    states, words = mask.block_states(), mask._store.with_words().words
    whole_blocks = states == BitMask.FULL
    ones = np.full((whole_blocks.size, 8, 32, 2), 0xFFFFFFFF, np.uint32)
    return (
        BitMask.from_blocks(xp.asarray(states), 300, 400, xp.asarray(words)),
        BitMask.from_blocks(xp.asarray(whole_blocks), 300, 400),
        BitMask.from_blocks(
            xp.asarray(np.ones(states.shape, np.int32)), 300, 400, words=xp.asarray(ones)
        ),
    )


def _indices(shape: Shape, dtype: str, high: int) -> Callable[[Any], Any]:
    low = -3 if dtype.startswith("i") else 0

    def run(xp: Any) -> Any:
        return BitMask.from_indices(xp.asarray(whole("keys", shape, low, high).astype(dtype)), high)

    return run


def _numbers(xp: Any) -> Any:
    mask = _mask(xp, (2, 300, 200))
    return (
        *(mask.shape, mask.ndim, mask.nbytes, mask.density, mask.block_density),
        *(mask.dtype.name, mask.EMPTY, mask.PARTIAL, mask.FULL, mask[1].nbytes),
        *(_mask(xp, (0, 5)).density, len(list(mask)), mask.T.shape),
    )


def _comparisons(xp: Any) -> Any:
    a, b = _mask(xp, (2, 300, 200)), _mask(xp, (300, 200), "other")
    again = BitMask.from_dense(blocks("mask", (2, 300, 200)))
    return (
        a.equals(again),
        a.equals(b),
        not a.equals(again),
        b == 0,
        a[0].equals(a[1]),
        a.equals(a.T.T),
    )


def _files(xp: Any) -> Any:
    """Return what stands in a file, by member, and the mask that is read from it."""
    _mask(xp, (2, 300, 200))[1:].save(file := io.BytesIO())
    with zipfile.ZipFile(file) as archive:
        members = [(info.filename, archive.read(info).hex()) for info in archive.infolist()]
    file.seek(0)
    return sorted(members), BitMask.load(file)


def _segments(xp: Any) -> Any:
    q, k = (xp.asarray(whole(name, (2, 300), -1, 3)) for name in ("keys", "others"))
    return BitMask.from_segments(q, k), BitMask.from_segments(xp.sort(q[0]))


def _windows(xp: Any) -> Any:
    given = ((400, (9, None)), ((20, 21), 3), ((3, 8, 16), (1, (0, 2), None)))
    return [BitMask.from_window(*one) for one in given]


def _edges(xp: Any) -> Any:
    src, dst = (xp.asarray(whole(name, (900,), 0, 200)) for name in ("keys", "others"))
    return BitMask.from_edges(src, dst, 200), BitMask.from_edges(src, dst, (200, 300))


def _reordered(xp: Any) -> Any:
    """Return both results for a chain, whose order is the same with every version of SciPy."""
    chain = np.abs(np.subtract.outer(*[np.arange(200) * 7 % 200] * 2)) < 2
    mask, order = BitMask(xp.asarray(chain)).reorder()
    return mask.density, bool((mask.get().to_dense() == chain[order][:, order]).all())


def _sums(xp: Any) -> Any:
    mask = _mask(xp, (2, 300, 200))
    by_axes = [mask.sum(axis) for axis in (None, 0, -1, -2, (0, 1), (0, 2))]
    return *by_axes, mask.nnz, mask.size, mask.any(axis=-1), mask.all(), mask.any()


def _algebra() -> dict[str, Callable[[Any], Any]]:
    def pair(xp: Any) -> tuple[Any, Any]:
        return _mask(xp, (2, 1, 300, 200)), _mask(xp, (3, 300, 200), "other")

    return {
        "and": lambda xp: pair(xp)[0] & pair(xp)[1],
        "or": lambda xp: pair(xp)[0] | pair(xp)[1],
        "or with one of NumPy": lambda xp: pair(xp)[0] | pair(np)[1],
        "not": lambda xp: ~pair(xp)[1],
        "xor": lambda xp: pair(xp)[0] ^ pair(xp)[1],
        "equal and not equal": lambda xp: [pair(xp)[0] == pair(xp)[1], pair(xp)[0] != pair(xp)[1]],
        "and with an array": lambda xp: pair(xp)[0] & _dense(xp, (300, 200), "third"),
        "or with a row": lambda xp: pair(xp)[1] | _dense(xp, (1, 200), "third"),
        "T": lambda xp: pair(xp)[1].T,
        "entry": lambda xp: pair(xp)[1][1],
        "entries in another order": lambda xp: pair(xp)[1][[2, 0, 0]],
        "slices": lambda xp: pair(xp)[0][::-1, None],
        "entries as arrays": lambda xp: [mask.to_dense() for mask in pair(xp)[1]],
        "broadcast": lambda xp: BitMask.from_dense(
            xp.broadcast_to(_dense(xp, (130, 140)), (3, 130, 140))
        ),
        "parts": lambda xp: [pair(xp)[1][..., 100:290, 70:], pair(xp)[0][1, ..., 128:, :128]],
        "block_states": lambda xp: pair(xp)[1].block_states(),
        "get": lambda xp: pair(xp)[0].get(),
        "to_dense": lambda xp: pair(xp)[1].to_dense(),
        "to_dense of a slice": lambda xp: pair(xp)[1][::2].to_dense(),
        "to_csr": lambda xp: _wide(pair(xp)[1][2].to_csr()),
        "numbers": _numbers,
        "comparisons": _comparisons,
        "sums": _sums,
        "reorder": _reordered,
        "files": _files,
        "pickle to_dense": lambda xp: pickle.loads(pickle.dumps(pair(xp)[1][1:])).to_dense(),
    }


def _wide(csr: Any) -> Any:
    """Return the arrays of a sparse array, with integers that SciPy and CuPy agree on."""
    return csr.indptr.astype(np.int64), csr.indices.astype(np.int64), csr.data


def _accumulators(xp: Any) -> Any:
    tile, narrow = layouts.wgmma(256), layouts.mma(64)
    threads, registers = np.indices((tile.threads, tile.registers))
    rows, columns = np.indices((128, 128))
    return (
        *(tile, tile.threads, tile.registers, narrow, narrow.threads, layouts.mma()),
        *tile.element(threads, registers),
        *tile.holder(rows[:64], columns[:64]),
        *narrow.mask_bit(np.arange(narrow.registers), first_col=64),
        *layouts.fragment_address(rows, columns),
        *layouts.row_major_address(rows, columns),
        *(layouts.BLOCK, layouts.SLAB, layouts.ORDERS),
    )


def _packed(order: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        words = layouts.pack(xp.asarray(chance("bits", (2, 3, 128, 128), 0.4)), order)
        turned = layouts.pack(xp.asarray(chance("bits", (128, 128), 0.4)).T, order=order)
        return words, layouts.unpack(words, order), turned, layouts.unpack(words[1, ::2], order)

    return run


def calls() -> Iterator[Call]:
    """Yield all calls."""
    for shape in _SHAPES:
        yield Call(f"BitMask.from_dense {shape}", lambda xp, shape=shape: _mask(xp, shape))
    yield Call("BitMask.from_dense turned", lambda xp: BitMask.from_dense(_dense(xp, (300, 200)).T))
    yield Call(
        "BitMask.from_dense reversed", lambda xp: BitMask.from_dense(_dense(xp, (9, 400))[:, ::-3])
    )
    for dtype in ("int64", "int32", "uint8"):
        yield Call(f"BitMask.from_indices {dtype}", _indices((2, 200, 7), dtype, 250))
    yield Call("BitMask.from_indices full blocks", _indices((130, 3000), "int64", 300))
    yield Call("BitMask.from_indices no keys", _indices((2, 5, 0), "int64", 9))
    for name in ("csr", "csc", "coo"):
        yield Call(
            f"BitMask.from_csr {name}",
            lambda xp, name=name: BitMask.from_csr(_sparse(xp, name, "a")),
        )
    yield Call(
        "BitMask.from_csr sequence",
        lambda xp: BitMask.from_csr([_sparse(xp, "csr", seed) for seed in "abc"]),
    )
    yield Call(
        "BitMask.from_csr duplicates", lambda xp: BitMask.from_csr(_duplicates(xp)), cpu=True
    )
    yield Call("BitMask.from_blocks", _from_blocks)
    yield Call("BitMask.from_function", _from_function, cpu=True)
    yield Call("BitMask.from_segments", _segments)
    yield Call("BitMask.from_window", _windows, cpu=True)
    yield Call("BitMask.from_edges", _edges)
    for name, run in _algebra().items():
        yield Call(f"BitMask {name}", run)
    yield Call("BitMask repr", lambda xp: repr(_mask(xp, (2, 300, 200))), cpu=True)
    yield Call("layouts accumulators", _accumulators, cpu=True)
    for order in layouts.ORDERS:
        yield Call(f"layouts pack and unpack {order}", _packed(order))
