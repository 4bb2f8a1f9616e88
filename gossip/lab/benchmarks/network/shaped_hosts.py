"""A virtual network on one machine: hosts connected to one bridge by links with a rate. Needs Linux and root.

Hosts and bridge are unnamed network namespaces: each exists as long as a process is in it or holds it open. Nothing has
to be removed, and nothing can be left behind: the kernel removes it, with its interfaces and their shaping, when the
last of these processes ends, even if that was killed.
"""

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from gossip.lab.experiments.validated_models import ConfigurationError
from gossip.launching import serve

MAX_HOSTS = 200
_CURRENT = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000  # sched.h
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_NETWORK = "10.77.0"
BRIDGE_ADDRESS = f"{_NETWORK}.254"
_COMMAND_TIMEOUT_S = 20
_KERNEL_PARAMETERS = {
    "tcp_orphan_retries": 3,  # 3 seconds, not 100: connections to a dead peer must not keep the host for minutes
    "tcp_slow_start_after_idle": 0,  # as on hosts set up for long links
}
CONGESTION_CONTROL = "cubic"  # the kernel's default, not this machine's setting: all step times depend on it
_BURST_S = 0.004  # the burst of an idle link, in seconds at its rate: one tick of the kernel's clock, but at least
_MIN_BURST_BYTES = 1 << 17  # two packets of 64 KiB
_QUEUE_S = 0.05  # the queue of a link before it drops packets, in seconds at its rate, but at least
_MIN_QUEUE_BYTES = 1 << 20  # several of the 64 KiB packets that a veth delivers


