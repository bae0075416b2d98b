"""What kernels are compiled for on a device, by stand-ins for CuPy and for what NVRTC knows."""

import contextlib
import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from fa_cupy.__main__ import main
from fa_cupy.gpu.driver import compile, cubin_cache, devices, nvrtc
from fa_cupy.gpu.driver.targets import SHARED_LIMIT, target_of
from fa_cupy.gpu.kernels.forward import VARIANTS, reachable

KB = 1024
CUDA_12_8 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120)
CUDA_13_0 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-bindings"
)


@pytest.mark.parametrize(
    ("capability", "known", "shared", "target", "why"),
    [
        ((8, 0), CUDA_12_8, 163, "sm_80", "its own"),
        ((8, 6), CUDA_12_8, 99, "sm_86", "its own"),
        ((9, 0), CUDA_12_8, 227, "sm_90a", "its own"),
        ((10, 0), CUDA_12_8, 227, "sm_100", "its own"),
        ((10, 3), CUDA_13_0, 227, "sm_103", "its own"),
        ((12, 1), CUDA_13_0, 99, "sm_121", "its own"),
        # The compiler is older than the device.
        ((10, 3), CUDA_12_8, 227, "sm_100", "NVRTC does not know sm_103"),
        ((12, 1), CUDA_12_8, 99, "sm_120", "NVRTC does not know sm_121"),
        ((8, 9), (75, 80, 86), 99, "sm_86", "NVRTC does not know sm_89"),
        # The shared memory of the device decides where its number is not known.
        ((8, 8), CUDA_13_0, 99, "sm_86", "fa_cupy has no target sm_88"),
        ((8, 8), CUDA_13_0, 163, "sm_87", "fa_cupy has no target sm_88"),
        ((8, 6), (75, 80), 99, "compute_80", "NVRTC does not know sm_86"),
        ((10, 0), CUDA_13_0, 163, "compute_80+163K", "less than sm_100 has"),
        ((12, 9), CUDA_13_0, 99, "sm_121", "fa_cupy has no target sm_129"),
        # What ends in "a" runs on its own capability alone.
        ((9, 1), CUDA_13_0, 227, "compute_80+227K", "fa_cupy has no target sm_91"),
        ((9, 0), (75, 80), 227, "compute_80+227K", "NVRTC does not know sm_90a"),
        # A major of which NVRTC or this version knows nothing.
        ((11, 0), CUDA_12_8, 227, "compute_80+227K", "NVRTC does not know sm_110"),
        ((12, 0), (80, 90), 99, "compute_80", "NVRTC does not know sm_120"),
        ((13, 0), CUDA_13_0, 99, "compute_80", "fa_cupy has no target sm_130"),
        ((13, 0), (*CUDA_13_0, 130), 200, "compute_80+163K", "fa_cupy has no target sm_130"),
        ((13, 4), CUDA_13_0, 500, "compute_80+227K", "fa_cupy has no target sm_134"),
        ((13, 0), CUDA_13_0, 64, None, "less than kernels need"),
        # Too old.
        ((7, 5), CUDA_12_8, 64, None, "too old for the kernels: products of cuBLAS serve it"),
        ((1, 3), CUDA_12_8, 16, None, "too old for the kernels: products of cuBLAS serve it"),
    ],
)
def test_the_target_of_a_device(capability, known, shared, target, why):
    found = target_of(*capability, known, shared * KB)
    assert found.target == target
    assert why in found.why
    assert target is None or SHARED_LIMIT[target] <= shared * KB
    assert ("PTX, which the driver compiles" in found.why) == str(target).startswith("compute")


def test_every_cubin_target_is_that_of_its_device():
    for target, limit in SHARED_LIMIT.items():
        if target.startswith("sm_"):
            digits = target.removeprefix("sm_").rstrip("a")
            major, minor = int(digits[:-1]), int(digits[-1])
            assert target_of(major, minor).target == target
            assert target_of(major, minor, CUDA_13_0, limit).target == target


