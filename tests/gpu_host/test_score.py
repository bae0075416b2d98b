"""Score expressions on a GPU by cuBLAS: on NumPy in place of CuPy, against the CPU's answers."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa_cupy
from fa_cupy import BitMask, Score, _attention, attention, attention_backward
from fa_cupy._score import arrays_of, operands_of
from fa_cupy.core import attention_problem, dispatch
from fa_cupy.score import derivative, tree
from fa_cupy.score.evaluate import evaluate
from tests.support import cublas_on_numpy, cupy_stand_in, expressions
from tests.support.cublas_on_numpy import Device, bare, device
from tests.support.strategies import DTYPES, by_dtype, normal

B, H, LQ, LK, D = 2, 4, 150, 130, 8
RNG = np.random.default_rng(0)
SLOPES, TABLE = RNG.random(H), RNG.standard_normal((H, LQ + LK))
DOCUMENT = np.repeat(np.arange(5, dtype=np.int32), 30)
BFLOAT16 = RNG.standard_normal((LK, H)).astype(ml_dtypes.bfloat16)[::-1]
S = tree.variable("s")

SCORES = {
    "alibi": Score("s - slopes[h] * abs(i - j)", slopes=SLOPES),
    "relative": Score("s + table[h, i - j + n]", table=TABLE.astype(np.float32), n=LK),
    "softcap": Score("c * tanh(s / c)", c=1.5),
    "documents": Score("s if document[i] == document[j] else -inf", document=DOCUMENT),
    "bfloat16": Score("s * x[j, h] - sigmoid(x[3, h]) * x[2, 1] + b", x=BFLOAT16),
    "scalars": Score("s + sqrt(2) * max(c, 3) + t - 7 // 2 + (1 if c < 2 else 5)", c=0.5,
                     t=np.asarray(0.25)),
    "scalar": Score("where(1 < 2, s, 0) * 1"),
    "constant": Score("1.5"),
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """Modules of ``fa_cupy.gpu`` on NumPy."""
    with cublas_on_numpy.in_place_of_cublas(monkeypatch) as found:
        yield found


# Expressions


def both(roots, arrays, variables, dtype):
    """Values of trees by NumPy, and by arrays of a device."""
    order = tree.ordered(*roots)
    there = [x if isinstance(x, float) else device(x) for x in arrays]
    points = {name: device(x) for name, x in variables.items()}
    with np.errstate(all="ignore"):
        want = evaluate(np, order, variables, arrays, dtype)
        found = evaluate(cublas_on_numpy.namespace(), order, points, there, dtype)
    return want, found


@given(text=expressions.expressions(), dtype=st.sampled_from([np.float32, np.float64]))
def test_a_device_computes_what_numpy_does(text, dtype):
    """To the bit, here; and what goes to CuPy are its own arrays and NumPy's scalars."""
    root, numbered = expressions.tree_of(text)
    points = expressions.points(12)
    points["s"] = points["s"].astype(dtype)
    roots, arrays = (
        [root, derivative.derivative(root, S)],
        [expressions.ARGUMENTS[n] for n in numbered],
    )
    for want, found in zip(*both(roots, arrays, points, np.dtype(dtype)), strict=True):
        assert isinstance(found, (Device, np.generic))
        assert found.dtype == want.dtype == dtype
        assert np.broadcast_to(bare(found), 12).tobytes() == np.broadcast_to(want, 12).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_bfloat16_is_read(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(ml_dtypes.bfloat16)
    score = Score("x[i]", x=x)
    want, found = both([score.program.root], [x], {"i": np.arange(2**16)}, np.dtype(dtype))
    assert found[0].dtype == dtype
    with np.errstate(invalid="ignore"):
        wide = x.astype(dtype)
    np.testing.assert_array_equal(bare(found[0]), wide)
    np.testing.assert_array_equal(want[0], wide)


# Calls


def on_device(score):
    """A score with its arrays there."""
    values = {name.removeprefix("score."): device(x) for name, x in arrays_of("", score).items()}
    named = {name: values.get(name, x) for name, x in score._arguments.items()}
    return operands_of(score, {f"score.{name}": x for name, x in named.items()})


def empty(shape, dtype, like):
    return device(np.empty(shape, dtype))


def solve(gpu, arrays, bias, mask, score, need, dout, dlse=None, sinks=None, **options):
    """Output, LSE and gradients as the modules of the GPU compute them."""
    operands = on_device(score)
    inputs = [None if x is None else device(x) for x in (*arrays, bias)]
    inputs.append(mask if mask is None or isinstance(mask, BitMask) else device(mask))
    sinks = None if sinks is None else device(sinks)
    problem = attention_problem.attention_problem(*inputs, score=operands, sinks=sinks, **options)
    dispatch.score_for("attention_backward", operands, need)
    out, lse = gpu.attention.attention(problem, *inputs, None, True, sinks, operands)
    results = out, lse, device(dout), None if dlse is None else device(dlse)
    found = gpu.attention_backward.backward(
        problem, tuple(inputs), results, need, empty, sinks, operands
    )
    assert tuple(found) == tuple(need)
    return [bare(x) for x in (out, lse, *found.values())]


def expected(arrays, bias, mask, score, need, dout, dlse=None, **options):
    out, lse = attention(*arrays, bias, mask, score=score, return_lse=True, **options)
    grads = attention_backward(
        dout, *arrays, out, lse, bias, mask, score=score, need=need, dlse=dlse, **options
    )
    return [out, lse, *grads]


def compare(got, want, small, text=""):
    for place, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = x.astype(np.float64), y.astype(np.float64)
        ordinary = np.isfinite(y) & (np.abs(y) < 1e30)
        size = np.abs(y[ordinary]).max(initial=1.0)
        error = np.abs(x[ordinary] - y[ordinary]).max(initial=0.0)
        assert error <= small * size, (text, place, error, size)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))


