"""Threads of the CPU path, signals that interrupt them, and the BLAS of others, left as it is."""

import _thread
import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import threadpoolctl

from fa_cupy import attention, causal_product
from fa_cupy.cpu import blas as cpu_blas
from fa_cupy.cpu import thread_pool
from tests.support import blas
from tests.support.every_run import only
from tests.support.strategies import normal

with_threads = pytest.fixture(autouse=True, scope="module")(blas.two_threads)
with_signals = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")


def qkv(*shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for _ in range(3)]


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


# How many


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_number_of_threads_does_not_show(is_causal):
    q, k, v = qkv(5, 700, 32)
    results = []
    for threads in (1, 2, 3, 8):
        with blas.threads(threads):
            results.append(attention(q, k, v, is_causal=is_causal).tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("processors", [1, 2, 4])
def test_as_many_threads_as_blas_and_the_processors_allow(monkeypatch, number, processors):
    seen = set()

    def new_worker():
        seen.add(threading.get_ident())
        return lambda task: time.sleep(0.005)

    with blas.threads(number):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors), raising=False)
        thread_pool.run(range(20), new_worker)
    assert len(seen) == min(number, processors)


def test_every_task_is_done_once_where_no_thread_can_be_started(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    done = []
    with blas.threads(4):
        thread_pool.run(range(10), lambda: done.append)
    assert done == list(range(10))


def test_no_thread_is_left():
    before = _thread._count()
    for _ in range(20):
        attention(*qkv(4, 300, 32))
    until(lambda: _thread._count() <= before)
    assert not thread_pool._at_work
    assert len(thread_pool._unused_locks) < 20


# The BLAS of others


def test_a_call_changes_no_number_of_threads():
    before, seen = blas.numbers(), set()

    def work(task):
        seen.add(tuple(blas.numbers()))

    with blas.threads(3):
        inside = blas.numbers()
        thread_pool.run(range(6), lambda: work)
        assert seen == {tuple(inside)}
        assert blas.numbers() == inside
    assert blas.numbers() == before


def test_products_elsewhere_keep_their_threads():
    """What another thread sees of the numbers while attention runs."""
    q, k, v = qkv(2, 1500, 64)
    before, seen, done = blas.numbers(), set(), threading.Event()

    def look():
        while not done.is_set():
            seen.add(tuple(blas.numbers()))

    other = threading.Thread(target=look)
    other.start()
    attention(q, k, v)
    done.set()
    other.join()
    assert seen == {tuple(before)}


def test_limits_of_other_threads_hold_and_end_as_they_say():
    before = blas.numbers()
    started, limited = threading.Event(), threading.Event()

    def work(task):
        started.set()
        limited.wait(30)

    caller = threading.Thread(target=thread_pool.run, args=(range(4), lambda: work))
    caller.start()
    started.wait(30)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        limited.set()
        caller.join()
        assert set(blas.numbers()) == {1}
    assert blas.numbers() == before


def test_concurrent_calls():
    before = blas.numbers()
    inputs = [qkv(3, 400 + 50 * i, 32, seed=i) for i in range(6)]
    want = [attention(*x).tobytes() for x in inputs]
    wrong = []

    def repeat(i):
        for _ in range(5):
            if attention(*inputs[i]).tobytes() != want[i]:
                wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert blas.numbers() == before


def test_limits_on_all_libraries_leave_products_on_one_thread():
    assert cpu_blas.LIBRARY is not None
    q, k, v = qkv(1, 501, 77, dtype=np.float64)
    want = attention(q, k, v).tobytes()
    with blas.threads(3):
        assert cpu_blas.LIBRARY.threads() == 3  # threadpoolctl finds this one too
        assert attention(q, k, v).tobytes() == want
        assert cpu_blas.LIBRARY.threads() == 1
    assert cpu_blas.LIBRARY.threads() == 1


# Errors and signals


def test_an_error_ends_all_threads():
    def work(task):
        if task == 3:
            raise KeyError(task)
        done.append(task)

    done = []
    with blas.threads(3), pytest.raises(KeyError, match="3"):
        thread_pool.run(range(1000), lambda: work)
    assert len(done) < 999
    assert not thread_pool._at_work


class Interrupts:
    """Signals whose handler raises where `run` is at work, and at most `most` times a run."""

    def __init__(self, most):
        self._rng, self._most = random.Random(0), most
        self.raised = 0

    def __enter__(self):
        gc.disable()  # what is raised in a callback of a collection, as hypothesis has, is lost
        self._before = signal.signal(signal.SIGALRM, self._raise)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        gc.enable()

    def during(self, call):
        """Call it; return whether it was interrupted."""
        self._left = self._most
        times = self._rng.uniform(1e-5, 3e-3), self._rng.uniform(1e-4, 5e-4)
        try:
            signal.setitimer(signal.ITIMER_REAL, *times)
            call()
        except KeyboardInterrupt:
            return True
        return False

    def _raise(self, number, frame):
        while frame is not None and frame.f_code is not thread_pool.run.__code__:
            frame = frame.f_back
        if frame is not None and self._left:
            self._left -= 1
            self.raised += 1
            raise KeyboardInterrupt


@with_signals
@pytest.mark.parametrize("most", only([1, 2, 20], 2))
def test_no_helper_works_on_after_an_interrupt(most):
    """Wherever it comes, be it one or many of them while the caller waits for its helpers."""
    caller, at_work = threading.get_ident(), set()
    a = np.ones((300, 300), np.float32)

    def work(task):
        me = threading.get_ident()
        if me == caller:
            time.sleep(1e-4)
            return
        at_work.add(me)
        a @ a
        time.sleep(1e-3)
        at_work.discard(me)

    before, ended = blas.numbers(), 0
    with blas.threads(3), Interrupts(most) as interrupts:
        inside = blas.numbers()
        while ended < 100:
            ended += interrupts.during(lambda: thread_pool.run(range(6), lambda: work))
            assert not at_work
            assert blas.numbers() == inside
    assert interrupts.raised >= ended
    assert blas.numbers() == before
    assert not thread_pool._at_work
    done = []
    thread_pool.run(range(10), lambda: done.append)
    assert sorted(done) == list(range(10))


@with_signals
def test_interrupts_of_small_calls_leave_nothing_changed():
    x = np.ones((4, 8), np.float32)
    before, want = blas.numbers(), attention(x, x, x)
    with Interrupts(1) as interrupts:
        while interrupts.raised < 300:
            interrupts.during(lambda: [attention(x, x, x) for _ in range(100)])
    assert blas.numbers() == before
    np.testing.assert_array_equal(attention(x, x, x), want)


def run_alone(code, seconds=60, *arguments):
    """Run code in a process that ends with a traceback if it hangs."""
    watch = f"import faulthandler; faulthandler.dump_traceback_later({seconds}, exit=True)\n"
    command = [sys.executable, "-c", watch + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


HANDLER = """
import random, signal
import numpy as np
from fa_cupy import attention
rng, handled = random.Random(0), 0
x = np.ones((4, 8), np.float32)
y = np.ones((3, 300, 64), np.float32)
def arm():
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 1e-3))
def handler(*_):
    global handled
    handled += 1
    attention(x, x, x)
    attention(y, y, y)
    arm()
attention(x, x, x)
signal.signal(signal.SIGALRM, handler)
arm()
while handled < 100:
    attention(x, x, x)
    attention(y, y, y)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


@with_signals
def test_a_handler_may_call_attention():
    run_alone(HANDLER)


FORK = """
import os, signal, sys, threading, time
from fa_cupy.cpu import thread_pool
of_helpers = float(sys.argv[1])  # seconds of a task
def work(task):
    if threading.current_thread() is not threading.main_thread():
        begun.wait(20)  # so that there is a task for the main thread
        time.sleep(of_helpers)
        return
    if not begun.is_set():
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begun.set()
    time.sleep(0.3)
def slowly(task):
    time.sleep(0.002)
    done.append(task)
begun = threading.Event()
thread_pool.allowed = lambda: 3
def handler(*_):
    if os.fork() == 0:
        children.append(0)
children = []
signal.signal(signal.SIGALRM, handler)
said = 'nothing'
try:
    thread_pool.run(range(9 if of_helpers else 4), lambda: work)
except RuntimeError as error:
    said = str(error)
if children:
    found = []
    for _ in range(20):
        done = []
        thread_pool.run(range(9), lambda: slowly)
        found.append(len(done))  # of tasks that had ended when the call returned
    os._exit(0 if 'forked' in said and set(found) == {9} else 1)
assert said == 'nothing'
_, status = os.wait()
print(os.waitstatus_to_exitcode(status))
"""


@with_signals
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("seconds", [0.1, 0.0], ids=["at-work", "ended"])
def test_a_handler_may_fork(seconds):
    """The child has no helpers: it must not wait for them, nor return what they have not done.

    Nor do locks of helpers that had ended by then let later calls return too early.
    """
    assert run_alone(FORK, 30, seconds).strip() == "0"


def _in_child(q, k, v, expected, before, answers):
    same = attention(q, k, v).tobytes() == expected
    answers.put(same and blas.numbers() == before)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork"
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_during_a_call():
    q, k, v = qkv(3, 600, 32)
    before, expected = blas.numbers(), attention(q, k, v).tobytes()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(q, k, v, expected, before, answers))
    started, forked = threading.Event(), threading.Event()

    def work(task):
        started.set()
        forked.wait(30)

    caller = threading.Thread(target=thread_pool.run, args=(range(4), lambda: work))
    caller.start()
    started.wait(30)
    child.start()
    forked.set()
    caller.join()
    assert answers.get(timeout=60)
    child.join()
    assert blas.numbers() == before


# Products


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_products_read_any_layout(dtype, add, count):
    rng = np.random.default_rng(0)
    assert cpu_blas.LIBRARY is not None

    def operand(rows, cols, kind):
        shape = (count, cols, rows) if kind == "transposed" else (count, rows, cols)
        wide = rng.standard_normal((shape[0], shape[1] + 2, shape[2] + 3)).astype(dtype)
        x = (
            wide[:, 1 : 1 + shape[1], 2 : 2 + shape[2]]
            if kind != "dense"
            else wide[:, :-2, :-3].copy()
        )
        if kind == "shared":
            x = np.broadcast_to(x[:1], x.shape)
        return x.swapaxes(1, 2) if kind == "transposed" else x

    kinds = "dense", "apart", "transposed", "shared"
    for (m, k, n), of_a, of_b in itertools.product(
        [(7, 5, 3), (1, 6, 1), (1, 40, 66), (1, 1, 9), (65, 64, 66)], kinds, kinds
    ):
        a, b, out = operand(m, k, of_a), operand(k, n, of_b), operand(m, n, "apart")
        around = out.base.copy()
        want = out.astype(np.float64) * add + a.astype(np.float64) @ b.astype(np.float64)
        assert cpu_blas.matmul(a, b, out, add)
        np.testing.assert_allclose(out, want, rtol=0, atol=(90 + 10 * k) * np.finfo(dtype).eps)
        inside = out.copy()
        out[...] = around[:, 1 : 1 + m, 2 : 2 + n]
        np.testing.assert_array_equal(out.base, around)  # nothing beside it was written
        out[...] = inside


def test_what_the_library_cannot_read_is_left_to_numpy():
    a, out = np.ones((1, 4, 4), np.float32), np.empty((1, 4, 4), np.float32)
    for other in (
        a[:, :, ::-1],
        np.ones((1, 4, 8), np.float32)[:, :, ::2],
        np.broadcast_to(a[:, :1], a.shape),
    ):
        assert not cpu_blas.matmul(other, a, out, False)
        assert not cpu_blas.matmul(a, other, out, False)
    assert not cpu_blas.matmul(a, a, out.swapaxes(1, 2), False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_rows(dtype):
    x = np.random.default_rng(0).standard_normal((3, 200, 150)).astype(dtype)[:, 10:, 20:]
    out = np.empty((3, 200, 2), dtype)[:, 10:, 0]
    assert cpu_blas.sum_rows(x, np.ones(130, dtype), out)
    np.testing.assert_allclose(out, x.sum(-1), atol=1e-4 if dtype == np.float32 else 1e-12)


def test_an_old_value_that_is_not_finite_is_not_read():
    a = np.ones((1, 70, 70), np.float32)
    out = np.full((1, 70, 70), np.nan, np.float32)
    for rows in (70, 1):
        assert cpu_blas.matmul(a[:, :rows], a, out[:, :rows], False)
        assert (out[:, :rows] == 70).all()
        out.fill(np.nan)


def test_without_the_wheel_numpy_computes_everything(monkeypatch):
    q, k, v = qkv(3, 500, 64)
    want, product = attention(q, k, v, is_causal=True), causal_product(q, k, v)
    monkeypatch.setattr(cpu_blas, "LIBRARY", None)
    assert thread_pool.allowed() == 1
    np.testing.assert_allclose(attention(q, k, v, is_causal=True), want, atol=2e-6)
    np.testing.assert_allclose(causal_product(q, k, v), product, atol=2e-4)
    assert cpu_blas.described().startswith("NumPy's own")


def test_a_library_that_others_compute_with_is_theirs(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy_openblas32", object())
    library, said = cpu_blas._load()
    assert library is None
    assert "in use by others" in said
