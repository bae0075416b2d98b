"""Numbers of keys of batch entries in the kernels of float32 and float64, run on the CPU."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, reference
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention_backward import select
from fa_cupy.gpu.kernels.backward import Wanted
from fa_cupy.gpu.kernels.registry import LENGTHS
from fa_cupy.gpu.kernels.score import score_mod_of
from tests.support import strategies
from tests.support.every_run import drawn, examples, only, some
from tests.support.gradients import hold
from tests.support.kernel_attention import BANDS, any_sinks, draw
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator

FORWARD = [row for row in forward.ROWS if row.dtype in ("float32", "float64") and not row.sparse]
BY_KIND = {(row.entry, row.dim): row for row in reversed(FORWARD)}
D64 = [row for row in FORWARD if row.dim == 64 and getattr(row, "parts", 2) == 2]
#: The kernels of gradients: dtype and target.
KINDS = ["float64-sm_90a", "float32-sm_80", "float32-sm_90a"]
NAMES = {"ids": lambda row: row.name}
# What an output may be off by, of the largest value; and a gradient, of the largest one.
LIMIT = {"float32": 4e-6, "float64": 1e-13}
LENGTHS_OF_FOUR = np.array([90, 0, 200, 129], np.int32)
NOT_AGAIN = {
    "attention_fwd_fp64": ("if (any_recompute == 0) return;", "return;"),
    "attention_fwd_fp32": ("if (any_recompute) {", "if (false) {"),
    "attention_fwd_fp32_sm90": ("if (any_recompute) {", "if (false) {"),
}


def arrays_of(dtype, dim, q_len=70, k_len=200, heads=(2, 1), lengths=LENGTHS_OF_FOUR, **how):
    """Those of some entries, with garbage behind the keys of each."""
    garbage, seed = how.get("garbage", np.nan), how.get("seed", 0)
    count = len(lengths)
    q, k, v = (
        draw(count, n, rows, dim, dtype=np.dtype(dtype), seed=seed + i)
        for i, (n, rows) in enumerate(((heads[0], q_len), (heads[1], k_len), (heads[1], k_len)))
    )
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = garbage
    return q, k, v


def check(row, arrays, lengths=LENGTHS_OF_FOUR, bias=None, seed=0, source=None, **options):
    """Hold a call against the definition; entries whose length is out of range are NaN."""
    how = {"seed": seed, "source": source, "k_lengths": lengths}
    with np.errstate(all="ignore"):
        out, lse = calls.attention(row, *arrays, bias, **how, **options)
    k_len = arrays[1].shape[-2]
    invalid = (lengths < 0) | (lengths > k_len)
    own = np.where(invalid, 0, lengths)
    with np.errstate(all="ignore"):
        want, want_lse = reference.attention(*arrays, bias, k_lengths=own, **options)
    want[invalid], want_lse[invalid] = np.nan, np.nan
    limit = 2.0**-9 if getattr(row, "parts", 2) == 1 else LIMIT[row.dtype]
    largest = float(np.abs(np.nan_to_num(arrays[2], posinf=0, neginf=0)).max(initial=0))
    np.testing.assert_allclose(out, want, rtol=0, atol=limit * max(1.0, largest))
    np.testing.assert_allclose(lse, want_lse, rtol=limit, atol=4 * limit)
    return out, lse


# Forward


@pytest.mark.parametrize(
    ("row", "band"),
    [
        pytest.param(*case.values, BANDS[1 + i % 2], marks=case.marks, id=case.values[0].name)
        for i, case in enumerate(some(FORWARD, lambda row: row.source))
    ],
)
def test_every_row(row, band, tmp_path):
    """Rows that are right because they were computed again are none: NaN is never multiplied."""
    source = plant(tmp_path, row.source, NOT_AGAIN[row.entry])
    check(row, arrays_of(row.dtype, row.dim), source=source, seed=1, **band)


@examples(15)
@given(
    row=drawn(D64, *D64),
    sizes=st.tuples(st.integers(1, 150), st.integers(1, 260)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    garbage=st.sampled_from([np.nan, np.inf, 3e38, 0.5]),
    integers=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 2**31),
)
def test_any_lengths(row, sizes, heads, band, softcap, sinks, garbage, integers, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, sizes[1] + 1, 3).astype(integers)
    how = {"garbage": garbage, "seed": seed % 1000}
    arrays = arrays_of(row.dtype, row.dim, *sizes, heads, lengths, **how)
    options = {"softcap": softcap} if softcap else {}
    if sinks:
        options["sinks"] = any_sinks(rng, 3, heads[0], sizes[0])
    check(row, arrays, lengths, seed=seed % 97, **band, **options)


@pytest.mark.parametrize("row", D64, **NAMES)
def test_entries_that_share_all_keys_have_their_own_lengths(row):
    q, k, v = arrays_of(row.dtype, 64, garbage=0.5)
    check(row, (q, k[:1], v[:1]), **BANDS[1])
    k[0, :, 90:] = v[0, :, 90:] = np.nan  # which none of these has
    check(row, (q, k[:1], v[:1]), np.array([90, 0, 7, 64]))


@pytest.mark.parametrize("row", only(D64, D64[0]), **NAMES)
@pytest.mark.parametrize("axes", [(False, True), (True, True), (True, False)])
def test_a_bias_of_what_is_not_there_does_not_show(row, axes):
    bias = draw(2, *(n if own else 1 for n, own in zip((70, 200), axes, strict=True)),
                dtype=np.dtype(row.dtype))  # fmt: skip
    lengths = np.array([90, 0, 140, 129])
    if axes[1]:
        bias[..., 140:] = np.nan
    check(row, arrays_of(row.dtype, 64, lengths=lengths), lengths, bias, **BANDS[1])


@pytest.mark.parametrize("row", only(D64, D64[1]), **NAMES)
def test_an_expression_counts_keys_from_the_first_one(row):
    check(row, arrays_of(row.dtype, 64), score=Score("s - 0.1 * abs(i - j) + 0.5 * h"))


@pytest.mark.parametrize("row", D64, **NAMES)
@pytest.mark.parametrize("bad", only([-1, 201, 2**32 + 5], -1, 2**32 + 5))
def test_a_length_out_of_range_is_nan(row, bad):
    """And no other entry's."""
    lengths = np.array([90, bad, 200, 129])
    arrays = arrays_of(row.dtype, 64, garbage=0.5)
    check(row, arrays, lengths, sinks=np.array([[0.5], [-1.0]], np.float32))


