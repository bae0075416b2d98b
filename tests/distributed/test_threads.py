"""Attention and causal products of ranks that are threads, and errors that reach all of them."""

import queue
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fa_cupy
from fa_cupy import distributed
from fa_cupy.distributed import communicator, threads
from tests.support.distributed_cases import (
    Case,
    cases,
    check_attention,
    check_products,
    product_cases,
)
from tests.support.every_run import examples


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request):
    """Some ranks on the CPU."""
    with distributed.local(request.param, devices=[], timeout=20) as found:
        yield found


@examples(15)
@given(st.data())
def test_attention_and_gradients(ranks, data):
    """As those of one call, and the same bits again."""
    case = data.draw(cases(ranks.size))
    ranks(lambda comm: check_attention(case, comm))


@examples(10)
@given(st.data())
def test_causal_products_and_linear_attention(ranks, data):
    case = data.draw(product_cases(ranks.size))
    ranks(lambda comm: check_products(case, comm))


@pytest.fixture
def pair():
    """Two ranks that do not wait for long."""
    with distributed.local(2, devices=[], timeout=0.5) as found:
        yield found


X = np.zeros((2, 8, 16))


def attention(comm, q=X, k=X, v=X, **options):
    return distributed.attention(q, k, v, comm=comm, **options)


def on_rank_1(comm, **options):
    """Call attention with other options on rank 1."""
    return attention(comm, **(options if comm.rank else {}))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"k": X[..., :3]}, ValueError, "attention: k has head_dim 3, q has 16"),
        ({"q": None}, TypeError, "attention: q is None, want an array"),
        ({"order": "striped"}, ValueError, "order is 'striped'"),
        ({"plan": "tree"}, ValueError, "plan is 'tree' .str., want None, 'ring' or 'heads'"),
        ({"return_lse": "yes"}, TypeError, "return_lse is 'yes'"),
        ({"window": 3}, TypeError, "window is 3 .int., want a pair"),
        ({"scale": "large"}, TypeError, "scale is 'large'"),
    ],
)
def test_wrong_arguments_of_one_rank_are_errors_on_all(pair, options, error, text):
    """The rank itself raises what the function of one rank would, the other names it."""
    caught = []

    def part(comm):
        try:
            on_rank_1(comm, **options)
        except Exception as e:
            caught.append((comm.rank, e))
            raise

    with pytest.raises(error, match=text):
        pair(part)
    other = dict(caught)[0]
    assert isinstance(other, distributed.RankError)
    assert f"attention: rank 1 has raised {error.__name__}: " in str(other)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"is_causal": True},
            r"is_causal is False .bool. on rank 0 and True .bool. on rank 1, want",
        ),
        ({"window": [2, None]}, r"window is None .NoneType. on rank 0 and \(2, None\) .tuple. on"),
        ({"scale": 2.0}, r"scale is None .NoneType. on rank 0 and 2.0 .float. on rank 1"),
        ({"plan": "ring"}, "plan is None .NoneType. on rank 0 and 'ring' .str. on rank 1"),
        ({"order": "zigzag"}, "order is 'contiguous' .str. on rank 0 and 'zigzag'"),
        ({"sinks": np.zeros(1)}, "whether sinks is given is False"),
        ({"q": X[:1], "k": X[:1], "v": X[:1]}, "the shape of q but its length is"),
        (dict.fromkeys("qkv", X.astype(np.float32)), "the dtype is 'float64'"),
    ],
)
def test_arguments_that_differ_are_errors_on_all(pair, options, text):
    caught = []

    def part(comm):
        with pytest.raises(ValueError, match=text) as error:
            on_rank_1(comm, **options)
        caught.append(str(error.value))

    pair(part)
    assert len(caught) == 2
    assert caught[0] == caught[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bias": np.zeros((8, 8))}, "bias has 8 rows and 8 columns on rank 0, want 1 or 8 .* 16"),
        ({"mask": np.ones((3, 16), bool)}, "mask has 3 rows and 16 columns on rank 0"),
        ({"k": X[:, :5], "v": X[:, :5], "is_causal": True}, "want the same with is_causal"),
        ({"plan": "heads", "bias": np.zeros((8, 16))}, "'heads', and bias has rows of queries"),
        ({"plan": "heads", **dict.fromkeys("qkv", X[:1])}, "'heads', and q has 1 heads, want a m"),
        ({"order": "zigzag", **dict.fromkeys("qkv", X[:, :5])}, ""),
    ],
)
def test_arguments_that_do_not_fit_other_ranks_are_errors_on_all(pair, options, text):
    caught = []

    def part(comm):
        if not text:
            return attention(comm, **options)
        with pytest.raises(ValueError, match=text) as error:
            attention(comm, **options)
        caught.append(str(error.value))

    pair(part)
    assert len(caught) == (2 if text else 0)
    assert len(set(caught)) <= 1


