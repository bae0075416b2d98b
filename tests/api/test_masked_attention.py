"""Attention with bit masks: the same as with the dense array, and less work."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fa_cupy import BitMask, _attention, attention, reference, scaled_dot_product_attention
from fa_cupy.core import arrays as core_arrays
from fa_cupy.cpu.masks.tiles import MaskTiles
from fa_cupy.cpu.tile_ops import Steps
from tests.api.test_masks import B, check, dense_masks, peak_of
from tests.support.strategies import Case, cases, check_against_reference, normal


def as_bits(mask, q_len, k_len):
    return BitMask.from_dense(np.broadcast_to(mask, (*mask.shape[:-2], q_len, k_len)))


def solve(case, mask):
    q, k, v, bias, _ = case.native(np)
    shape = reference.attention(*case.arrays, **case.options)[0].shape
    out = np.full(shape, np.nan).astype(q.dtype) if case.with_out else None
    return attention(q, k, v, bias, mask, return_lse=True, out=out, **case.options)


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_any_call_agrees_with_the_reference(case, seed):
    lengths = case.q.shape[-2], case.k.shape[-2]
    if case.mask is None:
        case.mask = np.random.default_rng(seed).random((1, *lengths)) < 0.5
    note(f"{[a if a is None else a.shape for a in case.arrays]} {case.options} {case.layouts}")
    out, lse = solve(case, as_bits(case.mask, *lengths))
    check_against_reference(case, out, lse)


@given(st.data())
@settings(max_examples=25)
def test_blocks_of_any_state_agree_with_the_dense_mask(data):
    lengths = (data.draw(st.integers(100, 500)), data.draw(st.integers(100, 900)))
    dense = data.draw(dense_masks(max_batch=0, lengths=lengths))
    heads = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (*heads, n, 16), np.float32) for n in (*lengths, lengths[1]))
    if data.draw(st.booleans()):
        v[..., rng.integers(0, lengths[1]), :] = data.draw(st.sampled_from([np.nan, np.inf]))
        k[..., rng.integers(0, lengths[1]), 0] = np.nan
    case = Case(q, k, v, None, dense)
    if data.draw(st.booleans()):
        case.options = {"is_causal": True, "causal_align": "bottom_right", "window": (300, None)}
    if heads and data.draw(st.booleans()):  # another mask for each head
        case.mask = dense ^ (rng.random((heads[-1], 1, 1)) < 0.5)
    out, lse = solve(case, BitMask.from_dense(case.mask))
    check_against_reference(case, out, lse)
    plain = attention(q, k, v, mask=case.mask, **case.options)
    np.testing.assert_allclose(out, plain, rtol=1e-4, atol=1e-5)
    again, _ = solve(case, BitMask.from_dense(case.mask))
    assert again.tobytes() == out.tobytes()


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [normal(rng, shape, np.float32) for shape in shapes]


def test_hidden_keys_never_show_and_rows_without_keys_are_zero():
    q, k, v = draw((300, 8), (400, 8), (400, 5))
    dense = np.zeros((300, 400), bool)
    dense[10:140, 100:300] = True
    k[:100] = v[300:] = np.nan
    v[:100] = np.inf
    out, lse = attention(q, k, v, mask=BitMask.from_dense(dense), return_lse=True)
    check_against_reference(Case(q, k, v, None, dense), out, lse)
    hidden = ~dense.any(axis=1)
    assert (out[hidden] == 0).all()
    assert (lse[hidden] == -np.inf).all()
    assert np.isfinite(out).all()


def test_entries_broadcast_and_serve_grouped_heads():
    q, k, v = draw((2, 6, 150, 8), (2, 3, 140, 8), (1, 1, 140, 5))
    for batch in ((2, 6), (1, 6), (2, 1), (6,), ()):
        dense = np.random.default_rng(1).random((*batch, 150, 140)) < 0.3
        case = Case(q, k, v, None, dense)
        check_against_reference(case, *solve(case, BitMask.from_dense(dense)))
    mask = BitMask.from_dense(dense)
    want = attention(q, k, v, mask=dense)
    for more in (mask[None, None], mask[None][[0] * 6]):
        np.testing.assert_allclose(attention(q, k, v, mask=more), want, rtol=1e-5, atol=1e-6)


def test_blocks_that_are_empty_are_not_computed(monkeypatch):
    seen, looked = [], []
    product, hide = Steps.scores, Steps.mask_scores

    def scores(self, queries, first, k, out):
        seen.append(out.shape[-2:])
        product(self, queries, first, k, out)

    def mask_scores(self, scores, mask):
        looked.append(mask.strides)
        hide(self, scores, mask)

    monkeypatch.setattr(Steps, "scores", scores)
    monkeypatch.setattr(Steps, "mask_scores", mask_scores)
    q, k, v = draw((2560, 8), (2560, 8), (2560, 8))
    board = np.zeros((20, 20), bool)
    board[3, 7] = board[3, 8] = board[11, 0] = True
    attention(q, k, v, mask=BitMask.from_blocks(board, 2560, 2560))
    assert sum(m * n for m, n in seen) == 3 * B * B
    assert not np.any(looked)  # a full block is one True, not a tile of them
    seen.clear()
    attention(q, k, v, mask=BitMask.from_blocks(board, 2560, 2560), is_causal=True)
    assert sum(m * n for m, n in seen) == B * B


def test_tiles_lie_where_some_query_sees_some_key():
    states = np.array([[2, 2, 1, 0, 2, 0], [2, 0, 1, 0, 0, 1]])
    words = np.full((3, 8, 32, 2), 1, np.uint32)
    mask = BitMask.from_blocks(states, 250, 700, words)
    tiles = MaskTiles(mask, np.zeros(3, np.int32))
    assert list(tiles.runs((0, 128), (0, 700))) == [(0, 256), (256, 384), (512, 640)]
    assert list(tiles.runs((64, 128), (100, 300))) == [(100, 256), (256, 300)]
    assert list(tiles.runs((128, 250), (300, 700))) == [(300, 384), (640, 700)]
    assert list(tiles.runs((100, 140), (0, 700))) == [(0, 128), (128, 384), (512, 700)]


def test_entries_in_one_stack_have_masks_of_their_own():
    """Small entries are computed several at a time."""
    q, k, v = draw((64, 140, 4), (64, 260, 4), (64, 260, 4))
    dense = np.random.default_rng(0).random((64, 1, 3)).repeat(B, -1)[..., :260] < 0.6
    dense = dense & (np.random.default_rng(1).random((64, 140, 1)) < 0.9)
    dense[::3] = True
    for chosen in (dense, np.broadcast_to(dense[:1], dense.shape), dense[1]):
        case = Case(q, k, v, None, chosen)
        check_against_reference(case, *solve(case, BitMask.from_dense(chosen)))


def test_memory_of_attention_is_that_of_a_tile():
    q, k, v = draw((6000, 16), (6000, 16), (6000, 16))
    mask = BitMask.from_function(lambda q, k: (q - k) % 7 == 0, (6000, 6000))
    attention(q[:9], k[:9], v[:9])
    _, peak = peak_of(lambda: attention(q, k, v, mask=mask))
    assert peak < 0.3 * 6000 * 6000


def test_torchs_names_take_a_mask():
    q, k, v = draw((3, 5, 8), (3, 6, 8), (3, 6, 8))
    dense = np.random.default_rng(0).random((3, 5, 6)) < 0.6
    got = scaled_dot_product_attention(q, k, v, attn_mask=BitMask.from_dense(dense))
    want = scaled_dot_product_attention(q, k, v, attn_mask=dense)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_other_libraries_arrays():
    torch = pytest.importorskip("torch")
    q, k, v = draw((150, 8), (140, 8), (140, 5))
    dense = np.random.default_rng(0).random((150, 140)) < 0.6
    mask = BitMask.from_dense(torch.from_numpy(dense))
    check(mask, dense)
    got = attention(*map(torch.from_numpy, (q, k, v)), mask=mask)
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got.numpy(), attention(q, k, v, mask=dense), rtol=1e-5, atol=1e-6)


X = np.zeros((2, 128, 8), np.float32)
MASK = BitMask.from_dense(np.ones((128, 128), bool))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"mask": BitMask.from_dense(np.ones((96, 128), bool))}, ValueError,
         "attention: mask has q_len 96, q has 128"),
        ({"mask": BitMask.from_dense(np.ones((128, 1), bool))}, ValueError,
         "attention: mask has k_len 1, k has 128"),
        ({"mask": BitMask.from_dense(np.ones((3, 128, 128), bool))}, ValueError,
         "attention: mask has batch shape (3,), which does not broadcast with (2,) of q, k, v"),
        ({"bias": MASK}, TypeError, "attention: bias is a fa_cupy.BitMask, want an array"),
        ({"k": MASK}, TypeError, "attention: k is a fa_cupy.BitMask, want an array"),
    ],
)  # fmt: skip
def test_errors_of_attention(arguments, error, text):
    with pytest.raises(error) as caught:
        attention(**({"q": X, "k": X, "v": X} | arguments))
    assert text in str(caught.value)


def test_errors_of_torchs_names():
    short = BitMask.from_dense(np.ones((5, 128), bool))
    for options, text in (
        ({}, "attn_mask has q_len 5, query has 128"),
        ({"is_causal": True}, "is_causal is True and attn_mask is given, want one of them"),
    ):
        with pytest.raises(ValueError, match=f"^scaled_dot_product_attention: {text}"):
            scaled_dot_product_attention(X, X, X, short, **options)


def test_arrays_on_a_gpu_are_checked_before_anything_is_allocated(monkeypatch):
    def on_gpu(name, **arrays):
        return core_arrays.Native(list(arrays.values()), "cupy", None, nullcontext(), np.empty)

    monkeypatch.setattr(core_arrays, "to_native", on_gpu)
    monkeypatch.setattr(_attention.dispatch, "backend_of", None)
    with pytest.raises(ValueError, match="mask has q_len 128, q has 127"):
        attention(X[:, 1:], X, X, mask=MASK)


def test_the_reference_takes_a_mask():
    q, k, v = draw((5, 8), (6, 8), (6, 3))
    dense = np.random.default_rng(0).random((2, 5, 6)) < 0.6
    for got, want in zip(reference.attention(q, k, v, None, BitMask.from_dense(dense)),
                         reference.attention(q, k, v, None, dense), strict=True):  # fmt: skip
        np.testing.assert_array_equal(got, want)
