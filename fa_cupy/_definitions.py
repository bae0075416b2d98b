"""The arithmetic of `fa_cupy.reference`: all scores at once, in float64 or in a low precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fa_cupy._score import Score, arrays_of, operands_of
from fa_cupy.core import checks
from fa_cupy.dropout.philox import philox4x32
from fa_cupy.score import tree
from fa_cupy.score.evaluate import evaluate
from fa_cupy.score.program import Operands, entries

Array = NDArray[Any]


def visible(
    q_len: int,
    k_len: int,
    *,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> NDArray[np.bool_]:
    """Return which keys causality and window leave to which queries, shape (q_len, k_len).

    Examples
    --------
    >>> from fa_cupy import reference
    >>> reference.visible(2, 3, is_causal=True, causal_align="bottom_right").astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    i, j = np.indices((q_len, k_len))
    if causal_align == "bottom_right":
        i = i + (k_len - q_len)
    left, right = window or (None, None)
    seen = np.ones((q_len, k_len), np.bool_)
    if is_causal:
        seen &= j <= i
    if left is not None:
        seen &= i - j <= left
    if right is not None:
        seen &= j - i <= right
    return seen


def of_lengths(k_lengths: Array, q_len: int, k_len: int, **band: Any) -> NDArray[np.bool_]:
    """Return `visible` for each batch entry, of so many keys: (..., 1, q_len, k_len), or 2 axes."""
    seen = np.zeros((*k_lengths.shape, q_len, k_len), np.bool_)
    for entry in np.ndindex(k_lengths.shape):
        length = int(k_lengths[entry])
        seen[entry][:, :length] = visible(q_len, length, **band)
    return seen[..., None, :, :] if k_lengths.ndim else seen


class Packed(NamedTuple):
    """What packed sequences are, for all pairs of a query and a key: (q_len, k_len)."""

    seen: NDArray[np.bool_]
    i: Array  # positions in the sequence, 0 for pairs of none
    j: Array
    mask: Any  # that of the call, or of all its masks one
    number: Array  # of the sequence


def packed(
    q_offsets: Array, k_offsets: Array | None, mask: Any, q_len: int, k_len: int, **band: Any
) -> Packed:
    """Return `visible` within each sequence."""
    k_offsets = q_offsets if k_offsets is None else k_offsets
    masks = mask if isinstance(mask, (list, tuple)) else None
    batch = () if not masks else np.broadcast_shapes(*(x.shape[:-2] for x in masks))
    found = np.zeros((*batch, q_len, k_len), np.bool_)
    seen = np.zeros((q_len, k_len), np.bool_)
    i, j, numbers = np.zeros((3, q_len, k_len), np.int64)
    bounds = [[*map(int, x)] for x in (q_offsets, k_offsets)]
    spans = zip(*(x[at:] for x in bounds for at in (0, 1)), strict=False)
    for number, (q, q_end, k, k_end) in enumerate(spans):
        pairs = slice(q, q_end), slice(k, k_end)
        seen[pairs] = visible(q_end - q, k_end - k, **band)
        i[pairs], j[pairs] = np.indices((q_end - q, k_end - k))
        numbers[pairs] = number
        if masks is not None:
            found[(..., *pairs)] = masks[number].to_dense()
    return Packed(seen, i, j, mask if masks is None else found, numbers)


