"""Attention in float64 by mma.sync: the kernel's own source on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, reference
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp64 import VARIANTS
from tests.support import packed_sequences
from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import BANDS, any_sinks, blocks_of, shuffled
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

PLAIN = [row for row in VARIANTS if not row.sparse]
BY_DIM = {(row.dim, row.wide): row for row in PLAIN}
SPARSE = {(row.dim, row.wide): row for row in VARIANTS if row.sparse}
# A row of each kind of product and of each number of warps that share rows.
D64, D256, SMALL = BY_DIM[64, True], BY_DIM[256, True], BY_DIM[64, False]
SOME_ROWS = only([D64, D256, SMALL], SMALL)
NAMES = {"ids": lambda row: row.name}
NOT_AGAIN = "if (any_recompute == 0) return;", "return;"


def arrays_of(row, lengths, heads=(2, 1), less=(0, 0), seed=0, scale=1.0):
    """Random q, k and v for a row."""
    rng, (q_len, k_len) = np.random.default_rng(seed), lengths
    dims = [row.dim - n for n in less]
    shapes = (heads[0], q_len, dims[0]), (heads[1], k_len, dims[0]), (heads[1], k_len, dims[1])
    return [scale * rng.standard_normal((1, *shape)) for shape in shapes]


def check(row, arrays, seen=None, bias=None, invalid=(), seed=0, source=None, **options):
    """Hold a call against the definition, in float64 too."""
    how = {"seed": seed, "source": source}
    out, lse = calls.attention(row, *arrays, bias, **how, **options)
    plain = {name: x for name, x in options.items() if name not in ("mask", "order", "by_tile")}
    if "q_offsets" in options:  # `seen` says it all
        own = ("q_offsets", "k_offsets", "is_causal", "window", "causal_align")
        plain = {name: x for name, x in plain.items() if name not in own}
    with np.errstate(all="ignore"):
        want, want_lse = reference.attention(*arrays, bias, seen, **plain)
    want[..., list(invalid), :] = want_lse[..., list(invalid)] = np.nan
    q, k, v = (np.nan_to_num(x, posinf=0, neginf=0) for x in arrays[:3])
    largest = float(np.abs(v).max(initial=0))
    np.testing.assert_allclose(out, want, rtol=0, atol=4e-14 * largest)
    # Terms of a product may cancel: its error follows from how large they are.
    norms = [float(np.sqrt((x * x).sum(axis=-1)).max(initial=0)) for x in (q, k)]
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else abs(options["scale"])
    close = 1e-14 + 2.0**-52 * scale * norms[0] * norms[1]
    np.testing.assert_allclose(lse, want_lse, rtol=1e-14, atol=close)
    return out, lse


@pytest.mark.parametrize("row", some(PLAIN, lambda row: row.wide), **NAMES)
def test_every_row(row, tmp_path):
    """Of rows that look right because they were computed again nothing would be known."""
    source = plant(tmp_path, row.source, NOT_AGAIN)
    for seed, band in enumerate(BANDS[:3]):
        arrays = arrays_of(row, (130, 150), less=(seed, 2 * seed), seed=seed)
        check(row, arrays, seed=seed, source=source, **band)


@examples(30)
@given(
    row=drawn([D64, D256, SMALL], SMALL),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    less=st.tuples(st.integers(0, 20), st.integers(0, 63)),
    band=st.sampled_from(BANDS),
    scale=st.sampled_from([None, -0.3, 1e-40, 0.0, 5.0]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call(row, lengths, heads, less, band, scale, softcap, sinks, seed):
    options = {**band, "scale": scale, "softcap": softcap}
    if sinks:
        options["sinks"] = any_sinks(np.random.default_rng(seed), 1, heads[0], lengths[0])
    check(row, arrays_of(row, lengths, heads, less, seed), seed=seed, **options)


@examples(20)
@given(
    row=st.sampled_from([SMALL]),
    axes=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=drawn([np.float16, np.float32, np.float64], np.float32),
    lengths=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    band=st.sampled_from(BANDS),
    hides=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_bias(row, axes, dtype, lengths, band, hides, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(n if has else 1 for n, has in zip((2, *lengths), axes, strict=True))
    bias = rng.standard_normal(shape).astype(dtype)
    if hides:
        bias[rng.random(shape) < 0.3] = -np.inf
    check(row, arrays_of(row, lengths, seed=seed), bias=bias, seed=seed, **band)


@pytest.mark.parametrize("row", some(SPARSE.values(), lambda row: row.wide), **NAMES)
def test_every_row_for_masks(row, tmp_path):
    source = plant(tmp_path, row.source, NOT_AGAIN)
    mask = blocks_of(np.random.default_rng(0), 140, 400, density=0.5)
    mask[5], mask[20:30, :30] = False, True
    arrays = arrays_of(row, (140, 400), less=(row.dim - 32, 3))
    for band in (BANDS[0], BANDS[1]):
        bits = BitMask.from_dense(mask)
        check(row, arrays, mask, mask=bits, source=source, **band)


@examples(20)
@given(
    row=st.sampled_from([SPARSE[64, False]]),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    band=st.sampled_from(BANDS),
    by_tile=st.booleans(),
    in_order=st.booleans(),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_mask(row, lengths, band, by_tile, in_order, sinks, seed):
    rng = np.random.default_rng(seed)
    mask = blocks_of(rng, 2, *lengths)
    options = {**band, "mask": BitMask.from_dense(mask), "by_tile": by_tile}
    if not in_order:
        options["order"] = shuffled(rng, (1, 2), lengths[0])
    if sinks:
        options["sinks"] = any_sinks(rng, 1, 2, lengths[0])
    arrays = arrays_of(row, lengths, (2, 1), (40, 40), seed)
    check(row, arrays, mask, seed=seed, **options)


def test_a_score_expression():
    score = Score("3 * tanh(s) * x[h] + 0.01 * (i - j)", x=np.array([0.5, -1.0]))
    check(SMALL, arrays_of(SMALL, (70, 90)), score=score, **BANDS[1])


@examples(20)
@given(
    row=st.sampled_from([SMALL]),
    lengths=packed_sequences.packed_lengths(150),
    band=st.sampled_from(BANDS),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_packed_sequences(row, lengths, band, sinks, seed):
    sizes, q_offsets, k_offsets = lengths
    options = {"q_offsets": q_offsets}
    if k_offsets is not q_offsets:
        options["k_offsets"] = k_offsets
    if sinks:
        options["sinks"] = any_sinks(np.random.default_rng(seed), 1, 2, sizes[0])
    both = q_offsets, k_offsets
    seen = packed_sequences.visible(*both, sizes, **band)
    invalid = np.flatnonzero(packed_sequences.invalid_rows(*both, sizes))
    arrays = arrays_of(row, sizes, seed=seed)
    check(row, arrays, seen, invalid=invalid, seed=seed, **band, **options)


@pytest.mark.parametrize("row", SOME_ROWS, **NAMES)
def test_the_error_is_that_of_float64(row):
    """Held against longer numbers: at most twice what the definition in float64 loses."""
    arrays = arrays_of(row, (70, 300), seed=1)
    long = [x.astype(np.longdouble) for x in arrays]
    scores = long[0] @ long[1].swapaxes(-1, -2) / np.sqrt(np.longdouble(row.dim))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights @ long[2] / weights.sum(-1, keepdims=True)
    found = calls.attention(row, *arrays)[0], reference.attention(*arrays)[0]
    own, plain = (float(np.linalg.norm((x - want).ravel())) for x in found)
    assert own <= 2 * plain
    assert own <= 2e-15 * float(np.linalg.norm(want.ravel()))


@pytest.mark.parametrize("scale", [1e-150, 1e100, 1e150])
def test_numbers_of_any_size(scale):
    """Scores stay ordinary; values are as large or as small as inputs."""
    arrays = arrays_of(SMALL, (70, 90))
    arrays[0] *= scale
    arrays[1] /= scale
    arrays[2] *= scale
    check(SMALL, arrays)


EXP = """
#include "cuda_src/common/math_fp64.cuh"
struct Params {
  const double* x;
  double* out;
};
extern "C" __global__ void probe(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  p.out[i] = exp_fp64(p.x[i]);
}
"""


def test_exp_has_one_unit_of_error(tmp_path):
    """Held against longer numbers; what is too small is 0, and NaN stays."""
    (tmp_path / "probe.cu").write_text(EXP)
    path = emulator.build("probe-exp_fp64", tmp_path / "probe.cu", (), ("probe",))
    rng = np.random.default_rng(0)
    x = np.concatenate([
        rng.uniform(-707, 8, 4000), rng.uniform(-1, 1, 2000), -(10.0 ** rng.uniform(-300, 0, 2000)),
        np.log(2.0) * (np.arange(-96, 0) + 0.5), [0.0, -0.0, 700.0, -707.0],
        [-707.5, -1e308, -np.inf, np.nan],
    ])[:8064]  # fmt: skip
    x[-4:] = -707.5, -1e308, -np.inf, np.nan
    out = np.full_like(x, 7.0)
    fields = np.dtype([("x", np.uint64), ("out", np.uint64)])
    params = np.array([(x.ctypes.data, out.ctypes.data)], fields)
    emulator.launch(path, "probe", len(x) // 128, 128, 0, params, 0)
    with np.errstate(all="ignore"):
        want = np.exp(x.astype(np.longdouble))
    np.testing.assert_array_equal(out[-4:], [0.0, 0.0, 0.0, np.nan])
    assert (np.abs(out[:-4] - want[:-4]) <= np.spacing(want[:-4].astype(np.float64))).all()


@pytest.mark.long
def test_values_at_the_end_of_the_range():
    """A weighted mean of numbers is finite where they are, whatever the sum of weights."""
    arrays = arrays_of(SMALL, (70, 90))
    arrays[2][:] = np.sign(arrays[2]) * np.finfo(np.float64).max
    out, _ = calls.attention(SMALL, *arrays)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("row", SOME_ROWS, **NAMES)
def test_numbers_that_are_not_finite(row):
    """They show where they belong: not where a key is hidden, nor in other rows."""
    band = {"is_causal": True, "causal_align": "top_left"}
    arrays = arrays_of(row, (100, 100), less=(row.dim - 24, row.dim - 16))
    want, _ = check(row, arrays, **band)
    arrays[1][..., 60, 3] = np.nan
    arrays[2][..., 80, :] = np.inf
    arrays[0][0, 0, 5, 0] = np.nan
    out, lse = calls.attention(row, *arrays, **band)
    bad = np.zeros(lse.shape, bool)
    bad[..., 60:] = bad[0, 0, 5] = True
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(np.isnan(out).all(-1), bad)
    np.testing.assert_allclose(out[~bad], want[~bad], rtol=1e-12, atol=1e-14)
    arrays[1][..., 60, 3] = 0.5
    out, lse = calls.attention(row, *arrays, **band)
    assert np.isfinite(lse[..., 1, :]).all()
    assert np.isposinf(out[0, 1, 80:]).all()
    assert np.isfinite(out[0, 1, :80]).all()


@pytest.mark.parametrize("offset", [1, 3])
def test_arrays_that_are_not_aligned(offset):
    """Rows of an odd number of elements, and arrays that begin at any of them."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 90, 67))[..., offset : offset + 53] for _ in range(3)]
    check(SMALL, arrays, **BANDS[1])


