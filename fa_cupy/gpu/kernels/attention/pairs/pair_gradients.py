"""What the kernels of gradients over single pairs share, and the plan of their launches.

``bwd_dq_pairs`` computes dQ by the list of pairs by queries, and what ``bwd_dkdv_pairs`` knows of
each query, which computes dK and dV by the list by keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import (
    PAIR_AXES,
    PAIR_ROWS,
    PairBias,
    PairCounts,
    PairVariant,
    axes_of,
    fill_rows,
    grid_of,
    list_addresses,
)
from fa_cupy.gpu.kernels.backward import Traits
from fa_cupy.gpu.kernels.tensor_maps import MAP_AXES
from fa_cupy.gpu.plan import Step

_ARRAYS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
#: ``struct PairArray`` of ``cuda_src/common/pairs_backward.cuh``.
PAIR_ARRAY = np.dtype([("start", np.uint64), ("row", np.int64), ("batch", np.int64, (MAP_AXES,))])
#: ``struct PairSums`` of the same file.
PAIR_SUMS = np.dtype(
    [(name, PAIR_AXES) for name in ("kept", "kept_entries", "summed_entries")]
    + [(name, np.int64) for name in ("kept_count", "summed_count")]
)
#: ``struct BwdPairsParams`` of the same file.
BWD_PAIRS_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS)]
    + [(name, PAIR_ARRAY) for name in _ARRAYS]
    + [("list", PAIR_ROWS)]
    + [(name, np.uint64) for name in ("lse", "dlse", "row_statistics", "partials", "pair_bias")]
    + [("bias_axes", PAIR_AXES), ("pair_ds", np.uint64), ("pair_dbias", np.uint64)]
    + [("dbias", PAIR_SUMS), ("entries", np.int64), ("pairs", np.int64)]
    + [("size", np.int32, (MAP_AXES,))]
    + [(name, np.int32) for name in ("group", "phase", "aligned")],
    align=True,
)
ROWS_PHASE, MERGE_PHASE, BIAS_PHASE = 0, 1, 2  # enum Phase


@dataclass(frozen=True, kw_only=True)
class BwdPairs(PairVariant):
    """A row of a kernel of gradients over single pairs."""

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_BWD_PAIRS_BYTES", BWD_PAIRS_PARAMS.itemsize))


class PairLaunches:
    """What the launches of a call have in common.

    Parameters
    ----------
    traits : Traits
    counts : PairCounts
    bias : PairBias or None

    Attributes
    ----------
    traits, counts, bias
    scratch : dict of int
        Bytes of the parts of the workspace, which launches add to.
    """

    def __init__(self, traits: Traits, counts: PairCounts, bias: PairBias | None) -> None:
        self.traits, self.counts, self.bias = traits, counts, bias
        rows = traits.entries * traits.problem.q_len
        self.scratch = {"row_statistics": 16 * rows}
        if bias is not None and bias.wants_gradient:
            self.scratch["pair_ds"] = 4 * traits.entries * counts.pairs

    def steps(self, variant: BwdPairs, by_key: bool) -> list[Step]:
        """Return the launches of a kernel: one, and one that adds up pieces where there are some.

        Parameters
        ----------
        variant : BwdPairs
        by_key : bool
            Whether it reads the list by keys.
        """
        problem, counts = self.traits.problem, self.counts
        entries, rows, pieces = self.traits.entries, problem.q_len, counts.query_pieces
        if by_key:
            entries //= self.traits.group
            rows, pieces = problem.k_len, counts.key_pieces
        params, addresses = self._params(by_key)
        fill_rows(params["list"], rows, pieces, counts)
        if pieces:
            name = f"{variant.kernel}_partials"
            self.scratch[name] = 4 * entries * pieces * variant.dim * (1 + by_key)
            addresses["partials"] = name
        found = [Step(variant, grid_of(entries, rows, pieces), params, addresses)]
        if pieces:
            merging = params.copy()
            merging["phase"] = MERGE_PHASE
            found.append(Step(variant, grid_of(entries, 0, pieces), merging, addresses))
        return found

    def bias_steps(self, variant: BwdPairs) -> list[Step]:
        """Return the launch that adds up the gradients of the numbers of pairs, if wanted."""
        bias, problem, pairs = self.bias, self.traits.problem, self.counts.pairs
        if bias is None or not bias.wants_gradient or not pairs:
            return []
        params, addresses = self._params(by_key=False)
        params["phase"] = BIAS_PHASE
        fill_rows(params["list"], problem.q_len, self.counts.query_pieces, self.counts)
        sums = params["dbias"]
        kept = [step != 0 for step in bias.strides]
        entry = [math.prod(problem.batch[axis + 1 :]) for axis in range(len(problem.batch))]
        own = [n if keep else 1 for n, keep in zip(problem.batch, kept, strict=True)]
        shared = [1 if keep else n for n, keep in zip(problem.batch, kept, strict=True)]
        sums["kept"] = axes_of(own, bias.strides)
        sums["kept_entries"] = axes_of(own, entry)
        sums["summed_entries"] = axes_of(shared, entry)
        sums["kept_count"], sums["summed_count"] = math.prod(own), math.prod(shared)
        addresses["pair_dbias"] = "pair_dbias"
        blocks = math.prod(own) * -(-pairs // variant.threads)
        return [Step(variant, blocks, params, addresses)]

    def _params(self, by_key: bool) -> tuple[np.ndarray[Any, Any], dict[str, str]]:
        traits, problem = self.traits, self.traits.problem
        item, params = problem.dtype.itemsize, np.zeros(1, BWD_PAIRS_PARAMS)
        params["common"] = traits.common("q", "dq", problem.v_dim, 1)
        steps: list[int] = []
        for name in _ARRAYS:
            row, batch = traits.views[name].strides[-2], traits.steps[name]
            params[name]["row"] = row // item
            params[name]["batch"] = [step // item for step in batch]
            steps += [row, *batch]
        params["aligned"] = all(step % 16 == 0 for step in steps)
        params["size"], params["group"] = traits.size, traits.group
        params["entries"], params["pairs"] = traits.entries, self.counts.pairs
        addresses = {f"{name}.start": name for name in _ARRAYS}
        addresses |= {name: name for name in ("lse", "dlse", "row_statistics")}
        addresses |= traits.operands | list_addresses(by_key)
        if self.bias is not None:
            params["bias_axes"] = axes_of(problem.batch, self.bias.strides)
            addresses["pair_bias"] = "pair_bias"
            if self.bias.wants_gradient:
                addresses["pair_ds"] = "pair_ds"
        return params, addresses


def serves_gradients(traits: Traits) -> bool:
    """Whether there are kernels for the gradients of a problem that `pair_rows.serves`.

    There are none for the gradients of a dense bias and of sinks, for arrays that no kernel walks,
    and for heads with masks of their own that share keys and values.
    """
    problem = traits.problem
    if not traits.gathers or problem.sinks is not None or traits.wanted.dbias:
        return False
    assert problem.mask is not None
    shared, sizes = 1, zip(problem.batch[::-1], problem.mask.strides[-3::-1], strict=True)
    for size, step in sizes:
        if shared == traits.group:
            break
        if step != 0 and size != 1:
            return False
        shared *= size
    return True
