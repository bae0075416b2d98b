"""Modules of ``fa_cupy.gpu`` imported anew for a test, which leave nothing behind."""

import contextlib
import sys

_PACKAGE = "fa_cupy.gpu"


def _is_ours(name):
    return name.startswith(_PACKAGE + ".")


def loaded():
    """Return the modules of ``fa_cupy.gpu`` that are imported, without packages, by name."""
    return [n for n, m in sys.modules.items() if _is_ours(n) and not hasattr(m, "__path__")]


@contextlib.contextmanager
def anew(names):
    """Forget modules, so that the next import makes them anew; afterwards all is as it was."""
    before = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    packages = [name for name in (_PACKAGE, *before) if hasattr(sys.modules[name], "__path__")]
    attributes = {name: dict(vars(sys.modules[name])) for name in packages}
    for name in names:
        sys.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        if parent in attributes:
            vars(sys.modules[parent]).pop(child, None)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        for name, values in attributes.items():
            vars(sys.modules[name]).clear()
            vars(sys.modules[name]).update(values)
