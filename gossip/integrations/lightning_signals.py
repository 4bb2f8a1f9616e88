"""Signals in a Trainer whose ranks wait for peers only."""

from __future__ import annotations

from types import FrameType
from typing import Any

from loguru import logger


def keep_signals_local(trainer: Any) -> None:
    """Let every rank follow the signals that it gets itself, without the others. Local.

    Lightning broadcasts in every batch whether rank 0 got SIGTERM, and once more in the signal's handler: every step
    would wait for rank 0, and a rank that alone gets the signal for a broadcast that nobody else makes. Schedulers,
    torchrun and Lightning's launcher send it to all ranks.

    To requeue a job of SLURM's, Lightning saves in the handler of another signal, wherever in a step the rank is.
    """
    connector = trainer._signal_connector

    def on_sigterm(number: int, _: FrameType | None) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(number)
        connector.received_sigterm = True

    def on_requeue(number: int, _: FrameType | None) -> None:
        logger.error(
            "rank {}: signal {}: the job is not requeued, because a checkpoint needs all ranks between two steps; "
            "requeue it in the batch script, save with ModelCheckpoint(every_n_train_steps=...) and resume with fit("
            'ckpt_path="last")',
            trainer.global_rank,
            number,
        )

    connector._sigterm_notifier_fn = on_sigterm
    connector._slurm_sigusr_handler_fn = on_requeue
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
