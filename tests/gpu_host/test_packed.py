"""Calls with offsets on a device, for which there is no kernel: what is launched in their place.

Float16 arrays without a mask may be served by kernels, so that these calls have masks.
"""

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask, Score
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, owned

HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
OFFSETS = np.array([0, 100, 250, 300])
MASKS = [BitMask(np.ones((n, n), bool)) for n in np.diff(OFFSETS)]


@pytest.fixture(autouse=True)
def _device():
    with cupy_stand_in.on_a_device():
        yield


def arrays(length=300):
    """q, k, v and dout, of grouped heads."""
    return [owned(np.zeros((2, heads, length, 64), HALF)) for heads in (4, 2, 2, 4)]


def kernels(call):
    """Return the answer of a call and the kernels that it launched, but those that make masks."""
    logged = len(CAPTURE.log)
    found = call()
    names = [event[1] for event in CAPTURE.log[logged:] if event[0] == "launch"]
    return found, [name for name in names if "mask" not in name]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_offsets_on_the_host_give_a_call_for_each_sequence(dtype):
    q, k, v, dout = arrays()
    options = {"mask": MASKS, "q_offsets": OFFSETS.astype(dtype)}
    (out, lse), names = kernels(lambda: fa_cupy.attention(q, k, v, return_lse=True, **options))
    assert names == ["attention_fwd_sm90"] * 3
    assert out.shape == q.shape
    given = dout, q, k, v, out, lse
    _, names = kernels(lambda: fa_cupy.attention_backward(*given, **options))
    assert names.count("attention_bwd_sm90") == 3


def test_offsets_on_a_device_are_not_read():
    """Which a stand-in of a device would notice: it refuses to become a number."""
    q, k, v, dout = arrays()
    given = dout, q, k, v, q, owned(np.zeros(q.shape[:-1], SINGLE))
    options = {"mask": owned(np.ones((300, 300), bool)), "q_offsets": owned(OFFSETS)}
    for _ in range(2):  # the second one could have a plan
        _, names = kernels(lambda: fa_cupy.attention(q, k, v, **options))
        assert names == ["attention_fwd_sm90"]
        _, names = kernels(lambda: fa_cupy.attention_backward(*given, **options))
        assert names.count("attention_bwd_sm90") == 1


def test_a_list_of_masks_needs_offsets_on_the_host():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match="mask is a list and offsets are on a device, want offs"):
        fa_cupy.attention(q, k, v, mask=MASKS, q_offsets=owned(OFFSETS))


def test_numbers_on_the_host_are_checked():
    q, k, v, dout = arrays()
    lse = owned(np.zeros(q.shape[:-1], SINGLE))
    wrong = np.array([0, 100, 301])
    for call in (
        lambda: fa_cupy.attention(q, k, v, q_offsets=wrong),
        lambda: fa_cupy.attention_backward(dout, q, k, v, q, lse, q_offsets=wrong),
        lambda: fa_cupy.attention(q, k, v, q_offsets=owned(OFFSETS[:3]), k_offsets=wrong),
    ):
        with pytest.raises(ValueError, match=r"_offsets\[2\] is 301, want 0 to 300"):
            call()


@pytest.mark.parametrize("arg", ["q_offsets", "k_offsets", "k_lengths", "page_table"])
def test_arrays_on_the_host_are_not_copied_in_a_capture(arg):
    """A graph would copy them again, from memory that is no longer theirs."""
    q, k, v, dout = arrays()
    options = {arg: OFFSETS[:2]}
    if "offsets" in arg:
        options = {"q_offsets": owned(OFFSETS), arg: OFFSETS}
    if arg == "page_table":
        k, v = (owned(np.zeros((8, 2, 16, 64), HALF)) for _ in range(2))
        options = {arg: np.zeros((2, 3), np.int32)}
    calls = {"attention": lambda: fa_cupy.attention(q, k, v, **options)}
    if arg != "page_table":
        given = dout, q, k, v, q, owned(np.zeros(q.shape[:-1], SINGLE))
        calls["attention_backward"] = lambda: fa_cupy.attention_backward(*given, **options)
    for name, call in calls.items():
        call()
        with CAPTURE.record():
            with pytest.raises(
                NotImplementedError, match=rf"^{name}: cannot be captured .*: {arg} is copied from"
            ):
                call()
            assert not [event for event in CAPTURE.log if event[0] == "launch"]


def test_scores_by_positions_are_refused_where_no_kernel_knows_them():
    q, k, v, _ = arrays()
    mask = owned(np.ones((300, 300), bool))
    options = {"mask": mask, "softcap": 3.0}  # which no kernel has with an expression
    with pytest.raises(NotImplementedError, match="score has i or j, and no kernel serves this"):
        fa_cupy.attention(q, k, v, score=Score("s + 0.1 * i"), q_offsets=owned(OFFSETS), **options)


def test_calls_that_do_not_fit_have_no_plan():
    """And come to the checks."""
    q, k, v, _ = arrays()
    fa_cupy.attention(q, k, v)
    device = owned(OFFSETS)
    for options, error in (
        ({"k_offsets": device}, "k_offsets is given and q_offsets is None"),
        ({"q_offsets": device, "k_lengths": device[:2]}, "q_offsets and k_lengths are given"),
        ({"q_offsets": device[:0]}, r"q_offsets has shape \(0,\)"),
    ):
        with pytest.raises(ValueError, match=error):
            fa_cupy.attention(q, k, v, **options)
