"""Attention on the CPU with keys that are split although they are few."""

import itertools

from fa_cupy.cpu import decoding


def split_few_keys(monkeypatch):
    """Split keys at a third and at a half; return a list of the numbers of parts, as they come."""
    made = []

    def bounds(problem, tasks, wanted):
        if problem.score is not None or not problem.k_len:
            return [(0, problem.k_len)]
        ends = sorted({0, problem.k_len // 3, problem.k_len // 2, problem.k_len})
        made.append(len(ends) - 1)
        return [*itertools.pairwise(ends)]

    monkeypatch.setattr(decoding, "key_bounds", bounds)
    return made
