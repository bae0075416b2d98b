"""What the rows of a benchmark say: ratios, a table, a picture, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from validation import store

# relative Frobenius error against float64 beyond which a result is wrong rather than rounded
ERROR_LIMIT = {"fp16": 1e-2, "bf16": 1e-2, "fp32": 1e-5, "fp64": 1e-13, "tf32": 5e-3, "bool": 0.0}
# Triton's products round factors of float32 to TF32, which has ten bits, unless told otherwise.
_TF32 = ("fla_chunk", "fla_fused_chunk")
TIMES = ("us",)  # units in which less is better
STATIC = Path(__file__).parents[1] / "docs" / "_static"


def best_peers(facts: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Best known peer of each case on this device, from ``peers-<device>.json``."""
    path = Path(__file__).parent / f"peers-{store.slug(facts['device'])}.json"
    if not path.exists():
        return {}
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get(family, {})
    return known


def speed(row: store.Row) -> float:
    """What a row shows, or one over it where that is a time: larger is better."""
    value = float(row["value"])
    return 1 / value if row.get("unit") in TIMES else value


def ratios(rows: Sequence[store.Row], known: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """``ratios[column][case]``: fa_cupy's speed over a peer's of the same run.

    The column ``best`` is the best known peer: cuDNN's figure of this run times what that peer
    was over cuDNN when both were measured together; where none is known, the best of several peers
    of this run.
    """
    found: dict[str, dict[str, float]] = {}
    value = {(row["case"], row["impl"]): row for row in rows if row["value"]}
    for (case, impl), row in value.items():
        ours = value.get((case, "fa_cupy"))
        if impl == "fa_cupy" or ours is None or ours.get("date") != row.get("date"):
            continue
        found.setdefault(impl, {})[case] = speed(ours) / speed(row)
        if impl == "cudnn" and case in known:
            best = row["value"] * known[case]["over_cudnn"]
            found.setdefault("best", {})[case] = ours["value"] / best
    if not known:
        others = {name: of for name, of in found.items() if not name.startswith("fa_cupy")}
        for case in dict.fromkeys(case for case, _ in value):
            over = [of[case] for of in others.values() if case in of]
            if len(over) > 1:
                found.setdefault("best", {})[case] = min(over)
    return found


def shown(row: store.Row, form: str = "") -> str:
    """What a row has, as a number in a table: short times with a digit more."""
    if "failed" in row:
        return "failed"
    value = float(row["value"])
    digits = int(row.get("unit") in TIMES and value < 100)
    return f"{value:{form}.{digits}f}"


def table(rows: Sequence[store.Row], known: Mapping[str, Any]) -> str:
    """One line a case: speed of each implementation, fa_cupy over each, and means of that."""
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    columns = ratios(rows, known)
    cell = {(row["case"], row["impl"]): shown(row) for row in rows}
    error = {row["case"]: row["error"] for row in rows if row["impl"] == "fa_cupy"}

    def error_of(case: str) -> str:
        found = error.get(case)
        return "-" if found is None else f"{float(found):.1e}"

    heads = [f"{rows[0]['family']} ({rows[0]['unit']})", *impls]
    lines = [[*heads, *(f"/{column}" for column in columns), "error"]]
    for case in dict.fromkeys(row["case"] for row in rows):
        speeds = [cell.get((case, impl), "-") for impl in impls]
        over = [f"{c[case]:.2f}" if case in c else "-" for c in columns.values()]
        lines.append([case, *speeds, *over, error_of(case)])
    for label, of in (("geometric mean", store.geometric_mean), ("lowest", min)):
        over = [f"{of(list(c.values())):.2f}" for c in columns.values()]
        if over:
            lines.append([label, *([""] * len(impls)), *over, ""])
    return store.align(lines)


def wrong(rows: Sequence[store.Row]) -> list[str]:
    """What failed or is further from float64 than its type explains."""
    found = []
    for row in rows:
        where = f"{row['family']} {row['case']} {row['impl']}"
        if "failed" in row:
            found.append(f"{where}: {row['failed']}")
            continue
        dtype = row["case"].split()[0]
        kind = "tf32" if dtype == "fp32" and row["impl"] in _TF32 else dtype
        if not row["error"] <= ERROR_LIMIT[kind]:
            found.append(f"{where}: relative error {row['error']:.1e}")
    return found


COLORS = {
    "fa_cupy": "#c1272d",
    "cudnn": "#1b6ca8",
    "flash2": "#2e8b57",
    "efficient": "#8a8a8a",
    "jax": "#b8860b",
    "plain_cupy": "#6a51a3",
    "torch_plain": "#1b6ca8",
    "jax_plain": "#b8860b",
    "fa_cupy_cublas": "#e07b39",
    "flash2_window": "#66c2a5",
    "torch": "#1b6ca8",
    "fa_cupy_recurrent": "#e07b39",
    "fa_cupy_low_occupancy": "#f2b880",
    "fla_chunk": "#1b6ca8",
    "fla_fused_chunk": "#66a3d2",
    "torch_chunk": "#8a8a8a",
    "fa_cupy_array": "#e07b39",
    "fa_cupy_dense": "#e07b39",
    "fa_cupy_plain": "#f2b880",
    "fa_cupy_band": "#f2b880",
    "flex": "#2e8b57",
    "flex_sigmoid": "#8fc7a5",
    "copy": "#8a8a8a",
    "numpy": "#8a8a8a",
}


#: Words in names of families whose cases are no series of lengths.
_BARS = ("options", "sparse", "scores", "decode", "packed")
_UPRIGHT = 10  # so many cases of a panel of bars have names that are not turned


def _panel(case: str) -> tuple[str, str]:
    """``bf16 hd128 causal 4096x4`` belongs to panel ``bf16 hd128 causal`` at tick ``4096x4``."""
    words = case.split()
    return " ".join(words[:3]), " ".join(words[3:])


def _below(case: str, title: str) -> str:
    """What a case's name has besides the title of its panel, in short lines."""
    return case.removeprefix(title).strip().replace(" ", "\n").replace("-", "-\n")


Place = tuple[str, str]  # family and case, or family and title of a panel


#: Peers that were measured in another run, whose figures stand in ``peers-<device>.json``.
_ELSEWHERE = {
    "fa3": ("--", "#111111", "FlashAttention-3, another run"),
    "fa4": (":", "#777777", "FlashAttention-4, another run"),
}


def _panels(places: Sequence[Place]) -> dict[Place, list[Place]]:
    """Cases by panel; those of panels with less than three lengths share one for their dtype."""
    panels: dict[Place, list[Place]] = {}
    for family, case in places:
        panels.setdefault((family, _panel(case)[0]), []).append((family, case))
    found: dict[Place, list[Place]] = {}
    for (family, title), members in panels.items():
        alone = len(members) < 3
        found.setdefault((family, title.split()[0] if alone else title), []).extend(members)
    return found


def _of_other_runs(
    speed: Mapping[tuple[Place, str], float], known: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[Place, float], dict[tuple[Place, str], float]]:
    """The best known peers, where cuDNN ran, and those peers that other runs have measured."""
    best = {
        (family, case): value * known[family][case]["over_cudnn"]
        for ((family, case), impl), value in speed.items()
        if impl == "cudnn" and case in known[family]
    }
    elsewhere = {
        (place, impl): known[place[0]][place[1]][impl]
        for place in dict.fromkeys(place for place, _ in speed)
        for impl in _ELSEWHERE
        if impl in known[place[0]].get(place[1], ())
    }
    return best, elsewhere


def _scale(axes: Any, members: Sequence[Place], title: str, bars: bool, most: float) -> None:
    """Name the cases of a panel below it, and let its speeds begin at 0."""
    ticks = [_below(case, title) if bars else _panel(case)[1] for _, case in members]
    turned = (90 if len(members) > _UPRIGHT else 0) if bars else 30
    axes.set_xticks(range(len(members)), ticks, rotation=turned, fontsize=7)
    axes.set_xlim(-0.6, len(members) - 0.4)
    axes.set_ylim(0, 1.1 * most)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(axis="y", lw=0.4)
    axes.set_axisbelow(True)


def draw(
    rows: Sequence[store.Row], facts: Mapping[str, Any], path: str = "", part: str = ""
) -> Path | None:
    """Speed over the lengths, one panel a family, dtype, head_dim and mask.

    `part` is appended to the picture's name. None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    speed = {((r["family"], r["case"]), r["impl"]): r["value"] for r in rows if r["value"]}
    unit = {row["family"]: row["unit"] for row in rows}
    best, elsewhere = _of_other_runs(speed, {family: best_peers(facts, family) for family in unit})
    impls = list(dict.fromkeys(impl for _, impl in speed))
    panels = _panels(list(dict.fromkeys(place for place, _ in speed)))
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(max(3.6 * across, 6.0), 2.9 * down), layout="constrained")
    legend: dict[str, Any] = {}
    for i, ((family, title), members) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, i + 1)
        bars = " " not in title or any(word in family for word in _BARS)
        here = [impl for impl in impls if any((place, impl) in speed for place in members)]
        for order, impl in enumerate(here):
            points = [(n, speed[p, impl]) for n, p in enumerate(members) if (p, impl) in speed]
            x, y = zip(*points, strict=True)
            style = {"color": COLORS.get(impl), "label": impl}
            if bars:
                width = 0.8 / len(here)
                shift = (order + 0.5) * width - 0.4
                axes.bar([at + shift for at in x], y, width, **style)
            else:
                axes.plot(x, y, "o-", ms=4, lw=2.2 if impl == "fa_cupy" else 1.3, **style)
        marks = [(n, best[place]) for n, place in enumerate(members) if place in best]
        others = []
        for impl, (style, color, label) in _ELSEWHERE.items():
            found = [(n, elsewhere.get((p, impl))) for n, p in enumerate(members)]
            points = [(n, value) for n, value in found if value]
            others += points
            if points:
                how = {"ls": "", "marker": "_", "ms": 22, "mew": 1.6} if bars else {"ls": style}
                axes.plot(*zip(*points, strict=True), color=color, lw=1.2, label=label, **how)
        if marks and not bars and not others:
            axes.plot(*zip(*marks, strict=True), "k:", lw=1, label="best known peer")
        marks += others
        axes.set_title(title if len(unit) == 1 else f"{family}: {title}", fontsize=10)
        top = max(value for (place, _), value in speed.items() if place in members)
        _scale(axes, members, title, bars, max([top, *(value for _, value in marks)]))
        if i % across == 0:
            axes.set_ylabel(unit[family], fontsize=9)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    what = next(iter(unit)) if len(unit) == 1 else "fa_cupy and its peers"
    figure.suptitle(f"{what} on {facts.get('cpu', facts['device'])}, {facts['date'][:10]}")
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=5, fontsize=8)
    return save(figure, facts, path, part)


def save(
    figure: Any, facts: Mapping[str, Any], path: str = "", part: str = "", dpi: int = 110
) -> Path:
    """Write a picture to a path, or to the docs under the name of the device; return where."""
    target = Path(path) if path else STATIC / f"bench-{store.slug(facts['device'])}.png"
    target = target.with_stem(f"{target.stem}-{part}") if part else target
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=dpi)
    return target
