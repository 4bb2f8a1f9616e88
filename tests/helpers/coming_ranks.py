"""Ranks of a model that others join and leave, and ways to end on the way."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from loguru import logger
from mortal_ranks import TIMEOUT, Pair, flat, recorded, targets

from gossip import GossipDataParallel
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
    epochs : list of (int, tuple of int)
        First steps and members.
    came : tuple of (int, int) or None
        Whose state it took over, and of which step.
    """

    member: int
    first_step: int
    values: list[torch.Tensor]
    digests: list[str]
    epochs: list[tuple[int, tuple[int, ...]]]
    came: tuple[int, int] | None


@contextmanager
def ending(place: str | None) -> Iterator[None]:
    """Within the block this process ends there.

    "giving": after the first of a state's pieces; "taking": when it has the first one; "asking": before it asks to be
    let in; "proposing": when it has; "entering": when it has been.
    """
    if place is None:
        yield
        return
    from gossip.communication.survivors import handing_over
    from gossip.communication.survivors.agreement import Agreement
    from gossip.communication.survivors.handing_over import StateGiver
    from gossip.communication.survivors.newcomer import Newcomer

    end = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    send, pieces, set_once, admitted = (
        StateGiver._send,
        handing_over._pieces,
        Agreement._set_once,
        Newcomer.be_admitted,
    )

    def send_and_end(self: Any, member: int, piece: int, content: torch.Tensor) -> None:
        if piece == 1:
            end()
        send(self, member, piece, content)

    def take_and_end(*args: Any) -> list[torch.Tensor]:
        found = pieces(*args)
        end()
        return found

    def set_once_and_end(self: Any, key: str, value: Any) -> Any:
        found = set_once(self, key, value)
        end()
        return found

    def enter_and_end(self: Any) -> Any:
        epoch = admitted(self)
        end()
        return epoch

    patches: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "giving": (StateGiver, "_send", send_and_end),
        "taking": (handing_over, "_pieces", take_and_end),
        "asking": (Newcomer, "be_admitted", lambda _: end()),
        "proposing": (Agreement, "_set_once", set_once_and_end),
        "entering": (Newcomer, "be_admitted", enter_and_end),
    }
    with mock.patch.object(*patches[place]):
        yield


def stay(
    folder: str,
    numel: int,
    expected: tuple[int, ...],
    ends: Mapping[int, str],
    leaves: tuple[int, ...],
    options: Mapping[str, Any],
    is_told: bool = False,
) -> Stay:
    """Train until the members have been ``expected``, and some steps more; those who leave do so half-way.

    ``ends`` says by rank where it ends; that of newcomers, which are -1. With ``is_told`` it is SIGTERM that makes
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
    epochs: list[tuple[int, tuple[int, ...]]] = []
    with ending(ends.get(number)):
        model = GossipDataParallel(Pair(numel), **chosen | dict(options))
        member, first = model.world.member, model.step
        target = targets(member, numel)
        with recorded(Path(folder) / str(member)):

            def note() -> None:
                if not epochs or model.members != epochs[-1][1]:
                    epochs.append((model.step, model.members))
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
                    return Stay(member, first, values, digests, epochs, came[0] if came else None)
                model(target).backward()
            note()
            model.global_avg()
            values.append(flat(model.module))
            model.close()
    return Stay(member, first, values, digests, epochs, came[0] if came else None)


def digest_of(model: GossipDataParallel) -> str:
    """Of parameters and the optimizer's state."""
    state = plain([dict(model.module.named_parameters()), model.optimizer.state_dict()], "the state")
    text, values = flatten(state)
    return hashlib.sha256(text.encode() + values.numpy().tobytes()).hexdigest()
