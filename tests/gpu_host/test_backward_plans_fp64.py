"""How gradients of float64 on CuPy arrays get to the kernels, in the emulator on a stand-in."""

import numpy as np
import pytest

from fa_cupy import BitMask, reference
from tests.gpu_host.test_backward_plans import (
    ALL,
    TABLES,
    Call,
    cupy,
    forget,
    host,
    known,
    launcher,
)
from tests.support import cupy_stand_in
from tests.support.every_run import only
from tests.support.kernel_attention import blocks_of
from tests.support.kernel_gradients import Case

__all__ = ["cupy", "host", "launcher"]  # fixtures
pytestmark = pytest.mark.emulator
KERNELS, KERNEL_OF_BIAS = ["bwd_dq_fp64", "bwd_dkdv_fp64"], "bwd_dbias_fp64"
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}


class FullCall(Call):
    """A call of float64, or of float32, whose options may be a bias and sinks."""

    def __init__(self, given, **layouts):
        super().__init__(given, **layouts)
        self.options = dict(self.options)
        self.bias, self.sinks = (self.options.pop(name, None) for name in ("bias", "sinks"))
        lse = reference.attention(given.q, given.k, given.v, **given.options)[1]
        self.arrays["lse"] = self.device(lse.astype(given.q.dtype), layouts.get("lse"))

    def solve(self, host, cupy, need=ALL, mask=None):
        options = {} if self.sinks is None else {"sinks": self.sinks}
        inputs = [*(self.arrays[name] for name in ALL), self.device(self.bias, None), mask]
        results = [self.arrays[name] for name in ("out", "lse", "dout", "dlse")]
        problem = self.problem(self.bias, mask, **options)
        with np.errstate(all="ignore"):  # a device does not warn
            found = host.by_kernels(
                problem, tuple(inputs), tuple(results), need, host.workspace.empty,
                self.device(self.sinks, None),
            )  # fmt: skip
        return found and {name: cupy_stand_in.bare(x) for name, x in found.items()}

    def check(self, host, cupy, need=ALL, mask=None):
        x, bias = self.plain, self.bias
        options = self.options if self.sinks is None else {**self.options, "sinks": self.sinks}
        given = x["dout"], x["q"], x["k"], x["v"], bias
        want = reference.attention_backward(*given, dlse=x["dlse"], **options)
        names = (*ALL, *(() if bias is None else ("bias",)), "sinks")
        found = self.solve(host, cupy, need, mask)
        assert list(found) == list(need)
        for name, y in zip(names, want, strict=False):
            if name in need:
                assert found[name].shape == y.shape
                eps = max(float(np.finfo(of).eps) for of in (found[name].dtype, x["q"].dtype))
                limit = 500 * eps  # of the largest number
                atol = limit * float(np.abs(y).max())
                np.testing.assert_allclose(found[name], y, 10 * limit, atol, err_msg=name)


def small(dims=(24, 16), heads=(4, 2), lengths=(50, 70), dlse=True, dtype=np.float64, **options):
    rng = np.random.default_rng(0)
    (dim, v_dim), (q_len, k_len) = dims, lengths
    shapes = [(heads[0], q_len, dim), (heads[1], k_len, dim), (heads[1], k_len, v_dim)]
    shapes.append((heads[0], q_len, v_dim))
    drawn = [rng.standard_normal((2, *shape)).astype(dtype) for shape in shapes]
    of_rows = rng.standard_normal((2, heads[0], q_len)).astype(dtype)
    return Case(*drawn, of_rows if dlse else None, options)


@pytest.mark.parametrize("target", only(["sm_90a", "sm_80", "sm_89"], "sm_90a", "sm_89"))
def test_gradients_are_those_of_the_definition(host, cupy, launcher, target):
    launcher.target = target
    FullCall(small(**CAUSAL)).check(host, cupy)
    FullCall(small(dims=(60, 64), dlse=False)).check(host, cupy, ("v", "q"))
    assert launcher.ran == 2 * KERNELS


def test_rows_of_an_odd_number_of_elements(host, cupy, launcher):
    FullCall(small(dims=(27, 13))).check(host, cupy)
    assert launcher.ran == KERNELS
    (prepared,) = known()
    assert not prepared.copies


