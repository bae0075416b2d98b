"""The launches of gradients over single pairs: which kernels, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fa_cupy.gpu import plan
from fa_cupy.gpu.kernels.attention.pairs import bwd_dkdv_pairs, bwd_dq_pairs
from fa_cupy.gpu.kernels.attention.pairs.pair_gradients import PairLaunches
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import (
    BY_KEY_ARRAYS,
    BY_QUERY_ARRAYS,
    PairBias,
    PairCounts,
    row_serving,
)
from fa_cupy.gpu.kernels.attention_backward import ARRAYS
from fa_cupy.gpu.kernels.backward import Traits
from fa_cupy.gpu.kernels.score import score_pointers

_NOTHING: Mapping[str, int] = MappingProxyType({})


def make_plan(
    traits: Traits,
    launcher: plan.Launcher,
    counts: PairCounts,
    copies: Mapping[str, int] = _NOTHING,
    bias: PairBias | None = None,
) -> tuple[plan.Plan, plan.Workspace]:
    """Return the plan of a call with its workspace.

    Parameters
    ----------
    traits : Traits
        Of a problem that `pair_rows.serves` and `pair_gradients.serves_gradients`.
    launcher : Launcher
    counts : PairCounts
        Of the lists of the mask's pairs.
    copies : mapping of int
        As of `fa_cupy.gpu.kernels.attention_backward.make_plan`.
    bias : PairBias, optional
        If there is one, its address follows those of the lists, and that of its gradient.
    """
    problem, score = traits.problem, traits.wanted.score
    launches = PairLaunches(traits, counts, bias)
    kind = traits.wanted.dtype, traits.wanted.dim
    by_query = row_serving(bwd_dq_pairs.VARIANTS, *kind)
    by_key = row_serving(bwd_dkdv_pairs.VARIANTS, *kind)
    assert by_query is not None
    assert by_key is not None
    steps = bwd_dq_pairs.steps(by_query.for_score(score), launches)
    steps += bwd_dkdv_pairs.steps(by_key.for_score(score), launches)
    space = plan.workspace_of({**launches.scratch, **copies})
    names = [name for name in ARRAYS if name not in copies]
    if problem.score is not None:
        names += score_pointers(problem).values()
    names += [*BY_QUERY_ARRAYS, *BY_KEY_ARRAYS]
    names += () if bias is None else ("pair_bias", "pair_dbias")
    return plan.Plan(steps, names, launcher, space), space
