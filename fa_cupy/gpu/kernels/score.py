"""What a score is besides a scaled product: the part of a kernel that a call decides.

``cuda_src/common/score.cuh`` is compiled into every attention kernel. A call whose scores are
products times a positive scale gets builds without it; others get builds for their `ScoreMod`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core import attention_problem
from fa_cupy.core.attention_problem import FLOAT_DTYPES, Problem
from fa_cupy.score import header
from fa_cupy.score.program import BoundScore, Program, itemsize
from fa_cupy.tiled.softcap import in_range, in_turn, transform

MAX_SCORE_ARRAYS, MAX_SCORE_AXES = 6, 4  # kMaxScoreArrays, kMaxScoreAxes
MAX_COMPILE_COST = 12  # see `Program.compile_cost`
#: ``struct ScoreArray`` of ``cuda_src/common/attention_params.cuh``.
SCORE_ARRAY = np.dtype(
    [("data", np.uint64), ("number", np.float64), ("stride", np.int64, (MAX_SCORE_AXES,))]
)
LOG2E = math.log2(math.e)
#: ``enum BiasAxes``: what a bias depends on besides the batch entry, in the order of its values.
BIAS_AXES = ("", "query", "key", "pair")
#: tanh(x) / x in powers of x**2 for abs(x) <= 0.5, with the least relative error, 1.3e-8.
TANH_SERIES = (
    0.9999999868706769, -0.3333306938772164, 0.13324779250540897, -0.05298607326661263,
    0.01713500579939314,
)  # fmt: skip
#: The fields of ``struct AttentionParams`` that say how a score is computed, floats all.
SCORE_FIELDS: list[Any] = [
    *[(name, np.float32) for name in ("exp2_scale", "scale", "softcap", "softcap_scale")],
    ("inverse_softcap", np.float32),
    ("softcap_series", np.float32, (len(TANH_SERIES),)),
    ("softcap_series_log2", np.float32, (len(TANH_SERIES),)),
]


class ScoreMod(NamedTuple):
    """What a build computes besides products times a positive scale.

    Attributes
    ----------
    softcap : bool
    bias_axes : str
        One of `BIAS_AXES`.
    bias_dtype : str
        Name of the dtype of its elements; empty without a bias.
    program : Program or None
        An expression of the caller's; there is neither softcap nor bias then.
    exact : bool
        Whether float32 holds the integers that it converts.
    sloped : bool
        Whether its derivative is wanted, as it is of gradients.
    by_registers : bool
        Whether threads load a bias of pairs to their registers, because its rows cannot be copied
        by 16 bytes. Otherwise kernels may copy it to shared memory.
    """

    softcap: bool = False
    bias_axes: str = ""
    bias_dtype: str = ""
    program: Program | None = None
    exact: bool = True
    sloped: bool = False
    by_registers: bool = False

    @property
    def name(self) -> str:
        """For names of builds."""
        if self.program is not None:
            return f"expression_{hashlib.sha256(self._header().encode()).hexdigest()[:12]}"
        parts = ["softcap"] * self.softcap
        if self.bias_axes:
            parts.append(f"{self.bias_dtype}_bias_of_{self.bias_axes}")
        parts += ["by_registers"] * self.by_registers
        return "-".join(parts) or "any_scale"

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants of ``score.cuh``."""
        names = [dtype.name for dtype in FLOAT_DTYPES]
        return (
            ("FA_SCORE_MOD", 1),
            ("FA_SOFTCAP", int(self.softcap)),
            ("FA_BIAS_AXES", BIAS_AXES.index(self.bias_axes)),
            ("FA_BIAS_KIND", names.index(self.bias_dtype) if self.bias_dtype else 0),
            *([("FA_EXPRESSION", 1)] if self.program is not None else []),
        )

    @property
    def has_operands(self) -> bool:
        """Whether scores are made of anything but products: ``kHasOperands``."""
        return self.bias_axes != "" or self.program is not None

    @property
    def differs_by_key(self) -> bool:
        """Whether scores are made of anything that differs from key to key, but positions."""
        if self.program is not None:
            return any("j" in reads for reads in self.program.operands())
        return self.bias_axes in ("key", "pair")

    @property
    def has_16_bit_pairs(self) -> bool:
        """Whether there is a bias of pairs in 16 bits."""
        return self.bias_axes == "pair" and self.bias_dtype in ("float16", "bfloat16")

    @property
    def staged_bytes(self) -> int:
        """Bytes of an element of a bias that may come by way of shared memory; 0 of any other."""
        if self.bias_axes != "pair" or self.by_registers:
            return 0
        return {"float16": 2, "bfloat16": 2, "float32": 4}.get(self.bias_dtype, 0)

    @property
    def headers(self) -> dict[str, bytes]:
        """The headers that are made for it, by the name in the include."""
        return {} if self.program is None else {header.NAME: self._header().encode()}

    def _header(self) -> str:
        assert self.program is not None
        return header.header(self.program, self.exact, self.sloped)


