"""merge_attention of Dask arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

dask = pytest.importorskip("dask")

import dask.array as da  # noqa: E402

import fa_cupy  # noqa: E402
from fa_cupy import dask as on_dask  # noqa: E402
from tests.dask.chunked import chunked, computed  # noqa: E402
from tests.support.every_run import examples  # noqa: E402
from tests.support.strategies import DTYPES, normal  # noqa: E402


@examples(40)
@given(
    data=st.data(), dtype=st.sampled_from(DTYPES), count=st.integers(1, 4), rows=st.integers(0, 9),
    batch=st.sampled_from([(), (3,), (2, 0), (2, 3)]), stacked=st.booleans(),
)  # fmt: skip
def test_any_chunks(data, dtype, count, rows, batch, stacked):
    rng = np.random.default_rng(0)
    outs = normal(rng, (count, *batch, rows, 3), dtype)
    lses = rng.standard_normal((count, *batch, rows)).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    want = fa_cupy.merge_attention(outs, lses)
    if stacked:
        arrays = data.draw(chunked(outs)), data.draw(chunked(lses))
    else:
        arrays = tuple([data.draw(chunked(x)) for x in parts] for parts in (outs, lses))
    got = on_dask.merge_attention(*arrays)
    for a, b in zip(computed(*got), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_errors_name_the_part():
    out, lse = da.zeros((4, 3)), da.zeros(4)
    for args, text in (
        (([out, out[:2]], [lse, lse]), r"outs\[1\] has shape \(2, 3\), outs\[0\] has \(4, 3\)"),
        (([out], [lse, lse]), "lses has 2 parts, outs has 1"),
        (([out[da.ones(4) > 0]], [lse]), r"outs\[0\] has chunks of unknown size along axis 0"),
        ((out[da.ones(4) > 0], lse), "outs has chunks of unknown size along axis 0"),
    ):
        with pytest.raises(ValueError, match=f"^merge_attention: {text}"):
            on_dask.merge_attention(*args)
