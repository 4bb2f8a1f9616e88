"""Operations that have ended both on the host and on the device whose memory they concern."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

import torch

from gossip.communication.device_paths import Pending

_LONGEST_PAUSE_S = 0.005


class Ended(NamedTuple):
    """An operation that has already failed."""

    error: Exception

    @staticmethod
    def wait(_: timedelta) -> bool:
        """Return True, as it has ended."""
        return True


class OnDevice(NamedTuple):
    """Operations that have ended only when the device has completed its part as well."""

    pending: Pending
    device: torch.device

    @property
    def error(self) -> Exception | None:
        """Why they failed."""
        return self.pending.error

    def wait(self, timeout: timedelta) -> bool:
        """Return whether they have ended within ``timeout``. Can be interrupted by Ctrl-C."""
        deadline = time.monotonic() + timeout.total_seconds()
        return self.pending.wait(timeout) and device_is_idle(self.device, deadline)


def device_is_idle(device: torch.device, deadline: float) -> bool:
    """Return whether the device has done the current stream's work in time; the CPU always has. Interruptible."""
    if device.type == "cpu":
        return True
    event = torch.get_device_module(device.type).current_stream(device).record_event()
    pause_s = 0.0
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s + 0.0001, _LONGEST_PAUSE_S)
    return True
