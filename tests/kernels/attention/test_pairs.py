"""Attention over single pairs, fwd_pairs, its own source run on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score
from fa_cupy.gpu.kernels.attention.pairs import fwd_pairs
from tests.support.every_run import examples, only, some
from tests.support.kernel_attention import BANDS, any_sinks, draw
from tests.support.pair_calls import DTYPES, check, graph
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

of_kinds = pytest.mark.parametrize("dtype", only(list(DTYPES), "bfloat16"))


def arrays_of(dtype, lengths, dims, heads=(1, 1), batch=2, seed=0, scale=1.0):
    """Random q, k and v."""
    (q_len, k_len), (dim, v_dim), (q_heads, k_heads) = lengths, dims, heads
    shapes = (q_heads, q_len, dim), (k_heads, k_len, dim), (k_heads, k_len, v_dim)
    return [
        draw(batch, *shape, dtype=DTYPES[dtype], seed=3 * seed + i, scale=scale)
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    "row", some(fwd_pairs.VARIANTS, lambda row: row.dtype), ids=lambda row: row.name
)
def test_every_row(row):
    rng = np.random.default_rng(row.dim)
    q, k, v = arrays_of(row.dtype, (70, 90), (row.dim, row.dim))
    check(q, k, v, graph(rng, 70, 90), piece_pairs=9)
    dims = slice(row.dim - 3), slice(row.dim - 5)  # not aligned
    check(q[..., dims[0]], k[..., dims[0]], v[..., dims[1]], graph(rng, 70, 90), piece_pairs=20)


@examples(25)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 300)),
    dims=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    band=st.sampled_from(BANDS),
    density=st.sampled_from([0.0, 0.003, 0.03, 0.3]),
    piece_pairs=st.sampled_from([1, 7, 32, 256]),
    seed=st.integers(0, 2**32),
)
def test_any_call(dtype, lengths, dims, heads, band, density, piece_pairs, seed):
    rng = np.random.default_rng(seed)
    q, k, v = arrays_of(dtype, lengths, dims, heads, seed=seed)
    if rng.random() < 0.3:  # of other strides, one of them 0
        q = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
        k = np.broadcast_to(k[:1], k.shape)
    masks = graph(rng, int(rng.integers(1, 3)), *lengths, density=density)
    chosen = rng.integers(0, len(masks), (2, heads[0]))
    bits = BitMask.from_dense(masks)[chosen]
    options = dict(band)
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    if rng.random() < 0.3:
        options["scale"] = float(rng.choice([-0.2, 0.0, 1e-3]))
    if rng.random() < 0.3:
        options["bias"] = draw(heads[0], 1, lengths[1], dtype=np.float32, seed=seed)
    if rng.random() < 0.3:
        options["sinks"] = any_sinks(rng, 2, heads[0], lengths[0])
    check(q, k, v, masks[chosen], bits=bits, piece_pairs=piece_pairs, seed=seed % 999, **options)


@of_kinds
@pytest.mark.parametrize("piece_pairs", [4, 256])
def test_hidden_keys_never_show_and_rows_without_keys_are_zero(dtype, piece_pairs):
    rng = np.random.default_rng(1)
    q, k, v = arrays_of(dtype, (60, 80), (64, 32))
    seen = graph(rng, 60, 80)
    hidden = ~seen.any(axis=0)
    assert hidden.any()
    assert not seen.all(axis=-1).any()
    clean = calls.attention_by_pairs(q, k, v, None, BitMask.from_dense(seen))
    k[..., hidden, :], v[..., hidden, :] = np.nan, np.inf
    q[..., ~seen.any(axis=1), :] = np.nan
    out, lse = check(q, k, v, seen, piece_pairs=piece_pairs)
    assert (out[..., ~seen.any(axis=1), :] == 0).all()
    if piece_pairs == 256:
        np.testing.assert_array_equal(out, clean[0])
        np.testing.assert_array_equal(lse, clean[1])


@of_kinds
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_and_seen(dtype, what):
    """In a query, a key, a value or the bias: at the places where the definition has it."""
    rng = np.random.default_rng(2)
    for name in "qkvb":
        arrays = dict(zip("qkv", arrays_of(dtype, (40, 50), (16, 16)), strict=True))
        arrays["b"] = draw(1, 40, 50, dtype=np.float32)
        array = arrays[name]
        array[..., rng.integers(0, array.shape[-2]), rng.integers(0, array.shape[-1])] = what
        q, k, v, bias = arrays.values()
        check(q, k, v, graph(rng, 40, 50, density=0.2), bias, piece_pairs=11)


@of_kinds
def test_large_scores_and_values(dtype):
    """Scores that float32 holds no unit of, and sums that overflow before they are divided."""
    rng = np.random.default_rng(3)
    q, k, v = arrays_of(dtype, (50, 60), (32, 32), scale=100.0)
    k[..., 9, :] = k[..., 8, :]  # whose scores are equal
    seen = graph(rng, 50, 60, density=0.3)
    seen[:, 8:10] = True
    for piece_pairs in (7, 256):
        check(q, k, v, seen, scale=30.0, piece_pairs=piece_pairs)
        check(q, k, v, seen, sinks=np.full((1, 1), 2e5, np.float32), piece_pairs=piece_pairs)
    v = np.full_like(v, 3e38 if dtype == "float32" else 6e4)
    check(q, k, v, seen, scale=1e-3, piece_pairs=7)


def test_an_expression():
    q, k, v = arrays_of("float16", (50, 60), (32, 32))
    slopes = np.array([0.1, 0.5], np.float32)
    score = Score("s * cos(i) - slopes[b] * abs(i - j)", slopes=slopes)
    check(q, k, v, graph(np.random.default_rng(4), 50, 60), score=score, piece_pairs=13)


@of_kinds
@pytest.mark.parametrize("batch", [(), (1, 2), (2, 1), (2, 2)])
def test_a_number_for_each_pair(dtype, batch):
    """It is added to scores, and may differ from head to head; -inf hides a pair."""
    rng = np.random.default_rng(5)
    q, k, v = arrays_of(dtype, (60, 70), (32, 48), heads=(2, 1))
    seen = graph(rng, 60, 70)
    numbers = 2 * draw(*batch, int(seen.sum()), dtype=np.float32)
    numbers[..., ::7] = -np.inf
    for options in ({}, {"softcap": 2.0}, {"bias": draw(60, 70, dtype=DTYPES["float16"])}):
        check(q, k, v, seen, pair_bias=numbers, piece_pairs=19, **options)


def test_results_do_not_depend_on_the_order_of_warps():
    q, k, v = arrays_of("float16", (60, 70), (64, 64))
    bits = BitMask.from_dense(graph(np.random.default_rng(6), 60, 70))
    first, second = (
        calls.attention_by_pairs(q, k, v, None, bits, piece_pairs=9, seed=seed) for seed in (1, 2)
    )
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


BUGS = {
    "a piece that is left out": ("piece < count;", "piece + 1 < count;"),
    "pieces that overlap": ("<int64>(number) * list.piece_pairs", "<int64>(number) * 8"),
    "a piece that goes on": ("work.end = last < work.row_end ? last : work.row_end;", ""),
    "slots that are not added": ("row_sum = sum_over_slots(row_sum);", ""),
    "a maximum of one slot": (
        "most = larger(most, __shfl_xor_sync(kFullWarp, most, step));", "",
    ),
    "a band that hides nothing": (
        "key[u] >= row.low && key[u] <= row.high ? key[u] : -1", "key[u]",
    ),
    "values of hidden pairs": ("if (score[u] == -FA_INFINITY) {", "if (own[u] < 0) {"),
    "an LSE in units of log2": (
        "found.lse = kLn2 * (sums.row_max", "found.lse = (sums.row_max",
    ),
    "numbers of another pair": ("row.pair_bias[place], kLog2e", "row.pair_bias[place ^ 1], kLog2e"),
    "large scores in float32": ("(is_large(sums.row_max) && sums.row_sum != 0.0f) ||", ""),
    "keys past the end of a row": ("place < end ? params.list.columns[place] : -1",
                                   "params.list.columns[place]"),
    "elements past the end": ("if (aligned && count >= kVector) {\n        found.part[part] = "
                              "*reinterpret_cast<const uint4*>(from);\n        continue;\n      }\n"
                              "#pragma unroll\n      for (int i = 0; i < 4; ++i)",
                              "for (int i = 0; i < 3; ++i)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, tmp_path):
    def run(source):
        rng = np.random.default_rng(8)
        q, k, v = arrays_of("float32", (40, 50), (32, 32))
        seen = graph(rng, 40, 50, density=0.2)
        numbers = 2 * draw(int(seen.sum()), dtype=np.float32)
        numbers[::5] = -np.inf
        bias = np.where(np.arange(50) % 9 == 3, -np.inf, 0.0).astype(np.float32)[None]
        check(q, k, v, seen, pair_bias=numbers, piece_pairs=9, source=source)
        spoiled = np.where(np.arange(50)[:, None] % 9 == 3, np.float32(np.inf), v)
        check(q, k, spoiled, seen, bias, source=source, **BANDS[2] | {"window": (9, 5)})
        q[..., 0, :], k[..., 1, :] = 4096.0, 4096.0
        k[..., 2, :] = np.float32(4096.0 - 2.0**-12)
        seen[:, 1:3], seen[0, 1:3] = False, True
        check(q, k, v, seen, source=source)

    run(None)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        run(plant(tmp_path, "attention/fwd_pairs", BUGS[name]))
