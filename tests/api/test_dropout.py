"""Dropout of attention weights: which pairs are kept, and what becomes of the others."""

import itertools

import numpy as np
import pytest
from scipy import sparse

from fa_cupy import (
    BitMask,
    Score,
    _definitions,
    attention,
    attention_backward,
    dropout_mask,
    reference,
    scaled_dot_product_attention,
)
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.dropout import arguments, decisions
from fa_cupy.dropout.philox import philox4x32

SEED = 2**63 + 12345


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


# Random numbers

# Random123's known answers (kat_vectors of its distribution): counter, key, result.
KNOWN = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
CONSTANTS = {  # multipliers, and what the key grows by
    32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
    64: (
        (0xD2E7470EE14C6C93, 0xCA5A826395121157),
        (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B),
    ),
}


def philox_of_ints(counter, key, bits):
    """Ten rounds of Philox-4 with words of so many bits, in Python's integers."""
    (first, second), steps = CONSTANTS[bits]
    below = 2**bits
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            divmod(x * y, below) for x, y in ((first, counter[0]), (second, counter[2]))
        )
        counter = high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0
        key = [(word + step) % below for word, step in zip(key, steps, strict=True)]
    return counter


def run_philox(counter, key):
    found = philox4x32([np.uint64([word]) for word in counter], key[0] | key[1] << 32)
    return tuple(int(word[0]) for word in found)


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_has_the_known_answers(counter, key, want):
    assert run_philox(counter, key) == want


def test_rounds_are_those_of_numpys_generator_of_64_bits():
    counter, key = (5, 2**64 - 1, 7, 11), (2**63 + 3, 2**40)
    words = [sum(x << 64 * i for i, x in enumerate(parts)) for parts in (counter, key)]
    of_numpy = np.random.Philox(counter=words[0], key=words[1])
    counter = (counter[0] + 1, *counter[1:])  # it counts before it draws
    assert tuple(of_numpy.random_raw(4).tolist()) == philox_of_ints(counter, key, 64)


def test_words_are_those_of_the_rounds_in_32_bits():
    rng = np.random.default_rng(0)
    for _ in range(20):
        *counter, low, high = rng.integers(0, 2**32, 6).tolist()
        assert run_philox(counter, (low, high)) == philox_of_ints(counter, (low, high), 32)


# Decisions


