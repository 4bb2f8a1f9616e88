"""Assignment of samples to a rank while other ranks are lost, leave and join (elastic membership)."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from loguru import logger

from gossip.lab.experiments.experiment_build import Experiment
from gossip.lab.experiments.partition import Shards
from gossip.lab.experiments.training_methods import Method


class ElasticShards:
    """The samples of one rank under changing membership; the number of steps and the schedule do not change.

    As long as the initial ranks train, the samples are those of :class:`Shards`. After a change of membership,
    ``data.on_loss`` decides. "redistribute" divides all samples again among the ranks that train, and each rank
    repeats its own samples. The division follows from the seed and these ranks alone, so a rank that joins makes the
    same one as those that have been through more changes. With "leave" every rank keeps its samples: those of a lost
    rank are not trained on until a rank that joins takes them over. With "hold" every step has the samples that it
    would have had without a change, divided among the ranks that train now: only those that a rank has not yet trained
    on in the step in which it is lost are missing.

    Attributes
    ----------
    changes : list of dict
        One entry per change of membership: the "step" from which it applies, the "members" that train from then on (by
        member number) and the members "before".
    """

    def __init__(self, experiment: Experiment, method: Method) -> None:
        self._experiment, self._method = experiment, method
        self._members = tuple(range(experiment.settings.launch.world_size))
        self._dealt: Shards | None = None
        self.changes: list[dict[str, Any]] = []

    def batch(self, step: int) -> torch.Tensor:
        """Return this rank's samples of a step, counted through all epochs, among the ranks that train now."""
        if self._method.members != self._members:
            self._deal(step)
        member = self._method.world.member
        initial = range(self._experiment.settings.launch.world_size)
        if self._experiment.settings.data.on_loss == "hold" and self._members != tuple(initial):
            samples = self._experiment.shards.batch(initial, step)
            return samples.tensor_split(len(self._members))[self._members.index(member)]
        if self._dealt is not None:
            return self._dealt.batch([self._members.index(member)], step)
        return self._experiment.shards.batch([self._shares()[member]], step)

    def _deal(self, step: int) -> None:
        settings, before = self._experiment.settings, self._members
        self._members = self._method.members
        self.changes.append({"step": step, "before": list(before), "members": list(self._members)})
        if settings.data.on_loss == "redistribute":
            seed = settings.seed + zlib.crc32(repr(self._members).encode())
            indices = self._experiment.divide(len(self._members), seed)
            self._dealt = Shards(indices, settings.batch_size, seed, repeats=True)
            words = "all samples are dealt again among them"
        elif settings.data.on_loss == "hold":
            num_samples = settings.launch.world_size * settings.batch_size
            words = f"they divide the {num_samples} samples of each step"
            if num_samples < len(self._members):
                raise ValueError(
                    f"data.on_loss=hold: {len(self._members)} ranks cannot divide the {num_samples} samples of a step; "
                    "begin with a larger training.batch_size, or let fewer ranks join"
                )
        else:
            kept = self._shares().values()
            sizes = [len(shard) for rank, shard in enumerate(self._experiment.shards.indices) if rank not in kept]
            words = f"{sum(sizes)} of {len(self._experiment.data.train_targets)} samples are trained on by nobody"
        if self._method.world.member == self._members[0]:
            logger.warning(  # the message is complete on rank 0 alone; the other ranks need not log it
                "step {}: {} ranks train in the place of {}; data.on_loss={}: {}",
                step,
                len(self._members),
                len(before),
                settings.data.on_loss,
                words,
            )

    def _shares(self) -> dict[int, int]:
        """Return the initial shard of each member.

        Members that joined take over the shards of members that are gone; once none is left, any shard.
        """
        world_size = self._experiment.settings.launch.world_size
        shares = {member: member for member in self._members if member < world_size}
        free = [rank for rank in range(world_size) if rank not in shares]
        for number, member in enumerate(member for member in self._members if member >= world_size):
            shares[member] = free[number] if number < len(free) else number % world_size
        return shares
