"""What a GPU executes, as a digest that names, layout and comments leave alone.

It is taken over the kernels' machine code and the definitions of Python on the host. Only the
standard library is used, and the result does not depend on the Python version: the digest is made
on a GPU machine and checked on another.
"""

import ast
import hashlib
import json
import re
from pathlib import Path

from validation import definitions

ROOT = Path(__file__).resolve().parents[1]
#: The machine code of the kernels; `python -m validation sass` renews it.
TABLE = "validation/results/sass.json"

Prints = dict[str, dict[str, str]]

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


def token_fingerprint(path: Path) -> str:
    """Hash what a C++ or PTX file says, whatever its layout."""
    data = "\0".join(c_tokens(path.read_text(encoding="utf-8"))).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def kernel_fingerprints(table: Path) -> dict[str, str]:
    """Return a fingerprint of each kernel's machine code on each target."""
    return {
        f"{name} {target}": hashlib.sha256(f"{target} {entry['code']}".encode()).hexdigest()[:16]
        for name, row in json.loads(table.read_bytes())["rows"].items()
        for target, entry in row.items()
    }


def _mentions_gpu_mark(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "gpu"
        and getattr(node.value, "attr", getattr(node.value, "id", "")) == "mark"
        for node in ast.walk(tree)
    )


def _imports(path: str, tree: ast.Module) -> set[str]:
    """Return the modules that a file imports, and the names that it takes from them, dotted."""
    nodes = list(ast.walk(tree))
    is_package = path.endswith("/__init__.py")
    taken = definitions.imports(nodes, definitions.module_name(path), is_package).values()
    modules = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return modules | {*taken} | {name.rpartition(".")[0] for name in taken}


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


def _python_files(root: Path, folder: str) -> set[str]:
    found = (path.relative_to(root) for path in (root / folder).rglob("*.py"))
    return {p.as_posix() for p in found if not any(x.startswith(".") for x in p.parts)}


def gpu_tests(root: Path = ROOT) -> set[str]:
    """Return the test files that hold GPU tests, and the test files that those import.

    A file holds GPU tests when it uses the ``gpu`` mark, takes a fixture of a conftest.py that does
    and that it does not define anew, imports a shared module that does, or lies in a folder whose
    conftest.py sets the mark in a hook of pytest.
    """
    trees = {path: ast.parse((root / path).read_bytes()) for path in _python_files(root, "tests")}
    modules = {definitions.module_name(path): path for path in trees}
    imports = {
        path: {modules[name] for name in _imports(path, tree) & modules.keys()}
        for path, tree in trees.items()
    }
    # By the folder that each conftest.py serves.
    fixtures = {
        path.removesuffix("conftest.py"): _gpu_fixtures(tree)
        for path, tree in trees.items()
        if path.endswith("/conftest.py")
    }
    shared = {
        path
        for path, tree in trees.items()
        if not path.rpartition("/")[2].startswith(("test_", "conftest."))
        and _mentions_gpu_mark(tree)
    }

    def holds_gpu_tests(path: str, tree: ast.Module) -> bool:
        served = (names for folder, names in fixtures.items() if path.startswith(folder))
        marking = {name for names in served for name in names} - _functions(tree)
        return (
            _mentions_gpu_mark(tree)
            or bool(shared & imports[path])
            or bool(_arguments(tree) & marking)
            or any(name.startswith("pytest_") for name in marking)
        )

    chosen = {path for path, tree in trees.items() if holds_gpu_tests(path, tree)}
    todo = list(chosen)
    while todo:
        path = todo.pop()
        served = {f"{folder}conftest.py" for folder in fixtures if path.startswith(folder)}
        new = (imports[path] | served) - chosen
        chosen |= new
        todo += new
    return chosen


def fingerprints(root: Path = ROOT) -> Prints:
    """Return the fingerprints of what a GPU run consists of, by file and by name in the file.

    Kernels count with their machine code, as the table has it; a test holds the table against the
    sources. Modules of PTX count with their tokens, Python with its definitions.
    """
    paths = gpu_tests(root)
    for folder in ("cuda_src", "ptx", "fa_cupy"):
        paths |= _python_files(root, folder)
    cpu_only = {p for p in paths if p.startswith("fa_cupy/cpu/") or p == "fa_cupy/plot.py"}
    prints = definitions.fingerprints(root, paths - cpu_only)
    for path in (root / "ptx").glob("[!.]*.ptx"):
        prints[path.relative_to(root).as_posix()] = {"module": token_fingerprint(path)}
    prints[TABLE] = kernel_fingerprints(root / TABLE)
    return dict(sorted(prints.items()))


def digest(prints: Prints) -> str:
    """Return one digest over all fingerprints, whatever has them and wherever that stands."""
    values = sorted(value for names in prints.values() for value in names.values())
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
