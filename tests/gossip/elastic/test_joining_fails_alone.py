"""What raises while a rank joins, comes back or leaves ends at most that rank: those that train go on."""

import functools
import mmap
import re
import threading
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import unsupervised
from elastic_ranks import flat, joins, make_model, steps_until, targets, train_until
from fault_places import injected
from listening import logged
from loguru import logger
from tiers import rest_is_slow

from gossip import ExchangeError
from gossip.communication.host import available_memory
from gossip.elastic import state_transfer
from gossip.elastic.connections.peer_connection import Frame, Key, Kind
from gossip.elastic.state_transfer import StateSource
from gossip.lab.faults.injection import Fault
from gossip.step import generation_change

NUMEL = 64
JOINS_AS = 3
TOO_MUCH = "DefaultCPUAllocator: can't allocate memory"


def send_only_the_first(
    self: StateSource, member: int, piece: int, content: torch.Tensor, part: int, *, send: Any
) -> None:
    if piece:
        raise MemoryError("no memory to hash it")
    send(self, member, piece, content, part)


def broken(where: str) -> Any:
    """Within this block a source lacks memory, or a joining rank does."""
    if where == "copying":
        return mock.patch.object(available_memory, "available_bytes", return_value=0)
    if where == "sending":
        failing = functools.partialmethod(send_only_the_first, send=StateSource._send)
        return mock.patch.object(StateSource, "_send", failing)
    if where == "loading":
        return mock.patch.object(generation_change, "restore_replica", side_effect=RuntimeError(TOO_MUCH))
    assert where == "too large"
    too_large = "null", torch.zeros(1, dtype=torch.uint8).expand(2**60)
    return mock.patch.object(generation_change, "serialize", return_value=too_large)


