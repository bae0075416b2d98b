"""What of the families of float32 and float64 runs without a GPU: on NumPy in place of CuPy."""

import dataclasses
import importlib.util
import sys

import numpy as np
import pytest

import fa_cupy
from tests.support import cublas_on_numpy
from tests.support.cublas_on_numpy import bare, device
from validation import (
    accuracy,
    bench,
    cases,
    families,
    float_peers,
    peers,
    readme,
    report,
    split_accuracy,
    store,
)

FAMILIES = ("attention_float_fwd", "attention_float_bwd")
FACTS = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z"}


def small(case):
    return dataclasses.replace(case, length=200, batch=3, heads=2)


# One head_dim of each kind of numbers, full and causal.
EVERY = [*cases.ATTENTION_FLOAT_FWD, *cases.ATTENTION_FLOAT_BWD]
SMALL = [small(case) for case in EVERY if case.head_dim == 128]


def label(case):
    return f"{'bwd' if case.backward else 'fwd'} {case.name}"


def family_of(case):
    return families.FAMILIES[FAMILIES[case.backward]]


def limit_of(case):
    return report.ERROR_LIMIT[case.name.split()[0]]


@pytest.fixture
def on_numpy(monkeypatch):
    """NumPy's namespace for CuPy's."""
    found = peers.module
    monkeypatch.setattr(peers, "module", lambda name: found("numpy" if name == "cupy" else name))


def arrays_of(case):
    return family_of(case).inputs(case, 1)


def rows():
    """What a run writes, of numbers that are made up."""
    return [
        {"family": name, "case": case.name, "impl": impl, "ms": 1.0, "unit": "TFLOP/s",
         "value": 20.0 + 10 * i, "error": 1e-15, "date": "now"}
        for name in FAMILIES
        for case in families.FAMILIES[name].cases
        for i, impl in enumerate(families.FAMILIES[name].impls)
    ]  # fmt: skip


# --------------------------------------------------------------------------------------- the data
def test_names_and_operations():
    shapes = [(dim, mask) for dim in (128, 64, 256) for mask in ("full", "causal")]
    wide = {d: [f"{d} hd{dim} {mask} 4096x4" for dim, mask in shapes] for d in ("fp32", "fp64")}
    tf32 = [f"tf32 hd128 {mask} 4096x4" for mask in ("full", "causal")]
    large = [f"{d} hd512 {mask} 4096x4" for d in wide for mask in ("full", "causal")]
    forward, backward = ([case.name for case in families.FAMILIES[x].cases] for x in FAMILIES)
    assert forward == [*wide["fp32"], *tf32, *wide["fp64"], *large]
    assert backward == [*wide["fp32"], *wide["fp64"], *large]
    for case in EVERY:
        assert case.heads * case.head_dim == 2048
        plain = dataclasses.replace(case, dtype="bf16", precision="")
        if case.head_dim <= 256:
            assert plain in (*cases.ATTENTION_FWD, *cases.ATTENTION_BWD)
        assert case.flops == plain.flops
        assert peers.DTYPES[case.dtype].itemsize == (8 if case.name.startswith("fp64") else 4)


def test_families_are_whole():
    forward, backward = (families.FAMILIES[name] for name in FAMILIES)
    assert {*forward.impls} == {*backward.impls} | {"plain_cupy"}
    for family in (forward, backward):
        assert family.default_impls == tuple(family.impls)
        assert (family.device, family.unit, family.picture) == ("gpu", "TFLOP/s", "float")
        assert {case.backward for case in family.cases} == {family is backward}
    assert {impl for x in (forward, backward) for impl in x.impls} <= report.COLORS.keys()


def test_errors_have_limits_of_their_numbers():
    found = rows()
    assert report.wrong(found) == []
    for row in found:
        row["error"] = 2e-13
    wrong = report.wrong(found)
    assert len(wrong) == 8 * 6 + 8 * 5
    assert all(" fp64 " in line for line in wrong)
    for row in found:
        row["error"] = 2e-5
    assert not any(" tf32 " in line for line in report.wrong(found))
    assert len(report.wrong(found)) == len(found) - 2 * 6


