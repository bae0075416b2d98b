"""All functions of `fa_cupy.torch` and `fa_cupy.jax`: values, gradients, compilation, errors."""

import functools
import gc
import importlib
import inspect

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask, Score

NAMES = (
    "attention",
    "causal_product",
    "kernel_regression",
    "linear_attention",
    "merge_attention",
    "non_local_means",
    "prefix_state",
    "scaled_dot_product_attention",
)
# The shapes of q, k, v and of a state; grouped heads.
PRODUCT = ((2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2), (2, 2, 3, 2))
ENDS = [2, 5, 0, 2]
MASK = np.random.default_rng(3).random((5, 5)) < 0.7


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def softplus(x):
    """A feature map of arrays of all libraries."""
    if isinstance(x, np.ndarray):
        return np.log(1 + np.exp(x))
    xp = importlib.import_module("torch" if hasattr(x, "detach") else "jax.numpy")
    return xp.log(1 + xp.exp(x))


def merged(merge, outs, lses, gaps):
    """Two results of which one is empty in a row, and another row is empty in both."""
    out, lse = merge(outs, [lse + gap for lse, gap in zip(lses, gaps, strict=True)])
    # A log-sum-exp of -inf has no difference quotient.
    return out, lse[..., :2]


def cases(functions, array=np.asarray):
    """Calls of all functions but attention and causal_product, each with shapes of arguments."""
    linear = functions.linear_attention
    prefix = functions.prefix_state
    sdpa = functions.scaled_dot_product_attention
    q, k, v, state = PRODUCT
    mask = array(MASK)
    gaps = [array(np.array(gap)) for gap in ([0, -np.inf, -np.inf], [0, 0, -np.inf])]
    found = {
        f"linear_attention {name}": (lambda *x, f=f: linear(*x, feature_map=f, eps=0.1), (q, k, v))
        for name, f in [(x, x) for x in ("elu1", "relu", "exp")] + [("callable", softplus)]
    }
    sums = *state[:-1], v[-1] + 1  # what linear attention has for a state
    for causal in (False, True):
        options = {"is_causal": causal, "eps": 0.1, "return_state": True, "feature_map": "exp"}
        found[f"linear_attention state {causal}"] = (
            lambda *x, o=options: linear(*x[:3], initial_state=abs(x[3]) + 0.1, **o),
            (q, k, v, sums),
        )
    found["linear_attention all keys"] = (
        lambda *x: linear(*x, is_causal=False, feature_map="exp"),
        ((2, 4, 3, 3), k, v),
    )
    found["linear_attention one head of queries"] = (
        lambda *x: linear(*x, is_causal=False, feature_map="exp"),
        ((2, 1, 3, 3), k, v),
    )
    for reverse in (False, True):
        way = {"reverse": reverse}
        found |= {
            f"prefix_state {reverse}": (lambda k, v, way=way: prefix(k, v, **way), (k, v)),
            f"prefix_state ends {reverse}": (
                lambda k, v, s, way=way: prefix(k, v, ENDS, initial_state=s, **way),
                (k, v, state),
            ),
            f"prefix_state q {reverse}": (
                lambda q, k, v, s, way=way: prefix(k, v, ENDS, q=q, initial_state=s, **way),
                ((2, 4, 4, 3), k, v, state),
            ),
        }
    found["merge_attention"] = (
        lambda a, b, x, y: merged(functions.merge_attention, [a, b], [x, y], gaps),
        ((4, 3, 2), (4, 3, 2), (4, 3), (4, 3)),
    )
    found["sdpa"] = (lambda q, k, v: sdpa(q, k, v, mask, enable_gqa=True), (q, k, v))
    found["sdpa bias"] = (
        lambda q, k, v, bias: sdpa(q, k, v, bias, scale=-0.5, enable_gqa=True),
        (q, k, v, (4, 1, 5)),
    )
    found["sdpa causal"] = (lambda q, k, v: sdpa(q, k, v, is_causal=True), (q, q, q))
    return found | smoothing_cases(functions, array)


