"""Score expressions drawn by hypothesis, and Python's own answer to them."""

import functools
import math
import re

import numpy as np
from hypothesis import strategies as st

from fa_cupy.score import parse, tree
from fa_cupy.score.evaluate import evaluate
from fa_cupy.score.program import KINDS, kind_of

SIZES = {"b": 2, "h": 3, "i": 12, "j": 9}
LENGTH = 12
RNG = np.random.default_rng(0)
#: One array of each kind; `n` is an integer, `c` a number.
ARGUMENTS = {
    "x": RNG.standard_normal(SIZES["h"]),
    "y": RNG.standard_normal((SIZES["b"], SIZES["h"])).astype(np.float32),
    "z": RNG.standard_normal(LENGTH).astype(np.float16),
    "w": RNG.standard_normal((LENGTH, SIZES["h"])),
    "t": np.asarray(0.7),
    "g": RNG.integers(-9, 9, LENGTH),
    "u": RNG.integers(-9, 9, (SIZES["b"], LENGTH)).astype(np.int8),
    "c": -1.25,
    "n": 4,
}


def joined(*parts):
    return st.tuples(*parts).map("".join)


def of(pattern, *parts):
    """Text of a pattern with drawn parts, in parentheses."""
    return st.tuples(*parts).map(lambda texts: f"({pattern.format(*texts)})")


_INTEGERS = st.sampled_from([*"bhij", "n", "0", "3", "(-2)", "7", "g[i]", "g[j]", "u[b, j]"])


def _more_integers(children):
    positive = st.sampled_from(["1", "3", "n", "5"])
    return st.one_of(
        of("{} + {}", children, children),
        of("{} - {}", children, children),
        of("{} * {}", children, st.sampled_from(["2", "-3", "n"])),
        of("{} // {}", children, positive),
        of("{} % {}", children, positive),
        of("-{}", children),
        of("abs({})", children),
        of("min({}, {})", children, children),
        of("max({}, {}, 1)", children, children),
        of("where({} < {}, {}, {})", children, children, children, children),
        of("({} % 5) ** 2", children),
    )


@functools.cache
def integers():
    return st.recursive(_INTEGERS, _more_integers, max_leaves=4)


def _comparisons(numbers):
    sign = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    plain = of("{} {} {}", numbers, sign, numbers)
    return st.one_of(
        plain,
        of("{} < {} <= {}", numbers, numbers, numbers),
        of("{} and {}", plain, plain),
        of("{} or {}", plain, plain),
        of("not {}", plain),
    )


def _elements():
    index = integers()
    return st.one_of(
        st.sampled_from(["x[h]", "y[b, h]", "z[i]", "z[j]", "w[j, h]", "w[i, h]", "t", "c", "s"]),
        of("z[{} % 12]", index),
        of("z[min(max({}, 0), 11)]", index),
        of("w[abs({}) % 12, {} % 3]", index, index),
    )


def _numbers():
    finite = st.floats(-4, 4, allow_subnormal=False).map(lambda x: f"({float(f'{x:.4g}')!r})")
    return st.one_of(finite, st.sampled_from(["pi", "1", "2.5e-3", "3", "1_0.5"]))


def _short(text):
    return len(text) < 900


@functools.cache
def smooth():
    """Expressions that have no jumps; kinks they may have."""
    condition = _comparisons(integers())

    def more(children):
        return st.one_of(
            of("{} + {}", children, children),
            of("{} - {}", children, children),
            of("{} * {}", children, children),
            of("{} / (1.5 + {} ** 2)", children, children),
            of("-{}", children),
            of("{} ** {}", children, st.sampled_from("0123")),
            of("(1.1 + abs({})) ** -2", children),
            of("(1.1 + abs({})) ** {}", children, st.sampled_from(["0.5", "c", "2.25", "t"])),
            of("exp(min({}, 2))", children),
            of("log(abs({}) + 0.25)", children),
            of("sqrt({} ** 2 + 0.1)", children),
            of("{}({})", st.sampled_from(["tanh", "sin", "cos", "sigmoid", "abs"]), children),
            of("min({}, {})", children, children),
            of("max({}, {})", children, children),
            of("where({}, {}, {})", condition, children, children),
            of("{} if {} else {}", children, condition, children),
        )

    return st.recursive(_elements() | _numbers() | integers(), more, max_leaves=7).filter(_short)


@functools.cache
def expressions():
    """Any expressions."""
    jumps = st.one_of(
        of("{} + floor({})", smooth(), smooth()),
        of("where({}, {}, {})", _comparisons(smooth()), smooth(), smooth()),
    )
    return smooth() | jumps.filter(_short)


def arguments_of(text):
    """The arguments that an expression has."""
    names = re.findall(r"[a-z_]+", text)
    return {name: value for name, value in ARGUMENTS.items() if name in names}


def tree_of(text):
    """The tree of an expression, the names of its arrays by number, and their dtypes."""
    known, numbered = {}, []
    for name, value in arguments_of(text).items():
        if isinstance(value, int):
            known[name] = parse.Argument(None, "int", 0, value)
            continue
        dtype = value.dtype.name if hasattr(value, "dtype") else "number"
        assert dtype in KINDS or dtype == "number"
        known[name] = parse.Argument(len(numbered), kind_of(dtype), np.ndim(value))
        numbered.append(name)
    return parse.parse(parse.tidy(text), known), numbered


def by_python(text, variables):
    """The value of an expression as Python computes it, in float64."""
    names = {
        "where": lambda c, a, b: a if c else b,
        "min": lambda *x: _least(*x),
        "max": lambda *x: -_least(*(-y for y in x)),
        "abs": abs,
        "sigmoid": lambda x: 1 / (1 + np.exp(-np.float64(x))),
        "inf": math.inf,
        "pi": math.pi,
        **{name: getattr(np, name) for name in ("exp", "log", "sqrt", "tanh", "sin", "cos")},
        "floor": np.floor,
    }
    for name, value in ARGUMENTS.items():
        wide = np.float64 if np.asarray(value).dtype.kind == "f" else np.int64
        names[name] = np.asarray(value).astype(wide)
        if np.ndim(value) == 0:
            names[name] = names[name].item()
    given = {name: np.float64(x) if name == "s" else int(x) for name, x in variables.items()}
    with np.errstate(all="ignore"):
        return float(eval(text, {"__builtins__": {}}, names | given))


def _least(*values):
    if all(isinstance(x, (int, np.integer)) for x in values):
        return min(values)
    return np.minimum.reduce([np.float64(x) for x in values])


def points(count=40, seed=0):
    """Values of all variables at some pairs, as arrays of one axis."""
    rng = np.random.default_rng(seed)
    found = {name: rng.integers(0, size, count) for name, size in SIZES.items()}
    return found | {"s": 2 * rng.standard_normal(count)}


def by_numpy(roots, numbered, variables, dtype=np.float64):
    """The values of trees at all points."""
    values = [ARGUMENTS[name] for name in numbered]
    s = variables["s"].astype(dtype)
    with np.errstate(all="ignore"):
        found = evaluate(np, tree.ordered(*roots), variables | {"s": s}, values, np.dtype(dtype))
    return [np.broadcast_to(x, s.shape) for x in found]
