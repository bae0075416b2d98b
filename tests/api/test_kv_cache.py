"""The cache of keys and values, compared with lists of tokens."""

import copy
import pickle
import re
import sys
import tracemalloc
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fa_cupy import BitMask, KVCache, _kv_cache, attention, reference
from tests.support.strategies import DTYPES, UNIT, by_dtype, normal, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def address(x):
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


class Machine(RuleBasedStateMachine):
    """Appends, forks and frees in any order; each sequence is a list of tokens too."""

    xp = np

    @initialize(
        sequences=st.integers(1, 5),
        heads=st.integers(1, 3),
        dims=st.tuples(st.integers(1, 5), st.none() | st.integers(1, 5)),
        max_length=st.integers(1, 70),
        page_size=st.sampled_from([None, 16, 16, 16, 32, 48]),
        pages=st.none() | st.integers(1, 12),
        dtype=st.sampled_from(DTYPES),
    )
    def make(self, sequences, heads, dims, max_length, page_size, pages, dtype):
        pages = None if page_size is None else pages
        self.cache = KVCache(
            heads, *dims, sequences=sequences, max_length=max_length, page_size=page_size,
            pages=pages, dtype=dtype, xp=self.xp,
        )  # fmt: skip
        self.sizes = heads, dims[0], dims[1] or dims[0]
        self.dtype, self.max_length, self.page_size = dtype, max_length, page_size
        self.tokens = [[] for _ in range(sequences)]
        self.rng = np.random.default_rng(0)
        self.addresses = self.places()

    def places(self):
        cache = self.cache
        arrays = cache.k, cache.v, cache.k_lengths, cache.page_table
        return [None if x is None else address(x) for x in arrays]

    def new(self, *shape):
        return normal(self.rng, shape, self.dtype)

    @rule(data=st.data(), tokens=st.integers(0, 40) | st.sampled_from([1, 1, 16]))
    def append(self, data, tokens):
        count, (heads, *dims) = len(self.tokens), self.sizes
        numbers = data.draw(
            st.none() | st.lists(st.integers(0, count - 1), unique=True, max_size=count)
        )
        some = [*range(count)] if numbers is None else numbers
        k, v = (self.new(len(some), heads, tokens, dim) for dim in dims)
        before = self.cache.free_pages
        too_long = [i for i in some if len(self.tokens[i]) + tokens > self.max_length]
        arrays = self.xp.asarray(k), self.xp.asarray(v)
        if too_long or (before is not None and self.wanted(some, tokens) > before):
            message = f"{self.wanted(some, tokens)} pages are wanted, and {before} of"
            if too_long:
                message = f"sequence {too_long[0]} has {len(self.tokens[too_long[0]])} tokens"
            with pytest.raises(ValueError, match=message):
                self.cache.append(*arrays, numbers)
            return
        self.cache.append(*arrays, numbers)
        for place, number in enumerate(some):
            rows = zip(k[place].swapaxes(0, 1), v[place].swapaxes(0, 1), strict=True)
            self.tokens[number] += [*rows]

    def wanted(self, some, tokens):
        """The pages that an append takes: of those that have others, all but one get a copy."""
        size, taken, shared = self.page_size, 0, Counter()
        if size is None or not tokens:
            return 0
        for number in some:
            length = len(self.tokens[number])
            taken += -(-(length + tokens) // size) - -(-length // size)
            if length % size:
                shared[self.page(number, length // size)] += 1
        for page, count in shared.items():
            everywhere = sum(
                self.page(number, place) == page
                for number, tokens in enumerate(self.tokens)
                for place in range(-(-len(tokens) // size))
            )
            taken += min(count, everywhere - 1)
        return taken

    def page(self, number, place):
        return int(to_numpy(self.cache.page_table)[number, place])

    @rule(data=st.data())
    def fork(self, data):
        count = len(self.tokens)
        source = data.draw(st.integers(0, count - 1))
        empty = [i for i in range(count) if not self.tokens[i] and i != source]
        to = data.draw(st.none() | st.integers(0, count - 1))
        before = self.cache.free_pages
        if (to is None and not empty) or (to is not None and to not in empty):
            with pytest.raises(ValueError, match=r"KVCache.fork: (no sequence|to is)"):
                self.cache.fork(source, to)
            return
        found = self.cache.fork(source, to)
        assert found == (empty[0] if to is None else to)
        assert type(found) is int
        self.tokens[found] = list(self.tokens[source])
        assert self.cache.free_pages == before

    @rule(data=st.data())
    def free(self, data):
        number = data.draw(st.integers(0, len(self.tokens) - 1))
        self.cache.free(number)
        self.tokens[number] = []

    @precondition(lambda self: any(self.tokens))
    @rule(data=st.data(), group=st.integers(1, 2), q_len=st.integers(1, 3), causal=st.booleans())
    def attend(self, data, group, q_len, causal):
        count, (heads, dim, v_dim) = len(self.tokens), self.sizes
        numbers = data.draw(st.none() | st.lists(st.integers(0, count - 1), max_size=4))
        some = [*range(count)] if numbers is None else numbers
        q = self.new(len(some), heads * group, q_len, dim)
        out = to_numpy(self.cache.attention(self.xp.asarray(q), numbers, is_causal=causal))
        assert out.shape == (len(some), heads * group, q_len, v_dim)
        for place, number in enumerate(some):
            k, v = self.rows(number)
            want, _ = reference.attention(
                q[place, None], k[None], v[None], is_causal=causal, causal_align="bottom_right"
            )
            bound = 16 * UNIT[self.dtype] * (1 + np.abs(v.astype(float)).max(initial=0))
            assert np.abs(out[place].astype(float) - want[0]).max(initial=0) <= bound

    def rows(self, number):
        """Keys and values of a sequence as lists have them, (heads, length, dim)."""
        heads, *dims = self.sizes
        if not self.tokens[number]:
            return [np.zeros((heads, 0, dim), self.dtype) for dim in dims]
        return [np.stack(x, axis=1) for x in zip(*self.tokens[number], strict=True)]

    @invariant()
    def the_cache_holds_the_tokens(self):
        cache = self.cache
        lengths = [len(tokens) for tokens in self.tokens]
        assert cache.lengths.tolist() == to_numpy(cache.k_lengths).tolist() == lengths
        arrays = [to_numpy(x) for x in (cache.k, cache.v)]
        used = set()
        for number, length in enumerate(lengths):
            for x, want in zip(arrays, self.rows(number), strict=True):
                if self.page_size is None:
                    found = x[number, :, :length]
                else:
                    pages = to_numpy(cache.page_table)[number, : -(-length // self.page_size)]
                    used |= set(pages.tolist())
                    found = np.concatenate(x[pages], axis=1)[:, :length] if length else want
                assert found.tobytes() == want.tobytes()
        if self.page_size is not None:
            assert cache.free_pages == len(cache.k) - len(used)
        else:
            assert cache.free_pages is None
        assert self.places() == self.addresses


def test_any_sequence_of_calls(xp):
    machine = type("OfLibrary", (Machine,), {"xp": xp})
    run_state_machine_as_test(machine, settings=settings(deadline=None, stateful_step_count=25))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(**by_dtype())
def test_decoding_token_by_token_is_causal_attention(xp, dtype, page_size):
    q, k, v = (
        xp.asarray(x) for x in draw((2, 8, 40, 16), (2, 4, 40, 16), (2, 4, 40, 8), dtype=dtype)
    )
    cache = KVCache(4, 16, 8, sequences=2, max_length=40, page_size=page_size, dtype=dtype, xp=xp)
    want = to_numpy(attention(q, k, v, is_causal=True)).astype(float)
    cache.append(k[:, :, :20], v[:, :, :20])
    found = [cache.attention(q[:, :, :20], is_causal=True)]
    for i in range(20, 40):
        token = slice(i, i + 1)
        cache.append(k[:, :, token], v[:, :, token])
        found.append(cache.attention(q[:, :, token], is_causal=True))
    found = np.concatenate([to_numpy(x) for x in found], axis=2).astype(float)
    # Products and exponentials of a GPU library in float32 are some units apart.
    units = 40 if xp is not np and np.dtype(dtype) == np.float32 else 8
    np.testing.assert_allclose(found, want, rtol=0, atol=units * UNIT[dtype])


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    "sequences", [None, [1, 2], [2, 0], 1, np.array(2), np.array([1, 0, 1])], ids=str
)
def test_options_are_those_of_attention(xp, page_size, sequences):
    cache = KVCache(2, 8, sequences=3, max_length=40, page_size=page_size, xp=xp)
    for i, tokens in enumerate((7, 33, 20)):
        cache.append(*(xp.asarray(x) for x in draw(*[(1, 2, tokens, 8)] * 2, seed=i)), i)
    some = [0, 1, 2] if sequences is None else np.atleast_1d(sequences)
    assert cache.k_len == 48
    q, bias = (xp.asarray(x) for x in draw((len(some), 4, 3, 8), (4, 3, 48), seed=9))
    options = {"window": (9, 0), "softcap": 4.0, "scale": 0.5}
    found = cache.attention(q, sequences, bias=bias, return_lse=True, **options)
    for place, number in enumerate(some):
        n = int(cache.lengths[number])
        k, v = draw(*[(1, 2, n, 8)] * 2, seed=int(number))
        want = reference.attention(
            to_numpy(q)[place, None], k, v, to_numpy(bias)[..., :n], causal_align="bottom_right",
            **options,
        )  # fmt: skip
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(to_numpy(x)[place], y[0], atol=1e-5)


def test_the_alignment_can_be_chosen():
    cache = KVCache(1, 4, sequences=1, max_length=9)
    k, q = draw((1, 1, 9, 4), (1, 1, 2, 4))
    cache.append(k, k)
    out = cache.attention(q, is_causal=True, causal_align="top_left")
    np.testing.assert_allclose(out[..., 0, :], k[..., 0, :], rtol=1e-6)
    assert not np.allclose(cache.attention(q, is_causal=True)[..., 0, :], k[..., 0, :])


def test_an_append_copies_only_what_comes():
    """By the memory that it takes; so does a call for some sequences."""
    for page_size in (None, 64):
        cache = KVCache(8, 64, sequences=4, max_length=1 << 12, page_size=page_size)
        (k,) = draw((4, 8, 1, 64))
        cache.append(k, k)
        cache.attention(k[:2], [2, 0])  # the first call imports modules
        tracemalloc.start()
        cache.append(k, k)
        cache.attention(k[:2], [2, 0])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < cache.k.nbytes / 50


@pytest.mark.parametrize(
    "sizes",
    [{"max_length": 2**62}, {"heads": 10**19}, {"page_size": 16 * 10**30}, {"v_dim": 2**60}],
)
def test_a_cache_that_no_machine_has_room_for_is_an_error(sizes):
    with pytest.raises(ValueError, match=r"^KVCache: arrays of \d+ bytes are asked for, want"):
        KVCache(**{"heads": 2, "head_dim": 4, "sequences": 3, "max_length": 100} | sizes)


def test_forks_share_pages_until_they_differ():
    cache = KVCache(1, 4, sequences=4, max_length=64, page_size=16, pages=8)
    (k,) = draw((1, 1, 40, 4))
    cache.append(k, k, 0)
    assert cache.free_pages == 5
    assert [cache.fork(0), cache.fork(0)] == [1, 2]
    assert cache.free_pages == 5
    (new,) = draw((3, 1, 2, 4), seed=1)
    cache.append(new, new, [0, 1, 2])  # two copies of the last page, and one that stays
    assert cache.free_pages == 3
    assert len(set(cache.page_table[:3, 0])) == len(set(cache.page_table[:3, 1])) == 1
    assert len(set(cache.page_table[:3, 2])) == 3
    cache.free(0)
    assert cache.free_pages == 4
    cache.free(1)
    cache.free(2)
    assert cache.free_pages == 8
    assert cache.lengths.tolist() == [0] * 4


def test_forks_of_contiguous_sequences_are_copies():
    cache = KVCache(1, 4, 3, sequences=2, max_length=64)
    k, v, token = draw((1, 1, 40, 4), (1, 1, 40, 3), (1, 1, 1, 4), seed=2)
    cache.append(k, v, 0)
    assert cache.fork(0) == 1
    cache.append(token, token[..., :3], 0)
    for x, want in ((cache.k, k), (cache.v, v)):
        np.testing.assert_array_equal(x[:, :, :40], np.concatenate([want, want]))
    assert cache.lengths.tolist() == [41, 40]


def test_neighbouring_sequences_are_a_slice():
    """Of the cache; others are pages of it."""
    cache = KVCache(1, 4, sequences=5, max_length=20)
    q, k = draw((3, 1, 1, 4), (5, 1, 9, 4))
    cache.append(k, k)
    seen = []

    def noted(q, k, v, page_table, **options):
        seen.append((k.shape, address(k) - address(cache.k), page_table))

    with mock.patch.object(_kv_cache, "attention", noted):
        cache.attention(q, [1, 2, 3])
        cache.attention(q, [3, 2, 1])
    assert seen[0] == ((3, 1, 32, 4), cache.k.strides[0], None)
    assert seen[1][:2] == ((5, 1, 32, 4), 0)
    assert seen[1][2].tolist() == [[3], [2], [1]]


def test_full_pages_are_not_copied():
    cache = KVCache(1, 4, sequences=2, max_length=64, page_size=16)
    (k,) = draw((1, 1, 32, 4))
    cache.append(k, k, 0)
    cache.fork(0)
    cache.append(k[:, :, :1], k[:, :, :1], 1)
    assert cache.free_pages == 8 - 3


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_refused_append_changes_nothing(page_size):
    pages = None if page_size is None else 4
    cache = KVCache(1, 4, sequences=3, max_length=40, page_size=page_size, pages=pages)
    (k,) = draw((3, 1, 20, 4))
    cache.append(k[:1], k[:1], 1)
    before = [x.copy() for x in (cache.k, cache.v, cache.k_lengths)], cache.free_pages
    with pytest.raises(ValueError, match="k has 21 tokens, want at most 20: sequence 1 has 20"):
        cache.append(np.zeros((3, 1, 21, 4), "f4"), np.zeros((3, 1, 21, 4), "f4"))
    if page_size is not None:
        with pytest.raises(ValueError, match=r"5 pages are wanted, and 2 of 4 are free"):
            cache.append(k, k)
    after = [cache.k, cache.v, cache.k_lengths], cache.free_pages
    for x, y in zip(before[0], after[0], strict=True):
        np.testing.assert_array_equal(x, y)
    assert before[1] == after[1]


@pytest.mark.parametrize("page_size", [None, 16])
def test_tokens_are_not_taken_from_the_cache_itself(page_size):
    """Keys would be written before values are read, and shared pages before both."""
    cache = KVCache(1, 4, sequences=2, max_length=40, page_size=page_size)
    new = np.ones((1, 1, 2, 4), np.float32)
    cache.append(new, new, 0)
    for arg, arrays in (("k", (cache.k[:1, :, :2], new)), ("v", (new, cache.k[:1, :, 2:4]))):
        with pytest.raises(ValueError, match=f"KVCache.append: {arg} overlaps the cache"):
            cache.append(*arrays, 0)
    assert cache.lengths.tolist() == [2, 0]


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_copy_and_a_pickled_cache_are_caches_of_their_own(page_size):
    cache = KVCache(1, 4, sequences=2, max_length=40, page_size=page_size, dtype=BFLOAT16)
    k, q = draw((2, 1, 3, 4), (2, 1, 1, 4), dtype=BFLOAT16)
    cache.append(k, k)
    want = cache.attention(q)
    for made in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        made.append(k, k)
        made.free(0)
        assert made.lengths.tolist() == [0, 6]
        np.testing.assert_array_equal(cache.attention(q), want)
        np.testing.assert_array_equal(made.attention(q[1:], 1).shape, (1, 1, 1, 4))
    assert cache.lengths.tolist() == [3, 3]


def test_the_page_table_is_written_when_pages_change():
    """It may be large, and most tokens of a decoder take no page."""
    cache = KVCache(1, 4, sequences=2, max_length=64, page_size=16)
    (k,) = draw((1, 1, 16, 4))
    cache.append(k[:, :, :14], k[:, :, :14], 0)
    for call, writes in (
        (lambda: cache.append(k[:, :, :2], k[:, :, :2], 0), False),
        (lambda: cache.append(k[:, :, :1], k[:, :, :1], 0), True),
        (lambda: cache.fork(0), True),
        (lambda: cache.free(0), False),
    ):
        cache.page_table[0, 3] = -5  # behind the last page, where numbers have no meaning
        call()
        assert (cache.page_table[0, 3] != -5) == writes


def test_it_says_what_it_holds():
    cache = KVCache(2, 8, sequences=3, max_length=100)
    assert repr(cache) == (
        "<KVCache: 3 sequences of up to 100 tokens, 2 heads of 8, float32, 0 tokens>"
    )
    cache = KVCache(2, 8, sequences=3, max_length=100, page_size=16, dtype=np.float16)
    (k,) = draw((3, 2, 5, 8), dtype=np.float16)
    cache.append(k, k)
    assert repr(cache).endswith("float16, 15 tokens, 18 of 21 pages free>")
    assert (cache.page_size, cache.max_length, cache.k_len) == (16, 100, 112)


# Errors


@pytest.mark.parametrize(
    ("error", "changed", "message"),
    [
        (TypeError, {"heads": 2.0}, "heads is 2.0 (float), want an int >= 1"),
        (ValueError, {"heads": 0}, "heads is 0 (int), want an int >= 1"),
        (ValueError, {"head_dim": 0}, "head_dim is 0 (int), want an int >= 1"),
        (ValueError, {"v_dim": -1}, "v_dim is -1 (int), want an int >= 1"),
        (ValueError, {"sequences": 0}, "sequences is 0 (int), want an int >= 1"),
        (TypeError, {"max_length": True}, "max_length is True (bool), want an int >= 1"),
        (ValueError, {"page_size": 24}, "page_size is 24, want a multiple of 16"),
        (ValueError, {"page_size": 0}, "page_size is 0 (int), want an int >= 1"),
        (ValueError, {"pages": 3}, "pages is 3 (int) without page_size"),
        (ValueError, {"page_size": 16, "pages": 0}, "pages is 0 (int), want an int >= 1"),
        (TypeError, {"dtype": int}, "dtype is <class 'int'> (type), want float16, bfloat16,"),
        (TypeError, {"dtype": "f4,,"}, "dtype is 'f4,,' (str), want float16, bfloat16,"),
        (TypeError, {"dtype": None}, "dtype is None (NoneType), want float16, bfloat16,"),
        (TypeError, {"dtype": ">f4"}, "dtype is '>f4' (str), want float16, bfloat16,"),
        (TypeError, {"dtype": "float"[:2]}, "dtype is 'fl' (str), want float16, bfloat16,"),
        (TypeError, {"xp": sys}, "xp is <module 'sys' (built-in)> (module), want the module numpy"),
    ],
)
def test_sizes_are_checked(error, changed, message):
    sizes = {"heads": 2, "head_dim": 8, "sequences": 3, "max_length": 40} | changed
    with pytest.raises(error, match=f"^KVCache: {re.escape(message)}"):
        KVCache(**sizes)


def refusals():
    def zeros(*shape, dtype=np.float32):
        return np.zeros(shape, dtype)

    k = zeros(2, 2, 5, 8)
    return {
        "append: k has shape (2, 2, 5, 8), want (3, 2, any, 8)": ("append", (k, k)),
        "append: v has shape (2, 2, 5, 9), want (2, 2, any, 8)": (
            "append", (k, zeros(2, 2, 5, 9), [0, 1])),
        "append: k has shape (2, 5, 8), want (1, 2, any, 8)": ("append", (k[0], k[0], 1)),
        "append: v has 4 tokens, k has 5": ("append", (k, k[:, :, :4], [0, 1])),
        "append: k is a list, want a numpy.ndarray": ("append", (k.tolist(), k, [0, 1])),
        "append: v is a MaskedArray, want a numpy.ndarray": (
            "append", (k, np.ma.masked_array(k, k == 0), [0, 1])),
        "append: k has 41 tokens, want at most 40: sequence 0 has 0 tokens, and max_length is 40": (
            "append", (zeros(1, 2, 41, 8), zeros(1, 2, 41, 8), 0)),
        "append: v has dtype float64, the cache has float32": (
            "append", (k, k.astype(float), [0, 1])),
        "append: sequences has 1 more than once": ("append", (k, k, [1, 1])),
        "append: sequences[1] is 3 (int), want an int from 0 to 2": ("append", (k, k, [0, 3])),
        "append: sequences[0] is -1 (int), want an int from 0 to 2": ("append", (k, k, [-1, 0])),
        "append: sequences[0] is True (bool), want an int from 0 to 2": (
            "append", (k, k, [True, 0])),
        "append: sequences is '01' (str), want an int from 0 to 2 or a sequence of them": (
            "append", (k, k, "01")),
        "append: sequences is b'00' (bytes), want an int from 0 to 2 or a sequence of them": (
            "append", (k, k, b"00")),
        "attention: q has shape (2, 2, 5, 8), want (3, any, any, 8)": ("attention", (k,)),
        "attention: q has dtype float16, the cache has float32": (
            "attention", (k.astype(np.float16), [0, 1])),
        "attention: q has 3 heads, want a multiple of 2, or 1": (
            "attention", (zeros(3, 3, 1, 8),)),
        "attention: sequences is 5 (int), want an int from 0 to 2 or a sequence of them": (
            "attention", (k[:1], 5)),
        "attention: sequences is {0} (set), want an int from 0 to 2 or a sequence of them": (
            "attention", (k[:1], {0})),
        "fork: sequence is 3 (int), want an int from 0 to 2": ("fork", (3,)),
        "fork: to is -1 (int), want an int from 0 to 2": ("fork", (0, -1)),
        "fork: to is 0, which has 0 tokens, want another sequence that is empty": ("fork", (0, 0)),
        "free: sequence is 1.0 (float), want an int from 0 to 2": ("free", (1.0,)),
    }  # fmt: skip


@pytest.mark.parametrize("message", refusals())
@pytest.mark.parametrize("page_size", [None, 16])
def test_arguments_are_checked(message, page_size):
    cache = KVCache(2, 8, sequences=3, max_length=40, page_size=page_size)
    method, args = refusals()[message]
    with pytest.raises((TypeError, ValueError), match=f"^KVCache.{re.escape(message)}"):
        getattr(cache, method)(*args)
    assert cache.lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("arg", ["bias", "mask"])
def test_masks_and_biases_are_arrays(arg):
    sparse = pytest.importorskip("scipy.sparse")
    cache = KVCache(2, 8, sequences=3, max_length=40)
    q, seen = np.zeros((3, 2, 1, 8), np.float32), np.ones((1, 40), bool)
    for given, kind in ((BitMask(seen), "BitMask"), (sparse.csr_array(seen), "sparse matrix")):
        with pytest.raises(TypeError, match=f"^KVCache.attention: {arg} is a {kind}, want an arr"):
            cache.attention(q, **{arg: given})


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_single_head_of_queries_is_for_all(page_size):
    cache = KVCache(2, 8, sequences=3, max_length=40, page_size=page_size)
    k, q = normal(np.random.default_rng(0), (3, 2, 5, 8), SINGLE), np.ones((3, 1, 1, 8), SINGLE)
    cache.append(k, k)
    want, _ = reference.attention(q, k, k)
    np.testing.assert_allclose(cache.attention(q), want, rtol=1e-5, atol=1e-6)


def test_lengths_are_the_caches_own():
    cache = KVCache(2, 8, sequences=3, max_length=40)
    q = np.zeros((3, 2, 1, 8), np.float32)
    for arg in ("k_lengths", "page_table", "q_offsets", "k_offsets", "k", "v"):
        with pytest.raises(TypeError, match=f"^KVCache.attention: {arg} is given, want it left"):
            cache.attention(q, **{arg: 3})
    cache.lengths[0] = 5
    assert cache.lengths.tolist() == [0, 0, 0]
