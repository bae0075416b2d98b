"""The launches of attention backward: which kernels, in which order, in which workspace.

Of packed sequences, ``row_intervals`` first writes which keys each row sees.
``bwd_preprocess`` comes next. Then ``bwd_sm90`` computes dK and dV and adds up dQ in float32,
which ``bwd_convert_dq`` scales and rounds; or ``bwd_dkdv_sm90`` computes dK and dV and
``bwd_dq_sm90`` dQ, where dims are wide; or ``bwd_dkdv_sm80`` and ``bwd_dq_sm80`` do, for what
kernels of SM90 do not take and on other devices. Then ``bwd_nonfinite`` computes rows again whose
sums were not finite. Last, ``bwd_dbias_sm90`` or ``bwd_dbias_sm80`` computes the gradient of the
bias where it is wanted. In float64 there are ``bwd_dq_fp64``, which also finds what is known of
each query, and ``bwd_dkdv_fp64``; in float32 ``bwd_preprocess_fp32``, which splits rows and says
what is known of them, and ``bwd_dq_fp32`` and ``bwd_dkdv_fp32``, or ``bwd_dq_fp32_sm90`` and
``bwd_dkdv_fp32_sm90``. ``bwd_dbias_fp64`` or ``bwd_dbias_fp32`` follows, once more where its
blocks share tiles of the gradient.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from fa_cupy.gpu import plan
from fa_cupy.gpu.kernels.attention import (
    bwd_convert_dq,
    bwd_dkdv_sm80,
    bwd_dkdv_sm90,
    bwd_dq_sm80,
    bwd_dq_sm90,
    bwd_nonfinite,
    bwd_preprocess,
    bwd_sm90,
)
from fa_cupy.gpu.kernels.attention.dbias import (
    bwd_dbias_sm80,
    bwd_dbias_sm90,
)
from fa_cupy.gpu.kernels.attention.row_intervals import OFFSETS, Intervals, intervals
from fa_cupy.gpu.kernels.backward import PADDED, BackwardVariant, Launches, Traits, Wanted
from fa_cupy.gpu.kernels.mask.mask_table import TABLE_ARRAYS
from fa_cupy.gpu.kernels.score import score_pointers
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES

#: The arrays that a plan is given addresses of, in that order; `TABLE_ARRAYS` follow with a mask,
#: `OFFSETS` with packed sequences, ``k_lengths`` with lengths of entries.
ARRAYS = ("q", "k", "v", "out", "lse", "dout", "dlse", "bias", "sinks", "dq", "dk", "dv", "dbias")
#: The kernels of float16 and bfloat16.
VARIANTS: tuple[BackwardVariant, ...] = (
    *bwd_sm90.VARIANTS,
    *bwd_dkdv_sm90.VARIANTS,
    *bwd_dq_sm90.VARIANTS,
    *bwd_preprocess.VARIANTS,
    *bwd_convert_dq.VARIANTS,
    *bwd_nonfinite.VARIANTS,
    *bwd_dkdv_sm80.VARIANTS,
    *bwd_dq_sm80.VARIANTS,
    *bwd_dbias_sm80.VARIANTS,
    *bwd_dbias_sm90.VARIANTS,
)
#: Those that have builds with dropout.
WITH_DROPOUT: tuple[BackwardVariant, ...] = (
    *bwd_sm90.VARIANTS,
    *bwd_dkdv_sm90.VARIANTS,
    *bwd_dq_sm90.VARIANTS,
    *bwd_nonfinite.VARIANTS,
    *bwd_dkdv_sm80.VARIANTS,
    *bwd_dq_sm80.VARIANTS,
    *bwd_dbias_sm80.VARIANTS,
)
_NOTHING: Mapping[str, int] = MappingProxyType({})
_Row = TypeVar("_Row", bound=BackwardVariant)


@functools.cache
def select(wanted: Wanted, target: str | None) -> tuple[BackwardVariant, ...]:
    """Pick the kernels of a call, in the order of their launches: the only place that decides it.

    Parameters
    ----------
    wanted : Wanted
        From `Traits`.
    target : str or None
        That of the device, as `fa_cupy.gpu.driver.targets.target_of` chooses it.

    Returns
    -------
    tuple of BackwardVariant
        Empty where no kernels serve the call: other dtypes, dims above 256, old devices, layouts
        that no kernel can walk, packed sequences with a mask or with scores of positions, lengths
        of entries with a mask or the gradient of a bias, or in 16 bits. Of float32 and float64 also
        dropout, dims above 128 in float32 without ``wgmma``, or for the gradient of a bias, and
        without 227 KB of shared memory.
    """

    def pick(rows: Sequence[_Row], masked: bool = False) -> Iterator[_Row]:
        fits = (
            row
            for row in rows
            if row.dtype == wanted.dtype
            and row.dim >= wanted.dim
            and row.sparse == masked
            and target in row.targets
        )
        first = itertools.islice(fits, 1)  # rows of smaller dims come first
        builds = (row.for_score(wanted.score).for_sequences(wanted.packed) for row in first)
        builds = (row.for_lengths(wanted.lengths) for row in builds)
        return (row.for_dropout(True) for row in builds) if wanted.dropout else builds

    if wanted.dropout and wanted.dtype not in DTYPE_NAMES:
        return ()
    if wanted.dtype in ("float32", "float64"):
        # Other calls do without these modules, whose import takes some milliseconds.
        from fa_cupy.gpu.kernels.attention.full_precision.gradients import selection

        first, kernels = selection.kernels_of(wanted, target)
        picked = [row for rows in kernels for row in pick(rows, wanted.masked)]
        return (*pick(first), *picked) if wanted.strided and len(picked) == len(kernels) else ()
    main: list[BackwardVariant] = []
    if wanted.lengths:
        return ()
    if wanted.mapped:
        for row in pick(bwd_sm90.VARIANTS, wanted.masked):
            main = [row, bwd_convert_dq.row_after(row)]
        if not main:
            main += pick(bwd_dkdv_sm90.VARIANTS, wanted.masked)
            main += pick(bwd_dq_sm90.VARIANTS, wanted.masked)
    if wanted.strided and not main:
        main += pick(bwd_dkdv_sm80.VARIANTS, wanted.masked)
        main += pick(bwd_dq_sm80.VARIANTS, wanted.masked)
    if not main:
        return ()
    found = *pick(bwd_preprocess.VARIANTS), *main, *pick(bwd_nonfinite.VARIANTS)
    if not wanted.dbias:
        return found
    last: list[BackwardVariant] = []
    of_pairs = wanted.score is not None and wanted.score.bias_axes == "pair"
    fills = wanted.mapped and wanted.dbias_fills and not wanted.dropout
    if fills and of_pairs:  # one may broadcast where it is read only
        last += pick(bwd_dbias_sm90.VARIANTS, wanted.masked)
    return *found, *(last or pick(bwd_dbias_sm80.VARIANTS, wanted.masked))


def make_plan(
    traits: Traits,
    launcher: plan.Launcher,
    copies: Mapping[str, int] = _NOTHING,
    variants: Sequence[BackwardVariant] = (),
) -> tuple[plan.Plan, plan.Workspace] | None:
    """Return the plan of a call with its workspace, None where no kernels take the call.

    Parameters
    ----------
    traits : Traits
    launcher : Launcher
    copies : mapping of int
        Bytes of the arrays that lie in the workspace, by name. The plan is given no addresses of
        these.
    variants : sequence of BackwardVariant, optional
        Kernels in place of those that `select` picks.
    """
    variants = variants or select(traits.wanted, launcher.target)
    if not variants:
        return None
    launches = Launches(traits, variants, launcher.multiprocessors)
    steps = [variant.step(traits, launches) for variant in variants[1:]]
    steps.insert(0, variants[0].step(traits, launches))  # which clears what these count in
    if traits.wanted.dbias:
        steps += variants[-1].joining(steps[-1])
    if traits.wanted.packed:
        first = _intervals(traits, variants)
        launches.scratch |= first.sizes
        steps = first.before(steps, "common.")
    space = plan.workspace_of({**launches.scratch, **launches.counters, **copies})
    names = [name for name in ARRAYS if name not in copies]
    if traits.problem.score is not None:
        names += score_pointers(traits.problem).values()
    names += ("seed",) if traits.problem.dropout is not None else ()
    names += TABLE_ARRAYS if traits.wanted.masked else ()
    names += OFFSETS if traits.wanted.packed else ()
    names += ("k_lengths",) if traits.wanted.lengths else ()
    return plan.Plan(steps, names, launcher, space), space


def _intervals(traits: Traits, variants: Sequence[BackwardVariant]) -> Intervals:
    """Return what kernels for packed sequences want to know first.

    Only ``bwd_sm90`` asks which tiles work on each other: blocks of keys take turns there.
    """
    for row in variants:
        if isinstance(row, bwd_sm90.BwdSm90):
            wanted = "rows_of_key", "key_tiles", "query_tiles"
            return intervals(traits.problem, row.tile_m, row.tile_n, wanted)
    return intervals(traits.problem, PADDED, PADDED, ["rows_of_key"])
