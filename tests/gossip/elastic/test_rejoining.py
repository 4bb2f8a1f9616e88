"""A rank that was frozen or cut off, and is not waited for any more, joins the others again in its own process."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import unsupervised
from elastic_ranks import NUM_MORE, digest_of, flat, make_model, targets
from fault_places import injected
from tiers import rest_is_slow

from gossip import ExchangeError
from gossip.lab.faults.injection import Fault

NUMEL = 64
TIMEOUT = timedelta(seconds=1)


class Stay(NamedTuple):
    """What a rank tells: its number in the end, its steps, by step what it had, and who trained; and the mean."""

    member: int
    steps: list[int]
    digests: dict[int, str]
    members: dict[int, tuple[int, ...]]
    mean: torch.Tensor


def train(
    expected: tuple[int, ...],
    faults: dict[int, Fault],
    awaited: Path | None,
    measures: bool,
    is_astray: bool,
    options: dict[str, Any],
) -> Stay | str:
    """Until these train, and some steps more; ``measures`` together with the others after each step.

    With ``is_astray`` rank 1 finds in step 5 that its values are wrong, and leaves the others to come back.

    With a folder ``awaited`` they train until a rank has raised, which notes it there; rank 0 notes which step is last.
    """
    rank = torch.distributed.get_rank()
    steps, digests, members = [], {}, {}
    with injected([faults[rank]] if rank in faults else []):
        model = make_model(NUMEL, {"topology": "ring", "timeout": TIMEOUT} | options)
        num_steps: int | None = None
        while num_steps is None or model.step < num_steps:
            steps.append(model.step)
            digests[model.step], members[model.step] = digest_of(model), model.members
            if num_steps is None and model.members == expected:
                num_steps = model.step + NUM_MORE if awaited is None else noted_end(awaited, model.step, rank)
            if is_astray and rank == 1 and model.step == 5:
                is_astray = False
                model._engine.exchanges.on_astray("rank 1: its values are wrong")  # type: ignore[union-attr]
            try:
                model(targets(rank, NUMEL)).backward()
                if measures and model.step > 20:  # after the fault: who learns of it while it measures, raises
                    model.consensus_distance()
            except ExchangeError as error:
                assert model.rank < model.world_size
                if awaited is not None:
                    (awaited / "raised").touch()
                return str(error)
        model.global_avg()
        mean = flat(model.module)
        member = model.world.member  # type: ignore[attr-defined]
        model.close()
    return Stay(member, steps, digests, members, mean)


def noted_end(folder: Path, step: int, rank: int) -> int | None:
    """The number of steps in the end; far enough ahead for all to read it in time."""
    file = folder / "end"
    if rank == 0 and (folder / "raised").exists():
        (folder / "new").write_text(str(step + 50))
        (folder / "new").rename(file)
    return int(file.read_text()) if file.exists() else None


def run(
    expected: tuple[int, ...],
    faults: dict[int, Fault],
    awaited: Path | None = None,
    *,
    measures: bool = False,
    is_astray: bool = False,
    **options: Any,
) -> list[Any]:
    return unsupervised.results_of(train, expected, faults, awaited, measures, is_astray, options, world_size=4)


@pytest.mark.parametrize(
    ("kind", "options"),
    rest_is_slow(
        [
            ("astray", {"compression": "int8", "timeout": timedelta(seconds=60)}),
            ("cut", {}),
            ("freeze", {"measures": True}),
        ]
    ),
)
def test_it_joins_the_others_again(kind: Any, options: dict[str, Any]) -> None:
    faults = {} if kind == "astray" else {1: Fault(kind, step=5, duration_s=3.0)}
    results = run((0, 2, 3, 4), faults, is_astray=kind == "astray", partition_timeout=30, **options)
    assert [stay.member for stay in results] == [0, 4, 2, 3]
    back = results[1]
    gap = next(place for place, step in enumerate(back.steps) if step != place)
    first = back.steps[gap]
    assert back.steps == [*range(gap), *range(first, first + len(back.steps) - gap)]
    others = [results[0], results[2], results[3]]
    for stay in others:
        assert stay.steps == list(range(back.steps[-1] + 1)), "nobody else missed or repeated a step"
        assert stay.members[first - 1] == (0, 2, 3)
        assert stay.members[first] == (0, 2, 3, 4)
    given = {digest for stay in others for step, digest in stay.digests.items() if step < first}
    assert back.digests[first] in given, "it begins with exactly what one of the others had"
    assert all(torch.equal(stay.mean, results[0].mean) for stay in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "is_awaited", "text"),
    [
        (
            Fault("cut", step=5, duration_s=60.0),
            True,
            "this rank could not rejoin them within partition_timeout=0.5 s: ",
        ),
        (Fault("freeze", step=5, duration_s=6.0), False, "this rank could not rejoin them: .* the training has ended"),
    ],
    ids=["in time", "any more"],
)
def test_it_says_so_when_it_cannot(fault: Fault, is_awaited: bool, text: str, tmp_path: Path) -> None:
    results = run((0, 2, 3), {1: fault}, tmp_path if is_awaited else None, partition_timeout=0.5)
    assert re.match(f"rank 1: .*{text}", results[1])
    assert all(torch.equal(stay.mean, results[0].mean) for stay in (results[2], results[3]))
