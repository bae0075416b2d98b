"""Attention, its gradients, and the merging of results over parts of the keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from fa_cupy._score import Score, arrays_of, operands_of
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, checks, dispatch
from fa_cupy.dropout import arguments as dropout_arguments
from fa_cupy.keys.arguments import Places

TORCH_ARGS = ("query", "key", "value", "attn_mask", "attn_mask")
_NEED = ("q", "k", "v", "bias", "sinks")

# Array type -> the backend's function for calls that need no preparation; it returns None for all
# others. The GPU backend adds its own with the first CuPy array, so that CuPy is never imported for
# NumPy input.
_CACHED: dict[type, Callable[..., Any]] = {}
_CACHED_BACKWARD: dict[type, Any] = {}


def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    precision: str | None = None,
    return_lse: bool = False,
    score: Score | None = None,
    k_lengths: Any = None,
    page_table: Any = None,
    q_offsets: Any = None,
    k_offsets: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    out: Any = None,
) -> Any:
    """Scaled dot-product attention, exact, without an array of size Lq x Lk.

    Computes ``softmax(scale * q @ k.mT + bias) @ v`` over the last two axes; the axes before them,
    30 at most, are batch axes that broadcast as in `numpy.matmul`.

    Parameters
    ----------
    q : array, shape (..., Lq, D)
        Queries: an array of NumPy, CuPy or any library that supports DLPack (PyTorch, JAX, ...), of
        dtype float16, bfloat16 (`ml_dtypes.bfloat16`), float32 or float64 in native byte order. Any
        strides.
    k : array, shape (..., Lk, D)
        Keys, of the same library, device and dtype.
    v : array, shape (..., Lk, Dv)
        Values. With 4 axes or more in each of `q`, `k` and `v`, the keys and values may have fewer
        heads (axis -3) than the queries, if their number divides that of the queries: grouped-query
        attention.
    bias : array, broadcastable to (..., Lq, Lk), or sparse matrix, shape (Lq, Lk), optional
        Added to the scores; any of the four dtypes. A sparse matrix or array is one of SciPy, or of
        CuPy where the arrays are on a GPU. Its stored elements are added to the scores of their
        pairs; a stored 0 counts as an element. Without `mask` a query attends to the keys of its
        stored elements, and to no others. With `mask`, pairs without a stored element have a bias
        of 0. All batch entries and heads share the matrix. Several elements of one pair are summed
        on the CPU. On a GPU they are an error; there, the format is CSR, CSC or COO, and `mask` is
        None, a `BitMask` or a sparse matrix. A sparse bias cannot be combined with `k_lengths`,
        `page_table` or offsets.
    mask : array of bool, broadcastable to (..., Lq, Lk), or BitMask, optional
        True where a query may attend to a key. The batch axes of a `BitMask` broadcast, its lengths
        must be those of `q` and `k`. On a GPU the first call copies the lists of a `BitMask` to the
        device and keeps them; an array is packed again in every call. So is a sparse matrix of
        SciPy or CuPy, whose elements are not 0 where a query may attend to a key
        (`BitMask.from_csr`). With offsets in the memory of the host it may also be a list with a
        `BitMask` or a sparse matrix for each sequence, of the lengths of that sequence. With
        `k_lengths` or `page_table` it has to be an array of bool.
    scale : float, optional
        Any finite factor; ``D ** -0.5`` by default. Unless q has float64, one beyond the largest
        number of float32 counts as that number.
    is_causal : bool
        Whether a query sees only the keys up to its own position.
    causal_align : {"top_left", "bottom_right"}, optional
        Position of query i among the keys: i or ``i + Lk - Lq``. `is_causal` and `window` need it
        where Lq != Lk.
    window : (left, right), optional
        Number of keys that a query sees before and after its own position; None sets no limit on
        that side. A key is visible if mask, causality and window all allow it.
    softcap : float
        If positive, scores are ``softcap * tanh(scale * q @ k.mT / softcap)`` before the bias.
    sinks : array, broadcastable to (..., Lq), optional
        Attention sinks [4]_: one more score for each query, which takes part in the softmax and has
        no value, so that the weights of the keys sum to less than 1. It is neither scaled, capped
        nor masked, and no `score` is evaluated for it; a sink of -inf has no effect. Any of the
        four dtypes; of shape (heads, 1) for one number a head. Unless q has float64, a sink beyond
        the largest number of float32 counts as infinite; one of +inf makes its row NaN.
    precision : {None, "tf32"}
        "tf32" lets a GPU compute products of float32 arrays in TensorFloat-32, with about 3
        decimal digits. It has no effect on other arrays.
    return_lse : bool
        Whether to return the log-sum-exp of each row of scores too.
    score : Score, optional
        An expression whose value takes the place of the score of each query and key. It may use
        the score after the softcap, the batch entry, the head, the positions and arrays, which are
        of the library and on the device of `q`. A bias is added to its value.
    k_lengths : int or array of int32 or int64, optional
        How many keys each batch entry has, from 0 to Lk; the shape of an array broadcasts with the
        batch axes before the heads: (batch,) for `q` of shape (batch, heads, Lq, D). What `k`, `v`,
        `bias` and `mask` hold for later keys is ignored. `is_causal` and `window` need
        `causal_align`, and "bottom_right" lets query i stand at ``i + k_lengths[b] - Lq``.
    page_table : array of int32 or int64, shape (..., pages_per_sequence), optional
        The pages of each batch entry, in the order of its keys. The axes before the last one
        broadcast with the batch axes before the heads. `k` is then an array (pages, heads,
        page_size, D) and `v` one (pages, heads, page_size, Dv), where page_size is a multiple of
        16: key j of entry b is row ``j % page_size`` of page ``page_table[b, j // page_size]``, and
        Lk is ``pages_per_sequence * page_size``. Entries may share pages. Page numbers after the
        last page in use are ignored.
    q_offsets : array of int32 or int64, shape (sequences + 1,), optional
        Where packed sequences begin, and where the last one ends: sequence s has the queries
        ``q_offsets[s]`` to ``q_offsets[s + 1] - 1`` and sees its own keys alone. All batch entries
        and heads share the offsets. Queries of no sequence see no key. `is_causal`, `window` and
        the positions of a `score` count within each sequence. `bias`, `mask` and `sinks` are over
        all queries and keys, and their elements for a query and a key of different sequences are
        not read. Offsets cannot be combined with `k_lengths` or `page_table`.
    k_offsets : array of int32 or int64, shape (sequences + 1,), optional
        The same for the keys; `q_offsets` by default. With it, `is_causal` and `window` need
        `causal_align`, and "bottom_right" lets the last query of a sequence stand at its last key.
    dropout : float, optional
        The probability that a weight is dropped, from 0 to 1: its product with the value of the key
        is left out, and the others are multiplied by ``1 / (1 - dropout)``. The log-sum-exp is that
        of all scores. On a GPU not together with a sparse bias.
    seed : int or array of one integer, optional
        Determines which weights are dropped (`dropout_mask` returns those that are kept), from 0 to
        2**64 - 1. `dropout` needs it. An array is read in each call. An array on a GPU is of int64
        or uint64; a CUDA graph that the call was captured in reads it at each launch.
    out : array, shape (..., Lq, Dv), optional
        Array for the output: of the library and the dtype of `q`, without overlap with an input.
        Not for JAX, whose arrays cannot be written to.

    Returns
    -------
    out : array, shape (..., Lq, Dv)
        Of the library, the dtype and the memory layout of `q`.
    lse : array, shape (..., Lq)
        Only with `return_lse`: natural logarithm; float32, or float64 for float64 input. The sinks
        are among the scores that it sums.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, its value and the value that is wanted, before
        anything is allocated. A tensor of PyTorch that requires a gradient is a TypeError too:
        `fa_cupy.torch` has the functions that record gradients.
    NotImplementedError
        During the capture of a CUDA graph, for calls that the page "CUDA graphs" of the docs lists
        as not captured: dims above 256, a `score` together with a softcap or a bias, a sparse
        `bias`, `dropout` of float64, and lengths, pages and offsets in the memory of the host. The
        capture can go on then. In a capture mode other than "relaxed" the first call with a
        `BitMask` raises it too, because it takes memory from the driver, and the capture ends.

        Outside of a capture, for a `score` with `i` or `j` and offsets in the memory of a GPU; and
        for a sparse `bias` on a GPU with float64, dims above 256, `dropout`, a quotient of scale
        and softcap that float32 does not hold, or too many pairs for one launch.
    ImportError
        For arrays of another library on a GPU, where CuPy is not installed.

    See Also
    --------
    merge_attention : combine results over disjoint sets of keys.
    Score : scores by an expression.
    dropout_mask : the weights that are kept with dropout.

    Notes
    -----
    Scores are computed tile by tile with the online softmax of [1]_, as in [2]_ and [3]_, in
    float32 (float64 for float64 input). Results are bitwise repeatable; on a CPU without the wheel
    scipy-openblas32, only with the same number of threads in NumPy's BLAS.

    A query without visible keys (all masked, or every score exactly -inf) gives output 0, and as
    log-sum-exp its sink, -inf without one. The contents of masked keys and values, NaN included,
    never reach the output (where they are not finite, the CPU may sum in another order, which
    changes the last bits).

    Numbers of `k_lengths`, `page_table` and offsets in the memory of the host are checked. Those on
    a GPU are not read back: there, output and log-sum-exp are NaN for a batch entry whose length is
    out of range, for queries that see a key of a page that does not exist, and for a sequence one
    of whose offsets is out of range or below one before it.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax",
       arXiv:1805.02867, 2018.
    .. [2] T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Re, "FlashAttention: fast and
       memory-efficient exact attention with IO-awareness", NeurIPS, 2022.
    .. [3] T. Dao, "FlashAttention-2: faster attention with better parallelism and work
       partitioning", ICLR, 2024 (arXiv:2307.08691, 2023).
    .. [4] G. Xiao, Y. Tian, B. Chen, S. Han and M. Lewis, "Efficient streaming language models with
       attention sinks", ICLR, 2024 (arXiv:2309.17453, 2023).

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 8, 100, 64), (2, 8, 100))

    The first query sees only the first key:

    >>> bool(np.allclose(out[:, :, 0], v[:, :, 0]))
    True

    Data of shape (batch, length, heads, dim) needs no copy:

    >>> x = rng.standard_normal((2, 100, 8, 64), dtype=np.float32).swapaxes(-3, -2)
    >>> attention(x, k, v).strides == x.strides
    True

    A sparse bias holds weights of single pairs. A query sees the keys of its stored elements:

    >>> from scipy import sparse
    >>> weights = sparse.coo_array(([0.0, 1.0, 0.5], ([0, 1, 1], [2, 0, 3])), shape=(100, 100))
    >>> out = attention(q, k, v, weights)
    >>> bool(np.allclose(out[:, :, 0], v[:, :, 2]))
    True

    Sequences of 30, 50 and 20 tokens, end to end:

    >>> offsets = np.array([0, 30, 80, 100])
    >>> out = attention(q, k, v, is_causal=True, q_offsets=offsets)
    >>> second = slice(30, 80)
    >>> alone = attention(*(x[:, :, second] for x in (q, k, v)), is_causal=True)
    >>> bool(np.allclose(out[:, :, second], alone, atol=1e-5))
    True

    A sink takes half of the weight of one key with the same score:

    >>> attention(np.zeros((1, 2)), np.zeros((1, 2)), np.ones((1, 3)), sinks=np.zeros(1))
    array([[0.5, 0.5, 0.5]])
    """
    plain = score is None and seed is None and dropout.__class__ is float and dropout == 0.0
    cached = _CACHED.get(type(q)) if plain else None
    if cached is not None:
        result = cached(
            q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, sinks, precision,
            return_lse, k_lengths, page_table, q_offsets, k_offsets, out,
        )  # fmt: skip
        if result is not None:
            return result
    return _solve(
        "attention",
        attention_problem.ARGS,
        (q, k, v, bias, mask),
        out,
        return_lse,
        sinks=sinks,
        score=score,
        dropout=(dropout, seed),
        places={
            "k_lengths": k_lengths,
            "page_table": page_table,
            "q_offsets": q_offsets,
            "k_offsets": k_offsets,
        },
        scale=scale,
        is_causal=is_causal,
        causal_align=causal_align,
        window=window,
        softcap=softcap,
        precision=precision,
    )


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: Any = None,
) -> Any:
    """Attention with the names and the meaning of PyTorch's function.

    Names, defaults and meaning of the arguments are those of [1]_.

    Parameters
    ----------
    query : array, shape (..., L, E)
    key : array, shape (..., S, E)
    value : array, shape (..., S, Ev)
        Queries, keys and values, as in `attention`.
    attn_mask : array, broadcastable to (..., L, S), or BitMask, optional
        An array of bool, True where a query attends to a key, or of floats that are added to the
        scores. A sparse matrix must be of bool.
    dropout_p : float
        The `dropout` of `attention`. It needs a `seed`, because there is no global generator here.
    is_causal : bool
        Causality aligned to the top left: query i sees the keys up to i, whatever L and S are. It
        cannot be combined with `attn_mask`.
    scale : float, optional
        ``E ** -0.5`` by default.
    enable_gqa : bool
        Whether `key` and `value` may have fewer heads (axis -3) than `query`.
    seed : int or array of one integer, optional
        As in `attention`; PyTorch's function has no such argument.

    Returns
    -------
    array, shape (..., L, Ev)
        Of the library, the dtype and the memory layout of `query`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `attention`. A ValueError also for `attn_mask` together with `is_causal`, and for
        fewer heads in `key` or `value` without `enable_gqa`; a single head is no error.

    See Also
    --------
    attention : the function that this one calls, with more options.

    References
    ----------
    .. [1] https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import scaled_dot_product_attention
    >>> x = np.eye(3)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.36, 0.64, 0.  ],
           [0.26, 0.26, 0.47]])
    """
    name = "scaled_dot_product_attention"
    attention_problem.torch_options(name, attn_mask, is_causal)
    is_mask = str(getattr(attn_mask, "dtype", "")).rpartition(".")[2] == "bool"
    if checks.is_sparse(attn_mask) and not is_mask:
        raise _is_no_bool(name, attn_mask, ", or attention(..., bias=attn_mask)")
    bias, mask = (None, attn_mask) if is_mask else (attn_mask, None)
    return _solve(
        name,
        TORCH_ARGS,
        (query, key, value, bias, mask),
        grouped=checks.flag(name, "enable_gqa", enable_gqa),
        dropout=(dropout_p, seed),
        scale=scale,
        is_causal=is_causal,
        causal_align="top_left",
        window=None,
        softcap=0.0,
        precision=None,
    )


def check_attn_mask(name: str, attn_mask: Any) -> None:
    """Raise for a sparse matrix that is not of bool."""
    if checks.is_sparse(attn_mask) and attn_mask.dtype != np.bool_:
        raise _is_no_bool(name, attn_mask)


def _is_no_bool(name: str, attn_mask: Any, or_else: str = "") -> TypeError:
    return TypeError(
        f"{name}: attn_mask is a sparse matrix of {attn_mask.dtype}, want bool (cast it: "
        f"attn_mask != 0){or_else}"
    )


def _solve(
    name: str,
    args: tuple[str, ...],
    arrays: tuple[Any, ...],
    out: Any = None,
    return_lse: Any = False,
    grouped: bool = True,
    sinks: Any = None,
    score: Score | None = None,
    dropout: tuple[Any, Any] = (0.0, None),
    places: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """Check a call, run it on the backend of its arrays and answer in their kind."""
    dispatch.require(name, **dict(zip(args[:3], arrays, strict=False)))
    where = Places(name, args[-1], **places)
    q = arrays[0]
    arrays = tuple(dispatch.sparse_inputs(name, args, where.without_masks(arrays)))
    sparse = dispatch.sparse(arrays)
    kept = [x is None or as_it_is for x, as_it_is in zip(arrays, sparse, strict=True)]
    # Bias and mask of scaled_dot_product_attention go by one name, and at most one is given.
    named = [*zip(args, arrays, kept, strict=True)]
    given = {arg: x for arg, x, as_it_is in named if not as_it_is}
    given |= arrays_of(name, score) | where.separated(arrays)
    given |= dropout_arguments.arrays_of(dropout[1])
    native = core_arrays.to_native(name, **given, sinks=sinks, out=out)
    by_arg = dict(zip(given, native.arrays, strict=False))
    where.native(by_arg)
    inputs = [x if as_it_is else by_arg[arg] for arg, x, as_it_is in named]
    (sinks, result), operands = native.arrays[-2:], operands_of(score, by_arg)
    dense = dispatch.dense_inputs(name, native, inputs, result)
    p, seed = dropout[0], by_arg.get("seed", dropout[1])
    dropped = dropout_arguments.of_arguments(
        name, p, seed, "dropout_p" if args == TORCH_ARGS else "dropout"
    )
    options |= where.options
    problem = attention_problem.attention_problem(
        *dense, sinks=sinks, score=operands, dropout=dropped, out=result, name=name, args=args,
        grouped=grouped, **options,
    )  # fmt: skip
    with_lse = checks.flag(name, "return_lse", return_lse)
    backend = dispatch.backend_of(native, "attention")
    where.check(problem)
    if inputs[0] is q:  # an array of NumPy or CuPy itself
        _CACHED[type(q)] = backend.cached
    with native.context:
        result = dispatch.result_for(native, problem, inputs[0], result)
        extra = dispatch.score_for(name, operands) | where.for_backend(native.backend)
        inputs = where.inputs(inputs)
        result, lse = backend.attention(problem, *inputs, result, with_lse, sinks, **extra)
        answer = native.give_back(result) if out is None else out
        return (answer, native.give_back(lse)) if with_lse else answer


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    dlse: Any = None,
    need: Sequence[str] | None = None,
    score: Score | None = None,
    k_lengths: Any = None,
    q_offsets: Any = None,
    k_offsets: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `attention` with respect to its arrays, without an array of size Lq x Lk.

    Parameters
    ----------
    dout : array, shape (..., Lq, Dv)
        Gradient of the output, with its shape and dtype.
    q : array, shape (..., Lq, D)
    k : array, shape (..., Lk, D)
    v : array, shape (..., Lk, Dv)
        The arguments of `attention`.
    out : array, shape (..., Lq, Dv)
    lse : array, shape (..., Lq)
        The results of `attention` for them, with ``return_lse=True``. If `k` and `v` are a part of
        the keys, these are the merged results, over all keys (see Notes).
    bias : array, broadcastable to (..., Lq, Lk), or sparse matrix, shape (Lq, Lk), optional
    mask : array of bool, broadcastable to (..., Lq, Lk), or BitMask, optional
    scale : float, optional
    is_causal : bool
    causal_align : {"top_left", "bottom_right"}, optional
    window : (left, right), optional
    softcap : float
    sinks : array, broadcastable to (..., Lq), optional
        The other arguments of that call; there is no `precision` here.
    dlse : array, shape (..., Lq), optional
        Gradient of the log-sum-exp, with its shape and dtype; zero by default.
    need : sequence of {"q", "k", "v", "bias", "sinks", "score.<name>"}, optional
        The gradients to compute; by default those of `q`, `k`, `v` and, if they are given, `bias`
        and `sinks`. "score.slopes" is that of the array `slopes` of `score`, which must hold floats
        and have no indices but `b`, `h`, `i` and `j` in the expression. Gradients of such arrays
        are computed only if `need` has them.
    score : Score, optional
        That of the call of `attention`.
    k_lengths : int or array of int32 or int64, optional
    q_offsets : array of int32 or int64, shape (sequences + 1,), optional
    k_offsets : array of int32 or int64, shape (sequences + 1,), optional
        Those of that call. There are no gradients for calls with a `page_table`.
    dropout : float, optional
    seed : int or array of one integer, optional
        Those of that call.

    Returns
    -------
    tuple of arrays
        The gradients in the order of `need`, each with the shape, the dtype and the memory layout
        of its argument: summed over the axes along which the argument was broadcast, and over the
        query heads that share a key head. That of a sparse `bias` is a sparse matrix of its type
        and format, with the elements of ``bias.tocsr()``. Its array `data` is in the order of
        ``bias.data`` if `bias` is in CSR, CSC, COO or BSR format and stores no pair twice.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, its value and the value that is wanted, before
        anything is allocated.
    NotImplementedError
        During the capture of a CUDA graph, for calls that the page "CUDA graphs" of the docs lists
        as not captured: what `attention` does not capture, the gradient of an array of a `score`,
        `dropout` of float32 and float64, and some dims. Outside of a capture, where `attention`
        raises it; for a sparse `bias` on a GPU, also with `sinks`, with the gradient of an array of
        a `score`, and with a mask that differs between query heads that share a key head.

    See Also
    --------
    attention : its notes on dtypes, shapes and hidden keys apply here too.

    Notes
    -----
    The weights are computed again tile by tile from the log-sum-exp [1]_. In addition to the
    results, the call needs memory proportional to the lengths. Results are bitwise repeatable.
    There are no second derivatives.

    Where `lse` is large, the maximum and the sum of the scores are computed again, and the weights
    from them, so that they sum to 1. An `lse` over more keys than `k` has is recognised because it
    is larger than that maximum and sum allow, and is used as given. It is not recognised where the
    difference is within rounding, as with a padding bias of -1e9: the weights of each part of the
    keys then sum to 1. These are the limits:

    - CPU, and products of cuBLAS: `lse` is large from 1,024 on, and any is under a scale of 1,024
      or more, but with a softcap or a `score`. Rounding is 2**-20 of it (2**-48 in float64).
      Without a softcap or a `score`, each score may be off as well, by 2**-21 (2**-50) of the
      largest one that vectors as long as its query and its key could have.
    - Kernels of float64: 1,024, and 2**-48.
    - Kernels of float32: 32, and 2**-21 of it. Without a softcap or a `score`, each score may be
      off as well, by 2**-22 (2**-21 above 128 dims) of the largest one that numbers as large as
      those of its query and its key could have.
    - Kernels of 16 bits: 5,678, and 2**-18.

    A query without visible keys has gradient 0 and contributes to no other gradient but that of its
    sink. Queries of a sequence with invalid offsets, or of a batch entry with an invalid length, do
    not contribute to the gradient of their sink either. The contents of hidden keys and values, NaN
    included, never reach a gradient, and their own gradients are 0. Where `lse` is merged over
    parts of the keys, pass `sinks` with the part that they were given with.

    References
    ----------
    .. [1] T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Re, "FlashAttention: fast and
       memory-efficient exact attention with IO-awareness", NeurIPS, 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention, attention_backward
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 100, 16))
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = attention_backward(dout, q, k, v, out, lse)

    A small step changes ``sum(dout * out)`` as its gradient says:

    >>> step = 1e-6 * np.random.default_rng(1).standard_normal(q.shape)
    >>> change = np.sum(dout * (attention(q + step, k, v) - out))
    >>> bool(np.isclose(change, np.sum(dq * step), rtol=1e-4))
    True

    The gradient of a bias for each head is summed over queries and keys:

    >>> bias = np.zeros((8, 1, 1))
    >>> (dbias,) = attention_backward(dout, q, k, v, out, lse, bias, need=["bias"])
    >>> dbias.shape
    (8, 1, 1)

    The gradient of a sparse bias is a sparse matrix with the same stored elements:

    >>> from scipy import sparse
    >>> weights = sparse.random_array((100, 100), density=0.05, rng=0, format="csr")
    >>> out, lse = attention(q, k, v, weights, return_lse=True)
    >>> (dweights,) = attention_backward(dout, q, k, v, out, lse, weights, need=["bias"])
    >>> weights.data -= 0.1 * dweights.data

    For packed sequences, pass the offsets again:

    >>> offsets = np.array([0, 30, 80, 100])
    >>> out, lse = attention(q, k, v, q_offsets=offsets, return_lse=True)
    >>> dq, dk, dv = attention_backward(dout, q, k, v, out, lse, q_offsets=offsets)

    The gradient of one sink for each head is summed over queries:

    >>> sinks = np.zeros((8, 1))
    >>> out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    >>> dq, dk, dv, dsinks = attention_backward(dout, q, k, v, out, lse, sinks=sinks)
    >>> dsinks.shape
    (8, 1)
    """
    plain = score is None and seed is None and dropout.__class__ is float and dropout == 0.0
    cached = _CACHED_BACKWARD.get(type(q)) if plain else None
    if cached is not None:
        answer = cached(
            dout, q, k, v, out, lse, bias, mask, scale, is_causal, causal_align, window, softcap,
            sinks, dlse, need, k_lengths, q_offsets, k_offsets,
        )  # fmt: skip
        if answer is not None:
            return tuple(answer)
    return _solve_backward(
        (dout, q, k, v, out, lse),
        (bias, mask, dlse, sinks),
        need,
        score,
        (dropout, seed),
        {"k_lengths": k_lengths, "q_offsets": q_offsets, "k_offsets": k_offsets},
        scale=scale,
        is_causal=is_causal,
        causal_align=causal_align,
        window=window,
        softcap=softcap,
    )


