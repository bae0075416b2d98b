"""Calls with dropout on a device: their plans serve any seed, and other calls are refused."""

import numpy as np
import pytest

from fa_cupy import dropout_mask, reference
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.dropout.arguments import Dropout, of_arguments
from fa_cupy.keys.layout import KeyArrays
from tests.gpu_host.test_backward_plans import cupy, host, known, launcher
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import bare

__all__ = ["cupy", "host", "launcher"]  # fixtures
pytestmark = pytest.mark.emulator


def arrays(dtype=np.float16, dim=64):
    shapes = (4, 70), (2, 150), (2, 150), (4, 70)
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, *shape, dim)).astype(dtype) for shape in shapes]


def on_device(*given):
    return [None if x is None else cupy_stand_in.ndarray._of(x) for x in given]


def problem_of(q, k, v, p=0.3, seed=1, **options):
    return attention_problem.attention_problem(
        q, k, v, None, None, dropout=Dropout(p, seed), **options
    )


def test_a_seed_on_the_device_is_read_by_each_call(host, cupy):
    from fa_cupy.gpu import attention

    q, k, v, dout = arrays()
    (seed,), inputs = on_device(np.array([-1])), on_device(q, k, v)
    dropout = of_arguments("attention", 0.3, seed)
    assert dropout.on_device
    problem = attention_problem.attention_problem(q, k, v, None, None, dropout=dropout)
    for number in (2**64 - 1, 5):
        bare(seed)[0] = np.uint64(number).astype(np.int64)
        out, lse = (bare(x) for x in attention.attention(problem, *inputs, None, None, None, True))
        want, _ = reference.attention(q, k, v, dropout=0.3, seed=number)
        assert reference.relative_error(out.astype(np.float64), want) < 1e-3
        found = host.backward(
            problem, (*inputs, None, None), tuple(on_device(out, lse, dout, None)), ("v",),
            lambda shape, dtype, like: core_arrays.empty_laid_out(cupy, shape, like, dtype),
        )  # fmt: skip
        want = reference.attention_backward(dout, q, k, v, dropout=0.3, seed=number)[2]
        assert reference.relative_error(bare(found["v"]).astype(np.float64), want) < 1e-3


