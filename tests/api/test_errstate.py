"""What the caller has NumPy do about floating-point errors is no matter of ours, on the CPU."""

import io
import warnings

import ml_dtypes
import numpy as np
import pytest

import fa_cupy
from fa_cupy import BitMask
from tests.support.strategies import DTYPES

KINDS = ("ordinary", "zeros", "subnormal", "large", "infinite", "nan", "empty", "no keys", "long")
SPECIAL = {"infinite": (np.inf, -np.inf), "nan": (np.nan,)}
LENGTHS = {"empty": (0, 0), "no keys": (3, 0), "long": (300, 700)}
MAPS = ("elu1", "relu", "exp", "identity")


def data(kind, dtype):
    """q, k, v and a gradient of the output."""
    rng = np.random.default_rng(0)
    q_len, k_len = LENGTHS.get(kind, (17, 17))
    limits = ml_dtypes.finfo(dtype)
    factor = {"zeros": 0.0, "subnormal": float(limits.tiny) / 64, "large": float(limits.max) / 8}
    for shape in ((2, q_len, 8), (2, k_len, 8), (2, k_len, 5), (2, q_len, 5)):
        x = (rng.standard_normal(shape) * factor.get(kind, 1.0)).astype(dtype)
        for value in SPECIAL.get(kind, ()):
            x[rng.random(shape) < 0.1] = value
        yield x


