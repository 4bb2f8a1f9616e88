"""No thread of ours is left when a program ends, or it aborts: with peers that are late."""

import ast

import pytest
from programs import Ended, run_programs
from repository import GOSSIP

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("program_end")]  # one run makes all cases

FIRST = """
import atexit, sys

sys.last_of_all = []
atexit.register(lambda: [call() for call in sys.last_of_all])
"""

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

RELEASED_BY_WHAT_IS_SAID = """
import threading

from gossip.communication.host.worker_threads import WorkerThreads, Operation

is_awaited = threading.Event()


class Said:
    def write(self, text, write=sys.stderr.write):
        write(text)
        if "waiting for them for up to 60 s" in text:
            is_awaited.set()

    def flush(self):
        pass


class Message:
    def wait(self):
        is_awaited.wait()


def tell_what_is_left():
    left = [each.name for each in threading.enumerate() if each.name.startswith("gossip")]
    os.write(1, f"left: {left}\\n".encode())


sys.stderr = Said()
worker_threads = WorkerThreads("gossip-test", timedelta(seconds=60))
worker_threads.submit(iter([(Operation("a peer", Message()),)]))
sys.last_of_all.append(tell_what_is_left)
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


ENDS_FIRST = """
model = build(module=nn.Linear(300, 300))
features = torch.ones(2, 300)
for step in range(case["num_steps"]):
    loss = model(features).sum()
    if rank == 1 and step == case["num_steps"] - 1:
        os.close(tell)
        os.read(heard, 1)  # until the process of rank 0 has closed its end
    loss.backward()
"""


STATUSES = {"in a function": 0, "globally": 0, "sys.exit(3)": 3, "an exception": 1}
CASES: list[dict[str, object]] = [
    *({"program": RELEASED_TOO_LATE, "end": end} for end in STATUSES),
    {"program": RELEASED_BY_WHAT_IS_SAID},
    {"program": EXCHANGES_AT_THE_VERY_END},
]
ENDING_FIRST: list[dict[str, object]] = [{"program": ENDS_FIRST, "num_steps": num_steps} for num_steps in (1, 3)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One interpreter imports for all programs, and they wait at the same time."""
    body = 'exec(case["program"], globals())'
    return run_programs(
        body, tmp_path_factory.mktemp("ends"), first=FIRST, cases=[*CASES, *ENDING_FIRST], at_once=len(CASES)
    )


def test_program_ends_with_its_own_status_when_a_message_comes_too_late(ended: Ended) -> None:
    assert ended.output.count("it has come") == len(STATUSES), ended.output
    found = {case["end"]: each[0] for case, each in zip(CASES, ended.statuses, strict=False) if "end" in case}
    assert found == STATUSES, ended.output


def statuses_of(program: str, ended: Ended) -> dict[int, int]:
    return ended.statuses[CASES.index({"program": program})]


def test_exit_waits_for_what_is_under_way_and_says_so(ended: Ended) -> None:
    assert statuses_of(RELEASED_BY_WHAT_IS_SAID, ended) == {0: 0, 1: 0}, ended.output
    said = "exchange messages or save a checkpoint (gossip-test-finish, gossip-test-wait)"
    assert ended.output.count(said) == 2, ended.output
    assert ended.output.count("left: ") == ended.output.count("left: []") == 2, ended.output


def test_exchange_after_the_end_of_communication_is_refused_at_once(ended: Ended) -> None:
    assert statuses_of(EXCHANGES_AT_THE_VERY_END, ended) == {0: 0, 1: 0}, ended.output
    why = "communication has ended with the program: nothing can be exchanged any more in an exit handler"
    assert ended.output.count(why) == 2, ended.output


def test_messages_in_memory_outlive_the_rank_that_sent_them(ended: Ended) -> None:
    assert ended.statuses[len(CASES) :] == [{0: 0, 1: 0}] * len(ENDING_FIRST), ended.output


LEFT_TO_THEMSELVES = {
    "communication/host/daemon_threads.py": "starts all others",
    "launching/launcher.py": "its worker leaves without finalization",
}


def test_threads_are_started_where_their_end_is_seen_to() -> None:
    found = set()
    for path in GOSSIP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).endswith(
                ("threading.Thread", "ThreadPoolExecutor", "threading.Timer")
            ):
                found.add(str(path.relative_to(GOSSIP)))
    annotated = {"communication/host/worker_threads.py", "communication/waiting.py"}
    assert found - annotated == set(LEFT_TO_THEMSELVES)
