"""Attention of float32 on pairs of float16: what the kernels for it are held against."""

import numpy as np
import pytest
from hypothesis import strategies as st

from fa_cupy import BitMask, reference
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from tests.support import packed_sequences
from tests.support.kernel_attention import BANDS, any_sinks, blocks_of, draw, shuffled
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls
from validation.emulator.launcher import EmulatorLauncher

SINGLE = np.dtype(np.float32)
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}
TOP_LEFT = {"is_causal": True, "causal_align": "top_left"}  # the first rows see few keys
#: Rows are computed again where outputs are not finite, which would hide bugs.
NOT_AGAIN = "if (any_recompute) {", "if (false) {"
# An output beside float64, where plain float32 is no worse: relative, in the norm of Frobenius.
LIMIT = 2e-6


def arrays_of(dim, q_len=70, k_len=300, batch=(), seed=0, v_dim=None):
    shapes = (q_len, dim), (k_len, dim), (k_len, v_dim or dim)
    return [draw(*batch, *shape, dtype=SINGLE, seed=3 * seed + i) for i, shape in enumerate(shapes)]


def powers(count, least, most, seed=0):
    """A column of powers of ten."""
    exponents = np.random.default_rng(seed).integers(least, most, (count, 1), endpoint=True)
    return np.float32(10.0) ** exponents.astype(SINGLE)


def hold(
    row, arrays, rows=False, times=None, seed=0, source=None, truncating=False, columns=False,
    **options,
):  # fmt: skip
    """Hold a call against float64: not off by more than twice what plain float32 is, or `LIMIT`.

    With `rows` the worst of the rows counts, to twice as much: rows may differ in size. With
    `columns` the worst of the columns does.
    """
    times = times or (4.0 if rows else 2.0)
    bias, mask = options.pop("bias", None), options.pop("mask", None)
    how = {name: options.pop(name) for name in ("order", "by_tile") if name in options}
    out, lse = calls.attention(row, *arrays, bias, mask, seed, source, truncating, **how, **options)
    dense = mask.to_dense() if isinstance(mask, BitMask) else mask
    want, want_lse = reference.attention(*arrays, bias, dense, **options)
    with np.errstate(all="ignore"):
        plain = reference.plain(*arrays, bias, dense, dtype=SINGLE, **options)
    want[np.isnan(want_lse)] = np.nan  # also where a value is infinite
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_array_equal(out[~finite], want[~finite].astype(SINGLE))
    axis = -1 if rows else -2 if columns else None

    def error(found):
        with np.errstate(all="ignore"):
            off = np.where(finite, found.astype(np.float64) - want, 0)
        whole = np.where(finite, want, 0)
        scale = max(np.abs(whole).max(initial=0), 1e-300)  # squares leave no range
        sizes = (np.sqrt(np.square(x / scale).sum(axis)) for x in (off, whole))
        shape = np.delete(want.shape, axis) if axis else ()
        return np.divide(*sizes, out=np.zeros(shape), where=True)

    with np.errstate(invalid="ignore", divide="ignore"):
        found, usual = (np.nan_to_num(error(x), posinf=1.0) for x in (out, plain))
    assert found.max() <= max(times * usual.max(), LIMIT), (found.max(), usual.max())
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=2e-6 + 1e-6 * (bias is not None))
    return out, lse


