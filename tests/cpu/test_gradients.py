"""Gradients on the CPU alone: many small tiles, threads, sums in order, bit masks, memory."""

import itertools
import random
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fa_cupy import BitMask, _definitions, attention, attention_backward, causal_product_backward
from fa_cupy.core import plan_cache
from fa_cupy.cpu import attention_backward as cpu_attention_backward
from fa_cupy.cpu import blas as cpu_blas
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.ordered_sum import InOrder
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.tiled import attention_backward as tiled_attention_backward
from fa_cupy.tiled import tile_sizes
from tests.api.test_gradients import plain_options
from tests.api.test_masks import dense_masks
from tests.support import blas
from tests.support.blas import two_threads
from tests.support.every_run import examples, only, some
from tests.support.gradients import UNIT, check, hold, solve
from tests.support.strategies import DTYPES, LAYOUTS, Case, by_dtype, cases, normal

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
with_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def in_columns(x):
    """The same numbers with columns that lie densely."""
    return x.swapaxes(1, 2).copy().swapaxes(1, 2)


def backward(q, k, v, *more, need=None, **options):
    out, lse = attention(q, k, v, *more, return_lse=True, **options)
    return attention_backward(out, q, k, v, out, lse, *more, need=need, **options)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 by 32, so that short problems have many of them."""
    monkeypatch.setattr(tile_sizes, "tile_sizes", lambda *_, **__: tile_sizes.Tile(16, 32))


@given(case=cases(), dlse=st.booleans())
@with_fixture
def test_many_tiles_agree_with_the_reference(small_tiles, case, dlse):
    assume(plain_options(case))
    check(np, case, dlse)


def test_tiles_that_no_query_sees_are_not_computed(monkeypatch, small_tiles):
    q, k, v = draw(*[(128, 8)] * 3)
    tiles = []
    terms = tiled_attention_backward._terms

    def counted(steps, problem, x, rows, keys, *more):
        found = terms(steps, problem, x, rows, keys, *more)
        tiles.append((rows, keys, bool(found)))
        return found

    monkeypatch.setattr(tiled_attention_backward, "_terms", counted)
    backward(q, k, v, window=(16, 0))
    # 16 keys are seen by themselves and the 31 queries from the first on, whose tiles are of 32.
    assert sum(rows[1] - rows[0] for rows, _, _ in tiles) == 7 * 32 + 16
    tiles.clear()
    mask = np.zeros((128, 128), bool)
    mask[32:64, 16:32] = True
    backward(q, k, v, None, mask)
    assert [tile[:2] for tile in tiles if tile[2]] == [((32, 64), (16, 32))]


def test_finite_data_are_computed_once(monkeypatch):
    terms = tiled_attention_backward._terms

    def once(*arguments):
        assert not arguments[7], "computed again"
        return terms(*arguments)

    monkeypatch.setattr(tiled_attention_backward, "_terms", once)
    q, k, v = draw(*[(2, 300, 16)] * 3)
    mask = np.random.default_rng(0).random((300, 300)) < 0.5
    backward(q, k, v, None, mask, is_causal=True)
    backward(q, k, v, np.full((300, 1), -np.inf, np.float32), softcap=2.0)


# Stacks of one tile


@pytest.fixture
def plain_calls(monkeypatch):
    """What each call of `_Plain.add` returned."""
    add, found = cpu_attention_backward._Plain.add, []

    def noted(*arguments):
        found.append(add(*arguments))
        return found[-1]

    monkeypatch.setattr(cpu_attention_backward._Plain, "add", noted)
    return found


@given(case=cases(), dlse=st.booleans())
@with_fixture
def test_one_tile_of_the_tiled_algorithm_agrees_with_the_reference(monkeypatch, case, dlse):
    """That computes what is not plain; most small problems are."""
    monkeypatch.setattr(cpu_attention_backward, "_is_plain", lambda *_: False)
    plan_cache.plans.clear()
    assume(plain_options(case))
    check(np, case, dlse)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (5, 3)}], ids=str)
@pytest.mark.parametrize(**by_dtype())
def test_one_tile_straight_through(plain_calls, dtype, options, layout):
    arrays = draw((2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 24), dtype=dtype)
    options = options | {"causal_align": "bottom_right"}
    mask = np.random.default_rng(1).random((3, 33, 40)) < 0.8
    for hiding in (None, mask):
        case = Case(*arrays, None, hiding, layouts=(layout,) * 5, options=options)
        check(np, case, dlse=hiding is None)
    assert len(plain_calls) >= 2
    assert all(plain_calls)


@pytest.mark.parametrize("is_causal", only([False, True], True))
def test_stacks_of_one_tile_in_threads(plain_calls, is_causal):
    """As many as the work is worth, the last of them shorter."""
    q, k, v = draw(*[(2, 19, 130, 40)] * 3)
    results = []
    for threads in (1, 2, 5):
        with blas.threads(threads):
            found = backward(q, k, v, is_causal=is_causal)
            results.append(b"".join(x.tobytes() for x in found))
    assert len(set(results)) == 1
    assert len(plain_calls) == 3 * 6
    check(np, Case(q, k, v, options={"is_causal": is_causal}))


def test_no_gradient_changes_with_the_others_that_are_wanted():
    q, k, v = draw((4, 30, 8), (4, 40, 8), (4, 40, 5))
    for x in (k, in_columns(k)):
        everything = backward(q, x, v)
        for i, name in enumerate("qkv"):
            (alone,) = backward(q, x, v, need=(name,))
            assert alone.tobytes() == everything[i].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_stack_that_is_not_finite_is_computed_tile_by_tile(plain_calls, bad):
    q, k, v = draw(*[(3, 30, 8)] * 3)
    mask = np.ones((3, 30, 30), bool)
    mask[1, :, 20:] = False
    check(np, Case(q, k, v, None, mask))
    assert plain_calls == [True]
    v[1, 20:] = bad
    found = check(np, Case(q, k, v, None, mask))
    assert plain_calls == [True, False]
    assert all(np.isfinite(x).all() for x in found.values())


def test_large_scores_are_not_plain(plain_calls):
    """Weights come from their maximum and sum where a log-sum-exp has lost its digits."""
    q, k, v = draw(*[(2, 30, 8)] * 3)
    check(np, Case(q, 3000 * k, v))
    assert plain_calls == []


def test_direct_gradients_of_columns_are_computed_again(monkeypatch):
    """Several tiles of queries add to one dk and dv, and hidden keys are not finite."""
    q, k, v = draw((1100, 16), (300, 16), (300, 16))
    again, calls = tiled_attention_backward.begin_again, []

    def counted(*arguments):
        calls.append(1)
        again(*arguments)

    monkeypatch.setattr(tiled_attention_backward, "begin_again", counted)
    mask = np.ones((1100, 300), bool)
    mask[:, 250:] = False
    check(np, Case(q, k, v, None, mask))
    assert calls == []
    v[250:] = np.nan
    k[250:] = np.inf
    found = check(np, Case(q, k, v, None, mask))
    assert len(calls) == 1
    assert all(np.isfinite(x).all() for x in found.values())


# Repeated calls


@given(case=cases(), dlse=st.booleans())
def test_a_repeated_call_has_the_bits_of_the_first(case, dlse):
    plan_cache.plans.clear()
    calls = [solve(np, case, dlse)[1] for _ in range(3)]
    first, *others = [[x.tobytes() for x in found.values()] for found in calls]
    assert others == [first, first]


def test_calls_that_differ_share_no_plan():
    q, k, v = draw(*[(2, 20, 20)] * 3)
    out, lse = attention(q, k, v, return_lse=True)
    dlse, bias, mask = draw((2, 20))[0], draw((20, 20))[0], np.tri(20) == 1
    turned = in_columns(k)
    double = [x.astype(float) for x in (out, q, k, v, out, lse)]
    calls = [
        lambda: attention_backward(out, q, k, v, out, lse),
        lambda: attention_backward(out, q, k, v, out, lse, dlse=dlse),
        lambda: attention_backward(out, q, k, v, out, lse, sinks=dlse),
        lambda: attention_backward(out, q, k, v, out, lse, bias),
        lambda: attention_backward(out, q, k, v, out, lse, bias, need=("q", "k", "v")),
        lambda: attention_backward(out, q, k, v, out, lse, None, mask),
        lambda: attention_backward(out, q, k, v, out, lse, scale=0.5),
        lambda: attention_backward(out, q, k, v, out, lse, is_causal=True),
        lambda: attention_backward(out, q, k, v, out, lse, window=(3, None)),
        lambda: attention_backward(out, q, k, v, out, lse, window=(None, 3)),
        lambda: attention_backward(out, q, k, v, out, lse, softcap=0.5),
        lambda: attention_backward(out, q, turned, v, out, lse),
        lambda: attention_backward(out, turned, k, v, out, lse),
        lambda: attention_backward(out, q, k[:1], v, out, lse),
        lambda: attention_backward(*double),
        lambda: attention_backward(out, q, k, v, out, lse, need=("v",)),
    ]
    alone = []
    for call in calls:
        plan_cache.plans.clear()
        alone.append([(x.strides, x.tobytes()) for x in call()])
    for _ in range(2):
        assert alone == [[(x.strides, x.tobytes()) for x in call()] for call in calls]


def test_a_repeated_call_is_checked():
    q, k, v = draw(*[(2, 20, 8)] * 3)
    out, lse = attention(q, k, v, return_lse=True)
    for _ in range(2):
        attention_backward(out, q, k, v, out, lse)
        with pytest.raises(ValueError, match="dout has shape"):
            attention_backward(out[:1], q, k, v, out, lse)
        with pytest.raises(TypeError, match="lse has dtype float64, want float32"):
            attention_backward(out, q, k, v, out, lse.astype(float))
        with pytest.raises(TypeError, match=r"is_causal is 2 \(int\), want a bool"):
            attention_backward(out, q, k, v, out, lse, is_causal=2)
        with pytest.raises(ValueError, match=r"window\[0\] is -1"):
            attention_backward(out, q, k, v, out, lse, window=(-1, 2))


# Sums of squares and products of stacks


@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
def test_what_is_finite_is_told_from_what_is_not(dtype):
    largest = np.finfo(dtype).max
    for shape in ((1,), (3, 50, 7)):
        for step in (1, 2):
            x = np.full((2 * shape[0], *shape[1:]), largest, dtype)[::step]
            assert Steps(dtype).finite(x)
            for bad in (np.nan, np.inf, -np.inf):
                x[(-1,) * x.ndim] = bad
                assert not Steps(dtype).finite(x)
                x[(-1,) * x.ndim] = 1


@pytest.mark.skipif(not cpu_blas.multiplies_stacks(SINGLE), reason="the library has no such call")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("turn", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("sizes", [(3, 5, 7, 4), (1, 1, 1, 1), (4, 70, 90, 33), (2, 1, 9, 1)])
@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
def test_scaled_products(dtype, sizes, turn, add):
    n, rows, inner, cols = sizes
    wide = draw((n, rows, inner), (n, inner, cols), (n, rows, cols + 3), dtype=dtype)
    a, b = (in_columns(x) if turned else x for x, turned in zip(wide, turn, strict=False))
    out = wide[2][..., :cols]
    want = 0.3 * (a.astype(float) @ b) + (out if add else 0)
    beside = wide[2][..., cols:].tobytes()
    cpu_blas.scaled_products(a, b, out, 0.3, add)(a, b, out)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4 if dtype == SINGLE else 1e-12)
    assert wide[2][..., cols:].tobytes() == beside


def test_products_that_the_library_cannot_read():
    a, b, out = draw(*[(3, 8, 8)] * 3)
    far = np.lib.stride_tricks.as_strided(a, strides=(4 << 31, 32, 4))
    assert cpu_blas.scaled_products(far, b, out, 1.0, False) is None
    assert cpu_blas.scaled_products(a[::-1], b, out, 1.0, False) is None
    assert cpu_blas.scaled_products(a[..., ::2], b[:, :4], out, 1.0, False) is None
    assert cpu_blas.scaled_products(a, b, out.swapaxes(1, 2), 1.0, False) is None


# Bit masks


@given(st.data())
@examples(25)
def test_blocks_of_any_state_agree_with_the_dense_mask(data):
    lengths = (data.draw(st.integers(100, 500)), data.draw(st.integers(100, 900)))
    dense = data.draw(dense_masks(max_batch=0, lengths=lengths))
    heads = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    arrays = draw(*((*heads, n, 16) for n in (*lengths, lengths[1])))
    if data.draw(st.booleans()):
        arrays[2][..., data.draw(st.integers(0, lengths[1] - 1)), :] = np.nan
    bias = draw((lengths[1],))[0] if data.draw(st.booleans()) else None
    case = Case(*arrays, bias, dense)
    if data.draw(st.booleans()):
        case.options = {"is_causal": True, "causal_align": "bottom_right", "window": (300, None)}
    if heads and data.draw(st.booleans()):  # another mask for each head
        rng = np.random.default_rng(1)
        case.mask = dense ^ (rng.random((heads[-1], 1, 1)) < 0.5)
    bits = BitMask.from_dense(case.mask)
    found = check(np, case, mask=bits)
    again = solve(np, case, mask=bits)[1]
    assert [x.tobytes() for x in found.values()] == [x.tobytes() for x in again.values()]


def test_empty_blocks_are_not_computed(monkeypatch):
    tiles = []
    terms = tiled_attention_backward._terms

    def counted(*arguments):
        tiles.append(arguments[3:5])
        return terms(*arguments)

    monkeypatch.setattr(tiled_attention_backward, "_terms", counted)
    q, k, v = draw(*[(1280, 8)] * 3)
    dense = np.zeros((1280, 1280), bool)
    dense[700:730, 290:310] = True  # more bits than a sparse block has
    backward(q, k, v, None, BitMask.from_dense(dense))
    assert len(tiles) in (1, 2)  # columns may be half a block wide
    assert all(rows == (640, 768) for rows, _ in tiles)


# Threads


@pytest.mark.parametrize("shape", [(), (5, 1, 1), (700, 1), (700,), (700, 700), (5, 700, 700)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_number_of_threads_does_not_show(is_causal, shape):
    q, k, v = draw((5, 700, 32), (1, 700, 32), (5, 700, 32))
    bias = draw(shape, seed=1)[0]
    results = []
    for threads in (1, 2, 3, 8):
        with blas.threads(threads):
            found = backward(q, k, v, bias, is_causal=is_causal)
            results.append(b"".join(x.tobytes() for x in found))
    assert len(set(results)) == 1


@given(st.data())
@settings(max_examples=50)
def test_sums_are_taken_in_the_order_of_tasks(data):
    """Terms of several tasks, brought in any order that keeps each task's own."""
    terms = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=30))
    terms.sort()
    log = {}
    sums = InOrder(lambda target, term: log.setdefault(target[0], []).append(term.tolist()))
    for task, name in terms:
        sums.expect(name, task)
    numbered = {}
    for i, (task, name) in enumerate(terms):
        numbered.setdefault(task, []).append((name, i))
    scratch = np.empty(1)
    order = [task for task, _ in terms]
    random.Random(data.draw(st.integers(0, 99))).shuffle(order)
    for task in order:
        name, i = numbered[task].pop(0)
        scratch[0] = i
        sums.add(name, task, [name], None if i % 5 == 4 else scratch)
        scratch[0] = np.nan
    for name, found in log.items():
        assert found == [[i] for i, (_, n) in enumerate(terms) if n == name and i % 5 != 4]


