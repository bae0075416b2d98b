"""The digest of the GPU path and the receipt that vouches for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from validation import receipt
from validation.digest import ROOT, c_tokens, digest, fingerprint, fingerprints, gpu_tests

KERNEL = """// A kernel.
#define FA_TILE(x) ((x) * 2)
extern "C" __global__ void f(float* out) { /* one */ out[0] = 1.0f; }
"""
MODULE = '''"""A module."""
import math

def f(x, *, scale=None):
    """Do it."""
    return f"{x!r:>{8}} is {math.pi:.3f}" if scale else -1.5e-3  # why
'''
PTX = ".version 8.0\n.reg .b32 %r<4>; // registers\nadd.s32 %r1, %r2, -1;\n"


def save(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def tree(tmp_path):
    """A repository in small."""
    save(tmp_path / "cuda_src/attention/fwd.cu", KERNEL)
    save(tmp_path / "ptx/pack.ptx", PTX)
    save(tmp_path / "fa_cupy/gpu/driver/launch.py", MODULE)
    save(tmp_path / "fa_cupy/cpu/attention.py", MODULE)
    save(tmp_path / "fa_cupy/plot.py", MODULE)
    save(tmp_path / "tests/conftest.py", "import pytest\n")
    save(tmp_path / "tests/test_gpu.py", "import pytest\npytestmark = pytest.mark.gpu\n")
    save(tmp_path / "tests/test_cpu.py", "def test_nothing(): pass\n")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("cuda_src/attention/fwd.cu", "// A kernel.", "// The kernel.\n\n"),
        ("cuda_src/attention/fwd.cu", "/* one */ ", ""),
        ("cuda_src/attention/fwd.cu", "{ /* one */ out[0] = 1.0f; }", "{\n  out [0]=1.0f ;\n}\n"),
        ("cuda_src/attention/fwd.cu", "((x) * 2)", "\\\n  ((x) * 2)"),
        ("cuda_src/attention/fwd.cu", "\n", "\r\n"),
        ("ptx/pack.ptx", " // registers", "\n\n/* registers */"),
        ("fa_cupy/gpu/driver/launch.py", "  # why", ""),
        ("fa_cupy/gpu/driver/launch.py", '    """Do it."""\n', ""),
        ("fa_cupy/gpu/driver/launch.py", "A module.", "The module."),
        (
            "fa_cupy/gpu/driver/launch.py",
            "(x, *, scale=None)",
            "(\n    x,\n    *,\n    scale=None,\n)",
        ),
        ("fa_cupy/cpu/attention.py", "-1.5e-3", "2"),
        ("fa_cupy/plot.py", "-1.5e-3", "2"),
        ("tests/test_cpu.py", "pass", "assert 1"),
    ],
)
def test_digest_ignores(tree, path, old, new):
    before = fingerprints(tree)
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_bytes(text.replace(old, new).encode())
    assert fingerprints(tree) == before


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("cuda_src/attention/fwd.cu", "1.0f", "1.5f"),
        ("cuda_src/attention/fwd.cu", "FA_TILE(x) (", "FA_TILE (x) ("),
        ("cuda_src/attention/fwd.cu", "* 2)\nextern", "* 2) extern"),
        ("ptx/pack.ptx", "-1", "-2"),
        ("fa_cupy/gpu/driver/launch.py", "-1.5e-3", "-1.5e-4"),
        ("fa_cupy/gpu/driver/launch.py", " is ", " was "),
        ("fa_cupy/gpu/driver/launch.py", "scale=None", "scale=0"),
        ("fa_cupy/gpu/driver/launch.py", "*, ", ""),
        ("tests/test_gpu.py", "pytestmark =", "skipped = False\npytestmark ="),
        ("tests/conftest.py", "import pytest", "import pytest, numpy"),
    ],
)
def test_digest_sees(tree, path, old, new):
    before = fingerprints(tree)
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new))
    after = fingerprints(tree)
    assert receipt.changes(before, after) == [f"changed since: {path}"]
    assert digest(after) != digest(before)


def test_digest_sees_files_come_and_go(tree):
    before = fingerprints(tree)
    (tree / "ptx/pack.ptx").rename(tree / "ptx/mask.ptx")
    save(tree / "fa_cupy/gpu/__pycache__/launch.cpython-311.pyc", "")
    save(tree / "ptx/.mask.ptx.swp", "")
    assert receipt.changes(before, fingerprints(tree)) == [
        "new since: ptx/mask.ptx",
        "gone since: ptx/pack.ptx",
    ]


def test_digest_is_the_same_in_every_python_version(tmp_path):
    """The value was made with Python 3.10 to 3.13; a syntax tree's own dump differs there."""
    source = MODULE + "class A(dict): x: int = 0\nasync def g(*a: int): return {**a, 'é': None}\n"
    assert fingerprint(save(tmp_path / "a.py", source)) == "c72eeda21714f226"


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ('"a // b" // c', ['"a // b"']),
        ('R"x(a " /* b)x" /* c */', ['R"x(a " /* b)x"']),
        ("'\"' // c", ["'\"'"]),
        ("1'000 + 0x1e-3f", ["1'000", "+", "0x1e-3f"]),
        ("a+ ++b >> c", ["a", "+", "++", "b", ">>", "c"]),
        ("%r1, %p;", ["%", "r1", ",", "%", "p", ";"]),
        ("f<<<1, 2>>>(x)", ["f", "<<<", "1", ",", "2", ">>>", "(", "x", ")"]),
        ("#if A \\\n && B // c\nx", ["\n", "#", "if", "A", "&&", "B", "\n", "x"]),
    ],
)
def test_c_tokens(source, tokens):
    assert c_tokens(source) == tokens


