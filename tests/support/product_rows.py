"""The rows of the kernels of causal products, and bugs that are planted in them."""

import numpy as np
import pytest

from fa_cupy.core import linear_problem
from fa_cupy.gpu.kernels.linear.params import Job
from fa_cupy.gpu.kernels.linear.sm80.chunk_fp32_sm80 import ChunkFp32Sm80
from fa_cupy.gpu.kernels.linear.sm80.chunk_fp64 import ChunkFp64
from fa_cupy.gpu.kernels.linear.sm80.chunk_sm80 import ChunkSm80
from fa_cupy.gpu.kernels.linear.sm90.chunk_fp32_pingpong_sm90 import ChunkFp32PingpongSm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_fp32_sm90 import ChunkFp32Sm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from tests.support.kernel_products import NAMES, split
from tests.support.planted import plant
from tests.support.products import Case, draw
from validation import emulator
from validation.emulator import calls

CHUNK_SM80 = [row for row in PRODUCTS if isinstance(row, ChunkSm80)]
CHUNK_SM90 = [row for row in PRODUCTS if isinstance(row, ChunkSm90)]
CHUNK_FP32_SM80 = [row for row in PRODUCTS if isinstance(row, ChunkFp32Sm80)]
CHUNK_FP32_SM90 = [row for row in PRODUCTS if isinstance(row, ChunkFp32Sm90)]
PINGPONG = next(row for row in PRODUCTS if isinstance(row, ChunkFp32PingpongSm90))
CHUNK_FP32_SM90.append(PINGPONG)
CHUNK_FP64 = [row for row in PRODUCTS if isinstance(row, ChunkFp64)]
PLAIN = [row for row in PRODUCTS if row.algorithm in ("recurrent", "low_occupancy")]
SMALL_SM90 = [row for row in CHUNK_SM90 if row.dim == 64 and (row.tile_n == 128 or row.blocks == 2)]
SMALL_SM80 = [row for row in CHUNK_SM80 if row.dim == 32 or (row.dim, row.stages) == (64, 3)]


def show(row, bug, tmp_path, choice=None, case=None):
    """Fail unless some schedule shows a bug in a row of a choice, by default in its only one."""
    sources = {row.entry: plant(tmp_path, row.source, bug)}
    case = case or Case(*draw(*[(500, 32)] * 3, dtype=NAMES[row.dtype]))
    choice = choice or split(row, 500, None)
    want = calls.causal_product(choice, *case.native(np))
    for seed in range(30):
        try:
            got = calls.causal_product(choice, *case.native(np), seed=seed, sources=sources)
        except emulator.EmulationError:
            return
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            return
    pytest.fail("30 seeds did not show it")


def job(q, k, v, reverse=False, state=None):
    """A product of arrays, whose output is dense."""
    problem = linear_problem.product_problem("causal_product", q, k, v)
    out = np.empty(problem.out_shape, problem.dtype)
    return Job(problem, problem.view(out.shape, out.strides), state, reverse)
