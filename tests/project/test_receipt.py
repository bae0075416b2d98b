"""The digest of the GPU path and the receipt that vouches for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa_cupy.gpu.kernels.registry import ROWS
from tests.support.every_run import only
from validation import receipt
from validation.digest import ROOT, TABLE, c_tokens, digest, fingerprints, gpu_tests

LAUNCH = '''"""A module."""
import math
import numpy as np
from fa_cupy.gpu import plan as plans
from fa_cupy.gpu.plan import limit

STEP: int = 3

def f(x: int, *, scale=None) -> str:
    """Do it."""
    text = f"{x!r:>{8}} is {math.pi:.3f}"
    rows: list = [row * STEP for row in np.arange(x) if (last := row)]
    first = plans.fill(rows)
    second = limit(first, last)
    plans.check(first, scale)
    try:
        return text if scale else -1.5e-3  # why
    except ValueError as error:
        def inner(value): return value, error, text
        raise KeyError(inner(second)) from error

class Launch:
    size: int = 4
    other: str

    def run(self, count):
        total = count + self.size
        return total
'''
PLAN = """
def fill(rows): return rows
def check(what, scale): assert what, scale
def limit(x, most): return min(x, most)
"""
ROWS_OF_CPU = "def fill(rows): return [*rows, 1]\n"
PTX = ".version 8.0\n.reg .b32 %r<4>; // registers\nadd.s32 %r1, %r2, -1;\n"
GPU_TESTS = """import pytest
pytestmark = pytest.mark.gpu
def test_one(): assert 1
def test_two(): assert 2
"""
KERNELS = {
    "fwd-d64": {
        "sm_80": {"code": "0a", "registers": 9, "spilled": 0},
        "sm_90a": {"code": "0b", "registers": 9, "spilled": 0},
    },
    "bwd-d64": {"sm_80": {"code": "0c", "registers": 9, "spilled": 0}},
}
PATH = "fa_cupy/gpu/launch.py"


def save(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def tree(tmp_path):
    """A repository in small."""
    save(tmp_path / "cuda_src/attention/fwd.cu", 'extern "C" __global__ void f() {}\n')
    save(tmp_path / "ptx/pack.ptx", PTX)
    save(tmp_path / PATH, LAUNCH)
    save(tmp_path / "fa_cupy/gpu/plan.py", PLAN)
    save(tmp_path / "fa_cupy/gpu/stage.py", "STAGE = 1\n")
    save(tmp_path / "fa_cupy/cpu/attention.py", ROWS_OF_CPU)
    save(tmp_path / "fa_cupy/plot.py", LAUNCH)
    save(tmp_path / "tests/conftest.py", "import pytest\n")
    save(tmp_path / "tests/test_gpu.py", GPU_TESTS)
    save(tmp_path / "tests/test_cpu.py", "def test_nothing(): pass\n")
    save(tmp_path / TABLE, json.dumps({"nvrtc": "13.0.88", "rows": KERNELS}))
    return tmp_path


def edit(tree, path, *changes):
    text = (tree / path).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tree / path).write_text(text)


def edit_and_compare(tree, path, *changes):
    """Return what is said of an edit, having held the digest against it."""
    before = fingerprints(tree)
    edit(tree, path, *changes)
    after = fingerprints(tree)
    said = receipt.changes(before, after)
    assert (digest(after) != digest(before)) == bool(said)
    return said


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("cuda_src/attention/fwd.cu", "f()", "g(int)"),  # its machine code is in the table
        (TABLE, '"fwd-d64"', '"forward-d64"'),
        (TABLE, '"registers": 9', '"registers": 8'),
        (TABLE, "13.0.88", "13.0.89"),
        ("ptx/pack.ptx", " // registers", "\n\n/* registers */"),
        (PATH, "  # why", ""),
        (PATH, '    """Do it."""\n', ""),
        (PATH, "A module.", "The module."),
        (PATH, "(x: int, *, scale=None)", "(\n    x,\n    *,\n    scale=None,\n)"),
        (PATH, " -> str", " -> None"),
        (PATH, "STEP: int = 3", "STEP = 3"),
        (PATH, "rows: list = ", "rows: list\n    rows = "),
        (PATH, "size: int", "size: float"),
        (PATH, "rows", "lines"),
        (PATH, "row", "one"),
        (PATH, "last", "newest"),
        (PATH, "error", "reason"),
        (PATH, "inner", "nested"),
        (PATH, "total", "summed"),
        (PATH, "import math\n", "import math as m, os\n"),
        (PATH, "    first =", "    import threading\n    first ="),
        ("fa_cupy/cpu/attention.py", "1", "2"),
        ("fa_cupy/cpu/attention.py", "fill", "limit"),
        ("fa_cupy/plot.py", "-1.5e-3", "2"),
        ("tests/test_cpu.py", "pass", "assert 1"),
        ("tests/test_gpu.py", "def test_two", "# A comment.\n\n\ndef test_two"),
    ],
)
def test_digest_ignores(tree, path, old, new):
    more = [("math.pi", "m.pi")] if "math as m" in new else []
    assert edit_and_compare(tree, path, (old, new), *more) == []


@pytest.mark.parametrize(
    "edits",
    [
        [("import math", "from math import pi"), ("math.pi", "pi")],
        [("import numpy as np", "import numpy"), ("np.", "numpy.")],
        [("import numpy as np", "from numpy import arange as count_up"), ("np.arange", "count_up")],
        [("import plan as plans", "import plan"), ("plans.", "plan.")],
        [("from fa_cupy.gpu import plan as plans", "import fa_cupy.gpu.plan"),
         ("plans.", "fa_cupy.gpu.plan.")],
        [("from fa_cupy.gpu import plan as plans", "from . import plan"), ("plans.", "plan.")],
        [("gpu.plan import limit", "gpu.plan import limit as most"), ("= limit(", "= most(")],
        [("from fa_cupy.gpu.plan import limit\n", ""), ("= limit(", "= plans.limit(")],
        [("from fa_cupy.gpu.plan import limit\n", ""),
         ("    second", "    from fa_cupy.gpu.plan import limit\n    second")],
        [("import math\n", "from typing import TYPE_CHECKING\nimport math\n"
          "if TYPE_CHECKING:\n    from fa_cupy.gpu import stage\n")],
    ],
    ids=lambda edits: edits[-1][1].strip()[:30],
)  # fmt: skip
def test_digest_ignores_how_things_are_imported(tree, edits):
    assert edit_and_compare(tree, PATH, *edits) == []


@pytest.mark.parametrize("twin", ["", "def fill(rows): return rows[::-1]\n"], ids=["", "twin"])
def test_digest_ignores_where_things_stand(tree, twin):
    """A definition moves to another module, also where one of its name stands in a third."""
    save(tree / "fa_cupy/gpu/twin.py", twin)
    before = fingerprints(tree)
    fill = "def fill(rows): return rows\n"
    edit(tree, "fa_cupy/gpu/plan.py", (fill, ""))
    edit(tree, "fa_cupy/gpu/stage.py", ("STAGE", f"{fill}STAGE"))
    edit(
        tree,
        PATH,
        ("import plan as plans", "import plan as plans, stage"),
        ("plans.fill", "stage.fill"),
    )
    assert receipt.changes(before, fingerprints(tree)) == []
    edit(tree, "fa_cupy/gpu/stage.py", ("return rows", "return rows[1:]"))
    said = receipt.changes(before, fingerprints(tree))
    # Where the name alone does not say which of them is called, the caller has changed as well.
    also = [f"changed since: {PATH}: f"] if twin else []
    assert said == [*also, "changed since: fa_cupy/gpu/stage.py: fill"]


def test_digest_sees_another_definition_of_the_same_name(tree):
    save(tree / "fa_cupy/gpu/twin.py", "def fill(rows): return rows[::-1]\n")
    said = edit_and_compare(tree, PATH, ("import plan as plans", "import plan as plans, twin"),
                            ("plans.fill", "twin.fill"))  # fmt: skip
    assert said == [f"changed since: {PATH}: f"]


def test_digest_sees_a_call_that_goes_to_the_cpu(tree):
    edits = ("import plan as plans", "import plan as plans\nfrom fa_cupy.cpu import attention")
    said = edit_and_compare(tree, PATH, edits, ("plans.fill", "attention.fill"))
    assert said == [f"changed since: {PATH}: f"]


def test_digest_sees_a_fixture_from_elsewhere(tree):
    """Imports do not count, but the fixture that a test gets does."""
    for name in ("one", "two"):
        fixture = f"import pytest\n@pytest.fixture\ndef host(): return {name!r}\n"
        save(tree / f"tests/{name}.py", fixture)
    edit(tree, "tests/test_gpu.py", ("import pytest", "import pytest\nfrom tests.one import host"),
         ("test_one()", "test_one(host)"))  # fmt: skip
    save(tree / "tests/test_other.py", "import pytest, tests.one, tests.two\n@pytest.mark.gpu\n"
         "def test(): 0\n")  # fmt: skip
    said = edit_and_compare(tree, "tests/test_gpu.py", ("tests.one", "tests.two"))
    assert said == ["changed since: tests/test_gpu.py: test_one"]


@pytest.mark.parametrize(
    ("path", "old", "new", "what"),
    [
        ("ptx/pack.ptx", "-1", "-2", "changed module"),
        (PATH, "-1.5e-3", "-1.5e-4", "changed f"),
        (PATH, " is ", " was ", "changed f"),
        (PATH, "scale=None", "scale=0", "changed f"),
        (PATH, "*, scale", "scale", "changed f"),
        (PATH, "count", "number", "changed Launch"),  # a parameter
        (PATH, "math.pi", "math.e", "changed f"),
        (PATH, "plans.fill", "plans.check", "changed f"),
        (PATH, "plan import limit", "plan import fill as limit", "changed f"),
        (PATH, "limit(first, last)", "limit(last, first)", "changed f"),
        (PATH, "import numpy as np", "import cupy as np", "changed f"),
        (PATH, "value, error, text", "value, text, error", "changed f"),
        (PATH, "other: str", "other: str\n    third: int", "changed Launch"),
        (PATH, "other: str", "another: str", "changed Launch"),
        (PATH, "self.size", "self.length", "changed Launch"),
        (PATH, "STEP: int = 3", "STEP: int = 4", "changed STEP"),
        ("tests/test_gpu.py", "pytestmark =", "skipped = False\npytestmark =", "new skipped"),
        ("tests/test_gpu.py", "def test_two(): assert 2\n", "", "gone test_two"),
        (TABLE, '"0b"', '"0d"', "changed fwd-d64 sm_90a"),
        (TABLE, '"sm_80": {"code": "0c"', '"sm_90a": {"code": "0c"', "gone bwd-d64 sm_80"),
    ],
)
def test_digest_sees(tree, path, old, new, what):
    said = edit_and_compare(tree, path, (old, new))
    kind, _, name = what.partition(" ")
    assert said[0] == f"{kind} since: {path}: {name}"
    assert len(said) == (2 if "bwd" in what else 1)


def test_digest_sees_the_order_of_statements(tree):
    edits = ("    first = plans.fill(rows)\n    second = limit(first, last)\n"
             "    plans.check(first, scale)\n", "    first = plans.fill(rows)\n"
             "    plans.check(first, scale)\n    second = limit(first, last)\n")  # fmt: skip
    assert edit_and_compare(tree, PATH, edits) == [f"changed since: {PATH}: f"]


def test_digest_sees_a_public_name(tree):
    said = edit_and_compare(tree, PATH, ("def f(", "def launch("))
    assert said == [f"gone since: {PATH}: f", f"new since: {PATH}: launch"]


def test_digest_sees_names_that_a_call_reads(tree):
    """Local variables keep their names where their names are looked at."""
    edit(tree, PATH, ("return total", "return locals()"))
    assert edit_and_compare(tree, PATH, ("total", "summed")) == [f"changed since: {PATH}: Launch"]


def test_digest_sees_how_often_a_definition_stands(tree):
    before = fingerprints(tree)
    save(tree / "fa_cupy/gpu/more.py", "STAGE = 1\n")
    assert receipt.changes(before, fingerprints(tree)) == ["new since: fa_cupy/gpu/more.py: STAGE"]
    after = fingerprints(tree)
    (tree / "fa_cupy/gpu/stage.py").unlink()
    assert receipt.changes(after, fingerprints(tree)) == ["gone since: fa_cupy/gpu/stage.py: STAGE"]


def test_digest_ignores_what_is_no_source(tree):
    before = fingerprints(tree)
    save(tree / "fa_cupy/gpu/__pycache__/launch.cpython-311.pyc", "")
    save(tree / "ptx/.mask.ptx.swp", "")
    (tree / "ptx/pack.ptx").rename(tree / "ptx/mask.ptx")
    assert receipt.changes(before, fingerprints(tree)) == []


def test_digest_is_the_same_in_every_python_version(tmp_path):
    """The value was made with Python 3.10 to 3.13; a syntax tree's own dump differs there."""
    source = LAUNCH + "class A(dict): x: int = 0\nasync def g(*a: int): return {**a, 'é': None}\n"
    source += "def h(x):\n  match x:\n    case [a, *b] | {'c': a, **b}: return f'{a}' 'b' f'{b=}'\n"
    save(tmp_path / TABLE, '{"rows": {}}')
    save(tmp_path / "fa_cupy/a.py", source)
    assert digest(fingerprints(tmp_path))[:16] == "7e6a9d22194031ba"


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ('"a // b" // c', ['"a // b"']),
        ('R"x(a " /* b)x" /* c */', ['R"x(a " /* b)x"']),
        ("'\"' // c", ["'\"'"]),
        ("1'000 + 0x1e-3f", ["1'000", "+", "0x1e-3f"]),
        ("a+ ++b >> c", ["a", "+", "++", "b", ">>", "c"]),
        ("%r1, %p;", ["%", "r1", ",", "%", "p", ";"]),
        ("f<<<1, 2>>>(x)", ["f", "<<<", "1", ",", "2", ">>>", "(", "x", ")"]),
        ("#if A \\\n && B // c\nx", ["\n", "#", "if", "A", "&&", "B", "\n", "x"]),
    ],
)
def test_c_tokens(source, tokens):
    assert c_tokens(source) == tokens


