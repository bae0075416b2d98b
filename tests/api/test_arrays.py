"""Array kinds: other libraries' arrays in and out, layouts, and who shares memory with whom."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fa_cupy
from fa_cupy import BitMask, attention, merge_attention, reference
from fa_cupy.core import arrays as core_arrays
from tests.support.strategies import BFLOAT16, DTYPES, by_dtype, lay, normal, to_numpy


def draw(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [normal(rng, shape, dtype) for shape in shapes]


MANY_AXES = pytest.mark.skipif(
    int(np.__version__.partition(".")[0]) < 2, reason="arrays of NumPy 1 have 32 axes at most"
)


# NumPy's relatives


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_subclasses_are_taken_as_plain_arrays(tmp_path):
    q, k, v = draw((5, 8), (7, 8), (7, 4))
    want = attention(q, k, v)
    file = np.memmap(tmp_path / "out", np.float32, "w+", shape=(5, 4))
    assert attention(np.asmatrix(q), np.asmatrix(k), v, out=file) is file
    assert file.tobytes() == want.tobytes()
    assert type(attention(np.asmatrix(q), k, v)) is np.ndarray


@MANY_AXES
@pytest.mark.parametrize(
    ("arg", "text"),
    [
        *[(arg, "38 batch axes, want at most 30") for arg in ("q", "k", "v", "bias", "mask")],
        ("sinks", "39 batch axes, want at most 30"),
        ("k_lengths", "40 batch axes, want at most 29"),
        ("page_table", "39 batch axes, want at most 29"),
    ],
)
def test_arrays_of_attention_have_at_most_30_batch_axes(arg, text):
    arrays = dict.fromkeys(("q", "k", "v"), np.zeros((1, 1, 16, 1), np.float32))
    attention(**arrays)
    dtypes = {"mask": np.bool_, "k_lengths": np.int32, "page_table": np.int32}
    arrays[arg] = np.zeros((*(1,) * 38, 16, 1), dtypes.get(arg, np.float32))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^attention: {arg} has {text}$"):
            attention(**arrays)


@MANY_AXES
def test_functions_take_30_batch_axes():
    x = np.ones((2, *(1,) * 29, 3, 4), np.float32)
    lengths, sinks = np.full(x.shape[:-3], 2, np.int32), x[0, ..., 0, 0]
    mask = BitMask(x[..., :3] > 0)
    attention(x, x, x, k_lengths=lengths, sinks=sinks)
    attention(x, x, x, mask=mask & mask)
    calls = {
        "attention_backward": lambda x: fa_cupy.attention_backward(x, x, x, x, x, x[..., 0]),
        "causal_product": lambda x: fa_cupy.causal_product(x, x, x),
        "linear_attention": lambda x: fa_cupy.linear_attention(x, x, x),
        "prefix_state": lambda x: fa_cupy.prefix_state(x, x),
        "kernel_regression": lambda x: fa_cupy.kernel_regression(x, x, x, 1.0),
        "BitMask.from_dense": lambda x: BitMask.from_dense(x > 0),
        "BitMask.from_indices": lambda x: BitMask.from_indices(x.astype(int), 3),
        "BitMask.from_segments": lambda x: BitMask.from_segments(x[..., 0].astype(int)),
        "BitMask": lambda x: mask & (x[..., :3] > 0),
    }
    for name, call in calls.items():
        call(x)
        with pytest.raises(ValueError, match=rf"^{name}: \w+ has 31 batch axes, want at most 30$"):
            call(x[None])


@pytest.mark.parametrize("arg", ["q", "k", "v", "bias", "mask"])
def test_masked_arrays_are_refused(arg):
    arrays = {"q": (5, 8), "k": (7, 8), "v": (7, 4), "bias": (5, 7), "mask": (5, 7)}
    arrays = {name: np.zeros(s, bool if name == "mask" else "f4") for name, s in arrays.items()}
    arrays[arg] = np.ma.array(arrays[arg])
    with pytest.raises(TypeError, match=f"attention: {arg} is a masked array, want a plain array"):
        attention(**arrays)


def test_what_speaks_no_dlpack_is_refused():
    sparse = pytest.importorskip("scipy.sparse")
    q = np.zeros((5, 8), np.float32)
    with pytest.raises(TypeError, match=r"attention: k is a scipy\.csr_array, want an array"):
        attention(q, sparse.csr_array(q), q)


def test_devices_that_cannot_be_reached_are_refused():
    far = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (8, 0))
    with pytest.raises(TypeError, match="attention: q is on a device of DLPack type 8"):
        core_arrays.to_native("attention", q=far)


def test_a_device_that_is_none_is_refused():
    odd = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (None, 0))
    with pytest.raises(TypeError, match=r"attention: q is a .* on DLPack device \(None, 0\), want"):
        core_arrays.to_native("attention", q=odd)


def test_device_memory_without_what_it_takes_to_read_it(monkeypatch):
    far = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (2, 99))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(
            ImportError, match=r"attention: q is on CUDA device 99, which needs CuPy"
        ):
            core_arrays.to_native("attention", q=far)
    pytest.importorskip("cupy")
    with pytest.raises(RuntimeError, match="attention: q is on CUDA device 99, w"):
        core_arrays.to_native("attention", q=far)


# Other libraries on the CPU


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def as_torch(torch, array):
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize(**by_dtype())
def test_torch_tensors_come_back_as_tensors(torch, dtype):
    q, k, v = draw((2, 5, 8), (2, 7, 8), (2, 7, 4), dtype=dtype)
    mask = np.random.default_rng(1).random((5, 7)) < 0.7
    mask[:, 0] = True
    tensors = [as_torch(torch, a) for a in (q, k, v)]
    out, lse = attention(*tensors, mask=torch.from_numpy(mask), return_lse=True)
    want, want_lse = attention(q, k, v, mask=mask, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == tensors[0].dtype
    bits = out.view(torch.int16).numpy() if dtype == BFLOAT16 else out.numpy()
    assert bits.tobytes() == want.tobytes()
    assert lse.numpy().tobytes() == want_lse.tobytes()


@pytest.mark.parametrize(**by_dtype())
def test_torch_tensors_are_not_copied(torch, dtype):
    tensor = as_torch(torch, draw((4, 6), dtype=dtype)[0]).T
    native = core_arrays.to_native("attention", q=tensor)
    (array,) = native.arrays
    assert native.backend == "numpy"
    assert array.dtype == dtype
    assert array.ctypes.data == tensor.data_ptr()
    assert array.strides == tuple(s * dtype.itemsize for s in tensor.stride())


@pytest.mark.parametrize(**by_dtype())
def test_torch_out_is_written_in_place(torch, dtype):
    q, k, v = (as_torch(torch, a) for a in draw((5, 8), (7, 8), (7, 4), dtype=dtype))
    out = torch.full((4, 5), torch.nan, dtype=q.dtype).T
    assert attention(q, k, v, out=out) is out
    assert torch.equal(out, attention(q, k, v))


def test_torch_subclasses_are_tensors(torch):
    class Own(torch.Tensor):
        pass

    q, k, v = (torch.from_numpy(a) for a in draw((5, 8), (7, 8), (7, 4)))
    out = torch.zeros(5, 4).as_subclass(Own)
    want = attention(q, k, v)
    assert attention(q.as_subclass(Own), k, v, out=out) is out
    assert torch.equal(out.as_subclass(torch.Tensor), want)
    assert torch.equal(attention(q.as_subclass(Own), k.as_subclass(Own), v), want)


def test_torch_knows_that_out_is_written(torch):
    q = torch.from_numpy(draw((5, 5))[0])
    out, leaf = torch.ones(5, 5), torch.ones(5, 5, requires_grad=True)
    product = (leaf * out).sum()  # backward needs what `out` was
    version = out._version
    with pytest.raises(ValueError, match="head_dim"):
        attention(q, q[:, 1:], q, out=out)
    assert out._version == version
    attention(q, q, q, out=out)
    assert out._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        own = torch.empty(5, 5)
        assert attention(q, q, q, out=own) is own


def test_torch_scalars_as_options(torch):
    q = torch.zeros(5, 8)
    assert attention(q, q, q, scale=torch.tensor(2.0), softcap=torch.tensor(3)).shape == (5, 8)
    for arg in ("scale", "softcap"):
        for value, said in (
            (torch.tensor(1.0, requires_grad=True), f"requires a gradient.*want {arg}.detach"),
            (torch.tensor(True), r"is tensor\(True\) \(Tensor\), want a finite number"),
            (torch.tensor(1j), r"is tensor\(.*\) \(Tensor\), want a finite number"),
        ):
            with pytest.raises(TypeError, match=f"attention: {arg} {said}"):
                attention(q, q, q, **{arg: value})


def test_torch_tensors_that_require_a_gradient(torch):
    q = torch.zeros(5, 8, requires_grad=True)
    with pytest.raises(TypeError, match=r"attention: q requires a gradient.*want q\.detach\(\)"):
        attention(q, q, q)
    with torch.no_grad():
        assert not attention(q, q, q).requires_grad
    assert attention(*[q.detach()] * 3).shape == (5, 8)


@pytest.fixture
def stand_in_tensor(monkeypatch):
    """A tensor that requires a gradient, of so much of torch as is asked before any data are."""
    names = "bfloat16", "bool", "float16", "float32", "float64", "int16", "uint8"
    torch = ModuleType("torch")
    vars(torch).update({x: x for x in names}, is_grad_enabled=lambda: True)

    class Tensor:
        requires_grad, device, shape = True, "cpu", ()
        __dlpack__ = None

        def __dlpack_device__(self):
            return 1, 0

    torch.Tensor = Tensor
    torch.cuda = SimpleNamespace(current_stream=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return Tensor()


@pytest.mark.parametrize(
    ("name", "recording"),
    [
        ("causal_product", "fa_cupy.torch.causal_product"),
        ("linear_attention", "fa_cupy.torch.linear_attention"),
        ("linear_attention_backward", "a function of fa_cupy.torch"),
    ],
)
def test_what_records_gradients_is_named(stand_in_tensor, name, recording):
    with pytest.raises(TypeError) as caught:
        getattr(fa_cupy, name)(*[stand_in_tensor] * (4 if name.endswith("backward") else 3))
    assert str(caught.value) == (
        f"{name}: q requires a gradient, which is not recorded here, want q.detach(), or "
        f"{recording}, which records it"
    )


@pytest.mark.parametrize(
    ("name", "recording"),
    [
        ("kernel_regression", "fa_cupy.torch.kernel_regression"),
        ("kernel_regression_backward", "a function of fa_cupy.torch"),
    ],
)
def test_what_records_the_gradient_of_a_bandwidth_is_named(stand_in_tensor, name, recording):
    """Of one number, which no array of a bandwidth is."""
    points = [np.ones((5, 1))] * (4 if name.endswith("backward") else 3)
    with pytest.raises(TypeError) as caught:
        getattr(fa_cupy, name)(*points, stand_in_tensor)
    assert str(caught.value) == (
        f"{name}: bandwidth requires a gradient, which is not recorded here, want "
        f"bandwidth.detach(), or {recording}, which records it"
    )


def test_torch_tensors_without_plain_memory(torch):
    q = torch.zeros(5, 8)
    with pytest.raises(TypeError, match="attention: k cannot be shared by DLPack"):
        attention(q, q.to_sparse(), q)
    with pytest.raises(
        TypeError, match=r"attention: v is a torch\.Tensor without data, want an array"
    ):
        attention(q, q, q.to("meta"))


def test_torch_dtypes_that_are_not_taken(torch):
    q = torch.zeros(5, 8, dtype=torch.int64)
    with pytest.raises(TypeError, match="attention: q has dtype int64, want float16"):
        attention(q, q, q)


def test_merging_tensors(torch):
    q, k, v = (torch.from_numpy(a) for a in draw((5, 8), (7, 8), (7, 4)))
    parts = [attention(q, k[s], v[s], return_lse=True) for s in (slice(3), slice(3, 7))]
    outs, lses = zip(*parts, strict=True)
    for merged in (merge_attention(outs, lses), merge_attention(*map(torch.stack, (outs, lses)))):
        assert isinstance(merged[0], torch.Tensor)
        torch.testing.assert_close(merged[0], attention(q, k, v))


def test_two_libraries_do_not_mix(torch):
    q = np.zeros((5, 8), np.float32)
    with pytest.raises(
        TypeError, match=r"attention: k is a torch\.Tensor, q is a numpy\.ndarray, want arrays of"
    ):
        attention(q, torch.from_numpy(q), q)
    with pytest.raises(TypeError, match=r"attention: mask is a numpy\.ndarray, q is a torch\.Tens"):
        attention(*[torch.from_numpy(q)] * 3, mask=q > 0)


def test_array_api_arrays():
    namespace = pytest.importorskip("array_api_strict")
    q, k, v = draw((2, 5, 8), (2, 7, 8), (2, 7, 4))
    arrays = [namespace.asarray(a) for a in (q, k, v)]
    out, lse = attention(*arrays, return_lse=True)
    assert type(out) is type(lse) is type(arrays[0])
    assert np.from_dlpack(out).tobytes() == attention(q, k, v).tobytes()
    merged, _ = merge_attention(namespace.stack([out, out]), namespace.stack([lse, lse]))
    np.testing.assert_allclose(np.from_dlpack(merged), np.from_dlpack(out), rtol=1e-6)


@pytest.mark.parametrize(**by_dtype(*DTYPES[:3]))
def test_jax_arrays(dtype):
    jax = pytest.importorskip("jax")
    q, k, v = draw((2, 5, 8), (2, 7, 8), (2, 7, 4), dtype=dtype)
    arrays = [jax.numpy.asarray(a) for a in (q, k, v)]
    out, lse = attention(*arrays, return_lse=True)
    assert isinstance(out, jax.Array)
    assert out.dtype == dtype
    assert lse.dtype == np.float32
    assert np.asarray(out).tobytes() == attention(q, k, v).tobytes()
    with pytest.raises(TypeError, match=r"attention: out is a jaxlib.*which cannot be written to"):
        attention(*arrays, out=out)
    with pytest.raises(TypeError, match=r"attention: q is a jax.*want an array"):
        jax.jit(attention)(*arrays)


# Other libraries on a GPU


@pytest.fixture
def torch_cuda(torch, cupy):
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize(**by_dtype())
def test_torch_tensors_on_a_gpu(torch_cuda, dtype):
    torch = torch_cuda
    arrays = draw((2, 3, 50, 16), (2, 3, 70, 16), (2, 3, 70, 8), dtype=dtype)
    q, k, v = (as_torch(torch, a).cuda() for a in arrays)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        out, lse = attention(q, k, v, return_lse=True)
        again = torch.full_like(out, torch.nan)
        assert attention(q, k, v, out=again) is again
    torch.cuda.synchronize()
    assert out.device == q.device
    assert out.dtype == q.dtype
    assert out.stride(1) < out.stride(2)
    assert torch.equal(out, again)
    want, want_lse = reference.attention(*arrays)
    limit = {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    assert reference.relative_error(out.double().cpu().numpy(), want) < limit
    assert reference.relative_error(lse.double().cpu().numpy(), want_lse) < 1e-5


@pytest.mark.gpu
def test_torch_allocates_results_on_a_gpu(torch_cuda):
    torch = torch_cuda
    q = torch.zeros(64, 1024, 16, device="cuda")
    before = torch.cuda.memory_allocated()
    out, lse = attention(q, q, q, return_lse=True)
    assert torch.cuda.memory_allocated() - before >= out.nbytes + lse.nbytes


@pytest.mark.gpu
def test_kinds_do_not_mix_on_a_gpu(cupy):
    q = np.zeros((5, 8), np.float32)
    with pytest.raises(TypeError, match=r"attention: k is a cupy\.ndarray, q is a numpy\.ndarray"):
        attention(q, cupy.asarray(q), q)
    with pytest.raises(TypeError, match=r"attention: out is a numpy\.ndarray, q is a cupy\.ndarr"):
        attention(*[cupy.asarray(q)] * 3, out=q)


@pytest.mark.gpu
def test_the_current_stream_is_used(cupy):
    q, k, v = map(cupy.asarray, draw((2, 256, 64), (2, 256, 64), (2, 256, 64), dtype=np.float16))
    want = attention(q, k, v)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = cupy.zeros_like(q)
        for _ in range(200):  # work that the call must wait for
            late += cupy.sin(q)
        late[...] = q
        out = attention(late, k, v)
    stream.synchronize()
    assert bool((out == want).all())


@pytest.mark.gpu
def test_arrays_of_another_device_than_the_current_one(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device")
    arrays = draw((5, 8), (7, 8), (7, 4))
    with cupy.cuda.Device(1):
        q, k, v = map(cupy.asarray, arrays)
    out = attention(q, k, v)
    assert out.device.id == 1
    np.testing.assert_allclose(out.get(), reference.attention(*arrays)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="attention: k is on CUDA device 1, q is on CUDA device 0"):
        attention(cupy.asarray(arrays[0]), k, v)


# Layout and overlap


@pytest.mark.parametrize("layout", ["dense", "blhd", "transposed", "steps", "upward"])
def test_new_arrays_are_dense_in_the_order_of_q(xp, layout):
    q = lay(xp, np.zeros((2, 3, 5, 8), np.float32), layout)
    problem = SimpleNamespace(out_shape=(4, 2, 3, 5, 7))
    out = core_arrays.empty_like_layout(xp, problem, q, np.dtype(np.float16))
    assert out.shape == (4, 2, 3, 5, 7)
    assert out.dtype == np.float16
    by_stride = sorted(range(1, 5), key=lambda axis: -abs(q.strides[axis - 1]))
    assert sorted(range(5), key=lambda axis: -out.strides[axis]) == [0, *by_stride]
    assert min(out.strides) == 2
    assert max(out.strides) == 2 * 2 * 3 * 5 * 7


def test_axes_that_q_repeats_are_outermost(xp):
    q = xp.broadcast_to(xp.zeros((2, 1, 5, 8), np.float32), (2, 3, 5, 8))
    problem = SimpleNamespace(out_shape=(2, 3, 5, 8))
    out = core_arrays.empty_like_layout(xp, problem, q, np.dtype(np.float32))
    assert out.strides == (160, 320, 32, 4)


def test_axes_of_size_1_lie_where_q_has_them(xp):
    def strides(q, v_dim=None):
        out = SimpleNamespace(out_shape=(*q.shape[:-1], v_dim or q.shape[-1]))
        return core_arrays.empty_like_layout(xp, out, q, q.dtype).strides

    for shape in ((4, 8, 1, 128), (1, 8, 1, 128), (4, 1, 8, 128), (1, 1, 1, 1)):
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
            q = xp.zeros(shape, np.float32).transpose(order)
            assert strides(q) == q.strides
    q = xp.zeros((8, 128), np.float32)
    assert strides(q[:, None]) == (512, 512, 4)
    assert strides(q[None]) == (4096, 512, 4)
    # One column is not an axis that is repeated.
    assert strides(xp.zeros((4, 8, 5, 1), np.float32), 7) == (1120, 140, 28, 4)


def test_a_single_row_has_a_stride_that_kernels_take():
    row = np.zeros((2**16, 2**8, 1, 128), np.bool_)  # memory that nobody touches
    for q in (row, np.lib.stride_tricks.as_strided(row, strides=(2**15, 128, 2**31, 1))):
        assert core_arrays.memory_order((*row.shape[:3], 64), q) == [0, 1, 2, 3]


@st.composite
def views(draw):
    """A view into 64 bytes, by an offset, a shape and strides."""
    itemsize = draw(st.sampled_from([1, 2, 4]))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    strides = tuple(draw(st.integers(-12, 12)) for _ in shape)
    return itemsize, shape, strides


MEMORY = np.zeros(256, np.uint8)


def view_of(spec, offset):
    itemsize, shape, strides = spec
    start = np.ndarray((), f"V{itemsize}", MEMORY, offset)
    return np.lib.stride_tricks.as_strided(start, shape, strides)


def addresses(array):
    """The address of every byte of every element, as a list per element."""
    index = np.indices(array.shape).reshape(array.ndim, -1)
    starts = np.asarray(array.strides) @ index + array.ctypes.data
    return [set(range(s, s + array.dtype.itemsize)) for s in starts.tolist()]


@given(a=views(), b=views(), offset=st.integers(100, 140))
def test_overlap_is_sharing_an_address(a, b, offset):
    a, b = view_of(a, 120), view_of(b, offset)
    shared = set().union(*addresses(a)) & set().union(*addresses(b))
    assert core_arrays.overlap(a, b) == bool(shared)


@given(spec=views())
def test_no_array_that_overlaps_itself_passes(spec):
    array = view_of(spec, 120)
    cells = addresses(array)
    if sum(map(len, cells)) > len(set().union(*cells)):
        assert core_arrays.overlaps_itself(array)


@given(data=st.data())
def test_views_by_slicing_do_not_overlap_themselves(data):
    array = np.zeros((3, 4, 5), np.float32).transpose(data.draw(st.permutations(range(3))))
    step = st.sampled_from([1, 2, -1, -3])
    array = array[tuple(slice(None, None, data.draw(step)) for _ in range(3))]
    assert not core_arrays.overlaps_itself(array)


@pytest.mark.gpu
def test_overlap_of_device_memory(cupy):
    memory = cupy.zeros((4, 6), np.float32)
    assert core_arrays.overlap(memory[:2], memory[1:])
    assert not core_arrays.overlap(memory[:2], memory[2:])
    assert not core_arrays.overlap(memory[:, ::2], memory[:, 1::2])
    assert not core_arrays.overlap(memory, memory.copy())
    assert core_arrays.overlaps_itself(cupy.broadcast_to(memory[0], (4, 6)))


def test_numpy_input_does_not_import_cupy():
    code = (
        "import sys, numpy as np, fa_cupy\n"
        "x = np.ones((3, 4), np.float32)\n"
        "fa_cupy.merge_attention([fa_cupy.attention(x, x, x)], [x[:, 0]])\n"
        "fa_cupy.scaled_dot_product_attention(x, x, x)\n"
        "assert not {'cupy', 'torch', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_results_do_not_alias_the_inputs(xp):
    x = xp.ones((1, 4), np.float32)
    out = attention(x, x, x)
    out[...] = 7
    assert (to_numpy(x) == 1).all()
