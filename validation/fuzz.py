"""Random calls for a given time: against float64, and captured into graphs that are replayed.

Every call is drawn by hypothesis, with the strategies of the tests, and of one of these kinds:
attention, with key lengths, pages and offsets too, its gradients, causal products, with offsets
too, their gradients (each held against float64), and, on a GPU, calls of offsets that are out of
order, attention in float32, TF32 and float64 and its gradients once more, of dims that need few
kernels, and any of them captured into a graph.  A captured call is replayed three times while all
memory that it gave back belongs to others: results must be the bits of an eager call, and the
others' memory must stay as it is.

Several processes share the device, each with seeds of its own, until the time is up.  In every
second one ``fwd_fp32_sm90`` computes calls of few queries too, for which ``fwd_fp32`` is faster.  A
finding is printed with the example that hypothesis reduced it to.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from tqdm import tqdm

from fa_cupy import reference
from fa_cupy.gpu.kernels.attention.full_precision import fwd_fp32_sm90
from validation import store

EXAMPLES = 25  # of a kind, before the next kind has its turn
MODES = ("streamCaptureModeGlobal", "streamCaptureModeThreadLocal", "streamCaptureModeRelaxed")
REFUSED: list[str] = []  # what captured calls of this process said
_PATTERN = 0x5A  # of memory that belongs to others


# ------------------------------------------------------------------------------------------ calls
def attention_call(xp: Any, case: Any, gradient: bool) -> Callable[[], tuple[Any, ...]]:
    """Return a call of `attention`, or of it and `attention_backward`, on arrays of a case."""
    from fa_cupy import attention, attention_backward
    from tests.support import keyed_cases
    from tests.support.strategies import normal

    *qkv, bias, mask = case.native(xp)
    options = keyed_cases.native_options(xp, case.options)
    shape = (*_batch(case), case.q.shape[-2], case.v.shape[-1])
    dout = xp.asarray(normal(np.random.default_rng(7), shape, case.q.dtype))

    def run() -> tuple[Any, ...]:
        out, lse = attention(*qkv, bias, mask, return_lse=True, **options)
        if not gradient:
            return out, lse
        grads = attention_backward(dout, *qkv, out, lse, bias, mask, **options)
        return out, lse, *grads

    return run


PRODUCTS = ("causal_product", "causal_product_backward", "linear_attention")


def product_call(xp: Any, case: Any, name: str) -> Callable[[], tuple[Any, ...]]:
    """Return a call of one of `PRODUCTS` on arrays of a case."""
    from fa_cupy import causal_product, causal_product_backward, linear_attention
    from tests.support.strategies import normal

    *qkv, initial = case.native(xp)
    options = {"initial_state": initial, "reverse": case.reverse}
    if name == "linear_attention":
        return lambda: (linear_attention(*qkv),)
    if name == "causal_product":
        return lambda: causal_product(*qkv, return_state=True, **options)
    shape = reference.causal_product(*case.arrays)[0].shape
    dout = xp.asarray(normal(np.random.default_rng(7), shape, case.q.dtype))
    return lambda: causal_product_backward(dout, *qkv, **options)


def packed_product_call(xp: Any, packed: Any, gradient: bool) -> Callable[[], tuple[Any, ...]]:
    """Return a call of `causal_product` with packed sequences, or of its gradients."""
    from fa_cupy import causal_product, causal_product_backward
    from tests.support.strategies import normal

    q, k, v, _ = packed.case.native(xp)
    options = packed.options(xp)
    if not gradient:
        return lambda: causal_product(q, k, v, return_state=True, **options)
    shape = reference.causal_product(*packed.case.arrays)[0].shape
    dout = xp.asarray(normal(np.random.default_rng(7), shape, packed.case.q.dtype))
    return lambda: causal_product_backward(dout, q, k, v, **options)


def _batch(case: Any) -> tuple[int, ...]:
    """Return the batch axes of a case's output: those of q, which may have more heads."""
    return reference.attention(*case.arrays, **case.options)[1].shape[:-1]


