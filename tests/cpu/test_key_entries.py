"""Key lengths and pages on the CPU: entries one by one, and memory that does not grow with them."""

import functools
import tracemalloc
from collections import deque
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from fa_cupy import attention
from fa_cupy.cpu import attention as cpu_attention
from fa_cupy.cpu import key_entries, thread_pool
from fa_cupy.cpu.packed import short_entries
from fa_cupy.cpu.tile_ops import Steps
from tests.api.test_key_lengths import BANDS, in_pages
from tests.support import blas
from tests.support.every_run import only
from tests.support.keyed_cases import cases_with_lengths, paged_cases
from tests.support.split_keys import split_few_keys
from tests.support.strategies import Case, check_against_reference, normal

with_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
with_threads = pytest.fixture(autouse=True, scope="module")(blas.two_threads)


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def check_parts(case, short, out, lse):
    """As `check_against_reference`, of short entries and of others, with no keys behind all ends.

    The reference computes all keys of every entry: those of a long one for short ones too.
    """
    for part in (short, ~short):
        lengths = case.options["k_lengths"][part]
        k, v = (x[part, :, : lengths.max()] for x in (case.k, case.v))
        options = {**case.options, "k_lengths": lengths}
        check_against_reference(Case(case.q[part], k, v, options=options), out[part], lse[part])


@pytest.fixture
def one_by_one(monkeypatch):
    """Short entries are taken one by one, as others are."""
    monkeypatch.setattr(short_entries.ShortEntries, "of", lambda *_: None)


@pytest.fixture
def few_keys(monkeypatch, one_by_one):
    """Keys are split although they are few, in parts that end within pages; counts the parts."""
    return split_few_keys(monkeypatch)


@given(case=paged_cases())
@with_fixture
def test_parts_of_pages_agree_with_the_reference(few_keys, case):
    found = attention(*case.native(np), return_lse=True, **case.options)
    check_against_reference(case, *found)


@given(case=cases_with_lengths())
@with_fixture
def test_parts_of_keys_agree_with_the_reference(few_keys, case):
    found = attention(*case.native(np), return_lse=True, **case.options)
    check_against_reference(case, *found)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("q_len", [1, 300])
def test_the_number_of_threads_does_not_show(q_len, dtype):
    """Of a large entry, which all threads share, and small ones, which they take in turn."""
    lengths = np.array([5000, 1, 0, 700, 1300, 700])
    q, k, v = draw((6, 8, q_len, 32), (6, 2, 5000, 32), (6, 2, 5000, 32), dtype=dtype)
    (k_pages, table), (v_pages, _) = (in_pages(x, lengths, 64) for x in (k, v))
    for arrays, options in (((q, k, v), {}), ((q, k_pages, v_pages), {"page_table": table})):
        results = []
        for threads in (1, 2, 3, 8):
            with blas.threads(threads):
                results.append(attention(*arrays, k_lengths=lengths, **options).tobytes())
        assert len(set(results)) == 1


def test_large_entries_and_small_ones_are_solved_by_several_threads(monkeypatch, one_by_one):
    runs = []

    def run(tasks, new_worker, parallel=True):
        runs.append((len(tasks), bool(parallel)))
        worker = new_worker()
        for task in tasks:
            worker(task)

    monkeypatch.setattr(thread_pool, "run", run)
    q, k = draw((70, 8, 1, 64), (70, 8, 600, 64))
    attention(q, k, k, k_lengths=np.arange(530, 600))
    assert max(runs) == (70, True)
    assert {parallel for count, parallel in runs if count != 70} == {False}
    runs.clear()
    pages, table = in_pages(draw((1, 8, 40000, 64))[0], [40000], 256)
    attention(q[:1], pages, pages, page_table=table, k_lengths=40000 - 3)
    assert runs[0] == (16, True)
    assert runs[1:] == [(0, False)]


