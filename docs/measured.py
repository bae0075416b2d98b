"""Tables that are made when the pages are built: from measurements, the planner, the variants.

Each function returns reStructuredText. Without measurements the text says so.
"""

import functools
import re
from pathlib import Path

from fa_cupy.gpu.kernels import forward as gpu
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.tiled import tile_sizes
from validation import readme, report, split_accuracy, store, tiles

RESULTS = Path(__file__).parents[1] / "validation" / "results"
STATIC = Path(__file__).parent / "_static"
NOT_A_SPEED = ("traffic", "tiles")
PRODUCT = "causal_product"  # the begin of the names of its families and pictures
SCORES = ("attention_scores_fwd", "attention_scores_bwd")
SPARSE = readme.SPARSE_FAMILIES
DECODE = "attention_decode"
PACKED = ("attention_packed_fwd", "attention_packed_bwd")
FLOATS = ("attention_float_fwd", "attention_float_bwd")
DROPOUT = ("attention_dropout_fwd", "attention_dropout_bwd")
CPU_SMALL = "cpu_small"
GRAPHS = ("graphs_cpu", "graphs_gpu", "graphs_bwd_gpu", "mask_made_cpu")


def table(head, rows, widths="auto"):
    """Return a list-table of cells, the first row its header."""
    lines = [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for row in (head, *rows):
        # A cell of one dash would be a list.
        cells = [r"\-" if cell == "-" else cell for cell in row]
        lines += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(cells)]
    return "\n".join([*lines, ""])


@functools.cache
def results():
    """Return {device slug: (header, rows)} of the benchmark files that exist."""
    found = {}
    for path in sorted(RESULTS.glob("bench-*.json")):
        header, rows = store.load(path)
        if rows:
            found[path.stem.removeprefix("bench-")] = (header, rows)
    return found


def family(name):
    """Return [(device, row)] of one family that are numbers."""
    return [
        (header.get("cpu", header["device"]), row)
        for header, rows in results().values()
        for row in rows
        if row["family"] == name and "failed" not in row
    ]


def when(dates, newest, versions):
    """A sentence with the days of some rows, and the versions of the newest run of their file."""
    days = sorted({date[:10] for date in dates}) or [newest[:10]]
    if days == [newest[:10]]:
        return f"Measured on {days[0]} with {versions}."
    span = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    return f"Measured {span}. Versions on {newest[:10]}: {versions}."


def versions_of(header):
    """The versions of libraries in a run, as `when` takes them."""
    return ", ".join(f"{k} {v}" for k, v in header.get("versions", {}).items())


def speeds(wanted, picture):
    """Each device's pictures and the tables of its families that are `wanted`; "" for none.

    `picture` is what follows the device in the names of its pictures, as a pattern.
    """
    parts = []
    for slug, (header, rows) in results().items():
        families = [f for f in dict.fromkeys(r["family"] for r in rows) if wanted(f)]
        if not families:
            continue
        name = header.get("cpu", header["device"])
        versions = versions_of(header)
        dates = [row["date"] for row in rows if row["family"] in families and "date" in row]
        parts.append(f".. rubric:: {name}\n\n{when(dates, header['date'], versions)}\n")
        for path in sorted(STATIC.glob(f"bench-{slug}{picture}.png")):
            parts.append(f".. image:: /_static/{path.name}\n   :alt: speeds on {name}\n")
        for f in families:
            text = report.table([r for r in rows if r["family"] == f], report.best_peers(header, f))
            indented = "\n".join(f"   {line}" for line in text.splitlines())
            parts.append(f".. code-block:: text\n\n{indented}\n")
    return "\n".join(parts)


def summary():
    """One row a kind of call: its speed and that of the fastest peer of the same run."""
    found = readme.summary(family)
    if found is None:
        return "No speed has been measured yet. ``make bench`` measures it.\n"
    return table(found.head, found.rows)


def chosen(name):
    """One of the tables of chosen cases, with the paragraph that follows it."""
    found = getattr(readme, name)()
    return "\n\n".join([table(found.head, found.rows), *found.paragraphs, ""])


chosen_forward = functools.partial(chosen, "forward")
chosen_backward = functools.partial(chosen, "backward")
chosen_sparse = functools.partial(chosen, "sparse")
chosen_products = functools.partial(chosen, "products")
chosen_cpu = functools.partial(chosen, "cpu")


