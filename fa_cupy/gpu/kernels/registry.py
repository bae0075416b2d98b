"""All kernels that there are, from the tables of their families."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from fa_cupy.gpu.kernels import attention_backward
from fa_cupy.gpu.kernels.attention import bwd_sm90, row_intervals
from fa_cupy.gpu.kernels.attention.dbias.dbias_rows import DbiasRows
from fa_cupy.gpu.kernels.attention.full_precision import split_kv
from fa_cupy.gpu.kernels.attention.full_precision.gradients import selection
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.attention.pairs import bwd_dkdv_pairs, bwd_dq_pairs, fwd_pairs
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PairVariant
from fa_cupy.gpu.kernels.attention.splitkv import fwd_join_splits, fwd_splitkv
from fa_cupy.gpu.kernels.backward import BackwardVariant
from fa_cupy.gpu.kernels.forward import FP64_VARIANTS, VARIANTS
from fa_cupy.gpu.kernels.linear.packed.sequence_spans import SEQUENCE_SPANS
from fa_cupy.gpu.kernels.linear.table import PACKED, PRODUCTS
from fa_cupy.gpu.kernels.mask import dropout_mask
from fa_cupy.gpu.kernels.mask.block_tables import TABLES
from fa_cupy.gpu.kernels.mask.transpose_words import TRANSPOSE
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.variant import Variant

#: Scores whose builds are compiled and looked at besides those of plain ones.
SCORE_EXAMPLES = (
    ScoreMod(softcap=True),
    ScoreMod(bias_axes="pair", bias_dtype="bfloat16"),
    ScoreMod(bias_axes="key", bias_dtype="float32"),
    ScoreMod(softcap=True, bias_axes="pair", bias_dtype="float32"),
    ScoreMod(bias_axes="query", bias_dtype="float16"),
)
#: Those that make tables of masks.
MASKS: tuple[Variant, ...] = (TABLES, TRANSPOSE)
#: Those that write the decisions of dropout, of dense calls and of packed sequences.
DECISIONS: tuple[Variant, ...] = (
    dropout_mask.VARIANT, dropout_mask.VARIANT.for_sequences(True),
)  # fmt: skip
#: Those that read the pairs of masks one by one.
PAIRS: tuple[PairVariant, ...] = (
    *fwd_pairs.VARIANTS, *bwd_dq_pairs.VARIANTS, *bwd_dkdv_pairs.VARIANTS,
)  # fmt: skip
#: Those of few queries.
SPLITKV: tuple[fwd_splitkv.FwdSplitkv, ...] = fwd_splitkv.VARIANTS
#: Those of gradients.
GRADIENTS: tuple[BackwardVariant, ...] = (*attention_backward.VARIANTS, *selection.VARIANTS)
# Of gradients those without a mask that compute scores, in one of the dtypes; a row for biases has
# scores of its own.
_GRADIENTS = [
    row
    for row in GRADIENTS
    if row.dtype in ("bfloat16", "float32", "float64") and not row.sparse and row.score is None
    if row.for_score(SCORE_EXAMPLES[0]) != row
]
#: One build for other scores of each row of attention; each kind of scores comes up in turn.
SCORED: tuple[Variant, ...] = tuple(
    row.for_score(score)
    for rows in (VARIANTS, _GRADIENTS, PAIRS, SPLITKV, FP64_VARIANTS)
    for row, score in zip(rows, itertools.cycle(SCORE_EXAMPLES), strict=False)
)
#: Builds of gradients on Hopper for a bias of pairs: copied to shared memory, loaded to registers
#: where its rows cannot be copied. In 16 bits those of outputs for the latter, too.
OF_PAIRS: tuple[Variant, ...] = tuple(
    row.for_score(ScoreMod(bias_axes="pair", bias_dtype=dtype, by_registers=by_registers))
    for row in (*VARIANTS, *bwd_sm90.VARIANTS)
    if row.dtype == "bfloat16" and row.dim in (64, 128) and not row.sparse
    for dtype, by_registers in itertools.product(("bfloat16", "float32"), (False, True))
    if isinstance(row, bwd_sm90.BwdSm90)
    or (isinstance(row, FwdSm90) and by_registers and dtype == row.dtype)
)
# What packed sequences and key lengths have builds of. One of the 16-bit dtypes stands for both.
_UNMASKED: tuple[Variant, ...] = tuple(
    row
    for dtype in ("bfloat16", "float32", "float64")
    for row in (*VARIANTS, *FP64_VARIANTS, *GRADIENTS)
    if row.dtype == dtype and not row.sparse
)
# The dim whose rows have a build for other scores too.
_SCORED_DIM = 128


def _of_keys(rows: Sequence[Variant], build: Callable[[Variant], Variant]) -> list[Variant]:
    """Return builds of rows, and of some for other scores; each kind of these comes up in turn."""
    scored = (
        row
        for row in rows
        if row.dim == _SCORED_DIM and row.score is None
        if row.for_score(SCORE_EXAMPLES[0]) != row
    )
    turns = zip(scored, itertools.cycle(SCORE_EXAMPLES), strict=False)
    return [*map(build, rows), *(build(row.for_score(score)) for row, score in turns)]


#: Builds of attention and its gradients for packed sequences, and the kernel that precedes them.
PACKED_ATTENTION: tuple[Variant, ...] = (
    row_intervals.VARIANT, *_of_keys(_UNMASKED, lambda row: row.for_sequences(True)),
)  # fmt: skip
#: Builds of kernels of float32 and float64 for batch entries with numbers of keys of their own.
LENGTHS: tuple[Variant, ...] = (
    *(row.for_lengths(True) for row in split_kv.VARIANTS),
    *_of_keys(
        [row for row in _UNMASKED if row.dtype != "bfloat16" and not isinstance(row, DbiasRows)],
        lambda row: row.for_lengths(True),
    ),
)
#: Builds of ``fwd_sm90`` for batch entries with numbers of keys of their own, or with pages, for a
#: part of the keys each, and for both; and the kernel that joins parts.
SPLIT: tuple[Variant, ...] = (
    *(
        row.for_keys(lengths, split, pages)
        for row in _UNMASKED
        if isinstance(row, FwdSm90)
        for lengths, split, pages in (
            (True, False, False),
            (False, True, False),
            (True, True, False),
            (True, False, True),
            (True, True, True),
        )
    ),
    *fwd_join_splits.VARIANTS,
)
#: Builds of attention and its gradients that drop weights.
DROPOUT: tuple[Variant, ...] = (
    *(
        row.for_sequences(packed).for_dropout(True)
        for packed in (False, True)
        for row in (*VARIANTS, *attention_backward.WITH_DROPOUT)
        if not row.sparse
        and (row.dtype == "bfloat16" or (row.dtype == "float32" and row.dim in (64, 256)))
    ),
    row_intervals.VARIANT.for_dropout(True),
)
ROWS: tuple[Variant, ...] = (
    *split_kv.VARIANTS, *VARIANTS, *FP64_VARIANTS, *SCORED, *OF_PAIRS, *GRADIENTS,
    *PRODUCTS, *MASKS, *PAIRS, *SPLITKV, *PACKED, SEQUENCE_SPANS, *PACKED_ATTENTION, *LENGTHS,
    *SPLIT, *DROPOUT, *DECISIONS,
)  # fmt: skip
