"""Seconds and bytes of training alone, on ranks of one machine: the clock stands while a model is evaluated."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gossip.lab.benchmarks.counters import InterfaceBytes

_POLL_S = 0.01
_NOISE_BYTES = 2000  # what goes over an interface beside training: signs of life
_LEAD_S = 0.2  # within which every rank has heard when training begins


class TrainingClock:
    """Starts on all ranks at the same moment, and stops when what they have sent has arrived. Collective.

    So a message that travels during an evaluation is not had for nothing: a method that overlaps communication with
    its next step waits for it here.

    Parameters
    ----------
    interface : str
        Whose bytes are counted.
    num_sharing : int
        Ranks that use it.
    quiet_s : float
        For how long nothing may have gone over the interface before all has arrived; 0: do not wait for it.
    timeout_s : float
        The longest wait.

    Attributes
    ----------
    seconds : float
        From the starts to the last rank's stops.
    sent_bytes : float
        Mean over the ranks.
    """

    def __init__(self, interface: str, num_sharing: int, quiet_s: float, timeout_s: float) -> None:
        self._interface, self._num_sharing = interface, num_sharing
        self._quiet_s, self._timeout_s = quiet_s, timeout_s
        self.seconds = self.sent_bytes = 0.0

    def start(self) -> None:
        """Agree on a moment, and wait for it."""
        moment = torch.tensor([time.monotonic() + _LEAD_S + self._quiet_s], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX)
        self._before = InterfaceBytes.read(self._interface)
        self._began = float(moment)
        time.sleep(max(0.0, self._began - time.monotonic()))

    def stop(self) -> None:
        """Wait for what is under way, and add what all of it took."""
        ended = self._quiet_since()
        sent = InterfaceBytes.read(self._interface).since(self._before).sent / self._num_sharing
        last = torch.tensor([ended], dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        total = torch.tensor([sent], dtype=torch.float64)
        dist.all_reduce(total)
        self.seconds += float(last) - self._began
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
        counted = InterfaceBytes.read(self._interface)
        return counted.received + counted.sent
