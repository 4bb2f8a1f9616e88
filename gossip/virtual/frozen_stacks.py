"""Stacks of frozen parameters: equal in all replicas, and not exchanged until they are unfrozen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from gossip.parameters.buckets import Bucket, check_unfrozen, make_buckets
from gossip.parameters.digests import bytes_of
from gossip.parameters.names import named_parameters
from gossip.virtual.shards import Shard, add_blocks


class FrozenStacks:
    """The counterpart of :class:`gossip.parameters.frozen_parameters.FrozenParameters` for all replicas at once.

    Parameters
    ----------
    num_buckets : int
        The number of buckets that a process already has, including those of buffers, because noise depends on a
        bucket's index.

    Attributes
    ----------
    released : list of list of str
        The names of the parameters that were unfrozen, grouped by step.
    """

    def __init__(self, module: nn.Module, shards: Sequence[Shard], cap_bytes: int, num_buckets: int) -> None:
        named = named_parameters(module)
        self._parameters = {name: parameter for name, parameter in named if not parameter.requires_grad}
        self._shards = shards
        self._cap_bytes = cap_bytes
        self._num_buckets = num_buckets
        self.released: list[list[str]] = []

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters whose stacks now require a gradient."""
        return [
            name for name in self._parameters if any(shard.parameters[name].requires_grad for shard in self._shards)
        ]

    def differing(self) -> list[str]:
        """Return the names of the parameters that are not equal in all replicas."""
        first = self._shards[0].parameters
        return [
            name
            for name in self._parameters
            if any(
                not torch.equal(bytes_of(row), bytes_of(first[name][0].to(row.device)))
                for shard in self._shards
                for row in shard.parameters[name]
            )
        ]

    def release(self, names: Collection[str]) -> tuple[Bucket, ...]:
        """Move the stacks of these parameters, if they are still frozen, into new blocks of the shards."""
        names = [name for name in self._parameters if name in names]
        check_unfrozen({name: self._parameters[name] for name in names})
        if not names:
            return ()
        self.released.append(names)
        parameters = [(name, self._parameters.pop(name)) for name in names]
        buckets = make_buckets(parameters, self._cap_bytes, self._num_buckets)
        self._num_buckets += len(buckets)
        add_blocks(self._shards, buckets)
        return buckets
