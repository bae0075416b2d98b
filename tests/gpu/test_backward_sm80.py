"""Gradients by the kernels of mma.sync: what those for SM90 leave them, and all if forced."""

import numpy as np
import pytest

from fa_cupy import BitMask, attention, attention_backward, reference
from tests.support.gradients import check, hold
from tests.support.kernel_attention import blocks_of
from tests.support.strategies import BFLOAT16, UNIT, Case, by_dtype, normal

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target
from tests.support import plans
from tests.support.device_arrays import Differing, bits, check_replays

HALF = np.dtype(np.float16)
DIMS = (32, 64, 96, 128, 192, 256)  # of the rows of the table
LENGTHS = (1, 63, 64, 65, 128, 129, 193, 300)
TOP, BOTTOM = "top_left", "bottom_right"
CAUSAL = {"is_causal": True, "causal_align": BOTTOM}
KERNELS = ["bwd_preprocess", "bwd_dkdv_sm80", "bwd_dq_sm80", "bwd_nonfinite"]


@pytest.fixture(autouse=True)
def device(cupy):
    """Only where the kernels run; every test starts and ends without plans."""
    if current_target() is None:
        pytest.skip("the kernels do not run on this device")
    plans.forget()
    yield
    plans.forget()


@pytest.fixture
def forced(monkeypatch):
    """Takes the kernels for SM90 away."""
    plans.gradients_without_sm90(monkeypatch)


def draw(*shape, dtype=HALF, seed=0):
    return normal(np.random.default_rng(seed + sum(shape)), shape, dtype)


def poison(nbytes):
    """Fill the memory that the next allocations get with NaN."""
    cp.cuda.Device().synchronize()
    blocks = [cp.full(nbytes, 0xFF, np.uint8) for _ in range(3)]
    cp.cuda.Device().synchronize()
    del blocks


class Call:
    """Arrays on the device and the gradients of them, made as often as one likes."""

    def __init__(self, q, k, v, dlse=False, **options):
        self.q, self.k, self.v = (cp.asarray(x) for x in (q, k, v))
        self.host = q, k, v
        self.options = {
            name: cp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
        }
        self.given = options
        self.out, self.lse = attention(self.q, self.k, self.v, return_lse=True, **self.options)
        self.dout = cp.asarray(draw(*self.out.shape, dtype=q.dtype, seed=5))
        rows = draw(*self.lse.shape, dtype=np.dtype(np.float32), seed=6)
        self.dlse = cp.asarray(rows) if dlse else None

    def __call__(self, need=("q", "k", "v")):
        return attention_backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, dlse=self.dlse, need=need,
            **self.options,
        )  # fmt: skip

    def check(self):
        """Hold the gradients against float64, and see that these kernels made them."""
        plans.forget()
        poison(4 * (self.q.nbytes + self.k.nbytes) + 2**20)
        found = self()
        (plan,) = plans.of("attention_backward")
        assert [step.variant.kernel for step in plan.steps] == KERNELS
        arrays = {name: self.given.get(name) for name in ("bias", "mask")}
        options = {name: x for name, x in self.given.items() if name not in arrays}
        case = Case(*self.host, **arrays, options=options)
        dlse = None if self.dlse is None else self.dlse.get()
        named = {name: x.get() for name, x in zip("qkv", found, strict=True)}
        hold(case, named, self.dout.get(), dlse, UNIT[case.q.dtype])
        return found


def random_call(*shape, heads=None, k_len=None, v_dim=None, dtype=BFLOAT16, seed=0, **how):
    *batch, q_len, dim = shape
    kv = (*batch[:-1], heads or batch[-1]) if batch else ()
    shapes = shape, (*kv, k_len or q_len, dim), (*kv, k_len or q_len, v_dim or dim)
    return Call(*(draw(*s, dtype=dtype, seed=seed + i) for i, s in enumerate(shapes)), **how)


def mask_of(*shape, seed=0):
    return blocks_of(np.random.default_rng(seed), *shape)


# All options


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
@pytest.mark.parametrize("dim", [8, 16, 40, 64, 72, 96, 104, 128, 136, 192, 200, 256])
def test_dims(dim, dtype, forced):
    for v_dim in {dim, 8, 136}:
        how = {"k_len": 270, "v_dim": v_dim, "dtype": dtype}
        if dtype == HALF:
            random_call(2, 3, 150, dim, softcap=2.0, **how).check()
        else:
            bias = draw(3, 150, 270, dtype=dtype, seed=9)
            random_call(2, 3, 150, dim, bias=bias, dlse=True, **how, **CAUSAL).check()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("q_len", LENGTHS)
def test_lengths_bands_and_masks(q_len, dim, forced):
    windows = (64, 0), (0, 63), (130, 70), (None, 5)
    for i, k_len in enumerate(dict.fromkeys((q_len, 1, 64, 129, 300))):
        how = {"k_len": k_len, "heads": 1, "seed": i}
        random_call(2, q_len, dim, **how).check()
        mask = mask_of(2, q_len, k_len, seed=i)
        for align in (TOP, BOTTOM):
            random_call(2, q_len, dim, is_causal=True, causal_align=align, **how).check()
            window = windows[(LENGTHS.index(q_len) + i) % 4]
            band = {"window": window, "causal_align": align}
            random_call(2, q_len, dim, dlse=True, mask=mask, **how, **band).check()


