"""Gradients where something is not finite, under masks, biases and softcaps."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import DTYPES, blocks_of, draw
from tests.support.kernel_gradients import (
    any_transform,
    case,
    check_spoiled,
    rows_sm80,
    rows_sm90,
    solve,
)
from tests.support.planted import plant

pytestmark = pytest.mark.emulator
TOP = "top_left"
CAUSAL = {"is_causal": True, "causal_align": TOP}
BAD = [np.nan, np.inf, -np.inf]


def rows_of(call, hopper=False):
    """The rows for SM80 that serve a call, or those for SM90."""
    name, dims = call.q.dtype.name, (call.q.shape[-1], call.v.shape[-1])
    masked = call.options.get("mask") is not None
    if hopper:
        return rows_sm90(name, *dims, masked)
    return rows_sm80(name, *dims, masked)


def finite(x):
    return np.isfinite(x.astype(np.float64))


@pytest.mark.parametrize(
    ("dim", "hopper", "infinity"),
    only(
        [(64, 0, np.inf), (128, 0, -np.inf), (192, 0, np.inf), (64, 1, np.inf), (192, 1, -np.inf)],
        (64, 0, np.inf),
        (192, 1, -np.inf),
    ),
)
def test_what_a_mask_hides_does_not_show(dim, hopper, infinity):
    rng = np.random.default_rng(1)
    mask = blocks_of(rng, 2, 140, 160, density=0.5)
    mask[:, :, [3, 129, 150, 159]] = False  # full blocks are partial then
    mask[:, [5, 139]] = False
    call = case("bfloat16", (2, 1), (140, 160), (dim, dim), batch=1, dlse=True, mask=mask)
    want = solve(call, rows=rows_of(call, hopper))
    for bad in (np.nan, infinity):
        call.k[:, :, [3, 129, 159]] = call.v[:, :, [3, 129, 150]] = bad
        call.q[:, :, [5, 139]] = call.dout[:, :, 139] = bad
        got = solve(call, rows=rows_of(call, hopper))
        for x, y in zip(got, want, strict=True):
            assert finite(x).all()
            np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=2e-2, atol=2e-2)
        assert not got[0][:, :, [5, 139]].any()
        assert not any(x[:, :, [3, 129, 159]].any() for x in got[1:])


@pytest.mark.parametrize(("dim", "infinity"), only([(64, np.inf), (256, -np.inf)], (64, np.inf)))
def test_what_a_bias_of_minus_infinity_hides_does_not_show(dim, infinity):
    bias = draw(2, 70, 90, dtype=np.dtype(np.float32))
    bias[:, :, [0, 89]], bias[:, 69] = -np.inf, -np.inf
    for more in ({}, {"softcap": 2.0}):
        call = case("float16", (2, 2), (70, 90), (dim, dim), batch=1, bias=bias, **more)
        want = solve(call, rows=rows_of(call))
        for bad in (np.nan, infinity):
            call.v[:, :, [0, 89]] = call.dout[:, :, 69] = bad  # NaN in a key is one in a score
            got = solve(call, rows=rows_of(call))
            for x, y in zip(got, want, strict=True):
                assert finite(x).all()
                np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=2e-2, atol=2e-2)


def test_only_rows_that_are_not_finite_are_computed_again():
    """The others have the bits that they would have had, whatever the options."""
    bias = draw(2, 1, 270, dtype=np.dtype(np.float32))
    mask = blocks_of(np.random.default_rng(0), 130, 270, density=0.7)
    call = case("bfloat16", (2, 2), (130, 270), (64, 64), batch=1)
    call = call._replace(options={"bias": bias, "mask": mask, "softcap": 3.0})
    want = solve(call, rows=rows_of(call))
    call.v[0, 1, 200] = np.nan
    got = solve(call, rows=rows_of(call))
    assert all(x[0, 0].tobytes() == y[0, 0].tobytes() for x, y in zip(got, want, strict=True))
    check_spoiled(call, rows=rows_of(call))


SPOILED = st.tuples(
    st.sampled_from(["q", "k", "v", "dout", "dlse"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**16),
    st.sampled_from(BAD),
)


@examples(20)
@given(
    dim=drawn([32, 64, 96, 128, 192, 256], 64),
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    causal=st.booleans(),
    sparse=st.booleans(),
    bad=st.lists(SPOILED, min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_any_bad_number_shows_where_it_belongs(
    dim, dtype, lengths, heads, causal, sparse, bad, seed
):
    call = case(dtype, heads, lengths, (dim, dim), batch=1, dlse=True)
    more = any_transform(np.random.default_rng(seed), sparse, 1, heads[0], *lengths)
    call = call._replace(options={**more, **(CAUSAL if causal else {})})
    for name, row, place, number in bad:
        x = getattr(call, name)
        x = x.reshape(-1, lengths[name in ("k", "v")], 1 if name == "dlse" else dim)
        x[place % len(x), int(row * x.shape[1]), place % x.shape[2]] = number
    check_spoiled(call, rows=rows_of(call), seed=seed)


# Of a kernel and a dim: what stands there, and what is put in its place.
BUGS = {
    "words of a mask are not looked at": (
        "bwd_nonfinite", 64, "words == nullptr || block_bit(", "true || block_bit(",
    ),
    "hidden blocks are gone through": (
        "bwd_nonfinite", 64, "if (pairs.mask.is_empty) continue;", "",
    ),
    "the mask of another head": (
        "bwd_nonfinite", 64, "block_words_index(mask, table_row(mask, entry,",
        "block_words_index(mask, table_row(mask, 0,",
    ),
    "keys and queries change places in a mask": (
        "bwd_nonfinite", 64, "mask_block_view(params.mask, entry, queries ? own : other,",
        "mask_block_view(params.mask, entry, queries ? other : own,",
    ),
    "the slope of a softcap is left out": ("bwd_nonfinite", 64, "* score.slope", ""),
    "the bias of another head": (
        "bwd_nonfinite", 64, "batch_offsets(p, entry), lse_delta_of(",
        "batch_offsets(p, first_entry), lse_delta_of(",
    ),
    "what a bias hides counts": (
        "bwd_nonfinite", 64, "is_visible = score.score != -FA_INFINITY;", "",
    ),
    "the scale is left out": (
        "bwd_nonfinite", 64, "kind == kTaskDv ? 1.0f : p.scale;", "1.0f;",
    ),
    "keys are not looked at": (
        "bwd_dkdv_sm80", 64, "if (nonfinite_probe.found()) {", "if (0) {",
    ),
    "queries are not looked at": (
        "bwd_dq_sm80", 64, "if (nonfinite_probe.found()) flag_nonfinite",
        "if (0) flag_nonfinite",
    ),
}  # fmt: skip


@functools.cache
def spoiled_call(dim):
    """All that the last launch has to know of; what is not finite is seen, and is hidden.

    With the kernels' gradients.
    """
    rng = np.random.default_rng(2)
    mask = blocks_of(rng, 4, 150, 200, density=0.6)
    mask[..., 140:150] = False
    bias = draw(4, 150, 200, dtype=np.dtype(np.float32))
    bias[:, :, 20:23] = -np.inf
    call = case("bfloat16", (4, 2), (150, 200), (dim, dim), batch=1, dlse=True, bias=bias,
                mask=mask, softcap=2.0)  # fmt: skip
    call.v[:, :, 20:23], call.k[:, :, 141], call.dout[:, 2:, 149, 5] = np.inf, np.nan, np.nan
    call.q[:, 1, 30], call.v[:, 1, 190] = np.nan, np.inf
    return call, solve(call, rows=rows_of(call))


@pytest.mark.long
def test_what_is_spoiled_by_all_kinds_of_hidden_pairs():
    call, _ = spoiled_call(64)
    check_spoiled(call, rows=rows_of(call))


@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0]))
def test_a_planted_bug_is_found(bug, tmp_path):
    kind, dim, *change = BUGS[bug]
    call, want = spoiled_call(dim)
    (row,) = (row for row in rows_of(call) if row.source.endswith(kind))
    sources = {row.entry: plant(tmp_path, row.source, change)}
    got = solve(call, rows=rows_of(call), sources=sources)
    assert any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True))