def _solve_backward(
    given: tuple[Any, ...],
    optional: tuple[Any, ...],
    need: Sequence[str] | None,
    score: Score | None,
    dropout: tuple[Any, Any],
    places: Mapping[str, Any],
    **options: Any,
) -> tuple[Any, ...]:
    """Check a call of `attention_backward`, run it, and answer in the kind of its arrays."""
    (dout, q, k, v, out, lse), (bias, mask, dlse, sinks) = given, optional
    name = "attention_backward"
    args, arrays = attention_problem.ARGS, (q, k, v, bias, mask)
    dispatch.require(name, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    where = Places(name, args[-1], **places)
    arrays = tuple(dispatch.sparse_inputs(name, args, where.without_masks(arrays)))
    more = {"out": out, "lse": lse, "dout": dout, "dlse": dlse, "sinks": sinks}
    more |= (of_score := arrays_of(name, score)) | where.separated(arrays)
    more |= dropout_arguments.arrays_of(dropout[1])
    native, inputs, native_more = dispatch.with_bits(name, args, arrays, **more)
    by_arg = dict(zip(more, native_more, strict=True))
    where.native(by_arg)
    out, lse, dout, dlse, sinks, *_ = native_more
    operands = operands_of(score, by_arg)
    dense = dispatch.dense_inputs(name, native, inputs)
    dropped = dropout_arguments.of_arguments(name, dropout[0], by_arg.get("seed", dropout[1]))
    problem = attention_problem.gradient_problem(
        dense, out, lse, dout, dlse, name, sinks=sinks, score=operands, dropout=dropped,
        **options, **where.options,
    )  # fmt: skip
    where.check(problem)
    wanted = gradients_wanted(name, need, of_score, bias=bias, sinks=sinks)
    extra = dispatch.score_for(name, operands, wanted)
    backend = dispatch.backend_of(native, "attention_backward")
    if inputs[0] is q:  # an array of NumPy or CuPy itself
        _CACHED_BACKWARD[type(q)] = backend.cached
    with native.context:
        found = backend.backward(
            problem, where.inputs(inputs), (out, lse, dout, dlse), wanted,
            dispatch.allocator(native), sinks, **extra, **where.for_backend(native.backend),
        )  # fmt: skip
        results = map(found.get, wanted)
        return tuple(x if checks.is_sparse(x) else native.give_back(x) for x in results)


def gradients_wanted(
    name: str, need: Any, of_score: Iterable[str], **optional: Any
) -> tuple[str, ...]:
    """Return the arguments whose gradients are wanted, given those that may be None."""
    there = [arg for arg in _NEED if optional.get(arg, name) is not None]
    if need is None:
        return tuple(there)
    there += of_score
    wanted = ", ".join(map(repr, there[:-1])) + f" and {there[-1]!r}"
    if isinstance(need, str) or not isinstance(need, Sequence):
        raise TypeError(f"{name}: need is {checks.show(need)}, want a sequence of {wanted}")
    if len(need) == 0:
        raise ValueError(f"{name}: need is {checks.show(need)}, want at least one of {wanted}")
    for i, arg in enumerate(need):
        if not isinstance(arg, str) or arg not in (*_NEED, *of_score):
            raise ValueError(f"{name}: need[{i}] is {checks.show(arg)}, want {wanted}")
        if arg not in there:
            raise ValueError(f"{name}: need has {arg!r}, and {arg} is None, want an array")
        if arg in need[:i]:
            raise ValueError(f"{name}: need has {arg!r} twice, want each once")
    return tuple(need)


def merge_attention(outs: Sequence[Any] | Any, lses: Sequence[Any] | Any) -> tuple[Any, Any]:
    """Combine attention results over disjoint sets of keys.

    Attention over all keys follows from the outputs and log-sum-exps of attention over parts of
    the keys (on several devices, in pages, in chunks of a stream): it is the mean of the outputs
    with weights ``exp(lse)``.

    Parameters
    ----------
    outs : sequence of arrays of shape (..., Lq, Dv), or one array of them, stacked
        Outputs of `attention` for the same queries.
    lses : sequence of arrays of shape (..., Lq), or one array of them, stacked
        Their log-sum-exps, of any float dtype.

    Returns
    -------
    out : array, shape (..., Lq, Dv)
        Of the library and the dtype of the parts.
    lse : array, shape (..., Lq)
        float32, or float64 for float64 outputs. Everything is computed in this dtype.

    Raises
    ------
    TypeError, ValueError
        If there are no parts, or their shapes or dtypes do not match.

    Notes
    -----
    A part with log-sum-exp -inf has weight 0, whatever its output contains. Where all of them are
    -inf, the output is 0. The parts are summed in the order given.

    The shares of the parts are as accurate as their log-sum-exps. In float32 a log-sum-exp of -1e9,
    as with a padding bias, is a multiple of 64: such parts get equal shares, or one of them gets
    all. Hide padding with a mask instead. The gradients of a part (`attention_backward`) take the
    merged `out` and `lse`; where these are so large, they cannot be distinguished from those of the
    part.

    Sinks count once: give them to one of the parts. Their gradient comes from that part too.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention, merge_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 16))
    >>> parts = [attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 30), slice(30, 100))]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> bool(np.allclose(out, attention(q, k, v)))
    True
    """
    named = attention_problem.named_parts("merge_attention", outs, lses)
    count = len(named) // 2
    native = core_arrays.to_native("merge_attention", **named)
    attention_problem.matching_parts(
        "merge_attention", native.arrays[:count], native.arrays[count:]
    )
    with native.context:
        out, lse = _merge(sys.modules[native.backend], native.arrays[:count], native.arrays[count:])
        return native.give_back(out), native.give_back(lse)


def _merge(xp: Any, outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    """Merge native parts; the arithmetic is in float32, or float64 for float64 outputs."""
    real = np.float64 if outs[0].dtype == np.float64 else np.float32
    # Silent, whatever the caller has NumPy do: 0 * inf, log(0) and what is too small or too large
    # have their IEEE results, which are the wanted ones.
    with np.errstate(all="ignore"):
        lses = [lse.astype(real) for lse in lses]
        top = lses[0]
        for lse in lses[1:]:
            top = xp.maximum(top, lse)
        top = xp.where(xp.isneginf(top), real(0), top)
        total = xp.zeros_like(top)
        for lse in lses:
            total += xp.exp(lse - top)
        # Weights are divided before they meet values, whose sum could leave the range of floats.
        divisor = xp.where(total == 0, real(1), total)
        weighted = xp.zeros_like(outs[0], dtype=real)
        for out, lse in zip(outs, lses, strict=True):
            weight = (xp.exp(lse - top) / divisor)[..., None]
            empty = xp.isneginf(lse)[..., None]
            weighted += xp.where(empty, real(0), weight * out.astype(real))
        return weighted.astype(outs[0].dtype), top + xp.log(total)
