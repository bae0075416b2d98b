"""Kernels with bugs planted in them: what a test must find."""

import re

from fa_cupy.gpu.driver.compile import ROOT


def flat(name, seen=None):
    """A source with the headers of `cuda_src` in it, each once."""
    seen = {name} if seen is None else seen
    text = (ROOT / name).read_text().replace("#pragma once\n", "")

    def header(match):
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return flat(match[1], seen)

    return re.sub(r'#include "(cuda_src/.*)"\n', header, text)


def _changed(text, old, new):
    """The text with one place changed, and how often the place was found."""
    if isinstance(old, str):  # white space in it stands for any white space
        old, new = re.compile(r"\s+".join(map(re.escape, old.split()))), new.replace("\\", r"\\")
    return old.subn(new, text)


def plant(folder, source, *changes):
    """Write the kernel of a row's source with changes, there or in its headers; return the file."""
    name = f"cuda_src/{source}.cu"
    for text in ((ROOT / name).read_text(), flat(name)):
        counts = []
        for old, new in changes:
            text, count = _changed(text, old, new)
            counts.append(count)
        if 0 not in counts:
            break
    assert set(counts) <= {1}, (counts, changes)
    file = folder / f"{source.rpartition('/')[2]}.cu"
    file.write_text(text)
    return file
