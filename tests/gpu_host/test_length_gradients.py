"""Gradients with key lengths on CuPy arrays, by the kernels in the emulator on a stand-in."""

import itertools

import numpy as np
import pytest

import fa_cupy
from fa_cupy import _definitions, reference
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.keys.layout import KeyArrays
from tests.gpu_host.test_backward_plans import TABLES, cupy, host, launcher
from tests.support import cupy_stand_in, gradients
from tests.support.cupy_stand_in import CAPTURE, bare, owned
from tests.support.every_run import only
from tests.support.kernel_gradients import case, compare
from tests.support.strategies import UNIT
from tests.support.strategies import Case as Definition

__all__ = ["cupy", "host", "launcher"]  # fixtures
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}
MAIN = ["bwd_preprocess", "bwd_sm90", "bwd_convert_dq", "bwd_nonfinite"]
LENGTHS = np.array([130, 0, 77, 200])  # the last one is out of range, of 150


class Call:
    """A call of random numbers with NaN behind the ends, and where lengths are out of range."""

    def __init__(
        self, lengths=LENGTHS, band=None, heads=(2, 1), sizes=(70, 150), dtype="float16", **options
    ):
        count = np.size(lengths) if np.ndim(lengths) else 2
        self.lengths, self.band = lengths, band or {}
        own = np.broadcast_to(lengths, count)
        self.valid = (own >= 0) & (own <= sizes[1])
        ends = np.where(self.valid, own, 0)
        call = case(dtype, heads, sizes, (64, 64), batch=count, **options)
        seen = _definitions.of_lengths(ends, *sizes, **self.band)
        self.definition = call._replace(options={**call.options, "mask": seen})
        self.options = call.options
        with np.errstate(all="ignore"):
            out, lse = reference.attention(*call[:3], **self.definition.options)
        arrays = [x.copy() for x in (*call[:3], out.astype(dtype), call.dout)]
        q, k, v, out, dout = arrays
        for b, end in enumerate(ends):
            k[b, :, end:] = v[b, :, end:] = np.nan
        wide = np.promote_types(dtype, np.float32)
        lse, dlse = lse.astype(wide), None if call.dlse is None else call.dlse.astype(wide)
        for x in (out, lse, dout, dlse):
            if x is not None:
                x[~self.valid] = np.nan
        self.inputs, self.results = (q, k, v), (out, lse, dout, dlse)

    def solve(self, host, cupy, need=("q", "k", "v"), on_host=False):
        """What the module under test makes of it."""

        def empty(shape, dtype, like):
            found = core_arrays.empty_laid_out(cupy, shape, like, dtype)
            bare(found)[...] = np.nan
            return found

        def there(x):
            return None if x is None else cupy_stand_in.ndarray._of(x)

        options = {**self.options, **self.band}
        bias, sinks = (there(options.pop(name, None)) for name in ("bias", "sinks"))
        inputs = *map(there, self.inputs), bias, None
        of_host = KeyArrays(np.asarray(self.lengths))
        keys = KeyArrays(owned(of_host.lengths))
        problem = attention_problem.attention_problem(
            *inputs, sinks=sinks, k_lengths=keys.lengths, **options
        )
        more = {"on_host": of_host} if on_host else {}
        with np.errstate(all="ignore"):  # a device does not warn
            found = host.backward(
                problem, inputs, tuple(map(there, self.results)), need, empty, sinks, keys=keys,
                **more,
            )  # fmt: skip
        assert list(found) == list(need)
        return {name: bare(x) for name, x in found.items()}

    def check(self, found):
        compare(self.definition, [found[name] for name in "qkv"])
        ends = np.where(self.valid, self.lengths, 0)
        for b, end in enumerate(ends):
            assert not found["k"][b, :, end:].any()
            assert not found["v"][b, :, end:].any()
        assert not found["q"][ends == 0].any()

    def check_others(self, found):
        """Hold the gradients of a bias and of sinks against float64."""
        q, k, v, dout, dlse, options = self.definition
        dlse = None if dlse is None else np.where(self.valid[:, None, None], dlse, 0)
        dout = np.where(self.valid[:, None, None, None], dout, dout.dtype.type(0))
        options = dict(options)
        more = [options.pop(name, None) for name in ("bias", "mask")]
        definition = Definition(q, k, v, *more, options=options)
        named = {name: found[name] for name in gradients.NAMES if name in found}
        gradients.hold(definition, named, dout, dlse, UNIT[q.dtype])


