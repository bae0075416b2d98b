"""Gradients at sizes past 32 bits, of many entries and long sequences, on a GPU."""

import numpy as np
import pytest

from fa_cupy import (
    BitMask,
    attention,
    attention_backward,
    causal_product,
    causal_product_backward,
    reference,
)
from tests.support.gradients import hold
from tests.support.products import draw, gradients
from tests.support.strategies import BFLOAT16, DTYPES, UNIT, Case, by_dtype, to_numpy

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target
from tests.support import plans
from tests.support.device_arrays import Counter, Differing, needs, no_memory_held, uniform

HALF, _, SINGLE, DOUBLE = DTYPES
FAR = 2**31
KINDS = 7  # of batch entries, which follow each other again and again
# More entries than a grid has along y, and arrays of more than 2**31 elements.
ENTRIES = 2**16 + 5


@pytest.fixture(autouse=True)
def free_memory(cupy):
    """Each test starts with no memory held, and leaves none."""
    with no_memory_held():
        yield
        plans.forget()


def solve(q, k, v, dout, **options):
    """Gradients of attention, and which kernels made them."""
    out, lse = attention(q, k, v, return_lse=True, **options)
    plans.forget()
    found = attention_backward(dout, q, k, v, out, lse, **options)
    (plan,) = plans.of("attention_backward")
    return found, [step.variant.kernel for step in plan.steps]


def repeated(few, count):
    """Batch entries of an array of some, again and again."""
    out = cp.empty((count, *few.shape[1:]), few.dtype)
    for i in range(len(few)):
        out[i :: len(few)] = few[i]
    return out


@pytest.mark.parametrize("heads", [3, 1])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_blocks_on_a_long_entry_wait_for_those_before(dim, heads):
    """Those on parts of its queries do not, and dQ of each part has the same bits."""
    q_len, k_len, part = 2**17 + 100, 20_000, 2**15
    q, dout = (uniform((3, q_len, dim), i, BFLOAT16) for i in range(2))
    k, v = (uniform((heads, k_len, dim), i, BFLOAT16) for i in range(2, 4))
    out, lse = attention(q, k, v, return_lse=True)
    found = attention_backward(dout, q, k, v, out, lse)
    differing, sums = Differing(found), [0.0, 0.0]
    for begin in range(0, q_len, part):
        rows = slice(begin, begin + part)
        dq, *others = attention_backward(
            dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, rows]
        )
        assert (dq.view(np.uint16) == found[0][:, rows].view(np.uint16)).all()
        sums = [x + to_numpy(y).astype(np.float64) for x, y in zip(sums, others, strict=True)]
    for x, want in zip(found[1:], sums, strict=True):
        assert reference.relative_error(to_numpy(x), want) < 8e-3
    for _ in range(3):
        differing.look(attention_backward(dout, q, k, v, out, lse))
    assert differing.count == 0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("dim", "rows"), [(128, 257), (256, 129)])
def test_many_entries_of_more_than_2_to_the_31_elements(dim, rows, softcap, masked):
    """Every entry gets what it gets among few of them, which float64 is asked about."""
    needs(48)
    keys = 17
    shapes = (KINDS, rows, dim), (KINDS, keys, dim), (KINDS, keys, dim), (KINDS, rows, dim)
    few = [uniform(shape, seed) for seed, shape in enumerate(shapes)]
    mask = np.random.default_rng(0).random((rows, keys)) < 0.7 if masked else None
    options = {"softcap": softcap} if softcap else {}
    given = {"mask": BitMask.from_dense(mask)} if masked else {}
    want, names = solve(*few, **given, **options)
    host = [to_numpy(x) for x in few]
    case = Case(*host[:3], None, mask, options=options, layouts=("dense",) * 5)
    by_name = dict(zip("qkv", map(to_numpy, want), strict=True))
    hold(case, by_name, host[3], None, UNIT[HALF])

    many = [repeated(x, ENTRIES) for x in few]
    assert min(many[0].size, many[3].size) > FAR
    found, same = solve(*many, **given, **options)
    assert same == names
    if current_target() == "sm_90a":
        assert "bwd_dq_sm80" not in names
    differing = Differing(y[i] for y in want for i in range(KINDS))
    differing.look(x[i::KINDS] for x in found for i in range(KINDS))
    assert differing.count == 0


