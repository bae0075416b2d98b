"""The command line, without a GPU."""

import importlib.util
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

import fa_cupy
from fa_cupy.__main__ import COMMANDS, main
from fa_cupy.cli.warmup import (
    serving,
    serving_backward,
    serving_dropout,
    serving_packed,
    serving_pairs,
    serving_products,
    serving_splitkv,
)
from fa_cupy.core import attention_problem
from fa_cupy.cpu import thread_pool
from fa_cupy.gpu.driver import compile, cubin_cache, devices
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels import attention_backward
from fa_cupy.gpu.kernels.attention import row_intervals
from fa_cupy.gpu.kernels.attention.attention_params import MAX_LENGTH, Traits
from fa_cupy.gpu.kernels.attention.splitkv import fwd_splitkv
from fa_cupy.gpu.kernels.backward import Wanted
from fa_cupy.gpu.kernels.forward import VARIANTS, Call, reachable, select
from fa_cupy.gpu.kernels.linear.cost_model import choose
from fa_cupy.gpu.kernels.linear.packed.sequence_spans import SEQUENCE_SPANS
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from fa_cupy.gpu.kernels.mask import dropout_mask
from fa_cupy.gpu.kernels.registry import GRADIENTS, MASKS, ROWS, SPLITKV
from tests.support.every_run import only
from validation.digest import ROOT

