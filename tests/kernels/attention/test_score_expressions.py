"""Score expressions in the kernels of attention and of its gradients, in the emulator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, attention, reference
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.built_in import form_of, with_built_in
from fa_cupy.gpu.kernels.score import ScoreMod, takes_score
from fa_cupy.score import header
from tests.support import expressions
from tests.support.every_run import examples, only
from tests.support.kernel_attention import DTYPES, any_sinks, blocks_of, check, draw
from tests.support.kernel_gradients import case, rows_sm80, score_of
from tests.support.kernel_gradients import check as check_gradients
from validation.emulator.calls import operands_in

emulated = pytest.mark.emulator
RNG = np.random.default_rng(0)
HEADS, Q_LEN, K_LEN, BATCH = 4, 70, 150, 2
FIRST = [("bfloat16", 64)]
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}
BFLOAT16 = DTYPES["bfloat16"]
# One of each kind of operand: of the entry, the query, the key, the pair, and of positions.
SCORES = {
    "alibi": Score(
        "s - slopes[h] * abs(i - j)", slopes=np.array([0.5, 0.2, 0.1, 0.03], np.float32)
    ),
    "table": Score(
        "s + t[h, max(min(i - j, 31), 0)]",
        t=RNG.standard_normal((HEADS, 32)).astype(np.float16),
    ),
    "tanh": Score("c * tanh(s / c) - 0.01 * (j - 2 * i)", c=3.0),
    "window": Score(
        "where(abs(2 * i - j) < 40, s * w[h, i] + y[j], -inf)",
        w=RNG.standard_normal((HEADS, Q_LEN)).astype(BFLOAT16),
        y=RNG.standard_normal(2 * K_LEN)[::2],
    ),
    "of entries": Score(
        "sqrt(s * s + 1.0) * z[n[j] % 4] + 0.1 * b + h",
        n=RNG.integers(0, 9, K_LEN, np.int32), z=np.linspace(0.5, 2, 4),
    ),
    "pairs": Score(
        "where(i // 16 == j // 16, s, s + x[b, i, j])",
        x=RNG.standard_normal((BATCH, Q_LEN, K_LEN)).astype(np.float16),
    ),
}  # fmt: skip


def row_for(score, dtype, dim, masked=False, mapped=True):
    call = forward.Call(ScoreMod(program=score.program), mapped, masked)
    return forward.select(dtype, dim, dim, "sm_90a", call)


def arrays_of(dtype, dim, heads=(HEADS, 2)):
    shapes = [(BATCH, heads[0], Q_LEN, dim), *[(BATCH, heads[1], K_LEN, dim)] * 2]
    return [draw(*shape, dtype=DTYPES[dtype], seed=i) for i, shape in enumerate(shapes)]


@emulated
@pytest.mark.parametrize("name", only([*SCORES], "alibi", "window", "pairs"))
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    only([("bfloat16", 64), ("float16", 128), ("bfloat16", 256)], *FIRST),
)
def test_attention(name, mapped, dtype, dim):
    arrays, score = arrays_of(dtype, dim), SCORES[name]
    row = row_for(score, dtype, dim, mapped=mapped)
    for options in ({}, CAUSAL):
        check(row, *arrays, score=score, sinks=any_sinks(RNG, BATCH, HEADS, Q_LEN), **options)


@emulated
@pytest.mark.parametrize("name", only([*SCORES], "alibi", "window"))
@pytest.mark.parametrize("mapped", [True, False])
def test_attention_under_a_mask(name, mapped):
    rng = np.random.default_rng(1)
    arrays, score = arrays_of("float16", 64), SCORES[name]
    row = row_for(score, "float16", 64, masked=True, mapped=mapped)
    mask = blocks_of(rng, BATCH, 1, Q_LEN, K_LEN)
    check(row, *arrays, mask=mask, score=score, **CAUSAL)


@emulated
@pytest.mark.parametrize("name", only([*SCORES], "alibi", "tanh", "window"))
@pytest.mark.parametrize("dim", only([64, 128, 256], 64))
@pytest.mark.parametrize("wgmma", [True, False])
def test_gradients(name, dim, wgmma):
    call = case(
        "bfloat16", (HEADS, 2), (Q_LEN, K_LEN), (dim, dim), dlse=True, score=SCORES[name], **CAUSAL
    )
    check_gradients(call, rows=None if wgmma else rows_sm80("bfloat16", dim, dim))


@emulated
@pytest.mark.parametrize("wgmma", [True, False])
def test_gradients_under_a_mask(wgmma):
    mask = blocks_of(np.random.default_rng(2), BATCH, 1, Q_LEN, K_LEN)
    call = case("float16", (HEADS, 2), (Q_LEN, K_LEN), (64, 64), score=SCORES["window"], mask=mask)
    check_gradients(call, rows=None if wgmma else rows_sm80("float16", 64, 64, masked=True))


@emulated
def test_scores_too_large_for_float32():
    """The kernel's float64 goes through the expression, too."""
    arrays = arrays_of("float16", 64)
    score = Score("1e30 * s - 1e36 * (i - j) ** 2 / 1e4")
    check(row_for(score, "float16", 64), *arrays, score=score)
    check(row_for(score, "float16", 64, mapped=False), *arrays, score=score)


