"""Attention over single pairs: fwd_pairs, bwd_dq_pairs, bwd_dkdv_pairs, run on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, reference
from fa_cupy.gpu.kernels.attention.pairs import bwd_dkdv_pairs, bwd_dq_pairs, fwd_pairs
from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import BANDS, any_sinks, draw
from tests.support.pair_calls import (
    DTYPES,
    case,
    check,
    check_gradients,
    check_numbers,
    check_spoiled,
    gradients,
    graph,
    with_pairs,
)
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
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 300)),
    dims=st.tuples(*[drawn(range(1, 257), *range(1, 33))] * 2),
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


@pytest.mark.parametrize("piece_pairs", [2, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("size", "sign", "number"),
    [(1e25, 1, None), (1e25, -1, None), (3e19, 1, 0), (1e18, -1, -3e38), (1e18, -1, 3e38)],
)
def test_scores_beyond_float32(dtype, piece_pairs, size, sign, number):
    q = np.full((1, 4, 32), size, DTYPES[dtype])
    k, v = (sign * q).astype(q.dtype), draw(1, 4, 32, dtype=q.dtype, seed=8)
    k[0, 0] = k[0, 0] / np.array(2, q.dtype)  # the only key with a weight, or the only one without
    seen = np.tril(np.ones((4, 4), np.bool_))
    numbers = None if number is None else np.full(seen.sum(), number, np.float32)
    given = None if number is None else np.full(seen.shape, number, np.float32)
    out, lse = calls.attention_by_pairs(
        q, k, v, None, BitMask(seen), pair_bias=numbers, piece_pairs=piece_pairs
    )
    want, want_lse = reference.attention(q, k, v, given, seen)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=2e-2, atol=1e-6)
    largest = float(np.finfo(np.float32).max)
    np.testing.assert_allclose(lse, np.clip(want_lse, -largest, largest), rtol=1e-6)


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


@pytest.mark.long
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


# ---------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize(
    "row", some(bwd_dq_pairs.VARIANTS, lambda row: row.dtype), ids=lambda row: row.name
)
def test_every_row_of_gradients(row):
    dtype, dim = row.dtype, row.dim
    assert (dtype, dim) in {(other.dtype, other.dim) for other in bwd_dkdv_pairs.VARIANTS}
    seen = graph(np.random.default_rng(dim), 70, 90)
    check_gradients(case(dtype, (2, 1), (70, 90), (dim, dim), seen), piece_pairs=9)
    check_gradients(case(dtype, (1, 1), (70, 90), (dim - 3, dim - 5), seen), piece_pairs=30)


@examples(25)
@given(
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 150), st.integers(1, 200)),
    dims=st.tuples(*[drawn(range(1, 257), *range(1, 33))] * 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    band=st.sampled_from(BANDS),
    density=st.sampled_from([0.0, 0.003, 0.03, 0.3]),
    piece_pairs=st.sampled_from([1, 7, 32, 256]),
    seed=st.integers(0, 2**32),
)
def test_gradients_of_any_call(dtype, lengths, dims, heads, band, density, piece_pairs, seed):
    rng = np.random.default_rng(seed)
    masks = graph(rng, int(rng.integers(1, 3)), *lengths, density=density)
    # Heads that share keys and values share the mask.
    chosen = rng.integers(0, len(masks), (2, heads[1])).repeat(heads[0] // heads[1], axis=1)
    bits = BitMask.from_dense(masks)[chosen]
    if heads[0] != heads[1] or rng.random() < 0.5:
        chosen[...], bits = chosen[:1, :1], BitMask.from_dense(masks)[chosen[0, 0]]
    options = dict(band)
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    if rng.random() < 0.3:
        options["scale"] = float(rng.choice([-0.2, 0.0, 1e-3]))
    if rng.random() < 0.3:
        options["bias"] = draw(heads[0], 1, lengths[1], dtype=np.float32, seed=seed)
    call = case(dtype, heads, lengths, dims, masks[chosen], dlse=rng.random() < 0.5,
                seed=seed, **options)  # fmt: skip
    if rng.random() < 0.3:
        call = call._replace(q=np.ascontiguousarray(call.q.swapaxes(1, 2)).swapaxes(1, 2))
    check_gradients(call, bits=bits, piece_pairs=piece_pairs, seed=seed % 999)


@of_kinds
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_gradients_where_numbers_are_not_finite(dtype, what):
    rng = np.random.default_rng(2)
    seen = graph(rng, 40, 50, density=0.1)
    for name in ("q", "k", "v", "dout"):
        call = case(dtype, (2, 1), (40, 50), (16, 16), seen, dlse=False)
        array = getattr(call, name)
        array[..., rng.integers(0, array.shape[-2]), rng.integers(0, 16)] = what
        check_spoiled(call, piece_pairs=11)


@of_kinds
def test_gradients_never_show_what_is_hidden(dtype):
    rng = np.random.default_rng(3)
    seen = graph(rng, 60, 80)
    call = case(dtype, (1, 1), (60, 80), (32, 32), seen)
    clean = gradients(call, piece_pairs=9)
    no_query, no_key = ~seen.any(axis=1), ~seen.any(axis=0)
    for name in ("q", "dout"):
        getattr(call, name)[..., no_query, :] = np.nan
    for name in ("k", "v"):
        getattr(call, name)[..., no_key, :] = np.inf
    spoiled = gradients(call, piece_pairs=9)
    for mine, want in zip(spoiled, clean, strict=True):
        np.testing.assert_array_equal(mine, want)
    assert (clean[0][..., no_query, :] == 0).all()
    assert (clean[1][..., no_key, :] == 0).all()


@of_kinds
@pytest.mark.parametrize("piece_pairs", [7, 256])
def test_gradients_of_rows_with_a_large_lse(dtype, piece_pairs):
    """Whose weights do not follow from it: a bias of -1e7, the same for each key."""
    seen = graph(np.random.default_rng(4), 50, 60, density=0.2)
    bias = np.where(np.arange(50) % 3 == 1, -1e7, 0.0).astype(np.float32)[:, None]
    call = case(dtype, (2, 1), (50, 60), (32, 32), seen, scale=0.5)
    call = call._replace(k=np.zeros_like(call.k), options={**call.options, "bias": bias})
    check_gradients(call, piece_pairs=piece_pairs)


def test_gradients_of_an_expression():
    seen = graph(np.random.default_rng(5), 50, 60)
    score = Score("2 * tanh(s / 2) - slopes[b] * abs(i - j)", slopes=np.array([0.1, 0.5], "f4"))
    check_gradients(case("float16", (1, 1), (50, 60), (32, 32), seen, score=score), piece_pairs=13)


@of_kinds
@pytest.mark.parametrize("batch", [(), (1, 2), (2, 1), (2, 2), (2,)], ids=str)
def test_the_gradient_of_a_number_for_each_pair(dtype, batch):
    seen = graph(np.random.default_rng(6), 60, 70)
    numbers = 2 * draw(*batch, int(seen.sum()), dtype=np.float32)
    numbers[..., ::7] = -np.inf
    call = case(dtype, (2, 1), (60, 70), (32, 48), seen)
    dbias = check_numbers(call, numbers, piece_pairs=19)
    assert (dbias[..., ::7] == 0).all()
    capped = call._replace(options={**call.options, "softcap": 2.0})
    check_numbers(capped, numbers, piece_pairs=256)


def test_a_number_for_each_pair_of_several_matrices():
    """A head counts for the pairs of its own matrix only."""
    chosen, masks = [1, 0, 1], graph(np.random.default_rng(7), 2, 40, 50)
    ends = np.cumsum([0, *masks.sum(axis=(1, 2))])
    parts = [slice(ends[i], ends[i + 1]) for i in chosen]
    numbers = 2 * draw(int(ends[-1]), dtype=np.float32)
    call = case("float16", (3, 3), (40, 50), (32, 32), masks[chosen], batch=1)
    wanted, outs, lses = np.zeros(len(numbers)), [], []
    for head, part in enumerate(parts):
        one = [x[:, head : head + 1] for x in call[:5]]
        options = {"mask": masks[chosen[head]]}
        own = gradients(type(call)(*one, options), pair_bias=numbers[part], piece_pairs=9)
        wanted[part] += own[-1]
        bias = with_pairs(numbers[part], options["mask"])
        out, lse = reference.attention(*one[:3], bias, options["mask"])
        outs.append(out.astype(np.float16))
        lses.append(lse)
    found = calls.gradients_by_pairs(
        call.dout, *call[:3], np.concatenate(outs, 1), np.concatenate(lses, 1), call.dlse, None,
        BitMask.from_dense(masks)[np.array(chosen)], pair_bias=numbers, piece_pairs=9,
    )  # fmt: skip
    np.testing.assert_allclose(found[-1], wanted, rtol=0, atol=1e-5)


def test_gradients_do_not_depend_on_the_order_of_warps():
    seen = graph(np.random.default_rng(8), 60, 70)
    call = case("float16", (2, 1), (60, 70), (64, 64), seen)
    numbers = draw(int(seen.sum()), dtype=np.float32)
    first, second = (
        gradients(call, pair_bias=numbers, piece_pairs=9, seed=seed) for seed in (1, 2)
    )
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


GRADIENT_BUGS = {
    "bwd_dq_pairs": {
        "delta without dlse": ("query.delta -= params.dlse[index];", ";"),
        "dQ without the scale": ("scale_vector(dq, p.scale);", ""),
        "slots that are not added": ("add_slots(dq);", ""),
        "a piece that is left out": ("i < count; ++i) add_piece", "i + 1 < count; ++i) add_piece"),
        "hidden keys": ("key[u] >= query.low && key[u] <= query.high ? key[u] : -1", "key[u]"),
        "large LSEs": ("if (is_large) {", "if (false) {"),
        "numbers of one head only": ("i < params.dbias.summed_count", "i < 1"),
        "no gradient of hidden pairs": ("query.pair_ds != nullptr && exists",
                                        "query.pair_ds != nullptr && counts"),
    },
    "bwd_dkdv_pairs": {
        "one head of a group": ("i < params.group;", "i < 1;"),
        "dK without the scale": ("scale_vector(dk, p.scale);", ""),
        "slots that are not added": ("add_slots(dv);", ""),
        "a piece that is left out": ("piece + i * (2 * kDim) + kDim);", "piece + kDim);"),
        "numbers of another pair": ("params.list.places[place]", "place"),
        "weights without their factor": ("row[u].y * ex2_approx_ftz", "ex2_approx_ftz"),
        "hidden queries": ("query[u] >= key.low && query[u] <= key.high ? query[u] : -1",
                           "query[u]"),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "name"), [(kernel, name) for kernel, bugs in GRADIENT_BUGS.items() for name in bugs]
)
def test_a_bug_planted_in_gradients_is_found(kernel, name, tmp_path):
    def run(sources):
        how = {"sources": sources, "piece_pairs": 9}
        seen = graph(np.random.default_rng(9), 40, 50, density=0.2)
        numbers = draw(int(seen.sum()), dtype=np.float32)
        numbers[::5] = -np.inf
        call = case("float32", (2, 1), (40, 50), (32, 32), seen)
        check_numbers(call, numbers, **how)
        band = {"window": (9, 5), "causal_align": "top_left"}
        check_gradients(call._replace(options={**call.options, **band}), **how)
        bias = np.where(np.arange(40) % 3 == 1, -1e7, 0.0).astype(np.float32)[:, None]
        zeros = np.zeros_like(call.k)
        check_gradients(call._replace(k=zeros, options={**call.options, "bias": bias}), **how)

    run({})
    bug = plant(tmp_path, f"attention/{kernel}", GRADIENT_BUGS[kernel][name])
    with pytest.raises((AssertionError, emulator.EmulationError)):
        run({f"attention_{kernel}": bug})
