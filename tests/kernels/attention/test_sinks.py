"""Sinks in the kernels of attention and of its gradients, in the emulator."""

import numpy as np
import pytest

from tests.support.every_run import only, some
from tests.support.kernel_attention import (
    BANDS,
    FORWARD_DTYPES,
    PLAIN,
    SPARSE,
    any_sinks,
    blocks_of,
    check,
    draw,
)
from tests.support.kernel_gradients import ROWS, case, rows_sm80, rows_sm90, solve
from tests.support.kernel_gradients import check as check_gradients

pytestmark = pytest.mark.emulator
SINGLE = np.dtype(np.float32)
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}


def kind_of(which):
    row = which[0]
    return row.source, row.sparse


def options_of(row, **options):
    """Options with a softcap for one of the types."""
    return {"softcap": 3.0, **options} if row.dtype == "bfloat16" else options


def arrays_of(row, heads=(4, 2), lengths=(150, 200), batch=2):
    shapes = [(batch, heads[0], lengths[0]), *[(batch, heads[1], lengths[1])] * 2]
    return [
        draw(*shape, row.dim, dtype=FORWARD_DTYPES[row.dtype], seed=i)
        for i, shape in enumerate(shapes)
    ]


def first(source, **which):
    """The smallest row of a kernel for calls without a mask, and with `which` attributes."""
    rows = [row for (row,) in PLAIN if row.source == f"attention/{source}"]
    return min((row for row in rows if all(getattr(row, name) == x for name, x in which.items())),
               key=lambda row: row.dim)  # fmt: skip


FIRST = [first("fwd_sm80"), first("fwd_sm90")]


@pytest.mark.parametrize("row", some(PLAIN, kind_of))
@pytest.mark.parametrize("band", only(range(3), 1))
def test_any_row(row, band):
    arrays, rng = arrays_of(row, heads=(2, 1)), np.random.default_rng(band)
    for _ in range(3):
        check(row, *arrays, sinks=any_sinks(rng, 2, 2, 150), **options_of(row, **BANDS[band]))


@pytest.mark.long
@pytest.mark.parametrize("row", some(SPARSE, kind_of))
def test_any_row_for_masks(row):
    arrays, rng = arrays_of(row, lengths=(150, 300)), np.random.default_rng(0)
    mask = blocks_of(rng, 4, 150, 300)
    mask[1, :140] = False  # rows that see nothing, in a whole tile
    for band in BANDS[:2]:
        check(row, *arrays, mask, sinks=any_sinks(rng, 2, 4, 150), **options_of(row, **band))


@pytest.mark.parametrize("row", FIRST, ids=lambda row: row.name)
def test_rows_that_see_no_key(row):
    """In the tiles of other rows, in tiles of their own, and where there is none."""
    sinks = np.linspace(-60, 60, 300, dtype=SINGLE)
    sinks[5] = -np.inf
    q, k, v = arrays_of(row, lengths=(300, 40))
    band = {"window": (3, 3), "causal_align": "bottom_right"}
    out, lse = check(row, q, k, v, sinks=sinks, **band)
    assert not out[..., :250, :].any()
    np.testing.assert_allclose(lse[..., :250], np.broadcast_to(sinks[:250], (2, 4, 250)), 1e-6)


@pytest.mark.parametrize("row", FIRST, ids=lambda row: row.name)
@pytest.mark.parametrize("lengths", [(70, 60), (300, 40)])
def test_sinks_at_the_ends_of_their_range(row, lengths):
    """Rows with and without keys; what is neither finite nor -inf makes the row NaN."""
    largest = np.finfo(np.float32).max
    values = [np.nan, np.inf, -np.inf, largest, -largest, 1e30, -1e30, 1e5, 1e9, 200, -200, 0]
    sinks = np.resize(np.asarray(values, SINGLE), lengths[0])
    out, lse = check(row, *arrays_of(row, lengths=lengths), sinks=sinks, **CAUSAL)
    spoiled = np.isnan(sinks) | (sinks == np.inf)
    assert (np.isnan(lse) == spoiled).all()
    assert (np.isnan(out.astype(SINGLE)) == spoiled[:, None]).all()
    above = (sinks >= 1e5) & ~spoiled
    assert (np.abs(lse[..., above] / sinks[above] - 1) < 1e-6).all()