def test_a_decision_is_that_of_the_definition():
    """Pair by pair, with the numbers written out."""
    p, shape = 0.3, (3, 2, 40, 200)
    found = dropout_mask(SEED, p, shape)
    threshold = round((1 - p) * 2**40)
    for b, h, i, j in np.random.default_rng(0).integers(0, shape, (100, 4)).tolist():
        counter = 4 * (j // 64) + j % 8 // 2, i, h, b
        words = philox_of_ints(counter, (SEED % 2**32, SEED >> 32), 32)
        at = 2 * (j % 64 // 8) + j % 2
        own = sum((words[bit // 2] >> 16 * (bit % 2) + at & 1) << bit for bit in range(8))
        turned = [(x << n | x >> 32 - n) % 2**32 for x, n in zip(words, (0, 4, 8), strict=False)]
        number = own << 32 | turned[0] ^ turned[1] ^ turned[2]
        assert found[b, h, i, j] == (number < threshold)


def test_batch_axes_count_as_those_of_a_score():
    whole = dropout_mask(1, 0.5, (2, 3, 4, 20, 30))
    flat = dropout_mask(1, 0.5, (6, 4, 20, 30))
    assert np.array_equal(whole.reshape(flat.shape), flat)
    assert np.array_equal(dropout_mask(1, 0.5, (4, 20, 30)), flat[0])
    assert np.array_equal(dropout_mask(1, 0.5, (20, 30)), flat[0, 0])
    assert dropout_mask(1, 0.5, (0, 4, 20, 30)).shape == (0, 4, 20, 30)
    assert dropout_mask(1, 0.5, (20, 0)).shape == (20, 0)


def test_parts_are_those_of_the_whole():
    whole = dropout_mask(SEED, 0.4, (2, 3, 100, 300))
    for rows, cols in ((slice(10, 60), slice(37, 201)), (slice(None, 3), slice(64, None))):
        part = dropout_mask(SEED, 0.4, (2, 3, 100, 300), rows=rows, cols=cols)
        assert np.array_equal(part, whole[..., rows, cols])
    bits = dropout_mask(SEED, 0.4, (2, 3, 100, 300), as_bits=True)
    assert isinstance(bits, BitMask)
    assert np.array_equal(bits.to_dense(), whole)


def test_words_lie_as_those_of_a_mask():
    """The two words of a counter and of the next one are the two halves of a mask's word."""
    lists = dropout_mask(SEED, 0.4, (1, 1, 128, 128), as_bits=True).lists
    b = h = np.zeros((1, 1, 1), np.int64)
    halves = decisions.words(arguments.Dropout(0.4, SEED), b, h, (0, 128), (0, 2))[0]
    words = halves[:, 0].astype(np.uint32) | halves[:, 1].astype(np.uint32) << np.uint32(16)
    slabs = words.reshape(8, 2, 8, 4).transpose(0, 2, 3, 1)  # slab, lane // 4, lane % 4, row
    assert np.array_equal(slabs.reshape(lists.words[0].shape), lists.words[0])


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_shares_are_as_wanted(p):
    """Of all pairs and at each position, and so are those of two decisions of a counter."""
    dropped = ~dropout_mask(11, p, (8, 4, 256, 1024))
    by_counter = dropped.reshape(-1, 8, 4, 2).swapaxes(1, 2).reshape(-1, 16).astype(np.float32)
    variance = p * (1 - p)
    assert abs(dropped.mean() - p) < 5 * np.sqrt(variance / dropped.size)
    assert np.abs(by_counter.mean(0) - p).max() < 5 * np.sqrt(variance / len(by_counter))
    covariance = np.cov(by_counter.T)[~np.eye(16, dtype=bool)].mean()
    fraction = (1 - p) * 256 % 1
    said = fraction * (1 - fraction) / 2**16
    # What the estimate varies by is larger where a few counters have most of the pairs.
    assert abs(covariance - said) < 6 * variance / np.sqrt(120 * len(by_counter)) + said / 4


def test_what_is_next_to_each_other_is_independent():
    kept = dropout_mask(3, 0.5, (4, 4, 256, 256)) - 0.5
    for axis in range(4):
        other = np.roll(kept, 1, axis)
        assert abs(np.mean(kept * other)) < 5 * 0.25 / np.sqrt(kept.size)
    assert abs(np.mean(kept * (dropout_mask(4, 0.5, kept.shape) - 0.5))) < 5 * 0.25 / kept.size**0.5


@pytest.mark.parametrize("p", [0.0, 1e-15, 1.0 - 1e-15, 1.0])
def test_ends_of_the_range(p):
    kept = dropout_mask(5, p, (2, 100, 300))
    assert kept.all() if p < 0.5 else not kept.any()


# Attention

CASES = {
    "plain": ([(2, 3, 70, 16), (2, 3, 90, 16), (2, 3, 90, 8)], {}),
    "two axes": ([(70, 16), (90, 16), (90, 8)], {"softcap": 3.0}),
    "grouped": (
        [(2, 4, 70, 16), (2, 2, 90, 16), (2, 2, 90, 8), (4, 1, 90)],
        {"window": (20, 30), "causal_align": "bottom_right", "sinks": normal(4, 1)},
    ),
    "causal": ([(2, 300, 16), (2, 290, 16), (2, 290, 8)], {"is_causal": True}),
    "array": ([(2, 3, 70, 16), (2, 3, 90, 16), (2, 3, 90, 8)], {"mask": normal(2, 1, 70, 90) > 0}),
    "one query": ([(2, 4, 1, 16), (2, 1, 4500, 16), (2, 1, 4500, 8)], {}),
    "sparse blocks": (
        [(2, 300, 16), (2, 300, 16), (2, 300, 8)],
        {"mask": BitMask(normal(300, 300) > 2.8)},
    ),
    "thin blocks": (
        [(2, 300, 16), (2, 300, 16), (2, 300, 8)],
        {"mask": BitMask(normal(300, 300) > 1.7)},
    ),
    "lengths": (
        [(3, 2, 70, 16), (3, 2, 90, 16), (3, 2, 90, 8)],
        {"k_lengths": np.array([90, 0, 33])},
    ),
    "equal lengths": ([(3, 2, 70, 16), (3, 2, 90, 16), (3, 2, 90, 8)], {"k_lengths": 50}),
    "packed": (
        [(1, 2, 100, 16), (1, 2, 100, 16), (1, 2, 100, 8)],
        {"q_offsets": np.array([2, 30, 30, 60, 98]), "is_causal": True},
    ),
    "many packed": (
        [(2, 2, 100, 16), (2, 2, 100, 16), (2, 2, 100, 8)],
        {"q_offsets": np.arange(0, 101, 10)},
    ),
    "packed pairs": (
        [(2, 100, 16), (2, 150, 16), (2, 150, 8), (100, 150)],
        {
            "q_offsets": np.array([0, 10, 60, 100]),
            "k_offsets": np.array([0, 64, 130, 150]),
            "mask": normal(100, 150) > -1,
        },
    ),
    "score": (
        [(2, 3, 70, 16), (2, 3, 90, 16), (2, 3, 90, 8)],
        {"score": Score("s * t[h] + 0.01 * (i - j)", t=normal(3))},
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference(name, dtype):
    shapes, options = CASES[name]
    if options.get("is_causal") and shapes[0][-2] != shapes[1][-2]:
        options = options | {"causal_align": "top_left"}
    q, k, v, *bias = (normal(*shape, dtype=dtype) for shape in shapes)
    bound = 1e-12 if dtype == np.float64 else 2e-6
    for p in (0.2, 1.0):
        given = options | {"dropout": p, "seed": SEED}
        inputs = (q, k, v, *bias)
        out, lse = attention(*inputs, return_lse=True, **given)
        want = reference.attention(*inputs, **given)
        errors = [reference.relative_error(*x) for x in zip((out, lse), want, strict=True)]
        results = (out, lse, *bias)
        dout, dlse = (normal(*x.shape, seed=1).astype(x.dtype) for x in (out, lse))
        need = ["q", "k", "v", *["bias"] * len(bias), *["sinks"] * ("sinks" in options)]
        need += ["score.t"] * ("score" in options)
        grads = attention_backward(dout, q, k, v, *results, dlse=dlse, need=need, **given)
        want = reference.attention_backward(dout, *inputs, dlse=dlse, **given)
        errors += [reference.relative_error(*x) for x in zip(grads, want, strict=True)]
        assert max(errors) < bound, errors


def test_the_log_sum_exp_is_that_of_all_scores():
    q, k, v = normal(3, 2, 600, 8)
    _, lse = attention(q, k, v, return_lse=True, dropout=0.5, seed=1)
    assert np.array_equal(lse, attention(q, k, v, return_lse=True)[1])


def test_pages_are_read_as_keys_in_order():
    q, k, v = normal(2, 3, 40, 16), normal(5, 3, 32, 16), normal(5, 3, 32, 8)
    options = {"page_table": np.array([[3, 1, 0], [2, 0, 4]]), "k_lengths": np.array([90, 40])}
    options |= {"dropout": 0.3, "seed": SEED}
    for queries in (q, q[..., :1, :]):
        want = reference.attention(queries, k, v, **options)[0]
        assert reference.relative_error(attention(queries, k, v, **options), want) < 1e-12


def test_packed_sequences_are_kept_as_padded_ones():
    lengths, p = [30, 50, 20], 0.4
    q, k, v = normal(3, 2, 100, 8)
    offsets = np.cumsum([0, *lengths])
    out = attention(q, k, v, q_offsets=offsets, dropout=p, seed=SEED)
    kept = dropout_mask(SEED, p, (3, 2, 50, 50))
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        rows, n = slice(begin, end), end - begin
        weights = np.exp(8**-0.5 * q[:, rows] @ k[:, rows].swapaxes(1, 2))
        weights /= weights.sum(-1, keepdims=True)
        want = weights * kept[number, :, :n, :n] / (1 - p) @ v[:, rows]
        assert np.allclose(out[:, rows], want)


def test_what_is_not_finite_reaches_kept_pairs_alone():
    q, k, v = normal(40, 16), normal(70, 16), normal(70, 8)
    v[7], v[9, 1] = np.nan, np.inf
    options = {"dropout": 0.5, "seed": 5}
    out, lse = attention(q, k, v, return_lse=True, **options)
    kept = dropout_mask(5, 0.5, (40, 70))
    assert np.array_equal(np.isnan(out[:, 0]), kept[:, 7])
    want, _ = reference.attention(q, k, v, **options)
    assert reference.relative_error(out, want) < 1e-12
    dout = normal(40, 8, seed=1)
    dout[3] = np.nan
    grads = attention_backward(dout, q, k, v, want, lse, **options)
    wants = reference.attention_backward(dout, q, k, v, **options)
    assert max(reference.relative_error(*x) for x in zip(grads, wants, strict=True)) < 1e-12
    assert np.array_equal(np.isnan(grads[2][:, 0]), kept[3])


def test_a_sparse_bias():
    weights = sparse.random_array((300, 310), density=0.02, rng=0, format="csr")
    q, k, v = normal(2, 300, 8), normal(2, 310, 8), normal(2, 310, 8)
    options = {"dropout": 0.3, "seed": 1}
    seen = weights.toarray() != 0
    out, lse = attention(q, k, v, weights, return_lse=True, **options)
    want, _ = reference.attention(q, k, v, weights.toarray(), seen, **options)
    assert reference.relative_error(out, want) < 1e-12
    dout = normal(*out.shape, seed=1)
    grads = attention_backward(dout, q, k, v, out, lse, weights, **options)
    wants = reference.attention_backward(dout, q, k, v, weights.toarray(), seen, **options)
    assert max(reference.relative_error(*x) for x in zip(grads[:3], wants[:3], strict=True)) < 1e-12
    assert reference.relative_error(grads[3].toarray(), np.where(seen, wants[3], 0)) < 1e-12


def test_gradients_are_the_slopes_of_outputs():
    q, k, v, dout = normal(4, 2, 30, 8)
    options = {"dropout": 0.3, "seed": 1}
    out, lse = attention(q, k, v, return_lse=True, **options)
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    for i, grad in enumerate(grads):
        step = 1e-6 * normal(2, 30, 8, seed=9)
        moved = [x + step * (i == place) for place, x in enumerate((q, k, v))]
        change = np.sum(dout * (attention(*moved, **options) - out))
        assert np.isclose(change, np.sum(step * grad), rtol=1e-4)


def test_without_dropout_calls_are_the_plain_ones():
    q, k, v = normal(3, 2, 50, 8)
    plain = attention(q, k, v)
    for dropout in (0, 0.0, np.float32(0)):
        assert np.array_equal(attention(q, k, v, dropout=dropout, seed=3), plain)
    assert attention_problem(q, k, v, None, None).dropout is None


def test_seeds_of_arrays_are_read_by_each_call():
    q, k, v = normal(3, 2, 50, 8)
    seed = np.array([7], np.int32)
    first = attention(q, k, v, dropout=0.5, seed=seed)
    assert np.array_equal(first, attention(q, k, v, dropout=0.5, seed=7))
    seed[0] = -1
    second = attention(q, k, v, dropout=0.5, seed=seed)
    assert np.array_equal(second, attention(q, k, v, dropout=0.5, seed=2**64 - 1))
    assert not np.array_equal(first, second)


def test_torchs_name_of_it():
    q, k, v = normal(3, 2, 50, 8)
    found = scaled_dot_product_attention(q, k, v, dropout_p=0.3, seed=4)
    assert np.array_equal(found, attention(q, k, v, dropout=0.3, seed=4))


SEEDS = "want an int from 0 to 2**64 - 1, or an array of one integer"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"dropout": 0.1}, TypeError, f"seed is None, {SEEDS} (dropout is 0.1)"),
        ({"dropout": 1.5, "seed": 1}, ValueError, "dropout is 1.5 (float), want a number from 0"),
        ({"dropout": -0.1, "seed": 1}, ValueError, "dropout is -0.1 (float), want a number from 0"),
        ({"dropout": np.nan, "seed": 1}, ValueError, "dropout is nan (float), want a finite num"),
        ({"dropout": "x", "seed": 1}, TypeError, "dropout is 'x' (str), want a finite number"),
        ({"dropout": 0.1, "seed": -1}, ValueError, f"seed is -1 (int), {SEEDS}"),
        ({"dropout": 0.1, "seed": 2**64}, ValueError, f"seed is {2**64} (int), {SEEDS}"),
        ({"dropout": 0.1, "seed": 1.5}, TypeError, f"seed is 1.5 (float), {SEEDS}"),
        ({"dropout": 0.0, "seed": 1.5}, TypeError, f"seed is 1.5 (float), {SEEDS}"),
        ({"dropout": 0.1, "seed": True}, TypeError, f"seed is True (bool), {SEEDS}"),
        ({"dropout": 0.1, "seed": np.zeros(2, int)}, ValueError, "seed has shape (2,), want an"),
        ({"dropout": 0.1, "seed": np.zeros(1)}, TypeError, "seed has dtype float64, want an int"),
    ],
)
def test_errors_name_the_argument(given, error, text):
    x = normal(4, 8)
    with pytest.raises(error, match=r"^attention: ") as caught:
        attention(x, x, x, **given)
    assert text in str(caught.value)
    with pytest.raises(error, match=r"^attention_backward: ") as caught:
        attention_backward(x, x, x, x, x, x[:, 0], **given)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"seed": None}, TypeError, f"seed is None (NoneType), {SEEDS}"),
        ({"seed": None, "p": 0.1}, TypeError, f"seed is None, {SEEDS} (p is 0.1)"),
        ({"p": 2}, ValueError, "p is 2 (int), want a number from 0 to 1"),
        ({"shape": 3}, TypeError, "shape is 3 (int), want a tuple (..., Lq, Lk)"),
        ({"shape": (3, -1)}, ValueError, "shape[1] is -1 (int), want an int >= 0"),
        ({"rows": 3}, TypeError, "rows is 3 (int), want a slice of step 1"),
        ({"rows": slice(0.5, 2)}, TypeError, "rows is slice(0.5, 2, None) (slice), want a slice"),
        ({"cols": slice(0, 9, 2)}, ValueError, "cols is slice(0, 9, 2) (slice), want a slice"),
        (
            {"cols": slice(0, 9, 0)},
            ValueError,
            "cols is slice(0, 9, 0) (slice), want a slice of st",
        ),
        ({"as_bits": "no"}, TypeError, "as_bits is 'no' (str), want a bool"),
    ],
)
def test_errors_of_the_mask(given, error, text):
    with pytest.raises(error, match=r"^dropout_mask: ") as caught:
        dropout_mask(**({"seed": 1, "p": 0.0, "shape": (3, 4)} | given))
    assert text in str(caught.value)


def test_the_definition_has_the_same_pairs():
    i, j = np.arange(60)[:, None], np.arange(150)
    found = _definitions.kept_pairs(0.3, SEED, (2, 3), i, j, 0, 1)
    assert np.array_equal(found, dropout_mask(SEED, 0.3, (2, 3, 60, 150)))
