"""Packed sequences and key lengths in `fa_cupy.torch` and `fa_cupy.jax`."""

import functools
import importlib

import numpy as np
import pytest

import fa_cupy
from fa_cupy import Score

Q_OFFSETS = np.array([1, 4, 4, 9])
K_OFFSETS = np.array([0, 2, 3, 8])
TABLE = np.array([[2, 0], [1, 2]])
LENGTHS = np.array([20, 7])


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def squares(x):
    return x * x + 0.5


def cases(functions, array=np.asarray):
    """Calls with offsets or lengths, each with the shapes of its arguments."""
    attention, product = functions.attention, functions.causal_product
    linear = functions.linear_attention
    q_offsets, k_offsets = array(Q_OFFSETS), array(K_OFFSETS)
    lengths = array(LENGTHS % 9)
    both = {"q_offsets": q_offsets, "k_offsets": k_offsets}
    q, k, v = (2, 4, 10, 3), (2, 2, 8, 3), (2, 2, 8, 2)
    same = (2, 4, 10, 3), (2, 2, 10, 3), (2, 2, 10, 2)
    state, sums = (2, 2, 3, 3, 2), (2, 2, 3, 3, 3)
    end = {"is_causal": True, "causal_align": "bottom_right"}
    return {
        "attention": (
            lambda q, k, v, bias, sinks: attention(
                q, k, v, bias, sinks=sinks, is_causal=True, q_offsets=q_offsets
            ),
            (*same, (4, 1, 10), (4, 1)),
        ),
        "attention of other keys": (
            lambda q, k, v: attention(q, k, v, window=(1, 1), causal_align="top_left", **both),
            (q, k, v),
        ),
        "attention of the same offsets twice": (
            lambda q, k, v: attention(q, k, v, q_offsets=q_offsets, k_offsets=q_offsets), same,
        ),
        "attention with a score": (
            lambda q, k, v, x: attention(
                q, k, v, score=Score("s - x[h] * abs(i - j)", x=x), **end, **both
            ),
            (q, k, v, (4,)),
        ),
        "attention with lengths": (
            lambda q, k, v, bias, sinks: attention(
                q, k, v, bias, sinks=sinks, k_lengths=lengths, return_lse=True, **end
            ),
            (q, k, v, (2, 1, 10, 8), (4, 1)),
        ),
        "attention with one length": (lambda q, k, v: attention(q, k, v, k_lengths=5), (q, k, v)),
        "attention with lengths and a score": (
            lambda q, k, v, x: attention(
                q, k, v, score=Score("s - x[h] * abs(i - j) * (b + 1)", x=x), k_lengths=lengths
            ),
            (q, k, v, (4,)),
        ),
        "causal_product": (
            lambda q, k, v, s: product(
                q, k, v, initial_state=s, return_state=True, q_offsets=q_offsets
            ),
            (*same, state),
        ),
        "causal_product reverse": (
            lambda q, k, v: product(q, k, v, reverse=True, q_offsets=q_offsets), same,
        ),
        "linear_attention": (
            lambda q, k, v, s: linear(
                q, k, v, initial_state=abs(s) + 0.1, return_state=True, q_offsets=q_offsets,
                eps=0.1,
            ),
            (*same, sums),
        ),
        "linear_attention callable": (
            lambda q, k, v: linear(q, k, v, feature_map=squares, q_offsets=q_offsets, eps=0.1),
            same,
        ),
        "linear_attention of other keys": (
            lambda q, k, v, s: linear(
                q, k, v, initial_state=abs(s) + 0.1, return_state=True, is_causal=False,
                feature_map="exp", eps=0.1, **both,
            ),
            (q, k, v, sums),
        ),
    }  # fmt: skip


CASES = [*cases(fa_cupy)]


@pytest.fixture(params=["torch", "jax"])
def library(request):
    """A module with the functions, and what makes arrays of its library."""
    request.getfixturevalue(request.param)
    module = importlib.import_module(f"fa_cupy.{request.param}")
    if request.param == "torch":
        return module, importlib.import_module("torch").tensor
    return module, importlib.import_module("jax.numpy").asarray