# Gradients


@functools.cache
def rows_of(kind, dim, score=None):
    dtype, _, target = kind.partition("-")
    return select(Wanted(dtype, dim, score=score, lengths=True), target)


def solve(kind, arrays, lengths, band, dlse=None, bias=None, seed=0, sources=None, **options):
    """Gradients by kernels, and the case whose definition has them."""
    dout, q, k, v = arrays
    k_len = k.shape[-2]
    invalid = (lengths < 0) | (lengths > k_len)
    own = np.where(invalid, 0, lengths)
    with np.errstate(all="ignore"):
        results = reference.attention(q, k, v, bias, k_lengths=own, **band, **options)
        out, lse = (x.astype(q.dtype) for x in results)
    out[invalid], lse[invalid] = np.nan, np.nan
    problem = attention_problem(q, k, v, bias, None, **options)
    rows = rows_of(kind, q.shape[-1], score_mod_of(problem, sloped=True))
    found = calls.attention_backward(
        rows, dout, q, k, v, out, lse, dlse, bias, seed=seed, sources=sources or {},
        k_lengths=lengths, **band, **options,
    )  # fmt: skip
    for i, b in itertools.product((1, 2), range(len(lengths))):
        assert not found[i][b, :, own[b] :].any()
    assert not found[0][own == 0].any()
    behind = (np.arange(k_len) >= own[:, None])[:, None, :, None]
    k, v = (np.where(behind, k.dtype.type(0), x) for x in (k, v))
    case = strategies.Case(q, k, v, bias, None, options={**options, **band, "k_lengths": own})
    return found, case, np.where(invalid[:, None, None, None], dout.dtype.type(0), dout)


