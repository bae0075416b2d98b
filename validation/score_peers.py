"""Attention whose scores have a softcap, a bias or an expression, on a GPU.

Inputs, implementations and checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from validation import checks, peers, sparse_peers
from validation.cases import ScoredAttention
from validation.checks import Check, Score
from validation.peers import Call, UnavailableError

#: q, k, v, dout where gradients are computed, and what scores are made from besides, if anything: a
#: bias, or the slopes of an expression.
Arrays = tuple[Any, ...]
#: Binds a peer to tensors q, k, v and a bias, slopes or None; returns a call without arguments.
Bind = Callable[[ScoredAttention, Sequence[Any], Any], Callable[[], Any]]
SOFTCAP = 30.0


# ---------------------------------------------------------------------------------------- inputs
def random_cupy(case: ScoredAttention, seed: int) -> Arrays:
    """q, k, v and dout as `peers.random_cupy` draws them, and the bias or the slopes."""
    dout = peers.random_cupy(case, seed + 1)[:1] if case.backward else ()
    return *peers.random_cupy(case, seed), *dout, *_bias(case, seed + 2)


def slopes(heads: int) -> np.ndarray:
    """The slopes of ALiBi, from 2**(-8 / heads) to 2**-8."""
    return np.asarray(2.0 ** (-8.0 * np.arange(1, heads + 1) / heads))


def _alibi(case: ScoredAttention, slopes: np.ndarray) -> np.ndarray:
    """The bias of ALiBi, (heads, 1, length)."""
    distance = np.arange(case.length) - (case.length - 1)
    return np.asarray(slopes[:, None, None] * distance)


def _bias(case: ScoredAttention, seed: int) -> Arrays:
    kind, _, more = case.score.partition(" ")
    if kind in ("plain", "softcap"):
        return ()
    if case.score == "alibi expression":
        return (peers.to_device(slopes(case.heads).astype(np.float32)),)
    dtype = case.dtype if kind in ("alibi16", "bias") else "fp32"
    if kind.startswith("alibi"):
        bias = _alibi(case, slopes(case.heads))
        return (peers.to_device(bias.astype(peers.DTYPES[dtype])),)
    cp = peers.module("cupy")
    shape = (case.heads,) * (more == "heads") + (case.length, case.length)
    return (peers.normal(cp, cp.random.default_rng(seed), shape, dtype),)


def _split(case: ScoredAttention, arrays: Arrays) -> tuple[Arrays, Any]:
    """q, k, v and dout if it is there; the bias, the slopes or None."""
    count = 4 if case.backward else 3
    return arrays[:count], arrays[count] if len(arrays) > count else None


# ---------------------------------------------------------------------------------------- checks
def score64(case: ScoredAttention, bias: Any, head: int) -> Score | None:
    """Scores of one head in float64; None where they are the scaled products."""
    if case.score == "plain":
        return None
    if case.score.startswith("softcap"):

        def capped(products: np.ndarray, _rows: np.ndarray) -> tuple[np.ndarray, Any]:
            tanh = np.tanh(products / SOFTCAP)
            return SOFTCAP * tanh, 1 - tanh**2

        return capped
    if case.score == "alibi expression":
        of_head = _alibi(case, peers.to_host(bias))[head]
    else:
        of_head = peers.to_host(bias[head] if bias.ndim == 3 else bias)

    def biased(products: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, Any]:
        of_rows = of_head if len(of_head) == 1 else of_head[rows]
        return products + of_rows[:, : products.shape[1]].astype(np.float64), 1.0

    return biased


def _weights64(
    case: ScoredAttention, q: np.ndarray, k: np.ndarray, rows: np.ndarray, score: Score | None
) -> np.ndarray:
    """Rows of the softmax of one head."""
    scores = q[rows] @ k.T * case.head_dim**-0.5
    if score is not None:
        scores, _ = score(scores, rows)
    if case.causal:
        scores[np.arange(case.length) > rows[:, None]] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(p / p.sum(-1, keepdims=True))


def _host(arrays: Sequence[Any], place: tuple[int, int]) -> list[np.ndarray]:
    return [peers.to_host(x[place]).astype(np.float64) for x in arrays]


def forward_check(case: ScoredAttention, arrays: Arrays) -> Check:
    """As `checks.attention_check`.

    A softcap of 30 changes scores of N(0, 1) data by less than rounding does: that a result is
    capped, this check cannot see.
    """
    qkv, bias = _split(case, arrays)
    rows = checks.sampled_rows(case.length)
    places = [(0, 0), (case.batch - 1, case.heads - 1)]

    def reference(place: tuple[int, int]) -> np.ndarray:
        q, k, v = _host(qkv, place)
        return np.asarray(_weights64(case, q, k, rows, score64(case, bias, place[1])) @ v)

    wanted = np.stack([reference(place) for place in places])
    return checks.relative_error(case.dtype, places, rows, wanted)


def backward_check(case: ScoredAttention, arrays: Arrays) -> Check:
    """As `checks.backward_check`, and on some rows of the bias' gradient where there is one."""
    inputs, bias = _split(case, arrays)
    place = case.batch - 1, case.heads - 1
    wanted = checks.attention_gradients64(
        *_host(inputs, place), case.causal, score=score64(case, bias, place[1])
    )
    error = checks.gradients_error(case.dtype, place, wanted)
    if case.score != "bias grad":
        return error
    rows = checks.sampled_rows(case.length)[::8]
    of_bias = bias_gradient64(case, arrays, rows)

    def with_bias(result: Any) -> float:
        *grads, dbias = result
        if not checks.all_finite(case.dtype, dbias):
            return float("inf")
        found = peers.to_host(dbias)[rows].astype(np.float64)
        return max(error(grads), float(np.linalg.norm(found - of_bias) / np.linalg.norm(of_bias)))

    return with_bias


