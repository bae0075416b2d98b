"""Types of the public functions: results are arrays of the kind of the first argument."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

from fa_cupy import dask as dask
from fa_cupy import distributed as distributed
from fa_cupy import jax as jax
from fa_cupy import layouts as layouts
from fa_cupy import plot as plot
from fa_cupy import reference as reference
from fa_cupy import torch as torch
from fa_cupy._bitmask import BitMask as BitMask
from fa_cupy._kv_cache import KVCache as KVCache
from fa_cupy._score import Score as Score

__version__: str
__all__: list[str]

class Array(Protocol):
    """An array of NumPy, CuPy or another library with DLPack."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...

class SparseMatrix(Protocol):
    """A sparse array or matrix of SciPy or CuPy."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    def tocsr(self) -> Any: ...

A = TypeVar("A", bound=Array)
_Window = tuple[int | None, int | None] | None
_FeatureMap = str | Callable[[Any], Any]

@overload
def attention(
    q: A,
    k: Array,
    v: Array,
    bias: Array | SparseMatrix | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: _Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    precision: str | None = None,
    return_lse: Literal[False] = False,
    score: Score | None = None,
    k_lengths: int | Array | None = None,
    page_table: Array | None = None,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    out: Array | None = None,
) -> A: ...
@overload
def attention(
    q: A,
    k: Array,
    v: Array,
    bias: Array | SparseMatrix | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: _Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    precision: str | None = None,
    return_lse: Literal[True],
    score: Score | None = None,
    k_lengths: int | Array | None = None,
    page_table: Array | None = None,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    out: Array | None = None,
) -> tuple[A, Any]: ...
@overload
def attention(
    q: A,
    k: Array,
    v: Array,
    bias: Array | SparseMatrix | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: _Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    precision: str | None = None,
    return_lse: bool,
    score: Score | None = None,
    k_lengths: int | Array | None = None,
    page_table: Array | None = None,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    out: Array | None = None,
) -> A | tuple[A, Any]: ...
@overload
def attention_backward(
    dout: A,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    bias: SparseMatrix,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: _Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    dlse: Array | None = None,
    need: Sequence[str] | None = None,
    score: Score | None = None,
    k_lengths: int | Array | None = None,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
) -> tuple[Any, ...]: ...
@overload
def attention_backward(
    dout: A,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    bias: Array | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: _Window = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    dlse: Array | None = None,
    need: Sequence[str] | None = None,
    score: Score | None = None,
    k_lengths: int | Array | None = None,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
) -> tuple[A, ...]: ...
def scaled_dot_product_attention(
    query: A,
    key: Array,
    value: Array,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: int | Array | None = None,
) -> A: ...
def dropout_mask(
    seed: int | Array,
    p: float,
    shape: tuple[int, ...],
    *,
    rows: slice | None = None,
    cols: slice | None = None,
    as_bits: bool = False,
) -> Any: ...
def merge_attention(outs: Sequence[A] | A, lses: Sequence[Array] | Array) -> tuple[A, Any]: ...
@overload
def causal_product(
    q: A,
    k: Array,
    v: Array,
    *,
    initial_state: Array | None = None,
    return_state: Literal[False] = False,
    reverse: bool = False,
    algorithm: str = "auto",
    q_offsets: Array | None = None,
    out: Array | None = None,
) -> A: ...
@overload
def causal_product(
    q: A,
    k: Array,
    v: Array,
    *,
    initial_state: Array | None = None,
    return_state: Literal[True],
    reverse: bool = False,
    algorithm: str = "auto",
    q_offsets: Array | None = None,
    out: Array | None = None,
) -> tuple[A, Any]: ...
@overload
def causal_product(
    q: A,
    k: Array,
    v: Array,
    *,
    initial_state: Array | None = None,
    return_state: bool,
    reverse: bool = False,
    algorithm: str = "auto",
    q_offsets: Array | None = None,
    out: Array | None = None,
) -> A | tuple[A, Any]: ...
def causal_product_backward(
    dout: A,
    q: Array,
    k: Array,
    v: Array,
    *,
    initial_state: Array | None = None,
    reverse: bool = False,
    q_offsets: Array | None = None,
    dstate: Array | None = None,
) -> tuple[A, ...]: ...
@overload
def linear_attention(
    q: A,
    k: Array,
    v: Array,
    *,
    feature_map: _FeatureMap = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Array | None = None,
    return_state: Literal[False] = False,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    out: Array | None = None,
) -> A: ...
@overload
def linear_attention(
    q: A,
    k: Array,
    v: Array,
    *,
    feature_map: _FeatureMap = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Array | None = None,
    return_state: Literal[True],
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    out: Array | None = None,
) -> tuple[A, Any]: ...
@overload
def linear_attention(
    q: A,
    k: Array,
    v: Array,
    *,
    feature_map: _FeatureMap = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Array | None = None,
    return_state: bool,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    out: Array | None = None,
) -> A | tuple[A, Any]: ...
def linear_attention_backward(
    dout: A,
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: _FeatureMap = "elu1",
    feature_map_gradient: Callable[[Any, Any], Any] | None = None,
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Array | None = None,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    dstate: Array | None = None,
) -> tuple[A, ...]: ...
def prefix_state(
    k: A,
    v: Array,
    ends: Sequence[int] | Any = None,
    *,
    q: Array | None = None,
    initial_state: Array | None = None,
    reverse: bool = False,
) -> Any: ...
def kernel_regression(
    x: Array,
    X: Array,
    y: A,
    bandwidth: Any,
    kernel: str = "gaussian",
    *,
    mask: Any = None,
) -> A: ...
def kernel_regression_backward(
    dout: A,
    x: Array,
    X: Array,
    y: Array,
    bandwidth: Any,
    kernel: str = "gaussian",
    *,
    mask: Any = None,
) -> tuple[A, A, A, Any]: ...
def non_local_means(
    image: A,
    h: float,
    patch_size: int = 7,
    patch_distance: int | None = 11,
    *,
    sigma: float = 0.0,
) -> A: ...
