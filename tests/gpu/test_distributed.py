"""Attention and causal products on several GPUs, or on ranks that share one."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask, distributed
from tests.support.kernel_attention import DTYPES
from validation.digest import ROOT

pytest.importorskip("cupy")
import cupy as cp

LIMITS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (70, 9)},
    "causal window": {"window": (150, None), "is_causal": True},
    "sinks": {"sinks": "heads", "is_causal": True},
    "bias": {"bias": "rows", "mask": "rows"},
    "BitMask": {"mask": "bits"},
}


def devices():
    """GPUs of two ranks: one for both, and two where they are there."""
    count = cp.cuda.runtime.getDeviceCount() if cp.cuda.is_available() else 0
    return [(0, 0), *([(0, 1)] if count > 1 else [])]


@pytest.fixture(scope="module", params=devices(), ids=str)
def ranks(request, cupy):
    """Two ranks."""
    with distributed.local(devices=request.param, timeout=30) as found:
        yield found


def normal(*shape, dtype, seed=0):
    """Random normal numbers, on the host."""
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES.get(dtype, dtype))


def on_device(x):
    """A copy on the current device."""
    if x.dtype.name == "bfloat16":
        return cp.asarray(x.view(np.uint16)).view(x.dtype)
    return cp.asarray(x)


def on_host(x):
    """A copy on the host, in float64."""
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16).get().view(x.dtype).astype(np.float64)
    return x.get().astype(np.float64)


def options_of(name, length, heads):
    """Whole arrays of the options, on the host."""
    found = dict(OPTIONS[name])
    rng = np.random.default_rng(3)
    if "sinks" in found:
        found["sinks"] = rng.standard_normal((heads, 1)).astype(np.float32)
    if "bias" in found:
        found["bias"] = rng.standard_normal((length, length)).astype(np.float32)
    if "mask" in found:
        found["mask"] = rng.random((length, length)) < 0.6
    return found, OPTIONS[name].get("mask") == "bits"


def of_rank(options, bits, comm, order):
    """The options of a rank, on its device."""
    found = {}
    for arg, x in options.items():
        if arg in ("bias", "mask"):
            x = distributed.split(x, comm, order=order)
        found[arg] = on_device(x) if isinstance(x, np.ndarray) else x
    if bits:
        found["mask"] = BitMask.from_dense(distributed.split(options["mask"], comm, order=order))
    return found


@pytest.mark.parametrize("plan", ["ring", "heads"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_and_gradients(ranks, dtype, name, order, plan):
    """Compared with one GPU; and the same bits again."""
    if plan == "heads" and name in ("bias", "BitMask"):
        pytest.skip("rows of a mask stay on their ranks")
    length, heads = 517, 4
    q, dout = (normal(2, heads, length, 64, dtype=dtype, seed=i) for i in range(2))
    k, v = (normal(2, 2, length, 64, dtype=dtype, seed=i) for i in range(2, 4))
    options, bits = options_of(name, length, heads)
    one = {arg: on_device(x) if isinstance(x, np.ndarray) else x for arg, x in options.items()}
    whole = [on_device(x) for x in (q, k, v)]
    out, lse = fa_cupy.attention(*whole, return_lse=True, **one)
    need = ["q", "k", "v"]
    grads = fa_cupy.attention_backward(on_device(dout), *whole, out, lse, need=need, **one)

    def part(comm):
        own = [on_device(distributed.split(x, comm, order=order)) for x in (q, k, v)]
        given = {"comm": comm, "order": order, "plan": plan}
        given |= of_rank(options, bits, comm, order)
        own_dout = on_device(distributed.split(dout, comm, order=order))

        def results():
            out, lse = distributed.attention(*own, return_lse=True, **given)
            grads = distributed.attention_backward(own_dout, *own, out, lse, need=need, **given)
            return [on_host(x) for x in (out, *grads)], on_host(lse)

        first, lse = results()
        for x, y in zip(first, results()[0], strict=True):
            np.testing.assert_array_equal(x, y)
        return first, lse

    found = ranks(part)
    for i, wanted in enumerate((out, *grads)):
        joined = distributed.join([parts[i] for parts, _ in found], order=order)
        wanted = on_host(wanted)
        scale = max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(joined, wanted, rtol=0, atol=LIMITS[dtype] * scale)
    joined = distributed.join([x for _, x in found], order=order, axis=-1)
    np.testing.assert_allclose(joined, on_host(lse), rtol=0, atol=1e-2 if dtype[0] == "b" else 1e-4)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_value_that_is_nan_counts_unless_it_is_hidden(ranks, dtype, hidden):
    """However small its weight is: that of all keys of one rank is rounded to 0."""
    q, k, v = np.ones((3, 2, 200, 16), DTYPES.get(dtype, dtype))
    k[:, 150], v[:, 50] = 800, np.nan
    mask = np.ones((1, 200), bool)
    mask[0, 50] = not hidden

    def part(comm):
        own = [on_device(distributed.split(x, comm)) for x in (q, k, v)]
        given = {"scale": 1.0, "comm": comm, "plan": "ring", "mask": cp.asarray(mask)}
        out, lse = distributed.attention(*own, return_lse=True, **given)
        *_, dv = distributed.attention_backward(out, *own, out, lse, **given)
        return on_host(out), on_host(dv)

    for out, dv in ranks(part):
        assert np.isnan(out).all() != hidden
        assert np.isnan(dv).any() != hidden


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (1, 4)], ids=str)
def test_causal_products(ranks, dtype, reverse, heads):
    """Compared with one GPU; and the same bits again."""
    q, k, v, dout = (normal(2, 4, 1000, 64, dtype=dtype, seed=i) for i in range(4))
    q, k = (x * np.asarray(0.125, x.dtype) for x in (q, k))
    k, v = k[:, : heads[0]], v[:, : heads[1]]
    whole = [on_device(x) for x in (q, k, v)]
    wanted = [fa_cupy.causal_product(*whole, reverse=reverse)]
    wanted += fa_cupy.causal_product_backward(on_device(dout), *whole, reverse=reverse)

    def part(comm):
        own_dout, *own = (on_device(distributed.split(x, comm)) for x in (dout, q, k, v))
        given = {"comm": comm, "reverse": reverse}

        def results():
            found = [distributed.causal_product(*own, **given)]
            found += distributed.causal_product_backward(own_dout, *own, **given)
            return [on_host(x) for x in found]

        first = results()
        for x, y in zip(first, results(), strict=True):
            np.testing.assert_array_equal(x, y)
        return first

    for parts, one in zip(zip(*ranks(part), strict=True), wanted, strict=True):
        one = on_host(one)
        scale = max(1.0, np.abs(one).max())
        np.testing.assert_allclose(distributed.join(parts), one, rtol=0, atol=LIMITS[dtype] * scale)


@pytest.mark.parametrize("late", [0, 1])
def test_many_products_without_waiting(ranks, late):
    """One rank gets ahead, and what it has sent is kept until the other has it."""
    whole = [
        [normal(2, 700, 64, dtype="float16", seed=4 * i + j) * np.float16(0.125) for j in range(4)]
        for i in range(20)
    ]

    def part(comm):
        own = [[on_device(distributed.split(x, comm)) for x in call] for call in whole]
        found = []
        for i, (dout, *qkv) in enumerate(own):
            if comm.rank == late and i % 7 == 0:
                time.sleep(0.05)
            found.append([distributed.causal_product(*qkv, comm=comm)])
            if i % 3 == 0:
                found[-1] += distributed.causal_product_backward(dout, *qkv, comm=comm)
        return [[on_host(x) for x in results] for results in found]

    for (dout, *qkv), *parts in zip(whole, *ranks(part), strict=True):
        wanted = [fa_cupy.causal_product(*qkv), *fa_cupy.causal_product_backward(dout, *qkv)]
        for one, *of_ranks in zip(wanted, *parts, strict=False):
            one = one.astype(float)
            scale = max(1.0, np.abs(one).max())
            joined = distributed.join(of_ranks)
            np.testing.assert_allclose(joined, one, rtol=0, atol=LIMITS["float16"] * scale)


def test_linear_attention(ranks):
    q, k, v = (normal(4, 500, 32, dtype="float32", seed=i) for i in range(3))
    wanted = on_host(fa_cupy.linear_attention(*(on_device(x) for x in (q, k, v))))

    def part(comm):
        own = [on_device(distributed.split(x, comm)) for x in (q, k, v)]
        return on_host(distributed.linear_attention(*own, comm=comm))

    np.testing.assert_allclose(distributed.join(ranks(part)), wanted, atol=1e-4)


def test_an_error_of_one_rank_reaches_the_other(ranks):
    def part(comm):
        x = cp.zeros((2, 8, 16 + 16 * comm.rank), np.float16)
        return distributed.attention(cp.zeros((2, 8, 16), np.float16), x, x, comm=comm)

    with pytest.raises(ValueError, match="k has head_dim 32, q has 16"):
        ranks(part)


@pytest.fixture
def pair(cupy):
    """Two ranks on two GPUs, as NCCL needs them."""
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU, NCCL needs two")
    with distributed.local(devices=(0, 1), timeout=30) as found:
        yield found


def test_nccl_moves_arrays_of_threads(pair):
    q, k, v = (normal(4, 300, 64, dtype="bfloat16", seed=i) for i in range(3))

    def part(comm):
        own = [on_device(distributed.split(x, comm, order="zigzag")) for x in (q, k, v)]
        given = {"order": "zigzag", "is_causal": True, "return_lse": True}
        results = []
        for moves in (comm, distributed.NcclCommunicator(comm)):
            out, lse = distributed.attention(*own, comm=moves, **given)
            given_back = {"comm": moves, "order": "zigzag", "is_causal": True}
            grads = distributed.attention_backward(out, *own, out, lse, **given_back)
            product = distributed.causal_product(*own, comm=moves)
            results.append([on_host(x) for x in (out, lse, *grads, product)])
        return results

    for by_peers, by_nccl in pair(part):
        for x, y in zip(by_peers, by_nccl, strict=True):
            np.testing.assert_array_equal(x, y)


PROCESS = """
import os, sys
import cupy as cp, numpy as np
import fa_cupy
from fa_cupy import distributed