def bias_gradient64(case: ScoredAttention, arrays: Arrays, rows: np.ndarray) -> np.ndarray:
    """Rows of the gradient of a bias that all heads and sequences share, in float64."""
    inputs, bias = _split(case, arrays)
    total = np.zeros((len(rows), case.length))
    for place in np.ndindex(case.batch, case.heads):
        q, k, v, dout = _host(inputs, place)
        p = _weights64(case, q, k, rows, score64(case, bias, place[1]))
        dp = dout[rows] @ v.T
        total += p * (dp - (p * dp).sum(-1, keepdims=True))
    return total


# ----------------------------------------------------------------------------------- this package
def _same(result: Any) -> Any:
    return result


def _options(case: ScoredAttention, bias: Any) -> dict[str, Any]:
    """What this package is told of scores, given the bias or the slopes."""
    from fa_cupy import Score

    options = {"is_causal": case.causal}
    if case.score == "softcap":
        return options | {"softcap": SOFTCAP}
    if case.score == "softcap expression":
        return options | {"score": Score("cap * tanh(s / cap)", cap=SOFTCAP)}
    if case.score == "alibi expression":
        text, last = "s + slopes[h] * (j - last)", case.length - 1
        return options | {"score": Score(text, slopes=bias, last=last)}
    return options | {"bias": bias}


def fa_cupy(case: ScoredAttention, arrays: Arrays) -> Call:
    """This package."""
    from fa_cupy import attention

    (q, k, v), bias = _split(case, arrays)
    options = _options(case, bias)
    return Call(lambda: attention(q, k, v, **options), _same)


def fa_cupy_backward(case: ScoredAttention, arrays: Arrays) -> Call:
    """This package's gradients; that of the bias only where the case is about it."""
    from fa_cupy import attention, attention_backward

    (q, k, v, dout), bias = _split(case, arrays)
    options = _options(case, bias)
    out, lse = attention(q, k, v, return_lse=True, **options)
    need = ("q", "k", "v", *(["bias"] if case.score == "bias grad" else []))

    def run() -> Any:
        return attention_backward(dout, q, k, v, out, lse, need=need, **options)

    return Call(run, _same)


# ------------------------------------------------------------------------------------ torch's part
def forward(bind: Bind, contiguous: bool = False) -> Callable[[ScoredAttention, Arrays], Call]:
    """An implementation of the forward pass from a peer of torch.

    With `contiguous` it gets copies of q, k and v in the order of their axes.
    """

    def prepare(case: ScoredAttention, arrays: Arrays) -> Call:
        tensors, bias = _tensors(case, arrays, contiguous)
        return Call(bind(case, tensors, bias), peers.from_torch)

    return prepare


def backward(bind: Bind, contiguous: bool = False) -> Callable[[ScoredAttention, Arrays], Call]:
    """What autograd calls for a peer of torch: the gradients alone.

    With `contiguous` it gets copies of q, k, v and dout in the order of their axes.
    """

    def prepare(case: ScoredAttention, arrays: Arrays) -> Call:
        torch = peers.module("torch")
        (*qkv, dout), bias = _tensors(case, arrays, contiguous)
        leaves = [x.detach().requires_grad_() for x in qkv]
        if case.score == "bias grad":
            bias = bias.detach().requires_grad_()
            wanted = [*leaves, bias]
        else:
            wanted = leaves
        out = bind(case, leaves, bias)()
        return Call(
            lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True),
            lambda grads: tuple(map(peers.from_torch, grads)),
        )

    return prepare


def _tensors(case: ScoredAttention, arrays: Arrays, contiguous: bool) -> tuple[list[Any], Any]:
    torch = peers.module("torch")
    inputs, bias = _split(case, arrays)
    if not isinstance(inputs[0], np.ndarray) and not torch.cuda.is_available():
        raise UnavailableError("this torch has no CUDA")
    tensors = [peers.to_torch(x) for x in inputs]
    tensors = [x.contiguous() for x in tensors] if contiguous else tensors
    return tensors, None if bias is None else peers.to_torch(bias)


_CAN_USE = {
    "CUDNN_ATTENTION": "can_use_cudnn_attention",
    "EFFICIENT_ATTENTION": "can_use_efficient_attention",
}


