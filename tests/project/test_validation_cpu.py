"""What validation/ does with small calls on the CPU: cases, checks, the bench, pictures, tables."""

import dataclasses
import importlib.util
import math
import sys

import numpy as np
import pytest
import threadpoolctl

from fa_cupy import BitMask, reference
from validation import (
    bench,
    cases,
    cpu_peers,
    families,
    peers,
    readme,
    report,
    small_multiples,
    store,
    timing,
)
from validation.cases import CpuCall
from validation.digest import ROOT

FACTS = {"device": "cpu", "cpu": "Some", "cores": 2, "date": "2026-01-02T03:04:05Z"}
FACTS |= {"openblas": "Haswell", "versions": {"numpy": "2"}}
# One of each kind, and of each way to be different.
TINY = (
    CpuCall("attention", (8, 8)),
    CpuCall("attention", (1, 2, 48, 8), causal=True),
    CpuCall("attention", (2, 2, 2, 2, 2, 4, 8)),
    CpuCall("attention", (2, 2, 2, 2, 2, 4, 8), permuted=True),
    CpuCall("gradients", (1, 3, 32, 8)),
    CpuCall("causal_product", (1, 2, 64, 8)),
    CpuCall("causal_product_gradients", (1, 2, 64, 8)),
    CpuCall("linear_attention", (1, 3, 1, 8)),
    CpuCall("decode", (1, 4, 40, 8)),
    CpuCall("decode", (1, 4, 40, 8), "bf16"),
    CpuCall("decode", (1, 4, 40, 8), "fp16"),
    CpuCall("decode", (1, 2, 40, 8), query_heads=6),
    CpuCall("masked", (1, 2, 256, 8), mask="none"),
    CpuCall("masked", (1, 2, 256, 8), mask="blocks 0.5"),
    CpuCall("masked", (1, 2, 256, 8), mask="array 0.05"),
    CpuCall("masked", (50, 4, 8), mask="elements 0.5"),
    CpuCall("from_dense", (50, 4, 4), "bool", mask="elements 0.5"),
)
of_each_case = pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)


def row(case, impl, us, **more):
    fixed = {"family": "cpu_small", "unit": "us", "error": 1e-7, "ms": us and us / 1e3, "date": "1"}
    return {**fixed, "case": case, "impl": impl, "value": us, "openblas": "Haswell", **more}


