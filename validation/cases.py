"""The measured problems, as data: what every benchmark, sweep and plot iterates over."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, product

ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Dense:
    """Self-attention over ``batch`` sequences of ``length`` tokens, or its gradients.

    The name of a case, such as ``bf16 hd128 causal 4096x4``, is dtype, head_dim, ``full`` or
    ``causal``, length x batch; the number of heads follows from heads * head_dim = 2048 and is
    named (``h8``) only where it does not. Fewer heads of keys and values (``kv8``) and a causal
    window (``window1024``: a query sees so many keys, its own the last) are named too, and dropout
    (``p0.1``). Where a precision is allowed, as of float32 ``tf32``, it is named in place of the
    dtype.
    """

    dtype: str
    head_dim: int
    causal: bool
    length: int
    batch: int
    heads: int
    kv_heads: int = 0  # 0: as many as heads
    window: int = 0  # 0: none
    backward: bool = False
    precision: str = ""  # "tf32", or "" for that of the dtype
    dropout: float = 0.0  # the share of weights that are dropped

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        kind = "causal" if self.causal else "full"
        heads = "" if self.heads * self.head_dim == 2048 else f" h{self.heads}"
        kv = f" kv{self.kv_heads}" if self.kv_heads else ""
        window = f" window{self.window}" if self.window else ""
        shape = f"{self.length}x{self.batch}"
        numbers = self.precision or self.dtype
        dropped = f" p{self.dropout:g}" if self.dropout else ""
        return f"{numbers} hd{self.head_dim} {kind} {shape}{heads}{kv}{window}{dropped}"

    @property
    def flops(self) -> float:
        """Operations of the two products, five for gradients.

        A causal mask halves them, a window leaves its keys.
        """
        products = 5 if self.backward else 2
        of_a_key = 2.0 * products * self.batch * self.heads * self.head_dim
        if self.window:
            seen = min(self.window, self.length)
            return of_a_key * (seen * (seen + 1) / 2 + (self.length - seen) * seen)
        full = of_a_key * self.length**2
        return full / 2 if self.causal else full


@dataclass(frozen=True)
class CausalProduct:
    """``tril(q @ k.mT) @ v`` of ``batch`` sequences of ``length`` rows, or its gradients.

    Queries, keys and values have the same dim. The name of a case, such as
    ``bf16 E64 4096x8 h16``, is dtype, dim, length x batch and heads.
    """

    dtype: str
    dim: int
    length: int
    batch: int
    heads: int
    backward: bool = False

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        return f"{self.dtype} E{self.dim} {self.length}x{self.batch} h{self.heads}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of every array."""
        return self.batch, self.heads, self.length, self.dim

    @property
    def bytes(self) -> float:
        """What has to be moved: q, k, v and out once; with gradients dout, q, k, v, dq, dk, dv."""
        arrays = 7 if self.backward else 4
        return float(arrays * math.prod(self.shape) * ITEMSIZE[self.dtype])


@dataclass(frozen=True)
class MaskedAttention:
    """Self-attention under a mask, of a kind and with a number where it has one, or its gradients.

    "elements": half of all elements, at random; "elements heads": likewise, another mask for each
    head. "blocks 0.25": a quarter of the blocks of 128 x 128 for each head, and the diagonal.
    "documents 16": documents that see themselves, cut at random. "causal", "window 1024". "" is
    without a mask. The name of a case, such as ``bf16 hd128 blocks-0.25 8192x1``, is like that of
    `Dense`.
    """

    dtype: str
    head_dim: int
    mask: str
    length: int
    batch: int
    heads: int
    backward: bool = False

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        kind = self.mask.replace(" ", "-") or "full"
        return f"{self.dtype} hd{self.head_dim} {kind} {self.length}x{self.batch}"

    @property
    def flops(self) -> float:
        """Operations without a mask, so that speeds compare as times do."""
        products = 5 if self.backward else 2
        return 2.0 * products * self.batch * self.heads * self.head_dim * self.length**2


