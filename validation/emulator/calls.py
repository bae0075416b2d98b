"""Public functions computed in the emulator, by the plans that calls on a GPU run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fa_cupy import BitMask
from fa_cupy._score import operands_of
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, linear_problem
from fa_cupy.gpu.kernels import attention_backward as backward_launches
from fa_cupy.gpu.kernels import backward, forward, products
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.bwd_dq_sm80 import BwdDqSm80
from fa_cupy.gpu.kernels.attention.dbias.bwd_dbias_sm80 import BwdDbiasSm80
from fa_cupy.gpu.kernels.attention.dbias.bwd_dbias_sm90 import BwdDbiasSm90
from fa_cupy.gpu.kernels.attention.dbias.dbias_rows import DbiasRows
from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_rows import BackwardRows
from fa_cupy.gpu.kernels.attention.pairs import (
    fwd_pairs,
    gradients_plan,
    pair_gradients,
    pair_rows,
)
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PIECE_PAIRS, PairBias
from fa_cupy.gpu.kernels.backward import BackwardVariant
from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.gpu.kernels.linear.params import Job, traits_of
from fa_cupy.gpu.kernels.score import bias_at, takes_bias, with_float32_bias
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.keys.offsets import key_arrays
from fa_cupy.score.program import Operands
from validation.emulator.launcher import MULTIPROCESSORS, EmulatorLauncher
from validation.emulator.masks import lists_of, pairs_of, tables_of

Array = np.ndarray[Any, Any]


def attention(
    row: Variant,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    mask: Array | BitMask | None = None,
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
    order: Array | None = None,
    by_tile: bool = False,
    **options: Any,
) -> tuple[Array, Array]:
    """`fa_cupy.attention` by one variant, with LSE.

    Parameters
    ----------
    row : Variant
    q, k, v, bias : numpy.ndarray
        As for `fa_cupy.attention`; aligned to 16 bytes where the variant wants it.
    mask : numpy.ndarray or BitMask, optional
        As for `fa_cupy.attention`; wants a variant for masks.
    seed, truncating : int, bool
        As for `emulator.launch`.
    source : Path, optional
        A kernel in place of the one whose file has its name.
    order, by_tile
        As for `validation.emulator.masks.lists_of`.
    **options
        Of `fa_cupy.attention`, `sinks` among them; `k_lengths`, `page_table` and offsets are
        arrays, and not checked. `dropout` is a `Dropout`, and wants a variant with it.

    Raises
    ------
    EmulationError
        As `emulator.launch`.
    """
    operands = operands_in(options)
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    if not takes_bias(problem):
        problem, bias = with_float32_bias(np, problem, bias)
    if bias is not None:
        problem = bias_at(problem, bias.ctypes.data)
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    lse = np.full(problem.out_shape[:-1], np.nan, attention_problem.sum_dtype(problem.dtype))
    view = attention_problem.out_view(problem, out.shape, out.strides)
    sources = {} if source is None else {f"attention_{source.stem}": source}
    launcher = EmulatorLauncher(seed, truncating, sources)
    plan = forward.make_plan(Traits(problem, view), launcher, row)
    pointers = [0 if x is None else x.ctypes.data for x in (q, k, v, bias, out, lse)]
    pointers += [x.ctypes.data for x in (options.get("sinks"),) if x is not None]
    pointers += _addresses(operands)
    pointers += [] if problem.dropout is None else [problem.dropout.seed]
    of_keys = (options.get(name) for name in ("k_lengths", "page_table"))
    pointers += [x.ctypes.data for x in of_keys if x is not None]
    pointers += _offsets(options)
    if mask is None:
        lists, addresses = None, ()
    else:
        lists = lists_of(problem, mask, order, by_tile)  # it owns what the addresses are of
        addresses = lists.pointers()
    plan.run((*pointers, *addresses))
    del lists
    return out, lse


def attention_by_pairs(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: BitMask,
    *,
    pair_bias: Array | None = None,
    piece_pairs: int = PIECE_PAIRS,
    seed: int = 0,
    source: Path | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """`fa_cupy.attention` over the pairs of a mask, with LSE.

    Parameters
    ----------
    q, k, v, bias, mask
        As for `fa_cupy.attention`.
    pair_bias : numpy.ndarray of float32, shape (..., pairs), optional
        A number for each pair, in the order of its list by queries; batch axes broadcast.
    piece_pairs : int, optional
        Pairs of a row from which on it is cut.
    seed, source
        As for `attention`.
    **options
        Of `fa_cupy.attention`, `sinks` and `score` among them.
    """
    operands = operands_in(options)
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    if not takes_bias(problem):
        problem, bias = with_float32_bias(np, problem, bias)
    assert pair_rows.serves(problem, "sm_90a")
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    view = attention_problem.out_view(problem, out.shape, out.strides)
    sources = {} if source is None else {"attention_fwd_pairs": source}
    lists = pairs_of(problem, mask, piece_pairs)
    plan = fwd_pairs.make_plan(
        Traits(problem, view), EmulatorLauncher(seed, False, sources), lists.counts,
        bias_of(problem, pair_bias),
    )  # fmt: skip
    given = [q, k, v, bias, out, lse, *(x for x in (options.get("sinks"),) if x is not None)]
    pointers = [0 if x is None else x.ctypes.data for x in given] + _addresses(operands)
    biases = () if pair_bias is None else (pair_bias.ctypes.data,)
    plan.run((*pointers, *lists.pointers(), *biases))
    return out, lse


def gradients_by_pairs(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None,
    bias: Array | None,
    mask: BitMask,
    *,
    pair_bias: Array | None = None,
    piece_pairs: int = PIECE_PAIRS,
    seed: int = 0,
    sources: Mapping[str, Path] = MappingProxyType({}),
    **options: Any,
) -> tuple[Array, ...]:
    """Gradients of attention over the pairs of a mask; of `pair_bias` too if there is one.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse, bias
        As for `attention_backward`.
    mask : BitMask
    pair_bias, piece_pairs
        As for `attention_by_pairs`.
    seed, sources
        As for `attention_backward`.
    **options
        Of `fa_cupy.attention`.
    """
    operands = operands_in(options)
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    if not takes_bias(problem):
        problem, bias = with_float32_bias(np, problem, bias)
    dq, dk, dv = (np.full(x.shape, np.nan, x.dtype) for x in (q, k, v))
    queries = (attention_problem.out_view(problem, x.shape, x.strides) for x in (dout, out, dq))
    like = attention_problem.attention_problem(q, dk, dv, bias, mask, **options)
    traits = backward.Traits(problem, backward.Gradients(*queries, like.k, like.v))
    assert pair_gradients.serves_gradients(traits)
    lists = pairs_of(problem, mask, piece_pairs)
    own = bias_of(problem, pair_bias, gradient=True)
    launcher = EmulatorLauncher(seed, False, sources)
    plan, _ = gradients_plan.make_plan(traits, launcher, lists.counts, bias=own)
    lse = np.ascontiguousarray(lse, np.float32)
    dlse = None if dlse is None else np.ascontiguousarray(dlse, np.float32)
    results = [dq, dk, dv]
    given = (q, k, v, out, lse, dout, dlse, bias, None, *results, None)
    pointers = [0 if x is None else x.ctypes.data for x in given] + _addresses(operands)
    pointers += lists.pointers(gradients=True)
    if pair_bias is not None:
        results.append(np.full_like(pair_bias, np.nan))
        pointers += [pair_bias.ctypes.data, results[-1].ctypes.data]
    plan.run(tuple(pointers))
    return tuple(results)


def bias_of(problem: Any, pair_bias: Array | None, gradient: bool = False) -> PairBias | None:
    """Return how a number for each pair lies over the batch of a problem."""
    if pair_bias is None:
        return None
    view = attention_problem.batch_view(problem, pair_bias[..., None, :], 1, pair_bias.shape[-1])
    return PairBias(tuple([step // 4 for step in view.strides[:-2]]), gradient)


def operands_in(options: dict[str, Any]) -> Operands | None:
    """Put the operands of a score in place of it, and return them."""
    score = options.get("score")
    if score is None:
        return None
    arrays = {f"score.{name}": x for name, x in score._values.items()}
    options["score"] = operands_of(score, arrays)
    found: Operands = options["score"]
    return found


def _addresses(operands: Operands | None) -> list[int]:
    """Return the addresses of the arrays of a score."""
    values = () if operands is None else operands.values
    return [x.ctypes.data for x in values if not isinstance(x, float)]


def _offsets(options: Mapping[str, Any]) -> list[int]:
    """Return the addresses of the offsets of packed sequences."""
    offsets = key_arrays(options.get("q_offsets"), options.get("k_offsets"))[2:]
    return [x.ctypes.data for x in offsets if x is not None]


def attention_backward(
    rows: Sequence[BackwardVariant],
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dlse: Array | None = None,
    bias: Array | None = None,
    mask: Array | BitMask | None = None,
    seed: int = 0,
    sources: Mapping[str, Path] = MappingProxyType({}),
    blocks: int = MULTIPROCESSORS,
    together: int = 1,
    truncating: bool = False,
    **options: Any,
) -> tuple[Array, ...]:
    """Gradients of attention by some variants; that of the bias too, where they compute it.

    Parameters
    ----------
    rows : sequence of BackwardVariant
        In the order of their launches, as `fa_cupy.gpu.kernels.attention_backward.select` returns
        them for the scores of the call.
    dout, q, k, v, out, lse, dlse : numpy.ndarray
        `k` and `v` have the batch axes of `q`, but for a head axis that may have fewer heads.
    bias : numpy.ndarray, optional
        As for `fa_cupy.attention_backward`.
    mask : numpy.ndarray or BitMask, optional
        As for `fa_cupy.attention_backward`; wants variants for masks.
    seed, truncating : int, bool
        As for `emulator.launch`.
    sources : mapping of Path
        Kernels in place of the variants' own, by their entry.
    blocks, together : int
        Of the launches whose blocks take work until none is left: how many blocks, and how many of
        them run at the same time.
    **options
        Of `fa_cupy.attention`; `k_lengths` and offsets are arrays, and not checked.

    Raises
    ------
    EmulationError
        As `emulator.launch`.
    """
    operands = operands_in(options)
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    bias_dtype = problem.bias_dtype
    if not takes_bias(problem):
        problem, bias = with_float32_bias(np, problem, bias)
    if bias is not None:
        problem = bias_at(problem, bias.ctypes.data)
    dq, dk, dv = (np.full(x.shape, np.nan, x.dtype) for x in (q, k, v))
    dbias, of_bias = None, None
    if any(isinstance(row, BwdDbiasSm80 | BwdDbiasSm90 | DbiasRows) for row in rows):
        assert bias is not None
        dbias = core_arrays.empty_laid_out(np, bias.shape, bias, bias.dtype)
        dbias[...] = np.nan
        of_bias = attention_problem.batch_view(problem, dbias, problem.q_len, problem.k_len)
    queries = (attention_problem.out_view(problem, x.shape, x.strides) for x in (dout, out, dq))
    # As k and v are seen, so are dk and dv.
    like = attention_problem.attention_problem(q, dk, dv, bias, mask, **options)
    traits = backward.Traits(problem, backward.Gradients(*queries, like.k, like.v, of_bias))
    plain = any(isinstance(row, BwdDqSm80 | BackwardRows) for row in rows)
    assert traits.wanted.strided if plain else traits.wanted.mapped
    launcher = EmulatorLauncher(seed, truncating, sources, blocks, together)
    made = backward_launches.make_plan(traits, launcher, variants=rows)
    assert made is not None
    of_rows = attention_problem.sum_dtype(problem.dtype)
    lse = np.ascontiguousarray(lse, of_rows)
    dlse = None if dlse is None else np.ascontiguousarray(dlse, of_rows)
    given = (q, k, v, out, lse, dout, dlse, bias, options.get("sinks"), dq, dk, dv, dbias)
    tables = None if mask is None else tables_of(problem, mask)
    addresses = () if tables is None else tables.pointers()
    pointers = [0 if x is None else x.ctypes.data for x in given] + _addresses(operands)
    pointers += [] if problem.dropout is None else [problem.dropout.seed]
    pointers += _offsets(options)
    if options.get("k_lengths") is not None:
        pointers.append(options["k_lengths"].ctypes.data)
    made[0].run((*pointers, *addresses))
    del tables  # it owns what the addresses are of
    return (dq, dk, dv) if dbias is None else (dq, dk, dv, dbias.astype(bias_dtype))


def causal_product(
    choice: Choice,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None = None,
    reverse: bool = False,
    **how: Any,
) -> tuple[Array, Array]:
    """`fa_cupy.causal_product` by the kernels and in the segments of `choice`, with its state.

    Parameters
    ----------
    choice : Choice
    q, k, v, initial, reverse
        As for `fa_cupy.causal_product`; rows must be dense.
    **how
        Of `EmulatorLauncher`.

    Raises
    ------
    EmulationError
        As `emulator.launch`.
    """
    (found,) = causal_products(choice, [(q, k, v, initial, reverse)], **how)
    return found


def causal_products(
    choice: Choice, calls: Sequence[tuple[Any, ...]], **how: Any
) -> list[tuple[Array, Array]]:
    """Several causal products of as many rows each, with their states.

    Kernels for SM90 compute them in one launch. `calls` holds q, k, v, the initial state and
    whether it is in reverse of each; see `causal_product`.
    """
    jobs, arrays = [], []
    for q, k, v, initial, reverse in calls:
        problem = linear_problem.product_problem("causal_product", q, k, v, initial)
        out = np.full(problem.out_shape, np.nan, problem.dtype)
        state = np.full(problem.state_shape, np.nan, problem.state_dtype)
        whole, last = (problem.view(x.shape, x.strides) for x in (out, state))
        jobs.append(traits_of(Job(problem, whole, last, reverse)))
        arrays += [q, k, v, out, initial, state]
    plan = products.plan_by(choice, jobs, EmulatorLauncher(**how))
    plan.run(tuple([0 if x is None else x.ctypes.data for x in arrays]))
    assert plan.other is None, "tensor maps want addresses that are multiples of 16"
    return list(zip(arrays[3::6], arrays[5::6], strict=True))
