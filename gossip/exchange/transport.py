"""The contract of transports, which carry the messages of a wrapped model."""

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from gossip.communication.world import World
from gossip.compression.conversation import Arrival, Conversation, Turn
from topologies import Round, Topology


class Exchange(Protocol):
    """The messages of one bucket in one round, in flight."""

    @property
    def bytes_by_peer(self) -> Mapping[int, int]:
        """The bytes that this rank sends for it, by rank; complete after :meth:`wait`. Empty by default."""
        return {}

    @property
    def arrived_at(self) -> Mapping[int, float]:
        """When the peers' messages arrived (``time.perf_counter()``), by rank; complete after :meth:`wait`.

        Empty by default.
        """
        return {}

    def wait(self) -> Arrival:
        """Wait for the messages, and return the result of the conversation. Called once.

        Raises
        ------
        ExchangeError
            The exchange failed or timed out; the text names rank, step, bucket and peers.
        """


SoftDeadline = float | Literal["auto"] | None
"""How long a step waits for messages: in seconds; "auto", as long as they usually take; None, as long as it takes."""


class LateDifference(NamedTuple):
    """What a message adds that arrived after its exchange, that of a round, had ended."""

    round_index: int
    difference: torch.Tensor
    """The sender's message minus this rank's, times the sender's weight, [numel], float64."""
    note: Callable[[bool], None] = lambda _: None
    """To be called when it is mixed in, with whether the next gradient is computed with it."""


class Transport(ABC):
    """Carries messages; one per wrapped model, made by its ``TransportFactory``.

    Attributes
    ----------
    num_buffers : int
        How many buffers for one message :meth:`held` can come to return.
    """

    num_buffers: int = 1

    @abstractmethod
    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> Exchange:
        """Start to carry a conversation, without blocking.

        Parameters
        ----------
        conversation : Conversation
            The conversation, whose opening must be delivered, and then the turns with which it proceeds.
        round_ : Round
            A round in which this rank has a peer.
        step, bucket : int
            The step and the bucket, the same on all ranks for the same exchange. Exchanges of one bucket are started
            one at a time.
        """

    def memory(self, message: torch.Tensor, *, step: int, bucket: int) -> torch.Tensor:
        """Return memory like ``message`` in which it is best made for this exchange; by default its own. Local.

        Called, before :meth:`start`, only for messages that go to all peers alike.
        """
        del step, bucket
        return message

    def held(self) -> Sequence[torch.Tensor]:
        """Return the memory that it keeps for messages, besides the codecs' own; by default none. Local."""
        return ()

    def rehearse(self, turn: Turn, round_: Round, device: torch.device, *, alike: bool) -> Sequence[torch.Tensor]:
        """Make the room that :meth:`start` would make, and return one buffer for each message in :meth:`held`. Local.

        ``turn`` is an opening on the meta device, which has shapes but no memory, for messages on ``device``; ``alike``
        says whether the codec has asked for :meth:`memory`. By default messages arrive in the turn's receive buffers.
        """
        del round_, device, alike
        _ = turn.receive_buffers
        return ()

    def late(self, bucket: int, *, waits: bool) -> Iterator[LateDifference]:
        """Yield what has arrived of earlier exchanges of a bucket that did not wait for it; by default nothing.

        With ``waits`` also all that is still to arrive.
        """
        del bucket, waits
        return iter(())

    def drop(self, bucket: int) -> None:
        """Await all that is still to arrive of earlier exchanges of a bucket, and drop it."""
        collections.deque(self.late(bucket, waits=True), maxlen=0)

    def describe(self) -> str:
        """Describe the transport in one line for the log. Local."""
        return type(self).__name__


TransportFactory = Callable[[World, Topology], Transport]
"""Makes a wrapped model's transport. Collective: called on every rank, if there is more than one."""


def make_transport(factory: TransportFactory, world: World, topology: Topology) -> Transport:
    """Return the transport that the factory makes. Collective."""
    transport: object = factory(world, topology)
    if not isinstance(transport, Transport):
        raise TypeError(
            f"transport must be a function (world, topology) -> gossip.Transport, but {factory!r} returned "
            f"{transport!r}; have its class extend gossip.Transport"
        )
    return transport
