"""Gradients by kernels where something is not finite: what is hidden does not show in them."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import reference
from tests.support.every_run import drawn, examples, some
from tests.support.gradients import UNIT, hold
from tests.support.kernel_attention import DTYPES, draw
from tests.support.kernel_gradients import rows_sm90
from tests.support.planted import plant
from tests.support.seeds import Chosen, one
from tests.support.strategies import Case
from validation import emulator
from validation.emulator.calls import attention_backward

pytestmark = pytest.mark.emulator
DIMS = (64, 128, 192)  # by bwd_sm90, in two ways, and by the two kernels for wide dims
TOP, BOTTOM = "top_left", "bottom_right"
CAUSAL = {"is_causal": True, "causal_align": TOP}
HALF = DTYPES["float16"]
LEAKS = list(itertools.product(DIMS, (np.nan, np.inf, -np.inf), ("causal", "window")))


def arrays(dtype, q_len, k_len, dim, heads=(1, 1), seed=0):
    """Queries, keys, values, the gradient of their output and that of its LSE."""
    shapes = (heads[0], q_len), (heads[1], k_len), (heads[1], k_len), (heads[0], q_len)
    drawn = [
        draw(1, *shape, dim, dtype=DTYPES[dtype], seed=4 * seed + i)
        for i, shape in enumerate(shapes)
    ]
    return *drawn, draw(1, heads[0], q_len, dtype=np.dtype(np.float32), seed=seed + 9)


def solve(q, k, v, dout, dlse=None, redo=True, sources=None, seed=0, **options):
    """The kernels' gradients by name, from the output and the LSE of the definition."""
    out, lse = reference.attention(q, k, v, **options)
    rows = rows_sm90(q.dtype.name, q.shape[-1], v.shape[-1])
    with np.errstate(all="ignore"):
        given = dout, q, k, v, out.astype(q.dtype), lse, dlse
        found = attention_backward(
            rows if redo else rows[:-1], *given, sources=sources or {}, seed=seed, **options
        )
    return dict(zip("qkv", found, strict=True))


def check(q, k, v, dout, dlse=None, seed=0, **options):
    """Hold them against float64, element by element, with NaN in the same places."""
    found = solve(q, k, v, dout, dlse, seed=seed, **options)
    with np.errstate(all="ignore"):
        hold(Case(q, k, v, None, None, options=options), found, dout, dlse, UNIT[q.dtype])
    return found


def finite(x):
    return np.isfinite(x.astype(np.float64))


@pytest.mark.parametrize(("dim", "bad", "how"), some(LEAKS, lambda leak: (leak[0], leak[2])))
def test_nothing_leaks_from_hidden_keys_and_values(dim, bad, how):
    for dtype in DTYPES:
        q, k, v, dout, dlse = arrays(dtype, 50, 150, dim)
        k[..., 50:, :] = v[..., 50:, :] = bad
        options = CAUSAL if how == "causal" else {"window": (None, 0), "causal_align": TOP}
        found = check(q, k, v, dout, dlse, **options)
        assert all(finite(x).all() for x in found.values())
        assert not any(found[name][..., 50:, :].any() for name in "kv")


@pytest.mark.parametrize("dim", DIMS)
def test_a_row_with_nothing_to_attend_to(dim):
    for dtype in DTYPES:
        q, k, v, dout, dlse = arrays(dtype, 100, 40, dim)
        options = {"is_causal": True, "causal_align": BOTTOM}
        want = solve(q, k, v, dout, dlse, **options)
        q[..., :60, :], dout[..., :60, :], dlse[..., :60] = np.nan, np.nan, np.inf
        found = check(q, k, v, dout, dlse, **options)
        assert not found["q"][..., :60, :].any()
        for name, x in found.items():
            np.testing.assert_allclose(
                x.astype(float), want[name].astype(float), rtol=2e-2, atol=2e-2
            )


