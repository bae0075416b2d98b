"""Bit masks in the tiled algorithm of a GPU, forward and backward: on NumPy in place of CuPy."""

import numpy as np
import pytest

from fa_cupy import BitMask, reference
from fa_cupy.core import attention_problem
from tests.support import cublas_on_numpy
from tests.support.cublas_on_numpy import B, bare, device


@pytest.fixture
def gpu(monkeypatch):
    """Modules of ``fa_cupy.gpu`` on NumPy."""
    with cublas_on_numpy.in_place_of_cublas(monkeypatch) as found:
        yield found


def blocks(rng, *shape):
    """A dense mask of empty, full and partial blocks."""
    *batch, q_len, k_len = shape
    tiles = [-(-n // B) for n in (q_len, k_len)]
    states = rng.choice(3, (*batch, *tiles), p=[0.5, 0.3, 0.2])
    states = states.repeat(B, -2).repeat(B, -1)[..., :q_len, :k_len]
    return (states == 1) | (states == 2) & (rng.random(shape) < 0.5)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("picked", [[0, 1, 2], [2, 2], [1], [2, 0, 2, 1]], ids=str)
def test_tiles_hide_what_the_mask_does(gpu, picked, turned):
    rng = np.random.default_rng(0)
    dense = blocks(rng, 3, 700, 1100)
    mask = BitMask.from_dense(dense)
    mask, dense = (mask.T, dense.swapaxes(1, 2)) if turned else (mask, dense)
    tiles = gpu.mask_tiles.MaskTiles(mask, np.array(picked, np.int32))
    q_len, k_len = dense.shape[1:]
    kinds = set()
    for rows in ((0, 128), (0, 512), (100, 130), (512, 640), (600, 610), (384, q_len)):
        for after_runs in (False, True):
            runs = list(tiles.runs(rows, (0, k_len))) if after_runs else []
            cuts = [(0, 128), (128, 512), (200, 300), (640, k_len), *runs]
            for keys in cuts:
                part = slice(None), slice(*rows), slice(*keys)
                seen = dense[picked][part]
                tile = tiles[part]
                scores = np.zeros(seen.shape, np.float32)
                if tile is not None:
                    tile.hide(device(scores))
                    assert tile.empty <= (not seen.any())
                np.testing.assert_array_equal(scores == 0, seen)
                kinds.add("full" if tile is None else "empty" if tile.empty else "some")
            if after_runs:
                left = dense[picked][:, slice(*rows)].copy()
                for begin, end in runs:
                    left[:, :, begin:end] = False
                assert not left.any()
    assert kinds >= {"full", "empty", "some"} or len(picked) > 2


def backward(gpu, arrays, mask, need, dout, **options):
    """Gradients by `mask`, a BitMask or dense, as the device computes them."""
    q, k, v, bias = arrays
    plain = mask.to_dense() if isinstance(mask, BitMask) else mask
    out, lse = reference.attention(q, k, v, bias, plain, **options)
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    results = device(out.astype(q.dtype)), device(lse.astype(q.dtype)), device(dout), None

    def empty(shape, dtype, like):
        return device(np.empty(shape, dtype))

    inputs = *(None if x is None else device(x) for x in arrays), mask
    found = gpu.attention_backward.backward(problem, inputs, results, need, empty)
    return {name: bare(x) for name, x in found.items()}


@pytest.mark.parametrize("batch", [(), (3,), (2, 1), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "causal_align": "bottom_right"},
        {"window": (150, 90), "causal_align": "top_left", "softcap": 3.0},
    ],
    ids=str,
)
def test_gradients(gpu, batch, options):
    rng = np.random.default_rng(1)
    q_len, k_len = 640, 1050  # several tiles of keys
    dense = blocks(rng, *batch, q_len, k_len)
    dense[..., 5, :] = False
    shapes = (2, 3, q_len, 8), (2, 1, k_len, 8), (2, 3, k_len, 5), (3, 1, k_len)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    dout = rng.standard_normal((2, 3, q_len, 5))
    need = "q", "k", "v", "bias"
    want = reference.attention_backward(dout, *arrays, dense, **options)
    got = backward(gpu, arrays, BitMask.from_dense(dense), need, dout, **options)
    for name, of in zip(need, want, strict=True):
        np.testing.assert_allclose(got[name], of, rtol=1e-9, atol=1e-11, err_msg=name)
    if batch == (3,):
        picked = BitMask.from_dense(dense)[[2, 0, 2]]  # entries in another order
        want = reference.attention_backward(dout, *arrays, dense[[2, 0, 2]], **options)
        got = backward(gpu, arrays, picked, need, dout, **options)
        for name, of in zip(need, want, strict=True):
            np.testing.assert_allclose(got[name], of, rtol=1e-9, atol=1e-11, err_msg=name)


def test_hidden_values_never_show_in_gradients(gpu):
    rng = np.random.default_rng(2)
    dense = blocks(rng, 300, 700)
    dense[:, [7, 650]] = False
    arrays = [rng.standard_normal((n, 8)) for n in (300, 700, 700)]
    arrays[1][7], arrays[2][650] = np.nan, np.inf
    dout = rng.standard_normal((300, 8))
    want = reference.attention_backward(dout, *arrays, None, dense)
    with np.errstate(all="ignore"):
        got = backward(gpu, [*arrays, None], BitMask.from_dense(dense), ("q", "k", "v"), dout)
    for x, of in zip(got.values(), want, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, of, rtol=1e-9, atol=1e-11)


def test_tiles_that_the_mask_hides_are_not_computed(gpu, monkeypatch):
    computed = []
    terms = gpu.attention_backward.attention_backward._terms

    def counted(steps, problem, x, rows, keys, *more):
        computed.append((rows[1] - rows[0]) * (keys[1] - keys[0]))
        return terms(steps, problem, x, rows, keys, *more)

    monkeypatch.setattr(gpu.attention_backward.attention_backward, "_terms", counted)
    board = np.zeros((20, 20), bool)
    board[3, 7] = board[11, 0] = board[12, 1] = True
    mask = BitMask.from_blocks(board, 20 * B, 20 * B)
    arrays = [np.random.default_rng(i).standard_normal((20 * B, 4)) for i in range(4)]
    backward(gpu, [*arrays[:3], None], mask, ("q", "k", "v"), arrays[3])
    assert sum(computed) == 3 * B * 4 * B  # a row of blocks by a tile of keys
