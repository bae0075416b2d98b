"""``python -m fa_cupy warmup``: compile kernels ahead of their first call."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product

from tqdm import tqdm

from fa_cupy.cli.info import DTYPES, length, multiprocessors
from fa_cupy.core.linear_problem import ALGORITHMS
from fa_cupy.cpu import thread_pool
from fa_cupy.gpu.driver import compile, cubin_cache, devices, nvrtc
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels import attention_backward
from fa_cupy.gpu.kernels.attention import row_intervals
from fa_cupy.gpu.kernels.attention.full_precision import split_kv
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32_sm90 import FwdFp32Sm90
from fa_cupy.gpu.kernels.attention.full_precision.split_kv import SplitKv
from fa_cupy.gpu.kernels.attention.pairs import bwd_dkdv_pairs, bwd_dq_pairs, fwd_pairs
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PairVariant, row_serving
from fa_cupy.gpu.kernels.attention.splitkv.fwd_splitkv import FwdSplitkv
from fa_cupy.gpu.kernels.backward import Wanted, takes_dims
from fa_cupy.gpu.kernels.forward import ROWS, reachable
from fa_cupy.gpu.kernels.linear.cost_model import choose
from fa_cupy.gpu.kernels.linear.packed import other_rows
from fa_cupy.gpu.kernels.linear.packed.sequence_spans import SEQUENCE_SPANS
from fa_cupy.gpu.kernels.linear.table import PACKED, PRODUCTS
from fa_cupy.gpu.kernels.registry import DECISIONS, GRADIENTS, MASKS, PAIRS, SPLITKV
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES, Variant

# Which kernels a causal product gets depends on how many sequences there are and how long they are.
_ENTRIES = tuple(2**n for n in range(14))
_LENGTHS = tuple(2**n for n in range(4, 22))


def serving(target: str, dtypes: set[str], dims: set[int]) -> list[Variant]:
    """Return the rows that attention of these types and dims gets, in the table's order."""
    chosen = {row for dtype in dtypes for dim in dims for row in reachable(dtype, dim, dim, target)}
    before = [row.split for row in chosen if isinstance(row, FwdFp32Sm90)]
    return [row for row in (*split_kv.VARIANTS, *ROWS) if row in (*before, *chosen)]


def serving_splitkv(target: str, dtypes: set[str], dims: set[int]) -> list[FwdSplitkv]:
    """Return the rows that attention of few queries, however many, gets, in the table's order."""
    chosen = set()
    for dtype, dim in product(dtypes, dims):
        fits = [r for r in SPLITKV if r.dtype == dtype and r.dim >= dim and target in r.targets]
        for tile_m in {row.tile_m for row in fits}:
            holding = [row for row in fits if row.tile_m >= tile_m]
            chosen.add(min(holding, key=lambda row: row.rank))
    return [row for row in SPLITKV if row in chosen]


def serving_backward(target: str, dtypes: set[str], dims: set[int]) -> list[Variant]:
    """Return the rows that gradients of attention get, in the tables' order."""
    chosen: set[Variant] = set()
    walked = [pair for pair in product(dtypes, dims) if takes_dims(*pair)]
    for pair, masked, mapped in product(walked, (False, True), (False, True)):
        rows = attention_backward.select(Wanted(*pair, masked, mapped), target)
        chosen |= {*rows, *MASKS} if rows else set()
    return [row for row in (*GRADIENTS, *MASKS) if row in chosen]


def serving_products(
    target: str, dtypes: set[str], dims: set[int], packed: bool = False
) -> list[Variant]:
    """Return the rows that causal products of these types and dims get, in the table's order."""
    sms = multiprocessors(target)
    calls = product(dtypes, _ENTRIES, _LENGTHS, dims, ALGORITHMS, (True, False))
    chosen: set[Variant] = set()
    for dtype, entries, rows, dim, algorithm, mapped in calls:
        choice = choose(
            dtype, entries, rows, dim, dim, target, sms, algorithm, mapped, packed=packed
        )
        if choice is not None:
            chosen |= {row for row, _, _ in choice.launches(dim, dim)}
    return [row for row in (PACKED if packed else PRODUCTS) if row in chosen]


def serving_packed(target: str, dtypes: set[str], dims: set[int]) -> list[Variant]:
    """Return the rows that calls of packed sequences get, those of products last."""
    plain = [row for row in serving(target, dtypes, dims) if not row.sparse]
    found = [row if isinstance(row, SplitKv) else row.for_sequences(True) for row in plain]
    walked = [pair for pair in product(dtypes, dims) if takes_dims(*pair)]
    for pair, mapped in product(walked, (False, True)):
        wanted = Wanted(*pair, mapped=mapped, packed=True)
        found += attention_backward.select(wanted, target)
    products = serving_products(target, dtypes, dims, packed=True)
    others = [SEQUENCE_SPANS, *(row for row in other_rows.VARIANTS if row.dtype in dtypes)]
    if found:
        found.insert(0, row_intervals.VARIANT)
    if products:
        found += [*others, *products]
    return [*dict.fromkeys(found)]


