"""What Lightning's Trainer evaluates, finds and ends with by gossip."""

from __future__ import annotations

import os
import re
import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_modules import Net, batches, flat, trainer_of
from loguru import logger

from gossip import launch
from gossip.integrations.lightning import GossipStrategy


def validated(options: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Validation after every other batch, in the middle of what is accumulated."""
    module = Net()
    strategy = GossipStrategy("ring", **options)
    trainer = trainer_of(strategy, val_check_interval=2, accumulate_grad_batches=3, limit_val_batches=1, max_epochs=1)
    trainer.fit(module, batches(), batches())
    return module.trained, module.validated, [float(trainer.callback_metrics["validated"]), module.num_steps]


class Stopped(Net):
    """Whose second validation raises."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if len(self.validated) == 2:
            raise RuntimeError("stopped here")


def stopped() -> tuple[bool, bool, bool]:
    module = Stopped()
    trainer = trainer_of(GossipStrategy("ring"), val_check_interval=2, limit_val_batches=1, max_epochs=1)
    with pytest.raises(RuntimeError, match="stopped here"):
        trainer.fit(module, batches(), batches())
    is_own = torch.equal(flat(module), module.trained[-1])
    module.zero_grad()
    module.net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    has_gradients = all(parameter.grad is not None for parameter in module.parameters())
    return is_own, trainer.model is module, has_gradients


class Signalled(Net):
    """That gets SIGUSR1 and SIGTERM, on all ranks, before its third batch."""

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)


class RequeuesNothing(SLURMEnvironment):
    """As a job of SLURM's has it whose signal is SIGUSR1, but of the ranks that are there."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=True, requeue_signal=signal.SIGUSR1)

    def validate_settings(self, *_: Any, **__: Any) -> None:
        """Whatever is asked for."""


def signalled() -> tuple[int, list[str]]:
    module = Signalled()
    texts: list[str] = []
    sink = logger.add(lambda message: texts.append(str(message)), level="ERROR", format="{message}")
    place = {name: str(dist.get_rank()) for name in ("SLURM_PROCID", "SLURM_LOCALID")}
    of_slurm = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0", **place}
    with mock.patch.dict(os.environ, of_slurm), pytest.raises(SIGTERMException):
        trainer_of(GossipStrategy("ring"), plugins=RequeuesNothing()).fit(module, batches())
    logger.remove(sink)
    return len(module.trained), texts


def everything() -> dict[str, Any]:
    return {
        "validated": validated({}),
        "own": validated({"evaluate_averaged": False}),
        "stopped": stopped(),
        "signalled": signalled(),
    }


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return launch(everything, world_size=2)


def test_validation_is_of_the_average(outcomes: list[dict[str, Any]]) -> None:
    (trained, seen, found), (of_second, seen_by_second, found_by_second) = (ranks["validated"] for ranks in outcomes)
    assert found == found_by_second
    assert found[1] == 2
    assert len(seen) == 2
    for number, (average, other) in enumerate(zip(seen, seen_by_second, strict=True)):
        assert torch.equal(average, other)
        expected = (trained[2 * number + 1] + of_second[2 * number + 1]) / 2
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=0)


def test_training_goes_on_as_if_nobody_had_looked(outcomes: list[dict[str, Any]]) -> None:
    for ranks in outcomes:
        assert all(map(torch.equal, ranks["validated"][0], ranks["own"][0]))


def test_validation_may_be_of_each_replica(outcomes: list[dict[str, Any]]) -> None:
    for ranks in outcomes:
        trained, seen, _ = ranks["own"]
        assert torch.equal(seen[1], trained[3])
    assert not torch.equal(outcomes[0]["own"][1][1], outcomes[1]["own"][1][1])


def test_exception_leaves_each_rank_its_replica_in_a_plain_module(outcomes: list[dict[str, Any]]) -> None:
    assert [ranks["stopped"] for ranks in outcomes] == [(True, True, True)] * 2


def test_signal_ends_training_after_the_batch(outcomes: list[dict[str, Any]]) -> None:
    for rank, ranks in enumerate(outcomes):
        num_batches, (text,) = ranks["signalled"]
        assert num_batches == 3
        assert re.match(f"rank {rank}: signal {signal.SIGUSR1:d}: the job is not requeued", text)
