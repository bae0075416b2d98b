"""Calls of the kernels of gradients in float32 and float64, and what they are held against."""

import numpy as np

from fa_cupy import reference
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.gpu.kernels.score import score_mod_of
from tests.support import packed_sequences, strategies
from tests.support.gradients import hold
from tests.support.kernel_attention import blocks_of
from validation.emulator import calls

NAMES = "dq", "dk", "dv"


def arrays_of(rows, lengths, heads=(2, 1), less=(0, 0), seed=0, scale=1.0):
    """Random dout, q, k and v for some rows."""
    rng, (q_len, k_len) = np.random.default_rng(seed), lengths
    dim, v_dim = (rows[0].dim - n for n in less)
    shapes = [(heads[0], q_len, v_dim), (heads[0], q_len, dim), (heads[1], k_len, dim)]
    shapes.append((heads[1], k_len, v_dim))
    drawn = [scale * rng.standard_normal((1, *shape)) for shape in shapes]
    return [x.astype(rows[0].dtype) for x in drawn]


def far_scores(rng, rows, lengths, size, seed=0):
    """Arrays whose scores, with a scale of 1, are far apart, and a gradient of the LSE.

    The best keys of a row have the same score. Those of some rows are multiples of `size`.
    """
    arrays = arrays_of(rows, lengths, less=(8, 16), seed=seed)
    q, k = arrays[1], arrays[2]
    far = rng.random(q.shape[:3]) < 0.3
    q[far] = 0
    q[far, 0] = size * rng.choice([-1, 1], int(far.sum()))
    k[..., 0] = rng.choice([1, 0.5, -1], k.shape[:3])
    return arrays, rng.standard_normal(q.shape[:3]).astype(q.dtype)


def with_score(q, key, score, at):
    """The key with another number `at` an index, so that its products with q sum to a score."""
    others = q.astype(np.float64) @ key - float(q[at]) * key[at]
    key[at] = (score - others) / float(q[at])
    return key


def long_key(size, seed=0):
    """A query and a key of float32, with numbers of a size, whose products sum to about 1,034."""
    rng = np.random.default_rng(seed)
    q, key = (rng.standard_normal(24) * size for _ in range(2))
    q = q.astype(np.float32)
    q[0] = 32
    for at in (np.argmax(np.abs(q)), 5, 6):  # each time by what was rounded before
        key = with_score(q, key, 1034.0, at).astype(np.float32).astype(np.float64)
    return q, key.astype(np.float32)


def short_key(q, score):
    """A key with a score, of which nothing cancels."""
    return (np.arange(24) == 0) * np.float32(score / q[0])


def long_and_short_keys():
    """Queries with keys some of which are long: their scores are rounded, those of others are not.

    Rounded, the larger score of the first two keys may be the smaller one; a sum over many may
    differ by as much as one of them.
    """
    q, key = long_key(2e4)
    keys = np.stack([key, short_key(q, 1024)])
    assert 1024 < q.astype(np.float64) @ key < 1050
    yield q[None], keys
    for seed in range(6):
        q, key = long_key(500, seed)
        for above in (0.5, 1.0, 3.0):  # a product by the order of another library
            yield q[None], np.stack([*[key] * 30, short_key(q, key @ q + above)])


def solve(
    rows, arrays, bias=None, seen=None, dlse=None, seed=0, sources=None, invalid=(),
    truncating=False, **options,
):  # fmt: skip
    """The kernels' gradients of what the definition has for output and LSE.

    `seen` is the definition's mask. Offsets say the same to the kernels, if there are any, and
    `invalid` are the rows whose offsets are out of range.
    """
    dout, q, k, v = arrays
    as_given = dict(options)
    calls.operands_in(as_given)
    score = score_mod_of(attention_problem(q, k, v, bias, None, **as_given), sloped=True)
    builds = [row.for_score(score).for_sequences("q_offsets" in options) for row in rows]
    with np.errstate(all="ignore"):
        results = reference.attention(q, k, v, bias, seen, **without_offsets(options))
        out, lse = (x.astype(rows[0].dtype) for x in results)
    out[..., list(invalid), :] = lse[..., list(invalid)] = np.nan
    mask = seen if any(row.sparse for row in rows) else None
    given = dout, q, k, v, out, lse, dlse, bias, mask
    how = {"seed": seed, "sources": sources or {}, "truncating": truncating}
    return calls.attention_backward(builds, *given, **how, **options)


def without_offsets(options):
    """The options of the definition, to which a mask says which sequences there are."""
    if "q_offsets" not in options:
        return options
    of_sequences = "q_offsets", "k_offsets", "is_causal", "window", "causal_align"
    return {name: x for name, x in options.items() if name not in of_sequences}


def definition(arrays, bias=None, seen=None, dlse=None, **options):
    return reference.attention_backward(
        *arrays, bias, seen, dlse=dlse, **without_offsets(options)
    )  # fmt: skip


def check_any(rows, arrays, rounded, bias=None, seen=None, dlse=None, **options):
    """Hold gradients of any numbers against what their arithmetic allows, element by element.

    `rounded` is as for `tests.support.gradients.bounds`.
    """
    found = solve(rows, arrays, bias=bias, seen=seen, dlse=dlse, **options)
    own = {name: x for name, x in options.items() if name not in ("seed", "invalid", "truncating")}
    dout, *operands = arrays
    case = strategies.Case(*operands, bias, seen, options=without_offsets(own))
    with np.errstate(all="ignore"):
        hold(case, dict(zip("qkv", found, strict=True)), dout, dlse, rounded)


def check_bias(rows, rounded, less, axes, dtype, lengths, band, softcap, hides, seed):
    """As `check_any`, with a bias that has some of the axes, and may hide pairs."""
    rng = np.random.default_rng(seed)
    shape = tuple(n if has else 1 for n, has in zip((2, *lengths), axes, strict=True))
    bias = rng.standard_normal(shape).astype(dtype)
    if hides:
        bias[rng.random(shape) < 0.3] = -np.inf
    arrays = arrays_of(rows, lengths, less=less, seed=seed)
    check_any(rows, arrays, rounded, bias=bias, seed=seed, softcap=softcap, **band)


def check_mask(rows, rounded, less, far, heads, own, lengths, band, spoiled, seed):
    """As `check_any`, under a mask of each head or of all.

    There may be NaN in a key and a value, and a number of `far` that makes scores so.
    """
    rng = np.random.default_rng(seed)
    mask = blocks_of(rng, *([heads[0]] if own else []), *lengths)
    arrays = arrays_of(rows, lengths, heads, less, seed)
    if far:
        arrays[1][..., ::7, :] = 0
        arrays[1][..., ::7, 0] = far
        arrays[2][..., 0] = 1.0
    if spoiled and lengths[0] * lengths[1] < 4000:
        arrays[2][..., -1, 0] = arrays[3][..., 0, 0] = np.nan
    check_any(rows, arrays, rounded, seen=mask, seed=seed, **band)


def check_packed(rows, rounded, less, lengths, band, softcap, seed):
    """As `check_any`, for packed sequences."""
    sizes, q_offsets, k_offsets = lengths
    options = {"q_offsets": q_offsets, "softcap": softcap, **band}
    if k_offsets is not q_offsets:
        options["k_offsets"] = k_offsets
    both = q_offsets, k_offsets
    options["seen"] = packed_sequences.visible(*both, sizes, **band)
    options["invalid"] = np.flatnonzero(packed_sequences.invalid_rows(*both, sizes))
    arrays = arrays_of(rows, sizes, less=less, seed=seed)
    check_any(rows, arrays, rounded, seed=seed, **options)
