"""Each wrapper of ptx/ alone, in a kernel of a few lines, against NumPy.

Those that only SM90 has are in `test_wrappers_sm90`.
"""

import re

import ml_dtypes
import numpy as np
import pytest

from fa_cupy.gpu.driver import compile, devices
from tests.kernels.ptx.test_wrappers_sm90 import SOURCES as SM90_SOURCES
from tests.support.ptx_kernels import AT, INCLUDES, WRAPPERS, mma_of_float64

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

PARAMS = np.dtype([(name, np.uint64) for name in ("x", "y", "z", "out")])
PREAMBLE = """
struct Params { uint64 x, y, z, out; };
extern "C" __global__ void test(const __grid_constant__ Params p) {
  [[maybe_unused]] const int lane = threadIdx.x % 32, i = blockIdx.x * blockDim.x + threadIdx.x;
"""


def elementwise(name, source="float", target="float"):
    return f"  at<{target}>(p.out)[i] = {name}(at<{source}>(p.x)[i]);"


def narrowing(name):
    return f"  at<uint32>(p.out)[i] = {name}(at<float>(p.x)[i], at<float>(p.y)[i]);"


def fused(name):
    x, y, z = (f"at<uint32>(p.{array})[i]" for array in "xyz")
    return f"  at<uint32>(p.out)[i] = {name}({x}, {y}, {z});"


def mma(call):
    """A is x (16, 16), B is y (16, 8), both row by row; the sum starts from z (16, 8)."""
    return """
  const int g = lane / 4, t = lane % 4;
  const uint16 *a16 = at<uint16>(p.x), *b16 = at<uint16>(p.y);
  uint32 a[4], b[2];
  float d[4];
  for (int r = 0; r < 4; ++r) {
    const int row = g + r % 2 * 8, col = 2 * t + r / 2 * 8;
    a[r] = a16[row * 16 + col] | uint32(a16[row * 16 + col + 1]) << 16;
    d[r] = at<float>(p.z)[(g + r / 2 * 8) * 8 + 2 * t + r % 2];
  }
  for (int r = 0; r < 2; ++r) {
    const int k = 2 * t + r * 8;
    b[r] = b16[k * 8 + g] | uint32(b16[(k + 1) * 8 + g]) << 16;
  }
  CALL(d, a, b[0], b[1]);
  for (int r = 0; r < 4; ++r) at<float>(p.out)[(g + r / 2 * 8) * 8 + 2 * t + r % 2] = d[r];
""".replace("CALL", call)


def ldmatrix(call):
    """Four matrices x (4, 8, 8) lie in shared memory with rows 48 bytes apart."""
    return """
  __shared__ __align__(16) uint16 rows[32 * 24];
  for (int c = 0; c < 8; ++c) rows[lane * 24 + c] = at<uint16>(p.x)[lane * 8 + c];
  __syncwarp();
  uint32 r[4];
  CALL(r, cvta_to_shared(rows + lane * 24));
  for (int m = 0; m < 4; ++m) at<uint32>(p.out)[lane * 4 + m] = r[m];
""".replace("CALL", call)


