"""torch's bf16 hook on gloo.

Without ``from __future__ import annotations``: DistributedDataParallel compares a hook's annotations with the types.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Under its own name DistributedDataParallel refuses it without NCCL, though gloo adds bfloat16 too."""
    return default_hooks.bf16_compress_hook(group, bucket)
