"""What an expression may say, what errors say of the rest, and that nothing of a text is run."""

import builtins
import pickle
import warnings

import ml_dtypes
import numpy as np
import pytest

from fa_cupy import Score
from fa_cupy._score import operands_of
from fa_cupy.score import cuda, parse

X = np.arange(3.0)
G = np.arange(4)


def error(text, error=ValueError, **arguments):
    with pytest.raises(error, match=r"^Score: ") as caught:
        Score(text, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("s + foo[i]", 5, "foo at column 5 is no array, want one of the arguments: x, g"),
        ("s + foo", 5, "is no argument and no variable, want one of s, b, h, i, j, x, g"),
        ("s + x", 5, "is an array with 1 axes, want an element of it"),
        ("s + x[s]", 7, "s at column 7 is a float, want an integer as an index"),
        ("s + x[1.0]", 7, "is a float, want an integer as an index"),
        ("s + x[i, j]", 5, "has 2 indices, x has 1 axes"),
        ("s + x[i:j]", 7, "i:j at column 7 is not part of an expression"),
        ("s + x[...]", 7, "is a ellipsis, want an int or a float"),
        ("s + s[i]", 5, "is no array"),
        ("s + x[i][j]", 5, "x[i] at column 5 is no array"),
        ("s + exp", 5, "is a function, want a call of it"),
        ("s + erf(s)", 5, "is no function, want one of where, abs, min, max, exp"),
        ("exp(s, s)", 1, "has 2 arguments, want 1"),
        ("min(s)", 1, "has 1 arguments, want 2 or more"),
        ("where(s > 0, s)", 1, "has 2 arguments, want 3"),
        ("exp(x=s)", 1, "has a keyword or a *"),
        ("min(*x)", 1, "has a keyword or a *"),
        ("s < 0", 1, "is a condition, want a number (as of where(condition, s, -inf))"),
        ("s + (i > j)", 6, "is a condition, want a number (as of where(condition, 1, 0))"),
        ("not s", 5, "s at column 5 is a number, want a comparison"),
        ("s if i else j", 6, "is a number, want a comparison"),
        ("where(i, s, s)", 7, "is a number, want a comparison"),
        ("s % 2", 1, "has % of floats, want integers (floor(x / y) rounds down)"),
        ("s // g[i]", 1, "has // of floats"),
        ("s @ s", 1, "has an operator that is not part of an expression"),
        ("s << 2", 1, "has an operator"),
        ("~i + s", 1, "has an operator"),
        ("s is s", 1, "has 'is' or 'in', want < <= > >= == or !="),
        ("s in x", 6, "is an array"),
        ("s ** 65", 6, "is an exponent beyond 64, want a float there"),
        ("s + 2147483648", 5, "is above 2147483647, want a float there"),
        ("s + 1e999", 5, "is not finite, want inf by that name"),
        ("s + 1j", 5, "is a complex, want an int or a float"),
        ("s + True", 5, "is a bool, want an int or a float"),
        ("s + 'a'", 5, "is a str, want an int or a float"),
        ("s + None", 5, "is a NoneType, want"),
        ("s + (i, j)", 5, "is not part of an expression, want numbers, names, + - * /"),
        ("(s := i)", 2, "is not part of an expression"),
        ("lambda: s", 1, "is not part of an expression"),
        ("[s for i in x]", 1, "is not part of an expression"),
        ("x.shape", 1, "is not part of an expression"),
        ("f'{s}'", 1, "is not part of an expression"),
        ("s + é", 5, "é at column 5 is no argument"),
        ("x[i] * é", 8, "é at column 8 is no argument"),
    ],
)
def test_errors_name_the_text_the_part_and_the_place(text, column, why):
    message = error(text, x=X, g=G)
    assert message.startswith(f'Score: "{text}": ')
    assert f" at column {column} " in message
    assert why in message


@pytest.mark.parametrize(
    "text", ["s +", "s + (", "s) + (s", "s; s", "s = 1", "1s", "s # x", "$", "\0"]
)
def test_what_is_no_expression(text):
    assert " cannot be parsed (" in error(text)