@pytest.mark.parametrize("case", SMALL, ids=label)
def test_numbers_have_all_their_bits(case, on_numpy):
    for x in arrays_of(case):
        assert x.shape == (3, 2, 200, 128)
        assert x.dtype == peers.DTYPES[case.dtype]
        rounded = x.astype(np.float32).astype(x.dtype)
        assert (rounded != x).any() == (case.dtype == "fp64")
        assert 0.95 < np.std(x) < 1.05


# ------------------------------------------------------------------------------- implementations
def results(case, call):
    """The arrays of the second call of an implementation."""
    call.run()
    native = call.native(call.run())
    found = [*map(bare, native if case.backward else [native])]
    assert [x.shape for x in found] == [(3, 2, 200, 128)] * (3 if case.backward else 1)
    assert {x.dtype for x in found} == {peers.DTYPES[case.dtype]}
    return found


def errors(case, arrays, found):
    """The error of results, and the least one of results with an element that is a bit off."""
    check = family_of(case).check(case, [*map(bare, arrays)])
    wrong = []
    for i in range(len(found)):
        changed = [x.copy() for x in found]
        # The norm of the last head is about that of its largest row, times sqrt(200).
        changed[i][-1, -1, -1, 5] += 100 * limit_of(case) * np.abs(found[i][-1, -1]).max()
        wrong.append(check(changed if case.backward else changed[0]))
        changed[i][0, 1, 2, 3] = np.nan
        assert check(changed if case.backward else changed[0]) == np.inf
    return check(found if case.backward else found[0]), min(wrong)


@pytest.mark.parametrize("case", SMALL, ids=label)
def test_results_are_held_against_float64(case, on_numpy):
    arrays = arrays_of(case)
    call = family_of(case).impls["fa_cupy"](case, arrays)
    error, wrong = errors(case, arrays, results(case, call))
    assert error < limit_of(case) < wrong


@pytest.mark.parametrize("case", [c for c in SMALL if not c.backward], ids=label)
def test_the_package_is_called_with_the_precision_of_a_case(case, on_numpy, monkeypatch):
    made = []
    monkeypatch.setattr(fa_cupy, "attention", lambda *arrays, **options: made.append(options))
    peers.fa_cupy(case, arrays_of(case)).run()
    precision = "tf32" if case.name.startswith("tf32") else None
    assert made == [{"is_causal": case.causal, "window": None, "precision": precision}]


@pytest.mark.parametrize("case", SMALL, ids=label)
def test_cublas_tiles_compute_the_same(case, on_numpy, monkeypatch):
    arrays = [*map(device, arrays_of(case))]
    with cublas_on_numpy.in_place_of_cublas(monkeypatch) as gpu:
        solved = []
        for module, name in ((gpu.attention, "attention"), (gpu.attention_backward, "backward")):
            solve = getattr(module, name)

            def spy(problem, *given, name=name, solve=solve):
                solved.append((name, problem.precision))
                return solve(problem, *given)

            monkeypatch.setattr(module, name, spy)
        call = family_of(case).impls["fa_cupy_cublas"](case, arrays)
        found = results(case, call)
    precision = "tf32" if case.name.startswith("tf32") else None
    # The output and its LSE are made once, before anything is timed.
    forward = [("attention", None)] if case.backward else [("attention", precision)] * 2
    assert solved == forward + [("backward", None)] * 2 * case.backward
    assert errors(case, arrays, found)[0] < limit_of(case)


@pytest.mark.parametrize("most", [10e9, 1.0])
@pytest.mark.parametrize("case", [c for c in SMALL if not c.backward], ids=label)
def test_plain_cupy_computes_the_same(case, most, on_numpy, monkeypatch):
    monkeypatch.setattr(float_peers, "_MOST_BYTES", most)
    arrays = arrays_of(case)
    if case.precision:
        with pytest.raises(peers.UnavailableError, match="no TF32"):
            float_peers.plain_cupy(case, arrays)
        return
    found = results(case, float_peers.plain_cupy(case, arrays))
    assert errors(case, arrays, found)[0] < limit_of(case)


