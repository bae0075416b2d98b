"""How gradients of float32 on CuPy arrays get to the kernels, in the emulator on a stand-in."""

import functools

import numpy as np
import pytest

from fa_cupy import BitMask
from tests.gpu_host import test_backward_plans_fp64 as of_float64
from tests.gpu_host.test_backward_plans import ALL, TABLES, cupy, host, launcher
from tests.gpu_host.test_backward_plans_fp64 import CAUSAL, FullCall
from tests.support import cupy_stand_in
from tests.support.every_run import only
from tests.support.kernel_attention import blocks_of

__all__ = ["cupy", "host", "launcher"]  # fixtures
pytestmark = pytest.mark.emulator
KERNELS = ["bwd_preprocess_fp32", "bwd_dq_fp32", "bwd_dkdv_fp32"]
BY_WGMMA = [KERNELS[0], *(f"{name}_sm90" for name in KERNELS[1:])]
small = functools.partial(of_float64.small, dtype=np.float32)


@pytest.mark.parametrize("target", only(["sm_90a", "sm_80", "sm_89"], "sm_90a"))
def test_gradients_are_those_of_the_definition(host, cupy, launcher, target):
    launcher.target = target
    FullCall(small(**CAUSAL)).check(host, cupy)
    FullCall(small(dims=(27, 13), dlse=False)).check(host, cupy, ("v", "q"))
    assert launcher.ran == 2 * KERNELS


def test_wider_rows_are_for_wgmma(host, cupy, launcher):
    """Those above 32; rows may begin at any element, and of sinks there is a gradient, too."""
    FullCall(small(dims=(27, 45), dlse=False, **CAUSAL), k="upward").check(host, cupy)
    sinks = np.float32([0.5, -2.0, 2.0**12, -np.inf])[:, None]
    FullCall(small(dims=(40, 33), sinks=sinks)).check(host, cupy, (*ALL, "sinks"))
    assert launcher.ran == 2 * BY_WGMMA
    launcher.ran.clear()
    launcher.target = "sm_89"
    FullCall(small(dims=(27, 45))).check(host, cupy)
    assert launcher.ran == KERNELS


@pytest.mark.parametrize("name", only(["q", "v", "out", "dout", "lse", "dlse"], "v", "lse"))
def test_what_kernels_cannot_read_is_copied(host, cupy, name):
    layout = "steps" if name in ("lse", "dlse") else "offset"
    FullCall(small(**CAUSAL), **{name: layout}).check(host, cupy)


@pytest.mark.parametrize("shape", [(1,), (4, 1), (2, 4, 50)], ids=str)
def test_the_gradient_of_sinks(host, cupy, launcher, shape):
    """Far ones too, and some that do not count."""
    drawn = np.random.default_rng(2).choice([0.5, -2.0, 2.0**12, -np.inf], shape)
    given = small(**CAUSAL, sinks=drawn.astype(np.float32))
    FullCall(given).check(host, cupy, (*ALL, "sinks"))
    assert launcher.ran == KERNELS


@pytest.mark.parametrize("of", only(["float64", "float16", "float32"], "float64"))
@pytest.mark.parametrize("shape", [(4, 50, 70), (2, 1, 1, 70)], ids=str)
def test_the_gradient_of_a_bias(host, cupy, launcher, shape, of):
    """Kernels read one of float64 as float32, and it gets its gradient in float64."""
    bias = np.random.default_rng(1).standard_normal(shape).astype(of)
    FullCall(small(**CAUSAL, bias=bias)).check(host, cupy, (*ALL, "bias"))
    assert {*launcher.ran} == {*KERNELS, "bwd_dbias_fp32"}


@pytest.mark.parametrize("make", [cupy_stand_in.owned, BitMask.from_dense])
def test_a_mask(host, cupy, launcher, make):
    """Of bool, whose tables every call makes, and a `BitMask`."""
    mask = blocks_of(np.random.default_rng(4), 2, 2, 50, 150, density=0.5).repeat(2, 1)
    given = small(lengths=(50, 150), mask=mask, **CAUSAL)
    FullCall(given).check(host, cupy, mask=make(mask))
    assert launcher.ran == [*TABLES, *KERNELS]


def test_what_is_not_for_the_kernels(host, cupy, launcher):
    """Dims above 256, and scales that sums would have to be multiplied by."""
    assert FullCall(small(dims=(264, 16), lengths=(8, 8))).solve(host, cupy) is None
    for scale in (1e30, 1e-20):
        assert FullCall(small(scale=scale)).solve(host, cupy) is None
    assert not launcher.ran
