"""The world of the remaining ranks, in which collective operations complete or are repeated without lost ranks."""

import contextlib
import hashlib
import json
import queue
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossip.communication import training_store
from gossip.communication.authenticated_store import NotGenuine, derived, guarded, read, training_key, under
from gossip.communication.host import forks
from gossip.communication.host.daemon_threads import CLOSING_PATIENCE
from gossip.communication.host.tcp_options import resending_soon
from gossip.communication.liveness.peer_liveness import own_address
from gossip.communication.liveness.process_liveness import GONE, own_network
from gossip.communication.membership import innermost, is_served_here, own_connection
from gossip.elastic import training_status
from gossip.elastic.connections.frame_authentication import network_number
from gossip.elastic.connections.mesh import Mesh, in_words
from gossip.elastic.connections.peer_connection import Frame, Identity, Kind
from gossip.elastic.connections.shared_payloads import SharedPayloads, can_share
from gossip.elastic.consensus_store import within
from gossip.elastic.generations import Generation
from gossip.elastic.membership_consensus import Consensus
from gossip.elastic.repeated_operations import RepeatedOperations
from gossip.elastic.shard_group_world import ShardGroupWorld
from gossip.elastic.state_transfer import StateSource
from gossip.errors import ExchangeError, ManifestError

_PAUSE_S = 0.005
_OWN_HOST = "127.0.0.1"

Questions = queue.SimpleQueue[tuple[int, Frame] | None]
"""Frames about averages of two ranks, with the members that sent them; None at the end."""

_Result = TypeVar("_Result")