def test_lengths_in_zigzag_order_are_those_of_split(pair):
    def part(comm):
        own = X[:, : 3 + 4 * comm.rank]
        with pytest.raises(ValueError, match=r"q has the lengths \[3, 7\] on the ranks, want"):
            attention(comm, own, own, own, order="zigzag")

    pair(part)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm, x: distributed.causal_product(x, x, x, comm=comm, reverse="yes"),
        lambda comm, x: distributed.causal_product(x, x, x[..., :3, :], comm=comm),
        lambda comm, x: distributed.causal_product_backward(x[:1], x, x, x, comm=comm),
        lambda comm, x: distributed.linear_attention(x, x, x, comm=comm, eps=-1.0),
        lambda comm, x: distributed.linear_attention(x, x, x, comm=comm, is_causal=2),
        lambda comm, x: distributed.attention_backward(x, x, x, x, x, x, comm=comm),
        lambda comm, x: distributed.attention_backward(
            x, x, x, x, x, x[..., 0], comm=comm, need=["z"]
        ),
    ],
)
def test_errors_of_other_functions_reach_all(pair, call):
    def part(comm):
        if comm.rank:
            with pytest.raises((TypeError, ValueError)):
                call(comm, X)
        else:
            with pytest.raises((distributed.RankError, ValueError), match=r"rank 1|same on all"):
                distributed.causal_product(X, X, X, comm=comm)

    pair(part)


def test_the_communicator_is_checked():
    with pytest.raises(TypeError, match=r"attention: comm is None .NoneType., want a comm"):
        attention(None)


def test_ranks_in_two_functions_are_an_error(pair):
    def part(comm):
        call = attention if comm.rank else product
        text = "rank 0 is in causal_product" if comm.rank else "rank 1 is in attention"
        with pytest.raises(distributed.RankError, match=text):
            call(comm)

    def product(comm):
        return distributed.causal_product(X, X, X, comm=comm)

    pair(part)


def test_an_error_while_ranks_compute_reaches_all(pair, monkeypatch):
    """After they have agreed: where memory is short, for instance."""
    from fa_cupy import _attention

    original = _attention.attention

    def failing(q, *args, **options):
        if threading.current_thread().name.endswith("1"):
            raise MemoryError("no memory left")
        return original(q, *args, **options)

    monkeypatch.setattr(_attention, "attention", failing)
    caught = []

    def part(comm):
        try:
            attention(comm)
            attention(comm)  # in the first call rank 0 may have all it needs of rank 1
        except Exception as e:
            caught.append(e)
            raise

    begin = time.monotonic()
    with pytest.raises(MemoryError, match="no memory left"):
        pair(part)
    assert time.monotonic() - begin < 5
    other = next(e for e in caught if not isinstance(e, MemoryError))
    assert isinstance(other, distributed.RankError)
    assert "no memory left" in str(other)


def test_a_rank_that_ends_is_an_error_of_those_that_wait(pair):
    def part(comm):
        if comm.rank == 0:
            with pytest.raises(distributed.RankError, match="rank 1 has ended, while rank 0"):
                attention(comm)
            with pytest.raises(distributed.RankError, match="the communicator is not usable"):
                attention(comm)

    pair(part)


