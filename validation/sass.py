"""The machine code of every kernel, as one hash for each row and target; needs NVRTC, no GPU.

An edit of the sources that leaves every hash alone leaves alone what a GPU executes. The hashes
hold for one build of NVRTC, which the table names; another one is refused, not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fa_cupy.gpu.driver import compile, nvrtc
from fa_cupy.gpu.kernels.registry import ROWS
from fa_cupy.gpu.kernels.variant import Variant
from validation import digest

TABLE = digest.ROOT / digest.TABLE
#: The targets that are compiled in every run of the tests; the further ones take their time.
USUAL = ("sm_80", "sm_90a")
SAME, DIFFERENT, NO_NVRTC, OTHER_NVRTC = range(4)
ADVICE = "run `python -m validation sass --write` after you have made sure that the change is meant"

# How a section header begins: the offset of its name, then past type, flags and address the place
# and the size of its contents.
_SECTION = struct.Struct("<I20x2Q")
_NO_CONTENTS = 8  # SHT_NOBITS: memory that is reserved
# Banks 2 and 3 hold the compiler's constants and `__constant__` variables.
_CODE = (".text.", ".nv.constant2", ".nv.constant3")
# Bank 4 holds the addresses of global variables. Every constant of a header is such a variable,
# used or not, and their order comes from their names: they count where the code reads the bank.
_GLOBALS = (".nv.constant4", ".nv.global.init")

Entry = dict[str, Any]
Rows = dict[str, dict[str, Entry]]


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the contents of each section of an ELF64 image."""
    (start,) = struct.unpack_from("<Q", cubin, 40)  # e_shoff
    size, count, names = struct.unpack_from("<3H", cubin, 58)  # e_shentsize, e_shnum, e_shstrndx
    headers = [start + size * i for i in range(count)]
    _, strings, _ = _SECTION.unpack_from(cubin, headers[names])
    for header in headers:
        name, place, length = _SECTION.unpack_from(cubin, header)
        (kind,) = struct.unpack_from("<I", cubin, header + 4)
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        yield text, b"" if kind == _NO_CONTENTS else cubin[place : place + length]


def reads_globals(code: bytes) -> bool:
    """Whether an instruction has an operand in constant bank 4.

    An instruction has 128 bits since SM70. Bits 9 to 11 say what its operands are, with 3 and 5 for
    one in a constant bank, and bits 54 to 58 which bank.
    """
    words = struct.unpack(f"<{len(code) // 8}Q", code)[::2]
    return any(word >> 9 & 7 in (3, 5) and word >> 54 & 31 == 4 for word in words)


def code_hash(compiled: compile.Compiled) -> str:
    """Hash what the GPU executes of a compiled kernel, whatever its parts are called.

    Registers, stack and shared memory belong to it: a launch gets them.
    """
    found = list(sections(compiled.cubin))
    parts = _CODE
    if any(name.startswith(".text.") and reads_globals(data) for name, data in found):
        parts += _GLOBALS
    # Sorted, because the order of sections may come from their names.
    contents = sorted(
        (part, hashlib.sha256(data).hexdigest())
        for name, data in found
        for part in parts
        if name.startswith(part)
    )
    used = compile.resource_report(compiled.log)
    facts = [contents, used.registers, used.stack, used.static_shared]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def version() -> str:
    """Return NVRTC's release, with the build where a wheel of it is installed.

    Raises
    ------
    ImportError
        If NVRTC or its bindings are missing.
    """
    major, minor = nvrtc.version()
    for name in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.startswith(f"{major}.{minor}."):
            return found
    return f"{major}.{minor}"


def read(path: Path) -> tuple[str, Rows]:
    """Return the NVRTC and the rows of a table."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return table["nvrtc"], table["rows"]


def write(path: Path, made_with: str, rows: Rows) -> None:
    """Write a table, a line for each row."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
    path.write_text(
        f'{{"nvrtc": {json.dumps(made_with)},\n "rows": {{\n{lines}\n}}}}\n', encoding="utf-8"
    )


def targets_of(row: Variant) -> list[str]:
    """Return the usual targets that a row has."""
    return [target for target in USUAL if target in row.targets]