comm = distributed.NcclCommunicator(device=int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
q, k, v = cp.random.RandomState(0).standard_normal((3, 4, 1000, 64)).astype(cp.float32)
own = [distributed.split(x, comm, order="zigzag") for x in (q, k, v)]
out = distributed.attention(*own, comm=comm, order="zigzag", is_causal=True, plan="ring")
whole = fa_cupy.attention(q, k, v, is_causal=True)
assert cp.allclose(out, distributed.split(whole, comm, order="zigzag"), atol=1e-5)
product = distributed.causal_product(*[distributed.split(x, comm) for x in (q, k, v)], comm=comm)
print("rank", comm.rank, "of", comm.size, "is right")
"""


def test_nccl_moves_arrays_of_processes(pair, tmp_path):
    mpi = pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    del mpi
    path = tmp_path / "ring.py"
    path.write_text(PROCESS)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, path]
    # Where the package is not installed, a program in another folder does not find it.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is right") == 2


ALONE = """
import threading, time
import cupy as cp
from fa_cupy import distributed

ended = threading.Event()

def part(comm):
    nccl = distributed.NcclCommunicator(comm)
    x, y = cp.zeros((2, 1 << 20), cp.uint8)
    other = 1 - comm.rank
    # NCCL connects the GPUs at the first transfer, which takes long on a busy machine.
    nccl.start([(other, x)], [(other, y)], "a first ring").wait()
    cp.cuda.get_current_stream().synchronize()
    if comm.rank:
        ended.wait(60)
        return
    nccl._channel._timeout = 3
    try:
        nccl.start([(1, x)], [(1, y)], "a ring").wait()
        begin = time.monotonic()
        cp.cuda.get_current_stream().synchronize()
        print("went on" if time.monotonic() - begin > 1 else "did not wait", flush=True)
        try:
            nccl.start([(1, x)], [(1, y)], "another")
        except distributed.RankError as error:
            print(error, flush=True)
    finally:
        ended.set()

distributed.local(devices=(0, 1), timeout=60)(part)
"""


def test_nccl_ends_a_transfer_that_the_other_rank_does_not_take(pair):
    """In a process of its own, which is not waited for without a limit."""
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[:1] == ["went on"], done.stdout + done.stderr
    assert "because a transfer of a ring was not done after 3 s" in lines[1]
