"""Draws the pictures of these pages: ``python docs/figures.py [FOLDER]``, by default docs/_static.

They show what the library computes (masks, fragments, a running softmax), so they are drawn from
it or from the same formulas, not by hand.
"""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from scipy import sparse

sys.path.insert(0, str(Path(__file__).parents[1]))

from fa_cupy import BitMask, Score, plot
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention import fwd_sm90

matplotlib.rcParams.update(
    {
        "svg.hashsalt": "fa_cupy",  # the same picture is the same file
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "mathtext.fontset": "cm",
    }
)
INK, GREY, PALE = "#1f2933", "#8a939c", "#eef1f4"
TILES = ("#2f6db5", "#d9822b", "#3d9a6b", "#a3478f")  # tiles 0 to 3; also registers of a fragment
MEMORY = {"device memory": "#c9ced4", "shared memory": "#9cc3e6", "registers": "#f3c18a"}


def save(figure, folder, name):
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


def canvas(width, height, xlim, ylim):
    """Return a figure and axes without frame or ticks, y downwards, one unit equally long."""
    figure = Figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=xlim, ylim=ylim[::-1], aspect="equal")
    ax.set_axis_off()
    return figure, ax


def box(ax, x, y, width, height, text="", color=PALE, edge=INK, size=9, **style):
    ax.add_patch(
        Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=0.8, **style)
    )
    if text:
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=size, color=INK)


def arrow(ax, start, end, color=INK, **style):
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, color=color, linewidth=1, **style
        )
    )


def online_softmax(folder):
    """One query, 24 scores in four tiles: the running maximum, and the sum it rescales."""
    mean = np.array([-0.5, 0.6, -0.6, 1.9])[:, None]
    scores = np.random.default_rng(11).normal(mean, 1.1, (4, 6))
    largest = np.maximum.accumulate(scores.max(axis=1))
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(1.15, 1))

    x = np.arange(24).reshape(4, 6)
    for j in range(4):
        top.bar(x[j], scores[j], color=TILES[j], width=0.8, label=f"tile {j}")
        top.plot((x[j, 0] - 0.5, x[j, -1] + 0.5), [largest[j]] * 2, color=INK, lw=1.6)
        top.text(
            x[j].mean(), largest[j] + 0.12, f"$m_{j} = {largest[j]:.2f}$", ha="center", va="bottom"
        )
        top.axvline(x[j, -1] + 0.5, color=GREY, lw=0.6, ls=":")
    top.axhline(0, color=INK, lw=0.6)
    top.set(xlim=(-0.5, 23.5), ylim=(scores.min() - 0.2, largest[-1] + 0.9), ylabel="score")
    top.set_xticks(x.mean(axis=1), [f"tile {j}" for j in range(4)])
    top.tick_params(axis="x", length=0)
    top.set_title("the largest score so far", loc="left")

    for now in range(4):
        base = 0.0
        for j in range(now + 1):
            part = np.exp(scores[j] - largest[now]).sum()
            bottom.bar(now, part, bottom=base, color=TILES[j], width=0.5, edgecolor="white")
            base += part
        bottom.text(now + 0.28, base, f"$\\ell_{now} = {base:.2f}$", va="center", ha="left")
        if now:
            factor = np.exp(largest[now - 1] - largest[now])
            bottom.annotate(
                "", (now - 0.27, base * 0.25), (now - 0.73, base * 0.25),
                arrowprops={"arrowstyle": "-|>", "color": GREY},
            )  # fmt: skip
            bottom.text(
                now - 0.5, base * 0.25 + 0.25,
                f"$\\times e^{{m_{now - 1}-m_{now}}}$\n$= {factor:.2f}$",
                ha="center", va="bottom", color=INK, size=8.5,
            )  # fmt: skip
    bottom.set(xlim=(-0.5, 3.75), ylabel="sum of exponentials")
    bottom.set_xticks(range(4), [f"after tile {j}" for j in range(4)])
    bottom.tick_params(axis="x", length=0)
    bottom.set_title("the sum so far, by the tile that contributed to it", loc="left")
    save(figure, folder, "online_softmax")


