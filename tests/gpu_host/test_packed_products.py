"""Causal products of packed sequences as ``fa_cupy.gpu`` computes them, in the emulator."""

from types import SimpleNamespace

import numpy as np
import pytest

from fa_cupy.core import linear_problem
from fa_cupy.cpu.packed import products as cpu
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.offsets import Offsets
from tests.support.kernels_for_cupy import array, packed_products
from tests.support.products import draw
from tests.support.strategies import DTYPES, UNIT
from validation.emulator.launcher import EmulatorLauncher

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
pytestmark = pytest.mark.emulator

BOUNDS = [3, 10, 10, 80, 81, 85]
KEY_BOUNDS = [0, 30, 31, 31, 60, 84]
LENGTH = 90


@pytest.fixture
def module():
    """The module on NumPy, with kernels in the emulator."""
    with packed_products() as found:
        yield found


class Noting(EmulatorLauncher):
    """Notes the sources of what it launches."""

    def __init__(self):
        super().__init__()
        self.sources = []

    def _kernel(self, step):
        run = super()._kernel(step)

        def noted(*given):
            self.sources.append(step.variant.source)
            return run(*given)

        return noted


def offsets(bounds, dtype=np.int64):
    return array(np.array(bounds, dtype))


def keys_of(q_bounds, k_bounds=None, dtype=np.int64):
    q = offsets(q_bounds, dtype)
    return KeyArrays(q_offsets=q, k_offsets=q if k_bounds is None else offsets(k_bounds, np.int32))


def problem_of(keys, *arrays, **options):
    q, k = keys.q_offsets, keys.k_offsets
    where = Offsets(len(q) - 1, q.dtype, k.dtype)
    return linear_problem.product_problem("test", *arrays, offsets=where, **options)


def states(problem, seed):
    return draw(problem.state_shape, dtype=problem.state_dtype, seed=seed)[0]


def check(got, want, dtype):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
        unit = 40 * UNIT[dtype] if dtype != SINGLE else 4000 * UNIT[dtype]
        np.testing.assert_allclose(x, y, rtol=unit, atol=unit * max(1, np.abs(y).max(initial=0)))


SHAPES = [
    ((), (), ()),
    ((2, 4), (2, 2), (2, 2)),
    ((3,), (1,), (3,)),
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_and_gradients_as_on_the_cpu(module, dtype, reverse, shapes):
    q, k, v = draw(
        *((*shape, LENGTH, dim) for shape, dim in zip(shapes, (12, 12, 9), strict=True)),
        dtype=dtype,
    )
    keys = keys_of(BOUNDS)
    problem = problem_of(keys, q, k, v)
    initial = states(problem, 1)
    problem = problem_of(keys, q, k, v, initial)
    options = {"reverse": reverse, "return_state": True}
    want = cpu.product(problem, q, k, v, initial, None, keys, **options)
    given = [array(x) for x in (q, k, v, initial)]
    check(module.product(problem, *given, None, keys, **options), want, dtype)

    dout = draw(problem.out_shape, dtype=dtype, seed=2)[0]
    dstate = states(problem, 3)
    want = cpu.backward(problem, dout, q, k, v, initial, dstate, keys, reverse=reverse)
    got = module.backward(problem, array(dout), *given, array(dstate), keys, reverse=reverse)
    check(got, want, dtype)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_products_of_rows_that_tensor_maps_walk(dtype, reverse):
    """Gradients are one launch; another one where an array lies elsewhere."""
    launcher = Noting()
    shapes = (2, 4, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 24)
    q, k, v = draw(*shapes, dtype=dtype)
    keys = keys_of(BOUNDS)
    initial = states(problem_of(keys, q, k, v), 1)
    problem = problem_of(keys, q, k, v, initial)
    options = {"reverse": reverse, "return_state": True}
    dout, dstate = draw(problem.out_shape, dtype=dtype, seed=2)[0], states(problem, 3)
    want = cpu.product(problem, q, k, v, initial, None, keys, **options)
    grads = cpu.backward(problem, dout, q, k, v, initial, dstate, keys, reverse=reverse)
    with packed_products(launcher) as module:
        for shifted, source in ((0, "linear/chunk_sm90"), (1, "linear/chunk_sm80")):
            moved = array(np.empty(k.size + shifted, dtype))[shifted:].reshape(k.shape)
            moved[...] = k
            given = [array(q), moved, *map(array, (v, initial))]
            launcher.sources.clear()
            found = module.product(problem, *given, None, keys, **options)
            check(found, want, dtype)
            assert launcher.sources.count(source) == 1
            launcher.sources.clear()
            check(
                module.backward(problem, array(dout), *given, array(dstate), keys, reverse=reverse),
                grads,
                dtype,
            )
            assert launcher.sources.count(source) == (3 if shifted else 1)


@pytest.mark.parametrize("shapes", SHAPES[:2])
@pytest.mark.parametrize("feature", ["elu1", None])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [BFLOAT16, SINGLE, DOUBLE])
def test_linear_attention_as_on_the_cpu(module, dtype, is_causal, feature, shapes):
    q, k, v = draw(
        *((*shape, LENGTH, dim) for shape, dim in zip(shapes, (6, 6, 5), strict=True)),
        dtype=dtype,
    )
    if feature is None:
        q, k = np.abs(q), np.abs(k)
    keys = keys_of(BOUNDS)
    if not is_causal:
        q, keys = q[..., :86, :], keys_of(BOUNDS, KEY_BOUNDS)
    how = {"aligned": is_causal, "normalised": True}
    problem = problem_of(keys, q, k, v, **how)
    initial = np.abs(states(problem, 1))
    problem = problem_of(keys, q, k, v, initial, **how)
    given = [array(x) for x in (q, k, v, initial)]
    options = {"feature": feature, "eps": 0.5, "is_causal": is_causal}
    want = cpu.linear_attention(problem, q, k, v, initial, None, keys, **options, return_state=True)
    got = module.linear_attention(problem, *given, None, keys, **options, return_state=True)
    check(got, want, dtype)

    dout = draw(problem.out_shape, dtype=dtype, seed=2)[0]
    dstate = states(problem, 3)
    want = cpu.linear_attention_backward(problem, dout, q, k, v, initial, dstate, keys, **options)
    got = module.linear_attention_backward(
        problem, array(dout), *given, array(dstate), keys, **options
    )
    check(got, want, dtype)