def test_gpu_tests_are_found(tmp_path):
    hook = "def pytest_itemcollected(item): item.add_marker(pytest.mark.gpu)\n"
    fixture = "@pytest.fixture(params=['numpy', pytest.param('cupy', marks=pytest.mark.gpu)])\n"
    sources = {
        "conftest": f"import pytest\n{fixture}def xp(request): return request.param\n",
        "strategies": "from tests import helpers\n",
        "helpers": "",
        "arrays": "import pytest\nBOTH = [pytest.param(0, marks=pytest.mark.gpu)]\n",
        "test_fixture": "def test_it(xp): pass\n",
        "test_own_fixture": "import numpy\n@pytest.fixture\ndef xp(): return numpy\n"
        "def test_it(xp): pass\n",
        "test_shared": "from tests.arrays import BOTH\n",
        "test_marked": "import pytest\nfrom .strategies import problems\n@pytest.mark.gpu\n"
        "def test_it(): pass\n",
        "test_text": "NAME = 'pytest.mark.gpu'\nfrom hypothesis import strategies\n",
        "test_cpu": "from fa_cupy import reference\n@pytest.mark.slow\ndef test(): 0\n",
        "reference": "",
        "gpu/conftest": f"import pytest\n{hook}",
        "gpu/test_folder": "from tests.support import plans\nfrom ..support.draw import x\n",
        "gpu/deep/test_deep": "import tests.support.bits\ndef test_it(): pass\n",
        "support/__init__": "",
        "support/plans": "",
        "support/draw": "",
        "support/bits": "",
        "support/unused": "",
        "api/conftest": "",
        "api/test_fixture": "from ..strategies import problems\ndef test_it(xp): pass\n",
        "cpu/conftest": "",
        "cpu/test_folder": "from tests.support import unused\ndef test_it(): pass\n",
    }
    for name, source in sources.items():
        save(tmp_path / f"tests/{name}.py", source)
    found = {"conftest", "strategies", "helpers", "arrays", "test_fixture", "test_shared"}
    found |= {"test_marked", "gpu/conftest", "gpu/test_folder", "gpu/deep/test_deep"}
    found |= {f"support/{name}" for name in ("__init__", "plans", "draw", "bits")}
    found |= {"api/conftest", "api/test_fixture"}
    assert gpu_tests(tmp_path) == {f"tests/{name}.py" for name in found}