def tiling(folder):
    """Where the matrices stand, and which part of each is at work."""
    figure, ax = canvas(7.2, 4.9, (-0.4, 14.0), (-0.6, 9.2))
    rows, cols, i, j = 4, 6, 1, 3
    gx, gy, side, depth = 3.6, 2.6, 1.0, 1.7
    for r in range(rows):
        for c in range(cols):
            color, style = "white", {}
            if r < i or (r == i and c < j):
                color = "#f6f7f9"
            if (r, c) == (i, j):
                color = MEMORY["registers"]
            box(ax, gx + c * side, gy + r * side, side, side, "", color, GREY, **style)
    ax.text(gx + (j + 0.5) * side, gy + (i + 0.5) * side, "$S_{13}, P_{13}$", ha="center",
            va="center", size=9)  # fmt: skip
    arrow(ax, (gx + 0.15, gy + (i + 0.5) * side), (gx + j * side - 0.05, gy + (i + 0.5) * side),
          color=GREY)  # fmt: skip
    for r in range(rows):
        color = MEMORY["shared memory"] if r == i else MEMORY["device memory"]
        box(ax, gx - depth - 0.35, gy + r * side, depth, side, f"$Q_{{{r}}}$", color)
        color = MEMORY["registers"] if r == i else MEMORY["device memory"]
        box(ax, gx + cols * side + 0.35, gy + r * side, depth, side, f"$O_{{{r}}}$", color)
    for c in range(cols):
        color = {j: MEMORY["shared memory"], j + 1: "#dbe9f6"}.get(c, MEMORY["device memory"])
        style = {"linestyle": "--"} if c == j + 1 else {}
        box(ax, gx + c * side, gy - depth - 0.35, side, depth, f"$K_{{{c}}}^T$", color, **style)
        box(
            ax,
            gx + c * side,
            gy + rows * side + 0.35,
            side,
            depth,
            f"$V_{{{c}}}^T$",
            color,
            **style,
        )

    right = gx + cols * side + 0.35 + depth + 0.25
    box(ax, right, gy + i * side, 0.9, side, "$m_1, \\ell_1$", MEMORY["registers"])
    ax.text(gx - 0.2, gy - depth - 0.5, "$K^T$: (head_dim, Lk)", ha="left", va="bottom")
    ax.text(gx - depth - 0.35, gy - 0.12, "$Q$: (Lq, head_dim)", ha="left", va="bottom", size=8)
    ax.text(gx + cols * side + 0.35, gy - 0.12, "$O$: (Lq, v_dim)", va="bottom", size=8)
    ax.text(gx - 0.2, gy + rows * side + depth + 0.5, "$V^T$: (v_dim, Lk)", va="top")
    y = gy - depth - 0.2
    for name, color in MEMORY.items():
        box(ax, right - 2.05, y, 0.35, 0.35, "", color)
        ax.text(right - 1.55, y + 0.18, name, va="center", size=8.5)
        y += 0.5
    ax.text(-0.2, gy + rows * side + 0.6,
            "one block of threads\nkeeps $Q_1$ and $O_1$ and\nwalks along the keys;\n"
            "while tile 3 is at work,\ntile 4 is on its way", va="top", size=8.5)  # fmt: skip
    save(figure, folder, "tiling")


def visibility(folder):
    """What masks, windows and alignments let a query see; drawn by attention itself."""
    padding = np.arange(6) >= 2
    causal, right = {"is_causal": True}, {"causal_align": "bottom_right"}
    cases = (
        ("is_causal", 6, causal),
        ("is_causal,\ncausal_align='top_left'", 4, {**causal, "causal_align": "top_left"}),
        ("is_causal,\ncausal_align='bottom_right'", 4, {**causal, **right}),
        ("window=(2, 1)", 6, {"window": (2, 1)}),
        ("window=(2, 0),\ncausal_align='bottom_right'", 4, {"window": (2, 0), **right}),
        ("is_causal and mask\n(keys 0 and 1 are padding)", 6, {**causal, "mask": padding}),
    )
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    for ax, (title, q_len, options) in zip(figure.subplots(2, 3).flat, cases, strict=True):
        plot.weights(q_len, 6, ax=ax, **options)
        ax.set_title(title, family="monospace", size=8)
    save(figure, folder, "visibility")


