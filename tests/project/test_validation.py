"""What of validation/ runs without a GPU: names, merging, tables, parsers, the CPU families."""

import dataclasses
import importlib.util
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import attention, reference
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.full_precision import fwd_fp32_sm90
from tests.support import keyed_cases, products
from tests.support.every_run import examples
from tests.support.noting_launcher import NotingLauncher
from validation import __main__ as command
from validation import (
    accuracy,
    attention_calls,
    bench,
    cases,
    checks,
    families,
    fuzz,
    host_time,
    memory,
    peers,
    report,
    sanitize,
    store,
    tiles,
    timing,
    traffic,
)
from validation.digest import ROOT

TINY = cases.Dense("fp32", 16, True, 96, 1, 2)
FACTS = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z"}


def row(case, impl, value, **more):
    fixed = {"family": "attention_fwd", "unit": "TFLOP/s", "error": 1e-3}
    return {**fixed, "case": case, "impl": impl, "ms": 1.0, "value": value, **more}


# --------------------------------------------------------------------------------------- the data
def test_every_dense_case_has_a_best_known_peer():
    known = report.best_peers(FACTS, "attention_fwd")
    assert len(known) == 48
    assert set(known) == {case.name for case in cases.ATTENTION_FWD if case.dtype != "fp32"}


def test_names_and_operations_of_a_case():
    case = cases.Dense("bf16", 128, True, 4096, 4, 16)
    assert case.name == "bf16 hd128 causal 4096x4"
    assert case.flops == 4 * 4 * 16 * 4096**2 * 128 / 2
    assert cases.ATTENTION_CPU[0].name == "fp32 hd64 full 2048x1 h8"


# -------------------------------------------------------------------------------------- the store
def test_rows_are_merged_by_family_case_and_impl(tmp_path):
    path = tmp_path / "bench-x.json"
    store.merge(path, FACTS, [row("a", "fa_cupy", 1.0), row("a", "cudnn", 2.0)])
    later = {**FACTS, "date": "2026-02-02T00:00:00Z"}
    merged = store.merge(path, later, [row("a", "fa_cupy", 3.0, error=math.inf)])
    facts, rows = store.load(path)
    assert facts == later
    assert [(r["impl"], r["value"], r["date"]) for r in rows] == [
        ("fa_cupy", 3.0, later["date"]),
        ("cudnn", 2.0, FACTS["date"]),
    ]
    assert len(merged) == 2
    assert rows[0]["error"] == "inf"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "h200"), ("cpu", "cpu"), ("Tesla V100-SXM2", "tesla-v100-sxm2")],
)
def test_device_names_in_file_names(device, name):
    assert store.slug(device) == name


# ------------------------------------------------------------------------------------- the report
def test_ratios_are_within_one_run_and_reach_the_best_known_peer():
    case = "bf16 hd128 causal 4096x4"
    rows = [
        row(case, "fa_cupy", 300.0, date="1"),
        row(case, "cudnn", 500.0, date="1"),
        row(case, "flash2", 250.0, date="0"),
    ]
    found = report.ratios(rows, {case: {"over_cudnn": 1.2}})
    assert found == {"cudnn": {case: 0.6}, "best": {case: pytest.approx(0.5)}}


def test_table_shows_speeds_ratios_means_and_failures():
    rows = [
        row("bf16 a", "fa_cupy", 200.0),
        row("bf16 a", "flash2", 100.0),
        row("bf16 b", "fa_cupy", 100.0),
        row("bf16 b", "flash2", 200.0),
        row("bf16 b", "cudnn", None, error=None, failed="RuntimeError: no"),
    ]
    lines = report.table(rows, {}).splitlines()
    assert lines[0].split()[2:] == ["fa_cupy", "flash2", "cudnn", "/flash2", "error"]
    assert lines[1].split() == ["bf16", "a", "200", "100", "-", "2.00", "1.0e-03"]
    assert lines[2].split() == ["bf16", "b", "100", "200", "failed", "0.50", "1.0e-03"]
    assert lines[3].split() == ["geometric", "mean", "1.00"]
    assert lines[4].split() == ["lowest", "0.50"]


