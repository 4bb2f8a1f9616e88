"""A virtual network on one machine: hosts connected to one bridge by links with a rate. Needs Linux and root.

Hosts and bridge are unnamed network namespaces (:mod:`.namespaces`): the kernel removes each of them, with its
interfaces and their shaping, when the last process inside it ends, even if that process was killed. Links can have a
delay (:mod:`.delayed_cables`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from gossip.lab.benchmarks.network.delayed_cables import DelayedCables, open_tap
from gossip.lab.benchmarks.network.namespaces import Namespace

MAX_HOSTS = 200
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MAX_DELAY_S = 1.0
_NETWORK = "10.77.0"
_BRIDGE_ADDRESS = f"{_NETWORK}.254"
_COMMAND_TIMEOUT_S = 20
_KERNEL_PARAMETERS = {
    "tcp_orphan_retries": 3,  # 3 seconds, not 100: connections to a dead peer must not keep the host for minutes
    "tcp_slow_start_after_idle": 0,  # as on hosts set up for long links
}
CONGESTION_CONTROL = "cubic"  # the kernel's default, not this machine's setting: all step times depend on it
_BURST_S = 0.004  # the burst of an idle link, in seconds at its rate: one tick of the kernel's clock, but at least
_MIN_BURST_BYTES = 1 << 17  # two packets of 64 KiB
_QUEUE_S = 0.05  # the queue of a link before it drops packets, in seconds at its rate, or a round trip if longer; but
_MIN_QUEUE_BYTES = 1 << 20  # several of the 64 KiB packets that a veth delivers


@dataclass(frozen=True)
class Link:
    """The link by which every host of the lab is connected.

    Attributes
    ----------
    bits_per_second : int
        The rate in each direction.
    delay_s : float
        The one-way delay between two hosts, in addition to the transmission time.
    """

    bits_per_second: int
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse a rate in the notation of tc, optionally followed by a delay.

        Raises
        ------
        ValueError
            The text is not a rate with an optional delay, or a value is out of range.

        Examples
        --------
        >>> Link.parse("1.5gbit"), Link.parse("50mbit+50ms")
        (Link(bits_per_second=1500000000, delay_s=0.0), Link(bits_per_second=50000000, delay_s=0.05))
        """
        rate, plus, delay = text.partition("+")
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
        bits = round(float(found[1]) * _UNITS[found[2]]) if found else 0
        if bits < 1000:
            raise ValueError(f"rate must be a number with kbit, mbit or gbit, such as 200mbit, got {text!r}")
        found = re.fullmatch(r"(\d+(?:\.\d+)?)ms", delay.strip())
        delay_s = float(found[1]) / 1e3 if found else 0.0
        if (plus and not found) or delay_s > _MAX_DELAY_S:
            raise ValueError(
                f"a link's delay must be a number with ms, at most {1e3 * _MAX_DELAY_S:g}, such as 50mbit+50ms, "
                f"got {text!r}"
            )
        return cls(bits, delay_s)


class LabUnavailable(Exception):
    """The lab cannot be created on this machine or by this user; the text says why in one line."""


