"""Gradients of attention on CuPy arrays.

A call has one workspace. It holds what the kernels hand to each other, dense copies of arrays that
they cannot read as they lie, and gradients that are not asked for or that are to lie in memory in
another way than the kernels write them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import cupy
import numpy as np
from cupy.cuda import alloc, get_current_stream, runtime

from fa_cupy.core import attention_problem
from fa_cupy.core.arrays import Laid, dense_strides, empty_laid_out, memory_order
from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.core.plan_cache import NUMBERS, TEXTS, UNKNOWN, lookup, remember, window_key
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.gpu import workspace
from fa_cupy.gpu.arrays import (
    NOT_PACKED,
    Allocation,
    PackedCall,
    addresses_of,
    allocation,
    bias_key,
    mask_key,
    require_whole_elements,
)
from fa_cupy.gpu.driver.launch import capturing
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PairBias, PairCounts
from fa_cupy.gpu.kernels.attention_backward import ARRAYS, make_plan, select
from fa_cupy.gpu.kernels.backward import Gradients, Traits
from fa_cupy.gpu.kernels.built_in import with_built_in
from fa_cupy.gpu.kernels.score import bias_at, takes_bias, takes_score, with_float32_bias
from fa_cupy.gpu.masks.block_tables import CallTables
from fa_cupy.gpu.masks.pair_bias import PairPlaces, gradient_without_pairs
from fa_cupy.gpu.masks.pairs import CallPairs, counts_of, counts_with_bias
from fa_cupy.gpu.plan import Launcher, Plan, Workspace
from fa_cupy.keys import entries, sequences
from fa_cupy.keys.folded import can_fold, folded, folded_problem, unfold
from fa_cupy.keys.gathered import (
    as_integers,
    gathered_gradients,
    unpacked_gradients,
    without_places,
)
from fa_cupy.keys.layout import PLACES, KeyArrays
from fa_cupy.score.program import Operands

_NAME = "attention_backward"
_INPUTS = ("q", "k", "v")
_GRADIENTS = ("dq", "dk", "dv")
_RESULTS = ("out", "lse", "dout", "dlse")
_ROWS = ("lse", "dlse")  # which kernels read as dense arrays
_FLOAT64 = np.dtype(np.float64)


class Prepared(NamedTuple):
    """What one kind of call needs to run on one device.

    Attributes
    ----------
    plan : Plan
    tables : CallTables, CallPairs or None
        What finds the tables of a mask, or its lists of pairs, if there is one.
    places : dict of int
        Where the parts of the workspace begin, by name.
    copies : dict of tuple
        Of each array that lies in the workspace in place of one of the call, its layout and its
        place.
    grads : list of Allocation
        Of dq, dk and dv as the kernels write them, and of dbias where it is wanted.
    """

    plan: Plan
    tables: CallTables | CallPairs | None
    places: Mapping[str, int]
    copies: Mapping[str, tuple[Laid, int]]
    grads: Sequence[Allocation]

    def run(
        self,
        arrays: Mapping[str, Any],
        mask: Any,
        memory: Any = None,
        of_score: tuple[int, ...] = (),
        of_pairs: tuple[int, ...] = (),
    ) -> bool:
        """Run the call on the current stream of the plan's device, which must be current.

        Parameters
        ----------
        arrays : dict of cupy.ndarray or None
            What is read, and the gradients that are wanted.
        mask : BitMask or cupy.ndarray of bool, or None
        memory : cupy.cuda.MemoryPointer, optional
            The workspace, where the caller reads what the kernels leave in it.
        of_score : tuple of int, optional
            Addresses of the arrays of an expression, and of offsets.
        of_pairs : tuple of int, optional
            Addresses of the numbers of pairs and of their gradients.

        Returns
        -------
        bool
            As of `Plan.run`.
        """
        # What a launch reads is given back when the launch is queued.
        tables, _owners = ((), None) if self.tables is None else self.tables(mask)
        tables = (*tables, *of_pairs)
        there = [arrays[name] for name in ARRAYS if name not in self.copies]
        pointers = [*[0 if x is None else x.data.ptr for x in there], *of_score]
        if not self.copies:
            return self.plan.run((*pointers, *tables), 0 if memory is None else memory.ptr)
        if memory is None:
            memory = workspace.take(self.plan.workspace_bytes)
        copies = {
            name: cupy.ndarray(laid.shape, laid.dtype, memory + place, laid.strides)
            for name, (laid, place) in self.copies.items()
            if arrays[name] is not None
        }
        for name, copy in copies.items():
            if name not in _GRADIENTS:
                as_integers(copy)[...] = as_integers(arrays[name])
        ran = self.plan.run((*pointers, *tables), memory.ptr)
        for name in _GRADIENTS:
            if ran and name in copies:
                as_integers(arrays[name])[...] = as_integers(copies[name])
        return ran


def cached(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, mask: Any, scale: Any,
    is_causal: Any, causal_align: Any, window: Any, softcap: Any, sinks: Any, dlse: Any, need: Any,
    k_lengths: Any, q_offsets: Any, k_offsets: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Answer a call of `fa_cupy.attention_backward` whose plan is known or can be made.

    None otherwise. The key holds the arguments unchecked: only calls that were once checked are in
    the table, and only values of types that are equal where they mean the same make a key.
    """
    # These gradients, and that of a bias if `need` does not leave it out.
    of_inputs = need is None or (need.__class__ is tuple and need == _INPUTS)
    if not of_inputs or sinks is not None:
        return None
    device = runtime.getDevice()
    seen = None if mask is None else mask_key(mask, device, q.dtype)
    biased = None if bias is None else bias_key(bias, device)
    given = not (k_lengths is q_offsets is k_offsets is None)
    of_keys = q_offsets, k_offsets, k_lengths
    packed = PackedCall.of_gradients(_NAME, device, *of_keys) if given else NOT_PACKED
    side = None if window is None else window_key(window)
    if packed is None or seen is False or biased is False or side is False:
        return None
    if not (
        scale.__class__ in NUMBERS
        and softcap.__class__ in NUMBERS
        and is_causal.__class__ is bool
        and causal_align.__class__ in TEXTS
    ) or runtime.streamIsCapturing(get_current_stream().ptr):
        return None  # in a capture, an error would leave memory in the graph
    facts: list[Any] = [_NAME, device, scale, is_causal, causal_align, window, softcap, seen]
    addresses = 0  # the bits of all of them
    for x in (q, k, v, out, dout, lse) if dlse is None else (q, k, v, out, dout, lse, dlse):
        if type(x) is not cupy.ndarray or x.data.device_id != device:
            return None
        facts += (x.shape, x.strides, x.dtype)
        addresses |= x.data.ptr
    # Kernels could not read an array where it lies; those of float64 read any whole elements.
    if addresses & (7 if q.dtype == _FLOAT64 else 15):
        return None
    if bias is not None:  # whose address is none of those
        require_whole_elements(_NAME, bias=bias)
    found: Any = lookup(key := (*facts, biased, need is None, packed.key), UNKNOWN)
    if found is UNKNOWN:  # not None, which stands for a call that has no kernel
        inputs, results = (q, k, v, bias, mask), (out, lse, dout, dlse)
        problem = attention_problem.gradient_problem(
            inputs, *results, _NAME, scale=scale, is_causal=is_causal, causal_align=causal_align,
            window=window, softcap=softcap, k_lengths=k_lengths, q_offsets=q_offsets,
            k_offsets=k_offsets,
        )  # fmt: skip
        of_bias = _dbias(bias, bias.dtype) if bias is not None and need is None else None
        is_left = problem.dtype == _FLOAT64 and _on_products(problem, of_bias is not None)
        if is_left or not takes_bias(problem):
            return None
        require_whole_elements(_NAME, **(arrays := _named(inputs, results)))
        found = remember(key, prepared(problem, arrays, mask, _INPUTS, of_bias, None, bias))
    if found is None or found.copies:
        return None
    tables, _owners = ((), None) if found.tables is None else found.tables(mask)
    grads = [cupy.ndarray(x.shape, x.dtype, alloc(x.nbytes), x.strides) for x in found.grads]
    memory = alloc(found.plan.workspace_bytes)
    pointers = (
        q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, lse.data.ptr, dout.data.ptr,
        0 if dlse is None else dlse.data.ptr, 0 if bias is None else bias.data.ptr, 0,
        *[x.data.ptr for x in grads], *[0] * (4 - len(grads)), *[x.data.ptr for x in packed.arrays],
    )  # fmt: skip
    return (*grads,) if found.plan.run((*pointers, *tables), memory.ptr) else None


