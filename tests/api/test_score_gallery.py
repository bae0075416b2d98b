"""The gallery of scores in every dtype, with all else that calls have, forward and backward."""

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from fa_cupy import BitMask, attention, attention_backward, reference
from tests.support.every_run import by_dtype_examples, examples, some
from tests.support.score_gallery import GALLERY
from tests.support.strategies import DTYPES, UNIT, lay, normal, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
# One of a kind each: what a score is made from, and where its steps are.
FEW = ["alibi", "softcap", "gaussian", "general"]


def tensors(dtype, q_len=150, k_len=150, batch=(2, 4), kv_heads=None, dims=(64, 64), seed=0):
    few = batch if kv_heads is None else (*batch[:-1], kv_heads)
    rows = (*batch, q_len), (*few, k_len), (*few, k_len), (*batch, q_len)
    rng = np.random.default_rng(seed)
    pairs = zip(rows, (dims[0], *dims, dims[1]), strict=True)
    return [normal(rng, (*shape, dim), dtype) for shape, dim in pairs]


def near(got, want, dtype, factor, terms=0.0):
    """Whether two results agree: in norm, up to a factor of the round-off of `dtype`.

    Or of the result's own, where that has fewer digits. `terms` is a norm of what is summed.
    """
    assert got.shape == want.shape
    dtype = max(dtype, got.dtype, key=UNIT.__getitem__)
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    error = np.linalg.norm(got[finite] - want[finite])
    limit = factor * UNIT[dtype] + 1e3 * UNIT[DOUBLE if dtype == DOUBLE else SINGLE]
    size = max(np.linalg.norm(want[finite]), terms)
    # A device may flush to 0 what is below the smallest normal number.
    # Half a unit of what is subnormal may be lost in float16, too.
    lost = np.finfo(DOUBLE if dtype == DOUBLE else SINGLE).tiny
    lost += 2.0**-25 if dtype == HALF else 0
    flushed = lost * finite.sum() ** 0.5
    assert error <= limit * size + flushed, (error, size, limit)


def check(xp, arrays, example, *, order="C", layout="dense", sinks=None, bias=None, mask=None,
          **options):  # fmt: skip
    """Hold a call and its gradients against float64."""
    q, k, v, dout = (lay(xp, x, layout) for x in arrays)
    dtype = q.dtype
    score, plain = example.score(xp, order), example.score(np)
    there = [None if x is None else xp.asarray(x) for x in (sinks, bias)]
    seen = mask if mask is None or isinstance(mask, BitMask) else xp.asarray(mask)
    given = {"score": score, "sinks": there[0], "bias": there[1], "mask": seen, **options}
    out, lse = attention(q, k, v, return_lse=True, **given)
    assert isinstance(out, xp.ndarray)
    assert (out.dtype, lse.dtype) == (dtype, DOUBLE if dtype == DOUBLE else SINGLE)
    dense = mask.to_dense() if isinstance(mask, BitMask) else mask
    of = {"score": plain, "sinks": sinks, "bias": bias, "mask": dense, **options}
    want, want_lse = reference.attention(*arrays[:3], **of)
    near(to_numpy(out), want, dtype, 4)
    near(to_numpy(lse), want_lse, DOUBLE if dtype == DOUBLE else SINGLE, 64)

    need = ["q", "k", "v", *(["sinks"] if sinks is not None else [])]
    wanted = reference.attention_backward(arrays[3], *arrays[:3], **of)
    wanted = (*wanted[:3], *(wanted[3 + (bias is not None) :] if sinks is not None else ()))
    for x, y in zip(
        attention_backward(dout, q, k, v, out, lse, need=need, **given), wanted, strict=False
    ):
        # Where queries see one key, gradients of scores are 0 but for rounding.
        near(to_numpy(x), y, dtype, 8, np.linalg.norm(arrays[3].astype(float)) / 4)
    return out, lse


def by_case(dtypes=DTYPES, names=GALLERY, of_16_bits=None):
    """Parameters; kernels of 16 bits have a build for each score, mask and kind of bias."""
    few = names if of_16_bits is None else of_16_bits
    cases = [(dtype, name) for dtype in dtypes for name in (few if dtype.itemsize == 2 else names)]
    return pytest.mark.parametrize(
        ("dtype", "name"), cases, ids=[f"{dtype.name}-{name}" for dtype, name in cases]
    )