def test_rows_of_no_key_are_zeros():
    arrays = arrays_of(SMALL, (150, 20))
    out, lse = check(SMALL, arrays, window=(3, 0), causal_align="top_left")
    assert not out[..., 100:, :].any()
    assert np.isneginf(lse[..., 100:]).all()


@pytest.mark.parametrize("row", SOME_ROWS, **NAMES)
def test_the_schedule_does_not_show(row):
    arrays = arrays_of(row, (100, 150))
    found = {
        tuple(x.tobytes() for x in calls.attention(row, *arrays, seed=seed, **BANDS[1]))
        for seed in range(3)
    }
    assert len(found) == 1


BUGS = {
    "V is overwritten while it is read": (
        "__syncthreads();  // K has landed for all, and all have read V", "",
    ),
    "K is overwritten while it is read": (
        "__syncthreads();  // V has landed for all, and all have read K", "",
    ),
    "the product is not scaled": ("p.softcap * tanh(p.factor * product) : p.scale * product",
                                  "0.0 : product"),
    "the output does not follow row_max": ("o[i][j][2 * h] *= factor;", ";"),
    "a lane is forgotten in the sum": (
        "row_sum[i][h] += shfl_xor_fp64(row_sum[i][h], 2);", "",
    ),
    "an exponent is one too large": ("exponent + 1023", "exponent + 1024"),
    "ln 2 has one part": ("fma(n, -kLn2Low, fma(n, -kLn2High, x))", "fma(n, -kLn2High, x)"),
    "the band is not looked at": (
        "if (key < band.full_begin || key >= band.full_end) {", "if (false) {",
    ),
    "columns of the output are exchanged": (
        "o[2 * pair + 1][2 * h] * inverse, o[2 * pair][2 * h + 1] * inverse",
        "o[2 * pair][2 * h + 1] * inverse, o[2 * pair + 1][2 * h] * inverse",
    ),
    "the words of a mask are not shifted": (">> at.in_block * (kTileN / 4)", ">> 0"),
    "a mask's words are those of other rows": ("warp_row % kMaskBlock / 16 * kSlabWords", "0"),
    "a tile is read at the wrong row": ("k / 2 * 8 + k % 2;", "k;"),
}  # fmt: skip


