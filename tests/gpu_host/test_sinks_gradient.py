"""The gradient of sinks from what kernels leave in a workspace, in the emulator on a stand-in."""

import numpy as np
import pytest

from fa_cupy import reference
from fa_cupy.core import arrays as core_arrays
from tests.gpu_host.test_backward_plans import Call, cupy, host, launcher, small
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, bare

__all__ = ["cupy", "host", "launcher"]  # fixtures
pytestmark = pytest.mark.emulator
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}
NEED = ("q", "k", "v", "sinks")


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def solve(call, host, cupy, need=NEED, empty=None):
    """The gradients of the kernels' host side, and those in float64."""

    def unset(shape, dtype, like):
        x = core_arrays.empty_laid_out(cupy, shape, like, dtype)
        bare(x)[...] = np.nan
        return x

    sinks = call.options["sinks"]
    inputs = (*(call.arrays[name] for name in "qkv"), None, None)
    results = tuple(call.arrays[name] for name in ("out", "lse", "dout", "dlse"))
    given = cupy_stand_in.ndarray._of(sinks)
    with np.errstate(all="ignore"):  # a device does not warn
        found = host.by_kernels(call.problem(), inputs, results, need, empty or unset, given)
    x = call.plain
    want = reference.attention_backward(
        x["dout"], x["q"], x["k"], x["v"], dlse=x["dlse"], **call.options
    )
    return {name: bare(y) for name, y in found.items()}, dict(zip(NEED, want, strict=True))


def check(found, want, limit=2e-3):
    for name, x in found.items():
        assert x.shape == want[name].shape
        assert reference.relative_error(x, want[name]) < limit, name


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (4, 1), (2, 1, 1), (70,), (4, 70), (2, 4, 70)], ids=str)
def test_any_shape_and_dtype(host, cupy, shape, dtype):
    sinks = np.asarray(normal(*shape, dtype=dtype))
    call = Call(small(heads=(4, 2), dlse=True, sinks=sinks, **CAUSAL))
    found, want = solve(call, host, cupy)
    assert found["sinks"].dtype == dtype
    check(found, want)


def test_sinks_that_repeat_along_a_stride_of_0_have_gradients_of_their_own(host, cupy):
    sinks = np.broadcast_to(normal(1, 70), (4, 70))
    check(*solve(Call(small(heads=(4, 2), sinks=sinks)), host, cupy))


def test_sinks_alone(host, cupy, launcher):
    call = Call(small(sinks=normal(2, 1)))
    found, want = solve(call, host, cupy, ("sinks",))
    assert list(found) == ["sinks"]
    check(found, want)


def test_infinite_sinks_and_rows_without_keys(host, cupy):
    """The first 50 queries see no key, and the kernels compute nothing of them."""
    sinks = np.where(np.arange(200) % 3 == 0, -np.inf, normal(4, 200))
    lengths, band = (200, 30), {"window": (0, 0), "causal_align": "bottom_right"}
    call = Call(small(heads=(4, 4), lengths=lengths, dlse=True, sinks=sinks, **band))
    found, want = solve(call, host, cupy)
    assert not found["sinks"][:, ::3].any()
    check(found, want)


def test_log_sum_exps_that_are_too_large_for_weights(host, cupy):
    """With a key of the same score in every other row, and without any."""
    lengths, band = (140, 70), {"window": (0, 0), "causal_align": "top_left"}
    sinks = np.full((2, 140), 2.0**22, np.float32)
    sinks[:, ::7] = 1.0
    given = small(heads=(2, 2), lengths=lengths, dlse=True, sinks=sinks, **band)
    given.q[...], given.k[...] = 0, 0
    given.q[..., ::2, 0], given.k[..., 0] = 2.0**11, 2.0**14  # times 1 / 8
    check(*solve(Call(given), host, cupy))


def test_every_call_gives_the_same_bits(host, cupy):
    call = Call(small(heads=(4, 2), sinks=normal(4, 1)))
    first, second = (solve(call, host, cupy)[0] for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in NEED)


def test_results_alone_outlive_a_capture(host, cupy):
    call = Call(small(sinks=normal(2, 1)))
    want = solve(call, host, cupy)[0]
    with CAPTURE.record(), host.workspace.computing(0):
        found = solve(call, host, cupy, empty=host.workspace.empty)[0]
    assert not CAPTURE.held
    asked = [event[1] for event in CAPTURE.log if event[0] == "pool"]
    assert asked == [x.nbytes for x in found.values()]
    assert all(found[name].tobytes() == want[name].tobytes() for name in NEED)
