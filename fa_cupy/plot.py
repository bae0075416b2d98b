"""Pictures, drawn with matplotlib, which is imported for the first picture.

``pip install 'fa_cupy[plot]'`` brings it. Without `ax`, a function draws on a new figure of pyplot,
which has a legend or a colour bar; notebooks and `matplotlib.pyplot.show` display it. Axes that are
given get neither, because there may be no room: ``ax.legend()`` draws the legend there.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fa_cupy import layouts
from fa_cupy._attention import attention
from fa_cupy._bitmask import BitMask
from fa_cupy._score import Score, arrays_of, operands_of
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import checks
from fa_cupy.score.evaluate import evaluate

__all__ = ["images", "layout", "mask", "scores", "weights"]

_WORDS = ("#2f6db5", "#d9822b", "#3d9a6b", "#a3478f")  # the four words of a row
# Masks up to this many queries and keys are drawn bit by bit, larger ones block by block.
_MOST_BITS = 1024
# The end of the colours of weights: the largest weight, 1, is a blue on which a grid can be seen.
_LIGHTER = 1.6


def images(
    panels: Mapping[str, NDArray[Any]], path: str | PathLike[str] | IO[bytes] | None = None
) -> Any:
    """Draw images of one size side by side, or write them into a file.

    Parameters
    ----------
    panels : mapping of str to ndarray, shape (height, width) or (height, width, 3)
        Title and values of each image, grey or RGB; values are clipped to [0, 1].
    path : path-like or binary file, optional
        The file to write. The ending of a path names the format; a file object gets a PNG.

    Returns
    -------
    matplotlib.figure.Figure or None
        A figure of pyplot, with one axes for each image; None where a file is written.

    Raises
    ------
    ValueError
        If `panels` is empty, or an image has another shape or another size than the first one.

    Examples
    --------
    >>> import io
    >>> import numpy as np
    >>> from fa_cupy import plot
    >>> grey = np.full((40, 30, 3), 0.5)
    >>> plot.images({"grey": grey, "white": 2 * grey}, file := io.BytesIO())
    >>> file.getvalue()[1:4]
    b'PNG'
    """
    if not panels:
        raise ValueError("plot.images: panels is empty, want at least one image")
    height, width = _size_of(panels)
    dpi = 100
    panel_width = max(3.0, width / dpi)  # inches; no image loses pixels
    size = (panel_width * len(panels), panel_width * height / width + 0.4)
    figure = _figure(*size) if path is None else _file_figure(*size)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, image) in zip(axes, panels.items(), strict=True):
        shown = np.clip(image, 0.0, 1.0)
        ax.imshow(shown, interpolation="nearest", cmap="gray", vmin=0.0, vmax=1.0)
        ax.set_title(title)
        ax.set_axis_off()
    if path is None:
        return figure
    figure.savefig(path, dpi=dpi)
    return None


def _size_of(panels: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
    """Return the height and the width that all images have."""
    shapes = {title: np.shape(image) for title, image in panels.items()}
    first = next(iter(shapes.values()))
    for title, shape in shapes.items():
        if len(shape) not in (2, 3) or shape[2:] not in ((), (3,)) or shape[:2] != first[:2]:
            size = "height, width" if len(first) < 2 else f"{first[0]}, {first[1]}"
            raise ValueError(
                f"plot.images: image {title!r} has shape {shape}, want ({size}) or ({size}, 3)"
            )
    height, width = first[:2]
    return height, width


def weights(
    q_len: int,
    k_len: int,
    *,
    ax: Any = None,
    bias: Any = None,
    mask: Any = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: Any = None,
) -> Any:
    """Draw the weights of all keys for each query, for scores that are 0 before bias and mask.

    Parameters
    ----------
    q_len, k_len : int
        Number of queries (rows of the picture) and keys (columns).
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; by default those of a new figure.
    bias, mask : array, optional
        Without batch axes, shape (q_len, k_len) after broadcasting.
    is_causal : bool
    causal_align : {"top_left", "bottom_right"}, optional
    window : (left, right), optional
        As in `fa_cupy.attention`. The weights come from a call of that function.

    Returns
    -------
    matplotlib.axes.Axes
        The largest weight of every query is drawn darkest; hidden keys are grey. A new figure
        has a colour bar.

    Raises
    ------
    TypeError, ValueError
        For lengths that are not ints >= 0, and as `fa_cupy.attention` does.

    Examples
    --------
    >>> from fa_cupy import plot
    >>> ax = plot.weights(4, 6, is_causal=True, causal_align="bottom_right")
    >>> [float(x) for x in ax.get_xlim()]
    [0.0, 6.0]
    """
    for arg, length in (("q_len", q_len), ("k_len", k_len)):
        checks.whole("plot.weights", arg, length)
    q, k, v = np.zeros((q_len, 1)), np.zeros((k_len, 1)), np.eye(k_len)
    seen = attention(
        q, k, v, bias, mask, is_causal=is_causal, causal_align=causal_align, window=window
    )
    if seen.ndim > 2:
        raise ValueError("plot.weights: bias or mask has batch axes, want shape (q_len, k_len)")
    own = ax is None
    ax = _axes("weights", ax, 0.4 * k_len + 1.8, 0.4 * q_len + 0.8)
    largest = seen.max(axis=-1, keepdims=True, initial=0.0)
    shade = np.divide(seen, largest, out=np.zeros_like(seen), where=largest > 0)
    ax.set_facecolor("#f1f3f5")
    drawn = np.where(shade == 0.0, np.nan, shade)
    mesh = ax.pcolormesh(drawn, cmap="Blues", vmin=0.0, vmax=_LIGHTER)
    ax.hlines(np.arange(1, q_len), 0, k_len, color="white", linewidth=1)
    ax.vlines(np.arange(1, k_len), 0, q_len, color="white", linewidth=1)
    _frame(ax, q_len, k_len)
    ax.set_xticks(np.arange(k_len) + 0.5, [str(j) for j in range(k_len)])
    ax.set_yticks(np.arange(q_len) + 0.5, [str(i) for i in range(q_len)])
    ax.tick_params(length=0)
    if own:
        bar = ax.figure.colorbar(mesh, ax=ax, label="weight / largest of the query")
        bar.ax.set_ylim(0.0, 1.0)
    return ax


def mask(mask: BitMask, *, ax: Any = None) -> Any:
    """Draw a bit mask and its blocks.

    Parameters
    ----------
    mask : BitMask, shape (Lq, Lk)
        Select an entry of a mask with batch axes first, as in ``mask[0]``.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        Full blocks are drawn in blue, the bits of partial blocks in orange, and empty blocks are
        left white. With more than 1024 queries or keys, a partial block is orange as a whole.
        A new figure has a legend.

    Raises
    ------
    TypeError, ValueError
        If `mask` is not a BitMask, or has batch axes.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import BitMask, plot
    >>> ax = plot.mask(BitMask.from_dense(np.tri(500, dtype=bool)))
    >>> [float(x) for x in ax.get_xlim()]
    [0.0, 500.0]
    """
    if not isinstance(mask, BitMask):
        wanted = "a BitMask (BitMask.from_dense makes one)"
        raise TypeError(f"plot.mask: mask is {checks.show(mask)}, want {wanted}")
    if mask.ndim != 2:
        raise ValueError(f"plot.mask: mask has shape {mask.shape}, want 2 axes (as of mask[0])")
    from matplotlib.colors import ListedColormap

    (q_len, k_len), shade = mask.shape, mask.block_states()
    blocks = [layouts.BLOCK * np.arange(n + 1) for n in shade.shape]
    drawn = max(q_len, k_len) <= _MOST_BITS
    if drawn:
        for axis in (0, 1):
            shade = shade.repeat(layouts.BLOCK, axis)
        shade = shade[:q_len, :k_len] * mask.get().to_dense()
    own = ax is None
    ax = _axes("mask", ax, 5.8, _height(q_len, k_len))
    edges = [np.arange(n + 1) for n in shade.shape] if drawn else blocks
    colors = ListedColormap(["white", _WORDS[1], _WORDS[0]])  # by BitMask.EMPTY, PARTIAL, FULL
    ax.pcolormesh(edges[1], edges[0], shade, cmap=colors, vmin=0, vmax=2, rasterized=True)
    if len(blocks[0]) + len(blocks[1]) <= 66:
        ax.hlines(blocks[0][1:-1], 0, k_len, color="#8a939c", linewidth=0.5)
        ax.vlines(blocks[1][1:-1], 0, q_len, color="#8a939c", linewidth=0.5)
    _name(ax, {"full block": _WORDS[0], "partial block": _WORDS[1], "empty block": "white"})
    _frame(ax, q_len, k_len)
    if own:
        _legend(ax)
    return ax


def scores(
    score: Score, q_len: int, k_len: int, *, s: Any = 0.0, b: int = 0, h: int = 0, ax: Any = None
) -> Any:
    """Draw the scores of all queries and keys by an expression.

    Parameters
    ----------
    score : Score
        With NumPy arrays, or without arrays.
    q_len, k_len : int
        Number of queries (rows of the picture) and keys (columns).
    s : float or array, shape (q_len, k_len)
        The scores before the expression.
    b, h : int
        The batch entry and the head, from 0 on.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        Larger scores are darker; scores that are -inf or NaN are grey. A new figure has a
        colour bar.

    Raises
    ------
    TypeError, ValueError
        For other arguments, and where an index of the score can leave its array.

    Examples
    --------
    >>> from fa_cupy import Score, plot
    >>> ax = plot.scores(Score("s - abs(i - j)"), 20, 30)
    >>> [float(x) for x in ax.get_xlim()]
    [0.0, 30.0]
    """
    name = "plot.scores"
    given = arrays_of(name, score)
    lengths = {"q_len": q_len, "k_len": k_len, "b": b, "h": h}
    rows, cols, entry, head = (checks.whole(name, arg, n) for arg, n in lengths.items())
    before = np.asarray(s, np.float64)
    if before.shape not in ((), (rows, cols)):
        raise ValueError(f"{name}: s has shape {before.shape}, want () or {rows, cols}")
    native = core_arrays.to_native(name, **given).arrays if given else []
    operands = operands_of(score, dict(zip(given, native, strict=True)))
    if operands is None:
        raise TypeError(f"{name}: score is None, want a Score")
    operands.bound(name, (entry + 1, head + 1, rows, 1), cols)
    own = ax is None
    ax = _axes("scores", ax, 5.4, _height(rows, cols))
    ax.set_facecolor("#d5dade")
    if rows and cols:
        variables = {
            "s": np.broadcast_to(before, (rows, cols)),
            **{"b": np.int64(entry), "h": np.int64(head)},
            **{"i": np.arange(rows)[:, None], "j": np.arange(cols)},
        }
        with np.errstate(all="ignore"):
            (found,) = evaluate(
                np, operands.program.steps(), variables, operands.values, before.dtype
            )
        shade = np.where(np.isneginf(found), np.nan, found)
        shade = np.broadcast_to(shade, (rows, cols))
        mesh = ax.pcolormesh(shade, cmap="Blues", rasterized=True)
        if own:
            ax.figure.colorbar(mesh, ax=ax, label="score")
    _frame(ax, rows, cols)
    return ax


def layout(order: str = "fragment", *, rows: int = 16, cols: int = 32, ax: Any = None) -> Any:
    """Draw the word and the bit of each query and key of a mask block.

    Parameters
    ----------
    order : {"fragment", "row_major"}
        Order of the words; see `fa_cupy.layouts`.
    rows, cols : int
        Size of the part to draw, from the upper left corner of the block: 1 to 128 each.
    ax : matplotlib.axes.Axes, optional
        The axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        Every element shows the number of its bit, in the colour of its word. The numbers on the
        left are the positions of a row's words in memory. A new figure has a legend.

    Raises
    ------
    TypeError, ValueError
        For another order or size.

    Examples
    --------
    >>> from fa_cupy import plot
    >>> ax = plot.layout("fragment", rows=2, cols=16)
    >>> [text.get_text() for text in ax.texts][:10]
    ['0', '1', '0', '1', '0', '1', '0', '1', '2', '3']
    """
    layouts._shape("plot.layout", order)
    for arg, count in (("rows", rows), ("cols", cols)):
        wanted = "an int from 1 to 128"
        checks.whole("plot.layout", arg, count, wanted, range(1, layouts.BLOCK + 1))
    from matplotlib.colors import ListedColormap

    address = layouts.fragment_address if order == "fragment" else layouts.row_major_address
    word, bit = address(*np.indices((rows, layouts.BLOCK)))
    own = ax is None
    ax = _axes("layout", ax, 0.24 * cols + 2.6, 0.24 * rows + 1.2)
    of_row = np.argsort(np.argsort(word, axis=1, kind="stable"), axis=1) // layouts.WORD_BITS
    colors = ListedColormap(_WORDS)
    ax.pcolormesh(
        of_row[:, :cols], cmap=colors, vmin=0, vmax=3, alpha=0.45, edgecolors="white", linewidth=0.5
    )
    for row, col in np.ndindex(rows, cols):
        text = str(bit[row, col])
        ax.text(col + 0.5, row + 0.5, text, ha="center", va="center_baseline", size=6)
    words = [", ".join(str(n) for n in np.unique(line)) for line in word]
    ax.set_yticks(np.arange(rows) + 0.5, words, size=6)
    ax.set_xticks(np.arange(0, cols, 8) + 0.5, [str(col) for col in range(0, cols, 8)])
    ordinals = ("first", "second", "third", "fourth")
    drawn = np.unique(of_row[:, :cols])
    _name(ax, {f"{ordinals[n]} word of a row": (_WORDS[n], 0.45) for n in drawn})
    ax.set(aspect="equal", xlim=(0, cols), ylim=(rows, 0), xlabel="key", ylabel="words")
    ax.tick_params(length=0)
    if own:
        _legend(ax)
    return ax


def _frame(ax: Any, q_len: int, k_len: int) -> None:
    """Set ends and names of axes for queries, downwards, and keys; there may be none of them."""
    limits = {"xlim": (0, max(1, k_len)), "ylim": (max(1, q_len), 0)}
    ax.set(aspect="equal", xlabel="key", ylabel="query", **limits)


def _height(q_len: int, k_len: int) -> float:
    """Return the inches of a figure whose axes are about 3.8 inches wide."""
    return 0.6 + 3.8 * max(0.2, min(2.0, q_len / max(1, k_len)))


def _name(ax: Any, colors: Mapping[str, Any]) -> None:
    """Give `ax` an entry of its legend for each colour, drawn nowhere else."""
    for label, color in colors.items():
        style = {"marker": "s", "markersize": 9, "markeredgecolor": "#8a939c", "linestyle": "none"}
        ax.plot([], [], markerfacecolor=color, label=label, **style)


def _legend(ax: Any) -> None:
    """Draw the legend on the right of the axes."""
    ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0, frameon=False)


def _axes(name: str, ax: Any, width: float, height: float) -> Any:
    """Return `ax`, or the axes of a new figure, sizes in inches."""
    if ax is None:
        return _figure(width, height).subplots()
    from matplotlib.axes import Axes

    if not isinstance(ax, Axes):
        raise TypeError(f"plot.{name}: ax is {checks.show(ax)}, want a matplotlib.axes.Axes")
    return ax


def _figure(width: float, height: float) -> Any:
    """Return a new figure of pyplot, sizes in inches: notebooks and `pyplot.show` show it."""
    from matplotlib import pyplot

    return pyplot.figure(figsize=(width, height), layout="constrained")


def _file_figure(width: float, height: float) -> Any:
    """Return a figure for a file: without pyplot there is no global state and no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