@pytest.fixture
def measured(monkeypatch):
    spec = importlib.util.spec_from_file_location("measured", ROOT / "docs" / "measured.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------- the cases
def test_names_of_cases():
    names = [case.name for case in cases.CPU_SMALL]
    assert len(set(names)) == len(names) == 48
    assert {
        "fp32 attention 8x8",
        "fp32 attention 1x8x512x64 causal",
        "fp32 decode 1x8x8192x128 32-heads",
        "bf16 decode 1x32x8192x128",
        "fp32 masked 1x4x4096x64 blocks-0.05",
        "bool from_dense 100000x4x4 elements-0.5",
        "fp32 attention 2^16x4x8 permuted",
    } <= set(names)
    assert {name.split()[0] for name in names} <= report.ERROR_LIMIT.keys()


@of_each_case
def test_implementations_are_right(case):
    arrays = cpu_peers.random_numpy(case, 1)
    check = cpu_peers.check(case, arrays)
    ran = []
    for name, prepare in cpu_peers.IMPLS.items():
        try:
            call = prepare(case, arrays)
        except peers.UnavailableError:
            continue
        error = check(call.native(call.run()))
        assert error <= report.ERROR_LIMIT[case.dtype] / 4, name
        ran.append(name)
    assert ran[0] == "fa_cupy"
    assert ("numpy" in ran) == (case.kind != "from_dense")
    assert ("numpy_checked" in ran) == (case.kind == "attention" and not case.permuted)


@of_each_case
def test_checks_see_what_is_wrong(case):
    arrays = cpu_peers.random_numpy(case, 1)
    check = cpu_peers.check(case, arrays)
    result = cpu_peers.fa_cupy(case, arrays).run()
    if case.kind == "from_dense":
        assert check(~result) == math.inf
        return
    last = result[-1] if isinstance(result, tuple) else result
    last[..., -1, :] += 1  # of every matrix, the last row
    assert check(result) > report.ERROR_LIMIT[case.dtype]
    last[..., -1, -1] = np.nan
    assert check(result) == math.inf


def test_the_check_looks_at_the_head_of_keys_that_a_query_shares():
    case = CpuCall("decode", (1, 2, 40, 8), query_heads=6)
    q, k, v = arrays = cpu_peers.random_numpy(case, 1)
    want, _ = reference.attention(q.astype(float), k.repeat(3, 1), v.repeat(3, 1))
    check = cpu_peers.check(case, arrays)
    assert check(want.astype(np.float32)) < 1e-6
    other, _ = reference.attention(q.astype(float), np.tile(k, (1, 3, 1, 1)), v.repeat(3, 1))
    assert check(other.astype(np.float32)) > 0.1


def test_masks_have_the_density_and_the_shape_that_their_names_say():
    def mask(case):
        return cpu_peers.random_numpy(case, 1)[-1]

    many = mask(CpuCall("masked", (5000, 4, 8), mask="elements 0.5"))
    assert many.shape == (5000, 4, 4)
    assert many.mean() == pytest.approx(0.5, abs=0.01)
    one = mask(CpuCall("masked", (1, 2, 512, 8), mask="array 0.05"))
    assert one.shape == (512, 512)
    assert one.mean() == pytest.approx(0.05, abs=0.01)
    blocks = mask(CpuCall("masked", (1, 1, 1024, 8), mask="blocks 0.5"))
    of_blocks = blocks.reshape(8, 128, 8, 128).mean((1, 3))
    assert set(of_blocks.flat) == {0, 1}
    assert of_blocks.mean() == pytest.approx(0.5, abs=0.2)
    same = CpuCall("masked", (1, 2, 512, 8), mask="elements 0.05")
    assert np.array_equal(mask(same), one)


def test_permuted_axes_are_views():
    _, k, v = cpu_peers.random_numpy(CpuCall("attention", (2, 3, 5, 4, 8), permuted=True), 1)
    assert k.shape == v.shape == (5, 3, 2, 4, 8)
    assert not k.flags.c_contiguous
    assert k.transpose(2, 1, 0, 3, 4).flags.c_contiguous


def test_a_mask_is_given_as_its_name_says(monkeypatch):
    given = []
    monkeypatch.setattr("fa_cupy.attention", lambda q, k, v, **options: given.append(options))
    for mask in ("none", "array 0.5", "elements 0.5"):
        case = CpuCall("masked", (3, 4, 8), mask=mask)
        cpu_peers.fa_cupy(case, cpu_peers.random_numpy(case, 1)).run()
    kinds = [type(options["mask"]) for options in given]
    assert kinds == [type(None), np.ndarray, BitMask]


def test_the_fastest_chunk_is_chosen_and_named(monkeypatch):
    times = {"chunks of 16 rows": 3.0, "chunks of 32 rows": 1.0, "chunks of 64 rows": 2.0}
    monkeypatch.setattr(timing, "interleaved", lambda calls, sampling: times)
    case = CpuCall("causal_product", (1, 2, 64, 8))
    arrays = cpu_peers.random_numpy(case, 1)
    call = cpu_peers.numpy(case, arrays)
    assert call.variant == "chunks of 32 rows"
    assert cpu_peers.check(case, arrays)(call.run()) < 1e-6


@pytest.mark.parametrize("length", [32, 96, 100])
def test_chunks_fill_the_length(monkeypatch, length):
    seen = []

    def interleaved(calls, sampling):
        seen.extend(calls)
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(timing, "interleaved", interleaved)
    case = CpuCall("causal_product", (1, 2, length, 8))
    if length == 100:
        with pytest.raises(peers.UnavailableError, match="length 100"):
            cpu_peers.numpy(case, cpu_peers.random_numpy(case, 1))
        return
    cpu_peers.numpy(case, cpu_peers.random_numpy(case, 1))
    assert seen == [f"chunks of {n} rows" for n in (16, 32)]


@pytest.mark.parametrize(("length", "chunks"), [(16, []), (48, [16])])
def test_one_chunk_has_no_state(monkeypatch, length, chunks):
    made = []

    def chunked(q, k, v, tril, state_dtype, chunk):
        made.append(chunk)
        return v

    monkeypatch.setattr(cpu_peers.product_peers, "chunked", chunked)
    case = CpuCall("causal_product", (1, 2, length, 8))
    call = cpu_peers.numpy(case, cpu_peers.random_numpy(case, 1))
    made.clear()
    call.run()
    assert made == chunks


# -------------------------------------------------------------------------------------- the timing
def test_samples_are_taken_when_the_process_is_quiet(monkeypatch):
    events, used = [], iter([0.0, 0.010, 0.010, 0.018, 0.018, 0.019])
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: events.append(seconds))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(used))
    timing.wait_until_quiet()
    assert events == [0.01] * 3  # the third took a tenth of a core


