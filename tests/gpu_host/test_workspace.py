"""Where calls on a GPU take memory from, on NumPy in place of CuPy: nothing is computed here.

What graphs do with it on a device is in ``tests/gpu/test_graphs.py``.
"""

import ast
import contextlib
import gc
import sys
import threading

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask
from fa_cupy.core import attention_problem, linear_problem
from tests.core.test_checks import NO_OPTIONS
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, ndarray, owned
from tests.support.every_run import only
from validation.digest import ROOT

HALF, SINGLE, DOUBLE = map(np.dtype, (np.float16, np.float32, np.float64))


@pytest.fixture
def cupy():
    """A device of two multiprocessors, whose kernels are logged and compute nothing."""
    # What no kernel has written may be any number.
    with cupy_stand_in.on_a_device(multiProcessorCount=2) as found, np.errstate(all="ignore"):
        yield found


@pytest.fixture
def workspace(cupy):
    from fa_cupy.gpu import workspace

    return workspace


def array(*shape, dtype=HALF):
    return owned(np.zeros(shape, dtype))


def is_node(x):
    """Whether an array lies in memory of a graph."""
    mallocs = (event for event in CAPTURE.log if event[0] == "malloc")
    return any(begin <= x.data.ptr < begin + size for _, size, begin in mallocs)


def kinds():
    return [event[0] for event in CAPTURE.log]


# The module


def test_memory_is_that_of_the_allocator_without_a_capture(workspace, cupy):
    before = cupy.cuda.get_allocator()
    with workspace.computing(0) as call:
        assert not call.captured
        assert cupy.cuda.get_allocator() is before
        with workspace.temporaries(), workspace.results():
            assert cupy.cuda.get_allocator() is before
        kept = workspace.take(100), cupy.empty(3), workspace.empty((3,), HALF)
        assert workspace.hand_over(kept[1]) is kept[1]
    assert CAPTURE.nodes == {}


