"""What only the CPU path does: many small tiles, threads, the BLAS limit, memory."""

import multiprocessing
import threading
import tracemalloc

import numpy as np
import pytest
import threadpoolctl
from hypothesis import HealthCheck, given, settings

from fa_cupy import _tiled, _tiles, attention, reference
from fa_cupy.cpu import _threads
from fa_cupy.cpu._steps import Steps
from tests.blas import two_threads
from tests.strategies import (
    DTYPES,
    EXTREMES,
    Case,
    by_dtype,
    cases,
    check_against_reference,
    normal,
)

SINGLE, DOUBLE = DTYPES[2:]
# A fixture that stays the same for all examples is what these tests mean.
with_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)


def qkv(*shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for _ in range(3)]


def blas_threads():
    found = threadpoolctl.threadpool_info()
    return [lib["num_threads"] for lib in found if lib["user_api"] == "blas"]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 by 16, so that short problems have many of them."""
    monkeypatch.setattr(_tiles, "tile_sizes", lambda *_, **__: _tiles.Tile(16, 16))
    monkeypatch.setattr(_tiled, "_LEAST_HALF", 4)


# Many tiles


@given(case=cases())
@with_fixture
def test_many_tiles_agree_with_the_reference(small_tiles, case):
    out, lse = attention(*case.native(np), return_lse=True, **case.options)
    check_against_reference(case, out, lse)


@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("rise", ["up", "down", "last", "random"])
@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
def test_scores_that_grow_from_tile_to_tile(small_tiles, dtype, rise, offset):
    q, k, v = qkv(2, 80, 8, dtype=dtype)
    steps = {
        "up": np.linspace(-60, 60, 80),
        "down": np.linspace(60, -60, 80),
        "last": np.where(np.arange(80) == 79, 40, 0),
        "random": np.random.default_rng(1).normal(0, 40, 80),
    }
    bias = (steps[rise] + offset).astype(dtype)
    for options in ({}, {"is_causal": True}, {"window": (20, 5)}):
        out, lse = attention(q, k, v, bias, return_lse=True, **options)
        check_against_reference(Case(q, k, v, bias, options=options), out, lse)


def test_first_keys_masked_for_some_queries(small_tiles):
    q, k, v = qkv(64, 8)
    mask = np.ones((64, 64), bool)
    mask[5:20, :40] = False
    mask[30] = False
    out, lse = attention(q, k, v, None, mask, return_lse=True)
    check_against_reference(Case(q, k, v, None, mask), out, lse)
    assert not out[30].any()
    assert lse[30] == -np.inf


def test_tiles_that_no_query_sees_are_not_computed(monkeypatch, small_tiles):
    q, k, v = qkv(128, 8)
    mask = np.zeros((128, 128), bool)
    mask[:, 32:48] = True
    seen = []
    product = Steps.scores

    def scores(self, queries, first, k, out):
        seen.append(out.shape[-1])
        product(self, queries, first, k, out)

    monkeypatch.setattr(Steps, "scores", scores)
    attention(q, k, v, window=(16, 0))
    assert sum(seen) == 16 + 7 * 32  # keys in reach of each 16 queries
    seen.clear()
    attention(q, k, v, None, mask)
    assert seen == [16] * 8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(**by_dtype())
def test_hidden_values_never_leak(small_tiles, dtype, bad):
    q, k, v = qkv(3, 64, 8, dtype=dtype)
    v[1, 40, 3] = bad
    k[2, 50] = bad
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    check_against_reference(Case(q, k, v, options={"is_causal": True}), out, lse)
    assert np.isfinite(out[1, :40].astype(np.float32)).all()
    assert np.isfinite(out[2, :50].astype(np.float32)).all()


def test_finite_data_are_computed_once(monkeypatch):
    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(_tiled, "attend_exactly", never)
    q, k, v = qkv(2, 300, 16)
    mask = np.random.default_rng(0).random((300, 300)) < 0.5
    attention(q, k, v, None, mask, is_causal=True)
    attention(q, k, v, np.full((300, 1), -np.inf, np.float32))


def test_values_near_the_largest_float():
    q, k, v = qkv(64, 8)
    v *= 1e38 / np.abs(v).max()
    want, _ = reference.attention(q, k, v)
    assert reference.relative_error(attention(q, k, v), want) < 1e-6


@pytest.mark.parametrize("options", EXTREMES, ids=str)
@pytest.mark.parametrize(**by_dtype())
def test_options_at_the_ends_of_the_arithmetic(small_tiles, dtype, options):
    q, k, v = qkv(2, 40, 8, dtype=dtype)
    out, lse = attention(q, k, v, return_lse=True, **options)
    check_against_reference(Case(q, k, v, options=options), out, lse)
    assert np.isfinite(out.astype(np.float64)).all()


@pytest.mark.parametrize(**by_dtype())
def test_a_softcap_bounds_infinite_products_of_any_scale(dtype):
    q, k, v = qkv(30, 8, dtype=dtype)
    q[3, 2] = np.inf
    options = {"scale": 5e-324, "softcap": 30.0}
    out, lse = attention(q, k, v, return_lse=True, **options)
    check_against_reference(Case(q, k, v, options=options), out, lse)
    assert np.isfinite(lse).all()


def test_finite_data_under_a_tiny_softcap_whose_terms_overflow():
    q = np.array([[1e9, -1e9, 1.0]], np.float32)
    k = np.array([[1e9, 1e9, 2.0], [1e9, 1e9, 1.0]], np.float32)
    v = np.array([[1.0], [3.0]], np.float32)
    assert attention(q, k, v, scale=1.0, softcap=1e-25)[0, 0] == 2


def test_a_scale_beyond_float32_is_the_largest_float32():
    q, k, v = qkv(5, 1)
    q[...] = k[...] = 0
    q[:, 0], k[3, 0] = 0.5, 0.5
    want = np.broadcast_to(v[3], v.shape)
    np.testing.assert_array_equal(attention(q, k, v, scale=1e300), want)
    np.testing.assert_array_equal(attention(q, -k, v, scale=-1e300), want)


def test_scores_beyond_a_softcap_that_is_cut_keep_their_order():
    q, k, v = qkv(20, 8)
    for options in ({"scale": 1e300, "softcap": 1e300}, {"scale": 1e38, "softcap": 1e39}):
        want, _ = reference.attention(q, k, v, **options)
        assert reference.relative_error(attention(q, k, v, **options), want) < 1e-6


def test_no_row_is_no_work():
    q = np.broadcast_to(np.zeros((1, 0, 8), np.float32), (2**40, 0, 8))
    out, lse = attention(q, q, q, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]


# Accuracy at length


@pytest.mark.parametrize(("dtype", "bound"), [(SINGLE, 2e-6), (DOUBLE, 1e-13)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_error_at_length_4096(dtype, bound, is_causal):
    q, k, v = qkv(4096, 64, dtype=dtype)
    want, want_lse = reference.attention(q, k, v, is_causal=is_causal)
    out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True)
    assert reference.relative_error(out, want) < bound
    assert reference.relative_error(lse, want_lse) < bound


# Threads


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_number_of_threads_does_not_show(is_causal):
    q, k, v = qkv(5, 700, 32)
    results = []
    for threads in (1, 2, 3, 8):
        with threadpoolctl.threadpool_limits(threads, user_api="blas"):
            results.append(attention(q, k, v, is_causal=is_causal).tobytes())
    assert len(set(results)) == 1


def test_limits_come_back():
    before = blas_threads()
    attention(*qkv(4, 600, 32))
    assert blas_threads() == before
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        inside = blas_threads()
        attention(*qkv(4, 600, 32))
        assert blas_threads() == inside
    assert blas_threads() == before


@pytest.mark.parametrize("others_limit", [1, 3])
def test_threads_inside_somebody_elses_limit(others_limit):
    # threadpoolctl lets only the thread that entered a limit first change it.
    q, k, v = qkv(3, 400, 32)
    want = attention(q, k, v).tobytes()
    seen = []

    def call():
        with _threads._limit.hold() as allowed:
            seen.append((allowed, *blas_threads()))
        seen.append(attention(q, k, v).tobytes() == want)

    with threadpoolctl.threadpool_limits(others_limit, user_api="blas"):
        inside = blas_threads()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert seen == [(others_limit, *[1] * len(inside)), True]
        assert blas_threads() == inside


def test_limits_come_back_after_an_exception():
    before = blas_threads()

    def new_worker():
        def work(task):
            if task == 3:
                raise KeyError(task)
            done.append(task)

        return work

    done = []
    with pytest.raises(KeyError, match="3"):
        _threads.run(range(1000), new_worker)
    assert len(done) < 999
    assert blas_threads() == before


def test_somebody_elses_change_during_a_call_is_kept():
    libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    if not libraries:
        pytest.skip("no BLAS library whose threads can be set")
    before = [lib.get_num_threads() for lib in libraries]
    try:
        with _threads._limit.hold():
            assert all(lib.get_num_threads() == 1 for lib in libraries)
            for lib in libraries:
                lib.set_num_threads(2)
        assert all(lib.get_num_threads() == 2 for lib in libraries)
    finally:
        for lib, threads in zip(libraries, before, strict=True):
            lib.set_num_threads(threads)


def test_concurrent_calls():
    before = blas_threads()
    inputs = [qkv(3, 400 + 50 * i, 32, seed=i) for i in range(6)]
    want = [attention(*x).tobytes() for x in inputs]
    wrong = []

    def repeat(i):
        for _ in range(5):
            if attention(*inputs[i]).tobytes() != want[i]:
                wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert blas_threads() == before


def test_every_task_is_done_once_where_no_thread_can_be_started(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    with threadpoolctl.threadpool_limits(4, user_api="blas"):
        _threads.run(range(10), lambda: done.append)
    assert done == list(range(10))


def _in_child(q, k, v, expected, before, answers):
    same = attention(q, k, v).tobytes() == expected
    answers.put(same and blas_threads() == before)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_during_a_call():
    q, k, v = qkv(2, 400, 16)
    before = blas_threads()
    expected = attention(q, k, v).tobytes()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(q, k, v, expected, before, answers))
    with _threads._limit.hold(), _threads._limit._lock:  # as another thread might hold them
        child.start()
    assert answers.get(timeout=60)
    child.join()
    assert blas_threads() == before


def test_floating_point_errors_are_nobodys_business():
    q, k, v = qkv(2, 40, 8)
    k[:, 20:] = np.inf
    with np.errstate(all="raise"):
        out = attention(q, k, v, np.full((40, 1), -np.inf, np.float32), is_causal=True)
    assert out.shape == v.shape


# Memory


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_memory_at_length_65536(dtype):
    # A narrow window keeps it short: every tile there is has the full width all the same.
    q, k, v = qkv(65536, 64, dtype=dtype)
    out = np.empty_like(q)
    tracemalloc.start()
    attention(q, k, v, window=(1500, 0), out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
