"""Gradients through PyTorch and JAX, where they are installed."""

import doctest
import importlib
import subprocess
import sys

import numpy as np
import pytest

from fa_cupy import BitMask, Score, attention, attention_backward

OPTIONS = (
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"window": (2, 1), "causal_align": "top_left", "scale": -0.7},
    {"softcap": 1.5, "scale": 0.8},
)
# q, k, v, bias: grouped heads, a value dim of its own, a bias that is broadcast
SHAPES = ((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2), (4, 1, 6))
PRODUCT = ((2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2), (2, 2, 3, 2))


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def mask_of(q_len, k_len):
    mask = np.random.default_rng(3).random((q_len, k_len)) < 0.7
    mask[1] = False
    return mask


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_adapters_are_imported_by_name_only(library):
    pytest.importorskip(library)
    code = f"import sys, fa_cupy; assert {library!r} not in sys.modules; import fa_cupy.{library}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_examples_in_docstrings(library):
    pytest.importorskip(library)
    results = doctest.testmod(importlib.import_module(f"fa_cupy.{library}"))
    assert results.attempted > 0
    assert results.failed == 0


# PyTorch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch(request):
    """PyTorch with the default device set to one that is there."""
    torch = pytest.importorskip("torch")
    if request.param == "cuda":
        pytest.importorskip("cupy")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    with torch.device(request.param):
        yield torch