@dataclass(frozen=True)
class ScoredAttention:
    """Self-attention whose scores are more than scaled products, or its gradients.

    "plain": only the products. "softcap": capped at 30. The others have a bias. "alibi": one of
    shape (heads, 1, length) in float32, which falls with the distance from the last key;
    "alibi16": the same in `dtype`. "bias": one of shape (length, length) in `dtype`, for all heads
    and sequences; "bias heads": another one for each head; "bias32": one for all, in float32.
    "bias grad", of gradients only, is "bias" with the gradient of the bias. "softcap expression"
    and "alibi expression" are the scores of "softcap" and "alibi", as expressions. The name of a
    case, such as ``bf16 hd128 causal bias-heads 4096x4``, is like that of `Dense`.
    """

    dtype: str
    head_dim: int
    causal: bool
    score: str
    length: int
    batch: int
    heads: int
    backward: bool = False

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        mask, score = "causal" if self.causal else "full", self.score.replace(" ", "-")
        return f"{self.dtype} hd{self.head_dim} {mask} {score} {self.length}x{self.batch}"

    @property
    def flops(self) -> float:
        """Operations of the products alone, so that speeds compare with those of `Dense`."""
        products = 5 if self.backward else 2
        full = 2.0 * products * self.batch * self.heads * self.head_dim * self.length**2
        return full / 2 if self.causal else full


@dataclass(frozen=True)
class Decode:
    """Attention of few queries to the keys of each of ``batch`` sequences, as decoding needs it.

    32 heads of queries share 8 heads of keys and values. A query sees all keys of its sequence. The
    keys are in one array, or in pages of ``page_size`` keys in random order; a sequence has
    ``keys`` of them or, if ``ragged``, a random number up to that. The name of a case, such as
    ``bf16 hd128 B16 kv32768``, is dtype, head_dim, batch and keys; several queries (``q4``), pages
    (``paged64``) and random numbers of keys (``ragged``) are named too.
    """

    dtype: str
    head_dim: int
    batch: int
    keys: int
    queries: int = 1
    page_size: int = 0  # 0: no pages
    ragged: bool = False
    heads: int = 32
    key_heads: int = 8

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        queries = f" q{self.queries}" if self.queries > 1 else ""
        pages = f" paged{self.page_size}" if self.page_size else ""
        ragged = " ragged" * self.ragged
        shape = f"B{self.batch} kv{self.keys}"
        return f"{self.dtype} hd{self.head_dim} {shape}{queries}{pages}{ragged}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many keys each sequence has."""
        if not self.ragged:
            return (self.keys,) * self.batch
        rng = random.Random(self.keys)
        return tuple(rng.randint(1, self.keys) for _ in range(self.batch))

    @property
    def bytes(self) -> float:
        """What has to be read: the keys and values that there are, each once."""
        row = self.key_heads * self.head_dim * ITEMSIZE[self.dtype]
        return 2.0 * sum(self.lengths) * row