# What is done to normal data, and whether rows of the output differ in size.
DATA = {
    "normal": (lambda q, k, v: (q, k, v), False),
    "offset values": (lambda q, k, v: (q, k, v + 100), False),
    "offset scores": (lambda q, k, v: (q + 1, k + 1, v), False),
    "small values": (lambda q, k, v: (q, k, v * SINGLE.type(1e-30)), False),
    "large values": (lambda q, k, v: (q, k, v * SINGLE.type(1e30)), False),
    "the largest values": (
        lambda q, k, v: (q, k, np.clip(v, -3, 3) * SINGLE.type(1.1e38)), False,
    ),
    "small queries": (
        lambda q, k, v: (q * SINGLE.type(1e-30), k * SINGLE.type(1e30), v), False,
    ),
    "queries of all sizes": (
        lambda q, k, v: (q * powers(len(q), -36, 0), k * powers(len(k), -36, 0), v), True,
    ),
    "columns of all sizes": (
        lambda q, k, v: (q * powers(64, -17, 17).T, k / powers(64, -17, 17).T, v), False,
    ),
    "large numbers that meet zeros": (
        lambda q, k, v: (
            np.where(np.arange(64) < 3, 1e30, q), np.where(np.arange(64) < 3, 0, k), v,
        ),
        False,
    ),
    "values of all sizes": (lambda q, k, v: (q, k, v * powers(len(v), -37, 37)), True),
    "values that grow": (
        lambda q, k, v: (q, k, v * np.sort(powers(len(v), -30, 36), axis=0)), True,
    ),
    "values that jump": (
        lambda q, k, v: (q, k, v * np.where(np.arange(len(v)) < 64, 1e-36, 1e36)[:, None]), True,
    ),
    "values that jump at another tile": (
        lambda q, k, v: (q, k, v * np.where(np.arange(len(v)) < 128, 1e-36, 1e36)[:, None]), True,
    ),
    "values that shrink": (
        lambda q, k, v: (q, k, v * np.sort(powers(len(v), -30, 36), axis=0)[::-1]), True,
    ),
    "values that weights make up for": (
        lambda q, k, v: (
            np.abs(q), np.abs(k) * np.linspace(0, 16, len(k), dtype=SINGLE)[:, None],
            v * np.float32(2.0) ** np.linspace(60, -60, len(k), dtype=SINGLE)[:, None],
        ),
        True,
    ),
    "a value of zeros that weighs the most": (
        lambda q, k, v: (
            np.where(np.arange(64) < 1, 8, q),
            np.where(np.arange(64) < 1, np.where(np.arange(len(k)) % 50, 0, 28)[:, None], k),
            v * (np.arange(len(v)) % 50 > 0)[:, None],
        ),
        True,
    ),
}  # fmt: skip


def hold_data(row, data, **options):
    """Hold a call on changed data."""
    change, rows = DATA[data]
    arrays = [x.astype(SINGLE) for x in change(*arrays_of(64, 120, 150))]
    return hold(row, arrays, rows=rows, **options)


def check_scores_far_from_zero(row, sparse, size, how):
    """A weight follows from the difference to the largest score, not from two numbers of log2."""
    arrays = arrays_of(64, 70, 100)
    bias = np.zeros((70, 100), SINGLE)
    bias[::3] = size
    if abs(size) < 2**20:
        bias[::3] += np.random.default_rng(0).integers(-3, 4, bias[::3].shape)
    options = {"softcap": {"softcap": 2.0}, "causal": CAUSAL}.get(how, {})
    if how == "mask":
        options = {"mask": np.random.default_rng(1).random((70, 100)) < 0.7}
    hold(sparse if how == "mask" else row, arrays, rows=True, bias=bias, **options)


def check_equal_scores(row, size):
    """Equal scores have equal weights, however large they are."""
    q, k, v = np.full((1, 1), size, SINGLE), np.ones((2, 1), SINGLE), np.array([[1], [3]], SINGLE)
    out, _ = calls.attention(row, q, k, v, scale=1.0)
    assert out.tolist() == [[2.0]]


def check_hidden_nan(sparse, size):
    """A row is divided by its own sum where a NaN is hidden from it."""
    q, k, v = arrays_of(64, 40, 90)
    v[:], v[7] = 1, np.nan
    mask = np.ones((40, 90), bool)
    mask[:, 7] = False
    out, _ = calls.attention(sparse, q, k, v, np.full((40, 1), size, SINGLE), mask)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def check_sink(row, size):
    """A sink weighs what a key of its score does."""
    q, k, v = np.zeros((3, 64), SINGLE), np.zeros((1, 64), SINGLE), np.ones((1, 64), SINGLE)
    bias, sinks = np.full((3, 1), size, SINGLE), np.full((1,), size, SINGLE)
    out, lse = calls.attention(row, q, k, v, bias, sinks=sinks)
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)
    np.testing.assert_allclose(lse, size + np.log(2), rtol=1e-7)


def check_rows_computed_again(row, sparse, folder, large):
    """Rows are computed again where large numbers meet zeros, but not where scores are large.

    Some keys are `large` times as long as the others.
    """
    source = plant(folder, row.source, NOT_AGAIN)
    for size in (1e-3, 1, 1e3):
        q, k, v = arrays_of(64, 64, 200)
        q *= SINGLE.type(size)
        k[:3] *= SINGLE.type(large)
        assert np.isfinite(calls.attention(row, q, k, v, None, None, 0, source)[0]).all()
    seen = np.ones((64, 200), bool)
    seen[:, ::7] = False
    k[::7] = 1e20  # what a mask hides may be anything
    masked = plant(folder, sparse.source, NOT_AGAIN)
    assert np.isfinite(calls.attention(sparse, q, k, v, None, seen, 0, masked)[0]).all()
    k[::7] = 1
    q[5, 7], k[:, 7] = 1e12, 0
    out, _ = calls.attention(row, q, k, v, None, None, 0, source)
    assert np.flatnonzero(np.isnan(out).any(-1)).tolist() == [5]


