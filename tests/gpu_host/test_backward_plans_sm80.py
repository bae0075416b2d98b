"""How calls with options, and those of other devices, get to kernels, in the emulator."""

import itertools

import numpy as np
import pytest

from fa_cupy import BitMask, reference
from fa_cupy.core import arrays as core_arrays
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from tests.gpu_host.test_backward_plans import (
    ALL,
    NAMES,
    TABLES,
    Call,
    cupy,
    forget,
    host,
    known,
    launcher,
    small,
)
from tests.support import cupy_stand_in
from tests.support.every_run import only
from tests.support.kernel_attention import blocks_of, draw
from tests.support.kernel_gradients import builds_of, gradients, rows_sm80, rows_sm90
from validation.emulator.calls import attention_backward

__all__ = ["cupy", "host", "launcher"]  # fixtures
pytestmark = pytest.mark.emulator
KERNELS = ["bwd_preprocess", "bwd_dkdv_sm80", "bwd_dq_sm80", "bwd_nonfinite"]
KERNELS_SM90 = ["bwd_preprocess", "bwd_sm90", "bwd_convert_dq", "bwd_nonfinite"]


class Sm80Call(Call):
    """A call whose options may be a bias and a mask."""

    rows = staticmethod(rows_sm80)

    def __init__(self, given, **layouts):
        super().__init__(given, **layouts)
        self.options = dict(self.options)
        self.more = [self.options.pop(name, None) for name in ("bias", "mask")]

    def solve(self, host, cupy, need=ALL, mask=None):
        bias, mask = self.more
        bias = None if bias is None else cupy_stand_in.ndarray._of(bias)
        if mask is not None and not isinstance(mask, BitMask):
            mask = cupy_stand_in.owned(mask)
        return super().solve(host, cupy, need, mask, bias)

    def want(self):
        x, (bias, mask) = self.plain, self.more
        dtype, dims = x["q"].dtype.name, (x["q"].shape[-1], x["v"].shape[-1])
        rows = builds_of(self.rows(dtype, *dims, mask is not None), self.given)
        given = x["dout"], x["q"], x["k"], x["v"], x["out"], x["lse"], x["dlse"], bias, mask
        return dict(zip(ALL, attention_backward(rows, *given, **self.options), strict=True))


class Sm90Call(Sm80Call):
    """Such a call on another device."""

    rows = staticmethod(rows_sm90)


MASK = blocks_of(np.random.default_rng(3), 2, 2, 70, 150, density=0.5)
BIAS = draw(2, 1, 150, dtype=np.dtype(np.float32))
OPTIONS = {
    "a softcap": {"softcap": 2.0},
    "a negative scale": {"scale": -0.1},
    "a bias": {"bias": BIAS},
    "a bias of float64 that goes down": {"bias": BIAS.astype(np.float64)[:, :, ::-1]},
    "a mask and a bias": {"mask": MASK, "bias": BIAS},
    "a BitMask and a softcap": {"mask": BitMask.from_dense(MASK), "softcap": 2.0},
}


ALWAYS = "a mask and a bias", "a BitMask and a softcap"


@pytest.mark.parametrize("what", only(OPTIONS, *ALWAYS))
def test_all_that_stands_before_the_softmax(host, cupy, launcher, what):
    """With a mask or without, on both kinds of devices."""
    given = small(dlse=True, is_causal=True, causal_align="bottom_right")
    given = given._replace(options={**given.options, **OPTIONS[what]})
    Sm90Call(given).check(host, cupy)
    assert [name for name in launcher.ran if name not in TABLES] == KERNELS_SM90
    Sm90Call(given).check(host, cupy, ("v", "q"))
    forget()
    launcher.target = "sm_80"
    launcher.ran.clear()
    Sm80Call(given).check(host, cupy)
    assert [name for name in launcher.ran if name not in TABLES] == KERNELS


@pytest.mark.parametrize(
    ("target", "masked"),
    only(
        itertools.product(("sm_80", "sm_89", "sm_100", "sm_120"), (False, True)),
        ("sm_80", True),
        ("sm_120", False),
    ),
)
def test_devices_that_are_no_sm90(host, cupy, launcher, target, masked):
    launcher.target = target
    options = {"mask": np.repeat(MASK, 2, 1)} if masked else {}
    Sm80Call(small((56, 40), (4, 2), **options)).check(host, cupy)
    assert [name for name in launcher.ran if name not in TABLES] == KERNELS


