"""Wrong calls, whose errors name the argument, what it got and what is wanted."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from scipy import sparse

import fa_cupy
from fa_cupy import BitMask, layouts
from validation.outcomes.record import Call

_X = np.zeros((1, 4, 3, 8), np.float32)
_LONG = np.zeros((1, 4, 5, 8), np.float32)
_MASK = np.ones((3, 3), bool)
_LSE = np.zeros((1, 4, 3), np.float32)
_STATE = np.zeros((8, 8), np.float32)


class Cpu:
    """An argument for calls with NumPy arrays only."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Shown:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _in(xp: Any, value: Any) -> Any:
    """Return an argument with its arrays in the namespace `xp`."""
    if isinstance(value, Cpu):
        return value.value
    if isinstance(value, BitMask):
        return value
    if type(value) in (list, tuple):
        return type(value)(_in(xp, x) for x in value)
    return xp.asarray(value) if type(value) is np.ndarray else value


def _cpu(value: Any) -> bool:
    """Whether an argument exists for NumPy only."""
    return isinstance(value, Cpu) or (isinstance(value, (list, tuple)) and any(map(_cpu, value)))


def _wrong(
    function: str, base: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]
) -> Iterator[Call]:
    """Yield the calls of a public function by the arguments that differ from a good call."""
    for name, changed in cases.items():
        given = {**base, **changed}

        def run(xp: Any, given: Mapping[str, Any] = given) -> Any:
            called: Any = fa_cupy if not function.startswith("layouts") else layouts
            for part in function.removeprefix("layouts.").split("."):
                called = getattr(called, part)
            return called(**{arg: _in(xp, x) for arg, x in given.items()})

        only = any(map(_cpu, given.values()))
        yield Call(f"error {function} {name}", run, fails=True, cpu=only)


def _masked_array() -> Cpu:
    return Cpu(np.ma.masked_array(_X, False))


def _options() -> dict[str, dict[str, Any]]:
    """Return wrong options of attention, which its gradients have too."""
    return {
        "scale nan": {"scale": float("nan")},
        "scale inf": {"scale": float("inf")},
        "scale text": {"scale": "1"},
        "scale bool": {"scale": True},
        "scale complex": {"scale": 1j},
        "scale huge": {"scale": 10**400},
        "scale of two numbers": {"scale": (1.0, 2.0)},
        "scale shown in several lines": {"scale": Shown("a\n b")},
        "scale shown at length": {"scale": Shown("x" * 100)},
        "softcap negative": {"softcap": -1.0},
        "softcap None": {"softcap": None},
        "is_causal text": {"is_causal": "yes"},
        "is_causal two": {"is_causal": 2},
        "causal_align": {"is_causal": True, "causal_align": "left"},
        "causal_align number": {"causal_align": 1},
        "causal without causal_align": {"is_causal": True, "k": _LONG, "v": _LONG},
        "window without causal_align": {"window": (1, 1), "k": _LONG, "v": _LONG},
        "window of one": {"window": (1,)},
        "window number": {"window": 3},
        "window negative": {"window": (-1, 0)},
        "window float": {"window": (0, 1.5)},
        "window bool": {"window": (True, 0)},
    }


