"""The kernel for Hopper: which calls it gets, and what is its own in them."""

import numpy as np
import pytest

from fa_cupy import attention
from tests.support.strategies import (
    BFLOAT16,
    DTYPES,
    Case,
    by_dtype,
    check_against_reference,
    normal,
)

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target, multiprocessors
from tests.support import plans

HALF = np.dtype(np.float16)
SM90, SM80 = "attention/fwd_sm90", "attention/fwd_sm80"
JOIN = "attention/fwd_join_splits"
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 1000)


@pytest.fixture(autouse=True)
def hopper(cupy):
    """Only where the kernel runs; every test starts without plans."""
    if current_target() != "sm_90a":
        pytest.skip("the kernel runs on sm_90a")
    plans.forget()
    yield
    plans.forget()


def kernels():
    """Sources of the kernels that the plans launched, those for other pointers included."""
    return plans.kernels()


def rng(seed=0):
    return np.random.default_rng(seed)


def draw(*shape, dtype=HALF, seed=0):
    return normal(rng(seed + sum(shape)), shape, dtype)


def poison(*sizes):
    """Fill the memory that the next allocations of these sizes get with NaN."""
    cp.cuda.Device().synchronize()
    blocks = [cp.full(size, 0xFF, np.uint8) for size in sizes if size]
    del blocks


