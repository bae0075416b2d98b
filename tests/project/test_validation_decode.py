"""What of the family of few queries runs without a GPU: on NumPy in place of CuPy."""

import dataclasses

import numpy as np
import pytest

from fa_cupy import attention
from validation import (
    bench,
    cases,
    cuda_graphs,
    decode_peers,
    families,
    peers,
    readme,
    report,
    store,
)

FAMILY = families.FAMILIES["attention_decode"]
LIMIT = report.ERROR_LIMIT["bf16"]
FACTS = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z"}


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    """NumPy's namespace for CuPy's, and copies of few bytes."""
    found = peers.module
    monkeypatch.setattr(peers, "module", lambda name: found("numpy" if name == "cupy" else name))
    monkeypatch.setattr(decode_peers, "_BYTES", 4e6)


def small(case):
    """The same with few keys, so that there are a few copies."""
    sizes = {"batch": min(case.batch, 3), "keys": 256, "heads": 4, "key_heads": 2}
    return dataclasses.replace(case, **sizes)


# Of each kind of case one: dims, several queries, pages, numbers of keys.
SMALL = [*{case.name: case for case in map(small, cases.ATTENTION_DECODE)}.values()]


def name_of(case):
    return case.name


def rows(value=100.0):
    return [
        {"family": "attention_decode", "case": case.name, "impl": impl, "ms": 1.0, "unit": "GB/s",
         "value": value + i, "error": 1e-3, "date": "now"}
        for case in FAMILY.cases
        for i, impl in enumerate(FAMILY.impls)
    ]  # fmt: skip


def test_names_and_bytes():
    found = {case.name: case for case in cases.ATTENTION_DECODE}
    assert len(found) == len(cases.ATTENTION_DECODE) == 31
    assert found["bf16 hd128 B16 kv32768"].bytes == 2 * 16 * 32768 * 8 * 128 * 2
    assert found["bf16 hd128 B16 kv8192 q16"].queries == 16
    paged = found["bf16 hd128 B128 kv4096 paged64"]
    assert paged.bytes == 2 * 128 * 4096 * 8 * 128 * 2
    assert {case.page_size for case in found.values()} == {0, 16, 64, 128}
    ragged = found["bf16 hd128 B16 kv32768 ragged"]
    assert len(set(ragged.lengths)) == 16
    assert 1 <= min(ragged.lengths) < 16384 < max(ragged.lengths) <= 32768
    assert ragged.bytes == 2 * sum(ragged.lengths) * 8 * 128 * 2
    assert ragged.lengths == dataclasses.replace(ragged).lengths


def test_copies_do_not_fit_the_cache(monkeypatch):
    monkeypatch.undo()
    for case in cases.ATTENTION_DECODE:
        count = decode_peers.copies(case)
        assert 1 <= count <= 16
        assert count * case.bytes >= 256e6
        assert (count - 1) * case.bytes < 256e6
        calls = decode_peers._calls(count)
        assert calls % count == 0
        assert 32 <= calls < 32 + count
    tiny = cases.Decode("bf16", 64, 1, 16)
    assert decode_peers.copies(tiny) == 16


def test_the_family_is_whole():
    assert FAMILY.picture == "decode"
    assert set(FAMILY.impls) == set(FAMILY.default_impls) == {"fa_cupy", "cudnn", "flash2"}
    assert FAMILY.unit == "GB/s"
    assert FAMILY.value(FAMILY.cases[0], 0.01) == pytest.approx(FAMILY.cases[0].bytes / 1e4)
    found = rows()
    assert report.wrong(found) == []
    found[0]["error"] = 1.0
    assert len(report.wrong(found)) == 1


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_outputs_are_looked_at(case):
    arrays = decode_peers.random_cupy(case, 1)
    q, k, v, *more = arrays
    assert len(q) == len(k) == len(v) == decode_peers.copies(case) > 1
    assert len(more) == (2 if case.page_size else int(case.ragged))
    check = decode_peers.check(case, arrays)
    call = decode_peers.fa_cupy(case, arrays)
    assert call.calls == decode_peers._calls(len(q))
    out = call.native(call.run())
    assert out.shape == (len(q), case.batch, case.heads, case.queries, case.head_dim)
    assert check(out) < LIMIT
    for place in ((0, 0, 0, 0), (-1, -1, -1, -1)):
        wrong = out.copy()
        wrong[place] += 1
        assert check(wrong) > LIMIT
    wrong = out.copy()
    wrong[1, 0, 0, 0, 3] = np.inf
    assert check(wrong) == np.inf


