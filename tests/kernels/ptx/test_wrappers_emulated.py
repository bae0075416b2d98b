"""The wrappers' emulation: the tests of the wrappers themselves, run without a GPU.

With one each test also runs there, and what comes out is held against the emulator's: bit for bit,
but for products and approximations, which agree to rounding.
"""

import re
import types

import numpy as np
import pytest

from fa_cupy.gpu.driver import compile
from tests.support.ptx_kernels import AT, HEADERS

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from tests.kernels.ptx import test_wrappers, test_wrappers_sm90
from tests.kernels.ptx.test_wrappers import run as gpu_run  # noqa: F401
from tests.kernels.ptx.test_wrappers_sm90 import BY_FORM, BY_TYPE, WGMMA_N, accumulator, multiply  # noqa: F401
from tests.kernels.ptx.test_wrappers_sm90 import run as gpu_run_sm90  # noqa: F401
from validation import emulator

pytestmark = pytest.mark.emulator

NOT_EMULATED = {"test_cluster", "test_tma_multicast"}
INCLUDES = "".join(f'#include "ptx/{name}"\n' for name in sorted(HEADERS) if name != "cluster.cuh")
#: What is left to chance: which lane is elected, which thread draws which ticket.
FREE = {"elect_sync", "atomics"}
#: Units in the last place between the machines; sums are rounded in another order.
ROUNDED = {
    "ex2_approx_ftz": 4,
    "rcp_approx_ftz": 4,
    "rcp_approx": 4,
    "lg2_approx_ftz": 4,
    "mma_m16n8k16": 4,
    "wgmma": 64,
}
SHARED = re.compile(r"__shared__ (?:__align__\((\d+)\) )?(\w+) (\w+)((?:\[[^\]]+\])+)?;")
rng = np.random.default_rng(0)


def take(module):
    """The tests of a module that use a fixture `run`, less their mark that says they need a GPU."""
    for name, test in vars(module).items():
        if not name.startswith("test_") or name in NOT_EMULATED:
            continue
        if {"run", "multiply"} & set(test.__code__.co_varnames[: test.__code__.co_argcount]):
            copy = types.FunctionType(test.__code__, test.__globals__, name, test.__defaults__)
            copy.pytestmark = [mark for mark in test.pytestmark if mark.name != "gpu"]
            yield name, copy


globals().update(take(test_wrappers))
globals().update(take(test_wrappers_sm90))


def on_host(source):
    """The source with its shared variables laid out in shared memory, and their bytes."""
    used = 0

    def place(found):
        nonlocal used
        align, kind, name, dims = found.groups(default="")
        size = np.dtype(kind if kind != "float" else "float32").itemsize
        size *= int(np.prod([eval(n) for n in re.findall(r"\[([^\]]+)\]", dims)], dtype=int))
        at = -(-used // int(align or 16)) * int(align or 16)
        used = at + size
        return f"using {name}_type = {kind}{dims};\n  {name}_type& {name} = " + (
            f"*reinterpret_cast<{name}_type*>(shared_bytes + {at});"
        )

    dynamic = r"extern __shared__ __align__\(1024\) (\w+) (\w+)\[\];"
    source = re.sub(dynamic, r"\1* \2 = reinterpret_cast<\1*>(shared_bytes);", source)
    return SHARED.sub(place, source), used


def emulate(
    family, name, out, *inputs, entry="test", threads, blocks, shared=0, tensor=None, **more
):
    text = INCLUDES + AT + family["PREAMBLE"] + family["SOURCES"][name]
    text += "\n}\n" if family is vars(test_wrappers) else ""
    text, used = on_host(text)
    source = compile.ROOT / "build/emulator" / f"probe-{name}.cu"
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    entries = re.findall(r"^ENTRY\(\w+, (\w+), (\w+),", text, re.MULTILINE)
    entries = [f"{form}_{kind}" for form, kind in entries] or ["test"]
    path = emulator.build(f"probe-{name}", source, (), entries)
    arrays = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy() for x in inputs]
    result = np.full(np.prod(out[0], dtype=int) * np.dtype(out[1]).itemsize, 0xEE, np.uint8)
    failed = np.zeros(1, np.uint32)
    params = np.zeros(1, family["PARAMS"])
    pointers = dict(zip(("x", "y", "z"), (x.ctypes.data for x in arrays), strict=False))
    pointers["out"], more["failed"] = result.ctypes.data, failed.ctypes.data
    for field, value in (pointers | more).items():
        if field in params.dtype.names:
            params[field] = value
    if tensor:
        words = emulator.tensor_map(int(params[tensor[0]][0]), *tensor[2:])
        params["map"] = words.view("V128")
    for seed in range(3):
        fresh = [x.copy() for x in (*arrays, result)]
        emulator.launch(path, entry, blocks, threads, used + shared, params, seed)
        assert failed[0] == 0, "a barrier's phase ended too late or too early"
        if seed < 2:
            for x, before in zip((*arrays, result), fresh, strict=True):
                x[:] = before
    return result.view(out[1]).reshape(out[0])


