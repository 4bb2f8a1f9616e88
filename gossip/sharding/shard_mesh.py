"""The mesh of shard groups: who shares a replica, and who gossips with whom."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gossip.communication.host.local_size import started_local_size
from gossip.communication.world import World
from gossip.parameters.manifest import compare_manifests

DIMENSIONS = ("gossip", "shard")
_TIMEOUT = timedelta(minutes=5)


def make_shard_mesh(local_size: int | None = None, device_type: str | None = None) -> DeviceMesh:
    """Return the mesh whose groups are consecutive ranks, [world_size / local_size, local_size]. Collective.

    Parameters
    ----------
    local_size : int, optional
        Ranks per group. By default the ``local_size`` of :func:`gossip.launch`, which the environment variable
        ``GOSSIP_LOCAL_SIZE`` says too, or as many as torchrun, SLURM or ``launch`` have started on each node, by
        ``LOCAL_WORLD_SIZE``.
    device_type : str, optional
        "cuda" or "cpu"; by default "cuda" where torch has it.

    Returns
    -------
    DeviceMesh
        With the dimensions "gossip" and "shard": ``mesh["shard"]`` is for ``fully_shard``, the whole for
        :class:`gossip.GossipDataParallel`.

    Raises
    ------
    RuntimeError
        ``torch.distributed`` is not initialised.
    ValueError
        ``local_size`` does not divide the number of ranks, or is not known, or there is no such device.
    ManifestError
        The arguments are not the same on all ranks; raised on every rank.

    Examples
    --------
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = make_shard_mesh(local_size=1, device_type="cpu")
    >>> mesh.mesh_dim_names, tuple(mesh.shape)
    (('gossip', 'shard'), (1, 1))
    >>> dist.destroy_process_group()
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "make_shard_mesh needs torch.distributed; call torch.distributed.init_process_group first, or start the "
            "function with gossip.launch"
        )
    world_size = dist.get_world_size()
    if local_size is None:
        local_size = started_local_size()
    if type(local_size) is not int or local_size < 1 or world_size % local_size:
        raise ValueError(
            f"local_size must be a number of ranks that divides the {world_size} there are, got {local_size!r}; start "
            "as many ranks on every node"
        )
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type not in ("cpu", "cuda") or (device_type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(
            f'device_type must be "cpu", or "cuda" where torch finds a GPU, got {device_type!r}; leave it out for the '
            "one that there is"
        )
    with contextlib.closing(World(_TIMEOUT)) as world:
        compare_manifests(
            world,
            {"local_size": str(local_size), "device_type": device_type},
            "comparing meshes",
            "call make_shard_mesh alike on all ranks, and start as many on every node",
        )
    return init_device_mesh(device_type, (world_size // local_size, local_size), mesh_dim_names=DIMENSIONS)


def chunk_length(length: int, num_shards: int) -> int:
    """How many rows each shard has of ``length``, the last ones padded with zeros."""
    return -(-length // num_shards)


class Division(NamedTuple):
    """How a tensor is divided among the shards of a replica.

    Attributes
    ----------
    dimension : int
        Along which it is.
    starts : tuple of int, [num_shards + 1]
        Where each shard's part begins, and at last the whole length.
    lengths : tuple of int, [num_shards]
        How long the tensor is on each shard, padded with zeros.
    """

    dimension: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def even(cls, dimension: int, length: int, num_shards: int) -> Division:
        """Equal parts, but for the padding."""
        chunk = chunk_length(length, num_shards)
        starts = (min(place * chunk, length) for place in range(num_shards + 1))
        return cls(dimension, tuple(starts), (chunk,) * num_shards)

    @classmethod
    def owned(cls, length: int, owner: int, num_shards: int) -> Division:
        """All rows on one shard."""
        lengths = tuple(length * (place == owner) for place in range(num_shards))
        return cls(0, (0, *itertools.accumulate(lengths)), lengths)

    @property
    def is_even(self) -> bool:
        """Whether the tensor has one shape on all shards."""
        return len(set(self.lengths)) == 1

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole, from that of a shard's tensor."""
        return [self.starts[-1] if place == self.dimension else size for place, size in enumerate(shape)]

    def part(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """Return a shard's part of the whole, without padding, as a view."""
        return whole.narrow(self.dimension, self.starts[place], self.starts[place + 1] - self.starts[place])


def owners_of(sizes: Mapping[str, int], num_shards: int) -> dict[str, int]:
    """Deal what cannot be divided to shards: the largest first, each to the shard that has least so far."""
    held = [0] * num_shards
    owners = {}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        owners[name] = held.index(min(held))
        held[owners[name]] += sizes[name]
    return owners
