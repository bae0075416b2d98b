"""Attention of packed sequences and its gradients: inputs, implementations and checks on a GPU.

Where sequences are short, a call takes about as long as Python needs for its launches, so one run
of an implementation is a CUDA graph of several calls.

Arrays are (1, heads, tokens, dim) views of (1, tokens, heads, dim). What an implementation gives is
looked at as a list of arrays (heads, length, dim), one for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from validation import backward_peers, checks, cuda_graphs, peers
from validation.cases import Packed
from validation.checks import Check
from validation.peers import Call, UnavailableError

Arrays = tuple[Any, ...]  # q, k, v, the offsets in int32, and of gradients dout
_FLOPS = 1e12  # of a graph: some milliseconds
_MOST_CALLS = 32


# ---------------------------------------------------------------------------------------- inputs
def random_cupy(case: Packed, seed: int) -> Arrays:
    """N(0, 1) q, k and v on the GPU, and the offsets there."""
    return (*peers.random_cupy(case, seed), _offsets(case))


def random_gradients(case: Packed, seed: int) -> Arrays:
    """The same with the gradient of the output."""
    *qkv, dout = backward_peers.random_cupy(case, seed)
    return (*qkv, _offsets(case), dout)


def _offsets(case: Packed) -> Any:
    return peers.module("cupy").asarray(np.array(case.offsets, np.int32))


# ---------------------------------------------------------------------------------------- checks
def check(case: Packed, arrays: Arrays) -> Check:
    """Relative Frobenius error of sampled rows of each sequence, each of another head.

    inf where any element of the whole result is not finite.
    """
    sequences = [_sequences(case, x) for x in arrays[:3]]
    rows = [checks.sampled_rows(length) for length in case.lengths]

    def reference(i: int, at: np.ndarray) -> np.ndarray:
        q, k, v = (peers.to_host(x[i][i % case.heads]) for x in sequences)
        return checks.attention64(q, k, v, at, case.causal)

    want = np.concatenate([reference(i, at) for i, at in enumerate(rows)])

    def error(result: list[Any]) -> float:
        if not all(checks.all_finite(case.dtype, x) for x in result):
            return float("inf")
        found = [_host(x[i % case.heads])[rows[i]] for i, x in enumerate(result)]
        return float(np.linalg.norm(np.concatenate(found) - want) / np.linalg.norm(want))

    return error


def gradients_check(case: Packed, arrays: Arrays) -> Check:
    """Relative Frobenius error of gradients, the largest of the three in two sequences.

    These are the shortest one and the last one, in the last head. inf where any element of the
    whole result is not finite.
    """
    q, k, v, _, dout = arrays
    sequences = [_sequences(case, x) for x in (q, k, v, dout)]
    places = {case.lengths.index(min(case.lengths)), case.sequences - 1}
    wanted = {
        i: checks.attention_gradients64(
            *(peers.to_host(x[i][-1]) for x in sequences), causal=case.causal
        )
        for i in places
    }

    def error(result: Sequence[list[Any]]) -> float:
        if not all(checks.all_finite(case.dtype, x) for of in result for x in of):
            return float("inf")
        pairs = [
            (_host(of[i][-1]), want)
            for i in places
            for of, want in zip(result, wanted[i], strict=True)
        ]
        return float(max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs))

    return error


def _host(array: Any) -> np.ndarray:
    return peers.to_host(array).astype(np.float64)


def _sequences(case: Packed, array: Any) -> list[Any]:
    """The part of each sequence of an array (1, heads, tokens, dim)."""
    return [array[0, :, begin:end] for begin, end in pairwise(case.offsets)]


# --------------------------------------------------------------------------------- runs of calls
def calls_of(case: Packed) -> int:
    """How many calls a run makes: as many as take some milliseconds."""
    return int(min(_MOST_CALLS, max(1, -(-_FLOPS // case.flops))))


def _same(result: Any) -> Any:
    return result


def _run(
    case: Packed, attend: Callable[[], Any], native: Callable[[Any], Any], on_cpu: bool,
    captured: Callable[..., cuda_graphs.Run] = cuda_graphs.captured,
) -> Call:  # fmt: skip
    """A graph of calls; on a CPU, without one. `native` is of the result of one call."""
    made, calls = cuda_graphs.looped if on_cpu else captured, calls_of(case)
    run = made(lambda _: attend(), 1, calls)
    return Call(run, lambda results: native(results[0]), _same if on_cpu else None, calls=calls)


def _on_cpu(arrays: Arrays) -> bool:
    return isinstance(arrays[0], np.ndarray)


# --------------------------------------------------------------------------------------- fa_cupy
def fa_cupy(case: Packed, arrays: Arrays) -> Call:
    """This package, without the log-sum-exp."""
    from fa_cupy import attention

    q, k, v, offsets = arrays

    def attend() -> Any:
        return attention(q, k, v, is_causal=case.causal, q_offsets=offsets)

    return _run(case, attend, lambda out: _sequences(case, out), _on_cpu(arrays))


def fa_cupy_backward(case: Packed, arrays: Arrays) -> Call:
    """The gradients of this package."""
    from fa_cupy import attention, attention_backward

    q, k, v, offsets, dout = arrays
    options = {"is_causal": case.causal, "q_offsets": offsets}
    out, lse = attention(q, k, v, return_lse=True, **options)

    def attend() -> Any:
        return attention_backward(dout, q, k, v, out, lse, **options)

    def native(grads: Any) -> Any:
        return tuple([_sequences(case, x) for x in grads])

    return _run(case, attend, native, _on_cpu(arrays))


def _entries(case: Packed, array: Any) -> Any:
    """Sequences of one length as batch entries (sequences, heads, length, dim), in place."""
    if case.shortest != case.longest:
        raise UnavailableError("sequences of other lengths")
    rows = array.swapaxes(-3, -2)
    return rows.reshape(case.sequences, case.longest, *rows.shape[2:]).swapaxes(-3, -2)


def fa_cupy_dense(case: Packed, arrays: Arrays) -> Call:
    """This package with sequences of one length as the entries of a batch."""
    from fa_cupy import attention

    q, k, v = (_entries(case, x) for x in arrays[:3])
    return _run(case, lambda: attention(q, k, v, is_causal=case.causal), list, _on_cpu(arrays))


def fa_cupy_dense_backward(case: Packed, arrays: Arrays) -> Call:
    """The gradients of this package with sequences of one length as the entries of a batch."""
    from fa_cupy import attention, attention_backward

    q, k, v, dout = (_entries(case, arrays[i]) for i in (0, 1, 2, 4))
    out, lse = attention(q, k, v, is_causal=case.causal, return_lse=True)

    def attend() -> Any:
        return attention_backward(dout, q, k, v, out, lse, is_causal=case.causal)

    return _run(case, attend, lambda grads: tuple(map(list, grads)), _on_cpu(arrays))


# ----------------------------------------------------------------------------------------- torch
def torch_sdpa(backend: str, backward: bool = False) -> Callable[[Packed, Arrays], Call]:
    """torch's scaled_dot_product_attention of one sequence after the other, or its gradients.

    It is held to one back end of the SDPBackend enumeration.
    """

    def prepare(case: Packed, arrays: Arrays) -> Call:
        torch = peers.module("torch")
        on_cpu = _on_cpu(arrays)
        if not on_cpu and not torch.cuda.is_available():
            raise UnavailableError("this torch has no CUDA")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        nn_attention = peers.module("torch.nn.attention")
        chosen = getattr(nn_attention.SDPBackend, backend)
        of_arrays = [_torch_sequences(case, x) for x in (*arrays[:3], *arrays[4:])]
        leaves = [[x.detach().requires_grad_(backward) for x in of] for of in of_arrays[:3]]

        def forward() -> list[Any]:
            with nn_attention.sdpa_kernel(chosen):
                return [sdpa(*qkv, is_causal=case.causal) for qkv in zip(*leaves, strict=True)]

        outs: list[Any] = []

        def gradients() -> Any:
            if not outs:  # autograd runs where the forward did: on the stream of the graph
                outs.extend(forward())
            given = [x for of in leaves for x in of]
            found = torch.autograd.grad(outs, given, of_arrays[3], retain_graph=True)
            return [found[i : i + case.sequences] for i in range(0, len(found), case.sequences)]

        attend, native = (gradients, _native_gradients) if backward else (forward, _native)
        return _run(case, attend, native, on_cpu, cuda_graphs.captured_by_torch)

    return prepare


def _torch_sequences(case: Packed, array: Any) -> list[Any]:
    """The same memory as torch tensors (1, heads, length, dim), one for each sequence."""
    tensor = peers.to_torch(array)
    return [tensor[:, :, begin:end] for begin, end in pairwise(case.offsets)]


def _native(outs: Sequence[Any]) -> list[Any]:
    return [peers.from_torch(x[0]) for x in outs]


def _native_gradients(grads: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(map(_native, grads))


def _torch_flash(case: Packed, arrays: Arrays) -> tuple[Any, ...]:
    """q, k, v (and dout) as torch tensors (tokens, heads, dim), and arguments of all calls."""
    torch = peers.module("torch")
    if _on_cpu(arrays) or not torch.cuda.is_available():
        raise UnavailableError("on a GPU only")
    tensors = [peers.to_torch(x)[0].transpose(0, 1) for x in (*arrays[:3], *arrays[4:])]
    offsets = torch.from_dlpack(arrays[3])
    return *tensors, (offsets, offsets, *[max(case.lengths)] * 2, 0.0, case.causal)


def torch_flash(case: Packed, arrays: Arrays) -> Call:
    """torch's FlashAttention-2 for packed sequences, by its operator."""
    q, k, v, more = _torch_flash(case, arrays)
    forward = peers.module("torch").ops.aten._flash_attention_forward

    def attend() -> Any:
        return forward(q, k, v, *more, False)[0]

    return _run(case, attend, lambda out: _rows_of(case, out), False, cuda_graphs.captured_by_torch)


