"""The kernels' own source, run on the CPU: each row of the table, seeds, and planted bugs."""

import functools
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import reference
from fa_cupy.gpu.driver.compile import ROOT
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from fa_cupy.gpu.kernels.registry import GRADIENTS, SPLITKV
from tests.support.every_run import examples, only, some
from tests.support.kernel_attention import FORWARD_DTYPES, check, draw
from tests.support.planted import plant
from tests.support.seeds import FAMILIES, Chosen, one, sanitizer
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

PLAIN = {(row.source, row.dim): row for row in VARIANTS if not row.sparse}
SM80 = PLAIN["attention/fwd_sm80", 128]
SM90 = D64, D128 = PLAIN["attention/fwd_sm90", 64], PLAIN["attention/fwd_sm90", 128]


@pytest.mark.parametrize(
    "row",
    some(VARIANTS, lambda row: (row.source, row.sparse), 2),
    ids=lambda row: row.name,
)
@pytest.mark.parametrize("options", only([{}, {"softcap": 3.0}], {"softcap": 3.0}), ids=str)
def test_every_row(row, options):
    dtype, dim = FORWARD_DTYPES[row.dtype], row.dim
    q, k, v = (draw(2, n, dim, dtype=dtype, seed=i) for i, n in enumerate((150, 200, 200)))
    if row.sparse:
        options = dict(options)
        options["mask"] = np.random.default_rng(0).random((150, 200)) < 0.5
    check(row, q, k, v, seed=1, **options)
    check(row, q, k, v, seed=2, is_causal=True, causal_align="bottom_right", **options)
    window = {"window": (70, 5), "causal_align": "top_left"}
    check(row, q[:1], k[:1], v[:1, :, : dim - 8], seed=3, **window, **options)


# Both tensor core instructions: a product whose numbers are all the same, added to a number.
PROBE = """
#include "ptx/mma_sync.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

struct Params {
  float* out;
  float c;
  uint32 a, b;
};

extern "C" __global__ void probe(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32 shared = cvta_to_shared(shared_bytes);
  uint32 a[4], b[4];
  for (int i = 0; i < 4; ++i) a[i] = params.a, b[i] = params.b;
  if (threadIdx.x < 64) st_shared_v4_b32(shared + 16 * threadIdx.x, b);
  fence_proxy_async_shared();
  bar_sync(0, 128);
  float d[1][4], e[4];
  for (int i = 0; i < 4; ++i) d[0][i] = e[i] = params.c;
  wgmma_fence();
  wgmma_m64k16_rs<false, 8, kKMajor>(d, a, wgmma_descriptor(shared, 0), 1);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  mma_m16n8k16_f32_f16(e, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) {
    params.out[threadIdx.x * 4 + i] = e[i];
    params.out[512 + threadIdx.x * 4 + i] = d[0][i];
  }
}
"""


