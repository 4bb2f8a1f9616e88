"""The contract of transports: what carries the messages of a wrapped model."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Protocol

import torch

from gossip.communication.world import World
from gossip.compression.conversation import Arrival, Conversation
from topologies import Round, Topology


class Exchange(Protocol):
    """One bucket's messages on their way through one round."""

    @property
    def bytes_by_peer(self) -> Mapping[int, int]:
        """What this rank sends for it, by rank; complete after :meth:`wait`. None by default."""
        return {}

    @property
    def arrived_at(self) -> Mapping[int, float]:
        """When the peers' messages were there (``time.perf_counter()``), by rank; complete after :meth:`wait`.

        None by default.
        """
        return {}

    def wait(self) -> Arrival:
        """Wait for the messages; what the conversation has made of them. Called once.

        Raises
        ------
        ExchangeError
            It failed or timed out; the text names rank, step, bucket and peers.
        """


class LateDifference(NamedTuple):
    """What a message adds that came after its exchange had ended.

    Attributes
    ----------
    round_index : int
        Of that exchange.
    difference : Tensor, [numel], float64
        The sender's message minus this rank's, times the sender's weight.
    """

    round_index: int
    difference: torch.Tensor


class Transport(ABC):
    """Carries messages; one per wrapped model, made by its ``TransportFactory``.

    Attributes
    ----------
    publishes : bool
        Whether exchanges are to be started too where this rank has no peer in a round.
    """

    publishes: ClassVar[bool] = False

    @abstractmethod
    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> Exchange:
        """Start to carry a conversation, without waiting for anybody.

        Parameters
        ----------
        conversation : Conversation
            Its opening is to be delivered, and the turns with which it proceeds.
        round_ : Round
            One in which this rank has a peer.
        step, bucket : int
            The same on all ranks for the same exchange. A bucket's exchanges are started one at a time.
        """

    def memory(self, message: torch.Tensor, *, step: int, bucket: int) -> torch.Tensor:
        """Memory like ``message`` where it is best made for this exchange; by default where it lies. Local.

        Asked for, before :meth:`start`, only by those whose message goes to all peers alike.
        """
        del step, bucket
        return message

    def late(self, bucket: int, *, waits: bool) -> Iterator[LateDifference]:
        """What has come by now of earlier exchanges of a bucket, which did not wait for it. By default nothing.

        Parameters
        ----------
        bucket : int
        waits : bool
            Whether to wait for all that is still to come.
        """
        del bucket, waits
        return iter(())

    def drop(self, bucket: int) -> None:
        """Wait for all that is still to come of earlier exchanges of a bucket, and forget it."""
        collections.deque(self.late(bucket, waits=True), maxlen=0)

    def describe(self) -> str:
        """One line for the log. Local."""
        return type(self).__name__


TransportFactory = Callable[[World, Topology], Transport]
"""Makes a wrapped model's transport. Collective: called on every rank, where there is more than one."""


def make_transport(factory: TransportFactory, world: World, topology: Topology) -> Transport:
    """What the factory makes. Collective.

    Raises
    ------
    TypeError
        That is no transport.
    """
    transport: object = factory(world, topology)
    if not isinstance(transport, Transport):
        raise TypeError(
            f"transport must be a function (world, topology) -> gossip.Transport, but {factory!r} returned "
            f"{transport!r}; have its class extend gossip.Transport"
        )
    return transport
