"""GPUs for the ranks of a test: several ranks share one where there are fewer."""

import os

import pytest
import torch
import torch.distributed as dist

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_a_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="torch.cuda.is_available() is False")
needs_nccl = pytest.mark.skipif(NUM_GPUS < 1 or not dist.is_nccl_available(), reason="NCCL needs a GPU")


def choose_device(kind: str) -> torch.device:
    """Return the device of this rank, which becomes the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    # NCCL refuses two ranks of one host on a device: each takes itself for a host of its own, and sends by sockets.
    os.environ["NCCL_HOSTID"] = f"rank {dist.get_rank()}"
    device = torch.device("cuda", dist.get_rank() % NUM_GPUS)
    torch.cuda.set_device(device)
    return device
