"""The compiler without a GPU, and what it keeps on disk."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest

from fa_cupy.gpu.driver import compile, cubin_cache, nvrtc
from validation.digest import ROOT

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

SOURCE = b"""
#include "ptx/store.cuh"
extern "C" __global__ void kernel(int* out) { out[threadIdx.x] = FA_VALUE + stored(); }
"""
HEADERS = {
    "ptx/store.cuh": '#include "cuda_src/common/value.cuh"\n',
    "cuda_src/common/value.cuh": "static __device__ int stored() { return 1; }\n",
    "ptx/other.cuh": "#error not included\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A project of three headers."""
    for name, text in HEADERS.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(compile, "ROOT", tmp_path / "root")
    return tmp_path / "root"


def build(source=SOURCE, target="sm_80", value=1):
    return compile.compile_source("test", source, target, [("FA_VALUE", value)])


def test_a_second_compilation_comes_from_the_disk(folder):
    first, second = build(), build()
    assert not first.cached
    assert second.cached
    assert first.cubin[:4] == b"\x7fELF"
    assert second[:3] == first[:3]
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


def test_the_folder_is_the_users_alone(folder):
    build()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"source": SOURCE + b" "},
        {"target": "sm_90a"},
        {"value": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_covers_what_the_caller_gives(change):
    build()
    assert not build(**change).cached


@pytest.mark.parametrize("name", ["ptx/store.cuh", "cuda_src/common/value.cuh"])
def test_the_key_covers_headers_included_directly_or_not(root, name):
    first = build()
    (root / name).write_text(HEADERS[name] + "static __device__ int unused;\n")
    assert not build().cached
    (root / name).write_text(HEADERS[name])
    assert build() == (*first[:3], True)


def test_the_key_leaves_other_headers_out(root):
    build()
    (root / "ptx/other.cuh").write_text("#error still not included\n")
    assert build().cached


def test_the_key_covers_compiler_and_options(monkeypatch):
    build()
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    assert not build().cached
    monkeypatch.undo()


def test_a_header_that_is_not_there_is_named(root):
    (root / "cuda_src/common/value.cuh").unlink()
    with pytest.raises(nvrtc.CompileError, match=r"ptx/store\.cuh.*\n?.*value\.cuh"):
        build()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: data + b"\0",
        lambda data: data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:],
        lambda data: b"\x7fELF" + data[4:],
    ],
    ids=["empty", "short", "head only", "long", "one bit", "no cubin of ours"],
)
def test_a_damaged_file_is_a_miss_and_is_written_again(folder, damage):
    first = build()
    (path,) = folder.iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    again = build()
    assert not again.cached
    assert again.cubin == first.cubin
    assert build().cached
    assert len(list(folder.iterdir())) == 1


def test_a_file_that_cannot_be_read_is_a_miss(folder, monkeypatch):
    build()
    (path,) = folder.iterdir()

    readable = Path.read_bytes

    def refuse(self):
        if self == path:
            raise PermissionError(13, "Permission denied")
        return readable(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        assert not build().cached
    assert build().cached
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="test could not be kept"):
        assert not build().cached


def test_a_file_under_the_wrong_key_is_a_miss(folder):
    build(value=1)
    (first,) = folder.iterdir()
    build(value=2)
    (second,) = set(folder.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert not build(value=2).cached


def test_processes_that_compile_the_same_kernel_do_no_harm(folder, root):
    code = (
        "import sys, pathlib, time\n"
        "from fa_cupy.gpu.driver import compile\n"
        "compile.ROOT = pathlib.Path(sys.argv[1])\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        f"done = compile.compile_source('test', {SOURCE!r}, 'sm_80', [('FA_VALUE', 1)])\n"
        "sys.stdout.buffer.write(done.cubin)\n"
    )
    start = str(time.time() + 1.0)
    command = [sys.executable, "-c", code, str(root), start]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    results = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 4, results
    assert len({cubin for cubin, _ in results}) == 1
    assert len(list(folder.iterdir())) == 1
    assert build().cached


def compiles_without(why):
    """Compile twice without a cache; the first time only, one warning of one line says why."""
    with pytest.warns(UserWarning, match=why) as caught:
        first, second = build(), build()
    (warning,) = caught
    assert "\n" not in str(warning.message)
    assert str(warning.message).startswith("kernel cache: ")
    assert first.cubin == second.cubin
    assert first.cubin[:4] == b"\x7fELF"
    assert not first.cached
    assert not second.cached


def test_a_folder_of_somebody_else_is_refused(folder, monkeypatch):
    build()
    (path,) = folder.iterdir()
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    compiles_without(r"each process \(.*belongs to user \d+, want \d+")
    with pytest.raises(PermissionError, match=r"belongs to user \d+, want \d+"):
        cubin_cache.cache_dir()
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_write_to_is_refused(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    compiles_without(f"has mode {mode:o}, want 700")
    assert not list(folder.iterdir())


def test_a_squatted_folder_costs_time_only(tmp_path, monkeypatch):
    """No home, and among the temporary files somebody else has made a folder of that name."""
    monkeypatch.delenv(cubin_cache.FOLDER_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    squatted = tmp_path / f"fa_cupy-{os.geteuid()}"
    squatted.mkdir(mode=0o777)
    squatted.chmod(0o777)
    compiles_without("has mode 777, want 700")
    assert not list(squatted.iterdir())
    squatted.rmdir()
    squatted.symlink_to("nowhere")
    compiles_without("File exists")


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("file", "File exists"),
        ("file/below", "Not a directory"),
        ("/proc/none", "No such file or directory|Operation not permitted|Read-only"),
        ("/dev/full/x", "Not a directory"),
        ("~nosuchuser/x", "FA_CUPY_CACHE_DIR is '~nosuchuser/x': "),
    ],
)
def test_a_name_that_is_no_folder_costs_time_only(tmp_path, monkeypatch, named, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, named)
    monkeypatch.setattr(cubin_cache, "_warned", set())
    compiles_without(why)
    assert (tmp_path / "file").read_text() == "kept"
    assert set(os.listdir(tmp_path)) == {"file", "root"}


def test_a_folder_that_takes_no_files_costs_time_only(folder, monkeypatch):
    """Each kernel would have a name of its own in the system's message."""
    build()

    def refuse(dir, **names):
        raise PermissionError(errno.EACCES, "Permission denied", f"{dir}/{os.urandom(4).hex()}")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.warns(UserWarning, match=f"test could not be kept in {folder}") as caught:
        assert not any(build(value=value).cached for value in (2, 3, 4))
    assert len(caught) == 1


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"no JSON",
        b"{",
        b"\xff\xfe",
        b"null",
        b"[1, 2]",
        b"{}",
        b'{"key": 1}',
        b'{"key": KEY, "log": "", "seconds": null}',
        b'{"key": KEY, "log": "", "seconds": "soon"}',
        b"[" * 100_000,
    ],
)
def test_a_sound_digest_over_a_head_that_is_none_is_a_miss(folder, head):
    first = build()
    (path,) = folder.iterdir()
    data = path.read_bytes()
    payload = data[len(cubin_cache._MAGIC) + cubin_cache._DIGEST_BYTES :]
    key = json.loads(payload.partition(b"\n")[0])["key"]
    payload = head.replace(b"KEY", json.dumps(key).encode()) + b"\n" + first.cubin
    path.write_bytes(cubin_cache._MAGIC + hashlib.sha256(payload).digest() + payload)
    again = build()
    assert not again.cached
    assert again.cubin == first.cubin
    assert build().cached