def test_a_process_that_is_never_quiet_is_not_waited_for(monkeypatch):
    used = iter(range(1000))
    monkeypatch.setattr(timing, "_LONGEST_REST", 0.05)
    monkeypatch.setattr(timing.time, "process_time", lambda: next(used))
    timing.wait_until_quiet()
    assert 0 < next(used) < 20


def test_the_minimum_of_all_samples(monkeypatch):
    taken = iter([5.0, 4.0, 2.0, 3.0])
    monkeypatch.setattr(timing, "burst", lambda call, calls, pause_ms, warm=True: next(taken))
    sampling = timing.Sampling(burst_ms=1, rounds=3, statistic="minimum")
    assert timing.interleaved({"a": None}, sampling) == {"a": 2.0}
    taken = iter([5.0, 4.0, 2.0, 3.0])
    assert timing.interleaved({"a": None}, timing.Sampling(burst_ms=1, rounds=3)) == {"a": 3.0}


def test_bursts_are_as_long_as_the_least_time_so_far_says(monkeypatch):
    taken, counts = iter([8.0, 0.5, 0.001, 0.1]), []

    def burst(call, calls, pause_ms, warm=True):
        counts.append((calls, warm))
        return next(taken)

    monkeypatch.setattr(timing, "burst", burst)
    timing.interleaved({"a": None}, timing.Sampling(burst_ms=2, rounds=3, warm_ms=4))
    assert counts == [(1, True), (1, False), (4, True), (200, True)]