PRINTS = {"fa_cupy/gpu/launch.py": {"f": "0123"}}


def a_run(**tests):
    run = {
        "date": "2026-01-02T03:04:05+00:00",
        "digest": digest(PRINTS),
        "definitions": PRINTS,
        "code": {"compared": True, "changes": []},
        "environment": {"device": "NVIDIA H200", "nvrtc": "13.0"},
        "tests": {
            "passed": {"tests/test_gpu.py::test_it": 3},
            "failed": [],
            "skipped": {"tests/test_gpu.py::test_two": "needs two devices"},
            "hypothesis": {"tests/test_gpu.py::test_it": 2000},
            "left_out": 0,
            "whole": True,
            **tests,
        },
        "sanitizer": {"tools": {"memcheck": {"ran": True, "errors": 0}}},
    }
    return run


BY_FILES = {**a_run(), "files": {"ptx/mma.cuh": "0123"}}
del BY_FILES["definitions"], BY_FILES["code"]


def sealed(run):
    return {"run": run, "seal": receipt._seal(run)}


def test_receipt_of_this_tree_is_accepted(tmp_path, capsys):
    path = save(tmp_path / "receipt.json", json.dumps(sealed(a_run())))
    assert receipt.check(path, PRINTS, strict=True) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H200" in said
    assert "3 tests passed, 1 skipped, 2000 hypothesis examples; " in said
    assert "machine code as in the table; memcheck clean" in said


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"failed": ["tests/test_gpu.py::test_bad"]}, "failed: tests/test_gpu.py::test_bad"),
        ({"passed": {}}, "no GPU test passed"),
        ({"left_out": 4}, "4 GPU tests were left out by options"),
        ({"whole": False}, "the run was cut short, or covered only part of tests/"),
    ],
)
def test_a_run_that_is_no_pass_is_refused(tests, why):
    assert receipt.problems(sealed(a_run(**tests)), PRINTS) == [why]


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ({"memcheck": {"ran": True, "errors": 2}}, ["memcheck: 2 errors"]),
        ({"racecheck": {"ran": True}}, ["racecheck: None errors"]),
        ({"memcheck": {"ran": False, "why": "device not supported"}}, []),
        ({}, ["no sanitizer reported"]),
    ],
)
def test_sanitizer_findings_are_refused(tools, why):
    assert receipt.problems(sealed(a_run() | {"sanitizer": {"tools": tools}}), PRINTS) == why


