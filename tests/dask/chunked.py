"""Dask arrays with drawn chunks, for tests."""

import dask
import dask.array as da
import numpy as np
from hypothesis import strategies as st


@st.composite
def chunks(draw, size):
    """Sizes of chunks along an axis: up to 4, some of them maybe 0."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))


@st.composite
def chunked(draw, array):
    """`array` as a Dask array with chunks along any axis; sometimes as it is."""
    if array is None or draw(st.sampled_from([True] + [False] * 5)):
        return array
    return da.from_array(array, chunks=tuple(draw(chunks(size)) for size in array.shape))


def computed(*arrays):
    """Compute Dask arrays together; their chunks have the sizes that the graph announced."""
    found = dask.compute(*(x.to_delayed().ravel().tolist() for x in arrays), scheduler="sync")
    results = []
    for x, blocks in zip(arrays, found, strict=True):
        whole = np.empty(x.shape, x.dtype)
        for where, block in zip(da.core.slices_from_chunks(x.chunks), blocks, strict=True):
            assert (block.dtype, block.shape) == (x.dtype, whole[where].shape)
            whole[where] = block
        results.append(whole)
    return results
