"""Calls of causal products, their gradients, linear attention and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fa_cupy
from fa_cupy import reference
from tests.support.strategies import lay
from validation.outcomes.data import DTYPES, draw, some_dtypes
from validation.outcomes.record import Call

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A causal product: shapes, layouts, one element that is not finite, options."""

    q: Shape = (2, 3, 90, 16)
    k: Shape | None = None  # that of q
    v: Shape | None = None  # that of k
    initial: Shape | None = None
    layouts: tuple[str, ...] = ("dense",) * 3
    odd: tuple[str, float] | None = None  # an argument and what one element of it is
    options: dict[str, Any] = field(default_factory=dict)
    out: str | None = None  # the layout of `out`
    dstate: bool = True

    def native(self, xp: Any, dtype: str) -> tuple[list[Any], Any]:
        """Return q, k and v and the initial state."""
        k = self.k or self.q
        shapes = {"q": self.q, "k": k, "v": self.v or k}
        found = []
        for (arg, shape), how in zip(shapes.items(), self.layouts, strict=True):
            x = draw(arg, shape, DTYPES[dtype])
            if self.odd and arg == self.odd[0]:
                x[..., 20, 1] = self.odd[1]
            found.append(lay(xp, x, how))
        state = None
        if self.initial is not None:
            state = xp.asarray(draw("initial", self.initial, _state_dtype(dtype)))
        return found, state


def _state_dtype(dtype: str) -> np.dtype[Any]:
    return DTYPES["float64" if dtype == "float64" else "float32"]


_CASES = {
    "plain": Case(),
    "no batch axes": Case((33, 8)),
    "many chunks": Case((1, 2, 1300, 64)),
    "many chunks reverse": Case((1, 1, 1300, 32), options={"reverse": True}),
    "reverse": Case(options={"reverse": True}),
    "dims 20 and 12": Case((2, 70, 20), v=(2, 70, 12)),
    "dims 1 and 130": Case((2, 70, 1), v=(2, 70, 130)),
    "batch broadcast": Case((2, 1, 70, 16), (1, 3, 70, 16), (3, 70, 8)),
    "grouped heads": Case((2, 6, 70, 16), (2, 2, 70, 16)),
    "grouped heads of two counts": Case((1, 8, 70, 16), (1, 4, 70, 16), (1, 2, 70, 16)),
    "initial state": Case(initial=(2, 3, 16, 16)),
    "initial state of one head": Case(initial=(1, 16, 16), options={"reverse": True}),
    "initial state of groups": Case((2, 6, 70, 16), (2, 2, 70, 16), initial=(2, 6, 16, 16)),
    "chunked": Case(options={"algorithm": "chunked"}),
    "NaN in a value": Case(odd=("v", np.nan)),
    "infinity in a key": Case(odd=("k", np.inf), options={"reverse": True}),
    "NaN in a query": Case(odd=("q", np.nan)),
    "no rows": Case((2, 3, 0, 8), initial=(8, 8)),
    "no dim": Case((2, 3, 5, 0), v=(2, 3, 5, 4)),
    "no batch entries": Case((0, 3, 5, 8)),
    "layout blhd": Case(layouts=("blhd",) * 3),
    "layout steps and reversed": Case(layouts=("steps", "reversed", "upward")),
    "layout rows and transposed": Case(layouts=("transposed", "rows", "offset")),
    "out": Case(out="dense"),
    "out in rows": Case(out="rows", layouts=("blhd",) * 3),
    "without dstate": Case(dstate=False),
}


_IN_ALL_DTYPES = ("plain", "many chunks", "reverse", "grouped heads", "initial state")