class Namespace:
    """A new network namespace, held open by this process by the descriptor ``file``. Needs Linux and root.

    An OSError says that the kernel does not permit one.
    """

    def __init__(self) -> None:
        with _returning():
            _call("unshare", _CLONE_NEWNET)
            self.file = os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        """The path by which other processes reach the namespace."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread into the namespace within the block; processes and sockets started there remain there."""
        with _returning():
            _call("setns", self.file, _CLONE_NEWNET)
            yield

    def close(self) -> None:
        """Release the namespace; it ceases to exist with the last process inside it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def enter(path: str) -> None:
    """Move this thread, and threads that it starts from now on, into a namespace of another process for good."""
    with open(path) as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    with open(_CURRENT) as here:
        try:
            yield
        finally:
            _call("setns", here.fileno(), _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    """Make a system call by the C library (os.unshare and os.setns require Python 3.12)."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def bits_per_second(rate: str) -> int:
    """Parse a rate in the notation of tc; a ValueError says that the text is none.

    Examples
    --------
    >>> bits_per_second("1.5gbit"), bits_per_second("50mbit")
    (1500000000, 50000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
    bits = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if bits < 1000:
        raise ValueError(f"rate must be a number with kbit, mbit or gbit, such as 200mbit, got {rate!r}")
    return bits


class Lab:
    """Hosts on a bridge, at most :data:`MAX_HOSTS`; host i has the address 10.77.0.(i + 1) on its interface eth0.

    The ``rate`` is that of the link of every host, in bits per second each way; by default it is as fast as memory. The
    link of the last host may have another one, ``last_rate``, and so may messages from a host of the first half to one
    of the second and back, ``far_rate`` for each pair.
    A ConfigurationError says in one line why the lab cannot be created on this machine or by this user.
    """

    interface = "eth0"

    def __init__(
        self, num_hosts: int, rate: int | None = None, last_rate: int | None = None, far_rate: int | None = None
    ) -> None:
        if missing := what_is_missing():
            raise ConfigurationError(f"no lab: {missing}")
        with contextlib.ExitStack() as stack:
            try:
                namespaces = [stack.enter_context(contextlib.closing(Namespace())) for _ in range(1 + num_hosts)]
            except OSError as error:
                raise ConfigurationError(
                    f"no lab: network namespaces are not permitted here ({error.strerror})"
                ) from error
            self._bridge, *self._hosts = namespaces
            to_bridge = f"address add {BRIDGE_ADDRESS}/24 dev bridge"
            _batch(self._bridge, "ip", "link set lo up", "link add bridge type bridge", to_bridge, "link set bridge up")
            for rank in range(num_hosts):
                self._connect(rank)
            if rate is not None:
                self.shape(rate)
            if last_rate is not None:
                self.shape(last_rate, num_hosts - 1)
            if rate is not None and far_rate is not None:
                self._slow_down_between_halves(rate, far_rate)
            self._resources = stack.pop_all()

    def _connect(self, rank: int) -> None:
        """Create and configure a host's interface and its bridge port."""
        host, port, interface = self._hosts[rank], f"port{rank}", self.interface
        cable = f"link add {port} type veth peer name {interface} netns {host.path}"
        _batch(self._bridge, "ip", cable, f"link set {port} master bridge up")
        with host.entered(), contextlib.suppress(OSError):  # /proc may be read-only: the kernel's own values remain
            for parameter, value in _KERNEL_PARAMETERS.items():
                Path("/proc/sys/net/ipv4", parameter).write_text(str(value))
        # By the route, because the kernel's parameter only takes what the machine allows to every user.
        route = f"route replace {_NETWORK}.0/24 dev {interface} proto kernel scope link src {self.address(rank)}"
        up = "link set lo up", f"address add {self.address(rank)}/24 dev {interface}", f"link set {interface} up"
        _batch(host, "ip", *up, f"{route} congctl {CONGESTION_CONTROL}")

    @staticmethod
    def address(host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"{_NETWORK}.{host + 1}"

    def start_store(self, timeout: timedelta) -> dist.TCPStore:
        """Start a key-value store in this process, on the bridge itself, which has a link to every host."""
        with self.on_bridge():
            return store_at(BRIDGE_ADDRESS, timeout)

    def on_bridge(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which this thread, and the processes that it starts, are on the bridge."""
        return self._bridge.entered()

    def entered(self, host: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which this thread, and the processes that it starts, are on the host."""
        return self._hosts[host].entered()

    def namespaces(self) -> list[str]:
        """Return the paths of the hosts' namespaces, which other processes can enter."""
        return [host.path for host in self._hosts]

    def shape(self, rate: int, first: int = 0) -> None:
        """Limit the links of the hosts from ``first`` on to a rate in bits per second, each way, even while in use."""
        burst_bytes, queue_bytes = _buffers(rate)
        shaping = f"root tbf rate {rate}bit burst {burst_bytes} limit {queue_bytes}"
        ports = (f"qdisc replace dev port{rank} {shaping}" for rank in range(first, len(self._hosts)))
        _batch(self._bridge, "tc", *ports)
        for host in self._hosts[first:]:
            _batch(host, "tc", f"qdisc replace dev {self.interface} {shaping}")

    def _slow_down_between_halves(self, rate: int, far_rate: int) -> None:
        """Give each host, in the place of its interface's shaping, one class of messages for every other one."""
        interface, num_hosts = self.interface, len(self._hosts)
        for number, host in enumerate(self._hosts):
            lines = [f"qdisc replace dev {interface} root handle 1: htb"]
            lines += [_htb(interface, "1:", 0xFFFF, rate, rate)]  # what all of them share
            for peer in (each for each in range(num_hosts) if each != number):
                is_far = (number < num_hosts // 2) != (peer < num_hosts // 2)
                most, to_peer = far_rate if is_far else rate, f"u32 match ip dst {self.address(peer)}"
                lines += [
                    _htb(interface, "1:ffff", peer + 1, min(most, rate // num_hosts), most),
                    f"qdisc add dev {interface} parent 1:{peer + 1:x} bfifo limit {_buffers(most)[1]}",
                    f"filter add dev {interface} parent 1: protocol ip {to_peer} flowid 1:{peer + 1:x}",
                ]
            _batch(host, "tc", *lines)

    def set_link(self, host: int, state: Literal["up", "down"]) -> None:
        """Cut the link of a host off, as if its cable was pulled out, or connect it again."""
        _batch(self._bridge, "ip", f"link set port{host} {state}")

    def close(self) -> None:
        """Release the namespaces, which end with the processes inside them."""
        self._resources.close()


def _buffers(rate: int) -> tuple[int, int]:
    """Return the burst and the queue of a link with a rate in bits per second, in bytes."""
    burst_bytes = max(_MIN_BURST_BYTES, round(_BURST_S * rate / 8))
    return burst_bytes, burst_bytes + max(_MIN_QUEUE_BYTES, round(_QUEUE_S * rate / 8))


def _htb(interface: str, parent: str, number: int, rate: int, most: int) -> str:
    """Return the line of a class that has a rate to itself and may take more, both in bits per second."""
    burst_bytes = _buffers(most)[0]
    kind = f"htb rate {rate}bit ceil {most}bit burst {burst_bytes} cburst {burst_bytes} quantum {1 << 16}"
    return f"class add dev {interface} parent {parent} classid 1:{number:x} {kind}"


def store_at(address: str, timeout: timedelta) -> dist.TCPStore:
    """Start a key-value store on a free port of this address only, in the network namespace of this thread."""
    return serve(address, socket.create_server((address, 0)), timeout)


def what_is_missing() -> str | None:
    """Return the reason why a lab cannot be created here, as far as can be told without trying, or None."""
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
            raise ConfigurationError(f"`{program} {'; '.join(lines)}` failed: {said}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(f"`{program}` did not end within {_COMMAND_TIMEOUT_S} s") from error
