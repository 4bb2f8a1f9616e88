"""A clock of the seconds and bytes of training on ranks of one machine, which is stopped during evaluations."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gossip.lab.benchmarks.benchmark import Place
from gossip.lab.benchmarks.network.counters import InterfaceBytes

_POLL_S = 0.01
_NOISE_BYTES = 2000  # traffic of an interface that does not belong to training, such as keep-alives
_LEAD_S = 0.2  # time within which every rank has received the moment at which training begins


class TrainingClock:
    """A clock that starts on all ranks at the same moment and stops when all messages have arrived. Collective.

    A message in flight during an evaluation is therefore not free: a method that overlaps communication with its next
    step waits for the message here, until there has been no traffic on the interface for ``quiet_s`` (0: not at all),
    at most ``timeout_s``. ``seconds`` and ``sent_bytes`` sum up the time from each start to the last rank's stop, and
    the bytes sent, averaged over the ranks.
    """

    def __init__(self, place: Place, quiet_s: float, timeout_s: float) -> None:
        self._place, self._quiet_s, self._timeout_s = place, quiet_s, timeout_s
        self.seconds = self.sent_bytes = 0.0

    def start(self) -> None:
        """Agree on a starting moment, and wait for it."""
        moment = torch.tensor([time.monotonic() + _LEAD_S + self._quiet_s], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX)
        self._before = InterfaceBytes.read(self._place.interface)
        self._began = float(moment)
        time.sleep(max(0.0, self._began - time.monotonic()))

    def stop(self) -> None:
        """Wait for messages in flight, and add the seconds and bytes since the start."""
        ended = torch.tensor([self._quiet_since()], dtype=torch.float64)
        sent = InterfaceBytes.read(self._place.interface).since(self._before).sent / self._place.num_sharing
        total = torch.tensor([sent], dtype=torch.float64)
        dist.all_reduce(ended, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        self.seconds += float(ended) - self._began
        self.sent_bytes += float(total) / dist.get_world_size()

    def _quiet_since(self) -> float:
        began = changed = time.monotonic()
        seen = self._num_bytes()
        while (now := time.monotonic()) - changed < self._quiet_s and now - began < self._timeout_s:
            time.sleep(_POLL_S)
            if (num_bytes := self._num_bytes()) - seen > _NOISE_BYTES:
                seen, changed = num_bytes, time.monotonic()
        return changed

    def _num_bytes(self) -> int:
        counted = InterfaceBytes.read(self._place.interface)
        return counted.received + counted.sent