def test_pages_and_numbers_of_keys_count():
    paged = dataclasses.replace(small(cases.Decode("bf16", 64, 3, 0)), page_size=16)
    q, k, v, lengths, table = arrays = decode_peers.random_cupy(paged, 1)
    assert k.shape == (len(q), 3 * 256 // 16, 2, 16, 64)
    assert sorted(table.flat) == [*range(48)]
    assert (np.diff(table.ravel()) != 1).any()
    check = decode_peers.check(paged, arrays)
    another = np.stack([
        attention(q[i], k[i], v[i], k_lengths=lengths, page_table=np.flip(table, 1))
        for i in range(len(q))
    ])  # fmt: skip
    # The order of an entry's pages is no matter to attention without positions.
    assert check(another) < LIMIT
    another = np.stack([
        attention(q[i], k[i], v[i], k_lengths=lengths, page_table=np.roll(table, 1, 0))
        for i in range(len(q))
    ])  # fmt: skip
    assert check(another) > LIMIT
    ragged = dataclasses.replace(small(cases.Decode("bf16", 64, 3, 0)), ragged=True)
    q, k, v, lengths = arrays = decode_peers.random_cupy(ragged, 1)
    assert tuple(lengths) == ragged.lengths
    every = np.stack([attention(q[i], k[i], v[i]) for i in range(len(q))])
    assert decode_peers.check(ragged, arrays)(every) > LIMIT


def test_a_call_of_each_copy_is_made():
    made = []
    result = cuda_graphs.looped(lambda i: made.append(i) or i, 5, 35)()
    assert result == [0, 1, 2, 3, 4]
    assert made == [*range(5)] * 7


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_torch_computes_the_same(case):
    pytest.importorskip("torch")
    arrays = decode_peers.random_cupy(case, 1)
    peer = decode_peers.torch_sdpa("MATH")
    if case.page_size or case.ragged:
        with pytest.raises(peers.UnavailableError, match="neither pages nor"):
            peer(case, arrays)
        return
    call = peer(case, arrays)
    assert decode_peers.check(case, arrays)(call.native(call.run())) < LIMIT


def test_without_torch_peers_say_so(monkeypatch):
    def module(name):
        raise peers.UnavailableError(f"{name} is not installed")

    case = SMALL[0]
    arrays = decode_peers.random_cupy(case, 1)
    monkeypatch.setattr(peers, "module", module)
    for impl in ("cudnn", "flash2"):
        with pytest.raises(peers.UnavailableError, match="torch is not installed"):
            FAMILY.impls[impl](case, arrays)


def test_a_row_has_the_time_of_one_call(tmp_path, monkeypatch):
    changed = {"cases": SMALL[:1], "burst_ms": 1, "rest_ms": 0, "default_impls": ("fa_cupy",)}
    monkeypatch.setitem(
        families.FAMILIES, "attention_decode", dataclasses.replace(FAMILY, **changed, device="cpu")
    )
    monkeypatch.setattr(bench.timing, "interleaved", lambda calls, _: dict.fromkeys(calls, 64.0))
    out = tmp_path / "bench.json"
    arguments = ["--families", "attention_decode", "--out", str(out)]
    assert bench.main([*arguments, "--plot", str(tmp_path / "bench.png")]) == 0
    (row,) = store.load(out)[1]
    calls = decode_peers._calls(decode_peers.copies(SMALL[0]))
    assert row["ms"] == 64.0 / calls
    assert row["value"] == pytest.approx(SMALL[0].bytes / row["ms"] / 1e6)


def test_the_table_has_ratios_to_both_peers():
    lines = report.table(rows(), {}).splitlines()
    assert lines[0].split()[2:] == [
        "fa_cupy", "cudnn", "flash2", "/cudnn", "/flash2", "/best", "error"
    ]  # fmt: skip
    assert len(lines) == 1 + len(FAMILY.cases) + 2


def test_the_summary_has_a_case_of_it():
    (found,) = [line for line in readme.SUMMARY if line[1] == "attention_decode"]
    assert found[2] in {case.name for case in FAMILY.cases}
    older = [{**row, "date": "2020", "value": 1.0} for row in rows()]
    device_rows = [("NVIDIA H100", row) for row in older]
    device_rows += [("NVIDIA H200", row) for row in rows()]
    table = readme.summary(lambda name: device_rows if name == "attention_decode" else [])
    assert table.rows == [[found[0], "100 GB/s", "102 GB/s, FlashAttention-2", "0.98"]]


def test_a_picture_has_bars_of_every_case(tmp_path):
    pytest.importorskip("matplotlib")
    target = report.draw(rows(), FACTS, str(tmp_path / "bench.png"), "decode")
    assert target.name == "bench-decode.png"
    assert target.stat().st_size > 10_000
    panels = report._panels([("attention_decode", case.name) for case in FAMILY.cases])
    first = ["bf16 hd128 B1", "bf16 hd128 B16", "bf16 hd128 B128"]
    assert [title for _, title in panels][:3] == first
    assert [title for _, title in panels][3:] == ["bf16 hd64 B1", "bf16 hd64 B16", "bf16"]
    assert report._below("bf16 hd128 B16 kv8192 paged16", "bf16 hd128 B16") == "kv8192\npaged16"
