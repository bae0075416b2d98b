"""Gradients in float32 on pairs of float16, on the CPU.

They are ``bwd_preprocess_fp32``, ``bwd_dq_fp32`` and ``bwd_dkdv_fp32``.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, reference
from fa_cupy.gpu.kernels.attention.full_precision.gradients import (
    bwd_dkdv_fp32,
    bwd_dq_fp32,
    bwd_preprocess_fp32,
)
from fa_cupy.gpu.kernels.attention_backward import select
from fa_cupy.gpu.kernels.backward import Wanted
from tests.support import packed_sequences
from tests.support.every_run import drawn, examples, only, some
from tests.support.float32_data import DATA
from tests.support.full_precision_gradients import (
    NAMES,
    arrays_of,
    check_any,
    check_bias,
    check_mask,
    check_packed,
    definition,
    far_scores,
    long_and_short_keys,
    solve,
    with_score,
)
from tests.support.kernel_attention import BANDS, any_sinks
from tests.support.planted import plant
from validation import emulator

pytestmark = pytest.mark.emulator

SINGLE = np.dtype(np.float32)
PREPROCESS = {row.dim: row for row in bwd_preprocess_fp32.DENSE}
#: The rows of a call, by dim, queries of a tile of ``bwd_dq_fp32``, and stages.
CHAINS, SPARSE = (
    {
        f"{dq.dim}-{dq.tile_m}-{dq.stages}": (PREPROCESS[dq.dim], dq, dkdv)
        for dq, dkdv in zip(bwd_dq_fp32.VARIANTS, bwd_dkdv_fp32.VARIANTS, strict=True)
        if dq.sparse == dkdv.sparse == sparse
    }
    for sparse in (False, True)
)
# Two products of 16 rows a warp and one; one stage and two.
D32, D64, D96 = CHAINS["32-128-2"], CHAINS["64-128-1"], CHAINS["96-64-1"]
NOT_AGAIN = "if (rows == 0) return;", "return;"
# Gradients beside float64, where plain float32 is no worse: relative, in the norm of Frobenius.
LIMIT = 2e-6
TOP_LEFT = {"is_causal": True, "causal_align": "top_left"}


def errors(found, want, rows=False):
    """The relative errors of each gradient; with `rows` those of each row."""
    axis = -1 if rows else None
    result = []
    for x, y in zip(found, want, strict=True):
        scale = max(float(np.abs(y).max(initial=0)), 1e-300)  # squares leave no range
        off, whole = (x.astype(np.float64) - y) / scale, y / scale
        sizes = [np.sqrt(np.square(a).sum(axis)) for a in (off, whole)]
        ratio = np.divide(*sizes, out=np.where(sizes[0] > 0, 1.0, 0.0), where=sizes[1] > 0)
        result.append(np.nan_to_num(ratio, nan=1.0, posinf=1.0))
    return result


def check(rows, arrays, times=2.0, by_row=False, dlse=None, bias=None, seen=None, **call):
    """Hold gradients against float64: off by no more than `times` plain float32, or `LIMIT`.

    With `by_row` each row counts by itself, to four times as much: rows may differ in size.
    """
    found = solve(rows, arrays, dlse=dlse, bias=bias, seen=seen, **call)
    own = {a: x for a, x in call.items() if a not in ("seed", "sources", "truncating", "invalid")}
    given = {"dlse": dlse, "bias": bias, "seen": seen}
    want = definition(arrays, **given, **own)[:3]
    with np.errstate(all="ignore"):
        plain = definition(arrays, **given, **own, dtype=SINGLE)[:3]
    assert all(np.isfinite(x).all() for x in found)
    with np.errstate(all="ignore"):
        both = errors(found, want, by_row), errors(plain, want, by_row)
    for name, error, usual in zip(NAMES, *both, strict=True):
        limit = (4 if by_row else 1) * np.maximum(times * usual, LIMIT)
        assert (error <= limit).all(), (name, error.max(), (error / limit).max())
    return found


def sources_without(tmp_path, rows, *changes):
    """Kernels that do not compute rows again, or with other changes."""
    return {row.entry: plant(tmp_path, row.source, *(changes or [NOT_AGAIN])) for row in rows[1:]}


@pytest.mark.parametrize("which", some(CHAINS, lambda name: name[-1]))
def test_every_row(which, tmp_path):
    """Of rows that look right because they were computed again nothing would be known."""
    rows = CHAINS[which]
    sources = sources_without(tmp_path, rows)
    for seed, band in enumerate(BANDS[:3]):
        arrays = arrays_of(rows, (150, 190), less=(seed, 2 * seed), seed=seed)
        check(rows, arrays, seed=seed, sources=sources, truncating=seed == 1, **band)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("truncating", only([False, True], True))
@pytest.mark.parametrize("options", [{}, TOP_LEFT], ids=["full", "causal"])
def test_as_good_as_plain_float32(data, truncating, options):
    change, by_row = DATA[data]
    arrays = [x.astype(SINGLE) for x in change(*arrays_of(D32, (120, 150), (1, 1)))]
    check(D32, arrays, by_row=by_row, truncating=truncating, **options)


@pytest.mark.long
def test_long_sequences():
    """Where tensor cores add up a few terms at a time, cutting them shows no more than this."""
    for lengths in ((2000, 60), (60, 2000)):
        arrays = arrays_of(D32, lengths, (1, 1))
        check(D32, arrays, times=1.5, truncating=True)


def test_only_rows_that_lose_digits_are_computed_again(tmp_path):
    """They do where large numbers meet zeros or small ones, not where they are just large."""
    sources = sources_without(tmp_path, D32)
    seen = np.ones((60, 90), bool)
    dout, q, k, v = arrays_of(D32, (60, 90), (1, 1))
    k[..., :3, :] *= 1e4
    v[..., 5, :] *= 1e6
    dout[..., 7:20, :] *= 1e-20
    dout[..., 30, :], v[..., 20, :] = 0, 0  # rows of zeros, whose delta is 0
    found = solve(D32, [dout, q, k, v], sources=sources)
    assert all(np.isfinite(x).all() for x in found)
    q[..., 5, 7], k[..., 7] = 1e12, 0
    dq, _, _ = solve(D32, [dout, q, k, v], sources=sources)
    assert np.flatnonzero(np.isnan(dq).any((0, 1, 3))).tolist() == [5]
    dout, q, k, v = arrays_of(D32, (60, 90), (1, 1))
    dout[..., 9, 3], v[..., 3] = 1e12, 0
    dq, dk, dv = solve(D32, [dout, q, k, v], sources=sources)
    assert np.flatnonzero(np.isnan(dq).any((0, 1, 3))).tolist() == [9]
    assert np.isnan(dk).any(-1).all()
    assert np.isfinite(dv).all()
    masked = SPARSE["32-128-2"]
    sources = sources_without(tmp_path, masked)
    seen[:, ::7] = False
    k[..., ::7, :] = v[..., ::7, :] = 1e20  # what a mask hides may be anything
    dout[..., 9, 3] = 1
    dq, dk, dv = solve(masked, [dout, q, k, v], seen=seen, sources=sources)
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@examples(30)
@given(
    rows=drawn([D32, D64, D96], D32),
    lengths=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    less=st.tuples(st.integers(0, 20), st.integers(0, 31)),
    band=st.sampled_from(BANDS),
    scale=st.sampled_from([None, -0.3, 1e-7, 0.0, 3.0]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    dlse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call(rows, lengths, heads, less, band, scale, softcap, sinks, dlse, seed):
    rng = np.random.default_rng(seed)
    options = {**band, "scale": scale, "softcap": softcap}
    if sinks:
        options["sinks"] = any_sinks(rng, 1, heads[0], lengths[0])
    given = rng.standard_normal((1, heads[0], lengths[0])).astype(SINGLE) if dlse else None
    arrays = arrays_of(rows, lengths, heads, less, seed)
    check_any(rows, arrays, 0.0, dlse=given, seed=seed, **options)


@examples(20)
@given(
    axes=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=drawn([np.float16, np.float32], np.float16),
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    hides=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_bias(axes, dtype, lengths, band, softcap, hides, seed):
    check_bias(D32, 0.0, (8, 8), axes, dtype, lengths, band, softcap, hides, seed)


@examples(20)
@given(
    rows=drawn([*SPARSE.values()], SPARSE["32-128-2"]),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    own=st.booleans(),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    band=st.sampled_from(BANDS),
    spoiled=st.booleans(),
    far=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_mask(rows, heads, own, lengths, band, spoiled, far, seed):
    """Of each head or of all, with NaN in a key and a value, and with scores that are far."""
    size = 2.0**10 if far else 0
    check_mask(
        rows, 0.0, (8, 16), size, heads, own, lengths, band, spoiled, seed
    )  # fmt: skip


@pytest.mark.parametrize("text", ["3 * tanh(s) * x[h] + 0.01 * (i - j)", "s + x[h] * sqrt(i - j)"])
def test_a_score_expression(text):
    """The second one is NaN of many pairs that are hidden."""
    score = Score(text, x=np.array([0.5, -1.0], SINGLE))
    check(D32, arrays_of(D32, (50, 70), less=(8, 8)), score=score, **TOP_LEFT)


@examples(20)
@given(
    lengths=packed_sequences.packed_lengths(100),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_any_packed_sequences(lengths, band, softcap, seed):
    check_packed(D32, 0.0, (8, 8), lengths, band, softcap, seed)


@examples(20)
@given(
    name=st.sampled_from(["dout", "q", "k", "v"]),
    band=st.sampled_from(BANDS),
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    seed=st.integers(0, 2**32),
)
def test_numbers_that_are_not_finite(name, band, lengths, value, seed):
    """They show where they belong: not where a pair is hidden, nor in other rows."""
    rng = np.random.default_rng(seed)
    arrays = arrays_of(D32, lengths, less=(8, 16), seed=seed)
    spoiled = arrays[("dout", "q", "k", "v").index(name)]
    spoiled[tuple(rng.integers(0, spoiled.shape))] = value
    check_any(D32, arrays, 0.0, seed=seed, **band)


def test_sums_that_overflow():
    """Only where they have to: the scale is small, and terms are scaled first."""
    dout, q, k, v = arrays_of(D32, (40, 50), seed=3)
    large, small = SINGLE.type(1e19), SINGLE.type(1e-19)
    check(D32, [dout * large, q * small, k * large, v * 10], scale=1e-3)


@pytest.mark.long
@examples(20)
@given(
    size=st.sampled_from([2.0**6, 2.0**11, 2.0**30, 2.0**60]),
    band=st.sampled_from(BANDS[:3]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_scores_that_are_far(size, band, sinks, seed):
    """The best keys of a row have the same score, and others are far below: weights sum to 1."""
    rng = np.random.default_rng(seed)
    lengths = int(rng.integers(1, 80)), int(rng.integers(1, 80))
    arrays, given = far_scores(rng, D32, lengths, size, seed)
    options = {**band, "scale": 1.0}
    if sinks:
        options["sinks"] = np.array([size, -np.inf], SINGLE)[:, None]
    found = solve(D32, arrays, dlse=given, seed=seed, **options)
    for x, y in zip(found, definition(arrays, dlse=given, **options), strict=False):
        largest = float(np.abs(y).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5 * largest)


def check_single_keys(rows, size, data=1, **call):
    """Weights of 1, however small a large score is beside the terms that it is summed from."""
    arrays = arrays_of(rows, (200, 200), heads=(1, 1), seed=data)
    arrays[1] *= SINGLE.type(size)
    _, _, dv = solve(rows, arrays, window=(0, 0), **call)
    np.testing.assert_allclose(dv, arrays[0], rtol=1e-6)


@pytest.mark.parametrize("size", [1e6, 1e9])
@pytest.mark.parametrize("truncating", [False, True])
def test_the_weight_of_a_single_key_is_one(size, truncating):
    check_single_keys(D32, size, truncating=truncating)


def weights_of(rows, q, k, **call):
    """Weights of (queries, keys): gradients of v where that of the output is the unit matrix."""
    q, k = (np.pad(x, ((0, 0), (0, rows[0].dim - x.shape[1])))[None, None] for x in (q, k))
    dout, v = np.eye(q.shape[2], dtype=SINGLE), np.zeros((k.shape[2], q.shape[2]), SINGLE)
    *_, dv = solve(rows, [dout[None, None], q, k, v[None, None]], scale=1.0, **call)
    return dv[0, 0].T


def check_cancelling_products(rows, **call):
    for q, k in long_and_short_keys():
        np.testing.assert_allclose(weights_of(rows, q, k, **call).sum(), 1.0, rtol=1e-6)


def check_weights_by_hand(rows, **call):
    """Those of keys that one of the queries wants: it has a large number beside them."""
    rng = np.random.default_rng(1)
    q, key = (rng.standard_normal(n).astype(SINGLE) * 10000 for n in ((2, 24), 24))
    q[0, 1] = key[1] = 0
    key = with_score(q[0], key.astype(np.float64), 1024.0, np.argmax(np.abs(q[0]))).astype(SINGLE)
    q[1] = 0
    q[1, :2] = 1e-3, 1e20
    pairs = [(q, key)]
    for size in (1e6, 1e8):  # nothing cancels
        q, key = (np.abs(rng.standard_normal(n) * size).astype(SINGLE) for n in ((2, 24), 24))
        key[1], q[1] = 0, 0
        q[1, :2] = 1e-3, size * 1e16
        pairs.append((q, key))
    for (q, key), copies in itertools.product(pairs, (1, 2)):
        weights = weights_of(rows, q, np.repeat(key[None], copies, axis=0), **call)
        np.testing.assert_allclose(weights, 1 / copies, rtol=1e-6)


@pytest.mark.parametrize(
    "part", ["known[0] = first;", "known[step] = static_cast<float>(difference - first);"]
)
def test_a_difference_of_which_one_part_is_there(part, tmp_path):
    """A warp may read the other one before another warp writes it."""
    row = D32[2]
    sources = {row.entry: plant(tmp_path, row.source, (part, ""))}
    check_weights_by_hand(D32, sources=sources)


@pytest.mark.parametrize("check_weights", [check_cancelling_products, check_weights_by_hand])
def test_weights_of_rounded_scores(check_weights):
    check_weights(D32)


def check_more_keys(rows, size=1.0, **call):
    """As of merged results, where a call with half of the keys has half of the weights.

    Keys of this size, one that is seen with a weight of 0 and some that are not, do not count.
    """
    arrays = arrays_of(rows, (80, 90))
    arrays[2][..., 0], arrays[1][..., 0] = 1, 2.0**10  # scores are far
    arrays[1][..., 1] = 1
    arrays[2][..., 7, 1], arrays[2][..., 80:, 1] = -size, size
    call = {**TOP_LEFT, **call}
    *_, whole = solve(rows, arrays, **call)
    real = reference.attention

    def merged(*x, **options):
        out, lse = real(*x, **options)
        return out, lse + np.log(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "attention", merged)
        *_, half = solve(rows, arrays, **call)
    np.testing.assert_allclose(2 * half, whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1.0, 1e6, 1e12])
def test_a_log_sum_exp_of_more_keys_is_used_as_given(size):
    check_more_keys(D32, size)


def test_a_row_of_nothing_but_padding():
    """All keys of a query have the bias -1e30, beside which scores vanish: equal weights."""
    bias = np.zeros((50, 60), SINGLE)
    bias[::3] = -1e30
    found = solve(D32, arrays := arrays_of(D32, (50, 60), less=(8, 8)), bias=bias)
    for x, y in zip(found, definition(arrays, bias=bias), strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6 * np.abs(y).max())


@pytest.mark.parametrize("offset", [1, 3])
def test_arrays_that_are_not_aligned(offset):
    """Rows of an odd number of elements, and arrays that begin at any of them."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 50, 67), SINGLE) for _ in range(4)]
    check(D32, [x[..., offset : offset + 27] for x in arrays], **BANDS[1])


