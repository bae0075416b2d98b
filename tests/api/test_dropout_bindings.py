"""Dropout in `fa_cupy.torch` and `fa_cupy.jax`: the weights that `fa_cupy` drops, and gradients."""

import numpy as np
import pytest

import fa_cupy

SEED = 2**63 + 5


def draw(heads=4):
    rng = np.random.default_rng(0)
    shapes = (2, 4, 9, 8), (2, heads, 11, 8), (2, heads, 11, 6), (2, 4, 9, 6)
    return [rng.standard_normal(shape) for shape in shapes]


def expected(q, k, v, dout, seed=SEED, **options):
    """The output and the gradients of `fa_cupy`."""
    of_call = {"dropout": 0.3, "seed": seed, **options}
    out, lse = fa_cupy.attention(q, k, v, return_lse=True, **of_call)
    return out, fa_cupy.attention_backward(dout, q, k, v, out, lse, **of_call)


def of_torch(torch, function, *arrays):
    """Output and gradients of a function, for the last array as the gradient of its output."""
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays[:-1]]
    out = function(*tensors)
    out.backward(torch.from_numpy(arrays[-1]))
    return out.detach().numpy(), [x.grad.numpy() for x in tensors]


def of_jax(jax, function, *arrays):
    """As `of_torch`."""
    out, pull = jax.vjp(function, *map(jax.numpy.asarray, arrays[:-1]))
    return out, pull(jax.numpy.asarray(arrays[-1]))


def check(found, want):
    np.testing.assert_allclose(found[0], want[0], rtol=1e-12)
    for x, y in zip(found[1], want[1], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_align": "top_left"}], ids=str)
def test_torch(torch, options):
    from fa_cupy.torch import attention

    arrays = draw(2)
    for seed in (SEED, torch.tensor([SEED - 2**64])):
        found = of_torch(
            torch, lambda *x, s=seed: attention(*x, dropout=0.3, seed=s, **options), *arrays
        )
        check(found, expected(*arrays, **options))


def test_jax(jax):
    from fa_cupy.jax import attention

    arrays = draw(2)
    for seed in (SEED, jax.numpy.asarray([SEED], jax.numpy.uint64)):
        found = of_jax(jax, lambda *x, s=seed: attention(*x, dropout=0.3, seed=s), *arrays)
        check(found, expected(*arrays))


def test_names_of_pytorch(torch, jax):
    arrays = draw()
    want = expected(*arrays, is_causal=True, causal_align="top_left")
    for library, run, name in ((torch, of_torch, "torch"), (jax, of_jax, "jax")):
        module = pytest.importorskip(f"fa_cupy.{name}")

        def function(*x, sdpa=module.scaled_dot_product_attention):
            return sdpa(*x, dropout_p=0.3, is_causal=True, seed=SEED)

        check(run(library, function, *arrays), want)


def test_torch_draws_a_seed(torch):
    """That of the generator, so that `torch.manual_seed` decides."""
    from fa_cupy.torch import attention, scaled_dot_product_attention

    q, k, v = map(torch.from_numpy, draw()[:3])
    found = []
    for function, arg in ((attention, "dropout"), (scaled_dot_product_attention, "dropout_p")):
        torch.manual_seed(3)
        found += [function(q, k, v, **{arg: 0.3}) for _ in range(2)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def test_seeds_that_are_compiled(torch, jax):
    """A seed is read by each call: nothing is compiled again for another one."""
    from fa_cupy.jax import attention as of_jax_arrays
    from fa_cupy.torch import attention as of_tensors

    q, k, v, dout = draw()
    compiled = torch.compile(
        lambda q, k, v, s: of_tensors(q, k, v, dropout=0.3, seed=s), fullgraph=True
    )
    seen = []

    @jax.jit
    def traced(q, k, v, s):
        seen.append(s)
        return of_jax_arrays(q, k, v, dropout=0.3, seed=s)

    for seed in (1, 2):
        want = expected(q, k, v, dout, seed)
        found = of_torch(torch, lambda *x, s=seed: compiled(*x, torch.tensor([s])), q, k, v, dout)
        check(found, want)
        check(of_jax(jax, lambda *x, s=seed: traced(*x, jax.numpy.int32(s)), q, k, v, dout), want)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dropout": 1.5, "seed": 1}, ValueError, "dropout is 1.5 (float), want a number from 0"),
        ({"dropout": 0.1, "seed": -1}, ValueError, "seed is -1 (int), want an int from 0 to 2**"),
        ({"dropout": 0.1, "seed": "a"}, TypeError, "seed is "),
        ({"dropout": None}, TypeError, "dropout is None (NoneType), want a finite number"),
    ],
    ids=str,
)
def test_errors(torch, jax, arguments, error, text):
    for name, array in (("torch", torch.from_numpy), ("jax", jax.numpy.asarray)):
        module = pytest.importorskip(f"fa_cupy.{name}")
        with pytest.raises(error) as caught:
            module.attention(*map(array, draw()[:3]), **arguments)
        assert str(caught.value).startswith(f"attention: {text}")
        assert "\n" not in str(caught.value)


def test_jax_wants_a_seed(jax):
    from fa_cupy.jax import attention

    with pytest.raises(TypeError, match="attention: seed is None, want an int from 0"):
        attention(*map(jax.numpy.asarray, draw()[:3]), dropout=0.1)
