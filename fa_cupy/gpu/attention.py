"""Attention on CuPy arrays: plans are made once and run many times.

Plans are cached on the arguments as they come, so that a repeated call costs a lookup, its
allocations and a launch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import cupy
from cupy import ndarray
from cupy.cuda import alloc, get_current_stream, runtime

from fa_cupy._bitmask import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.core.arrays import dense_strides, memory_order
from fa_cupy.core.attention_problem import Problem
from fa_cupy.core.plan_cache import NUMBERS, TEXTS, lookup, remember, window_key
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.gpu import workspace
from fa_cupy.gpu.arrays import (
    PackedCall,
    addresses_of,
    allocation,
    array_key,
    bias_key,
    fits,
    fits_strides,
    kernel_takes,
    mask_key,
    packed_copy,
    require_whole_elements,
)
from fa_cupy.gpu.driver.launch import capturing
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.pairs import fwd_pairs
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PairBias, PairCounts
from fa_cupy.gpu.kernels.built_in import with_built_in
from fa_cupy.gpu.kernels.score import bias_at, takes_bias, with_float32_bias
from fa_cupy.gpu.masks import pairs
from fa_cupy.gpu.masks.binding import CallMask
from fa_cupy.gpu.masks.pair_bias import PairPlaces
from fa_cupy.gpu.masks.pairs import CallPairs
from fa_cupy.gpu.plan import Plan
from fa_cupy.keys import sequences
from fa_cupy.keys.gathered import (
    gathered,
    mark_bad,
    mark_bad_rows,
    unpacked,
    without_places,
)
from fa_cupy.keys.layout import PLACES, KeyArrays
from fa_cupy.score.program import Operands

_NAME = "attention"
# A workspace of so many bytes at most lies behind the LSE, which keeps all of its allocation.
_MOST_BEHIND_LSE = 1024


class Call:
    """One kind of call on one device: what it allocates and launches.

    Parameters
    ----------
    problem : Problem
        One that a kernel serves, or of no query.
    out_strides : tuple of int
        Bytes, of the user's output.
    device : int
    counts : PairCounts, optional
        Of the mask's pairs, if they are read one by one.
    by_pair : bool, optional
        Whether the bias is an array of float32 with a number for each of these pairs.

    Attributes
    ----------
    plan : Plan or None
        None where there is no query.
    """

    __slots__ = (
        "_by_pair", "_lse", "_lse_bytes", "_mask", "_out", "_workspace_at", "plan",
    )  # fmt: skip

    def __init__(
        self,
        problem: Problem,
        out_strides: tuple[int, ...],
        device: int,
        counts: PairCounts | None = None,
        by_pair: bool = False,
    ) -> None:
        shape = problem.out_shape
        self._out = allocation(shape, out_strides, problem.dtype)
        self._lse = allocation(shape[:-1], None, attention_problem.sum_dtype(problem.dtype))
        self._lse_bytes = self._lse.nbytes
        self._workspace_at = 0
        self.plan: Plan | None = None
        self._mask: CallMask | CallPairs | None = None
        self._by_pair = by_pair
        if not self._lse_bytes:  # there is no row to compute
            return
        out = attention_problem.out_view(problem, shape, out_strides)
        traits, launcher = Traits(problem, out), workspace.launcher(device)
        if counts is not None:
            of_bias = PairBias((0,) * len(problem.batch)) if by_pair else None
            self.plan = fwd_pairs.make_plan(traits, launcher, counts, of_bias)
            self._mask = CallPairs(problem, device)
        else:
            self.plan = forward.make_plan(traits, launcher)
            self._mask = None if problem.mask is None else CallMask(problem, device)
        if 0 < self.plan.workspace_bytes <= _MOST_BEHIND_LSE:
            # The plan's workspace lies behind the LSE: one allocation less.
            self._workspace_at = -(-self._lse_bytes // 16) * 16
            self._lse_bytes = self._workspace_at + self.plan.workspace_bytes

    def __call__(
        self, q: Any, k: Any, v: Any, bias: Any, mask: Any, out: Any, lse: Any, sinks: Any,
        score: Operands | None = None, keys: Sequence[Any] = (), seed: int | None = None,
    ) -> tuple[Any, Any | None]:  # fmt: skip
        """Run the call on the current stream of its device, which must be current.

        The current allocator makes the results, unless `out` and `lse` are arrays to write them to;
        `lse` may be a bool too, which says whether it is wanted.
        """
        if out is None:
            nbytes, shape, dtype, strides = self._out
            memory = alloc(nbytes)
            out = ndarray(shape, dtype, memory, strides)
        else:
            memory = out.data
        rows, space = 0, 0
        if lse is True:
            memory_of_rows = alloc(self._lse_bytes)
            lse = ndarray(self._lse.shape, self._lse.dtype, memory_of_rows)
            rows = memory_of_rows.ptr
            # When a graph runs, a result of the call that it was captured from may be gone.
            if self._workspace_at and not runtime.streamIsCapturing(get_current_stream().ptr):
                space = rows + self._workspace_at
        elif lse is False:
            lse = None
        else:
            rows = lse.data.ptr
        if self.plan is not None:
            bias_at = 0 if bias is None or self._by_pair else bias.data.ptr
            pointers: tuple[int, ...]
            pointers = (q.data.ptr, k.data.ptr, v.data.ptr, bias_at, memory.ptr, rows)
            if sinks is not None:
                pointers = (*pointers, sinks.data.ptr)
            if score is not None:
                pointers = (*pointers, *addresses_of(score))
            if seed is not None:
                pointers = (*pointers, seed)
            if self._mask is None:
                for x in keys:
                    pointers = (*pointers, x.data.ptr)
                self.plan.run(pointers, space)
            else:
                # The lists may be temporaries, which live until the launch is queued.
                addresses, _owners = self._mask(mask)
                if self._by_pair:
                    addresses = (*addresses, bias.data.ptr)
                self.plan.run((*pointers, *addresses), space)
        return out, lse


def cached(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: Any, is_causal: Any, causal_align: Any,
    window: Any, softcap: Any, sinks: Any, precision: Any, return_lse: Any, k_lengths: Any,
    page_table: Any, q_offsets: Any, k_offsets: Any, out: Any,
) -> Any:  # fmt: skip
    """Answer a call of `fa_cupy.attention` whose plan is known or can be made; None otherwise.

    The key holds the arguments unchecked: only calls that were once checked are in the table, and
    only values of types that are equal where they mean the same make a key.
    """
    if out is not None or not (type(q) is type(k) is type(v) is cupy.ndarray):
        return None
    device = q.data.device_id
    if k.data.device_id != device or v.data.device_id != device or runtime.getDevice() != device:
        return None
    if not (
        scale.__class__ in NUMBERS
        and softcap.__class__ in NUMBERS
        and is_causal.__class__ is return_lse.__class__ is bool
        and causal_align.__class__ in TEXTS
        and precision.__class__ in TEXTS
    ):
        return None
    key: Any = (
        _NAME, device, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides,
        v.dtype, scale, is_causal, causal_align, softcap, precision,
    )  # fmt: skip
    if not (bias is mask is window is sinks is None):
        extra = [bias_key(bias, device), mask_key(mask, device, q.dtype), window_key(window)]
        if sinks is not None:
            extra.append(array_key(sinks, device))
        if any(part is False for part in extra):
            return None
        key = (*key, tuple(extra))
    keys: tuple[Any, ...] = ()
    for x in (k_lengths, page_table):
        if x is not None:  # no function is called here: a decoder makes one call for each token
            if type(x) is not cupy.ndarray or x.data.device_id != device:
                return None
            if x.data.ptr & 7:  # strides are in the key, and were checked with it
                require_whole_elements(k_lengths=k_lengths, page_table=page_table)
            key, keys = (*key, x is k_lengths, x.shape, x.strides, x.dtype), (*keys, x)
    if q_offsets is not None or k_offsets is not None:
        found = PackedCall.of(_NAME, device, q_offsets, k_offsets, k_lengths, page_table)
        if found is None:
            return None
        key, keys = (*key, found.key), found.arrays
    if (call := lookup(key)) is None:
        problem = attention_problem.attention_problem(
            q, k, v, bias, mask, scale=scale, is_causal=is_causal, causal_align=causal_align,
            window=window, softcap=softcap, sinks=sinks, precision=precision, k_lengths=k_lengths,
            page_table=page_table, q_offsets=q_offsets, k_offsets=k_offsets,
        )  # fmt: skip
        counts = None if mask is None else _counts(problem, mask, device)
        strides = _strides_like(problem, q)
        if not (_served(problem, device, counts) and _direct(problem, strides)):
            return None
        require_whole_elements(
            q=q, k=k, v=v, bias=bias, sinks=sinks, k_lengths=k_lengths, page_table=page_table
        )
        call = remember(key, _call_for(problem, strides, device, counts, bias))
    elif (q.data.ptr | k.data.ptr | v.data.ptr) & 1 or bias is not None or sinks is not None:
        require_whole_elements(q=q, k=k, v=v, bias=bias, sinks=sinks)
    result = call(q, k, v, bias, mask, None, return_lse, sinks, None, keys)
    return result if return_lse else result[0]


def attention(
    problem: attention_problem.Problem,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    out: Any,
    return_lse: bool,
    sinks: Any = None,
    score: Operands | None = None,
    keys: KeyArrays | None = None,
    on_host: KeyArrays | None = None,
) -> tuple[Any, Any | None]:
    """Solve `problem` on the current device and stream.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    q, k, v, bias, mask : cupy.ndarray or None
        The arrays that `problem` was made from; `mask` may be a BitMask, and with it `bias` a
        SparseBias. With offsets it may be a tuple of a BitMask for each sequence.
    out : cupy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    return_lse : bool
    sinks : cupy.ndarray or None
        As the other arrays.
    score : Operands or None
        The score expression, if `problem` has one.
    keys : KeyArrays or None
        The arrays that say where the keys are, if `problem` has such.
    on_host : KeyArrays or None
        The same, if offsets were given in the memory of the host.

    Returns
    -------
    out : cupy.ndarray
        Of shape ``problem.out_shape``.
    lse : cupy.ndarray or None
    """
    device = runtime.getDevice()
    if problem.dropout is not None and problem.dropout.on_device:
        require_whole_elements(seed=problem.dropout.seed)
    if isinstance(bias, SparseBias):
        return _over_pairs(problem, q, k, v, bias, mask, out, return_lse, sinks, score)
    of_score = {} if score is None else dict(score.named())
    of_keys = {} if keys is None else dict(zip(PLACES, keys, strict=True))
    require_whole_elements(q=q, k=k, v=v, bias=bias, sinks=sinks, out=out, **of_score, **of_keys)
    built_in = None if score is None else with_built_in(problem, score)
    counts = _counts(problem, mask, device)
    if built_in is not None:
        counts_of_form = _counts(built_in[0], mask, device)
        if _served(built_in[0], device, counts_of_form):
            (problem, bias), score, counts = built_in, None, counts_of_form
    unserved = isinstance(mask, tuple) or not _served(problem, device, counts)
    if problem.offsets is not None and unserved:
        inputs = q, k, v, bias, mask
        return _packed(problem, inputs, out, return_lse, sinks, score, keys, on_host)
    strides = _strides_like(problem, q) if out is None else out.strides
    if problem.offsets is None and keys is not None and (unserved or not _direct(problem, strides)):
        return _by_gathering(problem, q, k, v, bias, mask, out, return_lse, sinks, score, keys)
    if unserved:
        from fa_cupy.gpu.cublas import (
            attention as cublas_attention,  # needs cuBLAS, which the kernels do not
        )

        return cublas_attention.attention(
            problem, q, k, v, bias, mask, out, return_lse, sinks, score
        )
    given = [x for x in keys or () if x is not None]
    if not _direct(problem, strides):
        return _by_copies(
            problem, q, k, v, bias, mask, out, return_lse, sinks, score, counts, given
        )
    lse = lse_for(problem, return_lse)
    with workspace.results():
        call = _call_for(problem, strides, device, counts, bias)
        return call(q, k, v, bias, mask, out, lse, sinks, score, given, _seed(problem))


def _seed(problem: Problem) -> int | None:
    """Return the seed of dropout; plans are kept for calls with any."""
    return None if problem.dropout is None else problem.dropout.operand


def _by_gathering(
    problem: Problem,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    out: Any,
    return_lse: bool,
    sinks: Any,
    score: Operands | None,
    keys: KeyArrays,
) -> tuple[Any, Any | None]:
    """Solve a problem whose key lengths and pages no kernel reads: by an equal call without.

    Lengths stay if a kernel reads them where there are no pages.
    """
    in_rows, device = dataclasses.replace(problem, pages=None), runtime.getDevice()
    of_lengths = problem.pages is not None and _served(in_rows, device, None)
    hidden = problem.k_lengths is not None and not of_lengths
    expected = without_places(problem) if hidden else in_rows
    _refuse(expected, None if hidden else mask)
    alone = gathered(cupy, problem, k, v, mask, keys, hides=hidden)
    own = None if hidden or keys.lengths is None else KeyArrays(keys.lengths)
    result, lse = attention(
        alone.problem, q, alone.k, alone.v, bias, alone.mask, out, return_lse, sinks, score, own
    )
    mark_bad(cupy, alone.bad, result, lse)
    return result, lse


def _packed(
    problem: Problem,
    inputs: Sequence[Any],
    out: Any,
    return_lse: bool,
    sinks: Any,
    score: Operands | None,
    keys: KeyArrays | None,
    on_host: KeyArrays | None,
) -> tuple[Any, Any | None]:
    """Solve a problem with offsets that no kernel serves.

    Offsets that are on the host give the parts of arrays that sequences are. With others, an equal
    call has a mask of all pairs.
    """
    assert keys is not None
    if on_host is not None and sequences.on_host(on_host):
        return sequences.attention(
            attention, workspace.empty, problem, inputs, out, return_lse, sinks, score, on_host
        )
    sequences.refuse_positions(_NAME, score)
    q, k, v, bias, mask = inputs
    _refuse(without_places(problem), None)
    alone, mask, bad = unpacked(cupy, problem, mask, keys)
    result, lse = attention(alone, q, k, v, bias, mask, out, return_lse, sinks, score)
    mark_bad_rows(cupy, bad, result, lse)
    return result, lse


def _over_pairs(
    problem: Problem,
    q: Any,
    k: Any,
    v: Any,
    bias: SparseBias,
    mask: BitMask,
    out: Any,
    return_lse: bool,
    sinks: Any,
    score: Operands | None,
) -> tuple[Any, Any | None]:
    """Solve a problem with a number for each pair, which only the kernels over pairs add."""
    if problem.mask is None or not math.prod(problem.out_shape[:-1]):  # of no query or no key
        return attention(problem, q, k, v, None, mask, out, return_lse, sinks, score)
    device = runtime.getDevice()
    counts = pairs.counts_with_bias(_NAME, problem, mask, workspace.launcher(device).target)
    of_score = {} if score is None else dict(score.named())
    require_whole_elements(q=q, k=k, v=v, sinks=sinks, out=out, **of_score)
    numbers = PairPlaces.of(bias, mask).numbers(bias)
    strides = _strides_like(problem, q) if out is None else out.strides
    if not _direct(problem, strides):
        return _by_copies(problem, q, k, v, numbers, mask, out, return_lse, sinks, score, counts)
    lse = lse_for(problem, return_lse)
    with workspace.results():
        call = _call_for(problem, strides, device, counts, by_pair=True)
        return call(q, k, v, numbers, mask, out, lse, sinks, score)


def lse_for(problem: attention_problem.Problem, wanted: bool) -> Any:
    """Return an array for the LSE if the caller's library must allocate it, else `wanted`."""
    if not (wanted and workspace.foreign()):
        return wanted
    return workspace.empty(problem.out_shape[:-1], attention_problem.sum_dtype(problem.dtype))


