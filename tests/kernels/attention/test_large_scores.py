"""Scores of any size in the forward kernels, their own source run on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.forward import VARIANTS
from tests.support.every_run import examples, only, some
from tests.support.kernel_attention import FORWARD_DTYPES
from tests.support.large_scores import (
    LARGEST,
    TRANSFORMS,
    beyond_float32,
    hold,
    hold_as_plain,
    one_key,
    random_scores,
    rising_scores,
    same_bias,
    spoiled_scores,
    whole_scores,
)
from tests.support.planted import plant
from validation.emulator import calls

pytestmark = pytest.mark.emulator

SM80 = [row for row in VARIANTS if not isinstance(row, FwdSm90)]
SM90 = [row for row in VARIANTS if isinstance(row, FwdSm90)]
PLAIN = [row for row in VARIANTS if not row.sparse]
# Of every dtype one row of each kernel, all tiles of head_dim 64 and 128 among them.
FEW = [r for r in PLAIN if (r.dim == 64) == (r.dtype == "float16") and r.dim in (64, 128)]
# Of each kernel one.
ONE = [row for row in FEW if row.dtype == "bfloat16"]
of_plain = pytest.mark.parametrize("row", only(PLAIN, *ONE), ids=lambda row: row.name)
of_few = pytest.mark.parametrize("row", only(FEW, *ONE), ids=lambda row: row.name)


def run(row, call, seed=0, source=None):
    *arrays, options = call
    return calls.attention(row, *arrays, seed, source, **options)


@examples(25)
@given(row=st.sampled_from(SM80), how=st.sampled_from((None, None, *TRANSFORMS)),
       heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]), narrow=st.integers(0, 9),
       lengths=st.tuples(st.integers(1, 140), st.integers(3, 270)),
       seed=st.integers(0, 2**32))  # fmt: skip
def test_whole_scores_on_sm80(row, how, heads, narrow, lengths, seed):
    dims = row.dim - narrow, row.dim - narrow // 2
    call = whole_scores(seed, FORWARD_DTYPES[row.dtype], dims, how, row.sparse, *lengths, heads)
    hold(call, *run(row, call, seed % 100))


@examples(25)
@given(row=st.sampled_from(SM90), how=st.sampled_from((None, None, *TRANSFORMS)),
       heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]), narrow=st.integers(0, 1),
       lengths=st.tuples(st.integers(1, 200), st.integers(3, 300)),
       seed=st.integers(0, 2**32))  # fmt: skip
def test_whole_scores_on_sm90(row, how, heads, narrow, lengths, seed):
    dims = row.dim - 8 * narrow, row.dim
    call = whole_scores(seed, FORWARD_DTYPES[row.dtype], dims, how, row.sparse, *lengths, heads)
    hold(call, *run(row, call, seed % 100))


@of_plain
@pytest.mark.parametrize("size", [1e5, 1e8])
def test_random_scores_are_as_good_as_plain_ones(row, size):
    call = random_scores(row.dim, FORWARD_DTYPES[row.dtype], (row.dim, row.dim), size)
    hold_as_plain(call, run(row, call)[0])


@of_plain
@pytest.mark.parametrize("size", [5000, 25000])
def test_one_key(row, size):
    for call in one_key(FORWARD_DTYPES[row.dtype], (row.dim, row.dim), size):
        hold(call, *run(row, call))


@of_plain
def test_far_keys_before_near_ones(row):
    call = rising_scores(FORWARD_DTYPES[row.dtype], (row.dim, row.dim))
    hold(call, *run(row, call))


@of_plain
def test_rows_that_are_not_finite_beside_large_scores(row):
    """A weight made of another sum of the same products would be off by whole powers of two."""
    call = spoiled_scores(FORWARD_DTYPES[row.dtype], (row.dim, row.dim), 1e8)
    hold_as_plain(call, run(row, call)[0])
    near = spoiled_scores(FORWARD_DTYPES[row.dtype], (row.dim, row.dim), 10)
    hold(near, *run(row, near))


@pytest.mark.long
@pytest.mark.parametrize("row", ONE, ids=lambda row: row.name)
@pytest.mark.parametrize("size", [3e18, 1e30])
def test_products_beyond_float32(row, size):
    for call in beyond_float32((row.dim, row.dim), size):
        hold(call, *run(row, call))


BIASES = (-1e4, -65504, -1e8, -1e9, -1e12, -LARGEST, LARGEST, 1e9)


@of_few
@pytest.mark.parametrize("size", only(BIASES, -1e9, LARGEST))
def test_the_same_bias_for_every_key(row, size):
    """Scores that are equal beside it get equal weights, as plain arithmetic gives them."""
    for call in same_bias(FORWARD_DTYPES[row.dtype], (row.dim, row.dim), size):
        out, lse = run(row, call)
        hold_as_plain(call, out)
        np.testing.assert_allclose(lse, call.bias[:, 0], rtol=1e-6, atol=6)


@of_few
def test_a_lost_row_does_not_spread_to_those_computed_again(row):
    call = whole_scores(3, FORWARD_DTYPES[row.dtype], (row.dim, row.dim))
    call = call._replace(q=np.ldexp(call.q[0, 0].astype(np.float32), 6).astype(call.q.dtype),
                         k=call.k[0, 0], v=np.nan_to_num(call.v[0, 0]))  # fmt: skip
    call.options.update(scale=2.0**60)
    call.q[17] = np.nan
    out, lse = run(row, call)
    assert np.isnan(lse[17])
    hold(call, out, lse)


def check_all(row, source=None):
    """Some calls of every kind, for a kernel in place of the row's own."""
    dtype, dims = FORWARD_DTYPES[row.dtype], (row.dim, row.dim)
    calls = one_key(dtype, dims, 25000)
    if row.dtype == "bfloat16":
        calls += beyond_float32(dims, 1e30)
    for call in calls:
        hold(call, *run(row, call, source=source))
    call = spoiled_scores(dtype, dims, 1e8)
    hold_as_plain(call, run(row, call, source=source)[0])
    for size in (-1e9, -LARGEST, LARGEST):
        for call in same_bias(dtype, dims, size):
            hold_as_plain(call, run(row, call, source=source)[0])


