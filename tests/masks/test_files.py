"""Masks in files: hostile archives take no memory, and a mask that stood there is not lost."""

import contextlib
import errno
import io
import os
import stat
import subprocess
import sys
import tracemalloc
import zipfile
from unittest import mock

import numpy as np
import pytest

from fa_cupy import BitMask
from fa_cupy.masks import archive as masks_archive
from validation.digest import ROOT

MASK = BitMask.from_dense(np.tri(300, dtype=bool))
OTHER = BitMask.from_dense(np.tri(90, 80, dtype=bool))


def members(mask=MASK):
    mask.save(file := io.BytesIO())
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def array(shape, dtype, value=0):
    np.save(file := io.BytesIO(), np.full(shape, value, dtype))
    return file.getvalue()


def packed(contents, compression=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    file.seek(0)
    return file


def refused(file, match="is not the file of a mask"):
    """Load what must be refused; return the most memory that this took at one time."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"^BitMask\.load: .*{match}"):
            BitMask.load(file)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BLOCKS = 20_000  # of 2 KB: 40 MB, in an archive of 40 KB
BOMBS = {
    "words of blocks that are not listed": {"words.npy": array((BLOCKS, 8, 32, 2), np.uint32)},
    "blocks that the lengths do not have": {
        "words.npy": array((BLOCKS, 8, 32, 2), np.uint32),
        "partial.npy": array(BLOCKS, np.int32),
    },
    "rows that the lengths do not have": {
        "partial_begin.npy": array(5_000_001, np.int64),
        "full_begin.npy": array(5_000_001, np.int64),
    },
    "full blocks that the lengths do not have": {"full.npy": array(10_000_000, np.int32)},
    "lengths of too many axes": {"lengths.npy": array(5_000_000, np.int64, 300)},
    "a member that is no field": {"more.npy": array(5_000_000, np.int64)},
    "a member of no kind": {"readme": bytes(40_000_000)},
}


@pytest.mark.parametrize("change", BOMBS.values(), ids=BOMBS)
def test_a_small_file_takes_little_memory(change):
    file = packed(members() | change)
    assert len(file.getvalue()) < 150_000
    assert refused(file) < 4_000_000


def test_a_batch_of_one_mask_many_times_takes_no_more_than_its_file_allows(monkeypatch):
    """Entries may be as many as one likes, so that here the size of the file decides."""
    entries = {"entries.npy": array(4_000_000, np.int64)}
    file = packed(members() | entries)
    assert BitMask.load(file).shape == (4_000_000, 300, 300)
    monkeypatch.setattr(masks_archive, "_ALWAYS_FREE", 1_000_000)
    file.seek(0)
    assert refused(file, "bytes from an archive of") < 1_000_000
    plain = packed(members() | entries, zipfile.ZIP_STORED)
    assert BitMask.load(plain).shape == (4_000_000, 300, 300)


def test_what_was_compressed_is_read():
    assert BitMask.load(packed(members())).equals(MASK)


@pytest.mark.parametrize(
    "head",
    [
        b"\x93NUMPY\x01\x00\xff\xff",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x02\x00\x00\x00\x00\x7f",
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '|O', 'fortran_order': False, 'shape': (), }",
        b"",
    ],
    ids=["long", "short", "version 2", "objects", "empty"],
)
@pytest.mark.parametrize("name", ["words", "entries", "format"])
def test_headers_that_are_none(head, name):
    refused(packed(members() | {f"{name}.npy": head + bytes(40)}), "no header of an array")


@pytest.mark.parametrize("more", [b"", b"\0" * 8], ids=["less", "more"])
def test_a_member_is_as_long_as_its_header_says(more):
    good = members()
    cut = good["words.npy"] + more if more else good["words.npy"][:-8]
    refused(packed(good | {"words.npy": cut}), "bytes, but shape")


def test_two_members_of_one_name():
    file = packed(members())
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("words.npy", members()["words.npy"])
    file.seek(0)
    refused(file, "its members are not those of a mask")


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(kind):
    refused(packed(members(), kind), "compressed in another way")


def test_begins_whose_differences_wrap():
    big = 2**63 - 1
    np.save(file := io.BytesIO(), np.array([0, big, -big - 1, -1, 3]))
    mask = BitMask.from_dense(np.tri(500, dtype=bool))
    refused(packed(members(mask) | {"partial_begin.npy": file.getvalue()}), "contradict")


def test_fortran_order_and_other_byte_orders_are_read():
    np.save(order := io.BytesIO(), np.asfortranarray(MASK.lists.words))
    np.save(lengths := io.BytesIO(), np.array([300, 300], ">i8"))
    change = {"words.npy": order.getvalue(), "lengths.npy": lengths.getvalue()}
    assert BitMask.load(packed(members() | change)).equals(MASK)


def test_what_can_only_be_read_from_begin_to_end_is_no_file():
    with pytest.raises(TypeError, match=r"^BitMask\.load: file is .*want a path or a binary file"):
        BitMask.load(mock.Mock(spec=["read"]))


@pytest.mark.parametrize("error", [ZeroDivisionError, TimeoutError, KeyboardInterrupt])
def test_an_error_of_somebody_else_passes(monkeypatch, error):
    def interrupted(*_):
        raise error

    file = packed(members())
    monkeypatch.setattr(zipfile.ZipFile, "open", interrupted)
    with pytest.raises(error):
        BitMask.load(file)


# Writing


@pytest.fixture
def path(tmp_path):
    """A mask that stands where another is to be written."""
    (tmp_path / "folder").mkdir()
    MASK.save(tmp_path / "folder/mask")
    return tmp_path / "folder/mask"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()],
    ids=repr,
)
@pytest.mark.parametrize("where", ["numpy.lib.format.write_array", "os.fsync", "os.replace"])
def test_a_failed_save_leaves_the_mask_that_stood_there(path, error, where):
    with mock.patch(where, side_effect=error), pytest.raises(type(error)):
        OTHER.save(path)
    assert BitMask.load(path).equals(MASK)
    assert os.listdir(path.parent) == ["mask"]


def test_a_full_disk_leaves_the_mask_that_stood_there(path):
    """By a limit on the length of files, which the kernel enforces."""
    code = (
        "import resource, signal, sys, numpy as np\n"
        "from fa_cupy import BitMask\n"
        "mask = BitMask.from_dense(np.random.default_rng(0).random((1000, 1000)) < 0.5)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "mask.save(sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert BitMask.load(path).equals(MASK)
    assert os.listdir(path.parent) == ["mask"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_of_a_new_file(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        MASK.save(tmp_path / "mask")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "mask").stat().st_mode) == mode


def test_permissions_of_the_file_that_stood_there(path):
    path.chmod(0o640)
    OTHER.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert BitMask.load(path).equals(OTHER)


def test_a_link_stays_one(path, tmp_path):
    for name, target in (("a", path), ("b", "a"), ("c", "folder/new")):
        (tmp_path / name).symlink_to(target)
    OTHER.save(tmp_path / "b")
    MASK.save(tmp_path / "c")
    assert os.readlink(tmp_path / "a") == str(path)
    assert os.readlink(tmp_path / "b") == "a"
    assert BitMask.load(path).equals(OTHER)
    assert BitMask.load(tmp_path / "folder/new").equals(MASK)
    assert sorted(os.listdir(tmp_path / "folder")) == ["mask", "new"]


def test_a_path_through_a_linked_folder(path, tmp_path):
    (tmp_path / "elsewhere").symlink_to("folder")
    OTHER.save(tmp_path / "elsewhere/../folder/mask")
    assert BitMask.load(path).equals(OTHER)


def test_a_file_that_may_not_be_opened_for_writing_stays(path, monkeypatch):
    opened = os.open

    def refuse(name, flags, *rest):
        if os.fspath(name) == os.fspath(path) and flags & os.O_WRONLY:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opened(name, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="mask"):
        OTHER.save(path)
    assert BitMask.load(path).equals(MASK)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none'$"):
        MASK.save(tmp_path / "none/mask")
    with pytest.raises(IsADirectoryError):
        MASK.save(tmp_path)


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("redirected", [True, False], ids=["to a file", "to a pipe"])
def test_standard_output_is_written_to(tmp_path, target, redirected):
    code = (
        "import sys, numpy as np\n"
        "from fa_cupy import BitMask\n"
        "BitMask.from_dense(np.tri(300, dtype=bool)).save(sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        where = stack.enter_context((tmp_path / "out").open("w+b")) if redirected else None
        done = subprocess.run(
            [sys.executable, "-c", code, target],
            env=environment,
            stdout=where or subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert done.returncode == 0, done.stderr
        content = where.read() if where else done.stdout  # what this end of the file has got
    assert BitMask.load(io.BytesIO(content)).equals(MASK)
    assert set(os.listdir(tmp_path)) <= {"out"}


def test_a_pipe_is_written_to_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as cat:
        MASK.save(tmp_path / "pipe")
        content = cat.stdout.read()
    assert BitMask.load(io.BytesIO(content)).equals(MASK)
    assert os.listdir(tmp_path) == ["pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_name_of_a_folder_or_of_nothing_is_no_name_of_a_mask(tmp_path):
    with pytest.raises(IsADirectoryError):
        MASK.save(f"{tmp_path}/new/")
    with pytest.raises(FileNotFoundError):
        MASK.save("")
    assert not [*tmp_path.iterdir()]


def test_an_object_that_numpy_cannot_write_to_is_named():
    class Sink:
        def write(self, data):
            return len(data)

    with pytest.raises(TypeError, match=r"BitMask\.save: file is .*Sink.*, want a path or"):
        MASK.save(Sink())
