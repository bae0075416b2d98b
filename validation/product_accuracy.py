"""Errors of causal products against float64: all dtypes, lengths up to 65,536, two dims.

They are part of ``python -m validation accuracy``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from validation import checks, peers, store

FAMILY = "accuracy_product"
LENGTHS = (1000, 4096, 65536)
DIMS = (64, 128)
HEADS = 2
# Relative Frobenius errors. To round exact results makes 1.66e-3 in bfloat16, 2.07e-4 in float16.
# The GPU rounds the state for its product too, in bfloat16 to two numbers but in float16 to one:
# that makes 2.94e-4 together, more than an eighth of bfloat16's limit.
ERROR_LIMIT = {"fp16": 3.2e-4, "bf16": 2.3e-3, "fp32": 2e-6, "fp64": 1e-13}


@dataclass(frozen=True)
class Case:
    """A causal product of two heads."""

    dtype: str
    dim: int
    length: int

    @property
    def name(self) -> str:
        """Such as ``bf16 E64 1000 causal product``."""
        return f"{self.dtype} E{self.dim} {self.length} causal product"

    def arrays(self) -> list[np.ndarray]:
        """q, k and v on the host, of standard deviation 1 but for q, whose is ``dim**-0.5``."""
        rng = np.random.default_rng(self.length + self.dim)
        shape = HEADS, self.length, self.dim
        scales = self.dim**-0.5, 1.0, 1.0
        dtype = peers.DTYPES[self.dtype]
        return [(scale * rng.standard_normal(shape)).astype(dtype) for scale in scales]

    def measure(self, device: str) -> store.Row:
        """The row of the case: ``value`` is the error over what it may be.

        ``worst`` is the largest difference of an element from float64, in units of the root mean
        square of its exact row: rows grow with their position.
        """
        from fa_cupy import causal_product

        q, k, v = self.arrays()
        sent = [peers.to_device(x) for x in (q, k, v)] if device == "gpu" else [q, k, v]
        got = peers.to_host(causal_product(*sent)).astype(np.float64)
        wanted = checks.product64(q, k, v)
        error = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        scale = np.sqrt(np.square(wanted).mean(axis=-1, keepdims=True))
        worst = float((np.abs(got - wanted) / scale).max())
        limit = ERROR_LIMIT[self.dtype]
        fixed = {"family": FAMILY, "impl": "fa_cupy", "ms": None, "unit": "of the limit"}
        named = {"case": self.name, "value": error / limit, "error": error, "worst": worst}
        return {**fixed, **named, "limit": limit}


def sweep() -> Iterator[Case]:
    """All cases."""
    for dtype, dim, length in product(peers.DTYPES, DIMS, LENGTHS):
        yield Case(dtype, dim, length)
