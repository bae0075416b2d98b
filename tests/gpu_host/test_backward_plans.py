"""How gradients on CuPy arrays get to the kernels, which run in the emulator on a stand-in."""

import contextlib
import dataclasses
import itertools
import threading

import numpy as np
import pytest

from fa_cupy import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.masks.blocks import BlockLists
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE
from tests.support.every_run import only, some
from tests.support.kernel_attention import blocks_of
from tests.support.kernel_gradients import case, gradients, rows_of
from tests.support.strategies import lay
from validation import families, peers, turns
from validation.emulator.calls import attention_backward
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator
NAMES = ("q", "k", "v", "dout", "out", "lse", "dlse")
ALL = ("q", "k", "v")
ENTRY = "attention_bwd_sm90"


class Launcher(EmulatorLauncher):
    """Notes which kernels it runs, and gives memory as a device does.

    Attributes
    ----------
    ran : list of str
    steps : list of Step
    turn : callable
        Returns the context that a kernel runs in.
    """

    def __init__(self, take):
        super().__init__(seed=1)
        self.workspace = take
        self.ran, self.steps = [], []
        self.turn = contextlib.nullcontext

    def kernels(self, steps):
        runs = super().kernels(steps)
        return [self._noted(*pair) for pair in zip(steps, runs, strict=True)]

    def _noted(self, step, run):
        def launch(arguments, _):
            self.ran.append(step.variant.source.rpartition("/")[2])
            self.steps.append(step)
            with self.turn():
                run(arguments)

        return launch


@pytest.fixture(scope="module")
def cupy():
    with cupy_stand_in.in_place_of_cupy() as cupy:
        yield cupy


@pytest.fixture
def host(cupy, monkeypatch):
    """The module under test, without plans, on an emulated device."""
    from fa_cupy.core import plan_cache
    from fa_cupy.gpu import attention_backward, workspace

    launcher = Launcher(workspace.take)
    monkeypatch.setattr(workspace, "launcher", lambda device: launcher)
    plan_cache.plans.clear()
    return attention_backward


@pytest.fixture
def launcher(host):
    """What launches the kernels of `host`."""
    return host.workspace.launcher(0)


def forget():
    """Forget all plans."""
    from fa_cupy.core import plan_cache

    plan_cache.plans.clear()


def known():
    """What the calls of a kind are prepared to, for each kind."""
    from fa_cupy.core import plan_cache

    return list(plan_cache.plans.values())


class Call:
    """A call, as what comes in and as device arrays, which lie as `layouts` say."""

    def __init__(self, given, **layouts):
        exact = gradients(given)
        out = np.empty_like(given.dout)
        out[...] = exact.out.astype(given.dout.dtype)
        *arrays, dlse, options = given
        arrays = dict(zip(NAMES, (*arrays, out, exact.lse.astype(np.float32), dlse), strict=True))
        self.given, self.options, self.plain = given, options, arrays
        self.arrays = {name: self.device(x, layouts.get(name)) for name, x in arrays.items()}

    @staticmethod
    def device(x, layout):
        if x is None:
            return None
        if layout is not None:
            x = lay(np, x, layout)
        return cupy_stand_in.ndarray._of(x)

    def problem(self, bias=None, mask=None, **options):
        q, k, v = (self.arrays[name] for name in ALL)
        options = {**self.options, **options, "mask": mask}
        return attention_problem.attention_problem(q, k, v, bias, **options)

    def solve(self, host, cupy, need=ALL, mask=None, bias=None, **options):
        """What the module under test makes of it, None where it does not take it."""

        def empty(shape, dtype, like):
            x = core_arrays.empty_laid_out(cupy, shape, like, dtype)
            cupy_stand_in.bare(x)[...] = np.nan
            return x

        inputs = [*(self.arrays[name] for name in ALL), bias, mask]
        results = [self.arrays[name] for name in ("out", "lse", "dout", "dlse")]
        problem = self.problem(bias, mask, **options)
        found = host.by_kernels(problem, tuple(inputs), tuple(results), need, empty)
        return found and {name: cupy_stand_in.bare(x) for name, x in found.items()}

    def want(self):
        """The kernels' bits."""
        x, rows = self.plain, rows_of(self.given)
        found = attention_backward(
            rows, x["dout"], x["q"], x["k"], x["v"], x["out"], x["lse"], x["dlse"], **self.options
        )
        return dict(zip(ALL, found, strict=True))

    def check(self, host, cupy, need=ALL, mask=None):
        found, want = self.solve(host, cupy, need, mask), self.want()
        assert list(found) == list(need)
        for name, x in found.items():
            like = self.arrays[name]
            assert (x.shape, x.dtype) == (like.shape, like.dtype)
            assert np.argsort(x.strides).tolist() == np.argsort(np.abs(like.strides)).tolist()
            assert x.tobytes() == want[name].tobytes(), name