def mask_words(folder):
    """Which word and bit an element of a mask has, in either order."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    rows = {"fragment": 9, "row_major": 3}
    axes = figure.subplots(2, 1, height_ratios=tuple(rows.values()))
    for ax, order in zip(axes, rows, strict=True):
        plot.layout(order, rows=rows[order], cols=40, ax=ax)
        ax.set_title(order, family="monospace", size=8)
    save(figure, folder, "mask_words")


def masks(folder):
    """The masks that the page on them makes, each made the same way but smaller."""
    rng = np.random.default_rng(0)
    n = 640
    path = rng.standard_normal((n, 2)).cumsum(axis=0)
    distance = np.linalg.norm(path[:, None] - path, axis=-1)
    best = np.argpartition(distance, 24, axis=1)[:, :24]
    document = np.repeat(np.arange(4), [200, 50, 260, 130])
    points = np.sort(rng.random(n))
    graph = sparse.csr_array(np.abs(points - points[:, None]) < 0.04)
    board = np.indices((5, 5)).sum(axis=0) % 2 == 0
    panels = {
        "top-k": BitMask.from_indices(best, n),
        "documents": BitMask.from_segments(document),
        "a graph": BitMask.from_csr(graph),
        "a checkerboard": BitMask.from_blocks(board, n, n),
    }
    figure = Figure(figsize=(7.2, 7.2), layout="constrained")
    for ax, (title, mask) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        plot.mask(mask, ax=ax)
        ax.set_title(title)
    save(figure, folder, "masks")


def alibi(folder):
    """The bias of four ALiBi heads, as the weights it makes of equal scores."""
    figure = Figure(figsize=(7.2, 2.2), layout="constrained")
    powers = (1, 2, 4, 8)
    for ax, power in zip(figure.subplots(1, 4), powers, strict=True):
        bias = 2.0**-power * np.arange(8.0)[None, :]
        plot.weights(8, 8, ax=ax, bias=bias, is_causal=True)
        ax.set_title(f"slope 1/{2**power}", size=8.5)
    save(figure, folder, "alibi")


def scores(folder):
    """What the expressions of the gallery make of scores."""
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    length = 40
    x = np.sort(np.random.default_rng(0).uniform(0, 6, length))
    falling = {"table": -np.log2(1 + np.arange(32) % 16), "n": length - 1}
    bucket = {"bucket": t5_bucket(np.arange(-length + 1, length))}
    rising = np.linspace(-150, 150, length) + np.zeros((length, 1))
    distance = "sqrt(3) * abs(x[i] - x[j]) / w"
    drawn = (
        ("ALiBi, causal", "s - 0.1 * abs(i - j) if j <= i else -inf", {}, 0.0),
        ("T5's relative positions", "s + table[bucket[i - j + n] % 32]", falling | bucket, 0.0),
        ("softcap of s from -150 to 150", "50 * tanh(s / 50)", {}, rising),
        ("soft window", "s - max(abs(i - j) - 8, 0) / 4", {}, 0.0),
        ("Gaussian", "-(x[i] - x[j]) ** 2 / (2 * w ** 2)", {"x": x, "w": 0.7}, 0.0),
        ("Matern 3/2", f"log(1 + {distance}) - {distance}", {"x": x, "w": 0.7}, 0.0),
    )
    for ax, (title, text, arrays, s) in zip(figure.subplots(2, 3).flat, drawn, strict=True):
        plot.scores(Score(text, **arrays), length, length, s=s, ax=ax)
        ax.set_title(title, size=8.5)
    save(figure, folder, "scores")


def t5_bucket(distance, buckets=32, longest=128):
    """The bucket of each distance, as the page on scores computes it."""
    half, near = buckets // 2, buckets // 4
    far = np.log(np.maximum(abs(distance), 1) / near) / np.log(longest / near)
    far = np.minimum(near + (far * (half - near)).astype(int), half - 1)
    return np.where(abs(distance) < near, abs(distance), far) + half * (distance < 0)


def call(folder):
    """The way of a call, one direction."""
    figure, ax = canvas(7.2, 4.5, (0, 16), (0, 10))
    steps = [
        ("attention(q, k, v, ...)", "fa_cupy/_attention.py", "array kinds, DLPack"),
        ("check", "core/attention_problem.py", "shapes, strides, dtypes\n→ Problem, or an error"),
    ]

    def step(x, y, width, title, where, what="", color=PALE, height=1.35):
        ax.add_patch(
            FancyBboxPatch(
                (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.15",
                facecolor=color, edgecolor=INK, linewidth=0.9,
            )
        )  # fmt: skip
        ax.text(x + width / 2, y + 0.42, title, ha="center", va="center", size=9.5)
        ax.text(x + width / 2, y + 0.95, where, ha="center", va="center", size=7.5, color="#52606d",
                family="monospace")  # fmt: skip
        if what:
            ax.text(x + width + 0.2, y + height / 2, what, va="center", size=8, color=INK)

    for n, (title, where, what) in enumerate(steps):
        step(5.6, 0.2 + 1.85 * n, 4.6, title, where, what)
    arrow(ax, (7.9, 1.55), (7.9, 2.05))
    arrow(ax, (6.6, 3.4), (3.2, 4.2))
    arrow(ax, (6.2, 5.3), (4.8, 8.6), color=GREY)
    ax.text(5.55, 7.8, "float32,\nfloat64,\nwide", size=7.5, color="#52606d", va="center")
    arrow(ax, (9.2, 3.4), (10.3, 4.2))
    ax.text(4.1, 3.65, "NumPy", ha="center", size=8.5)
    ax.text(10.9, 3.85, "CuPy", ha="center", size=8.5)

    step(0.3, 4.2, 4.5, "tiled, in threads", "fa_cupy/cpu/attention.py", color="#e5f0e8")
    step(0.3, 6.3, 4.5, "tile sizes for the cache", "fa_cupy/tiled/tile_sizes.py", color="#e5f0e8")
    step(0.3, 8.4, 4.5, "online softmax", "fa_cupy/tiled/attention.py", color="#e5f0e8")
    arrow(ax, (2.55, 5.55), (2.55, 6.3))
    arrow(ax, (2.55, 7.65), (2.55, 8.4))

    wide, narrow = 5.4, 4.1
    step(6.2, 4.2, wide, "plan", "fa_cupy/gpu/attention.py", "", "#e4ecf7")
    ax.text(11.8, 4.87, "kept per shapes, strides,\ndtypes, options and device:\nnext time the way"
            "\nstarts here", va="center", size=8)  # fmt: skip
    step(6.2, 6.0, narrow, "choose a variant", "gpu/kernels/", "", "#e4ecf7")
    step(11.2, 6.0, 4.3, "compile, or cache", "gpu/driver/compile.py", "", "#e4ecf7")
    step(6.2, 8.4, narrow, "launch", "gpu/driver/launch.py", "", "#e4ecf7")
    step(11.2, 8.4, 4.3, "the kernel", "cuda_src/, ptx/", "", "#f7e8d4")
    arrow(ax, (8.3, 5.55), (8.3, 6.0))
    arrow(ax, (10.3, 6.67), (11.2, 6.67))
    arrow(ax, (13.3, 7.35), (13.3, 8.4))
    ax.text(13.5, 7.85, "cubin", va="center", size=8)
    arrow(ax, (6.75, 5.55), (6.75, 8.4), linestyle=(0, (3, 2)))
    ax.text(6.9, 7.85, "kept plan", va="center", size=8)
    arrow(ax, (10.3, 9.07), (11.2, 9.07))
    save(figure, folder, "call")


def fragment(folder):
    """Accumulators of two m16n8 products, next to the A operand of the next m16n8k16."""
    figure, ax = canvas(7.2, 3.9, (-1.3, 38.6), (-3.4, 18.3))
    for half, x0 in ((0, 0), (1, 20)):
        for row in range(16):
            for col in range(0, 16, 2):
                lane = row % 8 * 4 + col % 8 // 2
                register = row // 8 + 2 * (col // 8)
                color = matplotlib.colors.to_rgba(TILES[register], 0.28 if lane != 5 else 0.95)
                box(ax, x0 + col, row, 2, 1, "", color, "white")
                ax.text(x0 + col + 1, row + 0.5, str(lane), ha="center", va="center", size=6.3,
                        color="white" if lane == 5 else INK)  # fmt: skip
        ax.add_patch(Rectangle((x0, 0), 16, 16, fill=False, edgecolor=INK, linewidth=1))
        for col in (0, 8):
            ax.text(x0 + col + 4, -0.35, f"columns {col} to {col + 7}", ha="center", size=7.5)
        names = (
            ("d[0], d[1]", "d[2], d[3]", "d'[0], d'[1]", "d'[2], d'[3]")
            if half == 0
            else ("a[0]", "a[1]", "a[2]", "a[3]")
        )
        for register, name in enumerate(names):
            ax.text(x0 + 4 + register // 2 * 8, 16.55 + register % 2 * 0.95, name, ha="center",
                    va="center", size=8, color=TILES[register], weight="bold")  # fmt: skip
    ax.text(8, -2.2, "two accumulator tiles $S$ (16 × 8 each), float32", ha="center", size=9)
    ax.text(28, -2.2, "one operand $A$ (16 × 16), pairs of 16 bits", ha="center", size=9)
    arrow(ax, (16.5, 8), (19.5, 8))
    ax.text(18, 7.2, "cvt", ha="center", size=8, family="monospace")
    ax.plot((0, 16), (8, 8), color=INK, lw=0.6)
    ax.plot((20, 36), (8, 8), color=INK, lw=0.6)
    for row in (0, 8):
        ax.text(-0.25, row + 0.5, str(row), ha="right", va="center", size=7)
        ax.text(36.25, row + 0.5, str(row), ha="left", va="center", size=7)
    save(figure, folder, "fragment")


def swizzle(folder):
    """Eight rows of 128 bytes, as they are and swizzled; one ldmatrix marked."""
    figure, ax = canvas(7.2, 3.5, (-1.4, 19.6), (-2.3, 8.9))
    for half, x0 in ((0, 0), (1, 10.5)):
        for row in range(8):
            for chunk in range(8):
                place = chunk ^ row if half else chunk
                marked = chunk == 2
                color = TILES[1] if marked else PALE
                box(ax, x0 + place, row, 1, 1, str(chunk), color, "white", size=8)
            ax.text(x0 - 0.2, row + 0.5, f"row {row}", ha="right", va="center", size=7)
        for place in range(8):
            ax.text(x0 + place + 0.5, -0.2, f"{4 * place}–{4 * place + 3}", ha="center", size=6.3)
        ax.text(x0 + 4, -0.8, "banks", ha="center", size=7.5)
    ax.text(4, -1.6, "chunk $c$ at $c$: eight reads of the same four banks", ha="center")
    ax.text(14.5, -1.6, "chunk $c$ at $c$ xor row: every bank once", ha="center")
    ax.text(9.1, 8.55, "orange: the eight rows of 16 bytes that one 8 × 8 matrix of ldmatrix reads",
            ha="center", size=8.5)  # fmt: skip
    save(figure, folder, "swizzle")


def pipeline(folder):
    """Copies while tiles are multiplied, with one and with two tiles under way."""
    figure, ax = canvas(7.2, 2.9, (-2.6, 19.0), (-0.8, 7.9))
    work = (("$S$", 1.0, MEMORY["registers"]), ("softmax", 1.3, "#f8dfc0"),
            ("$PV$", 1.0, MEMORY["registers"]))  # fmt: skip
    total = sum(width for _, width, _ in work)

    def tile(x, y, j):
        for name, width, color in work:
            label = name.replace("S", f"S_{j}").replace("PV", f"P_{j}V_{j}")
            box(ax, x, y, width, 0.8, label, color, size=6.5 if name == "softmax" else 7.5)
            x += width

    ax.text(-2.5, -0.45, "one buffer: the copy waits for the work, the work for the copy", size=8.5)
    x = 0.0
    for j in range(3):
        box(ax, x, 0, 2.4, 0.8, f"$K_{j}, V_{j}$", MEMORY["shared memory"], size=7.5)
        tile(x + 2.4, 1, j)
        x += 2.4 + total
    ax.text(-2.5, 3.55, "a ring of two buffers: tile $j+1$ arrives while tile $j$ is at work",
            size=8.5)  # fmt: skip
    box(ax, 0, 4, 1.2, 0.8, "$Q, K_0$", MEMORY["shared memory"], size=7.5)
    box(ax, 1.2, 4, 1.2, 0.8, "$V_0$", MEMORY["shared memory"], size=7.5)
    x = 1.2
    for j in range(5):
        tile(x, 5, j)
        if j < 4:
            start = max(x, 2.4)
            box(
                ax, start, 4, 2.1, 0.8, f"$K_{j + 1}, V_{j + 1}$", MEMORY["shared memory"], size=7.5
            )
        x += total
    for y in (0, 4):
        ax.text(-0.2, y + 0.4, "cp.async", ha="right", va="center", size=8, family="monospace")
        ax.text(-0.2, y + 1.4, "mma.sync", ha="right", va="center", size=8, family="monospace")
    arrow(ax, (0, 6.6), (18.6, 6.6), color=GREY)
    ax.text(18.6, 7.0, "time", ha="right", va="top", size=8, color=GREY)
    save(figure, folder, "pipeline")


def traffic(folder):
    """Bytes through device memory by the formulas of the page, for one head."""
    length = 2.0 ** np.arange(9, 18)
    size, dim, tile_m = 2, 128, 128
    least = size * 4 * length * dim
    plain = least + size * 4 * length**2
    tiled = size * 2 * dim * length * (1 + length / tile_m)
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    ax = figure.subplots()
    for values, label, color, style in (
        (plain, "plain: $S$ and $P$ written and read", TILES[1], "-"),
        (tiled, "tiled: $K$ and $V$ read for every query tile", TILES[0], "-"),
        (least, "every array once", TILES[0], "--"),
    ):
        ax.loglog(length, values, style, color=color, label=label)
        ax.text(length[-1] * 1.08, values[-1], f"{values[-1] / 1e9:.3g} GB", va="center", size=8,
                color=color)  # fmt: skip
    ax.fill_between(length, least, tiled, color=TILES[0], alpha=0.12, lw=0)
    ax.text(4.2 * 2**13, 2**28, "tiled, with what L2 keeps", size=8, color=TILES[0], ha="center")
    ax.set(xlabel="Lq = Lk", ylabel="bytes of one head", xlim=(length[0], length[-1] * 1.7))
    ax.set_xticks(length[::2], [f"{int(n)}" for n in length[::2]])
    ax.minorticks_off()
    ax.legend(frameon=False)
    save(figure, folder, "traffic")


def warpgroup_color(group, strength):
    """Return the color of a consumer warpgroup, mixed with white."""
    color = np.array(matplotlib.colors.to_rgb(TILES[group]))
    return tuple(1 - strength * (1 - color))


def sm90_roles(folder):
    """Producers and consumers of a block of fwd_sm90, with the stages between them."""
    figure, ax = canvas(7.2, 4.2, (0, 16), (0, 9.33))
    mono = {"family": "monospace", "size": 6.8, "color": "#52606d"}
    for x, width, title in (
        (0.2, 4.3, "warpgroup 0, the producer:\n40 or 32 registers a thread"),
        (6.1, 4.1, "shared memory:\nrings of stages"),
        (11.8, 4.0, "warpgroups 1 to 3, consumers:\n232 or 160 registers a thread"),
    ):
        ax.text(x + width / 2, 0.55, title, ha="center", va="center", size=8.5)

    for y, height, text in (
        (1.25, 1.1, "a warp takes tickets and\nannounces work tiles"),
        (2.95, 1.7, "a thread\nloads $K$ and $V$"),
        (5.05, 1.5, "a thread loads $Q$"),
        (7.2, 1.6, "a thread stores $O$"),
    ):
        box(ax, 0.2, y, 4.3, height, text, PALE, size=8.5)
    box(ax, 11.5, 1.3, 4.4, 7.5, "", "white", GREY, linestyle="--")
    ax.text(13.7, 2.65, "every consumer reads all of\nthese, and a lane of each of its\n"
            "warps releases the stages", ha="center", va="center", size=8)  # fmt: skip

    def ring(y, name, stages, color):
        width = 4.1 / stages
        for i in range(stages):
            box(ax, 6.1 + i * width, y, width, 0.8, name.format(i), color, size=8)

    ring(1.4, "tile", 4, "#e5f0e8")
    ring(2.75, "$K$ {}", 2, MEMORY["shared memory"])
    ring(3.85, "$V$ {}", 2, MEMORY["shared memory"])
    for y, name in ((1.8, "work"), (3.15, "k"), (4.25, "v")):
        ax.text(5.3, y - 0.12, f"{name}_full", ha="center", va="bottom", **mono)
        ax.text(10.85, y - 0.12, f"{name}_empty", ha="center", va="bottom", **mono)
        arrow(ax, (4.5, y), (6.1, y))
        arrow(ax, (10.2, y), (11.5, y))
    for group in range(3):
        y, color = 4.95 + 1.3 * group, warpgroup_color(group, 0.3)
        for i in range(2):
            text = f"$Q$ {group + 3 * i}, later $O$"
            box(ax, 6.1 + 2.05 * i, y, 2.05, 1.2, text, color, size=7.5)
        text = f"warpgroup {group + 1}: 64 rows,\n$S$, $P$, $O$ in registers"
        text += "\n(head_dim 64 only)" if group == 2 else ""
        box(ax, 11.7, y, 4.0, 1.2, text, color, size=8)
        ax.add_patch(
            FancyArrowPatch(
                (10.2, y + 0.6), (11.7, y + 0.6), arrowstyle="<|-|>", mutation_scale=10,
                color=TILES[group], linewidth=1,
            )
        )  # fmt: skip
    arrow(ax, (2.35, 2.95), (2.35, 2.35))
    ax.text(2.55, 2.65, "work_started", ha="left", va="center", **mono)
    arrow(ax, (4.5, 5.7), (6.1, 5.7))
    ax.text(5.3, 5.58, "q_full", ha="center", va="bottom", **mono)
    arrow(ax, (6.1, 8.0), (4.5, 8.0))
    ax.text(5.3, 7.88, "out_full", ha="center", va="bottom", **mono)
    arrow(ax, (2.35, 7.2), (2.35, 6.55))
    ax.text(2.55, 6.87, "q_empty", ha="left", va="center", **mono)
    save(figure, folder, "sm90_roles")


def alternating(groups, tiles, product, softmax, exclusive):
    """Times of groups that alternate at the tensor cores: (group, what, tile, start, end).

    One step of a group is S of a tile and, except for the first tile, O += P V of the tile before,
    each of `product` clocks.  The softmax of the tile follows S or, if `exclusive`, the whole step.
    """
    free, ready, done = 0, [0] * groups, []
    for tile in range(tiles):
        for group in range(groups):
            start = max(free, ready[group])
            done.append((group, "S", tile, start, start + product))
            free = begin = start + product
            if tile:
                done.append((group, "PV", tile - 1, free, free + product))
                free += product
            if exclusive:
                begin = free
            done.append((group, "softmax", tile, begin, begin + softmax))
            ready[group] = max(free, begin + softmax)
    return done


def seam(early, product, softmax, epilogue):
    """Two warpgroups from the last step of a tile of queries to the second of the next.

    As `alternating`, with an epilogue after the last P V, before or after the first S of the next
    tile is started. Steps of the next tile have an accent.
    """
    done, free, asked = [], 0, [0, 0]

    def multiply(group, name, start):
        nonlocal free
        start = max(free, start)
        free = start + product
        done.append((group, name, start, free))
        return free

    def work(group, name, start, clocks):
        done.append((group, name, start, start + clocks))
        return start + clocks

    for group in range(2):  # S of the last tile and P V of the one before
        scores = multiply(group, "$S_n$", 0)
        both = multiply(group, "$P_{n-1}V_{n-1}$", 0)
        asked[group] = max(both, work(group, "softmax", scores, softmax))
    asked = [multiply(group, "$P_nV_n$", asked[group]) for group in range(2)]
    for group in range(2):
        start = asked[group]
        written = 0
        if not early:
            start = work(group, "epilogue", start, epilogue)
        scores = multiply(group, "$S'_0$", start)
        if early:
            written = work(group, "epilogue", start, epilogue)
        asked[group] = work(group, "softmax'", max(scores, written), softmax)
    for group in range(2):
        scores = multiply(group, "$S'_1$", asked[group])
        multiply(group, "$P'_0V'_0$", asked[group])
        work(group, "softmax'", scores, softmax)
    return done


def sm90_pipeline(folder):
    """Tensor cores and exponentials over time, in clocks; then the end of a tile of queries."""
    last = 6144
    figure, ax = canvas(7.2, 8.78, (-1.5, 12.65), (-0.75, 16.5))
    alone, start = [], 0
    for tile in range(5):
        for what in ("S", "softmax", "PV"):
            alone.append((0, what, tile, start, start + 512))
            start += 512
    panels = (
        ("one warpgroup, head_dim 128, one thing after the other: the tensor cores rest a third"
         " of the time", 1, alone),
        ("two warpgroups, head_dim 128: products of one tile and of the next are started together",
         2, alternating(2, 7, 512, 512, exclusive=False)),
        ("three warpgroups, head_dim 64, exclusive: one multiplies, two share the exponential"
         " unit", 3, alternating(3, 7, 256, 1024, exclusive=True)),
    )  # fmt: skip
    y = 0.0
    for title, groups, events in panels:
        ax.text(-1.4, y - 0.3, title, size=8.5)
        ax.text(-0.1, y + 0.35, "tensor cores", ha="right", va="center", size=7.5)
        for group in range(groups):
            ax.text(-0.1, y + 1.15 + 0.75 * group, f"softmax, {group + 1}", ha="right",
                    va="center", size=7.5)  # fmt: skip
        for group, what, tile, begin, end in events:
            if begin >= last:
                continue
            x, width = begin / 512, (min(end, last) - begin) / 512
            if what == "softmax":
                row, color, text = y + 0.8 + 0.75 * group, 0.22, f"softmax {tile}"
            else:
                row, color = y, 0.6 if what == "S" else 0.42
                text = f"$S_{tile}$" if what == "S" else f"$P_{tile}V_{tile}$"
            text = text if width > (0.7 if what == "softmax" else 0.35) else ""
            size = 6.8 if what == "softmax" else 7.4 if width < 0.6 else 8.5
            box(ax, x, row, width, 0.7, text, warpgroup_color(group, color), "white", size=size)
        y += 1.65 + 0.75 * groups
    y -= 0.6
    arrow(ax, (0, y), (12.45, y), color=GREY)
    for clocks in range(0, last + 1, 1024):
        ax.plot((clocks / 512,) * 2, (y - 0.08, y + 0.08), color=GREY, lw=0.8)
        ax.text(clocks / 512, y + 0.16, f"{clocks:,}", ha="center", va="top", size=7, color=GREY)
    ax.text(-0.1, y, "clocks", ha="right", va="center", size=7.5, color=GREY)

    y += 1.35
    for title, early in (
        ("between two tiles of queries, up to head_dim 128: the next $S$ is started before the"
         " epilogue", True),
        ("between two tiles of queries, head_dim 192 and 256: it is started after the epilogue",
         False),
    ):  # fmt: skip
        ax.text(-1.4, y - 0.3, title, size=8.5)
        ax.text(-0.1, y + 0.35, "tensor cores", ha="right", va="center", size=7.5)
        for group in range(2):
            ax.text(-0.1, y + 1.15 + 0.75 * group, f"warpgroup {group + 1}", ha="right",
                    va="center", size=7.5)  # fmt: skip
        for group, what, begin, end in seam(early, 1, 1, 2):
            if begin >= 12:
                continue
            if what.startswith("$"):
                row, color = y, 0.6 if what.startswith("$S") else 0.42
            else:
                row = y + 0.8 + 0.75 * group
                color = 0.55 if what == "epilogue" else 0.22
            size = 6.8 if what.startswith("softmax") else 6.4 if "n-1" in what else 7.8
            box(ax, begin, row, min(end, 12) - begin, 0.7, what, warpgroup_color(group, color),
                "white", size=size)  # fmt: skip
        y += 3.15
    y -= 0.6
    arrow(ax, (0, y), (12.45, y), color=GREY)
    ax.text(12.45, y + 0.16, "time", ha="right", va="top", size=7, color=GREY)
    save(figure, folder, "sm90_pipeline")


def sm90_memory(folder):
    """Shared memory of a block, to scale, from the table of kernels."""
    limit = SHARED_LIMIT["sm_90a"]
    rows = [r for r in fwd_sm90.VARIANTS if not r.sparse]
    figure = Figure(figsize=(7.2, 2.9))
    ax = figure.add_axes((0.15, 0.16, 0.83, 0.7))
    dims = (64, 128, 256)
    for y, dim in enumerate(dims):
        fitting = [r for r in rows if r.dim == dim and r.dtype == "float16"]
        row = max(fitting, key=lambda r: r.tile_m)
        width = 128 * -(-dim // 64)  # bytes of a row
        at = 0

        def part(size, text, color, y=y):
            nonlocal at
            ax.add_patch(
                Rectangle((at / 1024, y - 0.33), size / 1024, 0.66, facecolor=color, edgecolor=INK,
                          linewidth=0.7)
            )  # fmt: skip
            ax.text((at + size / 2) / 1024, y, text, ha="center", va="center",
                    size=7 if size > 8192 else 6.2)  # fmt: skip
            at += size

        for stage in range(row.q_stages):
            whole = row.q_stages % row.groups == 0
            users = [stage % row.groups] if whole else range(row.groups)
            for i, group in enumerate(users):
                high = 0.66 / len(users)
                ax.add_patch(
                    Rectangle((at / 1024, y - 0.33 + i * high), 64 * width / 1024, high, lw=0,
                              facecolor=warpgroup_color(group, 0.3))
                )  # fmt: skip
            part(64 * width, f"$Q$ {stage}\n{64 * width // 1024}", "none")
        for name, color in (("K", MEMORY["shared memory"]), ("V", "#c4dcf2")):
            for stage in range(row.stages):
                size = row.tile_n * width
                part(size, f"${name}$ {stage}\n{size // 1024} KB", color)
        rest = row.shared_bytes - at
        ax.add_patch(
            Rectangle((at / 1024, y - 0.4), rest / 1024, 0.8, facecolor=INK, edgecolor=INK, lw=1.2)
        )
        x = at / 1024 + 1.8
        x = x if x + 12 < limit / 1024 else limit / 1024 + 1  # not across the limit's line
        ax.text(x, y, f"{rest} B", va="center", size=7.5)
    ax.axvline(limit / 1024, color=TILES[1], lw=1.4)
    ax.text(limit / 1024, -0.56, f"limit: {limit // 1024} KB", ha="right", va="bottom", size=8,
            color=TILES[1])  # fmt: skip
    ax.set(xlim=(0, limit / 1024 + 13), ylim=(2.5, -0.5), xlabel="KB")
    ax.set_yticks(range(3), [f"head_dim {dim}" for dim in dims])
    ax.set_xticks(range(0, 225, 32))
    ax.tick_params(axis="y", length=0)
    save(figure, folder, "sm90_memory")


def sm90_order(folder):
    """The order of tiles, and what a causal mask leaves of the last tile of each warpgroup."""
    figure, ax = canvas(7.2, 3.5, (-1.6, 19.2), (-1.75, 8.36))
    q_tiles, entries, together, blocks = 6, 6, 3, 10
    for index in range(q_tiles * entries):  # as in work_tile_at, cuda_src/common/tile_scheduler.cuh
        first = index // (together * q_tiles) * together
        tile_in_l2_group = index % (together * q_tiles)
        here = min(together, entries - first)
        tile, entry = q_tiles - 1 - tile_in_l2_group // here, first + tile_in_l2_group % here
        color = matplotlib.colors.to_rgba(TILES[0], 0.1 + 0.75 * (tile + 1) / q_tiles)
        box(ax, 1.2 * entry, 1.05 * tile, 1.2, 1.05, color=color, edge="white")
        ax.text(1.2 * entry + 0.6, 1.05 * tile + 0.525, str(index), ha="center", va="center",
                size=8, color="white" if tile > 2 else INK,
                weight="bold" if index < blocks else "normal")  # fmt: skip
    for tile in range(q_tiles):
        ax.text(-0.15, 1.05 * tile + 0.5, f"tile {tile}", ha="right", va="center", size=7.5)
    for entry in range(entries):
        ax.text(1.2 * entry + 0.6, -0.2, f"head {entry}", ha="center", size=7.5)
    ax.plot((1.2 * together,) * 2, (-0.75, 6.5), color=INK, lw=1.2)
    ax.text(3.6, -1.15, "order of the tiles, two L2 groups", ha="center", size=9)
    ax.text(3.6, 6.75, f"bold: the first tiles of {blocks} blocks;\nthe others come by tickets",
            ha="center", va="top", size=8)  # fmt: skip

    x0, side = 11.0, 1.05  # a cell is 64 queries by 64 keys
    for tile in range(3):
        for group in range(2):
            row = 2 * tile + group
            for col in range(2 * (tile + 1)):
                # Scores of a warpgroup's first tile are computed whole.
                strength = 0.42 if col < row else 0.2 if col == row else 0.1 if tile == 0 else 0
                color = warpgroup_color(group, strength)
                box(ax, x0 + col * side, row * side, side, side, "", color, GREY)
                if col == row:
                    corners = [(col, row), (col, row + 1), (col + 1, row + 1)]
                    ax.fill(*zip(*((x0 + a * side, b * side) for a, b in corners), strict=True),
                            color=warpgroup_color(group, 0.42), lw=0)  # fmt: skip
            ax.text(x0 - 0.15, (row + 0.5) * side, f"warpgroup {group + 1}", ha="right",
                    va="center", size=7.5, color=TILES[group])  # fmt: skip
        for other in range(tile + 1):
            ax.add_patch(Rectangle((x0 + 2 * other * side, 2 * tile * side), 2 * side, 2 * side,
                                   fill=False, edgecolor=INK, linewidth=1.2))  # fmt: skip
    ax.text(x0 + 3 * side, -1.15, "tiles of 128 x 128 under a causal mask", ha="center", size=9)
    ax.text(x0 + 3 * side, 6.75, "white: hidden and not computed;\npale: computed and hidden",
            ha="center", va="top", size=8)  # fmt: skip
    save(figure, folder, "sm90_order")


def chunks(folder):
    """Scores of eight chunks: those that are computed, and those that the state stands for."""
    figure, ax = canvas(7.2, 3.7, (-1.9, 15.3), (-1.1, 7.75))
    side, count, now = 0.8, 8, 5
    for row in range(count):
        for col in range(row):
            color = MEMORY["registers"] if row == now else PALE
            box(ax, col * side, row * side, side, side, color=color, edge="white")
        x = y = row * side
        ax.fill((x, x, x + side), (y, y + side, y + side), color=TILES[0], lw=0)
        ax.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=INK, linewidth=0.8))
    top = count * side
    ax.text(top / 2, -0.35, "keys and values j", ha="center", size=9)
    ax.text(-0.25, top / 2, "queries i", ha="right", va="center", rotation=90, size=9)
    ax.text(-0.25, (now + 0.5) * side, "a chunk", ha="right", va="center", size=8)

    x, wide, high = 8.1, 2.6, 1.25
    before, own = (now + 0.5) * side - 2.9, (now + 0.5) * side + 0.35
    box(ax, x, before, wide, high, "$S = \\sum\\, k_j^\\top v_j$", MEMORY["registers"])
    box(ax, x, own, wide, high, "$\\mathrm{tril}(Q K^\\top)$", TILES[0] + "60")
    arrow(ax, (now * side / 2, (now + 0.2) * side), (x, before + high / 2), GREY,
          connectionstyle="arc3,rad=-0.25")  # fmt: skip
    arrow(ax, ((now + 1) * side, (now + 0.6) * side), (x, own + high / 2), GREY)
    middle = (before + own + high) / 2
    box(ax, x + 4.5, middle - high / 2, wide, high, "$O$", PALE)
    for y, text in ((before, "$Q\\,S$"), (own, "$\\cdot\\, V$")):
        arrow(ax, (x + wide, y + high / 2), (x + 4.5, middle), GREY)
        ax.text(x + wide + 0.6, y + high / 2 + (-0.35 if y == before else 0.4), text, size=9)
    ax.text(x, before - 0.3, "all earlier chunks: E x M numbers", size=8)
    ax.text(x, own + high + 0.45, "the chunk itself: C x C scores", size=8)
    save(figure, folder, "chunks")


def prefix_sums(folder):
    """Four segments summed at once, their states one after the other, then all outputs at once."""
    figure, ax = canvas(7.2, 3.5, (-3.3, 14.1), (-0.75, 7.7))
    count, wide = 4, 3.2
    for index in range(count):
        x, color = 3.5 * index, TILES[index] + "50"
        for part in range(4):
            box(ax, x + part * wide / 4, 0, wide / 4, 0.9, color=color, edge="white")
        ax.text(x + wide / 2, -0.25, f"segment {index}", ha="center", size=8)
        if index < count - 1:
            box(ax, x + 0.6, 2.0, 2.0, 0.8, f"$K_{index}^\\top V_{index}$", color)
            arrow(ax, (x + wide / 2, 0.95), (x + wide / 2, 1.95), GREY)
            arrow(ax, (x + wide / 2, 2.85), (x + 3.5 + 0.7, 3.95), GREY)
            arrow(ax, (x + 2.6, 4.35), (x + 4.1, 4.35), INK)
        box(ax, x + 0.6, 3.95, 2.0, 0.8, f"$S_{index}$", MEMORY["registers"])
        arrow(ax, (x + wide / 2, 4.8), (x + wide / 2, 5.8), GREY)
        for part in range(4):
            box(ax, x + part * wide / 4, 5.85, wide / 4, 0.9, color=color, edge="white")
    for y, text in ((2.4, "1  sums, all at once"), (4.35, "2  states, in order"),
                    (6.3, "3  outputs, all at once")):  # fmt: skip
        ax.text(-3.2, y, text.replace(", ", ",\n    "), va="center", size=8.5)
    ax.text(-3.2, 0.45, "keys, values", va="center", size=8.5)
    ax.text(7, 7.35, "chunk by chunk, each segment from its own state", ha="center", size=8.5)
    save(figure, folder, "prefix_sums")


FIGURES = (
    online_softmax, tiling, visibility, mask_words, masks, alibi, scores, call, fragment, swizzle,
    pipeline, traffic, sm90_roles, sm90_pipeline, sm90_memory, sm90_order, chunks, prefix_sums,
)  # fmt: skip


def main(folder=None):
    folder = Path(folder) if folder else Path(__file__).parent / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        figure(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
