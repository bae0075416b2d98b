"""What validation/ does with causal products, as far as it runs without a GPU."""

import dataclasses
import math
import sys

import numpy as np
import pytest

import fa_cupy
from fa_cupy import reference
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.kernels.linear import cost_model, table
from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_state_sm90 import ChunkStateSm90
from fa_cupy.gpu.kernels.linear.sm90_params import DIM_STEPS
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from tests.support.products import draw, gradients
from validation import (
    accuracy,
    bench,
    cases,
    checks,
    families,
    peers,
    product_accuracy,
    product_calls,
    product_peers,
    report,
    sanitize,
    store,
)

TARGET, SMS = "sm_90a", 132
FORWARD = cases.CausalProduct("fp32", 16, 256, 2, 3)
BACKWARD = dataclasses.replace(FORWARD, backward=True)
FACTS = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z"}
by_direction = pytest.mark.parametrize("case", [FORWARD, BACKWARD], ids=["forward", "backward"])


def row(case, impl, value, **more):
    fixed = {"family": "causal_product_fwd", "unit": "GB/s", "error": 1e-3, "date": "1", "ms": 1.0}
    return {**fixed, "case": case, "impl": impl, "value": value, **more}


# ------------------------------------------------------------------------- cases and definitions
def test_bytes_that_have_to_be_moved():
    case = cases.CausalProduct("bf16", 64, 4096, 8, 16)
    assert case.name == "bf16 E64 4096x8 h16"
    assert case.bytes == 4 * 64 * (8 * 16 * 4096) * 2
    assert dataclasses.replace(case, dtype="fp32", backward=True).bytes == 2 * case.bytes * 7 / 4
    names = [case.name for case in cases.CAUSAL_PRODUCT_FWD]
    assert len(set(names)) == len(names) == 10
    assert names == [case.name for case in cases.CAUSAL_PRODUCT_BWD]


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_in_float64_are_the_definition(reverse):
    q, k, v = draw((2, 70, 5), (2, 70, 5), (2, 70, 3), dtype=np.float64)
    want, _ = reference.causal_product(q, k, v, reverse=reverse)
    np.testing.assert_allclose(checks.product64(q, k, v, reverse, chunk=16), want, atol=1e-12)


def test_gradients_in_float64_are_the_definition():
    dout, q, k, v = draw((300, 3), (300, 5), (300, 5), (300, 3), dtype=np.float64)
    pairs = zip(checks.gradients64(dout, q, k, v), gradients(dout, q, k, v), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, atol=1e-11)


@by_direction
def test_check_sees_what_is_wrong(case):
    inputs = product_peers.random_numpy(case, 1)
    check = checks.product_check(case, inputs)
    result = product_peers.fa_cupy()(case, inputs).run()
    assert check(result) < 1e-6
    last = result[-1] if case.backward else result
    last[-1, -1] *= 1.01
    assert check(result) == pytest.approx(0.01, rel=1e-2)
    last[0, 0, 5, 3] = np.nan
    assert check(result) == math.inf


# --------------------------------------------------------------------------------------- the peers
def test_the_chunked_formula():
    case = dataclasses.replace(FORWARD, dtype="fp32", length=3 * product_peers.CHUNK)
    q, k, v = product_peers.random_numpy(case, 1)
    got = product_peers.chunked(q, k, v, np.tril, np.float32)
    assert reference.relative_error(got, checks.product64(q, k, v)) < 1e-6


@by_direction
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_torch_is_right(case, dtype):
    pytest.importorskip("torch")
    case = dataclasses.replace(case, dtype=dtype)
    inputs = product_peers.random_numpy(case, 1)
    call = product_peers.torch_chunk(case, inputs)
    assert checks.product_check(case, inputs)(call.native(call.run())) < (
        5e-3 if dtype == "bf16" else 1e-6
    )


@by_direction
def test_axes_of_fla(case):
    torch = pytest.importorskip("torch")
    inputs = product_peers.random_numpy(case, 1)
    shapes = []

    def forward(q, k, v):
        shapes.append(q.shape)
        qkv = (x.transpose(1, 2) for x in (q, k, v))
        return product_peers.chunked(*qkv, torch.tril, torch.float32).transpose(1, 2)

    call = product_peers.differentiated(case, inputs, forward, swapped=True)
    assert checks.product_check(case, inputs)(call.native(call.run())) < 1e-6
    assert set(shapes) == {(case.batch, case.length, case.heads, case.dim)}