def test_a_run_of_other_machine_code_than_the_table_has_is_refused():
    code = {"compared": True, "changes": ["changed  fwd-d64 sm_90a: 9 registers"]}
    (why,) = receipt.problems(sealed(a_run() | {"code": code}), PRINTS)
    assert why == "not in the table: changed  fwd-d64 sm_90a: 9 registers"


def test_a_run_with_another_compiler_is_accepted_with_a_warning(tmp_path, capsys):
    run = a_run() | {"code": {"compared": False, "why": "the table was made with NVRTC 12.0.1"}}
    path = save(tmp_path / "receipt.json", json.dumps(sealed(run)))
    assert receipt.check(path, PRINTS, strict=True) == 0
    said = capsys.readouterr().out
    assert "WARNING, the table was made with NVRTC 12.0.1" in said
    assert "machine code NOT COMPARED" in said


def test_machine_code_is_held_against_the_table(tmp_path, monkeypatch):
    sass = pytest.importorskip("validation.sass")
    monkeypatch.setattr(sass, "TABLE", save(tmp_path / "sass.json", (ROOT / TABLE).read_text()))
    monkeypatch.setattr(sass, "version", lambda: "13.0.88")
    _, rows = sass.read(sass.TABLE)
    row = next(row for row in ROWS if "sm_80" in row.targets)
    changed = {**rows, row.name: {"sm_80": {"code": "0", "registers": 1, "spilled": 0}}}
    monkeypatch.setattr(sass, "compiled_rows", lambda chosen: changed)
    found = receipt.machine_code()
    assert found["compared"]
    assert f"changed  {row.name} sm_80" in found["changes"][0]
    monkeypatch.setattr(sass, "version", lambda: "12.0.1")
    assert not receipt.machine_code()["compared"]


