"""The arguments of dropout: its probability and its seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fa_cupy.core import checks

#: Bits of the number that decides on a pair, which is compared with a threshold.
BITS = 40

_SEEDS = 2**64
_WANTED = "an int from 0 to 2**64 - 1, or an array of one integer"


@dataclass(frozen=True)
class Dropout:
    """Which weights of attention are dropped; a seed is no part of what problems are equal by.

    Sequence s of batch entry b counts as batch entry ``b * sequences + s``.
    """

    p: float
    seed: Any = field(compare=False)  # an int, or an array of one on a device
    sequences: int = 1
    sequence: int = 0
    on_device: bool = False  # whether it is such an array
    # On a device, of each query of packed sequences, (q_len, 4) of int32: the sequence, its first
    # query and its first key, and 0. Only calls without offsets have it.
    places: Any = field(default=None, compare=False)
    placed: bool = False  # whether there are such

    @property
    def threshold(self) -> int:
        """Numbers of 40 bits below it keep a pair: (1 - p) * 2**40, and never all or none."""
        return min(max(round((1.0 - self.p) * (1 << BITS)), 1), (1 << BITS) - 1)

    @property
    def factor(self) -> float:
        """What kept weights are multiplied by; 0 where none is kept."""
        return 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)

    @property
    def operand(self) -> int:
        """The number that a launch is given: the seed, or its address."""
        return int(self.seed.data.ptr) if self.on_device else int(self.seed)

    @property
    def field(self) -> str:
        """The field of ``AttentionParams`` that has it."""
        return "dropout.seed_data" if self.on_device else "dropout.seed"

    def packed(self, offsets: Any) -> Dropout:
        """Return that of packed sequences, given their offsets or None."""
        return self if offsets is None else replace(self, sequences=max(1, offsets.shape[0] - 1))

    def at(self, places: Any) -> Dropout:
        """Return that of an equal call without offsets, given the places of its queries."""
        return replace(self, places=places, placed=True)

    def of_sequence(self, number: int) -> Dropout:
        """Return that of one of the sequences; queries of none, -1, have no keys."""
        return replace(self, sequence=max(0, number))


def arrays_of(seed: Any) -> dict[str, Any]:
    """Return a seed that is an array, but of NumPy, by its name: those of a call go together."""
    is_array = hasattr(seed, "__dlpack__") and not isinstance(seed, np.ndarray)
    return {"seed": seed} if is_array else {}


def of_arguments(name: str, p: Any, seed: Any, arg: str = "dropout") -> Dropout | None:
    """Check the arguments of a call, and return its dropout; None without.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    p : float
        The probability that a weight is dropped.
    seed : int, native array, or None
        None where `p` is 0.
    arg : str, optional
        The name of `p`.
    """
    share = probability(name, arg, p)
    if seed is None:
        if share > 0.0:
            raise TypeError(f"{name}: seed is None, want {_WANTED} ({arg} is {share:g})")
        return None
    number = seed_of(name, seed)
    on_device = not isinstance(number, int)
    return Dropout(share, number, on_device=on_device) if share > 0.0 else None


def probability(name: str, arg: str, p: Any) -> float:
    """Return a probability as a float."""
    share = checks.finite(name, arg, p)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{name}: {arg} is {checks.show(p)}, want a number from 0 to 1")
    return share


def seed_of(name: str, seed: Any) -> Any:
    """Return the number of a seed, or the array itself if it is on a device.

    The number of an array counts modulo 2**64.
    """
    on_host = isinstance(seed, np.ndarray)
    if not on_host and not hasattr(getattr(seed, "data", None), "ptr"):
        return checks.whole(name, "seed", seed, _WANTED, range(_SEEDS))
    if seed.dtype.kind not in "iu":
        raise TypeError(f"{name}: seed has dtype {seed.dtype}, want an integer one")
    if seed.size != 1:
        raise ValueError(f"{name}: seed has shape {seed.shape}, want an array of one integer")
    if not on_host:
        if seed.dtype.itemsize != 8:
            raise TypeError(f"{name}: seed has dtype {seed.dtype}, want int64 or uint64 on a GPU")
        return seed
    return int(seed.reshape(-1)[0]) % _SEEDS
