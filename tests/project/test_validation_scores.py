"""What of the families of softcap and bias runs without a GPU: on NumPy in place of CuPy."""

import dataclasses

import numpy as np
import pytest

from fa_cupy import attention, reference
from validation import cases, checks, families, peers, report, score_peers, sparse_peers

FAMILIES = ("attention_scores_fwd", "attention_scores_bwd")
LIMIT = report.ERROR_LIMIT["bf16"]
EVERY = [*cases.ATTENTION_SCORES_FWD, *cases.ATTENTION_SCORES_BWD]
SCORES = [case for case in EVERY if case.head_dim == 128]
CPU_PEERS = {
    "sdpa": (score_peers.torch_sdpa("MATH"), False),
    "flex": (score_peers.flex, True),
    "flex_sigmoid": (score_peers.flex_sigmoid, True),
}


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    """NumPy's namespace for CuPy's."""
    found = peers.module
    monkeypatch.setattr(peers, "module", lambda name: found("numpy" if name == "cupy" else name))


def small(case):
    return dataclasses.replace(case, length=200, batch=2, heads=3)


def label(case):
    return f"{'bwd' if case.backward else 'fwd'} {case.name}"


def arrays_of(case):
    """Inputs with scores so large that a softcap is seen."""
    arrays = score_peers.random_cupy(case, 1)
    if case.score.startswith("softcap"):
        arrays[0][...] = arrays[0] * arrays[0].dtype.type(8)
    return arrays


def options_of(case):
    return {"is_causal": case.causal, "softcap": 30.0 * case.score.startswith("softcap")}


def bias_of(case, arrays):
    """Arrays but what scores are made from, and that as a bias."""
    inputs, bias = score_peers._split(case, arrays)
    if case.score == "alibi expression":
        bias = bias[:, None, None] * (np.arange(case.length, dtype=bias.dtype) - case.length + 1)
    return inputs, bias


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_whole(name):
    family = families.FAMILIES[name]
    assert family.picture == "scores"
    assert set(family.default_impls) <= set(family.impls)
    assert len({case.name for case in family.cases}) == len(family.cases)
    assert {case.backward for case in family.cases} == {name.endswith("bwd")}
    assert all(case.heads * case.head_dim == 2048 for case in family.cases)
    rows = [
        {"family": name, "case": case.name, "impl": impl, "ms": 1.0, "value": 1.0, "error": 0.0,
         "unit": family.unit, "date": "now"}
        for case in family.cases
        for impl in family.impls
    ]  # fmt: skip
    assert report.wrong(rows) == []
    rows[0]["error"] = 1.0
    assert len(report.wrong(rows)) == 1


def test_names_and_operations():
    found = {case.name: case for case in cases.ATTENTION_SCORES_FWD}
    assert len(found) == 46
    assert "bf16 hd128 causal bias-heads 4096x4" in found
    for case in EVERY:
        dense = cases.Dense(
            case.dtype, case.head_dim, case.causal, case.length, case.batch, case.heads,
            backward=case.backward,
        )  # fmt: skip
        assert case.flops == dense.flops
    assert [*map(label, cases.ATTENTION_SCORES_BWD[:-3])] == [f"bwd {name}" for name in found]
    of_biases = [case.name for case in cases.ATTENTION_SCORES_BWD[-3:]]
    assert of_biases == [f"bf16 hd{d} full bias-grad 4096x4" for d in (128, 64, 256)]


def test_biases_are_what_their_names_say():
    shapes = {
        "plain": None, "softcap": None, "softcap expression": None, "alibi": (3, 1, 200),
        "alibi expression": (3,), "alibi16": (3, 1, 200),
        "bias": (200, 200), "bias heads": (3, 200, 200), "bias32": (200, 200),
        "bias grad": (200, 200),
    }  # fmt: skip
    for case in map(small, EVERY):
        _, bias = score_peers._split(case, score_peers.random_cupy(case, 1))
        shape = shapes[case.score]
        assert (bias is None) if shape is None else (bias.shape == shape)
        if bias is not None:
            wide = case.score in ("alibi", "alibi expression", "bias32")
            assert bias.dtype == peers.DTYPES["fp32" if wide else "bf16"]
    steps = np.diff(score_peers._bias(small(cases.ScoredAttention(
        "bf16", 128, True, "alibi", 0, 0, 0)), 1)[0][:, 0].astype(np.float64))  # fmt: skip
    want = np.broadcast_to(2.0 ** (-8 * np.arange(1, 4)[:, None] / 3), steps.shape)
    np.testing.assert_allclose(steps, want, rtol=1e-4)


@pytest.mark.parametrize("case", [c for c in SCORES if not c.backward], ids=label)
def test_outputs_are_looked_at(case):
    case = small(case)
    arrays = arrays_of(case)
    check = score_peers.forward_check(case, arrays)
    assert check(score_peers.fa_cupy(case, arrays).run()) < LIMIT
    qkv, bias = bias_of(case, arrays)
    want = reference.attention(*qkv, bias, **options_of(case))[0].astype(np.float32)
    bf16 = peers.DTYPES["bf16"]
    assert check(want.astype(bf16)) < 0.003
    if case.score != "plain":
        assert check(attention(*qkv, is_causal=case.causal)) > LIMIT
    assert check(attention(*qkv, bias, **{**options_of(case), "is_causal": not case.causal})) > 0.1
    want[0, -1, -1] = np.inf
    assert check(want.astype(bf16)) == np.inf


