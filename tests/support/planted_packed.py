"""Bugs planted in kernels of packed products, as the functions of ``fa_cupy.gpu`` run them."""

import numpy as np
import pytest

from fa_cupy.core import linear_problem
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.offsets import Offsets
from tests.support.kernels_for_cupy import array, packed_products
from tests.support.planted import plant
from tests.support.products import draw
from validation import emulator
from validation.emulator.launcher import EmulatorLauncher

# The second one is out of range; more than a block of `sequence_spans` has threads.
BOUNDS = np.array([3, 10, 8, 50, 60, *[60] * 300, 70])


def results(dtype, seed=0, sources=None, dim=40):
    """Output, state and gradients of a product, as bytes."""
    with packed_products(EmulatorLauncher(seed, sources=sources or {})) as module:
        q, k, v, dout = map(
            array, draw((2, 80, dim), (1, 80, dim), (2, 80, 37), (2, 80, 37), dtype=dtype)
        )
        offsets = array(BOUNDS)
        keys = KeyArrays(q_offsets=offsets, k_offsets=offsets)
        where = Offsets(len(BOUNDS) - 1, offsets.dtype, offsets.dtype)
        problem = linear_problem.product_problem("test", q, k, v, offsets=where)
        initial = array(draw(problem.state_shape, dtype=problem.state_dtype)[0])
        problem = linear_problem.product_problem("test", q, k, v, initial, offsets=where)
        found = module.product(
            problem, q, k, v, initial, None, keys, reverse=True, return_state=True
        )
        found += module.backward(problem, dout, q, k, v, initial, None, keys, reverse=True)
        return [np.asarray(x).tobytes() for x in found]


def show(source, dtype, bug, tmp_path, dim=40):
    """Fail unless some schedule shows a bug, with keys of so many columns."""
    sources = {source.replace("/", "_"): plant(tmp_path, source, bug)}
    want = results(dtype, dim=dim)
    for seed in range(10):
        try:
            if results(dtype, seed, sources, dim) != want:
                return
        except emulator.EmulationError:
            return
    pytest.fail("10 seeds did not show it")
