"""``python -m fa_cupy emit``: the PTX of any kernel."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fa_cupy.gpu.driver import compile, devices, nvrtc
from fa_cupy.gpu.kernels.registry import ROWS


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    rows = {row.name: row for row in ROWS}
    parser = argparse.ArgumentParser(
        prog="python -m fa_cupy emit", description="Write the PTX of a kernel."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="the names, and what each is for")
    what.add_argument("--ptx", metavar="NAME", help="one of them")
    parser.add_argument(
        "--target", metavar="SM", help="default: the current device's, else its first"
    )
    parser.add_argument("-o", "--output", type=Path, help="default: the standard output")
    options = parser.parse_args(argv)
    if options.list:
        width = max(map(len, rows))
        for row in rows.values():
            print(f"{row.name:<{width}}  {', '.join(row.targets)}; {row.why}")
        return 0
    if options.ptx not in rows:
        print(f"emit: --ptx is {options.ptx!r}, want a name that --list prints", file=sys.stderr)
        return 1
    row = rows[options.ptx]
    target = options.target or devices.current_target() or row.targets[0]
    if target not in row.targets:
        print(
            f"emit: --target is {target!r}, want {', '.join(row.targets)} for {row.name}",
            file=sys.stderr,
        )
        return 1
    try:
        text = compile.emit_ptx(row, target)
        if options.output:
            options.output.write_text(text)
        else:
            print(text, end="")
    except BrokenPipeError:  # the reader of the output has enough
        raise
    except (ImportError, OSError, nvrtc.CompileError) as error:
        print(f"emit: {error}", file=sys.stderr)
        return 1
    return 0