@by_case()
def test_the_gallery(xp, dtype, name):
    check(xp, tensors(dtype), GALLERY[name])


@by_case()
def test_with_grouped_heads_and_causality(xp, dtype, name):
    arrays = tensors(dtype, q_len=130, k_len=257, kv_heads=2)
    options = {"is_causal": True, "causal_align": "bottom_right"}
    check(xp, arrays, GALLERY[name], **options)


@by_case(names=FEW, of_16_bits=["alibi", "general"])
@pytest.mark.parametrize("sparse", [False, True])
def test_with_all_else(xp, dtype, name, sparse):
    """Mask, window, softcap, bias and sinks; rows that see no key."""
    arrays = tensors(dtype, q_len=200, k_len=260)
    rng = np.random.default_rng(1)
    mask = rng.random((200, 260)) < 0.5
    mask[:, 128:256] = True
    mask[7] = False
    check(
        xp, arrays, GALLERY[name], mask=BitMask.from_dense(mask) if sparse else mask,
        bias=normal(rng, (4, 1, 260), SINGLE), sinks=normal(rng, (4, 1), SINGLE),
        softcap=5.0, window=(150, 40), causal_align="top_left", scale=0.3,
    )  # fmt: skip


@by_case(names=[name for name in GALLERY if GALLERY[name].grads])
def test_gradients_of_arrays(xp, dtype, name):
    example = GALLERY[name]
    arrays = tensors(dtype, q_len=140, k_len=90, kv_heads=2)
    q, k, v, dout = map(xp.asarray, arrays)
    options = {"window": (100, 50), "causal_align": "top_left"}
    score = example.score(xp, "A")
    out, lse = attention(q, k, v, score=score, return_lse=True, **options)
    need = [*example.grads, "k"]
    found = attention_backward(dout, q, k, v, out, lse, score=score, need=need, **options)
    plain = example.score(np)
    wanted = reference.attention_backward(arrays[3], *arrays[:3], score=plain, **options)
    floats = [
        f"score.{arg}"
        for arg, x in example.arguments.items()
        if isinstance(x, np.ndarray) and x.dtype.kind not in "iu"
    ]
    of_score = dict(zip(floats, wanted[3:], strict=True))
    near(to_numpy(found[-1]), wanted[1], dtype, 8)
    for arg, got in zip(example.grads, found, strict=False):
        own = example.arguments[arg.removeprefix("score.")]
        assert (got.shape, got.dtype) == (own.shape, own.dtype)
        # Terms of a row sum to 0 but for the rounding of the output: that of a number is small.
        terms = np.linalg.norm(arrays[3].astype(float)) / 64
        near(to_numpy(got), of_score[arg], dtype, 64, terms)


@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize(
    ("q_len", "k_len", "dims"),
    some(
        [(1, 1, (8, 8)), (1, 300, (64, 64)), (65, 1, (64, 64)), (129, 127, (72, 40)),
         (64, 128, (128, 128)), (257, 300, (256, 256)), (33, 70, (3, 5)), (40, 40, (300, 20))],
        kind=lambda value: value[2][0] > 64, count=3,
    ),
)  # fmt: skip
def test_odd_shapes(xp, dtype, q_len, k_len, dims):
    arrays = tensors(dtype, q_len, k_len, batch=(3,), dims=dims)
    check(xp, arrays, GALLERY["alibi"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "q_len", "k_len"), [((2, 4), 0, 9), ((2, 4), 9, 0), ((0, 4), 9, 9)]
)
def test_nothing(xp, dtype, batch, q_len, k_len):
    arrays = [xp.asarray(x) for x in tensors(dtype, q_len, k_len, batch)]
    score = GALLERY["alibi"].score(xp)
    out, lse = attention(*arrays[:3], score=score, return_lse=True)
    assert out.shape == (*batch, q_len, 64)
    assert not to_numpy(out).astype(float).any()
    assert np.isneginf(to_numpy(lse)).all()
    need = ["q", "k", "v", "score.slopes"]
    found = attention_backward(arrays[3], *arrays[:3], out, lse, score=score, need=need)
    for x, of in zip(found, (*arrays[:3], score._arguments["slopes"]), strict=True):
        assert (x.shape, x.dtype) == (of.shape, of.dtype)
        assert not to_numpy(x).astype(float).any()