# Of the accumulator's ulp, with either sign: what is added, what arrives, what arrives truncated.
@pytest.mark.parametrize(
    ("added", "rounded", "truncated"), [(17.5, 18, 16), (1.75, 2, 0), (0, 0, 0)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_tensor_cores(added, rounded, truncated, sign, tmp_path):
    (tmp_path / "probe.cu").write_text(PROBE)
    path = emulator.build("probe-sums", tmp_path / "probe.cu", (), ("probe",))
    out = np.empty(1024, np.float32)
    a, b = (np.full(2, x, np.float16).view(np.uint32)[0] for x in (sign * added / 16, 2.0**-13))
    fields = [("out", "u8"), ("c", "f4"), ("a", "u4"), ("b", "u4")]
    for steps, truncating in ((rounded, False), (truncated, True)):
        params = np.array([(out.ctypes.data, 1536, a, b)], np.dtype(fields, align=True))
        emulator.launch(path, "probe", 1, 128, 1024, params, 0, truncating)
        assert set((out - 1536) * 2**13) == {sign * steps}


# The first block waits for the second one.
WAITING = """
#include "ptx/atomic.cuh"
#include "ptx/shared.cuh"

struct Params {
  uint32 *word, *out;
};

extern "C" __global__ void waiting(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  uint32& mine = *reinterpret_cast<uint32*>(shared_bytes);
  if (threadIdx.x == 0) mine = 10 + blockIdx.x;
  __syncthreads();
  if (blockIdx.x == 0) {
    while (ld_acquire_gpu_u32(params.word) == 0) {
    }
  } else if (threadIdx.x == 0) {
    red_release_gpu_add_u32(params.word, 7);
  }
  params.out[blockIdx.x * 32 + threadIdx.x] = mine;
}
"""


def test_blocks_that_wait_for_each_other(tmp_path):
    (tmp_path / "waiting.cu").write_text(WAITING)
    path = emulator.build("probe-waiting", tmp_path / "waiting.cu", (), ("waiting",))
    for seed in range(10):
        word, out = np.zeros(1, np.uint32), np.zeros((3, 32), np.uint32)
        params = np.array([(word.ctypes.data, out.ctypes.data)], "u8, u8")
        emulator.launch(path, "waiting", 3, 32, 1024, params, seed, together=2)
        assert (out.T == [10, 11, 12]).all()
        assert word == 14
        word[:] = 0
        with pytest.raises(emulator.EmulationError, match=r"deadlock; \[ld.acquire: warps 0\]"):
            emulator.launch(path, "waiting", 3, 32, 1024, params, seed)


# A loop that nobody ends, alone or with others.
ENDLESS = """
#include "ptx/shared.cuh"

struct Params {
  const int* word;
  int together;
};

extern "C" __global__ void endless(const __grid_constant__ Params params) {
  const volatile int* word = params.word;
  while (*word == 0) {
    if (params.together) __syncwarp();
  }
}
"""


@pytest.mark.long
@pytest.mark.parametrize("together", only((False, True), True))
def test_a_loop_without_an_end_is_reported(together, tmp_path):
    (tmp_path / "endless.cu").write_text(ENDLESS)
    path = emulator.build("probe-endless", tmp_path / "endless.cu", (), ("endless",))
    word = np.zeros(1, np.int32)
    params = np.array(
        [(word.ctypes.data, together)], np.dtype([("", "u8"), ("", "i4")], align=True)
    )
    with pytest.raises(emulator.EmulationError, match=r"it does not end; .*warps 0"):
        emulator.launch(path, "endless", 1, 32, 1024, params, 0)


@pytest.mark.long
@pytest.mark.parametrize("row", [SM80, *SM90], ids=lambda row: row.name)
def test_truncating_sums(row):
    q, k, v = (draw(2, n, row.dim, dtype=FORWARD_DTYPES[row.dtype], seed=n) for n in (70, 200, 200))
    check(row, q, k, v, truncating=True)
    rounded, truncated = (
        calls.attention(row, q, k, v, truncating=truncating)[1] for truncating in (False, True)
    )
    assert (rounded != truncated).any()


@pytest.mark.parametrize("row", SM90, ids=lambda row: row.name)
def test_what_only_the_hopper_kernel_has(row):
    dtype = FORWARD_DTYPES[row.dtype]
    # Heads of one group in a tile; scores that pass every reference; rows without keys; hidden NaN.
    q, k, v = (draw(1, h, n, 64, dtype=dtype, seed=n) for h, n in ((8, 5), (2, 300), (2, 300)))
    check(row, q, k, v, is_causal=True, causal_align="bottom_right")
    q, k, v = (draw(2, n, row.dim, dtype=dtype, seed=n, scale=3) for n in (130, 500, 500))
    for steep in (np.linspace(0.01, 2, 500), np.linspace(2, 0.01, 500)):
        check(row, q, (k.astype(np.float32) * steep[:, None]).astype(dtype), v)
    q, k, v = (draw(300, row.dim, dtype=dtype, seed=i) for i in range(3))
    check(row, q, k[:40], v[:40], is_causal=True, causal_align="bottom_right")
    k[200:], v[200:] = np.nan, np.nan
    got, _ = calls.attention(row, q[:200], k, v, is_causal=True, causal_align="top_left")
    want, _ = reference.attention(q[:200], k[:200], v[:200], is_causal=True)
    assert np.isfinite(got.astype(np.float32)).all()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("dim", "size"),
    some(itertools.product((64, 128), (5000, 10000, 20000, 30000, 60000)), lambda pair: pair[0], 2),
)
def test_scores_of_any_size(dim, size):
    """Beyond 2**24 a product with the scale is far from its rounded value, in units of log2."""
    row = next(r for r in VARIANTS if (r.dtype, r.dim, r.targets) == ("float16", dim, ("sm_90a",)))
    q = np.full((130, dim), size, np.float16)
    k = np.full((300, dim), size, np.float16)
    v = np.full((300, dim), 0.75, np.float16)
    check(row, q, k, v)
    k[::3] /= 2
    check(row, q, k, v)


def test_a_lost_row_does_not_spread():
    row = SM90[1]
    q, k, v = (draw(n, row.dim, dtype=FORWARD_DTYPES[row.dtype], seed=n) for n in (100, 400, 400))
    want, _ = calls.attention(row, q, k, v)
    q[17] = np.nan
    got, lse = calls.attention(row, q, k, v)
    others = np.arange(100) != 17
    assert got[others].tobytes() == want[others].tobytes()
    assert np.isnan(got[17].astype(np.float32)).all()
    assert np.isnan(lse[17])


@examples(25)
@given(
    row=st.sampled_from(SM90),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    window=st.sampled_from([None, (0, 0), (64, 0), (0, 63), (130, 70), (None, 5)]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 1), (6, 2)]),
    dim=st.sampled_from([8, 40, 64]),
    seed=st.integers(0, 2**32),
)
def test_any_call_with_any_schedule(row, lengths, window, heads, dim, seed):
    dtype = FORWARD_DTYPES[row.dtype]
    q = draw(1, heads[0], lengths[0], dim, dtype=dtype, seed=1)
    k, v = (draw(1, heads[1], lengths[1], dim, dtype=dtype, seed=i) for i in (2, 3))
    options = {"window": window, "causal_align": "bottom_right"} if window else {}
    check(row, q, k, v, seed=seed, **options)


