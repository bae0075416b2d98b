"""Figures of `fa_cupy.plot` belong to pyplot and have legends; given axes have room for neither."""

import doctest
import io
import subprocess
import sys

import numpy as np
import pytest

from fa_cupy import BitMask, Score

plt = pytest.importorskip("matplotlib.pyplot")

from fa_cupy import plot  # noqa: E402

DRAWN = {
    "layout": lambda **on: plot.layout("fragment", rows=2, cols=16, **on),
    "mask": lambda **on: plot.mask(BitMask.from_window(300, 20), **on),
    "scores": lambda **on: plot.scores(Score("s - abs(i - j)"), 5, 7, **on),
    "weights": lambda **on: plot.weights(3, 4, **on),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_on_are_axes(name):
    for ax in (3, "ax", plt.subplots(2)[1]):
        with pytest.raises(
            TypeError, match=rf"^plot\.{name}: ax is .*, want a matplotlib.axes.Axe"
        ):
            DRAWN[name](ax=ax)


@pytest.fixture(autouse=True)
def _closed():
    plt.close("all")
    yield
    plt.close("all")


def labels(ax):
    return ax.get_legend_handles_labels()[1]


@pytest.mark.parametrize("name", DRAWN)
def test_a_new_figure_is_one_of_pyplot(name):
    ax = DRAWN[name]()
    assert plt.gcf() is ax.figure
    assert len(plt.get_fignums()) == 1
    ax.figure.savefig(io.BytesIO(), dpi=20)  # the layout has room for the legend
    if name in ("mask", "layout"):
        assert [text.get_text() for text in ax.get_legend().get_texts()] == labels(ax) != []
    else:
        bar = ax.figure.axes[1]
        assert bar.get_ylabel().startswith(name.rstrip("s"))


@pytest.mark.parametrize("name", DRAWN)
def test_axes_that_are_given_get_neither_legend_nor_neighbour(name):
    figure, ax = plt.subplots()
    assert DRAWN[name](ax=ax) is ax
    assert figure.axes == [ax]
    assert ax.get_legend() is None
    assert plt.get_fignums() == [figure.number]


def test_the_legend_names_the_colours():
    ax = DRAWN["mask"]()
    assert labels(ax) == ["full block", "partial block", "empty block"]
    shown = [handle.get_markerfacecolor() for handle in ax.get_legend_handles_labels()[0]]
    colors = ax.collections[0].get_cmap().colors  # by state: empty, partial, full
    assert shown == [colors[BitMask.FULL], colors[BitMask.PARTIAL], colors[BitMask.EMPTY]]
    ordinals = ("first", "second", "third", "fourth")
    assert labels(DRAWN["layout"]()) == [f"{n} word of a row" for n in ordinals]
    # A word of the row-major order has 32 keys: the part that is drawn has one.
    assert labels(plot.layout("row_major", cols=8)) == ["first word of a row"]


def test_images_are_shown_or_written(tmp_path):
    panels = {"grey": np.linspace(-1, 2, 12).reshape(3, 4), "colours": np.ones((3, 4, 3))}
    figure = plot.images(panels)
    assert figure is plt.gcf()
    assert [ax.get_title() for ax in figure.axes] == list(panels)
    grey = figure.axes[0].images[0]
    assert grey.get_cmap().name == "gray"
    assert grey.get_clim() == (0, 1)
    plt.close("all")
    assert plot.images(panels, tmp_path / "two.png") is None
    assert (tmp_path / "two.png").stat().st_size > 0
    assert plt.get_fignums() == []  # a file needs no window


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (((3,),), r"'0' has shape \(3,\), want \(height, width\) or \(height, width, 3\)"),
        (((4, 5), (4, 5, 2)), r"'1' has shape \(4, 5, 2\), want \(4, 5\) or \(4, 5, 3\)"),
        (((4, 5), (5, 4)), r"'1' has shape \(5, 4\), want \(4, 5\) or \(4, 5, 3\)"),
        (((4, 5, 3, 1),), r"'0' has shape \(4, 5, 3, 1\), want \(4, 5\) or \(4, 5, 3\)"),
    ],
)
def test_images_have_one_size(shapes, text):
    with pytest.raises(ValueError, match=f"plot.images: image {text}"):
        plot.images({str(i): np.zeros(shape) for i, shape in enumerate(shapes)})
    assert plt.get_fignums() == []


def test_weights_have_the_options_that_they_document():
    for name in ("return_lse", "out", "score", "dropout"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            plot.weights(3, 4, **{name: None})
    with pytest.raises(ValueError, match="bias or mask has batch axes"):
        plot.weights(3, 4, mask=np.ones((2, 3, 4), bool))
    assert plt.get_fignums() == []
    mask = np.array([True, True, False, True])
    ax = plot.weights(3, 4, mask=mask, window=(1, None), is_causal=True, causal_align="top_left")
    shown = ax.collections[0].get_array()
    want = np.tril(np.ones((3, 4), bool)) & ~np.tril(np.ones((3, 4), bool), -2) & mask
    assert (np.ma.getmaskarray(shown) == ~want).all()


def test_examples_of_plot():
    results = doctest.testmod(plot)
    assert results.attempted > 0
    assert results.failed == 0


def test_matplotlib_waits_for_the_first_picture():
    code = "import sys, fa_cupy.plot; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
