"""The command line where its output, or its cache, cannot be written: one line at most."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa_cupy.gpu.kernels.forward import VARIANTS
from tests.support.every_run import only
from validation.digest import ROOT

COMMANDS = {
    "info": ["info"],
    "info of a call": ["info", "--shape", "4,16,4096,128", "--target", "sm_90a"],
    "emit --list": ["emit", "--list"],
    "help": ["--help"],
    "help of a command": ["warmup", "--help"],
    "version": ["--version"],
}
PTX = ["emit", "--ptx", VARIANTS[0].name, "--target", "sm_80"]
SIGPIPE = 141

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def run(arguments, tmp_path, *, buffered=True, **streams):
    """Run a command; return its status and what it wrote to standard error."""
    environment = {"PYTHONPATH": str(ROOT), "FA_CUPY_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"PYTHONUNBUFFERED": "" if buffered else "1"}
    environment = {**os.environ, **environment, **streams.pop("environment", {})}
    command = [sys.executable, "-m", "fa_cupy", *arguments]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | streams
    done = subprocess.run(command, env=environment, **streams)
    return done.returncode, (done.stderr or b"").decode()


@pytest.fixture
def unread():
    """A pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full():
    """A disk without space."""
    with open("/dev/full", "wb") as file:
        yield file


# Each command starts Python anew.
@pytest.mark.parametrize("name", only(COMMANDS, "info of a call", "help", "version"))
def test_output_that_is_not_read_to_its_end(name, tmp_path, unread):
    assert run(COMMANDS[name], tmp_path, stdout=unread) == (SIGPIPE, "")


@pytest.mark.parametrize("name", ["info", "emit --list"])
def test_nobody_reads_what_is_not_buffered(name, tmp_path, unread):
    assert run(COMMANDS[name], tmp_path, stdout=unread, buffered=False) == (SIGPIPE, "")


@pytest.mark.parametrize("name", only(COMMANDS, "info", "emit --list", "help of a command"))
def test_a_full_disk(name, tmp_path, full):
    status, error = run(COMMANDS[name], tmp_path, stdout=full)
    assert status == 1
    assert error == "fa_cupy: [Errno 28] No space left on device\n"


def test_neither_output_nor_errors_can_be_written(tmp_path, unread, full):
    for stream, status in ((unread, SIGPIPE), (full, 1)):
        assert run(["info"], tmp_path, stdout=stream, stderr=stream)[0] == status


def test_wrong_arguments_keep_their_status(tmp_path, unread, full):
    for stream in (unread, full):
        assert run(["nonsense"], tmp_path, stderr=stream)[0] == 2


def test_closed_streams(tmp_path):
    for streams in (">&-", "2>&-", ">&- 2>&-"):
        command = f'"{sys.executable}" -m fa_cupy info {streams}'
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.long
def test_ptx_that_cannot_be_written(tmp_path, unread, full):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    assert run(PTX, tmp_path, stdout=unread) == (SIGPIPE, "")
    status, error = run(PTX, tmp_path, stdout=full)
    assert status == 1
    assert error == "emit: [Errno 28] No space left on device\n"
    assert run([*PTX, "-o", "/dev/full"], tmp_path) == (1, error)


def test_the_demo(tmp_path, unread, full):
    pytest.importorskip("matplotlib")
    demo = ["demo", "--device", "cpu", "--size", "8", "-o", str(tmp_path / "demo.png")]
    assert run(demo, tmp_path, stdout=unread)[0] == SIGPIPE
    status, error = run(demo, tmp_path, stdout=full)
    assert status == 1
    assert error.splitlines()[-1] == "demo: [Errno 28] No space left on device"
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "folder", only(["~nosuchuser/x", "/dev/null", "/dev/null/x"], "/dev/null/x")
)
def test_a_cache_that_cannot_be(tmp_path, folder):
    environment = {"FA_CUPY_CACHE_DIR": folder}
    assert run(["info"], tmp_path, environment=environment) == (0, "")
    command = ["warmup", "--target", "sm_80", "--dtype", "fp16", "--head-dim", "64"]
    status, error = run(command, tmp_path, environment=environment)
    assert status == 1
    assert error.startswith("warmup: ")
    assert error.count("\n") == 1
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    assert run(PTX, tmp_path, environment=environment) == (0, "")


@pytest.mark.long
def test_warmup_on_a_disk_that_takes_nothing(tmp_path):
    """What it compiled would be lost: it does not say that all of it is there."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    (tmp_path / "cache").mkdir(mode=0o700)
    code = (
        "import os\ndef full(*_): raise OSError(28, 'No space left on device')\nos.fsync = full\n"
    )
    (tmp_path / "sitecustomize.py").write_text(code)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = ["warmup", "--target", "sm_80", "--dtype", "fp32", "--head-dim", "64"]
    status, error = run(command, tmp_path, environment=environment)
    assert status == 1
    last = error.splitlines()[-1]
    assert last.startswith("warmup: kernel cache: ")
    assert "could not be kept" in last
    assert "Traceback" not in error


@pytest.mark.parametrize(("encoding", "name"), [("ascii", b"\xc3\xa9"), ("utf-8", b"\xff")])
def test_a_path_that_the_encoding_does_not_hold_is_escaped(tmp_path, encoding, name):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    given = {"FA_CUPY_CACHE_DIR": folder, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    with open(tmp_path / "out", "wb") as out:
        assert run(["info"], tmp_path, stdout=out, environment=given) == (0, "")
    assert b"\\x" in (tmp_path / "out").read_bytes() or b"\\udc" in (tmp_path / "out").read_bytes()
