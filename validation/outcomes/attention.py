"""Calls of attention, its gradients, merging and the function with PyTorch's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import fa_cupy
from fa_cupy import BitMask
from tests.support.strategies import lay
from validation.outcomes.data import DTYPES, blocks, chance, draw, some_dtypes
from validation.outcomes.record import GPU_TOLERANCE, Call

Shape = tuple[int, ...]
Edit = Callable[[dict[str, Any]], None]
_ARGS = ("q", "k", "v", "bias", "mask")


@dataclass(frozen=True)
class Case:
    """An attention call: shapes, how arrays lie in memory, what some elements are, options."""

    q: Shape = (2, 3, 70, 16)
    k: Shape | None = None  # that of q
    v: Shape | None = None  # that of k
    bias: Shape | None = None
    bias_dtype: str | None = None  # that of q
    mask: Shape | None = None
    density: float = 0.6
    bits: bool = False  # a BitMask
    layouts: tuple[str, ...] = ("dense",) * 5
    edit: Edit | None = None
    options: dict[str, Any] = field(default_factory=dict)
    out: str | None = None  # the layout of `out`
    need: tuple[str, ...] | None = None
    dlse: bool = False
    loose: bool = False  # floats depend strongly on rounding

    def slack(self, dtype: str) -> float:
        """Return how far floats may differ on any machine, in units of the largest."""
        if self.loose:
            return 1e-6 if dtype == "float64" else 5e-2
        # a gradient in another dtype is as accurate as what it is computed in
        return GPU_TOLERANCE[dtype] if self.bias_dtype else 0.0

    def arrays(self, dtype: str) -> dict[str, Any]:
        """Return the arguments by name, as NumPy arrays."""
        k = self.k or self.q
        shapes = {"q": self.q, "k": k, "v": self.v or k, "bias": self.bias}
        dtypes = dict.fromkeys("qkv", dtype) | {"bias": self.bias_dtype or dtype}
        found: dict[str, Any] = {
            arg: None if shape is None else draw(arg, shape, DTYPES[dtypes[arg]])
            for arg, shape in shapes.items()
        }
        found["mask"] = None
        if self.mask is not None:
            found["mask"] = (
                blocks("mask", self.mask) if self.bits else chance("mask", self.mask, self.density)
            )
        if self.edit is not None:
            with np.errstate(over="ignore"):
                self.edit(found)
        return found

    def native(self, xp: Any, dtype: str) -> list[Any]:
        """Return the five arguments in the namespace `xp`, each in its layout."""
        found = []
        for (arg, x), how in zip(self.arrays(dtype).items(), self.layouts, strict=True):
            if x is None:
                found.append(None)
            elif arg == "mask" and self.bits:
                found.append(BitMask.from_dense(xp.asarray(x)))
            elif how == "repeated":  # stride 0 over the first axis
                found.append(xp.broadcast_to(xp.asarray(x[:1]), x.shape))
            else:
                found.append(lay(xp, x, how))
        return found


def _set(arg: str, index: Any, value: float) -> Edit:
    def edit(arrays: dict[str, Any]) -> None:
        arrays[arg][index] = value

    return edit


def _times(q: float, k: float) -> Edit:
    def edit(arrays: dict[str, Any]) -> None:
        arrays["q"] *= arrays["q"].dtype.type(q)
        arrays["k"] *= arrays["k"].dtype.type(k)

    return edit


def _hidden(value: float) -> Edit:
    """Make keys and values that a mask of keys hides not finite."""

    def edit(arrays: dict[str, Any]) -> None:
        arrays["mask"][..., 5:9] = False
        arrays["k"][..., 5:9, :] = value
        arrays["v"][..., 6:8, :] = value

    return edit


def _blind(arrays: dict[str, Any]) -> None:
    """Let a few queries see nothing."""
    arrays["mask"][..., 3:7, :] = False


def _minus_infinity(arrays: dict[str, Any]) -> None:
    arrays["bias"][..., 10:40] = -np.inf
    arrays["bias"][..., 3, :] = -np.inf


def _padding(arrays: dict[str, Any]) -> None:
    arrays["bias"][..., 50:] = -1e9
    arrays["bias"][..., 4, :] = -1e9


_S = (2, 3, 70, 70)
_CROSS = {"q": (2, 3, 45, 16), "k": (2, 3, 150, 16)}
_TALL = {"q": (2, 3, 150, 16), "k": (2, 3, 45, 16)}
_TOP, _BOTTOM = {"causal_align": "top_left"}, {"causal_align": "bottom_right"}
_CAUSAL = {"is_causal": True}


_CASES = {
    "plain": Case(),
    "no batch axes": Case((33, 8)),
    "many tiles": Case((1, 2, 600, 64), (1, 2, 700, 64)),
    "many tiles causal": Case((1, 1, 700, 64), options=_CAUSAL),
    "dims 20 and 12": Case((2, 40, 20), v=(2, 40, 12)),
    "dim 1": Case((2, 40, 1)),
    "dims 136 and 72": Case((1, 2, 70, 136), v=(1, 2, 70, 72)),
    "batch broadcast": Case((2, 1, 40, 16), (1, 3, 50, 16), (3, 50, 8)),
    "grouped heads": Case((2, 6, 40, 16), (2, 2, 50, 16)),
    "grouped heads of two counts": Case((1, 8, 40, 16), (1, 4, 50, 16), (1, 2, 50, 16)),
    "grouped causal bits": Case(
        (2, 4, 200, 16), (2, 2, 200, 16), mask=(200, 200), bits=True, options=_CAUSAL
    ),
    "causal": Case(options=_CAUSAL),
    "causal top left": Case(**_CROSS, options=_CAUSAL | _TOP),
    "causal bottom right": Case(**_CROSS, options=_CAUSAL | _BOTTOM),
    "causal bottom right with blind queries": Case(**_TALL, options=_CAUSAL | _BOTTOM),
    "causal top left tall": Case(**_TALL, options=_CAUSAL | _TOP),
    "window": Case((1, 2, 300, 16), options={"window": (20, 5)}),
    "window open to the left": Case(options={"window": (None, 3)}),
    "window top left": Case(**_TALL, options={"window": (9, 0)} | _TOP),
    "window bottom right causal": Case(**_CROSS, options={"window": (9, 4)} | _CAUSAL | _BOTTOM),
    "softcap": Case(options={"softcap": 1.5}),
    "softcap bias causal": Case(bias=_S, options={"softcap": 2.0} | _CAUSAL),
    "scale zero": Case(options={"scale": 0.0}),
    "scale negative": Case(options={"scale": -0.7}),
    "bias": Case(bias=_S),
    # without `dlse`, the gradient of a bias that all keys share is 0 but for rounding
    "bias of heads": Case(bias=(3, 1, 1), dlse=True),
    "bias of queries": Case(bias=(70, 1), dlse=True),
    "bias of keys": Case(bias=(70,)),
    "bias of one number": Case(bias=(), dlse=True),
    "bias of batch and keys": Case(bias=(2, 1, 1, 70)),
    "bias of minus infinity": Case(bias=_S, edit=_minus_infinity),
    "bias of padding": Case(bias=(2, 1, 70, 70), edit=_padding, loose=True),
    "mask": Case(mask=_S),
    "mask of pairs": Case(mask=(70, 70), options=_CAUSAL),
    "mask of keys": Case(mask=(70,)),
    "mask of batch and keys": Case(mask=(2, 1, 1, 70)),
    "mask of one": Case(mask=(), density=1.0),
    "mask of nothing": Case(mask=(70, 70), density=0.0),
    "mask of all": Case(mask=(70, 70), density=1.0),
    "mask with blind queries": Case(mask=_S, edit=_blind),
    "bits": Case((1, 2, 300, 16), (1, 2, 400, 16), mask=(300, 400), bits=True),
    "bits of heads": Case((2, 3, 140, 16), mask=(3, 140, 140), bits=True),
    "bits of batch, bias, window": Case(
        (2, 2, 200, 16),
        mask=(2, 1, 200, 200),
        bits=True,
        bias=(2, 200, 200),
        options={"window": (100, 20)},
    ),
    "NaN hidden": Case(mask=(2, 1, 1, 70), edit=_hidden(np.nan)),
    "infinity hidden": Case(mask=(70, 70), edit=_hidden(np.inf)),
    "NaN hidden by causality": Case(edit=_set("v", (..., 50, 3), np.nan), options=_CAUSAL),
    "NaN in a value": Case(edit=_set("v", (..., 5, 3), np.nan)),
    "infinity in a value": Case(edit=_set("v", (..., 5, 3), np.inf)),
    "infinity in a key": Case(edit=_set("k", (0, 0, 5, 3), np.inf)),
    "NaN in a query": Case(edit=_set("q", (..., 7, 3), np.nan)),
    "large scores": Case(edit=_times(300, 10), loose=True),
    "large scores masked": Case(mask=_S, edit=_times(300, 10), loose=True),
    "no queries": Case((2, 3, 0, 8), (2, 3, 5, 8)),
    "no keys": Case((2, 3, 5, 8), (2, 3, 0, 8)),
    "no head_dim": Case((2, 3, 5, 0), v=(2, 3, 5, 4)),
    "no v_dim": Case((2, 3, 5, 8), v=(2, 3, 5, 0)),
    "no batch entries": Case((0, 3, 5, 8)),
    "layout blhd": Case(layouts=("blhd",) * 5, bias=_S, mask=_S),
    "layout steps and reversed": Case(layouts=("steps", "reversed", "upward", "rows", "dense"),
                                      bias=_S),
    "layout transposed and offset": Case(
        layouts=("transposed", "offset", "transposed", "upward", "steps"), bias=_S, mask=_S
    ),
    "layout repeated": Case(layouts=("repeated", "repeated", "dense", "repeated", "repeated"),
                            bias=_S, mask=_S),
    "out": Case(out="dense"),
    "out in rows": Case(out="rows", layouts=("blhd",) * 5),
    "need v": Case(need=("v",)),
    "need k and q": Case(need=("k", "q"), mask=_S),
    "need bias": Case(bias=(3, 70, 1), need=("bias",), dlse=True),
    "dlse": Case(dlse=True),
    "dlse causal bits": Case((1, 2, 200, 16), mask=(200, 200), bits=True, dlse=True,
                             options=_CAUSAL),
}  # fmt: skip


_DROPPED = {"dropout": 0.1, "seed": 2**40 + 7}
# On the CPU alone.
_WITH_DROPOUT = {
    "dropout": Case(options=_DROPPED),
    "dropout causal bits": Case(
        (1, 2, 200, 16), mask=(200, 200), bits=True, dlse=True, options=_CAUSAL | _DROPPED
    ),
    "dropout of all": Case(bias=(3, 70, 1), options=_DROPPED | {"dropout": 1.0}),
}


_IN_ALL_DTYPES = ("plain", "many tiles", "causal", "mask", "bits", "bias", "grouped heads")


def _more() -> Iterator[tuple[str, str, Case]]:
    """Yield name, dtype and case of what one dtype has."""
    for dtype in ("float32", "bfloat16"):
        yield "precision tf32", dtype, Case(options={"precision": "tf32"}, loose=True)
    for dtype, bias in (("float32", "float64"), ("bfloat16", "float32"), ("float64", "float16")):
        yield f"bias of {bias}", dtype, Case(bias=_S, bias_dtype=bias)
    for scale in (1e30, -1e30):
        yield f"scale {scale:g} softcap 3", "float32", Case(options={"scale": scale, "softcap": 3})
    yield "softcap 1e-300", "float64", Case(options={"softcap": 1e-300})
    many = Case((1, 2, 1500, 64), mask=(1500, 1500), bits=True)
    yield "many blocks", "float32", many
    yield "many blocks in turns", "float16", replace(many, options=_CAUSAL)


def _forward(case: Case, dtype: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        arrays = case.native(xp, dtype)
        if case.out is None:
            out, lse = fa_cupy.attention(*arrays, return_lse=True, **case.options)
            alone = fa_cupy.attention(*arrays, **case.options)
            return out, lse, bool((_bits(alone) == _bits(out)).all())
        zeros = np.zeros((*arrays[0].shape[:-1], arrays[2].shape[-1]), DTYPES[dtype])
        target = lay(xp, zeros, case.out)
        answer = fa_cupy.attention(*arrays, out=target, **case.options)
        return target, answer is target

    return run


def _bits(array: Any) -> Any:
    """Return a copy of an array as integers, so that NaN is equal to itself."""
    return array.copy("C").view(f"u{array.dtype.itemsize}")


def _backward(case: Case, dtype: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        arrays = case.native(xp, dtype)
        out, lse = fa_cupy.attention(*arrays, return_lse=True, **case.options)
        dout = lay(xp, draw("dout", out.shape, out.dtype), case.layouts[2])
        dlse = xp.asarray(draw("dlse", lse.shape, lse.dtype)) if case.dlse else None
        options = {arg: x for arg, x in case.options.items() if arg != "precision"}
        return fa_cupy.attention_backward(
            dout, *arrays[:3], out, lse, *arrays[3:], dlse=dlse, need=case.need, **options
        )

    return run


def _sparse_biased(form: str, dtype: str, mask: bool) -> Callable[[Any], Any]:
    """Return a call with weights of pairs: some blocks have few of them, others many."""

    def run(xp: Any) -> Any:
        from scipy import sparse

        q, k, v, dout = (draw(arg, (2, 3, 200, 16), DTYPES[dtype]) for arg in ("q", "k", "v", "d"))
        seen = chance("weights", (200, 200), 0.2)
        seen[:, 128:] &= chance("few weights", (200, 72), 0.03)
        bias = sparse.csr_array(np.where(seen, draw("bias", (200, 200), np.float32), 0))
        bias.data[::7] = 0
        given = bias.asformat(form), chance("mask", (200, 200), 0.5) if mask else None
        out, lse = fa_cupy.attention(q, k, v, *given, return_lse=True)
        *found, dbias = fa_cupy.attention_backward(dout, q, k, v, out, lse, *given)
        of_bias = dbias.tocsr()
        indices = (x.astype(np.int64) for x in (of_bias.indptr, of_bias.indices))
        return out, lse, *found, dbias.format, *indices, of_bias.data

    return run


def _dropout_mask(shape: tuple[int, ...], xp: Any) -> Any:
    part = {"rows": slice(3, 30), "cols": slice(1, None)}
    whole, parts = (fa_cupy.dropout_mask(2**63 + 5, 0.3, shape, **x) for x in ({}, part))
    return whole, parts, fa_cupy.dropout_mask(1, 0.3, shape, as_bits=True).nnz


def _merge_calls() -> Iterator[Call]:
    def parts(dtype: str, count: int, edit: str = "") -> tuple[list[Any], list[Any]]:
        real = "float64" if dtype == "float64" else "float32"
        outs = [draw(f"out {i}", (2, 30, 8), DTYPES[dtype]) for i in range(count)]
        lses = [3 * draw(f"lse {i}", (2, 30), DTYPES[real]) for i in range(count)]
        lses[0][0, :9] = -np.inf
        outs[0][0, :9] = np.nan
        if edit == "empty":
            for lse in lses:
                lse[:, 5] = -np.inf
        if edit == "large":
            lses = [1000 * lse for lse in lses]
        return outs, lses

    def in_lists(xp: Any, *chosen: Any) -> Any:
        return fa_cupy.merge_attention(*([xp.asarray(x) for x in part] for part in parts(*chosen)))

    def stacked(xp: Any, dtype: str) -> Any:
        return fa_cupy.merge_attention(*(xp.asarray(np.stack(part)) for part in parts(dtype, 3)))

    for dtype in DTYPES:
        for count, edit in ((1, ""), (2, ""), (3, "empty"), (2, "large")):
            name = f"merge_attention {dtype} {count} parts {edit}".rstrip()
            yield Call(name, lambda xp, a=(dtype, count, edit): in_lists(xp, *a))
        yield Call(f"merge_attention {dtype} stacked", lambda xp, dtype=dtype: stacked(xp, dtype))


def _torch_calls() -> Iterator[Call]:
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.3},
        "mask": {"attn_mask": chance("mask", (40, 50), 0.6)},
        "bias": {"attn_mask": draw("bias", (3, 40, 50), np.float32)},
        "bits": {"attn_mask": "bits"},
        "grouped": {"enable_gqa": True},
    }

    def run(xp: Any, dtype: str, options: dict[str, Any]) -> Any:
        heads = 1 + 2 * (not options.get("enable_gqa"))
        query = draw("q", (2, 3, 40, 16), DTYPES[dtype])
        key, value = (draw(arg, (2, heads, 50, 16), DTYPES[dtype]) for arg in "kv")
        mask = options.get("attn_mask")
        if isinstance(mask, str):
            mask = BitMask.from_dense(xp.asarray(blocks("mask", (40, 50))))
        elif mask is not None:
            mask = xp.asarray(mask)
        arrays = (xp.asarray(x) for x in (query, key, value))
        return fa_cupy.scaled_dot_product_attention(*arrays, **(options | {"attn_mask": mask}))

    for dtype in ("float16", "float32"):
        for name, options in cases.items():
            yield Call(
                f"scaled_dot_product_attention {dtype} {name}",
                lambda xp, a=(dtype, options): run(xp, *a),
            )


def calls() -> Iterator[Call]:
    """Yield all calls."""
    every = [
        (name, dtype, case)
        for name, case in _CASES.items()
        for dtype in (DTYPES if name in _IN_ALL_DTYPES else some_dtypes(name))
    ]
    for name, dtype, case in (*every, *_more()):
        forward, backward = _forward(case, dtype), _backward(case, dtype)
        if case.need is None:
            yield Call(f"attention {dtype} {name}", forward, slack=case.slack(dtype))
        if case.out is None:
            yield Call(f"attention_backward {dtype} {name}", backward, slack=case.slack(dtype))
    for form, dtype, mask in (
        ("csr", "float32", False),
        ("csc", "float16", False),
        ("coo", "float64", True),
        ("bsr", "bfloat16", True),
    ):
        name = f"attention {dtype} sparse bias {form}{' mask' * mask}"
        yield Call(name, _sparse_biased(form, dtype, mask), cpu=True)
    for name, case in _WITH_DROPOUT.items():
        for dtype in DTYPES if name == "dropout" else some_dtypes(name):
            yield Call(f"attention {dtype} {name}", _forward(case, dtype), cpu=True)
            yield Call(f"attention_backward {dtype} {name}", _backward(case, dtype), cpu=True)
    for shape in ((2, 3, 40, 200), (130, 64)):
        yield Call(f"dropout_mask {shape}", partial(_dropout_mask, shape), cpu=True)
    yield from _merge_calls()
    yield from _torch_calls()
