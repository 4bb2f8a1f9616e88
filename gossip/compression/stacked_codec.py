"""One bucket's messages at all replicas of a process at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gossip.compression.conversation import CHUNK_NUMEL
from topologies import Round

_DEVICE_NUMEL = 2**24
"""On a device other than the CPU so many elements are worked on at a time: enough to keep it busy."""
_MAX_KNOWN = 128


class StackedArrival(NamedTuple):
    r"""What has arrived in one exchange.

    Attributes
    ----------
    differences : list of Tensor, [k, numel]
        By stack: :math:`\sum_j W_{ij} (m_j - m_i)` of each rank i, in the dtype of accumulation; zeros of one without
        peers. Not finite where a message that it was to take in is not. The caller's.
    sent : list of Tensor, [k, numel]
        By stack: each rank's message :math:`m_i` in the dtype of its values; these themselves where it has no peers, or
        its message is no one tensor.
    num_bytes : int
        How many were sent, by all ranks together.
    """

    differences: list[torch.Tensor]
    sent: list[torch.Tensor]
    num_bytes: int


class StackedCodec(ABC):
    """What the :class:`gossip.Codec` of each rank makes of one bucket, bit for bit, for all ranks at once."""

    @abstractmethod
    def exchange(self, stacks: Sequence[torch.Tensor], round_: Round, step: int) -> StackedArrival:
        """One exchange of all ranks.

        Parameters
        ----------
        stacks : sequence of Tensor, [k, numel]
            The values of neighbouring ranks, one stack for each device.
        round_ : Round
        step : int

        Raises
        ------
        GossipError
            A rank sends what its peer does not expect.
        """

    @abstractmethod
    def state_dict(self, rank: int) -> dict[str, Any]:
        """What that rank's :meth:`gossip.Codec.state_dict` gives; copies."""

    @abstractmethod
    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from there; by rank."""


class Readers(NamedTuple):
    """Some ranks that read equally many others.

    Attributes
    ----------
    ranks : slice or Tensor, [g], int64
        Their rows.
    sources : list of Tensor, [g], int64
        Whom they read, each of them by rising rank.
    weights : list of Tensor, [g, 1], float64
        What they give to it.
    """

    ranks: slice | torch.Tensor
    sources: list[torch.Tensor]
    weights: list[torch.Tensor]

    def write_back(self, rows: torch.Tensor, stack: torch.Tensor) -> None:
        """Write what was ``stack[ranks]`` there again, unless it was a view."""
        if isinstance(self.ranks, torch.Tensor):
            stack[self.ranks] = rows


class Edges:
    """The edges of a round between rows of one stack.

    Parameters
    ----------
    round_ : Round
    numel : int
        Length of a row: no more of them are worked on together than stay in the cache of a CPU.
    device : torch.device

    Attributes
    ----------
    num : int
    readers : list of Readers
        All ranks that read another one, each once.
    active, idle : Tensor, [...], int64
        Those who have peers, on the CPU, and those who have none.
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
            size = rows_at_a_time(numel, device)
            for start in range(0, len(alike), size):
                ranks = alike[start : start + size]
                edges = first[ranks] + np.arange(number)[:, None]
                self.readers.append(
                    Readers(
                        _rows(ranks, device),
                        list(torch.from_numpy(sources[edges].astype(np.int64)).to(device)),
                        list(torch.from_numpy(weights[edges]).to(device)[..., None]),
                    )
                )


class KnownEdges:
    """The edges of the rounds of late, for rows of one length."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel = numel
        self._device = device
        self._known: dict[int, tuple[Round, Edges]] = {}  # by id: to compare two rounds takes as long as to make them

    def of(self, round_: Round) -> Edges:
        known = self._known.get(id(round_))
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            # With the round, so that its id stays its own.
            known = self._known[id(round_)] = round_, Edges(round_, self._numel, self._device)
        return known[1]


def rows_at_a_time(numel: int, device: torch.device) -> int:
    """How many rows of that length are worked on together."""
    return max(1, (CHUNK_NUMEL if device.type == "cpu" else _DEVICE_NUMEL) // max(numel, 1))


def row_slices(num_rows: int, numel: int, device: torch.device) -> Iterator[slice]:
    """All rows, as many at a time as are worked on together."""
    size = rows_at_a_time(numel, device)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def message_rows(num_rows: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory for so many messages: each row a bit longer, so that all begin where their numbers can be read."""
    return torch.zeros((num_rows, -(-num_bytes // 8) * 8), dtype=torch.uint8, device=device)


def _rows(ranks: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device) -> slice | torch.Tensor:
    """A slice where they are neighbours: it takes no copy."""
    first, last = int(ranks[0]), int(ranks[-1])
    return slice(first, last + 1) if last - first + 1 == len(ranks) else torch.from_numpy(ranks).to(device)