def test_tests_that_failed_count_when_all_of_them_pass_again():
    """Of the same tree; the record keeps their names."""
    first = {
        "definitions": {"a.py": {"f": "1"}}, "passed": {"t::good": 3, "t::bad": 1},
        "failed": ["t::bad[x]", "t::worse"], "whole": True,
    }  # fmt: skip
    again = {"definitions": first["definitions"], "passed": {"t::bad": 1, "t::worse": 1}}
    found = receipt.with_second_run(first, again)
    assert found["passed"] == {"t::good": 3, "t::bad": 2, "t::worse": 1}
    assert (found["failed"], found["again"]) == ([], first["failed"])
    for other in (
        {},
        again | {"definitions": {}},
        again | {"failed": ["t::worse"]},
        again | {"passed": {"t::bad": 2}},
        again | {"passed": {"t::bad": 1}},
        again | {"passed": {"t::bad": 1, "t::good": 1}},
    ):
        assert receipt.with_second_run(first, other) == first
    whole = first | {"failed": []}
    assert receipt.with_second_run(whole, again) == whole


def test_files_that_could_not_be_imported_count_when_all_of_them_pass_again():
    """They may have been mended, since no test that passed has used them."""
    bad, good = "tests/test_a.py", "tests/test_b.py"
    first = {
        "definitions": {bad: {"f": "1"}, good: {"g": "1"}}, "passed": {f"{good}::good": 3},
        "hypothesis": {f"{good}::good": 20}, "skipped": {}, "whole": True,
        "failed": [f"{bad} (collection)", f"{good}::bad[x]"],
    }  # fmt: skip
    again = {
        "definitions": {bad: {"f": "2"}, good: {"g": "1"}}, "skipped": {f"{bad}::other": "why"},
        "passed": {f"{bad}::one": 2, f"{good}::bad": 1}, "hypothesis": {f"{bad}::one": 5},
        "arguments": [f"{good}::bad[x]", bad],
    }  # fmt: skip
    assert receipt.failed_in(first) == ([f"{good}::bad[x]"], [bad])
    found = receipt.with_second_run(first, again)
    assert found["passed"] == {f"{good}::good": 3, f"{bad}::one": 2, f"{good}::bad": 1}
    assert found["hypothesis"] == {f"{good}::good": 20, f"{bad}::one": 5}
    assert found["definitions"] == again["definitions"]
    assert (found["failed"], found["again"]) == ([], first["failed"])
    assert found["skipped"] == again["skipped"]
    for other in (
        again | {"definitions": {bad: {"f": "2"}, good: {"g": "2"}}},
        again | {"arguments": [f"{good}::bad[x]"]},
        again | {"passed": {f"{bad}::one": 2}},
        again | {"left_out": 1},
        again | {"failed": [f"{bad} (collection)"]},
    ):
        assert receipt.with_second_run(first, other) == first
    alone = first | {"failed": [f"{bad} (collection)"]}
    assert receipt.with_second_run(alone, again) == alone  # it has a test too many
    assert receipt.with_second_run(alone, again | {"passed": {}})["failed"] == []


