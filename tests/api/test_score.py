"""Score expressions in attention and its gradients: known formulas, drawn ones, errors."""

import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, attention, attention_backward, plot, reference
from tests.support import expressions, score_calls
from tests.support.every_run import by_dtype_examples
from tests.support.strategies import DTYPES, by_dtype, normal

B, H, LQ, LK, D = 2, 3, 50, 40, 8
ROWS, COLS = np.arange(LQ)[:, None], np.arange(LK)
RNG = np.random.default_rng(0)
SLOPES = RNG.random(H)
TABLE = RNG.standard_normal((H, LQ + LK))
PLACES = RNG.standard_normal((60, 2))
PREFIX = np.array([5, 30], np.int32)
SMALL = {np.dtype(np.float16): 4e-3, DTYPES[1]: 3e-2, np.dtype(np.float32): 2e-5}


@pytest.fixture(scope="session")
def run(xp):
    """The functions on arrays of the CPU, and of a GPU."""
    return score_calls.functions(xp)


def tensors(dtype=np.float64, heads=H, batch=(B,), count=3):
    shapes = [(*batch, heads, LQ, D)] + [(*batch, heads, LK, D)] * 2 + [(*batch, heads, LQ, D)]
    rng = np.random.default_rng(1)
    return [normal(rng, shape, dtype) for shape in shapes[:count]]


# Known formulas


def squares():
    difference = PLACES[:LQ, None] - PLACES[None, :LK]
    return (difference**2).sum(-1)


FORMULAS = {
    "alibi": (
        Score("s - slopes[h] * abs(i - j)", slopes=SLOPES),
        lambda s: s - SLOPES[:, None, None] * np.abs(ROWS - COLS),
    ),
    "relative": (
        Score("s + table[h, i - j + n]", table=TABLE, n=LK),
        lambda s: s + TABLE[:, ROWS - COLS + LK],
    ),
    "softcap": (Score("c * tanh(s / c)", c=1.5), lambda s: 1.5 * np.tanh(s / 1.5)),
    "gaussian": (
        Score("s - ((x[i, 0] - x[j, 0]) ** 2 + (x[i, 1] - x[j, 1]) ** 2) / 0.5", x=PLACES),
        lambda s: s - squares() / 0.5,
    ),
    "soft window": (
        Score("s - max(abs(i - j) - 8, 0) / width", width=np.float32(2)),
        lambda s: s - np.maximum(np.abs(ROWS - COLS) - 8, 0) / 2,
    ),
    "prefix": (
        Score("s if j < prefix[b] or j <= i else -inf", prefix=PREFIX),
        lambda s: np.where((PREFIX[:, None, None, None] > COLS) | (ROWS >= COLS), s, -np.inf),
    ),
    "replaced": (Score("-abs(i - 2 * j) % 3"), lambda s: 0 * s + (-np.abs(ROWS - 2 * COLS)) % 3),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(**by_dtype())
def test_known_formulas(run, dtype, name):
    attention = run.attention
    score, formula = FORMULAS[name]
    q, k, v = tensors(dtype)
    out, lse = attention(q, k, v, score=score, return_lse=True)
    s = np.matmul(*(x.astype(np.float64) for x in (q, k.swapaxes(-1, -2)))) / D**0.5
    s = formula(s)
    top = s.max(-1, keepdims=True)
    weights = np.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    small = SMALL.get(np.dtype(dtype), 1e-12)
    np.testing.assert_allclose(lse, (np.log(total) + top)[..., 0], 1e-5 + small / 100, 1e-5)
    want = weights / total @ v.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), want, small, 2 * small)


def test_softcap_as_an_expression_is_softcap(run):
    attention, attention_backward = run
    q, k, v, dout = tensors(count=4)
    score = Score("20 * tanh(s / 20)")
    results = []
    for options in ({"softcap": 20.0}, {"score": score}):
        out, lse = attention(q, k, v, return_lse=True, **options)
        results.append([out, lse, *attention_backward(dout, q, k, v, out, lse, **options)])
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, 1e-12, 1e-14)


