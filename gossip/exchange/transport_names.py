"""Transports by name."""

from typing import cast

from gossip.exchange.debug_transport import DebugTransport
from gossip.exchange.distributed_transport import DistributedTransport
from gossip.exchange.transport import Transport, TransportFactory
from topologies.registry import Registry

TRANSPORTS: Registry[TransportFactory] = Registry(
    "transport", {"distributed": DistributedTransport, "debug": DebugTransport}
)
"""Factories of transports; ``gossip.TRANSPORTS.register(name)`` adds one of your own."""


def resolve_transport(transport: object) -> TransportFactory:
    """Return the factory itself, or the one of that name."""
    if isinstance(transport, str):
        return TRANSPORTS.get(transport)
    if isinstance(transport, Transport) or not callable(transport):
        raise TypeError(
            f"transport must be a name or a function (world, topology) -> gossip.Transport, got {transport!r}; pass a "
            "class such as gossip.DistributedTransport, a functools.partial of one, or one of "
            f"{', '.join(map(repr, TRANSPORTS.available()))}"
        )
    return cast(TransportFactory, transport)


def name_of(transport: str | TransportFactory) -> str:
    """Return the name that is compared between ranks."""
    if isinstance(transport, str):
        return transport
    made = getattr(transport, "func", transport)  # for a functools.partial
    return getattr(made, "__qualname__", type(made).__qualname__)
