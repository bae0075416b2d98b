"""Calls of a kind that was seen before: they are not checked again, and mean the same."""

import numpy as np
import pytest

from fa_cupy import attention
from fa_cupy.core import attention_problem, plan_cache
from tests.support.strategies import BFLOAT16, Case, by_dtype, check_against_reference, normal

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "causal_align": "bottom_right"},
    "window": {"window": (3, None), "causal_align": "top_left"},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 2.0},
}


def arrays(dtype=np.float32, seed=0, layout="dense"):
    """q, k, v, bias, mask and sinks."""
    rng = np.random.default_rng(seed)
    q, k, v = (normal(rng, (2, 3, n, 8), dtype) for n in (7, 9, 9))
    if layout == "blhd":
        q, k = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k))
    bias = normal(rng, (3, 1, 9), np.float32)
    return q, k, v, bias, rng.random((7, 9)) < 0.7, normal(rng, (3, 1), dtype)


@pytest.fixture
def checked(monkeypatch):
    """Counts the calls whose arguments are checked."""
    calls, check = [], attention_problem.attention_problem

    def counted(*given, **options):
        calls.append(options)
        return check(*given, **options)

    monkeypatch.setattr(attention_problem, "attention_problem", counted)
    attention(*arrays()[:3])  # from here on calls are looked up
    calls.clear()
    return calls


@pytest.mark.parametrize("layout", ["dense", "blhd"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("more", ["", "bias", "mask", "sinks", "bias mask sinks"])
@pytest.mark.parametrize(**by_dtype())
def test_repeated_calls_are_right_and_checked_once(checked, dtype, more, options, layout):
    for seed in range(3):
        q, k, v, *others = arrays(dtype, seed, layout)
        given = {
            name: x
            for name, x in zip(("bias", "mask", "sinks"), others, strict=True)
            if name in more.split()
        }
        out, lse = attention(q, k, v, **given, return_lse=True, **options)
        sinks = {name: given.pop(name) for name in ("sinks",) if name in given}
        case = Case(q, k, v, given.get("bias"), given.get("mask"), {**options, **sinks})
        check_against_reference(case, out, lse)
        assert out.strides == q.strides
        assert attention(q, k, v, **given, **sinks, **options).tobytes() == out.tobytes()
    assert len(checked) <= 1


def test_what_differs_has_a_plan_of_its_own(checked):
    q, k, v, bias, mask, sinks = arrays()
    calls = [
        ((q, k, v), {}),
        ((q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)), {}),
        ((q[:, :, :5], k, v), {}),
        ((q[:, ::2], k[:, ::2], v[:, ::2]), {}),
        ((np.asfortranarray(q), k, v), {}),
        ((q, np.asfortranarray(k), v), {}),
        ((q, k, np.asfortranarray(v)), {}),
        ((q, k, v, bias), {}),
        ((q, k, v, bias[0]), {}),
        ((q, k, v, bias.astype(np.float64)), {}),
        ((q, k, v, None, mask), {}),
        ((q, k, v), {"sinks": sinks}),
        ((q, k, v), {"scale": 0.5}),
        ((q, k, v), {"is_causal": True, "causal_align": "top_left"}),
        ((q, k, v), {"is_causal": True, "causal_align": "bottom_right"}),
        ((q, k, v), {"window": (2, 2), "causal_align": "top_left"}),
        ((q, k, v), {"softcap": 1.0}),
    ]
    for given, options in calls * 2:
        out, lse = attention(*given, return_lse=True, **options)
        given = [*given, None, None][:5]
        check_against_reference(Case(*given, options=options), out, lse)
    assert len(checked) == len(calls) - 1  # the plan of the first one is there


def test_windows_that_are_lists_mean_what_they_say():
    q, k, v, *_ = arrays()
    for window in ([2, 2], [0, 0], [2, None], [2, 2]):
        options = {"window": window, "causal_align": "top_left"}
        out, lse = attention(q, k, v, return_lse=True, **options)
        check_against_reference(Case(q, k, v, options=options), out, lse)


def test_dtypes_of_one_size_are_told_apart():
    q, k, v, bias, *_ = arrays(np.float16)
    for _ in range(2):
        attention(q, k, v)
        attention(q, k, v, bias)
    for given in (
        (q, k.view(BFLOAT16), v),
        (q, k, v.view(BFLOAT16)),
        (q, k, v, bias.view(np.int32)),
    ):
        for _ in range(2):
            with pytest.raises(TypeError):
                attention(*given)
    other = bias.astype(BFLOAT16)
    out, lse = attention(q, k, v, other, return_lse=True)
    check_against_reference(Case(q, k, v, other), out, lse)


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"scale": 1.0}, {"scale": True}, TypeError),
        ({"softcap": 1.0}, {"softcap": True}, TypeError),
        ({"softcap": 0.0}, {"softcap": -0.5}, ValueError),
        ({"is_causal": False}, {"is_causal": 0.0}, TypeError),
        ({"window": (1, 2), "causal_align": "top_left"},
         {"window": (1, True), "causal_align": "top_left"}, TypeError),
        ({"window": (1, 2), "causal_align": "top_left"},
         {"window": (1.0, 2), "causal_align": "top_left"}, TypeError),
        ({"return_lse": True}, {"return_lse": 1.0}, TypeError),
        ({"scale": 1.0}, {"scale": float("nan")}, ValueError),
        ({"precision": None}, {"precision": "tf33"}, ValueError),
        ({}, {"causal_align": "left"}, ValueError),
    ],
)  # fmt: skip
def test_a_bad_option_that_equals_a_good_one_is_an_error(good, bad, error):
    q, k, v, *_ = arrays()
    for _ in range(2):
        attention(q, k, v, **good)
    for _ in range(2):
        with pytest.raises(error, match=r"^attention: "):
            attention(q, k, v, **bad)