def test_a_score_that_is_a_bias_is_that_bias():
    """The same bits: what is added is added in the same place."""
    q, k, v, dout = tensors(np.float32, count=4)
    table = RNG.standard_normal((H, LQ, LK)).astype(np.float32)
    options = {"is_causal": True, "causal_align": "top_left", "softcap": 3.0}
    results = []
    for more in ({"bias": table}, {"score": Score("s + x[h, i, j]", x=table)}):
        out, lse = attention(q, k, v, return_lse=True, **more, **options)
        grads = attention_backward(dout, q, k, v, out, lse, **more, **options, need=["q", "k", "v"])
        results.append([out, lse, *grads])
    for x, y in zip(*results, strict=True):
        assert x.tobytes() == y.tobytes()


# Drawn expressions


@st.composite
def calls(draw, dtype, masked):
    """An expression, arrays, and options that change what it is applied to."""
    text = draw(expressions.expressions())
    sizes = expressions.SIZES
    axes = draw(st.sampled_from([(sizes["b"], sizes["h"]), (1, 2, sizes["h"]), (sizes["h"],), ()]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    grouped = len(axes) == 2 and draw(st.booleans())
    few = (*axes[:-1], 1) if grouped else axes
    shapes = ((*axes, sizes["i"]), (*few, sizes["j"]), (*few, sizes["j"]), (*axes, sizes["i"]))
    arrays = [normal(rng, (*shape, 4), dtype) for shape in shapes]
    options = {}
    if draw(st.booleans()):
        options["softcap"] = 2.0
    if draw(st.booleans()):
        options |= {"window": (3, 2), "causal_align": "top_left"}
    bias = normal(rng, (sizes["i"], 1), dtype) if draw(st.booleans()) else None
    mask = rng.random((sizes["i"], sizes["j"])) < 0.7 if masked else None
    if masked == "blocks":
        mask = BitMask.from_dense(mask)
    return text, arrays, bias, mask, options


def compare(got, want, dtype, text):
    """Hold results against float64, where those are ordinary numbers."""
    ordinary = np.isfinite(want) & (np.abs(want) < 1e30)
    size = np.abs(want[ordinary]).max(initial=1.0)
    small = 1e-9 if dtype == np.float64 else 1e-3
    error = np.abs(got[ordinary].astype(np.float64) - want[ordinary])
    assert (error <= small * size).all(), (text, error.max(), size)


@pytest.mark.parametrize(**by_dtype(*DTYPES[2:]))
@pytest.mark.parametrize("masked", [None, "array", "blocks"])
@by_dtype_examples(kinds=3)
@given(data=st.data())
def test_drawn_expressions_agree_with_the_reference(run, dtype, masked, data):
    attention, attention_backward = run
    text, (q, k, v, dout), bias, mask, options = data.draw(calls(dtype, masked))
    score = Score(text, **expressions.arguments_of(text))
    with np.errstate(all="ignore"):
        want, want_lse = reference.attention(q, k, v, bias, mask, score=score, **options)
    if np.abs(want_lse[np.isfinite(want_lse)]).max(initial=0) > 1e3 and q.dtype != np.float64:
        return  # what float32 makes of such scores is another matter
    jumps = "floor" in text or re.search(r"[<>=]", text)
    if q.dtype != np.float64 and jumps:
        return  # a rounding more or less is a jump there
    out, lse = attention(q, k, v, bias, mask, score=score, return_lse=True, **options)
    compare(out, want, q.dtype, text)
    compare(lse, want_lse, q.dtype, text)
    need = ["q", "k", "v"] + (["bias"] if bias is not None else [])
    found = attention_backward(
        dout, q, k, v, out, lse, bias, mask, need=need, score=score, **options
    )
    wanted = reference.attention_backward(dout, q, k, v, bias, mask, score=score, **options)
    for x, y in zip(found, wanted, strict=False):
        compare(x, y, q.dtype, text)


# Gradients

ARRAYS = {
    "h": RNG.random(H),
    "b, h": RNG.random((B, H)),
    "i": RNG.random(LQ + 3),
    "j, h": RNG.random((LK, H)).astype(np.float32),
    "i, j": RNG.random((LQ, LK)),
    "i, i": RNG.random((LQ, LQ)),
    "j, b, i, h": RNG.random((LK, B, LQ, H)).astype(np.float16),
    "": np.asarray(0.5),
}


@pytest.mark.parametrize("index", ARRAYS)
@pytest.mark.parametrize("batch", [(B,), (), (1, B)])
def test_gradients_of_arrays(run, index, batch):
    attention, attention_backward = run
    x = ARRAYS[index]
    element = f"x[{index}]" if index else "x"
    text = f"s * {element} + sin({element} * (i - 2 * j)) - {element} ** 2 * y[h] * sin(j)"
    score = Score(text, x=x, y=SLOPES)
    q, k, v, dout = tensors(batch=batch, count=4)
    options = {"score": score, "window": (30, 9), "causal_align": "top_left"}
    out, lse = attention(q, k, v, return_lse=True, **options)
    need = ["score.x", "q", "score.y", "k", "v"]
    dx, dq, dy, dk, dv = attention_backward(dout, q, k, v, out, lse, need=need, **options)
    want = reference.attention_backward(dout, q, k, v, **options)
    assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
    small = {"f2": 2e-3, "f4": 1e-5}.get(x.dtype.str[1:], 1e-11)
    for got, of in zip((dq, dk, dv, dx, dy), want, strict=True):
        np.testing.assert_allclose(got, of, small, small * (1 + np.abs(of).max()))
    again = attention_backward(dout, q, k, v, out, lse, need=need, **options)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(again, (dx, dq, dy, dk, dv), strict=True))


@pytest.mark.parametrize("shape", [(H, 1), (2, B, 1, 1), (LQ,)], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_with_bias_and_sinks(run, dtype, shape, sparse):
    """The expression is of scores without bias and leaves sinks alone; b counts their axes too."""
    attention, attention_backward = run
    q, k, v, dout = tensors(dtype, count=4)
    sinks, bias = normal(RNG, shape, dtype), normal(RNG, (B, 1, LQ, LK), dtype)
    sinks.flat[0] = -np.inf
    mask = RNG.random((LQ, LK)) < 0.8
    mask[3] = False
    mask = BitMask.from_dense(mask) if sparse else mask
    x, y = RNG.random((2 * B, H)).astype(dtype), SLOPES.astype(dtype)
    options = {
        "score": Score("s * x[b, h] - y[h] * s ** 2 if i != j else -inf", x=x, y=y),
        "sinks": sinks, "softcap": 3.0, "is_causal": True, "causal_align": "bottom_right",
    }  # fmt: skip
    out, lse = attention(q, k, v, bias, mask, return_lse=True, **options)
    want, want_lse = reference.attention(q, k, v, bias, mask, **options)
    plain = attention(q, k, v, bias, mask, **(options | {"sinks": None}))
    assert not np.allclose(out, plain, atol=1e-2)
    dout = np.broadcast_to(dout, out.shape).copy()
    dlse = normal(RNG, lse.shape, dtype)
    need = ["score.x", "sinks", "q", "bias", "k", "v", "score.y"]
    found = attention_backward(dout, q, k, v, out, lse, bias, mask, dlse=dlse, need=need, **options)
    wanted = reference.attention_backward(dout, q, k, v, bias, mask, dlse=dlse, **options)
    names = ["q", "k", "v", "bias", "sinks", "score.x", "score.y"]
    pairs = [(out, want), (lse, want_lse)]
    pairs += [(found[need.index(name)], x) for name, x in zip(names, wanted, strict=True)]
    for got, of in pairs:
        assert (got.shape, got.dtype) == (of.shape, dtype)
        finite = of != -np.inf
        np.testing.assert_array_equal(got != -np.inf, finite)
        small = (1e-12 if dtype == np.float64 else 2e-5) * (1 + np.abs(of[finite]).max())
        np.testing.assert_allclose(got[finite], of[finite], 0, small)
    default = attention_backward(dout, q, k, v, out, lse, bias, mask, dlse=dlse, **options)
    for name, got in zip(names[:5], default, strict=True):
        assert got.tobytes() == found[need.index(name)].tobytes()


def test_an_array_with_two_indices_gets_the_sum_of_both(run):
    attention, attention_backward = run
    x = RNG.standard_normal(60)
    q, k, v, dout = tensors(count=4)
    score = Score("s - (x[i] - x[j]) ** 2", x=x)
    out, lse = attention(q, k, v, score=score, return_lse=True)
    (dx,) = attention_backward(dout, q, k, v, out, lse, score=score, need=["score.x"])
    step = 1e-6 * RNG.standard_normal(60)
    moved = Score("s - (x[i] - x[j]) ** 2", x=x + step), Score("s - (x[i] - x[j]) ** 2", x=x - step)
    change = [(dout * attention(q, k, v, score=of)).sum() for of in moved]
    np.testing.assert_allclose((change[0] - change[1]) / 2, (dx * step).sum(), rtol=1e-5)
    assert (dx[50:] == 0).all()


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_those_of_differences(run, name):
    attention, attention_backward = run
    score, _ = FORMULAS[name]
    q, k, v, dout = tensors(count=4)
    out, lse = attention(q, k, v, score=score, return_lse=True)
    dlse = RNG.standard_normal(lse.shape)
    found = attention_backward(dout, q, k, v, out, lse, score=score, dlse=dlse)

    def value(*arrays):
        out, lse = attention(*arrays, score=score, return_lse=True)
        return (dout * out).sum() + (dlse * lse).sum()

    for place, grad in enumerate(found):
        arrays = [q, k, v]
        step = 1e-6 * np.random.default_rng(5).standard_normal(grad.shape)
        arrays[place] = arrays[place] + step
        above = value(*arrays)
        arrays[place] = arrays[place] - 2 * step
        change = (above - value(*arrays)) / 2
        np.testing.assert_allclose(change, (grad * step).sum(), rtol=1e-5, atol=1e-13)


def test_hidden_keys_do_not_reach_gradients(run):
    """A score of -inf hides what it is made of, NaN included, as a mask does."""
    attention, attention_backward = run
    q, k, v, dout = tensors(count=4)
    x = RNG.random(LK)
    k[..., 20:, :] = np.nan
    v[..., 20:, :] = np.inf
    x[20:] = np.nan
    score = Score("s * x[j] if j < 20 else -inf", x=x)
    masked = Score("s * x[j]", x=x)
    results = []
    for options in ({"score": score}, {"score": masked, "mask": COLS < 20}):
        out, lse = attention(q, k, v, return_lse=True, **options)
        need = ["q", "k", "v", "score.x"]
        found = attention_backward(dout, q, k, v, out, lse, need=need, **options)
        results.append([out, lse, *found])
        assert all(np.isfinite(a).all() for a in results[-1])
        assert (found[3][20:] == 0).all()
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, 1e-12, 1e-14)


def test_gradients_of_large_scores(run):
    """Where the log-sum-exp is large, the weights are computed again, from the same scores."""
    attention, attention_backward = run
    q, k, v, dout = tensors(count=4)
    results = []
    for options in ({"score": Score("s + 1e7")}, {}):
        out, lse = attention(q, k, v, return_lse=True, **options)
        results.append([out, *attention_backward(dout, q, k, v, out, lse, **options)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)


def test_softcap_comes_before_the_expression(run):
    attention, attention_backward = run
    q, k, v, dout = tensors(count=4)
    options = {"softcap": 0.7, "score": Score("3 * sin(s) + s ** 3")}
    out, lse = attention(q, k, v, return_lse=True, **options)
    want = reference.attention_backward(dout, q, k, v, **options)
    found = attention_backward(dout, q, k, v, out, lse, **options)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, 1e-11, 1e-12)


def test_positions_go_on_from_tile_to_tile(run):
    """In both directions, with queries and keys that are many tiles."""
    attention, attention_backward = run
    q, k, v, dout = (normal(RNG, (1500, 8), np.float64) for _ in range(4))
    x = RNG.random(1500)
    score = Score("s - 0.01 * abs(i - j) + x[i] * x[j]", x=x)
    places = np.arange(1500)
    bias = x[:, None] * x - 0.01 * np.abs(places[:, None] - places)
    results = []
    for options in ({"score": score}, {"bias": bias}):
        out, lse = attention(q, k, v, return_lse=True, **options)
        need = ["q", "k", "v", *(["score.x"] if "score" in options else ["bias"])]
        results.append([out, *attention_backward(dout, q, k, v, out, lse, need=need, **options)])
    dbias = results[1].pop()
    results[1].append(dbias @ x + x @ dbias)
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, 1e-9, 1e-11)