class Keeping(torch.optim.SGD):
    """Keeps an object that no other process can be sent."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = threading.Lock()


OPTIMIZERS = {"plain": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), "object": Keeping}


class Told(NamedTuple):
    """What a rank tells: its warnings, who trained at the end, and the mean."""

    lines: list[str]
    members: tuple[int, ...]
    mean: torch.Tensor


def train(kept: str, breaks: dict[int, str], options: dict[str, Any]) -> Told | str:
    """Until the joining rank has come or failed, and some steps more; a joining rank that fails tells why."""
    number = JOINS_AS if joins() else torch.distributed.get_rank()
    lines: list[str] = []
    logger.add(lambda message: lines.append(str(message)), level="WARNING")
    with broken(breaks[number]) if number in breaks else mock.MagicMock():
        try:
            model = make_model(NUMEL, {"topology": "complete", "optimizer": OPTIMIZERS[kept]} | options)
        except (ExchangeError, RuntimeError) as error:
            return str(error)
        settled = [True] if joins() else []
        for _ in steps_until(model, lambda: bool(settled)):
            model(targets(model.world.member, NUMEL)).backward()
            if not settled and JOINS_AS in model.members:
                settled.extend([True] * (JOINS_AS not in breaks))
            elif not settled:
                has_failed = model.world.gather_bytes(b"x" * (JOINS_AS in model.world.mesh.lost), "looking")
                settled.extend([True] * all(has_failed))
        members = model.members
        model.global_avg()
        model.close()
    return Told(lines, members, flat(model.module))


def run(kept: str = "plain", breaks: dict[int, str] | None = None, **options: Any) -> tuple[list[Told], Any]:
    """What the ranks that train tell, and the joining rank."""
    *told, joining_rank = unsupervised.results_of(
        train, kept, breaks or {}, options, world_size=JOINS_AS, num_joining=1
    )
    for one in told:
        assert torch.equal(one.mean, told[0].mean)
    return told, joining_rank


KINDS = [
    ("object", {}, r"the state of parameter '(first|second)' in Keeping\['kept'\] is a \S*lock, which a checkpoint "),
    ("plain", dict.fromkeys(range(JOINS_AS), "copying"), r"MemoryError: a copy takes \S+ MB, but \S+ MB are available"),
    ("plain", dict.fromkeys(range(JOINS_AS), "sending"), "MemoryError: no memory to hash it"),
]


@pytest.mark.parametrize(("kept", "breaks", "reason"), rest_is_slow(KINDS))
def test_a_state_that_cannot_be_given_is_told_to_the_joining_rank_and_training_goes_on(
    kept: str, breaks: dict[int, str], reason: str
) -> None:
    told, error = run(kept, breaks)
    assert re.search(rf"rank 3: joining: no rank gave .*ranks 0, 1, 2 cannot: {reason}.* Start this rank again", error)
    for rank, one in enumerate(told):
        assert one.members == (0, 1, 2)
        (refused,) = [line for line in one.lines if "its state cannot be given to rank 3" in line]
        assert re.search(rf"rank {rank}: .*{reason}", refused)
        early = [line for line in one.lines if "no rank can join this training" in line]
        assert len(early) == (rank == 0 and kept != "plain")
        assert all(re.search(reason, line) for line in early)


def asked(mesh: mock.Mock, piece: int, member: int = JOINS_AS) -> bytes:
    """What a source replies at once."""
    mesh.send.reset_mock()
    mesh.handlers[Kind.ASK](member, Frame(Key(Kind.ASK, piece), torch.empty(0, dtype=torch.uint8)))
    return b"".join(call.args[2].numpy().tobytes() for call in mesh.send.call_args_list)


@pytest.mark.parametrize("end", ["silent", "elsewhere", "elsewhere before"])
def test_what_is_taken_for_a_joining_rank_is_not_kept_when_it_is_of_no_use(end: str) -> None:
    silent_s = 0.0
    mesh = mock.Mock(member=0, lost={}, handlers={}, timeout=timedelta(seconds=2), silent_s=lambda _: silent_s)
    source = StateSource(mesh)
    asked(mesh, 0)
    if end == "elsewhere before":
        asked(mesh, state_transfer._LAST)
        assert source.asked_by(0, at_step_end=False) == []
        return
    source.give(source.asked_by(0, at_step_end=False), lambda room: ("null", room(8)))
    assert asked(mesh, 1)
    if end == "elsewhere":
        asked(mesh, state_transfer._LAST)
    silent_s = 3.0 if end == "silent" else 0.0
    source.asked_by(0, at_step_end=False)
    assert not asked(mesh, 1)


def held_bytes(values: torch.Tensor) -> int:
    """How much memory a tensor takes that begins and ends with a page."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(values.data_ptr() // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pages.read(values.nbytes // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> 62 != 0).sum()) * mmap.PAGESIZE