@pytest.mark.parametrize("where", ["os.fsync", "pathlib.Path.read_bytes"])
def test_a_time_out_of_a_signal_handler_passes(root, where):
    build()
    with mock.patch(where, side_effect=TimeoutError("too slow")), pytest.raises(TimeoutError):
        build(value=2)


def test_the_folder_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv(cubin_cache.FOLDER_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cubin_cache.cache_dir() == tmp_path / "xdg/fa_cupy"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cubin_cache.cache_dir() == tmp_path / "home/.cache/fa_cupy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cubin_cache.cache_dir() == tmp_path / "home/.cache/fa_cupy"


def test_a_home_that_cannot_be_used_leaves_the_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.delenv(cubin_cache.FOLDER_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file/home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cubin_cache.cache_dir() == tmp_path / f"fa_cupy-{os.geteuid()}"
    assert stat.S_IMODE(cubin_cache.cache_dir().stat().st_mode) == 0o700


def test_a_disk_that_takes_nothing_costs_a_warning_only(monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="test could not be kept in .* .No space left"):
        assert build().cubin[:4] == b"\x7fELF"
    monkeypatch.undo()


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build()
    assert not list(folder.iterdir())


def test_sources_are_kept_on_demand(folder, monkeypatch):
    build()
    monkeypatch.setenv(compile.KEEP_VARIABLE, "1")
    assert not build().cached
    (kept,) = folder.glob("*.sources")
    files = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    assert files == {"kernel.cu", "nvrtc.log", "ptx/store.cuh", "cuda_src/common/value.cuh"}
    assert "-DFA_VALUE=1" in (kept / "nvrtc.log").read_text()


def test_an_error_shows_log_name_target_and_defines(folder):
    with pytest.raises(nvrtc.CompileError) as caught:
        compile.compile_source(
            "broken", b"\n\nint x = wrong;", "sm_80", [("FA_VALUE", 7)], "a/b.cu"
        )
    message = str(caught.value)
    assert 'a/b.cu(3): error: identifier "wrong" is undefined' in message
    for part in ("broken", "sm_80", "-DFA_VALUE=7", "NVRTC_ERROR_COMPILATION"):
        assert part in message
    assert not list(folder.iterdir())


def test_an_unknown_target_is_an_error():
    with pytest.raises(nvrtc.CompileError, match="sm_1"):
        build(target="sm_1")


@pytest.mark.parametrize("module", ["cuda", "cuda.bindings", "cuda.bindings.nvrtc"])
def test_a_missing_compiler_says_how_to_install_it(monkeypatch, module):
    for name in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    nvrtc._library.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'fa_cupy\[cuda13\]'") as caught:
        build()
    assert "\n" not in str(caught.value)


def test_resource_report_reads_ptxas():
    log = """ptxas info    : Function properties for k
ptxas         .     32 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Function properties for helper
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    report = compile.resource_report(log)
    assert report[:5] == (255, 32, 44, 40, 1024)
    (note,) = report.notes
    assert "C7510" in note
    assert compile.resource_report("") == (0, 0, 0, 0, 0, ())


def test_resource_report_reads_what_this_compiler_writes():
    source = b"""extern "C" __global__ void k(int* out, int at) {
      __shared__ int table[256];
      table[threadIdx.x] = out[threadIdx.x];
      __syncthreads();
      out[threadIdx.x] = table[at];
    }"""
    report = compile.resource_report(compile.compile_source("smem", source, "sm_90a").log)
    assert report.static_shared == 1024
    assert 4 <= report.registers <= 32
    assert report[1:4] == (0, 0, 0)
