"""Of tests with many cases: the ones that `make test` runs. `make test-all` runs the others too."""

import zlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st


def some(values, kind, count=1):
    """Parameters of a test, of which `count` of each kind may be run; the others are long.

    Which ones differs from kind to kind, so that not all are of the same dim or dtype.
    """
    values, kinds = list(values), {}
    for value in values:
        kinds.setdefault(kind(value), []).append(value)
    kept = []
    for i, same in enumerate(kinds.values()):
        step = max(1, len(same) // count)
        kept += [same[(i + j * step) % len(same)] for j in range(min(count, len(same)))]
    return only(values, *kept)


def only(values, *kept):
    """Parameters of a test, of which these may always be run; the others are long."""
    values = list(values)
    assert all(value in values for value in kept), kept
    return [parameter(value, value in kept) for value in values]


def parameter(value, always):
    """A parameter, or a tuple of several, of a test that may always be run, or else is long."""
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=() if always else pytest.mark.long)


def drawn(values, *kept):
    """A strategy over values for which kernels are compiled; `make test` draws these alone."""
    values = list(values)
    assert all(value in values for value in kept), kept
    return st.sampled_from([*kept] if _is_quick() else values)


#: Cases of each test in these folders that `make test` runs.
_CASES = {"api": 3, "cpu": 2, "gpu_host": 1}
#: Parameters that say which kernels are compiled; of a bias, its shape does.
_ROWS = {"row", "rows", "dim", "dtype", "target", "shape"}


def thin_out(items):
    """Have `make test` run one case of each test that runs kernels on the CPU, few of some others.

    Of planted bugs it runs none. Which cases those are differs from file to file, so that some test
    meets every dim and dtype. Tests of one file meet all of its kernels, and of each kernel the
    same rows, which are compiled once.
    """
    if not _is_quick():
        return
    cases = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("long", "gpu"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    met = {}
    for name, same in cases.items():
        count = _CASES.get(same[0].path.parent.name, len(same))
        if any(item.get_closest_marker("emulator") for item in same):
            kept = []
            if "planted" not in name:
                kept = [_of_met_rows(same, met.setdefault(same[0].path, Counter()))]
        else:
            kept = sorted(same, key=lambda item: zlib.crc32(item.nodeid.encode()))[:count]
        for item in same:
            if item not in kept:
                item.add_marker(pytest.mark.long)


def _of_met_rows(same, met):
    """Choose one of a test's cases: of the kernel that other tests of its file have met least.

    Of those it is one that has most of the rows, dims and dtypes which they have met, as `met`
    says; where several have, it is the file that decides which one.
    """

    def kernel(item):
        return getattr(_params(item).get("row"), "source", None)

    def rows(item):
        given = _params(item)
        return {(name, str(given[name])) for name in _ROWS & given.keys()}

    def fitness(item):
        return -met[kernel(item)], sum(row in met for row in rows(item))

    first = zlib.crc32(same[0].path.name.encode()) % len(same)
    chosen = max([*same[first:], *same[:first]], key=fitness)
    met.update([kernel(chosen), *rows(chosen)])
    return chosen


def _params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _is_quick():
    return settings.default.max_examples < settings.get_profile("ci").max_examples


def examples(count, fewer=8):
    """hypothesis's settings for that many examples; `make test` tries one of `fewer` of them."""
    if _is_quick():
        count = max(2, count // fewer)
    return settings(deadline=None, max_examples=count)


def by_dtype_examples(kinds=1):
    """hypothesis's settings for one dtype of a test of all options: a fifth of the usual number.

    Of several kinds of calls by a test of its own, each gets its part of that. On a GPU nearly each
    example compiles kernels of its own: several tests do that side by side.
    """
    return settings(deadline=None, max_examples=max(4, settings.default.max_examples // 5 // kinds))
