"""torch's bf16 communication hook for gloo.

This module does without ``from __future__ import annotations``, because DistributedDataParallel compares a hook's
annotations with the types themselves.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress gradients to bfloat16.

    Under its own name, DistributedDataParallel refuses torch's hook without NCCL, although gloo can sum bfloat16 too.
    """
    return default_hooks.bf16_compress_hook(group, bucket)