def test_concurrent_calls():
    inputs = [draw(*[(3, 400 + 50 * i, 32)] * 3, seed=i) for i in range(4)]
    want = [b"".join(g.tobytes() for g in backward(*x)) for x in inputs]
    wrong = []

    def repeat(i):
        for _ in range(3):
            if b"".join(g.tobytes() for g in backward(*inputs[i])) != want[i]:
                wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_error_in_one_thread_ends_all(monkeypatch):
    q, k, v = draw(*[(4, 600, 32)] * 3)
    out, lse = attention(q, k, v, return_lse=True)
    terms, calls = tiled_attention_backward._terms, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("planted")
        return terms(*arguments)

    monkeypatch.setattr(tiled_attention_backward, "_terms", failing)
    with (
        blas.threads(4),
        pytest.raises(KeyError, match="planted"),
    ):
        attention_backward(out, q, k, v, out, lse)
    assert not thread_pool._at_work


def test_floating_point_errors_are_nobodys_business():
    q, k, v = draw(*[(2, 40, 8)] * 3)
    k[:, 20:] = np.inf
    with np.errstate(all="raise"):
        backward(q, k, v, np.full((40, 1), -np.inf, np.float32), is_causal=True)


# Memory


def peak_of(function):
    tracemalloc.start()
    try:
        results = function()
        return tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in results)
    finally:
        tracemalloc.stop()


