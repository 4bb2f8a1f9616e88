"""Ranks of a model that others join and leave."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loguru import logger
from mortal_ranks import TIMEOUT, Pair, flat, make_model, recorded, targets

from gossip import GossipDataParallel
from gossip.lab.faults.fault import Fault
from gossip.lab.faults.injection import injected
from gossip.parameters.flat_state import flatten
from gossip.parameters.plain_state import plain

NUM_MORE = 12
"""So many steps are made once everybody is there who was expected."""

_MOST_STEPS = 200_000


class Stay(NamedTuple):
    """What a rank tells.

    Attributes
    ----------
    member : int
    first_step : int
        0, or that at which it joined.
    values : list of Tensor
        By step from the first one on its parameters before it; then after the last one, and after the global average.
    digests : list of str
        Of parameters and the optimizer's state, likewise; the last is that after the last step.
    generations : list of (int, tuple of int)
        First steps and members.
    came : tuple of (int, int) or None
        Whose state it took over, and of which step.
    """

    member: int
    first_step: int
    values: list[torch.Tensor]
    digests: list[str]
    generations: list[tuple[int, tuple[int, ...]]]
    came: tuple[int, int] | None


def stay(
    folder: str,
    numel: int,
    expected: tuple[int, ...],
    ends: Mapping[int, Fault],
    leaves: tuple[int, ...],
    options: Mapping[str, Any],
    is_told: bool = False,
) -> Stay:
    """Train until the members have been ``expected``, and some steps more; those who leave do so half-way.

    ``ends`` says by rank where it ends; joining ranks are -1. With ``is_told`` it is SIGTERM that makes
    ranks leave.
    """
    joins = torch.distributed.get_world_size() == 1
    number = -1 if joins else torch.distributed.get_rank()
    came: list[tuple[int, int]] = []

    def listen(message: Any) -> None:
        found = re.search(r"joins at step \d+, with what rank (\d+) had at step (\d+)", str(message))
        if found:
            came.append((int(found[1]), int(found[2])))

    logger.add(listen, level="INFO")
    chosen: dict[str, Any] = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "bucket_cap_mb": numel * 8 / 2**20,
        "timeout": TIMEOUT,
        "on_peer_loss": "continue",
    }
    values: list[torch.Tensor] = []
    digests: list[str] = []
    generations: list[tuple[int, tuple[int, ...]]] = []
    with injected([ends[number]] if number in ends else []):
        model = GossipDataParallel(Pair(numel), **chosen | dict(options))
        member, first = model.world.member, model.step
        target = targets(member, numel)
        with recorded(Path(folder) / str(member)):

            def note() -> None:
                if not generations or model.members != generations[-1][1]:
                    generations.append((model.step, model.members))
                values.append(flat(model.module))
                digests.append(digest_of(model))

            last = _MOST_STEPS
            while model.step < last:
                note()
                if model.members == expected and last == _MOST_STEPS:
                    last = model.step + NUM_MORE
                if member in leaves and model.step == last - NUM_MORE // 2:
                    if is_told:
                        os.kill(os.getpid(), signal.SIGTERM)
                        with pytest.raises(SystemExit, match="143"):
                            model(target)
                    else:
                        model.leave()
                    return Stay(member, first, values, digests, generations, came[0] if came else None)
                model(target).backward()
            note()
            model.global_avg()
            values.append(flat(model.module))
            model.close()
    return Stay(member, first, values, digests, generations, came[0] if came else None)


def stay_in_join() -> tuple[int, tuple[int, ...]]:
    """Steps and members in the end, of ranks with other numbers of batches, in one block of join(); one joins them."""
    with make_model(16, {"topology": "ring"}) as model:
        with model.join():
            last = _MOST_STEPS
            while model.step < last:
                if len(model.members) == 3 and last == _MOST_STEPS:
                    last = model.step + NUM_MORE + 5 * model.world.member
                model(targets(model.world.member, 16)).backward()
        return model.step, model.members


def digest_of(model: GossipDataParallel) -> str:
    """Of parameters and the optimizer's state."""
    state = plain([dict(model.module.named_parameters()), model.optimizer.state_dict()], "the state")
    text, values = flatten(state)
    return hashlib.sha256(text.encode() + values.numpy().tobytes()).hexdigest()
