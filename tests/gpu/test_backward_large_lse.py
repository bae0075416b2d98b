"""Gradients of rows with a large log-sum-exp, by the kernels on a GPU and by what goes before."""

import numpy as np
import pytest

from fa_cupy import BitMask, attention, attention_backward, reference
from fa_cupy.gpu.kernels import attention_backward as kernels_of_gradients
from fa_cupy.gpu.kernels.attention.full_precision.gradients import selection
from tests.support import gradients_of_biases
from tests.support.kernel_attention import BANDS, DTYPES, blocks_of
from tests.support.kernel_gradients import compare
from tests.support.large_lse import far_case, padded_case

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target
from tests.support import plans
from tests.support.device_arrays import bits, check_replays

CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}


@pytest.fixture(autouse=True)
def device(cupy):
    """Only where the kernels run; every test starts and ends without plans."""
    if current_target() is None:
        pytest.skip("the kernels do not run on this device")
    plans.forget()
    yield
    plans.forget()


@pytest.fixture(params=["its own", "sm80"])
def kernels(request, monkeypatch):
    """The kernels of the device, and those by mma.sync in their place."""
    if request.param == "sm80":
        plans.gradients_without_sm90(monkeypatch)


def on_device(x):
    return cp.asarray(x) if isinstance(x, np.ndarray) else x


def maker(call):
    """What computes the gradients of a call, from the output and the LSE of `attention`."""
    q, k, v, dout, dlse = (on_device(x) for x in call[:5])
    options = {name: on_device(x) for name, x in call.options.items()}
    out, lse = attention(q, k, v, return_lse=True, **options)
    need = ("q", "k", "v")
    return lambda: attention_backward(dout, q, k, v, out, lse, dlse=dlse, need=need, **options)


def check(call, times=3):
    """Hold them against float64; the output that they start from has an error of its own."""
    found = maker(call)()
    assert plans.of("attention_backward")
    assert None not in plans.of("attention_backward")
    compare(call, [x.get() for x in found], times)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_large_scores_sum_to_one(dtype, dim, kernels):
    for band in BANDS[:3]:
        check(far_case(dtype, (4, 2), (300, 400), dim, **band))
        mask = blocks_of(np.random.default_rng(0), 4, 300, 400, density=0.5)
        check(far_case(dtype, (4, 2), (300, 400), dim, every=3, mask=mask, **band))


@pytest.mark.parametrize("score", [1e3, 5.6e3, 5.7e3, 1e5, 1e6, 1e7])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_two_equal_scores_have_half_the_weight_each(dim, score, kernels):
    q, k, v, dout = (np.zeros((n, dim), DTYPES["bfloat16"]) for n in (70, 2, 2, 70))
    q[:, 0], k[:, 0], v[0], v[1], dout[40] = score, 1, 1, 3, 1
    q, k, v, dout = map(cp.asarray, (q, k, v, dout))
    out, lse = attention(q, k, v, scale=1.0, return_lse=True)
    (dv,) = attention_backward(dout, q, k, v, out, lse, scale=1.0, need=["v"])
    np.testing.assert_allclose(dv.get().astype(np.float64), 0.5, rtol=2.0**-8)


@pytest.mark.parametrize("pad", [np.float16(-65504), np.float32(-1e9), np.float64(-1e30)])
@pytest.mark.parametrize("dim", [64, 192])
def test_a_bias_of_padding(dim, pad):
    for more in ({}, {"softcap": 3.0}, CAUSAL):
        check(padded_case("float16", (300, 400), dim, pad, heads=(4, 2), **more))


@pytest.mark.parametrize("length", [4, 64, 256, 1000])
def test_a_row_of_nothing_but_padding(length):
    q = cp.random.default_rng(0).standard_normal((length, 64), np.float32).astype(np.float16)
    bias = cp.zeros((length, length), np.float32)
    bias[0] = -1e9
    out, lse = attention(q, q, q, bias, return_lse=True)
    dout = cp.zeros_like(out)
    dout[0] = 1
    (dv,) = attention_backward(dout, q, q, q, out, lse, bias, need=["v"])
    np.testing.assert_allclose(dv.get().astype(np.float64), 1 / length, rtol=2.0**-9)


def test_packed_masks_give_the_same_bits(kernels):
    mask = blocks_of(np.random.default_rng(1), 2, 300, 500, density=0.5)
    call = far_case("bfloat16", (2, 2), (300, 500), 128, mask=mask)
    dense = maker(call)()
    packed = maker(call._replace(options={**call.options, "mask": BitMask.from_dense(mask)}))()
    assert bits(dense) == bits(packed)