class Lab:
    """Hosts on a bridge; host i has the address 10.77.0.(i + 1) on its interface eth0.

    Parameters
    ----------
    num_hosts : int
    link : Link, optional
        The link of every host; by default as fast as memory. Half of its delay is on the link of each host, so that the
        distance to the bridge is half as long as to another host.

    Raises
    ------
    LabUnavailable
        The lab cannot be created here.
    """

    interface = "eth0"

    def __init__(self, num_hosts: int, link: Link | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts must be from 1 to {MAX_HOSTS}, got {num_hosts}")
        if missing := what_is_missing():
            raise LabUnavailable(missing)
        with contextlib.ExitStack() as stack:
            try:
                namespaces = [stack.enter_context(contextlib.closing(Namespace())) for _ in range(1 + num_hosts)]
            except OSError as error:
                raise LabUnavailable(f"network namespaces are not permitted here ({error.strerror})") from error
            self._bridge, *self._hosts = namespaces
            to_bridge = f"address add {_BRIDGE_ADDRESS}/24 dev bridge"
            _batch(self._bridge, "ip", "link set lo up", "link add bridge type bridge", to_bridge, "link set bridge up")
            self._cables: DelayedCables | None = None
            if link is not None and link.delay_s:
                self._cables = self._lay_cables(link.delay_s / 2)
                stack.callback(self._cables.close)
            for rank in range(num_hosts):
                self._connect(rank)
            if link is not None:
                self.shape(link)
            self._resources = stack.pop_all()

    def _lay_cables(self, delay_s: float) -> DelayedCables:
        """Create a delayed cable from every host to the bridge."""
        with contextlib.ExitStack() as stack:
            devices: list[int] = []
            try:
                for rank, host in enumerate(self._hosts):
                    for namespace, name in ((self._bridge, f"port{rank}"), (host, self.interface)):
                        with namespace.entered():
                            devices.append(open_tap(name))
                        stack.callback(os.close, devices[-1])
                return DelayedCables(devices, delay_s)
            except OSError as error:
                raise LabUnavailable(f"TAP devices are not permitted here ({error.strerror})") from error

    def _connect(self, rank: int) -> None:
        """Create a host's interface and its bridge port, unless they are the ends of a cable, and configure them."""
        host, port, interface = self._hosts[rank], f"port{rank}", self.interface
        cable = [] if self._cables else [f"link add {port} type veth peer name {interface} netns {host.path}"]
        _batch(self._bridge, "ip", *cable, f"link set {port} master bridge up")
        with (
            host.entered(),
            contextlib.suppress(OSError),
        ):  # /proc may be read-only; the kernel's own values then remain
            for parameter, value in _KERNEL_PARAMETERS.items():
                Path("/proc/sys/net/ipv4", parameter).write_text(str(value))
        # By the route, because the kernel's parameter only takes what the machine allows to every user.
        route = f"{_NETWORK}.0/24 dev {interface} proto kernel scope link src {self.address(rank)}"
        _batch(
            host,
            "ip",
            "link set lo up",
            f"address add {self.address(rank)}/24 dev {interface}",
            f"link set {interface} up",
            f"route replace {route} congctl {CONGESTION_CONTROL}",
        )

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{_NETWORK}.{host + 1}"

    def start_store(self, timeout: timedelta) -> dist.TCPStore:
        """Start a key-value store in this process, on the bridge itself, which has a link to every host."""
        with self._bridge.entered():
            return store_at(_BRIDGE_ADDRESS, timeout)

    def entered(self, host: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which this thread, and the processes that it starts, are on the host."""
        return self._hosts[host].entered()

    def namespaces(self) -> list[str]:
        """Return the paths of the hosts' namespaces, which other processes can enter."""
        return [host.path for host in self._hosts]

    def shape(self, link: Link) -> None:
        """Limit every link to this rate in each direction, with immediate effect, even while packets are in flight."""
        bits = link.bits_per_second
        burst_bytes = max(_MIN_BURST_BYTES, round(_BURST_S * bits / 8))
        queue_s = max(_QUEUE_S, 2 * link.delay_s)
        queue_bytes = burst_bytes + max(_MIN_QUEUE_BYTES, round(queue_s * bits / 8))
        shaping = f"root tbf rate {bits}bit burst {burst_bytes} limit {queue_bytes}"
        ports = (f"qdisc replace dev port{rank} {shaping}" for rank in range(len(self._hosts)))
        _batch(self._bridge, "tc", *ports)
        for host in self._hosts:
            _batch(host, "tc", f"qdisc replace dev {self.interface} {shaping}")

    def close(self) -> None:
        """Release the cables, and the namespaces, which end with the processes inside them."""
        self._resources.close()


def store_at(address: str, timeout: timedelta) -> dist.TCPStore:
    """Start a key-value store on a free port of this address only, in the network namespace of this thread."""
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )


def what_is_missing() -> str | None:
    """Return the reason why a lab cannot be created here, as far as can be told without trying, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"{' and '.join(absent)} not found: install iproute2" if absent else None


def _batch(namespace: Namespace, program: str, *lines: str) -> None:
    """Run ``ip`` or ``tc`` once in a namespace for all lines."""
    command, content = [program, "-batch", "-"], "".join(f"{line}\n" for line in lines)
    with namespace.entered():
        try:
            subprocess.run(
                command, input=content, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
            )
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().replace("\n", " ")
            raise LabUnavailable(f"`{program} {'; '.join(lines)}` failed: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise LabUnavailable(f"`{program}` did not end within {_COMMAND_TIMEOUT_S} s") from error