class Alarm(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("captured", only([False, True], True))
def test_an_exception_of_a_handler_leaves_nothing_changed(workspace, cupy, captured):
    """Wherever it comes: at the beginning of every function that the context calls."""
    before, steps = cupy.cuda.get_allocator(), 0

    def enter_until(last):
        nonlocal steps
        steps = 0

        def trace(frame, event, argument):
            nonlocal steps
            if frame.f_code.co_filename not in (workspace.__file__, contextlib.__file__):
                return None
            steps += event == "call"  # which is where Python runs handlers, among others
            if steps == last and event == "call":
                sys.settrace(None)
                raise Alarm
            return trace

        context = workspace.computing(0)
        old = sys.gettrace()
        sys.settrace(trace)
        try:
            with context:
                sys.settrace(old)
                return True
        except Alarm:
            return False
        finally:
            sys.settrace(old)

    last = 0
    with CAPTURE.record() if captured else contextlib.nullcontext():
        while not enter_until(last := last + 1):
            assert last < 1000
            gc.collect(1)  # what this try has made; all objects of the tests before would take long
            assert workspace.current() is None, last
            assert cupy.cuda.get_allocator() is before, last
    assert last > 5


def test_what_is_taken_in_a_capture_is_given_back_when_it_goes(workspace):
    with CAPTURE.record():
        memory = workspace.take(100)
        assert kinds() == ["malloc"]
        del memory
        assert kinds() == ["malloc", "free"]
        assert workspace.take(0).ptr is not None
        assert kinds() == ["malloc", "free"]


def test_arrays_hold_their_memory_through_views(workspace, cupy):
    with CAPTURE.record():
        with workspace.temporaries():
            x = cupy.zeros((4, 6), HALF)
        view = x[1:, ::2].T
        del x
        assert kinds() == ["malloc"]
        del view
        assert kinds() == ["malloc", "free"]
        cupy.zeros(3)
        assert kinds()[2:] == ["pool"]


def test_a_call_makes_temporaries_and_results(workspace, cupy):
    asked = []

    def mine(size):
        asked.append(size)
        return cupy_stand_in.pool(size)

    like = array(2, 3, 4).transpose(1, 0, 2)
    with CAPTURE.record(), cupy.cuda.using_allocator(mine):
        with workspace.computing(0) as call:
            assert call.captured
            temporary = cupy.zeros((5,), SINGLE)
            result = workspace.empty((3, 2, 7), HALF, like)
            with workspace.results():
                second = cupy.zeros((9,), SINGLE)
                with workspace.temporaries():
                    other = cupy.zeros((6,), SINGLE)
        assert asked == [2 * 42, 36]
        assert is_node(temporary)
        assert is_node(other)
        assert not is_node(result)
        assert not is_node(second)
        # Given back though they are held: after the capture it would be too late.
        assert not CAPTURE.held
        assert cupy.cuda.get_allocator() is mine
    assert result.strides == (14, 42, 2)  # as those of `like` are in order


def fail(cupy):
    held = cupy.zeros(3)
    assert held.size == 3
    raise ValueError("no such thing")


@pytest.mark.parametrize("inner", [False, True])
def test_an_error_gives_everything_back(workspace, cupy, inner):
    before = cupy.cuda.get_allocator()
    with CAPTURE.record():
        try:
            with (
                workspace.computing(0),
                workspace.computing(0) if inner else contextlib.nullcontext(),
            ):
                held = cupy.zeros(3)
                raise ValueError("no such thing")
        except ValueError as error:
            kept = error  # with its frames
        assert kept.__traceback__ is not None
        assert held.size == 3
        assert not CAPTURE.held
    assert cupy.cuda.get_allocator() is before
    assert workspace.current() is None


def test_an_error_of_a_broken_capture_is_not_hidden(workspace, cupy, monkeypatch):
    def refuse(pointer, stream):
        raise cupy.cuda.runtime.CUDARuntimeError("the capture was invalidated")

    with CAPTURE.record():
        monkeypatch.setattr(cupy.cuda.runtime, "freeAsync", refuse)
        with pytest.raises(ValueError, match="no such thing"), workspace.computing(0):
            fail(cupy)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError), workspace.computing(0):
            held = cupy.zeros(3)
        del held
    assert workspace.current() is None


def test_another_library_makes_results(workspace, cupy):
    made = []

    def new(shape, dtype, order):
        made.append((tuple(shape), dtype, list(order)))
        return "made"

    like = array(2, 3, 4).transpose(1, 0, 2)
    with workspace.computing(0, None, new):
        assert workspace.foreign()
        assert workspace.empty((3, 2, 5), HALF, like) == "made"
        assert workspace.empty((3, 2), SINGLE) == "made"
        with workspace.computing(0):
            assert not workspace.foreign()
    assert not workspace.foreign()
    assert made == [((3, 2, 5), HALF, [1, 0, 2]), ((3, 2), SINGLE, [0, 1])]


def test_a_temporary_is_copied_to_the_caller(workspace, cupy):
    with CAPTURE.record():
        with workspace.computing(0):
            x = cupy.arange(24).reshape(4, 6).astype(np.int32)
            found = workspace.hand_over(x.T[1:])
            own = workspace.empty((3,), HALF)
            assert workspace.hand_over(own) is own
        assert not is_node(found)
        assert found.get().tolist() == np.arange(24).reshape(4, 6).T[1:].tolist()


def test_results_of_a_call_inside_of_a_call_are_temporaries_of_that(workspace, cupy):
    with CAPTURE.record():
        with workspace.computing(0):
            with workspace.computing(0):
                other, result = cupy.zeros(3, SINGLE), workspace.empty((5,), SINGLE)
            assert is_node(result)
            assert CAPTURE.held == {result.data.ptr}
            assert other.size == 3
        assert not CAPTURE.held
    assert "pool" not in kinds()