def test_edited_stale_and_missing_receipts_are_refused(tmp_path, capsys):
    edited = sealed(a_run(failed=["tests/test_gpu.py::test_bad"]))
    edited["run"]["tests"]["failed"] = []
    cases = {
        json.dumps(edited): "edited by hand",
        json.dumps(
            sealed(a_run() | {"definitions": {PATH: {"f": "4567"}}})
        ): f"changed since: {PATH}: f",
        json.dumps(sealed(BY_FILES)): "recorded by files",
        json.dumps({}): "no receipt",
        "{": "no receipt",
    }
    for text, why in cases.items():
        path = save(tmp_path / "receipt.json", text)
        assert receipt.check(path, PRINTS, strict=True) == 1
        assert "ERROR" in capsys.readouterr().out
        assert receipt.check(path, PRINTS, strict=False) == 0
        said = capsys.readouterr().out
        assert "WARNING" in said
        assert why in said
    assert receipt.check(tmp_path / "none.json", PRINTS, strict=True) == 1


def test_pending_mark_passes_loudly_and_the_next_run_clears_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "results/receipt.json"
    with pytest.raises(SystemExit):
        receipt.mark_pending(path, " ")
    assert not path.exists()
    receipt.mark_pending(path, "no GPU could be had")
    assert receipt.check(path, PRINTS, strict=True) == 0
    said = capsys.readouterr().out
    assert "NO GPU HAS SEEN THIS TREE" in said
    assert "no GPU could be had" in said

    prints = {"tests/test_gpu.py": {"test_it": "0123"}}
    tests = a_run()["tests"] | {"definitions": prints}
    save(tmp_path / "run/tests.json", json.dumps(tests))
    save(tmp_path / "run/sanitizer.json", json.dumps(a_run()["sanitizer"]))
    monkeypatch.setattr(receipt, "environment", a_run()["environment"].copy)
    monkeypatch.setattr(receipt, "machine_code", a_run()["code"].copy)
    monkeypatch.setattr(receipt, "fingerprints", prints.copy)
    assert receipt.main(["write", str(tmp_path / "run"), str(path)]) == 0
    assert receipt.check(path, prints, strict=True) == 0
    assert "current" in capsys.readouterr().out
    assert digest(prints) == json.loads(path.read_text())["run"]["digest"]

    receipt.mark_pending(path, "kernel changed")
    assert receipt.problems(json.loads(path.read_text()), prints) == []