def test_what_is_wrong_is_named():
    rows = [
        row("bf16 a", "fa_cupy", 1.0, error=0.5),
        row("bf16 a", "cudnn", 1.0, error=math.nan),
        row("bf16 a", "jax", None, error=None, failed="boom"),
        row("bf16 a", "flash2", 1.0),
    ]
    found = report.wrong(rows)
    assert len(found) == 3
    assert "relative error 5.0e-01" in found[0]
    assert "boom" in found[2]


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    names = [case.name for case in cases.ATTENTION_FWD]
    rows = [
        row(name, impl, 100.0 + i) for i, name in enumerate(names) for impl in ("cudnn", "fa_cupy")
    ]
    rows += [{**row(names[0], "cudnn", 50.0), "family": "attention_bwd"}]
    target = report.draw(rows, FACTS, str(tmp_path / "sub" / "bench.png"))
    assert target.stat().st_size > 10_000


# -------------------------------------------------------------------------------------- the bench
@pytest.fixture
def tiny_family(monkeypatch):
    changed = {"cases": (TINY,), "burst_ms": 1}
    family = dataclasses.replace(families.FAMILIES["attention_cpu"], **changed)
    monkeypatch.setitem(families.FAMILIES, "attention_cpu", family)


def test_bench_on_the_cpu(tiny_family, tmp_path, capsys):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--families", "attention_cpu", "--rounds", "2", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(picture)]) == 0
    facts, rows = store.load(out)
    assert facts["device"] == "cpu"
    ours = rows[0]
    assert {"family", "case", "impl", "ms", "value", "unit", "error"} <= ours.keys()
    assert ours["statistic"] == "median"
    assert (ours["impl"], ours["unit"]) == ("fa_cupy", "GFLOP/s")
    assert ours["error"] < 1e-6
    assert ours["value"] == pytest.approx(TINY.flops / ours["ms"] / 1e6)
    assert TINY.name in capsys.readouterr().out


