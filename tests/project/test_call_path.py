"""The path of a call on CuPy arrays through the package, counted without a GPU.

All Python code of the package runs; CuPy and the driver are stand-ins. The counts may only shrink:
a change that shortens a path lowers its limits here.
"""

import gc
import inspect
import itertools
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, owned

PACKAGE = Path(fa_cupy.__file__).parent
HALF, SINGLE = np.float16, np.float32


class Counts(NamedTuple):
    """Sizes of a call path.

    Attributes
    ----------
    calls : int
        Calls of named functions of the package.
    modules : int
        Modules that these lie in.
    returns : int
        How often one of them is entered again by a call from another.
    """

    calls: int
    modules: int
    returns: int


# "cold" is the first call of its kind, with its modules imported and its kernels loaded; "hot" is
# the third such call. The limits equal the counts of today; later changes lower them.
LIMITS = {
    ("attention", "cold"): Counts(151, 19, 45),
    ("attention", "hot"): Counts(5, 4, 0),
    ("attention with a BitMask", "cold"): Counts(216, 29, 66),
    ("attention with a BitMask", "hot"): Counts(9, 7, 1),
    ("attention with pages", "cold"): Counts(262, 22, 55),
    ("attention with pages", "hot"): Counts(6, 5, 0),
    ("attention_backward", "cold"): Counts(298, 23, 72),
    ("attention_backward", "hot"): Counts(7, 4, 0),
    ("attention_backward with a BitMask", "cold"): Counts(410, 38, 118),
    ("attention_backward with a BitMask", "hot"): Counts(11, 7, 0),
    ("causal_product", "cold"): Counts(227, 28, 48),
    ("causal_product", "hot"): Counts(5, 4, 0),
    ("causal_product_backward", "cold"): Counts(328, 29, 96),
    ("causal_product_backward", "hot"): Counts(5, 4, 0),
}
# Limits to reach: a repeated call makes few Python calls, and a first call enters few modules, each
# of them once.
GOALS = {
    "cold": {"modules": 10, "returns": 0},
    "hot": {"calls": 10},
    "hot gradients": {"calls": 15},
}
KERNELS = {
    "attention": ["attention_fwd_sm90"],
    "attention with pages": ["attention_fwd_splitkv"],
    "attention_backward": [
        "attention_bwd_preprocess", "attention_bwd_sm90", "attention_bwd_convert_dq",
        "attention_bwd_nonfinite",
    ],
    "causal_product": ["linear_chunk_sm90"],
    "causal_product_backward": ["linear_chunk_sm90"],
}  # fmt: skip
# They make the tables that a BitMask keeps.
MASK_KERNELS = {"attention_backward with a BitMask": ["mask_block_tables", "mask_transpose_words"]}


class Trace(NamedTuple):
    """The calls of named functions, as (module, function) in order, and the kernels launched."""

    steps: list[tuple[str, str]]
    kernels: list[str]

    @property
    def visits(self):
        """The functions of each stay in a module, as (module, functions) in order."""
        groups = itertools.groupby(self.steps, lambda step: step[0])
        return [(module, [function for _, function in steps]) for module, steps in groups]

    @property
    def counts(self):
        modules = len({module for module, _ in self.steps})
        return Counts(len(self.steps), modules, len(self.visits) - modules)

    def __str__(self):
        return "\n".join(f"{module}: {', '.join(names)}" for module, names in self.visits)


def trace(call):
    """Run a call and return its `Trace`."""
    steps, resumed, logged = [], set(), len(CAPTURE.log)

    def note(frame, event, argument):
        code = frame.f_code
        ours = code.co_filename.startswith(f"{PACKAGE}{os.sep}")
        if event != "call" or not ours or code.co_name.startswith("<"):
            return
        if code.co_flags & inspect.CO_GENERATOR:  # counts once, however often it is resumed
            if frame in resumed:
                return
            resumed.add(frame)
        path = Path(code.co_filename).relative_to(PACKAGE)
        module = ".".join(path.with_suffix("").parts)
        steps.append((module, getattr(code, "co_qualname", code.co_name)))

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # a collection would run destructors that other calls have left
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return Trace(steps, [name for kind, name, _ in CAPTURE.log[logged:] if kind == "launch"])