@pytest.mark.parametrize("name", only(NAMES, "k", "dlse"))
def test_what_kernels_cannot_read_is_copied(host, cupy, launcher, name):
    launcher.target = "sm_80"
    for layout in ("steps" if name in ("lse", "dlse") else "offset", "reversed", "transposed"):
        Sm80Call(small(dlse=True), **{name: layout}).check(host, cupy)
        (prepared,) = known()
        assert name in prepared.copies
        forget()


def test_a_bias_is_read_as_it_lies(host, cupy):
    wide = draw(2, 150, 70, dtype=np.dtype(np.float16)).swapaxes(1, 2)
    for bias in (wide, np.broadcast_to(wide[:1, :1], (2, 70, 150)), wide[:, ::-1, ::-1]):
        Sm90Call(small(bias=bias)).check(host, cupy)
    assert not any("bias" in prepared.copies for prepared in known())
    assert len(known()) == 3


TURNED = draw(2, 150, 70, dtype=np.dtype(np.float32)).swapaxes(1, 2)
BIASES = {
    "of keys": BIAS,
    "turned": TURNED,
    "of queries": TURNED[:, ::-1, :1],
    "broadcast": np.broadcast_to(BIAS, (2, 70, 150)),
}


@pytest.mark.parametrize("dtype", only([np.float32, np.float64], np.float32))
@pytest.mark.parametrize("name", only(BIASES, "of keys", "turned"))
def test_the_gradient_of_a_bias_comes_from_kernels(host, cupy, launcher, name, dtype):
    bias = BIASES[name].astype(dtype)
    call = Sm90Call(small(bias=bias, is_causal=True, causal_align="bottom_right"))
    found = call.solve(host, cupy, (*ALL, "bias"))
    assert launcher.ran == [*KERNELS_SM90, "bwd_dbias_sm80"]
    for of, want in call.want().items():
        np.testing.assert_array_equal(found[of].view(np.uint16), want.view(np.uint16), of)
    want = reference.attention_backward(
        call.plain["dout"], *(call.plain[name] for name in ALL), bias, **call.options
    )[3]
    assert (found["bias"].dtype, found["bias"].shape) == (bias.dtype, bias.shape)
    np.testing.assert_allclose(found["bias"], want, atol=4e-3)
    if dtype == np.float32:  # else it is converted, as the bias is
        assert core_arrays.memory_order(bias.shape, found["bias"]) == core_arrays.memory_order(
            bias.shape, bias
        )
    alone = call.solve(host, cupy, ("bias",))
    assert list(alone) == ["bias"]
    np.testing.assert_array_equal(alone["bias"], found["bias"])


def test_more_batch_axes_than_the_kernels_walk_are_for_others(host, cupy):
    given = small()
    bias = np.zeros((2, 1, 2, 1, 1, 1), np.float16)
    call = Sm80Call(given)
    for name, x in call.plain.items():
        if x is not None:
            wide = np.ascontiguousarray(
                np.broadcast_to(x[:, None, :, None], (2, 2, 2, 2, *x.shape[2:]))
            )
            call.arrays[name] = cupy_stand_in.ndarray._of(wide)
    call.more[0] = bias
    assert call.solve(host, cupy) is None
    call.more[0] = None
    assert call.solve(host, cupy) is not None


def test_gradients_of_the_definition(host, cupy, launcher):
    """Not only the bits of the same kernels."""
    launcher.target = "sm_86"
    given = small(bias=BIAS, mask=MASK, softcap=3.0)
    found, want = Sm80Call(given).solve(host, cupy), gradients(given)
    for name, x in found.items():
        np.testing.assert_allclose(x.astype(float), getattr(want, f"d{name}"), atol=4e-3)


@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_select(target):
    for masked in (False, True):
        found = rows_sm80("float32", 129, 64, masked, target)
        assert bool(found) == (target == "sm_90a")
        assert rows_sm80("float16", 257, 64, masked, target) == ()
        for dim in range(8, 264, 8):
            rows = rows_sm80("bfloat16", 8, dim, masked, target)
            assert [row.kernel for row in rows] == KERNELS
            assert all(row.dim >= dim and target in row.targets for row in rows)
            assert [row.sparse for row in rows] == [False, masked, masked, False]
    assert rows_sm80("float16", 64, 64, target=None) == ()