def backward(
    problem: Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Any = None,
    score: Operands | None = None,
    keys: KeyArrays | None = None,
    on_host: KeyArrays | None = None,
) -> dict[str, Any]:
    """Return the gradients named by `need`; see `fa_cupy.gpu.cublas.attention_backward.backward`.

    Kernels compute them where there are some for the call, cuBLAS products elsewhere. `keys` are
    the key lengths or the offsets, and `on_host` the same, if they were given in the memory of the
    host; the mask may then be a tuple of a BitMask for each sequence.
    """
    if problem.dropout is not None and problem.dropout.on_device:
        require_whole_elements(_NAME, seed=problem.dropout.seed)
    if isinstance(inputs[3], SparseBias):
        return _over_pairs(problem, inputs, results, need, empty, sinks, score)
    of_score = {} if score is None else dict(score.named())
    named = _named(inputs, results)
    require_whole_elements(_NAME, **named, bias=inputs[3], sinks=sinks, **of_score)
    if keys is not None:
        require_whole_elements(_NAME, **dict(zip(PLACES, keys, strict=True)))
    if keys is not None and keys.lengths is not None:
        return _with_lengths(problem, inputs, results, need, empty, sinks, score, keys, on_host)
    of_keys = () if keys is None else keys[2:]
    found = None
    if not isinstance(inputs[4], tuple) and (
        capturing() or not _on_products(problem, "bias" in need)
    ):
        found = by_kernels(problem, inputs, results, need, empty, sinks, score, of_keys)
    if found is not None:
        return found
    if keys is not None:
        return _packed(problem, inputs, results, need, empty, sinks, score, keys, on_host)
    from fa_cupy.gpu.cublas import attention_backward  # needs cuBLAS, which kernels do not

    return attention_backward.backward(problem, inputs, results, need, empty, sinks, score)


