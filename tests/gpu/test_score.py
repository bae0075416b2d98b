"""Scores on a GPU: streams, threads, memory, and arrays of other places.

Values are held against float64 in tests/api/test_score.py and tests/api/test_score_gallery.py,
captured graphs in test_graphs.py.
"""

import threading

import numpy as np
import pytest

from fa_cupy import Score, attention, attention_backward
from tests.support.score_gallery import GALLERY
from tests.support.strategies import DTYPES

pytest.importorskip("cupy")
import cupy as cp

from tests.support.device_arrays import Counter, bits, no_memory_held, uniform

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


@pytest.fixture(autouse=True)
def free_memory(cupy):
    """Each test starts with no memory held, and leaves none."""
    with no_memory_held():
        yield


def sent(dtype, seed=0, shape=(2, 4, 300, 64)):
    return [uniform(shape, 10 * seed + i, dtype) for i in range(4)]


def results(arrays, score, need=("q", "k", "v"), **options):
    """Output, LSE and gradients."""
    *qkv, dout = arrays
    out, lse = attention(*qkv, score=score, return_lse=True, **options)
    grads = attention_backward(dout, *qkv, out, lse, score=score, need=need, **options)
    return [out, lse, *grads]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, SINGLE], ids=str)
@pytest.mark.parametrize("name", ["alibi", "general"])
def test_two_streams_at_once_give_the_bits_of_one(dtype, name):
    sets = [sent(dtype, seed) for seed in range(2)]
    scores = [GALLERY[name].score(cp) for _ in sets]
    want = [bits(results(*pair)) for pair in zip(sets, scores, strict=True)]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    cp.cuda.Device().synchronize()
    got = [[], []]
    for stream in streams * 5:
        for arrays, score, found in zip(sets, scores, got, strict=True):
            with stream:
                found.append(results(arrays, score))
    cp.cuda.Device().synchronize()
    for found, one in zip(got, want, strict=True):
        assert all(bits(result) == one for result in found)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_threads_share_a_score_from_its_first_call(dtype):
    """Threads that start together find a derivative once and compile a kernel once."""
    arrays = sent(dtype)
    x = uniform((4,), 99, SINGLE)
    score = Score("s * 1.0625 + sin(x[h] * s) - 0.25 * abs(i - j) ** 0.5", x=x)
    found, errors = [None] * 6, []
    barrier = threading.Barrier(len(found))
    cp.cuda.Device().synchronize()

    def work(place):
        try:
            barrier.wait()
            with cp.cuda.Stream(non_blocking=True) as stream:
                found[place] = results(arrays, score, ("q", "k", "v", "score.x"))
                stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    want = bits(results(arrays, score, ("q", "k", "v", "score.x")))
    assert all(bits(x) == want for x in found)


@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE], ids=str)
def test_arrays_are_read_when_the_score_is_used(dtype):
    arrays = sent(dtype)
    slopes = cp.zeros(4, SINGLE)
    score = Score("s - slopes[h] * abs(i - j)", slopes=slopes)
    plain, first = bits(results(arrays, Score("s"))), bits(results(arrays, score))
    slopes += 1
    second = bits(results(arrays, score))
    other = bits(results(arrays, Score("s - slopes[h] * abs(i - j)", slopes=cp.ones(4, SINGLE))))
    assert second == other
    assert second != first
    host = [np.frombuffer(x[0], dtype).astype(float) for x in (plain, first)]
    np.testing.assert_allclose(*host, rtol=0, atol=1e-2 if dtype == HALF else 1e-5)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_no_array_of_all_scores(dtype):
    """Nor of any part of an expression."""
    length = 16384
    arrays = sent(dtype, shape=(1, 2, length, 32))
    x = uniform((length,), 99, SINGLE)
    score = Score("s - x[i] * x[j] * sin(0.1 * (i - j))", x=x)
    need = ("q", "k", "v", "score.x")
    small = [a[:, :, :100] for a in arrays]
    results(small, score, need)  # what is kept between calls
    with no_memory_held():
        counter, before = Counter(), cp.get_default_memory_pool().total_bytes()
        with cp.cuda.using_allocator(counter):
            results(arrays, score, need)
        held = cp.get_default_memory_pool().total_bytes() - before
    whole = 2 * length**2 * 4
    assert max(counter.sizes) < whole / 8
    assert held < whole / 2


@pytest.mark.parametrize("backward", [False, True])
def test_arrays_of_other_places_are_refused(backward):
    q, k, v, dout = sent(HALF)
    lse = cp.zeros((2, 4, 300), SINGLE)
    name = "attention_backward" if backward else "attention"

    def call(q, score):
        if backward:
            return attention_backward(dout, q, k, v, dout, lse, score=score)
        return attention(q, k, v, score=score)

    host = Score("s * x[h]", x=np.ones(4))
    with pytest.raises(TypeError, match=rf"^{name}: score\.x is a numpy\.ndarray, \w+ is a cupy"):
        call(q, host)
    there = Score("s * x[h]", x=cp.ones(4))
    arrays = [np.zeros((2, 4, 300, 64), np.float16)] * 3
    with pytest.raises(TypeError, match=r"^attention: score\.x is a cupy\.ndarray, q is a numpy"):
        attention(*arrays, score=there)
    odd = cp.zeros(40, np.uint8)[1:33].view(np.uint8)
    odd = cp.ndarray((4,), SINGLE, odd.data)
    with pytest.raises(ValueError, match=rf"^{name}: score\.x is at .* want multiples of its item"):
        call(q, Score("s * x[h]", x=odd))