SOURCES = {
    "ex2_approx_ftz": elementwise("ex2_approx_ftz"),
    "lg2_approx_ftz": elementwise("lg2_approx_ftz"),
    "rcp_rn": elementwise("rcp_rn"),
    "rcp_approx_ftz": elementwise("rcp_approx_ftz"),
    "rcp_approx": elementwise("rcp_approx"),
    "select_le": """
  const float *x = at<float>(p.x), *limits = at<float>(p.y), *a = at<float>(p.z);
  at<float>(p.out)[i] = select_le(x[i], limits[i], a[i], -1.0f);
""",
    "fma_rn_f16x2": fused("fma_rn_f16x2"),
    "fma_rn_bf16x2": fused("fma_rn_bf16x2"),
    "cvt_f32_f16": elementwise("cvt_f32_f16", "uint16"),
    "cvt_f32_bf16": elementwise("cvt_f32_bf16", "uint16"),
    "cvt_rn_f16x2_f32": narrowing("cvt_rn_f16x2_f32"),
    "cvt_rn_bf16x2_f32": narrowing("cvt_rn_bf16x2_f32"),
    "tid_x_again": "  at<int>(p.out)[i] = tid_x_again();",
    "prefetch_l1": """
  prefetch_l1(&at<uint32>(p.x)[i]);
  at<uint32>(p.out)[i] = at<uint32>(p.x)[i];
""",
    "mma_m16n8k16_f32_f16": mma("mma_m16n8k16_f32_f16"),
    "mma_m16n8k16_f32_bf16": mma("mma_m16n8k16_f32_bf16"),
    # A is x (8, 4), B is y (4, 8), the sum starts from z (8, 8).
    "mma_m8n8k4_f64": """
  const int g = lane / 4, t = lane % 4;
  double d[2] = {at<double>(p.z)[g * 8 + 2 * t], at<double>(p.z)[g * 8 + 2 * t + 1]};
  mma_m8n8k4_f64(d[0], d[1], at<double>(p.x)[g * 4 + t], at<double>(p.y)[t * 8 + g]);
  for (int e = 0; e < 2; ++e) at<double>(p.out)[g * 8 + 2 * t + e] = d[e];
""",
    "ldmatrix_x4": ldmatrix("ldmatrix_x4"),
    "ldmatrix_x4_trans": ldmatrix("ldmatrix_x4_trans"),
    # Lane l asks for y[l] of its 16 bytes.
    "cp_async_cg_16": """
  __shared__ __align__(16) uint8 rows[32 * 16];
  for (int c = 0; c < 16; ++c) rows[lane * 16 + c] = 0xee;
  __syncwarp();
  const uint32 count = at<uint32>(p.y)[lane];
  cp_async_cg_16(cvta_to_shared(rows + lane * 16), at<uint8>(p.x) + lane * 16, count);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncwarp();
  for (int c = 0; c < 16; ++c) at<uint8>(p.out)[c * 32 + lane] = rows[lane * 16 + c];
""",
    # Lane l copies 4, 8 and 16 bytes of its 28.
    "cp_async_ca": """
  __shared__ __align__(16) uint32 rows[3][32 * 4];
  const uint32* x = at<uint32>(p.x);
  cp_async_ca<4>(cvta_to_shared(rows[0] + lane), x + lane);
  cp_async_ca<8>(cvta_to_shared(rows[1] + lane * 2), x + 32 + lane * 2);
  cp_async_ca<16>(cvta_to_shared(rows[2] + lane * 4), x + 96 + lane * 4);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  uint32* out = at<uint32>(p.out);
  out[lane] = rows[0][lane];
  for (int c = 0; c < 2; ++c) out[32 + lane * 2 + c] = rows[1][lane * 2 + c];
  for (int c = 0; c < 4; ++c) out[96 + lane * 4 + c] = rows[2][lane * 4 + c];
""",
    # Four groups; each is read as soon as the wait says that it is there.
    "cp_async_wait_group": """
  __shared__ __align__(16) uint32 rows[4][32 * 4];
  for (int n = 0; n < 4; ++n) {
    cp_async_cg_16(cvta_to_shared(rows[n] + lane * 4), at<uint32>(p.x) + (n * 32 + lane) * 4, 16);
    cp_async_commit_group();
  }
  uint32* out = at<uint32>(p.out);
  cp_async_wait_group<3>();
  for (int c = 0; c < 4; ++c) out[lane * 4 + c] = rows[0][lane * 4 + c];
  cp_async_wait_group<2>();
  for (int c = 0; c < 4; ++c) out[(32 + lane) * 4 + c] = rows[1][lane * 4 + c];
  cp_async_wait_group<0>();
  for (int n = 2; n < 4; ++n) {
    for (int c = 0; c < 4; ++c) out[(n * 32 + lane) * 4 + c] = rows[n][lane * 4 + c];
  }
""",
    # Each lane reads the two numbers of another one.
    "ld_shared_v2_f64": """
  __shared__ __align__(16) double rows[32 * 2];
  for (int c = 0; c < 2; ++c) rows[lane * 2 + c] = at<double>(p.x)[lane * 2 + c];
  __syncwarp();
  double back[2];
  ld_shared_v2_f64(back, cvta_to_shared(rows + (31 - lane) * 2));
  for (int c = 0; c < 2; ++c) at<double>(p.out)[lane * 2 + c] = back[c];
""",
    # What a wrapper writes C++ reads, and the other way round.
    "shared": """
  __shared__ __align__(16) uint32 words[4][32 * 4];
  const uint32* x = at<uint32>(p.x) + lane * 4;
  const uint32 four[4] = {x[0], x[1], x[2], x[3]};
  st_shared_v4_b32(cvta_to_shared(words[0] + lane * 4), four);
  for (int c = 0; c < 4; ++c) st_shared_b32(cvta_to_shared(words[1] + c * 32 + lane), x[c]);
  for (int c = 0; c < 4; ++c) words[2][lane * 4 + c] = x[c];
  for (int c = 0; c < 4; c += 2) {
    st_shared_v2_b32(cvta_to_shared(words[3] + lane * 4 + c), x[c], x[c + 1]);
  }
  __syncwarp();
  uint32 back[4];
  ld_shared_v4_b32(back, cvta_to_shared(words[2] + (31 - lane) * 4));
  uint32* out = at<uint32>(p.out) + lane * 16;
  for (int c = 0; c < 4; ++c) {
    out[c] = words[0][(31 - lane) * 4 + c];
    out[4 + c] = words[1][c * 32 + 31 - lane];
    out[8 + c] = back[c];
    out[12 + c] = words[3][(31 - lane) * 4 + c];
  }
""",
}