@pytest.mark.parametrize("target", [t for t in SHARED_LIMIT if t.startswith("compute")])
def test_ptx_serves_what_cubins_of_that_memory_serve(target):
    like = {99: "sm_86", 163: "sm_80", 227: "sm_100"}[SHARED_LIMIT[target] // KB]
    for dtype in ("float16", "bfloat16"):
        for dim in (32, 64, 100, 256):
            rows = reachable(dtype, dim, dim, target)
            assert rows
            assert rows == reachable(dtype, dim, dim, like)


# CuPy's devices


def stand_in(*facts):
    """CuPy with devices of these compute capabilities and KB of shared memory."""
    cupy = ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {})
    properties = [
        {
            "name": f"device of {major}.{minor}".encode(),
            "major": major,
            "minor": minor,
            "sharedMemPerBlockOptin": shared * KB,
            "multiProcessorCount": 7,
            "totalGlobalMem": 8 << 30,
        }
        for major, minor, shared in facts
    ]
    runtime = SimpleNamespace(
        getDeviceCount=lambda: len(properties), getDeviceProperties=properties.__getitem__
    )
    cupy.cuda = SimpleNamespace(
        is_available=lambda: bool(properties),
        runtime=runtime,
        Device=lambda: SimpleNamespace(id=0),
    )
    return cupy


@pytest.fixture
def with_devices(monkeypatch, tmp_path):
    """Put stand-ins in the place of CuPy and of NVRTC's list; the cache is empty."""
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    devices.target_of_device.cache_clear()

    def use(*facts, known=CUDA_12_8):
        monkeypatch.setitem(sys.modules, "cupy", stand_in(*facts))
        monkeypatch.setattr(nvrtc, "capabilities", lambda: list(known))

    yield use
    devices.target_of_device.cache_clear()


def test_devices_get_what_nvrtc_knows(with_devices):
    with_devices((10, 3, 227), (12, 1, 99), (13, 0, 227), (9, 0, 227), (7, 5, 64))
    wanted = ["sm_100", "sm_120", "compute_80+227K", "sm_90a", None]
    assert [device.target for device in devices.devices()] == wanted
    assert [devices.target_of_device(number) for number in range(5)] == wanted
    assert devices.current_target() == "sm_100"


def test_without_a_compiler_a_device_has_its_own_target(with_devices, monkeypatch):
    """So that the first compilation says how to install one."""

    def missing():
        raise ImportError("compiling a kernel needs NVRTC")

    with_devices((10, 3, 227))
    monkeypatch.setattr(nvrtc, "capabilities", missing)
    assert devices.current_target() == devices.target_of_device(0) == "sm_103"


def test_info_says_which_target_was_chosen_and_why(with_devices, capsys):
    with_devices((10, 3, 227), (13, 0, 99), (9, 0, 227))
    assert main(["info", "--shape", "1,8,4096,64"]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for text in (
        "target sm_100: the newest that runs on it: NVRTC does not know sm_103",
        "target compute_80: PTX, which the driver compiles: fa_cupy has no target sm_130",
        "target sm_90a: its own",
        "CuPy sm_100: attention_fwd_sm80-float16-d64",
    ):
        assert text in shown


# PTX in the place of a cubin


@needs_compiler
def test_a_row_is_compiled_to_ptx_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path))
    row = VARIANTS[0]
    first = compile.compile_variant(row, "compute_80")
    assert not first.cached
    assert first.cubin.endswith(b"\0")
    text = first.cubin[:-1].decode()
    assert f".visible .entry {row.entry}(" in text
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    (kept,) = tmp_path.iterdir()
    assert re.fullmatch(rf"{row.name}-compute_80-[0-9a-f]{{24}}\.ptx", kept.name)
    # Which rows a target has is no matter of the compiler.
    again = compile.compile_variant(row, "compute_80+227K")
    assert again == (*first[:3], True)
    assert not compile.compile_variant(row, "sm_80").cached
    assert main(["info"]) == 0
    assert len(list(tmp_path.iterdir())) == 2


@needs_compiler
def test_info_counts_ptx_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / "a.ptx").write_bytes(bytes(500_000))
    (tmp_path / "b.cubin").write_bytes(bytes(700_000))
    assert main(["info"]) == 0
    assert f"{tmp_path}: 2 kernels, 1.2 MB" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize(("image", "kind"), [(b"\x7fELF", "cubin"), (b".version 8\0", "PTX")])
def test_an_image_that_the_driver_refuses_is_named(monkeypatch, image, kind):
    class Refused(Exception):
        pass

    def load(self, image):
        raise Refused("unsupported")

    cupy = stand_in((13, 0, 99))
    cupy.cuda.Device = lambda device: contextlib.nullcontext()
    cupy.cuda.function = SimpleNamespace(Module=type("Module", (), {"load": load}))
    cupy.cuda.driver = SimpleNamespace(CUDADriverError=Refused)
    cupy.cuda.runtime.driverGetVersion = lambda: 14000
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(RuntimeError, match=rf"^kernel: .* refuses the {kind} of NVRTC .*unsup"):
        compile.load_cubin(image, "kernel", 0)
