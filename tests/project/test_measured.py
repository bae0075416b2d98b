"""Tables of the documentation that are made from measurements of several GPUs."""

import importlib
from pathlib import Path


def test_several_gpus_have_a_table_for_each_number(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    measured = importlib.import_module("measured")
    case, product = "bf16 65536x1 h16 d128 causal bwd", "bf16 1000000x1 h16 d128 product fwd"
    rows = [
        {"case": case, "impl": "1 GPU", "ms": 1111.0},  # of another run than the factors
        {"case": product, "impl": "1 GPU", "ms": 1.0},
        {"case": "bf16 32768x1 h16 d128 causal bwd", "impl": "2 GPUs, slowest", "ms": 3.0},
        *(
            {"case": case, "impl": f"2 GPUs {way}", "ms": ms, "speedup": times, "model_ms": 600.0}
            for way, ms, times in (("ring", 617.0, 2.0), ("heads", 1234.0, 1.0))
        ),
        {"case": product, "impl": "4 GPUs scan", "ms": 4.0, "speedup": 0.5},
    ]
    rows = [{**row, "date": "2000-01-01"} for row in rows]
    header = {"device": "some device", "date": "2000-01-01T00:00:00Z", "versions": {"numpy": "2"}}
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    assert "No speed of it has been measured" in measured.ring()
    (tmp_path / "ring-some.json").touch()
    monkeypatch.setattr(measured.store, "load", lambda _: (header, rows))
    text = measured.ring()
    assert [line for line in text.splitlines() if "rubric" in line] == [
        ".. rubric:: 2 x some device", ".. rubric:: 4 x some device",
    ]  # fmt: skip
    cells = [line[7:] for line in text.splitlines() if line.startswith("     - ")]
    assert cells == [
        "One GPU", "Ring (model)", "Heads (model)",
        "1,234 ms", "617 ms, 2.00 x (600)", "1,234 ms, 1.00 x (600)",
        "One GPU", "4 GPUs", "2 ms", "4 ms, 0.50 x",
    ]  # fmt: skip
    assert "* - 65,536, causal, gradients" in text
    assert "* - 1,000,000, forward" in text
    assert "32,768" not in text
