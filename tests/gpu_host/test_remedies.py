"""Commands that install what a GPU needs, from pip or conda."""

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from fa_cupy.__main__ import main
from fa_cupy.core import arrays
from fa_cupy.gpu.driver import devices, nvrtc, remedies

PIP = "pip install 'fa_cupy[cuda13]', or 'fa_cupy[cuda12]' for a CUDA 12 driver"
ALL = "cuda-bindings cuda-nvrtc libcublas cuda-cudart-dev"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """What makes an environment of conda of packages, in which pip has installed wheels."""

    def make(*packages, wheels=(), conda=True):
        if conda:
            (tmp_path / "conda-meta").mkdir()
            (tmp_path / "conda-meta/history").touch()
        for package in packages:
            (tmp_path / f"conda-meta/{package}-13.0.1-py311h1234_0.json").write_text("{}")

        def distribution(name):
            if name not in wheels:
                raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        monkeypatch.setattr(remedies.metadata, "distribution", distribution)

    return make


@pytest.mark.parametrize(
    ("conda", "packages", "wheels", "want"),
    [
        (False, (), (), PIP),
        (False, (), ("cupy-cuda13x",), PIP),
        (True, ("python",), ("cupy-cuda12x",), PIP),  # of pip, in an environment of conda
        (True, ("python",), (), "conda install -c conda-forge cuda-bindings cuda-nvrtc cuda-ver"),
        (True, ("cupy", "cuda-nvrtc"), (), "conda install -c conda-forge cuda-bindings cuda-ver"),
        (True, ("cuda-bindings",), (), "conda install -c conda-forge cuda-nvrtc cuda-version=13,"),
        (
            True,
            ("cuda-nvrtc-dev", "cuda-bindings"),
            (),
            "conda install -c conda-forge cuda-nvrtc ",
        ),
    ],
)
def test_commands(environment, conda, packages, wheels, want):
    environment(*packages, wheels=wheels, conda=conda)
    assert remedies.command("NVRTC", "cuda-bindings").startswith(want)


@pytest.mark.parametrize(
    ("packages", "want"),
    [
        (("python",), [*remedies.PACKAGES]),
        (("cupy-core", "libcublas"), ["cuda-bindings", "NVRTC", "the headers of CUDA"]),
        (("cupy", *ALL.split()), []),
    ],
)
def test_what_conda_lacks(environment, packages, want):
    environment(*packages)
    assert remedies.missing_from_conda() == want


def test_errors_name_the_command_of_conda(environment, monkeypatch):
    environment("python")
    monkeypatch.setattr(devices, "import_cupy", lambda: (None, devices.ABSENT))
    with pytest.raises(ImportError, match="needs CuPy: conda install -c conda-forge 'cupy>=14'"):
        arrays._require_device("f: q is on CUDA device 0", 0)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc._library.cache_clear()
    with pytest.raises(ImportError, match="cuda-bindings: conda install -c conda-forge cuda-bind"):
        nvrtc.version()


@pytest.mark.parametrize(
    ("packages", "version", "cupy", "conda"),
    [
        ((), None, "not installed: CuPy arrays need it: conda install -c conda-forge 'cupy>=14'",
         f"lacks CuPy, cuda-bindings, NVRTC, cuBLAS, the headers of CUDA: conda install -c "
         f"conda-forge 'cupy>=14' {ALL} cuda-version=13"),
        (("cupy", *ALL.split()), "13.6.0", "13.6.0, want 14 or later: conda install", None),
        (("cupy", *ALL.split()), "14.0.0", "14.0.0\n", None),
        (("cupy-core", "cuda-bindings", "libcublas"), "14.0.0", "14.0.0\n",
         "lacks NVRTC, the headers of CUDA: conda install -c conda-forge cuda-nvrtc cuda-cudart-d"),
    ],
)  # fmt: skip
def test_info(environment, monkeypatch, capsys, packages, version, cupy, conda):
    environment("python", *packages)
    found = None if version is None else SimpleNamespace(__version__=version)
    why = devices.ABSENT if version is None else ""
    monkeypatch.setattr(devices, "import_cupy", lambda: (found, why))
    monkeypatch.setattr(devices, "look", lambda: devices.Found([], "no device"))
    monkeypatch.setattr("fa_cupy.cli.info._version", lambda *names: None)
    assert main(["info"]) == 0
    lines = capsys.readouterr().out
    assert f"\ncupy        {cupy}" in lines
    assert ("\nconda  " in lines) == (conda is not None)
    assert f"\nconda       {conda or ''}" in lines or conda is None