# ----------------------------------------------------------------------------------------- graphs
def hold_all_free(pool: Any) -> list[Any]:
    """Take all memory that a pool has free, as arrays of a pattern."""
    import cupy

    taken: list[Any] = []
    pool.set_limit(size=max(pool.total_bytes(), 1))
    size = 1 << max(9, int(pool.free_bytes()).bit_length())
    while size >= 512:  # the pool's unit
        try:
            memory = pool.malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            size //= 2
            continue
        taken.append(cupy.ndarray(size, np.uint8, memory))
        taken[-1].fill(_PATTERN)
    pool.set_limit(size=0)
    return taken


def _bits(arrays: Sequence[Any]) -> list[bytes]:
    return [x.get().tobytes() for x in arrays]


def check_captured(run: Callable[[], tuple[Any, ...]], mode: str) -> None:
    """Capture a call that ran once before, and look at what its replays write."""
    import cupy

    cupy.cuda.Device().synchronize()
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.using_allocator(pool.malloc), stream:
        # The pool can grow in no mode but relaxed: it gets more than the results of one call.
        before = [run() for _ in range(3)]
        want = _bits(before.pop())
        del before
        stream.begin_capture(getattr(cupy.cuda.runtime, mode))
        try:
            found = run()
        except NotImplementedError as refusal:  # needs cuBLAS or the host, which no graph records
            if "cannot be captured" not in str(refusal):
                raise
            REFUSED.append(str(refusal))
            return
        finally:
            graph = stream.end_capture()
        others = hold_all_free(pool)
        stream.synchronize()
        for _ in range(3):
            for x in found:
                x.view(np.dtype(f"u{x.itemsize}")).fill(2 ** (8 * x.itemsize) - 1)  # NaN
            graph.launch(stream)
            stream.synchronize()
            if _bits(found) != want:
                raise AssertionError("a replay gives other bits than an eager call")
            if not all(bool((x == _PATTERN).all()) for x in others):
                raise AssertionError("a replay writes to memory that it gave back")
        del graph, found, others
        stream.synchronize()


# ------------------------------------------------------------------------------------------ kinds
def kinds(xp: Any) -> dict[str, Any]:
    """Return the kinds of calls as functions of what hypothesis draws, with their strategies."""
    from tests.support import gradients, keyed_cases, products, strategies
    from tests.support.strategies import to_numpy

    def forward(case: Any) -> None:
        out, lse = attention_call(xp, case, False)()
        strategies.check_against_reference(case, to_numpy(out), to_numpy(lse))

    def backward(case: Any, dlse: bool) -> None:
        gradients.check(xp, case, dlse)

    def product(case: Any) -> None:
        out, state = products.solve(xp, case)
        products.check_product(case, out, state, rounded=_rounded(xp, case))

    def product_backward(case: Any, dstate: bool) -> None:
        products.check_gradients(xp, case, dstate, rounded=_rounded(xp, case))

    def packed_product(packed: Any, dstate: bool) -> None:
        products.check_packed(xp, packed, dstate, rounded=_rounded(xp, packed.case))

    def any_offsets(case: Any) -> None:
        same, invalid = keyed_cases.by_mask(case)
        out, lse = map(to_numpy, attention_call(xp, case, False)())
        assert np.isnan(lse[..., invalid]).all()
        assert np.isnan(out[..., invalid, :].astype(np.float64)).all()
        want, want_lse = reference.attention(*same.arrays, **same.options)
        out[..., invalid, :], lse[..., invalid] = want[..., invalid, :], want_lse[..., invalid]
        strategies.check_against_reference(same, out, lse)
        (dout, _), found = gradients.solve(xp, case)
        gradients.hold(same, found, dout, None, strategies.UNIT[case.q.dtype])

    def captured_attention(case: Any, gradient: bool, mode: str) -> None:
        check_captured(attention_call(xp, case, gradient), mode)

    def captured_product(case: Any, name: str, mode: str) -> None:
        check_captured(product_call(xp, case, name), mode)

    def captured_packed_product(packed: Any, gradient: bool, mode: str) -> None:
        check_captured(packed_product_call(xp, packed, gradient), mode)

    calls = {"case": strategies.cases()}
    of_products = {"case": products.cases()}
    finite = {"case": strategies.cases().filter(_is_finite), "dlse": st.booleans()}
    found = {
        "attention": (forward, calls),
        "attention with k_lengths": (forward, {"case": keyed_cases.cases_with_lengths()}),
        "attention with page_table": (forward, {"case": keyed_cases.paged_cases()}),
        "attention with q_offsets": (forward, {"case": keyed_cases.packed_cases()}),
        "attention_backward": (backward, finite),
        "attention_backward with k_lengths": (
            backward,
            {"case": keyed_cases.cases_with_lengths(finite=True), "dlse": st.booleans()},
        ),
        "attention_backward with q_offsets": (
            backward,
            {"case": keyed_cases.packed_cases(finite=True), "dlse": st.booleans()},
        ),
        "causal_product": (product, of_products),
        "causal_product_backward": (product_backward, {**of_products, "dstate": st.booleans()}),
        "causal_product with q_offsets": (
            packed_product,
            {"packed": products.packed_cases(), "dstate": st.booleans()},
        ),
    }
    if xp is not np:  # the host's own offsets are in order, or the call is refused
        found["attention with any q_offsets"] = (
            any_offsets,
            {"case": keyed_cases.cases_of_any_offsets()},
        )
        found |= full_precision_kinds(xp)
        mode = {"mode": st.sampled_from(MODES)}
        gradient = {"gradient": st.booleans(), **mode}
        found["captured attention"] = (captured_attention, {**calls, **gradient})
        in_pages = {"case": keyed_cases.paged_cases(), "gradient": st.just(False), **mode}
        found["captured attention, pages"] = (captured_attention, in_pages)
        lengths = {"case": keyed_cases.cases_with_lengths(finite=True), **gradient}
        found["captured attention, lengths"] = (captured_attention, lengths)
        packed = {"case": keyed_cases.packed_cases(finite=True), **gradient}
        found["captured attention, offsets"] = (captured_attention, packed)
        name = {"name": st.sampled_from(PRODUCTS), **mode}
        found["captured products"] = (captured_product, {**of_products, **name})
        packed = {"packed": products.packed_cases(), **gradient}
        found["captured products, offsets"] = (captured_packed_product, packed)
    return found