@examples(12)
@given(st.integers(0, 2**40))
@pytest.mark.parametrize("family", ["attention", "mask"])
def test_any_row_with_any_seed(family, seed):
    assert one(seed, Chosen(family)) is None


@pytest.mark.parametrize("row", SM90, ids=lambda row: row.name)
def test_the_schedule_does_not_show(row):
    q, k, v = (draw(3, n, row.dim, dtype=FORWARD_DTYPES[row.dtype]) for n in (200, 420, 420))
    options = {"is_causal": True, "causal_align": "bottom_right"}
    found = {
        tuple(x.tobytes() for x in calls.attention(row, q, k, v, seed=seed, **options))
        for seed in range(10)
    }
    assert len(found) == 1


# Of the fences in the kernel, the one before the output is stored.
UNFENCED = (
    "fence_proxy_async_shared(); __syncwarp(); release(c, c.shared.out_full",
    "__syncwarp(); release(c, c.shared.out_full",
)
WORK_BEYOND = ("work = shared.work[stage];", "work = shared.work[stage + kWorkStages];")
# What stands in a kernel, what is put there instead, on which row, and what is said about it; where
# nothing is said, what comes out differs.
BUGS = {
    "K is read before it has landed": (
        D128,
        r"wgmma reads .* not yet.*fwd_sm90.cu:\d+",
        ("wait(c.shared.k_full[at.k.index()], at.k.parity());\n  warp_scheduler_sync(c);\n"
         "  wgmma_fence();\n  gemm_qk<kCols>",
         "warp_scheduler_sync(c);\n  wgmma_fence();\n  gemm_qk<kCols>"),
    ),
    "V is read before it has landed": (
        D128,
        "wgmma reads .* not yet",
        ("wait(c.shared.v_full[at.v.index()], at.v.parity());\n  wgmma_fence", "wgmma_fence"),
    ),
    "the parity of Q is wrong": (
        D128,
        "ldmatrix reads .* not yet",
        ("q_pipe.parity());\n    q_tile =", "q_pipe.parity() ^ 1);\n    q_tile ="),
    ),
    "K is given back before it has been read": (
        D128,
        "wgmma reads .* not yet",
        ("    release(c, c.shared.k_empty[at.k.index()]);\n  }", "  }"),
        ("if constexpr (kOverlapSoftmaxPv && !kFirst) {",
         "release(c, c.shared.k_empty[at.k.index()]);\n  if constexpr (kOverlapSoftmaxPv && "
         "!kFirst) {"),
    ),
    "K is never given back": (
        D128,
        "deadlock; .*mbarrier: warps 0 1",
        ("    release(c, c.shared.k_empty[at.k.index()]);\n  }", "  }"),
    ),
    "scores are used before the product is done": (
        D128,
        "a load from registers of a wgmma in flight",
        ("{\n    wgmma_wait_group<1>();", "{\n    wgmma_wait_group<2>();"),
    ),
    "the output is scaled before P V is done": (
        D128,
        "a load from registers of a wgmma in flight",
        ("wgmma_wait_group<0>();\n  if (moved)", ";\n  if (moved)"),
    ),
    "accumulators are set while they are in flight": (
        D128,
        "a store to registers of a wgmma in flight",
        ("if constexpr (!kExclusiveMma) warp_scheduler_arrive(c);", "s[0][0][0] = 0.0f;"),
    ),
    "registers of A are set while they are in flight": (
        D128,
        "a store to registers of a wgmma in flight",
        ("if constexpr (!kExclusiveMma) warp_scheduler_arrive(c);", "q[0][0] = 0;"),
    ),
    "registers are not fenced": (
        D128,
        "wgmma without wgmma.fence",
        ("wgmma_fence();\n  gemm_qk<kCols>", "gemm_qk<kCols>"),
    ),
    "fewer bytes are expected than come": (
        D64,
        "deadlock",
        ("mbarrier_arrive_expect_tx(barrier, kKTileBytes + extra_bytes)",
         "mbarrier_arrive_expect_tx(barrier, kKTileBytes - 16)"),
    ),
    "half of a tile is never loaded": (
        D128,
        "wgmma reads .* holds nothing",
        ("mbarrier_arrive_expect_tx(barrier, kKTileBytes + extra_bytes)",
         "mbarrier_arrive_expect_tx(barrier, kKTileBytes / 2)"),
        ("block < kBlocks; ++block) {\n        cp_async_bulk_tensor_5d_load(cvta_to_shared(&tiles",
         "block < 1; ++block) {\n        cp_async_bulk_tensor_5d_load(cvta_to_shared(&tiles"),
    ),
    "work is announced but not written": (
        D64,
        "a load reads .* holds nothing",
        (re.compile(r"shared\.work\[work_pipe\.index\(\)\] = work;|work\.q_begin = q_begin;"), ""),
    ),
    "a turn is not passed on": (
        D64,
        "deadlock; .*bar.sync: warps",
        ("  warp_scheduler_sync(c);\n  warp_scheduler_arrive(c);\n", "  warp_scheduler_sync(c);\n"),
    ),
    "a lane speaks for others that still wait": (D64, "", ("__syncwarp();  // or a lane", "//")),
    "a lane is missing from a shuffle": (
        D64,
        "threads of one warp are at|others wait for it at|deadlock",
        ("  softmax.reduce_row_sum();\n", "  if (c.lane != 5) softmax.reduce_row_sum();\n"),
    ),
    "a lane leaves early": (
        D64,
        "others wait for it at",
        ("    epilogue(c, at, softmax", "    if (lane == 5) return;\n    epilogue(c, at, softmax"),
    ),
    "Q is loaded while the output is stored": (
        D64,
        "a TMA store reads .* not yet",
        ("      cp_async_bulk_wait_group_read<0>();\n", ""),
    ),
    "the output is not fenced before it is stored": (
        D64,
        r"a TMA store without fence.proxy.async after what thread \d+ has written",
        UNFENCED,
    ),
    "a box is misaligned": (
        D128,
        "misaligned address of a box",
        ("[block * kTileN * 128])", "[block * kTileN * 128 + 64])"),
    ),
    "ldmatrix is misaligned": (
        D128,
        "misaligned address in shared memory",
        ("ldmatrix_x4(q[step], QTile::at(q_address, 0, step))",
         "ldmatrix_x4(q[step], QTile::at(q_address, 0, step) + 8)"),
    ),
    "work is written beyond its place": (
        D64,
        "address beyond shared memory",
        WORK_BEYOND,
    ),
    "a stage is read that is not waited for": (
        SM80,
        "ldmatrix reads .* not yet",
        ("kStages > 1 ? kStages - 2 : 0;", "kStages > 1 ? kStages - 1 : 0;"),
    ),
    "a stage is read before all have waited for it": (
        SM80,
        "ldmatrix reads .* not yet",
        ("kLaterGroups>();\n  }\n  __syncthreads();", "kLaterGroups>();\n  }"),
    ),
}  # fmt: skip


