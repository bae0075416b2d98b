"""How random the decisions of dropout are: shares, and independence of neighbours by chi-square.

``python -m validation dropout`` looks at 1e9 decisions for each probability, some 20 seconds on one
core for each, and returns 1 where something is less likely than one in a million.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.stats import chi2

from fa_cupy import dropout_mask

_SHARES = 0.1, 0.5
_BLOCK = 4, 1024, 2048  # heads, queries and keys of a piece
_LEAST = 1e-6


class Tables:
    """How often neighbours are kept: both, one of them, none; by what they are neighbours in."""

    def __init__(self) -> None:
        self.counts: dict[str, np.ndarray] = {}

    def add(self, what: str, first: np.ndarray, second: np.ndarray) -> None:
        """Count pairs of decisions."""
        both = np.count_nonzero(first & second)
        of_first, of_second = np.count_nonzero(first), np.count_nonzero(second)
        one, other = of_first - both, of_second - both
        none = first.size - both - one - other
        known = self.counts.setdefault(what, np.zeros(4))
        known += [both, one, other, none]

    def rows(self, p: float) -> Iterator[tuple[str, float, float, float, float]]:
        """Yield what the neighbours are, the pairs, the share of kept ones, and chi-square.

        The last number is how likely that is to be as large or larger: of three degrees of freedom,
        for the shares are known.
        """
        kept = 1 - p
        shares = np.array([kept * kept, kept * p, p * kept, p * p])
        for what, counts in self.counts.items():
            total = counts.sum()
            found = float(np.sum((counts - total * shares) ** 2 / (total * shares)))
            share = (2 * counts[0] + counts[1] + counts[2]) / (2 * total)
            yield what, total, share, found, float(chi2.sf(found, 3))


def tables(p: float, decisions: float, seed: int = 1) -> Tables:
    """Return the counts of about so many decisions."""
    found = Tables()
    heads, queries, keys = _BLOCK
    for piece in range(max(1, round(decisions / np.prod(_BLOCK)))):
        rows = slice(piece * queries, (piece + 1) * queries)
        shape = (1, heads, rows.stop, keys)
        kept, of_next = (dropout_mask(seed + i, p, shape, rows=rows)[0] for i in range(2))
        found.add("queries", kept[:, :-1], kept[:, 1:])
        found.add("keys", kept[..., :-1], kept[..., 1:])
        found.add("keys, 8 apart", kept[..., :-8], kept[..., 8:])
        found.add("keys, 64 apart", kept[..., :-64], kept[..., 64:])
        found.add("heads", kept[:-1], kept[1:])
        found.add("seeds", kept, of_next)
    return found


def main(argv: Sequence[str]) -> int:
    """Print the statistics; return whether something is wrong with them."""
    p = argparse.ArgumentParser("python -m validation dropout", description=__doc__)
    p.add_argument("--decisions", type=float, default=1e9, help="of each probability")
    args = p.parse_args(argv)
    least = 1.0
    print("p    neighbours in   pairs    kept       chi-square  likelihood")
    for share in _SHARES:
        for what, pairs, kept, found, likelihood in tables(share, args.decisions).rows(share):
            least = min(least, likelihood)
            print(
                f"{share:<4} {what:15} {pairs:.2e} {kept:.7f}  {found:10.2f}  {likelihood:.4f}",
                flush=True,
            )
    return int(least < _LEAST)
