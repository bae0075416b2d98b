"""Modules of the project imported anew for a test, which leave nothing behind."""

import contextlib
import sys


def _is_ours(name):
    return name.partition(".")[0] == "fa_cupy"


def loaded():
    """Return the modules of ``fa_cupy.gpu`` that are imported, without packages, by name."""
    ours = [(n, m) for n, m in sys.modules.items() if n.startswith("fa_cupy.gpu.")]
    return [name for name, module in ours if not hasattr(module, "__path__")]


@contextlib.contextmanager
def anew(names):
    """Forget modules, so that the next import makes them anew; afterwards all is as it was.

    Modules that are imported first meanwhile are forgotten too: they may have the others.
    """
    before = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    packages = [name for name, module in before.items() if hasattr(module, "__path__")]
    attributes = {name: dict(vars(before[name])) for name in packages}
    for name in names:
        sys.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        if parent in attributes:
            vars(before[parent]).pop(child, None)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        for name, values in attributes.items():
            vars(before[name]).clear()
            vars(before[name]).update(values)
