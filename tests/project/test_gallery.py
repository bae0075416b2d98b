"""The recipes of docs/gallery run on a CPU; each checks itself, and has a picture.

The scripts below compute what the recipes do, from the same data in another way that the user guide
describes, and must give the recipes' numbers.
"""

import contextlib
import functools
import io
import os
import re
import runpy
import tempfile

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize

import fa_cupy
from fa_cupy import BitMask, Score, attention
from validation.digest import ROOT

plt = pytest.importorskip("matplotlib.pyplot")

RECIPES = sorted((ROOT / "docs/gallery").glob("*.py"))


@functools.cache
def run(path):
    """Run a recipe in an empty folder; return its names, output, number of figures, and files."""
    before, show, printed = os.getcwd(), plt.show, io.StringIO()
    plt.close("all")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        os.chdir(folder)
        plt.show = lambda: None  # which warns where there is no window
        try:
            names = runpy.run_path(str(path), run_name="__main__")
            figures, files = len(plt.get_fignums()), os.listdir(folder)
        finally:
            os.chdir(before)
            plt.show = show
            plt.close("all")
    return names, printed.getvalue(), figures, files


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(path):
    _, printed, figures, files = run(path)
    lines = printed.splitlines()
    assert len(lines) == 1
    assert any(letter.isdigit() for letter in lines[0])
    assert figures == 1
    assert files == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_compares_its_result(path):
    """By an assertion that a reader sees, with a formula of NumPy or SciPy, not with fa_cupy."""
    text = path.read_text()
    assert "\nassert " in text or "\n    assert " in text
    assert text.rstrip().count("plt.show()") == 1
    assert "from fa_cupy import " in text


def bandwidth(recipe):
    """Without the gradient: SciPy takes differences of the error."""
    X, y, others = recipe["X"], recipe["y"], ~np.eye(500, dtype=bool)

    def loss(log_width):
        error = fa_cupy.kernel_regression(X, X, y, np.exp(log_width), mask=others) - y
        return np.mean(error**2)

    found = minimize(loss, np.zeros(3), method="L-BFGS-B", bounds=[(-4, 3)] * 3)
    width = np.exp(found.x)
    yield found.fun, recipe["found"].fun, 1e-6
    yield width[:2], recipe["width"][:2], 1e-2
    return *(f"{w:.2f}" for w in width[:2]), f"{found.fun:.3f}"