def test_bench_without_torch_says_so(tiny_family, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    out = tmp_path / "bench.json"
    arguments = ["--families", "attention_cpu", "--rounds", "1", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    assert "torch is not installed" in capsys.readouterr().out
    assert [row["impl"] for row in store.load(out)[1]] == ["fa_cupy"]


def test_bench_catches_a_wrong_result(tiny_family, tmp_path, capsys, monkeypatch):
    impls = {"fa_cupy": lambda case, qkv: peers.Call(lambda: qkv[2], lambda x: x, lambda x: x)}
    family = dataclasses.replace(
        families.FAMILIES["attention_cpu"], impls=impls, default_impls=("fa_cupy",)
    )
    monkeypatch.setitem(families.FAMILIES, "attention_cpu", family)
    arguments = ["--families", "attention_cpu", "--rounds", "1", "--out", str(tmp_path / "b.json")]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 1
    assert "relative error" in capsys.readouterr().out


def test_bench_refuses_what_it_does_not_know(capsys, monkeypatch):
    monkeypatch.setattr(store, "gpu_available", lambda: False)
    assert bench.main(["--families", "nothing"]) == 2
    assert bench.main(["--families", "attention_fwd"]) == 2
    assert "needs CuPy and a GPU" in capsys.readouterr().out


def test_check_sees_what_is_not_finite():
    qkv = peers.random_numpy(TINY, 1)
    check = checks.attention_check(TINY, qkv)
    out = peers.fa_cupy(TINY, qkv).run()
    assert check(out) < 1e-6
    out[0, 1, 50, 3] = np.nan
    assert check(out) == math.inf


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_torch_sees_the_same_memory(dtype):
    pytest.importorskip("torch")
    x = np.ones((2, 3, 4), peers.DTYPES[dtype]).swapaxes(0, 1)
    tensor = peers.to_torch(x)
    tensor[2, 1, 3] = 5
    assert x[2, 1, 3] == 5
    assert peers.from_torch(tensor).dtype == x.dtype


def test_rounds_begin_with_another_implementation():
    order = []

    def call(name):
        return peers.Call(lambda: order.append(name), lambda x: x, lambda x: x)

    sampling = timing.Sampling(burst_ms=1e-9, rounds=2)
    found = timing.interleaved({"a": call("a"), "b": call("b")}, sampling)
    assert set(found) == {"a", "b"}
    assert "".join(order) == "aabb" + "aabb" + "bbaa"


def test_calls_rest_before_they_are_timed_where_a_family_asks_for_it(monkeypatch):
    events = []
    monkeypatch.setattr(timing.time, "sleep", lambda s: events.append(f"rest {s:g}"))
    call = peers.Call(lambda: events.append("run"), lambda x: x, lambda x: events.append("wait"))
    timing.burst(call, 2, pause_ms=30)
    once = ["run", "wait"]
    assert events == [*once, "rest 0.03", *once, "rest 0.03", *once]
    events.clear()
    timing.burst(call, 2)
    assert events == [*once, "run", *once]
    events.clear()
    timing.burst(call, 2, warm=False)
    assert events == ["run", *once]
    pauses = {name: family.pause_ms for name, family in families.FAMILIES.items()}
    assert {families.FAMILIES[name].device for name, pause in pauses.items() if pause} == {"cpu"}
    assert pauses["attention_cpu"] == pauses["graphs_cpu"] == families.CPU_PAUSE_MS
    assert [name for name, family in families.FAMILIES.items() if family.quiet] == ["cpu_small"]


# ---------------------------------------------------------------------------------------- tiles
SMALL_TILES = cases.Dense("fp32", 32, False, 1024, 1, 2)


@pytest.mark.parametrize("case", tiles.CASES, ids=tiles.name)
def test_tiles_around_the_planned_one(case):
    found = tiles.candidates(case)
    assert tiles.planned(case) in found
    assert 5 <= len(found) <= 9


def test_tiles_are_measured_and_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiles, "CASES", (SMALL_TILES,))
    ran = set()
    attend = tiles.cpu.tiled_attention.attend

    def spy(steps, problem, x, begin, end, tile_n, more):
        ran.add(f"{end - begin}x{tile_n}")
        return attend(steps, problem, x, begin, end, tile_n, more)

    monkeypatch.setattr(tiles.cpu.tiled_attention, "attend", spy)
    out = tmp_path / "tiles.json"
    assert tiles.main(["--rounds", "1", "--out", str(out)]) == 0
    facts, rows = store.load(out)
    assert facts["device"] == "cpu"
    assert {r["impl"] for r in rows} == ran  # what a row is called is what ran
    assert {(r["family"], r["case"]) for r in rows} == {("tiles", "float32 hd32")}
    assert all(r["value"] == pytest.approx(SMALL_TILES.flops / r["ms"] / 1e6) for r in rows)
    assert "float32 hd32" in capsys.readouterr().out
    assert tiles.main(["--cases", "nothing"]) == 2


def test_a_tile_with_a_wrong_result_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiles, "CASES", (SMALL_TILES,))
    monkeypatch.setattr(checks, "attention_check", lambda case, qkv: lambda out: math.inf)
    assert tiles.main(["--rounds", "1", "--out", str(tmp_path / "tiles.json")]) == 1
    assert "wrong results: float32 hd32" in capsys.readouterr().out


def test_the_optimum_is_that_of_the_newest_run(monkeypatch):
    path = ROOT / "docs" / "measured.py"
    spec = importlib.util.spec_from_file_location("measured", path)
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    plan = tiles.planned(tiles.CASES[0])
    fixed = {"family": "tiles", "case": tiles.name(tiles.CASES[0])}
    found = [
        {**fixed, "impl": "16x16", "ms": 1.0, "date": "2026-01-01"},
        {**fixed, "impl": "96x128", "ms": 2.0, "date": "2026-02-01"},
        {**fixed, "impl": f"{plan.tile_m}x{plan.tile_n}", "ms": 3.0, "date": "2026-02-01"},
    ]
    monkeypatch.setattr(measured, "results", lambda: {"cpu": ({"device": "cpu"}, found)})
    assert measured.fastest(tiles.CASES[0], plan) == ("96 x 128", "1.50")
    assert measured.fastest(tiles.CASES[1], plan) == ("not measured", "-")