SERVES = select("bfloat16", 128, 128, "sm_90a")
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="needs cuda-bindings"
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch, tmp_path):
    """The same answers on every machine."""
    monkeypatch.setattr(devices, "look", lambda: devices.Found([], "none in this test"))
    monkeypatch.setenv(cubin_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_commands_are_listed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"python -m fa_cupy {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["info", "--dtype", "int8"]])
def test_wrong_arguments_end_with_status_2(argv):
    with pytest.raises(SystemExit, match="2"):
        main(argv)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fa_cupy {fa_cupy.__version__}\n"


def test_info_counts_the_cache(no_device, capsys):
    assert main(["info"]) == 0
    assert f"{no_device}: 0 kernels, 0.0 MB" in capsys.readouterr().out
    (no_device / "a.cubin").write_bytes(bytes(1_500_000))
    assert main(["info"]) == 0
    assert f"{no_device}: 1 kernels, 1.5 MB" in capsys.readouterr().out


def test_info_says_which_folder_it_refuses(no_device, capsys):
    no_device.mkdir()
    no_device.chmod(0o777)
    assert main(["info"]) == 0
    assert "has mode 777, want 700" in capsys.readouterr().out


def test_info_without_cupy_and_compiler(no_device):
    code = (
        "import sys\n"
        "sys.modules.update(cupy=None, cuda=None)\n"
        "from fa_cupy.__main__ import main\n"
        "sys.exit(main(['info', '--shape', '2,8,64']))\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        cubin_cache.FOLDER_VARIABLE: str(no_device),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'fa_cupy[cuda13]'" in done.stdout
    assert "NumPy arrays only" in done.stdout


@pytest.mark.parametrize(
    ("receipt", "shown"),
    [
        ('{"pending": {"why": "no GPU could be had", "since": "2026-01-02"}}', "PENDING since"),
        (
            '{"run": {"date": "2026-01-02T03:04", "environment": {"device": "NVIDIA H200"},'
            ' "tests": {"passed": {"a": 3, "b": 4}, "failed": ["c"]}}}',
            "7 passed, 1 failed, 2026-01-02 on NVIDIA H200",
        ),
    ],
)
def test_info_shows_the_receipt(tmp_path, monkeypatch, capsys, receipt, shown):
    (tmp_path / "validation/results").mkdir(parents=True)
    (tmp_path / "validation/results/receipt.json").write_text(receipt)
    monkeypatch.setattr(compile, "ROOT", tmp_path)
    assert main(["info"]) == 0
    assert shown in capsys.readouterr().out


def test_info_knows_what_tensor_maps_cannot_walk(capsys):
    assert main(["info", "--shape", "1,2,300,100", "--target", "sm_90a"]) == 0
    assert "sm_90a: attention_fwd_sm80-float16-d128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--dtype", "bf16", "--target", "sm_90a"], f"sm_90a: {SERVES.name}"),
        (
            ["--dtype", "float32", "--target", "sm_90a"],
            "sm_90a: attention_fwd_fp32_sm90-float32-d128",
        ),
        (
            ["--dtype", "float32", "--shape", "1,2,300,128", "--target", "sm_90a"],
            "sm_90a: attention_fwd_fp32-float32-d128",
        ),
        (["--dtype", "float64", "--target", "sm_90a"], "sm_90a: attention_fwd_fp64-float64-d128"),
        (
            ["--dtype", "float64", "--shape", "1,2,9,64", "--target", "sm_90a"],
            "sm_90a: attention_fwd_fp64-float64-d64",
        ),
        (
            ["--dtype", "float64", "--v-dim", "256", "--target", "sm_90a"],
            "sm_90a: attention_fwd_fp64-float64-d256",
        ),
        (
            ["--dtype", "float64", "--v-dim", "256", "--target", "sm_90a"],
            "lengths or a score: attention_bwd_dkdv_fp64-float64-d256",
        ),
        (
            ["--dtype", "float64", "--v-dim", "256", "--causal", "--target", "sm_90a"],
            "sm_90a: attention_fwd_fp64-float64-d256",
        ),
        (["--v-dim", "300", "--target", "sm_80"], "sm_80: tiled CuPy"),
        ([], f"NumPy       tiled NumPy, on {thread_pool.allowed()} thread"),
        (["--causal"], "causal: 0.275 TFLOP"),
        ([], "causal_product: chunked, 1 segment a sequence"),
        (["--dtype", "float64", "--target", "sm_80"], "linear_chunk_fp64-float64-d128"),
        (["--k-len", "2048"], "64 x 4096 queries x 2048 keys, head_dim 128, v_dim 128: 0.275"),
        ([], "no device here"),
        (["--target", "sm_90a"], "attention_backward: attention_bwd_sm90-float16-d128"),
        (
            ["--target", "sm_90a"],
            "with attention_bwd_preprocess, attention_bwd_convert_dq, attention_bwd_nonfinite",
        ),
        (["--target", "sm_90a", "--v-dim", "250"], "attention_backward: tiled CuPy, on cuBLAS"),
        (["--target", "sm_80"], "attention_backward: attention_bwd_dkdv_sm80-float16-d128"),
        (["--target", "sm_80", "--v-dim", "300"], "attention_backward: tiled CuPy, on cuBLAS"),
        (
            ["--target", "sm_90a"],
            "  with a mask: attention_bwd_sm90-float16-d128-64x128-w12-s3-spa",
        ),
        (["--target", "sm_90a"], "  with a softcap or bias: attention_bwd_sm90-float16-d128"),
        (["--target", "sm_90a"], "  rows not of 16 bytes: attention_bwd_dkdv_sm80-float16-d128"),
        (["--target", "sm_90a"], "with a softcap or bias: attention_fwd_sm90-float16-d128"),
        (["--target", "sm_90a"], "  rows not of 16 bytes: attention_fwd_sm80-float16-d128"),
        (["--target", "sm_90a"], "with a mask: attention_fwd_sm90-float16-d128-128x128-w12-s2-sp"),
        (
            ["--target", "sm_90a"],
            "with a mask, rows not of 16 bytes: attention_fwd_sm80-float16-d1",
        ),
        (["--target", "sm_80"], "with a mask: attention_fwd_sm80-float16-d128-128x64-w4-s2-sparse"),
    ],
)
def test_info_says_what_would_serve_a_call(arguments, shown, capsys):
    assert main(["info", "--shape", "4,16,4096,128", *arguments]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["1,16,65536,64", "--dtype", "bf16"],
            ["132 multiprocessors: chunked", "after linear_chunk_state"],
        ),
        (["64,16,500,64", "--dtype", "fp16"], ["132 multiprocessors: chunked", "one pass"]),
        (["1,16,4096,64", "--dtype", "fp32"], ["linear_recurrent-", "linear_low_occupancy-"]),
        (
            ["1,16,4096,300", "--dtype", "fp16"],
            ["132 multiprocessors: chunked, on cuBLAS products"],
        ),
        (
            ["1,16,4096,64", "--dtype", "fp64"],
            ["132 multiprocessors: chunked", "linear_chunk_fp64"],
        ),
        (
            ["1,16,4096,300", "--dtype", "fp64"],
            ["132 multiprocessors: chunked, on cuBLAS products"],
        ),
    ],
)
def test_info_says_which_algorithm_a_causal_product_gets(arguments, shown, capsys):
    assert main(["info", "--target", "sm_90a", "--shape", *arguments]) == 0
    found = capsys.readouterr().out
    for text in shown:
        assert text in found


