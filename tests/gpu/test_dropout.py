"""Dropout on a GPU: the pairs that the CPU keeps, in all paths, and seeds that graphs read."""

import numpy as np
import pytest

from fa_cupy import BitMask, attention, attention_backward, dropout_mask, reference
from tests.support.strategies import BFLOAT16, to_numpy

pytest.importorskip("cupy")
import cupy as cp

pytestmark = pytest.mark.usefixtures("fresh_kernels")
HALF = np.dtype(np.float16)
LIMITS = {HALF: 2e-3, BFLOAT16: 1.5e-2, np.dtype(np.float32): 2e-5, np.dtype(np.float64): 1e-11}
SEED = 2**63 + 12345
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}


def draw(*shapes, dtype=HALF, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def check(dtype, q, k, v, dout, mask=None, on_device=None, **options):
    """Hold output, log-sum-exp and gradients against float64; some options go to the device."""
    of_call = {"dropout": 0.3, "seed": SEED, **options, **(on_device or {})}
    device = [cp.asarray(x) for x in (q, k, v)]
    want, want_lse = reference.attention(q, k, v, None, mask, **of_call)
    wants = reference.attention_backward(dout, q, k, v, None, mask, **of_call)
    of_call = {**of_call, **{name: cp.asarray(x) for name, x in (on_device or {}).items()}}
    mask = cp.asarray(mask) if isinstance(mask, np.ndarray) else mask
    out, lse = attention(*device, mask=mask, return_lse=True, **of_call)
    limit = LIMITS[dtype]
    assert reference.relative_error(to_numpy(out).astype(np.float64), want) < limit
    assert reference.relative_error(to_numpy(lse), want_lse) < limit
    again = attention(*device, mask=mask, **of_call)
    assert to_numpy(again).tobytes() == to_numpy(out).tobytes()
    grads = attention_backward(cp.asarray(dout), *device, out, lse, None, mask, **of_call)
    for x, y in zip(grads, wants, strict=True):
        assert reference.relative_error(to_numpy(x).astype(np.float64), y) < 2 * limit


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_grouped_heads(dim, dtype):
    shapes = (2, 4, 700, dim), (2, 2, 900, dim), (2, 2, 900, dim), (2, 4, 700, dim)
    check(dtype, *draw(*shapes, dtype=dtype), **CAUSAL)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_masks(dim):
    seen = np.random.default_rng(1).random((700, 900)) < 0.5
    seen[:128, :256], seen[128:256, 256:512] = True, False
    shapes = (2, 4, 700, dim), (2, 4, 900, dim), (2, 4, 900, dim), (2, 4, 700, dim)
    check(HALF, *draw(*shapes), mask=BitMask(seen), window=(500, 400), causal_align="top_left")


def test_few_queries_and_any_layout():
    shapes = (8, 8, 1, 128), (8, 2, 5000, 128), (8, 2, 5000, 128), (8, 8, 1, 128)
    check(HALF, *draw(*shapes))
    q, k, v = draw((2, 4, 300, 52), (2, 4, 333, 52), (2, 4, 333, 37))
    options = {"dropout": 0.3, "seed": SEED, "softcap": 5.0, "sinks": np.zeros((4, 1), HALF)}
    on_device = options | {"sinks": cp.zeros((4, 1), HALF)}
    out = attention(*map(cp.asarray, (q, k, v)), **on_device)
    want, _ = reference.attention(q, k, v, **options)
    assert reference.relative_error(to_numpy(out).astype(np.float64), want) < 2e-3


def test_a_graph_reads_the_seed_of_the_moment():
    q, k, v = draw(*[(2, 4, 200, 64)] * 3)
    device = [cp.asarray(x) for x in (q, k, v)]
    seed, out = cp.array([5]), cp.empty((2, 4, 200, 64), HALF)
    attention(*device, dropout=0.5, seed=seed, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        attention(*device, dropout=0.5, seed=seed, out=out)
        graph = stream.end_capture()
    for number in (5, 6):
        seed[0] = number
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want, _ = reference.attention(q, k, v, dropout=0.5, seed=number)
        assert reference.relative_error(to_numpy(out).astype(np.float64), want) < 2e-3


def test_tensors_of_pytorch():
    """Seeds are numbers, tensors on either device, or drawn by the generator of the device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    from fa_cupy.torch import attention as of_tensors
    from fa_cupy.torch import scaled_dot_product_attention

    q, k, v, dout = draw(*[(2, 4, 200, 64)] * 4)
    of_call = {"dropout": 0.3, "seed": 7}
    want, _ = reference.attention(q, k, v, **of_call)
    wants = reference.attention_backward(dout, q, k, v, **of_call)
    for seed in (7, torch.tensor([7]), torch.tensor([7], device="cuda")):
        tensors = [torch.tensor(x, device="cuda", requires_grad=True) for x in (q, k, v)]
        out = of_tensors(*tensors, dropout=0.3, seed=seed)
        assert reference.relative_error(out.detach().cpu().numpy().astype(float), want) < 2e-3
        out.backward(torch.tensor(dout, device="cuda"))
        for x, y in zip(tensors, wants, strict=True):
            assert reference.relative_error(x.grad.cpu().numpy().astype(float), y) < 4e-3
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found += [scaled_dot_product_attention(*tensors, dropout_p=0.3) for _ in range(2)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("dtype", "dim"), [(np.float32, 64), (np.float32, 200), (np.float64, 64), (HALF, 264)], ids=str
)
def test_products_of_tiles(dtype, dim):
    """Where no kernel drops weights; of several tiles of keys."""
    shapes = (2, 4, 700, dim), (2, 2, 1500, dim), (2, 2, 1500, dim), (2, 4, 700, dim)
    seen = np.random.default_rng(1).random((700, 1500)) < 0.5
    arrays = draw(*shapes, dtype=np.dtype(dtype))
    check(np.dtype(dtype), *arrays, **CAUSAL)
    check(np.dtype(dtype), *arrays, mask=BitMask(seen))


OFFSETS = np.array([0, 3, 3, 270, 391, 696]), np.array([5, 240, 261, 530, 531, 899])
_SHAPES = (2, 4, 700, 64), (2, 2, 900, 64), (2, 2, 900, 64), (2, 4, 700, 64)


@pytest.mark.parametrize("dim", [32, 64, 128, 192, 256])
def test_packed_sequences(dim):
    shapes = [(*shape[:-1], dim) for shape in _SHAPES]
    offsets = dict(zip(("q_offsets", "k_offsets"), OFFSETS, strict=True))
    for band in ({}, CAUSAL):
        check(HALF, *draw(*shapes), on_device=offsets, **band)


@pytest.mark.parametrize("dtype", [HALF, np.dtype(np.float32), np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_offsets_on_host_and_device(dtype, masked):
    """Whether kernels know of sequences, or each is a call, or a mask of all pairs says so."""
    offsets = dict(zip(("q_offsets", "k_offsets"), OFFSETS, strict=True))
    mask = np.random.default_rng(1).random((700, 900)) < 0.7 if masked else None
    arrays = draw(*_SHAPES, dtype=dtype)
    check(dtype, *arrays, mask, **offsets, **CAUSAL)
    check(dtype, *arrays, mask, on_device=offsets, **CAUSAL)


@pytest.mark.parametrize("dtype", [HALF, np.dtype(np.float32)], ids=str)
def test_lengths_and_pages(dtype):
    lengths = np.array([700, 33], np.int32)
    q, k, v, dout = draw((2, 4, 90, 64), *[(2, 2, 704, 64)] * 2, (2, 4, 90, 64), dtype=dtype)
    for band in ({}, CAUSAL):
        check(dtype, q, k, v, dout, on_device={"k_lengths": lengths}, **band)
    order = np.random.default_rng(1).permutation(2 * 44)
    table = order.argsort().astype(np.int32).reshape(2, 44)
    pages = [x.reshape(2, 2, 44, 16, 64).swapaxes(1, 2).reshape(88, 2, 16, 64) for x in (k, v)]
    stored = [cp.asarray(np.ascontiguousarray(x[order])) for x in pages]
    where = {"k_lengths": cp.asarray(lengths), "page_table": cp.asarray(table)}
    out = attention(cp.asarray(q), *stored, **where, dropout=0.3, seed=SEED)
    want, _ = reference.attention(q, k, v, k_lengths=lengths, dropout=0.3, seed=SEED)
    assert reference.relative_error(to_numpy(out).astype(np.float64), want) < LIMITS[dtype]


def test_a_mask_on_the_device():
    seed = cp.array([SEED], np.uint64)
    for part in ({}, {"rows": slice(7, 100), "cols": slice(70, 900)}):
        found = dropout_mask(seed, 0.3, (2, 3, 200, 1000), **part)
        assert isinstance(found, cp.ndarray)
        want = dropout_mask(SEED, 0.3, (2, 3, 200, 1000), **part)
        np.testing.assert_array_equal(found.get(), want)
    bits = dropout_mask(seed, 0.3, (200, 1000), as_bits=True)
    np.testing.assert_array_equal(
        cp.asarray(bits.to_dense()).get(), dropout_mask(SEED, 0.3, (200, 1000))
    )


def test_a_sparse_bias_is_refused():
    """Before anything is computed."""
    sparse = pytest.importorskip("cupyx.scipy.sparse")
    x = [cp.zeros((1, 1, 40, 64), HALF) for _ in range(3)]
    bias = sparse.eye(40, format="csr", dtype=np.float32)
    with pytest.raises(NotImplementedError, match=r"attention: dropout is 0\.1 and bias is a spar"):
        attention(*x, bias, dropout=0.1, seed=1)