# ------------------------------------------------------------------------------------- accuracy
def test_accuracy_sweep_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "accuracy.json"
    assert accuracy.main(["--device", "cpu", "--cases", "hd64 130 ", "--out", str(out)]) == 0
    rows = store.load(out)[1]
    assert len(rows) == len(peers.DTYPES) * len(accuracy.SETTINGS)
    assert "all together" in capsys.readouterr().out


# -------------------------------------------------------------------------------- other programs
MEMCHECK = """========= COMPUTE-SANITIZER
calls made: 12
========= ERROR SUMMARY: 0 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at attention_fwd_sm80+0x90
calls made: 12
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""


def test_reading_a_clean_log():
    found = sanitize.read_log(MEMCHECK, 1.0)
    assert found == {"ran": True, "errors": 0, "calls": 12, "seconds": 1.0, "findings": []}


def test_reading_findings():
    found = sanitize.read_log(RACECHECK, 1.0)
    assert found["errors"] == 3
    assert "Race reported" in found["findings"][0]


def test_findings_say_where_and_how_often():
    one = "========= Barrier error detected. Divergent thread(s) in block.\n"
    text = 3 * (one + "=========     at some_kernel+0x20\n=========     by thread (1,0,0)\n")
    text += one + "=========     at another+0x10\n"
    found = sanitize.read_log(text + RACECHECK, 1.0)["findings"]
    at = "Barrier error detected. Divergent thread(s) in block. at"
    assert found[0] == f"========= {at} some_kernel+0x20 (3 times)"
    assert f"========= {at} another+0x10 (1 times)" in found


def test_a_child_that_stopped_is_not_clean():
    found = sanitize.read_log(MEMCHECK.replace("calls made: 12", "Traceback"), 1.0)
    assert found["errors"] == 1


def test_a_tool_that_could_not_run_says_why():
    found = sanitize.read_log("========= Error: Device not supported\n", 1.0)
    assert found == {"ran": False, "why": "Error: Device not supported"}


def test_sanitize_without_a_gpu_writes_what_the_receipt_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    path = tmp_path / "run" / "sanitizer.json"
    assert sanitize.main(["--json", str(path)]) == 1
    tools = json.loads(path.read_text())["tools"]
    assert set(tools) == set(sanitize.TOOLS)
    assert not any(tool["ran"] for tool in tools.values())


@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("kind", [attention_calls.problems, attention_calls.masked_problems])
def test_the_reduced_set_is_made_of_valid_calls(dim, kind):
    count, states = 0, set()
    for shape, options in kind(dim, 3):
        arrays = attention_calls.arrays(peers.DTYPES["bf16"], shape)
        out = attention(**arrays, **options)
        assert np.isfinite(out.astype(np.float32)).all(), (shape, options)
        assert out.shape[-2:] == (shape["q_len"], shape["v_dim"])
        assert ("mask" in arrays) == (kind is attention_calls.masked_problems)
        if "mask" in arrays:
            attention_calls.as_mask(sent := dict(arrays), arrays, shape)
            again = attention(**sent, **options)
            np.testing.assert_allclose(again.astype(float), out.astype(float), atol=0.02)
            if sent["mask"] is not arrays["mask"]:
                states |= set(sent["mask"].block_states().flat)
        count += 1
    assert count == 13
    assert states == ({0, 1, 2} if "mask" in arrays else set())


@pytest.mark.parametrize("row", fwd_fp32_sm90.VARIANTS, ids=lambda row: row.name)
def test_the_reduced_set_gets_each_row_whose_keys_are_split(row, monkeypatch):
    """Also with few queries; calls that no row of its kernel takes go to one of another kernel."""
    monkeypatch.setattr(forward, "ROWS", (row, *attention_calls.rows_beside(row)))
    forward.select.cache_clear()
    precision = "tf32" if row.parts == 1 else None
    with attention_calls.split_keys(True):
        for q_len, k_len in ((150, 193), (1, 1), (64, 0)):
            q, k = np.zeros((q_len, row.dim), np.float32), np.zeros((k_len, row.dim), np.float32)
            mask = np.ones((q_len, k_len), bool) if row.sparse else None
            problem = attention_problem.attention_problem(q, k, k, None, mask, precision=precision)
            assert forward.for_any_layout(problem, "sm_90a").source == "attention/fwd_fp32"
            traits = Traits(problem, attention_problem.out_view(problem, q.shape, q.strides))
            steps = forward.make_plan(traits, NotingLauncher()).steps
            found = {step.variant for step in steps}
            assert k_len == 0 or found == attention_calls.with_splits(row)
    forward.select.cache_clear()


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"
"","","byte","byte"
"0","gemm","1,000","10"
"1","softmax","2,000","20"
==PROF== Disconnected
"""