def _on_products(problem: Problem, of_bias: bool) -> bool:
    """Whether products of cuBLAS compute gradients that kernels could compute, unless captured."""
    if problem.dtype != _FLOAT64:
        return False
    # Imported here, as what else a call may need below: a first call takes less time.
    from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import leaves_to_cublas

    target = workspace.launcher(runtime.getDevice()).target
    return leaves_to_cublas(problem, target, of_bias)


def _packed(
    problem: Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Any,
    score: Operands | None,
    keys: KeyArrays,
    on_host: KeyArrays | None,
) -> dict[str, Any]:
    """Return gradients of a problem with offsets that no kernels take, as the forward pass does."""
    if on_host is None or not sequences.on_host(on_host):
        sequences.refuse_positions(_NAME, score)
        rows = [None if x is None else Laid.dense(x.shape, x.dtype) for x in results]
        _refuse(without_places(problem), inputs, rows, need, score)
        alone, mask, clean = unpacked_gradients(cupy, problem, inputs[4], results, sinks, keys)
        return backward(alone, (*inputs[:4], mask), clean, need, empty, sinks, score)
    of_gpu = _of_parts(empty)
    return sequences.backward(of_gpu, problem, inputs, results, need, sinks, score, on_host)


def _of_parts(empty: Callable[..., Any]) -> sequences.Backend:
    """Return what computes the parts of a call one after the other."""
    from fa_cupy.gpu.cublas import tile_ops  # needs cuBLAS, which kernels do not

    def solve(alone: Any, inputs: Any, results: Any, need: Any, sinks: Any, score: Any) -> Any:
        return backward(alone(), (*inputs,), (*results,), need, workspace.empty, sinks, score)

    def each(work: Callable[[Any], Any], parts: list[Any]) -> list[Any]:
        return [work(part) for part in parts]

    return sequences.Backend(cupy, solve, empty, tile_ops.copy, each)


