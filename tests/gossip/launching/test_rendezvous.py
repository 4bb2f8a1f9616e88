"""Ranks that are started on their own meet in a store, train, come and go; who can reach what they listen on."""

import contextlib
import gc
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import lone_ranks
import pytest
import torch
import torch.distributed as dist
import yaml
from faulty_models import FAULTY
from free_ports import free_port
from lone_ranks import files_of, read, result_of, script, trained_by, wait_until
from repository import REPOSITORY
from running import Running, run, run_folders, running, train

import gossip
from gossip import LaunchError
from gossip.communication import training_store
from gossip.communication.authenticated_store import VARIABLE as KEY_VARIABLE
from gossip.communication.liveness.process_liveness import own_process
from gossip.lab.experiments.records import read_jsonl
from gossip.launching import rendezvous, store_command
from gossip.launching.rendezvous import Met, Rendezvous, find_rendezvous, meet

KEY = "k" * 32


@pytest.mark.parametrize(
    ("where", "groups", "text"),
    [
        ("node1", "4", "GOSSIP_STORE must be the host:port of `gossip store`.*, got 'node1'"),
        ("node1:1/a b", "4", "GOSSIP_STORE must be .*, got 'node1:1/a b'"),
        ("node1:1", "", "GOSSIP_GROUPS must be the number of groups .*, got ''"),
        ("node1:1", "5:4", "GOSSIP_GROUPS must be .*, such as 2:4, got '5:4'"),
        ("node1:1", "0", "GOSSIP_GROUPS must be .*, got '0'"),
    ],
)
def test_variables_that_say_nothing_are_refused(where: str, groups: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        find_rendezvous({"GOSSIP_STORE": where, "GOSSIP_GROUPS": groups})


def test_more_than_half_begin_unless_it_is_said() -> None:
    found = [find_rendezvous({"GOSSIP_STORE": "[::1]:7/a", "GOSSIP_GROUPS": groups}) for groups in ("4", "1:4")]
    assert found == [Rendezvous("[::1]:7", "a", 4, least) for least in (3, 1)]


def test_a_store_that_cannot_be_served_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert store_command.main(["--port", str(port)]) == 2
    assert f"error: port {port} cannot be used: Address already in use" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        store_command.main(["--port", "65536"])
    assert "--port must be from 0 to 65535, got 65536" in capsys.readouterr().err


# ---------------------------------------------------------------------- who begins


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """A store in which all threads of this process meet for the first time."""
    monkeypatch.setattr(rendezvous, "_meetings", itertools.repeat(0))
    monkeypatch.setattr(training_store, "begin", lambda *_, **__: None)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def met(store: dist.TCPStore, *groups: str, timeout_s: float = 60) -> list[Met | str]:
    """How each of these processes takes part, of which a thread stands for each; or the error."""

    def come(number: str) -> Met | str:
        where = find_rendezvous({"GOSSIP_STORE": f"127.0.0.1:{store.port}", "GOSSIP_GROUPS": number})
        assert where is not None
        try:
            return meet(where, timedelta(seconds=timeout_s))
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(come, groups))


def ranks(found: list[Met | str]) -> list[int | None]:
    assert all(isinstance(each, Met) for each in found), found
    return sorted((each.rank for each in found if isinstance(each, Met)), key=str)


def test_as_many_as_are_expected_begin_and_the_others_join(store: dist.TCPStore) -> None:
    store.set("gossip//0/0/gossip/trainings/0", json.dumps({"token": ""}))
    assert ranks(met(store, "2", "2", "2")) == [0, 1, None]
    assert ranks(met(store, "2")) == [None]


def test_enough_begin_at_the_time_out_and_fewer_do_not(store: dist.TCPStore) -> None:
    (text,) = met(store, "2:4", timeout_s=0.1)
    assert re.search(r"1 of GOSSIP_GROUPS=4 groups came to .* within 0.1 s, and at least 2 are needed", str(text))
    assert ranks(met(store, "2:4", timeout_s=0.1)) == [1]  # the first one is still there


