"""Tables of chosen cases, made of the result files: the README's, and the first ones of the docs.

In the README they stand between ``<!-- NAME: from validation/results -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from validation import report, store

README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(r"(<!-- (\w+): from validation/results -->\n).*?(<!-- end -->)", re.DOTALL)
_OTHER_RUN = "†"

# What the first table says of a case: its name there, its family and its case.
SUMMARY = (
    ("Attention", "attention_fwd", "bf16 hd128 full 4096x4"),
    ("Attention, causal", "attention_fwd", "bf16 hd128 causal 4096x4"),
    ("Attention, head_dim 64", "attention_fwd", "bf16 hd64 full 4096x4"),
    ("Gradients of attention", "attention_bwd", "bf16 hd128 full 4096x4"),
    ("Gradients, causal", "attention_bwd", "bf16 hd128 causal 4096x4"),
    ("Softcap", "attention_scores_fwd", "bf16 hd128 full softcap 4096x4"),
    ("ALiBi as a Score", "attention_scores_fwd", "bf16 hd128 full alibi-expression 4096x4"),
    ("Mask with half of its blocks", "attention_sparse", "bf16 hd128 blocks-0.5 8192x1"),
    ("Mask of sixteen documents", "attention_sparse", "bf16 hd128 documents-16 8192x1"),
    ("Decoding, 16 sequences of 32,768 keys", "attention_decode", "bf16 hd128 B16 kv32768"),
    ("Packed sequences, causal", "attention_packed_fwd", "bf16 hd128 causal 8x512-8192"),
    ("Packed sequences, gradients, causal", "attention_packed_bwd", "bf16 hd128 causal 8x512-8192"),
    ("Causal product", "causal_product_fwd", "bf16 E64 4096x8 h16"),
    ("Gradients of the causal product", "causal_product_bwd", "bf16 E64 4096x8 h16"),
    ("Causal product, float32", "causal_product_fwd", "fp32 E64 4096x8 h16"),
    ("Attention in float32", "attention_float_fwd", "fp32 hd128 full 4096x4"),
    ("Attention in float64", "attention_float_fwd", "fp64 hd128 full 4096x4"),
    ("Attention in float32, on a CPU", "attention_cpu", "fp32 hd64 full 2048x1 h8"),
    ("Attention of 64 tokens in float32, on a CPU", "cpu_small", "fp32 attention 1x8x64x64"),
    ("One query and 8,192 keys in float32, on a CPU", "cpu_small", "fp32 decode 1x32x8192x128"),
)
SPARSE_FAMILIES = ("attention_sparse", "attention_bwd_sparse", "mask_pack", "mask_source")
PEERS = {
    "cudnn": "cuDNN",
    "efficient": "PyTorch",
    "flash2": "FlashAttention-2",
    "flex": "FlexAttention",
    "flex_sigmoid": "FlexAttention",
    "fla_chunk": "fla-core",
    "fla_fused_chunk": "fla-core",
    "torch": "PyTorch",
    "torch_chunk": "PyTorch",
    "torch_plain": "PyTorch",
    "jax_plain": "JAX",
    "plain_cupy": "CuPy",
    "jax": "JAX",
    "numpy": "NumPy",
}
# What a table calls a case, and its case.
FORWARD = {
    "head_dim 64, 512x32": "bf16 hd64 full 512x32",
    "head_dim 64, 4096x4": "bf16 hd64 full 4096x4",
    "head_dim 64, causal, 4096x4": "bf16 hd64 causal 4096x4",
    "head_dim 128, 512x32": "bf16 hd128 full 512x32",
    "head_dim 128, 4096x4": "bf16 hd128 full 4096x4",
    "head_dim 128, 16384x1": "bf16 hd128 full 16384x1",
    "head_dim 128, causal, 512x32": "bf16 hd128 causal 512x32",
    "head_dim 128, causal, 4096x4": "bf16 hd128 causal 4096x4",
    "head_dim 128, causal, 16384x1": "bf16 hd128 causal 16384x1",
    "head_dim 256, 4096x4": "bf16 hd256 full 4096x4",
    "head_dim 256, causal, 4096x4": "bf16 hd256 causal 4096x4",
    "4 heads share keys, head_dim 128, causal, 4096x4": "bf16 hd128 causal 4096x4 h32 kv8",
    "window of 1,024, head_dim 128, 8192x1": "bf16 hd128 causal 8192x1 window1024",
}
SPARSE = {
    "no mask": "full",
    "half of all pairs, at random": "elements",
    "the same, of each head its own": "elements-heads",
    "blocks of 128 x 128: all": "blocks-1.0",
    "half of them": "blocks-0.5",
    "a quarter": "blocks-0.25",
    "a tenth": "blocks-0.1",
    "sixteen documents": "documents-16",
    "causal": "causal",
    "window of 1,024": "window-1024",
}
PRODUCTS = {
    "64, 4096 x 8 x 16": "E64 4096x8 h16",
    "128, 4096 x 8 x 16": "E128 4096x8 h16",
    "128, 32768 x 1 x 16": "E128 32768x1 h16",
    "64, 65536 x 1 x 8": "E64 65536x1 h8",
    "64, 1024 x 2 x 4": "E64 1024x2 h4",
}


class Results:
    """The rows of a device's benchmark, looked up as cells of a table.

    Parameters
    ----------
    device : str
        Slug of its name, as in the name of the file.
    """

    def __init__(self, device: str) -> None:
        self.facts, rows = store.load(store.RESULTS / f"bench-{device}.json")
        self._found = {store.key(row): row for row in rows if "failed" not in row}

    def best(self, family: str, case: str, impls: Sequence[str]) -> store.Row | None:
        """The row of the fastest of some implementations."""
        rows = [self._found.get((family, case, impl)) for impl in impls]
        return max((row for row in rows if row and row["value"]), key=report.speed, default=None)

    def cell(
        self, family: str, case: str, *impls: str, field: str = "value", form: str = ",.0f"
    ) -> str:
        """A number of the fastest, marked where fa_cupy's is of another run; - without one."""
        row, ours = self.best(family, case, impls), self.best(family, case, ["fa_cupy"])
        if row is None:
            return "-"
        other = ours is not None and ours["date"] != row["date"]
        return f"{row[field]:{form}}" + other * f" {_OTHER_RUN}"

    def mean(self, family: str, peer: str) -> tuple[int, float, float]:
        """How many cases a peer ran in fa_cupy's run, mean and least of the ratios of speeds."""
        rows = [row for row in self._found.values() if row["family"] == family]
        found = [*report.ratios(rows, {}).get(peer, {}).values()]
        return len(found), store.geometric_mean(found), min(found)


