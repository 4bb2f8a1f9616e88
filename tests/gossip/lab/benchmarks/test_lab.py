"""The lab: hosts, shaping, counters; and that nothing of it is left."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import why_no_hosts
from lone_ranks import wait_until
from running import Running, program, running, written

from gossip.lab.benchmarks import failures
from gossip.lab.benchmarks.benchmark import BenchmarkSettings
from gossip.lab.benchmarks.network import shaped_hosts
from gossip.lab.benchmarks.network.counters import interface_bytes
from gossip.lab.benchmarks.network.shaped_hosts import Lab, Namespace
from gossip.lab.experiments.validated_models import ConfigurationError

PATIENCE_S = 20


@pytest.fixture
def two_hosts() -> Iterator[Lab]:
    """Skips where there can be none."""
    if missing := why_no_hosts():
        pytest.skip(missing)
    made = Lab(2)
    yield made
    made.close()


def queues(namespace: Namespace) -> str:
    """What tc says about the queues of a namespace."""
    with namespace.entered():
        return subprocess.run(["tc", "-s", "qdisc"], capture_output=True, text=True, check=True).stdout


def here() -> str:
    return os.readlink("/proc/thread-self/ns/net")


@pytest.mark.root
def test_lab_shapes_every_link_both_ways_and_sets_the_congestion_control(two_hosts: Lab) -> None:
    for rate, said in ((1_000_000_000, "rate 1Gbit burst 500000b"), (50_000_000, "rate 50Mbit burst 128Kb")):
        two_hosts.shape(rate)
        bridge, *hosts = map(queues, (two_hosts._bridge, *two_hosts._hosts))
        assert bridge.count("tbf") == bridge.count(said) == 2
        assert [host.count(said) for host in hosts] == [1, 1]
    for rank in range(2):
        with two_hosts.entered(rank), socket.socket() as connection:
            connection.setblocking(False)
            connection.connect_ex((two_hosts.address(1 - rank), 9))
            name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"cubic"


@pytest.mark.root
def test_the_link_of_the_last_host_may_be_another_one() -> None:
    options: dict[str, Any] = {"world_size": 3, "links": "1gbit", "last_link": "50mbit"}
    with contextlib.closing(BenchmarkSettings(network="lab", **options).make_lab()) as lab:
        said = [queues(host) for host in lab._hosts]
        assert ["rate 50Mbit" in each for each in said] == [False, False, True]
        assert ["rate 1Gbit" in each for each in said] == [True, True, False]
        assert queues(lab._bridge).count("rate 50Mbit") == 1
    for name in ("last_link", "far_link"):
        with pytest.raises(ValueError, match=f"{name}=50mbit: network=loopback has no links; set network=lab"):
            BenchmarkSettings(network="loopback", **{name: "50mbit"})


@pytest.mark.root
def test_links_between_the_halves_of_hosts_may_have_another_rate() -> None:
    options: dict[str, Any] = {"world_size": 3, "links": "1gbit", "far_link": "50mbit"}
    with contextlib.closing(BenchmarkSettings(network="lab", **options).make_lab()) as lab:
        for number, host in enumerate(lab._hosts):
            with host.entered():
                classes = subprocess.check_output(["tc", "class", "show", "dev", "eth0"], text=True)
                filters = subprocess.check_output(["tc", "filter", "show", "dev", "eth0"], text=True)
            peers, far = {0, 1, 2} - {number}, {1, 2} if number == 0 else {0}
            rates = dict(re.findall(r"class htb 1:(\d) .*? ceil (\w+) ", classes))
            assert rates == {str(peer + 1): "50Mbit" if peer in far else "1Gbit" for peer in peers}
            for peer in peers:
                assert re.search(rf"flowid 1:{peer + 1} .*\n  match 0a4d00{peer + 1:02x}/ffffffff", filters)


@pytest.mark.root
def test_lab_hosts_are_apart_and_count_their_own_bytes(two_hosts: Lab) -> None:
    before, payload = here(), bytes(300_000)
    with two_hosts.entered(0):
        assert here() != before
        listener = socket.create_server((two_hosts.address(0), 0))
        listener.settimeout(PATIENCE_S)
        received_before, _ = interface_bytes("eth0")
    assert here() == before
    with pytest.raises(RuntimeError, match="inside"), two_hosts.entered(1):
        raise RuntimeError("inside")
    assert here() == before
    with two_hosts.entered(1), listener:
        _, sent_before = interface_bytes("eth0")
        with socket.create_connection(listener.getsockname(), timeout=PATIENCE_S) as sender:
            receiver = listener.accept()[0]
            receiver.settimeout(PATIENCE_S)
            sender.sendall(payload)
        with receiver:
            assert len(b"".join(iter(lambda: receiver.recv(1 << 16), b""))) == len(payload)
        sent = interface_bytes("eth0")[1] - sent_before
    with two_hosts.entered(0):
        received = interface_bytes("eth0")[0] - received_before
    assert len(payload) < sent < 1.2 * len(payload)
    assert len(payload) < received < 1.2 * len(payload)


CONTROLLER = """
from pathlib import Path
from benchmark_cases import step_time_case
from gossip.lab.benchmarks.harness import StepTime, run_workers
from gossip.lab.benchmarks.network.shaped_hosts import Lab

if __name__ == "__main__":
    lab = Lab(2, 200_000_000)
    print(lab._bridge.file, flush=True)
    run_workers(StepTime, step_time_case(network="lab", steps=100_000), lab, Path("records"))
"""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Running]:
    """Has a lab, and workers in it."""
    if missing := why_no_hosts():
        pytest.skip(missing)
    with running(tmp_path, script=written(tmp_path, CONTROLLER)) as started:
        yield started


@pytest.mark.root
def test_lab_ends_with_its_controller(controller: Running) -> None:
    process = controller.process
    file = controller.first_line().strip()
    records = Path(f"/proc/{process.pid}/cwd/records/rank0.jsonl")
    while not (records.exists() and records.read_bytes()):  # until the ranks are on their hosts, and measure
        assert process.poll() is None, controller.finished()
        time.sleep(0.05)
    found = {}  # the namespaces of the processes of its group
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(path.name)) == process.pid:
                found[int(path.name)] = os.readlink(path / "ns" / "net")
    hosts = {pid: namespace for pid, namespace in found.items() if namespace != here()}
    assert len(hosts) == 2
    assert len({*hosts.values(), here()}) == 3
    bridge = os.open(f"/proc/{process.pid}/fd/{file}", os.O_RDONLY)
    try:
        assert ports(bridge) == ["port0", "port1"]
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        # A port goes with the interface at its other end, that with the host's namespace, that with its processes.
        wait_until(lambda: not ports(bridge) and not any(map(failures._is_there, hosts)))
    finally:
        os.close(bridge)


def ports(bridge: int) -> list[str]:
    """The interfaces on the bridge, in a namespace that this test alone may be holding by now."""
    link = ("ip", "-brief", "link", "show", "master", "bridge")
    listed = program("nsenter", f"--net=/proc/{os.getpid()}/fd/{bridge}", *link, patience_s=PATIENCE_S)
    return sorted(line.split("@")[0].split()[0] for line in listed.splitlines())


def test_lab_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigurationError, match="network namespaces need root"):
        Lab(2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shaped_hosts.shutil, "which", lambda _: None)
    with pytest.raises(ConfigurationError, match="ip and tc not found: install iproute2"):
        Lab(2)
