"""The reduced set of the sanitizers, attention over single pairs: every row, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from validation import peers
from validation.attention_calls import loaded_rows, send
from validation.backward_calls import error

_WRONG = 0.05  # of a norm; an output in bfloat16 changes gradients of large scores by 0.03


def graph(q_len: int, k_len: int, seed: int) -> np.ndarray:
    """Pairs at random, rows and columns without one, and one of each with nearly all."""
    rng = np.random.default_rng(seed)
    seen = rng.random((q_len, k_len)) < 0.004
    seen[q_len // 2] = rng.random(k_len) < 0.9
    seen[:, k_len // 3] = rng.random(q_len) < 0.9
    seen[1::7] = seen[:, 1::5] = False
    return seen


def problems(dim: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Shapes and options that reach every branch of the kernels with this `dim`.

    "shared" heads have keys and values together. "weights" are a sparse bias with its gradient. An
    "offset" in elements keeps rows from being aligned. Large scores have rows computed once more.
    """
    plain = {"q_len": 330, "k_len": 410, "head_dim": dim, "v_dim": dim}
    return [
        (plain, {}),
        ({**plain, "shared": 2, "head_dim": dim - 8, "v_dim": dim - 15}, {"softcap": 2.0}),
        ({**plain, "offset": 1, "weights": True}, {}),
        ({**plain, "scale": 100.0}, {"is_causal": True, "causal_align": "bottom_right"}),
        ({**plain, "q_len": 1, "k_len": 2, "weights": True}, {}),
    ]


def _call(dtype: np.dtype, shape: dict[str, Any], options: dict[str, Any]) -> None:
    """Compute output and gradients, and compare them with float64."""
    import cupyx.scipy.sparse

    from fa_cupy import BitMask, attention, attention_backward

    rng, shared = np.random.default_rng(1), shape.get("shared", 1)
    sizes = {
        "q": (2, shared, shape["q_len"], shape["head_dim"]),
        "k": (2, 1, shape["k_len"], shape["head_dim"]),
        "v": (2, 1, shape["k_len"], shape["v_dim"]),
        "dout": (2, shared, shape["q_len"], shape["v_dim"]),
    }
    host = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    host["q"] *= shape.get("scale", 1.0)
    host = {name: x.astype(dtype) for name, x in host.items()}
    q, k, v, dout = (send(x, shape.get("offset", 0)) for x in host.values())
    host["mask"] = seen = graph(shape["q_len"], shape["k_len"], 2)
    more: dict[str, Any] = {"mask": BitMask.from_dense(seen), **options}
    if shape.get("weights"):
        host["bias"] = np.where(seen, rng.standard_normal(seen.shape), 0).astype(np.float32)
        more["bias"] = cupyx.scipy.sparse.csr_matrix(peers.to_device(host["bias"]))
    out, lse = attention(q, k, v, return_lse=True, **more)
    need = ("q", "k", "v", *(["bias"] if "bias" in more else []))
    found = [*attention_backward(dout, q, k, v, out, lse, need=need, **more)]
    if "bias" in more:
        found[3] = found[3].toarray()
    if error(host, tuple(map(peers.to_host, found)), options) > _WRONG:
        raise RuntimeError(f"{dtype} {shape} {options}: the result is wrong")


def run(target: str, share: int = 0, shares: int = 1) -> int:
    """Make every call once and look at each result; return how many there were.

    Parameters
    ----------
    target : str
    share, shares : int
        One of so many shares of the rows, and how many there are.

    Raises
    ------
    RuntimeError
        Where a result is wrong, or a call did not reach its row.
    """
    from fa_cupy.core.attention_problem import FLOAT_DTYPES
    from fa_cupy.gpu.kernels.attention.pairs import bwd_dkdv_pairs, bwd_dq_pairs, fwd_pairs

    dtypes = {dtype.name: dtype for dtype in FLOAT_DTYPES}
    calls = 0
    sources = [module.VARIANTS[0].source for module in (fwd_pairs, bwd_dq_pairs, bwd_dkdv_pairs)]
    for row in fwd_pairs.VARIANTS[share::shares]:
        if target not in row.targets:
            print(f"{row.name}: not for {target}")
            continue
        with loaded_rows() as reached:
            for shape, options in problems(row.dim):
                _call(dtypes[row.dtype], shape, options)
                calls += 1
        if missed := {(x, row.dim) for x in sources} - {(x.source, x.dim) for x in reached}:
            raise RuntimeError(f"no call reached {missed}")
    return calls
