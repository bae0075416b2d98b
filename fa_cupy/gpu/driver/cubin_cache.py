"""Compiled kernels on disk: one file each, written once, in a folder that is the user's alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER_VARIABLE = "FA_CUPY_CACHE_DIR"
_MAGIC = b"fa_cupy cubin 1\n"
_DIGEST_BYTES = 32


class Entry(NamedTuple):
    """What is kept of one compilation."""

    cubin: bytes  # or PTX
    log: str
    seconds: float


def cache_dir() -> Path:
    """Return the folder of the cache, made if need be.

    ``$FA_CUPY_CACHE_DIR``, else ``fa_cupy`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. Where no such
    folder can be used, as in a container without a home, one of the user's own among the
    temporary files.

    Raises
    ------
    OSError
        If the folder cannot be made, is not known, belongs to another user, or others can write
        to it: what it holds is run on the GPU.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return _private(_expanded(named))
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification has relative paths ignored.
        home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        return _private(home / "fa_cupy")
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        own = f"fa_cupy-{os.geteuid()}" if hasattr(os, "geteuid") else "fa_cupy"
        return _private(Path(tempfile.gettempdir()) / own)


def place(file_name: str) -> Path | None:
    """Return where a file of the cache is; None, with a warning, where no folder can be used."""
    with costing_time("kernels are compiled anew in each process"):
        return cache_dir() / file_name
    return None


_warned: set[tuple[str, int | str]] = set()


@contextlib.contextmanager
def costing_time(what: str, folder: Path | None = None) -> Iterator[None]:
    """Turn an OSError of the cache into a warning, one for each kind in each folder.

    A folder that is refused, full or read-only costs time, not the result.
    """
    try:
        yield
    except OSError as error:
        if _is_foreign(error):
            raise
        where = "" if folder is None else f" {folder}"
        kind = where, error.errno or str(error)
        if kind not in _warned:
            _warned.add(kind)
            why = str(error).removeprefix("kernel cache: ")
            warnings.warn(f"kernel cache: {what}{where} ({why})", stacklevel=4)


def _is_foreign(error: OSError) -> bool:
    """Whether a handler of signals raised it, on a time-out: errors of files have a number."""
    return isinstance(error, TimeoutError) and error.errno is None


def _expanded(named: str) -> Path:
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError as error:  # "~name" without a user of that name
        raise FileNotFoundError(f"kernel cache: {FOLDER_VARIABLE} is {named!r}: {error}") from None


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "geteuid"):
        return folder  # Windows: home and temporary files are in folders of each user alone
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"kernel cache: {folder} belongs to user {status.st_uid}, want {os.geteuid()} (or "
            f"another folder in {FOLDER_VARIABLE})"
        )
    if status.st_mode & 0o022:
        raise PermissionError(
            f"kernel cache: {folder} has mode {status.st_mode & 0o777:o}, want 700 (other users "
            f"may have written kernels there: empty it and chmod it, or set {FOLDER_VARIABLE})"
        )
    return folder


def read(path: Path, key: str) -> Entry | None:
    """Return what a file of the cache holds; None where it is not sound or has another key."""
    try:
        data = path.read_bytes()
    except OSError as error:
        if _is_foreign(error):
            raise
        return None  # none there, or none that can be read: `write` replaces it or says why not
    start = len(_MAGIC) + _DIGEST_BYTES
    digest, payload = data[len(_MAGIC) : start], data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
        return None
    head, _, cubin = payload.partition(b"\n")
    try:
        facts = json.loads(head)
        entry = Entry(cubin, str(facts["log"]), float(facts["seconds"]))
        return entry if facts["key"] == key else None
    except (ValueError, TypeError, KeyError, RecursionError):  # a head that `write` does not write
        return None


def write(path: Path, key: str, entry: Entry) -> None:
    """Keep a compilation in place of whatever stands there.

    A reader sees the whole file or none, even if others write at the same time.
    """
    head = json.dumps({"key": key, "log": entry.log, "seconds": entry.seconds})
    payload = head.encode() + b"\n" + entry.cubin
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
