"""The code on every page runs, the pages build without a warning, the pictures can be drawn."""

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.rst"))
CODE_BLOCK = re.compile(
    r"^( *)\.\. code-block:: python\n((?:\1 +:.*\n)*)\n*((?:\1 +.*\n|\n)+)", re.M
)
SOURCES = {".cu", ".cuh", ".ptx", ".py"}
DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1\S.*\n|\1 +.*\n)*", re.M)


class Block(NamedTuple):
    line: int
    text: str
    needs: str  # "", or what its :class: option names: gpu, torch, jax


def blocks(page):
    """Python blocks and doctests of a page, in order."""
    text = page.read_text()
    found = []
    for match in CODE_BLOCK.finditer(text):
        indent = re.match(" *", match[3].lstrip("\n"))[0]
        code = re.sub(rf"^{indent}", "", match[3], flags=re.M)
        needs = re.search(r":class: (\w+)", match[2])
        line = text[: match.start(3)].count("\n") + 1
        found.append(Block(line, code, needs[1] if needs else ""))
    for match in DOCTEST.finditer(text):
        line = text[: match.start()].count("\n") + 1
        found.append(Block(line, re.sub(rf"^{match[1]}", "", match[0], flags=re.M), ""))
    return sorted(found)


def run(page, names, block):
    """Run one block in the namespace of its page."""
    if not block.text.startswith(">>>"):
        # Line numbers of the page, for tracebacks.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        return
    example = doctest.DocTestParser().get_doctest(
        block.text, names, page.name, str(page), block.line - 1
    )
    example.globs = names
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)


def run_page(page, kinds):
    names = {}
    for block in blocks(page):
        if block.needs not in kinds:
            continue
        if block.needs in ("torch", "jax"):
            try:
                __import__(block.needs)
            except ImportError:
                continue
        run(page, names, block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page, ("", "torch", "jax"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.needs == "gpu" for b in blocks(p))], ids=lambda p: p.stem
)
def test_gpu_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page, ("", "gpu"))


def test_no_block_is_missed():
    """Every ``>>>`` and every code-block of a page is in some block that ran."""
    for page in PAGES:
        found = blocks(page)
        text = page.read_text()
        assert text.count(".. code-block:: python") == sum(
            not b.text.startswith(">>>") for b in found
        )
        assert len(re.findall(r"^ *>>> ", text, re.M)) == sum(b.text.count(">>> ") for b in found)
        assert {b.needs for b in found} <= {"", "gpu", "torch", "jax"}


def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command = [*build, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()


def test_every_ptx_function_is_in_the_glossary():
    glossary = (DOCS / "ptx.rst").read_text()
    names = {
        name
        for header in (ROOT / "ptx").glob("*.cuh")
        for name in re.findall(r"^FA_DEVICE .*?(\w+)\(", header.read_text(), re.M)
    }
    assert names
    assert names == set(re.findall(r"``(\w+)``", glossary)) & names
    # and nothing that is no longer there
    terms = re.findall(r"^``.*?(?= \(warp\)$|$)", glossary, re.M)
    assert {name for term in terms for name in re.findall(r"``(\w+)``", term)} == names


def test_names_in_the_glossary_are_in_the_sources():
    """A name in ``literals`` is a word of some source, a path is that of a file."""
    folders = ("cuda_src", "ptx", "fa_cupy", "validation", "tests")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in SOURCES]
    words = {
        word
        for path in files
        if path.name != Path(__file__).name
        for word in [*re.findall(r"\w+", path.read_text()), path.stem]
    }
    names = re.findall(r"``([\w./]+)``", (DOCS / "glossary.rst").read_text())
    paths = [name for name in names if "/" in name]
    assert len(paths) > 10
    assert len(names) > 80
    assert [name for name in paths if not (ROOT / name).exists()] == []
    assert [name for name in names if "/" not in name and name not in words] == []


def test_the_page_names_every_barrier_of_fwd_sm90():
    page = (DOCS / "reading_fwd_sm90.rst").read_text()
    header = (ROOT / "cuda_src/attention/fwd_sm90.cuh").read_text()
    storage = header.partition("struct Storage {")[2].partition("};")[0]
    declared = re.findall(r"^  uint64 (.*);", storage, re.M)
    barriers = {name for line in declared for name in re.findall(r"(\w+)\[", line)}
    table = page.partition("   * - mbarrier\n")[2].partition("\n\n")[0]
    assert barriers == set(re.findall(r"``(\w+)`` \[", table))
    named = re.search(r"enum NamedBarrier : int \{(.*?)\}", header)
    assert named is not None
    table = page.partition("   * - barrier\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"(\w+) =", named[1])) == set(
        re.findall(r"^   \* - ``(\w+)``", table, re.M)
    )


def test_pictures_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(figures)
    sys.path[:] = before
    figures.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "_static").glob("*.svg")}


def test_tables_without_measurements_say_so(monkeypatch):
    pytest.importorskip("validation.report")
    spec = importlib.util.spec_from_file_location("measured", DOCS / "measured.py")
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    monkeypatch.setattr(measured, "results", dict)
    assert "No speed has been measured" in measured.benchmarks()
    assert "No speed of it has been measured" in measured.causal_product()
    assert "No traffic has been measured" in measured.traffic()
    assert "not measured" in measured.planned_cpu()
    rows = [
        {"family": "attention_fwd", "case": "bf16 hd64 full 512x32", "impl": impl, "ms": 1.0,
         "value": speed, "unit": "TFLOP/s", "error": 1e-3, "date": "2000-01-01"}
        for impl, speed in (("fa_cupy", 2.0), ("cudnn", 1.0))
    ]  # fmt: skip
    rows.append({"family": "tiles", "case": "float32 hd64", "impl": "96x128", "ms": 1.0})
    header = {"device": "some device", "date": "2000-01-01T00:00:00Z", "versions": {"numpy": "2"}}
    monkeypatch.setattr(measured, "results", lambda: {"some-device": (header, rows)})
    assert "some device" in measured.benchmarks()
    assert "2.00" in measured.benchmarks()
    assert "No speed of it has been measured" in measured.causal_product()
    case = {"family": "causal_product_fwd", "case": "bf16 E64 4096x8 h16", "unit": "GB/s"}
    rows += [{**row, **case} for row in rows[:2]]
    assert "E64" in measured.causal_product()
    assert "E64" not in measured.benchmarks()
    assert ".. image" not in measured.causal_product()
    assert "96 x 128" in measured.planned_cpu()


@pytest.mark.skipif(os.name == "nt", reason="paths of the repository are POSIX")
def test_pages_are_reached_from_the_index():
    text = (DOCS / "index.rst").read_text()
    for page in PAGES:
        assert page.stem == "index" or re.search(rf"^   {page.stem}$", text, re.M)
