"""The reduced sets and the benchmark on the GPU, as far as they are quick."""

import dataclasses

import pytest

from fa_cupy.gpu.driver import devices
from fa_cupy.gpu.kernels.attention.pairs import fwd_pairs
from fa_cupy.gpu.kernels.attention.splitkv import fwd_splitkv
from validation import (
    backward_calls,
    bench,
    cases,
    families,
    keyed_calls,
    packed_calls,
    pair_calls,
    product_calls,
    store,
)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bench_on_the_gpu(dtype, tmp_path, monkeypatch):
    case = cases.Dense(dtype, 64, True, 256, 2, 32)
    changed = {"cases": (case,), "burst_ms": 1, "default_impls": ("fa_cupy",)}
    family = dataclasses.replace(families.FAMILIES["attention_fwd"], **changed)
    monkeypatch.setitem(families.FAMILIES, "attention_fwd", family)
    out = tmp_path / "bench.json"
    arguments = ["--families", "attention_fwd", "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    assert store.load(out)[1][0]["value"] > 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_bench_of_gradients_on_the_gpu(dtype, tmp_path, monkeypatch):
    case = cases.Dense(dtype, 64, True, 256, 2, 32, backward=True)
    changed = {"cases": (case,), "burst_ms": 1, "default_impls": ("fa_cupy",)}
    family = dataclasses.replace(families.FAMILIES["attention_bwd"], **changed)
    monkeypatch.setitem(families.FAMILIES, "attention_bwd", family)
    out = tmp_path / "bench.json"
    arguments = ["--families", "attention_bwd", "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    assert store.load(out)[1][0]["value"] > 0


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_bench_of_floats_on_the_gpu(way, tmp_path, monkeypatch):
    name = f"attention_float_{way}"
    family = families.FAMILIES[name]
    small = tuple(
        dataclasses.replace(case, length=300, batch=2, heads=3)
        for case in family.cases
        if case.head_dim == 128
    )
    others = "efficient", "torch_plain", "jax_plain"
    impls = tuple(impl for impl in family.impls if impl not in others)
    changed = {"cases": small, "burst_ms": 1, "default_impls": impls}
    monkeypatch.setitem(families.FAMILIES, name, dataclasses.replace(family, **changed))
    out = tmp_path / "bench.json"
    arguments = ["--families", name, "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    rows = store.load(out)[1]
    plain = {case.name for case in small if way == "fwd" and not case.precision}
    assert {(row["case"], row["impl"]) for row in rows} == {
        (case.name, impl) for case in small for impl in ("fa_cupy", "fa_cupy_cublas")
    } | {(name, "plain_cupy") for name in plain}
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_bench_of_dropout_on_the_gpu(way, tmp_path, monkeypatch):
    name = f"attention_dropout_{way}"
    family = families.FAMILIES[name]
    case = dataclasses.replace(family.cases[0], length=512, batch=2, heads=3)
    impls = "fa_cupy", "fa_cupy_plain"
    changed = {"cases": (case,), "burst_ms": 1, "default_impls": impls}
    monkeypatch.setitem(families.FAMILIES, name, dataclasses.replace(family, **changed))
    out = tmp_path / "bench.json"
    arguments = ["--families", name, "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    rows = store.load(out)[1]
    assert {row["impl"] for row in rows} == {*impls}
    assert all(row["value"] > 0 and row["error"] < 0.02 for row in rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bench_of_products_on_the_gpu(dtype, tmp_path, monkeypatch):
    case = cases.CausalProduct(dtype, 64, 256, 2, 3)
    changed = {"cases": (case,), "burst_ms": 1, "default_impls": ("fa_cupy", "fa_cupy_recurrent")}
    family = dataclasses.replace(families.FAMILIES["causal_product_fwd"], **changed)
    monkeypatch.setitem(families.FAMILIES, "causal_product_fwd", family)
    out = tmp_path / "bench.json"
    arguments = ["--families", "causal_product_fwd", "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    rows = store.load(out)[1]
    assert len(rows) == (1 if dtype == "bf16" else 2)
    assert all(row["value"] > 0 for row in rows)


def by_share(shares):
    """Arguments for `pytest.mark.parametrize` over shares of a reduced set.

    Kernels that are not yet compiled take a set minutes, which the processes of a run share out.
    Numbers of shares have no factor with the dtypes of the rows, of which each takes some.
    """
    return {
        "argnames": ("share", "shares"),
        "argvalues": [(share, shares) for share in range(shares)],
        "ids": [f"{share + 1} of {shares}" for share in range(shares)],
    }


@pytest.mark.parametrize(**by_share(13))
def test_the_reduced_set_of_gradients_reaches_every_row(share, shares):
    if devices.current_target() != "sm_90a":
        pytest.skip("the kernels run on sm_90a")
    counts = [len(part.problems) for part in backward_calls.parts("sm_90a")]
    assert sum(counts) == 450
    assert backward_calls.run("sm_90a", share, shares) == sum(counts[share::shares])


@pytest.mark.parametrize(**by_share(5))
def test_the_reduced_set_of_pairs_reaches_every_row(share, shares):
    target = devices.current_target()
    counts = [len(pair_calls.problems(row.dim)) for row in fwd_pairs.VARIANTS]
    assert sum(counts) == 60
    assert pair_calls.run(target, share, shares) == sum(counts[share::shares])


@pytest.mark.parametrize(**by_share(5))
def test_the_reduced_set_of_key_lengths_reaches_every_row(share, shares):
    target = devices.current_target()
    rows = fwd_splitkv.VARIANTS[share::shares]
    counts = [len(keyed_calls.problems(row.dim)) for row in rows if target in row.targets]
    assert keyed_calls.run(target, share, shares) == sum(counts)


@pytest.mark.parametrize(**by_share(11))
def test_the_reduced_set_of_packed_sequences_reaches_every_build(share, shares):
    target = devices.current_target()
    attention = 29 if target == "sm_90a" else 6  # kernels and their dims
    products = len(packed_calls.product_rows(target))
    counts = [10] * attention + [12] * products
    assert len(packed_calls.parts(target)) == len(counts)
    assert packed_calls.run(target, share, shares) == sum(counts[share::shares])


def test_the_reduced_set_of_products_reaches_every_row():
    assert product_calls.run(devices.current_target()) > 200


@pytest.mark.parametrize("name", ["attention_scores_fwd", "attention_scores_bwd"])
def test_bench_of_scores_on_the_gpu(name, tmp_path, monkeypatch):
    family = families.FAMILIES[name]
    small = tuple(
        dataclasses.replace(case, length=512, batch=2, heads=3)
        for case in family.cases
        if case.head_dim == 128
    )
    changed = {"cases": small, "burst_ms": 1, "default_impls": ("fa_cupy",)}
    monkeypatch.setitem(families.FAMILIES, name, dataclasses.replace(family, **changed))
    out = tmp_path / "bench.json"
    arguments = ["--families", name, "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    rows = store.load(out)[1]
    assert {row["case"] for row in rows} == {case.name for case in small}
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.parametrize(
    "name", ["attention_sparse", "attention_bwd_sparse", "mask_pack", "mask_source"]
)
def test_bench_of_masks_on_the_gpu(name, tmp_path, monkeypatch):
    family = families.FAMILIES[name]
    sizes = {"mask_source": {"length": 2048, "keys": 20}}.get(name, {"length": 2048, "heads": 2})
    small = tuple(dataclasses.replace(case, **sizes) for case in family.cases)
    impls = tuple(impl for impl in family.impls if impl != "flex")
    changed = {"cases": small, "burst_ms": 1, "default_impls": impls}
    monkeypatch.setitem(families.FAMILIES, name, dataclasses.replace(family, **changed))
    out = tmp_path / "bench.json"
    arguments = ["--families", name, "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    rows = store.load(out)[1]
    assert {row["case"] for row in rows} == {case.name for case in small}
    assert all(row["value"] > 0 for row in rows)


def test_bench_of_few_queries_on_the_gpu(tmp_path, monkeypatch):
    family = families.FAMILIES["attention_decode"]
    found = [dataclasses.replace(case, batch=min(case.batch, 2), keys=512) for case in family.cases]
    small = tuple({case.name: case for case in found}.values())
    assert len(small) == 14
    changed = {"cases": small, "burst_ms": 1, "default_impls": ("fa_cupy",)}
    monkeypatch.setitem(
        families.FAMILIES, "attention_decode", dataclasses.replace(family, **changed)
    )
    out = tmp_path / "bench.json"
    arguments = ["--families", "attention_decode", "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    rows = store.load(out)[1]
    assert {row["case"] for row in rows} == {case.name for case in small}
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_bench_of_packed_sequences_on_the_gpu(way, tmp_path, monkeypatch):
    name = f"attention_packed_{way}"
    family = families.FAMILIES[name]
    small = tuple(
        dataclasses.replace(
            case, sequences=3, shortest=case.shortest // 8, longest=case.longest // 8
        )
        for case in family.cases
        if case.sequences < 64
    )
    changed = {"cases": small, "burst_ms": 1, "default_impls": ("fa_cupy", "fa_cupy_dense")}
    monkeypatch.setitem(families.FAMILIES, name, dataclasses.replace(family, **changed))
    out = tmp_path / "bench.json"
    arguments = ["--families", name, "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    rows = store.load(out)[1]
    assert {row["case"] for row in rows} == {case.name for case in small}
    assert {row["impl"] for row in rows} == {"fa_cupy", "fa_cupy_dense"}
    assert all(row["value"] > 0 for row in rows)
