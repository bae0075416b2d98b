"""Attention by cuBLAS, as ``fa_cupy.gpu.cublas`` computes it, on NumPy in place of CuPy.

Arrays are of a type of their own, that refuses NumPy's arrays as operands and never becomes a
scalar, as CuPy's do. Kernels are what they compute, written in NumPy.
"""

import contextlib
import importlib
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from fa_cupy import layouts
from fa_cupy.core import arrays
from tests.support import imports
from validation.emulator.launcher import EmulatorLauncher

B = 128
MODULES = ("attention_backward", "attention", "mask_tiles", "tile_ops")
_NAMES = (
    "abs", "add", "arange", "broadcast_to", "copyto", "cos", "divide",
    "empty", "equal", "exp", "floor", "floor_divide", "full", "isfinite", "isnan", "less",
    "less_equal", "log",
    "logical_and", "logical_not", "logical_or", "maximum", "minimum", "mod", "multiply", "negative",
    "not_equal", "ones_like", "power", "sign", "sin", "sqrt", "subtract", "tanh", "where", "zeros",
)  # fmt: skip
_MAKERS = ("arange", "empty", "full", "zeros")


class Device(np.ndarray):
    """An array of the device."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        refuse_numpy(inputs + out)
        if out:
            options["out"] = tuple(map(bare, out))
        found = getattr(ufunc, method)(*map(bare, inputs), **options)
        return out[0] if out else device(found)

    def __getitem__(self, key):
        refuse_numpy(key if isinstance(key, tuple) else (key,))
        return device(super().__getitem__(key))

    def __setitem__(self, key, value):
        refuse_numpy([*(key if isinstance(key, tuple) else (key,)), value])
        super().__setitem__(key, value)

    def get(self):
        return np.array(self)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def device(x):
    """NumPy's array or scalar as an array of the device, without a copy of an array."""
    return np.asarray(x).view(Device)


def bare(x):
    return x.view(np.ndarray) if isinstance(x, Device) else x


def refuse_numpy(operands):
    if any(type(x) is np.ndarray for x in operands):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")


def _function(name):
    def call(*args, **options):
        refuse_numpy((*args, *options.values()))
        assert name in _MAKERS or any(isinstance(x, Device) for x in args), "makes an array"
        found = getattr(np, name)(*map(bare, args), **{k: bare(x) for k, x in options.items()})
        return options.get("out", device(found))

    return call


def namespace():
    """As much of CuPy as the modules use."""
    cupy = ModuleType("cupy")
    for name in _NAMES:
        setattr(cupy, name, _function(name))

    def as_strided(x, shape, strides):
        refuse_numpy([x])
        return device(np.lib.stride_tricks.as_strided(bare(x), shape, strides))

    cupy.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))
    cupy.ndarray, cupy.asarray = Device, lambda x: device(np.array(x))
    cupy.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=0))
    return cupy


# Kernels


def mask_blocks(table, words, entries, q_tiles, k_tiles, m, n, row, column, scores):
    """What the kernel of that name does, read from its table."""
    assert table.shape == (entries, q_tiles, k_tiles)
    assert scores.shape[1:] == (m, n)
    bits = np.empty((entries, q_tiles, B, k_tiles, B), bool)
    for i, j, k in np.ndindex(table.shape):
        place = table[i, j, k]
        whole = place == -1
        bits[i, j, :, k] = whole if place < 0 else layouts.unpack(words[place : place + 1])[0]
    seen = bits.reshape(entries, q_tiles * B, k_tiles * B)[:, row : row + m, column : column + n]
    assert seen.shape[1:] == (m, n)
    scores[~np.broadcast_to(seen, scores.shape)] = -np.inf


def mask_scores(keep, scores):
    scores[~np.broadcast_to(keep, scores.shape)] = -np.inf


def band_scores(m, n, least, most, scores):
    shift = np.arange(n) - np.arange(m)[:, None]
    scores[:, (shift < least) | (shift > most)] = -np.inf


def row_softmax(scores, top, total, decay, started):
    found = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    before = top.copy() if started else np.full_like(top, -np.inf)
    new = np.where((found > before) | np.isnan(found), found, before)
    shift = np.where(new == -np.inf, 0, new)
    decay[...] = np.exp(before - shift)
    np.exp(scores - shift, out=scores)
    sums = scores.sum(axis=-1, keepdims=True)
    total[...] = total * decay + sums if started else 0 * decay + sums
    top[...] = new