def tensors(dtype, batch=(B, H), kv_heads=None, seed=1):
    few = batch if kv_heads is None else (*batch[:-1], kv_heads)
    shapes = (*batch, LQ, D), (*few, LK, D), (*few, LK, 5), (*batch, LQ, 5)
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def gradients_of(score):
    """What gradients a score has: those of arrays of floats that are not looked up otherwise."""
    found = []
    for number, (name, x) in enumerate(score._values.items()):
        own = [element for element in score.program.elements if element.array == number]
        if not isinstance(x, float) and own and all(x.axes is not None for x in own):
            found.append(f"score.{name}")
    return found


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(**by_dtype())
def test_calls_agree_with_the_cpu(gpu, dtype, name):
    *arrays, dout = tensors(dtype, kv_heads=2)
    score = SCORES[name]
    need = ["k", *gradients_of(score), "q", "v"]
    options = {"is_causal": True, "causal_align": "bottom_right"}
    got = solve(gpu, arrays, None, None, score, need, dout, **options)
    want = expected(arrays, None, None, score, need, dout, **options)
    # The 16-bit output is what gradients are made from: one rounding of it more or less is seen.
    small = {DTYPES[0]: 3e-3, DTYPES[1]: 3e-2, DTYPES[2]: 1e-5, DTYPES[3]: 1e-11}
    compare(got, want, small[np.dtype(dtype)])


@pytest.mark.parametrize("batch", [(), (H,), (1, B, H)], ids=str)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("band", [{}, {"window": (60, 30), "causal_align": "top_left"}], ids=str)
def test_with_all_else(gpu, batch, sparse, band, monkeypatch):
    """Sinks, bias, mask and softcap; several tiles and stacks."""
    monkeypatch.setattr(gpu.attention, "_TILE_N", 64)
    monkeypatch.setattr(gpu.attention, "_LEAST_M", 16)
    monkeypatch.setattr(gpu.attention, "_EXPRESSION_SIZE", 64 * 48)
    *arrays, dout = tensors(np.float64, batch)
    mask = RNG.random((LQ, LK)) < 0.6
    mask[3] = False
    mask = BitMask.from_dense(mask) if sparse else mask
    heads = batch[-1:] or (1,)
    x, y, z = RNG.random((B, H)), RNG.random(LQ + 4), RNG.random((LK, LQ)).astype(np.float32)
    options = {
        "bias": RNG.standard_normal((1, LK)), "mask": mask, "dlse": RNG.random((*batch, LQ)),
        "score": Score("s * x[b, h] - sin(s) * y[i] + z[j, i] * y[h] + g[j]",
                       x=x, y=y, z=z, g=DOCUMENT),
        "sinks": RNG.standard_normal((*heads, 1) if batch else (1,)), "softcap": 3.0, **band,
    }  # fmt: skip
    need = ["score.z", "q", "bias", "score.x", "sinks", "v", "k", "score.y"]
    bias, mask, score = (options.pop(name) for name in ("bias", "mask", "score"))
    given = (arrays, bias, mask, score, need, dout)
    compare(solve(gpu, *given, **options), expected(*given, **options), 1e-6)
    f64 = [x for i, x in enumerate(solve(gpu, *given, **options)) if i != 2]
    compare(f64, [x for i, x in enumerate(expected(*given, **options)) if i != 2], 1e-11)


