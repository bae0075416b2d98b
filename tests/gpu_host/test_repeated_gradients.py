"""Repeated calls of `attention_backward`, as on a GPU: which are answered from known plans."""

import subprocess
import sys

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, owned
from validation.digest import ROOT

NAMES = ("dout", "q", "k", "v", "out", "lse")
HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture
def device():
    """A device on which gradients have been asked for once, so that plans are looked up."""
    with cupy_stand_in.on_a_device() as found:
        fa_cupy.attention_backward(*arrays())
        yield found


def array(*shape, dtype=HALF):
    return owned(np.zeros(shape, dtype))


def arrays(length=200, dim=64):
    """dout, q, k, v, out and lse."""
    return [*(array(2, length, dim) for _ in range(5)), array(2, length, dtype=SINGLE)]


def kernels(call, *given, **options):
    """Return the gradients of a call and the kernels that it launched."""
    logged = len(CAPTURE.log)
    found = call(*given, **options)
    return found, [event[1] for event in CAPTURE.log[logged:] if event[0] == "launch"]


def known():
    """What calls are prepared to, by the arguments of calls as they come."""
    from fa_cupy.core import plan_cache

    return {
        key: value
        for key, value in plan_cache.plans.items()
        if key[0] == "attention_backward" and isinstance(key[1], int)
    }


def plans_made(monkeypatch):
    """Return a list that grows with each plan that is looked for by the problem of a call."""
    from fa_cupy.gpu import attention_backward

    asked, prepared = [], attention_backward.prepared

    def counted(*how):
        asked.append(how)
        return prepared(*how)

    monkeypatch.setattr(attention_backward, "prepared", counted)
    return asked


def test_a_repeated_call_is_answered_at_once_and_launches_the_same(device, monkeypatch):
    given = arrays(length=300)
    asked = plans_made(monkeypatch)
    results = [kernels(fa_cupy.attention_backward, *given, is_causal=True) for _ in range(3)]
    assert len(asked) == 1
    assert len(known()) == 1
    assert all(names == results[0][1] and len(names) == 4 for _, names in results)
    for grads, _ in results:
        for x, of in zip(grads, given[1:4], strict=True):
            assert (x.shape, x.strides, x.dtype) == (of.shape, of.strides, of.dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.5},
        {"is_causal": True},
        {"window": (3, 4)},
        {"softcap": 2.0},
        {"dlse": array(2, 200, dtype=SINGLE)},
        {"mask": BitMask.from_dense(np.tri(200, dtype=bool))},
        {"mask": BitMask.from_dense(np.ones((2, 200, 200), bool))},
    ],
    ids=["scale", "is_causal", "window", "softcap", "dlse", "mask", "masks"],
)
def test_calls_that_differ_have_plans_of_their_own(device, monkeypatch, options):
    given = arrays()
    fa_cupy.attention_backward(*given)
    asked = plans_made(monkeypatch)
    for _ in range(2):
        fa_cupy.attention_backward(*given, **options)
    assert len(asked) == 1
    assert len(known()) == 2


def test_a_repeated_call_with_a_bias_has_its_gradient(device, monkeypatch):
    given = arrays(length=300)
    asked = plans_made(monkeypatch)
    biases = array(300, 300), array(300, 300, dtype=SINGLE).T, array(2, 1, 300)
    for i, bias in enumerate(biases):
        for need in (None, ("q", "k", "v")):
            for _ in range(2):
                grads, names = kernels(fa_cupy.attention_backward, *given, bias, need=need)
                like = [*given[1:4], bias][: 4 if need is None else 3]
                assert [x.shape for x in grads] == [x.shape for x in like]
                assert [x.strides for x in grads] == [x.strides for x in like]
                assert [x.dtype for x in grads] == [x.dtype for x in like]
                assert len(names) == (5 if need is None else 4)
        assert len(asked) == 2 * (i + 1)
    # That of float64 is converted, at each call.
    bias = array(300, 300, dtype=np.dtype(np.float64))
    for _ in range(2):
        with np.errstate(invalid="ignore"):  # nothing has computed what is converted
            (*_, dbias), names = kernels(fa_cupy.attention_backward, *given, bias)
        assert (dbias.dtype, len(names)) == (bias.dtype, 5)


def builds():
    """Whether known plans load a bias of pairs to registers, by the stem of a kernel."""
    from fa_cupy.core import plan_cache

    found = {"attention/fwd_sm90": set(), "attention/bwd_sm90": set()}
    for value in plan_cache.plans.values():
        for row in (step.variant for step in value.plan.steps):
            if row.source in found and row.score is not None:
                found[row.source].add(row.score.by_registers)
    return list(found.values())


def test_the_address_of_a_bias_decides_whether_it_is_copied_by_16_bytes(device):
    given, wide = arrays(), array(200, 208)
    for first, of_both in ((0, {False}), (8, {False}), (1, {False, True}), (0, {False, True})):
        bias = wide[:, first : first + 200]
        fa_cupy.attention(*given[1:4], bias)
        fa_cupy.attention_backward(*given, bias, need=("q", "k", "v"))
        assert builds() == [of_both, of_both]