def score_mod_of(problem: Problem, sloped: bool = False) -> ScoreMod | None:
    """Return what the kernels of a problem compute; None for products times a positive scale.

    A bias must be one that kernels take; see `takes_bias`.

    Parameters
    ----------
    problem : Problem
    sloped : bool, optional
        Whether they compute gradients.
    """
    if problem.score is not None:
        return ScoreMod(program=problem.score.program, exact=problem.score.exact, sloped=sloped)
    # The softmax can fold the scale in only where it keeps the order of scores and -inf * scale.
    plain_scale = 1e-30 < problem.scale < 1e30
    if problem.bias is None and not problem.softcap:
        return None if plain_scale else ScoreMod()
    if problem.bias is None or problem.bias_dtype is None:
        return ScoreMod(softcap=True)
    by_query, by_key = _bias_steps(problem)
    axes = BIAS_AXES[(by_query != 0) + 2 * (by_key != 0) or 1]
    # Kernels of float32 and float64, and those for masks, have no stage for a bias.
    stages = axes == "pair" and problem.mask is None and problem.dtype.itemsize == 2
    by_registers = stages and not _rows_are_aligned(problem)
    return ScoreMod(problem.softcap > 0, axes, problem.bias_dtype.name, by_registers=by_registers)


def bias_at(problem: Problem, address: int) -> Problem:
    """Return a problem that says whether its bias begins at a multiple of 16 bytes."""
    aligned = address % 16 == 0
    if problem.bias_aligned == aligned:
        return problem
    return dataclasses.replace(problem, bias_aligned=aligned)


def takes_bias(problem: Problem) -> bool:
    """Whether kernels read the bias of a problem as it is: one of float64 with float64 only."""
    return problem.bias_dtype != np.float64 or problem.dtype == np.float64


def takes_score(problem: Problem) -> bool:
    """Whether kernels take the expression of a problem, if it has one.

    They take it without a softcap and a bias, with arrays of whole elements, and if it is
    not so long that it would compile for minutes.
    """
    score = problem.score
    if score is None:
        return True
    if problem.softcap or problem.bias is not None or len(score.layouts) > MAX_SCORE_ARRAYS:
        return False
    if score.program.compile_cost > MAX_COMPILE_COST:
        return False
    return all(
        len(layout.shape) <= MAX_SCORE_AXES
        and (dtype == "number" or all(step % itemsize(dtype) == 0 for step in layout.strides))
        for layout, dtype in zip(score.layouts, score.program.dtypes, strict=True)
    )


def takes_scale(problem: Problem) -> bool:
    """Whether kernels multiply by the scale and the softcap of a problem as its dtype asks.

    They multiply products by scale / softcap. For 16-bit numbers any softcap will do that is as
    good as none, and any small quotient. Others lose digits where the quotient is subnormal or too
    large, or the softcap is near the largest number.
    """
    if problem.dtype.itemsize == 2:
        return True
    factor, _, apart = in_turn(problem, problem.dtype)
    known = np.finfo(problem.dtype)
    return not apart and (factor == 0 or float(known.tiny) <= abs(factor) <= float(known.max))


def score_pointers(problem: Problem) -> dict[str, str]:
    """Return, for the fields of ``AttentionParams`` that point to them, the expression's arrays."""
    dtypes = () if problem.score is None else problem.score.program.dtypes
    return {
        f"score_arrays.{number}.data": f"score.{number}"
        for number, dtype in enumerate(dtypes)
        if dtype != "number"
    }


