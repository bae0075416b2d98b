"""The command line: ``python -m fa_cupy COMMAND``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
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
    status: int = importlib.import_module(f"fa_cupy.cli.{command}").main(arguments[1:])
    return status


def run() -> int:
    """Run `main` for a shell: output that cannot be written ends it with one line at most."""
    status = 0
    for stream in (sys.stdout, sys.stderr):  # a path may hold what their encoding does not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            status = main()
        finally:  # after --help too, which leaves by SystemExit
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # as in `... | head -1`: the reader has enough
        status = status or 128 + 13  # what a shell says of a program that SIGPIPE ended
    except OSError as error:
        if not status:  # else the command has said what is wrong
            with contextlib.suppress(OSError, AttributeError):  # standard error may be no better
                print(f"fa_cupy: {error}", file=sys.stderr)
        status = status or 1
    finally:
        _drop_what_cannot_be_written()
    return status


def _drop_what_cannot_be_written() -> None:
    """Spare the end of the interpreter a second attempt, with its own message and status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


if __name__ == "__main__":
    sys.exit(run())