WRONG = [3, 10, 7, 80, 99, 85]  # after clipping and running maxima: 3, 10, 10, 80, 90, 90
VALID = [(3, 10)]
INVALID = [(10, 80), (80, 90)]
OF_SEQUENCE = [False, True, True, True, True]  # whether each has an offset that is out of range


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_out_of_range(module, dtype):
    q, k, v = draw((LENGTH, 12), (LENGTH, 12), (LENGTH, 9), dtype=dtype)
    keys = keys_of(WRONG, dtype=np.int32)
    problem = problem_of(keys, q, k, v)
    initial = states(problem, 1)
    problem = problem_of(keys, q, k, v, initial)
    given = [array(x) for x in (q, k, v, initial)]
    out, last = module.product(problem, *given, None, keys, reverse=False, return_state=True)
    dout, dstate = draw(problem.out_shape, dtype=dtype, seed=2)[0], states(problem, 3)
    grads = module.backward(problem, array(dout), *given, array(dstate), keys, reverse=False)
    out, last, *grads = (np.asarray(x).astype(np.float64) for x in (out, last, *grads))
    for begin, end in INVALID:
        assert np.isnan(out[begin:end]).all()
        assert not any(grad[begin:end].any() for grad in grads[:3])
    np.testing.assert_array_equal(np.isnan(last).all(axis=(1, 2)), OF_SEQUENCE)
    np.testing.assert_array_equal((grads[3] == 0).all(axis=(1, 2)), OF_SEQUENCE)
    assert not out[:3].any()
    for begin, end in VALID:
        assert np.isfinite(out[begin:end]).all()
        assert all(grad[begin:end].any() for grad in grads[:3])


@pytest.mark.parametrize("is_causal", [True, False])
def test_linear_attention_of_sequences_out_of_range(module, is_causal):
    q, k, v = draw((LENGTH, 12), (LENGTH, 12), (LENGTH, 9))
    keys = keys_of(WRONG)
    problem = problem_of(keys, q, k, v, normalised=True)
    initial = np.abs(states(problem, 1))
    problem = problem_of(keys, q, k, v, initial, normalised=True)
    given = [array(x) for x in (q, k, v, initial)]
    options = {"feature": "elu1", "eps": 0.0, "is_causal": is_causal}
    out, last = module.linear_attention(problem, *given, None, keys, **options, return_state=True)
    dout, dstate = draw(problem.out_shape, seed=2)[0], states(problem, 3)
    with np.errstate(all="ignore"):  # CuPy does not warn
        grads = module.linear_attention_backward(
            problem, array(dout), *given, array(dstate), keys, **options
        )
    for begin, end in INVALID:
        assert np.isnan(out[begin:end]).all()
        assert not any(grad[begin:end].any() for grad in grads[:3])
    np.testing.assert_array_equal(np.isnan(last).all(axis=(1, 2)), OF_SEQUENCE)
    np.testing.assert_array_equal((grads[3] == 0).all(axis=(1, 2)), OF_SEQUENCE)
    assert not out[:3].any()
    assert not any(grad[:3].any() for grad in grads[:3])
    assert np.isfinite(out[:10]).all()


