"""Times of calls over the length: small panels of one kind of call each, readable on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from validation import report, store

#: A panel: the dtype, the kind of call, its shape with L for the length, and what else there is.
Panel = tuple[str, str, str, str]
Points = list[tuple[int, float]]  # length, microseconds

_LEAST_LENGTHS = 4  # that make a panel
_ACROSS = 2
_MARKERS = "os^D"
#: Inches: at the width of a phone, 350 px for 4.4 inches, 8 points are 9 px.
_WIDTH, _HEIGHT, _BELOW, _DPI = 4.4, 2.2, 0.7, 200
_TITLES = {"causal_product": "causal product", "decode": "one query, 32 heads"}
_LABELS = {"torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}


def place(case: str) -> tuple[Panel, int] | None:
    """The panel of a case such as ``fp32 attention 1x8x64x64``, and its length."""
    dtype, kind, shape, *more = case.split()
    axes = shape.split("x")
    if len(axes) != 4:
        return None
    length, axes[-2] = int(axes[-2]), "L"
    return (dtype, kind, ", ".join(axes), " ".join(more)), length


def panels(rows: Sequence[store.Row]) -> dict[Panel, dict[str, Points]]:
    """Times by panel and implementation, of panels with enough lengths."""
    found: dict[Panel, dict[str, Points]] = {}
    for row in rows:
        where = place(row["case"])
        if where and row["value"]:
            panel, length = where
            found.setdefault(panel, {}).setdefault(row["impl"], []).append((length, row["value"]))
    lengths = {
        panel: {length for points in lines.values() for length, _ in points}
        for panel, lines in found.items()
    }
    return {p: lines for p, lines in found.items() if len(lengths[p]) >= _LEAST_LENGTHS}


def draw(
    rows: Sequence[store.Row], facts: Mapping[str, Any], path: str = "", part: str = ""
) -> Path | None:
    """Microseconds a call over the length, both logarithmic, one line an implementation.

    `part` is appended to the picture's name. None without matplotlib, or if no kind of call has
    been measured at enough lengths.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
    except ImportError:
        return None
    shown = panels(rows)
    if not shown:
        return None
    across = min(_ACROSS, len(shown))
    down = -(-len(shown) // across)
    figure = Figure(figsize=(_WIDTH, _HEIGHT * down + _BELOW), layout="constrained")
    numbers = FuncFormatter(lambda value, _: f"{value:,.10g}")
    legend: dict[str, Any] = {}
    for i, ((_, kind, shape, more), lines) in enumerate(shown.items()):
        axes = figure.add_subplot(down, across, i + 1, xscale="log", yscale="log")
        for (impl, points), marker in zip(lines.items(), _MARKERS, strict=False):
            style = {"color": report.COLORS.get(impl), "label": _LABELS.get(impl, impl)}
            width = 2.0 if impl == "fa_cupy" else 1.2
            axes.plot(*zip(*sorted(points), strict=True), marker=marker, ms=3.5, lw=width, **style)
        title = _TITLES.get(kind, kind)
        axes.set_title(f"{title} {more}".strip() + f"\n({shape})", fontsize=9)
        lengths = [length for points in lines.values() for length, _ in points]
        wide = max(lengths) > 256 * min(lengths)
        axes.xaxis.set_major_locator(LogLocator(base=8 if wide else 4, numticks=6))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(numbers)
        axes.tick_params(labelsize=8)
        axes.grid(lw=0.4)
        axes.set_axisbelow(True)
        if i % across == 0:
            axes.set_ylabel("µs a call", fontsize=8)
        if i // across == down - 1:
            axes.set_xlabel("L", fontsize=8)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    processor = facts.get("cpu", facts["device"])
    figure.suptitle(
        f"{processor}, {facts.get('cores', '')} cores, {facts['date'][:10]}", fontsize=9
    )
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return report.save(figure, facts, path, part, _DPI)
