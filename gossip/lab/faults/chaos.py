"""A training under random faults, in which ranks note all messages, and every step what it changed."""

import functools
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from unittest import mock

import numpy as np
import torch
from pydantic import Field, PositiveFloat
from torch import nn

from gossip import COMPRESSIONS, GossipDataParallel
from gossip.exchange import message_notes
from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Records, Write
from gossip.lab.experiments.datasets import digits
from gossip.lab.experiments.evaluation import evaluate
from gossip.lab.experiments.training_methods import AllRanks, grouped
from gossip.lab.experiments.validated_models import ConfigurationError, OneOf
from gossip.lab.faults.chaos_report import ChaosResult, draw, examine, in_words
from gossip.lab.faults.injection import KINDS, Fault, injected
from gossip.launching import DEFAULT_TIMEOUT

_STEPS_BETWEEN_QUESTIONS = 100
_FAULTS_OF_A_LIFE = 6  # planned per process; fewer happen if one of them ends it
_BATCH_SIZE = 16
_WIDTH = 64
_PARTITION_TIMEOUT_S = 60.0
_PLANNED = rf"^({'|'.join(KINDS)}):\d+@\d+$"


class ChaosSettings(BenchmarkSettings):
    """The settings of a run under faults."""

    world_size: int = Field(6, ge=2, description="ranks at the beginning")
    local_size: int = Field(1, ge=1, description="ranks of a shard group, which hold a replica together")
    shard: Literal["fsdp", "optimizer", "none"] = Field(
        "fsdp", description="how a shard group holds it: fsdp, optimizer or none"
    )
    seconds: PositiveFloat = Field(60.0, description="how long they train")
    seed: int = Field(0, ge=0, description="of the faults")
    steps_between_faults: int = Field(150, ge=1, description="on average, of all ranks together")
    min_ranks: int = Field(2, ge=1, description="with fewer, or fewer shard groups, the run ends")
    timeout_s: PositiveFloat = Field(5.0, description="of the model, in seconds")
    topology: str = Field("one_peer_exponential", description="of the ranks")
    compression: Annotated[str, OneOf(COMPRESSIONS.available())] | None = Field(None, description="of messages")
    restarts: int = Field(10_000, ge=0, description="of a worker that fails")
    record: str | None = Field(None, description="folder for a recording that virtual workers can repeat")
    plan: tuple[Annotated[str, Field(pattern=_PLANNED)], ...] = Field(
        (), alias="faults", description="KIND:RANK@STEP of planned faults, instead of random ones"
    )

    deadline: float = math.inf
    """When they stop, by ``time.time()``; of a case."""

    def cases(self) -> Iterator[tuple[str, Self]]:
        """Yield the one case, whose time begins now."""
        if self.record is not None and self.local_size > 1:
            raise ConfigurationError(f"record={self.record} is of single ranks: leave it out, or set local_size=1")
        yield "chaos", self.model_copy(update={"deadline": time.time() + self.seconds})

    def faults_of(self, member: int, first_step: int) -> list[Fault]:
        """Return the faults of a rank, given its member number."""
        if self.plan:
            lasts_s = dict.fromkeys(("freeze", "cut", "delay"), 1.5 * self.timeout_s)
            planned = [re.split("[:@]", text) for text in self.plan]
            own = [(kind, int(step)) for kind, struck, step in planned if int(struck) == member]
            return [Fault(kind, step=step, duration_s=lasts_s.get(kind)) for kind, step in own]
        random = np.random.default_rng((self.seed, member))
        faults: list[Fault] = []
        while len(faults) < _FAULTS_OF_A_LIFE:
            faults.append(self._random(random, faults[-1].step if faults else first_step))
        return faults

    def _random(self, random: np.random.Generator, first_step: int) -> Fault:
        """Draw the next fault of a rank, some steps after ``first_step``."""
        step = first_step + 5 + int(random.geometric(1 / (self.steps_between_faults * self.world_size)))
        kind = random.choice(["kill", "kill", "kill", "freeze", "freeze for long", "leave", "cut", "delay"])
        bucket = int(random.integers(0, 2))
        num_bytes = int(random.integers(0, 4096)) if random.random() < 0.5 else None
        if kind in ("kill", "leave"):
            return Fault(kind, "sending", step, bucket, num_bytes if kind == "kill" else None)
        too_long = 1.5 * self.timeout_s
        if kind in ("cut", "delay"):
            return Fault(kind, step=step, duration_s=float(random.uniform(0.1, too_long if kind == "cut" else 2.0)))
        duration_s = float(random.uniform(0.05, 1.0)) if kind == "freeze" else too_long
        return Fault("freeze", "sending", step, bucket, num_bytes, duration_s)