def exact(q, k, v, dout, lse, shift):
    """Float64 weights and their gradients, of rows whose LSE and output times `dout` are known."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    weights = cp.exp(q @ k.T * scale - lse[:, None])
    return weights, weights * (dout @ v.T - shift[:, None]) * scale


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_of_131072(dim, causal):
    """Some rows of the gradients, all keys or queries of which float64 goes through; memory."""
    needs(8)
    length = 2**17
    q, k, v, dout = (uniform((length, dim), seed, BFLOAT16) for seed in range(4))
    out, lse = attention(q, k, v, return_lse=True, is_causal=causal)
    counter = Counter()
    with cp.cuda.using_allocator(counter):
        found = attention_backward(dout, q, k, v, out, lse, is_causal=causal)
    # Sums of dQ in float32, two numbers a row and a word for each tile.
    assert sum(counter.sizes) - 3 * q.nbytes <= length * (4 * max(64, dim) + 32) + 2**16
    dq, dk, dv = (x.astype(np.float64) for x in found)
    lse, shift = lse.astype(np.float64), (out.astype(np.float64) * dout.astype(np.float64)).sum(1)
    every = cp.arange(length)

    def near(got, want):
        return reference.relative_error(got.get(), want.get()) < 8e-3

    for begin in (0, 4_000, length // 2 - 13, length - 64):
        part = slice(begin, begin + 64)
        _, scores = exact(q[part], k, v, dout[part], lse[part], shift[part])
        if causal:
            scores[every > every[part, None]] = 0
        assert near(dq[part], scores @ k.astype(np.float64))
        weights, scores = exact(q, k[part], v[part], dout, lse, shift)
        if causal:
            hidden = every[part] > every[:, None]
            weights[hidden] = scores[hidden] = 0
        assert near(dk[part], scores.T @ q.astype(np.float64))
        assert near(dv[part], weights.T @ dout.astype(np.float64))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype(BFLOAT16, SINGLE, DOUBLE))
def test_causal_products_of_many_entries(dtype, reverse):
    few = [cp.asarray(x) for x in draw(*[(KINDS, 9, 16)] * 4, dtype=dtype)]
    host = [to_numpy(x) for x in few]
    want = causal_product_backward(*few, reverse=reverse)
    exactly = gradients(*host, reverse=reverse)[:3]
    limit = {BFLOAT16: 4e-3, SINGLE: 4e-6, DOUBLE: 1e-14}[dtype]
    for x, y in zip(want, exactly, strict=True):
        assert reference.relative_error(to_numpy(x), y) <= limit
    found = causal_product_backward(*(repeated(x, 10_000 * KINDS) for x in few), reverse=reverse)
    for x, y in zip(found, exactly, strict=True):
        got = to_numpy(x).astype(np.float64).reshape(-1, KINDS, 9, 16)
        assert reference.relative_error(got, np.broadcast_to(y, got.shape)) <= limit


def test_causal_products_of_more_than_2_to_the_31_elements():
    needs(40)
    length, heads, dim = 4096, 8193, 64
    arrays = [cp.zeros((heads, length, dim), HALF) for _ in range(4)]
    small = draw(*[(length, dim)] * 4, dtype=HALF)
    for head in (0, heads - 1):
        for x, y in zip(arrays, small, strict=True):
            x[head] = cp.asarray(y * HALF.type(0.25))
    found = causal_product_backward(*arrays)
    assert min(x.size for x in found) > FAR
    want = gradients(*(x * HALF.type(0.25) for x in small))[:3]
    for x, y in zip(found, want, strict=True):
        for head in (0, heads - 1):
            assert reference.relative_error(to_numpy(x[head]), y) <= 2e-3
        assert not x[1 : heads - 1].any()


@pytest.mark.parametrize(**by_dtype(BFLOAT16, SINGLE))
def test_causal_products_repeat_beside_a_busy_stream(dtype):
    """Short and long ones: in one pass, and split into segments."""
    load = [uniform((4, 8, 2048, 128), seed) for seed in range(3)]
    busy, stream = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    target = attention(*load)
    for shape in ((150, 500, 64), (2, 8192, 64)):
        arrays = [cp.asarray(x) for x in draw(*[shape] * 4, dtype=dtype)]

        def run(arrays=arrays):
            return causal_product(*arrays[1:]), *causal_product_backward(*arrays)

        differing = Differing(run())
        cp.cuda.Device().synchronize()
        for _ in range(200):
            with busy:
                attention(*load, out=target)
            with stream:
                differing.look(run())
        cp.cuda.Device().synchronize()
        assert differing.count == 0
