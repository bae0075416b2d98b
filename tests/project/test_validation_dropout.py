"""Checks of results with dropout, and statistics of its decisions, without a GPU."""

import dataclasses

import numpy as np
import pytest

import fa_cupy
from validation import (
    backward_peers,
    dropout,
    dropout_calls,
    dropout_peers,
    families,
    packed_calls,
    peers,
)
from validation.cases import Dense

CASE = Dense("fp32", 16, False, 200, 1, 2, dropout=0.25)
NAMES = ("attention_dropout_fwd", "attention_dropout_bwd")


def case_of(backward, causal=False):
    return dataclasses.replace(CASE, backward=backward, causal=causal)


def arrays_of(case, seed=0):
    draw = backward_peers.random_numpy if case.backward else peers.random_numpy
    return draw(case, seed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_own_results_are_those_of_the_definition(name, causal):
    family = families.FAMILIES[name]
    case = case_of(name.endswith("bwd"), causal)
    arrays = arrays_of(case)
    check = family.check(case, arrays)
    for impl in ("fa_cupy", "fa_cupy_plain"):
        call = family.impls[impl](case, arrays)
        assert check(call.native(call.run())) < 1e-5
    other = family.impls["fa_cupy"](dataclasses.replace(case, dropout=0.5), arrays)
    assert check(other.run()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_results_of_others_are_about_as_far_as_they_should(name, monkeypatch):
    family, case = families.FAMILIES[name], case_of(name.endswith("bwd"))
    arrays = arrays_of(case)
    check = family.check(case, arrays)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "SEED", 5)
        drawn = family.impls["fa_cupy"](case, arrays).run()
    plain = family.impls["fa_cupy_plain"](case, arrays).run()
    assert check(drawn) > 0.1
    assert check(dropout_peers.Drawn(drawn)) == 0.0
    assert check(dropout_peers.Drawn(plain)) == np.inf
    assert check(dropout_peers.Plain(drawn)) > 0.1
    broken = np.full_like(plain[0], np.nan)
    lost = dropout_peers.Drawn((broken, *plain[1:]) if case.backward else broken[None])
    assert check(lost) == np.inf


def test_families_are_whole():
    for name in NAMES:
        family = families.FAMILIES[name]
        assert set(family.default_impls) == {"fa_cupy", "fa_cupy_plain", "cudnn", "flash2"}
        assert {case.name for case in family.cases} >= {"bf16 hd128 full 4096x4 p0.1"}


def test_statistics(capsys):
    assert dropout.main(["--decisions", "3e6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 6


@pytest.mark.parametrize("bug", ["share", "queries", "seeds"])
def test_statistics_find_what_is_not_random(monkeypatch, bug):
    """A share that is a hundredth too large, rows alike, and a seed that does not count."""
    right = fa_cupy.dropout_mask

    def wrong(seed, p, shape, rows):
        if bug == "share":
            return right(seed, p * 1.01, shape, rows=rows)
        if bug == "seeds":
            return right(1, p, shape, rows=rows)
        found = right(seed, p, shape, rows=rows)
        found[..., 1::16, :] = found[..., ::16, :]
        return found

    monkeypatch.setattr(dropout, "dropout_mask", wrong)
    assert dropout.main(["--decisions", "8e6"]) == 1


@pytest.mark.parametrize("kernels", ["sm90", "fp32", "fp64"])
def test_the_reduced_set_of_the_sanitizers_is_made_of_valid_calls(kernels):
    for shape, options in dropout_calls.problems():
        host = dropout_calls.arrays(packed_calls.dtype_of(kernels), 32, shape)
        found = dropout_calls.solve(host, options, lambda x: x)
        assert dropout_calls.is_right(host, options, found, kernels), (shape, options)
        i = len(shape) % 4
        wrong = (*found[:i], 1.1 * found[i].astype(float), *found[i + 1 :])
        assert not dropout_calls.is_right(host, options, wrong, kernels)


def test_calls_of_the_sanitizers_reach_builds_with_dropout():
    for kernels, dim in dropout_calls.parts("sm_90a"):
        rows = dropout_calls.rows_of(kernels, dim, "sm_90a")
        assert any(row.dropout or row.source == "mask/dropout_mask" for row in rows)
    assert {kernels for kernels, _ in dropout_calls.parts("sm_80")} == {"sm80", "fp32", "fp64"}