def build(name, target):
    source = INCLUDES + AT + PREAMBLE + SOURCES[name] + "\n}\n"
    return compile.compile_source(f"ptx-{name}", source.encode(), target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", SOURCES)
def test_compiles_without_a_gpu(name, target):
    log = build(name, target).log
    assert "warning" not in log
    assert compile.resource_report(log)[1:4] == (0, 0, 0)


def test_no_wrapper_is_left_out():
    assert len(WRAPPERS) >= 40
    tested = "".join([*SOURCES.values(), *SM90_SOURCES.values()])
    assert set(re.findall(r"\w+", tested)) >= WRAPPERS


@pytest.fixture(scope="module")
def run(cupy):
    """Run a kernel on NumPy arrays x, y, z; the result has the shape and type of `out`."""
    from fa_cupy.gpu.driver.launch import launch

    def run(name, out, *inputs, threads=32):
        target = devices.current_target()
        if target is None:
            pytest.skip("the kernels do not run on this device")
        kernel = compile.load_cubin(build(name, target).cubin, "test", cupy.cuda.Device().id)
        arrays = [cupy.asarray(x.reshape(-1).view(np.uint8)) for x in inputs]
        result = cupy.full(np.prod(out[0], dtype=int) * np.dtype(out[1]).itemsize, 0xEE, np.uint8)
        params = np.zeros(1, PARAMS)
        for field, array in zip(PARAMS.names, arrays, strict=False):
            params[field] = array.data.ptr
        params["out"] = result.data.ptr
        blocks, rest = divmod(threads, min(threads, 128))
        assert not rest
        launch(kernel, blocks, min(threads, 128), 0, params)
        return cupy.asnumpy(result).view(out[1]).reshape(out[0])

    return run


def padded(values):
    """As float32, the last repeated up to whole blocks."""
    values = np.asarray(values, np.float32).reshape(-1)
    return np.pad(values, (0, -len(values) % 128), mode="edge")


rng = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-40, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.gpu
def test_ex2_approx_ftz(run):
    x = padded([*np.linspace(-125.9, 127.9, 2**14), *rng.standard_normal(2**14)])
    got = run("ex2_approx_ftz", (x.shape, np.float32), x, threads=x.size)
    np.testing.assert_allclose(got, np.exp2(x.astype(np.float64)), rtol=2**-22)
    special = padded([-np.inf, -1e30, -127.0, -126.0, -0.0, 0.0, 1e-40, 128.0, np.inf, np.nan])
    wanted = [0.0, 0.0, 0.0, 2.0**-126, 1.0, 1.0, 1.0, np.inf, np.inf, np.nan]
    got = run("ex2_approx_ftz", (special.shape, np.float32), special, threads=special.size)
    np.testing.assert_array_equal(got[: len(wanted)], np.float32(wanted))


@pytest.mark.gpu
def test_lg2_approx_ftz(run):
    x = padded(np.exp2(np.linspace(-125, 127, 2**14)))
    got = run("lg2_approx_ftz", (x.shape, np.float32), x, threads=x.size)
    np.testing.assert_allclose(got, np.log2(x.astype(np.float64)), rtol=2**-22, atol=2**-22)
    special = padded([0.0, -0.0, 1e-40, 1.0, np.inf, -1.0, np.nan])
    wanted = [-np.inf, -np.inf, -np.inf, 0.0, np.inf, np.nan, np.nan]
    got = run("lg2_approx_ftz", (special.shape, np.float32), special, threads=special.size)
    np.testing.assert_array_equal(got[: len(wanted)], np.float32(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_fma_of_packed_pairs(run, dtype):
    name = "fma_rn_f16x2" if dtype is np.float16 else "fma_rn_bf16x2"
    special = padded([*SPECIAL, 65504.0, 1e-7])
    with np.errstate(all="ignore"):
        x, y, z = (
            np.r_[rng.permutation(special), rng.permutation(special), rng.standard_normal(2**14)]
            .astype(np.float32)
            .astype(dtype)
            for _ in range(3)
        )
    got = run(
        name, (x.size // 2, np.uint32), x.view(np.uint32), y.view(np.uint32), z.view(np.uint32),
        threads=x.size // 2,
    ).view(dtype)  # fmt: skip
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
        wanted = exact.astype(dtype)
    # Rounding twice, in NumPy's conversion of bfloat16, may move a tie by a bit.
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_allclose(
        got.astype(np.float64), wanted.astype(np.float64),
        rtol=float(ml_dtypes.finfo(dtype).eps) if dtype is not np.float16 else 0,
    )  # fmt: skip
    zeros = np.zeros_like(x)
    probe = run(
        name, (x.size // 2, np.uint32), x.view(np.uint32), zeros.view(np.uint32),
        zeros.view(np.uint32), threads=x.size // 2,
    )  # fmt: skip
    finite = np.isfinite(x.astype(np.float32)).reshape(-1, 2).all(axis=1)
    np.testing.assert_array_equal(probe == 0, finite)


@pytest.mark.gpu
def test_rcp_approx_ftz(run):
    x = padded(rng.choice([-1.0, 1.0], 2**14) * 10.0 ** rng.uniform(-37.5, 37.5, 2**14))
    got = run("rcp_approx_ftz", (x.shape, np.float32), x, threads=x.size)
    np.testing.assert_allclose(got, 1 / x.astype(np.float64), rtol=2**-22)
    special = padded([0.0, -0.0, 1e-40, 3e38, np.inf, -np.inf, np.nan])
    got = run("rcp_approx_ftz", (special.shape, np.float32), special, threads=special.size)
    np.testing.assert_array_equal(got[:7], [np.inf, -np.inf, np.inf, 0.0, 0.0, 0.0, np.nan])


@pytest.mark.gpu
def test_rcp_approx(run):
    """Also of numbers whose reciprocals are subnormal."""
    x = padded(rng.choice([-1.0, 1.0], 2**14) * 10.0 ** rng.uniform(-37.5, 38.5, 2**14))
    got = run("rcp_approx", (x.shape, np.float32), x, threads=x.size)
    want = 1 / x.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=2**-22, atol=2.0**-148)
    special = padded([0.0, -0.0, np.inf, -np.inf, np.nan])
    got = run("rcp_approx", (special.shape, np.float32), special, threads=special.size)
    np.testing.assert_array_equal(got[:5], [np.inf, -np.inf, 0.0, 0.0, np.nan])


@pytest.mark.gpu
def test_select_le(run):
    x, limits = (padded(rng.choice(SPECIAL, 2**10)) for _ in range(2))
    chosen = padded(rng.standard_normal(2**10))
    got = run("select_le", (x.shape, np.float32), x, limits, chosen, threads=x.size)
    np.testing.assert_array_equal(got, np.where(x <= limits, chosen, np.float32(-1)))


@pytest.mark.gpu
def test_rcp_rn(run):
    x = padded(
        [
            *SPECIAL,
            1e-39,
            3e-39,
            *(rng.standard_normal(2**14) * 10.0 ** rng.uniform(-20, 20, 2**14)),
        ]
    )
    got = run("rcp_rn", (x.shape, np.float32), x, threads=x.size)
    with np.errstate(divide="ignore", over="ignore"):
        np.testing.assert_array_equal(got, np.float32(1) / x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"), [("cvt_f32_f16", np.float16), ("cvt_f32_bf16", ml_dtypes.bfloat16)]
)
def test_widening_is_exact_for_every_value(run, name, dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    got = run(name, (bits.shape, np.float32), bits, threads=bits.size)
    with np.errstate(invalid="ignore"):  # signalling NaN
        np.testing.assert_array_equal(got, bits.view(dtype).astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("cvt_rn_f16x2_f32", np.float16), ("cvt_rn_bf16x2_f32", ml_dtypes.bfloat16)],
)
def test_narrowing_rounds_to_nearest_even_the_first_one_low(run, name, dtype):
    # Every value of the narrow type, and what lies half way to the next one.
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.arange(0x7F00 if dtype != np.float16 else 0x7C00, dtype=np.uint16)
        exact = exact.view(dtype).astype(np.float32)
        halfway = (exact[:-1] + exact[1:]) / 2
        values = [exact, halfway, np.nextafter(halfway, np.float32(0)), rng.standard_normal(999)]
        low = padded(np.concatenate([*values, SPECIAL, [65519.9, 65520.0, 1e-8]]))
        high = -low[::-1].copy()
        got = run(name, ((low.size, 2), np.uint16), low, high, threads=low.size)
        for column, source in ((0, low), (1, high)):
            wanted = source.astype(dtype)
            np.testing.assert_array_equal(
                got[:, column].copy().view(dtype).astype(np.float32), wanted.astype(np.float32)
            )


@pytest.mark.gpu
def test_tid_x_again(run):
    got = run("tid_x_again", ((3, 128), np.int32), threads=3 * 128)
    np.testing.assert_array_equal(got, np.broadcast_to(np.arange(128), (3, 128)))


@pytest.mark.gpu
def test_prefetch_l1(run):
    """What was asked for ahead of time is what is there."""
    x = np.arange(384, dtype=np.uint32)
    np.testing.assert_array_equal(run("prefetch_l1", (x.shape, x.dtype), x, threads=x.size), x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mma_m16n8k16_f32_f16", np.float16), ("mma_m16n8k16_f32_bf16", ml_dtypes.bfloat16)],
)
def test_mma(run, name, dtype):
    # Integers: every sum is exact, so a misplaced element cannot hide behind a tolerance.
    a, b = rng.integers(-16, 17, (16, 16)), rng.integers(-16, 17, (16, 8))
    c = rng.integers(-1000, 1000, (16, 8))
    inputs = a.astype(dtype), b.astype(dtype), c.astype(np.float32)
    got = run(name, ((16, 8), np.float32), *inputs)
    np.testing.assert_array_equal(got, a @ b + c)


@pytest.mark.gpu
def test_mma_of_float64(run):
    mma_of_float64(run, "mma_m8n8k4_f64", 8, 4)


@pytest.mark.gpu
def test_loads_of_float64(run):
    x = rng.standard_normal((32, 2))
    np.testing.assert_array_equal(run("ld_shared_v2_f64", (x.shape, x.dtype), x), x[::-1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ldmatrix_x4", "ldmatrix_x4_trans"])
def test_ldmatrix(run, name):
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    got = run(name, ((32, 4, 2), np.uint16), matrices)
    if name.endswith("trans"):
        matrices = matrices.swapaxes(1, 2)
    # Lane l, register m: row l / 4, columns 2 * (l % 4) and + 1 of matrix m.
    np.testing.assert_array_equal(got, matrices.reshape(4, 32, 2).swapaxes(0, 1))


@pytest.mark.gpu
def test_cp_async_fills_with_zeros(run):
    x = rng.integers(1, 255, (32, 16), dtype=np.uint8)
    count = (np.arange(32, dtype=np.uint32) * 5) % 17
    got = run("cp_async_cg_16", ((16, 32), np.uint8), x, count).T
    np.testing.assert_array_equal(got, np.where(np.arange(16) < count[:, None], x, 0))


@pytest.mark.gpu
def test_cp_async_of_any_size(run):
    x = rng.integers(0, 2**32, 7 * 32, dtype=np.uint32)
    np.testing.assert_array_equal(run("cp_async_ca", (x.shape, x.dtype), x), x)


@pytest.mark.gpu
def test_cp_async_wait_group(run):
    x = rng.integers(0, 2**32, (4, 32, 4), dtype=np.uint32)
    np.testing.assert_array_equal(run("cp_async_wait_group", (x.shape, x.dtype), x), x)


@pytest.mark.gpu
def test_shared_memory_accesses(run):
    x = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    got = run("shared", ((32, 4, 4), np.uint32), x)
    np.testing.assert_array_equal(got, np.repeat(x[::-1, None], 4, 1))