# Shapes, libraries, memory


def test_b_counts_all_outer_axes_and_h_is_axis_minus_3(run):
    attention = run.attention
    z = np.zeros((2, 3, 4, 1, 1))
    q, k, v = z, z[..., :1, :], z[..., :1, :]
    score = Score("100 * b + h + 1000 * (i + j)")
    _, lse = attention(q, k, v, score=score, return_lse=True)
    np.testing.assert_allclose(lse[..., 0], 100 * np.arange(6).reshape(2, 3, 1) + np.arange(4))
    for shape, want in (((4, 1, 1), np.arange(4)), ((1, 1), 0)):
        z = np.zeros(shape)
        _, lse = attention(z, z, z, score=score, return_lse=True)
        np.testing.assert_allclose(lse[..., 0], want)


def test_b_and_h_are_those_of_the_output(run):
    """Of axes that q and k do not have, too, and of query heads where key heads are fewer."""
    attention = run.attention
    q, k, v = np.zeros((4, 5, 2)), np.zeros((1, 6, 2)), np.zeros((3, 4, 6, 2))
    score = Score("s + 10 * b + h")
    _, lse = attention(q, k, v, score=score, return_lse=True)
    want = np.log(6) + 10 * np.arange(3)[:, None, None] + np.arange(4)[:, None] + np.zeros(5)
    np.testing.assert_allclose(lse, want, rtol=1e-12)
    q, k = np.zeros((1, 4, 5, 2)), np.zeros((1, 2, 6, 2))
    _, lse = attention(q, k, k, score=score, return_lse=True)
    np.testing.assert_allclose(lse, np.log(6) + np.arange(4)[:, None] + np.zeros((1, 4, 5)))


