"""Errors against float64 over dtypes, lengths and options, on NumPy or CuPy arrays.

For 16-bit inputs an error is judged by that of the same formula computed plainly (float32 scores
and softmax, weights rounded to the dtype before the second product): at most 1.1 times it.

The sweep of causal products, `validation.product_accuracy`, has limits of its own. What products of
float16 lose that stand for those of float32 is computed by `validation.split_accuracy`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from validation import peers, product_accuracy, split_accuracy, store

FAMILY = "accuracy"
PLAIN_FACTOR = 1.1
ERROR_LIMIT = {"fp32": 2e-6, "fp64": 1e-13}
# LSE is float32 of magnitude 10 (float64: 1e-14 of it); it is absolute because it may be 0
LSE_LIMIT = {"fp16": 2e-5, "bf16": 2e-5, "fp32": 2e-5, "fp64": 1e-12}


@dataclass(frozen=True)
class Setting:
    """One set of options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = False
    mask: bool = False
    kv_heads: int = 2
    q_share: float = 1.0  # q_len as a part of the length


SETTINGS = (
    Setting("plain"),
    Setting("causal", {"is_causal": True}),
    Setting(
        "causal bottom_right", {"is_causal": True, "causal_align": "bottom_right"}, q_share=0.4
    ),
    Setting("window", {"window": (37, 11)}),
    Setting("bias", bias=True),
    Setting("mask", mask=True),
    Setting("softcap", {"softcap": 3.0}),
    Setting("negative scale", {"scale": -0.05}),
    Setting("grouped heads", kv_heads=1),
    Setting(
        "all together",
        {"is_causal": True, "causal_align": "top_left", "softcap": 9.0, "window": (300, None)},
        bias=True,
        mask=True,
        kv_heads=1,
        q_share=0.7,
    ),
)
# every setting at these; head_dims beside 64 at the middle length only
LENGTHS = (130, 1000, 4096)
HEAD_DIMS = (40, 128, 256)


@dataclass(frozen=True)
class Case:
    """A setting at a size."""

    dtype: str
    head_dim: int
    length: int
    setting: Setting

    @property
    def name(self) -> str:
        """Such as ``bf16 hd64 1000 causal``."""
        return f"{self.dtype} hd{self.head_dim} {self.length} {self.setting.name}"

    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v and where asked bias and mask on the host."""
        rng = np.random.default_rng(self.length + self.head_dim)
        heads, q_len = 2, max(1, round(self.length * self.setting.q_share))
        dtype = peers.DTYPES[self.dtype]

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(dtype)

        kv = (self.setting.kv_heads, self.length, self.head_dim)
        found = {"q": draw(1, heads, q_len, self.head_dim), "k": draw(1, *kv), "v": draw(1, *kv)}
        if self.setting.bias:
            found["bias"] = draw(heads, 1, self.length)
        if self.setting.mask:
            found["mask"] = rng.random((1, q_len, self.length)) < 0.6
        return found

    def measure(self, device: str) -> store.Row:
        """The row of the case: ``value`` is the error over what it may be."""
        from fa_cupy import attention, reference

        arrays = self.arrays()
        options = dict(self.setting.options)
        if device == "gpu":
            sent = {name: peers.to_device(x) for name, x in arrays.items()}
        else:
            sent = arrays
        out, lse = (peers.to_host(x) for x in attention(**sent, **options, return_lse=True))
        wanted, wanted_lse = reference.attention(**arrays, **options)
        error = float(reference.relative_error(out.astype(np.float64), wanted))
        if self.dtype in ERROR_LIMIT:
            limit = ERROR_LIMIT[self.dtype]
        else:
            plain = reference.plain(**arrays, **options, dtype=out.dtype)
            limit = PLAIN_FACTOR * float(reference.relative_error(plain.astype(np.float64), wanted))
        empty = np.isneginf(wanted_lse)
        if not (np.isneginf(lse) == empty).all():
            lse_error = float("inf")
        else:
            lse_error = float(np.abs(lse[~empty] - wanted_lse[~empty]).max(initial=0.0))
        share = max(error / limit, lse_error / LSE_LIMIT[self.dtype])
        fixed = {"family": FAMILY, "impl": "fa_cupy", "ms": None, "unit": "of the limit"}
        named = {"case": self.name, "value": share, "error": error, "lse_error": lse_error}
        return {**fixed, **named, "limit": limit}


def sweep(lengths: Sequence[int] = LENGTHS, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Case]:
    """All cases."""
    for dtype in peers.DTYPES:
        for setting in SETTINGS:
            yield from (Case(dtype, 64, length, setting) for length in lengths)
            middle = lengths[len(lengths) // 2]
            yield from (Case(dtype, dim, middle, setting) for dim in head_dims)


def table(rows: Sequence[store.Row]) -> str:
    """One line a dtype and setting: the largest share of the limit over its sizes."""
    kinds: dict[tuple[str, str], list[store.Row]] = {}
    for row in rows:
        dtype, _, _, setting = row["case"].split(maxsplit=3)
        kinds.setdefault((setting, dtype), []).append(row)
    dtypes = list(dict.fromkeys(dtype for _, dtype in kinds))

    def worst(found: Sequence[store.Row]) -> str:
        return f"{max(row['value'] for row in found):.2f}" if found else "-"

    lines = [["error over its limit, largest", *dtypes]]
    for setting in dict.fromkeys(setting for setting, _ in kinds):
        lines.append([setting, *(worst(kinds.get((setting, dtype), ())) for dtype in dtypes)])
    return store.align(lines)


def main(argv: Sequence[str]) -> int:
    """Sweep; 1 where an error is over its limit."""
    p = argparse.ArgumentParser("python -m validation accuracy", description="errors over options")
    p.add_argument("--device", choices=("cpu", "gpu"), default=None)
    p.add_argument("--cases", default="", help="only cases whose name contains this")
    p.add_argument("--out", default="", help="JSON file instead of results/accuracy-<device>.json")
    p.add_argument("--split", action="store_true", help="only what products of float16 lose")
    args = p.parse_args(argv)
    if args.split:
        print(split_accuracy.table())
        return 0
    device = args.device or ("gpu" if store.gpu_available() else "cpu")
    everything: list[Case | product_accuracy.Case] = [*sweep(), *product_accuracy.sweep()]
    chosen = [case for case in everything if args.cases in case.name]
    if not chosen:
        print(f"accuracy: no case contains {args.cases!r}")
        return 2
    rows = []
    for case in tqdm(chosen, desc=FAMILY, file=sys.stderr):
        try:
            rows.append(case.measure(device))
        except NotImplementedError as reason:
            print(f"{case.name}: left out: {reason}")
    if not rows:
        return 2
    facts = store.header(device)
    path = Path(args.out) if args.out else store.path_for("accuracy", facts)
    store.merge(path, facts, rows)
    print(table(rows))
    over = [row for row in rows if not row["value"] <= 1.0]
    for row in over:
        error = f"error {row['error']:.2e}, at most {row['limit']:.2e}"
        other = "worst" if "worst" in row else "lse_error"
        print(f"{row['case']}: {error}; {other} {row[other]:.1e}")
    print(f"{facts['device']}, {len(rows)} rows in {path}")
    return int(bool(over))