def smoothing_cases(functions, array):
    """Calls of kernel_regression and non_local_means, each with shapes of arguments."""
    regression, means = functions.kernel_regression, functions.non_local_means
    # No sample is masked in all of them, nor is a point without samples: NaN has no gradient.
    mask = MASK | np.eye(5, dtype=bool)
    bits = BitMask.from_dense(mask)
    x, X, y = (2, 5, 3), (5, 3), (2, 5, 2)
    many = (5, 10), (5, 10), (5,)
    return {
        "regression": (lambda *x: regression(*x[:3], abs(x[3]) + 1), (x, X, y, (2, 3))),
        "regression number": (
            lambda *x: regression(*x, 1.5, "matern32", mask=array(mask)), (X, X, (5,)),
        ),
        "regression BitMask": (
            lambda *x: regression(*x[:3], abs(x[3]) + 1, "laplace", mask=bits), (x, X, y, (1,)),
        ),
        "regression of one bandwidth": (
            lambda *x: regression(*x[:3], abs(x[3]) + 5, "epanechnikov"), (X, X, (5, 1), ()),
        ),
        "regression in many dims": (lambda *x: regression(*x[:3], abs(x[3]) + 2), (*many, ())),
        "non_local_means": (lambda x: means(x, 1.5, 3, 2), ((6, 5, 2),)),
        "non_local_means sigma": (lambda x: means(x, 0.8, 5, None, sigma=0.3), ((4, 5),)),
    }  # fmt: skip


CASES = [*cases(fa_cupy)]
COMPILED = (
    "linear_attention elu1",
    "prefix_state ends True",
    "prefix_state q False",
    "merge_attention",
    "sdpa bias",
    "regression",
    "regression number",
    "regression BitMask",
    "non_local_means",
)


