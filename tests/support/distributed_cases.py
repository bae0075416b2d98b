"""Random problems of `fa_cupy.distributed`, each checked on all ranks against one call."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import fa_cupy
from fa_cupy import BitMask, distributed

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
#: Of the largest value, or of 1 if that is smaller.
LIMITS = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 2e-5, "float64": 1e-12}


class Case(NamedTuple):
    """A whole problem of attention.

    Attributes
    ----------
    cuts : tuple of float
        Where parts end in contiguous order, as shares of the length; empty for even parts.
    """

    dtype: str
    batch: tuple[int, ...]
    heads: tuple[int, int]
    q_len: int
    k_len: int
    order: str
    plan: str | None
    cuts: tuple[float, ...]
    is_causal: bool
    window: tuple[int | None, int | None] | None
    bias: str
    mask: str
    sinks: str
    softcap: float
    seed: int


@st.composite
def cases(draw: Any, size: int) -> Case:
    """Problems for some ranks."""
    order = draw(st.sampled_from(["contiguous", "zigzag"]))
    side = st.none() | st.integers(0, 30)
    window = draw(st.none() | st.tuples(side, side))
    is_causal = draw(st.booleans())
    q_len = draw(st.integers(0, 60))
    banded = is_causal or window not in (None, (None, None))
    # Where no rank has more than one query, a row is that of a rank.
    of_ranks = 0 < q_len <= size
    bias, mask, sinks = (
        draw(st.sampled_from([*always, *([] if of_ranks else for_all)]))
        for always, for_all in (
            (["", "rows"], ["", "keys", "heads"]),
            (["", "rows", "bits"], ["", "keys"]),
            (["", "rows"], ["heads"]),
        )
    )
    heads = draw(st.sampled_from([(1, 1), (4, 2), (size, size), (2 * size, size)]))
    rows = bias == "rows" or mask in ("rows", "bits") or sinks == "rows" or q_len <= size
    ways = [None, "ring", "heads"] if heads[1] % size == 0 and not rows else [None, "ring"]
    return Case(
        dtype=draw(st.sampled_from([*DTYPES, "float64", "float64"])),
        batch=draw(st.sampled_from([(), (2,)])),
        heads=heads,
        q_len=q_len,
        k_len=q_len if banded else draw(st.integers(0, 60)),
        order=order,
        plan=draw(st.sampled_from(ways)),
        cuts=draw(st.tuples(*[st.floats(0, 1)] * (size - 1))) if order == "contiguous" else (),
        is_causal=is_causal,
        window=window,
        bias=bias,
        mask=mask,
        sinks=sinks,
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        seed=draw(st.integers(0, 1000)),
    )


class Parts(NamedTuple):
    """How a sequence is cut for a rank of a case."""

    comm: Any
    order: str
    cuts: tuple[float, ...]

    def of(self, x: Any, axis: int) -> Any:
        """The part of this rank along an axis."""
        if not self.cuts:
            return distributed.split(x, self.comm, order=self.order, axis=axis)
        length = x.shape[axis]
        ends = [0, *sorted(round(cut * length) for cut in self.cuts), length]
        index = [slice(None)] * x.ndim
        index[axis] = slice(ends[self.comm.rank], ends[self.comm.rank + 1])
        return x[tuple(index)]


def whole_of(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Arrays dout, q, k and v of a case, and its bias, mask, sinks and gradient of the LSE."""
    rng = np.random.default_rng(case.seed)
    dtype = DTYPES[case.dtype]
    q_heads, k_heads = case.heads

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    q_rows, k_rows = (*case.batch, q_heads, case.q_len), (*case.batch, k_heads, case.k_len)
    if not case.batch:  # three axes are never grouped
        k_rows = (q_heads, case.k_len)
    arrays = [normal(*q_rows, 5), normal(*q_rows, 6), normal(*k_rows, 6), normal(*k_rows, 5)]
    pairs = case.q_len, case.k_len
    more: dict[str, Any] = {
        "dlse": rng.standard_normal(q_rows).astype(
            np.float64 if case.dtype == "float64" else np.float32
        )
    }
    if case.bias:
        shapes = {"rows": pairs, "keys": (1, case.k_len), "heads": (q_heads, 1, case.k_len)}
        more["bias"] = rng.standard_normal(shapes[case.bias])
    if case.mask:
        shape = (1, case.k_len) if case.mask == "keys" else pairs
        more["mask"] = rng.random(shape) < 0.7
    if case.sinks:
        more["sinks"] = rng.standard_normal((q_heads, case.q_len if case.sinks == "rows" else 1))
    return arrays, more


def own(case: Case, comm: Any) -> tuple[list[Any], dict[str, Any], Parts]:
    """The part of a rank of all arrays."""
    arrays, more = whole_of(case)
    parts = Parts(comm, case.order, case.cuts)
    arrays = [parts.of(x, -2) for x in arrays]
    found = {}
    for arg, x in more.items():
        kind = {"bias": case.bias, "mask": case.mask, "sinks": case.sinks}.get(arg, "rows")
        rows = kind in ("rows", "bits")
        found[arg] = parts.of(x, -1 if arg in ("sinks", "dlse") else -2) if rows else x
    if case.mask == "bits":
        found["mask"] = BitMask.from_dense(found["mask"])
    return arrays, found, parts


