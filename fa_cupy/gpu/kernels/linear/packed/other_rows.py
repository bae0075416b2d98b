"""The rows of ``other_rows``: what products of packed sequences leave out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa_cupy.gpu.kernels.linear.variant import ProductVariant


@dataclass(frozen=True, kw_only=True)
class OtherRows(ProductVariant):
    """A row of ``other_rows``, a block for each sequence of each batch entry."""

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        size = {"float32": 4, "float64": 8}.get(self.dtype, 2)
        return (*super().defines, ("FA_THREADS", self.threads), ("FA_BYTES", size))


def _other_rows() -> Iterator[OtherRows]:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        yield OtherRows(
            source="linear/other_rows", dtype=dtype, dim=1, tile_m=1, tile_n=1, warps=8, stages=1,
            blocks=1, packed=True, why="a warp for a row",
        )  # fmt: skip


VARIANTS: tuple[OtherRows, ...] = tuple(_other_rows())