def test_threads_are_in_calls_of_their_own(workspace, cupy):
    seen = []

    def work():
        seen.append((workspace.current(), cupy.cuda.get_allocator()))

    with CAPTURE.record(), workspace.computing(0):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [(None, cupy_stand_in.pool)]


# Public functions


def attend(out=None, v_step=1, mask=None, **options):
    q, k = array(2, 4, 700, 64), array(2, 2, 700, 64)
    v = array(2, 2, 700, 64 * v_step)[..., ::v_step]
    mask, out = mask and mask(), out and out()
    return lambda: fa_cupy.attention(q, k, v, mask=mask, out=out, **options)


def attend_backward(need=None, mask=None, dlse=False, v_step=1, bias=None, **options):
    q, k = array(2, 4, 300, 64), array(2, 2, 300, 64)
    v = array(2, 2, 300, 64 * v_step)[..., ::v_step]
    rows = array(2, 4, 300, dtype=SINGLE)
    mask = mask and mask()
    return lambda: fa_cupy.attention_backward(
        q, q, k, v, q, rows, bias, mask=mask, dlse=rows if dlse else None, need=need, **options
    )


def with_places(what="lengths", gradients=False, dtype=HALF, dim=64, shared=2, **options):
    """A call that says where keys are in arrays of the device."""
    numbers, whole = np.dtype(np.int64), (2, 4, 300, dim)
    places = {
        "lengths": {"k_lengths": array(2, dtype=numbers)},
        "pages": {"page_table": array(2, 19, dtype=numbers)},
        "offsets": {"q_offsets": array(3, dtype=numbers)},
    }
    options |= places[what]
    q, k = array(*whole, dtype=dtype), array(shared, 4, *whole[2:], dtype=dtype)
    if what == "pages":
        k = array(40, 4, 16, dim, dtype=dtype)
    if not gradients:
        return lambda: fa_cupy.attention(q, k, k, **options)
    rows = array(*whole[:-1], dtype=DOUBLE if dtype == DOUBLE else SINGLE)
    return lambda: fa_cupy.attention_backward(q, q, k, k, q, rows, **options)


def multiply(step=1, out=None, state=False, dtype=HALF, length=3000, dim=64):
    q, k = (array(2, length, dim, dtype=dtype) for _ in range(2))
    v = array(2, length, dim * step, dtype=dtype)[..., ::step]
    out = out and out()
    initial = array(2, dim, dim, dtype=DOUBLE if dtype == DOUBLE else SINGLE) if state else None
    return lambda: fa_cupy.causal_product(
        q, k, v, initial_state=initial, return_state=state, out=out
    )


def multiply_backward(heads=4, dtype=HALF, state=False, dim=64):
    q, k = array(2, 4, 300, dim, dtype=dtype), array(2, heads, 300, dim, dtype=dtype)
    initial = array(2, heads, 64, 64, dtype=SINGLE) if state else None
    return lambda: fa_cupy.causal_product_backward(
        q, q, k, k, initial_state=initial, dstate=initial
    )


def multiply_backward_without_queries():
    q, k, states = array(0, 300, 64), array(1, 300, 64), array(1, 64, 64, dtype=SINGLE)
    dout = array(0, 300, 64)
    return lambda: fa_cupy.causal_product_backward(
        dout, q, k, k, initial_state=states, dstate=states
    )


def pairs(x):
    """A feature map that makes arrays of its own."""
    return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)


def linear(feature="elu1", out=None, dtype=HALF, dim=64, state=False, **options):
    q, k = (array(2, 300, dim, dtype=dtype) for _ in range(2))
    out = out and out()
    if state:
        options |= {"initial_state": array(2, dim, dim + 1, dtype=SINGLE), "return_state": True}
    return lambda: fa_cupy.linear_attention(q, k, k, feature_map=feature, out=out, **options)