@pytest.mark.parametrize("name", only(["q", "k", "v", "out", "dout"], "k", "dout"))
def test_rows_may_begin_at_any_element_and_go_either_way(host, cupy, name):
    for layout in ("offset", "upward", "rows"):
        call = FullCall(small(**CAUSAL), **{name: layout})
        call.check(host, cupy)
        (prepared,) = known()
        assert not prepared.copies
        forget()


def test_a_row_that_repeats_is_read_where_it_lies(host, cupy):
    given = small()
    dout = np.broadcast_to(given.dout[..., :1, :], given.dout.shape)
    call = FullCall(given._replace(dout=dout.copy()))
    call.arrays["dout"] = cupy_stand_in.ndarray._of(dout)
    call.check(host, cupy)
    (prepared,) = known()
    assert not prepared.copies


@pytest.mark.parametrize("name", only(["q", "v", "out", "dout", "lse", "dlse"], "v", "lse"))
def test_what_kernels_cannot_read_is_copied(host, cupy, name):
    for layout in ("steps", "reversed", "transposed"):
        FullCall(small(**CAUSAL), **{name: layout}).check(host, cupy)
        (prepared,) = known()
        assert name in prepared.copies
        forget()


OPTIONS = {
    "a softcap": {"softcap": 2.0},
    "a negative scale": {"scale": -0.1},
    "a bias": {"bias": np.random.default_rng(1).standard_normal((4, 1, 70))},
    "a bias of float32": {"bias": np.ones((2, 1, 50, 70), np.float32)},
}


@pytest.mark.parametrize("what", only(OPTIONS, "a bias"))
def test_all_that_stands_before_the_softmax(host, cupy, launcher, what):
    FullCall(small(**CAUSAL, **OPTIONS[what])).check(host, cupy)
    assert launcher.ran == KERNELS


@pytest.mark.parametrize("shape", only([((4, 50, 70),), ((1, 70),)], ((1, 70),)), ids=str)
def test_the_gradient_of_a_bias(host, cupy, launcher, shape):
    """Where blocks share tiles, what they have found is added up by a second launch."""
    bias = np.random.default_rng(1).standard_normal(shape)
    call = FullCall(small(**CAUSAL, bias=bias))
    call.check(host, cupy, (*ALL, "bias"))
    call.check(host, cupy, ("bias", "k"))
    assert launcher.ran == 2 * [*KERNELS, *[KERNEL_OF_BIAS] * (2 if shape == (1, 70) else 1)]


@pytest.mark.parametrize("shape", [(1,), (4, 1), (2, 4, 50)], ids=str)
def test_the_gradient_of_sinks(host, cupy, launcher, shape):
    """Far ones too, and some that do not count."""
    sinks = np.asarray(np.random.default_rng(2).choice([0.5, -2.0, 2.0**12, -np.inf], shape))
    FullCall(small(**CAUSAL, sinks=sinks)).check(host, cupy, (*ALL, "sinks"))
    assert launcher.ran == KERNELS


def test_rows_that_see_no_key(host, cupy):
    sinks = np.where(np.arange(70) % 3 == 0, -np.inf, 1.0)
    options = {"window": (0, 0), "causal_align": "bottom_right", "sinks": sinks}
    given = small(lengths=(70, 30), **options)
    FullCall(given).check(host, cupy, (*ALL, "sinks"))


@pytest.mark.parametrize("make", [cupy_stand_in.owned, BitMask.from_dense])
def test_a_mask(host, cupy, launcher, make):
    """Of bool, whose tables every call makes, and a `BitMask`."""
    mask = blocks_of(np.random.default_rng(4), 2, 2, 50, 150, density=0.5).repeat(2, 1)
    given = small(lengths=(50, 150), mask=mask, **CAUSAL)
    FullCall(given).check(host, cupy, mask=make(mask))
    assert launcher.ran == [*TABLES, *KERNELS]


def test_what_is_not_for_the_kernels(host, cupy, launcher):
    assert FullCall(small(dims=(264, 16), lengths=(8, 8))).solve(host, cupy) is None
    launcher.target = "sm_80"
    assert FullCall(small(dims=(136, 16), lengths=(9, 8))).solve(host, cupy) is None
    assert not launcher.ran
