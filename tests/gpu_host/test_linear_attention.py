"""Linear attention as ``fa_cupy.gpu`` computes it, on NumPy in place of CuPy, and its kernels."""

import contextlib
import importlib
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from fa_cupy.core import linear_problem
from fa_cupy.cpu import linear_attention as cpu
from tests.support import cublas_on_numpy as device
from tests.support import imports
from tests.support.cublas_on_numpy import Device, bare
from tests.support.products import draw, state_dtype
from tests.support.strategies import DTYPES, UNIT, by_dtype

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
NAME = "fa_cupy.gpu.linear_attention"


def elementwise(text):
    """What a kernel of CuPy with this text does, as far as the texts of linear attention go."""
    target, formula = re.fullmatch(r"(\w+) = (.*)", text).groups()
    formula = re.sub(r"T\((\d)\)", r"\1", formula)
    formula = re.sub(r"(.*) \? (.*) : (.*)", r"where(\1, \2, \3)", formula)

    def run(*arrays, names):
        values = dict(zip(names, map(bare, arrays), strict=True))
        with np.errstate(all="ignore"):
            values[target][...] = eval(formula, {"where": np.where, "exp": np.exp}, values)

    return run


def kernel(inputs, outputs, text, name):
    names = [part.split()[-1] for part in f"{inputs},{outputs}".split(",") if part]
    if name == "fa_cupy_unit":
        return lambda x: device.device(np.exp2(np.rint(np.log2(bare(x)))).astype(x.dtype))
    if "found" in names or "sums" in text or "spoiled" in text:
        return None  # not of linear attention
    if name == "fa_cupy_normalise":
        return normalise
    run = elementwise(text)
    return lambda *arrays: run(*arrays, names=names)


def normalise(weight, unit, eps, weighted):
    with np.errstate(all="ignore"):
        bare(weighted)[...] = bare(weighted) / (bare(weight) / bare(unit) + weight.dtype.type(eps))


def on_cpu(function):
    """A function of the CPU path for arrays of the device."""

    def call(problem, *arrays, **options):
        found = function(problem, *(map(bare, arrays)), **options)
        many = isinstance(found, tuple)
        found = tuple(None if x is None else device.device(x) for x in (found if many else [found]))
        return found if many else found[0]

    return call


def compute(problem, q, k, v, initial, out, state, *, reverse):
    result, last = cpu.product(
        problem, *map(bare, (q, k, v, initial)), bare(out), reverse=reverse, return_state=True
    )
    assert result is bare(out) or np.shares_memory(result, out)
    if state is not None:
        bare(state)[...] = last


def namespace():
    cupy = device.namespace()
    for name in ("ones", "repeat"):
        setattr(cupy, name, device._function(name))
    cupy.ones = lambda shape, dtype: device.device(np.ones(shape, dtype))
    cupy.ElementwiseKernel = kernel
    cupy.cuda.runtime = SimpleNamespace(getDevice=lambda: 0)
    return cupy


@pytest.fixture
def module(monkeypatch):
    """The module on NumPy, imported anew and forgotten, with products of the CPU path."""
    nothing = {"refuse_products": lambda *what: None, "refuse": lambda *what: None}
    memory = nothing | {
        "empty": lambda shape, dtype, like=None: device.device(np.empty(shape, dtype)),
        "computing": lambda device: contextlib.nullcontext(),
    }
    blas = {"matmul": device._kernel(device.matmul), "handle": lambda tf32: 1}
    products = {
        "compute": compute, "require_kernels": lambda *what: None, "product": None, "cached": None,
    }  # fmt: skip
    replaced = {
        "fa_cupy.gpu.workspace": memory,
        "fa_cupy.gpu.arrays": {"require_whole_elements": lambda *what, **arrays: None},
        "fa_cupy.gpu.causal_product": products,
        "fa_cupy.gpu.causal_product_backward": {"backward": on_cpu(cpu.backward)},
        "fa_cupy.gpu.cublas.blas": blas | {"readable": lambda x: True},
        "fa_cupy.gpu.cublas.elementwise": {
            of.__name__: device._kernel(of) for of in (device.from_bfloat16, device.to_bfloat16)
        },
        "fa_cupy.gpu.cublas.linear_attention": {"states": on_cpu(cpu.states)},
    }
    monkeypatch.setitem(sys.modules, "cupy", namespace())
    own = ["fa_cupy.gpu.cublas.linear_elementwise", "fa_cupy.gpu.cublas.tile_ops", NAME]
    with imports.anew([*replaced, *own]):
        for name, names in replaced.items():
            sys.modules[name] = found = ModuleType(name)
            vars(found).update(names)
        yield importlib.import_module(NAME)


SHAPES = [
    ((30, 5), (30, 5), (30, 3), None),
    ((2, 4, 20, 3), (2, 2, 20, 3), (2, 2, 20, 6), (2, 3, 7)),
    ((2, 8, 20, 3), (2, 2, 20, 3), (1, 4, 20, 1), (4, 3, 2)),
    ((3, 20, 3), (20, 3), (20, 2), (3, 3, 3)),
]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("feature", ["elu1", "relu", "exp", None])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(**by_dtype())
def test_same_as_on_the_cpu(module, dtype, shapes, feature, is_causal):
    q, k, v = draw(*shapes[:3], dtype=dtype)
    v = (v.astype(float) * 100).astype(dtype)  # the column of ones becomes one of 128 or so
    if feature is None:
        q, k = (np.abs(x) for x in (q, k))
    if not is_causal:
        q = q[..., :11, :]
    initial = None
    if shapes[3]:
        initial = np.abs(draw(shapes[3], dtype=state_dtype(dtype), seed=1)[0])
    problem = linear_problem.product_problem(
        "test", q, k, v, initial, aligned=is_causal, normalised=True
    )
    dout = draw(problem.out_shape, dtype=dtype, seed=2)[0]
    dstate = draw(problem.state_shape, dtype=state_dtype(dtype), seed=3)[0]
    options = {"feature": feature, "eps": 0.5, "is_causal": is_causal}
    arrays = [None if x is None else device.device(x) for x in (q, k, v, initial)]

    got = module.linear_attention(problem, *arrays, None, **options, return_state=True)
    want = cpu.linear_attention(problem, q, k, v, initial, None, **options, return_state=True)
    limit = 4 * UNIT[dtype] + 100 * UNIT[state_dtype(dtype)]

    def compare(found, expected):
        assert type(found) is Device
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        found, expected = (bare(x).astype(float) for x in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=0, atol=limit * np.abs(expected).max())

    for pair in zip(got, want, strict=True):
        compare(*pair)
    grads = device.device(dout), device.device(dstate)
    got = module.linear_attention_backward(problem, grads[0], *arrays, grads[1], **options)
    want = cpu.linear_attention_backward(problem, dout, q, k, v, initial, dstate, **options)
    for found, expected in zip(got, want, strict=True):
        if expected is None:
            assert found is None
        else:
            compare(found, expected)
