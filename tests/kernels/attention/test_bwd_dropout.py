"""Builds of the kernels of gradients that drop weights, in the emulator."""

import numpy as np
import pytest

from fa_cupy import reference
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu.kernels import backward
from fa_cupy.gpu.kernels.attention_backward import select
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.support.every_run import some
from tests.support.kernel_attention import BANDS, DTYPES, blocks_of, draw
from tests.support.planted import plant
from validation import emulator
from validation.emulator.calls import attention_backward

pytestmark = pytest.mark.emulator

DROPOUT = Dropout(0.3, 2**63 + 12345)
CALLS = [
    (dtype, dim, masked, target)
    for target, dims in (
        ("sm_80", (32, 64, 96, 128, 192, 256)),
        ("sm_90a", (64, 96, 128, 192, 256)),
    )
    for dtype in DTYPES
    for dim in dims
    for masked in (False, True)
]


def kernels(dtype, dim, masked=False, target="sm_80", **more):
    wanted = backward.Wanted(dtype, dim, masked, mapped=target == "sm_90a", dropout=True, **more)
    return select(wanted, target)


def check(rows, dtype, dim, mask=None, bad=False, sources=None, order=0, **options):
    """Hold gradients against those of the definition."""
    shapes = (4, 70), (2, 200), (2, 200), (4, 70)
    q, k, v, dout = (draw(2, *x, dim, dtype=DTYPES[dtype], seed=i) for i, x in enumerate(shapes))
    if bad:  # which reaches what keeps these pairs
        v[0, 0, 7], dout[1, 1, 9] = np.nan, np.inf
    of_call = {"dropout": DROPOUT.p, "seed": DROPOUT.seed, **options}
    out, lse = reference.attention(q, k, v, None, mask, **of_call)
    given = (dout, q, k, v, out.astype(DTYPES[dtype]), lse, None)
    found = attention_backward(
        rows, *given, mask=mask, dropout=DROPOUT, sources=sources or {}, seed=order, **options
    )
    want = reference.attention_backward(dout, q, k, v, None, mask, **of_call)
    for name, x, y in zip("qkv", found, want, strict=True):
        assert reference.relative_error(x.astype(np.float64), y) < {"float16": 1e-3}.get(
            dtype, 8e-3
        ), name


@pytest.mark.parametrize(
    ("dtype", "dim", "masked", "target"), some(CALLS, lambda call: (call[1] > 128, *call[2:]))
)
def test_every_call(dtype, dim, masked, target):
    rows = kernels(dtype, dim, masked, target)
    # One kernel rounds dQ on SM90, which is added up, and one multiplies it elsewhere.
    adds_up = target == "sm_90a" and dim <= 128
    assert [row.dropout for row in rows] == [False, True, not adds_up, True]
    main = [row.source for row in rows[1:-1] if not row.source.endswith("_convert_dq")]
    assert {source.rpartition("_")[2] for source in main} == {target[:5].replace("_", "")}
    mask = blocks_of(np.random.default_rng(0), 70, 200, density=0.5) if masked else None
    check(rows, dtype, dim, mask, **BANDS[1])
    check(rows, dtype, dim, mask, bad=True, softcap=0.0)


@pytest.mark.parametrize("dim", [64, 192])
def test_a_softcap_on_hopper(dim):
    """Weights times slopes go from warpgroup to warpgroup, and are dropped after that."""
    rows = kernels("float16", dim, target="sm_90a", score=ScoreMod(softcap=True))
    assert all("sm80" not in row.source for row in rows)
    check(rows, "float16", dim, softcap=2.0, **BANDS[1])


@pytest.mark.parametrize("axes", ["pair", "key"])
@pytest.mark.parametrize(("dim", "target"), [(64, "sm_80"), (192, "sm_90a")])
def test_gradient_of_a_bias(dim, target, axes):
    score = ScoreMod(bias_axes=axes, bias_dtype="float32")
    rows = kernels("float16", dim, target=target, dbias=True, score=score)
    shapes = zip((2, 1, 1, 2), (40, 150, 150, 40), strict=True)
    q, k, v, dout = (
        draw(1, *x, dim, dtype=DTYPES["float16"], seed=i) for i, x in enumerate(shapes)
    )
    bias = draw(2, 40 if axes == "pair" else 1, 150, dtype=np.dtype(np.float32))
    of_call = {"dropout": DROPOUT.p, "seed": DROPOUT.seed}
    out, lse = reference.attention(q, k, v, bias, **of_call)
    dlse = draw(1, 2, 40, dtype=np.dtype(np.float32))
    given = (dout, q, k, v, out.astype(np.float16), lse, dlse)
    found = attention_backward(rows, *given, bias=bias, dropout=DROPOUT)
    want = reference.attention_backward(dout, q, k, v, bias, dlse=dlse, **of_call)
    errors = [
        reference.relative_error(x.astype(float), y) for x, y in zip(found, want, strict=True)
    ]
    assert max(errors) < 1e-3, errors


def test_what_has_no_build_is_not_chosen():
    for more in ({"strided": False, "mapped": False}, {"dtype": "float32"}):
        wanted = {"dtype": "float16", "dim": 64, "dropout": True} | more
        assert select(backward.Wanted(**wanted), "sm_90a") == ()