def _by_copies(
    problem: attention_problem.Problem,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    out: Any,
    lse: bool,
    sinks: Any,
    score: Operands | None,
    counts: PairCounts | None,
    keys: Sequence[Any] = (),
) -> tuple[Any, Any | None]:
    """Solve a problem of which a kernel cannot take some array as it is."""
    if out is None:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    target = out if fits(out, problem.dtype) else cupy.empty(problem.out_shape, problem.dtype)
    views = {"q": problem.q, "k": problem.k, "v": problem.v}
    arrays = {"q": q, "k": k, "v": v}
    for name, view in views.items():
        if not kernel_takes(view, problem.dtype):
            arrays[name], views[name] = packed_copy(view, arrays[name])
    changed: dict[str, Any] = dict(views)
    problem = dataclasses.replace(problem, **changed)
    by_pair = problem.bias is None and bias is not None
    if not takes_bias(problem):
        problem, bias = with_float32_bias(cupy, problem, bias)
    call = _call_for(problem, target.strides, runtime.getDevice(), counts, bias, by_pair)
    rows = lse_for(problem, lse)
    with workspace.results():
        inputs = arrays["q"], arrays["k"], arrays["v"], bias, mask
        _, rows = call(*inputs, target, rows, sinks, score, keys, _seed(problem))
    if target is not out:
        out[...] = target
    return out, rows


