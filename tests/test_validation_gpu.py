"""The staged checks and the benchmark on the GPU, as far as they are quick."""

import dataclasses

import pytest

from validation import bench, cases, stages, store

pytestmark = pytest.mark.gpu


def test_stages_of_the_kernel():
    text, over = stages.report(stages.run(*stages.on_gpu()))
    assert over == 0, text


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bench_on_the_gpu(dtype, tmp_path, monkeypatch):
    case = cases.Dense(dtype, 64, True, 256, 2, 32)
    changed = {"cases": (case,), "burst_ms": 1, "default_impls": ("fa_cupy",)}
    family = dataclasses.replace(bench.FAMILIES["attention_fwd"], **changed)
    monkeypatch.setitem(bench.FAMILIES, "attention_fwd", family)
    out = tmp_path / "bench.json"
    arguments = ["--families", "attention_fwd", "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    assert store.load(out)[1][0]["value"] > 0