def prepare(name, length):
    """Return a call of a public function on new arrays of that length."""
    function, _, what = name.partition(" with ")

    def array(heads=4, *dims, dtype=HALF):
        return owned(np.zeros((2, heads, length, *dims), dtype))

    q, k, v, dout = array(4, 64), array(2, 64), array(2, 64), array(4, 64)
    options = {"is_causal": True}
    if what == "pages":
        of_keys = np.zeros(2, np.int32), np.zeros((2, length // 16), np.int32)
        lengths, pages = map(owned, of_keys)
        keys = owned(np.zeros((7, 2, 16, 64), HALF))
        query = owned(np.zeros((2, 4, 1, 64), HALF))
        return lambda: fa_cupy.attention(query, keys, keys, k_lengths=lengths, page_table=pages)
    if what:
        options = {"mask": BitMask.from_dense(np.tri(length, dtype=bool))}
    if function == "attention":
        return lambda: fa_cupy.attention(q, k, v, **options)
    if function == "attention_backward":
        out, lse = array(4, 64), array(4, dtype=SINGLE)
        return lambda: fa_cupy.attention_backward(dout, q, k, v, out, lse, **options)
    if function == "causal_product":
        return lambda: fa_cupy.causal_product(q, q, dout)
    assert function == "causal_product_backward"
    return lambda: fa_cupy.causal_product_backward(dout, q, q, dout)


@pytest.fixture(scope="module")
def traces():
    """The traces of all calls, by (name, kind)."""
    found = {}
    for name in dict.fromkeys(name for name, _ in LIMITS):
        with cupy_stand_in.on_a_device():
            prepare(name, 256)()  # imports the modules and loads the kernels
            call = prepare(name, 300)
            found[name, "cold"], _, found[name, "hot"] = (trace(call) for _ in range(3))
    return found


def table(traces):
    """Return the counts of all paths with their limits and goals, as text."""
    lines = ["{:34}{:6}{:8}{:>6}{:>6}{:>6}".format("call", "", "count", "now", "limit", "goal")]
    for (name, kind), found in traces.items():
        goals = GOALS["hot gradients" if kind == "hot" and "_backward" in name else kind]
        for field, now, limit in zip(Counts._fields, found.counts, LIMITS[name, kind], strict=True):
            lines.append(f"{name:34}{kind:6}{field:8}{now:6}{limit:6}{goals.get(field, ''):>6}")
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "kind"), LIMITS)
def test_paths_do_not_grow(traces, name, kind):
    found, limits = traces[name, kind], LIMITS[name, kind]
    pairs = zip(Counts._fields, found.counts, limits, strict=True)
    grown = [f"{now} {field}, at most {limit}" for field, now, limit in pairs if now > limit]
    # The message ends with the whole path, which shows where it has grown.
    assert not grown, f"{name}, {kind}: {'; '.join(grown)}\n{table(traces)}\n\n{found}"


@pytest.mark.parametrize(("name", "kind"), LIMITS)
def test_calls_are_served_by_kernels(traces, name, kind):
    """Otherwise their paths would be those of a fallback."""
    first = MASK_KERNELS.get(name, []) if kind == "cold" else []
    of_name = KERNELS.get(name) or KERNELS[name.partition(" ")[0]]
    assert traces[name, kind].kernels == [*first, *of_name]


@pytest.mark.parametrize("name", ["causal_product", "causal_product_backward"])
def test_kernels_of_products_are_chosen_once(traces, name):
    choice = ("gpu.kernels.linear.cost_model", "choose")
    assert traces[name, "cold"].steps.count(choice) == 1
    assert choice not in traces[name, "hot"].steps


def test_a_trace_counts_functions_modules_and_returns():
    """In two modules that are made up."""
    sources = {
        "gpu/first.py": """
def begin(second):
    helper(list(map(lambda x: x, range(3))))
    with second["context"]():
        helper(second)
def helper(x): pass
""",
        "second.py": """
import contextlib
@contextlib.contextmanager
def context(): yield
""",
    }
    first, second = {}, {}
    for path, names in zip(sources, (first, second), strict=True):
        exec(compile(sources[path], str(PACKAGE / path), "exec"), names)
    found = trace(lambda: first["begin"](second))
    assert str(found) == "gpu.first: begin, helper\nsecond: context\ngpu.first: helper"
    assert found.counts == Counts(calls=4, modules=2, returns=1)
    assert found.kernels == []