def test_seeds_on_a_device_are_checked(cupy):
    for seed, text in (
        (np.zeros(1, np.int32), "seed has dtype int32, want int64 or uint64 on a GPU"),
        (np.zeros(2, np.int64), "seed has shape (2,), want an array of one integer"),
        (np.zeros(1, np.float64), "seed has dtype float64, want an integer one"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            of_arguments("attention", 0.3, *on_device(seed))
        assert str(caught.value) == f"attention: {text}"


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_a_mask_where_its_seed_is(host, cupy, p):
    """A seed on a device is read there."""
    (seed,) = on_device(np.array([-1]))
    for shape in ((2, 4, 70, 150), (70, 150), (3, 0, 9)):
        part = {"rows": slice(3, 50), "cols": slice(100, None)}
        found = dropout_mask(seed, p, shape, **part)
        assert type(found) is cupy.ndarray
        np.testing.assert_array_equal(bare(found), dropout_mask(2**64 - 1, p, shape, **part))


def test_a_plan_serves_all_seeds(host, cupy, launcher):
    from fa_cupy.gpu import attention

    q, k, v, dout = arrays()
    made = []
    for seed in (1, 2**64 - 1):
        problem = problem_of(q, k, v, seed=seed)
        inputs = on_device(q, k, v)
        found = attention.attention(problem, *inputs, None, None, None, True)
        out, lse = (bare(x) for x in found)
        want, _ = reference.attention(q, k, v, dropout=0.3, seed=seed)
        assert reference.relative_error(out.astype(np.float64), want) < 1e-3
        grads = host.backward(
            problem, (*inputs, None, None), tuple(on_device(out, lse, dout, None)), ("q", "k", "v"),
            lambda shape, dtype, like: core_arrays.empty_laid_out(cupy, shape, like, dtype),
        )  # fmt: skip
        wants = reference.attention_backward(dout, q, k, v, dropout=0.3, seed=seed)
        for x, y in zip(grads.values(), wants, strict=True):
            assert reference.relative_error(bare(x).astype(np.float64), y) < 1e-3
        made.append(known())
    assert made[0] == made[1]
    main = ["bwd_sm90", "bwd_convert_dq"]
    assert launcher.ran[-4:] == ["bwd_preprocess", *main, "bwd_nonfinite"]


@pytest.mark.parametrize("given", [{"dtype": np.float64}, {"dim": 264}], ids=str)
def test_what_no_kernel_does_goes_to_cublas(host, cupy, monkeypatch, given):
    """With its dropout."""
    from fa_cupy.gpu import attention
    from fa_cupy.gpu.cublas import attention as of_values
    from fa_cupy.gpu.cublas import attention_backward as of_gradients

    asked = []
    monkeypatch.setattr(of_values, "attention", lambda *call: asked.append(call) or call[1:3])
    monkeypatch.setattr(of_gradients, "backward", lambda *call: asked.append(call) or {})
    q, k, v, dout = arrays(**given)
    problem, inputs = problem_of(q, k, v), on_device(q, k, v)
    attention.attention(problem, *inputs, None, None, None, True)
    results = on_device(dout, np.zeros(dout.shape[:-1], np.float32), dout, None)
    host.backward(problem, (*inputs, None, None), tuple(results), ("q", "k", "score.x"), None)
    assert [call[0].dropout is problem.dropout for call in asked] == [True, True]


BAND = {"is_causal": True, "causal_align": "bottom_right"}


def solve(host, problem, inputs, dout, keys=None, on_host=None, mask=None):
    """Output, log-sum-exp and gradients as the device computes them."""
    from fa_cupy.gpu import attention

    given = on_device(*inputs)
    out, lse = attention.attention(
        problem, *given, None, mask, None, True, keys=keys, on_host=on_host
    )
    results = out, lse, *on_device(dout), None
    grads = host.backward(
        problem, (*given, None, mask), results, ("q", "k", "v"),
        lambda shape, dtype, like: core_arrays.empty_laid_out(
            host.cupy, shape, like, dtype
        ), keys=keys, on_host=on_host,
    )  # fmt: skip
    return [bare(x) for x in (out, lse, *grads.values())]


def compare(found, q, k, v, dout, *more, **options):
    options |= {"dropout": 0.3, "seed": 1}
    wants = [*reference.attention(q, k, v, *more, **options)]
    if dout is not None:
        wants += reference.attention_backward(dout, q, k, v, *more, **options)
    for x, y in zip(found, wants, strict=True):
        assert reference.relative_error(x.astype(np.float64), y) < 2e-3


@pytest.mark.parametrize("band", [{}, BAND], ids=str)
def test_key_lengths(host, cupy, band):
    q, k, v, dout = arrays()
    lengths = np.array([9, 120], np.int32)
    problem = problem_of(q, k, v, k_lengths=lengths, **band)
    keys = KeyArrays(*on_device(lengths))
    compare(solve(host, problem, (q, k, v), dout, keys), q, k, v, dout, k_lengths=lengths, **band)


def test_pages(host, cupy):
    from fa_cupy.gpu import attention

    q, *keys, _ = arrays()
    k, v = (np.concatenate([x, x[:, :, :10]], axis=2) for x in keys)
    pages = [x.reshape(2, 2, 10, 16, 64).swapaxes(1, 2).reshape(20, 2, 16, 64) for x in (k, v)]
    order = np.random.default_rng(1).permutation(20)
    table = order.argsort().astype(np.int32).reshape(2, 10)
    stored = [np.ascontiguousarray(x[order]) for x in pages]
    lengths = np.array([31, 150], np.int32)
    problem = problem_of(q, *stored, k_lengths=lengths, page_table=table)
    keys = KeyArrays(*on_device(lengths, table))
    given = on_device(q, *stored)
    found = attention.attention(problem, *given, None, None, None, True, keys=keys)
    compare([bare(x) for x in found], q, k, v, None, k_lengths=lengths)


OFFSETS = {"q_offsets": np.array([0, 20, 20, 66]), "k_offsets": np.array([5, 61, 90, 149])}


@pytest.mark.parametrize("where", ["device", "host", "host and a mask"])
def test_packed_sequences(host, cupy, launcher, where):
    """Whether kernels know of sequences, or each is a call of its own, the same pairs are kept."""
    q, k, v, dout = arrays()
    mask = None if where != "host and a mask" else np.random.default_rng(3).random((70, 150)) < 0.7
    options = {**OFFSETS, **BAND}
    problem = attention_problem.attention_problem(
        q, k, v, None, mask, dropout=Dropout(0.3, 1), **options
    )
    keys = KeyArrays(None, None, *on_device(*OFFSETS.values()))
    on_host = None if where == "device" else KeyArrays(None, None, *OFFSETS.values())
    shown = None if mask is None else cupy_stand_in.owned(mask)
    found = solve(host, problem, (q, k, v), dout, keys, on_host, shown)
    compare(found, q, k, v, dout, None, mask, **options)
    assert launcher.ran.count("fwd_sm90") == (1 if mask is None else 2)
    assert ("row_intervals" in launcher.ran) == (mask is None)


@pytest.mark.parametrize("where", ["dense", "lengths", "offsets"])
def test_float32_forward(host, cupy, launcher, where):
    from fa_cupy.gpu import attention

    q, k, v, _ = arrays(np.float32, 32)
    more = {"lengths": {"k_lengths": np.array([9, 120])}, "offsets": OFFSETS}.get(where, {})
    problem = attention_problem.attention_problem(
        q, k, v, None, None, dropout=Dropout(0.3, 1), **more, **BAND
    )
    named = {"lengths": more.get("k_lengths")} if where == "lengths" else more
    keys = KeyArrays(**{x: on_device(y)[0] for x, y in named.items()}) if more else None
    found = attention.attention(problem, *on_device(q, k, v), None, None, None, True, keys=keys)
    compare([bare(x) for x in found], q, k, v, None, **more, **BAND)
    assert launcher.ran[-1] == "fwd_fp32"


def test_device_offsets_and_a_mask_go_to_cublas(host, cupy, monkeypatch):
    """The kernel of decisions gets the place of each query there; those of attention do not."""
    from fa_cupy.gpu import attention
    from fa_cupy.gpu.cublas import attention as of_values

    asked = []
    answer = on_device(np.zeros((2, 4, 70, 64)), np.zeros((2, 4, 70)))
    monkeypatch.setattr(of_values, "attention", lambda *call: asked.append(call) or answer)
    q, k, v, _ = arrays()
    (mask,) = on_device(np.ones((70, 150), bool))
    problem = attention_problem.attention_problem(
        q, k, v, None, mask, dropout=Dropout(0.3, 1), **OFFSETS
    )
    keys = KeyArrays(None, None, *on_device(*OFFSETS.values()))
    attention.attention(problem, *on_device(q, k, v), None, mask, None, True, keys=keys)
    (call,) = asked
    assert call[0].dropout.placed
    places = bare(call[0].dropout.places)
    assert places.dtype == np.int32
    np.testing.assert_array_equal(
        places[[0, 19, 20, 65]], [[0, 0, 5, 0], [0, 0, 5, 0], [2, 20, 90, 0], [2, 20, 90, 0]]
    )


def test_a_sparse_bias_is_refused(host, cupy):
    from fa_cupy.gpu.masks import pairs

    with pytest.raises(NotImplementedError) as caught:
        pairs.counts_with_bias("attention", problem_of(*arrays()[:3]), None, "sm_90a")
    assert str(caught.value) == (
        "attention: dropout is 0.3 and bias is a sparse matrix on a GPU, want one of them "
        "(or arrays on the CPU)"
    )