def _arrays() -> dict[str, dict[str, Any]]:
    """Return wrong arrays of attention, which its gradients have too."""
    bits = BitMask.from_dense(_MASK)
    return {
        "q None": {"q": None},
        "k None": {"k": None},
        "q list": {"q": [1.0]},
        "v number": {"v": 1.0},
        "q masked array": {"q": _masked_array()},
        "q of int": {"q": _X.astype(np.int64)},
        "q of complex": {"q": _X.astype(np.complex64)},
        "q big-endian": {"q": Cpu(_X.astype(">f4"))},
        "k of another dtype": {"k": _X.astype(np.float16)},
        "v of another dtype": {"v": _X.astype(np.float64)},
        "q of one axis": {"q": _X[0, 0, 0]},
        "k of one axis": {"k": _X[0, 0, 0]},
        "k head_dim": {"k": _X[..., :4]},
        "v length": {"v": _LONG},
        "k heads": {"k": _X[:, :3], "v": _X[:, :3]},
        "k and v heads": {"q": np.zeros((1, 12, 3, 8), np.float32), "k": _X[:, :3], "v": _X},
        "k batch": {"k": np.zeros((2, 4, 3, 8), np.float32), "q": np.zeros((3, 4, 3, 8), "f")},
        "bias of int": {"bias": _MASK.astype(int)},
        "bias shape": {"bias": np.zeros((4, 3), np.float32)},
        "bias batch": {"bias": np.zeros((3, 3, 3), np.float32)},
        "bias list": {"bias": [0.0]},
        "bias sparse, of bool": {"bias": Cpu(sparse.csr_array(_MASK))},
        "bias sparse, of one axis": {"bias": Cpu(sparse.coo_array(_X[0, 0, 0]))},
        "bias sparse, shape": {"bias": Cpu(sparse.csr_array(_X[0, 0]))},
        "mask of int": {"mask": _MASK.astype(int)},
        "mask of float": {"mask": _X[0, 0]},
        "mask shape": {"mask": _MASK[:2]},
        "mask batch": {"mask": np.ones((3, 3, 3), bool)},
        "mask list": {"mask": [[True]]},
        "mask BitMask queries": {"mask": bits, "q": _LONG},
        "mask BitMask keys": {"mask": bits, "k": _LONG, "v": _LONG},
        "mask BitMask batch": {"mask": BitMask.from_dense(np.ones((3, 3, 3), bool))},
    }


def _attention() -> Iterator[Call]:
    outs = {
        "out shape": {"out": _X[0]},
        "out dtype": {"out": _X.astype(np.float64)},
        "out list": {"out": [0.0]},
        "precision": {"precision": "fp8"},
        "precision number": {"precision": 1},
        "return_lse": {"return_lse": "yes"},
        "return_lse None": {"return_lse": None},
    }
    yield from _wrong("attention", dict.fromkeys("qkv", _X), _arrays() | _options() | outs)
    base = dict.fromkeys("qkv", _X)
    more: dict[str, Callable[[Any], Any]] = {
        "out read-only": lambda xp: xp.broadcast_to(xp.zeros((1, 1, 3, 8), np.float32), _X.shape),
        "out with repeated elements": lambda xp: xp.lib.stride_tricks.as_strided(
            xp.zeros(99, np.float32), _X.shape, (4, 4, 32, 4)
        ),
    }
    for name, make in more.items():
        yield Call(
            f"error attention {name}",
            lambda xp, make=make: fa_cupy.attention(
                **{arg: xp.asarray(x) for arg, x in base.items()}, out=make(xp)
            ),
            fails=True,
            cpu=name == "out read-only",
        )
    for name in "qkv":
        yield Call(f"error attention out overlaps {name}", _overlap(name), fails=True)


