"""Keys and values in pages in fwd_sm90, run on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import reference
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention import fwd_sm90
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.attention.splitkv.fwd_splitkv import FwdSplitkv
from tests.support.every_run import drawn, examples, only
from tests.support.kernel_attention import BANDS, DTYPES, PLAIN, any_sinks, check, draw
from tests.support.planted import plant
from validation.emulator import calls
from validation.emulator.launcher import EmulatorLauncher
from validation.keyed_calls import in_pages

pytestmark = pytest.mark.emulator

ROWS = [row for (row,) in PLAIN if isinstance(row, FwdSm90)]
D128 = next(row for row in ROWS if (row.dim, row.dtype) == (128, "float16"))
D64 = next(row for row in ROWS if (row.dim, row.dtype) == (64, "float16"))
LENGTHS = np.array([170, 0, 400, 129], np.int32)


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def splits(request, monkeypatch):
    """Into how many parts keys are split."""
    monkeypatch.setattr(fwd_sm90, "splits_of_keys", lambda *_: request.param)
    return request.param


def paged(row, size, lengths=LENGTHS, heads=(4, 2), q_len=150, k_len=400, seed=0, scale=1.0):
    """Queries, and keys and values in pages with NaN in rows that no entry has; the table."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        draw(len(lengths), n, rows, row.dim, dtype=DTYPES[row.dtype], seed=seed + i, scale=scale)
        for i, (n, rows) in enumerate(((heads[0], q_len), (heads[1], k_len), (heads[1], k_len)))
    )
    k, v, table = in_pages(rng, k, v, lengths, size)
    return q, k, v, table.astype(lengths.dtype)


@pytest.mark.parametrize("row", only(ROWS, D128), ids=lambda row: row.name)
@pytest.mark.parametrize("size", only((16, 48, 64, 128, 256), 16, 64))
def test_every_row(row, size, splits):
    q, k, v, table = paged(row, size)
    if fwd_sm90.boxes_of_pages(traits_of(q, k, v, table), row) is None:
        return  # another kernel's
    check(row, q, k, v, k_lengths=LENGTHS, page_table=table, seed=1, **BANDS[1])


@examples(8)
@given(
    drawn(ROWS, D128), st.sampled_from(BANDS), st.integers(17, 150), st.integers(1, 400),
    st.integers(1, 4), st.sampled_from([16, 32, 48, 64, 384]), st.integers(0, 2**31),
    st.sampled_from([np.int32, np.int64]), st.sampled_from([(2, 2), (4, 1), (6, 2)]),
)  # fmt: skip
def test_any_pages(row, band, q_len, k_len, count, size, seed, dtype, heads):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, k_len + 1, 2).astype(dtype)
    q, k, v, table = paged(row, size, lengths, heads, q_len, k_len, seed % 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fwd_sm90, "splits_of_keys", lambda *_: count)
        sinks = any_sinks(rng, 2, heads[0], q_len)
        more = {"k_lengths": lengths, "page_table": table, "sinks": sinks}
        if fwd_sm90.boxes_of_pages(traits_of(q, k, v, table), row) is not None:
            check(row, q, k, v, seed=seed % 97, **more, **band)


def test_large_scores_are_computed_from_pages():
    """Tiles whose row_max moves read their keys again, and so do rows that float32 cannot hold."""
    q, k, v, table = paged(D128, 16, scale=6.0)
    check(D128, q, k, v, k_lengths=LENGTHS, page_table=table)
    check(D128, q, k, v, k_lengths=LENGTHS, page_table=table, scale=1e7)


@pytest.mark.parametrize("bad", [-1, 99, 2**31 - 1])
@pytest.mark.parametrize("place", [0, 2])
def test_a_page_out_of_range_is_nan(bad, place, splits):
    """Of its sequence alone, and only where a key of the page counts."""
    for n in (256, 129, 128, 1):
        lengths = np.array([200, n])
        q, k, v, table = paged(D128, 64, lengths, q_len=40, k_len=256)
        table[1, place] = bad
        out, lse = calls.attention(D128, q, k, v, k_lengths=lengths, page_table=table)
        np.testing.assert_array_equal(np.isnan(lse), np.isnan(out[..., 0]))
        assert not np.isnan(lse[0]).any()
        assert np.isnan(out[1]).all() == np.isnan(out[1]).any() == (n > 64 * place)


def test_a_table_without_lengths(splits):
    """All keys of all pages count then."""
    lengths = np.full(2, 256)
    q, k, v, table = paged(D128, 32, lengths, k_len=256)
    check(D128, q, k, v, page_table=table)


def traits_of(q, k, v, table, **options):
    """Of a call with pages."""
    problem = attention_problem.attention_problem(
        q, k, v, None, None, k_lengths=np.zeros(len(q), np.int32), page_table=table, **options
    )
    return Traits(problem, attention_problem.out_view(problem, q.shape, q.strides))


def kernel_of(q_len, size=16, pages=40, target="sm_90a", dim=128, **options):
    """The kernel that a call with pages gets, on a device of this target."""
    q = np.empty((1, 8, q_len, dim), np.float16)
    k, table = np.empty((pages, 2, size, dim), np.float16), np.zeros((1, 128), np.int32)
    launcher = EmulatorLauncher()
    launcher.target = target
    plan = forward.make_plan(traits_of(q, k, k, table, **options), launcher)
    return type(plan.steps[0].variant)


def test_which_kernel_takes_pages():
    """More rows of plain scores fwd_sm90 does."""
    for q_len, options, kernel in (
        (1, {}, FwdSplitkv), (4, {}, FwdSplitkv), (300, {}, FwdSm90),
        (300, {"softcap": 2.0}, FwdSplitkv), (300, {"size": 48}, FwdSm90),
        (300, {"pages": 0}, FwdSplitkv), (300, {"target": "sm_80"}, FwdSplitkv),
        (300, {"dim": 192}, FwdSm90),
    ):  # fmt: skip
        assert kernel_of(q_len, **options) is kernel, (q_len, options)


BUGS = {
    "rows that are counted from the first page": ("key - page * params.page_size", "key"),
    "the pages of the first entry": (
        "element_of_entry(params.common, entry, params.page_table_batch), true", "0, true"),
    "a number of no page": (
        "has_invalid_page = 1", "has_invalid_page = 0"),
    "the table behind the last key": ("key < work.band.k_len) number", "true) number"),
    "rows computed again from where they would be without pages": (
        "[&](int key) { return keys.k(key); }",
        "[&](int key) { return keys.k(0) + int64(key) * p.k_row; }"),
}  # fmt: skip


@pytest.mark.parametrize("bug", only(BUGS, "the pages of the first entry"))
def test_planted_bugs_are_found(bug, tmp_path):
    source = plant(tmp_path, "attention/fwd_sm90", BUGS[bug])
    q, k, v, table = paged(D128, 32, scale=3.0)
    with pytest.raises(AssertionError):  # noqa: PT012
        check(D128, q, k, v, k_lengths=LENGTHS, page_table=table, source=source)
        table[2, 1] = len(k)
        out, _ = calls.attention(D128, q, k, v, k_lengths=LENGTHS, page_table=table, source=source)
        assert np.isnan(out[2]).all()


def test_the_reference_agrees_on_pages():
    """Of the numbers that the checks above are held against."""
    q, k, v, table = paged(D64, 16)
    want, _ = reference.attention(q, k, v, k_lengths=LENGTHS, page_table=table)
    assert np.isfinite(want[[0, 2, 3]]).all()
