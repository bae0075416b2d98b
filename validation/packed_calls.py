"""The reduced set of the sanitizers, packed sequences: builds of attention and of products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from validation import attention_calls, backward_calls, peers, product_calls

_WRONG = 0.02  # of a norm, in bfloat16; rounding is a tenth of it
_BAND = ("is_causal", "causal_align", "window")
_SMALL = (32, 64, 96, 128, 192, 256)
#: Which kernels of attention are to run, and with which dims; of "split" ones of float32, and of
#: "tf32" ones, K and V are split beforehand.
_DIMS = {
    "sm90": (64, 96, 128, 192, 256), "sm80": _SMALL, "fp32": _SMALL, "split": (64, 128, 256),
    "tf32": (64, 128, 256), "fp64": _SMALL,
}  # fmt: skip
_SPLIT = "split", "tf32"


# ------------------------------------------------------------------------------------- attention
def problems(dim: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Shapes and options that reach every branch of the builds with this `dim`.

    Offsets are on the device but of "host" calls; "wide" ones have 64 bits. Some are out of order.
    """
    plain = {"head_dim": dim, "v_dim": dim, "heads": 4, "q_len": 335, "k_len": 335}
    some = {**plain, "q_offsets": [0, 3, 3, 70, 191, 200, 330]}
    other = {**plain, "q_len": 270, "k_len": 300}
    # Rows in front of all sequences, between none, and behind; sequences without a query or a key.
    other |= {"q_offsets": [5, 40, 40, 41, 180, 260], "k_offsets": [9, 9, 30, 160, 161, 250]}
    wrong = {**plain, "q_len": 210, "k_len": 210, "wide": True}
    wrong |= {"q_offsets": [-3, 70, 60, 150, 200, 900], "k_offsets": [0, 70, 90, 150, 200, 210]}
    alone = {**plain, "q_len": 200, "k_len": 3, "q_offsets": [0, 1 << 30], "k_offsets": [0, 3]}
    top, bottom = ({"causal_align": side} for side in ("top_left", "bottom_right"))
    return [
        (some, {"is_causal": True}),
        ({**some, "dlse": True, "host": True}, {}),
        ({**other, "head_dim": dim - 8, "v_dim": dim - 16}, {"is_causal": True, **bottom}),
        ({**other, "bias": "pairs", "dlse": True}, {"window": (70, 5), **top}),
        ({**other, "bias": "keys", "wide": True}, {"softcap": 2.0, "is_causal": True, **top}),
        ({**other, "sinks": True}, {"window": (0, 63), **bottom}),
        (wrong, {"is_causal": True, **bottom}),
        (alone, {}),
        ({**some, "q_offsets": [7]}, {}),
        ({**plain, "q_len": 9, "k_len": 1, "q_offsets": [0, 9], "k_offsets": [0, 1]}, {}),
    ]