def test_gpu_tests_are_found(tmp_path):
    fixture = "@pytest.fixture(params=['numpy', pytest.param('cupy', marks=pytest.mark.gpu)])\n"
    sources = {
        "conftest": f"import pytest\n{fixture}def xp(request): return request.param\n",
        "strategies": "import helpers\n",
        "helpers": "",
        "arrays": "import pytest\nBOTH = [pytest.param(0, marks=pytest.mark.gpu)]\n",
        "test_fixture": "def test_it(xp): pass\n",
        "test_own_fixture": "import numpy\n@pytest.fixture\ndef xp(): return numpy\n"
        "def test_it(xp): pass\n",
        "test_shared": "from tests.arrays import BOTH\n",
        "test_marked": "import pytest\nfrom .strategies import problems\n@pytest.mark.gpu\n"
        "def test_it(): pass\n",
        "test_text": "NAME = 'pytest.mark.gpu'\nfrom hypothesis import strategies\n",
        "test_cpu": "from fa_cupy import reference\n@pytest.mark.slow\ndef test(): 0\n",
        "reference": "",
    }
    for name, source in sources.items():
        save(tmp_path / f"tests/{name}.py", source)
    found = {"conftest", "strategies", "helpers", "arrays", "test_fixture", "test_shared"}
    assert gpu_tests(tmp_path) == {f"tests/{name}.py" for name in found | {"test_marked"}}


FILES = {"ptx/mma.cuh": "0123"}


def a_run(**tests):
    run = {
        "date": "2026-01-02T03:04:05+00:00",
        "digest": digest(FILES),
        "files": FILES,
        "environment": {"device": "NVIDIA H200", "nvrtc": "13.0"},
        "tests": {
            "passed": {"tests/test_gpu.py::test_it": 3},
            "failed": [],
            "skipped": {"tests/test_gpu.py::test_two": "needs two devices"},
            "hypothesis": {"tests/test_gpu.py::test_it": 2000},
            "left_out": 0,
            "whole": True,
            **tests,
        },
        "sanitizer": {"tools": {"memcheck": {"ran": True, "errors": 0}}},
    }
    return run


def sealed(run):
    return {"run": run, "seal": receipt._seal(run)}


def test_receipt_of_this_tree_is_accepted(tmp_path, capsys):
    path = save(tmp_path / "receipt.json", json.dumps(sealed(a_run())))
    assert receipt.check(path, FILES, strict=True) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H200" in said
    assert "3 tests passed, 1 skipped, 2000 hypothesis examples; memcheck clean" in said


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"failed": ["tests/test_gpu.py::test_bad"]}, "failed: tests/test_gpu.py::test_bad"),
        ({"passed": {}}, "no GPU test passed"),
        ({"left_out": 4}, "4 GPU tests were left out by options"),
        ({"whole": False}, "the run was cut short, or covered only part of tests/"),
    ],
)
def test_a_run_that_is_no_pass_is_refused(tests, why):
    assert receipt.problems(sealed(a_run(**tests)), FILES) == [why]


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ({"memcheck": {"ran": True, "errors": 2}}, ["memcheck: 2 errors"]),
        ({"racecheck": {"ran": True}}, ["racecheck: None errors"]),
        ({"memcheck": {"ran": False, "why": "device not supported"}}, []),
        ({}, ["no sanitizer reported"]),
    ],
)
def test_sanitizer_findings_are_refused(tools, why):
    assert receipt.problems(sealed(a_run() | {"sanitizer": {"tools": tools}}), FILES) == why