def test_rows_of_no_pair_are_zeros():
    arrays = arrays_of(D32, (90, 20))
    dq, _, _ = check(D32, arrays, window=(3, 0), causal_align="top_left")
    assert not dq[..., 60:, :].any()
    _, dk, dv = check(D32, arrays_of(D32, (20, 90)), **TOP_LEFT)
    assert not dk[..., 60:, :].any()
    assert not dv[..., 60:, :].any()


def test_the_schedule_does_not_show():
    arrays = arrays_of(D32, (140, 170))
    found = {
        tuple(x.tobytes() for x in solve(D32, arrays, seed=seed, **BANDS[1])) for seed in range(3)
    }
    assert len(found) == 1


def test_rows_and_their_choice():
    """Dims up to 128 have rows wherever shared memory is large enough; others where wgmma is."""
    for target in ("sm_80", "sm_90a", "sm_89", "sm_100", "sm_120", "compute_80"):
        for dim in (1, 32, 33, 64, 100, 128):
            end = "_sm90" if target == "sm_90a" and dim > 32 else ""
            for masked in (False, True):
                found = select(Wanted("float32", dim, masked, mapped=False), target)
                assert [row.kernel for row in found] == [
                    "bwd_preprocess_fp32", f"bwd_dq_fp32{end}", f"bwd_dkdv_fp32{end}",
                ]  # fmt: skip
                assert found[0].swizzled == bool(end)
                assert len({row.dim for row in found}) == 1  # pairs lie in memory with padding
                assert found[0].dim >= dim
                assert found[1].sparse == found[2].sparse == masked
        assert bool(select(Wanted("float32", 129), target)) == (target == "sm_90a")
        assert not select(Wanted("float32", 257), target)
    assert not select(Wanted("float32", 64, strided=False), "sm_90a")


