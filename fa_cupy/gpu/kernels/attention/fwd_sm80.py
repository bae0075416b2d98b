"""How a plan launches ``fwd_sm80``."""

from __future__ import annotations

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.driver.devices import target_of_device
from fa_cupy.gpu.driver.launch import Arguments, Launch
from fa_cupy.gpu.kernels.attention.fwd_params import (
    MASK_AT,
    MaskPointers,
    Part,
    fill,
    pack_head,
    pack_mask,
)
from fa_cupy.gpu.kernels.attention.fwd_variants import Variant


class FwdSm80:
    """The launches of a problem by one row of the table, whatever its pointers.

    Parameters
    ----------
    problem : Problem
        With a query to answer.
    out : View
        Of the output, over ``problem.batch``.
    row : Variant
    device : int

    Attributes
    ----------
    row : Variant
    q_tiles : int
        Tiles of query rows in one batch entry.
    launches : list
        (`Part`, `Launch`).
    """

    __slots__ = ("_aligned", "_params", "_pool", "launches", "q_tiles", "row")

    def __init__(self, problem: Problem, out: View, row: Variant, device: int) -> None:
        kernel = compile.load(row, str(target_of_device(device)), device)
        self.row = row
        self._params, parts, self._aligned = fill(problem, out, row.tile_m)
        self.q_tiles = int(self._params["q_tiles"][0])
        # Parameter structs that no thread is using; a launch copies one before it returns.
        self._pool: list[Arguments] = []
        self.launches: list[tuple[Part, Launch]] = [
            (part, Launch(kernel, part.blocks, row.threads, row.shared_bytes)) for part in parts
        ]

    def __call__(
        self, pointers: tuple[int, ...], counter: int = 0, mask: MaskPointers | None = None
    ) -> None:
        """Launch with these addresses.

        Parameters
        ----------
        pointers : tuple of int
            In the order of `fa_cupy.gpu.kernels.attention.fwd_params.POINTERS`.
        counter : int
            For what shares out tiles, which this does not.
        mask : MaskPointers, optional
            The mask, if the problem has one.
        """
        q, k, v, _, out, _ = pointers
        aligned = self._aligned and not ((q | k | v | out) & 15)
        try:
            arguments = self._pool.pop()
        except IndexError:
            arguments = Arguments(self._params)
        whole = len(self.launches) == 1
        for part, launch in self.launches:
            at = pointers if whole else _moved(pointers, part.offsets)
            pack_head(arguments.bytes, 0, *at, part.first_batch, aligned)
            if mask is not None:
                pack_mask(arguments.bytes, MASK_AT, *mask.of_part(part.entry, whole))
            launch(arguments)
        self._pool.append(arguments)


def _moved(pointers: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(p and p + offset for p, offset in zip(pointers, offsets, strict=True))
