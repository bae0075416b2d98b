"""Other settings of a backward kernel beside the table's, on the same inputs and in one run.

A setting is written ``bwd_sm90:tile_m=80,slots=1,soon=0``: the row of the table with other fields;
``+`` joins those of several kernels of a call.
What it computes is held against float64 before it is timed, as in ``bench``.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import fnmatch
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from validation import bench, peers, store
from validation.families import FAMILIES

FAMILY = "attention_bwd"


def replaced(chain: Sequence[Any], setting: str) -> tuple[Any, ...]:
    """Return the rows of a call with one kernel's fields changed, all of them whole numbers.

    Parameters
    ----------
    chain : sequence of BackwardVariant
    setting : str
        ``kernel:field=value,...``, a tuple's values separated by ``/``; empty for no change, and
        several of them joined by ``+``.

    Raises
    ------
    ValueError
        Where the call has no such kernel, or the row no such field.
    """
    from fa_cupy.gpu.kernels.attention.bwd_sm90_variants import BwdConvertDq, BwdSm90

    if not setting:
        return tuple(chain)
    if "+" in setting:
        for one in setting.split("+"):
            if not one:
                raise ValueError(f"{setting}: nothing on one side of a +")
            chain = replaced(chain, one)
        return tuple(chain)
    kernel, _, fields = setting.partition(":")
    values: dict[str, Any] = {}
    for field in fields.split(","):
        name, _, value = field.partition("=")
        numbers = tuple(map(int, value.split("/")))
        values[name] = numbers if len(numbers) > 1 else numbers[0]
    names = [row.source.rpartition("/")[2] for row in chain]
    if kernel not in names:
        raise ValueError(f"{setting}: there is no {kernel!r} among {', '.join(names)}")
    rows = list(chain)
    at = names.index(kernel)
    unknown = set(values) - {field.name for field in dataclasses.fields(rows[at])}
    if unknown:
        raise ValueError(f"{setting}: a row of {kernel} has no {unknown.pop()!r}")
    rows[at] = dataclasses.replace(rows[at], **values)
    if isinstance(rows[at], BwdSm90):  # its pieces are what is rounded; the rest stays as set
        tile_m = rows[at].piece_m
        rows = [
            dataclasses.replace(row, tile_m=tile_m) if isinstance(row, BwdConvertDq) else row
            for row in rows
        ]
    return tuple(rows)


def with_rows(change: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[..., peers.Call]:
    """Make an implementation of the family that runs what `change` makes of the table's rows."""
    from fa_cupy.gpu import attention_backward_plan
    from fa_cupy.gpu.kernels.attention.bwd_sm90_variants import select_bwd

    table = FAMILIES[FAMILY].impls["fa_cupy"]
    plans: dict[Any, Any] = {}  # its own, as those of the other settings have the same keys
    atexit.register(plans.clear)  # as in plan_bwd

    def select(*call: Any) -> Any:
        chain = select_bwd(*call)
        return None if chain is None else tuple(change(chain))

    def make(case: Any, inputs: Any) -> peers.Call:
        call = table(case, inputs)

        def run() -> Any:
            before = attention_backward_plan._plans, attention_backward_plan.select_bwd
            attention_backward_plan._plans, attention_backward_plan.select_bwd = plans, select
            try:
                return call.run()
            finally:
                attention_backward_plan._plans, attention_backward_plan.select_bwd = before

        return call._replace(run=run)

    return make


def _with_setting(setting: str) -> Callable[..., peers.Call]:
    return with_rows(lambda chain: replaced(chain, setting))


def main(argv: Sequence[str]) -> int:
    """Compare settings; 1 where one failed or was wrong."""
    p = argparse.ArgumentParser("python -m validation rows", description=__doc__)
    p.add_argument("settings", nargs="+", help="bwd_sm90:tile_m=80,slots=1 and so on")
    p.add_argument("--cases", default="bf16 hd128 * 4096x4", help="pattern of cases of the bench")
    p.add_argument("--rounds", type=int, default=5, help="samples of each setting")
    p.add_argument("--peers", default="cudnn", help="comma list of peers beside them")
    p.add_argument("--out", default="", help="JSON file")
    args = p.parse_args(argv)
    if not store.gpu_available():
        print("rows: needs CuPy and a GPU, and finds none")
        return 2
    family = FAMILIES[FAMILY]
    impls = {s or "table": _with_setting(s) for s in ("", *args.settings)}
    others = [name for name in args.peers.split(",") if name in family.impls]
    impls |= {name: family.impls[name] for name in others}
    FAMILIES[FAMILY] = dataclasses.replace(family, impls=impls)
    found = []
    for case in family.cases:
        if not fnmatch.fnmatchcase(case.name, args.cases):
            continue
        rows, missing = bench.measure(FAMILY, case, list(impls), args.rounds)
        found += rows
        for row in rows:
            value = row.get("failed") or f"{row['value']:7.1f} {row['unit']}  {row['error']:.1e}"
            print(f"{case.name:28} {row['impl']:48} {value}", file=sys.stdout, flush=True)
        for name in missing.keys() - {row["impl"] for row in rows}:
            print(f"{case.name:28} {name:48} left out: {missing[name]}", flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return int(any("failed" in row for row in found))