@pytest.mark.parametrize("which", range(5))
def test_arrays_that_kernels_cannot_read_are_copied(device, which):
    given = arrays()
    fa_cupy.attention_backward(*given)
    before = dict(known())
    given[which] = array(2, 200, 72)[..., 1:65]  # begins two bytes after a multiple of 16
    for _ in range(2):
        grads, names = kernels(fa_cupy.attention_backward, *given)
        assert len(names) == 4
        assert [x.shape for x in grads] == [(2, 200, 64)] * 3
    assert known() == before


@pytest.mark.parametrize("which", range(6))
def test_kernels_of_float64_read_any_address(device, monkeypatch, which):
    """That is one of a whole element."""
    double = np.dtype(np.float64)
    given = [*(array(2, 200, 64, dtype=double) for _ in range(5)), array(2, 200, dtype=double)]
    fa_cupy.attention_backward(*given)
    shape = given[which].shape
    given[which] = array(given[which].size + 1, dtype=double)[1:].reshape(*shape)
    asked = plans_made(monkeypatch)
    _, names = kernels(fa_cupy.attention_backward, *given)
    assert names == ["attention_bwd_dq_fp64", "attention_bwd_dkdv_fp64"]
    assert not asked
    bits = array(8 * given[which].size + 8, dtype=np.dtype(np.int8))
    given[which] = bits[4:-4].view(double).reshape(*shape)
    with pytest.raises(ValueError, match="multiples of its item size 8"):
        fa_cupy.attention_backward(*given)


def test_a_call_that_needs_copies_is_looked_at_once(device, monkeypatch):
    given = arrays()
    given[5] = array(2, 400, dtype=SINGLE)[:, ::2]
    asked = plans_made(monkeypatch)
    for _ in range(3):
        _, names = kernels(fa_cupy.attention_backward, *given)
        assert len(names) == 4
    assert len(asked) == 1 + 3  # to know that it does, and for each call
    assert [list(found.copies) for found in known().values()] == [["lse"]]


def test_some_gradients_only(device):
    given = arrays()
    fa_cupy.attention_backward(*given)
    (dk,) = fa_cupy.attention_backward(*given, need=["k"])
    assert dk.shape == (2, 200, 64)


@pytest.mark.parametrize(
    ("which", "wrong", "message"),
    [
        (
            0,
            (2, 200, 32),
            r"attention_backward: dout has shape \(2, 200, 32\), want \(2, 200, 64\)",
        ),
        (2, (2, 200, 32), "attention_backward: k has head_dim 32, q has 64"),
        (5, (2, 100), r"attention_backward: lse has shape \(2, 100\), want \(2, 200\)"),
    ],
)
def test_errors_are_those_of_a_first_call(device, which, wrong, message):
    given = arrays()
    fa_cupy.attention_backward(*given)
    given[which] = array(*wrong, dtype=SINGLE if which == 5 else HALF)
    with pytest.raises(ValueError, match=message):
        fa_cupy.attention_backward(*given)
    numpy = [np.zeros(x.shape, x.dtype) for x in given]
    with pytest.raises(ValueError, match=message):
        fa_cupy.attention_backward(*numpy)


@pytest.mark.parametrize("name", NAMES)
def test_an_array_that_is_missing_is_named(device, name):
    given = arrays()
    fa_cupy.attention_backward(*given)
    given[NAMES.index(name)] = None
    with pytest.raises(TypeError, match=f"^attention_backward: {name} is None, want an array$"):
        fa_cupy.attention_backward(*given)


def test_strides_of_no_whole_elements_are_refused_at_first_and_later(device):
    fa_cupy.attention_backward(*arrays())
    for which in range(6):
        given = [x[:1] for x in arrays()]
        x = given[which]
        given[which] = cupy_stand_in.as_strided(x, x.shape, (7, *x.strides[1:]))
        for _ in range(2):
            with pytest.raises(ValueError, match="multiples of its item size"):
                fa_cupy.attention_backward(*given)


def test_a_captured_call_is_not_answered_at_once(device, monkeypatch):
    given = arrays()
    fa_cupy.attention_backward(*given)
    asked = plans_made(monkeypatch)
    with CAPTURE.record() as capture:
        fa_cupy.attention_backward(*given)
        names = [event[1] for event in capture.log if event[0] == "launch"]
        assert not capture.held
    assert len(names) == 4
    assert len(asked) == 1


def test_options_of_other_types_are_checked(device):
    given = arrays()
    fa_cupy.attention_backward(*given, is_causal=True)
    with pytest.raises(TypeError, match="is_causal"):
        fa_cupy.attention_backward(*given, is_causal="no")
    with pytest.raises(TypeError, match="scale"):
        fa_cupy.attention_backward(*given, scale="1")


LATE = """
import threading, numpy as np, fa_cupy
from tests.support import cupy_stand_in
{early}
def work():
    threading.main_thread().join()
    with cupy_stand_in.on_a_device(), np.errstate(all="ignore"):
        q = cupy_stand_in.owned(np.zeros((2, 64, 64), np.float16))
        out, lse = fa_cupy.attention(q, q, q, return_lse=True)
        print(len(fa_cupy.attention_backward(q, q, q, q, out, lse)), flush=True)
threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("early", ["", "import concurrent.futures.thread"])
def test_a_thread_that_outlives_the_main_thread_can_make_first_calls(early):
    """Then no pool of threads can be imported, or none takes work."""
    command = [sys.executable, "-c", LATE.format(early=early)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "3\n", done.stderr[-2000:]