def check_subnormal_numbers(row):
    """Also where a row has nothing else; what is lost is below the last place of float32."""
    q, k, v = arrays_of(64)
    v *= SINGLE.type(1e-41)
    out, _ = calls.attention(row, q, k, v)
    want, _ = reference.attention(q, k, v)
    assert np.abs(out - want).max() <= 1.01 * 2.0**-149
    k *= SINGLE.type(1e-40)
    q *= SINGLE.type(1e37)
    q[::7] *= SINGLE.type(1e-40)
    hold(row, (q, k, v * SINGLE.type(1e38)), scale=100.0)


def any_calls():
    """What `check_any_call` is to be told of a call."""
    return st.fixed_dictionaries({
        "lengths": st.tuples(st.integers(1, 150), st.integers(1, 300)),
        "heads": st.sampled_from([(1, 1), (3, 3), (4, 2)]),
        "batches": st.sampled_from([(1, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]),  # of q, k, v
        "narrow": st.tuples(*[st.integers(0, 9)] * 2),
        "band": st.sampled_from(BANDS),
        "scale": st.sampled_from([None, 0.05]),
        "strided": st.booleans(),
        "uneven": st.booleans(),
        "truncating": st.booleans(),
        "seed": st.integers(0, 2**32),
    })  # fmt: skip


def check_any_call(row, call):
    """Any call with any schedule; `call` is one of `any_calls`."""
    seed, (q_len, k_len), heads = call["seed"], call["lengths"], call["heads"]
    rng = np.random.default_rng(seed)
    dims = [row.dim - n for n in call["narrow"]]
    shapes = (heads[0], q_len, dims[0]), (heads[1], k_len, dims[0]), (heads[1], k_len, dims[1])
    q, k, v = (
        draw(batch, *shape, dtype=SINGLE, seed=seed + i)
        for i, (batch, shape) in enumerate(zip(call["batches"], shapes, strict=True))
    )
    if call["uneven"]:  # tiles whose rows have exponents of their own, beside others
        q = q / 32
        k, v = (x * np.exp2(rng.integers(-5, 6, (k_len, 1))).astype(SINGLE) for x in (k, v))
    if call["strided"]:  # rows at other distances, which need not be multiples of 16 bytes
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v))
    options = dict(call["band"])
    if call["scale"]:
        options["scale"] = call["scale"]
    if row.sparse:
        options["mask"] = blocks_of(rng, heads[0], q_len, k_len)
        options["by_tile"] = bool(rng.random() < 0.5)
        if rng.random() < 0.5:
            options["order"] = shuffled(rng, (max(call["batches"]), heads[0]), q_len)
    if rng.random() < 0.3:
        options["sinks"] = any_sinks(rng, 1, heads[0], q_len)
    how = {"seed": seed % 1000, "truncating": call["truncating"]}
    hold(row, (q, k, v), rows=True, **how, **options)


SCORES = {
    "softcap": {"softcap": 3.0},
    "bias of pairs": {"bias": draw(70, 300, dtype=SINGLE, seed=9)},
    "bias of keys and a softcap": {"bias": draw(1, 300, dtype=SINGLE, seed=9), "softcap": 3.0},
    "negative": {"scale": -0.2},
    "huge": {"scale": 2.0**110},
}


def check_score(row, scores):
    """Scores that are more than products."""
    q, k, v = arrays_of(64)
    options = dict(SCORES[scores])
    if scores == "huge":
        q *= SINGLE.type(2.0**-112)
    hold(row, (q, k, v), rows=True, **options)
    hold(row, (q, k, v + 10), times=4, truncating=True, **CAUSAL, **options)


def spoil(arrays, hidden):
    """Put what is no number where no query sees it, or where some do."""
    _, k, v = arrays
    k[hidden], v[hidden + 1], v[hidden + 2, ::2] = np.nan, np.inf, np.nan
    k[hidden + 3, 5], v[hidden + 4, 7] = -np.inf, -np.inf


def check_not_finite(row):
    """NaN and infinities are where the definition has them, and hidden ones do not show."""
    arrays = arrays_of(64, 140, 140)
    spoil(arrays, 100)  # seen by the last queries alone
    arrays[0][30], arrays[0][60, 3], arrays[0][61, 3] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        out, lse = hold(row, arrays, rows=True, **CAUSAL)
    others = np.setdiff1d(np.arange(100), [30, 60, 61])
    assert np.isfinite(out[others]).all()
    assert np.isfinite(lse[others]).all()
    # A row that is lost does not change the bits of others.
    clean = arrays_of(64, 140, 140)
    want, _ = calls.attention(row, *clean, **CAUSAL)
    clean[0][30] = np.nan
    got, _ = calls.attention(row, *clean, **CAUSAL)
    assert got[others].tobytes() == want[others].tobytes()


