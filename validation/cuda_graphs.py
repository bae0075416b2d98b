"""CUDA graphs of many calls, so that what Python does for a call is not timed.

The calls of a graph may take turns with copies of their arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from validation import peers

#: Makes the calls of one run, and gives the results of one of each copy.
Run = Callable[[], list[Any]]


def looped(attend: Callable[[int], Any], copies: int, calls: int) -> Run:
    """Return what makes the calls of a graph without one, as for the two below."""
    return lambda: [attend(i % copies) for i in range(calls)][:copies]


def captured(attend: Callable[[int], Any], copies: int, calls: int) -> Run:
    """Return what launches a graph of calls on CuPy's stream.

    Parameters
    ----------
    attend : callable
        Makes a call on the copy of that number, and returns its result.
    copies, calls : int
        How many copies there are, and how many calls are captured.
    """
    cp = peers.module("cupy")
    cp.cuda.Device().synchronize()
    own = cp.cuda.MemoryPool()  # what a graph allocates, nobody else is given
    with cp.cuda.Stream(non_blocking=True) as stream:
        for i in range(copies):
            attend(i)  # compiles and loads
        stream.synchronize()
        with cp.cuda.using_allocator(own.malloc):
            stream.begin_capture()
            results = [attend(i) for i in range(copies)]
            for i in range(copies, calls):
                attend(i % copies)
            graph = stream.end_capture()
    return functools.partial(_launch, graph, results, (own, attend))


def _launch(graph: Any, results: list[Any], owners: Any) -> list[Any]:
    """Launch a graph on CuPy's stream; `owners` of the memory it uses live as long as it does."""
    graph.launch(peers.module("cupy").cuda.get_current_stream())
    return results


def captured_by_torch(attend: Callable[[int], Any], copies: int, calls: int) -> Run:
    """Return what launches a graph of calls on torch's stream; see `captured`."""
    torch = peers.module("torch")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(copies):
            attend(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [attend(i) for i in range(copies)]
        for i in range(copies, calls):
            attend(i % copies)

    def run(owner: Any = attend) -> list[Any]:  # it has arrays that the graph reads
        graph.replay()
        return results

    return run
