"""Sizes past 32 bits, streams, graphs, threads, memory and cached plans, on a GPU."""

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from fa_cupy import (
    BitMask,
    attention,
    attention_backward,
    causal_product,
    causal_product_backward,
    linear_attention,
    prefix_state,
)
from fa_cupy.core.attention_problem import View
from tests.support.strategies import BFLOAT16, Case, by_dtype, check_against_reference, normal

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.core import plan_cache
from fa_cupy.gpu.kernels.attention import attention_params
from tests.support import plans
from tests.support.device_arrays import Counter, needs, no_memory_held, uniform

HALF = np.dtype(np.float16)
FAR = 2**31


@pytest.fixture(autouse=True)
def free_memory(cupy):
    """Each test starts with no memory held, and leaves none."""
    with no_memory_held():
        yield


@pytest.fixture
def fresh_plans():
    """No plan is known, and those that the test makes are forgotten."""

    plans.forget()
    yield plans.forget
    plans.forget()


def to_host(*arrays):
    return [None if a is None else cp.asnumpy(a) for a in arrays]


def check(arrays, out, lse, **options):
    """Compare device arrays, small ones, with the reference."""
    arrays = to_host(*arrays)
    case = Case(*arrays, *[None] * (5 - len(arrays)), options=options)
    check_against_reference(case, *to_host(out, lse))


def bits(result):
    return [x.tobytes() for x in to_host(*(result if isinstance(result, tuple) else (result,)))]


def launches():
    """Launches of the one plan there is."""
    (only,) = plans.of()
    return len(only.steps)


# Sizes


def test_more_batch_entries_than_a_grid_has_along_y():
    q, k, v = (
        uniform((350, 200, 17, 40), 1),
        uniform((200, 23, 40), 2),
        uniform((350, 1, 23, 24), 3),
    )
    out, lse = attention(q, k, v, return_lse=True)
    for i, j in ((0, 0), (0, 199), (327, 134), (327, 135), (327, 136), (349, 199)):
        check((q[i, j], k[j], v[i, 0]), out[i, j], lse[i, j])


def attend_in_pieces(q, k, v):
    """Output and LSE for a few queries of scale 1, in float64, a piece of the keys at a time."""
    q, step = q.astype(np.float64), 2**18
    pieces = [slice(begin, begin + step) for begin in range(0, len(k), step)]
    scores = cp.concatenate([q @ k[piece].astype(np.float64).T for piece in pieces], axis=1)
    top = scores.max(axis=1, keepdims=True)
    weights = cp.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    out = sum(weights[:, piece] @ v[piece].astype(np.float64) for piece in pieces) / total
    return out, (top + cp.log(total))[:, 0]