class Table(NamedTuple):
    """A header, rows of cells, and a paragraph that follows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    said: str = ""

    @property
    def paragraphs(self) -> list[str]:
        """What follows the table, with the meaning of its mark if a cell has it."""
        marked = any(_OTHER_RUN in cell for row in self.rows for cell in row)
        note = f"{_OTHER_RUN} in another run on such a card"
        return [text for text in (note * marked, self.said) if text]


#: The rows of a family of cases, each with the name of its device.
Family = Callable[[str], list[tuple[str, store.Row]]]


def stored(family: str) -> list[tuple[str, store.Row]]:
    """Return the rows of a family in the result files that are numbers."""
    return [
        (header.get("cpu", header["device"]), row)
        for path in sorted(store.RESULTS.glob("bench-*.json"))
        for header, rows in [store.load(path)]
        for row in rows
        if row["family"] == family and "failed" not in row
    ]


def _speed(row: store.Row) -> str:
    """What a row shows; under a sparse mask its time, as there a speed counts hidden pairs."""
    if row["family"] in SPARSE_FAMILIES:
        return f"{row['ms']:.3f} ms"
    return f"{report.shown(row, ',')} {row['unit']}"


def summary(family: Family = stored) -> Table | None:
    """One row a kind of call: its newest speed and that of the fastest peer of the same run."""
    lines, devices = [], []
    for name, wanted, case in SUMMARY:
        rows = [(device, row) for device, row in family(wanted) if row["case"] == case]
        of_fa_cupy = [found for found in rows if found[1]["impl"] == "fa_cupy"]
        if not of_fa_cupy:
            continue
        device, own = max(of_fa_cupy, key=lambda found: found[1]["date"])
        peers = [
            row
            for where, row in rows
            if where == device and row["impl"] in PEERS and row["date"] == own["date"]
        ]
        best = max(filter(itemgetter("value"), peers), key=report.speed, default=None)
        cells = [f"{name} ({device})", _speed(own), "-", "-"]
        if best:
            cells[2] = f"{_speed(best)}, {PEERS[best['impl']]}"
            cells[3] = f"{report.speed(own) / report.speed(best):.2f}"
        lines.append(cells)
        devices.append(device)
    if not lines:
        return None
    # Most rows are of one device, which is named once.
    usual = max(devices, key=devices.count)
    where = f"on {usual}s, in bfloat16 unless named"
    head = (where, "fa_cupy", "fastest peer", "times as fast")
    return Table(head, [[cell.replace(f" ({usual})", "") for cell in row] for row in lines])


def front() -> Table:
    """The README's table: the summary, and means over all cases."""
    table, found = summary(), Results("h200")
    assert table is not None
    count, mean, least = found.mean("attention_fwd", "cudnn")
    grads, grads_mean, grads_least = found.mean("attention_bwd", "cudnn")
    known = report.best_peers(found.facts, "attention_fwd")
    fa3 = [f"{known[SUMMARY[i][2]]['fa3']:.0f}" for i in range(3)]
    in_gradients = [_fa3_backward(found, SUMMARY[i][2]) for i in (3, 4)]
    said = (
        f"Over {count} cases of attention the geometric mean is {mean:.2f} times cuDNN, the lowest"
        f" {least:.2f}; over {grads} cases of gradients, {grads_mean:.2f} and {grads_least:.2f}."
        " FlashAttention-3, measured on an H200 in another run, reaches"
        f" {fa3[0]}, {fa3[1]} and {fa3[2]} TFLOP/s in the first three rows, and in gradients"
        f" {in_gradients[0]} and {in_gradients[1]}."
    )
    return table._replace(said=said)