def tensors(torch, *shapes, grad=True):
    return [torch.tensor(x, requires_grad=grad) for x in draw(*shapes)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("with_mask", [False, True])
def test_torch_gradients_of_attention(torch, options, with_mask):
    from fa_cupy.torch import attention

    mask = torch.tensor(mask_of(5, 6)) if with_mask else None

    def function(q, k, v, bias):
        out, lse = attention(q, k, v, bias, mask, return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(function, tensors(torch, *SHAPES))


@pytest.mark.parametrize("with_bias", [False, True])
def test_torch_gradients_of_sinks(torch, with_bias):
    from fa_cupy.torch import attention

    def function(q, k, v, sinks, bias=None):
        return attention(q, k, v, bias, sinks=sinks, return_lse=True)

    q, k, v, bias, sinks = tensors(torch, *SHAPES, (4, 1))
    given = (q, k, v, sinks, bias) if with_bias else (q, k, v, sinks)
    assert torch.autograd.gradcheck(function, given)


def test_torch_gradients_of_a_score(torch):
    from fa_cupy.torch import attention

    group = torch.tensor([0, 0, 1, 2, 2, 2])

    def function(q, k, v, sinks, x, y, t):
        text = "s * y[b, h] - x[h] * abs(i - j) ** t + (1 if g[i] == g[j] else c)"
        score = Score(text, x=x, y=y, t=t, g=group, c=0.5)
        return attention(q, k, v, sinks=sinks, score=score, is_causal=True,
                         causal_align="bottom_right", return_lse=True)  # fmt: skip

    q, k, v, _, sinks, x, y = tensors(torch, *SHAPES, (4, 1), (4,), (2, 4))
    t = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (q, k, v, sinks, x, y, t))
    out, lse = function(q.detach(), k.detach(), v.detach(), None, x, y.detach(), t.detach())
    (out.sum() + lse.sum()).backward()
    assert x.grad.shape == (4,)
    assert q.grad is y.grad is t.grad is None


def test_torch_says_what_has_no_gradient(torch):
    from fa_cupy.torch import attention

    q, k, v, _, x = tensors(torch, *SHAPES, (11,))
    score = Score("s + x[i - j + 5]", x=x)
    out = attention(q, k, v, score=score)
    with pytest.raises(ValueError, match=r"need has 'score\.x', and score has x\[i - j \+ 5\]"):
        out.sum().backward()
    attention(q, k, v, score=Score("s + x[i - j + 5]", x=x.detach())).sum().backward()
    assert q.grad.shape == q.shape
    with pytest.raises(TypeError, match=r"^attention: score is 's' \(str\), want a Score"):
        attention(q, k, v, score="s")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_torch_gradients_of_causal_products(torch, reverse, with_state):
    from fa_cupy.torch import causal_product

    def function(q, k, v, state=None):
        return causal_product(
            q, k, v, initial_state=state, return_state=with_state, reverse=reverse
        )

    assert torch.autograd.gradcheck(function, tensors(torch, *PRODUCT[: 3 + with_state]))


def test_torch_gradients_are_torchs(torch):
    from fa_cupy.torch import attention

    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        mine, theirs = (
            [x.detach().to(dtype).requires_grad_() for x in tensors(torch, *[(2, 3, 70, 16)] * 3)]
            for _ in range(2)
        )
        out = attention(*mine, is_causal=True)
        out.float().square().sum().backward()
        wide = [x.float() for x in theirs]
        want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
        want.square().sum().backward()
        assert out.dtype == dtype
        for x, y in zip(mine, theirs, strict=True):
            assert x.grad.dtype == dtype
            assert x.grad.device == x.device
            torch.testing.assert_close(x.grad, y.grad, rtol=rtol, atol=rtol * 3)


def test_torch_computes_what_is_needed_only(torch, monkeypatch):
    import fa_cupy
    from fa_cupy.torch import attention

    asked = []

    def spy(*arguments, need, **options):
        asked.append(need)
        return attention_backward(*arguments, need=need, **options)

    monkeypatch.setattr(fa_cupy, "attention_backward", spy)
    q, k, v, bias = tensors(torch, *SHAPES, grad=False)
    attention(q, k.requires_grad_(), v, bias.requires_grad_()).sum().backward()
    assert asked == [["k", "bias"]]
    assert q.grad is v.grad is None
    assert k.grad.shape == k.shape
    assert bias.grad.shape == bias.shape


def test_torch_gradients_of_the_lse_alone(torch):
    from fa_cupy.torch import attention

    q, k, v, _ = tensors(torch, *SHAPES)
    attention(q, k, v, return_lse=True)[1].sum().backward()
    scores = q.detach()[0, 0] @ k.detach()[0, 0].T / 3**0.5
    want = torch.softmax(scores, -1) @ k.detach()[0, 0] / 3**0.5
    torch.testing.assert_close(q.grad[0, 0], want)
    assert not v.grad.any()


def test_torch_has_no_second_derivatives(torch):
    from fa_cupy.torch import attention

    q, k, v, _ = tensors(torch, *SHAPES)
    (first,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative is not available"):
        first.sum().backward()


def test_torch_function_transforms(torch):
    from fa_cupy.torch import attention, causal_product

    q, k, v = tensors(torch, *[(2, 5, 3)] * 3)
    for function in (attention, causal_product):
        got = torch.func.grad(lambda q, f=function: f(q, k.detach(), v.detach()).sum())(q.detach())
        (want,) = torch.autograd.grad(function(q, k, v).sum(), q)
        torch.testing.assert_close(got, want)


def test_torch_bit_masks():
    torch = pytest.importorskip("torch")
    from fa_cupy.torch import attention

    found = []
    for mask in (torch.tensor(mask_of(5, 6)), BitMask.from_dense(mask_of(5, 6))):
        q, k, v, _ = tensors(torch, *SHAPES)
        attention(q, k, v, mask=mask).sum().backward()
        found.append([q.grad, k.grad, v.grad])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("made_there", [False, True])
def test_torch_bit_masks_on_a_gpu(cupy, made_there):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    from fa_cupy.torch import attention

    dense = torch.tensor(mask_of(300, 400)).cuda()
    bits = BitMask.from_dense(dense if made_there else dense.cpu())
    found = []
    for mask in (dense, bits):
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(2, n, 32, device="cuda", requires_grad=True) for n in (300, 400, 400)
        )
        attention(q, k, v, mask=mask).square().sum().backward()
        found.append([q.grad, k.grad, v.grad])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_torch_without_gradients_and_with_errors(torch):
    from fa_cupy.torch import attention, causal_product

    q, k, v, _ = tensors(torch, *SHAPES)
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    with pytest.raises(ValueError, match=r"^attention: k has head_dim 2, q has 3"):
        attention(q, k[..., :2], v)
    with pytest.raises(TypeError, match=r"^causal_product: return_state is 2"):
        causal_product(q, k[..., :5, :], v[..., :5, :], return_state=2)


# JAX


@pytest.fixture
def callbacks(jax, monkeypatch):
    """The callbacks that are recorded."""
    recorded, record = [], jax.pure_callback

    def spy(*arguments, **options):
        recorded.append(arguments)
        return record(*arguments, **options)

    monkeypatch.setattr(jax, "pure_callback", spy)
    return recorded


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("traced", [False, True])
def test_jax_gradients_of_attention(jax, callbacks, options, traced):
    from jax.test_util import check_grads

    from fa_cupy.jax import attention

    mask = jax.numpy.asarray(mask_of(5, 6))

    def function(q, k, v, bias):
        out, lse = attention(q, k, v, bias, mask, return_lse=True, **options)
        return out, jax.numpy.where(lse == -np.inf, 0, lse)

    arrays = [jax.numpy.asarray(x) for x in draw(*SHAPES)]
    check_grads(jax.jit(function) if traced else function, arrays, order=1, modes=["rev"])
    assert bool(callbacks) == traced


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_jax_gradients_of_sinks(jax, callbacks, with_bias, traced):
    from jax.test_util import check_grads

    from fa_cupy.jax import attention

    def function(q, k, v, sinks, bias=None):
        return attention(q, k, v, bias, sinks=sinks, return_lse=True)

    q, k, v, bias, sinks = (jax.numpy.asarray(x) for x in draw(*SHAPES, (4, 1)))
    given = (q, k, v, sinks, bias) if with_bias else (q, k, v, sinks)
    check_grads(jax.jit(function) if traced else function, given, order=1, modes=["rev"])
    assert bool(callbacks) == traced


@pytest.mark.parametrize("traced", [False, True])
def test_jax_gradients_of_a_score(jax, callbacks, traced):
    from jax.test_util import check_grads

    from fa_cupy.jax import attention as mapped

    group = jax.numpy.asarray([0, 0, 1, 2, 2, 2])
    table = np.random.default_rng(5).standard_normal(11)

    def function(q, k, v, sinks, x, y, t):
        text = "s * y[b, h] - x[h] * abs(i - j) ** t + (1 if g[i] == g[j] else c) + z[i - j + 5]"
        score = Score(text, x=x, y=y, t=t, g=group, c=0.5, z=table)
        return mapped(q, k, v, sinks=sinks, score=score, is_causal=True,
                      causal_align="bottom_right", return_lse=True)  # fmt: skip

    shapes = *SHAPES[:3], (4, 1), (4,), (2, 4), ()
    given = [jax.numpy.asarray(x) for x in draw(*shapes)]
    check_grads(jax.jit(function) if traced else function, given, order=1, modes=["rev"])
    assert bool(callbacks) == traced
    q, k, v = map(np.asarray, given[:3])
    got = function(*given[:3], None, *given[4:])[0]
    native = [np.asarray(x) for x in given[4:]]
    text = "s * y[b, h] - x[h] * abs(i - j) ** t + (1 if g[i] == g[j] else 0.5) + z[i - j + 5]"
    named = dict(zip("xyt", native, strict=True), g=np.asarray(group), z=table)
    want = attention(q, k, v, score=Score(text, **named), is_causal=True,
                              causal_align="bottom_right")  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("traced", [False, True])
def test_jax_says_what_has_no_gradient(jax, traced):
    from fa_cupy.jax import attention as mapped

    q, k, v, _, x = map(jax.numpy.asarray, draw(*SHAPES, (11,)))

    def loss(q, x):
        return mapped(q, k, v, score=Score("s + x[i - j + 5]", x=x)).sum()

    loss = jax.jit(loss) if traced else loss
    with pytest.raises(ValueError, match=r"need has 'score\.x', and score has x\[i - j \+ 5\]"):
        jax.grad(loss, argnums=1)(q, x)
    out, lse = attention(*map(np.asarray, (q, k, v)), return_lse=True,
                                  score=Score("s + x[i - j + 5]", x=np.asarray(x)))  # fmt: skip
    (dq,) = attention_backward(
        np.ones_like(out), *map(np.asarray, (q, k, v)), out, lse, need=["q"],
        score=Score("s + x[i - j + 5]", x=np.asarray(x)),
    )  # fmt: skip
    np.testing.assert_allclose(jax.grad(loss)(q, x), dq, atol=1e-12)
    with pytest.raises(TypeError, match=r"^attention: score is 's' \(str\), want a Score"):
        mapped(q, k, v, score="s")


def test_jax_arrays_of_a_score_lose_digits_as_others_do(jax):
    """Without 64-bit types, NumPy's arrays become arrays of float32."""
    from fa_cupy.jax import attention

    jax.config.update("jax_enable_x64", False)
    q, k, v = (jax.numpy.asarray(x) for x in draw(*SHAPES[:3]))
    x = draw((4,))[0]
    got = attention(q, k, v, score=Score("s * x[h]", x=x))
    want = attention(q, k, v, score=Score("s * x[h]", x=jax.numpy.asarray(x)))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_jax_gradients_of_causal_products(jax, callbacks, reverse, traced):
    from jax.test_util import check_grads

    from fa_cupy.jax import causal_product

    def function(q, k, v, state=None):
        return causal_product(q, k, v, initial_state=state, return_state=True, reverse=reverse)

    arrays = [jax.numpy.asarray(x) for x in draw(*PRODUCT)]
    for given in (arrays[:3], arrays):
        check_grads(jax.jit(function) if traced else function, given, order=1, modes=["rev"])
    assert bool(callbacks) == traced


def test_jax_gradients_of_16_bits_and_long_sequences(jax):
    from fa_cupy.jax import attention

    x = jax.numpy.asarray(draw((2, 1500, 32))[0])

    def loss(x):
        return attention(x, x, x, is_causal=True).astype(np.float32).sum()

    for dtype in (jax.numpy.float32, jax.numpy.bfloat16):
        y = x.astype(dtype)
        eager, traced = jax.grad(loss)(y), jax.jit(jax.grad(loss))(y)
        assert eager.dtype == traced.dtype == dtype
        np.testing.assert_array_equal(np.asarray(eager), np.asarray(traced))


def test_jax_masks_and_mapped_axes(jax):
    from fa_cupy.jax import attention as mapped

    q, k, v = draw((3, 5, 4), (3, 6, 4), (3, 6, 4))
    mask = mask_of(5, 6)
    want = attention(q, k, v, mask=mask)
    np.testing.assert_allclose(jax.vmap(lambda *a: mapped(*a, mask=mask))(q, k, v), want)
    for kind in (jax.numpy.asarray(mask), BitMask.from_dense(mask)):
        jitted = jax.jit(jax.grad(lambda q, kind=kind: mapped(q, k, v, mask=kind).sum()))
        out, lse = attention(q, k, v, mask=mask, return_lse=True)
        (dq,) = attention_backward(np.ones_like(out), q, k, v, out, lse, mask=mask, need=["q"])
        np.testing.assert_allclose(jitted(q), dq, atol=1e-12)


@pytest.mark.parametrize("traced", [False, True])
def test_jax_has_no_second_derivatives(jax, traced):
    from fa_cupy.jax import attention

    x = jax.numpy.asarray(draw((5, 3))[0])
    first = jax.grad(lambda x: attention(x, x, x).sum())
    with pytest.raises(ValueError, match="callbacks do not support JVP"):
        jax.jacrev(jax.jit(first) if traced else first)(x)


def test_jax_errors_come_when_traced(jax):
    from fa_cupy.jax import attention

    q, k, v, _ = map(jax.numpy.asarray, draw(*SHAPES))
    with pytest.raises(ValueError, match=r"attention: k has head_dim 2, q has 3"):
        jax.jit(attention)(q, k[..., :2], v)
    with pytest.raises(ValueError, match=r"attention: k has head_dim 2, q has 3"):
        attention(q, k[..., :2], v)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["attention", "causal_product"])