def test_keys_and_values_of_more_than_2_to_the_31_elements():
    needs(16)
    heads, keys, dim = 16, 2**20 + 3, 136
    k, v = uniform((heads, keys, dim), 1), uniform((heads, keys, dim), 2)
    assert min(k.size, v.size) > FAR
    # Each query looks like one key, which gets about as much weight as all the others together.
    liked = [0, keys // 2, keys - 2, keys - 1]
    q = cp.stack([k[:, key] for key in liked], axis=1) * HALF.type(0.12)
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    for head in (0, 7, heads - 1):
        want, want_lse = attend_in_pieces(q[head], k[head], v[head])
        own = (q[head].astype(np.float64) * k[head][liked].astype(np.float64)).sum(axis=1)
        assert (cp.exp(own - want_lse) > 0.1).all()  # so a lost key shows
        # A million float32 terms are added up in order: the bound is theirs.
        assert float(abs(out[head] - want).max()) < 0.02
        assert float(abs(lse[head] - want_lse).max()) < 0.02


def test_queries_scores_and_results_of_more_than_2_to_the_31_elements():
    needs(24)
    rows, keys, dim = 2**24 + 77, 130, 136
    q, k, v = uniform((rows, dim), 1), uniform((keys, dim), 2), uniform((keys, dim), 3)
    bias, mask = uniform((rows, keys), 4), uniform((rows, keys), 5) > -1
    cp.get_default_memory_pool().free_all_blocks()  # what the comparison used
    assert min(q.size, mask.size, bias.size) > FAR
    out, lse = attention(q, k, v, bias, mask, return_lse=True)
    assert out.size > FAR
    for begin in (0, 2**23, FAR // dim - 32, FAR // keys - 32, rows - 64):
        part = slice(begin, begin + 64)
        check((q[part], k, v, bias[part], mask[part]), out[part], lse[part])


def test_one_query_in_each_of_many_batch_entries():
    needs(10)
    entries = 2**23 + 3
    q, k, v = uniform((entries, 1, 256), 1), uniform((9, 256), 2), uniform((9, 256), 3)
    assert q.size > FAR
    out, lse = attention(q, k, v, return_lse=True)
    for begin in (0, FAR // 256 - 8, entries - 16):
        part = slice(begin, begin + 16)
        check((q[part], k, v), out[part], lse[part])


# The first is aligned to 16 bytes, the second not; the third does not fit 32 bits even in elements.
@pytest.mark.parametrize("step", [2**30 + 8, 2**30 + 1, 2**31 + 8])
@pytest.mark.parametrize("direction", [1, -1])
def test_rows_more_than_2_to_the_31_bytes_apart(step, direction):
    needs(10)
    memory = cp.empty(2 * step + 256, HALF)
    memory.fill(np.nan)
    q, k, v, out = (
        cp.lib.stride_tricks.as_strided(memory[64 * i :], (3, 64), (2 * step, 2))[::direction]
        for i in range(4)
    )
    for seed, x in enumerate((q, k, v)):
        x[...] = uniform(x.shape, seed)
    assert abs(q.strides[0]) >= FAR
    result, lse = attention(q, k, v, out=out, return_lse=True)
    assert result is out
    check((q, k, v), out, lse)
    new = attention(q, k, v)
    assert bits(new) == bits(out)


def scrambled(shape, order, seed):
    """`uniform` with its batch axes lying in memory in another order."""
    lie = [shape[axis] for axis in order] + list(shape[-2:])
    back = [*np.argsort(order).tolist(), len(order), len(order) + 1]
    return uniform(lie, seed).transpose(back)


@pytest.mark.parametrize("max_grid", [attention_params.MAX_GRID, 5])
def test_more_batch_axes_than_the_struct_has(fresh_plans, monkeypatch, max_grid):
    monkeypatch.setattr(attention_params, "MAX_GRID", max_grid)
    batch = (2, 2, 2, 3, 2, 2, 2, 2)
    q = scrambled((*batch, 9, 16), (7, 6, 5, 4, 3, 2, 1, 0), 1)
    k = scrambled((*batch, 11, 16), (1, 0, 3, 2, 5, 4, 7, 6), 2)
    v = uniform((2, 1, 3, 1, 2, 1, 2, 11, 8), 3)
    bias = uniform((2, 1, 1, 1, 1, 1, 1, 2, 9, 11), 4)
    mask = uniform((2, 2, 1, 1, 9, 1), 5) > -1
    views = {"q": View(q.shape, q.strides), "k": View(k.shape, k.strides)}
    assert len(attention_params.merge_axes(batch, views)[0]) == len(batch)
    out, lse = attention(q, k, v, bias, mask, return_lse=True)
    assert launches() == 4 * (1 if max_grid > 96 else -(-96 // max_grid))
    check((q, k, v, bias, mask), out, lse)


@pytest.mark.parametrize("max_grid", [1, 7, 20])
def test_a_grid_in_pieces_gives_the_same_bits(fresh_plans, monkeypatch, max_grid):
    q, k, v = uniform((3, 4, 300, 64), 1), uniform((3, 2, 200, 64), 2), uniform((3, 2, 200, 64), 3)
    bias = uniform((3, 4, 1, 200), 4)
    options = {"is_causal": True, "causal_align": "bottom_right", "return_lse": True}
    want = bits(attention(q, k, v, bias, **options))
    assert launches() == 1
    fresh_plans()
    monkeypatch.setattr(attention_params, "MAX_GRID", max_grid)
    assert bits(attention(q, k, v, bias, **options)) == want
    (tiles,) = {int(step.params["common"]["q_tiles"][0]) for step in plans.steps()}
    assert launches() == -(-12 // max(1, max_grid // tiles)) > 1


# Streams, graphs, threads


def inputs(seed, dtype=HALF):
    """Arrays of one call, those of equal seeds equal; with all that a kernel can be asked for."""
    rng = np.random.default_rng(seed)
    shapes = (2, 8, 500, 64), (2, 4, 513, 64), (2, 4, 513, 48), (8, 500, 1)
    arrays = [cp.asarray(normal(rng, shape, dtype)) for shape in shapes]
    return *arrays, cp.asarray(rng.random((500, 513)) < 0.9)


OPTIONS = {
    "is_causal": True,
    "causal_align": "bottom_right",
    "window": (400, 0),
    "return_lse": True,
}


def test_two_streams_at_once_give_the_bits_of_one():
    sets = [inputs(seed) for seed in range(2)]
    want = [bits(attention(*arrays, **OPTIONS)) for arrays in sets]
    assert want[0] != want[1]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in sets]
    got = [[] for _ in sets]
    cp.cuda.Device().synchronize()
    for _ in range(30):
        for stream, arrays, results in zip(streams, sets, got, strict=True):
            with stream:
                results.append(attention(*arrays, **OPTIONS))
    cp.cuda.Device().synchronize()
    for results, one in zip(got, want, strict=True):
        assert all(bits(result) == one for result in results)


@pytest.mark.parametrize("with_out", [False, True])
def test_a_graph_computes_with_what_its_inputs_hold_when_it_runs(with_out):
    arrays, others = inputs(0), inputs(1)
    want = [bits(attention(*x, **OPTIONS)) for x in (arrays, others)]
    out = cp.empty((2, 8, 500, 48), HALF) if with_out else None
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        attention(*arrays, out=out, **OPTIONS)  # compiles, and leaves the stream memory to take
        stream.synchronize()
        stream.begin_capture()
        result = attention(*arrays, out=out, **OPTIONS)
        graph = stream.end_capture()
    for x in result:
        x.fill(np.nan)
    for source, expected in ((others, want[1]), (inputs(0), want[0])):
        for x, y in zip(arrays, source, strict=True):
            x[...] = y
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(result) == expected


def test_many_threads_share_one_plan(fresh_plans):
    count, calls = 16, 100
    sets = [[uniform((3, 65, 32), 3 * i + j) for j in range(3)] for i in range(count)]
    want = [bits(attention(*arrays, is_causal=True, return_lse=True)) for arrays in sets]
    assert len(set(map(tuple, want))) == count
    fresh_plans()  # the first calls race too
    cp.cuda.Device().synchronize()
    start, got = threading.Barrier(count), [[] for _ in range(count)]

    def work(i):
        start.wait()
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(calls):
                got[i].append(attention(*sets[i], is_causal=True, return_lse=True))
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for results, one in zip(got, want, strict=True):
        assert len(results) == calls
        assert all(bits(result) == one for result in results)


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_results_repeat_while_another_stream_keeps_the_device_busy(dtype):
    arrays = inputs(0, dtype)
    load = [uniform((4, 8, 2048, 128), seed) for seed in range(3)]
    want = bits(attention(*arrays, **OPTIONS))
    busy, stream = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    target = cp.empty_like(load[0])
    attention(*load, out=target)
    cp.cuda.Device().synchronize()
    results = []
    for _ in range(50):
        with busy:
            attention(*load, out=target)
        with stream:
            results.append(attention(*arrays, **OPTIONS))
    cp.cuda.Device().synchronize()
    assert all(bits(result) == want for result in results)


# Memory


@pytest.mark.parametrize("layout", ["dense", "blhd"])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_the_kernels_need_no_memory_but_their_results(fresh_plans, dtype, layout):
    length, heads, dim = 32768, 2, 64
    shape = (1, heads, length, dim) if layout == "dense" else (1, length, heads, dim)
    q, k, v = (uniform(shape, seed, dtype) for seed in range(3))
    if layout == "blhd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    bias, mask = uniform((heads, 1, length), 4, np.float32), uniform((length,), 5) > -1
    out = cp.empty_like(q)
    counter = Counter()
    with cp.cuda.using_allocator(counter):
        for given in (None, None, mask, mask):  # without and with a plan
            attention(q, k, v, bias, given, is_causal=True, return_lse=True)
            results, rest = counter.sizes[:2], sum(counter.sizes[2:])
            assert results[0] == 2 * q.size
            # The counter of a persistent grid lies behind the rows.
            assert results[1] - 4 * heads * length in (0, 16)
            assert rest == 0 if given is None else rest < 2**22  # packed: of one row for all
            counter.sizes.clear()
        attention(q, k, v, out=out)
        assert sum(counter.sizes) <= 16  # the counter of a persistent grid


@pytest.mark.parametrize(("dtype", "dim"), [(BFLOAT16, 320), (np.dtype(np.float32), 128)], ids=str)
def test_tiles_need_far_less_memory_than_all_scores(dtype, dim):
    needs(4)
    length = 32768
    q, k, v = (uniform((length, dim), seed, dtype) for seed in range(3))
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        result = attention(q, k, v, return_lse=True)
        cp.cuda.Device().synchronize()
        most = pool.total_bytes()  # never given back, so the most there was
        assert most >= sum(x.nbytes for x in result)  # it did come from here
        del result
    assert most < length * length * dtype.itemsize / 4


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("function", ["attention", "causal_product", "linear_attention"])
def test_results_are_given_back_without_the_garbage_collector(function, dtype):
    """Memory that the collector frees while a stream is captured would end the capture."""
    q, k, v = (cp.asarray(normal(np.random.default_rng(i), (2, 70, 24), dtype)) for i in range(3))

    def run():
        if function == "linear_attention":
            linear_attention(q, k, v)
        elif function == "attention":
            out, lse = attention(q, k, v, return_lse=True)
            attention_backward(out, q, k, v, out, lse)
        else:
            causal_product(q, k, v, return_state=True)
            causal_product_backward(q, q, k, v)
            prefix_state(k, v, [3, 50])

    run()
    pool = cp.cuda.MemoryPool()
    gc.collect()
    gc.disable()
    try:
        with cp.cuda.using_allocator(pool.malloc):
            run()
        assert pool.used_bytes() == 0
    finally:
        gc.enable()


@contextlib.contextmanager
def poisoned(value, sizes):
    """Fill the memory that allocations of these sizes get inside; yields its addresses."""
    pool = cp.cuda.MemoryPool()  # has nothing else to give
    with cp.cuda.using_allocator(pool.malloc):
        blocks = [cp.full(size, value, np.uint8) for size in sizes]
        places = {block.data.ptr for block in blocks}
        del blocks
        yield places


@pytest.mark.parametrize("v_dim", [1, 3, 33, 72, 130, 255])
@pytest.mark.parametrize("q_len", [1, 7, 65, 127, 129, 300])
def test_every_element_of_a_result_is_written(q_len, v_dim):
    q, k, v = uniform((3, q_len, 40), 1), uniform((3, 50, 40), 2), uniform((3, 50, v_dim), 3)
    for options in ({}, {"is_causal": True, "causal_align": "bottom_right"}):  # some see no key
        found = []
        for value in (0xFF, 0):  # all bits set is a NaN in every float type
            with poisoned(value, (2 * 3 * q_len * v_dim, 4 * 3 * q_len)) as places:
                result = attention(q, k, v, return_lse=True, **options)
            assert {x.data.ptr for x in result} == places
            found.append(bits(result))
        assert found[0] == found[1]
        assert not any(np.isnan(x).any() for x in to_host(*result))


@pytest.mark.parametrize("v_dim", [1, 8, 33, 64, 130])
@pytest.mark.parametrize("q_len", [1, 65, 129])
def test_nothing_around_a_result_is_written(q_len, v_dim):
    width = -(-v_dim // 8) * 8  # rows of whole 16 bytes, of which v_dim may leave the last unused
    q, k, v = uniform((3, q_len, 40), 1), uniform((3, 50, 40), 2), uniform((3, 50, width), 3)
    v = v[..., :v_dim]
    for left, right in ((8, 8), (3, 2)):
        shape = (5, q_len + 2, width + left + right)
        memory = cp.full(shape, 0xFFFF, np.uint16)
        inside = (slice(1, -1), slice(1, -1), slice(left, left + v_dim))
        attention(q, k, v, out=memory.view(HALF)[inside])
        got = memory.get()
        assert not np.isnan(got.view(HALF)[inside]).any()
        got[inside] = 0xFFFF
        assert (got == 0xFFFF).all()


# Mistakes


def right_call():
    return {
        "q": uniform((2, 9, 16), 1),
        "k": uniform((2, 11, 16), 2),
        "v": uniform((2, 11, 8), 3),
        "bias": uniform((9, 11), 4),
        "mask": uniform((9, 11), 5) > -1,
        "scale": 1.0,
        "is_causal": True,
        "causal_align": "bottom_right",
        "window": (1, 2),
        "softcap": 0.0,
        "precision": None,
        "return_lse": True,
    }


MISTAKES = {
    "scale a bool": lambda c: {"scale": True},
    "scale a str": lambda c: {"scale": "1.0"},
    "scale NaN": lambda c: {"scale": float("nan")},
    "scale an array": lambda c: {"scale": cp.ones(1)},
    "window of floats": lambda c: {"window": (1.0, 2)},
    "window negative": lambda c: {"window": (1, -2)},
    "window of three": lambda c: {"window": (1, 2, 3)},
    "window an int": lambda c: {"window": 1},
    "is_causal 2": lambda c: {"is_causal": 2},
    "is_causal 1.0": lambda c: {"is_causal": 1.0},
    "is_causal None": lambda c: {"is_causal": None},
    "causal_align missing": lambda c: {"causal_align": None},
    "causal_align a list": lambda c: {"causal_align": ["bottom_right"]},
    "softcap False": lambda c: {"softcap": False},
    "softcap negative": lambda c: {"softcap": -1.0},
    "precision": lambda c: {"precision": "fp8"},
    "return_lse 2": lambda c: {"return_lse": 2},
    "return_lse a str": lambda c: {"return_lse": "yes"},
    "bias too long": lambda c: {"bias": uniform((9, 12), 4)},
    "bias of a batch too many": lambda c: {"bias": uniform((3, 9, 11), 4)},
    "bias of ints": lambda c: {"bias": cp.zeros((9, 11), np.int32)},
    "bias on the CPU": lambda c: {"bias": c["bias"].get()},
    "mask of bytes": lambda c: {"mask": c["mask"].view(np.uint8)},
    "mask of floats": lambda c: {"mask": c["mask"].astype(HALF)},
    "mask turned": lambda c: {"mask": c["mask"].T},
    "mask on the CPU": lambda c: {"mask": c["mask"].get()},
    "mask of other lengths": lambda c: {"mask": BitMask.from_dense(np.ones((9, 12), bool))},
    "mask of a batch too many": lambda c: {"mask": BitMask.from_dense(np.ones((3, 9, 11), bool))},
    "q of one axis": lambda c: {"q": c["q"][0, 0]},
    "k on the CPU": lambda c: {"k": c["k"].get()},
    "k of float32": lambda c: {"k": c["k"].astype(np.float32)},
    "k of another head_dim": lambda c: {"k": c["k"][..., :8]},
    "k of another batch": lambda c: {"k": uniform((3, 11, 16), 2)},
    "k None": lambda c: {"k": None},
    "k a list": lambda c: {"k": c["k"].tolist()},
    "v shorter": lambda c: {"v": c["v"][:, :10]},
    "q, k and v of ints": lambda c: {x: c[x].view(np.int16) for x in "qkv"},
    "out overlaps q": lambda c: {"out": c["q"][..., :8]},
    "out of another shape": lambda c: {"out": cp.empty((2, 9, 9), HALF)},
    "out of another dtype": lambda c: {"out": cp.empty((2, 9, 8), np.float32)},
    "out on the CPU": lambda c: {"out": np.empty((2, 9, 8), HALF)},
}


@pytest.mark.parametrize("repeated", [False, True], ids=["first", "after a right call"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_and_costs_nothing(fresh_plans, mistake, repeated):
    call = right_call()
    want = bits(attention(**call))
    if repeated:
        assert bits(attention(**call)) == want
        assert plan_cache.plans
    else:
        fresh_plans()
    wrong = call | MISTAKES[mistake](call)
    counter, known = Counter(), len(plan_cache.plans)
    with cp.cuda.using_allocator(counter), pytest.raises((TypeError, ValueError)) as raised:
        attention(**wrong)
    assert str(raised.value).startswith("attention: ")
    assert counter.sizes == []
    assert len(plan_cache.plans) == known
    cp.cuda.Device().synchronize()
    assert bits(attention(**call)) == want


@pytest.mark.parametrize(
    "change",
    [{"scale": 1}, {"is_causal": 1}, {"window": [1, 2]}, {"return_lse": np.True_}, {"softcap": 0}],
    ids=str,
)
def test_the_same_call_in_other_words_gives_the_same_bits(fresh_plans, change):
    call = right_call()
    want = bits(attention(**call))
    assert bits(attention(**call | change)) == want
    assert len(plans.of()) == 1


def test_options_and_contents_are_told_apart_by_the_plans(fresh_plans):
    call = right_call()
    changes = [{}, {"scale": 0.5}, {"is_causal": False}, {"causal_align": "top_left"}]
    changes += [{"window": (0, 2)}, {"window": None}, {"softcap": 2.0}, {"bias": None}]
    changes += [{"mask": None}, {"bias": uniform((11,), 9)}, {"mask": ~call["mask"]}]
    changes += [{"bias": call["bias"].astype(np.float32) * 3}, {"q": call["q"][:, ::-1]}]
    for _ in range(2):  # without and with plans
        for change in changes:
            arguments = call | change
            out, lse = attention(**arguments)
            arrays = [arguments.pop(name) for name in ("q", "k", "v", "bias", "mask")]
            arguments.pop("return_lse")
            check(arrays, out, lse, **arguments)


def test_arrays_at_odd_addresses_do_no_harm():
    # In a process of its own: a misaligned read would leave no context for the other tests.
    script = """
        import cupy, numpy as np
        from fa_cupy import attention

        def odd(x):
            memory = cupy.empty(x.nbytes + 1, np.uint8)
            memory[1:] = x.reshape(-1).view(np.uint8)
            return memory[1:].view(x.dtype).reshape(x.shape)

        rng = np.random.default_rng(0)
        q, k, v = (cupy.asarray(rng.standard_normal((2, 50, 16)).astype(np.float16)) for _ in "qkv")
        bias = cupy.asarray(rng.standard_normal((50, 50)))
        want = attention(q, k, v, bias).get()
        for arrays in ((odd(q), k, v, bias), (q, odd(k), v, bias), (q, k, v, odd(bias))):
            for _ in range(2):
                try:
                    got = attention(*arrays).get()
                except (TypeError, ValueError) as error:
                    assert str(error).startswith("attention: "), error
                else:
                    assert got.tobytes() == want.tobytes()
        assert attention(q, k, v, bias).get().tobytes() == want.tobytes()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
