"""What the GPU path consists of, as a digest that comments, docstrings and white space leave alone.

Only the standard library is used, and the result does not depend on the Python version: the digest
is made on a GPU machine and checked on another.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# One token of C, C++, CUDA or PTX. Comments and blanks come first, so that they can be dropped.
_TOKEN = re.compile(
    r"""
    (?P<skip> //[^\n]* | /\*.*?\*/ | \\\r?\n | [^\S\n]+ )
  | (?P<line> \n )
  | (?P<raw> (?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)" )
  | (?P<text> (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" | (?:u8|[uUL])?'(?:\\.|[^'\\\n])*' )
  | (?P<define> \#[^\S\n]*define[^\S\n]+\w+\(? )
  | (?P<word> [A-Za-z_$]\w* | \.?\d(?:'?[\w.]|(?<=[eEpP])[+-])* )
  | (?P<sign> <<<|>>>|<=>|<<=|>>=|\.\.\.|->\*|\#\#|::|->|\+\+|--|<<|>>|[-+*/%&|^!=<>]=|&&|\|\|| . )
    """,
    re.VERBOSE | re.DOTALL,
)


def c_tokens(source: str) -> list[str]:
    """Split C++ or PTX into tokens; line ends stay only where they close a preprocessor line."""
    tokens: list[str] = []
    in_directive = False
    line_start = True
    for match in _TOKEN.finditer(source):
        token = match.group()
        if match.lastgroup == "skip":
            continue
        if match.lastgroup == "line":
            if in_directive:
                tokens.append("\n")
            in_directive, line_start = False, True
            continue
        if line_start and token.startswith("#"):
            in_directive = True
            tokens.append("\n")
        if match.lastgroup == "define":
            # A parenthesis belongs to the macro's name only when it touches it.
            token = " ".join(token.replace("#", "").split())
        tokens.append(token)
        line_start = False
    return tokens


def _plain(node: Any) -> Any:
    """Turn a syntax tree into lists and strings that are the same in every Python version."""
    if isinstance(node, list):
        # A string that stands alone as a statement is a docstring or does nothing.
        kept = [item for item in node if not _is_bare_string(item)]
        return [_plain(item) for item in kept]
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", *_joined(node.values)]
    if isinstance(node, ast.AST):
        # Fields that are empty come and go between versions.
        fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
        return [type(node).__name__, *(pair for pair in fields if pair[1] not in (None, []))]
    return None if node is None else f"{type(node).__name__} {node!a}"


def _is_bare_string(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _joined(values: list[ast.expr]) -> Iterator[Any]:
    """Yield an f-string's parts, literal text in one piece however the parser cut it."""
    text = ""
    for value in values:
        if isinstance(value, ast.Constant):
            text += str(value.value)
            continue
        if text:
            yield ascii(text)
        text = ""
        yield _plain(value)
    if text:
        yield ascii(text)


def fingerprint(path: Path) -> str:
    """Hash what a file says, whatever its layout."""
    data = path.read_bytes()
    if path.suffix == ".py":
        data = json.dumps(_plain(ast.parse(data))).encode()
    elif path.suffix in {".cu", ".cuh", ".ptx", ".h"}:
        data = "\0".join(c_tokens(data.decode())).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _mentions_gpu_mark(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "gpu"
        and getattr(node.value, "attr", getattr(node.value, "id", "")) == "mark"
        for node in ast.walk(tree)
    )


def _imports(tree: ast.AST) -> set[str]:
    """Return the imported modules that may lie in tests/, named as there."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module in ("", "tests"):
                names |= {alias.name for alias in node.names}
            names.add(module)
    return {name.removeprefix("tests.") for name in names}


def _gpu_fixtures(tree: ast.Module) -> set[str]:
    """Return the fixtures of a conftest that put the gpu mark on the tests that ask for them."""
    marked = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _mentions_gpu_mark(node)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (
            _mentions_gpu_mark(node)
            or any(isinstance(n, ast.Name) and n.id in marked for n in ast.walk(node))
        )
    }


def _arguments(tree: ast.Module) -> set[str]:
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _functions(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def gpu_tests(root: Path = ROOT) -> set[str]:
    """Return the test files that hold GPU tests, and the test files that those import.

    A file holds GPU tests when it uses the ``gpu`` mark, takes a fixture of conftest.py that does
    and that it does not define anew, or imports a shared module that does.
    """
    trees = {path.stem: ast.parse(path.read_bytes()) for path in (root / "tests").glob("*.py")}
    fixtures = _gpu_fixtures(trees["conftest"]) if "conftest" in trees else set()
    shared = {
        name
        for name, tree in trees.items()
        if not name.startswith("test_") and name != "conftest" and _mentions_gpu_mark(tree)
    }
    chosen = {"conftest"} & trees.keys() | {
        name
        for name, tree in trees.items()
        if _mentions_gpu_mark(tree)
        or shared & _imports(tree)
        or _arguments(tree) & (fixtures - _functions(tree))
    }
    todo = list(chosen)
    while todo:
        new = (_imports(trees[todo.pop()]) & trees.keys()) - chosen
        chosen |= new
        todo += new
    return {f"tests/{name}.py" for name in chosen}


def fingerprints(root: Path = ROOT) -> dict[str, str]:
    """Return a fingerprint for each file that the GPU path runs through, by its path."""
    paths = gpu_tests(root)
    for folder in ("cuda_src", "ptx", "fa_cupy"):
        for path in (root / folder).rglob("*"):
            relative = path.relative_to(root)
            hidden = any(part.startswith((".", "__pycache__")) for part in relative.parts)
            if path.is_file() and not hidden:
                paths.add(relative.as_posix())
    cpu_only = {p for p in paths if p.startswith("fa_cupy/cpu/") or p == "fa_cupy/plot.py"}
    return {path: fingerprint(root / path) for path in sorted(paths - cpu_only)}


def digest(prints: dict[str, str]) -> str:
    """Return one digest over all fingerprints and their paths."""
    return hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()
