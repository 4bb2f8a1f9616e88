"""Loss scales and the last step of all are agreed on by those who are left, whomever a lost rank had told."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fault_places
import pytest
import torch
import unsupervised
from elastic_ranks import NUM_MORE, flat, make_model, make_steps, targets, train_until
from fault_places import injected
from tiers import rest_is_slow

from gossip.elastic.flag_votes import FlagVotes
from gossip.lab.faults.injection import Fault

NUMEL = 16


def train_unevenly(num_batches: tuple[tuple[int, ...], ...], fault: Fault) -> tuple[list[int], tuple[int, ...], Any]:
    """A block of join() for every entry of ``num_batches``, which says by rank how many batches it has; rank 3 fails.

    Returns the steps after each block, the members, and the parameters in the end.
    """
    rank = torch.distributed.get_rank()
    with injected([fault] if rank == 3 else []), make_model(NUMEL, {"topology": "complete"}) as model:
        num_steps = []
        for numbers in num_batches:
            with model.join():
                make_steps(model, numbers[rank])
            num_steps.append(model.step)
        model.global_avg()
        return num_steps, model.members, flat(model.module)


@pytest.mark.parametrize(("place", "step"), rest_is_slow([("telling", 6), ("sending", 8)]))
def test_those_left_end_together_when_the_one_with_most_batches_dies(place: Any, step: int) -> None:
    """It dies having told only one of the others of its step ("telling"): that step is made by all or by none."""
    num_batches = (3, 4, 5, 20), (2, 2, 2, 2)
    *left, dead = unsupervised.results_of(train_unevenly, num_batches, Fault(place=place, step=step), world_size=4)
    assert dead is None
    (first, last), _, mean = left[0]
    assert first in (max(5, step), max(5, step + 1))
    assert last == first + 2
    for num_steps, members, values in left:
        assert (num_steps, members) == ([first, last], (0, 1, 2))
        assert torch.equal(values, mean)


def train_in_join() -> tuple[int, tuple[int, ...]]:
    """Steps and members in the end, of ranks with other numbers of batches; one joins them."""
    with make_model(NUMEL, {"topology": "ring"}) as model:
        with model.join():
            train_until(model, lambda: len(model.members) == 3, NUM_MORE + 5 * model.world.member)
        return model.step, model.members


def test_a_rank_that_joins_has_batches_of_its_own() -> None:
    results = unsupervised.results_of(train_in_join, world_size=2, num_joining=1)
    assert {members for _, members in results} == {(0, 1, 2)}
    assert len({num_steps for num_steps, _ in results}) == 1


@contextlib.contextmanager
def ends_once_told(told: Path) -> Iterator[None]:
    """Let rank 2 end only when one of the others has what it told, which is noted in the file ``told``."""
    note, happen = FlagVotes._note, fault_places._happen

    def note_and_say(self: Any, member: int, frame: Any) -> None:
        note(self, member, frame)
        if member == 2 and frame.key[3] % 2:
            told.touch()

    def wait_and_happen(fault: Fault) -> None:
        while fault.place == "telling" and not told.exists():
            time.sleep(0.01)
        happen(fault)

    with (
        mock.patch.object(FlagVotes, "_note", note_and_say),
        mock.patch.object(fault_places, "_happen", wait_and_happen),
    ):
        yield


def train_scaled(fault: Fault, in_backward: bool, folder: str) -> tuple[list[float], torch.Tensor]:
    """By step the scale before it, and the parameters; the gradients of rank 2, of the fault, overflow in step 5."""
    rank = torch.distributed.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=6)
    options = {"topology": "ring", "scaler": scaler, "step_in_backward": in_backward}
    with (
        ends_once_told(Path(folder) / "told"),
        injected([fault] if rank == 2 else []),
        make_model(NUMEL, options) as model,
    ):
        scales = []
        for step in range(16):
            scales.append(scaler.get_scale())
            scale = float("inf") if (rank, step) == (2, 5) else 1.0
            scaler.scale(model(targets(rank, NUMEL)) * scale).backward()
            if not in_backward:
                scaler.step(model.optimizer)
                scaler.update()
                model.optimizer.zero_grad()
        model.global_avg()
        return scales, flat(model.module)


@pytest.mark.parametrize(("place", "in_backward"), rest_is_slow([("telling", True), ("sending", False)]))
def test_scales_are_those_of_all_who_are_left(place: Any, in_backward: bool, tmp_path: Path) -> None:
    """An overflow that a rank told one of the others before it died halves the scales of all, or of none."""
    told = unsupervised.results_of(train_scaled, Fault(place=place, step=5), in_backward, str(tmp_path), world_size=4)
    results = [result for result in told if result is not None]
    assert len(results) == 3
    scales, mean = results[0]
    assert mean.isfinite().all()
    for others, values in results:
        assert others == scales
        assert torch.equal(values, mean)
    if place != "sending":
        assert [later / earlier for earlier, later in itertools.pairwise(scales)].count(0.5) == 1