@pytest.fixture(params=["torch", "jax"])
def library(request):
    """A module with the functions, and what makes arrays of its library."""
    request.getfixturevalue(request.param)
    module = importlib.import_module(f"fa_cupy.{request.param}")
    if request.param == "torch":
        return module, importlib.import_module("torch").tensor
    return module, importlib.import_module("jax.numpy").asarray


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_the_plain_functions(library, name):
    module, _ = library
    assert module.__all__ == sorted(NAMES)
    mine, plain = (inspect.signature(getattr(x, name)).parameters for x in (module, fa_cupy))
    assert {p.name: (p.default, p.kind) for p in mine.values()} == {
        p.name: (p.default, p.kind) for p in plain.values() if p.name in mine
    }
    assert plain.keys() - mine.keys() <= {"out"}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_plain_functions(library, case):
    module, array = library
    mine, shapes = cases(module, array)[case]
    plain, _ = cases(fa_cupy)[case]
    given = draw(*shapes)
    got, want = mine(*map(array, given)), plain(*given)
    for x, y in zip(*((z if isinstance(z, tuple) else (z,)) for z in (got, want)), strict=True):
        assert type(x) is type(array(0.0))
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shapes", "options"),
    [
        ("attention", ((2, 0, 3), (2, 4, 3), (2, 4, 3)), {}),
        ("attention", ((2, 4, 3), (2, 0, 3), (2, 0, 3)), {}),
        ("causal_product", ((2, 0, 3), (2, 0, 3), (2, 0, 2)), {}),
        ("linear_attention", ((2, 0, 3), (2, 0, 3), (2, 0, 2)), {}),
        ("linear_attention", ((2, 4, 3), (2, 4, 3), (2, 4, 0)), {}),
        ("linear_attention", ((2, 4, 0), (2, 4, 0), (2, 4, 1)), {}),
        ("prefix_state", ((2, 0, 3), (2, 0, 2)), {}),
        ("prefix_state", ((2, 4, 3), (2, 4, 2)), {"ends": []}),
        ("kernel_regression", ((0, 3), (4, 3), (4,)), {"bandwidth": 1.0}),
        ("kernel_regression", ((4, 3), (0, 3), (0,)), {"bandwidth": 1.0}),
        ("non_local_means", ((0, 4),), {"h": 1.0}),
    ],
)
def test_nothing(library, name, shapes, options):
    module, array = library
    given = draw(*shapes)
    got = getattr(module, name)(*map(array, given), **options)
    want = getattr(fa_cupy, name)(*given, **options)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes(library, dtype):
    """Results have the dtypes of the plain functions; features and sums are of float32."""
    module, array = library
    given = [x.astype(np.float32) for x in draw((2, 40, 8), (2, 40, 8), (2, 40, 8))]

    def made(x):
        if module.__name__ == "fa_cupy.torch":
            torch = importlib.import_module("torch")
            return array(x).to(getattr(torch, dtype))
        return array(x).astype(dtype)

    q, k, v = map(made, given)
    for function, plain in (
        (module.linear_attention, fa_cupy.linear_attention),
        (lambda q, k, v: module.prefix_state(k, v, [7, 30]),
         lambda q, k, v: fa_cupy.prefix_state(k, v, [7, 30])),
        (lambda q, k, v: module.prefix_state(k, v, range(40), q=q),
         lambda q, k, v: fa_cupy.prefix_state(k, v, range(40), q=q)),
        (module.scaled_dot_product_attention, fa_cupy.scaled_dot_product_attention),
        (lambda q, k, v: module.kernel_regression(q, k, v, 1.0),
         lambda q, k, v: fa_cupy.kernel_regression(q, k, v, 1.0)),
        (lambda q, k, v: module.non_local_means(q[0], 1.0, 3, 2),
         lambda q, k, v: fa_cupy.non_local_means(q[0], 1.0, 3, 2)),
    ):  # fmt: skip
        got, want = function(q, k, v), plain(q, k, v)
        assert got.dtype == want.dtype
        gap = got - want
        assert float(abs(gap).max()) <= 2e-2 * float(abs(want).max())


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("linear_attention", {"feature_map": "tanh"}, ValueError, "feature_map is 'tanh' (str), w"),
        ("linear_attention", {"eps": -1}, ValueError, "eps is -1 (int), want a finite number >= 0"),
        ("linear_attention", {"k": np.ones((5, 2))}, ValueError, "k has dim 2, q has 3"),
        ("linear_attention", {"v": None}, TypeError, "v is None, want an array"),
        (
            "linear_attention",
            {"feature_map": lambda x: x[:3]},
            ValueError,
            "feature_map(q) has shape (3, 3), q has (5, 3), want the same axes but the last",
        ),
        ("prefix_state", {"ends": [6]}, ValueError, "ends[0] is 6 (int), want an int from 0 to 5"),
        ("prefix_state", {"ends": [1]}, ValueError, "ends has 1 positions, q has 5 rows"),
        ("prefix_state", {"reverse": 2}, TypeError, "reverse is 2 (int), want a bool"),
        ("merge_attention", {"lses": []}, ValueError, "lses has 0 parts, outs has 1, want the"),
        ("merge_attention", {"lses": [np.ones(4)]}, ValueError, "lses[0] has shape (4,), want (5,"),
        ("kernel_regression", {"kernel": "box"}, ValueError, "kernel is 'box' (str), want one of"),
        ("kernel_regression", {"bandwidth": 0}, ValueError, "bandwidth is 0"),
        ("kernel_regression", {"bandwidth": None}, TypeError, "bandwidth is None"),
        ("kernel_regression", {"bandwidth": np.zeros(1)}, ValueError, "bandwidth has elements th"),
        ("kernel_regression", {"bandwidth": np.ones(2)}, ValueError, "bandwidth has shape (2,), "),
        ("kernel_regression", {"y": np.ones(4)}, ValueError, "y has length 4, X has 5 samples"),
        ("kernel_regression", {"X": None}, TypeError, "X is None, want an array"),
        ("kernel_regression", {"mask": np.ones(5)}, TypeError, "mask has dtype float64, want bool"),
        ("non_local_means", {"h": 0.0}, ValueError, "h is 0.0 (float), want a number > 0"),
        ("non_local_means", {"h": None}, TypeError, "h is None"),
        ("non_local_means", {"sigma": -1}, ValueError, "sigma is -1 (int), want a finite number >"),
        (
            "non_local_means",
            {"patch_size": 2},
            ValueError,
            "patch_size is 2 (int), want an odd int",
        ),
        ("non_local_means", {"image": np.ones(5)}, ValueError, "image has shape (5,), want (H, W)"),
        ("non_local_means", {"image": None}, TypeError, "image is None, want an array"),
        ("scaled_dot_product_attention", {"key": np.ones((5, 2))}, ValueError, "key has head_dim"),
        ("scaled_dot_product_attention", {"dropout_p": 2}, ValueError, "dropout_p is 2 (int), wa"),
        ("scaled_dot_product_attention", {"value": None}, TypeError, "value is None, want an arr"),
        (
            "scaled_dot_product_attention",
            {"attn_mask": MASK.astype(np.int32)},
            TypeError,
            "attn_mask has dtype int32, want bool (cast it: attn_mask != 0), float16",
        ),
        ("prefix_state", {"ends": np.zeros(0)}, TypeError, "ends is "),
        (
            "prefix_state",
            {"reverse": np.timedelta64(1, "s")},
            TypeError,
            "reverse is np.timedelta64(1,",
        ),
        (
            "scaled_dot_product_attention",
            dict.fromkeys(("key", "value"), np.ones((1, 1, 5, 3)).repeat(2, 1))
            | {"query": np.ones((1, 4, 5, 3))},
            ValueError,
            "key has 2 heads, query has 4, want as many (or enable_gqa=True)",
        ),
    ],
)
def test_errors_are_those_of_the_plain_functions(library, name, arguments, error, text):
    module, array = library
    x = np.ones((5, 3))
    given = {
        "linear_attention": {"q": x, "k": x, "v": x},
        "prefix_state": {"k": x, "v": x, "q": x},
        "kernel_regression": {"x": x, "X": x, "y": x[:, 0], "bandwidth": 1.0},
        "merge_attention": {"outs": [x], "lses": [x[:, 0]]},
        "non_local_means": {"image": x, "h": 1.0},
        "scaled_dot_product_attention": {"query": x, "key": x, "value": x},
    }[name] | arguments

    def converted(x):
        if isinstance(x, list):
            return [*map(converted, x)]
        return array(x) if isinstance(x, np.ndarray) else x

    for function, values in (
        (getattr(fa_cupy, name), given),
        (getattr(module, name), {arg: converted(x) for arg, x in given.items()}),
    ):
        with pytest.raises(error) as caught:
            function(**values)
        assert str(caught.value).startswith(f"{name}: {text}")


