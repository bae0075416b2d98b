"""What the README and the docs show runs, and the places that they name exist."""

import re
import shutil
import subprocess

import pytest

from fa_cupy.__main__ import main
from validation import readme
from validation.digest import ROOT

README = ROOT / "README.md"
PAGES = sorted(
    [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    + [
        path
        for path in (ROOT / "docs").rglob("*")
        if path.suffix in {".md", ".rst"} and not {"_build", "generated"} & set(path.parts)
    ]
)
FOLDERS = ("cuda_src/", "docs/", "fa_cupy/", "ptx/", "tests/", "validation/", ".ci/")


def blocks(kind):
    found = re.findall(rf"^```{kind}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(found)


def test_readme_blocks_run():
    """One after the other, as they are read."""
    exec(compile(blocks("python"), str(README), "exec"), {})


def test_the_ptx_of_a_kernel_is_written_as_the_readme_says(capsys):
    commands = re.findall(r"`python -m fa_cupy (emit [^`]*)`", README.read_text())
    assert len(commands) == 2
    listing, ptx = map(str.split, commands)
    assert main(listing) == 0
    name = capsys.readouterr().out.split()[0]
    assert ptx[-1] == "NAME"
    assert main([*ptx[:-1], name]) == 0
    assert ".visible .entry" in capsys.readouterr().out


@pytest.mark.gpu
def test_readme_blocks_run_on_a_gpu(cupy):
    exec(compile("import fa_cupy\n" + blocks("python gpu"), str(README), "exec"), {})


def test_readme_tables_are_those_of_the_results():
    """`python -m validation readme` writes them."""
    text = README.read_text()
    names = re.findall(r"^<!-- (\w+): from validation/results -->$", text, re.MULTILINE)
    assert sorted(names) == sorted(readme.TABLES)
    assert readme.renewed(text) == text


def test_a_number_of_another_run_is_marked(monkeypatch):
    def row(impl, date):
        return {"family": "f", "case": "c", "impl": impl, "value": 1234.0, "date": date}

    rows = [row("fa_cupy", "b"), row("peer", "a"), row("fast", "b") | {"value": 2000.0}]
    monkeypatch.setattr(readme.store, "load", lambda path: ({}, rows))
    found = readme.Results("some")
    assert found.cell("f", "c", "fa_cupy") == "1,234"
    assert found.cell("f", "c", "peer") == "1,234 †"
    assert found.cell("f", "c", "peer", "fast") == "2,000"
    assert found.cell("f", "other", "fa_cupy") == "-"
    assert found.mean("f", "fast") == pytest.approx((1, 0.617, 0.617))


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_what_make_test_takes_and_skips_is_said_before():
    """As the README has it."""
    said = subprocess.run(
        ["make", "--silent", "announce"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    minutes = re.findall(r"(\d+) minutes on two", said + README.read_text())
    assert len(minutes) == 2
    assert len({*minutes}) == 1
    for word in ("g++", "PyTorch", "JAX"):
        assert word in said
        assert word in README.read_text()


def test_readme_gives_the_two_commands_first():
    commands = re.search(r"```sh\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert re.findall(r"^make (\w+)", commands, re.MULTILINE) == ["demo", "test"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_places_exist(page):
    """Files of this project in backquotes or links, and the targets of `make`."""
    text = page.read_text()
    names = re.findall(r"`+([\w./*-]+)`+", text) + re.findall(r"\]\(([\w./-]+)\)", text)
    for name in names:
        # Results are there only once something has been measured.
        if name.startswith(FOLDERS) and not name.startswith("validation/results/"):
            assert list(ROOT.glob(name.rstrip("/"))), name
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"`make ([a-z-]+)", text)} <= targets


def test_command_line_in_the_readme_exists():
    from fa_cupy.__main__ import COMMANDS

    named = set(re.findall(r"`python -m fa_cupy (\w+)", README.read_text()))
    assert named <= set(COMMANDS)