def test_a_rank_that_does_not_answer_is_an_error_with_the_place(pair):
    def part(comm):
        if comm.rank:
            time.sleep(1.0)
        else:
            with pytest.raises(
                TimeoutError, match=r"attention: rank 0 has waited 0.5 s for rank 1"
            ):
                attention(comm)

    pair(part)


def test_ranks_go_on_after_an_error(pair):
    """Each run has queues of its own."""
    with pytest.raises(ZeroDivisionError):
        pair(lambda comm: 1 / comm.rank)
    assert [x.shape for x in pair(attention)] == [X.shape] * 2


def test_results_and_errors_come_by_rank():
    with distributed.local(3, devices=[]) as ranks:
        assert ranks(lambda comm, x: comm.rank + x, 10) == [10, 11, 12]
        assert ranks.run(lambda comm: comm.size) == [3, 3, 3]
        with pytest.raises(KeyError, match="of rank 1"):
            ranks(lambda comm: {}[f"of rank {comm.rank}"] if comm.rank else None)
    with pytest.raises(RuntimeError, match="local: the ranks are closed"):
        ranks(lambda comm: None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "neither size nor devices is given"),
        ({"size": 0}, "size is 0 .int., want an int from 1 to 1024"),
        ({"size": 10**30}, "local: size is 10* .int., want an int from 1 to 1024"),
        ({"devices": range(10**30)}, "local: devices has more than 1024 numbers"),
        ({"size": 2, "devices": [0]}, "devices has 1 numbers, size is 2"),
        ({"size": 2, "timeout": -1}, "timeout is -1 .int., want a finite number >= 0"),
    ],
)
def test_errors_of_local(arguments, text):
    with pytest.raises(ValueError, match=text):
        distributed.local(**arguments)


@pytest.mark.parametrize("devices", [1, "01", {0}, np.array(1)])
def test_devices_are_a_sequence(devices):
    with pytest.raises(TypeError, match=r"local: devices is .*, want a sequence of device numbers"):
        distributed.local(devices=devices)


def test_threads_that_cannot_be_started_are_an_error(monkeypatch):
    """Those that were started before end."""
    started = []
    start = threading.Thread.start

    def start_two(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="local: size is 3, and no more than 2 threads can be"):
        distributed.local(3, devices=[])
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def test_ranks_call_what_can_be_called(pair):
    with pytest.raises(TypeError, match=r"local: function is 3 .int., want a callable"):
        pair(3)


def test_a_long_timeout_is_none():
    """Longer than a queue of Python can wait."""
    with distributed.local(2, devices=[], timeout=1e30) as ranks:
        assert [x.shape for x in ranks(attention)] == [X.shape] * 2


def test_arguments_of_an_nccl_communicator():
    with pytest.raises(TypeError, match=r"NcclCommunicator: host is 3 .int., want a communicator"):
        distributed.NcclCommunicator(3)
    text = r"NcclCommunicator: device is 'a' .str., want a device number"
    with distributed.local(1, devices=[]) as ranks, pytest.raises(TypeError, match=text):
        ranks(lambda comm: distributed.NcclCommunicator(comm, device="a"))


def test_the_result_lies_in_memory_as_the_queries_do(pair):
    x = np.zeros((2, 8, 3, 16)).swapaxes(-3, -2)

    def part(comm):
        for plan in ("ring", None):
            out = attention(comm, x, x, x, plan=plan)
            assert out.strides == x.strides

    pair(part)


