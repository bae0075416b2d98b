"""Gradients of attention under masks: inputs, implementations and a check on a GPU."""

from __future__ import annotations

from typing import Any

from validation import checks, peers, sparse_peers
from validation.cases import MaskedAttention
from validation.checks import Check
from validation.peers import Call, UnavailableError
from validation.sparse_peers import Arrays, bit_mask, seen


def random_cupy(case: MaskedAttention, seed: int) -> Arrays:
    """q, k, v, dout, and what the mask is made of, if anything."""
    *qkv, dout = *sparse_peers.random_cupy(case, seed)[:3], peers.random_cupy(case, seed + 1)[0]
    return *qkv, dout, *sparse_peers._made_of(case)


def masked_check(case: MaskedAttention, arrays: Arrays) -> Check:
    """As `checks.backward_check`, of what the mask leaves."""
    place = case.batch - 1, case.heads - 1
    q, k, v, dout = (peers.to_host(x[place]) for x in arrays[:4])
    wanted = checks.attention_gradients64(
        q, k, v, dout, False, seen=lambda rows: seen(case, arrays[4:], place[1], rows)
    )
    return checks.gradients_error(case.dtype, place, wanted)


def _call(case: MaskedAttention, arrays: Arrays, mask: Any) -> Call:
    from fa_cupy import attention, attention_backward

    q, k, v, dout, *_ = arrays
    out, lse = attention(q, k, v, mask=mask, return_lse=True)

    def run() -> Any:
        return attention_backward(dout, q, k, v, out, lse, mask=mask)

    return Call(run, sparse_peers._same)


def fa_cupy(case: MaskedAttention, arrays: Arrays) -> Call:
    """This package with a `BitMask`, made beforehand; without a mask where the case has none."""
    return _call(case, arrays, bit_mask(case, arrays[4:]))


def fa_cupy_array(case: MaskedAttention, arrays: Arrays) -> Call:
    """This package with an array of bool, which every call packs."""
    if not case.mask.startswith("elements"):
        raise UnavailableError("masks that are arrays only")
    return _call(case, arrays, arrays[4])


def flex(case: MaskedAttention, arrays: Arrays) -> Call:
    """What autograd calls for `sparse_peers.flex`: the gradients alone.

    The first call of each kind of mask compiles, for some seconds.
    """
    torch = peers.module("torch")
    q, k, v, dout, *made_of = arrays
    leaves = [peers.to_torch(x).contiguous().detach().requires_grad_() for x in (q, k, v)]
    attend = sparse_peers.flexible(case, tuple(made_of))
    out = attend(*leaves)
    given = peers.to_torch(dout).contiguous()
    return Call(
        lambda: torch.autograd.grad(out, leaves, given, retain_graph=True),
        lambda grads: tuple(map(peers.from_torch, grads)),
    )