@pytest.mark.parametrize(
    ("dim", "which"),
    some(itertools.product(DIMS, ("q", "k", "v", "dout")), lambda pair: pair[1]),
)
def test_bad_rows_spoil_what_belongs_to_them_only(dim, which):
    given = dict(zip(("q", "k", "v", "dout"), arrays("bfloat16", 90, 90, dim), strict=False))
    given[which][..., 20, 3] = np.nan
    found = check(*given.values(), **CAUSAL)
    rows = np.arange(90)
    clean = {name: finite(x[0, 0]).all(axis=1) for name, x in found.items()}
    np.testing.assert_array_equal(clean["q"], rows < 20 if which in "kv" else rows != 20)
    if which in "kv":
        assert not clean["k"].any()
    else:
        np.testing.assert_array_equal(clean["k"], rows > 20)
    if which != "k":
        np.testing.assert_array_equal(clean["v"], (rows > 20) | (which == "v"))
    if which == "dout":  # one column of it
        assert finite(np.delete(found["v"], 3, axis=-1)).all()


def test_a_clean_call_is_left_as_it_is():
    for dim in DIMS:
        given = arrays("float16", 130, 200, dim, heads=(2, 1))
        want = solve(*given, redo=False, **CAUSAL)
        found = solve(*given, **CAUSAL)
        assert all(x.tobytes() == want[name].tobytes() for name, x in found.items())


@pytest.mark.long
def test_only_tiles_that_are_not_finite_are_computed_again():
    """The others have the bits that they would have had."""
    for dim in DIMS:
        q, k, v, dout, dlse = arrays("bfloat16", 200, 300, dim, heads=(4, 2))
        want = solve(q, k, v, dout, dlse, **CAUSAL)
        v[0, 1, 199], k[0, 1, 250:] = np.nan, np.nan
        found = check(q, k, v, dout, dlse, **CAUSAL)
        untouched = {"q": found["q"][0, :2], "k": found["k"][0, :1], "v": found["v"][0, :1]}
        for name, x in untouched.items():
            assert x.tobytes() == want[name][0, : x.shape[0]].tobytes()
        # Rows that do not go through the tile of that value.
        assert found["q"][0, 2:, :128].tobytes() == want["q"][0, 2:, :128].tobytes()
        assert found["q"].tobytes() != want["q"].tobytes()


def test_sums_that_float16_cannot_hold_on_their_way():
    """Gradients of scores beyond 65,504, though those of queries and keys are not."""
    for dim in DIMS:
        q, k, v, dout, _ = arrays("float16", 70, 10, dim)
        q, k = (x * HALF.type(0.02) for x in (q, k))
        v, dout = v * HALF.type(300), dout * HALF.type(500)
        q[..., 8:], k[..., 8:] = 0, 0
        assert not all(finite(x).all() for x in solve(q, k, v, dout, redo=False).values())
        found = solve(q, k, v, dout)
        want = reference.attention_backward(dout, q, k, v)
        for name, of in zip("qkv", want, strict=True):
            assert np.abs(of).max() < 65504
            assert reference.relative_error(found[name], of) < 1e-2


