"""Many random calls of all kernels, each with a schedule of its own, against the reference.

``python -m validation.emulator --seeds 10000``; a seed names rows, shapes, options, data, schedule.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from fa_cupy.gpu.kernels.variant import Variant
from tests.support import kernel_attention, kernel_gradients, kernel_products
from validation import emulator

#: By name: of each call the rows that compute it, and what draws one for rows and a seed.
FAMILIES = {
    "attention": (kernel_attention.PLAIN, kernel_attention.random_call),
    "mask": (kernel_attention.SPARSE, kernel_attention.random_call),
    "splitkv": (kernel_attention.SPLITKV, kernel_attention.random_keyed_call),
    "product": (kernel_products.ROWS, kernel_products.random_call),
    "backward": (kernel_gradients.ROWS, kernel_gradients.random_call),
}


class Chosen(NamedTuple):
    """What the seeds of a command draw from.

    Attributes
    ----------
    family : str
        Of `FAMILIES`; empty: of all.
    part : str
        A row's name, or a part of several; empty: all.
    source : Path or None
        A kernel in place of the one whose file has its name.
    """

    family: str = ""
    part: str = ""
    source: Path | None = None

    def kinds(self) -> list[tuple[Sequence[Variant], Callable[..., tuple[str, Callable]]]]:
        """Return the rows of each kind of call, and what draws one."""
        found = [
            (rows, random_call)
            for family, (kinds, random_call) in FAMILIES.items()
            for rows in kinds
            if self.family in ("", family) and (self.source is None or self.sources(rows))
        ]
        exact = [kind for kind in found if any(row.name == self.part for row in kind[0])]
        return exact or [kind for kind in found if any(self.part in row.name for row in kind[0])]

    def sources(self, rows: Sequence[Variant]) -> dict[str, Path]:
        """Return what stands in place of the rows' own kernels, by entry."""
        if self.source is None:
            return {}
        named = (row.entry for row in rows if Path(row.source).name == self.source.stem)
        return dict.fromkeys(named, self.source)

    def arguments(self) -> str:
        """Return the command line's."""
        given = {"family": self.family, "row": self.part, "source": self.source}
        return "".join(f" --{name} {value}" for name, value in given.items() if value)


ALL = Chosen()


def one(seed: int, chosen: Chosen = ALL) -> str | None:
    """Run a seed; what went wrong, or None."""
    kinds = chosen.kinds()
    rows, random_call = kinds[seed % len(kinds)]
    text, check = random_call(rows, seed)
    try:
        check(chosen.sources(rows))
    except (emulator.EmulationError, AssertionError) as error:
        return f"seed {seed}: {rows[0].name} on {text}: {error}"
    return None


def sanitizer() -> str | None:
    """Return the path of the compiler's AddressSanitizer, None where there is none."""
    asked = [str(emulator.compiler()), "-print-file-name=libasan.so"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return said if Path(said).is_absolute() else None


def _sanitized(library: str, argv: Sequence[str]) -> int:
    """Run the same command in a process that has AddressSanitizer loaded from its start."""
    more = {"LD_PRELOAD": library, emulator.SANITIZE: "1"}
    # Python itself leaves things behind; fibers leave their stacks without returning.
    more["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0"
    command = [sys.executable, "-m", "validation.emulator", *argv]
    return subprocess.run(command, env={**os.environ, **more}, check=False).returncode


def main(argv: Sequence[str]) -> int:
    """Run the seeds; 1 where one of them fails."""
    p = argparse.ArgumentParser("python -m validation.emulator", description=__doc__)
    p.add_argument("--seeds", type=int, default=100, help="how many")
    p.add_argument("--first", type=int, default=0, help="the first one")
    p.add_argument("--family", default="", choices=FAMILIES, help="kernels; all by default")
    p.add_argument("--row", default="", help="a row's name, or a part of several; empty: all")
    p.add_argument("--source", type=Path, help="a kernel in place of the one of its file's name")
    p.add_argument("--sanitize", action="store_true", help="under AddressSanitizer and UBSan")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = p.parse_args(argv)
    if emulator.compiler() is None:
        print("emulator: there is no C++ compiler")
        return 2
    chosen = Chosen(args.family, args.row, args.source)
    kinds = chosen.kinds()
    if not kinds:
        print(f"emulator: no row for{chosen.arguments()}")
        return 2
    if args.sanitize and emulator.SANITIZE not in os.environ:
        if library := sanitizer():
            return _sanitized(library, argv)
        print("emulator: the compiler has no AddressSanitizer")
        return 2
    seeds = range(args.first, args.first + args.seeds)
    if args.sanitize or args.jobs == 1 or args.seeds <= 8:  # under a debugger, too
        return _report(map(partial(one, chosen=chosen), seeds), seeds, chosen)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of each process
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        return _report(pool.map(one, seeds, repeat(chosen), chunksize=8), seeds, chosen)


def _report(ran: Iterable[str | None], seeds: range, chosen: Chosen) -> int:
    """Print what went wrong as it comes; 1 where something did."""
    failed = 0
    for found in tqdm(ran, total=len(seeds), unit="seed"):
        if found is None:
            continue
        failed += 1
        seed = found.split(":")[0].removeprefix("seed ")
        again = f"python -m validation.emulator --first {seed} --seeds 1{chosen.arguments()}"
        tqdm.write(f"{found}\nagain: {again}")
    print(f"{len(seeds)} seeds over {len(chosen.kinds())} rows, {failed} failed")
    return int(failed > 0)
