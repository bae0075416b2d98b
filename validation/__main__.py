"""``python -m validation COMMAND``: what runs on a GPU, or beside a peer, and writes results."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "accuracy": ("validation.accuracy", "errors over dtypes, lengths and options"),
    "bench": ("validation.bench", "times, compared with the peers that are installed"),
    "host": ("validation.host_time", "time on the host: a call, a first call, the import"),
    "tiles": ("validation.tiles", "tile sizes of the CPU path around the planned one"),
    "memory": ("validation.memory", "peak memory of a long sequence"),
    "traffic": ("validation.traffic", "bytes through device memory, read by ncu"),
    "dropout": ("validation.dropout", "statistics of the decisions of dropout"),
    "ring": ("validation.ring", "several GPUs, compared with one and with a model"),
    "readme": ("validation.readme", "the README's table, from the results"),
    "turns": ("validation.turns", "gradients with a pause in the order of dQ"),
    "sass": ("validation.sass", "hashes of the kernels' machine code, compared with a table"),
    "fuzz": ("validation.fuzz", "random calls against float64, and as replayed graphs"),
    "outcomes": ("validation.outcomes", "results of all public functions against stored ones"),
    "sanitize": ("validation.sanitize", "compute-sanitizer over a reduced set"),
}


def main(argv: list[str]) -> int:
    """Hand the arguments to a command; list the commands without one."""
    if not argv or argv[0] not in COMMANDS:
        wanted = argv[:1] and argv[0] not in ("-h", "--help")
        if wanted:
            print(f"validation: no command {argv[0]!r}")
        print("usage: python -m validation COMMAND [--help]\n")
        print("\n".join(f"  {name:11} {what}" for name, (_, what) in COMMANDS.items()))
        return 0 if argv and not wanted else 2
    return int(importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
