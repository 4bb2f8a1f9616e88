"""The contract of compressions: how a bucket becomes messages, of one rank or of all replicas in a process."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from gossip.compression.conversation import CHUNK_NUMEL, Arrival, Conversation, Parts, Turns, accumulation_dtype, chunks
from topologies import Round, Topology

NO_MEMORY = "int8, which keeps no state"
"""What to choose instead of a compression that depends on earlier exchanges; part of error texts."""


Clip = Callable[[Mapping[int, float], Callable[[int], float] | None], Mapping[int, float]]
"""Returns the factors by which to scale the difference to each source's message, from the lengths of these differences.

The second argument returns the smaller norm of a source's message and this rank's own; with None nothing is clipped
along an edge without a history. Lengths and norms are equal at both ends of an edge to the bit.
"""


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Where a parameter lies in a bucket's flat values: shape, stride and offset."""
_DEVICE_NUMEL = 2**24
"""The number of elements processed at a time on a device other than the CPU, enough to keep it busy."""
_MAX_KNOWN = 128
Made = TypeVar("Made")


class Compression(ABC):
    """The encoding of buckets, equal on every rank. An instance holds constants, :meth:`codec` makes the state.

    Attributes
    ----------
    follows_up : bool
        Whether an exchange may need further turns after its opening, see :meth:`Codec.turns`.
    delivers : float
        The share of a difference between two ranks that one exchange delivers, the rest following in later ones; 1
        means all of it, except for rounding.
    adds_on_wire : bool
        Whether messages are the unchanged values, so that those of several ranks may also be added on the wire.
    can_clip : bool
        Whether both ends of an edge know both messages, and codecs clip the difference, see ``BucketShape.clip``.
    """

    follows_up: ClassVar[bool] = False
    delivers: float = 1.0
    adds_on_wire: ClassVar[bool] = False
    can_clip: ClassVar[bool] = False

    def check(self, topology: Topology) -> None:  # noqa: B027 -- most compressions accept all
        """Raise ValueError if the compression cannot serve the topology, with the reason and what to use instead."""

    @abstractmethod
    def codec(self, bucket: BucketShape, rank: int) -> Codec:
        """Return the state of one bucket on one rank. Local."""

    def stacked_codec(self, bucket: BucketShape, world_size: int) -> StackedCodec | None:
        """Return one codec that does what those of all ranks do, but faster, or None if there is none. Local.

        It is for replicas in one process on one device; with None each of them gets a :meth:`codec`.
        """
        del bucket, world_size
        return None

    def messages(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return what a :class:`Codec` sends for ``values``, [..., numel], each row a replica's. Local.

        ``values`` itself if they are sent as they are; None if a message is not the values in some dtype.
        """
        del values
        return None

    @property
    def shows_messages(self) -> bool:
        """Whether a rank sends one tensor to all peers, the :attr:`Codec.sent` of its codecs."""
        return self.codec(BucketShape(0, torch.zeros(1)), 0).sent is not None

    @abstractmethod
    def describe(self) -> str:
        """Return name and constants as text, to be compared between ranks and logged."""


class BucketShape:
    """The properties of a bucket that its codec knows.

    Attributes
    ----------
    index : int
        The bucket's place in launch order.
    numel : int
        The length of the flat values.
    dtype, device
        The dtype and the device of the values.
    views : sequence of (shape, stride, offset)
        Where each parameter lies in the flat values; a single flat view where nothing is known.
    memory : callable
        ``(message, step) -> Tensor``: returns the memory in which a message like the given one should be made in this
        step so that it travels fast; by default the message's own. Only for a message that goes to all peers alike.
    start : Tensor, [numel], or None
        The values with which all ranks started, as they are when the codec is made. The distance of a rank from there
        bounds the distance between two ranks. None if they may be any distance apart.
    measures : bool
        Whether an exchange is to tell the distance to each source's message, see :class:`gossip.Arrival`.
    clip : callable or None
        Called when the messages have arrived, see ``gossip.compression.codec.Clip``; what each source adds is scaled by
        its factor. Only for a compression with ``can_clip``.
    """

    def __init__(
        self,
        index: int,
        block: torch.Tensor,
        views: Sequence[View] | None = None,
        *,
        memory: Callable[[torch.Tensor, int], torch.Tensor] = lambda message, _: message,
        start: torch.Tensor | None = None,
        measures: bool = False,
        clip: Clip | None = None,
    ) -> None:
        self.index = index
        self.numel = block.numel()
        self.dtype = block.dtype
        self.device = block.device
        self.views = tuple(views) if views is not None else (((self.numel,), (1,), 0),)
        self.memory = memory
        self.start = start
        self.measures = measures
        self.clip = clip

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype in which messages are summed: float64 for float64 values, otherwise float32."""
        return accumulation_dtype(self.dtype)


def gaps(numel: int, views: Iterable[View]) -> list[slice]:
    """Return the ranges of ``numel`` flat values that none of the views has."""
    outside = torch.ones(numel + 2, dtype=torch.int8)
    outside[0] = outside[-1] = 0
    for shape, stride, offset in views:
        outside.as_strided(shape, stride, 1 + offset).fill_(0)
    changes = outside.diff().nonzero().flatten().tolist()
    return [slice(start, stop) for start, stop in zip(changes[::2], changes[1::2], strict=True)]


def generator(seed: int, *place: int) -> torch.Generator:
    """Return a CPU generator that is the same for the same numbers on every machine."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    source = torch.Generator()
    source.manual_seed(int.from_bytes(digest[:8], "little"))
    return source


class Codec(ABC):
    r"""The messages of one bucket on one rank, one exchange after the other.

    Rank i mixes in :math:`\sum_j W_{ij} (m_j - m_i)`, where the message :math:`m_j` is what *every* rank decodes from
    rank j's bytes, j itself included. So the mean over ranks is kept whatever a message lost, as long as W is doubly
    stochastic and all ranks decode the same bytes to the same values.

    Random numbers are drawn from (seed, step, bucket, rank) alone.
    """

    @property
    def sent(self) -> torch.Tensor | None:
        """This rank's own message :math:`m_i`, [numel], until the next exchange; None if it is not a single tensor."""
        return None

    @abstractmethod
    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        """Lead one exchange, as a generator that runs from top to bottom.

        It makes the message of ``values`` and yields it, with room for those of the peers, as the first
        :class:`gossip.Turn`. It is sent a :class:`gossip.Delivery`, which says what has become of the messages, yields
        further turns if it needs any, and returns the :class:`gossip.Arrival`. The code before the first ``yield`` runs
        in the training thread, the code after it concurrently with training, both without gradients; the arrival's
        parts run in the training thread again. Both ends of an edge must take the same turns.

        In ``round_``, which ends ``step``, this rank has a peer. The values, [numel], may change after the first
        ``yield``, or once that turn's ``making`` has ended; delete the name before it, so that nothing keeps them alive
        longer.
        """

    def exchange(self, values: torch.Tensor, round_: Round, step: int) -> Conversation:
        """Make the messages of ``values`` and start their exchange, one at a time. Local; see :meth:`turns`."""
        conversation = self.begin(values, round_, step)
        for _ in conversation.make_opening():
            pass
        return conversation

    def begin(self, values: torch.Tensor, round_: Round, step: int) -> Conversation:
        """Start an exchange like :meth:`exchange`, but ``values`` are needed until the opening's messages are made."""
        return Conversation(self.turns(values, round_, step))

    def completed(self, arrival: Arrival) -> Arrival:
        """Return what an exchange has brought, of which ``arrival`` may be a part. In the training thread."""
        return arrival

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what the next exchange needs of the previous ones, as plain data and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 -- most have none
        """Restore what :meth:`state_dict` returned."""


class WholeCodec(Codec):
    """A codec that computes the whole difference in memory that it keeps, concurrently with training if possible."""

    def __init__(self, bucket: BucketShape) -> None:
        self._difference = torch.zeros(bucket.numel, dtype=bucket.accumulation_dtype, device=bucket.device)

    def _arrival(self, take_in: Callable[[], None]) -> Arrival:
        """Return the arrival that ``take_in`` fills in; called once, when the messages have arrived."""
        if self._difference.is_cpu:
            take_in()
            return Arrival.of(self._difference)
        return Arrival(self._parts_after(take_in), is_finite=True)

    def _parts_after(self, take_in: Callable[[], None]) -> Parts:
        take_in()
        for part in chunks(self._difference.numel(), self._difference.device):
            yield part, self._difference[part]


class StackedArrival(NamedTuple):
    r"""The result of one exchange of all ranks.

    Attributes
    ----------
    differences : list of Tensor, [k, numel]
        By stack: :math:`\sum_j W_{ij} (m_j - m_i)` for each rank i, in the accumulation dtype; zeros for a rank without
        peers. Not finite where a message that the rank should have received is not. Owned by the caller.
    sent : list of Tensor, [k, numel]
        By stack: each rank's message :math:`m_i` in the dtype of its values; the values themselves if the rank has no
        peers or its message is not a single tensor.
    num_bytes : int
        The number of bytes sent by all ranks together.
    """

    differences: list[torch.Tensor]
    sent: list[torch.Tensor]
    num_bytes: int


class StackedCodec(ABC):
    """The computation of each rank's :class:`gossip.Codec` for one bucket, for all ranks at once and bit for bit."""

    @abstractmethod
    def exchange(self, stacks: Sequence[torch.Tensor], round_: Round, step: int) -> StackedArrival:
        """Make one exchange of all ranks, whose values are given as one stack per device, [k, numel].

        Raises GossipError: a rank sends what its peer does not expect.
        """

    @abstractmethod
    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return copies of what the :meth:`gossip.Codec.state_dict` of that rank would return."""

    @abstractmethod
    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of all ranks, given by rank."""


class Readers(NamedTuple):
    """Some ranks that read the same number of others.

    Attributes
    ----------
    ranks : slice or Tensor, [g], int64
        The rows of these ranks.
    sources : list of Tensor, [g], int64
        The ranks that they read, for each reader in ascending order.
    weights : list of Tensor, [g, 1], float64
        The weights that they give to these.
    """

    ranks: slice | torch.Tensor
    sources: list[torch.Tensor]
    weights: list[torch.Tensor]

    def write_back(self, rows: torch.Tensor, stack: torch.Tensor) -> None:
        """Write rows that were read as ``stack[ranks]`` back to the stack, unless they are a view."""
        if isinstance(self.ranks, torch.Tensor):
            stack[self.ranks] = rows


class Edges:
    """The edges of a round between the rows of one stack.

    Parameters
    ----------
    numel : int
        The length of a row; only as many rows are processed together as fit a CPU's cache.

    Attributes
    ----------
    num : int
        The number of edges.
    readers : list of Readers
        All ranks that read another one, each once.
    active, idle : Tensor, [...], int64
        The ranks that have peers, on the CPU, and those that have none.
    """

    def __init__(self, round_: Round, numel: int, device: torch.device) -> None:
        targets, sources, weights = round_.edges()
        num_sources = round_.num_sources()
        first = np.cumsum(num_sources) - num_sources
        self.num = len(targets)
        has_peers = num_sources + round_.num_targets() > 0
        self.active = torch.from_numpy(np.flatnonzero(has_peers))
        self.idle = torch.from_numpy(np.flatnonzero(~has_peers)).to(device)
        self.readers: list[Readers] = []
        for number in np.unique(num_sources[num_sources > 0]):
            alike = np.flatnonzero(num_sources == number)
            for some in row_slices(len(alike), numel, device):
                ranks = alike[some]
                edges = first[ranks] + np.arange(number)[:, None]
                self.readers.append(
                    Readers(
                        _rows(ranks, device),
                        list(torch.from_numpy(sources[edges].astype(np.int64)).to(device)),
                        list(torch.from_numpy(weights[edges]).to(device)[..., None]),
                    )
                )


class KnownRounds(Generic[Made]):
    """What ``make`` makes of recent rounds, by id: comparing two rounds takes as long as making it."""

    def __init__(self, make: Callable[[Round], Made]) -> None:
        self._make = make
        self._known: dict[int, tuple[Round, Made]] = {}  # with the round, so that its id is not reused

    def of(self, round_: Round) -> Made:
        if id(round_) not in self._known:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[id(round_)] = round_, self._make(round_)
        return self._known[id(round_)][1]


def row_slices(num_rows: int, numel: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of all rows of that length, as many at a time as are processed together."""
    size = max(1, (CHUNK_NUMEL if device.type == "cpu" else _DEVICE_NUMEL) // max(numel, 1))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def message_rows(num_rows: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return zeroed memory for ``num_rows`` messages, in rows padded so that each begins at a multiple of 8 bytes."""
    return torch.zeros((num_rows, -(-num_bytes // 8) * 8), dtype=torch.uint8, device=device)


def _rows(ranks: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device) -> slice | torch.Tensor:
    """Return the ranks as a slice if they are consecutive, which avoids a copy, otherwise as a tensor."""
    first, last = int(ranks[0]), int(ranks[-1])
    return slice(first, last + 1) if last - first + 1 == len(ranks) else torch.from_numpy(ranks).to(device)