@pytest.mark.parametrize("kind", ["csr_array", "coo_array", "csc_matrix"])
def test_torchs_function_takes_sparse_masks_of_bool_only(library, kind):
    sparse = pytest.importorskip("scipy.sparse")
    module, array = library
    given, matrix = draw((4, 5, 3), (4, 5, 3), (4, 5, 2)), getattr(sparse, kind)(MASK)
    tensors = [*map(array, given)]
    want = fa_cupy.scaled_dot_product_attention(*given, MASK)
    got = module.scaled_dot_product_attention(*tensors, matrix)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12)
    text = r"attn_mask is a sparse matrix of float64, want bool \(cast it: attn_mask != 0\)$"
    with pytest.raises(TypeError, match=f"^scaled_dot_product_attention: {text}"):
        module.scaled_dot_product_attention(*tensors, matrix * 1.0)
    with pytest.raises(ValueError, match="is_causal is True and attn_mask is given, want one"):
        module.scaled_dot_product_attention(*tensors, matrix, is_causal=True)


def test_gradients_under_a_sparse_mask(jax):
    sparse = pytest.importorskip("scipy.sparse")
    from fa_cupy.jax import scaled_dot_product_attention as sdpa

    q = jax.numpy.asarray(draw((5, 3))[0])
    found, want = (
        jax.jit(jax.grad(lambda q, mask=mask: (sdpa(q, q, q, mask) ** 2).sum()))(q)
        for mask in (sparse.csr_array(MASK), jax.numpy.asarray(MASK))
    )
    np.testing.assert_allclose(np.asarray(found), np.asarray(want), rtol=1e-10)


# PyTorch


