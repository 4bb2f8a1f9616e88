"""The messages of one bucket for all replicas in a process at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from gossip.compression.conversation import CHUNK_NUMEL
from topologies import Round

_DEVICE_NUMEL = 2**24
"""The number of elements processed at a time on a device other than the CPU, enough to keep it busy."""
_MAX_KNOWN = 128
Made = TypeVar("Made")


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
