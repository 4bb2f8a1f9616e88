"""From one epoch of a model into the next: other ranks, another topology, and what belongs to these."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from loguru import logger
from torch.optim import Optimizer

import topologies
from gossip.algorithms import Algorithm, resolve_algorithm
from gossip.communication.survivors.agreement import Epoch
from gossip.communication.survivors.edge_transport import EdgeTransport
from gossip.communication.survivors.living_world import LivingWorld
from gossip.communication.survivors.mesh import in_words
from gossip.communication.world import World
from gossip.compression.codec import Compression
from gossip.step.construction import Parts
from gossip.step.wrapper_arguments import Arguments, prepare_algorithm
from topologies import Topology


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the ranks of an epoch exchange.

    Attributes
    ----------
    topology : Topology
        Of as many ranks as the epoch has members.
    algorithm : Algorithm
        Fitted to it.
    """

    topology: Topology
    algorithm: Algorithm

    @classmethod
    def make(
        cls,
        topology: Topology,
        world_size: int,
        arguments: Arguments,
        compression: Compression,
        optimizers: tuple[Optimizer, ...],
    ) -> Plan:
        """The same topology for so many ranks, with the algorithm and the compression of the arguments.

        Raises
        ------
        ValueError, TypeError
            It cannot serve so many, or not with these.
        """
        resized = topology.resized(world_size)
        algorithm = resolve_algorithm(arguments.algorithm)
        averages_buffers = arguments.buffers == "average"
        return cls(
            resized,
            prepare_algorithm(algorithm, resized, compression, optimizers, averages_buffers=averages_buffers),
        )


class EpochChange:
    """Takes a model from epoch to epoch.

    Parameters
    ----------
    world : LivingWorld
    parts : Parts
        Of the model, in its first epoch.
    arguments : Arguments

    Attributes
    ----------
    epoch : Epoch
        Whose topology the model exchanges along.
    on_change : callable
        Called with every new topology and algorithm.
    """

    def __init__(self, world: World, parts: Parts, arguments: Arguments) -> None:
        assert isinstance(world, LivingWorld)
        self.epoch = Epoch(0, tuple(range(parts.topology.world_size)))
        self.on_change: Callable[[Topology, Algorithm], None] = lambda *_: None
        self._world, self._parts, self._arguments = world, parts, arguments

    def begin_step(self) -> None:
        """Be in the epoch of the step that comes next; waits while the ranks agree on one.

        Raises
        ------
        ExchangeError
            This rank cannot go on.
        """
        if self._world.is_joint:  # a checkpoint is being loaded: whoever does something together is in an epoch
            self._world.agreement.step = self._parts.engine.step
            return
        epoch = self._world.agreement.enter_step(self._parts.engine.step)
        if epoch.number > self._world.epoch.number:
            self._world.enter(epoch)
        self.catch_up(epoch)

    def catch_up(self, epoch: Epoch | None = None) -> None:
        """Exchange along the topology of an epoch, by default of that in which all ranks do things together. Local."""
        epoch = epoch or self._world.epoch
        if epoch.number <= self.epoch.number:
            return
        plan = self._plan(len(epoch.members))
        schedule = plan.algorithm.schedule(plan.topology)
        transport = None
        if len(epoch.members) > 1:
            compression = plan.algorithm.compression or self._parts.compression
            transport = EdgeTransport(self._world, schedule, members=epoch.members, follows_up=compression.follows_up)
        self._parts.engine.move(schedule, transport, plan.algorithm, epoch.members.index(self._world.member))
        before, self.epoch = self.epoch, epoch
        self._tell(before, plan.topology)
        self.on_change(plan.topology, plan.algorithm)

    def _plan(self, world_size: int) -> Plan:
        try:
            return Plan.make(
                self._parts.topology, world_size, self._arguments, self._parts.compression, self._parts.optimizers
            )
        except (ValueError, TypeError) as error:
            if self._world.member == self._world.epoch.members[0]:
                logger.warning(
                    "topology {} cannot serve {} ranks, which {} does from here on ({})",
                    self._parts.topology.name,
                    world_size,
                    self._arguments.fallback_topology,
                    error,
                )
            fallback = topologies.build(self._arguments.fallback_topology, world_size)
            return Plan.make(fallback, world_size, self._arguments, self._parts.compression, self._parts.optimizers)

    def _tell(self, before: Epoch, topology: Topology) -> None:
        if self._world.member != self.epoch.members[0]:
            return
        lost = [member for member in before.members if member not in self.epoch.members]
        reasons = "; ".join(f"rank {member}: {self._world.mesh.lost.get(member, 'given up')}" for member in lost)
        logger.warning(
            "step {}: {} of {} ranks go on, {}, with topology {}; lost: {}",
            self._parts.engine.step,
            len(self.epoch.members),
            len(before.members),
            in_words(self.epoch.members),
            topology.name,
            reasons,
        )


def follow_epochs(model: Any, parts: Parts, arguments: Arguments, world: World) -> Callable[[], None]:
    """Let a model go on when ranks are lost; what brings it into the epoch of all ranks between two steps."""
    change = EpochChange(world, parts, arguments)
    reference = weakref.ref(model)

    def show(topology: Topology, algorithm: Algorithm) -> None:
        if (shown := reference()) is not None:
            shown.topology, shown.algorithm = topology, algorithm

    change.on_change = show
    parts.engine.on_step_end = change.begin_step
    change.begin_step()
    return change.catch_up