def test_matrices_of_scores_fit(monkeypatch):
    """One batch entry at a time, where all of them would take more."""
    for case in EVERY:
        arrays = (np.arange(case.batch),) * 2
        parts = float_peers._parts(case, arrays)
        assert np.concatenate([x for x, _ in parts]).tolist() == [0, 1, 2, 3]
        size = 8 if case.dtype == "fp64" else 4
        largest = max(len(x) for x, _ in parts) * case.heads * 4096**2 * size
        assert largest <= 10e9
        assert len(parts) == (2 if label(case).split()[1:3] == ["fp64", "hd64"] else 1)
    monkeypatch.setattr(float_peers, "_MOST_BYTES", 1.0)
    assert [x.tolist() for x, _ in float_peers._parts(case, arrays)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("most", [10e9, 1.0])
@pytest.mark.parametrize("case", SMALL, ids=label)
def test_torch_computes_the_same(case, most, on_numpy, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(float_peers, "_MOST_BYTES", most)
    seen = []
    formula, grad = float_peers._formula, torch.autograd.grad

    def precision(function):
        def spy(*given, **options):
            seen.append(torch.get_float32_matmul_precision())
            return function(*given, **options)

        return spy

    monkeypatch.setattr(float_peers, "_formula", precision(formula))
    monkeypatch.setattr(torch.autograd, "grad", precision(grad))
    before = torch.get_float32_matmul_precision()
    arrays = arrays_of(case)
    for outside in ("highest", "high"):
        seen.clear()
        torch.set_float32_matmul_precision(outside)
        try:
            found = results(case, float_peers.torch_plain(case, arrays))
            assert torch.get_float32_matmul_precision() == outside
        finally:
            torch.set_float32_matmul_precision(before)
        # Two runs, and what gradients are made from once.
        runs = (3 if case.backward else 2) * (3 if most == 1 else 1)
        assert seen == ["high" if case.precision else "highest"] * runs
        assert errors(case, arrays, found)[0] < limit_of(case)


@pytest.mark.parametrize("most", [10e9, 1.0])
@pytest.mark.parametrize("case", SMALL, ids=label)
def test_jax_computes_the_same(case, most, on_numpy, monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(float_peers, "_MOST_BYTES", most)
    before = jax.config.jax_enable_x64
    arrays = arrays_of(case)
    try:
        found = results(case, float_peers.jax_plain(case, arrays))
    finally:
        jax.config.update("jax_enable_x64", before)
    assert errors(case, arrays, found)[0] < limit_of(case)


def test_the_precision_of_torch_is_restored_after_a_failure(on_numpy, monkeypatch):
    torch = pytest.importorskip("torch")
    case = small(cases.ATTENTION_FLOAT_FWD[6])
    assert case.name.startswith("tf32")
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(float_peers, "_formula", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        float_peers.torch_plain(case, arrays_of(case)).run()
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_torch_sees_numbers_of_64_bits():
    pytest.importorskip("torch")
    x = np.ones((2, 3, 4)).swapaxes(0, 1)
    tensor = peers.to_torch(x)
    tensor[2, 1, 3] = 1 + 1e-15
    assert x[2, 1, 3] == 1 + 1e-15
    same = peers.from_torch(tensor)
    assert same.dtype == np.float64
    np.testing.assert_array_equal(same, x)


# -------------------------------------------------------------------------- what is not available
def test_fused_kernels_of_torch_are_asked_for_float32_alone(monkeypatch):
    made = []
    for module, backward in ((peers, False), (float_peers.backward_peers, True)):

        def sdpa(backend, backward=backward):
            return lambda case, arrays: made.append((backend, backward, case))

        monkeypatch.setattr(module, "torch_sdpa", sdpa)
    for case in EVERY:
        if case.name.startswith("fp32"):
            float_peers.efficient(case, ())
            assert made.pop() == ("EFFICIENT_ATTENTION", case.backward, case)
        else:
            with pytest.raises(peers.UnavailableError, match="float32 without TF32 only"):
                float_peers.efficient(case, ())
    assert not made


@pytest.mark.parametrize("case", SMALL[::2], ids=label)
def test_peers_that_are_not_installed_say_so(case, on_numpy, monkeypatch):
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("fa_cupy.gpu.cublas.")]:
        monkeypatch.setitem(sys.modules, name, None)
    arrays = arrays_of(case)
    impls = family_of(case).impls
    with pytest.raises(peers.UnavailableError, match="torch is not installed"):
        impls["torch_plain"](case, arrays)
    with pytest.raises(peers.UnavailableError, match=r"not installed|float32 without"):
        impls["efficient"](case, arrays)
    with pytest.raises(peers.UnavailableError, match=r"cublas\.attention is not installed"):
        impls["fa_cupy_cublas"](case, arrays)


# ---------------------------------------------------------------------------- the bench, its words
@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_bench(way, on_numpy, tmp_path, monkeypatch, capsys):
    name = f"attention_float_{way}"
    family = families.FAMILIES[name]
    few = tuple(x for x in SMALL if x.backward == (way == "bwd") and x.causal)
    changed = {"device": "cpu", "cases": few, "burst_ms": 1, "rest_ms": 0}
    monkeypatch.setitem(families.FAMILIES, name, dataclasses.replace(family, **changed))
    monkeypatch.setitem(sys.modules, "torch", None)
    out = tmp_path / "bench.json"
    arguments = ["--families", name, "--rounds", "1", "--out", str(out)]
    calls = []
    interleaved = bench.timing.interleaved
    monkeypatch.setattr(
        bench.timing, "interleaved", lambda of, how: calls.append([*of]) or interleaved(of, how)
    )
    measured = []
    measure = bench.measure
    monkeypatch.setattr(
        bench, "measure", lambda *given: measured.append(given[2]) or measure(*given)
    )
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    assert measured == [[*family.impls]] * len(few)  # none of them twice
    found = store.load(out)[1]
    for row, case in zip([r for r in found if r["impl"] == "fa_cupy"], few, strict=True):
        assert row["case"] == case.name
        assert row["value"] == pytest.approx(case.flops / row["ms"] / 1e9)
        assert row["error"] < limit_of(case)
    plain = {row["case"].split()[0] for row in found if row["impl"] == "plain_cupy"}
    assert plain == ({"fp32", "fp64"} if way == "fwd" else set())
    told = capsys.readouterr().out
    assert "efficient left out of some or all cases" in told
    assert "torch is not installed" in told


def test_the_table_has_ratios_to_all_but_leaves_its_own_tiles_out_of_the_best():
    forward = [row for row in rows() if row["family"] == FAMILIES[0]]
    lines = report.table(forward, {}).splitlines()
    assert len(lines) == 1 + 18 + 2
    assert lines[0].split() == [
        "attention_float_fwd", "(TFLOP/s)", "fa_cupy", "fa_cupy_cublas", "efficient",
        "torch_plain", "jax_plain", "plain_cupy", "/fa_cupy_cublas", "/efficient", "/torch_plain",
        "/jax_plain", "/plain_cupy", "/best", "error",
    ]  # fmt: skip
    # 20 over 30, 40, 50, 60 and 70.
    assert lines[1].split()[4:] == [
        "20", "30", "40", "50", "60", "70",
        "0.67", "0.50", "0.40", "0.33", "0.29", "0.29", "1.0e-15",
    ]  # fmt: skip
    for row in forward:
        if row["impl"] == "fa_cupy_cublas":
            row["value"] = 1000.0
    assert report.table(forward, {}).splitlines()[1].split()[-2] == "0.29"


@pytest.mark.long
def test_a_picture_has_bars_of_every_kind_of_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    target = report.draw(rows(), FACTS, str(tmp_path / "bench.png"), "float")
    assert target.name == "bench-float.png"
    assert target.stat().st_size > 10_000
    panels = report._panels(
        [(name, case.name) for name in FAMILIES for case in families.FAMILIES[name].cases]
    )
    forward, backward = FAMILIES
    assert {place: len(of) for place, of in panels.items()} == {
        (forward, "fp32"): 8, (forward, "tf32"): 2, (forward, "fp64"): 8,
        (backward, "fp32"): 8, (backward, "fp64"): 8,
    }  # fmt: skip
    assert report._below("fp64 hd64 full 4096x4", "fp64") == "hd64\nfull\n4096x4"


def test_the_summary_has_a_row_of_each_dtype():
    names = [line for line in readme.SUMMARY if line[1] == FAMILIES[0]]
    wanted = [("float32", "fp32"), ("float64", "fp64")]
    assert [line[::2] for line in names] == [
        (f"Attention in {name}", f"{dtype} hd128 full 4096x4") for name, dtype in wanted
    ]
    assert readme.summary(lambda family: []) is None  # rows without results are left out
    device_rows = [("NVIDIA H200", row) for row in rows() if row["family"] == FAMILIES[0]]
    table = readme.summary(lambda family: device_rows if family == FAMILIES[0] else [])
    of_each = ["20 TFLOP/s", "70 TFLOP/s, CuPy", "0.29"]
    assert table.rows == [[line[0], *of_each] for line in names]
    for _, row in device_rows:
        if row["impl"] == "plain_cupy":
            row["value"] = None
    table = readme.summary(lambda family: device_rows if family == FAMILIES[0] else [])
    assert [row[2] for row in table.rows] == ["60 TFLOP/s, JAX"] * 2


def test_the_page_has_a_place_for_them(monkeypatch):
    path = readme.README.parent / "docs" / "measured.py"
    spec = importlib.util.spec_from_file_location("measured", path)
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    monkeypatch.setattr(measured, "results", dict)
    assert "No speed of it has been measured" in measured.floats()
    assert ",".join(FAMILIES) in measured.floats()
    header = {"device": "some device", "date": FACTS["date"]}
    monkeypatch.setattr(measured, "results", lambda: {"some-device": (header, rows())})
    assert "tf32 hd128 causal" in measured.floats()
    assert "attention_float_bwd (TFLOP/s)" in measured.floats()
    assert "hd128" not in measured.benchmarks()


# ------------------------------------------------------------------------------- parts of float16
def test_parts_hold_the_bits_of_float32():
    x = np.random.default_rng(3).standard_normal((200, 64)).astype(np.float32)
    x[7] = 0
    x[8] *= np.float32(1e-30)
    for count, bits in ((1, 11), (2, 23), (3, 33)):
        found = split_accuracy.parts(x, count)
        assert len(found) == count
        off = np.abs(sum(found) - x.astype(np.float64))
        assert (off <= np.abs(x) * 2.0**-bits + np.abs(x).max(-1, keepdims=True) * 2.0**-35).all()
        # No part has more digits than float16.
        assert all((np.frexp(part)[0] * 2**11 % 1 == 0).all() for part in found)
    assert (sum(split_accuracy.parts(x, 3)) == x).mean() > 0.99


def test_what_products_of_parts_lose():
    """The bounds that docs/kernels/full_precision.rst gives, and that they are reached."""
    found = {count: split_accuracy.errors(count) for count in (1, 3, 4, 6)}
    plain = split_accuracy.of_float32()
    assert 3.9 < found[3].worst_product <= 4.0
    assert 1.9 < found[4].worst_product <= 2.0
    x = np.full((1, 1), 1 + 4093 * split_accuracy.ULP)
    assert split_accuracy._worst_product(x, x, 3) > 3.9
    assert found[3].worst_score < 0.5 < plain.worst_score
    assert found[3].score < 0.1 < plain.score
    assert 0.01 < found[3].score - found[4].score < 0.03
    assert found[6].worst_score < 1e-3
    assert found[3].output < plain.output < 1e-6
    assert 1e-4 < found[1].output < 1e-3
    assert plain.worst_product <= 0.5


def test_the_table_of_products(capsys):
    assert accuracy.main(["--split"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["products", "1", "3", "4", "6", "float32"]
