"""The measured problems, as data: what every benchmark, sweep and plot iterates over."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Dense:
    """Self-attention over ``batch`` sequences of ``length`` tokens.

    The name of a case, such as ``bf16 hd128 causal 4096x4``, is dtype, head_dim, ``full`` or
    ``causal``, length x batch; the number of heads follows from heads * head_dim = 2048 and is
    named (``h8``) only where it does not.
    """

    dtype: str
    head_dim: int
    causal: bool
    length: int
    batch: int
    heads: int

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        kind = "causal" if self.causal else "full"
        heads = "" if self.heads * self.head_dim == 2048 else f" h{self.heads}"
        return f"{self.dtype} hd{self.head_dim} {kind} {self.length}x{self.batch}{heads}"

    @property
    def flops(self) -> float:
        """Operations of the two products; a causal mask halves them."""
        full = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return full / 2 if self.causal else full


def _tokens_16384(dtype: str, head_dim: int, lengths: tuple[int, ...]) -> tuple[Dense, ...]:
    return tuple(
        Dense(dtype, head_dim, causal, length, 16384 // length, 2048 // head_dim)
        for causal, length in product((False, True), lengths)
    )


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

ATTENTION_FWD = (
    *_tokens_16384("bf16", 128, _LENGTHS),
    *_tokens_16384("bf16", 64, _LENGTHS),
    *_tokens_16384("bf16", 256, _LENGTHS),
    *_tokens_16384("fp16", 128, _LENGTHS),
    # no tensor cores here: measured beside plain CuPy rather than beside the fused kernels
    *_tokens_16384("fp32", 128, (4096,)),
)

ATTENTION_CPU = tuple(
    Dense("fp32", head_dim, causal, length, 1, heads)
    for (heads, length, head_dim), causal in product(
        ((8, 2048, 64), (8, 2048, 128), (4, 8192, 64)), (False, True)
    )
)
