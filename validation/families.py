"""The families of the benchmark: inputs, implementations, what checks them, and units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from validation import (
    backward_peers,
    cases,
    checks,
    cpu_peers,
    decode_peers,
    dropout_peers,
    float_peers,
    graph_gpu_peers,
    graph_peers,
    packed_peers,
    peers,
    product_peers,
    score_peers,
    sparse_backward,
    sparse_peers,
)
from validation.checks import Check
from validation.peers import Call
from validation.timing import Sampling


@dataclass(frozen=True, kw_only=True)
class Family(Sampling):
    """What is measured the same way: inputs, implementations, the reference and the unit.

    `pause_ms` and `rest_ms` are explained at `CPU_PAUSE_MS` and `GPU_REST_MS`.
    """

    device: str  # "gpu" or "cpu"
    cases: tuple[Any, ...]
    impls: Mapping[str, Callable[[Any, Any], Call]]
    default_impls: tuple[str, ...]
    inputs: Callable[[Any, int], tuple[Any, ...]]
    check: Callable[[Any, Any], Check]
    unit: str
    per_second: float = 0.0  # of `work` a second in one unit; of a family of times none
    work: Callable[[Any], float] = attrgetter("flops")  # what a speed counts of a case
    picture: str = ""  # families of one name share a picture, which is called after it

    def value(self, case: Any, ms: float) -> float:
        """What a row shows of a time in milliseconds: a speed, or the time in microseconds."""
        if self.unit == "us":
            return ms * 1e3
        return float(self.work(case) / (ms * 1e-3) / self.per_second)


# After a call, the OpenMP threads of torch spin for a while before they sleep, and on a machine
# with as many threads as cores that time is taken from whoever is timed next. So all
# implementations rest alike before each timed call, until nothing of the call before is running.
CPU_PAUSE_MS = 30.0

# An H200 that has been busy for a while is slower: it runs into its power limit, whoever made it
# busy. A rest before each sample, of all alike, keeps one implementation's heat from the next one.
GPU_REST_MS = 30.0

_ATTENTION_FWD = Family(
    device="gpu",
    cases=cases.ATTENTION_FWD,
    impls={
        "fa_cupy": peers.fa_cupy,
        "cudnn": peers.torch_sdpa("CUDNN_ATTENTION"),
        "flash2": peers.torch_sdpa("FLASH_ATTENTION"),
        "efficient": peers.torch_sdpa("EFFICIENT_ATTENTION"),
        "jax": peers.jax,
        "plain_cupy": peers.plain_cupy,
    },
    default_impls=("fa_cupy", "cudnn", "flash2"),
    inputs=peers.random_cupy,
    check=checks.attention_check,
    unit="TFLOP/s",
    per_second=1e12,
    burst_ms=8,
    rest_ms=GPU_REST_MS,
)

_GRAPHS_GPU = Family(
    device="gpu",
    cases=cases.GRAPHS_GPU,
    impls=graph_gpu_peers.forward,
    default_impls=tuple(graph_gpu_peers.forward),
    inputs=graph_gpu_peers.random_cupy,
    check=graph_gpu_peers.check,
    unit="G/s",
    per_second=1e9,
    burst_ms=20,
    rest_ms=GPU_REST_MS,
    work=attrgetter("work"),
    picture="graphs",
)

_PRODUCTS = {
    "fa_cupy": product_peers.fa_cupy(),
    "fa_cupy_recurrent": product_peers.fa_cupy("recurrent"),
    "fa_cupy_low_occupancy": product_peers.fa_cupy("low_occupancy"),
    "fla_chunk": product_peers.fla("chunk_linear_attn"),
    "fla_fused_chunk": product_peers.fla("fused_chunk_linear_attn"),
    "torch_chunk": product_peers.torch_chunk,
}
_GRADIENTS = {name: _PRODUCTS[name] for name in _PRODUCTS if not name.startswith("fa_cupy_")}
_CAUSAL_PRODUCT_FWD = Family(
    device="gpu",
    cases=cases.CAUSAL_PRODUCT_FWD,
    impls=_PRODUCTS,
    default_impls=tuple(_PRODUCTS),
    inputs=product_peers.random_cupy,
    check=checks.product_check,
    unit="GB/s",
    per_second=1e9,
    burst_ms=8,
    rest_ms=GPU_REST_MS,
    work=attrgetter("bytes"),
    picture="causal_product",
)

_PRODUCTS_FP64 = {
    "fa_cupy": _PRODUCTS["fa_cupy"],
    "fa_cupy_cublas": product_peers.fa_cupy_cublas,
    "torch_chunk": product_peers.torch_chunk,
}
_CAUSAL_PRODUCT_FP64_FWD = dataclasses.replace(
    _CAUSAL_PRODUCT_FWD,
    cases=cases.CAUSAL_PRODUCT_FP64_FWD,
    impls=_PRODUCTS_FP64,
    default_impls=tuple(_PRODUCTS_FP64),
)

_PACKED = dataclasses.replace(
    _ATTENTION_FWD,
    cases=cases.ATTENTION_PACKED_FWD,
    impls=packed_peers.forward,
    default_impls=tuple(packed_peers.forward),
    inputs=packed_peers.random_cupy,
    check=packed_peers.check,
    picture="packed",
)

FAMILIES: dict[str, Family] = {
    "attention_fwd": _ATTENTION_FWD,
    "attention_bwd": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_BWD,
        impls={
            "fa_cupy": backward_peers.fa_cupy,
            "cudnn": backward_peers.torch_sdpa("CUDNN_ATTENTION"),
            "flash2": backward_peers.torch_sdpa("FLASH_ATTENTION"),
        },
        inputs=backward_peers.random_cupy,
        check=checks.backward_check,
    ),
    "attention_float_fwd": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_FLOAT_FWD,
        impls=float_peers.forward,
        default_impls=tuple(float_peers.forward),
        picture="float",
    ),
    "attention_float_bwd": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_FLOAT_BWD,
        impls=float_peers.backward,
        default_impls=tuple(float_peers.backward),
        inputs=backward_peers.random_cupy,
        check=checks.backward_check,
        picture="float",
    ),
    "attention_dropout_fwd": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_DROPOUT_FWD,
        impls=dropout_peers.forward,
        default_impls=tuple(dropout_peers.forward),
        check=dropout_peers.forward_check,
        picture="dropout",
    ),
    "attention_dropout_bwd": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_DROPOUT_BWD,
        impls=dropout_peers.backward,
        default_impls=tuple(dropout_peers.backward),
        inputs=backward_peers.random_cupy,
        check=dropout_peers.gradients_check,
        picture="dropout",
    ),
    "attention_options": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_OPTIONS,
        impls={
            "fa_cupy": peers.fa_cupy,
            "cudnn": peers.torch_sdpa("CUDNN_ATTENTION"),
            "flash2": peers.torch_sdpa("FLASH_ATTENTION"),
            "flash2_window": peers.torch_flash_window,
        },
        default_impls=("fa_cupy", "cudnn", "flash2", "flash2_window"),
    ),
    "attention_sparse": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_SPARSE,
        impls={
            "fa_cupy": sparse_peers.fa_cupy,
            "fa_cupy_array": sparse_peers.fa_cupy_array,
            "fa_cupy_band": sparse_peers.fa_cupy_band,
            "flex": sparse_peers.flex,
        },
        default_impls=("fa_cupy", "fa_cupy_array", "fa_cupy_band", "flex"),
        inputs=sparse_peers.random_cupy,
        check=sparse_peers.masked_check,
        picture="sparse",
    ),
    "attention_bwd_sparse": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_BWD_SPARSE,
        impls={
            "fa_cupy": sparse_backward.fa_cupy,
            "fa_cupy_array": sparse_backward.fa_cupy_array,
            "flex": sparse_backward.flex,
        },
        default_impls=("fa_cupy", "fa_cupy_array", "flex"),
        inputs=sparse_backward.random_cupy,
        check=sparse_backward.masked_check,
        picture="sparse",
    ),
    "attention_scores_fwd": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_SCORES_FWD,
        impls={"fa_cupy": score_peers.fa_cupy, **score_peers.impls(score_peers.forward)},
        default_impls=("fa_cupy", "cudnn", "efficient", "flex", "flex_sigmoid"),
        inputs=score_peers.random_cupy,
        check=score_peers.forward_check,
        picture="scores",
    ),
    "attention_scores_bwd": dataclasses.replace(
        _ATTENTION_FWD,
        cases=cases.ATTENTION_SCORES_BWD,
        impls={"fa_cupy": score_peers.fa_cupy_backward, **score_peers.impls(score_peers.backward)},
        default_impls=("fa_cupy", "cudnn", "efficient", "flex", "flex_sigmoid"),
        inputs=score_peers.random_cupy,
        check=score_peers.backward_check,
        picture="scores",
    ),
    "attention_decode": dataclasses.replace(
        _CAUSAL_PRODUCT_FWD,
        cases=cases.ATTENTION_DECODE,
        impls={
            "fa_cupy": decode_peers.fa_cupy,
            "cudnn": decode_peers.torch_sdpa("CUDNN_ATTENTION"),
            "flash2": decode_peers.torch_sdpa("FLASH_ATTENTION"),
        },
        default_impls=("fa_cupy", "cudnn", "flash2"),
        inputs=decode_peers.random_cupy,
        check=decode_peers.check,
        picture="decode",
    ),
    "attention_packed_fwd": _PACKED,
    "attention_packed_bwd": dataclasses.replace(
        _PACKED,
        cases=cases.ATTENTION_PACKED_BWD,
        impls=packed_peers.backward,
        default_impls=tuple(packed_peers.backward),
        inputs=packed_peers.random_gradients,
        check=packed_peers.gradients_check,
    ),
    "mask_pack": dataclasses.replace(
        _CAUSAL_PRODUCT_FWD,
        cases=cases.MASK_PACK,
        impls={"fa_cupy": sparse_peers.pack, "copy": sparse_peers.copy},
        default_impls=("fa_cupy", "copy"),
        inputs=sparse_peers.random_masks,
        check=sparse_peers.pack_check,
        picture="sparse",
    ),
    "mask_source": dataclasses.replace(
        _CAUSAL_PRODUCT_FWD,
        cases=cases.MASK_SOURCE,
        impls={"fa_cupy": sparse_peers.from_source, "fa_cupy_cpu": sparse_peers.from_source_cpu},
        default_impls=("fa_cupy",),
        inputs=sparse_peers.random_source,
        check=sparse_peers.source_check,
        unit="M/s",
        per_second=1e6,
        work=attrgetter("entries"),
        picture="sparse",
    ),
    "causal_product_fwd": _CAUSAL_PRODUCT_FWD,
    "causal_product_bwd": dataclasses.replace(
        _CAUSAL_PRODUCT_FWD,
        cases=cases.CAUSAL_PRODUCT_BWD,
        impls=_GRADIENTS,
        default_impls=tuple(_GRADIENTS),
    ),
    "causal_product_fp64_fwd": _CAUSAL_PRODUCT_FP64_FWD,
    "causal_product_fp64_bwd": dataclasses.replace(
        _CAUSAL_PRODUCT_FP64_FWD, cases=cases.CAUSAL_PRODUCT_FP64_BWD
    ),
    "graphs_cpu": Family(
        device="cpu",
        cases=cases.GRAPHS_CPU,
        impls={
            "fa_cupy": graph_peers.fa_cupy,
            "fa_cupy_reordered": graph_peers.fa_cupy_reordered,
            "edges": graph_peers.edges,
            "torch_scatter": graph_peers.torch_scatter,
        },
        default_impls=("fa_cupy", "fa_cupy_reordered", "edges", "torch_scatter"),
        inputs=graph_peers.random_numpy,
        check=graph_peers.check,
        unit="k/s",
        per_second=1e3,
        burst_ms=200,
        pause_ms=CPU_PAUSE_MS,
        work=attrgetter("work"),
        picture="graphs",
    ),
    "graphs_gpu": _GRAPHS_GPU,
    "graphs_bwd_gpu": dataclasses.replace(
        _GRAPHS_GPU,
        impls=graph_gpu_peers.backward,
        default_impls=tuple(graph_gpu_peers.backward),
        inputs=graph_gpu_peers.random_gradients,
        check=graph_gpu_peers.gradients_check,
    ),
    "mask_made_cpu": Family(
        device="cpu",
        cases=cases.MASK_MADE_CPU,
        impls={"fa_cupy": graph_peers.made},
        default_impls=("fa_cupy",),
        inputs=graph_peers.source,
        check=graph_peers.made_check,
        unit="k/s",
        per_second=1e3,
        burst_ms=200,
        work=attrgetter("length"),
        picture="graphs",
    ),
    "cpu_small": Family(
        device="cpu",
        cases=cases.CPU_SMALL,
        impls=cpu_peers.IMPLS,
        default_impls=tuple(cpu_peers.IMPLS),
        inputs=cpu_peers.random_numpy,
        check=cpu_peers.check,
        unit="us",
        # Whatever else a shared machine does makes a call of microseconds longer, never shorter.
        statistic="minimum",
        # After a rest, the second core takes milliseconds to come, for all libraries.
        burst_ms=20,
        quiet=True,
        warm_ms=20,
        rounds=50,
        seconds=4.5,
        agree=0.05,
        picture="small",
    ),
    "attention_cpu": Family(
        device="cpu",
        cases=cases.ATTENTION_CPU,
        impls={"fa_cupy": peers.fa_cupy, "torch": peers.torch_sdpa("FLASH_ATTENTION")},
        default_impls=("fa_cupy", "torch"),
        inputs=peers.random_numpy,
        check=checks.attention_check,
        unit="GFLOP/s",
        per_second=1e9,
        burst_ms=200,
        pause_ms=CPU_PAUSE_MS,
    ),
}
