"""The code on every page runs, the pages build without a warning, the pictures can be drawn."""

import doctest
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

import fa_cupy
from fa_cupy.gpu.kernels.registry import ROWS
from fa_cupy.tiled import softmax
from validation import __main__ as commands
from validation.digest import ROOT

DOCS = ROOT / "docs"
NO_PAGES = {"_build", "_templates", "gallery", "generated"}
PAGES = sorted(p for p in DOCS.rglob("*.rst") if not NO_PAGES & set(p.relative_to(DOCS).parts))
CODE_BLOCK = re.compile(
    r"^( *)\.\. code-block:: python\n((?:\1 +:.*\n)*)\n*((?:\1 +.*\n|\n)+)", re.M
)
SOURCES = {".cu", ".cuh", ".ptx", ".py"}
DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1\S.*\n|\1 +.*\n)*", re.M)


def name_of(page):
    return page.relative_to(DOCS).with_suffix("").as_posix()


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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page, ("", "torch", "jax"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.needs == "gpu" for b in blocks(p))], ids=name_of
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


# Words that readers look for, as the search of Sphinx stems them.
SEARCHED = {
    *("alibi", "bandwidth", "blackwel", "cite", "conda", "decod", "determinist", "faq", "gqa"),
    *("licens", "nadaraya", "nan", "notebook", "pad", "softcap", "tf32", "varlen"),
}