@pytest.mark.long
@pytest.mark.parametrize("case", [c for c in SCORES if c.backward], ids=label)
def test_gradients_are_looked_at(case):
    case = small(case)
    arrays = arrays_of(case)
    check = score_peers.backward_check(case, arrays)
    result = score_peers.fa_cupy_backward(case, arrays).run()
    assert len(result) == 3 + (case.score == "bias grad")
    assert check(result) < LIMIT
    (q, k, v, dout), bias = bias_of(case, arrays)
    want = reference.attention_backward(dout, q, k, v, bias, **options_of(case))[: len(result)]
    bf16 = peers.DTYPES["bf16"]
    assert check([x.astype(bf16) for x in want]) < 0.003
    if case.score != "plain":
        plain = reference.attention_backward(dout, q, k, v, is_causal=case.causal)
        assert check([x.astype(bf16) for x in (*plain, *want[3:])]) > LIMIT
    for i in range(len(result)):
        wrong = [x.copy() for x in result]
        wrong[i][..., 0, :] += 1
        assert check(wrong) > LIMIT
        wrong[i][..., 17, 3] = np.nan
        assert check(wrong) == np.inf


@pytest.mark.parametrize("chunk", [64, 512])
def test_scores_of_gradients_in_float64_are_the_definition(chunk):
    case = dataclasses.replace(small(cases.ATTENTION_SCORES_FWD[0]), causal=True, heads=1)
    q, k, v, dout, bias = np.random.default_rng(0).standard_normal((5, 200, 200))
    for score, options in (("softcap", {"softcap": 30.0}), ("bias32", {"bias": bias})):
        case = dataclasses.replace(case, score=score)
        given = score_peers.score64(case, bias, 0)
        want = reference.attention_backward(dout, q * 9, k, v, is_causal=True, **options)
        got = checks.attention_gradients64(q * 9, k, v, dout, True, chunk, score=given)
        for x, y in zip(got, want[:3], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-11)


def plain_flex(q, k, v, score_mod, block_mask):
    """What FlexAttention computes, with autograd on a CPU too."""
    torch = pytest.importorskip("torch")
    at = [
        torch.arange(n).view([-1] + [1] * (3 - i))
        for i, n in enumerate((*q.shape[:3], *k.shape[2:3]))
    ]
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*at), float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def refused(case, peer):
    """Whether a peer does not take a score."""
    if peer == "flex_sigmoid":
        return case.score != "softcap"
    refused = ("softcap", "softcap expression", "alibi", "alibi expression", "bias32")
    return peer == "sdpa" and case.score in refused


@pytest.mark.parametrize("peer", CPU_PEERS)
def test_peers_compute_the_same(peer, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(sparse_peers, "_flex", lambda: plain_flex)
    for case in map(small, SCORES):
        arrays = arrays_of(case)
        wrap = score_peers.backward if case.backward else score_peers.forward
        check = score_peers.backward_check if case.backward else score_peers.forward_check
        make = wrap(*CPU_PEERS[peer])
        if refused(case, peer):
            with pytest.raises(peers.UnavailableError):
                make(case, arrays)
            continue
        call = make(case, arrays)
        assert check(case, arrays)(call.native(call.run())) < LIMIT, label(case)


def test_cudnn_gives_no_gradient_of_a_bias():
    pytest.importorskip("torch")
    case = small(cases.ATTENTION_SCORES_BWD[-1])
    peer = score_peers.backward(score_peers.torch_sdpa("CUDNN_ATTENTION"))
    with pytest.raises(peers.UnavailableError, match="no gradient of a bias"):
        peer(case, arrays_of(case))


def test_without_torch_peers_say_so(monkeypatch):
    def module(name):
        raise peers.UnavailableError(f"{name} is not installed")

    for name in FAMILIES:
        family = families.FAMILIES[name]
        case = small(family.cases[1])
        arrays = arrays_of(case)
        with monkeypatch.context() as patch:
            patch.setattr(peers, "module", module)
            for impl in set(family.impls) - {"fa_cupy"}:
                with pytest.raises(peers.UnavailableError, match="torch is not installed"):
                    family.impls[impl](case, arrays)


@pytest.mark.long
def test_a_picture_has_bars_of_every_score(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"family": name, "case": case.name, "impl": impl, "ms": 1.0, "value": 100.0 + i,
         "error": 0.0, "unit": "TFLOP/s", "date": "now"}
        for name in FAMILIES
        for case in families.FAMILIES[name].cases
        for i, impl in enumerate(families.FAMILIES[name].impls)
    ]  # fmt: skip
    facts = {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05Z"}
    target = report.draw(rows, facts, str(tmp_path / "bench.png"), "scores")
    assert target.name == "bench-scores.png"
    assert target.stat().st_size > 10_000
    ticks = [report._below(row["case"], "bf16 hd128 full") for row in rows]
    assert {"plain\n4096x4", "bias-\nheads\n4096x4"} < set(ticks)
