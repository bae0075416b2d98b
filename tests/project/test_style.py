"""What no linter checks: the layout, where inline asm may stand, sizes, names of kernels."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from fa_cupy.score import header
from validation.digest import ROOT, c_tokens

TOP_LEVEL = {
    "cuda_src",
    "docs",
    "fa_cupy",
    "ptx",
    "tests",
    "validation",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
    ".ci",
    ".clang-format",
    ".gitattributes",
    ".gitignore",
}
KERNELS = sorted((ROOT / "cuda_src").rglob("*.cu"))
HEADERS = sorted((ROOT / "cuda_src").rglob("*.cuh"))
PTX = sorted((ROOT / "ptx").glob("*.cuh"))
MODULES = sorted((ROOT / "fa_cupy").rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("cuda_src", "docs", "fa_cupy", "ptx", "tests", "validation")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".cu", ".cuh", ".md", ".ptx", ".py", ".rst"} and "_build" not in path.parts
)


def of_each(paths):
    """Make one test of a check of one file: it names all files that fail, and says why."""

    def test_of(check):
        def test():
            failed = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    failed.append(f"{path.relative_to(ROOT).as_posix()}: {error}")
            assert not failed, "\n".join(failed)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return test_of


def tracked():
    """The files that git knows or would take; None where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()


def imported(path, in_functions=False):
    """The modules that a file imports when it is itself imported, or later too, in functions.

    They come with the names that are taken from them, as ``"module.name"``.
    """
    names = set()
    todo = list(ast.parse(path.read_bytes()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # `if TYPE_CHECKING` imports nothing.
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            todo += ast.iter_child_nodes(node)
    return names


def test_all_files_that_fail_are_named():
    def check(path):
        assert path.name != KERNELS[0].name, "it is the first"

    of_each(KERNELS[1:3])(check)()
    with pytest.raises(AssertionError) as caught:
        of_each([KERNELS[0], *KERNELS[1:3], KERNELS[0]])(check)()
    failed = f"{KERNELS[0].relative_to(ROOT).as_posix()}: it is the first\n"
    assert str(caught.value).count(failed) == 2


def test_top_level_is_fixed():
    files = tracked()
    if files is None:
        pytest.skip("not a git checkout")
    assert {name.partition("/")[0] for name in files} <= TOP_LEVEL


@of_each(KERNELS + HEADERS + MODULES)
def test_inline_asm_stands_in_ptx_only(path):
    source = path.read_text()
    if path.suffix == ".py":
        assert not re.search(r"\basm\s*(volatile)?\s*\(", source)
    else:
        assert not {"asm", "__asm__", "__asm"} & set(c_tokens(source))


@of_each(KERNELS)
def test_a_kernel_file_holds_one_entry_named_after_its_path(path):
    tokens = c_tokens(path.read_text())
    assert tokens.count('"C"') == 1
    assert tokens.count("__global__") == 1
    start = tokens.index('"C"')
    entry = tokens[start : tokens.index("{", start)]
    name = "_".join(path.relative_to(ROOT / "cuda_src").with_suffix("").parts)
    assert entry[entry.index(name) + 1] == "("


@of_each(KERNELS + HEADERS + PTX)
def test_kernels_include_nothing_but_parts_of_this_project(path):
    own = path.with_suffix(".cuh").relative_to(ROOT).as_posix()  # a kernel's second file
    allowed = ("ptx/",) if path in PTX else ("ptx/", "cuda_src/common/", own)
    for name in re.findall(r"^\s*#\s*include\s+(\S+)", path.read_text(), re.MULTILINE):
        if name == f'"{header.NAME}"':  # which is made for each expression
            assert path.name == "score_expression.cuh"
            continue
        assert name.strip('"').startswith(allowed)
        assert (ROOT / name.strip('"')).is_file()


@of_each(PTX)
def test_ptx_wrappers_cite_the_ptx_isa(path):
    source = path.read_text()
    if "asm" in c_tokens(source):
        assert re.search(r"PTX ISA.*\b\d+", source)


@of_each(KERNELS + HEADERS + PTX)
def test_lines_of_kernels_are_short(path):
    # Ruff checks the modules, clang-format the code here; this is for comments.
    assert max(map(len, path.read_text().splitlines()), default=0) <= 100


@of_each(TEXTS)
def test_no_machine_paths_and_nothing_unfinished(path):
    """A path of one machine, or a promise to finish, has no place in what people read."""
    wrong = r"/(?:home|root|work|Users)/\w+|\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b"
    assert not re.findall(wrong, path.read_text())


@of_each(MODULES)
def test_cupy_is_imported_in_the_gpu_folder_only_and_late(path):
    late = {"cupy", "cuda", "dask", "torch", "jax", "matplotlib"}
    if path.relative_to(ROOT).parts[1] in ("gpu", "dask", "torch", "jax", "plot.py"):
        return
    assert not late & {name.partition(".")[0] for name in imported(path)}


# What modules below `fa_cupy.gpu` may import of it.
LAYERS = {
    "driver": ("fa_cupy.gpu.driver",),
    "kernels": ("fa_cupy.gpu.kernels", "fa_cupy.gpu.plan", "fa_cupy.gpu.driver.targets"),
    "plan.py": ("fa_cupy.gpu.driver.arguments",),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_dependencies_point_one_way(layer):
    """Kernels, plans and the driver do not know what uses them, and plans know no kernel."""
    place = ROOT / "fa_cupy/gpu" / layer
    paths = [place] if place.is_file() else sorted(place.rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in imported(path)
        if name.startswith("fa_cupy.gpu") and not name.startswith(LAYERS[layer])
    ]
    assert not wrong


@pytest.mark.parametrize("path", ["plan.py", "kernels", "driver/arguments.py"])
def test_plans_and_kernels_do_not_import_cupy(path):
    place = ROOT / "fa_cupy/gpu" / path
    for module in [place] if place.is_file() else place.rglob("*.py"):
        names = {name.partition(".")[0] for name in imported(module)}
        assert not names & {"cupy", "cuda"}, module


def test_the_cpu_path_does_not_know_the_gpu():
    for path in (ROOT / "fa_cupy/cpu").glob("*.py"):
        assert not any(name.startswith("fa_cupy.gpu") for name in imported(path))


def test_results_are_small():
    for path in Path(ROOT / "validation/results").glob("*"):
        assert path.stat().st_size < 2e6