def full_precision_kinds(xp: Any) -> dict[str, Any]:
    """Return kinds of calls in float32, TF32 and float64, as `kinds` does."""
    from fa_cupy import attention
    from tests.support import gradients, strategies
    from tests.support.strategies import to_numpy

    def forward(case: Any, dtype: str) -> None:
        options: dict[str, Any] = dict(case.options)
        if dtype == "tf32":
            options["precision"] = "tf32"
        found = attention(*case.native(xp), return_lse=True, **options)
        rounded = 2.0**-11 if dtype == "tf32" else 0.0
        strategies.check_against_reference(case, *map(to_numpy, found), rounded=rounded)

    def backward(case: Any, dtype: str, dlse: bool) -> None:
        gradients.check(xp, case, dlse)

    found: dict[str, Any] = {}
    for dtype in ("float32", "tf32", "float64"):
        of = np.dtype(np.float64 if dtype == "float64" else np.float32)
        drawn = strategies.cases((of,), few_builds=True)
        same = {"dtype": st.just(dtype)}
        found[f"{dtype} attention"] = forward, {"case": drawn, **same}
        if dtype != "tf32":  # whose gradients are those of float32
            of_finite = {"case": drawn.filter(_is_finite), "dlse": st.booleans(), **same}
            found[f"{dtype} attention_backward"] = backward, of_finite
    return found


def _rounded(xp: Any, case: Any) -> bool:
    """Whether scores and states are rounded to the dtype, as kernels do."""
    return xp is not np and case.q.dtype.itemsize == 2


def _is_finite(case: Any) -> bool:
    """Whether q, k and v are: which gradients others reach is another test's matter."""
    return all(np.isfinite(x.astype(np.float64)).all() for x in case.arrays[:3])