def test_peers_that_are_left_out(monkeypatch):
    inputs = product_peers.random_numpy(FORWARD, 1)
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)
    with pytest.raises(peers.UnavailableError, match=r"fla\.ops\.linear_attn is not installed"):
        product_peers.fla("chunk_linear_attn")(FORWARD, inputs)
    half = dataclasses.replace(FORWARD, dtype="bf16")
    with pytest.raises(peers.UnavailableError, match="float32 only"):
        product_peers.fa_cupy("recurrent")(half, inputs)


# --------------------------------------------------------------------------------------- the bench
@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)
    for name, case in (("causal_product_fwd", FORWARD), ("causal_product_bwd", BACKWARD)):
        changed = {
            "device": "cpu",
            "cases": (case,),
            "inputs": product_peers.random_numpy,
            "burst_ms": 1,
            "rest_ms": 0,
        }
        family = dataclasses.replace(families.FAMILIES[name], **changed)
        monkeypatch.setitem(families.FAMILIES, name, family)


def test_bench_of_products(on_the_cpu, tmp_path, capsys):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--families", "causal_product_fwd,causal_product_bwd", "--rounds", "2"]
    arguments += ["--impls", "fa_cupy,fla_chunk,torch_chunk"]
    assert bench.main([*arguments, "--out", str(out), "--plot", str(picture)]) == 0
    rows = store.load(out)[1]
    assert [(r["family"], r["impl"], r["unit"]) for r in rows] == [
        ("causal_product_fwd", "fa_cupy", "GB/s"),
        ("causal_product_bwd", "fa_cupy", "GB/s"),
    ]
    for found, case in zip(rows, (FORWARD, BACKWARD), strict=True):
        assert found["value"] == pytest.approx(case.bytes / found["ms"] / 1e6)
        assert found["error"] < 1e-6
    shown = capsys.readouterr().out
    assert "fla_chunk left out of some or all cases: fla.ops.linear_attn is not installed" in shown
    assert "torch is not installed" in shown
    if "drawn: " in shown:
        assert [path.name for path in tmp_path.glob("*.png")] == ["bench-causal_product.png"]


def test_what_is_not_there_yet_is_a_failed_row(on_the_cpu, monkeypatch):
    def refuse(*arrays):
        raise NotImplementedError("no kernel for it\nat all")

    monkeypatch.setattr("fa_cupy.causal_product_backward", refuse)
    rows, missing = bench.measure("causal_product_bwd", BACKWARD, ["fa_cupy"], 1)
    assert missing == {"fa_cupy": "NotImplementedError: no kernel for it"}
    assert rows[0]["failed"] == missing["fa_cupy"]
    assert rows[0]["error"] is None


def test_named_algorithms_are_measured_without_gradients_only():
    forward, backward = (families.FAMILIES[f"causal_product_{way}"] for way in ("fwd", "bwd"))
    assert set(forward.impls) - set(backward.impls) == {
        "fa_cupy_recurrent",
        "fa_cupy_low_occupancy",
    }
    for family in (forward, backward):
        assert set(family.default_impls) == set(family.impls)
        assert family.picture == "causal_product"


def test_the_best_peer_of_a_run():
    name = cases.CAUSAL_PRODUCT_FWD[0].name
    rows = [
        row(name, "fa_cupy", 300.0),
        row(name, "fa_cupy_recurrent", 400.0),
        row(name, "fla_chunk", 150.0),
        row(name, "torch_chunk", 100.0),
        row(name, "fla_fused_chunk", 600.0, date="0"),
    ]
    assert report.ratios(rows, {})["best"] == {name: 2.0}
    assert "best" not in report.ratios(rows[:3], {})


def test_peers_of_tf32_have_a_limit_of_their_own():
    name = "fp32 E64 4096x8 h16"
    assert len(report.wrong([row(name, "fa_cupy", 1.0), row(name, "fla_chunk", 1.0)])) == 1
    assert len(report.wrong([row(name, "fla_chunk", 1.0, error=0.1)])) == 1