def linear_backward(feature="elu1", dtype=HALF, state=False, heads=4, dim=64, **options):
    q, k = array(2, 4, 300, dim, dtype=dtype), array(2, heads, 300, dim, dtype=dtype)
    if state:
        states = {
            name: array(2, heads, 64, 65, dtype=SINGLE) for name in ("initial_state", "dstate")
        }
        options |= states
    return lambda: fa_cupy.linear_attention_backward(q, q, k, k, feature_map=feature, **options)


def merge():
    outs, lses = [array(4, 30, 8) for _ in range(3)], [array(4, 30, dtype=SINGLE) for _ in range(3)]
    return lambda: fa_cupy.merge_attention(outs, lses)


def scaled(**options):
    x = array(2, 4, 700, 64)
    return lambda: fa_cupy.scaled_dot_product_attention(x, x, x, **options)


def dense_mask():
    return owned(np.ones((700, 700), bool))


def square_mask():
    return owned(np.ones((300, 300), bool))


def bits():
    return BitMask.from_dense(np.tri(700, dtype=bool))


def strided():
    return array(2, 4, 700, 128)[..., ::2]


CASES = {
    "attention, one query": lambda: (
        lambda q, k: lambda: fa_cupy.attention(q, k, k)
    )(array(2, 1, 64), array(2, 900, 64)),
    "attention": attend,
    "attention with its LSE": lambda: attend(return_lse=True),
    "attention, v strided": lambda: attend(v_step=2, return_lse=True),
    "attention, out": lambda: attend(out=lambda: array(2, 4, 700, 64), return_lse=True),
    "attention, out strided": lambda: attend(out=strided),
    "attention, mask of bool": lambda: attend(mask=dense_mask),
    "attention, mask of bool, copies": lambda: attend(mask=dense_mask, v_step=2, return_lse=True),
    "attention, BitMask": lambda: attend(mask=bits),
    "attention, float32": lambda: (
        lambda x: lambda: fa_cupy.attention(x, x, x)
    )(array(2, 30, 64, dtype=SINGLE)),
    "attention, float32 of many queries": lambda: (
        lambda x: lambda: fa_cupy.attention(x, x, x, return_lse=True)
    )(array(2, 600, 64, dtype=SINGLE)),
    "attention, tf32": lambda: (
        lambda x: lambda: fa_cupy.attention(x, x, x, precision="tf32")
    )(array(2, 600, 64, dtype=SINGLE)),
    "attention, float64": lambda: (
        lambda x: lambda: fa_cupy.attention(x, x, x)
    )(array(2, 30, 64, dtype=DOUBLE)),
    "attention_backward": attend_backward,
    "attention_backward of v": lambda: attend_backward(need=["v"], v_step=2, dlse=True),
    "attention_backward with a bias": lambda: attend_backward(
        bias=array(300, 300, dtype=SINGLE)
    ),
    "attention_backward of a bias of heads": lambda: attend_backward(
        need=["bias"], bias=array(4, 1, 1), dlse=True
    ),
    "attention_backward, mask of bool": lambda: attend_backward(mask=square_mask),
    "causal_product": multiply,
    "causal_product with a state": lambda: multiply(state=True),
    "causal_product, v strided": lambda: multiply(step=2, state=True),
    "causal_product, out strided": lambda: multiply(out=lambda: array(2, 3000, 128)[..., ::2]),
    "causal_product, float32": lambda: multiply(dtype=SINGLE),
    "causal_product, float64 with a state": lambda: multiply(dtype=DOUBLE, state=True),
    "causal_product_backward": multiply_backward,
    "causal_product_backward, float64": lambda: multiply_backward(dtype=DOUBLE),
    "causal_product_backward, heads": lambda: multiply_backward(heads=2),
    "causal_product_backward, states": lambda: multiply_backward(heads=2, state=True, dtype=SINGLE),
    "causal_product_backward without queries": multiply_backward_without_queries,
    "linear_attention": linear,
    "linear_attention, no feature": lambda: linear("identity", dtype=SINGLE),
    "linear_attention with a function": lambda: linear(pairs, dim=8),
    "linear_attention, out strided": lambda: linear(out=lambda: array(2, 300, 128)[..., ::2]),
    "linear_attention with a state": lambda: linear(state=True),
    "linear_attention, float64": lambda: linear(dtype=DOUBLE),
    "linear_attention_backward": linear_backward,
    "linear_attention_backward, float64": lambda: linear_backward(dtype=DOUBLE),
    "linear_attention_backward, heads": lambda: linear_backward("relu", SINGLE, heads=2),
    "linear_attention_backward, states": lambda: linear_backward("exp", state=True, heads=2),
    "merge_attention": merge,
    "scaled_dot_product_attention": lambda: scaled(is_causal=True),
}  # fmt: skip
REFUSED = {
    "attention, wide float64": lambda: (
        lambda x: lambda: fa_cupy.attention(x, x, x)
    )(array(2, 16, 264, dtype=DOUBLE)),
    "causal_product, wide float64": lambda: multiply(dtype=DOUBLE, length=30, dim=264),
    "causal_product_backward, wide float64": lambda: multiply_backward(dtype=DOUBLE, dim=264),
    "linear_attention, wide float64": lambda: linear(dtype=DOUBLE, dim=264),
    "linear_attention, all keys": lambda: linear(is_causal=False),
    "linear_attention_backward, wide float64": lambda: linear_backward(dtype=DOUBLE, dim=264),
    "linear_attention_backward, all keys": lambda: linear_backward(is_causal=False),
    "kernel_regression": lambda: (
        lambda x: lambda: fa_cupy.kernel_regression(x, x, x, 1.0)
    )(array(30, 2)),
    "kernel_regression_backward": lambda: (
        lambda x: lambda: fa_cupy.kernel_regression_backward(x, x, x, x, 1.0)
    )(array(30, 2)),
    "non_local_means": lambda: (
        lambda x: lambda: fa_cupy.non_local_means(x, 1.0)
    )(array(30, 30, dtype=SINGLE)),
    "prefix_state": lambda: (lambda x: lambda: fa_cupy.prefix_state(x, x))(array(2, 30, 64)),
    "prefix_state, q": lambda: (
        lambda x: lambda: fa_cupy.prefix_state(x, x, range(30), q=x)
    )(array(2, 30, 64)),
    "attention, wide dims and lengths": lambda: with_places(dim=264),
    "attention, wide dims and pages": lambda: with_places("pages", dim=264),
    "attention, wide dims and offsets": lambda: with_places("offsets", dim=264),
    "attention_backward, lengths": lambda: with_places(gradients=True, dim=60),
    "attention_backward, lengths and a band": lambda: with_places(
        gradients=True, dim=60, is_causal=True, causal_align="bottom_right"
    ),
    "attention_backward, lengths and a bias of wide dims": lambda: with_places(
        gradients=True, dtype=DOUBLE, dim=264, bias=array(300, 300, dtype=DOUBLE)
    ),
    "attention_backward, lengths of keys that all share": lambda: with_places(
        gradients=True, shared=1
    ),
    "attention_backward, offsets": lambda: with_places("offsets", gradients=True, dim=60),
}  # fmt: skip