def _with_lengths(
    problem: Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Any,
    score: Operands | None,
    keys: KeyArrays,
    on_host: KeyArrays | None,
) -> dict[str, Any]:
    """Return gradients of a problem with key lengths: where no kernel reads them, by an equal call.

    That is one of parts of the arrays, if the host knows that all lengths are the same. Kernels of
    float32 and float64 read lengths. Elsewhere, where a band counts from the ends, entries are
    packed sequences, if kernels take those: a mask would have a number for each pair. Otherwise it
    hides the keys behind the ends.
    """
    checked = on_host is not None and on_host.lengths is not None
    if on_host is not None and checked:
        together = entries.together(problem, on_host.lengths)
        if together is not None and together.length == problem.k_len:
            alone = together.alone(problem, inputs[4])
            return backward(alone, inputs, results, need, empty, sinks, score)
        if together is not None:
            if capturing():
                part, arrays = together.taken(problem, inputs)
                _refuse(part(), arrays, results, need, score)
            own = entries.own_gradients(problem, inputs[3], sinks)
            return sequences.by_parts(
                _of_parts(empty), problem, inputs, results, need, sinks, score, [together], own
            )
    if problem.mask is None and problem.dtype.itemsize > 2:  # there are builds for lengths
        found = by_kernels(problem, inputs, results, need, empty, sinks, score, (keys.lengths,))
        if found is not None:
            return found
    if problem.band_from_end and score is None and problem.dropout is None:
        grads = _by_folding(problem, inputs, results, need, empty, sinks, keys)
        if grads is not None:
            return grads
    if capturing():
        q, *of_keys, bias, _ = inputs
        k, v = (Laid.dense(x.shape, x.dtype, memory_order(x.shape, x)) for x in of_keys)
        alone = without_places(problem)
        of_k = attention_problem.batch_view(alone, k, problem.k_len, problem.head_dim)
        of_v = attention_problem.batch_view(alone, v, problem.k_len, problem.v_dim)
        alone = dataclasses.replace(alone, k=of_k, v=of_v)
        rows = [x if checked or x is None else Laid.dense(x.shape, x.dtype) for x in results]
        _refuse(alone, (q, k, v, bias, None), rows, need, score)
    alone, inputs, results = gathered_gradients(
        cupy, problem, inputs, results, sinks, keys, checked
    )
    return backward(alone, inputs, results, need, empty, sinks, score)