def run_and_check(arrays, kernel=SM90, layouts=("dense",) * 5, **options):
    """Call on poisoned memory, compare with float64, and see which kernel it was."""
    case = Case(*arrays, *[None] * (5 - len(arrays)), options=options, layouts=layouts)
    native = case.native(cp)
    q, v = case.q, case.v
    rows = max(1, q.size // q.shape[-1])
    plans.forget()
    poison(2 * rows * v.shape[-1], 4 * rows)
    out, lse = attention(*native, return_lse=True, **options)
    check_against_reference(case, out.get(), lse.get())
    # Few tiles of long keys are split, and joined by a second kernel.
    assert set(kernels()) - {JOIN} == {kernel}
    return out, lse


def bits(result):
    return [x.get().tobytes() for x in result]


# Which kernel


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("layout", ["dense", "blhd", "rows"])
def test_a_plain_call_runs_the_kernel(dtype, layout):
    arrays = [draw(2, 4, 200, 64, dtype=dtype, seed=i) for i in range(3)]
    run_and_check(arrays, layouts=(layout,) * 5)


ELSEWHERE = {
    "a pointer off 16 bytes": ((2, 4, 200, 64), {}, ("offset", *["dense"] * 4)),
    "values off 16 bytes": ((2, 4, 200, 64), {}, ("dense", "dense", "offset", "dense", "dense")),
    "rows of odd bytes": ((2, 4, 200, 65), {}, ("dense",) * 5),
    "rows of 8 bytes more": ((2, 4, 200, 68), {}, ("dense",) * 5),
    "rows that go down": ((2, 4, 200, 64), {}, ("upward",) * 5),
}


@pytest.mark.parametrize("what", ELSEWHERE)
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_what_tensor_maps_cannot_walk_goes_to_the_other_kernel(what, dtype):
    shape, options, layouts = ELSEWHERE[what]
    arrays = [draw(*shape, dtype=dtype, seed=i) for i in range(3)]
    run_and_check(arrays, SM80, layouts, **options)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_a_mask_goes_to_a_row_for_masks(dim):
    arrays = [draw(2, 4, 200, dim, seed=i) for i in range(3)]
    mask = rng().random((200, 200)) < 0.7
    for case in ([*arrays, None, mask], [*arrays, draw(4, 1, 200, seed=3), mask]):
        run_and_check(case)
        assert all(step.variant.sparse for step in plans.steps())
    run_and_check([*arrays, None, mask], SM80, ("offset", *["dense"] * 4))


def test_four_axes_that_do_not_merge_go_to_the_other_kernel():
    q, k, v = (draw(2, 3, 2, 2, 70, 64, seed=i) for i in range(3))
    case = Case(q, k, v)
    native = (
        cp.asarray(q),
        *(
            cp.asarray(np.ascontiguousarray(x.transpose(3, 2, 1, 0, 4, 5))).transpose(
                3, 2, 1, 0, 4, 5
            )
            for x in (k, v)
        ),
    )
    out, lse = attention(*native, return_lse=True)
    check_against_reference(case, out.get(), lse.get())
    assert kernels() == [SM80]


def test_one_plan_serves_pointers_of_both_kinds():
    x = cp.asarray(draw(3, 2, 130, 72).reshape(-1))
    size = 2 * 130 * 64
    even, odd = (x[i : i + size].reshape(2, 130, 64) for i in (0, 1))
    for q in (even, odd, even, odd):
        case = Case(*(y.get() for y in (q, even, even)))
        out, lse = attention(q, even, even, return_lse=True)
        check_against_reference(case, out.get(), lse.get())
    assert len(plans.of()) == 1


def test_the_output_may_lie_anywhere():
    q, k, v = (draw(2, 3, 130, 64, seed=i) for i in range(3))
    native = [cp.asarray(x) for x in (q, k, v)]
    for width, begin in ((64, 0), (80, 8), (80, 3), (67, 0)):
        memory = cp.full((2, 3, 130, width), 0xFFFF, np.uint16)
        out = memory.view(HALF)[..., begin : begin + 64]
        _, lse = attention(*native, out=out, return_lse=True)
        check_against_reference(Case(q, k, v), out.get(), lse.get())
        around = memory.get()
        around[..., begin : begin + 64] = 0xFFFF
        assert (around == 0xFFFF).all()


# Heads that share keys and values


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("group", [2, 3, 4, 8])
@pytest.mark.parametrize("q_len", [1, 3, 17, 64, 129])
@pytest.mark.parametrize("layout", ["dense", "blhd"])
def test_grouped_heads(group, q_len, dtype, layout):
    q = draw(2, 2 * group, q_len, 64, dtype=dtype)
    k, v = draw(2, 2, 150, 64, dtype=dtype, seed=1), draw(2, 2, 150, 40, dtype=dtype, seed=2)
    layouts = (layout,) * 5
    run_and_check((q, k, v), layouts=layouts)
    for align in ("top_left", "bottom_right"):
        run_and_check((q, k, v), layouts=layouts, is_causal=True, causal_align=align)
    run_and_check((q, k, v), layouts=layouts, window=(20, 3), causal_align="bottom_right")
    run_and_check((q, k, v), layouts=layouts, softcap=5.0)


@pytest.mark.parametrize("heads", [2, 16, 64, 128])
def test_all_heads_share_one_key_head(heads):
    q, k, v = draw(2, heads, 5, 128), draw(2, 1, 300, 128, seed=1), draw(2, 1, 300, 128, seed=2)
    run_and_check((q, k, v))
    run_and_check((q, k, v), is_causal=True, causal_align="bottom_right")


def test_nan_in_hidden_keys_of_packed_heads():
    q, k, v = draw(2, 8, 17, 64), draw(2, 2, 40, 64, seed=1), draw(2, 2, 40, 64, seed=2)
    k[:, :, -9:], v[:, 1, -9:] = np.nan, np.inf
    for align in ("top_left", "bottom_right"):
        run_and_check((q, k, v), is_causal=True, causal_align=align)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((3, 4), (4,), (3, 1)),
        ((3, 4), (), (3, 4)),
        ((3, 1), (1, 4), (3, 4)),
        ((1, 4), (3, 1), ()),
        ((2, 3, 4), (3, 1), (2, 1, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [1, 200])
def test_batch_axes_that_broadcast(q, k, v, q_len):
    arrays = draw(*q, q_len, 64), draw(*k, 90, 64, seed=1), draw(*v, 90, 64, seed=2)
    run_and_check(arrays)
    run_and_check(arrays, is_causal=True, causal_align="bottom_right")


# Dims, lengths and bands


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 64, 72, 96, 104, 128, 136, 192, 200, 256])
def test_dims(head_dim, dtype):
    q, k = draw(2, 3, 150, head_dim, dtype=dtype), draw(2, 3, 270, head_dim, dtype=dtype, seed=1)
    for v_dim in {head_dim, 8, 64, 128, 256}:
        v = draw(2, 3, 270, v_dim, dtype=dtype, seed=2)
        run_and_check((q, k, v))
        run_and_check((q, k, v), is_causal=True, causal_align="bottom_right")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", LENGTHS)
