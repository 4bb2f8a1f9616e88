"""A forked child touches nothing of its parent, which trains on as if it were not there; training it is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
from programs import Ended, run_programs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("forked_child")]  # one run makes all cases

PROGRAM = """
import ctypes
import gc
import hashlib
import multiprocessing

PATIENCE_S = 60


def attempt(call):
    try:
        call()
    except gossip.GossipError as error:
        os.write(1, f"{case} refused {fork}: {type(error).__name__}: {error}\\n".encode())
        return
    os._exit(99)


def drop():
    global model
    del model
    gc.collect()


def evaluate():
    with torch.no_grad():
        values = model(torch.ones(2, 3))
    assert torch.equal(values, model.module(torch.ones(2, 3)))
    assert model.state_dict().keys() == {"weight", "bias"}


def train_plainly_after_closing():
    model.close()
    model.module(torch.ones(2, 3)).sum().backward()
    model.optimizer.step()


def join():
    with model.join():
        pass


def step_by_hand():
    train(model, 1)
    model.optimizer.step()


ACTS = {
    "nothing": lambda: None,
    "drop": drop,
    "close": lambda: model.close(),
    "evaluate": evaluate,
    "train plainly after closing": train_plainly_after_closing,
    "train": lambda: attempt(step_by_hand),
    "global_avg": lambda: attempt(model.global_avg),
    "idle_step": lambda: attempt(model.idle_step),
    "save": lambda: attempt(lambda: gossip.save(model, "checkpoints")),
    "export": lambda: attempt(lambda: gossip.export(model, "model.safetensors")),
    "join": lambda: attempt(join),
    "wrap another": lambda: attempt(
        lambda: gossip.GossipDataParallel(nn.Linear(3, 1), partial(torch.optim.SGD, lr=0.1), "complete")),
    "read what is under way": lambda: attempt(lambda: model(torch.ones(2, 3))),
}


def act():
    signal.alarm(PATIENCE_S)  # a child that hangs has that status
    ACTS[fork["act"]]()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        act()
        return index


def digest():
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()[:8]


if number % 4 != 1:  # what C++ libraries do after the interpreter is gone takes half of the time: one in four shows it
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
model = build(**case["options"])
steps = step_by_hand if "step_in_backward" in case["options"] else partial(train, model, 1)
for _ in range(3):
    steps()


def status_of_forked():
    pid = os.fork()
    if pid == 0:
        act()
        if fork["how"] == "os._exit":
            os._exit(7)
        raise ValueError("of the child's own")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def status_of_child():
    if fork["how"] == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=act)
        process.start()
        process.join()
        return process.exitcode
    if fork["how"] == "DataLoader":
        loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
        return 0 if [int(each) for each in loader] == [0, 1, 2, 3] else 1
    return status_of_forked()


codes = []
for fork in case["forks"]:
    if fork["how"] == "sys.exit":  # at the top of the program, not in a function
        pid = os.fork()
        if pid == 0:
            act()
            sys.exit(7)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        codes.append(status_of_child())
for _ in range(3):
    steps()
model.global_avg()
os.write(1, f"{case} rank {rank}: children {codes}, parameters {digest()}\\n".encode())
"""

HARMLESS = ["nothing", "drop", "close", "evaluate", "train plainly after closing"]
REFUSED = ["train", "global_avg", "idle_step", "save", "export", "join", "wrap another"]
OPTIONS: list[dict[str, Any]] = [
    {"step_in_backward": False},
    {"algorithm": "adapt_then_combine"},
    {"transport": "debug"},
    {"timeout_s": 30.0, "compression": "int8", "buffers": "average"},
]
ENDS = {"an exception": 1, "os._exit": 7, "multiprocessing": 0, "DataLoader": 0, "sys.exit": 7}
"""How a child ends, and its status."""


def case_of(acts: Sequence[str], ends: Sequence[str] = ("sys.exit",), **options: Any) -> dict[str, Any]:
    """A world whose ranks have a child after another at the same step, and train on."""
    return {"forks": [{"how": end, "act": act} for end in ends for act in acts], "options": options}


CASES: dict[str, list[dict[str, Any]]] = {
    "none": [case_of([])],
    "harmless": [case_of(HARMLESS)],
    "of any kind": [case_of(["close"], list(ENDS))],
    "refused": [case_of(REFUSED)],
    "with options": [case_of(["close", "train"], **options) for options in OPTIONS],
    "reading": [case_of(["read what is under way"], algorithm="adapt_then_combine")],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One interpreter imports for all cases."""
    cases = [case for group in CASES.values() for case in group]
    return run_programs(PROGRAM, tmp_path_factory.mktemp("forks"), cases=cases, at_once=4, timeout_s=280)


def said_in(group: str, ended: Ended) -> list[str]:
    """What children said when they were refused; all of the group, and their parents, ended as they should."""
    cases = [case for each in CASES.values() for case in each]
    for case in CASES[group]:
        assert ended.statuses[cases.index(case)] == {0: 0, 1: 0}, ended.output
        ends = [line for line in ended.output.splitlines() if line.startswith(f"{case} rank ")]
        assert len(ends) == 2, ended.output
        codes = [ENDS[fork["how"]] for fork in case["forks"]]
        assert all(f": children {codes}, parameters " in line for line in ends), ended.output
    starts = tuple(f"{case} refused " for case in CASES[group])
    return [line for line in ended.output.splitlines() if line.startswith(starts)]


@pytest.mark.parametrize("group", ["none", "harmless", "of any kind"])
def test_children_end_with_their_own_status_and_the_parent_trains_on(group: str, ended: Ended) -> None:
    assert said_in(group, ended) == []


def test_training_in_a_child_is_refused_at_once(ended: Ended) -> None:
    refusals = said_in("refused", ended)
    for act in REFUSED:
        assert sum(f"refused {{'how': 'sys.exit', 'act': '{act}'}}: " in line for line in refusals) == 2, refusals
    assert len(refusals) == 2 * len(REFUSED), refusals
    assert all("this process was forked from the one that trains" in line for line in refusals), refusals
    assert sum("rank 0: step 3: this process" in line for line in refusals) >= 5, refusals


def test_child_of_a_model_with_other_options(ended: Ended) -> None:
    assert len(said_in("with options", ended)) == 2 * len(OPTIONS), ended.output


def test_child_cannot_read_what_is_still_to_be_combined(ended: Ended) -> None:
    refusals = said_in("reading", ended)
    assert len(refusals) == 2, refusals
    assert all("}: ExchangeError: " in line for line in refusals), refusals


def test_parents_train_alike_whatever_their_children_did(ended: Ended) -> None:
    ends = [line for line in ended.output.splitlines() if " parameters " in line]
    found = {(line.partition("options")[2].partition("}")[0], line.rpartition(" ")[2]) for line in ends}
    assert len(ends) == 2 * len(ended.statuses)
    assert len(found) == 1 + len(OPTIONS), ended.output
