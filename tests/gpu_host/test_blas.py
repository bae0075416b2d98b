"""cuBLAS handles and what is said where there is no cuBLAS; without a GPU."""

import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from fa_cupy.gpu.cublas import blas


class Devices:
    """Stands in for `cupy`: devices that can be made current, and one stream on each."""

    def __init__(self):
        self.current = 0
        runtime = SimpleNamespace(getDevice=lambda: self.current)
        stream = SimpleNamespace(ptr=0)
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=self.device, get_current_stream=lambda: stream
        )

    def device(self):
        own = self.current

        class Device:
            def __enter__(device):
                device.before, self.current = self.current, own

            def __exit__(device, *_):
                self.current = device.before

        return Device()


def test_a_handle_ends_on_its_own_device(monkeypatch):
    devices, made, ended = Devices(), [], []

    def create():
        made.append(devices.current)
        return len(made)

    library = SimpleNamespace(
        create=create,
        destroy=lambda handle: ended.append((handle, devices.current)),
        setMathMode=lambda handle, mode: None,
    )
    monkeypatch.setattr(blas, "cupy", devices)
    monkeypatch.setattr(blas, "_library", lambda: library)
    monkeypatch.setattr(blas, "_by_thread", threading.local())
    for devices.current in range(blas._MOST_HANDLES + 1):
        blas.handle(tf32=False)
    assert ended == [(1, 0)]
    assert devices.current == blas._MOST_HANDLES
    blas._by_thread.handles.clear()
    assert ended == [(i + 1, device) for i, device in enumerate(made)]


def test_a_missing_cublas_says_how_to_install_it(monkeypatch):
    libs = pytest.importorskip("cupy_backends.cuda.libs")

    def missing(name):
        raise ImportError(f'Failure finding "lib{name}.so.13"\n  listdir("/usr/lib")')

    if "cublas" in vars(libs):
        monkeypatch.delattr(libs, "cublas")
    monkeypatch.setattr(libs, "__getattr__", missing, raising=False)
    monkeypatch.delitem(sys.modules, "cupy_backends.cuda.libs.cublas", raising=False)
    blas._library.cache_clear()
    with pytest.raises(ImportError, match=r"need cuBLAS: pip install 'fa_cupy\[") as caught:
        blas._library()
    assert str(caught.value).startswith("gradients of float32 with dims above 128 before Hopper")
    assert str(caught.value).endswith('(Failure finding "libcublas.so.13")')
    assert "\n" not in str(caught.value)