def test_info_knows_how_long_kernels_take(capsys):
    assert main(["info", "--shape", f"1,{MAX_LENGTH},64", "--target", "sm_90a"]) == 0
    assert "64 KB" not in capsys.readouterr().out
    for argv in (["--shape", f"{MAX_LENGTH + 1},64"], ["--shape", "1,64", "--k-len", f"{2**31}"]):
        assert main(["info", *argv, "--target", "sm_90a"]) == 0
        shown = capsys.readouterr().out
        assert "sm_90a: tiled CuPy" in shown
        assert f"kernels take up to {MAX_LENGTH:,}" in shown


@pytest.mark.parametrize("shape", ["4096", "a,b", "-1,4", "1,,4", "1.5,4"])
def test_info_refuses_a_wrong_shape(shape, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["info", f"--shape={shape}"])
    assert f"--shape: '{shape}' is not like 4,16,4096,128" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["info", "--shape", "4,8", "--k-len", "-3"],
        ["info", "--shape", "4,8", "--v-dim", "-3"],
        ["warmup", "--target", "sm_90a", "--head-dim", "-1"],
    ],
)
def test_negative_sizes_are_refused(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert f"{argv[-2]}: '{argv[-1]}' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (
            ["--dtype", "bf16", "--head-dim", "999"],
            [
                "attention of head_dim 999 in bfloat16 has no kernel, the largest is 256",
                "causal products of bf",
            ],
        ),
        (
            ["--dtype", "fp64", "--head-dim", "999"],
            ["attention of head_dim 999 in float64 has no kernel", "causal products of float64"],
        ),
    ],
)
def test_warmup_says_why_there_is_no_kernel(argv, why, capsys):
    assert main(["warmup", "--target", "sm_90a", *argv]) == 1
    shown = capsys.readouterr()
    for line, start in zip(shown.err.splitlines(), why, strict=True):
        assert line.startswith(f"warmup: {start}")
    assert not shown.out


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("dtype", only(("bfloat16", "float32"), "float32"))
def test_warmup_fills_the_cache(dtype, no_device, capsys):
    short = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    command = ["warmup", "--target", "sm_80", "--dtype", short, "--head-dim", "32"]
    rows = reachable(dtype, 32, 32, "sm_80")
    rows += serving_splitkv("sm_80", {dtype}, {32})
    rows += serving_backward("sm_80", {dtype}, {32})
    rows += serving_pairs({dtype}, {32}) + serving_products("sm_80", {dtype}, {32})
    assert main(command) == 0
    assert f"{len(rows)} kernels compiled for sm_80" in capsys.readouterr().out
    assert all(compile.compile_variant(row, "sm_80").cached for row in rows)
    assert main(command) == 0
    assert "0 kernels compiled for sm_80" in capsys.readouterr().out