def torch_flash_backward(case: Packed, arrays: Arrays) -> Call:
    """The gradients of `torch_flash`."""
    q, k, v, dout, more = _torch_flash(case, arrays)
    aten = peers.module("torch").ops.aten
    out, lse, *seeds = aten._flash_attention_forward(q, k, v, *more, False)[:4]

    def attend() -> Any:
        return aten._flash_attention_backward(dout, q, k, v, out, lse, *more, *seeds)

    def native(grads: Any) -> Any:
        return tuple([_rows_of(case, x) for x in grads[:3]])

    return _run(case, attend, native, False, cuda_graphs.captured_by_torch)


def _rows_of(case: Packed, tensor: Any) -> list[Any]:
    """Arrays (heads, length, dim), one for each sequence, of a tensor (tokens, heads, dim)."""
    return _sequences(case, peers.from_torch(tensor.transpose(0, 1)[None]))


forward: dict[str, Callable[[Packed, Arrays], Call]] = {
    "fa_cupy": fa_cupy,
    "fa_cupy_dense": fa_cupy_dense,
    "cudnn": torch_sdpa("CUDNN_ATTENTION"),
    "flash2": torch_flash,
}
backward: dict[str, Callable[[Packed, Arrays], Call]] = {
    "fa_cupy": fa_cupy_backward,
    "fa_cupy_dense": fa_cupy_dense_backward,
    "cudnn": torch_sdpa("CUDNN_ATTENTION", backward=True),
    "flash2": torch_flash_backward,
}