class Chaos(Benchmark[ChaosSettings, ChaosResult]):
    """Ranks train on digits while they are killed, frozen, cut off and told to leave, and come back."""

    settings = ChaosSettings
    title = "A run under faults"

    def launch_options(self, case: ChaosSettings) -> dict[str, Any]:
        """Let the others go on without a rank that fails, and start it, or its shard group, again."""
        of_groups = {"local_size": case.local_size, "restart": case.restarts}
        return {"on_peer_loss": "continue", "timeout": DEFAULT_TIMEOUT, **of_groups}

    def work(self, case: ChaosSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Train until the time is over, and write what happens as :mod:`.chaos_report` reads it."""
        _Training(case, write).run()

    def result(self, case: ChaosSettings, records: Records) -> ChaosResult:
        return examine(records, case.local_size)

    def facts(self, settings: ChaosSettings) -> list[str]:
        size = settings.local_size
        return [
            f"{settings.world_size} ranks{f' in shard groups of {size} ({settings.shard})' if size > 1 else ''}, "
            f"{settings.topology}, compression {settings.compression}, seed {settings.seed}, {settings.seconds:g} s; "
            f"`min_ranks={settings.min_ranks}`."
        ]

    def sections(self, results: Sequence[ChaosResult]) -> list[str]:
        return list(map(in_words, results))

    def draw(self, settings: ChaosSettings, results: Sequence[ChaosResult], folder: Path) -> None:
        draw(results[0], folder / "course.svg", settings.local_size)

    def is_sound(self, results: Sequence[ChaosResult]) -> bool:
        """Return whether no message was torn, and somebody trained to the end."""
        return results[0].num_ended > 0 and not results[0].num_messages_torn


class _CountingSGD(torch.optim.SGD):
    """SGD that accumulates by how much its updates change the sum of all parameters."""

    change = 0.0

    def step(self, closure: Any = None) -> Any:
        """Update the parameters, and accumulate the change of their sum."""
        before = _sum(self)
        found = super().step(closure)
        _CountingSGD.change += _sum(self) - before
        return found


def _sum(optimizer: torch.optim.Optimizer) -> float:
    """Return the sum of what a rank trains: of all parameters, or of its shard of them."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return sum(float(parameter.detach().sum()) for parameter in parameters)


class _Training:
    """The training of one rank, whose number among the members changes when it comes back."""

    def __init__(self, case: ChaosSettings, write: Write) -> None:
        self._case, self._write, self._lock = case, write, threading.Lock()
        torch.manual_seed(case.seed)
        self._module = nn.Sequential(nn.Flatten(), nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10)).double()
        size = case.local_size
        of_ranks = {"partition_timeout": _PARTITION_TIMEOUT_S} if size == 1 else grouped(self._module, size, case.shard)
        self._model = GossipDataParallel(
            self._module,
            functools.partial(_CountingSGD, lr=0.1),
            case.topology,
            compression=case.compression,
            bucket_cap_mb=8 * 64 * _WIDTH / size / 2**20,  # gives two buckets
            timeout=timedelta(seconds=case.timeout_s),
            on_peer_loss="continue",
            min_ranks=case.min_ranks,
            record=case.record,
            **of_ranks,
        )
        assert self._model.optimizer is not None
        world: Any = self._model.world
        self._optimizer = self._model.optimizer
        self._all_ranks = world if size == 1 else AllRanks(world, world.shard_group)

    def _tell(self, what: str, content: Any) -> None:
        with self._lock:
            self._write({"member": self._model.world.member, "at": time.time(), what: content})

    def _may_happen(self, fault: Fault) -> bool:
        """Refuse a random fault if too few ranks would be left, should another rank fail at the same time."""
        happens = bool(self._case.plan) or len(self._model.members) >= self._case.min_ranks + 2
        if happens:
            self._tell("fault", asdict(fault) | {"in_step": self._model.step, "members": self._ranks()})
        return happens

    def _ranks(self) -> list[int]:
        """Return the ranks of all replicas that train."""
        size = self._case.local_size
        return [rank for group in self._model.members for rank in range(group * size, (group + 1) * size)]

    def run(self) -> None:
        """Train until the time is over. Collective."""
        model, data = self._model, digits()
        self._tell("begins", {"step": model.step, "pid": os.getpid()})
        member, members = model.world.member, tuple[int, ...]()
        random = np.random.default_rng((self._case.seed, member, 1))
        inputs, targets = data.train_inputs.double(), data.train_targets
        noted = mock.patch.object(message_notes, "write", self._tell)
        with noted, injected(self._case.faults_of(member, model.step), self._may_happen):
            while True:
                if model.world.member != member:
                    self._tell("comes back", {"from": member})
                    member = model.world.member
                if model.members != members:
                    members = model.members
                    ranks = self._ranks()
                    self._tell("members", {"step": model.step, "members": ranks})
                total, change = _sum(self._optimizer), _CountingSGD.change
                started_at = time.perf_counter()
                chosen = torch.from_numpy(random.integers(0, len(inputs), _BATCH_SIZE))
                loss = nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
                loss.backward()
                if model.world.member == member:  # otherwise the values come from another rank
                    made = {"step": model.step - 1, "members": ranks, "sum": total, "loss": loss.item()}
                    made |= {"update": _CountingSGD.change - change, "took_s": time.perf_counter() - started_at}
                    self._tell("trained", made)
                if model.step % _STEPS_BETWEEN_QUESTIONS == 0 and self._is_over():
                    break
            model.global_avg()
        found = evaluate(self._module, data.test_inputs.double(), data.test_targets, model.world)
        self._tell("ends", {"accuracy": found.accuracy, "members": self._ranks(), "steps": model.step})
        model.close()

    def _is_over(self) -> bool:
        """Return whether the time is over by the clock of any rank. Collective."""
        is_over = bytes([time.time() > self._case.deadline])
        return b"\1" in self._all_ranks.gather_bytes(is_over, "asking whether the time is over")
