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
    with pytest.raises(TypeError) as caught:
        dropout_mask(*on_device(np.zeros(1, np.int64)), 0.3, (3, 4))
    assert str(caught.value) == "dropout_mask: seed is an array on a GPU, want seed.get()"


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


@pytest.mark.parametrize(
    "given", [{"dtype": np.float32}, {"k_lengths": np.full(2, 9)}, {"dim": 264}], ids=str
)
def test_what_no_kernel_does_is_refused(host, cupy, given):
    from fa_cupy.gpu import attention

    keys = {name: given[name] for name in given if name == "k_lengths"}
    q, k, v, dout = arrays(**{name: x for name, x in given.items() if name not in keys})
    problem, inputs = problem_of(q, k, v, **keys), on_device(q, k, v)
    of_keys = KeyArrays(*on_device(*keys.values())) if keys else None
    with pytest.raises(NotImplementedError) as caught:
        attention.attention(problem, *inputs, None, None, None, True, keys=of_keys)
    assert str(caught.value).startswith("attention: dropout is 0.3, and no kernel on a GPU serves")
    results = on_device(dout, np.zeros(dout.shape[:-1], np.float32), dout, None)
    with pytest.raises(NotImplementedError) as caught:
        host.backward(
            problem, (*inputs, None, None), tuple(results), ("q", "k", "v"), None, keys=of_keys
        )
    assert str(caught.value).startswith("attention_backward: dropout is 0.3, and no kernel")
