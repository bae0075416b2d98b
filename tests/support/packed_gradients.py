"""Gradients over packed sequences by the kernels, held against the definition."""

from typing import Any, NamedTuple

import numpy as np

from fa_cupy import reference
from fa_cupy.gpu.kernels import backward
from fa_cupy.gpu.kernels.attention_backward import select
from tests.support import gradients_of_biases, packed_sequences
from tests.support.kernel_gradients import Case, case, compare, score_of
from validation.emulator.calls import attention_backward


class Packed(NamedTuple):
    """A call.

    Attributes
    ----------
    call : Case
        Its definition: a mask says who sees whom.
    band : dict
        Options that count positions within each sequence.
    offsets : tuple of numpy.ndarray
        Of queries and of keys.
    """

    call: Case
    band: dict[str, Any]
    offsets: tuple[np.ndarray, np.ndarray]


def packed(dtype, heads, lengths, dims, offsets, band=None, **options):
    """A call of random numbers; `options` are those of `case`."""
    band = band or {}
    call = case(dtype, heads, lengths, dims, batch=1, **options)
    seen = packed_sequences.visible(*offsets, lengths, **band)
    return Packed(call._replace(options={**call.options, "mask": seen}), band, offsets)


def given(x):
    """The options that kernels get."""
    rest = {name: value for name, value in x.call.options.items() if name != "mask"}
    return {**rest, **x.band}


def rows_of(x, target="sm_90a", **wanted):
    """The kernels of a call on a device, in the order of their launches."""
    call = x.call._replace(options=given(x))
    dim = max(call.q.shape[-1], call.v.shape[-1])
    asked = backward.Wanted(
        call.q.dtype.name, dim, score=score_of(call), mapped=target == "sm_90a", packed=True,
        **wanted,
    )  # fmt: skip
    return select(asked, target)


def results(x):
    """The output and the LSE of a call."""
    q, k, v, *_, options = x.call
    with np.errstate(all="ignore"):
        out, lse = reference.attention(q, k, v, **options)
    out = out.astype(q.dtype)
    invalid = packed_sequences.invalid_rows(*x.offsets, (q.shape[2], k.shape[2]))
    out[..., invalid, :] = lse[..., invalid] = np.nan
    return out, lse.astype(np.float32)


def solve(x, rows=None, **how):
    """dq, dk and dv of the kernels; the gradient of a bias too, where they compute it."""
    q, k, v, dout, dlse, _ = x.call
    out, lse = results(x)
    q_offsets, k_offsets = x.offsets
    more = {"q_offsets": q_offsets, "k_offsets": k_offsets, **given(x)}
    rows = rows or rows_of(x)
    return attention_backward(rows, dout, q, k, v, out, lse, dlse, **how, **more)


def check(x, rows=None, **how):
    """Hold the kernels' gradients against the definition."""
    found = solve(x, rows, **how)
    compare(x.call, found[:3])
    if len(found) > 3:
        gradients_of_biases.compare(x.call, found[3])
    return found
