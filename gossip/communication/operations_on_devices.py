"""Operations that have ended, on the host as on the device whose memory they are about."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

import torch

from gossip.communication.device_paths import Pending

_LONGEST_PAUSE_S = 0.005


class Ended(NamedTuple):
    """An operation that has failed already."""

    error: Exception

    @staticmethod
    def wait(_: timedelta) -> bool:
        """It has."""
        return True


class OnDevice(NamedTuple):
    """Operations that have ended when the device has done its share of them too."""

    pending: Pending
    device: torch.device

    @property
    def error(self) -> Exception | None:
        """Why they failed."""
        return self.pending.error

    def wait(self, timeout: timedelta) -> bool:
        """Whether they have ended within ``timeout``. Ctrl-C gets through."""
        deadline = time.monotonic() + timeout.total_seconds()
        return self.pending.wait(timeout) and device_is_idle(self.device, deadline)


def device_is_idle(device: torch.device, deadline: float) -> bool:
    """Whether the device has done all work of the current stream by then; the CPU always has. Ctrl-C gets through."""
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
