"""Ranks of a model that goes on without those that die."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from gossip import GossipDataParallel
from gossip.lab.faults.fault import Fault

RATE = 0.1
TIMEOUT = timedelta(seconds=20)


class Course(NamedTuple):
    """What a rank that is left tells.

    Attributes
    ----------
    values : list of Tensor
        By step, its parameters before it; then after the last one, and after the global average.
    generations : list of (int, tuple of int)
        First steps and members.
    lost : dict of int to str
        Whom it has lost, and why.
    longest_s : float
        Of its backward passes.
    """

    values: list[torch.Tensor]
    generations: list[tuple[int, tuple[int, ...]]]
    lost: dict[int, str]
    longest_s: float


Dropped = dict[tuple[int, int], list[int]]
"""By step and bucket, whose messages (by their ranks at the beginning) a rank did not mix in."""


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Within the block it is noted whose messages are not mixed in, also for those who will end."""
    from gossip.exchange.edge_transport import EdgeExchange

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


def train(folder: str, numel: int, num_steps: int, deaths: Mapping[int, Fault], options: Mapping[str, Any]) -> Course:
    """Every rank's loss is half its squared distance from its own target.

    With ``shares_memory=False`` among the options all messages go over sockets. Whose messages rank r does not mix in
    is in ``folder/r``, for :func:`read_dropped`.
    """
    from gossip.elastic import elastic_world
    from gossip.lab.faults.injection import injected  # it loads what a test shows not to be loaded otherwise

    rank = torch.distributed.get_rank()
    target = targets(rank, numel)
    values: list[torch.Tensor] = []
    longest_s = 0.0
    options = dict(options)
    shares_memory = options.pop("shares_memory", True)
    with (
        mock.patch.object(elastic_world, "can_share", return_value=shares_memory),
        injected([deaths[rank]] if rank in deaths else []),
        recorded(Path(folder) / str(rank)),
    ):
        model = make_model(numel, options)
        generations: list[tuple[int, tuple[int, ...]]] = []

        def note(step: int) -> None:
            if not generations or model.members != generations[-1][1]:
                generations.append((step, model.members))
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
    return Course(values, generations, lost, longest_s)


def flat(module: Any) -> torch.Tensor:
    """Copies of both parameters, [2, numel]."""
    return torch.stack([parameter.detach().clone() for parameter in module.parameters()])


def targets(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