def test_all_public_functions_are_captured_here():
    named = {name.partition(",")[0].partition(" ")[0] for name in (*CASES, *REFUSED)}
    others = {"BitMask", "KVCache", "Score", "__version__", "dropout_mask"}  # that one is of NumPy
    assert named == set(fa_cupy.__all__) - others


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("name", CASES)
def test_a_captured_call_works_in_memory_of_its_graph(cupy, name, known):
    call = CASES[name]()
    if known:
        call()
        call()
    assert CAPTURE.nodes == {}
    with CAPTURE.record():
        found = call()
        assert not CAPTURE.held
    results = {x.data.ptr: x.nbytes for x in (found if isinstance(found, tuple) else (found,))}
    # The pool gives results and nothing else; a plan makes room for a counter behind an LSE.
    for _, size, address in (event for event in CAPTURE.log if event[0] == "pool"):
        assert size - results.pop(address) in (0, 16)
    assert len(results) == (", out" in name)  # what the caller gave


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_said_before_anything_is_launched(cupy, name):
    call = REFUSED[name]()
    with CAPTURE.record():
        function = name.partition(",")[0].partition(" ")[0]
        with pytest.raises(NotImplementedError, match=rf"^{function}: cannot be captured .* want "):
            call()
        assert not [event for event in CAPTURE.log if event[0] != "pool"]


