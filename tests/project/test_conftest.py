"""What the tests' own settings promise."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from fa_cupy.gpu.driver.compile import ROOT

UNEQUAL = """
import numpy as np, pytest
def test_unequal():
    x, y = np.random.default_rng(0).integers(0, 256, (2, 100_000), np.uint8)
    with pytest.raises(AssertionError):
        assert x.tobytes() == y.tobytes()
"""


def test_arrays_that_differ_are_not_written_out_where_ci_is_set(tmp_path):
    (tmp_path / "test_it.py").write_text(UNEQUAL)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, env=os.environ | {"CI": "true"},
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_compiler_what_runs_kernels_is_skipped(tmp_path):
    """A newcomer's machine: a line says what is missing, and nothing fails."""
    files = ["mask/test_block_tables.py", "attention/test_large_scores.py"]
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/{name}" for name in files]
    env = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = subprocess.run(command, cwd=ROOT, env=env | {"PATH": str(tmp_path)},
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SKIPPED"))
    assert line.endswith(": there is no g++: kernels cannot run on the CPU")
    assert re.search(r"= \d+ skipped in ", done.stdout.splitlines()[-1])


CASES = """
import pytest
@pytest.mark.emulator
@pytest.mark.parametrize("n", range(5))
def test_kernel(n): pass
@pytest.mark.parametrize("n", range(5))
def test_other(n): pass
"""


@pytest.mark.parametrize(("profile", "count"), [("quick", 6), ("ci", 10)])
def test_one_case_of_each_test_of_kernels_is_always_run(tmp_path, profile, count):
    (tmp_path / "test_it.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  emulator\n  gpu\n  long\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), "-q", "--collect-only", "-m", "not long"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"FA_CUPY_HYPOTHESIS_PROFILE": profile}, timeout=60,
                          check=True)  # fmt: skip
    assert sum("::" in line for line in done.stdout.splitlines()) == count


def test_the_folder_of_gpu_tests_sets_their_mark(tmp_path):
    """And that of no other test; the mark is there before tests are chosen by it."""
    for name in ("gpu/deep/test_deep", "gpu/test_gpu", "cpu/test_cpu"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_it(): pass\n")
    shutil.copy(ROOT / "tests/gpu/conftest.py", tmp_path / "gpu")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = {}
    for chosen in ("gpu", "not gpu"):
        done = subprocess.run([*command, "-m", chosen], cwd=tmp_path, capture_output=True,
                              text=True, timeout=60, check=True)  # fmt: skip
        found[chosen] = {line for line in done.stdout.splitlines() if "::" in line}
    assert found["gpu"] == {"gpu/deep/test_deep.py::test_it", "gpu/test_gpu.py::test_it"}
    assert found["not gpu"] == {"cpu/test_cpu.py::test_it"}
