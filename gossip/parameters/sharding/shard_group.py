"""The ranks that hold one replica together, each a shard of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gossip.communication.world import World
from gossip.parameters.sharding.local_group import LocalGroup
from gossip.parameters.sharding.local_shards import LocalShards, unsharded_parameters
from gossip.private_torch import fsdp_modules, fsdp_parameters

_CHUNK_BYTES = 16 * 2**20


class ShardGroup(LocalGroup):
    """The shard group of this rank, and what of its replica this rank holds.

    Parameters
    ----------
    module : Module
        Sharded by ``fully_shard`` over ``mesh["shard"]``.
    mesh : DeviceMesh
        Of the dimensions "gossip" and "shard".
    is_whole : bool
        Whether the module is not sharded yet: it is sharded here so that forward and backward passes keep it gathered.
    timeout : timedelta
        How long any wait for the other ranks of the group can last before it raises.

    Notes
    -----
    Construction is collective over the group.
    """

    replica: LocalShards

    def __init__(self, module: nn.Module, mesh: DeviceMesh, timeout: timedelta, *, is_whole: bool) -> None:
        if is_whole:
            if fsdp_modules(module):
                raise ValueError('shard="optimizer" shards the module itself, but it is sharded already; leave it out')
            fully_shard(module, mesh=mesh["shard"], reshard_after_forward=False)
        _check_sharding(module, mesh)
        super().__init__(module, LocalShards(module), World(timeout, mesh.get_group("shard")))
        self.num_shards, self.place = self.world.world_size, self.world.rank
        self._step = 0
        self._on_state_dict: Any = None

    def attach(self, combine: Callable[[], None]) -> None:
        self.replica.attach()
        self._on_state_dict = self._module.register_state_dict_pre_hook(lambda *_: combine())

    def before_forward(self, step: int) -> None:
        """Drop what was gathered before the newest step. Local.

        Raises
        ------
        GossipError
            A parameter is no longer where it is exchanged from.
        """
        self.replica.check()
        if step != self._step:
            self._step = step
            self.replica.reshard()

    def changed(self) -> None:
        self.replica.reshard()

    def norm(self, norm: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        if self.world.is_alone:
            return norm
        if order == math.inf:
            norms = self.world.gather_bytes(norm.to(torch.float64).cpu().numpy().tobytes(), "the norm of all gradients")
            largest = max(float(torch.frombuffer(bytearray(each), dtype=torch.float64)) for each in norms)
            return torch.tensor(largest, dtype=norm.dtype, device=norm.device)
        power = norm.to(torch.float64) ** order
        self.world.sum_(power, "the norm of all gradients")
        return (power ** (1.0 / order)).to(norm.dtype)

    def any(self, flag: bool) -> bool:
        if self.world.is_alone:
            return flag
        count = torch.tensor(float(flag))
        self.world.sum_(count, "agreeing within the shard group")
        return bool(count)

    def sums(self, values: Iterable[float], what: str) -> list[float]:
        summed = torch.tensor(list(values), dtype=torch.float64)
        self.world.sum_(summed, what)
        return summed.tolist()

    def lengths(self) -> Mapping[str, tuple[int, int]]:
        return self.replica.lengths()

    def gather(self, shard: torch.Tensor, dimension: int, length: int, what: str) -> torch.Tensor | None:
        """As described there; the other ranks hold a chunk of all shards at a time. Collective over the group."""
        flat = shard.detach().cpu().contiguous().view(-1)
        if self.world.is_alone:
            return shard.narrow(dimension, 0, length)
        is_first = self.world.rank == 0
        parts = [torch.empty_like(flat) for _ in range(self.world.world_size)] if is_first else []
        chunk = max(1, _CHUNK_BYTES // flat.itemsize)
        for start in range(0, flat.numel(), chunk):
            piece = flat[start : start + chunk]
            payloads = self.world.gather_bytes(bytes(piece.view(torch.uint8).numpy()), what)
            for part, payload in zip(parts, payloads, strict=False):
                values = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(flat.dtype)
                part[start : start + chunk].copy_(values)
        if not is_first:
            return None
        return torch.cat([part.view(shard.shape) for part in parts], dimension).narrow(dimension, 0, length)

    def close(self) -> None:
        """Remove the hooks, and let the module keep what it has. Local."""
        if self._on_state_dict is not None:
            self._on_state_dict.remove()
        self.replica.close()
        super().close()


def _check_sharding(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a module that is not sharded over the mesh's shard dimension, and over nothing else."""
    if not fsdp_modules(module):
        raise ValueError(
            'mesh: the module is not sharded; apply torch.distributed.fsdp.fully_shard(module, mesh=mesh["shard"]) '
            'before wrapping it; or pass shard="optimizer", which divides all but gathered parameters, or shard="none"'
        )
    shard = mesh["shard"]
    for each in fsdp_parameters(module):
        if each.mesh.ndim != 1 or not torch.equal(each.mesh.mesh, shard.mesh):
            raise ValueError(
                f'mesh: the module is sharded over {each.mesh}, which is not mesh["shard"], {shard}; apply '
                'fully_shard(..., mesh=mesh["shard"]): between the groups there is gossip, which a mesh that also '
                "replicates (hybrid sharding) would all-reduce"
            )
        if each.is_offloaded:
            raise ValueError(
                "mesh: the module was sharded with CPUOffloadPolicy, which moves shards while they are exchanged; "
                "leave offload_policy out"
            )
    for name in unsharded_parameters(module):
        raise ValueError(
            f"mesh: parameter {name!r} is not sharded, so nothing would average its gradients within the shard group; "
            'apply fully_shard(module, mesh=mesh["shard"]) to the whole module last, without ignored_params'
        )