@pytest.mark.parametrize("case", CASES)
def test_torch_gradients(torch, case):
    import fa_cupy.torch

    function, shapes = cases(fa_cupy.torch, torch.tensor)[case]
    given = [torch.tensor(x, requires_grad=True) for x in draw(*shapes)]
    assert torch.autograd.gradcheck(function, given, fast_mode=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_torch_on_a_gpu(torch, case):
    """Results and gradients are those of the CPU."""
    import fa_cupy.torch

    pytest.importorskip("cupy")
    found = []
    for device in ("cpu", "cuda"):
        with torch.device(device):
            function, shapes = cases(fa_cupy.torch, torch.tensor)[case]
            given = [torch.tensor(x, requires_grad=True) for x in draw(*shapes)]
            results = function(*given)
        results = results if isinstance(results, tuple) else (results,)
        sum(x.sin().sum() for x in results).backward()
        assert {x.device.type for x in results} == {device}
        found.append([x.detach().cpu() for x in results] + [x.grad.cpu() for x in given])
    for mine, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(mine, want)


def test_torch_errors_name_the_function_that_records(torch):
    import fa_cupy.torch

    x = torch.ones((5, 3), requires_grad=True)
    options = {"kernel_regression": (x, x, 1.0), "non_local_means": (1.0,), "prefix_state": (x,)}
    options["merge_attention"] = ([x[:, 0]],)
    for name in fa_cupy.torch.__all__:
        given = ([x] if name == "merge_attention" else x), *options.get(name, (x, x))
        with pytest.raises(TypeError, match=f"or fa_cupy.torch.{name}, which records it"):
            getattr(fa_cupy, name)(*given)


def test_torch_layouts(torch):
    """Gradients of views: of (batch, length, heads, dim), of what is broadcast, and reversed."""
    from fa_cupy.torch import attention, causal_product

    x = torch.tensor(draw((2, 5, 4, 3))[0], requires_grad=True)

    def function(x):
        q = x.transpose(1, 2)
        k = x[:1].transpose(1, 2).expand(2, 4, 5, 3)
        return attention(q, k, x.flip(-1).transpose(1, 2)), causal_product(q, k, q[..., :1])

    assert torch.autograd.gradcheck(function, x, fast_mode=True)
    assert function(x)[0].stride() == x.transpose(1, 2).stride()


@pytest.mark.parametrize("name", ["numpy", "list"])
def test_torch_functions_want_tensors(torch, name):
    import fa_cupy.torch

    x = np.ones((5, 3))
    bad, text = {"numpy": (x, "numpy.ndarray"), "list": ([1.0], "list")}[name]
    for function in (fa_cupy.torch.attention, fa_cupy.torch.linear_attention):
        with pytest.raises(TypeError, match=f": k is a {text}, want a torch.Tensor"):
            function(torch.ones(5, 3), bad, torch.ones(5, 3))


def test_torch_vmap(torch):
    """One entry after another: here a head more in front would be heads that are grouped."""
    from fa_cupy.torch import attention, linear_attention

    q, k, v = (torch.tensor(x) for x in draw((3, 2, 5, 4), (3, 2, 6, 4), (3, 2, 6, 4)))
    for function, given in ((attention, (q, k, v)), (linear_attention, (q, q, q))):
        got = torch.func.vmap(function)(*given)
        want = torch.stack([function(*x) for x in zip(*given, strict=True)])
        torch.testing.assert_close(got, want)
    mask, widths = torch.ones((0, 5, 6), dtype=torch.bool), torch.ones(0)
    with_mask = torch.func.vmap(lambda q, k, v, mask: attention(q, k, v, mask=mask))
    assert with_mask(q[:0], k[:0], v[:0], mask).shape == (0, 2, 5, 4)
    with_widths = torch.func.vmap(
        lambda h: fa_cupy.torch.kernel_regression(q[0, 0], q[0, 0], q[0, 0], h)
    )
    assert with_widths(widths).shape == (0, 5, 4)
    regression = functools.partial(fa_cupy.torch.kernel_regression, bandwidth=1.5)
    got = torch.func.vmap(regression, in_dims=(0, None, 0))(q[0], k[0, 0], k[0, :, :, 0])
    want = [regression(q[0, i], k[0, 0], k[0, i, :, 0]) for i in range(2)]
    torch.testing.assert_close(got, torch.stack(want))
    slope = torch.func.grad(lambda q, k, v: attention(q, k, v).square().sum())
    got = torch.func.vmap(slope, in_dims=(0, None, 0))(q, k[0], v)
    want = torch.stack([slope(q[i], k[0], v[i]) for i in range(3)])
    torch.testing.assert_close(got, want)


def test_torch_second_derivatives_are_an_error(torch):
    from fa_cupy.torch import kernel_regression, non_local_means

    x = torch.tensor(draw((5, 3))[0], requires_grad=True)
    for out in (kernel_regression(x, x, x, 1.0), non_local_means(x, 1.0, 3, 2)):
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="a second derivative is not available"):
            grad.sum().backward()


def test_torch_merge_has_second_derivatives(torch):
    from fa_cupy.torch import merge_attention

    given = [torch.tensor(x, requires_grad=True) for x in draw((3, 2), (3, 2), (3,), (3,))]
    assert torch.autograd.gradgradcheck(
        lambda a, b, x, y: merge_attention([a, b], [x, y]), given, fast_mode=True
    )


def compiled_calls(torch):
    """Calls for `torch.compile`, each with the shapes of its arguments."""
    import fa_cupy.torch as functions

    attention = functions.attention
    q, k, v = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2)
    bits = BitMask.from_dense(np.random.default_rng(3).random((5, 6)) < 0.7)
    mask = torch.tensor(bits.to_dense())
    slopes = torch.ones(4, dtype=torch.float64, requires_grad=True)
    score = Score("s - slopes[h] * abs(i - j) + c", slopes=slopes, c=0.1)
    more = cases(functions, torch.tensor)
    return {
        "attention": (
            lambda q, k, v, bias, sinks: attention(
                q,
                k,
                v,
                bias,
                mask,
                sinks=sinks,
                return_lse=True,
                scale=0.7,
                softcap=5,
                is_causal=True,
                causal_align="bottom_right",
                window=(3, None),
            ),
            (q, k, v, (4, 1, 6), (4, 1)),
        ),
        "BitMask": (lambda q, k, v: attention(q, k, v, mask=bits), (q, k, v)),
        "Score": (lambda q, k, v: attention(q, k, v, score=score), (q, k, v)),
        "Score made inside": (
            lambda q, k, v, x: attention(
                q, k, v, score=Score("s - x[h] * abs(i - j) / n + c", x=x * 2, n=3, c=0.1)
            ),
            (q, k, v, (4,)),
        ),
        "one tensor": (lambda x: attention(x, x, x) + functions.causal_product(x, x, x), ((4, 3),)),
        "keys that are values": (lambda q, k: attention(q, k, k), ((4, 3), (5, 3))),
        "views": (
            lambda q, k, v: attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) + 1,
            ((2, 5, 4, 3), (2, 6, 4, 3), (1, 6, 4, 3)),
        ),
        "causal_product": (
            lambda q, k, v, s: functions.causal_product(
                q, k, v, initial_state=s, return_state=True, reverse=True
            ),
            PRODUCT,
        ),
    } | {name: more[name] for name in COMPILED}