@by_case((HALF, SINGLE), names=["alibi", "t5", "general"])
@pytest.mark.parametrize("layout", ["blhd", "transposed", "steps", "reversed", "offset"])
def test_any_layout(xp, dtype, name, layout):
    """Of queries, keys and values, and of the arrays of a score."""
    check(xp, tensors(dtype, 70, 90), GALLERY[name], layout=layout, order="A")


@by_case(names=["t5", "general"])
def test_results_repeat_to_the_bit(xp, dtype, name):
    arrays = [xp.asarray(x) for x in tensors(dtype, 300, 300)]
    score, found = GALLERY[name].score(xp), []
    need = ["q", "k", "v", *GALLERY[name].grads]
    for _ in range(3):
        out, lse = attention(*arrays[:3], score=score, return_lse=True)
        grads = attention_backward(arrays[3], *arrays[:3], out, lse, score=score, need=need)
        found.append([to_numpy(x).tobytes() for x in (out, lse, *grads)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_score_is_told_from_others(xp, dtype):
    """Calls alike but for the score, its numbers or its arrays: none gets the answer of another."""
    q, k, v, _ = (xp.asarray(x) for x in tensors(dtype, 70, 70, dims=(64, 64)))
    texts = [
        GALLERY["softcap"], GALLERY["softcap"]._replace(arguments={"cap": 0.5}),
        GALLERY["soft window"], None, GALLERY["alibi"],
        GALLERY["alibi"]._replace(arguments={"slopes": np.ones(8, np.float32)}),
        GALLERY["alibi"]._replace(arguments={"slopes": np.ones(8)}),
    ]  # fmt: skip
    want = {}
    for _ in range(2):
        for i, example in enumerate(texts):
            score = None if example is None else example.score(xp)
            got = to_numpy(attention(q, k, v, score=score)).tobytes()
            assert want.setdefault(i, got) == got
    assert len(set(want.values())) == len(texts) - 1  # slopes of either dtype are 1
    near(np.frombuffer(want[5], dtype), np.frombuffer(want[6], dtype).astype(float), dtype, 4)


_MASKS = [None, "array", "blocks"]


@st.composite
def calls(draw, dtypes, names, masks=_MASKS):
    """Shapes, options and layouts of any call, for one head_dim: each other is a build more."""
    dtype, name = draw(st.sampled_from(dtypes)), draw(st.sampled_from(names))
    lengths = st.integers(1, 300) | st.sampled_from([1, 64, 127, 128, 129, 256])
    q_len, k_len = draw(lengths), draw(lengths)
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    batch = draw(st.sampled_from([(), (3,), (2, 1)]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, heads) if heads % n == 0]))
    if not batch:
        kv_heads = draw(st.sampled_from([1, heads]))  # which broadcasts
    seed = draw(st.integers(0, 2**32 - 1))
    arrays = tensors(dtype, q_len, k_len, (*batch, heads), kv_heads, (64, 64), seed)
    rng, options = np.random.default_rng(seed), {}
    if draw(st.booleans()):
        options["is_causal"] = True
        options["causal_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    if draw(st.booleans()):
        options["sinks"] = normal(rng, (heads, 1), SINGLE)
    if masked := draw(st.sampled_from(masks)):
        mask = rng.random((q_len, k_len)) < draw(st.sampled_from([0.1, 0.9]))
        options["mask"] = BitMask.from_dense(mask) if masked == "blocks" else mask
    layout = draw(st.sampled_from(["dense", "blhd", "rows", "upward"]))
    order = draw(st.sampled_from("CA"))
    return arrays, name, layout, order, options


@examples(40)
@given(call=calls((HALF, BFLOAT16), FEW))
def test_any_call_of_16_bits(xp, call):
    """Of few expressions: each is compiled."""
    arrays, name, layout, order, options = call
    note(f"{name} {[x.shape for x in arrays]} {layout} {order} {sorted(options)}")
    check(xp, arrays, GALLERY[name], order=order, layout=layout, **options)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("masked", _MASKS)
@by_dtype_examples()
@given(data=st.data())
def test_any_call(xp, dtype, masked, data):
    arrays, name, layout, order, options = data.draw(calls([dtype], sorted(GALLERY), [masked]))
    note(f"{name} {[x.shape for x in arrays]} {layout} {order} {sorted(options)}")
    check(xp, arrays, GALLERY[name], order=order, layout=layout, **options)