def test_no_array_of_all_scores():
    """Nor of any part of an expression."""
    q, k, v = (normal(RNG, (4000, 16), np.float32) for _ in range(3))
    score = Score("s - x[i] * x[j] * sin(0.1 * (i - j))", x=RNG.random(4000))
    attention(q[:9], k[:9], v[:9], score=score)
    out, lse = attention(q, k, v, score=score, return_lse=True)
    tracemalloc.start()
    try:
        attention(q, k, v, score=score)
        attention_backward(out, q, k, v, out, lse, score=score, need=["q", "k", "v", "score.x"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.4 * 4000 * 4000 * 4


def test_arrays_are_read_when_the_score_is_used():
    q, k, v = tensors()
    slopes = np.zeros(H)
    score = Score("s - slopes[h] * abs(i - j)", slopes=slopes)
    before = attention(q, k, v, score=score)
    slopes += 1
    assert not np.allclose(before, attention(q, k, v, score=score))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32])
def test_arrays_of_integers(run, dtype):
    attention = run.attention
    groups = RNG.integers(0, 4, 60).astype(dtype)
    q, k, v = tensors()
    got = attention(q, k, v, score=Score("s if g[i] == g[j] else -inf", g=groups))
    want = attention(q, k, v, mask=groups[:LQ, None] == groups[:LK])
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_arrays_in_any_layout():
    table = np.asfortranarray(TABLE.astype(ml_dtypes.bfloat16))[:, ::-1]
    q, k, v = tensors()
    score = Score("s + table[h, i - j + n]", table=table, n=LK)
    bias = table[:, ROWS - COLS + LK].astype(np.float64)
    np.testing.assert_allclose(attention(q, k, v, score=score), attention(q, k, v, bias), 1e-12)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in tensors())
    score = Score("s - x[h] * abs(i - j)", x=torch.from_numpy(SLOPES))
    got = attention(q, k, v, score=score)
    want = attention(*tensors(), score=FORMULAS["alibi"][0])
    np.testing.assert_array_equal(got.numpy(), want)


