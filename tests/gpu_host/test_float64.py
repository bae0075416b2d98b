"""Which gradients in float64 kernels compute, and which products of cuBLAS that are faster."""

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask, Score
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.gpu.kernels.attention.full_precision import products_fp64
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, owned

HERE = "sm_90a"
LENGTH = 30


def problem(lengths=(4096, 4096), dims=(256, 256), batch=(4, 8), dtype=np.float64, **options):
    """Of arrays whose elements are all one."""
    (q_len, k_len), (dim, v_dim) = lengths, dims
    sizes = (q_len, dim), (k_len, dim), (k_len, v_dim)
    q, k, v = (np.broadcast_to(np.zeros((), dtype), (*batch, *size)) for size in sizes)
    more = [options.pop(name, None) for name in ("bias", "mask")]
    return attention_problem(q, k, v, *more, **options)


def choice(*given, target=HERE, **options):
    """Whether cuBLAS computes the gradients of a problem."""
    return products_fp64.leaves_to_cublas(problem(*given, **options), target)


def test_wide_dims_go_to_cublas_where_that_was_measured_to_be_faster():
    assert choice()
    assert choice(dims=(64, 136))
    assert choice(dims=(136, 64))
    assert not choice(dims=(128, 128))
    assert not choice(dims=(64, 64))
    assert not choice(target="sm_80")
    assert not choice(target=None)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"is_causal": True, "causal_align": "top_left"}, True),
        ({"softcap": 2.0}, True),
        ({"bias": np.zeros((8, 1, 1))}, True),
        ({"window": (4096, 0), "causal_align": "top_left"}, True),
        ({"window": (None, 9), "causal_align": "top_left"}, True),
        ({"window": (1000, 0), "causal_align": "top_left"}, False),
        ({"mask": np.ones((4096, 1), bool)}, False),
    ],
    ids=str,
)
def test_what_tiles_compute_in_vain_is_for_the_kernels(options, wanted):
    assert choice(**options) == wanted


def test_gradients_of_a_bias_go_to_cublas_above_64_dims():
    bias = np.zeros((8, 1, 1))
    for dims, wanted in (((64, 64), False), ((64, 72), True), ((128, 128), True)):
        found = problem(dims=dims, bias=bias)
        for of_bias in (False, True):
            got = products_fp64.leaves_to_cublas(found, HERE, of_bias)
            assert got == (wanted and of_bias)
    narrow = problem(dims=(128, 128), bias=bias, window=(1000, 0), causal_align="top_left")
    assert not products_fp64.leaves_to_cublas(narrow, HERE, of_bias=True)


def test_small_calls_are_for_the_kernels():
    assert choice(batch=(1, 1))
    assert not choice(lengths=(17, 4096), batch=(2, 8))


# Whole calls


@pytest.fixture
def products(monkeypatch):
    """A device, where calls of any size are large, and what products of cuBLAS are asked for."""
    with cupy_stand_in.on_a_device():
        from fa_cupy.gpu.cublas import attention_backward
        from fa_cupy.gpu.kernels.attention.full_precision import products_fp64

        monkeypatch.setattr(products_fp64, "_LEAST_FLOP", 0)

        asked = []

        def backward(problem, inputs, results, need, empty, *given):
            asked.append("gradients")
            named = zip(("q", "k", "v"), inputs, strict=False)
            return {name: empty(x.shape, x.dtype, x) for name, x in named}

        monkeypatch.setattr(attention_backward, "backward", backward)
        yield asked


def run(asked, dim=136, **options):
    """Compute an output and gradients; return what cuBLAS and what kernels were asked for."""
    q, dout = (owned(np.zeros((2, LENGTH, dim))) for _ in range(2))
    logged = len(CAPTURE.log)
    asked.clear()
    out, lse = fa_cupy.attention(q, q, q, return_lse=True, **options)
    fa_cupy.attention_backward(dout, q, q, q, out, lse, **options)
    names = [event[1] for event in CAPTURE.log[logged:] if event[0] == "launch"]
    return [*asked, *(name for name in names if name.startswith("attention"))]


FORWARD, BACKWARD = "attention_fwd_fp64", ["attention_bwd_dq_fp64", "attention_bwd_dkdv_fp64"]


def test_the_choice_is_that_of_whole_calls(products):
    mask = BitMask.from_dense(np.tri(LENGTH, dtype=bool))
    score = Score("s - 0.1 * abs(i - j)")
    causal = {"is_causal": True, "causal_align": "top_left"}
    for _ in range(3):  # the third one has a plan
        assert run(products) == run(products, **causal) == ["gradients", FORWARD]
        assert run(products, dim=128) == [FORWARD, *BACKWARD]
        assert run(products, mask=mask) == [FORWARD, *BACKWARD]
        assert run(products, score=score) == [FORWARD, *BACKWARD]
        offsets = owned(np.array([0, 7, LENGTH]))
        assert run(products, q_offsets=offsets) == [
            "attention_row_intervals", FORWARD, "attention_row_intervals", *BACKWARD,
        ]  # fmt: skip


def test_kernels_compute_what_is_captured_and_nothing_else(products):
    """Products of cuBLAS cannot be captured. What comes later does not depend on it."""
    assert run(products) == ["gradients", FORWARD]
    for _ in range(2):
        with CAPTURE.record():
            assert run(products) == [FORWARD, *BACKWARD]
        assert run(products) == ["gradients", FORWARD]
