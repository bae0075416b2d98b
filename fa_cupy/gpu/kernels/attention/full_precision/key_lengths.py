"""Numbers of keys of batch entries, for builds of kernels of float32 and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention.attention_params import MASK_LISTS, MAX_BATCH_AXES
from fa_cupy.gpu.plan import Step

#: The name of the array.
ARRAY = "k_lengths"
#: ``struct KeyLengths`` of ``cuda_src/common/key_lengths.cuh``.
KEY_LENGTHS = np.dtype(
    [("start", np.uint64), ("batch", np.int64, (MAX_BATCH_AXES,))]
    + [(name, np.int32) for name in ("bytes", "band_from_end")],
    align=True,
)
#: What the band of an entry, ``struct KeyBand`` there, adds to what says where a block's rows are.
BAND_BYTES = 16
# The field that KeyLengths begins at, in place of a mask's lists.
_FIRST = f"mask.{(MASK_LISTS.names or ())[0]}"


def supports(problem: Problem) -> bool:
    """Whether kernels read the keys of a problem, at equal distances, where they are.

    With lengths there is no mask, and a kernel walks all batch axes.
    """
    if problem.pages is not None:
        return False
    if problem.k_lengths is None:
        return True
    axes = sum(n > 1 for n in problem.batch)
    return problem.mask is None and problem.k_len > 0 and axes <= MAX_BATCH_AXES


def filled(problem: Problem, steps: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the struct of a problem with lengths, all but the address.

    `steps` are bytes along the batch axes that a kernel walks.
    """
    dtype = problem.k_lengths_dtype
    assert dtype is not None
    found = np.zeros(1, KEY_LENGTHS)
    found["bytes"], found["band_from_end"] = dtype.itemsize, problem.band_from_end
    found["batch"][0, : len(steps)] = [step // dtype.itemsize for step in steps]
    return found


def with_lengths(steps: Sequence[Step], own: np.ndarray[Any, Any], prefix: str = "") -> list[Step]:
    """Return launches that know the lengths.

    Parameters
    ----------
    steps : sequence of Step
    own : numpy.ndarray
        From `filled`.
    prefix : str, optional
        The path of their ``AttentionParams``.
    """
    for step in steps:
        common = step.params[prefix[:-1]] if prefix else step.params
        common["mask"].view(np.uint8)[: own.nbytes] = own.view(np.uint8)
    where = {f"{prefix}{_FIRST}": ARRAY}
    return [step._replace(addresses={**step.addresses, **where}) for step in steps]