@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", None),
        ("eager", True),
        pytest.param("inductor", None, marks=pytest.mark.long),  # needs a C++ compiler
    ],
)
def test_torch_compile(torch, backend, dynamic):
    """One graph without a break, with the same results and gradients, for other lengths too."""
    for name, (function, shapes) in compiled_calls(torch).items():
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
            torch.testing.assert_close(mine, want, msg=lambda text, name=name: f"{name}: {text}")
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda f, x: f.prefix_state(x, x, [-1]),
         r"prefix_state: ends\[0\] is -1 \(int\), want an int from 0 to 5, the length of k"),
        (lambda f, x: f.prefix_state(x, x, [2, 6]), r"prefix_state: ends\[1\] is 6"),
        (lambda f, x: f.prefix_state(x, x.float()), "prefix_state: v has dtype"),
        (lambda f, x: f.merge_attention([x, x], [x[:1, 0], x[:, 0]]),
         r"merge_attention: lses\[0\] has shape \(1,\), want \(5,\)"),
        (lambda f, x: f.merge_attention([x, x[:1]], [x[:, 0], x[:1, 0]]),
         r"merge_attention: outs\[1\] has shape \(1, 3\), outs\[0\] has \(5, 3\)"),
        (lambda f, x: f.linear_attention(x, x, x, eps=-1.0), "linear_attention: eps is -1.0"),
        (lambda f, x: f.linear_attention(x, x, x, is_causal="no"), "linear_attention: is_causal"),
        (lambda f, x: f.linear_attention(x, x, x.float()), "linear_attention: v has dtype"),
        (lambda f, x: f.linear_attention(x, x, x, feature_map=lambda x: x.float()),
         r"linear_attention: feature_map\(q\) has dtype"),
        (lambda f, x: f.linear_attention(x, x, x, feature_map=lambda x: x[:3]),
         r"linear_attention: feature_map\(q\) has shape \(3, 3\), q has \(5, 3\)"),
        (lambda f, x: f.linear_attention(x, x, x, feature_map=lambda x: x[None], is_causal=False),
         r"linear_attention: feature_map\(q\) has shape \(1, 5, 3\), q has \(5, 3\)"),
        (lambda f, x: f.merge_attention([x], [x[:, 0].long()]), r"lses\[0\] has dtype .*int64"),
    ],
)  # fmt: skip
def test_torch_compile_checks_what_no_operator_does(torch, call, text):
    import fa_cupy.torch

    torch._dynamo.reset()
    x = torch.tensor(draw((5, 3))[0])
    with pytest.raises((TypeError, ValueError), match=text):
        torch.compile(lambda x: call(fa_cupy.torch, x), backend="eager")(x)


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_takes_other_bandwidths(torch):
    from fa_cupy.torch import kernel_regression

    torch._dynamo.reset()
    x = torch.tensor(draw((5, 3))[0])
    call = torch.compile(
        lambda x, h: kernel_regression(x, x, x, h), fullgraph=True, backend="eager"
    )
    for h in (0.5, 0.7, 0.9):
        torch.testing.assert_close(call(x, h), kernel_regression(x, x, x, h))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "function",
    [
        lambda f, x, mask: f.attention(x, x, x, mask=mask),
        lambda f, x, mask: f.scaled_dot_product_attention(x, x, x, mask),
        lambda f, x, mask: f.kernel_regression(x, x, x, 0.5, mask=mask),
    ],
)
def test_torch_compile_leaves_sparse_masks_alone(torch, function, monkeypatch):
    """What makes a `BitMask` of a sparse matrix is not traced."""
    sparse = pytest.importorskip("scipy.sparse")
    import fa_cupy.torch

    torch._dynamo.reset()
    x, mask = torch.tensor(draw((5, 3))[0]), sparse.csr_array(MASK)
    traced, of_sparse = [], BitMask._of_sparse

    def watched(*args):
        traced.append(torch.compiler.is_compiling())
        return of_sparse(*args)

    monkeypatch.setattr(BitMask, "_of_sparse", watched)
    call = torch.compile(lambda x: function(fa_cupy.torch, x, mask), backend="eager")
    torch.testing.assert_close(call(x), function(fa_cupy.torch, x, torch.tensor(MASK)))
    assert traced
    assert not any(traced)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention"])
