"""The CUDA C++ of expressions: it compiles, and says on the CPU what NumPy says."""

import importlib.util

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_cupy.gpu.driver.compile import compile_source
from fa_cupy.score import cuda, derivative, parse, tree
from tests.support import expressions, score_code

S = tree.variable("s")
SCORES = [
    "s - x[h] * abs(i - j)",
    "50 * tanh(s / 50)",
    "s + w[abs(g[i] - g[j]) % 12, h]",
    "s - (z[i] - z[j]) ** 2 / (2 * t ** 2)",
    "where(u[b, i] == u[b, j], s, -inf)",
    "s * sigmoid(x[h] * (n - abs(i - j))) + c",
    "min(s * inf, s * -inf)",  # the mean of the slopes on both sides is NaN
]


def case(text):
    root, numbered = expressions.tree_of(text)
    return root, derivative.derivative(root, S), numbered


def draw(strategy, count):
    """Some expressions of a strategy, the same in each run."""
    found = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(text=strategy)
    def add(text):
        found.append(text)

    add()
    return [text for text in dict.fromkeys(found) if len(text) < 400]


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"
)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_nvrtc_takes_it(target):
    """All expressions in one kernel each would take minutes: a few drawn ones are one kernel."""
    for real in ("float", "double"):
        cases = [case(text) for text in [*SCORES, *draw(expressions.expressions(), 10)]]
        text = ""
        for number, found in enumerate(cases):
            own = score_code.source(*found, real)
            include, rest = own.split("\n", 2)[1:]
            kernel = score_code.KERNEL.replace("test(", f"test{number}(")
            text += f"{include}\nnamespace case{number} {{\n{rest}\n{kernel}\n}}\n"
        compiled = compile_source("score_expressions", text.encode(), target)
        assert compiled.cubin
        assert "warning" not in compiled.log


@pytest.mark.emulator
@pytest.mark.parametrize("real", ["double", "float"])
def test_the_cpu_says_what_numpy_says(real, tmp_path):
    strategy = expressions.expressions() if real == "double" else expressions.smooth()
    texts = [*SCORES, *draw(strategy | expressions.integers(), 60)]
    cases = [case(text) for text in texts]
    run = score_code.on_the_cpu(cases, tmp_path, real)
    points = expressions.points(50)
    dtype, rtol = (np.float64, 1e-9) if real == "double" else (np.float32, 2e-3)
    compared = 0
    for number, (root, slope, numbered) in enumerate(cases):
        found = run(number, points)
        want = expressions.by_numpy([root, slope], numbered, points, dtype)
        exact = expressions.by_numpy([root, slope], numbered, points)
        for got, expected, value in zip(found, want, exact, strict=True):
            # Where float32 itself is far from float64, two ways to compute it are, too.
            with np.errstate(all="ignore"):
                near = np.isclose(expected, value, rtol / 4, rtol / 4, equal_nan=True)
            np.testing.assert_allclose(got[near], expected[near], rtol, rtol, err_msg=texts[number])
            compared += near.sum()
    assert compared > 0.9 * 2 * 50 * len(cases)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("s - x[h] * abs(i - j)",
         "return (s - (load<0>(arrays, h) * int_to_float(abs_of((i - j)))));\n"),
        ("50 * tanh(s / 50)",
         "return (50.0f * tanh_of(divide_of(s, 50.0f)));\n"),
        ("s + g[i] * 2 % 3",
         "return (s + int_to_float(floor_mod(wrapping_multiply(load<0>(arrays, i), "
         "static_cast<long long>(2)), static_cast<long long>(3))));\n"),
        ("s + exp(x[h]) * exp(x[h])",
         "const float t3 = exp_of(load<0>(arrays, h));\n"
         "return (s + (t3 * t3));\n"),
        ("s if i < 3 and j != 2 else -inf",
         "return (((i < 3) && (j != 2)) ? s : (-FA_INFINITY));\n"),
        ("s + 1e39 - 2.0 * c ** -2",
         "return ((s + FA_INFINITY) - (2.0f * int_power<-2>(load<0>(arrays))));\n"),
        ("i - 1", "return int_to_float((i - 1));\n"),
    ],
)  # fmt: skip
def test_code_of_known_expressions(text, code):
    root, _ = expressions.tree_of(text)
    assert cuda.body([root], ["return"]) == code


def test_score_and_slope_share_what_they_can():
    root, slope, _ = case("50 * tanh(s / 50)")
    code = cuda.body([root, slope], ["score", "slope"], "double")
    assert code.count("tanh_of") == 1
    assert "50.0f" not in code


@given(text=st.text(max_size=30))
@settings(max_examples=300)
def test_text_of_any_kind_ends_in_an_error_or_in_known_code(text):
    known = {"x": parse.Argument(0, "float", 1)}
    try:
        root = parse.parse(parse.tidy(text), known)
    except ValueError:
        return
    code = cuda.body([root], ["return"])
    assert code.isascii()


@pytest.mark.emulator
def test_sine_and_cosine_of_large_numbers(tmp_path):
    """Without a slow path: to the last places while a float32 tells one turn from the next."""
    cases = [case(text) for text in ("sin(s) + 0 * j", "cos(s) + 0 * j")]
    run = score_code.on_the_cpu(cases, tmp_path, "float")
    rng = np.random.default_rng(0)
    s = np.concatenate([rng.uniform(-1, 1, 2000) * 10.0**n for n in range(-3, 8)])
    s = s[np.abs(s) < 2.0**23].astype(np.float32)
    points = {"s": s} | {name: np.zeros(len(s), np.int32) for name in "bhij"}
    for number, want in enumerate((np.sin, np.cos)):
        got = run(number, points)[0]
        np.testing.assert_allclose(got, want(s.astype(np.float64)), rtol=0, atol=3e-7)
