"""The model of costs, and the choice between the ring and an exchange for heads."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from fa_cupy import distributed
from fa_cupy.distributed import calls, order, plans
from validation import copy_trace, ring

FAST_LINKS = plans.GPU._replace(link=1e20, far_link=1e20, latency=0.0, call=0.0, memory=1e20)


def work(length=2**16, size=4, kind="zigzag", band=(None, 0), heads=16, gradients=False):
    parts = tuple(order.segments(length, size, kind))
    return plans.Work(parts, parts, band, heads, heads, (128, 128), 2, gradients)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_share_the_operations_where_links_cost_nothing(size, gradients):
    """In zigzag order evenly, but for single rows; causal pairs are half of all."""
    length = 4800
    causal, _ = work(length, size, gradients=gradients).ring(FAST_LINKS)
    full, _ = work(length, size, band=(None, None), gradients=gradients).ring(FAST_LINKS)
    products = 5 if gradients else 2
    every = products * 2 * 16 * 128 * length**2 / FAST_LINKS.flops
    assert full == pytest.approx(every / size, rel=1e-6)
    assert causal == pytest.approx(every / size / 2, rel=2e-3)
    heads, _ = work(length, size, band=(None, None), gradients=gradients).exchange(FAST_LINKS)
    assert heads == pytest.approx(every / size, rel=1e-6)


def test_the_last_rank_has_almost_twice_the_work_in_contiguous_order():
    seconds = [work(4800, 8, kind).ring(FAST_LINKS)[0] for kind in ("contiguous", "zigzag")]
    assert 1.8 < seconds[0] / seconds[1] < 2


def test_bytes_are_those_of_keys_that_are_seen():
    """K and V of other ranks, in the ring; with a window, those of neighbours."""
    length, size = 4096, 4
    row = 2 * 16 * (128 + 128)
    assert work(length, size, band=(None, None)).ring(plans.GPU)[1] == row * length * 3 // 4
    near = work(length, size, "contiguous", (-100, 0))
    assert near.ring(plans.GPU)[1] == row * 100
    assert work(length, size, gradients=True).ring(plans.GPU)[1] == (
        2 * work(length, size).ring(plans.GPU)[1]
    )
    # Rows of Q, K, V and of the output, three of four.
    of_heads = work(length, size).exchange(plans.GPU)[1]
    assert of_heads == 2 * row * (length // size) * 3 // 4


def test_slow_links_bound_the_ring():
    """A block that comes more slowly than one is computed is waited for."""
    slow = FAST_LINKS._replace(link=1e9, far_link=1e9)
    seconds, count = work(band=(None, None)).ring(slow)
    assert seconds == pytest.approx(count / 1e9, rel=0.05)
    assert slow.speed_between(4, 1) == 1e9
    far = plans.GPU
    assert far.speed_between(8, 3) == far.link
    assert far.speed_between(16, 3) == far.far_link


def test_the_choice_is_the_faster_way():
    long = distributed.plan((16, 2**20, 128), 8, is_causal=True, order="zigzag")
    short = distributed.plan((64, 8192, 128), 8, is_causal=True)
    for found, way in ((long, "ring"), (short, "heads")):
        assert found.way == way == min(found.seconds, key=found.seconds.get)
        assert found.seconds.keys() == found.bytes.keys() == {"ring", "heads"}
        assert "estimated ring" in found.why
    few = distributed.plan((4, 8192, 128), 8)
    assert (few.way, {*few.seconds}) == ("ring", {"ring"})
    assert "no exchange for heads: q has 4 heads, want a multiple of the 8 ranks" in few.why
    grouped = distributed.plan((64, 8192, 128), 8, kv_heads=4)
    assert "k has 4 heads" in grouped.why
    flat = distributed.plan((8192, 128), 2)
    assert "q has no axis of heads" in flat.why
    assert distributed.plan((8, 16, 4), 2, dtype=np.float32, gradients=True).bytes["ring"] == (
        2 * 4 * 8 * (4 + 4) * 8
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: distributed.plan((8,), 2), ValueError, r"shape is \(8,\), want \(..., heads"),
        (lambda: distributed.plan((8, -1), 2), ValueError, r"shape\[1\] is -1"),
        (lambda: distributed.plan((8, 8, 8), 0), ValueError, "size is 0 .int., want an int from 1"),
        (lambda: distributed.plan((8, 8), 10**30), ValueError, "size is 10* .int., want an int fr"),
        (lambda: distributed.plan(4, 2), TypeError, "plan: shape is 4 .int., want a sequence of i"),
        (lambda: distributed.plan({8, 16}, 2), TypeError, "plan: shape is .*set., want a sequence"),
        (lambda: distributed.plan((8, 10**400), 2), ValueError, r"plan: shape\[1\] is 10*"),
        (lambda: distributed.plan((2**40, 2**40), 2), ValueError, "want below 2..62 elements"),
        (lambda: distributed.plan((8, 8), 2, v_dim=10**400), ValueError, "plan: v_dim is 10*"),
        (lambda: distributed.plan((8, 8, 8), 2, kv_heads=0), ValueError, "kv_heads is 0 .int., wa"),
        (lambda: distributed.plan((8, 8, 8), 2, kv_heads=3), ValueError, "is 3, want a divisor of"),
        (lambda: distributed.plan((8, 8), 2, kv_heads=3), ValueError, "want a divisor of 1, "),
        *(
            (
                partial(distributed.plan, (8, 8), 2, dtype=dtype),
                TypeError,
                "plan: dtype is .*, want",
            )
            for dtype in (object(), "foo", "int8", ">f4", None, 3)
        ),
        (lambda: distributed.plan((8, 8), 2, machine=3), TypeError, "plan: machine is 3 .int., wa"),
        *(
            (partial(distributed.plan, (8, 8), 2, machine=plans.GPU._replace(**wrong)), error, text)
            for wrong, error, text in [
                (
                    {"flops": 0},
                    ValueError,
                    "plan: machine.flops is 0 .int., want a finite number > 0",
                ),
                ({"link": "1"}, TypeError, "plan: machine.link is '1' .str., want a finite number"),
                ({"latency": -1.0}, ValueError, "plan: machine.latency is -1.0 .float., want a f"),
                ({"host": 0}, ValueError, "plan: machine.host is 0 .int., want an int >= 1"),
            ]
        ),
        (lambda: distributed.plan((8, 8), 2, order="x"), ValueError, "order is 'x'"),
        (lambda: distributed.plan((8, 8), 2, gradients=2), TypeError, "gradients is 2"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_calls_take_the_way_of_the_model(monkeypatch):
    """Without `plan`, by the machine of their arrays."""
    taken = []
    x = np.zeros((4, 64, 8))

    def part(comm):
        given = {"q": x, "k": x, "v": x, "bias": None, "mask": None, "sinks": None}
        call = calls.prepare(
            "attention", comm, given, plan=None, order="contiguous", is_causal=True, window=None
        )
        taken.append(call.way)

    with distributed.local(2, devices=[]) as ranks:
        for machine in (
            plans.CPU._replace(link=1e3),
            FAST_LINKS,
        ):
            monkeypatch.setattr(plans, "CPU", machine)
            plans._way.cache_clear()
            ranks(part)
            same = work(128, 2, "contiguous", (None, 0), 4)._replace(dims=(8, 8), itemsize=8)
            wanted = plans.choose(same, machine).way
            assert taken[-2:] == [wanted] * 2
    plans._way.cache_clear()
    assert taken[0] != taken[2]


@pytest.mark.parametrize(
    ("dtype", "slower"),
    [("float16", 1), (ml_dtypes.bfloat16, 1), (np.float32, 12), (np.dtype("float64"), 16)],
)
def test_estimates_are_those_of_the_dtype(dtype, slower):
    """In each way; a machine of one speed has it for all dtypes."""
    given = (16, 4096, 128), 4
    fast = distributed.plan(*given, machine=FAST_LINKS, dtype="float16").seconds
    found = distributed.plan(*given, machine=FAST_LINKS, dtype=dtype).seconds
    assert found == pytest.approx({way: slower * x for way, x in fast.items()})
    same = distributed.Machine(*FAST_LINKS[:7])
    assert distributed.plan(*given, machine=same, dtype=dtype).seconds == pytest.approx(fast)


def test_the_public_choice_is_that_of_calls():
    """On a GPU in float32, whose products take longer while as many bytes are sent."""
    ways = set()
    for length in 2 ** np.arange(8, 18):
        parts = tuple(order.segments(int(length), 8, "zigzag"))
        places = calls.Places(parts, parts, (None, 0), False)
        for dtype in map(np.dtype, ("float16", "float32", "float64")):
            taken = plans._way(places, 16, 16, (128, 128), dtype.itemsize, False, "cupy")
            options = {"order": "zigzag", "is_causal": True, "dtype": dtype}
            assert distributed.plan((16, length, 128), 8, **options).way == taken
            ways.add((dtype.name, taken))
    assert len(ways) == 6


def test_validation_predicts_without_a_gpu(capsys):
    assert ring.main(["--predict"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    for line in lines[1:]:
        share = float(line.split()[5])
        assert 0 < share <= 1.001  # of the time that no link would take
    # Where blocks come more slowly than they are computed, more GPUs are of little use.
    assert float(lines[5].split()[5]) < 0.2 < float(lines[3].split()[5])


def test_cases_of_validation_are_different():
    labels = [case.label for case in ring.cases([65536, 262144], [65536])]
    assert len(labels) == len(set(labels)) == 10
    case = next(ring.cases([65536], []))
    assert case.flops == pytest.approx(4 * 16 * 128 * 65536**2)
    assert ring.predicted(case, 2, "ring", FAST_LINKS) == pytest.approx(
        case.flops / FAST_LINKS.flops / 2, rel=1e-3
    )


def event(name, device, begin, duration, kind="kernel"):
    where = "device" if kind == "kernel" else "inDevice"
    return {"cat": kind, "name": name, "ts": begin, "dur": duration, "args": {where: device}}


def test_copies_are_hidden_where_kernels_run_meanwhile():
    copy = "Memcpy PtoP (Device -> Device)"
    events = [
        {"cat": "cpu_op", "name": "anything", "ts": 0, "dur": 1},
        event("attention_fwd_sm90", 0, 1000, 100),
        event(copy, 0, 1050, 100, "gpu_memcpy"),  # a half of it
        event("attention_fwd_sm90", 0, 1190, 100),
        event("fa_cupy_scale", 0, 1100, 40),  # is none of the work
        event("attention_fwd_sm90", 1, 1000, 300),
        event(copy, 1, 1100, 50, "gpu_memcpy"),
        event(copy, 1, 1120, 50, "gpu_memcpy"),
        event("Memcpy DtoH (Device -> Pinned)", 1, 2000, 50, "gpu_memcpy"),
    ]
    found = copy_trace.intervals(events)
    assert [x.begin for x in found] == sorted(x["ts"] - 1000 for x in events[1:-1])
    assert copy_trace.summary(found) == [
        "device 0: 0.29 ms, kernels 0.20 ms, 1 copies 0.10 ms, 50% of them while kernels ran",
        "device 1: 0.30 ms, kernels 0.30 ms, 2 copies 0.07 ms, 100% of them while kernels ran",
    ]
    assert [line.split()[-1] for line in copy_trace.listed(found)] == [
        "attention_fwd_sm90", "copy", "attention_fwd_sm90",
    ]  # fmt: skip
    assert copy_trace.summary([]) == copy_trace.listed([]) == []