@pytest.mark.parametrize(
    ("batch", "q_len", "k_len"), [((B, H), 0, 9), ((B, H), 9, 0), ((0, H), 9, 9), ((B, 0), 9, 9)]
)
def test_nothing(gpu, batch, q_len, k_len):
    rng = np.random.default_rng(0)
    rows = (q_len, D), (k_len, D), (k_len, 5), (q_len, 5)
    *arrays, dout = (rng.standard_normal((*batch, *shape)) for shape in rows)
    t = np.asarray(0.5)
    score = Score("s * t - slopes[h] * abs(i - j) + z[i, j]", slopes=SLOPES, z=np.ones((9, 9)), t=t)
    sinks = rng.standard_normal((batch[-1], 1))
    need = ["score.slopes", "q", "sinks", "score.z", "k", "v", "score.t"]
    given = arrays, None, None, score, need, dout
    compare(solve(gpu, *given, sinks=sinks), expected(*given, sinks=sinks), 1e-12)


def test_an_element_that_is_read_twice_of_one_axis(gpu):
    *arrays, dout = tensors(np.float64)
    x = RNG.random((LQ, LQ))
    score = Score("s * x[i, i] + x[j, i] ** 2 * x[h, b]", x=x)
    given = arrays, None, None, score, ["score.x"], dout
    compare(solve(gpu, *given), expected(*given), 1e-11)


def test_hidden_keys_do_not_reach_gradients(gpu):
    """Something that is not finite has all computed again, without what is hidden."""
    *arrays, dout = tensors(np.float64)
    arrays[1][..., 20:, :] = np.nan
    arrays[2][..., 20:, :] = np.inf
    x = RNG.random(LK)
    x[20:] = np.nan
    score = Score("s * x[j] if j < 20 else -inf", x=x)
    given = arrays, None, None, score, ["q", "k", "v", "score.x"], dout
    with np.errstate(all="ignore"):
        got = solve(gpu, *given)
    assert all(np.isfinite(x).all() for x in got)
    compare(got, expected(*given), 1e-11)


def test_large_scores(gpu):
    """Where the LSE is no use, maximum and sum are computed again, of expressions too."""
    *arrays, dout = tensors(np.float64)
    given = arrays, None, None, Score("s + x[h] * 1e7", x=SLOPES), ["q", "k", "v", "score.x"], dout
    compare(solve(gpu, *given), expected(*given), 1e-6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=expressions.expressions(), seed=st.integers(0, 99))
def test_drawn_expressions(gpu, text, seed):
    sizes, rng = expressions.SIZES, np.random.default_rng(seed)
    batch = sizes["b"], sizes["h"]
    shapes = [(*batch, n, 4) for n in (sizes["i"], sizes["j"], sizes["j"], sizes["i"])]
    *arrays, dout = (rng.standard_normal(shape) for shape in shapes)
    score = Score(text, **expressions.arguments_of(text))
    need = ["q", "k", "v", *gradients_of(score)]
    given = arrays, None, None, score, need, dout
    with np.errstate(all="ignore"):
        got, want = solve(gpu, *given), expected(*given)
    if np.abs(want[1][np.isfinite(want[1])]).max(initial=0) < 1e4:
        float64 = [i for i, x in enumerate(want) if x.dtype == np.float64]
        compare([got[i] for i in float64], [want[i] for i in float64], 1e-8, text)


# The way of a call


