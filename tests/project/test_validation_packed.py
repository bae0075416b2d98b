"""What of the families of packed sequences runs without a GPU: on NumPy in place of CuPy."""

import dataclasses

import numpy as np
import pytest

from fa_cupy import attention
from fa_cupy.gpu.kernels.linear import cost_model
from fa_cupy.gpu.kernels.linear.sm90_params import DIM_STEPS
from fa_cupy.gpu.kernels.linear.table import PACKED
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from tests.support.every_run import only
from validation import (
    bench,
    cases,
    families,
    packed_calls,
    packed_peers,
    peers,
    readme,
    report,
    store,
)  # fmt: skip

FORWARD, BACKWARD = (families.FAMILIES[f"attention_packed_{way}"] for way in ("fwd", "bwd"))
LIMIT = report.ERROR_LIMIT["bf16"]
FACTS = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z"}
OTHER, EQUAL = (3, 8, 96), (3, 40, 40)
SMALL = [
    cases.Packed("bf16", 32, causal, *lengths, heads=2)
    for causal in (False, True)
    for lengths in (OTHER, EQUAL)
]


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    """NumPy's namespace for CuPy's, and few calls."""
    found = peers.module
    monkeypatch.setattr(peers, "module", lambda name: found("numpy" if name == "cupy" else name))
    monkeypatch.setattr(packed_peers, "_MOST_CALLS", 2)


def name_of(case):
    return case.name


def of_gradients(case):
    return dataclasses.replace(case, backward=True)


def rows(family="attention_packed_fwd", value=100.0):
    return [
        {"family": family, "case": case.name, "impl": impl, "ms": 1.0, "unit": "TFLOP/s",
         "value": value + i, "error": 1e-3, "date": "now"}
        for case in families.FAMILIES[family].cases
        for i, impl in enumerate(families.FAMILIES[family].impls)
    ]  # fmt: skip


def test_names_lengths_and_operations():
    found = {case.name: case for case in cases.ATTENTION_PACKED_FWD}
    assert len(found) == len(cases.ATTENTION_PACKED_FWD) == 30
    assert [case.name for case in cases.ATTENTION_PACKED_BWD] == [*found]
    case = found["bf16 hd128 causal 8x512-8192"]
    assert len(set(case.lengths)) == case.sequences == 8
    assert 512 <= min(case.lengths) < 4096 < max(case.lengths) <= 8192
    assert not any(length % 8 for length in case.lengths)
    assert case.offsets[0] == 0
    assert case.offsets[-1] == case.length == sum(case.lengths)
    assert case.flops == sum(2 * 16 * 128 * n * n for n in case.lengths)
    full = found["bf16 hd128 full 4x4096"]
    assert full.lengths == (4096,) * 4
    assert full.flops == 4 * 16 * 128 * 4 * 4096**2
    assert of_gradients(full).flops == 2.5 * full.flops
    assert found["bf16 hd64 full 64x64-1024 h16"].heads == 16
    assert found["bf16 hd256 full 64x256"].heads == 8


def test_a_run_takes_some_milliseconds(monkeypatch):
    monkeypatch.undo()
    calls = [packed_peers.calls_of(case) for case in cases.ATTENTION_PACKED_FWD]
    assert min(calls) == 1
    assert 16 <= max(calls) <= 32


def test_the_families_are_whole():
    for family in (FORWARD, BACKWARD):
        assert family.picture == "packed"
        assert set(family.default_impls) == {"fa_cupy", "fa_cupy_dense", "cudnn", "flash2"}
        assert family.value(family.cases[0], 1.0) == pytest.approx(family.cases[0].flops / 1e9)
    assert report.wrong(rows()) == []