def assert_same(got, want):
    for x, y in zip(*((z if isinstance(z, tuple) else (z,)) for z in (got, want)), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_plain_functions(library, case):
    module, array = library
    function, shapes = cases(module, array)[case]
    plain, _ = cases(fa_cupy)[case]
    given = draw(*shapes)
    assert_same(function(*map(array, given)), plain(*given))


@pytest.mark.parametrize("case", CASES)
def test_torch_gradients(torch, case):
    import fa_cupy.torch

    function, shapes = cases(fa_cupy.torch, torch.tensor)[case]
    given = [torch.tensor(x, requires_grad=True) for x in draw(*shapes)]
    assert torch.autograd.gradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_jax_gradients(jax, case, traced):
    from jax.test_util import check_grads

    import fa_cupy.jax

    function, shapes = cases(fa_cupy.jax, jax.numpy.asarray)[case]
    given = [jax.numpy.asarray(x) for x in draw(*shapes)]
    check_grads(jax.jit(function) if traced else function, given, order=1, modes=["rev"])


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", None), ("eager", True)])
@pytest.mark.parametrize("case", CASES)
def test_torch_compile(torch, case, backend, dynamic):
    """One graph without a break, with the same results and gradients."""
    import fa_cupy.torch

    function, shapes = cases(fa_cupy.torch, torch.tensor)[case]
    torch._dynamo.reset()
    traced = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    found = []
    for f in (function, traced):
        given = [torch.tensor(x, requires_grad=True) for x in draw(*shapes)]
        results = f(*given)
        results = results if isinstance(results, tuple) else (results,)
        sum(x.sin().sum() for x in results).backward()
        found.append([*results, *(x.grad for x in given)])
    for mine, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(mine, want)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compiled_calls_take_other_offsets(library):
    """Offsets are arguments: nothing is compiled again for other numbers."""
    module, array = library
    compiled = []

    def function(x, offsets):
        return module.attention(x, x, x, q_offsets=offsets, is_causal=True)

    def counted(x, offsets):
        compiled.append(1)
        return function(x, offsets)

    if module.__name__ == "fa_cupy.torch":
        torch = importlib.import_module("torch")
        torch._dynamo.reset()

        def backend(graph, inputs):
            compiled.append(1)
            return graph.forward

        traced = torch.compile(function, fullgraph=True, backend=backend)
    else:
        traced = importlib.import_module("jax").jit(counted)
    (x,) = draw((2, 10, 3))
    for offsets in (Q_OFFSETS, np.array([0, 1, 8, 10])):
        want = fa_cupy.attention(x, x, x, q_offsets=offsets, is_causal=True)
        assert_same(traced(array(x), array(offsets)), want)
    assert len(compiled) == 1


@pytest.mark.parametrize("traced", [False, True])
def test_lengths_and_pages(library, traced):
    """The results of the plain function, also for one that is compiled."""
    module, array = library
    q, k, v = draw((2, 4, 1, 3), (3, 2, 16, 3), (3, 2, 16, 2))
    rows = draw((2, 2, 32, 3), (2, 2, 32, 2))
    for keys, places in (
        ((k, v), {"k_lengths": LENGTHS, "page_table": TABLE}),
        ((k, v), {"page_table": TABLE}),
        (rows, {"k_lengths": LENGTHS}),
        (rows, {"k_lengths": 9}),
    ):
        moved = {arg: x if isinstance(x, int) else array(x) for arg, x in places.items()}
        call = compiled(module, lambda *x, m=moved: module.attention(*x, return_lse=True, **m))
        call = call if traced else lambda *x, m=moved: module.attention(*x, return_lse=True, **m)
        want = fa_cupy.attention(q, *keys, return_lse=True, **places)
        assert_same(call(*map(array, (q, *keys))), want)


def compiled(module, function):
    if module.__name__ == "fa_cupy.jax":
        return importlib.import_module("jax").jit(function)
    torch = importlib.import_module("torch")
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_pages_have_no_gradients(library):
    module, array = library
    q, k, v = map(array, draw((2, 4, 1, 3), (3, 2, 16, 3), (3, 2, 16, 2)))
    places = {"k_lengths": array(LENGTHS), "page_table": array(TABLE)}

    def loss(q):
        return module.attention(q, k, v, **places).sum()

    if module.__name__ == "fa_cupy.jax":
        call = importlib.import_module("jax").grad(loss)
    else:
        with importlib.import_module("torch").no_grad():
            loss(q.requires_grad_())
        call = loss
    with pytest.raises(NotImplementedError, match=r"^attention: page_table is given and a "):
        call(q)


def test_what_is_behind_the_end_has_gradients_of_0(library):
    module, array = library
    q, k, v = draw((2, 4, 3, 3), (2, 2, 9, 3), (2, 2, 9, 2))
    lengths = LENGTHS % 9
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = np.nan
    inputs = [array(x) for x in (q, k, v)]

    def loss(q, k, v):
        return module.attention(q, k, v, k_lengths=array(lengths)).sum()

    if module.__name__ == "fa_cupy.jax":
        grads = importlib.import_module("jax").grad(loss, argnums=(0, 1, 2))(*inputs)
    else:
        loss(*(x.requires_grad_() for x in inputs)).backward()
        grads = [x.grad for x in inputs]
    grads = [*map(np.asarray, grads)]
    assert all(np.isfinite(x).all() for x in grads)
    for b, n in enumerate(lengths):
        assert all(x[b, :, :n].any() and not x[b, :, n:].any() for x in grads[1:])


def test_torch_operators_keep_their_promises(torch):
    """Shapes, dtypes and strides of results are those of the fake kernels."""
    from fa_cupy.torch import operators  # noqa: F401, which registers them

    def turned(*shape):
        return torch.tensor(draw(shape)[0]).transpose(-3, -2)

    check = functools.partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    ops = torch.ops.fa_cupy
    q, k, v = turned(2, 10, 4, 3), turned(1, 8, 2, 3), turned(2, 8, 4, 2)
    both = torch.tensor(Q_OFFSETS), torch.tensor(K_OFFSETS)
    options = (None, None, None, False, None, None, None, 0.0, None, None, 0.0)
    given = q, k, v, None, None, None
    out, lse = ops.attention(*given, None, None, *both, None, [], *options)
    check(ops.attention, (*given, None, None, *both, None, [], *options))
    places = None, *both, None, []
    backward = torch.ones_like(out), "v,k,q", None, out, lse, *given, *places, *options
    check(ops.attention_backward, backward)
    lengths, table = torch.tensor(LENGTHS), torch.tensor(TABLE)
    backward = *backward[:11], lengths % 9, *[None] * 3, [], *options
    check(ops.attention_backward, backward)
    pages = turned(3, 16, 2, 3), turned(3, 16, 2, 2)
    check(ops.attention, (q, *pages, *[None] * 3, lengths, table, *[None] * 3, [], *options))
    same = turned(2, 10, 2, 3), turned(2, 10, 4, 2)
    state = torch.ones(2, 4, 3, 2, 3, dtype=torch.float64).mT
    given = q, *same, state, both[0]
    out, states = ops.causal_product(*given, True, "auto")
    check(ops.causal_product, (*given, True, "auto"))
    backward = torch.ones_like(out), torch.ones_like(states), *given, True
    check(ops.causal_product_backward, backward)
    state = torch.ones(2, 4, 3, 3, 3, dtype=torch.float64)
    given = q, k, v, state, *both, "exp", 0.1, False
    out, states = ops.linear_attention(*given)
    check(ops.linear_attention, given)
    backward = torch.ones_like(out), torch.ones_like(states), *given
    check(ops.linear_attention_backward, backward)


@pytest.mark.parametrize("traced", [False, True])
def test_errors(library, traced):
    module, array = library
    q, k = map(array, draw((2, 10, 3), (2, 8, 3)))
    offsets = array(Q_OFFSETS)

    def check(error, text, function, *arrays):
        if traced:
            if module.__name__ == "fa_cupy.torch":
                return
            function = importlib.import_module("jax").jit(function)
        with pytest.raises(error, match=text):
            function(*arrays)

    text = r"^attention: k has length 8, q has 10, want k_offsets"
    check(ValueError, text, lambda q, k, o: module.attention(q, k, k, q_offsets=o), q, k, offsets)
    text = r"^attention: k_offsets is given and q_offsets is None"
    check(ValueError, text, lambda q, o: module.attention(q, q, q, k_offsets=o), q, offsets)
    text = r"^attention: q_offsets and k_lengths are given"
    check(
        ValueError, text, lambda q, o: module.attention(q, q, q, q_offsets=o, k_lengths=3), q,
        offsets,
    )  # fmt: skip
    text = r"^causal_product: q_offsets has dtype float64, want int32 or int64"
    check(TypeError, text, lambda q, o: module.causal_product(q, q, q, q_offsets=o), q, q[0, :, 0])
    text = r"^linear_attention: k_offsets is given with is_causal=True"
    check(
        ValueError, text,
        lambda q, o: module.linear_attention(q, q, q, q_offsets=o, k_offsets=o), q, offsets,
    )  # fmt: skip
    text = r"^linear_attention: k_offsets is given and q_offsets is None"
    check(
        ValueError, text,
        lambda q, o: module.linear_attention(q, q, q, k_offsets=o, is_causal=False), q, offsets,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"^attention: q_offsets is a list, want a"):
        module.attention(q, q, q, q_offsets=[0, 10])


def test_torch_offsets_that_are_out_of_order(torch):
    from fa_cupy.torch import attention, linear_attention

    q = torch.tensor(draw((2, 10, 3))[0], requires_grad=True)
    for function in (attention, linear_attention):
        name = function.__name__
        with pytest.raises(ValueError, match=rf"^{name}: q_offsets\[1\] is 11, want 0 to 10"):
            function(q, q, q, q_offsets=torch.tensor([0, 11]))


@pytest.mark.gpu
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_torch_on_a_gpu(cupy, case, on_host):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no device")
    import fa_cupy.torch

    found = []
    for device in ("cpu", "cuda"):
        place = "cpu" if on_host else device
        function, shapes = cases(fa_cupy.torch, lambda x, p=place: torch.tensor(x, device=p))[case]
        given = [torch.tensor(x, requires_grad=True, device=device) for x in draw(*shapes)]
        if (case, place) == ("attention with a score", "cuda"):
            # The mask that stands in for offsets on a device knows no positions in sequences.
            with pytest.raises(NotImplementedError, match=r"^attention: "):
                function(*given)
            return
        results = function(*given)
        results = results if isinstance(results, tuple) else (results,)
        sum(x.sin().sum() for x in results).backward()
        found.append([x.detach().cpu() for x in [*results, *(x.grad for x in given)]])
    for mine, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(mine, want)