@pytest.mark.emulator
@pytest.mark.parametrize("band", [{}, {"is_causal": True, "causal_align": "top_left"}], ids=str)
def test_a_mask_hides_what_is_behind_the_ends(host, cupy, launcher, band):
    """Nothing that is not finite gets to the kernels."""
    call = Call(band=band, dlse=True)
    call.check(call.solve(host, cupy))
    assert launcher.ran == [*TABLES, *MAIN]


@pytest.mark.emulator
@pytest.mark.parametrize("layout", only([None, "blhd"], None))
def test_bands_from_the_ends_are_those_of_packed_sequences(host, cupy, launcher, layout):
    call = Call(band=CAUSAL, dlse=True, layout=layout)
    found = call.solve(host, cupy)
    call.check(found)
    assert launcher.ran == ["row_intervals", *MAIN]
    for name, of in zip("qkv", call.inputs, strict=True):
        assert found[name].strides == of.strides


FULL = {
    "float32": ["bwd_preprocess_fp32", "bwd_dq_fp32_sm90", "bwd_dkdv_fp32_sm90"],
    "float64": ["bwd_dq_fp64", "bwd_dkdv_fp64"],
}


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dtype", "band"), only(itertools.product(FULL, [{}, CAUSAL]), *((x, CAUSAL) for x in FULL))
)
def test_kernels_of_float32_and_float64_read_lengths(host, cupy, launcher, dtype, band):
    call = Call(band=band, dlse=True, dtype=dtype)
    found = call.solve(host, cupy)
    call.check_others(found)
    for b, end in enumerate(np.where(call.valid, call.lengths, 0)):
        assert not found["k"][b, :, end:].any()
        assert not found["v"][b, :, end:].any()
    assert launcher.ran == FULL[dtype]


SINKS = np.array([[0.5], [-1.0]], np.float32)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", only(FULL, "float64"))
def test_the_gradient_of_sinks_of_float32_and_float64(host, cupy, launcher, dtype):
    call = Call(dlse=True, dtype=dtype, sinks=SINKS)
    call.check_others(call.solve(host, cupy, need=("q", "k", "v", "sinks")))
    assert launcher.ran == FULL[dtype]


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", only(FULL, "float32"))
def test_the_gradient_of_a_bias_takes_a_mask(host, cupy, launcher, dtype):
    """Without it lengths do."""
    bias = np.random.default_rng(0).standard_normal((2, 1, 150)).astype(dtype)
    call = Call(dlse=True, dtype=dtype, bias=bias)
    call.check_others(call.solve(host, cupy))
    assert launcher.ran == FULL[dtype]
    call.check_others(call.solve(host, cupy, need=("q", "k", "v", "bias")))
    assert launcher.ran[len(FULL[dtype]) :][: len(TABLES)] == TABLES


@pytest.mark.parametrize(("dtype", "dim"), [("float16", 60), ("float64", 264)])
def test_without_a_kernel_nothing_is_folded(host, cupy, launcher, monkeypatch, dtype, dim):
    """A mask of the same call takes the gradients to products of cuBLAS."""
    copied = []
    monkeypatch.setattr(host, "folded", lambda *given: copied.append("folded") or 1 / 0)
    monkeypatch.setattr(
        host, "gathered_gradients", lambda *given: copied.append("gathered") or (None,) * 3
    )
    monkeypatch.setattr(host, "backward", lambda *given: "products")
    q, k, dout = (owned(np.zeros((2, 2, n, dim), dtype)) for n in (20, 30, 20))
    lengths = owned(np.array([30, 7]))
    problem = attention_problem.attention_problem(q, k, k, None, None, k_lengths=lengths, **CAUSAL)
    results = dout, owned(np.zeros((2, 2, 20))), dout, None
    found = host._with_lengths(
        problem, (q, k, k, None, None), results, ("q", "k", "v"), None, None, None,
        KeyArrays(lengths), None,
    )  # fmt: skip
    assert (found, copied) == ("products", ["gathered"])


