"""Numbers of keys of batch entries in fwd_sm90, run on the CPU."""

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
from tests.support.every_run import examples, only, some
from tests.support.kernel_attention import BANDS, DTYPES, PLAIN, any_sinks, check, draw
from tests.support.planted import plant
from validation.emulator import calls
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator

ROWS = [row for (row,) in PLAIN if isinstance(row, FwdSm90)]
D128 = next(row for row in ROWS if (row.dim, row.dtype) == (128, "float16"))
LENGTHS = np.array([170, 0, 400, 129], np.int32)


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def splits(request, monkeypatch):
    """Into how many parts keys are split."""
    monkeypatch.setattr(fwd_sm90, "splits_of_keys", lambda *_: request.param)
    return request.param


def arrays(row, q_len=150, k_len=400, garbage=300.0, seed=0):
    """Those of four entries, with garbage behind the keys of each."""
    q, k, v = (
        draw(4, heads, n, row.dim, dtype=DTYPES[row.dtype], seed=seed + i)
        for i, (heads, n) in enumerate(((4, q_len), (2, k_len), (2, k_len)))
    )
    for b, n in enumerate(LENGTHS):
        k[b, :, n:] = v[b, :, n:] = garbage
    return q, k, v


@pytest.mark.parametrize("row", some(ROWS, lambda row: row.dtype), ids=lambda row: row.name)
@pytest.mark.parametrize("band", only(BANDS, BANDS[1]), ids=str)
def test_every_row(row, band, splits):
    check(row, *arrays(row), k_lengths=LENGTHS, seed=1, **band)


@examples(10)
@given(
    st.sampled_from(ROWS), st.sampled_from(BANDS), st.integers(17, 200), st.integers(1, 500),
    st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([np.int32, np.int64]),
)  # fmt: skip
def test_any_lengths(row, band, q_len, k_len, count, seed, dtype):
    rng = np.random.default_rng(seed)
    q, k, v = (
        draw(2, heads, n, row.dim, dtype=DTYPES[row.dtype], seed=seed % 1000 + i)
        for i, (heads, n) in enumerate(((3, q_len), (1, k_len), (1, k_len)))
    )
    lengths = rng.integers(0, k_len + 1, 2).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fwd_sm90, "splits_of_keys", lambda *_: count)
        sinks = any_sinks(rng, 2, 3, q_len)
        check(row, q, k, v, k_lengths=lengths, sinks=sinks, seed=seed % 97, **band)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_later_keys_never_show(garbage, splits):
    lengths = np.array([60, 0, 70, 1], np.int64)
    q, k, v = (x[:, :1, :70] for x in arrays(D128))
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = garbage
    check(D128, q, k, v, k_lengths=lengths)


def test_memory_behind_the_keys_may_hold_nan(splits):
    """Rows are not computed again for it: that would not end here."""
    check(D128, *arrays(D128, garbage=np.nan), k_lengths=LENGTHS)


def test_entries_that_share_all_keys_have_their_own_lengths(splits):
    q, k, v = (x[:, :4, :] for x in arrays(D128, garbage=0.5))
    check(D128, q, k[:1, :1], v[:1, :1], k_lengths=LENGTHS)


@pytest.mark.parametrize("bad", [-1, 401, 2**32 + 5])
def test_a_length_out_of_range_is_nan(bad, splits):
    q, k, v = arrays(D128)
    lengths = np.array([170, bad, 400, 129])
    out, lse = calls.attention(D128, q, k, v, k_lengths=lengths)
    want, want_lse = reference.attention(q, k, v, k_lengths=LENGTHS)
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    for b in (0, 2, 3):
        np.testing.assert_allclose(out[b], want[b], rtol=0, atol=4e-3)
        np.testing.assert_allclose(lse[b], want_lse[b], rtol=1e-4, atol=1e-4)


def plan_of(q_len, k_len=2048, target="sm_90a", **options):
    """The plan of a call with lengths, on a device of this target."""
    q, k = (np.empty((1, heads, n, 128), np.float16) for heads, n in ((8, q_len), (2, k_len)))
    problem = attention_problem.attention_problem(
        q, k, k, None, None, k_lengths=np.array([5]), **options
    )
    out = attention_problem.out_view(problem, q.shape, q.strides)
    launcher = EmulatorLauncher()
    launcher.target = target
    return forward.make_plan(Traits(problem, out), launcher)


def test_which_kernel_takes_lengths():
    """More rows of plain scores fwd_sm90 does; where an address does not suit it, another."""
    for q_len, options, kernel in (
        (1, {}, FwdSplitkv), (4, {}, FwdSplitkv), (5, {}, FwdSm90), (300, {}, FwdSm90),
        (300, {"softcap": 2.0}, FwdSplitkv),
    ):  # fmt: skip
        assert isinstance(plan_of(q_len, **options).steps[0].variant, kernel)
    assert isinstance(plan_of(300, target="sm_80").steps[0].variant, FwdSplitkv)
    assert isinstance(plan_of(300).fallback().steps[0].variant, FwdSplitkv)


BUGS = {
    "the band of all keys": ("length, params.band_from_end);", "length, 0);"),
    "the length of the first entry": (
        "element_of_entry(p, entry << params.row_shift, params.k_lengths_batch)", "0"),
    "rows out of range are not marked": ("kInvalidBound;\n#endif", "7;\n#endif"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, tmp_path, monkeypatch):
    source = plant(tmp_path, "attention/fwd_sm90", BUGS[bug])
    q, k, v = arrays(D128)
    with pytest.raises(AssertionError):  # noqa: PT012
        check(D128, q, k, v, k_lengths=LENGTHS, source=source, **BANDS[1])
        bad = np.array([170, 500, 400, 129])
        out, _ = calls.attention(D128, q, k, v, k_lengths=bad, source=source)
        assert np.isnan(out[1]).all()