@emulated
@pytest.mark.parametrize("mapped", only([True, False], True))
def test_values_of_hidden_keys_do_not_show(mapped):
    q, k, v = arrays_of("bfloat16", 64, (HEADS, HEADS))
    v[:, :, 100] = np.nan
    score = Score("where(j == 100, -inf, s)")
    check(row_for(score, "bfloat16", 64, mapped=mapped), q, k, v, score=score)


@pytest.mark.long
@emulated
@examples(12, fewer=4)
@given(text=expressions.smooth(), seed=st.integers(0, 99))
def test_drawn_expressions(text, seed):
    """Each is compiled: few are drawn."""
    sizes = expressions.SIZES
    score = Score(text, **expressions.arguments_of(text))
    rng = np.random.default_rng(seed)
    shapes = [(sizes["b"], sizes["h"], n, 32) for n in (sizes["i"], sizes["j"], sizes["j"])]
    arrays = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    exact, lse = attention(*(x.astype(np.float64) for x in arrays), score=score, return_lse=True)
    if np.isfinite(exact).all() and np.abs(lse).max() < 1e3:
        check(row_for(score, "float16", 32), *arrays, score=score)


# ------------------------------------------------------------------------------------- the header
def test_a_header_of_known_parts():
    text = header.header(SCORES["alibi"].program, exact=True, sloped=False)
    assert "entry.v2 = load<0>(arrays, h);" in text
    assert "(positions.v6 + static_cast<float>(1 * di + -1 * dj))" in text
    assert "int_to_float(abs" in header.header(SCORES["alibi"].program, exact=False, sloped=False)


def test_another_array_makes_the_same_header():
    one, other = (
        Score("s * scale + x[i, j]", scale=c, x=np.zeros(shape, np.float32))
        for c, shape in ((2.0, (3, 4)), (3.0, (70, 80)))
    )
    assert ScoreMod(program=one.program) == ScoreMod(program=other.program)
    assert ScoreMod(program=one.program).name == ScoreMod(program=other.program).name
    assert ScoreMod(program=SCORES["alibi"].program).name != ScoreMod(program=one.program).name


@pytest.mark.parametrize(
    ("text", "arguments", "form"),
    [
        ("c * tanh(s / c)", {"c": 30.0}, (30.0, None, "")),
        ("tanh(s / 30) * 30", {}, (30.0, None, "")),
        ("s + x[h, i, j]", {"x": np.zeros((4, 9, 9), np.float32)}, (None, 0, "hij")),
        ("x[j] + c * tanh(s / c)", {"x": np.zeros(9, np.float16), "c": 2.0}, (2.0, 0, "j")),
        ("s + x[j, i]", {"x": np.zeros((9, 9), BFLOAT16)}, (None, 0, "ji")),
        ("s + x[i, i]", {"x": np.zeros((9, 9), np.float32)}, None),
        ("s + x[i]", {"x": np.zeros(9)}, None),
        ("2 * tanh(s / 3)", {}, None),
        ("s - x[j]", {"x": np.zeros(9, np.float32)}, None),
    ],
)
def test_forms_that_kernels_have_code_for(text, arguments, form):
    options = {"score": Score(text, **arguments)}
    found = form_of(operands_in(options))
    assert found == form


