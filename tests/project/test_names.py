"""Names of the project that tests, validation and docs use: all of them are there.

Modules that import CuPy are imported with its stand-in, so that a name that has moved is found
without a GPU.
"""

import ast
import importlib

import pytest

from tests.project.test_style import ROOT
from tests.support.cupy_stand_in import in_place_of_cupy

USERS = sorted(
    path
    for folder in ("tests", "validation", "docs", "fa_cupy/cli")
    for path in (ROOT / folder).rglob("*.py")
)


# Modules that import libraries which may be missing.
MISSING = object()
ELSEWHERE = {"fa_cupy.dask", "fa_cupy.torch", "fa_cupy.jax"}


def modules_of(nodes):
    """Modules of the package that a file imports, by the name that they have there, and names."""
    modules, names = {}, []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fa_cupy"):
            if node.module in ELSEWHERE:
                continue
            names += [(node.module, alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if (
                    alias.name.startswith("fa_cupy")
                    and alias.asname
                    and alias.name not in ELSEWHERE
                ):
                    modules[alias.asname] = alias.name
    return modules, names


def there(module, name):
    """The value of a name of a module, or the submodule; `MISSING` if it has none of that name."""
    found = importlib.import_module(module)
    if hasattr(found, name):
        return getattr(found, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return MISSING


def missing(path):
    """Names that a file takes from the package and that are not there."""
    nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    modules, names = modules_of(nodes)
    wrong, taken = [], {}
    for module, name, here in names:
        if f"{module}.{name}" in ELSEWHERE:
            continue
        value = there(module, name)
        if value is MISSING:
            wrong.append(f"{module}.{name}")
        elif getattr(value, "__name__", "").startswith("fa_cupy") and hasattr(value, "__spec__"):
            taken[here] = value
    taken |= {here: importlib.import_module(name) for here, name in modules.items()}
    # A name that is bound again is something else there.
    bound = {
        node.id for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    } | {argument.arg for argument in nodes if isinstance(argument, ast.arg)}  # fmt: skip
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = taken.get(node.value.id)
            known = module is None or node.value.id in bound or hasattr(module, node.attr)
            if not known and there(module.__name__, node.attr) is MISSING:
                wrong.append(f"{module.__name__}.{node.attr}")
    return wrong


@pytest.fixture(scope="module")
def cupy():
    with in_place_of_cupy() as found:
        yield found


def test_names_that_files_use_are_there(cupy):
    wrong = {}
    for path in USERS:
        found = [name for name in missing(path) if not name.startswith(tuple(ELSEWHERE))]
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert not wrong


def test_a_missing_name_is_found(cupy, tmp_path):
    path = tmp_path / "user.py"
    path.write_text(
        "from fa_cupy.core import plan_cache\n"
        "from fa_cupy.gpu import attention as host, nothing\n"
        "from fa_cupy.gpu.plan import Plan, Plans\n"
        "plan_cache.plans, plan_cache.calls, host._calls\n"
    )
    assert missing(path) == [
        "fa_cupy.gpu.nothing", "fa_cupy.gpu.plan.Plans", "fa_cupy.core.plan_cache.calls",
        "fa_cupy.gpu.attention._calls",
    ]  # fmt: skip
