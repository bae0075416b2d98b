"""Errors that are none of ours, as of a handler of signals on a time-out, pass as they are."""

import gc
import os
import signal
import sys
import time
from decimal import Decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from fa_cupy import attention
from fa_cupy.core import arrays, checks

HERE = os.path.dirname(checks.__file__)


class Late(Exception):
    """What a handler of signals raises."""


class Number:
    """Something with a conversion that raises what it is given."""

    def __init__(self, error):
        self.error = error

    def __float__(self):
        raise self.error

    def __repr__(self):
        return "a number"


class Unprintable(Number):
    def __repr__(self):
        raise self.error


def interrupted_at(call, step, error):
    """Call with an error raised at one of the steps that this package takes; what came of it.

    A step is an instruction of Python's machine, before which a handler of signals may run.
    """
    left = step

    def local(frame, event, _):
        nonlocal left
        if event == "opcode":
            left -= 1
            if left == -1:
                raise error
        return local

    def begin(frame, event, _):
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        return call()
    except BaseException as raised:
        return raised
    finally:
        sys.settrace(before)


GOOD = [0.5, 3, np.float32(2), np.int64(2), ml_dtypes.bfloat16(0.5), Fraction(1, 2), np.array(0.5)]
BAD = [
    "1", None, True, 1j, [1.0], np.eye(2), np.array(1j), Decimal("sNaN"), 10**400, 10**5000, -1.0,
    np.nan, Fraction(10**400), Number(TypeError()), Unprintable(TypeError("of its own")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "good"),
    [(x, True) for x in GOOD] + [(x, False) for x in BAD],
    ids=lambda x: "" if isinstance(x, bool) else type(x).__name__,
)
@pytest.mark.parametrize("kind", [Late, TimeoutError, KeyboardInterrupt])
def test_an_error_at_any_step_of_a_check_passes(value, good, kind):
    for step in range(10_000):
        error = kind()
        found = interrupted_at(lambda: checks.finite("f", "x", value, 0.0), step, error)
        if found is not error:
            break  # all steps were taken
        assert found.__cause__ is None
    assert 20 < step < 9_999
    if good:
        assert found == float(value)
    else:
        assert type(found) in (TypeError, ValueError)
        assert str(found).startswith("f: x is ")


@pytest.mark.parametrize("value", [0.5, 2, np.float32(0.5), -7, 10**400], ids=lambda x: str(x)[:9])
@pytest.mark.parametrize("kind", [TypeError, ValueError, OverflowError])
def test_of_usual_numbers_even_errors_of_conversions_kinds_pass(value, kind):
    """Their conversions raise nothing, so that nothing is caught around them."""
    for step in range(10_000):
        error = kind("somebody else's")
        found = interrupted_at(lambda: checks._as_float(value), step, error)
        if found is not error:
            break
    assert 5 < step < 9_999
    assert type(found) is float


def test_time_outs_of_a_handler_pass():
    """As in practice: interrupts of a loop of calls, at any time."""
    x = np.ones((2, 8), np.float32)

    def late(*_):
        raise Late

    rng, caught = np.random.default_rng(0), 0
    before = signal.signal(signal.SIGALRM, late)
    gc.disable()  # Python drops what a handler raises in a callback of its garbage collector
    try:
        last = time.monotonic() + 60
        while caught < 400 and time.monotonic() < last:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 1e-3))
                end = time.monotonic() + 2  # what is raised in a destructor is dropped: once more
                while time.monotonic() < end:
                    checks.finite("f", "softcap", 2.0, minimum=0.0)
            except Late:
                caught += 1
        with pytest.raises(TypeError, match="softcap"):
            attention(x, x, x, softcap="2")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert caught == 400


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (TypeError("no number"), TypeError, "f: x is a number (Number), want a finite number"),
        (ValueError("no number"), ValueError, "f: x is a number (Number), want a finite number"),
        (OverflowError("large"), ValueError, "f: x is a number (Number), want a finite number"),
        (Late("of a library"), Late, "of a library"),
        (RuntimeError("deleted"), RuntimeError, "deleted"),
        (TimeoutError("slow"), TimeoutError, "slow"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "",
)
def test_what_a_conversion_raises(raised, error, text):
    with pytest.raises(error) as caught:
        checks.finite("f", "x", Number(raised))
    assert str(caught.value) == text


def test_what_is_no_number_is_not_converted():
    """Libraries raise errors of their own kinds there, which nobody can tell from others."""

    class Tensor(Number):
        ndim, dtype = 0, "torch.float32"

    for change in ({"ndim": 1}, {"dtype": "torch.complex64"}, {"is_meta": True}):
        value = type("Tensor", (Tensor,), change)(Late())
        with pytest.raises(TypeError, match=r"^f: x is a number \(Tensor\), want a finite number"):
            checks.finite("f", "x", value)
    with pytest.raises(TypeError, match=r"^f: x is .* \(object\), want a finite number"):
        checks.finite("f", "x", object())


@pytest.mark.parametrize("error", [ValueError, AttributeError, KeyError, RuntimeError])
def test_a_broken_repr_does_not_hide_the_message(error):
    value = Unprintable(error("of its own"))
    with pytest.raises(TypeError, match=r"^f: x is something that cannot be printed \(Unpr"):
        checks.flag("f", "x", value)


def test_an_error_while_a_value_is_printed_passes():
    with pytest.raises(Late):
        checks.flag("f", "x", Unprintable(Late()))


@pytest.mark.parametrize("error", [Late(), TimeoutError(), KeyboardInterrupt()], ids=repr)
def test_an_error_while_an_array_is_placed_passes(error):
    def place(self):
        raise error

    methods = {"__dlpack__": None, "__dlpack_device__": place}
    with pytest.raises(type(error)):
        arrays._place("f", "q", type("Array", (), methods)())