def test_products_have_a_picture_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(case.name, impl, 100.0 + i, family=family)
        for family in ("causal_product_fwd", "causal_product_bwd")
        for i, case in enumerate(cases.CAUSAL_PRODUCT_FWD)
        for impl in ("fa_cupy", "fla_chunk", "torch_chunk")
    ]
    target = report.draw(rows, FACTS, str(tmp_path / "bench.png"), "causal_product")
    assert target == tmp_path / "bench-causal_product.png"
    assert target.stat().st_size > 10_000


# -------------------------------------------------------------------------------------- accuracy
def test_accuracy_of_products(tmp_path, capsys, monkeypatch):
    out = tmp_path / "accuracy.json"
    arguments = ["--device", "cpu", "--cases", "E64 1000 causal product", "--out", str(out)]
    assert accuracy.main(arguments) == 0
    rows = store.load(out)[1]
    assert len(rows) == len(peers.DTYPES)
    assert {r["family"] for r in rows} == {"accuracy_product"}
    assert all(r["error"] < r["worst"] < 0.05 for r in rows)
    assert "causal product" in capsys.readouterr().out
    monkeypatch.setitem(product_accuracy.ERROR_LIMIT, "fp32", 1e-9)
    assert accuracy.main(arguments) == 1
    assert "at most 1.00e-09; worst " in capsys.readouterr().out


def test_what_has_no_kernel_is_left_out_of_the_sweep(tmp_path, capsys, monkeypatch):
    def refuse(*arrays):
        raise NotImplementedError("no float64 here")

    monkeypatch.setattr("fa_cupy.causal_product", refuse)
    out = tmp_path / "accuracy.json"
    arguments = ["--device", "cpu", "--cases", "E64 1000 causal product", "--out", str(out)]
    assert accuracy.main(arguments) == 2
    assert "fp64 E64 1000 causal product: left out: no float64 here" in capsys.readouterr().out
    assert not out.exists()


def test_the_sweep_of_products():
    names = [case.name for case in product_accuracy.sweep()]
    assert len(set(names)) == len(names) == len(peers.DTYPES) * 2 * 3
    assert set(product_accuracy.ERROR_LIMIT) == set(peers.DTYPES)


# -------------------------------------------------------------------------------------- sanitizers
@pytest.mark.parametrize(("dtype", "dim"), [("bf16", 32), ("fp16", 64), ("fp32", 32)])
def test_the_reduced_set_is_made_of_valid_calls(dtype, dim):
    problems = list(product_calls.problems(dim, 3, wide=True))
    for problem in problems:
        host = product_calls.arrays(peers.DTYPES[dtype], problem)
        results = product_calls.call(problem, host)
        assert not product_calls.wrong(problem, host, results), problem
        assert all(x.dtype == np.float64 for x in results)
    assert {p.function for p in problems} == {
        "causal_product",
        "causal_product_backward",
        "linear_attention",
        "prefix_state",
    }
    forward = [p for p in problems if p.function == "causal_product"]
    for field in ("reverse", "states", "offset", "nan"):
        assert {bool(getattr(p, field)) for p in forward} == {False, True}
    assert {0, 1} < {p.length for p in forward}
    assert len(problems) == len({*problems}) == 17


def test_a_wrong_result_of_the_reduced_set_is_seen():
    for problem in product_calls.problems(32, 0):
        host = product_calls.arrays(peers.DTYPES["fp32"], problem)
        results = product_calls.call(problem, host)
        if results[0].size:
            results[0][..., 0, 0] += np.nan
            assert product_calls.wrong(problem, host, results), problem


@pytest.mark.long
def test_every_row_that_computes_products_is_forced_and_split():
    reached = set()
    for number, forced in enumerate(PRODUCTS):
        itself = product_calls.alone(forced, TARGET)
        if not itself and not isinstance(forced, ChunkStateSm90):  # or of other targets
            continue
        listed = product_calls.problems_of(forced, number, TARGET)
        splits, own = set(), set()
        with product_calls.forced(forced, TARGET):
            for problem in listed:
                if problem.function == "causal_product":
                    dims = problem.qk_dim, problem.v_dim
                    sizes = max(problem.heads), problem.length, *dims
                    choice = cost_model.choose(forced.dtype, *sizes, TARGET, SMS)
                    # Tensor maps walk rows, in steps of 16 bytes.
                    odd = isinstance(forced, ProductSm90Variant) and (
                        not problem.length or any(dim % DIM_STEPS[forced.dtype] for dim in dims)
                    )
                    if itself:
                        assert choice.row == forced or odd
                    reached |= {row for row, _, _ in choice.launches(*dims)}
                    splits.add(choice.segments > 1)
                    own.add(choice.segments > 1 and choice.states is None)
        plain = forced.algorithm in ("recurrent", "low_occupancy")
        assert splits == ({False} if plain else {False, True})
        # Without the states' row blocks sum what lies before their segments themselves.
        assert (True in own) == isinstance(forced, ChunkSm90)
    assert table.PRODUCTS is PRODUCTS
    helpers = (
        "linear/chunk_state_sm80",
        "linear/chunk_state_sm90",
        "linear/chunk_state_fp32_sm80",
        "linear/chunk_state_fp32_sm90",
        "linear/chunk_state_fp64",
        "linear/state_prefix_sum",
    )
    assert reached >= {row for row in PRODUCTS if row.source in helpers and TARGET in row.targets}