def test_warmup_compiles_what_calls_can_get():
    for target in SHARED_LIMIT:
        rows = serving(target, {"float16", "bfloat16", "float32", "float64"}, {64, 100, 256, 300})
        assert {row.dtype for row in rows} == {"float16", "bfloat16", "float32", "float64"}
        assert {row.dim for row in rows} == {64, 128, 256}
        assert all(target in row.targets for row in rows)
        assert len({row.source for row in rows}) == (6 if target == "sm_90a" else 3)


@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_warmup_compiles_what_few_queries_can_get(target):
    for dim in (40, 64, 128, 250):
        used = set()
        for queries in range(1, 66):
            q, k = (np.zeros((1, 1, n, dim), np.float16) for n in (queries, 600))
            problem = attention_problem.attention_problem(q, k, k, None, None)
            out = attention_problem.out_view(problem, problem.out_shape, q.strides)
            traits = Traits(problem, out)
            used.add(fwd_splitkv.select(traits, target))
        assert set(serving_splitkv(target, {"float16", "float32"}, {dim})) == used
    assert serving_splitkv(target, {"bfloat16", "float16"}, {64, 128, 256}) == [
        row for row in SPLITKV if row in serving_splitkv(target, {row.dtype}, {row.dim})
    ]
    assert serving_splitkv(target, {"float32", "float64"}, {64}) == []
    assert serving_splitkv(target, {"float16"}, {300}) == []


def test_warmup_compiles_what_gradients_can_get():
    """Those of float32 and float64 in dims of any size."""
    every = GRADIENTS
    for target in ("sm_80", "sm_90a", "sm_120"):
        rows = serving_backward(target, {"float16", "bfloat16", "float32"}, {64, 100, 200, 300})
        calls = [*product(("float16", "bfloat16"), (64, 200), (False, True))]
        dims = (64, 100, 200) if target == "sm_90a" else (64, 100)
        calls += product(("float32",), dims, (False, True))
        chains = [
            attention_backward.select(Wanted(dtype, dim, masked, mapped), target)
            for dtype, dim, masked in calls
            for mapped in (False, True)
        ]
        found = [row for row in every if any(row in chain for chain in chains)]
        assert rows == [*found, *MASKS]
        assert all(target in row.targets for row in rows)
    dims = {row.dim for row in every}
    # Others are for a bias.
    plain = [row for row in every if row.score is None and row.dtype in ("float16", "bfloat16")]
    assert serving_backward("sm_90a", {"float16", "bfloat16"}, dims) == [*plain, *MASKS]
    rows = serving_backward("sm_80", {"float64"}, {33, 300})
    of_33 = [attention_backward.select(Wanted("float64", 33, x), "sm_80") for x in (False, True)]
    assert {*rows} == {*of_33[0], *of_33[1], *MASKS}


@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_warmup_compiles_what_causal_products_can_get(target):
    rows = serving_products(target, {"bfloat16", "float64"}, {60})
    assert [row for row in PRODUCTS if row in rows] == rows
    assert all(target in row.targets for row in rows)
    # One sequence is split, so that sums of segments and their scan are there too.
    assert {row.source for row in rows} == {
        "linear/chunk_sm80",
        "linear/chunk_state_sm80",
        "linear/chunk_fp64",
        "linear/chunk_state_fp64",
        "linear/state_prefix_sum",
    }
    assert {row.dim for row in rows if row.dtype == "bfloat16"} == {64}
    single = serving_products(target, {"float32"}, {60, 999})
    plain = [
        (f"linear/{name}", dim) for name in ("recurrent", "low_occupancy") for dim in (64, 256)
    ]
    chunked = [("linear/chunk_fp32_sm80", 64), ("linear/chunk_state_fp32_sm80", 64)]
    mapped = [("linear/chunk_fp32_pingpong_sm90", 64), ("linear/chunk_state_fp32_sm90", 64)]
    found = {(row.source, row.dim) for row in single}
    wanted = {*plain, *chunked, ("linear/state_prefix_sum", 256)}
    assert found == (wanted | {*mapped} if target == "sm_90a" else wanted)


