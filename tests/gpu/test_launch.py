"""Loading and launching on a GPU, and tensor maps."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fa_cupy.gpu.driver import compile, devices, tensor_map
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.linear.table import PRODUCTS

pytest.importorskip("cupy")
from fa_cupy.gpu.driver.launch import Arguments, Launch, launch

PARAMS = np.dtype(
    [("out", np.uint64), ("bytes", np.uint8, (120,)), ("value", np.int32), ("shared", np.int32)]
)
SOURCE = b"""
struct Params { unsigned char* out; unsigned char bytes[120]; int value, shared; };
// Writes its parameters after a trip through the last bytes of shared memory.
extern "C" __global__ void test(const __grid_constant__ Params p) {
  extern __shared__ unsigned char shared[];
  unsigned char* last = shared + p.shared - 128;
  if (threadIdx.x < 120) last[threadIdx.x] = p.bytes[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 120) p.out[blockIdx.x * 128 + threadIdx.x] = last[threadIdx.x] + p.value;
}
"""
LARGE = 96 * 1024  # more than a block gets without asking, and less than any device has


@pytest.fixture(scope="module")
def target(cupy):
    target = devices.current_target()
    if target is None:
        pytest.skip("the kernels do not run on this device")
    return target


@pytest.fixture
def kernel(cupy, target):
    cubin = compile.compile_source("launch", SOURCE, target).cubin
    return compile.load_cubin(cubin, "test", cupy.cuda.Device().id)


def params_for(out, value=0, shared_bytes=128):
    params = np.zeros(1, PARAMS)
    params["shared"] = shared_bytes
    params["out"] = out.data.ptr
    params["bytes"] = np.arange(120)
    params["value"] = value
    return params


def check(cupy, out, value=0):
    rows = cupy.asnumpy(out).reshape(-1, 128)[:, :120]
    np.testing.assert_array_equal(rows, np.broadcast_to(np.arange(120) + value, rows.shape))


@pytest.mark.parametrize("shared_bytes", [128, 48 * 1024, LARGE])
def test_launch_passes_the_struct_by_value(cupy, kernel, shared_bytes):
    out = cupy.zeros(7 * 128, np.uint8)
    params = params_for(out, 3, shared_bytes)
    launch(kernel, 7, 128, shared_bytes, params)
    params["value"] = 99  # too late to be seen
    check(cupy, out, 3)


def test_more_shared_memory_stays_granted(cupy, kernel):
    out = cupy.zeros(128, np.uint8)
    sizes = LARGE, 64 * 1024
    runs = [Launch(kernel, 1, 128, size) for size in sizes]
    for run, size in zip(runs, sizes, strict=True):
        run(Arguments(params_for(out, shared_bytes=size)))
        check(cupy, out)
        out[:] = 0


def test_launch_uses_the_current_stream(cupy, kernel):
    out = cupy.zeros(128, np.uint8)
    params = params_for(out, shared_bytes=LARGE)
    run = Launch(kernel, 1, 128, LARGE)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        run(Arguments(params))
        graph = stream.end_capture()
    cupy.cuda.Device().synchronize()
    assert not out.any()  # it was recorded, so it went to that stream
    graph.launch(stream)
    stream.synchronize()
    check(cupy, out)


def test_a_thread_without_a_context_can_launch(cupy, kernel):
    out = cupy.zeros(128, np.uint8)
    thread = threading.Thread(target=lambda: launch(kernel, 1, 128, 128, params_for(out)))
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    check(cupy, out)


def test_load_compiles_once_for_all_threads(cupy, target, monkeypatch):
    row = next(row for row in VARIANTS if target in row.targets)
    made = []

    def counted(*args):
        made.append(args)
        return real(*args)

    real = compile.compile_variant
    monkeypatch.setattr(compile, "_loaded", {})
    monkeypatch.setattr(compile, "compile_variant", counted)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: compile.load(row, target, 0), range(16)))
    assert len({id(one) for one in found}) == 1
    assert made == [(row, target)]


def test_every_row_loads(cupy, target):
    for row in (*VARIANTS, *PRODUCTS):
        if target in row.targets:
            assert compile.load(row, target, cupy.cuda.Device().id).ptr


def test_kernels_run_on_the_device_they_were_loaded_on(cupy, target):
    if len(devices.devices()) < 2:
        pytest.skip("one device")
    cubin = compile.compile_source("launch", SOURCE, target).cubin
    kernel = compile.load_cubin(cubin, "test", 1)
    assert cupy.cuda.Device().id == 0
    with cupy.cuda.Device(1):
        out = cupy.zeros(128, np.uint8)
        launch(kernel, 1, 128, LARGE, params_for(out, shared_bytes=LARGE))
        check(cupy, out)


def test_a_cubin_that_the_driver_refuses_is_an_error_and_no_more(cupy, target, kernel):
    other = "sm_80" if target.startswith("sm_12") else "sm_120"
    cubin = compile.compile_source("launch", SOURCE, other).cubin
    with pytest.raises(RuntimeError, match=r"test: the driver .* refuses the cubin of NVRTC"):
        compile.load_cubin(cubin, "test", cupy.cuda.Device().id)
    out = cupy.zeros(128, np.uint8)
    launch(kernel, 1, 128, 128, params_for(out))
    check(cupy, out)


def test_tensor_map_is_encoded_once(cupy):
    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("the device has no tensor memory accelerator")
    x = cupy.zeros((3, 100, 64), np.float16)
    geometry = ("float16", x.shape, x.strides, (1, 64, 64))
    encoded = tensor_map.encode_tiled(x.data.ptr, *geometry)
    assert len(encoded.tobytes()) == 128
    assert any(encoded.tobytes())
    assert tensor_map.encode_tiled(x.data.ptr, *geometry) is encoded
    assert tensor_map.encode_tiled(x[1].data.ptr, *geometry).tobytes() != encoded.tobytes()


GOOD = {
    "pointer": 1024,
    "dtype": "float16",
    "shape": (3, 100, 64),
    "strides": (12800, 128, 2),
    "box": (1, 64, 64),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pointer": 1026}, "pointer is 2 past a multiple of 16"),
        ({"strides": (12800, 130, 2)}, "want 2 last and else multiples of 16"),
        ({"strides": (12800, 128, 4)}, "want 2 last and else multiples of 16"),
        ({"shape": (3, 0, 64)}, "want 1 to 2..32"),
        ({"box": (1, 257, 64)}, "want 1 to 256"),
        ({"box": (1, 64, 128)}, "a row of the box is 256 bytes"),
        ({"box": (1, 64, 4)}, "a row of the box is 8 bytes"),
        ({"box": (64, 64)}, "want the same 1 to 5 axes"),
    ],
)
def test_tensor_map_says_what_the_hardware_cannot_do(change, message):
    with pytest.raises(ValueError, match=f"tensor map: .*{message}"):
        tensor_map.encode_tiled(**GOOD | change)