def check_hidden_keys(sparse):
    """What a mask hides does not show; of keys in blocks that are not listed, not one bit."""
    rng, arrays = np.random.default_rng(0), arrays_of(64, 200, 300)
    mask = blocks_of(rng, 200, 300, density=0.5)
    mask[:, 100:105] = mask[:, 240:245] = False
    mask[150] = False
    spoil(arrays, 100)
    spoil(arrays, 240)
    out, lse = hold(sparse, arrays, rows=True, mask=mask)
    assert not out[150].any()
    assert np.isneginf(lse[150])
    # Blocks that are not listed are not read: a row that meets a NaN has other last bits.
    mask[:, 128:256] = False
    clean = arrays_of(64, 200, 300)
    want = calls.attention(sparse, *clean, None, mask)
    clean[1][128:256] = clean[2][128:256] = np.nan
    got = calls.attention(sparse, *clean, None, mask)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


def check_products_beyond_float32(row):
    """Rows whose scores float32 does not hold are computed again in float64."""
    q, k, v = arrays_of(64)
    q, k = (np.sign(x) * SINGLE.type(2.0**66) for x in (q, k))
    out, lse = calls.attention(row, q, k, v)
    want, want_lse = reference.attention(q, k, v)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, np.clip(want_lse, -3.5e38, 3.4028235e38), rtol=1e-6)


def check_rows_without_keys(row):
    """Rows that see no key have their sink as LSE."""
    q, k, v = arrays_of(64, 200, 40)
    band = {"window": (3, 3), "causal_align": "bottom_right"}
    sinks = np.linspace(-60, 60, 200, dtype=SINGLE)
    sinks[[5, 170]] = -np.inf, np.inf
    out, lse = hold(row, (q, k, v), rows=True, sinks=sinks, **band)
    assert not out[:150].any()
    assert np.isnan(out[170]).all()
    np.testing.assert_allclose(lse[:150], sinks[:150], 1e-6)


def check_packed(row):
    """Sequences one behind the other, some of them empty."""
    offsets = np.array([0, 3, 3, 70, 191, 200, 235], np.int32)
    arrays = arrays_of(64, 235, 235, batch=(2,))
    row = row.for_sequences(True)
    seen = packed_sequences.visible(offsets, offsets, (235, 235), **CAUSAL)
    out, lse = calls.attention(row, *arrays, q_offsets=offsets, **CAUSAL)
    want, want_lse = reference.attention(*arrays, None, seen)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)
    assert reference.relative_error(out, want) < 5e-7


def check_schedule(row):
    """Neither the schedule nor the order of rows of blocks shows."""
    rng, arrays = np.random.default_rng(0), arrays_of(64, 140, 300)
    options, found = {}, set()
    if row.sparse:
        options["mask"] = blocks_of(rng, 140, 300, density=0.5)
    for seed in range(6):
        if row.sparse:
            options["order"] = shuffled(rng, (), 140) if seed % 2 else None
        result = calls.attention(row, *arrays, seed=seed, **options, **CAUSAL)
        found.add(tuple(x.tobytes() for x in result))
    assert len(found) == 1


def check_rows_written(row):
    """No row behind the last query is written, and no column behind v_dim."""
    q, k, v = arrays_of(64, 70, 90, v_dim=61)
    room = np.full((74, 64), 7.0, SINGLE)
    out = room[2:72, 1:62]
    problem = attention_problem.attention_problem(q, k, v, None, None)
    view = attention_problem.out_view(problem, out.shape, out.strides)
    plan = forward.make_plan(Traits(problem, view), EmulatorLauncher(), row)
    plan.run(tuple(0 if x is None else x.ctypes.data for x in (q, k, v, None, out, None)))
    want, _ = reference.attention(q, k, v)
    assert reference.relative_error(out, want) < 5e-7
    out[:] = 7.0
    assert (room == 7.0).all()


def check_planted(row, changes, calls_of_bugs, tmp_path):
    """Hold calls, and have those of some seed fail with a kernel that is changed."""
    source = plant(tmp_path, row.source, *changes)

    def compare():
        for seed in range(10):
            for arrays, options in calls_of_bugs:
                hold(row, arrays, rows=True, seed=seed, source=source, **options)

    for arrays, options in calls_of_bugs:
        hold(row, arrays, rows=True, **options)
    with pytest.raises((emulator.EmulationError, AssertionError)):
        compare()
