"""Gradients over packed sequences: which kernels get the calls, and what is their own in them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import attention_backward
from tests.support import gradients_of_biases, packed_sequences
from tests.support.every_run import examples
from tests.support.kernel_attention import DTYPES
from tests.support.kernel_gradients import compare
from tests.support.packed_gradients import given as options_of
from tests.support.packed_gradients import packed, results

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target
from tests.support import plans
from tests.support.device_arrays import bits

DIMS = (32, 64, 96, 128, 192, 256)
TOP, BOTTOM = "top_left", "bottom_right"
BANDS = [
    {},
    {"is_causal": True, "causal_align": TOP},
    {"is_causal": True, "causal_align": BOTTOM},
    {"window": (40, 5), "causal_align": TOP},
    {"window": (0, 0), "causal_align": BOTTOM},
]
FIRST = ["row_intervals", "bwd_preprocess"]
SM90 = ["bwd_sm90", "bwd_convert_dq"]
WIDE = ["bwd_dkdv_sm90", "bwd_dq_sm90"]
SM80 = ["bwd_dkdv_sm80", "bwd_dq_sm80"]


@pytest.fixture(autouse=True)
def device(cupy):
    """Only where the kernels run; every test starts and ends without plans."""
    if current_target() is None:
        pytest.skip("the kernels do not run on this device")
    plans.forget()
    yield
    plans.forget()


@pytest.fixture(params=["sm_90a", "sm_80"])
def target(request, monkeypatch):
    """The kernels for SM90, and those that run anywhere in their place."""
    if request.param == "sm_80":
        plans.gradients_without_sm90(monkeypatch)
    elif current_target() != "sm_90a":
        pytest.skip("the kernels run on sm_90a")
    return request.param


def kernels():
    """The kernels of the plan of the only call."""
    (plan,) = plans.of("attention_backward")
    return [step.variant.source.rpartition("/")[2] for step in plan.steps]


def expected(target, dim, dbias=False):
    """Those that serve a call of these dims."""
    main = SM90 if dim <= 128 else WIDE
    if target == "sm_80":
        main = SM80
    return [*FIRST, *main, "bwd_nonfinite", *["bwd_dbias_sm80"] * dbias]


def on_device(x):
    """The arguments of a call, on the device: arrays, and options with offsets."""
    out, lse = results(x)
    q, k, v, dout, dlse, _ = x.call
    arrays = [cp.asarray(a) for a in (dout, q, k, v, out, lse)]
    q_offsets, k_offsets = x.offsets
    options = {"dlse": dlse, "q_offsets": q_offsets, "k_offsets": k_offsets, **options_of(x)}
    there = {name: cp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in options.items()}
    return arrays, there


def solve(x, **more):
    """Call for the gradients with offsets on the device, in memory that held NaN."""
    arrays, options = on_device(x)
    cp.cuda.Device().synchronize()
    memory = [cp.full(4 * arrays[1].nbytes + 2**20, 0xFF, np.uint8) for _ in range(3)]
    del memory
    return attention_backward(*arrays, **options, **more)


def check(x):
    """Hold gradients against float64."""
    found = [a.get() for a in solve(x)]
    compare(x.call, found[:3])
    if len(found) > 3:
        gradients_of_biases.compare(x.call, found[3])
    return found


def of_lengths(rng, count, most):
    """Offsets of so many sequences, some of them empty."""
    return np.concatenate([[0], rng.integers(0, most, count).cumsum()]).astype(np.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_every_row(target, dim, dtype):
    rng = np.random.default_rng(dim)
    for band in BANDS:
        offsets = of_lengths(rng, 9, 300)
        lengths = (int(offsets[-1]) + 7,) * 2
        x = packed(dtype, (4, 2), lengths, (dim, dim), (offsets, offsets), band, dlse=True)
        plans.forget()
        check(x)
        assert kernels() == expected(target, dim)
        offsets, of_keys = of_lengths(rng, 7, 200), of_lengths(rng, 7, 300)
        lengths = int(offsets[-1]) + 70, int(of_keys[-1]) + 300
        both = offsets + 61, of_keys + 150
        check(packed(dtype, (2, 2), lengths, (dim - 8, dim), both, band))


@pytest.mark.parametrize("dim", [64, 128])
def test_many_short_sequences(target, dim):
    for most, count in ((3, 1000), (70, 100)):
        offsets = of_lengths(np.random.default_rng(most), count, most)
        lengths = (int(offsets[-1]),) * 2
        check(packed("bfloat16", (2, 2), lengths, (dim, dim), (offsets, offsets), BANDS[1]))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_sequences(target, dim):
    offsets = np.array([0, 1500, 1501, 3600, 4100])
    x = packed("float16", (1, 1), (4100, 4100), (dim, dim), (offsets, offsets), BANDS[2])
    check(x)
    assert len({tuple(bits(solve(x))) for _ in range(3)}) == 1


@examples(40)
@given(
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(list(DTYPES)),
    lengths=packed_sequences.packed_lengths(1000),
    heads=st.sampled_from([(1, 1), (8, 8), (8, 2), (3, 1)]),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    layout=st.sampled_from([None, "blhd"]),
)
def test_any_sequences(dim, dtype, lengths, heads, band, softcap, layout):
    sizes, *both = lengths
    options = {"softcap": softcap} if softcap else {}
    check(packed(dtype, heads, sizes, (dim, dim - 8), both, band, layout=layout, **options))


@pytest.mark.parametrize("axes", [(2, 1, 1), (1, 1, 0), (2, 0, 1)], ids=str)
def test_a_bias_and_its_gradient(target, axes):
    offsets = of_lengths(np.random.default_rng(5), 8, 200)
    n = int(offsets[-1]) + 9
    shape = axes[0], n if axes[1] else 1, n if axes[2] else 1
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    x = packed("float16", (2, 1), (n, n), (64, 64), (offsets, offsets), BANDS[1], bias=bias)
    check(x)
    assert kernels() == expected(target, 64, dbias=True)


def test_a_bias_of_pairs_with_many_tiles(target):
    offsets = np.array([0, 700, 700, 1500, 1600])
    bias = np.random.default_rng(1).standard_normal((2, 1600, 1600)).astype(np.float32)
    x = packed("bfloat16", (2, 2), (1600, 1600), (128, 128), (offsets, offsets), bias=bias)
    check(x)
    assert kernels()[-1] == ("bwd_dbias_sm90" if target == "sm_90a" else "bwd_dbias_sm80")


@examples(40)
@given(dim=st.sampled_from([64, 128, 256]), band=st.sampled_from(BANDS), data=st.data())
def test_offsets_of_any_numbers(dim, band, data):
    """Sequences whose offsets are out of order have gradients of 0, and all others theirs."""
    sizes = data.draw(st.tuples(st.integers(1, 500), st.integers(1, 500)))
    both = data.draw(packed_sequences.disordered(sizes, sequences=5))
    x = packed("bfloat16", (2, 1), sizes, (dim, dim), both, band, dlse=True)
    dq, dk, dv = check(x)
    seen = x.call.options["mask"]
    assert not dq[..., ~seen.any(1), :].any()
    assert not dk[..., ~seen.any(0), :].any()
    assert not dv[..., ~seen.any(0), :].any()


def test_sinks_have_no_gradient_from_sequences_out_of_order(target):
    offsets = np.array([0, 100, 50, 200, 260]), np.array([0, 100, 150, 200, 260])
    sinks = np.array([[0.5], [-1.0]], np.float32)
    x = packed("float16", (2, 2), (260, 260), (64, 64), offsets, sinks=sinks, dlse=True)
    found = [a.get() for a in solve(x, need=("q", "k", "v", "sinks"))]
    compare(x.call, found[:3])
    want = gradient_of_sinks(x)
    np.testing.assert_allclose(found[3][:, 0], want, rtol=2e-3)


def gradient_of_sinks(x):
    """In float64, of rows of valid sequences."""
    out, lse = (a.astype(np.float64) for a in results(x))
    call = x.call
    delta = (call.dout.astype(np.float64) * out).sum(-1) - call.dlse
    terms = -np.exp(call.options["sinks"] - lse) * delta
    return np.where(np.isnan(lse), 0, terms).sum(axis=(0, 2))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_graph_reads_the_offsets_of_the_moment(target, dim):
    first, second = (
        packed("bfloat16", (4, 2), (700, 700), (dim, dim), (offsets, offsets), BANDS[1])
        for offsets in (np.array([0, 300, 310, 700]), np.array([20, 21, 500, 640]))
    )
    (arrays, options), (others, other_options) = on_device(first), on_device(second)
    want = bits(attention_backward(*others, **other_options))
    attention_backward(*arrays, **options)  # leaves a plan and memory to take
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        found = attention_backward(*arrays, **options)
        graph = stream.end_capture()
    pairs = [*zip(arrays[4:], others[4:], strict=True)]
    pairs += [(options[name], other_options[name]) for name in ("q_offsets", "k_offsets")]
    for x, y in pairs:
        x.view(np.int16)[...] = y.view(np.int16)
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert bits(found) == want
