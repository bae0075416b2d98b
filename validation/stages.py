"""The SM80 kernel stage by stage, each against NumPy, a line a stage.

A kernel that is wrong at the end says little about where.  Built to stop early, it writes what it
holds after one stage to a float32 array: the scores of the first key tile, the row statistics, the
weights as they enter the second product, the output before it is normalised.  The last three
stages are the whole kernel: on one key tile (the epilogue alone is new), on many, and causal.

The only thing asked of the package is ``fa_cupy.gpu.attention.debug_stage(q, k, v, stage)``, which
returns for stages 1 to 4 an array of shape (batch, q_len padded to query tiles, columns):

=====  ==========================================================================  ==========
stage  what                                                                        columns
=====  ==========================================================================  ==========
1      q . k of the first key tile                                                 tile_n
2      largest q . k of each row, sum of exp(scale * (q . k - largest))            2 or more
3      exp(scale * (q . k - largest)), rounded to the type of the inputs           tile_n
4      stage 3 times the values of the tile                                        v_dim padded
=====  ==========================================================================  ==========
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from validation import peers, store

NAMES = ("scores", "statistics", "weights", "one tile of PV", "epilogue", "many tiles", "causal")
# Relative Frobenius errors.  Sums in float32 for the first two; from the third on a weight may fall
# on the other side of a rounding boundary; whole results: 1.1 times what plain arithmetic gives.
LIMITS = {1: 1e-5, 2: 1e-5, 3: 5e-4, 4: 5e-4}
PLAIN_FACTOR = 1.1
BATCH, Q_LEN, K_LEN = 3, 200, 600  # no multiple of any tile

Debug = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
Attention = Callable[..., np.ndarray]


class Finding(NamedTuple):
    """The error of one stage on one configuration."""

    stage: int
    configuration: str
    error: float
    limit: float


def _relative(got: np.ndarray, wanted: np.ndarray) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    wanted = wanted.astype(np.float64)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def _softmax(
    q: np.ndarray, k: np.ndarray, causal: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products, their row maxima and the unnormalised weights, in float64."""
    products = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)
    if causal:
        rows, columns = np.indices(products.shape[-2:])
        products[..., columns > rows] = -np.inf
    largest = products.max(-1, keepdims=True)
    return products, largest, np.exp(q.shape[-1] ** -0.5 * (products - largest))


def first_tile(q: np.ndarray, k: np.ndarray, v: np.ndarray, debug: Debug) -> list[float]:
    """Errors of stages 1 to 4."""

    def dumped(stage: int) -> np.ndarray:
        return debug(q, k, v, stage)[:, : q.shape[1]]

    scores = dumped(1)
    tile_n = scores.shape[-1]
    products, largest, weights = _softmax(q, k[:, :tile_n])
    row = dumped(2)
    rounded = weights.astype(q.dtype).astype(np.float64)
    values = rounded @ v[:, :tile_n].astype(np.float64)
    return [
        _relative(scores, products),
        max(_relative(row[..., :1], largest), _relative(row[..., 1], weights.sum(-1))),
        _relative(dumped(3), rounded),
        _relative(dumped(4)[..., : v.shape[-1]], values),
    ]


def whole(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, attention: Attention, causal: bool
) -> tuple[float, float]:
    """Error of the whole kernel, and the most it may be."""
    _, _, weights = _softmax(q, k, causal)
    total = weights.sum(-1, keepdims=True)
    exact = weights @ v.astype(np.float64) / total
    plain = (weights.astype(q.dtype).astype(np.float64) @ v.astype(np.float64) / total).astype(
        q.dtype
    )
    got = attention(q, k, v, is_causal=causal).astype(np.float64)
    return _relative(got, exact), PLAIN_FACTOR * _relative(plain.astype(np.float64), exact)


def run(
    debug: Debug,
    attention: Attention,
    dtypes: Sequence[str] = ("fp16", "bf16"),
    head_dims: Sequence[int] = (64, 80, 128, 256),
) -> list[Finding]:
    """Every stage on every configuration; arrays are NumPy's on both sides."""
    findings = []
    rng = np.random.default_rng(3)
    for dtype, head_dim in product(dtypes, head_dims):
        name = f"{dtype} hd{head_dim}"
        q, k, v = (
            rng.standard_normal((BATCH, length, head_dim), dtype=np.float32).astype(
                peers.DTYPES[dtype]
            )
            for length in (Q_LEN, K_LEN, K_LEN)
        )
        for stage, error in enumerate(first_tile(q, k, v, debug), 1):
            findings.append(Finding(stage, name, error, LIMITS[stage]))
        tile_n = debug(q, k, v, 1).shape[-1]
        one, square = slice(0, tile_n), slice(0, Q_LEN)
        parts = {5: (k[:, one], v[:, one]), 6: (k, v), 7: (k[:, square], v[:, square])}
        for stage, (keys, values) in parts.items():
            findings.append(Finding(stage, name, *whole(q, keys, values, attention, stage == 7)))
    return findings


def report(findings: Sequence[Finding]) -> tuple[str, int]:
    """One line a stage, for its worst configuration, and how many stages are over."""
    lines = [["stage", "", "error", "at most", "worst at", ""]]
    over = 0
    for stage, name in enumerate(NAMES, 1):
        worst = max((f for f in findings if f.stage == stage), key=lambda f: f.error / f.limit)
        bad = not worst.error <= worst.limit
        over += bad
        numbers = [f"{worst.error:.1e}", f"{worst.limit:.1e}"]
        lines.append([str(stage), name, *numbers, worst.configuration, "WRONG" if bad else "ok"])
    return store.align(lines), over


def on_gpu() -> tuple[Debug, Attention]:
    """What `run` needs, from the kernels on CuPy's current device."""
    import fa_cupy
    from fa_cupy.gpu import attention as kernel

    def debug(q: np.ndarray, k: np.ndarray, v: np.ndarray, stage: int) -> np.ndarray:
        found: Any = kernel.debug_stage(*map(peers.to_device, (q, k, v)), stage)
        return peers.to_host(found)

    def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
        return peers.to_host(fa_cupy.attention(*map(peers.to_device, (q, k, v)), **options))

    return debug, attention


def main(argv: Sequence[str]) -> int:
    """Run the stages on the GPU; 1 where one is wrong."""
    p = argparse.ArgumentParser(
        "python -m validation stages", description="each stage against NumPy"
    )
    p.add_argument("--out", default="", help="JSON file instead of results/stages-<device>.json")
    args = p.parse_args(argv)
    if not store.gpu_available():
        print("stages: needs CuPy and a GPU, and finds none")
        return 2
    findings = run(*on_gpu())
    facts = store.header("gpu")
    path = Path(args.out) if args.out else store.path_for("stages", facts)
    fixed = {"family": "stages", "impl": "fa_cupy", "ms": None, "unit": "at most"}
    store.merge(
        path,
        facts,
        [
            {**fixed, "case": f"{f.stage} {f.configuration}", "value": f.limit, "error": f.error}
            for f in findings
        ],
    )
    text, over = report(findings)
    print(text)
    print(f"{facts['device']}, {len(findings)} rows in {path}")
    return int(over > 0)