def attention_calls(kind, dtype):
    q, k, v, dout = data(kind, dtype)
    shape = q.shape[1], k.shape[1]
    dense = np.random.default_rng(1).random(shape) < 0.5
    dense[: len(dense) // 2] = False  # rows that see nothing
    hidden, low = np.zeros((2, *shape), np.float32)
    hidden[:, ::2], low[:, ::2] = -np.inf, -3e38
    choices = [
        {}, {"is_causal": True, "causal_align": "bottom_right"}, {"window": (0, 0)},
        {"softcap": 5e-324}, {"softcap": 30.0, "scale": 1e300}, {"scale": 5e-324},
        {"scale": 1e39}, {"bias": hidden}, {"bias": low}, {"mask": dense},
        {"mask": BitMask.from_dense(dense)}, {"mask": np.zeros(shape, bool)},
    ]  # fmt: skip
    for options in choices:
        options = {"causal_align": "top_left"} | options

        def attention(options=options):
            out, lse = fa_cupy.attention(q, k, v, return_lse=True, **options)
            return out, lse, *fa_cupy.attention_backward(dout, q, k, v, out, lse, **options)

        yield attention
    yield lambda: (fa_cupy.scaled_dot_product_attention(q, k, v),)
    wide = np.random.default_rng(2).choice([0.0, 1e-300, 1e300, -1e300, np.inf], (2, 1))
    parts = {"q_offsets": [0, shape[0]], "k_offsets": [0, shape[1]]}
    for keys in (parts, {"k_lengths": shape[1] // 2}):
        options = {name: np.array(x) for name, x in keys.items()}
        options |= {"bias": wide[..., None], "sinks": wide}

        def of_parts(options=options):
            out, lse = fa_cupy.attention(q, k, v, return_lse=True, **options)
            return out, lse, *fa_cupy.attention_backward(dout, q, k, v, out, lse, **options)

        yield of_parts


def product_calls(kind, dtype):
    q, k, v, dout = data(kind, dtype)
    k_len = k.shape[1]
    if q.shape[1] != k_len:
        q, dout = np.resize(q, (2, k_len, 8)), np.resize(dout, (2, k_len, 5))
    for algorithm in ("auto", "chunked"):
        yield lambda how=algorithm: fa_cupy.causal_product(
            q, k, v, return_state=True, algorithm=how
        )
    for reverse in (False, True):
        yield lambda back=reverse: fa_cupy.causal_product_backward(dout, q, k, v, reverse=back)
        yield lambda back=reverse: (fa_cupy.prefix_state(k, v, reverse=back),)
    for name in MAPS:
        for eps in (0.0, 5e-324, 1e-6):
            options = {"feature_map": name, "eps": eps}
            yield lambda o=options: (fa_cupy.linear_attention(q, k, v, **o),)
            yield lambda o=options: (fa_cupy.linear_attention(*(x[:, :1] for x in (q, k, v)), **o),)
        for is_causal in (False, True):
            options = {"feature_map": name, "eps": 0.0, "is_causal": is_causal}
            yield lambda o=options: fa_cupy.linear_attention(q, k, v, return_state=True, **o)
            yield lambda o=options: fa_cupy.linear_attention_backward(dout, q, k, v, **o)
    yield lambda: fa_cupy.causal_product(*(x[:, :1] for x in (q, k, v)), return_state=True)
    yield lambda: (fa_cupy.prefix_state(k, v, [0, k_len, k_len // 2]),)
    yield lambda: (fa_cupy.prefix_state(k, v, [k_len] * k_len, q=q),)


def merge_calls(kind, dtype):
    q, k, v, _ = data(kind, dtype)
    half = k.shape[1] // 2
    cuts = slice(None, half), slice(half, None), slice(0, 0)
    parts = [fa_cupy.attention(q, k[:, s], v[:, s], return_lse=True) for s in cuts]
    outs, lses = zip(*parts, strict=True)
    yield lambda: fa_cupy.merge_attention(outs, lses)
    for value in (-np.inf, np.inf, np.nan, 3e38, -3e38, 1e-40):
        other = np.full_like(lses[0], value)
        yield lambda other=other: fa_cupy.merge_attention(outs, [*lses[:2], other])
        yield lambda other=other: fa_cupy.merge_attention(outs, [other] * 3)
        yield lambda other=other: fa_cupy.merge_attention(outs, [other, -other, lses[1]])


FAMILIES = {"attention": attention_calls, "products": product_calls, "merge": merge_calls}


def bits(call):
    return [None if x is None else x.tobytes() for x in call()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_do_not_depend_on_it(family, kind, dtype):
    """And nothing is raised, warned of, handed to the caller's function, or left changed."""
    seen = []
    with np.errstate(all="ignore"):
        calls = list(FAMILIES[family](kind, dtype))
    for number, call in enumerate(calls):
        with np.errstate(all="ignore"):
            wanted = bits(call)
        for state in ("raise", "warn", "call"):
            with warnings.catch_warnings(), np.errstate(all=state, call=lambda *x: seen.append(x)):
                warnings.simplefilter("error")
                before = np.geterr()
                assert bits(call) == wanted, number
                assert np.geterr() == before
    assert not seen


def test_masks_do_not_depend_on_it():
    rng = np.random.default_rng(0)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for shape in ((0, 0), (3, 0), (0, 3), (2, 130, 300)):
            dense = rng.random(shape) < 0.5
            mask = BitMask.from_dense(dense)
            assert (mask.to_dense() == dense).all()
            assert ((~mask).T.to_dense() == (~dense).swapaxes(-1, -2)).all()
            assert (mask & ~mask).density == 0.0
            assert 0.0 <= (mask | ~mask).density <= 1.0
            assert 0.0 <= mask.block_density <= 1.0
            mask.save(file := io.BytesIO())
            file.seek(0)
            assert BitMask.load(file).equals(mask)
        best = rng.integers(0, 300, (130, 32))
        assert BitMask.from_indices(best, 300).to_dense().any(-1).all()
        assert BitMask.from_csr(BitMask.from_indices(best, 300).to_csr()).shape == (130, 300)
        assert BitMask.from_function(lambda q, k: q >= k, (130, 130)).density > 0.5


def test_functions_of_the_caller_keep_the_state_of_the_caller():
    def feature_map(x):
        assert np.geterr()["over"] == "raise"
        return np.exp(x)

    def visible(q, k):
        assert np.geterr()["over"] == "raise"
        return q >= k

    x = np.ones((3, 4), np.float32)
    with np.errstate(all="raise"):
        fa_cupy.linear_attention(x, x, x, feature_map=feature_map)
        BitMask.from_function(visible, (3, 3))
        with pytest.raises(FloatingPointError):
            fa_cupy.linear_attention(1e3 * x, x, x, feature_map=feature_map)