BAD = st.tuples(
    st.sampled_from(["q", "k", "v", "dout", "dlse"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**16),
    st.sampled_from([np.nan, np.inf, -np.inf]),
)


@examples(30)
@given(
    dim=drawn([*DIMS, 88, 256], 64),
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    band=st.sampled_from(["none", "causal", (0, 0), (64, 0), (0, 63), (None, 5)]),
    align=st.sampled_from([TOP, BOTTOM]),
    bad=st.lists(BAD, min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_any_bad_number_shows_where_it_belongs(dim, dtype, lengths, heads, band, align, bad, seed):
    options = {"causal_align": align} if band != "none" else {}
    if band == "causal":
        options["is_causal"] = True
    elif band != "none":
        options["window"] = band
    given = arrays(dtype, *lengths, dim, heads)
    names = dict(zip(("q", "k", "v", "dout", "dlse"), given, strict=True))
    for name, row, place, number in bad:
        x = names[name].reshape(-1, lengths[name in ("k", "v")], 1 if name == "dlse" else dim)
        x[place % len(x), int(row * x.shape[1]), place % x.shape[2]] = number
    check(*given, seed=seed, **options)


# Of a kernel and a dim: what stands there, and what is put in its place.
BUGS = {
    "keys are not looked at": (
        "bwd_sm90", 128, "if (nonfinite_probe.found()) flag_nonfinite_keys_64(",
        "if (0) flag_nonfinite_keys_64(",
    ),
    "dK is not looked at": (
        "bwd_sm90", 64, "write_dkdv(dk, c, tiles, 1, scale, c.work.has_no_query, nonfinite_probe);",
        "NonfiniteProbe none; write_dkdv(dk, c, tiles, 1, scale, c.work.has_no_query, none);",
    ),
    "sums of dQ are not looked at": (
        "bwd_convert_dq", 64, "if (nonfinite_probe.found()) {", "if (false) {",
    ),
    "keys of wide dims are not looked at": (
        "bwd_dkdv_sm90", 192, "if (nonfinite_probe.found()) flag_nonfinite_keys_64(",
        "if (0) flag_nonfinite_keys_64(",
    ),
    "queries of wide dims are not looked at": (
        "bwd_dq_sm90", 192, "if (nonfinite_probe.found()) {", "if (0) {",
    ),
    "the words are not zeroed": ("bwd_preprocess", 64, "params.counters[i] = 0;", ""),
    "hidden pairs are multiplied": (
        "bwd_nonfinite", 64, "if (__float_as_uint(weights[i]) == kMaskedWeight) continue;", "",
    ),
    "one query head of its keys is left out": (
        "bwd_nonfinite", 64, "heads = queries ? 1 : params.group;", "heads = 1;",
    ),
    "weights of 0 of what is seen count as hidden": (
        "bwd_nonfinite", 64, "is_visible ? x + 0.0f", "is_visible && x != 0.0f ? x + 0.0f",
    ),
    "the last columns are left out": (
        "bwd_nonfinite", 192, "if (64 * part < cols)", "if (64 * part + 64 < cols)",
    ),
    "factors are written before all have read them": (
        "bwd_nonfinite", 64,
        "load_8(other, b, row, first + chunk, cols); __syncthreads();",
        "load_8(other, b, row, first + chunk, cols);",
    ),
    "products are written where factors are still read": (
        "bwd_nonfinite", 64, "__syncthreads();  // all threads have read the factors", "",
    ),
    "weights are made of products that are not there": (
        "bwd_nonfinite", 64, "__syncthreads();  // the products are there", "",
    ),
    "rows are read before they are written": (
        "bwd_nonfinite", 64, "to[1] = make_float4(x[4], x[5], x[6], x[7]); } __syncthreads();",
        "to[1] = make_float4(x[4], x[5], x[6], x[7]); }",
    ),
}  # fmt: skip


def planted_row(kind, dim):
    return next(row for row in rows_sm90("bfloat16", dim, dim) if row.source.endswith(kind))


@functools.cache
def spoiled_call(dim):
    """Bad numbers of queries that see no key, and one that counts though many weights are 0.

    Arrays and options, and the kernels' gradients, which are finite where those in float64 are.
    """
    q, k, v, dout, dlse = arrays("bfloat16", 180, 150, dim, heads=(4, 2))
    q *= q.dtype.type(30)
    q[..., :30, :], dout[:, 2:, 160, 5] = np.nan, np.nan
    v[:, 1, 140:] = np.inf
    options = {"is_causal": True, "causal_align": BOTTOM}
    want = solve(q, k, v, dout, dlse, **options)
    exact = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    assert all(
        np.array_equal(finite(x), finite(y)) for x, y in zip(want.values(), exact, strict=True)
    )
    return (q, k, v, dout, dlse), options, want


@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0]))
def test_a_planted_bug_is_found(bug, tmp_path):
    kind, dim, *change = BUGS[bug]
    row = planted_row(kind, dim)
    sources = {row.entry: plant(tmp_path, row.source, change)}
    given, options, want = spoiled_call(dim)
    for seed in range(20):
        try:
            got = solve(*given, sources=sources, seed=seed, **options)
        except emulator.EmulationError:
            return
        if any(not np.array_equal(finite(got[name]), finite(want[name])) for name in "qkv"):
            return
        if any(x.tobytes() != want[name].tobytes() for name, x in got.items()):
            return
    pytest.fail("20 seeds did not show it")


@pytest.mark.long
def test_seeds_of_gradients(tmp_path):
    """A third of them has a number that is not finite."""
    assert [one(seed, Chosen("backward")) for seed in range(20)] == [None] * 20
    row = planted_row("bwd_sm90", 128)
    bug = plant(tmp_path, row.source, BUGS["keys are not looked at"][2:])
    broken = Chosen("backward", row.name, bug)
    assert any(one(seed, broken) for seed in range(30))