@pytest.mark.parametrize("axes", ["j", "i", "h", "b", "ij", "ji", "hij", "bh", "bhij", "hj"])
def test_a_bias_by_another_name(axes):
    """Grouped heads are two axes, and b may be several: the view is that of the expression."""
    sizes = {"b": 6, "h": 4, "i": 5, "j": 7}
    x = RNG.standard_normal([sizes[a] for a in axes]).astype(np.float32)
    q, k = np.zeros((2, 3, 4, 5, 8)), np.zeros((2, 3, 2, 7, 8))
    options = {"score": Score(f"s + x[{', '.join(axes)}]", x=x)}
    operands = operands_in(options)
    problem = attention_problem.attention_problem(q, k, k, None, None, **options)
    found = with_built_in(problem, operands)
    assert found is not None
    view, bias = found[0].bias, found[1]
    seen = np.lib.stride_tricks.as_strided(bias, view.shape, view.strides).reshape(6, 4, 5, 7)
    b, h, i, j = np.indices(seen.shape)
    at = {"b": b, "h": h, "i": i, "j": j}
    np.testing.assert_array_equal(seen, x[tuple(at[a] for a in axes)])


@pytest.mark.parametrize("axes", ["h", "bh", "hj", "i"])
def test_no_bias_by_positions_in_packed_sequences(axes):
    """Those of an expression count in each sequence, those of a bias do not."""
    sizes = {"b": 6, "h": 4, "i": 7, "j": 7}
    x = np.zeros([sizes[a] for a in axes], np.float32)
    q, offsets = np.zeros((6, 4, 7, 8)), np.array([0, 3, 7])
    options = {"score": Score(f"s + x[{', '.join(axes)}]", x=x)}
    operands = operands_in(options)
    problem = attention_problem.attention_problem(q, q, q, None, None, q_offsets=offsets, **options)
    assert (with_built_in(problem, operands) is None) == bool({"i", "j"} & {*axes})


def test_a_bias_by_another_name_without_heads():
    q, k = np.zeros((2, 0, 5, 8)), np.zeros((2, 0, 7, 8))
    options = {"score": Score("s + x[b, j]", x=np.zeros((2, 7), np.float32))}
    operands = operands_in(options)
    problem = attention_problem.attention_problem(q, k, k, None, None, **options)
    found = with_built_in(problem, operands)
    assert found is not None
    assert found[0].bias.shape == (2, 0, 5, 7)


def test_what_gradients_are_compiled_for():
    call = case("float16", (1, 1), (4, 4), (8, 8), score=SCORES["tanh"])
    assert score_of(call).sloped


# ----------------------------------------------------------------- scores that rise or fall slowly
RISES = np.array([1e-3, -0.01, -0.05, 0.3], np.float32)


@emulated
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("by_expression", [False, True])
def test_scores_that_rise_or_fall_along_the_keys(masked, by_expression):
    """They pass a stale maximum in some tiles: the weights of those follow, and the output."""
    q, k, v = (draw(1, HEADS, n, 64, dtype=np.float16, seed=n) for n in (64, 1000, 1000))
    bias = RISES[:, None, None] * np.arange(1000, dtype=np.float32)
    mask = blocks_of(np.random.default_rng(0), 1, 1, 64, 1000, density=0.9) if masked else None
    if by_expression:
        options = {"score": Score("s + rises[h] * j", rises=RISES)}
        row = row_for(options["score"], "float16", 64, masked)
    else:
        options, mod = {"bias": bias}, ScoreMod(False, "key", "float32")
        row = forward.select("float16", 64, 64, "sm_90a", forward.Call(mod, masked=masked))
    _, lse = check(row, q, k, v, mask, **options)
    _, want = reference.attention(q, k, v, bias, mask)
    np.testing.assert_allclose(lse, want, rtol=1e-6, atol=1e-5)


def test_literals_beside_positions_become_floats():
    score = Score("s - max(abs(i - j) - 16, 0) / width", width=4.0)
    text = header.header(score.program, exact=True, sloped=False)
    assert "- 16.0f), 0.0f)" in text
    assert "int_to_float(abs" not in text.split("score_in_tile")[1]


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("s + sin(s) + cos(s) + sin(0.1 * j)", True),
        (" + ".join(f"sin({n}.0 * s)" for n in range(1, 14)), False),
        (" + ".join(f"tanh({n}.0 * s)" for n in range(1, 40)), False),
        (" + ".join(f"tanh({n}.0 * s)" for n in range(1, 6)), True),
    ],
)
def test_expressions_that_would_compile_for_minutes_are_not_compiled(text, taken):
    options = {"score": Score(text)}
    operands_in(options)
    x = np.zeros((4, 8), np.float16)
    problem = attention_problem.attention_problem(x, x, x, None, None, **options)
    assert takes_score(problem) == taken