def _strides_like(problem: Problem, q: Any) -> tuple[int, ...]:
    """Return the strides of a new output, which is laid out in memory as `q` is."""
    shape = problem.out_shape
    return dense_strides(shape, problem.dtype.itemsize, memory_order(shape, q))


def _counts(problem: Problem, mask: Any, device: int) -> PairCounts | None:
    """Return the counts of a mask whose pairs are read one by one; None for any other call."""
    if problem.mask is None or problem.offsets or not math.prod(problem.out_shape[:-1]):
        return None
    if problem.dropout is not None:  # which is one of tiles
        return None
    return pairs.counts_of(problem, mask, device)


def _served(problem: Problem, device: int, counts: PairCounts | None) -> bool:
    """Whether a kernel solves a problem in any layout, or there is no query."""
    if counts is not None or not math.prod(problem.out_shape[:-1]):
        return True
    return forward.for_any_layout(problem, workspace.launcher(device).target) is not None


def _refuse(problem: Problem, mask: Any) -> None:
    """Raise in a capture, before anything is launched, for what no kernel serves.

    `problem` is one that is about to be made; `mask` is its mask, if that is given and no new one.
    """
    device = runtime.getDevice()
    if capturing() and not _served(problem, device, _counts(problem, mask, device)):
        from fa_cupy.gpu.cublas import attention  # needs cuBLAS, which the kernels do not

        workspace.refuse_products(_NAME, attention.described(problem))


def _direct(problem: Problem, out_strides: tuple[int, ...]) -> bool:
    """Whether a kernel takes all arrays as they are."""
    if not math.prod(problem.out_shape[:-1]):
        return True
    dense = fits_strides(problem.out_shape, out_strides, problem.dtype) and takes_bias(problem)
    return dense and all(kernel_takes(x, problem.dtype) for x in (problem.q, problem.k, problem.v))


def _call_for(
    problem: Problem,
    out_strides: tuple[int, ...],
    device: int,
    counts: PairCounts | None,
    bias: Any = None,
    by_pair: bool = False,
) -> Call:
    """Return the `Call` of a problem, from the table of plans if it is there.

    The alignment of the bias counts; `by_pair` is that of `Call`.
    """
    if bias is not None:
        problem = bias_at(problem, bias.data.ptr)
    key = _NAME, problem, out_strides, device, counts, by_pair
    call: Call | None = lookup(key)
    if call is None:
        call = remember(key, Call(problem, out_strides, device, counts, by_pair))
    return call