@pytest.mark.parametrize("case", SMALL, ids=name_of)
@pytest.mark.parametrize("impl", ["fa_cupy", "fa_cupy_dense"])
def test_outputs_are_looked_at(case, impl):
    arrays = FORWARD.inputs(case, 1)
    if impl == "fa_cupy_dense" and case.shortest != case.longest:
        with pytest.raises(peers.UnavailableError, match="other lengths"):
            FORWARD.impls[impl](case, arrays)
        return
    check, call = FORWARD.check(case, arrays), FORWARD.impls[impl](case, arrays)
    assert call.calls == 2
    out = call.native(call.run())
    assert [x.shape for x in out] == [(2, length, 32) for length in case.lengths]
    assert check(out) < LIMIT
    for i in range(case.sequences):  # a row of each sequence is looked at, in one head
        wrong = [x.copy() for x in out]
        wrong[i][i % 2, -1] += 10
        assert check(wrong) > LIMIT
    wrong = [x.copy() for x in out]
    wrong[1][0, 0, 3] = np.inf  # everywhere
    assert check(wrong) == np.inf


@pytest.mark.parametrize("case", [*map(of_gradients, SMALL)], ids=name_of)
@pytest.mark.parametrize("impl", ["fa_cupy", "fa_cupy_dense"])
def test_gradients_are_looked_at(case, impl):
    if impl == "fa_cupy_dense" and case.shortest != case.longest:
        return
    arrays = BACKWARD.inputs(case, 1)
    check, call = BACKWARD.check(case, arrays), BACKWARD.impls[impl](case, arrays)
    grads = call.native(call.run())
    assert [x.shape for x in grads[2]] == [(2, length, 32) for length in case.lengths]
    assert check(grads) < LIMIT
    for i in range(3):
        wrong = [[x.copy() for x in of] for of in grads]
        wrong[i][-1][-1] *= 1.5
        assert check(wrong) > LIMIT
    wrong = [[x.copy() for x in of] for of in grads]
    wrong[1][0][0, 0, 0] = np.nan
    assert check(wrong) == np.inf


def test_where_sequences_end_counts():
    (case,) = (case for case in SMALL if case.name == "bf16 hd32 full 3x8-96 h2")
    q, k, v, offsets = arrays = FORWARD.inputs(case, 1)
    assert tuple(offsets) == case.offsets
    moved = offsets + np.array([0, 8, 0, 0], np.int32)
    out = attention(q, k, v, q_offsets=moved)
    assert FORWARD.check(case, arrays)(packed_peers._sequences(case, out)) > LIMIT


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_torch_computes_the_same(case):
    pytest.importorskip("torch")
    arrays = FORWARD.inputs(case, 1)
    call = packed_peers.torch_sdpa("MATH")(case, arrays)
    assert FORWARD.check(case, arrays)(call.native(call.run())) < LIMIT
    case = of_gradients(case)
    arrays = BACKWARD.inputs(case, 1)
    call = packed_peers.torch_sdpa("MATH", backward=True)(case, arrays)
    assert BACKWARD.check(case, arrays)(call.native(call.run())) < LIMIT
    for family in (FORWARD, BACKWARD):
        with pytest.raises(peers.UnavailableError, match="on a GPU only"):
            family.impls["flash2"](case, family.inputs(case, 1))


def test_without_torch_peers_say_so(monkeypatch):
    def module(name):
        raise peers.UnavailableError(f"{name} is not installed")

    for family, case in ((FORWARD, SMALL[0]), (BACKWARD, of_gradients(SMALL[0]))):
        with monkeypatch.context() as patches:
            arrays = family.inputs(case, 1)
            patches.setattr(peers, "module", module)
            for impl in ("cudnn", "flash2"):
                with pytest.raises(peers.UnavailableError, match="torch is not installed"):
                    family.impls[impl](case, arrays)