BIASES = {
    (1, 1, 1, 1): ["float32"],
    (2, 1, 1, 1): ["float32", "float64"],
    (1, 4, 1, 1): ["float32"],
    (1, 1, 130, 1): ["float32", "bfloat16"],
    (1, 1, 1, 200): ["float16", "float64"],
    (2, 4, 130, 200): ["bfloat16", "float32"],
}


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("heads", [4, 2])
def test_biases(heads, shape, forced):
    for dtype in map(np.dtype, BIASES[shape]):
        bias = draw(*shape, dtype=np.dtype(np.float32)).astype(dtype)
        if bias.size > 4:
            bias.reshape(-1)[::7] = -np.inf
        random_call(2, 4, 130, 64, heads=heads, k_len=200, bias=bias, dlse=True).check()
        mask = mask_of(4, 130, 200)
        random_call(2, 4, 130, 128, heads=heads, k_len=200, bias=bias, mask=mask, **CAUSAL).check()


@pytest.mark.parametrize("dim", DIMS)
def test_masks_of_both_kinds_are_the_same(dim, forced):
    mask = mask_of(4, 400, 600)
    given = {"heads": 2, "k_len": 600, "dlse": True, **CAUSAL}
    dense = random_call(2, 4, 400, dim, mask=mask, **given)
    dense.check()
    packed = random_call(2, 4, 400, dim, mask=BitMask.from_dense(mask), **given)
    assert bits(dense()) == bits(packed())


@pytest.mark.parametrize("layout", ["dense", "blhd", "rows", "transposed", "reversed", "offset"])
@pytest.mark.parametrize("heads", [8, 1])
def test_layouts(heads, layout):
    shapes = (2, 8, 130, 64), (2, heads, 200, 64), (2, heads, 200, 40)
    arrays = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    options = {"softcap": 3.0, **CAUSAL}
    check(cp, Case(*arrays, options=options, layouts=(layout,) * 5), dlse=True)
    assert plans.of("attention_backward")
    assert None not in plans.of("attention_backward")


def test_nothing_leaks_from_hidden_pairs():
    mask = mask_of(2, 300, 400)
    mask[:, :, [3, 130, 399]] = False
    bias = draw(2, 1, 400, dtype=np.dtype(np.float32))
    for dim in DIMS:
        call = random_call(1, 2, 300, dim, k_len=400, mask=mask, bias=bias)
        want = call()
        for x in (call.k, call.v):
            x[:, :, [3, 130, 399]] = np.nan
        for x, like in zip(call(), want, strict=True):
            x, like = (a.get().astype(np.float64) for a in (x, like))
            assert np.isfinite(x).all()
            np.testing.assert_allclose(x, like, rtol=3e-2, atol=3e-2)


def test_the_gradient_of_a_bias_is_that_of_the_products(forced, monkeypatch):
    calls = [
        random_call(2, 4, 130, 64, heads=2, bias=draw(4, 130, 130), dlse=True, **CAUSAL),
        random_call(2, 4, 1000, 64, bias=draw(1000, 1000), mask=mask_of(4, 1000, 1000)),
    ]
    need = ("q", "k", "v", "bias")
    got = [call(need=need) for call in calls]
    for plan in plans.of("attention_backward"):
        assert [step.variant.kernel for step in plan.steps] == [*KERNELS, "bwd_dbias_sm80"]
    plans.gradients_by_products(monkeypatch)
    for call, found in zip(calls, got, strict=True):
        for x, y in zip(found, call(need=need), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            x, y = (z.get().astype(np.float64) for z in (x, y))
            assert np.isfinite(x).all()
            assert reference.relative_error(x, y) < 8e-3


# Calls of more work than there are blocks; repeatability


@pytest.mark.parametrize("options", [{}, CAUSAL, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_large_calls_are_those_of_the_products(dim, options, forced, monkeypatch):
    call = random_call(2, 8, 3000, dim, heads=4, dlse=True, **options)
    got = call()
    assert plans.of("attention_backward")
    assert None not in plans.of("attention_backward")
    plans.gradients_by_products(monkeypatch)
    for x, y in zip(got, call(), strict=True):
        x, y = (z.get().astype(np.float64) for z in (x, y))
        assert np.isfinite(x).all()
        assert reference.relative_error(x, y) < 8e-3


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_thousand_runs_beside_a_busy_stream_give_the_same_bits(dim, sparse, forced):
    more = {"mask": BitMask.from_dense(mask_of(1500, 1500))} if sparse else {}
    call = random_call(2, 16, 1500, dim, heads=4, dlse=True, **CAUSAL, **more)
    differing = Differing(call())
    beside = random_call(1, 4, 1000, 128)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    beside()
    cp.cuda.Device().synchronize()
    for i in range(1000):
        if i % 100 == 0:
            poison(2**24)
        with streams[1]:
            beside()
        with streams[0]:
            differing.look(call())
    cp.cuda.Device().synchronize()
    assert differing.count == 0


@pytest.mark.parametrize("dim", [64, 256])
def test_a_graph_repeats_the_same_bits(dim, forced):
    call = random_call(2, 8, 700, dim, heads=2, dlse=True, softcap=2.0)
    want = bits(call())
    check_replays(call, want)