def small(dims=(64, 64), heads=(2, 2), lengths=(70, 150), **more):
    return case("float16", heads, lengths, dims, **more)


@pytest.mark.parametrize(
    ("dims", "layout"),
    some(itertools.product(((64, 64), (56, 40), (192, 136)), (None, "blhd")), lambda how: how[0]),
)
def test_gradients_are_the_kernels(host, cupy, launcher, dims, layout):
    call = Call(small(dims, (4, 2), layout=layout, dlse=True))
    call.check(host, cupy)
    narrow, wide = ["bwd_sm90", "bwd_convert_dq"], ["bwd_dkdv_sm90", "bwd_dq_sm90"]
    main = narrow if max(dims) <= 128 else wide
    assert launcher.ran == ["bwd_preprocess", *main, "bwd_nonfinite"]


@pytest.mark.parametrize(
    ("dims", "need"),
    some(
        itertools.product(((64, 64), (192, 136)), (("q",), ("k",), ("v", "q"), ("v", "k"))),
        lambda how: how[0],
        2,
    ),
)
def test_what_nobody_asked_for_lies_in_the_workspace(host, cupy, dims, need):
    Call(small(dims)).check(host, cupy, need)


@pytest.mark.parametrize("name", only(NAMES, "q", "v", "out", "lse"))
def test_what_kernels_cannot_read_is_copied(host, cupy, name):
    """An address off 16 bytes, a last axis that goes down or is not the innermost."""
    given = small(dlse=True, is_causal=True, causal_align="bottom_right")
    first = "steps" if name in ("lse", "dlse") else "offset"
    for layout in (first, "reversed", "transposed"):
        call = Call(given, **{name: layout})
        call.check(host, cupy)
        (prepared,) = known()
        # Gradients lie as their arguments do, and kernels write no columns.
        turned = [f"d{name}"] if layout == "transposed" and name in ALL else []
        assert list(prepared.copies) == [name, *turned]
        forget()


def test_a_gradient_of_one_number_is_copied(host, cupy):
    """What a sum over the output gives."""
    given = small()
    given = given._replace(dout=np.ones_like(given.dout))
    call = Call(given)
    one = np.broadcast_to(np.ones((), given.dout.dtype), given.dout.shape)
    call.arrays["dout"] = cupy_stand_in.ndarray._of(one)
    call.check(host, cupy)


def test_keys_that_repeat_along_a_stride_of_0_have_gradients_of_their_own(host, cupy):
    given = small()
    k = np.broadcast_to(given.k[:, :1], given.k.shape)
    call = Call(given._replace(k=np.ascontiguousarray(k)))
    call.arrays["k"] = cupy_stand_in.ndarray._of(np.broadcast_to(call.plain["k"][:, :1], k.shape))
    found, want = call.solve(host, cupy), call.want()
    assert all(found[name].tobytes() == want[name].tobytes() for name in ALL)


def test_arrays_without_batch_axes_and_of_one_row(host, cupy):
    for lengths in ((1, 1), (1, 130), (70, 1)):
        call = Call(small(lengths=lengths, heads=(1, 1)))
        call.check(host, cupy)
        want = call.want()
        for name, x in call.arrays.items():
            if x is not None:
                call.arrays[name] = cupy_stand_in.ndarray._of(cupy_stand_in.bare(x)[0, 0])
        found = call.solve(host, cupy)
        assert all(found[name].tobytes() == want[name][0, 0].tobytes() for name in ALL)


def masked(dims=(64, 64), shape=(2, 4), lengths=(200, 300), **more):
    """A call under a mask of that batch shape."""
    mask = blocks_of(np.random.default_rng(5), *shape, *lengths)
    return Call(small(dims, (4, 2), lengths, mask=mask, **more)), mask


def device_mask(mask):
    """A BitMask as one that was made on the device."""
    lists = BlockLists(*map(cupy_stand_in.owned, mask._store.with_words()))
    return BitMask._on_device(mask._grid, lists, mask.entries)


TABLES = ["block_tables", "transpose_words"]


