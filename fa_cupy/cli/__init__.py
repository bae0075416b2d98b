"""The commands of ``python -m fa_cupy``, one module each."""


def counted(count: int, noun: str) -> str:
    """Return a number of things: 1 thread, 2 threads."""
    return f"{count} {noun}{'s' * (count != 1)}"
