"""Attention with the keys split over blocks of fwd_sm90, and fwd_join_splits, run on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention import fwd_sm90
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from tests.support.every_run import examples, some
from tests.support.kernel_attention import BANDS, DTYPES, PLAIN, any_sinks, check, draw, random_call
from tests.support.planted import plant

pytestmark = pytest.mark.emulator

ROWS = [row for (row,) in PLAIN if isinstance(row, FwdSm90)]
D128 = next(row for row in ROWS if (row.dim, row.dtype) == (128, "float16"))


@pytest.fixture
def split(monkeypatch):
    """Set how many parts the keys of plain calls are split into."""

    def set_to(count):
        def splits(traits, variant, multiprocessors):
            return count if variant.score is None else 1

        monkeypatch.setattr(fwd_sm90, "splits_of_keys", splits)

    return set_to


@pytest.mark.parametrize("row", some(ROWS, lambda row: row.dtype), ids=lambda row: row.name)
def test_every_row(row, split):
    split(3)
    q, k, v = (draw(2, n, row.dim, dtype=DTYPES[row.dtype], seed=n) for n in (150, 700, 700))
    for seed, band in enumerate(BANDS):
        check(row, q, k, v, seed=seed, **band)


@examples(15)
@given(st.sampled_from([(row,) for row in ROWS]), st.integers(0, 2**32), st.integers(2, 9))
def test_any_call(rows, seed, count):
    """Also more splits than there are tiles of keys."""
    text, call = random_call(rows, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fwd_sm90, "splits_of_keys",
            lambda traits, variant, multiprocessors: count if variant.score is None else 1,
        )  # fmt: skip
        try:
            call({})
        except AssertionError as error:
            raise AssertionError(f"{rows[0].name}, seed {seed}, {count}: {text}") from error


def test_heads_that_share_a_tile(split):
    """Their rows are those of one matrix to the keys that they share."""
    split(4)
    rng = np.random.default_rng(0)
    q = draw(2, 8, 20, 128, dtype=np.float16)
    k, v = (draw(2, 1, 900, 128, dtype=np.float16, seed=i) for i in (1, 2))
    check(D128, q, k, v, sinks=any_sinks(rng, 2, 8, 20), **BANDS[1])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_hidden_keys_never_show(garbage, split):
    split(5)
    q, k, v = (draw(1, n, 128, dtype=np.float16, seed=n) for n in (130, 900, 900))
    k[:, 800:] = v[:, 800:] = garbage
    check(D128, q, k, v, window=(None, 0), causal_align="top_left")


def test_large_scores_are_computed_again(split):
    split(3)
    q, k, v = (draw(1, n, 128, dtype=np.float16, seed=n, scale=s)
               for n, s in ((70, 900.0), (600, 900.0), (600, 1.0)))  # fmt: skip
    check(D128, q, k, v, scale=1.0)


def test_when_keys_are_split():
    """Few tiles of long keys are; not many, not short ones, and no other scores."""

    def splits(entries, q_len, k_len, **options):
        q, k = (np.empty((1, entries, n, 128), np.float16) for n in (q_len, k_len))
        problem = attention_problem.attention_problem(q, k, k, None, None, **options)
        out = attention_problem.out_view(problem, q.shape, q.strides)
        traits = Traits(problem, out)
        return fwd_sm90.splits_of_keys(traits, D128.for_score(traits.score), 132)

    assert splits(4, 512, 131072) == 8
    assert splits(4, 512, 131072, softcap=3.0) == 1
    assert splits(4, 512, 1024) == 1
    assert splits(16, 1024, 131072) == 1
    assert 8 <= splits(1, 128, 131072) <= fwd_sm90._MOST_SPLITS


BUGS = {
    "a tile of keys that no split has": (
        "tiles * (split + 1) / params.splits", "(tiles * (split + 1) - 1) / params.splits"),
    "all splits are the first one": (
        "work.split = split;", "work.split = 0;"),
    "a split of nothing has the first tile": (
        "return {past_end, past_end", "return {begin, begin"),
    "the sum of another row": (
        "make_float2(softmax.row_max[0][h], softmax.row_sum[0][h]);",
        "make_float2(softmax.row_max[0][h], softmax.row_sum[0][1 - h]);"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, tmp_path, split):
    source = plant(tmp_path, "attention/fwd_sm90", BUGS[bug])

    def calls_it():
        split(3)
        q, k, v = (draw(4, n, 128, dtype=np.float16, seed=n) for n in (20, 600, 600))
        check(D128, q, k[:1], v[:1], source=source)
        split(8)
        check(D128, q[:, :1], k, v, source=source, is_causal=True, causal_align="top_left")

    with pytest.raises(AssertionError):
        calls_it()
