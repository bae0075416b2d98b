"""The recipes of docs/gallery run on a CPU; each checks itself, and has a picture."""

import runpy

import pytest

from validation.digest import ROOT

plt = pytest.importorskip("matplotlib.pyplot")

RECIPES = sorted((ROOT / "docs/gallery").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(path, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)  # which warns where there is no window
    plt.close("all")
    try:
        runpy.run_path(str(path), run_name="__main__")
        assert len(plt.get_fignums()) == 1
    finally:
        plt.close("all")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1
    assert any(letter.isdigit() for letter in printed[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_compares_its_result(path):
    """By an assertion that a reader sees, with a formula of NumPy or SciPy, not with fa_cupy."""
    text = path.read_text()
    assert "\nassert " in text or "\n    assert " in text
    assert text.rstrip().count("plt.show()") == 1
    assert "from fa_cupy import " in text