@pytest.mark.parametrize("action", ["always", "error", "ignore"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1if i < j else s", "no space between a number and 'if'"),
        ("s if i < 1and j < 2 else 0", "no space between a number and 'and'"),
        ("s if i < 1or j < 2 else 0", "no space between a number and 'or'"),
        ("s if i < 1.5else 0", "no space between a number and 'else'"),
        ("s if i < j else 1e-3if i else 0", "no space between a number and 'if'"),
        ("0x1for x", "no space between a number and 'for'"),
        ("0xfor s", "no space between a number and 'for'"),
        ("1_000is s", "no space between a number and 'is'"),
        ("1in s", "no space between a number and 'in'"),
        ("1not in s", "no space between a number and 'not'"),
        ("1jif s else s", "no space between a number and 'if'"),
        (".5if s else s", "no space between a number and 'if'"),
        ("1orx", "no space between a number and 'or'"),
        (r"s + '\d'", "a backslash"),
        (r"f'{1}\d'", "a backslash"),
    ],
)
def test_what_python_would_warn_of_is_refused(text, why, action):
    """In the same words whatever the filters of warnings are, and no warning is seen."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(action)
        assert f"cannot be parsed ({why})" in error(text)
    assert not seen


def test_names_that_hold_digits_and_keywords_are_names():
    score = Score("x1if * 0x1f + s_2or[h] * 1_0.5e0 + 1e5 * s", x1if=2.0, s_2or=X)
    assert dict(score.operands) == {"s_2or": "h"}
    Score("1.5 if i < 1 and not j > 2 or h == 0xf else s")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "s.__class__.__mro__[1]",
        "().__class__.__bases__[0].__subclasses__()",
        "exp.__globals__",
        "eval('s')",
        "open('x')",
        "getattr(s, 'real')",
        "s + __builtins__",
        "x.__class__(s)",
        "(lambda: s)()",
        "exp(s)(s)",
        "{}[s]",
        "s if print(s) else s",
        "*s",
        "await s",
        "s; extern int x",
        's */ asm("trap;") /*',
        "s\\\n#define s",
        "abs",
    ],
)
def test_code_is_refused(text, monkeypatch):
    """And none of it runs on the way."""

    def called(*args, **more):
        raise AssertionError("something of the text ran")

    tidy, known = parse.tidy(text), {"x": parse.Argument(0, "float", 1)}
    with monkeypatch.context() as patch:
        for name in ("eval", "exec", "open", "print", "__import__"):
            if name in text:
                patch.setattr(builtins, name, called)
        with pytest.raises(ValueError, match=r"^Score: ") as caught:
            parse.parse(tidy, known)
    assert text.split()[0][:5] in str(caught.value)


def test_names_of_the_caller_reach_no_compiler():
    """Not as names, and not as text: numbers are written anew."""
    names = {"asm": X, "float__": X, "ß": X, "x": X}
    text = "s + asm[h] * float__[h] - ß[h] * 0x1F + x[h] * 1_0.5e0 * 0b11 * 0o17"
    score = Score(text, **names)
    code = cuda.body([score.program.root], ["return"])
    assert set(code) <= set("return load<0123>(arrays, h)*+-;.0123456789f\nint_to_float")
    assert not any(name in code for name in ("asm", "float__", "ß", "1F", "_0.5"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s" + " + s" * 400, "expression has 1601 characters, want at most 1000"),
        ("", "expression is empty, want one such as"),
        (" \n ", "expression is empty"),
        ("abs(" * 70 + "s" + ")" * 70, "is nested deeper than 60 levels"),
        ("-" * 999 + "s", "is nested deeper than 60 levels"),
        ("(" * 490 + "s" + ")" * 490, "cannot be parsed"),
    ],
)
def test_length_and_depth_are_limited(text, why):
    assert why in error(text)


def test_lines_are_joined():
    score = Score("s\n  - slopes[h]\n  * abs(i - j)", slopes=X)
    assert score.expression == "s - slopes[h] * abs(i - j)"


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        ({"s": X}, ValueError, "s has a meaning in expressions, want another name"),
        ({"exp": X}, ValueError, "exp has a meaning in expressions"),
        ({"x": [1.0]}, TypeError, "x is [1.0] (list), want an array or a number"),
        ({"x": "a"}, TypeError, "x is 'a' (str), want an array or a number"),
        ({"x": None}, TypeError, "x is None (NoneType), want an array or a number"),
        ({"x": True}, TypeError, "x is True (bool), want an array or a number"),
        ({"x": np.timedelta64(1, "s")}, TypeError, "(timedelta64), want an array or a number"),
        ({"x": np.datetime64(1, "s")}, TypeError, "(datetime64), want an array or a number"),
        ({"x": np.nan}, ValueError, "x is nan (float), want a finite number"),
        ({"x": 2**31}, ValueError, "x is 2147483648, want an int of 32 bits, or a float"),
        ({"x": X > 0}, TypeError, "x has dtype bool, want float16, bfloat16, float32, float64 or"),
        ({"x": X.astype(complex)}, TypeError, "x has dtype complex128, want"),
        ({"x": G.astype(np.uint64)}, TypeError, "x has dtype uint64, want"),
        ({"x": X, "y": X}, ValueError, '"s + x[h]" has no y, which is given'),
        ({"x": 1.0}, ValueError, "x[h] at column 5 has 1 indices, x has 0 axes"),
        ({"x": X[None, None, None, None, None]}, ValueError, "has 1 indices, x has 6 axes"),
    ],
)
def test_arguments_are_checked(arguments, kind, why):
    assert why in error("s + x[h]", kind, **arguments)


@pytest.mark.parametrize("text", [None, 3, b"s", ["s"]])
def test_the_expression_is_a_str(text):
    assert "want a str" in error(text, TypeError)


def test_a_score_shows_what_it_is_and_does_not_change():
    score = Score("s - x[h, i] * c * n + g[j]", x=np.ones((2, 3)), c=0.5, n=2, g=G)
    assert repr(score) == (
        "Score('s - x[h, i] * c * n + g[j]', x=<float64 array of shape (2, 3)>, c=0.5, n=2, "
        "g=<int64 array of shape (4,)>)"
    )
    assert dict(score.operands) == {"x": "hi", "g": "j"}
    for change in (lambda: setattr(score, "expression", "s"), lambda: delattr(score, "program")):
        with pytest.raises(AttributeError, match="does not change"):
            change()
    with pytest.raises(TypeError):
        score.operands["x"] = "b"
    again = pickle.loads(pickle.dumps(score))
    assert again.program == score.program
    assert repr(again) == repr(score)


def test_programs_are_keys_of_what_is_compiled():
    """Equal for other values, names and shapes, and not for another dtype or integer."""

    def program(text="s + x[h] * n", **arguments):
        return Score(text, **{"x": X, "n": 2} | arguments).program

    assert program() == program(x=np.ones(7)) == Score("s  +  y[h]*m", y=X, m=2).program
    assert hash(program()) == hash(program(x=np.ones(7)))
    others = [
        program(x=X.astype(np.float32)), program(x=X.astype(ml_dtypes.bfloat16)), program(n=3),
        program(n=2.0), program("s + x[i] * n"), program("s + x[h] * n * 1"),
    ]  # fmt: skip
    assert len({program(), *others}) == 7
    assert program(n=2.0) == program(n=3.0)  # a float is no part of it


def test_zeros_of_both_signs_are_different_numbers():
    """1 / -0.0 is -inf: neither a build nor a plan for the other zero may serve it."""
    one, other = (Score(f"s / {zero}") for zero in ("0.0", "-0.0"))
    assert one.program != other.program
    one, other = (operands_of(Score("s / c", c=c), {}).bound("", (3, 4), 5) for c in (0.0, -0.0))
    assert one.program == other.program
    assert one != other


def test_operands_tell_what_loads_depend_on():
    score = Score("x[0] + x[h] * y[i - j + 5, b] + z", x=X, y=np.ones((9, 9)), z=X.sum(keepdims=0))
    assert dict(score.operands) == {"x": "h", "y": "bij"}
