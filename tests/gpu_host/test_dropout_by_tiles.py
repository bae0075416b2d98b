"""Dropout where cuBLAS computes attention: on NumPy in place of CuPy, against the CPU path.

The kernel that writes decisions runs in the emulator.
"""

import dataclasses

import numpy as np
import pytest

from fa_cupy import BitMask, Score, attention, attention_backward
from fa_cupy.core import attention_problem
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.keys.gathered import unpacked
from fa_cupy.keys.layout import KeyArrays
from tests.support import cublas_on_numpy
from tests.support.cublas_on_numpy import bare, device

pytestmark = pytest.mark.emulator
P, SEED = 0.3, 2**63 + 12345
NEED = ("q", "k", "v")
LIMITS = {np.float16: 3e-3, np.float32: 1e-5, np.float64: 1e-11}


@pytest.fixture
def gpu(monkeypatch):
    """Modules of ``fa_cupy.gpu`` on NumPy, with tiles so small that there are several."""
    with cublas_on_numpy.in_place_of_cublas(monkeypatch) as found:
        monkeypatch.setattr(found.attention, "_TILE_N", 96)
        monkeypatch.setattr(found.attention, "_WIDE_TILE_N", 110)
        monkeypatch.setattr(found.attention, "_LEAST_M", 16)
        monkeypatch.setattr(found.attention, "_SCRATCH_SIZE", 96 * 100)
        yield found


def arrays(dtype, batch=(2, 4), q_len=70, k_len=150, dim=8):
    few = (*batch[:-1], 2) if len(batch) > 1 else batch
    shapes = (*batch, q_len, dim), (*few, k_len, dim), (*few, k_len, dim), (*batch, q_len, dim)
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def solve(gpu, problem, inputs, dout, need=NEED, sinks=None, score=None):
    """Output, LSE and gradients as the modules of the GPU compute them."""
    out, lse = gpu.attention.attention(problem, *inputs, None, True, sinks, score)
    results = out, lse, device(dout), None
    found = gpu.attention_backward.backward(
        problem, inputs, results, need, cublas_on_numpy.empty, sinks, score
    )
    return [bare(x) for x in (out, lse, *found.values())]


def compare(found, wanted, limit):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        x, y = (np.nan_to_num(z.astype(np.float64), posinf=0, neginf=0) for z in (x, y))
        assert np.abs(x - y).max() <= limit * np.abs(y).max()


def check(gpu, q, k, v, dout, mask=None, p=P, limit=None, **options):
    on_device = [device(x) for x in (q, k, v)]
    shown = mask if mask is None or isinstance(mask, BitMask) else device(mask)
    problem = attention_problem.attention_problem(
        *on_device, None, shown, dropout=Dropout(p, SEED), **options
    )
    found = solve(gpu, problem, (*on_device, None, shown), dout)
    of_call = {"dropout": p, "seed": SEED, **options}
    out, lse = attention(q, k, v, None, mask, return_lse=True, **of_call)
    grads = attention_backward(dout, q, k, v, found[0], found[1], None, mask, **of_call)
    compare(found, [out, lse, *grads], limit or LIMITS[q.dtype.type])


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("batch", [(4,), (2, 4)], ids=str)
def test_calls_agree_with_the_cpu(gpu, dtype, batch):
    """In several stacks and tiles."""
    given = arrays(dtype, batch)
    check(gpu, *given, is_causal=True, causal_align="bottom_right")


@pytest.mark.parametrize("kind", ["array", "bits"])
def test_masks(gpu, kind):
    seen = np.random.default_rng(1).random((70, 150)) < 0.6
    seen[3], seen[:, 128:] = False, False
    mask = BitMask(seen) if kind == "bits" else seen
    check(gpu, *arrays(np.float64), mask=mask)


def test_every_weight_is_dropped(gpu):
    check(gpu, *arrays(np.float32), p=1.0)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_finite(gpu):
    """Of a value that is dropped, NaN does not reach an output."""
    q, k, v, dout = arrays(np.float64)
    v[..., 7, :] = np.nan
    check(gpu, q, k, v, dout)


def test_far_rows(gpu):
    """Maximum and sum of weights are computed apart, of all pairs."""
    q, k, v, dout = arrays(np.float64)
    q[..., 0], k[..., 0] = 300, 300
    check(gpu, q, k, v, dout, limit=1e-6)


def test_gradients_of_a_score(gpu):
    """And of a bias: of what no kernel computes."""
    q, k, v, dout = arrays(np.float64)
    x = np.random.default_rng(2).random(4)
    need = ("score.x", "v")
    score = Score("s * x[h]", x=x)
    want_out, lse = attention(q, k, v, score=score, return_lse=True, dropout=P, seed=SEED)
    wants = attention_backward(
        dout, q, k, v, want_out, lse, score=score, need=need, dropout=P, seed=SEED
    )
    from fa_cupy._score import operands_of

    operands = operands_of(score, {"score.x": device(x)})
    inputs = (*map(device, (q, k, v)), None, None)
    problem = attention_problem.attention_problem(*inputs, score=operands, dropout=Dropout(P, SEED))
    found = solve(gpu, problem, inputs, dout, need, score=operands)
    compare(found, [want_out, lse, *wants], 1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_packed_sequences_with_a_mask_of_all_pairs(gpu, dtype):
    """Positions are those in sequences, though the call has no offsets."""
    q, k, v, dout = arrays(dtype)
    keys = KeyArrays(q_offsets=np.array([0, 20, 20, 70]), k_offsets=np.array([5, 70, 90, 149]))
    offsets = {"q_offsets": keys.q_offsets, "k_offsets": keys.k_offsets}
    of_problem = {"is_causal": True, "causal_align": "bottom_right", **offsets}
    dropout = Dropout(P, SEED)
    problem = attention_problem.attention_problem(
        q, k, v, None, None, dropout=dropout, **of_problem
    )
    alone, seen, bad = unpacked(np, problem, None, keys)
    assert not bad.any()
    assert alone.dropout.placed
    on_device = alone.dropout.at(device(alone.dropout.places))
    alone = dataclasses.replace(alone, dropout=on_device)
    inputs = *map(device, (q, k, v)), None, device(seen)
    found = solve(gpu, alone, inputs, dout)
    of_call = {"dropout": P, "seed": SEED, **of_problem}
    out, lse = attention(q, k, v, return_lse=True, **of_call)
    grads = attention_backward(dout, q, k, v, out, lse, **of_call)
    compare(found, [out, lse, *grads], LIMITS[dtype])