def test_edited_stale_and_missing_receipts_are_refused(tmp_path, capsys):
    edited = sealed(a_run(failed=["tests/test_gpu.py::test_bad"]))
    edited["run"]["tests"]["failed"] = []
    cases = {
        json.dumps(edited): "edited by hand",
        json.dumps(sealed(a_run() | {"files": {"ptx/mma.cuh": "4567"}})): "changed since: ptx/mma",
        json.dumps({}): "no receipt",
        "{": "no receipt",
    }
    for text, why in cases.items():
        path = save(tmp_path / "receipt.json", text)
        assert receipt.check(path, FILES, strict=True) == 1
        assert "ERROR" in capsys.readouterr().out
        assert receipt.check(path, FILES, strict=False) == 0
        said = capsys.readouterr().out
        assert "WARNING" in said
        assert why in said
    assert receipt.check(tmp_path / "none.json", FILES, strict=True) == 1


def test_pending_mark_passes_loudly_and_the_next_run_clears_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "results/receipt.json"
    with pytest.raises(SystemExit):
        receipt.mark_pending(path, " ")
    assert not path.exists()
    receipt.mark_pending(path, "no GPU could be had")
    assert receipt.check(path, FILES, strict=True) == 0
    said = capsys.readouterr().out
    assert "NO GPU HAS SEEN THIS TREE" in said
    assert "no GPU could be had" in said

    prints = {"tests/test_gpu.py": "0123"}
    tests = a_run()["tests"] | {"files": prints}
    save(tmp_path / "run/tests.json", json.dumps(tests))
    save(tmp_path / "run/sanitizer.json", json.dumps(a_run()["sanitizer"]))
    monkeypatch.setattr(receipt, "environment", a_run()["environment"].copy)
    monkeypatch.setattr(receipt, "fingerprints", prints.copy)
    assert receipt.main(["write", str(tmp_path / "run"), str(path)]) == 0
    assert receipt.check(path, prints, strict=True) == 0
    assert "current" in capsys.readouterr().out
    assert digest(prints) == json.loads(path.read_text())["run"]["digest"]

    receipt.mark_pending(path, "kernel changed")
    assert receipt.problems(json.loads(path.read_text()), prints) == []


def test_write_refuses_tests_that_the_digest_does_not_see(tmp_path, monkeypatch):
    save(tmp_path / "tests.json", json.dumps({"passed": {"tests/nowhere.py::test_it": 1}}))
    monkeypatch.setattr(receipt, "environment", dict)
    with pytest.raises(SystemExit, match=r"tests/nowhere\.py"):
        receipt.write(tmp_path, tmp_path / "receipt.json")


CHECKS = """
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
@settings(max_examples=7, database=None)
@given(x=st.integers())
def test_good(n, x): pass

@pytest.mark.gpu
def test_bad(): assert 0

@pytest.mark.gpu
def test_away(): pytest.skip("one device")

@pytest.fixture
def broken(): raise ValueError

@pytest.mark.gpu
def test_broken(broken): pass

def test_cpu(): pass
"""


@pytest.mark.parametrize(
    "options", [[], ["-p", "xdist.plugin", "-n", "2"], ["-k", "good"]], ids=" ".join
)
def test_plugin_records_a_run(tmp_path, options):
    save(tmp_path / "pytest.ini", "[pytest]\ntestpaths = checks\nmarkers = gpu\n")
    save(tmp_path / "checks/test_gpu.py", CHECKS)
    save(tmp_path / "checks/test_away.py", "import pytest\npytest.importorskip('no_such_module')\n")
    out = tmp_path / "tests.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    command += [
        "-p",
        "_hypothesis_pytestplugin",
        "-p",
        "tests.receipt_plugin",
        "--receipt",
        str(out),
    ]
    command += options
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    record = json.loads(out.read_text())
    partial = "-k" in options
    where = "checks/test_gpu.py::"
    assert record["passed"] == {where + "test_good": 2}
    assert record["hypothesis"] == {where + "test_good": 14}
    assert record["whole"]
    assert record["left_out"] == (3 if partial else 0)
    assert record["files"] == fingerprints()
    if not partial:
        assert record["failed"] == [where + "test_bad", where + "test_broken (setup)"]
        assert list(record["skipped"]) == ["checks/test_away.py", where + "test_away"]
        assert "one device" in record["skipped"][where + "test_away"]


def test_commands(capsys):
    assert receipt.main(["digest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == digest(fingerprints())
    assert any(line.endswith("fa_cupy/cli/cuda_extra.py") for line in lines)
    assert not any("fa_cupy/cpu/" in line for line in lines)
    assert Path(receipt.RECEIPT).parts[0] == "validation"