# By what they show in: the kernel, what is changed, and into what.
BUGS = {
    "a tile is read before it is there": (
        "dkdv", "__syncthreads();  // this tile is there, and all warps", "// all warps",
    ),
    "a low part of a weight is left out": (
        "dkdv", "a_low[r] = p[m][2 * step + r / 2][r % 2].low;", "a_low[r] = 0;",
    ),
    "a low part of the other side is left out": (
        "dq", "ldmatrix_x4(low, address + kLow);", "ldmatrix_x4(low, address);",
    ),
    "a low part of an own row is left out": (
        "dq", "OwnTile::at(own_address, 16 * m, step) + kOwnLow);",
        "OwnTile::at(own_address, 16 * m, step));",
    ),
    "exponents of a row are forgotten in a product": (
        "dq", "ratio = of_pair(two, e) * power_of_two(-top);", "ratio = 1.0f;",
    ),
    "rows keep their size before they are split": (
        "dq", "min(126, 14 + 127 - static_cast<int>(__float_as_uint(most) >> 23))", "0",
    ),
    "a lane is forgotten in the largest number of a row": (
        "dq", "most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2)); // At most 126,",
        "// At most 126,",
    ),
    "exponents are taken to be of one size": ("dkdv", "<= kMostSpread) {", "<= 1000) {"),
    "delta is forgotten": (
        "dq", "ds[e / 4][j][e % 4] -= of_query(own, two, e / 4, e % 4);", ";",
    ),
    "a head is left out": ("dkdv", "{at.head + 1, work.begin}", "{at.head + 2, work.begin}"),
    "queries of a head are those of the first one": (
        "dkdv", "shared.work.entry + at.head, at.tile", "shared.work.entry, at.tile",
    ),
    "dQ is not scaled": ("dq", "p.head_dim, dq, p.scale);", "p.head_dim, dq, 1.0f);"),
    "dV is scaled": ("dkdv", "p.v_dim, dv, 1.0f);", "p.v_dim, dv, p.scale);"),
    "the band is not looked at": (
        "dkdv", "at.tile >= work.full_begin && at.tile < work.full_end,", "true,",
    ),
    "lost digits of scores are not looked for": (
        "dq", "if (lost > 1.0f) {", "if (false) {",
    ),
    "lost digits of dP are not looked for": (
        "dq", "if (factor * factor > fabsf(dp[m][j][e])) dp[m][j][e] = FA_NAN;", "",
    ),
    "a far row keeps its LSE": ("dq", "if (is_far(shared.own_rows[kShift][r]))", "if (false)"),
    "low parts of own rows come first in both kernels": (
        "dq", "multiply_pairs<kOwnKeys>(", "multiply_pairs(",
    ),
    "an LSE that is rounded is taken for one of more keys": (
        "dq", "bounds.add(score + rounding, 1.0f);", "bounds.add(score, 1.0f);",
    ),
    "an LSE of more keys is not used": (
        "dq", "covers_more_keys = difference", "covers_more_keys = false && difference",
    ),
    "keys without a weight count": (
        "dq", "bounds.add(score + rounding, 1.0f);",
        "bounds.add(fmaxf(scores.most, score) + rounding, 1.0f);",
    ),
    "the bound has the sum of rounded scores": (
        "dq", "(bounds.most + logf(bounds.sum))", "(bounds.most + logf(scores.sum))",
    ),
    "a largest score is taken for a log-sum-exp": (
        "dq", "to[kExactDifference * step] = to[kExactRest * step] = FA_INFINITY;", "",
    ),
    "a difference has one part": (
        "dkdv", "return static_cast<double>(high) + low;", "return static_cast<double>(high);",
    ),
    "the gradient of the LSE is added": (
        "preprocess", "product - (params.dlse == nullptr", "product + (params.dlse == nullptr",
    ),
    "the last columns of a row are forgotten": (
        "preprocess", "x[i][e] = col < cols ? from[col] : 0.0f;",
        "x[i][e] = col < cols - 1 ? from[col] : 0.0f;",
    ),
}  # fmt: skip


