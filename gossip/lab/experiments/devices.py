"""The devices of a configured run's ranks, and the backend of their messages."""

import os
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from pydantic import AfterValidator


def _there(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no GPU here; take cpu or auto")
    return device


Device = Annotated[Literal["auto", "cpu", "cuda"], AfterValidator(_there)]
"""As a setting: auto is cuda where torch finds it."""


def own_device(wanted: str) -> torch.device:
    """Return this rank's device, the current one from now on: a GPU by its number on the node, or the CPU."""
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(num_local_ranks: int, wanted: str = "auto") -> str:
    """Return the backend for so many ranks on each node: gloo, and NCCL where each has a GPU of its own."""
    has_nccl = wanted != "cpu" and torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_nccl and num_local_ranks <= torch.cuda.device_count() else "gloo"
