"""No thread of ours is left when a program ends, or it aborts: with peers that are late, and with one that is stuck."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from programs import run_programs
from repository import GOSSIP

RELEASED_TOO_LATE = """
import threading

NUM_LOOKS = 100_000


class LastMessage:
    '''Comes while the interpreter finalizes, for the thread that still waits for it.'''

    def __init__(self):
        thread = next(each for each in threading.enumerate() if each.name.endswith("-wait"))
        self.status = f"/proc/self/task/{thread.native_id}/status"
        self.os, self.is_finalizing, self.pipes = os, sys.is_finalizing, (tell, heard_back)

    def num_wakes(self):
        file = self.os.open(self.status, self.os.O_RDONLY)
        lines = self.os.read(file, 10_000).splitlines()
        self.os.close(file)
        return [line for line in lines if line.startswith(b"voluntary")]

    def __del__(self, num_looks=NUM_LOOKS):
        assert self.is_finalizing()
        before = self.num_wakes()
        self.os.write(self.pipes[0], b".")
        self.os.read(self.pipes[1], 1)
        for _ in range(num_looks):
            if self.num_wakes() != before:
                break
        self.os.write(1, b"it has come\\n")


def run():
    global last
    model = build(timeout_s=5.0)
    train(model, 3)
    if rank == 1:
        os.read(heard, 1)
        train(model, 1)
        model.close()
        os.write(tell_back, b".")
        os._exit(0)
    train(model, 1)
    last = LastMessage()
    return model


if case["end"] == "in a function":
    run()
else:
    model = run()
if case["end"] == "sys.exit(3)":
    sys.exit(3)
if case["end"] == "an exception":
    raise ValueError("of the program's own")
"""


def test_program_ends_with_its_own_status_when_a_message_comes_too_late(tmp_path: Path) -> None:
    statuses = {"in a function": 0, "globally": 0, "sys.exit(3)": 3, "an exception": 1}
    ended = run_programs(RELEASED_TOO_LATE, tmp_path, cases=[{"end": end} for end in statuses], at_once=4)
    assert ended.output.count("it has come") == len(statuses), ended.output
    assert {end: each[0] for end, each in zip(statuses, ended.statuses, strict=True)} == statuses, ended.output


LAST_OF_ALL_HANDLERS = """
import atexit, os, sys, threading, time
from datetime import timedelta


@atexit.register
def last_of_all():
    os.write(1, f"left: {[each.name for each in threading.enumerate() if each.name.startswith('gossip')]}".encode())


from gossip.communication.worker_threads import WorkerThreads, Operation

is_awaited = threading.Event()


def is_in_join(frame):
    return frame is not None and (frame.f_code.co_name == "join" or is_in_join(frame.f_back))


def release_what_is_awaited():
    while not is_in_join(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.001)
    is_awaited.set()


class Message:
    def wait(self):
        is_awaited.wait()


worker_threads = WorkerThreads("gossip-test", timedelta(seconds=60))
worker_threads.submit(iter([(Operation("a peer", Message()),)]))
threading.Thread(target=release_what_is_awaited, daemon=True).start()
"""


def test_exit_waits_for_what_is_under_way() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LAST_OF_ALL_HANDLERS], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout == "left: []", run.stderr


RELEASED_BY_WHAT_IS_SAID = """
import sys, threading
from datetime import timedelta
from gossip.communication.worker_threads import WorkerThreads, Operation

is_awaited = threading.Event()


class Said:
    def write(self, text, write=sys.stderr.write):
        write(text)
        if "waiting for them up to 60 s" in text:
            is_awaited.set()

    def flush(self):
        pass


class Message:
    def wait(self):
        is_awaited.wait()


sys.stderr = Said()
worker_threads = WorkerThreads("gossip-test", timedelta(seconds=60))
worker_threads.submit(iter([(Operation("a peer", Message()),)]))
"""


def test_exit_says_what_it_waits_for() -> None:
    run = subprocess.run(
        [sys.executable, "-c", RELEASED_BY_WHAT_IS_SAID], capture_output=True, text=True, timeout=50, check=True
    )
    assert "messages are under way that a peer has not sent or taken yet (gossip-test-wait)" in run.stderr


LATE_EXCHANGE = """
import atexit, sys

sys.last_of_all = []
atexit.register(lambda: sys.last_of_all[0]())
"""

EXCHANGES_AT_THE_VERY_END = """
model = build()
train(model, 2)


def exchange():
    try:
        train(model, 1)
    except gossip.GossipError as error:
        print(error, flush=True)


sys.last_of_all.append(exchange)
"""


def test_exchange_after_the_end_of_communication_is_refused_at_once(tmp_path: Path) -> None:
    ended = run_programs(EXCHANGES_AT_THE_VERY_END, tmp_path, first=LATE_EXCHANGE)
    assert ended.statuses == [{0: 0, 1: 0}], ended.output
    assert ended.output.count("communication has ended with the program: in an exit handler") == 2, ended.output


LEFT_TO_THEMSELVES = {
    "communication/daemon_threads.py": "starts all others",
    "launching/launcher.py": "its worker leaves without finalization",
    "lab/benchmarks/bench_worker.py": "leaves without finalization",
    "lab/benchmarks/goodput.py": "is waited for where it is started, and holds no tensor",
}


def test_threads_are_started_where_their_end_is_seen_to() -> None:
    found = set()
    for path in GOSSIP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).endswith(
                ("threading.Thread", "ThreadPoolExecutor", "threading.Timer")
            ):
                found.add(str(path.relative_to(GOSSIP)))
    annotated = {"communication/worker_threads.py", "communication/waiting.py"}
    assert found - annotated == set(LEFT_TO_THEMSELVES)