@pytest.mark.parametrize("row", only(FIRST, FIRST[1]), ids=lambda row: row.name)
def test_rows_that_are_computed_again(row):
    """Because a key that they do not see has no number as value, or by the size of their scores."""
    sinks = np.full((2, 200), 2.0, SINGLE)
    q, k, v = arrays_of(row, heads=(2, 1), lengths=(200, 200), batch=1)
    v[..., 100, :] = np.nan
    q[..., 50, :], k[..., 20, :] = 0, 0
    q[..., 50, 0], k[..., 20, 0] = 2.0**13, 2.0**13
    sinks[:, 50] = 2.0**26
    out, _ = check(row, q, k, v, sinks=sinks, **options_of(row, scale=1.0, **CAUSAL))
    half = v[..., 20, :].astype(SINGLE).repeat(2, axis=1) / 2
    np.testing.assert_allclose(out[..., 50, :].astype(SINGLE), half, rtol=0, atol=2.0**-7)


@pytest.mark.parametrize("shape", [(8, 1), (8, 5), (2, 1, 1), (5,)], ids=str)
def test_heads_that_share_tiles_have_sinks_of_their_own(shape):
    row = first("fwd_sm90")
    arrays = arrays_of(row, heads=(8, 1), lengths=(5, 200))
    check(row, *arrays, sinks=draw(*shape, dtype=SINGLE, seed=7, scale=3.0))


@pytest.mark.long
def test_more_batch_axes_than_a_launch_walks():
    row, rng = first("fwd_sm80"), np.random.default_rng(0)
    shape, other = (2, 1, 2, 1, 2, 1, 2, 1, 2), (1, 2, 1, 2, 1, 2, 1, 2, 1)  # which do not merge
    dtype = FORWARD_DTYPES[row.dtype]
    q = draw(*shape, 3, 16, dtype=dtype, seed=1)
    k, v = (draw(*other, 5, 16, dtype=dtype, seed=i) for i in (2, 3))
    sinks = rng.normal(size=(2, 1, 1, 2, 2, 1, 1, 2, 1, 3))
    check(row, q, k, v, sinks=sinks)


def kind_of_gradients(which):
    (rows,) = which
    return rows[1].source, rows[1].sparse


@pytest.mark.parametrize("rows", some([(rows,) for rows in ROWS], kind_of_gradients))
def test_gradients(rows):
    rng, dim = np.random.default_rng(0), rows[1].dim
    options = {"sinks": any_sinks(rng, 2, 4, 150), **CAUSAL}
    if rows[1].sparse:
        options["mask"] = blocks_of(rng, 4, 150, 200)
    call = case(rows[0].dtype, (4, 2), (150, 200), (dim, dim), dlse=True, **options)
    check_gradients(call, rows=rows)


@pytest.mark.parametrize(("dim", "hopper"), [(64, True), (64, False)])
@pytest.mark.parametrize("score", only((1e3, 5.7e3, 1e5, 1e7), 5.7e3, 1e7))
@pytest.mark.parametrize("lengths", [(5, 1), (70, 70)])
def test_a_key_with_the_score_of_its_sink_has_half_the_weight(dim, hopper, score, lengths):
    """Where the log-sum-exp is too large for weights, the sink is among what is summed again."""
    call = case("bfloat16", (2, 1), lengths, (dim, dim), batch=1)
    score = float(call.q.dtype.type(score))
    sinks = np.full((2, 1), score, np.float64)
    call = call._replace(options={"scale": 1.0, "window": (0, 0), "sinks": sinks,
                                  "causal_align": "top_left"})  # fmt: skip
    call.q[...], call.k[...], call.dout[...] = 0, 0, 0
    call.q[..., 0], call.k[..., 0], call.dout[..., 0, 3] = score, 1, 1
    rows = (rows_sm90 if hopper else rows_sm80)("bfloat16", dim, dim)
    dv = solve(call, rows=rows)[2].astype(np.float64)
    np.testing.assert_allclose(dv[..., 0, 3], 1.0, rtol=2.0**-8)  # of two heads


@pytest.mark.parametrize(("dim", "hopper"), [(64, True), (64, False)])
def test_a_sink_with_a_large_log_sum_exp_leaves_keys_no_weight(dim, hopper):
    rng = np.random.default_rng(0)
    sinks = rng.choice([1e4, 1e9, 3e38, 0.0], (4, 150)).astype(SINGLE)
    call = case("float16", (4, 2), (150, 140), (dim, dim), dlse=True, sinks=sinks, **CAUSAL)
    rows = (rows_sm90 if hopper else rows_sm80)("float16", dim, dim)
    got = check_gradients(call, rows=rows)
    assert not got[0][:, sinks > 0].any()
