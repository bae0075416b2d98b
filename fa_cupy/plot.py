"""Pictures, drawn with matplotlib, which is imported when the first one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fa_cupy._attention import attention

__all__ = ["images", "weights"]


def images(panels: Mapping[str, NDArray[Any]], path: str | PathLike[str] | IO[bytes]) -> None:
    """Write images of one size side by side into a file.

    Parameters
    ----------
    panels : mapping of str to ndarray, shape (height, width, 3)
        Title and RGB values of each image; values outside [0, 1] are cut.
    path : path-like or binary file
        Where to; its ending names the format, which is PNG for a file object.

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
    # Without pyplot there is no global state and no window.
    from matplotlib.figure import Figure

    height, width = next(iter(panels.values())).shape[:2]
    dpi = 100
    panel_width = max(3.0, width / dpi)  # inches; no image loses pixels
    figure = Figure(
        figsize=(panel_width * len(panels), panel_width * height / width + 0.4),
        layout="constrained",
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, image) in zip(axes, panels.items(), strict=True):
        ax.imshow(np.clip(image, 0.0, 1.0), interpolation="nearest")
        ax.set_title(title)
        ax.set_axis_off()
    figure.savefig(path, dpi=dpi)


def weights(q_len: int, k_len: int, *, ax: Any = None, **options: Any) -> Any:
    """Draw how much each query takes from each key when all scores are equal before bias and mask.

    Parameters
    ----------
    q_len, k_len : int
        Number of queries (rows of the picture) and keys (columns).
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default a new figure.
    **options
        `bias`, `mask`, `is_causal`, `causal_align` and `window` of `attention`, which is asked for
        the weights, so that the picture shows what it does.

    Returns
    -------
    matplotlib.axes.Axes
        Every query's largest weight is drawn darkest; keys it does not see are grey.

    Examples
    --------
    >>> from fa_cupy import plot
    >>> ax = plot.weights(4, 6, is_causal=True, causal_align="bottom_right")
    >>> [float(x) for x in ax.get_xlim()]
    [0.0, 6.0]
    """
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(0.4 * k_len + 0.8, 0.4 * q_len + 0.8), layout="constrained").subplots()
    seen = attention(np.zeros((q_len, 1)), np.zeros((k_len, 1)), np.eye(k_len), **options)
    largest = seen.max(axis=-1, keepdims=True)
    shade = np.divide(seen, largest, out=np.zeros_like(seen), where=largest > 0)
    ax.set_facecolor("#f1f3f5")
    ax.pcolormesh(np.where(shade == 0.0, np.nan, shade), cmap="Blues", vmin=0.0, vmax=1.6)
    ax.hlines(np.arange(1, q_len), 0, k_len, color="white", linewidth=1)
    ax.vlines(np.arange(1, k_len), 0, q_len, color="white", linewidth=1)
    ax.set(aspect="equal", xlim=(0, k_len), ylim=(q_len, 0), xlabel="key", ylabel="query")
    ax.set_xticks(np.arange(k_len) + 0.5, [str(j) for j in range(k_len)])
    ax.set_yticks(np.arange(q_len) + 0.5, [str(i) for i in range(q_len)])
    ax.tick_params(length=0)
    return ax