@pytest.mark.parametrize("shape", only([((2, 4),), ((4,),), ((2, 1),), ((),)], ((2, 1),)), ids=str)
def test_masks_of_bool_are_packed_by_every_call(host, cupy, launcher, shape):
    call, mask = masked(shape=shape, lengths=(130, 150), dlse=True)
    for _ in range(2):
        call.check(host, cupy, mask=cupy_stand_in.owned(mask))
    kernels = ["bwd_preprocess", "bwd_sm90", "bwd_convert_dq", "bwd_nonfinite"]
    assert launcher.ran == 2 * [*TABLES, *kernels]


@pytest.mark.long
def test_masks_of_wide_dims(host, cupy, launcher):
    call, mask = masked((192, 136), (4,), (130, 300))
    call.check(host, cupy, mask=cupy_stand_in.owned(mask))
    assert launcher.ran == [
        *TABLES,
        "bwd_preprocess",
        "bwd_dkdv_sm90",
        "bwd_dq_sm90",
        "bwd_nonfinite",
    ]


def test_a_mask_that_is_the_same_for_all_queries(host, cupy):
    """One row of its blocks is packed."""
    seen = np.random.default_rng(0).random((2, 1, 1, 300)) < 0.5
    seen[..., 128:256] = False
    call = Call(small((128, 128), (4, 2), (200, 300), mask=seen))
    call.check(host, cupy, mask=cupy_stand_in.owned(seen))


@pytest.mark.parametrize(
    ("shape", "place"),
    some(itertools.product(((2, 4), (1, 1)), ("host", "device")), lambda how: how[0]),
)
def test_tables_of_bit_masks_are_made_once(host, cupy, launcher, shape, place):
    call, mask = masked(shape=shape, is_causal=True, causal_align="bottom_right")
    bits = BitMask.from_dense(mask)
    given = bits if place == "host" else device_mask(bits)
    for _ in range(2):
        call.check(host, cupy, mask=given)
    kernels = ["bwd_preprocess", "bwd_sm90", "bwd_convert_dq", "bwd_nonfinite"]
    assert launcher.ran == [*TABLES, *kernels, *kernels]
    # Another kind of call, and slices, which share the lists.
    call, _ = masked(shape=shape)
    call.check(host, cupy, mask=given[:])
    assert launcher.ran[len(TABLES) + 8 :] == kernels


def test_graphs_make_tables_that_no_call_has_made(host, cupy, launcher):
    """Of lists on the device, which the captured stream may be waiting for."""
    call, mask = masked()
    given = device_mask(BitMask.from_dense(mask))
    with CAPTURE.record():
        for _ in range(2):
            call.check(host, cupy, mask=given)
    assert launcher.ran.count("block_tables") == 2
    assert not CAPTURE.held
    assert not given._store.device_tables
    for _ in range(2):
        call.check(host, cupy, mask=given)
    assert launcher.ran.count("block_tables") == 3
    assert given._store.device_tables


def test_a_mask_that_hides_everything(host, cupy):
    mask = np.zeros((200, 300), np.bool_)
    call = Call(small((64, 64), (2, 2), (200, 300), mask=mask))
    for given in (cupy_stand_in.owned(mask), BitMask.from_dense(mask)):
        found = call.solve(host, cupy, mask=given)
        assert not any(x.any() for x in found.values())