def test_one_that_has_ended_is_not_waited_for(store: dist.TCPStore) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = json.dumps(own_process()._replace(pid=ended.pid))
    store.set("gossip//0/0/process0", gone)
    store.add("gossip//0/0/num_processes", 1)
    assert ranks(met(store, "2", "2")) == [0, 1]
    # All founders of the second training end before it is announced.
    store.set("gossip/b/0/0/process0", gone)
    store.set("gossip/b/0/0/founders", "[0]")
    where = Rendezvous(f"127.0.0.1:{store.port}", "b", 1, 1)
    assert meet(where, timedelta(seconds=60)).rank == 0
    assert store.get("gossip/b/0/1/founders") == b"[0]"


def test_founders_that_do_not_wrap_a_model_are_not_waited_for_for_ever(store: dist.TCPStore) -> None:
    assert ranks(met(store, "1")) == [0]
    (text,) = met(store, "1", timeout_s=0.1)
    assert "the 1 founders of the training at" in str(text)
    assert f"under another name, GOSSIP_STORE=127.0.0.1:{store.port}/NAME" in str(text)


@pytest.mark.usefixtures("store")
def test_a_store_that_ends_meanwhile_is_not_waited_for() -> None:
    with ThreadPoolExecutor(1) as threads, lone_ranks.served() as (address, _):
        other = dist.TCPStore("127.0.0.1", int(address.rpartition(":")[2]), is_master=False)
        waiting = threads.submit(met, other, "2")
        wait_until(lambda: other.check(["gossip//0/0/process0"]))
    assert re.search(r"the key-value store at 127.0.0.1:\d+ does not reply", str(waiting.result()[0]))


# ---------------------------------------------------------------------- ranks that train


@contextlib.contextmanager
def served(monkeypatch: pytest.MonkeyPatch, groups: str) -> Iterator[list[str]]:
    """A store in which so many meet that are started within the block; what it has printed."""
    with lone_ranks.served() as (address, lines), monkeypatch.context() as environment:
        environment.setenv("GOSSIP_STORE", address)
        environment.setenv("GOSSIP_GROUPS", groups)
        yield lines


@pytest.mark.parametrize("size", [1, 2])
def test_agents_of_torchrun_outlive_one_of_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    mesh = "" if size == 1 else 'mesh=gossip.make_shard_mesh(), shard="optimizer"'
    path = script(tmp_path, "train.py", "gossip.launch(train)", mesh=mesh)
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")

    def agent(number: int) -> contextlib.AbstractContextManager[Running]:
        return running(tmp_path, "members[-1] == 4 == len(members) + 1", str(number), script=path, torchrun=size)

    with served(monkeypatch, "3"), contextlib.ExitStack() as stack:
        agents = [stack.enter_context(agent(number)) for number in range(3)]
        wait_until(lambda: trained_by(tmp_path, 0, 1, 2, size=size))
        seen = [read(file) for file in files_of(tmp_path, 0, 1, 2, size=size)]
        assert {each["group"] for each in seen} == {3 * size}
        lost = agents[int(seen[-1]["agent"])]
        os.killpg(lost.process.pid, signal.SIGKILL)  # an agent and its ranks, as with a node
        for each in seen[-size:]:
            os.kill(each["pid"], signal.SIGKILL)
        wait_until(lambda: trained_by(tmp_path, 0, 1, size=size))
        os.kill(seen[0]["pid"], signal.SIGKILL)  # its agent starts it again
        wait_until(lambda: trained_by(tmp_path, 1, 3, size=size))
        again = read(files_of(tmp_path, 3, size=size)[0])
        assert (again["group"], again["agent"]) == (size, seen[0]["agent"])
        agents.append(stack.enter_context(agent(3)))
        for each in agents:
            ended = each.finished()
            assert ended.status == (-signal.SIGKILL if each is lost else 0), ended.stderr
    assert result_of(tmp_path) == {group * size + place: [1, 3, 4] for group in (1, 3, 4) for place in range(size)}