def kept_pairs(
    p: float, seed: Any, batch: tuple[int, ...], i: Array, j: Array, numbers: Any, sequences: int
) -> NDArray[np.bool_]:
    """Return which pairs dropout keeps, over all batch axes; `numbers` are those of sequences."""
    b, h = entries(np, batch)
    seed = int(np.asarray(seed).reshape(-1)[0]) % 2**64
    places = 4 * (j // 64) + j % 8 // 2, i, h, b * sequences + numbers
    words = philox4x32([np.asarray(x).astype(np.uint64) for x in places], seed)
    position = np.asarray(2 * (j % 64 // 8) + j % 2).astype(np.uint64)
    x, y = ((word * np.uint64(2**n)) for word, n in ((words[1], 4), (words[2], 8)))
    number = words[0] ^ (x // 2**32 + x) % 2**32 ^ (y // 2**32 + y) % 2**32
    for bit in range(8):
        shift = position + np.uint64(16 * (bit % 2))
        number = number | ((words[bit // 2] >> shift & np.uint64(1)) << np.uint64(32 + bit))
    threshold = min(max(round((1 - p) * 2**40), 1), 2**40 - 1)
    found: NDArray[np.bool_] = (number < np.uint64(threshold)) & (p < 1)
    return np.broadcast_to(found, (*batch, *found.shape[-2:]))


def rows_of_pages(pages: Array, page_table: Array, axes: int) -> Array:
    """Return (..., heads, keys, dim), of 4 axes or more where queries have `axes` of them."""
    if not len(pages):  # no key is read
        pages = np.zeros((1, *pages.shape[1:]), pages.dtype)
    x: Array = pages[np.clip(page_table, 0, len(pages) - 1)]
    x = np.moveaxis(x, -3, -4)
    x = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])
    return x[None] if axes >= 4 and x.ndim == 3 else x


class Scores(NamedTuple):
    """All scores of a call, and the arrays that they were made from.

    Sinks are one more column of scores, the last one, which has a value of 0 and no key.
    """

    q: Array
    k: Array  # heads repeated, as those of v
    v: Array
    scores: Array  # (..., q_len, k_len), -inf where a key is hidden
    slope: Array  # what a score changes by with q.k
    attended: NDArray[np.bool_]
    sinks: bool
    expressed: Expressed | None = None
    kept: NDArray[np.bool_] | None = None  # pairs that dropout leaves
    factor: float = 1.0  # of their weights


class Expressed(NamedTuple):
    """Scores by an expression."""

    score: Operands
    variables: dict[str, Any]
    scores: Array
    slopes: list[Array]  # by s, and by each element of an array


def _converted(real: np.dtype[Any], *rows: Any, **pairs: Any) -> Iterator[Array]:
    """Return arrays of rows in a dtype; what is of pairs has to be no sparse matrix."""
    for arg, x in pairs.items():
        if checks.is_sparse(x):
            raise TypeError(f"reference: {arg} is a sparse matrix, want an array of all pairs")
    return (np.asarray(x).astype(real) for x in rows)


def scores_of(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Array | None,
    real: np.dtype[Any],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    precision: str | None = None,  # nothing that a definition depends on
    score: Score | None = None,
    sloped: bool = False,  # whether derivatives by an expression are wanted
    k_lengths: Any = None,
    page_table: Array | None = None,
    q_offsets: Array | None = None,
    k_offsets: Array | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    **band: Any,
) -> Scores:
    q, k, v = _converted(real, q, k, v, bias=bias, mask=mask)
    if page_table is not None:
        k, v = (rows_of_pages(x, page_table, q.ndim) for x in (k, v))
    if min(q.ndim, k.ndim, v.ndim) >= 4:
        k, v = (repeat_heads(x, q.shape[-3]) for x in (k, v))
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    scores = real.type(scale) * (q @ np.swapaxes(k, -1, -2))
    slope = np.asarray(real.type(scale))
    if softcap:
        capped = scores / real.type(softcap)
        scores = real.type(softcap) * np.tanh(capped)
        slope = slope / np.cosh(capped) ** 2
    column = None if sinks is None else np.asarray(sinks).astype(real)[..., None]
    seen = visible(q.shape[-2], k.shape[-2], **band)
    if k_lengths is not None:
        seen = of_lengths(np.asarray(k_lengths), *seen.shape, **band)
    at, places, sequences = None, {}, 1
    if q_offsets is not None:
        at = packed(q_offsets, k_offsets, mask, *seen.shape, **band)
        seen, mask, places = at.seen, at.mask, {"i": at.i, "j": at.j}
        sequences = max(1, len(q_offsets) - 1)
    expressed = None
    if score is not None:
        scores = over_batch(scores, v, bias, mask, column, seen)
        expressed = express(score, scores, sloped, **places)
        scores = expressed.scores
        slope = slope * expressed.slopes[0] if sloped else slope
    if bias is not None:
        scores = scores + np.asarray(bias).astype(real)
    if mask is not None:
        seen = seen & (mask.to_dense() if hasattr(mask, "to_dense") else mask)
    scores = np.where(seen, scores, real.type(-np.inf))
    if column is not None:
        scores = _with_column(scores, column)
        v = np.concatenate([v, np.zeros_like(v, shape=(*v.shape[:-2], 1, v.shape[-1]))], axis=-2)
    found = Scores(q, k, v, scores, slope, scores != -np.inf, column is not None, expressed)
    return with_dropout(found, dropout, seed, at, sequences) if dropout else found


def with_dropout(x: Scores, p: float, seed: Any, at: Packed | None, sequences: int) -> Scores:
    """Return scores with the pairs that dropout keeps; `at` are those of sequences."""
    batch = over_batch(x.scores, x.v).shape[:-2]
    lengths, numbers = (x.q.shape[-2], x.k.shape[-2]), np.zeros(1, np.int64)
    i, j, numbers = (*np.indices(lengths), numbers) if at is None else (at.i, at.j, at.number)
    kept = kept_pairs(p, seed, batch, i, j, numbers, sequences)
    if x.sinks:
        kept = _with_column(kept, np.ones((1, 1), np.bool_))
    return x._replace(kept=kept, factor=0.0 if p == 1 else 1 / (1 - p))


def _with_column(x: Array, column: Array) -> Array:
    """Return `x` with one more column; the axes of both broadcast."""
    rows = np.broadcast_shapes(x.shape[:-1], column.shape[:-1])
    parts = [np.broadcast_to(part, (*rows, part.shape[-1])) for part in (x, column)]
    return np.concatenate(parts, axis=-1)


def over_batch(scores: Array, *others: Any) -> Array:
    """Return scores with the batch axes of the output."""
    shapes = [x.shape[:-2] for x in (scores, *others) if x is not None]
    return np.broadcast_to(scores, (*np.broadcast_shapes(*shapes), *scores.shape[-2:]))


def express(score: Score, s: Array, sloped: bool, **places: Array) -> Expressed:
    """Evaluate an expression for all pairs at once; `places` may be other `i` and `j`."""
    given = arrays_of("reference", score)
    native = {name: np.asarray(x) for name, x in given.items()}
    operands = operands_of(score, native)
    assert operands is not None
    b, h = entries(np, s.shape[:-2])
    i, j = np.arange(s.shape[-2])[:, None], np.arange(s.shape[-1])
    variables = {"s": s, "b": b, "h": h, "i": i, "j": j, **places}
    names = [f"element {n}" for n in range(len(operands.program.elements))] if sloped else []
    if s.size == 0:
        return Expressed(operands, variables, s, [s] * (1 + len(names)))
    order = operands.program.steps(("s", *names) if sloped else ())
    value, *slopes = (
        np.broadcast_to(x, s.shape)
        for x in evaluate(np, order, variables, operands.values, s.dtype)
    )
    return Expressed(operands, variables, value, slopes)


def score_gradients(x: Scores, dscores: Array) -> list[Array]:
    """Return the gradients of the arrays of floats of an expression, in their order."""
    found: list[Array] = []
    if x.expressed is None:
        return found
    score, variables, scores, slopes = x.expressed
    seen = x.attended[..., : scores.shape[-1]]  # without the column of sinks
    for array, of in enumerate(score.values):
        if isinstance(of, float) or score.program.dtypes[array][0] in "iu":
            continue
        total = np.zeros(of.shape, dscores.dtype)
        for element, slope in zip(score.program.elements, slopes[1:], strict=True):
            if element.array != array or not scores.size:
                continue
            indices = tree.ordered(*element.node.args)
            values = evaluate(np, indices, variables, score.values, scores.dtype)
            places = tuple(np.broadcast_to(index, scores.shape) for index in values)
            terms = np.where(seen, dscores * slope, 0)
            np.add.at(total, places, terms if places else terms.sum())
        found.append(total)
    return found


def attend(x: Scores, weight_dtype: np.dtype[Any] | None) -> tuple[Array, Array, Array]:
    """Return output, LSE and weights, these rounded to `weight_dtype`."""
    lse, real = logsumexp(x.scores), x.scores.dtype.type
    rows = x.attended.any(axis=-1, keepdims=True)
    weights = np.where(x.attended, softmax(np.where(rows, x.scores, 0)), 0)
    if weight_dtype is not None:
        weights = weights.astype(weight_dtype).astype(x.scores.dtype)
    kept = weights if x.kept is None else weights * x.kept
    out = real(x.factor) * weigh(kept, with_kept(x, x.attended), x.v)
    return out, np.broadcast_to(lse, out.shape[:-1]).copy(), weights


def with_kept(x: Scores, seen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which of some pairs dropout leaves; without sinks where `seen` has none."""
    return seen if x.kept is None else seen & x.kept[..., : seen.shape[-1]]


def gradients(
    x: Scores, dout: Array, dlse: Array | None, dtype: np.dtype[Any] | None
) -> tuple[Array, Array, Array, Array, Array]:
    """Return the gradients of q, k, v, scores and sinks, for every batch entry of the output.

    `dtype` is that of the output, and of weights and gradients of scores in products.
    """
    real = x.scores.dtype

    def rounded(a: Array) -> Array:
        return a if dtype is None else a.astype(dtype).astype(real)

    out, _, weights = attend(x, dtype)
    dout = np.asarray(dout).astype(real)
    base = (dout * rounded(out)).sum(axis=-1, keepdims=True)
    if dlse is not None:
        base = base - np.asarray(dlse).astype(real)[..., None]
    whole = attend(x, None)[2]
    dweights = dout @ np.swapaxes(x.v, -1, -2)
    if x.kept is not None:
        dweights = np.where(x.kept, real.type(x.factor) * dweights, 0)
    dscores = np.where(x.attended, whole * (dweights - base), 0)
    keys = dscores.shape[-1] - x.sinks
    weights, seen = weights[..., :keys], x.attended[..., :keys]
    dscores, dsinks = dscores[..., :keys], dscores[..., keys:]
    dproducts = rounded(np.where(seen, dscores * x.slope, 0))
    back = np.swapaxes(seen, -1, -2)
    weights, kept = np.where(with_kept(x, seen), weights, 0), with_kept(x, seen)
    dq = reach(dproducts, seen, x.k)
    dk = reach(np.swapaxes(dproducts, -1, -2), back, x.q)
    dv = reach(np.swapaxes(weights, -1, -2), np.swapaxes(kept, -1, -2), dout)
    dv = real.type(x.factor) * dv
    return dq, dk, dv, dscores, dsinks


def product(
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    real: np.dtype[Any],
    reverse: bool,
    score_dtype: np.dtype[Any] | None = None,
) -> tuple[Array, Array]:
    q, k, v = (np.asarray(x).astype(real) for x in (q, k, v))
    state = np.zeros((k.shape[-1], v.shape[-1]), real) if initial is None else np.asarray(initial)
    if min(q.ndim, k.ndim, v.ndim) >= 4:
        k, v = (repeat_heads(x, q.shape[-3]) for x in (k, v))
        state = repeat_heads(state, q.shape[-3]) if state.ndim > 2 else state
    seen = np.tril(np.ones((q.shape[-2], k.shape[-2]), np.bool_))
    seen = seen.T if reverse else seen
    with np.errstate(all="ignore"):
        scores = np.where(seen, q @ np.swapaxes(k, -1, -2), 0)
        if score_dtype is not None:
            scores = scores.astype(score_dtype).astype(real)
        # A sum over no dims has no factor that could be anything but finite.
        within = weigh(scores, seen, v if k.shape[-1] else np.zeros_like(v))
        out = within + q @ state
        last = state + np.swapaxes(k, -1, -2) @ v
    return out, np.broadcast_to(last, (*out.shape[:-2], *last.shape[-2:]))


def repeat_heads(x: Array, heads: int) -> Array:
    count = x.shape[-3]
    return np.repeat(x, heads // count, axis=-3) if 1 < count < heads else x


def softmax(scores: Array) -> Array:
    return special.softmax(scores, axis=-1) if scores.shape[-1] else scores


def logsumexp(scores: Array) -> Array:
    """Log-sum-exp of the last axis: -inf for nothing, NaN where softmax has NaN."""
    if scores.shape[-1] == 0:
        return np.full(scores.shape[:-1], -np.inf, scores.dtype)
    lse: Array = special.logsumexp(scores, axis=-1)
    return np.where(lse == np.inf, np.nan, lse)


def weigh(weights: Array, attended: Array, v: Array) -> Array:
    """Return ``weights @ v`` in which a key that is not attended to counts for nothing."""
    finite = np.isfinite(v)
    out: Array = weights @ np.where(finite, v, 0)
    if finite.all():
        return out
    hits = attended.astype(v.dtype)
    up, down, nan = (hits @ x.astype(v.dtype) > 0 for x in (v == np.inf, v == -np.inf, np.isnan(v)))
    out = np.where(up, np.inf, np.where(down, -np.inf, out))
    return np.where(nan | (up & down), np.nan, out)


def reach(weights: Array, attended: Array, x: Array) -> Array:
    """Return ``weights @ x``, NaN where a row of `x` that is attended to is not finite."""
    finite = np.isfinite(x)
    out: Array = weights @ np.where(finite, x, 0)
    return np.where(attended.astype(x.dtype) @ (~finite).astype(x.dtype) > 0, np.nan, out)


def summed(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of `shape` was broadcast or its heads repeated."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    for axis, size in enumerate(shape):
        if size == 1:
            x = x.sum(axis=axis, keepdims=True)
        elif size != x.shape[axis]:
            parts = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
            x = parts.sum(axis=axis + 1)
    return x