def test_no_array_of_all_scores():
    q, k, v = draw(*[(6000, 16)] * 3)
    out, lse = attention(q, k, v, return_lse=True)
    assert peak_of(lambda: attention_backward(out, q, k, v, out, lse)) < 0.15 * 6000 * 6000 * 4


@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_memory_at_length_65536(dtype):
    # A narrow window keeps it short: every tile there is has the full width all the same.
    q, k, v = draw(*[(65536, 32)] * 3, dtype=dtype)
    out, lse = attention(q, k, v, window=(300, 0), return_lse=True)
    peak = peak_of(lambda: attention_backward(out, q, k, v, out, lse, window=(300, 0)))
    assert peak < 65536 * 32 * 4 * 4 + 40e6


def test_a_bias_gradient_takes_no_second_array():
    q, k, v = draw(*[(2000, 16)] * 3, dtype=HALF)
    bias = draw((2000, 2000), dtype=HALF)[0]
    out, lse = attention(q, k, v, bias, return_lse=True)
    assert peak_of(lambda: attention_backward(out, q, k, v, out, lse, bias)) < 2000 * 2000 * 3


def test_what_queries_share_is_summed_as_it_comes():
    """20,000 keys for 200 queries, each a batch entry of its own."""
    q, k, v = draw((200, 1, 4), (20000, 4), (20000, 4))
    out, lse = attention(q, k, v, return_lse=True)
    assert peak_of(lambda: attention_backward(out, q, k, v, out, lse)) < 40e6