@pytest.mark.emulator
@pytest.mark.parametrize("band", [{}, CAUSAL], ids=str)
def test_the_gradient_of_sinks(host, cupy, band):
    sinks = np.array([[0.5], [-1.0]], np.float32)
    call = Call(band=band, sinks=sinks, dlse=True)
    found = call.solve(host, cupy, ("q", "k", "v", "sinks"))
    call.check(found)
    call.check_others(found)


@pytest.mark.emulator
def test_the_gradient_of_a_bias(host, cupy, launcher):
    """For which packed sequences would need one of all pairs."""
    bias = np.random.default_rng(0).standard_normal((4, 1, 70, 150)).astype(np.float32)
    call = Call(band=CAUSAL, bias=bias)
    found = call.solve(host, cupy, ("q", "k", "v", "bias"))
    call.check(found)
    call.check_others(found)
    assert launcher.ran[: len(TABLES)] == TABLES
    for b, end in enumerate((130, 0, 77, 0)):
        assert not found["bias"][b, ..., end:].any()


@pytest.mark.emulator
@pytest.mark.parametrize("length", [77, 150, 0])
def test_one_length_on_the_host_is_that_of_parts(host, cupy, launcher, monkeypatch, length):
    """Without a mask."""
    from fa_cupy.gpu.cublas import tile_ops

    monkeypatch.setattr(tile_ops, "copy", lambda out, x: 1 / 0)  # no gradient has another dtype
    call = Call(length, CAUSAL, dlse=True)
    call.check(call.solve(host, cupy, on_host=True))
    assert launcher.ran == (MAIN if length else [])


@pytest.mark.emulator
def test_lengths_on_the_host_need_no_copies_of_results(host, cupy, launcher):
    call = Call(LENGTHS[:3])
    call.check(call.solve(host, cupy, on_host=True))
    assert launcher.ran == [*TABLES, *MAIN]


# Whole calls: what is launched


@pytest.fixture
def device():
    with cupy_stand_in.on_a_device():
        yield


def kernels(call):
    """The names of the kernels that a call launches, but those that make masks."""
    logged = len(CAPTURE.log)
    call()
    names = [event[1] for event in CAPTURE.log[logged:] if event[0] == "launch"]
    return [name for name in names if name.startswith("attention")]


def arrays():
    q, k, v, dout = (owned(np.zeros((3, h, 300, 64), np.float16)) for h in (4, 2, 2, 4))
    return dout, q, k, v, q, owned(np.zeros(q.shape[:-1], np.float32))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("band", [{}, CAUSAL], ids=str)
def test_lengths_on_a_device_are_not_read(band):
    """Which a stand-in of a device would notice: it refuses to become a number."""
    given = arrays()
    for dtype in (np.int32, np.int64, np.int64):
        lengths = owned(np.array([300, 7, 0], dtype))
        names = kernels(lambda n=lengths: fa_cupy.attention_backward(*given, k_lengths=n, **band))
        assert names.count("attention_bwd_sm90") == 1


@pytest.mark.usefixtures("device")
def test_lengths_on_the_host():
    given = arrays()
    for lengths in (7, np.array([300, 7, 0]), np.full(3, 7)):
        names = kernels(lambda n=lengths: fa_cupy.attention_backward(*given, k_lengths=n))
        assert names.count("attention_bwd_sm90") == 1
    with pytest.raises(ValueError, match=r"^attention_backward: k_lengths\[1\] is 301, want 0 to"):
        fa_cupy.attention_backward(*given, k_lengths=np.array([3, 301, 0]))
    fa_cupy.attention_backward(*given)  # whose plan is none of a call with lengths
    with pytest.raises(ValueError, match=r"^attention_backward: k_lengths is -1, want 0 to 300"):
        fa_cupy.attention_backward(*given, k_lengths=-1)
