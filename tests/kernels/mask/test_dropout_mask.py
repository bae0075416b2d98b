"""The kernel ``dropout_mask`` in the emulator: what it writes is what the CPU path decides."""

from dataclasses import replace

import numpy as np
import pytest

from fa_cupy.dropout import decisions
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu.driver.arguments import Arguments
from fa_cupy.gpu.kernels.mask import dropout_mask
from tests.support.planted import plant
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator

DROPOUT = Dropout(0.3, 2**63 + 12345)
B, H = (np.array(x, np.int64).reshape(-1, 1, 1) for x in ([0, 0, 3], [1, 2, 5]))
# Queries and keys at which sequences begin, and where the last one ends.
Q_OFFSETS, K_OFFSETS = [0, 3, 7, 10], [0, 37, 102, 200]


def written(dropout, rows, keys, places=None, sources=()):
    """Return what the kernel writes, each byte 0 or 1."""
    found = np.full((3, rows[1] - rows[0], keys[1] - keys[0]), 7, np.uint8)
    step = dropout_mask.step(dropout, 3, rows, keys, 0 if places is None else places.ctypes.data)
    p = step.params[0]
    p["kept"], p["b"], p["h"] = (x.ctypes.data for x in (found, B, H))
    p["b_step"] = p["h_step"] = 1
    (launch,) = EmulatorLauncher(sources=dict(sources)).kernels([step])
    launch(Arguments(step.params), None)
    return found


def check(dropout, rows, keys, sources=()):
    want = decisions.kept(dropout, B, H, rows, keys)
    np.testing.assert_array_equal(written(dropout, rows, keys, sources=sources), want)


@pytest.mark.parametrize("rows", [(0, 5), (3, 17)], ids=str)
@pytest.mark.parametrize("keys", [(0, 64), (70, 210), (5, 9)], ids=str)
def test_rectangles(rows, keys):
    check(DROPOUT, rows, keys)


def test_a_sequence_alone():
    check(replace(DROPOUT, sequences=4, sequence=2), (0, 5), (0, 100))


def check_packed(sources=()):
    """Keys of a sequence begin anywhere in the groups that counters decide on."""
    dropout = replace(DROPOUT, sequences=3)
    numbers = np.repeat(np.arange(3), np.diff(Q_OFFSETS))
    begins = [np.array(x)[numbers] for x in (Q_OFFSETS, K_OFFSETS)]
    places = np.stack([numbers, *begins, 0 * numbers], axis=1).astype(np.int32)
    found = written(dropout, (0, 10), (0, 200), places, sources)
    for s, (q0, q1, k0, k1) in enumerate(
        zip(Q_OFFSETS, Q_OFFSETS[1:], K_OFFSETS, K_OFFSETS[1:], strict=False)
    ):
        want = decisions.kept(dropout.of_sequence(s), B, H, (0, q1 - q0), (0, k1 - k0))
        np.testing.assert_array_equal(found[:, q0:q1, k0:k1], want)


def test_packed_sequences():
    check_packed()


@pytest.mark.parametrize(
    ("packed", "change"),
    [
        (False, ("+ p.sequence;", ";")),
        (False, ("params.h[entry * params.h_step]", "params.h[0]")),
        (False, ("- params.first_key;", ";")),
        (True, ("2 * t);", "2);")),
    ],
)
def test_a_planted_bug_is_found(tmp_path, packed, change):
    source = plant(tmp_path, "mask/dropout_mask", change)
    sources = {"mask_dropout_mask": source}
    dropout, rectangle = replace(DROPOUT, sequences=4, sequence=2), ((3, 17), (70, 210))
    call = (check_packed, sources) if packed else (check, dropout, *rectangle, sources)
    with pytest.raises(AssertionError):
        call[0](*call[1:])
