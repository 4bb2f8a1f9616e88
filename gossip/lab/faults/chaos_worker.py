"""One rank of a run under random faults, which trains and notes all messages that it sends and mixes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from io import BufferedIOBase, RawIOBase
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from gossip import GossipDataParallel
from gossip.exchange.edge_transport import EdgeExchange
from gossip.lab.experiments.datasets import digits
from gossip.lab.experiments.evaluation import evaluate_together
from gossip.lab.faults.fault import Fault, Kind
from gossip.lab.faults.injection import injected

_STEPS_BETWEEN_QUESTIONS = 100
_FAULTS_OF_A_LIFE = 6  # planned per process; fewer happen if one of them ends it
_BATCH_SIZE = 16
_LEARNING_RATE = 0.1
_WIDTH = 64
_PARTITION_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Chaos:
    """The settings of a run under faults.

    Attributes
    ----------
    seconds : float
        The duration of the training.
    ranks : int
        The number of ranks at the beginning.
    seed : int
    steps_between_faults : int
        The mean number of steps between faults of all ranks together.
    min_ranks : int
    timeout_s : float
        The ``timeout`` of the model.
    topology : str
    compression : str or None
    restarts : int
        The number of restarts of a worker.
    plan : tuple of (str, int, int)
        Kind, rank and step of planned faults, which replace the random ones.
    """

    seconds: float
    ranks: int
    seed: int
    steps_between_faults: int = 150
    min_ranks: int = 2
    timeout_s: float = 5.0
    topology: str = "one_peer_exponential"
    compression: str | None = None
    restarts: int = 10_000
    plan: tuple[tuple[Kind, int, int], ...] = ()

    def faults_of(self, member: int, first_step: int) -> list[Fault]:
        """Return the faults of a rank, given its member number."""
        if self.plan:
            duration_s = 1.5 * self.timeout_s
            return [
                Fault(kind, step=step, duration_s=duration_s if kind in ("freeze", "cut", "delay") else None)
                for kind, struck, step in self.plan
                if struck == member
            ]
        random = np.random.default_rng((self.seed, member))
        faults = [random_fault(random, first_step, self)]
        while len(faults) < _FAULTS_OF_A_LIFE:
            faults.append(random_fault(random, faults[-1].step, self))
        return faults


_changes = [0.0]  # accumulated change of the sum of all parameters by updates


class CountingSGD(torch.optim.SGD):
    """SGD that accumulates by how much its updates change the sum of all parameters."""

    def step(self, closure: Any = None) -> Any:
        """Update the parameters, and accumulate the change of their sum."""
        before = self._sum()
        found = super().step(closure)
        _changes[0] += self._sum() - before
        return found

    def _sum(self) -> float:
        groups = self.param_groups
        return sum(float(parameter.detach().sum()) for group in groups for parameter in group["params"])


class Notes:
    """Unbuffered files of JSON lines, so that the notes of a killed process are preserved.

    Each kind of note has one file per member number of the rank, such as ``events3.jsonl``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[str, int], BufferedIOBase | RawIOBase] = {}

    def write(self, kind: str, member: int, *content: Any) -> None:
        """Write one line."""
        if (kind, member) not in self._files:
            self._files[kind, member] = (self._folder / f"{kind}{member}.jsonl").open("ab", buffering=0)
        self._files[kind, member].write(json.dumps(content).encode() + b"\n")


def random_fault(random: np.random.Generator, first_step: int, chaos: Chaos) -> Fault:
    """Draw the next fault of a rank, some steps after ``first_step``."""
    step = first_step + 5 + int(random.geometric(1 / (chaos.steps_between_faults * chaos.ranks)))
    kind = random.choice(["kill", "kill", "kill", "freeze", "freeze for long", "leave", "cut", "delay"])
    bucket = int(random.integers(0, 2))
    num_bytes = int(random.integers(0, 4096)) if random.random() < 0.5 else None
    if kind == "kill":
        return Fault("kill", "sending", step, bucket, num_bytes)
    if kind == "leave":
        return Fault("leave", "sending", step, bucket)
    too_long = 1.5 * chaos.timeout_s
    if kind in ("cut", "delay"):
        return Fault(kind, step=step, duration_s=float(random.uniform(0.1, too_long if kind == "cut" else 2.0)))
    duration_s = float(random.uniform(0.05, 1.0)) if kind == "freeze" else too_long
    return Fault("freeze", "sending", step, bucket, num_bytes, duration_s)