def test_torch_compile_holds_what_it_makes_of_sparse_masks(torch, name):
    """Until the backward pass, and for the next call with the same pairs."""
    sparse = pytest.importorskip("scipy.sparse")
    import fa_cupy.torch
    from fa_cupy.torch import arguments

    torch._dynamo.reset()
    arguments._OF_SPARSE.clear()
    arg = "mask" if name == "attention" else "attn_mask"
    function = getattr(fa_cupy.torch, name)
    call = torch.compile(lambda x, mask: function(x, x, x, **{arg: mask}), backend="aot_eager")
    x = torch.tensor(draw((5, 3))[0], requires_grad=True)
    other = np.roll(MASK, 1, axis=0)
    for dense in (MASK, MASK, other):
        out = call(x, sparse.csr_array(dense))
        gc.collect()
        (found,) = torch.autograd.grad(out.sum(), x)
        want = function(x, x, x, **{arg: torch.tensor(dense)})
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(found, torch.autograd.grad(want.sum(), x)[0])
    assert len(arguments._OF_SPARSE) == 2
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_sees_another_mask(torch):
    """Masks are recognised: the function is compiled again for another one."""
    from fa_cupy.torch import attention

    torch._dynamo.reset()
    traced = torch.compile(
        lambda x, mask: attention(x, x, x, mask=mask), fullgraph=True, backend="eager"
    )
    x = torch.tensor(draw((5, 3))[0])
    for seed in range(3):
        mask = BitMask.from_dense(np.random.default_rng(seed).random((5, 5)) < 0.5)
        want = fa_cupy.attention(x.numpy(), x.numpy(), x.numpy(), mask=mask)
        np.testing.assert_allclose(traced(x, mask).numpy(), want)
    torch._dynamo.reset()


def test_torch_a_mask_that_is_gone(torch):
    """Operators find a mask by its number as long as it is held; its number is not used again."""
    from fa_cupy.torch import arguments

    mask = BitMask.from_dense(MASK)
    number = arguments.number_of(mask)
    assert arguments.number_of(mask) == number
    assert arguments.mask_of(number, None) is mask
    del mask
    with pytest.raises(RuntimeError, match="mask is a BitMask that is no longer held"):
        arguments.mask_of(number, None)
    assert arguments.number_of(BitMask.from_dense(MASK)) != number


def test_torch_keeps_a_mask_for_the_backward_pass(torch):
    from fa_cupy.torch import attention

    x = torch.tensor(draw((5, 3))[0], requires_grad=True)
    attention(x, x, x, mask=BitMask.from_dense(MASK)).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_operators_keep_their_promises(torch, device):
    """Shapes, dtypes and strides of results are those that a compiler was told."""
    from fa_cupy.torch import operators  # noqa: F401, which registers them

    if device == "cuda":
        pytest.importorskip("cupy")
    with torch.device(device):
        # Of these dtypes kernels have no dropout.
        keep_promises(torch, dropout=0.25 if device == "cpu" else 0.0)


def keep_promises(torch, dropout):
    def turned(*shape):
        return torch.tensor(draw(shape)[0]).transpose(-3, -2)

    q, k, v = turned(2, 5, 4, 3), turned(1, 6, 2, 3), turned(2, 6, 4, 2)
    options = (None, None, None, False, None, None, None, 0.0, None, None, dropout)
    bias, sinks = torch.zeros(4, 1, 6), torch.zeros(4, 1).expand(4, 5)
    tests = ("test_schema", "test_faketensor")
    places = [*[None] * 4, torch.tensor([7]) if dropout else None]  # the last one is a seed
    given = (q, k, v, bias, None, sinks, *places, [])
    out, lse = torch.ops.fa_cupy.attention(*given, *options)
    assert out.transpose(-3, -2).is_contiguous()
    torch.library.opcheck(torch.ops.fa_cupy.attention, (*given, *options), test_utils=tests)
    need = "sinks,v,k,q,bias"
    given = (*given[:6], *places[1:], [])
    backward = (torch.ones_like(out), need, None, out, lse, *given, *options)
    torch.library.opcheck(torch.ops.fa_cupy.attention_backward, backward, test_utils=tests)
    state = torch.zeros(2, 4, 2, 3, dtype=torch.float64).mT
    given = q, turned(2, 5, 2, 3), v[..., :5, :], state, None
    out, state = torch.ops.fa_cupy.causal_product(*given, True, "auto")
    torch.library.opcheck(
        torch.ops.fa_cupy.causal_product, (*given, True, "auto"), test_utils=tests
    )
    backward = (torch.ones_like(out), torch.ones_like(state), *given, True)
    torch.library.opcheck(torch.ops.fa_cupy.causal_product_backward, backward, test_utils=tests)
    x, y = turned(2, 5, 4, 3), turned(5, 4, 2)
    given = x, x[0, 0], y[0], torch.ones(4, 1), None, None, None, "laplace"
    (out,) = torch.ops.fa_cupy.kernel_regression(*given)
    torch.library.opcheck(torch.ops.fa_cupy.kernel_regression, given, test_utils=tests)
    backward = torch.ones_like(out), *given
    torch.library.opcheck(torch.ops.fa_cupy.kernel_regression_backward, backward, test_utils=tests)
    given = y[..., 0], 1.0, 3, 2, 0.0
    torch.library.opcheck(torch.ops.fa_cupy.non_local_means, given, test_utils=tests)
    backward = y[..., 1], *given
    torch.library.opcheck(torch.ops.fa_cupy.non_local_means_backward, backward, test_utils=tests)