def benchmarks():
    """Every device's pictures and tables, but those with a place of their own."""
    elsewhere = {
        *NOT_A_SPEED, *SCORES, *SPARSE, *GRAPHS, *PACKED, *FLOATS, *DROPOUT, CPU_SMALL, DECODE,
    }  # fmt: skip
    found = speeds(lambda f: not (f in elsewhere or f.startswith(PRODUCT)), "")
    return found or "No speed has been measured yet. ``make bench`` measures it.\n"


def causal_product():
    """Pictures and tables of causal products and their gradients."""
    found = speeds(lambda f: f.startswith(PRODUCT), f"-{PRODUCT}")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        "causal_product_fwd,causal_product_bwd`` measures it, on a GPU.\n"
    )


def scores():
    """Pictures and tables of softcap and biases."""
    found = speeds(lambda f: f in SCORES, "-scores")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{','.join(SCORES)}`` measures it, on a GPU.\n"
    )


def decode():
    """Pictures and tables of attention of few queries."""
    found = speeds(lambda f: f == DECODE, "-decode")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{DECODE}`` measures it, on a GPU.\n"
    )


def packed():
    """Pictures and tables of packed sequences."""
    found = speeds(lambda f: f in PACKED, "-packed")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{','.join(PACKED)}`` measures it, on a GPU.\n"
    )


def floats():
    """Pictures and tables of float32 and float64 on a GPU."""
    found = speeds(lambda f: f in FLOATS, "-float")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{','.join(FLOATS)}`` measures it, on a GPU.\n"
    )


def dropout():
    """Pictures and tables of attention with dropout."""
    found = speeds(lambda f: f in DROPOUT, "-dropout")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{','.join(DROPOUT)}`` measures it, on a GPU.\n"
    )


def ring():
    """Several GPUs of one host, compared with one: attention by both ways, and causal products."""
    parts = []
    for path in sorted(RESULTS.glob("ring-*.json"), reverse=True):
        header, rows = store.load(path)
        cases = dict.fromkeys(row["case"] for row in rows)
        found = {(row["case"], row["impl"]): row for row in rows}
        sizes = sorted({int(impl.split()[0]) for _, impl in found} - {1})
        for size in sizes:
            both = [f"{size} GPUs {way}" for way in ("ring", "heads")]
            attention = [
                (ring_case(case), one_gpu(pair[0]), *map(ring_cell, pair))
                for case in cases
                if None not in (pair := [found.get((case, x)) for x in both])
            ]
            products = [
                (ring_case(case), one_gpu(row), ring_cell(row))
                for case in cases
                if (row := found.get((case, f"{size} GPUs scan"))) is not None
            ]
            dates = [row["date"] for row in rows if row["impl"].startswith(f"{size} GPUs")]
            versions = versions_of(header)
            parts.append(f".. rubric:: {size} x {header['device']}\n")
            parts.append(f"{when(dates, header['date'], versions)}\n")
            if attention:
                head = ("Attention", "One GPU", "Ring (model)", "Heads (model)")
                parts.append(table(head, attention, "34 18 24 24"))
            if products:
                head = ("Causal products", "One GPU", f"{size} GPUs")
                parts.append(table(head, products, "34 33 33"))
    return "\n".join(parts) or "No speed of it has been measured yet.\n"


def ring_case(name):
    """The words for a case of `validation.ring`, such as bf16 65536x1 h16 d128 causal fwd."""
    _, tokens, _, _, kind, step = name.split()
    words = {"fwd": "forward", "bwd": "gradients"}[step]
    shown = f"{int(tokens.removesuffix('x1')):,}"
    return f"{shown}, {words}" if kind == "product" else f"{shown}, {kind}, {words}"


def milliseconds(time):
    """A time with three digits."""
    return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"


def one_gpu(row):
    """The time of one GPU that the factor of a row was measured against, in the same run."""
    return f"{milliseconds(row['ms'] * row['speedup'])} ms"


def ring_cell(row):
    """A time, how many times as fast as one GPU, and the time by the model if there is one."""
    model = f" ({milliseconds(row['model_ms'])})" if "model_ms" in row else ""
    return f"{milliseconds(row['ms'])} ms, {row['speedup']:.2f} x{model}"


