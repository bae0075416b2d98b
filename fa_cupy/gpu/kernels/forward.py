"""Attention by kernels: which one serves a call, and the plan of its launches."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any, NamedTuple

from fa_cupy.gpu.kernels.attention import fwd_sm80, fwd_sm90
from fa_cupy.gpu.kernels.attention.attention_params import (
    MAX_LENGTH,
    NAMES,
    POINTERS,
    Traits,
)
from fa_cupy.gpu.kernels.attention.fwd_sm80 import FwdSm80
from fa_cupy.gpu.kernels.attention.fwd_sm90 import COUNTER_BYTES, FwdSm90
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Launcher, Plan, workspace_of

#: All rows.
VARIANTS: tuple[FwdSm80 | FwdSm90, ...] = (*fwd_sm80.VARIANTS, *fwd_sm90.VARIANTS)


class Call(NamedTuple):
    """What of a call decides between rows that serve its dtype and dims.

    Attributes
    ----------
    transform : bool
        Whether scale, softcap or bias change the scores before the softmax.
    mapped : bool
        Whether tensor maps can walk the arrays (`fwd_sm90.supports`).
    masked : bool
        Whether there is a mask.
    """

    transform: bool = False
    mapped: bool = True
    masked: bool = False


_PLAIN = Call()


@functools.cache
def select(
    dtype: str, head_dim: int, v_dim: int, target: str | None, call: Call = _PLAIN
) -> FwdSm80 | FwdSm90 | None:
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
        None where no kernel serves the call: float32 and float64, dims above 256, old devices.
        `fa_cupy.gpu.cublas.attention` does then.
    """
    fits = [
        variant
        for variant in VARIANTS
        if variant.dtype == dtype
        and variant.dim >= max(head_dim, v_dim)
        and target in variant.targets
        and _serves(variant, call)
    ]
    return min(fits, key=lambda variant: variant.rank, default=None)


def _serves(variant: FwdSm80 | FwdSm90, call: Call) -> bool:
    """Whether a variant can take a call of its dtype and dims."""
    if variant.sparse != call.masked:
        return False
    if isinstance(variant, FwdSm80):
        return True
    return call.mapped and variant.transform == call.transform


def reachable(dtype: str, head_dim: int, v_dim: int, target: str | None) -> list[FwdSm80 | FwdSm90]:
    """Return all variants that calls of this type and these dims can get, first choices first."""
    found = {
        select(dtype, head_dim, v_dim, target, Call(*call))
        for call in product((False, True), repeat=3)
    }
    return sorted((variant for variant in found if variant), key=lambda variant: variant.rank)


def for_any_layout(problem: Any, target: str | None) -> FwdSm80 | FwdSm90 | None:
    """Return the variant that serves a problem whatever its layout; None where cuBLAS does."""
    if max(problem.q_len, problem.k_len) > MAX_LENGTH:
        return None
    call = Call(mapped=False, masked=problem.mask is not None)
    return select(problem.dtype.name, problem.head_dim, problem.v_dim, target, call)


def make_plan(traits: Traits, launcher: Launcher, variant: Variant | None = None) -> Plan:
    """Return the launches of a forward problem with a query to answer.

    Parameters
    ----------
    traits : Traits
        Of a problem that a kernel serves in any layout.
    launcher : Launcher
    variant : Variant, optional
        By default the one that `select` picks.
    """
    problem = traits.problem
    names = POINTERS if problem.mask is None else NAMES
    if variant is None:
        call = Call(traits.scores_change, fwd_sm90.supports(traits), problem.mask is not None)
        dims = problem.head_dim, problem.v_dim
        variant = select(problem.dtype.name, *dims, launcher.target, call)
    if isinstance(variant, FwdSm80):
        return Plan(fwd_sm80.steps(traits, variant), names, launcher)
    assert isinstance(variant, FwdSm90)

    def fallback() -> Plan:
        plain = for_any_layout(problem, launcher.target)
        assert isinstance(plain, FwdSm80)
        return Plan(fwd_sm80.steps(traits, plain), names, launcher)

    steps = fwd_sm90.steps(traits, variant, launcher.multiprocessors)
    counts = any("scheduler.counter" in step.addresses for step in steps)
    space = workspace_of({"counter": COUNTER_BYTES}) if counts else None
    return Plan(steps, names, launcher, space, fallback)