def compare(name, emulated, measured):
    if name in FREE:
        return
    units = next((n for prefix, n in ROUNDED.items() if name.startswith(prefix)), 0)
    if units:
        np.testing.assert_allclose(emulated, measured, rtol=units * 2.0**-23, atol=units * 2.0**-23)
    elif emulated.dtype.kind == "f":  # bits of NaN apart
        np.testing.assert_array_equal(emulated, measured)
    else:
        assert emulated.tobytes() == measured.tobytes()


@pytest.fixture(params=["emulator", pytest.param("both", marks=pytest.mark.gpu)])
def run(request):
    family = request.function.__globals__
    sm90 = family is not vars(test_wrappers)
    family = vars(test_wrappers_sm90) if sm90 else family
    on_gpu = None
    if request.param == "both":
        on_gpu = request.getfixturevalue("gpu_run_sm90" if sm90 else "gpu_run")

    def run(name, out, *inputs, threads=128 if sm90 else 32, blocks=None, **more):
        used = threads if sm90 else min(threads, 128)
        grid = (blocks or 1) if sm90 else threads // used
        emulated = emulate(family, name, out, *inputs, threads=used, blocks=grid, **more)
        if on_gpu is None:
            return emulated
        more |= {"blocks": blocks} if blocks else {}
        measured = on_gpu(name, out, *inputs, threads=threads, **more)
        compare(name, emulated, measured)
        return measured

    return run


@BY_FORM
@BY_TYPE
def test_products_of_any_numbers(multiply, form, dtype):  # noqa: F811
    a, b, d = (rng.standard_normal(shape) for shape in ((64, 128), (128, 64), (64, 64)))
    a, b = a.astype(dtype), b.astype(dtype)
    got = multiply(form, dtype, a, b, d)
    want = a.astype(np.float64) @ b.astype(np.float64) + d.astype(np.float32)
    np.testing.assert_allclose(got, accumulator(want), rtol=0, atol=1e-4)


# Arguments for kernels that store to shared memory what TMA or wgmma read, or overwrite.
BLANK = np.zeros((32, 64), np.uint16)
AXES = (1, 1, 1, 32, 64), (4096, 4096, 4096, 128, 2)
FENCED = {
    "wgmma_groups": ((np.zeros(32768, np.uint8),) * 2, {"shared": 32768, "bytes": 32768}),
    "tma_store_wait": ((BLANK, BLANK), {"tensor": ("x", "float16", *AXES, (1, 1, 1, 16, 64))}),
    "bulk_load": (
        (BLANK, np.zeros(1, np.int32)),
        {"count": 1, "bytes": 2048},
    ),
    "tma_load": (
        (BLANK, np.zeros((1, 5), np.int32)),
        {"tensor": ("x", "float16", *AXES, (1, 1, 1, 16, 64)), "count": 1, "bytes": 2048},
    ),
}


@pytest.mark.parametrize("name", FENCED)
def test_a_lost_proxy_fence_is_found(name):
    inputs, more = FENCED[name]
    family = vars(test_wrappers_sm90)
    arguments = (((128, 1024), np.uint8), *inputs)
    emulate(family, name, *arguments, threads=128, blocks=1, **more)
    text = family["SOURCES"][name]
    lost = {"SOURCES": {name: text.replace("fence_proxy_async_shared();", "")}}
    with pytest.raises(emulator.EmulationError, match=r"without fence.proxy.async after what"):
        emulate(family | lost, name, *arguments, threads=128, blocks=1, **more)