def check_gradients(kind, arrays, lengths, band=None, dlse=None, **how):
    """Hold gradients against what their arithmetic allows, element by element."""
    found, case, dout = solve(kind, arrays, lengths, band or {}, dlse, **how)
    rounded = 2.0**-53 if kind.startswith("float64") else 0.0
    hold(case, dict(zip("qkv", found, strict=True)), dout, dlse, rounded)


def gradient_arrays(kind, dim, q_len=70, k_len=200, lengths=LENGTHS_OF_FOUR, **how):
    """The same with dout."""
    q, k, v = arrays_of(
        kind.partition("-")[0], dim, q_len, k_len, how.pop("heads", (2, 1)), lengths, **how
    )
    return draw(*q.shape, dtype=q.dtype, seed=99), q, k, v


@pytest.mark.parametrize(
    ("kind", "dim"),
    only(
        [(kind, dim) for kind in KINDS for dim in (32, 64, 96, 128, 256) if rows_of(kind, dim)],
        *((kind, 64) for kind in KINDS),
    ),
)
def test_gradients_of_every_row(kind, dim):
    for seed, band in enumerate(BANDS[1:3]):
        arrays = gradient_arrays(kind, dim, 90 if dim < 200 else 40, seed=seed)
        check_gradients(kind, arrays, LENGTHS_OF_FOUR, band, seed=seed)