def decoding(recipe):
    """Sequences next to each other in an array that is longer, with the length of each step."""
    begin = len(recipe["text"])
    written = np.array(recipe["written"])
    padded = np.pad(written, ((0, 0), (8, 0)))
    k = sum(recipe["vectors"][i, padded[:, 7 - i : len(padded[0]) - 1 - i]] for i in range(8))
    v = np.eye(len(recipe["letters"]), dtype=np.float32)[written]
    k, v = (np.pad(x, ((0, 0), (0, 100), (0, 0)), constant_values=np.nan) for x in (k, v))
    for step in (0, 30, 59):
        q = k[:, begin + step : begin + step + 1]
        out = attention(*(x[:, None] for x in (q, k, v)), k_lengths=begin + step,
                        scale=recipe["scale"])  # fmt: skip
        yield out[:, 0, 0], recipe["chances"][:, step], 1e-4
    shared, length = begin // 64, len(written[0])
    return f"{length:,}", str(shared + 4 * (-(-length // 64) - shared))


def graph_attention(recipe):
    """Sparse matrices as the mask and as the weights, in the order that the nodes have."""
    src, dst = recipe["src"], recipe["dst"]
    graph = sparse.coo_array((np.ones(len(src)), (dst, src)), shape=(3000, 3000)).tocsr()
    mask = BitMask.from_csr(graph)
    near, _ = mask.reorder()
    yield attention(recipe["q"], recipe["k"], recipe["v"], mask=graph), recipe["out"], 1e-12
    far = graph.copy()
    ends = np.repeat(np.arange(3000), np.diff(graph.indptr)), graph.indices
    offsets = recipe["points"][ends[0]] - recipe["points"][ends[1]]
    far.data = -100 * np.sqrt((offsets**2).sum(axis=1))
    weighted = attention(recipe["q"], recipe["k"], recipe["v"], far)
    yield weighted, recipe["weighted"], 1e-9
    return f"{mask.block_density:.0%}", f"{near.block_density:.0%}"


def kernel_regression(recipe):
    """An expression of the coordinates, for queries and keys without elements."""
    at, samples, values = recipe["grid"], recipe["samples"], recipe["values"]
    gaussian = Score(
        "-((at[i, 0] - x[j, 0]) ** 2 + (at[i, 1] - x[j, 1]) ** 2) / (2 * width ** 2)",
        at=at, x=samples, width=0.2,
    )  # fmt: skip
    empty = np.zeros((len(at), 0)), np.zeros((len(samples), 0))
    estimate = attention(*empty, values[:, None], score=gaussian)[:, 0]
    yield estimate, recipe["estimate"], 1e-12
    return (f"{np.sqrt(np.mean((estimate - recipe['function'](at)) ** 2)):.3f}",)


def larger_than_memory(recipe):
    """All parts are merged at once, from the keys and values that the recipe's seed gives."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((10, 2, 20_000, 32), dtype=np.float32)
    q = 2 * rng.standard_normal((100, 32), dtype=np.float32)
    parts = [attention(q, k, v, return_lse=True) for k, v in data]
    out, lse = fa_cupy.merge_attention(*zip(*parts, strict=True))
    yield out, recipe["out"], 1e-6
    yield lse, recipe["lse"], 1e-5
    return ()


def masks(recipe):
    """An array of bool, by comparisons of positions."""
    i, j = np.indices((800, 800))
    dense = (j <= i) & ((i - j <= 150) | (j < 20)) & (j < 700)
    rows, columns = np.divmod(np.arange(800), 40)
    near = (abs(rows[:, None] - rows) <= 2) & (abs(columns[:, None] - columns) <= 2)
    mask = BitMask(dense)
    assert mask.equals(recipe["together"])
    assert BitMask(near).equals(recipe["pixels"])
    flat = recipe["flat"]
    yield near @ flat / near.sum(axis=1, keepdims=True), recipe["mean"].reshape(-1, 1), 1e-12
    return f"{mask.block_density:.0%}", f"{dense.mean():.0%}"


def non_local_means(recipe):
    """Attention over patches, with the weights that the reference gives."""
    image, noisy, sigma = recipe["image"], recipe["noisy"], recipe["sigma"]
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(noisy, 2, mode="reflect"), (5, 5))
    offset = np.arange(-2, 3)
    share = np.exp(-(offset[:, None] ** 2 + offset**2) / 2)  # a Gaussian of width (5 - 1) / 4
    patches = (windows * np.sqrt(share / share.sum())).reshape(-1, 25)
    alike = Score(
        "min(0, 2 * sigma ** 2 - (square[i] + square[j] - 2 * s)) / width ** 2",
        square=(patches**2).sum(axis=1), sigma=sigma, width=0.8 * sigma,
    )  # fmt: skip
    out = attention(patches, patches, noisy.reshape(-1, 1), score=alike, scale=1.0)
    denoised = out.reshape(noisy.shape)
    yield denoised, recipe["denoised"], 1e-10
    return (f"{np.sqrt(np.mean((denoised - image) ** 2)):.3f}",)


def packed_documents(recipe):
    """The documents and the causality as an expression."""
    q, k, v, document = (recipe[name] for name in ("q", "k", "v", "document"))
    own = Score("s if document[i] == document[j] and j <= i else -inf", document=document)
    yield attention(q, k, v, score=own), recipe["out"], 1e-5
    position = np.arange(len(document))
    seen = (document[:, None] == document) & (position[:, None] >= position)
    return f"{seen.sum():,}", f"{7 * recipe['lengths'].max() ** 2:,}"


def streaming(recipe):
    """A causal product of features, with a column of ones for the denominator."""
    q, k, v = (recipe[name].astype(np.float64) for name in "qkv")

    def elu1(x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    ones = np.ones((len(v), 1))
    sums, state = fa_cupy.causal_product(elu1(q), elu1(k), np.hstack([v, ones]), return_state=True)
    yield sums[:, :4] / sums[:, 4:], recipe["streamed"], 1e-4
    yield state, recipe["state"], 1e-3
    return (str(state.size),)


SCRIPTS = (
    bandwidth, decoding, graph_attention, kernel_regression, larger_than_memory, masks,
    non_local_means, packed_documents, streaming,
)  # fmt: skip


def test_every_recipe_has_a_script():
    assert [script.__name__ for script in SCRIPTS] == [path.stem for path in RECIPES]


def compared(results):
    """Compare what a script yields, (found, wanted, tolerance), and return what it returns."""
    pairs = 0
    while True:
        try:
            found, wanted, tolerance = next(results)
        except StopIteration as end:
            assert pairs
            return end.value
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
        pairs += 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_newcomers_script_gives_the_numbers_of_the_recipe(script):
    names, printed, _, _ = run(ROOT / "docs/gallery" / f"{script.__name__}.py")
    for number in compared(script(names)):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", printed), number