@pytest.mark.slow
def test_a_configured_run_ends_well_without_the_process_that_began_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    dies = ("+model.how=killed", "+model.rank=0", "+model.step=5", f"+model.once={tmp_path}/once")
    scheduler = ("scheduler._target_=faulty_models.RateOfItsTime", f"+scheduler.once={tmp_path}/once")
    options = (
        *FAULTY,
        *dies,
        *scheduler,
        "wrapper.on_peer_loss=continue",
        "wrapper.min_ranks=1",
        "training.steps=3000",
        "checkpoint.every=99",
    )
    with served(monkeypatch, "2"), contextlib.ExitStack() as stack:
        with monkeypatch.context() as alone:
            alone.setenv("GOSSIP_STORE", f"{os.environ['GOSSIP_STORE']}/refused")
            alone.setenv("GOSSIP_GROUPS", "1")
            refused = train(tmp_path)
        assert "error: ranks that meet in a store, since GOSSIP_STORE is set, come and go" in refused.stderr
        agents = [stack.enter_context(running(tmp_path, *options, torchrun=1)) for _ in range(2)]
        for each in agents:
            each.finished().succeeded()
    (folder,) = run_folders(tmp_path)
    summary = read(folder / "summary.json")
    assert (summary["status"], summary["world_size"], summary["steps"]) == ("completed", 2, 3000)
    assert [change["members"] for change in summary["changes_of_ranks"]] == [[1], [1, 2]]
    joined_at = summary["changes_of_ranks"][-1]["step"]
    rates = {
        rank: {each["step"]: each["learning_rate"] for each in read_jsonl(folder / f"rank{rank}.jsonl")}
        for rank in (1, 2)
    }
    assert rates[2] == {step: rates[1][step] for step in range(joined_at, 3000)}
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_ranks_that_have_all_died_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, "train.py", "gossip.launch(train)")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")  # those that come first find nobody
    second_life = "__import__('os').environ['TORCHELASTIC_RESTART_COUNT'] > '0'"
    with served(monkeypatch, "2"), contextlib.ExitStack() as stack:
        agents = [stack.enter_context(running(tmp_path, second_life, "0", script=path, torchrun=1)) for _ in range(2)]
        wait_until(lambda: trained_by(tmp_path, 0, 1))
        for pid in [read(tmp_path / f"member{member}")["pid"] for member in range(2)]:
            os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.finished().succeeded()
        late = run(str(path), tmp_path, "True", "0").succeeded()
        assert "since the training is complete: there is nothing left to do" in late.stderr
    assert result_of(tmp_path) == {0: [0, 1], 1: [0, 1]}


