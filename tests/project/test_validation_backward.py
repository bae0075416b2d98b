"""What validation/ does with gradients of attention, as far as it runs without a GPU."""

import dataclasses
import sys
import types

import numpy as np
import pytest

import fa_cupy
from fa_cupy import reference
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.kernels.attention import bwd_sm90
from tests.support.every_run import only
from validation import (
    backward_calls,
    backward_peers,
    bench,
    cases,
    checks,
    families,
    peers,
    report,
    store,
    turns,
)

CASE = cases.Dense("fp32", 16, True, 200, 2, 3, backward=True)
FACTS = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z"}


def test_every_case_has_a_best_known_peer():
    known = report.best_peers(FACTS, "attention_bwd")
    assert [*known] == [case.name for case in cases.ATTENTION_BWD]
    assert len(known) == 18


def test_operations():
    for case in cases.ATTENTION_BWD:
        assert case.flops == 2.5 * dataclasses.replace(case, backward=False).flops


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [64, 70, 512])
def test_gradients_in_float64_are_the_definition(causal, chunk):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 200, 8))
    want = reference.attention_backward(dout, q, k, v, is_causal=causal)
    got = checks.attention_gradients64(q, k, v, dout, causal, chunk)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-13)


def test_the_check_looks_at_every_gradient():
    arrays = backward_peers.random_numpy(CASE, 1)
    check = checks.backward_check(CASE, arrays)
    result = backward_peers.fa_cupy(CASE, arrays).run()
    assert check(result) < 1e-6
    for i in range(3):
        wrong = [x.copy() for x in result]
        wrong[i][-1, -1, 3] *= 1.5
        assert check(wrong) > 1e-2
        wrong[i][0, 0, 0, 0] = np.nan
        assert check(wrong) == np.inf


