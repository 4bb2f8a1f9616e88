"""A rank as it trains with ``on_peer_loss="continue"``, but for its model: one number, which is averaged exactly.

Everything that ranks say to each other is said by the library: the mesh, the consensus, the failure detector, flags,
late messages, collective operations, state transfer, and the transition from generation to generation.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import pkgutil
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

import gossip.elastic
import topologies
from elastic_simulator.simulated_groups import SimulatedGroup, wait_for
from elastic_simulator.virtual_network import Network, VirtualSocketModule, VirtualWatcher
from elastic_simulator.virtual_time import Scheduler, VirtualDaemonThreads, VirtualThreading, VirtualTime
from gossip.communication.host import available_memory, daemon_threads
from gossip.compression.conversation import Arrival, Conversation, Turn, Turns
from gossip.elastic import elastic_world, joining_rank, membership_protocol, shard_group_world
from gossip.elastic.connections import listener, mesh
from gossip.elastic.elastic_flag import ElasticFlag
from gossip.elastic.elastic_world import ElasticWorld
from gossip.exchange import edge_transport, late_messages
from gossip.step import generation_change
from gossip.step.generation_change import GenerationChange, agree_on_
from topologies import Round, Topology

UNIT = 2.0**30
"""What values are multiples of in the beginning: each exchange halves a difference, and all of it stays exact."""
Message = tuple[float, float, float, float]
"""The value of a rank, its number, the step and the generation."""


@functools.cache
def _imports() -> list[tuple[object, str, object]]:
    """Return the module and the name under which something that is replaced has been imported, and what it is."""
    modules = [edge_transport, late_messages, generation_change]
    for package in (gossip.elastic, gossip.elastic.connections):
        modules += [
            importlib.import_module(f"{package.__name__}.{each.name}")
            for each in pkgutil.iter_modules(package.__path__)
        ]
    real = (time, threading, socket, daemon_threads)
    return [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if any(value is each for each in real)
    ]


@contextlib.contextmanager
def replaced(scheduler: Scheduler, network: Network) -> Iterator[None]:
    """Within the block the modules that this is about use virtual time, threads and sockets.

    Garbage is collected after it: that takes a tenth of the time.
    """
    virtual: dict[object, object] = {
        time: VirtualTime(scheduler),
        threading: VirtualThreading(scheduler),
        socket: VirtualSocketModule(network),
        daemon_threads: VirtualDaemonThreads(scheduler, daemon_threads),
    }
    others: list[tuple[object, str, object]] = [
        (mesh, "_TICK_S", 0.1),  # longer pauses change nothing but what the simulation costs
        (joining_rank, "_PAUSE_S", 0.02),
        (membership_protocol, "_PAUSE_S", 0.01),
        (membership_protocol, "_GRACE_S", 0.3),
        (mesh, "Watcher", functools.partial(VirtualWatcher, scheduler)),
        (listener, "_has_spare_descriptors", lambda _: True),
        (available_memory, "available_bytes", lambda: None),
        (shard_group_world, "wait_for", functools.partial(wait_for, scheduler)),
        (elastic_world, "can_share", lambda: False),
        (elastic_world, "own_connection", lambda store: store),
        (elastic_world, "own_address", lambda _: ("host", "127.0.0.1")),
        (elastic_world, "own_network", lambda: "network"),
        (elastic_world, "resending_soon", lambda _: contextlib.nullcontext()),
        (generation_change, "Preemption", lambda *_: SimpleNamespace(install=lambda: None)),
        (generation_change, "GivenObjects", lambda *_: SimpleNamespace(load=lambda _: None)),
        (generation_change, "restore_replica", lambda engine, _, state: engine.restore(state)),
    ]
    others += [(module, name, virtual[real]) for module, name, real in _imports()]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in others]
    gc.disable()
    try:
        for owner, name, value in others:
            setattr(owner, name, value)
        yield
    finally:
        gc.enable()
        for owner, name, value in before:
            setattr(owner, name, value)


@functools.cache
def schedule(name: str, world_size: int) -> tuple[Topology, tuple[Round, ...]]:
    """Return a topology, and its first rounds."""
    topology = topologies.build(name, world_size)
    return topology, tuple(topology.round(number) for number in range(topology.period or 64))


class SimulatedWorld(ElasticWorld):
    """The world of a rank that is simulated."""

    def __init__(
        self,
        rank: int | None,
        store: Any,
        settings: Settings,
        is_gone: Callable[[int], bool],
        group: SimulatedGroup | None,
    ) -> None:
        super().__init__(
            timedelta(seconds=settings.timeout_s),
            min_ranks=settings.min_ranks,
            authenticate=False,
            ends_if_preempted=True,
            shard_group=group,
        )
        self._token, self._num_initial, self._keys = "simulated", settings.num_ranks, store
        self.world_size = settings.num_ranks
        self._is_gone_ = is_gone
        if rank is None:
            self._take_number()
            return
        self._member = self.rank = rank
        self._listen()
        self.mesh.connect(self._addresses(range(self.world_size)), self._is_gone)
        self.agree()

    def _is_gone(self, rank: int) -> bool:
        return self._is_gone_(rank)


@dataclass(frozen=True)
class Settings:
    """How ranks train.

    Attributes
    ----------
    num_ranks, num_steps : int
        How many there are at the beginning, and how many steps they make.
    group_size : int
        How many ranks hold a replica together.
    min_ranks, soft_deadline_s, timeout_s, topology
        As for the wrapper.
    returns : bool
        Whether a rank that was dropped comes back.
    sums_every : int
        After how many steps all find the sum over ranks.
    step_s : float
        How long what a rank computes in a step takes.
    """

    num_ranks: int
    num_steps: int
    step_s: float
    min_ranks: int | None = None
    soft_deadline_s: float | None = None
    topology: str = "one_peer_exponential"
    returns: bool = True
    sums_every: int = 3
    timeout_s: float = 1.0
    group_size: int = 1

    @property
    def num_groups(self) -> int:
        return self.num_ranks // self.group_size

    @property
    def least(self) -> int:
        return self.group_size * (self.min_ranks or self.num_groups // 2 + 1)

    @classmethod
    def draw(cls, rng: random.Random) -> Settings:
        """Return the settings of a random schedule; some are so long that who was dropped finds the others again."""
        if rng.random() < 0.08:
            step_s, topology = 10 ** rng.uniform(-0.7, -0.4), rng.choice(["random_matching", "one_peer_exponential"])
            return cls(
                rng.choice([3, 3, 4]),
                rng.randint(16, 20),
                step_s,
                rng.choice([None, 1]),
                topology=topology,
                sums_every=rng.choice([3, 7]),
            )
        return cls(
            num_ranks=rng.choice([*[3] * 8, *[4] * 6, *[5] * 3, rng.randint(6, 9)]),
            num_steps=rng.randint(4, 8),
            step_s=10 ** rng.uniform(-3, -1.3),
            min_ranks=rng.choice([None, None, 1, 2]),
            soft_deadline_s=rng.choice([None, None, 0.03]),
            topology=rng.choice(["random_matching", "one_peer_exponential"]),
            returns=rng.random() < 0.7,
        )

    @classmethod
    def draw_of_groups(cls, rng: random.Random) -> Settings:
        """Return the settings of a random schedule of shard groups."""
        group_size = rng.choice([*[2] * 9, 3])
        return cls(
            num_ranks=group_size * rng.choice([*[2] * 3, *[3] * 5, 4][: 11 - group_size]),
            num_steps=rng.randint(5, 12),
            step_s=10 ** rng.uniform(-2.2, -1),
            min_ranks=rng.choice([None, None, 1, 1, 2]),
            soft_deadline_s=rng.choice([None, None, 0.03]),
            topology=rng.choice(["random_matching", "one_peer_exponential"]),
            returns=False,
            group_size=group_size,
        )


class Change(GenerationChange):
    """The transition between generations of a number in place of a model."""

    _topology_name: str

    def _tell_what_is_not_given(self) -> None:
        """There are no options."""

    def _check_state(self) -> None:
        """It can be given."""

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        position = list(self._world.consensus.position)
        engine.record.gives(engine.world.member, engine.step, engine.value)
        giver = self._world.member
        return {"value": engine.value, "step": engine.step, "giver": giver, "unfrozen": [], "position": position}

    def _second_part(self) -> dict[str, Any]:
        return {
            "step": self._engine.step,
            "position": list(self._world.consensus.position),
            "states": {},
            "options": [],
            "common": self._engine.common.clone(),
            "unfrozen": [],
            "frozen": None,
        }

    def _plan(self, world_size: int) -> tuple[Topology, Any]:
        topology = schedule(self._topology_name, world_size)[0]
        algorithm = SimpleNamespace(follow=lambda _: None, schedule=lambda each: each, compression=None)
        algorithm.before_forward = False
        return topology, algorithm

    def _agree(self) -> None:
        is_latest = self._world.generation.number == self.generation.number
        if is_latest and len(self.members) > 1:
            common = [self._engine.common]
            self._has_common_state |= agree_on_(self._world, common, is_joining=not self._has_common_state)


class _Kept:
    """What is kept beside a model: nothing."""

    given: Any = None

    def end_joining(self) -> None:
        self.given = None

    def states(self) -> dict[str, Any]:
        return {}


class Engine:
    """Makes the steps of a rank, and notes in the ``record`` what it does."""

    def __init__(self, world: SimulatedWorld, settings: Settings, record: Any, scheduler: Scheduler) -> None:
        self.world, self.settings, self.record, self._scheduler = world, settings, record, scheduler
        self.step = self.generation = 0
        self.value = world.member * UNIT
        self.common = torch.zeros(2, dtype=torch.float64)
        self.rank = world.rank
        self.last_meter = None
        self.updater = SimpleNamespace(scaler=None)
        self.group = SimpleNamespace(carried=lambda transport: transport, changed=lambda: None)
        self.exchanges = SimpleNamespace(
            algorithm=SimpleNamespace(before_forward=False),
            transport=None,
            on_astray=None,
            updating=contextlib.nullcontext,
            has_update=1.0,
            in_flight=[],
        )
        self.frozen = SimpleNamespace(load_state_dict=lambda _: None)
        self.on_step_begin = self.on_step_end = lambda: None
        self._in_flight: Any = None
        self._flag = ElasticFlag(world, "a flag")
        self._voted_at: Any = None
        self._members: tuple[int, ...] = ()
        self.says = self.told = ""  # what this rank says to its shard group in each step, and what its ranks have said
        topology = schedule(settings.topology, settings.num_groups)[0]
        parts = SimpleNamespace(
            topology=topology, engine=self, manifest={}, optimizers=[], compression=SimpleNamespace(follows_up=False)
        )
        arguments = SimpleNamespace(
            soft_deadline_s=settings.soft_deadline_s,
            partition_timeout_s=20.0 if settings.returns else None,
            record=None,
            fallback_topology="base",
            on_preemption=None,
        )
        self.model = SimpleNamespace(topology=topology, algorithm=None, leave=lambda: None)
        self._kept = _Kept()
        self._rounds = schedule(settings.topology, settings.num_groups)[1]
        self._place = world.rank
        self.changes = Change(_Owner(), world, parts, arguments, self._kept)  # type: ignore[arg-type]
        self.changes._topology_name = settings.topology

    def begin(self) -> None:
        world = self.world
        self.meet("constructing")
        if not world.is_alone:
            topology = schedule(self.settings.topology, self.settings.num_groups)[0]
            self.exchanges.transport = edge_transport.make_generation_transport(
                world,
                topology,
                algorithm=SimpleNamespace(compression=None),  # type: ignore[arg-type]
                compression=SimpleNamespace(follows_up=False),  # type: ignore[arg-type]
                soft_deadline_s=self.settings.soft_deadline_s,
            )
            self._members = world.members
            world.gather_bytes(b"", "comparing what all ranks construct")
        self.changes.begin()

    # ------------------------------------------------------------------ what a generation change uses

    def unfreeze(self, names: object) -> None:
        """Nothing is frozen."""

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self.step = state["value"], state["step"]
        self._flag.restore(None)
        self._voted_at = None
        self.record.restored(self.world.member, self.step, self.value, state["giver"])

    def drop_in_flight(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight[0].wait()
        if self.exchanges.transport is not None:
            self.exchanges.transport.drop(0)

    def move(self, topology: Topology, transport: Any, algorithm: Any, rank: int) -> None:
        self.combine()
        self.combine_late(waits=True)
        self.exchanges.transport, self.exchanges.algorithm = transport, algorithm
        self._rounds = schedule(self.settings.topology, topology.world_size)[1]
        self._place, self._members = rank, () if transport is None else transport.members

    # ------------------------------------------------------------------ a step

    def make_step(self, *, idles: bool = False) -> None:
        """Make a step; one that idles has no update."""
        world = self.world
        self.on_step_begin()
        self.record.begins_step(world, self.step, self.changes.generation)
        self._scheduler.wait(self.settings.step_s * (0.5 + self._scheduler.random.random()))
        if self.step % 2:
            self._make_step_together()
        if self._voted_at is not None:
            self.record.answered(world.member, self._voted_at, self._flag.wait())
            self._voted_at = None
        self.combine()
        if not idles:
            self.value += self._scheduler.random.randint(-9, 9) * UNIT
        self._send()
        if self.step % 2 == 0:
            self._make_step_together()
        if self.step % 2:
            self._voted_at = world.consensus.position
            yes = self._scheduler.random.random() < 0.1
            self.record.voted(world.member, self._voted_at, yes)
            self._flag.vote(yes)
        self.step += 1
        self.record.ends_step(world.member, self._scheduler.now)
        self.on_step_end()

    def end_step(self) -> None:
        self.make_step(idles=True)

    def meet(self, what: object) -> None:
        """Check that the ranks of the shard group do the same, in a collective of theirs within a step."""
        self.gather(what, "")

    def gather(self, what: object, said: str) -> list[str]:
        group = self.world.shard_group
        if group is None:
            return [said]
        found = [each.decode().split("|") for each in group.gather_bytes(f"{what}|{said}".encode(), str(what))]
        self.record.have_met(self.world.member, {each for each, _ in found})
        return [each for _, each in found]

    def _make_step_together(self) -> None:
        told = self.gather(f"step {self.step} of generation {self.changes.generation.number}", self.says)
        self.told = "".join(told)

    def _send(self) -> None:
        transport, step, number = self.exchanges.transport, self.step, self.changes.generation.number
        if transport is None:
            return
        round_ = self._rounds[step % len(self._rounds)]
        if not round_.peers(self._place):
            return
        own = (self.value, float(self.world.member), float(step), float(number))
        self.record.sends(own)
        conversation = Conversation(_turns(torch.tensor(own, dtype=torch.float64), round_, self._place))
        exchange = transport.start(conversation, round_, step=step, bucket=0)
        self._in_flight = exchange, round_.neighbours(self._place), own, self._members

    def combine(self) -> None:
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            exchange, weights, own, members = in_flight
            difference = torch.zeros(4, dtype=torch.float64)
            for part, values in exchange.wait().parts:
                difference[part] = values
            sources = {members[place]: weight for place, weight in weights.items()}
            dropped, delayed = ({members[place] for place in each} for each in (exchange.dropped, exchange.delayed))
            self.record.mixes(own, {m: w for m, w in sources.items() if m not in dropped}, difference.tolist())
            self.record.puts_off(own, {m: sources[m] for m in delayed})
            self.value += float(difference[0])
        self.combine_late(waits=False)

    def combine_late(self, *, waits: bool) -> None:
        if self.exchanges.transport is not None:
            for late in self.exchanges.transport.late(0, waits=waits):
                self.record.mixes_late(self.world.member, late.round_index, late.difference.tolist())
                self.value += float(late.difference[0])

    # ------------------------------------------------------------------ together

    def sum_up(self) -> None:
        """Find the sum over ranks."""
        world = self.world
        total = torch.zeros(2, dtype=torch.float64)

        def add_up() -> None:
            self.changes.catch_up()
            self.record.contributes(world.member, world.consensus.position, world.members, self.value)
            total.copy_(torch.tensor([self.value, 1.0], dtype=torch.float64))
            world.sum_(total, "adding up")
            if world.shard_group is not None and world.rank == 0:  # as when one group writes a checkpoint
                found = world.shard_group.gather_bytes(str(position).encode(), "gathering what is saved")
                self.record.have_met(world.member, {each.decode() for each in found})

        world.check_joint()
        self.combine_late(waits=True)
        position = world.consensus.position
        world.collectively(add_up)
        self.record.added_up(world.member, position, world.members, total.tolist())
        self.meet(f"after the sum at {position} over {tuple(each // world.group_size for each in world.members)}")


class _Owner:
    """What a generation change has a weak reference to."""


def _turns(message: torch.Tensor, round_: Round, place: int) -> Turns:
    weights = round_.neighbours(place)
    sent = dict.fromkeys(round_.targets(place), message)
    delivery = yield Turn(sent, lambda: {source: torch.empty_like(message) for source in weights})
    difference = torch.zeros_like(message)
    for source, received in delivery.received.items():
        difference.add_(received - message, alpha=weights[source])
    return Arrival(iter([(slice(0, 4), difference)]), is_finite=True)
