"""A virtual network on one machine: hosts connected to one bridge by links with a rate. Needs Linux and root.

Hosts and bridge are unnamed network namespaces (:mod:`.namespaces`): the kernel removes each of them, with its
interfaces and their shaping, when the last process inside it ends, even if that process was killed. Links can have a
delay (:mod:`.delayed_cables`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from gossip.lab.benchmarks.delayed_cables import DelayedCables, open_tap
from gossip.lab.benchmarks.namespaces import Namespace
from gossip.lab.benchmarks.networks import store_at

MAX_HOSTS = 200
_NETWORK = "10.77.0"
_BRIDGE_ADDRESS = f"{_NETWORK}.254"
_COMMAND_TIMEOUT_S = 20
_ORPHAN_RETRIES = Path("/proc/sys/net/ipv4/tcp_orphan_retries")
_NUM_ORPHAN_RETRIES = 3  # 3 seconds; the default is 100
_SLOW_START_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")  # off, as on hosts set up for long links
_USUAL_CONGESTION_CONTROL = "cubic"  # the kernel's default, not this machine's setting: all step times depend on it
_BURST_S = 0.004  # the burst of an idle link, in seconds at its rate: one tick of the kernel's clock, but at least
_MIN_BURST_BYTES = 1 << 17  # two packets of 64 KiB
_QUEUE_S = 0.05  # the queue of a link before it drops packets, in seconds at its rate, or a round trip if longer; but
_MIN_QUEUE_BYTES = 1 << 20  # several of the 64 KiB packets that a veth delivers


class LabUnavailable(Exception):
    """The lab cannot be created on this machine or by this user; the text says why in one line."""


class Lab:
    """Hosts on a bridge; host i has the address 10.77.0.(i + 1) on its interface eth0.

    Parameters
    ----------
    num_hosts : int
    delay_s : float
        The one-way delay between two hosts, in addition to the transmission time; a round trip takes twice as long.
        Half of the delay is on the link of each host, so that the distance to the bridge is half as long.

    Raises
    ------
    LabUnavailable
        The lab cannot be created here.
    """

    name = "lab"
    interface = "eth0"
    shared = False

    def __init__(self, num_hosts: int, delay_s: float = 0.0) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts must be from 1 to {MAX_HOSTS}, got {num_hosts}")
        missing = what_is_missing()
        if missing is not None:
            raise LabUnavailable(missing)
        self._delay_s = delay_s
        self._hosts: list[Namespace] = []
        self._bridge: Namespace | None = None
        self._cables: DelayedCables | None = None
        try:
            self._bridge = Namespace()
            self._in_bridge("ip", "link", "set", "lo", "up")
            self._in_bridge("ip", "link", "add", "bridge", "type", "bridge")
            self._in_bridge("ip", "address", "add", f"{_BRIDGE_ADDRESS}/24", "dev", "bridge")
            self._in_bridge("ip", "link", "set", "bridge", "up")
            self._hosts.extend(Namespace() for _ in range(num_hosts))
            if delay_s:
                self._cables = self._lay_cables(delay_s / 2)
            for rank in range(num_hosts):
                self._connect(rank)
        except OSError as error:
            self.close()
            raise LabUnavailable(f"network namespaces are not permitted here ({error.strerror})") from error
        except BaseException:
            self.close()
            raise

    def _lay_cables(self, delay_s: float) -> DelayedCables:
        """Create a delayed cable from every host to the bridge."""
        assert self._bridge is not None
        devices: list[int] = []
        try:
            for rank, host in enumerate(self._hosts):
                with self._bridge.entered():
                    devices.append(open_tap(f"port{rank}"))
                with host.entered():
                    devices.append(open_tap(self.interface))
            return DelayedCables(devices, delay_s)
        except OSError as error:
            raise LabUnavailable(f"TAP devices are not permitted here ({error.strerror})") from error
        finally:
            for device in devices:
                os.close(device)

    def _connect(self, rank: int) -> None:
        """Create a host's interface and its bridge port, unless they are the ends of a cable, and configure them."""
        host, port = self._hosts[rank], f"port{rank}"
        if self._cables is None:
            inside = f"/proc/{os.getpid()}/fd/{host.file}"
            self._in_bridge(
                *("ip", "link", "add", port, "type", "veth", "peer", "name", self.interface), "netns", inside
            )
        self._in_bridge("ip", "link", "set", port, "master", "bridge", "up")
        with host.entered():
            _set(_ORPHAN_RETRIES, _NUM_ORPHAN_RETRIES)  # connections to a dead peer must not keep the host for minutes
            _set(_SLOW_START_AFTER_IDLE, 0)
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "address", "add", f"{self.address(rank)}/24", "dev", self.interface)
            _run("ip", "link", "set", self.interface, "up")
            # By the route, because the kernel's parameter only takes what the machine allows to every user.
            to_all = (f"{_NETWORK}.0/24", "dev", self.interface, "proto", "kernel", "scope", "link")
            from_here = ("src", self.address(rank), "congctl", _USUAL_CONGESTION_CONTROL)
            _run("ip", "route", "replace", *to_all, *from_here)

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{_NETWORK}.{rank + 1}"

    def start_store(self, timeout: timedelta) -> dist.TCPStore:
        """Start the store on the bridge itself, which has a link to every host."""
        assert self._bridge is not None
        with self._bridge.entered():
            return store_at(_BRIDGE_ADDRESS, timeout)

    @contextlib.contextmanager
    def entered(self, rank: int) -> Iterator[None]:
        """Move this thread, and the processes that it starts, to the host within the block."""
        with self._hosts[rank].entered():
            yield

    def shape(self, bits_per_second: int) -> None:
        """Limit every link to this rate in each direction, with immediate effect, even while packets are in flight."""
        queue_s = max(_QUEUE_S, 2 * self._delay_s)
        burst_bytes = max(_MIN_BURST_BYTES, round(_BURST_S * bits_per_second / 8))
        queue_bytes = burst_bytes + max(_MIN_QUEUE_BYTES, round(queue_s * bits_per_second / 8))
        tbf = ("root", "tbf", "rate", f"{bits_per_second}bit", "burst", str(burst_bytes), "limit", str(queue_bytes))
        for rank, host in enumerate(self._hosts):
            self._in_bridge("tc", "qdisc", "replace", "dev", f"port{rank}", *tbf)
            with host.entered():
                _run("tc", "qdisc", "replace", "dev", self.interface, *tbf)

    def links(self) -> list[str]:
        """Return the output of tc about the queues of the bridge, and then of each host."""
        said = [self._in_bridge("tc", "-statistics", "qdisc", "show")]
        for host in self._hosts:
            with host.entered():
                said.append(_run("tc", "-statistics", "qdisc", "show", "dev", self.interface))
        return said

    def close(self) -> None:
        """Release the cables, and the namespaces, which end with the processes inside them."""
        if self._cables is not None:
            self._cables.close()
            self._cables = None
        for namespace in [*self._hosts, self._bridge]:
            if namespace is not None:
                namespace.close()

    def _in_bridge(self, *command: str) -> str:
        assert self._bridge is not None
        with self._bridge.entered():
            return _run(*command)


def _set(parameter: Path, value: int | str) -> None:
    """Set a kernel parameter of this host's network."""
    with contextlib.suppress(OSError):  # /proc may be read-only; the kernel's own value then remains
        parameter.write_text(str(value))


def what_is_missing() -> str | None:
    """Return the reason why a lab cannot be created here, as far as can be told without trying, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"{' and '.join(absent)} not found: install iproute2" if absent else None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise LabUnavailable(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise LabUnavailable(f"`{' '.join(command)}` did not end within {_COMMAND_TIMEOUT_S} s") from error
    return done.stdout