def split_products():
    """What products of float16 lose, and what they cost: errors are computed, speeds measured."""
    head, *rows = split_accuracy.rows()
    speeds = {"1": float_speeds("tf32"), "3": float_speeds("fp32")}
    return table(
        [*head, "TFLOP/s"], [[*row, speeds.get(row[0].partition(" ")[0], "-")] for row in rows]
    )


def float_speeds(dtype):
    """TFLOP/s of head_dim 128 on the H200, without and with causality; "-" for none."""
    _, rows = results().get("h200", ({}, []))
    own = [row for row in rows if (row["family"], row["impl"]) == (FLOATS[0], "fa_cupy")]
    found = {row["case"]: row["value"] for row in own if "failed" not in row}
    cases = [f"{dtype} hd128 {mask} 4096x4" for mask in ("full", "causal")]
    return " / ".join(f"{found[case]:.0f}" for case in cases if case in found) or "-"


def graphs():
    """Pictures and tables of graphs, and of making masks."""
    found = speeds(lambda f: f in GRAPHS, "-graphs")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{','.join(GRAPHS)}`` measures it, on a CPU.\n"
    )


# What the tables of calls on a CPU are called, and the kinds of their cases.
CPU_TABLES = {
    "Attention": ("attention",),
    "Gradients of attention": ("gradients",),
    "Causal products and their gradients": ("causal_product", "causal_product_gradients"),
    "One row of linear attention": ("linear_attention",),
    "One query": ("decode",),
    "Masks": ("masked", "from_dense"),
}
CPU_COLUMNS = {
    "fa_cupy": "fa_cupy",
    "torch": "PyTorch",
    "jax": "JAX",
    "numpy": "NumPy",
    "numpy_checked": "NumPy with checks",
}


def cpu_small():
    """Pictures and tables of calls on a CPU, most of them small, in microseconds."""
    parts = []
    for slug, (header, rows) in results().items():
        rows = [row for row in rows if row["family"] == CPU_SMALL]
        if not rows:
            continue
        name = header.get("cpu", header["device"])
        newest = max(rows, key=lambda row: row["date"])
        versions = versions_of(header)
        parts.append(
            f".. rubric:: {name}, {header['cores']} cores\n\n"
            f"Measured on {newest['date'][:10]} with {versions}. OpenBLAS ran its kernels for "
            f"{newest['openblas']}.\n"
        )
        for path in sorted(STATIC.glob(f"bench-{slug}-small.png")):
            alt = "microseconds a call over the length, by library"
            image = f".. image:: /_static/{path.name}\n   :width: 560px\n   :alt: {alt}\n"
            parts.append(image)
        parts += [cpu_table(title, kinds, rows) for title, kinds in CPU_TABLES.items()]
    return "\n".join(parts) or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{CPU_SMALL}`` measures it, on a CPU.\n"
    )


def cpu_table(title, kinds, rows):
    """Cases of some kinds, one row each; "" without any."""
    cases = [row["case"] for row in rows if row["case"].split()[1] in kinds]
    over = report.ratios(rows, {})
    found = {(row["case"], row["impl"]): row for row in rows}
    impls = [impl for impl in CPU_COLUMNS if any(row["impl"] == impl for row in rows)]
    lines = []
    for case in dict.fromkeys(cases):
        here = [found.get((case, impl)) for impl in impls]
        peers = [of[case] for of in over.values() if case in of]
        cells = [cpu_cell(row) if row else "-" for row in here]
        lines.append((cpu_case(case), *cells, f"{min(peers):.2f}" if peers else "-"))
    head = ("µs", *(CPU_COLUMNS[impl] for impl in impls), "times as fast")
    return f".. rubric:: {title}\n\n{table(head, lines)}" if lines else ""


def cpu_case(case):
    """What a table calls a case: ``(1, 8, 64, 64), causal`` in float32."""
    dtype, kind, shape, *more = case.split()
    before = {"causal_product_gradients": "gradients, ", "from_dense": "making one, "}.get(kind, "")
    words = [{"bf16": "bfloat16", "fp16": "float16"}.get(dtype, ""), *more]
    axes = f"({shape.replace('x', ', ')})"
    axes = re.sub(r"\((\d+)\^(\d+), ", r"(\1,) * \2 + (", axes)  # as many axes of one size
    axes = axes.replace("*", r"\*")
    return before + ", ".join([axes, *(word.replace("-", " ") for word in words if word)])