def test_a_mark_needs_nothing_installed():
    """`make receipt-pending` uses an interpreter without the packages of the tests."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from validation import receipt"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.fixture(scope="module")
def tree_prints():
    """The fingerprints of the whole tree, which take seconds."""
    return fingerprints()


@pytest.mark.long
def test_write_refuses_tests_that_the_digest_does_not_see(tmp_path, monkeypatch, tree_prints):
    monkeypatch.setattr(receipt, "fingerprints", lambda: tree_prints)
    save(tmp_path / "tests.json", json.dumps({"passed": {"tests/nowhere.py::test_it": 1}}))
    monkeypatch.setattr(receipt, "environment", dict)
    with pytest.raises(SystemExit, match=r"tests/nowhere\.py"):
        receipt.write(tmp_path, tmp_path / "receipt.json")


CUT = """
import os, pytest

@pytest.mark.gpu
def test_good(): pass

@pytest.mark.gpu
def test_bad(): assert 0

@pytest.mark.gpu
def test_end(): os._exit(1)
"""
CHECKS = """
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2])
@settings(max_examples=7, database=None)
@given(x=st.integers())
def test_good(n, x): pass

@pytest.mark.gpu
def test_bad(): assert 0

@pytest.mark.gpu
def test_away(): pytest.skip("one device")