@functools.cache
def solved(row):
    """A call that bugs are planted for, its options and its result."""
    given = [draw(3, n, row.dim, dtype=FORWARD_DTYPES[row.dtype], scale=2) for n in (200, 420, 420)]
    options = {"is_causal": True, "causal_align": "bottom_right"}
    return given, options, calls.attention(row, *given, **options)


@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0].name, 2))
def test_a_planted_bug_is_found(bug, tmp_path):
    row, message, *changes = BUGS[bug]
    source = plant(tmp_path, row.source, *changes)
    (q, k, v), options, want = solved(row)
    for seed in range(60):
        try:
            got = calls.attention(row, q, k, v, seed=seed, source=source, **options)
        except emulator.EmulationError as error:
            if re.search(message, str(error)):
                return
            continue
        if not message and any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            return
    pytest.fail("60 seeds did not show it")


def command(*arguments):
    """What `python -m validation.emulator` returns and prints."""
    done = subprocess.run(
        [sys.executable, "-m", "validation.emulator", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


# Of each family some rows, a kernel, what stands there and what is put in its place.
BROKEN = {
    "attention": ("sm90-bfloat16-d64", "attention/fwd_sm90", *UNFENCED),
    "mask": (
        "sm80-float16-d192",
        "attention/fwd_sm80",
        "in_block == 0 || after_full == 0",
        "after_full == 0",
    ),
    "product": (
        "sm80-float16-d32",
        "linear/state_prefix_sum",
        "sum += segment_sums[i];",
        "sum = segment_sums[i];",
    ),
    "backward": ("sm90-float16-d64", "attention/bwd_preprocess", "sum - dlse_in[i]", "sum"),
}


@pytest.mark.long
@pytest.mark.parametrize("family", only(BROKEN, "product"))
def test_a_failing_seed_replays(family, tmp_path):
    part, kernel, *change = BROKEN[family]
    source = plant(tmp_path, kernel, change)
    given = ("--family", family, "--row", part, "--source", source)
    code, text = command("--seeds", 8, "--first", 40, *given)
    assert code == 1
    again = r"(?ms)^(seed \d+: .*?)\nagain: python -m validation.emulator ([^\n]*)"
    found = re.findall(again, text)
    assert f"8 seeds over {len(Chosen(family, part, source).kinds())} rows" in text
    assert f" {len(found)} failed" in text
    assert " ".join(map(str, ("--seeds 1", *given))) in found[-1][1]
    code, text = command(*found[-1][1].split())
    assert code == 1
    assert re.findall(again, text) == found[-1:]


def test_seeds_are_drawn_from_all_families_or_one():
    kinds = {family: Chosen(family).kinds() for family in FAMILIES}
    assert Chosen().kinds() == [kind for family in kinds.values() for kind in family]
    launched = {row.name for rows, _ in Chosen().kinds() for row in rows}
    own = "dbias", "fp32", "fp64"  # own tests
    rows = [row for row in GRADIENTS if not any(x in row.entry for x in own)]
    assert launched == {row.name for row in (*VARIANTS, *SPLITKV, *PRODUCTS, *rows)}
    scans = {row.name for row in PRODUCTS if row.source == "linear/state_prefix_sum"}
    assert len(scans) == 2
    for scan in scans:
        assert {rows[-1].name for rows, _ in Chosen(part=scan).kinds()} == {scan}
    code, text = command("--seeds", 1, "--family", "mask", "--row", "linear")
    assert (code, text) == (2, "emulator: no row for --family mask --row linear\n")


# Beyond an array in global memory, and beyond shared memory.
BEYOND = {
    "lse": (SM80, "if (row < params.q_len) {", "if (row < params.q_len + 64) {"),
    "work": (
        D64,
        *WORK_BEYOND,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "planted_there"), [("lse", True), ("work", False), ("work", True)]
)
def test_address_sanitizer(name, planted_there, tmp_path):
    if sanitizer() is None:
        pytest.skip("the compiler has no AddressSanitizer")
    row, *change = BEYOND[name]
    source = plant(tmp_path, row.source, *[change] * planted_there)
    code, text = command("--sanitize", "--seeds", 4, "--row", row.name, "--source", source)
    if planted_there:
        assert code != 0
        assert re.search(r"ERROR: AddressSanitizer.*\nWRITE of size", text)
        assert f"{source.name}:" in text
    else:
        assert code == 0, text
        assert "4 seeds over 1 rows, 0 failed" in text
