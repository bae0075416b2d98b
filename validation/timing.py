"""How long calls take: bursts of each in turn, with rests between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from validation.peers import Call

LEAST_ROUNDS = 3  # however long they take
_AGREEING = 3  # samples that show that a minimum was no accident
_SURE_ROUNDS = 8  # before it is asked whether they agree
_MOST_CALLS = 200  # of a burst
_STEP = 10e-3  # seconds: the time of other threads is counted in ticks of 4 ms
_LONGEST_REST = 0.5  # seconds

STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "minimum": min,
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How often calls are timed, what each waits for, and what is taken of the times."""

    burst_ms: float  # how long one sample of one implementation lasts, at least one call
    pause_ms: float = 0.0  # rest before each timed call
    rest_ms: float = 0.0  # rest before each sample
    quiet: bool = False  # before each sample, rest until no thread of the process runs
    warm_ms: float = float("inf")  # no untimed call precedes a sample of calls that take longer
    rounds: int = 5  # samples of each implementation
    seconds: float = float("inf")  # after which no round begins, once there are LEAST_ROUNDS
    agree: float = 0.0  # no round begins once the least samples of each differ by less, as a share
    statistic: str = "median"  # a key of `STATISTICS`


def burst(call: Call, calls: int, pause_ms: float = 0.0, warm: bool = True) -> float:
    """Milliseconds of one call, over ``calls`` of them; one more runs first, untimed, if `warm`.

    That one keeps what the implementation before left behind (clocks, caches) out of the sample.
    With a pause each call is timed by itself, after a rest that is not.
    """
    result = call.run() if warm else None
    if call.wait is not None:
        if warm:
            call.wait(result)
        together = 1 if pause_ms else calls
        seconds = 0.0
        for _ in range(calls // together):
            if pause_ms:
                time.sleep(pause_ms * 1e-3)
            start = time.perf_counter()
            for _ in range(together):
                result = call.run()
            call.wait(result)
            seconds += time.perf_counter() - start
        return seconds * 1e3 / calls
    import cupy

    before, after = cupy.cuda.Event(), cupy.cuda.Event()
    before.record()
    for _ in range(calls):
        call.run()
    after.record()
    after.synchronize()
    return float(cupy.cuda.get_elapsed_time(before, after)) / calls


def wait_until_quiet() -> None:
    """Rest until the threads of this process do.

    Those of OpenMP and OpenBLAS spin after a call, for 10 and 80 ms, before they sleep.
    """
    end = time.perf_counter() + _LONGEST_REST
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(_STEP)
        if time.process_time() - before < _STEP / 5:
            return


def _agree(samples: Mapping[str, Sequence[float]], share: float) -> bool:
    """Whether the least samples of each differ by less than that share."""
    ordered = [sorted(taken) for taken in samples.values()]
    return all(
        len(taken) >= _SURE_ROUNDS and taken[_AGREEING - 1] < taken[0] * (1 + share)
        for taken in ordered
    )


def interleaved(calls: Mapping[str, Call], sampling: Sampling) -> dict[str, float]:
    """Milliseconds of each, measured in turn; every round starts with another one."""
    names = list(calls)
    least = {name: max(burst(calls[name], 1, sampling.pause_ms), 1e-3) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for i in range(sampling.rounds):
        late = time.perf_counter() - begin > sampling.seconds
        if i >= LEAST_ROUNDS and (late or _agree(samples, sampling.agree)):
            break
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(sampling.rest_ms * 1e-3)
            if sampling.quiet:
                wait_until_quiet()
            count = int(min(_MOST_CALLS, max(1, round(sampling.burst_ms / least[name]))))
            warm = least[name] < sampling.warm_ms
            ms = burst(calls[name], count, sampling.pause_ms, warm)
            samples[name].append(ms)
            least[name] = max(min(least[name], ms), 1e-3)
    statistic = STATISTICS[sampling.statistic]
    return {name: statistic(taken) for name, taken in samples.items()}
