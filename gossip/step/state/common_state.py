"""What an algorithm keeps alike on all ranks, made equal again when a generation begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gossip.elastic.elastic_world import ElasticWorld
from gossip.errors import ExchangeError, GenerationEndedError

_WHAT = "averaging what the algorithm keeps alike on all ranks"


@torch.no_grad()
def agree_on_(world: ElasticWorld, tensors: Sequence[torch.Tensor], *, is_joining: bool) -> bool:
    """Set tensors to their mean over the ranks that have trained, the same bits on all members of a new generation.

    In exact arithmetic this changes nothing, unless a rank was lost in an exchange that was to be exact, which left
    different means on different ranks; ranks that join get what the others have. Collective, when a generation is
    entered.

    Parameters
    ----------
    world : ElasticWorld
        The ranks, in the new generation.
    tensors : sequence of Tensor
        The same shapes and dtypes on all ranks; changed in place.
    is_joining : bool
        Whether this rank's tensors do not count, because it has not trained with the others yet.

    Returns
    -------
    bool
        False if a rank was lost meanwhile, so that there will be another generation, or this rank cannot continue.
    """
    own = world.member
    others = [member for member in world.members if member != own]
    try:
        heads = world.exchange(dict.fromkeys(others, torch.tensor([is_joining])), _WHAT, turn=1)
        joining = {member for member in others if heads[member].any()} | ({own} if is_joining else set())
        trained = [member for member in world.members if member not in joining] or list(world.members)
        partners = [member for member in trained if member != own]
        for number, tensor in enumerate(tensors):
            means: dict[int, torch.Tensor] = {}
            slices = dict(zip(trained, tensor.cpu().view(-1).tensor_split(len(trained)), strict=True))
            if own in trained:  # and computes the mean of one slice for all
                sent, num_bytes = {m: slices[m] for m in partners}, dict.fromkeys(partners, slices[own].nbytes)
                found = world.exchange(sent, _WHAT, partners, num_bytes=num_bytes, turn=2 + 2 * number)
                rows = [slices[own], *(found[member].view(tensor.dtype) for member in partners)]
                means[own] = torch.stack(rows).double().mean(0).to(tensor.dtype)
            given = dict.fromkeys(others if means else (), means.get(own))
            num_bytes = {member: slices[member].nbytes for member in partners}
            found = world.exchange(given, _WHAT, partners, num_bytes=num_bytes, turn=3 + 2 * number)
            means |= {member: payload.view(tensor.dtype) for member, payload in found.items()}
            tensor.copy_(torch.cat([means[member] for member in trained]).view(tensor.shape))
    except (GenerationEndedError, ExchangeError):  # a rank that cannot continue learns so again when it begins a step
        return False
    return True