def test_trainings_at_one_store_are_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank begins one, with a loop of its own; another one joins it."""
    path = script(tmp_path, "train.py", "gossip.join_training(); train()")
    other_model = script(tmp_path, "other.py", "gossip.join_training(); train()", width=5)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with served(monkeypatch, "1") as lines, running(tmp_path, "len(members) == 2", "0", script=path) as first:
        assert re.search(r"who may join: those who have the key of GOSSIP_KEY \(fingerprint [0-9a-f]{8}\)", lines[2])
        wait_until((tmp_path / "member0").exists)
        refused = run(str(other_model), tmp_path, "True", "0")
        assert "cannot join: parameter 1 is 'weight' float64 [1, 5]" in refused.stderr
        with monkeypatch.context() as stranger:
            stranger.delenv(KEY_VARIABLE)
            refused = run(str(path), tmp_path, "True", "0")
            assert "the other ranks have a GOSSIP_KEY, and this one has none" in refused.stderr
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("GOSSIP_STORE", f"{os.environ['GOSSIP_STORE']}/another")
            (tmp_path / "another").mkdir()
            run(str(other_model), tmp_path / "another", "True", "0").succeeded()
        assert result_of(tmp_path / "another") == {0: [0]}
        assert run(str(path), tmp_path, "len(members) == 2", "0").status == 0
        assert first.finished().status == 0
        (found,) = set(map(tuple, result_of(tmp_path).values()))
        assert len(found) == 2
        assert found[0] == 0
        late = run(str(path), tmp_path, "True", "0")
        assert late.status == 1
        assert "cannot be reached: the training has ended" in late.stderr


def test_founders_that_build_different_models_leave_the_store_to_those_who_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [script(tmp_path, f"{width}.py", "gossip.launch(train)", width) for width in (4, 5)]
    with served(monkeypatch, "2"), contextlib.ExitStack() as stack:
        both = [stack.enter_context(running(tmp_path, "len(members) == 2", "0", script=path)) for path in paths]
        for each in both:
            ended = each.finished()
            assert "ManifestError: the ranks do not train the same thing" in ended.stderr
        both = [stack.enter_context(running(tmp_path, "len(members) == 2", "0", script=paths[0])) for _ in paths]
        for each in both:
            each.finished().succeeded()
    assert result_of(tmp_path) == {0: [0, 1], 1: [0, 1]}


def test_the_manifest_of_kubernetes_with_processes_for_its_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs" / "gossip_store.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    port = free_port()
    service, pod, job = yaml.safe_load_all(text.replace("29400", str(port)))
    assert service["spec"] == {"selector": pod["metadata"]["labels"], "ports": [{"port": port}]}
    (of_store,), (of_rank,) = pod["spec"]["containers"], job["spec"]["template"]["spec"]["containers"]
    for container in (of_store, of_rank):
        for variable in container["env"]:
            monkeypatch.setenv(variable["name"], variable.get("value", KEY))
    where = os.environ["GOSSIP_STORE"].replace(f"{service['metadata']['name']}:", "127.0.0.1:")
    monkeypatch.setenv("GOSSIP_STORE", where)
    assert of_store["command"][:1] + of_rank["command"] == ["gossip", "python", "train.py"]
    number = job["spec"]["parallelism"]
    path = script(tmp_path, "train.py", "gossip.launch(train)")

    def start(index: int) -> contextlib.AbstractContextManager[Running]:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        return running(tmp_path, f"members[-1] == {number} == len(members)", str(index), script=path)

    with contextlib.ExitStack() as stack:
        stack.enter_context(running(tmp_path, *of_store["command"][1:], script=lone_ranks.COMMAND))
        ranks = [stack.enter_context(start(index)) for index in range(number)]
        wait_until(lambda: trained_by(tmp_path, *range(number)))
        killed = read(tmp_path / "member0")
        os.kill(killed["pid"], signal.SIGKILL)
        ranks[int(killed["agent"])] = stack.enter_context(start(int(killed["agent"])))
        for rank in ranks:
            rank.finished().succeeded()
    together = [*range(1, number + 1)]
    assert result_of(tmp_path) == dict.fromkeys(together, together)


LISTENS = "0A"


def listening(process_id: int) -> list[str]:
    """The addresses on which a process of this machine listens, one per socket."""
    inodes = set()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{process_id}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            address, state, inode = fields[1].partition(":")[0], fields[3], fields[9]
            if state == LISTENS and inode in inodes:
                is_v4 = table == "tcp"
                found.append(str(IPv4Address(bytes.fromhex(address)[::-1])) if is_v4 else address)
    return found


def listening_while_training(parent: int) -> tuple[list[str], list[str]]:
    module = torch.nn.Linear(4, 1)
    model = gossip.GossipDataParallel(module, partial(torch.optim.SGD, lr=0.1), topology="ring")
    model(torch.ones(2, 4)).sum().backward()
    found = listening(os.getpid()), listening(parent)
    dist.barrier()
    return found


def test_launch_listens_on_this_machine_alone() -> None:
    before = Counter(listening(os.getpid()))  # of the ranks that stand ready for other tests
    for ranks, parent in gossip.launch(listening_while_training, os.getpid(), world_size=2):
        of_launch = Counter(parent) - before
        assert ranks
        assert of_launch
        assert {*ranks, *of_launch} == {"127.0.0.1"}


FOR_ALL = {signal.SIGINT, signal.SIGUSR1}


def signals_of(status: Path, field: str) -> set[signal.Signals]:
    """One of the masks that Linux writes in hexadecimal digits; the ones of ``FOR_ALL`` in it."""
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    mask = int(line.split()[1], 16)
    return {number for number in FOR_ALL if mask >> (number - 1) & 1}


def worker_and_its_parent() -> tuple[int, set[signal.Signals], set[signal.Signals], set[signal.Signals]]:
    own, parent = Path("/proc/self/status"), Path(f"/proc/{os.getppid()}/status")
    return os.getppid(), signals_of(own, "SigIgn"), signals_of(own, "SigBlk"), signals_of(parent, "SigBlk")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: /proc tells what a process blocks")
def test_fork_server_blocks_what_ends_a_run_and_workers_leave_ctrl_c_to_the_launcher() -> None:
    fork_server, ignored, blocked, blocked_by_the_fork_server = gossip.launch(worker_and_its_parent, world_size=2)[0]
    assert fork_server != os.getpid()
    assert blocked_by_the_fork_server == FOR_ALL  # before its imports are over as well: it inherits them
    assert signal.SIGINT in ignored
    assert signal.SIGUSR1 not in ignored | blocked


def test_no_collection_in_a_worker_walks_over_what_the_fork_server_has_imported() -> None:
    assert gossip.launch(gc.get_freeze_count, world_size=1)[0] > 10_000
