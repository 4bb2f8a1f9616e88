"""Ranks of a model that goes on without those that die, and ways to die at a named place."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from gossip import GossipDataParallel

RATE = 0.1
TIMEOUT = timedelta(seconds=20)


class Death(NamedTuple):
    """Where a rank ends.

    Attributes
    ----------
    place : str
        "sending": when it hands over a bucket's messages of a step, or has sent so much of one; "agreeing": when it has
        proposed who is left; "together": in the n-th exchange of what all ranks do together, ``step`` being n;
        "listening", "calling": before it says where it listens, and before it connects.
    step, bucket : int
    num_bytes : int or None
        That have been sent of the message's frame; None: before the messages are handed over.
    signal : int
    """

    place: str = "sending"
    step: int = 0
    bucket: int = 0
    num_bytes: int | None = None
    signal: int = signal.SIGKILL


class Course(NamedTuple):
    """What a rank that is left tells.

    Attributes
    ----------
    values : list of Tensor
        By step, its parameters before it; then after the last one, and after the global average.
    epochs : list of (int, tuple of int)
        First steps and members.
    lost : dict of int to str
        Whom it has lost, and why.
    longest_s : float
        Of its backward passes.
    """

    values: list[torch.Tensor]
    epochs: list[tuple[int, tuple[int, ...]]]
    lost: dict[int, str]
    longest_s: float


@contextmanager
def mortal(death: Death | None) -> Iterator[None]:
    """Within the block this process ends there."""
    if death is None:
        yield
        return
    from gossip.communication.survivors.agreement import Agreement
    from gossip.communication.survivors.edge_transport import EdgeTransport
    from gossip.communication.survivors.living_world import LivingWorld
    from gossip.communication.survivors.mesh import Mesh
    from gossip.communication.survivors.peer_connection import Kind, Outgoing

    end = functools.partial(os.kill, os.getpid(), death.signal)
    start, set_once, exchange = EdgeTransport.start, Agreement._set_once, LivingWorld._exchange
    send = Outgoing.send
    count = [0]

    def start_or_end(self: Any, *args: Any, step: int, bucket: int) -> Any:
        if (step, bucket) >= (death.step, death.bucket):  # in some rounds a rank has no peer
            end()
        return start(self, *args, step=step, bucket=bucket)

    def send_and_end(self: Any, connection: socket.socket) -> bool:
        if self.key[:3] >= (Kind.MESSAGE, death.step, death.bucket) and self.key.kind == Kind.MESSAGE:
            connection.settimeout(TIMEOUT.total_seconds())
            connection.sendall(b"".join(self._left)[: death.num_bytes])
            end()
        return send(self, connection)

    def set_once_and_end(self: Any, key: str, value: Any) -> Any:
        found = set_once(self, key, value)
        end()
        return found

    def exchange_or_end(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] > death.step:
            end()
        return exchange(self, *args)

    patches: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "sending": (EdgeTransport, "start", start_or_end),
        "agreeing": (Agreement, "_set_once", set_once_and_end),
        "together": (LivingWorld, "_exchange", exchange_or_end),
        "listening": (LivingWorld, "_connect", lambda _: end()),
        "calling": (Mesh, "connect", lambda *_: end()),
    }
    if death.num_bytes is not None:
        patches["sending"] = (Outgoing, "send", send_and_end)
    with mock.patch.object(*patches[death.place]):
        yield


Dropped = dict[tuple[int, int], list[int]]
"""By step and bucket, whose messages (by their ranks at the beginning) a rank did not mix in."""


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Within the block it is noted whose messages are not mixed in, also for those who will end."""
    from gossip.communication.survivors.edge_transport import EdgeExchange

    finish = EdgeExchange.finish

    def finish_and_record(self: Any) -> None:
        finish(self)
        if self.dropped:
            members = sorted(self._members[place] for place in self.dropped)
            with file.open("a") as notes:
                notes.write(json.dumps([self._step, self._bucket, members]) + "\n")

    with mock.patch.object(EdgeExchange, "finish", finish_and_record):
        yield


def read_dropped(file: Path) -> Dropped:
    lines = file.read_text().splitlines() if file.exists() else []
    return {(step, bucket): members for step, bucket, members in map(json.loads, lines)}


def make_model(numel: int, options: Mapping[str, Any]) -> GossipDataParallel:
    """Two parameters of a bucket each, of zeros."""
    chosen: dict[str, Any] = {
        "optimizer": functools.partial(torch.optim.SGD, lr=RATE),
        "bucket_cap_mb": numel * 8 / 2**20,
        "timeout": TIMEOUT,
        "on_peer_loss": "continue",
    }
    return GossipDataParallel(Pair(numel), **chosen | dict(options))


class Pair(nn.Module):
    """Two parameters, and half the squared distance of each from its target."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(numel, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(numel, dtype=torch.float64))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((self.first - target[0]).square().sum() + (self.second - target[1]).square().sum())


def train(folder: str, numel: int, num_steps: int, deaths: Mapping[int, Death], options: Mapping[str, Any]) -> Course:
    """Every rank's loss is half its squared distance from its own target.

    Whose messages rank r does not mix in is in ``folder/r``, for :func:`read_dropped`.
    """
    rank = torch.distributed.get_rank()
    target = targets(rank, numel)
    values: list[torch.Tensor] = []
    longest_s = 0.0
    with mortal(deaths.get(rank)), recorded(Path(folder) / str(rank)):
        model = make_model(numel, options)
        epochs: list[tuple[int, tuple[int, ...]]] = []

        def note(step: int) -> None:
            if not epochs or model.members != epochs[-1][1]:
                epochs.append((step, model.members))
            values.append(flat(model.module))

        for step in range(num_steps):
            note(step)
            model(target).backward()
            if not options.get("step_in_backward", True):
                model.optimizer.step()
                model.optimizer.zero_grad()
            stats = model.stats()
            longest_s = max(longest_s, stats.backward_s if stats is not None else 0.0)
        note(num_steps)
        model.global_avg()
        note(num_steps + 1)
        lost = dict(model.world.mesh.lost)
        model.close()
    return Course(values, epochs, lost, longest_s)


def flat(module: Any) -> torch.Tensor:
    """Copies of both parameters, [2, numel]."""
    return torch.stack([parameter.detach().clone() for parameter in module.parameters()])


def targets(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
