"""The public names, their signatures, their docstrings, and the function with torch's names."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

import fa_cupy
from fa_cupy import attention, attention_backward, scaled_dot_product_attention
from tests.support.strategies import normal
from validation.digest import ROOT

NAMES = {
    "BitMask",
    "KVCache",
    "Score",
    "__version__",
    "attention",
    "attention_backward",
    "causal_product",
    "causal_product_backward",
    "dropout_mask",
    "kernel_regression",
    "kernel_regression_backward",
    "linear_attention",
    "linear_attention_backward",
    "merge_attention",
    "non_local_means",
    "prefix_state",
    "scaled_dot_product_attention",
}
MODULES = [
    "_attention",
    "_bitmask",
    "_definitions",
    "_kernel_regression",
    "_kv_cache",
    "_linear_attention",
    "_score",
    "_version",
    "dask",
    "distributed.attention",
    "distributed.gradients",
    "distributed.order",
    "distributed.plans",
    "distributed.products",
    "distributed.threads",
    "dropout.mask",
    "layouts",
    "masks.algebra",
    "masks.constructors",
    "reference",
    "score.cuda",
]


def test_public_names():
    assert set(fa_cupy.__all__) == NAMES
    visible = {name for name in vars(fa_cupy) if not name.startswith("_")}
    modules = {name for name in visible if inspect.ismodule(getattr(fa_cupy, name))}
    assert visible - modules == NAMES - {"__version__"}
    for name in NAMES - {"__version__"}:
        assert getattr(fa_cupy, name).__name__ == name


def test_signatures():
    assert str(inspect.signature(attention)).replace("'", "").startswith("(q: Any, k: Any, v: Any,")
    names = list(inspect.signature(attention).parameters.values())
    assert [p.name for p in names] == [
        *("q", "k", "v", "bias", "mask"),
        *("scale", "is_causal", "causal_align", "window", "softcap", "sinks", "precision"),
        *("return_lse", "score", "k_lengths", "page_table", "q_offsets", "k_offsets", "dropout"),
        *("seed", "out"),
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in names[5:])
    backward = list(inspect.signature(attention_backward).parameters.values())
    assert [p.name for p in backward] == [
        *("dout", "q", "k", "v", "out", "lse", "bias", "mask"),
        *("scale", "is_causal", "causal_align", "window", "softcap", "sinks", "dlse", "need"),
        *("score", "k_lengths", "q_offsets", "k_offsets", "dropout", "seed"),
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in backward[8:])
    torch = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert {p.name: p.default for p in torch} == {
        "query": inspect.Parameter.empty,
        "key": inspect.Parameter.empty,
        "value": inspect.Parameter.empty,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
        "seed": None,
    }


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    results = doctest.testmod(importlib.import_module(f"fa_cupy.{module}"))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", sorted(NAMES - {"BitMask", "Score", "__version__"}))
def test_docstrings_tell_all_parameters(name):
    function = getattr(fa_cupy, name)
    doc = inspect.getdoc(function)
    sections = ["Parameters", "Raises", "Examples"]
    for section in sections if inspect.isclass(function) else [*sections, "Returns"]:
        assert f"{section}\n{'-' * len(section)}\n" in doc
    for parameter in inspect.signature(function).parameters:
        assert f"\n{parameter} : " in doc or f"\n{parameter} : " in f"\n{doc}"


def test_every_public_name_has_a_page():
    """The lists of docs/api.rst, from which pages are made, are those of the modules."""
    page = (ROOT / "docs/api.rst").read_text()
    lists = re.findall(
        r"^\.\. autosummary::\n   :toctree: generated/api\n\n((?:   .+\n)+)", page, re.M
    )
    listed = " ".join(lists).split()
    assert len(listed) == len(set(listed))
    assert {name for name in listed if "." not in name} == NAMES - {"__version__"}
    for module in ("layouts", "plot", "reference"):
        names = vars(importlib.import_module(f"fa_cupy.{module}"))
        own = {
            name
            for name, value in names.items()
            if getattr(value, "__module__", "") == f"fa_cupy.{module}" and not name.startswith("_")
        }
        found = {name.partition(".")[2] for name in listed if name.startswith(f"{module}.")}
        assert found == set(names.get("__all__", own)) & own, module
    of_ranks = {f"distributed.{name}" for name in fa_cupy.distributed.__all__}
    assert {name for name in listed if name.startswith("distributed.")} == of_ranks
    for module in ("dask", "torch", "jax"):
        assert {f"{module}.attention", f"{module}.causal_product"} <= set(listed)
    methods = re.findall(r"^   ~BitMask\.(\w+)$", page, re.M)
    assert {name for name in dir(fa_cupy.BitMask) if name.startswith("from_")} <= set(methods)
    assert all(hasattr(fa_cupy.BitMask, name) for name in methods)


def test_import_loads_little():
    """What takes long to import waits until it is needed."""
    code = (
        "import sys, fa_cupy; "
        "print(*{'cupy', 'scipy', 'dask', 'torch', 'jax', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "\n"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_modules_are_there_when_they_are_asked_for():
    code = (
        "import sys, types, fa_cupy\n"
        "names = 'layouts', 'plot', 'reference'\n"
        "assert not any(f'fa_cupy.{name}' in sys.modules for name in names[1:])\n"
        "assert {*names, 'attention'} <= {*dir(fa_cupy)}\n"
        "print(*(getattr(fa_cupy, name).__name__ for name in names))\n"
        "print(hasattr(fa_cupy, 'nothing'), 'scipy' in sys.modules)"
    )
    names = ["fa_cupy.layouts", "fa_cupy.plot", "fa_cupy.reference"]
    assert run(code) == [*names, "False", "True"]


@pytest.mark.parametrize("name", ["dask", "torch", "jax"])
def test_a_missing_library_is_named(name):
    """By attribute, by import and by ``from``; a module that is not there is not listed either."""
    code = (
        "import sys, importlib.util, fa_cupy\n"
        f"sys.modules[{name!r}] = None\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda x: None if x == {name!r} else find(x)\n"
        f"assert {name!r} not in dir(fa_cupy)\n"
        f"for text in ('fa_cupy.{name}', 'import fa_cupy.{name}', 'from fa_cupy import {name}'):\n"
        "    try:\n"
        "        exec(text)\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(str(error).replace(' ', '_'))"
    )
    label = {"dask": "Dask", "torch": "PyTorch", "jax": "JAX"}[name]
    package = {"dask": "'fa_cupy[dask]'"}.get(name, name)
    text = f"fa_cupy.{name} needs {label}, which is not installed: pip install {package}"
    assert run(code) == [text.replace(" ", "_")] * 3


# torch's names


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [normal(rng, shape, np.float32) for shape in shapes]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": "bool"},
        {"attn_mask": "float"},
        {"attn_mask": "bool", "enable_gqa": True},
        {"is_causal": True, "enable_gqa": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(6, 6), (6, 9), (9, 6)])
def test_same_as_torch(lengths, options):
    torch = pytest.importorskip("torch")
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = draw((2, 4, lengths[0], 8), (2, heads, lengths[1], 8), (2, heads, lengths[1], 5))
    mask = np.random.default_rng(1).random(lengths) < 0.6
    mask[:, 0] = True
    kinds = {"bool": mask, "float": np.where(mask, 0.5, -np.inf).astype(np.float32)}
    options = options | (
        {"attn_mask": kinds[options["attn_mask"]]} if "attn_mask" in options else {}
    )
    tensors = {a: torch.from_numpy(x) if a == "attn_mask" else x for a, x in options.items()}
    want = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)), **tensors
    )
    got = scaled_dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)
    got = scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), **tensors)
    torch.testing.assert_close(got, want)


def test_torch_names_on_any_kind(xp):
    q = xp.asarray(draw((2, 4, 6, 8))[0])
    got = scaled_dot_product_attention(q, q, q, is_causal=True)
    assert bool((got == attention(q, q, q, is_causal=True)).all())


X = np.zeros((1, 4, 3, 8), np.float32)
MASK = np.ones((3, 3), bool)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dropout_p": 0.1}, TypeError, "seed is None, want an int from 0 to 2**64 - 1, or an arr"),
        ({"dropout_p": 1.1, "seed": 1}, ValueError, "dropout_p is 1.1 (float), want a number from"),
        ({"dropout_p": "0"}, TypeError, "dropout_p is '0' (str), want a finite number"),
        (
            {"attn_mask": MASK, "is_causal": True},
            ValueError,
            "is_causal is True and attn_mask is given, want one of them",
        ),
        (
            {"attn_mask": MASK.astype(int)},
            TypeError,
            "attn_mask has dtype int64, want bool (cast it: attn_mask != 0), float16, bfloat16, fl",
        ),
        ({"attn_mask": MASK.astype("u1")}, TypeError, "attn_mask has dtype uint8, want bool"),
        ({"attn_mask": MASK[:2]}, ValueError, "attn_mask has shape (2, 3), want one that broadcas"),
        ({"attn_mask": [True]}, TypeError, "attn_mask is a list, want an array"),
        ({"key": X[:, :2], "value": X[:, :2]}, ValueError, "key has 2 heads, query has 4, want as"),
        ({"key": X[..., :4]}, ValueError, "key has head_dim 4, query has 8"),
        ({"query": None}, TypeError, "query is None, want an array"),
        ({"enable_gqa": "yes"}, TypeError, "enable_gqa is 'yes' (str), want a bool"),
    ],
)
def test_errors_name_torchs_arguments(arguments, error, text):
    with pytest.raises(error, match=r"^scaled_dot_product_attention: ") as caught:
        scaled_dot_product_attention(**({"query": X, "key": X, "value": X} | arguments))
    assert text in str(caught.value)