def test_a_copy_is_let_go_as_far_as_all_have_it_and_is_the_only_one() -> None:
    mesh = mock.Mock(member=0, lost={}, handlers={}, timeout=timedelta(seconds=2), silent_s=lambda _: 0.0)
    source, size = StateSource(mesh), state_transfer._PIECE_BYTES
    values = torch.randint(256, (12 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pieces = [piece.numpy().tobytes() for piece in values.split(size)]
    for member in (3, 4):
        asked(mesh, 0, member)
    with logged("INFO") as lines:
        source.give(source.asked_by(0, at_step_end=False), lambda room: ("null", room(12 * size).copy_(values)))
    assert lines == ["rank 0: gives its state to ranks 3, 4: 12.6 MB in a copy, let go as it is sent"]
    copied = source._taken[4, 0][0].values
    assert all(asked(mesh, number, 3).endswith(piece) for number, piece in enumerate(pieces, 1))
    assert held_bytes(copied) == 12 * size
    assert all(asked(mesh, number, 4).endswith(piece) for number, piece in enumerate(pieces[:10], 1))
    assert held_bytes(copied) == 6 * size  # when 4 requests a piece, it has those up to the fourth before
    assert b"piece 6 of its state was let go" in asked(mesh, 6, 4)
    asked(mesh, 0, 5)
    assert source.asked_by(0, at_step_end=False) == []
    asked(mesh, state_transfer._LAST, 3)
    assert source.asked_by(0, at_step_end=False) == [5]
    with mock.patch.object(available_memory, "available_bytes", return_value=9 * 10**8):
        source.give([5], lambda room: ("null", room(148 * 10**7)))
    refusal = mesh.send.call_args.args[2].numpy().tobytes()
    assert refusal == b"MemoryError: a copy takes 1.48 GB, but 0.90 GB are available"


@pytest.mark.slow
def test_another_rank_gives_if_one_cannot() -> None:
    told, error = run(breaks={0: "sending"})
    assert error.members == (0, 1, 2, 3)
    assert torch.equal(error.mean, told[0].mean)
    assert [len(one.lines) for one in told] == [1, 0, 0]


@pytest.mark.parametrize(
    ("breaks", "text"),
    rest_is_slow(
        [
            (
                dict.fromkeys(range(JOINS_AS), "too large"),
                "rank 3: joining: there is no memory here for the state of rank 0: a copy takes 1152921504.61 GB, ",
            ),
            (
                {JOINS_AS: "loading"},
                f"rank 3: joining: what rank 0 gave cannot be loaded here: RuntimeError: {TOO_MUCH}",
            ),
        ]
    ),
)
def test_a_joining_rank_that_cannot_take_it_over_says_so(breaks: dict[int, str], text: str) -> None:
    told, error = run(breaks=breaks)
    assert error.startswith(text)
    assert [one.members for one in told] == [(0, 1, 2)] * 3


@pytest.mark.slow
def test_a_rank_with_which_the_others_could_not_train_is_not_admitted() -> None:
    # Of three ranks, a ring is complete, as DiLoCo needs it; of four it is not, and neither is the fallback.
    told, error = run(topology="ring", algorithm="diloco")
    assert re.match(r"rank 3: joining: with it the ranks would be 4, which cannot train together: topology", error)
    assert [one.members for one in told] == [(0, 1, 2)] * 3


# ---------------------------------------------------------------------- options of parameter groups


def with_a_function(scale: float, named: Any) -> torch.optim.Optimizer:
    """The function tells which rank has made it."""
    return torch.optim.SGD([{"params": [p for _, p in named], "scale": lambda: scale}], lr=0.1)


def train_with_a_function() -> tuple[list[str], float, float]:
    lines: list[str] = []
    logger.add(lambda message: lines.append(str(message)), level="WARNING")
    optimizer = functools.partial(with_a_function, float(joins()))
    with make_model(NUMEL, {"topology": "complete", "optimizer": optimizer}) as model:
        (group,) = model.optimizer.param_groups
        rate = group["lr"]
        if not joins():
            group["lr"], group["late"] = 0.05, len
        train_until(model, lambda: JOINS_AS in model.members)
        return lines, rate, group["scale"]()


def test_a_joining_rank_keeps_options_of_its_own_that_cannot_be_given() -> None:
    *told, error = unsupervised.results_of(train_with_a_function, world_size=JOINS_AS, num_joining=1)
    assert error == ([], 0.05, 1.0)
    assert [len(lines) for lines, _, _ in told] == [2, 0, 0]
    for line, key in zip(told[0][0], ("scale", "late"), strict=True):
        assert f"option '{key}' of parameter group 0 of SGD is not plain data" in line


# ---------------------------------------------------------------------- coming back, and leaving


def come_back() -> str | None:
    """Rank 1 is frozen, and given up; the others train until it has tried to come back."""
    rank = torch.distributed.get_rank()
    with injected([Fault("freeze", step=5, duration_s=6.0)] if rank == 1 else []):
        options = {"topology": "complete", "timeout": timedelta(seconds=2), "optimizer": Keeping}
        model = make_model(NUMEL, options | {"partition_timeout": 600, "min_ranks": 1})
        try:
            while JOINS_AS not in model.world.mesh.lost:
                model(targets(rank, NUMEL)).backward()
        except ExchangeError as error:
            return str(error)
        finally:
            model.close()
    return None


@pytest.mark.slow
def test_a_rank_that_nobody_can_give_a_state_does_not_try_to_come_back_for_ever() -> None:
    told = unsupervised.results_of(come_back, world_size=JOINS_AS)
    assert told[0] is told[2] is None
    assert re.match(
        r"rank 1: .*; this rank could not rejoin them: rank 3: joining: no rank gave .* cannot: the state of", told[1]
    )
