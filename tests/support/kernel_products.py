"""Causal products for kernels in the emulator, and how these are held against the reference."""

import numpy as np

from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.gpu.kernels.linear.sm80.chunk_sm80 import ChunkSm80
from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.sm90_params import DIM_STEPS
from fa_cupy.gpu.kernels.linear.state_prefix_sum import state_prefix_sum
from fa_cupy.gpu.kernels.linear.table import PRODUCTS, serving
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from tests.support.products import Case, check_product, state_dtype
from tests.support.strategies import DTYPES, normal
from validation.emulator import calls

NAMES = {"float16": DTYPES[0], "bfloat16": DTYPES[1], "float32": DTYPES[2], "float64": DTYPES[3]}
ROUNDED = (ChunkSm80, ChunkSm90)  # scores and states, to the dtype


def split(row, length, segment_chunks, own_prefix=False):
    """The choice of a row with segments of so many chunks; None: one segment.

    With `own_prefix` blocks sum what lies before their segments, and no other row does.
    """
    if segment_chunks is None:
        return Choice(row, None, 1, max(1, length), 0.0)
    rows = segment_chunks * row.tile_m
    segments = max(1, -(-length // rows))
    states = None if own_prefix or segments == 1 else states_of(row)
    return Choice(row, states, segments, rows, 0.0)


def states_of(row):
    """What sums the states of a row's segments; None for rows that take whole sequences."""
    target = "sm_90a" if "sm_90a" in row.targets else row.targets[0]
    return dict(serving(row.dtype, target, row.packed))[row]


def solve(row, case, segment_chunks=None, own_prefix=False, **how):
    choice = split(row, case.q.shape[-2], segment_chunks, own_prefix)
    return calls.causal_product(choice, *case.native(np), case.reverse, **how)


def check(row, case, segment_chunks=None, **how):
    out, state = solve(row, case, segment_chunks, **how)
    check_product(case, out, state, rounded=isinstance(row, ROUNDED))
    return out, state


def gradients(row, case, dout, dstate=None, segment_chunks=None, own_prefix=False, **how):
    """Check the products that gradients are made of, the jobs of one launch where a row has such.

    Returns the cases, and output and state of each.
    """
    q, k, v, initial = case.native(np)
    first = None if initial is None else initial.swapaxes(-2, -1)
    last = None if dstate is None else dstate.swapaxes(-2, -1)
    back = not case.reverse
    cases = [
        Case(dout, v, k, first, case.reverse),
        Case(v, dout, q, last, back),
        Case(k, q, dout, dstate, back),
    ]
    choice = split(row, q.shape[-2], segment_chunks, own_prefix)
    found = calls.causal_products(choice, [(*x.arrays, x.reverse) for x in cases], **how)
    for one, results in zip(cases, found, strict=True):
        check_product(one, *results, rounded=isinstance(row, ROUNDED))
    return cases, found


def readings(case, asks):
    """The same sequence with queries and keys in turns: `asks` are rows that only read.

    As `fa_cupy.gpu.linear_attention` lays them for queries of states at positions.
    """
    q, k, v = (x.copy() for x in case.arrays[:3])
    q[..., ~asks, :] = 0
    k[..., asks, :] = v[..., asks, :] = 0
    return Case(q, k, v, *case.arrays[3:], case.reverse, case.layouts)


# Of each row that makes outputs, with those that help it.
ROWS = [
    (row,) if states_of(row) is None else (row, states_of(row), state_prefix_sum(row))
    for row in PRODUCTS
    if row.algorithm
]
# And alone, where its blocks sum what lies before their segments.
ROWS += [(row,) for row in PRODUCTS if isinstance(row, ChunkSm90)]
_BATCHES = [
    ((), (), ()),
    ((2,), (2,), (2,)),
    ((1, 2), (1, 1), (1, 2)),
    ((2, 1), (1, 2), (1,)),
]


def random_call(rows, seed):
    """As that of `kernel_attention`: a product, those of its gradients, or readings."""
    row, rng = rows[0], np.random.default_rng(seed)
    mapped, single = isinstance(row, ProductSm90Variant), row.dtype == "float32"
    kind = str(rng.choice(["product", "gradients", "readings"], p=[0.6, 0.3, 0.1]))
    step = DIM_STEPS[row.dtype] if mapped else 1
    most = [row.dim, min(row.dim, 4 * row.tile_n)]  # few value columns: few blocks
    if kind == "gradients":  # where keys are values, too
        most[0] = most[1]
    dims = [step * int(rng.integers(1, n // step + 1)) for n in most]
    if rng.random() < 0.4:
        dims[0] = most[0]
    if kind != "gradients" and rng.random() < 0.2:  # more than a block has
        dims[1] = row.tile_n + step * int(rng.integers(1, 3))
    batches = _BATCHES[int(rng.integers(0, 2 if kind == "gradients" else len(_BATCHES)))]
    length = int(rng.choice([1, 5, 33, 63, 64, 65, 70, 100] + [0] * (not mapped)))
    if kind == "product" and rng.random() < 0.3:  # once around all buffers
        batches = _BATCHES[0]
        length = (row.stages + 2) * row.tile_m - int(rng.integers(0, row.tile_m))
    shapes = [(*b, length, d) for b, d in zip(batches, (dims[0], *dims), strict=True)]
    arrays = [normal(rng, shape, NAMES[row.dtype]) for shape in shapes]
    if rng.random() < 0.25:
        for x in arrays:
            x[rng.random(x.shape) < rng.choice([0.0, 0.002])] = rng.choice(
                [np.nan, np.inf, -np.inf]
            )
    batch = np.broadcast_shapes(*batches) if batches[0][:1] != (1,) else batches[0]
    held = [None, tuple(dims), (*batch, *dims)]
    initial, dstate = (
        None if shape is None else normal(rng, shape, state_dtype(NAMES[row.dtype]))
        for shape in (held[int(i)] for i in rng.integers(0, 3, 2))
    )
    kinds = ["dense", "blhd", "rows"] + ["upward", "offset"] * (not mapped)
    layouts = (*(str(x) for x in rng.choice(kinds, 3)), "transposed")
    case = Case(*arrays, initial, bool(rng.random() < 0.5), layouts)
    own_prefix = mapped and len(rows) == 1
    splits = [1, 2, 3] if own_prefix else [None, 1, 2] if len(rows) > 1 else [None] * 3
    segment_chunks = splits[int(rng.integers(0, 3))]
    how = {"seed": seed, "truncating": bool(single and rng.random() < 0.5)}
    how["own_prefix"] = own_prefix
    if kind == "readings":
        case = readings(case, rng.random(length) < 0.4)
    dout = normal(rng, (*batch, length, dims[1]), NAMES[row.dtype])
    held = "".join(
        f", {name} {x.shape}" for name, x in (("initial", initial), ("dstate", dstate))
        if x is not None and (kind == "gradients" or name == "initial")
    )  # fmt: skip
    text = f"{', '.join(map(str, shapes))}{held}, {kind}, reverse={case.reverse}, {layouts}, "
    text += f"segment_chunks={segment_chunks}, own_prefix={own_prefix}, "
    text += f"truncating={how['truncating']}"

    def run(sources):
        if kind == "gradients":
            gradients(row, case, dout, dstate, segment_chunks, sources=sources, **how)
        else:
            check(row, case, segment_chunks, sources=sources, **how)

    return text, run
