"""Attention backward by its definition, and how kernels are held against it."""

from typing import NamedTuple

import numpy as np

from fa_cupy import _definitions, reference
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels import backward
from fa_cupy.gpu.kernels.attention_backward import VARIANTS, select
from fa_cupy.gpu.kernels.score import bias_at, score_mod_of, takes_bias, with_float32_bias
from tests.support import strategies
from tests.support.gradients import hold
from tests.support.kernel_attention import BANDS, DTYPES, any_sinks, blocks_of, draw
from validation.emulator.calls import attention_backward, operands_in


class Case(NamedTuple):
    """Arrays (batch, heads, length, dim) of a call, and its options, bias and mask among them.

    A `scale` among these is that of the scores; `case` has another one, of its numbers.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray | None
    options: dict


def case(
    dtype, heads, lengths, dims, *, batch=2, dlse=False, scale=1.0, seed=0, layout=None, **options
):
    """A call of random numbers; `layout` says how each array lies in memory."""
    (q_heads, k_heads), (q_len, k_len), (dim, v_dim) = heads, lengths, dims
    shapes = [(q_heads, q_len, dim), (k_heads, k_len, dim), (k_heads, k_len, v_dim)]
    arrays = [
        draw(
            batch, *shape, dtype=np.dtype(DTYPES.get(dtype, dtype)), seed=4 * seed + i, scale=scale
        )
        for i, shape in enumerate([*shapes, (q_heads, q_len, v_dim)])
    ]
    if layout == "blhd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]
    given = draw(batch, q_heads, q_len, dtype=np.dtype(np.float32), seed=seed + 9) if dlse else None
    return Case(*arrays, given, options)


def scale_of(call, real, options):
    """The scale of a call, taken out of its options."""
    scale = options.pop("scale", None)
    return real(call.q.shape[-1] ** -0.5 if scale is None else scale)


class Gradients(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Parts(NamedTuple):
    """What gradients are made of, with the keys of each query head."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    p: np.ndarray
    lse: np.ndarray
    slope: np.ndarray  # of the scores, by their products times the scale

    @classmethod
    def of(cls, call, real):
        q, k, v, dout = (x.astype(real) for x in call[:4])
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        band = dict(call.options)
        bias, mask, softcap, sinks, score = (
            band.pop(name, None) for name in ("bias", "mask", "softcap", "sinks", "score")
        )
        s, slope = scale_of(call, real, band) * (q @ k.swapaxes(2, 3)), np.ones((), real)
        if softcap:
            tanh = np.tanh(s / real(softcap))
            s, slope = real(softcap) * tanh, 1 - tanh * tanh
        if score is not None:
            with np.errstate(all="ignore"):
                expressed = _definitions.express(score, s, sloped=True)
            s, slope = expressed.scores, expressed.slopes[0]
        seen = reference.visible(q.shape[2], k.shape[2], **band)
        if mask is not None:
            seen = seen & (mask.to_dense() if hasattr(mask, "to_dense") else mask)
        s = np.where(seen, s if bias is None else s + bias.astype(real), -np.inf)
        sink = real(-np.inf) if sinks is None else sinks.astype(real)[..., None]
        top = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(top == -np.inf, 0, top)
        e = np.exp(s - top)
        total = e.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        with np.errstate(divide="ignore", invalid="ignore"):
            return cls(
                q, k, v, dout, np.where(total > 0, e / total, 0), (np.log(total) + top)[..., 0],
                slope,
            )  # fmt: skip

    def sums(self, call, p, ds):
        """dq, dk and dv of weights and of gradients of products times the scale."""
        scale = scale_of(call, self.q.dtype.type, dict(call.options))
        dk, dv = scale * (ds.swapaxes(2, 3) @ self.q), p.swapaxes(2, 3) @ self.dout
        shape = *call.k.shape[:2], -1
        of_keys = (x.reshape(*shape, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
        return scale * (ds @ self.k), *of_keys


def gradients(call, low=None, out=None, parts=None):
    """In float64; with a type in `low`, weights and dS rounded to it and sums in float32.

    `out` is what the gradients of weights are shifted by, their own output by default; `parts` are
    those of the call where somebody has them.
    """
    real = np.float64 if low is None else np.float32

    def rounded(x):
        return x if low is None else x.astype(low).astype(real)

    x = parts or Parts.of(call, real)
    p = rounded(x.p)
    out = rounded(p @ x.v) if out is None else out.astype(real)
    delta = (x.dout * out).sum(axis=-1)
    if call.dlse is not None:
        delta = delta - call.dlse
    ds = x.p * (x.dout @ x.v.swapaxes(2, 3) - delta[..., None]) * x.slope
    return Gradients(out, x.lse, *map(rounded, x.sums(call, p, rounded(ds))))


def slack(call, x):
    """Norms of what sums in float32 may put gradients off, where their terms cancel too."""
    size = x._replace(**{name: np.abs(getattr(x, name)) for name in ("q", "k", "v", "dout")})
    terms = size.dout @ size.v.swapaxes(2, 3) + (size.dout * (x.p @ size.v)).sum(-1, keepdims=True)
    if call.dlse is not None:
        terms = terms + np.abs(call.dlse)[..., None]
    # The slope of a softcap is 1 less a square: near 1, the rounding of that is all there is.
    slope = x.slope + 2.0 * (x.slope.ndim > 0)
    return [2.0**-23 * np.linalg.norm(y) for y in size.sums(call, x.p, x.p * slope * terms)]


def rows_sm90(dtype, head_dim, v_dim, masked=False, score=None):
    """The kernels of a call that tensor maps can walk, in the order of their launches."""
    wanted = backward.Wanted(dtype, max(head_dim, v_dim), masked, score=score)
    return select(wanted, "sm_90a")


def rows_sm80(dtype, head_dim, v_dim, masked=False, target="sm_80"):
    """Those of a call on another device, or that tensor maps cannot walk."""
    return select(backward.Wanted(dtype, max(head_dim, v_dim), masked, mapped=False), target)


def score_of(call):
    """What kernels compute of the scores of a call."""
    options = {"bias": None, "mask": None, **call.options}
    operands_in(options)
    problem = attention_problem.attention_problem(call.q, call.k, call.v, **options)
    bias = options["bias"]
    if not takes_bias(problem):
        problem, bias = with_float32_bias(np, problem, bias)
    if bias is not None:
        problem = bias_at(problem, bias.ctypes.data)
    return score_mod_of(problem, sloped=True)


def rows_of(call):
    """The rows that serve a call."""
    dims = call.q.shape[-1], call.v.shape[-1]
    return rows_sm90(call.q.dtype.name, *dims, "mask" in call.options, score_of(call))


def builds_of(rows, call):
    """The builds of some rows for the scores of a call."""
    main, score = rows[1], score_of(call)
    if main.score == score:
        return rows
    if isinstance(main, backward.BackwardSm90):  # whose tiles change with the scores
        return rows_sm90(main.dtype, main.dim, main.dim, main.sparse, score)
    return tuple(row.for_score(score) for row in rows)


def traits_of(q, k, v, bias=None, mask=None, dbias=False, **options):
    """What follows from a call whose gradients lie as their arrays do; `dbias` wants the bias'."""
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    dq, dk, dv = (np.empty_like(x) for x in (q, k, v))
    dout = np.empty(problem.out_shape, q.dtype)
    like = attention_problem.attention_problem(q, dk, dv, bias, mask, **options)
    queries = (attention_problem.out_view(problem, x.shape, x.strides) for x in (dout, dout, dq))
    of_bias = problem.bias if dbias else None
    return backward.Traits(problem, backward.Gradients(*queries, like.k, like.v, of_bias))


def parts_of(space):
    """The bytes of each part of a workspace, with what is left free behind it."""
    places = sorted(space.places.items(), key=lambda pair: pair[1])
    ends = [*[place for _, place in places[1:]], space.nbytes]
    return {name: end - place for (name, place), end in zip(places, ends, strict=True)}


def solve(call, rows=None, bits=None, **how):
    """The kernels' dq, dk and dv; `how` is for `validation.emulator.calls.attention_backward`.

    `bits` is the same mask for the kernels.
    """
    dtype = call.q.dtype
    rows = builds_of(rows, call) if rows else rows_of(call)
    q, k, v, dout, dlse, options = call
    out = np.empty_like(dout)  # and laid out as it
    with np.errstate(all="ignore"):
        exact, lse = reference.attention(q, k, v, **options)
        out[...] = exact.astype(dtype)
        given = options if bits is None else {**options, "mask": bits}
        return attention_backward(rows, dout, q, k, v, out, lse, dlse, **how, **given)


def compare(call, got, times=1.2):
    """Hold gradients against the definition, beside plain ones in low precision.

    Plain ones may be closer by luck, where few numbers are rounded. No more is asked than what
    gradients have that are exact for the output that is given, and rounded once.
    """
    dtype, parts = call.q.dtype, Parts.of(call, np.float64)
    exact = gradients(call, parts=parts)
    given = exact.out.astype(dtype)
    others = gradients(call, dtype, given), gradients(call, out=given, parts=parts)
    for name, x, room in zip(("dq", "dk", "dv"), got, slack(call, parts), strict=True):
        want = getattr(exact, name)
        error, *limits = (
            np.linalg.norm(y.astype(dtype).astype(np.float64) - want)
            for y in (x, *(getattr(other, name) for other in others))
        )
        limit = max(limits)
        assert np.isfinite(error), name
        assert error <= times * limit + room, (name, error, limit, room)


def check(call, **how):
    """Hold the kernels' gradients against the definition."""
    compare(call, got := solve(call, **how))
    return got


def check_spoiled(call, **how):
    """Where numbers are not finite: hold each element against float64, and where there is none."""
    q, k, v, dout, dlse, options = call
    with np.errstate(all="ignore"):
        found = dict(zip("qkv", solve(call, **how), strict=True))
        band = dict(options)
        more = [band.pop(name, None) for name in ("bias", "mask")]
        definition = strategies.Case(q, k, v, *more, options=band)
        hold(definition, found, dout, dlse, strategies.UNIT[q.dtype])


# Of each call, in the order of their launches.
ROWS = [
    (rows_sm80 if row.kernel == "bwd_dkdv_sm80" else rows_sm90)(
        row.dtype, row.dim, row.dim, row.sparse
    )
    for row in VARIANTS
    if row.kernel in ("bwd_sm90", "bwd_dkdv_sm90", "bwd_dkdv_sm80")
]


def any_bias(rng, batch, heads, q_len, k_len):
    """A bias of any type that broadcasts along any axes, with -inf in it."""
    sizes = (n if rng.random() < 0.5 else 1 for n in (batch, heads, q_len, k_len))
    dtype = [*DTYPES.values(), np.float32, np.float64][int(rng.integers(0, 4))]
    bias = rng.standard_normal(tuple(sizes)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    return bias.astype(dtype)


def any_transform(rng, masked, batch, heads, q_len, k_len):
    """What stands before the softmax, as options; a mask where there has to be one."""
    options = {}
    if rng.random() < 0.3:
        options["softcap"] = float(rng.choice([0.5, 2.0, 30.0]))
    if rng.random() < 0.5:
        options["bias"] = any_bias(rng, batch, heads, q_len, k_len)
    if rng.random() < 0.2:
        options["scale"] = float(rng.choice([-0.2, 0.0, 0.05]))
    if masked:
        sizes = (n if rng.random() < 0.5 else 1 for n in (batch, heads))
        options["mask"] = blocks_of(rng, *sizes, q_len, k_len)
    return options


def random_call(rows, seed):
    """As that of `kernel_attention`."""
    rng, dim = np.random.default_rng(seed), rows[1].dim
    options = dict(BANDS[int(rng.integers(0, len(BANDS)))])
    if rng.random() < 0.2:
        options = {"window": (int(rng.integers(0, 150)), int(rng.integers(0, 150)))}
        options["causal_align"] = str(rng.choice(["top_left", "bottom_right"]))
    given = {
        "batch": 1,
        "heads": [(1, 1), (2, 2), (2, 1)][int(rng.integers(0, 3))],
        "lengths": tuple(int(x) for x in rng.choice([1, 5, 63, 64, 70, 129, 150], 2)),
        "dims": tuple(dim - 8 * int(x) for x in rng.integers(0, 4, 2)),
        "dlse": bool(rng.random() < 0.5),
        "layout": [None, "blhd"][int(rng.integers(0, 2))],
        "scale": float(rng.choice([0.3, 1.0, 3.0])),
        **options,
    }
    call = case(rows[0].dtype, seed=seed, **given)
    sizes = 1, given["heads"][0], *given["lengths"]
    options |= any_transform(rng, rows[1].sparse, *sizes)
    call = call._replace(options=options)
    blocks = int(rng.integers(1, 5))
    together = int(rng.integers(1, blocks + 1))
    how = {"seed": seed, "blocks": blocks, "together": together, "truncating": rng.random() < 0.3}
    spoiled = str(rng.choice(["q", "k", "v", "dout"])) if rng.random() < 1 / 3 else ""
    if spoiled:
        x = getattr(call, spoiled)
        x[tuple(rng.integers(0, x.shape))] = rng.choice([np.nan, np.inf, -np.inf])
    if rng.random() < 0.3:
        options["sinks"] = any_sinks(rng, *call.q.shape[:3])
        call = call._replace(options=options)

    def run(sources):
        (check_spoiled if spoiled else check)(call, rows=rows, sources=sources, **how)

    shown = {name: getattr(x, "shape", x) for name, x in {**given, **options}.items()}
    text = f"{shown}, {blocks} blocks, {together} at a time, truncating={how['truncating']}"
    return text + (f", {spoiled} is not finite" if spoiled else ""), run
