"""The lab: hosts, shaping, counters; and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_hosts import why_no_hosts

from gossip.lab.benchmarks import shaped_hosts
from gossip.lab.benchmarks.counters import InterfaceBytes
from gossip.lab.benchmarks.shaped_hosts import Lab, LabUnavailable

PATIENCE_S = 20


@pytest.fixture
def two_hosts() -> Iterator[Lab]:
    """Skips where there can be none."""
    if missing := why_no_hosts():
        pytest.skip(missing)
    made = Lab(2)
    yield made
    made.close()


def here() -> str:
    return os.readlink("/proc/thread-self/ns/net")


@pytest.mark.root
def test_lab_shapes_every_link_both_ways(two_hosts: Lab) -> None:
    for rate, said in ((200_000_000, "rate 200Mbit burst 512Kb"), (50_000_000, "rate 50Mbit burst 512Kb")):
        two_hosts.shape(rate)
        bridge, *hosts = two_hosts.links()
        assert bridge.count("tbf") == bridge.count(said) == 2
        assert [host.count(said) for host in hosts] == [1, 1]


@pytest.mark.root
def test_lab_hosts_are_apart_and_count_their_own_bytes(two_hosts: Lab) -> None:
    before, payload = here(), bytes(300_000)
    with two_hosts.entered(0):
        assert here() != before
        listener = socket.create_server((two_hosts.address(0), 0))
        listener.settimeout(PATIENCE_S)
        start_0 = InterfaceBytes.read("eth0")
    assert here() == before
    with two_hosts.entered(1), listener:
        start_1 = InterfaceBytes.read("eth0")
        with socket.create_connection(listener.getsockname(), timeout=PATIENCE_S) as sender:
            receiver = listener.accept()[0]
            receiver.settimeout(PATIENCE_S)
            sender.sendall(payload)
        with receiver:
            assert len(b"".join(iter(lambda: receiver.recv(1 << 16), b""))) == len(payload)
        sent = InterfaceBytes.read("eth0").since(start_1).sent
    with two_hosts.entered(0):
        received = InterfaceBytes.read("eth0").since(start_0).received
    assert len(payload) < sent < 1.2 * len(payload)
    assert len(payload) < received < 1.2 * len(payload)


@pytest.mark.root
def test_lab_namespace_is_left_after_an_error(two_hosts: Lab) -> None:
    before = here()
    with pytest.raises(RuntimeError, match="inside"), two_hosts.entered(1):
        raise RuntimeError("inside")
    assert here() == before


CONTROLLER = """
import signal, sys
from pathlib import Path
from gossip.lab.benchmarks import bench_workers
from gossip.lab.benchmarks.shaped_hosts import Lab
from gossip.lab.benchmarks.bench_settings import Settings
from gossip.lab.benchmarks.bench_specification import MethodSpecification

def terminate(number, frame):
    raise SystemExit(128 + number)

signal.signal(signal.SIGTERM, terminate)
settings = Settings(
    model="mlp", world_size=2, network="lab", rates=("200mbit",), straggler="none", repetitions=1, warmup_steps=2,
    steps=100_000, num_threads=1, seed=0, timeout_s=60.0, methods=(MethodSpecification("local", "local", {}),),
)
lab = Lab(2)
lab.shape(200_000_000)
bench_workers.measure(settings, lab, Path(sys.argv[1]), lambda record: print("measuring", lab._bridge.file, flush=True))
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGINT, -2)],
    ids=["term", "kill", "int"],
)
def test_lab_ends_with_its_controller(number: signal.Signals, status: int, tmp_path: Path) -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CONTROLLER), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as controller:
        assert controller.stdout is not None
        said = controller.stdout.readline().split()
        assert said[:1] == ["measuring"]
        workers = children(controller.pid)
        assert len(workers) == 2
        namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in workers}
        assert len(namespaces | {here()}) == 3
        bridge = os.open(f"/proc/{controller.pid}/fd/{said[1]}", os.O_RDONLY)
        try:
            assert ports(bridge) == ["port0", "port1"]
            controller.send_signal(number)
            assert controller.wait(PATIENCE_S) == status
            deadline = time.monotonic() + PATIENCE_S
            # A port goes with the interface at its other end, that with the host's namespace, that with its processes.
            while (ports(bridge) or any(map(is_alive, workers))) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert ports(bridge) == []
            assert not any(map(is_alive, workers))
        finally:
            os.close(bridge)


def children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ports(bridge: int) -> list[str]:
    """The interfaces on the bridge, in a namespace that this test alone may be holding by now."""
    listed = subprocess.run(
        ["nsenter", f"--net=/proc/{os.getpid()}/fd/{bridge}", "ip", "-brief", "link", "show", "master", "bridge"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return sorted(line.split("@")[0] for line in listed.stdout.splitlines())


def test_lab_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabUnavailable, match="network namespaces need root"):
        Lab(2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shaped_hosts.shutil, "which", lambda _: None)
    with pytest.raises(LabUnavailable, match="ip and tc not found: install iproute2"):
        Lab(2)


def test_lab_too_many_hosts() -> None:
    with pytest.raises(ValueError, match="num_hosts must be from 1 to 200, got 201"):
        Lab(201)
