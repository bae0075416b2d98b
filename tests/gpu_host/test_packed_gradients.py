"""Gradients over packed sequences by the kernels' host side, in the emulator on a stand-in."""

import numpy as np
import pytest

from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.keys.layout import KeyArrays
from tests.gpu_host.test_backward_plans import cupy, host, launcher
from tests.support import cupy_stand_in, gradients_of_biases, packed_sequences
from tests.support.cupy_stand_in import bare
from tests.support.kernel_gradients import compare
from tests.support.packed_gradients import given, packed, results

__all__ = ["cupy", "host", "launcher"]  # fixtures
pytestmark = pytest.mark.emulator
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}
OFFSETS = np.array([3, 40, 40, 41, 150, 190]), np.array([0, 9, 30, 100, 161, 170], np.int32)
DISORDER = np.array([0, 50, 30, 100, 190]), np.array([0, 60, 70, 100, 170])


def solve(x, host, cupy, need):
    """What the module under test makes of a call."""

    def empty(shape, dtype, like):
        found = core_arrays.empty_laid_out(cupy, shape, like, dtype)
        bare(found)[...] = np.nan
        return found

    def there(a):
        return None if a is None else cupy_stand_in.ndarray._of(a)

    options = dict(given(x))
    bias, sinks = (there(options.pop(name, None)) for name in ("bias", "sinks"))
    q, k, v, dout, dlse = (there(a) for a in x.call[:5])
    out, lse = (there(a) for a in results(x))
    keys = KeyArrays(None, None, *[there(a) for a in x.offsets])
    problem = attention_problem.attention_problem(
        q, k, v, bias, None, sinks=sinks, q_offsets=keys.q_offsets, k_offsets=keys.k_offsets,
        **options,
    )  # fmt: skip
    inputs, given_back = (q, k, v, bias, None), (out, lse, dout, dlse)
    with np.errstate(all="ignore"):  # a device does not warn
        found = host.backward(problem, inputs, given_back, need, empty, sinks, keys=keys)
    return {name: bare(a) for name, a in found.items()}


@pytest.mark.parametrize("dim", [64, 192])
def test_gradients_are_the_kernels(host, cupy, launcher, dim):
    x = packed("float16", (2, 1), (200, 180), (dim, dim), OFFSETS, CAUSAL, dlse=True)
    compare(x.call, solve(x, host, cupy, ("q", "k", "v")).values())
    narrow = ["bwd_preprocess", "bwd_sm90", "bwd_convert_dq"]
    main = narrow if dim == 64 else ["bwd_preprocess", "bwd_dkdv_sm90", "bwd_dq_sm90"]
    assert launcher.ran == ["row_intervals", *main, "bwd_nonfinite"]


def test_the_gradient_of_a_bias(host, cupy, launcher):
    bias = np.random.default_rng(0).standard_normal((2, 200, 180)).astype(np.float32)
    x = packed("float16", (2, 1), (200, 180), (64, 64), OFFSETS, CAUSAL, bias=bias)
    found = solve(x, host, cupy, ("q", "k", "v", "bias"))
    compare(x.call, [found[name] for name in "qkv"])
    gradients_of_biases.compare(x.call, found["bias"])
    assert launcher.ran[-1] == "bwd_dbias_sm80"


@pytest.mark.parametrize("offsets", [OFFSETS, DISORDER], ids=["in order", "out of order"])
def test_the_gradient_of_sinks(host, cupy, offsets):
    """Rows of no sequence see nothing but the sink; sequences out of order have no part in it."""
    sinks = np.array([[0.5], [-1.0]], np.float32)
    x = packed("float16", (2, 1), (200, 180), (64, 64), offsets, CAUSAL, sinks=sinks, dlse=True)
    found = solve(x, host, cupy, ("q", "k", "v", "sinks"))
    compare(x.call, [found[name] for name in "qkv"])
    np.testing.assert_allclose(found["sinks"], gradient_of_sinks(x), rtol=2e-3)


def gradient_of_sinks(x):
    """In float64, of rows that have an output."""
    out, lse = (a.astype(np.float64) for a in results(x))
    call, invalid = x.call, packed_sequences.invalid_rows(*x.offsets, (200, 180))
    delta = (call.dout.astype(np.float64) * out).sum(-1) - call.dlse
    terms = -np.exp(call.options["sinks"] - lse) * delta
    return np.where(invalid, 0, terms).sum(axis=(0, 2))[:, None]