@pytest.mark.parametrize("arg", ["q", "k", "v", "more"])
@pytest.mark.parametrize(
    ("bad", "text"),
    [(None, "None"), ([[1.0]], "a list"), ("q", "a str"), (np.ma.ones((5, 3)), "a masked array")],
)
def test_jax_arrays_are_checked_when_traced_too(jax, name, arg, bad, text, traced):
    function = getattr(importlib.import_module("fa_cupy.jax"), name)
    if arg == "more":
        arg = {"attention": "bias", "causal_product": "initial_state"}[name]
        if bad is None:
            return

    def call(x):
        return function(**({"q": x, "k": x, "v": x} | {arg: bad}))

    with pytest.raises(TypeError, match=f"^{name}: {arg} is {text}, want a"):
        (jax.jit(call) if traced else call)(jax.numpy.ones((5, 3)))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("causal_product", {"return_state": "yes"}, "return_state is 'yes' (str), want a bool"),
        ("causal_product", {"return_state": 2}, "return_state is 2 (int), want a bool"),
        ("causal_product", {"reverse": None}, "reverse is None (NoneType), want a bool"),
        ("attention", {"return_lse": []}, "return_lse is [] (list), want a bool"),
        ("attention", {"is_causal": "yes"}, "is_causal is 'yes' (str), want a bool"),
        ("attention", {"window": 3}, "window is 3 (int), want a pair (left, right)"),
        ("attention", {"window": {1, 2}}, "window is {1, 2} (set), want a pair (left, right)"),
    ],
)
def test_jax_options_are_checked_when_traced_too(jax, name, options, text, traced):
    function = getattr(importlib.import_module("fa_cupy.jax"), name)

    def call(x):
        return function(x, x, x, **options)

    x = jax.numpy.ones((5, 3))
    with pytest.raises(TypeError) as caught:
        jax.eval_shape(call, x) if traced else call(x)
    assert str(caught.value) == f"{name}: {text}"


def test_jax_a_flag_that_is_traced(jax):
    from fa_cupy.jax import causal_product

    x = jax.numpy.ones((5, 3))
    with pytest.raises(TypeError, match=r"^causal_product: reverse is .*, want a bool"):
        jax.jit(lambda flag: causal_product(x, x, x, reverse=flag))(True)