@dataclass(frozen=True)
class Packed:
    """Self-attention of packed sequences, or its gradients.

    The sequences have random lengths from ``shortest`` to ``longest``, multiples of 8. The name of
    a case, such as ``bf16 hd128 causal 8x512-8192``, is dtype, head_dim, ``full`` or ``causal``,
    and the number of sequences x lengths, one length if all have the same. The number of heads is
    named where that of `Dense` is.
    """

    dtype: str
    head_dim: int
    causal: bool
    sequences: int
    shortest: int
    longest: int
    heads: int = 16
    backward: bool = False

    batch = 1

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        kind = "causal" if self.causal else "full"
        heads = "" if self.heads * self.head_dim == 2048 else f" h{self.heads}"
        lengths = f"{self.shortest}-{self.longest}"
        shape = self.shortest if self.shortest == self.longest else lengths
        return f"{self.dtype} hd{self.head_dim} {kind} {self.sequences}x{shape}{heads}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each sequence has."""
        rng = random.Random(self.longest)
        steps = self.shortest // 8, self.longest // 8
        return tuple(8 * rng.randint(*steps) for _ in range(self.sequences))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each sequence begins, and where the last one ends."""
        return (0, *accumulate(self.lengths))

    @property
    def length(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    @property
    def flops(self) -> float:
        """Operations of two products of each sequence, five for gradients; half if causal."""
        products = 5 if self.backward else 2
        squares = sum(length**2 for length in self.lengths)
        full = 2.0 * products * self.heads * self.head_dim * squares
        return full / 2 if self.causal else full


@dataclass(frozen=True)
class MaskPack:
    """Packing an array of bool of ``heads`` masks; named ``bool 8192x16``, length x heads."""

    length: int
    heads: int
    dtype: str = "bool"

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        return f"{self.dtype} {self.length}x{self.heads}"

    @property
    def bytes(self) -> float:
        """What has to be moved: a byte read for a bit written."""
        return self.heads * self.length**2 * 1.125


@dataclass(frozen=True)
class GraphAttention:
    """Attention of nodes to neighbours; named ``fp32 hd64 random 100000 nodes 999 edges x1``.

    With weights, each edge has a bias, and ``weights`` ends the name.
    """

    dtype: str
    head_dim: int
    kind: str  # "random", "geometric" or "window"
    nodes: int
    edges: int  # about as many
    heads: int
    weights: bool = False

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        what = f"{self.kind} {self.nodes} nodes {self.edges} edges x{self.heads}"
        return f"{self.dtype} hd{self.head_dim} {what}" + " weights" * self.weights

    @property
    def work(self) -> float:
        """Pairs of a query and a key."""
        return float(self.heads * self.edges)


@dataclass(frozen=True)
class MaskSource:
    """A mask from ``keys`` keys of each query; named ``bool csr 32768x305``."""

    source: str  # "csr", "indices", "segments" or "window"
    length: int
    keys: int
    dtype: str = "bool"

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        return f"{self.dtype} {self.source} {self.length}x{self.keys}"

    @property
    def entries(self) -> float:
        """Keys that are named."""
        return float(self.length * self.keys)


@dataclass(frozen=True)
class CpuCall:
    """One call on the CPU, whatever it computes.

    The kind is "attention", "gradients" of it, "causal_product", "causal_product_gradients",
    "decode" (attention of one query), "masked" (attention under a mask), "from_dense" (making
    a mask of an array) or "linear_attention" (one row of it, with a state that it takes and
    returns). The shape is that of keys and values and, except of decoding, of queries.

    A mask is "none", or random: "array 0.5" is an array of bool of that density, "elements 0.5"
    the same as a `BitMask`, "blocks 0.5" one of blocks of 128 x 128. Many small matrices have a
    mask each, large ones share it.

    The name of a case, such as ``fp32 attention 1x8x512x64 causal``, has the dtype, the kind, the
    shape and what else there is. ``2^16x4x8`` has sixteen axes of 2 and two more.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str = "fp32"
    causal: bool = False
    query_heads: int = 0  # 0: as many as heads of keys
    mask: str = ""
    permuted: bool = False  # the batch axes of keys and values lie in memory in reverse order

    @property
    def name(self) -> str:
        """The key under which results of this case are stored."""
        axes = [(str(size), len([*same])) for size, same in groupby(self.shape)]
        shape = "x".join(
            f"{size}^{count}" if count > 4 else "x".join([size] * count) for size, count in axes
        )
        heads = f"{self.query_heads}-heads" if self.query_heads else ""
        more = (
            "causal" * self.causal, heads, self.mask.replace(" ", "-"), "permuted" * self.permuted
        )  # fmt: skip
        return " ".join(word for word in (self.dtype, self.kind, shape, *more) if word)

    @property
    def length(self) -> int:
        """How many keys there are."""
        return self.shape[-2]

    @property
    def head_dim(self) -> int:
        """That of queries, keys and values."""
        return self.shape[-1]

    @property
    def query_shape(self) -> tuple[int, ...]:
        """That of queries and of the output."""
        if self.kind != "decode":
            return self.shape
        batch, heads, _, dim = self.shape
        return batch, self.query_heads or heads, 1, dim

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """That of a mask: one for all, unless matrices are small."""
        batch = self.shape[:-2] if self.length < 128 else ()
        return *batch, self.length, self.length

    @property
    def batch(self) -> int:
        """Size of the first of four axes."""
        return self.shape[0]

    @property
    def heads(self) -> int:
        """Size of the second of four axes."""
        return self.shape[1]

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.kind.endswith("gradients")