def _by_rows(of_rows, scores):
    return of_rows.reshape(*scores.shape[:2], 1)


def weigh(shift, n, scores):
    np.exp(scores - _by_rows(shift, scores), out=scores)


def weigh_pairs(shift, total, divides, base, n, scores, dscores):
    assert n == scores.shape[-1]
    weigh(shift, n, scores)
    if divides:
        scores /= _by_rows(total, scores)
    dscores -= _by_rows(base, scores)
    dscores *= scores


def scale(factor, x):
    x *= factor


def scale_rows(decay, n, acc):
    acc *= _by_rows(decay, acc)


def close_rows(top, total, lse):
    lse[...] = top + np.log(total)
    total[total == 0] = 1


def divide_rows(total, n, acc, spoiled):
    acc /= _by_rows(total, acc)
    spoiled[0] |= not np.isfinite(acc).all()


def round_to_tf32(x):
    x[...] = ((x.view(np.uint32) + np.uint32(0x1000)) & ~np.uint32(0x1FFF)).view(np.float32)


def from_bfloat16(bits, value=None):
    wide = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    if value is not None:
        value[...] = wide
    return device(wide)


def to_bfloat16(value, bits):
    bits[...] = value.astype(ml_dtypes.bfloat16).view(np.uint16)


def mark(x, flag):
    flag[0] |= not np.isfinite(x).all()


def mark_far(lse, far, found):
    found[1] |= (np.isfinite(lse) & (np.abs(lse) >= far)).any()


def matmul(handle, a, b, out, transposed, a_transposed=False, add=False, factor=1.0):
    a, b = (x.swapaxes(1, 2) if t else x for x, t in ((a, a_transposed), (b, transposed)))
    out[...] = factor * (a @ b) + (out if add else 0)


def empty(shape, dtype, like=None):
    """Memory for a result, which lies as `like` does."""
    if like is None:
        return device(np.empty(shape, dtype))
    return device(arrays.empty_laid_out(np, shape, bare(like), dtype))


def _kernel(function):
    def launch(*args, **options):
        with np.errstate(all="ignore"):
            return function(*map(bare, args), **options)

    return launch


_KERNELS = (
    band_scores, close_rows, divide_rows, from_bfloat16, mark_far, mask_blocks, mask_scores,
    round_to_tf32, scale, scale_rows, to_bfloat16, weigh,
    weigh_pairs,
)  # fmt: skip


@contextlib.contextmanager
def in_place_of_cublas(monkeypatch):
    """Give modules of ``fa_cupy.gpu.cublas`` on NumPy, imported anew and forgotten."""
    lists = SimpleNamespace(
        host_lists=lambda mask: (found := mask._store.with_words())._replace(
            words=np.arange(len(found.partial))
        ),
        device_lists=lambda mask, device: mask._store.with_words(),
    )
    blas = {"matmul": _kernel(matmul), "handle": lambda tf32: 1, "readable": lambda x: True}
    memory = {
        "refuse_products": lambda *what: None,
        "empty": empty,
        "launcher": lambda device: EmulatorLauncher(),
    }
    replaced = {
        "fa_cupy.gpu.masks.binding": vars(lists),
        "fa_cupy.gpu.cublas.elementwise": {of.__name__: _kernel(of) for of in _KERNELS},
        "fa_cupy.gpu.cublas.linear_elementwise": {"mark": _kernel(mark)},
        "fa_cupy.gpu.cublas.row_softmax": {"row_softmax": _kernel(row_softmax)},
        "fa_cupy.gpu.cublas.blas": blas,
        "fa_cupy.gpu.workspace": memory,
    }
    monkeypatch.setitem(sys.modules, "cupy", namespace())
    modules = ["fa_cupy.gpu.masks.dropout", *[f"fa_cupy.gpu.cublas.{name}" for name in MODULES]]
    with imports.anew([*replaced, *modules]):
        for name, names in replaced.items():
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(names)
        yield SimpleNamespace(
            **{n: importlib.import_module(m) for n, m in zip(MODULES, modules[1:], strict=True)}
        )