def cpu_cell(row):
    """The time of a row, and the rows of its chunks where the fastest size was chosen."""
    chosen = f" ({row['variant'].split()[2]})" if "variant" in row else ""
    return report.shown(row, ",") + chosen


def sparse_masks():
    """Pictures and tables of sparse masks."""
    found = speeds(lambda f: f in SPARSE, "-sparse")
    return found or (
        "No speed of it has been measured yet. ``python -m validation bench --families "
        f"{','.join(SPARSE)}`` measures it, on a GPU.\n"
    )


def traffic():
    """Bytes that ncu counted, compared with the formulas."""
    rows = []
    for device, row in family("traffic"):
        numbers = (f"{row[name]:,.0f}" for name in ("value", "claim", "expected"))
        rows.append((device, f"{row['case']}, {row['impl']}", *numbers))
    if not rows:
        return (
            "No traffic has been measured yet. ``python -m validation traffic`` measures it, on a"
            " GPU with ncu on the path.\n"
        )
    head = ("device", "call", "MB measured", "MB by the formula", "MB if a pass reads arrays once")
    return table(head, rows)


def planned_cpu():
    """The planner's tiles for the CPU, and the fastest measured ones if there are any."""
    rows = []
    for case in tiles.CASES:
        tile = tiles.planned(case)
        itemsize = tiles.compute_dtype(case).itemsize
        size = tile_sizes.footprint(*tile, case.head_dim, case.head_dim, itemsize)
        dtype, dim = tiles.name(case).split(" hd")
        planned = f"{tile.tile_m} x {tile.tile_n}"
        rows.append((dtype, dim, planned, f"{size / 1024:,.0f} KB", *fastest(case, tile)))
    head = ("dtype", "head_dim", "planned", "its size", "fastest", "speed over planned")
    return table(head, rows)


def fastest(case, planned):
    """The tile that took the least time in the newest run, and planned time over its time."""
    found = [row for _, row in family("tiles") if row["case"] == tiles.name(case)]
    newest = max((row.get("date", "") for row in found), default="")
    ms = {row["impl"]: row["ms"] for row in found if row.get("date", "") == newest}
    if not ms:
        return "not measured", "-"
    best = min(ms, key=ms.get)
    of_planned = ms.get(f"{planned.tile_m}x{planned.tile_n}")
    return best.replace("x", " x "), f"{of_planned / ms[best]:.2f}" if of_planned else "-"


def planned_gpu():
    """The planner's tiles for shared memory, and those of the kernels."""
    rows = []
    for dim in sorted({row.dim for row in gpu.VARIANTS}):
        cells = [dim]
        for budget in (99, 163, 227):
            tile = tile_sizes.tile_sizes(dim, dim, 2, budget << 10, 4096, 4096, score_itemsize=4)
            cells.append(f"{tile[0]} x {tile[1]}")
        kernel = next(r for r in gpu.VARIANTS if r.dim == dim)
        cells += [f"{kernel.tile_m} x {kernel.tile_n}", f"{kernel.shared_bytes / 1024:.0f} KB"]
        rows.append(cells)
    head = ("dims", "99 KB", "163 KB", "227 KB", "the kernel's", "its shared memory")
    return table(head, rows)


def q_stages():
    """Stages for rows of Q in the variants of fwd_sm90, and rows of the next tile that fit."""
    stages = {}
    for row in gpu.VARIANTS:
        if isinstance(row, FwdSm90):
            key = (row.dim, row.sparse, row.groups)
            biased = row.for_score(ScoreMod(bias_axes="pair", bias_dtype=row.dtype))
            stages[key] = (row.q_stages, biased.q_stages, biased.groups)
    dims = {}
    for (dim, sparse, groups), of in stages.items():
        dims.setdefault((sparse, groups, *of), []).append(str(dim))

    def ahead(count, groups):
        early = min(count - groups, groups)
        rows = "none" if early == 0 else f"{64 * early} of {64 * groups} rows"
        return f"{count}: {rows}"

    rows = [
        (
            ", ".join(names),
            "yes" if sparse else "no",
            groups,
            ahead(plain, groups),
            ahead(biased, biased_groups),
        )
        for (sparse, groups, plain, biased, biased_groups), names in dims.items()
    ]
    head = (
        "head_dim",
        "mask",
        "warpgroups",
        "stages: rows of the next tile that are loaded during this one",
        "with a 16-bit bias for each query and key",
    )
    return table(head, rows)