def _fa3_backward(found: Results, case: str) -> str:
    """The TFLOP/s of FlashAttention-3 in gradients, where it is the best known peer."""
    known = report.best_peers(found.facts, "attention_bwd")[case]
    return f"{known['tflops']:.0f}" if known["best"] == "fa3" else "-"


def forward() -> Table:
    """Attention and its peers: cuDNN and FlashAttention."""
    found = Results("h200")
    known = {
        **report.best_peers(found.facts, "attention_fwd"),
        **report.best_peers(found.facts, "attention_options"),
    }
    rows = []
    for label, case in FORWARD.items():
        family = "attention_options" if len(case.split()) > 4 else "attention_fwd"
        impls = (["fa_cupy"], ["cudnn"], ["flash2", "flash2_window"])
        cells = [found.cell(family, case, *names) for names in impls]
        cells += [f"{known[case][name]:.0f}" for name in ("fa3", "fa4")]
        rows.append([label, *cells])
    names = ("fa_cupy", "cuDNN", "FlashAttention-2", "FlashAttention-3", "FlashAttention-4")
    count, mean, least = found.mean("attention_fwd", "cudnn")
    flash = found.mean("attention_fwd", "flash2")[1]
    said = (
        f"Over {count} cases (float16 and bfloat16, lengths 512 to 16,384) the geometric mean is"
        f" {mean:.2f} times cuDNN, the lowest {least:.2f}, and {flash:.2f} times FlashAttention-2."
    )
    return Table(["case, bf16", *names], rows, said)