#: Queries and keys at which sequences begin.
OFFSETS = np.array([0, 3, 3, 21, 66]), np.array([5, 40, 61, 130, 190])
PACKED = [call for call in CALLS if not call[2]]


@pytest.mark.parametrize(
    ("dtype", "dim", "masked", "target"), some(PACKED, lambda call: (call[1] > 128, *call[2:]))
)
def test_packed_sequences(dtype, dim, masked, target):
    rows = kernels(dtype, dim, target=target, packed=True)
    given = {"q_offsets": OFFSETS[0], "k_offsets": OFFSETS[1]}
    check(rows, dtype, dim, **given, **BANDS[1])
    check(rows, dtype, dim, bad=True, **given)


#: Dims at which the kernels of wide heads run.
DIM_OF = {"bwd_dkdv_sm90": 192, "bwd_dq_sm90": 192}
PLANTED_PACKED = {
    "a sequence": ("bwd_dkdv_sm80", ("entry.b += place.sequence;\n  return", "return")),
    "a query": ("bwd_dkdv_sm80", ("first_query + j / 2 * 8 + j % 2,", "first_query + j / 2 * 8,")),
    "another query": ("bwd_sm90", ("query + 2 * pair + i, key);", "query + 2 * pair, key);")),
    "keys of a wide head": ("bwd_dkdv_sm90", ("first_key + place / 32 * 2;", "first_key;")),
    "rows of a wide head": ("bwd_dq_sm90", ("first_row + 8 * row, first", "first_row, first")),
    "a pair again": ("bwd_nonfinite", ("is_visible = is_visible && kept;", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED_PACKED)
def test_a_planted_bug_of_packed_sequences_is_found(tmp_path, name):
    stem, change = PLANTED_PACKED[name]
    source = plant(tmp_path, f"attention/{stem}", change)
    dim, target = DIM_OF.get(stem, 64), "sm_90a" if stem.endswith("_sm90") else "sm_80"
    rows = kernels("float16", dim, target=target, packed=True)
    given = {"q_offsets": OFFSETS[0], "k_offsets": OFFSETS[1]}
    with pytest.raises(AssertionError):
        check(rows, "float16", dim, bad=stem == "bwd_nonfinite", **given,
              sources={f"attention_{stem}": source})  # fmt: skip


PLANTED = {
    "the other half": ("bwd_dkdv_sm80", ("own == 0 ? other : half", "own == 0 ? half : other")),
    "a weight": ("bwd_dkdv_sm80", ("if constexpr (kDropout) drop_by_bits(s, kept);", "")),
    "a factor of dV": ("bwd_dkdv_sm80", ("return p.dropout.factor;", "return 1.0f;")),
    "a head": ("bwd_dkdv_sm80", ("work.entry * params.group + step.head);\n  make_kept",
                                 "work.entry * params.group);\n  make_kept")),
    "dP of queries": ("bwd_dq_sm80", ("constexpr (kDropout) drop_gradients",
                                      "(false) drop_gradients")),
    "another pair of queries": ("bwd_sm90", ("query + 2 * pair,", "query + pair,")),
    "another key": ("bwd_sm90", ("warp_row / 4 + lane / 4 % 2;", "warp_row / 4;")),
    "another head": ("bwd_dkdv_sm90", ("work.entry + step.head);\n#endif", "work.entry);\n#endif")),
    "a scale of dK": ("bwd_sm90", ("scale * kept_factor(c.params.common);", "scale;")),
    "a weight of dV": ("bwd_sm90", ("p[j][e] = of_kept;", "p[j][e] = weight;")),
    "a weight of wide dV": ("bwd_dkdv_sm90",
                            ("& 1) == 0) s[j][e] = 0.0f;", "& 1) == 2) s[j][e] = 0;")),
    "dP of wide dK": ("bwd_dkdv_sm90",
                      ("!= 0 ? s[j][e] * factor : 0.0f;", "!= 2 ? s[j][e] * factor : 0;")),
    "words that are not there": ("bwd_dkdv_sm90", ("bar_sync(kKeptWritten, 128);", "")),
    "a factor of wide dV": ("bwd_dkdv_sm90",
                            ("kDv ? kept_factor(c.params.common) :", "kDv ? 1.0f :")),
    "dP of wide dQ": ("bwd_dq_sm90",
                      ("scale_kept(dp, kept, kept_factor(c.params.common));", "{}")),
    "another row of wide dQ": ("bwd_dq_sm90", ("16 * i + 8 * h,", "16 * i,")),
    "a pair again": ("bwd_nonfinite", ("is_visible = is_visible && kept;", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(tmp_path, name):
    stem, change = PLANTED[name]
    source = plant(tmp_path, f"attention/{stem}", change)
    dim = DIM_OF.get(stem, 64)
    rows = kernels("float16", dim, target="sm_90a" if stem.endswith("_sm90") else "sm_80")
    with pytest.raises((AssertionError, emulator.EmulationError)):
        check(rows, "float16", dim, bad=stem == "bwd_nonfinite",
              sources={f"attention_{stem}": source})  # fmt: skip
