"""Calls of attention for kernels in the emulator, and how these are held against the reference."""

import ml_dtypes
import numpy as np

from fa_cupy import BitMask, reference
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.attention.splitkv import fwd_splitkv
from fa_cupy.gpu.kernels.forward import VARIANTS
from validation import emulator
from validation.emulator import calls
from validation.keyed_calls import in_pages

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
#: Those of all rows of the forward.
FORWARD_DTYPES = DTYPES | {"float32": np.dtype(np.float32)}
# What an output may be off by, of the largest value.
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-15}
PLAIN = [(row,) for row in VARIANTS if not row.sparse]
SPARSE = [(row,) for row in VARIANTS if row.sparse]
SPLITKV = [(row,) for row in fwd_splitkv.VARIANTS]
BANDS = [
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"window": (50, 5), "causal_align": "top_left"},
    {"window": (300, None), "causal_align": "bottom_right"},
    {"window": (0, 0), "causal_align": "top_left"},
]


def unit_of(row):
    """What an output of a row may be off by, of the largest value: rows may round float32."""
    return UNITS["float16" if getattr(row, "parts", 2) == 1 else row.dtype]


def draw(*shape, dtype, seed=0, scale=1.0):
    """Random normal values."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return (scale * values).astype(np.float32).astype(dtype)


def blocks_of(rng, *shape, density=None):
    """A mask whose blocks are empty, full, or seen in part, all three as often."""
    *batch, q_len, k_len = shape
    states = rng.integers(0, 3, (*batch, -(-q_len // 128), -(-k_len // 128)))
    states = states.repeat(128, -2).repeat(128, -1)[..., :q_len, :k_len]
    density = rng.choice([0.02, 0.5, 0.95]) if density is None else density
    return (states == 2) | ((states == 1) & (rng.random(shape) < density))


def any_sinks(rng, batch, heads, q_len):
    """Sinks of any type that broadcast along any axes."""
    shape = tuple(n if rng.random() < 0.5 else 1 for n in (batch, heads, q_len))
    dtype = [*FORWARD_DTYPES.values(), np.float64][int(rng.integers(0, 4))]
    return rng.choice([-np.inf, -3.0, 0.5, 4.0, 300.0], shape).astype(np.float32).astype(dtype)


def shuffled(rng, batch, q_len):
    """Some order of all rows of blocks."""
    return rng.permutation(int(np.prod(batch)) * -(-q_len // 128)).astype(np.int32)


def check(row, q, k, v, mask=None, bias=None, bits=None, seed=0, order=None, by_tile=False,
          source=None, truncating=False, **options):  # fmt: skip
    """Hold a call against the reference; `bits` is the same mask for the kernel."""
    if bits is None and mask is not None:
        bits = BitMask.from_dense(mask)
    how = {"source": source, "truncating": truncating, "order": order, "by_tile": by_tile}
    out, lse = calls.attention(row, q, k, v, bias, bits, seed, **how, **options)
    if dropout := options.pop("dropout", None):
        options |= {"dropout": dropout.p, "seed": dropout.seed}
    want, want_lse = reference.attention(q, k, v, bias, mask, **options)
    largest = np.abs(np.nan_to_num(v.astype(np.float64), posinf=0, neginf=0)).max(initial=1)
    largest /= 1 - options.get("dropout", 0.0)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    unit = unit_of(row)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=unit * largest)
    off = 1e-4 if getattr(row, "parts", 2) == 2 else 1e-2
    np.testing.assert_allclose(lse, want_lse, rtol=off, atol=off)
    return out, lse


def random_call(rows, seed):
    """What a row can take: as text, and how it is checked with kernels in place of the rows'."""
    (row,), rng = rows, np.random.default_rng(seed)
    hopper, dtype = isinstance(row, FwdSm90), FORWARD_DTYPES[row.dtype]
    groups, heads = (int(rng.integers(1, 3)) for _ in range(2))
    q_len = int(rng.choice([1, 5, 64, 70, 130, 193]))
    k_len = int(rng.choice([1, 40, 64, 129, 200, 300]))
    step = 8 if hopper else 1
    dims = [row.dim - step * int(rng.integers(0, 3)) for _ in range(2)]
    scale = float(rng.choice([0.3, 1.0, 3.0]))
    shapes = ((groups * heads, q_len, dims[0]), (heads, k_len, dims[0]), (heads, k_len, dims[1]))
    arrays = [
        draw(1, *shape, dtype=dtype, seed=3 * seed + i, scale=scale)
        for i, shape in enumerate(shapes)
    ]
    options = {}
    kind = rng.integers(0, 3)
    if kind == 1:
        options["is_causal"] = True
    elif kind == 2:
        options["window"] = (int(rng.integers(0, 100)), int(rng.integers(0, 100)))
    if kind:
        options["causal_align"] = str(rng.choice(["top_left", "bottom_right"]))
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    if row.sparse:
        batch = (groups * heads,) if rng.random() < 0.5 else (1,)
        options["mask"] = blocks_of(rng, *batch, q_len, k_len)
        options["by_tile"] = bool(rng.random() < 0.5)
        if rng.random() < 0.5:
            options["order"] = shuffled(rng, (groups, heads), q_len)
    if rng.random() < 0.3:
        options["bias"] = draw(groups * heads, 1, k_len, dtype=dtype, seed=seed)
    if rng.random() < 0.3:
        options["sinks"] = any_sinks(rng, 1, groups * heads, q_len)
    shown = {name: getattr(x, "shape", x) for name, x in options.items()}
    text = f"{', '.join(str(x.shape) for x in arrays)}, {shown}"
    return text, lambda sources: check(
        row, *arrays, seed=seed, source=sources.get(row.entry), **options
    )


