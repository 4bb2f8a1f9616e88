"""A rank whose part of a checkpoint cannot be had ends no rank and stops none: all raise, and all can go on."""

import functools
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import unsupervised
from checkpointing import make_model, names_in, one_step
from torch import nn

import gossip
from gossip import CheckpointError, GossipDataParallel, launch
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Key, Kind
from gossip.step import engine

WORLD_SIZE = 3
FAILING = 1


class Part:
    def state_dict(self) -> dict[str, Any]:
        if torch.distributed.get_rank() == FAILING:
            raise KeyError("position")
        return {}

    def load_state_dict(self, _: Any) -> None: ...


def keep_an_object(model: GossipDataParallel) -> None:
    model.optimizer.state[model.module.weight]["mark"] = object()


def hide_the_state(model: GossipDataParallel) -> None:
    model.optimizer.state_dict = Part().state_dict


def lack_memory(_: GossipDataParallel) -> None:
    mock.patch.object(engine, "algorithm_state", side_effect=MemoryError("no more")).start()


# What is wrong with rank 1, what it raises, and why.
CASES: dict[str, tuple[Callable[[GossipDataParallel], object], type[Exception], str]] = {
    "object": (keep_an_object, TypeError, "the state of parameter 'weight' in AdamW['mark'] is a builtins.object"),
    "state_dict": (hide_the_state, ValueError, "the state_dict() of AdamW failed: KeyError: 'position'"),
    "copying": (lack_memory, CheckpointError, "rank 1: MemoryError: no more"),
}


def fail_to_save(folder: str, case: str, options: dict[str, Any]) -> None:
    break_, kind, text = CASES[case]
    model = make_model(module=lambda: nn.Linear(4, 2), **options)
    one_step(model)
    is_failing = model.rank == FAILING
    if is_failing:
        break_(model)
    for _ in range(2):
        with pytest.raises(kind if is_failing else CheckpointError) as caught:
            gossip.save(model, folder)
        assert text in str(caught.value)
        assert is_failing or "rank 1: " in str(caught.value)
        one_step(model)  # with the others, as if nothing had happened
    mock.patch.stopall()
    model.optimizer.__dict__.pop("state_dict", None)
    model.optimizer.state[model.module.weight].pop("mark", None)
    gossip.save(model, folder)
    model.global_avg()
    model.close()


@pytest.mark.parametrize(
    ("case", "on_peer_loss"), list(zip(CASES, itertools.cycle(["raise", "continue"]), strict=False))
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(
    case: str, on_peer_loss: Any, tmp_path: Path
) -> None:
    results = launch(
        fail_to_save,
        str(tmp_path),
        case,
        {"on_peer_loss": on_peer_loss},
        world_size=WORLD_SIZE,
        on_peer_loss=on_peer_loss,
    )
    assert results == [None] * WORLD_SIZE
    assert names_in(tmp_path) == ["step_0000000003"]


# ---------------------------------------------------------------------- and another rank dies meanwhile


def die_half_way(send: Any, mesh: Mesh, member: int, key: Key, *more: Any) -> Any:
    """Tell ranks 0 and 1, but not rank 2."""
    if key.kind == Kind.COLLECTIVE and member == 2:
        with mesh.changed:
            mesh.changed.wait_for(lambda: not any(each.outgoing for each in mesh._connections.values()), 10)
        os.kill(os.getpid(), signal.SIGKILL)
    return send(mesh, member, key, *more)


def fail_when_another_rank_dies(folder: str) -> tuple[str, int, tuple[int, ...]]:
    with make_model(module=lambda: nn.Linear(4, 2), on_peer_loss="continue") as model:
        one_step(model)
        if model.rank == 3:
            mock.patch.object(Mesh, "send", functools.partialmethod(functools.partial(die_half_way, Mesh.send))).start()
        with pytest.raises((CheckpointError, ValueError)) as caught:
            gossip.save(model, folder, part=Part())
        for _ in range(3):
            one_step(model)
        model.global_avg()
        return str(caught.value), model.step, model.members


def test_a_save_that_has_failed_has_failed_for_all_who_are_left(tmp_path: Path) -> None:
    *told, _ = unsupervised.results_of(fail_when_another_rank_dies, str(tmp_path), world_size=4, silent=(3,))
    for text, step, members in told:
        assert "part.state_dict() failed: KeyError: 'position'" in text
        assert (step, members) == (4, (0, 1, 2))
