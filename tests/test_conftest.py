"""What the tests' own settings promise."""

import os
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