def test_lengths_and_bands(q_len, dim):
    windows = (64, 0), (0, 63), (130, 70), (None, 5)  # one for each pair: float64 takes its time
    for i, k_len in enumerate(dict.fromkeys((q_len, 1, 64, 129, 300))):
        q, k, v = (draw(n, dim, seed=i) for i, n in enumerate((q_len, k_len, k_len)))
        run_and_check((q, k, v))
        for align in ("top_left", "bottom_right"):
            run_and_check((q, k, v), is_causal=True, causal_align=align)
            window = windows[(LENGTHS.index(q_len) + i) % 4]
            run_and_check((q, k, v), window=window, causal_align=align)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_long_calls(dim):
    q, k, v = (draw(1, 2, 2100, dim, seed=i) for i in range(3))
    run_and_check((q, k, v))
    run_and_check((q, k, v), is_causal=True)
    run_and_check((q, k, v), window=(700, 300))


@pytest.mark.parametrize(("q_len", "k_len"), [(300, 100), (200, 1), (129, 64)])
def test_rows_without_keys(q_len, k_len):
    q, k, v = (draw(2, n, 64, seed=i) for i, n in enumerate((q_len, k_len, k_len)))
    out, lse = run_and_check((q, k, v), is_causal=True, causal_align="bottom_right")
    empty = q_len - k_len
    assert not out[:, :empty].any()
    assert cp.isneginf(lse[:, :empty]).all()


# What is not finite, and scores of any size


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [64, 128])
def test_what_a_band_hides_never_shows(value, dim):
    q, k, v = (draw(2, 300, dim, seed=i) for i in range(3))
    for which in (k, v):
        which[:, 257:] = value
    run_and_check((q, k, v), is_causal=True)
    run_and_check((q, k, v), window=(100, 0))
    run_and_check((q, k, v))  # here all rows attend to them
    q[0, 7] = value
    run_and_check((q, k, v), is_causal=True)


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_scores_that_grow_or_fall_along_the_keys(dtype, direction, dim):
    q, k, v = (draw(2, n, dim, dtype=dtype, seed=i) for i, n in enumerate((200, 1500, 1500)))
    steep = np.linspace(0.01, 4, 1500)[::direction, None]
    q = (8 * q.astype(np.float32)).astype(dtype)
    k = (k.astype(np.float32) * steep).astype(dtype)
    run_and_check((q, k, v))
    run_and_check((q, k, v), is_causal=True, causal_align="bottom_right")
    # One direction for all, so that every tile raises the maximum of every row.
    k = (np.abs(k.astype(np.float32)) * direction).astype(dtype)
    q = np.abs(q.astype(np.float32)).astype(dtype)
    run_and_check((q, k, v))


@pytest.mark.parametrize("far", [0, 1400])
def test_one_key_far_above_the_others(far):
    q, k, v = (draw(2, n, 64, seed=i) for i, n in enumerate((200, 1500, 1500)))
    q, k[:, far] = np.abs(q), 30
    run_and_check((q, k, v))


def test_infinite_scores():
    q, k, v = (draw(2, 200, 64, seed=i) for i in range(3))
    q[:], k[:, 100], k[:, 150] = np.abs(q), -np.inf, np.inf
    run_and_check((q, k, v))
    run_and_check((q, k, v), is_causal=True)