def test_ranks_that_share_a_host_take_turns():
    """As those of GPUs do: one at a time, until it waits for another; its errors are the same."""
    hub = threads._Hub(2, True)
    inside, most, results = [], [], []

    def part(rank):
        comm = threads.ThreadCommunicator(hub, rank, 2, 0.5)
        with comm.turn(), comm.turn():
            for _ in range(3):
                inside.append(rank)
                time.sleep(0.02)
                most.append(len(inside))
                inside.remove(rank)
                results.append(comm.gather(bytes([rank]), "here"))
                x, y = np.full(3, rank), np.zeros(3, int)
                comm.start([(1 - rank, x)], [(1 - rank, y)], "here").wait()
                assert (y == 1 - rank).all()
            if rank:
                with pytest.raises(
                    TimeoutError, match=r"there: rank 1 has waited 0.5 s for rank 0"
                ):
                    comm.gather(b"", "there")

    workers = [threading.Thread(target=part, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()
    assert most == [1] * 6
    assert results == [[b"\0", b"\1"]] * 6
    assert not hub.turn.locked()


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_an_exchange_for_heads(ranks, order, dtype):
    """With what depends on heads and on positions."""
    size = ranks.size
    case = Case(
        dtype=dtype, batch=(2,), heads=(2 * size, size), q_len=29, k_len=29, order=order,
        plan="heads", cuts=(), is_causal=True, window=(11, None), bias="heads", mask="keys",
        sinks="heads", softcap=2.0, seed=3,
    )  # fmt: skip
    ranks(lambda comm: check_attention(case, comm))
    lengths = case._replace(is_causal=False, window=None, k_len=17)
    ranks(lambda comm: check_attention(lengths, comm))


@pytest.mark.parametrize("need", [("bias",), ("sinks",), ("k",), ("v", "bias")], ids=str)
@pytest.mark.parametrize("plan", ["heads", "ring"])
def test_some_gradients(ranks, plan, need):
    rng, heads = np.random.default_rng(0), ranks.size
    q, k, v, dout = rng.standard_normal((4, heads, 12, 8))
    given = {
        "bias": rng.standard_normal((heads, 1, 12)), "sinks": rng.standard_normal((heads, 1)),
    }  # fmt: skip
    results = fa_cupy.attention(q, k, v, return_lse=True, **given)
    want = fa_cupy.attention_backward(dout, q, k, v, *results, need=need, **given)

    def part(comm):
        own = [distributed.split(x, comm) for x in (q, k, v)]
        options = {"comm": comm, "plan": plan, **given}
        results = distributed.attention(*own, return_lse=True, **options)
        own_dout = distributed.split(dout, comm)
        return distributed.attention_backward(own_dout, *own, *results, need=need, **options)

    for arg, parts, whole in zip(need, zip(*ranks(part), strict=True), want, strict=True):
        found = parts[-1] if arg in given else distributed.join(parts)
        np.testing.assert_allclose(found, whole, atol=1e-12)


@pytest.mark.parametrize("plan", [None, "ring"])
@pytest.mark.parametrize("arg", ["bias", "mask", "sinks"])
def test_a_row_is_that_of_a_rank_where_each_has_one_query(arg, plan):
    rng = np.random.default_rng(3)
    q, k, v, dout = rng.standard_normal((4, 4, 4, 8))
    rows = {"bias": rng.standard_normal((4, 4)), "sinks": rng.standard_normal((4, 4))}
    rows["mask"] = np.tril(np.ones((4, 4), bool))
    given, axis = {arg: rows[arg]}, -1 if arg == "sinks" else -2
    need = [arg] if arg != "mask" else ["q"]
    want = fa_cupy.attention(q, k, v, return_lse=True, **given)
    slope = fa_cupy.attention_backward(dout, q, k, v, *want, need=need, **given)[0]

    def part(comm):
        own = [distributed.split(x, comm) for x in (q, k, v)]
        own_given = {arg: distributed.split(rows[arg], comm, axis=axis), "plan": plan}
        out = distributed.attention(*own, comm=comm, return_lse=True, **own_given)
        found = distributed.attention_backward(
            distributed.split(dout, comm), *own, *out, comm=comm, need=need, **own_given
        )
        return out[0], found[0]

    with distributed.local(4, devices=[], timeout=20) as four:
        found = four(part)
    out, slopes = (
        np.concatenate(x, axis=a) for x, a in zip(zip(*found, strict=True), (-2, axis), strict=True)
    )
    np.testing.assert_allclose(out, want[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(slopes, slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        (np.zeros((2, 1, 16), np.float32), "the kind of bias"),
        (np.zeros((1, 16)), "the kind of bias"),
    ],
)
def test_a_bias_of_another_kind_is_an_error_on_all(pair, bias, text):
    def part(comm):
        with pytest.raises(ValueError, match=text):
            attention(comm, bias=bias if comm.rank else np.zeros((2, 1, 16)))

    pair(part)


def test_features_of_another_number_are_an_error_on_all(pair):
    def part(comm):
        def features(x):
            return np.exp(x[..., : 4 + comm.rank])

        with pytest.raises(ValueError, match="the shape of the states"):
            distributed.linear_attention(X, X, X, comm=comm, feature_map=features)

    pair(part)


def test_what_comes_too_late_is_not_taken_for_the_next(pair):
    def part(comm):
        if comm.rank:
            time.sleep(0.8)
            with pytest.raises(distributed.RankError, match="rank 0 has waited"):
                attention(comm)
            return
        with pytest.raises(TimeoutError):
            attention(comm)
        with pytest.raises(distributed.RankError, match="not usable, because rank 0 has waited"):
            attention(comm)

    pair(part)


def test_an_interrupted_call_leaves_nothing_to_the_next(monkeypatch):
    with distributed.local(2, devices=[]) as two:
        begun = threading.Event()

        def slow(comm):
            begun.set()
            time.sleep(0.3)
            return "first"

        class Interrupted(queue.SimpleQueue):
            def get(self):
                begun.wait()
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(threads.queue, "SimpleQueue", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                two(slow)
        assert two(lambda comm: "second") == ["second"] * 2


def test_calls_of_several_threads_come_one_after_the_other():
    with distributed.local(2, devices=[], timeout=20) as two:
        found = []

        def call(number):
            found.append((number, two(lambda comm: (number, attention(comm).shape))))

        callers = [threading.Thread(target=call, args=(i,)) for i in range(5)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
        assert sorted(n for n, _ in found) == [*range(5)]
        assert all(x == [(n, X.shape)] * 2 for n, x in found)


def test_a_rank_cannot_call_all_ranks(pair):
    with pytest.raises(RuntimeError, match="a rank has called all ranks"):
        pair(lambda comm: pair(lambda other: 1))


def later(comm, name="f", shape=(3,), error=None):
    """Agree on a call without waiting for the other rank."""

    def describe():
        if error is not None:
            raise error
        return communicator.record_of(name, communicator.Facts({"shape": shape}, None))

    communicator.agree(comm, name, describe, later=True)


def test_a_rank_goes_on_before_others_have_announced_their_call(pair):
    """The last one compares before it takes anything, and the first one at its end."""
    first_is_through = threading.Event()

    def part(comm):
        for value in range(3):
            if comm.rank:
                assert first_is_through.wait(5)
            later(comm)
            found = np.empty(3)
            sends = [(1, np.full(3, value))] if comm.rank == 0 else []
            receives = [(0, found)] if comm.rank else []
            comm.start(sends, receives, "f").arrive()
            if comm.rank:
                assert (found == value).all()
        first_is_through.set()
        return comm.gather(bytes([comm.rank]), "the end")

    assert pair(part) == [[b"\0", b"\1"]] * 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"shape": (4,)}, ValueError, r"shape is \(3,\) .* on rank 0 and \(4,\) .* on rank 1"),
        ({"name": "g"}, distributed.RankError, "is in g"),
        ({"error": TypeError("wrong")}, TypeError, "wrong"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_calls_that_were_announced_and_differ_are_errors(pair, options, error, text, waits):
    """Of the rank that waits for the other, or of one that ends."""
    seen = []

    def part(comm):
        try:
            later(comm, **(options if comm.rank else {}))
            if waits:
                comm.gather(b"", "f")
        except (RuntimeError, ValueError, TypeError) as found:
            seen.append((comm.rank, found))
            raise

    with pytest.raises(error, match=text):
        pair(part)
    if waits:
        assert {rank for rank, _ in seen} == {0, 1}
    later_call = pair(lambda comm: comm.gather(bytes([comm.rank]), "next"))
    assert later_call == [[b"\0", b"\1"]] * 2


def test_a_call_that_only_one_rank_makes_is_an_error(pair):
    with pytest.raises(distributed.RankError, match="f: rank 1 has ended, while rank 0 waited"):
        pair(lambda comm: None if comm.rank else later(comm))


def test_an_error_of_a_rank_that_others_do_not_wait_for_ends_the_communicator(pair):
    """What rank 0 has sent is not taken for the record of the next call."""
    caught = []

    def part(comm):
        if comm.rank == 0:
            later(comm)
            comm.start([(1, np.zeros(3))], [], "f").arrive()
            return
        with pytest.raises(TypeError, match="wrong"):
            communicator.agree(comm, "f", raises)
        with pytest.raises(distributed.RankError, match=r"not usable, because .* wrong") as found:
            comm.gather(b"", "again")
        caught.append(found.value)

    def raises():
        raise TypeError("wrong")

    with pytest.raises(distributed.RankError, match="f: rank 1 has raised TypeError: wrong"):
        pair(part)
    assert len(caught) == 1


def test_an_error_of_all_ranks_leaves_the_communicator_usable(pair):
    def part(comm):
        with pytest.raises(TypeError, match="wrong"):
            later(comm, error=TypeError("wrong"))
        return comm.gather(bytes([comm.rank]), "next")

    assert pair(part) == [[b"\0", b"\1"]] * 2


def test_an_error_that_the_function_has_handled_is_not_raised_again(pair):
    def part(comm):
        def calls():
            later(comm, shape=(3 + comm.rank,))  # raises if the other one was first
            comm.gather(b"", "next")

        with pytest.raises((ValueError, distributed.RankError), match="want the same on all ranks"):
            calls()
        return comm.rank

    assert pair(part) == [0, 1]


@pytest.mark.parametrize("plan", ["ring", "heads"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_value_that_is_nan_counts_unless_it_is_hidden(pair, hidden, plan):
    """However small its weight is: that of all keys of one rank is rounded to 0."""
    q, k, v = np.ones((3, 2, 4, 1))
    k[:, 3], v[:, 1] = 800, np.nan
    options = {"mask": np.array([True, False, True, True])[None]} if hidden else {}
    out, lse = fa_cupy.attention(q, k, v, scale=1.0, return_lse=True, **options)
    assert np.isnan(out).all() != hidden
    want = fa_cupy.attention_backward(out, q, k, v, out, lse, scale=1.0, **options)

    def part(comm):
        own = [distributed.split(x, comm) for x in (q, k, v)]
        given = options | {"scale": 1.0, "comm": comm, "plan": plan}
        out, lse = distributed.attention(*own, return_lse=True, **given)
        return out, *distributed.attention_backward(out, *own, out, lse, **given)

    for got, whole in zip(zip(*pair(part), strict=True), (out, *want), strict=True):
        np.testing.assert_allclose(distributed.join(got), whole)


def test_sums_over_ranks_give_no_warnings(pair):
    x = np.full((1, 1), 1e200)

    def part(comm):
        return distributed.linear_attention(
            np.ones((1, 1)), x, x * (1, -1)[comm.rank], comm=comm, feature_map="identity",
            is_causal=False,
        )  # fmt: skip

    assert np.isnan(pair(part)).all()


def test_what_comes_is_compared_as_it_comes(pair):
    """A rank that takes nothing from others keeps no list of their calls."""
    met = threading.Barrier(2)

    def part(comm):
        for _ in range(50):
            later(comm)
            met.wait(5)
        return len(comm._owed[1 - comm.rank])

    assert max(pair(part)) <= 2
