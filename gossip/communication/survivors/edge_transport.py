"""Messages over connections of their own for every edge: what is lost is left out, and holds nobody else up."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch

from gossip.communication import daemon_threads
from gossip.communication.survivors.living_world import LivingWorld
from gossip.communication.survivors.peer_connection import Key, Kind, Outgoing
from gossip.communication.transport import Transport
from gossip.compression.conversation import Arrival, Conversation, Delivery, Messages, Parts, Turn
from topologies import Round, Topology


class EdgeTransport(Transport):
    """Messages between the members of one epoch, each edge by itself.

    A message of a member that is lost is left out of the exchange, as if that rank had not been in the round: what the
    others send each other is mixed as ever, so that where a round is undirected their mean is kept exactly.

    Parameters
    ----------
    world : LivingWorld
    topology : Topology
        Its ranks are places among the members.
    members : sequence of int, optional
        Of the epoch; by default of the first one.
    follows_up : bool
        Whether exchanges have turns after their opening, which are made beside the training.
    """

    def __init__(
        self, world: LivingWorld, topology: Topology, *, members: Sequence[int] | None = None, follows_up: bool
    ) -> None:
        self._world = world
        self._members = tuple(range(topology.world_size) if members is None else members)
        self._place = self._members.index(world.member)
        self._finisher = Finisher(world.member, world.timeout) if follows_up else None

    def describe(self) -> str:
        return f"connections of their own between {len(self._members)} ranks, which may be lost"

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> EdgeExchange:
        sources = tuple(round_.neighbours(self._place))
        exchange = EdgeExchange(self._world, self._members, conversation, sources, step, bucket)
        if self._finisher is not None:
            self._finisher.submit(exchange)
        return exchange


class EdgeExchange:
    """Messages under way between members of an epoch; see :class:`gossip.Exchange`.

    Attributes
    ----------
    dropped : set of int
        Places in the epoch whose messages were left out, complete after :meth:`wait`.
    """

    def __init__(
        self,
        world: LivingWorld,
        members: Sequence[int],
        conversation: Conversation,
        sources: Sequence[int],
        step: int,
        bucket: int,
    ) -> None:
        self.bytes_by_peer: dict[int, int] = {}
        self.arrived_at: dict[int, float] = {}
        self.dropped: set[int] = set()
        self._world = world
        self._members = members
        self._conversation = conversation
        self._sources = sources
        self._step, self._bucket = step, bucket
        self._num_turns = 0
        self._outgoing: list[tuple[int, Outgoing]] = []
        self._payloads: list[torch.Tensor] = []
        self._finished: queue.SimpleQueue[BaseException | None] | None = None
        self._opening = conversation.opening
        self._send(self._opening)

    def hand_over(self) -> None:
        """Let another thread finish it."""
        self._finished = queue.SimpleQueue()

    def finish(self) -> None:
        """Wait for the messages, and proceed to the end.

        Raises
        ------
        ExchangeError
            This rank cannot go on.
        """
        received = self._receive(self._opening, self._sources)
        for turn in self._conversation.proceed(Delivery(self._opening.sent, received)):
            self._send(turn)
            turn_received = self._receive(turn, tuple(turn.receive_buffers))
            for place, buffer in turn.receive_buffers.items():
                if place in turn_received:
                    buffer.copy_(turn_received[place])
            turn.lost = frozenset(self.dropped)
        self._await_sent()

    def run(self) -> None:
        """The same in the thread to which it was handed over; how it went is for :meth:`wait`."""
        assert self._finished is not None
        try:
            self.finish()
        except BaseException as error:
            self._finished.put(error)
        else:
            self._finished.put(None)

    def wait(self) -> Arrival:
        if self._finished is None:
            self.finish()
        elif (error := self._finished.get()) is not None:
            raise error
        arrival = self._conversation.arrival
        return Arrival(self._read(arrival.parts), arrival.is_finite)

    def _read(self, parts: Parts) -> Iterator[tuple[slice, torch.Tensor]]:
        yield from parts
        self._world.mesh.give_back(self._payloads)
        self._payloads = []

    def _key(self) -> Key:
        return Key(Kind.MESSAGE, self._step, self._bucket, self._num_turns)

    def _send(self, turn: Turn) -> None:
        for place, message in turn.sent.items():
            member = self._members[place]
            self._outgoing.append((member, self._world.mesh.send(member, self._key(), message.detach().cpu())))
            self.bytes_by_peer[place] = self.bytes_by_peer.get(place, 0) + message.nbytes

    def _receive(self, turn: Turn, sources: Sequence[int]) -> Messages:
        """The messages of a turn, in the memory in which they came, without those of members that are lost."""
        mesh, key = self._world.mesh, self._key()
        self._num_turns += 1
        found: dict[int, torch.Tensor] = {}
        missing = {self._members[place]: place for place in sources if place not in self.dropped}

        def look() -> bool:
            for member, place in list(missing.items()):
                payload = mesh.take(member, key)
                if payload is not None:
                    found[place] = payload
                    self.arrived_at[place] = time.perf_counter()
                    del missing[member]
                elif member in mesh.lost and member not in mesh.left:
                    self.dropped.add(place)
                    del missing[member]
            return not missing

        self._world.wait_until(look, partial(list, missing), f"step {self._step}, bucket {self._bucket}")
        self._payloads += found.values()
        return {place: self._as_expected(payload, turn, place) for place, payload in found.items()}

    def _as_expected(self, payload: torch.Tensor, turn: Turn, place: int) -> torch.Tensor:
        like = next(iter(turn.sent.values()), None)
        if like is None or like.nbytes != payload.nbytes or turn is not self._opening:
            like = turn.receive_buffers[place]
        return payload.view(like.dtype).view(like.shape).to(like.device)

    def _await_sent(self) -> None:
        """Until nothing of it is read any more: what it has sent from is written again for the next one."""

        def unsent() -> list[int]:
            return [member for member, frame in self._outgoing if not frame.has_ended]

        where = f"step {self._step}, bucket {self._bucket}: sending"
        self._world.wait_until(lambda: not unsent(), unsent, where)
        self._outgoing = []


class Finisher:
    """A thread in which exchanges proceed, in the order in which they were started; it ends after the last of them."""

    def __init__(self, member: int, patience: timedelta) -> None:
        self._exchanges: queue.SimpleQueue[EdgeExchange | None] = queue.SimpleQueue()
        end = weakref.finalize(self, self._exchanges.put, None)
        name = f"gossip-exchanges-{member}"
        daemon_threads.start(name, partial(_finish, self._exchanges), end=end, patience=patience)

    def submit(self, exchange: EdgeExchange) -> None:
        """Finish it after those before."""
        exchange.hand_over()
        self._exchanges.put(exchange)


def _finish(exchanges: queue.SimpleQueue[EdgeExchange | None]) -> None:
    while (exchange := exchanges.get()) is not None:
        exchange.run()
