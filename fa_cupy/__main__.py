"""The command line: ``python -m fa_cupy COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import sys

from fa_cupy import __version__

COMMANDS = {
    "info": "what is installed, which kernels would serve a call, where compiled ones are kept",
    "demo": "denoise a photograph by attention",
    "warmup": "compile kernels ahead of their first call",
    "emit": "write the PTX of a kernel",
}


def main(argv: list[str] | None = None) -> int:
    """Hand over to the module of the command, and return its exit status."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="python -m fa_cupy",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="commands (COMMAND -h says more):\n"
        + "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"fa_cupy {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    # Only what stands before the command is read here; its own module reads the rest.
    arguments = sys.argv[1:] if argv is None else argv
    command = parser.parse_args(arguments[:1]).command
    status: int = importlib.import_module(f"fa_cupy._{command}").main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