# JAX


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("traced", [False, True])
def test_jax_gradients(jax, monkeypatch, case, traced):
    """Gradients of arrays with data need no callback."""
    from jax.test_util import check_grads

    import fa_cupy.jax

    if not traced:
        monkeypatch.delattr(jax, "pure_callback")
    function, shapes = cases(fa_cupy.jax, jax.numpy.asarray)[case]
    given = [jax.numpy.asarray(x) for x in draw(*shapes)]
    check_grads(jax.jit(function) if traced else function, given, order=1, modes=["rev"])


def test_jax_vmap(jax):
    from fa_cupy.jax import attention, linear_attention, prefix_state

    q, k, v = draw((3, 2, 5, 4), (3, 2, 5, 4), (3, 2, 5, 4))
    for function in (attention, linear_attention, lambda q, k, v: prefix_state(k, v, ENDS)):
        got = jax.jit(jax.vmap(function))(q, k, v)
        want = [function(*map(jax.numpy.asarray, x)) for x in zip(q, k, v, strict=True)]
        np.testing.assert_allclose(got, np.stack(want), rtol=1e-12)


def test_jax_options_of_the_plain_functions(jax):
    from fa_cupy.jax import attention, causal_product

    x = jax.numpy.asarray(draw((5, 3))[0])
    with pytest.raises(ValueError, match=r"^attention: precision is 'fp8' \(str\), want None or"):
        attention(x, x, x, precision="fp8")
    with pytest.raises(ValueError, match=r"^causal_product: algorithm is 'recurrent', which is a"):
        causal_product(x, x, x, algorithm="recurrent")
    grad = jax.grad(lambda x: attention(x, x, x, precision="tf32").sum())
    assert grad(x.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("arg", ["scale", "softcap", "is_causal", "h", "patch_size", "algorithm"])
def test_jax_options_that_are_traced_are_named(jax, arg):
    import fa_cupy.jax

    functions = dict.fromkeys(("h", "patch_size"), "non_local_means") | {
        "algorithm": "causal_product"
    }
    name = functions.get(arg, "attention")
    x = jax.numpy.asarray(draw((5, 3))[0])
    arrays = [x] if name == "non_local_means" else [x, x, x]
    more = {"h": 1.0} if arg == "patch_size" else {}
    call = jax.jit(lambda value: getattr(fa_cupy.jax, name)(*arrays, **more, **{arg: value}))
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {arg} is .*[Tt]racer"):
        call(1)


def test_jax_integers_that_do_not_fit(jax):
    from fa_cupy.jax import attention

    x, large = jax.numpy.ones((1, 1, 5, 3), np.float32), 2**32
    jax.config.update("jax_enable_x64", False)
    try:
        for arg, value in (
            ("q_offsets", np.array([0, 5]) + large), ("k_lengths", np.array([large])),
            ("score", Score("s + a[j] % 7", a=np.arange(5) + large)),
        ):  # fmt: skip
            text = "score.a" if arg == "score" else arg
            with pytest.raises(
                ValueError, match=f"^attention: {text} has integers that int32 does"
            ):
                attention(x, x, x, **{arg: value})
        with pytest.raises(
            ValueError, match=r"^attention: k_lengths is 4294967296 \(int\), want an"
        ):
            attention(x, x, x, k_lengths=large)
        want = attention(x, x, x, k_lengths=3)
        np.testing.assert_array_equal(attention(x, x, x, k_lengths=np.int64(3)), want)
    finally:
        jax.config.update("jax_enable_x64", True)


def test_jax_keys_are_no_seeds(jax):
    from fa_cupy.jax import attention

    x = jax.numpy.ones((1, 1, 5, 3))
    call = functools.partial(attention, x, x, x, dropout=0.5)
    for function in (call, jax.jit(call)):
        with pytest.raises(TypeError, match=r"^attention: seed is a key of JAX, want an integer"):
            function(seed=jax.random.key(0))
    with pytest.raises(TypeError, match=r"^attention: seed is True \(bool\), want an int"):
        call(seed=True)
    np.testing.assert_array_equal(call(seed=np.int64(3)), call(seed=3))
