"""The graph of merging: one task for each chunk of the results."""

from __future__ import annotations

from functools import partial
from operator import getitem
from typing import Any

from dask.base import tokenize

from fa_cupy.core import attention_problem
from fa_cupy.dask import layers, tasks
from fa_cupy.dask.arguments import collected, stand_ins
from fa_cupy.dask.tiles import Cut, Edges, batch_labels, labels_of


def merged(name: str, outs: Any, lses: Any) -> tuple[Any, Any]:
    """Return `outs` and `lses` merged, as in `fa_cupy.dask.merge_attention`.

    `name` is the public function that errors speak of.
    """
    for arg, parts in (("outs", outs), ("lses", lses)):
        if hasattr(parts, "shape"):
            collected(name, **{arg: parts})
    named = attention_problem.named_parts(name, outs, lses)
    found = collected(name, **named)
    arrays, metadata = [*found.values()], [*stand_ins(found).values()]
    count = len(arrays) // 2
    attention_problem.matching_parts(name, metadata[:count], metadata[count:])
    like = arrays[0]
    batch = (*batch_labels(like.ndim - 2), "q")
    labels = [labels_of(x.ndim, *(("q", None)[: 1 + (i < count)])) for i, x in enumerate(arrays)]
    edges = Edges(dict(zip(batch, like.shape, strict=False)), [*zip(arrays, labels, strict=True)])
    cuts = [Cut.of(x, found, edges) for x, found in zip(arrays, labels, strict=True)]
    token = tokenize(name, [x.name for x in arrays])
    both, out_name, lse_name = (f"{name}-{what}{token}" for what in ("pair-", "", "lse-"))
    task = partial(tasks.merge_attention, count)
    tiles = [*edges.tiles(batch)]
    pairs = layers.on_top(
        both,
        {(both, *tile.values()): (task, *(cut.key(tile) for cut in cuts)) for tile in tiles},
        [layers.of_array(cut.array) for cut in cuts],
    )
    keys = [(*tile.values(),) for tile in tiles]
    out = {(out_name, *where, 0): (getitem, (both, *where), 0) for where in keys}
    lse = {(lse_name, *where): (getitem, (both, *where), 1) for where in keys}
    rows = edges.chunks(like.shape[:-1], batch).sizes
    sums = attention_problem.sum_dtype(like.dtype)
    return (
        layers.array(
            layers.on_top(out_name, out, [pairs]), (*rows, (like.shape[-1],)), like, like.dtype
        ),
        layers.array(layers.on_top(lse_name, lse, [pairs]), rows, like, sums),
    )
