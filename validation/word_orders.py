"""Both orders of a mask's words in the same kernel, beside what is claimed of them.

The claim, of a text on sparse masks for Hopper: in an order by threads, a thread reads a quarter of
the bytes, and has 4.5 times fewer instructions to do, than in row-major order.  Here the row of
``fwd_sm90`` for bfloat16 and head_dim 128 is built three times: for words in fragment order, which
is what the package has; for words in row-major order, of which a thread keeps all four of a row;
and for the same words, of which a thread gathers its own bits in one.

Bytes and bank conflicts follow from `fa_cupy.layouts`, registers from the compiler, instructions
from nvdisasm, which says of which function of the sources each one is.  None of it needs a GPU; the
times do.  Where there is none, what does not need it is printed all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from fa_cupy.gpu.kernels.attention.fwd_variants import VariantSm90

from fa_cupy import layouts
from fa_cupy.gpu.driver import compile, nvrtc
from fa_cupy.gpu.kernels.forward import VARIANTS
from validation import bench, cases, peers, report, sparse_peers, store
from validation.families import FAMILIES

FAMILY = "word_orders"
TARGET = "sm_90a"
CASE = cases.MaskedAttention("bf16", 128, "elements", 8192, 1, 16)
#: `VariantSm90.row_major` of each build.
BUILDS = {"fragment": 0, "row_major": 1, "row_major_gathered": 2}
#: What is claimed for a row of scores, 32 of a thread: bytes, instructions, registers.
CLAIMS = {"row_major": (16, 450, 10), "fragment": (4, 100, 2)}
_LAYOUTS = {"fragment": layouts.fragment_address, "row_major": layouts.row_major_address}
_BANKS, _BANK_BYTES = 32, 4


# -------------------------------------------------------------------------------- shared memory
class Loads(NamedTuple):
    """What a warp's loads of the words of one block come to.

    Attributes
    ----------
    bytes : int
        That a thread reads.
    sizes : tuple of int
        Bytes of each of a thread's loads.
    cycles : int
        Of shared memory, for the whole warp.
    conflicts : int
        Those of them that would not be there if no two words were in one bank.
    """

    bytes: int
    sizes: tuple[int, ...]
    cycles: int
    conflicts: int


def cycles(addresses: np.ndarray, size: int) -> tuple[int, int]:
    """Cycles of a warp's load from shared memory, and how many of them are bank conflicts.

    The model: there are 32 banks of 4 bytes.  A warp's load goes through in parts, all 32 lanes for
    4 bytes a lane, half a warp for 8, a quarter for 16, because 128 bytes pass in a cycle.  In a
    part, lanes that read the same word share it; of different words in one bank, one passes in a
    cycle.

    Parameters
    ----------
    addresses : array of int, shape (32,)
        Bytes.
    size : {4, 8, 16}
        Bytes that a lane reads.
    """
    lanes = 32 * _BANK_BYTES // size
    total = 0
    for part in np.reshape(addresses, (-1, lanes)):
        words = np.unique(part[:, None] // _BANK_BYTES + np.arange(size // _BANK_BYTES))
        total += int(np.bincount(words % _BANKS).max())
    return total, total - 32 // lanes


def loads(order: str) -> Loads:
    """What the threads of a warp read of a block whose words are in ``order``.

    Each run of words that lie side by side is one load, as far as 16 bytes.
    """
    lanes = np.arange(32)[:, None]
    tile = layouts.mma(layouts.BLOCK)
    word, _ = _LAYOUTS[order](*tile.element(lanes, np.arange(tile.registers)))
    needed = np.array([np.unique(words) for words in word])  # as many for each lane
    starts = [0, *(1 + np.flatnonzero(np.diff(needed[0]) > 1)), needed.shape[1]]
    runs = [needed[:, a:b] for a, b in pairwise(starts)]
    sizes = tuple(_BANK_BYTES * run.shape[1] for run in runs)
    taken = [cycles(_BANK_BYTES * run[:, 0], n) for run, n in zip(runs, sizes, strict=True)]
    return Loads(sum(sizes), sizes, *(sum(part) for part in zip(*taken, strict=True)))


# ------------------------------------------------------------------------------------- the code
#: Functions in which the order of words plays a part, by the source where they stand: all that is
#: done for a partial block, but for a band that goes through it.
COUNTED = {
    "cuda_src/attention/fwd_sm90.cuh": ("extract_words",),
    "cuda_src/common/block_lists.cuh": ("mask_by_bits",),
    "cuda_src/common/softmax.cuh": ("has_max",),
}


def row(build: str) -> VariantSm90:
    """The row of the table that the case gets, built for a `BUILDS`."""
    found = next(
        r for r in VARIANTS
        if isinstance(r, VariantSm90) and r.sparse and not r.transform
        and (r.dtype, r.dim) == ("bfloat16", CASE.head_dim)
    )  # fmt: skip
    return dataclasses.replace(found, row_major=BUILDS[build])


def lines_of(text: str, function: str) -> range:
    """Lines of a function in a source, counted from 1."""
    lines = text.splitlines()
    head = rf"( *)(?:FA_DEVICE|__device__ __forceinline__) .*\b{function}\("
    first, indent = next((i, m[1]) for i, x in enumerate(lines) if (m := re.match(head, x)))
    last = next(i for i in range(first, len(lines)) if lines[i] == f"{indent}}}")
    return range(first + 1, last + 2)


_PLACE = re.compile(r'"([^"]*)", line (\d+)')
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")


def instructions(listing: str) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
    """Each instruction of a listing by ``nvdisasm -gi``, and its places: (file, line), innermost
    first, then where that was inlined.
    """
    places: list[tuple[str, int]] = []
    fresh = False
    for line in listing.splitlines():
        if "//## File" in line:
            if not fresh:
                places = []
            fresh = True
            file, number = _PLACE.findall(line)[0]
            places.append((file, int(number)))
        elif found := _INSTRUCTION.match(line):
            fresh = False
            yield found[1], tuple(places)


def counted(listing: str) -> float:
    """Instructions that a thread has for the words of a partial block, of a tile of 128 keys.

    The kernel has several copies of each function, for a first tile, for others and for scores that
    are computed again: the mean of them is counted.
    """
    total = 0.0
    for file, functions in COUNTED.items():
        text = (compile.ROOT / file).read_text(encoding="utf-8")
        for function in functions:
            lines = lines_of(text, function)
            copies: dict[tuple[tuple[str, int], ...], int] = {}
            for _, places in instructions(listing):
                at = [i for i, (path, n) in enumerate(places) if path.endswith(file) and n in lines]
                if at:
                    caller = places[at[-1] + 1 :]
                    copies[caller] = copies.get(caller, 0) + 1
            if not copies:
                raise ValueError(f"the listing names no line of {function} in {file}")
            total += sum(copies.values()) / len(copies)
    return total


def live(listing: str) -> int:
    """Most registers that hold something at once, of ``nvdisasm -plr -lrm count``."""
    return max(map(int, re.findall(r"// \|\s*(\d+)\s*\|", listing)))


def _disassembled(program: str, cubin: bytes, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [program, "-c", *options, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def code(build: str, nvdisasm: str | None) -> store.Row:
    """What a build is compiled to; without ``nvdisasm`` only what the compiler says itself."""
    with mock.patch.dict(os.environ, {compile.KEEP_VARIABLE: "1"}):  # asks for line numbers
        made = compile.compile_variant(row(build), TARGET)
    said = compile.resource_report(made.log)
    spilled = said.spill_stores + said.spill_loads
    found: store.Row = {"registers": said.registers, "spilled": spilled}
    if nvdisasm is None:
        return found
    listing = _disassembled(nvdisasm, made.cubin, "-gi")
    return {
        **found,
        "live": live(_disassembled(nvdisasm, made.cubin, "-plr", "-lrm", "count")),
        "instructions": counted(listing),
        "kernel": sum(1 for _ in instructions(listing)),
    }


def static_row(build: str, nvdisasm: str | None) -> store.Row:
    """All of a build that needs no GPU."""
    read = loads("row_major" if BUILDS[build] else "fragment")
    fixed = {"family": FAMILY, "case": "code", "impl": build, "ms": None, "unit": "instructions"}
    made = code(build, nvdisasm)
    value = made.pop("instructions", None)
    return {**fixed, "value": value, "error": None, **read._asdict(), **made}


# -------------------------------------------------------------------------------------- the time
def calls(case: cases.MaskedAttention, arrays: sparse_peers.Arrays) -> dict[str, peers.Call]:
    """A call of each build by the same launches, on the same mask, and one without a mask."""
    import cupy

    from fa_cupy.core import attention_problem
    from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
    from fa_cupy.gpu.masks.binding import CallMask, device_lists
    from fa_cupy.gpu.plan import variant_for

    q, k, v, *made_of = arrays
    device = cupy.cuda.Device().id
    mask = sparse_peers.bit_mask(case, tuple(made_of))
    words = peers.to_host(device_lists(mask, device).words).reshape(-1, *layouts.ORDERS["fragment"])
    row_major = peers.to_device(layouts.pack(layouts.unpack(words), "row_major"))

    def call(build: str | None) -> peers.Call:
        problem = attention_problem.attention_problem(
            q, k, v, None, None if build is None else mask
        )
        out = cupy.full(problem.out_shape, 0x7FFF, np.uint16).view(problem.dtype)  # NaN
        view = attention_problem.out_view(problem, out.shape, out.strides)
        chosen, other = variant_for(problem, device, view), variant_for(problem, device)
        if not isinstance(chosen, VariantSm90) or other is None:
            raise peers.UnavailableError("the comparison is of fwd_sm90, which needs Hopper")
        told, owners = None, ()
        if build is not None:
            chosen = row(build)
            told, owners = CallMask(problem, device)(mask)
            if BUILDS[build]:
                told = told._replace(words=row_major.data.ptr)
        forward = FwdSm90(problem, view, chosen, other, device)
        pointers = (q.data.ptr, k.data.ptr, v.data.ptr, 0, out.data.ptr, 0, 0)

        def run(_owners: Any = (owners, row_major)) -> Any:
            forward(pointers, 0, told)
            return out

        return peers.Call(run, lambda result: result)

    return {"dense": call(None), **{build: call(build) for build in BUILDS}}


def timed(case: cases.MaskedAttention, rounds: int) -> list[store.Row]:
    """Times of all builds in turn.

    Raises
    ------
    RuntimeError
        Where outputs under the mask are wrong, or not the same bit by bit.
    """
    family = FAMILIES["attention_sparse"]
    arrays = sparse_peers.random_cupy(case, 1)
    made = calls(case, arrays)
    check = sparse_peers.masked_check(case, arrays)
    outputs, errors = {}, {}
    for name in BUILDS:
        out = made[name].native(made[name].run())
        outputs[name], errors[name] = peers.to_host(out).tobytes(), check(out)
        if not errors[name] <= report.ERROR_LIMIT[case.dtype]:
            raise RuntimeError(f"{case.name} {name}: relative error {errors[name]:.1e}")
        if outputs[name] != outputs["fragment"]:
            raise RuntimeError(f"{case.name} {name}: the output is not that of fragment order")
    medians = bench.interleaved(made, rounds, family.burst_ms, family.pause_ms, family.rest_ms)
    fixed = {"family": FAMILY, "case": case.name, "unit": family.unit}
    return [
        {**fixed, "impl": name, "ms": ms, "error": errors.get(name),
         "value": case.flops / (ms * 1e-3) / family.per_second}
        for name, ms in medians.items()
    ]  # fmt: skip


# --------------------------------------------------------------------------------------- command
def text_of(static: Sequence[store.Row], times: Sequence[store.Row]) -> str:
    """A column for each build, a line for each thing that was found out."""
    ms = {r["impl"]: r["ms"] for r in times}

    def line(name: str, show: Any) -> list[str]:
        return [name, *(show(r) for r in static)]

    def number(key: str, form: str = "d") -> Any:
        return lambda r: format(r[key], form) if r.get(key) is not None else "-"

    table = [
        ["of a thread, a block", *(r["impl"] for r in static)],
        line("bytes of words", number("bytes")),
        line("loads", lambda r: " + ".join(map(str, r["sizes"]))),
        line("cycles of a warp's loads", number("cycles")),
        line("bank conflicts", number("conflicts")),
        line("instructions", number("value", ".0f")),
        line("registers in use at most", number("live")),
        line("bytes spilled", number("spilled")),
        line("instructions of the kernel", number("kernel")),
    ]
    if times:
        table.append(line("ms", lambda r: f"{ms[r['impl']]:.4f}"))
        table.append(line("over fragment order", lambda r: f"{ms[r['impl']] / ms['fragment']:.3f}"))
        table.append(line("over no mask", lambda r: f"{ms[r['impl']] / ms['dense']:.3f}"))
    return store.align(table)


def main(argv: Sequence[str]) -> int:
    """Compare the orders, as far as there is a GPU and a disassembler."""
    p = argparse.ArgumentParser(
        "python -m validation word_orders", description="both orders of mask words in one kernel"
    )
    p.add_argument("--rounds", type=int, default=15, help="samples of each build")
    p.add_argument("--nvdisasm", default="nvdisasm", help="the disassembler, if not on the path")
    p.add_argument("--out", default="", help="JSON file for all rows instead of results/")
    args = p.parse_args(argv)
    program = shutil.which(args.nvdisasm)
    if program is None:
        print(f"word_orders: no {args.nvdisasm}: instructions are not counted, no code is written")
    try:
        static = [static_row(build, program) for build in BUILDS]
    except ImportError as reason:
        print(f"word_orders: {reason}")
        return 2
    written = []

    def write(kind: str, facts: dict[str, Any], rows: Sequence[store.Row]) -> None:
        path = Path(args.out) if args.out else store.path_for(kind, facts)
        store.merge(path, facts, rows)
        written.append(f"{facts['device']}, {len(rows)} rows in {path}")

    if program is not None:
        version = ".".join(map(str, nvrtc.version()))
        facts = {"device": TARGET, "nvrtc": version, "versions": store.versions()}
        write(FAMILY, {**facts, "date": store.now()}, static)
    times: list[store.Row] = []
    if store.gpu_available():
        try:
            times = timed(CASE, args.rounds)
        except peers.UnavailableError as reason:
            print(f"word_orders: no times: {reason}")
        else:
            write("bench", store.header("gpu"), times)
    else:
        print("word_orders: no times: CuPy and a GPU are needed")
    print("\n".join([text_of(static, times), *written]))
    return 0
