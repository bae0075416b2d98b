"""What public functions have in common: arrays that must be given, backends, where results go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from fa_cupy._bitmask import BitMask, bits_of_sparse
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, backends, checks
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.score.program import Operands

_OPTIONAL = ("initial_state", "dstate", "out")


def require(name: str, **arrays: Any) -> None:
    """Raise for an array that is None."""
    for arg, array in arrays.items():
        if array is None:
            raise TypeError(f"{name}: {arg} is None, want an array")


def to_native(name: str, **arrays: Any) -> core_arrays.Native:
    """Return arrays of a product as native arrays; only some of them may be None."""
    require(name, **{arg: x for arg, x in arrays.items() if arg not in _OPTIONAL})
    return core_arrays.to_native(name, **arrays)


def with_bits(
    name: str, args: Sequence[str], arrays: Sequence[Any], **more: Any
) -> tuple[core_arrays.Native, list[Any], list[Any]]:
    """Return arrays to be read as native ones, sparse ones as `sparse_inputs` does; and `more`."""
    arrays = sparse_inputs(name, args, arrays)
    named = dict(zip(args, arrays, strict=True))
    kept = sparse(arrays)
    plain = {arg: None if x else named[arg] for arg, x in zip(args, kept, strict=True)}
    native = core_arrays.to_native(name, writes=None, **plain, **more)
    inputs = native.arrays[: len(args)]
    inputs = [x if z else y for x, y, z in zip(arrays, inputs, kept, strict=True)]
    return native, inputs, native.arrays[len(args) :]


def sparse_inputs(name: str, args: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    """Return arrays with a `SparseBias` and a `BitMask` for sparse ones of the last two.

    These are bias and mask. Without a mask, the pattern of a sparse bias is the mask.
    """
    *others, bias, mask = arrays
    mask = bits_of_sparse(name, args[-1], mask)
    if checks.is_sparse(bias):
        bias = SparseBias(name, args[-2], bias)
        mask = bias.structure.pattern if mask is None else mask
        if bias.device is not None and not isinstance(mask, BitMask):
            raise TypeError(
                f"{name}: {args[-1]} is an array and {args[-2]} a sparse matrix on a GPU, want a "
                f"BitMask (BitMask({args[-1]}))"
            )
    return [*others, bias, mask]


def sparse(arrays: Sequence[Any]) -> list[bool]:
    """Return which arrays are what `sparse_inputs` has for sparse ones."""
    *others, bias, mask = arrays
    return [*[False] * len(others), isinstance(bias, SparseBias), isinstance(mask, BitMask)]


def dense_inputs(
    name: str, native: core_arrays.Native, inputs: Sequence[Any], out: Any = None
) -> list[Any]:
    """Check a sparse bias, and return the inputs without it: a problem has no view of it."""
    *others, bias, mask = inputs
    if not isinstance(bias, SparseBias):
        return [*inputs]
    q, k, *_ = others
    device = None if native.backend == "numpy" else q.data.device_id
    if bias.device != device:
        where = ["the CPU" if x is None else f"CUDA device {x}" for x in (bias.device, device)]
        raise ValueError(
            f"{name}: bias is a sparse matrix on {where[0]}, q is on {where[1]}, want one device"
        )
    bias.check(name, q, k, out)
    return [*others, None, mask]


def refuse_bits(name: str, arrays: Sequence[Any], places: Collection[str]) -> None:
    """Raise for what `sparse_inputs` has for sparse arrays, with arguments that say where keys are.

    `places` are the names of these.
    """
    arg = next(x for x in ("q_offsets", "k_lengths", "page_table") if x in places)
    *_, bias, mask = sparse(arrays)
    if bias:
        raise ValueError(f"{name}: bias is a sparse matrix, want an array with {arg}")
    if mask and arg != "q_offsets":
        raise ValueError(
            f"{name}: mask is a BitMask or a sparse matrix, want an array of bool with {arg}"
        )


def refuse_sparse_bias(name: str, bias: Any, dense: str) -> None:
    """Raise for a sparse bias where gradients are recorded; `dense` is what to write instead."""
    if checks.is_sparse(bias):
        raise TypeError(
            f"{name}: bias is a sparse matrix, want {dense} and a mask of its pattern, or "
            "fa_cupy.attention and attention_backward on NumPy arrays"
        )


def allocator(native: core_arrays.Native) -> Callable[..., Any]:
    """Return ``empty(shape, dtype, like)``, which makes results that lie in memory as `like`."""

    def empty(shape: Sequence[int], dtype: Any, like: Any) -> Any:
        return core_arrays.empty_laid_out(np, shape, like, dtype)

    if native.backend == "numpy":
        return empty
    made: Callable[..., Any] = backends.gpu("workspace").empty
    return made


def backend_of(native: core_arrays.Native, family: str) -> Any:
    """Return the module of a family of functions that computes with these arrays."""
    return backends.module(native.backend, family)


def score_for(name: str, score: Operands | None, need: Sequence[str] = ()) -> dict[str, Operands]:
    """Return what a backend's function gets of a score; raise for a gradient that is not there.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    score : Operands or None
    need : sequence of str
        Of gradients, the names of arguments.
    """
    if score is None:
        return {}
    if need:
        score.require_gradients(name, need)
    return {"score": score}


def check_out(name: str, out: Any, problem: Any, inputs: Sequence[Any], keys: Any = None) -> None:
    """Raise unless `out`, where it is given, can take the output of a product.

    `keys` are the `KeyArrays` of a call with offsets.
    """
    if out is not None:
        named = [*zip(("q", "k", "v", "initial_state"), inputs, strict=False)]
        if keys is not None:
            named += [("q_offsets", keys.q_offsets), ("k_offsets", keys.k_offsets)]
        attention_problem.check_out(name, out, problem.out_shape, problem.dtype, named)


def result_for(native: core_arrays.Native, problem: Any, q: Any, out: Any) -> Any:
    """Return where to write the output: `out`, or new memory where the caller's library makes it.

    None where that is the backend's to make.
    """
    if out is not None or native.new is None:
        return out
    order = core_arrays.memory_order(problem.out_shape, q)
    return native.new(problem.out_shape, problem.dtype, order)