def _tokens_16384(dtype: str, head_dim: int, lengths: tuple[int, ...]) -> tuple[Dense, ...]:
    return tuple(
        Dense(dtype, head_dim, causal, length, 16384 // length, 2048 // head_dim)
        for causal, length in product((False, True), lengths)
    )


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

ATTENTION_FWD = (
    *_tokens_16384("bf16", 128, _LENGTHS),
    *_tokens_16384("bf16", 64, _LENGTHS),
    *_tokens_16384("bf16", 256, _LENGTHS),
    *_tokens_16384("fp16", 128, _LENGTHS),
    # no tensor cores here: measured beside plain CuPy rather than beside the fused kernels
    *_tokens_16384("fp32", 128, (4096,)),
)

ATTENTION_BWD = tuple(
    replace(case, backward=True)
    for head_dim in (128, 64, 256)
    for case in _tokens_16384("bf16", head_dim, (1024, 4096, 16384))
)

ATTENTION_DROPOUT_FWD = tuple(
    replace(case, dropout=0.1)
    for head_dim in (128, 64, 256)
    for case in _tokens_16384("bf16", head_dim, (4096,))
)
ATTENTION_DROPOUT_BWD = tuple(replace(case, backward=True) for case in ATTENTION_DROPOUT_FWD)

# Wide floats, and float32 where products may have the precision of TF32.
ATTENTION_FLOAT_FWD = (
    *(case for dim in (128, 64, 256) for case in _tokens_16384("fp32", dim, (4096,))),
    *(replace(case, precision="tf32") for case in _tokens_16384("fp32", 128, (4096,))),
    *(case for dim in (128, 64, 256) for case in _tokens_16384("fp64", dim, (4096,))),
    # More dims than kernels take: products of cuBLAS.
    *(case for dtype in ("fp32", "fp64") for case in _tokens_16384(dtype, 512, (4096,))),
)
# Gradients know no precision.
ATTENTION_FLOAT_BWD = tuple(
    replace(case, backward=True) for case in ATTENTION_FLOAT_FWD if not case.precision
)

# Grouped queries, 4 heads for one of keys and values, and a window.
ATTENTION_OPTIONS = (
    *(
        Dense("bf16", 128, causal, length, 16384 // length, 32, kv_heads=8)
        for causal, length in product((False, True), (2048, 4096, 16384))
    ),
    Dense("bf16", 128, True, 8192, 1, 16, window=1024),
)

ATTENTION_SPARSE = tuple(
    MaskedAttention("bf16", 128, mask, 8192, 1, 16)
    for mask in (
        *("", "causal", "window 1024", "documents 16"),
        *("blocks 1.0", "blocks 0.5", "blocks 0.25", "blocks 0.1"),
        *("elements", "elements heads"),
    )
)
ATTENTION_BWD_SPARSE = tuple(
    replace(case, backward=True)
    for case in ATTENTION_SPARSE
    if case.mask.split(" ")[0] in ("", "documents", "blocks", "elements")
)

_SCORES = (
    "plain", "softcap", "softcap expression", "alibi", "alibi expression", "alibi16", "bias",
)  # fmt: skip
ATTENTION_SCORES_FWD = tuple(
    ScoredAttention("bf16", head_dim, causal, score, 4096, 4, 2048 // head_dim)
    for head_dim, causal in product((128, 64, 256), (False, True))
    # arrays that are larger or wider are measured at one head_dim
    for score in (*_SCORES, *(("bias heads", "bias32") if head_dim == 128 else ()))
)
ATTENTION_SCORES_BWD = (
    *(replace(case, backward=True) for case in ATTENTION_SCORES_FWD),
    *(
        ScoredAttention("bf16", head_dim, False, "bias grad", 4096, 4, 2048 // head_dim, True)
        for head_dim in (128, 64, 256)
    ),
)

ATTENTION_DECODE = (
    *(Decode("bf16", 128, batch, keys) for batch in (1, 16) for keys in (8192, 32768, 131072)),
    Decode("bf16", 128, 128, 4096),
    *(Decode("bf16", 64, batch, keys) for batch in (1, 16) for keys in (8192, 32768, 131072)),
    Decode("bf16", 128, 4, 8192),
    Decode("bf16", 64, 128, 4096),
    Decode("bf16", 256, 16, 8192),
    *(Decode("bf16", 128, *shape, q) for shape in ((1, 32768), (16, 8192)) for q in (4, 16)),
    Decode("bf16", 128, 1, 32768, page_size=64),
    *(
        Decode("bf16", 128, *shape, page_size=size)
        for shape in ((16, 8192), (16, 32768), (128, 4096))
        for size in (16, 64, 128)
    ),
    Decode("bf16", 128, 16, 32768, ragged=True),
)

ATTENTION_PACKED_FWD = tuple(
    Packed("bf16", head_dim, causal, *lengths, heads)
    for head_dim, heads in ((128, 16), (64, 16), (256, 8))
    for causal, lengths in product(
        (False, True),
        ((8, 512, 8192), (64, 64, 1024), (4, 4096, 4096), (16, 1024, 1024), (64, 256, 256)),
    )
)
ATTENTION_PACKED_BWD = tuple(replace(case, backward=True) for case in ATTENTION_PACKED_FWD)

MASK_PACK = (MaskPack(8192, 1), MaskPack(8192, 16))
MASK_SOURCE = (MaskSource("csr", 32768, 305), MaskSource("indices", 32768, 305))

ATTENTION_CPU = tuple(
    Dense("fp32", head_dim, causal, length, 1, heads)
    for (heads, length, head_dim), causal in product(
        ((8, 2048, 64), (8, 2048, 128), (4, 8192, 64)), (False, True)
    )
)

_EIGHT_HEADS = {n: (1, 8, n, 64) for n in (1, 16, 64, 128, 256, 512, 1024, 2048)}
CPU_SMALL = (
    CpuCall("attention", (8, 8)),
    *(CpuCall("attention", (1, 1, n, 64)) for n in (16, 64, 256)),
    *(CpuCall("attention", shape) for shape in _EIGHT_HEADS.values()),
    *(CpuCall("attention", _EIGHT_HEADS[n], causal=True) for n in (512, 1024, 2048)),
    *(CpuCall("attention", shape) for shape in ((1, 1, 512, 4096), (1, 1, 256, 65536))),
    *(CpuCall("gradients", _EIGHT_HEADS[n]) for n in (16, 64, 256, 1024)),
    *(CpuCall("causal_product", _EIGHT_HEADS[n]) for n in (16, 64, 256, 1024)),
    CpuCall("causal_product_gradients", _EIGHT_HEADS[256]),
    *(CpuCall("linear_attention", (1, heads, 1, 64)) for heads in (1, 8)),
    *(CpuCall("decode", (1, 32, n, 128)) for n in (128, 512, 2048, 8192)),
    *(CpuCall("decode", (1, 32, 8192, 128), dtype) for dtype in ("bf16", "fp16")),
    CpuCall("decode", (1, 8, 8192, 128), query_heads=32),
    *(
        CpuCall("masked", (1, 4, 4096, 64), mask=mask)
        for mask in (
            *("none", "array 0.5", "elements 0.5", "elements 0.05", "elements 0.005"),
            *("blocks 0.5", "blocks 0.05", "blocks 0.005"),
        )
    ),
    *(CpuCall("masked", (100_000, 4, 16), mask=mask) for mask in ("array 0.5", "elements 0.5")),
    CpuCall("from_dense", (100_000, 4, 4), "bool", mask="elements 0.5"),
    *(CpuCall("attention", (*(2,) * 16, 4, 8), permuted=permuted) for permuted in (False, True)),
)

GRAPHS_CPU = (
    GraphAttention("fp32", 64, "geometric", 20_000, 145_000, 1),
    GraphAttention("fp32", 64, "geometric", 20_000, 145_000, 8),
    GraphAttention("fp32", 64, "random", 100_000, 1_000_000, 1),
    GraphAttention("fp32", 64, "geometric", 20_000, 145_000, 8, weights=True),
    GraphAttention("fp32", 64, "random", 100_000, 1_000_000, 1, weights=True),
)
GRAPHS_GPU = (
    GraphAttention("fp16", 64, "geometric", 20_000, 145_000, 4),
    GraphAttention("fp16", 64, "random", 100_000, 1_000_000, 4),
    GraphAttention("fp16", 128, "random", 100_000, 1_000_000, 4),
    GraphAttention("fp16", 64, "window", 65_536, 65_536 * 49, 4),
    GraphAttention("fp32", 64, "geometric", 20_000, 145_000, 4),
    GraphAttention("fp32", 64, "random", 100_000, 1_000_000, 4),
)
MASK_MADE_CPU = (
    MaskSource("segments", 131_072, 1_000),
    MaskSource("window", 262_144, 5),
    MaskSource("csr", 100_000, 10),
)

# Many sequences, few long ones, and one case so small that it stays in the L2 cache.
_PRODUCT_SIZES = (
    (8, 16, 4096, 64),
    (8, 16, 4096, 128),
    (1, 16, 32768, 128),
    (1, 8, 65536, 64),
    (2, 4, 1024, 64),
)
CAUSAL_PRODUCT_FWD = tuple(
    CausalProduct(dtype, dim, length, batch, heads)
    for dtype, (batch, heads, length, dim) in product(("bf16", "fp32"), _PRODUCT_SIZES)
)
CAUSAL_PRODUCT_BWD = tuple(replace(case, backward=True) for case in CAUSAL_PRODUCT_FWD)
CAUSAL_PRODUCT_FP64_FWD = tuple(
    CausalProduct("fp64", dim, length, batch, heads)
    for batch, heads, length, dim in (*_PRODUCT_SIZES, (2, 16, 4096, 256))
)
CAUSAL_PRODUCT_FP64_BWD = tuple(replace(case, backward=True) for case in CAUSAL_PRODUCT_FP64_FWD)