def train(folder: str, chaos: Chaos, began_at: float) -> dict[str, Any] | None:
    """Train on digits until the time is over; called on all ranks of :func:`gossip.launch`, restarted ones included.

    Returns the averaged model's accuracy, the members and the steps at the end, or None if this rank has left.
    """
    torch.manual_seed(chaos.seed)
    data = digits()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10)).double()
    bucket_cap_mb = 8 * 64 * _WIDTH / 2**20  # gives two buckets
    model = GossipDataParallel(
        module,
        functools.partial(CountingSGD, lr=_LEARNING_RATE),
        chaos.topology,
        compression=chaos.compression,
        bucket_cap_mb=bucket_cap_mb,
        timeout=timedelta(seconds=chaos.timeout_s),
        on_peer_loss="continue",
        min_ranks=chaos.min_ranks,
        partition_timeout=_PARTITION_TIMEOUT_S,
    )
    notes = Notes(Path(folder))

    def tell(what: str, content: Mapping[str, Any]) -> None:
        notes.write("events", model.world.member, time.time(), what, content)

    tell("begins", {"step": model.step, "pid": os.getpid()})
    member = model.world.member
    random = np.random.default_rng((chaos.seed, member, 1))

    def may_happen(fault: Fault) -> bool:
        """Refuse a random fault if too few ranks would be left, should another rank fail at the same time."""
        happens = bool(chaos.plan) or len(model.members) > chaos.min_ranks + 2
        tell("fault" if happens else "no fault", asdict(fault))
        return happens

    members: tuple[int, ...] = ()
    inputs, targets = data.train_inputs.double(), data.train_targets
    with contextlib.ExitStack() as stack:
        stack.enter_context(_messages_noted(notes))
        stack.enter_context(injected(chaos.faults_of(member, model.step), may_happen))
        while True:
            if model.world.member != member:
                tell("comes back", {"from": member})
                member = model.world.member
            if model.members != members:
                members = model.members
                tell("members", {"step": model.step, "members": members})
            total, change = _sum(module), _changes[0]
            started_at = time.perf_counter()
            chosen = torch.from_numpy(random.integers(0, len(inputs), _BATCH_SIZE))
            loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
            loss.backward()
            took_s = time.perf_counter() - started_at
            if model.world.member == member:  # after a return under a new number, the values come from another rank
                update = _changes[0] - change
                notes.write("steps", member, model.step - 1, members, total, update, took_s, time.time(), loss.item())
            if model.step % _STEPS_BETWEEN_QUESTIONS == 0 and _is_over(model, began_at + chaos.seconds):
                break
        model.global_avg()
    found = evaluate_together(module, data.test_inputs.double(), data.test_targets, model.world)
    ended = {"accuracy": found.accuracy, "members": list(model.members), "steps": model.step}
    tell("ends", ended)
    model.close()
    return ended


def _sum(module: nn.Module) -> float:
    return sum(float(parameter.detach().sum()) for parameter in module.parameters())


def _is_over(model: GossipDataParallel, deadline: float) -> bool:
    """Return whether the time is over by the clock of any rank. Collective."""
    return b"\1" in model.world.gather_bytes(bytes([time.time() > deadline]), "asking whether the time is over")


@contextlib.contextmanager
def _messages_noted(notes: Notes) -> Iterator[None]:
    """Note the digest of each message that is sent or mixed within the block."""
    send, receive = EdgeExchange._send, EdgeExchange._receive

    def note_and_send(self: EdgeExchange, turn: Any) -> None:
        for place, message in turn.sent.items():
            notes.write("sent", self._world.member, *self._key()[1:], self._members[place], _digest(message))
        send(self, turn)

    def receive_and_note(self: EdgeExchange, *args: Any) -> Any:
        key = self._key()[1:]
        found = receive(self, *args)
        for place, message in found.items():
            notes.write("mixed", self._world.member, *key, self._members[place], _digest(message))
        return found

    with (
        mock.patch.object(EdgeExchange, "_send", note_and_send),
        mock.patch.object(EdgeExchange, "_receive", receive_and_note),
    ):
        yield


def _digest(message: torch.Tensor) -> str:
    data = message.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