def _by_folding(
    problem: Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Any,
    keys: KeyArrays,
) -> dict[str, Any] | None:
    """Return gradients of a problem with key lengths as packed sequences; None without a kernel."""

    def inside(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> Any:
        return empty_laid_out(cupy, shape, like, dtype)

    if not can_fold(problem, inputs[:3], sinks):
        return None
    alone, laid = folded_problem(problem, inputs[:3], sinks)
    of_rows = laid["out"], None, laid["out"], None
    if not _takes(alone, (*[laid[name] for name in _INPUTS], None, None), of_rows, need):
        return None
    call = folded(cupy, problem, inputs, results, keys)
    parts = by_kernels(alone, call.inputs, call.results, need, inside, sinks, None, call.keys[2:])
    if parts is None:
        return None
    given = dict(zip(_INPUTS, inputs, strict=False))
    found = {}
    for name, part in parts.items():
        of = given.get(name, sinks)
        found[name] = empty(of.shape, of.dtype, of)
        if name in given:
            unfold(found[name], part)
        else:
            as_integers(found[name])[...] = as_integers(part)
    return found


def _over_pairs(
    problem: Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Any,
    score: Operands | None,
) -> dict[str, Any]:
    """Do as `backward` with a number for each pair, which only the kernels over pairs add."""
    bias, mask = inputs[3:]
    if problem.mask is None or not math.prod(problem.out_shape[:-1]):  # of no query or no key
        dense = (*inputs[:3], None, mask)
        others = tuple(name for name in need if name != "bias")
        found = backward(problem, dense, results, others, empty, sinks, score) if others else {}
        return found | {"bias": gradient_without_pairs(bias)}
    counts = counts_with_bias(_NAME, problem, mask, workspace.launcher(runtime.getDevice()).target)
    arrays, of_score = _named(inputs, results), {} if score is None else dict(score.named())
    require_whole_elements(_NAME, **arrays, sinks=sinks, **of_score)
    by_pair = PairBias((0,) * len(problem.batch), wants_gradient="bias" in need)
    plan = None
    if not any(name.startswith("score.") for name in need):
        plan = prepared(problem, arrays, mask, need, of_pairs=(counts, by_pair))
    if plan is None:
        raise NotImplementedError(
            f"{_NAME}: bias is a sparse matrix on a GPU, and there are sinks, arrays of a score "
            "that need a gradient or masks of heads that share keys, want none of them"
        )
    places = PairPlaces.of(bias, mask)
    numbers = places.numbers(bias)
    sums = cupy.zeros(numbers.shape, np.float32)
    found = {x: empty(arrays[x].shape, arrays[x].dtype, arrays[x]) for x in need if x in _INPUTS}
    arrays |= dict.fromkeys(("bias", "sinks", "dbias"))
    arrays |= {f"d{name}": found.get(name) for name in _INPUTS}
    addresses = () if score is None else addresses_of(score)
    plan.run(arrays, mask, None, addresses, (numbers.data.ptr, sums.data.ptr))
    if "bias" in need:
        found["bias"] = places.gradient(bias, sums)
    return found


def by_kernels(
    problem: Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Any = None,
    score: Operands | None = None,
    of_keys: Sequence[Any] = (),
) -> dict[str, Any] | None:
    """Do as `backward`; None where the kernels do not take the call.

    `of_keys` are offsets, or lengths.

    Those of q, k and v are computed, whichever are asked for, and that of the bias only if it is.
    That of sinks follows from what the kernels leave in the workspace.
    """
    form = _form(problem, inputs[3], need, score)
    if form is None:
        return None
    arrays, (problem, bias, score) = _named(inputs, results), form
    if not takes_bias(problem):
        problem, bias = with_float32_bias(cupy, problem, bias)
    of_bias = _dbias(inputs[3], bias.dtype) if "bias" in need else None
    plan = prepared(problem, arrays, inputs[4], need, of_bias, None, bias)
    if plan is None:
        return None
    given = {**arrays, "bias": inputs[3]}
    direct = [name for name in need if name != "sinks"]
    found = {name: empty(given[name].shape, given[name].dtype, given[name]) for name in direct}
    grads = {f"d{name}": found.get(name) for name in (*_INPUTS, "bias")}
    if of_bias is not None and bias.dtype != inputs[3].dtype:
        grads["dbias"] = cupy.empty(of_bias.shape, of_bias.dtype)
    arrays |= {"bias": bias, "sinks": sinks, **grads}
    of_score = () if score is None else addresses_of(score)
    of_score = (*of_score, *([] if problem.dropout is None else [problem.dropout.operand]))
    of_score = (*of_score, *[x.data.ptr for x in of_keys])
    memory = rows = None
    if "sinks" in need:
        from fa_cupy.gpu import sinks_gradient

        memory = workspace.take(plan.plan.workspace_bytes)
        rows = sinks_gradient.rows_of(problem, plan.plan, plan.places, memory)
    if not plan.run(arrays, inputs[4], memory, of_score):
        return None
    if rows is not None:
        found["sinks"] = sinks_gradient.gradient(problem, sinks, arrays["lse"], rows, empty)
    if grads["dbias"] is not found.get("bias"):
        found["bias"][...] = grads["dbias"]
    return found


def _form(
    problem: Problem, bias: Any, need: Sequence[str], score: Operands | None
) -> tuple[Problem, Any, Operands | None] | None:
    """Return the problem, bias and score of a call in the form that kernels compute fastest.

    None where they do not compute what is asked for.
    """
    if any(name.startswith("score.") for name in need):
        return None
    if problem.dropout is not None and problem.dropout.placed:
        return None
    built_in = None if score is None else with_built_in(problem, score)
    if built_in is not None:
        return *built_in, None
    return (problem, bias, score) if takes_score(problem) else None


def _takes(
    problem: Problem,
    inputs: Sequence[Any],
    results: Sequence[Any],
    need: Sequence[str],
    score: Operands | None = None,
) -> bool:
    """Whether `by_kernels` takes a call of arrays that lie as these do. None of these is read.

    The mask is as the problem says, and no `BitMask` whose pairs are read one by one. The
    log-sum-exp and its gradient may be None.
    """
    form = _form(problem, inputs[3], need, score)
    if form is None:
        return False
    problem = form[0]
    if not takes_bias(problem):
        problem = dataclasses.replace(problem, bias_dtype=np.dtype(np.float32))
    of_bias = None
    if "bias" in need and problem.bias_dtype is not None:
        of_bias = _dbias(inputs[3], problem.bias_dtype)
    given = {name: x for name, x in _named(inputs, results).items() if x is not None}
    laid = {name: Laid(x.shape, x.strides, x.dtype) for name, x in given.items()}
    copied = [name for name in laid if not _readable(name, laid[name], 0)]
    traits = _traits(problem, laid, copied, need, of_bias)[0]
    return bool(select(traits.wanted, workspace.launcher(runtime.getDevice()).target))


def _refuse(
    problem: Problem,
    inputs: Sequence[Any],
    results: Sequence[Any],
    need: tuple[str, ...],
    score: Operands | None,
) -> None:
    """Raise in a capture, before anything is launched, for what `_takes` says is not for kernels.

    Products of cuBLAS would compute it, which cannot be captured.
    """
    if capturing() and not _takes(problem, inputs, results, need, score):
        from fa_cupy.gpu.cublas import attention_backward  # needs cuBLAS, which kernels do not

        attention_backward.refuse(problem, need)


def prepared(
    problem: Problem,
    arrays: dict[str, Any],
    mask: Any,
    need: Sequence[str],
    dbias: Laid | None = None,
    of_pairs: tuple[PairCounts, PairBias] | None = None,
    bias: Any = None,
) -> Prepared | None:
    """Return what a call needs, made at most once; None where the kernels do not take the call.

    Parameters
    ----------
    problem : Problem
    arrays : dict of cupy.ndarray or None
        All that is read but bias and mask, by name.
    mask : BitMask, cupy.ndarray or None
    need : sequence of str
        The arrays whose gradients are asked for.
    dbias : Laid, optional
        The gradient of the bias, where it is wanted.
    of_pairs : tuple, optional
        The counts of the mask's pairs, which have a bias each, and how that lies.
    bias : cupy.ndarray, optional
        That of the problem, whose address counts.
    """
    if bias is not None:
        problem = bias_at(problem, bias.data.ptr)
    device = runtime.getDevice()
    counts, by_pair = of_pairs or (None, None)
    plain = problem.offsets is None and problem.dropout is None
    if by_pair is None and problem.mask is not None and plain:
        counts = counts_of(problem, mask, device)
    laid = {name: Laid(x.shape, x.strides, x.dtype) for name, x in arrays.items() if x is not None}
    copied = tuple(
        [name for name in laid if not _readable(name, laid[name], arrays[name].data.ptr)]
    )
    places = (*laid.values(),), copied, frozenset(need)
    key = _NAME, problem, *places, device, dbias, counts, by_pair
    found: Any = lookup(key, UNKNOWN)
    if found is UNKNOWN:
        found = remember(key, _prepare(problem, laid, copied, need, device, dbias, counts, by_pair))
    return cast("Prepared | None", found)


def _prepare(
    problem: Problem,
    laid: dict[str, Laid],
    copied: Sequence[str],
    need: Sequence[str],
    device: int,
    dbias: Laid | None,
    counts: PairCounts | None,
    by_pair: PairBias | None,
) -> Prepared | None:
    traits, inside = _traits(problem, laid, copied, need, dbias)
    sizes, launcher = {name: x.nbytes for name, x in inside.items()}, workspace.launcher(device)
    made = None if counts is None else _plan_of_pairs(traits, launcher, counts, sizes, by_pair)
    if made is not None:
        tables: Any = CallPairs(traits.problem, device, gradients=True)
    elif by_pair is not None:
        return None
    else:
        made = make_plan(traits, launcher, sizes)
        if made is None:
            return None
        tables = None if problem.mask is None else CallTables(traits.problem, device)
    plan, (places, _) = made
    return Prepared(
        plan,
        tables=tables,
        places=places,
        copies={name: (x, places[name]) for name, x in inside.items()},
        grads=[allocation(*x) for x in (*[laid[name] for name in _GRADIENTS], dbias) if x],
    )


def _plan_of_pairs(
    traits: Traits,
    launcher: Launcher,
    counts: PairCounts,
    sizes: dict[str, int],
    by_pair: PairBias | None,
) -> tuple[Plan, Workspace] | None:
    """Return the plan that reads the pairs of a mask one by one, None where no kernels do."""
    from fa_cupy.gpu.kernels.attention.pairs import gradients_plan
    from fa_cupy.gpu.kernels.attention.pairs.pair_gradients import serves_gradients

    if not serves_gradients(traits):
        return None
    return gradients_plan.make_plan(traits, launcher, counts, sizes, by_pair)


def _traits(
    problem: Problem,
    laid: dict[str, Laid],
    copied: Sequence[str],
    need: Sequence[str],
    dbias: Laid | None,
) -> tuple[Traits, dict[str, Laid]]:
    """Return the traits of a call, and the arrays that lie in its workspace.

    To `laid` come gradients, and what is `copied` is changed to its copy.
    """
    inside = {name: Laid.dense(laid[name].shape, laid[name].dtype) for name in copied}
    orders = [memory_order(laid[name].shape, laid[name]) for name in _INPUTS]
    for name, order in zip(_INPUTS, orders, strict=True):
        x = laid[name]
        grad = Laid(x.shape, dense_strides(x.shape, x.dtype.itemsize, order), x.dtype)
        if name not in need or not _readable("", grad, 0):
            grad = inside[f"d{name}"] = Laid.dense(x.shape, x.dtype)
        laid[f"d{name}"] = grad
    views: dict[tuple[Laid, bool], View] = {
        (laid[name], name in "kv"): getattr(problem, name) for name in _INPUTS
    }
    laid |= {name: inside[name] for name in copied}

    def view(name: str) -> View:
        of_keys = name in ("k", "v", "dk", "dv")
        key = laid[name], of_keys
        if key not in views:
            rows = problem.k_len if of_keys else problem.q_len
            shape = rows, laid[name].shape[-1]
            views[key] = attention_problem.batch_view(problem, laid[name], *shape)
        return views[key]

    of_bias = None
    if dbias is not None:
        of_bias = attention_problem.batch_view(problem, dbias, problem.q_len, problem.k_len)
    dout, out, dq, dk, dv = (view(name) for name in ("dout", "out", *_GRADIENTS))
    gradients = Gradients(dout, out, dq, dk, dv, of_bias)
    changed: dict[str, Any] = {name: view(name) for name in _INPUTS if name in copied}
    return Traits(dataclasses.replace(problem, **changed), gradients), inside


def _dbias(bias: Any, dtype: np.dtype[Any]) -> Laid:
    """Return how the kernels write the gradient of a bias, which they read as of `dtype`.

    As the caller gets it, unless it is to be converted.
    """
    order = memory_order(bias.shape, bias) if bias.dtype == dtype else None
    return Laid.dense(bias.shape, dtype, order)


def _named(inputs: Sequence[Any], results: Sequence[Any]) -> dict[str, Any]:
    """Return the arrays that gradients are made from, but bias and mask, by name."""
    found = dict(zip(_INPUTS, inputs, strict=False))
    return found | dict(zip(_RESULTS, results, strict=True))


def _readable(name: str, laid: Laid, pointer: int) -> bool:
    """Whether kernels read an array as it lies; others are copied."""
    steps = [(n, step) for n, step in zip(laid.shape, laid.strides, strict=True) if n > 1]
    if name in _ROWS:
        dense = dense_strides(laid.shape, laid.dtype.itemsize, range(laid.ndim))
        return steps == [(n, step) for n, step in zip(laid.shape, dense, strict=True) if n > 1]
    if laid.shape[-1] > 1 and steps.pop()[1] != laid.dtype.itemsize:
        return False
    # Kernels count the steps of rows in int32, in elements.
    row, most = steps[-1][1] if laid.shape[-2] > 1 else 1, 2**31 * laid.dtype.itemsize
    if laid.dtype == _FLOAT64:  # whose kernels begin rows at any element, and walk them either way
        return abs(row) < most
    aligned = not pointer & 15 and all(step % 16 == 0 for _, step in steps)
    return aligned and 0 < row < most and all(step >= 0 for _, step in steps)