def test_pages_are_copied_in_blocks():
    """In the decoding of a long sequence, and for as many queries as keys."""
    (k,) = draw((1, 2, 1 << 16, 64))
    pages, table = in_pages(k, [1 << 16], 256)
    for q_len in (1, 16, 64, 600):
        (q,) = draw((1, 4, q_len, 64))
        attention(q, pages, pages, page_table=table[:, :4], k_lengths=1000)
        tracemalloc.start()
        attention(q, pages, pages, page_table=table)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < k.nbytes / 4, (q_len, peak)


def test_of_large_pages_only_the_wanted_rows_are_copied():
    """Such as sequences of a cache, each of which is a page."""
    (k,) = draw((3, 2, 1 << 16, 64))
    (q,) = draw((2, 4, 70, 64))
    options = {"page_table": np.array([[2], [0]]), "k_lengths": np.array([900, 40])}
    attention(q, k, k, **options)
    tracemalloc.start()
    attention(q, k, k, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < k.nbytes / 20


def test_no_work_is_done_for_keys_that_are_not_there(monkeypatch, one_by_one):
    """The costs of entries are those of their own keys, and equal entries are planned once."""
    made = []

    class Noted(cpu_attention._Tasks):
        def __init__(self, problem, *rest):
            super().__init__(problem, *rest)
            made.append((problem.k_len, self.cost))

    monkeypatch.setattr(cpu_attention, "_Tasks", Noted)
    q, k = draw((5, 2, 20, 8), (5, 2, 1000, 8))
    attention(q, k, k, k_lengths=np.array([10, 20, 1000, 10, 20]))
    costs = dict(made)
    assert [*costs] == [10, 20, 1000]
    assert len(made) == 3
    assert costs[20] == 2 * costs[10] == costs[1000] / 50


def test_equal_lengths_are_one_problem(monkeypatch, one_by_one):
    made = []

    class Noted(cpu_attention._Tasks):
        def __init__(self, problem, *rest):
            super().__init__(problem, *rest)
            made.append(problem.batch)

    monkeypatch.setattr(cpu_attention, "_Tasks", Noted)
    q, k = draw((5, 2, 20, 8), (5, 2, 1000, 8))
    for lengths in (7, np.full(5, 7), np.full((1,), 7)):
        attention(q, k, k, k_lengths=lengths)
    assert made == [(5, 2)] * 3


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_heads_that_are_equal_are_copied_once(options):
    """Keys of one head for all, in pages, with more queries than read pages where they are."""
    q, k, v = draw((3, 8, 17, 16), (9, 1, 64, 16), (9, 1, 64, 16))
    table = np.random.default_rng(0).integers(0, 9, (3, 4))
    options = {**options, "page_table": table, "k_lengths": np.array([9, 250, 64])}
    seen, copied = set(), key_entries.PagedRows.copied

    def note(rows, empty):
        found = copied(rows, empty)
        seen.add((found.shape[0], found.strides[0]))
        return found

    with mock.patch.object(key_entries.PagedRows, "copied", note):
        found = attention(q, k, v, return_lse=True, **options)
    check_against_reference(Case(q, k, v, options=options), *found)
    assert seen == {(8, 0)}


def test_a_band_that_shows_all_keys_of_an_entry_is_none(monkeypatch, one_by_one):
    """Then the heads that share keys read them once."""
    made = []

    class Noted(cpu_attention._Tasks):
        def __init__(self, problem, *rest):
            super().__init__(problem, *rest)
            made.append((problem.k_len, problem.lower, problem.upper, self.problem.q_len))

    monkeypatch.setattr(cpu_attention, "_Tasks", Noted)
    q, k = draw((2, 8, 1, 16), (2, 2, 300, 16))
    options = {"causal_align": "bottom_right", "k_lengths": np.array([100, 300])}
    attention(q, k, k, window=(128, 0), **options)
    assert made == [(100, None, None, 4), (300, 171, None, 1)]
    made.clear()
    options["causal_align"] = "top_left"
    attention(q, k, k, window=(None, 128), **options)
    assert made == [(100, None, None, 4), (300, None, 128, 1)]


def test_pages_that_follow_each_other_are_rows_of_one_array():
    """Then NumPy copies them, also for one head, and where keys and values alternate."""
    single = functools.partial(np.empty, dtype=np.float32)
    both = np.arange(5 * 2 * 4 * 16 * 8, dtype=np.float32).reshape(5, 2, 4, 16, 8)
    apart = np.ascontiguousarray(both[:, 0].swapaxes(1, 2)).swapaxes(1, 2)
    odd = np.empty(both[:, 0].nbytes + 1, np.int8)[1:].view(np.float32).reshape(5, 4, 16, 8)
    odd[...] = both[:, 0]
    for pages, follow in (
        (both[:, 0], True), (both[:, 1, 2:3], True), (both[:, 1, ::2], True),
        (both.copy()[::2, 1], True), (both[:, :, 3, 3:][:, 0][:, None], False),
        (both[::-1, 1], False), (both[:, 1, ::-1], False), (apart, False), (odd, False),
            (both[:, 1, :, ::-1], False), (both[:, 1, :, ::2], False),
    ):  # fmt: skip
        count, heads, size, dim = pages.shape
        numbers = np.array([count - 1, 0, 1, 1, 2])
        source = key_entries.PageSource(numbers, size, count, (0, 0))
        view = (heads, 5 * size, dim), pages.strides[1:]
        first = np.lib.stride_tricks.as_strided(pages[0], *view)
        rows = key_entries.PagedRows.of(first, source, pages.strides[0])
        assert (rows._whole(heads) is not None) == follow
        want = np.concatenate(pages[source.numbers], axis=1)
        ends = (
            (5 * size,) * 2,
            (5, 9),
            (5, size + 1),
            (size, 2 * size),
            (7, 7),
            (size + 3, 5 * size),
        )
        for begin, end in ((0, 5 * size - 2), *ends):
            part = rows[:, begin:end]
            assert part.shape == (heads, end - begin, dim)
            np.testing.assert_array_equal(part.copied(single), want[:, begin:end])


def test_pages_of_any_strides():
    (wide,) = draw((5, 16, 2, 2, 3, 24))  # as (pages, page_size, k or v, heads, ...)
    k, v = (wide[:, :, i, :, 1, ::2].swapaxes(1, 2) for i in range(2))
    (q,) = draw((2, 4, 3, 12))
    table = np.arange(30)[::-5].reshape(2, 3)[:, ::-1] % 5
    lengths = np.array([0, 0, 48, 0, 0, 20])[2::3]
    options = {"page_table": table, "k_lengths": lengths}
    found = attention(q, k[::-1], v, return_lse=True, **options)
    check_against_reference(Case(q, k[::-1], v, options=options), *found)


@given(case=cases_with_lengths())
@with_fixture
def test_entries_one_by_one_agree_with_the_reference(one_by_one, case):
    found = attention(*case.native(np), return_lse=True, **case.options)
    check_against_reference(case, *found)


@pytest.mark.parametrize("dtype", only([np.float16, np.float32, np.float64], np.float32))
@pytest.mark.parametrize("q_len", [1, 5])
def test_threads_do_not_show_in_short_entries(q_len, dtype):
    """Of which there are several groups, and one entry that is not short."""
    lengths = np.random.default_rng(1).integers(0, 400, 20)
    lengths[12] = 3000
    q, k = draw((20, 8, q_len, 64), (20, 8, 3000, 64), dtype=dtype)
    results = []
    for threads in (1, 2, 3, 8):
        with blas.threads(threads):
            found = attention(q, k, k, k_lengths=lengths, return_lse=True)
            results.append(found[0].tobytes())
    assert len(set(results)) == 1
    check_parts(Case(q, k, k, options={"k_lengths": lengths}), lengths < 400, *found)


def test_what_was_in_memory_does_not_show(monkeypatch):
    """Not even signaling NaN, which `numpy.fmin` does not take for a missing number."""
    lengths = np.array([5, 0, 30, 17, 31, 29])
    q, k = draw((6, 2, 1, 8), (6, 2, 40, 8))
    want = attention(q, k, k, k_lengths=lengths)
    attend, right = short_entries.ShortEntries.attend, []

    def empty(shape, dtype=np.float64, **options):
        found = np.zeros(shape, dtype, **options)
        if found.flags.c_contiguous and found.dtype in (np.uint8, np.float32):
            signaling = np.array([0x7F800001], np.uint32).view(np.uint8)
            found.reshape(-1).view(np.uint8)[:] = np.resize(signaling, found.nbytes)
        return found

    def note(*args):
        right.append(attend(*args))
        return right[-1]

    monkeypatch.setattr(short_entries.ShortEntries, "attend", note)
    monkeypatch.setattr(Steps, "_kept", {np.dtype(np.float32): deque()})
    monkeypatch.setattr(np, "empty", empty)
    assert attention(q, k, k, k_lengths=lengths).tobytes() == want.tobytes()
    assert right == [True]


def test_groups_are_bounded_and_hold_each_entry_once():
    q, k = draw((60, 4, 20, 16), (60, 1, 5000, 16))
    lengths = np.random.default_rng(2).integers(0, 300, 60)
    lengths[[0, 27, 59]] = 5000
    seen, groups = [], short_entries.ShortEntries.groups

    def note(short, *args):
        for found in groups(short, *args):
            seen.append(found)
            yield found

    with mock.patch.object(short_entries.ShortEntries, "groups", note):
        out, lse = attention(q, k, k, k_lengths=lengths, return_lse=True)
    check_parts(Case(q, k, k, options={"k_lengths": lengths}), lengths < 300, out, lse)
    alone = [x for x in seen if isinstance(x, int)]
    together = [x for x in seen if not isinstance(x, int)]
    assert alone == [0, 27, 59]
    entries = [i for group in together for i in range(group.begin, group.end)]
    assert sorted([*entries, *alone]) == [*range(60)]
    assert 4 <= len(together) < 12
    for group in together:
        width = lengths[group.begin : group.end].max()
        assert (group.end - group.begin) * 80 * max(16, width) <= 1 << 18


def test_an_entry_that_is_not_finite_is_solved_again():
    """With its group, by itself: what it cannot see stays out, and others keep their numbers."""
    lengths = np.array([5, 0, 30, 17, 30])
    q, k, v = draw((5, 4, 2, 16), (5, 2, 30, 16), (5, 2, 30, 16))
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = np.nan
    v[2, 1, 3, 7], v[3, 0, 16] = np.inf, np.nan
    for options in ({}, {"is_causal": True, "causal_align": "bottom_right"}):
        options = {**options, "k_lengths": lengths}
        found = attention(q, k, v, return_lse=True, **options)
        check_against_reference(Case(q, k, v, options=options), *found)
        assert np.isfinite(found[0][[0, 1, 4]]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_memory_of_short_entries(dtype):
    q, k = draw((300, 8, 4, 64), (300, 8, 100, 64), dtype=dtype)
    lengths = np.arange(300) % 100
    with blas.threads(1):
        out = attention(q, k, k, k_lengths=lengths)
        tracemalloc.start()
        attention(q, k, k, k_lengths=lengths)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2 * out.nbytes + (4 << 20)


@pytest.mark.parametrize("dtype", only([np.float32, np.float64], np.float32))
@pytest.mark.parametrize("size", only([16, 64, 256], 256))
def test_few_queries_read_pages_where_they_are(size, dtype):
    """Also parts of keys that end within pages, and pages of a larger array."""
    lengths = np.array([5000, 3, 0, 1301])
    k, v = draw((4, 2, 5000, 32), (4, 2, 5000, 24), dtype=dtype)
    (k_pages, table), (v_pages, _) = (in_pages(x, lengths, size) for x in (k, v))
    wide = np.full((*k_pages.shape[:3], 40), np.nan, dtype)[:, :, :, 4:36]
    wide[...] = k_pages
    never = mock.Mock(side_effect=AssertionError("pages are copied"))
    for q_len in (1, 16):
        (q,) = draw((4, 8, q_len, 32), dtype=dtype)
        for options in BANDS:
            with mock.patch.object(key_entries.PagedRows, "copied", never):
                options = {**options, "k_lengths": lengths}
                found = attention(q, wide, v_pages, page_table=table, return_lse=True, **options)
            check_parts(Case(q, k, v, options=options), lengths < 2000, *found)