def test_reading_ncu():
    assert traffic.parse(NCU.replace("==PROF== Disconnected\n", "")) == {
        "dram__bytes_read.sum": 3000.0,
        "dram__bytes_write.sum": 30.0,
    }
    assert sum(traffic.parse(NCU).values()) == 3030.0
    with pytest.raises(ValueError, match="no table"):
        traffic.parse("==ERROR== no permission")


def test_claims_of_traffic():
    case = traffic.CASES[0]
    claimed, expected = traffic.claims(case, 128), traffic.expected(case)
    assert claimed["plain_cupy"] > claimed["fa_cupy"] > expected["fa_cupy"]
    assert expected["fa_cupy"] == 4 * 4 * 16 * 4096 * 128 * 2


# ------------------------------------------------------------------------------- host and memory
def test_time_of_an_import():
    found = host_time.import_rows(1)[0]
    assert found["unit"] == "us"
    assert found["value"] == pytest.approx(found["ms"] * 1e3)


def test_first_calls_get_caches_of_their_own(monkeypatch):
    seen = []

    def child(code, environment):
        compile(code, "child", "exec")
        seen.append((code, environment))
        return {"s": 0.9, "compile_s": 0.7}

    monkeypatch.setattr(host_time, "_child", child)
    rows = host_time.first_rows()
    names = [row["case"] for row in rows]
    assert names == [
        f"first {what}, {cache} cache"
        for what in ("call", "gradients")
        for cache in ("fresh", "warm")
    ]
    for (fresh, warm), (first, second) in zip(
        (rows[:2], rows[2:]), (seen[:2], seen[2:]), strict=True
    ):
        assert fresh["value"] == pytest.approx(9e5)
        assert fresh["compile_ms"] == pytest.approx(700)
        assert "compile_ms" not in warm
        assert first[0] == second[0]
        folders = {first[1][name] for name in ("FA_CUPY_CACHE_DIR", "CUDA_CACHE_PATH")}
        assert len(folders) == 2
        assert first[1] == {**second[1], "CUDA_CACHE_DISABLE": "1"}
    assert "attention_backward(" in seen[2][0]
    assert "attention_backward(" not in seen[0][0]


def test_limits_of_host_time():
    def limit(case, impl="fa_cupy"):
        return host_time.limit_us({"case": case, "impl": impl})

    assert limit("call bf16 hd128 with lse") == 11
    assert limit("gradients bf16 hd128") == 25
    assert limit("causal product bf16 hd128") == 12
    assert limit("decoding fp16 hd128 B1") == 13
    assert limit("first gradients, fresh cache") == 2.5e6
    assert limit("call bf16 hd128 with lse", "cudnn") is None
    assert limit("first call, fresh cache") == 2e6
    assert limit("import") == 2e5