@pytest.mark.long
def test_pages_build_without_a_warning(tmp_path):
    """In a copy, as generated pages are written beside the others; recipes are not run."""
    pytest.importorskip("furo")
    pytest.importorskip("sphinx_gallery")
    made = shutil.ignore_patterns("_build", "generated", "__pycache__")
    docs = shutil.copytree(DOCS, tmp_path / "docs", ignore=made)
    for name in ("cuda_src", "fa_cupy", "validation"):
        (tmp_path / name).symlink_to(ROOT / name, target_is_directory=True)
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command = [*build, "-D", "plot_gallery=0", str(docs), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {page.stem for page in (tmp_path / "html/generated/api").glob("*.html")}
    assert {f"fa_cupy.{name}" for name in fa_cupy.__all__ if name != "__version__"} <= names
    recipes = {path.stem for path in (DOCS / "gallery").glob("*.py")}
    assert {p.stem for p in (tmp_path / "html/generated/gallery").glob("*.html")} >= recipes
    index = (tmp_path / "html/searchindex.js").read_text()
    terms = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    found = terms["terms"].keys() | terms["titleterms"].keys()
    assert found >= SEARCHED
    equations = (tmp_path / "html/explain/gradients.html").read_text()
    assert equations.count("<msub><mover>") > 15  # the index of a letter with a bar is at its foot
    assert not re.search(r"<munderover>\s*<mi>", equations)


def test_every_ptx_function_is_in_the_glossary():
    glossary = (DOCS / "explain/ptx.rst").read_text()
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


@pytest.fixture
def kernel_tables(monkeypatch):
    """The module that makes the tables of kernels, as the pages import it."""
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("kernel_tables")


STEMS = [
    path.relative_to(ROOT / "cuda_src").with_suffix("").as_posix()
    for path in sorted((ROOT / "cuda_src").glob("*/*.cu"))
]


def sections(page):
    """Titles of a page, each with the text up to the next one."""
    found = re.split(r"^(.+)\n[-^=]{3,}\n", page.read_text(), flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("stem", STEMS)
def test_every_kernel_has_its_section(stem):
    """Under its name, with the directive that shows where it is."""
    name = stem.rpartition("/")[2]
    texts = [found[name] for page in PAGES if name in (found := sections(page))]
    assert len(texts) == 1, name
    assert texts[0].count(f".. kernel:: {stem}\n") == 1


def test_every_kernel_page_shows_kernels_that_exist():
    shown = [
        stem
        for page in PAGES
        for stem in re.findall(r"^ *\.\. kernel:: (\S+)$", page.read_text(), re.M)
    ]
    assert sorted(shown) == sorted(STEMS)


def barriers_of(stem):
    """mbarriers that the shared memory of a kernel declares: names of uint64 in its structs."""
    paths = [ROOT / f"cuda_src/{stem}{suffix}" for suffix in (".cu", ".cuh")]
    paths += (ROOT / "cuda_src" / stem).glob("*.cuh")
    text = "".join(path.read_text() for path in paths if path.exists())
    members = re.findall(r"^  uint64 ((?:\w+(?:\[\w+\])*,?\s*)+);", text, re.M)
    return {name for line in members for name in re.findall(r"(\w+)(?:\[|,|$|\s)", line)}


BARRIER_TABLES = [
    pytest.param(page, stem, id=stem)
    for page in PAGES
    for stem in re.findall(r"^\.\. barriers:: (\S+)$", page.read_text(), re.M)
]


@pytest.mark.parametrize(("page", "stem"), BARRIER_TABLES)
def test_the_table_of_barriers_is_that_of_the_kernel(kernel_tables, page, stem):
    """Every declared barrier is initialised and described, and its row shows the arrivals."""
    made = kernel_tables.initialised(stem)
    assert set(made) == {
        name for name in barriers_of(stem) if name.endswith(("full", "empty", "started"))
    }
    content = re.search(rf"^\.\. barriers:: {stem}\n\n((?:   .*\n|\n)+)", page.read_text(), re.M)
    shown = kernel_tables.barriers(stem, textwrap.dedent(content[1]).splitlines())
    rows = shown.split("   * - ")[2:]
    assert [re.match(r"``(\w+)``", row)[1] for row in rows] == list(
        dict.fromkeys(re.findall(r"^   (\w+)$", content[1], re.M))
    )
    for row in rows:
        name, arrivals, *others = (cell.strip() for cell in re.split(r"\n     - ", row))
        expression, values = made[name.strip("`")]
        assert expression in arrivals
        assert all(str(value) in arrivals for value in values)
        assert len(others) == 3
        assert all(others)


def test_arrivals_are_evaluated(kernel_tables):
    """For the forward kernel by hand: consumers of 4 warps, 3 producer threads, masks."""
    made = kernel_tables.initialised("attention/fwd_sm90")
    groups = {row.tile_m // 64 for row in ROWS if row.source == "attention/fwd_sm90"}
    assert groups == {2, 3}
    assert made["v_empty"].values == [4 * g for g in sorted(groups)]
    assert made["work_empty"].values == [4 * g + 3 for g in sorted(groups)]
    assert made["k_empty"].values == sorted({4 * g for g in groups} | {128 * 2})


def test_a_description_that_does_not_match_is_an_error(kernel_tables):
    with pytest.raises(LookupError, match="describes"):
        kernel_tables.barriers("attention/fwd_sm90", ["k_full | a | b | c"])
    with pytest.raises(LookupError, match="no definition"):
        kernel_tables.code("attention/fwd_sm90", "no_such_function")
    with pytest.raises(LookupError, match="no variant"):
        kernel_tables.rows_of("attention/no_such_kernel")
    with pytest.raises(LookupError, match="definitions of kNoSuchConstant"):
        kernel_tables.constant("kNoSuchConstant")
    assert kernel_tables.constant("kLargeScore") == "kLargeScore = 8192"


def test_registers_fit_a_multiprocessor(kernel_tables):
    pages = "".join(page.read_text() for page in PAGES)
    stems = re.findall(r"^\.\. registers:: (\S+)$", pages, re.M)
    assert "attention/fwd_sm90" in stems
    for stem in stems:
        assert len(kernel_tables.registers(stem).split("   * - ")) > 2
    shown = kernel_tables.registers("attention/fwd_sm90").split("   * - ")[2:]
    assert [list(map(int, re.findall(r"\d+", row))) for row in shown] == [
        [384, 168, 40, 232],
        [512, 128, 32, 160],
    ]
    for threads, _, producer, consumer in ([384, 168, 40, 232], [512, 128, 32, 160]):
        assert 128 * producer + (threads - 128) * consumer <= 65536


def test_the_page_names_every_named_barrier_of_fwd_sm90(kernel_tables):
    page = (DOCS / "kernels/forward.rst").read_text()
    named = re.findall(r"(\w+) =", kernel_tables.code("attention/fwd_sm90", "NamedBarrier"))
    assert named
    table = page.partition("   * - barrier\n")[2].partition("\n\n")[0]
    assert set(named) == set(re.findall(r"^   \* - ``(\w+)``", table, re.M))


def test_thresholds_of_a_large_lse_are_those_of_the_code(kernel_tables):
    """The numbers of the table, and of the docstring of attention_backward."""
    page = (DOCS / "explain/gradients.rst").read_text()
    table = page.partition(".. _large-lse:")[2].partition(".. code-block")[0]
    text = " ".join(fa_cupy.attention_backward.__doc__.split())
    tiled = softmax.FAR
    kernels = 2**13 * math.log(2)
    assert kernel_tables.constant("kLargeScore") == f"kLargeScore = {2**13}"
    for shown in (table, text):
        assert f"{tiled:,.0f}" in shown
        assert f"{kernels:,.0f}" in shown
    same = [-int(math.log2(tolerance)) for tolerance in softmax._SAME.values()]
    same.append(
        int(kernel_tables.expression_of("", "kLseTolerance").partition("<< ")[2].rstrip(")"))
    )
    assert sorted(same) == [18, 20, 48]
    for power in same:
        assert f"2^{{-{power}}}" in table
        assert f"2**-{power}" in text


def test_the_table_of_validation_has_every_command_and_its_options(capsys):
    page = (DOCS / "explain/validation.rst").read_text()
    rows = page.partition("     - options and requirements\n")[2].partition("\n\n")[0]
    found = dict(re.findall(r"^   \* - ``(\w+)``\n     - .*\n     -(.*)$", rows, re.M))
    assert found.keys() == commands.COMMANDS.keys()
    for name, cell in found.items():
        with pytest.raises(SystemExit, match="0"):
            commands.main([name, "--help"])
        known = capsys.readouterr().out
        for option in re.findall(r"``(--\w+)", cell):
            assert option in known, (name, option)


@pytest.mark.long
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


@pytest.fixture
def measured():
    pytest.importorskip("validation.report")
    spec = importlib.util.spec_from_file_location("measured", DOCS / "measured.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_tables_have_the_days_of_their_own_rows(measured):
    newest = "2000-01-03T00:00:00Z"
    old = ["2000-01-02T05:00:00Z", "2000-01-01T00:00:00Z"]
    assert measured.when([newest], newest, "numpy 2") == "Measured on 2000-01-03 with numpy 2."
    assert measured.when([], newest, "numpy 2") == "Measured on 2000-01-03 with numpy 2."
    assert measured.when(old, newest, "numpy 2") == (
        "Measured from 2000-01-01 to 2000-01-02. Versions on 2000-01-03: numpy 2."
    )
    assert measured.when(old[:1], newest, "numpy 2") == (
        "Measured on 2000-01-02. Versions on 2000-01-03: numpy 2."
    )


def test_tables_without_measurements_say_so(measured, monkeypatch):
    monkeypatch.setattr(measured, "results", dict)
    assert "No speed has been measured" in measured.benchmarks()
    assert "No speed has been measured" in measured.summary()
    assert "No speed of it has been measured" in measured.causal_product()
    assert "No speed of it has been measured" in measured.scores()
    assert "No speed of it has been measured" in measured.decode()
    assert "No speed of it has been measured" in measured.packed()
    assert "No speed of it has been measured" in measured.floats()
    assert "No speed of it has been measured" in measured.dropout()
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
    assert "No speed has been measured" in measured.summary()
    _, family, case = measured.readme.SUMMARY[0]
    for row in rows[:2]:
        row.update(family=family, case=case)
    assert "on some devices, in bfloat16" in measured.summary()
    assert "1 TFLOP/s, cuDNN" in measured.summary()
    assert "     - 2.00\n" in measured.summary()
    assert "No speed of it has been measured" in measured.causal_product()
    case = {"family": "causal_product_fwd", "case": "bf16 E64 4096x8 h16", "unit": "GB/s"}
    rows += [{**row, **case} for row in rows[:2]]
    assert "E64" in measured.causal_product()
    assert "E64" not in measured.benchmarks()
    assert ".. image" not in measured.causal_product()
    case = {"family": "attention_decode", "case": "bf16 hd128 B1 kv8192", "unit": "GB/s"}
    rows += [{**row, **case} for row in rows[:2]]
    assert "kv8192" in measured.decode()
    assert "kv8192" not in measured.benchmarks()
    case = {"family": "attention_packed_bwd", "case": "bf16 hd128 full 64x256"}
    rows += [{**row, **case} for row in rows[:2]]
    assert "64x256" in measured.packed()
    assert "64x256" not in measured.benchmarks()
    assert "96 x 128" in measured.planned_cpu()


def test_pages_are_reached_from_the_index():
    reached, waiting = set(), [DOCS / "index.rst"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for tree in re.findall(r"^\.\. toctree::\n((?:   .*\n|\n)+)", page.read_text(), re.M):
            entries = re.findall(r"^   ([\w/]+)$", tree, re.M)
            written = [entry for entry in entries if not entry.startswith("generated/")]
            waiting += [page.parent / f"{entry}.rst" for entry in written]
    assert reached == set(PAGES)


# The pictures of the pages


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("pictures")


def test_pictures_without_a_browser_say_what_is_missing(pictures, monkeypatch):
    monkeypatch.setattr(pictures, "BROWSERS", ("no-such-browser", "nor-this-one"))
    with pytest.raises(SystemExit, match="no browser: want no-such-browser or nor-this-one on"):
        pictures.main([])


def test_pictures_are_made_and_a_box_that_is_cut_off_is_named(pictures, tmp_path, capsys):
    if not any(map(shutil.which, pictures.BROWSERS)):
        pytest.skip("needs Chromium")
    site = tmp_path / "html"
    site.mkdir()
    wide = "<div style='width: 900px; height: 3em'></div>"
    for name, text in {
        "good": f"<p>words</p><div style='overflow-x: auto'>{wide}</div>",
        "bad": f"<img src='https://example.invalid/x.png'>{wide}"
        f"<section style='overflow-x: hidden'>{wide}</section>",
    }.items():
        (site / f"{name}.html").write_text(f"<!doctype html><article>{text}</article>")
    assert pictures.main(["--pages", str(site), "--out", str(tmp_path / "made")]) == 1
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "bad.html at 1280 px: https://example.invalid/x.png",
        "bad.html at 390 px: div ends at 908 px",
        "bad.html at 390 px: section hides what is in it",
        "bad.html at 390 px: div ends at 908 px",
        "bad.html at 390 px: the page is 908 px wide",
        "bad.html at 390 px: https://example.invalid/x.png",
    ]
    names = [path.name for path in sorted((tmp_path / "made").iterdir())]
    assert names == ["bad-1280.png", "bad-390.png", "good-1280.png", "good-390.png"]


def test_the_entry_to_cite_is_that_of_the_repository():
    text = (DOCS / "citing.rst").read_text()
    entry = (ROOT / "CITATION.cff").read_text()
    (title,) = re.findall(r'^title: "(.*)"$', entry, re.M)
    (version,) = re.findall(r"^version: (\S+)$", entry, re.M)
    assert f"title   = {{{title}}}," in text
    assert f"version = {{{version}}}," in text