def _overlap(name: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        arrays = {arg: xp.zeros((2, 3, 8), np.float32) for arg in "qkv"}
        return fa_cupy.attention(**arrays, out=arrays[name][:, ::-1])

    return run


def _gradients() -> Iterator[Call]:
    base = {"dout": _X, **dict.fromkeys("qkv", _X), "out": _X, "lse": _LSE}
    cases = {
        "dout None": {"dout": None},
        "out None": {"out": None},
        "lse None": {"lse": None},
        "dout shape": {"dout": _X[0]},
        "dout dtype": {"dout": _X.astype(np.float64)},
        "out shape": {"out": _X[..., :4]},
        "out dtype": {"out": _X.astype(np.float16)},
        "lse shape": {"lse": _LSE[0]},
        "lse dtype": {"lse": _LSE.astype(np.float64)},
        "dlse shape": {"dlse": _X},
        "dlse dtype": {"dlse": _LSE.astype(np.float64)},
        "need text": {"need": "q"},
        "need number": {"need": 1},
        "need nothing": {"need": ()},
        "need unknown": {"need": ["q", "x"]},
        "need number in it": {"need": [0]},
        "need bias without one": {"need": ("bias",)},
        "need twice": {"need": ("q", "q")},
        "need unknown with a bias": {"need": ("a",), "bias": _X[0, 0, 0, :3]},
    }
    yield from _wrong("attention_backward", base, _arrays() | _options() | cases)


def _torch() -> Iterator[Call]:
    base = dict.fromkeys(("query", "key", "value"), _X)
    cases: dict[str, dict[str, Any]] = {
        "dropout_p": {"dropout_p": 0.1},
        "dropout_p of 2": {"dropout_p": 2, "seed": 1},
        "seed": {"dropout_p": 0.1, "seed": -1},
        "dropout_p text": {"dropout_p": "0"},
        "attn_mask and is_causal": {"attn_mask": _MASK, "is_causal": True},
        "attn_mask of int": {"attn_mask": _MASK.astype(int)},
        "attn_mask shape": {"attn_mask": _MASK[:2]},
        "attn_mask list": {"attn_mask": [True]},
        "key heads": {"key": _X[:, :2], "value": _X[:, :2]},
        "key head_dim": {"key": _X[..., :4]},
        "query None": {"query": None},
        "enable_gqa": {"enable_gqa": "yes"},
        "scale": {"scale": "a"},
        "is_causal": {"is_causal": 3},
    }
    yield from _wrong("scaled_dot_product_attention", base, cases)


def _of_products() -> dict[str, dict[str, Any]]:
    """Return wrong arguments that all products have."""
    return {
        "k None": {"k": None},
        "v list": {"v": [1]},
        "k of int": {"k": _X.astype(int)},
        "v dtype": {"v": _X.astype(np.float64)},
        "k of one axis": {"k": _X[0, 0, 0]},
        "v length": {"v": _LONG},
        "k masked array": {"k": _masked_array()},
    }


def _of_states() -> dict[str, dict[str, Any]]:
    return {
        "initial_state dtype": {"initial_state": _STATE.astype(np.float64)},
        "initial_state shape": {"initial_state": _STATE[:4]},
        "initial_state heads": {"initial_state": np.zeros((3, 8, 8), np.float32)},
        "initial_state batch": {"initial_state": np.zeros((3, 4, 8, 8), np.float32),
                                "k": np.zeros((2, 4, 3, 8), np.float32)},
        "reverse": {"reverse": "no"},
    }  # fmt: skip


def _of_queries() -> dict[str, dict[str, Any]]:
    return {
        "q None": {"q": None},
        "q dim": {"q": _X[..., :4]},
        "q length": {"q": _LONG},
        "k heads": {"k": _X[:, :3]},
    }


def _products() -> Iterator[Call]:
    base = dict.fromkeys("qkv", _X)
    cases = {
        "algorithm": {"algorithm": "fast"},
        "algorithm number": {"algorithm": 3},
        "algorithm recurrent on NumPy": {"algorithm": "recurrent", "q": Cpu(_X)},
        "algorithm low_occupancy on NumPy": {"algorithm": "low_occupancy", "q": Cpu(_X)},
        "return_state": {"return_state": "x"},
        "out shape": {"out": _X[0]},
        "out dtype": {"out": _X.astype(np.float64)},
    }
    shared = _of_products() | _of_queries()
    yield from _wrong("causal_product", base, shared | _of_states() | cases)
    cases = {
        "dout None": {"dout": None},
        "dout shape": {"dout": _LONG},
        "dout dtype": {"dout": _X.astype(np.float16)},
        "dstate shape": {"dstate": _STATE},
        "dstate dtype": {"dstate": np.zeros((1, 4, 8, 8))},
    }
    yield from _wrong("causal_product_backward", base | {"dout": _X}, shared | _of_states() | cases)
    cases = {
        "feature_map": {"feature_map": "gelu"},
        "feature_map number": {"feature_map": 2},
        "feature_map None": {"feature_map": None},
        "feature_map of another shape": {"feature_map": lambda x: x[..., :1, :].copy()},
        "feature_map of another dtype": {"feature_map": lambda x: x.astype(np.float64)},
        "feature_map returns a list": {"feature_map": lambda x: [1]},
        "feature_map returns nothing": {"feature_map": lambda x: None},
        "eps negative": {"eps": -1},
        "eps nan": {"eps": float("nan")},
        "eps text": {"eps": "small"},
        "out shape": {"out": _X[0]},
    }
    cases |= {
        "is_causal": {"is_causal": "no"},
        "return_state number": {"return_state": 2},
        "initial_state dtype": {"initial_state": np.zeros((8, 9), np.float16)},
        "initial_state shape": {"initial_state": np.zeros((8, 8), _X.dtype)},
    }
    yield from _wrong("linear_attention", base, shared | cases)
    cases = {
        "dout None": {"dout": None},
        "dout shape": {"dout": _LONG},
        "dstate shape": {"dstate": np.zeros((8, 8), _X.dtype)},
        "feature_map without its gradient": {"feature_map": np.abs},
        "feature_map_gradient alone": {"feature_map_gradient": np.add},
        "is_causal": {"is_causal": None},
    }
    yield from _wrong("linear_attention_backward", base | {"dout": _X}, cases)
    cases = {
        "ends number": {"ends": 3},
        "ends text": {"ends": "12"},
        "ends set": {"ends": {1}},
        "ends float": {"ends": [1, 1.5]},
        "ends bool": {"ends": [True]},
        "ends negative": {"ends": [0, -1]},
        "ends too far": {"ends": [4]},
        "ends of q": {"ends": [1], "q": _X},
        "q dim": {"q": _X[..., :4], "ends": [1, 2, 3]},
        "q heads": {"q": np.zeros((1, 6, 1, 8), np.float32), "ends": [1]},
    }
    base = dict.fromkeys("kv", _X)
    yield from _wrong("prefix_state", base, _of_products() | _of_states() | cases)


def _merge() -> Iterator[Call]:
    base = {"outs": [_X, _X], "lses": [_LSE, _LSE]}
    cases: dict[str, dict[str, Any]] = {
        "outs number": {"outs": 3},
        "lses None": {"lses": None},
        "outs with None": {"outs": [_X, None]},
        "no parts": {"outs": [], "lses": []},
        "fewer lses": {"lses": [_LSE]},
        "outs shape": {"outs": [_X, _LONG]},
        "outs dtype": {"outs": [_X, _X.astype(np.float64)]},
        "outs of int": {"outs": [_X.astype(int), _X]},
        "outs of one axis": {"outs": [_X[0, 0, 0]], "lses": [_LSE]},
        "lses shape": {"lses": [_LSE, _X]},
        "lses of int": {"lses": [_LSE, _LSE.astype(int)]},
        "outs with a list": {"outs": [_X, [1.0]]},
    }
    yield from _wrong("merge_attention", base, cases)


def _constructors() -> Iterator[Call]:
    cases: dict[str, dict[str, Any]] = {
        "None": {"mask": None},
        "of int": {"mask": _MASK.astype(int)},
        "of one axis": {"mask": _MASK[0]},
        "list": {"mask": [[True]]},
        "masked array": {"mask": Cpu(np.ma.masked_array(_MASK, False))},
    }
    yield from _wrong("BitMask.from_dense", {}, cases)
    indices = np.zeros((3, 2), int)
    cases = {
        "None": {"indices": None},
        "of float": {"indices": indices.astype(float)},
        "of one axis": {"indices": indices[0]},
        "too large": {"indices": indices + 5},
        "k_len negative": {"k_len": -1},
        "k_len float": {"k_len": 5.0},
        "k_len bool": {"k_len": True},
        "k_len too large": {"k_len": 2**31},
    }
    yield from _wrong("BitMask.from_indices", {"indices": indices, "k_len": 5}, cases)
    good = sparse.csr_array(np.eye(3))
    cases = {
        "None": {"matrix": None},
        "array": {"matrix": Cpu(np.eye(3))},
        "text": {"matrix": "csr"},
        "of no matrices": {"matrix": []},
        "of two shapes": {"matrix": [good, sparse.csr_array(np.eye(4))]},
        "with a number": {"matrix": [good, 3]},
        "of one axis": {"matrix": sparse.coo_array(np.ones(3))},
    }
    yield from _wrong("BitMask.from_csr", {}, cases)


def _patterns() -> Iterator[Call]:
    ids = np.arange(6)
    cases: dict[str, dict[str, Any]] = {
        "None": {"q_ids": None},
        "of float": {"q_ids": ids.astype(float)},
        "of bool": {"k_ids": ids > 2},
        "of no axis": {"q_ids": ids[0]},
        "batch axes": {"q_ids": np.ones((2, 6), int), "k_ids": np.ones((3, 6), int)},
    }
    yield from _wrong("BitMask.from_segments", {"q_ids": ids}, cases)
    cases = {
        "shape text": {"shape": "55"},
        "shape negative": {"shape": -1},
        "shape too large": {"shape": (2**20, 2**20)},
        "window negative": {"window": -1},
        "window float": {"window": 1.0},
        "window of three": {"window": (1, 2, 3)},
    }
    yield from _wrong("BitMask.from_window", {"shape": (4, 5), "window": 1}, cases)
    cases = {
        "None": {"dst": None},
        "of float": {"src": ids.astype(float)},
        "too large": {"src": ids + 1},
        "negative": {"dst": ids - 1},
        "lengths": {"dst": ids[:5]},
        "n float": {"n": 6.0},
        "n of one": {"n": (6,)},
    }
    yield from _wrong("BitMask.from_edges", {"src": ids, "dst": ids, "n": 6}, cases)


def _blocks_and_functions() -> Iterator[Call]:
    states, words = np.ones((2, 2), int), np.zeros((4, 8, 32, 2), np.uint32)
    cases: dict[str, dict[str, Any]] = {
        "states None": {"states": None},
        "states of float": {"states": states.astype(float)},
        "states shape": {"states": np.ones((2, 3), int)},
        "states of one axis": {"states": states[0]},
        "states too large": {"states": 3 * states},
        "states negative": {"states": -states},
        "words None": {"words": None},
        "words dtype": {"words": words.astype(np.int64)},
        "words shape": {"words": words[:3]},
        "words of one axis": {"words": words.ravel()},
        "q_len": {"q_len": "200"},
    }
    base: dict[str, Any] = {"states": states, "q_len": 200, "k_len": 200, "words": words}
    yield from _wrong("BitMask.from_blocks", base, cases)
    cases = {
        "function": {"function": 3},
        "block_states": {"block_states": 3},
        "shape number": {"shape": 5},
        "shape text": {"shape": "55"},
        "shape of one": {"shape": (5,)},
        "shape negative": {"shape": (5, -1)},
        "shape float": {"shape": (5, 1.0)},
        "function returns int": {"function": lambda q, k: q + k},
        "function returns a shape": {"function": lambda q, k: np.ones((2, 2), bool)},
        "function returns a ragged list": {"function": lambda q, k: [[True], [True, False]]},
        "function returns a masked array": {"function": lambda q, k: np.ma.masked_array(q == k)},
        "block_states returns bool": {"block_states": lambda *a: a[2] > 0},
        "block_states returns 3": {"block_states": lambda *a: a[2] * 0 + 3},
        "block_states returns a shape": {"block_states": lambda *a: np.zeros((2, 7), int)},
    }
    base = {"function": lambda q, k: q == k, "shape": (5, 6)}
    yield from _wrong("BitMask.from_function", base, cases)


def _methods() -> Iterator[Call]:
    def both(xp: Any) -> list[Any]:
        return [BitMask.from_dense(xp.ones(shape, bool)) for shape in ((2, 3, 3), (3, 3, 3))]

    def damaged(xp: Any) -> Any:
        both(xp)[0].save(file := io.BytesIO())
        data = bytearray(file.getvalue())
        data[300] ^= 1
        return BitMask.load(_Named(bytes(data)))

    def other_archive(xp: Any) -> Any:
        np.savez(file := _Named(b""), a=np.zeros(3))
        file.seek(0)
        return BitMask.load(file)

    cases: dict[str, Callable[[Any], Any]] = {
        "constructor": lambda xp: BitMask(),
        "and of lengths": lambda xp: both(xp)[0] & BitMask.from_dense(_MASK[:2]),
        "or of batch axes": lambda xp: both(xp)[0] | both(xp)[1],
        "constructor of a list": lambda xp: BitMask([[True]]),
        "and with an array of int": lambda xp: both(xp)[0] & _MASK.astype(int),
        "or of an array of another shape": lambda xp: _MASK[:2] | both(xp)[0],
        "truth value": lambda xp: bool(both(xp)[0]),
        "equals an array": lambda xp: both(xp)[0].equals(_MASK),
        "sum of an axis": lambda xp: both(xp)[0].sum(axis=3),
        "reorder with a batch": lambda xp: both(xp)[0].reorder(),
        "array without a copy": lambda xp: both(np)[0].__array__(copy=False),
        "index too large": lambda xp: both(xp)[0][5],
        "index of pairs": lambda xp: both(xp)[0][0, 0],
        "index ellipsis": lambda xp: both(xp)[0][..., 0],
        "index with a step": lambda xp: both(xp)[0][..., ::2],
        "iteration": lambda xp: iter(both(xp)[0][0]),
        "attribute set": lambda xp: setattr(both(xp)[0], "entries", 0),
        "attribute deleted": lambda xp: delattr(both(xp)[0], "entries"),
        "to_csr with a batch": lambda xp: both(xp)[0].to_csr(),
        "hash": lambda xp: hash(both(xp)[0]),
        "save to a number": lambda xp: both(xp)[0].save(3),
        "load from a number": lambda xp: BitMask.load(3),
        "load from a text": lambda xp: BitMask.load(_Named(b"no archive")),
        "load from an empty file": lambda xp: BitMask.load(_Named(b"")),
        "load a damaged file": damaged,
        "load another archive": other_archive,
        "load from no file": lambda xp: BitMask.load("no such file"),
    }
    for name, run in cases.items():
        yield Call(f"error BitMask {name}", run, fails=True)


class _Named(io.BytesIO):
    """A file whose name in messages stays the same."""

    def __repr__(self) -> str:
        return "<a file>"


def _layouts() -> Iterator[Call]:
    bits, words = np.zeros((128, 128), bool), np.zeros((8, 32, 2), np.uint32)
    cases: dict[str, dict[str, Any]] = {
        "order": {"order": "column"},
        "order number": {"order": 1},
        "bits dtype": {"bits": bits.astype(np.uint8)},
        "bits shape": {"bits": bits[:64]},
        "bits list": {"bits": [True]},
        "bits masked array": {"bits": Cpu(np.ma.masked_array(bits, False))},
    }
    yield from _wrong("layouts.pack", {"bits": bits}, cases)
    cases = {
        "order": {"order": "column"},
        "words dtype": {"words": words.astype(np.int32)},
        "words shape": {"words": words[:4]},
        "words of the other order": {"words": words, "order": "row_major"},
        "words list": {"words": [1]},
    }
    yield from _wrong("layouts.unpack", {"words": words}, cases)
    for name, n in (("odd", 12), ("zero", 0), ("large", 264), ("text", "8"), ("bool", True)):
        for function in ("wgmma", "mma"):
            if (function, name) != ("mma", "large"):  # which has no limit
                yield from _wrong(f"layouts.{function}", {}, {f"n {name}": {"n": n}})


def calls() -> Iterator[Call]:
    """Yield all calls."""
    yield from _attention()
    yield from _gradients()
    yield from _torch()
    yield from _products()
    yield from _merge()
    yield from _constructors()
    yield from _patterns()
    yield from _blocks_and_functions()
    yield from _methods()
    yield from _layouts()