@pytest.fixture
def broken(): raise ValueError

@pytest.mark.gpu
def test_broken(broken): pass

def test_cpu(): pass
"""


IN_TWO_PROCESSES = ["-p", "xdist.plugin", "-n", "2"]


def recorded(folder, options=()):
    """Run the tests of a folder as those of a GPU are run; return what is recorded."""
    out = folder / "tests.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    for plugin in ("_hypothesis_pytestplugin", "tests.support.receipt_plugin"):
        command += ["-p", plugin]
    command += ["--receipt", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.long
def test_plugin_records_a_run_that_is_cut(tmp_path):
    save(tmp_path / "pytest.ini", "[pytest]\ntestpaths = checks\nmarkers = gpu\n")
    save(tmp_path / "checks/test_gpu.py", CUT)
    record = recorded(tmp_path)
    assert record["failed"] == ["checks/test_gpu.py::test_bad"]
    assert record["passed"] == {"checks/test_gpu.py::test_good": 1}
    assert not record["whole"]
    said = (tmp_path / "tests.failures.txt").read_text()
    assert said.startswith("==== checks/test_gpu.py::test_bad")
    assert "assert 0" in said
    assert (tmp_path / "tests.running.txt").read_text() == "checks/test_gpu.py::test_end"


@pytest.mark.long
@pytest.mark.parametrize("options", only([[], IN_TWO_PROCESSES], IN_TWO_PROCESSES), ids=" ".join)
def test_plugin_records_what_cannot_be_collected(tmp_path, options):
    save(tmp_path / "pytest.ini", "[pytest]\ntestpaths = checks\nmarkers = gpu\n")
    save(tmp_path / "checks/test_gpu.py", "import no_such_module\n")
    record = recorded(tmp_path, options)
    assert record["failed"] == ["checks/test_gpu.py (collection)"]
    said = (tmp_path / "tests.failures.txt").read_text()
    assert said.startswith("==== checks/test_gpu.py (collection)\n")
    assert said.count("==== ") == 1
    assert "No module named 'no_such_module'" in said


@pytest.mark.long
@pytest.mark.parametrize(
    "options", only([[], IN_TWO_PROCESSES, ["-k", "good"]], IN_TWO_PROCESSES), ids=" ".join
)
def test_plugin_records_a_run(tmp_path, options, tree_prints):
    save(tmp_path / "pytest.ini", "[pytest]\ntestpaths = checks\nmarkers = gpu\n")
    save(tmp_path / "checks/test_gpu.py", CHECKS)
    save(tmp_path / "checks/test_away.py", "import pytest\npytest.importorskip('no_such_module')\n")
    record = recorded(tmp_path, options)
    partial = "-k" in options
    where = "checks/test_gpu.py::"
    assert record["passed"] == {where + "test_good": 2}
    assert record["hypothesis"] == {where + "test_good": 14}
    assert record["whole"]
    assert record["left_out"] == (3 if partial else 0)
    assert record["definitions"] == tree_prints
    assert record["arguments"] == ["checks"]
    if not partial:
        assert record["failed"] == [where + "test_bad", where + "test_broken (setup)"]
        assert list(record["skipped"]) == ["checks/test_away.py", where + "test_away"]
        assert "one device" in record["skipped"][where + "test_away"]


@pytest.mark.long
def test_commands(capsys, monkeypatch, tree_prints):
    monkeypatch.setattr(receipt, "fingerprints", lambda: tree_prints)
    assert receipt.main(["digest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == digest(tree_prints)
    assert any(line.endswith("fa_cupy/_attention.py: attention") for line in lines)
    assert any(line.endswith(" sm_90a") for line in lines)
    assert not any("fa_cupy/cpu/" in line for line in lines)
    assert Path(receipt.RECEIPT).parts[0] == "validation"