def keyed_call(rng, row, k_len, size=None, q_len=None, garbage=np.nan):
    """Arrays of a call by ``fwd_splitkv`` and its options: lengths, and pages of a `size`.

    Rows that no entry has are garbage: a kernel that reads NaN there may compute rows again.
    """
    dtype, batch, heads = DTYPES[row.dtype], 2, int(rng.integers(1, 3))
    groups = int(rng.choice([1, 3, 4, 7]))
    q_len = int(rng.choice([1, 2, 5, 20])) if q_len is None else q_len
    dims = [row.dim - int(rng.choice([0, 0, 8, 3])) for _ in range(2)]
    seed = int(rng.integers(2**31))
    shapes = (heads * groups, q_len, dims[0]), (heads, k_len, dims[0]), (heads, k_len, dims[1])
    q, k, v = (draw(batch, *x, dtype=dtype, seed=seed + i) for i, x in enumerate(shapes))
    lengths = rng.integers(0, k_len + 1, batch)
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = garbage
    options = {"k_lengths": lengths.astype(rng.choice([np.int32, np.int64]))}
    if size is not None:
        k, v, table = in_pages(rng, k, v, lengths, size, garbage)
        options["page_table"] = table.astype(rng.choice([np.int32, np.int64]))
    return (q, k, v), options


def finds_keyed(row, source, calls_made=12):
    """Whether some of a few calls by ``fwd_splitkv`` fails with this kernel in place of its own."""
    for seed in range(calls_made):
        rng = np.random.default_rng(seed)
        size, band = ((16, BANDS[1]), (48, {}), (None, BANDS[1]))[seed % 3]
        arrays, options = keyed_call(rng, row, 700, size, garbage=300.0)
        try:
            check(row, *arrays, seed=seed, source=source, **options, **band)
        except (AssertionError, emulator.EmulationError):
            return True
    return False


def random_keyed_call(rows, seed):
    """What a row of ``fwd_splitkv`` can take, as `random_call`."""
    (row,), rng = rows, np.random.default_rng(seed)
    size = [None, 16, 48, 64][int(rng.integers(0, 4))]
    k_len = int(rng.choice([16, 64, 144, 336, 576])) if size is None else size * 7
    arrays, options = keyed_call(rng, row, k_len, size, garbage=rng.choice([np.nan, 300.0]))
    if rng.random() < 0.2:
        del options["k_lengths"]
        arrays = [np.nan_to_num(x, nan=0.5) for x in arrays]
        if size is not None:
            options["page_table"] %= len(arrays[1])
    options |= BANDS[int(rng.integers(0, len(BANDS)))]
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    _, heads, q_len, _ = arrays[0].shape
    if rng.random() < 0.3:
        keys = k_len if size is None else options["page_table"].shape[-1] * size
        options["bias"] = draw(heads, 1, keys, dtype=DTYPES[row.dtype], seed=seed)
    if rng.random() < 0.3:
        options["sinks"] = any_sinks(rng, 1, heads, q_len)
    shown = {name: getattr(x, "shape", x) for name, x in options.items()}
    text = f"{', '.join(str(x.shape) for x in arrays)}, {shown}"
    return text, lambda sources: check(
        row, *arrays, seed=seed, source=next(iter(sources.values()), None), **options
    )
