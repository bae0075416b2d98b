"""Attention under masks on a GPU: lists that are sent once, arrays that are packed by the call."""

import threading

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fa_cupy import BitMask, attention, reference
from tests.support.strategies import (
    BFLOAT16,
    DTYPES,
    Case,
    by_dtype,
    cases,
    check_against_reference,
    normal,
)

pytest.importorskip("cupy")
import cupy as cp

from tests.support import plans

pytestmark = pytest.mark.usefixtures("fresh_kernels")
HALF = np.dtype(np.float16)
BANDS = [
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"window": (150, 20), "causal_align": "top_left"},
    {"window": (None, 0), "causal_align": "bottom_right", "softcap": 4.0},
]


def rng(seed=0):
    return np.random.default_rng(seed)


def draw(*shape, dtype=HALF, seed=0):
    return normal(rng(seed + sum(shape)), shape, dtype)


def blocks(*shape, seed=0, share=0.5):
    """A dense mask of empty, full and partial blocks of 128 x 128."""
    *batch, q_len, k_len = shape
    tiles = [-(-n // 128) for n in (q_len, k_len)]
    states = rng(seed).choice(3, (*batch, *tiles), p=[1 - share, share / 2, share / 2])
    states = states.repeat(128, -2).repeat(128, -1)[..., :q_len, :k_len]
    return (states == 1) | (states == 2) & (rng(seed + 1).random(shape) < 0.5)


def rows_are_for_masks():
    return {step.variant.sparse for step in plans.steps()} == {True}


def run(case, mask):
    """Solve on memory that was NaN, twice, and look at what came out."""
    q, k, v, bias, _ = case.native(cp)
    shape = reference.attention(*case.arrays, **case.options)[0].shape
    results = []
    for _ in range(2):
        cp.cuda.Device().synchronize()
        sizes = 2 * int(np.prod(shape)), 4 * int(np.prod(shape[:-1]))
        poison = [cp.full(size, 0xFF, np.uint8) for size in sizes if size]
        del poison
        out = cp.empty(shape, q.dtype) if case.with_out else None
        results.append(attention(q, k, v, bias, mask, out=out, return_lse=True, **case.options))
    first, again = ([x.get() for x in result] for result in results)
    check_against_reference(case, *first)
    assert bits(first) == bits(again)
    return first


def bits(result):
    return [(x.get() if hasattr(x, "get") else x).tobytes() for x in result]


def both(case):
    """The same by a mask of lists and by an array.

    They have the same bits, unless the pairs of the lists are computed one by one. An array of one
    row for all queries is visible to rows behind the last query, too. Warps decide for their rows
    together how to round, so that only an array with a row for each query has those bits.
    """
    lengths = case.q.shape[-2], case.k.shape[-2]
    whole = np.broadcast_to(case.mask, (*case.mask.shape[:-2], *lengths))
    plans.forget()
    mine = run(case, BitMask.from_dense(whole))
    by_pairs = any(source.endswith("_pairs") for source in plans.kernels())
    theirs = run(case, case.native(cp)[4])
    if case.mask.shape[-2:] != lengths:
        theirs = run(case, cp.asarray(np.ascontiguousarray(whole)))
    if not by_pairs:
        for x, y in zip(mine, theirs, strict=True):  # in float32: NaN of bfloat16 equals nothing
            np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))
    return mine


# Against the reference


