"""When copies between GPUs run, and when kernels do: how much of the copies is hidden.

PyTorch's profiler records the kernels and copies of a process on all GPUs, those of CuPy included.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Kernels that wait for copies or put arrays together do not hide a copy.
_WORK = ("attention_", "linear_")
_LIST_OF = 24  # intervals of one device that are listed


class Interval(NamedTuple):
    """What a stream did, in microseconds from the first event of the trace."""

    device: int
    is_copy: bool
    name: str
    begin: float
    end: float


def intervals(events: Iterable[dict[str, Any]]) -> list[Interval]:
    """Return kernels and copies between GPUs in events of a Chrome trace, in the order of time."""
    found = []
    for event in events:
        kind = event.get("cat")
        is_copy = kind == "gpu_memcpy" and "PtoP" in event["name"]
        if is_copy or kind == "kernel":
            begin, device = float(event["ts"]), event["args"]["inDevice" if is_copy else "device"]
            end = begin + float(event["dur"])
            found.append(Interval(int(device), is_copy, event["name"], begin, end))
    start = min((x.begin for x in found), default=0.0)
    moved = [x._replace(begin=x.begin - start, end=x.end - start) for x in found]
    return sorted(moved, key=lambda x: x.begin)


def united(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans that touch."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Return the time that is in spans of both."""
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in united(a) for y in united(b))
    return sum(max(0.0, end - begin) for begin, end in pairs)


def is_work(name: str) -> bool:
    """Whether it is a kernel of attention or of causal products."""
    return any(part in name for part in _WORK)


def summary(found: Sequence[Interval]) -> list[str]:
    """Return lines that say how much of the copies of each device ran while kernels did."""
    lines = []
    for device in sorted({x.device for x in found}):
        mine = [x for x in found if x.device == device]
        copies = [(x.begin, x.end) for x in mine if x.is_copy]
        work = [(x.begin, x.end) for x in mine if not x.is_copy and is_work(x.name)]
        copied = sum(end - begin for begin, end in united(copies))
        busy = sum(end - begin for begin, end in united(work))
        hidden = overlap(copies, work) / copied if copied else 1.0
        span = max(x.end for x in mine) - min(x.begin for x in mine)
        lines.append(
            f"device {device}: {span / 1e3:.2f} ms, kernels {busy / 1e3:.2f} ms, {len(copies)} "
            f"copies {copied / 1e3:.2f} ms, {100 * hidden:.0f}% of them while kernels ran"
        )
    return lines


def listed(found: Sequence[Interval]) -> list[str]:
    """Return a line for each long interval of the first device."""
    first = min((x.device for x in found), default=0)
    mine = [x for x in found if x.device == first and (x.is_copy or is_work(x.name))]
    return [
        f"  {x.begin / 1e3:9.3f} to {x.end / 1e3:9.3f} ms  {'copy' if x.is_copy else x.name}"
        for x in mine[:_LIST_OF]
    ]


def traced(run: Callable[[], Any]) -> list[Interval]:
    """Run something, and return what the GPUs executed meanwhile.

    Raises
    ------
    ImportError
        If torch is not installed.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return intervals(json.loads(path.read_text())["traceEvents"])