def test_a_row_has_the_time_of_one_call(tmp_path, monkeypatch):
    changed = {"cases": SMALL[:1], "rest_ms": 0, "default_impls": ("fa_cupy",), "device": "cpu"}
    name = "attention_packed_fwd"
    monkeypatch.setitem(families.FAMILIES, name, dataclasses.replace(FORWARD, **changed))
    monkeypatch.setattr(bench.timing, "interleaved", lambda calls, _: dict.fromkeys(calls, 64.0))
    out = tmp_path / "bench.json"
    arguments = ["--families", name, "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    (row,) = store.load(out)[1]
    assert row["ms"] == 32.0
    assert row["value"] == pytest.approx(SMALL[0].flops / 32 / 1e9)


def test_the_table_has_ratios_to_the_peers():
    lines = report.table(rows(), {}).splitlines()
    assert lines[0].split()[2:] == [
        "fa_cupy", "fa_cupy_dense", "cudnn", "flash2",
        "/fa_cupy_dense", "/cudnn", "/flash2", "/best", "error",
    ]  # fmt: skip
    assert len(lines) == 1 + len(FORWARD.cases) + 2


@pytest.mark.parametrize("family", ["attention_packed_fwd", "attention_packed_bwd"])
def test_the_summary_has_a_case_of_each(family):
    (found,) = [line for line in readme.SUMMARY if line[1] == family]
    assert found[2] in {case.name for case in families.FAMILIES[family].cases}
    device_rows = [("NVIDIA H200", row) for row in rows(family)]
    table = readme.summary(lambda name: device_rows if name == family else [])
    assert table.rows == [[found[0], "100 TFLOP/s", "103 TFLOP/s, FlashAttention-2", "0.97"]]


@pytest.mark.long
def test_a_picture_has_bars_of_every_case(tmp_path):
    pytest.importorskip("matplotlib")
    found = rows() + rows("attention_packed_bwd")
    target = report.draw(found, FACTS, str(tmp_path / "bench.png"), "packed")
    assert target.name == "bench-packed.png"
    assert target.stat().st_size > 10_000
    panels = report._panels([("attention_packed_fwd", case.name) for case in FORWARD.cases])
    assert [len(members) for members in panels.values()] == [5] * 6


# -------------------------------------------------------------------------------------- sanitizers
TARGET, SMS = "sm_90a", 132


def on_host(name, x):
    return x


def is_in_order(shape):
    """Whether the host's check of offsets takes them."""
    found = [shape["q_offsets"], shape.get("k_offsets", [0])]
    return all(x == sorted(x) and x[0] >= 0 and x[-1] <= 335 for x in found)


@pytest.mark.parametrize("dim", only([32, 64, 128], 64))
def test_the_reduced_set_is_made_of_valid_calls(dim):
    listed = packed_calls.problems(dim)
    taken = [(shape, options) for shape, options in listed if is_in_order(shape)]
    assert (len(listed), len(taken)) == (10, 8)
    for shape, options in taken:
        host = packed_calls.arrays(peers.DTYPES["bf16"], shape)
        out, grads = packed_calls.solve(host, options, on_host)
        assert packed_calls.is_right(host, options, out, grads), (shape, options)
        if out.astype(float).any():
            assert not packed_calls.is_right(host, options, 1.1 * out.astype(float), grads)
            wrong = (*grads[:2], 1.1 * grads[2].astype(float), *grads[3:])
            assert not packed_calls.is_right(host, options, out, wrong)


def test_invalid_sequences_of_the_reduced_set_have_no_result():
    (wrong,) = (of for of in packed_calls.problems(64) if of[0]["q_offsets"][0] < 0)
    host = packed_calls.arrays(peers.DTYPES["bf16"], wrong[0])
    zeros = tuple(np.zeros(host[name].shape) for name in ("q", "q", "k", "v"))
    assert not packed_calls.is_right(host, wrong[1], zeros[0], zeros[1:])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_reduced_set_of_products_is_made_of_valid_calls(dtype):
    for problem in packed_calls.product_problems(64):
        host = packed_calls.product_arrays(peers.DTYPES[dtype], problem)
        if problem.offsets == packed_calls.OUT_OF_ORDER:
            results = [np.zeros((1, 2, problem.length, 64))]
            assert not packed_calls.products_are_right(problem, host, results)
            results[0][..., 70:, :] = np.nan
            assert packed_calls.products_are_right(problem, host, results)
            continue
        results = packed_calls.product_results(problem, host)
        assert packed_calls.products_are_right(problem, host, results), problem
        for i, x in enumerate(results):
            wrong = [*results[:i], 1.1 * x.astype(float), *results[i + 1 :]]
            assert not x.any() or not packed_calls.products_are_right(problem, host, wrong)


def choices(row):
    """The kernels of each call of the set for a row of the table of products."""
    for problem in packed_calls.product_problems(row.dim):
        dims, count = (problem.qk_dim, problem.v_dim), len(problem.offsets) - 1
        entries, length = max(problem.heads) * count, problem.length // max(1, count)
        given = row.dtype, max(1, entries), length, *dims, TARGET, SMS
        with packed_calls.forced_products(row, problem):
            choice = cost_model.choose(*given, packed=True)
        yield problem, choice, {found for found, _, _ in choice.launches(*dims)}


def test_every_row_of_packed_products_is_forced_and_split():
    reached = set()
    for row in packed_calls.product_rows(TARGET):
        found = [*choices(row)]
        mapped, step = isinstance(row, ProductSm90Variant), DIM_STEPS.get(row.dtype, 1)
        for problem, choice, _ in found:  # tensor maps walk rows in steps of 16 bytes
            odd = mapped and (problem.qk_dim % step or problem.v_dim % step)
            assert choice.row == row or odd
        chosen = [choice for _, choice, _ in found if choice.row == row]
        splits = {choice.segments > 1 for choice in chosen}
        assert splits == ({False, True} if row.algorithm == "chunked" else {False})
        own = {choice.states is None for choice in chosen if choice.segments > 1}
        assert (True in own) == mapped
        reached |= set().union(*[launched for _, _, launched in found])
    # What writes the rows that products leave out is launched behind all of them.
    launched = {x for x in PACKED if x.source != "linear/other_rows" and TARGET in x.targets}
    assert launched <= reached


def test_shares_of_the_reduced_set_are_all_of_it(monkeypatch):
    made = []
    monkeypatch.setattr(packed_calls, "run_attention", lambda *of: made.append(of) or 10)
    monkeypatch.setattr(packed_calls, "run_products", lambda row: made.append(row) or 12)
    calls = sum(packed_calls.run(TARGET, share, 3) for share in range(3))
    rows = packed_calls.product_rows(TARGET)
    assert calls == 10 * 29 + 12 * len(rows)
    assert len({*made}) == len(made) == 29 + len(rows)
    assert {dim for kind, dim, _ in (x for x in made if isinstance(x, tuple))} >= {64, 96, 256}


def test_attention_must_reach_its_builds():
    for kernels in ("sm90", "sm80"):
        for dim in (64, 256):
            found = packed_calls.rows_of(kernels, dim, TARGET)
            assert any(row.entry == f"attention_fwd_{kernels}" for row in found)
            assert any(row.entry.endswith(f"_{kernels}") and "bwd" in row.entry for row in found)
            assert all(row.packed or row.entry == "attention_row_intervals" for row in found)
    gradients = [f"bwd_{stem}_fp32" for stem in ("preprocess", "dq", "dkdv")]
    by_wgmma = [gradients[0], *(f"{name}_sm90" for name in gradients[1:])]
    wide = {
        "fp32": ["fwd_fp32", *gradients],
        "split": ["split_kv", "fwd_fp32_sm90", *by_wgmma],
        "tf32": ["split_kv", "fwd_fp32_sm90", *by_wgmma],
        "fp64": ["fwd_fp64", "bwd_dq_fp64", "bwd_dkdv_fp64"],
    }
    for kernels, names in wide.items():
        found = packed_calls.rows_of(kernels, 96, TARGET)
        assert {row.entry for row in found} == {f"attention_{x}" for x in ("row_intervals", *names)}
        assert {getattr(row, "parts", 2) for row in found} == ({2, 1} if kernels == "tf32" else {2})