@pytest.mark.long
def test_shares_of_the_reduced_set_are_all_of_it(monkeypatch):
    """Each row is some share's own, and a share that misses one of its rows says so."""
    monkeypatch.setattr("fa_cupy.gpu.linear_attention", None, raising=False)
    monkeypatch.setattr(product_calls, "problems", lambda *_: iter(()))
    missed = []
    for share in range(3):
        with pytest.raises(RuntimeError, match="no call reached") as error:
            product_calls.run(TARGET, share, 3)
        missed += str(error.value).removeprefix("no call reached ").split(", ")
    assert sorted(missed) == sorted(row.name for row in PRODUCTS if TARGET in row.targets)


@pytest.mark.parametrize("hidden", ["", "linear/state_prefix_sum"])
def test_the_child_makes_its_calls_and_misses_no_row(hidden, monkeypatch):
    """With NumPy in place of the kernels, which are loaded as the choice says."""
    real = fa_cupy.causal_product

    def solve(q, k, v, **options):
        sizes = max(q.shape[1], k.shape[1]), q.shape[2], q.shape[3], v.shape[3]
        choice = cost_model.choose(q.dtype.name, *sizes, TARGET, SMS)
        for used, _, _ in () if choice is None else choice.launches(*sizes[2:]):
            if used.source != hidden:
                compile.load(used, TARGET, 0)
        return real(q, k, v, **options)

    loaded = []
    monkeypatch.setattr("fa_cupy.gpu.linear_attention", None, raising=False)
    monkeypatch.setattr(compile, "load", lambda row, *rest: loaded.append(row))
    monkeypatch.setattr(peers, "to_device", lambda array: array)
    monkeypatch.setattr(fa_cupy, "causal_product", solve)
    rows = tuple(
        row
        for row in PRODUCTS
        if TARGET in row.targets and (row.dim == 32 or row.source == "linear/state_prefix_sum")
    )
    with product_calls.table(rows):
        if hidden:
            with pytest.raises(RuntimeError, match="no call reached linear_state_prefix_sum"):
                product_calls.run(TARGET)
            return
        calls = product_calls.run(TARGET)
    assert {*loaded} == {*rows}
    served = [row for row in rows if product_calls.alone(row, TARGET)]
    assert calls == sum(len([*product_calls.problems_of(row, 0, TARGET)]) for row in served)
    monkeypatch.setattr(fa_cupy, "prefix_state", lambda *_, **__: np.full(1, np.nan))
    with pytest.raises(RuntimeError, match=r"prefix_state.*the result is wrong"):
        product_calls.run(TARGET)


def test_parts_of_a_tool_add_up():
    ran = {"ran": True, "errors": 0, "calls": 5, "seconds": 2.0, "findings": []}
    bad = {"ran": True, "errors": 2, "calls": 3, "seconds": 9.0, "findings": ["a race"]}
    lost = {"ran": False, "why": "stopped"}
    assert sanitize.together([ran, bad]) == {
        "ran": True,
        "errors": 2,
        "calls": 8,
        "seconds": 9.0,
        "findings": ["a race"],
    }
    assert sanitize.together([ran, lost]) == lost
    assert sanitize.together([bad, lost])["findings"] == ["a race", "stopped"]


def test_sanitize_refuses_a_part_that_it_does_not_know(capsys):
    assert sanitize.main(["--parts", "nothing"]) == 2
    assert "no part 'nothing'" in capsys.readouterr().out
