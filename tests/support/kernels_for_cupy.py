"""Causal products of ``fa_cupy.gpu`` on NumPy in place of CuPy, their kernels in the emulator."""

import contextlib
import importlib
import re
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from fa_cupy.core import arrays, plan_cache
from tests.support import imports
from validation.emulator.launcher import EmulatorLauncher

_NAMES = (
    "abs", "ascontiguousarray", "asarray", "broadcast_to", "copyto", "empty", "ones", "repeat",
    "where", "zeros",
)  # fmt: skip


class Array(np.ndarray):
    """An array whose address is that of device memory."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], device_id=0)


def array(x):
    """NumPy's array as one of the device."""
    return np.asarray(x).view(Array)


def _function(name):
    def call(*args, **options):
        with np.errstate(all="ignore"):
            return array(getattr(np, name)(*args, **options))

    return call


def _elementwise(text):
    """What a kernel of CuPy with this text does, as far as those of linear attention go."""
    target, formula = re.fullmatch(r"(\w+) = (.*)", text).groups()
    formula = re.sub(r"T\((\w+)\)", r"\1", formula)
    formula = re.sub(r"(.*) \? (.*) : (.*)", r"where(\1, \2, \3)", formula)

    def run(*given, names):
        values = dict(zip(names, given, strict=True))
        with np.errstate(all="ignore"):
            values[target][...] = eval(formula, {"where": np.where, "exp": np.exp}, values)

    return run


def _kernel(inputs, outputs, text, name, **options):
    names = [part.split()[-1] for part in f"{inputs},{outputs}".split(",") if part]
    if name == "fa_cupy_unit":
        return lambda x: array(np.exp2(np.rint(np.log2(x))).astype(x.dtype))
    if not re.fullmatch(r"(\w+) = [^;]*", text):
        return None
    run = _elementwise(text)
    return lambda *given: run(*given, names=names)


def _load(out, x):
    np.copyto(out, x.astype(out.dtype))


def _to_bfloat16(value, bits):
    bits[...] = value.astype(ml_dtypes.bfloat16).view(np.uint16)


def _from_bfloat16(bits, value=None):
    found = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    if value is None:
        return array(found)
    value[...] = found
    return value


def _empty(shape, dtype, like=None):
    return array(arrays.empty_laid_out(np, shape, np.empty(shape) if like is None else like, dtype))


@contextlib.contextmanager
def packed_products(launcher=None):
    """Import ``fa_cupy.gpu.packed.products`` anew, with all that it uses."""
    launcher = launcher or EmulatorLauncher()
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    for name in _NAMES:
        setattr(cupy, name, _function(name))
    cupy.copyto = np.copyto
    cupy.ndarray, cupy.cuda, cupy.ElementwiseKernel = Array, cuda, _kernel
    cupy.lib = SimpleNamespace(
        stride_tricks=SimpleNamespace(
            as_strided=lambda x, shape, strides: array(
                np.lib.stride_tricks.as_strided(x, shape, strides)
            )
        )
    )
    cuda.alloc, cuda.runtime = None, SimpleNamespace(getDevice=lambda: 0)
    replaced = {
        "fa_cupy.gpu.workspace": {
            "empty": _empty,
            "launcher": lambda device: launcher,
            "refuse": lambda *what: None,
            "computing": lambda device: contextlib.nullcontext(),
        },
        "fa_cupy.gpu.cublas.blas": {},
        "fa_cupy.gpu.cublas.elementwise": {
            "to_bfloat16": _to_bfloat16, "from_bfloat16": _from_bfloat16,
        },
    }  # fmt: skip
    kept = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "cupy"}
    plans = plan_cache.plans.copy()
    plan_cache.plans.clear()
    own = [f"fa_cupy.gpu.{x}" for x in (
        "arrays", "causal_product", "causal_product_backward", "linear_attention",
        "packed.products", "cublas.tile_ops", "cublas.linear_elementwise",
    )]  # fmt: skip
    try:
        with imports.anew({*imports.loaded(), *replaced, *own}):
            for name in kept:
                del sys.modules[name]
            sys.modules["cupy"], sys.modules["cupy.cuda"] = cupy, cuda
            for name, names in replaced.items():
                sys.modules[name] = found = ModuleType(name)
                vars(found).update(names)
                parent, _, child = name.rpartition(".")
                setattr(importlib.import_module(parent), child, found)
            yield importlib.import_module("fa_cupy.gpu.packed.products")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
            del sys.modules[name]
        sys.modules.update(kept)
        plan_cache.plans.clear()
        plan_cache.plans.update(plans)