ELSEWHERE = {
    "dims that rows of 16 bytes do not have": (small((60, 64)), {}),
    "wide dims": (small((264, 64)), {}),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_is_not_for_the_kernels(host, cupy, launcher, what):
    given, options = ELSEWHERE[what]
    call = Call(given)
    assert call.solve(host, cupy, **options) is None
    assert not launcher.ran


def test_calls_of_nothing_are_not_for_the_kernels(host, cupy, launcher):
    call, kept = Call(small()), {"q": "q", "lse": "q", "k": "k", "v": "k", "out": "q", "dout": "q"}
    for empty in (None, "q", "k"):
        for name, of in kept.items():
            x = call.plain[name]
            x = x[:0] if empty is None else x[:, :, :0] if empty == of else x
            call.arrays[name] = cupy_stand_in.ndarray._of(x)
        assert call.solve(host, cupy) is None
    # No heads of queries that share those of one head of keys.
    for name, of in kept.items():
        x = call.plain[name]
        call.arrays[name] = cupy_stand_in.ndarray._of(x[:, :0] if of == "q" else x[:, :1])
    assert call.solve(host, cupy) is None
    assert not launcher.ran


def test_keys_of_all_entries_are_not_for_the_kernels(host, cupy, launcher):
    """Sums over entries but those next to each other."""
    given = small(heads=(2, 2))
    call = Call(given)
    for name in ("k", "v"):
        call.arrays[name] = cupy_stand_in.ndarray._of(call.plain[name][:1])
    assert call.solve(host, cupy) is None
    assert not launcher.ran


def test_other_devices_have_no_kernels(host, cupy, launcher):
    call = Call(small())
    for target in (None, "sm_75"):
        launcher.target = target
        forget()
        assert call.solve(host, cupy) is None


def test_a_plan_serves_all_calls_of_a_kind(host, cupy):
    calls = [Call(small(seed=seed)) for seed in range(2)]
    for call in (*calls, *calls):
        call.check(host, cupy)
    (prepared,) = known()
    (kept,) = prepared.plan._pool
    assert len(kept.launches) == 4
    Call(small(seed=1, dlse=True)).check(host, cupy)
    Call(small(seed=1)).check(host, cupy, ("q",))
    Call(small(seed=1), k="offset").check(host, cupy)  # of the same strides
    assert len(known()) == 4


def test_a_pointer_without_a_map_is_left_to_others(host, cupy, launcher):
    launcher.tensor_map = lambda pointer, dtype, *geometry: None
    assert Call(small()).solve(host, cupy) is None
    assert not launcher.ran


def test_a_captured_call_works_in_memory_of_its_graph(host, cupy, launcher):
    call = Call(small(dlse=True), lse="steps")
    want = call.want()
    with CAPTURE.record():
        launcher.ran = CAPTURE.log
        found = call.solve(host, cupy, ("k",))
    assert found["k"].tobytes() == want["k"].tobytes()
    (result, size, _), node, *launches, last = CAPTURE.log
    assert (result, size) == ("pool", found["k"].nbytes)
    assert node[0] == "malloc"
    assert launches == ["bwd_preprocess", "bwd_sm90", "bwd_convert_dq", "bwd_nonfinite"]
    assert last == ("free", node[2])


def test_threads_do_not_share_structs_or_workspaces(host, cupy, launcher):
    calls = [Call(small(lengths=(20, 30), seed=seed)) for seed in range(3)]
    calls[0].check(host, cupy)  # so that all find a plan
    wants, found = [call.want() for call in calls], {}
    barrier = threading.Barrier(len(calls))
    one = threading.Lock()

    def together():
        barrier.wait(60)  # all have written their structs
        return one  # the emulator is for one thread

    launcher.turn = together

    def work(i):
        found[i] = calls[i].solve(host, cupy)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(wants):
        assert all(found[i][name].tobytes() == want[name].tobytes() for name in ALL)
    (prepared,) = known()
    assert len(prepared.plan._pool) == len(calls)


def test_memory_that_is_not_there_leaves_all_as_it_was(host, cupy, launcher, monkeypatch):
    call = Call(small())

    def refuse(size):
        raise MemoryError(f"no {size} bytes")

    with cupy_stand_in.using_allocator(refuse), pytest.raises(MemoryError, match="bytes"):
        call.solve(host, cupy)
    assert not launcher.ran
    call.check(host, cupy)


@pytest.mark.long
def test_other_rows_beside_the_table_s(host, cupy, launcher, monkeypatch):
    """As in `python -m validation turns`: changed rows have plans, and so kernels, of their own."""
    from fa_cupy.gpu import kernels

    call = Call(small(dims=(128, 128)))
    family = dataclasses.replace(
        families.FAMILIES[turns.FAMILY],
        impls={"fa_cupy": lambda case, inputs: peers.Call(lambda: call.solve(host, cupy), None)},
    )
    monkeypatch.setitem(families.FAMILIES, turns.FAMILY, family)
    select = kernels.attention_backward.select

    def with_threads(count):
        def change(chain):
            return [
                dataclasses.replace(row, store_threads=count) if row.entry == ENTRY else row
                for row in chain
            ]

        return turns.with_rows(change)

    made = [with_threads(count)(None, None) for count in (1, 3)]
    want = call.want()
    for once in (*made, *made):
        for name, x in once.run().items():
            np.testing.assert_allclose(*(y.astype(float) for y in (x, want[name])), atol=0.05)
    assert kernels.attention_backward.select is select
    assert not known()
    rows = [step.variant for step in launcher.steps]
    threads = [row.store_threads for row in rows if row.entry == ENTRY]
    assert threads == [1, 3, 1, 3]


def test_rows_too_far_apart_for_the_kernels_are_copied(host):
    def readable(step):
        return host._readable("q", host.Laid((2, 64), (step, 2), np.dtype(np.float16)), 0)

    assert readable(2**32 - 16)
    assert not readable(2**32)
    assert not readable(0)
