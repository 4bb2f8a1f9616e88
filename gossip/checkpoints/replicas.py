"""What a checkpoint is made from and restored into: one replica per process, or all of them in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gossip.step.state.kept_objects import KeptObjects


class Replicas(ABC):
    """The replicas that this process holds.

    Attributes
    ----------
    ranks : range
        The ranks of these replicas.
    world_size : int
        The number of replicas in all processes.
    process, num_processes : int
        The number of this process, and how many there are; process 0 writes what all have in common.
    place, num_shards : int
        Which shard of a replica the rank here holds, and of how many; the ranks of a shard group are consecutive.
    group_size : int
        The number of ranks that hold a replica together, each a shard of it or all of it.
    kept : KeptObjects
        What the model keeps beside the replicas.
    failure : Exception or None
        What the operation on these replicas is about to raise in every process: it ends everywhere, as with a result.
    """

    place: int = 0
    num_shards: int = 1
    group_size: int = 1
    failure: Exception | None = None

    ranks: range
    world_size: int
    process: int
    num_processes: int
    kept: KeptObjects

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of steps made."""

    @abstractmethod
    def gather(self, payload: bytes, what: str) -> list[bytes]:
        """Return the payloads of all processes, in their order. Collective."""

    @abstractmethod
    def check_between_steps(self) -> None:
        """Raise GossipError unless the model is between two steps, where it can be saved and loaded."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe module, optimizers, buckets and topology as plain data for the manifest. Local."""

    @abstractmethod
    def check_savable(self) -> None:
        """Raise TypeError if the optimizers' or the modules' extra states cannot be saved. Local."""

    @abstractmethod
    def settle(self) -> None:
        """Await the messages in flight, and compare what must be equal on all ranks. Collective; before :meth:`states`.

        Raises ExchangeError: a message did not arrive.
        """

    @abstractmethod
    def states(self) -> Iterator[dict[str, Any]]:
        """Yield for each rank here the sections of its file, without the parts of the run. Local.

        Messages in flight are not applied: training continues as if nothing had been read.
        """

    @abstractmethod
    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of the shard here, from those of the shards of another division, in order. Local.

        Raises CheckpointError: they are not those of this model, or cannot be had here.
        """

    @abstractmethod
    def unfreeze(self, names: Sequence[str]) -> None:
        """Create buckets for these parameters, as when they were unfrozen in the run that was saved."""

    @abstractmethod
    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Restore each rank here from its sections, in place, and return what could not be restored, in words. Local.

        Without ``exchanges`` in the section ``engine``, no message is in flight.
        """

    @abstractmethod
    def exported(self) -> dict[str, torch.Tensor]:
        """Return name, shape and dtype of what :meth:`averages` yields, as tensors without values ("meta"). Local."""

    @abstractmethod
    def averages(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Return an iterator over the mean of each tensor in process 0, elsewhere None, by name. Collective.

        All processes must run through it to the end. No mean is computed before it is asked for; who drops each before
        the next holds a single one at a time.

        Raises ManifestError: the ranks' tensors differ in shape; raised in every process, before the iterator is
        returned.
        """
