"""Transports by name."""

from __future__ import annotations

from typing import cast

from gossip.communication.debug_transport import DebugTransport
from gossip.communication.distributed_transport import DistributedTransport
from gossip.communication.transport import Transport, TransportFactory
from topologies.registry import Registry

TRANSPORTS: Registry[TransportFactory] = Registry(
    "transport", {"distributed": DistributedTransport, "debug": DebugTransport}
)
"""What makes them; ``gossip.TRANSPORTS.register(name)`` decorates one of a user's own."""


def resolve_transport(transport: object) -> TransportFactory:
    """The factory itself, or the one of that name.

    Raises
    ------
    ValueError
        There is none of that name.
    TypeError
        It is a transport already, or cannot be called.
    """
    if isinstance(transport, str):
        return TRANSPORTS.get(transport)
    if isinstance(transport, Transport):
        name = type(transport).__name__
        raise TypeError(
            f"transport must be a name or a function (world, topology) -> gossip.Transport, got a {name} that has been "
            f"made already; pass its class, transport={name}, or functools.partial({name}, ...)"
        )
    if not callable(transport):
        raise TypeError(
            f"transport must be a name or a function (world, topology) -> gossip.Transport, got {transport!r}; pass a "
            f"class such as gossip.DistributedTransport, or one of {', '.join(map(repr, TRANSPORTS.available()))}"
        )
    return cast(TransportFactory, transport)


def name_of(transport: str | TransportFactory) -> str:
    """What is compared between ranks."""
    if isinstance(transport, str):
        return transport
    made = getattr(transport, "func", transport)  # of a functools.partial
    return getattr(made, "__qualname__", type(made).__qualname__)