# ------------------------------------------------------------------------------------------- runs
def campaign(xp: Any, seed: int, seconds: float, only: str = "") -> int:
    """Draw calls until the time is up; print a line for each batch of them; 1 after a finding.

    `only` is what the name of a kind matches, a regular expression.
    """
    until = time.perf_counter() + seconds
    if xp is not np and seed % 2:
        fwd_fp32_sm90.LEAST_ROWS = 1
    chosen = {name: kind for name, kind in kinds(xp).items() if re.search(only, name)}
    failed = batch = 0
    while chosen and time.perf_counter() < until:
        for name, (check, drawn) in list(chosen.items()):
            batch += 1
            try:
                ran = draw_batch(check, drawn, seed * 1_000_003 + batch, until)
            except Exception:  # whatever it is, it is a finding
                failed, ran = 1, 1
                del chosen[name]  # the others go on
                print(f"FINDING {name}, seed {seed}, batch {batch}\n{traceback.format_exc()}")
            print(f"RAN {ran - len(REFUSED)} {name}")
            print(f"RAN {len(REFUSED)} {name}, refused", flush=True)
            REFUSED.clear()
            if time.perf_counter() > until:
                break
    return failed


def draw_batch(
    check: Callable[..., None], drawn: dict[str, Any], seed: int, until: float = math.inf
) -> int:
    """Check some examples, none after the time is up; return how many."""
    ran = 0

    @functools.wraps(check)
    def counted(**given: Any) -> None:
        nonlocal ran
        if time.perf_counter() > until:
            return  # a kernel that is compiled takes seconds, and 25 of them minutes
        ran += 1
        hypothesis.note(str(given))
        check(**given)

    settings = hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    settings(hypothesis.seed(seed)(hypothesis.given(**drawn)(counted)))()
    return ran


def follow(workers: Sequence[subprocess.Popen[str]], seconds: float) -> tuple[Counter[str], str]:
    """Read what workers print, with a bar for the time; return how much ran, and all findings."""
    ran: Counter[str] = Counter()
    findings: list[str] = []

    def read(worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:  # ends when the worker does
            if line.startswith("RAN "):
                _, count, name = line.split(maxsplit=2)
                ran[name.strip()] += int(count)
            else:
                findings.append(line)

    threads = [threading.Thread(target=read, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    with tqdm(total=round(seconds), unit="s", desc="fuzz", file=sys.stderr) as bar:
        while any(thread.is_alive() for thread in threads):
            time.sleep(1)
            bar.update(min(1, bar.total - bar.n))
            bar.set_postfix(calls=ran.total(), refresh=False)
    return ran, "".join(findings)


def main(argv: Sequence[str]) -> int:
    """Run workers until the time is up; 1 where one found something or died."""
    p = argparse.ArgumentParser("python -m validation fuzz", description=__doc__)
    p.add_argument("--seconds", type=float, default=60.0, help="for how long")
    p.add_argument("--jobs", type=int, default=8, help="processes")
    p.add_argument("--seed", type=int, default=None, help="of the first process")
    p.add_argument("--kinds", default="", help="only kinds whose name matches, as '^(float|tf)'")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    seed = int.from_bytes(os.urandom(3), "little") if args.seed is None else args.seed
    if args.worker:
        xp: Any = np
        if store.gpu_available():
            import cupy as xp
        return campaign(xp, seed, args.seconds, args.kinds)
    command = [sys.executable, "-m", "validation", "fuzz", "--worker", f"--kinds={args.kinds}"]
    command += ["--seconds", str(args.seconds), "--seed"]
    workers = [
        subprocess.Popen([*command, str(seed + i)], stdout=subprocess.PIPE, text=True)
        for i in range(args.jobs)
    ]
    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.enter_context(worker)  # closes its pipe and waits for it
        ran, findings = follow(workers, args.seconds)
    died = [worker.returncode for worker in workers if worker.returncode not in (0, 1)]
    print(findings, end="")
    counts = [[name, str(count)] for name, count in sorted(ran.items()) if count]
    print(store.align(counts))
    facts = store.header("gpu" if store.gpu_available() else "cpu")
    where = facts.get("card", facts["device"])
    print(f"{ran.total()} calls in {args.seconds:.0f} s on {where}, seed {seed}: ", end="")
    print("findings above" if findings or died else "no finding")
    if died:
        print(f"workers ended with {died}")
    return int(bool(findings or died))