def test_warmup_knows_every_row_that_is_chosen():
    for length in (1, 100, 3000, 100_000):
        for entries in (1, 40, 3000):
            choice = choose("float16", entries, length, 128, 128, "sm_90a", 132)
            used = {row for row, _, _ in choice.launches(128, 128)}
            assert used <= {*serving_products("sm_90a", {"float16"}, {128})}


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_warmup_compiles_what_packed_sequences_can_get(target):
    rows = serving_packed(target, {"bfloat16", "float64"}, {64, 256})
    assert len({*rows}) == len(rows)
    assert all(target in row.targets for row in rows)
    used = {SEQUENCE_SPANS, row_intervals.VARIANT}
    for dim, mapped in product((64, 256), (False, target == "sm_90a")):
        wanted = Wanted("bfloat16", dim, mapped=mapped, packed=True)
        used |= {*attention_backward.select(wanted, target)}
        row = select("bfloat16", dim, dim, target, Call(None, mapped, False))
        used.add(row.for_sequences(True))
        for length, entries in product((10, 3000), (1, 40)):
            given = "bfloat16", entries, length, dim, dim, target, 132
            choice = choose(*given, mapped=mapped, packed=True)
            used |= {row for row, _, _ in choice.launches(dim, dim)}
    assert used <= {*rows}
    assert {row.packed for row in {*rows} - {SEQUENCE_SPANS, row_intervals.VARIANT}} == {True}
    assert {row.source for row in rows if row.dtype == "float64"} == {
        "attention/fwd_fp64",
        *(f"attention/bwd_{which}_fp64" for which in ("dq", "dkdv")),
        "linear/other_rows",
        "linear/recurrent_fp64",
        "linear/chunk_fp64",
        "linear/chunk_state_fp64",
        "linear/state_prefix_sum",
    }
    assert serving_packed(target, {"float32"}, {300})[0] == SEQUENCE_SPANS


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("packed", [False, True])
def test_warmup_compiles_what_calls_with_dropout_can_get(target, packed):
    rows = serving_dropout(target, {"bfloat16", "float32"}, {64, 256}, packed)
    assert len({*rows}) == len(rows)
    used = {dropout_mask.VARIANT.for_sequences(packed)}
    for dim, mapped in product((64, 256), (False, target == "sm_90a")):
        wanted = Wanted("bfloat16", dim, mapped=mapped, packed=packed, dropout=True)
        used |= {*attention_backward.select(wanted, target)}
        row = select("bfloat16", dim, dim, target, Call(None, mapped, False))
        used.add(row.for_sequences(packed).for_dropout(True))
    assert used <= {*rows}
    dtypes = {"bfloat16", "float32", "uint32", *(["int32"] if packed else [])}
    assert {row.dtype for row in rows} == dtypes


def test_warmup_asks_for_a_target_where_there_is_no_device(capsys):
    assert main(["warmup"]) == 1
    assert "--target" in capsys.readouterr().err


def test_emit_lists_all_rows(capsys):
    assert main(["emit", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [row.name for row in ROWS]


@needs_compiler
def test_emit_writes_ptx(tmp_path, capsys):
    row = next(row for row in ROWS if row.source == "mask/transpose_words")  # compiles fastest
    assert main(["emit", "--ptx", row.name, "--target", "sm_80"]) == 0
    text = capsys.readouterr().out
    assert f".visible .entry {row.entry}(" in text
    assert ".target sm_80" in text
    path = tmp_path / "kernel.ptx"
    assert main(["emit", "--ptx", row.name, "--target", "sm_80", "-o", str(path)]) == 0
    assert path.read_text() == text


def test_emit_names_what_is_wrong(capsys):
    assert main(["emit", "--ptx", "nonsense"]) == 1
    assert "--ptx is 'nonsense', want a name that --list prints" in capsys.readouterr().err
    assert main(["emit", "--ptx", VARIANTS[0].name, "--target", "sm_75"]) == 1
    assert "--target is 'sm_75', want " in capsys.readouterr().err