def serving_dropout(
    target: str, dtypes: set[str], dims: set[int], packed: bool = False
) -> list[Variant]:
    """Return the rows that calls with dropout get, of packed sequences too if they are wanted."""
    forward = serving(target, dtypes & {*DTYPE_NAMES, "float32"}, dims)
    rows = [row for row in forward if not isinstance(row, SplitKv)]
    found: list[Variant] = [row.for_dropout(True) for row in rows]
    walked = list(product(sorted({*dtypes} & {*DTYPE_NAMES}), dims))
    walked = [pair for pair in walked if takes_dims(*pair)]
    for pair, masked, mapped in product(walked, (False, True), (False, True)):
        found += attention_backward.select(Wanted(*pair, masked, mapped, dropout=True), target)
    if packed:
        found += [row.for_sequences(True).for_dropout(True) for row in rows if not row.sparse]
        for pair, mapped in product(walked, (False, True)):
            wanted = Wanted(*pair, mapped=mapped, packed=True, dropout=True)
            found += attention_backward.select(wanted, target)
        found.append(row_intervals.VARIANT.for_dropout(True))
    return [*dict.fromkeys((*found, *DECISIONS[: 1 + packed]))]


def serving_pairs(dtypes: set[str], dims: set[int]) -> list[PairVariant]:
    """Return the rows that calls of these types and dims get for masks of few pairs."""
    families = fwd_pairs.VARIANTS, bwd_dq_pairs.VARIANTS, bwd_dkdv_pairs.VARIANTS
    chosen = {
        row_serving(family, dtype, dim) for family in families for dtype in dtypes for dim in dims
    }
    return [row for row in PAIRS if row in chosen]


def unserved(target: str, dtypes: set[str], dims: set[int]) -> Iterator[str]:
    """Say of each type and dim that no kernel of a target serves why that is."""
    largest: dict[str, int] = {}
    for row in ROWS:
        if target in row.targets:
            largest[row.dtype] = max(row.dim, largest.get(row.dtype, 0))
    for dim, what in product(sorted(dims), sorted(dtypes)):
        if dim > largest[what]:
            yield (
                f"attention of head_dim {dim} in {what} has no kernel, the largest is "
                f"{largest[what]}: such calls run on cuBLAS products"
            )
    for what in sorted(dtypes):
        if not serving_products(target, {what}, dims or {64}):
            yield f"causal products of {what} have no kernel"


def _compile(row: Variant, target: str) -> bool:
    with warnings.catch_warnings():
        # A kernel that cannot be written to the cache was compiled in vain: that is an error here.
        warnings.filterwarnings("error", "kernel cache", UserWarning)
        return compile.compile_variant(row, target).cached


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fa_cupy warmup",
        description="Compile the kernels that calls would use, so that no call has to wait.",
    )
    parser.add_argument("--target", choices=SHARED_LIMIT, help="default: the current device's")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: all")
    parser.add_argument("--head-dim", type=length, action="append", help="default: all")
    parser.add_argument("--packed", action="store_true", help="those of packed sequences too")
    parser.add_argument("--dropout", action="store_true", help="those of calls with dropout too")
    options = parser.parse_args(argv)
    target = options.target or devices.current_target()
    if target is None:
        print("warmup: there is no GPU, want a target, as in --target sm_90a", file=sys.stderr)
        return 1
    dtypes = {DTYPES[name] for name in options.dtype or DTYPES}
    every = (*ROWS, *SPLITKV, *GRADIENTS, *PRODUCTS, *PAIRS)
    dims = set(options.head_dim or (row.dim for row in every))
    rows = serving(target, dtypes, dims) + serving_backward(target, dtypes, dims)
    rows += serving_splitkv(target, dtypes, dims)
    rows += serving_pairs(dtypes, dims) + serving_products(target, dtypes, dims)
    if options.packed:
        rows += serving_packed(target, dtypes, dims)
    if options.dropout:
        rows += serving_dropout(target, dtypes, dims, options.packed)
    rows = [*dict.fromkeys(rows)]
    for why in unserved(
        target, {DTYPES[name] for name in options.dtype or ()}, set(options.head_dim or ())
    ):
        print(f"warmup: {why}", file=sys.stderr)
    if not rows:
        return 1
    start = time.perf_counter()
    kept = 0
    # Processes: NVRTC compiles one kernel at a time in each.
    workers = max(1, min(len(rows), thread_pool.processors()))
    spawn = multiprocessing.get_context("spawn")
    try:
        nvrtc.version()
        folder = cubin_cache.cache_dir()
        with ProcessPoolExecutor(workers, spawn) as pool, tqdm(total=len(rows), unit="") as bar:
            try:
                for done in as_completed([pool.submit(_compile, row, target) for row in rows]):
                    kept += done.result()
                    bar.update()
            finally:  # after an error the rest is not waited for
                pool.shutdown(cancel_futures=True)
    except BrokenPipeError:  # the reader of the output has enough
        raise
    except (ImportError, OSError, nvrtc.CompileError, UserWarning) as error:
        print(f"warmup: {error}", file=sys.stderr)
        return 1
    took = time.perf_counter() - start
    print(
        f"{len(rows) - kept} kernels compiled for {target} in {took:.1f} s, {kept} were there; "
        f"all in {folder}"
    )
    return 0
