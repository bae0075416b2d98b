"""The host side of ``fwd_pairs``: attention over the visible pairs of a mask, one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS, Traits, make_params
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import (
    BY_QUERY_ARRAYS,
    PAIR_AXES,
    PAIR_ROWS,
    PairBias,
    PairCounts,
    PairVariant,
    axes_of,
    fill_rows,
    grid_of,
    list_addresses,
    row_serving,
    rows_of,
)
from fa_cupy.gpu.plan import Launcher, Plan, Step, workspace_of

#: ``struct FwdPairsParams`` of ``cuda_src/attention/fwd_pairs.cu``.
FWD_PAIRS_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS), ("list", PAIR_ROWS), ("pair_bias", np.uint64)]
    + [("bias_axes", PAIR_AXES), ("partials", np.uint64), ("entries", np.int64)]
    + [(name, np.int32) for name in ("merging", "aligned")],
    align=True,
)
_HEAD = 4  # floats of a piece before its sums


@dataclass(frozen=True, kw_only=True)
class FwdPairs(PairVariant):
    """A row of ``fwd_pairs``."""

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_FWD_PAIRS_BYTES", FWD_PAIRS_PARAMS.itemsize))


VARIANTS = tuple(
    rows_of(FwdPairs, "fwd_pairs", 4, "16 keys and values on their way, and 4 of wide ones")
)


def steps(
    traits: Traits, variant: FwdPairs, counts: PairCounts, bias: PairBias | None = None
) -> list[Step]:
    """Return the launches: one, and one that adds up pieces where there are some."""
    problem = traits.problem
    (params, parts), kept = make_params(traits, variant.tile_m), traits.aligned()
    assert len(parts) == 1
    filled = np.zeros(1, FWD_PAIRS_PARAMS)
    filled["common"] = params
    entries = filled["entries"] = math.prod(problem.batch)
    fill_rows(filled["list"], problem.q_len, counts.query_pieces, counts)
    addresses = {f"common.{field}": name for field, name in traits.fields.items()}
    addresses |= list_addresses(by_key=False)
    if bias is not None:
        filled["bias_axes"] = axes_of(problem.batch, bias.strides)
        addresses["pair_bias"] = "pair_bias"
    if counts.query_pieces:
        addresses["partials"] = "partials"
    grid = grid_of(entries, problem.q_len, counts.query_pieces)
    found = [Step(variant, grid, filled, addresses, aligned=kept)]
    if counts.query_pieces:
        merging = filled.copy()
        merging["merging"] = 1
        grid = grid_of(entries, 0, counts.query_pieces)
        found.append(Step(variant, grid, merging, addresses, aligned=kept))
    return found


def make_plan(
    traits: Traits, launcher: Launcher, counts: PairCounts, bias: PairBias | None = None
) -> Plan:
    """Return the launches of a forward problem with a query to answer.

    Parameters
    ----------
    traits : Traits
        Of a problem that `pair_rows.serves`.
    launcher : Launcher
    counts : PairCounts
        Of the list of the mask's pairs.
    bias : PairBias, optional
        If there is one, its address follows those of the list.
    """
    problem = traits.problem
    row = row_serving(VARIANTS, problem.dtype.name, max(problem.head_dim, problem.v_dim))
    assert row is not None
    variant = row.for_score(traits.score)
    names = (*traits.pointers, *BY_QUERY_ARRAYS, *(() if bias is None else ("pair_bias",)))
    space = None
    if counts.query_pieces:
        entries = math.prod(problem.batch)
        floats = entries * counts.query_pieces * (variant.dim + _HEAD)
        space = workspace_of({"partials": 4 * floats})
    return Plan(steps(traits, variant, counts, bias), names, launcher, space)