def arrays(dtype: np.dtype[Any], shape: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of a call on the host, its offsets among them, and who sees whom as "mask"."""
    found = backward_calls.arrays(dtype, {**shape, "bias": shape.get("bias") == "keys"})
    if shape.get("bias") == "pairs":
        rng = np.random.default_rng(3)
        size = shape["heads"], shape["q_len"], shape["k_len"]
        found["bias"] = rng.standard_normal(size).astype(np.float32).astype(dtype)
    integers = np.int64 if shape.get("wide") else np.int32
    for name in ("q_offsets", "k_offsets"):
        if name in shape:
            found[name] = np.array(shape[name], integers)
    return found


def solve(
    host: dict[str, Any],
    options: dict[str, Any],
    send: Callable[[str, Any], Any],
    precision: str | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """Return the output, of this precision, and the gradients of a call on arrays that are sent.

    Gradients are those of the precise output: where a row has one key, they are the difference of
    numbers that would be equal but for rounding.
    """
    from fa_cupy import attention, attention_backward

    sent = {name: send(name, x) for name, x in host.items()}
    q, k, v, dout = (sent.pop(name) for name in ("q", "k", "v", "dout"))
    dlse = sent.pop("dlse", None)
    out, lse = attention(q, k, v, return_lse=True, precision=precision, **sent, **options)
    precise = (
        (out, lse) if precision is None else attention(q, k, v, return_lse=True, **sent, **options)
    )
    return out, attention_backward(dout, q, k, v, *precise, dlse=dlse, **sent, **options)


def is_right(
    host: dict[str, Any], options: dict[str, Any], out: Any, grads: tuple[Any, ...]
) -> bool:
    """Whether a call's results are those of the definition, by a mask that says who sees whom."""
    from fa_cupy import reference
    from tests.support import packed_sequences

    given = dict(host)
    offsets = given.pop("q_offsets"), given.pop("k_offsets", host["q_offsets"])
    lengths = host["q"].shape[-2], host["k"].shape[-2]
    band = {name: options[name] for name in _BAND if name in options}
    rest = {name: x for name, x in options.items() if name not in _BAND}
    given["mask"] = packed_sequences.visible(*offsets, lengths, **band)
    of_forward = {name: given.get(name) for name in ("bias", "mask", "sinks")}
    want, _ = reference.attention(host["q"], host["k"], host["v"], **of_forward, **rest)
    want[..., packed_sequences.invalid_rows(*offsets, lengths), :] = np.nan
    if not reference.relative_error(out, want) <= _WRONG:
        return False
    return backward_calls.error(given, grads, rest) <= _WRONG


@contextlib.contextmanager
def forced(kernels: str) -> Iterator[None]:
    """While entered, attention and its gradients get the kernels of this kind if they can."""
    from fa_cupy.core import plan_cache
    from fa_cupy.gpu.kernels import forward
    from fa_cupy.gpu.kernels.attention.fwd_sm80 import FwdSm80

    plan_cache.plans.clear()  # what is kept would not be loaded again
    forward.select.cache_clear()
    with contextlib.ExitStack() as stack:
        if kernels == "sm80":
            rows = tuple(row for row in forward.ROWS if isinstance(row, FwdSm80))
            stack.enter_context(mock.patch.object(forward, "ROWS", rows))
            stack.enter_context(backward_calls.by_no_maps())
        stack.enter_context(attention_calls.split_keys(kernels in _SPLIT))
        stack.enter_context(_gradients_of(kernels))
        yield
    forward.select.cache_clear()
    plan_cache.plans.clear()


def _gradients_of(kernels: str) -> contextlib.AbstractContextManager[None]:
    """Where gradients of float32 are computed by the kernels of this kind."""
    return backward_calls.by_mma() if kernels == "fp32" else contextlib.nullcontext()


def dtype_of(kernels: str) -> np.dtype[Any]:
    """The dtype of the arrays that these kernels take."""
    name = "fp32" if kernels in _SPLIT else kernels
    return peers.DTYPES[name if name in peers.DTYPES else "bf16"]


def rows_of(kernels: str, dim: int, target: str) -> set[Any]:
    """Return the builds that plain calls of this dim must reach."""
    from fa_cupy.gpu.kernels import attention_backward, forward
    from fa_cupy.gpu.kernels.attention import row_intervals
    from fa_cupy.gpu.kernels.backward import Wanted

    mapped = kernels == "sm90"
    dtype = dtype_of(kernels).name
    call = forward.Call(None, mapped, False, kernels in _SPLIT, kernels == "tf32")
    row = forward.select(dtype, dim, dim, target, call)
    assert row is not None
    splits = attention_calls.with_splits(row) - {row}
    wanted = Wanted(dtype, dim, mapped=mapped, packed=True)
    with _gradients_of(kernels):
        gradients = attention_backward.select(wanted, target)
    return {row.for_sequences(True), *splits, *gradients, row_intervals.VARIANT}


def run_attention(kernels: str, dim: int, target: str) -> int:
    """Make the calls of some kernels with one dim; return how many there were."""
    calls = 0
    precision = "tf32" if kernels == "tf32" else None
    with forced(kernels), attention_calls.loaded_rows() as reached:
        for shape, options in problems(dim):
            host = arrays(dtype_of(kernels), shape)

            def send(name: str, x: Any, shape: dict[str, Any] = shape) -> Any:
                return x if name.endswith("offsets") and "host" in shape else peers.to_device(x)

            out, grads = solve(host, options, send, precision)
            if not is_right(host, options, peers.to_host(out), tuple(map(peers.to_host, grads))):
                raise RuntimeError(f"{kernels} {shape} {options}: the result is wrong")
            calls += 1
        if missed := rows_of(kernels, dim, target) - reached:
            raise RuntimeError(f"no call reached {', '.join(row.name for row in missed)}")
    return calls


# -------------------------------------------------------------------------------------- products
class Problem(NamedTuple):
    """A call: its function in `fa_cupy`, where sequences are, sizes of its arrays, and options."""

    function: str
    offsets: list[int]
    length: int
    qk_dim: int
    v_dim: int
    heads: tuple[int, int] = (1, 1)  # of q, and of k and v
    reverse: bool = False
    states: bool = False
    offset: int = 0  # elements by which arrays are off the alignment of 16-byte copies
    k_offsets: list[int] | None = None
    own_prefix: bool = True  # whether blocks may sum what lies before their segments


OUT_OF_ORDER = [0, 70, 60, 999]  # to rows from 70 on


def product_problems(dim: int) -> list[Problem]:
    """Calls that reach every branch of the builds with this `dim`; the last ones are split."""
    some, behind = [4, 40, 40, 41, 190, 200], 210
    split, total = [0, 2100, 4200], 4203
    sizes = dim, dim
    forward, backward = "causal_product", "causal_product_backward"
    return [
        Problem(forward, some, behind, *sizes, (4, 2), states=True),
        Problem(forward, some, behind, dim - 3, dim - 15, (2, 2), reverse=True, states=True),
        Problem(forward, some, behind, *sizes, offset=1),
        Problem(forward, [3], 9, *sizes, states=True),
        Problem(forward, OUT_OF_ORDER, 150, *sizes, (2, 2), states=True),
        Problem(backward, some, behind, *sizes, (4, 2), states=True),
        Problem(backward, some, behind, dim - 3, dim - 15, (2, 2), reverse=True),
        Problem("linear_attention", some, behind, dim, dim - 8, (4, 2)),
        Problem("linear_attention", some, behind, *sizes, k_offsets=[0, 2, 70, 70, 100, 190]),
        Problem(forward, split, total, *sizes, states=True, own_prefix=False),
        Problem(forward, split, total, *sizes, reverse=True),
        Problem(backward, split, total, *sizes, states=True, own_prefix=False),
    ]


def product_arrays(dtype: np.dtype[Any], problem: Problem) -> dict[str, np.ndarray[Any, Any]]:
    """Arguments of a call by name, on the host."""
    rng = np.random.default_rng(1)
    q_heads, heads = problem.heads
    sequences = len(problem.offsets) - 1

    def draw(*shape: int, kind: Any = dtype) -> np.ndarray[Any, Any]:
        return rng.standard_normal((1, *shape)).astype(np.float32).astype(kind)

    found = {
        "q": draw(q_heads, problem.length, problem.qk_dim),
        "k": draw(heads, problem.length, problem.qk_dim),
        "v": draw(heads, problem.length, problem.v_dim),
        "q_offsets": np.array(problem.offsets, np.int32),
    }
    if problem.k_offsets is not None:
        found["k_offsets"] = np.array(problem.k_offsets, np.int64)
    if problem.function.endswith("backward"):
        found["dout"] = draw(q_heads, problem.length, problem.v_dim)
    if problem.states:
        kind = np.promote_types(np.float32, dtype) if dtype.kind == "f" else np.float32
        state = heads, sequences, problem.qk_dim, problem.v_dim
        found["initial_state"] = draw(*state, kind=kind)
        if problem.function.endswith("backward"):
            found["dstate"] = draw(*state, kind=kind)
    return found


def product_results(problem: Problem, given: dict[str, Any]) -> list[Any]:
    """Make a call; return all of its results."""
    import fa_cupy

    options: dict[str, Any] = {"reverse": problem.reverse}
    if problem.function == "causal_product":
        options["return_state"] = problem.states
    if problem.function == "linear_attention":
        options = {"is_causal": problem.k_offsets is None}
    result = getattr(fa_cupy, problem.function)(**given, **options)
    return [*result] if isinstance(result, tuple) else [result]


def products_are_right(
    problem: Problem, host: dict[str, np.ndarray[Any, Any]], results: list[np.ndarray[Any, Any]]
) -> bool:
    """Whether results are those of float64 on the host, or NaN of the last sequence alone."""
    from fa_cupy import reference

    if problem.offsets == OUT_OF_ORDER:
        finite = np.isfinite(results[0].astype(np.float64))
        return bool(finite[..., :70, :].all()) and not finite[..., 70:, :].any()
    wide = {
        name: x if name.endswith("offsets") else x.astype(np.float64) for name, x in host.items()
    }
    pairs = zip(results, product_results(problem, wide), strict=True)
    return all(reference.relative_error(x, y) <= _WRONG for x, y in pairs)


@contextlib.contextmanager
def forced_products(row: Any, problem: Problem) -> Iterator[None]:
    """While entered, a product of the reduced set gets this row if it can compute it."""
    from fa_cupy.gpu.kernels.linear import table
    from fa_cupy.gpu.kernels.linear.sm90 import cost_model
    from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant

    mapped = isinstance(row, ProductSm90Variant)

    def rival(other: Any) -> bool:
        if mapped and not isinstance(other, ProductSm90Variant):
            return False  # what serves arrays that tensor maps cannot walk
        return other is not row and other.algorithm and other.dtype == row.dtype

    with contextlib.ExitStack() as stack:
        rows = tuple(other for other in table.PACKED if not rival(other))
        stack.enter_context(mock.patch.object(table, "PACKED", rows))
        if mapped:
            stack.enter_context(product_calls.others_dear())
        if not problem.own_prefix:
            none = mock.patch.object(cost_model, "_own_prefix", return_value=())
            stack.enter_context(none)
        yield


def product_rows(target: str) -> list[Any]:
    """The rows of packed products that compute outputs."""
    from fa_cupy.gpu.kernels.linear.table import PACKED

    return [row for row in PACKED if row.algorithm and target in row.targets]


def run_products(row: Any) -> int:
    """Make the calls of one row; return how many there were."""
    from fa_cupy.core import plan_cache

    calls = 0
    plan_cache.plans.clear()
    dtype = attention_calls.dtype_of(row)
    with attention_calls.loaded_rows() as reached:
        for problem in product_problems(row.dim):
            host = product_arrays(dtype, problem)
            sent = {
                name: attention_calls.send(x, 0 if name.endswith("offsets") else problem.offset)
                for name, x in host.items()
            }
            with forced_products(row, problem):
                results = [*map(peers.to_host, product_results(problem, sent))]
            if not products_are_right(problem, host, results):
                raise RuntimeError(f"{row.name} {problem}: the result is wrong")
            calls += 1
    plan_cache.plans.clear()
    if row not in reached:
        raise RuntimeError(f"no call reached {row.name}")
    return calls


# ------------------------------------------------------------------------------------------- all
def parts(target: str) -> list[Callable[[], int]]:
    """Return what makes the calls of each kind."""
    kinds = [kind for kind in _DIMS if kind == "sm80" or target == "sm_90a"]
    found = [
        partial(run_attention, kind, dim, target) for kind in kinds for dim in _DIMS[kind]
    ]  # the rest takes less time
    return [*found, *[partial(run_products, row) for row in product_rows(target)]]


def run(target: str, share: int = 0, shares: int = 1) -> int:
    """Make every call once and look at each result; return how many there were.

    Parameters
    ----------
    target : str
    share, shares : int
        One of so many shares of the calls, and how many there are.

    Raises
    ------
    RuntimeError
        Where a result is wrong, or no call reached a build.
    """
    return sum(part() for part in parts(target)[share::shares])