def _forward(case: Case, dtype: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        (q, k, v), state = case.native(xp, dtype)
        options = {"initial_state": state} | case.options
        if case.out is None:
            return fa_cupy.causal_product(q, k, v, return_state=True, **options)
        target = lay(xp, np.zeros((*q.shape[:-1], v.shape[-1]), DTYPES[dtype]), case.out)
        answer = fa_cupy.causal_product(q, k, v, out=target, **options)
        return target, answer is target

    return run


def _backward(case: Case, dtype: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        (q, k, v), state = case.native(xp, dtype)
        options = {arg: x for arg, x in case.options.items() if arg != "algorithm"}
        options["initial_state"] = state
        out, last = fa_cupy.causal_product(q, k, v, return_state=True, **options)
        dout = lay(xp, draw("dout", out.shape, out.dtype), case.layouts[2])
        if case.dstate:
            options["dstate"] = xp.asarray(draw("dstate", last.shape, last.dtype))
        return fa_cupy.causal_product_backward(dout, q, k, v, **options)

    return run


def _by_kernel(kernel: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        algorithm = "auto" if xp is np else kernel  # NumPy has none of these
        case = Case((2, 3, 90, 32), options={"algorithm": algorithm})
        return _forward(case, "float32")(xp)

    return run


def _squares(x: Any) -> Any:
    """Return features of another width, all positive."""
    return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1) + x.dtype.type(4)


def _linear_calls() -> Iterator[Call]:
    small = Case((2, 2, 70, 6))
    cases: dict[str, tuple[Case, dict[str, Any]]] = {
        **{f: (Case(), {"feature_map": f}) for f in ("elu1", "relu", "exp")},
        # far from dividing by 0, where sums of weights of both signs may lead
        "identity": (Case(), {"feature_map": "identity", "eps": 1000}),
        "eps": (Case(), {"eps": 0.5}),
        "eps zero": (Case(), {"feature_map": "relu", "eps": 0}),
        "callable": (small, {"feature_map": _squares}),
        "grouped heads": (_CASES["grouped heads"], {}),
        "many chunks": (_CASES["many chunks"], {}),
        "layout steps and reversed": (_CASES["layout steps and reversed"], {}),
        "NaN in a value": (_CASES["NaN in a value"], {}),
        "no rows": (_CASES["no rows"], {}),
        "out in rows": (_CASES["out in rows"], {}),
    }

    def run(xp: Any, dtype: str, case: Case, options: dict[str, Any]) -> Any:
        (q, k, v), _ = case.native(xp, dtype)
        if case.out is None:
            return fa_cupy.linear_attention(q, k, v, **options)
        target = lay(xp, np.zeros((*q.shape[:-1], v.shape[-1]), DTYPES[dtype]), case.out)
        return fa_cupy.linear_attention(q, k, v, out=target, **options) is target, target

    for name, (case, options) in cases.items():
        for dtype in some_dtypes(name):
            yield Call(
                f"linear_attention {dtype} {name}",
                lambda xp, a=(dtype, case, options): run(xp, *a),
            )


def _linear_gradient_calls() -> Iterator[Call]:
    """Yield calls of linear attention with states, over all keys, and of its gradients."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        **{f: ("dense", {"feature_map": f}) for f in ("elu1", "relu", "exp")},
        "all keys": ("dense", {"is_causal": False}),
        "grouped heads": ("grouped heads", {}),
        "grouped heads of all keys": ("grouped heads", {"is_causal": False}),
        "layout steps and reversed": ("layout steps and reversed", {}),
    }

    def run(xp: Any, dtype: str, case: Case, options: dict[str, Any]) -> Any:
        (q, k, v), _ = case.native(xp, dtype)
        options = options | {"eps": 0.5}
        out, state = fa_cupy.linear_attention(q, k, v, return_state=True, **options)
        dout = xp.asarray(draw("dout", out.shape, out.dtype))
        grads = fa_cupy.linear_attention_backward(
            dout, q, k, v, initial_state=state, dstate=state, **options
        )
        return out, state, *grads

    for name, (layout, options) in cases.items():
        case = Case() if layout == "dense" else _CASES[layout]
        for dtype in some_dtypes(name):
            yield Call(
                f"linear_attention_backward {dtype} {name}",
                lambda xp, a=(dtype, case, options): run(xp, *a),
            )


def _state_calls() -> Iterator[Call]:
    cases: dict[str, dict[str, Any]] = {
        "whole": {},
        "whole reverse": {"reverse": True},
        "in order": {"ends": range(10, 91, 20)},
        "in any order, twice": {"ends": [90, 3, 3, 0, 64]},
        "in any order reverse": {"ends": [90, 3, 64], "reverse": True},
        "of an array": {"ends": np.array([5, 70])},
        "at no position": {"ends": []},
        "initial state": {"ends": (0, 40), "initial_state": (3, 16, 16)},
        "read": {"ends": [1, 40, 40, 90, 0], "q": (2, 3, 5, 16)},
        "read whole": {"q": (2, 3, 5, 16)},
        "read by groups": {"ends": [1, 40], "q": (2, 6, 2, 16), "reverse": True},
        "read with initial state": {"ends": [7], "q": (2, 3, 1, 16), "initial_state": (1, 16, 16)},
    }

    def run(xp: Any, dtype: str, options: dict[str, Any]) -> Any:
        k, v = (xp.asarray(draw(arg, (2, 3, 90, 16), DTYPES[dtype])) for arg in "kv")
        chosen = dict(options)
        for arg, of in (("q", DTYPES[dtype]), ("initial_state", _state_dtype(dtype))):
            if arg in chosen:
                chosen[arg] = xp.asarray(draw(arg, chosen[arg], of))
        return fa_cupy.prefix_state(k, v, **chosen)

    for name, options in cases.items():
        for dtype in some_dtypes(name):
            yield Call(
                f"prefix_state {dtype} {name}",
                lambda xp, a=(dtype, options): run(xp, *a),
                dense=True,
            )


def _reference_calls() -> Iterator[Call]:
    shape = (2, 2, 20, 8)
    q, k, v, dout = (draw(arg, shape, np.float64) for arg in ("q", "k", "v", "dout"))
    mask = draw("mask", (20, 20), np.float64) < 1
    runs: dict[str, Callable[[Any], Any]] = {
        "attention": lambda xp: reference.attention(
            q, k, v, dout @ k.swapaxes(-1, -2), mask, is_causal=True
        ),
        "attention_backward": lambda xp: reference.attention_backward(dout, q, k, v, None, mask),
        "causal_product": lambda xp: reference.causal_product(q, k, v, reverse=True),
        "plain": lambda xp: reference.plain(q, k, v, dtype=np.dtype(np.float16)),
        "plain_product": lambda xp: reference.plain_product(q, k, v, dtype=np.dtype(np.float16)),
        "relative_error": lambda xp: np.asarray(reference.relative_error(q, k)),
    }
    for name, run in runs.items():
        yield Call(f"reference.{name}", run, cpu=True)


def calls() -> Iterator[Call]:
    """Yield all calls."""
    for name, case in _CASES.items():
        for dtype in DTYPES if name in _IN_ALL_DTYPES else some_dtypes(name):
            yield Call(f"causal_product {dtype} {name}", _forward(case, dtype))
            if case.out is None:
                yield Call(f"causal_product_backward {dtype} {name}", _backward(case, dtype))
    for kernel in ("recurrent", "low_occupancy"):
        yield Call(f"causal_product float32 {kernel} on a GPU", _by_kernel(kernel))
    yield from _linear_calls()
    yield from _linear_gradient_calls()
    yield from _state_calls()
    yield from _reference_calls()
