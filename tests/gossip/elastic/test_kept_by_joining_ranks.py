"""What lives beside the model, on a rank that joins or comes back: in every step as on the ranks that never left."""

import functools
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import unsupervised
from checkpointing import log_of
from elastic_ranks import NUM_MORE, joins, make_model, steps_until, targets
from fault_places import injected
from kept import SCHEDULERS, Ema, Failing, advance
from tiers import rest_is_slow
from torch.optim import SGD

from gossip import GossipError
from gossip.elastic.state_transfer import StateSource
from gossip.lab.faults.injection import Fault

NUMEL = 8


class Stay(NamedTuple):
    """What a rank tells, by step: rates before it, what its average over time has counted, and its loss scale.

    ``first`` is the step at which it joined, or came back; otherwise 0.
    """

    first: int
    rates: dict[int, float]
    counts: dict[int, int]
    scales: dict[int, float]


def make(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """A model, its objects by name, and its scaler."""
    options = dict(options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=3) if options.pop("scales", False) else None
    model = make_model(NUMEL, {"topology": "ring", "scaler": scaler} | options)
    objects = {"scheduler": SCHEDULERS[name](model.optimizer), "ema": Ema(model.module)}
    model.keep(**objects)
    return model, objects, scaler


def train(name: str, expected: int, fault: Fault | None, options: dict[str, Any]) -> Stay:
    """Until as many ranks train as are expected, one of them new, and some steps more."""
    rank = -1 if joins() else dist.get_rank()
    options = dict(options)
    measures, newest = options.pop("measures", False), options.pop("newest", 0)
    with injected([fault] if fault is not None and rank == 1 else []):
        model, objects, scaler = make(name, options)
        first, rates, counts, scales = model.step, {}, {}, {}

        def are_there() -> bool:
            return len(model.members) == expected and max(model.members) >= max(newest, dist.get_world_size())

        for _ in steps_until(model, are_there):
            step = model.step
            if step and step - 1 not in rates:
                first = step
            rates[step] = model.optimizer.param_groups[0]["lr"]
            counts[step] = objects["ema"].num_updates
            loss = model(targets(rank + 1, NUMEL)) * (float("inf") if rank == 0 and step % 7 == 5 and scaler else 1.0)
            if scaler is None:
                loss.backward()
            else:
                scales[step] = scaler.get_scale()
                scaler.scale(loss).backward()
            if not options.get("step_in_backward", True):
                scaler.step(model.optimizer) if scaler is not None else model.optimizer.step()
                model.optimizer.zero_grad()
                if scaler is not None:
                    scaler.update()
            objects["ema"].update(model.module)
            advance(objects["scheduler"])
            if measures:
                model.consensus_distance()
        model.global_avg()
        model.close()
    return Stay(first, rates, counts, scales)


def check(stays: list[Stay]) -> None:
    """Everything is alike on all ranks since they joined; each step counts once."""
    always, (new,) = [stay for stay in stays if not stay.first], [stay for stay in stays if stay.first]
    for stay in (*always, new):
        for told, reference in zip(stay[1:], always[0][1:], strict=True):
            shared = {step: value for step, value in told.items() if step >= stay.first}
            assert shared == {step: reference[step] for step in shared}
        assert all(count == step for step, count in stay.counts.items() if step >= stay.first)
    rates = [rate for step, rate in new.rates.items() if step >= new.first]
    assert len(rates) >= NUM_MORE
    assert len(set(rates)) > 1
    assert not always[0].scales or len(set(always[0].scales.values())) > 2


BY_HAND = {"scales": True, "step_in_backward": False}


@pytest.mark.parametrize(
    ("name", "options"),
    rest_is_slow(
        [
            ("sequential", {"scales": True}),
            ("plateau", {}),
            ("exponential", BY_HAND),
            ("exponential", {"scales": True, "measures": True}),
        ]
    ),
)
def test_one_that_joins_has_what_the_others_have_in_every_step(name: str, options: dict[str, Any]) -> None:
    check(unsupervised.results_of(train, name, 4, None, options, world_size=3, num_joining=1))


@pytest.mark.slow
def test_one_that_comes_back_has_what_the_others_have_in_every_step() -> None:
    fault = Fault("freeze", step=5, duration_s=8.0)
    options = {"timeout": timedelta(seconds=3), "partition_timeout": 30} | BY_HAND
    check(unsupervised.results_of(train, "exponential", 4, fault, options, world_size=4))


# ---------------------------------------------------------------------- ranks that do not make their steps together


def train_on_their_own(folder: str) -> list[tuple[int, float, int]]:
    """Step, rate and number of updates of an average, before each step, until there is one rank more."""
    while joins() and len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    options = {"topology": "random_matching", "algorithm": "asynchronous", "optimizer": functools.partial(SGD, lr=0.1)}
    model, objects, _ = make("sequential", options)
    told = []
    more = NUM_MORE
    while more:
        more -= len(model.members) == 3
        told.append((model.step, model.optimizer.param_groups[0]["lr"], objects["ema"].num_updates))
        model(targets(0, NUMEL)).backward()
        objects["ema"].update(model.module)
        advance(objects["scheduler"])
        if model.step == 20:
            (Path(folder) / f"rank {model.rank} has made 20 steps").touch()
    model.close()
    return told if joins() else told[:1]


def test_one_that_joins_ranks_that_are_not_in_step_continues_where_its_source_is(tmp_path: Path) -> None:
    *_, told = unsupervised.results_of(train_on_their_own, str(tmp_path), world_size=2, num_joining=1)
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = SCHEDULERS["sequential"](optimizer)
    rates = []
    for _ in range(told[-1][0] + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        advance(scheduler)
    assert told[0][0] >= 20
    assert told == [(step, rates[step], step) for step, _, _ in told]


# ---------------------------------------------------------------------- who keeps something else


def keep_something_else(kept: dict[str, tuple[str, ...]]) -> tuple[str, list[str], int]:
    """What becomes of it, warnings, and how many train at the end; ``kept`` by the rank that joins and the others."""
    kinds = {"ema": Ema, "other": Ema, "failing": Failing}
    try:
        with log_of() as lines, make_model(NUMEL, {"topology": "ring"}) as model:
            for name in kept["joins" if joins() else "trains"]:
                model.keep(**{name: kinds[name](model.module)})
            for _ in steps_until(model, lambda: 3 in model.world.mesh.lost or len(model.members) == 4):
                model(targets(0, NUMEL)).backward()
            model.global_avg()
            return "", lines, len(model.members)
    except GossipError as error:
        return str(error), lines, 0


OTHERS = {
    "unknown": (
        ("other",),
        ("ema",),
        r"^rank 3: rank \d, whose state it takes, has no state for keep\(other=...\): it keeps 'ema'",
    ),
    "failing": (
        ("ema", "failing"),
        ("ema", "failing"),
        r"keep\(failing=...\): failing.state_dict\(\) failed: RuntimeError: no memory left",
    ),
}


@pytest.mark.parametrize("case", rest_is_slow(OTHERS))
def test_another_or_a_failing_object_ends_the_rank_that_joins_and_no_other(case: str) -> None:
    joins, trains, text = OTHERS[case]
    kept = {"joins": joins, "trains": trains}
    *others, (error, _, _) = unsupervised.results_of(keep_something_else, kept, world_size=3, num_joining=1)
    assert re.search(text, error), error
    assert all(raised == "" and num_members == 3 for raised, _, num_members in others)
    warnings = [line for _, lines, _ in others for line in lines if "'failing'" in line]
    assert bool(warnings) == (case == "failing")


# ---------------------------------------------------------------------- a source that is lost


def lose_the_source(options: dict[str, Any]) -> Stay:
    """Whoever is about to give rank 4 the second part of a state ends."""
    give = StateSource.give

    def end(source: StateSource, joining: list[int], *args: Any, is_second: bool = False) -> None:
        if is_second and 4 in joining:
            os.kill(os.getpid(), signal.SIGKILL)
        give(source, joining, *args, is_second=is_second)

    with mock.patch.object(StateSource, "give", end):
        return train("exponential", 4, None, {"min_ranks": 2, "newest": 5} | options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scales": True}])
def test_a_rank_whose_source_is_lost_before_its_first_step_joins_anew(options: dict[str, Any]) -> None:
    stays = unsupervised.results_of(lose_the_source, options, world_size=4, num_joining=1)
    assert stays.count(None) == 1
    check([stay for stay in stays if stay is not None])