def test_bench_of_gradients(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    changed = {"device": "cpu", "cases": (CASE,), "inputs": backward_peers.random_numpy}
    family = dataclasses.replace(
        families.FAMILIES["attention_bwd"], **changed, burst_ms=1, rest_ms=0
    )
    monkeypatch.setitem(families.FAMILIES, "attention_bwd", family)
    out = tmp_path / "bench.json"
    arguments = ["--families", "attention_bwd", "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    (row,) = store.load(out)[1]
    assert (row["impl"], row["unit"]) == ("fa_cupy", "TFLOP/s")
    assert row["value"] == pytest.approx(CASE.flops / row["ms"] / 1e9)
    assert row["error"] < 1e-6
    assert "torch is not installed" in capsys.readouterr().out


def test_peers_are_on_a_gpu(monkeypatch):
    arrays = backward_peers.random_numpy(CASE, 1)
    monkeypatch.setattr(peers, "module", lambda name: np)
    with pytest.raises(peers.UnavailableError, match="GPU only"):
        backward_peers.torch_sdpa("CUDNN_ATTENTION")(CASE, arrays)


def test_the_package_is_called_with_its_own_results(monkeypatch):
    """The output and its LSE are made once, before anything is timed."""
    made = []
    attention = fa_cupy.attention

    def counted(*args, **options):
        made.append(options)
        return attention(*args, **options)

    monkeypatch.setattr(fa_cupy, "attention", counted)
    call = backward_peers.fa_cupy(CASE, backward_peers.random_numpy(CASE, 1))
    assert len(call.run()) == len(call.run()) == 3
    assert made == [{"is_causal": True, "return_lse": True}]


def test_shares_of_the_reduced_set_are_all_of_it(monkeypatch):
    made = []
    launched = {part.row: part.reached for part in backward_calls.parts("sm_90a")}

    def call(row, shape, options):
        made.append(row)
        for x in launched[row]:
            compile.load(x, "sm_90a", 0)

    monkeypatch.setattr(compile, "load", lambda *of: None)
    monkeypatch.setattr(backward_calls, "_call", call)
    calls = [backward_calls.run("sm_90a", share, 13) for share in range(13)]
    assert sum(calls) == len(made) == 450
    assert {*made} == {*launched}
    kernels = {"bwd_sm90", "bwd_dkdv_sm90", "bwd_dkdv_sm80", "bwd_dkdv_fp32", "bwd_dkdv_fp64"}
    assert {row.kernel for row in made} == kernels | {"bwd_dkdv_fp32_sm90"}
    assert max(calls) < 50  # so that none takes long
    monkeypatch.setattr(backward_calls, "_call", lambda *of: None)
    with pytest.raises(RuntimeError, match=r"no call reached .*attention_bwd_sm90-"):
        backward_calls.run("sm_90a", 0, 13)


@pytest.mark.parametrize("name", only(["fp16", "bf16"], "bf16"))
@pytest.mark.parametrize("dim", only([64, 192], 64))
def test_the_reduced_set_is_made_of_valid_calls(dim, name, monkeypatch):
    count, definition, known = 0, reference.attention_backward, []

    def once(*given, **options):
        """The results of a call are looked at seven times."""
        if not known:
            known.append(definition(*given, **options))
        return known[0]

    monkeypatch.setattr(reference, "attention_backward", once)
    problems = [*backward_calls.problems(dim), *backward_calls.masked_problems(dim)]
    for sparse in (False, True):
        problems += backward_calls.sm80_problems(dim, sparse)
    for shape, options in problems:
        known.clear()
        host = backward_calls.arrays(peers.DTYPES[name], shape)
        more = {name: host.get(name) for name in ("mask", "bias", "sinks")}
        q, k, v, dout = (host[name] for name in ("q", "k", "v", "dout"))
        out, lse = fa_cupy.attention(q, k, v, return_lse=True, **more, **options)
        given = dout, q, k, v, out, lse
        more |= {"dlse": host.get("dlse")}
        found = fa_cupy.attention_backward(*given, **more, **options)
        assert all(np.isfinite(x.astype(float)).all() for x in found)
        assert backward_calls.error(host, found, options) < backward_calls._WRONG / 2
        for i, x in enumerate(found):
            for wrong in (1.1 * x.astype(float), np.full(x.shape, np.nan)):
                if min(shape["q_len"], shape["k_len"]) > 1 and shape.get("mask") != "nothing":
                    results = (*found[:i], wrong, *found[i + 1 :])
                    assert backward_calls.error(host, results, options) > backward_calls._WRONG
        count += 1
    assert count == 27


@pytest.mark.parametrize("dim", only([64, 96, 128], 96))
@pytest.mark.parametrize("stores", only(turns.STORES, turns.STORES[0]))
def test_turns_are_late_in_the_kernel_that_is_timed(stores, dim):
    """The build with pauses has both of them, and is no other kernel for it: nothing spills."""
    row = next(x for x in bwd_sm90.VARIANTS if (x.dtype, x.dim) == ("bfloat16", dim))
    source = turns.source()
    assert [source.count(f"pause[{i}]".encode()) for i in range(3)] == [1, 1, 1]
    row = dataclasses.replace(row, store_threads=stores)
    late = compile.compile_source(row.name, source, "sm_90a", row.defines)
    found = compile.resource_report(late.log)
    assert found == compile.resource_report(compile.compile_variant(row, "sm_90a").log)
    assert (found.stack, found.spill_stores, found.notes) == (0, 0, ())


def test_turns_that_moved_are_missed(monkeypatch):
    monkeypatch.setitem(turns.PLACES, "added late", "no such line")
    with pytest.raises(RuntimeError, match="not there once, but 0 times"):
        turns.source()


@pytest.mark.long
def test_picture_of_turns(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "STATIC", tmp_path)
    _, rows = store.load(store.RESULTS / "turns-h200.json")
    facts = {**FACTS, "card": "GPU-01234567-89ab"}
    assert turns.draw(rows, facts).stat().st_size > 10_000
    lines = turns._lines(rows, rows[0]["case"])
    assert [len(line) for line in lines.values()] == [len(turns.PAUSES)] * 4


def test_the_card_is_named_as_nvidia_smi_does(monkeypatch, tmp_path):
    class Driver:
        cuDeviceGet = staticmethod(lambda device: (0, device))
        cuDeviceGetUuid = staticmethod(lambda _: (0, types.SimpleNamespace(bytes=bytes(range(16)))))

    monkeypatch.setattr("cuda.bindings.driver", Driver)
    assert store.card(0) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    facts = {**FACTS, "card": store.card(0)}
    merged = store.merge(
        tmp_path / "x.json", facts, [{"family": "a", "case": "b", "impl": "c", "value": 1.0}]
    )
    assert merged[0]["card"] == facts["card"]
