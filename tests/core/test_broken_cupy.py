"""A CuPy that is no CuPy counts as absent, and `info` says what is wrong with it."""

import importlib
import importlib.util
import sys

import numpy as np
import pytest

from fa_cupy import BitMask, attention, attention_backward, causal_product, merge_attention
from fa_cupy.__main__ import main
from fa_cupy.core import arrays
from fa_cupy.gpu.driver import cubin_cache, devices

INSTALLED = importlib.util.find_spec("cupy") is not None
#: What stands in ``cupy/__init__.py``, where None there is none, and what `info` says of it.
BROKEN = {
    "a folder that was left behind": (None, "cupy has no cupy.ndarray"),
    "an empty module": ("", "__init__.py has no cupy.ndarray"),
    "no cuda": ("class ndarray: pass", "__init__.py has no cupy.cuda"),
    "RuntimeError": ("raise RuntimeError('bad\\nversion')", "RuntimeError: bad version"),
    "OSError": ("raise OSError('libcudart.so.13: no file')", "OSError: libcudart.so.13: no file"),
    "ImportError": ("raise ImportError('no library')", "ImportError: no library"),
    "a missing part": ("import cupy_backends_", "ModuleNotFoundError: No module named 'cupy_b"),
    "SyntaxError": ("def", "SyntaxError: "),
    "its own error": ("class E(Exception): pass\nraise E('x')", "E: x"),
    "exit": ("import sys\nsys.exit('no GPU')", "SystemExit: no GPU"),
    "attributes that raise": (
        "def __getattr__(name): raise RuntimeError('no ' + name)",
        "RuntimeError: no ",
    ),
    "devices that raise": (
        "class ndarray: pass\nclass cuda:\n  def is_available(): raise RuntimeError('cudaError')",
        "RuntimeError: cudaError",
    ),
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Have `import cupy` find what a test puts there."""
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)

    def put(text):
        (tmp_path / "site/cupy").mkdir(parents=True)
        if text is not None:
            (tmp_path / "site/cupy/__init__.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "site")
        importlib.invalidate_caches()

    yield put
    sys.modules.pop("cupy", None)


@pytest.fixture(params=BROKEN)
def why(request, install):
    """A broken CuPy; what `info` says of it."""
    text, why = BROKEN[request.param]
    if text is None and INSTALLED:
        pytest.skip("CuPy is installed, and goes before a folder")
    install(text)
    return why


def test_info_says_what_is_wrong(why, capsys):
    assert main(["info", "--shape", "2,8,64"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("device")]
    assert "none (CuPy cannot be used: " in line
    assert why in line
    assert "NumPy arrays only" in line
    if why != BROKEN["devices that raise"][1]:
        (line,) = [line for line in shown.splitlines() if line.startswith("cupy")]
        assert "CuPy cannot be used: " in line
        assert why in line


def test_commands_do_without_it(why, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["warmup"]) == 1
    assert "there is no GPU, want a target" in capsys.readouterr().err
    assert main(["demo", "--device", "gpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("demo: --device gpu: CuPy cannot be used: ")
    assert why in error
    assert error.count("\n") == 1
    picture = tmp_path / "demo.png"
    assert main(["demo", "--size", "8", "-o", str(picture)]) == 0
    assert picture.exists()


def test_arrays_of_other_libraries_are_taken(why):
    """Their arrays are held against CuPy's, which is looked for among what has been imported."""
    xp = pytest.importorskip("array_api_strict")
    devices.import_cupy()  # as any other part of a program may have done
    rng = np.random.default_rng(0)
    q, k, v = (xp.asarray(rng.random((5, 8), np.float32)) for _ in range(3))
    out, lse = attention(q, k, v, return_lse=True)
    assert type(out) is type(q)
    assert type(attention_backward(out, q, k, v, out, lse)[0]) is type(q)
    assert type(causal_product(q, k, v)) is type(q)
    assert type(merge_attention([out], [lse])[0]) is type(q)
    assert BitMask.from_dense(xp.asarray(np.ones((3, 5), bool))).shape == (3, 5)
    with pytest.raises(TypeError, match=r"^attention: q is a list, want an array"):
        attention([1.0], k, v)


def test_what_needs_it_says_what_is_wrong(why):
    if why == BROKEN["devices that raise"][1]:
        return
    with pytest.raises(ImportError, match=r"^f: q is on CUDA device 0, which needs CuPy") as caught:
        arrays._require_device("f: q is on CUDA device 0", 0)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(INSTALLED, reason="CuPy is installed")
def test_one_that_is_not_installed(install, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert devices.import_cupy() == (None, devices.ABSENT)
    assert main(["info"]) == 0
    assert "not installed: CuPy arrays need it: pip install 'fa_cupy[" in capsys.readouterr().out


def test_an_interrupt_passes(install):
    install("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        main(["info"])