# Scale, softcap, bias


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "options", [{"scale": -0.2}, {"scale": 0.0}, {"softcap": 3.0}, {"scale": 1e-35}], ids=str
)
def test_transformed_scores(dim, options):
    q, k, v = draw(2, 150, dim), draw(2, 270, dim, seed=1), draw(2, 270, dim, seed=2)
    run_and_check((q, k, v), **options)
    run_and_check((q, k, v), **options, is_causal=True, causal_align="bottom_right")


@pytest.mark.parametrize(**by_dtype(*DTYPES))
@pytest.mark.parametrize(
    "shape", [(270,), (150, 1), (150, 270), (4, 1, 270), (2, 1, 150, 270), (2, 4, 150, 270)]
)
def test_bias(shape, dtype):
    q, k, v = draw(2, 4, 150, 64), draw(2, 2, 270, 64, seed=1), draw(2, 2, 270, 64, seed=2)
    bias = draw(*shape, dtype=dtype, seed=3)
    run_and_check((q, k, v, bias))
    bias[..., ::3] = -1e30 if dtype == BFLOAT16 else -np.inf
    run_and_check((q, k, v, bias), is_causal=True, causal_align="top_left", softcap=9.0)


# The persistent grid


def many_tiles(seed):
    """Arrays of several times as many tiles as there are multiprocessors."""
    entries = multiprocessors(cp.cuda.Device().id)
    return [cp.asarray(draw(entries, 700, 64, seed=seed + i)) for i in range(3)]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (100, 50)}], ids=str)
def test_many_tiles_on_two_streams_at_once(options):
    sets = [many_tiles(0), many_tiles(10)]
    want = []
    for arrays in sets:
        out, lse = attention(*arrays, return_lse=True, **options)
        for entry in (0, 60, len(out) - 1):
            case = Case(*(x[entry].get() for x in arrays), options=options)
            check_against_reference(case, out[entry].get(), lse[entry].get())
        want.append(bits((out, lse)))
    assert set(kernels()) == {SM90}
    assert any(one.workspace_bytes for one in plans.of())
    streams = [cp.cuda.Stream(non_blocking=True) for _ in sets]
    got = [[] for _ in sets]
    cp.cuda.Device().synchronize()
    for _ in range(20):
        for stream, arrays, results in zip(streams, sets, got, strict=True):
            with stream:
                results.append(attention(*arrays, return_lse=True, **options))
    cp.cuda.Device().synchronize()
    for results, one in zip(got, want, strict=True):
        assert all(bits(result) == one for result in results)


@pytest.mark.parametrize("left", [0x00, 0xFF, 0x01])
def test_a_counter_takes_memory_as_it_comes(left):
    arrays = many_tiles(0)
    want = bits(attention(*arrays, return_lse=True))
    out = cp.empty(arrays[0].shape, HALF)
    for _ in range(3):
        cp.cuda.Device().synchronize()
        poisoned = cp.full(16, left, np.uint8)
        del poisoned  # the counter gets this memory
        attention(*arrays, out=out)
        assert out.get().tobytes() == want[0]


@pytest.mark.parametrize("with_out", [False, True])
def test_a_graph_repeats_the_same_bits(with_out):
    arrays = many_tiles(0)
    want = bits(attention(*arrays, is_causal=True, return_lse=True))
    out = cp.empty_like(arrays[0]) if with_out else None
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        attention(*arrays, out=out, is_causal=True, return_lse=True)  # leaves memory to take
        stream.synchronize()
        stream.begin_capture()
        result = attention(*arrays, out=out, is_causal=True, return_lse=True)
        graph = stream.end_capture()
        # None of these gets memory that the graph writes to.
        others = [cp.full(16, 0x55, np.uint8) for _ in range(64)]
    for _ in range(3):
        for x in result:
            x.fill(np.nan)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(result) == want
    assert all((x == 0x55).all() for x in others)