class ElasticWorld(RepeatedOperations):
    """All remaining ranks of one wrapped model.

    ``rank``, ``world_size`` and ``members`` refer to the remaining ranks: they change when a rank is lost. A collective
    operation completes on all ranks or on none: the remaining ranks repeat it. After one, they refer to the ranks that
    took part until the next step: all but those that start with this one, or are about to leave.

    If the ranks of shard groups hold a replica together, they refer to those ranks, one of each group, that hold the
    same shard as this one. Generations, collective operations that complete on all or none, and flags are of all ranks.

    Parameters
    ----------
    timeout : timedelta
        The time after which a rank that others wait for, and that waits for nobody itself, is dropped.
    process_group : ProcessGroup, optional
        The ranks at the beginning.
    min_ranks : int, optional
        Training ends with an error when fewer ranks remain; by default a majority of those at the beginning.
    is_in_step : bool
        Whether the ranks make their steps together.
    authenticate : bool
        Whether every frame is authenticated, and not only the beginning of a connection.
    ends_if_preempted : bool
        Whether all ranks end together once so many have received SIGTERM that too few would remain.
    shard_group : ShardGroupWorld, optional
        The ranks with which this one holds a replica; by default it holds one alone. Ranks with consecutive numbers
        make up a group, and all groups have the same size.

    Attributes
    ----------
    on_end : callable
        Called in place of a collective operation, or of its repetition, once ranks end together.
    on_enter : callable
        Called when the members may have changed.
    shared : SharedPayloads or None
        Carries messages to ranks on this machine.
    record : callable
        Called with each event of a recording (``gossip.exchange.recording``).
    questions : SimpleQueue
        What ranks ask each other if they do not make their steps together; the thread that replies may start later.
    """

    state_source: StateSource
    shared: SharedPayloads | None

    def __init__(
        self,
        timeout: timedelta,
        process_group: dist.ProcessGroup | None = None,
        *,
        min_ranks: int | None = None,
        is_in_step: bool = True,
        authenticate: bool = True,
        ends_if_preempted: bool = False,
        shard_group: ShardGroupWorld | None = None,
    ) -> None:
        self.is_in_step, self._authenticate = is_in_step, authenticate
        self._ends_if_preempted = ends_if_preempted
        self._progress: Callable[[], dict[str, Any]] | None = None
        self._num_notes = 0
        self.on_end: Callable[[], None] = lambda: None
        self.shard_group = shard_group
        self.group_size, self._place = (1, 0) if shard_group is None else (shard_group.world_size, shard_group.rank)
        self.on_enter: Callable[[], None] = lambda: None
        self.record: Callable[[tuple[Any, ...]], None] = lambda _: None
        self.questions: Questions = queue.SimpleQueue()
        self._member = 0
        self._min_ranks = min_ranks
        self._generation = Generation(0, (0,))
        self._members = self._taking_part = self._generation.members
        self._keys: Any = None
        # Until it is known whether there is a training that others can join.
        self._announcement = training_store.next_announcement() if process_group is None else None
        self._key, self._token = training_key(), ""
        self._num_initial = 1
        self._is_joint = False
        super().__init__(timeout, process_group)
        training = training_store.joined()
        if training is not None:
            if process_group is not None:
                raise ValueError(
                    "process_group was passed, but a rank that joins a training joins all of its ranks; leave it out"
                )
            forks.watch(self)
            try:
                self._come(training)
            except BaseException:
                self.close()
                raise
        if shard_group is not None:
            shard_group.gossip = self

    def _join(self) -> None:
        if training_store.joined() is None:
            super()._join()

    @property
    def _may_grow(self) -> bool:
        return training_store.is_founder()

    def _connect(self) -> None:
        assert self.membership is not None
        if not self.membership.has_host_path:
            raise ValueError(
                'on_peer_loss="continue" carries messages in host memory; initialise the process group with '
                f'backend="gloo" or "cpu:gloo,cuda:nccl", got {self.membership.backend_name}'
            )
        assert self._store is not None
        self._member = self.rank
        store: Any = self._guarded(own_connection(self._store), "beginning")
        self._num_initial = self.world_size
        self._least()
        if is_served_here(self._store):
            store.set("kept_by_a_rank", str(self.member))
        self._token = hashlib.sha256("".join(self.progress_markers.nonces).encode()).hexdigest()
        self._keys = self._keys_at(innermost(store))
        with resending_soon(self.timeout):
            self._listen()
            self.mesh.connect(self._addresses(range(self.world_size)), self._is_gone)
        if store.check(["kept_by_a_rank"]):
            raise ValueError(
                'on_peer_loss="continue" needs a key-value store that does not end with a rank, but it is served by '
                f"the process of rank {store.get('kept_by_a_rank').decode()}; start the ranks with gossip.launch or "
                "torchrun, which serve it from a separate process, or, on one machine, pass init_process_group "
                "store=torch.distributed.FileStore(...)"
            )
        self.agree()

    def _listen(self) -> None:
        host = own_address(self._keys)[1] or _OWN_HOST
        # Without a key, whoever can read the store can join.
        secret = self._token.encode() if self._key is None else derived(self._key, f"frames {self._token}")
        network = own_network()
        own = Identity(secret, self.member, self._authenticate, network_number(host, network))
        self.mesh = Mesh(own, host, self.timeout)
        self.state_source = StateSource(self.mesh)
        questions = self.questions  # the mesh must not hold this world
        for kind in () if self.is_in_step else (Kind.PAIR, Kind.AVERAGE):
            self.mesh.handlers[kind] = lambda member, frame: questions.put((member, frame))
        self.shared = SharedPayloads(self.mesh, self.wait_until) if can_share() else None
        self._keys.set(f"address{self.member}", json.dumps([*self.mesh.address, network]))

    def agree(self) -> None:
        """Start to agree with the others on who trains. Local."""
        generation = Generation(0, tuple(range(self._num_initial)))
        self._generation, self._taking_part = generation, generation.members
        self._members = self.holding_shard(generation.members)
        if self.member in self._members:
            self.rank, self.world_size = self._members.index(self.member), len(self._members)
        self.consensus = Consensus(
            self._keys,
            self.mesh,
            self._generation.members,
            min_ranks=self._least(),
            timeout=self.timeout,
            group_size=self.group_size,
            is_in_step=self.is_in_step,
            ends_if_preempted=self._ends_if_preempted,
        )
        self._tell_status()

    def tell_status(self, progress: Callable[[], dict[str, Any]]) -> None:
        """Write every second what this rank does, if the environment wants it; ``progress`` is of its model."""
        self._progress = progress
        self._tell_status()

    def _tell_status(self) -> None:
        if self._progress is not None and not self.is_alone and training_status.is_wanted():
            world = weakref.proxy(self)
            self.consensus.store_monitor.status = lambda: world.status()

    def status(self) -> dict[str, Any]:
        """Return what this rank says of itself for ``gossip status``, see :class:`RankStatus`. Local."""
        self._num_notes += 1
        generation, lost = self.consensus.entered, dict(self.mesh.lost)
        waited_s, waits_for = self.awaits()
        return training_status.RankStatus(
            number=self._num_notes,
            said_at=time.monotonic(),
            generation=generation.number,
            members=generation.members,
            waits_for=waits_for,
            waited_s=waited_s,
            lost=[(member, reason) for member, reason in lost.items() if member not in self.mesh.left],
            **(self._progress() if self._progress is not None else {}),
        )._asdict()

    def _least(self) -> int:
        """Return the number of ranks, or of shard groups, below which training ends."""
        number, unit = self._num_initial // self.group_size, "ranks" if self.shard_group is None else "shard groups"
        least = number // 2 + 1 if self._min_ranks is None else self._min_ranks
        if not 1 <= least <= number:
            raise ValueError(f"min_ranks must be from 1 to the number of {unit}, {number}, got {least}")
        return least

    # ------------------------------------------------------------------ joining

    def _come(self, training: Any) -> None:
        """Find the training, and listen where its ranks can reach this one."""
        where, self._announcement = self._announcement, None
        with resending_soon(self.timeout):
            store: Any = self._guarded(own_connection(training), "")
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not store.check([where]):
            if time.monotonic() > deadline:
                raise ExchangeError(
                    "joining: the key-value store announced no training that can be joined within "
                    f'{self.timeout.total_seconds():g} s; its ranks must wrap their model with on_peer_loss="continue"'
                )
            time.sleep(_PAUSE_S)
        announced = read(store.get(where))
        if "failed" in announced:
            raise ExchangeError(f"joining: there is no training: {announced['failed']}")
        self._token, self._num_initial = announced["token"], announced["num_ranks"]
        if announced["group_size"] != self.group_size:
            raise ManifestError(
                f"joining: the shard groups of the training have {announced['group_size']} ranks each, and this one "
                f"{self.group_size}; start as many ranks in every group"
            )
        self.rank, self.world_size = 0, self._num_initial // self.group_size
        self._keys = self._keys_at(innermost(store))
        self._take_number()

    def come_back(self) -> None:
        """Close all connections, and become a rank that is about to join, with a new number. Local.

        Raises
        ------
        RuntimeError
            The key-value store cannot be reached.
        """
        self.consensus.close()
        self.mesh.close()
        while not self.questions.empty():
            self.questions.get()  # these were addressed to the rank that this process was before
        with resending_soon(self.timeout):
            self._keys = within(self.timeout, own_connection, self._keys)
        self._take_number()

    def _take_number(self) -> None:
        """Become the next rank, or those of the next shard group. Collective over the group."""
        number, group = 0, self.shard_group
        if self._place == 0:
            number = within(self.timeout, self._keys.add, "num_joining", self.group_size) - self.group_size
        if group is not None:
            number = int(group.gather_bytes(str(number).encode(), "joining: agreeing on the number of the group")[0])
        if number < 0 or number % self.group_size:
            raise NotGenuine(f"joining: somebody else changed num_joining in the key-value store to {number}")
        self._member = self._num_initial + number + self._place
        self._listen()

    def keys(self, name: str) -> dist.Store | None:
        if self.is_alone:
            return None
        with resending_soon(self.timeout):
            return own_connection(under(self._keys, name))

    def _guarded(self, store: dist.Store, name: str) -> dist.Store:
        return guarded(store, self._key, name)

    def _keys_at(self, store: dist.Store) -> dist.Store:
        """Return the keys of this training."""
        return training_status.keys_of(store, self._key, self._token)

    def publish(self, manifest: Mapping[str, str]) -> None:
        """Publish what joining ranks must build, and announce that there is a training to join. Local."""
        if not self._keys.check(["manifest"]):
            self._keys.set("manifest", json.dumps(manifest))
        self._announce({"token": self._token, "num_ranks": self._num_initial, "group_size": self.group_size})
        if training_status.is_wanted() and self.member == 0:
            training_status.register(innermost(self._keys), self._key, self._token, self._num_initial)

    def _announce(self, content: Mapping[str, Any]) -> None:
        """Announce the training, or that it does not begin; the first announcement counts."""
        where, self._announcement = self._announcement, None
        if where is None or self._store is None:
            return
        store: Any = self._guarded(innermost(self._store), "")
        found = read(within(self.timeout, store.compare_set, where, "", json.dumps(content)))
        if found != content:
            why = "another training is announced in its place; construct the same models in the same order on all ranks"
            raise ExchangeError(f"rank {self.member}: constructing the model: {found.get('failed', why)}")

    def published(self) -> dict[str, str]:
        """Return what a joining rank must build. Local."""
        found: dict[str, str] = json.loads(within(self.timeout, self._keys.get, "manifest"))
        return found

    # ------------------------------------------------------------------ connecting

    def _addresses(self, members: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return where members listen; a member whose process ends before it says so is lost."""
        found: dict[int, tuple[str, int]] = {}
        missing = set(members)
        deadline = time.monotonic() + self.timeout.total_seconds()
        while missing:
            for rank in sorted(missing):
                if self._keys.check([f"address{rank}"]):
                    found[rank] = self.address_of(rank)
                elif self._is_gone(rank):
                    self.mesh.cut(rank, "its process ended before it was connected")
            missing -= found.keys() | self.mesh.lost.keys()
            if missing and time.monotonic() > deadline:
                raise ExchangeError(
                    f"rank {self.member}: connecting to all others: {in_words(sorted(missing))} did not say where to "
                    f"reach {'it' if len(missing) == 1 else 'them'} within {self.timeout.total_seconds():g} s"
                )
            if missing:
                time.sleep(_PAUSE_S)
        return found

    def address_of(self, member: int) -> tuple[str, int]:
        """Return where a member listens. Local.

        Raises
        ------
        ValueError
            It only listens on its own machine, and this is another one.
        """
        host, port, network = json.loads(within(self.timeout, self._keys.get, f"address{member}"))
        if host == _OWN_HOST and network != own_network():
            raise ValueError(
                f'on_peer_loss="continue": rank {member} is on a different machine than rank {self.member}, but '
                f"listens on {_OWN_HOST}, because its key-value store, {type(innermost(self._keys)).__name__}, has no "
                "host by which it could be reached; pass init_process_group a torch.distributed.TCPStore"
            )
        return host, port

    def _is_gone(self, rank: int) -> bool:
        return self.progress_markers.state_of(rank) == GONE

    @property
    def member(self) -> int:
        return self._member

    @property
    def worker(self) -> int:
        return self._member // self.group_size

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def is_alone(self) -> bool:
        return not hasattr(self, "consensus")

    @property
    def changes(self) -> bool:
        return hasattr(self, "mesh")

    @property
    def is_joint(self) -> bool:
        return self._is_joint

    @property
    def can_split(self) -> bool:
        return False

    @property
    def generation(self) -> Generation:
        """The generation of collective operations; training enters it at the next step."""
        return self._generation

    @property
    def control_device(self) -> torch.device:
        return torch.device("cpu")

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        if training_store.is_founder():
            with contextlib.suppress(ExchangeError, RuntimeError):  # whoever waits for it learns so at the time-out
                self._announce({"failed": f"rank {self.member} ended before the training began"})
        if hasattr(self, "consensus"):
            self.consensus.close()
        if hasattr(self, "mesh"):
            self.mesh.leave(CLOSING_PATIENCE)
        super().close()