def test_masks_are_made_before_a_capture(cupy):
    mask = dense_mask()
    with (
        CAPTURE.record(),
        pytest.raises(NotImplementedError, match=r"^BitMask: cannot be captured"),
    ):
        BitMask.from_dense(mask)


def test_a_captured_forward_has_the_grid_of_any_other(cupy):
    call = attend(return_lse=True)
    call()
    with CAPTURE.record():
        call()
    *_, node, launched, given = CAPTURE.log
    assert node[:2] == ("malloc", 16)
    assert launched == ("launch", "attention_fwd_sm90", 2)
    assert given == ("free", node[2])


def test_another_library_makes_every_result(workspace, cupy):
    """The LSE and the state too; nothing is left for the pool of CuPy."""
    from fa_cupy.gpu import attention, causal_product, causal_product_backward

    made = []

    def new(shape, dtype, order):
        assert [*order] == [*range(len(shape))]
        made.append(ndarray(shape, dtype, cupy_stand_in.malloc(4 * np.prod(shape))))
        return made[-1]

    q, k, state = array(2, 3000, 64), array(2, 3000, 128)[..., ::2], array(2, 64, 64, dtype=SINGLE)
    direct, copied = (
        attention_problem.attention_problem(q, x, q, None, None, **NO_OPTIONS) for x in (q, k)
    )
    causal = linear_problem.product_problem("causal_product", q, k, q, state)
    with CAPTURE.record(), workspace.computing(0, None, new):
        out = new(q.shape, HALF, (0, 1, 2))
        _, lse = attention.attention(direct, q, q, q, None, None, out, True)
        results = [out, lse, attention.attention(copied, q, k, q, None, None, out, True)[1]]
        results += causal_product.product(
            causal, q, k, q, state, None, reverse=False, return_state=True
        )
        results += causal_product_backward.backward(causal, q, q, k, q, state, state, reverse=False)
    assert "pool" not in kinds()
    assert len(made) == len(results)
    assert {id(x) for x in made} == {id(x) for x in results}
    assert lse.shape == (2, 3000)


# The source


# What gives memory, or says who does. Functions that repeated calls go through allocate results by
# it; lists and tables stay with their mask. All the rest goes through the workspace.
ALLOCATORS = {
    "Memory", "MemoryPointer", "MemoryPool", "UnownedMemory", "alloc", "freeAsync", "get_allocator",
    "malloc", "mallocAsync", "malloc_async", "set_allocator", "using_allocator",
}  # fmt: skip
ALLOCATING = {
    "attention": {"Call.__call__"},
    "attention_backward": {"cached"},
    "causal_product": {"cached"},
    "causal_product_backward": {"cached"},
    "masks.binding": {"CallMask._prepared", "apart", "malloc"},
    "masks.block_tables": {"CallTables._of_bits"},
    "masks.device_mask": {"arrays_of"},
}


def users_of_allocators(tree):
    """The functions of a module that name an allocator."""
    found = set()

    def visit(node, inside):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            inside = (*inside, node.name)
        name = getattr(node, "id", None) or getattr(node, "attr", None)
        if name in ALLOCATORS:
            found.add(".".join(inside))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, ())
    return found


def test_nothing_else_allocates():
    found = {}
    folder = ROOT / "fa_cupy/gpu"
    for path in folder.rglob("*.py"):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        if name != "workspace":
            found[name] = users_of_allocators(ast.parse(path.read_bytes()))
    assert {name: users for name, users in found.items() if users} == ALLOCATING