def backward() -> Table:
    """Gradients of attention and its peers: cuDNN and FlashAttention-3."""
    found = Results("h200")
    rows = []
    for dim in (64, 128, 256):
        cells = []
        for mask in ("full", "causal"):
            case = f"bf16 hd{dim} {mask} 4096x4"
            cells += [found.cell("attention_bwd", case, impl) for impl in ("fa_cupy", "cudnn")]
            cells.append(_fa3_backward(found, case))
        rows.append([str(dim), *cells])
    names = ("fa_cupy", "cuDNN", "FlashAttention-3")
    count, mean, least = found.mean("attention_bwd", "cudnn")
    return Table(
        ["head_dim, 4096x4", *names, *(f"causal: {name}" for name in names)],
        rows,
        f"Over {count} cases (lengths 1,024 to 16,384) the geometric mean is {mean:.2f} times"
        f" cuDNN, the lowest {least:.2f}.",
    )


def sparse() -> Table:
    """Attention under masks, and FlexAttention."""
    found = Results("h200")
    rows = []
    for label, mask in SPARSE.items():
        case = f"bf16 hd128 {mask} 8192x1"
        cells = [
            found.cell("attention_sparse", case, impl, field="ms", form=".3f")
            for impl in ("fa_cupy", "flex")
        ]
        rows.append([label, *cells])
    return Table(["visible pairs", "fa_cupy", "FlexAttention"], rows)


def products() -> Table:
    """Causal products, torch's in chunks and fla-core's."""
    found = Results("h200")
    columns: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
        ("bf16", "fwd", "bf16", ("fa_cupy",)),
        ("PyTorch", "fwd", "bf16", ("torch_chunk",)),
        ("fla-core", "fwd", "bf16", ("fla_chunk", "fla_fused_chunk")),
        ("bf16 gradients", "bwd", "bf16", ("fa_cupy",)),
        ("PyTorch", "bwd", "bf16", ("torch_chunk",)),
        ("fla-core", "bwd", "bf16", ("fla_chunk", "fla_fused_chunk")),
        ("float32", "fwd", "fp32", ("fa_cupy",)),
        ("PyTorch", "fwd", "fp32", ("torch_chunk",)),
    )
    rows = [
        [label]
        + [
            found.cell(f"causal_product_{way}", f"{dtype} {case}", *impls)
            for _, way, dtype, impls in columns
        ]
        for label, case in PRODUCTS.items()
    ]
    return Table(["dim, length x batch x heads", *(name for name, *_ in columns)], rows)


def cpu() -> Table:
    """Attention on a CPU, and PyTorch's."""
    found = Results("cpu")
    rows = []
    for heads, length, dim in ((8, 2048, 64), (8, 2048, 128), (4, 8192, 64)):
        cells = [
            found.cell("attention_cpu", f"fp32 hd{dim} {mask} {length}x1 h{heads}", impl)
            for mask in ("full", "causal")
            for impl in ("fa_cupy", "torch")
        ]
        rows.append([f"{heads}, {length}, {dim}", *cells])
    head = ("heads, length, head_dim", "fa_cupy", "PyTorch", "causal: fa_cupy", "causal: PyTorch")
    return Table(head, rows)


TABLES: dict[str, Callable[[], Table]] = {"front": front}


def _markdown(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return "\n".join([text, *(f"{textwrap.fill(said, 120)}\n" for said in table.paragraphs)])


def renewed(text: str) -> str:
    """Return a page with each of its tables as the results say."""
    return _BLOCK.sub(
        lambda match: f"{match[1]}\n{_markdown(TABLES[match[2]]())}\n{match[3]}", text
    )


def main(argv: list[str]) -> int:
    """Write the README."""
    argparse.ArgumentParser(prog="python -m validation readme", description=__doc__).parse_args(
        argv
    )
    README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0