def test_calls_are_timed_in_microseconds():
    assert 0 < host_time.per_call(lambda: None, lambda: None, bursts=3, calls=10) < 1e3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_long_sequence_is_linear():
    found = memory.measure("cpu", 4096)
    assert found["value"] < memory.LIMIT_MB["cpu"]


# ---------------------------------------------------------------------------------- the commands
def test_every_command_can_be_reached(capsys):
    for name in command.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            command.main([name, "--help"])
    assert command.main([]) == 2
    assert command.main(["--help"]) == 0
    assert command.main(["nothing"]) == 2
    assert "no command 'nothing'" in capsys.readouterr().out


# -------------------------------------------------------------------------------------- the fuzzer
def test_fuzz_counts_what_ran(capsys, monkeypatch):
    monkeypatch.setattr(store, "gpu_available", lambda: False)
    assert fuzz.campaign(np, 1, 0.0) == 0  # no time
    assert fuzz.main(["--seconds", "1", "--jobs", "1", "--seed", "5"]) == 0
    told = capsys.readouterr().out
    assert "calls in 1 s on cpu, seed 5: no finding" in told
    assert "attention" in told


@examples(20)
@given(keyed_cases.packed_cases(finite=True))
def test_fuzz_knows_who_sees_whom(case):
    """With offsets of any numbers, results are held against those of a mask."""
    same, invalid = keyed_cases.by_mask(case)
    assert not invalid.any()
    pairs = zip(
        reference.attention(*case.arrays, **case.options),
        reference.attention(*same.arrays, **same.options),
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_fuzz_has_kinds_of_packed_sequences():
    on_host, on_device = fuzz.kinds(np), fuzz.kinds(None)
    assert {name for name in on_host if "q_offsets" in name} == {
        "attention with q_offsets",
        "attention_backward with q_offsets",
        "causal_product with q_offsets",
    }
    assert {name for name in on_device if "offsets" in name and name not in on_host} == {
        "attention with any q_offsets",
        "captured attention, offsets",
        "captured products, offsets",
    }


@examples(10)
@given(packed=products.packed_cases(), gradient=st.booleans())
def test_fuzz_calls_packed_products(packed, gradient):
    found = fuzz.packed_product_call(np, packed, gradient)()
    assert len(found) == (2 if not gradient else 3 + (packed.initial is not None))


@examples(30)
@given(st.data())
def test_fuzz_has_kinds_of_full_precision(data):
    """Each of them is checked here on NumPy, where TF32 is float32."""
    kinds = fuzz.full_precision_kinds(np)
    assert set(kinds) < set(fuzz.kinds(None))
    check, drawn = kinds[data.draw(st.sampled_from(sorted(kinds)))]
    given = {name: data.draw(strategy) for name, strategy in drawn.items()}
    assert given["case"].q.dtype == ("float64" if given["dtype"] == "float64" else "float32")
    assert max(given["case"].q.shape[-1], given["case"].v.shape[-1]) <= 64
    with np.errstate(all="ignore"):
        check(**given)


def test_fuzz_runs_the_kinds_that_are_chosen(capsys, monkeypatch):
    ran = []
    names = "float32 attention", "float64 attention", "attention"

    def check(case):
        ran.append(case)

    kinds = {name: (check, {"case": st.just(name)}) for name in names}
    monkeypatch.setattr(fuzz, "kinds", lambda xp: kinds)
    assert fuzz.campaign(np, 1, 2.0, "^float") == 0
    assert set(ran) == {"float32 attention", "float64 attention"}


def test_fuzz_finds_a_wrong_value(capsys, monkeypatch):
    """Its examples reach the check, and one that fails is printed with its arguments."""

    def wrong(case):
        raise AssertionError(f"wrong at {case}")

    kinds = {"wrong": (wrong, {"case": st.integers(0, 9)})}
    monkeypatch.setattr(fuzz, "kinds", lambda xp: kinds)
    assert fuzz.campaign(np, 1, 5.0) == 1
    told = capsys.readouterr().out
    assert "FINDING wrong, seed 1, batch 1" in told
    assert "wrong at 0" in told
