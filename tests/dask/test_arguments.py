"""Arguments of functions of Dask arrays: what is refused, by name, before a graph is made."""

import sys
import types

import ml_dtypes
import numpy as np
import pytest
from scipy import sparse

dask = pytest.importorskip("dask")

import dask.array as da  # noqa: E402

import fa_cupy  # noqa: E402
from fa_cupy import dask as on_dask  # noqa: E402

X = da.zeros((8, 4), chunks=(3, 4))
UNKNOWN = X[X[:, 0] == 0]
FUNCTIONS = {"attention": on_dask.attention, "causal_product": on_dask.causal_product,
             "linear_attention": on_dask.linear_attention}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("arrays", "error", "text"),
    [
        ((dask.delayed(np.zeros)((8, 4)), X, X), TypeError,
         r"q is a dask.Delayed, want a Dask array \(dask.array.from_delayed makes one\)"),
        ((X, [[1.0]], X), TypeError,
         "k is a list, want a Dask array, or an array of NumPy or CuPy"),
        ((X, X, None), TypeError, "v is None, want an array"),
        ((UNKNOWN, X, X), ValueError,
         r"q has chunks of unknown size along axis 0, .*q.compute_chunk_sizes\(\)"),
        ((X, X, UNKNOWN), ValueError, "v has chunks of unknown size along axis 0"),
        ((X.astype(object), X, X), TypeError, "q has dtype object, want float16"),
        ((X, X.astype(int), X), TypeError, "k has dtype int64, want float16"),
        ((X, X.astype("f4"), X), TypeError, "k has dtype float32, q has float64"),
        ((X, np.ma.zeros((8, 4)), X), TypeError, "k has masked arrays, want plain ones"),
        ((X, X[:, :3], X), ValueError, "k has (head_)?dim 3, q has 4"),
        ((X, X, X[:5]), ValueError, "v has length 5, k has 8"),
        ((X[0], X, X), ValueError, r"q has shape \(4,\), want at least 2 axes"),
        ((da.zeros((2, 8, 4)), da.zeros((3, 8, 4)), X), ValueError, r"k has batch shape \(3,\)"),
        ((X.map_blocks(sparse.csr_array, meta=sparse.csr_array((0, 0))), X, X), TypeError,
         r"q has chunks of scipy\.csr_array, want those of NumPy or CuPy"),
    ],
)  # fmt: skip
def test_errors(name, arrays, error, text):
    with pytest.raises(error, match=f"^{name}: {text}"):
        FUNCTIONS[name](*arrays)


@pytest.mark.parametrize(
    ("function", "options", "error", "text"),
    [
        ("attention", {"bias": UNKNOWN}, ValueError, "bias has chunks of unknown"),
        ("attention", {"bias": sparse.coo_array((8, 8))}, TypeError, "bias is a scipy.coo_array"),
        ("attention", {"mask": X}, TypeError, "mask has dtype float64, want bool"),
        ("attention", {"mask": fa_cupy.BitMask.from_dense(np.ones((8, 7), bool))}, ValueError,
         "mask has k_len 7, k has 8"),
        ("attention", {"sinks": da.zeros(3)}, ValueError, r"sinks has shape \(3,\)"),
        ("attention", {"scale": np.inf}, ValueError, "scale is inf"),
        ("attention", {"window": 3}, TypeError, "window is 3"),
        ("attention", {"return_lse": 2}, TypeError, "return_lse is 2"),
        ("causal_product", {"initial_state": da.zeros((4, 3))}, ValueError,
         r"initial_state has shape \(4, 3\), want \(..., 4, 4\)"),
        ("causal_product", {"algorithm": "recurrent"}, ValueError, "algorithm is 'recurrent'"),
        ("causal_product", {"reverse": "yes"}, TypeError, "reverse is 'yes'"),
        ("linear_attention", {"feature_map": "gelu"}, ValueError, "feature_map is 'gelu'"),
        ("linear_attention", {"feature_map": np.array([1, 2])}, ValueError,
         r"feature_map is array\(\[1, 2\]\) \(ndarray\), want one of 'elu1', 'relu', "),
        ("linear_attention", {"feature_map": lambda x: None}, TypeError,
         r"feature_map\(q\) is None \(NoneType\), want an array"),
        ("linear_attention", {"feature_map": lambda x: x.tolist()}, TypeError,
         r"feature_map\(q\) is \[\[1.0"),
        ("linear_attention", {"feature_map": lambda x: x[..., :1].astype("f4")}, ValueError,
         r"feature_map\(q\) has dtype float32 and shape \(1, 1\)"),
        ("linear_attention", {"eps": -1}, ValueError, "eps is -1"),
        ("linear_attention", {"initial_state": da.zeros((4, 4))}, ValueError,
         r"initial_state has shape \(4, 4\), want \(..., 4, 5\)"),
    ],
)  # fmt: skip
def test_errors_of_options(function, options, error, text):
    with pytest.raises(error, match=f"^{function}: {text}"):
        FUNCTIONS[function](X, X, X, **options)


def test_alignment_is_that_of_the_whole_lengths():
    with pytest.raises(ValueError, match=r"^attention: is_causal with 8 queries and 5 keys needs"):
        on_dask.attention(X, X[:5], X[:5], is_causal=True)


def test_chunks_of_two_libraries(monkeypatch):
    class ndarray:
        """The class of CuPy's arrays."""

        __module__ = "cupy"

    cupy = types.ModuleType("cupy")
    cupy.ndarray = ndarray
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    text = "^attention: v has chunks of cupy, q has chunks of numpy, want arrays of one library"
    with pytest.raises(TypeError, match=text):
        on_dask.attention(X, X, ndarray())


def test_arrays_of_numpy_are_one_chunk():
    x = np.random.default_rng(0).standard_normal((8, 4))
    out = on_dask.attention(X + x, x, x, mask=np.tril(np.ones((8, 8), bool)))
    assert isinstance(out, da.Array)
    assert out.chunks == ((3, 3, 2), (4,))
    np.testing.assert_allclose(out, fa_cupy.attention(x, x, x, is_causal=True))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_results_say_their_dtypes(dtype):
    x, sums = X.astype(dtype), np.float64 if dtype == np.float64 else np.float32
    pairs = (
        on_dask.attention(x, x, x, return_lse=True),
        on_dask.causal_product(x, x, x, return_state=True),
        on_dask.linear_attention(x, x, x, return_state=True),
        on_dask.merge_attention([x], [x[:, 0]]),
    )
    for out, other in pairs:
        for found, want in ((out, dtype), (other, sums)):
            assert found.dtype == want
            assert found.compute().dtype == want


def test_same_arguments_have_the_same_names():
    """So Dask computes what two graphs share once."""

    def names(**options):
        return on_dask.attention(X, X, X, **options).name

    assert names() == names(scale=0.5)
    assert len({names(), names(softcap=2.0), names(is_causal=True), names(sinks=np.ones(1))}) == 4