@settings(max_examples=400)
@given(case=cases(dtypes=(HALF, BFLOAT16)), seed=st.integers(0, 2**32 - 1))
def test_any_call_agrees_with_the_reference(case, seed):
    if case.mask is None:
        case.mask = rng(seed).random((case.q.shape[-2], case.k.shape[-2])) < 0.5
    note(f"{[a if a is None else a.shape for a in case.arrays]} {case.options} {case.layouts}")
    both(case)


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("dim", [8, 32, 33, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("options", BANDS, ids=str)
def test_blocks_of_every_state_in_every_dim(dtype, dim, options):
    q, k, v = (draw(2, n, dim, dtype=dtype, seed=i) for i, n in enumerate((300, 700, 700)))
    both(Case(q, k, v, None, blocks(300, 700, seed=dim), options))
    assert rows_are_for_masks()


@pytest.mark.parametrize("q_len", [1, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("k_len", [1, 64, 127, 128, 129, 383, 641])
def test_odd_lengths(q_len, k_len):
    for dim in (64, 256):
        q, k, v = (draw(3, n, dim, seed=i) for i, n in enumerate((q_len, k_len, k_len)))
        both(Case(q, k, v, None, blocks(3, q_len, k_len, share=0.8)))


@pytest.mark.parametrize("batch", [(), (4,), (1, 4), (2, 1), (2, 4)])
@pytest.mark.parametrize("options", BANDS, ids=str)
def test_masks_broadcast_over_grouped_heads(batch, options):
    q, k, v = draw(2, 4, 200, 64), draw(2, 2, 300, 64, seed=1), draw(2, 1, 300, 64, seed=2)
    both(Case(q, k, v, None, blocks(*batch, 200, 300), options))
    both(Case(q, k, v, draw(4, 1, 300, seed=3), blocks(*batch, 200, 300), options))


def test_entries_are_picked_in_any_order():
    q, k, v = (draw(3, n, 64, seed=i) for i, n in enumerate((200, 300, 300)))
    dense = blocks(5, 200, 300)
    mask = BitMask.from_dense(dense)
    for index in (slice(None, None, 2), [4, 4, 1], slice(2, None, -1)):
        run(Case(q, k, v, None, dense[index]), mask[index])
    assert len(mask[[0, 1]].entries) == 2


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 1.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sparse_and_full_masks(density, dim):
    q, k, v = (draw(2, n, dim, seed=i) for i, n in enumerate((400, 1500, 1500)))
    mask = rng().random((400, 1500)) < density
    mask[130:140] = False
    both(Case(q, k, v, None, mask))
    both(Case(q, k, v, None, mask, {"is_causal": True, "causal_align": "bottom_right"}))


def test_rows_that_see_nothing_are_zero():
    q, k, v = (draw(2, n, 128, seed=i) for i, n in enumerate((400, 500, 500)))
    dense = np.zeros((400, 500), bool)
    dense[130:250, 300:450] = True
    out, lse = both(Case(q, k, v, None, dense))
    hidden = ~dense.any(axis=1)
    assert (out[:, hidden] == 0).all()
    assert np.isneginf(lse[:, hidden]).all()


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("dim", [40, 64, 128, 256])
def test_hidden_keys_never_show(dtype, dim):
    q, k, v = (draw(2, n, dim, dtype=dtype, seed=i) for i, n in enumerate((300, 600, 600)))
    dense = blocks(300, 600, share=0.7)
    dense[:, [5, 140, 599]] = False
    dense[7] = dense[200] = False
    k[:, 5], v[:, 140], k[:, 599], v[:, 599] = np.nan, np.nan, np.inf, -np.inf
    out, _ = both(Case(q, k, v, None, dense))
    assert np.isfinite(out.astype(np.float32)).all()
    v[:, 300] = np.inf  # shown to some
    both(Case(q, k, v, None, dense))


@pytest.mark.parametrize("direction", [1, -1])
def test_scores_that_grow_or_fall_along_the_keys(direction):
    q, k, v = (draw(2, n, 128, seed=i) for i, n in enumerate((300, 1500, 1500)))
    steep = np.linspace(0.01, 4, 1500)[::direction, None]
    q, k = (8 * np.abs(q)).astype(HALF), (np.abs(k) * steep).astype(HALF)
    for share in (0.2, 1.0):
        both(Case(q, k, v, None, blocks(300, 1500, share=share)))


@pytest.mark.parametrize("layout", ["dense", "blhd", "rows", "reversed", "offset", "transposed"])
def test_layouts_of_queries_keys_and_outputs(layout):
    q, k, v = (draw(2, 3, n, 64, seed=i) for i, n in enumerate((200, 300, 300)))
    for with_out in (False, True):
        case = Case(q, k, v, None, blocks(200, 300), layouts=(layout,) * 5, with_out=with_out)
        both(case)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x[::2].swapaxes(-1, -2)[:300, :300].swapaxes(-1, -2),
        lambda x: x[:, ::-1],
        lambda x: x[::-1, 1:],
        lambda x: x[:1],
        lambda x: x[:, :1],
        lambda x: x[0],
        lambda x: cp.broadcast_to(x[:300, :300], (2, 300, 300)),
        lambda x: x[:300, :300].T,
        lambda x: x.view(np.uint8).astype(np.uint8).view(np.bool_),
    ],
    ids=range(10),
)
def test_arrays_of_bool_lie_as_they_like(view):
    mask = view(cp.asarray(blocks(601, 602, share=0.8)))
    q_len, k_len = (n if n > 1 else 300 for n in (1, *mask.shape)[-2:])
    q, k, v = (draw(2, n, 64, seed=i) for i, n in enumerate((q_len, k_len, k_len)))
    run(Case(q, k, v, None, mask.get()), mask)


@pytest.mark.parametrize(**by_dtype(*DTYPES[2:]))
@pytest.mark.parametrize("options", BANDS, ids=str)
def test_float32_and_float64(dtype, options):
    q, k, v = (draw(3, n, 40, dtype=dtype, seed=i) for i, n in enumerate((900, 1300, 1300)))
    for shape in ((900, 1300), (3, 900, 1300)):
        case = Case(q, k, v, None, blocks(*shape, share=0.4), options)
        run(case, BitMask.from_dense(case.mask))
    v[:, 7] = np.nan
    case.mask[:, :, 7] = False
    run(case, BitMask.from_dense(case.mask))


def test_wide_heads():
    q, k, v = (draw(2, n, 300, seed=i) for i, n in enumerate((200, 300, 300)))
    case = Case(q, k, v, None, blocks(200, 300))
    run(case, BitMask.from_dense(case.mask))


def test_a_few_blocks_of_a_long_sequence():
    """A dense mask of it would be 17 GB."""
    length, dim, block = 131_072, 64, 128
    tiles = length // block
    states = np.zeros((tiles, tiles), np.int8)
    picked = rng().integers(0, tiles, (tiles, 6))
    states[np.arange(tiles)[:, None], picked] = 2
    states[5] = states[700] = 0
    words = rng(1).integers(0, 2**32, (tiles, 8, 32, 2), np.uint32)
    np.fill_diagonal(states, 1)
    mask = BitMask.from_blocks(states, length, length, words)
    q, k, v = (draw(2, length, dim, seed=i) for i in range(3))
    out, lse = attention(*map(cp.asarray, (q, k, v)), mask=mask, return_lse=True)
    for tile in (0, 5, 6, 511, 700, 1023):
        rows = slice(block * tile, block * tile + block)
        seen = np.flatnonzero(states[tile])
        keys = (seen[:, None] * block + np.arange(block)).reshape(-1)
        own = BitMask.from_blocks(
            states[None, tile, seen], block, len(keys), words[tile : tile + 1]
        )
        case = Case(q[:, rows], k[:, keys], v[:, keys], None, own.to_dense())
        check_against_reference(case, out[:, rows].get(), lse[:, rows].get())


# What a mask keeps


def sent(seed=0, heads=4):
    """Arrays of a call, on the device."""
    shapes = (2, heads, 500, 64), (2, 2, 513, 64), (2, 2, 513, 48)
    return [cp.asarray(draw(*shape, seed=seed)) for shape in shapes]


def test_calls_after_the_first_need_no_memory_but_their_results():
    arrays = sent()
    mask = BitMask.from_dense(blocks(500, 513))
    attention(*arrays, mask=mask, return_lse=True)
    sizes = []

    def allocate(size):
        sizes.append(size)
        return cp.get_default_memory_pool().malloc(size)

    with cp.cuda.using_allocator(allocate):
        attention(*arrays, mask=mask, return_lse=True)
        assert len(sizes) == 2
        attention(*arrays, mask=mask[None][[0, 0], None], return_lse=True)  # others' lists are kept
        assert all(size <= 2 * arrays[0].nbytes for size in sizes)


def test_masks_of_one_shape_share_a_plan():
    arrays = sent()
    found = set()
    for seed in range(4):
        dense = blocks(500, 513, seed=seed)
        out, lse = attention(*arrays, mask=BitMask.from_dense(dense), return_lse=True)
        case = Case(*(x.get() for x in arrays), None, dense)
        check_against_reference(case, out.get(), lse.get())
        found.add(out.get().tobytes())
    assert len(found) == 4
    assert len(plans.of()) == 1
    # An array that broadcasts as the mask does is no mask.
    dense = np.ones((1, 1), bool)
    out, lse = attention(*arrays, mask=cp.asarray(dense), return_lse=True)
    check_against_reference(Case(*case.arrays[:3], None, dense), out.get(), lse.get())


def test_one_mask_serves_calls_of_several_kinds():
    dense = blocks(500, 513)
    mask = BitMask.from_dense(dense)
    for heads, options in ((2, {}), (4, BANDS[1]), (2, BANDS[2]), (4, {}), (2, {})):
        arrays = sent(heads=heads)
        out, lse = attention(*arrays, mask=mask, return_lse=True, **options)
        case = Case(*(x.get() for x in arrays), None, dense, options)
        check_against_reference(case, out.get(), lse.get())
        on_cpu = attention(*case.arrays[:3], mask=mask, **options)
        np.testing.assert_allclose(on_cpu, out.get(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("heads", [(), (4,), (2, 1)])
def test_a_mask_made_on_the_device_serves_both(heads):
    dense = blocks(*heads, 500, 513)
    mask = BitMask.from_dense(cp.asarray(dense))
    arrays = sent()
    for options in BANDS:
        mine, theirs = (
            attention(*arrays, mask=x, return_lse=True, **options)
            for x in (mask, BitMask.from_dense(dense))
        )
        assert bits(mine) == bits(theirs)
        on_cpu = attention(*(x.get() for x in arrays), mask=mask, **options)
        np.testing.assert_allclose(on_cpu, mine[0].get(), rtol=1e-2, atol=2e-3)
    wide = [x.astype(np.float32) for x in arrays]
    case = Case(*(x.get() for x in wide), None, dense)
    out, lse = attention(*wide, mask=mask, return_lse=True)
    check_against_reference(case, out.get(), lse.get())


# Streams, graphs, threads


@pytest.mark.parametrize("on_device", [False, True])
def test_two_streams_at_once_give_the_bits_of_one(on_device):
    dense = [blocks(4, 500, 513, seed=seed) for seed in range(2)]
    sets = [sent(seed) for seed in range(2)]
    want = [
        bits(attention(*arrays, mask=BitMask.from_dense(x), return_lse=True, is_causal=True,
                       causal_align="top_left"))
        for arrays, x in zip(sets, dense, strict=True)
    ]  # fmt: skip
    dense = [cp.asarray(x) for x in dense] if on_device else dense
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    cp.cuda.Device().synchronize()
    for _ in range(10):
        # What is kept with a mask is first made on any of the streams.
        masks = [BitMask.from_dense(x) for x in dense]
        cp.cuda.Device().synchronize()
        got = [[], []]
        for stream in streams * 2:
            for arrays, mask, results in zip(sets, masks, got, strict=True):
                with stream:
                    results.append(attention(*arrays, mask=mask, return_lse=True, is_causal=True,
                                             causal_align="top_left"))  # fmt: skip
        cp.cuda.Device().synchronize()
        for results, one in zip(got, want, strict=True):
            assert all(bits(result) == one for result in results)


@pytest.mark.parametrize("kind", ["lists", "lists on the device", "combined", "array"])
@pytest.mark.parametrize("first", [False, True], ids=["known", "first"])
def test_graphs(kind, first):
    arrays, others = sent(0), sent(1)
    dense = blocks(500, 513)
    array = cp.asarray(dense)
    mask = {"lists": dense, "lists on the device": array}.get(kind)
    mask = array if mask is None else BitMask.from_dense(mask)
    if kind == "combined":  # of the device, and made on the CPU
        other = blocks(500, 513, seed=5)
        mask = BitMask.from_dense(array) & BitMask.from_dense(cp.asarray(other))
        array = cp.asarray(dense & other)
    want = [bits(attention(*x, mask=array, return_lse=True)) for x in (arrays, others)]
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        # Kernels are loaded, and the stream has memory to take.
        attention(*arrays, mask=array if first else mask, return_lse=True)
        stream.synchronize()
        stream.begin_capture()
        result = attention(*arrays, mask=mask, return_lse=True)
        graph = stream.end_capture()
        # None of these gets memory that the graph writes to or reads.
        taken = [cp.full(size, 0x55, np.uint8) for size in (64, 4096, 65536, 1 << 20) * 8]
    turned = array.copy()
    turned[...] = array[::-1]
    changed = bits(attention(*arrays, mask=turned, return_lse=True))
    for source, expected in ((others, want[1]), (sent(0), want[0])):
        for x, y in zip(arrays, source, strict=True):
            x[...] = y
        for x in result:
            x.fill(np.nan)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(result) == expected
    if kind == "array":  # which the graph packs each time
        array[...] = turned
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(result) == changed
    assert all((x == 0x55).all() for x in taken)


def test_threads_share_a_mask_from_its_first_call():
    arrays = sent()
    dense = blocks(4, 500, 513)
    want = bits(attention(*arrays, mask=BitMask.from_dense(dense), return_lse=True))
    count = 8
    start, got = threading.Barrier(count), [[] for _ in range(count)]
    mask = BitMask.from_dense(dense)

    def work(i):
        start.wait()
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                got[i].append(attention(*arrays, mask=mask, return_lse=True))
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(results) == 20 for results in got)
    assert all(bits(result) == want for results in got for result in results)


@pytest.mark.parametrize("on_device", [False, True])
def test_results_repeat_with_many_rows_of_blocks(on_device):
    """More than there are multiprocessors, of all lengths."""
    q, k, v = (cp.asarray(draw(24, 1500, 64, seed=i)) for i in range(3))
    dense = blocks(24, 1500, 1500, share=0.3)
    dense[3:9, :200] = True
    dense[12] = False
    mask = BitMask.from_dense(cp.asarray(dense) if on_device else dense)
    results = [attention(q, k, v, mask=mask, return_lse=True) for _ in range(5)]
    assert all(bits(result) == bits(results[0]) for result in results)
    for entry in (0, 3, 12, 23):
        case = Case(*(x[entry].get() for x in (q, k, v)), None, dense[entry])
        check_against_reference(case, *(x[entry].get() for x in results[0]))


def test_other_libraries_arrays_take_masks():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    arrays = sent()
    dense = blocks(500, 513)
    tensors = [torch.from_dlpack(x) for x in arrays]
    want = attention(*arrays, mask=cp.asarray(dense)).get()
    for mask in (BitMask.from_dense(dense), torch.from_numpy(dense).cuda()):
        got = attention(*tensors, mask=mask)
        assert isinstance(got, torch.Tensor)
        np.testing.assert_array_equal(got.cpu().numpy(), want)


def test_no_array_of_the_scores_is_made():
    length = 32_768
    q, k, v = (cp.asarray(draw(1, length, 64, seed=i)) for i in range(3))
    mask = BitMask.from_function(
        lambda q, k: (q - k) % 7 == 0,
        (length, length),
        lambda a, b, c, d: np.where(abs(a - c) < 2000, BitMask.PARTIAL, BitMask.EMPTY),
    )
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        attention(q, k, v, mask=mask)
        attention(*(x.astype(np.float32) for x in (q, k, v)), mask=mask)
        cp.cuda.Device().synchronize()
    assert pool.total_bytes() < length * length / 2