# Errors


@pytest.mark.parametrize(
    ("options", "kind", "why"),
    [
        ({"score": "s"}, TypeError, "score is 's' (str), want a Score"),
        ({"score": 1.0}, TypeError, "score is 1.0 (float), want a Score"),
        (
            {"score": Score("s + x[h]", x=np.ma.masked_array(SLOPES))},
            TypeError,
            "score.x is a masked array, want a plain array",
        ),
    ],
)
def test_errors_of_calls(options, kind, why):
    q, k, v, dout = tensors(count=4)
    for name, call in (
        ("attention", lambda: attention(q, k, v, **options)),
        ("attention_backward", lambda: attention_backward(dout, q, k, v, q, q[..., 0], **options)),
    ):
        with pytest.raises(kind, match=f"^{name}: ") as caught:
            call()
        assert why in str(caught.value)


def test_out_is_apart_from_arrays_of_the_score():
    q, k, v = tensors()
    out = np.ones_like(q)
    score = Score("s + c * x[i] + y[h]", c=0.5, x=out[0, 0, :, 0], y=SLOPES)
    with pytest.raises(ValueError, match=r"^attention: out overlaps score\.x in memory"):
        attention(q, k, v, score=score, out=out)
    assert (out == 1).all()


def test_arrays_are_of_the_library_of_q():
    array_api_strict = pytest.importorskip("array_api_strict")
    q, k, v = tensors()
    score = Score("s + x[h]", x=array_api_strict.asarray(SLOPES))
    with pytest.raises(TypeError, match=r"score\.x is a array_api_strict.*, q is a numpy.ndarray"):
        attention(q, k, v, score=score)


