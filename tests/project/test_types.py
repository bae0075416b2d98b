"""The types of public functions: the stub has the signatures, and mypy finds them in examples."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fa_cupy

STUB = Path(fa_cupy.__file__).with_suffix(".pyi")
EXAMPLE = """
import numpy as np
from numpy.typing import NDArray
import fa_cupy
from fa_cupy import BitMask, Score, attention, attention_backward, causal_product
from typing import Any, Protocol

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
weights: SparseMatrix
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


def test_mypy_knows_what_functions_return(tmp_path):
    pytest.importorskip("mypy")
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    options = ["--config-file=", "--no-error-summary", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, str(path)]
    environment = {**os.environ, "MYPYPATH": str(STUB.parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    array, pair, *revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    pair = pair.replace("builtins.object", "Any").replace("object", "Any")
    want = [array, array, array, array, "Any", array, array, pair]
    assert revealed == want, "\n".join(lines)
    wrong = {line.split(":")[1] for line in lines if ": error:" in line}
    marked = {str(i) for i, x in enumerate(EXAMPLE.splitlines(), 1) if x.endswith("# wrong")}
    assert wrong == marked, "\n".join(lines)