def check_attention(case: Case, comm: Any) -> None:
    """Compare output, log-sum-exp and gradients of a rank with those of one call; run twice."""
    options = {"is_causal": case.is_causal, "window": case.window, "softcap": case.softcap}
    (dout, q, k, v), more = whole_of(case)
    dlse = more.pop("dlse")
    out, lse = fa_cupy.attention(q, k, v, return_lse=True, **options, **more)
    given = options | more | {"dlse": dlse}
    grads = fa_cupy.attention_backward(dout, q, k, v, out, lse, **given)
    arrays, of_rank, parts = own(case, comm)
    spread = {"comm": comm, "order": case.order, "plan": case.plan}

    def results() -> list[Any]:
        some = {arg: x for arg, x in of_rank.items() if arg != "dlse"}
        dout, *inputs = arrays
        found = distributed.attention(*inputs, return_lse=True, **options, **some, **spread)
        return [
            *found,
            *distributed.attention_backward(dout, *inputs, *found, **options, **of_rank, **spread),
        ]

    found = results()
    for x, y in zip(found, results(), strict=True):
        np.testing.assert_array_equal(x, y)
    wanted = [out, lse, *grads]
    axes = [-2, -1, -2, -2, -2, *([-2] if case.bias else []), *([-1] if case.sinks else [])]
    kinds = ["rows"] * 5 + [x for x in (case.bias, case.sinks) if x]
    for x, y, axis, kind in zip(found, wanted, axes, kinds, strict=True):
        compare(x, parts.of(y, axis) if kind == "rows" else y, case.dtype)
        assert x.dtype == y.dtype


def compare(found: Any, wanted: Any, dtype: str) -> None:
    """Raise unless two arrays are equal but for rounding."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    finite = np.where(np.isfinite(wanted), np.abs(wanted), 0)
    scale = max(1.0, finite.max(initial=0.0))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=LIMITS[dtype] * scale)


class ProductCase(NamedTuple):
    """A whole problem of causal products."""

    dtype: str
    heads: tuple[int, int, int]  # of queries, keys and values
    length: int
    cuts: tuple[float, ...]
    reverse: bool
    is_causal: bool
    feature_map: str
    seed: int


@st.composite
def product_cases(draw: Any, size: int) -> ProductCase:
    """Problems for some ranks."""
    return ProductCase(
        dtype=draw(st.sampled_from([*DTYPES])),
        heads=draw(st.sampled_from([(1, 1, 1), (4, 2, 2), (3, 3, 3), (4, 4, 2), (8, 2, 4)])),
        length=draw(st.integers(0, 60)),
        cuts=draw(st.just(()) | st.tuples(*[st.floats(0, 1)] * (size - 1))),
        reverse=draw(st.booleans()),
        is_causal=draw(st.booleans()),
        feature_map=draw(st.sampled_from(["elu1", "relu", "exp"])),
        seed=draw(st.integers(0, 1000)),
    )


def check_products(case: ProductCase, comm: Any) -> None:
    """Compare products, their gradients, states and linear attention of a rank with one call."""
    rng = np.random.default_rng(case.seed)
    q_heads, k_heads, v_heads = case.heads
    rows = [
        (2, heads, case.length, dim)
        for heads, dim in ((q_heads, 5), (q_heads, 6), (k_heads, 6), (v_heads, 5))
    ]
    whole = [(0.3 * rng.standard_normal(x)).astype(DTYPES[case.dtype]) for x in rows]
    parts = Parts(comm, "contiguous", case.cuts)
    dout, *inputs = (parts.of(x, -2) for x in whole)
    reverse = {"reverse": case.reverse}
    linear = {"is_causal": case.is_causal, "feature_map": case.feature_map, "eps": 1.0}

    def results() -> list[Any]:
        out, state = distributed.causal_product(*inputs, comm=comm, return_state=True, **reverse)
        return [
            out, distributed.causal_product(*inputs, comm=comm, **reverse),
            *distributed.causal_product_backward(dout, *inputs, comm=comm, **reverse),
            distributed.linear_attention(*inputs, comm=comm, **linear), state,
        ]  # fmt: skip

    found = results()
    for x, y in zip(found, results(), strict=True):
        np.testing.assert_array_equal(x, y)
    out, state = fa_cupy.causal_product(*whole[1:], return_state=True, **reverse)
    grads = fa_cupy.causal_product_backward(*whole, **reverse)
    wanted = [out, out, *grads, fa_cupy.linear_attention(*whole[1:], **linear)]
    for x, y in zip(found, wanted, strict=False):
        compare(x, parts.of(y, -2), case.dtype)
    if comm.rank == (0 if case.reverse else comm.size - 1):
        compare(found[-1], state, case.dtype)
