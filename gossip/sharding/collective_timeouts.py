"""What ``fully_shard`` gathers and reduces ends within the model's time-out, and says who is missing."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gossip.communication.device_operations import Ended
from gossip.communication.waiting import is_lost_connection
from gossip.communication.world import World
from gossip.errors import ExchangeError
from gossip.private_torch import bound_waits, guard_collectives


def watch_collectives(module: nn.Module, world: World, where: Callable[[], str]) -> None:
    """Bound the waits of a sharded module's collectives by the world's time-out, and name who lets them fail. Local.

    torch's own time-out is half an hour, and its errors name addresses. :func:`unwatch_collectives` ends it, but for
    the time-out.

    Parameters
    ----------
    module : Module
        Sharded by ``fully_shard`` over the ranks of ``world``.
    world : World
        The ranks of the shard group, over the group of the mesh.
    where : callable
        Returns the step, in words, for the texts.
    """
    if world.is_alone:
        return
    membership = world.membership
    assert membership is not None
    bound_waits(membership.group, world.timeout)

    def failed(what: str, error: RuntimeError) -> ExchangeError | None:
        if isinstance(error, ExchangeError) or not is_lost_connection(error):
            return None
        text = f"{where()}: {what} {in_words(world)}"
        failure = world.wait_for(Ended(error), text, lambda: world.others)
        assert failure is not None, "what it waits for has failed"
        return world.lost(failure, text)

    guard_collectives(module, failed)


def in_words(world: World) -> str:
    """Return where a collective of a shard group takes place, for error texts. Local."""
    assert world.membership is not None
    return f"within the shard group (ranks {list(world.membership.ranks)} of the default process group)"


def unwatch_collectives(module: nn.Module) -> None:
    """Let the collectives of a sharded module raise torch's own errors again. Local."""
    guard_collectives(module, None)
