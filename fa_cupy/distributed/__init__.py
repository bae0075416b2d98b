"""Attention and causal products over a sequence that is spread over GPUs or processes.

Each rank, a thread or a process, has a part of the sequence (axis -2), calls the same function with
a communicator, and gets its part of the result.
"""

from fa_cupy.distributed.attention import attention
from fa_cupy.distributed.communicator import Communicator, RankError
from fa_cupy.distributed.gradients import attention_backward
from fa_cupy.distributed.order import join, positions, split
from fa_cupy.distributed.plans import Machine, Plan, plan
from fa_cupy.distributed.processes import MpiCommunicator, NcclCommunicator
from fa_cupy.distributed.products import causal_product, causal_product_backward, linear_attention
from fa_cupy.distributed.threads import Local, ThreadCommunicator, local

__all__ = [
    "Communicator",
    "Local",
    "Machine",
    "MpiCommunicator",
    "NcclCommunicator",
    "Plan",
    "RankError",
    "ThreadCommunicator",
    "attention",
    "attention_backward",
    "causal_product",
    "causal_product_backward",
    "join",
    "linear_attention",
    "local",
    "plan",
    "positions",
    "split",
]