def test_calls_that_take_long_get_few_rounds(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    counted = []
    monkeypatch.setattr(timing, "burst", lambda *args: counted.append(args) or 1.0)
    timing.interleaved({"a": None}, timing.Sampling(burst_ms=1, rounds=25, seconds=65))
    assert len(counted) == 1 + 6  # the first tells how long a burst is
    counted.clear()
    timing.interleaved({"a": None}, timing.Sampling(burst_ms=1, rounds=25, seconds=5))
    assert len(counted) == 1 + timing.LEAST_ROUNDS


@pytest.mark.parametrize(("share", "rounds"), [(0.0, 20), (0.02, 20), (0.06, 11)])
def test_rounds_end_when_the_least_samples_agree(monkeypatch, share, rounds):
    """Of each implementation: those of the second do in the eleventh round."""
    taken = {"a": [1.0] * 30, "b": [2.0, 1.0, 1.03, 2, 2, 2, 2, 2, 2, 2, 2, 1.05] + [2.0] * 30}
    samples = {name: iter(values) for name, values in taken.items()}
    counted = []

    def burst(call, *_):
        counted.append(call)
        return next(samples[call])

    monkeypatch.setattr(timing, "burst", burst)
    sampling = timing.Sampling(burst_ms=1, rounds=20, agree=share)
    timing.interleaved({"a": "a", "b": "b"}, sampling)
    assert len(counted) == 2 * (1 + rounds)


def test_a_few_samples_that_agree_are_not_enough(monkeypatch):
    counted = []
    monkeypatch.setattr(timing, "burst", lambda *args: counted.append(args) or 1.0)
    timing.interleaved({"a": None}, timing.Sampling(burst_ms=1, rounds=20, agree=0.1))
    assert len(counted) == 1 + 8


# --------------------------------------------------------------------------------------- the bench
@pytest.fixture
def tiny_family(monkeypatch):
    lengths = tuple(CpuCall("attention", (1, 2, n, 8)) for n in (4, 8, 16, 32))
    changed = {"cases": (*lengths, TINY[-1]), "burst_ms": 0.1, "quiet": False, "rounds": 2}
    family = dataclasses.replace(families.FAMILIES["cpu_small"], **changed)
    monkeypatch.setitem(families.FAMILIES, "cpu_small", family)


def test_bench_of_small_calls(tiny_family, tmp_path, capsys, monkeypatch):
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    out, picture, drawn = tmp_path / "bench.json", tmp_path / "bench.png", []
    draw = small_multiples.draw
    monkeypatch.setattr(small_multiples, "draw", lambda *args: drawn.append(args) or draw(*args))
    arguments = ["--families", "cpu_small", "--out", str(out), "--plot", str(picture)]
    assert bench.main(arguments) == 0
    facts, rows = store.load(out)
    assert [row["impl"] for row in rows] == [*("fa_cupy", "numpy", "numpy_checked") * 4, "fa_cupy"]
    assert facts["openblas"] == rows[0]["openblas"]
    for found in rows:
        assert (found["statistic"], found["unit"]) == ("minimum", "us")
        assert found["value"] == pytest.approx(1e3 * found["ms"])
        assert found["error"] < 1e-6
    shown = capsys.readouterr().out
    assert "torch is not installed" in shown
    assert "makes no masks" in shown
    assert len(drawn) == 1
    if "drawn: " in shown.replace("nothing drawn: ", ""):
        assert [path.name for path in tmp_path.glob("*.png")] == ["bench-small.png"]


def test_the_chosen_variant_is_in_the_row(tiny_family, monkeypatch):
    rows, missing = bench.measure("cpu_small", TINY[5], ["fa_cupy", "numpy"], 1)
    assert not missing
    assert "variant" not in rows[0]
    assert rows[1]["variant"].startswith("chunks of ")


def test_the_family_is_whole():
    family = families.FAMILIES["cpu_small"]
    assert family.device == "cpu"
    assert (
        family.default_impls
        == tuple(family.impls)
        == (*("fa_cupy", "torch", "jax", "numpy", "numpy_checked"),)
    )
    assert family.statistic == "minimum"
    assert {other.statistic for other in families.FAMILIES.values() if other is not family} == {
        "median"
    }
    assert family.value(family.cases[0], 0.25) == 250
    other = families.FAMILIES["attention_cpu"]
    assert other.value(other.cases[0], 100.0) == other.cases[0].flops / 1e8


def test_kernels_of_openblas_are_named(monkeypatch):
    libraries = [
        {"filepath": "/a/scipy_openblas32/lib/libscipy_openblas.so", "architecture": "Haswell"},
        {"filepath": "/a/numpy.libs/libscipy_openblas64_.so", "architecture": "SkylakeX"},
        {"filepath": "/a/torch/lib/libgomp.so.1"},
    ]
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: libraries)
    assert store.openblas_core("numpy.libs") == "SkylakeX"
    assert store.header("cpu")["openblas"] == "Haswell, SkylakeX"
    libraries[1]["architecture"] = "Haswell"
    assert store.header("cpu")["openblas"] == "Haswell"
    libraries.clear()
    assert store.header("cpu")["openblas"] == "unknown"


# -------------------------------------------------------------------------------------- the report
def test_ratios_of_times_are_those_of_speeds():
    rows = [row("fp32 a", "fa_cupy", 20.0), row("fp32 a", "torch", 30.0), row("fp32 a", "jax", 10)]
    assert report.ratios(rows, {}) == {
        "torch": {"fp32 a": pytest.approx(1.5)},
        "jax": {"fp32 a": pytest.approx(0.5)},
        "best": {"fp32 a": pytest.approx(0.5)},
    }
    lines = report.table(rows, {}).splitlines()
    assert lines[0].split()[:2] == ["cpu_small", "(us)"]
    assert lines[1].split() == [
        *("fp32", "a", "20.0", "30.0", "10.0", "1.50", "0.50", "0.50", "1.0e-07")
    ]
    assert report.shown(row("fp32 a", "jax", 1234.5), ",") == "1,234"
    assert report.shown(row("bf16 a", "fa_cupy", 0.0, unit="MB")) == "0"


