"""The layout of the package: cycles of imports, modules of a folder, lengths of functions.

Exceptions from a bound are listed as they are now. The lists may only shrink.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter

from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from tests.project.test_style import HEADERS, KERNELS, MODULES, PTX, imported
from validation.digest import ROOT

# Modules of a folder.
MOST_MODULES = 12
# Lines of code of a function.
MOST_LINES = {".py": 60, ".cu": 120, ".cuh": 120}


# Imports


def imports_of(paths, root):
    """The modules of a package by name, each with the ones that it imports, in functions too.

    Importing a module does not count as importing the packages that contain it.
    """

    def name_of(path):
        parts = path.relative_to(root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    modules = {name_of(path): path for path in paths}

    def module_of(name):
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        return name

    found = {}
    for module, path in modules.items():
        names = {module_of(name) for name in imported(path, in_functions=True)}
        found[module] = names & modules.keys() - {module}
    return found


def cycles(imports):
    """The cycles of imports, the largest first."""
    names = sorted(imports)
    graph = csr_array([[other in imports[name] for other in names] for name in names])
    _, labels = connected_components(graph, connection="strong")
    found = [
        [name for name, label in zip(names, labels, strict=True) if label == which]
        for which in range(max(labels) + 1)
    ]
    return sorted((x for x in found if len(x) > 1), key=len, reverse=True)


def shortest_cycle(imports, start):
    """A shortest path along imports from a module of a cycle back to it, as text."""
    paths, seen = [[start]], set()
    for path in paths:  # which grows during the loop
        if start in imports[path[-1]]:
            return " -> ".join([*path, start])
        more = sorted(imports[path[-1]] - seen)
        paths += [[*path, other] for other in more]
        seen.update(more)
    raise AssertionError(f"{start} is in no cycle")


def describe(imports, found):
    """List cycles with their modules, and a shortest cycle through each module."""
    lines = []
    for cycle in found:
        shortest = {shortest_cycle(imports, name) for name in cycle}
        lines += [f"{len(cycle)} modules: {', '.join(cycle)}", *sorted(shortest, key=len)]
    return "\n".join(lines)


def test_no_modules_import_one_another():
    """Directly or not. The backends come by name, from `fa_cupy.core.backends` only."""
    imports = imports_of(MODULES, ROOT)
    found = cycles(imports)
    assert not found, describe(imports, found)


def test_the_package_is_imported_without_what_few_calls_need():
    needless = {"cupy", "cuda", "scipy", "threadpoolctl", "tqdm", "zipfile", "inspect", "torch"}
    code = (
        "import sys, numpy\nbefore = set(sys.modules)\nimport fa_cupy\n"
        "print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in done.stdout.split()}
    assert "fa_cupy" in imported
    assert not imported & needless


def test_the_backends_are_imported_by_name_in_one_place():
    """By name, cycles would not show."""
    users = {path for path in MODULES if "import_module" in path.read_text()}
    # Commands, and modules that the package imports when they are asked for, need no place of their
    # own.
    others = {ROOT / "fa_cupy/__main__.py", ROOT / "fa_cupy/__init__.py"}
    assert users == {ROOT / "fa_cupy/core/backends.py", *others}


def test_cycles_are_found(tmp_path):
    """Also by imports of functions, but not by those that only type checkers read."""
    sources = {
        "a/__init__.py": "from a.b import thing",
        "a/b.py": "import a.c\nfrom a.e import thing",
        "a/c.py": "def f():\n    from a import d",
        "a/d.py": "class D:\n    def f(self):\n        from a.b import thing",
        "a/e.py": "from a import f\nfrom typing import TYPE_CHECKING",
        "a/f.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import e",
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    imports = imports_of([tmp_path / name for name in sources], tmp_path)
    assert imports["a.b"] == {"a.c", "a.e"}
    found = cycles(imports)
    assert found == [["a.b", "a.c", "a.d"]]
    assert "a.c -> a.d -> a.b -> a.c" in describe(imports, found)
    del imports["a.d"]
    imports["a.c"].clear()
    assert cycles(imports) == []


# Folders


def test_folders_do_not_grow():
    modules = [path for path in MODULES if path.name != "__init__.py"]
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules)
    assert not {name: size for name, size in sizes.items() if size > MOST_MODULES}


# Functions


def python_functions(source):
    """The functions of a module, each as (name, lines of code).

    Docstrings, comments and empty lines do not count, nor do decorators; functions inside do.
    """
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            code |= set(range(token.start[0], token.end[0] + 1))

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            names = (*inside, child.name) if named else inside
            if named and not isinstance(child, ast.ClassDef):
                lines = code & set(range(child.lineno, child.end_lineno + 1))
                if ast.get_docstring(child, clean=False) is not None:
                    lines -= set(range(child.body[0].lineno, child.body[0].end_lineno + 1))
                yield ".".join(names), len(lines)
            yield from visit(child, names)

    yield from visit(ast.parse(source), ())


COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|(")(?:\\.|[^"\\\n])*"', re.DOTALL)
DIRECTIVE = r"^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*"
# The head of a namespace, a struct or another block in which functions may stand.
HOLDER = re.compile(r'(?:^|>)\s*(?:namespace|struct|class|union|enum)\b|^extern ""\s*$')
NOT_NAMES = {"__launch_bounds__", "alignas", "__align__", "requires"}


def cuda_functions(source):
    """The functions of a file of CUDA C++, each as (name, lines of code).

    Comments and empty lines do not count. Lambdas belong to the function that they stand in.
    """

    def blank(match):
        return '""' if match.group(1) else "\n" * match.group().count("\n")

    source = COMMENT_OR_TEXT.sub(blank, source)
    start = 0  # of the next declaration
    within = []  # for each open brace, whether functions may stand in it
    function = None
    for match in re.finditer(rf"{DIRECTIVE}|[{{}};]", source, re.MULTILINE):
        if match.group() == "{":
            head = source[start : match.start()].lstrip()
            holder = HOLDER.search(head) is not None
            if function is None and not holder and "(" in head:
                names = re.findall(r"([\w:~]+)\s*\(", head)
                name = next(name for name in names if name not in NOT_NAMES)
                function = name, match.start() - len(head), len(within)
            within.append(holder)
        elif match.group() == "}":
            within.pop()
            if function is not None and len(within) == function[2]:
                lines = source[function[1] : match.end()].splitlines()
                yield function[0], sum(bool(line.strip()) for line in lines)
                function = None
        if all(within):
            start = match.end()
    assert not within


def test_functions_are_short():
    found = {}
    for path in MODULES + KERNELS + HEADERS + PTX:
        functions = python_functions if path.suffix == ".py" else cuda_functions
        for name, lines in functions(path.read_text()):
            if lines > MOST_LINES[path.suffix]:
                found[f"{path.relative_to(ROOT).as_posix()}: {name}"] = lines
    assert not found, f"want at most {MOST_LINES} lines of code"


PYTHON = '''
@decorator
def first(a,
          b):
    """One.

    Two.
    """
    # A comment.

    x = """
    """
    return a  # with a comment

class Thing:
    def method(self):
        def inner(): pass
        return inner
'''


def test_lines_of_python_are_counted():
    assert list(python_functions(PYTHON)) == [
        ("first", 5), ("Thing.method", 3), ("Thing.method.inner", 1)
    ]  # fmt: skip


CUDA = r"""
#include "ptx/types.cuh"  // {
namespace {
#if FA_A
constexpr int kTable[] = {1, 2};
#endif
struct alignas(16) Work : Base<1> {
  int x;
  FA_DEVICE int get() const { return x; }
};
template <class T, bool kB = (T::kA > 3)>
FA_DEVICE Pair<T> first(const T& x, int (&y)[2]) {
  /* A comment
     of { two lines. */

  auto inner = [&](int i) {
    if (i) { asm("{ not ; a brace"); }
  };
  return {x, inner};
}
void declared(int);
}  // namespace
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ Params params) {
  #pragma unroll
  for (;;) {
  }
}
"""


def test_lines_of_cuda_are_counted():
    assert list(cuda_functions(CUDA)) == [("get", 1), ("first", 7), ("kernel", 6)]


# Kernels


def test_every_kernel_has_one_host_module_of_its_name():
    stems = {path.stem for path in KERNELS if path.suffix == ".cu"}
    hosts = Counter(path.stem for path in (ROOT / "fa_cupy/gpu/kernels").rglob("*.py"))
    assert len(stems) > 20
    assert {stem: hosts[stem] for stem in stems} == dict.fromkeys(stems, 1)


# Kernels whose tests are in a file of their family. The others have one of their own name.
TESTED_IN = {
    "attention/fwd_sm80": "test_forward_kernels",
    "attention/fwd_sm90": "test_forward_kernels",
    "attention/bwd_sm90": "test_bwd_kernels_sm90",
    "attention/bwd_dkdv_sm90": "test_bwd_kernels_sm90",
    "attention/bwd_dq_sm90": "test_bwd_kernels_sm90",
    "attention/bwd_dkdv_sm80": "test_bwd_kernels_sm80",
    "attention/bwd_dq_sm80": "test_bwd_kernels_sm80",
    "attention/bwd_dkdv_fp32": "test_bwd_fp32",
    "attention/bwd_dq_fp32": "test_bwd_fp32",
    "attention/bwd_preprocess_fp32": "test_bwd_fp32",
    "attention/bwd_dkdv_fp32_sm90": "test_bwd_fp32_sm90",
    "attention/bwd_dq_fp32_sm90": "test_bwd_fp32_sm90",
    "attention/bwd_dkdv_fp64": "test_bwd_fp64",
    "attention/bwd_dq_fp64": "test_bwd_fp64",
    "attention/bwd_dbias_fp32": "test_bwd_dbias_rows",
    "attention/bwd_dbias_fp64": "test_bwd_dbias_rows",
    "attention/bwd_preprocess": "test_bwd_large_lse",
    "attention/bwd_convert_dq": "test_bwd_nonfinite",
    "attention/fwd_pairs": "test_pairs",
    "attention/bwd_dq_pairs": "test_pairs",
    "attention/bwd_dkdv_pairs": "test_pairs",
    "mask/transpose_words": "test_block_tables",
}


def test_every_kernel_has_tests_of_its_name():
    kernels = [path for path in KERNELS if path.suffix == ".cu"]
    names = [path.relative_to(ROOT / "cuda_src").with_suffix("").as_posix() for path in kernels]
    missing = {}
    for name in names:
        family, stem = name.split("/")
        path = ROOT / "tests/kernels" / family / f"{TESTED_IN.get(name, f'test_{stem}')}.py"
        if not path.is_file() or not re.search(rf"\b{stem}\b", path.read_text()):
            missing[name] = path.relative_to(ROOT).as_posix()
    assert not missing
    assert TESTED_IN.keys() <= set(names)
