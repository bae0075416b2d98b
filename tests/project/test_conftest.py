"""What the tests' own settings promise."""

import os
import re
import subprocess
import sys

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
