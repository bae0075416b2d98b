"""Arguments of the functions for PyTorch, as operators take them.

An operator takes tensors, numbers and text. A score becomes its text, with its arrays after it; a
`BitMask` becomes a number, by which it is found as long as it is referred to.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fa_cupy import _score
from fa_cupy._bitmask import BitMask, bits_of_sparse
from fa_cupy._score import Score, arrays_of, with_arrays
from fa_cupy.core import attention_problem, checks, dispatch, linear_problem
from fa_cupy.dropout.arguments import probability, seed_of

_BITS: weakref.WeakValueDictionary[int, BitMask] = weakref.WeakValueDictionary()
_NUMBERS: dict[int, int] = {}  # by the id of a mask that lives
_COUNT = itertools.count()

# Masks that compiled calls have made of sparse matrices, by what is in them: the caller does not
# hold them until the backward pass.
_OF_SPARSE: dict[bytes, BitMask] = {}
_MOST_OF_SPARSE = 16

# Texts of scores, with the dtypes and numbers of axes of their arrays -> scores without arrays.
_SCORES: dict[Any, Score] = {}
_MOST_SCORES = 256

_DTYPES = {
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: attention_problem.BFLOAT16,
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.bool: np.dtype(np.bool_),
}


torch.compiler.assume_constant_result(_score.parsed)


class Options(NamedTuple):
    """All arguments of attention that are no tensors."""

    bits: int | None  # the number of a BitMask
    score: str | None  # see `score_text`
    scale: float | None
    is_causal: bool
    causal_align: str | None
    left: int | None
    right: int | None
    softcap: float
    precision: str | None
    enable_gqa: bool | None  # None in `attention`; a bool in `scaled_dot_product_attention`
    dropout: float

    def keywords(self) -> dict[str, Any]:
        """Return what `fa_cupy.attention` and `fa_cupy.attention_backward` both take."""
        return {
            "scale": self.scale,
            "is_causal": self.is_causal,
            "causal_align": self.causal_align,
            "window": (self.left, self.right),
            "softcap": self.softcap,
        }


def options(
    name: str,
    mask: Any,
    score: Score | None,
    scale: Any,
    is_causal: Any,
    causal_align: Any,
    window: Any,
    softcap: Any,
    precision: Any,
    enable_gqa: bool | None = None,
    dropout: float = 0.0,
) -> Options:
    """Check options, as far as they do not depend on tensors, and return them.

    What is compiled may have numbers that are not known yet: there the operator raises.
    """
    bits = number_of(mask) if isinstance(mask, BitMask) else None
    text = None if score is None else score_text(score)
    if not torch.compiler.is_compiling():
        scale, is_causal, softcap = attention_problem.check_options(
            name, scale=scale, is_causal=is_causal, causal_align=causal_align, window=window,
            softcap=softcap, precision=precision,
        )  # fmt: skip
    left, right = (None, None) if window is None else window
    return Options(
        bits, text, scale, is_causal, causal_align, left, right, softcap, precision, enable_gqa,
        dropout,
    )  # fmt: skip


def places(name: str, given: dict[str, Any], *tensors: Any) -> dict[str, Any]:
    """Return the arguments that say where keys are as tensors, which `tensors` are not.

    Raises
    ------
    TypeError
        For what is no tensor.
    NotImplementedError
        For pages, if one of `tensors` requires a gradient.
    """
    lengths = given.get("k_lengths")
    if checks.is_int(lengths):
        given = given | {"k_lengths": torch.tensor(lengths, device="cpu")}
    require_tensors(name, (*given,), **given)
    if given.get("page_table") is not None and torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise NotImplementedError(
                    f"{name}: page_table is given and a tensor requires a gradient, want the call "
                    "in torch.no_grad(), or tensors after .detach() (with pages there are no "
                    "gradients)"
                )
    return given


def dropped(name: str, q: Any, dropout: Any, seed: Any, arg: str = "dropout") -> Any:
    """Return the probability of dropout, and its seed as a tensor; None where none is dropped.

    A seed that is not given is drawn by the generator of the device of `q`.

    Parameters
    ----------
    name, arg : str
        The public function, and its name of `dropout`.
    q : torch.Tensor
    dropout : float
    seed : int, torch.Tensor or None
    """
    if not torch.compiler.is_compiling():
        dropout = probability(name, arg, dropout)
        if seed is not None and not isinstance(seed, torch.Tensor):
            seed = seed_of(name, seed)
    if isinstance(seed, int):  # modulo 2**64
        seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device="cpu")
    if dropout == 0.0:
        return 0.0, None
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=q.device)
    return dropout, seed


def places_for(q: Any, **given: Any) -> dict[str, Any]:
    """Return the arguments that say where keys are, as `fa_cupy` takes them with `q`.

    Those in the memory of the host may go with tensors on a device.
    """
    return {
        arg: x.numpy() if x.device.type == "cpu" != q.device.type else x
        for arg, x in given.items()
        if x is not None
    }


def number(name: str, arg: str, value: Any, minimum: float = -math.inf) -> Any:
    """Return a finite number as a float; what is compiled, as it is, for the operator to check."""
    if torch.compiler.is_compiling():
        return value
    return checks.finite(name, arg, value, minimum=minimum)


def bits_of(name: str, arg: str, mask: Any) -> Any:
    """Return a sparse matrix as a BitMask, which is not compiled, and anything else as it is."""
    if not checks.is_sparse(mask):
        return mask
    return _bits_of_sparse(name, arg, mask, torch.compiler.is_compiling())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _bits_of_sparse(name: str, arg: str, matrix: Any, hold: bool) -> BitMask:
    """Return a sparse matrix as a BitMask; if `hold`, the same one for the same pairs.

    Compiled code finds a mask by its number, and is compiled again for another one.
    """
    mask: BitMask = bits_of_sparse(name, arg, matrix)
    if not hold:
        return mask
    key = hashlib.blake2b(pickle.dumps(mask)).digest()
    mask = _OF_SPARSE[key] = _OF_SPARSE.pop(key, mask)  # as the last one
    if len(_OF_SPARSE) > _MOST_OF_SPARSE:
        del _OF_SPARSE[next(iter(_OF_SPARSE))]
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def number_of(mask: BitMask) -> int:
    """Return the number of a mask; `torch.compile` compiles again for another mask."""
    key = id(mask)
    if key not in _NUMBERS:
        _NUMBERS[key] = next(_COUNT)
        _BITS[_NUMBERS[key]] = mask
        weakref.finalize(mask, _NUMBERS.pop, key)
    return _NUMBERS[key]


def mask_of(number: int | None, mask: Any) -> Any:
    """Return the mask that has a number, or `mask` for None."""
    if number is None:
        return mask
    if number not in _BITS:
        raise RuntimeError(
            "attention: mask is a BitMask that is no longer held, want it held until the backward "
            "pass of a compiled function is over"
        )
    return _BITS[number]


def score_text(score: Score) -> str:
    """Return a line with the expression, and one with the name of each array or its value."""
    lines = [score.expression]
    for name, value in score._arguments.items():
        if isinstance(value, torch.Tensor):
            lines.append(name)
        elif isinstance(value, (int, np.integer)):
            lines.append(f"{name}={int(value)}")
        else:
            lines.append(f"{name}={float(value)!r}")
    return "\n".join(lines)


def score_arrays(text: str | None) -> list[str]:
    """Return the names that errors and gradients have for the arrays of a score, from its text."""
    lines = [] if text is None else text.split("\n")[1:]
    return [f"score.{line}" for line in lines if "=" not in line]


def score_of(text: str | None, arrays: Sequence[Any]) -> Score | None:
    """Return the score of a text, with arrays."""
    if text is None:
        return None
    key = text, *((x.dtype, x.ndim) for x in arrays)
    if key not in _SCORES:
        expression, *lines = text.split("\n")
        rest = iter(arrays)
        given: dict[str, Any] = {}
        for line in lines:
            name, _, number = line.partition("=")
            whole = number.lstrip("-").isdecimal()
            given[name] = (int if whole else float)(number) if number else next(rest)
        made = Score(expression, **given)
        if len(_SCORES) == _MOST_SCORES:
            _SCORES.clear()
        _SCORES[key] = with_arrays(made, dict.fromkeys(arrays_of("attention", made)))
    score = _SCORES[key]
    return with_arrays(score, dict(zip(arrays_of("attention", score), arrays, strict=True)))


def require_tensors(name: str, optional: Sequence[str] = (), **arrays: Any) -> None:
    """Raise for what is no tensor; only `optional` arguments may be None."""
    dispatch.require(name, **{arg: x for arg, x in arrays.items() if arg not in optional})
    for arg, x in arrays.items():
        if x is not None and not isinstance(x, torch.Tensor):
            kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
            raise TypeError(f"{name}: {arg} is a {kind}, want a torch.Tensor")


def check_features(name: str, q: Any, k: Any, x: Any, y: Any) -> None:
    """Check features as `linear_problem.check_features`."""
    if torch.compiler.is_compiling():
        of_q, of_k = linear_problem.FEATURES
        require_one_dtype(name, **{"q": q, "k": k, of_q: x, of_k: y})
        linear_problem.check_feature_shapes(name, q, k, x, y)
    else:
        linear_problem.check_features(name, *map(stand_in, (q, k, x, y)))


def check_parts(name: str, outs: Sequence[Any], lses: Sequence[Any]) -> None:
    """Check parts as `attention_problem.matching_parts`, of what is compiled."""
    require_one_dtype(name, **{f"outs[{i}]": x for i, x in enumerate(outs)})
    attention_problem.check_part_shapes(name, outs, lses)
    for i, lse in enumerate(lses):
        if not lse.dtype.is_floating_point:
            raise TypeError(f"{name}: lses[{i}] has dtype {lse.dtype}, want one of floats")


def require_one_dtype(name: str, **tensors: Any) -> None:
    """Raise unless all tensors have the dtype of the first one; None is left out."""
    lead, first = next(iter(tensors.items()))
    for arg, x in tensors.items():
        if x is not None and x.dtype != first.dtype:
            raise TypeError(f"{name}: {arg} has dtype {x.dtype}, {lead} has {first.dtype}")


def stand_in(x: Any) -> Any:
    """Return a NumPy array of the shape and the dtype of a tensor in the memory of one element."""
    if x is None or isinstance(x, BitMask):
        return x
    dtype = _DTYPES.get(x.dtype)
    if dtype is None:
        dtype = np.dtype(str(x.dtype).removeprefix("torch."))
    return np.broadcast_to(np.zeros((), dtype), tuple(x.shape))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