def torch_sdpa(backend: str) -> Bind:
    """torch's scaled_dot_product_attention, held to one back end of the SDPBackend enumeration."""

    def bind(case: ScoredAttention, qkv: Sequence[Any], bias: Any) -> Callable[[], Any]:
        torch = peers.module("torch")
        if case.score.startswith("softcap"):
            raise UnavailableError("no softcap")
        if case.score.endswith("expression"):
            raise UnavailableError("no expressions")
        # cuDNN gets such a bias from torch too, and reads its bits as numbers of q's dtype
        if bias is not None and bias.dtype != qkv[0].dtype:
            raise UnavailableError("a bias of q's dtype only")
        if backend == "CUDNN_ATTENTION" and bias is not None and bias.requires_grad:
            raise UnavailableError("no gradient of a bias")
        mask = None if bias is None else _attn_mask(case, bias)
        causal = case.causal and mask is None
        if backend in _CAN_USE:
            cuda = torch.backends.cuda
            params = cuda.SDPAParams(*qkv, mask, 0.0, causal, False)
            if not getattr(cuda, _CAN_USE[backend])(params):
                raise UnavailableError("torch does not send this case to this back end")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        attention = peers.module("torch.nn.attention")
        chosen = getattr(attention.SDPBackend, backend)

        def run() -> Any:
            with attention.sdpa_kernel(chosen):
                return sdpa(*qkv, attn_mask=mask, is_causal=causal)

        return run

    return bind


def _attn_mask(case: ScoredAttention, bias: Any) -> Any:
    """The bias as torch wants it, (1, 1 or heads, length, length).

    torch takes either a bias or `is_causal`. So the bias of a causal case hides keys by -inf, in
    a matrix that is made before anything is timed.
    """
    torch = peers.module("torch")
    of_heads = bias if bias.ndim == 3 else bias[None]
    mask = of_heads[None].expand(1, len(of_heads), case.length, case.length)
    if not case.causal:
        return mask
    shape = case.length, case.length
    hidden = torch.ones(shape, dtype=torch.bool, device=bias.device).triu(1)
    return mask.masked_fill(hidden, float("-inf"))


def flex(case: ScoredAttention, qkv: Sequence[Any], bias: Any) -> Callable[[], Any]:
    """torch's FlexAttention, softcap by tanh and ALiBi from its slopes.

    The first call of each case compiles, for some seconds.
    """
    return _flexible(case, qkv, _score_mod(case, bias, qkv[0].device))


def flex_sigmoid(case: ScoredAttention, qkv: Sequence[Any], bias: Any) -> Callable[[], Any]:
    """As `flex`, with ``2 * sigmoid(2 * x) - 1`` in place of ``tanh(x)``."""
    if case.score != "softcap":
        raise UnavailableError("softcap only")
    torch = peers.module("torch")

    def score_mod(score: Any, _batch: Any, _head: Any, _query: Any, _key: Any) -> Any:
        return 2 * SOFTCAP * torch.sigmoid(score * (2 / SOFTCAP)) - SOFTCAP

    return _flexible(case, qkv, score_mod)


def _flexible(
    case: ScoredAttention, qkv: Sequence[Any], score_mod: Callable[..., Any] | None
) -> Callable[[], Any]:
    parts = peers.module("torch.nn.attention.flex_attention")
    blocks = None
    if case.causal:
        blocks = parts.create_block_mask(
            lambda _batch, _head, query, key: query >= key,
            *(None, None, case.length, case.length),
            device=qkv[0].device,
        )
    attend = functools.partial(sparse_peers._flex(), score_mod=score_mod, block_mask=blocks)
    return lambda: attend(*qkv)


def _score_mod(case: ScoredAttention, bias: Any, device: Any) -> Callable[..., Any] | None:
    """The function of a score, batch, head, query and key that FlexAttention compiles."""
    torch = peers.module("torch")
    if case.score == "plain":
        return None
    if case.score.startswith("softcap"):
        return lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)
    if case.score in ("alibi", "alibi expression"):
        last = case.length - 1
        slope = torch.tensor(slopes(case.heads), dtype=torch.float32, device=device)
        return lambda score, b, h, i, j: score + slope[h] * (j - last)
    if case.score == "alibi16":
        of_keys = bias[:, 0]
        return lambda score, b, h, i, j: score + of_keys[h, j]
    if bias.ndim == 3:
        return lambda score, b, h, i, j: score + bias[h, i, j]
    return lambda score, b, h, i, j: score + bias[i, j]


def impls(measured: Callable[..., Callable[[ScoredAttention, Arrays], Call]]) -> dict[str, Any]:
    """Return the peers by name, as `forward` or `backward` measures them."""
    return {
        "cudnn": measured(torch_sdpa("CUDNN_ATTENTION")),
        "efficient": measured(torch_sdpa("EFFICIENT_ATTENTION")),
        "flex": measured(flex, contiguous=True),
        "flex_sigmoid": measured(flex_sigmoid, contiguous=True),
    }
