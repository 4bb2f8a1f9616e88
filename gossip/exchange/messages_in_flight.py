"""The messages of one rank that are in flight."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gossip.compression.codec import Codec
from gossip.compression.conversation import Arrival, Turn, chunks, finite_on_host
from gossip.exchange.exchanges import InFlight
from gossip.exchange.transport import Exchange
from gossip.measuring.step_stats import Meter
from gossip.parameters.serializable_state import compact
from topologies import Round


@dataclass
class MessagesInFlight(InFlight):
    """One bucket's messages in flight, by channel."""

    exchanges: dict[str, Exchange] = field(default_factory=dict)
    codecs: dict[str, Codec] = field(default_factory=dict)  # not of an exchange whose outcome is known
    launched_at: float = 0.0  # from time.perf_counter()
    kinds: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = field(default_factory=dict)  # of the differences
    bytes_counted: Counter[int] = field(default_factory=Counter)  # by peer, in the cost of some step already
    surplus: float = 0.0  # of this rank's weights, its own included, over 1, which codecs assume to be their sum
    squares: dict[str, Mapping[int, float | torch.Tensor]] = field(default_factory=dict)
    """Squared distances by source, as far as the codecs tell them; complete when the parts have been read."""
    openings: list[Turn] = field(default_factory=list)
    _differences: dict[str, torch.Tensor] | None = None

    def differences(self) -> dict[str, list[torch.Tensor]]:
        if self._differences is None:
            self._differences = {channel: self.joined(channel, arrival) for channel, arrival in self._awaited().items()}
            for channel, difference in self._differences.items() if self.surplus else ():
                difference.add_(self.sent[channel][0], alpha=self.surplus)
        return {channel: [difference] for channel, difference in self._differences.items()}

    def held(self) -> list[object]:
        """Return what has been awaited but not applied, what is sent, and room for what arrives."""
        known = [each.difference for each in self.exchanges.values() if isinstance(each, Known)]
        return [known, self._differences, self.sent, self.openings]

    def _awaited(self) -> dict[str, Arrival]:
        arrivals = {channel: exchange.wait() for channel, exchange in self.exchanges.items()}
        arrivals |= {channel: codec.completed(arrivals[channel]) for channel, codec in self.codecs.items()}
        self.squares = {channel: arrival.squares for channel, arrival in arrivals.items()}
        return arrivals

    def joined(self, channel: str, arrival: Arrival) -> torch.Tensor:
        """Return everything that arrived in a channel, as a copy; zeros if nothing did."""
        shape, dtype, device = self.kinds[channel]
        total = torch.zeros(shape, dtype=dtype, device=device)
        for part, values in arrival.parts:
            total[part] = values
        return total

    def state_dict(self, *, with_sent: bool) -> dict[str, Any]:
        """Wait, and return the round, and by channel the differences and, if they are read later, the sent messages.

        The tensors are not copied: they are unchanged until the exchange is combined.
        """
        return {
            "round": self.round_index,
            "differences": {channel: rows[0] for channel, rows in self.differences().items()},
            "sent": {channel: compact(rows[0], channel) for channel, rows in self.sent.items()} if with_sent else {},
        }

    @classmethod
    def known(cls, round_: Round, saved: Mapping[str, Any], device: torch.device) -> MessagesInFlight:
        """Return what :meth:`state_dict` returned as an exchange on a device whose outcome is already known."""
        sent = {channel: [message.to(device)] for channel, message in saved["sent"].items()}
        differences = {channel: difference.to(device) for channel, difference in saved["differences"].items()}
        exchanges: dict[str, Exchange] = {channel: Known(difference) for channel, difference in differences.items()}
        kinds = {channel: (each.shape, each.dtype, each.device) for channel, each in differences.items()}
        return cls(round_, saved["round"], sent, exchanges, launched_at=time.perf_counter(), kinds=kinds)

    def arrivals(self) -> dict[str, Arrival]:
        """Wait, and return what arrived, piece by piece, by channel."""
        if self._differences is None and not self.surplus:
            return self._awaited()
        return {channel: whole(difference) for channel, (difference,) in self.differences().items()}

    def count_bytes(self, meter: Meter) -> None:
        """Add what has been sent since the last call to the cost of a step."""
        sent: Counter[int] = Counter()
        for exchange in self.exchanges.values():
            sent.update(exchange.bytes_by_peer)
        for peer, num_bytes in (sent - self.bytes_counted).items():
            meter.bytes_by_peer[peer] += num_bytes
            meter.bytes_sent += num_bytes
        self.bytes_counted = sent


@dataclass
class Known(Exchange):
    """An exchange whose outcome is already known, from a checkpoint."""

    difference: torch.Tensor

    def wait(self) -> Arrival:
        return whole(self.difference)


def whole(difference: torch.Tensor) -> Arrival:
    """Return an arrival of a known difference; ``difference`` itself is not changed."""
    parts = ((part, difference[part].clone()) for part in chunks(difference.numel(), difference.device))
    return Arrival(parts, finite_on_host([difference]))
