"""Results of all public functions, compared with those that are stored from before."""

import json
from collections import Counter
from unittest import mock

import numpy as np
import pytest

import fa_cupy
from validation import outcomes, store
from validation.outcomes import machine
from validation.outcomes.data import DTYPES, draw
from validation.outcomes.record import GPU_TOLERANCE, TOLERANCE, Call, difference, outcome


@pytest.fixture(scope="module")
def stored():
    return outcomes.read(outcomes.FILE)


def dtype_of(call):
    """The dtype that the name of a call says; most that say none fail before they compute."""
    return next((word for word in call.name.split() if word in DTYPES), "")


# Each kernel is of one dtype: processes share out what is to be compiled.
@pytest.mark.parametrize("dtype", [*DTYPES, ""])
def test_results_are_the_stored_ones(xp, stored, dtype):
    """Bit for bit where this machine has stored digests, within rounding elsewhere."""
    calls = [call for call in outcomes.calls(xp) if dtype_of(call) == dtype]
    assert len(calls) > 100
    found = outcomes.run(xp, calls)
    digests = stored["digests"].get(machine.key(xp), {})
    lines = outcomes.unexpected(calls, found)
    lines += outcomes.differing_records(xp, calls, stored, found)
    lines += outcomes.differing_bits(digests, found)
    assert not lines, "\n".join(lines)


def test_this_machine_has_stored_digests(xp, stored):
    """All of them, unless another machine has stored other results of some calls since."""
    key = machine.key(xp)
    digests, calls = stored["digests"].get(key, {}), outcomes.calls(xp)
    assert digests.keys() <= {call.name for call in calls}
    count, whole = len(digests), len(calls)
    if count < whole:
        pytest.skip(f"{whole - count} calls are compared within rounding, not stored for {key}")
    assert count == whole


def test_every_call_has_a_name_of_its_own(stored):
    names = Counter(call.name for call in outcomes.calls())
    assert max(names.values()) == 1
    assert outcomes.gone(stored) == []
    assert outcomes.FILE.stat().st_size < 350e3  # 20e3 for the digests of each machine


def test_every_public_function_is_called():
    names = {call.name.split(" ")[0] for call in outcomes.calls()}
    assert set(fa_cupy.__all__) - {"__version__"} <= names


def test_data_are_the_same_everywhere():
    whole = draw("q", (5,), np.float64) / 1.7320508 * 2**23
    assert whole.tolist() == [-2532958, -6526585, 247953, -5598787, 7761740]
    assert abs(draw("q", (10000,), np.float64).mean()) < 0.05
    assert draw("q", (10000,), np.float64).std() == pytest.approx(1, abs=0.02)


# ------------------------------------------------------------------------------ faults are seen
real, every_call = fa_cupy.merge_attention, outcomes.calls


def merging():
    """The calls of one function, which take a few milliseconds."""
    return [call for call in every_call() if "merge_attention" in call.name]


def planted(function):
    """What calls give with another function in the place of `merge_attention`."""
    with mock.patch.object(fa_cupy, "merge_attention", function):
        calls = merging()
        return calls, outcomes.run(np, calls)


def last_bit(outs, lses):
    out, lse = real(outs, lses)
    flat = out.reshape(-1)
    flat.view(f"u{out.itemsize}")[-1] ^= 1
    return out, lse


def scaled(outs, lses):
    out, lse = real(outs, lses)
    return out * out.dtype.type(1.25), lse


def transposed(outs, lses):
    out, lse = real(outs, lses)
    return np.asfortranarray(out), lse


def other_text(outs, lses):
    try:
        return real(outs, lses)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}.") from None


def other_type(outs, lses):
    try:
        return real(outs, lses)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from None


def renamed(outs, logsumexps):
    return real(outs, logsumexps)


