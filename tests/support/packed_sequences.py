"""Packed sequences of any lengths, and what they mean: which query sees which key."""

import numpy as np
from hypothesis import strategies as st

from fa_cupy import reference


def normalised(offsets, total):
    """Offsets that ascend inside the range, as calls take those on a device."""
    if not len(offsets):
        return np.zeros(0, np.int64)
    return np.maximum.accumulate(np.clip(offsets.astype(np.int64), 0, total))


def ranges(q_offsets, k_offsets, lengths):
    """Rows and keys of each sequence, as slices, and whether its offsets are valid."""
    given = (q_offsets, k_offsets)
    clipped = [normalised(x, total) for x, total in zip(given, lengths, strict=True)]
    for i in range(len(q_offsets) - 1):
        rows, keys = (slice(int(x[i]), int(x[i + 1])) for x in clipped)
        pairs = [*zip(given, clipped, strict=True)]
        yield rows, keys, all((x[i : i + 2] == y[i : i + 2]).all() for x, y in pairs)


def visible(q_offsets, k_offsets, lengths, **band):
    """Which key each query sees: sequence by sequence; nothing of those that are not valid."""
    seen = np.zeros(lengths, np.bool_)
    for rows, keys, is_valid in ranges(q_offsets, k_offsets, lengths):
        if is_valid:
            size = rows.stop - rows.start, keys.stop - keys.start
            seen[rows, keys] = reference.visible(*size, **band)
    return seen


def invalid_rows(q_offsets, k_offsets, lengths):
    """Which query rows belong to sequences that are not valid."""
    found = np.zeros(lengths[0], np.bool_)
    for rows, _, is_valid in ranges(q_offsets, k_offsets, lengths):
        found[rows] |= not is_valid
    return found


@st.composite
def offsets(draw, sequences, total):
    """Offsets of as many sequences, some of them empty, with rows before and behind them all."""
    near = [x for x in (0, 1, 63, 64, 65, 127, 128, 129, total - 1, total) if 0 <= x <= total]
    one = st.integers(0, total) | st.sampled_from(near)
    found = sorted(draw(st.lists(one, min_size=sequences + 1, max_size=sequences + 1)))
    if draw(st.booleans()):
        found[0], found[-1] = 0, total
    return np.array(found, draw(st.sampled_from([np.int32, np.int64])))


@st.composite
def packed_lengths(draw, most=330):
    """Lengths of both axes, and offsets of both; the same array where `q_offsets` say it all."""
    sequences = draw(st.integers(1, 6))
    q_len = draw(st.integers(1, most))
    q_offsets = draw(offsets(sequences, q_len))
    if draw(st.booleans()):
        return (q_len, q_len), q_offsets, q_offsets
    k_len = draw(st.integers(1, most))
    return (q_len, k_len), q_offsets, draw(offsets(sequences, k_len))


@st.composite
def disordered(draw, lengths, sequences=3):
    """Offsets of any numbers, as they may lie in the memory of a device."""
    return tuple(
        np.array(
            draw(st.lists(st.integers(-5, total + 5), min_size=sequences + 1,
                          max_size=sequences + 1)),
            np.int32,
        )
        for total in lengths
    )  # fmt: skip
