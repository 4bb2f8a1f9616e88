"""The ranks that hold one replica together, each a shard of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gossip.communication.device_operations import Ended
from gossip.communication.waiting import is_lost_connection
from gossip.communication.world import World
from gossip.errors import ExchangeError
from gossip.parameters.buckets import Bucket
from gossip.parameters.names import named_parameters
from gossip.private_torch import bound_waits, fsdp_modules, fsdp_parameters, gather_by, guard_collectives, sum_by
from gossip.sharding.fsdp_shards import FSDPShards
from gossip.sharding.local_group import PartitionedGroup, Steps


class FSDPGroup(PartitionedGroup):
    """A group whose replica ``fully_shard`` has divided: each rank trains and exchanges its shards.

    Parameters
    ----------
    module : Module
        Sharded by ``fully_shard`` over ``mesh["shard"]``.
    """

    is_sharded_inside = True
    replica: FSDPShards

    def __init__(self, module: nn.Module, mesh: DeviceMesh, world: World) -> None:
        _check_sharding(module, mesh)
        super().__init__(module, FSDPShards(module), world)
        self._step = 0
        self._on_state_dict: Any = None

    def _wholes(self) -> Iterable[torch.Tensor]:
        return ()

    def attach(self, buckets: Iterable[Bucket], steps: Steps) -> None:
        del buckets  # FSDP reduces gradients by itself
        self.replica.attach()
        if self.rows.gathers_in_memory:
            gather_by(self.module, self._gather, self.world.world_size)
        if self.rows.sums_in_memory:
            sum_by(self.module, self._sum, self.world.world_size)
        watch_collectives(self.module, self.world, lambda: f"step {self._step}")
        self._on_state_dict = self.module.register_state_dict_pre_hook(lambda *_: steps.combine_if_due())

    def _gather(self, rows: torch.Tensor) -> None:
        self.rows.begin_gather(rows, f"step {self._step}: gathering parameters {in_words(self.world)}")()

    def _sum(self, rows: torch.Tensor, total: torch.Tensor) -> None:
        self.rows.begin_sum(rows, f"step {self._step}: reducing gradients {in_words(self.world)}", out=total)()

    def before_forward(self, step: int) -> None:
        """Drop what was gathered before the newest step; GossipError if a parameter is elsewhere now. Local."""
        self.replica.check()
        if step != self._step:
            self._step = step
            self.replica.reshard()

    def changed(self) -> None:
        self.replica.reshard()

    def lengths(self) -> Mapping[str, tuple[int, int]]:
        return self.replica.lengths()

    def close(self) -> None:
        """Remove the hooks, and let the module keep what it has. Local."""
        if self._on_state_dict is not None:
            self._on_state_dict.remove()
            guard_collectives(self.module, None)
            gather_by(self.module, None, self.world.world_size)
            sum_by(self.module, None, self.world.world_size)
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
        if each.mesh.device_type != mesh.device_type:
            raise ValueError(
                f"mesh is on {mesh.device_type!r}, but the module is sharded over a mesh on {each.mesh.device_type!r}; "
                "make both with the same device_type"
            )
        if each.mesh.ndim != 1 or not torch.equal(each.mesh.mesh, shard.mesh):
            raise ValueError(
                f"mesh: the module is sharded over the ranks {each.mesh.mesh.tolist()}, which are not those of "
                f'mesh["shard"], {shard.mesh.tolist()}; apply '
                'fully_shard(..., mesh=mesh["shard"]): between the groups there is gossip, which a mesh that also '
                "replicates (hybrid sharding) would all-reduce"
            )
        if each.is_offloaded:
            raise ValueError(
                "mesh: the module was sharded with CPUOffloadPolicy, which moves shards while they are exchanged; "
                "leave offload_policy out"
            )
    managed = {id(each.sharded) for each in fsdp_parameters(module)}
    for name, parameter in named_parameters(module):
        if id(parameter) not in managed:
            raise ValueError(
                f"mesh: parameter {name!r} is not sharded, so nothing would average its gradients within the shard "
                'group; apply fully_shard(module, mesh=mesh["shard"]) to the whole module last, without ignored_params'
            )


def watch_collectives(module: nn.Module, world: World, where: Callable[[], str]) -> None:
    """Bound the waits of a sharded module's collectives by the world's time-out, and name who lets them fail. Local.

    torch's own time-out is half an hour, and its errors name addresses. ``where`` returns the step, in words.
    ``guard_collectives(module, None)`` ends it, but for the time-out.
    """
    if world.is_alone:
        return
    membership = world.membership
    assert membership is not None
    bound_waits(membership.group, world.timeout)

    def failed(what: str, error: RuntimeError) -> ExchangeError | None:
        if isinstance(error, ExchangeError) or not is_lost_connection(error):
            return None
        text = f"{where()}: {what} {in_words(world)}"
        failure = world.wait_for(Ended(error), text, lambda: world.others)
        assert failure is not None, "what it waits for has failed"
        return world.lost(failure, text)

    guard_collectives(module, failed)


def in_words(world: World) -> str:
    """Return where a collective of a shard group takes place, for error texts. Local."""
    assert world.membership is not None
    return f"within the shard group (ranks {list(world.membership.ranks)} of the default process group)"
