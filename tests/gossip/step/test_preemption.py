"""SIGTERM of so many ranks that too few would remain: all save once, after the same step, wherever each of them is."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import unsupervised
from elastic_ranks import digest_of, make_model, targets
from small_runs import finish
from tiers import rest_is_slow

import gossip
from gossip.step import preemption

NUMEL, WORLD_SIZE, TOLD_AT = 8, 4, 5
LEAVES = 3


class End(NamedTuple):
    """How a rank ended: its exit status, and the step and the digest of what it saved, if it did."""

    status: Any
    step: int | None
    digest: str | None


def train(folder: str, place: str, options: dict[str, Any]) -> End:
    """Train until this rank has received SIGTERM in some ``place``, and ends."""
    rank = torch.distributed.get_rank()
    (Path(folder) / f"process_of_{rank}").write_text(str(os.getpid()))
    saved: list[tuple[int, str]] = []

    def save(model: gossip.GossipDataParallel) -> None:
        gossip.save(model, folder)
        saved.append((model.step, digest_of(model)))

    def tell(of: int = rank) -> None:
        os.kill(int((Path(folder) / f"process_of_{of}").read_text()), signal.SIGTERM)

    window = 0.0 if place == "leaving" else 1e6
    with contextlib.ExitStack() as stack:
        window_s = preemption.timedelta(seconds=window)
        stack.enter_context(mock.patch.object(preemption, "WINDOW", window_s))
        model = make_model(NUMEL, {"topology": "ring", "on_preemption": save, **options})
        try:
            PLACES[place](model, rank, tell)
            status: Any = "went on"
        except SystemExit as end:
            status = end.code
    step, digest = saved[0] if saved else (None, None)
    assert len(saved) < 2
    return End(status, step, digest)


def make_step(model: gossip.GossipDataParallel, rank: int) -> None:
    model(targets(rank, NUMEL)).backward()
    finish(model)


def steps(model: gossip.GossipDataParallel, rank: int, last: float = float("inf")) -> None:
    while model.step < last:
        make_step(model, rank)


def is_decided(model: gossip.GossipDataParallel) -> bool:
    return model.world.consensus.ends_at is not None  # type: ignore[attr-defined]


def in_steps(model: gossip.GossipDataParallel, rank: int, tell: Callable[..., None]) -> None:
    steps(model, rank, TOLD_AT + rank % 2)
    if rank < 2:  # two of four are too many
        tell()
    steps(model, rank)


def in_accumulation(model: gossip.GossipDataParallel, rank: int, tell: Callable[..., None]) -> None:
    steps(model, rank, TOLD_AT)
    tell()
    while True:
        with model.no_sync():
            model(targets(rank, NUMEL)).backward()
        while model.step > TOLD_AT and not is_decided(model):
            time.sleep(0.001)
        model(targets(rank, NUMEL)).backward()


def in_a_collective_operation(model: gossip.GossipDataParallel, rank: int, tell: Callable[..., None]) -> None:
    steps(model, rank, TOLD_AT)
    tell()
    while rank == 0 and not is_decided(model):  # the others wait for it
        time.sleep(0.001)
    model.consensus_distance()  # made by all if one had begun it before that, and by none otherwise
    steps(model, rank)


def in_the_average(model: gossip.GossipDataParallel, rank: int, tell: Callable[..., None]) -> None:
    steps(model, rank, TOLD_AT)
    with model.averaged():
        tell()
        while True:
            model(targets(rank, NUMEL))


def in_an_evaluation_of_one(model: gossip.GossipDataParallel, rank: int, tell: Callable[..., None]) -> None:
    steps(model, rank, TOLD_AT)
    tell()
    with torch.no_grad():
        while rank == 1:
            model(targets(rank, NUMEL))
    steps(model, rank)


def in_join(model: gossip.GossipDataParallel, rank: int, tell: Callable[..., None]) -> None:
    with model.join():
        steps(model, rank, TOLD_AT + rank)
        if rank == WORLD_SIZE - 1:
            tell(0)
            tell(1)
            steps(model, rank)


def in_leaving(model: gossip.GossipDataParallel, rank: int, tell: Callable[..., None]) -> None:
    steps(model, rank, TOLD_AT)
    if rank in (LEAVES, 0):
        tell()
    steps(model, rank)


PLACES = {
    "steps": in_steps,
    "accumulation": in_accumulation,
    "collective operation": in_a_collective_operation,
    "average": in_the_average,
    "evaluation of one": in_an_evaluation_of_one,
    "join": in_join,
    "leaving": in_leaving,
}


@pytest.mark.parametrize(
    ("place", "options"),
    rest_is_slow(
        [
            ("average", {}),
            ("steps", {}),
            ("steps", {"step_in_backward": False}),
            ("steps", {"algorithm": "integral_correction"}),
            ("steps", {"algorithm": "asynchronous"}),
            ("accumulation", {}),
            ("collective operation", {}),
            ("evaluation of one", {}),
            ("join", {}),
            ("leaving", {}),
        ]
    ),
)
def test_ranks_that_are_told_together_save_once_and_end(tmp_path: Path, place: str, options: dict[str, Any]) -> None:
    ends = unsupervised.results_of(train, str(tmp_path), place, options, world_size=WORLD_SIZE)
    assert [end.status for end in ends] == [143] * WORLD_SIZE
    have_saved = [end for end in ends if end.step is not None]
    if place != "leaving":  # else one of them may have left before
        assert len(have_saved) == WORLD_SIZE
    (checkpoint,) = tmp_path.glob("step_*")
    loaded = unsupervised.results_of(load, str(checkpoint), options, world_size=len(have_saved))
    assert loaded == [end.digest for end in have_saved]
    if options.get("algorithm") == "asynchronous":
        return
    (step,) = {end.step for end in have_saved}
    if place == "steps":
        undisturbed = unsupervised.results_of(train_undisturbed, options, step, world_size=WORLD_SIZE)
        assert undisturbed == loaded


def train_undisturbed(options: dict[str, Any], num_steps: int) -> str:
    with make_model(NUMEL, {"topology": "ring", **options}) as model:
        while model.step < num_steps:
            make_step(model, torch.distributed.get_rank())
        return digest_of(model)


def load(checkpoint: str, options: dict[str, Any]) -> str:
    model = make_model(NUMEL, {"topology": "ring", "on_preemption": repr, **options})
    gossip.load(model, checkpoint)
    with model:
        return digest_of(model)


def test_a_rank_that_cannot_leave_in_time_exits_with_the_status_of_the_signal() -> None:
    model = mock.Mock()
    model.leave.side_effect = MemoryError("no memory")
    world = mock.Mock(group_size=1, **{"consensus.ends_at": None, "consensus.has_left": False})
    engine = mock.Mock(is_averaged=False, is_within_step=False)
    of_one = preemption.Preemption(engine, world, lambda: model, None)  # type: ignore[arg-type]
    with mock.patch.object(preemption.daemon_threads, "start"):
        of_one._on_forward()
        engine.error, engine.is_parents = None, False
        of_one.on_signal(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match="143"):
        of_one._on_forward()
    model.leave.assert_called_once_with()


def leave_alone(place: str) -> tuple[str, tuple[int, ...], int]:
    """Rank 1 is told to go, and the others train on."""
    rank, num_steps = torch.distributed.get_rank(), 12
    model = make_model(NUMEL, {"topology": "ring"})
    try:
        with model.join() if place == "join" else contextlib.nullcontext():
            while model.step < num_steps - (rank if place == "join" else 0):
                if model.step == TOLD_AT and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if model.step == TOLD_AT and place == "average":
                    with model.averaged(), torch.no_grad():
                        while True:
                            model(targets(rank, NUMEL))
                            if rank != 1:
                                break
                if place == "accumulation":
                    with model.no_sync():
                        model(targets(rank, NUMEL)).backward()
                make_step(model, rank)
    except SystemExit as end:
        return f"exit {end.code}", (), model.step
    model.global_avg()
    members, step = model.members, model.step
    model.close()
    return "ended", members, step


@pytest.mark.parametrize("place", rest_is_slow(["average", "join", "accumulation"]))
def test_a_rank_that_is_told_alone_leaves_wherever_it_is(place: str) -> None:
    ends = unsupervised.results_of(leave_alone, place, world_size=WORLD_SIZE)
    assert ends.pop(1)[0] == "exit 143"
    assert ends == [("ended", (0, 2, 3), 12)] * 3