# What stands in the headers, what is put there instead; which kernel shows it.
BUGS = {
    "no row is far": ("fwd_sm80", ("< kCoarseScore) return false", "< FA_INFINITY) return false")),
    "infinite references are not far": (
        "fwd_sm90",
        ("< kCoarseScore)", "< kCoarseScore || fabsf(row_max) == FA_INFINITY)"),
    ),
    "rows below everything saw no key": (
        "fwd_sm80", ("p.bias == nullptr && first_key", "p.bias != nullptr && first_key"),
    ),
    "products in float32": ("fwd_sm80", ("dot_qk<kBf16, double>", "dot_qk<kBf16, float>")),
    "the bias times log2(e) by itself": (
        "fwd_sm80",
        ("fmaf(p.scale, s[j][e], bias.at(j, e));",
         "fmaf(p.scale, s[j][e], fmaf(kLog2e, bias.at(j, e), -0.44269504f * bias.at(j, e)));"),
    ),
    "the lowest bias hides": ("fwd_sm90", ("__fmul_rz(score, exp2_scale)", "score * exp2_scale")),
    "the log-sum-exp stays": ("fwd_sm80", ("p.lse[batch * p.q_len + row] = lse;", ";")),
    "the maximum stays": ("fwd_sm80", ("row_max = score;",
                                       "row_max = row_max < -1e300 ? score : row_max;")),
    "far rows trust the fast path": ("fwd_sm80", ("fabsf(row_max) >= kLargeScore", "false")),
}  # fmt: skip


@pytest.mark.long
@of_few
def test_all_kinds_of_calls(row):
    check_all(row)


@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0]))
def test_a_planted_bug_is_found(bug, tmp_path):
    kernel, change = BUGS[bug]
    row = next(r for r in FEW if r.source == f"attention/{kernel}" and r.dtype == "bfloat16")
    with pytest.raises(AssertionError):
        check_all(row, plant(tmp_path, row.source, change))
