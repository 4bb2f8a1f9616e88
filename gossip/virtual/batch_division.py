"""The division of a batch over all replicas along a dimension, and the reassembly of their outputs, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gossip.private_torch import tree_leaves, tree_map


@dataclass(frozen=True)
class Part:
    """The ranks from ``first`` to ``stop``, each with ``num_each`` samples of a batch, from its place ``begin`` on."""

    first: int
    stop: int
    begin: int
    num_each: int


def divide(num_samples: int, world_size: int) -> tuple[Part, ...]:
    """Distribute samples to ranks in order, equally, with one extra sample for each of the first ranks if needed.

    With fewer samples than ranks the last ranks get none, and belong to no part.

    Examples
    --------
    >>> divide(5, 3)
    (Part(first=0, stop=2, begin=0, num_each=2), Part(first=2, stop=3, begin=4, num_each=1))
    """
    share, rest = divmod(num_samples, world_size)
    parts = (Part(0, rest, 0, share + 1), Part(rest, world_size, rest * (share + 1), share))
    return tuple(part for part in parts if part.stop > part.first and part.num_each > 0)


def count_samples(inputs: Any, dim: int) -> int:
    """Return the length along ``dim`` of all tensors within ``inputs`` that have this dimension.

    Raises ValueError: the lengths differ, no tensor has the dimension, or there is no sample.
    """
    lengths = {leaf.shape[dim] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > dim}
    if not lengths:
        raise ValueError(
            f"the inputs have no tensor with a dimension dim={dim} to split over the replicas; pass a batch, or "
            "construct VirtualWorkers with another dim"
        )
    if len(lengths) > 1:
        raise ValueError(
            f"the inputs' tensors have different lengths {sorted(lengths)} along dim={dim}, and cannot be split "
            "equally over the replicas; give all the same batch dimension (expand what is equal for all samples)"
        )
    (length,) = lengths
    if length == 0:
        raise ValueError(f"the inputs have no sample: length 0 along dim={dim}; pass at least one")
    return length


def scatter(inputs: Any, part: Part | None, ranks: range, dim: int, device: torch.device) -> tuple[Any, list[bool]]:
    """Return what some ranks of a part receive: tensors [k, ...] with ``num_each`` samples along ``dim`` of the rest.

    Tensors without that dimension, and anything else, are passed to all of them unchanged; without a part, everything.
    Also returned is for each tensor whether it has the leading dimension of replicas.
    """
    is_split: list[bool] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_split.append(part is not None and leaf.dim() > dim)
        if part is None or not is_split[-1]:
            return leaf.to(device)
        begin = part.begin + (ranks.start - part.first) * part.num_each
        own = leaf.narrow(dim, begin, len(ranks) * part.num_each).to(device)
        return own.unflatten(dim, (len(ranks), part.num_each)).movedim(dim, 0)

    return tree_map(take, inputs), is_split


def gather(outputs: Sequence[Any], dim: int | None, device: torch.device) -> Any:
    """Join the outputs of groups of replicas, [k, ...] each, along ``dim`` of the rest, or to one entry per replica."""

    def join(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        rows = [leaf.to(device) for leaf in leaves]
        if dim is None or rows[0].dim() <= dim + 1:
            return torch.cat(rows)
        return torch.cat([row.movedim(0, dim).flatten(dim, dim + 1) for row in rows], dim)

    return tree_map(join, *outputs)