def test_bad_arrays_are_errors_after_good_ones():
    q, k, v, bias, mask, sinks = arrays()
    for _ in range(2):
        attention(q, k, v, bias, mask, sinks=sinks)
    for given, error in [
        ((q, k[..., :5], v), ValueError),
        ((q, k, v[:, :, :5]), ValueError),
        ((q, k.astype(np.float64), v), TypeError),
        ((q, k, v, bias[..., :5]), ValueError),
        ((q, k, v, None, mask.astype(np.int8)), TypeError),
        ((q, k, None), TypeError),
        ((q, k, v.tolist()), TypeError),
        ((q, k, np.ma.masked_array(v)), TypeError),
        ((q.byteswap().view(q.dtype.newbyteorder()), k, v), TypeError),
    ]:
        for _ in range(2):
            with pytest.raises(error, match=r"^attention: "):
                attention(*given)
    out = np.empty_like(q)
    for _ in range(2):
        assert attention(q, k, v, out=out) is out
        with pytest.raises(ValueError, match="out overlaps q"):
            attention(out, k, v, out=out)


def test_odd_arrays_of_a_known_kind():
    """Of no element, read-only, of a subclass, repeated, unaligned."""
    q, k, v, *_ = arrays()
    want = attention(q, k, v)

    class Named(np.ndarray):
        pass

    fixed, raw = q.copy(), np.zeros(q.nbytes + 1, np.uint8)
    fixed.flags.writeable = False
    unaligned = raw[1:].view(np.float32).reshape(q.shape)
    unaligned[...] = q
    for _ in range(2):
        for x in (fixed, q.view(Named), unaligned):
            np.testing.assert_array_equal(attention(x, k, v), want)
        repeated = np.broadcast_to(k[:1, :1], k.shape)
        again = attention(q, repeated, v)
        np.testing.assert_allclose(again, attention(q, repeated.copy(), v), rtol=0, atol=1e-6)
        assert attention(q[:, :, :0], k, v).shape == (2, 3, 0, 8)
        assert (attention(q, k[:, :, :0], v[:, :, :0]) == 0).all()
        assert attention(q[:0], k[:0], v[:0]).shape == (0, 3, 7, 8)


def test_the_table_of_plans_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(plan_cache, "_MOST", 20)
    q, k, v, *_ = arrays()
    for i in range(50):
        attention(q, k, v, scale=i / 7)
        assert len(plan_cache.plans) <= 20