def test_a_changed_last_bit_is_seen(stored):
    _, before = planted(real)
    calls, found = planted(last_bit)
    digests = {name: result.digest for name, result in before.items()}
    good = {call.name for call in calls if call.name.startswith("merge_attention")}
    assert len(good) > 10
    lines = outcomes.differing_bits(digests, found)
    assert {line.partition(":")[0] for line in lines} == good
    assert outcomes.differing_bits(digests, before) == []


@pytest.mark.parametrize(
    ("function", "begin"),
    [
        (scaled, "merge_attention "),
        (transposed, "merge_attention "),
        (other_text, "error merge_attention "),
        (other_type, "error merge_attention "),
        (renamed, "parameters of merge_attention"),
    ],
)
def test_a_fault_is_seen_on_any_machine(stored, function, begin):
    calls, found = planted(real)
    assert outcomes.differing_records(np, calls, stored, found) == []
    calls, found = planted(function)
    differing = {
        line.partition(":")[0] for line in outcomes.differing_records(np, calls, stored, found)
    }
    assert {call.name for call in calls if call.name.startswith(begin)} <= differing


def test_an_error_in_place_of_a_result_is_seen():
    def fails(outs, lses):
        raise ValueError("no")

    calls, found = planted(fails)
    assert any("ValueError: no" in line for line in outcomes.unexpected(calls, found))
    calls, found = planted(lambda outs, lses: 0)
    assert any("error" in line for line in outcomes.unexpected(calls, found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [TOLERANCE, GPU_TOLERANCE], ids=["cpu", "gpu"])
def test_rounding_is_allowed_and_no_more(dtype, limits):
    x = draw("x", (40, 30), np.float64)
    old = outcome(Call("", lambda xp: x.astype(DTYPES[dtype])), np).record

    def changed(y):
        return difference(
            old, outcome(Call("", lambda xp: y.astype(DTYPES[dtype])), np).record, limits
        )

    noise = x * limits[dtype] / 4 * draw("noise", x.shape, np.float64)
    assert changed(x + noise) == ""
    assert changed(x * (1 + 3 * limits[dtype])) != ""
    assert changed(x[::-1]) != ""
    assert changed(np.where(x > 1.7, np.nan, x)) != ""
    assert changed(x[:39]) != ""


# ------------------------------------------------------------------------------------ the command
@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run the command with a few calls, on a file of its own."""
    monkeypatch.setattr(outcomes, "calls", lambda *xp: merging())
    monkeypatch.setattr(store, "gpu_available", lambda: False)
    path = tmp_path / "outcomes.json"
    return path, lambda option: outcomes.main([option, str(path)])


def test_written_results_are_checked(command, capsys):
    path, run = command
    assert run("--write") == 0
    assert run("--check") == 0
    count = len(merging())
    assert f"{count} calls, {count} compared bit for bit" in capsys.readouterr().out
    with mock.patch.object(fa_cupy, "merge_attention", last_bit):
        assert run("--check") == 1
    assert "other bits" in capsys.readouterr().out
    assert outcomes.read(path)["calls"].keys() == {call.name for call in merging()}


def test_nothing_is_written_where_a_good_call_fails(command):
    path, run = command
    with mock.patch.object(fa_cupy, "merge_attention", side_effect=ZeroDivisionError):
        assert run("--write") == 1
    assert not path.exists()


def test_digests_of_others_go_where_results_change(command):
    """What another machine stored says nothing of a result that is meant to be another one."""
    path, run = command
    run("--write")
    before = outcomes.read(path)
    (own,) = before["digests"]
    before["digests"]["another"] = dict(before["digests"][own])
    outcomes.write(path, before)
    assert run("--write") == 0
    assert outcomes.read(path) == before
    with mock.patch.object(fa_cupy, "merge_attention", other_text):
        assert run("--write") == 0
    after = outcomes.read(path)
    left = after["digests"]["another"]
    assert {name for name in before["calls"] if name not in left} == {
        call.name for call in merging() if call.fails
    }
    assert json.loads(path.read_text())["machines"] == [own, "another"]