@pytest.fixture
def asked(monkeypatch):
    """A device whose cuBLAS notes the problems and the scores that it is asked for."""
    found = []

    def forward(problem, q, k, v, bias, mask, out, return_lse, sinks, score):
        found.append(("attention", problem, score))
        return q, cupy_stand_in.owned(np.zeros(q.shape[:-1], np.float32))

    def backward(problem, inputs, results, need, empty, sinks, score):
        found.append((need, problem, score))
        return dict.fromkeys(need, inputs[0])

    with cupy_stand_in.on_a_device():
        from fa_cupy.gpu.cublas import attention as of_values
        from fa_cupy.gpu.cublas import attention_backward as of_gradients

        monkeypatch.setattr(of_values, "attention", forward)
        monkeypatch.setattr(of_gradients, "backward", backward)
        yield found


@pytest.mark.parametrize(
    ("dtype", "dim", "need"),
    [
        (np.float32, 264, ("q", "k", "v")),
        (np.float16, 320, None),
        (np.float16, 64, ("q", "score.x")),
        (np.float16, 64, ("score.x",)),
    ],
)
def test_what_kernels_do_not_serve_goes_to_cublas(asked, dtype, dim, need):
    q = cupy_stand_in.owned(np.zeros((2, 3, 64, dim), dtype))
    lse = cupy_stand_in.owned(np.zeros((2, 3, 64), np.float32))
    score = Score("s * x[h]", x=cupy_stand_in.owned(SLOPES))
    for _ in range(2):
        if need is None:
            fa_cupy.attention(q, q, q, score=score)
        fa_cupy.attention_backward(q, q, q, q, q, lse, score=score, need=need)
    forward = [] if need else ["attention"]
    assert [what for what, *_ in asked] == 2 * [*forward, need or ("q", "k", "v")]
    for _, problem, operands in asked:
        assert problem.score.program == operands.program == score.program
        assert operands.values == (score._arguments["x"],)


def test_without_queries_nothing_is_computed(asked):
    q = cupy_stand_in.owned(np.zeros((2, 3, 64, 64), np.float32))
    score = Score("s * x[h]", x=cupy_stand_in.owned(SLOPES))
    none = cupy_stand_in.owned(np.zeros((2, 3, 0, 64), np.float32))
    assert fa_cupy.attention(none, q, q, score=score).shape == (2, 3, 0, 64)
    assert asked == []


def test_known_plans_without_a_score_do_not_answer_calls_with_one(asked, monkeypatch):
    q = cupy_stand_in.owned(np.zeros((2, 3, 64, 64), np.float16))
    _, lse = fa_cupy.attention(q, q, q, return_lse=True)
    fa_cupy.attention_backward(q, q, q, q, q, lse)
    for table, answer in ((_attention._CACHED, "wrong"), (_attention._CACHED_BACKWARD, ["wrong"])):
        assert len(table) == 1
        for kind in table:
            monkeypatch.setitem(table, kind, lambda *_, answer=answer: answer)
    assert fa_cupy.attention(q, q, q) == "wrong"
    assert fa_cupy.attention_backward(q, q, q, q, q, lse) == ("wrong",)
    score = Score("s * x[h]", x=cupy_stand_in.owned(SLOPES))
    assert fa_cupy.attention(q, q, q, score=score).shape == q.shape
    assert len(fa_cupy.attention_backward(q, q, q, q, q, lse, score=score)) == 3


@pytest.mark.parametrize("backward", [False, True])
def test_arrays_of_a_score_are_checked_like_others(backward):
    with cupy_stand_in.on_a_device():
        q = cupy_stand_in.owned(np.zeros((2, 3, 64, 64), np.float16))
        lse = cupy_stand_in.owned(np.zeros((2, 3, 64), np.float32))
        name = "attention_backward" if backward else "attention"

        def call(x):
            score = Score("s * x[h]", x=x)
            if backward:
                return fa_cupy.attention_backward(q, q, q, q, q, lse, score=score)
            return fa_cupy.attention(q, q, q, score=score)

        with pytest.raises(TypeError, match=rf"^{name}: score\.x is a numpy\.ndarray, .* is a "):
            call(SLOPES)
        short = cupy_stand_in.owned(np.zeros(2))
        with pytest.raises(ValueError, match=rf"^{name}: score has x\[h\], where h is from 0 to 2"):
            call(short)
        odd = cupy_stand_in.as_strided(cupy_stand_in.owned(np.zeros(9)), (3,), (7,))
        with pytest.raises(ValueError, match=rf"^{name}: score\.x is at .* multiples of its item"):
            call(odd)