@pytest.mark.parametrize(
    "bug", only(BUGS, "ln 2 has one part", "K is overwritten while it is read")
)
def test_a_planted_bug_is_found(bug, tmp_path):
    arrays = arrays_of(SMALL, (100, 150), scale=2.0)
    source = plant(tmp_path, SMALL.source, NOT_AGAIN, BUGS[bug])
    row, seen, options = SMALL, None, dict(BANDS[1])
    if "mask" in bug:
        seen = np.random.default_rng(0).random((100, 150)) < 0.5
        row, options = SPARSE[64, False], {"mask": BitMask.from_dense(seen)}

    def all_seeds():
        for seed in range(8):
            check(row, arrays, seen, seed=seed, source=source, **options)

    with pytest.raises((AssertionError, emulator.EmulationError)):
        all_seeds()


def test_rows_and_their_choice():
    """Every dim has a row wherever shared memory is large enough; the smallest lack the widest."""
    for target in ("sm_80", "sm_90a", "sm_89", "sm_100"):
        for dim in (1, 33, 64, 100, 128, 129, 256):
            found = forward.select("float64", dim, dim, target)
            if target == "sm_89" and dim > 128:
                assert found is None
            else:
                assert found.dim >= dim
                assert found.wide == (target in ("sm_90a", "sm_100"))
    masked = forward.Call(masked=True)
    assert forward.select("float64", 64, 64, "sm_90a", masked).sparse
    assert forward.select("float64", 257, 64, "sm_90a") is None
