"""The version, which follows the tags of the repository: v1.2.3 is version 1.2.3.

setup.cfg runs this module alone, so it imports nothing of the package. It looks at the places that
a copy of the project may have, from a checkout to an installed wheel, when it is first asked.
"""

from __future__ import annotations

import functools
import re
import string
from pathlib import Path

#: The release that is made first.
FIRST = "0.1.0"

# What `git describe` says, in the archives that git makes (.gitattributes), as those of a web site.
_ARCHIVED = "$Format:%(describe:tags=true,match=v[0-9]*)$"


@functools.cache
def version() -> str:
    """Return the version of this copy of the project, as PEP 440 writes it.

    In a checkout it is the tag's, or for later commits the next one with the number of commits and
    the hash of the last one: 1.2.4.dev3+g0123abc, with ``.dirty`` where files have changed.
    Without tags, commits count from the first one, towards 0.1.0. An sdist and a wheel have the
    version that they were built with.

    Examples
    --------
    >>> import fa_cupy
    >>> version() == fa_cupy.__version__
    True
    """
    root = Path(__file__).parents[1]
    if (root / ".git").exists():
        return _of_checkout(root)
    if (root / "PKG-INFO").is_file():  # an sdist
        found = re.search(r"^Version: (\S+)$", (root / "PKG-INFO").read_text("utf-8"), re.M)
        if found:
            return found[1]
    if not _ARCHIVED.startswith("$"):
        return of_description(_ARCHIVED)
    return _installed() or of_description("")


def of_description(text: str) -> str:
    """Return the version for what ``git describe`` says; for an empty text, one before any other.

    Examples
    --------
    >>> of_description("v1.2.3"), of_description("v1.2.3-4-g0123abc-dirty"), of_description("")
    ('1.2.3', '1.2.4.dev4+g0123abc.dirty', '0.1.0.dev0')
    """
    found = re.fullmatch(r"v(\d[\w.]*?)(?:-(\d+)-(g[0-9a-f]+))?(-dirty)?", text)
    if found is None:
        return f"{FIRST}.dev0"
    release, commits, commit, dirty = found.groups()
    if not (commits or dirty):
        return release
    local = ".".join(part for part in (commit, "dirty" if dirty else None) if part)
    return f"{_next(release)}.dev{commits or 0}+{local}"


def _next(release: str) -> str:
    """Return the release after another one: the last number, 0 if left out as in 1.0a, and 1."""
    head = release.rstrip(string.digits)
    return f"{head}{int(release[len(head) :] or 0) + 1}"


def _of_checkout(root: Path) -> str:
    described = _git(root, "describe", "--tags", "--dirty", "--match", "v[0-9]*")
    if described:
        return of_description(described)
    commits = _git(root, "rev-list", "--count", "HEAD")
    commit = _git(root, "describe", "--always", "--dirty", "--exclude", "*")
    if not (commits and commit):
        return of_description("")  # git is missing, or refuses a folder of another user
    return f"{FIRST}.dev{commits}+g{commit.replace('-', '.')}"


def _git(root: Path, *arguments: str) -> str:
    import subprocess

    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _installed() -> str | None:
    """Return the version of the wheel that this file was installed from."""
    from importlib import metadata

    for found in metadata.distributions(name="fa_cupy"):
        if (
            Path(str(found.locate_file("fa_cupy/_version.py"))).resolve()
            == Path(__file__).resolve()
        ):
            return found.version
    return None
