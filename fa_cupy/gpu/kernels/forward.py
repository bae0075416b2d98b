"""Attention by kernels: which one serves a call, and the plan of its launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention import fwd_sm80, fwd_sm90, row_intervals
from fa_cupy.gpu.kernels.attention.attention_params import (
    MASK_PARTS,
    MAX_BATCH_AXES,
    MAX_LENGTH,
    Traits,
)
from fa_cupy.gpu.kernels.attention.full_precision import (
    fwd_fp32,
    fwd_fp32_sm90,
    fwd_fp64,
    key_lengths,
    products_fp64,
)
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32 import FwdFp32
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32_sm90 import FwdFp32Sm90
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp64 import FwdFp64
from fa_cupy.gpu.kernels.attention.fwd_sm80 import FwdSm80
from fa_cupy.gpu.kernels.attention.fwd_sm90 import COUNTER_BYTES, FwdSm90
from fa_cupy.gpu.kernels.attention.splitkv import fwd_join_splits, fwd_splitkv
from fa_cupy.gpu.kernels.attention.splitkv.fwd_splitkv import FwdSplitkv
from fa_cupy.gpu.kernels.attention.splitkv.params import heads_of_tile, partial_sizes, supports
from fa_cupy.gpu.kernels.score import ScoreMod, score_mod_of, takes_scale, takes_score
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Launcher, Plan, Step, workspace_of

#: A row of a kernel that takes tiles of queries.
Row = FwdSm80 | FwdSm90 | FwdFp32 | FwdFp32Sm90 | FwdFp64
#: All rows that compute in float32, in their builds for products times a positive scale.
VARIANTS: tuple[FwdSm80 | FwdSm90 | FwdFp32 | FwdFp32Sm90, ...] = (
    *fwd_sm80.VARIANTS, *fwd_sm90.VARIANTS, *fwd_fp32.VARIANTS, *fwd_fp32_sm90.VARIANTS,
)  # fmt: skip
#: Those that compute in float64.
FP64_VARIANTS = fwd_fp64.VARIANTS
ROWS: tuple[Row, ...] = (*VARIANTS, *FP64_VARIANTS)
# The dtypes of fwd_fp32 and fwd_fp64, which read keys at equal distances. What may be as coarse as
# TF32 fwd_fp32 computes in float32: that takes a third of the time of products of cuBLAS in TF32.
_FULL_PRECISION = {np.dtype(fwd_fp32.DTYPE), np.dtype(products_fp64.DTYPE)}
# fwd_splitkv is for at most so many rows, of queries and of heads that share keys, and from so many
# keys on: there reading the keys takes the time.
_SPLIT_ROWS, _SPLIT_KEYS = 64, 512
# Where fwd_sm90 splits the keys of plain scores, too, fwd_splitkv is for less than so many keys,
# and for more where few rows read many bytes: of many tiles, or very long ones. us on an H200, 4
# rows, 8 heads of keys of head_dim 128, fwd_splitkv and fwd_sm90: one entry of 8,192 keys 20.5 and
# 18.3, of 131,072 130.5 and 137.4; 4 entries of 8,192 38.2 and 40.6, 16 of 32,768 476 and 512. On
# an H100, with 16 queries 127 and 22, one query to 1,024 keys 12.6 and 13.7.
_FEW_ROWS, _MANY_KEYS = 16, 4096
_READING_ROWS, _READING_KEYS = 8, 65536


class Call(NamedTuple):
    """What of a call decides between rows that serve its dtype and dims.

    Attributes
    ----------
    score : ScoreMod or None
        What a score is besides a product times a positive scale.
    mapped : bool
        Whether tensor maps can walk the arrays (`fwd_sm90.supports`).
    masked : bool
        Whether there is a mask.
    split : bool
        Whether it pays to split keys and values of float32 (`fwd_fp32_sm90.supports`).
    rounded : bool
        Whether numbers of float32 may be rounded to the digits of TF32.
    """

    score: ScoreMod | None = None
    mapped: bool = True
    masked: bool = False
    split: bool = False
    rounded: bool = False


_PLAIN = Call()


@functools.cache
def select(
    dtype: str, head_dim: int, v_dim: int, target: str | None, call: Call = _PLAIN
) -> Row | None:
    """Pick the variant that serves a forward call: the only place where that is decided.

    Parameters
    ----------
    dtype : str
        Name of the dtype of q, k and v.
    head_dim, v_dim : int
    target : str or None
        That of the device, as `fa_cupy.gpu.driver.targets.target_of` chooses it.
    call : Call, optional
        The rest that counts; by default a plain call.

    Returns
    -------
    Variant or None
        None where no kernel serves the call: dims above 256, old devices.
        `fa_cupy.gpu.cublas.attention` does then.
    """
    fits = [
        variant
        for variant in ROWS
        if variant.dtype == dtype
        and variant.dim >= max(head_dim, v_dim)
        and target in variant.targets
        and _serves(variant, call)
    ]
    found = min(fits, key=lambda variant: variant.rank, default=None)
    return found and found.for_score(call.score)


def _serves(variant: Row, call: Call) -> bool:
    """Whether a variant can take a call of its dtype and dims."""
    if variant.sparse != call.masked:
        return False
    if isinstance(variant, FwdFp32Sm90):
        return call.split and variant.parts == (1 if call.rounded else 2)
    return call.mapped or not isinstance(variant, FwdSm90)


def reachable(dtype: str, head_dim: int, v_dim: int, target: str | None) -> list[Row]:
    """Return all variants that plain calls of this type and these dims get, first choices first."""
    found = {
        select(dtype, head_dim, v_dim, target, Call(None, *call))
        for call in product((False, True), repeat=4)
    }
    return sorted((variant for variant in found if variant), key=lambda variant: variant.rank)


def for_any_layout(problem: Problem, target: str | None) -> Row | None:
    """Return the variant that serves a problem whatever its layout; None where cuBLAS does."""
    if max(problem.q_len, problem.k_len) > MAX_LENGTH:
        return None
    precise = problem.dtype in _FULL_PRECISION
    if precise and not (key_lengths.supports(problem) and takes_scale(problem)):
        return None
    # An expression knows an entry by its number over all of them; launches over some count anew.
    if problem.score is not None and (
        len(problem.batch) > MAX_BATCH_AXES or not takes_score(problem)
    ):
        return None
    of_keys = (problem.k_lengths or problem.pages) is not None
    if of_keys and not precise and not supports(problem):
        return None
    if problem.offsets is not None and not row_intervals.supports(problem):
        return None
    if problem.dropout is not None and not takes_dropout(problem):
        return None
    call = Call(score_mod_of(problem), mapped=False, masked=problem.mask is not None)
    found = select(problem.dtype.name, problem.head_dim, problem.v_dim, target, call)
    if found is None:
        return None
    if problem.offsets is not None:
        found = found.for_sequences(True)
    return found if problem.dropout is None else found.for_dropout(True)


def takes_dropout(problem: Problem) -> bool:
    """Whether kernels of the dtype of a problem have builds for its dropout."""
    if problem.dropout is None or problem.dropout.placed:
        return False
    if problem.dtype.itemsize == 2:
        return problem.k_lengths is None and problem.pages is None
    return problem.dtype == fwd_fp32.DTYPE


def splits_keys(traits: Traits, variant: Row | None, multiprocessors: int) -> bool:
    """Whether ``fwd_splitkv`` solves a problem, rather than this row.

    It does where few rows share keys, if their tiles leave multiprocessors idle, if there are many
    keys to read, or if `fwd_sm80` would read the keys for each head. It alone reads pages and
    lengths of keys, but for more rows with plain scores.
    """
    problem = traits.problem
    if isinstance(variant, FwdFp32 | FwdFp32Sm90 | FwdFp64) or problem.dropout is not None:
        return False
    of_pages, of_lengths = problem.pages is not None, bool(traits.key_views)
    if of_pages and problem.q_len == 1:
        return True
    if problem.offsets is not None or (problem.q_len > _SPLIT_ROWS and not of_lengths):
        return False
    heads = heads_of_tile(traits)
    rows = problem.q_len * heads
    tiles = math.prod(problem.batch) * problem.q_len // max(rows, 1)
    reading = False
    if isinstance(variant, FwdSm90) and variant.score is None:
        # Of some numbers of heads each reads the keys for itself there.
        packed = fwd_sm90.packed_heads(traits, variant.tile_m) == heads
        many_keys = problem.k_len >= _MANY_KEYS
        large = tiles >= multiprocessors // 8 or problem.k_len >= _READING_KEYS
        reading = many_keys and large and rows <= _READING_ROWS and problem.lower is None
        many = rows > _FEW_ROWS or (many_keys and not of_pages and not reading)
        if rows > _SPLIT_ROWS or (packed and many):
            return of_pages and fwd_sm90.boxes_of_pages(traits, variant) is None
    if of_lengths:
        return True
    if rows > _SPLIT_ROWS or problem.k_len < _SPLIT_KEYS or not supports(problem):
        return False
    return reading or tiles < multiprocessors // 2 or isinstance(variant, FwdSm80)


def make_plan(traits: Traits, launcher: Launcher, variant: Variant | None = None) -> Plan:
    """Return the launches of a forward problem with a query to answer.

    Calls give the addresses of `Traits.pointers`, then those of the parts of a mask, of
    `Traits.key_views` or of `row_intervals.OFFSETS`.

    Parameters
    ----------
    traits : Traits
        Of a problem that a kernel serves in any layout.
    launcher : Launcher
    variant : Variant, optional
        A row whose build for the scores of the problem runs; by default what `select` picks.
    """
    problem = traits.problem
    if isinstance(variant, FwdSplitkv):
        return fwd_splitkv.make_plan(traits, launcher, variant)
    names = (*traits.pointers, *traits.key_views)
    if problem.mask is not None:
        names += MASK_PARTS
    if problem.offsets is not None:
        names += row_intervals.OFFSETS
    if variant is None:
        call = Call(
            traits.score,
            fwd_sm90.supports(traits),
            problem.mask is not None,
            problem.dtype == fwd_fp32.DTYPE and fwd_fp32_sm90.supports(traits),
            problem.precision is not None,
        )
        dims = problem.head_dim, problem.v_dim
        variant = select(problem.dtype.name, *dims, launcher.target, call)
        if splits_keys(traits, variant, launcher.multiprocessors):
            return fwd_splitkv.make_plan(traits, launcher)
    elif isinstance(variant, Row):
        variant = variant.for_score(traits.score)
    assert isinstance(variant, Row)
    if problem.offsets is not None:
        variant = variant.for_sequences(True)
    if problem.dropout is not None:
        variant = variant.for_dropout(True)
    if isinstance(variant, FwdSm90) and traits.key_views:
        variant = variant.for_keys(True, False, pages=problem.pages is not None)
    elif traits.key_views:
        variant = variant.for_lengths(True)
    if isinstance(variant, FwdFp64):
        return _plan(traits, variant, fwd_fp64.steps(traits, variant), names, launcher)
    if isinstance(variant, FwdFp32Sm90):
        found, parts = fwd_fp32_sm90.steps(traits, variant)
        return _plan(traits, variant, found, names, launcher, sizes=parts)
    if not isinstance(variant, FwdSm90):
        return _plan(traits, variant, fwd_sm80.steps(traits, variant), names, launcher)

    def fallback() -> Plan:
        if traits.key_views:
            return fwd_splitkv.make_plan(traits, launcher)
        plain = for_any_layout(problem, launcher.target)
        assert plain is not None
        return _plan(traits, plain, fwd_sm80.steps(traits, plain), names, launcher)

    splits = fwd_sm90.splits_of_keys(traits, variant, launcher.multiprocessors)
    if splits > 1:
        variant = variant.for_keys(variant.lengths, True, variant.pages)
    steps = fwd_sm90.steps(traits, variant, launcher.multiprocessors, splits)
    if splits > 1:
        steps.append(fwd_join_splits.step(traits, variant.dim, splits))
    return _plan(traits, variant, steps, names, launcher, fallback)


def _plan(
    traits: Traits,
    variant: Row,
    steps: list[Step],
    names: tuple[str, ...],
    launcher: Launcher,
    fallback: Callable[[], Plan] | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Plan:
    """Return the plan of a kernel's launches, with what they know of keys of entries.

    Packed sequences need a launch before them.
    """
    sizes = dict(sizes)
    if isinstance(variant, FwdSm90) and variant.split:
        p = steps[0].params[0]
        sizes |= partial_sizes(variant.dim, int(p["rows"]) * int(p["splits"]))
    if any("scheduler.counter" in step.addresses for step in steps):
        sizes["counter"] = COUNTER_BYTES
    prefix = "common." if isinstance(variant, FwdSm90 | FwdFp32Sm90 | FwdFp64) else ""
    # split_kv gets lengths by a step of its own.
    count = len(steps) - 1 if isinstance(variant, FwdFp32Sm90) else 0
    if variant.lengths and not isinstance(variant, FwdSm90):
        own = key_lengths.filled(traits.problem, traits.strides[key_lengths.ARRAY])
        steps = [*steps[:count], *key_lengths.with_lengths(steps[count:], own, prefix)]
    if traits.problem.offsets is not None:
        first = row_intervals.intervals(traits.problem, variant.tile_m, variant.tile_n, ["order"])
        steps = [*steps[:count], *first.before(steps[count:], prefix)]
        sizes |= first.sizes
    return Plan(steps, names, launcher, workspace_of(sizes) if sizes else None, fallback)