def test_no_row_is_no_work():
    q = np.broadcast_to(np.zeros((1, 0, 8), np.float32), (2**40, 0, 8))
    out, lse = attention(q, q, q, return_lse=True)
    for x in attention_backward(out, q, q, q, out, lse):
        assert x.shape == q.shape


def test_a_product_has_no_softmax():
    """Attention whose weights are all equal sums values as a causal product of ones does."""
    v, dout = draw((50, 3), (50, 3), dtype=DOUBLE)
    q = np.zeros((50, 2))
    out, lse = attention(q, q, v, return_lse=True, is_causal=True)
    *_, dv = attention_backward(dout, q, q, v, out, lse, is_causal=True)
    count = np.arange(1, 51)[:, None]
    ones = np.ones((50, 1))
    *_, want = causal_product_backward(dout / count, ones, ones, v)
    np.testing.assert_allclose(dv, want, atol=1e-12)


# What GPU results are held against


@pytest.mark.parametrize(
    ("dim", "length"),
    some(itertools.product((64, 128, 192, 256), (65, 129, 193, 300)), lambda pair: pair[0]),
)
def test_the_bound_allows_rounded_weights_and_no_more(dim, length):
    """Queries that are the keys: most weights are below 2**-14, where float16 has fewer bits."""
    (q,) = draw((length, dim), dtype=HALF, seed=length + dim)
    (dout,) = draw((length, dim), dtype=HALF, seed=7)
    x = _definitions.scores_of(q, q, q, None, None, DOUBLE)
    weights = _definitions.attend(x, None)[2]
    base = (dout * (weights @ x.v).astype(HALF).astype(float)).sum(-1, keepdims=True)
    dscores = x.slope * weights * (dout.astype(float) @ x.v.T - base)

    def hold_rounded(spoil):
        low, ds = (spoil(a).astype(HALF).astype(float) for a in (weights, dscores))
        found = ds @ x.k, ds.T @ x.q, low.T @ dout.astype(float)
        named = {name: a.astype(HALF) for name, a in zip("qkv", found, strict=True)}
        hold(Case(q, q, q), named, dout, None, UNIT[HALF])

    hold_rounded(lambda a: a)
    key = np.arange(length)
    for spoil in (
        lambda a: np.where(np.abs(a) < 2.0**-14, 0, a),
        lambda a: a * np.where(key == length // 2, 1.01, 1),
        lambda a: np.where(key == length - 1, 0, a),
    ):
        with pytest.raises(AssertionError):
            hold_rounded(spoil)