def test_the_fastest_peer_of_a_time_is_the_least(monkeypatch):
    name = "fp32 attention 1x8x64x64"
    rows = [row(name, "fa_cupy", 20.0), row(name, "torch", 30.0), row(name, "numpy", 25.0)]
    rows.append(row(name, "jax", 1.0, date="0"))
    found = readme.summary(lambda family: [("x", r) for r in rows if r["family"] == family])
    assert [line[1:] for line in found.rows] == [["20.0 us", "25.0 us, NumPy", "1.25"]]
    monkeypatch.setattr(readme.store, "load", lambda path: ({}, rows))
    assert readme.Results("x").best("cpu_small", name, ["torch", "numpy"])["impl"] == "numpy"


def test_cases_of_the_summary_are_measured():
    for _, family, case in readme.SUMMARY:
        assert case in [known.name for known in families.FAMILIES[family].cases]


def test_panels_are_calls_at_several_lengths():
    assert small_multiples.place("fp32 attention 1x8x64x64") == (
        ("fp32", "attention", "1, 8, L, 64", ""),
        64,
    )
    assert small_multiples.place("fp32 attention 2^16x4x8 permuted") is None
    rows = [row(case.name, "fa_cupy", 1.0) for case in cases.CPU_SMALL]
    assert [(kind, shape, more) for _, kind, shape, more in small_multiples.panels(rows)] == [
        ("attention", "1, 8, L, 64", ""),
        ("gradients", "1, 8, L, 64", ""),
        ("causal_product", "1, 8, L, 64", ""),
        ("decode", "1, 32, L, 128", ""),
    ]


def test_picture_of_times(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(case.name, impl, 10.0 + case.length)
        for case in cases.CPU_SMALL
        for impl in ("fa_cupy", "torch", "numpy")
    ]
    target = small_multiples.draw(rows, FACTS, str(tmp_path / "sub" / "bench.png"), "small")
    assert target.name == "bench-small.png"
    assert target.stat().st_size > 10_000
    assert small_multiples.draw(rows[:3], FACTS, str(tmp_path / "other.png")) is None


# ---------------------------------------------------------------------------------------- the docs
def test_tables_of_the_docs(measured, monkeypatch):
    monkeypatch.setattr(measured, "results", dict)
    assert "No speed of it has been measured" in measured.cpu_small()
    name = "fp32 causal_product_gradients 1x8x256x64"
    rows = [row(name, "fa_cupy", 2000.0), row(name, "torch", 1000.0, variant="chunks of 64 rows")]
    rows += [row("bf16 decode 1x8x40x8 32-heads", "fa_cupy", 12.34)]
    rows += [row("bool from_dense 9x4x4 elements-0.5", "fa_cupy", None, failed="no")]
    monkeypatch.setattr(measured, "results", lambda: {"cpu": (FACTS, rows)})
    text = measured.cpu_small()
    assert "Some, 2 cores" in text
    assert "OpenBLAS ran its kernels for Haswell." in text
    cells = [
        line.removeprefix("     - ") for line in text.splitlines() if line.startswith("     -")
    ]
    assert cells[:6] == ["fa_cupy", "PyTorch", "times as fast", "2,000", "1,000 (64)", "0.50"]
    assert "* - gradients, (1, 8, 256, 64)\n" in text
    assert "* - (1, 8, 40, 8), bfloat16, 32 heads\n     - 12.3\n" in text
    assert "* - making one, (9, 4, 4), elements 0.5\n     - failed\n" in text
    assert ".. rubric:: Gradients of attention" not in text
    shown = measured.cpu_case("fp32 attention 2^16x4x8 permuted")
    assert shown == r"(2,) \* 16 + (4, 8), permuted"
    assert "cpu_small" not in measured.benchmarks()


def test_every_case_has_a_table(measured):
    kinds = [kind for kinds in measured.CPU_TABLES.values() for kind in kinds]
    assert len(set(kinds)) == len(kinds)
    assert {case.kind for case in cases.CPU_SMALL} == set(kinds)
    assert measured.CPU_COLUMNS.keys() == cpu_peers.IMPLS.keys()