def test_an_offset_beyond_32_bits(module):
    q, k, v = map(array, draw((20, 4), (20, 4), (20, 4)))
    for last in (2**32 + 5, -(2**33) + 10, 2**63 - 1):
        keys = keys_of([0, 5, last])
        problem = problem_of(keys, q, k, v)
        out, _ = module.product(
            problem, q, k, v, None, None, keys, reverse=False, return_state=False
        )
        assert np.isfinite(out[:5]).all()
        assert np.isnan(out[5 : 20 if last > 0 else 5]).all()


def test_many_sequences(module):
    """More offsets than `sequence_spans` has threads."""
    bounds = np.sort(np.random.default_rng(0).integers(0, 61, 701))
    q, k, v = draw((60, 8), (60, 8), (60, 8))
    keys = keys_of(bounds)
    problem = problem_of(keys, q, k, v)
    want = cpu.product(problem, q, k, v, None, None, keys, reverse=False, return_state=True)
    got = module.product(
        problem, *map(array, (q, k, v)), None, None, keys, reverse=False, return_state=True
    )
    check(got, want, SINGLE)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_wide_rows_of_16_bits_are_multiplied_in_float32(module, dtype):
    q, k, v = draw((2, 30, 270), (1, 30, 270), (2, 30, 5), dtype=dtype)
    keys = keys_of([2, 9, 28])
    problem = problem_of(keys, q, k, v)
    options = {"reverse": True, "return_state": True}
    want = cpu.product(problem, q, k, v, None, None, keys, **options)
    check(module.product(problem, *map(array, (q, k, v)), None, None, keys, **options), want, dtype)


@pytest.mark.parametrize("algorithm", ["recurrent", "low_occupancy", "chunked"])
def test_algorithms_and_arrays_that_kernels_do_not_read(module, algorithm):
    q, k, v = draw((2, 30, 16), (2, 30, 16), (2, 30, 14))
    given = [array(x[..., ::2]) for x in (q, k, v)]
    out = array(np.empty((2, 30, 14), np.float32)[..., ::2])
    keys = keys_of([2, 9, 28])
    problem = problem_of(keys, *given)
    options = {"reverse": False, "return_state": True}
    want = cpu.product(problem, *map(np.asarray, given), None, None, keys, **options)
    got = module.product(problem, *given, None, out, keys, **options, algorithm=algorithm)
    assert got[0] is out
    check(got, want, SINGLE)


@pytest.mark.parametrize(
    ("shapes", "bounds"),
    [
        (((0, 4), (0, 4), (0, 3)), [0, 0, 0]),
        (((9, 4), (9, 4), (9, 3)), [4]),
        (((9, 4), (9, 4), (9, 3)), [9, 9, 9]),
        (((9, 0), (9, 0), (9, 3)), [0, 4, 9]),
        (((9, 4), (9, 4), (9, 0)), [0, 4, 9]),
        (((0, 9, 4), (1, 9, 4), (1, 9, 3)), [1, 4, 9]),
    ],
)
def test_nothing_to_do(module, shapes, bounds):
    q, k, v = draw(*shapes)
    keys = keys_of(bounds)
    problem = problem_of(keys, q, k, v)
    initial = states(problem, 1)
    problem = problem_of(keys, q, k, v, initial)
    options = {"reverse": False, "return_state": True}
    want = cpu.product(problem, q, k, v, initial, None, keys, **options)
    given = [array(x) for x in (q, k, v, initial)]
    check(module.product(problem, *given, None, keys, **options), want, SINGLE)
    dout, dstate = draw(problem.out_shape, seed=2)[0], states(problem, 3)
    want = cpu.backward(problem, dout, q, k, v, initial, dstate, keys, reverse=False)
    got = module.backward(problem, array(dout), *given, array(dstate), keys, reverse=False)
    check(got, want, SINGLE)


def test_a_device_without_kernels():
    with packed_products(SimpleNamespace(target=None)) as module:
        q = array(np.zeros((9, 4), np.float32))
        keys = keys_of([0, 9])
        with pytest.raises(NotImplementedError, match=r"causal_product: q_offsets with float32"):
            module.product(
                problem_of(keys, q, q, q), q, q, q, None, None, keys,
                reverse=False, return_state=False,
            )  # fmt: skip