@examples(10)
@given(
    kind=drawn(KINDS, *KINDS[:2]),
    sizes=st.tuples(st.integers(1, 100), st.integers(1, 150)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    garbage=st.sampled_from([np.nan, np.inf, 3e38, 0.5]),
    dlse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_gradients_of_any_lengths(kind, sizes, heads, band, softcap, garbage, dlse, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, sizes[1] + 1, 3)
    how = {"heads": heads, "garbage": garbage, "seed": seed % 1000}
    arrays = gradient_arrays(kind, 64, *sizes, lengths, **how)
    given = rng.standard_normal((3, heads[0], sizes[0])) if dlse else None
    options = {"softcap": softcap} if softcap else {}
    check_gradients(kind, arrays, lengths, band, given, seed=seed % 97, **options)


@pytest.mark.parametrize("kind", only(KINDS, KINDS[2]))
def test_an_entry_whose_length_is_out_of_range_adds_nothing(kind):
    arrays = gradient_arrays(kind, 64, garbage=0.5)
    for x in (arrays[0], arrays[1]):
        x[1] = x[3] = np.nan
    check_gradients(kind, arrays, np.array([90, 201, 200, -1]))


@pytest.mark.parametrize("kind", only(KINDS, KINDS[0]))
def test_what_is_not_finite_stays_with_the_keys_that_are_there(kind):
    """A query of NaN: the gradients of keys that are not there stay 0."""
    arrays = gradient_arrays(kind, 64)
    arrays[1][0, 0, 5] = arrays[0][2, 1, 7] = np.nan
    found, *_ = solve(kind, arrays, LENGTHS_OF_FOUR, {})
    assert np.isnan(found[1][0, :, :90]).all()
    assert np.isfinite(found[2][3]).all()


# Builds


def test_there_is_a_build_of_each_row():
    named = {row.name for row in LENGTHS}
    plain = [*FORWARD, *(row for kind in KINDS for row in rows_of(kind, 64))]
    assert {row.for_lengths(True).name for row in plain} <= named
    for row in plain:
        build = row.for_lengths(True)
        assert ("FA_LENGTHS", 1) in build.defines
        assert build.name == row.for_lengths(False).for_lengths(True).name


def test_gradients_under_a_mask_or_of_a_bias_have_none():
    for wanted in ({"masked": True}, {"dbias": True}):
        for dtype, _, target in (kind.partition("-") for kind in KINDS):
            assert select(Wanted(dtype, 64, lengths=True, **wanted), target) == ()
    assert select(Wanted("float16", 64, lengths=True), "sm_90a") == ()
    assert select(Wanted("float16", 64), "sm_90a")


FP32, SM90, FP64 = (BY_KIND[f"attention_fwd_{name}", 64] for name in ("fp32", "fp32_sm90", "fp64"))
# The kernel, and what is changed.
BUGS = {
    "the length of the first entry": (
        FP64, ("element_of_entry(p, batch, lengths.batch)", "0"),
    ),
    "the band of all keys": (
        FP32, ("place, lengths.bytes), lengths.band_from_end)", "place, lengths.bytes), 0)"),
    ),
    "keys behind the length are copied": (
        FP64, ("p.v_row, key * kTileN, band_of(p, work).k_len", "p.v_row, key * kTileN, p.k_len"),
    ),
    "keys behind the length are copied, float32": (
        FP32, ("band_of(params, shared.work).k_len, params.v_dim", "params.k_len, params.v_dim"),
    ),
    "a tile of the end is not hidden": (
        SM90, ("mask_outside_band(band_of(c.params, c.shared.work)", "mask_outside_band(c.params"),
    ),
    "rows out of range are not marked": (
        SM90, ("return work.band.upper == kInvalidBound;", "return false;"),
    ),
    "rows out of range are not marked, float64": (
        FP64, ("return work.band.upper == kInvalidBound;", "return false;"),
    ),
}  # fmt: skip


def outcome(row, source):
    """Make the calls that show a bug."""
    arrays = arrays_of(row.dtype, 64)
    check(row, arrays, source=source, **BANDS[1])
    check(row, arrays, np.array([90, 500, 200, -1]), source=source)


@pytest.mark.parametrize("bug", only(BUGS, "the length of the first entry"))
def test_planted_bugs_are_found(bug, tmp_path):
    row, change = BUGS[bug]
    outcome(row, plant(tmp_path, row.source, NOT_AGAIN[row.entry]))
    source = plant(tmp_path, row.source, NOT_AGAIN[row.entry], change)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        outcome(row, source)


def test_tiles_are_split_to_the_length(tmp_path, monkeypatch):
    """What is behind it, and is NaN, would have rows computed again."""
    row = SM90.for_lengths(True).split
    change = "return length >= 0 && length <= params.rows ? length : 0;", "return params.rows;"
    both = {"attention_split_kv": plant(tmp_path, row.source, change)}
    both["attention_fwd_fp32_sm90"] = plant(tmp_path, SM90.source, NOT_AGAIN[SM90.entry])
    arrays = arrays_of("float32", 64)
    for names in ([SM90.entry], [*both]):
        sources = {name: both[name] for name in names}
        launcher = EmulatorLauncher(sources=sources)
        monkeypatch.setattr(calls, "EmulatorLauncher", lambda *_, own=launcher: own)
        out, _ = calls.attention(SM90, *arrays, k_lengths=LENGTHS_OF_FOUR)
        assert np.isfinite(out).all() == (len(names) == 1)


# Of gradients: the kernel's kind, which of its launches, and what is changed.
GRADIENT_BUGS = {
    "keys behind the length see queries": (
        KINDS[0], 1, ("if (first_own + kOwnRows > band.k_len) tiles.full_end = tiles.full_begin;",
                      ""),
    ),
    "rows of keys behind the length are computed again": (
        KINDS[0], 1, ("kLengths && key >= band.k_len ? -1 : last_query(band, key)",
                      "last_query(band, key)"),
    ),
    "keys behind the length are split": (
        KINDS[1], 0, ("key < band_of(p, entry_of(p, entry)).k_len", "key < p.k_len"),
    ),
    "scores outside the band of the entry count": (
        KINDS[2], 1, ("(params, band_of(p, work), s, part", "(params, p, s, part"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", only(GRADIENT_BUGS, "keys behind the length are split"))
def test_planted_bugs_of_gradients_are_found(bug, tmp_path):
    kind, which, change = GRADIENT_BUGS[bug]
    row = rows_of(kind, 64)[which]
    sources = {row.entry: plant(tmp_path, row.source, change)}
    arrays = gradient_arrays(kind, 64)
    arrays[1][0, 0, 5] = np.nan

    def outcome(sources):
        both = [
            solve(kind, arrays, LENGTHS_OF_FOUR, band, sources=sources)[0] for band in BANDS[:2]
        ]
        return [x.tobytes() for found in both for x in found]

    want = outcome({})
    with pytest.raises((AssertionError, emulator.EmulationError)):
        assert outcome(sources) == want
