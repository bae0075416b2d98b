"""Score expressions, as users write them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np

from fa_cupy.core import checks
from fa_cupy.score import parse
from fa_cupy.score.program import KINDS, Operands, Program, kind_of

_DTYPES = "float16, bfloat16, float32, float64 or integers of up to 64 bits (not uint64)"
_MOST_INT = 2**31 - 1


class Score:
    """A score as an expression, for `attention` and `attention_backward`.

    The score of a query and a key becomes ``expression(s, b, h, i, j) + bias``, which is
    ``s + bias`` in a call without one. Masks, causality and windows apply afterwards.

    Parameters
    ----------
    expression : str
        In Python's syntax, of at most 1000 characters and 60 levels of nesting, made of

        - `s`, the score ``scale * q.k`` after the softcap;
        - integers `b`, `h`, `i` and `j`: the batch entry, the head, the query and the key. `h` is
          the index along axis -3 of the output, and `b` counts the axes before that in C order;
          where an axis is missing, its index is 0. `i` and `j` are rows of `q` and `k`, whatever
          `causal_align` is;
        - the arguments by name: numbers and arrays without axes as they are, other arrays with an
          integer for each of 1 to 4 axes, as in ``table[h, i - j + 99]``;
        - numbers, ``inf`` and ``pi``; ``+ - * /`` and ``**``; ``//`` and ``%`` of integers;
          comparisons, ``and``, ``or``, ``not`` and ``a if c else b``. Integers that are written out
          are below 2**31, and as exponents from -64 to 64;
        - ``where(c, a, b)``, ``abs``, ``min``, ``max``, ``exp``, ``log``, ``sqrt``, ``tanh``,
          ``sin``, ``cos``, ``sigmoid`` and ``floor``.

        Its value is a float. Where it is -inf, the key is hidden.
    **arguments : array or number
        The other names in the expression, each of which must occur there. Arrays are of float16,
        bfloat16, float32, float64 or integers, but not of uint64. They are read in each call that
        uses the score, and must be of the library and on the device of its `q`. Numbers keep the
        values that they have now; integers become literals of the expression.

    Attributes
    ----------
    expression : str
    operands : mapping of str to str
        For each array, the variables that its indices depend on, as "h" or "ij".
    program : fa_cupy.score.program.Program
        The expression without the names and the contents of arrays. Compiled code is kept by it:
        scores with equal programs share their code.

    Raises
    ------
    TypeError, ValueError
        For anything else, with the expression and the column of what is wrong. A call that uses the
        score raises a ValueError, before anything is computed, if for its shapes an index can leave
        its array, a divisor of ``//`` or ``%`` can be less than 1, or an integer can exceed its
        bits (see Notes).

    See Also
    --------
    attention : takes a score.
    fa_cupy.plot.scores : draws one.

    Notes
    -----
    The text is parsed and never run, and no name of it reaches a compiler: an expression of unknown
    origin can compute a score and nothing else. Floats are computed in float32, or in float64 if
    `q` is of float64. Integers are exact: those made of `b`, `h`, `i`, `j`, literals and elements
    of 8 or 16 bits must fit in 32 bits, those made of elements of 32 or 64 bits wrap around at 64
    bits. Divisors of ``//`` and ``%`` must be positive. Indices do not count from the end: a
    negative one is out of range.

    Both values of a ``where`` are computed for all pairs. The indices in both must stay inside
    their arrays: ``x[max(i - 1, 0)] if i > 0 else 0``.

    Gradients follow from the text by the chain rule. At a kink they are the mean of those on both
    sides: 0 for ``abs(s)`` at 0, and the mean of both where the arguments of ``min`` or ``max`` are
    equal. That of ``floor`` is 0.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import Score, attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 50, 16))
    >>> score = Score("s - slopes[h] * abs(i - j)", slopes=2.0 ** -np.arange(1, 9))
    >>> attention(q, k, v, score=score).shape
    (8, 50, 16)
    >>> score
    Score('s - slopes[h] * abs(i - j)', slopes=<float64 array of shape (8,)>)
    >>> dict(score.operands)
    {'slopes': 'h'}
    """

    __slots__ = ("_arguments", "_values", "expression", "operands", "program")

    expression: str
    operands: MappingProxyType[str, str]
    program: Program
    _arguments: MappingProxyType[str, Any]
    _values: MappingProxyType[str, Any]

    def __init__(self, expression: str, /, **arguments: Any) -> None:
        text = parse.tidy(expression)
        values: dict[str, Any] = {}
        shapes: list[tuple[str, str, int, int | None]] = []
        for name, value in arguments.items():
            if name in parse.RESERVED:
                raise ValueError(f"Score: {name} has a meaning in expressions, want another name")
            value, dtype, ndim = _argument(name, value)
            shapes.append((name, dtype, ndim, value if dtype == "literal" else None))
            if dtype != "literal":
                values[name] = value
        program, operands = parsed(text, tuple(shapes))
        arrays = {name: of for name, of in operands if not isinstance(values[name], float)}
        set_once = object.__setattr__
        set_once(self, "expression", text)
        set_once(self, "_arguments", MappingProxyType(dict(arguments)))
        set_once(self, "_values", MappingProxyType(values))
        set_once(self, "operands", MappingProxyType(arrays))
        set_once(self, "program", program)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Score does not change, want a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Score does not change, want a new one")

    def __repr__(self) -> str:
        shown = [repr(self.expression)]
        for name, value in self._arguments.items():
            shape = getattr(value, "shape", None)
            dtype = str(getattr(value, "dtype", "")).rpartition(".")[2]
            text = repr(value) if not shape else f"<{dtype} array of shape {tuple(shape)}>"
            shown.append(f"{name}={text}")
        return f"Score({', '.join(shown)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.expression, dict(self._arguments))


def parsed(
    text: str, arguments: tuple[tuple[str, str, int, int | None], ...]
) -> tuple[Program, tuple[tuple[str, str], ...]]:
    """Return the program of an expression, and the variables that index each of its arrays.

    A function of its own because `fa_cupy.torch` has `torch.compile` call it, not look inside.

    Parameters
    ----------
    text : str
    arguments : tuple of (name, dtype, number of axes, value)
        The dtype is "number" for a float, and "literal" for an integer, which alone has a value.
    """
    known: dict[str, parse.Argument] = {}
    dtypes: dict[str, str] = {}
    for name, dtype, ndim, value in arguments:
        if dtype == "literal":
            known[name] = parse.Argument(None, "int", 0, value)
        else:
            known[name] = parse.Argument(len(dtypes), kind_of(dtype), ndim)
            dtypes[name] = dtype
    program = Program(parse.parse(text, known), tuple(dtypes.values()))
    return program, tuple(zip(dtypes, program.operands(), strict=True))


def _again(expression: str, arguments: dict[str, Any]) -> Score:
    return Score(expression, **arguments)


def arrays_of(name: str, score: Any) -> dict[str, Any]:
    """Return the arrays of a score by the names that errors have for them; none if it is None.

    Raises
    ------
    TypeError
        For what is no Score.
    """
    if score is None:
        return {}
    if not isinstance(score, Score):
        raise TypeError(f"{name}: score is {checks.show(score)}, want a Score")
    return {f"score.{arg}": score._values[arg] for arg in score.operands}


def with_arrays(score: Score, arrays: dict[str, Any]) -> Score:
    """Return a score with other arrays in place of its own, by the names of `arrays_of`.

    They have the dtypes and the axes of those.
    """
    new = {name.removeprefix("score."): array for name, array in arrays.items()}
    found = object.__new__(Score)
    for attribute in ("expression", "operands", "program"):
        object.__setattr__(found, attribute, getattr(score, attribute))
    for attribute in ("_arguments", "_values"):
        values = {**getattr(score, attribute), **new}
        object.__setattr__(found, attribute, MappingProxyType(values))
    return found


def operands_of(score: Score | None, native: dict[str, Any]) -> Operands | None:
    """Return a score with native arrays in place of its own, by the names of `arrays_of`."""
    if score is None:
        return None
    values = score._values
    found = tuple(native.get(f"score.{arg}", value) for arg, value in values.items())
    return Operands(score.program, tuple(values), found)


def _argument(name: str, value: Any) -> tuple[Any, str, int]:
    """Return an argument with its dtype ("number" of a float, "literal" of an int) and axes."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"Score: {name} is {checks.show(value)}, want an array or a number")
    if checks.is_int(value):
        if abs(int(value)) > _MOST_INT:
            raise ValueError(f"Score: {name} is {value}, want an int of 32 bits, or a float")
        return int(value), "literal", 0
    if isinstance(value, (float, np.floating)):
        return checks.finite("Score", name, value), "number", 0
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype") or isinstance(value, np.generic):
        raise TypeError(f"Score: {name} is {checks.show(value)}, want an array or a number")
    dtype = str(value.dtype).rpartition(".")[2]
    if dtype not in KINDS:
        raise TypeError(f"Score: {name} has dtype {dtype}, want {_DTYPES}")
    return value, dtype, len(shape)
