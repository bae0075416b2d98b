"""How a causal product is computed on a GPU: which kernels, and how the sequence is split."""

from __future__ import annotations

from typing import NamedTuple

from fa_cupy.gpu.kernels.linear.state_prefix_sum import state_prefix_sum
from fa_cupy.gpu.kernels.linear.variant import ProductVariant


class Choice(NamedTuple):
    """How a causal product is computed.

    Attributes
    ----------
    row : ProductVariant
    states : ProductVariant or None
        What sums the states of segments; None for one segment, and where each block sums what lies
        before its segment itself.
    segments, segment_rows : int
        The parts of a sequence, and the rows of each but the last.
    microseconds : float
        What the cost model expects.
    """

    row: ProductVariant
    states: ProductVariant | None
    segments: int
    segment_rows: int
    microseconds: float

    def launches(self, qk_dim: int, v_dim: int) -> list[tuple[ProductVariant, int, int]]:
        """Return rows in the order of their launches, with blocks a segment, and segments."""
        launches: list[tuple[ProductVariant, int, int]] = []
        if self.states is not None:
            tiles = -(-v_dim // self.states.tile_n)
            launches.append((self.states, tiles, self.segments - 1))
            scan = state_prefix_sum(self.row)
            launches.append((scan, -(-qk_dim * v_dim // scan.threads), 1))
        return [*launches, (self.row, -(-v_dim // self.row.tile_n), self.segments)]

    @property
    def text(self) -> str:
        """For people."""
        parts = f"{self.segments} segments" if self.segments > 1 else "one pass"
        return f"{self.row.name}, {parts}, about {self.microseconds:.0f} us"
