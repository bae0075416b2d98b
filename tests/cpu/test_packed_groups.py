"""Short packed sequences, which are entries of one call on the CPU."""

import itertools
from unittest import mock

import numpy as np
import pytest

from fa_cupy import attention, attention_backward, reference
from fa_cupy.cpu.packed import groups
from fa_cupy.cpu.packed.groups import Group, grouped
from fa_cupy.keys.sequences import Part
from tests.support.strategies import by_dtype, normal

BANDS = (
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"is_causal": True, "causal_align": "top_left"},
    {"window": (4, 3), "causal_align": "bottom_right"},
)


def part(number, rows, keys):
    return Part(number, slice(*rows), slice(*keys))


def parts(q_lengths, k_lengths):
    q, k = (itertools.pairwise(np.cumsum([0, *x]).tolist()) for x in (q_lengths, k_lengths))
    return [part(i, *x) for i, x in enumerate(zip(q, k, strict=True))]


def random_offsets(rng, count, most):
    return np.concatenate([[2], 2 + np.cumsum(rng.integers(0, most, count))])


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(**by_dtype())
def test_many_short_sequences(dtype, options, equal):
    """As without groups, and as the reference: outputs, log-sum-exps and gradients."""
    rng = np.random.default_rng(0)
    if equal:
        q_offsets, k_offsets = 3 + 7 * np.arange(30), 11 * np.arange(30)
    else:
        q_offsets, k_offsets = (random_offsets(rng, 30, most) for most in (30, 40))
    q_len, k_len = int(q_offsets[-1]) + 3, int(k_offsets[-1]) + 1
    q, dout = (normal(rng, (2, 4, q_len, 8), dtype) for _ in range(2))
    k, v = (normal(rng, (2, 2, k_len, 8), dtype) for _ in range(2))
    options = {**options, "q_offsets": q_offsets, "k_offsets": k_offsets}

    def results():
        out, lse = attention(q, k, v, return_lse=True, **options)
        return out, lse, *attention_backward(dout, q, k, v, out, lse, **options)

    found = results()
    with mock.patch.object(groups, "_LEAST_SEQUENCES", 1000):
        alone = results()
    # Each in its own order of sums, rounded to the dtype.
    tolerance = {2: 2e-2, 4: 2e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
    for x, y in zip(found, alone, strict=True):
        np.testing.assert_allclose(x.astype(float), y.astype(float), atol=tolerance)
    want = *reference.attention(q, k, v, **options), *reference.attention_backward(
        dout, q, k, v, **options
    )  # fmt: skip
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x.astype(float), y, atol=5 * tolerance)


@pytest.mark.parametrize("k_len", [0, 5])
@pytest.mark.parametrize("more", [(), ("sinks",), ("bias", "mask"), ("row",)])
def test_many_short_sequences_without_keys(k_len, more):
    """Which follow each other, behind the last key that there is."""
    rng = np.random.default_rng(0)
    q_offsets, k_offsets = 4 * np.arange(8), np.array([0, *[k_len] * 7])
    q, dout = rng.standard_normal((2, 2, 28, 8))
    k, v = rng.standard_normal((2, 2, k_len, 8))
    options = {"q_offsets": q_offsets, "k_offsets": k_offsets}
    given = {
        "sinks": {"sinks": np.full((2, 1), 0.5)},
        "bias": {"bias": np.ones((28, k_len))},
        "mask": {"mask": np.ones((2, 28, k_len), bool)},
        "row": {"bias": np.ones(k_len)},
    }
    for name in more:
        options |= given[name]
    out, lse = attention(q, k, v, return_lse=True, **options)
    found = out, lse, *attention_backward(dout, q, k, v, out, lse, **options)[:3]
    want = *reference.attention(q, k, v, **options), *reference.attention_backward(
        dout, q, k, v, **options
    )[:3]  # fmt: skip
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_groups_are_of_about_the_same_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 200, (2, 300))
    given = parts(*lengths)
    found = [*grouped(given, 100.0)]
    together = [x for x in found if isinstance(x, Group)]
    assert len(together) > 10
    seen = [x for x in found if isinstance(x, Part)]
    for group in together:
        seen += group.parts
        for side in (0, 1):
            own = [x.lengths[side] for x in group.parts]
            assert group.lengths[side] == max(own)
            assert max(own) <= 16 or min(own) * 2**0.5 >= max(own) - 1
    assert sorted(x.number for x in seen) == [*range(300)]


def test_long_sequences_and_few_of_a_length_are_alone():
    given = parts([1000] * 5 + [5] * 2, [1000] * 5 + [5] * 2)
    assert [*grouped(given, 100.0)] == given
    (group,) = grouped(parts([5] * 4, [5] * 4), 100.0)
    assert group.equal
    assert group.adjacent
    (group,) = grouped(parts([5] * 4, [5, 6, 5, 5]), 100.0)
    assert not group.equal


def test_groups_have_no_more_work_than_a_task():
    found = [*grouped(parts([64] * 200, [64] * 200), 1000.0)]
    assert {len(group.parts) for group in found} <= {8, 9}


def test_arrays_of_adjacent_sequences_are_not_copied():
    x = np.arange(2 * 40 * 3.0).reshape(2, 40, 3)
    group = Group(parts([2, 7, 7, 7], [3, 9, 9, 9])[1:])
    rows = group.rows(x, 3)
    assert np.shares_memory(rows, x)
    np.testing.assert_array_equal(rows[1], x[:, 9:16])
    apart = Group([x for x in parts([2, 7, 7, 7], [3, 9, 9, 9]) if x.number != 2][1:])
    rows = apart.rows(x, 3)
    assert not np.shares_memory(rows, x)
    np.testing.assert_array_equal(rows[1], x[:, 16:23])
    np.testing.assert_array_equal(apart.keys(x, 4)[1, 0], x[:, 21:30])
