"""What a checkpoint is made from and restored into: one rank's replica in each process, or all of them in one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class Replicas(ABC):
    """The replicas of a training that this process holds.

    Attributes
    ----------
    ranks : range
        Whose they are.
    world_size : int
        How many there are in all processes.
    process, num_processes : int
        Which process this is, and of how many; process 0 writes what is common to all.
    place, num_shards : int
        Which shard of a replica a rank here has, and of how many; ranks of a group follow each other.
    """

    place: int = 0
    num_shards: int = 1

    ranks: range
    world_size: int
    process: int
    num_processes: int

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of steps made."""

    @abstractmethod
    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """Every process's payload, in their order. Collective.

        Raises
        ------
        ExchangeError
            A process did not take part in time.
        """

    @abstractmethod
    def check_between_steps(self) -> None:
        """Raise GossipError if this is no moment to save or to load."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise GossipError if the training has ended in an error."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Module, optimizers, buckets and topology, as plain data for the manifest. Local."""

    @abstractmethod
    def check_savable(self) -> None:
        """Raise TypeError if something in the optimizers' states cannot be saved. Local."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for what is in flight, and compare what must be equal on all ranks. Collective; before :meth:`states`.

        Raises
        ------
        ExchangeError
            It did not arrive.
        """

    @abstractmethod
    def states(self) -> Iterator[dict[str, Any]]:
        """Of each rank here the sections of its file, without the parts of the run. Local.

        Nothing in flight is applied: the training goes on as if nothing had been read.
        """

    @abstractmethod
    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of the shard here, from those of the shards of another division, in order. Local.

        Raises
        ------
        CheckpointError
            They are not those of this model, or cannot be had here.
        """

    @abstractmethod
    def unfreeze(self, names: Sequence[str]) -> None:
        """Give buckets to these parameters, as when they were unfrozen in the run that was saved."""

    @abstractmethod
    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Put the sections of each rank here into its replica, in place; what could not be restored, in words. Local.

        Without ``exchanges`` in the section ``engine`` nothing is in flight.
        """

    @abstractmethod
    def averages(self, path: Path) -> dict[str, torch.Tensor]:
        """The mean over ranks by name, in process 0, for the file ``path``; elsewhere nothing. Collective.

        Raises
        ------
        CheckpointError
            There cannot be such a file; raised in every process.
        """