def with_float32_bias(xp: Any, problem: Problem, bias: Any) -> tuple[Problem, Any]:
    """Return a problem and its bias with the bias in float32; `xp` is its namespace.

    Numbers beyond the largest of float32 become that, and stay finite: an infinite score hides a
    key.
    """
    bias = in_range(xp, bias, np.dtype(np.float32)).astype(np.float32)
    view = attention_problem.batch_view(problem, bias, problem.q_len, problem.k_len)
    return dataclasses.replace(problem, bias=view, bias_dtype=bias.dtype), bias


def fill_score(p: Any, problem: Problem, score: ScoreMod | None) -> None:
    """Write into ``struct AttentionParams`` how scores are computed; `score` is `score_mod_of`."""
    plain = score is None
    p["exp2_scale"] = problem.scale * LOG2E if plain else LOG2E
    p["scale"] = in_float32(problem.scale)
    if problem.softcap:
        factor, cap = transform(problem, np.dtype(np.float32))
        p["softcap"], p["softcap_scale"] = in_float32(cap), in_float32(4.0 * factor)
        p["inverse_softcap"] = _inverse(in_float32(cap))
        series = [cap * c / 4 ** (2 * i + 1) for i, c in enumerate(TANH_SERIES)]
        p["softcap_series"] = [in_float32(c) for c in series]
        p["softcap_series_log2"] = [in_float32(LOG2E * c) for c in series]
    if problem.bias is not None and problem.bias_dtype is not None:
        item, (by_query, by_key) = problem.bias_dtype.itemsize, _bias_steps(problem)
        p["bias_row"], p["bias_col"] = by_query // item, by_key // item
        of_keys = by_key == item and by_query % (2 * item) == 0
        of_queries = by_query == item and by_key % (2 * item) == 0
        rows = by_key == item and by_query % 16 == 0
        p["bias_pairs"] = of_keys + 2 * of_queries + 4 * rows

    if problem.score is not None:
        _fill_expression(p, problem.score)


def _fill_expression(p: Any, score: BoundScore) -> None:
    p["score_heads"] = score.heads
    for number, dtype in enumerate(score.program.dtypes):
        array, layout = p["score_arrays"][number], score.layouts[number]
        if dtype == "number":
            array["number"] = float.fromhex(layout.number)
        else:
            steps = [step // itemsize(dtype) for step in layout.strides]
            array["stride"][: len(steps)] = steps


def in_float32(x: float) -> float:
    """Keep an option inside float32, where a kernel computes: neither infinite nor 0 if not 0."""
    if x == 0.0:
        return x
    return math.copysign(max(1.5e-45, min(3.4e38, abs(x))), x)


def _inverse(softcap: float) -> np.float32:
    """Return 1 / softcap, rounded so that their product is not below 1.

    A score at its softcap has slope 0 then: one of 1e-7 would count where keys are large.
    """
    cap = np.float32(softcap)
    inverse = np.float32(in_float32(1.0 / float(cap)))
    while cap * inverse < 1 and np.isfinite(inverse):
        with np.errstate(over="ignore"):  # past the last number, where the loop ends
            inverse = np.nextafter(inverse, np.float32(np.inf))
    return inverse


def _rows_are_aligned(problem: Problem) -> bool:
    """Whether all rows of the bias lie as they are, at multiples of 16 bytes."""
    assert problem.bias is not None
    assert problem.bias_dtype is not None
    by_query, by_key = _bias_steps(problem)
    batch = zip(problem.batch, problem.bias.strides, strict=False)
    steps = [by_query, *[step for size, step in batch if size > 1]]
    dense = by_key == problem.bias_dtype.itemsize
    return problem.bias_aligned and dense and not any(step % 16 for step in steps)


def _bias_steps(problem: Problem) -> tuple[int, int]:
    """Return the bytes from a query to the next one in the bias, and from a key."""
    assert problem.bias is not None
    by_query, by_key = problem.bias.strides[-2:]
    return by_query if problem.q_len > 1 else 0, by_key if problem.k_len > 1 else 0
