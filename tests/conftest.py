"""Fixtures and hypothesis profiles that all tests share."""

import os

import hypothesis
import numpy as np
import pytest

from fa_cupy.core import plan_cache
from tests.support import every_run
from validation import emulator

# Some examples build a reference of seconds on a busy machine: time says nothing about them.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    max_examples=100,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# `make test`. Tests that say how many examples they want do so by `examples` of
# `tests.support.every_run`.
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("ci"), max_examples=40
)
hypothesis.settings.register_profile("gpu", hypothesis.settings.get_profile("ci"), max_examples=500)
hypothesis.settings.load_profile(os.environ.get("FA_CUPY_HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave out what `make test` has no time for, before marks choose what runs."""
    every_run.thin_out(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip what runs kernels on the CPU where nothing can compile them, all with one line.

    No test sees plans of the CPU path that others have made, maybe with other sizes of tiles.
    """
    for key in [key for key in plan_cache.plans if key[1] == "numpy"]:
        del plan_cache.plans[key]
    if item.get_closest_marker("emulator") and emulator.compiler() is None:
        pytest.skip("there is no g++: kernels cannot run on the CPU")


def cupy_or_skip():
    """CuPy where it and a device are there."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device")
    return cupy


@pytest.fixture(scope="session", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """The array namespace that a rule is tested with."""
    return np if request.param == "numpy" else cupy_or_skip()


@pytest.fixture(scope="session")
def cupy():
    """CuPy, for tests marked gpu."""
    return cupy_or_skip()


@pytest.fixture(scope="session", autouse=True)
def short_differences():
    """Keep pytest from writing out in full how two values differ, which it does where CI is set.

    It does so inside of `pytest.raises` too: for the bytes of arrays of 100 kB that takes hours.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "BUILD_NUMBER"):
            patch.delenv(name, raising=False)
        yield