def entry_of(compiled: compile.Compiled) -> Entry:
    """Return what the table says of a compiled kernel; only the code is compared."""
    used = compile.resource_report(compiled.log)
    spilled = used.spill_stores + used.spill_loads
    return {"code": code_hash(compiled), "registers": used.registers, "spilled": spilled}


def _compiled(row: Variant, target: str) -> Entry:
    compiled = compile.compile_variant(row, target)
    if not compile.resource_report(compiled.log).registers:
        # NVRTC keeps what it compiles, too, and then says nothing of registers: so it is where two
        # processes have compiled a kernel at the same time. Here that cache is off.
        compiled = compile.compile_variant(row, target, anew=True)
    return entry_of(compiled)


def _without_cache_of_nvrtc() -> None:
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # CUDA C++ Programming Guide, "Environment Variables"


def compiled_rows(rows: Sequence[Variant]) -> Rows:
    """Compile rows for their usual targets and return what the table should say of them."""
    jobs = [(row, target) for row in rows for target in targets_of(row)]
    found: Rows = {row.name: {} for row in rows}
    workers = max(1, min(len(jobs), len(os.sched_getaffinity(0))))
    # Processes, as in warmup: NVRTC compiles one kernel at a time in each.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _without_cache_of_nvrtc) as pool:
        entries = pool.map(_compiled, *zip(*jobs, strict=True))
        bar = tqdm(entries, total=len(jobs), unit="kernel", desc="sass", file=sys.stderr)
        for (row, target), entry in zip(jobs, bar, strict=True):
            found[row.name][target] = entry
    return found


def changes(recorded: Rows, found: Rows) -> list[str]:
    """Say which rows differ between a table and what was compiled, a line for each target."""
    lines = []
    for name in sorted(recorded.keys() | found.keys()):
        old, new = recorded.get(name, {}), found.get(name, {})
        for target in sorted(old.keys() | new.keys()):
            if target not in new:
                lines.append(f"gone     {name} {target}")
            elif target not in old:
                lines.append(f"new      {name} {target}: {_used(new[target])}")
            elif old[target]["code"] != new[target]["code"]:
                used = f"{_used(old[target])}, now {_used(new[target])}"
                lines.append(f"changed  {name} {target}: {used}")
    return lines


def _used(entry: Mapping[str, Any]) -> str:
    return f"{entry['registers']} registers, {entry['spilled']} B spilled"


def main(argv: Sequence[str]) -> int:
    """Compare the machine code with the table, or renew the table."""
    p = argparse.ArgumentParser(
        "python -m validation sass", description="hashes of the machine code of every kernel"
    )
    p.add_argument("--write", action="store_true", help="renew the table")
    p.add_argument("--rows", default="*", metavar="PATTERN", help="names of rows, with * and ?")
    args = p.parse_args(argv)
    chosen = [row for row in ROWS if fnmatchcase(row.name, args.rows)]
    if not chosen:
        p.error(f"no row is called {args.rows}")
    try:
        current = version()
    except ImportError as reason:
        print(f"sass: {reason}")
        return NO_NVRTC
    made_with, recorded = read(TABLE) if TABLE.exists() else (current, {})
    # A part of the table cannot be renewed with another NVRTC than the rest.
    if made_with != current and not (args.write and args.rows == "*"):
        print(f"sass: the table was made with NVRTC {made_with}, this is {current}: not compared")
        return OTHER_NVRTC
    found = compiled_rows(chosen)
    before = {name: row for name, row in recorded.items() if fnmatchcase(name, args.rows)}
    different = changes(before, found)
    if not different:
        print(f"sass: the machine code of all rows chosen ({len(found)}) is as in the table")
    elif recorded:
        print("\n".join(different))
    if args.write:
        rest = {name: row for name, row in recorded.items() if name not in before}
        write(TABLE, current, rest | found)
        print(f"sass: {len(rest | found)} rows in {TABLE}")
        return SAME
    if different:
        print(f"sass: {len(different)} differences; {ADVICE}")
    return DIFFERENT if different else SAME