@pytest.mark.parametrize(
    ("need", "why"),
    [
        (["score.g"], "need has 'score.g', which is an array of integers"),
        (["score.x"], "need has 'score.x', and score has x[(i + 1) % 60], want no index but b, h,"),
        (["score.z"], "need[0] is 'score.z' (str), want 'q', 'k', 'v', 'score.x', 'score.y' and "),
        (["score.c"], "need[0] is 'score.c' (str), want"),
        (["score"], "need[0] is 'score' (str), want"),
        (["score.y", "score.y"], "need has 'score.y' twice, want each once"),
        (["bias"], "need has 'bias', and bias is None, want an array"),
    ],
)
def test_errors_of_need(need, why):
    q, k, v, dout = tensors(count=4)
    x, y, g = np.ones(60), np.ones(H), np.ones(60, int)
    score = Score("s + x[(i + 1) % 60] * x[j] + y[h] * g[i] + c", x=x, y=y, g=g, c=0.5)
    with pytest.raises(ValueError, match=r"^attention_backward: need") as caught:
        attention_backward(dout, q, k, v, dout, dout[..., 0], score=score, need=need)
    assert why in str(caught.value)


# Pictures


def test_the_picture_shows_the_scores():
    pytest.importorskip("matplotlib")
    score = Score("s - slopes[h] * abs(i - j) if i >= j else -inf", slopes=SLOPES)
    ax = plot.scores(score, 5, 7, s=1.0, h=2)
    drawn = ax.collections[0].get_array()
    i, j = np.indices((5, 7))
    want = np.where(i >= j, 1 - SLOPES[2] * np.abs(i - j), np.nan)
    np.testing.assert_allclose(np.ma.filled(drawn, np.nan).reshape(5, 7), want)
    assert not plot.scores(score, 0, 7).collections
    s = np.arange(35.0).reshape(5, 7)
    drawn = plot.scores(Score("s / 2"), 5, 7, s=s).collections[0].get_array()
    np.testing.assert_array_equal(drawn.reshape(5, 7), s / 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        (("s", 5, 5), TypeError, "score is 's' (str), want a Score"),
        ((None, 5, 5), TypeError, "score is None, want a Score"),
        ((Score("s"), -1, 5), ValueError, "q_len is -1"),
        ((Score("s"), 5, 2.0), TypeError, "k_len is 2.0"),
        ((Score("s"), 5, 5, np.zeros(5)), ValueError, "s has shape (5,), want () or (5, 5)"),
    ],
)
def test_errors_of_pictures(arguments, kind, why):
    *arguments, s = arguments if len(arguments) == 4 else (*arguments, 0.0)
    with pytest.raises(kind, match=r"^plot\.scores: ") as caught:
        plot.scores(*arguments, s=s)
    assert why in str(caught.value)


@pytest.mark.parametrize("score", ["s", 1.0, None])
def test_a_picture_wants_a_score_and_no_none(score):
    with pytest.raises(TypeError, match=r"^plot\.scores: score is .*, want a Score$"):
        plot.scores(score, 5, 5)


def test_the_gradient_of_an_exponent_where_its_base_is_zero():
    """The power of 0 is flat there: 0 times log(0) is no number."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 6, 4))

    def loss(t):
        return (
            attention(q, k, v, score=Score("s - abs(i - j) ** t", t=np.asarray(t))) * dout
        ).sum()

    score = Score("s - abs(i - j) ** t", t=np.asarray(1.25))
    out, lse = attention(q, k, v, score=score, return_lse=True)
    (slope,) = attention_backward(dout, q, k, v, out, lse, score=score, need=["score.t"])
    np.testing.assert_allclose(slope, (loss(1.25 + 1e-5) - loss(1.25 - 1e-5)) / 2e-5, rtol=1e-6)
