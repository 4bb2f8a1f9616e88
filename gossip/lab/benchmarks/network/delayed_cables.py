"""Virtual network cables with a delay: the program that carries the frames, and the class that starts it.

A cable is a pair of TAP devices, and one process carries the frames of all cables from one end to the other. The kernel
does not need netem for this; rates and queues remain those of the devices themselves. A TAP device exists as long as a
process holds it open, and the carrying process ends with the one that started it, so nothing is left behind.

The program uses the standard library only, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

_TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS_4, _SEGMENTS_6 = 0x01, 0x02, 0x04
_LARGEST_FRAME = (1 << 16) + 256  # a packet of 64 KiB and its headers
_FRAMES_AT_ONCE = 64  # read from one device before the next device has its turn
_PATIENCE_S = 10


def open_tap(name: str) -> int:
    """Create a TAP device in this thread's network namespace and return its descriptor. Needs Linux and root.

    The device ceases to exist when the descriptor is closed. It accepts and delivers packets as large as the kernel
    makes them (up to 64 KiB), each after a ``virtio_net_hdr`` that says how to segment it, so that tens of frames cost
    one copy.

    Raises
    ------
    OSError
        The kernel does not support TAP devices, or does not permit creating one.
    """
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTS_4 | _SEGMENTS_6)
    except BaseException:
        os.close(device)
        raise
    return device


class DelayedCables:
    """Running cables, on which each frame takes ``delay_s`` from one end to the other, in both directions.

    Parameters
    ----------
    devices : sequence of int
        Descriptors of TAP devices: both ends of the first cable, then of the next one. The caller closes them, because
        the carrying process has its own copies.
    delay_s : float
    """

    def __init__(self, devices: Sequence[int], delay_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(delay_s), *map(str, devices)],
            stdin=subprocess.PIPE,
            pass_fds=devices,
            start_new_session=True,  # Ctrl-C goes to the controller only
        )

    @property
    def pid(self) -> int:
        """The id of the process that carries the frames."""
        return self._process.pid

    def close(self) -> None:
        """End the carrying process, and release its copies of the devices."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_PATIENCE_S)


def carry(devices: Sequence[int], delay_s: float, until: int) -> None:
    """Carry frames until the descriptor ``until`` reaches end of file.

    A frame that the far device does not accept, because it is down, is lost as on a real cable.
    """
    other = dict(zip(devices[0::2], devices[1::2], strict=True))
    other |= {there: here for here, there in other.items()}
    under_way: deque[tuple[float, int, bytes]] = deque()  # in order of due times: all delays are equal
    poller = select.epoll()
    for device in (*other, until):
        poller.register(device, select.EPOLLIN)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else -1
        for device, _ in poller.poll(wait_s):
            if device == until:
                return
            due = time.monotonic() + delay_s
            with contextlib.suppress(BlockingIOError):
                for _ in range(_FRAMES_AT_ONCE):
                    under_way.append((due, other[device], os.read(device, _LARGEST_FRAME)))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, device, frame = under_way.popleft()
            with contextlib.suppress(OSError):
                os.write(device, frame)


if __name__ == "__main__":
    carry(list(map(int, sys.argv[2:])), float(sys.argv[1]), sys.stdin.fileno())