def test_every_run_and_every_replay_gives_the_same_bits(kernels):
    call = far_case("bfloat16", (4, 2), (1000, 1200), 128, every=5, **CAUSAL)
    again = maker(call)
    want = bits(again())
    assert all(bits(again()) == want for _ in range(50))
    check_replays(again, want)


def test_several_streams_at_once(kernels):
    """Blocks that wait for the sums of rows wait only for blocks that run."""
    call = far_case("bfloat16", (8, 8), (700, 700), 128, every=2)
    again = maker(call)
    want = bits(again())
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(8)]
    cp.cuda.Device().synchronize()
    results = []
    for i in range(64):
        with streams[i % 8]:
            results.append(again())
    cp.cuda.Device().synchronize()
    assert all([x.get().tobytes() for x in result] == want for result in results)


def test_a_sequence_of_nothing_but_padding_takes_milliseconds():
    rng = cp.random.default_rng(0)
    q = rng.standard_normal((16, 512, 128), np.float32).astype(np.float16)
    bias = cp.full((512, 512), -1e9, np.float32)
    out, lse = attention(q, q, q, bias, return_lse=True)

    def run():
        return attention_backward(out, q, q, q, out, lse, bias, need=["q", "k", "v"])

    run()
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    assert cp.cuda.get_elapsed_time(begin, end) < 20


def weights_of_single_keys(n, dim, size, scale):
    """Weights of n rows of float32 that see one key each, with scores that are large."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((n, dim), np.float32) for _ in range(2))
    q *= np.float32(size)
    scores = scale * np.einsum("id,id->i", q, k, dtype=np.float64)
    far = np.abs(scores) >= 64  # others have the weights of their log-sum-exp
    assert far.mean() > 0.9
    ones, mask = cp.ones((n, 1), np.float32), cp.eye(n, dtype=bool)
    q, k = map(cp.asarray, (q, k))
    out, lse = attention(q, k, ones, mask=mask, scale=scale, return_lse=True)
    (dv,) = attention_backward(ones, q, k, ones, out, lse, mask=mask, scale=scale, need=["v"])
    return dv.get()[far, 0]


@pytest.mark.parametrize("by_wgmma", [True, False])
@pytest.mark.parametrize("size", [1, 1e3])
@pytest.mark.parametrize("n", [200, 1000])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_kernels_of_float32_find_the_same_scores(dim, n, size, by_wgmma, monkeypatch):
    """Scores that are the largest ones of their rows in one kernel are so in the other one.

    The scale is no power of two, and one that kernels still take. Of 200 rows the log-sum-exp comes
    from mma.sync, of 1,000 on Hopper from wgmma.
    """
    if not by_wgmma:
        select = kernels_of_gradients.select.__wrapped__
        monkeypatch.setattr(selection, "_is_for_wgmma", lambda wanted: False)
        monkeypatch.setattr(kernels_of_gradients, "select", select)
    weights = weights_of_single_keys(n, dim, size, 9e3)
    sm90 = by_wgmma and dim > selection.MMA_DIM and current_target() == "sm_90a"
    wanted = "attention/bwd_dkdv_fp32" + ("_sm90" if sm90 else "")
    assert wanted in plans.kernels("attention_backward")
    assert weights.tolist() == [1.0] * len(weights)


@pytest.mark.parametrize("scale", [1e4, 1e5, 1e7])
@pytest.mark.parametrize("n", [200, 1000])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_products_after_a_forward_kernel_have_weights_of_one(dim, n, scale):
    """From a scale of 1e4 on, cuBLAS computes gradients of float32, and a kernel the output."""
    weights = weights_of_single_keys(n, dim, 1, scale)
    assert plans.kernels("attention")
    assert plans.of("attention_backward") == [None]
    assert weights.tolist() == [1.0] * len(weights)


def test_the_gradient_of_a_bias_has_weights_of_exact_scores():
    call = gradients_of_biases.of_exact_scores()
    bias = call.options["bias"]
    out, lse = reference.attention(call.q, call.k, call.v, bias)
    given = call.dout, call.q, call.k, call.v, *(x.astype(np.float32) for x in (out, lse)), bias
    (dbias,) = attention_backward(*(on_device(x) for x in given), need=["bias"])
    assert "attention/bwd_dbias_fp32" in plans.kernels("attention_backward")
    gradients_of_biases.compare(call, dbias.get())