def cases():
    """Calls that bugs are planted for, and whether rows count by themselves."""
    for name in ("gradients that jump", "large numbers that meet zeros",
                 "large gradients that meet zeros"):  # fmt: skip
        arrays = [x.astype(SINGLE) for x in DATA[name][0](*arrays_of(D32, (64, 90), (2, 1)))]
        yield arrays, DATA[name][1], {"dlse": None, **TOP_LEFT}
    arrays = arrays_of(D32, (140, 90), (2, 1))
    arrays[1] *= 8
    dlse = np.random.default_rng(0).standard_normal((1, 2, 140)).astype(SINGLE)
    far = [x.copy() for x in arrays]
    far[1][..., ::7, :] = 0  # equal scores
    far[1][..., ::7, 0], far[2][..., 0] = 2.0**20, 1.0
    yield arrays, False, {"dlse": dlse, **TOP_LEFT}
    yield far, False, {"dlse": dlse}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    which, old, new = BUGS[bug]
    row = D32[("preprocess", "dq", "dkdv").index(which)]
    sources = {row.entry: plant(tmp_path, row.source, (old, new))}

    def compare(**more):
        for seed in range(2):
            for arrays, by_row, options in cases():
                check(D32, arrays, by_row=by_row, seed=seed, **options, **more)
        check_single_keys(D32, 1e6, truncating=True, **more)
        check_more_keys(D32, 1e6, **more)
        check_cancelling_products(D32, **more)
        check_weights_by_hand(D32, **more)

    with pytest.raises((emulator.EmulationError, AssertionError)):
        compare(sources=sources)


@pytest.mark.long
def test_the_calls_of_bugs_are_right_without_them():
    for arrays, by_row, options in cases():
        check(D32, arrays, by_row=by_row, **options)
